"""Every second (third ...) element of one array, beside the others: all move in the vectors that they lie in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Chain, Kernel, Program, bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.errors import ArgumentError
from fusegen.planner.model import RowPlan
from fusegen.validation import validate
from tests.specs import SHIPPED

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("emulated_only")

Array = np.ndarray[Any, np.dtype[Any]]
TARGETS = ("cuda:h200", "cuda:sm_80", "hip:mi300x")
M, N, T, H, D = dims("M N T H D")


@chain(M=24, N=48)
def luminance(image: f32[M, 3 * N]) -> f32[M, N]:
    """Of three colours by turns."""
    return 0.25 * image[:, ::3] + 0.5 * image[:, 1::3] + 0.25 * image[:, 2::3]


@chain(M=24, N=64)
def normed_pairs(x: bf16[M, 2 * N]) -> bf16[M, 2 * N]:
    """Both of each pair, by the norm of all firsts: they wait in registers for it."""
    even, odd = x[:, ::2], x[:, 1::2]
    scale = F.rsqrt(F.mean(F.square(even)) + 1e-5)
    return F.rearrange(F.stack([even * scale, odd * scale], -1), "m n two -> m (n two)")


@chain(M=24, N=64)
def only_even(x: bf16[M, 2 * N]) -> bf16[M, N]:
    """The other half of each vector would be read for nothing."""
    return F.relu(x[:, ::2])


ROPE = SHIPPED["rope_interleaved"].at(T=24, H=4, D=32)
SPECS = (ROPE, luminance, normed_pairs, only_even, SHIPPED["nvfp4_quant"].at(M=24, N=128))
MADE: dict[tuple[str, str], Program] = {}


def made(spec: Chain, target: str = "cuda:h200") -> Program:
    key = spec.name, target
    if key not in MADE:
        found = fusegen.compile(spec, target=target, on="emulator", validate=False)
        assert isinstance(found, Program)
        MADE[key] = found
    return MADE[key]


def plan_of(program: Program) -> RowPlan:
    (step,) = program.plan.steps
    assert isinstance(step.plan, RowPlan)
    return step.plan


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_it_is_right_in_every_layout(spec: Chain, target: str) -> None:
    report = validate(made(spec, target))
    assert report.ok, str(report)


@pytest.mark.parametrize("target", TARGETS)
def test_a_pair_moves_as_one(target: str) -> None:
    whole: Any = fusegen.plan(SHIPPED["rope_interleaved"], target)
    (plan,) = whole.launched
    assert plan.layout.interleaved == {("even", "odd"), ("out_even", "out_odd")}
    assert not plan.layout.apart
    moved = {access.tensor: (access.vector_bytes, access.together) for access in plan.accesses}
    assert moved["even"] == moved["odd"] == moved["out_even"] == (16, 2)
    text = made(ROPE, target).sources[0].text
    assert "load_apart" not in text
    assert "store_apart" not in text
    assert "even_vec.at[2 * j + 1]" in text


def test_one_of_two_is_read_by_itself() -> None:
    plan = plan_of(made(only_even))
    assert not plan.layout.interleaved
    assert plan.layout.apart == {"x_even"}


def test_three_by_turns() -> None:
    program = made(luminance)
    assert [len(names) for names in plan_of(program).layout.interleaved] == [3]
    image = np.random.default_rng(0).standard_normal((7, 144)).astype(np.float32)
    red, green, blue = (image[:, place::3].astype(np.float64) for place in range(3))
    np.testing.assert_allclose(program(image), 0.25 * red + 0.5 * green + 0.25 * blue, rtol=1e-5, atol=1e-6)


def test_pairs_may_be_turned_where_they_are() -> None:
    program = made(ROPE)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, 4, 32)).astype(bf16.numpy)
    angle = rng.uniform(0, 6, (9, 1, 16)).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    wanted = program(x, cos, sin)
    assert program(x, cos, sin, out=x) is x
    assert (x.view(np.uint16) == wanted.view(np.uint16)).all()


def test_a_kernel_of_such_a_step_is_called_by_its_program() -> None:
    """What lies where is known of the program's arrays; a record of a call's addresses would not tell."""
    (kernel,) = made(ROPE).kernels
    assert isinstance(kernel, Kernel)
    x = np.zeros((9, 4, 32), bf16.numpy)
    turns = np.zeros((9, 1, 16), np.float32)
    with pytest.raises(ArgumentError, match=r"even and odd; out_even and out_odd: call its program"):
        kernel(x[..., ::2], x[..., 1::2], turns, turns)


@pytest.mark.parametrize(("found", "wrong"), [
    ("even_vec.at[2 * j + 1]", "even_vec.at[2 * j]"),
    ("out_even_vec.at[2 * j + 1] =", "out_even_vec.at[2 * j] ="),
    ("even_row + col * 2", "even_row + col"),
])  # fmt: skip
def test_elements_of_the_other_one_are_caught(found: str, wrong: str) -> None:
    program = made(ROPE)
    (kernel,) = program.kernels
    assert isinstance(kernel, Kernel)
    text = kernel.source.text.replace(found, wrong)
    assert text != kernel.source.text
    other = Kernel(replace(kernel.source, text=text), None, program.device, kernel.make_variant)
    assert not validate(Program(program.plan, [other], program.device), quick=True).ok
