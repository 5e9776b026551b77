"""Bugs of kernels whose waves have 32 lanes: what RDNA's spellings and plans could get wrong, one at a time."""

from __future__ import annotations

from tests import attentions, gemm_mutations, gemms, grouped
from tests.attention_mutations import mutation as of_attention
from tests.attention_mutations import subject as attention
from tests.gemms import banded, streamed_waves, tiled
from tests.mutations import Subject, by_warp, large_k, mutation, registers, small_k, streaming
from tests.specs import SHIPPED

GPU, LATER = "hip:rx7900xtx", "hip:rx9070xt"
LN = Subject("bias_gelu_residual_ln", 2000, registers, GPU)
CHOSEN = Subject("scale_mask_softmax_topk", 9000, streaming, GPU)
SMALL_K = Subject("scale_mask_softmax_topk", 6000, small_k, GPU)
LARGE_K = Subject("scale_mask_softmax_topk", 1000, large_k, GPU)
ROUTED = Subject("router_topk", 200, by_warp, GPU)
SUBJECTS = (LN, CHOSEN, SMALL_K, LARGE_K, ROUTED)

MUTATIONS = (
    mutation("a lane's own 16 for the others", "lanes 16 apart are not added", LN,
             r"__builtin_amdgcn_permlanex16\(0, (\w+), [^)]*\)", r"\1"),
    mutation("a digit of the other 16 wrong", "one lane is added twice, another one never", LN,
             "0x76543210", "0x77543210"),
    mutation("half a wave assumed", "lanes 16 and up are not added", LN, r"int step = 16;", "int step = 8;"),
    mutation("parts by waves of 64", "two waves have one slot", LN, r"threadIdx\.x / 32", "threadIdx.x / 64"),
    mutation("votes of half a wave", "the upper half's candidates are lost", CHOSEN,
             r"static_cast<unsigned>\(__ballot\(says\)\)", "static_cast<unsigned>(__ballot(says) & 0xffffu)"),
    mutation("held exponentials of half a wave", "lanes 16 and up are not added", SMALL_K,
             r"int step = 16(; step > 0; step /= 2\) v \+=)", r"int step = 8\1"),
    mutation("dense counts of half a wave", "lanes 16 and up are not added", LARGE_K,
             r"int step = 16(; step > 0; step /= 2\) v \+= __shfl_xor\(v, step\);\n *return v;)", r"int step = 8\1"),
)  # fmt: skip

# ---- products by WMMA
TILED = gemm_mutations.subject(gemms.bias_gelu, tiled, GPU, M=96, N=200, K=136)
BANDS = gemm_mutations.subject(gemms.bias_gelu, banded, GPU, M=160, N=200, K=136)
TURNED = gemm_mutations.subject(gemms.turned, tiled, GPU, M=96, N=200, K=136)
STREAMED = gemm_mutations.subject(gemms.norm, streamed_waves, GPU, M=8, N=96, K=1032)
WHOLE = gemm_mutations.subject(SHIPPED["i8_gemm"], tiled, GPU, M=96, N=192, K=144)
GATED_LATER = gemm_mutations.subject(gemms.norm_swiglu, banded, LATER, M=96, N=200, K=136)
TILED_LATER = gemm_mutations.subject(gemms.bias_gelu, tiled, LATER, M=96, N=200, K=136)
STREAMED_LATER = gemm_mutations.subject(gemms.norm, streamed_waves, LATER, M=8, N=96, K=1032)
GROUPED_LATER = gemm_mutations.subject(grouped.plain, tiled, LATER, T=200, N=96, K=72, E=4)
FLOATS_LATER = gemm_mutations.subject(SHIPPED["fp8_gemm"], tiled, LATER, M=96, N=192, K=144)
WHOLE_LATER = gemm_mutations.subject(SHIPPED["i8_gemm"], tiled, LATER, M=96, N=192, K=144)
PRODUCTS = (
    TILED, BANDS, TURNED, STREAMED, WHOLE, GATED_LATER, TILED_LATER, STREAMED_LATER, GROUPED_LATER, FLOATS_LATER,
    WHOLE_LATER,
)  # fmt: skip

