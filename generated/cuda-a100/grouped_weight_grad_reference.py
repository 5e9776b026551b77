"""grouped_weight_grad: what the kernel must compute, in float64.

dy[rows of e].T @ x[rows of e] for each expert e; 0 of one without tokens.

Operands, with leading axes of any size:
    x: bf16[T, K]
    dy: bf16[T, N]
    ends: i32[E]

Returns out bf16[E, N, K]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


def group_bounds(ends, rows):
    """Where each group begins and, behind it, the rows of no group: ends as they rise, between 0 and `rows`."""
    return np.concatenate([[0], np.clip(np.maximum.accumulate(ends), 0, rows)]).astype(np.int64)


def products_by_group(x, y, ends):
    """A product for each group of what is summed over; 0 of an empty one. What is of no group is in none."""
    bounds = group_bounds(ends, len(y))
    groups = range(len(bounds) - 1)
    return np.stack([x[:, bounds[e] : bounds[e + 1]] @ y[bounds[e] : bounds[e + 1]] for e in groups])


@np.errstate(all="ignore")
def grouped_weight_grad(x, dy, ends):
    x = np.asarray(x).astype(np.float64)
    dy = np.asarray(dy).astype(np.float64)
    ends = np.asarray(ends).astype(np.int32)
    dy_T = np.swapaxes(dy, -1, -2)
    matmul_over_groups = products_by_group(dy_T, x, ends)
    return matmul_over_groups
