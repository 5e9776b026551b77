"""The emulator as a whole: clean kernels give right numbers and raise nothing, and the machinery around them holds.

`test_emulator_faults.py` plants bugs; `test_emulator_dialect.py` goes through the functions a kernel may call.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fusegen import storage
from fusegen.emulator import (
    Buffer,
    Compiler,
    EmulatedKernel,
    EmulatorBuildError,
    EmulatorUnavailable,
    KernelFault,
    LaunchError,
    build,
    compiler,
    toolchain,
    workplace,
)
from fusegen.emulator.rewrite import rewrite_shared
from fusegen.emulator.tokens import tokens_of
from fusegen.storage import entries
from tests.tools import needs_check, needs_compiler

pytestmark = needs_compiler
BUILDS = [
    pytest.param(warp, check, id=f"{'check' if check else 'fast'}-{warp}", marks=[needs_check] if check else [])
    for warp in (32, 64)
    for check in (False, True)
]


Array = npt.NDArray[np.generic]
Words = dict[str, str]
CUDA: Words = {
    "SHFL_XOR(": "__shfl_xor_sync(0xffffffffu, ",
    "SYNCWARP": "__syncwarp();",
    "SHFL_DOWN(": "__shfl_down_sync(0xffffffffu, ",
    "INCLUDE": "#include <cuda_fp16.h>",
    "HALF": "__half",
    "WARP": "32",
}
HIP: Words = {
    "SHFL_XOR(": "__shfl_xor(",
    "SYNCWARP": "__builtin_amdgcn_wave_barrier();",
    "SHFL_DOWN(": "__shfl_down(",
    "INCLUDE": "#include <hip/hip_runtime.h>",
    "HALF": "_Float16",
    "WARP": "64",
}


def spelled(text: str, warp: int) -> str:
    for word, replacement in (CUDA if warp == 32 else HIP).items():
        text = text.replace(word, replacement)
    return text


def buffer(name: str, array: Array, *, writable: bool = False, initialised: bool = True) -> Buffer:
    return Buffer(name, array.ctypes.data, array.ctypes.data, array.nbytes, writable, initialised)


def output(name: str, array: Array) -> Buffer:
    return buffer(name, array, writable=True, initialised=False)


# --- clean kernels


@dataclass(frozen=True)
class Clean:
    """A kernel without a bug: y = want(x), with `size` floats in each. It may also use int* count, all zeros."""

    name: str
    body: str
    want: Any
    before: str = ""
    grid: int = 1
    threads: int = 256
    size: int = 256
    shared_bytes: int = 0


BLOCK_SUM = """
__device__ __forceinline__ float warp_sum(float v) {
  #pragma unroll
  for (int o = warpSize / 2; o > 0; o /= 2) v += SHFL_XOR(v, o);
  return v;
}
__device__ __forceinline__ float block_sum(float v, float* partial) {
  v = warp_sum(v);
  if (threadIdx.x % warpSize == 0) partial[threadIdx.x / warpSize] = v;
  __syncthreads();
  return warp_sum(threadIdx.x % warpSize < blockDim.x / warpSize ? partial[threadIdx.x % warpSize] : 0.0f);
}
"""
LAST_BLOCK = """
__shared__ int last;
y[1 + blockIdx.x * blockDim.x + threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
__threadfence();
__syncthreads();
if (threadIdx.x == 0) last = atomicAdd(count, 1) == gridDim.x - 1;
__syncthreads();
if (last) {
  __shared__ float partial[32];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < gridDim.x * blockDim.x; i += blockDim.x) sum += y[1 + i];
  sum = block_sum(sum, partial);
  if (threadIdx.x == 0) y[0] = sum;
}
"""
LAST_BLOCK_OF_SUMS = """
__shared__ int last;
float v = x[1 + blockIdx.x * blockDim.x + threadIdx.x];
atomicAdd(reinterpret_cast<float*>(count) + 1, v * v);
__threadfence();
__syncthreads();
if (threadIdx.x == 0) last = atomicAdd(count, 1) == gridDim.x - 1;
__syncthreads();
if (blockIdx.x == 0 && threadIdx.x == 0) y[0] = x[0];
y[1 + blockIdx.x * blockDim.x + threadIdx.x] = last && threadIdx.x == 7 ? reinterpret_cast<float*>(count)[1] : 0.0f;
"""
TILES = """
__shared__ float tile[2][256];
float sum = 0.0f;
tile[0][threadIdx.x] = x[threadIdx.x];
for (int t = 0; t < 4; ++t) {
  __syncthreads();
  if (t < 3) tile[(t + 1) % 2][threadIdx.x] = x[(t + 1) * 256 + threadIdx.x];
  sum += tile[t % 2][255 - threadIdx.x];
}
for (int t = 0; t < 4; ++t) y[t * 256 + threadIdx.x] = sum;
"""

CLEAN = [
    Clean("copy", "y[threadIdx.x] = x[threadIdx.x];", lambda x: x),
    Clean("grid-stride loop", "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < 1000; "
        "i += gridDim.x * blockDim.x)\n"
          "  y[i] = 2.0f * x[i];", lambda x: 2 * x, grid=3, size=1000),
    Clean("block reduction", "__shared__ float partial[2][32];\n"
        "float mean = block_sum(x[threadIdx.x], partial[0]) / 256.0f;\n"
          "float d = x[threadIdx.x] - mean;\ny[threadIdx.x] = d * rsqrtf(block_sum(d * d, partial[1]) / 256.0f);",
          lambda x: (x - x.mean()) / x.std(), before=BLOCK_SUM),
    Clean("reduction in a loop", "__shared__ float partial[32];\nfor (int row = 0; row < 4; ++row) {\n"
          "  float sum = block_sum(x[256 * row + threadIdx.x], partial);\n  y[256 * row + threadIdx.x] = sum;\n"
          "  __syncthreads();\n}",
          lambda x: np.repeat(x.reshape(4, 256).sum(1), 256), before=BLOCK_SUM, size=1024),
    Clean("double-buffered tiles", TILES, lambda x: np.tile(x.reshape(4, 256)[:, ::-1].sum(0), 4), size=1024),
    Clean("warp-private shared memory", "__shared__ float tile[256];\ntile[threadIdx.x] = x[threadIdx.x];\nSYNCWARP\n"
          "float v = tile[threadIdx.x ^ 1];\nSYNCWARP\ntile[threadIdx.x] = 2.0f * v;\nSYNCWARP\n"
          "y[threadIdx.x] = tile[threadIdx.x ^ 2];", lambda x: 2 * x[np.arange(256) ^ 3]),
    Clean("broadcast reads", "__shared__ float v;\nif (threadIdx.x == 9) v = x[9];\n__syncthreads();\n"
          "y[threadIdx.x] = v + x[0];", lambda x: x[9] + 0 * x + x[0]),
    Clean("dynamic shared", "extern __shared__ __align__(16) unsigned char shared[];\n"
        "float* tile = reinterpret_cast<float*>(shared);\n"
          "int* index = reinterpret_cast<int*>(shared + 1024);\ntile[threadIdx.x] = x[threadIdx.x];\n"
          "index[threadIdx.x] = threadIdx.x ^ 5;\n"
          "__syncthreads();\ny[threadIdx.x] = tile[index[threadIdx.x]];", lambda x: x[np.arange(256) ^ 5],
          shared_bytes=2048),
    Clean("vector access", "Vec v = reinterpret_cast<const Vec*>(x)[threadIdx.x];\n"
          "for (int j = 0; j < 4; ++j) v.at[j] += 1.0f;\nreinterpret_cast<Vec*>(y)[threadIdx.x] = v;",
          lambda x: x + 1, before="struct alignas(16) Vec { float at[4]; };\n", size=1024),
    Clean("halves in shared memory", "__shared__ alignas(16) HALF tile[256];\n"
        "tile[threadIdx.x] = static_cast<HALF>(x[threadIdx.x]);\n"
          "__syncthreads();\nif (threadIdx.x < 32) {\n  uint4 v = reinterpret_cast<uint4*>(tile)[threadIdx.x];\n"
          "  v.x ^= 0x80008000u;\n  reinterpret_cast<uint4*>(tile)[threadIdx.x] = v;\n}\n__syncthreads();\n"
          "y[threadIdx.x] = static_cast<float>(tile[threadIdx.x]);",
          lambda x: x.astype(np.float16).astype(np.float32) * np.where(np.arange(256) % 8 < 2, -1, 1)),
    Clean("bytes of one word from many threads", "__shared__ unsigned char flag[256];\n"
        "flag[threadIdx.x] = x[threadIdx.x] > 0.0f;\n"
          "__syncthreads();\ny[threadIdx.x] = flag[255 - threadIdx.x];", lambda x: x[::-1] > 0),
    Clean("atomics", "__shared__ int slot;\nif (threadIdx.x == 0) slot = 0;\n__syncthreads();\natomicAdd(&slot, 2);\n"
          "atomicMax(count + 1, int(threadIdx.x));\n__syncthreads();\ny[threadIdx.x] = slot;", lambda x: 512 + 0 * x),
    Clean("last block done", LAST_BLOCK, lambda x: np.concatenate([[x[:-1].sum()], x[:-1]]), before=BLOCK_SUM,
          grid=3, size=769),
    Clean("last block reads what all have added", LAST_BLOCK_OF_SUMS, None, grid=3, size=769),
    Clean("inactive threads", "float v = 0.0f;\nif (threadIdx.x < 200) v = x[threadIdx.x];\n"
          "v = SHFL_XOR(v, 1);\n__syncthreads();\ny[threadIdx.x] = v;",
          lambda x: np.where(np.arange(256) < 200, x, 0)[np.arange(256) ^ 1]),
    Clean("returns without a barrier", "y[threadIdx.x] = 0.0f;\nif (threadIdx.x >= 100) return;\n"
        "y[threadIdx.x] = x[threadIdx.x];",
          lambda x: np.where(np.arange(256) < 100, x, 0)),
    Clean("partial block", "float v = x[threadIdx.x];\nv += SHFL_DOWN(v, 1, 8);\ny[threadIdx.x] = v;",
          lambda x: x + np.where(np.arange(200) % 8 < 7, np.roll(x, -1), x), threads=200, size=200),
    Clean("spin lock", "if (threadIdx.x % WARP == 0) {\n  while (atomicCAS(count, 0, 1) != 0) { }\n"
        "  atomicExch(count, 0);\n}\n"
          "y[threadIdx.x] = x[threadIdx.x];", lambda x: x),
    Clean("a shared array of each template", "y[threadIdx.x] = reversed<1>(x) + reversed<2>(x);", lambda x: 3 * x[::-1],
          before="template <int N> __device__ float reversed(const float* x) {\n  __shared__ float tile[256];\n"
          "  tile[threadIdx.x] = N * x[threadIdx.x];\n  __syncthreads();\n  return tile[255 - threadIdx.x];\n}\n"),
    Clean("a lambda uses shared memory", "__shared__ float tile[256];\nauto put = [=](int i, float v) { tile[i] = v; "
        "};\n"
          "put(threadIdx.x, x[threadIdx.x]);\n__syncthreads();\n"
          "y[threadIdx.x] = tile[255 - threadIdx.x];", lambda x: x[::-1]),
    Clean("constant tables and device variables", "y[threadIdx.x] = table[threadIdx.x % 3] * x[threadIdx.x] + TWO;",
          lambda x: np.array([1, 2, 4])[np.arange(256) % 3] * x + 2,
          before="__constant__ float table[3] = {1.0f, 2.0f, 4.0f};\n__device__ const float TWO = 2.0f;\n"),
]  # fmt: skip


def run_clean(kernel: EmulatedKernel, case: Clean, **options: Any) -> None:
    x = np.random.default_rng(0).standard_normal(case.size).astype(np.float32)
    y = np.full_like(x, np.nan)
    count = np.zeros(4, np.int32)
    arguments = [buffer("x", x), output("y", y), buffer("count", count, writable=True)]
    kernel.launch((case.grid, 1, 1), (case.threads, 1, 1), case.shared_bytes, arguments, **options)
    if case.want is None:
        # which block is the last one differs between workers
        assert y[1:].max() == pytest.approx((x[1:].astype(np.float64) ** 2).sum(), rel=1e-5)
    else:
        np.testing.assert_allclose(y, case.want(x.astype(np.float64)), rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize(("warp", "check"), BUILDS)
@pytest.mark.parametrize("case", CLEAN, ids=lambda case: case.name)
def test_clean_kernel_is_right_and_raises_nothing(case: Clean, warp: int, check: bool) -> None:
    signature = 'extern "C" __global__ void __launch_bounds__(256)\nkernel(const float* x, float* y, int* count)'
    source = spelled(f"INCLUDE\n{case.before}{signature} {{\n{case.body}\n}}\n", warp)
    kernel = build(source, "kernel", warp=warp, check=check, filename="clean.cu")
    for seed in range(6):
        run_clean(kernel, case, seed=seed)


@pytest.mark.parametrize(("warp", "check"), BUILDS)
def test_two_dimensional_grid_and_block(warp: int, check: bool) -> None:
    source = """extern "C" __global__ void __launch_bounds__(64, 2) where(int* y) {
      int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
      int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
      y[block * blockDim.x * blockDim.y * blockDim.z + thread] = 1000 * block + thread;
    }"""
    y = np.full((2 * 3 * 4, 5 * 3 * 2), -1, np.int32)
    kernel = build(source, "where", warp=warp, check=check, filename="where.cu")
    kernel.launch((2, 3, 4), (5, 3, 2), 0, [output("y", y)])
    assert np.array_equal(y, 1000 * np.arange(24)[:, None] + np.arange(30))


# --- buffers


@needs_check
def test_buffers_may_overlap() -> None:
    source = 'extern "C" __global__ void twice(const float* x, float* y) { y[threadIdx.x] = 2.0f * x[threadIdx.x]; }'
    kernel = build(source, "twice", warp=32, check=True, filename="twice.cu")
    x = np.arange(64, dtype=np.float32)
    kernel.launch((1, 1, 1), (64, 1, 1), 0, [buffer("x", x), output("y", x)])
    assert np.array_equal(x, 2 * np.arange(64))


@needs_check
def test_address_and_permitted_range_are_independent() -> None:
    """A pointer into the middle of what may be read: negative indices are legal down to `start`."""
    source = 'extern "C" __global__ void shift(const float* x, float* y) { y[threadIdx.x] = x[int(threadIdx.x) - 4]; }'
    kernel = build(source, "shift", warp=32, check=True, filename="shift.cu")
    x, y = np.arange(64, dtype=np.float32), np.zeros(32, np.float32)
    kernel.launch((1, 1, 1), (32, 1, 1), 0, [Buffer("x", x.ctypes.data + 16, x.ctypes.data, 128), output("y", y)])
    assert np.array_equal(y, np.arange(32))


def test_every_scalar_type_arrives() -> None:
    source = """extern "C" __global__ void scalars(double* y, char a, unsigned short b, int c, unsigned d, long long e,
                                                   unsigned long long f, float g, double h, bool i) {
      y[0] = a; y[1] = b; y[2] = c; y[3] = d; y[4] = e; y[5] = f; y[6] = g; y[7] = h; y[8] = i;
    }"""
    y = np.zeros(9)
    kernel = build(source, "scalars", warp=32, check=False, filename="scalars.cu")
    scalars: Sequence[Any] = [
        ctypes.c_byte(-3), ctypes.c_ushort(65535), ctypes.c_int(-7), ctypes.c_uint(2**32 - 1),
        ctypes.c_longlong(-(2**40)), ctypes.c_ulonglong(2**52), ctypes.c_float(0.5), ctypes.c_double(1e300),
        ctypes.c_bool(True),
    ]  # fmt: skip
    kernel.launch((1, 1, 1), (1, 1, 1), 0, [output("y", y), *scalars])
    assert y.tolist() == [-3, 65535, -7, 2**32 - 1, -(2**40), 2**52, 0.5, 1e300, 1]


# --- wrong requests

COPY = """extern "C" __global__ void copy(const float* x, float* y, int n) {
  if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x];
}
"""


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        (lambda k, b: k.launch((1, 1, 1), (32, 1, 1), 0, [b, b]), "takes 3 arguments, and 2 were given"),
        (lambda k, b: k.launch((1, 1, 1), (32, 1, 1), 0, [b, b, ctypes.c_longlong(1)]), "argument 2 has 4 bytes"),
        (lambda k, b: k.launch((1, 1, 1), (1025, 1, 1), 0, [b, b, ctypes.c_int(1)]), "1025 threads"),
        (lambda k, b: k.launch((0, 1, 1), (32, 1, 1), 0, [b, b, ctypes.c_int(1)]), r"grid \(0, 1, 1\)"),
    ],
)  # fmt: skip
def test_launch_that_makes_no_sense_is_refused(launch: Any, says: str) -> None:
    kernel = build(COPY, "copy", warp=32, check=False, filename="copy.cu")
    with pytest.raises(LaunchError, match=says):
        launch(kernel, buffer("x", np.zeros(32, np.float32), writable=True))


def test_warp_width_is_32_or_64() -> None:
    with pytest.raises(LaunchError, match="16 lanes"):
        build(COPY, "copy", warp=16, check=False, filename="copy.cu")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("y[0] = missing;", "missing"),
        ("y[0] = INFINITY;", "INFINITY"),  # NVRTC has none either
        ("uint32_t i = 0; y[0] = i;", "uint32_t"),
        ("std::printf(0);", "std"),
        ("SHARED; y[0] = 1;", "shared_declaration_in_a_macro"),
    ],
)
def test_build_error_shows_the_log_and_the_source(body: str, says: str) -> None:
    source = f'#define SHARED __shared__ float s\nextern "C" __global__ void kernel(float* y) {{\n  {body}\n}}\n'
    with pytest.raises(EmulatorBuildError, match=says) as caught:
        build(source, "kernel", warp=32, check=False, filename="specs/wrong.cu")
    assert "specs/wrong.cu:3" in str(caught.value)
    assert f"    3 |   {body}" in str(caught.value)
    assert "fusegen_kernel.cu" not in str(caught.value)


# --- the rewriting of __shared__


def test_tokens_are_what_is_no_blank_comment_or_preprocessor_line() -> None:
    source = '#define a "b" \\\n c\n /* # */ # pragma d\nR"(\n#x")" # u8"/*" // e\n1\'000.5f::f \'\\\'\'\n'
    tokens = tokens_of(source)
    assert [token.text for token in tokens] == ['R"(\n#x")"', "#", 'u8"/*"', "1'000.5f", "::", "f", "'\\''"]
    assert [token.text for token in tokens if token.is_name] == ["f"]
    assert all(source[token.start : token.end] == token.text for token in tokens)


@pytest.mark.parametrize(
    ("declaration", "names"),
    [
        ("__shared__ float tile[32];", ["tile"]),
        ("static __shared__ int a, b[4];", ["a", "b"]),
        ("__shared__ __align__(16) unsigned char raw[64 * sizeof(float)];", ["raw"]),
        ("__shared__ alignas(32) unsigned long long wide[4];", ["wide"]),
        ("__attribute__((aligned(64))) __shared__ float aligned_one[4];", ["aligned_one"]),
        ("__shared__ Pair<float, 4> pairs[2][3];", ["pairs"]),
        ("__shared__ struct Plain plain;", ["plain"]),
        ("__shared__ volatile int flag;", ["flag"]),
        ("__shared__ float* pointers[3];", ["pointers"]),
        ("__shared__ const float* const* p, *q[2];", ["p", "q"]),
        ("__shared__ float grid[(3 < 4) ? 2 : 1], last;", ["grid", "last"]),
        ("__shared__ float /* __shared__ float no; */ commented[4]; // __shared__", ["commented"]),
    ],
)
@needs_check
def test_forms_of_shared_declarations(declaration: str, names: list[str]) -> None:
    before = "template <class T, int N> struct Pair { T at[N]; };\nstruct Plain { int at; };\n"
    uses = "".join(f"  y[{place}] = sizeof({name});\n" for place, name in enumerate(names))
    source = f'{before}extern "C" __global__ void kernel(int* y) {{\n  {declaration}\n{uses}}}\n'
    sizes = []
    for check in (False, True):
        y = np.zeros(8, np.int32)
        build(source, "kernel", warp=32, check=check, filename="forms.cu").launch(
            (1, 1, 1), (1, 1, 1), 0, [output("y", y)]
        )
        sizes.append(y.tolist())
        rewritten = rewrite_shared(source).text
        assert rewritten.count("\n") == source.count("\n")
        assert "__shared__ float" not in rewritten.replace("/* __shared__ float no; */", "")
    assert sizes[0] == sizes[1]


def test_lines_stay_where_they_are() -> None:
    source = "void f() {\n  extern __shared__\n    __align__(128)\n  float tile[];\n  tile[0] = 1;\n}\n"
    rewritten = rewrite_shared(source)
    assert rewritten.dynamic_alignment == 128
    assert rewritten.text.splitlines()[4] == "  tile[0] = 1;"
    assert "float* const tile" in rewritten.text


def test_text_without_shared_memory_is_unchanged() -> None:
    source = '#define S __shared__\n// __shared__ int a;\n/* __shared__\n int b; */ auto s = "__shared__ int c;";\n'
    assert rewrite_shared(source).text == source


@pytest.mark.parametrize(("warp", "check"), BUILDS)
def test_dynamic_shared_declared_outside_a_function(warp: int, check: bool) -> None:
    source = """namespace inner {
    extern __shared__ float tile[];
    }
    extern "C" __global__ void kernel(float* y) {
      inner::tile[threadIdx.x] = threadIdx.x;
      __syncthreads();
      y[threadIdx.x] = *(inner::tile + (63 - threadIdx.x));
    }"""
    y = np.zeros(64, np.float32)
    kernel = build(source, "kernel", warp=warp, check=check, filename="outside.cu")
    kernel.launch((1, 1, 1), (64, 1, 1), 256, [output("y", y)])
    assert np.array_equal(y, np.arange(64)[::-1])


@needs_check
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("__shared__ float tile[32];\n", "line 1: .*inside a function"),
        ("void f() {\n  __shared__ float tile[2] = {};\n}\n", "line 2: .*no initialiser"),
        ("void f() {\n  __shared__ float (*rows)[2];\n}\n", "line 2: "),
    ],
)
def test_shared_declaration_that_is_not_understood_is_refused(source: str, says: str) -> None:
    with pytest.raises(EmulatorBuildError, match=says):
        rewrite_shared(source)


# --- the machinery

QUICK = (*toolchain._RUNTIME_FLAGS, "-O0")


def copies(kernel: EmulatedKernel) -> bool:
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    kernel.launch((1, 1, 1), (32, 1, 1), 0, [buffer("x", x), buffer("y", y, writable=True), ctypes.c_int(32)])
    return np.array_equal(x, y)


@pytest.fixture
def fresh_workplace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has built nothing yet. It makes the runtime in half the time: that is never cached here."""
    monkeypatch.setattr(toolchain, "_RUNTIME_FLAGS", QUICK)
    workplace.workplace_of.cache_clear()
    yield
    workplace.workplace_of.cache_clear()


