"""Products of 8-bit factors: what is planned and refused, what kernels compute, and what a missed promotion costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f8e4m3, f8e4m3fnuz, f8e5m2, f8e5m2fnuz, f16, f32, i8, i32, u8
from fusegen import ops as F
from fusegen.compiling import compile_source
from fusegen.emitting.rendering import render
from fusegen.emulator.errors import KernelFault
from fusegen.errors import MissingError, SpecError
from fusegen.language.reference import reference
from fusegen.language.types import DType, TensorType, size_of
from fusegen.planner import candidates
from fusegen.planner.model import Layout, Plan, Source, Summed
from fusegen.planner.products.factors import lacking
from fusegen.planner.products.gemm import GemmPlan
from fusegen.planner.products.halved import HALVES
from fusegen.planner.products.wgmma import WgmmaPlan
from fusegen.planner.programs import program_instead
from fusegen.planner.programs.model import ProgramPlan
from fusegen.runtime import Kernel, Program
from fusegen.runtime.finding import find
from fusegen.targets import A100, B200, H200, L40S, MI300X, MI355X, RX7900XTX, RX9070XT, Target
from fusegen.targets.hip import MI250X
from fusegen.validation import validate
from fusegen.validation.bounds import analyse
from tests.specs import SHIPPED
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

M, N, K = dims("M N K")
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@chain(M=300, N=264, K=400)
def scaled(x: f8e4m3[M, K], w: f8e4m3[N, K], sx: f32[M, 1], sw: f32[N]) -> bf16[M, N]:
    return (x @ w.T) * sx * sw


@chain(M=300, N=264, K=400)
def mixed(x: f8e5m2[M, K], w: f8e4m3[N, K]) -> f32[M, N]:
    return F.matmul(x, w.T, promote=256)


@chain(M=300, N=264, K=400)
def whole(x: i8[M, K], w: i8[N, K]) -> i32[M, N]:
    return x @ w.T


@chain(M=300, N=264, K=400)
def unsigned(x: u8[M, K], w: u8[N, K], sw: f32[N], r: bf16[M, N]) -> bf16[M, N]:
    return F.relu((x @ w.T) * sw) + r


@chain(M=300, N=264, K=400)
def across(x: i8[M, K], w: i8[K, N]) -> i32[M, N]:
    return x @ w


@chain(M=300, N=264, K=400)
def fnuz(x: f8e4m3fnuz[M, K], w: f8e5m2fnuz[N, K], sx: f32[M, 1]) -> f32[M, N]:
    return (x @ w.T) * sx


@chain(M=300, N=264, K=400)
def plain(x: f8e4m3[M, K], w: f8e4m3[N, K]) -> f32[M, N]:
    return x @ w.T


@chain(M=128, N=128, K=8192)
def deep(x: f8e4m3[M, K], w: f8e4m3[N, K]) -> f32[M, N]:
    return x @ w.T


@chain(M=128, N=128, K=8192)
def unpromoted(x: f8e4m3[M, K], w: f8e4m3[N, K]) -> f32[M, N]:
    return F.matmul(x, w.T, promote=0)


def first(spec: Chain, gpu: Target, kind: type[Plan], **sizes: int) -> Plan:
    found = candidates(spec.graph.at(**sizes), gpu)
    return next(plan for plan in found.need() if isinstance(plan, kind))


def emulated(plan: Plan, text: str = "") -> Kernel:
    source = render(plan)
    source = replace(source, text=text or source.text)

    def variant(layout: Layout) -> tuple[Source, None]:
        return source, None

    return Kernel(source, None, find(plan.target, "emulator"), variant)


# ---------------------------------------------------------------- plans


def test_sums_of_8_bit_floats_are_promoted_by_themselves() -> None:
    plan = first(scaled, H200, WgmmaPlan)
    assert plan.summed == Summed(promote=128), "a slice of 128 bytes"
    assert plan.rounding[0] == "to 14 significant bits sums of 128 products, which are added in f32"
    assert first(mixed, H200, WgmmaPlan).summed.promote == 256
    assert first(unpromoted, H200, WgmmaPlan).rounding[0] == "to 14 significant bits sums of all products"
    assert first(whole, H200, WgmmaPlan).summed.promote == 0, "exact"
    assert first(scaled, L40S, GemmPlan).summed.promote == 32, "an instruction's products, which costs no registers"


def test_promoted_sums_leave_a_thread_registers_enough() -> None:
    for plan in candidates(scaled.graph.at(M=8192, N=8192, K=8192), H200).plans:
        if isinstance(plan, WgmmaPlan):
            held = plan.tile.parts * plan.tile.sums + plan.tile.multiplied_sums
            assert held <= 192, plan.configuration
            assert plan.tile.parts * plan.tile.across == 1 or plan.promoted_slices == 1


def test_the_data_sheet_says_what_8_bits_are_worth() -> None:
    plan = first(scaled, H200, WgmmaPlan, M=8192, N=8192, K=8192)
    assert plan.cost.floor_us == pytest.approx(2 * 8192**3 / (H200.narrow_tflops * 1e6))
    assert H200.product_tflops(i8) == pytest.approx(2 * H200.matrix_tflops, rel=1e-3)


def test_what_lies_across_the_summed_axis_is_the_general_rule_s() -> None:
    found = candidates(across.graph.at(N=272), H200)
    assert {plan.rule for plan in found.plans} == {"gemm"}
    refused = {r.rule: r.reason for r in found.refusals}
    assert refused["wgmma"] == "w is of i8 and lies across the summed axis; wgmma takes i8 along it only"


def test_types_that_a_target_does_not_multiply_are_refused() -> None:
    said = {r.rule: r.reason for r in candidates(scaled.graph, A100).refusals}["gemm"]
    has = "; of 8 bits it multiplies i8, u8"
    assert said == f"sm_80 has no matrix instruction of a warp for factors of f8e4m3{has}"
    said = {r.rule: r.reason for r in candidates(mixed.graph, MI300X).refusals}["gemm"]
    has = "; of 8 bits it multiplies f8e4m3fnuz, f8e5m2fnuz, i8"
    assert said == (
        f"gfx942 has no matrix instruction of a warp for factors of f8e5m2 and f8e4m3{has}\n"
        "  infinities of f8e5m2 have no code in f8e5m2fnuz; make each factor F.cast(x, f16), which is exact"
    )


@needs_compiler
@pytest.mark.parametrize(("dtype", "halved"), [(f8e4m3, f8e4m3fnuz), (f8e5m2, f8e5m2fnuz)], ids=str)
def test_a_cast_to_gfx942_s_types_keeps_the_codes_of_halves(dtype: DType, halved: DType) -> None:
    """Half of each number has the same bits, but for -0, infinities and NaN. Every code meets every other in products
    of two rows; what those come to is exact, as each is of one product and zeros."""

    def ocp(x: Any, w: Any) -> Any:
        left, right = F.cast(x * 0.5, halved), F.cast(w * 0.5, halved)
        return F.matmul(left, right.T) * 4.0, left, right

    results = tuple[f32[M, N], halved[M, K], halved[N, K]]  # type: ignore[valid-type]
    ocp.__annotations__ |= {"x": dtype[M, K], "w": dtype[N, K], "return": results}
    program = fusegen.compile(chain(M=256, N=256, K=32)(ocp), MI300X, on="emulator", validate=False)
    codes = np.zeros((256, 32), np.uint8)
    codes[:, 5] = np.arange(256)
    x = codes.view(dtype.numpy)
    product, left, right = (np.asarray(a) for a in program(x, x))
    bits = left.view(np.uint8)[:, 5]
    finite = np.isfinite(x[:, 5].astype(np.float32))
    same = finite & (np.arange(256) != 0x80)
    np.testing.assert_array_equal(bits[same], np.flatnonzero(same))
    assert bits[0x80] == 0
    assert (bits[np.isnan(x[:, 5].astype(np.float32))] == 0x80).all()
    np.testing.assert_array_equal(right.view(np.uint8), left.view(np.uint8))
    one = x[:, 5].astype(np.float64)
    with np.errstate(invalid="ignore"):
        law = np.outer(one, one)
    np.testing.assert_array_equal(product[np.ix_(finite, finite)], law[np.ix_(finite, finite)])
    assert np.isnan(product[np.isnan(one)]).all()


# ---------------------------------------------------------------- as halves, on gfx942


def test_a_plan_says_that_factors_are_halved() -> None:
    said = "factors of f8e4m3 to their halves, of f8e4m3fnuz, and sums by 4: exactly"
    plan = first(scaled, MI300X, GemmPlan)
    assert isinstance(plan, GemmPlan)
    assert (plan.rounding[0], plan.halves) == (said, (True, True))
    assert plan.atom.factors is f8e4m3fnuz
    for spec, gpu in ((scaled, MI355X), (fnuz, MI300X), (whole, MI300X)):
        found = first(spec, gpu, GemmPlan)
        assert isinstance(found, GemmPlan)
        assert (any(found.halves), any("halves" in line for line in found.rounding)) == (False, False)


def test_only_halves_with_their_own_codes_are_multiplied_so() -> None:
    """By ml_dtypes: all 256 codes of a type and of what stands for it."""
    for stored, multiplied in HALVES.items():
        codes = np.arange(256, dtype=np.uint8)
        own, others = (codes.view(t.numpy).astype(np.float32) for t in (stored, multiplied))
        same = own == 2 * others
        assert set(codes[~same]) == {0x80, 0x7F, 0xFF}
        assert np.isnan(own[[0x7F, 0xFF]]).all()
        assert np.isnan(others[0x80])
    assert f8e5m2 not in HALVES, "its infinities"


@needs_compiler
@pytest.mark.parametrize("rows", [256, 8], ids=["tiles", "streams"])
def test_every_code_meets_every_other_as_a_half(rows: int) -> None:
    """Each product is of two codes and zeros, so exact; NaN is NaN, and -0 none."""
    sizes = {"M": rows, "N": 256, "K": 144}
    kernel = fusegen.compile(plain.at(**sizes), MI300X, on="emulator", validate=False)
    codes = np.zeros((256, 144), np.uint8)
    codes[:, 5] = np.arange(256)
    w = codes.view(E4M3)
    one = w[:, 5].astype(np.float32)
    for start in range(0, 256, rows):
        product = np.asarray(kernel(w[start : start + rows], w))
        np.testing.assert_array_equal(product, np.outer(one[start : start + rows], one))


@needs_compiler
def test_codes_become_halves_whatever_lies_beside_them() -> None:
    """Four codes are changed at once: each two finite ones beside each other, in either order, times one matrix."""
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    x = np.full((len(finite), 512), 0x80, np.uint8)
    x[:, 0::2][:, : len(finite)] = finite[:, None]
    x[:, 1::2][:, : len(finite)] = finite
    left, right = x.view(E4M3), np.eye(512, dtype=np.float32).astype(E4M3)
    kernel = fusegen.compile(plain.at(M=len(finite), N=512, K=512), MI300X, on="emulator", validate=False)
    np.testing.assert_array_equal(np.asarray(kernel(left, right)), left.astype(np.float32))
    kernel = fusegen.compile(plain.at(M=512, N=len(finite), K=512), MI300X, on="emulator", validate=False)
    np.testing.assert_array_equal(np.asarray(kernel(right, left)), left.astype(np.float32).T)


@needs_compiler
def test_one_nan_is_in_all_of_its_row() -> None:
    rng = np.random.default_rng(8)
    spec = plain.at(M=37, N=75, K=83)
    x, w = (rng.standard_normal(shape).astype(E4M3) for shape in ((37, 83), (75, 83)))
    x.view(np.uint8)[[3, 36], [82, 0]] = 0x7F, 0xFF
    w.view(np.uint8)[74, 81] = 0xFF
    found = np.asarray(fusegen.compile(spec, MI300X, on="emulator", validate=False)(x, w))
    wanted = np.zeros((37, 75), bool)
    wanted[[3, 36]] = wanted[:, 74] = True
    assert np.array_equal(np.isnan(found), wanted)


WRONG_HALVES = {
    "-0 stays": ("words[i] & (size + 0x7f7f7f7fu) & 0x80808080u", "words[i] & 0x80808080u"),
    "NaN is 240": ("(size + none)", "size"),
    "a code's neighbour carries": ("(size + none)", "(words[i] + none)"),
    "the left factor stays": ("halves(x_held[0])", "x_held[0]"),
    "the right factor stays": ("halves(w_held[0])", "w_held[0]"),
    "sums stay quarters": ("[i] * 4.0f;", "[i];"),
    "sums are halves": ("[i] * 4.0f;", "[i] * 2.0f;"),
}


@needs_compiler
@pytest.mark.parametrize("name", ["", *WRONG_HALVES])
def test_validation_catches_wrong_halves(name: str) -> None:
    plan = first(plain, MI300X, GemmPlan, M=70, N=72, K=144)
    text = render(plan).text
    if name:
        found, put = WRONG_HALVES[name]
        assert text.count(found) == 1, name
        text = text.replace(found, put)
    assert validate(emulated(plan, text), quick=True).ok is not bool(name)


def test_a_cast_before_a_product_is_a_kernel_of_its_own() -> None:
    @chain(M=512, N=512, K=512)
    def quantized(x: bf16[M, K], w: f8e4m3[N, K], sw: f32[N]) -> bf16[M, N]:
        q, s = F.quantize(x, f8e4m3)
        return (q @ w.T) * s * sw

    program = program_instead(candidates(quantized.graph, H200))
    assert program is not None
    assert [step.plan.rule for step in program.steps] == ["rowwise", "wgmma"]


# ---------------------------------------------------------------- what is no product


def refused(function: object, said: str, **operands: TensorType) -> None:
    out = i32 if all(t.dtype in (i8, u8) for t in operands.values()) else f32
    function.__annotations__ = {**operands, "return": out[M, N]}
    function.__name__ = "wrong"  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match=said):
        chain(M=8, N=8, K=8)(function)  # type: ignore[arg-type]


def test_factors_that_do_not_meet_are_a_sentence() -> None:
    refused(lambda x, w: x @ w.T, "whole numbers and others", x=i8[M, K], w=f8e4m3[N, K])
    refused(lambda x, w: x @ w.T, "the factors have different types", x=i8[M, K], w=u8[N, K])
    refused(lambda x, w: x @ w.T, "the factors have different types", x=bf16[M, K], w=f8e4m3[N, K])
    refused(lambda x, w: x @ w.T, "found i32 where a factor of floats, of i8", x=i32[M, K], w=i8[N, K])
    refused(lambda x, w: (x + 1) @ w.T, "found i32 where a factor of floats, of i8", x=i8[M, K], w=i8[N, K])
    refused(lambda x, w: F.relu(x) @ w.T, "a factor of 8 bits meets one that is computed", x=f16[M, K], w=f8e4m3[N, K])
    refused(lambda x, w: F.matmul(x, w.T, promote=64), "promote=64; it is None, 0, or", x=f8e4m3[M, K], w=f8e4m3[N, K])
    refused(lambda x, w: F.matmul(x, w.T, promote=128), "is of factors of 8-bit floats", x=bf16[M, K], w=bf16[N, K])


# ---------------------------------------------------------------- numbers


def operands_of(spec: Chain, rng: np.random.Generator) -> list[np.ndarray]:
    """Whole numbers whose sums fit 14 bits: every order of adding them up gives the same."""
    made = []
    for tensor in spec.graph.inputs:
        shape = tuple(spec.graph.sizes[str(size)] if not isinstance(size, int) else size for size in tensor.shape)
        least, most = {i8: (-128, 128), u8: (0, 256)}.get(tensor.dtype, (-3, 4))
        made.append(rng.integers(least, most, shape).astype(tensor.dtype.numpy))
    return made


CASES = [
    (scaled, H200, {"M": 300, "N": 136, "K": 272}),
    (scaled, H200, {"M": 20, "N": 40, "K": 144}),
    (scaled, H200, {"M": 70, "N": 75, "K": 301}),  # no row begins where the last one did: a byte at a time
    (scaled, H200, {"M": 70, "N": 136, "K": 1040}),  # blocks share tiles
    (mixed, H200, {"M": 70, "N": 136, "K": 656}),
    (unpromoted, H200, {"M": 70, "N": 136, "K": 144}),
    (whole, H200, {"M": 300, "N": 136, "K": 400}),
    (whole, H200, {"M": 70, "N": 136, "K": 1040}),
    (unsigned, H200, {"M": 140, "N": 136, "K": 272}),
    (across, H200, {"M": 70, "N": 48, "K": 133}),
    (whole, A100, {"M": 37, "N": 75, "K": 83}),
    (whole, A100, {"M": 8, "N": 64, "K": 528}),
    (scaled, L40S, {"M": 37, "N": 75, "K": 83}),
    (mixed, L40S, {"M": 8, "N": 64, "K": 528}),
    (whole, MI300X, {"M": 37, "N": 75, "K": 83}),
    (whole, MI250X, {"M": 8, "N": 64, "K": 528}),
    (fnuz, MI300X, {"M": 37, "N": 75, "K": 83}),
    (fnuz, MI300X, {"M": 8, "N": 64, "K": 528}),
    (scaled, MI300X, {"M": 37, "N": 75, "K": 83}),
    (scaled, MI300X, {"M": 300, "N": 136, "K": 272}),
    (scaled, MI300X, {"M": 8, "N": 64, "K": 528}),
    (whole, MI355X, {"M": 37, "N": 75, "K": 83}),
    (scaled, MI355X, {"M": 37, "N": 75, "K": 83}),
    (mixed, MI355X, {"M": 8, "N": 64, "K": 528}),
]


@needs_compiler
@pytest.mark.parametrize(("spec", "gpu", "sizes"), CASES, ids=lambda each: getattr(each, "name", str(each)))
def test_sums_that_fit_are_exact(spec: Chain, gpu: Target, sizes: dict[str, int]) -> None:
    spec = spec.at(**sizes)
    operands = operands_of(spec, np.random.default_rng(1))
    kernel = fusegen.compile(spec, gpu, on="emulator", validate=False)
    expected = reference(spec.graph)(*operands)
    if spec.name == "unsigned":  # scaled and added in f32
        assert np.abs(np.asarray(kernel(*operands)).astype(np.float64) - expected).max() <= 2**-7 * expected.max()
        return
    stored = expected.astype(spec.graph.outputs[0].dtype.numpy)
    assert np.array_equal(np.asarray(kernel(*operands)), stored)
    if spec.graph.sizes["M"] < 64:  # factors that lie across K, which bytes pass through registers for
        operands[:2] = map(np.asfortranarray, operands[:2])
        assert np.array_equal(np.asarray(kernel(*operands)), stored)


@needs_compiler
@pytest.mark.parametrize("gpu", [H200, A100, B200, MI300X, RX7900XTX], ids=str)
def test_sums_of_whole_numbers_are_exact_beyond_f32(gpu: Target) -> None:
    """An odd number above 2^24 is no f32."""
    x, w = np.full((70, 1072), 127, np.int8), np.full((64, 1072), -128, np.int8)
    w[:, 0] = 1
    found = fusegen.compile(whole.at(M=70, N=64, K=1072), gpu, on="emulator", validate=False)(x, w)
    assert (np.asarray(found) == 127 - 1071 * 127 * 128).all()


def like_signs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return tuple((1 + rng.random((128, 8192))).astype(E4M3) for _ in "xw")  # type: ignore[return-value]


def beyond(outputs: np.ndarray, plan: Plan, operands: tuple[np.ndarray, ...]) -> tuple[int, float]:
    """How many elements are farther off than the bound allows, and the largest share of the bound."""
    (law,) = analyse(plan, operands)
    error = np.abs(outputs.astype(np.float64) - law.value)
    return int((error > law.error).sum()), float((error / np.maximum(law.error, 1e-30)).max())


@needs_compiler
def test_a_missed_promotion_is_caught_at_8192() -> None:
    """Sums of like signs, all of K in 14 bits: a part is lost that is many times the bound of promoted ones."""
    operands = like_signs(np.random.default_rng(0))
    plan = first(deep, H200, WgmmaPlan)
    assert plan.summed.promote == 128
    wrong, most = beyond(np.asarray(emulated(plan)(*operands)), plan, operands)
    assert wrong == 0
    assert most > 0.002, "a bound that says something"
    alone = next(
        p for p in candidates(unpromoted.graph, H200).plans if isinstance(p, WgmmaPlan) and p.tile.split_k == 1
    )
    wrong, most = beyond(np.asarray(emulated(alone)(*operands)), plan, operands)
    assert wrong > 0.9 * 128 * 128
    assert most > 10


@needs_compiler
@pytest.mark.parametrize("gpu", [H200, L40S], ids=str)
def test_kernels_pass_in_full(gpu: Target) -> None:
    small = scaled.at(M=64, N=40, K=144)
    validate(fusegen.compile(small, gpu, on="emulator", validate=False), quick=True).raise_for_error()


# ---------------------------------------------------------------- blocks


@chain(M=70, N=256, K=512)
def by_rows(
    x: f8e4m3[M, K], w: f8e4m3[N, K], sx: f32[M, K // 128], sw: f32[N // 128, K // 128], bias: f32[N]
) -> f32[M, N]:
    return F.relu(F.dequantize(x, sx) @ F.dequantize(w, sw).T + bias)


@chain(M=70, N=256, K=512)
def turned(
    x: f8e5m2[M, K], w: f8e4m3[N, K], sx: f32[K // 128, M], sw: f32[N // 128, K // 128]
) -> f32[M, N]:  # fmt: skip
    return F.dequantize(x, sx.T) @ F.dequantize(w, sw).T


@chain(M=70, N=256, K=512)
def gated(
    x: f8e4m3[M, K], w: f8e4m3[N, K], v: f8e4m3[N, K], sx: f32[M, K // 128], sw: f32[N // 128, K // 128],
    sv: f32[N // 128, K // 128],
) -> f32[M, N]:  # fmt: skip
    h = F.dequantize(x, sx)
    return (h @ F.dequantize(w, sw).T) * (h @ F.dequantize(v, sv).T)


def in_layout(spec: Chain, layout: Layout) -> Iterator[Plan]:
    """The candidates of its one kernel."""
    plan = fusegen.plan(spec, target="cuda:h200", tuned=False)
    assert isinstance(plan, ProgramPlan)
    return iter(candidates(plan.steps[0].plan.graph, H200, layout).plans)


@pytest.mark.parametrize("names", [("x",), ("w",), ("x", "w", "sx", "sw", "out")], ids="-".join)
@pytest.mark.parametrize("rows", [1, 70, 300, 9000])
def test_blocks_that_begin_anywhere_are_planned(rows: int, names: tuple[str, ...]) -> None:
    """A byte at a time, which takes registers beside the scales: by more warps. ptxas has enough of them."""
    found = in_layout(SHIPPED["fp8_block_gemm"].at(M=rows), Layout(unaligned=frozenset(names)))
    assert next(found, None) is not None


def test_two_products_of_blocks_that_begin_anywhere_are_planned() -> None:
    plan = next(in_layout(gated.at(M=300), Layout(unaligned=frozenset({"x", "w", "v", "sx", "sw", "sv", "out"}))))
    try:
        binary = compile_source(render(plan).text, plan.name, H200, filename="k.cu", threads=plan.threads)
    except MissingError as missing:
        pytest.skip(str(missing))
    assert (binary.resources.spill_bytes, binary.resources.stack_bytes) == (0, 0)


@needs_compiler
def test_blocks_that_begin_anywhere_are_right() -> None:
    made = fusegen.compile(SHIPPED["fp8_block_gemm"].at(M=300, N=256, K=384), H200, on="emulator", validate=False)
    report = validate(made, cases=("layout",))
    assert report.ok, str(report)[:2000]


def test_scales_of_blocks_are_arguments_of_the_product() -> None:
    (node,) = by_rows.graph.products
    assert [a.op.name for a in node.inputs] == ["input", "transpose", "input", "input"]
    assert node.promote == 128
    assert set(by_rows.graph.factor_types.values()) == {f8e4m3}
    for graph in (by_rows.graph, turned.graph):
        assert not any(n.op.name == "view" for n in graph.nodes), "no step that a kernel would have to store"


def test_other_blocks_are_dequantized_by_themselves() -> None:
    """Of 64, or of what is no operand of 8 bits: a kernel makes numbers of them, and another one multiplies."""

    @chain(M=64, N=256, K=512)
    def by_64(x: f8e4m3[M, K], w: f8e4m3[N, K], sx: f32[M, K // 64], sw: f32[N // 64, K // 64]) -> f32[M, N]:
        return F.cast(F.dequantize(x, sx), bf16) @ F.cast(F.dequantize(w, sw), bf16).T

    assert all(len(node.inputs) == 2 for node in by_64.graph.products)


def powers(spec: Chain, rng: np.random.Generator) -> list[np.ndarray]:
    """Whole numbers, and scales that are powers of 2: sums stay exact."""
    made = []
    for tensor in spec.graph.inputs:
        shape = tuple(size_of(size, spec.graph.sizes) for size in tensor.shape)
        values = rng.integers(-3, 4, shape)
        scales = np.exp2(rng.integers(-2, 3, shape))
        made.append((values if tensor.dtype.narrow else scales).astype(tensor.dtype.numpy))
    return made


BLOCKS = [
    (by_rows, H200, {"M": 70, "N": 256, "K": 512}),
    (by_rows, H200, {"M": 8, "N": 128, "K": 1152}),  # 9 slices, of which 4 have their scales on the way
    (turned, H200, {"M": 300, "N": 128, "K": 256}),
    (gated, H200, {"M": 70, "N": 256, "K": 256}),
    (by_rows, L40S, {"M": 37, "N": 128, "K": 256}),
    (turned, L40S, {"M": 8, "N": 128, "K": 640}),
    (gated, L40S, {"M": 37, "N": 128, "K": 256}),
    (by_rows, MI300X, {"M": 150, "N": 256, "K": 512}),
    (by_rows, MI300X, {"M": 8, "N": 128, "K": 1152}),  # 9 slices of 128, shared out to 8 groups
    (gated, MI300X, {"M": 37, "N": 256, "K": 256}),
    (by_rows, MI355X, {"M": 70, "N": 256, "K": 128}),
    (turned, MI355X, {"M": 150, "N": 128, "K": 640}),
    (turned, RX9070XT, {"M": 37, "N": 128, "K": 384}),
]


@needs_compiler
@pytest.mark.parametrize(("spec", "gpu", "sizes"), BLOCKS, ids=lambda each: getattr(each, "name", str(each)))
def test_blocks_are_scaled_by_their_own_scales(spec: Chain, gpu: Target, sizes: dict[str, int]) -> None:
    spec = spec.at(**sizes)
    operands = powers(spec, np.random.default_rng(2))
    kernel = fusegen.compile(spec, gpu, on="emulator", validate=False)
    assert np.array_equal(np.asarray(kernel(*operands)), reference(spec.graph)(*operands).astype(np.float32))


def test_large_tiles_have_room_for_the_scales_of_two_slices() -> None:
    found = {(p.tile.rows, p.tile.cols): p for p in scaled_plans(by_rows.at(M=4096, N=7168, K=2048))}
    assert (found[256, 128].tile.stages, found[256, 128].scale_slots) == (4, 2)
    assert (found[128, 192].tile.stages, found[128, 192].scale_slots) == (4, 4)
    assert found[256, 128].unrolled_slices


def scaled_plans(spec: Chain) -> list[WgmmaPlan]:
    program = program_instead(candidates(spec.graph, H200))
    assert program is not None
    step = program.steps[0]
    return [p for p in candidates(step.graph, H200, step.plan.layout).plans if isinstance(p, WgmmaPlan)]


WRONG_SCALES = {
    "the block's neighbour along K": (r"(\? row \* \w+_stride \+ )step :", r"\1(step + 1) % steps :"),
    "the block's neighbour along N": (r"at\.col0 / scaled_cols", "(at.col0 / scaled_cols + 1) % 2"),
    "another row's": (r"\? row \*", "? (row ^ 1) *"),
    "the slice's before it": (r"all_scales \+ stage \*", "all_scales + (stage + stages - 1) % stages *"),
    "none": (r" \* scale\[0\]\[\w\]\[j / 2 % 2\]", ""),
    "what is still on its way": (r"arrive_with_copies\(full", "arrive_at(full"),
}


@needs_compiler
@pytest.mark.parametrize("name", WRONG_SCALES)
def test_wrong_scales_are_caught(name: str) -> None:
    spec = by_rows.at(M=140, N=256, K=640)
    program = fusegen.compile(spec, H200, on="emulator", validate=False)
    assert isinstance(program, Program)
    step = program.plan.steps[0].plan
    assert isinstance(step, WgmmaPlan)
    assert (step.tile.split_k, step.scale_slots) == (1, step.tile.stages)
    rng = np.random.default_rng(4)
    operands = tuple(
        rng.standard_normal([size_of(size, spec.graph.sizes) for size in t.shape]).astype(t.dtype.numpy)
        for t in spec.graph.inputs
    )
    text = render(step).text
    broken, count = re.subn(*WRONG_SCALES[name], text)
    assert count, name
    assert beyond(np.asarray(emulated(step, text)(*operands)), step, operands)[0] == 0
    with suppress(KernelFault):  # a race, or what nothing has written
        assert beyond(np.asarray(emulated(step, broken)(*operands)), step, operands)[0] > 0


@needs_compiler
@pytest.mark.parametrize("broken", [False, True])
def test_scales_stay_until_they_are_read(broken: bool) -> None:
    """Of two slices, where the ring has four: the third one's wait for the first one's to be read."""
    spec = by_rows.at(M=300, N=256, K=1024)
    plan = next(p for p in scaled_plans(spec) if (p.tile.rows, p.tile.cluster) == (256, 1))
    text = render(plan).text
    assert text.count("int read = 2;") == 1
    kernel = emulated(plan, text.replace("int read = 2;", "int read = 0;") if broken else text)
    operands = powers(spec, np.random.default_rng(2))
    if broken:
        with pytest.raises(KernelFault, match="race"):
            kernel(*operands)
    else:
        assert beyond(np.asarray(kernel(*operands)), plan, tuple(operands))[0] == 0


def of_blocks(spec: Chain, gpu: Target) -> GemmPlan:
    """The kernel that sums blocks apart."""
    program = program_instead(candidates(spec.graph, gpu))
    assert program is not None
    plan = program.steps[-1].plan
    assert isinstance(plan, GemmPlan)
    return plan


WRONG_SLICES = {
    "the scales of the block before": ("fetch_scales(step + 1)", "fetch_scales(step)"),
    "the next slice's": ("fetch_scales(step + 1)", "fetch_scales(step + 2 < steps ? step + 2 : 0)"),
    "the block's neighbour along N": ("(col0 + warp_col) / scaled_cols", "((col0 + warp_col) / scaled_cols ^ 1)"),
    "another row's": ("sx_ptr[(row < rows ? row : row0)", "sx_ptr[(row < rows ? row ^ 1 : row0)"),
    "sums of the slice before once more": ("matmul_sums_unscaled[n][0] = Sums{};", ""),
    "taken once": ("take_scales();\n        fetch_scales", "fetch_scales"),
    "quarters": ("[i] * 4.0f;", "[i];"),
}


@needs_compiler
@pytest.mark.parametrize("name", ["", *WRONG_SLICES])
def test_wrong_scales_of_slices_are_caught(name: str) -> None:
    spec = by_rows.at(M=140, N=256, K=640)
    plans = candidates(of_blocks(spec, MI300X).graph, MI300X).plans
    plan = next(p for p in plans if isinstance(p, GemmPlan) and (p.tile.cols, p.tile.split_k) == (128, 1))
    assert plan.summed == Summed(k=plan.tile.k, promote=plan.tile.k)
    text = render(plan).text
    if name:
        right, wrong_text = WRONG_SLICES[name]
        assert text.count(right) == 1, name
        text = text.replace(right, wrong_text)
    rng = np.random.default_rng(4)
    operands = tuple(
        rng.standard_normal([size_of(size, spec.graph.sizes) for size in t.shape]).astype(t.dtype.numpy)
        for t in spec.graph.inputs
    )
    wrong, _ = beyond(np.asarray(emulated(plan, text)(*operands)), plan, operands)
    assert (wrong > 0) is bool(name)


@needs_compiler
def test_slices_beyond_k_have_no_scales() -> None:
    """Scales that are infinite: a slice of zeros behind K has none, or 0 times infinity would be NaN."""
    spec = by_rows.at(M=8, N=128, K=1152)
    plan = of_blocks(spec, MI300X)
    assert not plan.even
    operands = powers(spec, np.random.default_rng(2))
    operands[0][:], operands[1][:] = 1, 1
    operands[2][:, -1] = np.inf
    kernel = fusegen.compile(spec, MI300X, on="emulator", validate=False)
    assert (np.asarray(kernel(*operands)) == np.inf).all()


def test_scaled_blocks_have_kernels_wherever_such_floats_are_multiplied() -> None:
    for name in ("fp8_block_gemm", "grouped_fp8_block_gemm"):
        blocks = SHIPPED[name].graph
        assert lacking(blocks, A100) == "f8e4m3"
        for gpu in (L40S, MI300X, MI355X, RX9070XT):
            assert not lacking(blocks, gpu)
            assert program_instead(candidates(blocks, gpu)) is not None
