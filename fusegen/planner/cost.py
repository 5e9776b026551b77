"""What a plan moves and how long that should take: the numbers candidates are ranked by and `plan` prints.

Three ways of counting bytes, side by side, because papers, users and DRAM count differently:

- *per element*: every operand counted once for every element, vectors too; unfused, each operator reads its operands
  (twice where a reduction must come first) and writes its result. A chain of bias, GELU, residual and LayerNorm in f16
  is 6 + 4 + 6 + 10 = 26 B unfused and 12 B fused.
- *ideal*: each tensor's own bytes, once.
- *moved*: what this plan asks of DRAM; a streamed row is read once a walk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fusegen.graph import Extent, Graph, Kind, Node
from fusegen.naming import value_names
from fusegen.planner.model import Access, Cost, Decision, Stage, Staging, TensorTraffic, Tile, Traffic
from fusegen.planner.pieces import arrays, bytes_of
from fusegen.targets.base import Target
from fusegen.types import DType, b8, f32, i32

# Share of the data sheet's DRAM rate that a plain device copy reaches: 4.2 of 4.8 TB/s on an H200.
COPY_SHARE = 0.88
# Bytes in flight in one SM at which a kernel reaches half of the copy rate. By Little's law an H200 wants about
# 4.2 TB/s x 0.7 us / 132 SMs = 22 KB outstanding for all of it; past that, more help less and less.
HALF_RATE_BYTES = 3000
HALF_RATE_OCCUPANCY = 0.05
LAUNCH_US = 2.0  # a launch that does nothing, as seen from its stream
UNROLL = 4  # vectors in flight in a loop that is not unrolled whole


def traffic(graph: Graph, stages: Iterable[Stage]) -> Traffic:
    """Bytes and operations of one launch of `stages` at the graph's sizes."""
    elements, rows = graph.rows * graph.cols, graph.rows
    walks: dict[str, int] = {}
    for stage in stages:
        for load in stage.reads:
            walks[load.access.tensor] = walks.get(load.access.tensor, 0) + 1
    tensors = []
    for tensor in arrays(graph):
        output = any(tensor is t for t in graph.outputs)
        size = bytes_of(graph, tensor)
        by_column = tensor.shape[-1] == graph.shape[-1]
        again = 1 if output or size < (elements * tensor.dtype.bytes) // 2 else walks.get(tensor.name, 1)
        per_element = tensor.dtype.bytes * (elements if by_column else rows)
        tensors.append(TensorTraffic(tensor.name, output, size, size * again, per_element))
    unfused = [operator_traffic(graph, nodes) for nodes in operators(graph)]
    per_element_fused = sum(t.per_element for t in tensors)
    per_element_unfused = sum(o.per_element for o in unfused)
    counts = {Extent.ELEMENT: elements, Extent.ROW: rows, Extent.LAUNCH: 0}
    flops = special = 0
    for node in graph.nodes:
        walked = graph.extents[node.inputs[0]] if node.op.kind is Kind.REDUCE else graph.extents[node]
        flops += node.op.flops * counts[walked]
        special += counts[walked] if node.op.flops >= 4 else 0
    return Traffic(
        tensors=tuple(tensors),
        ideal=sum(t.ideal for t in tensors),
        moved=sum(t.moved for t in tensors),
        unfused=sum(o.moved for o in unfused),
        per_element_fused=per_element_fused,
        per_element_unfused=per_element_unfused,
        flops=flops,
        special=special,
        launches_unfused=len(unfused),
        bytes_per_element_fused=per_element_fused / max(1, elements),
        bytes_per_element_unfused=per_element_unfused / max(1, elements),
    )


@dataclass(frozen=True, slots=True)
class OperatorTraffic:
    """One operator as a kernel of its own: what it moves, by both counts, and its result's share of that."""

    name: str
    moved: int
    per_element: int
    written: tuple[Node, ...]
    read: tuple[tuple[Node, int], ...]  # values from outside and how often


