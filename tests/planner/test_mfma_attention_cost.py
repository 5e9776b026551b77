"""What attention by MFMA is planned to take: by the facts of a compute unit, each of which counts where it should."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, i32
from fusegen import ops as F
from fusegen.language.spec import load_chains
from fusegen.planner import candidates
from fusegen.planner.attention.masks import mask_of
from fusegen.planner.attention.mfma_cost import (
    Loop,
    fill_share,
    lds_cycles,
    loop_of,
    registers_of,
    settled_operations,
    tile_cycles,
    vector_turns,
)
from fusegen.planner.attention.parts import AttentionPlan
from fusegen.planner.attention.rule import checked
from fusegen.planner.attention.wide import WideAttentionPlan
from fusegen.planner.programs.key_parts import numbers_of_parts
from fusegen.planner.programs.model import ProgramPlan
from fusegen.targets import MI250X, MI300X, MI355X, Target
from fusegen.targets.compute_unit import unit_of

UNIT = unit_of(MI300X)
assert UNIT is not None
RATE, LATENCY = UNIT.l2_bytes, UNIT.cache_latency
# 64 queries and keys of 128 bf16 numbers, by four waves
LOOP = Loop(
    rows=64, keys=64, waves=4, beside=1, depth=128, width=128, held=True, together=False, turned=True, paged=False,
    instruction="v_mfma_f32_16x16x16bf16_1k", deep=16, operations=0, specials=0, draws=0, software_bf16=True,
)  # fmt: skip
B, H, S, T, D, E = dims("B H S T D E")
SHIPPED = {one.name: one for one in load_chains(Path(__file__).parents[2] / "specs")}


@chain(B=1, H=2, S=256, T=256, D=64)
def causal(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    return F.softmax(F.causal(q @ k.mT * D**-0.5)) @ v


def took(loop: Loop = LOOP, held: int = 1, rate: float = RATE, latency: int = LATENCY) -> float:
    assert UNIT is not None
    return tile_cycles(UNIT, loop, held, rate, latency)


def test_cycles_of_a_tile_are_those_that_are_counted() -> None:
    """Of each wave: 4 fragments of keys by 8 steps of 16 numbers, and 4 steps of 16 keys by 8 fragments of values."""
    assert UNIT is not None
    assert LOOP.products == 4 * 8 + 4 * 8
    assert LOOP.scores == 16
    assert LOOP.brought == (4, 4)
    assert LOOP.bytes == 2 * 64 * 256
    stored, read = lds_cycles(UNIT, LOOP)
    # 4 vectors of keys, 32 halves of values one by one, two exchanges; both tiles
    assert stored == 4 * 8 + 32 * 2 + 2 * 2
    assert read == 2 * 64 * 256 / 128


def test_no_limit_of_a_tile_is_undercut() -> None:
    assert UNIT is not None
    for held in (1, 2, 3):
        assert took(held=held) >= held * LOOP.products * UNIT.matrix_cycles(LOOP.instruction)
        assert took(held=held) >= held * LOOP.waves * sum(lds_cycles(UNIT, LOOP))
        assert took(held=held) >= held * 4 * vector_turns(LOOP)
        assert took(held=held) >= held * LOOP.bytes / RATE
        assert took(held=held) >= LATENCY


def test_each_fact_counts_where_it_should() -> None:
    assert UNIT is not None
    base, three = took(), took(held=3)
    assert base < three < 3 * base  # which overlap
    slow = replace(UNIT, passes={16: 16, 32: 32})
    assert tile_cycles(slow, LOOP, 3, RATE, LATENCY) > 1.8 * three
    assert tile_cycles(replace(UNIT, lds_bytes=32, lds_read_bytes=32), LOOP, 3, RATE, LATENCY) > 1.5 * three
    assert took(rate=2.0) > LOOP.bytes / 2.0
    assert took(latency=20000) > 20000
    assert took(replace(LOOP, software_bf16=False)) < base
    assert took(replace(LOOP, operations=7)) > 1.05 * base
    assert took(replace(LOOP, specials=1), held=3) > 1.3 * three
    assert took(replace(LOOP, draws=1), held=3) > 1.5 * three
    paged = replace(LOOP, paged=True)
    assert took(paged) > base + LATENCY
    shared = replace(LOOP, beside=4, waves=16, turned=False)
    assert took(shared) > base  # which meet twice more, and read values one by one
    assert took(replace(shared, together=True)) < took(shared)


def test_registers_are_those_of_what_a_thread_holds() -> None:
    """hiprtc 7.2 gives 166 on gfx942, and on gfx950 136."""
    cdna4 = unit_of(MI355X)
    assert UNIT is not None
    assert cdna4 is not None
    assert registers_of(UNIT, LOOP) == pytest.approx(166, rel=0.15)
    assert registers_of(cdna4, LOOP) == pytest.approx(136, rel=0.15)


def test_what_a_mask_settles_is_asked_in_few_tiles() -> None:
    found = checked(causal.graph)
    mask = mask_of(found)
    assert UNIT is not None
    plan = next(p for p in candidates(causal.graph, MI300X).plans if isinstance(p, AttentionPlan))
    loop = loop_of(found, UNIT, plan.tile, plan.atom, (plan.query, plan.key, plan.value))
    assert len(plan.tested.body) - len(plan.free.body) == settled_operations(found, mask) == loop.operations


def test_heads_that_run_at_once_fill_each_die() -> None:
    """Of blocks next to each other, which go to the dies in turn, each die has some of every head."""
    assert fill_share(MI300X, 1, 8) == 1.0
    assert fill_share(MI300X, 1, 304) == 1 / 38
    assert fill_share(replace(MI300X, dies=1), 1, 8) == 1 / 8


def test_few_keys_are_dealt_a_tile_to_each_block() -> None:
    graph = SHIPPED["decode_attention"].at(T=640).graph
    assert (32, 20) in set(numbers_of_parts(graph, 640, MI300X))
    assert (32, 10) in set(numbers_of_parts(graph, 640, MI300X))


@pytest.mark.parametrize("on", [MI250X, MI300X, MI355X], ids=str)
@pytest.mark.parametrize("name", ["mla_decode", "paged_attention", "decode_attention"])
def test_scores_of_one_token_are_in_no_memory(name: str, on: Target) -> None:
    """One kernel goes over the keys, and one brings its parts together."""
    plan = fusegen.plan(SHIPPED[name], on, tuned=False)
    assert isinstance(plan, ProgramPlan)
    first, second = (step.plan for step in plan.steps)
    assert isinstance(first, AttentionPlan)
    assert isinstance(first, WideAttentionPlan) == (name == "mla_decode")
    assert first.parts > 1
    assert second.rule == "rowwise"


@chain(B=8, H=16, T=8192, D=576, E=512)
def few_heads(q: bf16[B, H, D], kv: bf16[B, T, D], length: i32[B, 1, 1]) -> bf16[B, H, E]:
    scores = q @ kv.mT * 0.0625
    return F.softmax(F.where(F.col_index(scores) < length, scores, -inf)) @ kv[..., :E]


@pytest.mark.parametrize("one", [SHIPPED["mla_decode"].at(B=64), few_heads], ids=["many sequences", "few heads"])
def test_latent_rows_are_read_once(one: Chain) -> None:
    plan = fusegen.plan(one, MI300X, tuned=False)
    assert any(isinstance(step.plan, WideAttentionPlan) for step in getattr(plan, "steps", ()))


def test_rows_have_enough_bytes_on_their_way() -> None:
    """What memory gives a compute unit of an MI300X in its latency, 5.3 TB/s by 350 ns, is 6.1 KB; a row kernel's
    blocks ask for five times as much at once, and more, so that latency does not decide between its plans."""
    assert UNIT is not None
    needed = MI300X.dram_gbs * UNIT.dram_ns / MI300X.sms
    assert needed == pytest.approx(6102, abs=1)
    counted = 0
    for one in SHIPPED.values():
        plans = candidates(one.graph, MI300X).plans
        if plans and plans[0].rule in ("rowwise", "elementwise") and plans[0].cost.bound == "memory":
            counted += 1
            if plans[0].cost.floor_us > 10:
                assert plans[0].cost.in_flight_bytes > 5 * needed, one.name
    assert counted > 15
