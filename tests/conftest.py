"""Fixtures shared by every test, and the option that rewrites golden sources."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from fusegen.emulator import toolchain
from fusegen.errors import FusegenError
from fusegen.runtime import native
from fusegen.targets import H200, MI300X, Target

hypothesis.settings.register_profile("fusegen", deadline=None)  # no test is timed: machines differ
hypothesis.settings.load_profile("fusegen")

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX takes three quarters of a GPU that others share

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite generated/ with what is emitted now")


def pytest_configure(config: pytest.Config) -> None:
    """Before xdist starts its workers: the emulator's two runtimes, or each worker would build both for itself.

    Each worker has a processor to itself, and no use for threads of numpy's that wait for work by spinning.
    """
    if getattr(config.option, "numprocesses", None) and not config.option.collectonly:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        with ThreadPoolExecutor() as pool:
            list(pool.map(build_runtime, (False, True)))


def build_runtime(check: bool) -> None:
    with contextlib.suppress(FusegenError):  # no compiler: the tests that need one say so
        toolchain.build_runtime(toolchain.compiler_for(check=check), check=check, cache=None)


@pytest.fixture(scope="session", autouse=True)
def nobodys_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or changes what the user measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEGEN_DATABASE", str(tmp_path_factory.mktemp("measured") / "none.db"))
        yield


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
