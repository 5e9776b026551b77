"""Tuning: what is tried, what wins, and what becomes of candidates that hang, crash or are wrong.

The children are real processes. Without a GPU they validate in the emulator and take their times from a script
(tests/tuning_child.py); with one, kernels are broken on purpose and must be survived.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusegen import bf16, chain, dims, f32, tuning
from fusegen import ops as F
from fusegen.compiling import Binary
from fusegen.database import Database, choose, graph_digest
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError, RequestError
from fusegen.language.graph import Graph
from fusegen.language.spec import load_chains
from fusegen.planner import candidates, plan
from fusegen.planner.model import Plan, Source
from fusegen.planner.products.factors import lacking
from fusegen.runtime import devices, finding
from fusegen.runtime.cache import compiled
from fusegen.targets import H100, H200, MI300X, TARGETS, Target, target
from fusegen.tuning import Bench, Effort, Tuner, Unfit, wire
from fusegen.tuning.child import Time
from fusegen.tuning.search import PATIENCE
from fusegen.validation import validate
from tests.specs import ALL
from tests.tools import needs_both
from tests.tuning_child import COPY_RATE

ROOT = Path(__file__).resolve().parents[2]
M, N = dims("M N")


@chain(M=64, N=4096)
def normed(x: bf16[M, N], gain: bf16[N]) -> bf16[M, N]:
    """rmsnorm(x) * gain."""
    return F.rmsnorm(x, gain)


@chain(M=4096, N=1024)
def doubled(x: f32[M, N]) -> f32[M, N]:
    """x + x."""
    return x + x


PLANS = candidates(normed.graph, H200).plans
NAMES = [plan.configuration for plan in PLANS]


class Scripted(Bench):
    """Loses its patience with what is to hang, and with nothing else: a busy machine may be slow."""

    def __init__(self, script: dict[str, Any]) -> None:
        command = (sys.executable, str(ROOT / "tests" / "tuning_child.py"), json.dumps(script))
        super().__init__(H200, "emulator", deadline_s=300, command=command)
        self.script = script

    def time(self, source: Source, binary: Binary, repeats: int) -> list[float]:
        hangs = self.script.get(source.plan.configuration) == "hang"
        return [float(us) for us in self.ask(Time(source, binary, repeats), 1 if hangs else self.deadline_s)["us"]]


# ---------------------------------------------------------------- the search, its times from a script


@needs_both
def test_the_fastest_right_candidate_wins_and_the_rest_is_recorded(tmp_path: Path) -> None:
    """One of each fate. The times are scripted; validation is real."""
    script = {
        NAMES[0]: 9.0, NAMES[1]: "crash", NAMES[2]: 7.0, NAMES[3]: "hang", NAMES[4]: "lost", NAMES[5]: "refused",
        NAMES[6]: 5.0, **dict.fromkeys(NAMES[7:], 8.0),
    }  # fmt: skip
    database = Database(tmp_path / "tuned.db")
    with Scripted(script) as bench:
        report = Tuner(bench, database, Effort(budget_s=600)).tune(normed)
    assert [trial.status for trial in report.trials] == [
        "ok", "crashed", "ok", "hung", "crashed", "failed", "ok", *("ok" for _ in NAMES[7:]),
    ]  # fmt: skip
    reasons = [trial.reason for trial in report.trials]
    assert reasons[1] == "its process died by SIGSEGV: about to crash"
    assert reasons[3] == "it did not end within 1 s"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in reasons[4]
    assert "CUDA_ERROR_INVALID_VALUE" in reasons[5]
    assert report.winner is report.trials[6]
    assert report.untuned is report.trials[0]
    assert report.regret == pytest.approx(9 / 5 - 1)
    assert report.winner.validated
    assert report.untuned.validated
    assert report.share(report.winner) == pytest.approx(report.bytes / report.winner.us / COPY_RATE)

    rows = {row.configuration: row for row in database.rows()}
    assert set(rows) == set(NAMES)
    assert rows[NAMES[6]].may_win
    assert not rows[NAMES[2]].validated, "it is no finalist: 7 us is more than 5 % behind"
    assert rows[NAMES[3]].status == "hung"
    choice = choose(candidates(normed.graph, H200), database=database)
    assert choice.plan.configuration == NAMES[6]
    assert [p.configuration for p in choice.plans[-4:]] == [NAMES[1], NAMES[3], NAMES[4], NAMES[5]], "tried last"


@needs_both
def test_what_hung_is_not_tried_again_unless_asked(tmp_path: Path) -> None:
    database = Database(tmp_path / "tuned.db")
    with Scripted({NAMES[1]: "crash"}) as bench:
        Tuner(bench, database, Effort(most=3)).tune(normed)
    with Scripted({}) as bench:
        again = Tuner(bench, database, Effort(most=3)).tune(normed)
        Tuner(bench, database, Effort(most=1)).tune(normed)
        assert "crashed" in {row.status for row in database.rows()}, "nor forgotten by a search that did not get to it"
        retried = Tuner(bench, database, Effort(most=3), retry=True).tune(normed)
    assert again.trials[1].status == "crashed"
    assert "not tried again" in again.trials[1].reason
    assert retried.trials[1].ok
    assert {row.status for row in database.rows()} == {"ok"}


@needs_both
def test_a_crash_is_recorded_before_anything_else_can_go_wrong(tmp_path: Path) -> None:
    """The tuner itself is ended right after: what crashed is known to the next one."""
    database = Database(tmp_path / "tuned.db")

    def interrupt(done: int, total: int, doing: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with Scripted({NAMES[1]: "crash"}) as bench, pytest.raises(KeyboardInterrupt):
        Tuner(bench, database).tune(normed, interrupt)
    assert [(row.configuration, row.status) for row in database.rows()] == [(NAMES[1], "crashed")]
    assert bench.process is None, "the child is gone too"


@needs_both
def test_a_wrong_kernel_never_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest one computes something else; so does the cost model's own choice."""
    wrong = {NAMES[0], NAMES[2]}

    def rendered(plan: Plan) -> Source:
        source = render(plan)
        return (
            replace(source, text=source.text.replace("4096.0f", "4100.0f")) if plan.configuration in wrong else source
        )

    monkeypatch.setattr("fusegen.tuning.search.render", rendered)
    database = Database(tmp_path / "tuned.db")
    with Scripted({NAMES[0]: 6.0, NAMES[1]: 8.0, NAMES[2]: 5.0}) as bench:
        report = Tuner(bench, database, Effort(most=3)).tune(normed)
    assert [trial.status for trial in report.trials] == ["failed", "ok", "failed"]
    assert "wrong results: normal" in report.trials[2].reason
    assert report.winner is report.trials[1]
    assert report.regret is None, "the untuned choice is no choice"
    assert [row.configuration for row in database.rows() if row.may_win] == [NAMES[1]]


