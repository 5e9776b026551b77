"""Attention of long rows, and latent attention: right on every target, kv read once, and refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fusegen
from fusegen import Chain, Program, bf16, chain, dims, i32
from fusegen import ops as F
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.errors import ArgumentError
from fusegen.pipeline import compile_program
from fusegen.planner import candidates
from fusegen.planner.attention.wide import WideAttentionPlan
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.search import cheapest
from fusegen.reporting.explaining import product_sections
from fusegen.runtime import Kernel
from fusegen.runtime.arguments import begin_together
from fusegen.runtime.arrays import ArrayView
from fusegen.targets import target
from fusegen.validation import validate
from tests import attentions
from tests.emitting.test_attention import kernel
from tests.specs import SHIPPED

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("emulated_only")

B, S, H, N, P, L, T, D, E = dims("B S H N P L T D E")
TARGETS = ("cuda:h200", "cuda:a100", "hip:mi300x", "hip:mi250x")
MLA = SHIPPED["mla_decode"]


def dealt(spec: Chain, on: str, keys: int, parts: int) -> Program:
    """The chain's program with so many parts, which are dealt so many keys at a time."""
    plan = cheapest(spec.graph, target(on), dealt=(keys, parts))
    return compile_program(plan, on="emulator", validate=False, tuned=False, as_planned=True)


def planned(spec: Chain, on: str) -> ProgramPlan:
    plan = fusegen.plan(spec, on, tuned=False)
    assert isinstance(plan, ProgramPlan)
    return plan


def wide_in(plan: ProgramPlan) -> WideAttentionPlan:
    (found,) = (step.plan for step in plan.steps if isinstance(step.plan, WideAttentionPlan))
    return found


def made(spec: Chain, target: str = "cuda:a100") -> Program:
    program = fusegen.compile(spec, target, on="emulator", validate=False)
    assert isinstance(program, Program)
    return program


@pytest.mark.parametrize("on", ["cuda:a100", "hip:mi300x", "hip:mi355x"])
@pytest.mark.parametrize("spec", attentions.WIDE, ids=lambda spec: spec.name)
def test_long_rows_are_right(spec: Chain, on: str) -> None:
    report = validate(kernel(spec, on, "wide"), quick=True)
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("on", ["cuda:a100", "hip:gfx90a"])
def test_layouts_of_long_rows(on: str) -> None:
    report = validate(kernel(attentions.long_values, on, "wide"))
    assert report.ok, str(report)[:2000]
    assert any(case.name == "layout: odd stride" for case in report.cases)


@pytest.mark.parametrize("on", TARGETS)
def test_latent_attention_by_numpy_of_the_tests_own(on: str) -> None:
    """Rows of 576 numbers, the first 512 of them values; no keys at all, one, a tile and one, and all of them."""
    lengths = np.array([0, 1, 33, 150], np.int32)
    program = dealt(MLA.at(B=4, H=20, T=150), on, 32, 2)
    rng = np.random.default_rng(0)
    q, kv = (rng.standard_normal((4, n, 576)).astype(bf16.numpy) for n in (20, 150))
    out = np.asarray(program(q, kv, lengths.reshape(4, 1, 1))).astype(np.float64)
    assert out.shape == (4, 20, 512)
    assert (out[0] == 0).all()
    for own, length, heads, rows in zip(out[1:], lengths[1:], q[1:], kv[1:], strict=True):
        keys = rows[:length].astype(np.float64)
        scores = heads.astype(np.float64) @ keys.T * 192**-0.5
        e = np.exp(scores - scores.max(-1, keepdims=True))
        np.testing.assert_allclose(own, e / e.sum(-1, keepdims=True) @ keys[:, :512], atol=2e-2)


@pytest.mark.parametrize("on", ["cuda:a100", "hip:mi300x"])
def test_latent_attention_in_every_layout(on: str) -> None:
    program = dealt(MLA.at(B=2, H=20, T=100, D=288, E=256), on, 64 if on.startswith("cuda") else 32, 2)
    assert wide_in(program.plan).shared
    report = validate(program)
    assert report.ok, str(report)[:2000]
    assert any(case.name == "layout: offset by one" for case in report.cases)


