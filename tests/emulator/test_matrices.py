"""mma.sync, ldmatrix and MFMA in the emulator: their layouts, a whole GEMM, and each way to get one wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from fusegen.emulator import EmulatorBuildError, KernelFault, build
from fusegen.emulator.rewrite import rewrite_vectors
from fusegen.targets import A100, H200, MI300X, MI355X, Target
from fusegen.targets.hip import MI250X
from tests.programs import Array, aligned, compile_all_for, compile_for, launch
from tests.tools import BUILDS, needs_check, needs_compiler

pytestmark = needs_compiler

SEEDS = (0, 1, 2)
NUMBERS = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "tf32": np.dtype(np.float32),
           "f32": np.dtype(np.float32), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
           "e5m2": np.dtype(ml_dtypes.float8_e5m2), "fp8": np.dtype(ml_dtypes.float8_e4m3fnuz),
           "bf8": np.dtype(ml_dtypes.float8_e5m2fnuz), "s8": np.dtype(np.int8), "u8": np.dtype(np.uint8)}  # fmt: skip


def distinct(rows: int, columns: int, dtype: np.dtype, seed: int) -> Array:
    """Whole numbers around zero, each once, that every type here holds exactly."""
    values = np.random.default_rng(seed).permutation(rows * columns) - rows * columns // 2
    return aligned(values.reshape(rows, columns).astype(dtype))


def product(a: Array, b: Array, c: Array | float = 0.0) -> Array:
    return (a.astype(np.float64) @ b.astype(np.float64) + c).astype(np.float32)


# --- one instruction, its fragments loaded one element at a time


@dataclass(frozen=True)
class Mma:
    """mma.sync.aligned.m16n8k`k`.row.col.f32.`number`.`other`.f32, of whole numbers with s32."""

    number: str
    k: int
    other: str = ""  # what B is of, where it is another type

    def __str__(self) -> str:
        return f"{self.number} {self.other} k{self.k}".replace("  ", " ")

    @property
    def whole(self) -> bool:
        return self.number in ("s8", "u8")

    @property
    def source(self) -> str:
        """d = a b + c, by the figures of the PTX manual: element `i` of a fragment is in row and column of it."""
        per = 4 // NUMBERS[self.number].itemsize
        kind = {1: "unsigned", 2: "unsigned short", 4: "unsigned char"}[per]
        bits, sums, sum_type, letter = 32 // per, *(("s32", "int", "r") if self.whole else ("f32", "float", "f"))
        a, b = self.k // 4 * 2 // per, self.k // 4 // per  # registers
        names = [f"%{i}" for i in range(8 + a + b)]
        text = (f"mma.sync.aligned.m16n8k{self.k}.row.col.{sums}.{self.number}.{self.other or self.number}.{sums} "
                f"{{{', '.join(names[:4])}}}, {{{', '.join(names[4 : 4 + a])}}}, "
                f"{{{', '.join(names[4 + a : 4 + a + b])}}}, {{{', '.join(names[4 + a + b :])}}};")  # fmt: skip
        inputs = [f'"r"(ra[{i}])' for i in range(a)] + [f'"r"(rb[{i}])' for i in range(b)]
        inputs += [f'"{letter}"(c[({"g + 8" if i > 1 else "g"}) * 8 + 2 * t + {i % 2}])' for i in range(4)]
        return f"""
