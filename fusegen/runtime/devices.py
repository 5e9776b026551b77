"""What runs a kernel: an NVIDIA GPU, an AMD GPU, or the emulator; one interface over the three.

A Device loads a compiled kernel and gives out raw memory. A Loaded kernel takes addresses and numbers, in the order of
the plan's parameters, and checks nothing: `fusegen.runtime.arguments` has done that.
"""

from __future__ import annotations

import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fusegen.errors import RequestError
from fusegen.language.types import DType
from fusegen.planner.launched import Text
from fusegen.runtime.arrays import ArrayView, Place, contiguous_strides
from fusegen.targets.tensor_map import TensorMap

if TYPE_CHECKING:
    from fusegen.compiling import Binary

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Mapped:
    """One tensor map of a launch, all but its address, which is that of pointer number `pointer`.

    `encoded`: what a driver made of it for the addresses of earlier launches.
    """

    name: str
    pointer: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes, without the last axis's
    box: tuple[int, ...]
    swizzle: int
    encoded: dict[int, bytes] = field(default_factory=dict, compare=False, repr=False)

    def at(self, address: int) -> TensorMap:
        """Raises RequestError for what no tensor copy can reach."""
        return TensorMap(self.name, address, self.dtype, self.shape, self.strides, self.box, self.swizzle)


@dataclass(frozen=True, slots=True)
class Launch:
    """What stays the same over calls whose arrays differ only in address.

    `numbers`: extents and strides in the order of the plan's parameters. `spans`: for each pointer, in order, the first
    and one past the last byte its array owns, relative to the pointer; the emulator allows no other byte. `maps`: the
    tensor maps in the order of the plan's parameters. A tensor that has one is among the pointers all the same.
    `dependent`: it may begin while launches before it on its stream run, for which its kernel waits by itself.
    """

    blocks: int
    numbers: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    maps: tuple[Mapped, ...] = ()
    dependent: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """A launch as memory, for a function in C that is written for all kernels (`fusegen/runtime/shortcut.c`).

    `words`, of 8 bytes each, are what cuLaunchKernelEx takes, a CUlaunchConfig and the arguments, but for the stream,
    which is to be in word number `stream`, and for the addresses and then the run-time numbers, from word `first` on.
    `places` are the words of the parameters, in their order. `start` and `function`: the addresses of
    cuLaunchKernelEx and of what it launches. `again(words)` launches with all care what the driver refused.
    """

    words: bytes
    stream: int
    first: int
    places: tuple[int, ...]
    start: int
    function: int
    again: Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Sending:
    """A launch as lines of Python, for a function that is written for one kernel (`fusegen.runtime.shortcuts`).

    A tuple `sent` holds the stream and the pointers. The lines of `take` bind `held`, the `sent` of an earlier launch,
    and `slot`, a list whose first item is that. Where they are not equal, `fill` writes down what is new, else it is
    left out; a kernel with run-time values always fills. Then `send` launches, or `leave` gives up.

    In the lines `{sent}` stands for the items of `sent`, and `{values}` for the names of the run-time values, with a
    comma behind every one. `names` are what else they use. `block` makes the same launch's memory for C, where C can
    make it.
    """

    take: tuple[str, ...]
    fill: tuple[str, ...]
    send: tuple[str, ...]
    leave: tuple[str, ...]
    names: Mapping[str, Any]
    block: Callable[[], Block] | None = None


class Loaded(Protocol):
    """A kernel that is ready to launch. `resident`: how many of its blocks the device holds at once; None where the
    plan does not ask."""

    resident: int | None

    def sending(self, launch: Launch) -> Sending:
        """Launches that differ only in pointers, values and stream, as lines of Python."""

    def launch(self, launch: Launch, pointers: Sequence[int], values: Sequence[float], stream: int) -> None:
        """Launch, asynchronously on a GPU. `pointers` and `values` (run-time scalars) are in the parameters' order.

        Raises KernelError when the launch is refused (or, in the emulator, when the kernel is caught doing wrong).
        """


def sent_by_call(loaded: Loaded, launch: Launch) -> Sending:
    """The lines that call the kernel's own `launch`."""
    send = "launch(launched, sent[1:], ({values}), sent[0])"
    names = {"slot": [None], "launch": loaded.launch, "launched": launch}
    return Sending(("held = slot[0]",), (), (send,), (), names)


