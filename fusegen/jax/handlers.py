"""Which handler XLA calls on which platform."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

from fusegen.jax import emulated, ffi

LOCK = threading.Lock()


def registered(platform: str) -> Any:
    """What makes a call known to the handler of a platform, "cpu" or "cuda", which XLA is told of first. Raises
    MissingError, and CompileError of the handler in C."""
    with LOCK:  # XLA takes one handler under a name
        return told(platform)


@cache
def told(platform: str) -> Any:
    jax = ffi.need_jax()
    ffi.interface()
    if platform == "cuda":
        from fusegen.jax import native

        library = native.library()
        jax.ffi.register_ffi_target(ffi.TARGET, jax.ffi.pycapsule(library.handler), platform="CUDA")
        return library.add
    address = ctypes.cast(emulated.emulate, ctypes.c_void_p).value
    jax.ffi.register_ffi_target(ffi.TARGET, jax.ffi.pycapsule(address), platform="cpu")
    return emulated.add
