"""Which compilers are here, marks that skip the tests for which one is missing, and what tests of wrong calls need."""

from __future__ import annotations

from typing import Any

import pytest

from fusegen.compiling import compiler_version
from fusegen.emulator import EmulatorUnavailable, toolchain
from fusegen.errors import MissingError


def can_build(check: bool) -> bool:
    """Whether the emulator can make the checking build, or the fast one."""
    try:
        return bool(toolchain.compiler_for(check=check))
    except EmulatorUnavailable:
        return False


def can_compile(vendor: str) -> bool:
    """Whether NVRTC ("cuda") or hiprtc ("hip") is here."""
    try:
        return bool(compiler_version(vendor))
    except MissingError:
        return False


needs_compiler = pytest.mark.skipif(not can_build(False), reason=f"no C++ compiler: {toolchain.INSTALL_HINT}")
needs_check = pytest.mark.skipif(not can_build(True), reason="the checking build needs g++ (apt install g++)")
needs_both = pytest.mark.skipif(
    not (can_build(False) and can_compile("cuda")), reason="needs NVRTC and a C++ compiler; see `fusegen doctor`"
)
BUILDS = [pytest.param(False, id="fast"), pytest.param(True, id="check", marks=needs_check)]


def untyped(value: Any) -> Any:
    """`value`, where the type checker would rightly object."""
    return value
