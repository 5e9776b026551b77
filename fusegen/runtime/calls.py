"""One call of a kernel in three stages: what like calls share, what one call fixed, and the launch itself.

And what a kernel is called through: a function that may be another one after each call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

from fusegen.errors import RequestError
from fusegen.planner.model import Plan, Source
from fusegen.planner.programs.side_by_side import JoinedPlan, JoinedSource
from fusegen.runtime.devices import Device, Launch, Loaded, Sending
from fusegen.runtime.libraries import Maker, stream_address

if TYPE_CHECKING:
    from fusegen.compiling import Binary


class Forwarded(partial[Any]):
    """An object whose calls go to a function: the one that it was last told to `forward` to, with one argument before
    the call's own, as a method has it.

    Python calls an object that has a `__call__` with a tuple, a dict and a bound method that it makes for that call. A
    partial hands its arguments on as they came, and with one before them even where they are. In ns over the function
    itself, of five arguments and `out=` (Python 3.12): a `__call__` 124, a partial 33, a partial of one argument 20.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        return super().__new__(cls, nowhere)

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        """An attribute of a class is no method of it, though a partial is one from Python 3.14 on."""
        return self

    def __copy__(self) -> Self:
        """Nothing that a call changes is its own: a copy is the thing itself, as a function's is."""
        return self

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:
        return self

    def forward(self, function: Callable[..., Any], first: object) -> None:
        """Let calls go to `function(first, ...)`, from any thread; those under way stay where they are.

        torch.compile looks into a partial, at no end where that holds itself; so `first` must not lead back to it. What
        is called has to run as it is: there torch.compile breaks its graph.
        """
        untraced(function)
        # a partial's one way to another function, which typeshed leaves out
        self.__setstate__((function, (first,), None, self.__dict__))  # type: ignore[attr-defined]


