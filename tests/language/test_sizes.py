"""Sizes computed from dims: equal ones compare equal, and every one is the number that Python would compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusegen.errors import SpecError
from fusegen.language.sizes import (
    Dim,
    Expr,
    Size,
    dims,
    dims_in,
    leading_sign,
    replaced,
    shape_text,
    size_of,
    solved,
    without_number,
)

D, H, M, N = dims("D H M N")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (2 * N, "2 * N"),
        (D * H, "D * H"),
        (H * D, "D * H"),
        (D // 2, "D // 2"),
        (3 * D // 2, "3 * D // 2"),
        (N - 1, "N - 1"),
        (1 - N, "-N + 1"),
        (D // (2 * H), "D // (2 * H)"),
        ((N + 127) // 128, "(N + 127) // 128"),
        (2 * ((N + 127) // 128), "2 * ((N + 127) // 128)"),
        (N // (H + 1), "N // (H + 1)"),
        ((N + 1) ** 2, "N * N + 2 * N + 1"),
        (np.int64(2) * N, "2 * N"),
    ],
)
def test_text_is_python(size: Expr, text: str) -> None:
    assert str(size) == text
    assert eval(text, {"D": D, "H": H, "M": M, "N": N}) == size


def test_equal_sizes_compare_equal() -> None:
    assert D - D // 2 == D // 2
    assert hash(D - D // 2) == hash(D // 2)
    assert H * D // D == H
    assert D // 2 // 2 == D // 4
    assert (2 * N + 4) // 2 == N + 2
    assert N - N == 0
    assert N + 0 == N == 1 * N
    assert 2 * N != N
    assert N + 1 != N
    assert {2 * N: "a"}[N + N] == "a"
    assert shape_text((M, 2 * N)) == "[M, 2 * N]"
    assert list(dims_in((2 * N, (M + D) // H))) == [N, D, M, H]


NUMBERS = {"D": 12, "H": 4, "M": 7, "N": 60}
STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
}
OPERANDS = st.one_of(st.sampled_from([D, H, M, N]), st.integers(1, 6))


@given(OPERANDS, st.lists(st.tuples(st.sampled_from(sorted(STEPS)), OPERANDS), max_size=5))
def test_sizes_are_what_python_computes(first: Size, steps: list[tuple[str, Size]]) -> None:
    """Wherever every division comes out even; sums round down."""
    size: Any = first
    exact: Any = number(first)
    for symbol, operand in steps:
        summed = isinstance(size, Expr) and len(size.terms) > 1
        if symbol == "//" and not summed and exact % number(operand):
            return
        size, exact = STEPS[symbol](size, operand), STEPS[symbol](exact, number(operand))
    assert size_of(size, NUMBERS) == exact
    assert isinstance(size, (int, Dim)) or len(size.terms) > 1 or str(size)
    whole, rest = without_number(size)
    assert whole + rest == size
    assert size_of(replaced(size, {"N": H * D + 12, "M": 7}), NUMBERS) == exact


def number(size: Size) -> int:
    return size if isinstance(size, int) else NUMBERS[size.name] if isinstance(size, Dim) else 0


def test_uneven_sizes_are_refused_with_their_numbers() -> None:
    with pytest.raises(SpecError, match=r"the size D // 2 does not come out even at D=65"):
        size_of(D // 2, {"D": 65})
    with pytest.raises(SpecError, match=r"divided by 0"):
        _ = D // (N - N)


@pytest.mark.parametrize(("size", "sign"), [(0, 1), (-3, -1), (N - 1, 1), (1 - N, -1), (D - N, None), (N * N - D, 1)])
def test_leading_sign(size: Size, sign: int | None) -> None:
    assert leading_sign(size) == sign


@pytest.mark.parametrize("wrong", [lambda: 0.5 * N, lambda: N / 2, lambda: 2**N, lambda: N**0.5])
def test_other_arithmetic_needs_a_chain(wrong: Callable[[], object]) -> None:
    with pytest.raises(SpecError, match="sizes are whole numbers"):
        wrong()


@pytest.mark.parametrize("wrong", [lambda: N < 3, lambda: N % 2, lambda: float(2 * N), lambda: bool(N), lambda: int(N)])
def test_sizes_are_no_known_numbers(wrong: Callable[[], object]) -> None:
    with pytest.raises(SpecError, match="while a chain is traced"):
        wrong()


@pytest.mark.parametrize(
    ("size", "found"),
    [(2 * N, "M // 2"), (H * N, "M // H"), (N // 2, "2 * M"), (N - 1, "M + 1"), (N + H, "-H + M"), (N, "M"),
     (N * N, "None"), ((N + 1) // 2, "None"), (2 * N - 1, "M // 2 + 1 // 2")],
)  # fmt: skip
def test_a_dim_follows_from_a_size(size: Size, found: str) -> None:
    assert str(solved(size, "N", M)) == found
