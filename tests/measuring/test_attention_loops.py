"""Loops of attention for AMD, simulated: loads of the next tile are on their way while this one is multiplied."""

from __future__ import annotations

from pathlib import Path

import pytest

import fusegen
from fusegen.compiling import compiler_version
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError
from fusegen.language.spec import load_chains
from fusegen.measuring.simulating import simulated
from fusegen.measuring.simulation import Simulated
from fusegen.planner.attention.parts import AttentionPlan
from fusegen.runtime.cache import compiled
from fusegen.targets import MI300X, MI355X, Target

SHIPPED = {one.name: one for one in load_chains(Path(__file__).parents[2] / "specs")}
LOADS = "loads from memory"


def loop(name: str, on: Target) -> Simulated:
    """Of the first kernel."""
    try:
        compiler_version("hip")
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])
    plan = fusegen.plan(SHIPPED[name], on, tuned=False)
    first = getattr(plan, "steps", (plan,))[0]
    own = getattr(first, "plan", first)
    assert isinstance(own, AttentionPlan)
    return simulated(own, compiled(render(own)))


@pytest.mark.parametrize("on", [MI300X, MI355X], ids=str)
@pytest.mark.parametrize("name", ["decode_attention", "causal_attention", "gqa_window_attention"])
def test_few_cycles_go_by_until_loads_are_there(name: str, on: Target) -> None:
    found = loop(name, on)
    starved = found.feed_bytes < 20 and found.busy["memory"] > 0.5  # by all blocks of a unit, of its share of memory
    assert starved or found.waiting.get(LOADS, 0.0) < 0.12
