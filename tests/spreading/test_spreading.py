"""Jobs spread over processes and over a Ray cluster: each is answered once, whoever dies meanwhile.

The cluster is a real one, of three processors and two GPUs that are but numbers: nothing runs on them. It starts once
for all tests here, which takes some six seconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.cli import app
from fusegen.database import Database, Measurement
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError, RequestError
from fusegen.language.spec import load_chains
from fusegen.planner import candidates
from fusegen.runtime.cache import KernelCache, key_of
from fusegen.spreading import Cluster, Crew, Faulty, Job, Processes, cluster, spread
from fusegen.spreading.jobs import answered, fingerprint, opened
from fusegen.targets import A100, H200, L40S, MI300X, target
from fusegen.tuning import Effort
from fusegen.tuning.farm import Farm, Order
from fusegen.tuning.report import Report
from tests import farm_work
from tests.tools import needs_both

ROOT = Path(__file__).resolve().parents[2]
M, N = dims("M N")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'fusegen[ray]'")


@chain(M=4, N=1024)
def normed(x: bf16[M, N], gain: bf16[N]) -> bf16[M, N]:
    """rmsnorm(x) * gain."""
    return F.rmsnorm(x, gain)


@chain(M=4, N=1024)
def doubled(x: f32[M, N]) -> f32[M, N]:
    """x + x."""
    return x + x


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, joined to a cluster; what a test changes in its own environment afterwards, workers don't see."""
    import ray as package

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
        package.init(
            num_cpus=3, num_gpus=2, resources={"accelerator_type:H200": 1}, include_dashboard=False,
            object_store_memory=100 * 2**20, log_to_driver=False, logging_level="ERROR",
        )  # fmt: skip
    yield package
    package.shutdown()


@pytest.fixture(params=["processes", pytest.param("ray", marks=needs_ray)])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    if request.param == "processes":
        with Processes(2, ("gpu",)) as processes:
            yield processes
    else:
        request.getfixturevalue("ray")
        with Cluster("auto", [H200]) as joined:
            yield joined


# ---------------------------------------------------------------- jobs


def test_nothing_is_lost_and_nothing_comes_twice_when_a_worker_is_killed(crew: Crew, tmp_path: Path) -> None:
    """A worker is killed in the middle of a job, which another does then. One job kills whoever does it: it is lost, in
    a sentence, and nothing else is."""
    good = [Job(f"square {n}", farm_work.squared, (n,)) for n in range(20)]
    victim = Job("victim", farm_work.waiting_to_be_killed, (99, str(tmp_path)))
    bad = Job("refused", farm_work.refused, (7,))
    bug = Job("mistaken", farm_work.mistaken, (7,))
    deadly = Job("deadly", farm_work.deadly, (0,))
    more = Job("more", farm_work.squared, (1000,))
    killer = threading.Thread(target=farm_work.kill_whoever_waits, args=(tmp_path / "99.pid",))
    killer.start()
    answers = []
    jobs = [*good[:10], victim, bad, bug, deadly, *good[10:]]
    for job, answer in spread(jobs, crew):
        answers.append((job, answer))
        if job is bad:
            jobs.append(more)  # jobs may be added while others are done
    killer.join()
    assert Counter(job for job, _ in answers) == Counter([*good, victim, bad, bug, deadly, more])
    by_job = dict(answers)
    assert [by_job[job].value for job in good] == [n * n for n in range(20)]
    assert by_job[victim].value == 99 * 99
    assert by_job[more].value == 1000 * 1000
    assert isinstance(by_job[bad].error, RequestError)
    assert str(by_job[bad].error) == "7 is refused"
    assert isinstance(by_job[bug].error, Faulty)
    assert "ZeroDivisionError" in str(by_job[bug].error)
    assert isinstance(by_job[deadly].error, MissingError)
    assert str(by_job[deadly].error).startswith("deadly is lost: ")
    assert "all else is kept" in str(by_job[deadly].error)


