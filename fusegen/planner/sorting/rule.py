"""Slots sorted by the group that each of them names: a counting sort by one block, or by a cluster of blocks.

It takes time in proportion to the slots, and a launch: a mixture's router names some slots a token. Blocks that share
the slots wait for one another's counts, which takes another launch or a cluster; so of many slots a cluster has
them, where the target has clusters. One block sorts the slots of a few hundred tokens in the time that a launch takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from fusegen.language.graph import Graph, Node
from fusegen.language.naming import entry_name, value_names
from fusegen.language.types import size_of
from fusegen.planner.cost import decisions, unfused_kernels
from fusegen.planner.matching import NoMatch, NotFor
from fusegen.planner.model import Access, Cost, Layout
from fusegen.planner.pieces import arrays, bytes_of, params
from fusegen.planner.sorting.plan import SlotsPlan, SlotTile, shared_bytes
from fusegen.planner.time import floor_us, overlapped
from fusegen.planner.traffic import TensorTraffic, Traffic
from fusegen.targets.base import Target

WARPS = (4, 8, 16, 32)
CLUSTERS = (1, 2, 4, 8, 16)
MOST_BATCH = 8  # slots of a lane in registers
MOST_SLOTS = 2**30  # places are i32
OVERLAP_EXPONENT = 2.0  # the norm's exponent
FRAME_REGISTERS = 32
# Fitted to 210 candidates of 1024 to 131072 slots of 8 to 256 groups on an H200 (cold L2, medians of 15), which they
# meet within 3 % (rms); first choices took 2 % more than the best candidate in the mean, and 11 % at worst.
START_US = 3.5  # launch, and a block's barriers
TURN_CYCLES = 12.0  # of an SM, for a warp's turn in both passes
SECTOR_CYCLES = 1.9  # for each piece of the order that a warp writes by itself: its slots of one group lie together
CLUSTER_SECTOR_CYCLES = 0.14  # the same of all blocks of a cluster, which lie in one part of the GPU
TURN_US = 0.136  # of a turn, one after another: counts in shared memory, read and written
VOTE_US = 0.0018  # of each bit's vote
COUNT_US = 0.028  # of a warp's count that is added to those before it
SCAN_US = 0.072  # of the first warp, for as many groups as it has lanes
MEETING_US = 0.65  # of a cluster's blocks,
DOUBLING_US = 0.07  # for each doubling of them,
FAR_US = 0.025  # and for each of another block's counts that a thread reads


def slot_sort(graph: Graph, target: Target, layout: Layout) -> Iterator[SlotsPlan]:
    """Every block size and cluster, where a block's counts fit its shared memory."""
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
    for cluster, warps in itertools.product(CLUSTERS, WARPS):
        if cluster > target.max_cluster or warps * target.warp > target.threads_per_block:
            continue
        lanes = cluster * warps * target.warp
        most = (cluster, warps) == (1, WARPS[0]) or lanes // 2 < slots  # more than half of them have slots
        if most and shared_bytes(warps, groups, cluster) <= target.shared_bytes:
            turns = -(-slots // lanes)
            batch = min(MOST_BATCH, turns)
            tile = SlotTile(warps, -(-turns // batch) * batch, batch, cluster)
            yield slots_plan(graph, target, layout, tile, ends)


def with_fewer_slots(plan: SlotsPlan, graph: Graph) -> SlotsPlan:
    """The plan of a sort of fewer slots, by as many warps and blocks: a warp has as many turns as leave slots to a
    second block, where there are several, and as many rounds as before or two."""
    ends = next(n for n in graph.orders if n.op.name == "group_ends")
    slots, tile = size_of(ends.inputs[0].shape[-1], graph.sizes), plan.tile
    turns = max(1, min(tile.turns, -(-slots // plan.threads) - (tile.cluster > 1)))
    batch = min(tile.batch, turns if tile.rounds == 1 or turns == tile.turns else max(1, turns // 2))
    made = replace(tile, turns=turns - turns % batch, batch=batch)
    return slots_plan(graph, plan.target, plan.layout, made, ends)


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
        shared_bytes=shared_bytes(tile.warps, groups, tile.cluster),
        cost=slot_cost(graph, target, tile, groups, ordered=bool(written["slot_order"])),
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
    who = "one block" if tile.cluster == 1 else f"a cluster of {tile.cluster} blocks"
    return f"counting sort of {slots} slots by {groups} groups in {who} of {tile.warps} warps, {each} slots each"


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


def slot_cost(graph: Graph, target: Target, tile: SlotTile, groups: int, ordered: bool) -> Cost:
    """What an SM does of a block's turns, and of those of its cluster what their part of the GPU does; turns one after
    another; and between the passes counts that are added up. The order of 65536 slots of 256 groups is 58000 pieces,
    of 30 groups a warp: one block took 78 us on an H200, 32 of them for these, and a cluster of 16 takes 12. Not
    measured on AMD."""
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
    cycles_us = target.fp32_tflops * 1e6 / (2 * target.sms * target.f32_lanes)
    sectors = groups * (1 - (1 - 1 / groups) ** target.warp) if ordered else 0.0  # groups among a warp's slots
    turns, a_thread = tile.turns * tile.warps, math.ceil((groups + 1) / lanes)
    block_us = turns * (TURN_CYCLES + SECTOR_CYCLES * sectors) / cycles_us
    cluster_us = turns * tile.cluster * CLUSTER_SECTOR_CYCLES * sectors / cycles_us
    waiting_us = tile.turns * (TURN_US + VOTE_US * (groups + 1).bit_length())
    between_us = COUNT_US * a_thread * tile.warps + SCAN_US * math.ceil((groups + 1) / target.warp)
    if tile.cluster > 1:
        between_us += MEETING_US + DOUBLING_US * math.log2(tile.cluster) + FAR_US * tile.cluster * a_thread
    return Cost(
        traffic=moved,
        floor_us=floor_us(target, moved),
        time_us=START_US + between_us + overlapped((block_us, cluster_us, waiting_us), OVERLAP_EXPONENT),
        bound="instruction",
        in_flight_bytes=lanes * tile.batch * 4,
        registers=FRAME_REGISTERS + tile.batch,
        blocks_per_sm=1,
    )
