"""Two products with no softmax between them through the planner, the templates and the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f16, f32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.planner import candidates
from fusegen.planner.attention.recognition import has_plain_weights, recognized
from fusegen.planner.model import Layout, Source
from fusegen.planner.programs import kernels_of
from fusegen.reporting.explaining import explanation
from fusegen.runtime import Kernel, Program, finding
from fusegen.targets import A100, TARGETS, target
from fusegen.validation import validate
from tests import free_attentions
from tests.attentions import attention_plans
from tests.emitting.test_attention import needs_emulator

B, H, L, S, T, D, P = dims("B H L S T D P")
CUDA, HOPPER, AMD, RDNA = "cuda:a100", "cuda:h200", "hip:gfx90a", "hip:gfx1100"
NAMES = [spec.name for spec in free_attentions.FREE]
Array = np.ndarray[Any, np.dtype[Any]]


def kernel(spec: Chain, name: str, configuration: str = "", **sizes: int) -> Kernel:
    """The first candidate of that configuration, in the emulator, in every layout."""

    def variant(layout: Layout) -> tuple[Source, None]:
        plans = attention_plans(spec, name, layout, **sizes)
        fitting = [plan for plan in plans if plan.configuration.startswith(configuration)]
        return render((fitting or plans)[0]), None

    return Kernel(*variant(Layout()), finding.find(target(name), "emulator", check=True), variant)


def of(name: str) -> Chain:
    return next(spec for spec in free_attentions.FREE if spec.name == name)


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, AMD, RDNA])
@pytest.mark.parametrize("spec", free_attentions.FREE, ids=NAMES)
def test_every_chain_is_right_on_every_vendor(spec: Chain, name: str) -> None:
    if spec.name == "wide" and name == RDNA:
        return  # its registers hold no such rows
    report = validate(kernel(spec, name), quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.parametrize("spec", free_attentions.FREE, ids=NAMES)
def test_every_chain_is_right_by_wgmma(spec: Chain) -> None:
    report = validate(kernel(spec, HOPPER, "attention_wgmma"), quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, HOPPER, AMD])
def test_every_tile_is_right(name: str) -> None:
    for spec in (of("retained").at(S=210), of("squares").at(S=150, T=210)):
        for plan in attention_plans(spec, name):
            run = kernel(spec, name, plan.configuration)
            report = validate(run, quick=True, cases=("normal",))
            assert report.ok, f"{plan.configuration}: {str(report)[:1500]}"


@needs_emulator
@pytest.mark.parametrize("configuration", ["attention ", "attention_wgmma"])
def test_layouts_strides_and_counts_of_rows(configuration: str) -> None:
    report = validate(kernel(of("retained"), HOPPER, configuration))
    assert report.ok, str(report)[:2000]


# ---------------------------------------------------------------- what is left out


def drawn(*shapes: tuple[int, ...], dtype: Any = bf16, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype.numpy) for shape in shapes]


@needs_emulator
@pytest.mark.parametrize("configuration", ["attention 32x64", "attention_wgmma"])
def test_what_a_mask_hides_is_hidden(configuration: str) -> None:
    """NaN of keys behind a row's last, in tiles that are left out and in those that are not; a query's stays in its
    row. Of values, those of tiles that are left out."""
    sizes = {"B": 1, "H": 1, "S": 300, "D": 16, "E": 16}
    run = kernel(of("retained"), HOPPER, configuration, **sizes)
    q, k, v = drawn((1, 1, 300, 16), (1, 1, 300, 16), (1, 1, 300, 16))
    rate = np.full((1, 1, 1), -0.05, np.float32)
    before = np.asarray(run(q, k, v, rate)).view(np.uint16)
    k[0, 0, 140], k[0, 0, 290], v[0, 0, 299] = np.nan, np.inf, np.nan
    q[0, 0, 7] = np.nan
    after = np.asarray(run(q, k, v, rate))
    kept = np.r_[0:7, 8:128]
    assert (after.view(np.uint16)[0, 0, kept] == before[0, 0, kept]).all()
    assert np.isfinite(after[0, 0, 128:140].astype(np.float32)).all()
    assert np.isnan(after[0, 0, 7].astype(np.float32)).all()
    assert np.isnan(after[0, 0, 140:].astype(np.float32)).all()


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, HOPPER, AMD])
def test_rows_that_see_nothing_are_zeros(name: str) -> None:
    run = kernel(of("kept"), name, B=1, H=1, S=40, T=70, D=16)
    q, k, v, bias = drawn((1, 1, 40, 16), (1, 1, 70, 16), (1, 1, 70, 16), (1, 40, 70))
    keep, start = np.ones((1, 1, 1, 70), bool), np.full((1, 1, 40, 1), 30, np.int32)
    start[0, 0, 8:] = 99
    out = np.asarray(run(q, k, v, bias, keep, start)).astype(np.float32)[0, 0]
    assert (out[8:] == 0).all()
    assert (np.abs(out[:8]) > 0).any(-1).all()


# ---------------------------------------------------------------- numbers at the ends of a type


@chain(S=40, T=40, D=64)
def small_scale(q: f16[S, D], k: f16[T, D], v: f16[T, D]) -> f16[S, D]:
    """Scores that f16 has no number for, before they are scaled."""
    return (q @ k.mT * 2.0**-12) @ v


@needs_emulator
@pytest.mark.parametrize("configuration", ["attention ", "attention_wgmma"])
def test_f16_weights_are_scaled_before_they_are_rounded(configuration: str) -> None:
    run = kernel(small_scale, HOPPER, configuration)
    q, k, v = (np.full((40, 64), number, np.float16) for number in (128.0, 128.0, 0.5))
    assert (np.asarray(run(q, k, v)) == 128 * 128 * 64 * 2.0**-12 * 0.5 * 40).all()


@needs_emulator
def test_weights_that_f16_has_no_number_for_are_infinite() -> None:
    """As a chain of several kernels stores them."""
    run = kernel(of("linear"), CUDA, B=1, H=1, S=40, D=16)
    q, k, v = (np.full((1, 1, 40, 16), number, np.float16) for number in (2048.0, 2048.0, 1.0))
    assert np.isinf(np.asarray(run(q, k, v)).astype(np.float32)).all()


# ---------------------------------------------------------------- chains


@needs_emulator
@pytest.mark.parametrize("spec", free_attentions.CUT, ids=lambda spec: spec.name)
def test_others_stay_several_kernels(spec: Chain) -> None:
    one, program = kernels_of(spec.graph, A100)
    assert not one.plans
    assert program is not None
    report = validate(fusegen.compile(spec, CUDA, on="emulator", validate=False), quick=True)
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("on", TARGETS.values(), ids=str)
def test_every_target_has_a_candidate(on: Any) -> None:
    for spec in free_attentions.FREE:
        if spec.name == "wide" and on.arch in ("gfx1100", "gfx1201"):
            continue
        assert any(plan.rule == "attention" for plan in candidates(spec.graph, on).plans), spec.name


def test_conditions_come_last() -> None:
    ends = {"retained": "end", "chunked": "end", "sigmoids": "end", "linear": "end", "grouped": "both", "kept": "first"}
    for spec in free_attentions.FREE:
        plan = attention_plans(spec, CUDA)[0]
        found = {"first": plan.ends.first, "end": plan.ends.end}
        wanted = ends.get(spec.name, "end" if spec.name == "wide" else "")
        assert {name for name, end in found.items() if end} == {
            "": set[str](), "both": {"first", "end"}, "first": {"first"}, "end": {"end"},
        }[wanted], spec.name  # fmt: skip
        assert not any(s.op.name == "where" for s in plan.free.body) or spec.name in ("kept", "dropped"), spec.name


def test_masks_in_memory_hide_no_nan() -> None:
    """What is known of no column stays the factor that it is."""

    def masked(q, k, v, keep):  # type: ignore[no-untyped-def]
        return (q @ k.mT * F.where(keep > 0.5, 1.5, 0.0)) @ v

    masked.__annotations__ = {
        "q": bf16[S, D], "k": bf16[T, D], "v": bf16[T, D], "keep": f32[S, T], "return": bf16[S, D],
    }  # fmt: skip
    spec = chain(S=32, T=32, D=16)(masked)
    assert has_plain_weights(spec.graph)
    assert recognized(spec.graph).weights.op.name == "mul"


@chain(S=40, T=40, D=16)
def by_age(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> bf16[S, D]:
    """A factor that is computed, and 0 for later keys."""
    s = q @ k.mT
    return (s * F.relu(F.cast(F.row_index(s) - F.col_index(s), f32))) @ v


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, HOPPER, AMD])
def test_computed_zeros_hide_no_nan(name: str) -> None:
    """All rows have the last key's NaN, whose factor is 0 in each, as in numpy."""
    q, k, v = (np.ones((40, 16), bf16.numpy) for _ in range(3))
    k[39] = np.nan
    assert np.isnan(np.asarray(kernel(by_age, name)(q, k, v)).astype(np.float32)).all()


