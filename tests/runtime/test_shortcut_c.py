"""The shortcut in C: what it hands over, whom it asks, what it leaves to others and keeps. Its torch is pretended."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import re
import select
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fusegen.runtime import native
from fusegen.runtime.devices import Block
from fusegen.runtime.shortcuts import Kind, in_c

LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
WIDEST = 16
FUNCTION = 2**47 + 7


@dataclass
class Tensor:
    """What a shortcut asks of one: whether it is `like`, and where it is."""

    address: int
    like: object = True
    is_nested: bool = False


class Driver:
    """Stands for cuLaunchKernelEx and for torch: notes what it gets, and gives memory out."""

    def __init__(self) -> None:
        self.launched: list[list[int]] = []  # the stream, then the parameters' words in their order
        self.again: list[bytes] = []
        self.passed: list[tuple[tuple[object, ...], dict[str, object]]] = []
        self.status = 0
        self.stream = 5
        self.device = 3
        self.next = 2**40
        self.block = Block(
            # a config of two words, the second the stream; two inputs, an output, a number, an extent
            words=struct.pack("7Q", 77, 0, 0, 0, 0, 0, 99),
            stream=1,
            first=2,
            places=(2, 5, 3, 4, 6),
            start=0,
            function=FUNCTION,
            again=self.relaunch,
        )
        self.start = LAUNCH(self.launch)
        self.block = replace(self.block, start=ctypes.cast(self.start, ctypes.c_void_p).value or 0)
        self.kind = Kind(
            filling=False,
            guard=self.guard,
            types=(Tensor, Tensor, Tensor),
            address=lambda tensor: tensor.address,
            numbers=(None, float, None),
            empty=self.empty,
            fresh=((64,),),
            offsets=(0, 8),
            widest=WIDEST,
            ends=(64, 64, 64),
            place=3,
            current_stream=lambda place: self.stream,
            stream_of=0,
            current_device=None,
        )
        self.filling = replace(self.kind, filling=True, offsets=(0, 8, 0))
        self.asked = 0

    def guard(self, *tensors: Tensor) -> bool:
        self.asked += 1
        return all(tensor.like for tensor in tensors)

    def launch(self, config: int, function: int, arguments: int, extra: None) -> int:
        assert (function, extra) == (FUNCTION, None)
        head = (ctypes.c_uint64 * 2).from_address(config)
        assert head[0] == 77
        places = (ctypes.c_void_p * 5).from_address(arguments)
        self.launched.append([head[1], *(ctypes.c_uint64.from_address(place or 0).value for place in places)])
        return self.status

    def relaunch(self, words: bytes) -> None:
        self.again.append(words)

    def empty(self, size: int) -> Tensor:
        self.next += 256
        return Tensor(self.next)

    def made(self, module: Any, kind: Kind) -> Any:
        found: Any = in_c(self.block, kind, module)
        found.hand_on(self.otherwise)
        return partial(found, self)

    def otherwise(self, kernel: object, /, *operands: object, **options: object) -> str:
        assert kernel is self
        self.passed.append((operands, options))
        return "checked"


@pytest.fixture
def driver() -> Driver:
    return Driver()


def but(kind: Kind, **changes: Any) -> Kind:
    return replace(kind, **changes)


def word(number: float) -> int:
    """An f32 in the lower half of a word."""
    return int.from_bytes(struct.pack("<f", number), "little")


X, Y, OUT = Tensor(2**47), Tensor(2**46 + 8), Tensor(2**45)

# ---------------------------------------------------------------- a call


def test_every_argument_is_where_the_driver_reads_it(module: Any, driver: Driver) -> None:
    fresh = driver.made(module, driver.kind)(X, 1.5, Y)
    assert driver.made(module, driver.filling)(X, -0.0, Y, out=OUT) is OUT
    assert driver.launched == [
        [5, X.address, word(1.5), Y.address, fresh.address, 99],
        [5, X.address, word(-0.0), Y.address, OUT.address, 99],
    ]
    assert not driver.passed


def test_whole_numbers_are_signed_and_32_bits(module: Any, driver: Driver) -> None:
    shortcut = driver.made(module, but(driver.kind, numbers=(None, int, None)))
    for number in (-1, 2**31 - 1, True):
        shortcut(X, number, Y)
    assert [launched[2] for launched in driver.launched] == [2**32 - 1, 2**31 - 1, 1]


def test_several_outputs_are_a_tuple(module: Any, driver: Driver) -> None:
    kind = but(driver.kind, numbers=(None, float), fresh=((64,), (64,)), offsets=(0,))
    one, other = driver.made(module, kind)(X, 0.0)
    outs = OUT, Y
    assert driver.made(module, but(kind, filling=True, offsets=(0, 0, 8)))(X, 0.0, out=outs) is outs
    assert [launched[3:5] for launched in driver.launched] == [[one.address, other.address], [OUT.address, Y.address]]


OTHERS: dict[str, Callable[[Any], object]] = {
    "too few": lambda call: call(X, 1.0, out=OUT),
    "too many": lambda call: call(X, 1.0, Y, Y, out=OUT),
    "no out=": lambda call: call(X, 1.0, Y),
    "no out= in words": lambda call: call(X, 1.0, Y, out=None),
    "a stream": lambda call: call(X, 1.0, Y, out=OUT, stream=0),
    "what there is not": lambda call: call(X, 1.0, Y, out=OUT, to=None),
    "operands by name": lambda call: call(X, x=1.0, y=Y, out=OUT),
    "one by name too many": lambda call: call(X, 1.0, Y, out=OUT, kernel=Y),
    "a word that is made": lambda call: call(X, 1.0, Y, **{"".join(["o", "ut"]): OUT}),
    "another kind of tensor": lambda call: call(X, 1.0, Tensor(8, like=[]), out=OUT),
    "a nested tensor": lambda call: call(X, 1.0, Tensor(Y.address, is_nested=True), out=OUT),
    "another class": lambda call: call(X, 1.0, Y.address, out=OUT),
    "another kind of output": lambda call: call(X, 1.0, Y, out=Tensor(0, like=0)),
    "aligned less": lambda call: call(Tensor(X.address + 8), 1.0, Y, out=OUT),
    "aligned better": lambda call: call(X, 1.0, Tensor(X.address + 4096), out=OUT),
    "the output is an input": lambda call: call(X, 1.0, Y, out=X),
    "the output's end is an input's": lambda call: call(X, 1.0, Y, out=Tensor(X.address - 48)),
    "the output's begin is an input's": lambda call: call(X, 1.0, Y, out=Tensor(X.address + 48)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_are_handed_on_as_they_came(module: Any, driver: Driver, name: str) -> None:
    given: list[Any] = []
    OTHERS[name](lambda *operands, **options: given.append((operands, options)))
    assert OTHERS[name](driver.made(module, driver.filling)) == "checked"
    assert driver.passed == given
    assert not driver.launched


def test_out_where_results_were_fresh(module: Any, driver: Driver) -> None:
    assert driver.made(module, driver.kind)(X, 1.0, Y, out=OUT) == "checked"
    assert driver.passed == [((X, 1.0, Y), {"out": OUT})]


@pytest.mark.parametrize("away", [-64, 64])
def test_neighbours_are_apart(module: Any, driver: Driver, away: int) -> None:
    assert driver.made(module, driver.filling)(X, 1.0, Y, out=Tensor(X.address + away), stream=None) != "checked"


def test_outs_that_are_no_tuple_of_as_many(module: Any, driver: Driver) -> None:
    kind = but(driver.kind, filling=True, numbers=(None,), fresh=((64,), (64,)), offsets=(0, 0, 0))
    shortcut = driver.made(module, kind)
    for outs in (OUT, (OUT,), [OUT, Tensor(64)], (OUT, Tensor(64), Tensor(128)), (OUT, Tensor(OUT.address + 16))):
        assert shortcut(X, out=outs) == "checked"
    assert len(driver.passed) == 5


def test_another_gpu_is_current(module: Any, driver: Driver) -> None:
    shortcut = driver.made(module, but(driver.kind, current_device=lambda: driver.device))
    assert shortcut(X, 1.0, Y) != "checked"
    driver.device = 1
    assert shortcut(X, 1.0, Y) == "checked"


def test_what_the_driver_refuses_is_launched_once_more(module: Any, driver: Driver) -> None:
    driver.status = 201
    fresh = driver.made(module, driver.kind)(X, 2.0, Y)
    assert driver.again == [struct.pack("7Q", 77, 5, X.address, Y.address, fresh.address, word(2.0), 99)]


def raising(*_: object) -> Any:
    raise ZeroDivisionError("raised on purpose")


TURNS: Iterator[Callable[[int], Tensor]] = itertools.cycle((Tensor, raising))


RAISING: dict[str, dict[str, Any]] = {
    "guard": {"guard": raising},
    "address": {"address": raising},
    "a number": {"numbers": (None, raising, None)},
    "memory": {"empty": raising},
    "memory for the second output": {
        "empty": lambda size: next(TURNS)(0),
        "fresh": ((1,), (2,)),
        "ends": (64, 64, 64, 64),
    },
    "the stream": {"current_stream": raising},
    "the GPU": {"current_device": raising},
    "the launch": {},
}


@pytest.mark.parametrize("name", RAISING)
def test_errors_come_out_and_leave_nothing_behind(module: Any, driver: Driver, name: str) -> None:
    driver.status, driver.block = 1, replace(driver.block, again=raising)
    shortcut = driver.made(module, but(driver.kind, **RAISING[name]))

    def work() -> list[int]:
        for _ in range(100):
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                shortcut(X, 1.0, Y)
        objects = gc.get_objects()
        held = (one for one in objects if type(one) is tuple and any(type(each) is Tensor for each in one))
        tensors = sum(type(one) is Tensor for one in objects)
        return [*references(X, Y, shortcut), tensors, sum(1 for _ in held)]

    work()
    before = work()
    assert work() == before
    assert len(driver.launched) == (300 if name == "the launch" else 0)


def test_answers_that_are_no_numbers(module: Any, driver: Driver) -> None:
    for kind in (
        but(driver.kind, address=str),
        but(driver.kind, current_stream=str),
        but(driver.kind, numbers=(None, str, None)),
    ):
        with pytest.raises(TypeError):
            driver.made(module, kind)(X, 1.0, Y)
    with pytest.raises(TypeError):
        module.Shortcut(1, 2)
    assert not driver.launched


def test_before_it_knows_where_to_hand_on(module: Any, driver: Driver) -> None:
    with pytest.raises(TypeError, match="not callable"):
        in_c(driver.block, driver.kind, module)()


# ---------------------------------------------------------------- with the functions of guards.cpp, pretended


class Reader:
    """Notes of each tensor whether it is `like`, and of what is fresh where it is: others lie behind it."""

    note_type = ctypes.PYFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_void_p)
    make_type = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    look_type = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_ssize_t)
    alike_type = ctypes.PYFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p
    )  # fmt: skip

    def __init__(self) -> None:
        self.module: Any = native.get()  # of its own, since what it is told is its own for good
        self.sizes: Iterator[int] | None = None  # what `note` says, if not the truth
        self.noted: list[list[Any]] = []
        self.compared: list[list[Any]] = []
        self.formed: list[list[Any]] = []
        self.formless = False
        self.made: list[Tensor] = []
        self.most = 99  # made before there is no more memory
        self.unwatched = 1
        self.functions = (
            self.note_type(self.note), self.alike_type(self.alike), self.look_type(self.look),
            self.note_type(self.form), self.make_type(self.make),
        )  # fmt: skip

    def begin(self) -> Any:
        self.module.read_by(*(ctypes.cast(function, ctypes.c_void_p).value for function in self.functions))
        return self.module

    def objects(self, tensors: int, count: int) -> list[Any]:
        return [*(ctypes.py_object * count).from_address(tensors)]

    def note(self, tensors: int, count: int, traits: int | None) -> int:
        given = self.objects(tensors, count)
        if traits:
            self.noted.append(given)
            (ctypes.c_int64 * count).from_address(traits)[:] = [bool(tensor.like) for tensor in given]
        return count if self.sizes is None else next(self.sizes)

    def look(self, tensors: int, count: int) -> int:
        assert all(isinstance(tensor, Tensor) for tensor in self.objects(tensors, count))
        return self.unwatched

    def form(self, tensors: int, count: int, forms: int | None) -> int:
        given = self.objects(tensors, count)
        if forms:
            self.formed.append(given)
            (ctypes.c_int64 * count).from_address(forms)[:] = [tensor.address for tensor in given]
        return -1 if self.formless else count

    def make(self, forms: int, address: int) -> int | None:
        if len(self.made) == self.most:
            return None
        form = ctypes.c_void_p.from_address(forms)
        assert form.value
        self.made.append(Tensor(ctypes.c_int64.from_address(form.value).value + 2**20 * (1 + len(self.made))))
        ctypes.c_uint64.from_address(address).value = self.made[-1].address
        form.value += 8
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.made[-1]))
        return id(self.made[-1])

    def alike(self, tensors: int, count: int, traits: int, addresses: int) -> int:
        given = self.objects(tensors, count)
        self.compared.append(given)
        if [bool(tensor.like) for tensor in given] != [*(ctypes.c_int64 * count).from_address(traits)]:
            return 0
        (ctypes.c_uint64 * count).from_address(addresses)[:] = [tensor.address for tensor in given]
        return 1


@pytest.fixture
def reader(module: Any) -> Reader:
    return Reader()


def test_guards_are_asked_until_they_let_a_call_pass(reader: Reader, driver: Driver) -> None:
    shortcut = driver.made(reader.begin(), driver.filling)
    assert shortcut(Tensor(X.address, like=0), 1.0, Y, out=OUT) == "checked"
    for turn in range(3):
        assert shortcut(X, float(turn), Y, out=OUT) is OUT
    assert shortcut(Tensor(X.address, like=0), 1.0, Y, out=OUT) == "checked"
    assert (driver.asked, reader.noted, len(reader.compared)) == (2, [[X, Y, OUT]], 3)
    assert driver.launched == [[5, X.address, word(turn), Y.address, OUT.address, 99] for turn in range(3)]


def test_an_operators_shortcut_asks_each_time_who_watches(driver: Driver, reader: Reader) -> None:
    kind = but(driver.kind, operator=True)
    module = reader.module
    assert not module.sees()
    early = driver.made(module, kind)
    assert early(X, 1.5, Y) == "checked", "nobody tells who watches"
    reader.begin()
    assert module.sees()
    shortcut = driver.made(module, kind)
    for unwatched in 1, 0, 1:
        reader.unwatched = unwatched
        for call in early, shortcut:
            assert (call(X, 1.5, Y) == "checked") is not bool(unwatched)
    assert len(driver.launched) == 4
    filling = driver.made(module, but(driver.filling, operator=True))
    assert filling(X, 1.5, Y, OUT) is None
    assert driver.launched[-1][4] == OUT.address
    for refused in (X, 1.5, Y), (X, 1.5, Y, OUT, OUT), (X, 1.5, Y, X):
        assert filling(*refused) == "checked"
    assert filling(X, 1.5, Y, out=OUT) == "checked"
    assert len(driver.launched) == 5
    reader.unwatched = 0
    assert driver.made(module, driver.kind)(X, 1.5, Y) != "checked", "a kernel that is called is nobody's operator"


def test_functions_that_come_later_are_taken(reader: Reader, driver: Driver) -> None:
    shortcut = driver.made(reader.module, driver.kind)
    shortcut(X, 1.0, Y)
    reader.begin()
    for _ in range(3):
        shortcut(X, 1.0, Y)
    assert (driver.asked, len(reader.noted)) == (2, 1)
    assert len({tuple(launched[:3]) for launched in driver.launched}) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_outputs_are_made_like_those_that_torch_made(reader: Reader, driver: Driver, count: int) -> None:
    fresh = ((64,),) * count
    kind = but(driver.kind, numbers=(None, float), fresh=fresh, offsets=(0,), ends=(64,) * (1 + count))
    shortcut = driver.made(reader.begin(), kind)
    torchs = shortcut(X, 0.0)
    first = [torchs] if count == 1 else [*torchs]
    assert (reader.formed, reader.made) == ([first], [])
    for turn in range(1, 3):
        outs = shortcut(X, 0.0)
        made = [outs] if count == 1 else [*outs]
        assert made == reader.made[-count:]
        assert [out.address - like.address for out, like in zip(made, first, strict=True)] == [
            2**20 * (turn * count - count + place + 1) for place in range(count)
        ]
        assert driver.launched[-1][3 : 3 + count] == [out.address for out in made]
    assert len(reader.formed) == 1


@pytest.mark.parametrize("most", range(5))
def test_without_memory_torch_is_asked(reader: Reader, driver: Driver, most: int) -> None:
    """It may find some, or say why not."""
    kind = but(driver.kind, numbers=(None, float), fresh=((64,), (64,)), offsets=(0,))
    shortcut = driver.made(reader.begin(), kind)
    shortcut(X, 0.0)
    reader.most, before = most, driver.next
    for _ in range(2):
        outs = shortcut(X, 0.0)
        assert driver.launched[-1] == [5, X.address, 0, outs[0].address, outs[1].address, 99]
    assert len(reader.made) == most
    assert driver.next - before == 256 * (4 - most)


def test_outputs_that_take_more_than_memory(reader: Reader, driver: Driver) -> None:
    reader.formless = True
    shortcut = driver.made(reader.begin(), driver.kind)
    for turn in range(1, 4):
        assert shortcut(X, 1.0, Y).address == driver.next == 2**40 + 256 * turn
    assert not reader.made


def test_the_stream_is_asked_in_c(module: Any, driver: Driver) -> None:
    status, asked = 0, []

    def stream_of(device: int, stream: int) -> int:
        asked.append(device)
        ctypes.c_uint64.from_address(stream).value = 2**33
        return status

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_void_p)(stream_of)
    kind = but(driver.kind, stream_of=ctypes.cast(function, ctypes.c_void_p).value)
    shortcut = driver.made(module, kind)
    shortcut(X, 1.0, Y)
    status = 1
    shortcut(X, 1.0, Y)
    assert [launched[0] for launched in driver.launched] == [2**33, 5]
    assert asked == [3, 3]


def test_a_launch_without_operands(module: Any, driver: Driver) -> None:
    kind = but(
        driver.kind, guard=lambda: True, types=(), numbers=(), empty=tuple, fresh=(), offsets=(), ends=(), widest=1
    )
    driver.block = replace(driver.block, words=struct.pack("7Q", 77, 0, 1, 2, 3, 4, 99))
    shortcut = driver.made(module, kind)
    for stream in (5, 6):
        driver.stream = stream
        assert shortcut() is None
        assert driver.launched[-1] == [stream, 1, 4, 2, 3, 99]
    driver.status = 201
    shortcut()
    assert driver.again == [struct.pack("7Q", 77, 6, 1, 2, 3, 4, 99)]


class Other(Tensor):
    """Of another class: what C++ would read there is not a tensor's."""


