"""Products on Blackwell's tensor cores: what the rule plans and refuses, what kernels compute, what mutations break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fusegen import Chain, bf16, chain, dims, f8e4m3, f8e5m2, f32, i8
from fusegen import ops as F
from fusegen.compiling import compile_source
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError
from fusegen.planner import CONTIGUOUS, candidates
from fusegen.planner.matching import NoMatch
from fusegen.planner.model import Layout, Source
from fusegen.planner.products.tcgen05 import Tcgen05Plan
from fusegen.planner.products.tcgen05_rule import tcgen05
from fusegen.runtime import Kernel
from fusegen.runtime.finding import find
from fusegen.targets import B200, B300, TARGETS, Target
from fusegen.targets.cuda import ARCHES
from fusegen.validation import validate
from fusegen.validation.accumulation import Multiplication, accumulations
from tests.emitting import test_wgmma as hopper
from tests.tools import needs_check

M, N, K = dims("M N K")


@chain(M=300, N=272, K=160)
def whole(x: i8[M, K], w: i8[N, K], scale: f32[N]) -> f32[M, N]:
    return F.cast(x @ w.T, f32) * scale


@chain(M=300, N=272, K=160)
def narrow_floats(x: f8e4m3[M, K], w: f8e4m3[N, K], sx: f32[M, 1], sw: f32[N]) -> bf16[M, N]:
    return (x @ w.T) * sx * sw


@chain(M=300, N=272, K=160)
def two_narrow_floats(x: f8e5m2[M, K], w: f8e4m3[N, K]) -> f32[M, N]:
    return x @ w.T


@chain(M=4096, N=512, K=512)
def linear(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]) -> bf16[M, N]:
    """A bias and GELU behind a product."""
    return F.gelu(x @ w.T + bias)


CHAINS = (
    hopper.bias_gelu, hopper.transposed, hopper.mixed, hopper.batched, hopper.gated, hopper.narrow, *hopper.SIDES[:2],
    *hopper.TF32, whole, narrow_floats, two_narrow_floats,
)  # fmt: skip


def plans(spec: Chain, target: Target = B200) -> list[Tcgen05Plan]:
    return list(tcgen05(spec.graph, target, CONTIGUOUS))


def kernel_of(plan: Tcgen05Plan, edit: Callable[[str], str] = str) -> Kernel:
    """In the checking emulator; for other layouts the same tile, where this rule takes them."""

    def variant(layout: Layout) -> tuple[Source, None]:
        found = candidates(plan.graph, B200, layout).need()
        same = [p for p in found if isinstance(p, Tcgen05Plan) and p.tile == plan.tile]
        return render((same or found)[0]), None

    source = render(plan)
    return Kernel(replace(source, text=edit(source.text)), None, find(B200, "emulator", check=True), variant)


@pytest.mark.parametrize("target", [t for t in (*TARGETS.values(), ARCHES["sm_100"]) if t not in (B200, B300)], ids=str)
def test_only_two_architectures_have_it(target: Target) -> None:
    with pytest.raises(NoMatch, match=f"{target.arch} has no tcgen05; sm_100a and sm_103a have"):
        plans(hopper.bias_gelu, target)


@pytest.mark.always
def test_the_kernel_is_the_one_that_was_read(request: pytest.FixtureRequest) -> None:
    """To be read from its header to its last store: `pytest --update-golden` writes it anew, to be read again."""
    file, text = Path(__file__).with_name("tcgen05_linear.cu"), render(plans(linear)[0]).text
    if request.config.getoption("--update-golden"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@needs_check
@pytest.mark.parametrize("spec", CHAINS, ids=lambda spec: spec.graph.name)
def test_every_chain_is_right(spec: Chain) -> None:
    assert validate(kernel_of(plans(spec)[0]), quick=True).ok


@pytest.mark.parametrize("spec", CHAINS, ids=lambda spec: spec.graph.name)
def test_every_tile_compiles(spec: Chain) -> None:
    for plan in (plan for plan in plans(spec) if plan.tile.group == 8):
        try:
            compile_source(render(plan).text, plan.name, B200, filename=f"{plan.name}.cu", threads=plan.threads)
        except MissingError as missing:
            pytest.skip(str(missing))


@pytest.mark.parametrize("spec", [linear, hopper.gated], ids=lambda spec: spec.graph.name)
def test_no_register_is_spilled(spec: Chain) -> None:
    """Of the widest tiles, half of whose sums a thread of the taking groups holds at a time."""
    plan = plans(spec)[0]
    assert plan.tile.cols == 256
    try:
        made = compile_source(render(plan).text, plan.name, B200, filename=f"{plan.name}.cu", threads=plan.threads)
    except MissingError as missing:
        pytest.skip(str(missing))
    assert made.resources.spill_bytes == 0


def test_narrow_floats_are_summed_in_f32() -> None:
    """Those of a B200 have its bits at least: neither are they added apart, nor have they wider bounds than halves."""
    plan = plans(narrow_floats)[0]
    assert plan.promote == 0
    assert not [line for line in plan.rounding if "significant bits" in line]
    formats = {what: term for term, what in plans(two_narrow_floats)[0].instruction_fields}
    assert formats["factors of f8e5m2 and f8e4m3"] == "1u << 7 | 0u << 10"


@needs_check
def test_other_layouts_of_narrow_floats_may_be_summed_in_fewer_bits() -> None:
    """Lines that tensor copies can't move are mma.sync's, whose bounds hold for the chain."""
    assert validate(kernel_of(plans(narrow_floats)[0]), rows=(), cases=("layout",)).ok
    for spec, bits, promote in ((narrow_floats, 14, 128), (linear, 24, 0), (whole, 24, 0)):
        (how,) = [h for h in accumulations(plans(spec)[0]).values() if isinstance(h, Multiplication)]
        assert (how.bits, how.summed.promote) == (bits, promote)


@needs_check
def test_formats_of_the_wrong_factors_are_caught() -> None:
    def swap(text: str) -> str:
        assert "1u << 7 | 0u << 10" in text
        return text.replace("1u << 7 | 0u << 10", "0u << 7 | 1u << 10")

    assert not validate(kernel_of(plans(two_narrow_floats)[0], swap), rows=(129,), cases=("rows",)).ok


@cache
def deep() -> Tcgen05Plan:
    """More slices than the ring has places, and several tiles for a block: both accumulators, more than once."""
    spec = hopper.bias_gelu.at(M=520, N=264, K=520)
    return plans(spec, replace(B200, sms=2))[0]


@needs_check
def test_the_ring_and_the_accumulators_are_used_again() -> None:
    assert validate(kernel_of(deep()), rows=(520,), cases=("rows",)).ok


# Each would be seen on a GPU as wrong numbers, sometimes, or as a launch that does not end.
BROKEN = {
    "products before the slice is there": ("wait_at(full + 8 * stage, parity);", ""),
    "a place that is not free": ("wait_at(empty + 8 * stage, parity);", ""),
    "sums before the products": ("wait_at(summed + 8 * own, parity);", ""),
    "an accumulator that has not been taken": ("wait_at(taken + 8 * turn, turn_parity);", ""),
    "no commit behind a tile": ("commit(summed + 8 * turn);", ""),
    "no commit behind a slice": ("commit(empty + 8 * stage);", ""),
    "a slice that is given back without a commit": ("commit(empty + 8 * stage);", "arrive_at(empty + 8 * stage);"),
    "a tile that is told of without a commit": ("commit(summed + 8 * turn);", "arrive_at(summed + 8 * turn);"),
    "no fence behind the wait for sums": ("parity ^= 1;\n      after_thread_sync();", "parity ^= 1;"),
    "no fence before products": ("after_thread_sync();  // behind both waits", ""),
    "no fence behind loads": ("before_thread_sync();\n          __syncwarp();", "__syncwarp();"),
    "no wait for loads": ('asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");', ""),
    "given back before the other half": ("if (i == 1) {", "if (i == 0) {"),
    "the other accumulator": ("accumulators + own * acc", "accumulators + (own ^ 1) * acc"),
    "accumulators that overlap": ("accumulators + turn * accumulator_cols", "accumulators + turn * 128"),
    "half of the lanes": ("i * (16 << 16)", "i * (0 << 16)"),
    "another warp's lanes": ("(warp * 32 << 16)", "((warp ^ 1) * 32 << 16)"),
    "columns of another load": ("own_sums + i * (16 << 16) + 2 * 64", "own_sums + i * (16 << 16) + 64"),
    "a step along K that is too short": ("+ k * (16 * line_bytes / 16), instr", "+ k * (8 * line_bytes / 16), instr"),
    "sums that nothing begins": ("(step | k) != 0", "true"),
    "sums that begin anew": ("(step | k) != 0", "k != 0"),
    "another swizzle": ("2ull << 61", "4ull << 61"),
    "Hopper's swizzle": ("2ull << 61", "1ull << 62 | 1ull << 61"),
    "Hopper's descriptor": ("1ull << 46", "0ull"),
    "a factor that lies along K": ("| 1u << 16", "| 0u"),
    "another type": ("1u << 7 | 1u << 10", "0u << 7 | 1u << 10"),
    "fewer columns": ("| 256u / 8 << 17", "| 128u / 8 << 17"),
    "less tensor memory": ("tensor_columns = 512", "tensor_columns = 256"),
    "no deallocation": ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;", ""),
    "one warp tells for four": ("start_barrier(taken + 8 * turn, 4)", "start_barrier(taken + 8 * turn, 1)"),
    "half of the bytes": ("expect_bytes(arrived, slice_bytes);", "expect_bytes(arrived, slice_bytes / 2);"),
    "boxes before they are written": ('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', ""),
}


@needs_check
@pytest.mark.parametrize(("old", "new"), BROKEN.values(), ids=BROKEN)
def test_broken_kernels_are_caught(old: str, new: str) -> None:
    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    kernel = kernel_of(deep(), edit)
    kernel.device.timeout_s = 5.0  # type: ignore[attr-defined]
    kernel.device.seed = 1  # type: ignore[attr-defined]  # one warp runs far ahead of the others
    assert not validate(kernel, rows=(520,), cases=("rows",)).ok
