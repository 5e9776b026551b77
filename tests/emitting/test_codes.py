"""Products whose right factors are codes, widened on their way: every code, ragged sizes, broken kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f4e2m1, f8e4m3, f8e8m0, f16, f32, i4, i8, u4
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.language.sharing import share_common
from fusegen.language.sizes import size_of
from fusegen.language.spec import Chain
from fusegen.language.types import DType
from fusegen.pipeline import compile, compile_program
from fusegen.planner import candidates
from fusegen.planner.products.gemm import GemmPlan
from fusegen.planner.products.parts import ProductPlan
from fusegen.planner.programs import kernels_of
from fusegen.planner.programs.lowering import lowered
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.parts import layout_of
from fusegen.planner.programs.search import Search
from fusegen.planner.programs.smaller import smaller
from fusegen.planner.programs.steps import step_of
from fusegen.runtime import Kernel, Program, finding
from fusegen.targets import A100, H200, MI300X, Target
from fusegen.validation import validate
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

M, N, K = dims("M N K")
Array = np.ndarray[Any, np.dtype[Any]]
Fits = Callable[[Any], bool]  # of a plan


def spec_of(code: DType, factor: DType, scale: DType, group: int, out: DType, **sizes: int) -> Chain:
    """x @ dequantize(w, s).T; a scale for each `group` of K, or for all of it where that is 0."""

    def product(x: Any, w: Any, s: Any) -> Any:
        return x @ F.dequantize(w, s).T

    columns = K // group if group else 1
    product.__annotations__.update(x=factor[M, K], w=code[N, K], s=scale[N, columns])
    product.__annotations__["return"] = out[M, N]
    return chain(**sizes)(product)


def bits_of(values: Array, code: DType) -> Array:
    """As memory has them: two of 4 bits to a byte, the low nibble first."""
    if not code.packed:
        return values.astype(code.numpy)
    nibbles = (values.astype(np.int8) if code.kind == "int" else values.astype(code.numpy)).view(np.uint8) & 15
    found: Array = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return found


@needs_compiler
@pytest.mark.parametrize("target", [A100, H200], ids=str)
@pytest.mark.parametrize("factor", [bf16, f16], ids=str)
@pytest.mark.parametrize("code", [i8, i4, u4, f4e2m1, f8e4m3], ids=str)
def test_every_code_is_multiplied_as_the_number_it_is(code: DType, factor: DType, target: Target) -> None:
    """By a left factor that has one 1 in each row."""
    spec = spec_of(code, factor, f32, 32, f32, M=32, N=64, K=64)
    every = np.arange(2**code.bits, dtype=np.uint8)
    if code.kind == "int":
        known = every.astype(np.int64) + (0 if code is u4 else -(2 ** (code.bits - 1)))
    else:
        known = every.view(code.numpy).astype(np.float64)
    values = np.stack([np.roll(row, n) for n, row in enumerate(np.resize(known, 64 * 64).reshape(64, 64))]) * 1.0
    scales = np.exp2(np.random.default_rng(1).integers(-9, 9, (64, 2))).astype(np.float32)
    kernel = program_of(spec, target, lambda plan: isinstance(plan, GemmPlan))
    exact = values * np.repeat(scales, 32, -1)
    finite = np.isfinite(exact)  # NaN would reach its whole column
    for first in (0, 32):
        x = np.zeros((32, 64), factor.numpy)
        x[np.arange(32), first + np.arange(32)] = 1
        got = kernel(x, bits_of(np.where(finite, values, 0), code), scales)
        np.testing.assert_array_equal(got, np.where(finite, exact, 0).T[first : first + 32])
    if code is f8e4m3:
        lost = np.isnan(np.asarray(kernel(x, bits_of(values, code), scales)).astype(np.float64)).all(0)
        np.testing.assert_array_equal(lost, ~finite.all(-1))


@chain(M=6, N=72, K=384)
def with_zeros(x: f16[M, K], w: u4[N, K], s: f32[N, K // 64], z: u4[N, K // 64]) -> f32[M, N]:
    return x @ F.dequantize(w, s, z).T


CASES = (
    (spec_of(i8, bf16, bf16, 128, bf16, M=5, N=100, K=512), H200),
    (spec_of(i8, f16, f32, 32, f32, M=20, N=72, K=384), A100),
    (spec_of(f8e4m3, bf16, f32, 64, bf16, M=9, N=40, K=448), H200),
    (spec_of(f8e4m3, f16, f16, 0, f16, M=3, N=136, K=160), A100),
    (spec_of(i4, bf16, bf16, 128, bf16, M=5, N=100, K=512), H200),
    (spec_of(f4e2m1, bf16, f8e8m0, 32, bf16, M=17, N=56, K=224), H200),
    (with_zeros.at(M=6, N=72, K=384), H200),
    (with_zeros.at(M=2, N=40, K=1024), A100),
)


@needs_compiler
@pytest.mark.parametrize(
    ("spec", "target"), CASES, ids=lambda case: str(case.graph.signature if isinstance(case, Chain) else case)
)
def test_ragged_sizes(spec: Chain, target: Target) -> None:
    program = compile(spec, target, on="emulator", validate=False)
    assert isinstance(program, Program)
    assert len(program.kernels) == 1
    validate(program).raise_for_error()


@needs_compiler
def test_what_comes_behind_the_sums() -> None:
    @chain(M=6, N=72, K=256)
    def gated(x: bf16[M, K], a: i8[N, K], b: i8[N, K], s: bf16[N, K // 64], t: bf16[N, K // 64]) -> bf16[M, N]:
        return F.silu(x @ F.dequantize(a, s).T) * (x @ F.dequantize(b, t).T)

    validate(compile(gated, H200, on="emulator", validate=False), quick=True).raise_for_error()


def program_of(spec: Chain, target: Target, fits: Fits, *edits: tuple[str, str]) -> Any:
    """The chain by the first of its plans that fits, whose text has been edited."""
    graph = share_common(spec.graph)
    step = lowered(graph)
    found = candidates(step.graph, target, layout_of(step, graph.sizes)).need()
    plan = next(p for p in found if isinstance(p, ProductPlan) and fits(p))
    source = render(plan)
    for old, new in edits:
        text = re.sub(old, new, source.text)
        assert text != source.text, f"{old!r} changes nothing"
        source = replace(source, text=text)
    device = finding.find(target, "emulator")
    kernel = Kernel(source, None, device, lambda layout: (source, None))
    return Program(ProgramPlan(graph, target, (step_of(step, plan),), (), (), ()), [kernel], device)


@needs_compiler
@pytest.mark.parametrize(
    ("group", "rows", "fits"),
    [
        (128, 8, lambda p: p.tile.cluster == 2),
        (64, 33, lambda p: p.tile.rows == 64 and p.tile.cols == 32),
        (256, 8, lambda p: p.tile.k == 128 and p.tile.stages == 4),
        (32, 16, lambda p: p.tile.k == 128 and p.tile.cols == 64),
    ],
    ids=["cluster", "many rows", "wide groups", "narrow groups"],
)  # fmt: skip
def test_every_kind_of_tile(group: int, rows: int, fits: Fits) -> None:
    spec = spec_of(i8, bf16, bf16, group, bf16, M=rows, N=136, K=4096)
    validate(program_of(spec, H200, fits), quick=True).raise_for_error()


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"\.at\[q % 2\]", ".at[1 - q % 2]"),  # the scale of the neighbouring group
        (r"\+ col \* (s\w*_ld)", r"+ (col ^ 1) * \1"),  # of the neighbouring column
        (r"0x5410\);", "0x1054);"),  # the left factor's pairs the other way round
        (r"words\[i / 2\] >> i % 2 \* 8", "words[i / 2] >> (1 - i % 2) * 8"),  # the codes of a pair swapped
        (r"less = bytes & mask \+ 0x00010001u \| 0x43004300u", "less = 0x43004300u"),  # no code is negative
        (r"_unscaled\[n?0?\]\[m?0?\]\[i\] = 0.0f;", "_unscaled[0][0][i] *= 1.0f;"),  # a group counts twice
        (r"(w_scales\[q\]\[\w\]\[half\] = )", r"if (step == 0) \1"),  # of the first slice
        (r"pairs\[0\]\[i\], pairs\[1\]\[i\]", "pairs[1][i], pairs[0][i]"),  # two columns swapped
        (r"w_lane \^ k \* \d+", "w_lane"),  # the first codes of a slice again
        (r"wait_copies<stages - 2>\(\);", "wait_copies<stages - 1>();"),  # a slice that is not there yet
    ],
)  # fmt: skip
def test_a_broken_kernel_is_found(old: str, new: str) -> None:
    spec = spec_of(i8, bf16, bf16, 64, bf16, M=7, N=72, K=2048)

    def fits(plan: GemmPlan) -> bool:
        return plan.tile.k == 128 and plan.tile.cols == 16 and plan.tile.cluster == 1 and plan.steps > 1

    validate(program_of(spec, H200, fits), quick=True).raise_for_error()
    assert not validate(program_of(spec, H200, fits, (old, new)), quick=True).ok


@needs_compiler
@pytest.mark.parametrize(
    ("spec", "old", "new"),
    [
        ("i4", r"words\[0\] >> i \* 4", "words[0] >> (i ^ 1) * 4"),  # swapped nibbles
        ("i4", "0x43084308u", "0x43004300u"),  # no sign
        ("i4", r"lane % 4 \* 4;", "lane % 4 / 2 * 8;"),  # a lane's codes twice
        ("u4", r" % 2 \* 4 & 15u", " % 2 * 0 & 15u"),  # the zero of the neighbouring group
        ("u4", r"memcpy\(w_zeros, w_zeros_next", "if (step == 0) memcpy(w_zeros, w_zeros_next"),  # of the first slice
        ("u4", r"(w_zeros\w*\[k / \d+\]\[\w\])\[column\]", r"\1[0]"),  # of the first column
        ("u4", r"next \? w_zeros_next", "!next ? w_zeros_next"),  # of the next slice
    ],
)
def test_a_broken_kernel_of_4_bits_is_found(spec: str, old: str, new: str) -> None:
    own = with_zeros.at(M=7, N=72, K=2048)
    if spec == "i4":
        own = spec_of(i4, bf16, bf16, 64, bf16, M=7, N=72, K=2048)

    def fits(plan: GemmPlan) -> bool:
        return plan.tile.k == 128 and plan.tile.cols == 32 and plan.tile.cluster == 1 and plan.steps > 1

    assert not validate(program_of(own, H200, fits, (old, new)), quick=True).ok


@needs_compiler
@pytest.mark.parametrize(
    ("spec", "target"),
    [
        (spec_of(i8, bf16, bf16, 128, bf16, M=8, N=64, K=256), MI300X),
        (spec_of(f8e4m3, bf16, f32, 24, bf16, M=8, N=64, K=240), H200),
    ],
    ids=["no mma.sync", "groups of 24"],
)
def test_what_no_kernel_widens_is_dequantized_by_another_one(spec: Chain, target: Target) -> None:
    program = compile(spec, target, on="emulator", validate=False)
    assert isinstance(program, Program)
    assert len(program.kernels) == 2
    validate(program, quick=True).raise_for_error()


def kernels_beside_many_rows(codes: DType, group: int) -> ProgramPlan:
    graph = spec_of(codes, bf16, bf16, group, bf16, M=4096, N=8192, K=8192).graph
    _, program = kernels_of(graph, H200)
    assert program is not None
    return program


def run_smaller(program: ProgramPlan) -> None:
    small = smaller(program, always=True)
    assert small is not None
    made = compile_program(small, on="emulator", validate=False, tuned=False, as_planned=True)
    validate(made, quick=True).raise_for_error()


@needs_compiler
@pytest.mark.parametrize(
    ("codes", "group"), [(i8, 128), (i4, 128), (u4, 64), (f4e2m1, 32), (i4, 0)], ids=lambda value: str(value)
)
def test_beside_many_rows_a_factor_is_stored_once_as_its_codes_lie(codes: DType, group: int) -> None:
    """By one kernel, in whole vectors, also where a byte is two codes; the product reads it by its view."""
    program = kernels_beside_many_rows(codes, group)
    first, second = program.steps
    (stored,) = program.between
    assert stored.type.dtype is bf16
    assert [size_of(size, program.graph.sizes) for size in stored.type.shape[:1]] == [8192]
    assert {second.plan.rule, first.plan.rule} == {"wgmma", "elementwise"}
    assert all(access.mode == "vector" and not access.apart for access in first.plan.accesses if access.by_column)
    assert second.plan.layout.transposed or second.plan.graph.products[0].inputs[1].op.name == "transpose"
    run_smaller(program)


@needs_compiler
def test_bounds_know_of_a_factor_that_is_stored_through_a_view() -> None:
    """Turned round, and rounded to x's type."""
    search = Search(share_common(spec_of(i8, bf16, bf16, 128, bf16, M=1024, N=8192, K=8192).graph), H200)
    (product,) = search.graph.products
    factor = product.inputs[1]
    assert factor.op.name == "view"
    found = search.look(frozenset({factor}))
    run_smaller(search.program(found, {search.order[factor]: "it is asked for"}, ()))
