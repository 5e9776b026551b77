"""The handlers in C (`handler.c`), compiled once for each machine and jaxlib, then cached; the table of that on GPUs.

XLA calls them from threads of its own. On NVIDIA GPUs, for every launch that no graph of CUDA's repeats, which takes
neither the time nor the lock of Python. They are compiled as the C of shortcuts is (`fusegen.runtime.native`), against
the header that comes with jaxlib, and told where the driver's functions are.
"""

from __future__ import annotations

import ctypes
import hashlib
import shlex
import struct
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from fusegen.errors import KernelError, MissingError
from fusegen.jax import ffi
from fusegen.jax.calls import KEY_DIGITS, Call
from fusegen.language.types import DType, f32
from fusegen.planner.launched import Launched
from fusegen.planner.model import Param
from fusegen.runtime import nvidia
from fusegen.runtime.devices import Device, Mapped
from fusegen.runtime.native import ABI, FLAGS, compiler
from fusegen.runtime.program import StepLaunch
from fusegen.storage.libraries import LibraryKey, kept
from fusegen.targets.tensor_map import GRAIN

SOURCE = Path(__file__).with_name("handler.c")
MOST_ARGUMENTS, MOST_MAPS, MOST_ARRAYS = 512, 32, 256  # of handler.c
ADDRESS, NUMBER, MAP = range(3)
MOST_AXES = 5  # of a tensor map


class Argument(Structure):
    """These five are of handler.c."""

    _fields_ = (("kind", c_int32), ("base", c_int32), ("number", c_int64))


class Map(Structure):
    _fields_ = (("base", c_int32), ("type", c_int32), ("promotion", c_int32), ("swizzle", c_int32), ("offset", c_int64),
                ("rank", c_uint32), ("box", c_uint32 * MOST_AXES), ("steps", c_uint32 * MOST_AXES),
                ("shape", c_uint64 * MOST_AXES), ("strides", c_uint64 * (MOST_AXES - 1)))  # fmt: skip


class Launch(Structure):
    _fields_ = (("function", c_void_p), ("grid", c_uint32 * 2), ("threads", c_uint32), ("shared_bytes", c_uint32),
                ("arguments", c_int32), ("maps", c_int32), ("argument", POINTER(Argument)),
                ("map", POINTER(Map)))  # fmt: skip


class Entry(Structure):
    """Call."""

    _fields_ = (("key", c_char * KEY_DIGITS), ("name", c_char_p), ("context", c_void_p), ("operands", c_int32),
                ("arrays", c_int32), ("launches", c_int32), ("launch", POINTER(Launch)),
                ("next", c_void_p))  # fmt: skip


NEEDS = ("cuLaunchKernel", "cuTensorMapEncodeTiled", "cuStreamGetCtx", "cuCtxGetCurrent", "cuCtxPushCurrent_v2",
         "cuCtxPopCurrent_v2", "cuGetErrorName")  # fmt: skip
"""The driver's functions in the order of `Driver`, all of them in drivers of CUDA 12 and later."""


class Library:
    """The compiled handler: `handler` is its address.

    `function` and `context` say, as integers, what a launch's kernel is to the driver, and which context a device has.
    """

    def __init__(
        self, loaded: Any, driver: Sequence[int], function: Callable[[Any], int], context: Callable[[Device], int]
    ) -> None:
        self.loaded = loaded
        self.function, self.context = function, context
        self.handler = address(loaded.fusegen_call)
        self.added: dict[tuple[str, int], tuple[Call, Entry]] = {}  # which the table points to, for good
        self.lock = threading.Lock()
        loaded.fusegen_driver.argtypes, loaded.fusegen_driver.restype = [c_void_p], None
        loaded.fusegen_add.argtypes, loaded.fusegen_add.restype = [c_void_p], None
        loaded.fusegen_driver((c_void_p * len(NEEDS))(*driver))

    def add(self, call: Call) -> None:
        """From now on XLA may make this call. Raises KernelError for one that is too large for the handler."""
        context = self.context(call.device)
        with self.lock:
            if (call.key, context) not in self.added:
                entry = entry_of(call, context, self.function)
                self.added[call.key, context] = call, entry
                self.loaded.fusegen_add(ctypes.addressof(entry))


@cache
def library() -> Library:
    """The handler, with the driver's functions. Raises MissingError without a C compiler or a driver that has them, and
    CompileError."""
    loaded = built()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        addresses = [address(getattr(cuda, name)) for name in NEEDS]
    except (OSError, AttributeError) as error:
        raise MissingError(f"NVIDIA's driver is missing here, or too old for fusegen.jax: {error}") from None
    return Library(loaded, addresses, lambda kernel: int(kernel.function), context_of)


