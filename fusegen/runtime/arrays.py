"""Any library's array as one plain value: address, dtype, shape, strides, place.

`view(array)` reads torch tensors and numpy arrays by their attributes, other arrays through `__cuda_array_interface__`
or DLPack, and copies nothing. DLPack is read with ctypes: its two C structs are a frozen ABI, while each library's
own reader accepts a different subset of dtypes and devices (numpy's knows neither GPUs nor bfloat16).

No array library but numpy is imported here: an array's own module is already loaded when the array exists.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusegen.errors import ArgumentError
from fusegen.language.types import (
    DTYPES,
    DType,
    b8,
    bf16,
    f8e4m3,
    f8e4m3fnuz,
    f8e5m2,
    f8e5m2fnuz,
    f8e8m0,
    f16,
    f32,
    i8,
    i32,
    i64,
    u8,
    u32,
)  # fmt: skip

Place = tuple[str, int]
"""Where memory is: ("cpu", 0), ("cuda", ordinal) or ("hip", ordinal)."""

CPU: Place = ("cpu", 0)


def place_text(place: Place) -> str:
    """`cuda:0`, or `the CPU`."""
    return "the CPU" if place[0] == "cpu" else f"{place[0]}:{place[1]}"


@dataclass(frozen=True, slots=True)
class ArrayView:
    """An array in memory. `strides` count elements; `owner` keeps the memory alive while the view lives."""

    address: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: Place = CPU
    writable: bool = True
    library: str = "fusegen"
    owner: object = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def span(self) -> tuple[int, int]:
        """The lowest byte address that belongs to the array, and one past the highest; equal when it is empty."""
        if self.size == 0:
            return self.address, self.address
        reach = [(n - 1) * stride * self.dtype.bytes for n, stride in zip(self.shape, self.strides, strict=True)]
        low = self.address + sum(r for r in reach if r < 0)
        return low, self.address + sum(r for r in reach if r > 0) + self.dtype.bytes

    def numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The same memory as a numpy array. Only for memory on the CPU."""
        if self.device != CPU:
            raise ArgumentError(f"numpy can't read memory on {place_text(self.device)}; copy it to the CPU first")
        if self.size == 0:
            return np.empty(self.shape, self.dtype.numpy)
        low, high = self.span
        memory: Any = (ctypes.c_byte * (high - low)).from_address(low)
        memory.owner = self.owner  # numpy holds `memory`, and so the owner
        strides = tuple(stride * self.dtype.bytes for stride in self.strides)
        array: np.ndarray[Any, np.dtype[Any]] = np.ndarray(
            self.shape, self.dtype.numpy, memory, self.address - low, strides
        )
        array.flags.writeable = self.writable
        return array


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a fresh array of that shape."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def library_of(array: object) -> str:
    """The name of the library that `array` belongs to: "torch", "numpy", "cupy", "jax", or its module's first name."""
    if isinstance(array, ArrayView):
        return array.library
    if isinstance(array, np.ndarray):
        return "numpy"
    for base in type(array).__mro__:  # a user's own subclass of a tensor is still a tensor
        name = base.__module__.partition(".")[0]
        if name in LIBRARY_NAMES:
            return LIBRARY_NAMES[name]
    return type(array).__module__.partition(".")[0]


LIBRARY_NAMES: Mapping[str, str] = {"torch": "torch", "numpy": "numpy", "cupy": "cupy", "jax": "jax", "jaxlib": "jax"}


def view(array: object, name: str = "the array", *, stream: int | None = None) -> ArrayView:
    """`array` as an ArrayView.

    `stream` is the GPU stream that will use the memory: producers that say which stream fills their memory are asked
    to make it wait. Raises ArgumentError, naming the operand `name`, for what is no array, for a dtype that no operand
    of a chain can have, and for memory that a kernel can't address by element.
    """
    if isinstance(array, ArrayView):
        return array
    if isinstance(array, np.ndarray):
        return numpy_view(array, name)
    if library_of(array) == "torch":
        return torch_view(array, name)
    if library_of(array) != "jax" and hasattr(array, "__cuda_array_interface__"):
        return cuda_interface_view(array, name)
    if hasattr(array, "__dlpack__"):
        return dlpack_view(array, name, stream)
    if hasattr(array, "__array_interface__"):
        return numpy_view(np.asarray(array), name)
    raise ArgumentError(
        f"{name} is {a_thing(type(array).__name__)}, and a kernel takes arrays\n"
        "  pass a torch tensor, a numpy, CuPy or JAX array, or anything that has __dlpack__"
    )


