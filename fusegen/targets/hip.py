"""AMD: what hiprtc compiles, and the facts of the GPUs that kernels are planned for.

Half and bfloat16 are clang's own `_Float16` and `__bf16`, converted by plain casts, and no header is included. hiprtc
finds `hip/hip_fp16.h` only where an include path to a full ROCm is given, and each inclusion costs compile time; the
casts need neither. They lower to what the headers' functions promise: read in the code of ROCm 7.2 for gfx90a and
gfx942, float to half is one `v_cvt_f16_f32` (the wave's rounding mode, which is to nearest even at kernel start),
float to bfloat16 adds 0x7fff and the lowest kept bit, then selects a quieted NaN for NaN input; widening either is
exact. On gfx950 the same casts become one `v_cvt_pk_bf16_f32` for two numbers. `tests/targets/test_targets.py` looks
for these instructions.

A model is what one HIP device is: one compute die (GCD) of an MI250X, the whole of an MI300X. Registers are the unified
file of gfx90a, gfx942 and gfx950: 512 per lane in each of four SIMDs, shared by vector and accumulation registers,
handed out in eights. Sources: "AMD CDNA 2" and "AMD CDNA 3" white papers and instruction set manuals, LLVM's AMDGPU
usage guide ("Waves per EU" and VGPR granularity), and the data sheets named beside the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusegen.language.types import DType, bf16, f8e4m3, f8e4m3fnuz, f8e5m2, f8e5m2fnuz, f16, f32, i8, i32
from fusegen.targets.atoms import Atom, Fragment, Term
from fusegen.targets.base import CTYPES, TO_STORAGE, TO_VALUE, Spelling, Target


def orders(above: str) -> tuple[str, ...]:
    """The orders of two floats of 16 bits. `above`: what makes a bit 15 of a size beyond infinity's, twice."""
    return (
        "const unsigned size = pair & 0x7fff7fffu;",
        f"const unsigned none = (size + {above}) & 0x80008000u;  // the top bit of a NaN,",
        "const unsigned below = pair & (size + 0x7fff7fffu) & ~none & 0x80008000u;  // and of what is below 0",
        "const unsigned bits = size | (none - (none >> 15));",
        "return (bits ^ (below - (below >> 15))) | (below ^ 0x80008000u);",
    )


def reduced(sign: str, lanes: int = 64) -> tuple[str, ...]:
    """The least (`<`) or the most (`>`) in a wave of so many lanes, in every lane."""
    return (
        f"for (int step = {lanes // 2}; step > 0; step /= 2) {{",
        "  const unsigned other = __shfl_xor(v, step);",
        f"  v = v {sign} other ? v : other;",
        "}",
        "return v;",
    )


def dpp(word: str, control: str) -> str:
    """The word of another lane among 16: CDNA 3 ISA, "DPP"."""
    return f"__builtin_amdgcn_update_dpp(0, {word}, {control}, 0xf, 0xf, true)"


# DPP is part of an addition or a move: v_add_f32 of a neighbour's number takes no more than one of its own, where
# ds_bpermute_b32 is the LDS's, with an address of its own, and waited for. Lanes 32 apart have nothing else.
PARTNERS_OF_16 = (
    "const int word = __builtin_bit_cast(int, v);",
    "int other = 0;",
    f"if (step == 1) other = {dpp('word', '0xb1')};  // quad_perm:[1,0,3,2]",
    f"if (step == 2) other = {dpp('word', '0x4e')};  // quad_perm:[2,3,0,1]",
    "if (step == 4) {",
    f"  const int mirrored = {dpp('word', '0x141')};  // of 8 lanes,",
    f"  other = {dpp('mirrored', '0x1b')};  // and then of each 4",
    "}",
    f"if (step == 8) other = {dpp('word', '0x128')};  // row_ror:8",
)
PARTNER = (
    *PARTNERS_OF_16,
    "if (step == 16) other = __builtin_amdgcn_ds_swizzle(word, 0x401f);  // swizzle(SWAP,16)",
    "if (step == 32) other = __shfl_xor(word, 32);",
    "return __builtin_bit_cast(decltype(v), other);",
)


# ---- matrix units
WORDS = {"_Float16": 2, "__bf16": 2, "short": 2, "float": 4, "int": 4, "long": 8}  # bytes
SUMS_32 = Fragment(
    rows=(Term("lane", mod=32),),
    cols=(Term("i", div=4, times=8), Term("lane", div=32, times=4), Term("i", mod=4)),
    lanes=64,
)
SUMS_16 = Fragment(rows=(Term("lane", mod=16),), cols=(Term("lane", div=16, times=4), Term("i")), lanes=64)


