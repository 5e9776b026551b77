"""Operands for a kernel that is timed or profiled: device memory full of noise, the same in every run.

What a kernel computes from them is nobody's business here, but that they are ordinary numbers is: zeros and NaNs can
take other paths through a kernel, and cost another amount of power. A tile of noise is drawn on the host and doubled on
the device until it fills the tensor, since drawing gigabytes takes longer than any timing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusegen.language.graph import Graph, Tensor
from fusegen.language.types import DType, Size, f32, i32, size_of
from fusegen.runtime.arrays import ArrayView
from fusegen.runtime.devices import Device
from fusegen.validation.grouped import ends_of
from fusegen.validation.inputs import index_limits, slot_operands

TILE_BYTES = 1 << 20
BUDGET_BYTES = 8 << 30  # of all sets together; one set may be larger
ROTATION_BYTES = 512 << 20  # once so many bytes have passed, the first set is out of every cache
MOST_SETS = 16
BOUNDED = {"lt": (1, 0), "le": (1, 1), "gt": (0, 0), "ge": (0, 1)}  # which operand is the bound, less what of a length


@dataclass(frozen=True, slots=True)
class Operands:
    """One set: `inputs` in the graph's order (a number for a run-time scalar), `outputs` uninitialised."""

    inputs: tuple[Any, ...]
    outputs: tuple[ArrayView, ...]

    @property
    def out(self) -> Any:
        """As a kernel's `out=` takes them."""
        return self.outputs if len(self.outputs) > 1 else self.outputs[0]


def operands(device: Device, graph: Graph, seed: int = 0) -> Operands:
    """Noise for every input at the graph's sizes. Raises MissingError when the device has no memory for it."""
    noise = np.random.default_rng(seed)
    limits, unique, ends = index_limits(graph, graph.sizes), slot_operands(graph), ends_of(graph)
    bounds = upper_bounds(graph)
    inputs: dict[str, Any] = {}
    for t in graph.inputs:
        if t.name in ends:
            rows = size_of(ends[t.name], graph.sizes)
            inputs[t.name] = group_ends(device, shape_at(t, graph)[0], rows, noise)
        elif t.name in unique:
            inputs[t.name] = places(device, t.dtype, shape_at(t, graph), noise, limits[t.name])
        elif t.shape and t.name in bounds:
            all_columns = min(bounds[t.name], limits.get(t.name, math.inf) - 1)
            inputs[t.name] = full(device, t.dtype, shape_at(t, graph), int(all_columns))
        elif t.shape:
            inputs[t.name] = filled(device, t.dtype, shape_at(t, graph), noise, limits.get(t.name, 2))
        else:
            inputs[t.name] = scalar(t)
    updated = {output: inputs[operand] for output, operand in graph.updates.items()}
    outputs = (updated.get(t.name) or empty(device, t.dtype, shape_at(t, graph)) for t in graph.outputs)
    return Operands(tuple(inputs.values()), tuple(outputs))


def rotation(device: Device, graph: Graph, budget: int = BUDGET_BYTES) -> list[Operands]:
    """Sets to take turns with: when a set's turn comes again, no cache holds any of it. At least one.

    Raises MissingError when the device has no memory for them.
    """
    each = max(1, sum(nbytes(t, graph) for t in (*graph.inputs, *graph.outputs)))
    count = min(MOST_SETS, 1 + ROTATION_BYTES // each, budget // each)
    return [operands(device, graph, seed) for seed in range(max(1, count))]


def shape_at(tensor: Tensor, graph: Graph) -> tuple[int, ...]:
    return shape_of(tensor.shape, graph.sizes)


def shape_of(shape: Sequence[Size], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size_of(size, sizes) for size in shape)


def nbytes(tensor: Tensor, graph: Graph) -> int:
    return math.prod(shape_at(tensor, graph)) * tensor.dtype.bytes


def places(
    device: Device, dtype: DType, shape: tuple[int, ...], noise: np.random.Generator, below: int
) -> ArrayView:  # fmt: skip
    """Indices of rows to write, each another one as long as there are so many; -1 from there on."""
    found = np.full(math.prod(shape), -1, dtype.numpy)
    count = min(found.size, below)
    found[:count] = noise.permutation(below)[:count]
    memory = device.empty(max(found.nbytes, 1))
    memory.write(found)
    return memory.view(dtype, shape)


def upper_bounds(graph: Graph) -> dict[str, int]:
    """The integers behind or at which columns are left out, as a cache's lengths are, and what leaves out none: the
    whole of a row is to be read, as the bytes are counted."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        if node.op.name not in BOUNDED:
            continue
        place, spare = BOUNDED[node.op.name]
        bound, column = node.inputs[place], node.inputs[1 - place]
        if column.op.name == "col_index" and bound in graph.tensor_of and bound.shape:
            found[graph.tensor_of[bound].name] = size_of(column.shape[-1], graph.sizes) - spare
    return found


def full(device: Device, dtype: DType, shape: tuple[int, ...], value: int) -> ArrayView:
    memory = device.empty(max(math.prod(shape) * dtype.bytes, 1))
    memory.write(np.full(shape, value, dtype.numpy))
    return memory.view(dtype, shape)


def group_ends(device: Device, groups: int, rows: int, noise: np.random.Generator) -> ArrayView:
    """Where groups of rows end, of which each row is as likely in any."""
    found = np.cumsum(noise.multinomial(rows, [1 / groups] * groups)).astype(np.int32)
    memory = device.empty(found.nbytes)
    memory.write(found)
    return memory.view(i32, found.shape)


def scalar(tensor: Tensor) -> float | int:
    """A run-time scalar: one that no multiplication can skip, for floats."""
    return 0.7109375 if tensor.dtype is f32 else 1


def empty(device: Device, dtype: DType, shape: tuple[int, ...]) -> ArrayView:
    return device.empty(math.prod(shape) * dtype.bytes).view(dtype, shape)


def filled(
    device: Device, dtype: DType, shape: tuple[int, ...], noise: np.random.Generator, below: int = 2
) -> ArrayView:
    """Device memory full of standard normal numbers (for masks coin flips, and integers from 0 to under `below`: so
    indices name rows all over their table), a tile repeated."""
    total = math.prod(shape) * dtype.bytes
    memory = device.empty(total)
    if total:
        count = min(total, TILE_BYTES) // dtype.bytes
        if dtype.kind == "float":
            tile = noise.standard_normal(count, dtype=np.float32).astype(dtype.numpy)
        else:
            tile = noise.integers(0, below, count).astype(dtype.numpy)
        memory.write(tile)
        done = tile.nbytes
        while done < total:
            step = min(done, total - done)
            device.copy(memory.address + done, memory.address, step, 0)
            done += step
    return memory.view(dtype, shape)
