"""Rounding errors of matrix products on tensor cores, summed in f32.

*Factors.* One that a prologue computed is rounded to its storage type: half an ulp of that. One of f32 becomes the
nearest tf32, which has its exponents and 11 significant bits; ties go either way (PTX ISA, "cvt": .rna.tf32 away from
zero, .rn.tf32 to even). How far that is from an operand is known. A tensor core takes no notice of the 13 bits behind
those 11 ("mma", operands of type .tf32): a kernel that does not round cuts them off, and ends up to twice as far away.
Matrix units that take f32 as it is (`Target.multiplies_f32`) lose nothing of it. Some flush subnormal factors
(`Target.flushes_factors`).

*The sum.* Products of two f16 or bf16 numbers are exact in f32. A tensor core adds several to the sum at once: it
aligns them all to the largest, cutting off what lies below, and normalizes the result; how many at once, and with how
many bits more, differs by generation and is not documented (Fasi, Higham, Mikaitis & Pranesh, Numerical behavior of
NVIDIA tensor cores, PeerJ CS 7:e330, 2021: 4 to 16 at once, truncated). In a step of 16 products each is cut once, and
so is the sum, at most four more times normalized; each by less than an ulp of the largest magnitude that is there,
which no more exceeds than the sum before the step and the step's own products can reach. With p the sums before each
step and a, b the step's rows and columns,

    error <= 24 * 2^-23 * sum over steps of (|p| + norm(a) norm(b))          (Cauchy-Schwarz, and 3 to spare)

which follows the sums as they are: far less than K 2^-23 |A| |B| where terms cancel on the way, as they mostly do.
Those that multiply f32 as it is round each product and each sum, by half an ulp: 17 of 48 halves for 16 products.
Several sums of interleaved slices (`Plan.summed`) are added up at the end, each addition rounding once. Sums of codes
are made for each group of K, from 0, and scaled where they are added to the others: once more rounded, of both.

*The sum of 8-bit floats.* Hopper and Ada align the products of an instruction, 32 or twice 16, and the sum before it to
the largest of them, cut all of them off 13 bits below its first, and the new sum likewise (Khattak & Mikaitis, Accurate
Models of NVIDIA Tensor Cores, 2025). With m the largest product of the step, p the sum before it and q behind it,

    error <= 2^-13 * sum over steps of (36 max(m, |p|) + 2 |q|),     m <= max|a| max|b|

and |p| and |q| each longer by the error so far. Sums that are promoted (`Summed.promote`) begin at 0, where p is small,
and are added in f32, half an ulp each: of like signs at K = 8192 that is 1 %, and a third where they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusegen.language.block_products import BLOCK
from fusegen.language.segments import group_bounds, matmul_by_group
from fusegen.language.types import DType, f32, i32, tf32
from fusegen.planner.model import Summed
from fusegen.targets.atoms import F32_BITS
from fusegen.validation.accumulation import Multiplication
from fusegen.validation.bounded import Bounded, bounded

Array = np.ndarray[Any, np.dtype[Any]]

STEP = 16  # products that one instruction adds, or two instructions one after another
LINES, COLUMNS = 512, 256  # of K and of the sums' columns, at a time: 1 MiB
ULPS = 24.0 * 2.0**-23  # of a step
FLUSHED = 2.0**-126  # products and sums below may become 0


def factor_error(how: Multiplication, value: Array, error: Array, plain: bool, codes: bool) -> Array:
    """The error of a factor as it is multiplied; `plain`: as it lies in memory; `codes`: before it is scaled."""
    if how.tf32:
        error = as_tf32(value, error)
    elif codes:  # are multiplied as they are, and sums of each group scaled: 0 * inf may then be an infinity
        error = np.where(np.isfinite(value), 0.0, np.inf)
    elif not plain and not how.dtype.narrow:  # which a cast has rounded
        error = rounded(value, error, how.dtype)
    return flushed(value, error, how.dtype) if how.flushes else error


def whole_error(a: Array, a_error: Array, b: Array, b_error: Array) -> Array:
    """Of a product of whole numbers: none, modulo 2^32, of those that are known; where others may pass that, all."""
    if not a_error.any() and not b_error.any():
        return np.zeros(())
    a, b = (np.abs(x.astype(np.float64)) for x in (a, b))
    error = a_error @ (b + b_error) + a @ b_error
    return np.where((error > 0) & (a @ b + error > i32.largest), np.inf, error)


def rounded(value: Array, error: Array, dtype: DType) -> Array:
    """The error of a computed factor once it is rounded to `dtype`."""
    size = np.abs(value) + error
    half_ulp = np.maximum(size * dtype.epsilon, dtype.tiny / 2)
    return np.where((size <= dtype.largest) | ~np.isfinite(value), error + half_ulp, np.inf)


def as_tf32(value: Array, error: Array) -> Array:
    """The error of an f32 factor once it is the nearest tf32: of one that is known, how far off that is."""
    return np.where(error == 0, distance_to_tf32(value), rounded(value, error, tf32))


@np.errstate(over="ignore", invalid="ignore")
def distance_to_tf32(value: Array) -> Array:
    """From each finite number to the nearest tf32, which is an infinity beyond the largest; 0 for all others."""
    bits = value.astype(np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x1000) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(value), np.abs(nearest - value), 0.0)


def flushed(value: Array, error: Array, dtype: DType) -> Array:
    """The error of a factor where subnormal numbers become 0."""
    smallest_normal = dtype.tiny / (2 * dtype.epsilon)
    return np.asarray(error + np.where(np.abs(value) < smallest_normal, np.abs(value), 0.0))


def product_error(
    a: Array, a_error: Array, b: Array, b_error: Array, value: Array, how: Summed, bits: int = F32_BITS
) -> Array:
    """The bound on a @ b = `value`, whose factors are off by the errors given; `bits`: of sums while they are made."""
    whole_a, whole_b = finite(a), finite(b)
    summing = summing_error(whole_a, whole_b, how) if bits == F32_BITS else short_error(whole_a, whole_b, how, bits)
    error = summing + whole_a.shape[-1] * FLUSHED
    size = np.abs(whole_a) @ np.abs(whole_b)
    if a_error.any():
        error = error + np.broadcast_to(a_error, a.shape) @ (np.abs(whole_b) + b_error)
    if b_error.any():
        error = error + np.abs(whole_a) @ np.broadcast_to(b_error, b.shape)
    error = np.where(np.isnan(error) | (size + error > f32.largest), np.inf, error)
    zero = (size == 0) & (error <= whole_a.shape[-1] * FLUSHED)  # nothing but zeros: exactly that
    error = np.where(zero, 0.0, error)
    # an infinity times what may be multiplied as 0, and may not, is NaN or an infinity
    if whole_a is not a and b_error.any():
        error = np.where(meet(np.isinf(a), vanishing(b, b_error)), np.inf, error)
    if whole_b is not b and a_error.any():
        error = np.where(meet(vanishing(a, a_error), np.isinf(b)), np.inf, error)
    # an infinity or a NaN among the factors decides, unless the factors themselves are not known
    return np.where(np.isfinite(value) | np.isinf(error), error, 0.0)


def unless_too_large(found: Bounded, left: Array, codes: Array, *ends: Array) -> Bounded:
    """A product of codes [N, K], or of groups of rows by [E, N, K] and `ends`, of which nothing is known where sums
    before they are scaled may leave f32's range."""
    whole_left, whole_codes = np.abs(finite(left)), np.swapaxes(np.abs(finite(codes)), -1, -2)
    most = matmul_by_group(whole_left, whole_codes, *ends) if ends else whole_left @ whole_codes
    return bounded(found.value, np.where(most > f32.largest, np.inf, found.error))


