"""What a custom call of XLA does: the launches of one kernel or program, for arrays of known shapes.

A compiled program of XLA knows a call by its key, a digest of all that the call does, and no address of this process:
one that comes from JAX's compilation cache, or from another process, finds the same call here or none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusegen.language.types import size_of
from fusegen.runtime import Kernel, Program
from fusegen.runtime.arguments import Sizes
from fusegen.runtime.arrays import ArrayView, contiguous_strides
from fusegen.runtime.calls import Record
from fusegen.runtime.devices import Device
from fusegen.runtime.program import Pointer, StepLaunch

KEY_DIGITS = 32  # of a SHA-256, of 64

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """The launches of one call on one device.

    Their pointers count from the call's arrays: operands, results, and behind them the workspace, of `workspace`
    bytes, where that is not 0.
    """

    key: str
    name: str
    device: Device
    operands: int
    results: int
    workspace: int
    launches: tuple[StepLaunch, ...]
    values: tuple[float, ...]  # of the run-time scalars

    @property
    def arrays(self) -> int:
        return self.operands + self.results + bool(self.workspace)

    def run(self, bases: Sequence[int], stream: int) -> None:
        """Launch everything, over arrays at these addresses. Raises KernelError."""
        for launch in self.launches:
            launch.run(bases, self.values, stream)


def call_of(kernel: Kernel | Program, shapes: Sequence[Shape], values: Sequence[float], device: Device) -> Call:
    """The call of a kernel for operands of these shapes, contiguous, on a device. Raises ArgumentError where the
    kernel can't take such arrays.

    A kernel that may begin while the one before it runs waits for its end here: what XLA records as a graph has
    launches of the usual kind.
    """
    graph = kernel.op_graph
    arrays = [t for t in graph.inputs if t.shape]
    views = {t.name: view_of(shape, t.dtype, device) for t, shape in zip(arrays, shapes, strict=True)}
    sizes = kernel.check(views)
    by_name = sizes.by_name if isinstance(sizes, Sizes) else sizes
    for tensor in graph.outputs:
        views[tensor.name] = view_of(tuple(size_of(s, by_name) for s in tensor.shape), tensor.dtype, device)
    record = kernel.record(views, device, "fusegen")
    if isinstance(record, Record):
        every = range(len(record.spans))
        launches: tuple[StepLaunch, ...] = (
            StepLaunch(record, tuple(Pointer(n, 0) for n in every), tuple(range(len(values))), ()),
        )
        workspace = 0
    else:
        launches, workspace = record.launches, record.arena.bytes
    launches = tuple(alone(launch) for launch in launches if launch.record.loaded is not None)
    return Call(
        digest(launches, values, workspace, device), graph.name, device, len(arrays), len(graph.outputs), workspace,
        launches, tuple(values),
    )  # fmt: skip


def view_of(shape: Shape, dtype: object, device: Device) -> ArrayView:
    """Stands for an array of XLA's: contiguous, and as aligned as address 0."""
    return ArrayView(0, dtype, shape, contiguous_strides(shape), device.place)  # type: ignore[arg-type]


def alone(launch: StepLaunch) -> StepLaunch:
    """The same, begun when what is before it has ended."""
    record = launch.record
    return replace(launch, record=replace(record, launch=replace(record.launch, dependent=False)))


def digest(launches: Sequence[StepLaunch], values: Sequence[float], workspace: int, device: Device) -> str:
    """Of all that launches do but for the addresses of their arrays."""
    found = hashlib.sha256(repr((device.kind, device.arch, device.name, workspace)).encode())
    for one in launches:
        source, plan, launch = one.record.variant.source, one.record.plan, one.record.launch
        maps = [(m.name, m.pointer, str(m.dtype), m.shape, m.strides, m.box, m.swizzle) for m in launch.maps]
        numbers = [float(values[place]).hex() for place in one.values]
        facts = (plan.name, plan.grid(launch.blocks), plan.threads, plan.shared_bytes, launch.numbers, launch.spans)
        found.update(repr((facts, maps, numbers, [(p.base, p.offset) for p in one.pointers])).encode())
        found.update(source.text.encode())
    return found.hexdigest()[:KEY_DIGITS]