def mfma(factors: DType, word: str, size: int, k: int, suffix: str, instructions: int = 2) -> Atom:
    """CDNA 3 ISA, "Matrix core": v_mfma_f32_32x32 and v_mfma_f32_16x16, of a depth of their own. A lane loads 16 bytes
    at a time, which two instructions multiply, or four of f32, or one of gfx950's that are twice as deep; the product's
    columns are their rows."""
    return Atom(
        kind="mfma",
        instruction=f"__builtin_amdgcn_mfma_f32_{size}x{size}x{k}{suffix}",
        factors=factors,
        word=word,
        rows=size,
        cols=size,
        col_step=size,
        k=instructions * k,
        issuer="warp",
        left=("registers",),
        right=("registers",),
        sums="registers",
        fragment=SUMS_32 if size == 32 else SUMS_16,
        instructions=instructions,
        lane_words=16 // instructions // WORDS[word],
    )


def narrow(left: tuple[DType, str], right: tuple[DType, str], size: int, k: int, name: str, word: str) -> Atom:
    """The same of 8 bits, whose instructions take 4 bytes a lane on gfx90a, 8 on gfx942, and of i8 16 on gfx950."""
    whole = left[0] is i8
    instructions = 1024 // (size * k)  # 16 bytes of each of 64 lanes
    return replace(
        mfma(left[0], word, size, k, "", instructions),
        instruction=f"__builtin_amdgcn_mfma_{'i32' if whole else 'f32'}_{size}x{size}x{k}{name}",
        other=right[0],
        sum_type=i32 if whole else f32,
    )


FLOATS = ((f8e4m3fnuz, "fp8"), (f8e5m2fnuz, "bf8"))  # of gfx942: CDNA 3 ISA, "FP8 and BF8"
OCP_FLOATS = ((f8e4m3, "fp8"), (f8e5m2, "bf8"))  # what the same instructions of gfx950 are taken to multiply
WHOLE = i8, "i8"
NARROW_CDNA_2 = (narrow(WHOLE, WHOLE, 32, 8, "i8", "int"), narrow(WHOLE, WHOLE, 16, 16, "i8", "int"))


def narrow_floats(floats: tuple[tuple[DType, str], ...]) -> tuple[Atom, ...]:
    """Of each two of them."""
    return tuple(
        narrow(left, right, size, k, f"_{right[1]}_{left[1]}", "long")  # its rows are the product's columns
        for left in floats
        for right in floats
        for size, k in ((32, 16), (16, 32))
    )


NARROW_CDNA_3 = (
    *narrow_floats(FLOATS),
    narrow(WHOLE, WHOLE, 32, 16, "_i8", "long"),
    narrow(WHOLE, WHOLE, 16, 32, "_i8", "long"),
)
NARROW_CDNA_4 = (
    *narrow_floats(OCP_FLOATS),
    narrow(WHOLE, WHOLE, 32, 32, "_i8", "int"),
    narrow(WHOLE, WHOLE, 16, 64, "_i8", "int"),
)
MFMA = (
    mfma(f16, "_Float16", 32, 8, "f16"),
    mfma(bf16, "short", 32, 8, "bf16_1k"),
    mfma(f32, "float", 32, 2, "f32", 4),
    mfma(f16, "_Float16", 16, 16, "f16"),
    mfma(bf16, "short", 16, 16, "bf16_1k"),
    mfma(f32, "float", 16, 4, "f32", 4),
)
MFMA_CDNA_3 = (  # of f32 as xf32, which has tf32's 11 significant bits: CDNA 3 ISA, "V_MFMA_F32_32X32X4_XF32"
    *MFMA[:2],
    mfma(f32, "float", 32, 4, "_xf32"),
    *MFMA[3:5],
    mfma(f32, "float", 16, 8, "_xf32"),
)
MFMA_CDNA_4 = (
    mfma(f16, "_Float16", 32, 16, "_f16", 1),
    mfma(bf16, "__bf16", 32, 16, "_bf16", 1),
    MFMA[2],
    mfma(f16, "_Float16", 16, 32, "_f16", 1),
    mfma(bf16, "__bf16", 16, 32, "_bf16", 1),
    MFMA[5],
)

CHAINED = (MFMA[3], MFMA[4])  # whose sums a lane has of one row each, as it has the next product's factor
CHAINED_CDNA_4 = (MFMA_CDNA_4[3], MFMA_CDNA_4[4])  # and here those of two tiles of keys, which are as deep as one step

