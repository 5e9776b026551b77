"""A projection with a low-rank adapter beside it, after LoRA (Hu et al. 2021)."""

from fusegen import bf16, chain, dims, f32

M, N, K, R = dims("M N K R")


@chain(M=4096, N=4096, K=4096, R=16)
def lora(x: bf16[M, K], w: bf16[N, K], a: bf16[R, K], b: bf16[N, R], scale: f32) -> bf16[M, N]:
    """w x + scale * b (a x), as a program: b's product takes what a's gives."""
    return x @ w.T + (x @ a.T) @ b.T * scale
