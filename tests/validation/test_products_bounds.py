"""Bounds of matrix products: sums as tensor cores make them stay inside, one product too few does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fusegen import Chain, b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.language.graph import plain
from fusegen.planner.model import Plan, Summed
from fusegen.targets import MI300X, TARGETS
from fusegen.validation.bounds import analyse
from fusegen.validation.inputs import main_tensors, make_operands, right_factors, sizes_for, take
from fusegen.validation.judging import steps
from fusegen.validation.patterns import PATTERNS, SETTINGS, UNIT_SETTING, patterns_for
from fusegen.validation.products import distance_to_tf32, product_error
from tests.language.test_products import ALL, bias_gelu, norm_swiglu, qkv, turned, with_tf32
from tests.products import Sketch, sketch

M, N, K = dims("M N K")


@chain(M=33, N=24, K=200)
def matmul(x: bf16[M, K], w: bf16[K, N]) -> f32[M, N]:
    return x @ w


@chain(M=33, N=24, K=200)
def prologue(x: f16[M, K], w: f16[K, N]) -> f32[M, N]:
    return F.silu(x) @ w


ONE = Summed()


def truncated(x: np.ndarray) -> np.ndarray:
    """f32, towards zero."""
    near = x.astype(np.float32)
    return np.where(np.abs(near) > np.abs(x), np.nextafter(near, np.float32(0)), near)


def summed(a: np.ndarray, b: np.ndarray, at_once: int, how: Summed = ONE) -> np.ndarray:
    """a @ b as a tensor core may do it: `at_once` products are cut to an ulp of the largest and added to the sum."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for share in range(how.split_k):
        part = np.zeros_like(total)
        for k in range(0, a.shape[1], at_once):
            if how.k and k // how.k % how.split_k != share:
                continue
            terms = a[:, k : k + at_once, None] * b[None, k : k + at_once]
            terms = np.concatenate([terms.astype(np.float64), part[:, None].astype(np.float64)], 1)
            top = np.abs(terms).max(1, keepdims=True)
            ulp = np.exp2(np.floor(np.log2(np.where(top > 0, top, 1.0))) - 23)
            part = truncated((np.trunc(terms / ulp) * ulp).sum(1))
        total = (total + part).astype(np.float32)
    return total


@dataclass(frozen=True, kw_only=True)
class Shared(Sketch):
    how: Summed

    @property
    def summed(self) -> Summed:
        return self.how


@pytest.mark.parametrize("at_once", [1, 4, 8, 16])
@pytest.mark.parametrize("pattern", ["normal", "alternating", "mean >> spread", "ties", "ends", "small"])
@pytest.mark.parametrize("how", [Summed(), Summed(split_k=3, k=32)], ids=["one sum", "three sums"])
def test_right_sums_stay_inside(at_once: int, pattern: str, how: Summed) -> None:
    plan = Shared(**{**vars(sketch(matmul.graph)), "how": how})
    patterns = [p for p in PATTERNS if p.name == pattern]
    operands = make_operands(plan, plan.graph.sizes, np.random.default_rng(1), patterns)
    x, w = (np.asarray(v, np.float64) for v in operands.values)
    (law,) = analyse(plan, operands.values)
    off = np.abs(summed(x, w, at_once, how) - law.value)
    assert np.isfinite(law.error).all()
    assert (off <= law.error).all(), f"{np.max(off / law.error):.2f} of the bound"


def test_one_product_too_few_shows_where_sums_cancel_or_not() -> None:
    plan = sketch(matmul.at(K=4096).graph)
    operands = make_operands(plan, {**plan.graph.sizes, "M": 8}, np.random.default_rng(2))
    x, w = (np.asarray(v, np.float64) for v in operands.values)
    (law,) = analyse(plan, operands.values)
    wrong = np.abs(summed(x[:, :-1], w[:-1], 16) - law.value) > law.error
    assert wrong.mean() > 0.8, "K * 2^-23 * |A||B| would see one in three"


def test_a_computed_factor_is_rounded_to_its_type() -> None:
    plan = sketch(prologue.graph)
    operands = make_operands(plan, plan.graph.sizes, np.random.default_rng(3))
    x, w = (np.asarray(v, np.float64) for v in operands.values)
    (law,) = analyse(plan, operands.values)
    silu = (x / (1 + np.exp(-x))).astype(np.float16).astype(np.float64)
    assert (np.abs(summed(silu, w, 16) - law.value) <= law.error).all()
    coarse = (x / (1 + np.exp(-x))).astype(np.float32)
    coarse = np.round(coarse * 2.0**6) / 2.0**6  # far coarser than an f16
    assert (np.abs(coarse.astype(np.float64) @ w - law.value) > law.error).mean() > 0.5