def operators(graph: Graph) -> list[list[Node]]:
    """The user's operators in order, each as its nodes; steps that only make literals or indices are none."""
    groups: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.op.kind is not Kind.INPUT:
            groups.setdefault(node.operator.index, []).append(node)
    return [
        nodes
        for _, nodes in sorted(groups.items())
        if any(n.op.kind is not Kind.LEAF and graph.extents[n] is not Extent.LAUNCH for n in nodes)
    ]


def operator_traffic(graph: Graph, nodes: list[Node]) -> OperatorTraffic:
    inside = set(nodes)
    results = [n for n in nodes if is_result(graph, n, inside)]
    reads: dict[Node, int] = {}
    for outer in dict.fromkeys(a for n in nodes for a in n.inputs if a not in inside):
        if outer.op.kind is Kind.LEAF or graph.extents[outer] is Extent.LAUNCH:
            continue
        before, after = reaches(outer, nodes, graph)
        reads[outer] = max(1, before + after) if graph.extents[outer] is Extent.ELEMENT else 1
    per_element = sum(count_bytes(graph, n, True) * times for n, times in reads.items())
    moved = sum(count_bytes(graph, n, False) * times for n, times in reads.items())
    per_element += sum(count_bytes(graph, n, True) for n in results)
    moved += sum(count_bytes(graph, n, False) for n in results)
    return OperatorTraffic(nodes[-1].operator.name, moved, per_element, tuple(results), tuple(reads.items()))


def is_result(graph: Graph, node: Node, inside: set[Node]) -> bool:
    if node.op.kind is Kind.LEAF or graph.extents[node] is Extent.LAUNCH:
        return False
    return any(t.node is node for t in graph.outputs) or any(u not in inside for u in graph.users[node])


def reaches(outer: Node, nodes: list[Node], graph: Graph) -> tuple[bool, bool]:
    """Does a value feed a reduction of the operator, and does it feed an element result past no reduction?"""
    touched = {outer}
    before = after = False
    for node in nodes:
        if not any(a in touched for a in node.inputs):
            continue
        if node.op.kind is Kind.REDUCE:
            before = True
            continue
        touched.add(node)
        after = after or is_result(graph, node, set(nodes))
    return before, after


def storage(graph: Graph, node: Node) -> DType:
    """The type a value would have in memory between unfused operators: that of its operands, the wider one."""
    for tensor in (*graph.outputs, *graph.inputs):
        if tensor.node is node:
            return tensor.dtype
    if node.dtype is b8 or node.dtype is i32:
        return node.dtype
    kinds = {storage(graph, a) for a in node.inputs if a.dtype is f32 and a.op.kind is not Kind.LEAF and a.shape}
    return kinds.pop() if len(kinds) == 1 else f32


def count_bytes(graph: Graph, node: Node, per_element: bool) -> int:
    size = storage(graph, node).bytes
    if per_element:
        return size * (graph.rows * graph.cols if graph.extents[node] is Extent.ELEMENT else graph.rows)
    count = 1
    for s in node.shape:
        count *= s if isinstance(s, int) else graph.sizes[s.name]
    return size * count


def decisions(graph: Graph) -> tuple[Decision, ...]:
    """Every value that an unfused chain would write and read again, and that this kernel never does."""
    names = value_names(graph)
    groups = [operator_traffic(graph, nodes) for nodes in operators(graph)]
    found = []
    for group in groups:
        for node in group.written:
            if any(t.node is node for t in graph.outputs):
                readers = [g.name for g in groups if any(n is node for n, _ in g.read)]
                if readers:
                    saved = sum(count_bytes(graph, node, False) * k for g in groups for n, k in g.read if n is node)
                    found.append(
                        Decision(names[node], f"written once; {', '.join(readers)} takes it as computed", saved)
                    )
                continue
            size = count_bytes(graph, node, False)
            times = sum(k for g in groups for n, k in g.read if n is node)
            readers = [g.name for g in groups if any(n is node for n, _ in g.read)]
            verdict = f"{group.name} is fused into {', '.join(readers)}: not written, not read {times}x"
            found.append(Decision(names[node], verdict, size * (1 + times)))
    return tuple(found)


# ---------------------------------------------------------------- time