extern "C" __global__ void kernel(const {kind}* a, const {kind}* b, const {sum_type}* c, {sum_type}* d) {{
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  unsigned ra[{a}] = {{}}, rb[{b}] = {{}};
  for (int i = 0; i < {a * per}; ++i) {{
    const int reg = i / {per}, half = i % {per};
    const unsigned bits = a[(g + reg % 2 * 8) * {self.k} + t * {per} + half + reg / 2 * {4 * per}];
    ra[reg] |= bits << {bits} % 32 * half;
  }}
  for (int i = 0; i < {b * per}; ++i) {{
    const int reg = i / {per}, half = i % {per};
    const unsigned bits = b[(t * {per} + half + reg * {4 * per}) * 8 + g];
    rb[reg] |= bits << {bits} % 32 * half;
  }}
  {sum_type} r[4];
  asm volatile("{text}" // BUG
               : "={letter}"(r[0]), "={letter}"(r[1]), "={letter}"(r[2]), "={letter}"(r[3])
               : {", ".join(inputs)});
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = r[i];
}}
"""


MMAS = [Mma("f16", 16), Mma("bf16", 16), Mma("tf32", 8), Mma("f16", 8), Mma("bf16", 8), Mma("tf32", 4),
        Mma("s8", 32), Mma("u8", 32)]  # fmt: skip
ADA_MMAS = [Mma(a, 32, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]


def run_mma(mma: Mma, source: str, *, check: bool, seed: int) -> tuple[Array, Array]:
    """What it gives and what it should."""
    kinds = NUMBERS[mma.number], NUMBERS[mma.other or mma.number]
    a, b = distinct(16, mma.k, kinds[0], 1), distinct(mma.k, 8, kinds[1], 2)
    if kinds[0].itemsize == 1:  # few numbers are whole, and sums of products fit 14 bits
        rng = np.random.default_rng(seed)
        least, most = (-4, 5) if not mma.whole else (0, 256) if mma.number == "u8" else (-128, 128)
        a, b = (aligned(rng.integers(least, most, x.shape).astype(k)) for x, k in zip((a, b), kinds, strict=True))
    sums = np.dtype(np.int32 if mma.whole else np.float32)
    c, d = distinct(16, 8, sums, 3), aligned(np.full((16, 8), -1 if mma.whole else np.nan, sums))
    views = [each.view(f"u{each.itemsize}") for each in (a, b)]
    launch(source, [*views, c, d], check=check, seed=seed, threads=32)
    return d, product(a, b, c).astype(sums)


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("mma", [*MMAS, *ADA_MMAS], ids=str)
def test_mma_multiplies(mma: Mma, check: bool) -> None:
    for seed in SEEDS:
        got, want = run_mma(mma, mma.source, check=check, seed=seed)
        assert np.array_equal(got, want)


@pytest.mark.parametrize(("target", "mmas"), [(A100, MMAS), (H200, [*MMAS, *ADA_MMAS])], ids=["sm_80", "sm_90a"])
def test_mma_is_cuda(target: Target, mmas: Sequence[Mma]) -> None:
    compile_all_for(target, [mma.source for mma in mmas], threads=32)


SPECIAL = [2.0**-24, -(2.0**-24), 2.0**-14, 65504.0, -0.0, np.inf, -np.inf, np.nan, 1.0009765625]


@pytest.mark.parametrize("number", ["f16", "bf16"])
def test_special_values_and_subnormals_of_sixteen_bits(number: str) -> None:
    mma = Mma(number, 16)
    a, b = np.zeros((16, 16), NUMBERS[number]), np.zeros((16, 8), NUMBERS[number])
    a[: len(SPECIAL), 0] = SPECIAL
    b[0] = 1.0
    d = aligned(np.full((16, 8), np.nan, np.float32))
    c = aligned(np.zeros((16, 8), np.float32))
    launch(mma.source, [aligned(a).view(np.uint16), aligned(b).view(np.uint16), c, d], check=False, threads=32)
    assert np.array_equal(d, np.repeat(a[:, :1].astype(np.float32), 8, axis=1), equal_nan=True)
    assert np.all(d.view(np.uint32)[np.isnan(d)] == 0x7FFFFFFF)


def test_tf32_takes_no_notice_of_the_low_bits() -> None:
    mma = Mma("tf32", 8)
    a, b = (np.random.default_rng(4).standard_normal(shape).astype(np.float32) for shape in ((16, 8), (8, 8)))
    d, c = aligned(np.full((16, 8), np.nan, np.float32)), aligned(np.zeros((16, 8), np.float32))
    launch(mma.source, [aligned(a).view(np.uint32), aligned(b).view(np.uint32), c, d], check=False, threads=32)
    short = [(each.view(np.uint32) & 0xFFFFE000).view(np.float32) for each in (a, b)]
    assert np.array_equal(d, product(*short))


MISSING = [
    ("a lane has ended", "if (lane == 5) return;\n", "divergent-warp", "lane 5 has ended"),
    (
        "a lane is at a barrier",
        "if (lane == 5) { __syncwarp(); return; }\n",
        "divergent-warp",
        "is at __syncwarp on line",
    ),
    ("a lane waits for the block", "if (lane == 5) __syncthreads();\n", "deadlock", "for lane 5"),
]


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize(("before", "kind", "says"), [each[1:] for each in MISSING], ids=[each[0] for each in MISSING])
def test_every_lane_must_take_part(before: str, kind: str, says: str, check: bool) -> None:
    source = MMAS[0].source.replace("  float r[4];", f"  {before}  float r[4];")
    for seed in SEEDS:
        with pytest.raises(KernelFault, match=says) as caught:
            run_mma(MMAS[0], source, check=check, seed=seed)
        assert caught.value.kind == kind
        places = [place for place in (caught.value.line, caught.value.other_line) if place]
        assert any("mma.sync" in source.splitlines()[place - 1] for place in places)


def test_a_warp_that_is_not_full_can_not_multiply() -> None:
    a, b, c, d = (aligned(np.zeros(256, kind)) for kind in (np.uint16, np.uint16, np.float32, np.float32))
    with pytest.raises(KernelFault, match="lane 16 does not exist"):
        launch(MMAS[0].source, [a, b, c, d], check=False, threads=16)


# --- ldmatrix


def ldmatrix(count: int, trans: bool, before: str = "__syncwarp();", address: str = "tile + 8 * lane") -> str:
    """out[matrix][lane][half] of `count` matrices whose rows are given one after another, staged by all lanes."""
    outputs = ", ".join(f'"=r"(r[{i}])' for i in range(count))
    names = ", ".join(f"%{i}" for i in range(count))
    return f"""
