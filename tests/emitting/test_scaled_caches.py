"""Attention to keys and values of 8 bits that have scales, each key its own or one of a head: what is planned."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf

import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f8e4m3, f8e5m2, f16, f32, i8, i32, u8
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.planner.attention.wide_rule import attention_wide
from fusegen.planner.matching import NoMatch
from fusegen.planner.model import Layout, Source
from fusegen.planner.programs import kernels_of
from fusegen.planner.programs.lowering import lowered
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.rewrites import simplify
from fusegen.runtime import Kernel, finding
from fusegen.targets import target
from fusegen.validation import validate
from tests.emitting.test_attention import needs_emulator
from tests.emitting.test_coded_attention import attention_plans

B, G, R, S, T, D, N, P, L = dims("B G R S T D N P L")
TARGETS = ("cuda:h200", "cuda:a100", "hip:mi300x")


@chain(B=2, G=2, R=3, T=200, D=64)
def dequantized(
    q: bf16[B, G, R, D], k: f8e4m3[B, G, T, D], ks: f32[B, G, T, 1], v: f8e4m3[B, G, T, D], vs: f32[B, G, T, 1],
    length: i32[B, 1, 1, 1],
) -> bf16[B, G, R, D]:  # fmt: skip
    """As vLLM's caches with a scale for each token and head: rounded behind the scale, where the author says so."""
    s = q @ F.cast(F.dequantize(k, ks), bf16).mT * D**-0.5
    return F.softmax(F.where(F.col_index(s) < length, s, -inf)) @ F.cast(F.dequantize(v, vs), bf16)


@chain(B=1, G=2, R=4, T=200, D=64)
def rounded_by_the_product(
    q: bf16[B, G, R, 1, D], k: i8[B, G, 1, T, D], ks: bf16[B, G, 1, T, 1], v: i8[B, G, 1, T, D],
    vs: bf16[B, G, 1, T, 1],
) -> bf16[B, G, R, 1, D]:  # fmt: skip
    """No cast: a product rounds what is computed to its other factor's type."""
    weights = F.cast(F.softmax(q @ F.dequantize(k, ks).mT * (D**-0.5 / 100)), bf16)
    return F.cast(weights @ F.dequantize(v, vs), bf16)


@chain(B=2, G=2, R=2, T=100, D=128)
def one_a_head(
    q: f16[B, G, R, D], k: f8e5m2[B, G, T, D], ks: f32[G, 1, 1], v: f8e5m2[B, G, T, D], vs: f32,
) -> f16[B, G, R, D]:  # fmt: skip
    """Scales of a head and of all of the cache, applied before the product as written."""
    weights = F.softmax(q @ F.cast(F.dequantize(k, ks), f16).mT * (D**-0.5 / 64))
    return weights @ F.cast(F.cast(v, f32) * vs, f16)


@chain(B=2, G=1, R=12, T=200, D=64)
def keys_alone(q: f16[B, G, R, D], k: f8e4m3[B, G, T, D], ks: f16[B, T, G], v: f16[B, G, T, D]) -> f16[B, G, R, D]:
    """Scales lie token by token, heads next to each other; values are multiplied as they lie."""
    keys = F.cast(F.dequantize(k, F.rearrange(ks, "b t g -> b g t 1")), f16)
    return F.softmax(q @ keys.mT * D**-0.5) @ v


@chain(B=2, G=1, R=12, T=200, D=64)
def values_alone(q: bf16[B, G, R, D], k: bf16[B, G, T, D], v: i8[B, G, T, D], vs: f16[B, G, T, 1]) -> bf16[B, G, R, D]:
    return F.softmax(q @ k.mT * D**-0.5) @ F.cast(F.cast(v, bf16) * F.cast(vs, bf16), bf16)


@chain(B=2, G=1, R=3, T=72, D=64)
def with_zeros(
    q: bf16[B, G, R, D], k: u8[B, G, T, D], ks: f32[B, G, T, 1], zero: u8[B, G, T, 1], v: u8[B, G, T, D],
) -> bf16[B, G, R, D]:  # fmt: skip
    """Codes of no sign, less a zero of their key's; one scale for keys and values, which is made of two."""
    keys = (F.cast(k, f32) - F.cast(zero, f32)) * (ks * 0.01)
    values = F.cast((F.cast(v, f32) - F.cast(zero, f32)) * ks, bf16)
    return F.softmax(q @ F.cast(keys, bf16).mT * D**-0.5) @ values