def finite(x: Array) -> Array:
    """The same with 0 for what is not finite; x itself where all is."""
    known = np.isfinite(x)
    return x if known.all() else np.where(known, x, 0.0)


def vanishing(value: Array, error: Array) -> Array:
    """Numbers that may be multiplied as 0, and may not."""
    return np.asarray((error > 0) & (error >= np.abs(value)))


def meet(a: Array, b: Array) -> Array:
    """Where in a product of these shapes marked factors meet."""
    if not a.any() or not b.any():
        return np.asarray(False)
    return np.asarray(a.astype(np.float32) @ b.astype(np.float32) > 0)


def summing_error(a: Array, b: Array, how: Summed) -> Array:
    """Of the additions: finite factors only. Some columns at a time, whose sums stay in a CPU's cache."""
    columns = range(0, max(1, b.shape[-1]), COLUMNS)
    return np.concatenate([summing_error_of(a, b[..., start : start + COLUMNS], how) for start in columns], -1)


def summing_error_of(a: Array, b: Array, how: Summed) -> Array:
    depth = a.shape[-1]
    own = a[..., :1] @ b[..., :1, :]
    total, scaling, size = (np.zeros(own.shape) for _ in range(3))
    partials = [np.zeros(own.shape) for _ in range(how.shares)]
    groups = [np.zeros(own.shape) if how.scaled else partial for partial in partials]  # what is not scaled yet
    norms_a, norms_b = [], []
    for start in range(0, depth, LINES):
        # rows of b next to each other, which those of a transposed one are not
        rows, lines = a[..., start : start + LINES], np.ascontiguousarray(b[..., start : start + LINES, :])
        for k in range(0, rows.shape[-1], STEP):
            left, right = rows[..., k : k + STEP], lines[..., k : k + STEP, :]
            norms_a.append(np.sqrt(np.square(left).sum(-1)))
            norms_b.append(np.sqrt(np.square(right).sum(-2)))
            share = how.share(start + k)
            partial, group = partials[share], groups[share]
            total += np.abs(group, out=size)
            np.matmul(left, right, out=own)
            partial += own
            if how.scaled:
                group += own
                if min(start + k + STEP, depth) % how.scaled == 0:
                    scaling += np.abs(group, out=size)
                    scaling += np.abs(partial, out=size)
                    group[:] = 0.0
    merging = sum(map(np.abs, partials)) * (2.0**-23 * how.shares) if how.shares > 1 else 0.0
    norms = np.stack(norms_a, -1) @ np.stack(norms_b, -2)
    return np.asarray(ULPS * (total + norms) + merging + 2.0**-23 * scaling)


