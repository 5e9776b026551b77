"""A compiled program as a Python callable: several kernels, launched one after another, called like one.

    program = fusegen.compile(mlp)        # where one kernel can't hold the chain
    y = program(x, gate, up, down)        # the same call, the same checks, the same errors

The first call with arrays of given shapes, strides, dtypes, alignment and device works out every kernel's launch and
where the tensors between them lie, and writes both down in a `ProgramRecord`; a later call like it launches.

The tensors between kernels lie in one workspace. It is made with the first call on a device and stream, by the caller's
library, and used again by every later call there, in the order of the stream; `workspace=` takes the caller's own. One
that has become too small is kept beside its successor, since a captured graph may go on writing to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import starmap
from typing import Any

from fusegen.errors import ArgumentError, KernelError, NoPlan, SpecError
from fusegen.language.types import Shape, size_of, u8
from fusegen.planner.programs.model import ALIGNMENT, Arena, Binding, ProgramPlan, Step
from fusegen.planner.programs.over_operands import overwritable, overwritten_by
from fusegen.runtime import arguments
from fusegen.runtime.arrays import ArrayView, Place, contiguous_strides, view
from fusegen.runtime.called import WIDEST, Called, captured, fresh_view, owner_of, relative_span, row_of
from fusegen.runtime.calls import Captured, Record, apart
from fusegen.runtime.devices import Device, Sending
from fusegen.runtime.joined import Joined
from fusegen.runtime.kernel import Kernel, same_places
from fusegen.runtime.libraries import LIBRARIES, Maker, library, stream_address
from fusegen.runtime.shortcuts import code_of, sender
from fusegen.runtime.signatures import Signature, fast_signature

log = logging.getLogger("fusegen.kernel")

GROWTH_FACTOR = 2  # of a workspace that is made anew


@dataclass(frozen=True, slots=True)
class Pointer:
    """A kernel's pointer: so many bytes into an array of the call, by its place among operands, outputs, workspace."""

    base: int
    offset: int


@dataclass(frozen=True, slots=True)
class StepLaunch:
    """One launch of a program's call: its own record, where its pointers and run-time numbers come from, and the steps
    that it does."""

    record: Record
    pointers: tuple[Pointer, ...]
    values: tuple[int, ...]
    steps: tuple[Step, ...]

    def run(self, bases: Sequence[int], values: Sequence[float], stream: int) -> None:
        record = self.record
        if record.loaded is not None:
            places = [bases[p.base] + p.offset for p in self.pointers]
            record.loaded.launch(record.launch, places, [values[i] for i in self.values], stream)


@dataclass(slots=True)
class Workspace:
    """Memory for the tensors between kernels, on one stream. Two threads' calls on it go one after the other."""

    address: int
    bytes: int
    owner: object = None
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class ProgramRecord:
    """What calls with like arrays share."""

    plan: ProgramPlan
    device: Device
    launches: tuple[StepLaunch, ...]
    arena: Arena
    spans: tuple[tuple[int, int], ...]  # of operands and outputs, relative to their addresses
    shapes: tuple[tuple[int, ...], ...]  # of the outputs
    inputs: int
    makers: tuple[Maker, ...]
    address: Callable[[Any], int]
    stream: Callable[[], int]
    waits: bool
    in_place: frozenset[tuple[int, int]]  # pointers, (output, input), that are the same
    workspace: Callable[[int, int], Workspace]  # of a stream, with so many bytes at least

    @cached_property
    def send(self) -> Callable[..., None]:
        """`send(room, stream, *pointers, *values)`: every launch, one after the other, with the workspace `room`.

        As a function that is written for the program, it costs the host little more than its launches do."""
        room, lines, names = len(self.spans), [], {}
        for number, launch in enumerate(self.launches):
            if (sent := sender(launch.record)) is not None:
                names[f"send_{number}"] = sent
                given = [f"at_{p.base} + {p.offset}" if p.offset else f"at_{p.base}" for p in launch.pointers]
                given += [f"value_{place}" for place in launch.values]
                lines.append(f"send_{number}(stream, {', '.join(given)})")
        if any(p.base == room for launch in self.launches for p in launch.pointers):
            lines = ["with room.lock:", f"    at_{room} = room.address", *(f"    {line}" for line in lines)]
        arguments = [f"at_{place}" for place in range(room)]
        arguments += [f"value_{place}" for place in range(sum(not t.shape for t in self.plan.graph.inputs))]
        head = f"def send(room, stream, {', '.join(arguments)}):"
        text = "".join(f"{line}\n" for line in (head, *(f"    {line}" for line in lines or ["pass"])))
        log.debug("%s: the launches of a call\n%s", self.plan.name, text)
        exec(code_of(text, self.plan.name), names)
        return names["send"]

    def room(self, stream: int) -> Workspace:
        """The workspace of a call on that stream."""
        return self.workspace(stream, self.arena.bytes)

    def run(self, pointers: tuple[int, ...], values: tuple[float, ...], stream: int) -> None:
        """Launch every kernel; asynchronous where the caller's library allows it."""
        self.run_in(self.room(stream), pointers, values, stream)

    def run_in(self, room: Workspace, pointers: tuple[int, ...], values: tuple[float, ...], stream: int) -> None:
        self.send(room, stream, *pointers, *values)
        if self.waits and self.device.asynchronous:
            self.device.synchronize(stream)

    def sending(self) -> Sending | None:
        """The launches as lines of Python; None where there is nothing to launch."""
        if all(launch.record.loaded is None for launch in self.launches):
            return None
        names = {"slot": [None], "send": self.send, "room": self.room}
        return Sending(("held = slot[0]",), (), ("send(room(sent[0]), *sent, {values})",), (), names)

    def apart(self, pointers: tuple[int, ...]) -> bool:
        return apart(self.spans, self.inputs, pointers, self.in_place)