SPELLING = Spelling(
    file_suffix=".hip",
    headers={},
    ctype={f16: "_Float16", bf16: "__bf16", **CTYPES},
    to_value={f16: "static_cast<float>({0})", bf16: "static_cast<float>({0})", **TO_VALUE},
    to_storage={f16: "static_cast<_Float16>({0})", bf16: "static_cast<__bf16>({0})", **TO_STORAGE},
    barrier="__syncthreads();",
    lanes="unsigned long long",
    warp_barrier="__syncthreads();",  # ROCm has no word for less; groups of one wave take equally many steps
    shuffle_xor="__shfl_xor({0}, {1})",  # the _sync form of ROCm 7 wants a 64-bit mask, and ROCm 6 has none
    shuffle_among="__shfl_xor({0}, {1})",
    shuffle="__shfl({0}, {1}, {2})",
    # It takes the vector apart in the test's branch: of 8 loads of a causal row each was waited for, 1 in flight a wave
    tested_loads_wait=True,
    # v_exp_f32, v_rcp_f32 and v_log_f32, 1 ulp each ("CDNA 3 instruction set", VOP1); v_max_f32 drops a NaN, so the
    # larger is a comparison and a selection
    functions={
        "power_of_2": ("return __builtin_amdgcn_exp2f(x);",),
        "reciprocal": ("return __builtin_amdgcn_rcpf(x);",),
        "log_2": ("return __builtin_amdgcn_logf(x);",),
        "larger": ("return a > b || a != a ? a : b;",),
        "smaller": ("return a < b || a != a ? a : b;",),
        # v_cvt_i32_f32 does all of this by itself ("CDNA 3 instruction set", VOP1), but a cast beyond int is undefined
        "to_int": (
            "if (x != x) return 0;",
            "if (x >= 2147483648.0f) return 2147483647;",
            "return x < -2147483648.0f ? -2147483647 - 1 : static_cast<int>(x);",
        ),
        "partner": PARTNER,
        "to_tf32": (
            "const bool no_number = __uint_as_float(bits) != __uint_as_float(bits);  // by bits that may go",
            "return no_number ? bits | 0x400000u : (bits + 0x1000u) & 0xffffe000u;",
        ),
        "ballot": ("__ballot(says)",),
        "popcount": ("__popcll(lanes)",),
        "warp_least": reduced("<"),
        "warp_most": reduced(">"),
        "warp_total": (
            "for (int step = 32; step > 0; step /= 2) v += __shfl_xor(v, step);",
            "return v;",
        ),
        "shuffle_up": ("__shfl_up(v, step)",),
        "from_first_lane": ("__shfl(start, 0)",),
        "orders_f16": orders("0x03ff03ffu"),
        "orders_bf16": orders("0x007f007fu"),
        "key_pair_f16": (
            "const _Float16 halves[2] = {static_cast<_Float16>(first), static_cast<_Float16>(second)};",
            "unsigned pair;",
            "memcpy(&pair, halves, sizeof(pair));",
            "return pair;",
        ),
        "meet": ('__builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");', "__builtin_amdgcn_wave_barrier();"),
        "unknown": ("return x;",),
        "forget": ('asm volatile("" : "+v"(words[i]));',),
        "load_evict_first": (
            "typedef unsigned Bits __attribute__((vector_size(sizeof(Vec<T, N>))));",
            "const Bits bits = __builtin_nontemporal_load(reinterpret_cast<const Bits*>(p));",
            "return *reinterpret_cast<const Vec<T, N>*>(&bits);",
        ),
    },
)

# v_maximum3_f32 and v_minimum3_f32 keep a NaN, and take two numbers more where three instructions and one of the scalar
# unit took one. clang has words for them from 20 on, which is what knows the architecture.
SPELLING_CDNA_4 = replace(
    SPELLING,
    functions={
        **SPELLING.functions,
        "larger": ("return __builtin_elementwise_maximum(a, b);",),
        "smaller": ("return __builtin_elementwise_minimum(a, b);",),
    },
)

MI250X = Target(
    vendor="hip",
    model="mi250x",
    arch="gfx90a",
    warp=64,
    sms=110,
    shared_bytes=64 * 1024,
    shared_per_sm=64 * 1024,
    shared_reserved=0,
    shared_unit=512,  # LDS is handed out in steps of 128 dwords
    registers_per_sm=4 * 512 * 64,
    registers_per_thread=512,
    register_unit=8,
    schedulers_per_sm=4,
    scalar_registers=800,
    threads_per_sm=4 * 8 * 64,  # eight waves on each SIMD
    blocks_per_sm=32,  # 16 barriers, but a block of one wave needs none, and of 32 waves only 16 pairs fit
    threads_per_block=1024,
    max_grid=2**31 - 1,
    max_grid_y=65535,
    max_grid_threads=2**32 - 1,  # HIP counts a grid in threads, in 32 bits
    l2_bytes=8 * 1024**2,  # CDNA 2 white paper, one die
    dram_gbs=1638.4,  # MI250X data sheet: 3276.8 for two dies
    fp32_tflops=23.95,  # MI250X data sheet: 47.9 for two dies
    matrix_tflops=191.5,  # MI250X data sheet: 383 for two dies
    f32_tflops=47.85,  # MI250X data sheet, of f32 as it is: 95.7 for two dies
    narrow_tflops=191.5,  # MI250X data sheet, of whole numbers: 383 for two dies
    f32_lanes=64,
    vote_bytes=256,  # ROCm's device library: one word for each of 64 waves
    spelling=SPELLING,
    atoms=(*MFMA, *NARROW_CDNA_2),
    chained=CHAINED,
    multiplies_f32=True,
    flushes_factors=True,  # gfx90a's f16 and bf16 MFMA; PyTorch's notes on numerical accuracy say so, gfx942 does not
)

