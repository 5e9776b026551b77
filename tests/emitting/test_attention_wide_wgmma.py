"""Latent attention on Hopper's tensor cores: what the rule plans and refuses, and what the kernels compute."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from fusegen import Chain, Program, bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError
from fusegen.pipeline import compile_program, gate
from fusegen.planner.attention.wide_wgmma import WideWgmmaAttentionPlan
from fusegen.planner.attention.wide_wgmma_rule import attention_wide_wgmma
from fusegen.planner.matching import NoMatch, NotFor
from fusegen.planner.model import Layout, Source
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.search import cheapest
from fusegen.planner.rewrites import simplify
from fusegen.reporting.explaining import product_sections
from fusegen.runtime import Kernel, finding
from fusegen.runtime.cache import compiled
from fusegen.targets import H200, target
from fusegen.validation import validate
from tests import attentions, specs
from tests.emitting.test_attention import needs_emulator
from tests.specs import SHIPPED

B, S, T, D = dims("B S T D")
MLA = SHIPPED["mla_decode"]


@chain(B=2, S=70, T=330, D=384)
def keys_are_values(q: bf16[B, S, D], k: bf16[B, T, D]) -> tuple[bf16[B, S, D], f32[B, S, 1]]:
    """Values of as many numbers as the keys: weights have a place of their own."""
    s = F.causal(q @ k.mT * 0.0625, 190)  # the first row's keys end one before a tile does
    return F.softmax(s) @ k, F.logsumexp(s)


@chain(B=2, S=70, T=200, D=384)
def started(q: bf16[B, S, D], k: bf16[B, T, D], start: i32[B, S, 1]) -> bf16[B, S, D]:
    """Each row has a first key of its own."""
    s = q @ k.mT * 0.0625
    return F.softmax(F.where(F.col_index(s) >= start, s, -inf)) @ k


@chain(B=2, S=70, T=200, D=384)
def around(
    q: bf16[B, S, D], k: bf16[B, T, D], bias: bf16[S, T], gate: bf16[B, S, D], sink: f32[B, 1, 1],
) -> bf16[B, S, D]:  # fmt: skip
    """An operand with an element for each score, a pivot that is not the largest logit, and steps behind."""
    s = q @ k.mT * 0.0625 + bias
    top = F.maximum(F.max(s), sink)
    e = F.exp(s - top)
    return e @ k / (F.sum(e) + F.exp(sink - top)) * F.sigmoid(gate)


def plan_of(spec: Chain, layout: Layout | None = None) -> WideWgmmaAttentionPlan:
    (found,) = attention_wide_wgmma(simplify(spec.graph), H200, layout or Layout())
    return found


def source(spec: Chain, layout: Layout) -> Source:
    """Of the rule's plan; of mma.sync's for what tensor copies can't move."""
    try:
        return render(plan_of(spec, layout))
    except NoMatch:
        return render(attentions.plan_for(spec, "cuda:a100", "wide", layout))


def kernel(spec: Chain) -> Kernel:
    def variant(layout: Layout) -> tuple[Source, None]:
        return source(spec, layout), None

    return Kernel(*variant(Layout()), finding.find(H200, "emulator", check=True), variant)


def dealt(spec: Chain, parts: int) -> Program:
    """The chain's program with so many parts; of 0, one kernel, as is planned for many sequences."""
    plan = cheapest(spec.graph, H200, dealt=(64, parts)) if parts else cheapest(spec.at(B=128).graph, H200)
    assert wide_in(plan).parts == parts
    return compile_program(plan, on="emulator", validate=False, tuned=False, as_planned=True)


def wide_in(plan: ProgramPlan) -> WideWgmmaAttentionPlan:
    (found,) = (step.plan for step in plan.steps if isinstance(step.plan, WideWgmmaAttentionPlan))
    return found


def expected(heads: np.ndarray, rows: np.ndarray, scale: float, width: int) -> np.ndarray:
    keys = rows.astype(np.float64)
    scores = heads.astype(np.float64) @ keys.T * scale
    e = np.exp(scores - scores.max(-1, keepdims=True))
    found: np.ndarray = e / e.sum(-1, keepdims=True) @ keys[:, :width]
    return found


@needs_emulator
@pytest.mark.parametrize("parts", [0, 2])
def test_latent_attention_by_numpy_of_the_tests_own(parts: int) -> None:
    """No keys at all, one, a tile and the keys beside it, two tiles and one key, an odd and an even number of tiles."""
    lengths = np.array([0, 1, 63, 64, 65, 129, 350, 384], np.int32)
    program = dealt(MLA.at(B=8, H=70, T=384), parts)
    rng = np.random.default_rng(0)
    q, kv = (rng.standard_normal((8, n, 576)).astype(bf16.numpy) for n in (70, 384))
    out = np.asarray(program(q, kv, lengths.reshape(8, 1, 1))).astype(np.float64)
    assert out.shape == (8, 70, 512)
    assert (out[0] == 0).all()
    for own, length, heads, rows in zip(out[1:], lengths[1:], q[1:], kv[1:], strict=True):
        np.testing.assert_allclose(own, expected(heads, rows[:length], 192**-0.5, 512), atol=2e-2)


