"""What a lookup finds among measurements, what the pipeline makes of it, and what comes with the package."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fusegen
from benchmarks import topk
from fusegen import database
from fusegen.compiling import compiler_version
from fusegen.database import (
    Database,
    Measurement,
    choose,
    graph_digest,
    lookup,
    problem_of,
    read_shipped,
    write_lines,
)
from fusegen.errors import MissingError, RequestError
from fusegen.language.types import DTYPES
from fusegen.pipeline import build, compile
from fusegen.planner import candidates
from fusegen.planner.model import Layout
from fusegen.targets import H200, target
from tests.measurements import FAILED, FOUND, LATER, NAMES, ROW, normed
from tests.specs import ALL as SPECS
from tests.specs import storage_types
from tests.tools import needs_compiler

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes with the package is measured anew from time to time; tests say themselves what is shipped."""
    ship(monkeypatch)


def ship(monkeypatch: pytest.MonkeyPatch, *rows: Measurement) -> None:
    by_graph: dict[str, tuple[Measurement, ...]] = {}
    for row in rows:
        by_graph[row.graph] = (*by_graph.get(row.graph, ()), row)
    monkeypatch.setattr(lookup, "shipped", lambda graph: by_graph.get(graph, ()))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "not" / "there" / "yet" / "tuned.db"


# ---------------------------------------------------------------- looking up


def choice_with(place: Path, *rows: Measurement, found: Any = FOUND) -> database.Choice:
    Database(place).record(rows)
    return choose(found, database=Database(place))


def test_without_measurements_the_cost_model_chooses(place: Path) -> None:
    choice = choose(FOUND, database=Database(place))
    assert choice.plans == FOUND.plans
    assert choice.hit is None
    assert choice.steps[:2] == ("your database: nothing", "the shipped database: nothing")
    assert str(choice) == "the cost model's first: nothing like it was measured"
    assert not place.exists()


