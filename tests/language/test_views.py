"""Views against numpy: the same basic indexing, permutations, splits and merges, by address and strides."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusegen.errors import ArgumentError, SpecError
from fusegen.language.sizes import Expr, Shape, dims, size_of
from fusegen.language.views import View

D, H, M = dims("D H M")
SIZES = {"D": 6, "H": 4, "M": 3}
Array = np.ndarray[Any, np.dtype[Any]]


def shown(view: View, array: Array) -> Array:
    """What the view shows of an array, read by address and strides."""
    each = array.itemsize
    address = array.__array_interface__["data"][0]
    at, shape, strides = view.apply(address, [s // each for s in array.strides], each, SIZES)
    reach = [(n - 1) * s * each for n, s in zip(shape, strides, strict=True)] if 0 not in shape else [0]
    below = sum(r for r in reach if r < 0)
    memory: Any = (ctypes.c_byte * (sum(r for r in reach if r > 0) - below + each)).from_address(at + below)
    return np.ndarray(shape, array.dtype, memory, -below, [s * each for s in strides]).copy()


def numbers(shape: Shape) -> tuple[int, ...]:
    return tuple(size_of(size, SIZES) for size in shape)


def filled(shape: Shape) -> Array:
    extents = numbers(shape)
    return np.arange(int(np.prod(extents)), dtype=np.int32).reshape(extents)


@pytest.mark.parametrize(
    "key",
    [
        (..., slice(None, D // 2)),
        (..., slice(D // 2, None)),
        (..., slice(None, None, 2)),
        (..., slice(1, None, 2)),
        (slice(None), 0),
        (slice(None), -1),
        (slice(None), H - 1, slice(1, -1)),
        (None, ..., None, slice(None)),
        (slice(None, None, -1), slice(-1, 0, -1), slice(None, None, -2)),
        (slice(-2, None), slice(H // 2, H), slice(-(D // 2), None)),
        (0, 0, 0),
        1,
        ...,
    ],
)
def test_slices_are_numpys(key: Any) -> None:
    array = filled((M, H, D))

    def plain(part: Any) -> Any:
        if isinstance(part, slice):
            start, stop = (None if b is None else size_of(b, SIZES) for b in (part.start, part.stop))
            return slice(start, stop, part.step)
        return part if part is None or part is ... else size_of(part, SIZES)

    wanted = array[tuple(map(plain, key)) if isinstance(key, tuple) else plain(key)]
    view = View.identity((M, H, D)).sliced(key)
    view.check(SIZES)
    assert numbers(view.shape) == wanted.shape
    np.testing.assert_array_equal(shown(view, array), wanted)
    if " as " not in (text := view.text("x")):  # what people read is numpy, too
        np.testing.assert_array_equal(eval(text, {"x": array, **SIZES}), wanted)


def test_views_in_words() -> None:
    whole = View.identity((M, H, D))
    low, odd = whole.sliced((..., slice(None, D // 2))), whole.sliced((..., slice(1, None, 2)))
    assert [v.text("x") for v in (whole, low, odd)] == ["x", "x[..., :D // 2]", "x[..., 1::2]"]
    assert whole.sliced((..., slice(D // 2, None))).text("x") == "x[..., D // 2:]"
    assert whole.sliced((slice(None), -1)).text("x") == "x[:, H - 1]"
    assert whole.sliced((slice(1, 3), slice(None, None, -1))).text("x") == "x[1:3, ::-1]"
    assert whole.sliced((slice(None), slice(None, 1))).text("x") == "x[:, :1]"
    assert whole.transposed((0, 2, 1)).text("x") == "x as [M, D, H]"
    assert low.broadcast((2, M, H, D // 2)).text("x") == "x as [2, M, H, D // 2]"
    assert whole.sliced((slice(None, None, -2),)).text("x") == "x as [M // 2, H, D]"


def test_halves_are_of_one_size() -> None:
    whole = View.identity((M, D))
    sizes = {
        whole.sliced((..., part)).shape[-1]
        for part in (slice(None, D // 2), slice(D // 2, None), slice(None, None, 2), slice(1, None, 2))
    }
    assert sizes == {D // 2}


@given(st.data())
def test_chains_of_views_are_numpys(data: st.DataObject) -> None:
    """Random chains, each step taken of what the last one showed, and once as one view of another."""
    shape: Shape = data.draw(st.sampled_from([(M, H, D), (M, H * D), (D,), (M, 1, D // 2), (H, D // 2, 2)]))
    array = filled(shape)
    if data.draw(st.booleans()):  # not contiguous
        array = np.concatenate([array, array], -1)[..., : array.shape[-1]] if array.ndim < 3 else array
    view, wanted = View.identity(shape), array
    apart = View.identity(shape)
    for _ in range(data.draw(st.integers(1, 5))):
        step, wanted_next = drawn(data, view, wanted)
        if step is None:
            continue
        assert numbers(step.shape) == wanted_next.shape
        view, wanted = step, wanted_next
    view.check(SIZES)
    try:
        found = shown(view, array)
    except ArgumentError:  # axes as one that do not lie so
        assert not array.flags.c_contiguous
        return
    np.testing.assert_array_equal(found, wanted)
    assert apart.of(View.identity(shape)).is_identity


def drawn(data: st.DataObject, view: View, array: Array) -> tuple[View | None, Array]:
    """One more step, and numpy's result of it; None where there is no such view."""
    rank = array.ndim
    kind = data.draw(st.sampled_from(["slice", "index", "transpose", "flip", "split", "merge", "new", "broadcast"]))
    if kind == "transpose":
        order = data.draw(st.permutations(range(rank)))
        return View.identity(view.shape).transposed(order).of(view), array.transpose(order)
    if kind == "new":
        return view.sliced((None, ...)), array[None]
    if kind == "broadcast":
        return view.broadcast((H, *view.shape)), np.broadcast_to(array, (4, *array.shape))
    if not rank:
        return None, array
    axis = data.draw(st.integers(0, rank - 1))
    before: tuple[Any, ...] = (slice(None),) * axis
    extent = array.shape[axis]
    if kind == "flip":
        return view.flipped(axis), np.flip(array, axis)
    if kind == "index":
        at = data.draw(st.integers(-extent, extent - 1))
        return View.identity(view.shape).sliced((*before, at)).of(view), array[(*before, at)]
    if kind == "slice":
        start = data.draw(st.integers(0, extent - 1))
        stop = data.draw(st.one_of(st.none(), st.integers(start + 1, extent)))
        part = slice(start, stop)
        return View.identity(view.shape).sliced((*before, part)).of(view), array[(*before, part)]
    if kind == "split":
        size = view.shape[axis]
        factor = 2 if extent % 2 == 0 else 1
        sizes = (factor, size // factor) if data.draw(st.booleans()) else (size // factor, factor)
        extents = numbers(sizes)
        wanted = array.reshape(*array.shape[:axis], *extents, *array.shape[axis + 1 :])
        if isinstance(size, Expr) and sizes[0] * sizes[1] != size:  # (H * M - 2) // 2 * 2 is another size
            return None, array
        return View.identity(view.shape).split(axis, sizes).of(view), wanted
    if axis + 1 == rank:
        return None, array
    try:
        merged = View.identity(view.shape).merged(axis, 2).of(view)
        return merged, array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])
    except ValueError:
        return None, array


