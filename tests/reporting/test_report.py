"""`fusegen report`, and what chains, plans and reports are in a notebook."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fusegen
from fusegen import pipeline
from fusegen.cli import app
from fusegen.cli.benching import bench_facts
from fusegen.database import choose
from fusegen.errors import ValidationError
from fusegen.language import notebook
from fusegen.measuring.benchmark import bench
from fusegen.planner import candidates
from fusegen.reporting.fragments import fragment
from fusegen.reporting.pages import page
from fusegen.reporting.state import load
from fusegen.runtime import finding
from fusegen.targets import H200
from tests.conftest import ROOT
from tests.pretend import PretendGpu
from tests.reporting.states import PROGRAM, ROWS, Page, changed, state
from tests.specs import SHIPPED
from tests.tools import needs_both, untyped

SPEC = str(ROOT / f"specs/{ROWS}.py")


def run(*given: str) -> Result:
    return CliRunner().invoke(app, ["report", *given])


def test_a_page_and_its_state_are_written(tmp_path: Path) -> None:
    out, saved = tmp_path / "r.html", tmp_path / "s.json"
    result = run(SPEC, "--target", "cuda:h200", "--no-validate", "-o", str(out), "--save", str(saved))
    assert result.exit_code == 0, result.output
    assert f"wrote {saved}" in result.stdout
    assert f"wrote {out}" in result.stdout
    assert "nobody asked for it" in Page(out.read_text()).text
    again = tmp_path / "again.html"
    assert run(str(saved), "-o", str(again)).exit_code == 0
    assert again.read_text() == out.read_text(), "the page of a state is the page that the state was kept of"


def test_its_json_is_the_state(tmp_path: Path) -> None:
    out, saved = tmp_path / "r.html", tmp_path / "s.json"
    result = run(SPEC, "--target", "cuda:h200", "--no-validate", "-o", str(out), "--save", str(saved), "--json")
    document = json.loads(result.stdout)
    assert document["ok"] is True
    assert document["state"] == json.loads(saved.read_text())


def test_two_states_are_compared(tmp_path: Path) -> None:
    before, after = state(ROWS, PROGRAM), changed(state(ROWS), lambda d: d["chains"][0].update(time_us=1.5))
    before.save(tmp_path / "before.json")
    after.save(tmp_path / "after.json")
    out = tmp_path / "r.html"
    result = run(str(tmp_path / "before.json"), str(tmp_path / "after.json"), "-o", str(out))
    assert result.exit_code == 0, result.output
    assert "then 1.5 us" in result.stdout
    assert f"{PROGRAM}: only in before" in result.stdout
    assert "before beside after" in Page(out.read_text()).text
    facts = json.loads(
        run(*(str(tmp_path / f"{n}.json") for n in ("before", "after")), "-o", str(out), "--json").stdout
    )
    assert facts["gone"] == [PROGRAM]
    (both,) = facts["both"]
    assert both["differs"] is True
    assert both["figures"][0]["after"] == 1.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a.json", SPEC], "is a report's state, and"),
        (["a.json", "b.json", "c.json"], "compares two states, and here are 3"),
        (["a.json"], "can't be read"),
        (["a.json", "b.json", "--save", "c.json"], "--save keeps one state"),
        (["a.json", "--target", "cuda:h200"], "--target is for specs"),
        (["a.json", "b.json", "--bench", "c.json"], "--bench is for specs"),
        ([SPEC, "--save", "state.txt"], "ends in .json"),
        ([SPEC, "-o", "nowhere/r.html"], "there is no folder nowhere"),
        ([SPEC, "-o", "."], "is a folder"),
        ([SPEC, "--bench", "nothing.json"], "can't be read"),
    ],
)
def test_what_is_refused(given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*given)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert not (tmp_path / "report.html").exists()


@needs_both
def test_a_kernel_that_is_wrong_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValidationError("it disagrees with its reference")

    monkeypatch.setattr(pipeline, "compile", fails)
    out, saved = tmp_path / "r.html", tmp_path / "s.json"
    result = run(SPEC, "--target", "cuda:h200", "-o", str(out), "--save", str(saved))
    assert result.exit_code == 1
    assert "it disagrees with its reference" in result.stdout
    assert "it disagrees with its reference" in Page(out.read_text()).text
    assert load(saved).chains[0].validation.ok is False


def test_measured_times_and_bytes_are_shown(tmp_path: Path) -> None:
    from tests.reporting.test_state import write_bench

    out = tmp_path / "r.html"
    result = run(SPEC, "--target", "cuda:h200", "--no-validate", "-o", str(out), "--bench", str(write_bench(tmp_path)))
    assert result.exit_code == 0, result.output
    text = Page(out.read_text()).text
    assert "50.5 µs" in text
    assert "read 135 B of 134 B predicted" in text
    assert "torch is missing" in text


@needs_both
@pytest.mark.parametrize("name", [ROWS, PROGRAM])
def test_what_bench_writes_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on a pretended GPU, whose clock is known."""
    pretended = PretendGpu()
    monkeypatch.setattr(finding, "find", lambda target, on="auto", check=None: pretended)
    monkeypatch.setattr("fusegen.measuring.counters.USUAL_PLACE", str(tmp_path / "nowhere"))
    sizes = {size: 64 for size in SHIPPED[name].graph.sizes}
    chain = SHIPPED[name].at(**sizes)
    found = bench(fusegen.compile(chain, "cuda:h200", validate=False), peers=False, repeats=4)
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(bench_facts([found], None)))
    (shown,) = fusegen.report(chain, target="cuda:h200", validate=False, bench=file).state.chains
    assert shown.bench is not None
    assert shown.measured_us == found.own.us
    assert [entry.name for entry in shown.bench.entries] == [entry.name for entry in found.entries]
    assert shown.bench.uncounted == (found.counters.reason if found.counters else None)
    times = {entry.name: entry.us for entry in found.entries if entry.kind in ("kernel", "fusegen")}
    for kernel in shown.kernels:
        assert kernel.measured is not None
        assert kernel.measured.us == times[kernel.name if name == PROGRAM else "fusegen"]
    (other,) = fusegen.report(SHIPPED[name], target="cuda:h200", validate=False, bench=file).state.chains
    assert other.bench is None, "it is of other sizes"


