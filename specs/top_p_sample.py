"""The next token of each sequence: temperature, top-k, top-p and a sample by the Gumbel-max trick."""

from fusegen import bf16, chain, dims, f32, i32, i64
from fusegen import ops as F

M, V = dims("M V")  # sequences, vocabulary
NONE = -float("inf")


@chain(M=64, V=32000)
def top_p_sample(
    logits: bf16[M, V], temperature: f32[M, 1], k: i32[M, 1], p: f32[M, 1], seed: i32[1], step: i32[1],
) -> i64[M]:  # fmt: skip
    """A token of the k likeliest, and of those that make up a share p, with its probability among them."""
    z = logits / temperature
    z = F.where(F.top_k(z, k), z, NONE)
    kept = F.where(F.top_p(F.softmax(z), p), z, NONE)
    drawn = kept - F.log(-F.log(F.uniform(kept, seed, step)))
    first = F.where(drawn == F.max(drawn), F.col_index(drawn), 2**31 - 1)
    return F.min(first)[..., 0]
