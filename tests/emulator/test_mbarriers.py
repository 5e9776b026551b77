"""mbarriers and bulk copies in the emulator: right pipelines, and each way to get one wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fusegen.targets import H200
from tests.programs import (
    LAST_BLOCK,
    MBARRIER,
    Array,
    Program,
    compile_all_for,
    numbers,
    require_fault,
    require_right,
    run,
)
from tests.tools import BUILDS, needs_check, needs_compiler

pytestmark = needs_compiler

TILE = "__shared__ alignas(128) float tile[128];\nconst int i = threadIdx.x;\n"
HEAD = """
__shared__ alignas(128) float tile[128];
__shared__ mbarrier_t bar;
const int i = threadIdx.x;
if (i == 0) { init(&bar, 1); publish_init(); }
__syncthreads();
"""
# Stages of 32 floats; thread 0 fills them, all threads read them and say so.
RING = """
__shared__ alignas(128) float stage[2][32];
__shared__ mbarrier_t full[2], empty[2];
const int i = threadIdx.x, tiles = n / 32;
if (i == 0) {
  for (int s = 0; s < 2; ++s) { init(&full[s], 1); init(&empty[s], blockDim.x); }
  publish_init();
}
__syncthreads();
if (i == 0) {
  for (int k = 0; k < 2; ++k) { expect(&full[k], 128); load(stage[k], x + 32 * k, 128, &full[k]); }
}
for (int k = 0; k < tiles; ++k) {
  const int s = k & 1;
  const unsigned parity = k >> 1 & 1;
  wait(&full[s], parity);
  if (i < 32) y[32 * k + i] = stage[s][31 - i];
  arrive(&empty[s]);
  if (i == 0 && k + 2 < tiles) {
    wait(&empty[s], parity);
    expect(&full[s], 128);
    load(stage[s], x + 32 * (k + 2), 128, &full[s]);
  }
}
"""
# As above, with the block's barrier in place of the arrivals.
RING_WITH_BARRIER = """
__shared__ alignas(128) float stage[2][32];
__shared__ mbarrier_t full[2];
const int i = threadIdx.x, tiles = n / 32;
if (i == 0) { init(&full[0], 1); init(&full[1], 1); publish_init(); }
__syncthreads();
if (i == 0) {
  for (int k = 0; k < 2; ++k) { expect(&full[k], 128); load(stage[k], x + 32 * k, 128, &full[k]); }
}
for (int k = 0; k < tiles; ++k) {
  wait(&full[k & 1], k >> 1 & 1);
  const float v = i < 32 ? stage[k & 1][31 - i] : 0.0f;
  __syncthreads();
  if (i == 0 && k + 2 < tiles) {
    expect(&full[k & 1], 128);
    load(stage[k & 1], x + 32 * (k + 2), 128, &full[k & 1]);
  }
  if (i < 32) y[32 * k + i] = v;
}
"""
# As the first ring with a warp that only copies, and one arrival a warp behind its __syncwarp.
SPECIALISED = """
__shared__ alignas(128) float stage[2][96];
__shared__ mbarrier_t full[2], empty[2];
const int i = threadIdx.x, tiles = n / 96;
if (i == 0) {
  for (int s = 0; s < 2; ++s) { init(&full[s], 1); init(&empty[s], 3); }
  publish_init();
}
__syncthreads();
if (i >= 96) {
  if (i == 96) {
    for (int k = 0; k < tiles; ++k) {
      wait(&empty[k & 1], (k >> 1 & 1) ^ 1);
      expect(&full[k & 1], 384);
      load(stage[k & 1], x + 96 * k, 192, &full[k & 1]);
      load(stage[k & 1] + 48, x + 96 * k + 48, 192, &full[k & 1]);
    }
  }
} else {
  for (int k = 0; k < tiles; ++k) {
    wait_in_ptx(&full[k & 1], k >> 1 & 1);
    y[96 * k + i] = stage[k & 1][95 - i];
    __syncwarp();
    if (i % 32 == 0) arrive(&empty[k & 1]);
  }
}
"""


def reversed_by(width: int, x: Array) -> Array:
    return x.reshape(-1, width)[:, ::-1].ravel()


RIGHT = [
    Program("one load, waited for by all",
            f"{HEAD}if (i == 0) {{ expect(&bar, 512); load(tile, x, 512, &bar); }}\nwait(&bar, 0);\n"
            "y[i] = tile[127 - i];", lambda x: x[::-1], MBARRIER),
    Program("one load, waited for by one, and a barrier",
            f"{HEAD}if (i == 0) {{ expect(&bar, 512); load(tile, x, 512, &bar); wait(&bar, 0); }}\n__syncthreads();\n"
            "y[i] = tile[127 - i];", lambda x: x[::-1], MBARRIER),
    Program("test_wait", f"{HEAD}if (i == 0) {{ expect(&bar, 512); load(tile, x, 512, &bar); }}\npoll(&bar, 0);\n"
            "y[i] = tile[127 - i];", lambda x: x[::-1], MBARRIER),
    Program("bytes come before they are expected",
            f"{HEAD}if (i == 0) {{ load(tile, x, 512, &bar); expect(&bar, 512); }}\nwait(&bar, 0);\n"
            "y[i] = tile[127 - i];", lambda x: x[::-1], MBARRIER),
    Program("arrivals order plain accesses",
            "__shared__ float tile[128];\n__shared__ mbarrier_t bar;\nconst int i = threadIdx.x;\n"
            "if (i == 0) init(&bar, 128);\n__syncthreads();\ntile[i] = x[i];\narrive(&bar);\nwait(&bar, 0);\n"
            "y[i] = tile[127 - i];", lambda x: x[::-1], MBARRIER),
    Program("a ring of two stages", RING, lambda x: reversed_by(32, x), MBARRIER, size=320),
    Program("a ring of two stages, by the block's barrier", RING_WITH_BARRIER, lambda x: reversed_by(32, x), MBARRIER,
            size=320),
    Program("the last block takes over what the others have published",
            HEAD + "if (i == 0) { expect(&bar, 512); load(tile, x + 128 * blockIdx.x, 512, &bar); }\nwait(&bar, 0);"
            + LAST_BLOCK, lambda x: 2 * x, "__device__ int finished;\n" + MBARRIER, blocks=3, size=384),
    Program("a ring, several blocks", RING.replace("n / 32", "n / 64").replace("+ 32 * k", "+ half + 32 * k")
            .replace("x + 32 * (k", "x + half + 32 * (k").replace("y[32", "y[half + 32")
            .replace("const int i", "const int half = blockIdx.x * n / 2;\nconst int i"),
            lambda x: reversed_by(32, x), MBARRIER, size=384, blocks=2),
    Program("a warp that only copies", SPECIALISED, lambda x: reversed_by(96, x), MBARRIER, size=96 * 7),
    Program("a bulk store", f"{TILE}tile[i] = 2 * x[i];\n"
            "asm volatile(\"fence.proxy.async.shared::cta;\" ::: \"memory\");\n__syncthreads();\n"
            "if (i == 0) { store(y, tile, 512); wait_read(); }", lambda x: 2 * x, MBARRIER),
    Program("a staging buffer that is used again",
            f"{TILE}"
            "for (int k = 0; k < n / 128; ++k) {\n  tile[i] = 2 * x[128 * k + i];\n  __syncthreads();\n"
            "  if (i == 0) { store(y + 128 * k, tile, 512); wait_read(); }\n  __syncthreads();\n}\n"
            "if (i == 0) wait_stored();", lambda x: 2 * x, MBARRIER, size=512),
    Program("what was stored is read again behind the full wait",
            f"{TILE}tile[i] = x[i];\n__syncthreads();\n"
            "if (i == 0) { store(y, tile, 512); wait_stored(); }\n__syncthreads();\ny[i] = y[i] + 1.0f;",
            lambda x: x + 1, MBARRIER),
    Program("an mbarrier that is made anew",
            f"{HEAD}for (int k = 0; k < 2; ++k) {{\n  if (i == 0) {{ expect(&bar, 512); load(tile, x, 512, &bar); }}\n"
            "  wait(&bar, 0);\n  y[i] = tile[127 - i];\n  __syncthreads();\n  if (i == 0) {\n"
            "    asm volatile(\"mbarrier.inval.shared::cta.b64 [%0];\" :: \"r\"(shared_address(&bar)) : \"memory\");\n"
            "    init(&bar, 1);\n    publish_init();\n  }\n  __syncthreads();\n}", lambda x: x[::-1], MBARRIER),
]  # fmt: skip


def at(word: str, text: str = MBARRIER) -> str:
    """The device functions, with the bug's line at `word`."""
    return text.replace(f"// {word}", "// BUG")


