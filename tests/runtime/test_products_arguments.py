"""The operands of a product in one call: any leading dimension, either way round, batches; checked before a launch."""

from __future__ import annotations

import numpy as np
import pytest

from fusegen import Chain, chain, dims, f16, f32
from fusegen import ops as F
from fusegen.emitting.sources import spelled
from fusegen.errors import ArgumentError
from fusegen.language.types import size_of
from fusegen.planner.model import Layout
from fusegen.runtime import arguments
from fusegen.runtime.arrays import ArrayView, view
from fusegen.runtime.kernel import layout_text
from tests import gemms
from tests.language.test_products import bias_gelu, gram, norm_swiglu, qkv, square, turned
from tests.products import Sketch, sketch

M, N, K = dims("M N K")

SIZES = {"M": 24, "N": 40, "K": 16, "B": 3, "L": 8}


def at(spec: Chain) -> Chain:
    return spec.at(**{name: SIZES[name] for name in spec.graph.sizes})


def arrays(plan: Sketch, **others: np.ndarray) -> dict[str, ArrayView]:
    """Contiguous arrays for every operand and output, but for `others`."""
    found = {}
    for t in (*plan.graph.inputs, *plan.graph.outputs):
        shape = [size_of(s, plan.graph.sizes) for s in t.shape]
        found[t.name] = view(others.get(t.name, np.zeros(shape, t.dtype.numpy)), t.name)
    return found


def padded(rows: int, cols: int, pitch: int, dtype: np.dtype) -> np.ndarray:
    return np.zeros((rows, pitch), dtype)[:, :cols]


def number(plan: Sketch, views: dict[str, ArrayView]) -> dict[str, int]:
    sizes = arguments.measure(plan, views)
    bound = arguments.bind(plan, sizes, views)
    names = [p.name for p in plan.params if p.kind in ("extent", "stride")]
    return dict(zip(names, bound.numbers, strict=True))


def settled(spec: Chain, **others: np.ndarray) -> tuple[Sketch, dict[str, ArrayView]]:
    """The plan that the launcher would ask for, as `Kernel.variant_for` does."""
    plan = sketch(at(spec).graph)
    views = arrays(plan, **others)
    arguments.check_strides(plan, views)
    for _ in range(8):
        layout = arguments.layout_needed(plan, views)
        if layout == plan.layout:
            return plan, views
        plan = sketch(plan.graph, layout)
    raise AssertionError("asking for layouts does not end")


BF16 = bias_gelu.graph.inputs[0].dtype.numpy
F16 = turned.graph.inputs[0].dtype.numpy


def test_contiguous_operands_are_what_is_planned_for() -> None:
    plan, views = settled(bias_gelu)
    assert plan.layout == Layout()
    assert number(plan, views) == {"rows": 24, "x_stride": 16, "w_right_ld": 16, "out_stride": 40}


def test_leading_dimensions_are_run_time_numbers() -> None:
    plan, views = settled(bias_gelu, x=padded(24, 16, 48, BF16), w=padded(40, 16, 24, BF16))
    assert plan.layout == Layout()
    assert number(plan, views)["x_stride"] == 48
    assert number(plan, views)["w_right_ld"] == 24


def test_odd_leading_dimensions_ask_for_a_slower_path() -> None:
    plan, views = settled(bias_gelu, x=padded(24, 16, 17, BF16), w=padded(40, 16, 17, BF16))
    assert plan.layout == Layout(unaligned=frozenset({"x", "w"}))
    assert (number(plan, views)["x_stride"], number(plan, views)["w_right_ld"]) == (17, 17)


@pytest.mark.parametrize("name", ["x", "w"])
def test_a_transposed_array_is_turned_and_not_copied(name: str) -> None:
    shape = {"x": (24, 16), "w": (40, 16)}[name]
    plan, views = settled(bias_gelu, **{name: np.zeros(shape[::-1], BF16).T})
    assert plan.layout == Layout(transposed=frozenset({name}))
    assert layout_text(plan.layout) == f"{name} transposed"
    numbers = number(plan, views)
    assert numbers["x_ld" if name == "x" else "w_right_ld"] == shape[0]


def test_an_operand_that_is_declared_transposed_may_be_turned_back() -> None:
    plan, _ = settled(turned)
    assert plan.layout == Layout()
    assert next(a for a in plan.accesses if a.tensor == "x").ld_axis == -2, "rows of K, M of them next to each other"
    plan, views = settled(turned, x=np.zeros((24, 16), F16).T)
    assert plan.layout == Layout(transposed=frozenset({"x"}))
    assert number(plan, views)["x_stride"] == 16


