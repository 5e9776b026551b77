"""The error analysis: slopes against numeric differentiation, bounds against f32 arithmetic, edge values by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusegen import bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.language.graph import Kind, Op
from fusegen.language.ops import PRIMITIVES
from fusegen.language.spec import Chain
from fusegen.language.trace import OPS
from fusegen.language.types import DType
from fusegen.planner import plan
from fusegen.planner.model import Plan
from fusegen.targets import H200
from fusegen.validation.bounded import Bounded, bounded, gap
from fusegen.validation.bounds import RULES, analyse, settle, steepest, stepped
from fusegen.validation.compare import compare, figures, stored
from fusegen.validation.formulas import apply, formula

M, N = dims("M N")
SMOOTH = [op for op in PRIMITIVES if op.kind is Kind.MAP and op.name not in RULES and op.takes != "int"]
POSITIVE = dict.fromkeys(("log", "log_of_normal", "sqrt", "rsqrt"), (1e-6, 1e6))
DOMAIN = {**POSITIVE, **dict.fromkeys(("pow", "small_pow"), (1e-3, 50.0)), "exp": (-80.0, 80.0)}


def points(op: Op, seed: int, count: int = 64) -> list[np.ndarray]:
    """Arguments that the op is defined on, of all sizes."""
    rng = np.random.default_rng(seed)
    low, high = DOMAIN.get(op.name, (-30.0, 30.0))
    if low > 0:
        first = np.exp(rng.uniform(np.log(low), np.log(high), count))
    else:
        first = rng.uniform(low, high, count) * rng.choice([1e-3, 0.1, 1.0], count)
    second = rng.uniform(0.5, 4.0, count) * rng.choice([-1.0, 1.0], count)
    return [first, second][: op.arity]


def plan_of(spec: Chain, **sizes: int) -> Plan:
    return plan(spec.at(**sizes).graph, H200)


@pytest.mark.parametrize("op", SMOOTH, ids=str)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_slopes_bound_the_numeric_derivative(op: Op, seed: int) -> None:
    """And are no more than a bit above its largest value nearby, save those that are constants over all x."""
    assert len(op.slopes) == op.arity, f"{op} has {len(op.slopes)} slopes for {op.arity} arguments"
    arguments = points(op, seed)
    with np.errstate(all="ignore"):
        out = apply(op, arguments)
        for index, text in enumerate(op.slopes):
            step = 1e-6 * np.maximum(np.abs(arguments[index]), 1e-3)
            moved = [a + step if i == index else a for i, a in enumerate(arguments)]
            back = [a - step if i == index else a for i, a in enumerate(arguments)]
            numeric = np.abs(apply(op, moved) - apply(op, back)) / (2 * step)
            slope = np.abs(formula(text, op.arity)(*arguments, out=out))
            noise = 1e-9 * (np.abs(out) + 1) / step * 1e-6 + 1e-12
            known = np.isfinite(numeric)
            assert (numeric <= slope * (1 + 1e-4) + noise)[known].all(), f"{op}: slope {index} is too small"
            if "{" in text:
                assert (slope <= numeric * (1 + 1e-4) + noise)[known].all(), f"{op}: slope {index} is too large"


@pytest.mark.parametrize("op", SMOOTH, ids=str)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1e-7, 1e-3, 0.3, 3.0]))
def test_steepest_slope_bounds_every_change(op: Op, seed: int, size: float) -> None:
    """Wherever the arguments lie within their errors, second order and singular points included."""
    rng = np.random.default_rng(seed)
    arguments = points(op, seed)
    args = [Bounded(a, size * np.abs(a)) for a in arguments]
    with np.errstate(all="ignore"):
        allowed = sum(steepest(op, i, args) * a.error for i, a in enumerate(args))
        allowed = np.where(np.isnan(allowed), np.inf, allowed)
        value = apply(op, arguments)
        for _ in range(16):
            inside = [a.value + rng.uniform(-1, 1, a.value.shape) * a.error for a in args]
            change = np.abs(apply(op, inside) - value)
            assert not (change > allowed * (1 + 1e-9) + 1e-9 * np.abs(value)).any()


@chain(M=8, N=64)
def mixture(x: f32[M, N], y: f32[M, N], g: f32[N]) -> f32[M, N]:
    """A bit of everything."""
    h = F.silu(x * 0.3 + g) - F.tanh(y) / (abs(y) + 0.7)
    return F.softmax(h * 1.7) + F.layernorm(F.gelu(h) * F.sigmoid(x), g)


@chain(M=1, N=64)
def centred(x: f32[M, N]) -> f32[M, N]:
    return x - F.mean(x)


@pytest.mark.parametrize("seed", range(4))
def test_f32_arithmetic_stays_within_the_bounds_and_uses_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y, g = (rng.standard_normal(s).astype(np.float32) for s in ((8, 64), (8, 64), (64,)))
    law = analyse(plan_of(mixture), [x, y, g])[0]
    one = np.float32(1)
    with np.errstate(all="ignore"):
        t = x * np.float32(0.3) + g
        h = t / (one + np.exp(-t)) - np.tanh(y) / (np.abs(y) + np.float32(0.7))
        z = h * np.float32(1.7)
        e = np.exp(z - z.max(-1, keepdims=True))
        soft = e * (one / e.sum(-1, keepdims=True))
        u = np.float32(0.7978845608028654) * (h + np.float32(0.044715) * h * h * h)
        w = np.float32(0.5) * h * (one + np.tanh(u)) * (one / (one + np.exp(-x)))
        c = w - w.sum(-1, keepdims=True) / np.float32(64)
        var = np.square(c).sum(-1, keepdims=True) / np.float32(64)
        got = soft + c * (one / np.sqrt(var + np.float32(1e-5))) * g
    share = np.abs(got - law.value) / law.error
    assert share.max() <= 1
    assert share.max() >= 0.02, "the bound is so loose that it proves little"


# ---------------------------------------------------------------- values that are decided by hand


@chain(M=1, N=4)
def ratio(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
    """(x + y) / (x - y), scaled where it should not matter."""
    return (x + y) / (x * 0.1 - y * 0.1)


def test_what_may_be_zero_in_a_denominator_has_no_bound() -> None:
    x = np.array([[1.0, 0.0, 3.0, np.inf]], np.float32)
    y = np.array([[1.0, 0.0, 1.0, 1.0]], np.float32)
    law = analyse(plan_of(ratio), [x, y])[0]
    assert law.value[0, 0] == math.inf
    assert law.error[0, 0] == math.inf  # 0.1 - 0.1 of rounded products need not be 0
    assert np.isnan(law.value[0, 1])
    assert law.error[0, 1] == 0  # 0 / 0 for everyone
    assert np.isfinite(law.error[0, 2])
    assert np.isnan(law.value[0, 3])
    assert law.error[0, 3] == 0  # inf / inf is NaN for everyone


@chain(M=1, N=4)
def choice(x: f32[M, N]) -> f32[M, N]:
    """1 above a third, else -1."""
    return F.where(x * 3.0 > 1.0, 1.0, -1.0)


def test_a_comparison_of_inexact_values_allows_either_branch() -> None:
    x = np.array([[np.float32(1 / 3), 0.34, 0.33, np.nan]], np.float32)
    law = analyse(plan_of(choice), [x])[0]
    assert law.error[0, 0] == 2
    assert (law.error[0, 1:] == 0).all()
    assert law.value[0, 3] == -1  # NaN is not above


def test_a_comparison_of_a_value_with_itself_is_certain() -> None:
    """However inexact it is: only a NaN differs from itself, and what may be one or not is open."""

    @chain(M=1, N=4)
    def spec(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N], f32[M, N]]:
        h = F.silu(x)
        root = F.sqrt(x * 3.0 - 1.0)  # of a third: NaN, or not
        return F.where(h >= h, 1.0, -1.0), F.where(h != h, 1.0, -1.0), F.where(root < root, 1.0, root * 0.0)

    x = np.array([[0.3, -2.0, np.nan, np.float32(1 / 3)]], np.float32)
    same, other, never = analyse(plan_of(spec), [x])
    assert same.value.tolist() == [[1, 1, -1, 1]]
    assert other.value.tolist() == [[-1, -1, 1, -1]]
    assert not same.error.any()
    assert not other.error.any()
    assert np.isinf(never.error[0, 3])
    with np.errstate(invalid="ignore"):
        close = [Bounded(np.array([1.0, np.nan]), np.array([np.inf, np.inf]))] * 2
        ordered, equal = (RULES[name](OPS[name], close)[1] for name in ("lt", "ge"))
    assert ordered.tolist() == [0, 0]
    assert equal.tolist() == [1, 1]


def test_a_result_beyond_f32_is_an_infinity_for_what_stores_it_and_unknown_for_what_computes_with_it() -> None:
    @chain(M=1, N=4)
    def spec(x: f32[M, N]) -> tuple[f32[M, N], f16[M, N], f32[M, N]]:
        h = x * 3e30
        return F.maximum(h, 0.0), h, h * 1e-20

    x = np.array([[1e10, -1e10, 1.0, 1e8]], np.float32)
    larger, half, scaled = analyse(plan_of(spec), [x])
    assert np.isfinite(larger.error).all()
    assert np.isfinite(half.error).all()
    assert np.isinf(scaled.error).tolist() == [[True, True, False, False]]


def test_an_infinity_of_which_nothing_is_known_stays_so_behind_an_even_function() -> None:
    """Both ends of anything have infinite squares; a NaN, and what lies between them, have not."""
    unknown = Bounded(np.array([-np.inf, np.inf, -np.inf]), np.array([np.inf, np.inf, 0.0]))
    with np.errstate(invalid="ignore"):
        error = settle(OPS["square"], [unknown], np.full(3, np.inf), np.zeros(3))
    assert error.tolist() == [np.inf, np.inf, 0.0]


@pytest.mark.parametrize("name", ["sign", "floor", "to_i32"])
def test_nothing_is_known_of_a_step_where_anything_may_stand(name: str) -> None:
    """The sign of a softmax of what overflows was held to lie between -1 and 1, and is NaN."""
    arg = Bounded(np.array([0.5, 0.5, 0.5]), np.array([np.inf, 0.25, 0.0]))
    with np.errstate(invalid="ignore"):  # of ends, as analyse() has it
        _, error = stepped(OPS[name], [arg])
    assert np.isinf(error[0])
    assert np.isfinite(error[1:]).all()


@chain(M=1, N=4)
def rounded(x: f32[M, N]) -> f32[M, N]:
    """To f16 and on."""
    return F.cast(x, f16) * 1.0


def test_rounding_of_exact_values_is_exact() -> None:
    x = np.array([[1.0002, 65519.0, 65520.0, 1e-8]], np.float32)
    law = analyse(plan_of(rounded), [x])[0]
    assert law.value[0].tolist() == [float(np.float16(v)) for v in (1.0002, 65519.0)] + [math.inf, 0.0]
    assert (law.error[0] <= 2.0**-126).all()


@chain(M=1, N=4)
def whole(x: f32[M, N], k: i32[M, N]) -> i32[M, N]:
    """Truncated, plus k."""
    return F.cast(x * 3.0, i32) + k


def test_integers_have_no_bound_where_an_error_may_wrap_them() -> None:
    x = np.array([[1.0, 1e10, np.nan, 1 / 3]], np.float32)
    k = np.array([[2**31 - 1, 0, 0, 5]], np.int32)
    law = analyse(plan_of(whole), [x, k])[0]
    assert np.isinf(law.error[0, 0])
    assert law.value[0, 1:3].tolist() == [2**31 - 1, 0]  # a cast saturates, and NaN is 0
    assert not law.error[0, 1:3].any()
    assert law.error[0, 3] in (0, 1)  # 3 * f32(1/3) rounds to 1 or stays just above


def test_infinities_and_nan_of_a_row_sum_are_certain_unless_it_may_overflow() -> None:
    @chain(M=4, N=4)
    def total(x: f32[M, N]) -> f32[M, 1]:
        """The row sum."""
        return F.sum(x)

    x = np.ones((4, 4), np.float32)
    x[0, 1], x[1, 2], x[2, :] = np.inf, np.nan, 3e38
    law = analyse(plan_of(total), [x])[0]
    assert law.value[0, 0] == math.inf
    assert np.isnan(law.value[1, 0])
    assert law.error[:2].max() == 0
    assert law.error[2, 0] == math.inf
    assert law.error[3, 0] < 1e-5


def test_an_empty_softmax_row_is_exactly_zero() -> None:
    @chain(M=2, N=4)
    def soft(x: bf16[M, N]) -> bf16[M, N]:
        """softmax."""
        return F.softmax(x)

    x = np.full((2, 4), -np.inf)
    x[1] = 1.0
    law = analyse(plan_of(soft), [x.astype(bf16.numpy)])[0]
    assert law.value[0].tolist() == [0, 0, 0, 0]
    assert law.error[0].max() == 0
    assert 0 < law.error[1].max() < 1e-5


# ---------------------------------------------------------------- storage


@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
def test_storage_allows_what_rounding_may_give_and_nothing_else(dtype: DType) -> None:
    tensor = replace(mixture.graph.outputs[0], type=dtype[M, N])
    values = np.array([[1.0, dtype.largest, dtype.largest * 4, dtype.tiny / 4, -1.0, math.nan, math.inf, 0.0]])
    for expected in (values, values * (1 + 1e-9)):
        with np.errstate(over="ignore"):
            got = expected.astype(dtype.numpy)
        assert not compare(tensor, got, bounded(expected, 0.0), expected).wrong.any()
        for wrong_at, other in ((0, 1 + 2.5 * dtype.epsilon), (1, math.inf), (4, 1.0), (5, 0.0), (6, math.nan)):
            broken = got.copy()
            broken[0, wrong_at] = other
            if wrong_at == 1 and not np.isfinite(stored(expected, dtype)[0, 1]):
                continue
            wrong = compare(tensor, broken, bounded(expected, 0.0), expected).wrong
            assert wrong[0, wrong_at]
            assert wrong.sum() == 1


@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
def test_the_share_of_a_bound_is_what_was_used_beside_the_rounding_to_storage(dtype: DType) -> None:
    """0 for the exact result's rounding; above 1 where the law is broken, and nowhere else."""
    tensor = replace(mixture.graph.outputs[0], type=dtype[M, N])
    rng = np.random.default_rng(0)
    size = np.exp2(rng.uniform(math.log2(dtype.tiny) - 2, math.log2(dtype.largest) + 2, (64, 64)))
    expected = size * rng.choice([-1.0, 1.0], size.shape)
    error = np.maximum(size, dtype.tiny) * dtype.epsilon * np.exp2(rng.uniform(-12, 3, size.shape))
    moved = expected + error * rng.uniform(-1.5, 1.5, size.shape)
    with np.errstate(over="ignore"):
        exact, got = expected.astype(dtype.numpy), moved.astype(dtype.numpy)
    law = bounded(expected, error)
    assert not compare(tensor, exact, law, expected).share.any()
    found = compare(tensor, got, law, expected)
    assert found.wrong.any()
    assert ((found.share > 1) == found.wrong).all()
    same = exact == got
    assert not found.share[same].any()
    assert (found.share <= np.abs(moved - expected) / error * (1 + 1e-9)).all()
    assert figures([found]).share == found.share.max() > 1


