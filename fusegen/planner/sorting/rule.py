"""Slots sorted by the group that each of them names: a counting sort by one block.

It takes time in proportion to the slots, and a launch: a mixture's router names some slots a token. Blocks that share
the slots would have to wait for one another's counts, which takes another launch or a cluster; one block sorts the
slots of a few thousand tokens in the time that a launch takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from fusegen.language.graph import Graph, Node
from fusegen.language.naming import entry_name, value_names
from fusegen.language.types import size_of
from fusegen.planner.cost import decisions, unfused_kernels
from fusegen.planner.matching import NoMatch, NotFor
from fusegen.planner.model import Access, Cost, Layout
from fusegen.planner.pieces import arrays, bytes_of, params
from fusegen.planner.rows.duration import ISSUE_FACTOR, LAUNCH_US, LOAD_US, OVERLAP_EXPONENT
from fusegen.planner.sorting.plan import SlotsPlan, SlotTile, shared_bytes
from fusegen.planner.time import floor_us, overlapped
from fusegen.planner.traffic import TensorTraffic, Traffic
from fusegen.targets.base import Target

WARPS = (4, 8, 16, 32)
MOST_BATCH = 8  # slots of a lane in registers
MOST_SLOTS = 2**30  # places are i32
BARRIERS_US = 2.0  # all of a launch's, with what a few threads do between them
TURN_SLOTS = 80.0  # instructions' issue slots of one turn, beside those of each bit of a group's number
BIT_SLOTS = 16.0  # a vote, and what comes of it
TURN_US = 0.05  # of a turn: counts in shared memory, read and written
VOTE_US = 0.01  # of each bit's vote, one after another
COUNT_US = 0.008  # of a warp's count that is added to those before it
FRAME_REGISTERS = 32


def slot_sort(graph: Graph, target: Target, layout: Layout) -> Iterator[SlotsPlan]:
    """Every block size, where a block's counts fit its shared memory."""
    if not graph.orders:
        raise NotFor("the chain sorts no slots by their groups")
    ends = next(n for n in graph.orders if n.op.name == "group_ends")
    slots, groups = (size_of(n.shape[-1], graph.sizes) for n in (ends.inputs[0], ends))
    if slots > MOST_SLOTS:
        raise NoMatch(f"{ends.operator} at {ends.where} sorts {slots} slots; slot_sort sorts {MOST_SLOTS} at most")
    if shared_bytes(WARPS[0], groups) > target.shared_bytes:
        raise NoMatch(
            f"{ends.operator} at {ends.where} sorts slots by {groups} groups, whose counts of {WARPS[0]} warps take "
            f"{shared_bytes(WARPS[0], groups)} bytes of shared memory; {target.arch} has {target.shared_bytes}"
        )
    for warps in WARPS:
        lanes = warps * target.warp
        most = warps == WARPS[0] or lanes // 2 < slots  # more than half of them have slots
        if most and lanes <= target.threads_per_block and shared_bytes(warps, groups) <= target.shared_bytes:
            turns = -(-slots // lanes)
            batch = min(MOST_BATCH, turns)
            yield slots_plan(graph, target, layout, SlotTile(warps, -(-turns // batch) * batch, batch), ends)


def slots_plan(graph: Graph, target: Target, layout: Layout, tile: SlotTile, ends: Node) -> SlotsPlan:
    accesses = slot_accesses(graph)
    slots, groups = (size_of(n.shape[-1], graph.sizes) for n in (ends.inputs[0], ends))
    written = {op: tuple(accesses[t.name] for t in graph.outputs if t.node.op.name == op)
               for op in ("group_ends", "slot_order", "slot_places")}  # fmt: skip
    return SlotsPlan(
        name=entry_name(graph),
        graph=graph,
        target=target,
        layout=layout,
        rule="slot_sort",
        template="slot_sort.cu.j2",
        regime=regime(tile, slots, groups, target),
        cols=graph.cols,
        row_dims=(),
        accesses=tuple(accesses.values()),
        params=params(graph, (), ()),
        folded=False,
        shared_bytes=shared_bytes(tile.warps, groups),
        cost=slot_cost(graph, target, tile, groups),
        decisions=decisions(graph),
        tile=tile,
        slots=slots,
        groups=groups,
        ids=accesses[graph.tensor_of[ends.inputs[0]].name],
        ends=written["group_ends"],
        order_to=written["slot_order"],
        places=written["slot_places"],
    )


def regime(tile: SlotTile, slots: int, groups: int, target: Target) -> str:
    each = tile.turns * target.warp
    return f"counting sort of {slots} slots by {groups} groups in one block of {tile.warps} warps, {each} slots each"


def slot_accesses(graph: Graph) -> Mapping[str, Access]:
    names, found = value_names(graph), {}
    for tensor in arrays(graph):
        output = any(tensor is t for t in graph.outputs)
        found[tensor.name] = Access(
            tensor=tensor.name, name=tensor.name if output else names[tensor.node], dtype=tensor.dtype,
            shape=tensor.shape, output=output, by_column=True, strided=(), mode="element", vector=1,
            vector_bytes=tensor.dtype.bytes,
        )  # fmt: skip
    return found


def slot_cost(graph: Graph, target: Target, tile: SlotTile, groups: int) -> Cost:
    """Two passes over the slots, each of instructions that one SM issues, and of turns one after another, whose loads
    come in rounds. On an H200 1024 slots of 64 groups took 6.0 us, and 65536 of 256 107.4; by these constants both do,
    within 3 %. Not measured on AMD."""
    tensors = []
    for tensor in arrays(graph):
        output, size = any(tensor is t for t in graph.outputs), bytes_of(graph, tensor)
        tensors.append(TensorTraffic(tensor.name, output, size, size, size, 1 if output else 2))
    unfused = unfused_kernels(graph)
    total, apart = sum(t.ideal for t in tensors), sum(o.moved for o in unfused)
    lanes = tile.warps * target.warp
    moved = Traffic(
        tensors=tuple(tensors), ideal=total, moved=total, unfused=apart, per_element_fused=total,
        per_element_unfused=apart, flops=0, special=0, launches_unfused=len(unfused),
        bytes_per_element_fused=total / max(1, graph.cols), bytes_per_element_unfused=apart / max(1, graph.cols),
    )  # fmt: skip
    bits = (groups + 1).bit_length()
    issue_us = 2 * tile.turns * lanes * (BIT_SLOTS * bits + TURN_SLOTS)
    issue_us *= ISSUE_FACTOR / (target.fp32_tflops * 1e6 / 2 / target.sms)
    waiting_us = 2 * (tile.rounds * LOAD_US + tile.turns * (TURN_US + VOTE_US * bits)) + BARRIERS_US
    waiting_us += COUNT_US * math.ceil((groups + 1) / lanes) * tile.warps
    return Cost(
        traffic=moved,
        floor_us=floor_us(target, moved),
        time_us=LAUNCH_US + overlapped((issue_us, waiting_us), OVERLAP_EXPONENT),
        bound="instruction",
        in_flight_bytes=lanes * tile.batch * 4,
        registers=FRAME_REGISTERS + tile.batch,
        blocks_per_sm=1,
    )
