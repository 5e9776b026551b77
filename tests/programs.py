"""Small kernels for the emulator's tests: y = want(x), or a planted bug and what must be said of it.

A program is real CUDA: `compile_cuda` hands it to NVRTC too, so that no test rests on a dialect of the emulator's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fusegen.compiling import compile_source
from fusegen.emulator import Buffer, EmulatorUnavailable, KernelFault, build, toolchain
from fusegen.errors import MissingError
from fusegen.targets import H200

Array = npt.NDArray[Any]


def can_build(check: bool) -> bool:
    try:
        return bool(toolchain.compiler_for(check=check))
    except EmulatorUnavailable:
        return False


needs_compiler = pytest.mark.skipif(not can_build(False), reason=f"no C++ compiler: {toolchain.INSTALL_HINT}")
needs_check = pytest.mark.skipif(not can_build(True), reason="the checking build needs g++ (apt install g++)")
BUILDS = [pytest.param(False, id="fast"), pytest.param(True, id="check", marks=needs_check)]


@dataclass(frozen=True)
class Program:
    """A kernel's body; it may use const float* x (read-only), float* y (never written before) and int n, their length.

    The line that a fault must name carries the comment `BUG`.
    """

    name: str
    body: str
    want: Callable[[Array], Array] | None = None
    before: str = ""  # device functions in front of the kernel
    attributes: str = ""
    blocks: int = 1
    threads: int = 128
    size: int = 128
    shared_bytes: int = 0
    kind: str = ""  # of the fault; "a|b" if it depends on the schedule
    says: str = ""  # must be in its message

    @property
    def source(self) -> str:
        head = f'extern "C" __global__ void {self.attributes} kernel(const float* x, float* y, int n) {{\n'
        return f"{self.before}{head}{self.body}\n}}\n"


def numbers(size: int) -> Array:
    return aligned(np.random.default_rng(0).standard_normal(size).astype(np.float32))


def aligned(values: Array) -> Array:
    """The values at a multiple of 256 bytes, as a GPU's allocator puts them, with nothing else near."""
    whole = np.zeros(values.nbytes + 2048, np.uint8)
    start = -whole.ctypes.data % 256 + 512
    place = whole[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    place[...] = values
    return place


def run(program: Program, *, check: bool, seed: int = 0, timeout_s: float = 60.0, workers: int | None = None) -> Array:
    """What the program writes."""
    kernel = build(program.source, "kernel", warp=32, check=check, filename="program.cu")
    x = numbers(program.size)
    y = aligned(np.full_like(x, np.nan))
    arguments: list[Any] = [
        Buffer("x", x.ctypes.data, x.ctypes.data, x.nbytes, writable=False),
        Buffer("y", y.ctypes.data, y.ctypes.data, y.nbytes, initialised=False),
        np.ctypeslib.as_ctypes_type(np.int32)(program.size),
    ]
    kernel.launch((program.blocks, 1, 1), (program.threads, 1, 1), program.shared_bytes, arguments,
                  seed=seed, timeout_s=timeout_s, workers=workers)  # fmt: skip
    return y


def require_right(program: Program, *, check: bool) -> None:
    """Under several schedules, the plain one (seed 0) among them."""
    assert program.want is not None
    for seed in range(6):
        y = run(program, check=check, seed=seed)
        np.testing.assert_allclose(y, program.want(numbers(program.size)), rtol=1e-5, atol=1e-5, err_msg=f"{seed=}")


def require_fault(program: Program, *, check: bool, seed: int = 0) -> KernelFault:
    """The program's bug, reported on the line that has it."""
    with pytest.raises(KernelFault) as caught:
        run(program, check=check, seed=seed, timeout_s=20.0)
    fault = caught.value
    lines = program.source.splitlines()
    places = [place for place in (fault.line, fault.other_line) if place]
    assert fault.kind in program.kind.split("|"), fault
    assert any("BUG" in lines[place - 1] for place in places), fault
    assert program.says in str(fault), fault
    return fault


def compile_cuda(text: str, threads: int = 128, shared_bytes: int = 0) -> None:
    """Compile for the H200, or skip where there is no NVRTC."""
    try:
        compile_source(text, "kernel", H200, filename="program.cu", threads=threads, dynamic_shared=shared_bytes)
    except MissingError as missing:
        pytest.skip(str(missing))