def block_product(args: Sequence[Bounded], how: Summed, bits: int) -> Bounded:
    """Of operands [M, K] and [K, N] and their scales [M, K // 128] and [N // 128, K // 128]. Sums of a block are scaled
    by both, which are multiplied first: two roundings more. Nothing is known where a product of scales is no normal
    f32: the order of scaling then decides what is 0 or infinite."""

    def by_row(each: Array) -> Array:
        return np.repeat(each, BLOCK, -1)

    def by_block(each: Array) -> Array:
        return np.repeat(np.repeat(each.T, BLOCK, -2), BLOCK, -1)

    (x, w, sx, sw), errors = (a.value for a in args), [np.broadcast_to(a.error, a.value.shape) for a in args]
    a, b = x * by_row(sx), w * by_block(sw)
    a_error = errors[0] * by_row(np.abs(sx) + errors[2]) + np.abs(x) * by_row(errors[2])
    b_error = errors[1] * by_block(np.abs(sw) + errors[3]) + np.abs(w) * by_block(errors[3])
    value = a @ b
    error = product_error(a, a_error, b, b_error, value, how, bits)
    finite_a, finite_b = (np.where(np.isfinite(each), each, 0.0) for each in (a, b))
    for k in range(0, a.shape[-1], BLOCK):
        error = error + 2.0**-23 * np.abs(finite_a[:, k : k + BLOCK] @ finite_b[k : k + BLOCK])
    pair = np.abs(sx)[:, None] * np.abs(sw)[None]
    wild = (~((pair >= FLUSHED) & (pair <= f32.largest)) & (pair != 0)).any(-1).repeat(BLOCK, -1)
    return bounded(value, np.where(wild, np.inf, error))


