"""Loops of one trip: their text without the index, whatever else the text names."""

from __future__ import annotations

import pytest

from fusegen.emitting.loops import alone, each


@pytest.mark.parametrize(
    ("text", "index", "straight"),
    [
        ("x[i] = a + i;", "i", "x[0] = a;"),
        ("x[i] = add + int_;", "i", "x[0] = add + int_;"),
        ("store(slice + v * 8, held[v]);", "v", "store(slice, held[0]);"),
        ("store(slice + volatile_to + v * at_once, held[v]);", "v", "store(slice + volatile_to, held[0]);"),
        ("row = i * 16 + lane / 4;", "i", "row = lane / 4;"),
        ("f(i * 16 + lane, ii * 2 + lane);", "i", "f(lane, ii * 2 + lane);"),
    ],
)
def test_a_loop_of_one_trip_leaves_other_names_as_they_are(text: str, index: str, straight: str) -> None:
    assert alone(text, index) == straight
    assert each(f"  {text}\n", index, 1) == f"  {straight}\n"


@pytest.mark.parametrize(
    "text", ["x = a * i + b;", "x = a - i + b;", "x = a + i * bits / 2;", "x = a + i * at(2);", "x = a + i * t.at[0];"]
)
def test_a_loop_of_one_trip_is_refused_rather_than_told_wrongly(text: str) -> None:
    with pytest.raises(AssertionError, match="leaves its index i in"):
        alone(text, "i")
