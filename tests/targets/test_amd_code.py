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


def disassembled(graph: Graph, name: str) -> dict[int, str]:
    """The instructions of the kernel that is planned for a chain, by their places."""
    try:
        compiler_version("hip")
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])
    lines = disassemble(compiled(render(plan(graph, target(name))))).splitlines()
    return {int(place, 16): text for place, text in (line.split(maxsplit=1) for line in lines)}


def machine_code(graph: Graph, name: str) -> list[str]:
    return list(disassembled(graph, name).values())


def multiplies(line: str) -> bool:
    return "mfma" in line or "wmma" in line


def main_loop(graph: Graph, name: str) -> list[str]:
    """One turn of the loop that has the most matrix instructions, as its code lies there: what a branch in it passes
    over is taken along, and where it has several ends it goes to the last one."""
    code = disassembled(graph, name)
    ends = [(int(text.split("-> ")[1], 16), place) for place, text in code.items() if re.match(r"s_c?branch.*->", text)]
    loops: list[tuple[int, int]] = []
    for start, end in sorted(end for end in ends if end[0] < end[1]):
        if loops and start <= loops[-1][1]:
            loops[-1] = loops[-1][0], max(end, loops[-1][1])
        else:
            loops.append((start, end))
    turns = [[text for place, text in code.items() if start <= place <= end] for start, end in loops]
    return max(turns, key=lambda turn: sum(multiplies(line) for line in turn))


def waited_for(line: str) -> int | None:
    """How many loads may still be on their way behind an instruction that waits for loads."""
    if found := re.search(r"vmcnt\((\d+)\)|s_wait_loadcnt (0x\w+)", line):
        return int(found[1] or found[2], 0)
    return int(found[1], 16) >> 8 if (found := re.search(r"s_wait_loadcnt_dscnt (0x\w+)", line)) else None


def products_behind_loads(loop: list[str]) -> int:
    """Matrix instructions that are issued while a load is on its way, of the load that has the fewest."""
    pending: list[int] = []  # how many were issued before each load
    fewest = products = len(loop)
    for line in loop * 3:  # of the third turn, what the second one asked for
        if multiplies(line):
            products += 1
        elif line.startswith("global_load"):
            pending.append(products)
        elif (left := waited_for(line)) is not None and len(pending) > left:
            arrived, pending = pending[: len(pending) - left], pending[len(pending) - left :]
            fewest = min(fewest, *(products - before for before in arrived))
    return fewest


def most_in_flight(code: list[str]) -> int:
    """Loads from memory that a wave has asked for and not waited for, the most at any place of straight code."""
    most = pending = 0
    for line in code:
        if line.startswith(("global_load", "buffer_load")):
            pending += 1
            most = max(most, pending)
        elif (left := waited_for(line)) is not None:
            pending = min(pending, left)
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


@pytest.mark.parametrize("name", AMD)
def test_slices_of_factors_are_on_their_way_while_one_is_multiplied(name: str) -> None:
    """A slice that was asked for and stored within one had no product of 16, or one, to hide its way behind."""
    loop = main_loop(ALL["gemm_bias_gelu"].graph, name)
    products = sum("mfma" in line for line in loop)
    assert products in (8, 16)
    assert products_behind_loads(loop) >= products - 2


@pytest.mark.parametrize(
    ("name", "instruction", "count"),
    [("hip:gfx90a", "v_mfma_f32_32x32x2f32", 16), ("hip:gfx942", "v_mfma_f32_32x32x4_xf32", 16),
     ("hip:gfx950", "v_mfma_f32_32x32x2_f32", 16)],
)  # fmt: skip
def test_tf32_is_xf32_where_there_is_one(name: str, instruction: str, count: int) -> None:
    """A wave has 64 x 64 of gfx942's tile, and half of that elsewhere, where slices take four times as long."""
    loop = main_loop(ALL["gemm_tf32"].graph, name)
    assert [line.split()[0] for line in loop if "mfma" in line] == [instruction] * count


def test_maxima_that_keep_a_nan_are_one_instruction_on_gfx950() -> None:
    """For two numbers more; a comparison of each, one of NaN, their union and a selection were four for one."""
    code = [line.split()[0] for line in machine_code(ALL["scale_softmax"].graph, "hip:gfx950")]
    assert 0 < code.count("v_maximum3_f32") <= 40  # of 64 numbers a lane, and six lanes
    assert not any(line.startswith("v_cmp_u_f32") for line in code)