def test_merges_need_strides() -> None:
    both = View.identity((M, H, D)).merged(1, 2)
    assert both.shape == (M, H * D)
    array = filled((M, H, D))
    np.testing.assert_array_equal(shown(both, array), array.reshape(3, 24))
    with pytest.raises(ArgumentError, match=r"x has strides of \(8, 1\) elements along axes of \(4, 6\)"):
        both.apply(0, (32, 8, 1), 4, SIZES, "x")
    with pytest.raises(ValueError, match="no single step"):
        View.identity((M, H, D)).transposed((0, 2, 1)).merged(1, 2)
    assert View.identity((M, H * D)).split(1, (H, D)).merged(1, 2).is_identity


def test_axes_of_one_element_lie_between_those_that_are_merged() -> None:
    both = View.identity((M, H, 1, 1, D)).merged(1, 4)
    assert both.shape == (M, H * D)
    array = filled((M, H, 1, 1, D))
    np.testing.assert_array_equal(shown(both, array), array.reshape(3, 24))
    assert both.inverse() is not None
    assert both.apply(0, (24, 6, 99, 7, 1), 4, SIZES, "x") == (0, (3, 24), (24, 1))
    with pytest.raises(ArgumentError, match="no single step"):
        both.apply(0, (48, 12, 6, 6, 1), 4, SIZES, "x")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ((..., ...), "stands twice"),
        ((0, 0, 0), "3 indices of"),
        ((..., 1.5), "an index of float"),
        ((..., slice(0, 4, 0)), "a slice's step"),
        ((..., slice(0.5, 4)), "a slice's bounds"),
        ((..., slice(D - H, None)), "depends on the sizes"),
        ((7,), "index 7 of an axis of 5"),
        ((slice(0, 9),), "outside of an axis of 5"),
        ((slice(2, 2),), "is empty"),
        ((True,), "an index of bool"),
    ],
)
def test_what_is_no_basic_indexing(key: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        View.identity((5, D)).sliced(key)


def test_bounds_are_checked_at_sizes() -> None:
    view = View.identity((M, D)).sliced((..., slice(2, 8)))
    with pytest.raises(SpecError, match=r"element 7 of an axis of 6 \(D\) at D=6"):
        view.check(SIZES)
    view.check({**SIZES, "D": 8})
    with pytest.raises(SpecError, match="the size D // 2 does not come out even at D=5"):
        View.identity((M, D)).sliced((..., slice(D // 2, None))).check({**SIZES, "D": 5})
