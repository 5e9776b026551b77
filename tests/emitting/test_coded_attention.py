"""Attention to keys and values of 8 bits: what is planned for them, and what the kernels compute."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf

import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f8e4m3, f8e5m2, f16, i8, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.planner.attention.parts import AttentionPlan
from fusegen.planner.attention.wgmma_rule import attention_wgmma
from fusegen.planner.attention.wide_rule import attention_wide
from fusegen.planner.matching import NoMatch
from fusegen.planner.model import Layout, Source
from fusegen.planner.programs import kernels_of
from fusegen.planner.programs.lowering import lowered
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.rewrites import simplify
from fusegen.runtime import Kernel, finding
from fusegen.targets import H200, target
from fusegen.validation import validate
from tests import specs
from tests.emitting.test_attention import needs_emulator

B, G, R, S, T, D, N, P, L = dims("B G R S T D N P L")
KV8 = specs.SHIPPED["kv8_attention"].at(**specs.FEW["kv8_attention"])
TARGETS = ("cuda:h200", "cuda:a100", "hip:mi300x", "hip:mi355x", "hip:gfx1201")


@chain(B=2, G=1, R=3, T=200, D=64)
def of_i8(q: bf16[B, G, R, D], k: i8[B, G, T, D], v: i8[B, G, T, D]) -> bf16[B, G, R, D]:
    """Scores of whole numbers, and all keys."""
    return F.softmax(q @ F.cast(k, bf16).mT * (D**-0.5 / 200)) @ F.cast(v, bf16) * 0.01


@chain(B=2, G=1, R=12, T=200, D=64)
def keys_alone(q: f16[B, G, R, D], k: f8e5m2[B, G, T, D], v: f16[B, G, T, D]) -> f16[B, G, R, D]:
    """Values lie as they are multiplied."""
    return F.softmax(q @ F.cast(k, f16).mT * D**-0.5) @ v


@chain(B=2, G=1, R=12, T=200, D=64)
def values_alone(q: f16[B, G, R, D], k: f16[B, G, T, D], v: f8e5m2[B, G, T, D]) -> f16[B, G, R, D]:
    return F.softmax(q @ k.mT * D**-0.5) @ F.cast(v, f16)


@chain(B=2, G=2, R=2, N=40, P=13, L=16, D=64)
def in_pages(
    q: bf16[B, G, R, D], cache: f8e4m3[N, G, L, D], values: f8e4m3[N, G, L, D],
    table: i32[B, P], length: i32[B, 1, 1, 1],
) -> bf16[B, G, R, D]:  # fmt: skip
    k, v = (F.rearrange(F.gather(x, table), "b p g l d -> b g (p l) d") for x in (cache, values))
    s = q @ F.cast(k, bf16).mT * D**-0.5
    return F.softmax(F.where(F.col_index(s) < length, s, -inf)) @ F.cast(v, bf16)


@chain(B=1, G=8, S=4096, T=4096, D=128)
def of_many_rows(q: bf16[B, G, S, D], k: f8e4m3[B, G, T, D], v: f8e4m3[B, G, T, D]) -> bf16[B, G, S, D]:
    return F.softmax(F.causal(q @ F.cast(k, bf16).mT * D**-0.5)) @ F.cast(v, bf16)


def attention_plans(spec: Chain, on: str) -> list[AttentionPlan]:
    """The attention among the kernels that are planned for a chain."""
    one, program = kernels_of(spec.graph, target(on))
    plans = [step.plan for step in program.steps] if isinstance(program, ProgramPlan) else one.need()[:1]
    return [plan for plan in plans if isinstance(plan, AttentionPlan)]


@needs_emulator
@pytest.mark.parametrize("on", TARGETS)
@pytest.mark.parametrize("spec", [KV8, of_i8, keys_alone, in_pages], ids=lambda spec: spec.name)
def test_every_chain_is_right(spec: Chain, on: str) -> None:
    (plan,) = attention_plans(spec, on)
    assert plan.widens
    report = validate(fusegen.compile(spec, on, on="emulator", validate=False, tuned=False), quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.parametrize("on", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize("spec", [of_i8, keys_alone, values_alone], ids=lambda spec: spec.name)
def test_every_tile_is_right(spec: Chain, on: str) -> None:
    """Of several tiles of keys, by one kernel: those of which one factor lies as it is multiplied, too."""
    graph = simplify(lowered(spec.graph).graph)
    for plan in attention_wide(graph, target(on), Layout()):

        def variant(layout: Layout, plan: AttentionPlan = plan) -> tuple[Source, None]:
            found = attention_wide(graph, target(on), layout)
            return render(next(p for p in found if p.configuration == plan.configuration)), None

        report = validate(Kernel(*variant(Layout()), finding.find(target(on), "emulator"), variant), quick=True)
        assert report.ok, f"{plan.configuration}: {str(report)[:2000]}"


def test_of_many_rows_they_are_widened_once() -> None:
    """Tiles of rows would each widen all keys again; and wgmma multiplies what lies in memory as 16 bits."""
    (plan,) = attention_plans(of_many_rows, "cuda:h200")
    assert (plan.rule, plan.widens) == ("attention_wgmma", False)
    (few,) = attention_plans(specs.SHIPPED["kv8_attention"], "cuda:h200")
    assert (few.rule, few.widens) == ("attention_wide", True)


def test_kernels_that_multiply_keys_as_they_lie_say_so() -> None:
    graph = simplify(lowered(KV8.graph).graph)
    with pytest.raises(NoMatch, match="k lies in memory as numbers of 8 bits; attention makes bf16 of such"):
        list(attention_wgmma(graph, H200, Layout()))


MUTATIONS = {
    "the first pair for both of a word": ("cuda:h200", r"words\.at\[i / 2\] >> i % 2 \* 16", "words.at[i / 2]"),
    "the first word for both": ("cuda:h200", r"words\.at\[i / 2\] >>", "words.at[0] >>"),
    "one code for all of a word": ("hip:mi300x", r"words\.at\[j / 4\] >> j % 4 \* 8", "words.at[j / 4]"),
    "keys for values": ("cuda:h200", r"load_codes<8>\(v_value_from", "load_codes<8>(k_from"),
}


@needs_emulator
@pytest.mark.parametrize("name", MUTATIONS)
def test_broken_widening_is_caught(name: str) -> None:
    on, pattern, replacement = MUTATIONS[name]
    (plan,) = attention_plans(of_i8 if on.startswith("hip") else KV8.at(T=100), on)
    whole = render(plan)
    text, count = re.subn(pattern, replacement, whole.text)
    assert count

    def variant(layout: Layout) -> tuple[Source, None]:
        return replace(whole, text=text), None

    report = validate(Kernel(*variant(Layout()), finding.find(plan.target, "emulator"), variant), quick=True)
    assert not report.ok
