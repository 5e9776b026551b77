"""Tensors whose rows' elements are apart in memory: what sectors a warp touches, what that costs, and which threads
share a row so that they are filled."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f32, i8
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.language.sharing import share_common
from fusegen.language.spec import Chain
from fusegen.pipeline import compile_program
from fusegen.planner import candidates
from fusegen.planner.model import Layout, RowPlan, Source, Tile
from fusegen.planner.programs import cheapest, step_candidates
from fusegen.planner.programs.lowering import lowered
from fusegen.planner.programs.parts import layout_of
from fusegen.planner.rows.sectors import times_moved
from fusegen.runtime import Kernel, Program, finding
from fusegen.targets import A100, H200, MI300X, Target
from fusegen.validation import validate
from tests.tools import needs_compiler

K, M, N = dims("K M N")
BY_TWO = Tile(128, 2, 64, 8, 1, 512)  # two threads a row, eight elements each: a warp has 16 rows
BY_WARPS = Tile(128, 128, 1, 8, 1, 8)


@chain(M=4096, N=8192)
def doubled(x: bf16[M, N]) -> bf16[N, M]:
    return (x * 2).T


@chain(M=4096, N=8192)
def exponentials(x: f32[M, N]) -> f32[N, M]:
    return F.exp(x.T)


@chain(M=4096, N=8192)
def scaled(x: i8[M, N], s: f32[M, 1]) -> bf16[N, M]:
    return (x * s).T


@chain(M=4096, N=8192)
def sums(x: bf16[M, N], y: bf16[N, M]) -> bf16[M, N]:
    return x + y.T


@chain(N=8192, K=8192)
def dequantized(w: i8[N, K], scale: bf16[N, K // 128]) -> bf16[K, N]:
    return F.dequantize(w, scale).T


@chain(M=4096, N=8192)
def thirds(x: bf16[M, N]) -> bf16[M, N // 4]:
    return x[:, ::4] * 2


TILED = (doubled, exponentials, scaled, sums)  # whose rows have one dimension
TURNED = (doubled, exponentials, scaled, sums, dequantized)


def plans(spec: Chain, target: Target = H200, **changes: Any) -> tuple[RowPlan, ...]:
    """Of its one kernel, as a program has it, with the layout's fields changed."""
    step = lowered(share_common(spec.graph))
    layout = replace(layout_of(step, spec.graph.sizes), **changes)
    found = candidates(step.graph, target, layout).plans
    assert all(isinstance(plan, RowPlan) for plan in found)
    return found  # type: ignore[return-value]


def shares(plan: RowPlan, tile: Tile | None = None) -> dict[str, float]:
    return dict(
        times_moved(
            plan.graph, plan.target, plan.layout, plan.row_dims, plan.accesses, tile or plan.tile, bool(plan.turned)
        )
    )


@pytest.mark.parametrize(
    ("spec", "tile", "wanted"),
    [
        (doubled, BY_WARPS, {"out": 16}),  # an element of 2 bytes in each sector of 32
        (doubled, BY_TWO, {"out": 1}),  # 16 elements
        (doubled, Tile(128, 4, 32, 8, 1, 256), {"out": 2}),  # of eight rows
        (doubled, Tile(128, 1, 128, 8, 1, 1024), {"out": 1}),
        (exponentials, Tile(128, 128, 1, 4, 1, 8), {"x_part": 8}),
        (exponentials, Tile(128, 4, 32, 4, 1, 512), {"x_part": 1}),
        (thirds, BY_WARPS, {"x_0_of_4": 4}),  # every fourth element, of whole sectors
    ],
)
def test_sectors_that_a_warp_touches_by_hand(spec: Chain, tile: Tile, wanted: dict[str, float]) -> None:
    (plan, *_) = [p for p in plans(spec) if p.tile.vector == tile.vector and not p.turned]
    assert shares(plan, tile) == wanted