def test_drafted_tokens_and_their_heads_are_rows_and_keys_are_dealt() -> None:
    """Rows are S * H, a size that the chain has no dim for: of each token, its own and all keys before it."""
    program = made(attentions.drafted)
    assert wide_in(program.plan).parts > 1
    assert [str(b.type.shape[2]) for b in program.plan.between] == ["H * S"] * 3
    rng = np.random.default_rng(0)
    q, kv = (rng.standard_normal(shape).astype(bf16.numpy) for shape in ((3, 2, 12, 288), (3, 2100, 288)))
    lengths = np.array([1, 700, 2099], np.int32)
    out = np.asarray(program(q, kv, lengths.reshape(3, 1, 1))).astype(np.float64)
    for own, tokens, rows, length in zip(out, q, kv, lengths, strict=True):
        for s in range(2):
            keys = rows[: length + s].astype(np.float64)
            scores = tokens[s].astype(np.float64) @ keys.T * 0.0625
            e = np.exp(scores - scores.max(-1, keepdims=True))
            np.testing.assert_allclose(own[s], e / e.sum(-1, keepdims=True) @ keys[:, :256], atol=2e-2)


# ---------------------------------------------------------------- kv is read once


@pytest.mark.parametrize("on", [on for on in TARGETS if on != "cuda:h200"])
def test_values_come_with_the_keys(on: str) -> None:
    """The floor is that of one reading; no stride of the values is handed over, as nothing is read by it."""
    wide = wide_in(planned(MLA, on))
    values = next(t for t in wide.cost.traffic.tensors if t.tensor == wide.attention.inputs[2].name)
    assert wide.shared
    assert values.moved == 0
    kept = sum(t.ideal for t in wide.cost.traffic.tensors if t.output)
    assert wide.cost.traffic.ideal - kept == 2 * 8 * 576 * (128 + 8192) + 4 * 8
    assert {a.tensor for a in wide.accesses if not a.output} == {"q", "kv", "length"}
    said = "\n".join(point.text for section in product_sections(wide) for point in section.points)
    assert "is the first columns of kv: a tile is brought once" in said
    assert "put together in shared memory" in said


def starts(first: int, last: int) -> Chain:
    @chain(B=2, H=20, T=100, D=320)
    def columns(q: bf16[B, H, D], kv: bf16[B, T, D]) -> bf16[B, H, 256]:
        return F.softmax(q @ kv.mT * 0.0625) @ kv[..., first:last]

    return columns


def test_other_columns_of_the_keys_are_read_for_themselves() -> None:
    """Values that begin elsewhere lie elsewhere in a line; the first ones come with the keys."""
    for first, shared in ((0, True), (64, False)):
        program = made(starts(first, first + 256))
        assert wide_in(program.plan).shared is shared
        report = validate(program, quick=True)
        assert report.ok, str(report)[:2000]


# ---------------------------------------------------------------- in pages


@chain(B=2, H=20, N=11, P=9, L=16, D=288, E=256)
def two_tables(
    q: bf16[B, H, D], cache: bf16[N, L, D], table: i32[B, P], other: i32[B, P],
) -> bf16[B, H, E]:  # fmt: skip
    k = F.rearrange(F.gather(cache, table), "b p l d -> b (p l) d")
    v = F.rearrange(F.gather(cache, other), "b p l d -> b (p l) d")
    return F.softmax(q @ k.mT * 0.0625) @ v[..., :E]


