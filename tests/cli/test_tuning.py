"""The command line's `tune` and `db`, and what `plan`, `explain` and `inspect` say of measurements."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fusegen import tuning
from fusegen.cli import app
from fusegen.database import Database, Measurement, lookup
from fusegen.language.spec import load_chains
from fusegen.planner import candidates
from fusegen.targets import H200
from fusegen.tuning import Bench, farm
from tests import farm_work
from tests.measurements import FOUND, LATER, NAMES, ROW
from tests.tools import needs_both

ROOT = Path(__file__).resolve().parents[2]
SPEC = '''
from fusegen import bf16, chain, dims
from fusegen import ops as F

M, N = dims("M N")


@chain(M=64, N=4096)
def other(x: bf16[M, N], gain: bf16[N]) -> bf16[M, N]:
    """Computes the same as the tests' `normed`."""
    return F.rmsnorm(x, gain)
'''
Run = Callable[..., Result]


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "other.py").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEGEN_DATABASE", str(tmp_path / "mine.db"))
    monkeypatch.setenv("FUSEGEN_TUNED", "")  # --untuned changes it, and it is as before afterwards
    monkeypatch.setattr(lookup, "shipped", lambda graph: ())
    return "other.py"


@pytest.fixture
def run(spec: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    def invoke(*words: str, code: int = 0) -> Result:
        found = CliRunner().invoke(app, words)
        assert found.exit_code == code, found.output
        return found

    return invoke


def document(result: Result) -> Any:
    return json.loads(result.stdout)


# ---------------------------------------------------------------- tune


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that validate in the emulator, and whose times are the estimates, but for one that is the fastest."""
    script = json.dumps({ROW.configuration: 1.0})
    command = (sys.executable, str(ROOT / "tests" / "tuning_child.py"), script)

    def bench(target: Any, on: str, deadline_s: float) -> Bench:
        return Bench(target, "emulator", deadline_s=deadline_s, command=command)

    monkeypatch.setattr(tuning, "measurable", lambda target, on: target)
    monkeypatch.setattr(tuning, "Bench", bench)


@needs_both
def test_tune_shows_the_winner_beside_the_untuned_choice(run: Run, spec: str, no_gpu_needed: None) -> None:
    text = run("tune", spec, "--target", "cuda:h200", "--deadline", "300").stdout
    lines = text.splitlines()
    assert lines[0].startswith("other  bf16[M, N], bf16[N] -> bf16[M, N]  at M=64 N=4096  on emulator")
    assert lines[2].startswith(f"*  {ROW.configuration}")
    assert any(line.startswith("u  rowwise") for line in lines)
    assert "* 1.0 us is the fastest; untuned (u) it takes " in lines[-1]
    assert [row.configuration for row in Database().rows() if row.may_win] == sorted(
        [ROW.configuration, candidates(load_chains(spec)[0].graph, H200).plans[0].configuration]
    )
    plan = run("plan", spec, "--target", "cuda:h200", "--all").stdout
    assert "\ntuned     measured 1.0 us, " in plan
    assert len(re.findall(r"\n\* .* rowwise: ", plan)) == 1
    facts = document(run("plan", spec, "--target", "cuda:h200", "--json"))["plans"][0]
    assert facts["configuration"] == ROW.configuration
    assert facts["tuned"]["time_us"] == pytest.approx(1.0, rel=0.1)
    assert facts["lookup"][0].startswith(f"your database: {ROW.configuration}, measured")


@needs_both
def test_tune_many_and_as_json(run: Run, spec: str, no_gpu_needed: None) -> None:
    words = ("--target", "cuda:h200", "--deadline", "300", "--most", "2", "--no-save")
    text = run("tune", spec, str(ROOT / "specs" / "copy.py"), "--set", "n=4096", *words).stdout
    assert "untuned is" in text.splitlines()[0]
    assert "untuned takes " in text.splitlines()[-1]
    (report,) = document(run("tune", spec, *words, "--json"))["reports"]
    assert {"chain", "untuned", "winner", "regret", "trials", "skipped", "copy_gbs"} <= set(report)
    assert len(report["trials"]) == 2
    assert Database().rows() == [], "--no-save"


@needs_both
def test_one_chain_that_can_not_be_tuned_does_not_stop_the_others(run: Run, spec: str, no_gpu_needed: None) -> None:
    words = ("--target", "cuda:h200", "--deadline", "300", "--most", "1", "--set", "M=0", "--json")
    found = run("tune", spec, str(ROOT / "specs" / "copy.py"), "--set", "n=4096", *words, code=2)
    assert "other at M=0 N=4096 is not tuned: other has no rows" in found.stderr
    assert [report["chain"] for report in document(found)["reports"]] == ["copy"]
    run("tune", spec, *words, code=2)


@needs_both
def test_tune_over_processes(run: Run, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes are tuned, a third can't be; one process compiles, and another measures (tests/farm_work.py)."""
    monkeypatch.setattr(tuning, "measurable", lambda target, on: target)
    monkeypatch.setattr(farm, "Farm", partial(farm.Farm, measure=farm_work.measured))
    words = ("--target", "cuda:h200", "--set", "N=1024", "--most", "2", "--jobs", "1")
    found = run("tune", spec, "--set", "M=4,0,8", *words, code=2)
    assert "other at M=0 N=1024 for cuda:h200 is not tuned: other has no rows" in found.stderr
    lines = found.stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["other", f"M={m}", "N=1024"] for m in (4, 8)]
    assert all(f" {farm_work.FASTEST_US:.1f} us " in line for line in lines[1:3])
    assert sorted((row.sizes, row.ok) for row in Database().rows()) == [(f"M={m} N=1024", True) for m in (4, 4, 8, 8)]
    assert "is not tuned" not in run("tune", spec, "--set", "M=0", *words, code=2).stderr, (
        "the only one's error is raised"
    )


def test_tune_without_a_gpu(run: Run, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.runtime.finding.matching", lambda target: ())
    found = run("tune", spec, "--target", "hip:mi300x", code=3)
    assert "tuning measures on a GPU, and none here runs hip:mi300x" in found.stderr
    assert "fusegen db import" in found.stderr
    run("tune", spec, "--budget", "0", code=2)


# ---------------------------------------------------------------- what other verbs say


def test_plan_and_explain_say_what_was_looked_up(run: Run, spec: str) -> None:
    Database().record([replace(ROW, rows=128, target="cuda:h100")])
    text = run("plan", spec, "--target", "cuda:h200").stdout
    said = " ".join(text[text.index("\ntuned ") :].split())
    assert said.startswith("tuned measured 10.0 us, 0.50 of the copy rate, at M=64 N=4096; from h100; ")
    explained = run("explain", spec, "--target", "cuda:h200").stdout
    assert "looked up in what was measured\n- your database: nothing\n" in explained
    assert f"the GPU's family: {ROW.configuration}, measured" in " ".join(explained.split())
    assert "it measured best" in explained
    facts = document(run("explain", spec, "--target", "cuda:h200", "--json"))["explanations"][0]
    assert len(facts["sections"]["looked up in what was measured"]) == 4
    untuned = run("--untuned", "plan", spec, "--target", "cuda:h200").stdout
    assert untuned.splitlines()[-1] == "tuned     the cost model's first: measurements are switched off"


def test_inspect_shows_what_is_handed_out_and_emit_does_not(
    run: Run, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (spec, "--target", "cuda:h200")
    untuned = run("inspect", *words).stdout
    Database().record([ROW])
    tuned = run("inspect", *words).stdout
    assert tuned != untuned
    assert FOUND.plans[NAMES.index(ROW.configuration)].regime in tuned.replace("\n//          ", " ")
    run("emit", *words, "--out", str(tmp_path / "out"))
    assert (tmp_path / "out" / "cuda-h200" / "other.cu").read_text() == untuned


# ---------------------------------------------------------------- db


def rows_of(run: Run, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document(run("db", "show", *words, "--json"))["rows"]
    return found


def test_show(run: Run) -> None:
    assert "holds nothing that was asked for" in run("db", "show").stdout
    slower = replace(ROW, configuration=NAMES[3], share=0.4)
    Database().record([ROW, slower, replace(ROW, chain="copy  f32[n]", graph="0" * 64, sizes="n=64")])
    text = run("db", "show").stdout
    assert text.splitlines()[-1].startswith("2 rows of ")
    assert "normed  M=64 N=4096  bf16   cuda:h200" in text
    assert [row["chain"].split()[0] for row in rows_of(run)] == ["copy", "normed"]
    assert len(rows_of(run, "--all")) == 3
    assert [row["share"] for row in rows_of(run, "normed", "--all")] == [0.5, 0.4]


def test_export_import_round_trip(run: Run, tmp_path: Path) -> None:
    rows = [ROW, replace(ROW, rows=128)]
    Database().record(rows)
    run("db", "export", "rows.jsonl")
    text = (tmp_path / "rows.jsonl").read_text()
    assert run("db", "export").stdout == text
    assert "2 rows added" in run("db", "import", "rows.jsonl", "-d", "new.db").stdout
    assert Database(tmp_path / "new.db").rows() == sorted(rows, key=lambda row: row.rows)
    assert "2 the same" in run("db", "import", "rows.jsonl", "-d", "new.db").stdout
    run("db", "export", "again.jsonl", "-d", "new.db")
    assert (tmp_path / "again.jsonl").read_text() == text


def test_merge_reports_conflicts(run: Run, tmp_path: Path) -> None:
    Database().record([ROW])
    Database(tmp_path / "theirs.db").record([replace(ROW, share=0.7, at=LATER), replace(ROW, rows=128)])
    text = run("db", "merge", "theirs.db").stdout
    assert "theirs.db: 1 rows added, 1 replaced, 0 kept as they were, 0 the same" in text
    assert "conflict: normed at M=64 N=4096 on cuda:h200" in text
    assert f"0.70 and 0.50 of the copy rate; kept is ok of {LATER}" in text
    (merged,) = document(run("db", "merge", "theirs.db", "--json"))["merged"]
    assert (merged["same"], merged["conflicts"]) == (2, [])


def test_what_is_shipped_can_be_shown_and_exported(run: Run) -> None:
    assert rows_of(run, "--shipped")
    assert run("db", "export", "--shipped").stdout == (ROOT / "fusegen" / "data" / "tuned.jsonl").read_text()


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("merge", "nowhere.db"), "there is no database at nowhere.db"),
    (("merge", "other.py"), "other.py is damaged"),
    (("import", "nowhere.jsonl"), "nowhere.jsonl can't be read: No such file or directory\n"),
    (("import", "other.py"), "other.py: line 2 is no JSON: Expecting value\n  nothing was taken from it"),
    (("import", "bad.jsonl"), "bad.jsonl: line 2: "),
    (("show", "-d", "other.py"), "other.py is damaged"),
    (("import", "good.jsonl", "-d", "other.py"), "it is left as it is"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=lambda value: " ".join(value) if type(value) is tuple else "")
def test_wrong_requests(run: Run, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "good.jsonl").write_text(f"{ROW.line()}\n")
    (tmp_path / "bad.jsonl").write_text(f"{ROW.line()}\n{{}}\n")
    found = run("db", *words, code=2)
    assert said in found.stderr
    assert (tmp_path / "other.py").read_text() == SPEC
    assert Database().rows() == []


@pytest.mark.parametrize("words", ["export /", "export .", "export other.py/file", "import good.jsonl -d other.py/db"])
def test_what_can_not_be_written_is_exit_74(run: Run, tmp_path: Path, words: str) -> None:
    (tmp_path / "good.jsonl").write_text(f"{ROW.line()}\n")
    Database().record([ROW])
    found = run("db", *words.split(), code=74)
    assert " can't be written: " in found.stderr
    assert "Traceback" not in found.stderr


def test_facts_are_rows_again(run: Run) -> None:
    Database().record([ROW])
    (facts,) = rows_of(run)
    assert Measurement.of(facts) == ROW
