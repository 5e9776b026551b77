"""Launches whose rows lie where 32 bits don't reach, in the emulator: what wraps lands outside of every buffer.

No machine has the memory that such launches speak of, and they need none:

    last rows    The kernel is told of billions of rows, and only the blocks of the last ones run. The arrays hold those
                 rows alone, and each one's address is moved back by the rows that are not there.
    far apart    A few rows, 2^31 elements and more from one to the next, among addresses that are reserved, not used.

Every product and sum that makes an address is then computed as it is where arrays are that large, in whatever form the
kernel has it: a check of the emitted text would have to know each of them. The checking build allows the bytes of the
rows and no others.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fusegen.emulator import Buffer
from fusegen.errors import MissingError
from fusegen.language.graph import Graph, Tensor
from fusegen.language.types import Dim, DType, i32, size_of
from fusegen.planner.model import Plan
from fusegen.planner.products.gemm import GemmPlan
from fusegen.runtime import Kernel
from fusegen.runtime.arrays import ArrayView
from fusegen.runtime.calls import Record
from fusegen.runtime.devices import Launch
from fusegen.runtime.emulated import EmulatedLoaded
from fusegen.targets.tensor_map import MAX_STRIDE
from fusegen.validation.grouped import ends_of

Sizes = Mapping[str, int]

MOST_ROWS = 2**33  # beyond 32 bits, signed or not
MOST_BYTES = 2**44  # of an array: beyond any memory, and some of them fit a process's 2^47 bytes
EVERY_VECTOR = 64  # elements: a multiple of what plans read at once
BESIDE = 64  # bytes: vectors and blocks of 16 bytes jut out of lines that start anywhere
STRIDE = 2**31 + EVERY_VECTOR  # elements, beside those of the row
EVEN = 3 * 2**13  # rows left out are a multiple of it, so that blocks, tiles and groups of tiles begin where they did
EVERY_BLOCK_AT_ONCE = 2**40  # multiprocessors: no block of such a launch has a second tile or row


# ---------------------------------------------------------------- the last rows


def outer_dim(plan: Plan, free: Sequence[str]) -> str:
    """The dim whose size counts the outermost rows, if a call may choose it; else empty. Empty as well where a launch
    takes rows in another order than the shape's: its last blocks then have rows of all the array."""
    shape = plan.graph.shape
    first = shape[0]
    once = isinstance(first, Dim) and shape.count(first) == 1
    in_order = not plan.row_dims or plan.row_dims[0].axes[0] == 0
    return str(first) if once and in_order and str(first) in free else ""