@pytest.fixture
def runtime_at_hand() -> None:
    """This process has the runtime already: what is tested is about kernels, or about a cache that lacks it."""
    toolchain.build_runtime(compiler(), check=False, cache=None)


@pytest.fixture(scope="module")
def small_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds COPY and a runtime made with QUICK."""
    folder = tmp_path_factory.mktemp("small-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "_RUNTIME_FLAGS", QUICK)
        build(COPY, "copy", warp=32, check=False, filename="a.cu", cache_dir=folder)
    return folder


@pytest.mark.usefixtures("runtime_at_hand")
def test_cache_is_used_and_told_apart_by_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fusegen.cache")
    first = build(COPY, "copy", warp=32, check=False, filename="a.cu", cache_dir=tmp_path)
    assert "miss: copy for warp 32, fast: never made before" in caplog.text
    again = build(COPY, "copy", warp=32, check=False, filename="b.cu", cache_dir=tmp_path)
    assert "hit: copy for warp 32, fast" in caplog.text
    assert again.library == first.library
    other = build(COPY, "copy", warp=64, check=False, filename="a.cu", cache_dir=tmp_path)
    assert other.library != first.library
    build(COPY + "\n", "copy", warp=32, check=False, filename="a.cu", cache_dir=tmp_path)
    assert "miss: copy for warp 32, fast: its text is different" in caplog.text
    assert {file.suffix for file in tmp_path.glob("[!.]*")} == {".library"}
    assert len(list(tmp_path.glob("[!.]*"))) == 6  # three kernels, the runtime, the dialect for each warp


@pytest.mark.parametrize("contract", [False, True])
@pytest.mark.parametrize(("warp", "check"), BUILDS)
def test_gcc_parses_the_dialect_once_for_all_kernels(
    warp: int, check: bool, contract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With -H it marks a precompiled header that it takes by `!`, and one that it can't use by `x`."""
    if toolchain.compiler_for(check=check).family != "gcc":
        pytest.skip("clang reads the header itself")
    run, compilations = toolchain._run, list[list[str]]()

    def recorded(command: list[str], made: Path) -> str | None:
        compilations.extend([command] if "-c" in command else [])
        return run(command, made)

    monkeypatch.setattr(toolchain, "_run", recorded)
    build(f"{COPY}// {tmp_path}", "copy", warp=warp, check=check, contract=contract, filename="a.cu")
    ((*command, _),) = compilations
    source = tmp_path / "another.cu"
    source.write_text("void another() {}\n")
    read = subprocess.run([*command, str(source), "-H", "-o", str(tmp_path / "a.o")], capture_output=True, text=True)
    assert re.fullmatch(r"! \S+/dialect_\w+\.h\.gch\n", read.stderr)