def cut(x: np.ndarray) -> np.ndarray:
    """The lower 13 bits of each f32 left out, as a tensor core does."""
    return np.asarray((x.view(np.uint32) & 0xFFFFE000).view(np.float32))


def rounded_away(x: np.ndarray) -> np.ndarray:
    """To the nearest tf32, as cvt.rna.tf32 does."""
    return cut((x.view(np.uint32) + 0x1000).view(np.float32))


def rounded_to_even(x: np.ndarray) -> np.ndarray:
    """To the nearest tf32, as cvt.rn.tf32 does."""
    bits = x.view(np.uint32)
    return cut((bits + 0xFFF + (bits >> 13 & 1)).view(np.float32))


@pytest.mark.parametrize("nearest", [rounded_away, rounded_to_even])
def test_f32_factors_become_the_nearest_tf32(nearest: Callable[[np.ndarray], np.ndarray]) -> None:
    plan = sketch(with_tf32.at(M=64, N=16, K=64).graph)
    operands = make_operands(plan, plan.graph.sizes, np.random.default_rng(4), patterns_for(plan.graph))
    values = [np.where(np.isfinite(v) & (np.abs(v) < 1e30), v, np.float32(1.0 + 2.0**-11)) for v in operands.values]
    assert any((v.view(np.uint32) & 0x1FFF == 0x1000).any() for v in values), "ties are among them"
    (law,) = analyse(plan, values)
    x, w = (nearest(v).astype(np.float64) for v in values)
    assert (np.abs(x @ w - law.value) <= law.error).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("depth", [1, 8, 64, 4096])
def test_a_factor_that_is_cut_off_shows(depth: int, side: str) -> None:
    plan = sketch(with_tf32.at(M=64, N=16, K=depth).graph)
    operands = make_operands(plan, plan.graph.sizes, np.random.default_rng(4), patterns_for(plan.graph))
    (law,) = analyse(plan, operands.values)
    x, w = operands.values
    factors = (cut(x), rounded_away(w)) if side == "left" else (rounded_away(x), cut(w))
    with np.errstate(all="ignore"):
        product = factors[0].astype(np.float64) @ factors[1].astype(np.float64)
        assert (np.abs(product - law.value) > law.error).any()


def test_the_nearest_tf32_of_what_is_large_or_not_a_number() -> None:
    x = np.array([3.4028235e38, -3.4028235e38, 3.401e38, np.inf, np.nan, 2.0**-149, 0.0, 1.0, 1 + 2.0**-11])
    found = distance_to_tf32(x)
    assert np.isinf(found[:2]).all(), "beyond the largest tf32, as when a half is beyond the largest f16"
    assert found[2] < 3.5e38 * 2.0**-11
    assert list(found[3:]) == [0, 0, 2.0**-149, 0, 0, 2.0**-11]


def test_infinities_and_nans_are_certain_and_overflow_is_not() -> None:
    plan = sketch(matmul.at(M=4, N=3, K=8).graph)
    x, w = np.ones((4, 8)), np.ones((8, 3))
    x[0, 3], x[1, 2], x[2] = np.inf, np.nan, 3e38
    (law,) = analyse(plan, [v.astype(bf16.numpy) for v in (x, w)])
    error = np.broadcast_to(law.error, law.value.shape)
    assert np.isinf(law.value[0]).all()
    assert np.isnan(law.value[1]).all()
    assert not error[:2].any(), "certain"
    assert np.isinf(error[2]).all(), "3e38 eight times leaves f32"
    assert np.isfinite(error[3]).all()


def test_an_infinity_times_what_may_be_zero_is_not_certain() -> None:
    plan = sketch(with_tf32.at(M=2, N=3, K=4).graph)
    x, w = np.ones((2, 4), np.float32), np.ones((4, 3), np.float32)
    x[1, 2] = np.inf
    w[2] = 2.0**-149, -(2.0**-126), 0.0
    (law,) = analyse(plan, [x, w])
    assert list(law.value[1, :2]) == [np.inf, -np.inf]
    assert np.isnan(law.value[1, 2])
    assert [np.isinf(e) for e in law.error[1]] == [True, False, False], "the least f32 is 0 as tf32"
    assert np.isfinite(law.error[0]).all()


def test_an_infinity_times_a_zero_that_was_rounded_is_not_certain() -> None:
    """What is 0 in float64 may be the least subnormal number in a kernel, or the other way round."""
    error = product_error(
        np.zeros((2, 1)), np.array([[2.0**-126], [0.0]]), np.array([[np.inf]]), np.zeros((1, 1)),
        np.full((2, 1), np.nan), ONE,
    )  # fmt: skip
    assert error[:, 0].tolist() == [np.inf, 0.0]