@dataclass(frozen=True, slots=True)
class Work:
    """What `estimate` needs of a candidate beside its traffic."""

    tile: Tile
    staging: Staging
    stages: tuple[Stage, ...]
    accesses: tuple[Access, ...]
    shared_bytes: int  # dynamic and static
    kept_bytes: int  # for one element
    warps_per_row: int
    windowed: bool
    blocks: int  # in the launch


def estimated_registers(work: Work) -> int:
    """Registers of one thread, an estimate that errs high: a spill costs more than a resident block.

    A loop that is not unrolled whole holds UNROLL vectors. In the first walk loaded vectors die as kept values are
    born; later walks hold what is kept beside what they load. NVRTC 13.5 used 48, 80 and 136 for the LayerNorm chain
    with 2, 4 and 8 vectors of 8 halves, where this says 56, 88 and 152; the element-wise ends of windows take twice.
    """
    whole = work.staging in ("registers", "none")
    elements = (work.tile.per_thread if whole else min(UNROLL, work.tile.per_thread)) * work.tile.vector
    kept = work.kept_bytes if work.staging == "registers" else 0
    held = kept
    for number, stage in enumerate(work.stages):
        loaded = sum(load.access.dtype.bytes for load in stage.reads)
        held = max(held, loaded if number == 0 else kept + loaded)
    return 24 + math.ceil(elements * held / 4) * (2 if work.windowed else 1)


def resident_blocks(target: Target, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks that one SM holds at a time."""
    unit = target.register_unit
    per_warp = -(-registers // unit) * unit * target.warp
    warps = -(-threads // target.warp)
    by_registers = target.registers_per_sm // (per_warp * warps)
    by_threads = target.threads_per_sm // threads
    by_shared = (
        target.shared_per_sm // (shared_bytes + target.shared_reserved) if shared_bytes else target.blocks_per_sm
    )
    return min(by_registers, by_threads, by_shared, target.blocks_per_sm)


def estimate(target: Target, work: Work, moved: Traffic) -> Cost:
    """The time of one launch: bytes at the rate that the loads in flight sustain, or flops, whichever is longer."""
    tile = work.tile
    registers = estimated_registers(work)
    resident = max(1, resident_blocks(target, tile.threads, registers, work.shared_bytes))
    vectors = tile.per_thread if work.staging in ("registers", "none") else min(UNROLL, tile.per_thread)
    first = sum(load.access.dtype.bytes for load in work.stages[0].reads) if work.stages else 0
    in_flight = resident * tile.threads * vectors * tile.vector * first
    useful = min(1.0, work.blocks / (resident * target.sms))  # few rows leave SMs without a block
    rate = in_flight * useful / (in_flight * useful + HALF_RATE_BYTES)
    occupancy = resident * tile.threads / target.threads_per_sm
    rate *= occupancy / (occupancy + HALF_RATE_OCCUPANCY)  # other rows load while this one reduces
    rate *= width_share(work)
    rate /= 1 + 0.01 * math.log2(work.warps_per_row) * len(work.stages)  # barriers: a row waits for its slowest warp
    peak = target.dram_gbs * COPY_SHARE * 1e3  # bytes per us
    memory_us = moved.moved / (peak * rate)
    compute_us = moved.flops / (target.fp32_tflops * 1e6 * 0.5)  # half: few instructions are fused multiply-adds
    floor = max(moved.ideal / (target.dram_gbs * 1e3), moved.flops / (target.fp32_tflops * 1e6))
    return Cost(
        traffic=moved,
        floor_us=floor,
        time_us=LAUNCH_US + max(memory_us, compute_us),
        bound="memory" if memory_us >= compute_us else "compute",
        in_flight_bytes=in_flight,
        registers=registers,
        blocks_per_sm=resident,
    )


def width_share(work: Work) -> float:
    """Share of the copy rate by what one instruction moves: narrow accesses spend issue slots instead of bytes."""
    by_width = {16: 1.0, 8: 0.97, 4: 0.9, 2: 0.7, 1: 0.5}
    moving = [a for a in work.accesses if a.by_column and a.strided] or list(work.accesses)
    bytes_all = sum(a.dtype.bytes for a in moving)
    share = sum(a.dtype.bytes * by_width[a.vector_bytes] for a in moving) / max(1, bytes_all)
    return share * (0.95 if work.windowed else 1.0)
