"""What a plan moves and how long that should take: the numbers candidates are ranked by and `plan` prints.

Three ways of counting bytes, side by side, because papers, users and DRAM count differently:

- *per element*: every operand counted once for every element, vectors too; unfused, each operator reads its operands
  (twice where a reduction must come first) and writes its result. A chain of bias, GELU, residual and LayerNorm in f16
  is 6 + 4 + 6 + 10 = 26 B unfused and 12 B fused.
- *ideal*: each tensor's own bytes, once.
- *moved*: what this plan asks of DRAM; a streamed row is read once a walk, from DRAM where the L2 can't hold it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fusegen.graph import Extent, Graph, Kind, Node, once_per_graph
from fusegen.naming import value_names
from fusegen.planner.limits import limits, share_read
from fusegen.planner.model import Access, Cost, Decision, Stage, Staging, TensorTraffic, Tile, Traffic
from fusegen.planner.pieces import VECTOR_BYTES, arrays, bytes_of
from fusegen.targets.base import Target

# Share of the data sheet's DRAM rate that a plain device copy reaches: 4.2 of 4.8 TB/s on an H200.
COPY_SHARE = 0.88
# Bytes in flight in one SM at which a kernel reaches half of the copy rate. By Little's law an H200 wants about
# 4.2 TB/s x 0.7 us / 132 SMs = 22 KB outstanding for all of it; past that, more help less and less.
HALF_RATE_BYTES = 1000
# A block that is alone on its SM has nothing to load while it reduces. Of 0.3 ... 1.2 this lost least against the best
# measured candidate over benchmarks/candidates.py on an H200: 5 % in the mean, 22 % at worst.
ALONE = 1.2
# Share of an instruction that issues alone, beside loads and other warps' work. With SPECIAL this fits the sweep of
# benchmarks/candidates.py on an H200 to 35 % (rms of the logarithm): the ranking is meant, the times are less sure.
ISSUE = 0.8
SPECIAL = 1.5  # instructions a flop of exp, tanh, a division ...: range reduction and the slow path's test
PER_THREAD = 60.0
PER_DIVISION = 50.0  # in 64 bits, of operands that mostly fit 32
PER_STEP = 4.0  # of a reduction across lanes
SHARED_ACCESS = 2.0
BY_ELEMENT = 12.0  # bounds test, address and predicated access of one element
ONLINE = {"softmax": 40, "welford": 24}
TWICE = 0.45
APART = (
    0.5  # bias_relu 65536 x 4096 in f16 by 8 single elements a thread: 763 us, by vectors 254; f32 copies lose nothing
)
L2_SHARE = 0.4  # time of a byte from the L2 cache, in that of one from DRAM
ROLLED = 0.5  # a loop that fills shared memory and is not unrolled whole waits for its loads again and again
# Loads behind a test of their own wait one for another, unless a loop that ends in shared memory lets them go: the
# LayerNorm chain at 16384 x 4097 took 358 us streamed, 381 ... 877 in registers and 224 ... 264 in shared memory.
TESTED = 0.6
# Values kept in registers across branches: the causal softmax chain at 32 x 4096 x 4096 took 661 us with 4 vectors a
# thread in registers, 445 in shared memory, 627 and 503 with 2.
BRANCHED = 0.6
SECTOR = 16  # bytes that the threads of a row should find next to each other
LAUNCH_US = 2.0  # a launch that does nothing, as seen from its stream
UNROLL = 4  # vectors in flight in a loop that is not unrolled whole


def shares_read(graph: Graph, stages: Iterable[Stage]) -> dict[str, float]:
    """The share of each masked tensor that is read at all."""
    widths = {load.access.tensor: load.access.vector for stage in stages for load in stage.loads}
    tensor_of = graph.tensor_of
    return {
        tensor_of[node].name: share_read(graph, limit, widths.get(tensor_of[node].name, 1))
        for node, limit in limits(graph).items()
    }


def rereads_hit(graph: Graph, target: Target, tile: Tile) -> bool:
    """Does a row that is read again come from the L2 cache: do the rows of all resident blocks fit in half of it?

    On an H200, add_rmsnorm at 16384 x 4096 took 132.8 us with two reads of each row and 133.0 with one.
    """
    rows = target.sms * (target.threads_per_sm // tile.threads) * tile.rows_per_block
    inputs = {t.name for t in graph.inputs}
    row_bytes = sum(t.dtype.bytes * graph.cols for t in arrays(graph) if t.name in inputs and t.shape == graph.shape)
    return rows * row_bytes <= target.l2_bytes // 2


def traffic(graph: Graph, stages: Iterable[Stage], again_from_l2: bool) -> Traffic:
    """Bytes and operations of one launch of `stages` at the graph's sizes."""
    elements, rows = graph.rows * graph.cols, graph.rows
    walks: dict[str, int] = {}
    for stage in stages:
        for load in stage.reads:
            walks[load.access.tensor] = walks.get(load.access.tensor, 0) + 1
    shares = shares_read(graph, stages)
    tensors = []
    for tensor in arrays(graph):
        output = any(tensor is t for t in graph.outputs)
        whole = bytes_of(graph, tensor)
        size = round(whole * shares.get(tensor.name, 1.0))
        by_column = tensor.shape[-1] == graph.shape[-1]
        shared_by_rows = (
            whole < elements * tensor.dtype.bytes // 2
        )  # small, and so in the L2 cache from the first row on
        once = output or again_from_l2 or shared_by_rows
        again = 1 if once else walks.get(tensor.name, 1)
        per_element = tensor.dtype.bytes * (elements if by_column else rows)
        tensors.append(TensorTraffic(tensor.name, output, size, size * again, per_element, walks.get(tensor.name, 1)))
    unfused = unfused_kernels(graph)
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