def test_other_classes_are_not_handed_to_it(reader: Reader, driver: Driver) -> None:
    filling, fresh = driver.made(reader.begin(), driver.filling), driver.made(reader.module, driver.kind)
    filling(X, 1.0, Y, out=OUT)
    fresh(X, 1.0, Y)
    reader.compared.clear()
    for other in (Other(X.address), None, 3):
        assert filling(other, 1.0, Y, out=OUT) == "checked"
        assert filling(X, 1.0, Y, out=other or 3) == "checked"
    assert not reader.compared
    driver.next, made = 2**40, driver.empty
    reader.formed.clear()
    other = driver.made(reader.module, but(driver.kind, empty=lambda size: Other(made(size).address)))
    for _ in range(2):
        assert type(other(X, 1.0, Y)) is Other
    assert not reader.formed, "torch makes the output as ever"
    assert driver.launched[-1][4] == driver.next


@pytest.mark.parametrize("sizes", [[-1], [3, -1], [3, 2]])
def test_tensors_that_it_can_not_note(reader: Reader, driver: Driver, sizes: list[int]) -> None:
    reader.sizes = itertools.cycle(sizes)
    shortcut = driver.made(reader.begin(), driver.filling)
    for _ in range(3):
        assert shortcut(X, 1.0, Y, out=OUT) is OUT
    assert (driver.asked, reader.compared) == (3, [])


