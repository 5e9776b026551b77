"""Grouped products: what they mean, how many tiles they need, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fusegen
from fusegen import Chain, bf16, chain, dims, f8e4m3, f16, f32, i8, i32, i64, ragged, u8
from fusegen import ops as F
from fusegen.errors import NoPlan, SpecError
from fusegen.language.products import Unsplittable, split
from fusegen.language.reference import reference
from fusegen.language.segments import group_bounds
from fusegen.language.types import TensorType
from fusegen.planner import candidates
from fusegen.planner.block_count import BlockCount
from fusegen.targets import A100
from fusegen.validation.grouped import ends_of_some, group_ends, group_of
from tests import grouped

B, T, N, K, E, L = dims("B T N K E L")
RAGGED = ragged("T", groups=E)
END = st.integers(-3, 40) | st.sampled_from([-(2**31), 2**31 - 1])


@given(ends=st.lists(END, min_size=1, max_size=6), rows=st.integers(0, 37))
def test_a_row_is_of_the_first_group_whose_end_lies_behind_it(ends: list[int], rows: int) -> None:
    given = np.array(ends, np.int32)
    bounds = [*group_bounds(given, rows), rows]
    assert bounds == sorted(bounds)
    want = grouped.group_of(rows, given)
    assert np.array_equal(group_of(given, rows), np.where(want < 0, len(ends), want))


@given(ends=st.lists(END, min_size=4, max_size=4), rows=st.integers(1, 20))
def test_the_reference_goes_by_rows(ends: list[int], rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((rows, 5), (4, 6, 5)))
    got = reference(grouped.plain.at(T=rows, N=6, K=5, E=4).graph)(x, w, np.array(ends, np.int32))
    assert np.array_equal(got, grouped.by_definition(x, w.swapaxes(1, 2), np.array(ends)))


@given(ends=st.lists(END, min_size=4, max_size=4), rows=st.integers(1, 20))
def test_a_bias_is_added_to_the_rows_of_its_group(ends: list[int], rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, w, bias = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((rows, 5), (4, 6, 5), (4, 6)))
    got = reference(grouped.biased.at(T=rows, N=6, K=5, E=4).graph)(x, w, np.array(ends, np.int32), bias)
    assert np.array_equal(got, grouped.by_definition(x, w.swapaxes(1, 2), np.array(ends), bias))


@given(ends=st.lists(END, min_size=4, max_size=4), rows=st.integers(1, 20))
def test_a_scale_multiplies_the_columns_of_its_group_before_its_bias_is_added(ends: list[int], rows: int) -> None:
    rng = np.random.default_rng(rows)
    shapes = ((rows, 5), (4, 6, 5), (4, 6), (4, 6), (rows, 1))
    x, w, bias, columns, scale = (rng.integers(-3, 4, shape).astype(np.int8) for shape in shapes)
    got = reference(grouped.by_channels.at(T=rows, N=6, K=5, E=4).graph)(
        x, w, np.array(ends, np.int32), bias, columns, scale
    )
    law = grouped.by_definition(x, w.swapaxes(1, 2) * columns[:, None].astype(float), np.array(ends), bias)
    assert np.array_equal(got, law * scale)


def test_sums_of_whole_numbers_are_exact_beyond_f32() -> None:
    """2^24 + 1 is no f32: the reference and the bounds of errors hold it."""
    x, w = np.full((3, 1049), 127, np.int8), np.full((2, 1, 1049), 127, np.int8)
    x[:, 0], w[1, 0, 0] = 5, -128
    got = reference(grouped.whole.at(T=3, N=1, K=1049, E=2).graph)(x, w, np.array([1, 2], np.int32))
    assert got.dtype == np.int32
    assert got[:, 0].tolist() == [1048 * 127**2 + 5 * 127, 1048 * 127**2 - 5 * 128, 0]
    assert got[0, 0] > 2**24 < got[1, 0]


@given(
    ends=st.lists(st.integers(0, 300), min_size=1, max_size=9),
    rows=st.integers(1, 300),
    tile=st.sampled_from([16, 32, 96, 128]),
)
def test_a_launch_has_a_block_for_each_tile(ends: list[int], rows: int, tile: int) -> None:
    """As many as groups need, and as many as one needs that is the worst."""
    count = BlockCount(rows=tile, groups=len(ends))
    bounds = np.append(group_bounds(np.array(ends), rows), rows)
    assert count.tiles(rows) >= sum(-(-int(n) // tile) for n in np.diff(bounds))
    begun = min(len(ends) + 1, rows)
    worst = [1] * (begun - 1) + [rows - begun + 1]  # a row each, and the rest
    assert count.tiles(rows) == sum(-(-n // tile) for n in worst) or (rows - begun) % tile == 0
    assert BlockCount(rows=tile, groups=3).tiles(0) == 0


@given(seed=st.integers(0, 999), groups=st.integers(1, 7), rows=st.integers(1, 50))
def test_some_rows_keep_their_groups(seed: int, groups: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    graph = grouped.plain.at(T=rows, E=groups).graph
    ends = group_ends(rng, groups, rows)
    before = group_of(ends, rows)
    picks = sorted(rng.permutation(rows)[: rng.integers(1, rows + 1)].tolist(), key=lambda row: before[row])
    some = ends_of_some(graph, "ends", ends, {**graph.sizes, "T": rows}, {"T": picks})
    assert np.array_equal(group_of(some, len(picks)), before[picks])


def test_ends_are_right_and_wrong() -> None:
    """Launches see empty groups, groups of one row, rows of no group, and every kind of mistake."""
    rng = np.random.default_rng(0)
    drawn = [group_ends(rng, 5, 30) for _ in range(400)]
    rising = [e for e in drawn if (np.diff(e) >= 0).all() and e.min() >= 0 and e.max() <= 30]
    sizes = [np.diff(e, prepend=0) for e in rising]
    assert any((s == 0).any() for s in sizes)
    assert any((s == 1).any() for s in sizes)
    assert any((s == 30).any() for s in sizes)
    assert any(e[-1] < 30 for e in rising)
    assert any((e < 0).any() for e in drawn)
    assert any((e > 30).any() for e in drawn)
    assert any((np.diff(e.astype(np.int64)) < 0).any() for e in drawn)


def test_products_of_other_groups_are_apart() -> None:
    @chain(T=8, N=8, K=8, E=2)
    def two(x: bf16[T, K], w: bf16[E, K, N], a: i32[E], b: i32[E]) -> bf16[T, N]:
        return F.grouped_matmul(x, w, a) + F.grouped_matmul(x, w, b)

    with pytest.raises(Unsplittable, match="are not of the same groups of rows"):
        split(two.graph)
    assert isinstance(fusegen.compile(two, "cuda:a100", on="emulator", validate=False), fusegen.Program)


def spec(function: Callable[..., object], **annotations: TensorType) -> Chain:
    function.__name__, function.__annotations__ = "product", annotations
    used = {str(size) for type in annotations.values() for size in type.shape}
    sizes = {"T": 6, "N": 10, "K": 7, "E": 3, "B": 2, "L": 4}
    return chain(**{name: size for name, size in sizes.items() if name in used})(function)


WHOLE = {"x": bf16[T, K], "w": bf16[E, K, N], "ends": i32[E], "return": bf16[T, N]}
SHAPES = r"wanted rows \[T, K\], a matrix"
BAD: dict[str, tuple[Callable[..., object], dict[str, TensorType], str]] = {
    "transposed": (
        lambda x, w, ends: F.grouped_matmul(x, w, ends), WHOLE | {"w": bf16[E, N, K]}, r"did you mean `x @ w\.T`",
    ),
    "another count": (
        lambda x, w, ends: F.grouped_matmul(x, w, ends), WHOLE | {"ends": i32[L]}, SHAPES,
    ),
    "a batch": (
        lambda x, w, ends: F.grouped_matmul(x, w, ends), WHOLE | {"x": bf16[B, T, K]}, SHAPES,
    ),
    "one matrix": (
        lambda x, w, ends: F.grouped_matmul(x, w, ends), WHOLE | {"w": bf16[K, N]},  # one for each group of K
        r"the output has shape \[E, T, N\], declared is \[T, N\]",
    ),
    "ends of i64": (
        lambda x, w, ends: F.grouped_matmul(x, w, ends), WHOLE | {"ends": i64[E]},
        r"found ends i64\[E\]; wanted i32\[E\], where each group ends",
    ),
    "computed ends of f32": (
        lambda x, w, ends: F.grouped_matmul(x, w, ends + 1.0), WHOLE, r"found ends f32\[E\] that are computed; wanted",
    ),
    "no ends": (
        lambda x, w, ends: F.grouped_matmul(x, w, None),  # type: ignore[arg-type]
        WHOLE, "the ends are None, not a traced value",
    ),
    "a bias for all groups": (
        lambda x, w, ends, b: F.grouped_matmul(x, w, ends, b), WHOLE | {"b": f32[N]},
        r"found a bias f32\[N\]; wanted an operand of f32, f16 or bf16, \[E, N\]: a vector for each group",
    ),
    "a bias that is computed": (
        lambda x, w, ends, b: F.grouped_matmul(x, w, ends, b + 1.0), WHOLE | {"b": f32[E, N]},
        r"found a bias f32\[E, N\] that is computed; wanted an operand",
    ),
    "a bias of whole numbers": (
        lambda x, w, ends, b: F.grouped_matmul(x, w, ends, b), WHOLE | {"b": i32[E, N]}, r"found a bias i32\[E, N\]",
    ),
    "a bias that is a number": (
        lambda x, w, ends: F.grouped_matmul(x, w, ends, 1.0),  # type: ignore[arg-type]
        WHOLE, "the bias is 1.0, not a traced value",
    ),
    "f32": (
        lambda x, w, ends: F.grouped_matmul(x, w, ends), WHOLE | {"x": f32[T, K], "w": f32[E, K, N]},
        "found factors of f32; wanted f16, bf16 or 8 bits",
    ),
    "two types": (
        lambda x, w, ends: F.grouped_matmul(x, w, ends), WHOLE | {"x": f16[T, K]}, "wanted f16, bf16 or 8 bits",
    ),
    "two types of 8 bits": (
        lambda x, w, ends: F.grouped_matmul(x, w, ends), WHOLE | {"x": u8[T, K], "w": i8[E, K, N], "return": i32[T, N]},
        "found factors of u8 and i8; wanted f16, bf16 or 8 bits, both of one type",
    ),
    "8 bits of groups that are summed over": (
        lambda x, w, ends: F.grouped_matmul(x.mT, w, ends),
        {"x": f8e4m3[T, K], "w": f8e4m3[T, N], "ends": i32[E], "return": bf16[E, K, N]},
        "found factors of f8e4m3; wanted f16 or bf16",
    ),
    "other ends than of groups that were declared": (
        lambda x, w, ends: F.grouped_matmul(x, w, ends),
        {"x": bf16[RAGGED, K], "w": bf16[L, K, N], "ends": i32[L], "return": bf16[RAGGED, N]},
        r"found ends \[L\] of rows T, which are ragged in E groups; wanted ends \[E\]",
    ),
    "other ends than of groups that were declared, and are summed over": (
        lambda x, w, ends: F.grouped_matmul(x.mT, w, ends),
        {"x": bf16[RAGGED, K], "w": bf16[RAGGED, N], "ends": i32[L], "return": bf16[L, K, N]},
        r"found ends \[L\] of rows T, which are ragged in E groups",
    ),
    "whole numbers of groups that are summed over": (
        lambda x, w, ends: F.grouped_matmul(x.mT, w, ends),
        {"x": i8[T, K], "w": i8[T, N], "ends": i32[E], "return": i32[E, K, N]},
        "found factors of whole numbers; wanted f16 or bf16",
    ),
    "a bias of sums that are i32": (
        lambda x, w, ends, b: F.grouped_matmul(x, w, ends, b),
        WHOLE | {"x": i8[T, K], "w": i8[E, K, N], "b": f32[E, N]},
        "found a bias beside factors of whole numbers, whose sums are i32; wanted a scale as well",
    ),
    "a scale for all groups": (
        lambda x, w, ends, s: F.grouped_matmul(x, w, ends, scale=s), WHOLE | {"s": f32[N]},
        r"found a scale f32\[N\]; wanted an operand of f32, f16 or bf16, \[E, N\]: a vector for each group",
    ),
    "weights that are dequantized by their columns": (
        lambda x, w, ends, s: F.grouped_matmul(x, F.dequantize(w, s).mT, ends),
        WHOLE | {"x": f8e4m3[T, K], "w": f8e4m3[E, N, K], "s": f32[E, N, 1]},
        r"grouped_matmul: .*a factor of 8 bits meets one that is computed\n.*ends, scale=scale\) \* scale_of_x",
    ),
    "blocks of as many experts as there are no ends": (
        lambda x, sx, w, sw, ends: F.grouped_matmul(F.dequantize(x, sx), F.dequantize(w, sw).mT, ends),
        {"x": f8e4m3[T, 256], "sx": f32[T, 2], "w": f8e4m3[E, 128, 256], "sw": f32[E, 1, 2], "ends": i32[L],
         "return": bf16[T, 128]}, SHAPES,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    function, annotations, said = BAD[name]
    with pytest.raises(SpecError, match=said):
        spec(function, **annotations)


def test_a_ragged_dim_is_the_dim_of_its_name() -> None:
    """Its groups are a number as well, and are of it wherever rows of it are multiplied."""
    three = ragged("T", groups=3)
    assert (three, hash(three), repr(three)) == (T, hash(T), repr(T))

    @chain(T=40, K=16, N=8, E=3)
    def experts(x: bf16[ragged("T", groups=E), K], w: bf16[E, K, N], ends: i32[E]) -> bf16[T, N]:
        return F.relu(F.grouped_matmul(x, w, ends))

    assert experts.graph.sizes == {"T": 40, "K": 16, "N": 8, "E": 3}
    assert fusegen.compile(experts, A100, on="emulator", tuned=False).report.ok


@pytest.mark.parametrize(
    ("name", "groups", "said"),
    [
        ("1T", E, "'1T' is not a name"), (T, E, "is not a name"), ("T", 0, "found groups 0; wanted a dim, or a number"),
        ("T", True, "found groups True"), ("T", "E", "found groups 'E'"),
    ],
)  # fmt: skip
def test_what_is_no_ragged_dim(name: Any, groups: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        ragged(name, groups)


def test_what_has_more_axes_is_refused() -> None:
    @chain(T=8, N=8, K=8, E=2, B=3)
    def more(x: bf16[T, K], w: bf16[E, K, N], ends: i32[E], y: bf16[B, T, N]) -> bf16[B, T, N]:
        return F.grouped_matmul(x, w, ends) + y

    with pytest.raises(NoPlan, match="has rows of one axis, and meets what has more"):
        candidates(more.graph, A100).need()


def test_a_bias_is_no_scale() -> None:
    assert not any("scaled" in line for line in fusegen.plan(grouped.gated_biased, A100, tuned=False).rounding)
