"""Attention on Hopper's tensor cores: what the rule plans and refuses, and what the kernels compute."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.compiling.resources import of_cubin
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError
from fusegen.pipeline import gate
from fusegen.planner.attention.wgmma import WgmmaAttentionPlan
from fusegen.planner.attention.wgmma_rule import attention_wgmma
from fusegen.planner.matching import NoMatch, NotFor
from fusegen.planner.model import Layout, Source
from fusegen.planner.rewrites import simplify
from fusegen.runtime import Kernel, finding
from fusegen.runtime.cache import compiled
from fusegen.targets import H200, target
from fusegen.validation import validate
from tests import attentions, specs
from tests.emitting.test_attention import needs_emulator

A, B, C, H, S, T, D, E = dims("A B C H S T D E")
RIGHT = ("lse", "window", "document", "sink", "bias", "base_2", "dropped", "dropped_twice")


@chain(B=1, H=1, S=140, T=300, D=64, E=64)
def causal(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, E]) -> tuple[bf16[B, H, S, E], f32[B, H, S, 1]]:
    s = F.causal(q @ k.mT * 0.125, 126)  # the first row's keys end one before a tile does
    return F.softmax(s) @ v, F.logsumexp(s)


def plans(spec: Chain, layout: Layout | None = None, **sizes: int) -> list[WgmmaAttentionPlan]:
    graph = spec.graph.at(**sizes) if sizes else spec.graph
    return list(attention_wgmma(simplify(graph), H200, layout or Layout()))


def source(spec: Chain, tile: str, layout: Layout, **sizes: int) -> Source:
    """Of the plan of that tile; of the general rule's first plan for what tensor copies can't move."""
    try:
        found = [p for p in plans(spec, layout, **sizes) if tile in p.configuration]
    except NoMatch:
        return render(attentions.plan_for(spec, "cuda:a100", "", layout, **sizes))
    return render(found[0])


def kernel(spec: Chain, tile: str = "", check: bool = True, **sizes: int) -> Kernel:
    def variant(layout: Layout) -> tuple[Source, None]:
        return source(spec, tile, layout, **sizes), None

    return Kernel(*variant(Layout()), finding.find(H200, "emulator", check=check), variant)


@needs_emulator
@pytest.mark.parametrize("name", RIGHT)
def test_every_chain_is_right(name: str) -> None:
    (spec,) = (spec for spec in attentions.ALL if spec.name == name)
    report = validate(kernel(spec), quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
def test_layouts_strides_and_counts_of_rows() -> None:
    report = validate(kernel(causal, "64x128"))
    assert report.ok, str(report)[:2000]


@chain(B=2, S=140, D=64)
def of_itself(x: bf16[B, S, D]) -> bf16[B, S, D]:
    return F.softmax(x @ x.mT * 0.125) @ x


@chain(B=2, S=140, D=64)
def with_residual(q: bf16[B, S, D], k: bf16[B, S, D], v: bf16[B, S, D]) -> bf16[B, S, D]:
    return F.softmax(q @ k.mT * 0.125) @ v + q


@chain(B=2, S=140, T=300, D=64)
def keys_are_values(q: bf16[B, S, D], k: bf16[B, T, D]) -> bf16[B, S, D]:
    return F.softmax(q @ k.mT * 0.125) @ k


@pytest.mark.parametrize("spec", [of_itself, with_residual], ids=lambda spec: spec.name)
def test_an_operand_that_is_read_in_two_ways_is_refused(spec: Chain) -> None:
    """mma.sync takes it: at any size, the chain has a kernel that can be called."""
    with pytest.raises(NoMatch, match="is used in two ways"):
        plans(spec)
    kernel = fusegen.compile(spec.at(B=8, S=2048), "cuda:h200", on="emulator", validate=False)
    x = np.zeros((8, 2048, 64), bf16.numpy)
    kernel.prepare(*[x] * len(spec.graph.inputs))  # what a launch asks of its plan


@needs_emulator
def test_keys_may_be_values() -> None:
    assert plans(keys_are_values)
    report = validate(kernel(keys_are_values), quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.parametrize(("depth", "width"), [(64, 64), (72, 128), (192, 128), (256, 256)])
def test_every_tile_is_right(depth: int, width: int) -> None:
    """One launch of each, of rows and keys that no tile divides."""
    for plan in plans(causal, D=depth, E=width):
        run = kernel(causal, plan.configuration, D=depth, E=width)
        report = validate(run, quick=True, cases=("normal",))
        assert report.ok, f"{plan.configuration}: {str(report)[:1500]}"


@needs_emulator
def test_the_fast_build_gives_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 64)).astype(bf16.numpy) for n in (140, 300, 300))
    found = [kernel(causal, check=check)(q, k, v) for check in (True, False)]
    for one, other in zip(*found, strict=True):
        assert (one.view(np.uint8) == other.view(np.uint8)).all()


@chain(B=1, H=1, S=70, T=70, D=64)
def scaled_by_launch(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], a: f32) -> bf16[B, H, S, D]:
    return F.softmax(q @ k.mT * F.exp(a)) @ v


@needs_emulator
def test_what_is_computed_once_a_launch() -> None:
    report = validate(kernel(scaled_by_launch), quick=True, cases=("normal",))
    assert report.ok, str(report)[:2000]


def test_a_scale_is_taken_out_of_the_elements() -> None:
    """The largest of scaled scores is the scaled largest: no element is multiplied before it meets its power of 2."""
    plan = plans(causal)[0]
    assert plan.scale == 0.125
    assert not plan.free.body
    assert "0.18033688f" in render(plan).text  # log2(e) / 8
    assert plans(attentions.softcap)[0].scale == 1.0  # by a run-time number, whose sign is not known
    assert plans(attentions.bias)[0].scale == 1.0


@chain(B=1, H=2, S=140, T=300, D=64)
def capped(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    return F.softmax(5.0 * F.tanh(q @ k.mT * (0.125 / 5.0))) @ v


@needs_emulator
def test_a_soft_cap_is_right_of_small_and_of_large_scores() -> None:
    assert plans(capped)[0].tangent
    report = validate(kernel(capped))
    assert report.ok, str(report)[:2000]


@needs_emulator
def test_a_polynomial_gives_the_bits_of_the_tanh() -> None:
    """Of a warp whose scores are all small it is the whole of it, so that a row's bits don't depend on other rows."""
    made = source(capped, "128x128", Layout())
    vote = "__all_sync(0xffffffffu, reach < 0.45f)"
    assert vote in made.text
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 3, n, 64)).astype(bf16.numpy) for n in (140, 300, 300))
    q[:, 0] *= np.asarray(0.25, bf16.numpy)  # of the first head all scores are small, of the second some of each warp
    q[:, 2], k[:, 2] = -abs(q[:, 2]), abs(k[:, 2])  # and of the third all are below the polynomial's reach
    found = []
    for text in (made.text, made.text.replace(vote, "false"), made.text.replace(vote, "true")):
        other = replace(made, text=text)
        run = Kernel(other, None, finding.find(H200, "emulator"), lambda layout, other=other: (other, None))  # type: ignore[misc]
        found.append(run(q, k, v).view(np.uint16))
    voted, never, always = found
    assert (voted == never).all()
    assert (always[:, 0] == never[:, 0]).all()
    assert (always[:, 1:] != never[:, 1:]).any((0, 2, 3)).all(), "beyond 0.45 it is no tanh"


def test_several_tangents_of_a_score_are_not_voted_on() -> None:
    assert not plans(capped_twice)[0].tangent


@chain(B=1, H=2, S=140, T=300, D=64)
def capped_twice(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    s = q @ k.mT * 0.125
    return F.softmax(5.0 * F.tanh(s / 5.0) + F.tanh(s)) @ v


def test_chains_of_a_row() -> None:
    """Even and odd columns apart, but where each score has an operand or a tanh of its own."""
    assert plans(causal)[0].two_chains
    assert not plans(attentions.bias)[0].two_chains
    assert not plans(capped)[0].two_chains


def test_rows_of_unequal_length_are_mixed() -> None:
    """As many heads as the L2 cache holds the keys and values of."""
    big = causal.at(B=1, H=64, S=4096, T=4096, D=128, E=128)
    assert plans(big)[0].heads_together == 8
    assert plans(big, S=65536, T=65536)[0].heads_together == 1
    assert plans(attentions.plain)[0].heads_together == 1
    assert "heads at a time" in render(plans(big)[0]).text


def test_what_it_refuses() -> None:
    with pytest.raises(NotFor, match="has no wgmma"):
        list(attention_wgmma(simplify(causal.graph), target("cuda:a100"), Layout()))
    with pytest.raises(NoMatch, match="multiple of 16 bytes"):
        plans(causal, Layout(unaligned=frozenset({"k"})))
    with pytest.raises(NoMatch, match="q moves along 6 axes, and a tensor copy along 5"):
        plans(many_axes, Layout(split=True))
    with pytest.raises(NotFor, match="two products"):
        plans(specs.ALL["rmsnorm"])


@chain(A=2, B=2, C=2, H=2, S=70, T=130, D=64)
def many_axes(q: bf16[A, B, C, H, S, D], k: bf16[H, T, D], v: bf16[H, T, D]) -> bf16[A, B, C, H, S, D]:
    return F.softmax(q @ k.mT) @ v


# ---------------------------------------------------------------- as it is shipped


@pytest.mark.parametrize("sizes", [{}, {"D": 64}, {"D": 80}, {"D": 256}], ids=str)
def test_first_candidates_pass_the_gate(sizes: dict[str, int]) -> None:
    made = render(plans(specs.ALL["causal_attention"], None, **sizes)[0])
    try:
        binary = compiled(made)
    except MissingError as missing:
        pytest.skip(str(missing).splitlines()[0])
    assert binary is not None
    assert not gate(binary.resources)


def test_products_that_wait_for_one_another_do_not_pass_the_gate() -> None:
    log = (
        "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the function 'f'\n"
        "ptxas info    : Compiling entry function 'f' for 'sm_90a'\nptxas info    : Function properties for f\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 168 registers\n"
    )
    found = of_cubin(compiled_cubin(), log, "f", 0)
    assert found.serialized == "insufficient register resources"
    assert "wait for one another: insufficient register resources" in gate(found)


def compiled_cubin() -> bytes:
    """Some ELF file."""
    try:
        binary = compiled(render(attentions.plan_for(attentions.tiny, "cuda:a100")))
    except MissingError as missing:
        pytest.skip(str(missing).splitlines()[0])
    assert binary is not None
    return binary.code


@chain(B=2, S=1, T=256, D=64)
def nothing_left(q: bf16[B, S, D], k: bf16[B, T, D], v: bf16[B, T, D]) -> bf16[B, S, D]:
    s = q @ k.mT * 0.125
    return F.softmax(F.where(F.col_index(s) <= F.row_index(s) - 2, s, -inf)) @ v


@needs_emulator
def test_a_mask_that_leaves_no_key_is_planned_and_gives_zeros() -> None:
    """Its blocks have no tile, of whose time a block's is no multiple."""
    found = kernel(nothing_left)(*(np.ones((2, n, 64), bf16.numpy) for n in (1, 256, 256)))
    assert not found.astype(np.float32).any()
