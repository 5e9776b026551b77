"""A whole GEMM as Hopper runs it, in the emulator; and the barriers of part of a block that it takes."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from fusegen.emulator import Buffer, KernelFault, build
from fusegen.language.types import bf16, f32
from fusegen.targets import H200
from fusegen.targets.tensor_map import TensorMap
from tests.programs import (
    MBARRIER,
    TENSOR_MAP,
    Array,
    Program,
    aligned,
    compile_all_for,
    compile_cuda,
    require_fault,
    require_right,
)
from tests.tools import BUILDS, needs_check, needs_compiler

pytestmark = needs_compiler

SIZE, TILE, DEEP, STAGES = 256, 128, 64, 3
THREADS = 384  # a warpgroup that copies, and two that multiply 64 rows each
STAGE_BYTES = 2 * TILE * DEEP * 2
SHARED = STAGES * STAGE_BYTES + TILE * TILE * 4


def gemm(b_by_rows: bool) -> str:
    """out = a b: a by rows; b by columns (depth contiguous), or by rows."""
    sums = ", ".join(f"%{i}" for i in range(64))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(64))
    box_b = (
        "load_box(b_tile(s), map_b, column0, k * DEEP, &full[s]);\n"
        "        load_box(b_tile(s) + DEEP * 128, map_b, column0 + 64, k * DEEP, &full[s]);"
        if b_by_rows
        else "load_box(b_tile(s), map_b, k * DEEP, column0, &full[s]);"
    )
    describe_b = (
        f"describe(shared_address(b_tile(s)) + step * 2048, {DEEP * 128}, 1024)"
        if b_by_rows
        else "describe(shared_address(b_tile(s)) + step * 32, 16, 1024)"
    )
    return f"""{TENSOR_MAP}{MBARRIER}
