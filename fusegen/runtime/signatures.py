"""What one call's arrays must share with an earlier call's for the earlier call's work to be used again.

A signature holds every shape, stride, dtype, device and the addresses' alignment, and not the addresses. Torch and
CuPy arrays have a fast reader, which is most of what a repeated call costs; all others go through their views.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from fusegen.runtime.arrays import ArrayView

Signature = tuple[Any, ...]
Reader = Callable[[Sequence[Any], int], "tuple[Signature, tuple[int, ...]] | None"]


def view_signature(views: Mapping[str, ArrayView], widest: int) -> Signature:
    """The signature of views, outputs included; `widest` is the widest vector in bytes."""
    return tuple(
        (name, v.dtype.name, v.shape, v.strides, v.device, v.writable, v.library, v.address % widest)
        for name, v in views.items()
    )


def fast_signature(arrays: Sequence[Any], widest: int) -> tuple[Signature, tuple[int, ...]] | None:
    """The signature and the addresses of arrays that are all torch tensors or all CuPy arrays; None for any others.

    `widest` is a power of two.
    """
    if arrays and (torch := sys.modules.get("torch")) is not None and isinstance(arrays[0], torch.Tensor):
        return torch_reader()(arrays, widest)
    if arrays and type(arrays[0]).__module__.startswith("cupy"):
        return cupy_signature(arrays, widest)
    return None


@cache
def torch_reader() -> Reader:
    """Reads tensors with their type's own methods, which saves a look-up for each, and refuses what is no tensor.

    What a signature leaves out: a lazily conjugated tensor is complex, so no call with one ever gets a record; a
    sparse tensor has no strides to ask for. A device's number alone would not do: the CPU's and meta's are both -1.
    """
    torch = sys.modules["torch"]
    tensor, differentiates = torch.Tensor, torch.is_grad_enabled
    address, size, stride, negated = tensor.data_ptr, tensor.size, tensor.stride, tensor.is_neg
    dtype, device, requires_grad = map(operator.attrgetter, ("dtype", "device", "requires_grad"))

    def read(arrays: Sequence[Any], widest: int) -> tuple[Signature, tuple[int, ...]] | None:
        try:
            pointers = tuple(map(address, arrays))
            traits = (
                *map(size, arrays), *map(stride, arrays), *map(dtype, arrays), *map(device, arrays),
                *map(negated, arrays),
            )  # fmt: skip
        except (TypeError, RuntimeError):  # not all are tensors; or sparse, fake: the views say what is wrong
            return None
        if differentiates() and any(map(requires_grad, arrays)):
            return None
        together = 0
        for pointer in pointers:
            together |= pointer
        if together & (widest - 1):
            return (*traits, *[pointer & (widest - 1) for pointer in pointers], len(pointers)), pointers
        return (*traits, len(pointers)), pointers

    return read


def cupy_signature(arrays: Sequence[Any], widest: int) -> tuple[Signature, tuple[int, ...]] | None:
    try:
        pointers = tuple(array.data.ptr for array in arrays)
        return tuple(
            (array.dtype.char, array.dtype.kind, array.shape, array.strides, array.data.device_id, ptr & (widest - 1))
            for array, ptr in zip(arrays, pointers, strict=True)
        ), pointers
    except AttributeError:
        return None
