"""What source is written for: the facts the planner reads and the spellings the templates read.

A Target is a value. The planner asks for facts (`t.warp`, `t.shared_bytes`), rendering asks for spellings
(`t.barrier`, `t.ctype[f16]`); nobody asks for a name. What runs a kernel is a device (`fusegen.runtime.devices`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fusegen.language.types import F8, DType, b8, f8e5m2, f32, i8, i32, i64, u8, u32
from fusegen.targets.atoms import Atom, Issuer

# what every vendor spells alike; the functions named are of fusegen.emitting.prelude
CTYPES: Mapping[DType, str] = {
    f32: "float", i32: "int", u32: "unsigned", i64: "long long", b8: "unsigned char",
    i8: "signed char", u8: "unsigned char", **dict.fromkeys(F8, "unsigned char"),
}  # fmt: skip
TO_VALUE: Mapping[DType, str] = {
    f32: "{0}", i32: "{0}", u32: "{0}", i64: "nearest_int({0})", b8: "{0} != 0",
    i8: "static_cast<int>({0})", u8: "static_cast<int>({0})", **{d: f"{d}_value({{0}})" for d in F8},
}  # fmt: skip
FITTING: Mapping[DType, str] = {  # what surely is a number of the type, or an infinity that it has
    i32: "{0}", u32: "{0}", i64: "{0}", i8: "static_cast<signed char>({0})", u8: "static_cast<unsigned char>({0})",
    **{d: f"to_{d}({{0}})" for d in F8}, f8e5m2: "to_f8e5m2_or_infinity({0})",
}  # fmt: skip
TO_STORAGE: Mapping[DType, str] = {
    f32: "{0}", i32: "{0}", u32: "{0}", i64: "{0}", b8: "static_cast<unsigned char>({0})",
    i8: "static_cast<signed char>(min(max({0}, -128), 127))", u8: "static_cast<unsigned char>(min(max({0}, 0), 255))",
    **{d: f"to_{d}({{0}})" for d in F8},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one vendor's dialect says what every kernel needs. Texts with `{0}` take an argument."""

    file_suffix: str  # ".cu" or ".hip"
    headers: Mapping[DType, str]  # the header a storage type needs, if any
    ctype: Mapping[DType, str]  # the C type of a storage type
    to_value: Mapping[DType, str]  # from the storage type to f32, i32, u32 or bool
    to_storage: Mapping[DType, str]  # and back, to nearest even
    barrier: str
    lanes: str  # a type with a bit for each lane of a warp
    warp_barrier: str  # where only the threads of one warp wait for each other
    shuffle_xor: str  # {0}: value, {1}: lane mask
    shuffle_among: str  # the same, {2}: of the lanes that come together, as bits
    shuffle: str  # {0}: value, {1}: lane, {2}: of how many neighbours, a power of two
    functions: Mapping[str, tuple[str, ...]]  # bodies of functions that the hardware has a word for
    tested_loads_wait: bool = False  # the compiler waits for a load under a test before it issues the next one


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU model: facts from its data sheet, and its vendor's spelling. Times are µs, rates GB/s (1e9 bytes)."""

    vendor: str  # "cuda" or "hip"
    model: str  # "h200", "mi300x"
    arch: str  # what the runtime compiler is told: "sm_90a", "gfx942"
    warp: int  # threads that run in step: a warp (32) or a wavefront (64)
    sms: int  # streaming multiprocessors or compute units
    shared_bytes: int  # shared memory (LDS) that one block may have
    shared_per_sm: int
    shared_reserved: int  # bytes the system takes from each block's shared memory
    shared_unit: int  # shared memory is handed to a block in steps of this many bytes
    registers_per_sm: int  # 32-bit registers
    registers_per_thread: int  # the most one thread may have
    register_unit: int  # registers are handed to a warp in steps of this many per thread
    schedulers_per_sm: int  # the registers of an SM are split evenly among its schedulers, and a warp lives on one
    scalar_registers: int  # of one scheduler, for all its warps; 0 where scalars are no kind of their own
    threads_per_sm: int
    blocks_per_sm: int
    threads_per_block: int
    max_grid: int  # blocks in one launch, first dimension
    max_grid_y: int  # second dimension
    max_grid_threads: int  # threads in one launch, first dimension
    l2_bytes: int  # of all dies
    dram_gbs: float  # data sheet
    fp32_tflops: float  # data sheet, vector unit
    matrix_tflops: float  # data sheet, matrix unit: dense products of f16 or bf16, summed in f32
    f32_tflops: float  # likewise, of f32, as tf32 or as it is
    narrow_tflops: float  # likewise, of the factors of 8 bits that it multiplies
    f32_lanes: int  # f32 results of one SM in one cycle
    spelling: Spelling = field(repr=False, hash=False)  # tables have no hash; vendor and model tell targets apart
    atoms: tuple[Atom, ...] = field(default=(), repr=False, hash=False)  # of its matrix units, the largest first
    chained: tuple[Atom, ...] = field(default=(), repr=False, hash=False)  # whose sums lie as the next left factor does
    max_cluster: int = 1  # blocks that may reach into each other's shared memory
    multiplies_f32: bool = False  # matrix instructions take f32 factors as they are, not as tf32
    flushes_factors: bool = False  # matrix instructions take subnormal factors for 0
    vote_bytes: int = 0  # static shared memory that __syncthreads_or and its like take
    async_copies: bool = False  # 16 bytes from global to shared memory without a register in between (cp.async)
    counts_blocks: bool = False  # __launch_bounds__ takes the blocks that an SM is to hold; HIP means warps by it
    bulk_copies: bool = False  # any number of 16 bytes, by one thread and either way (cp.async.bulk)
    dependent_launches: bool = False  # a kernel may begin while the one before it runs, and wait (griddepcontrol)
    f8_tflops: float = 0.0  # of floats of 8 bits, where that is another rate than `narrow_tflops`
    dies: int = 1  # to which blocks go in turn, each with its part of the L2 cache for itself
    shares: int = 1  # clusters of a launch, each of which takes rows of its own
    dependent_us: float = 0.0  # that such a launch takes less than one behind the other's end

    def atoms_of(self, issuer: Issuer, factors: DType, right: DType | None = None) -> tuple[Atom, ...]:
        """What multiplies such factors and is issued so, the largest first. `right`: the right one's type, where it is
        another one."""
        wanted = factors, right or factors
        return tuple(a for a in self.atoms if a.issuer == issuer and (a.factors, a.right_factors) == wanted)

    @property
    def early_us(self) -> float:
        """That a program's launch takes less where it begins while the one before it runs."""
        return self.dependent_us if self.dependent_launches else 0.0

    @property
    def wgmma(self) -> bool:
        """Has it matrix instructions of whole warpgroups, and the tensor copies that feed them?"""
        return any(atom.kind == "wgmma" for atom in self.atoms)

    @property
    def tcgen05(self) -> bool:
        """Has it matrix instructions that leave sums in tensor memory?"""
        return any(atom.kind == "tcgen05" for atom in self.atoms)

    def product_tflops(self, factors: DType) -> float:
        """By the data sheet, of dense products of such factors."""
        if factors.narrow:
            return self.f8_tflops if factors in F8 and self.f8_tflops else self.narrow_tflops
        return self.f32_tflops if factors is f32 else self.matrix_tflops

    def max_blocks(self, threads: int) -> int:
        """Blocks of `threads` threads along the grid's first dimension."""
        return min(self.max_grid, self.max_grid_threads // threads)

    @property
    def name(self) -> str:
        """`cuda:h200`, as the command line takes it."""
        return f"{self.vendor}:{self.model}"

    @property
    def folder(self) -> str:
        """`cuda-h200`, the folder of its golden sources."""
        return f"{self.vendor}-{self.model}"

    def __str__(self) -> str:
        return self.name
