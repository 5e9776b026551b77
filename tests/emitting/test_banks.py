"""Where products for AMD put factors in LDS, by the addresses that their own text makes: what meets in a bank."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from fusegen import Chain, bf16, chain, dims
from fusegen.emitting.rendering import render
from fusegen.planner import plan
from fusegen.planner.products.gemm import GemmPlan
from fusegen.targets import MI300X
from tests.programs import launch
from tests.tools import needs_compiler

M, N, K = dims("M N K")
IN_TURN = [range(first, first + 8) for first in range(0, 64, 8)]
# which lanes of 64 an instruction of 16 bytes a lane serves at once, where it reads: ROCm's blog, "Avoiding LDS Bank
# Conflicts on AMD GPUs Using CK-Tile Framework"
BY_READING = [
    [*range(a + half, a + half + 4), *range(b + half, b + half + 4)]
    for half in (0, 32)
    for a, b in ((0, 20), (4, 16), (8, 28), (12, 24))
]


@chain(M=4096, N=4096, K=4096)
def many(x: bf16[M, K], w: bf16[K, N]) -> bf16[M, N]:
    return x @ w


@chain(M=300, N=384, K=512)
def some(x: bf16[M, K], w: bf16[K, N]) -> bf16[M, N]:
    return x @ w


@chain(M=8, N=1024, K=4096)
def few(x: bf16[M, K], w: bf16[K, N]) -> bf16[M, N]:
    return x @ w


def slots(found: GemmPlan) -> tuple[np.ndarray, np.ndarray]:
    """Of each 16 bytes of the right factor that a wave stores, and of those that it reads for a fragment: which eighth
    of the 128 bytes of all banks. Each as (instruction, lane)."""
    text, tile, side = render(found).text, found.tile, found.atom.rows
    (factor,) = found.output_groups[0].rights
    columns, chunks = found.turned(factor), tile.k // found.chunk
    place = re.findall(r"^template <int Chunks>\n__device__ [^\n]* place\(.*?^}", text, re.MULTILINE | re.DOTALL)
    (own,) = re.findall(r"const int w_k = .*;", text)
    own = own.replace("lane /", "threadIdx.x % 64 /").replace("lane %", "threadIdx.x % 64 %")
    reads = tile.warp_cols // side * tile.k // found.atom.k
    source = f"""{place[0]}
extern "C" __global__ void kernel(const int* unused, int* out) {{
  {own}
  const int lane = threadIdx.x % 64;
  for (int v = 0; v < {columns}; ++v) out[v * 64 + lane] = place<{chunks}>(w_n + v, w_k) / 8 % 8;
  for (int i = 0; i < {reads}; ++i) {{
    const int n = i % {tile.warp_cols // side} * {side}, k = i / {tile.warp_cols // side} * {found.atom.k};
    out[({columns} + i) * 64 + lane] = place<{chunks}>(n + lane % {side}, k + lane / {side} * 8) / 8 % 8;
  }}
}}"""
    out = np.full((columns + reads) * 64, -1, np.int32)
    launch(source, [np.zeros(1, np.int32), out], check=False, warp=64, threads=64)
    return out.reshape(-1, 64)[:columns], out.reshape(-1, 64)[columns:]


def most_in_a_bank(of: np.ndarray, together: list[range] | list[list[int]]) -> int:
    return max(max(Counter(row[list(lanes)].tolist()).values()) for row in of for lanes in together)


@needs_compiler
@pytest.mark.parametrize(("one", "columns"), [(many, 2), (some, 1), (few, 2)], ids=lambda one: getattr(one, "name", ""))
def test_columns_of_a_factor_that_lies_by_rows_are_stored_and_read_without_conflicts(one: Chain, columns: int) -> None:
    """Stored two bytes at a time they met in a bank by sixteens."""
    found = plan(one.graph, MI300X)
    assert isinstance(found, GemmPlan)
    assert found.turned(found.output_groups[0].rights[0]) == columns
    stored, read = slots(found)
    assert most_in_a_bank(stored, IN_TURN) == 1
    assert most_in_a_bank(read, IN_TURN) == most_in_a_bank(read, BY_READING) == 1