def left_out(plan: Plan, sizes: Sizes, dim: str) -> int:
    """How many indices of `dim` may come before those of `sizes`, for a launch near the most that the plan takes."""
    one = {**sizes, dim: 1}
    most = plan.max_rows
    if plan.persistent_rows:  # blocks that take one row each
        most = min(most, plan.max_blocks // plan.cluster)
    if ends_of(plan.graph):  # which are i32
        most = min(most, int(i32.largest))
    widest = max(bytes_of(t, one) for t in (*plan.graph.inputs, *plan.graph.outputs) if Dim(dim) in t.shape)
    indices = min(most // math.prod(extents(plan, one)) - sizes[dim], MOST_ROWS, MOST_BYTES // widest)
    even = math.lcm(EVEN, plan.rows_per_block)
    return max(0, indices // even * even)


def last_launch(
    kernel: Kernel, views: Mapping[str, ArrayView], values: Sequence[float], sizes: Sizes, dim: str, skip: int
) -> Callable[[], None]:
    """The launch of `kernel` over the rows of `views` and `skip` indices of `dim` before them, which runs the blocks of
    the former. It may be called in another thread.

    Raises KernelError as a call does.
    """
    graph = kernel.plan.graph
    far = {t.name: moved(t, views[t.name], dim, skip) for t in (*graph.inputs, *graph.outputs) if t.shape}
    record = kernel.record(far, kernel.device, "fusegen")
    plan = kernel.variant_for(far).plan
    wide = replace(plan, target=replace(plan.target, sms=EVERY_BLOCK_AT_ONCE))
    before = replace(wide.block_count, groups=0)  # of rows that are all of one group
    first = before.of(*extents(plan, {**sizes, dim: skip}))
    last = wide.blocks(*extents(plan, {**sizes, dim: skip + sizes[dim]}))
    memory = [buffer(graph, name, view.span) for name, view in views.items()]
    return partial(
        launch, record, replace(record.launch, blocks=last), far, values, memory, blocks_of(plan, first, last)
    )


def blocks_of(plan: Plan, first: int, last: int) -> range:
    """The blocks of the last tiles, from `first` on, of `last`: where blocks are dealt out to dies, every so many-th,
    since they are the last die's."""
    dies = plan.dies if isinstance(plan, GemmPlan) else 1
    start = last - last // dies  # of the last die's tiles
    assert first >= start, "the tiles that are left out are most of them"
    return range(dies - 1 + dies * (first - start), last, dies) if dies > 1 else range(first, last)


def moved(tensor: Tensor, view: ArrayView, dim: str, skip: int) -> ArrayView:
    """The array of which `view` is the end along `dim`."""
    axes = [skip if size == Dim(dim) else 0 for size in tensor.shape]
    before = sum(count * stride for count, stride in zip(axes, view.strides, strict=True))
    shape = tuple(count + size for count, size in zip(axes, view.shape, strict=True))
    return replace(view, shape=shape, address=view.address - before * view.dtype.bytes)


def extents(plan: Plan, sizes: Sizes) -> list[int]:
    shape = [size_of(size, sizes) for size in plan.graph.shape]
    return [math.prod(shape[axis] for axis in dim.axes) for dim in plan.row_dims]


def bytes_of(tensor: Tensor, sizes: Sizes) -> int:
    return math.prod(size_of(size, sizes) for size in tensor.shape) * tensor.dtype.bytes


# ---------------------------------------------------------------- rows far apart


def spread(shape: Sequence[int], dtype: DType) -> ArrayView:
    """Room for an array whose lines lie far apart. Raises MissingError where this process may not reserve as much."""
    *outer, cols = shape
    lines = math.prod(outer)
    step = STRIDE + -(-cols // EVERY_VECTOR) * EVERY_VECTOR
    for most, count in ((MOST_BYTES, lines), (MAX_STRIDE - 1, math.prod(outer[1:]))):  # a tensor copy's strides end
        step = min(step, most // (count * dtype.bytes) // EVERY_VECTOR * EVERY_VECTOR)
    strides = (*(math.prod(outer[axis + 1 :]) * step for axis in range(len(outer))), 1)
    memory = reserve(((lines - 1) * step + cols) * dtype.bytes)
    view = ArrayView(np.frombuffer(memory, np.uint8).ctypes.data, dtype, tuple(shape), strides, owner=memory)
    for part in readable(view):
        allow(*part)
    return view


def lines_of(view: ArrayView) -> list[tuple[int, int]]:
    """The first byte of each line, and one past its last."""
    starts = np.full(view.shape[:-1], view.address, np.int64)
    for axis, stride in enumerate(view.strides[:-1]):
        steps = np.arange(view.shape[axis]) * stride * view.dtype.bytes
        starts += np.expand_dims(steps, tuple(other for other in range(starts.ndim) if other != axis))
    length = view.shape[-1] * view.dtype.bytes
    return [(start, start + length) for start in starts.ravel().tolist()]


def readable(view: ArrayView) -> list[tuple[int, int]]:
    """Lines with what lies beside them, between the array's first byte and its last."""
    low, high = view.span
    return [(max(low, start - BESIDE), min(high, end + BESIDE)) for start, end in lines_of(view)]


def reserve(nbytes: int) -> mmap.mmap:
    """Addresses without memory: nobody may touch them, so that no limit counts them but the one of addresses."""
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    except OSError as error:
        raise MissingError(
            f"no {nbytes} addresses for rows that lie far apart: {error}\n  allow this process more (ulimit -v)"
        ) from error


def allow(start: int, end: int) -> None:
    """Memory for these bytes, in whole pages."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.PROT_READ | mmap.PROT_WRITE):
        raise MissingError(f"no memory at addresses that are reserved: errno {ctypes.get_errno()}")


def launch_apart(kernel: Kernel, views: Mapping[str, ArrayView], values: Sequence[float]) -> None:
    """Launch `kernel` over arrays whose lines lie far apart. Raises KernelError as a call does."""
    record = kernel.record(views, kernel.device, "fusegen")
    graph = kernel.plan.graph
    written = {t.name for t in graph.outputs}
    lines = {name: lines_of(view) if name in written else readable(view) for name, view in views.items()}
    memory = [buffer(graph, name, line) for name in views for line in lines[name]]
    launch(record, record.launch, views, values, memory, None)


# ---------------------------------------------------------------- both


def launch(
    record: Record, what: Launch, views: Mapping[str, ArrayView], values: Sequence[float], memory: Sequence[Buffer],
    only: range | None,
) -> None:  # fmt: skip
    assert isinstance(record.loaded, EmulatedLoaded)
    addresses = [view.address for view in views.values()]
    record.loaded.launch(what, addresses, values, 0, memory=memory, only=only)


def buffer(graph: Graph, name: str, span: tuple[int, int]) -> Buffer:
    low, high = span
    written = any(t.name == name for t in graph.outputs)
    return Buffer(name, low, low, high - low, writable=written, initialised=not written)
