"""Handlers of XLA's foreign calls: the emulator's in Python, and what both handlers are told.

XLA calls a handler with a `CallFrame`: the addresses of operands and results, and attributes, of which ours is the key
of a call. Its C header, xla/ffi/api/c_api.h, comes with jaxlib and promises that what is there keeps its place while
the major version is 0; newer versions add at the ends.

The emulator's handler is Python because the emulator is: what it says of a fault, it finds in Python. A call takes the
lock of the interpreter for microseconds before and after the kernel. On NVIDIA GPUs the handler is C
(`fusegen.jax.native`).
"""

from __future__ import annotations

import ctypes
import re
import threading
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from fusegen.errors import FusegenError, KernelError, MissingError
from fusegen.jax.calls import Call
from fusegen.runtime.called import WIDEST

TARGET = "fusegen"  # the name that both handlers are registered under
ATTRIBUTE = "call"
METADATA = 1  # XLA_FFI_Extension_Metadata
STRING = 4  # XLA_FFI_AttrType_STRING
INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
MAJOR = 0  # XLA_FFI_API_MAJOR


class Extension(Structure):
    """XLA_FFI_Extension_Base."""


Extension._fields_ = (("struct_size", c_size_t), ("type", c_int), ("next", POINTER(Extension)))

HEAD = (("struct_size", c_size_t), ("extension", POINTER(Extension)))


class Version(Structure):
    """XLA_FFI_Api_Version."""

    _fields_ = (*HEAD, ("major", c_int), ("minor", c_int))


class NewError(Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = (*HEAD, ("message", c_char_p), ("code", c_int))


ErrorCreate = ctypes.CFUNCTYPE(c_void_p, POINTER(NewError))


class Api(Structure):
    """XLA_FFI_Api, as far as it is used."""

    _fields_ = (*HEAD, ("version", Version), ("internal", c_void_p), ("error_create", ErrorCreate),
                ("error_get_message", c_void_p), ("error_destroy", c_void_p), ("handler_register", c_void_p),
                ("stream_get", c_void_p))  # fmt: skip


class Buffer(Structure):
    """XLA_FFI_Buffer."""

    _fields_ = (*HEAD, ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64)))


