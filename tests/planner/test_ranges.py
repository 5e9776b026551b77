"""Between which numbers values lie: by the op's own meaning in numpy, at ends and between them, in f32."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.language.graph import Kind
from fusegen.language.trace import OPS
from fusegen.planner.ranges import RANGES, Range, in_f32, in_i32, ranges
from fusegen.planner.rewrites import simplify

M, N = dims("M N")
MAPS = [name for name in RANGES if OPS[name].kind is Kind.MAP and not name.startswith(("bit", "to_unit"))]
ENDS = (-math.inf, -3e38, -80.0, -1.5, -1e-30, 0.0, 1e-30, 0.25, 2.0, 80.0, 3e38, math.inf)


@pytest.mark.parametrize("name", MAPS)
def test_no_value_is_outside(name: str) -> None:
    op, rng = OPS[name], np.random.default_rng(0)
    ref = op.ref.format(*(f"args[{i}]" for i in range(op.arity)))
    for _ in range(400):
        given = [Range(*sorted(rng.choice(ENDS, 2).tolist())) for _ in range(op.arity)]
        args = [np.float64(rng.choice([end for end in ENDS if r.low <= end <= r.high])) for r in given]
        found = in_f32(RANGES[name](*given))
        with np.errstate(all="ignore"):
            value = float(np.float32(eval(ref, {"np": np, "erf": np.vectorize(math.erf), "args": args})))
        slack = 1e-6 * abs(value) if math.isfinite(value) else 0.0
        assert math.isnan(value) or found.low <= value + slack, (given, args)
        assert math.isnan(value) or value - slack <= found.high, (given, args)


INTEGER_ENDS = (-(2**31), -(2**31) + 1, -7, -1, 0, 1, 6, 2**24 + 1, 2**31 - 1)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "neg", "abs", "maximum", "minimum", "relu", "bit_and"])
def test_no_integer_is_outside(name: str) -> None:
    """Sums and products that pass the ends of i32 come back at the other one."""
    op, rng = OPS[name], np.random.default_rng(0)
    text, _ = op.forms.get(i32, (op.ref, op.expr))
    ref = text.format(*(f"args[{i}]" for i in range(op.arity)))
    for _ in range(400):
        given = [Range(*sorted(rng.choice(INTEGER_ENDS, 2).tolist())) for _ in range(op.arity)]
        inside = [[end for end in INTEGER_ENDS if r.low <= end <= r.high] for r in given]
        args = [np.int32(rng.choice(ends)) for ends in inside]
        found = in_i32(RANGES[name](*given))
        with np.errstate(all="ignore"):
            value = int(eval(ref, {"np": np, "args": args}))
        assert found.low <= value <= found.high, (given, args)


@chain(M=4, N=8)
def scales(x: bf16[M, N], s: f32[M, 1]) -> tuple[f32[M, N], f32[M, N], f32[M, N]]:
    """RMSNorm's, a norm's that is never 0, and a number between two."""
    return (
        x * F.rsqrt(F.mean(F.square(x)) + 1e-6),
        x / (F.sqrt(F.sum(x * x)) + 1e-12),
        x * F.clip(s, -2.0, 4.0),
    )


def test_what_scales_rows_is_known_to_be_finite() -> None:
    graph = simplify(scales.graph)
    found = {node.op.name: made for node, made in ranges(graph).items() if node.op.name != "input"}
    assert found["rsqrt"].finite
    assert found["rsqrt"].high == pytest.approx(1000.0)
    assert found["sqrt"] == Range(0.0, math.inf)
    assert any(made.low == pytest.approx(1e-12) for node, made in ranges(graph).items() if node.op.name == "add")
    assert found["minimum"] == Range(-2.0, 4.0)
    assert all(made == Range() for node, made in ranges(graph).items() if node.op.name == "input")


def test_what_f32_has_no_number_for_is_zero_or_infinite() -> None:
    assert in_f32(Range(1e-46, 1e39)) == Range(0.0, math.inf)
    assert in_f32(Range(-1e39, -1e-46)) == Range(-math.inf, 0.0)
