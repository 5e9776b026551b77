"""Where blocks of products lie in the grid on GPUs of several dies, and what each die's L2 cache brings for them."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from fusegen import Chain, bf16, chain, dims
from fusegen.emitting.rendering import render
from fusegen.planner import plan
from fusegen.planner.products.gemm import GemmPlan
from fusegen.targets import MI300X, Target, target
from tests.programs import launch
from tests.tools import needs_compiler

B, M, N, K = dims("B M N K")


@chain(M=4096, N=4096, K=4096)
def product(x: bf16[M, K], w: bf16[N, K]) -> bf16[M, N]:
    return x @ w.T


@chain(B=3, M=700, N=1200, K=64)
def products(x: bf16[B, M, K], w: bf16[B, K, N]) -> bf16[B, M, N]:
    return x @ w


def tiles_of_blocks(one: Chain, on: Target) -> tuple[GemmPlan, list[tuple[int, int, int]]]:
    """Of each block in turn: its product, its row of tiles and its tile in there, as the kernel's own lines say."""
    found = plan(one.graph, on)
    assert isinstance(found, GemmPlan)
    text, tile = render(found).text, found.tile
    sizes = re.findall(r"^constexpr int (?:tile_rows|tiles_across|group|dies) .*$", text, re.MULTILINE)
    by_die = re.findall(r"^__device__ [^\n]* by_die\(.*?^}", text, re.MULTILINE | re.DOTALL)
    lines = text[text.index("  const unsigned tiles_down") : text.index("  const int rows_here")]
    product = "B_at" if "B_at" in lines else "0"
    rows = one.graph.sizes["M"]
    batches = one.graph.sizes.get("B", 1)
    across = -(-one.graph.sizes["N"] // tile.cols)
    blocks = batches * -(-rows // tile.rows) * across
    source = "\n".join([
        *sizes, *by_die,
        'extern "C" __global__ void kernel(const int* unused, int* out) {', f"  const long long rows = {rows};", lines,
        f"  out[3 * blockIdx.x] = {product};", "  out[3 * blockIdx.x + 1] = row0 / tile_rows;",
        "  out[3 * blockIdx.x + 2] = across;", "}",
    ])  # fmt: skip
    out = np.full(3 * blocks, -1, np.int32)
    launch(source, [np.zeros(1, np.int32), out], check=False, warp=64, threads=1, grid=(blocks, 1, 1))
    return found, [(int(batch), int(row), int(col)) for batch, row, col in out.reshape(-1, 3)]


@needs_compiler
@pytest.mark.parametrize("name", ["hip:mi300x", "hip:mi300a"])
def test_every_tile_is_a_blocks_whatever_their_number(name: str) -> None:
    found, places = tiles_of_blocks(products, target(name))
    down, across = -(-700 // found.tile.rows), -(-1200 // found.tile.cols)
    assert len(places) % found.dies
    assert sorted(places) == [(b, r, c) for b in range(3) for r in range(down) for c in range(across)]


def filled_bytes(found: GemmPlan, places: list[tuple[int, int, int]]) -> int:
    """What the dies' caches bring of the factors, where blocks that a die holds at a time go along K together: of each
    row and each column of tiles that these have, the factor's part once."""
    dies = MI300X.dies
    at_once = MI300X.sms // dies * found.cost.blocks_per_sm
    parts = 0
    for die in range(dies):
        own = places[die::dies]
        for first in range(0, len(own), at_once):
            together = own[first : first + at_once]
            parts += len({row for _, row, _ in together}) * found.tile.rows
            parts += len({col for *_, col in together}) * found.tile.cols
    return parts * found.k * 2


@needs_compiler
def test_dies_fill_their_caches_with_half_as_much() -> None:
    """Neighbouring tiles for each die, against neighbours on different dies."""
    found, places = tiles_of_blocks(product, MI300X)
    plain, in_turn = tiles_of_blocks(product, replace(MI300X, dies=1))
    assert found.tile == plain.tile
    assert filled_bytes(found, places) < 0.5 * filled_bytes(plain, in_turn)
