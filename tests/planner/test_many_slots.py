"""Layers of experts of many tokens: one sort makes all that it gives, and rows go where they take less time."""

from __future__ import annotations

import math

import pytest

from fusegen import bf16, chain, dims, i32
from fusegen import ops as F
from fusegen.planner import candidates
from fusegen.planner.cost import missed_bytes
from fusegen.planner.programs import kernels_of, search
from fusegen.planner.programs.model import ProgramPlan
from fusegen.targets import A100, H200, MI300X, Target
from tests.specs import SHIPPED


def planned(tokens: int, target: Target) -> ProgramPlan:
    _, program = kernels_of(SHIPPED["moe_layer"].graph.at(T=tokens), target)
    assert program is not None
    return program


@pytest.mark.parametrize("target", [H200, A100, MI300X], ids=lambda target: target.arch)
def test_one_kernel_sorts_the_slots_of_many_tokens(target: Target) -> None:
    """Each order that a sort gives is no kernel by itself, however long the sort takes beside one of ends alone."""
    rules = [step.plan.rule for step in planned(65536, target).steps]
    assert rules.count("slot_sort") == 1


@pytest.mark.parametrize("tokens", [8192, 16384, 65536])
def test_rows_are_gathered_on_their_way_in(tokens: int) -> None:
    """The logits are mma.sync's, in the launch of the choice and the sort."""
    steps = planned(tokens, H200).steps
    assert [step.plan.rule for step in steps] == ["gemm", "topk", "slot_sort", "wgmma", "wgmma", "elementwise"]
    assert [step.joined for step in steps] == ["", "behind", "behind", "", "", ""]


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (512, {"D": 4096, "H": 14336, "E": 8}),
        (4096, {"D": 4096, "H": 14336, "E": 8}),
        (2048, {"D": 2880, "H": 2880, "E": 128}),
        (4096, {"D": 7168, "H": 2048, "E": 256}),
        (16384, {"D": 2048, "H": 768, "E": 128}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"{value['E']} experts",
)
def test_layers_have_four_launches_behind_the_logits(tokens: int, sizes: dict[str, int]) -> None:
    """Choice and sort, gate and up, down, and the sum of a token's rows: no copy of rows that a sort names."""
    _, program = kernels_of(SHIPPED["moe_layer"].graph.at(T=tokens, **sizes), H200)
    assert program is not None
    launches = [[step.plan.rule for step in steps] for steps in program.launches]
    logits = len(launches[0]) == 1
    assert len(launches) == 4 + logits
    assert [rules[-1] for rules in launches[logits:]] == ["slot_sort", "wgmma", "wgmma", "elementwise"]


def test_of_programs_that_take_as_long_the_one_of_fewer_kernels_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up in one kernel: 1.0002 of the time of two, between which 235 MB are stored and read."""

    def steps() -> int:
        program = kernels_of(SHIPPED["mlp"].graph, A100)[1]
        assert program is not None
        return len(program.steps)

    assert steps() == 2
    monkeypatch.setattr(search, "UNTOLD_FACTOR", 1.0)
    assert steps() == 3


def test_what_the_cache_has_no_more_of_rows_that_are_named_again() -> None:
    megabyte, l2 = 2**20, float(H200.l2_bytes)
    assert missed_bytes(64 * megabyte, 64 * megabyte, l2) == 0  # each once
    assert missed_bytes(megabyte, 1000 * megabyte, l2) < 1000  # a small table stays there
    assert missed_bytes(1024 * megabyte, 4096 * megabyte, l2) > 0.98 * 3072 * megabyte
    assert missed_bytes(0, 0, l2) == missed_bytes(megabyte, 4 * megabyte, math.inf) == 0


TOKENS, SLOTS, K = dims("T S K")


@chain(T=16384, S=65536, K=2048)
def copied(x: bf16[TOKENS, K], order: i32[SLOTS, 1]) -> bf16[SLOTS, K]:
    return F.gather(x, order)


@pytest.mark.parametrize(("tokens", "measured"), [(16384, 136), (32768, 278), (65536, 560)])
def test_a_copy_of_rows_in_the_order_of_their_experts(tokens: int, measured: float) -> None:
    """By an H200, us, cold L2: rows that are named again lie too far apart for the cache."""
    plan = candidates(copied.graph.at(T=tokens, S=4 * tokens), H200).need()[0]
    assert 0.78 * measured < plan.cost.time_us < measured