class Program(Called):
    """A chain as several kernels, ready to run on `device`.

    `kernels` are what the plan launches, in order: kernels, or several steps in one launch.
    """

    words = ("out", "stream", "workspace")

    def __init__(self, plan: ProgramPlan, kernels: Sequence[Kernel | Joined], device: Device) -> None:
        super().__init__(plan.graph, plan.target, device)
        check_order(plan)
        self.plan = plan
        self.kernels = tuple(kernels)
        self.records: dict[Signature, ProgramRecord] = {}
        self.workspaces: dict[tuple[Place, int], Workspace] = {}
        self.outgrown: list[Workspace] = []  # graphs that were captured over them may still be replayed
        # what compiles the chain for arrays whose axes are no row, or of other sizes; set by the pipeline
        self.compile_by_axes: Callable[[], Any] | None = None
        self.by_axes: Program | None = None
        self.one_length = False  # are other sizes of these axes another program's, as of an operator's kernels?
        self.compiled = {name: plan.graph.sizes[name] for name in plan.graph.sizes if name in plan.fixed}

    @property
    def sources(self) -> tuple[Any, ...]:
        """Each kernel's source, in the order of the launches."""
        return tuple(kernel.source for kernel in self.kernels)

    def __repr__(self) -> str:
        count = len(self.kernels)
        return f"<Program {self.name} {self.op_graph.signature} of {count} kernels for {self.target} on {self.device}>"

    # ---------------------------------------------------------------- calling it

    def call(
        self, /, *operands: Any, out: Any = None, stream: object = None, workspace: Any = None, **named: Any
    ) -> Any:
        """Run the program; returns its output, or a tuple of them.

        Operands, `out`, `stream`, results and errors are those of a kernel's call. `workspace`: an array of bytes for
        the tensors between kernels, `workspace_bytes` of them, in place of memory that the program keeps.
        """
        if named:
            operands = self.in_order(operands, named)
            if workspace is None:  # once more, in order: what repeats may have a shortcut
                return self(*operands, out=out, stream=stream)
        arrays, values = self.split(operands)
        outs = () if out is None else self.split_out(out)
        signature = None
        if stream is None and workspace is None and (found := fast_signature((*arrays, *outs), WIDEST)) is not None:
            signature, pointers = found
            record = self.records.get(signature)
            if outs and (record is None or not record.apart(pointers)):
                record = self.records.get((signature, same_places(pointers, len(arrays))))
            if record is not None and (not outs or record.apart(pointers)):
                if not record.in_place and self.shortcuts.learn(record, arrays, outs, pointers):
                    self.forward(self.shortcuts.first, self.held)
                if not outs:
                    made = tuple([maker(arrays, None) for maker in record.makers])
                    record.run((*pointers, *map(record.address, made)), values, record.stream())
                    return made[0] if len(made) == 1 else made
                record.run(pointers, values, record.stream())
                return out
        if workspace is not None:
            return self.call_in(workspace, arrays, values, outs, stream)
        return self.call_first(arrays, values, outs, stream, signature)

    def graph(
        self, /, *operands: Any, out: Any = None, stream: object = None, workspace: Any = None, **named: Any
    ) -> Captured:
        """As a kernel's. Its tensors between kernels lie in memory of its own, or in `workspace`: replays of several
        graphs may run at the same time."""
        prepared, views = self.ready("graph", operands, out, stream, named)
        self.need_graph(prepared)
        record: ProgramRecord = prepared.record
        if workspace is None:
            memory = record.device.empty(max(record.arena.bytes, ALIGNMENT))
            room = Workspace(memory.address, memory.nbytes, memory)
        else:
            room = self.given_workspace(workspace, record.arena.bytes, views, record.device)

        def work(stream: int) -> None:
            record.send(room, stream, *prepared.pointers, *prepared.values)

        return captured(prepared, work, room)

    def workspace_bytes(self, /, **sizes: int) -> int:
        """How many bytes the tensors between kernels take, at the chain's sizes but for those given."""
        return self.plan.arena(self.op_graph.at(**sizes).sizes).bytes

    def call_in(
        self, workspace: Any, arrays: Sequence[Any], values: tuple[float, ...], outs: tuple[Any, ...], stream: object
    ) -> Any:
        """A call whose tensors between kernels lie in the caller's own memory."""
        chosen = None if stream is None else stream_address(stream)
        views = self.views(arrays, outs, chosen)
        device = self.device_for(views)
        if device is None:
            raise ArgumentError(f"{self.name}: workspace= is memory on {self.device}, and the operands are on the CPU")
        prepared = self.prepared(views, arrays, outs, values, device, owner_of(arrays), chosen, None)
        record: ProgramRecord = prepared.record
        own = self.given_workspace(workspace, record.arena.bytes, views, device)
        record.run_in(own, prepared.pointers, values, record.stream() if chosen is None else chosen)
        return prepared.result

    def given_workspace(self, workspace: Any, needed: int, views: Mapping[str, ArrayView], device: Device) -> Workspace:
        """The caller's own memory. Raises ArgumentError where it is no room for the tensors between kernels."""
        found = view(workspace, "workspace")
        has = found.size * found.dtype.bytes
        low, high = found.span
        if (
            found.device != device.place
            or not found.writable
            or high - low != has
            or found.strides[-1:] not in ((1,), ())
        ):
            raise ArgumentError(
                f"{self.name}: workspace is one writable piece of memory on {device}; found shape {found.shape}, "
                f"strides {found.strides}"
            )
        if has < needed or found.address % WIDEST:
            raise ArgumentError(
                f"{self.name}: workspace has {has} bytes at {found.address:#x}, and these sizes take {needed}, from a "
                f"multiple of {WIDEST} on\n  program.workspace_bytes(...) says how many"
            )
        for name, other in views.items():
            if needed and arguments.overlap(ArrayView(low, u8, (has,), (1,)), other):
                raise ArgumentError(f"{self.name}: workspace shares memory with {name}")
        return Workspace(found.address, has, workspace)

    # ---------------------------------------------------------------- records

    def check(self, views: Mapping[str, ArrayView]) -> Mapping[str, int]:
        """Everything that can be wrong whatever the layout and the addresses; the size of every dim."""
        try:
            return self.own_sizes(views)
        except ArgumentError:
            if (other := self.otherwise(views)) is None:
                raise
        return other.check(views)

    def otherwise(self, views: Mapping[str, ArrayView]) -> Program | None:
        """The program that takes axes apart: other sizes of those that are reduced, and any strides along them. None
        where this one does so itself, or nothing does. Raises ArgumentError where the arrays are wrong for both."""
        if self.compile_by_axes is None:
            return None
        arguments.measure_dims(self.op_graph, self.compiled if self.one_length else {}, views)
        arguments.check_dtypes(self.op_graph, views)
        with self.lock:
            if self.by_axes is None:
                try:
                    made = self.compile_by_axes()
                except NoPlan:
                    self.compile_by_axes = None
                    return None
                assert isinstance(made, Program)  # no kernel reduces rows, and axes of rows
                self.by_axes = made
            return self.by_axes

    def own_sizes(self, views: Mapping[str, ArrayView]) -> Mapping[str, int]:
        sizes = arguments.measure_dims(self.op_graph, self.compiled, views)
        arguments.check_dtypes(self.op_graph, views)
        if self.op_graph.viewed:
            self.check_shown(sizes)
        for tensor in self.outputs:
            name = self.op_graph.updates.get(tensor.name, tensor.name)
            if name in views and views[name].size:
                arguments.check_output(name, views[name])
        for step in self.plan.steps:
            own = {b.tensor: shown(views[b.base], b, sizes) for b in step.bindings if b.base in views}
            arguments.check_strides(step.plan, own, {b.tensor: b.base for b in step.bindings})
        return sizes

    def check_shown(self, sizes: Mapping[str, int]) -> None:
        """Raises ArgumentError where a view shows, at these sizes, what its array has not."""
        try:
            replace(self.op_graph, sizes=sizes, origin=None).need_sizes()
        except SpecError as error:
            raise ArgumentError(
                f"{self.name} takes no such arrays: {str(error).removeprefix(f'{error.where}: ')}"
            ) from None

    def record(
        self, views: Mapping[str, ArrayView], device: Device, owner: str, in_place: arguments.Pairs = frozenset()
    ) -> ProgramRecord:
        """Check the arrays, and work out each kernel's launch and where the tensors between them lie. Arrays that can't
        be taken as rows of several axes go through the program that reduces one axis after another."""
        other: Program | None = None
        try:
            sizes = self.own_sizes(views)
        except ArgumentError:
            if (other := self.otherwise(views)) is None:
                raise
        if other is not None:
            if left := in_place - other.in_place:
                (output, operand), *_ = sorted(left)
                raise ArgumentError(
                    f"{self.name} can't write {output} over {operand}, since it takes such arrays axis by axis, in "
                    "several kernels\n  pass another array in out=, or a contiguous operand"
                )
            return other.record(views, device, owner, in_place)
        arena = self.plan.arena(sizes)
        updates = self.op_graph.updates
        fresh = {t.name: fresh_view(t.dtype, shape_at(t.shape, sizes)) for t in self.outputs}
        fresh |= {output: views[operand] for output, operand in updates.items()}
        whole = {**fresh, **views}
        bases = {name: place for place, name in enumerate(self.names)}
        pointed = {name: Pointer(place, 0) for name, place in bases.items()}
        for stored in self.plan.between:
            shape = shape_at(stored.type.shape, sizes)
            offset = arena.offsets[stored.name]
            whole[stored.name] = ArrayView(offset, stored.type.dtype, shape, contiguous_strides(shape), device.place)
            pointed[stored.name] = Pointer(len(bases), offset)
        counters = {at: Pointer(len(bases), arena.offsets[name]) for name, at in self.plan.counters.items()}
        scalars = [t.name for t in self.operands if not t.shape]
        launches: list[StepLaunch] = []
        for at, (steps, kernel) in enumerate(zip(self.plan.launches, self.kernels, strict=True)):
            arrays = [{b.tensor: shown(whole[b.base], b, sizes) for b in step.bindings} for step in steps]
            pairs = [overwritten_by(step, in_place) for step in steps]
            if isinstance(kernel, Joined):
                found = kernel.records(arrays, device, pairs)
            else:
                found = [(kernel.record(arrays[0], device, "fusegen", pairs[0]), (0,))]
            for own, done in found:
                if own.plan.waits and any(before.record.loaded is not None for before in launches):  # not the first
                    own = replace(own, launch=replace(own.launch, dependent=True))
                places = tuple(
                    Pointer(pointed[b.base].base, pointed[b.base].offset + a[b.tensor].address - whole[b.base].address)
                    for step, a in ((steps[n], arrays[n]) for n in done)
                    for b in step.bindings
                )
                if len(done) > 1 and at in counters:
                    places = (*places, counters[at])
                values = tuple(scalars.index(name) for n in done for name in steps[n].values)
                launches.append(StepLaunch(own, places, values, tuple(steps[n] for n in done)))
        own_outputs = any(t.name not in views for t in self.outputs)
        row = row_of(owner)

        def make(output: str, like: ArrayView) -> Maker:
            operand = updates.get(output)
            return self.maker(owner, views, like, device) if operand is None else self.giver(operand)

        return ProgramRecord(
            plan=self.plan,
            device=device,
            launches=tuple(launches),
            arena=arena,
            spans=tuple(relative_span(whole[name]) for name in self.names),
            shapes=tuple(f.shape for f in fresh.values()),
            inputs=len(self.inputs),
            makers=tuple(starmap(make, fresh.items())) if own_outputs else (),
            address=row.address,
            stream=row.stream(device.place),
            waits=row.waits,
            in_place=self.places(in_place | frozenset(updates.items())),
            workspace=lambda stream, nbytes: self.workspace_for(device, owner, stream, nbytes),
        )

    @cached_property
    def in_place(self) -> arguments.Pairs:
        """The outputs that are operands with new rows, which the call gives back, and those that may be written over an
        operand."""
        return overwritable(self.plan) | frozenset(self.op_graph.updates.items())

    def check_overlap(self, views: Mapping[str, ArrayView]) -> arguments.Pairs:
        """As of a kernel. Raises ArgumentError where `out=` has other memory for an operand with new rows."""
        pairs = super().check_overlap(views)
        for output, operand in sorted(self.op_graph.updates.items() - pairs):
            raise ArgumentError(
                f"the output {output} is {operand} with new rows, in its own memory\n"
                f"  pass {operand} itself in out=, or leave out= away"
            )
        return pairs

    def giver(self, operand: str) -> Maker:
        """What gives an operand back as it came."""
        place = self.names.index(operand)
        return lambda arrays, stream: arrays[place]

    def workspace_for(self, device: Device, owner: str, stream: int, nbytes: int) -> Workspace:
        """The workspace of a stream, made anew where it is too small. What it was is kept, for graphs captured over
        it; since each is at least twice the one before, the old ones together stay smaller than the newest."""
        found = self.workspaces.get((device.place, stream))
        if found is not None and found.bytes >= nbytes:
            return found
        with self.lock:
            found = self.workspaces.get((device.place, stream))
            if found is not None and found.bytes >= nbytes:
                return found
            room = nbytes if found is None else max(nbytes, GROWTH_FACTOR * found.bytes)
            log.debug("%s: a workspace of %d bytes on stream %d of %s", self.name, room, stream, device)
            made = self.new_workspace(device, owner, stream, room)
            if found is not None:
                self.outgrown.append(found)
            self.workspaces[device.place, stream] = made
            return made

    def new_workspace(self, device: Device, owner: str, stream: int, nbytes: int) -> Workspace:
        """By the caller's library where that orders memory by streams, as torch's and CuPy's do; else by the driver."""
        row = LIBRARIES.get(owner)
        if row is not None and owner in ("torch", "cupy"):
            made = library(owner, device.place).maker((max(nbytes, 1),), u8, device.place, None)((), stream)
            address = row.address(made)
            if address % WIDEST == 0:
                return Workspace(address, nbytes, made)
        memory = device.empty(max(nbytes, ALIGNMENT))
        return Workspace(memory.address, nbytes, memory)


def check_order(plan: ProgramPlan) -> None:
    """Raises KernelError for a plan in which a kernel reads what none before it writes."""
    there = {t.name for t in plan.graph.inputs}
    for step in plan.steps:
        for binding in step.reads:
            if binding.base not in there:
                raise KernelError(f"{plan.name}: {step.name} reads {binding.base}, which no kernel before it writes")
        there |= {binding.base for binding in step.writes}


def shown(array: ArrayView, binding: Binding, sizes: Mapping[str, int]) -> ArrayView:
    """What a step's tensor is of an array. Raises ArgumentError where axes can't be taken as one."""
    if binding.view is None:
        return array
    found = binding.view.apply(array.address, array.strides, array.dtype.bytes, sizes, binding.base)
    address, shape, strides = found
    return replace(array, address=address, shape=shape, strides=strides)


def shape_at(shape: Shape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size_of(size, sizes) for size in shape)