extern "C" __global__ void kernel(const unsigned short* a, unsigned* out) {{
  __shared__ __align__(16) unsigned short tile[256];
  const int lane = threadIdx.x;
  for (int i = lane; i < {64 * count}; i += 32) tile[i] = a[i];
  {before}
  unsigned r[{count}];
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared({address}));
  asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{".trans" * trans}.shared.b16 {{{names}}}, [%{count}];" // BUG
               : {outputs} : "r"(address) : "memory");
  for (int i = 0; i < {count}; ++i) out[32 * i + lane] = r[i];
}}
"""


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("trans", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_hands_out_rows_or_columns(count: int, trans: bool, check: bool) -> None:
    values = aligned(np.random.default_rng(0).permutation(256).astype(np.uint16)[: 64 * count])
    matrices = values.reshape(count, 8, 8)
    want = (matrices.transpose(0, 2, 1) if trans else matrices).reshape(count, 64)
    for seed in SEEDS:
        out = aligned(np.zeros(32 * count, np.uint32))
        # lanes whose addresses are not asked for may give any
        source = ldmatrix(count, trans, address=f"tile + (lane < {8 * count} ? 8 * lane : lane)")
        launch(source, [values, out], check=check, seed=seed, threads=32)
        assert np.array_equal(out.view(np.uint16).reshape(count, 64), want)


def stmatrix(count: int, address: str = "tile + 8 * lane", after: str = "__syncwarp();") -> str:
    """`count` matrices, given as lanes hold them, to rows one after another."""
    names = ", ".join(f"%{i + 1}" for i in range(count))
    inputs = ", ".join(f'"r"(a[{32 * i} + lane])' for i in range(count))
    return f"""
