"""Bugs of kernels whose waves have 32 lanes: what RDNA's spellings and plans could get wrong, one at a time."""

from __future__ import annotations

from tests.mutations import Subject, by_warp, large_k, mutation, registers, small_k, streaming

GPU = "hip:rx7900xtx"
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
