"""Kernels that reduce columns, in the checking emulator, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from fusegen import b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import compiler
from fusegen.errors import FusegenError, MissingError
from fusegen.language.graph import Graph
from fusegen.language.spec import Chain, load_chains
from fusegen.pipeline import compile as compile_chain
from fusegen.planner import CONTIGUOUS, alike, candidates
from fusegen.planner.columns.plan import ColumnsPlan
from fusegen.planner.model import Layout, Source
from fusegen.runtime import Kernel, finding
from fusegen.runtime.cache import compiled
from fusegen.targets import target
from fusegen.validation import Report, validate

Array = np.ndarray[Any, np.dtype[Any]]
B, S, M, N = dims("B S M N")
TARGETS = ("cuda:h200", "cuda:a100", "hip:mi300x")
SPECS = {c.name: c for name in ("column_sum", "layernorm_param_grads") for c in load_chains(f"specs/{name}.py")}


@chain(M=64, N=64)
def sums(x: f32[M, N]) -> f32[1, N]:
    return F.sum(x, over=M)


@chain(M=64, N=64)
def extremes(x: f16[M, N]) -> tuple[f32[1, N], f32[1, N], f32[1, N]]:
    return F.max(x, over=M), F.min(x, axis=0), F.amax(x, over=M)


@chain(M=64, N=64)
def integers(x: i32[M, N]) -> tuple[i32[1, N], i32[1, N], i32[1, N]]:
    return F.sum(x, over=M), F.max(x, over=M), F.min(x, over=M)


@chain(M=64, N=64)
def masks(keep: b8[M, N]) -> tuple[b8[1, N], b8[1, N]]:
    return F.any(keep, over=M), F.all(keep, over=M)


@chain(M=64, N=64)
def gradients(
    dy: bf16[M, N], x: bf16[M, N], mean: f32[M, 1], rstd: f32[M, 1], gain: f32[N]
) -> tuple[f32[1, N], bf16[1, N], bf16[M, N]]:
    """With one value a row, one a column, and a result of the whole shape beside."""
    normed = (x - mean) * rstd
    return F.sum(dy * normed, over=M) * gain, F.mean(dy, over=M), dy * gain


@chain(M=64, N=64)
def batchnorm(x: f32[M, N], gain: f32[N]) -> tuple[f32[M, N], f32[1, N]]:
    """Three passes over the rows."""
    mean, var = F.mean(x, over=M), F.var(x, over=M)
    return (x - mean) * F.rsqrt(var + 1e-3) * gain, var


@chain(M=64, N=64)
def widened(x: f16[M, N]) -> tuple[f32[M, N], f32[1, N]]:
    """Eight f32 a thread are stored together."""
    return x * 2, F.sum(x, over=M)


@chain(M=64, N=64)
def logs(x: f32[M, N]) -> tuple[f32[1, N], f32[1, N], f32[1, N]]:
    return F.logsumexp(x, over=M), F.norm(x, over=M), F.std(x, over=M)


@chain(B=3, S=20, N=64)
def middle(x: f32[B, S, N], mask: b8[S, 1]) -> f32[B, 1, N]:
    return F.sum(F.where(mask, x, 0.0), over=S)


@chain(B=3, S=20, N=64)
def outer(x: f32[B, S, N]) -> f32[1, S, N]:
    return F.mean(x, over=B)


@chain(B=3, S=20, N=64)
def both(x: f32[B, S, N], scale: f32[B, 1, 1]) -> f32[1, 1, N]:
    return F.mean(x * scale, over=(B, S))


@chain(M=64, N=64)
def numbered(x: f32[M, N]) -> f32[1, N]:
    """A causal mask before the sum."""
    return F.sum(F.where(F.row_index(x) >= F.col_index(x), x, 0.0), over=M)


def mean_of(x: Array) -> Array:
    return np.asarray(x.sum(0, keepdims=True) / len(x))


def expected(name: str, *given: Array) -> list[Array]:
    """By numpy alone, in float64 (int64 modulo 2^32 of i32)."""
    x = given[0].astype(np.int64 if given[0].dtype == np.int32 else np.float64)
    rows = range(len(x))
    if name == "sums":
        return [x.sum(0)[None]]
    if name == "extremes":
        return [x.max(0)[None], x.min(0)[None], np.abs(x).max(0)[None]]
    if name == "integers":
        return [x.sum(0).astype(np.int32)[None], x.max(0)[None], x.min(0)[None]]
    if name == "masks":
        return [np.asarray(given[0].any(0))[None], np.asarray(given[0].all(0))[None]]
    if name == "gradients":
        dy, data, mean, rstd, gain = (a.astype(np.float64) for a in given)
        return [sum(dy[i] * (data[i] - mean[i]) * rstd[i] for i in rows)[None] * gain, mean_of(dy), dy * gain]
    if name == "batchnorm":
        centered = x - mean_of(x)
        var = mean_of(centered**2)
        return [centered / np.sqrt(var + 1e-3) * given[1], var]
    if name == "widened":
        return [x * 2, x.sum(0)[None]]
    if name == "logs":
        centered = x - mean_of(x)
        return [np.log(np.exp(x).sum(0))[None], np.sqrt((x**2).sum(0))[None], np.sqrt(mean_of(centered**2))]
    if name == "middle":
        return [np.stack([sum(x[b, s] * given[1][s] for s in range(x.shape[1])) for b in rows])[:, None]]
    if name == "outer":
        return [mean_of(x)]
    if name == "both":
        return [(x * given[1]).reshape(-1, x.shape[-1]).mean(0)[None, None]]
    assert name == "numbered"
    return [(np.tril(np.ones(x.shape)) * x).sum(0)[None]]


CHAINS = {
    c.name: c
    for c in (sums, extremes, integers, masks, gradients, batchnorm, widened, logs, middle, outer, both, numbered)
}


def skip_without_emulator() -> None:
    try:
        compiler()
    except FusegenError as error:
        pytest.skip(f"the emulator can't run here: {error}")


def kernel_of(plan: ColumnsPlan, edit: Callable[[str], str] = lambda text: text) -> Kernel:
    def variant(layout: Layout) -> tuple[Source, None]:
        source = render(plan if layout == plan.layout else alike(plan, layout).need()[0])
        return replace(source, text=edit(source.text)), None

    return Kernel(*variant(plan.layout), finding.find(plan.target, "emulator"), variant)


def column_plans(graph: Graph, name: str, layout: Layout = CONTIGUOUS) -> list[ColumnsPlan]:
    return [p for p in candidates(graph, target(name), layout).need() if isinstance(p, ColumnsPlan)]


def operands(graph: Graph, rng: np.random.Generator) -> list[Array]:
    made = []
    for tensor in graph.inputs:
        shape = [size if isinstance(size, int) else graph.sizes[str(size)] for size in tensor.shape]
        if tensor.dtype is b8:
            made.append(rng.random(shape) < 0.8)
        elif tensor.dtype is i32:
            made.append(rng.integers(-(2**31), 2**31, shape).astype(np.int32))
        else:
            wide = rng.standard_normal(shape)
            made.append(wide.astype(bfloat16 if tensor.dtype is bf16 else tensor.dtype.numpy))
    return made


def run(kernel: Kernel, given: list[Array]) -> list[Array]:
    found = kernel(*given)
    return list(found) if isinstance(found, tuple) else [found]


def check(name: str, kernel: Kernel, given: list[Array]) -> None:
    rows = len(given[0])
    for tensor, got, want in zip(kernel.plan.graph.outputs, run(kernel, given), expected(name, *given), strict=True):
        assert got.shape == want.shape
        if tensor.dtype in (i32, b8) or name == "extremes":
            np.testing.assert_array_equal(got, want)
        else:
            rounding = 2.0**-8 if tensor.dtype is bf16 else 1e-5
            np.testing.assert_allclose(got.astype(np.float64), want, rtol=rounding, atol=2e-6 * max(8, rows))


def test_columns_beyond_the_last_one_read_nothing() -> None:
    """Of a tile of 4 columns the last one has no gain, and sums of it are made all the same."""
    plan = column_plans(gradients.at(N=3).graph, "cuda:h200")[0]
    assert validate(kernel_of(plan), rows=(3,), cases=("rows",)).ok


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_columns_are_those_of_numpy(data: st.DataObject) -> None:
    skip_without_emulator()
    name = data.draw(st.sampled_from(sorted(CHAINS)))
    of = data.draw(st.sampled_from(TARGETS))
    cols = data.draw(st.sampled_from((1, 3, 8, 17, 32, 50, 64, 100, 136)))
    made = CHAINS[name]
    rows = {"B": data.draw(st.integers(1, 9)), "S": data.draw(st.integers(1, 70)), "M": data.draw(st.integers(1, 700))}
    wanted = {dim: rows.get(dim, cols) for dim in made.graph.sizes}
    # planned for many rows, for which it takes clusters and several rows a turn, and called with these
    planned = {dim: (4096 if dim == "M" else 64) if dim != "N" else cols for dim in wanted}
    plans = column_plans(made.at(**planned).graph, of)
    plan = plans[data.draw(st.integers(0, len(plans) - 1))]
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    check(name, kernel_of(plan), operands(made.at(**wanted).graph, rng))


IN_FULL = ("extremes", "gradients", "masks")  # each type of operand, with and without clusters; with --all, every chain


@pytest.mark.parametrize("name", sorted(CHAINS))
def test_columns_pass_validation(name: str, request: pytest.FixtureRequest) -> None:
    skip_without_emulator()
    in_full = name in IN_FULL or request.config.getoption("--all")
    for of in TARGETS:
        plans = column_plans(CHAINS[name].graph, of)
        ways = list({p.cluster: p for p in reversed(plans)}.values())
        for plan in ways if in_full else {id(way): way for way in (ways[0], ways[-1])}.values():
            report = validate(kernel_of(plan), quick=not (in_full and of == "cuda:h200"))
            assert report.ok, report


@pytest.mark.by_values("name", "of")  # each meets each in test_columns_compile
@pytest.mark.parametrize("name", sorted(SPECS))
@pytest.mark.parametrize("of", TARGETS)
def test_shipped_specs_pass_validation(name: str, of: str) -> None:
    skip_without_emulator()
    plan = column_plans(SPECS[name].graph, of)[0]
    assert validate(kernel_of(plan), quick=True).ok


def test_no_rows_and_one() -> None:
    skip_without_emulator()
    for of in TARGETS:
        kernel = kernel_of(column_plans(sums.graph, of)[0])
        np.testing.assert_array_equal(kernel(np.zeros((0, 64), np.float32)), np.zeros((1, 64)))
        one = np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32)
        np.testing.assert_array_equal(kernel(one), one)
    kernel = kernel_of(column_plans(extremes.graph, "cuda:h200")[0])
    largest, least, magnitude = kernel(np.zeros((0, 64), np.float16))
    assert (largest == -np.inf).all()
    assert (least == np.inf).all()
    assert (magnitude == -np.inf).all()
    some, every = kernel_of(column_plans(masks.graph, "cuda:h200")[0])(np.zeros((0, 64), bool))
    assert not some.any()
    assert every.all()
    averages = kernel_of(column_plans(both.graph, "cuda:h200")[0])
    assert np.isnan(averages(np.zeros((0, 5, 64), np.float32), np.zeros((0, 1, 1), np.float32))).all()


def test_a_column_has_the_same_bits_wherever_it_lies() -> None:
    """Strided rows, and rows that start anywhere, are summed in the same order."""
    skip_without_emulator()
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((300, 80)).astype(np.float32)
    for of in TARGETS:
        kernel = kernel_of(column_plans(sums.at(M=4096).graph, of)[0])
        first = kernel(np.ascontiguousarray(wide[:, 1:65]))
        np.testing.assert_array_equal(kernel(wide[:, 1:65]), first)
        np.testing.assert_array_equal(kernel(np.ascontiguousarray(wide[:, 1:65])), first)


def test_few_columns_of_many_rows_take_clusters_where_there_are_some() -> None:
    hopper, ampere = (column_plans(SPECS["column_sum"].graph, of)[0] for of in TARGETS[:2])
    assert hopper.cluster >= 8
    assert ampere.cluster == 1
    assert ampere.tile.cols < hopper.tile.cols
    assert hopper.cost.time_us < 1.3 * hopper.cost.floor_us
    assert hopper.cost.in_flight_bytes > 40_000


COMPILED = (*SPECS.values(), batchnorm, integers, masks, outer, gradients)


@pytest.mark.parametrize("of", TARGETS)
@pytest.mark.parametrize("made", COMPILED, ids=lambda c: c.name)
def test_columns_compile(made: Chain, of: str) -> None:
    plans = column_plans(made.graph, of)
    for plan in {p.cluster: p for p in reversed(plans)}.values():
        source = render(plan)
        try:
            binary = compiled(source)
        except MissingError as missing:
            pytest.skip(str(missing))
        assert binary.resources.spill_bytes == 0
        assert binary.resources.registers <= 1.3 * plan.cost.registers + 16


# ---------------------------------------------------------------- broken kernels are caught


def swapped(before: str, after: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        assert before in text, f"nothing to break: {before}"
        return text.replace(before, after)

    return edit


MUTATIONS = {
    "a row is counted twice": swapped("inside = turn + u * ", "inside = turn - 1 + u * "),
    "rows begin one too late": swapped("long long turn = rank * ", "long long turn = 1 + rank * "),
    "a turn is left out": swapped("inside = turn + u * ", "inside = u > 0 && turn + u * "),
    "no barrier before parts are read": swapped("__syncthreads();", ""),
    "no wait for the other blocks": swapped("  __cluster_barrier_arrive();  // this block's", "  //"),
    "nobody knows that blocks run": swapped("    __cluster_barrier_wait();  // every block", "    //"),
    "a block's parts go to the wrong place": swapped("sums[0][rank], c /", "sums[0][0], c /"),
    "a block takes its neighbour's columns": swapped("first_col + rank *", "first_col + (rank ^ 1) *"),
    "the last block's part is left out": swapped("for (int b = 1; b < ", "for (int b = 2; b < "),
    "a row of the block is left out": swapped("for (int r = 1; r < ", "for (int r = 2; r < "),
    "the parts of two reductions mix": swapped("sums[1][", "sums[0]["),
    "columns end too late": swapped("if (own_col < 100)", "if (own_col < 104)"),
}


def broken(plan: ColumnsPlan, edit: Callable[[str], str]) -> Report | FusegenError:
    """Of ordinary rows alone where those already show it."""

    def quietly(text: str) -> str:
        if edit is MUTATIONS["no wait for the other blocks"]:
            return edit(text).replace("\n    __cluster_barrier_wait();\n", "\n")
        return edit(text)

    report = validate(kernel_of(plan, quietly), quick=True, cases=("normal",))
    return validate(kernel_of(plan, quietly), quick=True) if report.ok else report


@chain(M=4096, N=100)
def two(x: f32[M, N], y: f32[M, N]) -> tuple[f32[1, N], f32[1, N]]:
    return F.sum(x * y, over=M), F.sum(y, over=M)


def plan_to_break() -> ColumnsPlan:
    plans = column_plans(two.graph, "cuda:h200")
    return next(p for p in plans if p.cluster == 4 and p.tile.turn > 1 and p.tile.cols == 32)


def test_the_unbroken_kernel_passes() -> None:
    skip_without_emulator()
    assert validate(kernel_of(plan_to_break()), quick=True).ok


@pytest.mark.parametrize("name", MUTATIONS)
def test_broken_kernels_are_caught(name: str) -> None:
    skip_without_emulator()
    report = broken(plan_to_break(), MUTATIONS[name])
    assert isinstance(report, Report)
    assert not report.ok


@chain(B=3, S=9, N=24)
def last_token(h: bf16[B, S, N], length: i32[B]) -> tuple[f32[B, N], f32[B, N]]:
    """Where one axis of rows is reduced, and others stay: its index is the row."""
    at = F.row_index(h)
    own = F.where(at == length[:, None, None] - 1, h, 0.0)
    mean = F.sum(F.where(at < length[:, None, None], h, 0.0), axis=1, keepdims=False)
    return F.sum(own, axis=1, keepdims=False), mean / F.maximum(length, 1)[:, None]


@pytest.mark.parametrize("name", ["cuda:h200", "hip:mi300x"])
def test_rows_are_counted_along_the_axis_that_is_reduced(name: str) -> None:
    skip_without_emulator()
    assert validate(compile_chain(last_token, name, on="emulator", validate=False), quick=True).ok
