"""Networks that sort: lanes with several delegates, and keys in one word with their columns; each chooses the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.language.spec import Chain
from fusegen.planner import candidates
from fusegen.planner.model import Layout, RowPlan, Source
from fusegen.planner.ways import Packed
from fusegen.runtime import Kernel, finding
from fusegen.targets import target
from fusegen.validation import validate
from tests.emitting.test_topk import TARGETS, kernel, plans_of

pytestmark = pytest.mark.usefixtures("emulated_only")

M, V, K = dims("M V K")


@chain(M=13, V=40, K=3)
def ranked(x: bf16[M, V]) -> tuple[f32[M, K], i32[M, K]]:
    return F.topk(x, K)


@pytest.mark.by_values("name", "k")
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("name", TARGETS)
def test_lanes_with_several_delegates_choose_the_best(name: str, k: int) -> None:
    """Of short rows, of ties, of NaN and of what is masked, by every number of lanes and delegates."""
    tried = set()
    for cols in (24, 64, 129):
        for plan in plans_of(ranked, name, V=cols, K=k):
            assert plan.selection is not None
            lanes = (plan.tile.threads_per_row, plan.selection.delegates)
            if plan.selection.delegates > 1 and lanes not in tried:
                tried.add(lanes)
                report = validate(kernel(plan), quick=True)
                assert report.ok, f"{plan.configuration}\n{report}"
    assert tried or k in (1, 13)


@chain(M=13, V=40, K=3)
def rounded(x: f32[M, V], bias: f32[V]) -> i32[M, K]:
    """Of a softmax by hand, of which a row of nothing but -inf makes NaN."""
    key = F.cast(x + bias, f16)
    e = F.exp(key - F.max(key))
    return F.topk(e / F.sum(e), K)[1]


@pytest.mark.pairwise("one", "name", "k")
@pytest.mark.parametrize("k", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    "one", [ranked, ranked.with_dtype(f16), ranked.with_dtype(f32), rounded], ids=lambda one: str(one.graph)
)
def test_keys_in_one_word_with_their_columns_choose_the_best(one: Chain, name: str, k: int) -> None:
    tried = set()
    for cols in (24, 64, 129):
        for plan in plans_of(one, name, V=cols, K=k):
            assert plan.selection is not None
            way, lanes = plan.selection.way, plan.tile.threads_per_row
            if isinstance(way, Packed) and (lanes, way.group) not in tried:
                tried.add((lanes, way.group))
                report = validate(kernel(plan), quick=True)
                assert report.ok, f"{plan.configuration}\n{report}"
    assert tried
    grouped = one.graph.inputs[0].dtype is not f32 and name.startswith("cuda") and k in (2, 3, 8)
    assert any(group > 1 for _, group in tried) == grouped


def test_columns_have_room_in_words_beside_keys_of_16_bits_and_clip_those_of_32() -> None:
    def packed(one: Chain, **sizes: int) -> set[bool]:
        plans = (plan for plan in plans_of(one, "cuda:h200", **sizes) if plan.selection and plan.selection.packed)
        return {"constexpr Entry place_bits = 0x1ffu;" in render(plan).text for plan in plans}

    assert packed(ranked, V=512, K=3) == {False}
    assert packed(ranked.with_dtype(f32), V=512, K=3) == {True}
    assert packed(ranked.with_dtype(f16), V=512, K=3) == {False}
    assert not packed(ranked, V=64, K=17), "more words than a lane sorts at a time"


def clipped(cols: int, k: int) -> Iterator[RowPlan]:
    """Plans of f32 by each number of lanes."""
    found = {
        plan.tile.threads_per_row: plan for plan in plans_of(ranked.with_dtype(f32), "cuda:h200", V=cols, K=k)
        if plan.selection and plan.selection.packed
    }  # fmt: skip
    yield from found.values()


def emulated(source: Source) -> Kernel:
    device = finding.find(source.plan.target, "emulator")
    return Kernel(source, None, device, lambda layout: (source, None))


def close_keys(cols: int) -> np.ndarray:
    """13 rows: keys that differ in their last bits alone, some equal, of either sign; and such keys among others."""
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 40, (13, cols)).astype(np.int32)
    keys = (np.float32(1.5).view(np.int32) + steps).view(np.float32)
    keys[4:8] *= -1
    keys[8:, : cols // 2] = rng.standard_normal((5, cols // 2))
    return rng.permuted(keys, axis=1)


@pytest.mark.parametrize(("cols", "k"), [(24, 3), (64, 1), (64, 6), (64, 8), (129, 5)])
def test_keys_that_words_have_no_room_for_are_told_apart(cols: int, k: int) -> None:
    """And where words tell all keys apart, nothing is chosen again."""
    x = close_keys(cols)
    apart = np.random.default_rng(1).permuted(np.tile(np.arange(cols, dtype=np.float32) - 9, (13, 1)), axis=1)
    for plan in clipped(cols, k):
        for keys, text in ((x, ""), (apart, "own_keys[")):
            source = render(plan)
            again = "if (vote(again)) {"
            assert again in source.text
            if text:  # a fault that shows wherever it is come to
                source = replace(source, text=source.text.replace(again, f"{again} own_keys[0] = 0.0f; picks[0] = 0;"))
            values, columns = emulated(source)(keys)
            wanted = np.argsort(-keys, axis=1, kind="stable")[:, :k]
            np.testing.assert_array_equal(columns, wanted, err_msg=plan.configuration)
            np.testing.assert_array_equal(values, np.take_along_axis(keys, wanted, 1))


def swapped(rank: int) -> np.ndarray:
    """One row of 64 keys that are far apart, but those of a rank and the next: their words are the wrong way round."""
    keys = np.random.default_rng(2).permuted(np.arange(1, 65, dtype=np.float32))
    first, second = sorted(np.argsort(-keys)[[rank, rank + 1]])
    keys[first] = keys[[first, second]].max()
    keys[second] = np.nextafter(keys[first], np.float32(100))
    return keys[None]


CLOSE_WRONG = (
    (7, "bool again = missed != 0;", "bool again = false;"),
    (7, "> last_key;", ">= last_key + 1.0f;"),
    (0, "again |= own_keys[q] < own_keys[q + 1]", "again |= false"),
    (1, "&& own_keys[1] < next_key", "&& false"),
    (1, "alike(picks[q], q < 1 ? picks[q + 1] : behind)", "false"),
    (6, "(order & place_bits) << 6", "0u"),
    (6, "low < limit && ", ""),
    (6, "alike(head, order)", "true"),
    (6, "<= place_bits", "== 0"),
)


@pytest.mark.parametrize(("rank", "text", "instead"), CLOSE_WRONG)
def test_a_wrong_choice_between_close_keys_is_caught(rank: int, text: str, instead: str) -> None:
    [plan] = [plan for plan in clipped(64, 8) if plan.tile.threads_per_row == 4]
    source, keys = render(plan), swapped(rank)
    wanted = np.argsort(-keys, axis=1, kind="stable")[:, :8]
    assert text in source.text
    wrong = replace(source, text=source.text.replace(text, instead))
    for one, right in ((source, True), (wrong, False)):
        _, columns = emulated(one)(keys)
        assert (columns == wanted).all() == right


@pytest.mark.parametrize(("k", "together"), [(4, 2), (6, 2), (8, 4)])
def test_ranks_of_a_lane_are_written_as_vectors_where_rows_of_results_start_aligned(k: int, together: int) -> None:
    graph, aim = ranked.at(V=64, K=k).graph, target("cuda:h200")
    whole, loose = (
        next(p for p in candidates(graph, aim, layout).plans
             if isinstance(p, RowPlan) and p.selection and p.selection.packed and p.tile.threads_per_row == 2)
        for layout in (Layout(), Layout(unaligned=frozenset(["values"])))
    )  # fmt: skip
    assert {a.name: a.vector for a in whole.accesses if a.output} == dict.fromkeys(("values", "columns"), together)
    assert "values_row[rank] = " not in render(whole).text
    assert "values_row[rank] = " in render(loose).text
    assert validate(kernel(whole), quick=True).ok
    assert validate(kernel(loose), quick=True).ok


WRONG = (
    (1, "* 0x10001u - 0x10000u", "* 0x10001u"),  # two keys at one place
    (1, "own_row < rows", "true"),
    (1, "entry > masked", "true"),
    (1, "others[3 - q]", "others[q]"),
    (1, "q + step < 4", "q + step < 3"),
    (1, "0x1054", "0x3254"),
    (1, ": min(half[q], beyond[q])", ": max(half[q], beyond[q])"),
    (4, "best_groups[q] += (3 - lane)", "best_groups[q] += lane"),
    (4, "larger_pair(pairs[v * 4], pairs[v * 4 + 1])", "pairs[v * 4]"),
    (4, "pairs[v * 4 + 3], pairs[v * 4 + 2]", "pairs[v * 4 + 2], pairs[v * 4 + 3]"),
    (4, "spot * 0x20002u + 0x20003u", "spot * 0x20002u + 1"),
    (4, "half[1]", "half[0]"),
    (4, "__byte_perm(first, second, 0x5410)", "0u"),
)


@pytest.mark.parametrize(("group", "text", "instead"), WRONG)
def test_a_wrong_network_is_caught(group: int, text: str, instead: str) -> None:
    plan = next(
        p for p in plans_of(ranked, "cuda:h200", V=128, K=3)
        if p.selection is not None and isinstance(p.selection.way, Packed) and p.selection.way.group == group
        and p.tile.threads_per_row == 4 and p.threads == 128
    )  # fmt: skip
    source = render(plan)
    assert text in source.text
    wrong = replace(source, text=source.text.replace(text, instead))
    assert not validate(emulated(wrong), quick=True).ok
