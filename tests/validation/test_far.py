"""Launches whose rows lie where 32 bits don't reach: how far they go, and what in them may be touched.

What wraps is planted in tests/mutations.py and tests/gemm_mutations.py.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest

from fusegen.emulator import Buffer, build
from fusegen.language.types import f32
from fusegen.planner import candidates
from fusegen.planner.model import Plan
from fusegen.runtime.emulated import EmulatorDevice
from fusegen.targets import target
from fusegen.validation import far
from fusegen.validation.inputs import free_dims, sizes_for
from tests.mutations import chains
from tests.sizes import sizes_at
from tests.tools import BUILDS, needs_compiler

TARGETS = ("cuda:h200", "hip:mi300x")


def plans(where: str) -> list[Plan]:
    found: list[Plan] = []
    for chain in chains().values():
        graph = chain.graph.at(**sizes_at(chain.graph, 515))
        found += candidates(graph, target(where)).plans
    return found


@pytest.mark.parametrize("where", TARGETS)
def test_launches_end_where_a_plan_or_memory_does(where: str) -> None:
    for plan in plans(where):
        sizes = sizes_for(plan, 5)
        dim = far.outer_dim(plan, free_dims(plan, plan.flat))
        if not dim:  # as of results that have a group first, of which no call has more
            assert any(n.any_ends for n in plan.graph.products)
            continue
        skip = far.left_out(plan, sizes, dim)
        whole = {**sizes, dim: sizes[dim] + skip}
        rows = np.prod(far.extents(plan, whole), dtype=np.int64)
        reach = max(far.bytes_of(t, whole) for t in (*plan.graph.inputs, *plan.graph.outputs))
        assert rows <= plan.max_rows
        step = np.prod(far.extents(plan, {**sizes, dim: math.lcm(far.EVEN, plan.rows_per_block)}), dtype=np.int64)
        last = rows + step > plan.max_rows  # no launch reaches further, as of few queries a block on AMD
        assert reach > 2**33 or last, f"{plan.name}, {plan.regime}: offsets that 32 bits hold prove nothing"
        assert np.prod(far.extents(plan, {**sizes, dim: skip}), dtype=np.int64) % plan.rows_per_block == 0


def test_lines_lie_far_apart_and_are_all_the_memory_there_is() -> None:
    view = far.spread((2, 3, 5), f32)
    view.numpy()[...] = np.arange(30).reshape(2, 3, 5)
    assert np.array_equal(view.numpy().ravel(), np.arange(30))
    assert view.strides[0] == 3 * view.strides[1] > 3 * 2**31
    lines = far.lines_of(view)
    assert [low - view.address for low, _ in lines] == [4 * view.strides[1] * i for i in range(6)]
    assert {high - low for low, high in lines} == {20}
    readable = far.readable(view)
    assert (readable[0][0], readable[-1][1]) == view.span, "nothing in front of the first line, or behind the last one"


@needs_compiler
@pytest.mark.parametrize("check", BUILDS)
def test_only_some_blocks_of_a_grid_run(check: bool) -> None:
    source = """extern "C" __global__ void kernel(int* y) {
  const long long block = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  y[block] = static_cast<int>(block);
}"""
    kernel = build(source, "kernel", warp=32, check=check, filename="some.cu")
    y = np.full(4, -1, np.int32)
    first, grid = 2**32 + 5, (2**31 - 1, 3, 1)
    address = y.ctypes.data - 4 * first
    memory = [Buffer("y", address, y.ctypes.data, y.nbytes, initialised=False)]
    kernel.launch(grid, (1, 1, 1), 0, [ctypes.c_void_p(address)], memory=memory, only=range(first, first + 3))
    assert y.tolist() == [5, 6, 7, -1]
    y[:] = -1
    kernel.launch(grid, (1, 1, 1), 0, [ctypes.c_void_p(address)], memory=memory, only=range(first + 1, first + 4, 2))
    assert y.tolist() == [-1, 6, -1, 8]


def test_memory_leaves_addresses_before_it() -> None:
    """However small it is: the checks count billions of rows back from there."""
    device = EmulatorDevice(target("cuda:h200"))
    held = [device.empty(size) for size in (0, 1, 4096, 1 << 20)]
    assert min(memory.address for memory in held) > far.MOST_BYTES