def a_thing(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"


def wrong_dtype(name: str, found: object) -> ArgumentError:
    return ArgumentError(
        f"{name} holds {found}, which no operand of a chain can\n"
        f"  operands are {', '.join(f'{d.name} ({d.numpy.name})' for d in DTYPES.values())}; convert the array first"
    )


NUMPY_DTYPES: Mapping[np.dtype[Any], DType] = {d.numpy: d for d in DTYPES.values()}


def element_strides(name: str, strides: Iterable[int], bytes_each: int) -> tuple[int, ...]:
    """Byte strides as element strides. Raises ArgumentError where they don't divide (a field of a record array)."""
    found = tuple(strides)
    if any(stride % bytes_each for stride in found):
        raise ArgumentError(
            f"{name} has strides of {found} bytes, which are not whole elements of {bytes_each} bytes\n"
            "  copy it into an array of its own first"
        )
    return tuple(stride // bytes_each for stride in found)


def check_address(name: str, address: int, dtype: DType) -> None:
    if address % dtype.bytes:
        raise ArgumentError(
            f"{name} starts at address {address:#x}, which is not a multiple of its elements' {dtype.bytes} bytes\n"
            "  a GPU can't read such elements; copy it into an array of its own first"
        )


MASKED = "{} is a masked array; pass its data and the mask as operands of their own"


def numpy_view(array: np.ndarray[Any, np.dtype[Any]], name: str) -> ArrayView:
    if type(array) is not np.ndarray and hasattr(array, "mask"):  # np.ma, which asking by its name would import
        raise ArgumentError(MASKED.format(name))
    dtype = NUMPY_DTYPES.get(array.dtype)
    if dtype is None or not array.dtype.isnative:
        raise wrong_dtype(name, array.dtype if array.dtype.isnative else f"{array.dtype} in foreign byte order")
    address = array.__array_interface__["data"][0]
    check_address(name, address, dtype)
    strides = element_strides(name, array.strides, dtype.bytes)
    return ArrayView(address, dtype, array.shape, strides, CPU, array.flags.writeable, "numpy", array)


TORCH_DTYPES: Mapping[str, DType] = {
    "torch.float16": f16,
    "torch.bfloat16": bf16,
    "torch.float32": f32,
    "torch.int32": i32,
    "torch.int64": i64,
    "torch.bool": b8,
    "torch.int8": i8,
    "torch.uint8": u8,
    "torch.uint32": u32,
    "torch.float8_e4m3fn": f8e4m3,
    "torch.float8_e5m2": f8e5m2,
    "torch.float8_e4m3fnuz": f8e4m3fnuz,
    "torch.float8_e5m2fnuz": f8e5m2fnuz,
    "torch.float8_e8m0fnu": f8e8m0,
    "torch.float4_e2m1fn_x2": u8,  # two to a byte, as chains have them
}


def torch_place(kind: str, index: int | None) -> Place:
    """A torch device as a Place; a ROCm build of torch calls AMD's GPUs "cuda"."""
    if kind == "cuda":
        return ("hip" if sys.modules["torch"].version.hip else "cuda"), index or 0
    return kind, 0


def torch_view(tensor: Any, name: str) -> ArrayView:
    dtype = TORCH_DTYPES.get(str(tensor.dtype))
    if dtype is None:
        raise wrong_dtype(name, tensor.dtype)
    place = torch_place(tensor.device.type, tensor.device.index)
    if place[0] not in ("cpu", "cuda", "hip"):
        raise ArgumentError(f"{name} is on torch device {tensor.device}; move it to a GPU or the CPU first")
    if tensor.is_nested:
        raise ArgumentError(
            f"{name} is a nested tensor; a kernel takes rows of one length, so pass .to_padded_tensor(0)"
        )
    if str(tensor.layout) != "torch.strided":
        raise ArgumentError(f"{name} has layout {tensor.layout}; a kernel takes dense tensors, so pass .to_dense()")
    if tensor.is_neg() or tensor.is_conj():
        raise ArgumentError(f"{name} is a lazily negated view; pass {name}.resolve_neg()")
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ArgumentError(
            f"{name} requires a gradient, and a kernel computes none: what it returns would be detached from {name}\n"
            f"  call it under torch.no_grad() or torch.inference_mode(), or pass {name}.detach()"
        )
    address = tensor.data_ptr()
    check_address(name, address, dtype)
    return ArrayView(address, dtype, tuple(tensor.shape), tuple(tensor.stride()), place, True, "torch", tensor)


def cuda_interface_view(array: Any, name: str) -> ArrayView:
    """An array with `__cuda_array_interface__` (versions 0 to 3)."""
    interface = array.__cuda_array_interface__
    if missing := [field for field in ("shape", "typestr", "data") if field not in interface]:
        raise ArgumentError(f"{name} has a __cuda_array_interface__ without {missing[0]!r}, which it has to have")
    if interface.get("mask") is not None:
        raise ArgumentError(MASKED.format(name))
    dtype = NUMPY_DTYPES.get(np.dtype(interface["typestr"]))
    if dtype is None and hasattr(array, "dtype"):  # bfloat16 has no type string of its own
        dtype = NUMPY_DTYPES.get(np.dtype(array.dtype))
    if dtype is None:
        raise wrong_dtype(name, interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    steps = contiguous_strides(shape) if strides is None else element_strides(name, strides, dtype.bytes)
    address, read_only = interface["data"]
    check_address(name, address or 0, dtype)
    ordinal = getattr(getattr(array, "device", None), "id", None)
    place = (gpu_kind(array), ordinal if isinstance(ordinal, int) else pointer_ordinal(address))
    return ArrayView(address or 0, dtype, shape, steps, place, not read_only, library_of(array), array)


def gpu_kind(array: object) -> str:
    """ "hip" for an array of a ROCm build of CuPy, else "cuda"."""
    cupy = sys.modules.get("cupy") if library_of(array) == "cupy" else None
    return "hip" if cupy is not None and getattr(cupy.cuda.runtime, "is_hip", False) else "cuda"


def pointer_ordinal(address: int) -> int:
    """The GPU that an address belongs to, asked of the driver; 0 where it can't say."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return 0
    status, ordinal = driver.cuPointerGetAttribute(
        driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address
    )
    return int(ordinal) if int(status) == 0 else 0


# DLPack's C structs (dlpack.h 1.1). The unversioned form has no flags.


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
DLPACK_MAJOR = 1
DLPACK_PLACES: Mapping[int, str] = {1: "cpu", 2: "cuda", 3: "cpu", 10: "hip", 11: "cpu", 13: "cuda"}
DLPACK_DTYPES: Mapping[tuple[int, int], DType] = {
    (2, 16): f16, (4, 16): bf16, (2, 32): f32, (0, 32): i32, (0, 64): i64, (0, 8): i8, (1, 8): u8, (1, 32): u32,
    (6, 8): b8,
    (10, 8): f8e4m3, (11, 8): f8e4m3fnuz, (12, 8): f8e5m2, (13, 8): f8e5m2fnuz, (14, 8): f8e8m0,
}  # fmt: skip
DLPACK_CODES: Mapping[int, str] = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


# our own: the functions of ctypes.pythonapi, their types included, are everybody's
CAPSULES = ctypes.PyDLL("python", handle=ctypes.pythonapi._handle)
CAPSULES.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)
CAPSULES.PyCapsule_IsValid.restype = ctypes.c_int
CAPSULES.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
CAPSULES.PyCapsule_GetPointer.restype = ctypes.c_void_p


def capsule_pointer(capsule: object, name: bytes) -> int | None:
    """The pointer in a PyCapsule of that name; None when it has another name."""
    if not CAPSULES.PyCapsule_IsValid(capsule, name):
        return None
    pointer = CAPSULES.PyCapsule_GetPointer(capsule, name)
    return int(pointer) if pointer else None


def dlpack_capsule(array: Any, stream: int | None) -> object:
    """Ask for a versioned capsule; a producer older than DLPack 1.0 does not know the argument."""
    kind = int(array.__dlpack_device__()[0])
    options: dict[str, object] = {}
    if DLPACK_PLACES.get(kind) == "cuda":
        options["stream"] = stream or 1  # DLPack names CUDA's default stream 1; 0 is not allowed
    elif DLPACK_PLACES.get(kind) == "hip":
        options["stream"] = stream or 0
    try:
        return array.__dlpack__(max_version=(DLPACK_MAJOR, 1), **options)
    except TypeError:
        return array.__dlpack__(**options)


def dlpack_view(array: Any, name: str, stream: int | None) -> ArrayView:
    """An array through DLPack. The capsule is read, not consumed: it is the owner, whose end ends the export."""
    try:
        capsule = dlpack_capsule(array, stream)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:  # producers don't agree on one
        raise ArgumentError(f"{name} can't be exported through DLPack: {error}") from error
    flags = 0
    if pointer := capsule_pointer(capsule, b"dltensor_versioned"):
        managed = DLManagedTensorVersioned.from_address(pointer)
        if managed.major != DLPACK_MAJOR:
            version = f"{managed.major}.{managed.minor}"
            raise ArgumentError(f"{name} exports DLPack {version}, and fusegen reads version {DLPACK_MAJOR}")
        tensor, flags = managed.tensor, managed.flags
    elif pointer := capsule_pointer(capsule, b"dltensor"):
        tensor = DLTensor.from_address(pointer)
    else:
        raise ArgumentError(f"{name} has a __dlpack__ that returned {capsule!r}, which is no DLPack capsule")
    dtype = DLPACK_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise wrong_dtype(name, f"{DLPACK_CODES.get(tensor.code, f'type {tensor.code} of')}{tensor.bits}")
    kind = DLPACK_PLACES.get(tensor.device_type)
    if kind is None:
        raise ArgumentError(f"{name} is on DLPack device type {tensor.device_type}; move it to a GPU or the CPU first")
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.ndim and tensor.strides else contiguous_strides(shape)
    address = (tensor.data or 0) + tensor.byte_offset
    check_address(name, address, dtype)
    library = library_of(array)
    writable = not flags & READ_ONLY and library != "jax"  # JAX arrays are immutable whatever the flag says
    place = CPU if kind == "cpu" else (kind, int(tensor.device_id))
    return ArrayView(address, dtype, shape, strides, place, writable, library, (array, capsule))