@pytest.mark.usefixtures("runtime_at_hand")
def test_the_cache_is_where_the_user_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "mine"))
    build(COPY, "copy", warp=32, check=False, filename="a.cu")
    assert len(list((tmp_path / "mine/emulator").glob("copy-warp_32__fast-*.library"))) == 1


@pytest.mark.usefixtures("fresh_workplace")
def test_a_cache_that_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "file"))
    for warp in (32, 64):
        assert copies(build(COPY, "copy", warp=warp, check=False, filename="a.cu"))
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith(f"the cache in {tmp_path}/file can't be written: Not a directory")
    assert "name another folder in FUSEGEN_CACHE_DIR" in said


@pytest.mark.usefixtures("runtime_at_hand")
def test_a_cache_that_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_SIZE", "0")
    first = build(COPY, "copy", warp=32, check=False, filename="a.cu", cache_dir=tmp_path)
    assert copies(first)
    assert list(tmp_path.iterdir()) == []
    built = first.library.stat().st_mtime_ns
    build(COPY, "copy", warp=32, check=False, filename="a.cu", cache_dir=tmp_path)
    assert first.library.stat().st_mtime_ns == built, "this process has it, and builds it once"


def test_nowhere_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workplace, "workplace_of", lambda process: tmp_path / "not/there")
    with pytest.raises(
        EmulatorUnavailable, match=r"can't: No such file or directory\n.* name another folder in TMPDIR"
    ):
        build(COPY, "copy", warp=32, check=False, filename="a.cu", cache_dir=tmp_path)


