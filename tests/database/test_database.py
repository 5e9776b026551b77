"""The tuning database: keys, configurations, rows, and the file under many processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusegen import bf16, chain, database, dims, f16, f32
from fusegen import ops as F
from fusegen.database import (
    Database,
    Measurement,
    Unreadable,
    Unsound,
    better,
    bucket,
    choose,
    family,
    graph_digest,
    problem_of,
    read_lines,
    write_lines,
)
from fusegen.database.keys import layout_text
from fusegen.database.rows import contradict, current
from fusegen.database.store import insert
from fusegen.errors import MissingError, OutputError, RequestError
from fusegen.language.spec import Chain
from fusegen.language.types import DTYPES
from fusegen.planner import candidates
from fusegen.planner.model import Layout
from fusegen.planner.products.factors import lacking
from fusegen.targets import A100, H100, H200, L40S, MI250, MI300A, MI300X, Target, target
from tests.chains import random_chain
from tests.measurements import FAILED, FOUND, LATER, NAMES, ROW, normed
from tests.sizes import sizes_at
from tests.specs import ALL as SPECS
from tests.specs import SHIPPED, storage_types

ROOT = Path(__file__).resolve().parents[2]
M, N, K = dims("M N K")


# ---------------------------------------------------------------- keys


def renamed(weights: bf16[K, N], factor: bf16[N]) -> bf16[K, N]:
    """Another name, other names inside, other lines, other sizes."""
    return F.rmsnorm(weights, factor)


def test_names_places_and_sizes_do_not_matter() -> None:
    assert graph_digest(chain(K=3, N=17)(renamed).graph) == graph_digest(normed.graph)


def same_twice(x: bf16[M, N], gain: bf16[N]) -> bf16[M, N]:
    return F.rmsnorm(x, gain) + 0.0 * F.mean(x) + 0.0 * F.mean(x)


def same_once(x: bf16[M, N], gain: bf16[N]) -> bf16[M, N]:
    y = F.rmsnorm(x, gain)
    mean = 0.0 * F.mean(x)
    return y + mean + mean


def test_what_is_planned_alike_is_alike() -> None:
    assert graph_digest(chain(M=4, N=8)(same_twice).graph) == graph_digest(chain(M=4, N=8)(same_once).graph)


def test_what_is_computed_does_matter() -> None:
    def minus(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
        return x - y

    def swapped(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
        return y - x

    def plus_zero(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
        return x - y + 0.0

    def minus_zero(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
        return x - y + -0.0

    def shared(x: f32[M, N], y: f32[N]) -> f32[M, N]:
        return x - y

    def a_row(x: f32[M, N], y: f32[M, 1]) -> f32[M, N]:
        return x - y

    def stored(x: f32[M, N], y: f32[M, N]) -> f16[M, N]:
        return F.cast(x - y, f16)

    def both(x: f32[M, N], y: f32[M, N]) -> tuple[f32[M, N], f32[M, N]]:
        return x - y, y - x

    graphs = [chain(M=4, N=8)(f).graph for f in (minus, swapped, plus_zero, minus_zero, shared, a_row, stored, both)]
    graphs.append(graphs[0].with_dtype(bf16))
    assert len({graph_digest(graph) for graph in graphs}) == len(graphs)


def test_every_spec_has_a_key_of_its_own() -> None:
    typed = [spec.with_dtype(DTYPES[kind]) for spec in SPECS.values() for kind in storage_types(spec)]
    digests = {graph_digest(spec.graph) for spec in typed}
    assert len(digests) >= len(typed) - 2, "log_softmax has one output type that may not change with its operands"


def test_keys_are_the_same_in_every_process() -> None:
    code = (
        "from fusegen.database import graph_digest; from fusegen.language.spec import load_chains\n"
        "print([graph_digest(c.graph) for c in load_chains('specs')])"
    )
    seen = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
        )
        seen.add(done.stdout)
    assert seen == {f"{[graph_digest(spec.graph) for spec in SHIPPED.values()]}\n"}


@pytest.mark.parametrize(
    ("rows", "lower"),
    [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (4095, 2048), (4096, 4096), (4097, 4096), (2**40, 2**40)],
)
def test_buckets(rows: int, lower: int) -> None:
    assert bucket(rows) == lower


def test_a_flat_chain_counts_elements() -> None:
    one = problem_of(candidates(SPECS["swiglu_elementwise"].graph.at(M=4, N=1000), H200))
    other = problem_of(candidates(SPECS["swiglu_elementwise"].graph.at(M=500, N=8), H200))
    assert one is not None
    assert one == other
    assert (one.cols, one.rows) == (1, 2048)


def test_what_can_not_be_planned_is_no_problem() -> None:
    assert problem_of(replace(FOUND, plans=())) is None


def test_layouts_name_operands_by_number() -> None:
    layouts = [
        Layout(),
        Layout(split=True),
        Layout(unaligned=frozenset(["out", "x"])),
        Layout(True, frozenset(["gain"])),
    ]
    assert [layout_text(layout, normed.graph) for layout in layouts] == [
        "contiguous", "split", "unaligned=0,2", "split unaligned=1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "others"),
    [
        (H200, ("cuda:sm_90", "cuda:h100")), (H100, ("cuda:h200", "cuda:sm_90")), (A100, ()), (L40S, ()),
        (target("cuda:sm_90"), ("cuda:h200", "cuda:h100")), (MI300X, ("hip:mi325x", "hip:mi300a")),
        (MI300A, ("hip:mi325x", "hip:mi300x")), (MI250, ("hip:mi210", "hip:mi250x")),
    ],
    ids=str,
)  # fmt: skip
def test_families(gpu: Target, others: tuple[str, ...]) -> None:
    assert family(gpu) == others


# ---------------------------------------------------------------- configurations


LAYOUTS = (Layout(), Layout(split=True))
LENGTHS = (1, 31, 128, 1000, 4096, 4097, 50257)


@pytest.mark.by_values("spec", "gpu")  # how a plan is named is the same for each GPU
@pytest.mark.parametrize("gpu", [H200, MI300X], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_a_configuration_names_one_candidate(spec: Chain, gpu: Target, request: pytest.FixtureRequest) -> None:
    """Each length in one layout; with --all, in each."""
    for place, cols in enumerate(LENGTHS):
        graph = spec.graph.at(**sizes_at(spec.graph, cols))
        unaligned = Layout(unaligned=frozenset(t.name for t in (*graph.inputs, *graph.outputs) if t.shape))
        every = (*LAYOUTS, unaligned)
        for layout in every if request.config.getoption("--all") else every[place % 3 :: 3]:
            names = [plan.configuration for plan in candidates(graph, gpu, layout).plans]
            assert names or lacking(graph, gpu)
            assert len(set(names)) == len(names)


@given(st.integers(0, 10**6), st.sampled_from(LENGTHS))
def test_a_configuration_names_one_candidate_of_any_chain(seed: int, cols: int) -> None:
    graph = random_chain(seed).graph.at(N=cols)
    names = [plan.configuration for plan in candidates(graph, H200).plans]
    assert len(set(names)) == len(names)


def test_configurations_stay_what_they_are() -> None:
    """Databases are full of these texts: a change here forgets every measurement there is."""
    assert "rowwise registers 512/512 1x8" in NAMES
    flat = [plan.configuration for plan in candidates(SPECS["copy"].graph, H200).plans]
    assert "elementwise none 128/128 1x4" in flat
    tiles = [plan.configuration for plan in candidates(SPECS["bias_relu"].graph, H200).plans]
    assert "elementwise none 128/128 1x8 col_tiles=4" in tiles


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("rowwise rolling 1024/8192 16x8 cluster=8 kept=14", "rowwise persistent 1024/8192 16x8 cluster=8 kept=14"),
        ("held registers 512/512 4x8 keeps=nothing", "topk_small_k registers 512/512 4x8 keeps=nothing"),
        ("dense registers 128/128 8x8 keeps=nothing", "topk_large_k registers 128/128 8x8 keeps=nothing"),
        ("topk stream 512/512 4x8 turn=4", "topk stream 512/512 4x8 turn=4"),
        ("gemm 8x16x64 1x1 4 teams=8 cluster=2 group=1", "gemm 8x16x64 1x1 4 slice_k=8 cluster=2 group=1"),
        ("gemm 128x256x64 2x4 4 spread", "gemm 128x256x64 2x4 4 persistent"),
        ("wgmma turns 128x128 6 group=16", "wgmma pingpong 128x128 6 group=16"),
        ("wgmma halves 128x64 8 shares=2", "wgmma cooperative 128x64 8 split_k=2"),
    ],
)
def test_configurations_of_earlier_versions_are_read_in_todays_words(earlier: str, now: str) -> None:
    assert current(earlier) == current(now) == now
    (row,) = read_lines(replace(ROW, configuration=earlier).line())
    assert row == replace(ROW, configuration=now)


# ---------------------------------------------------------------- rows


def test_rows_survive_text() -> None:
    rows = [ROW, FAILED, replace(ROW, time_us=1 / 3, chain="größe  f16[M, N]")]
    text = write_lines(rows)
    assert sorted(read_lines(text), key=repr) == sorted(rows, key=repr)
    assert write_lines(reversed(rows)) == text, "the order is the rows' own"
    assert text.count("\n") == len(rows)


def changed(**values: Any) -> dict[str, Any]:
    return {**json.loads(ROW.line()), **values}


UNSOUND: Mapping[str, Any] = {
    "no table": [1],
    "a field lacks": {k: v for k, v in json.loads(ROW.line()).items() if k != "share"},
    "a short hash": changed(graph="abc"),
    "no row": changed(cols=0),
    "a bucket that is none": changed(rows=100),
    "a huge number": changed(cols=10**30),
    "a truth as a number": changed(repeats=True),
    "a text as a number": changed(time_us="10"),
    "a time that is none": changed(time_us=float("nan")),
    "an endless time": changed(time_us=float("inf")),
    "a time of very many digits": changed(time_us=int("9" * 401)),
    "a time beyond all": changed(time_us=1e308),
    "a share of next to nothing": changed(share=5e-324),
    "a negative time": changed(time_us=-1.0),
    "ok without a time": changed(time_us=0.0),
    "ok without launches": changed(repeats=0),
    "a status of nobody": changed(status="great"),
    "a failure that is validated": changed(status="hung", validated=True),
    "a target of nobody": changed(target="../../etc"),
    "control characters": changed(reason="\x1b[2J"),
    "a novel": changed(reason="x" * 5000),
    "an empty configuration": changed(configuration=""),
    "a date of nobody": changed(at="yesterday"),
    "a flag that is none": changed(validated="yes"),
}


@pytest.mark.parametrize("wrong", UNSOUND)
def test_what_was_never_measured_is_no_row(wrong: str) -> None:
    (found,) = read_lines(json.dumps(UNSOUND[wrong]))
    assert isinstance(found, Unsound)
    assert str(found).startswith("line 1: ")


def test_a_number_that_python_does_not_read_is_no_row() -> None:
    text = json.dumps(changed()).replace(f'"time_us": {ROW.time_us}', f'"time_us": {"9" * 5000}')
    (found,) = read_lines(text)
    assert str(found) == "line 1: time_us is inf, and wanted is 0 or a number from 1e-12 to 1e+12"


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "null", "\ufeff", '{"graph": NaN}'])
def test_what_is_no_json_is_no_row(text: str) -> None:
    found = list(read_lines(text))
    assert all(isinstance(row, Unsound) for row in found)
    assert found


@pytest.mark.parametrize(
    ("new", "newer_wins"),
    [
        (replace(ROW, at=LATER, time_us=9.0), True),
        (replace(ROW, at=LATER, repeats=15), True),
        (replace(ROW, at=LATER, repeats=14), False),  # founded on less than half as many launches
        (replace(ROW, at=LATER, validated=False), False),
        (replace(FAILED, at=LATER), True),  # what no longer works is known from the newest row
    ],
)
def test_the_newer_row_wins_unless_it_is_founded_worse(new: Measurement, newer_wins: bool) -> None:
    assert better(ROW, new) is better(new, ROW) is (new if newer_wins else ROW)
    if not new.ok:
        assert better(new, replace(ROW, at="2028-01-01T00:00:00Z")).ok, "and what works again too"


def test_of_equally_old_rows_one_is_chosen_whatever_the_order() -> None:
    other = replace(ROW, time_us=11.0)
    assert better(ROW, other) == better(other, ROW)


def test_contradictions() -> None:
    assert contradict(ROW, replace(ROW, share=0.52)) == ""
    assert contradict(ROW, replace(ROW, share=0.6)) == "0.50 and 0.60 of the copy rate"
    assert contradict(ROW, FAILED) == "ok and hung"


# ---------------------------------------------------------------- the file


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "not" / "there" / "yet" / "tuned.db"


def test_what_is_recorded_comes_back(place: Path) -> None:
    kept = Database(place)
    assert kept.rows() == []
    assert not place.parent.exists(), "reading makes no file"
    with pytest.raises(RequestError, match="there is no database at"):
        kept.need()
    other = replace(FAILED, configuration=NAMES[1])
    kept.record([ROW, other])
    assert kept.rows() == Database(place).rows(ROW.graph) == sorted([ROW, other], key=lambda r: r.configuration)
    assert kept.rows("0" * 64) == []
    kept.record([replace(ROW, time_us=1 / 3)])
    assert {row.time_us for row in kept.rows()} == {0.0, 1 / 3}
    assert len(list(place.parent.iterdir())) == 1, "neither a journal nor a lock is left behind"


def test_rows_of_earlier_versions_are_found_and_kept_once(place: Path) -> None:
    """A candidate that has another name now, measured before it got it, and once more since."""
    kept = Database(place)
    earlier, again = (
        replace(ROW, configuration="wgmma turns 128x128 6"),
        replace(ROW, configuration="wgmma halves 64x64 8"),
    )
    kept.record([ROW])
    with closing(sqlite3.connect(place)) as connection, connection:
        values = [
            earlier.values,
            again.values,
            replace(again, configuration="wgmma cooperative 64x64 8", time_us=9.0).values,
        ]
        connection.executemany(f"INSERT INTO measurements VALUES ({', '.join('?' * len(values[0]))})", values)
    assert "wgmma pingpong 128x128 6" in {row.configuration for row in kept.rows()}
    merged = kept.merge([replace(earlier, configuration="wgmma pingpong 128x128 6")])
    assert merged.same == 1
    found = {row.configuration: row.time_us for row in kept.rows()}
    assert len(kept.rows()) == len(found) == 3
    assert found["wgmma cooperative 64x64 8"] == 9.0


def test_replacing_forgets_what_was_measured_with_these_tools(place: Path) -> None:
    kept = Database(place)
    old, others = replace(ROW, configuration=NAMES[1]), [replace(ROW, compiler="nvrtc 12.9"), replace(ROW, rows=128)]
    kept.record([old, *others])
    kept.replace(ROW.problem, ROW.tools, [ROW])
    assert set(kept.rows()) == {ROW, *others}


def test_merging(place: Path) -> None:
    kept = Database(place)
    kept.record([ROW, replace(ROW, rows=128), replace(ROW, rows=256)])
    merged = kept.merge(
        [
            ROW,
            replace(ROW, rows=128, at=LATER, time_us=9.9, share=0.505),
            replace(FAILED, rows=256, at="2020-01-01T00:00:00Z"),
            replace(ROW, rows=512),
        ]
    )
    assert (merged.added, merged.replaced, merged.kept, merged.same) == (1, 1, 1, 1)
    assert [(one.status, other.status, why) for one, other, why in merged.conflicts] == [("ok", "hung", "ok and hung")]
    assert len(kept.rows()) == 4
    assert kept.merge(kept.rows()).same == 4


@given(st.lists(st.sampled_from([
    replace(ROW, configuration=name, at=at, repeats=repeats, time_us=us)
    for name in NAMES[:2] for at in ("2026-01-01T00:00:00Z", LATER) for repeats in (10, 15, 30) for us in (9.0, 10.0)
]), max_size=8))  # fmt: skip
def test_merging_twice_changes_nothing(rows: list[Measurement]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        kept = Database(Path(folder) / "tuned.db")
        kept.merge(rows)
        once = kept.rows()
        again = kept.merge(once)
        assert kept.rows() == once
        assert again.same == len(once)


PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.database.test_database"])  # imported once, not once a process


def write_many(place: str, number: int) -> int:
    """One process of many: rows of its own, and one that all of them fight for."""
    kept = Database(Path(place))
    for turn in range(6):
        kept.record(
            [replace(ROW, rows=1 << number, time_us=1.0 + turn), replace(ROW, rows=1 << 50, time_us=1.0 + number)]
        )
        assert {row.rows for row in kept.rows()} >= {1 << number, 1 << 50}
    kept.merge([replace(ROW, rows=1 << number, at=LATER, time_us=100.0)])
    return number


def test_many_processes_at_once(place: Path) -> None:
    """24 of them, from the first moment on: the file is made once, and no row is lost."""
    with ProcessPoolExecutor(24, mp_context=PROCESSES) as pool:
        assert sorted(pool.map(write_many, [str(place)] * 24, range(24))) == list(range(24))
    rows = {row.rows: row.time_us for row in Database(place).rows()}
    assert rows.pop(1 << 50) in range(1, 25)
    assert rows == {1 << number: 100.0 for number in range(24)}


def write_until_killed(place: str) -> None:
    number = 0
    while True:
        number += 1
        Database(Path(place)).record([replace(ROW, configuration=f"{n}", repeats=number) for n in range(50)])


def test_a_killed_writer_leaves_whole_rows(place: Path) -> None:
    """Its 50 rows change together or not at all, whenever it is killed."""
    for _ in range(5):
        writer = PROCESSES.Process(target=write_until_killed, args=(str(place),))
        writer.start()
        while not Database(place).rows():
            time.sleep(0.01)
        time.sleep(random.random() / 5)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        rows = Database(place).rows()
        assert len(rows) == 50
        assert len({row.repeats for row in rows}) == 1
        Database(place).record([])
    assert not list(place.parent.glob("*damaged*"))


def sqlite_file(place: Path, *statements: str) -> None:
    place.unlink(missing_ok=True)
    connection = sqlite3.connect(place)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


DAMAGE: Mapping[str, Callable[[Path], object]] = {
    "text": lambda place: place.write_text("these are not the measurements that you look for\n" * 100),
    "zeros": lambda place: place.write_bytes(bytes(8192)),
    "cut short": lambda place: place.write_bytes(place.read_bytes()[:5000]),
    "a page in the middle": lambda place: place.write_bytes(
        place.read_bytes()[:20480] + b"\xff" * 4096 + place.read_bytes()[24576:]
    ),
    "noise": lambda place: place.write_bytes(place.read_bytes()[:100] + random.Random(0).randbytes(12000)),
    "somebody else's": lambda place: sqlite_file(place, "CREATE TABLE bookmarks (url)"),
    "of a format to come": lambda place: sqlite_file(
        place, "CREATE TABLE measurements (all_new)", "PRAGMA application_id = 1718056046", "PRAGMA user_version = 2"
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_said_and_set_aside(
    place: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEGEN_DATABASE", str(place))
    kept = Database()
    kept.record([replace(ROW, configuration=f"{n}") for n in range(300)])
    assert place.stat().st_size > 40_000
    DAMAGE[damage](place)
    before = place.read_bytes()
    with pytest.raises(Unreadable, match=r"tuned\.db is "):
        kept.rows()
    assert choose(FOUND, database=kept).hit is None
    assert "serve instead" in caplog.text
    with pytest.raises(Unreadable, match="it is left as it is"):
        Database(place).record([ROW])
    assert place.read_bytes() == before, "neither reading changes it, nor who names a file that is none"
    kept.record([ROW])
    assert kept.rows() == [ROW]
    assert place.with_name("tuned.db.damaged-1").read_bytes() == before
    assert "and a new database is begun" in caplog.text
    DAMAGE["text"](place)
    kept.merge([ROW])
    assert place.with_name("tuned.db.damaged-2").exists()
    assert kept.rows() == [ROW]


def write_after_damage(place: str, number: int) -> None:
    os.environ["FUSEGEN_DATABASE"] = place
    Database().record([replace(ROW, rows=1 << number)])


def test_many_processes_find_damage_at_once(place: Path) -> None:
    """One of them sets the file aside; nobody sets aside what another one has begun."""
    place.parent.mkdir(parents=True)
    DAMAGE["text"](place)
    with ProcessPoolExecutor(20, mp_context=PROCESSES) as pool:
        list(pool.map(write_after_damage, [str(place)] * 20, range(20)))
    assert len(Database(place).rows()) == 20
    assert len(list(place.parent.glob("*.damaged-*"))) == 1


def test_a_file_that_is_moved_while_it_is_written_is_begun_anew(place: Path) -> None:
    """As another process does that found it damaged: SQLite calls it read-only then."""
    kept = Database(place)
    kept.record([ROW])
    other = replace(ROW, rows=8)
    calls: list[int] = []

    def change(connection: sqlite3.Connection) -> None:
        calls.append(1)
        if len(calls) == 1:
            place.rename(place.with_name("aside.db"))
        insert(connection, [other])

    kept.write(change)
    assert len(calls) == 2
    assert kept.rows() == [other]
    assert Database(place.with_name("aside.db")).rows() == [ROW]


@pytest.mark.parametrize("times", [1, 9])
def test_an_error_of_the_disk_is_one_when_it_comes_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """As where a file is moved aside while it is opened."""
    connect, left = Database.connect, iter(range(times))

    def failing(self: Database, create: bool = False) -> sqlite3.Connection:
        if next(left, None) is None:
            return connect(self, create)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error

    monkeypatch.setattr(Database, "connect", failing)
    if times == 1:
        Database(place).record([ROW])
        assert Database(place).rows() == [ROW]
    else:
        with pytest.raises(OutputError, match="can't be written: disk I/O error"):
            Database(place).record([ROW])


def test_an_empty_file_is_an_empty_database(place: Path) -> None:
    place.parent.mkdir(parents=True)
    place.touch()
    assert Database(place).rows() == []
    Database(place).record([ROW])
    assert Database(place).rows() == [ROW]


def test_an_unsound_row_is_passed_over(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Database(place)
    kept.record([ROW, replace(ROW, configuration=NAMES[0])])
    connection = sqlite3.connect(place)
    connection.execute("UPDATE measurements SET time_us = 'soon' WHERE configuration = ?", (ROW.configuration,))
    connection.commit()
    connection.close()
    assert [row.configuration for row in kept.rows()] == [NAMES[0]]
    assert "a row is passed over: time_us is 'soon'" in caplog.text
    assert kept.merge([ROW]).added == 1, "it is replaced like one that is absent"


def test_what_the_system_forbids_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    kept = Database(tmp_path / "file" / "tuned.db")
    with pytest.raises(OutputError, match="can't be written: File exists"):
        kept.record([ROW])
    folder = Database(tmp_path)
    with pytest.raises(MissingError, match="can't be read"):
        folder.rows()
    assert choose(FOUND, database=folder).plans == FOUND.plans
    assert "serve instead" in caplog.text


def test_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"caf\xe9.db")
    try:
        place.touch()
        place.unlink()
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    kept = Database(place)
    kept.record([ROW])
    assert place.exists()
    assert kept.rows() == [ROW]


def test_a_busy_database_is_waited_for_and_then_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Database(place)
    kept.record([ROW])
    monkeypatch.setattr(database.store, "PATIENCE_S", 0.05)
    connection = sqlite3.connect(place, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        assert kept.rows() == [ROW], "a reader waits for nobody who has not begun to write to the file"
        with pytest.raises(MissingError, match="another process has kept it busy"):
            kept.record([ROW])
    finally:
        connection.close()


def test_where_the_users_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEGEN_DATABASE", str(tmp_path / "mine.db"))
    assert database.default_path() == tmp_path / "mine.db"
    monkeypatch.delenv("FUSEGEN_DATABASE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert database.default_path() == tmp_path / "fusegen" / "tuned-1.db"
