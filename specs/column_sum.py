"""Column sums of a tall matrix: what a bias gradient is, and every other sum over tokens."""

from fusegen import chain, dims, f32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=1_048_576, N=1024)
def column_sum(x: f32[M, N]) -> f32[1, N]:
    """The sum of each column."""
    return F.sum(x, over=M)
