"""Which handler XLA calls on which platform."""

from __future__ import annotations

import atexit
import threading
import time
from functools import cache
from typing import Any

from fusegen.jax import emulated, ffi, native

LOCK = threading.Lock()
WAIT_S = 1e-3


def registered(platform: str) -> Any:
    """What makes a call known to the handler of a platform, "cpu" or "cuda", which XLA is told of first. Raises
    MissingError, and CompileError of the handlers in C."""
    with LOCK:  # XLA takes one handler under a name
        return told(platform)


@cache
def told(platform: str) -> Any:
    jax = ffi.need_jax()
    if platform == "cuda":
        library = native.library()
        jax.ffi.register_ffi_target(ffi.TARGET, jax.ffi.pycapsule(library.handler), platform="CUDA")
        return library.add
    loaded = native.built()
    loaded.fusegen_python(emulated.emulate)
    atexit.register(closed, loaded)  # called before what jax, imported earlier, does then
    jax.ffi.register_ffi_target(ffi.TARGET, jax.ffi.pycapsule(native.address(loaded.fusegen_emulate)), platform="cpu")
    return emulated.add


def closed(loaded: Any) -> None:
    """Let no thread of XLA's into Python any more, and wait for those that are in it."""
    while loaded.fusegen_close():
        time.sleep(WAIT_S)
