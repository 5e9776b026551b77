"""Each class of bug that the emulator claims to catch is planted here once, and must be found where it stands.

The line that must be named carries the comment `BUG`. `test_emulator.py` holds the counterpart: clean kernels that must
raise nothing.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest

from fusegen.emulator import KINDS, Buffer, EmulatedKernel, KernelFault, build
from tests.tools import BUILDS, needs_check, needs_compiler

pytestmark = needs_compiler

THREADS = 128
SIZE = 512  # floats in each buffer


@dataclass(frozen=True)
class Bug:
    """A kernel body with one bug. It may use float *x (read-only), float *y, int *count, int n."""

    name: str
    kind: str
    body: str
    before: str = ""  # device functions and types in front of the kernel
    block: tuple[int, int, int] = (THREADS, 1, 1)
    grid: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    warps: Sequence[int] = (32, 64)
    n: int = SIZE
    says: str = ""  # must be in the message
    options: dict[str, float] = field(default_factory=dict)


VEC = "struct alignas(16) Vec { float at[4]; };\n"

BUGS = [
    # --- out of bounds
    Bug("global read past the end", "out-of-bounds", "y[threadIdx.x] = x[threadIdx.x + 385]; // BUG",
        says="byte 2048 of x, which has 2048 bytes"),
    Bug("global write past the end", "out-of-bounds", "y[threadIdx.x + 385] = 1.0f; // BUG", says="write of 4 bytes"),
    Bug("global read before the start", "out-of-bounds", "y[threadIdx.x] = x[int(threadIdx.x) - 1]; // BUG",
        says="byte -4 of x"),
    Bug("vector read across the end", "out-of-bounds",
        "if (threadIdx.x == 0) { Vec v = *reinterpret_cast<const Vec*>(x + n); // BUG\n"
        " *reinterpret_cast<Vec*>(y) = v; }",
        before=VEC, says="read of 16 bytes"),
    Bug("wild pointer", "out-of-bounds", "y[threadIdx.x] = x[1ll << 40]; // BUG", says="in no buffer"),
    Bug("out of bounds inside a device function", "out-of-bounds", "y[threadIdx.x] = load(x, n);",
        before="__device__ __forceinline__ float load(const float* p, int i) {\n  return p[i]; // BUG\n}\n"),
    Bug("out of bounds through __ldg", "out-of-bounds", "y[threadIdx.x] = __ldg(x + n); // BUG"),
    Bug("out of bounds through __stcs", "out-of-bounds", "__stcs(y + n + threadIdx.x, 1.0f); // BUG"),
    Bug("out of bounds half conversion", "out-of-bounds",
        "y[threadIdx.x] = __half2float(reinterpret_cast<const __half*>(x)[2 * n]); // BUG",
        before="#include <cuda_fp16.h>\n"),
    Bug("out of bounds memcpy", "out-of-bounds", "float v[8];\nmemcpy(v, x + n - 4, 32); // BUG\ny[0] = v[0];"),
    Bug("out of bounds atomic", "out-of-bounds", "atomicAdd(count + n, 1); // BUG"),
    Bug("large struct read past the end", "out-of-bounds",
        "if (threadIdx.x == 0) { Big b = *reinterpret_cast<const Big*>(x + n - 8); // BUG\n y[0] = b.at[9]; }",
        before="struct Big { float at[16]; };\n"),
    Bug("static shared, index past the end", "out-of-bounds",
        "__shared__ float tile[64];\ntile[threadIdx.x] = 1.0f; // BUG\n__syncthreads();\ny[0] = tile[0];"),
    Bug("static shared, pointer past the end", "out-of-bounds",
        "__shared__ float tile[64], other[64];\nif (threadIdx.x < 64) other[threadIdx.x] = 0.0f;\nfloat* p = tile;\n"
        "p[threadIdx.x] = 1.0f; // BUG\n__syncthreads();\n"
        "y[0] = tile[0];", says="byte 256 of tile, which has 256 bytes"),
    Bug("static shared, pointer before the start", "out-of-bounds",
        "__shared__ float tile[64];\nfloat* p = tile;\n(p - 1)[threadIdx.x & 63] = 1.0f; // BUG\n"
        "", says="byte -4 of tile"),
    Bug("second row of shared array", "out-of-bounds",
        "__shared__ float partial[2][32];\nint row = n / 256;\npartial[row][threadIdx.x % 32] = 1.0f; // BUG\n"),
    Bug("dynamic shared past the end", "out-of-bounds",
        "extern __shared__ float tile[];\ntile[threadIdx.x] = 1.0f; // BUG", shared_bytes=4 * 64,
        says="dynamic shared memory, which has 256 bytes"),
    Bug("no dynamic shared given", "out-of-bounds",
        "extern __shared__ float tile[];\ntile[threadIdx.x] = 1.0f; // BUG", says="has 0 bytes"),
    Bug("local array index", "out-of-bounds",
        "float v[4] = {x[0], x[1], x[2], x[3]};\ny[threadIdx.x] = v[threadIdx.x / 8]; // BUG"),
    Bug("member array index", "out-of-bounds",
        "Vec v = *reinterpret_cast<const Vec*>(x);\ny[threadIdx.x] = v.at[threadIdx.x / 8]; // BUG", before=VEC),
    Bug("another thread's local variable", "out-of-bounds",
        "__shared__ float* where;\nfloat mine = x[threadIdx.x];\nif (threadIdx.x == 3) where = &mine;\n"
        "__syncthreads();\ny[threadIdx.x] = *where; // BUG\n__syncthreads();", says="local memory of thread (3, 0, 0)"),
    # --- misaligned
    Bug("vector load at a 4-byte offset", "misaligned",
        "Vec v = *reinterpret_cast<const Vec*>(x + threadIdx.x); // BUG\ny[threadIdx.x] = v.at[0];", before=VEC,
        says="no multiple of 16"),
    Bug("16-byte vector at a 2-byte offset", "misaligned",
        "auto h = reinterpret_cast<const __half*>(x) + 1;\n"
        "uint4 v = *reinterpret_cast<const uint4*>(h); // BUG\n"
        "y[threadIdx.x] = v.x;", before="#include <cuda_fp16.h>\n"),
    Bug("float4 store at an 8-byte offset", "misaligned",
        "*reinterpret_cast<float4*>(y + 2) = make_float4(0, 0, 0, 0); // BUG"),
    Bug("vector in shared memory that only promises floats", "misaligned",
        "__shared__ float tile[128];\ntile[threadIdx.x] = 0.0f;\n__syncthreads();\n"
        "float4 v = *reinterpret_cast<float4*>(tile); // BUG\ny[threadIdx.x] = v.x;"),
    Bug("32-byte vector in dynamic shared memory", "misaligned",
        "extern __shared__ unsigned char raw[];\n"
        "*reinterpret_cast<Wide*>(raw) = Wide(); // BUG", before="struct alignas(32) Wide { float at[8] = {}; };\n",
        shared_bytes=64),
    Bug("misaligned atomic", "misaligned",
        "atomicAdd(reinterpret_cast<int*>(reinterpret_cast<char*>(count) + 2), 1); // BUG"),
    # --- uninitialised
    Bug("static shared never written", "uninitialised",
        "__shared__ float tile[128];\nif (threadIdx.x != 77) tile[threadIdx.x] = 1.0f;\n__syncthreads();\n"
        "y[threadIdx.x] = tile[127 - threadIdx.x]; // BUG", says="byte 308 of tile"),
    Bug("dynamic shared never written", "uninitialised",
        "extern __shared__ float tile[];\ny[threadIdx.x] = tile[threadIdx.x]; // BUG", shared_bytes=512),
    Bug("shared left from the block before", "uninitialised",
        "__shared__ float tile[128];\nif (blockIdx.x == 0) tile[threadIdx.x] = 1.0f;\n__syncthreads();\n"
        "float v = tile[threadIdx.x]; // BUG\nif (v == 12345.0f) y[0] = v;", grid=(2, 1, 1)),
    Bug("output read before any write", "uninitialised", "y[threadIdx.x] = y[threadIdx.x] + 1.0f; // BUG"),
    Bug("half of a vector never written", "uninitialised",
        "if (threadIdx.x == 0) { y[0] = y[1] = y[3] = 1.0f;\n"
        "Vec v = *reinterpret_cast<Vec*>(y); // BUG\n"
        "reinterpret_cast<Vec*>(y)[1] = v; }", before=VEC, says="byte 8 of y"),
    Bug("atomic on an unset counter", "uninitialised", "atomicAdd(y, 1.0f); // BUG"),
    # --- read-only
    Bug("write to an input", "read-only", "const_cast<float*>(x)[threadIdx.x] = 1.0f; // BUG", says="of x"),
    Bug("atomic on an input", "read-only", "atomicAdd(const_cast<float*>(x), 1.0f); // BUG"),
    # --- races
    Bug("missing __syncthreads", "race",
        "__shared__ float tile[128];\ntile[threadIdx.x] = x[threadIdx.x];\n"
        "y[threadIdx.x] = tile[127 - threadIdx.x]; // BUG",
        options={"seed": 3}),
    Bug("missing __syncthreads before reuse", "race",
        "__shared__ float tile[128];\ntile[threadIdx.x] = x[threadIdx.x];\n__syncthreads();\n"
        "float v = tile[127 - threadIdx.x];\ntile[threadIdx.x] = v; // BUG\n__syncthreads();\n"
        "y[threadIdx.x] = tile[threadIdx.x];"),
    Bug("missing __syncwarp", "race",
        "__shared__ float tile[64];\nif (threadIdx.x < 32) tile[threadIdx.x] = 1.0f;\n"
        "if (threadIdx.x == 31) y[0] = tile[0]; // BUG"),
    Bug("__syncwarp where the block must meet", "race",
        "__shared__ float tile[128];\ntile[threadIdx.x] = 1.0f;\n__syncwarp();\n"
        "y[threadIdx.x] = tile[(threadIdx.x + 64) % 128]; // BUG", options={"seed": 5}),
    Bug("a shuffle orders nothing", "race",
        "__shared__ float tile[128];\ntile[threadIdx.x] = 1.0f;\nfloat v = SHFL_XOR(1.0f, 1);\n"
        "y[threadIdx.x] = v + tile[threadIdx.x ^ 1]; // BUG"),
    Bug("plain += on one counter", "race", "count[0] += 1; // BUG"),
    Bug("all threads write one place", "race", "y[0] = 1.0f; // BUG"),
    Bug("atomic and plain write", "race", "if (threadIdx.x == 0) count[0] = 0; else atomicAdd(count, 1); // BUG"),
    Bug("plain read of an atomic counter", "race",
        "atomicAdd(count, 1);\nint v = count[0]; // BUG\nif (v == 1000000) y[0] = v;"),
    Bug("two blocks write one row", "race", "y[threadIdx.x] = blockIdx.x; // BUG", grid=(2, 1, 1)),
    Bug("a block reads what another writes", "race",
        "if (blockIdx.x == 0) { y[threadIdx.x] = 1.0f; } else if (y[threadIdx.x] == 2.0f) { // BUG\n count[0] = 1; }",
        grid=(2, 1, 1)),
    Bug("a block writes what another has read", "race",
        "int i = threadIdx.x;\nif (blockIdx.x == 0) { if (count[i] == 77) y[0] = 1.0f; }\nelse if (blockIdx.x == 1) {\n"
        "if (count[i] == 78) y[0] = 1.0f;\n} else {\ncount[i] = 5; // BUG\n}", grid=(3, 1, 1)),
    Bug("last block without a fence", "race",
        "__shared__ int last;\ny[blockIdx.x * 128 + threadIdx.x] = 1.0f;\n__syncthreads();\n"
        "if (threadIdx.x == 0) last = atomicAdd(count, 1) == gridDim.x - 1;\n__syncthreads();\n"
        "if (last) { float sum = y[threadIdx.x] + y[128 + threadIdx.x]; // BUG\n"
        " if (sum == 99.0f) count[1] = 1; }", grid=(2, 1, 1)),
    Bug("neighbouring bytes are fine, the same byte is not", "race",
        "auto bytes = reinterpret_cast<unsigned char*>(y);\nbytes[threadIdx.x] = 1;\n__syncthreads();\n"
        "bytes[threadIdx.x / 2] = 2; // BUG"),
    # --- barriers
    Bug("barrier in a branch", "divergent-barrier",
        "__shared__ float tile[1];\nif (threadIdx.x < 64) {\n__syncthreads(); // BUG\n}\n"
        "y[threadIdx.x] = 1.0f;", says="has returned"),
    Bug("two barriers", "divergent-barrier",
        "if (threadIdx.x < 64) {\n__syncthreads();\n} else {\n__syncthreads(); // BUG\n"
        "}", says="waits at the one on line"),
    Bug("early return", "divergent-barrier",
        "if (threadIdx.x >= n) return;\ny[threadIdx.x] = 1.0f;\n__syncthreads(); // BUG", n=100,
        says="28 of the block's 128 threads never reach"),
    # --- warp operations
    Bug("shuffles in two branches", "divergent-warp",
        "float v = 1.0f;\nif (threadIdx.x % 2) {\nv = SHFL_SYNC(v, 0);\n} else {\nv = SHFL_SYNC(v, 0); // BUG\n"
        "}\ny[threadIdx.x] = v;"),
    Bug("a shuffle meets a vote", "divergent-warp",
        "int v = 0; if (threadIdx.x % 2) { v = SHFL_SYNC(1, 0); } else { v = ANY_SYNC(1); } // BUG\n"
        "y[threadIdx.x] = v;"),
    Bug("different masks", "divergent-warp",
        "int v = __shfl_xor_sync(threadIdx.x % 2 ? FULL : FULL - 2, 1, 0); // BUG\ny[threadIdx.x] = v;",
        block=(32, 1, 1), warps=(32,)),
    Bug("shuffle in a branch, others at the barrier", "deadlock",
        "float v = 1.0f;\nif (threadIdx.x % 32 < 16) {\nv = SHFL_SYNC(v, 0); // BUG\n}\n__syncthreads();\n"
        "y[threadIdx.x] = v;"),
    Bug("converged shuffle reads an inactive lane", "inactive-lane",
        "float v = 1.0f;\nif (threadIdx.x % 32 < 20) {\nv = __shfl_xor(v, 16); // BUG\n}\n__syncthreads();\n"
        "y[threadIdx.x] = v;"),
    Bug("shuffle from a lane that has returned", "inactive-lane",
        "if (threadIdx.x == 5) return;\ny[threadIdx.x] = SHFL_SYNC(1.0f, 5); // BUG"),
    Bug("shuffle from beyond a partial warp", "inactive-lane",
        "y[threadIdx.x] = SHFL_SYNC(1.0f, 31); // BUG", block=(16, 1, 1)),
    Bug("mask leaves out its caller", "mask", "y[threadIdx.x] = __shfl_sync(FULL - 8, 1.0f, 0); // BUG", says="lane 3"),
    Bug("32-bit mask on a 64-wide wave", "mask",
        "y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1); // BUG", warps=(64,), says="a mask of 32 bits"),
    Bug("half the mask on a 64-wide wave", "mask",
        "y[threadIdx.x] = __shfl_xor_sync(0xffffffffull, 1.0f, 1); // BUG", warps=(64,), says="lane 32"),
    # --- arithmetic
    Bug("division by zero", "divide-by-zero", "y[threadIdx.x] = 7 / (n - 512); // BUG"),
    Bug("remainder by zero", "divide-by-zero", "y[threadIdx.x] = threadIdx.x % unsigned(n - 512); // BUG"),
    Bug("shift by 32", "shift", "y[threadIdx.x] = 1u << (n / 16); // BUG"),
    # --- never ending
    Bug("endless loop", "timeout", "float v = x[0];\nwhile (n > 0) { v = v * 0.5f; } // BUG\ny[0] = v;",
        options={"timeout_s": 0.1}),
    Bug("empty endless loop", "timeout", "while (n > 0) { } // BUG\ny[0] = 1.0f;", options={"timeout_s": 0.1}),
    Bug("spin on a flag", "timeout", "while (*(volatile int*)count == 0) { } // BUG\ny[0] = 1.0f;",
        options={"timeout_s": 0.1}),
    # --- others
    Bug("trap", "trap", "if (threadIdx.x == 9) __trap(); // BUG"),
    Bug("assertion", "trap", "assert(threadIdx.x < 9); // BUG", says="threadIdx.x < 9"),
    Bug("wrong assumption", "trap", "__builtin_assume(threadIdx.x < 9); // BUG\ny[threadIdx.x] = 1.0f;"),
    Bug("endless recursion", "stack-overflow", "y[threadIdx.x] = down(x, n);",
        before="__device__ __noinline__ float down(const float* x, int n) {\n"
        "  return n < 0 ? 0.0f : x[0] + down(x, n + 1) * 0.5f; // BUG\n}\n", options={"timeout_s": 5.0}),
]  # fmt: skip


def spelled(text: str, warp: int) -> str:
    """Fill in the spellings that depend on the warp: CUDA's at width 32, HIP's at 64."""
    full = "0xffffffffu" if warp == 32 else "0xffffffffffffffffull"
    text = text.replace("SHFL_SYNC(", f"__shfl_sync({full}, ").replace("ANY_SYNC(", f"__any_sync({full}, ")
    text = text.replace("SHFL_XOR(", f"__shfl_xor_sync({full}, " if warp == 32 else "__shfl_xor(")
    return text.replace("FULL", full)


def source_of(bug: Bug, warp: int) -> str:
    header = "#include <hip/hip_runtime.h>\n" if warp == 64 else ""
    signature = 'extern "C" __global__ void kernel(const float* x, float* y, int* count, int n) {\n'
    return spelled(f"{header}{bug.before}{signature}{bug.body}\n}}\n", warp)


class Memory:
    """The three buffers, each in the middle of a larger allocation."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.generic]] = []
        self.x = self._inside(np.float32, 1.0)
        self.y = self._inside(np.float32, 0.0)
        self.count = self._inside(np.int32, 0)

    def _inside(self, dtype: type[np.generic], value: float) -> npt.NDArray[np.generic]:
        whole = np.full(3 * SIZE, value, dtype)
        offset = (-whole.ctypes.data // dtype().itemsize) % (16 // dtype().itemsize)
        self._arrays.append(whole)
        return whole[offset + SIZE : offset + 2 * SIZE]

    def arguments(self, n: int) -> list[Buffer | ctypes.c_int]:
        return [
            Buffer("x", self.x.ctypes.data, self.x.ctypes.data, self.x.nbytes, writable=False),
            Buffer("y", self.y.ctypes.data, self.y.ctypes.data, self.y.nbytes, initialised=False),
            Buffer("count", self.count.ctypes.data, self.count.ctypes.data, self.count.nbytes),
            ctypes.c_int(n),
        ]


def fault_of(kernel: EmulatedKernel, bug: Bug) -> KernelFault:
    memory = Memory()
    with pytest.raises(KernelFault) as caught:
        kernel.launch(bug.grid, bug.block, bug.shared_bytes, memory.arguments(bug.n), **bug.options)  # type: ignore[arg-type]
    return caught.value


CASES = [pytest.param(bug, warp, id=f"{bug.name}-{warp}") for bug in BUGS for warp in bug.warps]


@needs_check
@pytest.mark.parametrize(("bug", "warp"), CASES)
def test_planted_bug_is_reported_where_it_stands(bug: Bug, warp: int) -> None:
    source = source_of(bug, warp)
    kernel = build(source, "kernel", warp=warp, check=True, filename="planted.cu")
    fault = fault_of(kernel, bug)
    lines = source.splitlines()
    assert fault.kind == bug.kind, fault
    assert fault.line is not None
    places = [fault.line, *([fault.other_line] if fault.other_line else [])]
    assert any("BUG" in lines[place - 1] for place in places), fault
    assert fault.source_line == lines[fault.line - 1].strip()
    assert fault.block is not None
    assert fault.thread is not None
    assert f"planted.cu:{fault.line}: {bug.kind}: " in str(fault)
    assert bug.says in str(fault)


@needs_check
@pytest.mark.parametrize("seed", range(6))
def test_races_are_found_whatever_the_schedule(seed: int) -> None:
    for bug in (bug for bug in BUGS if bug.kind == "race"):
        kernel = build(source_of(bug, 32), "kernel", warp=32, check=True, filename="planted.cu")
        assert fault_of(kernel, replace(bug, options={"seed": seed})).kind == "race"


def test_every_kind_is_planted() -> None:
    planted = {bug.kind for bug in BUGS}
    # A crash needs the fast build (below); `resources` is the operating system refusing memory;
    # test_emulator_mbarriers.py, test_emulator_wgmma.py and test_emulator_hopper.py plant the rest.
    assert planted == set(KINDS) - {"none", "segfault", "resources", "mbarrier", "tensor", "registers"}


# --- what the fast build finds too

FAST_KINDS = {"divergent-barrier", "divergent-warp", "inactive-lane", "mask", "deadlock", "timeout", "trap",
              "stack-overflow", "divide-by-zero"}  # fmt: skip
FAST_CASES = [
    pytest.param(bug, warp, id=f"{bug.name}-{warp}")
    for bug in BUGS
    for warp in bug.warps
    if bug.kind in FAST_KINDS and bug.name != "wrong assumption"  # there the compiler may believe it
]


@pytest.mark.parametrize(("bug", "warp"), FAST_CASES)
def test_fast_build_reports_what_the_schedule_shows(bug: Bug, warp: int) -> None:
    kernel = build(source_of(bug, warp), "kernel", warp=warp, check=False, filename="planted.cu")
    fault = fault_of(kernel, bug)
    assert fault.kind == bug.kind, fault
    assert fault.block is not None


def test_crash_of_the_fast_build_is_a_fault_and_no_crash() -> None:
    bug = Bug("wild pointer", "segfault", "y[threadIdx.x] = x[1ll << 44]; // BUG")
    source = source_of(bug, 32)
    fault = fault_of(build(source, "kernel", warp=32, check=False, filename="planted.cu"), bug)
    assert fault.kind == "segfault"
    assert fault.source_line is not None
    assert "BUG" in fault.source_line


# --- wrong numbers

MISSING_BARRIER = """
__shared__ float partial[32];
float v = x[threadIdx.x];
for (int o = warpSize / 2; o > 0; o /= 2) v += __shfl_xor(v, o);
if (threadIdx.x % warpSize == 0) partial[threadIdx.x / warpSize] = v;
__syncthreads();
float sum = 0.0f;
for (int i = 0; i < blockDim.x / warpSize; ++i) sum += partial[i];
{barrier}
if (threadIdx.x % warpSize == 0) partial[threadIdx.x / warpSize] = 100.0f * sum;
__syncthreads();
y[threadIdx.x] = sum + partial[0];
"""


@pytest.mark.parametrize("warp", [32, 64])
def test_adversarial_schedule_shows_a_missing_barrier_in_the_numbers(warp: int) -> None:
    def wrong_seeds(barrier: str) -> int:
        bug = Bug("", "", MISSING_BARRIER.replace("{barrier}", barrier))
        kernel = build(source_of(bug, warp), "kernel", warp=warp, check=False, filename="planted.cu")
        wrong = 0
        for seed in range(1, 21):
            memory = Memory()
            kernel.launch((1, 1, 1), (THREADS, 1, 1), 0, memory.arguments(SIZE), seed=seed)
            wrong += bool(np.any(memory.y[:THREADS] != 101.0 * THREADS))
        return wrong

    assert wrong_seeds("__syncthreads();") == 0
    assert wrong_seeds("") >= 10


def test_a_seed_repeats_its_schedule() -> None:
    body = "y[atomicAdd(count, 1)] = threadIdx.x;"
    kernel = build(source_of(Bug("", "", body), 32), "kernel", warp=32, check=False, filename="order.cu")

    def order(seed: int) -> list[float]:
        memory = Memory()
        kernel.launch((1, 1, 1), (THREADS, 1, 1), 0, memory.arguments(SIZE), seed=seed)
        return [float(value) for value in memory.y[:THREADS]]

    assert order(0) == order(0)
    assert order(7) == order(7)
    assert order(7) != order(8)
    assert sorted(order(7)) == list(range(THREADS))


@needs_check
def test_uninitialised_local_gives_the_same_nonsense_every_time() -> None:
    """Not reported (the package's docstring says so), but never mistaken for a sum that starts at zero."""
    body = "float sum;\nif (n < 0) sum = 0.0f;\ny[threadIdx.x] = sum + x[threadIdx.x];"
    memory = Memory()
    kernel = build(source_of(Bug("", "", body), 32), "kernel", warp=32, check=True, filename="local.cu")
    kernel.launch((1, 1, 1), (THREADS, 1, 1), 0, memory.arguments(SIZE))
    assert float(np.max(memory.y[:THREADS])) < -1e38


# --- after a fault


@pytest.mark.parametrize("check", BUILDS)
def test_a_kernel_can_be_launched_again_after_a_fault(check: bool) -> None:
    bug = Bug("", "", "if (n < 0) { while (true) { } }\n__syncthreads();\ny[threadIdx.x] = x[threadIdx.x];")
    kernel = build(source_of(bug, 32), "kernel", warp=32, check=check, filename="again.cu")
    for _ in range(3):
        memory = Memory()
        with pytest.raises(KernelFault, match="timeout"):
            kernel.launch((2, 1, 1), (THREADS, 1, 1), 0, memory.arguments(-1), timeout_s=0.05)
        kernel.launch((1, 1, 1), (THREADS, 1, 1), 0, memory.arguments(1))
        assert np.all(memory.y[:THREADS] == 1.0)


@pytest.mark.parametrize("check", BUILDS)
def test_timeout_is_kept_by_a_kernel_that_only_synchronises(check: bool) -> None:
    bug = Bug("", "", "while (n > 0) {\n__syncthreads(); // BUG\n}")
    kernel = build(source_of(bug, 64), "kernel", warp=64, check=check, filename="sync.cu")
    start = time.perf_counter()
    with pytest.raises(KernelFault, match="timeout"):
        kernel.launch((4, 1, 1), (THREADS, 1, 1), 0, Memory().arguments(1), timeout_s=0.1)
    assert time.perf_counter() - start < 5.0


@needs_check
def test_launches_of_both_builds_time_out_at_the_same_time() -> None:
    """Both runtimes are in the process, each with its own handler of the watchdog's one signal."""
    failures: list[BaseException] = []

    def work(check: bool, body: str) -> None:
        bug = Bug("", "", f"while (n > 0) {{\n{body}\n}}")
        kernel = build(source_of(bug, 64), "kernel", warp=64, check=check, filename="both.cu")
        try:
            for _ in range(25):
                with pytest.raises(KernelFault, match="timeout"):
                    kernel.launch((4, 1, 1), (THREADS, 1, 1), 0, Memory().arguments(1), timeout_s=0.004)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(check, body))
        for check in (False, True)
        for body in ("__syncthreads();", "")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
