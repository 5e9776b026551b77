"""The quick way of a call on torch tensors: in C, or a Python function written for one chain, its operands unrolled.

A call that repeats an earlier one does not read every shape, stride, dtype and device again. A shortcut asks torch's
`TensorGuards` once whether the tensors are like those of the earlier call (`fusegen.runtime.guards`; a nested tensor,
at which they abort the process, is never shown to them). The guards leave out addresses: the shortcut checks that each
is aligned as it was, and that those of an `out=` are apart from the inputs'. Any doubt goes to the next shortcut, and
from the last one to the checked path.

C (`shortcut.c`, `fusegen.runtime.native`) makes launches on NVIDIA GPUs that take no tensor maps; Python makes the
others, and those of programs. The text of such a function, and what calls take: docs/measurements.md, "Calls". The
logger `fusegen.shortcuts` says on DEBUG what was made, and the whole text of what is in Python.
"""

from __future__ import annotations

import logging
import re
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, zip_longest
from types import CodeType, FunctionType
from typing import Any

from fusegen.language.graph import Graph
from fusegen.runtime import arguments
from fusegen.runtime.arrays import Place, contiguous_strides
from fusegen.runtime.calls import Prepared, Record, Recorded
from fusegen.runtime.devices import Block, Sending
from fusegen.runtime.libraries import (
    is_current,
    several_gpus,
    torch_current_device,
    torch_current_stream,
    torch_dtype,
    torch_empty,
    torch_stream_of,
)

log = logging.getLogger("fusegen.shortcuts")

MOST_SHORTCUTS = 6  # tried one after the other, at a fraction of a microsecond each
MOST_PATIENCE = 1024  # missed calls for one more shortcut, at most: making one costs as much as a few of them
SUFFIXES = ("", "_at", "_end", "_bytes", "_like", "_number", "_type")  # of a tensor's name, for what belongs to it
WORD = 8  # bytes of what C calls a Word
Shortcut = Callable[..., Any]
OWN = frozenset(
    {"shortcut", "kernel", "operands", "out", "stream", "named", "stream_at", "otherwise", "like", "empty", "place"}
    | {"current_stream", "current_device", "sent", "held", "slot"}
    | {"len", "tuple", "type", "ValueError"}  # Python's, which a name of a function's own would hide
)


class Shortcuts:
    """The shortcuts of one kernel or program, the newest first. Each hands what it does not take to the next one, the
    last to `checked`; all of them are called as the kernel's methods are.

    A kind of call that comes back gets one at its first return; where they change all the time, ever fewer are made.
    """

    def __init__(self, graph: Graph, widest: int, checked: Callable[..., Any]) -> None:
        self.graph = graph
        self.widest = widest
        self.checked = checked
        self.made: tuple[Shortcut, ...] = ()
        self.missed = 0  # calls that no shortcut took since the last one was made
        self.patience = 1
        self.lock = threading.Lock()

    @property
    def first(self) -> Callable[..., Any]:
        """Where a call begins."""
        return next(iter(self.made), self.checked)

    def due(self) -> bool:
        """A call found no shortcut: is it time to make one?"""
        self.missed += 1
        if self.missed < self.patience:
            return False
        self.missed, self.patience = 0, min(2 * self.patience, MOST_PATIENCE)
        return True

    def learn(self, record: Recorded, arrays: Sequence[Any], outs: Sequence[Any], pointers: Sequence[int]) -> bool:
        """A call found a record and no shortcut: make one, if it is time. `pointers` are those of all its arrays."""
        return is_current(record.device.place) and self.due() and self.make(record, arrays, outs, pointers)

    def make(
        self, record: Recorded, arrays: Sequence[Any], outs: Sequence[Any], pointers: Sequence[int],
        operator: bool = False,
    ) -> bool:  # fmt: skip
        """Make one, where it can be made; that of an operator has to be in C, which sees who watches.

        None is made of a call on a GPU that is not the current one: none would ever take it.
        """
        if not is_current(record.device.place):
            return False
        offsets = tuple(pointer % self.widest for pointer in pointers)
        made = shortcut(self.graph, record, (*arrays, *outs), bool(outs), offsets, self.widest, operator)
        if made is None:
            return False
        with self.lock:
            self.made = (made, *self.made[: MOST_SHORTCUTS - 1])
            for one, other in zip(self.made, (*self.made[1:], self.checked), strict=True):
                hand_on(one, other)
        return True


