"""Random chains with cuts against plain numpy: no number is wrong, wherever the planner cuts."""

from __future__ import annotations

import numpy as np
import pytest

import fusegen
from fusegen import Program
from fusegen.errors import NoPlan
from tests.drawn_programs import chain_of, drawn_operands, meant, spec_text
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

TARGETS = ("cuda:h200", "cuda:sm_80", "hip:mi300x")
SEEDS = 3  # of each test, one for each target; twice as many with --all
CHUNKS = 2


def trial(seed: int) -> str:
    """`program`, `kernel` or `refused`. Fails where a result is not numpy's."""
    chain = chain_of(seed)
    try:
        made = fusegen.compile(chain, TARGETS[seed % len(TARGETS)], on="emulator", validate=False)
    except NoPlan:
        return "refused"
    operands = drawn_operands(chain, seed)
    given = made(*operands)
    results = given if isinstance(given, tuple) else (given,)
    for result, wanted in zip(results, meant(seed, operands), strict=True):
        assert np.array_equal(np.asarray(result).astype(np.float64), wanted), f"seed {seed}:\n{spec_text(seed)}"
    return "program" if isinstance(made, Program) else "kernel"


@needs_compiler
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_programs_compute_what_numpy_does(chunk: int, request: pytest.FixtureRequest) -> None:
    seeds = SEEDS * (2 if request.config.getoption("--all") else 1)
    found = [trial(seed) for seed in range(seeds * chunk, seeds * (chunk + 1))]
    assert found.count("program") >= seeds / 2
    assert found.count("refused") <= seeds / 4