def test_addresses_and_devices_are_checked_as_ever(reader: Reader, driver: Driver) -> None:
    kind = but(driver.filling, current_device=lambda: driver.device)
    shortcut = driver.made(reader.begin(), kind)
    for _ in range(2):
        shortcut(X, 1.0, Y, out=OUT)
    launched = len(driver.launched)
    for operands, out in (
        ((Tensor(X.address + 8), 1.0, Y), OUT),
        ((X, 1.0, Y), X),
        ((X, 1.0, Y), Tensor(X.address + 48)),
        ((X, 1.0), OUT),
    ):
        assert shortcut(*operands, out=out) == "checked"
    driver.device = 1
    assert shortcut(X, 1.0, Y, out=OUT) == "checked"
    assert len(driver.launched) == launched
    assert driver.asked == 1


def test_what_it_noted_goes_with_the_shortcut(reader: Reader, driver: Driver) -> None:
    module = reader.begin()
    kept = (X, Y, OUT, driver.kind.types, Tensor)

    def work() -> None:
        for _ in range(500):
            fresh, filling = driver.made(module, driver.kind), driver.made(module, driver.filling)
            for _ in range(3):
                fresh(X, 1.0, Y)
                filling(X, 1.0, Y, out=OUT)
        driver.launched.clear()
        for noted in (reader.noted, reader.compared, reader.formed, reader.made):
            noted.clear()

    work()
    before, objects = references(*kept), len(gc.get_objects())
    work()
    assert references(*kept) == before
    assert len(gc.get_objects()) - objects < 50  # fewer, where what other tests left has gone meanwhile