def address(function: Any) -> int:
    """Of a function in C."""
    return ctypes.cast(function, c_void_p).value or 0


def context_of(device: Device) -> int:
    """The address of an NVIDIA GPU's context."""
    assert isinstance(device, nvidia.NvidiaDevice)
    return int(device.context)


def built() -> Any:
    """handler.c, loaded from the cache or compiled now. Raises MissingError and CompileError."""
    header = ffi.header()
    command = (*compiler(), *FLAGS)
    text = hashlib.sha256(SOURCE.read_bytes() + header.read_bytes()).hexdigest()
    key = LibraryKey("xla_handler", ABI, text, shlex.join(command))
    whole = [*command, f"-I{header.parents[3]}", str(SOURCE)]
    return kept(key, lambda: whole, ".so", lambda path: ctypes.CDLL(str(path)))


# ---------------------------------------------------------------- the table


def entry_of(call: Call, context: int, function: Callable[[Any], int]) -> Entry:
    """The call as handler.c has it. ctypes keeps what its pointers point to."""
    if call.arrays > MOST_ARRAYS:
        raise KernelError(f"{call.name} has {call.arrays} arrays, and the handler of fusegen.jax takes {MOST_ARRAYS}")
    launches = [launch_of(call, one, function) for one in call.launches]
    return Entry(
        call.key.encode(), call.name.encode(), context, call.operands, call.arrays, len(launches),
        (Launch * max(1, len(launches)))(*launches), None,
    )  # fmt: skip


def launch_of(call: Call, step: StepLaunch, function: Callable[[Any], int]) -> Launch:
    plan, launch = step.record.plan, step.record.launch
    arguments = arguments_of(call, step, plan)
    maps = [map_of(step, given) for given in launch.maps]
    if len(arguments) > MOST_ARGUMENTS or len(maps) > MOST_MAPS:
        raise KernelError(
            f"{plan.name} takes {len(arguments)} arguments and {len(maps)} tensor maps, and the handler of fusegen.jax "
            f"{MOST_ARGUMENTS} and {MOST_MAPS}"
        )
    return Launch(
        function(step.record.loaded), (c_uint32 * 2)(*plan.grid(launch.blocks)), plan.threads, plan.shared_bytes,
        len(arguments), len(maps), (Argument * max(1, len(arguments)))(*arguments), (Map * max(1, len(maps)))(*maps),
    )  # fmt: skip


def arguments_of(call: Call, step: StepLaunch, plan: Launched) -> list[Argument]:
    """In the order of the kernel's parameters."""
    pointers = iter(step.pointers)
    own = dict(zip([p.tensor for p in plan.params if p.kind in ("pointer", "map")], step.pointers, strict=True))
    values = iter([call.values[place] for place in step.values])
    numbers = iter(step.record.launch.numbers)
    maps = iter(range(len(step.record.launch.maps)))

    def argument(param: Param) -> Argument:
        if param.kind in ("pointer", "address"):
            place = next(pointers) if param.kind == "pointer" else own[param.tensor]
            return Argument(ADDRESS, place.base, place.offset)
        if param.kind == "map":
            next(pointers)  # which the map has
            return Argument(MAP, next(maps), 0)
        if param.kind == "value":
            return Argument(NUMBER, 0, slot_of(param.dtype or f32, next(values)))
        return Argument(NUMBER, 0, next(numbers))

    return [argument(param) for param in plan.params]


def slot_of(dtype: DType, value: float) -> int:
    """A run-time scalar as an argument's 8 bytes."""
    packed = struct.pack("<f4x", value) if dtype is f32 else struct.pack("<i4x", value)
    return int.from_bytes(packed, "little")


def map_of(step: StepLaunch, given: Mapped) -> Map:
    place = step.pointers[given.pointer]
    rank, shape, strides, box, steps = given.at(GRAIN).driver_arguments()  # of any address
    return Map(
        place.base, nvidia.MAP_TYPES[given.dtype], nvidia.MAP_PROMOTION, nvidia.MAP_SWIZZLES[given.swizzle],
        place.offset, rank, (c_uint32 * MOST_AXES)(*box), (c_uint32 * MOST_AXES)(*steps),
        (c_uint64 * MOST_AXES)(*shape), (c_uint64 * (MOST_AXES - 1))(*strides),
    )  # fmt: skip
