"""Small kernels for the emulator's tests: y = want(x), or a planted bug and what must be said of it.

A program is real CUDA: `compile_cuda` hands it to NVRTC too, so that no test masked_values on a dialect of the
emulator's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fusegen.compiling import compile_source
from fusegen.emulator import Buffer, KernelFault, build
from fusegen.errors import MissingError
from fusegen.targets import H200, Target

Array = npt.NDArray[Any]


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


def compile_for(target: Target, text: str, threads: int = 128, shared_bytes: int = 0) -> None:
    """Compile for this target, or skip where its compiler is missing."""
    try:
        compile_source(text, "kernel", target, filename="program.cu", threads=threads, dynamic_shared=shared_bytes)
    except MissingError as missing:
        pytest.skip(str(missing))


def compile_all_for(target: Target, texts: Sequence[str], threads: int = 128) -> None:
    """Compile these for this target, each in a namespace of its own: what a compiler does before it comes to the first
    kernel takes hiprtc 0.2 s, and a kernel 0.01. An error has the line of its kernel in the message."""
    named = [re.sub(r"\bkernel(?=\()", f"kernel_{number}", text) for number, text in enumerate(texts)]
    parts = [f"namespace program_{number} {{\n{text}\n}}" for number, text in enumerate(named)]
    try:
        compile_source("\n".join(parts), "kernel_0", target, filename="programs.cu", threads=threads)
    except MissingError as missing:
        pytest.skip(str(missing))


def compile_cuda(text: str, threads: int = 128, shared_bytes: int = 0) -> None:
    compile_for(H200, text, threads, shared_bytes)


def launch(
    source: str, arrays: Sequence[Array], *, check: bool, warp: int = 32, seed: int = 0, threads: int = 128,
    grid: tuple[int, int, int] = (1, 1, 1), shared_bytes: int = 0, maps: Sequence[Any] = (),
    arch: str = "",
) -> None:  # fmt: skip
    """Run a kernel of `maps`, then pointers: the last array is what it writes, and starts as nothing."""
    kernel = build(source, "kernel", warp=warp, check=check, filename="program.cu", arch=arch)
    names = [*"abcdefgh"[: len(arrays) - 1], "out"]
    buffers = [
        Buffer(name, each.ctypes.data, each.ctypes.data, each.nbytes, writable=name == "out", initialised=name != "out")
        for name, each in zip(names, arrays, strict=True)
    ]
    kernel.launch(grid, (threads, 1, 1), shared_bytes, [*maps, *buffers], seed=seed)


# --- device code that several of them use

MBARRIER = """
typedef unsigned long long mbarrier_t;
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void init(mbarrier_t* bar, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void publish_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(mbarrier_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(bar)) : "memory"); // ARRIVE
}
__device__ __forceinline__ void expect(mbarrier_t* bar, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(mbarrier_t* bar, unsigned parity) {
  unsigned done;
  do {
    asm volatile("{\\n\\t.reg .pred p;\\n\\t" // WAIT
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\\n\\t"
                 "selp.u32 %0, 1, 0, p;\\n\\t}"
                 : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
  } while (!done);
}
__device__ __forceinline__ void wait_in_ptx(mbarrier_t* bar, unsigned parity) {
  asm volatile("{\\n\\t.reg .pred P1;\\n\\tLAB_WAIT:\\n\\t"
               "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\\n\\t"
               "@P1 bra DONE;\\n\\tbra LAB_WAIT;\\n\\tDONE:\\n\\t}"
               :: "r"(shared_address(bar)), "r"(parity) : "memory");
}
__device__ __forceinline__ void poll(mbarrier_t* bar, unsigned parity) {
  unsigned done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;" // POLL
                 "  selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
  }
}
__device__ __forceinline__ void load(void* to, const void* from, unsigned bytes, mbarrier_t* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" // LOAD
               :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ void store(void* to, const void* from, unsigned bytes) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" // STORE
               :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
"""
# NVRTC has no <cuda.h>; the type is 128 opaque bytes.
TENSOR_MAP = """
struct alignas(64) CUtensorMap { unsigned long long opaque[16]; };
"""
# The last block to finish reads what all have written.
LAST_BLOCK = """
y[128 * blockIdx.x + i] = tile[i];
__threadfence();
__syncthreads();
__shared__ int last;
if (i == 0) last = atomicAdd(&finished, 1) % gridDim.x == gridDim.x - 1;
__syncthreads();
if (last) {
  for (int b = 0; b < gridDim.x; ++b) y[128 * b + i] *= 2.0f;
}
"""