def copy_traffic(graph: Graph, name: str, node: Node) -> OperatorTraffic:
    moved, per_element = 2 * count_bytes(graph, node, False), 2 * count_bytes(graph, node, True)
    return OperatorTraffic(f"copy to {name}", moved, per_element, (node,), ((node, 1),))


@once_per_graph
def unfused_kernels(graph: Graph) -> list[OperatorTraffic]:
    """What the chain would be as one kernel an operator; an operand that is returned as it is makes a copy."""
    copies = [copy_traffic(graph, t.name, t.node) for t in graph.outputs if t.node.op.kind is Kind.INPUT]
    return [*(operator_traffic(graph, nodes) for nodes in operators(graph)), *copies]


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
    operator = nodes[-1].operator
    name = f"{operator.name} (line {operator.where.line})"
    return OperatorTraffic(name, moved, per_element, tuple(results), tuple(reads.items()))


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


def count_bytes(graph: Graph, node: Node, per_element: bool) -> int:
    size = graph.storage[node].bytes
    if per_element:
        return size * (graph.rows * graph.cols if graph.extents[node] is Extent.ELEMENT else graph.rows)
    count = 1
    for s in node.shape:
        count *= s if isinstance(s, int) else graph.sizes[s.name]
    return size * count


def limit_decisions(graph: Graph, names: Mapping[Node, str]) -> Iterator[Decision]:
    for node, limit in limits(graph).items():
        tensor = graph.tensor_of[node]
        saved = round((1 - share_read(graph, limit, 1)) * bytes_of(graph, tensor))
        bound = names.get(limit.bound, str(limit.bound.literal))
        yield Decision(
            tensor.name, f"read only where col {limit.sign} {bound}: its mask hides the rest of the row", saved
        )


@once_per_graph
def decisions(graph: Graph) -> tuple[Decision, ...]:
    """Every value that an unfused chain would write and read again, and that this kernel never does."""
    names = value_names(graph)
    groups = [operator_traffic(graph, nodes) for nodes in operators(graph)]
    readers: dict[Node, list[tuple[str, int]]] = {}
    for group in groups:
        for node, times in group.read:
            readers.setdefault(node, []).append((group.name, times))
    outputs = {t.node for t in graph.outputs}
    found = list(limit_decisions(graph, names))
    for group in groups:
        for node in group.written:
            who = ", ".join(name for name, _ in readers.get(node, []))
            times = sum(count for _, count in readers.get(node, []))
            size = count_bytes(graph, node, False)
            if node not in outputs:
                again = "again" if times == 1 else f"{times} times"
                verdict = f"{group.name} is fused into {who}: not written, not read {again}"
                found.append(Decision(names[node], verdict, size * (1 + times)))
            elif who:
                found.append(Decision(names[node], f"written once; {who} takes it as computed", size * times))
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
    ragged: bool  # elements of a vector are tested one by one
    blocks: int  # in the launch


def estimated_registers(work: Work) -> int:
    """Registers of one thread, an estimate that errs high: a spill costs more than a resident block.

    A loop that is not unrolled whole holds UNROLL vectors. In the first walk loaded vectors die as kept values are
    born; later walks hold what is kept beside what they load. NVRTC 13.5 used 48, 80 and 136 for the LayerNorm chain
    with 2, 4 and 8 vectors of 8 halves, where this says 48, 80 and 144; tests of single elements take twice,
    and so do vectors behind a mask's limit (the causal softmax chain: 99 and 64 with 4 and 2 vectors, not 48 and 32).
    """
    whole = work.staging in ("registers", "none")
    elements = (work.tile.per_thread if whole else min(UNROLL, work.tile.per_thread)) * work.tile.vector
    kept = work.kept_bytes if work.staging == "registers" else 0
    masked = any(stage.until for stage in work.stages)
    held = kept
    for number, stage in enumerate(work.stages):
        loaded = sum(load.access.dtype.bytes for load in stage.reads)
        held = max(held, loaded if number == 0 else kept + loaded)
    return max(32, 16 + math.ceil(elements * held / 4) * (2 if work.ragged or masked else 1))


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