# ---------------------------------------------------------------- what it keeps


def references(*objects: object) -> list[int]:
    gc.collect()  # of what is in errors' frames
    return [sys.getrefcount(one) for one in objects]


def test_no_call_leaves_a_reference_behind(module: Any, driver: Driver) -> None:
    kind = but(driver.kind, fresh=((64,), (64,)), numbers=(None, float), offsets=(0,), guard=lambda *given: [*given])
    fresh, filling = driver.made(module, kind), driver.made(module, driver.filling)
    scale, outs = 1234.5, Tensor(2**20)
    kept = (X, X.address, Y, scale, outs, outs.address, fresh, filling, kind.fresh, driver.kind.fresh, kind.guard)

    def work() -> None:
        for _ in range(2000):
            fresh(X, scale)
            filling(X, scale, Y, out=outs)
            filling(X, scale, out=outs)  # handed on
            driver.launched.clear()
            driver.passed.clear()

    work()
    before, objects = references(*kept), len(gc.get_objects())
    work()
    assert references(*kept) == before
    assert len(gc.get_objects()) - objects < 50  # fewer, where what other tests left has gone meanwhile


def test_a_cycle_through_what_it_hands_on_to_is_collected(module: Any, driver: Driver) -> None:
    class Kernel:
        """Has shortcuts, which hand on to a method of its."""

        def call(self, *_: object) -> None: ...

    kernel: Any = Kernel()
    kernel.shortcut = in_c(driver.block, driver.kind, module)
    kernel.shortcut.hand_on(kernel.call)
    gone = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert gone() is None