@needs_both
def test_poor_estimates_and_spent_budgets_end_the_search() -> None:
    """Candidates whose estimate is more than twice that of the fastest are left out, unless a poor one proved fast."""
    graph = load_chains(ROOT / "specs" / "bias_gelu_residual_ln.py")[0].at(M=64).graph
    plans = candidates(graph, H200).plans
    least = plans[0].cost.time_us
    near = sum(plan.cost.time_us <= 2 * least for plan in plans)
    assert 1 < near < len(plans)
    with Scripted({}) as bench:
        report = Tuner(bench, None, Effort(budget_s=600)).tune(graph)
        assert len(report.trials) == near
        assert report.skipped == f"{len(plans) - near} by their estimates"
        hasty = Tuner(bench, None, Effort(budget_s=1e-9)).tune(normed)
        assert len(hasty.trials) == 1, "the untuned choice is always measured"
        assert hasty.skipped == f"{len(PLANS) - 1} by the budget of 1e-09 s"
        assert hasty.winner is hasty.untuned
        few = Tuner(bench, None, Effort(most=2)).tune(normed)
        assert few.skipped == f"{len(PLANS) - 2} by the limit of 2"
    with Scripted(dict.fromkeys(NAMES, "refused")) as bench:
        hopeless = Tuner(bench, None, Effort(budget_s=1e-9)).tune(normed)
        assert len(hopeless.trials) == PATIENCE < len(NAMES)
    with Scripted({plans[near - 1].configuration: 0.5}) as bench:
        assert len(Tuner(bench, None, Effort(budget_s=600)).tune(graph).trials) > near


@needs_both
def test_the_fastest_alone_may_be_validated_beside_the_untuned_choice() -> None:
    script = {NAMES[0]: 7.0, NAMES[1]: 6.0, NAMES[2]: 5.0, NAMES[3]: 5.1}
    with Scripted(script) as bench:
        report = Tuner(bench, None, Effort(budget_s=600, most=4, finalists=1)).tune(normed)
    assert [trial.validated for trial in report.trials] == [True, False, True, False]
    assert report.winner is report.trials[2]


