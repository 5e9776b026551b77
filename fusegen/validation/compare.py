"""A kernel's outputs against what the reference allows.

Rounding to a storage type is monotone, so an f32 value in [v - e, v + e] is stored as something between
storage(v - e) and storage(v + e): that is the law, to the last bit, for overflow to infinity and for subnormals too.

What is reported of e is the part that was used: how far v lies from the nearest number that is stored as what was
found, over e. It is 0 where the exact result would have been stored so, and above 1 exactly where the law is broken.
Half a unit in the last place of a bf16 would hide it, as every right result is off by up to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusegen.language.graph import Tensor, overflows
from fusegen.language.types import DType, b8
from fusegen.validation.bounded import Bounded
from fusegen.validation.report import Worst

Array = np.ndarray[Any, np.dtype[Any]]


Note = Callable[[int, int], str]  # what is wrong with the column chosen in a row at a rank


@dataclass(frozen=True, slots=True)
class Compared:
    """One output, element by element, with the leading axes flattened into rows."""

    tensor: Tensor
    shape: tuple[int, ...]
    got: Array
    expected: Array  # float64, stored and widened again would be `expected` +- half an ulp
    allowed: Array  # distance from `expected`; infinite: not compared
    error: Array
    share: Array  # of the bound that was used, beside the rounding to the storage type; above 1: wrong
    wrong: Array
    note: Note | None = None  # of columns that were chosen, which are right or wrong, by no distance


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of some rows of all outputs."""

    elements: int
    bounded: float
    relative_l2: float
    allowed_l2: float  # of what is allowed, relative as well
    max_abs: float
    max_rel: float
    share: float
    worst: Worst | None
    wrong: int


@np.errstate(all="ignore")
def compare(tensor: Tensor, got: Array, law: Bounded, expected: Array) -> Compared:
    """`got` in its storage type, `expected` as the reference text gives it, `law` for how far off it may be."""
    shape = got.shape
    value = np.broadcast_to(np.asarray(expected), shape).astype(np.float64)
    error = np.broadcast_to(law.error, shape)
    found = got.astype(np.float64)
    if tensor.dtype is b8:  # any byte but 0 is True to C, and only 0 and 1 are right
        found = got.view(np.uint8).astype(np.float64)
    infinite = overflows(tensor.node)
    low, high = (stored(end, tensor.dtype, infinite) for end in (value - error, value + error))
    unknown = np.isinf(error)
    right = (found >= low) & (found <= high) | np.isnan(value) & np.isnan(found)
    right_infinite = right & ~np.isfinite(found)  # beyond the storage type's range, or what the reference has
    off = np.where((found == value) | right_infinite, 0.0, np.abs(found - value))
    distances = (np.where(np.isfinite(end), np.abs(end - value), 0.0) for end in (low, high))
    allowed = np.where(unknown, np.inf, np.where(np.isfinite(value), np.maximum(*distances), 0.0))
    wrong = ~right & ~unknown
    beside = distance(value, got, found, tensor.dtype) / error
    used = np.where(wrong, np.where(beside > 1, beside, np.inf), np.where(error > 0, np.fmin(beside, 1.0), 0.0))
    flat = (math.prod(shape[:-1]), shape[-1])
    found, value, allowed, off, used = (np.asarray(a).reshape(flat) for a in (found, value, allowed, off, used))
    return Compared(tensor, shape, found, value, allowed, off, used, wrong.reshape(flat))


def distance(value: Array, got: Array, found: Array, dtype: DType) -> Array:
    """How far each value lies from the nearest number that is stored as `got`, which is `found` in float64."""
    if dtype.kind != "float":
        return np.asarray(np.abs(stored(value, dtype) - found))
    if dtype.narrow:
        return from_narrow(value, found, dtype)
    end = np.array(np.inf, dtype.numpy)
    next_to_largest = float(np.nextafter(np.array(dtype.largest, dtype.numpy), -end))

    def number(x: Array) -> Array:
        """With the infinities where the next numbers would be: what rounds to them begins halfway there."""
        wide = x.astype(np.float64)
        return np.where(np.isinf(wide), np.copysign(2 * dtype.largest - next_to_largest, wide), wide)

    upper, lower = ((number(got) + number(np.nextafter(got, side))) / 2 for side in (end, -end))
    above = np.where(got == end, -np.inf, value - upper)
    below = np.where(got == -end, -np.inf, lower - value)
    return np.fmax(np.fmax(above, below), 0.0)


def from_narrow(value: Array, found: Array, dtype: DType) -> Array:
    """The same for 8 bits, whose numbers are few. The ends stand for all that is beyond them."""
    with np.errstate(invalid="ignore"):
        every = np.unique(np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(np.float64))
    numbers = every[np.isfinite(every)]
    at = np.clip(np.searchsorted(numbers, found), 0, len(numbers) - 1)
    halfway = (numbers[1:] + numbers[:-1]) / 2
    upper, lower = np.append(halfway, np.inf)[at], np.append(-np.inf, halfway)[at]
    off = np.fmax(np.fmax(value - upper, lower - value), 0.0)
    same = (np.isnan(found) & np.isnan(value)) | (found == value)
    return np.where(np.isfinite(found), off, np.where(same, 0.0, np.inf))