def hand_on(one: Shortcut, otherwise: Shortcut) -> None:
    """Let `otherwise` take the calls that `one` does not."""
    if isinstance(one, FunctionType):
        one.__globals__["otherwise"] = otherwise
    else:
        one.hand_on(otherwise)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Kind:
    """Calls that are like an earlier one, as a shortcut has to know them."""

    filling: bool  # `out=` is given
    guard: Callable[..., bool]  # whether tensors are like that call's
    types: tuple[type, ...]  # of all its arrays
    address: Callable[[Any], int]
    numbers: tuple[Callable[[Any], float] | None, ...]  # how each operand is read that is a number
    empty: Callable[..., Any]
    fresh: tuple[tuple[Any, ...], ...]  # what `empty` takes for each output
    offsets: tuple[int, ...]  # of the addresses of the call's arrays, from multiples of `widest`
    widest: int
    ends: tuple[int, ...]  # bytes from each array's address; torch has no negative strides, so that all begin there
    place: int  # the device's number
    current_stream: Callable[[int], int]
    stream_of: int  # the address of the same in C; 0 where there is none
    current_device: Callable[[], int] | None  # None where there is but one
    operator: bool = False  # before torch's dispatcher: for calls of which no mode and no profiler is to know

    def __str__(self) -> str:
        return "out=" if self.filling else "fresh results"


def shortcut(
    graph: Graph, record: Recorded, tensors: Sequence[Any], filling: bool, offsets: tuple[int, ...], widest: int,
    operator: bool = False,
) -> Shortcut | None:  # fmt: skip
    """The shortcut for calls like that of `tensors`, the outputs last where they are given (`filling`).

    `offsets` are the tensors' addresses modulo `widest`. Where calls go `otherwise` is left to be said. None where the
    arrays or this torch don't allow for a shortcut, or only for one in Python and it is an `operator`'s.
    """
    from fusegen.runtime import guards  # takes milliseconds, which a first call need not wait for

    torch = sys.modules.get("torch")
    if torch is None or not guards.guards_hold():
        return None
    if len(set(map(id, tensors))) < len(tensors):
        return None  # one tensor twice: the guards want different ones
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
        return None  # a subclass may mean anything by its methods
    place = record.device.place
    sending = record.sending()
    if sending is None or (operator and sending.block is None):
        return None
    kind = Kind(
        filling=filling,
        guard=guards.guard(tensors),
        types=(*map(type, tensors), *([] if filling else [torch.Tensor] * len(graph.outputs))),
        address=torch.Tensor.data_ptr,
        numbers=tuple(None if t.shape else partial(arguments.scalar, graph, t) for t in graph.inputs),
        empty=torch_empty(place),
        fresh=tuple(
            (shape, contiguous_strides(shape), torch_dtype(tensor.dtype))
            for tensor, shape in zip(graph.outputs, record.shapes, strict=True)
        ),
        offsets=offsets,
        widest=widest,
        ends=tuple(end for _, end in record.spans),
        place=place[1],
        current_stream=torch_current_stream(place),
        stream_of=torch_stream_of(place),
        current_device=torch_current_device() if several_gpus(place) else None,
        operator=operator,
    )
    if sending.block is not None:
        from fusegen.runtime import native

        if (module := native.module()) is not None:
            guards.begin(module)
            if operator and not module.sees():  # yet
                return None
            log.debug("%s: a shortcut in C for calls with %s", graph.name, kind)
            return in_c(sending.block(), kind, module)
    return None if operator else in_python(graph, sending, kind)


def in_python(graph: Graph, sending: Sending, kind: Kind) -> FunctionType:
    called = local_names(graph, sending)
    text = shortcut_text(graph, called, sending, kind)
    names: dict[str, Any] = {
        **sending.names,
        "like": kind.guard,
        "empty": kind.empty,
        "place": kind.place,
        "current_stream": kind.current_stream,
        "current_device": kind.current_device,
    }
    names |= {f"{called[t.name]}_number": number for t, number in zip(graph.inputs, kind.numbers, strict=True)}
    arrays = [t.name for t in (*graph.inputs, *graph.outputs) if t.shape]
    names |= {f"{called[name]}_bytes": end for name, end in zip(arrays, kind.ends, strict=True)}
    names |= {f"{called[name]}_type": kind_of for name, kind_of in zip(arrays, kind.types, strict=True)}
    names |= {f"{called[t.name]}_like": fresh for t, fresh in zip(graph.outputs, kind.fresh, strict=True)}
    exec(code_of(text, graph.name), names)
    log.debug("%s: a shortcut for calls with %s\n%s", graph.name, kind, text)
    made: FunctionType = names["shortcut"]
    return made


