"""Device copy: the ceiling that every memory-bound kernel is measured against."""

from fusegen import chain, dims, f32

(n,) = dims("n")


@chain(n=268_435_456)
def copy(x: f32[n]) -> f32[n]:
    """x, somewhere else."""
    return x