def test_an_unbounded_element_is_not_compared() -> None:
    tensor = mixture.graph.outputs[0]
    expected = np.array([[1.0, 1.0]])
    got = np.array([[5.0, 5.0]], np.float32)
    out = compare(tensor, got, bounded(expected, np.array([[0.1, np.inf]])), expected)
    assert out.wrong.tolist() == [[True, False]]


def test_an_unsure_choice_covers_a_small_number_beside_a_huge_one() -> None:
    """Whose distance float64 rounds."""

    @chain(M=1, N=8)
    def spec(x: f32[M, N]) -> f32[M, N]:
        total = F.sum(x)
        return F.where(total < x, 1.0, x)

    huge = np.float32(-1.9e38)
    x = np.array([[huge, -huge] * 4], np.float32)  # a partial sum may overflow, and the sum be NaN
    (out,) = analyse(plan(spec.graph, H200), [x])
    assert (out.low <= np.where(x < 0, huge, 1.0)).all()
    assert (out.high[0, ::2] >= 1.0).all()
    assert gap(np.float64(3.0), np.float64(1.0)) == 2.0  # an exact one is what it is


def test_certain_overflow_of_the_storage_type_is_bounded() -> None:
    tensor = replace(mixture.graph.outputs[0], type=f16[M, N])
    expected = np.array([[70000.0, -1e6, 65520.0, 1.0]])
    law = bounded(expected, 1e-6 * np.abs(expected))
    with np.errstate(over="ignore"):
        good = compare(tensor, expected.astype(np.float16), law, expected)
    assert not good.wrong.any()
    assert np.isfinite(good.allowed).all()
    assert good.error[0, :2].tolist() == [0, 0]
    clamped = np.array([[65504.0, -65504.0, 65504.0, 1.0]], np.float16)
    assert compare(tensor, clamped, law, expected).wrong.tolist() == [
        [True, True, False, False]
    ]  # 65520 may go either way