class Text(Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = (("pointer", c_void_p), ("size", c_size_t))


class Arrays(Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (*HEAD, ("size", c_int64), ("types", POINTER(c_int)), ("buffers", POINTER(POINTER(Buffer))))


class Attributes(Structure):
    """XLA_FFI_Attrs."""

    _fields_ = (*HEAD, ("size", c_int64), ("types", POINTER(c_int)), ("names", POINTER(POINTER(Text))),
                ("values", POINTER(c_void_p)))  # fmt: skip


class CallFrame(Structure):
    """XLA_FFI_CallFrame."""

    _fields_ = (*HEAD, ("api", POINTER(Api)), ("context", c_void_p), ("stage", c_int), ("operands", Arrays),
                ("results", Arrays), ("attributes", Attributes), ("future", c_void_p))  # fmt: skip


class Metadata(Structure):
    """XLA_FFI_Metadata, as far as every version has it."""

    _fields_ = (("struct_size", c_size_t), ("version", Version), ("traits", c_uint32))


class MetadataExtension(Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = (("base", Extension), ("metadata", POINTER(Metadata)))


Handler = ctypes.CFUNCTYPE(c_void_p, POINTER(CallFrame))

CALLS: dict[str, Call] = {}  # the emulator's: what XLA compiled may run as long as the process does
LOCK = threading.Lock()


def emulated(frame: Any) -> int | None:
    """XLA's call on the CPU: the address of an error, or None."""
    given = frame.contents
    try:
        if given.extension and given.extension.contents.type == METADATA:
            tell(given)
        else:
            found = CALLS.get(key := key_in(given))
            if found is None:
                raise KernelError(unknown(key))
            found.run(addresses(given, found), 0)
    except FusegenError as error:
        return failure(given, str(error))
    except Exception as error:  # an exception would end here unseen, and XLA go on with arrays that nobody wrote
        return failure(given, f"{type(error).__name__}: {error}")
    return None


emulate = Handler(emulated)


def tell(frame: Any) -> None:
    """Answer XLA's question for which version of its interface this handler is: that of jaxlib's header."""
    extension = ctypes.cast(frame.extension, POINTER(MetadataExtension)).contents
    told = extension.metadata.contents
    (told.version.major, told.version.minor), told.traits = interface(), 0


def key_in(frame: Any) -> str:
    """The key of the call that is to be made."""
    attributes = frame.attributes
    for place in range(attributes.size):
        name = attributes.names[place].contents
        if ctypes.string_at(name.pointer, name.size) == ATTRIBUTE.encode() and attributes.types[place] == STRING:
            text = ctypes.cast(attributes.values[place], POINTER(Text)).contents
            return ctypes.string_at(text.pointer, text.size).decode()
    raise KernelError(f"a custom call to {TARGET} has no attribute {ATTRIBUTE!r}: it was made by another version")


def unknown(key: str) -> str:
    return (
        f"this process knows no call {key}: the program was compiled in another one\n"
        "  trace and compile it here; kernels come from fusegen's cache"
    )


def addresses(frame: Any, call: Call) -> list[int]:
    """Of the call's arrays, workspace last. Raises KernelError where they are none that the call was made for."""
    arrays = (frame.operands, frame.results)
    found = [a.buffers[place].contents.data or 0 for a in arrays for place in range(a.size)]
    if frame.operands.size != call.operands or len(found) != call.arrays:
        raise KernelError(f"{call.name} takes {call.operands} operands and {call.arrays} arrays, and XLA has others")
    if wrong := [hex(address) for address in found if address % WIDEST]:
        raise KernelError(f"{call.name}: XLA passes an array at {wrong[0]}, which is no multiple of {WIDEST} bytes")
    return found


def failure(frame: Any, text: str) -> int | None:
    """An error of XLA's own, by its address."""
    asked = NewError(ctypes.sizeof(NewError), None, text.encode(), INTERNAL)
    made: int | None = frame.api.contents.error_create(ctypes.byref(asked))
    return made


# ---------------------------------------------------------------- registering


def need_jax() -> Any:
    """jax. Raises MissingError."""
    try:
        return import_module("jax")
    except ImportError as error:
        raise MissingError(
            f"fusegen.jax needs jax, which can't be imported: {error}\n  to get it: pip install 'fusegen[jax]'"
        ) from None


def header() -> Path:
    """jaxlib's c_api.h. Raises MissingError."""
    found = Path(need_jax().ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if not found.exists():
        raise MissingError(f"jaxlib is without its header {found}\n  to get it: pip install --force-reinstall jaxlib")
    return found


@cache
def interface() -> tuple[int, int]:
    """The version of XLA's interface. Raises MissingError for one that may have what is read here in other places."""
    text = header().read_text(encoding="utf-8")
    major, minor = (int(re.findall(rf"define XLA_FFI_API_{name} (\d+)", text)[0]) for name in ("MAJOR", "MINOR"))
    if major != MAJOR:
        raise MissingError(
            f"this jaxlib calls by version {major}.{minor} of XLA's interface, and fusegen.jax knows {MAJOR}.x\n"
            "  install an earlier jax, or a later fusegen"
        )
    return major, minor


@cache
def registered(platform: str) -> Any:
    """Tell XLA the handler of a platform, "cpu" or "cuda", once; gives what a call is `added` by there. Raises
    MissingError."""
    jax = need_jax()
    interface()
    if platform == "cuda":
        from fusegen.jax import native

        library = native.library()
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.handler), platform="CUDA")
        return library.add
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(ctypes.cast(emulate, c_void_p).value), platform="cpu")
    return add


def add(call: Call) -> None:
    with LOCK:
        CALLS.setdefault(call.key, call)