@chain(S=40, T=40, D=16)
def error_functions(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> bf16[S, D]:
    """A function that numpy does not have, of what a condition leaves and of a constant."""
    s = q @ k.mT * 0.25
    return (F.erf(F.where(F.col_index(s) <= F.row_index(s), s, 0.0)) * F.erf(D**-0.5)) @ v


@needs_emulator
def test_functions_that_numpy_does_not_have_are_known_at_numbers() -> None:
    assert recognized(error_functions.graph).weights.op.name == "where"
    report = validate(kernel(error_functions, CUDA), quick=True)
    assert report.ok, str(report)[:2000]


@chain(B=1, L=100, H=2, P=24, D=16)
def viewed(
    c: bf16[B, L, D], b: bf16[B, L, D], x: bf16[B, L, H, P], a: f32[B, L, H],
) -> bf16[B, L, H, P]:  # fmt: skip
    """Mamba-2 within a chunk as its tensors lie: heads behind tokens, and running sums of logarithms."""
    s = F.rearrange(c, "b l d -> b 1 l d") @ F.rearrange(b, "b l d -> b 1 d l")
    rows, keys = F.rearrange(a, "b l h -> b h l 1"), F.rearrange(a, "b l h -> b h 1 l")
    decay = F.where(F.row_index(s) >= F.col_index(s), F.exp(rows - keys), 0.0)
    return F.rearrange((s * decay) @ F.rearrange(x, "b l h p -> b h l p"), "b h l p -> b l h p")


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, HOPPER])
def test_heads_behind_tokens_are_one_kernel(name: str) -> None:
    run = fusegen.compile(viewed, name, on="emulator", validate=False)
    rng = np.random.default_rng(2)
    c, b = (rng.standard_normal((1, 100, 16)).astype(bf16.numpy) for _ in range(2))
    x = rng.standard_normal((1, 100, 2, 24)).astype(bf16.numpy)
    a = np.cumsum(-rng.random((1, 100, 2)), 1).astype(np.float32)
    with np.errstate(over="ignore"):
        decay = np.where(np.tri(100, dtype=bool)[..., None], np.exp(a[0, :, None] - a[0, None]), 0)
    weights = (c[0].astype(np.float64) @ b[0].astype(np.float64).T)[..., None] * decay
    wanted = np.einsum("sth,thp->shp", weights, x[0].astype(np.float64))
    found = np.asarray(run(c, b, x, a)).astype(np.float64)[0]
    assert np.abs(found - wanted).max() < 2e-2 * np.abs(wanted).max()
    assert validate(run, quick=True).ok
    plans = [step.plan for step in run.plan.steps] if isinstance(run, Program) else [run.plan]
    assert any(plan.rule.startswith("attention") for plan in plans)