def test_relu_of_what_is_surely_negative_is_surely_zero() -> None:
    """Its root is then sure too; an error of a negative argument must not pass."""

    @chain(M=1, N=64)
    def spec(x: f32[M, N]) -> f32[M, N]:
        return F.sqrt(F.relu(F.tanh(x)))

    (out,) = analyse(plan(spec.graph, H200), [np.linspace(-3, 3, 64, dtype=np.float32)[None]])
    assert (np.broadcast_to(out.error, (1, 64))[:, :32] < 1e-10).all()
    assert np.isfinite(out.error).all()


def test_nothing_is_known_of_what_is_made_of_a_nan_that_may_be_none() -> None:
    """The root of a sum that is 0 but for rounding: NaN in float64, a number in a kernel that is right."""

    @chain(M=1, N=64)
    def spec(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N], f32[M, N], f32[M, 1]]:
        root = F.rsqrt(x - F.mean(x))
        return root + 1.0, F.maximum(root, x), F.cast(root, bf16), F.max(root)

    x = np.full((1, 64), 0.1, np.float32)
    x[0, 0] += np.float32(1e-8)
    for out in analyse(plan(spec.graph, H200), [x]):
        assert np.isinf(np.broadcast_to(out.error, (1, 64))[:, 1:]).all()
    below_zero, certain, *_ = analyse(plan(spec.graph, H200), [np.linspace(-3, 3, 64, dtype=np.float32)[None]])
    assert np.isnan(below_zero.value[0, :30]).all()
    assert not np.broadcast_to(below_zero.error, (1, 64))[0, :30].any()
    assert not np.broadcast_to(certain.error, (1, 64))[0, :30].any()