def in_c(block: Block, kind: Kind, module: Any) -> Shortcut:
    """The arguments of `make` in shortcut.c."""
    spans = chain.from_iterable(zip_longest(kind.offsets, kind.ends, fillvalue=0))
    made: Shortcut = module.Shortcut(
        kind.guard, kind.current_device, kind.current_stream, kind.stream_of, kind.place, kind.place, kind.address,
        kind.types, kind.numbers, kind.empty, kind.fresh, kind.filling, kind.operator, words(spans), kind.widest - 1,
        block.words, block.stream, block.first, words(block.places), block.start, block.function, block.again,
    )  # fmt: skip
    return made


def words(numbers: Iterable[int]) -> bytes:
    """As C has them: 64 bits each."""
    return array("Q", numbers).tobytes()


@lru_cache(maxsize=256)
def code_of(text: str, name: str) -> CodeType:
    """The compiled text: a kernel has one or two, while each kind of call has values of its own for their names."""
    return compile(text, f"<shortcut of {name}>", "exec")


# ---------------------------------------------------------------- the text


def local_names(graph: Graph, sending: Sending) -> Mapping[str, str]:
    """What each tensor is called in a shortcut: its own name, with underscores behind it where that is taken."""
    lines = (*sending.take, *sending.fill, *sending.send, *sending.leave)
    taken = OWN.union(*(re.findall(r"\w+", line) for line in lines))
    found: dict[str, str] = {}
    for tensor in (*graph.inputs, *graph.outputs):
        name = tensor.name
        while any(name + suffix in taken for suffix in SUFFIXES):
            name += "_"
        taken |= {name + suffix for suffix in SUFFIXES}
        found[tensor.name] = name
    return found


def shortcut_text(graph: Graph, called: Mapping[str, str], sending: Sending, kind: Kind) -> str:
    """The function's source. Sizes and types are not in it: their names are bound for each kind of call."""
    filling = kind.filling
    arrays = [called[t.name] for t in graph.inputs if t.shape]
    numbers = [called[t.name] for t in graph.inputs if not t.shape]
    outs = [called[t.name] for t in graph.outputs]
    read = [*arrays, *outs] if filling else arrays
    operands = ", ".join(called[t.name] for t in graph.inputs)
    pass_on = "    return otherwise(kernel, *operands, out=out, stream=stream, **named)"
    lines = ["try:", f"    {operands} = operands" if len(graph.inputs) > 1 else f"    ({operands},) = operands"]
    lines += ["except ValueError:  # too many or too few", pass_on]
    if filling and len(outs) == 1:
        lines.append(f"{outs[0]} = out")
    elif filling:
        lines += [f"if type(out) is not tuple or len(out) != {len(outs)}:", pass_on]
        lines.append(f"{', '.join(outs)} = out")
    another = [f"out is {'' if filling else 'not '}None or stream is not None or named"]
    another += [f"or type({name}) is not {name}_type or {name}.is_nested" for name in read]
    lines += [
        "if (",
        *indented([*another, f"or not like({', '.join(read)})"]),
        "):  # not a call like that one",
        pass_on,
    ]
    if kind.current_device:
        lines += ["if current_device() != place:  # another GPU's turn", pass_on]
    lines += [f"{name} = {name}_number({name})" for name in numbers]
    if not filling:
        lines += [f"{name} = empty(*{name}_like)" for name in outs]
    pointers = "".join(f", {name}.data_ptr()" for name in (*arrays, *outs))
    lines += [f"sent = current_stream(place){pointers}"]
    give_up = indented([*sending.leave, f"return otherwise(kernel, *operands{', out=out' if filling else ''})"])
    checks = [f"if {misaligned(read, kind.offsets, kind.widest)}:  # not as they were", *give_up]
    if filling:
        checks += [
            "if (",
            *indented(overlaps(arrays, outs)),
            "):  # an output may be in another array's bytes",
            *give_up,
        ]
    lines += launch_lines(sending, [f"{name}_at" for name in (*arrays, *outs)], numbers, checks)
    lines.append("return out" if filling else f"return {', '.join(outs)}")
    head = "def shortcut(kernel, /, *operands, out=None, stream=None, **named):\n"
    return "".join([head, *(f"    {line}\n" for line in lines)])


