"""Random chains from spec to validated kernel: any mix of ops plans, emits, compiles and computes what it means.

A longer run: `python -m tests.chains --run 0 500` from the checkout.
"""

from __future__ import annotations

import pytest

from fusegen.pipeline import compile
from fusegen.planner import candidates
from fusegen.planner.model import Layout, RowPlan, Source
from fusegen.rendering import render
from fusegen.runtime import Kernel, devices
from fusegen.targets import target as target_named
from fusegen.validation import validate
from tests.chains import random_chain
from tests.tools import needs_compiler

CONFIGURATIONS = ((1, "cuda:h200"), (20, "hip:mi300x"), (257, "cuda:h200"), (1000, "hip:gfx90a"))


@pytest.mark.parametrize("seed", range(16))
def test_random_chain_computes_what_it_means(seed: int) -> None:
    cols, target = CONFIGURATIONS[seed % len(CONFIGURATIONS)]
    kernel = compile(random_chain(seed).at(N=cols), target, on="emulator")
    assert kernel.report.ok


@needs_compiler
@pytest.mark.parametrize("seed", [0, 10, 29])
@pytest.mark.parametrize("name", ["cuda:h200", "hip:mi300x"])
def test_whatever_is_kept_between_walks(seed: int, name: str) -> None:
    """A candidate of each way to keep rows, where the first choice is one way: reductions share what they walk over."""
    gpu = target_named(name)
    plans = candidates(random_chain(seed).at(N=577).graph, gpu).plans
    kinds = {(p.staging, p.keeps, p.packed): p for p in reversed(plans) if isinstance(p, RowPlan)}
    assert len(kinds) > 2
    for made in kinds.values():

        def variant(layout: Layout) -> tuple[Source, None]:
            return render(candidates(made.graph, gpu, layout).plans[0]), None  # noqa: B023 (called before the next)

        kernel = Kernel(render(made), None, devices.find(gpu, "emulator"), variant)
        assert (report := validate(kernel, quick=True)).ok, f"{made.regime}\n{report}"
