"""Random chains of 8 and 4 bits against plain numpy; `python -m tests.drawn_narrow 0-500` runs more of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests import drawn_narrow
from tests.drawn_narrow import TARGETS, judged, spec_text
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

SEEDS = (21, 30, 48, 69, 114, 153, 199)  # together every type, rule and kind of step, and grouped products


@needs_compiler
@pytest.mark.parametrize("seed", SEEDS)
def test_narrow_types_compute_what_numpy_does(seed: int) -> None:
    verdict = judged(seed, TARGETS[seed % len(TARGETS)])
    assert verdict == "right", f"{verdict}\n{spec_text(seed)}"


@needs_compiler
def test_a_wrong_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn_narrow.NUMPY, "max", lambda x: np.abs(x).max(-1, keepdims=True) + 1)
    seed = next(seed for seed in range(50) if "F.max(" in spec_text(seed) and "@ b" not in spec_text(seed))
    assert judged(seed, TARGETS[0]).startswith("wrong: result")
