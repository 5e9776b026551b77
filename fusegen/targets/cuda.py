"""NVIDIA: what NVRTC compiles, and the facts of the GPUs that kernels are planned for.

A model names the architecture with the `a` suffix where one exists (`sm_90a`): only such code may use wgmma and the
other instructions of one architecture. Ask for `cuda:sm_90` to get code that every compute capability 9.x runs.

Facts with no comment of their own come from the CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability", and from `cuda_occupancy.h` of the toolkit (allocation units). Rates and L2 sizes come from the data sheet
or white paper named beside them; `bench` prints measured rates beside these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusegen.language.types import DType, bf16, f8e4m3, f8e5m2, f16, f32, i8, i32, u8
from fusegen.targets.atoms import Atom, Fragment, Term
from fusegen.targets.base import CTYPES, TO_STORAGE, TO_VALUE, Spelling, Target


def mma(left: str, k: int = 16, right: str = "", sums: str = "f32") -> tuple[str, ...]:
    """sums += right^T left^T, of so many elements that fill the same registers."""
    kind = "f" if sums == "f32" else "r"
    return (
        f'asm("mma.sync.aligned.m16n8k{k}.row.col.{sums}.{right or left}.{left}.{sums} "',
        '    "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"',
        f'    : "+{kind}"(sums[0]), "+{kind}"(sums[1]), "+{kind}"(sums[2]), "+{kind}"(sums[3])',
        '    : "r"(right[0]), "r"(right[1]), "r"(right[2]), "r"(right[3]), "r"(left_0), "r"(left_1));',
    )


def mma_by_rows(dtype: str) -> tuple[str, ...]:
    """sums += left right, of 16 rows by 8 columns."""
    return (
        f'asm("mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "',
        '    "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"',
        '    : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])',
        '    : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1));',
    )


def paired(function: str, ctype: str) -> tuple[str, ...]:
    """Two numbers in one register, rounded by one instruction."""
    return (f"const {ctype} pair = {function}(low, high);", "return reinterpret_cast<const unsigned&>(pair);")


def eight_bits(name: str) -> dict[str, tuple[str, ...]]:
    """PTX ISA, cvt: from sm_89 on, of two numbers at a time. It keeps to the range of the type by itself (.satfinite),
    and every NaN becomes 0x7f; widening is exact."""
    return {
        f"to_f8{name}": (
            "unsigned short codes;",
            f'asm("cvt.rn.satfinite.{name}x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(x));',
            "return static_cast<unsigned char>(codes);",
        ),
        f"pairs_f8{name}": (
            "unsigned short codes;",
            f'asm("cvt.rn.satfinite.{name}x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));',
            "return codes;",
        ),
        f"f8{name}_value": (
            "unsigned halves;",
            f'asm("cvt.rn.f16x2.{name}x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(x)));',
            "float y;",
            'asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(static_cast<unsigned short>(halves)));',
            "return y;",
        ),
        f"f16_pair_of_f8{name}": (
            "unsigned halves;",
            f'asm("cvt.rn.f16x2.{name}x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(codes)));',
            "return halves;",
        ),
        f"f32_pair_of_f8{name}": f32_pair(name),
        f"bf16_pair_of_f8{name}": (*f32_pair(name), *paired("__floats2bfloat162_rn", "__nv_bfloat162")),
    }


def f32_pair(name: str) -> tuple[str, ...]:
    """Two codes as `low` and `high`."""
    return (
        "unsigned halves;",
        f'asm("cvt.rn.f16x2.{name}x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(codes)));',
        "float low, high;",
        'asm("cvt.f32.f16 %0, %1;" : "=f"(low) : "h"(static_cast<unsigned short>(halves)));',
        'asm("cvt.f32.f16 %0, %1;" : "=f"(high) : "h"(static_cast<unsigned short>(halves >> 16)));',
    )


def fused(pair: str) -> tuple[str, ...]:
    """PTX ISA, fma: from sm_80 on."""
    return (
        "unsigned y;",
        f'asm("fma.rn.{pair} %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));',
        "return y;",
    )


def orders(pair: str, one: str) -> tuple[str, ...]:
    """The orders of two floats of 16 bits: times 1 and with 0 added, NaN is 0x7fff and -0 is 0 (PTX ISA, fma), and prmt
    makes a byte of each of a sign."""
    return (
        "unsigned bits, signs;",
        f'asm("fma.rn.{pair} %0, %1, %2, %3;" : "=r"(bits) : "r"(pair), "r"({one}), "r"(0u));',
        'asm("prmt.b32 %0, %1, %2, %3;" : "=r"(signs) : "r"(bits), "r"(bits), "r"(0xbb99u));',
        "return bits ^ (signs | 0x80008000u);",
    )


ORDER_OF = (  # PTX ISA, "Floating Point Instructions": add makes every NaN 0x7fffffff, and -0 + 0 is 0
    "float y;",
    'asm("add.f32 %0, %1, %2;" : "=f"(y) : "f"(key), "f"(0.0f));',
    "const unsigned bits = __float_as_uint(y);",
    "return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);",
)


def larger_pair(pair: str) -> tuple[str, ...]:
    """PTX ISA, max: from sm_80 on."""
    return ("unsigned y;", f'asm("max.NaN.{pair} %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));', "return y;")


def to_tf32(rounding: str) -> tuple[str, ...]:
    """To the nearest, ties away from zero ("rna", from sm_80 on) or to even ("rn", from sm_90 on): PTX ISA, "cvt"."""
    return (
        "unsigned y;",
        f'asm("cvt.{rounding}.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(bits)));',
        "return y;",
    )


def copy_chunk(size: int) -> tuple[str, ...]:
    """16 bytes of elements of `size` bytes."""
    return (
        f"if constexpr (Width == {16 // size}) {{",
        '  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"',
        f'      :: "r"(to), "l"(from), "r"(count * {size}) : "memory");',
        "} else {",
        "  #pragma unroll",
        f"  for (int j = 0; j < {16 // size}; j += Width) {{",
        "    const int left = count < j ? 0 : count - j < Width ? count - j : Width;",
        '    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"',
        f'        :: "r"(to + j * {size}), "l"(from + j), "n"(Width * {size}), "r"(left * {size}) : "memory");',
        "  }",
        "}",
    )


def copy_evict_first(size: int) -> tuple[str, ...]:
    """The same, whole, with a word to the L2 cache."""
    return (
        "unsigned long long policy;",
        'asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));',
        'asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"',
        f'    :: "r"(to), "l"(from), "r"(count * {size}), "l"(policy) : "memory");',
    )


# ---- matrix units
# Factors fill the same registers, or the same lines of shared memory, whatever their type: 16 halves, or 8 of tf32.
FACTORS: tuple[tuple[DType, str, int], ...] = ((f16, "f16", 16), (bf16, "bf16", 16), (f32, "tf32", 8))
FLOATS = ((f8e4m3, "e4m3"), (f8e5m2, "e5m2"))  # of 8 bits,
WHOLES = ((i8, "s8"), (u8, "u8"))  # and whole numbers
NARROW_SUM_BITS = 14
"""Hopper and Ada sum 8-bit floats in 1 + 8 + 13 bits, and cut off what lies below: Khattak & Mikaitis, "Accurate Models
of NVIDIA Tensor Cores", 2025 (arXiv 2512.07004); DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, 3.3.2."""


