"""What is found of written weights in a graph, and which kernels are planned for them."""

from __future__ import annotations

import re
from typing import Any

import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.planner import candidates
from fusegen.planner.attention.weights_wgmma import WgmmaWeightsPlan, weights_wgmma
from fusegen.planner.attention.written import is_by_row, is_written, written_weights
from fusegen.planner.matching import NoMatch, NotFor
from fusegen.planner.model import Layout
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.rewrites import simplify
from fusegen.targets import A100, H200, TARGETS
from tests import specs, written
from tests.written import weights_plans

H, S, T, D = dims("H S T D")
OF_THEIR_OWN = ("bias", "scores_too", "logs")  # each element of whose results has something of its own


@pytest.mark.parametrize("spec", written.ALL, ids=lambda spec: spec.name)
def test_what_is_found(spec: Chain) -> None:
    found = written_weights(spec.graph)
    assert is_written(spec.graph)
    assert found.exps in found.lowered.ancestors(found.total or found.results[0].node)
    assert (found.total is None) is (spec.name == "unnormalised")
    assert found.plain_pivot is (spec.name not in ("sink", "base_2", "unguarded", "unnormalised"))
    assert is_by_row(found) is (spec.name not in ("scores_too", "logs", "dropped", "hidden"))


@pytest.mark.parametrize(("spec", "reason"), written.REFUSED, ids=lambda value: getattr(value, "name", ""))
def test_what_two_passes_over_keys_cannot_hold(spec: Chain, reason: str) -> None:
    found = candidates(spec.graph, A100)
    assert not [plan for plan in found.plans if plan.rule == "weights"]
    said = next(r.reason for r in found.refusals if r.rule in ("weights", "one kernel"))
    assert re.search(reason, said), said


def test_other_chains_are_none_of_its() -> None:
    others = {**specs.ROWS, **specs.PRODUCTS, **specs.ATTENTION}
    assert not [name for name, spec in others.items() if weights_plans(spec, H200)]


@pytest.mark.parametrize("target", [t for t in TARGETS.values() if t.arch != "gfx1100"], ids=str)
def test_every_target_has_a_candidate_that_fits_it(target: Any) -> None:
    for spec in written.ALL:
        plans = weights_plans(spec, target)
        assert plans, spec.name
        assert all(p.shared_bytes + p.static_shared_bytes <= target.shared_bytes for p in plans)
        assert len({p.configuration for p in plans}) == len(plans)


def test_sums_that_are_no_neighbours_are_not_written() -> None:
    refused = {r.rule: r.reason for r in candidates(written.ALL[0].graph, TARGETS["hip:rx7900xtx"]).refusals}
    assert refused["weights"] == (
        "a lane of gfx1100 has every other column of a product's sums; weights are written by runs"
    )


def test_tiles_of_which_a_mask_leaves_nothing_are_skipped_where_results_are_alike_there() -> None:
    for spec in written.ALL:
        plan = weights_plans(spec, A100)[0]
        masked = spec.name in ("causal", "window", "document", "sink", "unguarded", "wide")
        assert plan.ends.skips is masked, spec.name
    assert not weights_plans(written.scores_too, A100)[0].ends.skips
    assert weights_plans(written.scores_too, A100)[0].ends.settles


# ---------------------------------------------------------------- on Hopper


def hopper(spec: Chain, layout: Layout | None = None, **sizes: int) -> list[WgmmaWeightsPlan]:
    return list(weights_wgmma(simplify(spec.graph.at(**sizes)), H200, layout or Layout()))


def test_a_scale_is_taken_out_of_the_elements_unless_results_are_made_of_logits() -> None:
    """The largest of scaled scores is the scaled largest: no element is multiplied before it meets its power of 2."""
    plan = hopper(written.causal)[0]
    assert plan.scale == 0.125
    assert not plan.free.body
    assert "0.18033688f" in render(plan).text  # log2(e) / 8
    assert hopper(written.scores_too)[0].scale == 1.0
    assert hopper(written.logs)[0].scale == 1.0


def test_results_that_tensor_copies_store() -> None:
    assert set(hopper(written.causal)[0].stored) == {"softmax"}
    assert hopper(written.causal)[0].zeroes
    assert not hopper(written.full)[0].zeroes
    assert not hopper(written.document)[0].stored  # f32
    assert not hopper(written.causal, T=135)[0].stored  # rows that begin at no multiple of 16 bytes
    assert len(hopper(written.scores_too)[0].stored) == 2


def test_heads_of_unequal_rows_are_mixed() -> None:
    """As many as have 8 MB of keys: 32 x 4096 is fastest by 8, us by 8 and 16: 356 and 385, 32 x 2048 111 and 106."""
    spec = specs.WRITTEN["qk_causal_softmax"]
    found = {rows: hopper(spec.at(S=rows, T=rows))[0].heads_together for rows in (512, 2048, 3000, 4096, 8192, 100000)}
    assert found == {512: 32, 2048: 16, 3000: 8, 4096: 8, 8192: 4, 100000: 1}
    assert hopper(written.full)[0].heads_together == 1


def test_what_it_refuses() -> None:
    with pytest.raises(NotFor, match="has no wgmma"):
        list(weights_wgmma(simplify(written.causal.graph), A100, Layout()))
    with pytest.raises(NoMatch, match="multiple of 16 bytes"):
        hopper(written.causal, Layout(unaligned=frozenset({"k"})))
    assert weights_plans(written.causal, H200, Layout(unaligned=frozenset({"k"})))[0].rule == "weights"


# ---------------------------------------------------------------- beside programs


@chain(H=32, S=2048, T=2048, D=128)
def causal(q: bf16[H, S, D], k: bf16[H, T, D]) -> bf16[H, S, T]:
    return F.softmax(F.causal(q @ k.mT * D**-0.5))


def test_one_kernel_where_it_fills_the_gpu_and_several_where_rows_are_too_few() -> None:
    assert fusegen.plan(causal, "cuda:h200").rule == "weights_wgmma"
    few = {"B": 1, "H": 1, "S": 64, "D": 128}
    assert isinstance(fusegen.plan(written.full.at(T=65536, **few), "cuda:h200"), ProgramPlan)
    assert fusegen.plan(written.full.at(T=512, **few), "cuda:h200").rule.startswith("weights")


@chain(H=32, S=2048, T=2048, D=128)
def beside(q: bf16[H, S, D], k: bf16[H, T, D], v: bf16[H, T, D]) -> tuple[bf16[H, S, D], bf16[H, S, T]]:
    p = F.softmax(F.causal(q @ k.mT * D**-0.5))
    return p @ v, p


@pytest.mark.parametrize(("on", "rules"), [
    ("cuda:h200", ["weights_wgmma", "attention_wgmma"]),
    ("cuda:a100", ["weights", "attention"]),
])  # fmt: skip
def test_weights_beside_attention_are_a_kernel_each(on: str, rules: list[str]) -> None:
    found = fusegen.plan(beside, on)
    assert isinstance(found, ProgramPlan)
    assert [step.plan.rule for step in found.steps] == rules


def test_the_most_consumers_of_a_large_problem_are_its_first_candidate() -> None:
    """Measured on an H200: 354, 367, 395 and 437 us with 4, 3, 2 and 2 consumers at 4096."""
    order = [p.configuration for p in weights_plans(causal, H200, S=4096, T=4096)][:4]
    assert order == [f"weights_wgmma {tile} 3" for tile in ("256x128", "128x128", "192x128", "128x64")]