def test_what_is_said_of_them() -> None:
    found = candidates(of("retained").graph, A100)
    said = str(explanation(found))
    assert "made of each score by itself" in said
    assert "keys behind the last that a block's rows need are neither read nor multiplied" in said


def test_one_kernel_is_taken_where_it_is_faster() -> None:
    for spec in free_attentions.FREE:
        one, program = kernels_of(spec.graph, target(HOPPER))
        assert one.plans, spec.name
        assert program is None, spec.name


@chain(B=1, H=4, S=64, T=65536, D=128)
def few_rows(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    return F.sigmoid(q @ k.mT * 0.1) @ v


@chain(B=1, H=4, S=64, T=65536, D=128)
def few_rows_viewed(q: bf16[B, S, H, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    return F.sigmoid(F.rearrange(q, "b s h d -> b h s d") @ k.mT * 0.1) @ v


@pytest.mark.parametrize("spec", [few_rows, few_rows_viewed], ids=lambda spec: spec.name)
def test_several_kernels_are_taken_where_one_leaves_a_gpu_idle(spec: Chain) -> None:
    _, program = kernels_of(spec.graph, target(HOPPER))
    assert program is not None
    assert len(program.steps) == 2
    few = spec.at(T=1024)
    one, program = kernels_of(few.graph, target(HOPPER))
    rules = [one.plans[0].rule] if program is None else [step.plan.rule for step in program.steps]
    assert all(rule.startswith("attention") for rule in rules)