def mma_sync(factors: DType, word: str, k: int) -> Atom:
    """PTX ISA, "Matrix fragments for mma.m16n8k16" and "... k8". The instruction's rows are the product's columns, so
    that few rows waste little: a decode step has 8."""
    return Atom(
        kind="mma",
        instruction=f"mma.sync.m16n8k{k}",
        factors=factors,
        word=word,
        rows=8,
        cols=16,
        col_step=16,
        k=k,
        issuer="warp",
        left=("registers",),
        right=("registers",),
        sums="registers",
        fragment=Fragment(
            rows=(Term("lane", mod=4, times=2), Term("i", mod=2)),
            cols=(Term("lane", div=4), Term("i", div=2, times=8)),
            lanes=32,
        ),
    )


def mma_by_row(factors: DType, word: str) -> Atom:
    """The same instruction with the product's rows as its own: sums lie as its next left factor does, two instructions'
    side by side."""
    rows = (Term("i", div=2, mod=2, times=8), Term("lane", div=4))
    cols = (Term("lane", mod=4, times=2), Term("i", mod=2))
    return Atom(
        kind="mma",
        instruction="mma.sync.m16n8k16",
        factors=factors,
        word=word,
        rows=16,
        cols=8,
        col_step=8,
        k=16,
        issuer="warp",
        left=("registers",),
        right=("registers",),
        sums="registers",
        fragment=Fragment(rows, cols, lanes=32),
        left_fragment=Fragment(rows, (Term("i", div=4, times=8), *cols), lanes=32),
    )


