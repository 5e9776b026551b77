"""cp.async in the emulator: right pipelines, and each way to get one wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fusegen.emulator import KernelFault
from fusegen.targets import H200
from tests.programs import Array, Program, compile_all_for, numbers, require_fault, require_right, run
from tests.tools import BUILDS, needs_check, needs_compiler

pytestmark = needs_compiler

COPY = """
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
template <int Bytes>
__device__ __forceinline__ void copy(void* to, const void* from, int filled = Bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
               :: "r"(shared_address(to)), "l"(from), "n"(Bytes), "r"(filled) : "memory");
}
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from));
}
__device__ __forceinline__ void copy_once(void* to, const void* from, int filled) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               :: "r"(shared_address(to)), "l"(from), "r"(filled), "l"(policy) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Left>
__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(Left) : "memory"); }
__device__ __forceinline__ void wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
"""
# Two stages of 32 floats: a stage is filled while the other is being read.
PIPELINE = """
__shared__ alignas(16) float tile[2][32];
const int i = threadIdx.x;
if (i < 8) copy16(&tile[0][4 * i], x + 4 * i);
commit();
for (int k = 0; k < n / 32; ++k) {
  if (i < 8 && k + 1 < n / 32) copy16(&tile[(k + 1) & 1][4 * i], x + 32 * (k + 1) + 4 * i);
  commit();
  WAIT
  __syncthreads();
  if (i < 32) y[32 * k + i] = tile[k & 1][31 - i]; // BUG
  FREE
}
"""


def pipeline(wait: str, free: str) -> str:
    return PIPELINE.replace("WAIT", wait).replace("FREE", free)


def reversed_by_32(x: Array) -> Array:
    return x.reshape(-1, 32)[:, ::-1].ravel()


TILE = "__shared__ alignas(16) float tile[128];\nconst int i = threadIdx.x;\n"


def issue(form: str, addresses: str, *sizes: str, more: str = "0") -> str:
    """One copy by each thread, in the open: a fault that its issue raises is on this line."""
    to, source = addresses.rsplit(", ", 1)
    return (f'{TILE}asm volatile("cp.async.{form} [%0], [%1], {", ".join(sizes)};" // BUG\n'
            f'  :: "r"({to}), "l"({source}), "r"({more}));\n'
            "wait_all();\n__syncthreads();\ny[i] = tile[i];")  # fmt: skip


RIGHT = [
    Program("a block shares what its threads have copied",
            f"{TILE}if (i < 32) copy16(tile + 4 * i, x + 4 * i);\ncommit();\nwait<0>();\n__syncthreads();\n"
            "y[i] = tile[127 - i];", lambda x: x[::-1], COPY),
    Program("a thread needs no barrier for its own copy",
            f"{TILE}copy<4>(tile + i, x + i);\nwait_all();\ny[i] = tile[i];", lambda x: x, COPY),
    Program("a warp needs no more than its own barrier",
            f"{TILE}copy<4>(tile + i, x + i);\nwait_all();\n__syncwarp();\ny[i] = tile[i ^ 31];",
            lambda x: x[np.arange(128) ^ 31], COPY),
    Program("8 bytes, zeros behind what is given",
            f"{TILE}if (i < 64) copy<8>(tile + 2 * i, x + 2 * i, i == 5 ? 0 : i == 7 ? 4 : 8);\nwait_all();\n"
            "__syncthreads();\ny[i] = tile[i];",
            lambda x: np.where(np.isin(np.arange(128), [10, 11, 15]), 0, x), COPY),
    Program("no source is read when nothing is taken from it",
            f"{TILE}if (i < 32) copy<16>(tile + 4 * i, x + 4 * i + n, 0);\nwait_all();\n__syncthreads();\n"
            "y[i] = tile[i];", lambda x: np.zeros(128), COPY),
    Program("a copy that hints at the caches",
            f"{TILE}if (i < 32) copy_once(tile + 4 * i, x + 4 * i, i == 5 ? 0 : i == 7 ? 8 : 16);\nwait_all();\n"
            "__syncthreads();\ny[i] = tile[i];",
            lambda x: np.where(np.isin(np.arange(128), [20, 21, 22, 23, 30, 31]), 0, x), COPY),
    Program("a pipeline of two stages", pipeline("wait<1>();", "__syncthreads();"), reversed_by_32, COPY, size=256),
    Program("dynamic shared memory, several blocks",
            "extern __shared__ __align__(16) float tile[];\nconst int i = threadIdx.x, at = 128 * blockIdx.x;\n"
            "if (i < 32) copy16(tile + 4 * i, x + at + 4 * i);\nwait_all();\n__syncthreads();\n"
            "y[at + i] = tile[127 - i];",
            lambda x: x.reshape(-1, 128)[:, ::-1].ravel(), COPY, blocks=3, size=384, shared_bytes=512),
    Program("the copy is not waited for by the thread that ends", f"{TILE}copy<4>(tile + i, x + i);\ny[i] = 1.0f;",
            lambda x: np.ones(128), COPY),
]  # fmt: skip

BUGS = [
    Program("no wait", f"{TILE}copy<4>(tile + i, x + i);\ncommit();\n__syncthreads();\ny[i] = tile[127 - i]; // BUG",
            before=COPY, kind="race", says="while the copy into it is under way that thread ("),
    Program("no wait for its own copy", f"{TILE}copy<4>(tile + i, x + i);\ny[i] = tile[i]; // BUG", before=COPY,
            kind="race", says="has issued and not waited for"),
    Program("waits for too few groups", pipeline("wait<2>();", "__syncthreads();"), before=COPY, size=256, kind="race",
            says="has issued and not waited for"),
    Program("waits without a commit",
            f"{TILE}copy<4>(tile + i, x + i);\nwait<0>();\n__syncthreads();\ny[i] = tile[i]; // BUG", before=COPY,
            kind="race", says="has issued and not waited for"),
    Program("no barrier behind the wait",
            f"{TILE}copy<4>(tile + i, x + i);\nwait_all();\ny[i] = tile[127 - i]; // BUG", before=COPY, kind="race",
            says="is not ordered with"),
    Program("a barrier in front of the wait",
            f"{TILE}copy<4>(tile + i, x + i);\n__syncthreads();\nwait_all();\ny[i] = tile[127 - i]; // BUG",
            before=COPY, kind="race"),
    Program("a stage is filled while others read it", pipeline("wait<1>();", ""), before=COPY, size=256, kind="race"),
    Program("a store into a copy's destination",
            f"{TILE}copy<4>(tile + i, x + i);\ntile[i] = 1.0f; // BUG\nwait_all();\ny[i] = tile[i];", before=COPY,
            kind="race", says="write of byte"),
    Program("two copies into one place",
            f"{TILE}copy<4>(tile + i / 2, x + i);\nwait_all();", kind="race", says="write of byte",
            before=COPY.replace("%2, %3;\"", "%2, %3;\" // BUG")),
    Program("a misaligned source", issue("ca.shared.global", "shared_address(tile), x + 1", "8"), before=COPY,
            kind="misaligned",
            says="a copy of 8 bytes with its source at"),
    Program("a misaligned destination", issue("cg.shared.global", "shared_address(tile + 2), x", "16"), before=COPY,
            kind="misaligned",
            says="a copy of 16 bytes with its destination at"),
    Program("a source beyond the end", issue("cg.shared.global", "shared_address(tile), x + n", "16"), before=COPY,
            kind="out-of-bounds", says="read of 16 bytes at byte 512 of x"),
    Program("a destination beyond the end", issue("ca.shared.global", "shared_address(tile + n), x", "4"), before=COPY,
            kind="out-of-bounds", says="write of 4 bytes at byte 512 of tile"),
    Program("a generic pointer cut to 32 bits",
            issue("ca.shared.global", "(unsigned)(unsigned long long)tile & 0xffffff, x", "4"), before=COPY,
            kind="out-of-bounds", says="is no address of shared memory"),
    Program("a global pointer taken for shared", "y[threadIdx.x] = __cvta_generic_to_shared(x); // BUG",
            kind="out-of-bounds", says="is no address in shared memory"),
    Program("more source than the copy has",
            issue("ca.shared.global", "shared_address(tile + i), x", "4", "%2", more="n / 16"),
            before=COPY, kind="out-of-bounds", says="a copy of 4 bytes with 8 bytes of source"),
    Program("an output's bytes are copied before they are written",
            f"{TILE}asm volatile(\"cp.async.ca.shared.global [%0], [%1], 4;\" // BUG\n"
            " :: \"r\"(shared_address(tile + i)), \"l\"(y + i));\nwait_all();\n__syncthreads();\ny[i] = tile[i];",
            before=COPY, kind="uninitialised", says="of y, which nothing has written"),
]  # fmt: skip


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.name)
def test_right_copies(program: Program, check: bool) -> None:
    require_right(program, check=check)


@needs_check
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("program", BUGS, ids=lambda program: program.name)
def test_planted_bug_is_reported_where_it_stands(program: Program, seed: int) -> None:
    require_fault(program, check=True, seed=seed)


def test_the_programs_are_cuda() -> None:
    compile_all_for(H200, [program.source for program in (*RIGHT, *BUGS)])


def test_a_missing_wait_shows_in_the_numbers_when_copies_land_late() -> None:
    bug = next(bug for bug in BUGS if bug.name == "no wait")
    want = numbers(128)[::-1]
    assert np.array_equal(run(bug, check=False, seed=0), want)
    for seed in range(1, 6):
        assert np.any(np.isnan(run(bug, check=False, seed=seed)))


def test_a_stage_filled_too_early_shows_in_the_numbers_when_copies_land_at_once() -> None:
    bug = next(bug for bug in BUGS if bug.name == "a stage is filled while others read it")
    # the copying warp comes round to its next copy before the last warp has read
    body = bug.body.replace("if (i < 32) y[32 * k + i]", "if (i >= 96) y[32 * k + i - 96]").replace("31 - i", "127 - i")
    late = replace(bug, body=body)
    want = reversed_by_32(numbers(256))
    assert not np.array_equal(run(late, check=False, seed=0), want)
    right = replace(late, body=body.rstrip("}\n") + "\n__syncthreads();\n}\n")
    for seed in range(6):
        assert np.array_equal(run(right, check=False, seed=seed), want)


@needs_check
def test_alignment_is_checked_in_the_fast_build_too() -> None:
    bug = next(bug for bug in BUGS if bug.name == "a misaligned source")
    with pytest.raises(KernelFault, match="misaligned"):
        run(bug, check=False)
