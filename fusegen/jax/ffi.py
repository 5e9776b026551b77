"""XLA's foreign calls: jaxlib's header, and its structures as ctypes has them.

XLA calls a handler with a `CallFrame`: the addresses of operands and results, and attributes, of which ours is the key
of a call. The header, xla/ffi/api/c_api.h, promises that what is there keeps its place while the major version is 0;
newer versions add at the ends.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_void_p
from importlib import import_module
from pathlib import Path
from typing import Any

from fusegen.errors import MissingError

TARGET = "fusegen"  # the name that handlers are registered under
ATTRIBUTE = "call"
STRING = 4  # XLA_FFI_AttrType_STRING
INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL


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


# ---------------------------------------------------------------- structures


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


Handler = ctypes.CFUNCTYPE(c_void_p, POINTER(CallFrame))
