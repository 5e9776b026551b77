"""The functions that stand in front of a kernel: what they are called, and what each is for.

Their texts are in templates/parts, but for those that a vendor's hardware has a word for: these are the target's
(`Spelling.functions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WORD_FUNCTIONS: Mapping[str, tuple[str, str]] = {
    "larger": ("the larger of two; NaN wins", "float a, float b"),
    "smaller": ("the smaller of two; NaN wins", "float a, float b"),
    "power_of_2": ("2^x, within 2 ulp; below 2^-126 it is 0", "float x"),
    "reciprocal": ("1 / x, within 1 ulp; above 2^126 it is 0", "float x"),
}


@dataclass(frozen=True, slots=True)
class Reducer:
    """How one kind of reduction is finished across the threads of a row."""

    function: str
    what: str
    ctype: str
    start: str  # before the first value
    fields: tuple[str, ...]
    merge: str  # {0}, {1} ...: the other thread's fields
    needs: tuple[str, ...] = ()


REDUCERS: Mapping[str, Reducer] = {
    "sum": Reducer("row_sum", "the sum", "float", "0.0f", ("v",), "v += {0};"),
    "max": Reducer("row_max", "the largest value", "float", "-INFINITY", ("v",), "v = larger(v, {0});", ("larger",)),
    "min": Reducer("row_min", "the smallest value", "float", "INFINITY", ("v",), "v = smaller(v, {0});", ("smaller",)),
    "softmax": Reducer("row_max_sum", "the largest value and the sum of exponentials below it", "MaxSum",
                       "{-INFINITY, 0.0f}", ("top", "total"), "v.merge({0}, {1});", ("MaxSum", "larger")),
    "welford": Reducer("row_welford", "the mean and the squared deviations from it", "Welford",
                       "{0.0f, 0.0f, 0.0f}", ("count", "mean", "deviations"), "v.merge({0}, {1}, {2});", ("Welford",)),
}  # fmt: skip