extern "C" __global__ void kernel(const unsigned* a, unsigned short* out) {{
  __shared__ __align__(16) unsigned short tile[264];
  const int lane = threadIdx.x;
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared({address}));
  asm volatile("stmatrix.sync.aligned.m8n8.x{count}.shared.b16 [%0], {{{names}}};" // BUG
               :: "r"(address), {inputs} : "memory");
  {after}
  for (int i = lane; i < {64 * count}; i += 32) out[i] = tile[i]; // BUG
}}
"""


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_takes_what_ldmatrix_gives(count: int, check: bool) -> None:
    want = aligned(np.random.default_rng(0).permutation(256).astype(np.uint16)[: 64 * count])
    for seed in SEEDS:
        out = aligned(np.zeros(64 * count, np.uint16))
        source = stmatrix(count, address=f"tile + (lane < {8 * count} ? 8 * lane : lane)")
        launch(source, [want.view(np.uint32), out], check=check, seed=seed, threads=32)
        assert np.array_equal(out, want)


STORED = [
    ("no barrier", stmatrix(4, after=""), "race", "is not ordered with the write"),
    ("a row between two", stmatrix(2, address="tile + 4 * lane"), "misaligned", "no multiple of 16"),
    ("a row beyond the tile", stmatrix(4, address="tile + 16 + 8 * lane"), "out-of-bounds", "of tile"),
]  # fmt: skip
BROKEN = [
    ("no barrier", ldmatrix(4, False, before=""), "race", "is not ordered with the write"),
    ("no barrier, columns", ldmatrix(2, True, before=""), "race", "is not ordered with the write"),
    ("a row between two", ldmatrix(4, False, address="tile + 4 * lane"), "misaligned", "no multiple of 16"),
    ("a row beyond the tile", ldmatrix(4, False, address="tile + 8 * lane + 8"), "out-of-bounds", "byte 512 of tile"),
    ("what nothing has written", ldmatrix(1, False, address="tile + 8 * lane + 64"), "uninitialised", "byte 128 of"),
    ("a generic address cut short", ldmatrix(1, False).replace("__cvta_generic_to_shared(tile + 8 * lane)",
                                                               "reinterpret_cast<unsigned long long>(tile) & 0xfffff0"),
     "out-of-bounds", "is no address of shared memory"),
    ("a lane writes behind it", ldmatrix(4, False).replace("// BUG", "").replace(
        "for (int i = 0; i < 4", "tile[8 * (lane ^ 1)] = 0; // BUG\n  for (int i = 0; i < 4"),
     "race", "is not ordered with the read"),
]  # fmt: skip


@needs_check
@pytest.mark.parametrize(("source", "kind", "says"), [each[1:] for each in BROKEN], ids=[each[0] for each in BROKEN])
def test_ldmatrix_is_judged_like_any_read(source: str, kind: str, says: str) -> None:
    values = aligned(np.arange(256, dtype=np.uint16))
    for seed in SEEDS:
        with pytest.raises(KernelFault, match=says) as caught:
            launch(source, [values, aligned(np.zeros(128, np.uint32))], check=True, seed=seed, threads=32)
        assert caught.value.kind == kind
        assert "BUG" in (caught.value.source_line or ""), caught.value


WORDS = """
extern "C" __global__ void kernel(const unsigned* a, unsigned* out) {
  __shared__ __align__(16) unsigned tile[32];
  tile[threadIdx.x] = a[threadIdx.x];
  __syncwarp();
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(tile)) + 4 * (threadIdx.x ^ 1);
  unsigned r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address) : "memory"); // BUG
  out[threadIdx.x] = r;
}
"""
BROKEN_WORDS = [
    ("no barrier", WORDS.replace("  __syncwarp();", ""), "race"),
    ("a word between two", WORDS.replace("^ 1)", "^ 1) + 2"), "misaligned"),
    ("a word beyond the tile", WORDS.replace("^ 1)", "^ 1) + 4"), "out-of-bounds"),
    ("a generic address cut short", WORDS.replace("__cvta_generic_to_shared(tile)", "5"), "out-of-bounds"),
]


@needs_check
@pytest.mark.parametrize(
    ("source", "kind"), [each[1:] for each in BROKEN_WORDS], ids=[each[0] for each in BROKEN_WORDS]
)
def test_a_word_of_shared_memory_is_judged_like_any_read(source: str, kind: str) -> None:
    compile_for(A100, source, threads=32)
    for seed in SEEDS:
        with pytest.raises(KernelFault) as caught:
            launch(source, [aligned(np.zeros(32, np.uint32))] * 2, check=True, seed=seed, threads=32)
        assert caught.value.kind == kind
        assert "BUG" in str(caught.value)


@needs_check
@pytest.mark.parametrize(("source", "kind", "says"), [each[1:] for each in STORED], ids=[each[0] for each in STORED])
def test_stmatrix_is_judged_like_any_write(source: str, kind: str, says: str) -> None:
    values = aligned(np.arange(256, dtype=np.uint16))
    for seed in SEEDS:
        with pytest.raises(KernelFault, match=says) as caught:
            launch(source, [values, aligned(np.zeros(256, np.uint16))], check=True, seed=seed, threads=32)
        assert caught.value.kind == kind
        assert "BUG" in (caught.value.source_line or ""), caught.value


def test_stmatrix_is_cuda_from_hopper_on() -> None:
    compile_all_for(H200, [stmatrix(count) for count in (1, 2, 4)], threads=32)


@pytest.mark.parametrize("target", [A100, H200], ids=lambda target: target.arch)
def test_ldmatrix_is_cuda(target: Target) -> None:
    rights = [ldmatrix(count, trans) for count in (1, 2, 4) for trans in (False, True)]
    compile_all_for(target, [*rights, *(source for _, source, _, _ in BROKEN)], threads=32)


# --- a whole GEMM: cp.async into two stages, ldmatrix, mma.sync

GEMM = """
constexpr int M = 256, N = 256, K = 256, DEEP = 32, PITCH_A = DEEP + 8, PITCH_B = 64 + 8;
__device__ __forceinline__ unsigned place_of(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void copy16(const void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(place_of(to)), "l"(from) : "memory");
}
extern "C" __global__ void __launch_bounds__(128) kernel(const unsigned short* a, const unsigned short* b, float* c) {
  __shared__ __align__(16) unsigned short as[2][64 * PITCH_A], bs[2][DEEP * PITCH_B];
  const int i = threadIdx.x, lane = i % 32, warp = i / 32;
  const int row0 = 64 * blockIdx.y, column0 = 64 * blockIdx.x;
  const auto fill = [&](int stage, int k0) {
    for (int part = i; part < 256; part += 128) {
      copy16(as[stage] + part / 4 * PITCH_A + part % 4 * 8, a + (row0 + part / 4) * K + k0 + part % 4 * 8);
      copy16(bs[stage] + part / 8 * PITCH_B + part % 8 * 8, b + (k0 + part / 8) * N + column0 + part % 8 * 8);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  float sum[2][4][4] = {};
  fill(0, 0);
  for (int step = 0; step < K / DEEP; ++step) {
    if (step + 1 < K / DEEP) {
      fill((step + 1) % 2, (step + 1) * DEEP);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    __syncthreads(); // FILLED
    const unsigned short* at = as[step % 2];
    const unsigned short* bt = bs[step % 2];
    for (int k = 0; k < DEEP; k += 16) {
      unsigned ra[2][4], rb[4][2];
      for (int m = 0; m < 2; ++m) {
        const int row = warp / 2 * 32 + m * 16 + lane % 16, column = k + lane / 16 * 8;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" // READ
                     : "=r"(ra[m][0]), "=r"(ra[m][1]), "=r"(ra[m][2]), "=r"(ra[m][3])
                     : "r"(place_of(at + row * PITCH_A + column)) : "memory");
      }
      for (int n = 0; n < 4; n += 2) {
        const int row = k + lane % 16, column = warp % 2 * 32 + n * 8 + lane / 16 * 8;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" // READ
                     : "=r"(rb[n][0]), "=r"(rb[n][1]), "=r"(rb[n + 1][0]), "=r"(rb[n + 1][1])
                     : "r"(place_of(bt + row * PITCH_B + column)) : "memory");
      }
      for (int m = 0; m < 2; ++m) {
        for (int n = 0; n < 4; ++n) {
          float* d = sum[m][n];
          asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                       "{%8, %9}, {%0, %1, %2, %3};"
                       : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                       : "r"(ra[m][0]), "r"(ra[m][1]), "r"(ra[m][2]), "r"(ra[m][3]), "r"(rb[n][0]), "r"(rb[n][1]));
        }
      }
    }
    __syncthreads(); // FREE
  }
  for (int m = 0; m < 2; ++m) {
    for (int n = 0; n < 4; ++n) {
      for (int part = 0; part < 4; ++part) {
        const int row = row0 + warp / 2 * 32 + m * 16 + lane / 4 + part / 2 * 8;
        c[row * N + column0 + warp % 2 * 32 + n * 8 + lane % 4 * 2 + part % 2] = sum[m][n][part];
      }
    }
  }
}
"""


def small_numbers(shape: tuple[int, int], dtype: np.dtype, seed: int) -> Array:
    return aligned(np.random.default_rng(seed).integers(-8, 9, shape).astype(dtype))


def run_gemm(source: str, *, check: bool, seed: int, number: str = "f16") -> tuple[Array, Array]:
    a, b = (small_numbers((256, 256), NUMBERS[number], each) for each in (1, 2))
    c = aligned(np.full((256, 256), np.nan, np.float32))
    launch(source, [a.view(np.uint16), b.view(np.uint16), c], check=check, seed=seed, grid=(4, 4, 1))
    return c, product(a, b)


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("number", ["f16", "bf16"])
def test_a_gemm(number: str, check: bool) -> None:
    source = GEMM.replace("f32.f16.f16.f32", f"f32.{number}.{number}.f32")
    for seed in (0, 1):
        got, want = run_gemm(source, check=check, seed=seed, number=number)
        assert np.array_equal(got, want)


@pytest.mark.parametrize("target", [A100, H200], ids=lambda target: target.arch)
def test_the_gemm_is_cuda(target: Target) -> None:
    compile_for(target, GEMM)


@needs_check
@pytest.mark.parametrize("barrier", ["FILLED", "FREE"])
def test_a_gemm_without_a_barrier_races(barrier: str) -> None:
    source = GEMM.replace(f"__syncthreads(); // {barrier}", "")
    with pytest.raises(KernelFault) as caught:
        run_gemm(source, check=True, seed=0)
    lines = source.splitlines()
    places = [lines[place - 1] for place in (caught.value.line, caught.value.other_line) if place]
    assert caught.value.kind == "race"
    assert any("READ" in place for place in places), caught.value


# --- MFMA


@dataclass(frozen=True)
class Mfma:
    builtin: str
    size: int
    number: str
    other: str = ""  # what B is of, where it is another type
    narrow: int = 0  # values of 8 bits,
    wide: int = 4  # and of 16
    arch: str = ""  # whose types it multiplies

    def __str__(self) -> str:
        return self.builtin

    @property
    def values(self) -> int:
        """Of A and of B in a lane."""
        return self.narrow or {"f32": 1, "tf32": 2}.get(self.number, self.wide)

    @property
    def whole(self) -> bool:
        return self.number == "s8"

    @property
    def k(self) -> int:
        return 64 // self.size * self.values

    @property
    def source(self) -> str:
        results = self.size * self.size // 64
        kind = {"f16": "_Float16", "bf16": "short", "f32": "float", "tf32": "float"}.get(self.number, "unsigned char")
        many, sum_type = self.values > 1, "int" if self.whole else "float"
        vector = {4: "int Values", 8: "long Values"}.get(
            self.narrow,
            f"{kind} Values __attribute__((ext_vector_type({self.values})))" if many else f"{kind} Values",
        )
        if self.narrow == 16:
            vector = "int Values __attribute__((ext_vector_type(4)))"
        if self.wide == 8 and self.number == "bf16":  # vectors of numbers, which are filled with their bits
            vector = vector.replace("short", "__bf16")
        fill = f"reinterpret_cast<{kind}*>(&{{0}})[i]" if self.narrow or self.wide == 8 else "{0}[i]" if many else "{0}"
        return f"""
