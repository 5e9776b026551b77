"""Retention of RetNet in its parallel form: scores are weighed by how long ago their key was, with no softmax."""

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F

B, H, S, D, E = dims("B H S D E")  # batch, heads, tokens, numbers of a query and of a value


@chain(B=1, H=32, S=4096, D=128, E=128)
def retention(
    q: bf16[B, H, S, D], k: bf16[B, H, S, D], v: bf16[B, H, S, E], log_rate: f32[H, 1, 1],
) -> bf16[B, H, S, E]:  # fmt: skip
    """(q @ k.mT * decay) @ v: weights decay as tokens age, by a rate of each head; later tokens are not read."""
    scores = q @ k.mT * D**-0.5
    row, col = F.row_index(scores), F.col_index(scores)
    decay = F.where(col <= row, F.exp(-F.exp(log_rate) * F.cast(row - col, f32)), 0.0)
    weighed = scores * decay
    return weighed @ v