LOADED = f"{HEAD}if (i == 0) {{ expect(&bar, 512); load(tile, x, 512, &bar); }}\n"
BUGS = [
    Program("no wait", f"{LOADED}__syncthreads();\ny[i] = tile[127 - i]; // BUG", before=MBARRIER, kind="race"),
    Program("only some wait", f"{LOADED}if (i < 64) wait(&bar, 0);\ny[i] = tile[127 - i]; // BUG", before=MBARRIER,
            kind="race"),
    Program("a wait for the other parity", f"{LOADED}wait(&bar, 1);\ny[i] = tile[127 - i]; // BUG",
            before=at("WAIT"), kind="race|deadlock"),
    Program("a wait for the other barrier",
            LOADED.replace("bar;", "bar, other;").replace("init(&bar, 1);", "init(&bar, 1); init(&other, 1);")
            .replace("}\n__sync", "arrive(&other); }\n__sync") + "wait(&other, 0);\ny[i] = tile[127 - i]; // BUG",
            before=MBARRIER, kind="race"),
    Program("too many bytes are expected", f"{LOADED.replace('512)', '528)')}wait(&bar, 0);\ny[i] = tile[127 - i];",
            before=at("WAIT"), kind="deadlock", says="which lacks 0 of 1 arrivals and 16 bytes"),
    Program("too few bytes are expected", f"{LOADED.replace('512)', '496)')}wait(&bar, 0);\ny[i] = tile[127 - i];",
            before=at("WAIT"), kind="deadlock", says="which lacks 0 of 1 arrivals and -16 bytes"),
    Program("no byte is expected, by a poll",
            f"{HEAD}if (i == 0) load(tile, x, 512, &bar);\npoll(&bar, 0);\ny[i] = tile[127 - i];",
            before=at("POLL"), kind="deadlock", says="lacks 1 of 1 arrivals and -512 bytes"),
    Program("a second phase that nothing fills", f"{LOADED}wait(&bar, 0);\nwait(&bar, 1);\ny[i] = tile[127 - i];",
            before=at("WAIT"), kind="deadlock", says="the phase of parity 1 of the mbarrier at byte 0 of bar"),
    Program("more arrivals than there are to be", f"{HEAD}if (i == 0) {{ expect(&bar, 16); arrive(&bar); }}\n"
            "y[i] = 1.0f;", before=at("ARRIVE"), kind="mbarrier",
            says="1 arrivals at an mbarrier whose phase lacks 0 of 1"),
    Program("an mbarrier that nobody has made",
            "__shared__ mbarrier_t bar;\narrive(&bar);\ny[threadIdx.x] = 1.0f;", before=at("ARRIVE"),
            kind="mbarrier", says="there is no mbarrier at"),
    Program("no barrier behind the init",
            f"{HEAD.replace('__syncthreads();', '')}arrive(&bar);\ny[i] = 1.0f;", before=at("ARRIVE"),
            kind="race|mbarrier"),
    Program("a stage is filled before all have read it", RING.replace("wait(&empty[s], parity);\n    expect", "expect")
            .replace("stage[s][31 - i];", "stage[s][31 - i]; // BUG"), before=at("WAIT", at("LOAD")), size=320,
            kind="race|deadlock"),
    Program("the copier's first wait has the wrong parity",
            SPECIALISED.replace(" ^ 1);", ");").replace("wait_in_ptx", "wait"), before=at("WAIT"), size=96 * 7,
            kind="deadlock", says="no thread can run: this thread waits for the phase of parity 0"),
    Program("no __syncwarp in front of the warp's arrival", SPECIALISED.replace("__syncwarp();", "")
            .replace("[95 - i];", "[95 - i]; // BUG"), before=at("LOAD"), size=96 * 7, kind="race"),
    Program("a misaligned source", f"{LOADED.replace('x, 512', 'x + 1, 512')}wait(&bar, 0);\ny[i] = tile[i];",
            before=at("LOAD"), kind="misaligned", says="size and addresses must be multiples of 16"),
    Program("a misaligned destination", f"{LOADED.replace('tile, x', 'tile + 2, x')}wait(&bar, 0);\ny[i] = tile[i];",
            before=at("LOAD"), kind="misaligned"),
    Program("a size that is no multiple of 16", f"{LOADED.replace('512', '500')}wait(&bar, 0);\ny[i] = tile[i];",
            before=at("LOAD"), kind="misaligned", says="a bulk copy of 500 bytes"),
    Program("a source beyond the end", f"{LOADED.replace('x, 512', 'x + 4, 512')}wait(&bar, 0);\ny[i] = tile[i];",
            before=at("LOAD"), kind="out-of-bounds", says="read of 512 bytes at byte 16 of x, which has 512 bytes"),
    Program("a destination beyond the end",
            f"{LOADED.replace('tile, x', 'tile + 4, x')}wait(&bar, 0);\ny[i] = tile[i];", before=at("LOAD"),
            kind="out-of-bounds", says="write of 512 bytes at byte 16 of tile"),
    Program("the block ends in front of its copy", f"{LOADED}y[i] = 1.0f;", before=at("LOAD"), kind="race",
            says="may end before this copy has filled byte 0 of tile"),
    Program("a store out of bounds", f"{TILE}tile[i] = x[i];\n"
            "__syncthreads();\nif (i == 0) { store(y + 4, tile, 512); wait_read(); }", before=at("STORE"),
            kind="out-of-bounds", says="write of 512 bytes at byte 16 of y"),
    Program("a store of what is not yet written", f"{TILE}"
            "tile[i] = x[i]; // BUG\nif (i == 0) { store(y, tile, 512); wait_read(); }", before=at("STORE"),
            kind="race"),
    Program("the staging buffer is written while it is being stored",
            f"{TILE}tile[i] = x[i];\n__syncthreads();\n"
            "if (i == 0) store(y, tile, 512);\n__syncthreads();\ntile[i] = 1.0f; // BUG\nif (i == 0) wait_read();",
            before=MBARRIER, kind="race",
            says="while a bulk copy that has not been waited for may still be reading it"),
    Program("the thread ends in front of its store", f"{TILE}"
            "tile[i] = x[i];\n__syncthreads();\nif (i == 0) store(y, tile, 512);", before=at("STORE"), kind="race",
            says="has not waited for the copy's group"),
    Program("what was stored is read again behind the wait for reading",
            f"{TILE}tile[i] = x[i];\n__syncthreads();\n"
            "if (i == 0) { store(y, tile, 512); wait_read(); }\n__syncthreads();\ny[i] = y[i] + 1.0f; // BUG",
            before=MBARRIER, kind="race", says="while the copy into it is under way"),
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


PROXY = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
MADE = "if (i == 0) { init(&bar, 1); publish_init(); }"
PUBLISHED = {
    "by the other fence": f"if (i == 0) {{ init(&bar, 1); {PROXY} }}",
    "by the other fence of a thread that knows": f"if (i == 0) init(&bar, 1);\n__syncthreads();\nif (i == 9) {PROXY}",
    "by the fence of who copies": f"if (i == 9) init(&bar, 1);\n__syncthreads();\nif (i == 0) {PROXY}",
}
UNPUBLISHED = {
    "without a fence": "if (i == 0) init(&bar, 1);",
    "in front of it": "if (i == 0) { publish_init(); init(&bar, 1); }",
    "by another thread": "if (i == 0) init(&bar, 1);\n__syncthreads();\nif (i == 9) publish_init();",
    "by one that has not met": f"if (i == 0) init(&bar, 1);\nif (i == 9) {PROXY}",
}


@needs_check
@pytest.mark.parametrize("made", PUBLISHED.values(), ids=PUBLISHED)
def test_an_mbarrier_that_is_published(made: str) -> None:
    require_right(replace(RIGHT[0], body=RIGHT[0].body.replace(MADE, made)), check=True)


@needs_check
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("made", UNPUBLISHED.values(), ids=UNPUBLISHED)
def test_an_mbarrier_that_is_not_published_to_copies_is_reported(made: str, seed: int) -> None:
    bug = replace(RIGHT[0], body=RIGHT[0].body.replace(MADE, made), before=at("LOAD"), kind="mbarrier",
                  says="counted by an mbarrier that no fence has published")  # fmt: skip
    require_fault(bug, check=True, seed=seed)


@needs_check
def test_an_mbarrier_that_is_made_anew_is_published_anew() -> None:
    right = next(program for program in RIGHT if program.name == "an mbarrier that is made anew")
    bug = replace(right, body=right.body.replace("    publish_init();\n", ""), before=at("LOAD"), kind="mbarrier")
    require_fault(bug, check=True)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("program", [bug for bug in BUGS if bug.kind in ("deadlock", "mbarrier", "misaligned")],
                         ids=lambda program: program.name)  # fmt: skip
def test_the_fast_build_finds_what_the_schedule_shows(program: Program, seed: int) -> None:
    says = program.says.partition(" of bar")[0].replace("byte 0", "byte")
    require_fault(Program(**{**vars(program), "says": says}), check=False, seed=seed)


def test_the_programs_are_cuda() -> None:
    compile_all_for(H200, [program.source for program in (*RIGHT, *BUGS)])


def test_a_missing_wait_shows_in_the_numbers_when_copies_land_late() -> None:
    bug = next(bug for bug in BUGS if bug.name == "no wait")
    assert np.array_equal(run(bug, check=False, seed=0), numbers(128)[::-1])
    for seed in range(1, 6):
        assert np.all(np.isnan(run(bug, check=False, seed=seed)))