def warpgroup_mma(factors: DType, word: str, k: int) -> Atom:
    """PTX ISA, "Register Fragments and Shared Memory Matrix Layouts" of wgmma. Each of four warps has 16 rows; a left
    factor that comes from registers lies in them as sums do."""
    rows = (Term("i", div=2, mod=2, times=8), Term("lane", div=4))
    cols = (Term("i", div=4, times=8), Term("lane", mod=4, times=2), Term("i", mod=2))
    return Atom(
        kind="wgmma",
        instruction=f"wgmma.mma_async.m64nNk{k}",
        factors=factors,
        word=word,
        rows=64,
        cols=256,
        col_step=8,
        k=k,
        issuer="warpgroup",
        left=("shared memory", "registers"),
        right=("shared memory",),
        sums="registers",
        fragment=Fragment(rows, cols, lanes=32),
        warps=4,
        left_fragment=Fragment(rows, cols, lanes=32) if factors in (f16, bf16) else None,
    )


def tensor_memory_mma(factors: DType, word: str, k: int) -> Atom:
    """PTX ISA, "tcgen05.mma": one thread issues it, and row i of the sums is lane i of tensor memory ("Layout D"). Each
    of four warps reaches 32 lanes, and loads 16 of them at a time as wgmma leaves sums ("Matrix fragments for shape
    .16x256b"; CUTLASS, cute/atom/copy_traits_sm100.hpp, SM100_TMEM_LOAD_16dp256b1x). `word`: the instruction's kind."""
    rows = (Term("i", div=2, mod=2, times=8), Term("lane", div=4))
    cols = (Term("i", div=4, times=8), Term("lane", mod=4, times=2), Term("i", mod=2))
    return Atom(
        kind="tcgen05",
        instruction=f"tcgen05.mma.m128nNk{k}",
        factors=factors,
        word=word,
        rows=128,
        cols=256,
        col_step=16,
        k=k,
        issuer="thread",
        left=("shared memory", "tensor memory"),
        right=("shared memory",),
        sums="tensor memory",
        fragment=Fragment(rows, cols, lanes=32),
        warps=4,
        sum_type=f32 if factors.kind == "float" else i32,
    )


def narrow(made: Atom, other: DType, word: str) -> Atom:
    """The atom for factors of 8 bits, of which the right one may be another type. wgmma's columns of whole numbers are
    multiples of 16."""
    if other.kind == "float":
        return replace(made, other=other, other_word=word, sum_bits=NARROW_SUM_BITS)
    return replace(made, sum_type=i32, col_step=16)


MMA_SYNC = tuple(mma_sync(*each) for each in FACTORS)  # from sm_80 on
FLOAT_PAIRS = tuple((left, right) for left in FLOATS for right in FLOATS)
WHOLE_PAIRS = tuple((kind, kind) for kind in WHOLES)
WHOLE_MMA_SYNC = tuple(narrow(mma_sync(*left, k=32), *right) for left, right in WHOLE_PAIRS)  # from sm_80 on
FLOAT_MMA_SYNC = tuple(narrow(mma_sync(*left, k=32), *right) for left, right in FLOAT_PAIRS)  # from sm_89 on
ADA_MMA_SYNC = (*MMA_SYNC, *WHOLE_MMA_SYNC, *FLOAT_MMA_SYNC)
NARROW_WGMMA = tuple(narrow(warpgroup_mma(*left, k=32), *right) for left, right in (*FLOAT_PAIRS, *WHOLE_PAIRS))
WGMMA = (*(warpgroup_mma(*each) for each in FACTORS), *NARROW_WGMMA)  # of sm_90a alone
# of sm_100a and sm_103a. NVIDIA does not say how many bits it keeps of sums of 8-bit floats. Who measured a B200 found
# f32's and more: 25 bits below the leading one (deepseek-ai/DeepGEMM#176; Khattak & Mikaitis, as above)
TCGEN05 = (
    *(tensor_memory_mma(*each) for each in ((f16, "f16", 16), (bf16, "f16", 16), (f32, "tf32", 8))),
    *(tensor_memory_mma(kind, "i8", 32) for kind, _ in WHOLES),
    *(replace(tensor_memory_mma(left, "f8f6f4", 32), other=right) for (left, _), (right, _) in FLOAT_PAIRS),
)
CHAINED = (mma_by_row(f16, "f16"), mma_by_row(bf16, "bf16"))