def test_shortcuts_may_go_while_they_run(module: Any, driver: Driver) -> None:
    """A call that none takes makes a new one, and the oldest is dropped: it may be the one that handed the call on."""
    first, second = (in_c(driver.block, driver.kind, module) for _ in range(2))
    held = [first, second]
    first.hand_on(second)  # type: ignore[attr-defined]

    def drop(*operands: object, **options: object) -> str:
        first.hand_on(driver.otherwise)  # type: ignore[attr-defined]
        held.clear()
        gc.collect()
        return "checked"

    second.hand_on(drop)  # type: ignore[attr-defined]
    del second
    assert first(driver, X) == "checked"
    alone: list[Any] = [in_c(driver.block, driver.kind, module)]
    alone[0].hand_on(lambda *_: alone.clear())
    assert alone[0]() is None
    assert not alone


def test_threads_have_arguments_of_their_own(module: Any, driver: Driver) -> None:
    wrong: list[object] = []
    together = threading.Barrier(4, timeout=60)
    launched: dict[int, list[int]] = {}

    def launch(config: int, function: int, arguments: int, extra: None) -> int:
        together.wait()  # all four are in the driver at the same time
        places = (ctypes.c_void_p * 5).from_address(arguments)
        launched[threading.get_ident()] = [ctypes.c_uint64.from_address(place or 0).value for place in places]
        return 0

    start = LAUNCH(launch)
    driver.block = replace(driver.block, start=ctypes.cast(start, ctypes.c_void_p).value or 0)
    shortcut = driver.made(module, driver.filling)

    def work(number: int) -> None:
        x, y, out = Tensor(number << 20), Tensor((number << 30) + 8), Tensor(number << 40)
        for turn in range(50):
            shortcut(x, turn, y, out=out)
            wanted = [x.address, word(turn), y.address, out.address, 99]
            if launched.pop(threading.get_ident()) != wanted:
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not launched


