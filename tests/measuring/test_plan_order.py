"""The planner's order of tiles for AMD beside what their loops take on a simulated compute unit."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from fusegen import Chain, bf16, chain, dims
from fusegen import ops as F
from fusegen.compiling import compiler_version
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError
from fusegen.measuring.simulating import Launched, launch_of
from fusegen.planner import candidates
from fusegen.planner.attention.parts import AttentionPlan
from fusegen.planner.products.gemm import GemmPlan
from fusegen.runtime.cache import compiled
from fusegen.targets import MI250X, MI300X, MI355X, Target

M, N, K = dims("M N K")
B, H, S, T, D = dims("B H S T D")
# The simulation leaves out how a tile starts and ends, which the plan has in it: tiles nearer to each other than this
# are not told apart.
TOLERANCE = 1.05
ATTENTION_TOLERANCE, ATTENTION_APART = 1.05, 1.25  # a tile's time is off by 11 % (rms)


@chain(M=4096, N=4096, K=4096)
def along(x: bf16[M, K], w: bf16[N, K]) -> bf16[M, N]:
    return x @ w.T


@chain(M=4096, N=4096, K=4096)
def across(x: bf16[M, K], w: bf16[K, N]) -> bf16[M, N]:
    return x @ w


@chain(B=1, H=32, S=4096, T=4096, D=128)
def attention(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    return F.softmax(q @ k.mT * D**-0.5) @ v


def launches(one: Chain, on: Target = MI300X) -> list[tuple[GemmPlan | AttentionPlan, Launched]]:
    """Every candidate in the planner's order, compiled and simulated."""
    try:
        compiler_version("hip")
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])
    plans = [plan for plan in candidates(one.graph, on).plans if isinstance(plan, GemmPlan | AttentionPlan)]
    return [(plan, launch_of(plan, compiled(render(plan)))) for plan in plans]


@pytest.mark.parametrize(("one", "matrix"), [(along, 0.8), (across, 0.7)], ids=["along", "across"])
def test_the_planners_order_of_tiles_is_the_simulated_one(one: Chain, matrix: float) -> None:
    """4096^3, bf16: the first choice within 5 % of the best one simulated, with the matrix units as busy as that; and
    of two tiles that both tell apart the same one comes first."""
    found = launches(one)
    assert len(found) >= 4
    simulated = [launch.us for _, launch in found]
    assert simulated[0] <= TOLERANCE * min(simulated)
    assert max(simulated) > 1.2 * min(simulated)  # else the test would tell nothing
    assert found[0][1].loop.busy["matrix"] >= matrix
    for plan, launch in found:  # whose time has starts and ends in it
        assert 0.9 < plan.cost.time_us / launch.us < 1.15, plan.configuration
    for (first, sooner), (second, later) in combinations(found, 2):
        if second.cost.time_us > TOLERANCE * first.cost.time_us:
            assert sooner.us <= TOLERANCE * later.us, (first.configuration, second.configuration)
    # no tile is faster than its matrix instructions at the data sheet's rate
    assert min(simulated) > 2 * 4096**3 / (MI300X.matrix_tflops * 1e6)


@pytest.mark.parametrize("on", [MI250X, MI300X, MI355X], ids=str)
@pytest.mark.parametrize("depth", [64, 128, 192, 320])
def test_the_planners_order_of_attention_is_the_simulated_one(depth: int, on: Target) -> None:
    """Keys of few and of many numbers, and of so many that waves share rows: the first choice is about as fast as the
    best one simulated; and of two tiles that the plan tells well apart the simulation puts none the other way."""
    found = launches(attention.at(D=depth) if depth <= 256 else attention.at(D=depth, S=1024, T=1024), on)
    assert len(found) >= 3
    simulated = [launch.us for _, launch in found]
    assert simulated[0] <= ATTENTION_TOLERANCE * min(simulated)
    assert max(simulated) > 1.25 * min(simulated)  # else the test would tell nothing
    for (first, sooner), (second, later) in combinations(found, 2):
        if second.cost.time_us > ATTENTION_APART * first.cost.time_us:
            assert sooner.us <= TOLERANCE * later.us, (first.configuration, second.configuration)
    # no tile is faster than its matrix instructions at the data sheet's rate
    plan, _ = found[0]
    assert min(simulated) > plan.cost.traffic.product_flops / (on.matrix_tflops * 1e6)


@pytest.mark.parametrize("on", [MI250X, MI300X, MI355X], ids=str)
def test_times_of_attention_are_about_the_simulated_ones(on: Target) -> None:
    ratios = [plan.cost.time_us / launch.us for d in (64, 128, 192) for plan, launch in launches(attention.at(D=d), on)]
    assert len(ratios) >= 12
    assert float(np.sqrt(np.mean(np.log(ratios) ** 2))) < 0.15
