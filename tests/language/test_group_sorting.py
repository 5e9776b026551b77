"""Slots sorted by the group that each of them names: kernels against plain sorting, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegen
from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import NoPlan, SpecError
from fusegen.planner import candidates
from fusegen.planner.sorting.plan import SlotsPlan, SlotTile
from fusegen.planner.sorting.rule import with_fewer_slots
from fusegen.runtime import Kernel, Program, finding
from fusegen.targets import target
from fusegen.validation import validate
from fusegen.validation.few_parts import no_variant
from tests.specs import FEW, SHIPPED

pytestmark = pytest.mark.usefixtures("emulated_only")

TARGETS = ("cuda:h200", "cuda:a100", "hip:mi300x")
T, S, N, K, E = dims("T S N K E")
Array = np.ndarray[Any, np.dtype[Any]]


@chain(T=7, E=5)
def by_group(ids: i32[T, 3]) -> tuple[i32[3 * T], i32[E], i32[T, 3]]:
    return F.sort_by_group(ids, E)


@chain(S=9)
def of_one_axis(ids: i32[S]) -> tuple[i32[S], i32[4], i32[S]]:
    return F.sort_by_group(ids, 4)


@chain(T=24, N=32, K=32, E=4)
def of_counts(x: bf16[T, K], w: bf16[E, N, K], counts: i32[E]) -> f32[T, N]:
    """Ends that the chain computes."""
    return F.grouped_matmul(x, w.mT, F.cumsum(counts))


def obvious(ids: Array, groups: int) -> tuple[Array, Array, Array]:
    """By sorting, in words: slots of no group behind all others."""
    flat = ids.reshape(-1).astype(np.int64)
    order = np.argsort(np.where((flat < 0) | (flat >= groups), groups, flat), kind="stable")
    ends = np.array([((flat >= 0) & (flat <= group)).sum() for group in range(groups)])
    return order, ends, np.argsort(order).reshape(ids.shape)


KERNELS: dict[tuple[Any, ...], Any] = {}


def compiled(one: Any, on: str, **sizes: int) -> Any:
    key = (one.name, on, *sizes.items())
    if key not in KERNELS:
        KERNELS[key] = fusegen.compile(one.at(**sizes), on, on="emulator")
    return KERNELS[key]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), on=st.sampled_from(TARGETS), tokens=st.sampled_from([1, 2, 7]))
def test_slots_are_sorted_by_their_groups(data: st.DataObject, on: str, tokens: int) -> None:
    """Groups are empty, have all slots, or are none: ids of -1, of E, and far ones."""
    pool = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, -1, -7, 5, 99, 2**31 - 1, -(2**31)]), min_size=1))
    ids = data.draw(st.lists(st.sampled_from(pool), min_size=3 * tokens, max_size=3 * tokens))
    given_ids = np.array(ids, np.int32).reshape(tokens, 3)
    found = compiled(by_group, on, T=tokens)(given_ids)
    for got, wanted in zip(found, obvious(given_ids, 5), strict=True):
        assert np.array_equal(got, wanted)


def planned(on: str, warps: int, cluster: int = 1, slots: int = 2500) -> SlotsPlan:
    """`of_many` with so many warps: of few, a lane has several rounds of slots."""
    found = (p for p in candidates(of_many.at(S=slots).graph, target(on)).plans if isinstance(p, SlotsPlan))
    return next(p for p in found if (p.tile.warps, p.cluster) == (warps, cluster))


def of_warps(on: str, warps: int, cluster: int = 1, slots: int = 2500) -> Kernel:
    plan = planned(on, warps, cluster, slots)
    return Kernel(render(plan), None, finding.find(plan.target, "emulator", check=True), no_variant)


@chain(S=2500, E=70)
def of_many(ids: i32[S]) -> tuple[i32[S], i32[E], i32[S]]:
    return F.sort_by_group(ids, E)


BLOCKS = [
    ("cuda:a100", 4, 1), ("cuda:h200", 32, 1), ("hip:mi300x", 4, 1), ("hip:mi300x", 16, 1),
    ("cuda:h200", 4, 2), ("cuda:h200", 16, 2), ("cuda:h200", 8, 4), ("cuda:h200", 32, 4), ("cuda:h200", 16, 8),
    ("cuda:h200", 4, 16), ("cuda:h200", 8, 16),
]  # fmt: skip
"""Target, warps of a block, blocks: of one slot a lane, of some, and of several rounds."""


@pytest.mark.parametrize(("on", "warps", "cluster"), BLOCKS)
def test_blocks_of_every_size_sort_alike(on: str, warps: int, cluster: int) -> None:
    """Of many slots some lanes have several rounds, and the last warps have none; a group has one slot, or none."""
    rng, kernel = np.random.default_rng(warps), of_warps(on, warps, cluster)
    for ids in (rng.integers(-2, 75, 2500), np.full(2500, 69), rng.choice([0, 3, 99], 2500)):
        ids[1111] = 17
        found = kernel(ids.astype(np.int32))
        for got, wanted in zip(found, obvious(ids, 70), strict=True):
            assert np.array_equal(got, wanted)


@settings(max_examples=15, deadline=None)
@given(
    data=st.data(), blocks=st.sampled_from([(4, 2), (8, 4), (4, 16)]), slots=st.sampled_from([1100, 1500, 2048]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_clusters_sort_any_slots(data: st.DataObject, blocks: tuple[int, int], slots: int, seed: int) -> None:
    """Runs of one id, of none, and of some in random order, as they fall into warps and blocks."""
    key = ("clusters", blocks, slots)
    if key not in KERNELS:
        KERNELS[key] = of_warps("cuda:h200", *blocks, slots)
    rng = np.random.default_rng(seed)
    pool = data.draw(st.lists(st.integers(-2, 71), min_size=1, max_size=9))
    ids = np.repeat(rng.choice(pool, slots), data.draw(st.sampled_from([1, 3, 200])))[:slots]
    for got, wanted in zip(KERNELS[key](ids.astype(np.int32)), obvious(ids, 70), strict=True):
        assert np.array_equal(got, wanted)


def test_a_cluster_has_many_slots_and_a_block_few() -> None:
    """And where blocks can't read each other's counts, one has them all."""
    assert planned_first("cuda:h200", 65536).cluster > 1
    assert planned_first("cuda:h200", 256).cluster == 1
    assert planned_first("cuda:a100", 65536).cluster == 1
    assert planned_first("hip:mi300x", 65536).cluster == 1
    assert "in a cluster of 2 blocks of 4 warps, 512 slots each" in planned("cuda:h200", 4, 2).regime


def planned_first(on: str, slots: int) -> SlotsPlan:
    plan = candidates(of_many.at(S=slots).graph, target(on)).plans[0]
    assert isinstance(plan, SlotsPlan)
    return plan


@pytest.mark.parametrize(("slots", "turns", "rounds"), [(1200, 4, 1), (700, 4, 2), (500, 3, 3), (9, 1, 1)])
def test_fewer_slots_by_the_warps_and_blocks_of_more(slots: int, turns: int, rounds: int) -> None:
    """As a smaller layer is validated: blocks behind the second may have none."""
    graph = of_one_axis.at(S=65536).graph
    many = next(p for p in candidates(graph, target("cuda:h200")).plans if isinstance(p, SlotsPlan) and p.cluster == 4)
    many = replace(many, tile=SlotTile(warps=4, turns=4 * rounds, batch=4, cluster=4))
    plan = with_fewer_slots(many, of_one_axis.at(S=slots).graph)
    assert (plan.threads, plan.cluster, plan.tile.turns, plan.tile.rounds) == (128, 4, turns, rounds)
    kernel = Kernel(render(plan), None, finding.find(target("cuda:h200"), "emulator"), no_variant)
    ids = np.random.default_rng(4).integers(-1, 5, slots).astype(np.int32)
    for got, wanted in zip(kernel(ids), obvious(ids, 4), strict=True):
        np.testing.assert_array_equal(got, wanted)


FAULTS = {
    "counts that are not cleared": ("(&counted[0][0])[at] = 0;", ";"),
    "a warp's second round goes where its first one went": (
        "        if ((same & lanes_below) == 0) counted[warp][named[i]] += count(same);\n", ""),
    "counts that lanes write over": ("atomicAdd(&counted[warp][named[i]], 1)", "counted[warp][named[i]] += 1"),
    "warps before count for nothing": ("total += own;", "total = own;"),
    "groups before count for nothing": ("before += __shfl", "before = __shfl"),
    "slots of one group in any order": ("count(same & lanes_below)", "count(same & ~lanes_below) - 1"),
    "ids behind the last group": ("0 <= id && id < groups ?", "0 <= id ?"),
    "negative ids": ("0 <= id && id < groups ?", "id < groups ?"),
    "lanes that don't wait for one another": ("    meet();\n      if", "      if"),
    "warps that don't wait for one another": ("  __syncthreads();\n\n  // of each group", "\n  // of each group"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str) -> None:
    old, new = FAULTS[fault]
    kernel = of_warps("cuda:h200", 4)
    text = kernel.source.text.replace(old, new)
    assert text != kernel.source.text
    wrong = Kernel(replace(kernel.source, text=text), None, kernel.device, no_variant)
    assert not validate(wrong, quick=True).ok


CLUSTER_FAULTS = {
    "blocks before count for nothing": ("if (block < rank) before += there;", ""),
    "a block counts its own slots twice": ("if (block < rank)", "if (block <= rank)"),
    "groups of this block alone": ("    total += there;", "    total = of_block[group];"),
    "counts that are read before they are there": (
        "  __cluster_barrier_arrive();\n  __cluster_barrier_wait();\n", "  __cluster_barrier_arrive_relaxed();\n"
        "  __cluster_barrier_wait();\n"),
    "a block that ends while another reads": ("  __cluster_barrier_wait();  // no block ends", "  // no block ends"),
    "all blocks have the first one's slots": ("(rank * warps + warp)", "warp"),
}  # fmt: skip


@pytest.mark.parametrize("fault", CLUSTER_FAULTS)
def test_faults_of_clusters_are_caught(fault: str) -> None:
    old, new = CLUSTER_FAULTS[fault]
    kernel = of_warps("cuda:h200", 4, 4)
    text = kernel.source.text.replace(old, new)
    assert text != kernel.source.text
    wrong = Kernel(replace(kernel.source, text=text), None, kernel.device, no_variant)
    assert not validate(wrong, quick=True).ok


def test_more_groups_than_a_block_counts_are_refused() -> None:
    with pytest.raises(NoPlan, match="by 60000 groups, whose counts of 4 warps take 1200020 bytes of shared memory"):
        fusegen.plan(of_many.at(E=60000), target("cuda:h200"))


@pytest.mark.parametrize("on", TARGETS)
@pytest.mark.parametrize("one", [by_group, of_one_axis, of_counts], ids=lambda one: one.name)
def test_kernels_pass(one: Any, on: str) -> None:
    assert validate(compiled(one, on), quick=True).ok


def test_ends_may_be_computed() -> None:
    kernel = compiled(of_counts, "cuda:h200")
    assert isinstance(kernel, Program)
    assert len(kernel.plan.steps) == 2
    rng = np.random.default_rng(3)
    x, w = (rng.standard_normal(shape).astype(bf16.numpy) for shape in ((24, 32), (4, 32, 32)))
    counts = np.array([3, 0, 11, 4], np.int32)
    group = np.repeat(np.arange(5), [3, 0, 11, 4, 6])
    wide = np.concatenate([w, np.zeros_like(w[:1])]).astype(np.float64)
    wanted = np.einsum("tk,tnk->tn", x.astype(np.float64), wide[group])
    np.testing.assert_allclose(kernel(x, w, counts), wanted, atol=1e-4)


@pytest.mark.parametrize("on", TARGETS)
def test_a_layer_of_experts_is_what_its_experts_make(on: str) -> None:
    """Against numpy, expert by expert; of one token as well."""
    rng = np.random.default_rng(8)
    for tokens in (1, 9):
        sizes = {**FEW["moe_layer"], "T": tokens}
        kernel = compiled(SHIPPED["moe_layer"], on, **sizes)
        d, h, e = sizes["D"], sizes["H"], sizes["E"]
        shapes = ((tokens, d), (e, d), (e, h, d), (e, h, d), (e, d, h))
        x, router, gate, up, down = (rng.standard_normal(s).astype(bf16.numpy) for s in shapes)
        wide = [a.astype(np.float64) for a in (x, router, gate, up, down)]
        wanted = layer(*wide)
        got = kernel(x, router, gate / 8, up / 8, down / 8).astype(np.float64)
        wanted = layer(*wide[:2], *(a / 8 for a in wide[2:]))
        assert np.abs(got - wanted).max() < 0.03 * np.abs(wanted).max()


def layer(x: Array, router: Array, gate: Array, up: Array, down: Array) -> Array:
    result = np.zeros_like(x)
    for token, row in enumerate(x):
        logits = router @ row
        best = np.argsort(-logits)[:4]
        weights = np.exp(logits[best] - logits[best].max())
        for expert, weight in zip(best, weights / weights.sum(), strict=True):
            g = gate[expert] @ row
            result[token] += weight * (down[expert] @ (g / (1 + np.exp(-g)) * (up[expert] @ row)))
    return result


def test_what_is_refused() -> None:
    def refused(said: str, ids: Any, groups: Any) -> None:
        with pytest.raises(SpecError, match=said):

            @chain(T=4)
            def wrong(x: ids) -> i32[T]:
                return F.sort_by_group(x, groups)[0]

    refused("found ids of f32, wanted i32", f32[T, 2], 4)
    refused(r"found ids \[T, 2, 2\], wanted \[T, 8\] or \[S\]", i32[T, 2, 2], 4)
    refused("groups is 0; it is a number of at least 1", i32[T, 2], 0)