def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    waiting = [Job(f"{n}", farm_work.waiting_to_be_killed, (n, str(tmp_path))) for n in (1, 2)]
    jobs = [Job("first", farm_work.squared, (3,)), *waiting]

    def interrupted(crew: Crew) -> None:
        for job, _ in spread(jobs, crew):
            assert job.name == "first"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Processes(2) as crew:
        interrupted(crew)
    assert not any(worker.thread.is_alive() for worker in crew.workers)
    assert all(worker.process is None for worker in crew.workers)


# ---------------------------------------------------------------- other machines


def test_a_worker_with_another_fusegen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = answered(b"never unpickled", "0.0.9, source 0123456789ab", "gpu")
    with pytest.raises(
        MissingError, match=r"another fusegen than this machine: \S+ has fusegen 0.1.0, source \w{12}, and 0.0.9"
    ):
        opened(refused)
    assert fingerprint().startswith("0.1.0, source ")


@needs_ray
def test_a_cluster_with_another_fusegen_is_refused(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "fingerprint", lambda: "0.0.9, source 0123456789ab")
    with Cluster("auto") as crew, pytest.raises(MissingError, match="install the same one"):
        list(spread([Job("square", farm_work.squared, (2,))], crew))


@needs_ray
def test_gpus_are_asked_for_by_their_model(ray: Any) -> None:
    with Cluster("auto", [H200]) as crew:
        assert crew.kinds == {"cuda:h200": "H200"}
    with (
        pytest.raises(MissingError, match=r"has a GPU of the model of hip:mi300x\n  its nodes have: 3 CPU, 2 GPU H200"),
        Cluster("auto", [MI300X]),
    ):
        pass


def test_accelerators_by_name() -> None:
    for kind, gpu in (("H200", H200), ("A100-80G", A100), ("L40S", L40S), ("AMD-Instinct-MI300X-OAM", MI300X)):
        assert cluster.is_model(kind, gpu.model)
    assert not cluster.is_model("H100", H200.model)
    node = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:H200": 1.0}
    measuring = Job("measure", farm_work.squared, (1,), H200)
    assert cluster.fits(measuring, node)
    assert not cluster.fits(replaced(measuring, MI300X), node)
    assert cluster.fits(replaced(measuring, target("cuda:sm_90")), node), "an architecture is whichever GPU runs it"
    assert cluster.fits(measuring, {"CPU": 8.0, "GPU": 1.0}), "a node need not tell"
    assert not cluster.fits(measuring, {"CPU": 8.0})
    assert cluster.listed([node, node, {"CPU": 64.0}]) == "2 x (8 CPU, 1 GPU H200); 64 CPU"


def replaced(job: Job, gpu: Any) -> Job:
    return replace(job, gpu=gpu)


def test_a_cluster_that_loses_its_last_gpu_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: dict[str, Any] = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0, "accelerator_type:H200": 1.0}}
    nodes = [gpu, {"Alive": True, "Resources": {"CPU": 64.0}}]
    crew = Cluster("10.0.0.1:6379")
    crew.ray = SimpleNamespace(nodes=lambda: nodes)
    waiting = [Job("measure", farm_work.squared, (1,), H200)]
    assert crew.accelerator(H200) == "H200"
    assert crew.accelerator(target("cuda:sm_90")) is None
    crew.look(waiting)
    gpu["Alive"] = False
    crew.look(waiting)  # it may come back
    monkeypatch.setattr(cluster, "ALONE_S", 0.0)
    with pytest.raises(
        MissingError, match=r"no node .* could do what is left for 0 s\n  its nodes have: 64 CPU\n  all that"
    ):
        crew.look(waiting)
    crew.look([Job("compile", farm_work.squared, (1,))])
    assert crew.lonely_since is None


# ---------------------------------------------------------------- a cluster that is not there


