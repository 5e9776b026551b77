"""The twin of a kernel that a GPU runs, in the checking emulator: what is launched, and that it is built ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fusegen import chain, dims, f32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import EmulatorUnavailable, toolchain
from fusegen.language.spec import Chain
from fusegen.planner import plan
from fusegen.planner.smaller import smaller
from fusegen.runtime.finding import find
from fusegen.runtime.kernel import Kernel
from fusegen.targets import H200
from fusegen.validation import emulated, far
from fusegen.validation.checks import FULL_ELEMENTS, Checks
from fusegen.validation.last_rows import emulating
from tests.specs import SHIPPED

try:
    toolchain.compiler_for(check=True)
except EmulatorUnavailable as error:
    pytest.skip(f"no checking emulator: {str(error).splitlines()[0]}", allow_module_level=True)

M, N = dims("M N")


@chain(M=64, N=4096)
def normed(x: f32[M, N]) -> f32[M, N]:
    """A row that a block holds, so that its warps meet."""
    return x * F.rsqrt(F.mean(x * x) + 1e-6)


@chain(M=64, N=512)
def numbered(x: f32[M, N]) -> f32[M, N]:
    """Rows that know their number."""
    return F.softmax(F.where(F.col_index(x) <= F.row_index(x), x, float("-inf")))


def checks_of(spec: Chain, edit: Callable[[str], str] = str) -> Checks:
    """Of a kernel as a GPU would run it."""
    source = render(plan(spec.graph, H200))
    text = edit(source.text)
    return Checks(Kernel(replace(source, text=text), None, find(H200, "emulator", check=False), None), 0, None)  # type: ignore[arg-type]


def emulate(checks: Checks, quick: bool = True) -> None:
    emulating(checks, FULL_ELEMENTS, quick)()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The launches of a twin, in order."""
    found: list[str] = []
    last, call = far.last_launch, Kernel.call

    def last_launch(*given: Any) -> Callable[[], None]:
        found.append("last rows")
        return last(*given)

    def call_kernel(kernel: Kernel, /, *operands: Any, **more: Any) -> Any:
        found.append("rows")
        return call(kernel, *operands, **more)

    monkeypatch.setattr(far, "last_launch", last_launch)
    monkeypatch.setattr(Kernel, "call", call_kernel)
    return found


def test_a_first_build_launches_the_last_of_many_rows_alone(launched: list[str]) -> None:
    checks = checks_of(normed)
    emulate(checks)
    assert launched == ["last rows"]
    (case,) = checks.found
    assert (case.name, case.ok, case.bounded) == (emulated.NAME, True, 1.0)
    emulate(checks, quick=False)
    assert launched[1:] == ["rows", "last rows"]


def test_rows_that_know_their_number_are_launched_as_the_first(launched: list[str]) -> None:
    checks = checks_of(numbered)
    emulate(checks)
    assert launched[0] == "rows"
    assert checks.found[0].ok


@pytest.mark.parametrize("quick", [True, False])
def test_a_wait_that_is_missing_is_found(quick: bool) -> None:
    text = checks_of(normed).kernel.source.text
    assert "__syncthreads();" in text
    checks = checks_of(normed, lambda text: text.replace("__syncthreads();", "", 1))
    emulate(checks, quick)
    assert "race" in checks.found[0].problem


def test_wrong_numbers_of_the_last_rows_are_found() -> None:
    checks = checks_of(normed, lambda text: text.replace("rsqrtf(", "1.01f * rsqrtf("))
    emulate(checks)
    assert "are wrong" in checks.found[0].problem


def test_it_is_built_while_another_compiler_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left in the cache is what a twin is made of: no compiler is asked again."""
    attention = SHIPPED["attention"]
    for spec in normed, attention:
        source = render(plan(spec.graph, H200))
        small = emulated.text_of(source)
        assert (small is source) is (spec is normed)
        assert small.plan.configuration == source.plan.configuration
        kernel = Kernel(source, None, find(H200, "emulator", check=False), None)  # type: ignore[arg-type]
        emulated.build(source)
        with monkeypatch.context() as patch:
            patch.setattr(toolchain, "_run", lambda *_: pytest.fail("compiled once more"))
            assert emulated.twin(kernel).device.check  # type: ignore[attr-defined]
    assert smaller(plan(attention.graph, H200)).graph.sizes["T"] < attention.graph.sizes["T"]