@pytest.mark.usefixtures("fresh_workplace")
def test_a_compiler_that_finds_the_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is not the kernel's fault, whose exit code would be 1."""
    full = tmp_path / "g++"
    full.write_text("#!/bin/sh\necho 'fatal error: error writing to k.o: No space left on device' >&2\nexit 1\n")
    full.chmod(0o755)
    monkeypatch.setattr(toolchain, "compiler_for", lambda check: Compiler((str(full),), "g++ 99", "gcc"))
    with pytest.raises(EmulatorUnavailable, match=r"can't: No space left on device\n"):
        build(COPY, "copy", warp=32, check=False, filename="a.cu", cache_dir=tmp_path)


@needs_check
def test_memory_that_runs_out_is_not_the_kernels_fault() -> None:
    kernel = build(COPY, "copy", warp=32, check=True, filename="a.cu")
    x = np.zeros(32, np.float32)
    huge = Buffer("y", x.ctypes.data, x.ctypes.data, 2**60)  # its shadow is larger still
    with pytest.raises(EmulatorUnavailable, match=r"^a\.cu: the emulator could not get memory or threads"):
        kernel.launch((1, 1, 1), (32, 1, 1), 0, [buffer("x", x), huge, ctypes.c_int(32)])


@pytest.mark.parametrize("length", [10, -1])
@pytest.mark.usefixtures("fresh_workplace")
def test_a_library_cut_short_is_built_anew(
    tmp_path: Path, small_cache: Path, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The loader would refuse it, or crash."""
    for file in small_cache.glob("*.library"):
        (tmp_path / file.name).write_bytes(file.read_bytes()[:length])
    with caplog.at_level(logging.DEBUG, "fusegen.cache"):
        assert copies(build(COPY, "copy", warp=32, check=False, filename="a.cu", cache_dir=tmp_path))
    assert caplog.text.count("is damaged: ") == 3  # the kernel, the runtime, the dialect
    for file in tmp_path.glob("*.library"):
        entries.unpack(file.read_bytes())


@pytest.mark.usefixtures("runtime_at_hand")
def test_what_a_process_has_built_outlives_the_cache(tmp_path: Path) -> None:
    """Another process may clear it at any time; a fault still knows its line."""
    source = 'extern "C" __global__ void bad(float* y) {\n  if (threadIdx.x < 5)\n    __syncthreads();\n}'
    kernel = build(source, "bad", warp=32, check=False, filename="bad.cu", cache_dir=tmp_path)
    assert sum(usage.entries for usage in storage.clear(tmp_path).removed.values()) == 3
    y = np.zeros(32, np.float32)
    with pytest.raises(KernelFault, match=r"^bad\.cu:3: divergent-barrier"):
        kernel.launch((1, 1, 1), (32, 1, 1), 0, [buffer("y", y, writable=True)])
    assert build(source, "bad", warp=32, check=False, filename="bad.cu", cache_dir=tmp_path).library == kernel.library
    assert storage.survey(tmp_path)["emulator"].entries == 2


@pytest.mark.usefixtures("runtime_at_hand")
def test_a_fault_without_its_line_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'extern "C" __global__ void bad(float* y) {\n  y[1ull << 45] = 1.0f;\n}'
    kernel = build(source, "bad", warp=32, check=False, filename="bad.cu", cache_dir=tmp_path)
    y = np.zeros(32, np.float32)
    with pytest.raises(KernelFault, match=r"^bad\.cu:2: segfault"):
        kernel.launch((1, 1, 1), (32, 1, 1), 0, [buffer("y", y, writable=True)])
    monkeypatch.setattr("fusegen.emulator.kernel.line_tool", lambda: None)
    with pytest.raises(KernelFault, match=r"(?s)^bad\.cu: bad: segfault.*there is no addr2line here; apt "):
        kernel.launch((1, 1, 1), (32, 1, 1), 0, [buffer("y", y, writable=True)])


def test_a_process_that_was_killed_leaves_its_folder_to_the_next(tmp_path: Path) -> None:
    program = f"""
import os, sys, tempfile
tempfile.tempdir = {str(tmp_path)!r}
from fusegen.emulator.workplace import workplace
print(workplace(), flush=True)
sys.stdin.readline()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def start() -> tuple[subprocess.Popen[str], Path]:
        made = subprocess.Popen(
            [sys.executable, "-c", program], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert made.stdout is not None
        return made, Path(made.stdout.readline().strip())

    (killed, abandoned), (living, used) = start(), start()
    killed.kill()
    killed.communicate()
    for folder in (abandoned, used):
        os.utime(folder / workplace.LOCK, (0, 0))  # long ago
    (tmp_path / "fusegen-emulator-mine").mkdir()  # somebody's own
    last, third = start()
    assert {path.name for path in tmp_path.iterdir()} == {used.name, third.name, "fusegen-emulator-mine"}
    for process in (living, last):
        process.communicate("\n")
    assert [path.name for path in tmp_path.iterdir()] == ["fusegen-emulator-mine"]


def test_many_processes_share_a_cache(tmp_path: Path) -> None:
    """While one more clears it again and again."""
    program = f"""
import ctypes, numpy as np
from pathlib import Path
from fusegen.emulator import Buffer, build, compiler, toolchain
toolchain.build_runtime(compiler(), check=False, cache=None)  # from the user's cache, and from here on into that one
x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
buffers = [Buffer(n, a.ctypes.data, a.ctypes.data, a.nbytes) for n, a in (("x", x), ("y", y))]
for turn in range(8):
    kernel = build({COPY!r}, "copy", warp=32, check=False, filename="copy.cu", cache_dir=Path({str(tmp_path)!r}))
    y[:] = 0
    kernel.launch((1, 1, 1), (32, 1, 1), 0, [*buffers, ctypes.c_int(32)])
    assert (x == y).all()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(4)]
    while any(process.poll() is None for process in processes):
        storage.clear(tmp_path)
        time.sleep(0.05)
    assert [process.returncode for process in processes] == [0, 0, 0, 0]


def test_of_many_processes_one_compiles_and_the_others_wait(tmp_path: Path) -> None:
    """Each would take some 300 MB and 15 s for the runtime alone."""
    program = f"""
import os, time
from pathlib import Path
from fusegen.emulator import toolchain
key = toolchain.LibraryKey("runtime", "check", "text", "", "", "", "")
def make(library):
    with Path({str(tmp_path / "made")!r}).open("a") as log:
        log.write("once\\n")
    time.sleep(1)
    library.write_bytes(b"code")
own = toolchain.workplace() / "library.so"
assert toolchain._provide(own, key, Path({str(tmp_path / "cache")!r}), make) is None
assert own.read_bytes() == b"code"
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(6)]
    assert [process.wait() for process in processes] == [0] * 6
    made = (tmp_path / "made").read_text().splitlines()
    assert 1 <= len(made) <= 2  # one that looked just before the first had stored it finds no lock


@pytest.mark.parametrize(("warp", "check"), BUILDS)
def test_launches_from_several_threads(warp: int, check: bool) -> None:
    case = next(case for case in CLEAN if case.name == "block reduction")
    source = spelled(
        f'{case.before}extern "C" __global__ void kernel(const float* x, float* y, int* count) {{\n{case.body}\n}}\n',
        warp,
    )
    kernel = build(source, "kernel", warp=warp, check=check, filename="threads.cu")
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for seed in range(5):
                run_clean(kernel, case, seed=seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_number_of_workers_does_not_change_the_result() -> None:
    source = 'extern "C" __global__ void mark(int* y) { y[blockIdx.x * blockDim.x + threadIdx.x] += blockIdx.x; }'
    kernel = build(source, "mark", warp=32, check=False, filename="mark.cu")
    for workers in (1, 2, 7, 100):
        y = np.ones((50, 32), np.int32)
        kernel.launch((50, 1, 1), (32, 1, 1), 0, [buffer("y", y, writable=True)], workers=workers)
        assert np.array_equal(y, 1 + np.repeat(np.arange(50), 32).reshape(50, 32))


def test_ucontext_fallback_runs(tmp_path: Path) -> None:
    """What machines other than x86-64 and aarch64 use: the same blocks, switched by the C library."""
    library = toolchain.build_runtime(compiler(), check=False, cache=tmp_path, extra=["-DSIMT_UCONTEXT"])
    case = next(case for case in CLEAN if case.name == "block reduction")
    source = spelled(
        f'{case.before}extern "C" __global__ void kernel(const float* x, float* y, int* count) {{\n{case.body}\n}}\n',
        32,
    )
    text = rewrite_shared(source).text + "\nSIMT_EXPORT(kernel, (), ())\n"
    made, log = toolchain.build_kernel(text, entry="kernel", warp=32, check=False, cache=tmp_path, runtime=library)
    assert log is None
    kernel = EmulatedKernel(made, source, "kernel", "fallback.cu", warp=32, check=False, alignment=16)
    for seed in range(3):
        run_clean(kernel, case, seed=seed)


def test_compilers_and_what_they_can_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = compiler()
    assert found.version
    assert found.family in ("gcc", "clang")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    toolchain.compiler.cache_clear()
    toolchain._identify.cache_clear()
    try:
        with pytest.raises(EmulatorUnavailable, match=r"apt install g\+\+.*pip install ziglang"):
            compiler()
        clang = Compiler(("clang++",), "clang version 19", "clang")
        monkeypatch.setattr(toolchain, "compiler", lambda: clang)
        assert toolchain.compiler_for(check=False) is clang
        with pytest.raises(EmulatorUnavailable, match=r"the checking build needs g\+\+"):
            toolchain.compiler_for(check=True)
    finally:
        monkeypatch.undo()
        toolchain.compiler.cache_clear()
        toolchain._identify.cache_clear()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    toolchain.compiler.cache_clear()
    toolchain._identify.cache_clear()
    yield
    toolchain.compiler.cache_clear()
    toolchain._identify.cache_clear()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("script", "why"),
    [
        (None, "there is no program "),
        (
            'test "$1" = -dumpversion && echo 9.4.0 || echo "c++ (GCC) 9.4.0"',
            "it is gcc 9, and the emulator needs 12 or later",
        ),
        ("echo 'clang version 14.0.0'", "it is clang 14, and the emulator needs 15 or later"),
        ("exit 1", "it does not say its version as a C++ compiler does"),
        ("echo hello", "it does not say its version as a C++ compiler does"),
    ],
)
def test_a_chosen_compiler_that_can_not_be_used_is_said(
    script: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command = tmp_path / "odd c++"
    if script is not None:
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{command}'")
    for _ in range(3):
        used = compiler()
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith(f"CXX='{command}' can't be used: {why}")
    assert said.endswith(f"the emulator uses {used} instead; set CXX to another compiler, or unset it")
    monkeypatch.setenv("CXX", str(used))
    assert toolchain.unusable_choice() == ""
    monkeypatch.setenv("CXX", "g++ 'and a quotation")
    assert "there is no program g++ 'and a quotation" in toolchain.unusable_choice()