SPELLING = Spelling(
    file_suffix=".cu",
    headers={f16: "cuda_fp16.h", bf16: "cuda_bf16.h"},
    ctype={f16: "__half", bf16: "__nv_bfloat16", **CTYPES},
    to_value={f16: "__half2float({0})", bf16: "__bfloat162float({0})", **TO_VALUE},
    to_storage={f16: "__float2half_rn({0})", bf16: "__float2bfloat16_rn({0})", **TO_STORAGE},
    barrier="__syncthreads();",
    lanes="unsigned",
    warp_barrier="__syncwarp();",
    shuffle_xor="__shfl_xor_sync(0xffffffffu, {0}, {1})",
    shuffle_among="__shfl_xor_sync({2}, {0}, {1})",
    shuffle="__shfl_sync(0xffffffffu, {0}, {1}, {2})",
    # PTX ISA 8, from sm_80 on. Without .ftz the approximations spend three instructions on subnormal operands: with
    # them, and the libraries' expf and division, the LayerNorm chain took 32 instructions an element instead of 22.
    functions={
        "power_of_2": ("float y;", 'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));', "return y;"),
        "reciprocal": ("float y;", 'asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));', "return y;"),
        "log_2": ("float y;", 'asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));', "return y;"),
        "larger": ("float y;", 'asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));', "return y;"),
        "smaller": ("float y;", 'asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));', "return y;"),
        "to_int": ("return __float2int_rz(x);",),  # cvt.rzi.s32.f32, which saturates, and makes 0 of NaN
        "to_i8": ("return min(max(__float2int_rn(x), -128), 127);",),  # saturates too, and makes 0 of NaN
        "to_u8": ("return min(max(__float2int_rn(x), 0), 255);",),
        "unknown": ('asm("" : "+l"(x));', "return x;"),
        "forget": ('asm volatile("" : "+r"(words[i]));',),
        "load_evict_first": (
            "static_assert(sizeof(Vec<T, N>) == 16);",
            "unsigned long long policy;",
            'asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));',
            "uint4 bits;",
            'asm("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"',
            '    : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w) : "l"(p), "l"(policy));',
            "return *reinterpret_cast<const Vec<T, N>*>(&bits);",
        ),
        "store_words": (
            "static_assert(sizeof(v) % 16 == 0);",
            "const uint4* const words = reinterpret_cast<const uint4*>(&v);",
            "#pragma unroll",
            "for (int i = 0; i < static_cast<int>(sizeof(v) / 16); ++i) {",
            '  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"',
            '      :: "l"(reinterpret_cast<uint4*>(p) + i),',
            '      "r"(words[i].x), "r"(words[i].y), "r"(words[i].z), "r"(words[i].w));',
            "}",
        ),
        "copy_async": (
            "const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));",
            "if constexpr (sizeof(*to) == 16) {",
            '  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(place), "l"(from) : "memory");',
            "} else {",
            '  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"',
            '      :: "r"(place), "l"(from), "n"(sizeof(*to)) : "memory");',
            "}",
        ),
        "copy_part": (
            "const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));",
            "if constexpr (sizeof(*to) == 16) {",
            '  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"',
            '      :: "r"(place), "l"(from), "r"(bytes) : "memory");',
            "} else {",
            '  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"',
            '      :: "r"(place), "l"(from), "n"(sizeof(*to)), "r"(bytes) : "memory");',
            "}",
        ),
        "commit_copies": ('asm volatile("cp.async.commit_group;" ::: "memory");',),
        "ballot": ("__ballot_sync(0xffffffffu, says)",),
        "popcount": ("__popc(lanes)",),
        "warp_least": ("return __reduce_min_sync(0xffffffffu, v);",),  # redux.sync, from sm_80 on
        "warp_most": ("return __reduce_max_sync(0xffffffffu, v);",),
        "partner": ("return __shfl_xor_sync(0xffffffffu, v, step);",),
        "warp_total": ("return __reduce_add_sync(0xffffffffu, v);",),
        "shuffle_up": ("__shfl_up_sync(0xffffffffu, v, step)",),
        "from_first_lane": ("__shfl_sync(0xffffffffu, start, 0)",),
        "meet": ("__syncwarp();",),
        **{f"copy_chunk_{size}": copy_chunk(size) for size in (1, 2, 4)},
        **{f"copy_evict_first_{size}": copy_evict_first(size) for size in (1, 2, 4)},
        # ptxas (of NVRTC 13.0 and 13.5) may put a uniform part of the address into half of the pair of registers that
        # holds the policy, and other copies then find no policy there: an illegal instruction. threadIdx.y is 0, and as
        # good as unknown: what went through it is in no uniform register.
        "own_address": ("return address ^ threadIdx.y;",),
        # PTX ISA, "Matrix fragments for mma.m16n8k16" and ldmatrix: from sm_80 on
        "matrix": (
            'asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"',
            '    : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");',
        ),
        "half_matrix": (
            'asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"',
            '    : "=r"(to[0]), "=r"(to[1]) : "r"(address) : "memory");',
        ),
        "matrix_across": (
            'asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"',
            '    : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");',
        ),
        "half_matrix_across": (
            'asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"',
            '    : "=r"(to[0]), "=r"(to[1]) : "r"(address) : "memory");',
        ),
        "mma_by_rows_f16": mma_by_rows("f16"),
        "mma_by_rows_bf16": mma_by_rows("bf16"),
        "orders_f16": orders("f16x2", "0x3c003c00u"),
        "orders_bf16": orders("bf16x2", "0x3f803f80u"),
        "order_f32": ORDER_OF,
        "larger_pair_f16": larger_pair("f16x2"),
        "larger_pair_bf16": larger_pair("bf16x2"),
        "key_pair_f16": (
            "const __half2 pair = __floats2half2_rn(first, second);",
            "return reinterpret_cast<const unsigned&>(pair);",
        ),
        # one instruction, F2FP; with __float2bfloat16_rn two, of which F2F takes several cycles
        "round_bf16": (
            "const __nv_bfloat162 pair = __floats2bfloat162_rn(0.0f, x);",
            "return __uint_as_float(reinterpret_cast<const unsigned&>(pair));",
        ),
        "pair_f16": paired("__floats2half2_rn", "__half2"),
        "pair_bf16": paired("__floats2bfloat162_rn", "__nv_bfloat162"),
        "mma_f16": mma("f16"),
        "mma_bf16": mma("bf16"),
        "mma_f32": mma("tf32", k=8),
        **{f"mma_{left}": mma(word, 32, sums="s32") for left, word in WHOLES},
        **{f"mma_{a}_{b}": mma(left, 32, right) for (a, left), (b, right) in FLOAT_PAIRS},
        "to_tf32": to_tf32("rna"),  # three instructions of sm_80
        "load_word": (
            "unsigned y;",
            'asm volatile("ld.shared.u32 %0, [%1];" : "=r"(y) : "r"(address) : "memory");',
            "return y;",
        ),
        "fused_f16": fused("f16x2"),
        "fused_bf16": fused("bf16x2"),
        # a code less its sign's weight, behind the exponent of 2^23, is 2^23 + 128 more than the number
        "f32_pair_of_i8": (
            "const unsigned bytes = codes ^ 0x8080u;",
            "const float low = __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440)) - 8388736.0f;",
            "const float high = __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7441)) - 8388736.0f;",
        ),
        # the lower 7 bits behind the exponent of 128 make 128 + those, of which 128 is taken, or 256 of the negative
        "bf16_pair_of_i8": (
            "const unsigned bytes = __byte_perm(codes, 0u, 0x4140);",
            "const unsigned above = bytes & 0x007f007fu | 0x43004300u, less = bytes & 0x00800080u | 0x43004300u;",
            "unsigned y;",
            'asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(less), "r"(0xbf80bf80u), "r"(above));',
            "return y;",
        ),
        "wait_copies": ('asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");',),
    },
)

