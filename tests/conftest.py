"""Fixtures shared by every test, and the option that rewrites golden sources."""

from __future__ import annotations

import contextlib
import gc
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from fusegen.emulator import toolchain
from fusegen.errors import FusegenError, MissingError
from fusegen.runtime import cache, native
from fusegen.targets import H200, MI300X, Target
from tests import turns
from tests.costs import Costs

hypothesis.settings.register_profile("fusegen", deadline=None)  # no test is timed: machines differ
hypothesis.settings.load_profile("fusegen")

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX takes three quarters of a GPU that others share

ROOT = Path(__file__).resolve().parent.parent
MARKS = ("pairwise", "by_values")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite generated/ with what is emitted now")
    parser.addoption(
        "--all", action="store_true", help="every case of the grids of parameters that are marked pairwise or by_values"
    )
    parser.addoption(
        "--turn", metavar="N", help=f"of the dear tests those of turn 1 to {turns.TURNS}, or {turns.ALL}; else today's"
    )
    parser.addoption(
        "--update-costs", action="store_true", help="write tests/dear.json: what a case of a dear test takes"
    )


def pytest_configure(config: pytest.Config) -> None:
    """What tests cost is added up. Before xdist starts its workers: whose turn it is, and the emulator's two runtimes,
    or each worker would build both for itself.

    Each worker has a processor to itself, and no use for threads of numpy's that wait for work by spinning.
    """
    if hasattr(config, "workerinput"):
        config.option.turn = config.workerinput["turn"]
    else:
        picked = config.args_source is config.ArgsSource.ARGS or config.option.keyword or config.option.markexpr
        try:
            config.option.turn = turns.chosen(config.option.turn, whole=not picked and not config.option.all)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
    config.pluginmanager.register(Costs(config.option.update_costs))
    if getattr(config.option, "numprocesses", None) and not config.option.collectonly:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        with ThreadPoolExecutor() as pool:
            list(pool.map(build_runtime, (False, True)))


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_configure_node(node: Any) -> None:
    """Each worker is told whose turn it is: midnight may pass."""
    node.workerinput["turn"] = node.config.option.turn


def pytest_report_header(config: pytest.Config) -> str:
    turn = config.option.turn
    return f"dear tests: turn {turn} of {turns.TURNS}, --turn {turn}" if turn else "dear tests: all"


@pytest.hookimpl(tryfirst=True)  # before -k leaves out cases of a grid
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests marked pairwise or by_values, leave out what `in_pairs` does; nothing with --all, or of a test that is
    named. Of dear tests, the cases whose turn it is not."""
    left_out: set[pytest.Item] = set()
    if not config.option.all and not any("::" in argument for argument in config.args):
        left_out |= of_grids(items)
    if config.option.turn:
        dear = [item for item in items if item not in left_out and not item.get_closest_marker("always")]
        dealt = turns.dealt([item.nodeid for item in dear], turns.known())
        left_out.update(item for item in dear if dealt.get(item.nodeid, config.option.turn) != config.option.turn)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def of_grids(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The cases that `in_pairs` leaves out."""
    grids: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and any(map(item.get_closest_marker, MARKS)):
            grids[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for grid in grids.values():
        (mark,) = filter(None, map(grid[0].get_closest_marker, MARKS))
        assert (len(mark.args) > 2) is (mark.name == "pairwise"), "of two parameters, all pairs are all cases"
        kept = in_pairs([case.callspec.params for case in grid], mark.args)
        left_out.update(case for case, keep in zip(grid, kept, strict=True) if not keep)
    return left_out


def pytest_collection_finish() -> None:
    """Tests, and all that was imported for them, stay: to look through them again and again for what may go was a
    twentieth of the time that tests take."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def in_pairs(cases: Sequence[Mapping[str, object]], names: Sequence[str]) -> list[bool]:
    """Which cases of a grid to keep so that each value of a parameter still meets each value of each other one; of two
    parameters, so that each value of either is there.

    `names` are the parameters, one of each that are given together. With n values of the one that has fewest, those
    cases stay whose places in the lists of values sum to a multiple of n: of any two values, some value of a third
    parameter completes the sum.
    """
    values = [list(dict.fromkeys(id(case[name]) for case in cases)) for name in names]
    fewest = min(map(len, values))
    return [
        sum(known.index(id(case[name])) for name, known in zip(names, values, strict=True)) % fewest == 0
        for case in cases
    ]


def build_runtime(check: bool) -> None:
    with contextlib.suppress(FusegenError):  # no compiler: the tests that need one say so
        toolchain.build_runtime(toolchain.compiler_for(check=check), check=check, cache=None)


@pytest.fixture(scope="session", autouse=True)
def nobodys_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or changes what the user measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEGEN_DATABASE", str(tmp_path_factory.mktemp("measured") / "none.db"))
        yield


@pytest.fixture(scope="module")
def emulated_only(request: pytest.FixtureRequest) -> Iterator[None]:
    """`compile` for the emulator makes no machine code, as where NVRTC and hiprtc are missing.

    Machine code takes as long as all else that a test of numbers does, and shows nothing of them. That kernels of every
    kind compile is what tests of golden sources, of rendering, and the fuzz show. With --all it is made everywhere.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not request.config.option.all:
            patch.setattr("fusegen.pipeline.compiled", without_a_compiler)
        yield


def without_a_compiler(*_: Any, **__: Any) -> Any:
    raise MissingError("this test makes no machine code")


@pytest.fixture(autouse=True)
def machine_code_for_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run on a GPU have it, whatever the others of their file do without."""
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setattr("fusegen.pipeline.compiled", cache.compiled)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(params=[H200, MI300X], ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    """One target of each vendor: warps of 32 and of 64."""
    chosen: Target = request.param
    return chosen


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def module() -> Any:
    """The C of shortcuts, one for each file of tests: what it is told it keeps."""
    try:
        return native.get()
    except FusegenError as error:
        pytest.skip(f"no shortcuts in C: {str(error).splitlines()[0]}")