# MI250 and MI210: the same die with 104 of its compute units.
# MI250 data sheet: 45.3, 362.1, 90.5 and 362.1 for two dies
MI250 = replace(
    MI250X, model="mi250", sms=104, fp32_tflops=22.65, matrix_tflops=181.05, f32_tflops=45.25, narrow_tflops=181.05
)
# MI210 data sheet
MI210 = replace(
    MI250X, model="mi210", sms=104, fp32_tflops=22.6, matrix_tflops=181.0, f32_tflops=45.3, narrow_tflops=181.0
)

MI300X = replace(
    MI250X,
    model="mi300x",
    arch="gfx942",
    sms=304,
    l2_bytes=8 * 4 * 1024**2,  # CDNA 3 white paper: 4 MiB on each of 8 dies; the 256 MiB Infinity Cache comes on top
    dies=8,  # ROCm's documentation, "AMD Instinct MI300X workload optimization": blocks go to them in turn
    dram_gbs=5300.0,  # MI300X data sheet
    fp32_tflops=163.4,  # MI300X data sheet
    f32_lanes=128,  # two a lane and cycle, which the data sheet counts
    matrix_tflops=1307.4,  # MI300X data sheet
    f32_tflops=653.7,  # MI300X data sheet, of xf32, which is tf32
    narrow_tflops=2614.9,  # MI300X data sheet, of f8 and of i8
    multiplies_f32=False,
    flushes_factors=False,
    atoms=(*MFMA_CDNA_3, *NARROW_CDNA_3),
)

MI300A = replace(
    MI300X,
    model="mi300a",
    sms=228,
    l2_bytes=6 * 4 * 1024**2,  # six dies
    dies=6,
    fp32_tflops=122.6,  # MI300A data sheet
    matrix_tflops=980.6,  # MI300A data sheet
    f32_tflops=490.3,  # MI300A data sheet, of xf32
    narrow_tflops=1961.2,  # MI300A data sheet, of f8 and of i8
)

MI325X = replace(MI300X, model="mi325x", dram_gbs=6000.0)  # MI325X data sheet

# 256 compute units, 160 KiB of LDS in each and 4 MiB of L2 on each of 8 dies: ROCm's documentation, "AMD GPU
# specifications". Rates are those of 2.4 GHz: a unit does 4096 operations a cycle of 16 bits, 8192 of 8 bits and 256 of
# f32, which gives the 2.5 and 5 PFLOP/s that AMD states. Of 8-bit floats those 5 are assumed to need
# v_mfma_f32_16x16x128_f8f6f4, which no plan uses yet, and half of them to be what is left. Clocks, and what isn't said
# here, which is as on gfx942, are assumed too.
MI355X = replace(
    MI300X,
    model="mi355x",
    arch="gfx950",
    sms=256,
    shared_bytes=160 * 1024,
    shared_per_sm=160 * 1024,
    shared_unit=1280,  # 320 dwords, by what is quoted of LLVM's getLdsDwGranularity
    dram_gbs=8000.0,  # 8 TB/s, as AMD states it
    fp32_tflops=157.3,
    matrix_tflops=2516.6,
    f32_tflops=157.3,  # there is no xf32 any more
    narrow_tflops=5033.2,
    f8_tflops=2516.6,
    spelling=SPELLING_CDNA_4,
    multiplies_f32=True,
    atoms=(*MFMA_CDNA_4, *NARROW_CDNA_4),
    chained=CHAINED_CDNA_4,
)

# the same at 2.2 GHz
MI350X = replace(
    MI355X, model="mi350x", fp32_tflops=144.2, matrix_tflops=2306.9, f32_tflops=144.2, narrow_tflops=4613.7,
    f8_tflops=2306.9,
)  # fmt: skip

MODELS: tuple[Target, ...] = (MI210, MI250, MI250X, MI300A, MI300X, MI325X, MI350X, MI355X)
DEFAULT = MI300X

ARCHES: Mapping[str, Target] = {"gfx90a": MI250X, "gfx942": MI300X, "gfx950": MI355X}
"""Architectures a target may be named by, each with the facts of its best-known model."""