def test_other_threads_run_while_the_driver_waits(module: Any, driver: Driver) -> None:
    """The launch is libc's poll(fds, 1, some timeout), for what this thread writes."""
    reading, writing = os.pipe()
    rescue = subprocess.Popen(["sh", "-c", "sleep 20; echo rescued"], stdout=writing)  # in place of a test that hangs
    launching = threading.Event()

    def stream(place: int) -> int:
        launching.set()
        return 0

    poll = ctypes.cast(ctypes.CDLL(None).poll, ctypes.c_void_p).value or 0
    words = struct.pack("2i3Q", reading, select.POLLIN, 0, 0, 0)
    block = replace(driver.block, words=words, first=2, places=(2, 3), start=poll, function=1)
    driver.block = replace(block, again=lambda words: None)  # poll's answer is 1
    kind = but(driver.kind, numbers=(None,), offsets=(0,), ends=(64, 64), current_stream=stream)
    thread = threading.Thread(target=driver.made(module, kind), args=(X,))
    try:
        thread.start()
        launching.wait()
        os.write(writing, b"written")
        thread.join()
        assert os.read(reading, 7) == b"written"
    finally:
        rescue.kill()
        rescue.wait()
        os.close(reading)
        os.close(writing)


# ---------------------------------------------------------------- once more, watched


def sanitizer() -> str:
    """The address sanitizer's library of gcc, which has to come before Python's own."""
    asked = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True)
    return asked.stdout.strip() if Path(asked.stdout.strip()).is_absolute() else ""


@pytest.mark.skipif("FUSEGEN_SANITIZED" in os.environ, reason="this is the run under the sanitizers")
def test_the_sanitizers_find_nothing(module: Any, tmp_path: Path) -> None:
    """All the above once more, in a process whose module looks after its memory."""
    try:
        library = sanitizer()
    except OSError:
        library = ""
    if not library:
        pytest.skip("gcc with its sanitizers is missing: apt install gcc")
    environment = {
        **os.environ, "FUSEGEN_SANITIZED": "1", "FUSEGEN_CACHE_DIR": str(tmp_path), "LD_PRELOAD": library,
        "CC": "gcc -fsanitize=address,undefined -fno-sanitize-recover=all", "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0",
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        "not module",
        __file__,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    assert re.search(r"[1-9]\d* passed, 1 skipped", ran.stdout)
