"""Loops of one trip: their text without the index, whatever else the text names."""

from __future__ import annotations

import pytest

from fusegen.emitting.loops import alone, each, folded, strided


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
    ("text", "straight"),
    [
        ("x = a * i + b;", "x = a * 0 + b;"),
        ("x = a - i + b;", "x = a - 0 + b;"),
        ("x = a + i * bits / 2;", "x = a + 0 * bits / 2;"),
        ("x = a + i * at(2);", "x = a + 0 * at(2);"),
        ("bits |= one << (31 - i);", "bits |= one << (31);"),
        ("bits &= ~(top >> i);", "bits &= ~(top);"),
    ],
)
def test_elsewhere_the_index_is_0(text: str, straight: str) -> None:
    assert alone(text, "i") == straight


def test_threads_of_a_block_take_turns() -> None:
    body = "a[b] = 0;\n"
    assert strided(body, "b", 64, 64) == "a[threadIdx.x] = 0;\n"
    assert strided(body, "b", 32, 64, "bins") == "if (threadIdx.x < bins) a[threadIdx.x] = 0;\n"
    assert (
        strided(body, "b", 32, 64, also=" && b < n") == "if (threadIdx.x < 32 && threadIdx.x < n) a[threadIdx.x] = 0;\n"
    )
    assert strided(body, "b", 65, 64) == "for (int b = threadIdx.x; b < 65; b += threads) a[b] = 0;\n"


def test_a_long_call_goes_on_in_a_second_line() -> None:
    assert folded("  f(a, b);\n") == "  f(a, b);\n"
    assert folded(f"  f({'a' * 60}, g(b, {'c' * 60}));\n") == f"  f({'a' * 60},\n      g(b, {'c' * 60}));\n"