def test_batches_are_one_stride_where_they_can_be() -> None:
    plan, views = settled(qkv)
    assert [d.axes for d in plan.row_dims] == [(0, 1)]
    assert number(plan, views)["x_stride"] == 16
    assert number(plan, views)["rows"] == 72
    plan, views = settled(qkv, x=np.zeros((3, 30, 16), F16)[:, :24])
    assert plan.layout == Layout(split=True)
    assert (number(plan, views)["x_stride_B"], number(plan, views)["x_stride_M"]) == (480, 16)
    plan, views = settled(qkv, x=np.zeros((3, 16, 24), F16).transpose(0, 2, 1))
    assert plan.layout == Layout(transposed=frozenset({"x"}))
    assert [d.axes for d in plan.row_dims] == [(0,), (1,)], "rows that are lines stay alone"
    assert (number(plan, views)["x_stride_B"], number(plan, views)["x_ld"]) == (384, 24)


def test_both_sides_of_a_gram_matrix_are_the_same_memory() -> None:
    plan, views = settled(gram, x=padded(24, 16, 20, F16))
    assert {n: v for n, v in number(plan, views).items() if n.startswith("x")} == {"x_stride": 20, "x_right_ld": 20}


def test_no_line_at_all_is_a_sentence() -> None:
    with pytest.raises(ArgumentError, match=r"x has strides of 64 and 2 elements along its last two axes.*\n  pass "):
        settled(bias_gelu, x=np.zeros((24, 64), BF16)[:, ::2][:, :16])


@pytest.mark.parametrize("spec", [square, norm_swiglu], ids=lambda spec: spec.name)
def test_what_is_also_read_by_rows_lies_by_rows(spec: Chain) -> None:
    rows = 24
    with pytest.raises(ArgumentError, match="x has a stride of 24 elements along its last axis"):
        settled(spec, x=np.zeros((16, rows), BF16).T)


@pytest.mark.parametrize("name", ["cuda:h200", "cuda:a100", "hip:mi300x"])
def test_rows_that_are_reduced_as_they_pass_lie_by_rows(name: str) -> None:
    """A plan that reads the left factor once, for the products and for its rows' statistics."""
    for made in gemms.gemm_plans(gemms.norm.graph, name)[:3]:
        assert [access.tensor for access in made.accesses].count("x") == 1
        assert made.transposable == {"w"}


@chain(M=100, N=40, K=64)
def offset_by_rows(x: f16[M, K], w: f16[K, N], y: f32[M, K]) -> f16[M, N]:
    return x @ w - F.sum(y)


@pytest.mark.parametrize("name", ["cuda:h200", "cuda:a100", "hip:mi300x"])
def test_the_left_factor_lies_by_rows_where_others_are_reduced_beside_it(name: str) -> None:
    made, *_ = gemms.gemm_plans(offset_by_rows.graph, name)
    assert made.transposable == {"w"}


def test_sizes_that_are_constants_of_the_text_are_checked() -> None:
    plan = sketch(at(bias_gelu).graph)
    assert arguments.compiled_sizes(plan) == {"N": 40, "K": 16}
    with pytest.raises(ArgumentError, match="compiled for K=16, and x on axis 1 has 12"):
        arguments.measure(plan, arrays(sketch(at(bias_gelu).at(K=12).graph)))
    with pytest.raises(ArgumentError, match="w on axis 1 has 12, and K is 16 already, from x on axis 1"):
        arguments.measure(plan, arrays(plan, w=np.zeros((40, 12), BF16)))


def test_any_number_of_rows() -> None:
    plan = sketch(at(bias_gelu).graph)
    for rows in (0, 1, 33):
        views = arrays(plan, x=np.zeros((rows, 16), BF16), out=np.zeros((rows, 40), BF16))
        assert arguments.layout_needed(plan, views) == Layout()
        assert number(plan, views)["rows"] == rows


def test_a_plan_of_hoisted_products_has_a_spelling() -> None:
    """Sources are kept by the plan's text, of which the lowered graph is a part."""
    assert spelled(sketch(norm_swiglu.graph)) != spelled(sketch(norm_swiglu.graph.at(K=8)))
