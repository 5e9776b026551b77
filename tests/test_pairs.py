"""Tests of large grids run the cases that show every pair of values, and with --all the rest."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.conftest import in_pairs


@pytest.mark.parametrize("shape", [(2, 2, 2), (22, 4, 2), (5, 3, 4), (2, 3, 2, 5)], ids=str)
def test_every_value_meets_every_other_one(shape: tuple[int, ...]) -> None:
    names = "abcd"[: len(shape)]
    grid = [dict(zip(names, case, strict=True)) for case in product(*map(range, shape))]
    kept = [case for case, keep in zip(grid, in_pairs(grid, names), strict=True) if keep]
    assert len(kept) == len(grid) // min(shape)
    for one, other in combinations(names, 2):
        assert {(case[one], case[other]) for case in kept} == {(case[one], case[other]) for case in grid}


@pytest.mark.parametrize("shape", [(2, 2), (7, 4), (3, 5)], ids=str)
def test_every_value_of_two_parameters_is_there(shape: tuple[int, int]) -> None:
    grid = [dict(zip("ab", case, strict=True)) for case in product(*map(range, shape))]
    kept = [case for case, keep in zip(grid, in_pairs(grid, "ab"), strict=True) if keep]
    assert len(kept) == max(shape)
    for name, count in zip("ab", shape, strict=True):
        assert {case[name] for case in kept} == set(range(count))