constexpr int DEEP = {DEEP}, TILE = {TILE}, STAGES = {STAGES}, STEPS = {SIZE // DEEP};
__device__ __forceinline__ void load_box(void* to, const CUtensorMap& map, int x, int y, mbarrier_t* bar) {{
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {{%2, %3}}], [%4];"
               :: "r"(shared_address(to)), "l"(&map), "r"(x), "r"(y), "r"(shared_address(bar)) : "memory");
}}
__device__ __forceinline__ void store_box(const CUtensorMap& map, int x, int y, const void* from) {{
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {{%1, %2}}], [%3];"
               :: "l"(&map), "r"(x), "r"(y), "r"(shared_address(from)) : "memory");
}}
__device__ __forceinline__ unsigned long long describe(unsigned place, int leading, int stride) {{
  return (place & 0x3ffff) >> 4 | static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(stride >> 4) << 32 | 1ull << 62;
}}
__device__ __forceinline__ void multiply(float (&d)[64], unsigned long long a, unsigned long long b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
               "{{{sums}}}, %64, %65, 1, 1, 1, 0, {int(b_by_rows)};"
               : {outputs} : "l"(a), "l"(b)); // MULTIPLY
}}
__device__ __forceinline__ bool elect() {{
  unsigned chosen;
  asm volatile("{{\\n.reg .pred p;\\nelect.sync _|p, 0xffffffff;\\nselp.u32 %0, 1, 0, p;\\n}}" : "=r"(chosen));
  return chosen;
}}
extern "C" __global__ void __launch_bounds__({THREADS}, 1)
kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
       const __grid_constant__ CUtensorMap map_out) {{
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ mbarrier_t full[STAGES], empty[STAGES];
  const auto a_tile = [&](int s) {{ return tiles + s * {STAGE_BYTES}; }};
  const auto b_tile = [&](int s) {{ return tiles + s * {STAGE_BYTES} + {TILE * DEEP * 2}; }};
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row0 = TILE * blockIdx.y, column0 = TILE * blockIdx.x;
  if (threadIdx.x == 0) {{
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map_a));
    for (int s = 0; s < STAGES; ++s) {{ init(&full[s], 1); init(&empty[s], 2); }}
    publish_init();
  }}
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (group == 0) {{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0 && elect()) {{
      for (int k = 0; k < STEPS; ++k) {{
        const int s = k % STAGES;
        wait(&empty[s], (k / STAGES & 1) ^ 1); // EMPTY
        expect(&full[s], {STAGE_BYTES});
        load_box(a_tile(s), map_a, k * DEEP, row0, &full[s]); // FILL
        {box_b}
      }}
    }}
  }} else {{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float d[64];
    for (int i = 0; i < 64; ++i) d[i] = 0.0f;
    for (int k = 0; k < STEPS; ++k) {{
      const int s = k % STAGES;
      wait(&full[s], k / STAGES & 1); // FULL
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      for (int step = 0; step < DEEP / 16; ++step) {{
        multiply(d, describe(shared_address(a_tile(s) + (group - 1) * 64 * 128) + step * 32, 16, 1024), {describe_b});
      }}
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (k > 0) {{
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); // ONE
        if (threadIdx.x % 128 == 0) arrive(&empty[(k - 1) % STAGES]);
      }}
    }}
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); // ALL
    unsigned char* const staging = tiles + STAGES * {STAGE_BYTES} + (group - 1) * {64 * TILE * 4};
    for (int i = 0; i < 64; ++i) {{
      const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const int byte = column / 32 * {64 * 128} + row * 128 + (column % 32 * 4 ^ row % 8 * 16);
      *reinterpret_cast<float*>(staging + byte) = d[i];
    }}
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" :: "r"(group) : "memory"); // STAGED
    if (threadIdx.x % 128 == 0) {{
      for (int part = 0; part < TILE / 32; ++part) {{
        store_box(map_out, column0 + 32 * part, row0 + (group - 1) * 64, staging + part * {64 * 128}); // STORE
      }}
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }}
    asm volatile("griddepcontrol.launch_dependents;");
  }}
}}
"""


def run_gemm(source: str, *, b_by_rows: bool, check: bool, seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(1)
    a, b = (aligned(rng.integers(-8, 9, (SIZE, SIZE)).astype(ml_dtypes.bfloat16)) for _ in range(2))
    out = aligned(np.full((SIZE, SIZE), np.nan, np.float32))
    kernel = build(source, "kernel", warp=32, check=check, filename="gemm.cu")
    box_b = (DEEP, 64) if b_by_rows else (TILE, DEEP)
    maps = [
        TensorMap(name, each.ctypes.data, dtype, each.shape, each.strides[:-1], box, 128)
        for name, each, dtype, box in (
            ("a", a, bf16, (TILE, DEEP)),
            ("b", b, bf16, box_b),
            ("out", out, f32, (64, 32)),
        )
    ]
    memory = [Buffer(name, each.ctypes.data, each.ctypes.data, each.nbytes, writable=name == "out",
                     initialised=name != "out") for name, each in (("a", a), ("b", b), ("out", out))]  # fmt: skip
    kernel.launch((2, 2, 1), (THREADS, 1, 1), SHARED, maps, seed=seed, memory=memory)
    left, right = a.astype(np.float32), b.astype(np.float32)
    return out, left @ (right if b_by_rows else right.T)


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("b_by_rows", [False, True], ids=["b by columns", "b by rows"])
def test_a_gemm(b_by_rows: bool, check: bool) -> None:
    source = gemm(b_by_rows)
    for seed in (0, 1, 2):
        got, want = run_gemm(source, b_by_rows=b_by_rows, check=check, seed=seed)
        assert np.array_equal(got, want), seed


@pytest.mark.parametrize("b_by_rows", [False, True])
def test_the_gemm_is_cuda(b_by_rows: bool) -> None:
    compile_cuda(gemm(b_by_rows), THREADS, SHARED)


BROKEN = [
    ("wgmma.wait_group.sync.aligned 1;", "", "race|deadlock"),  # and each of these lines becomes nothing or this
    ("wait(&full[s], k / STAGES & 1);", ";", "race"),
    ("wait(&empty[s], (k / STAGES & 1) ^ 1);", ";", "race|mbarrier"),
    ("wgmma.wait_group.sync.aligned 0;", "", "race"),
    ("bar.sync %0, 128;", "", "race"),
    ("wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 2;", "race"),
    ("cp.async.bulk.wait_group.read 0;", "", "race"),
    ("fence.proxy.async.shared::cta;", "", "race"),
    (f"expect(&full[s], {STAGE_BYTES});", f"expect(&full[s], {STAGE_BYTES // 2});", "mbarrier|race"),
    ("    publish_init();\n", "", "mbarrier"),
    ("setmaxnreg.dec.sync.aligned.u32 40;", "", "deadlock"),  # nothing is given back
    ("setmaxnreg.inc.sync.aligned.u32 232;", "setmaxnreg.inc.sync.aligned.u32 240;", "deadlock"),
    ('asm volatile("setmaxnreg.dec', 'if (warp == 0) asm volatile("setmaxnreg.dec', "registers"),
]


@needs_check
@pytest.mark.parametrize(("old", "new", "kind"), BROKEN, ids=[f"{each[0]} {each[1]}" for each in BROKEN])
def test_a_gemm_that_waits_wrongly_is_reported(old: str, new: str, kind: str) -> None:
    source = gemm(False)
    assert old in source
    for seed in (0, 1):
        with pytest.raises(KernelFault) as caught:
            run_gemm(source.replace(old, new), b_by_rows=False, check=True, seed=seed)
        assert caught.value.kind in kind.split("|"), caught.value


# --- barriers of part of a block

HALVES = """
__device__ __forceinline__ void meet(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory"); // MEET
}
__device__ __forceinline__ void come(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
"""
TILE_OF_128 = "__shared__ float tile[128];\nconst int i = threadIdx.x, half = i / 64;\n"


def reversed_by_64(x: Array) -> Array:
    return x.reshape(-1, 64)[:, ::-1].ravel()


RIGHT = [
    Program("two halves of a block",
            f"{TILE_OF_128}tile[i] = x[i];\nmeet(1 + half, 64);\ny[i] = tile[128 * half + 63 - i];",
            reversed_by_64, HALVES),
    Program("several times round", f"{TILE_OF_128}float v = x[i];\nfor (int k = 0; k < 3; ++k) {{\n  tile[i] = v;\n"
            "  meet(3, 128);\n  v = tile[127 - i];\n  meet(3, 128);\n}\ny[i] = v;", lambda x: x[::-1], HALVES),
    Program("one half comes, the other waits",
            f"{TILE_OF_128}if (half) {{ tile[i] = x[i]; come(5, 128); y[i] = 1.0f; }}\n"
            "else { meet(5, 128); y[i] = tile[127 - i]; }",
            lambda x: np.concatenate([x[64:][::-1], np.ones(64)]), HALVES),
    Program("the whole block by its number",
            f"{TILE_OF_128}tile[i] = x[i];\nasm volatile(\"barrier.sync.aligned 0;\" ::: \"memory\");\n"
            "y[i] = tile[127 - i];", lambda x: x[::-1]),
    Program("literals",
            f"{TILE_OF_128}tile[i] = x[i];\nasm volatile(\"barrier.cta.sync.aligned 7, 128;\" ::: \"memory\");\n"
            "y[i] = tile[127 - i];", lambda x: x[::-1]),
    Program("an elected lane", "unsigned who, chosen;\n"
            "asm volatile(\"{ .reg .pred p; .reg .b32 r; elect.sync r|p, %2; mov.b32 %0, r; selp.u32 %1, 1, 0, p; }\"\n"
            "             : \"=r\"(who), \"=r\"(chosen) : \"r\"(0xffffffffu));\ny[threadIdx.x] = who + chosen;",
            lambda x: np.arange(128) % 32 == 0),
]  # fmt: skip
MEET_HERE = HALVES.replace("// MEET", "// BUG")
BUGS = [
    Program("no barrier between the halves", f"{TILE_OF_128}tile[i] = x[i];\nmeet(1 + half, 64);\n"
            "y[i] = tile[127 - i]; // BUG", before=HALVES, kind="race"),
    Program("who only comes has not met", f"{TILE_OF_128}if (half) {{ tile[i] = x[i]; come(5, 128); tile[i] = 0; }}\n"
            "else { meet(5, 128); y[i] = tile[127 - i]; } // BUG", before=HALVES, kind="race"),
    Program("half a warp", f"{TILE_OF_128}if (i < 16 || i >= 80) meet(1, 64);\ny[i] = 1.0f;", before=MEET_HERE,
            kind="divergent-barrier|deadlock", says="barrier 1"),
    Program("a count that is no warp's", f"{TILE_OF_128}meet(1, 48);\ny[i] = 1.0f;", before=MEET_HERE,
            kind="divergent-barrier", says="barrier 1 for 48 threads; a multiple of a warp is wanted, and up to 128"),
    Program("another count", f"{TILE_OF_128}meet(1, half ? 64 : 128);\ny[i] = 1.0f;", before=MEET_HERE,
            kind="divergent-barrier", says="threads at barrier 1, and one on line"),
    Program("number 16", f"{TILE_OF_128}meet(16, 64);\ny[i] = 1.0f;", before=MEET_HERE,
            kind="divergent-barrier", says="barrier 16 for 64 threads; 1 to 15 are"),
    Program("number 0 for a part", f"{TILE_OF_128}if (half) meet(0, 64);\ny[i] = 1.0f;", before=MEET_HERE,
            kind="divergent-barrier", says="and 0 is __syncthreads"),
    Program("too few come", f"{TILE_OF_128}if (half) meet(2, 96);\ny[i] = 1.0f;", before=MEET_HERE, kind="deadlock",
            says="this thread waits at barrier 2, where 64 of 96 threads have arrived"),
    Program("too many registers", "asm volatile(\"setmaxnreg.inc.sync.aligned.u32 260;\"); // BUG\ny[0] = 1.0f;",
            kind="registers", says="setmaxnreg to 260 registers"),
]  # fmt: skip


def moves(action: str, registers: int, who: str = "true") -> str:
    return f'if ({who}) asm volatile("setmaxnreg.{action}.sync.aligned.u32 {registers};"); // BUG\n'


# Two warpgroups of 128 registers a thread.
REGISTERS = Program("", "y[threadIdx.x] = x[threadIdx.x];", lambda x: x, attributes="__launch_bounds__(256, 2)",
                    threads=256, size=256)  # fmt: skip
MOVED = [
    moves("dec", 40, "threadIdx.x < 128") + moves("inc", 216, "threadIdx.x >= 128"),
    moves("inc", 216, "threadIdx.x >= 128") + moves("dec", 40, "threadIdx.x < 128"),
    moves("dec", 64) + "__syncthreads();\n" + moves("inc", 128),
]
STUCK = [
    (moves("inc", 136), "deadlock", "waits for 136 registers and has 128, and the block's pool has 0 more"),
    (moves("dec", 40, "threadIdx.x < 128") + moves("inc", 224, "threadIdx.x >= 128"), "deadlock",
     "waits for 224 registers and has 128, and the block's pool has"),
    (moves("dec", 40, "threadIdx.x < 32"), "registers",
     "warp 0 has executed setmaxnreg 1 times and has 40 registers, warp 1 of its warpgroup 0 times and has 128"),
    (moves("dec", 40, "threadIdx.x < 96") + moves("inc", 216, "threadIdx.x >= 128"), "registers",
     "all warps of a warpgroup must execute the same"),
    (moves("dec", 40, "threadIdx.x % 128 < 64") + moves("dec", 48, "threadIdx.x % 128 >= 64"), "registers",
     "has 40 registers, warp 2 of its warpgroup 1 times and has 48"),
    (moves("dec", 40, "threadIdx.x % 32 < 16"), "registers", "setmaxnreg by lanes 0xffff of a warp"),
    (moves("dec", 136), "registers", "setmaxnreg.dec to 136 registers of a warp that has 128"),
    (moves("inc", 120), "registers", "setmaxnreg.inc to 120 registers of a warp that has 128"),
]  # fmt: skip


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("body", MOVED)
def test_registers_move_between_warpgroups(body: str, check: bool) -> None:
    require_right(replace(REGISTERS, body=body + REGISTERS.body), check=check)


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize(("body", "kind", "says"), STUCK, ids=[each[2] for each in STUCK])
def test_registers_that_do_not_come_are_reported(body: str, kind: str, says: str, check: bool) -> None:
    for seed in (0, 1, 2):
        require_fault(replace(REGISTERS, body=body + REGISTERS.body, kind=kind, says=says), check=check, seed=seed)


def test_registers_of_a_kernel_without_bounds_are_not_known() -> None:
    bug = replace(REGISTERS, attributes="", body=moves("dec", 40), kind="registers",
                  says="setmaxnreg in a kernel without __launch_bounds__")  # fmt: skip
    require_fault(bug, check=False)


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.name)
def test_right_programs(program: Program, check: bool) -> None:
    require_right(program, check=check)


@needs_check
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("program", BUGS, ids=lambda program: program.name)
def test_planted_bug_is_reported_where_it_stands(program: Program, seed: int) -> None:
    require_fault(program, check=True, seed=seed)


def test_the_programs_are_cuda() -> None:
    compile_all_for(H200, [program.source for program in (*RIGHT, *BUGS[:-1])])


@pytest.mark.parametrize("count", ["4", "%1"])
def test_a_count_that_is_written_out_is_a_count(count: str) -> None:
    body = f"""__shared__ mbarrier_t bar;
if (threadIdx.x == 0) init(&bar, 4);
__syncthreads();
if (threadIdx.x == 0) {{
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], {count};"
               :: "r"(shared_address(&bar)), "n"(sizeof(float)) : "memory");
}}
wait(&bar, 0);
y[threadIdx.x] = 1.0f;"""
    program = Program("count", body, lambda x: np.ones(128), MBARRIER)
    compile_cuda(program.source)
    require_right(program, check=False)
