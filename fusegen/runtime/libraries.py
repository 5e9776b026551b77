"""What a kernel asks of an array library: a fresh result in the caller's own type, and the caller's current stream.

One row of LIBRARIES each. A library that is not in the table may hand arrays in (CAI, DLPack) and take results through
`out=`; without `out=` its CPU results are numpy arrays.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from fusegen.errors import ArgumentError
from fusegen.language.types import DType
from fusegen.runtime.arrays import CPU, Place, contiguous_strides, library_of, place_text, view

Stream = int
"""A stream's address, as the driver takes it; 0 is the default stream."""

DEFAULT_STREAMS = frozenset({0, 1})  # 1 is CUDA's explicit name for its legacy default stream

Maker = Callable[[Sequence[Any], Stream | None], Any]
"""Makes one fresh output, given a call's arrays and the stream that will fill it (None: the current one)."""


@dataclass(frozen=True, slots=True)
class Library:
    """One array library.

    `maker(shape, dtype, place, like)`: makes outputs; `like` is the position of an input that a fresh output equals in
    all three, if there is one. `stream(place)`: a function that says the caller's current stream. `address`: of an
    output it made. `waits`: the library does not order its reads after our stream, so a call waits for its kernel.
    `contiguous` and `cast` are advice for error messages.
    """

    name: str
    maker: Callable[[tuple[int, ...], DType, Place, int | None], Maker]
    stream: Callable[[Place], Callable[[], Stream]]
    address: Callable[[Any], int]
    waits: bool = False
    contiguous: str = "a contiguous copy of {name}"
    cast: str = "{name}.astype('{dtype.numpy.name}')"


def view_address(array: Any) -> int:
    return view(array).address


def default_stream(place: Place) -> Callable[[], Stream]:
    return lambda: 0


def numpy_maker(shape: tuple[int, ...], dtype: DType, place: Place, like: int | None) -> Maker:
    return lambda arrays, stream: np.empty(shape, dtype.numpy)


def torch_dtype(dtype: DType) -> Any:
    return getattr(sys.modules["torch"], dtype.numpy.name)  # torch has numpy's names


def torch_device(place: Place) -> Any:
    torch = sys.modules["torch"]
    return torch.device("cpu") if place == CPU else torch.device("cuda", place[1])  # ROCm's torch says cuda too


def torch_maker(shape: tuple[int, ...], dtype: DType, place: Place, like: int | None) -> Maker:
    torch, device = sys.modules["torch"], torch_device(place)
    strides, kind = contiguous_strides(shape), torch_dtype(dtype)
    empty_like, empty_strided = torch.empty_like, torch.empty_strided  # both cost about half of torch.empty

    def make(arrays: Sequence[Any], stream: Stream | None) -> Any:
        if stream is None or place == CPU:
            if like is not None:
                return empty_like(arrays[like])
            return empty_strided(shape, strides, dtype=kind, device=device)
        # the caching allocator reuses a block on the stream it was allocated for, so allocate for the one that fills it
        default = stream in DEFAULT_STREAMS  # of address 0, ExternalStream would make a new stream
        filling = torch.cuda.default_stream(device) if default else torch.cuda.ExternalStream(stream, device)
        with torch.cuda.stream(filling):
            return torch.empty(shape, dtype=kind, device=device)

    return make


def torch_empty(place: Place) -> Callable[[tuple[int, ...], tuple[int, ...], Any], Any]:
    """empty(shape, strides, dtype) on torch's current device, which `place` must be, for the current stream.

    What Inductor's code calls: half of what torch.empty_strided costs.
    """
    from torch._C._dynamo import guards

    quick = getattr(guards, "_empty_strided_cpu" if place == CPU else "_empty_strided_cuda", None)
    if quick is not None:
        found: Callable[[tuple[int, ...], tuple[int, ...], Any], Any] = quick
        return found
    empty_strided, device = sys.modules["torch"].empty_strided, torch_device(place)
    return lambda shape, strides, dtype: empty_strided(shape, strides, dtype=dtype, device=device)


def torch_current_device() -> Callable[[], int]:
    torch = sys.modules["torch"]
    found: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
    return found


def several_gpus(place: Place) -> bool:
    """Is it on one of several GPUs that torch sees?"""
    torch = sys.modules.get("torch")
    return place != CPU and torch is not None and torch.cuda.device_count() > 1


def is_current(place: Place) -> bool:
    """Is it where torch launches unless told otherwise? True where there is no other GPU, and without torch."""
    return not several_gpus(place) or torch_current_device()() == place[1]


def torch_current_stream(place: Place) -> Callable[[int], Stream]:
    """current_stream(ordinal): the address of torch's current stream on that GPU; 0 for the CPU."""
    if place == CPU:
        return lambda ordinal: 0
    torch = sys.modules["torch"]
    # what Inductor's and Triton's launchers call: ten times cheaper than making a torch.cuda.Stream object
    if (raw := getattr(torch._C, "_cuda_getCurrentRawStream", None)) is not None:
        found: Callable[[int], Stream] = raw
        return found
    return lambda ordinal: int(torch.cuda.current_stream(ordinal).cuda_stream)


