"""Source to binary: `compile_source(text, entry, target, ...)` by NVRTC or hiprtc; neither needs a GPU.

The vendors' compilers are libraries that this process calls (`fusegen.compiling.nvrtc`, `.hiprtc`); a `Binary` holds
what they made and what it needs of a GPU, read from the compiler's own accounts (`.resources`). Nothing is cached here:
`fusegen.runtime` does that, with `compile_options` and the compiler's version in its keys.

Several sources compile faster in threads with NVRTC, which is reentrant and is called without Python's lock. hiprtc
takes a lock of its own, and hip-python 7 keeps Python's during a call, so HIP sources need processes for that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from fusegen.compiling.options import compile_options
from fusegen.compiling.resources import Occupancy, Resources
from fusegen.errors import RequestError
from fusegen.targets import NAMES, Target

__all__ = [
    "Binary",
    "Occupancy",
    "Resources",
    "compile_options",
    "compile_source",
    "compiler_version",
    "disassemble",
    "ptx",
]

VENDORS: Mapping[str, str] = {"cuda": "nvrtc", "hip": "hiprtc"}


def compiler_of(vendor: str) -> Any:
    """The module that calls that vendor's compiler, imported when something is compiled."""
    return import_module(f"fusegen.compiling.{VENDORS[vendor]}")


@dataclass(frozen=True, slots=True)
class Binary:
    """One compiled kernel: `code` is a cubin or an AMD code object, for `target.arch` only."""

    target: Target
    entry: str  # the kernel's name in `code`
    threads: int  # per block, as planned
    code: bytes = field(repr=False)
    log: str = field(repr=False)  # what the compiler said; ptxas's account of resources is part of it
    compiler: str  # "nvrtc 13.5", "hiprtc 7.2.53211"
    seconds: float
    resources: Resources

    @property
    def occupancy(self) -> Occupancy:
        """How much of an SM the kernel fills, in theory."""
        return self.resources.occupancy(self.target, self.threads)


def compile_source(
    text: str, entry: str, target: Target, *, filename: str, threads: int, dynamic_shared: int = 0, origin: str = ""
) -> Binary:
    """Compile `text` for `target.arch`; `entry` is its `extern "C"` kernel.

    `filename` is what the compiler calls the source in its messages and debug information, `threads` and
    `dynamic_shared` (bytes) are the launch that was planned, and `origin` says in an error what emitted the text.
    Raises CompileError when the compiler refuses the text, MissingError when there is no compiler, and RequestError
    for an architecture that no target has (some versions of hiprtc abort the process when given one).
    """
    if target.arch not in {known.arch for known in NAMES.values() if known.vendor == target.vendor}:
        raise RequestError(f"{target.name}: {target.arch} is the architecture of no target; see fusegen.targets.target")
    vendor = compiler_of(target.vendor)
    compiler = compiler_version(target.vendor)
    start = time.perf_counter()
    code, log = vendor.compile_text(text, target, filename=filename, origin=origin, compiler=compiler)
    seconds = time.perf_counter() - start
    resources = vendor.read_resources(code, log, entry, dynamic_shared)
    return Binary(target, entry, threads, code, log, compiler, seconds, resources)


def compiler_version(vendor: str) -> str:
    """`nvrtc 13.5` or `hiprtc 7.2.53211`: part of every cache key. Raises MissingError, which says what to install."""
    version: str = compiler_of(vendor).version()
    return version


def disassemble(binary: Binary) -> str:
    """The machine code as text: SASS, or the ISA of an AMD GPU. Raises MissingError when no tool for it is found."""
    text: str = compiler_of(binary.target.vendor).disassemble(binary.code, binary.entry, binary.target)
    return text


def ptx(text: str, target: Target, *, filename: str, origin: str = "") -> str:
    """The PTX that NVRTC makes of `text`. Raises RequestError for a target that has none, else as compile_source."""
    if target.vendor != "cuda":
        raise RequestError(f"{target.name} has no PTX; ask for the machine code instead")
    made: str = compiler_of("cuda").compile_to_ptx(
        text, target, filename=filename, origin=origin, compiler=compiler_version("cuda")
    )
    return made
