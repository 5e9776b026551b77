"""What can be said of speed without an AMD GPU: facts of the machine code that hiprtc makes, by its disassembly."""

from __future__ import annotations

import re

import pytest

from fusegen.compiling import compiler_version, disassemble
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError
from fusegen.language.graph import Graph
from fusegen.language.types import DType, f16, f32
from fusegen.pipeline import plan
from fusegen.runtime.cache import compiled
from fusegen.targets import target
from tests.specs import ALL

AMD = ("hip:gfx90a", "hip:gfx942", "hip:gfx950")


def machine_code(graph: Graph, name: str) -> list[str]:
    """The instructions of the kernel that is planned for a chain, without their places."""
    try:
        compiler_version("hip")
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])
    return [line.split(maxsplit=1)[1] for line in disassemble(compiled(render(plan(graph, target(name))))).splitlines()]


def most_in_flight(code: list[str]) -> int:
    """Loads from memory that a wave has asked for and not waited for, the most at any place of straight code."""
    most = pending = 0
    for line in code:
        if line.startswith(("global_load", "buffer_load")):
            pending += 1
            most = max(most, pending)
        elif waited := re.search(r"vmcnt\((\d+)\)", line):
            pending = min(pending, int(waited[1]))
    return most


@pytest.mark.by_values("name", "dtype")
@pytest.mark.parametrize("name", AMD)
@pytest.mark.parametrize("dtype", [f16, f32], ids=str)
def test_loads_of_a_masked_row_are_in_flight_together(name: str, dtype: DType) -> None:
    """A load in a branch of its own was waited for there, one in flight a wave: eight where addresses are a choice."""
    graph = ALL["scale_causal_softmax"].with_dtype(dtype).graph
    code = machine_code(graph, name)
    loads = sum(line.startswith("global_load_dwordx4") for line in code)
    assert loads >= 8
    assert most_in_flight(code) == loads


@pytest.mark.parametrize("name", AMD)
def test_sums_over_lanes_are_additions_of_a_neighbours_number(name: str) -> None:
    """By DPP, but for lanes that are 16 or 32 apart: six ds_bpermute_b32, each waited for, were a row's sum."""
    code = [line.split()[0] for line in machine_code(ALL["rmsnorm"].graph, name)]
    assert code.count("v_add_f32_dpp") >= 3
    assert code.count("ds_swizzle_b32") == code.count("ds_bpermute_b32") == 1
