"""Networks that sort: lanes with several delegates, and keys in one word with their columns; each chooses the best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusegen import bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.language.spec import Chain
from fusegen.runtime import Kernel, finding
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
@pytest.mark.parametrize("one", [ranked, rounded], ids=lambda one: one.name)
def test_keys_in_one_word_with_their_columns_choose_the_best(one: Chain, name: str, k: int) -> None:
    tried = set()
    for cols in (24, 64, 129):
        for plan in plans_of(one, name, V=cols, K=k):
            assert plan.selection is not None
            if plan.selection.packed and (lanes := (plan.tile.threads_per_row, plan.selection.k)) not in tried:
                tried.add(lanes)
                report = validate(kernel(plan), quick=True)
                assert report.ok, f"{plan.configuration}\n{report}"
    assert tried


def test_only_keys_of_16_bits_have_room_for_columns() -> None:
    def packed(one: Chain, **sizes: int) -> bool:
        return any(plan.selection is not None and plan.selection.packed for plan in plans_of(one, "cuda:h200", **sizes))

    assert packed(ranked, V=512, K=3)
    assert not packed(ranked.with_dtype(f32), V=512, K=3)
    assert packed(ranked.with_dtype(f16), V=512, K=3)
    assert not packed(ranked, V=64, K=17), "more words than a lane sorts at a time"


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("(last_column - col)", "col"),
        ("words[r] > masked", "words[r] > 0"),
        ("max(words[q], words[first + q])", "max(words[q], words[first])"),
        ("? falling : !(q & size)", "? true : !(q & size)"),
    ],
)
def test_a_wrong_network_is_caught(text: str, instead: str) -> None:
    plan = next(p for p in plans_of(ranked, "cuda:h200", V=64, K=3) if p.selection is not None and p.selection.packed)
    source = render(plan)
    assert text in source.text
    wrong = replace(source, text=source.text.replace(text, instead))
    device = finding.find(plan.target, "emulator")
    assert not validate(Kernel(wrong, None, device, lambda layout: (wrong, None)), quick=True).ok