def untraced(function: Callable[..., Any]) -> None:
    """Let torch.compile neither trace the function nor what it calls.

    It is what torch.compiler.disable does, without a wrapper that would take longer than the call, and without loading
    the compiler. A torch that has no such words traces what the function calls; results are the same.
    """
    if not isinstance(function, FunctionType):
        return  # of C, which nobody traces
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg="fusegen's kernels are not traced")
    if "torch" in sys.modules:
        with suppress(ImportError, TypeError):
            from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

            set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def nowhere(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("called before it was told where calls go")


@dataclass(frozen=True, slots=True)
class Variant:
    """The kernel for one layout."""

    source: Source
    binary: Binary | None

    @property
    def plan(self) -> Plan:
        return self.source.plan


@dataclass(frozen=True, slots=True)
class JoinedVariant:
    """Several steps in one launch, each for one layout."""

    source: JoinedSource
    binary: Binary | None

    @property
    def plan(self) -> JoinedPlan:
        return self.source.plan


@dataclass(frozen=True, slots=True)
class Record:
    """What calls with like arrays share. `loaded` is None where there is no row, and so nothing to launch."""

    variant: Variant | JoinedVariant
    device: Device
    loaded: Loaded | None
    launch: Launch
    makers: tuple[Maker, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the outputs
    address: Callable[[Any], int]  # of an output that a maker made
    stream: Callable[[], int]  # the caller's current one
    waits: bool  # the caller's library can't order its reads after our stream
    inputs: int  # so many of the launch's pointers are inputs; outputs follow
    in_place: frozenset[tuple[int, int]] = frozenset()  # pointers, (output, input), that are to be the same

    def run(self, pointers: tuple[int, ...], values: tuple[float, ...], stream: int) -> None:
        """Launch; asynchronous where the caller's library allows it."""
        if self.loaded is not None:
            self.loaded.launch(self.launch, pointers, values, stream)
            if self.waits and self.device.asynchronous:
                self.device.synchronize(stream)

    def apart(self, pointers: tuple[int, ...]) -> bool:
        """Whether no output's bytes begin or end inside another array's, by the addresses of one call, but for those
        that are written in place."""
        return apart(self.launch.spans, self.inputs, pointers, self.in_place)

    @property
    def plan(self) -> Plan | JoinedPlan:
        return self.variant.plan

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """Of each pointer's array, the first byte and one past its last, relative to the pointer."""
        return self.launch.spans

    def sending(self) -> Sending | None:
        """The launch as lines of Python; None where there is nothing to launch."""
        return None if self.loaded is None else self.loaded.sending(self.launch)


def apart(
    spans: Sequence[tuple[int, int]], inputs: int, pointers: tuple[int, ...],
    in_place: frozenset[tuple[int, int]] = frozenset(),
) -> bool:  # fmt: skip
    """Whether no output's bytes begin or end inside another array's; the first `inputs` are no outputs. `in_place`:
    pointers, (output, input), that may be the same."""
    for position in range(inputs, len(spans)):
        low, high = spans[position]
        low, high = low + pointers[position], high + pointers[position]
        for other in range(position):
            if (position, other) in in_place and pointers[position] == pointers[other]:
                continue
            other_low, other_high = spans[other]
            if low < pointers[other] + other_high and pointers[other] + other_low < high:
                return False
    return True


class Recorded(Protocol):
    """What calls with like arrays share, of a kernel or of a program."""

    @property
    def plan(self) -> Any: ...

    @property
    def device(self) -> Device: ...

    @property
    def address(self) -> Callable[[Any], int]: ...

    @property
    def stream(self) -> Callable[[], int]: ...

    @property
    def waits(self) -> bool: ...

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...

    @property
    def spans(self) -> Sequence[tuple[int, int]]: ...

    def sending(self) -> Sending | None: ...

    def run(self, pointers: tuple[int, ...], values: tuple[float, ...], stream: int) -> None: ...


class Prepared(Forwarded):
    """One call, ready to launch again and again into the same outputs: what a benchmark or a graph capture repeats.

    `prepared(stream)` launches on `stream`, or the one that the call was prepared for, or the caller's current one.
    """

    def __init__(
        self, record: Recorded, pointers: tuple[int, ...], values: tuple[float, ...], stream: int | None,
        outputs: tuple[Any, ...], arrays: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self.record: Any = record
        self.pointers = pointers
        self.values = values
        self.stream = stream  # None: the caller's current one, asked at each launch
        self.outputs = outputs
        self.arrays = arrays  # kept alive
        self.hasten(partial(record.run, pointers, values))

    def hasten(self, send: Callable[[int], None], repeat: Callable[[Callable[..., None]], Any] | None = None) -> None:
        """Launch by `send(stream)`, and on the caller's current stream by what `repeat(otherwise)` gives, if there is
        any; it hands calls with a stream on to `otherwise`."""
        record, own = self.record, self.stream

        def launch(_: None, stream: object = None) -> None:  # knows nothing of `self`, which goes as soon as it can
            chosen = own if stream is None else stream_address(stream)
            send(record.stream() if chosen is None else chosen)

        self.forward(launch if repeat is None else repeat(launch), None)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a prepared call can't be pickled: it holds addresses of this process; pickle its kernel")

    @property
    def result(self) -> Any:
        """What the kernel's own call would return."""
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs

    @property
    def plan(self) -> Any:
        """The plan that is launched: the kernel's own, or a variant's; a program's."""
        return self.record.plan

    @property
    def numbers(self) -> Mapping[str, float]:
        """Every argument of the launch by its name in the source, for debugging. Raises RequestError for a program,
        whose launches have numbers of their own."""
        if not isinstance(self.record, Record):
            raise RequestError(f"{self.plan.name} is a program: its prepared.record.launches have them")
        rest = iter(self.record.launch.numbers)
        places = iter(self.pointers)
        numbers = dict.fromkeys(("extent", "size", "stride"), rest)
        queues = {"pointer": places, "map": places, "value": iter(self.values), **numbers}
        arrays = [param.tensor for param in self.plan.params if param.kind in ("pointer", "map")]
        queues["address"] = iter(
            [self.pointers[arrays.index(p.tensor)] for p in self.plan.params if p.kind == "address"]
        )
        return {param.name: next(queues[param.kind]) for param in self.plan.params}


class Captured(Prepared):
    """One call as a graph of the driver's, CUDA's or HIP's: its kernels and their arguments, replayed by one launch.

    `replay(stream)` launches it on `stream`, or the one that it was captured for, or the caller's current one. Operands
    and results are those of the capture, by their addresses, and so are run-time scalars: who wants others writes them
    into the operands' memory. All that memory is kept as long as this object, and so is a program's workspace.
    """

    def __init__(self, prepared: Prepared, replay: Callable[[int], None], memory: object = None) -> None:
        super().__init__(
            prepared.record, prepared.pointers, prepared.values, prepared.stream, prepared.outputs, prepared.arrays
        )
        self.memory = memory  # kept alive
        self.hasten(replay)
