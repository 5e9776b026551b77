"""AMD's RDNA 3 and 4: the facts of Radeon GPUs, and what is spelled otherwise than for the Instinct ones of hip.py.

A wave has 32 lanes here. What a target calls an SM is a *workgroup processor* (WGP): two compute units that share
128 KiB of LDS, of which a block may have 64. hiprtc compiles for that mode, in which a block's waves are on all four
SIMDs, and HIP's `multiProcessorCount` is the number of workgroup processors, not that of compute units (HIP's
documentation, "CU mode vs WGP mode"). Each SIMD has 1536 vector registers of 32 lanes, handed out in steps of 24, of
which a wave may have 256, and room for 16 waves. Scalar registers are as many for each wave, whatever it needs.

Sources: "RDNA3 Instruction Set Architecture", "RDNA4 Instruction Set Architecture", LLVM's AMDGPU usage guide and its
register granularities of gfx1100 and gfx1201, "AMD GPU specifications" of ROCm's documentation for caches, and the data
sheets named beside the numbers. The Infinity Cache, of 96 and 64 MiB, is behind the L2 cache and not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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
    atoms=(),
    chained=(),
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
)
# Radeon AI PRO R9700 data sheet
R9700 = replace(RX9070XT, model="r9700", fp32_tflops=47.8, matrix_tflops=191.0, narrow_tflops=383.0)

MODELS: tuple[Target, ...] = (RX7900XTX, W7900, RX9070XT, R9700)

ARCHES: Mapping[str, Target] = {"gfx1100": RX7900XTX, "gfx1201": RX9070XT}
"""Architectures a target may be named by, each with the facts of its best-known model."""
