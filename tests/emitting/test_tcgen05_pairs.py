"""Products on Blackwell's tensor cores by pairs of blocks: what is planned, and computed, and what mutations break."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from fusegen import Chain, bf16, chain, dims, i32
from fusegen import ops as F
from fusegen.compiling import compile_source
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError
from fusegen.planner import CONTIGUOUS, candidates
from fusegen.planner.products.tcgen05 import Tcgen05Plan
from fusegen.targets import B200
from fusegen.validation import validate
from tests.emitting import test_wgmma as hopper
from tests.emitting.test_tcgen05 import CHAINS, kernel_of, linear, plans
from tests.tools import needs_check

M, N, K, E = dims("M N K E")


@chain(M=4096, N=4096, K=4096)
def product(x: bf16[M, K], w: bf16[N, K]) -> bf16[M, N]:
    return x @ w.T


@chain(M=700, N=200, K=136, E=5)
def grouped(x: bf16[M, K], w: bf16[E, N, K], ends: i32[E]) -> bf16[M, N]:
    return F.grouped_matmul(x, w.mT, ends)


def pairs(spec: Chain, sms: int = B200.sms) -> list[Tcgen05Plan]:
    return [plan for plan in plans(spec, replace(B200, sms=sms)) if plan.tile.pair]


@pytest.mark.parametrize("rows", [4096, 8192, 3000])
def test_large_products_go_to_pairs(rows: int) -> None:
    """By the data sheet: each block reads half as much of the right factor from shared memory, and brings half."""
    best = min(candidates(product.at(M=rows).graph, B200, CONTIGUOUS).need(), key=lambda plan: plan.cost.time_us)
    assert isinstance(best, Tcgen05Plan)
    assert best.tile.pair
    assert (best.cluster, best.band) == (2, 256)


@pytest.mark.parametrize("size", [256, 512, 1024])
def test_small_products_do_not(size: int) -> None:
    """Tiles of 256 x 256 would leave SMs without work."""
    spec = product.at(M=size, N=size, K=size)
    best = min(candidates(spec.graph, B200, CONTIGUOUS).need(), key=lambda plan: plan.cost.time_us)
    assert not (isinstance(best, Tcgen05Plan) and best.tile.pair)


def test_a_pair_brings_the_right_factor_once() -> None:
    """And its blocks have as many bytes of a slice as a square tile's."""
    (pair, *_), (alone, *_) = pairs(product), plans(product)
    assert (pair.tile.left_bytes, pair.tile.right_bytes) == (128 * 128, 128 * 128)
    assert (alone.tile.left_bytes, alone.tile.right_bytes) == (128 * 128, 256 * 128)
    assert pair.cost.time_us < alone.cost.time_us


@needs_check
@pytest.mark.parametrize("spec", [*CHAINS, grouped], ids=lambda spec: spec.graph.name)
def test_every_chain_is_right(spec: Chain) -> None:
    assert validate(kernel_of(pairs(spec)[0]), quick=True).ok


@needs_check
@pytest.mark.parametrize("rows", [1, 100, 129, 255, 256, 385])
def test_rows_that_one_of_the_blocks_has_none_of(rows: int) -> None:
    plan = pairs(hopper.gated.at(M=rows, N=136, K=200), sms=4)[0]
    assert validate(kernel_of(plan), rows=(rows,), cases=("rows",)).ok


@pytest.mark.parametrize("spec", [linear, hopper.gated, hopper.transposed], ids=lambda spec: spec.graph.name)
def test_no_register_is_spilled(spec: Chain) -> None:
    plan = pairs(spec)[0]
    try:
        made = compile_source(render(plan).text, plan.name, B200, filename=f"{plan.name}.cu", threads=plan.threads)
    except MissingError as missing:
        pytest.skip(str(missing))
    assert made.resources.spill_bytes == 0


@cache
def deep() -> Tcgen05Plan:
    """One pair with several tiles, and more slices than the ring has places."""
    return pairs(hopper.bias_gelu.at(M=520, N=264, K=520), sms=2)[0]


@cache
def together() -> Tcgen05Plan:
    """Two products, halves of whose columns take turns in tensor memory."""
    return pairs(hopper.gated.at(M=300, N=136, K=200), sms=2)[0]


@needs_check
def test_the_ring_and_the_accumulators_are_used_again() -> None:
    assert validate(kernel_of(deep()), rows=(520,), cases=("rows",)).ok
    assert validate(kernel_of(together()), rows=(300,), cases=("rows",)).ok