def test_wrong_and_dead_addresses() -> None:
    for address in ("nonsense", "host:0", "host:99999", "http://host:1", ""):
        with pytest.raises(RequestError, match="is no address of a Ray cluster\n  write HOST:PORT"):
            cluster.knock(address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        cluster.knock(f"127.0.0.1:{port}")
        cluster.knock(f"ray://127.0.0.1:{port}")
    with pytest.raises(MissingError, match="can't be reached: Connection refused\n  start it with `ray start"):
        cluster.knock(f"127.0.0.1:{port}")


def test_who_listens_and_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(MissingError, match="can't be reached"):
        cluster.rehearse(f"127.0.0.1:{server.getsockname()[1]}")


def invoke(*words: str, code: int) -> Result:
    found = CliRunner().invoke(app, words)
    assert found.exit_code == code, found.output
    return found


def test_what_is_said_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    copy = str(ROOT / "specs" / "copy.py")
    found = invoke("compile", copy, "--ray", "local", code=3)
    assert "--ray needs Ray, which is not installed here" in found.stderr
    assert "pip install 'fusegen[ray]'" in found.stderr
    assert "exclude each other" in invoke("compile", copy, "--ray", "local", "--jobs", "2", code=2).stderr
    assert "takes --jobs" in invoke("tune", copy, "--on", "gpu:0,gpu:1", code=2).stderr


# ---------------------------------------------------------------- compile


@needs_both
def test_compile_over_a_crew_is_compile(crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For several sizes and targets; what a cluster compiled and proved is in the cache here afterwards."""
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "ours"))
    copy = str(ROOT / "specs" / "copy.py")
    here = isinstance(crew, Processes)
    words = ("compile", copy, *(("--jobs", "2", "--no-validate") if here else ("--ray", "auto")))
    found = invoke(*words, "--target", "cuda:h200,cuda:a100", "--set", "n=64,4096", "--no-validate", code=0)
    assert [line.split()[1:4] for line in found.stdout.splitlines()[1:5]] == [
        ["copy", f"n={n}", gpu] for gpu in ("cuda:h200", "cuda:a100") for n in (64, 4096)
    ]
    (kernel,) = json.loads(invoke(*words, "--target", "cuda:h200", "--set", "n=64", "--json", code=0).stdout)["kernels"]
    assert kernel["ok"]
    graph = load_chains(copy)[0].at(n=64).graph
    entry = KernelCache().load(key_of(render(candidates(graph, H200).plans[0])), H200)
    assert entry is not None
    assert (entry.verdict is None) == here


# ---------------------------------------------------------------- tune


def rows_of(database: Database) -> list[Measurement]:
    return [replace(row, at="") for row in database.rows()]


@needs_both
def test_tuning_over_a_crew_keeps_all_rows_once_when_a_worker_is_killed(crew: Crew, tmp_path: Path) -> None:
    """The worker that measures first is killed with SIGKILL; the rows are those that nobody's death made."""
    effort = Effort(budget_s=600, most=2, finalists=1)
    wanted = [(normed.graph, H200), (doubled.graph, H200), (normed.at(M=0).graph, H200)]
    victim = tmp_path / "measuring.pid"
    database, alone = Database(tmp_path / "tuned.db"), Database(tmp_path / "alone.db")
    killer = threading.Thread(target=farm_work.kill_whoever_waits, args=(victim,))
    killer.start()
    farm = Farm(crew, database, effort, measure=partial(farm_work.measured, victim=str(victim)))
    steps: list[tuple[float, float]] = []
    found = list(farm.tune(wanted, lambda done, total, doing: steps.append((done, total))))
    killer.join()
    assert sorted(number for number, _ in found) == [0, 1, 2], "each is answered once"
    reports = {number: report for number, report in found if isinstance(report, Report)}
    assert "has no rows" in str(dict(found)[2])
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    for number, (graph, gpu) in enumerate(wanted[:2]):
        order = Order(graph, gpu, effort, 300, False, (), ())
        farm_work.measured(order, "gpu").keep(alone, {})
        assert [trial.ok for trial in reports[number].trials] == [True, True]
        assert reports[number].winner is not None
    assert rows_of(database) == rows_of(alone)
    assert len(database.rows()) == 4


@needs_both
def test_what_was_measured_before_an_interrupt_is_kept(tmp_path: Path) -> None:
    database = Database(tmp_path / "tuned.db")

    def interrupted(crew: Crew) -> None:
        farm = Farm(crew, database, Effort(budget_s=600, most=1, finalists=1), measure=farm_work.measured)
        for _ in farm.tune([(doubled.graph, H200), (normed.graph, H200)]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Processes(1, ("gpu",)) as crew:
        interrupted(crew)
    assert [row.chain.split()[0] for row in database.rows()] == ["doubled"]
    assert database.rows()[0].may_win
