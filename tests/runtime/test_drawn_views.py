"""Random chains with views, axes, gathers, scatters and sorts against plain numpy; `python -m tests.drawn_views 0-1000`
runs more of them."""

from __future__ import annotations

import pytest

from tests.drawn_views import judged, spec_text
from tests.tools import needs_compiler

TARGETS = ("cuda:h200", "cuda:sm_80", "hip:mi300x")
SEEDS = (0, 3, 5, 11, 56, 69, 123, 774)  # 56 and 69 write rows of one element, 774 reduces groups of 24


@needs_compiler
@pytest.mark.parametrize("seed", SEEDS)
def test_views_compute_what_numpy_does(seed: int) -> None:
    verdict = judged(seed, TARGETS[seed % len(TARGETS)])
    assert verdict == "right", f"{verdict}\n{spec_text(seed)}"
