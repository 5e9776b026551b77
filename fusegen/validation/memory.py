"""Operands in device memory, laid out as asked, between guards; outputs poisoned and looked over afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fusegen.language.types import (
    DType,
    b8,
    bf16,
    f8e4m3,
    f8e4m3fnuz,
    f8e5m2,
    f8e5m2fnuz,
    f8e8m0,
    f16,
    f32,
    i8,
    i32,
    i64,
    u8,
    u32,
)  # fmt: skip
from fusegen.runtime.arrays import ArrayView
from fusegen.runtime.devices import Device, Memory

Array = np.ndarray[Any, np.dtype[Any]]

GUARD = 512  # bytes before and after: a multiple of every allocation's alignment

# What is there before a kernel writes: NaN with a payload that no arithmetic gives, and for the second run a number.
POISON: Mapping[DType, tuple[int, int]] = {
    f16: (0x7EDA, 0xB5A7),
    bf16: (0x7FDA, 0xB5A7),
    f32: (0x7FEDC0DE, 0xB5A7C0DE),
    i32: (0x5EDC0DE5, 0xB5A7C0DE - 2**32),
    u32: (0x5EDC0DE5, 0xB5A7C0DE),
    i64: (0x5EDC0DE55EDC0DE5, 0xB5A7C0DEB5A7C0DE - 2**64),
    b8: (0xDA, 0xA7),  # neither True nor False
    f8e4m3: (0xFF, 0xA7),  # the NaN that no conversion gives
    f8e5m2: (0xFE, 0xA7),
    **dict.fromkeys((f8e4m3fnuz, f8e5m2fnuz, f8e8m0, i8, u8), (0x5E, 0xA7)),
}


def told(dtype: DType) -> int:
    """The first poison where no kernel computes it; 0 of types all of whose bytes are results. There, what was not
    written shows where two runs over other poison differ."""
    return 0 if dtype in (f8e4m3fnuz, f8e5m2fnuz, f8e8m0, i8, u8) else POISON[dtype][0]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How an array lies in memory: elements between rows and before the first, outer axes swapped or of stride 0, the
    last two axes transposed: neighbours differ in the last but one."""

    padding: int = 0
    offset: int = 0
    swapped: bool = False
    broadcast: bool = False
    transposed: bool = False


CONTIGUOUS = Arrangement()


@dataclass(frozen=True, slots=True)
class Placed:
    """An array in device memory, with a picture of the bytes around it."""

    memory: Memory
    view: ArrayView
    image: Array  # bytes, as they were written

    def window(self, image: Array) -> Array:
        """The array's own elements within a picture of its memory."""
        view = self.view
        raw = np.dtype(f"u{view.dtype.bytes}")
        strides = [stride * view.dtype.bytes for stride in view.strides]
        return np.ndarray(view.shape, raw, image, view.address - self.memory.address, strides)


def strides_for(shape: Sequence[int], how: Arrangement) -> tuple[int, ...]:
    """Strides in elements. The last axis is contiguous, or the one before it."""
    if not shape:
        return ()
    if how.transposed:
        *outer, rows, cols = shape
        *strides, column, row = strides_for((*outer, cols, rows), replace(how, transposed=False))
        return (*strides, row, column)
    order = list(range(len(shape) - 1))
    if how.swapped and len(order) >= 2:
        order[-1], order[-2] = order[-2], order[-1]
    strides = [0] * len(shape)
    strides[-1] = 1
    step = shape[-1] + how.padding
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    if how.broadcast and order:
        strides[order[0]] = 0
    return tuple(strides)


def place(device: Device, value: Array, dtype: DType, how: Arrangement, poison: int) -> Placed:
    """A copy of `value` on the device; `poison` fills the guards and the gaps."""
    placed = reserve(device, value.shape, dtype, how, poison)
    placed.window(placed.image)[...] = np.ascontiguousarray(value).view(f"u{dtype.bytes}").reshape(value.shape)
    placed.memory.write(placed.image)
    return placed


def reserve(device: Device, shape: Sequence[int], dtype: DType, how: Arrangement, poison: int) -> Placed:
    """Room for an output, poisoned all over."""
    strides = strides_for(shape, how)
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
    nbytes = 2 * GUARD + (reach + how.offset) * dtype.bytes
    nbytes += -nbytes % 16
    memory = device.empty(nbytes)
    image = np.full(nbytes // dtype.bytes, poison % 2 ** (8 * dtype.bytes), f"u{dtype.bytes}").view(np.uint8)
    view = memory.view(dtype, tuple(shape), strides=strides, offset=GUARD + how.offset * dtype.bytes)
    memory.write(image)
    return Placed(memory, view, image)


def read_output(placed: Placed, poison: int, name: str) -> tuple[Array, str]:
    """The elements in their storage type, and what is wrong with how they were written (empty: nothing).

    `poison` must be a value that no kernel computes, or 0 to look for stray bytes only.
    """
    after = placed.memory.read()
    found = placed.window(after).copy()
    view = placed.view
    missing = found == np.array(poison % 2 ** (8 * view.dtype.bytes), found.dtype)
    problem = ""
    if poison and missing.any():
        first = tuple(int(i) for i in np.argwhere(missing)[0])
        problem = f"{name}: {int(missing.sum())} of {missing.size} elements were not written, first {list(first)}"
    placed.window(after)[...] = placed.window(placed.image)
    stray = np.flatnonzero(after != placed.image)
    if stray.size:
        low, high = (address - placed.memory.address for address in view.span)
        at = int(stray[0])
        where = (
            f"{low - at} bytes before it" if at < low else "between rows" if at < high else f"{at - high} past its end"
        )
        problem = problem or f"{name}: {stray.size} bytes outside of the array were overwritten, the first {where}"
    return found.view(view.dtype.numpy), problem


def untouched(placed: Placed) -> bool:
    """Whether an operand's memory is as it was before the launch."""
    return bool(np.array_equal(placed.memory.read(), placed.image))


def repeated(value: Any) -> Any:
    """An array that is the same along its first axis, as a stride of 0 would read it."""
    array = np.asarray(value)
    return np.broadcast_to(array[:1], array.shape).copy() if array.ndim >= 2 else value
