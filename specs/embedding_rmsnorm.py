"""The embeddings of token ids, and RMSNorm of them: what a language model begins with."""

from fusegen import bf16, chain, dims, i32
from fusegen import ops as F

V, M, N = dims("V M N")


@chain(V=128256, M=8192, N=4096)
def embedding_rmsnorm(table: bf16[V, N], ids: i32[M], gain: bf16[N]) -> tuple[bf16[M, N], bf16[M, N]]:
    """The row of `table` that each id names, which begins the residual stream, and its RMSNorm."""
    hidden = F.gather(table, ids)
    return hidden, F.rmsnorm(hidden, gain)