def test_the_root_of_a_magnitude_is_bounded_down_to_zero() -> None:
    """There its slope is infinite, and the sum below it may be any number within its error."""

    @chain(M=1, N=64)
    def spec(x: f32[M, N]) -> f32[M, N]:
        return F.sqrt(abs(x - F.mean(x)))

    x = np.linspace(-3, 3, 64, dtype=np.float32)[None]
    x[0, [20, 43]] = 0.0  # and so is the mean
    (out,) = analyse(plan(spec.graph, H200), [x])
    (mean,) = analyse(plan(centred.graph, H200), [x])
    assert np.isfinite(out.error).all()
    assert np.sqrt(mean.error[0, 20]) <= out.error[0, 20] <= 2 * np.sqrt(mean.error[0, 20])
    assert out.error[0, 0] < 1e-6


def test_a_product_with_a_power_of_two_is_exact_but_where_it_may_be_flushed() -> None:
    """So equal keys of scaled logits are known to be equal."""

    @chain(M=1, N=4)
    def spec(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N]]:
        return x * 0.125, x * 0.3

    exact, rounded = analyse(plan_of(spec), [np.array([[1.5, -np.inf, 0.0, 2.0**-124]], np.float32)])
    assert exact.error.tolist() == [[0, 0, 0, 2.0**-126]]
    assert (rounded.error > 0).tolist() == [[True, False, False, True]]