def test_the_steps_in_their_order(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer alone, then all that are worse than it beside it: the better founded one is taken."""
    here: Any = {"compiler": compiler_or_none()}
    h100: Any = {"target": "cuda:h100"}
    answers: list[tuple[str, bool, dict[str, Any], str]] = [
        (NAMES[1], False, {}, "your database"),
        (NAMES[2], True, {}, "shipped"),
        (NAMES[3], False, {"rows": 128}, "your database"),
        (NAMES[4], True, {"rows": 32}, "shipped"),
        (NAMES[5], False, {"rows": 256}, "your database"),
        (NAMES[6], True, {**h100}, "from h100; shipped"),
        (NAMES[7], False, {**h100, "rows": 16}, "from h100; your database"),
    ]
    rows = [(replace(ROW, configuration=name, **here, **changes), shipped) for name, shipped, changes, _ in answers]
    for number, (name, _, _, words) in enumerate(answers):
        place.unlink(missing_ok=True)
        worse = rows[number:]
        ship(monkeypatch, *(row for row, shipped in worse if shipped))
        choice = choice_with(place, *(row for row, shipped in worse if not shipped))
        assert choice.plan.configuration == name
        assert sorted(p.configuration for p in choice.plans) == sorted(NAMES)
        assert str(choice) == f"measured 10.0 us, 0.50 of the copy rate, at M=64 N=4096; {words}"
        assert choice.steps[-1].endswith(str(choice))


def compiler_or_none() -> str:
    try:
        return compiler_version("cuda")
    except MissingError:
        pytest.skip("needs NVRTC")


@pytest.mark.parametrize(
    "row",
    [
        replace(ROW, rows=512),  # three buckets away
        replace(ROW, cols=8192),
        replace(ROW, layout="split"),
        replace(ROW, graph="0" * 64),
        replace(ROW, target="cuda:a100", arch="sm_80"),
        replace(ROW, target="cuda:b200", arch="sm_100a"),
        replace(ROW, target="hip:mi300x", arch="gfx942"),
        replace(ROW, target="cuda:h9000"),
        replace(ROW, validated=False),
        FAILED,
    ],
)
def test_what_does_not_answer(place: Path, row: Measurement) -> None:
    assert choice_with(place, row).hit is None


def test_among_answers_like_tools_come_first_then_the_share(place: Path) -> None:
    here: Any = {"compiler": compiler_or_none()}
    choice = choice_with(
        place,
        replace(ROW, configuration=NAMES[1], share=0.9, **here),
        replace(ROW, configuration=NAMES[2], share=0.8, time_us=1.0, **here),
        replace(ROW, configuration=NAMES[3], share=0.99, compiler="nvrtc 1.0"),
        replace(ROW, configuration=NAMES[4], share=0.99, fusegen="0.0.1", **here),
    )
    assert choice.plan.configuration == NAMES[1]
    place.unlink()
    older = choice_with(place, replace(ROW, compiler="nvrtc 1.0"))
    assert older.plan.configuration == NAMES[2]
    assert f"; with nvrtc 1.0, fusegen {ROW.fusegen}; your database" in str(older)


def test_a_winner_that_is_no_candidate_is_passed_over(place: Path) -> None:
    gone = replace(ROW, configuration="rowwise tensor-memory 640/640 3x8", share=0.99)
    choice = choice_with(place, gone, ROW)
    assert choice.plan.configuration == ROW.configuration
    assert choice.steps[0] == f"your database: {gone.configuration} measured best, and is no candidate any more"


def test_what_won_at_other_sizes_is_doubted_where_the_estimate_is_against_it(place: Path) -> None:
    """At its own sizes a measurement is worth more than any estimate; 127 rows may be another matter than 64."""
    first = FOUND.plans[0].cost.time_us
    slow = next(plan for plan in FOUND.plans if plan.cost.time_us > lookup.DOUBTED * first)
    near = next(plan for plan in FOUND.plans[1:] if plan.cost.time_us < lookup.DOUBTED * first)
    row = replace(ROW, configuration=slow.configuration)
    assert choice_with(place, row).plan is slow
    place.unlink()
    elsewhere = replace(row, sizes="M=127 N=4096")
    choice = choice_with(place, elsewhere)
    assert choice.hit is None
    assert f"{slow.configuration} measured best at M=127 N=4096; here it should take" in choice.steps[0]
    assert choice_with(place, elsewhere, replace(elsewhere, configuration=near.configuration)).plan is near


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gemm_bias_gelu", {"M": 4096, "N": 4096, "K": 4096}),
        ("qkv", {"M": 8, "D": 4096, "Q": 4096, "G": 1024}),
        ("next_tokens", {"B": 64, "V": 50257, "K": 50}),
    ],
)
def test_products_and_selections_are_looked_up_as_well(
    name: str, sizes: dict[str, int], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all that is a constant of their kernels: another depth or another k is another problem."""
    graph = SPECS[name].at(**sizes).graph
    found = candidates(graph, H200)
    wanted = found.plans[1].configuration
    problem = problem_of(found)
    assert problem is not None
    row = replace(
        ROW, graph=problem.graph, cols=problem.cols, rows=problem.rows, layout=problem.layout, configuration=wanted,
        sizes=graph.sizes_text(), chain=f"{name}  {graph.signature}",
    )  # fmt: skip
    ship(monkeypatch, row)
    choice = choose(found, database=Database(place))
    assert choice.plan.configuration == wanted
    assert choice.hit is not None
    assert choice.hit.shipped
    other = {**sizes, {"gemm_bias_gelu": "K", "qkv": "D", "next_tokens": "K"}[name]: 48}
    assert choose(candidates(SPECS[name].at(**other).graph, H200), database=Database(place)).hit is None


def test_what_failed_here_is_taken_from_nobody(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ship(monkeypatch, ROW)
    first = replace(FAILED, configuration=NAMES[0], rows=1 << 20)
    choice = choice_with(place, FAILED, first)
    assert choice.hit is None
    assert f"the shipped database: {NAMES[2]} measured best, and hung here" in choice.steps
    assert [p.configuration for p in choice.plans[-2:]] == [NAMES[0], NAMES[2]], "they are tried last"
    healed = choice_with(place, replace(ROW, at=LATER, share=0.4))
    assert healed.plan.configuration == NAMES[2]


def test_measurements_can_be_switched_off(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice_with(place, ROW).hit is not None
    assert choose(FOUND, tuned=False, database=Database(place)).plans == FOUND.plans
    for word in ("off", "0", "No"):
        monkeypatch.setenv("FUSEGEN_TUNED", word)
        off = choose(FOUND, database=Database(place))
        assert off.plans == FOUND.plans
        assert str(off) == "the cost model's first: measurements are switched off"
    monkeypatch.setenv("FUSEGEN_TUNED", "on")
    assert choose(FOUND, database=Database(place)).hit is not None
    monkeypatch.setenv("FUSEGEN_TUNED", "of")
    with pytest.raises(RequestError, match="FUSEGEN_TUNED=of is neither on nor off"):
        choose(FOUND, database=Database(place))


@given(st.lists(st.builds(
    lambda name, share, rows, gpu, ok: replace(ROW if ok else FAILED, configuration=name, rows=rows, target=gpu)
    if not ok else replace(ROW, configuration=name, rows=rows, target=gpu, share=share),
    st.sampled_from([*NAMES, "gone"]), st.floats(0.01, 1.0), st.sampled_from([16, 32, 64, 128, 1024]),
    st.sampled_from(["cuda:h200", "cuda:h100", "cuda:sm_90", "cuda:a100"]), st.booleans(),
), max_size=12))  # fmt: skip
def test_a_lookup_only_orders_candidates(rows: list[Measurement]) -> None:
    """Whatever a database says: the same candidates, each once."""

    class Remembered(Database):
        def rows(self, graph: str | None = None) -> list[Measurement]:
            return rows

    choice = choose(FOUND, database=Remembered(Path("/nowhere")))
    assert sorted(map(id, choice.plans)) == sorted(map(id, FOUND.plans))
    if choice.hit:
        assert choice.plan.configuration == choice.hit.row.configuration


def test_the_log_says_how_it_was_chosen(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fusegen.database")
    choice_with(place, ROW)
    assert f"normed for cuda:h200: your database: {ROW.configuration}, measured 10.0 us" in caplog.text


# ---------------------------------------------------------------- in the pipeline


def test_build_takes_the_measured_plan_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_or_none()
    monkeypatch.setenv("FUSEGEN_DATABASE", str(place))
    Database(place).record([ROW])
    built = build(normed.graph, H200)
    assert built.source.plan.configuration == ROW.configuration
    assert built.choice.hit is not None
    assert fusegen.plan(normed, H200).configuration == ROW.configuration
    assert fusegen.plan(normed, H200, tuned=False).configuration == NAMES[0]
    untuned = build(normed.graph, H200, tuned=False)
    assert untuned.source.plan.configuration == NAMES[0]
    assert untuned.choice.hit is None
    other = build(normed.graph, H200, Layout(split=True))
    assert other.choice.hit is None, "another layout is another problem"


def test_the_gate_still_applies(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_or_none()
    monkeypatch.setenv("FUSEGEN_DATABASE", str(place))
    Database(place).record([ROW])
    refused = []

    def gate(resources: Any) -> str:
        refused.append(resources)
        return "spills in this test" if len(refused) == 1 else ""

    monkeypatch.setattr("fusegen.pipeline.gate", gate)
    built = build(normed.graph, H200)
    assert built.verdicts[0].plan.configuration == ROW.configuration
    assert not built.verdicts[0].passed
    assert built.source.plan.configuration == NAMES[0], "then the cost model's own"


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_whichever_is_measured_best_computes_the_same(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSEGEN_DATABASE", str(place))
    Database(place).record([replace(ROW, configuration=name)])
    kernel = compile(normed, H200, on="emulator")
    assert kernel.plan.configuration == name
    assert kernel.choice.hit is not None
    assert kernel.report.ok


# ---------------------------------------------------------------- what is shipped


def test_what_is_shipped_is_sound_and_current() -> None:
    """Every row reads, the file is as it is written, and each winner still is a candidate of a chain that is known.

    `python benchmarks/tune_shipped.py` on the GPU measures it anew.
    """
    text = (ROOT / "fusegen" / "data" / "tuned.jsonl").read_text("utf-8")
    rows = read_shipped()
    assert rows
    assert write_lines(rows) == text
    assert all(row.may_win for row in rows)
    known = [spec.with_dtype(DTYPES[kind]) for spec in SPECS.values() for kind in storage_types(spec)]
    known += [*SPECS.values(), *(chain for chain, _ in topk.SHAPES)]
    for row in rows:
        sizes = {name: int(size) for name, size in (pair.split("=") for pair in row.sizes.split())}
        graphs = [spec.at(**sizes).graph for spec in known if spec.name == row.chain.split()[0]]
        found = candidates(next(g for g in graphs if graph_digest(g) == row.graph), target(row.target))
        assert problem_of(found) == row.problem
        names = [plan.configuration for plan in found.plans]
        assert row.configuration in names, f"{row.chain} at {row.sizes} has no candidate {row.configuration} any more"


def test_a_damaged_line_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "tuned.jsonl"
    place.write_text(f"{{\n{ROW.line()}\n")
    monkeypatch.setattr(lookup, "SHIPPED", place)
    assert read_shipped() == [ROW]
    assert "line 1" in caplog.text
    place.unlink()
    assert read_shipped() == []


def test_only_lines_of_the_graph_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(ROW, graph="0" * 64)
    place = tmp_path / "tuned.jsonl"
    place.write_text(f"{other.line()}\n{{\n{ROW.line()}\n{ROW.line()[:-1]}\n")
    monkeypatch.setattr(lookup, "SHIPPED", place)
    assert read_shipped(ROW.graph) == [ROW]
    assert "line 4" in caplog.text
    assert "line 2" not in caplog.text
