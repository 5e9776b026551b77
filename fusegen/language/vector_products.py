"""Products with a vector, as numpy has them: `w @ x` of [N, K] and [K] is [N], `x @ y` of two vectors a scalar.

    w @ x     ->  sum of w * x over each row        w: [..., N, K]; so is x @ w.T
    x @ w     ->  (x as one row @ w) as a vector    w: [..., K, N]; so is w.T @ x

A matrix whose rows are summed is read once, as it lies, with no tensor core: memory is what bounds either form.
Products are f32, exact of 16 bits and fewer, and summed in f32; whole numbers are summed in i32.
"""

from __future__ import annotations

from typing import Any

from fusegen.language.axes import LAST, kept, reduce
from fusegen.language.trace import Transposed, Value, current, product


def with_vector(name: str, left: Any, right: Any, promote: int | None) -> Value:
    """`left @ right`, of which one is a vector at least; `name` and `promote` as of `trace.product`."""
    with current().operator("matmul"):
        if len(left.shape) == 1 and isinstance(right, Transposed):
            return row_sums(right.value, left)
        if len(right.shape) == 1 and not isinstance(left, Transposed):
            return row_sums(left, right)
        matrix, vector = (right, left) if len(left.shape) == 1 else (left.T, right)
        return product(name, vector[None, :], matrix, promote)[..., 0, :]


def row_sums(matrix: Value, vector: Value) -> Value:
    """Of each row times the vector; of two vectors the one sum."""
    return kept(reduce("sum", matrix * vector, LAST), LAST, False)
