"""A chain, its candidates, and measurements of them that nobody made: what tests of the database share."""

from __future__ import annotations

from dataclasses import replace

import fusegen
from fusegen import bf16, chain, dims
from fusegen import ops as F
from fusegen.database import Measurement, problem_of
from fusegen.planner import candidates
from fusegen.targets import H200

M, N = dims("M N")


@chain(M=64, N=4096)
def normed(x: bf16[M, N], gain: bf16[N]) -> bf16[M, N]:
    """rmsnorm(x) * gain."""
    return F.rmsnorm(x, gain)


FOUND = candidates(normed.graph, H200)
NAMES = [plan.configuration for plan in FOUND.plans]
PROBLEM = problem_of(FOUND)
assert PROBLEM is not None
ROW = Measurement(
    graph=PROBLEM.graph, cols=4096, rows=64, layout="contiguous", target="cuda:h200", arch="sm_90a",
    configuration=NAMES[2], compiler="nvrtc 13.0", fusegen=fusegen.__version__, chain="normed  bf16[M, N]",
    sizes="M=64 N=4096", gpu="NVIDIA H200", status="ok", reason="", time_us=10.0, predicted_us=12.0, spread=0.02,
    share=0.5, repeats=30, copy_gbs=4250.0, validated=True, at="2026-11-21T12:00:00Z",
)  # fmt: skip
FAILED = replace(
    ROW, status="hung", reason="it did not end", time_us=0.0, spread=0.0, share=0.0, repeats=0, copy_gbs=0.0,
    validated=False,
)  # fmt: skip
LATER = "2027-01-01T00:00:00Z"