def test_a_time_that_the_database_has_is_shown_with_its_source() -> None:
    chain = SHIPPED["dropout_residual_layernorm"]
    choice = choose(candidates(chain.graph, H200))
    assert choice.hit is not None
    (kernel,) = state(chain.name).chains[0].kernels
    assert kernel.measured is not None
    assert kernel.measured.us == choice.hit.row.time_us
    assert choice.hit.row.at in kernel.measured.by
    assert "µs" in Page(page(state(chain.name))).text


def test_a_time_at_other_sizes_is_not_this_ones() -> None:
    choice = choose(candidates(SHIPPED[ROWS].graph, H200))
    assert choice.hit is not None
    assert choice.hit.row.sizes != SHIPPED[ROWS].graph.sizes_text()
    (kernel,) = state(ROWS).chains[0].kernels
    assert kernel.measured is None


def test_of_several_chains_one_that_has_no_plan_stops_no_other(tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    specs = [str(ROOT / f"specs/{name}.py") for name in ("copy", "fp8_gemm")]
    result = run(*specs, "--target", "cuda:sm_80", "--no-validate", "-o", str(out))
    assert result.exit_code == 2
    assert "fp8_gemm" in result.stderr
    assert "copy" in Page(out.read_text()).text


# ---------------------------------------------------------------- notebooks


def inside(drawn: str | None) -> Page:
    """The page in the frame that a notebook is given."""
    assert drawn is not None
    frame = Page(drawn)
    assert frame.tags == ["iframe"]
    found = {name: value for _, name, value in frame.attributes}
    assert "allow-same-origin" not in found["sandbox"]
    page = Page(found["srcdoc"])
    assert not page.wrong
    return page


def test_a_chain_draws_itself() -> None:
    found = inside(SHIPPED[ROWS]._repr_html_())
    assert "x_plus_bias = add" in found.text
    assert not found.scripts
    assert not found.links


@pytest.mark.parametrize("name", [ROWS, PROGRAM])
def test_a_plan_draws_itself(name: str) -> None:
    plan = fusegen.plan(SHIPPED[name], "cuda:h200")
    found = inside(plan._repr_html_())
    assert "expected" in found.text
    assert SHIPPED[name].graph.signature in found.text


@needs_both
def test_a_validation_draws_itself() -> None:
    kernel = fusegen.compile(SHIPPED[ROWS].at(M=3, N=64), "cuda:h200", on="emulator")
    found = inside(kernel.report._repr_html_())
    assert all(case.name in found.text for case in kernel.report.cases)
    assert not found.scripts


def test_a_report_draws_itself(tmp_path: Path) -> None:
    made = fusegen.report(SHIPPED[ROWS], target="cuda:h200", validate=False)
    found = inside(made._repr_html_())
    assert len(found.scripts) == 1
    made.write(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == made.html
    made.save(tmp_path / "s.json")
    assert load(tmp_path / "s.json") == made.state


def test_nothing_draws_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="is no chain, no plan"):
        fragment(1)
    monkeypatch.setattr(notebook, "drawer", None)
    assert SHIPPED[ROWS]._repr_html_() is None


def test_a_name_in_a_notebook_is_escaped_twice() -> None:
    drawn = SHIPPED[ROWS]._repr_html_()
    assert drawn is not None
    assert "<svg" not in drawn
    assert "<svg" in html.unescape(drawn)


def test_what_is_no_chain_is_refused() -> None:
    with pytest.raises(fusegen.FusegenError, match="is no chain"):
        fusegen.report(untyped(1))
