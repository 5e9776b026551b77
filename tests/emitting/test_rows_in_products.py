"""Left factors whose rows an index names, found on their way in: every kind of tile, whatever the index says."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.planner.programs.model import ProgramPlan
from fusegen.runtime import Kernel, Program, finding
from fusegen.targets import Target, target
from fusegen.validation import validate
from fusegen.validation.few_parts import no_variant
from tests.gemms import FEW, Fits, any_plan, banded, clustered, kernel, persistent, streamed, streamed_waves, tiled
from tests.grouped import by_definition

pytestmark = pytest.mark.usefixtures("emulated_only")

T, S, N, K, E, V = dims("T S N K E V")
CUDA, AMD = "cuda:a100", "hip:mi300x"
H200 = "cuda:h200"


@chain(T=70, V=50, N=136, K=136, E=5)
def slots(x: bf16[V, K], ids: i32[T, 1], w: bf16[E, N, K], ends: i32[E]) -> bf16[T, N]:
    """Tokens of the slots of a mixture."""
    return F.grouped_matmul(F.gather(x, ids // 2), w.mT, ends)


@chain(T=70, V=50, N=136, K=136, E=5)
def gated(
    x: bf16[V, K], ids: i32[T, 1], first: i32, gate: bf16[E, N, K], up: bf16[E, N, K], ends: i32[E], weight: f32[T, 1]
) -> bf16[T, N]:  # fmt: skip
    """Two products of the same rows, an index of several operands, and row values behind them."""
    rows = F.gather(x, ids + first)
    left = F.silu(F.grouped_matmul(rows, gate.mT, ends))
    return left * F.grouped_matmul(rows, up.mT, ends) * weight * F.cast(ids, f32)


@chain(T=70, V=50, N=136, K=136)
def embedded(x: f16[V, K], ids: i32[T, 1], w: f16[K, N]) -> f32[T, N]:
    """Without groups."""
    return F.gather(x, ids) @ w


KINDS = (
    (H200, tiled, {"T": 300, "N": 320, "K": 264}),
    (H200, streamed, {"T": 40, "N": 96, "K": 1032}),
    (H200, clustered, {"T": 40, "N": 96, "K": 1032}),
    (FEW, persistent, {"T": 500, "N": 256, "K": 512}),
    (AMD, banded, {"T": 300, "N": 320, "K": 104}),
    (AMD, streamed_waves, {"T": 40, "N": 96, "K": 1032}),
    (CUDA, any_plan, {"T": 9, "N": 7, "K": 65}),
    (AMD, any_plan, {"T": 1, "N": 1, "K": 2}),
)


@pytest.mark.by_values("spec", "sizes")
@pytest.mark.parametrize(("name", "fits", "sizes"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("spec", [slots, gated, embedded], ids=lambda s: s.name)
def test_every_kind_of_tile(spec: Chain, name: str, fits: Fits, sizes: dict[str, int]) -> None:
    report = validate(kernel(spec, name, fits, **sizes), quick=True)
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize(
    ("name", "fits", "sizes"),
    [(H200, streamed, {"T": 40}), (FEW, persistent, {"T": 500, "N": 256, "K": 512}), (AMD, any_plan, {})],
)
def test_rows_are_those_that_the_index_names(name: str | Target, fits: Fits, sizes: dict[str, int]) -> None:
    """Some twice, some never, some of none; of groups of any length, empty ones and a single row among them."""
    made = kernel(slots, name, fits, **sizes)
    rng = np.random.default_rng(1)
    n, k = (sizes.get(name, 136) for name in ("N", "K"))
    x, w = (rng.integers(-2, 3, shape).astype(bf16.numpy) for shape in ((50, k), (5, n, k)))
    ids = rng.integers(-20, 120, (300, 1)).astype(np.int32)
    ids[:2, 0] = 2**31 - 1, -(2**31)
    known = (ids[:, 0] >= 0) & (ids[:, 0] // 2 < 50)
    rows = np.where(known[:, None], x[np.where(known, ids[:, 0] // 2, 0)].astype(float), 0.0)
    for ends in ([0, 40, 41, 290, 290], [300, 5, 7, -1, 300], [-5, 12, 12, 100, 2**31 - 1]):
        wanted = by_definition(rows, w.swapaxes(1, 2), np.array(ends))
        assert np.array_equal(made(x, ids, w, np.array(ends, np.int32)), wanted.astype(bf16.numpy))


FAULTS = {
    "rows in their own order": (CUDA, r"x_found\[v\] \? floor_div : 0", "x_found[v] ? x_row % x_count : 0"),
    "the next row": (CUDA, r"x_found\[v\] \? floor_div : 0", "x_found[v] ? (floor_div + 1) % x_count : 0"),
    "no test for rows below 0": (CUDA, r"floor_div >= 0 && ", ""),
    "no test for rows behind the last": (AMD, r" && floor_div < x_count", ""),
    "row 0 for one that is not there": (AMD, r"x_found\[v\] && ", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str) -> None:
    on, pattern, instead = FAULTS[fault]
    right = kernel(slots, on)
    text, count = re.subn(pattern, instead, right.source.text)
    assert count, f"{pattern} is nowhere in the kernel"
    device = finding.find(target(on), "emulator", check=True)
    wrong = Kernel(replace(right.source, text=text), None, device, no_variant)
    assert not validate(wrong, quick=True).ok


@chain(T=64, V=48, N=96, K=64, E=4)
def looked_up(x: bf16[V, K], ids: i32[T], w: bf16[E, N, K], ends: i32[E]) -> bf16[T, N]:
    return F.grouped_matmul(F.gather(x, ids), w.mT, ends)


@chain(T=64, V=48, N=96, K=64, E=4)
def of_their_own_sum(x: bf16[V, K], ids: i32[T, 1], w: bf16[E, N, K], ends: i32[E]) -> bf16[T, N]:
    """Rows that more than a product reads are copied first."""
    rows = F.gather(x, ids)
    return F.grouped_matmul(rows, w.mT, ends) * F.sum(rows)


@chain(T=64, V=48, N=96, K=64, E=4)
def of_counts(x: bf16[V, K], steps: i32[T], w: bf16[E, N, K], ends: i32[E]) -> bf16[T, N]:
    """An index that no element of its own row makes is in memory first."""
    return F.grouped_matmul(F.gather(x, F.cumsum(steps)), w.mT, ends)


@pytest.mark.parametrize(
    ("spec", "kernels", "sizes"),
    [(looked_up, 1, {}), (of_their_own_sum, 2, {}), (of_counts, 2, {}),
     (looked_up, 2, {"T": 16384, "V": 16384, "N": 16384, "K": 4096})],
    ids=["fused", "read twice", "index in memory", "wgmma behind a copy"],
)  # fmt: skip
def test_what_is_one_kernel(spec: Chain, kernels: int, sizes: dict[str, int]) -> None:
    found: Any = fusegen.plan(spec.at(**sizes), target(H200))
    assert (len(found.steps) if isinstance(found, ProgramPlan) else 1) == kernels
    if not sizes:
        made = fusegen.compile(spec, H200, on="emulator")
        assert isinstance(made, Program)
        assert made.report is not None
        assert made.report.ok