@chain(B=2, G=2, R=2, N=40, P=13, L=16, D=64)
def in_pages(
    q: bf16[B, G, R, D], cache: f8e4m3[N, L, G, D], ks: f32[N, L, G, 1], values: f8e4m3[N, L, G, D], vs: f32[N, L, G],
    table: i32[B, P], length: i32[B, 1, 1, 1],
) -> bf16[B, G, R, D]:  # fmt: skip
    """Scales in the pages of what they scale."""
    k, v, k_scale = (F.rearrange(F.gather(x, table), "b p l g d -> b g (p l) d") for x in (cache, values, ks))
    v_scale = F.rearrange(F.gather(vs, table), "b p l g -> b g (p l) 1")
    s = q @ F.cast(F.dequantize(k, k_scale), bf16).mT * D**-0.5
    return F.softmax(F.where(F.col_index(s) < length, s, -inf)) @ F.cast(F.dequantize(v, v_scale), bf16)


@chain(B=2, G=2, R=2, N=40, P=13, L=16, D=64)
def in_other_pages(
    q: bf16[B, G, R, D], cache: f8e4m3[N, L, G, D], ks: f32[N, L, G, 1], values: f8e4m3[N, L, G, D],
    table: i32[B, P], scale_table: i32[B, P],
) -> bf16[B, G, R, D]:  # fmt: skip
    """Scales that a table of their own finds."""
    k, v = (F.rearrange(F.gather(x, table), "b p l g d -> b g (p l) d") for x in (cache, values))
    k_scale = F.rearrange(F.gather(ks, scale_table), "b p l g d -> b g (p l) d")
    s = q @ F.cast(F.dequantize(k, k_scale), bf16).mT * D**-0.5
    return F.softmax(s) @ F.cast(v, bf16)


@chain(B=1, G=8, R=4, S=2048, T=2048, D=128)
def of_many_rows(
    q: bf16[B, G, R, S, D], k: f8e4m3[B, G, 1, T, D], ks: f32[B, G, 1, T, 1], v: f8e4m3[B, G, 1, T, D],
    vs: f32[B, G, 1, T, 1],
) -> bf16[B, G, R, S, D]:  # fmt: skip
    s = F.causal(q @ F.cast(F.dequantize(k, ks), bf16).mT * D**-0.5)
    return F.softmax(s) @ F.cast(F.dequantize(v, vs), bf16)


@chain(B=2, R=12, T=200, D=64)
def of_one_latent_row(
    q: bf16[B, R, D], kv: f8e4m3[B, T, D], ks: f32[B, T, 1], vs: f32[B, T, 1],
) -> bf16[B, R, D]:  # fmt: skip
    """Values are the keys, but for their scales."""
    return F.softmax(q @ F.cast(kv * ks, bf16).mT * D**-0.5) @ F.cast(kv * vs, bf16)


@chain(B=2, R=12, T=200, D=64)
def of_one_scaled_row(q: bf16[B, R, D], kv: f8e4m3[B, T, D], scale: f32[B, T, 1]) -> bf16[B, R, D]:
    """Values are the keys, which a kernel reads once."""
    rows = F.cast(kv * scale, bf16)
    return F.softmax(q @ rows.mT * D**-0.5) @ rows


FUSED = [
    dequantized,
    rounded_by_the_product,
    one_a_head,
    keys_alone,
    with_zeros,
    in_pages,
    of_one_latent_row,
    of_one_scaled_row,
]


