"""Dependent launches: what a kernel touches before it has waited for the launches before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fusegen.emulator import Buffer, EmulatorUnavailable, KernelFault, build, compiler
from tests.programs import aligned, compile_cuda

pytestmark = pytest.mark.usefixtures("emulated_only")

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
TRIGGER = 'asm volatile("griddepcontrol.launch_dependents;");'
COPY = (
    'asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"'
    ' :: "r"((unsigned)__cvta_generic_to_shared(tile + i)), "l"({0} + at) : "memory");'
)
DONE = 'asm volatile("cp.async.wait_all;" ::: "memory");'
THREADS = 64


@dataclass(frozen=True)
class Body:
    """Of a kernel that may use const float* x, const float* w, float* y, __shared__ float tile[64], int i, its thread,
    and int at, its place in the arrays. A launch before it may still be writing x and reading y; nobody writes w. A
    fault is on the line with BUG."""

    name: str
    text: str
    says: str = ""


ASK = (
    'if (i % 4 == 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"({0} + at), "r"({1}) : "memory");'
)

RIGHT = (
    Body("waits first", f"{TRIGGER}\n{WAIT}\ny[at] = x[at] + w[at];"),
    Body("reads ahead what nobody writes", f"const float ahead = w[at];\n{WAIT}\ny[at] = x[at] + ahead;"),
    Body("copies ahead what nobody writes", f"{COPY.format('w')}\n{WAIT}\n{DONE}\ny[at] = tile[i];"),
    Body("asks a cache for what nobody writes", f"{ASK.format('w', 16)}\n{WAIT}\ny[at] = x[at] + w[at];"),
    Body("touches its own memory", f"tile[i] = i;\n__syncthreads();\n{WAIT}\ny[at] = tile[63 - i] + x[at];"),
)
WRONG = (
    Body("reads first", f"const float early = x[at];  // BUG\n{WAIT}\ny[at] = early;", "read of byte 0 of x of first"),
    Body("writes first", f"y[at] = w[at];  // BUG\n{WAIT}", "write of byte 0 of y of first, which a launch before"),
    Body("copies first", f"{COPY.format('x')}  // BUG\n{WAIT}\n{DONE}\ny[at] = tile[i];", "may still be writing"),
    Body("asks a cache first", f"{ASK.format('x', 16)}  // BUG\n{WAIT}\ny[at] = x[at];", "may still be writing"),
    Body("updates first", f"atomicAdd(y + at, 1.0f);  // BUG\n{WAIT}", "atomic update"),
    Body("one thread waits", f"if (i == 63) {WAIT}\ny[at] = x[at];  // BUG", "this thread has not waited"),
    Body("reads far before it waits", f"if (at == 127) y[at] = x[at];  // BUG\n{WAIT}", "read of byte 508 of x"),
)  # fmt: skip

ASKED_WRONG = (
    Body("asks a cache for more", f"{ASK.format('w', 528)}  // BUG\n{WAIT}", "of w, which has 512 bytes"),
    Body("asks a cache for a part", f"{ASK.format('w', 8)}  // BUG\n{WAIT}", "multiples of 16"),
)  # fmt: skip


def source(body: Body) -> str:
    return (
        'extern "C" __global__ void kernel(const float* x, const float* w, float* y) {\n'
        f"__shared__ float tile[{THREADS}];\nconst int i = threadIdx.x, at = blockIdx.x * 64 + i;\n"
        f"tile[i] = 0.0f;\n{body.text}\n}}\n"
    )


def run(body: Body, *, check: bool = True, dependent: bool = True) -> None:
    kernel = build(source(body), "kernel", warp=32, check=check, filename="dependent.cu")
    x, w, y = (aligned(np.arange(2 * THREADS, dtype=np.float32)) for _ in range(3))
    given = [
        Buffer(name, each.ctypes.data, each.ctypes.data, each.nbytes, writable=name == "y")
        for name, each in (("x", x), ("w", w), ("y", y))
    ]
    before = [
        Buffer("x of first", x.ctypes.data, x.ctypes.data, x.nbytes),
        Buffer("w of first", w.ctypes.data, w.ctypes.data, w.nbytes, writable=False),
        Buffer("y of first", y.ctypes.data, y.ctypes.data, y.nbytes, writable=False),
    ]
    kernel.launch((2, 1, 1), (THREADS, 1, 1), 0, given, unfinished=before if dependent else None)


@pytest.mark.parametrize("body", RIGHT, ids=lambda body: body.name)
def test_what_waits_before_it_touches_runs(body: Body) -> None:
    run(body)
    run(body, check=False)


@pytest.mark.parametrize("body", WRONG, ids=lambda body: body.name)
def test_what_touches_before_it_waits_is_a_race(body: Body) -> None:
    with pytest.raises(KernelFault, match=body.says) as caught:
        run(body)
    assert caught.value.kind == "race"
    assert caught.value.source_line is not None
    assert "BUG" in caught.value.source_line
    run(body, dependent=False)  # launched when those before it have ended


@pytest.mark.parametrize("body", ASKED_WRONG, ids=lambda body: body.name)
def test_a_cache_is_asked_for_what_can_be_read(body: Body) -> None:
    with pytest.raises(KernelFault, match=body.says) as caught:
        run(body)
    assert caught.value.kind in ("out-of-bounds", "misaligned")
    assert caught.value.source_line is not None
    assert "BUG" in caught.value.source_line


@pytest.mark.parametrize("check", [True, False], ids=["checking", "fast"])
def test_a_dependent_launch_that_never_waits_is_a_race(check: bool) -> None:
    body = Body("never waits", "y[at] = 1.0f;")
    with pytest.raises(KernelFault, match=r"has not waited|no thread of it has waited") as caught:
        run(body, check=check)
    assert caught.value.kind == "race"
    kernel = build(source(Body("nothing", "")), "kernel", warp=32, check=check, filename="dependent.cu")
    y = aligned(np.zeros(THREADS, np.float32))
    given = [Buffer(name, y.ctypes.data, y.ctypes.data, y.nbytes) for name in "xwy"]
    with pytest.raises(KernelFault, match="those behind it take it that they have ended"):
        kernel.launch((1, 1, 1), (THREADS, 1, 1), 0, given, unfinished=[])


def test_the_bodies_are_cuda() -> None:
    bodies = (*RIGHT, *WRONG, *ASKED_WRONG)
    compile_cuda("\n".join(source(b).replace(" kernel(", f" kernel_{n}(") for n, b in enumerate(bodies))
                 .replace(" kernel_0(", " kernel(", 1))  # fmt: skip