MEET = "__cluster_barrier_arrive();\n  __cluster_barrier_wait();\n  "
# Each would be seen on a GPU as wrong numbers, sometimes, or as a launch that does not end.
BROKEN = {
    "copies of one block": ("2 * slice_bytes);  // of both", "slice_bytes);  // of both"),
    "copies that each block's own barrier counts": ("{%3, %4}], [there];", "{%3, %4}], [%2];"),
    "copies that the second block's barrier counts": ("there, %2, 0;", "there, %2, 1;"),
    "both blocks expect bytes": ("if (rank == 0) expect_bytes", "expect_bytes"),
    "the other half of the right factor": ("at.col0 + rank * own_cols", "at.col0 + (rank ^ 1) * own_cols"),
    "the same half in both blocks": ("at.col0 + rank * own_cols", "at.col0"),
    "sums of the other block's rows": ("at.row0 + warp * 32;", "at.row0 + (1 - 2 * rank) * tile_rows + warp * 32;"),
    "the same rows in both blocks": ("at.row0 += __clusterRelativeBlockRank() * tile_rows;", ""),
    "commits that tell the first block": ("static_cast<unsigned short>(3)", "static_cast<unsigned short>(1)"),
    "commits that tell the second block": ("static_cast<unsigned short>(3)", "static_cast<unsigned short>(2)"),
    "no commit behind a slice": ("commit(empty + 8 * stage);", ""),
    "no commit behind a tile": ("commit(summed + 8 * turn);", ""),
    "warps of one block": ("start_barrier(taken + 8 * turn, 8)", "start_barrier(taken + 8 * turn, 4)"),
    "each block tells itself": ("arrive_in(taken + 8 * own, 0)", "arrive_in(taken + 8 * own, rank)"),
    "an accumulator that has not been taken": ("wait_at(taken + 8 * turn, turn_parity);", ""),
    "products before the slice is there": ("wait_at(full + 8 * stage, parity);", ""),
    "a place that is not free": ("wait_at(empty + 8 * stage, parity);\n          if (rank", "if (rank"),
    "sums before the products": ("wait_at(summed + 8 * own, parity);", ""),
    "both blocks multiply": ("if (rank == 0 && own_warp", "if (own_warp"),
    "the second block multiplies": ("if (rank == 0 && own_warp", "if (rank == 1 && own_warp"),
    "a block begins before the other one": (f"{MEET}after", "__syncthreads();\n  after"),
    "a block ends before the other one": (f"{MEET}if (own", "__syncthreads();\n  if (own"),
    "one block allocates": (
        "if (own_warp == 1) {  // t",
        "if (own_warp == 1 && __clusterRelativeBlockRank() < 1) {  // ",
    ),
    "one block gives back": ("if (own_warp == 1) {\n    after", "if (own_warp == 1 && rank == 0) {\n    after"),
    "products of one block": ("tcgen05.mma.cta_group::2", "tcgen05.mma.cta_group::1"),
    "128 rows": ("| 256u / 16 << 24", "| 128u / 16 << 24"),
    "fewer columns": ("| 256u / 8 << 17", "| 128u / 8 << 17"),
    "no fence behind the wait for sums": ("parity ^= 1;\n      after_thread_sync();", "parity ^= 1;"),
    "no fence before products": ("after_thread_sync();  // behind both waits", ""),
    "no fence behind loads": ("before_thread_sync();\n          __syncwarp();", "__syncwarp();"),
    "tiles of each block": ("int tile = blockIdx.x / 2;", "int tile = blockIdx.x;"),
}


def caught(plan: Tcgen05Plan, rows: int, old: str, new: str, seed: int = 1) -> bool:
    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    kernel = kernel_of(plan, edit)
    kernel.device.timeout_s = 5.0  # type: ignore[attr-defined]
    kernel.device.seed = seed  # type: ignore[attr-defined]  # one warp runs far ahead of the others
    return not validate(kernel, rows=(rows,), cases=("rows",)).ok


@needs_check
@pytest.mark.parametrize(("old", "new"), BROKEN.values(), ids=BROKEN)
def test_broken_kernels_are_caught(old: str, new: str) -> None:
    assert caught(deep(), 520, old, new)


@needs_check
def test_a_block_that_ends_before_its_commits_is_caught() -> None:
    """In some schedules: a slice's commit comes to the second block behind the last tile's."""
    assert any(caught(deep(), 520, "last < stages", "last < 0", seed) for seed in range(1, 9))


OF_TWO = {
    "halves of products in their order": ("own_sums + i * (16 << 16) + 2 * 64", "own_sums + i * (16 << 16) + 64"),
    "the second product in the first one's place": ("right + own_cols * line_bytes + stage", "right + stage"),
    "the second product as far away as alone": ("right + own_cols * line_bytes", "right + tile_cols * line_bytes"),
}


@needs_check
@pytest.mark.parametrize(("old", "new"), OF_TWO.values(), ids=OF_TWO)
def test_broken_products_together_are_caught(old: str, new: str) -> None:
    assert caught(together(), 300, old, new)