ADA = replace(SPELLING, functions={**SPELLING.functions, **eight_bits("e4m3"), **eight_bits("e5m2")})
HOPPER = replace(ADA, functions={**ADA.functions, "to_tf32": to_tf32("rn")})  # one of sm_90

A100 = Target(
    vendor="cuda",
    model="a100",
    arch="sm_80",
    warp=32,
    sms=108,
    shared_bytes=163 * 1024,
    shared_per_sm=164 * 1024,
    shared_reserved=1024,
    shared_unit=128,
    registers_per_sm=65536,
    registers_per_thread=255,
    register_unit=8,  # 256 registers a warp
    schedulers_per_sm=4,
    scalar_registers=0,  # uniform registers come with each warp, and never limit
    threads_per_sm=2048,
    blocks_per_sm=32,
    threads_per_block=1024,
    max_grid=2**31 - 1,
    max_grid_y=65535,
    max_grid_threads=(2**31 - 1) * 1024,  # no limit of its own
    l2_bytes=40 * 1024**2,  # "NVIDIA A100 Tensor Core GPU Architecture", table 4
    dram_gbs=2039.0,  # A100 data sheet, 80 GB SXM
    fp32_tflops=19.5,  # A100 data sheet
    matrix_tflops=312.0,  # A100 data sheet
    f32_tflops=156.0,  # A100 data sheet, as tf32
    narrow_tflops=624.0,  # A100 data sheet, of whole numbers
    f32_lanes=64,
    spelling=SPELLING,
    atoms=(*MMA_SYNC, *WHOLE_MMA_SYNC),
    chained=CHAINED,
    counts_blocks=True,
    async_copies=True,  # PTX ISA, cp.async: from sm_80 on
)