def test_nothing_but_zeros_is_exactly_zero() -> None:
    plan = sketch(matmul.at(M=4, N=3, K=8).graph)
    (law,) = analyse(plan, [np.zeros((4, 8), bf16.numpy), np.ones((8, 3), bf16.numpy)])
    assert not law.error.any()


def test_a_matrix_unit_that_flushes_may_lose_subnormal_factors() -> None:
    x = np.full((2, 8), 2.0**-20, np.float16)
    for gpu, kept in ((TARGETS["hip:mi250x"], False), (MI300X, True)):
        plan = sketch(prologue.at(M=2, N=2, K=8).graph)
        plain_graph = sketch(turned.at(M=2, N=2, K=2).graph)
        assert plain_graph.graph.products
        plan = replace(plan, target=gpu)
        (law,) = analyse(plan, [x, np.ones((8, 2), np.float16)])
        assert (np.abs(law.value) > law.error).all() == kept


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_every_chain_is_bounded_on_normal_rows(spec: Chain) -> None:
    plan = sketch(spec.graph)
    for setting in (SETTINGS[0], UNIT_SETTING):
        operands = make_operands(plan, sizes_for(plan, 9), np.random.default_rng(5), setting=setting)
        for law in analyse(plan, operands.values):
            assert np.isfinite(law.error).all()
            value = np.broadcast_to(law.value, np.broadcast_shapes(law.value.shape, law.error.shape))
            assert np.median(law.error) < 0.05 * np.sqrt(np.square(value).mean())


def test_rows_of_patterns_are_rows_of_left_factors() -> None:
    assert [t.name for t in main_tensors(bias_gelu.graph)] == ["x"]
    assert [t.name for t in main_tensors(norm_swiglu.graph)] == ["x"]
    assert [t.name for t in main_tensors(turned.graph)] == ["x", "residual"]
    assert [t.name for t in right_factors(qkv.graph)] == ["wq", "wk", "wv"]
    nan = [p for p in PATTERNS if p.name == "nan"]
    plan = sketch(turned.graph)
    operands = make_operands(plan, plan.graph.sizes, np.random.default_rng(6), [PATTERNS[0], *nan])
    x, _, residual = operands.values
    rows = np.isnan(np.asarray(x, np.float64)).any(0) | np.isnan(np.asarray(residual, np.float64)).any(1)
    assert [label == "nan" for label in operands.labels] == rows.tolist(), "x is declared [K, M]"
    few = take(plan.graph, operands, {"M": [4, 1]})
    assert np.array_equal(few.values[0], x[:, [4, 1]], equal_nan=True)


def test_right_factors_have_columns_that_cancel_and_columns_that_sum() -> None:
    plan = sketch(matmul.graph)
    _, w = make_operands(plan, plan.graph.sizes, np.random.default_rng(7)).values
    w = np.asarray(w, np.float64)
    assert (w[0::2, 1::4] == w[1::2, 1::4]).all()
    assert (w[:, 3::4] == 1).all()
    assert len(np.unique(w[:, 0])) > 50


def test_plans_of_tests_are_plans() -> None:
    plan = sketch(norm_swiglu.graph)
    assert isinstance(plan, Plan)
    assert [plain(a) for n in plan.lowered.products for a in n.inputs] == [False, True, False, True]


def test_no_promise_is_made_of_what_steps() -> None:
    @chain(M=8, N=8, K=8)
    def stepped(x: bf16[M, K], w: bf16[K, N]) -> bf16[M, N]:
        y = F.relu(x) @ w
        return F.where(y > 0.5, F.cast(F.cast(y, i32), f32), y)

    @chain(M=8, N=8, K=8)
    def masked(x: bf16[M, K], w: bf16[K, N], mask: b8[M, N]) -> bf16[M, N]:
        return F.where(mask, F.relu(x) @ w, 0.0)

    @chain(M=8, N=8)
    def rounded(x: f32[M, N]) -> f32[M, N]:
        return F.softmax(F.cast(x * 0.3, f16))

    @chain(M=8, N=8)
    def softened(x: f32[M, N], mask: b8[M, N]) -> f32[M, N]:
        return F.softmax(F.where(mask & (x > 0.0), x * 0.3, -float("inf")))

    assert steps(stepped.graph)
    assert not steps(masked.graph)
    assert steps(rounded.graph)
    assert not steps(softened.graph)
