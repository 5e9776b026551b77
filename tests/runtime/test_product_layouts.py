"""Products in whatever layout their operands and outputs have: each that a call takes has a plan, and is right."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.language.reference import reference
from fusegen.language.types import size_of
from fusegen.planner import candidates
from fusegen.planner.model import Layout
from fusegen.targets import target
from fusegen.validation import validate
from tests import gemms
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

M, N, K = dims("M N K")
GPUS = ("cuda:h200", "cuda:sm_80", "hip:mi300x")
CHAINS = (*gemms.ALL, *gemms.BY_ROWS, gemms.side_by_side)


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("spec", CHAINS, ids=lambda spec: spec.name)
def test_every_layout_that_a_call_may_ask_for_has_a_plan(spec: Chain, name: str) -> None:
    """Any factors turned, with everything unaligned or nothing or one tensor, axes apart or together."""
    gpu = target(name)
    first, *_ = candidates(spec.graph, gpu).need()
    factors = sorted(first.transposable)
    names = sorted({access.tensor for access in first.accesses})
    turned = [set(some) for count in range(len(factors) + 1) for some in itertools.combinations(factors, count)]
    loose = [set(), set(names), {random.Random(0).choice(names)}]
    for some, odd, apart in itertools.product(turned, loose, (False, True)):
        assert candidates(spec.graph, gpu, Layout(apart, frozenset(odd), frozenset(some))).plans, (some, odd, apart)


# ---------------------------------------------------------------- what the kernels compute


Array = np.ndarray[Any, Any]


def padded(array: Array) -> Array:
    """Rows one element further apart."""
    wide = np.full((*array.shape[:-1], array.shape[-1] + 1), 77, array.dtype)
    wide[..., :-1] = array
    return wide[..., :-1]


def misaligned(array: Array) -> Array:
    """One element behind where an allocation begins."""
    flat = np.full(array.size + 1, 77, array.dtype)
    flat[1:] = array.ravel()
    return flat[1:].reshape(array.shape)


def every_other(array: Array) -> Array:
    """Every second row of a taller array."""
    if array.ndim == 1:
        return array
    tall = np.repeat(array, 2, axis=-2)
    tall[..., 1::2, :] = 77
    return tall[..., ::2, :]


def turned(array: Array, how: Callable[[Array], Array] = np.asarray) -> Array:
    """Columns next to each other."""
    return how(np.ascontiguousarray(array.swapaxes(-1, -2))).swapaxes(-1, -2)


ROWS = (np.asarray, padded, misaligned, every_other)
EITHER = (*ROWS, turned, lambda a: turned(a, padded), lambda a: turned(a, misaligned), lambda a: turned(a, every_other))


@needs_compiler
@pytest.mark.by_values("spec", "name")  # every layout has a plan for each, as tested above
@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize(
    "spec",
    [gemms.crossed, gemms.qkv, gemms.residual, gemms.turned],
    ids=lambda spec: spec.name,
)
def test_every_layout_is_right(spec: Chain, name: str) -> None:
    """Each operand and output in a layout of its own."""
    spec = spec.at(
        **{dim: size for dim, size in {"M": 33, "N": 48, "L": 40, "K": 64}.items() if dim in spec.graph.sizes}
    )
    rng, graph = random.Random(f"{spec.name} {name}"), spec.graph
    kernel = fusegen.compile(spec, target=name, on="emulator", validate=False)
    shapes = {t.name: tuple(size_of(s, graph.sizes) for s in t.shape) for t in (*graph.inputs, *graph.outputs)}
    draw = np.random.default_rng(0)
    values = [(draw.standard_normal(shapes[t.name]) / 2).astype(t.dtype.numpy) for t in graph.inputs]
    wanted = reference(graph)(*(v.astype(float) for v in values))
    factors = kernel.plan.transposable
    laid = [rng.choice(EITHER if t.name in factors else ROWS)(v) for t, v in zip(graph.inputs, values, strict=True)]
    outs = tuple(rng.choice(ROWS)(np.zeros(shapes[t.name], t.dtype.numpy)) for t in graph.outputs)
    kernel(*laid, out=outs if len(outs) > 1 else outs[0])
    for got, want in zip(outs, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert np.allclose(got.astype(float), want, rtol=0.05, atol=0.05)


@needs_compiler
def test_a_factor_that_tensor_copies_cannot_move_beside_crossed_ones() -> None:
    """Right factors lie both ways round, as Hopper's instruction takes them, and a row of x is 65 elements long."""
    kernel = fusegen.compile(gemms.crossed.at(L=64, K=64), target="cuda:h200", on="emulator", validate=False)
    assert kernel.plan.rule == "wgmma"
    rng = np.random.default_rng(1)
    x, w, v = (rng.standard_normal(s).astype(bf16.numpy) for s in ((64, 64), (64, 96), (64, 64)))
    for laid in (padded(x), misaligned(x), turned(x, padded)):
        for got, want in zip(kernel(laid, w, v), kernel(x, w, v), strict=True):
            assert np.allclose(got.astype(float), want.astype(float), rtol=0.02, atol=0.02)


@needs_compiler
def test_rows_along_a_last_axis_are_compared_by_the_same_kernel() -> None:
    """66 of 132 rows as a leading dimension would take another kernel, whose sums end in other bits."""

    @chain(M=264, N=64, K=264)
    def spec(x: f32[K, M], w: f32[N, K]) -> f32[M, N]:
        y = F.matmul(x.T, w.T, precision="tf32")
        return F.where(F.col_index(y) <= F.row_index(y), y, 0.0)

    kernel = fusegen.compile(spec, "cuda:h200", on="emulator", validate=False)
    report = validate(kernel, quick=True, cases=["apart"])
    assert report.ok, str(report)
    assert [case.sizes for case in report.cases] == ["132x64", "66x64", "1x64"]
    assert [variant.plan for variant in kernel.variants.values()] == [kernel.plan]
