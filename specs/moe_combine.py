"""What the experts of a mixture made of each token, weighed and added up."""

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F

T, S, N = dims("T S N")  # tokens; rows of experts' results, sorted by expert; numbers of a token


@chain(T=8192, S=65536, N=4096)
def moe_combine(y: bf16[S, N], places: i32[T, 8], weights: f32[T, 8]) -> bf16[T, N]:
    """The sum of weights[t, j] * y[places[t, j]] over a token's 8 experts, in their order."""
    return F.gather_sum(y, places, weights)