# Ada: "NVIDIA Ada GPU Architecture" for L2; compute capability 8.9 has less shared memory and fewer threads per SM.
L40S = replace(
    A100,
    model="l40s",
    arch="sm_89",
    spelling=ADA,
    atoms=ADA_MMA_SYNC,
    sms=142,
    shared_bytes=99 * 1024,
    shared_per_sm=100 * 1024,
    threads_per_sm=1536,
    blocks_per_sm=24,
    l2_bytes=96 * 1024**2,
    dram_gbs=864.0,  # L40S data sheet
    fp32_tflops=91.6,  # L40S data sheet
    matrix_tflops=362.05,  # L40S data sheet, without sparsity
    f32_tflops=183.0,  # L40S data sheet, likewise
    narrow_tflops=733.0,  # L40S data sheet, likewise
    f32_lanes=128,
)

H100 = replace(
    A100,
    spelling=HOPPER,
    atoms=(*WGMMA, *ADA_MMA_SYNC),
    max_cluster=16,  # past 8 a kernel must say that it is not portable
    bulk_copies=True,  # PTX ISA, cp.async.bulk: from sm_90 on
    dependent_launches=True,  # PTX ISA, griddepcontrol: from sm_90 on
    dependent_us=0.6,  # of graphs on an H200: docs/measurements.md, "Programs"
    model="h100",
    arch="sm_90a",
    sms=132,
    shared_bytes=227 * 1024,
    shared_per_sm=228 * 1024,
    l2_bytes=50 * 1024**2,  # "NVIDIA H100 Tensor Core GPU Architecture", table 3, SXM5
    dram_gbs=3350.0,  # H100 data sheet, SXM
    fp32_tflops=67.0,  # H100 data sheet, SXM
    matrix_tflops=989.4,  # H100 data sheet, SXM: 1979 with sparsity
    f32_tflops=494.7,  # H100 data sheet, SXM: 989 with sparsity
    narrow_tflops=1978.9,  # H100 data sheet, SXM: 3958 with sparsity
    f32_lanes=128,
)