@pytest.mark.parametrize("on", ["cuda:a100", "hip:mi300x"])
def test_latent_rows_in_pages_by_numpy_of_the_tests_own(on: str) -> None:
    """Read where they lie, once for both products; a page that is not there is zeros."""
    program = made(attentions.paged, on)
    assert wide_in(program.plan).shared
    assert not any(node.op.name == "gather" for step in program.plan.steps for node in step.graph.nodes)
    rng = np.random.default_rng(0)
    q, cache = (rng.standard_normal(shape).astype(bf16.numpy) for shape in ((2, 20, 288), (11, 16, 288)))
    table, lengths = rng.integers(0, 11, (2, 9)).astype(np.int32), np.array([70, 144], np.int32)
    table[1, 3] = -1
    out = np.asarray(program(q, cache, table, lengths.reshape(2, 1, 1))).astype(np.float64)
    for own, heads, pages, length in zip(out, q, table, lengths, strict=True):
        rows = np.where((pages >= 0)[:, None, None], cache.astype(np.float64)[pages], 0.0).reshape(-1, 288)[:length]
        scores = heads.astype(np.float64) @ rows.T * 0.0625
        e = np.exp(scores - scores.max(-1, keepdims=True))
        np.testing.assert_allclose(own, e / e.sum(-1, keepdims=True) @ rows[:, :256], atol=2e-2)


def test_columns_of_other_pages_are_read_for_themselves() -> None:
    program = made(two_tables)
    assert not wide_in(program.plan).shared
    report = validate(program, quick=True)
    assert report.ok, str(report)[:2000]


# ---------------------------------------------------------------- when it is not so


def test_two_arrays_are_no_keys_and_their_columns() -> None:
    """A step's kernel is told where its operands lie by its program: called with others it refuses."""
    step = made(starts(0, 256)).kernels[0]
    assert isinstance(step, Kernel)
    q, kv = np.zeros((2, 20, 320), bf16.numpy), np.zeros((2, 100, 320), bf16.numpy)
    with pytest.raises(ArgumentError, match="as columns of kv: call its program"):
        step(q, kv, np.zeros((2, 100, 256), bf16.numpy))


def test_columns_begin_where_rows_do() -> None:
    rows = ArrayView(1024, bf16, (2, 100, 320), (32000, 320, 1), None)  # type: ignore[arg-type]
    part = replace(rows, shape=(2, 100, 256))
    assert begin_together(part, rows)
    assert not begin_together(replace(part, address=1026), rows)
    assert not begin_together(replace(part, strides=(25600, 256, 1)), rows)
    assert not begin_together(replace(part, shape=(2, 99, 256)), rows)


# ---------------------------------------------------------------- what is refused, and what is not its business


def test_values_that_warps_can_not_share_evenly_are_refused() -> None:
    found = candidates(attentions.long_rows.at(E=328).graph, target("cuda:a100"))
    assert not found.plans
    (said,) = (r.reason for r in found.refusals if r.rule == "attention_wide")
    assert "values go in multiples of 32" in said


def test_short_rows_are_left_to_one_warp() -> None:
    plans = candidates(attentions.wide.graph, target("cuda:a100")).plans
    assert plans
    assert {plan.rule for plan in plans} == {"attention"}


def test_all_heads_of_a_latent_row_are_dealt_and_more_rows_are_not() -> None:
    few = planned(MLA.at(B=1), "cuda:a100")
    assert [step.name for step in few.steps] == ["mla_decode_out_parts", "mla_decode_out"]
    many = planned(MLA.at(B=1, H=1024, T=2048), "cuda:a100")
    assert not any(step.graph.deals for step in many.steps)


def test_few_queries_that_share_long_keys_are_products_apart() -> None:
    """One query a head, as rows of their own: each head's block would read all keys. All heads as rows are one tile."""

    @chain(B=8, H=128, T=8192, D=512)
    def heads_apart(q: bf16[B, H, 1, D], k: bf16[B, 1, T, D], v: bf16[B, 1, T, D]) -> bf16[B, H, 1, D]:
        return F.softmax(q @ k.mT * 0.0625) @ v

    assert not any(isinstance(s.plan, WideAttentionPlan) for s in planned(heads_apart, "cuda:h200").steps)
    assert wide_in(planned(MLA, "cuda:a100")).parts > 1