typedef {vector};
using Sums = {sum_type} __attribute__((ext_vector_type({results})));
extern "C" __global__ void kernel(const {kind}* a, const {kind}* b, const {sum_type}* c, {sum_type}* d) {{
  const int lane = threadIdx.x, place = lane % {self.size}, group = lane / {self.size};
  Values x, y;
  for (int i = 0; i < {self.values}; ++i) {{
    {fill.format("x")} = a[place * {self.k} + {self.values} * group + i];
    {fill.format("y")} = b[({self.values} * group + i) * {self.size} + place];
  }}
  const auto at = [&](int i) {{ return (i / 4 * {256 // self.size} + 4 * group + i % 4) * {self.size} + place; }};
  Sums sums;
  for (int i = 0; i < {results}; ++i) sums[i] = c[at(i)];
  sums = __builtin_amdgcn_mfma_{self.builtin}(x, y, sums, 0, 0, 0); // BUG
  for (int i = 0; i < {results}; ++i) d[at(i)] = sums[i];
}}
"""


OCP = {"fp8": "e4m3", "bf8": "e5m2"}
MFMAS = [
    Mfma("f32_32x32x8f16", 32, "f16"),
    Mfma("f32_16x16x16f16", 16, "f16"),
    Mfma("f32_32x32x8bf16_1k", 32, "bf16"),
    Mfma("f32_16x16x16bf16_1k", 16, "bf16"),
    Mfma("f32_32x32x2f32", 32, "f32"),
    Mfma("f32_16x16x4f32", 16, "f32"),
]
OF_GFX90A = [Mfma("i32_32x32x8i8", 32, "s8", narrow=4), Mfma("i32_16x16x16i8", 16, "s8", narrow=4)]
OF_GFX942 = [
    *(Mfma(f"f32_32x32x16_{a}_{b}", 32, a, b, narrow=8) for a in ("fp8", "bf8") for b in ("fp8", "bf8")),
    *(Mfma(f"f32_16x16x32_{a}_{b}", 16, a, b, narrow=8) for a in ("fp8", "bf8") for b in ("fp8", "bf8")),
    Mfma("f32_32x32x4_xf32", 32, "tf32"),
    Mfma("f32_16x16x8_xf32", 16, "tf32"),
    Mfma("i32_32x32x16_i8", 32, "s8", narrow=8),
    Mfma("i32_16x16x32_i8", 16, "s8", narrow=8),
]
OF_GFX950 = [
    *(Mfma(f"f32_{size}x{size}x{512 // size}_{number}", size, number, wide=8)
      for size in (32, 16) for number in ("f16", "bf16")),
    *(Mfma(f"f32_{size}x{size}x{512 // size}_{a}_{b}", size, OCP[a], OCP[b], narrow=8, arch="gfx950")
      for size in (32, 16) for a in OCP for b in OCP),
    Mfma("i32_32x32x32_i8", 32, "s8", narrow=16),
    Mfma("i32_16x16x64_i8", 16, "s8", narrow=16),
]  # fmt: skip


def run_mfma(mfma: Mfma, source: str, *, check: bool, seed: int = 0, warp: int = 64) -> tuple[Array, Array]:
    size, k = mfma.size, mfma.k
    a, b = distinct(size, k, NUMBERS[mfma.number], 1), distinct(k, size, NUMBERS[mfma.number], 2)
    if mfma.narrow:
        rng = np.random.default_rng(seed)
        least, most = (-128, 128) if mfma.whole else (-8, 9)
        kinds = NUMBERS[mfma.number], NUMBERS[mfma.other or mfma.number]
        a, b = (aligned(rng.integers(least, most, x.shape).astype(n)) for x, n in zip((a, b), kinds, strict=True))
    sums = np.dtype(np.int32 if mfma.whole else np.float32)
    c, d = distinct(size, size, sums, 3), aligned(np.full((size, size), -1 if mfma.whole else np.nan, sums))
    given = [each.view(np.uint8) if mfma.narrow else each for each in (a, b)]
    launch(source, [*given, c, d], check=check, seed=seed, threads=64, warp=warp, arch=mfma.arch)
    return d, product(a, b, c).astype(sums)


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize(
    "mfma", [*MFMAS, *OF_GFX90A, *OF_GFX942, *OF_GFX950], ids=lambda mfma: f"{mfma} {mfma.arch}".strip()
)
def test_mfma_multiplies(mfma: Mfma, check: bool) -> None:
    for seed in SEEDS:
        got, want = run_mfma(mfma, mfma.source, check=check, seed=seed)
        assert np.array_equal(got, want)


@pytest.mark.parametrize(
    ("target", "own"),
    [(MI250X, OF_GFX90A), (MI300X, OF_GFX942), (MI355X, OF_GFX950)],
    ids=lambda x: getattr(x, "arch", ""),
)
def test_mfma_is_hip(target: Target, own: Sequence[Mfma]) -> None:
    compile_all_for(target, [mfma.source for mfma in (*MFMAS, *own)], threads=64)


def test_half_a_wave_can_not_multiply() -> None:
    source = MFMAS[0].source.replace("  sums = ", "  if (lane < 32) sums = ")
    with pytest.raises(KernelFault, match="lane 32 has ended") as caught:
        run_mfma(MFMAS[0], source, check=False)
    assert caught.value.kind == "divergent-warp"


def test_a_warp_of_32_has_no_mfma_and_a_wave_of_64_no_mma() -> None:
    with pytest.raises(KernelFault, match="belongs to warps of 64 lanes, and this one has 32"):
        run_mfma(MFMAS[0], MFMAS[0].source, check=False, warp=32)
    a, b, c, d = (aligned(np.zeros(256, kind)) for kind in (np.uint16, np.uint16, np.float32, np.float32))
    with pytest.raises(KernelFault, match="belongs to warps of 32 lanes, and this one has 64"):
        launch(MMAS[0].source, [a, b, c, d], check=False, threads=64, warp=64)


def test_broadcasts_of_mfma_are_refused() -> None:
    with pytest.raises(KernelFault, match="no model of a matrix instruction with cbsz, abid or blgp"):
        run_mfma(MFMAS[0], MFMAS[0].source.replace("sums, 0, 0, 0", "sums, 1, 0, 0"), check=False)


def test_vector_types_count_bytes() -> None:
    assert rewrite_vectors("typedef const float f4 __attribute__((ext_vector_type(4)));\nint ext;\n") == (
        "typedef const float f4 __attribute__((vector_size((4) * sizeof(const float))));\nint ext;\n"
    )
    templated = "template <class T> using V = T __attribute__((aligned(4), __ext_vector_type__(N / 2)));"
    assert "vector_size((N / 2) * sizeof(T))" in rewrite_vectors(templated)
    with pytest.raises(EmulatorBuildError, match=r"line 2: the emulator can't read this vector type"):
        rewrite_vectors("int i;\nfloat __attribute__((ext_vector_type(4))) x;\n")


@pytest.mark.parametrize(
    "instruction",
    ["mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b6x16_p32"],
)
def test_other_shapes_and_numbers_are_refused_by_name(instruction: str) -> None:
    source = f'extern "C" __global__ void kernel(int* y) {{\n  asm("{instruction} %0, %0;" : "+r"(*y));\n}}\n'
    with pytest.raises(EmulatorBuildError, match=f"no model of the instruction {instruction.replace('.', '[.]')}: add"):
        build(source, "kernel", warp=32, check=False, filename="refused.cu")


def test_lanes_at_different_instructions_on_one_line_are_told_apart() -> None:
    source = MMAS[0].source
    start = source.index("  asm volatile")
    end = source.index("  for (int i = 0; i < 4; ++i) d[")
    statement = source[start:end].replace("// BUG", "").replace("\n", " ")
    other = (
        replace(MMAS[0], number="bf16")
        .source[start : end + 4]
        .split("  for")[0]
        .replace("// BUG", "")
        .replace("\n", " ")
    )
    both = f"if (lane & 1) {{ {statement} }} else {{ {other} }}\n"
    with pytest.raises(KernelFault, match=r"lane 1 executes another mma\.sync than lane 0"):
        run_mma(MMAS[0], source[:start] + both + source[end:], check=False, seed=0)
