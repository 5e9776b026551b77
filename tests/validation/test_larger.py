"""Every shipped spec at its real row length and some hundred rows, in the emulator's fast build, for both vendors.

The checking build sees every access but is slow, so it has the small ragged shapes; here the numbers count: many rows,
whole tiles, in each spec's own dtype and in f32.
"""

from __future__ import annotations

import pytest

from fusegen.emitting.rendering import render
from fusegen.language.types import f32
from fusegen.planner import plan
from fusegen.runtime import Kernel, finding
from fusegen.targets import Target
from fusegen.validation import validate
from tests.sizes import sizes_at
from tests.specs import ROWS as SPECS

ROWS = (130, 257)  # no multiple of any tile's rows


@pytest.mark.pairwise("name", "single", "target")
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("single", [False, True], ids=["own dtype", "f32"])
def test_every_spec_at_its_real_row_length(name: str, single: bool, target: Target) -> None:
    chain = SPECS[name].with_dtype(f32) if single else SPECS[name]
    graph = chain.graph
    cols = min(graph.cols, 32_000)
    graph = graph.at(**sizes_at(graph, cols))
    device = finding.find(target, "emulator", check=False)
    kernel = Kernel(
        render(plan(graph, target)), None, device, lambda layout: (render(plan(graph, target, layout)), None)
    )
    report = validate(kernel, quick=True, rows=[count for count in ROWS if count * cols <= 2**20] or [33])
    report.raise_for_error()
    assert "checking" not in report.on