def test_what_lies_between_others_that_are_read_too_takes_no_more() -> None:
    @chain(M=4096, N=8192)
    def pairs(x: f32[M, N], y: f32[M, N]) -> f32[M, N // 2]:
        return x[:, ::2] * x[:, 1::2] + y[:, ::2]

    (plan, *_) = plans(pairs)
    assert {tensor for tensor, _ in plan.layout.strides} == {"y_even"}
    assert shares(plan) == {"y_even": 2}


def test_few_rows_end_a_warp() -> None:
    (plan, *_) = [p for p in plans(doubled.at(M=3)) if not p.turned]
    assert shares(plan, BY_TWO) == {"out": pytest.approx(128 / 96)}  # 48 elements that follow one another


def test_what_a_warp_spreads_over_sectors_is_charged() -> None:
    """The kernel took 945 us on an H200, 1112 with the product behind it, whose threads were sixteen a row, and no rows
    of a warp next to each other in what it wrote; as it lay, it was expected to take 86 by the bytes alone."""
    apart = frozenset({("out", (2, 2 * 128 * 8192, 2 * 8192))})  # such that no rows are next to each other

    def time_us(**changes: Any) -> float:
        return next(
            p.cost.time_us for p in plans(dequantized, **changes) if p.configuration == "elementwise none 128/16 1x8"
        )

    assert time_us(strides=frozenset()) < 100
    assert time_us(strides=apart) == pytest.approx(945, rel=0.1)


@pytest.mark.parametrize("target", [A100, H200, MI300X], ids=str)
@pytest.mark.parametrize("spec", TURNED, ids=lambda spec: spec.graph.name)
def test_what_lies_turned_round_moves_by_whole_sectors(spec: Chain, target: Target) -> None:
    best, *others = [p for p in plans(spec, target) if not p.turned]
    (share,) = shares(best).values()
    assert share <= (1 if target.warp == 32 else 2)
    row_bytes = best.tile.threads_per_row * best.tile.vector * max(a.dtype.bytes for a in best.accesses)
    assert row_bytes >= 32
    assert min(p.cost.time_us for p in others if p.tile.threads_per_row >= target.warp) > 3 * best.cost.time_us


def test_without_known_strides_nothing_changes() -> None:
    (plan, *_) = plans(doubled, strides=frozenset())
    assert shares(plan) == {}
    assert plan.tile.threads_per_row >= 32
    assert plan.layout == Layout(split=True, apart=frozenset({"out"}))


@needs_compiler
@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("target", [H200, MI300X], ids=str)
@pytest.mark.parametrize("spec", TURNED, ids=lambda spec: spec.graph.name)
def test_rows_that_share_sectors_are_right(spec: Chain, target: Target) -> None:
    """At small sizes, where others would be chosen: as few threads a row, by ragged numbers of rows."""
    best, *_ = [p for p in plans(spec, target) if not p.turned]
    sizes = {name: size for name, size in {"M": 77, "N": 333, "K": 256}.items() if name in spec.graph.sizes}
    program = cheapest(spec.at(**sizes).graph, target)
    (step,) = program.steps
    like = [p for p in step_candidates(program, step).plans if isinstance(p, RowPlan) and not p.turned]
    plan = next(p for p in like if p.tile.threads_per_row == best.tile.threads_per_row and p.tile.col_tiles > 1)
    assert plan.tile.rows_per_block > 1
    made = replace(program, steps=(replace(step, plan=plan),))
    kernel = compile_program(made, on="emulator", validate=False, tuned=False, as_planned=True)
    validate(kernel, quick=True).raise_for_error()


@needs_compiler
@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("spec", [doubled, sums], ids=lambda spec: spec.graph.name)
def test_what_is_planned_at_one_row_takes_more_of_them(spec: Chain) -> None:
    """x.T of one row lies as a row does, and of two it does not."""
    kernel = compile_program(
        cheapest(spec.at(M=1, N=33).graph, H200), on="emulator", validate=False, tuned=False, as_planned=True
    )
    for rows in (1, 2, 77):
        x = np.arange(rows * 33).reshape(rows, 33) % 64
        given = [x, x.T][: len(spec.graph.inputs)]
        got = kernel(*(values.astype(bf16.numpy) for values in given))
        np.testing.assert_array_equal(got.astype(int), 2 * (x.T if spec is doubled else x))


def by_tiles(spec: Chain, target: Target) -> RowPlan:
    """The best plan at full sizes; that it goes by tiles is tested by itself."""
    return next(plan for plan in plans(spec, target) if plan.turned)


def tiled_kernel(spec: Chain, target: Target, plan: RowPlan, **sizes: int) -> Program:
    """Of one that is like `plan`, at sizes of which each block has a part, and some blocks less than a tile."""
    program = cheapest(spec.at(**sizes).graph, target)
    (step,) = program.steps
    like = [p for p in step_candidates(program, step).plans if isinstance(p, RowPlan) and p.turned]
    found = next(p for p in like if p.tile.rows_per_block == plan.tile.rows_per_block and p.tile.col_tiles > 1)
    made = replace(program, steps=(replace(step, plan=found),))
    return compile_program(made, on="emulator", validate=False, tuned=False, as_planned=True)


@pytest.mark.parametrize("target", [A100, H200], ids=str)
@pytest.mark.parametrize("spec", TILED, ids=lambda spec: spec.graph.name)
def test_what_lies_turned_round_goes_by_lines_through_shared_memory(spec: Chain, target: Target) -> None:
    """A request asks for a sector of a line where threads hold rows; by tiles for two at least, on either side."""
    best, *_ = plans(spec, target)
    (tensor,) = best.turned
    assert shares(best)[tensor] == 1
    size = next(access.dtype.bytes for access in best.accesses if access.tensor == tensor)
    assert best.tile.rows_per_block * size >= 64
    assert best.shared_bytes == -(-best.tile.cols * (best.tile.rows_per_block + 1) * size // 16) * 16


@pytest.mark.parametrize("spec", TILED, ids=lambda spec: spec.graph.name)
def test_threads_find_their_elements_of_a_tile_in_banks_of_their_own(spec: Chain) -> None:
    """Lanes of a row lie a vector apart, rows side by side; without the one element more they would share banks."""
    (best, *_) = plans(spec)
    (size,) = {access.dtype.bytes for access in best.accesses if access.tensor in best.turned}

    def most_in_a_bank(pitch: int) -> int:
        per_row, vector = best.tile.threads_per_row, best.tile.vector
        words = {(lane % per_row * vector * pitch + lane // per_row) * size // 4 for lane in range(32)}
        return max(Counter(word % 32 for word in words).values())

    assert most_in_a_bank(best.tile.rows_per_block + 1) == 1
    assert most_in_a_bank(best.tile.rows_per_block) > 1


@needs_compiler
@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("sizes", [{"M": 77, "N": 336}, {"M": 130, "N": 333}, {"M": 9, "N": 520}], ids=str)
@pytest.mark.parametrize("target", [H200, MI300X], ids=str)
@pytest.mark.parametrize("spec", TILED, ids=lambda spec: spec.graph.name)
def test_tiles_are_right(spec: Chain, target: Target, sizes: dict[str, int]) -> None:
    validate(tiled_kernel(spec, target, by_tiles(spec, target), **sizes), quick=True).raise_for_error()


FAULTS = {  # what a bug of the plan or the template would make of the text
    "nobody waits for the tile": (r"  __syncthreads\(\);[^\n]*\n", ""),
    "the tile has another pitch than threads think": (r"tile_pitch = block_rows \+ 1", "tile_pitch = block_rows"),
    "a row too many": (r"\(row \+ own_row >= rows\)", "(row + own_row > rows)"),
    "a column too many": (r"v \* step < cols\) to", "v * step <= cols) to"),
    "rows of the block before": (r"block_rows, rows,", "block_rows - 1, rows,"),
}


@needs_compiler
@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("fault", FAULTS)
def test_validation_finds_what_is_wrong_with_a_tile(fault: str) -> None:
    program = cheapest(doubled.at(M=130, N=336).graph, H200)
    (step,) = program.steps
    plan = next(
        p for p in step_candidates(program, step).plans
        if isinstance(p, RowPlan) and p.turned and p.tile.threads == 512 and p.tile.cols == 64
    )  # fmt: skip
    source = render(plan)
    text = re.sub(*FAULTS[fault], source.text, count=1)
    assert text != source.text
    device = finding.find(H200, "emulator")

    def finds_nothing(edited: Source) -> bool:
        kernel = Kernel(edited, None, device, lambda _: (edited, None))
        made = Program(replace(program, steps=(replace(step, plan=plan),)), [kernel], device)
        return validate(made, quick=True).ok

    assert finds_nothing(source)
    assert not finds_nothing(replace(source, text=text))
