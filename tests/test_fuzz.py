"""Random chains from spec to validated kernel: any mix of ops plans, emits, compiles and computes what it means.

A longer run: `python -m tests.chains --run 0 500` from the checkout.
"""

from __future__ import annotations

import pytest

from fusegen.pipeline import compile
from tests.chains import random_chain

CONFIGURATIONS = ((1, "cuda:h200"), (20, "hip:mi300x"), (257, "cuda:h200"), (1000, "hip:gfx90a"))


@pytest.mark.parametrize("seed", range(16))
def test_random_chain_computes_what_it_means(seed: int) -> None:
    cols, target = CONFIGURATIONS[seed % len(CONFIGURATIONS)]
    kernel = compile(random_chain(seed).at(N=cols), target, on="emulator")
    assert kernel.report.ok