H200 = replace(
    H100,
    model="h200",
    l2_bytes=60 * 1024**2,  # as devices report; the data sheet does not say
    dram_gbs=4800.0,  # H200 data sheet
    fp32_tflops=67.0,  # H200 data sheet, SXM
    matrix_tflops=989.4,  # H200 data sheet, SXM: 1979 with sparsity
    f32_tflops=494.7,  # H200 data sheet, SXM: 989 with sparsity
    narrow_tflops=1978.9,  # H200 data sheet, SXM: 3958 with sparsity
)

B200 = replace(
    H100,
    model="b200",
    arch="sm_100a",
    atoms=(*TCGEN05, *ADA_MMA_SYNC),
    sms=148,  # as devices report; the data sheet does not say
    l2_bytes=126 * 1024**2,  # Blackwell tuning guide
    dram_gbs=8000.0,  # HGX B200 data sheet, one GPU
    fp32_tflops=75.0,  # HGX B200 data sheet: 600 for eight
    matrix_tflops=2250.0,  # HGX B200 data sheet: 36 PFLOPS with sparsity for eight
    f32_tflops=1125.0,  # HGX B200 data sheet: 18 PFLOPS with sparsity for eight
    narrow_tflops=4500.0,  # HGX B200 data sheet: 72 PFLOPS with sparsity for eight
)

# Blackwell Ultra, whose rates but those of 4 bits and of f64 are B200's (HGX B300 data sheet). ptxas refuses
# `.kind::i8` for sm_103a, so that whole numbers are mma.sync's.
B300 = replace(
    B200,
    model="b300",
    arch="sm_103a",
    atoms=(*(atom for atom in TCGEN05 if atom.factors.kind == "float"), *ADA_MMA_SYNC),
)

# Blackwell's workstation and consumer GPUs ("NVIDIA RTX Blackwell GPU Architecture", appendix): compute capability 12.0
# has the shared memory and threads of 8.9, bulk copies and dependent launches, and neither wgmma nor tcgen05. It has
# clusters, too, which are left alone: CUTLASS's kernels for it take none, and nobody has measured them here.
RTX5090 = replace(
    H100,
    model="rtx5090",
    arch="sm_120",
    atoms=ADA_MMA_SYNC,
    max_cluster=1,
    sms=170,
    shared_bytes=L40S.shared_bytes,
    shared_per_sm=L40S.shared_per_sm,
    threads_per_sm=L40S.threads_per_sm,
    blocks_per_sm=L40S.blocks_per_sm,
    l2_bytes=96 * 1024**2,
    dram_gbs=1792.0,
    fp32_tflops=104.8,
    matrix_tflops=209.5,  # summed in f32, which a GeForce does at half of the rate
    f32_tflops=104.8,
    narrow_tflops=838.0,
    f8_tflops=419.0,  # summed in f32, likewise
)

RTXPRO6000 = replace(
    RTX5090,
    model="rtxpro6000",
    sms=188,
    l2_bytes=128 * 1024**2,
    fp32_tflops=125.0,  # RTX PRO 6000 Blackwell data sheet
    matrix_tflops=503.8,
    f32_tflops=251.9,
    narrow_tflops=1007.6,
    f8_tflops=1007.6,
)

MODELS: tuple[Target, ...] = (A100, L40S, H100, H200, B200, B300, RTX5090, RTXPRO6000)
DEFAULT = H200

ARCHES: Mapping[str, Target] = {
    "sm_80": A100,
    "sm_89": L40S,
    "sm_90": replace(H200, model="sm_90", arch="sm_90", atoms=ADA_MMA_SYNC),
    "sm_90a": H200,
    "sm_100": replace(B200, model="sm_100", arch="sm_100", atoms=ADA_MMA_SYNC),
    "sm_100a": B200,
    "sm_103a": B300,
    "sm_120": RTX5090,
}
"""Architectures a target may be named by, each with the facts of its best-known model."""
