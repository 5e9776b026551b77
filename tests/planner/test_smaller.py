"""What is judged in place of large products: kernels whose text is the same but for numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fusegen.emitting.rendering import render
from fusegen.planner import candidates
from fusegen.planner.model import Plan
from fusegen.planner.products.wgmma import WgmmaPlan
from fusegen.planner.programs import kernels_of
from fusegen.planner.programs.smaller import smaller as smaller_program
from fusegen.planner.smaller import smaller
from fusegen.targets import H200
from tests.specs import SHIPPED

LARGE: list[tuple[str, dict[str, Any]]] = [
    ("gemm_bias_gelu", {"M": 4096, "N": 4096, "K": 7168}),
    ("gemm_bias_gelu", {"M": 1000, "N": 4160, "K": 4096 + 96}),
    ("rmsnorm_gemm", {"M": 4096, "N": 4096, "K": 4096}),
    ("fp8_gemm", {"M": 4096, "N": 14336, "K": 7168}),
    ("grouped_gemm", {"T": 2048 * 256, "E": 256, "N": 4096, "K": 6144}),
    ("grouped_gemm", {"T": 4096 * 256, "E": 256, "N": 6144, "K": 2048}),
    ("grouped_gemm", {"T": 4096, "E": 260, "N": 6144, "K": 2048}),
]


def but_for_numbers(plan: Plan) -> str:
    """Its text behind the header."""
    text = render(plan).text
    return re.sub(r"\d+", "#", text[text.index("#include") :])


@pytest.mark.parametrize(("spec", "sizes"), LARGE, ids=lambda value: value if isinstance(value, str) else "")
def test_a_smaller_product_has_the_same_text_but_for_numbers(spec: str, sizes: dict[str, Any]) -> None:
    """Of every candidate: loops over the ring's places and over a lane's groups, columns that are left, and waiting."""
    plans = [plan for plan in candidates(SHIPPED[spec].at(**sizes).graph, H200).need() if isinstance(plan, WgmmaPlan)]
    assert plans
    for plan in plans:
        small = smaller(plan)
        assert small.graph.sizes["K"] < plan.graph.sizes["K"]
        assert small.configuration == plan.configuration
        assert but_for_numbers(small) == but_for_numbers(plan), plan.configuration


@pytest.mark.parametrize(
    ("spec", "sizes", "products"),
    [
        ("moe_layer", {"T": 64}, 2),
        ("moe_layer", {"T": 1024}, 2),
        ("moe_layer", {"T": 4096 * 32}, 2),
        ("fp8_block_gemm", {"M": 64, "N": 24576, "K": 1536}, 1),
        ("fp8_block_gemm", {"M": 4096, "N": 7168, "K": 16384}, 1),
        ("fp8_block_gemm", {"M": 4096, "N": 7168, "K": 5 * 128 * 9}, 1),
        ("grouped_fp8_block_gemm", {"T": 8192, "E": 256, "N": 4096, "K": 7168}, 1),
        ("mlp", {"M": 4096}, 2),
    ],
)
def test_products_of_a_smaller_program_have_the_same_text_but_for_numbers(
    spec: str, sizes: dict[str, Any], products: int
) -> None:
    program = kernels_of(SHIPPED[spec].at(**sizes).graph, H200)[1]
    assert program is not None
    small = smaller_program(program)
    assert small is not None
    pairs = [(a.plan, b.plan) for a, b in zip(program.steps, small.steps, strict=True) if a.graph.products]
    assert len(pairs[-products:]) == products
    for large, own in pairs[-products:]:  # a layer's first one is its router's, of fewer experts
        assert own.graph.sizes != large.graph.sizes
        assert but_for_numbers(own) == but_for_numbers(large)
        if isinstance(large, WgmmaPlan):
            assert isinstance(own, WgmmaPlan)
            assert own.tiles_in_step == large.tiles_in_step
