"""What a kernel and a program share: operands and results by name, a call's checks, where it runs, records of calls."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fusegen.errors import ArgumentError, KernelError
from fusegen.language.graph import Graph
from fusegen.language.types import DType
from fusegen.runtime import arguments
from fusegen.runtime.arrays import CPU, ArrayView, contiguous_strides, library_of, place_text, view
from fusegen.runtime.calls import Captured, Forwarded, Prepared, Recorded, untraced
from fusegen.runtime.copied import run_copied
from fusegen.runtime.devices import Device, runs
from fusegen.runtime.libraries import LIBRARIES, Library, Maker, library, producer_stream, stream_address
from fusegen.runtime.shortcuts import Shortcuts, hasten
from fusegen.runtime.signatures import Signature, view_signature
from fusegen.targets import Target

log = logging.getLogger("fusegen.kernel")

WIDEST = 16  # bytes of the widest vector that a plan may have: more alignment makes no difference to a record
MOST_RECORDS = 4096  # a caller with ever new shapes must not fill the memory; a record takes about 1 KiB


class Held:
    """A kernel or a program, as what its calls go to is handed it: not the partial itself (`Forwarded.forward`)."""

    __slots__ = ("called",)

    def __init__(self, called: Called) -> None:
        self.called = called


def checked(held: Held, /, *operands: Any, **more: Any) -> Any:
    """A call that takes no shortcut."""
    return held.called.call(*operands, **more)


class Called(Forwarded):
    """Something that is called with a chain's operands: `op_graph` says which they are, `device` where it runs.

    `report` is the validation's verdict, set by whoever validated. Calls may come from any thread. A copy is the thing
    itself; a pickle says what was compiled and how, which is done again where it is read.
    """

    words: tuple[str, ...] = ("out", "stream")  # of a call, beside its operands' names

    def __init__(self, graph: Graph, target: Target, device: Device) -> None:
        self.op_graph = graph
        self.target = target
        self.device = device
        self.operands = graph.inputs
        self.inputs = tuple(t for t in graph.inputs if t.shape)
        self.outputs = graph.outputs
        self.has_scalars = len(self.inputs) < len(self.operands)
        self.names = tuple(t.name for t in (*self.inputs, *self.outputs))
        self.report: Any = None
        self.again: Callable[[], Any] | None = None  # what compiles it in another process, set by the pipeline
        # what compiles it for other numbers of rows, of a chain whose rows have the same bits then; set by the pipeline
        self.elsewhere: Callable[..., Any] | None = None
        self.records: dict[Signature, Any] = {}
        self.lock = threading.RLock()
        self.held = Held(self)
        self.shortcuts = Shortcuts(graph, WIDEST, checked)
        untraced(type(self).call)
        self.forward(checked, self.held)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        if self.again is None:
            raise TypeError(
                f"{self.name} can't be pickled: it was not made by fusegen.compile, which could make it again"
            )
        return self.again, ()

    @abstractmethod
    def call(self, /, *operands: Any, **more: Any) -> Any:
        """Run it on a call's operands; returns its output, or a tuple of them."""

    @abstractmethod
    def check(self, views: Mapping[str, ArrayView]) -> Any:
        """Everything that can be wrong whatever the layout and the addresses. Raises ArgumentError."""

    @abstractmethod
    def record(
        self, views: Mapping[str, ArrayView], device: Device, owner: str, in_place: arguments.Pairs = frozenset()
    ) -> Recorded:
        """Check the arrays, and work out what calls with others like them share."""

    @property
    def name(self) -> str:
        return self.op_graph.name

    def in_order(self, operands: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """All operands of a call that names some of them, in the spec's order."""
        if not named:
            return operands
        names = [t.name for t in self.operands]
        behind = names[len(operands) :]
        wrong = [
            f"{name} is {'given twice' if name in names else 'no operand'}" for name in named if name not in behind
        ]
        by_place = self.words
        wrong += [
            f"{name} is missing{' in its place, since a call has a word like that' if name in by_place else ''}"
            for name in behind
            if name not in named
        ]
        if wrong:
            raise ArgumentError(f"{self.name} takes {self.takes}; of these, {', '.join(wrong)}")
        return (*operands, *(named[name] for name in behind))

    @property
    def takes(self) -> str:
        """`2 operands (x: f32[M, N], scale: f32)`."""
        declared = ", ".join(f"{t.name}: {t.type}" for t in self.operands)
        return f"{len(self.operands)} operand{'s' * (len(self.operands) != 1)} ({declared})"

    def split(self, operands: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[float, ...]]:
        """The arrays and the run-time scalars of a call."""
        if len(operands) != len(self.operands):
            raise ArgumentError(f"{self.name} takes {self.takes}, and got {len(operands)}")
        if not self.has_scalars:
            return operands, ()
        pairs = list(zip(self.operands, operands, strict=True))
        arrays = tuple(operand for tensor, operand in pairs if tensor.shape)
        graph = self.op_graph
        return arrays, tuple(arguments.scalar(graph, tensor, operand) for tensor, operand in pairs if not tensor.shape)

    def split_out(self, out: Any) -> tuple[Any, ...]:
        outs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        if len(outs) != len(self.outputs):
            raise ArgumentError(
                f"{self.name} has {len(self.outputs)} outputs ({', '.join(t.name for t in self.outputs)}), "
                f"and out= holds {len(outs)}"
            )
        return outs

    def views(self, arrays: Sequence[Any], outs: Sequence[Any], stream: int | None) -> dict[str, ArrayView]:
        """Every array's view by its tensor's name, inputs first. `stream` will use them (None: the current one)."""
        views: dict[str, ArrayView] = {}
        for tensor, array in zip((*self.inputs, *self.outputs), (*arrays, *outs), strict=False):
            if stream is None and views:
                first = next(iter(views.values()))
                stream = row_of(first.library).stream(first.device)()
            views[tensor.name] = view(array, tensor.name, stream=stream)
        return views

    def order_after(self, arrays: Sequence[Any], owner: str, device: Device, stream: int) -> None:
        """Make `stream` wait for those of other libraries than the one whose stream it is."""
        if not device.asynchronous:
            return
        for array in arrays:
            name = library_of(array)
            if name != owner or name not in LIBRARIES:
                filling = producer_stream(array, device.place)
                if filling is not None:
                    device.order(stream, after=filling)

    def device_for(self, views: Mapping[str, ArrayView]) -> Device | None:
        """Where to run for arrays in that place; None when they are on the CPU and must be copied first."""
        place = arguments.one_place(views) if views else CPU
        if place == self.device.place:
            return self.device
        if self.device.kind == "emulator":
            raise ArgumentError(
                f"the arrays are on {place_text(place)}, and {self.name} was made for the emulator\n"
                "  pass arrays on the CPU, or compile it with on='gpu'"
            )
        if place == CPU:
            return None
        if place[0] != self.device.kind:
            raise ArgumentError(f"the arrays are on {place_text(place)}, and {self.name} runs on {self.device}")
        device = self.device.at(place[1])
        if not runs(self.target.arch, device.kind, device.arch):
            raise ArgumentError(
                f"the arrays are on {device}, which can't run {self.name}: it is compiled for {self.target.arch}"
            )
        return device

    def prepare(self, /, *operands: Any, out: Any = None, stream: object = None, **named: Any) -> Prepared:
        """The call with these operands, `out=` and `stream=`, everything done but the launches.

        Raises ArgumentError as a call does, and for arrays that would have to be copied to the device.
        """
        prepared, _ = self.ready("prepare", operands, out, stream, named)
        hasten(prepared, owner_of(prepared.arrays))
        return prepared

    def graph(self, /, *operands: Any, out: Any = None, stream: object = None, **named: Any) -> Captured:
        """The same as a CUDA or HIP graph, which one launch replays: `replay = kernel.graph(x, y)`, then `replay()` as
        often as `x` and `y` have new contents. On the emulator a replay is the call again.

        Raises ArgumentError as `prepare` does, and for arrays of JAX; KernelError where the stream is being captured
        already, or the driver refuses.
        """
        prepared, _ = self.ready("graph", operands, out, stream, named)
        self.need_graph(prepared)
        return captured(prepared, partial(prepared.record.run, prepared.pointers, prepared.values))

    def need_graph(self, prepared: Prepared) -> None:
        """Raises ArgumentError or KernelError where no graph can be made of a call."""
        record: Recorded = prepared.record
        device = record.device
        if record.waits and device.asynchronous:
            owner = owner_of(prepared.arrays)
            raise ArgumentError(
                f"{self.name}: graph takes arrays whose memory gets new contents, and those of {owner} never do"
            )
        if device.capturing(record.stream() if prepared.stream is None else prepared.stream):
            raise KernelError(
                f"{self.name}: graph captures a graph of its own, and one is being captured on this stream\n"
                f"  call {self.name} itself: its launches become part of that graph"
            )

    def ready(
        self, verb: str, operands: tuple[Any, ...], out: Any, stream: object, named: Mapping[str, Any]
    ) -> tuple[Prepared, dict[str, ArrayView]]:
        """The call for `verb`, checked, and its arrays by their names."""
        arrays, values = self.split(self.in_order(operands, named))
        outs = () if out is None else self.split_out(out)
        chosen = None if stream is None else stream_address(stream)
        views = self.views(arrays, outs, chosen)
        device = self.device_for(views)
        if device is None:
            raise ArgumentError(f"{self.name}: {verb} takes arrays on {self.device}, and these are on the CPU")
        return self.prepared(views, arrays, outs, values, device, owner_of(arrays), chosen, None), views

    def call_first(
        self, arrays: Sequence[Any], values: tuple[float, ...], outs: tuple[Any, ...], stream: object,
        signature: Signature | None,
    ) -> Any:  # fmt: skip
        """A call whose like has not been seen, or whose arrays have no fast signature."""
        chosen = None if stream is None else stream_address(stream)
        views = self.views(arrays, outs, chosen)
        device = self.device_for(views)
        if device is None and self.op_graph.updates:
            operand = next(iter(self.op_graph.updates.values()))
            raise ArgumentError(
                f"{self.name} writes to {operand} in its own memory, which is on the CPU, and the kernel runs on "
                f"{self.device}\n  pass arrays that are there"
            )
        if device is None:
            return run_copied(self, views, values, outs, owner_of(arrays))
        prepared = self.prepared(views, arrays, outs, values, device, owner_of(arrays), chosen, signature)
        prepared()
        return prepared.result

    def prepared(
        self, views: Mapping[str, ArrayView], arrays: Sequence[Any], outs: tuple[Any, ...], values: tuple[float, ...],
        device: Device, owner: str, stream: int | None, signature: Signature | None,
    ) -> Prepared:  # fmt: skip
        """The call over `views`, which are on `device`; fresh outputs are of the library `owner`."""
        key = (owner, *view_signature(views, WIDEST)) if signature is None else signature
        pairs: arguments.Pairs = frozenset()
        if outs:
            if key not in self.records:
                self.check(views)
            pairs = self.check_overlap(views)
            key = (key, self.places(pairs)) if pairs else key
        record: Any = self.records.get(key)
        if record is None:
            record = self.record(views, device, owner, pairs)
            if len(self.records) >= MOST_RECORDS:
                log.debug("%s: forgetting %d records of calls", self.name, len(self.records))
                self.records.clear()
            self.records[key] = record
        self.order_after(arrays, owner, device, record.stream() if stream is None else stream)
        made = outs or tuple(maker(arrays, stream) for maker in record.makers)
        pointers = tuple(v.address for v in views.values())
        if not outs:
            pointers += tuple(map(record.address, made))
        return Prepared(record, pointers, values, stream, made, (*arrays, *made))

    @property
    def in_place(self) -> arguments.Pairs:
        """Which outputs may be written over which operands, (output, operand)."""
        return frozenset()

    def check_overlap(self, views: Mapping[str, ArrayView]) -> arguments.Pairs:
        """Which outputs are to be written over operands. Raises ArgumentError where one must not be."""
        inputs = {t.name: views[t.name] for t in self.inputs}
        outputs = {t.name: views[t.name] for t in self.outputs}
        return arguments.check_overlap(self.name, self.in_place, inputs, outputs)

    def places(self, pairs: arguments.Pairs) -> frozenset[tuple[int, int]]:
        """Names as places among a launch's pointers."""
        places = {name: place for place, name in enumerate(self.names)}
        return frozenset((places[output], places[operand]) for output, operand in pairs)

    def maker(self, owner: str, views: Mapping[str, ArrayView], fresh: ArrayView, device: Device) -> Maker:
        """What makes an output like `fresh` in the library `owner`. Raises ArgumentError where nothing can."""
        if owner == "fusegen":  # raw memory in, raw memory out
            return lambda arrays, stream: device.empty(fresh.size * fresh.dtype.bytes).view(fresh.dtype, fresh.shape)
        like = (fresh.dtype, fresh.shape, fresh.strides, owner)
        same = (i for i, t in enumerate(self.inputs) if like == traits(views[t.name]))
        return library(owner, device.place).maker(fresh.shape, fresh.dtype, device.place, next(same, None))


def nothing(stream: int) -> None:
    """The graph of no launch."""


def captured(prepared: Prepared, work: Callable[[int], None], memory: object = None) -> Captured:
    """What `work` launches, as a graph over the arrays of `prepared` and a workspace in `memory`."""
    record: Recorded = prepared.record
    return Captured(prepared, nothing if record.sending() is None else record.device.capture(work), memory)


def owner_of(arrays: Sequence[Any]) -> str:
    """Whose library makes the results: the first array's."""
    return library_of(arrays[0]) if arrays else "numpy"


def row_of(owner: str) -> Library:
    """The library's row; one that has none has no stream of its own, and neither has numpy."""
    return LIBRARIES.get(owner, LIBRARIES["numpy"])


def fresh_view(dtype: DType, shape: tuple[int, ...]) -> ArrayView:
    """Stands for an output that is not made yet; address 0 is as aligned as any allocation."""
    return ArrayView(0, dtype, shape, contiguous_strides(shape))


def relative_span(v: ArrayView) -> tuple[int, int]:
    """The array's first byte and one past its last, relative to its address."""
    low, high = v.span
    return low - v.address, high - v.address


def traits(v: ArrayView) -> tuple[object, ...]:
    return v.dtype, v.shape, v.strides, v.library