@needs_emulator
@pytest.mark.parametrize("on", TARGETS)
@pytest.mark.parametrize("spec", FUSED, ids=lambda spec: spec.name)
def test_every_chain_is_right(spec: Chain, on: str) -> None:
    """And one kernel reads keys and values, once: it, or it and what brings parts together, is all that is planned."""
    _, program = kernels_of(spec.graph, target(on))
    assert program is None or len(program.steps) <= 2
    (plan,) = attention_plans(spec, on)
    assert plan.key.scaled
    report = validate(fusegen.compile(spec, on, on="emulator", validate=False, tuned=False), quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.parametrize("on", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize("spec", [rounded_by_the_product, keys_alone, values_alone], ids=lambda spec: spec.name)
def test_every_tile_is_right(spec: Chain, on: str) -> None:
    """Of several tiles of keys, by one kernel: those of which one factor lies as it is multiplied, too."""
    graph = simplify(lowered(spec.graph).graph)
    for plan in attention_wide(graph, target(on), Layout()):

        def variant(layout: Layout, configuration: str = plan.configuration) -> tuple[Source, None]:
            found = attention_wide(graph, target(on), layout)
            return render(next(p for p in found if p.configuration == configuration)), None

        report = validate(Kernel(*variant(Layout()), finding.find(target(on), "emulator"), variant), quick=True)
        assert report.ok, f"{plan.configuration}: {str(report)[:2000]}"


def test_rows_are_shared_where_the_same_is_made_of_their_codes() -> None:
    graphs = (simplify(lowered(spec.graph).graph) for spec in (of_one_latent_row, of_one_scaled_row))
    assert [next(attention_wide(graph, target("cuda:h200"), Layout())).shared for graph in graphs] == [False, True]


@needs_emulator
def test_scales_of_other_pages_are_gathered_first() -> None:
    (plan,) = attention_plans(in_other_pages, "cuda:h200")
    assert plan.key.scaled
    assert "ks" not in {access.tensor for access in plan.accesses}
    report = validate(fusegen.compile(in_other_pages, "cuda:h200", on="emulator", validate=False), quick=True)
    assert report.ok, str(report)[:2000]


def test_scales_and_codes_of_one_kernel_lie_in_the_same_pages() -> None:
    graph = simplify(lowered(in_other_pages.graph).graph)
    with pytest.raises(NoMatch, match="ks lies in pages, and cache, which it meets, in none or in others"):
        list(attention_wide(graph, target("cuda:h200"), Layout()))


def test_of_many_rows_they_are_widened_once() -> None:
    """Tiles of rows would each scale all keys again."""
    (plan,) = attention_plans(of_many_rows, "cuda:h200")
    assert (plan.rule, plan.widens) == ("attention_wgmma", False)


def test_a_cache_is_read_once() -> None:
    """Of 8 sequences of 8192 keys two kernels are planned, the second one of parts of the result."""
    spec = dequantized.at(B=8, G=8, R=4, T=8192, D=128)
    _, program = kernels_of(spec.graph, target("cuda:h200"))
    assert isinstance(program, ProgramPlan)
    assert len(program.steps) == 2
    assert program.time_us < 60


# of which keys have scales, where, what is found, and what stands there instead
MUTATIONS = {
    "the scales of keys for values": (dequantized, "cuda:h200", r"vs_held\[v\]\.at", "ks_held[v].at"),
    "the next key's scale": (dequantized, "cuda:h200", r"ks_from \+ \(key0", "ks_from + (key0 - (key0 > 0)"),
    "no scale of keys": (dequantized, "cuda:h200", r"ks_held\[v\]\.at\[0\]", "1.0f"),
    "one number for both of a pair": (dequantized, "cuda:h200", r"step\(high\)", "step(low)"),
    "a pair's numbers by turns": (rounded_by_the_product, "cuda:h200", r"0x7441", "0x7440"),
    "codes unscaled": (keys_alone, "hip:mi300x", r"\(step\((.*)\)\);", r"(\1);"),
}


@needs_emulator
@pytest.mark.parametrize("name", MUTATIONS)
def test_broken_scales_are_caught(name: str) -> None:
    spec, on, pattern, replacement = MUTATIONS[name]
    (plan,) = attention_plans(spec, on)
    whole = render(plan)
    text, count = re.subn(pattern, replacement, whole.text)
    assert count

    def variant(layout: Layout) -> tuple[Source, None]:
        return replace(whole, text=text), None

    report = validate(Kernel(*variant(Layout()), finding.find(plan.target, "emulator"), variant), quick=True)
    assert not report.ok
