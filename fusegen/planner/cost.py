"""What a plan moves, and what it saves: the bytes that `plan` prints and `duration` turns into time.

Three ways of counting bytes, side by side, because papers, users and DRAM count differently:

- *per element*: every operand counted once for every element, vectors too; unfused, each operator reads its operands
  (twice where a reduction must come first) and writes its result. A chain of bias, GELU, residual and LayerNorm in f16
  is 6 + 4 + 6 + 10 = 26 B unfused and 12 B fused.
- *ideal*: each tensor's own bytes, once.
- *moved*: what this plan asks of DRAM; a streamed row is read once a pass, from DRAM where the L2 can't hold it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusegen.language.graph import Extent, Graph, Kind, Node, once_per_graph
from fusegen.language.naming import value_names
from fusegen.language.operators import operators
from fusegen.language.types import size_of
from fusegen.planner.limits import limits, share_read
from fusegen.planner.model import Decision, RowPass, TensorTraffic, Tile, Traffic
from fusegen.planner.pieces import arrays, bytes_of
from fusegen.targets.base import Target


def shares_read(graph: Graph, passes: Iterable[RowPass]) -> dict[str, float]:
    """The share of each masked tensor that is read at all."""
    widths = {load.access.tensor: load.access.vector for row_pass in passes for load in row_pass.loads}
    tensor_of = graph.tensor_of
    return {
        tensor_of[node].name: share_read(graph, limit, widths.get(tensor_of[node].name, 1))
        for node, limit in limits(graph).items()
    }


def rereads_hit(graph: Graph, target: Target, tile: Tile, again: float, shared_bytes: int) -> bool:
    """Does what is read again, the share `again` of a row, come from the L2 cache: does that of the rows of all
    resident blocks, each with `shared_bytes`, fit in half of it?

    On an H200, add_rmsnorm at 16384 x 4096 took 132.8 us with two reads of each row and 133.0 with one. A softmax at
    4096 x 131072 that kept 14 of 16 vectors read 1075.9 MB of DRAM by its counters, where its input has 1073.7.
    """
    blocks = target.threads_per_sm // tile.threads
    if shared_bytes:
        blocks = min(blocks, target.shared_per_sm // (shared_bytes + target.shared_reserved))
    rows = min(graph.rows, target.sms * blocks * tile.rows_per_block // tile.cluster)
    inputs = {t.name for t in graph.inputs}
    row_bytes = sum(t.dtype.bytes * graph.cols for t in arrays(graph) if t.name in inputs and t.shape == graph.shape)
    return rows * row_bytes * again <= target.l2_bytes // 2


def traffic(
    graph: Graph, passes: Iterable[RowPass], again_from_l2: bool, again: float, repeats: Iterable[tuple[str, str]] = (),
    neighbours: int = 1, l2_bytes: float = math.inf,
) -> Traffic:  # fmt: skip
    """Bytes and operations of one launch of `passes` at the graph's sizes.

    `again`: the share of a kept row that later passes read again all the same. `repeats`: operands that show what
    another one shows (`Layout.again`). They come from the L2 cache, and from a block's L1 where it has the rows beside
    each other: of so many `neighbours` one row more is asked for. `l2_bytes`: of the target's L2 cache.
    """
    shown, named = dict(repeats), {tensor.name: tensor for tensor in arrays(graph)}
    elements, rows = graph.rows * graph.cols, graph.rows
    reads: dict[str, float] = {}
    for row_pass in passes:
        for load in row_pass.loads:
            reads[load.access.tensor] = reads.get(load.access.tensor, 0) + (again if load.when == "kept" else 1)
    shares = shares_read(graph, passes)
    tensors = []
    for tensor in arrays(graph):
        output = any(tensor is t for t in graph.outputs)
        whole = bytes_of(graph, tensor)
        if tensor.node in graph.written_at:  # the rows alone
            whole = tensor.dtype.bytes * math.prod(size_of(size, graph.sizes) for size in tensor.node.shape)
        if not output and tensor.node not in graph.users:  # a selection goes by its key alone
            tensors.append(TensorTraffic(tensor.name, output, 0, 0, 0, 0))
            continue
        size, missed = round(whole * shares.get(tensor.name, 1.0)), 0
        if not output:
            size = round(size * share_taken(graph, tensor.node, graph.users[tensor.node]))
            asked_of = gathered_bytes(graph, tensor.node, size)
            size, missed = min(size, asked_of), missed_bytes(min(size, asked_of), asked_of, l2_bytes)
        by_column = tensor.shape[-1] == graph.shape[-1]
        shared_by_rows = (
            whole < elements * tensor.dtype.bytes // 2
        )  # small, and so in the L2 cache from the first row on
        once = output or again_from_l2 or shared_by_rows
        times = 1 if once else reads.get(tensor.name, 1)
        few = output and tensor.node in graph.picked | graph.grouped | frozenset(graph.parts)
        per_element = whole if few else tensor.dtype.bytes * (elements if by_column else rows)
        asked = reads.get(tensor.name, 1)
        if tensor.name in shown:
            tensors.append(TensorTraffic(tensor.name, output, 0, 0, per_element, 0))
            continue
        parts = {part: bytes_of(graph, named[part]) / max(1, whole) for part, of in shown.items() if of == tensor.name}
        asked += sum(reads.get(part, 1) * min(1.0, share) for part, share in parts.items()) / neighbours
        tensors.append(TensorTraffic(tensor.name, output, size, round(size * times) + missed, per_element, asked))
    unfused = unfused_kernels(graph)
    per_element_fused = sum(t.per_element for t in tensors)
    per_element_unfused = sum(o.per_element for o in unfused)
    counts = {
        Extent.ELEMENT: elements, Extent.PICKED: rows * graph.picks, Extent.ROW: rows, Extent.LAUNCH: 0,
        Extent.GROUP: elements // group_of(graph),
    }  # fmt: skip
    flops = special = 0
    for node in graph.nodes:
        whole_row = node.op.kind in (Kind.REDUCE, Kind.GROUP, Kind.PART) or node.op.name == "top_columns"
        extent = graph.extents[node.inputs[0] if whole_row else node]
        flops += node.op.flops * counts[extent]
        special += counts[extent] if node.op.flops >= 4 else 0
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
    """One operator as a kernel of its own: what it moves, by both counts, and its result's share of that.

    Of what is only taken at columns, it reads those.
    """

    name: str
    moved: int
    per_element: int
    written: tuple[Node, ...]
    read: tuple[tuple[Node, int], ...]  # values from outside and how often


def copy_traffic(graph: Graph, name: str, node: Node) -> OperatorTraffic:
    moved, per_element = 2 * count_bytes(graph, node, False), 2 * count_bytes(graph, node, True)
    return OperatorTraffic(f"copy to {name}", moved, per_element, (node,), ((node, 1),))


@once_per_graph
def unfused_kernels(graph: Graph) -> list[OperatorTraffic]:
    """What the chain would be as one kernel an operator; an operand that is returned as it is makes a copy."""
    graph = graph.written
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
    shares = {n: share_taken(graph, n, [u for u in graph.users[n] if u in inside]) for n in reads}
    per_element = sum(round(count_bytes(graph, n, True) * times * shares[n]) for n, times in reads.items())
    moved = sum(round(count_bytes(graph, n, False) * times * shares[n]) for n, times in reads.items())
    rows = [n for n in nodes if n.op.name == "gather" and n.inputs[0] in graph.tables]  # as if no two were the same
    per_element += sum(count_bytes(graph, n, True) for n in (*rows, *results))
    moved += sum(count_bytes(graph, n, False) for n in (*rows, *results))
    operator = nodes[-1].operator
    name = f"{operator.name} (line {operator.where.line})"
    return OperatorTraffic(name, moved, per_element, tuple(results), tuple(reads.items()))


def share_taken(graph: Graph, node: Node, users: Sequence[Node]) -> float:
    """The share of a row that these users read: all of it, unless each takes it at the columns chosen."""
    taken = users and all(u.op.name == "take" and u.inputs[0] is node for u in users)
    return min(1.0, graph.picks / graph.cols) if taken else 1.0


def gathered_bytes(graph: Graph, node: Node, otherwise: int) -> int:
    """The bytes that are read of an operand in rows or columns that indices name, as if no two were the same; of one
    that is read in another way too `otherwise`."""
    users = graph.users.get(node, ())
    if not users or any(u.op.kind is not Kind.GATHER or u.inputs[0] is not node for u in users):
        return otherwise
    size = graph.storage[node].bytes
    elements = sum(math.prod(size_of(s, graph.sizes) for s in user.shape) for user in users)
    return size * elements


def missed_bytes(once: int, named: int, l2_bytes: float) -> int:
    """Of rows that indices name again, in any order, the bytes that the L2 cache has no more: half of it is taken by
    what is written meanwhile, and a row may be in both of its halves. Rows of 4 KB, each named by 4 of 65536 ids,
    sorted by experts, took 136 us to copy on an H200, of 1 to 4 times as many 278 and 560: with all of them read 4
    times that is 3.8 to 3.9 TB/s. Five such copies of 15 to 25 MB, each row named 4 or 8 times, took 1.21 to 1.24 of
    what was said where rows had half of the cache, and take 1.04 to 1.11 of this."""
    return round(max(0, named - once) * math.exp(-l2_bytes / (4 * once))) if once else 0


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
        if node.op.kind in (Kind.REDUCE, Kind.GROUP, Kind.PART):
            before = True
            continue
        touched.add(node)
        after = after or is_result(graph, node, set(nodes))
    return before, after


def count_bytes(graph: Graph, node: Node, per_element: bool) -> int:
    size = graph.storage[node].bytes
    if per_element and not graph.products and node.op.kind is not Kind.PART:
        groups = graph.cols // group_of(graph)
        each = {Extent.ELEMENT: graph.cols, Extent.PICKED: graph.picks, Extent.GROUP: groups}.get(
            graph.extents[node], 1
        )
        return size * graph.rows * each
    count = 1
    for s in node.shape:
        count *= size_of(s, graph.sizes)
    return size * count


def group_of(graph: Graph) -> int:
    """Columns of a group that rows are reduced by; 1 without groups."""
    return max((node.group for node in graph.grouped), default=1) or 1


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
    found = list(limit_decisions(graph, value_names(graph)))
    graph = graph.written
    names = value_names(graph)
    groups = [operator_traffic(graph, nodes) for nodes in operators(graph)]
    readers: dict[Node, list[tuple[str, int]]] = {}
    for group in groups:
        for node, times in group.read:
            readers.setdefault(node, []).append((group.name, times))
    outputs = {t.node for t in graph.outputs}
    for group in groups:
        for node in group.written:
            who = ", ".join(name for name, _ in readers.get(node, []))
            times = sum(count for _, count in readers.get(node, []))
            size = count_bytes(graph, node, False)
            if node not in outputs:
                again = "again" if times == 1 else f"{times} times"
                verdict = f"{group.name} is fused into {who}: neither written nor read {again}"
                found.append(Decision(names[node], verdict, size * (1 + times)))
            elif who:
                found.append(Decision(names[node], f"written once; {who} takes it as computed", size * times))
    return tuple(found)
