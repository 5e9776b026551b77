"""What the compilers are told beside a text and where its headers lie: known without them, as every cache key needs it.

Headers come with their compiler, to wherever that is, so that its version says which they are; to look for their
folder would take as long as compiling.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from fusegen.targets import Target

FOR_CUBIN = "--ptxas-options=-v"  # ptxas's account of resources
APPENDED = ("HIPRTC_COMPILE_OPTIONS_APPEND", "HIPRTC_LINK_OPTIONS_APPEND")  # hiprtc reads them by itself


def for_nvrtc(target: Target, compiler: str) -> tuple[str, ...]:
    """For PTX; a cubin's have FOR_CUBIN too."""
    # where there is a driver, NVRTC 13 keeps what it compiled in ~/.nv/ComputeCache, and a hit comes without a log
    caches = () if compiler.startswith("nvrtc 12") else ("--no-cache",)
    return f"-arch={target.arch}", "--std=c++17", *caches


def for_hiprtc(target: Target) -> tuple[str, ...]:
    return f"--offload-arch={target.arch}", "-O3", "-std=c++17"


def appended() -> tuple[str, ...]:
    """What the environment tells hiprtc."""
    return tuple(f"{name}={os.environ[name]}" for name in APPENDED if os.environ.get(name))


VENDORS: Mapping[str, Callable[[Target, str], tuple[str, ...]]] = {
    "cuda": lambda target, compiler: (*for_nvrtc(target, compiler), FOR_CUBIN),
    "hip": lambda target, compiler: (*for_hiprtc(target), *appended()),
}


def compile_options(target: Target, compiler: str) -> tuple[str, ...]:
    """What `compiler`, a name and a version, is told for machine code, and what its environment tells it."""
    return VENDORS[target.vendor](target, compiler)
