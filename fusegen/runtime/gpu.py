"""What NVIDIA's and AMD's drivers have in common: kernels take an array of addresses, one for each argument.

That array and the block of arguments behind it are laid out once, when a kernel is loaded; a launch packs its numbers
into the block with one call. Two threads may launch one kernel, so packing and launching happen under a lock: the
driver copies the arguments before it returns.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

from fusegen.errors import KernelError, MissingError
from fusegen.language.types import DType, f32, i32, u32
from fusegen.planner.launched import Launched, Text
from fusegen.planner.model import Param
from fusegen.runtime.devices import Device, Launch, Loaded, Mapped, Memory, Sending, sent_by_call

if TYPE_CHECKING:
    from fusegen.compiling import Binary

SLOT = 8  # bytes for each argument but a tensor map: the largest one's size and alignment
MAP_BYTES = 128  # of a CUtensorMap
MAP_ALIGNMENT = 64
CAPTURE_ERRORS = range(900, 909)  # of both drivers: what a stream that is being captured does not take
VALUE_CODES: Mapping[DType, str] = {f32: "f4x", i32: "i4x", u32: "i4x"}  # struct's codes, padded to a slot


Encode = Callable[[Mapped, int], bytes]


class Arguments:
    """A kernel's argument block. In the block, pointers come first, then values, then extents and strides.

    `lead` bytes before the block are the driver's, for what a launch needs beside its arguments. A tensor map has the
    slot of its tensor's pointer, which few kernels read, as an argument of its own, and a place behind the slots.
    """

    def __init__(self, params: Sequence[Param], lead: int = 0) -> None:
        ranks = {"pointer": 0, "map": 0, "value": 1, "blocks": 2, "extent": 2, "size": 2, "stride": 2}
        own = [i for i, param in enumerate(params) if param.kind != "address"]
        order = sorted(own, key=lambda i: ranks[params[i].kind])  # stable: keeps each kind's own order
        self.codes = [slot_code(params[i]) for i in order]
        self.pack_into = struct.Struct("".join(self.codes)).pack_into
        mapped = [i for i, param in enumerate(params) if param.kind == "map"]
        size = SLOT * max(len(params), 1)
        self.block = (ctypes.c_char * (lead + size + (MAP_ALIGNMENT + MAP_BYTES * len(mapped) if mapped else 0)))()
        start = ctypes.addressof(self.block) + lead
        slot_of = {i: start + SLOT * place for place, i in enumerate(order)}
        by_tensor = {param.tensor: slot_of[i] for i, param in enumerate(params) if param.kind == "map"}
        slots = [slot_of[i] if i in slot_of else by_tensor[param.tensor] for i, param in enumerate(params)]
        first = -(-(start + size) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        self.maps = tuple(first + MAP_BYTES * place for place in range(len(mapped)))
        for i, address in zip(mapped, self.maps, strict=True):
            slots[i] = address
        self.placed: list[tuple[Mapped, int] | None] = [None] * len(mapped)  # what is at each of these places
        begins = [address - ctypes.addressof(self.block) for address in self.maps]
        self.places = [slice(begin, begin + MAP_BYTES) for begin in begins]
        self.memory = memoryview(self.block).cast("B")  # written to in a fifth of memmove's time
        self.table = (ctypes.c_void_p * max(len(params), 1))(*slots)
        self.address = ctypes.addressof(self.table)

    def place_maps(self, maps: Sequence[Mapped], pointers: Sequence[int], encode: Encode) -> None:
        """Write the tensor maps of a launch over `pointers`, but for those that are there already."""
        placed = self.placed
        for place, given in enumerate(maps):
            wanted = given, pointers[given.pointer]
            if placed[place] != wanted:
                placed[place] = None  # whatever becomes of the next line
                self.place_map(place, *wanted, encode)
                placed[place] = wanted

    def place_map(self, place: int, given: Mapped, address: int, encode: Encode) -> None:
        """Write one of them; an address that was seen before costs no driver's call."""
        found = given.encoded.get(address)
        self.memory[self.places[place]] = encode(given, address) if found is None else found


def slot_code(param: Param) -> str:
    """struct's code for one argument."""
    if param.kind == "value":
        return VALUE_CODES[param.dtype or f32]
    return "P" if param.kind in ("pointer", "map") else "q"  # P takes two thirds of Q's time


class Replay:
    """A graph in a GPU's memory: called with a stream, it is launched there. Freed when this object is dropped."""

    def __init__(self, device: GpuDevice, graph: object) -> None:
        self.device = device
        self.graph = graph
        weakref.finalize(self, device.drop_graph, graph).atexit = False  # the driver may be gone before this is

    def __call__(self, stream: int) -> None:
        status = self.device.start_graph(self.graph, stream)
        if status:
            self.device.check(status, "replaying a graph")


class GpuKernel:
    """A kernel in a GPU's memory."""

    def __init__(
        self, device: GpuDevice, module: object, function: object, plan: Launched, resident: int | None = None
    ) -> None:
        self.device = device
        self.resident = resident
        self.module = module  # keeps the code loaded
        self.function = function
        self.plan = plan
        self.arguments = Arguments(plan.params)
        self.lock = threading.Lock()

    def sending(self, launch: Launch) -> Sending:
        return self.device.sending(self, launch)

    def launch(self, launch: Launch, pointers: Sequence[int], values: Sequence[float], stream: int) -> None:
        arguments, plan = self.arguments, self.plan
        with self.lock:
            arguments.pack_into(arguments.block, 0, *pointers, *values, *launch.numbers)
            if launch.maps:
                arguments.place_maps(launch.maps, pointers, self.device.encode)
            if launch.dependent:
                status = self.device.start_dependent(self, launch, stream, arguments.address)
            else:
                status = self.device.start(
                    self.function, plan.grid(launch.blocks), plan.threads, plan.shared_bytes, stream, arguments.address
                )
        if status:
            cluster = plan.cluster
            clusters = f" in clusters of {cluster}, for which a part of a GPU may have no room," if cluster > 1 else ""
            raise KernelError(
                f"{plan.name}: the launch failed: {self.device.error_text(status)}\n"
                f"  {launch.blocks} blocks of {plan.threads} threads,{clusters} {plan.shared_bytes} bytes of shared "
                f"memory, on {self.device}\n"
                "  an earlier kernel's error can surface here too; synchronize after each to tell"
            )


