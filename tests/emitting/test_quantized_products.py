"""Products whose results are quantized where they are summed: by every way to multiply, and what is wrong is caught."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f8e4m3, f32, i8
from fusegen import ops as F
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.planner import candidates
from fusegen.planner.programs.lowering import lowered
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.product_parts import grouped
from fusegen.planner.programs.steps import step_of, whole
from fusegen.targets import target
from fusegen.validation import validate
from tests.drawn_groups import judged
from tests.emitting.test_row_parts import built
from tests.specs import SHIPPED

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("emulated_only")

M, K, N = dims("M K N")


@chain(M=70, K=64, N=384)
def layer(x: bf16[M, K], w: bf16[N, K], bias: bf16[N], residual: bf16[M, N]) -> tuple[f8e4m3[M, N], f32[M, N // 128]]:
    values, scale = F.quantize(F.gelu(x @ w.T + bias) + residual, f8e4m3, per="block", block=128)
    return values, scale


@chain(M=70, K=64, N=256)
def gated(x: bf16[M, K], gate: bf16[N, K], up: bf16[N, K]) -> tuple[f8e4m3[M, N], f32[M, N // 128]]:
    values, scale = F.quantize(F.silu(x @ gate.T) * (x @ up.T), f8e4m3, per="block", block=128)
    return values, scale


@chain(M=70, K=160, N=256)
def promoted(x: f8e4m3[M, K], w: f8e4m3[N, K], sx: f32[M, 1], sw: f32[N]) -> tuple[f8e4m3[M, N], f32[M, N // 128]]:
    values, scale = F.quantize((x @ w.T) * sx * sw, f8e4m3, per="block", block=128, rule="vllm")
    return values, scale


@chain(M=70, K=64, N=256)
def both(x: bf16[M, K], w: bf16[N, K]) -> tuple[bf16[M, N], f32[M, N // 128]]:
    """An element's result beside a group's, neither of 8 bits."""
    z = F.groups(F.relu(x @ w.T), 128)
    total = F.sum(z)
    return F.rearrange(z - total, "m g k -> m (g k)"), F.rearrange(total, "m g 1 -> m g")


@chain(M=70, K=160, N=200)
def static(x: i8[M, K], w: i8[N, K], scale: f32[N]) -> i8[M, N]:
    """8 bits without groups: quads of lanes store them."""
    return F.cast((x @ w.T) * scale, i8)


def one_kernel(spec: Chain, at: str, start: str) -> ProgramPlan:
    """The chain as the one kernel whose configuration begins so."""
    chosen = target(at)
    step = lowered(spec.graph) if spec.graph.viewed else whole(spec.graph)
    for plan in candidates(step.graph, chosen).plans:
        if plan.configuration.startswith(start):
            return ProgramPlan(spec.graph, chosen, (step_of(step, plan),), ())
    raise AssertionError(f"{spec.name} has no {start} on {at}")


WAYS = [
    (layer, "cuda:h200", "wgmma pingpong 128x128"),
    (layer, "cuda:h200", "wgmma cooperative 80x128"),
    (layer, "cuda:a100", "gemm 64x128x64 4x1"),
    (layer, "cuda:a100", "gemm 64x128x32 2x4 4 by-shared"),
    (layer, "hip:mi300x", "gemm 64x128"),
    (gated, "cuda:h200", "wgmma cooperative 128x256"),
    (gated, "cuda:a100", "gemm 64x128x64 2x4 3 by-shared"),
    (gated, "hip:mi300x", "gemm 64x128"),
    (promoted, "cuda:h200", "wgmma"),
    (promoted, "cuda:l40s", "gemm 64x128"),
    (both, "cuda:h200", "wgmma pingpong 128x128"),
    (both, "cuda:a100", "gemm 64x128x64 4x1"),
    (both, "hip:mi300x", "gemm 64x128"),
    (static, "cuda:h200", "wgmma"),
]


@pytest.mark.parametrize(("spec", "at", "start"), WAYS, ids=lambda value: getattr(value, "name", value))
def test_every_way_to_multiply_is_right(spec: Chain, at: str, start: str) -> None:
    report = validate(built(one_kernel(spec, at, start)), quick=True)
    assert report.ok, str(report)


@pytest.mark.parametrize("at", ["cuda:h200", "hip:mi300x"])
def test_operands_that_begin_anywhere(at: str) -> None:
    """Kernels for other layouts quantize too: two products of 128 columns, an element at a time."""
    report = validate(fusegen.compile(gated, at, on="emulator", validate=False))
    assert report.ok, str(report)


def test_one_kernel_quantizes_what_it_multiplies() -> None:
    found: Any = fusegen.plan(SHIPPED["gemm_swiglu_quant_block"], target="cuda:h200")
    (step,) = found.steps
    (group,) = step.plan.output_groups
    assert step.plan.rule == "wgmma"
    assert group.held, "SwiGLU is computed once, and quantized from where it is held"
    assert [store.transport for store in group.stores] == ["quads"]


def test_rows_are_quantized_before_and_tiles_behind() -> None:
    found: Any = fusegen.plan(SHIPPED["fp8_norm_swiglu_quant"], target="cuda:h200")
    assert [step.plan.rule for step in found.steps] == ["rowwise", "wgmma"]
    assert {tensor.type.dtype for tensor in found.between} == {f8e4m3, f32}


@pytest.mark.parametrize(("block", "kernels"), [(128, 1), (256, 2)])
def test_a_tile_that_holds_no_group_is_cut(block: int, kernels: int) -> None:
    """Promoted sums of two products have registers for 128 columns of each, whose halves are multiplied one after
    another. Of more, what one makes goes to memory in between."""
    small = SHIPPED["fp8_norm_swiglu_quant"].graph.products
    assert {node.promote for node in small} == {0}

    @chain(M=4096, K=4096, N=14336)
    def exact(x: f8e4m3[M, K], gate: f8e4m3[N, K], up: f8e4m3[N, K]) -> tuple[f8e4m3[M, N], f32[M, N // block]]:
        values, scale = F.quantize(F.silu(x @ gate.T) * (x @ up.T), f8e4m3, per="block", block=block)
        return values, scale

    found: Any = fusegen.plan(exact, target="cuda:h200")
    products = [step.plan for step in found.steps if step.graph.products]
    assert len(products) == kernels
    assert all(plan.rule == "wgmma" for plan in products)
    assert {plan.tile.across for plan in products} >= ({2} if kernels == 1 else set())


def test_what_rows_of_a_product_are_reduced_to_may_meet_operands() -> None:
    """Element by element, which tensor copies do not bring where tiles reduce: read by pairs."""

    @chain(M=70, K=64, N=520)
    def beside(x: bf16[M, K], w: bf16[N, K], residual: bf16[M, N], bias: bf16[N]) -> f32[M, 1]:
        return F.logsumexp(x @ w.T + residual + bias)

    first = next(iter(grouped(whole(beside.graph), target("cuda:h200")))).first
    plan = next(p for p in candidates(first.graph, target("cuda:h200")).plans if p.rule == "wgmma")
    report = validate(built(ProgramPlan(first.graph, plan.target, (step_of(first, plan),), ())), quick=True)
    assert report.ok, str(report)


@pytest.mark.parametrize("at", ["cuda:h200", "cuda:a100", "hip:mi300x"])
def test_any_reductions_of_groups_are_those_of_numpy(at: str) -> None:
    """A few of many: `python -m tests.drawn_groups 0-200 --target NAME`. None is refused."""
    assert {seed: judged(seed, at) for seed in range(8)} == dict.fromkeys(range(8), "right")


def test_quads_of_lanes_put_columns_in_order() -> None:
    """Every column is another number, so that a swap between lanes shows."""
    x = np.eye(64, 160).astype(i8.numpy)
    w = (np.arange(200 * 160) % 251 - 125).reshape(200, 160).astype(i8.numpy)
    found = built(one_kernel(static, "cuda:h200", "wgmma"))(x, w, np.ones(200, np.float32))
    np.testing.assert_array_equal(found, w.T[:64])


MISTAKES = {
    "a lane of a row is left out": (layer, r"int step = 2; step > 0", "int step = 1; step > 0"),
    "the factor of the other row": (layer, r"factor = factor_of\[r8\]", "factor = factor_of[r8 ^ 1]"),
    "the scale of another group": (layer, r"at\.col0 / tile_cols\)", "at.col0 / (2 * tile_cols))"),
    "what is held is the other row's": (layer, r"sums\[(\w)\]\[sum_at \+ j\] = ", r"sums[\1][sum_at ^ 2 | j] = "),
    "pairs of a quad swap places": (layer, r"odd \? 0x3276 : 0x7632", "odd ? 0x7632 : 0x3276"),
    "halves of a quad are not swapped": (static, r"high \? far : near, high \? near : far", "near, far"),
    "codes begin a column later": (layer, r"lane % 4 \* 8;", "lane % 4 * 8 + 8;"),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "wrong", "right"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_caught(spec: Chain, wrong: str, right: str) -> None:
    program = one_kernel(spec, "cuda:h200", "wgmma")
    assert not validate(built(program, (wrong, right)), quick=True).ok
