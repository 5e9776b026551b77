"""Random chains with matrix products: the same meaning hoisted and unfused, bounds for every element, every account."""

from __future__ import annotations

import numpy as np
import pytest

from fusegen.language.reference import reference
from fusegen.language.torch_source import torch_source
from fusegen.language.unfusing import run_pieces, unfused
from fusegen.planner.products.product_cost import floors, product_rounding, product_traffic
from fusegen.planner.rewrites import hoist_scales, simplify
from fusegen.reporting.explaining import products
from fusegen.targets import H200
from fusegen.validation.bounds import analyse
from fusegen.validation.inputs import make_operands, sizes_for
from tests.language.test_unfusing import as_tuple, by_reference, values_for
from tests.product_chains import random_product, spec_text
from tests.products import sketch


@pytest.mark.parametrize("seed", range(80))
def test_hoisted_and_unfused_mean_the_same(seed: int) -> None:
    graph = simplify(random_product(seed).graph)
    values = values_for(graph)
    with np.errstate(all="ignore"):
        wanted = as_tuple(reference(graph)(*values.values()))
        hoisted = as_tuple(reference(hoist_scales(graph))(*values.values()))
        pieces = run_pieces(unfused(graph), values, by_reference)
    for tensor, law, other in zip(graph.outputs, wanted, hoisted, strict=True):
        np.testing.assert_allclose(other, law, rtol=1e-9, atol=1e-9, err_msg=spec_text(seed))
        np.testing.assert_allclose(pieces[tensor.name], law, rtol=1e-9, atol=1e-9, err_msg=spec_text(seed))


@pytest.mark.parametrize(
    ("seed", "kind"), [*((seed, "") for seed in range(80)), *((seed, "f32") for seed in range(20))]
)
def test_every_account_can_be_given(seed: int, kind: str) -> None:
    graph = simplify(random_product(seed, kind).graph)
    plan = sketch(graph)
    operands = make_operands(plan, sizes_for(plan, 7), np.random.default_rng(seed))
    for law in analyse(plan, operands.values):
        assert np.isfinite(law.error).mean() > 0.99, spec_text(seed, kind)
    traffic = product_traffic(graph, H200, 128, 8)
    assert traffic.ideal <= traffic.per_element_unfused <= traffic.unfused + traffic.ideal
    assert all(us >= 0 for us in floors(H200, traffic, next(iter(graph.factor_types.values()))).values())
    assert all(product_rounding(graph, H200))
    assert products(plan)
    assert f"def {graph.name}(" in torch_source(graph)
    assert str(plan)