class GpuDevice(Device):
    """A GPU through its driver. Subclasses spell the driver's calls; each status is 0 for success."""

    def __init__(self, ordinal: int, name: str, arch: str) -> None:
        self.ordinal = ordinal
        self.name = name
        self.arch = arch
        self.place = (self.kind, ordinal)

    def load(self, source: Text, binary: Binary | None) -> Loaded:
        if binary is None:
            raise KernelError(f"{source.plan.name} has no machine code; a GPU runs compiled kernels only")
        plan = source.plan
        module, function = self.load_code(binary.code, plan.name, plan.shared_bytes, plan.cluster)
        resident = self.resident_blocks(function, plan) if plan.persistent_rows or plan.cluster > 1 else None
        return GpuKernel(self, module, function, plan, resident)

    def empty(self, nbytes: int) -> Memory:
        size = max(nbytes, 1)
        address = self.allocate(size)
        return Memory(self, address, nbytes, lambda: self.free(address))

    def sending(self, kernel: GpuKernel, launch: Launch) -> Sending:
        """Launches as lines of Python."""
        return sent_by_call(kernel, launch)

    def check(self, status: int, doing: str) -> None:
        """Raise the error that `status` stands for; none for 0."""
        if status:
            error = MissingError if self.out_of_memory(status) else KernelError
            advice = "\n  make the call once before the capture, which takes launches only" * (status in CAPTURE_ERRORS)
            raise error(f"{self}: {doing} failed: {self.error_text(status)}{advice}")

    def capture(self, work: Callable[[int], None]) -> Callable[[int], None]:
        with self.relaxed():
            stream = self.new_stream()
            try:
                self.check(self.begin_capture(stream), "capturing a graph")
                try:
                    work(stream)
                except BaseException:
                    with suppress(KernelError):
                        self.drop_graph(self.end_capture(stream))
                    raise
                return Replay(self, self.end_capture(stream))
            finally:
                self.drop_stream(stream)

    def encode(self, given: Mapped, address: int) -> bytes:
        """A tensor map as the kernel takes it, which `given.encoded` remembers."""
        raise KernelError(f"{self} has no tensor copies, which {given.name} is for")

    @abstractmethod
    def relaxed(self) -> AbstractContextManager[None]:
        """This GPU is this thread's current one, and what it does touches no capture of another's."""

    @abstractmethod
    def new_stream(self) -> int:
        """The address of a stream of its own, which waits for no other."""

    @abstractmethod
    def drop_stream(self, stream: int) -> None:
        """Give a stream back."""

    @abstractmethod
    def begin_capture(self, stream: int) -> int:
        """From now on the stream notes what it is given, of this thread. Returns the status."""

    @abstractmethod
    def end_capture(self, stream: int) -> object:
        """The graph of what the stream noted, ready to launch. Raises KernelError."""

    @abstractmethod
    def start_graph(self, graph: object, stream: int) -> int:
        """Launch a graph. Returns the status."""

    @abstractmethod
    def drop_graph(self, graph: object) -> None:
        """Give a graph back; silent when the driver is gone."""

    @abstractmethod
    def start(
        self, function: object, grid: tuple[int, int], threads: int, shared: int, stream: int, arguments: int
    ) -> int:
        """Launch; `arguments` is the address of the table of argument addresses. Returns the status."""

    def start_dependent(self, kernel: GpuKernel, launch: Launch, stream: int, arguments: int) -> int:
        """The same of a launch that may begin while those before it run. Returns the status."""
        raise KernelError(f"{kernel.plan.name}: {self} has no dependent launches")

    @abstractmethod
    def load_code(self, code: bytes, entry: str, shared: int, cluster: int = 1) -> tuple[object, object]:
        """The module and its function `entry`, allowed `shared` bytes of dynamic shared memory and clusters of
        `cluster` blocks."""

    def resident_blocks(self, function: object, plan: Launched) -> int:
        """How many blocks of the loaded function this GPU holds at once. Raises KernelError where it holds none."""
        raise KernelError(f"{plan.name}: {self} was not expected to count the blocks it holds")

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Fresh memory's address."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give memory back; silent when the driver is gone."""

    @abstractmethod
    def fill(self, address: int, nbytes: int, stream: int) -> None:
        """Write zeros, asynchronously; `nbytes` and the address are multiples of 4."""

    @abstractmethod
    def event(self) -> object:
        """A new mark on a stream's time line."""

    @abstractmethod
    def drop_event(self, event: object) -> None:
        """Give an event back; silent when the driver is gone."""

    @abstractmethod
    def mark(self, event: object, stream: int) -> None:
        """Let `event` happen when all that `stream` holds now is done."""

    @abstractmethod
    def elapsed_us(self, start: object, end: object) -> float:
        """The time between two events that have happened, in µs; the GPU's clock ticks every 0.5 µs or so."""

    @abstractmethod
    def error_text(self, status: int) -> str:
        """`CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)`."""

    @abstractmethod
    def out_of_memory(self, status: int) -> bool: ...
