"""Which keys a token of sparse attention looks at: scores that all heads of an indexer share."""

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F

S, T, H, D = dims("S T H D")  # tokens, keys, the indexer's heads, numbers of a head


@chain(S=4096, T=4096, H=64, D=128)
def lightning_indexer(q: bf16[S, H, D], k: bf16[T, D], w: f32[S, H]) -> f32[S, T]:
    """Sums over heads of relu(q k) * w, as DeepSeek-V3.2 has them; F.topk of a row are the keys."""
    return F.sum(F.relu(q @ k.T) * w[:, :, None], axis=1, keepdims=False)