def launch_lines(
    sending: Sending, addresses: Sequence[str], values: Sequence[str], checks: Sequence[str]
) -> Sequence[str]:
    """The launch of `sent`, whose items get the names `stream_at` and `addresses` where `checks` must look at them."""
    held = [f"stream_at, {', '.join(addresses)} = sent", *checks]
    spelled = {"sent": f"stream_at, {', '.join(addresses)},", "values": " ".join(f"{name}," for name in values)}
    fill = [line.format(**spelled).rstrip() for line in sending.fill]
    send = [line.format(**spelled) for line in sending.send]
    if values:  # equal numbers need not be the same: 0.0 and -0.0
        return [*sending.take, held[0], "if held != sent:", *indented([*checks, "slot[0] = sent"]), *fill, *send]
    return [*sending.take, "if held != sent:", *indented([*held, *fill, "slot[0] = sent"]), *send]


def indented(lines: Sequence[str]) -> Sequence[str]:
    return [f"    {line}" for line in lines]


def misaligned(names: Sequence[str], offsets: Sequence[int], widest: int) -> str:
    """Whether an address is not as far beyond a multiple of `widest` as it was."""
    even = [f"{name}_at" for name, offset in zip(names, offsets, strict=True) if not offset]
    tests = [f"({' | '.join(even)}) & {widest - 1}"] if even else []
    tests += [f"{name}_at & {widest - 1} != {offset}" for name, offset in zip(names, offsets, strict=True) if offset]
    return " or ".join(tests)


def overlaps(arrays: Sequence[str], outs: Sequence[str]) -> Sequence[str]:
    """Whether an output's bytes may be another array's too; the checked path tells."""
    tests = [
        f"{out}_at - {other}_bytes < {other}_at < {out}_at + {out}_bytes"
        for position, out in enumerate(outs)
        for other in (*arrays, *outs[:position])
    ]
    return [*tests[:1], *(f"or {test}" for test in tests[1:])] or ["False"]


# ---------------------------------------------------------------- one call again and again


def hasten(prepared: Prepared, owner: str) -> None:
    """Leave out what a launch of `prepared` does not need, if a launch is all of it. `owner` is the library whose
    current stream it goes to."""
    record, pointers, values = prepared.record, prepared.pointers, prepared.values
    sending = record.sending()
    if sending is None or (record.waits and record.device.asynchronous):
        return
    addresses = [f"at_{position}" for position in range(len(pointers))]
    numbers = [f"value_{position}" for position in range(len(values))]
    lines = ["sent = stream, *pointers", *launch_lines(sending, addresses, numbers, ())]
    text = "".join(["def again(stream):\n", *(f"    {line}\n" for line in lines)])
    names: dict[str, Any] = {**sending.names, "pointers": pointers, **dict(zip(numbers, values, strict=True))}
    exec(code_of(text, record.plan.name), names)
    repeat = None
    if owner == "torch" and prepared.stream is None and sending.block is not None:
        from fusegen.runtime import native

        if (module := native.module()) is not None:
            repeat = partial(repeating, sending.block(), pointers, values, record.device.place, module)
    prepared.hasten(names["again"], repeat)


def sender(record: Record) -> Callable[..., None] | None:
    """`send(stream, *pointers, *values)`: a kernel's launch as a function; None where there is nothing to launch."""
    sending = record.sending()
    if sending is None:
        return None
    addresses = [f"at_{position}" for position in range(len(record.spans))]
    numbers = [f"value_{position}" for position in range(sum(param.kind == "value" for param in record.plan.params))]
    lines = [f"sent = stream, {', '.join(addresses)},", *launch_lines(sending, addresses, numbers, ())]
    head = f"def send(stream, {', '.join([*addresses, *numbers])}):\n"
    names: dict[str, Any] = dict(sending.names)
    exec(code_of("".join([head, *(f"    {line}\n" for line in lines)]), record.plan.name), names)
    made: Callable[..., None] = names["send"]
    return made


def repeating(
    block: Block, pointers: Sequence[int], values: Sequence[float], place: Place, module: Any, otherwise: Shortcut
) -> Shortcut:
    """A shortcut without operands, whose launch has all its addresses and numbers already."""
    held = bytearray(block.words)
    codes = chain("P" * len(pointers), ("f4x" if type(value) is float else "i4x" for value in values))
    struct.pack_into("".join(codes), held, WORD * block.first, *pointers, *values)
    kind = Kind(
        filling=False, guard=partial(bool, True), types=(), address=id, numbers=(), empty=tuple, fresh=(), offsets=(),
        widest=1, ends=(), place=place[1], current_stream=torch_current_stream(place), stream_of=torch_stream_of(place),
        current_device=None,
    )  # fmt: skip
    made = in_c(replace(block, words=bytes(held)), kind, module)
    hand_on(made, otherwise)
    return made