@needs_both
def test_where_nothing_works_there_is_no_winner(tmp_path: Path) -> None:
    database = Database(tmp_path / "tuned.db")
    with Scripted({name: "refused" for name in NAMES}) as bench:
        report = Tuner(bench, database).tune(normed)
    assert report.winner is None
    assert report.regret is None
    assert {row.status for row in database.rows()} == {"failed"}
    choice = choose(candidates(normed.graph, H200), database=database)
    assert choice.hit is None
    assert choice.plans == PLANS
    json.dumps(report.facts(), allow_nan=False)


@needs_both
def test_what_can_not_be_kept_is_still_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with Scripted({}) as bench:
        report = Tuner(bench, Database(tmp_path / "file" / "tuned.db"), Effort(most=1)).tune(normed)
    assert report.winner is not None
    assert "is not kept" in caplog.text


@needs_both
def test_progress_ends_where_it_said() -> None:
    seen: list[tuple[int, int]] = []
    with Scripted({}) as bench:
        Tuner(bench, None, Effort(most=2)).tune(normed, lambda done, total, doing: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


# ---------------------------------------------------------------- requests


def test_tuning_needs_the_gpu_it_tunes_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(vendor: str) -> tuple[devices.Gpu, ...]:
        raise MissingError(f"no driver for {vendor}")

    monkeypatch.setattr("fusegen.runtime.finding.gpus_of", none)
    with pytest.raises(MissingError, match=r"tuning measures on a GPU, and none here runs cuda:h200 \(sm_90a\)"):
        tuning.tune(normed, "cuda:h200")
    gpu = devices.Gpu("cuda", 0, "NVIDIA H200", "sm_90", 2**37, 132)
    monkeypatch.setattr("fusegen.runtime.finding.gpus_of", lambda vendor: (gpu,) if vendor == "cuda" else none(vendor))
    assert tuning.measurable(H200) is H200
    assert tuning.measurable(target("cuda:sm_90")).name == "cuda:sm_90", "an architecture is whichever GPU runs it"
    with pytest.raises(MissingError, match="tune for cuda:h200 instead"):
        tuning.measurable(H100)
    with pytest.raises(MissingError, match="none with number 1 here"):
        tuning.measurable(H200, "gpu:1")
    with pytest.raises(MissingError, match="none here runs hip:mi300x"):
        tuning.measurable(MI300X)
    with pytest.raises(RequestError, match="takes a GPU"):
        tuning.measurable(H200, "emulator")


def test_wrong_efforts_are_refused() -> None:
    for effort in ({"budget_s": 0.0}, {"budget_s": float("nan")}, {"most": 0}, {"finalists": 0}):
        with pytest.raises(RequestError, match="some seconds, one candidate and one finalist"):
            Effort(**effort)


def test_a_child_that_does_not_start_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(MissingError, match="did not start: its process ended with code 3: no such thing"),
        Bench(H200, command=(sys.executable, "-c", "import sys; print('no such thing', file=sys.stderr); sys.exit(3)")),
    ):
        pass
    with pytest.raises(MissingError, match=r"did not start: .*emulator gives no times"), Bench(H200, "emulator"):
        pass  # the real child, with the real stopwatch


