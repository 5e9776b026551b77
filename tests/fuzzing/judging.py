"""What of a result is wrong: elements beyond their bounds, columns in any order, bits that should agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.fuzzing.bounded import INF, STORED, Array, Bounded, rounded
from tests.fuzzing.choosing import Choice


@dataclass(frozen=True)
class Verdict:
    """Of one output: how many elements there are, how many were not judged, and what is wrong."""

    elements: int
    unjudged: int
    complaint: str = ""


def judge(got: Array, want: Bounded, dtype: str, shape: tuple[int, ...]) -> Verdict:
    """Element by element: between the roundings of both ends of what it may be."""
    if refusal := misfit(got, dtype, shape):
        return Verdict(got.size, 0, refusal)
    value = np.broadcast_to(want.value, shape)
    error = np.broadcast_to(want.error, shape)
    certain = np.broadcast_to(want.certain, shape)
    with np.errstate(all="ignore"):
        right = agrees(got, value, np.where(certain, error, 0), dtype)
    wrong = ~right & certain
    return Verdict(got.size, int((~certain).sum()), complaint(wrong, got, value, error))


def agrees(got: Array, value: Array, error: Array, dtype: str) -> Array:
    if dtype == "b8":
        return np.asarray(got == value)
    if dtype == "i32":
        return np.asarray(np.abs(got.astype(np.int64) - value) <= error)
    number = got.astype(float)
    between = (rounded(value - error, dtype) <= number) & (number <= rounded(value + error, dtype))
    return np.where(np.isnan(value), np.isnan(number), between)


def misfit(got: Array, dtype: str, shape: tuple[int, ...]) -> str:
    if got.shape == shape and got.dtype == STORED[dtype]:
        return ""
    return f"it is {got.dtype}{list(got.shape)}, wanted {np.dtype(STORED[dtype])}{list(shape)}"


def complaint(wrong: Array, got: Array, value: Array, error: Array) -> str:
    """How many are wrong, and the first of them."""
    if not wrong.any():
        return ""
    at = tuple(int(index[0]) for index in np.nonzero(wrong))
    first = f"at {list(at)}: found {got[at]}, wanted {value[at]} within {error[at]}"
    return f"{int(wrong.sum())} of {wrong.size} are wrong, the first {first}"


def judge_columns(got: Array, choice: Choice, shape: tuple[int, ...], *, ordered: bool) -> Verdict:
    """Columns of a selection: none twice, the missing last, certain ones in their places or the same ones in any order.

    Where ranks are too close to call, the keys chosen must be as near to those due as their errors allow.
    """
    if refusal := misfit(got, "i32", shape):
        return Verdict(got.size, 0, refusal)
    cols, k = choice.keys.shape[-1], shape[-1]
    found, wanted = got.reshape(-1, k).astype(np.int64), np.broadcast_to(choice.columns, shape).reshape(-1, k)
    certain = np.broadcast_to(choice.certain, shape).reshape(-1, k)
    slack = np.broadcast_to(choice.slack, (*shape[:-1], 1)).reshape(-1, 1)
    sets = np.sort(found, -1)
    strange = ((found < -1) | (found >= cols)).any(-1) | ((np.diff(sets) == 0) & (sets[:, 1:] >= 0)).any(-1)
    if strange.any():
        return Verdict(got.size, 0, f"a column twice, or none of the row's: {found[strange][0][:16]}")
    gaps = (np.diff((found < 0).astype(int)) < 0).any(-1)
    if gaps.any():
        return Verdict(got.size, 0, f"the missing are not last: {found[gaps][0][:16]}")
    keys = np.broadcast_to(choice.keys, (*shape[:-1], cols)).reshape(-1, cols).astype(float)
    has, due = keys_at(keys, found), keys_at(keys, wanted)
    if not ordered:
        has = -np.sort(-np.where(np.isnan(has), INF, has))
        due = np.where(np.isnan(due), INF, due)
    with np.errstate(all="ignore"):
        near = (np.abs(has - due) <= slack) | (has == due) | (np.isnan(has) & np.isnan(due)) | np.isinf(slack)
    sure = certain.all(-1, keepdims=True)
    other = (found != wanted) & certain if ordered else (sets != np.sort(wanted)) & sure
    wrong = (~near | other).any(-1)
    said = ""
    if wrong.any():
        row = int(np.argmax(wrong))
        said = f"{int(wrong.sum())} rows are wrong, the first {row}: {found[row][:16]}, wanted {wanted[row][:16]}"
    unjudged = np.isinf(slack) & ~np.broadcast_to(certain if ordered else sure, certain.shape)
    return Verdict(got.size, int(unjudged.sum()), said)


def keys_at(keys: Array, columns: Array) -> Array:
    return np.where(columns < 0, -INF, np.take_along_axis(keys, np.maximum(columns, 0), -1))


def same_bits(one: Array, other: Array) -> Array:
    """Where two arrays agree to the bit; NaN is NaN, whatever its payload."""
    if one.dtype.kind in "bi":
        return np.asarray(one == other)
    with np.errstate(all="ignore"):
        nan = np.isnan(one.astype(float)) & np.isnan(other.astype(float))
    whole = {2: np.uint16, 4: np.uint32}[one.dtype.itemsize]
    return np.asarray((np.ascontiguousarray(one).view(whole) == np.ascontiguousarray(other).view(whole)) | nan)


def difference(one: Array, other: Array) -> str:
    """Where two results that should be the same differ; empty where they don't."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype}{list(one.shape)} against {other.dtype}{list(other.shape)}"
    apart = ~same_bits(one, other)
    if not apart.any():
        return ""
    at = tuple(int(index[0]) for index in np.nonzero(apart))
    return f"{int(apart.sum())} of {apart.size} elements, the first at {list(at)}: {one[at]} and {other[at]}"