def by_group(args: Sequence[Bounded], multiply: Callable[..., Bounded]) -> Bounded:
    """A grouped product of rows [T, K], matrices [E, K, N] and ends [E], each group by `multiply`; exactly 0 in rows of
    no group. Behind the ends may be scales of the rows, [T, ..], and of the matrices, [E, ..]."""
    x, w, ends, *scales = args
    of_rows, of_matrices = scales[:1], scales[1:]
    places = group_bounds(ends.value, len(x.value))
    value, error = (np.zeros((len(x.value), w.value.shape[-1])) for _ in range(2))

    def part(arg: Bounded, at: int | slice) -> Bounded:
        return Bounded(arg.value[at], np.broadcast_to(arg.error, arg.value.shape)[at])

    for group in range(len(w.value)):
        rows = slice(places[group], places[group + 1])
        if rows.start < rows.stop:
            own = (*(part(s, rows) for s in of_rows), *(part(s, group) for s in of_matrices))
            found = multiply(part(x, rows), part(w, group), *own)
            value[rows], error[rows] = found.value, found.error
    return Bounded(value, error)


def over_groups(args: Sequence[Bounded], multiply: Callable[[Bounded, Bounded], Bounded]) -> Bounded:
    """A product [M, T] @ [T, N] for each group of T, which ends [E] give; exactly 0 of empty ones."""
    x, y, ends = args
    places = group_bounds(ends.value, len(y.value))
    shape = (len(ends.value), len(x.value), y.value.shape[-1])
    value, error = np.zeros(shape), np.zeros(shape)
    errors = [np.broadcast_to(arg.error, arg.value.shape) for arg in (x, y)]
    for group in range(len(ends.value)):
        own = slice(places[group], places[group + 1])
        if own.start < own.stop:
            found = multiply(Bounded(x.value[:, own], errors[0][:, own]), Bounded(y.value[own], errors[1][own]))
            value[group], error[group] = found.value, found.error
    return Bounded(value, error)


def vectors_by_group(rows: int, table: Bounded, ends: Bounded) -> Bounded:
    """Of each row the table's vector for its group; exactly 0 in rows of no group."""
    places = group_bounds(ends.value, rows)
    value, error = (np.zeros((rows, table.value.shape[-1])) for _ in range(2))
    errors = np.broadcast_to(table.error, table.value.shape)
    for group in range(len(table.value)):
        own = slice(places[group], places[group + 1])
        value[own], error[own] = table.value[group], errors[group]
    return Bounded(value, error)


SHORT_STEP = 32  # products of 8-bit floats that one instruction adds
SHORT_TERMS = 36.0  # of a step, which lose bits: 32 products and the sum before them, twice where it takes 16 at once


def short_error(a: Array, b: Array, how: Summed, bits: int) -> Array:
    """Of additions that keep few bits: finite factors only."""
    depth, ulp = a.shape[-1], 2.0 ** (1 - bits)
    slice_k, promote = how.k or depth, how.promote or depth
    largest_a, largest_b = np.abs(a), np.abs(b)
    merged: Any = np.zeros(())
    total: Any = np.zeros(())
    for share in range(how.shares):
        whole: Any = np.zeros(())
        for first in (k for k in range(0, depth, min(slice_k, promote)) if how.share(k) == share):
            partial: Any = np.zeros(())
            error: Any = np.zeros(())
            for k in range(first, min(first + min(slice_k, promote), depth), SHORT_STEP):
                end = min(k + SHORT_STEP, depth)
                largest = largest_a[..., k:end].max(-1)[..., None] * largest_b[..., k:end, :].max(-2)[..., None, :]
                lost = SHORT_TERMS * np.maximum(largest, np.abs(partial) + error)
                partial = partial + a[..., k:end] @ b[..., k:end, :]
                error = (error + ulp * (lost + 2.0 * (np.abs(partial) + error))) * (1 + 2 * ulp)
            whole = whole + partial
            total = total + error + 2.0**-24 * (np.abs(whole) + error)
        merged = merged + np.abs(whole)
    return np.asarray(total * (1 + 2.0**-10) + (merged * (2.0**-23 * how.shares) if how.shares > 1 else 0.0))
