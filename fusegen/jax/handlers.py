"""Which handler XLA calls on which platform."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from fusegen.jax import emulated, ffi


@cache
def registered(platform: str) -> Any:
    """Tell XLA the handler of a platform, "cpu" or "cuda", once; gives what a call is `added` by there. Raises
    MissingError."""
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