class Memory:
    """Bytes on a device, freed when this object is dropped."""

    def __init__(self, device: Device, address: int, nbytes: int, free: Callable[[], object]) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        # at exit the driver may be gone before this is; the memory goes with the process
        weakref.finalize(self, free).atexit = False

    def write(self, data: np.ndarray[Any, np.dtype[Any]], offset: int = 0) -> None:
        """Copy an array's bytes here, in its own order; returns when they are there."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self.check(offset, raw.nbytes)
        if raw.nbytes:
            self.device.copy_in(self.address + offset, raw)

    def read(self, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """A copy of the bytes here, taken after all earlier work on the default stream."""
        size = self.nbytes - offset if nbytes is None else nbytes
        self.check(offset, size)
        raw = np.empty(size, np.uint8)
        if size:
            self.device.copy_out(raw, self.address + offset)
        return raw

    def view(
        self, dtype: DType, shape: Sequence[int], *, strides: Sequence[int] | None = None, offset: int = 0
    ) -> ArrayView:
        """An array in this memory, `offset` bytes in; contiguous unless `strides` (in elements) are given."""
        steps = contiguous_strides(shape) if strides is None else tuple(strides)
        array = ArrayView(self.address + offset, dtype, tuple(shape), steps, self.device.place, True, "fusegen", self)
        low, high = array.span
        self.check(low - self.address, high - low)
        return array

    def check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise RequestError(f"bytes {offset} to {offset + nbytes} are outside of this memory's {self.nbytes} bytes")


class Device(ABC):
    """Something that runs kernels. `place` is where its memory is, `arch` what it runs, `kind` whose it is."""

    kind: str  # "cuda", "hip" or "emulator"
    ordinal: int = 0
    name: str  # "NVIDIA H200", "emulator"
    arch: str
    place: Place
    asynchronous: bool = True

    @abstractmethod
    def load(self, source: Text, binary: Binary | None) -> Loaded:
        """Make a kernel ready to launch. Raises KernelError when the driver (or the emulator) refuses it."""

    @abstractmethod
    def empty(self, nbytes: int) -> Memory:
        """Fresh memory, aligned to 256 bytes. Raises MissingError when there is none left."""

    @abstractmethod
    def copy_in(self, address: int, data: Bytes) -> None:
        """Host bytes to device memory, complete on return."""

    @abstractmethod
    def copy_out(self, data: Bytes, address: int) -> None:
        """Device memory to host bytes, complete on return."""

    @abstractmethod
    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Device memory to device memory, asynchronously on a GPU."""

    @abstractmethod
    def synchronize(self, stream: int | None = None) -> None:
        """Wait for a stream, or for the whole device. Raises KernelError when a kernel failed meanwhile."""

    @abstractmethod
    def capture(self, work: Callable[[int], None]) -> Callable[[int], None]:
        """What `work(stream)` launches on a stream of its own, as one graph: `replay(stream)` launches it again.

        Nothing runs before a replay. The emulator has no graphs: there a replay does the work. Raises KernelError."""

    @abstractmethod
    def capturing(self, stream: int) -> bool:
        """Is a graph being captured on `stream`?"""

    @abstractmethod
    def at(self, ordinal: int) -> Device:
        """The same kind of device with that number. Raises MissingError."""

    @abstractmethod
    def order(self, stream: int, after: int) -> None:
        """Make `stream` wait for what `after` holds now."""

    def __str__(self) -> str:
        return self.name if self.kind == "emulator" else f"{self.name} ({self.kind}:{self.ordinal})"


# ---------------------------------------------------------------- what is here


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine. `arch` is what it natively runs: "sm_90", "gfx942"."""

    vendor: str
    ordinal: int
    name: str
    arch: str
    memory_bytes: int
    sms: int

    def __str__(self) -> str:
        return f"{self.vendor}:{self.ordinal} {self.name}, {self.arch}, {self.memory_bytes / 2**30:.0f} GiB"


def runs(arch: str, vendor: str, native: str) -> bool:
    """Whether a GPU whose own architecture is `native` can run machine code made for `arch`.

    A cubin runs on its own compute capability and later minor ones; one with a suffix (`sm_90a`) on exactly its own.
    An AMD code object runs on exactly its own architecture.
    """
    if vendor == "hip":
        return arch.split(":")[0] == native.split(":")[0]
    wanted, has = re.fullmatch(r"sm_(\d+)(\d)([a-z]?)", arch), re.fullmatch(r"sm_(\d+)(\d)", native)
    if wanted is None or has is None or wanted[1] != has[1]:
        return False
    return wanted[2] == has[2] if wanted[3] else int(wanted[2]) <= int(has[2])
