"""Structs in shared memory, declared once: for the kernel's text, and for the bytes that the planner reckons with."""

from __future__ import annotations

from fusegen.emitting.rendering import render
from fusegen.emitting.selections.small_k import adds_up
from fusegen.planner import candidates
from fusegen.planner.model import RowPlan
from fusegen.planner.selections.picker import picker
from fusegen.planner.structs import Count, Struct, member
from fusegen.targets import H200
from tests.specs import ALL


def test_what_a_struct_prints() -> None:
    warps = Count("warps", 8)
    members = (member("int", "one each", seen=(3,)), member("Entry", found=(2, warps + 1)), member("float", a=(), b=()))
    assert "\n".join(Struct("Found", members).lines()) == (
        "struct alignas(16) Found {\n  int seen[3];  // one each\n  Entry found[2][warps + 1];\n  float a, b;\n};"
    )
    assert Struct("Found", members).bytes == 16 + 2 * 9 * 8 + 2 * 4 + 8  # padded before the entries, and at the end


def test_the_picker_that_a_kernel_declares_is_the_one_that_is_counted() -> None:
    """Of each way of choosing; the kernel's own static_assert holds its size against the launch's bytes. Lanes that
    hand each other their best share none."""
    plans: dict[tuple[str, str, bool, bool], RowPlan] = {}
    for name in ("topk", "router_topk"):
        for plan in candidates(ALL[name].graph, H200).plans:
            assert isinstance(plan, RowPlan)
            assert plan.selection
            way = (plan.rule, plan.selection.by, plan.selection.one_by_one, plan.cluster > 1)
            plans.setdefault(way, plan)
    assert {rule for rule, *_ in plans} == {"topk", "topk_small_k", "topk_large_k"}
    assert {by for _, by, *_ in plans} == {"warp", "streaming", "small_k", "large_k"}
    for plan in plans.values():
        assert plan.selection
        found = picker(plan.selection, plan.tile, plan.target.warp, adds_up(plan))
        check = f'static_assert(sizeof(Picker) <= {found.bytes}, "the launch\'s shared memory");'
        assert plan.shared_bytes == found.bytes
        text = render(plan).text
        assert "\n".join((*found.lines(), check)) in text if found.bytes else "Picker" not in text