PRODUCT_MUTATIONS = (
    gemm_mutations.mutation("columns of sums as gfx12 has them", "rows of the instruction trade places", TILED,
                            r"i \* 2 \+ lane / 16", "lane / 16 * 8 + i"),
    gemm_mutations.mutation("columns of sums as gfx11 has them", "rows of the instruction trade places", TILED_LATER,
                            r"lane / 16 \* 8 \+ i;", "i * 2 + lane / 16;"),
    gemm_mutations.mutation("halves of the wave swapped", "neighbouring columns trade places", TILED,
                            r"i \* 2 \+ lane / 16", "i * 2 + 1 - lane / 16"),
    gemm_mutations.mutation("half of K twice", "a row's second 16 bytes are its first", TILED,
                            r"place<Chunks>\(row, k \+ 8\)", "place<Chunks>(row, k)"),
    gemm_mutations.mutation("a row for each of 32 lanes", "gfx11 wants two lanes alike", TILED,
                            r"const int row = mn \+ lane % 16", "const int row = mn + lane / 2"),
    gemm_mutations.mutation("half of K on gfx12", "both halves of the wave have the first 8", TILED_LATER,
                            r"k \+ lane / 16 \* 8\)", "k)"),
    gemm_mutations.mutation("factors swapped", "a tile of 16 x 16 is transposed", TILED_LATER,
                            r"\(right\.part\[0\], left\.part\[0\], sums\)", "(left.part[0], right.part[0], sums)"),
    gemm_mutations.mutation("bytes without a sign", "-1 is 255", WHOLE, r"\(true, right", "(false, right"),
    gemm_mutations.mutation("the second instruction left out", "half of a slice is multiplied", WHOLE_LATER,
                            r"sums = \w+_iu8_w32_gfx12\(true, right\.part\[1\][^;]*;", ""),
    gemm_mutations.mutation("no barrier between slices", "waves read what others have not brought yet", TILED_LATER,
                            r"\} else if \(!last\) \{\n +shared_barrier\(\);", "} else if (!last) {"),
)  # fmt: skip

# ---- attention
WOVEN = attention(attentions.lse, "32x32", GPU, S=100, T=200, D=32, E=32)
HALVED = attention(attentions.window, "32x32", LATER, S=150, T=200, D=16)
DROPPED = attention(attentions.dropped_twice, "32x32", LATER, S=60, T=96, D=16)
ATTENTION = (WOVEN, HALVED, DROPPED)

ATTENTION_MUTATIONS = (
    of_attention("keys of the other lanes first", "every two weights trade places", WOVEN,
                 r"later \? other : own\.at\[i\], odd = later \? own\.at\[i\] : other",
                 "later ? own.at[i] : other, odd = later ? other : own.at[i]"),
    of_attention("a lane's own weights alone", "those of the other 16 are left out", WOVEN,
                 r"const unsigned other = [^;]*;", "const unsigned other = own.at[i];"),
    of_attention("the maximum of one lane", "lanes that share a row take pivots of their own", WOVEN,
                 r"for \(int step = 16; step < 32; step \*= 2\) (peaks)", r"for (int step = 16; false;) \1"),
    of_attention("values of the first keys alone", "both halves of a wave multiply the same 8", HALVED,
                 r"(v_lane = [^;]*) \+ lane / 16 \* 8;", r"\1;"),
    of_attention("bits of the first four twice", "neighbours are dropped alike", DROPPED,
                 r"_four\[i / 4\]\[i % 4\]", "_four[0][i % 4]"),
    of_attention("columns as gfx11 has them", "a mask leaves other keys out", HALVED,
                 r"lane / 16 \* 8 \+ i", "i * 2 + lane / 16"),
)  # fmt: skip
