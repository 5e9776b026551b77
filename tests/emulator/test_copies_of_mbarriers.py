"""Copies of 16 bytes that an mbarrier is told of, once they are there: right programs, and ways to get one wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fusegen.targets import H200
from tests.programs import MBARRIER, Program, compile_all_for, numbers, require_fault, require_right, run
from tests.tools import BUILDS, needs_check, needs_compiler

pytestmark = needs_compiler

COPIES = (
    MBARRIER
    + """
__device__ void copy(const void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from) : "memory"); // COPY
}
__device__ void arrive_with_copies(mbarrier_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(shared_address(bar)) : "memory"); // TELL
}
__device__ void store_as_it_is(float* to, const void* from) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;" // READ
               :: "l"(to), "r"(shared_address(from)) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
"""
)
HEAD = """
__shared__ alignas(128) float tile[128];
__shared__ mbarrier_t bar;
const int i = threadIdx.x;
if (i == 0) { init(&bar, 32); publish_init(); }
__syncthreads();
"""
# Stages of 128 floats, which a warp fills, 16 bytes a lane, and the others read.
RING = """
__shared__ alignas(128) float stage[2][128];
__shared__ mbarrier_t full[2], empty[2];
const int i = threadIdx.x, tiles = n / 128;
if (i == 0) {
  for (int s = 0; s < 2; ++s) { init(&full[s], 32); init(&empty[s], 96); }
  publish_init();
}
__syncthreads();
for (int k = 0; k < tiles; ++k) {
  const int s = k & 1;
  const unsigned parity = k >> 1 & 1;
  if (i < 32) {
    wait(&empty[s], parity ^ 1);
    copy(stage[s] + 4 * i, x + 128 * k + 4 * i);
    arrive_with_copies(&full[s]);
  } else {
    wait(&full[s], parity);
    for (int j = i - 32; j < 128; j += 96) y[128 * k + j] = stage[s][127 - j];
    arrive(&empty[s]);
  }
}
"""
COPY = f"{HEAD}if (i < 32) {{ copy(tile + 4 * i, x + 4 * i); arrive_with_copies(&bar); }}\n"
READ = "wait(&bar, 0);\ny[i] = tile[127 - i];"
FENCE = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
STORE = f"if (i == 64) {{ wait(&bar, 0); {FENCE} store_as_it_is(y, tile); wait_read(); }}"


def at(word: str) -> str:
    """The device functions, with the bug's line at `word`."""
    return COPIES.replace(f"// {word}", "// BUG")


RIGHT = [
    Program("copies of a warp, waited for by all", COPY + READ, lambda x: x[::-1], COPIES),
    Program("several copies of each thread", f"{HEAD.replace('32', '8')}if (i < 8) {{\n"
            "  for (int v = 0; v < 4; ++v) copy(tile + 32 * v + 4 * i, x + 32 * v + 4 * i);\n"
            "  arrive_with_copies(&bar);\n}\n" + READ, lambda x: x[::-1], COPIES),
    Program("no copy", f"{HEAD}if (i >= 32 && i < 64) arrive_with_copies(&bar);\nwait(&bar, 0);\ny[i] = 1.0f;",
            lambda x: np.ones_like(x), COPIES),
    Program("a ring of two stages", RING, lambda x: x.reshape(-1, 128)[:, ::-1].ravel(), COPIES, size=128 * 5),
    Program("stored by a bulk copy behind the reader's fence", COPY + STORE, lambda x: x, COPIES),
]  # fmt: skip

BUGS = [
    Program("no wait", f"{COPY}__syncthreads();\ny[i] = tile[127 - i]; // BUG", before=COPIES, kind="race"),
    Program("the thread's own copy is not waited for", f"{COPY}if (i < 32) y[i] = tile[4 * i]; // BUG", before=COPIES,
            kind="race"),
    Program("a copy behind the arrival", COPY.replace("copy(tile + 4 * i, x + 4 * i); arrive_with_copies(&bar);",
            "arrive_with_copies(&bar); copy(tile + 4 * i, x + 4 * i);") + READ.replace("i];", "i]; // BUG"),
            before=COPIES, kind="race"),
    Program("an arrival that waits for no copy", COPY.replace("arrive_with_copies", "arrive")
            + READ.replace("i];", "i]; // BUG"), before=COPIES, kind="race"),
    Program("fewer arrivals than there are to be", COPY.replace("arrive_with", "if (i > 0) arrive_with") + READ,
            before=at("WAIT"), kind="deadlock", says="lacks 1 of 32 arrivals"),
    Program("an mbarrier that nobody has made", "__shared__ mbarrier_t bar;\narrive_with_copies(&bar);\n"
            "y[threadIdx.x] = 1.0f;", before=at("TELL"), kind="mbarrier", says="there is no mbarrier at"),
    Program("a stage is filled before all have read it", RING.replace("wait(&empty[s], parity ^ 1);", "")
            .replace("stage[s][127 - j];", "stage[s][127 - j]; // BUG"), before=at("COPY"), size=128 * 5,
            kind="race|mbarrier"),
    Program("no fence before a bulk copy reads it", COPY + STORE.replace(FENCE, ""), before=at("READ"), kind="race",
            says="which cp.async has written: fence.proxy.async must come between"),
    Program("a fence before the wait", COPY + STORE.replace("wait(&bar, 0); " + FENCE, FENCE + " wait(&bar, 0);"),
            before=at("READ"), kind="race", says="which cp.async has written"),
    Program("a fence by who copied, and has not waited", COPY.replace("(&bar); }", "(&bar); " + FENCE + " }")
            + STORE.replace(FENCE, ""), before=at("READ"), kind="race", says="which cp.async has written"),
]  # fmt: skip


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.name)
def test_right_programs(program: Program, check: bool) -> None:
    require_right(program, check=check)


@needs_check
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("program", BUGS, ids=lambda program: program.name)
def test_planted_bug_is_reported_where_it_stands(program: Program, seed: int) -> None:
    require_fault(program, check=True, seed=seed)


def test_the_programs_are_cuda() -> None:
    compile_all_for(H200, [program.source for program in (*RIGHT, *BUGS)])


def test_copies_land_late_where_schedules_are_adverse() -> None:
    bug = replace(BUGS[0])
    assert np.array_equal(run(bug, check=False, seed=0), numbers(128)[::-1])
    for seed in range(1, 4):
        assert not np.array_equal(run(bug, check=False, seed=seed), numbers(128)[::-1])