def estimate(target: Target, work: Work, moved: Traffic, graph: Graph) -> Cost:
    """The time of one launch: the bytes at the rate that the loads in flight sustain, beside the instructions at the
    rate that the schedulers issue them. The two overlap, but not wholly: their Euclidean sum fits the measurements."""
    tile = work.tile
    registers = estimated_registers(work)
    resident = max(1, resident_blocks(target, tile.threads, registers, work.shared_bytes))
    vectors = tile.per_thread if work.staging in ("registers", "none") else min(UNROLL, tile.per_thread)
    first = sum(load.access.dtype.bytes for load in work.stages[0].reads) if work.stages else 0
    in_flight = resident * tile.threads * vectors * tile.vector * first
    useful = min(1.0, work.blocks / (resident * target.sms))  # few rows leave SMs without a block
    rate = in_flight * useful / (in_flight * useful + HALF_RATE_BYTES)
    rate *= resident / (resident + ALONE)
    rate *= width_share(work)
    if work.staging == "shared" and tile.per_thread > UNROLL:
        rate *= ROLLED
    if work.staging != "shared" and tile.threads_per_row > target.warp and (work.ragged or tile.vector == 1):
        rate *= TESTED
    if work.staging == "registers" and any(stage.until for stage in work.stages):
        rate *= BRANCHED
    from_l2 = sum(t.ideal * t.walks - t.moved for t in moved.tensors)
    memory_us = (moved.moved + from_l2 * L2_SHARE) / (target.dram_gbs * COPY_SHARE * 1e3 * rate)
    issue_us = ISSUE * instructions(graph, work) / (target.fp32_tflops * 1e6 / 2 * max(useful, 1 / target.sms))
    floor = max(moved.ideal / (target.dram_gbs * 1e3), moved.flops / (target.fp32_tflops * 1e6))
    return Cost(
        traffic=moved,
        floor_us=floor,
        time_us=LAUNCH_US + math.hypot(memory_us, issue_us),
        bound="memory" if memory_us >= issue_us else "compute",
        in_flight_bytes=in_flight,
        registers=registers,
        blocks_per_sm=resident,
    )


def instructions(graph: Graph, work: Work) -> float:
    """Instructions of all lanes in one launch; the vector unit issues half as many a second as its data sheet's flops.

    An element costs its ops, a conversion and a move an operand, and what its walks add; a thread costs its row's
    addresses (a division a dimension, in 64 bits) and its part of each reduction.
    """
    tile = work.tile
    flops_of = {name: node.op.flops for node, name in value_names(graph).items()}
    element = 0.0
    for stage in work.stages:
        element += 2 * len(stage.loads) + 2 * len(stage.stores) + len(stage.takes) + 2 * len(stage.keeps)
        element += SHARED_ACCESS * (len(stage.takes) + len(stage.keeps)) if work.staging == "shared" else 0
        element += sum(ONLINE.get(r.kind, 1) for r in stage.reductions)
        share = min(shares_read(graph, work.stages).values(), default=1.0) if stage.until else 1.0
        flops = [flops_of.get(statement.name, 1) for statement in stage.body]  # again in every walk that computes again
        element += share * sum(f if f < 4 else SPECIAL * f for f in flops)
    if work.ragged:
        element += BY_ELEMENT * len(work.accesses)
    reductions = sum(len(s.reductions) for s in work.stages)
    steps = math.log2(tile.threads_per_row) if tile.threads_per_row > 1 else 0
    dims = max((len(a.strided) for a in work.accesses), default=1)
    thread = PER_THREAD + reductions * (PER_STEP * steps + 20) + PER_DIVISION * (dims - 1)
    threads = work.blocks * tile.threads
    return threads * (thread + element * tile.per_thread * tile.vector)


def side_steps(access: Access) -> float:
    """What is left where a thread's next instruction reads beside its last one, between those of its neighbours."""
    if access.vector * access.dtype.bytes > VECTOR_BYTES:
        return TWICE
    return APART if access.mode == "element" and access.vector > 1 and access.dtype.bytes < 4 else 1.0


def width_share(work: Work) -> float:
    """Share of the copy rate by what one instruction moves: narrow accesses spend issue slots instead of bytes, and a
    thread whose vector takes two instructions leaves every other 16 bytes to the second."""
    by_width = {16: 1.0, 8: 0.97, 4: 0.9, 2: 0.75, 1: 0.5}
    moving = [a for a in work.accesses if a.by_column and a.strided] or list(work.accesses)
    bytes_all = sum(a.dtype.bytes for a in moving)
    shares = [(a.dtype.bytes, by_width[a.vector_bytes] * side_steps(a)) for a in moving]
    side_by_side = work.tile.threads_per_row * work.tile.vector * max(a.dtype.bytes for a in moving)
    return sum(size * share for size, share in shares) / max(1, bytes_all) * min(1.0, side_by_side / SECTOR)
