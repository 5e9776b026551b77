"""Whole numbers: every op on i32 is exact, modulo 2^32, in the reference and in both vendors' kernels; what casts mean.

The meaning is said once more here, by Python's own integers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import GenericAlias
from typing import Any

import numpy as np
import pytest

from fusegen import b8, bf16, chain, compile, dims, f16, f32, i32, plan
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import SpecError
from fusegen.language.graph import Kind
from fusegen.language.reference import reference
from fusegen.language.spec import Chain
from fusegen.language.trace import apply
from fusegen.planner import candidates
from fusegen.planner.model import RowPlan
from fusegen.runtime import Kernel, finding
from fusegen.targets import target
from fusegen.validation.inputs import make_operands, sizes_for
from fusegen.validation.patterns import PATTERNS
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

M, N, K, H, D, V = dims("M N K H D V")
LEAST, MOST = -(2**31), 2**31 - 1
VENDORS = ("cuda:h200", "hip:mi300x")
Array = np.ndarray[Any, np.dtype[Any]]


def wrapped(value: int) -> int:
    """Modulo 2^32."""
    return (value - LEAST) % 2**32 + LEAST


# every op that takes i32 as it is
MEANINGS: dict[str, Callable[..., int]] = {
    "add": lambda a, b: wrapped(a + b),
    "sub": lambda a, b: wrapped(a - b),
    "mul": lambda a, b: wrapped(a * b),
    "neg": lambda a: wrapped(-a),
    "abs": lambda a: wrapped(abs(a)),
    "square": lambda a: wrapped(a * a),
    "maximum": max,
    "minimum": min,
    "relu": lambda a: max(a, 0),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "bit_and": lambda a, b: a & b,
    "bit_or": lambda a, b: a | b,
    "bit_xor": lambda a, b: a ^ b,
    "bit_not": lambda a: ~a,
    "sign": lambda a: (a > 0) - (a < 0),
    "floor_div": lambda a, b: wrapped(a // b) if b else 0,
    "mod": lambda a, b: a % b if b else 0,
    "to_i8": lambda a: min(max(a, -128), 127),
    "to_u8": lambda a: min(max(a, 0), 255),
    "to_i4": lambda a: min(max(a, -8), 7),
    "to_u4": lambda a: min(max(a, 0), 15),
    "shift_left": lambda a, n: wrapped(a << n) if 0 <= n < 32 else 0,
    "shift_right": lambda a, n: a >> n if 0 <= n < 32 else -(a < 0),
}
RANDOM = ("philox", "to_unit")  # see test_random.py
OPS = [
    op for op in F.PRIMITIVES
    if op.kind is Kind.MAP and op.takes in ("number", "int") and op.result != f32 and op.name not in RANDOM
]  # fmt: skip


def integers(rows: int, cols: int) -> Array:
    """Extremes, neighbours that are one f32, small and any numbers."""
    rng = np.random.default_rng(5)
    some = [LEAST, LEAST + 1, -(2**24) - 1, -(2**24), -33, -1, 0, 1, 2, 3, 31, 32, 2**24, 2**24 + 1, MOST - 1, MOST]
    made = rng.choice([*some, *rng.integers(LEAST, MOST, 16, endpoint=True)], (rows, cols))
    return made.astype(np.int32)


def test_every_op_that_takes_integers_has_a_meaning_on_them() -> None:
    assert {op.name for op in OPS} == set(MEANINGS)


RESULTS: Any = GenericAlias(tuple, tuple(b8[M, N] if op.result == b8 else i32[M, N] for op in OPS))


@chain(M=4, N=333)
def all_of_them(x: i32[M, N], y: i32[M, N]) -> RESULTS:
    """Every op in one kernel."""
    return tuple(apply(op.name, *(x, y)[: op.arity]) for op in OPS)


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
def test_ops_are_exact(vendor: str) -> None:
    x, y = integers(4, 333), integers(8, 333)[4:]
    pairs = [(int(a), int(b)) for a, b in zip(x.flat, y.flat, strict=True)]
    kernel = compile(all_of_them, target(vendor), on="emulator", validate=False)
    for op, got, law in zip(OPS, kernel(x, y), reference(all_of_them.graph)(x, y), strict=True):
        wanted = [MEANINGS[op.name](*pair[: op.arity]) for pair in pairs]
        assert law.ravel().tolist() == wanted, op
        assert got.ravel().tolist() == wanted, op


@chain(M=5, N=1000)
def reduced(x: i32[M, N]) -> tuple[i32[M, 1], i32[M, 1], i32[M, 1], f32[M, 1]]:
    """Beside a reduction of the same kind in f32."""
    return F.max(x), F.min(x), F.sum(x), F.max(x * 0.5)


def one_of(found: Chain, vendor: str, cluster: int) -> Kernel:
    """The kernel of the first candidate of a kind."""
    plans = [p for p in candidates(found.graph, target(vendor)).plans if isinstance(p, RowPlan)]
    plan = next(p for p in plans if p.tile.cluster == cluster)
    return Kernel(render(plan), None, finding.find(plan.target, "emulator"), lambda layout: (render(plan), None))


@needs_compiler
@pytest.mark.parametrize(
    ("vendor", "cols", "cluster"),
    [(VENDORS[0], 31, 1), (VENDORS[0], 1000, 1), (VENDORS[0], 40000, 2), (VENDORS[1], 63, 1), (VENDORS[1], 503, 1)],
)
def test_reductions_are_exact(vendor: str, cols: int, cluster: int) -> None:
    x = integers(5, cols)
    largest, least, total, half = one_of(reduced.at(N=cols), vendor, cluster)(x)
    assert largest.ravel().tolist() == x.max(-1).tolist()
    assert least.ravel().tolist() == x.min(-1).tolist()
    assert total.ravel().tolist() == [wrapped(sum(row)) for row in x.tolist()]
    np.testing.assert_array_equal(half, np.float32(x.max(-1, keepdims=True)) / 2)


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
def test_what_a_mask_hides_is_reduced_exactly_too(vendor: str) -> None:
    @chain(M=9, N=1000)
    def spec(x: i32[M, N], n: i32) -> tuple[i32[M, 1], i32[M, 1], i32[M, 1]]:
        z = F.where(F.col_index(x) <= F.row_index(x) + n, x, -(2**31))
        return F.sum(z), F.max(z), F.min(z)

    x = integers(9, 1000)
    kernel = compile(spec, target(vendor), on="emulator")
    for n in (3, 700, MOST, LEAST):  # the last row's limit wraps
        limit = np.array([wrapped(row + n) for row in range(9)])[:, None]
        z = np.where(np.arange(1000) <= limit, x.astype(np.int64), LEAST)
        wanted = [[wrapped(total) for total in z.sum(-1).tolist()], z.max(-1).tolist(), z.min(-1).tolist()]
        assert [out.ravel().tolist() for out in kernel(x, n)] == wanted


@chain(M=8, N=100, K=7)
def best(x: i32[M, N]) -> tuple[i32[M, K], i32[M, K]]:
    """The K largest of each row."""
    return F.topk(x, K)


def selected(cols: int, k: int) -> Array:
    """Rows in every order, with ties, with neighbours that are one f32, and with few that are not masked."""
    rng = np.random.default_rng(7)
    few = np.full(cols, LEAST)
    few[rng.choice(cols, k // 2, replace=False)] = LEAST + 1
    rows = (
        rng.integers(LEAST, MOST, cols, endpoint=True), 2**24 + rng.integers(-1, 3, cols), rng.integers(0, 3, cols),
        np.arange(cols), -np.arange(cols), np.full(cols, MOST), np.full(cols, LEAST), few,
    )  # fmt: skip
    return np.array(rows).astype(np.int32)


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize(
    ("cols", "k", "which"),
    [(100, 7, ""), (1000, 200, ""), (3001, 40, "turn=2"), (9000, 33, "cluster=2"), (40000, 3, "128/128"), (77, 1, "")],
)
def test_selections_are_exact(vendor: str, cols: int, k: int, which: str) -> None:
    """By warps, streaming rows, rows in segments, clusters; in what follows them, too."""
    found = best.at(N=cols, K=k)
    plans = [p for p in candidates(found.graph, target(vendor)).plans if which in p.configuration]
    if not plans:
        assert vendor.startswith("hip")
        assert which.startswith("cluster")
        return
    plan = plans[0]
    kernel = Kernel(render(plan), None, finding.find(plan.target, "emulator"), lambda layout: (render(plan), None))
    x = selected(cols, k)
    values, columns = kernel(x)
    for row, got, at in zip(x.tolist(), values.tolist(), columns.tolist(), strict=True):
        order = sorted((col for col in range(cols) if row[col] > LEAST), key=lambda col: (-row[col], col))[:k]
        assert at == order + [-1] * (k - len(order)), plan.configuration
        assert got == [row[col] for col in order] + [LEAST] * (k - len(order)), plan.configuration


@needs_compiler
def test_the_largest_of_sums_that_wrap_and_what_lies_there() -> None:
    @chain(M=4, N=300)
    def spec(x: i32[M, N], w: f32[M, N]) -> tuple[i32[M, 1], f32[M, 1], i32[M, 1]]:
        columns = F.argmax((x ^ 5) + F.col_index(x))
        return columns, F.take(w, columns), F.take(x, columns, missing=-1) & 15

    compile(spec, on="emulator")


# ---------------------------------------------------------------- casts


def edges() -> Array:
    """f32 around every edge of i32, 16 to each side, halves, infinities, NaN, and any bits."""
    near = np.array([2.0**31, -(2.0**31), 2.0**24, -(2.0**24), 1.0, -1.0, 0.5, -0.5, 2.0**30, 1e10, -3e38], np.float32)
    bits = near.view(np.int32)[:, None] + np.arange(-16, 17, dtype=np.int32)
    some = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45], np.float32)
    rest = np.random.default_rng(3).integers(0, 2**32, 1900, dtype=np.uint32).view(np.float32)
    return np.concatenate([bits.view(np.float32).ravel(), some, rest])


def whole(x: float) -> int:
    """Toward zero; the nearest i32 of what is beyond; 0 of NaN."""
    return 0 if np.isnan(x) else int(np.clip(x, LEAST, MOST))


@needs_compiler
@pytest.mark.parametrize("vendor", ["cuda:sm_80", *VENDORS])
def test_a_cast_to_i32_goes_toward_zero_and_saturates(vendor: str) -> None:
    @chain(M=1, N=4)
    def spec(
        x: f32[M, N], h: f16[M, N], b: bf16[M, N], m: b8[M, N],
    ) -> tuple[i32[M, N], i32[M, N], i32[M, N], i32[M, N]]:  # fmt: skip
        return F.cast(x, i32), F.cast(h, i32), F.cast(b, i32), F.cast(m, i32)

    x = edges()[None]
    with np.errstate(over="ignore", invalid="ignore"):
        operands = x, x.astype(f16.numpy), x.astype(bf16.numpy), x > 0
        wanted = [[whole(v) for v in np.asarray(o, np.float64).flat] for o in operands]
    found = spec.at(N=x.shape[1])
    kernel = compile(found, target(vendor), on="emulator", validate=False)
    assert [out.ravel().tolist() for out in reference(found.graph)(*operands)] == wanted
    assert [out.ravel().tolist() for out in kernel(*operands)] == wanted


# ---------------------------------------------------------------- what a spec may say


def refused(function: Callable[..., Any]) -> str:
    @chain(M=2, N=8)
    def spec(q: i32[M, N], x: f32[M, N], m: b8[M, N]) -> i32[M, N]:
        return function(q, x, m)

    return str(spec.graph)


@pytest.mark.parametrize(
    ("function", "said"),
    {
        "bits of f32": (lambda q, x, m: x & 15, "&: found f32 and i32, wanted masks .b8. alone or whole numbers"),
        "or of f32": (lambda q, x, m: x ^ x, "for bits convert with F.cast.x, i32."),
        "not of f32": (lambda q, x, m: ~x, "~: found f32"),
        "mask and integer": (lambda q, x, m: m | q, "found b8 and i32, wanted masks .b8. alone"),
        "integer and bool": (lambda q, x, m: q ^ True, "found i32 and b8"),
        "shift of f32": (lambda q, x, m: x << 2, "shift_left: found f32 where whole numbers"),
        "shift by a float": (lambda q, x, m: q >> 2.0, "shift_right: found f32 where whole numbers"),
        "large literal": (lambda q, x, m: q + 2**31, "add: the literal 2147483648 is beyond i32"),
        "large choice": (lambda q, x, m: F.where(m, q, -(2**40)), "where: the literal -1099511627776 is beyond i32"),
        "large missing": (lambda q, x, m: F.take(q, F.argmax(q), 2**31), "missing=2147483648 is nothing that i32"),
    }.values(),
)  # fmt: skip
def test_what_has_no_meaning_is_refused(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        refused(function)


def test_what_has_no_meaning_on_integers_is_f32() -> None:
    @chain(M=2, N=8)
    def spec(q: i32[M, N], x: f32[M, N]) -> tuple[f32[M, N], f32[M, N], f32[M, 1], f32[M, N], f32[M, 1], f32[M, N]]:
        return q / 2, F.maximum(q, x), F.mean(q), F.softmax(q), F.var(q), F.rmsnorm(q)

    q = np.array([[2**24 + 1, -(2**31), 2**31 - 1, 0, 1, 2, 3, 4]] * 2)
    _, _, mean, _, var, normed = reference(spec.graph)(q, np.zeros((2, 8)))
    np.testing.assert_allclose(mean, q.mean(-1, keepdims=True))  # no sum of these is an i32
    np.testing.assert_allclose(var, q.var(-1, keepdims=True))
    np.testing.assert_allclose(normed[0], q[0] / np.sqrt(np.square(q[0].astype(float)).mean()))


def test_masks_keep_their_operators() -> None:
    @chain(M=1, N=4)
    def spec(a: b8[M, N], b: b8[M, N]) -> tuple[b8[M, N], b8[M, N], b8[M, N], b8[M, N]]:
        return a & b, a | b, a ^ b, ~a

    a, b = np.array([[0, 0, 1, 1]], bool), np.array([[0, 1, 0, 1]], bool)
    for found, wanted in zip(reference(spec.graph)(a, b), (a & b, a | b, a ^ b, ~a), strict=True):
        assert found.tolist() == wanted.tolist()


def test_arithmetic_that_cannot_overflow_reads_as_it_is() -> None:
    @chain(M=8, N=4096)
    def spec(x: f16[M, N], n: i32) -> f16[M, N]:
        col, row = F.col_index(x), F.row_index(x)
        near, far, bits = row - 512, row + n, (col & 7) << 2
        return F.where((col > near) & (col < far) & (bits < col * 3), x, 0.0)

    text = render(candidates(spec.graph, target("cuda:h200")).plans[0]).text
    assert "const int near = row_number - 512;" in text
    assert "const int far = static_cast<int>(static_cast<unsigned>(row_number) + n_value);" in text
    assert "const int bits = static_cast<int>(static_cast<unsigned>(bit_and) << 2);" in text
    assert "const int mul = col_number * 3;" in text


# ---------------------------------------------------------------- what kernels are tried on


def test_rows_of_integers_have_extremes_neighbours_and_ties() -> None:
    @chain(M=64, N=100)
    def spec(q: i32[M, N], x: f32[M, N]) -> i32[M, 1]:
        return F.max(F.where(x > 0.0, q, 0))

    plan = candidates(spec.graph, target("cuda:h200")).plans[0]
    rng = np.random.default_rng(0)
    q, _ = make_operands(plan, sizes_for(plan, 64), rng, PATTERNS).values
    assert {LEAST, LEAST + 1, -(2**24) - 1, 2**24 - 1, 2**24, 2**24 + 1, MOST - 1, MOST} <= set(q.ravel().tolist())
    assert (q == LEAST).all(-1).any()
    assert (np.sort(q)[:, 1:] == np.sort(q)[:, :-1]).any(-1).sum() > 32


@needs_compiler
@pytest.mark.parametrize("vendor", ["cuda:h200", "hip:mi300x"])
def test_a_size_beside_whole_numbers_is_one(vendor: str) -> None:
    """A head of a column, a place behind 2^24 + 3 others: f32 has no `//`, and would round the place."""

    @chain(M=3, H=2, D=20, V=2**24 + 3)
    def spec(ids: i32[M, H * D], table: f32[V]) -> tuple[i32[M, H * D], i32[M, H * D], f32[M, H * D]]:
        heads = F.col_index(ids) // D + 0 * ids
        return heads, F.where(ids < H, ids + V, D), heads * F.sqrt(D) + F.gather(table, ids)

    ids = np.arange(120, dtype=np.int32).reshape(3, 40) - 3
    table = np.zeros(2**24 + 3, np.float32)
    heads, places, scaled = compile(spec, vendor, on="emulator", validate=False)(ids, table)
    of_column = np.repeat([0, 1], 20)
    np.testing.assert_array_equal(heads, np.broadcast_to(of_column, (3, 40)))
    np.testing.assert_array_equal(places, np.where(ids < 2, ids + 2**24 + 3, 20))
    np.testing.assert_allclose(scaled, np.broadcast_to(of_column * 20**0.5, (3, 40)), rtol=1e-6)


@needs_compiler
def test_a_count_of_rows_beside_whole_numbers_is_one() -> None:
    @chain(M=5, N=40)
    def spec(x: i32[M, N]) -> tuple[i32[1, N], f32[1, N]]:
        return F.sum(x * M + F.row_index(x) // M, over=M), F.mean(x, over=M)

    x = np.arange(7 * 40, dtype=np.int32).reshape(7, 40)
    sums, means = compile(spec, "cuda:h200", on="emulator")(x)  # of 7 rows, which the call tells
    np.testing.assert_array_equal(sums, 7 * x.sum(0, keepdims=True))
    np.testing.assert_allclose(means, x.mean(0, keepdims=True), rtol=1e-6)


def test_a_size_beyond_whole_numbers_is_refused_beside_them() -> None:
    @chain(M=8, N=2**16)
    def spec(x: i32[M, N]) -> i32[M, N]:
        return x + N * N

    with pytest.raises(SpecError, match=r"the size N \* N is 4294967296, beyond i32, which it meets"):
        plan(spec, "cuda:h200")