@needs_emulator
def test_drafted_tokens_and_their_heads_are_rows() -> None:
    """Rows are S * H, of each token its own and all keys before it: ends rise along a block's rows."""
    program = dealt(attentions.drafted.at(B=2, T=500), 3)
    rng = np.random.default_rng(0)
    q, kv = (rng.standard_normal(shape).astype(bf16.numpy) for shape in ((2, 2, 12, 288), (2, 500, 288)))
    lengths = np.array([1, 499], np.int32)
    out = np.asarray(program(q, kv, lengths.reshape(2, 1, 1))).astype(np.float64)
    for own, tokens, rows, length in zip(out, q, kv, lengths, strict=True):
        for s in range(2):
            np.testing.assert_allclose(own[s], expected(tokens[s], rows[: length + s], 0.0625, 256), atol=2e-2)


@needs_emulator
def test_no_tile_behind_a_length_is_read() -> None:
    """NaN there would be NaN times 0."""
    program = dealt(MLA.at(B=1, H=20, T=300), 2)
    q, kv = (np.ones((1, n, 576), bf16.numpy) for n in (20, 300))
    kv[:, 128:] = np.nan
    out = np.asarray(program(q, kv, np.full((1, 1, 1), 100, np.int32))).astype(np.float64)
    assert (out == 1).all()


@needs_emulator
def test_latent_attention_in_every_layout() -> None:
    """Half of the last 64 columns are beyond the keys' 288, and weights lie there."""
    program = dealt(MLA.at(B=2, H=20, T=150, D=288, E=256), 2)
    assert wide_in(program.plan).over_keys
    report = validate(program)
    assert report.ok, str(report)[:2000]
    assert any(case.name == "layout: offset by one" for case in report.cases)


@needs_emulator
@pytest.mark.parametrize("spec", [keys_are_values, started, around, attentions.latent.at(D=512)], ids=lambda s: s.name)
def test_long_rows_are_right(spec: Chain) -> None:
    assert not plan_of(spec).over_keys
    report = validate(kernel(spec), quick=True)
    assert report.ok, str(report)[:2000]


# ---------------------------------------------------------------- in pages


@needs_emulator
@pytest.mark.parametrize("rows", [16, 64, 128])
def test_latent_rows_in_pages_by_numpy_of_the_tests_own(rows: int) -> None:
    """Pages that are a part of a tile, a tile, and two; one that is not there is zeros."""
    pages = 144 // rows + 2
    program = dealt(attentions.paged.at(P=pages, L=rows), 2)
    assert not any(node.op.name == "gather" for step in program.plan.steps for node in step.graph.nodes)
    rng = np.random.default_rng(0)
    q, cache = (rng.standard_normal(shape).astype(bf16.numpy) for shape in ((2, 20, 288), (11, rows, 288)))
    table, lengths = rng.integers(0, 11, (2, pages)).astype(np.int32), np.array([70, 144], np.int32)
    table[1, 1] = -1
    out = np.asarray(program(q, cache, table, lengths.reshape(2, 1, 1))).astype(np.float64)
    for own, heads, named, length in zip(out, q, table, lengths, strict=True):
        there = np.where((named >= 0)[:, None, None], cache.astype(np.float64)[named], 0.0).reshape(-1, 288)
        np.testing.assert_allclose(own, expected(heads, there[:length], 0.0625, 256), atol=2e-2)


# ---------------------------------------------------------------- what is planned, and what is refused


def test_it_is_what_latent_attention_is_planned_by() -> None:
    """By parts for few sequences, by one kernel for many; a tile is read once for both products."""
    for sequences, dealt_to_parts in ((1, True), (8, True), (64, False), (128, False)):
        plan = cheapest(MLA.at(B=sequences).graph, H200)
        wide = wide_in(plan)
        assert (wide.parts > 1) is dealt_to_parts
        said = "\n".join(point.text for section in product_sections(wide) for point in section.points)
        assert "is the first columns of kv: a tile is brought once" in said
        assert "by each of two warpgroups" in said
    assert wide.shared_bytes <= H200.shared_bytes


def test_what_it_refuses() -> None:
    with pytest.raises(NotFor, match="has no wgmma"):
        list(attention_wide_wgmma(simplify(keys_are_values.graph), target("cuda:a100"), Layout()))
    with pytest.raises(NotFor, match="one warpgroup has the sums of 64 rows"):
        plan_of(attentions.plain)
    with pytest.raises(NotFor, match="two products"):
        plan_of(specs.ALL["rmsnorm"])
    with pytest.raises(NoMatch, match="no first columns of the keys"):
        plan_of(attentions.long_rows)
    with pytest.raises(NoMatch, match="share them in multiples of 128"):
        plan_of(attentions.latent)
    with pytest.raises(NoMatch, match="multiple of 16 bytes"):
        plan_of(keys_are_values, Layout(unaligned=frozenset({"k"})))
    with pytest.raises(NoMatch, match="more than a block has room for"):
        plan_of(keys_are_values.at(D=640))
    plan = cheapest(MLA.graph, H200, dealt=(32, 8))  # tiles of 32 keys are mma.sync's
    assert {step.plan.rule for step in plan.steps} == {"attention_wide", "rowwise"}
    pages = cheapest(attentions.paged.at(L=24).graph, H200, dealt=(64, 2))  # no tile is made of pages of 24
    assert {step.plan.rule for step in pages.steps} == {"attention_wide", "rowwise"}


@pytest.mark.parametrize("parts", [0, 8])
def test_its_kernels_pass_the_gate(parts: int) -> None:
    plan = cheapest(MLA.at(B=64).graph, H200) if not parts else cheapest(MLA.graph, H200, dealt=(64, parts))
    try:
        binary = compiled(render(wide_in(plan)))
    except MissingError as missing:
        pytest.skip(str(missing).splitlines()[0])
    assert binary is not None
    assert not gate(binary.resources)
