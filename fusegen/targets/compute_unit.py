"""What a compute unit of CDNA does in a cycle: the facts that costs and simulations of AMD's kernels share.

    unit_of(MI300X).matrix_cycles("v_mfma_f32_32x32x8_bf16")    # 32: eight passes of four cycles

No AMD GPU was measured. What documents say is cited; what is taken from people's measurements, or assumed, says so.
Sources: "AMD Instinct MI300" CDNA 3 ISA (MFMA, their passes, wait states, waitcnt), the white papers of CDNA 2, 3 and
4, AMD's matrix instruction calculator, and ROCm Compute Profiler's "Pipeline descriptions" and "Local data share".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fusegen.targets.base import Target

PASS_CYCLES = 4
"""A SIMD has a turn to issue each four cycles, in which its 16 lanes go through a wave's 64; an MFMA takes several."""
RESULT_PASSES = 3
"""After an MFMA's last pass, until others than an MFMA that adds to the same sums may read them: CDNA 3 ISA, "Manually
inserted wait states", which are a pass each."""
SCALAR_LOAD_CYCLES = 200  # from a scalar load to its data: assumed
NAME = re.compile(r"v_mfma_(?:f32|i32)_(16|32)x\1x\d+_?(xf32|f32|f16|bf16|i8|fp8|bf8)(?:_1k|_fp8|_bf8)?(?:_e64)?$")


@dataclass(frozen=True, slots=True)
class ComputeUnit:
    """Rates of one compute unit, in cycles of its clock and bytes."""

    ghz: float
    passes: Mapping[int, int]  # of an MFMA of 16 x 16 or 32 x 32 sums, one block: AMD's calculator
    f32_passes: Mapping[int, int]  # of f32 factors as they are,
    f32_alone: bool  # beside which the SIMD issues no vector instruction: AMD's calculator, "Can co-execute with VALU"
    lds_bytes: int  # a cycle that the LDS writes, all lanes together and without conflicts,
    lds_read_bytes: int  # and reads, where a lane reads 16 bytes
    l1_bytes: int  # a cycle between the unit and its vector L1 cache
    l2_bytes: float  # a cycle, a unit's share of what a die's L2 cache gives
    dram_bytes: float  # a cycle, a unit's share of memory
    rounds_bf16: bool  # by an instruction of its own: v_cvt_pk_bf16_f32 of CDNA 4
    cache_bytes: float  # a cycle, a unit's share of the Infinity Cache; memory's where there is none
    lds_latency: int = 64  # cycles to data that nobody else asks for: assumed, as measured by others on GCN
    cache_ns: float = 218.0  # to the Infinity Cache: Chips and Cheese, "Testing AMD's Giant MI300X"
    dram_ns: float = 350.0  # to memory on an idle MI300X, as others measured: 341 to 353
    simds: int = 4

    @property
    def cache_latency(self) -> int:
        """Cycles to what another block has asked memory for before."""
        return round(self.cache_ns * self.ghz)

    @property
    def dram_latency(self) -> int:
        return round(self.dram_ns * self.ghz)

    def matrix_cycles(self, name: str) -> int:
        """Of the matrix unit of one SIMD. Raises LookupError for an instruction whose passes are not known here."""
        side, factors = parts_of(name)
        return (self.f32_passes if factors == "f32" else self.passes)[side] * PASS_CYCLES

    def vector_cycles(self, name: str) -> int:
        """For which the SIMD issues no other vector instruction beside it. Raises as `matrix_cycles`."""
        alone = self.f32_alone and parts_of(name)[1] == "f32"
        return self.matrix_cycles(name) if alone else PASS_CYCLES


def parts_of(name: str) -> tuple[int, str]:
    """Rows of an MFMA's sums, and what its factors are called. Raises LookupError for another instruction."""
    found = NAME.match(name)
    if not found:
        raise LookupError(f"{name} is no MFMA of one block of 16 x 16 or 32 x 32 sums, whose passes are known")
    return int(found[1]), found[2]


SLOW = {16: 8, 32: 16}
FAST = {16: 4, 32: 8}
PASSES: Mapping[str, Mapping[int, int]] = {"gfx90a": SLOW, "gfx942": FAST, "gfx950": FAST}
"""Of factors of 16 and 8 bits and xf32. gfx950's are twice as deep where they are its own, in as many passes."""
# CDNA 4's reads are twice as fast: Chips and Cheese, "AMD's CDNA 4 Architecture Announcement", by AMD's slides
LDS_READ_BYTES = {"gfx90a": 128, "gfx942": 128, "gfx950": 256}
LDS_BYTES = 128  # ROCm Compute Profiler, "Local data share": 32 banks of 4 bytes
L1_BYTES = 64  # ROCm Compute Profiler, "Vector L1 cache": 64 B a clock and unit
L2_DIE_BYTES = 2048  # CDNA 2 and 3 white papers: a clock, 128 B from each of 16 channels; 32 of 64 B on CDNA 2
INFINITY_CACHE_GBS = {"gfx942": 17200.0, "gfx950": 17200.0}  # CDNA 3 white paper, peak; CDNA 4's is taken to be as fast


def unit_of(target: Target) -> ComputeUnit | None:
    """None for what is not CDNA 2 to 4."""
    passes = PASSES.get(target.arch)
    if passes is None:
        return None
    ghz = clock_ghz(target)
    per_cycle = 1.0 / (target.sms * ghz)  # bytes of one unit a cycle, for each GB/s of the GPU
    dram = target.dram_gbs * per_cycle
    return ComputeUnit(
        ghz=ghz,
        passes=passes,
        f32_passes=SLOW,
        f32_alone=target.arch != "gfx90a",
        lds_bytes=LDS_BYTES,
        lds_read_bytes=LDS_READ_BYTES[target.arch],
        l1_bytes=L1_BYTES,
        l2_bytes=L2_DIE_BYTES * target.dies / target.sms,
        dram_bytes=dram,
        rounds_bf16=target.arch == "gfx950",
        cache_bytes=INFINITY_CACHE_GBS[target.arch] * per_cycle if target.arch in INFINITY_CACHE_GBS else dram,
    )


def clock_ghz(target: Target) -> float:
    """The peak clock that the data sheet's vector rate is of: 2.1 of an MI300X."""
    return target.fp32_tflops * 1e3 / (target.sms * 2 * target.f32_lanes)