def test_a_child_that_died_between_two_tasks_does_not_take_the_command_with_it() -> None:
    """As in the command line, where a write to a pipe that nobody reads ends the process by SIGPIPE."""
    child = (
        "import json, sys; from fusegen.tuning import wire; wire.receive(sys.stdin.buffer.read);"
        "wire.send(sys.stdout.buffer, json.dumps({'device': 'none', 'copy_rate': 1.0}).encode())"
    )
    code = (
        "import signal, sys; signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "from fusegen.targets import H200; from fusegen.tuning import Bench, Unfit\n"
        "from fusegen.tuning.child import Time\n"
        f"with Bench(H200, command=(sys.executable, '-c', {child!r})) as bench:\n"
        "    bench.process.wait()\n"
        "    try: bench.ask(Time(None, None, 1), 5)\n"
        "    except Unfit as error: print(error.status, error.reason)\n"
        "assert signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "crashed its process ended with code 0\n"), done.stderr


def test_a_child_leaves_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed leaves no process behind, even one that hangs in a launch."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import os, threading, time; from fusegen.tuning import child;"
        " threading.Thread(target=child.leave_with, args=(os.getppid(),), daemon=True).start(); print(os.getpid(),"
        " flush=True); time.sleep(600)'], stdout=subprocess.PIPE)\n"
        "print(child.stdout.readline().decode().strip(), flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    pid = int(done.stdout)
    for _ in range(300):
        if not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    raise AssertionError("it is still there")


# ---------------------------------------------------------------- the way to the child


GPUS = [*TARGETS.values(), target("cuda:sm_90")]


@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_sources_travel_whole(gpu: Target, request: pytest.FixtureRequest) -> None:
    """Of every third spec, from another one on for each GPU; with --all, of all."""
    first, step = (0, 1) if request.config.getoption("--all") else (GPUS.index(gpu) % 3, 3)
    able = [spec for spec in ALL.values() if not lacking(spec.graph, gpu)]
    if gpu.arch == "gfx1100":  # whose sums of scores are no neighbours: its weights are a program's
        able.remove(ALL["qk_causal_softmax"])
    for spec in able[first::step]:
        source = render(candidates(spec.graph, gpu).plans[0])
        there = wire.unpacked(wire.packed(source))
        assert render(there.plan).text == source.text
        assert there.plan.configuration == source.plan.configuration
        assert graph_digest(there.plan.graph) == graph_digest(spec.graph)
        assert there.plan.target == gpu


def test_long_chains_travel_too() -> None:
    def steps(count: int) -> Graph:
        def long(x: f32[M, N]) -> f32[M, N]:
            for _ in range(count):
                x = x + 1.0
            return x

        return chain(M=8, N=64)(long).graph

    graph = steps(3000)
    assert len(wire.unpacked(wire.packed(graph)).nodes) == len(graph.nodes)
    source = render(plan(steps(600), H200))
    assert render(wire.unpacked(wire.packed(source)).plan).text == source.text


@needs_both
def test_what_travelled_is_still_right() -> None:
    from fusegen.runtime import Kernel

    source = render(PLANS[0])
    there, binary = wire.unpacked(wire.packed((source, compiled(source))))
    kernel = Kernel(there, binary, finding.find(H200, "emulator"), lambda layout: (there, binary))
    validate(kernel, quick=True).raise_for_error()


# ---------------------------------------------------------------- on a GPU


def gpu_target() -> Target:
    for gpu in finding.present().gpus:
        if found := finding.target_of(gpu):
            return found
    pytest.skip("needs a GPU")


def broken(plan: Plan, change: Callable[[str], str]) -> tuple[Source, Binary]:
    source = render(plan)
    text = change(source.text)
    assert text != source.text
    made = replace(source, text=text)
    return made, compiled(made)


def hangs(text: str) -> str:
    """Atomics: a loop without effects may be compiled away."""
    return text.replace(")\n{\n", ")\n{\n  while (n >= 0) atomicAdd(reinterpret_cast<int*>(out_ptr), 1);\n", 1)


def strays(text: str) -> str:
    return text.replace(")\n{\n", ")\n{\n  *(volatile float*)8 = 1.0f;\n", 1)


def lies(text: str) -> str:
    return text.replace("x + x", "x + x + x")


@pytest.mark.gpu
def test_a_gpu_survives_what_candidates_do() -> None:
    own = gpu_target()
    plans = candidates(doubled.graph, own).plans
    good = render(plans[0]), compiled(render(plans[0]))
    with Bench(own, deadline_s=10) as bench:
        assert bench.copy_rate > 1e5, "bytes a us"
        before = bench.time(*good, 5)
        bench.validate(*good)
        for change, status, words in (
            (hangs, "hung", "did not end within 10 s"),
            (strays, "crashed", "ILLEGAL_ADDRESS"),
        ):
            with pytest.raises(Unfit, match=words) as found:
                bench.time(*broken(plans[0], change), 5)
            assert found.value.status == status
            after = bench.time(*good, 5)
            assert len(after) == len(before) == 5
        assert bench.time(*broken(plans[0], lies), 5), "a wrong kernel may be as fast as any"
        with pytest.raises(Unfit, match="wrong results") as found:
            bench.validate(*broken(plans[0], lies))
        assert found.value.status == "failed"
        bench.validate(*good)


@pytest.mark.gpu
def test_tuning_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGEN_DATABASE", str(tmp_path / "tuned.db"))
    own = gpu_target()
    report = tuning.tune(normed.at(M=4096), own)
    assert report.winner is not None
    assert report.regret is not None
    assert report.regret > -0.05
    assert all(trial.ok for trial in report.trials), [trial.facts() for trial in report.trials]
    choice = choose(candidates(normed.at(M=4096).graph, own))
    assert choice.hit is not None
    assert choice.plan.configuration == report.winner.configuration