@np.errstate(over="ignore")
def stored(value: Array, dtype: DType, infinite: bool = False) -> Array:
    """Rounded to the storage type, back in float64; `infinite`: with its infinities, where it has any."""
    if dtype.narrow and not infinite:  # 8 bits hold the nearest number that they have of what is beyond their range
        value = np.clip(value, *dtype.nearest)
    if dtype.kind == "float":
        return value.astype(dtype.numpy).astype(np.float64)
    return np.clip(value, 0.0, 1.0) if dtype is b8 else value


@np.errstate(all="ignore")
def figures(outputs: Sequence[Compared], rows: Array | slice = slice(None)) -> Figures:
    """The figures of `rows` over all outputs."""
    elements = known = wrong = 0
    lengths = [0.0, 0.0, 0.0]  # of the errors, of what is allowed, of what is expected
    max_abs = max_rel = share = 0.0
    worst: tuple[tuple[float, bool], Worst] | None = None
    for out in outputs:
        got, expected, allowed = out.got[rows], out.expected[rows], out.allowed[rows]
        error, bad = out.error[rows], out.wrong[rows]
        if not got.size:
            continue
        bounded = np.isfinite(allowed) | bad
        plain = bounded & np.isfinite(expected) & np.isfinite(got)
        elements += got.size
        known += int(bounded.sum())
        wrong += int(bad.sum())
        plain = plain & (out.note is None)
        size = np.where(plain, np.abs(expected), 0.0)
        off = np.where(plain, error, 0.0)
        measured = off, np.where(plain, allowed, 0.0), size
        lengths = [math.hypot(so_far, length(part)) for so_far, part in zip(lengths, measured, strict=True)]
        peak = max(float(size.max()), 1e-300)
        max_abs = max(max_abs, float(off.max()))
        typical = peak * float(np.sqrt(np.square(size / peak).mean()))
        counted = plain & (size >= typical / 1000) & (size > 0)
        max_rel = max(max_rel, float(np.max(off / size, initial=0.0, where=counted)))
        used = np.where(bounded, out.share[rows], -1.0)
        at = int(np.argmax(used))
        most = float(used.flat[at])
        share = max(share, most)
        rank = most, out.note is not None  # a wrong column says more than the wrong values that come of it
        if bounded.any() and (worst is None or rank > worst[0]):
            worst = rank, element(out, rows, at)
    relative_l2, allowed_l2 = (part / lengths[2] if lengths[2] else part for part in lengths[:2])
    bounded_share = known / elements if elements else 1.0
    found = worst[1] if worst else None
    return Figures(elements, bounded_share, relative_l2, allowed_l2, max_abs, max_rel, share, found, wrong)


def length(x: Array) -> float:
    """The Euclidean length of a vector whose squares may leave float64."""
    peak = float(x.max())
    return peak * float(np.sqrt(np.square(x / peak).sum())) if peak else 0.0


def judged(out: Compared, rows: Array | slice, numbers: bool) -> float:
    """The share of elements that were held to a bound; with `numbers`, only those of which a number was expected."""
    held = (np.isfinite(out.allowed) | out.wrong)[rows]
    if numbers:
        held = held & ~np.isnan(out.expected[rows])
    return float(held.mean()) if held.size else 1.0


@np.errstate(all="ignore")
def largest_errors(outputs: Sequence[Compared]) -> tuple[float, float]:
    """The largest error of elements up to 16, from where on a bf16 alone may be off by 0.06, and the largest relative
    error of elements of at least a hundredth of the output's root mean square, and of the smallest number that its type
    holds to full precision. An element that has no bound says nothing."""
    largest = relative = 0.0
    for out in outputs:
        size, known = np.abs(out.expected), np.isfinite(out.allowed)
        typical = float(np.sqrt(np.square(size).mean())) if size.size else 0.0
        dtype = out.tensor.dtype
        normal = dtype.tiny / (2 * dtype.epsilon) if dtype.epsilon else 0.0
        least = max(typical / 100, normal, 1e-30)
        largest = max(largest, float(np.max(out.error, initial=0.0, where=known & (size < 16))))
        relative = max(relative, float(np.max(out.error / size, initial=0.0, where=known & (size >= least))))
    return largest, relative


def element(out: Compared, rows: Array | slice, at: int) -> Worst:
    """Element number `at` of `rows`, by its place in the output."""
    cols = out.got.shape[1]
    row = int(np.arange(out.got.shape[0])[rows][at // cols])
    col = at % cols
    index = (*(int(i) for i in np.unravel_index(row, out.shape[:-1])), col) if out.shape[:-1] else (col,)
    note = out.note(row, col) if out.note is not None and out.wrong[row, col] else ""
    expected, got, allowed = (float(a[row, col]) for a in (out.expected, out.got, out.allowed))
    return Worst(out.tensor.name, index, expected, got, allowed, note)
