"""What plans of products are made of, whichever instruction multiplies: contractions, operands, how these move."""

from __future__ import annotations

import pytest

from fusegen import Chain
from fusegen.planner import candidates
from fusegen.planner.products.parts import ProductPlan
from fusegen.targets import TARGETS, target
from tests import gemms


def plans(spec: Chain, name: str, **sizes: int) -> list[ProductPlan]:
    found = candidates(spec.at(**sizes).graph, target(name)).plans
    return [plan for plan in found if isinstance(plan, ProductPlan)]


@pytest.mark.parametrize("name", ["cuda:a100", "cuda:h200", "hip:mi300x"])
def test_contractions_of_a_tile_share_their_left_factor(name: str) -> None:
    found = plans(gemms.norm_swiglu, name, M=512, N=1024, K=512)
    assert found
    for plan in found:
        gate, up = plan.contractions
        assert gate.left is up.left
        assert gate.left.prologue is plan.prologue is not None
        assert (gate.right.name, up.right.name) == ("w_gate", "w_up")
        assert gate.atom is up.atom is plan.atom
        assert gate.atom in plan.target.atoms
        assert gate.atom.sums == "registers"
        assert gate.value != up.value
        held = gate.accumulators * plan.threads
        assert held >= plan.tile.rows * plan.tile.cols / plan.products, "every sum of a tile is some thread's"


@pytest.mark.parametrize("name", list(TARGETS))
def test_every_candidate_multiplies_by_an_atom_of_its_target(name: str) -> None:
    for plan in plans(gemms.bias_gelu, name, M=512, N=1024, K=512):
        assert plan.atom in plan.target.atoms
        assert plan.atom.factors is plan.dtype
        assert plan.atom.issuer == {"wgmma": "warpgroup", "tcgen05": "thread"}.get(plan.rule, "warp")


@pytest.mark.parametrize(
    ("name", "rows", "rule", "transport"),
    [
        ("cuda:h200", 8, "gemm", "cp.async evict-first"),
        ("cuda:h200", 512, "gemm", "cp.async"),
        ("cuda:h200", 512, "wgmma", "tensor"),
        ("hip:mi300x", 512, "gemm", "plain"),
    ],
)
def test_right_factors_move(name: str, rows: int, rule: str, transport: str) -> None:
    found = [plan for plan in plans(gemms.bias_gelu, name, M=rows, N=1024, K=512) if plan.rule == rule]
    assert {
        right.transport for plan in found for output_group in plan.output_groups for right in output_group.rights
    } == {transport}


def test_what_wgmma_reads_and_stores_moves_in_boxes_where_it_can() -> None:
    """A body names what is read ahead of the sums first, then what tensor copies bring, then what pairs are read of."""
    for plan in plans(gemms.residual, "cuda:h200", M=512, N=1024, K=512):
        if plan.rule == "wgmma":
            (output_group,) = plan.output_groups
            moves = [(load.access.tensor, load.when, load.transport) for load in output_group.loads]
            ahead, rest = ("bias", "ahead", "plain"), "tensor" if output_group.brought else "plain"
            assert moves == [ahead, ("r", "now", rest)]
            assert [store.transport for store in output_group.stores] == ["tensor", "plain"], "f16, and f32"
