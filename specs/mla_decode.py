"""Multi-head latent attention of each sequence's next token, as DeepSeek-V3 decodes it: all heads read one row."""

from math import inf

from fusegen import bf16, chain, dims, i32
from fusegen import ops as F

# sequences, heads, slots of a cache, numbers of a latent row with its rotated part, and of those that are values
B, H, T, D, E = dims("B H T D E")
SCALE = 192**-0.5  # of the heads' own keys, which the queries have absorbed


@chain(B=8, H=128, T=8192, D=576, E=512)
def mla_decode(q: bf16[B, H, D], kv: bf16[B, T, D], length: i32[B, 1, 1]) -> bf16[B, H, E]:
    """Heads are a tile's rows, and values are the first columns of the keys: a tile of latent rows is read once."""
    scores = q @ kv.mT * SCALE
    return F.softmax(F.where(F.col_index(scores) < length, scores, -inf)) @ kv[..., :E]