@cache
def torch_stream_of(place: Place) -> int:
    """Where the function in C is that writes the current stream (`int status(int32_t ordinal, void **stream)`), of
    what torch has for compiled models; 0 where there is none. In ns: 26, and 73 to 100 by way of Python.
    """
    library = Path(sys.modules["torch"].__path__[0], "lib", "libtorch_cuda.so")  # one in use: it is not loaded twice
    if place == CPU or not library.exists():
        return 0
    found = getattr(ctypes.CDLL(str(library)), "aoti_torch_get_current_cuda_stream", None)
    return ctypes.cast(found, ctypes.c_void_p).value or 0 if found else 0


def torch_stream(place: Place) -> Callable[[], Stream]:
    return partial(torch_current_stream(place), place[1])


def torch_address(tensor: Any) -> int:
    return int(tensor.data_ptr())


@dataclass(frozen=True, slots=True)
class StreamAddress:
    """A stream by its address, as the CUDA stream protocol has it: (version, address)."""

    address: Stream

    def __cuda_stream__(self) -> tuple[int, Stream]:
        return 0, self.address


def cupy_stream_at(stream: Stream) -> Any:
    """CuPy's object for somebody's stream; CuPy 14 took the protocol, and warns of what earlier ones have."""
    cuda = sys.modules["cupy"].cuda
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(StreamAddress(stream))
    return cuda.ExternalStream(stream)


def cupy_maker(shape: tuple[int, ...], dtype: DType, place: Place, like: int | None) -> Maker:
    cupy = sys.modules["cupy"]

    def make(arrays: Sequence[Any], stream: Stream | None) -> Any:
        with cupy.cuda.Device(place[1]):
            if stream is None:
                return cupy.empty(shape, dtype.numpy)
            default = stream in DEFAULT_STREAMS
            with cupy.cuda.Stream.null if default else cupy_stream_at(stream):  # its pool is per stream too
                return cupy.empty(shape, dtype.numpy)

    return make


def cupy_stream(place: Place) -> Callable[[], Stream]:
    current = sys.modules["cupy"].cuda.get_current_stream
    return lambda: int(current().ptr)


def cupy_address(array: Any) -> int:
    return int(array.data.ptr)


def jax_maker(shape: tuple[int, ...], dtype: DType, place: Place, like: int | None) -> Maker:
    """Fresh, finished JAX arrays that nobody else has seen, which is why a kernel may fill them once."""
    jax = sys.modules["jax"]
    devices = jax.devices("cpu" if place == CPU else "gpu")
    device = next((d for d in devices if place == CPU or d.local_hardware_id == place[1]), devices[0])
    return lambda arrays, stream: jax.numpy.zeros(shape, dtype.numpy, device=device).block_until_ready()


LIBRARIES: Mapping[str, Library] = {
    row.name: row
    for row in (
        Library("numpy", numpy_maker, default_stream, view_address, contiguous="np.ascontiguousarray({name})"),
        Library("torch", torch_maker, torch_stream, torch_address, contiguous="{name}.contiguous()",
                cast="{name}.to(torch.{dtype.numpy.name})"),
        Library("cupy", cupy_maker, cupy_stream, cupy_address, contiguous="cupy.ascontiguousarray({name})"),
        Library("jax", jax_maker, default_stream, view_address, waits=True),
    )
}  # fmt: skip


def library(name: str, place: Place) -> Library:
    """The library of that name. Raises ArgumentError for one whose GPU results fusegen can't allocate."""
    if found := LIBRARIES.get(name):
        return found
    if place == CPU:
        return LIBRARIES["numpy"]
    raise ArgumentError(
        f"fusegen doesn't know how to make a result for {name} on {place_text(place)}\n"
        f"  pass out=, or arrays of {', '.join(LIBRARIES)}"
    )


def advice(name: str, library_name: str, kind: str, dtype: DType | None = None) -> str:
    """The library's own words for a contiguous copy ("contiguous") or a conversion ("cast") of the operand `name`."""
    row = LIBRARIES.get(library_name, LIBRARIES["numpy"])
    return str(getattr(row, kind)).format(name=name, dtype=dtype)


def stream_address(stream: object) -> Stream:
    """A stream in any library's type as its address.

    Takes an integer, anything with `__cuda_stream__` (cuda.core, CuPy, torch), and torch, CuPy and hip-python streams.
    Raises ArgumentError for anything else.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr"):
        if isinstance(address := getattr(stream, attribute, None), int):
            return address
    if hasattr(stream, "__int__") and not isinstance(stream, (bool, float)):  # cuda.bindings and hip-python handles
        return int(stream)
    raise ArgumentError(
        f"stream={stream!r} is no stream; pass a torch, CuPy or cuda.core stream, or its address as an integer"
    )


def producer_stream(array: object, place: Place) -> Stream | None:
    """The stream that may still be filling `array`, where its library says so; None where there is nothing to wait for.

    DLPack is not asked: its export itself makes the consumer's stream wait.
    """
    row = LIBRARIES.get(library_of(array))
    if row is not None and row.stream is not default_stream:
        return row.stream(place)()
    interface = getattr(array, "__cuda_array_interface__", None)
    if row is None and interface is not None and interface.get("stream") is not None:
        return int(interface["stream"])
    return None
