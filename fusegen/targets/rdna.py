"""AMD's RDNA 3 and 4: the facts of Radeon GPUs, and what is spelled otherwise than for the Instinct ones of hip.py.

A wave has 32 lanes here. What a target calls an SM is a *workgroup processor* (WGP): two compute units that share
128 KiB of LDS, of which a block may have 64. hiprtc compiles for that mode, in which a block's waves are on all four
SIMDs, and HIP's `multiProcessorCount` is the number of workgroup processors, not that of compute units (HIP's
documentation, "CU mode vs WGP mode"). Each SIMD has 1536 vector registers of 32 lanes, handed out in steps of 24, of
which a wave may have 256, and room for 16 waves. Scalar registers are as many for each wave, whatever it needs.

Sources: "RDNA3 Instruction Set Architecture", "RDNA4 Instruction Set Architecture", LLVM's AMDGPU usage guide and its
register granularities of gfx1100 and gfx1201, "AMD GPU specifications" of ROCm's documentation for caches, and the data
sheets named beside the numbers. The Infinity Cache, of 96 and 64 MiB, is behind the L2 cache and not counted.

What the matrix units make of subnormal factors is written nowhere: it is taken that they count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusegen.language.types import DType, bf16, f8e4m3, f8e5m2, f16, f32, i8, i32
from fusegen.targets.atoms import Atom, Fragment, Term
from fusegen.targets.base import Target
from fusegen.targets.hip import MI250X, PARTNERS_OF_16, SPELLING, reduced

WAVE = 32
# Lanes 16 apart: v_permlanex16_b32 gives each lane of 16 a lane of the other 16, here the one in its own place ("RDNA3
# Instruction Set Architecture", VOP3). It is no part of an addition, as DPP is, but has no wait for the LDS.
PARTNER = (
    *PARTNERS_OF_16,
    "if (step == 16) other = __builtin_amdgcn_permlanex16(0, word, 0x76543210, 0xfedcba98, false, false);",
    "return __builtin_bit_cast(decltype(v), other);",
)
SPELLING_RDNA_3 = replace(
    SPELLING,
    lanes="unsigned",
    functions={
        **SPELLING.functions,
        "partner": PARTNER,
        "ballot": ("static_cast<unsigned>(__ballot(says))",),
        "popcount": ("__popc(lanes)",),
        # __syncthreads waits for loads from memory too, as waves on two compute units have caches of their own. These
        # fences are of the LDS alone, which clang has a word for from 20 on
        "shared_barrier": (
            '__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");',
            "__builtin_amdgcn_s_barrier();",
            '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");',
        ),
        "warp_least": reduced("<", WAVE),
        "warp_most": reduced(">", WAVE),
        "warp_total": (
            f"for (int step = {WAVE // 2}; step > 0; step /= 2) v += __shfl_xor(v, step);",
            "return v;",
        ),
    },
)
# v_maximum_f32 and v_minimum_f32 keep a NaN ("RDNA4 Instruction Set Architecture", VOP3)
SPELLING_RDNA_4 = replace(
    SPELLING_RDNA_3,
    functions={
        **SPELLING_RDNA_3.functions,
        "larger": ("return __builtin_elementwise_maximum(a, b);",),
        "smaller": ("return __builtin_elementwise_minimum(a, b);",),
    },
)


# ---- matrix units
SUMS_RDNA_3 = Fragment(rows=(Term("lane", mod=16),), cols=(Term("i", times=2), Term("lane", div=16)), lanes=WAVE)
SUMS_RDNA_4 = Fragment(rows=(Term("lane", mod=16),), cols=(Term("lane", div=16, times=8), Term("i")), lanes=WAVE)


def wmma(factors: DType, word: str, name: str, words: int, instructions: int = 1) -> Atom:
    """Of RDNA 3: both lanes that have a row of a factor have all 16 of its elements, in `words`; of sums each has every
    other column of the product, which are rows to the instruction ("RDNA3 Instruction Set Architecture", "Wave Matrix
    Multiply Accumulate")."""
    return Atom(
        kind="wmma",
        instruction=f"__builtin_amdgcn_wmma_{'i32' if factors is i8 else 'f32'}_16x16x16_{name}",
        factors=factors,
        word=word,
        rows=16,
        cols=16,
        col_step=16,
        k=16 * instructions,
        issuer="warp",
        left=("registers",),
        right=("registers",),
        sums="registers",
        fragment=SUMS_RDNA_3,
        instructions=instructions,
        lane_words=words,
        arguments="true, {1}, true, {0}, {2}, false" if factors is i8 else "{1}, {0}, {2}",  # signed, not saturated
        repeated=True,
        sum_type=i32 if factors is i8 else f32,
    )


def halved(atom: Atom, other: DType | None = None) -> Atom:
    """Of RDNA 4: a lane has 8 of a row's 16 elements, and 8 neighbouring columns of sums."""
    return replace(
        atom,
        instruction=f"{atom.instruction}_gfx12",
        lane_words=atom.lane_words // 2,
        fragment=SUMS_RDNA_4,
        repeated=False,
        other=other,
    )


WMMA_RDNA_3 = (
    wmma(f16, "_Float16", "f16_w32", 16),
    wmma(bf16, "short", "bf16_w32", 16),
    wmma(i8, "int", "iu8_w32", 4, instructions=2),  # for 32 bytes of a row, as of halves
)
FLOATS = ((f8e4m3, "fp8"), (f8e5m2, "bf8"))
WMMA_RDNA_4 = (
    *map(halved, WMMA_RDNA_3),
    *(
        halved(wmma(left, "int", f"{right_name}_{left_name}_w32", 4, instructions=2), right)
        for left, left_name in FLOATS
        for right, right_name in FLOATS  # whose rows are the instruction's
    ),
)

RX7900XTX = replace(
    MI250X,
    model="rx7900xtx",
    arch="gfx1100",
    warp=WAVE,
    sms=48,  # 96 compute units
    shared_bytes=64 * 1024,
    shared_per_sm=128 * 1024,
    shared_unit=1024,  # "RDNA3 Instruction Set Architecture", "LDS"
    registers_per_sm=4 * 1536 * WAVE,
    registers_per_thread=256,
    register_unit=24,
    scalar_registers=0,  # 128 for each wave
    threads_per_sm=4 * 16 * WAVE,
    blocks_per_sm=32,  # as many barriers
    l2_bytes=6 * 1024**2,
    dram_gbs=960.0,  # data sheet
    fp32_tflops=61.4,  # data sheet
    matrix_tflops=122.8,  # data sheet
    f32_tflops=0.0,  # there is no matrix unit for f32,
    narrow_tflops=122.8,  # and whole numbers of 8 bits go at the rate of halves: data sheet
    f32_lanes=256,  # two a lane and cycle, which the data sheet counts
    spelling=SPELLING_RDNA_3,
    atoms=WMMA_RDNA_3,
    chained=WMMA_RDNA_3[:2],  # sums, once two lanes have traded theirs, are the next product's left factor
    multiplies_f32=False,
    flushes_factors=False,
)
# W7900 data sheet: the same die at a lower clock, with slower memory
W7900 = replace(
    RX7900XTX, model="w7900", dram_gbs=864.0, fp32_tflops=61.3, matrix_tflops=122.6, narrow_tflops=122.6,
)  # fmt: skip

RX9070XT = replace(
    RX7900XTX,
    model="rx9070xt",
    arch="gfx1201",
    sms=32,  # 64 compute units
    l2_bytes=8 * 1024**2,
    dram_gbs=640.0,  # data sheet
    fp32_tflops=48.7,  # data sheet
    matrix_tflops=195.0,  # data sheet, without sparsity
    narrow_tflops=389.0,  # data sheet, of f8 and of i8, without sparsity
    spelling=SPELLING_RDNA_4,
    atoms=WMMA_RDNA_4,
    chained=WMMA_RDNA_4[:2],  # of which a lane has the sums of those elements that it has of a factor
)
# Radeon AI PRO R9700 data sheet
R9700 = replace(RX9070XT, model="r9700", fp32_tflops=47.8, matrix_tflops=191.0, narrow_tflops=383.0)

MODELS: tuple[Target, ...] = (RX7900XTX, W7900, RX9070XT, R9700)

ARCHES: Mapping[str, Target] = {"gfx1100": RX7900XTX, "gfx1201": RX9070XT}
"""Architectures a target may be named by, each with the facts of its best-known model."""
