"""What a chain with matrix products moves and computes, whatever the tiles: bytes by each counting, flops, floors.

The ways of counting bytes that papers and users have for such chains, side by side:

- *unfused*: each operator as written a kernel of its own, as for any other chain;
- *apart*: each product a kernel of its own, with one kernel before it where a factor is computed, and one behind it all
  for the epilogue. A product with bias and GELU moves s(MK + KN + 3MN + N) bytes so;
- *ideal*: each tensor once, s(MK + KN + MN + N) for the same.

A product takes 2MNK flops. Where they take longer than the bytes, tensor cores are the floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from fusegen.language.graph import CASTS, Extent, Graph, Kind, Node, behind, once_per_graph, plain
from fusegen.language.naming import value_names
from fusegen.language.products import Factor, split
from fusegen.language.types import DType, Shape, f16, f32, size_of
from fusegen.planner.cost import count_bytes, gathered_bytes, unfused_kernels
from fusegen.planner.model import TensorTraffic, Traffic, Value
from fusegen.planner.pieces import argument, arrays, bytes_of, digits, roundings
from fusegen.planner.rewrites import hoist_scales
from fusegen.targets.atoms import F32_BITS
from fusegen.targets.base import Target

MOST_LENGTH = 20  # of a group's rows, times the mean and a tile: where the sum of their chances ends


def product_traffic(graph: Graph, target: Target, tile_rows: int, group: int) -> Traffic:
    """Bytes and operations of one launch at the graph's sizes. `graph` is the chain as written.

    Of `group` rows of tiles, of `tile_rows` rows each, those that run together share factors in the L2 cache.
    """
    once = traffic_once(graph)
    passes = right_passes(graph, target, tile_rows, group)
    if not passes:
        return once
    tensors = tuple(
        replace(t, moved=t.ideal * passes[t.tensor], times=passes[t.tensor]) if t.tensor in passes else t
        for t in once.tensors
    )
    return replace(once, tensors=tensors, moved=sum(t.moved for t in tensors))


@once_per_graph
def traffic_once(graph: Graph) -> Traffic:
    """Of a launch to which each tensor comes once."""
    tensors = []
    by_group = rights_by_group(graph)
    for tensor in arrays(graph):
        own = bytes_of(graph, tensor)
        own = min(own, gathered_bytes(graph, tensor.node, own))
        if tensor.name in by_group:  # of groups without rows nothing is read
            own = own * min(graph.rows, group_count(graph)) // group_count(graph)
        tensors.append(TensorTraffic(tensor.name, any(tensor is t for t in graph.outputs), own, own, own, 1))
    ideal = sum(t.ideal for t in tensors)
    operators = unfused_kernels(graph)
    total, special = operations(hoist_scales(graph))
    elements = max(1, graph.rows * graph.cols)
    together = apart(graph)
    return Traffic(
        tensors=tuple(tensors),
        ideal=ideal,
        moved=ideal,
        unfused=sum(o.moved for o in operators),
        per_element_fused=ideal,
        per_element_unfused=together,
        flops=total,
        special=special,
        launches_unfused=len(operators),
        bytes_per_element_fused=ideal / elements,
        bytes_per_element_unfused=together / elements,
        product_flops=product_flops(graph),
    )


def rights_by_group(graph: Graph) -> frozenset[str]:
    """The right factors of grouped products, and what codes are scaled by."""
    if not graph.products[0].ends:
        return frozenset()
    rights = [p.right for p in split(hoist_scales(graph)).products]
    beside = (t for right in rights if right.scaled for t in right.scaled.inputs)
    return frozenset(t.name for t in (*(right.operand for right in rights), *beside) if t is not None)


def right_passes(graph: Graph, target: Target, tile_rows: int, group: int) -> Mapping[str, int]:
    """How often each right factor comes from DRAM: once, or where the L2 cache can't hold all of them beside what a
    group of tile rows needs of the left one, once for each group. A model: not compared with counters."""
    if graph.products[0].inner_ends:  # each group reads its own part of the factors
        return {}
    found = factors_of(graph)
    rows = min(found.rows, group * tile_rows)
    if found.rights_bytes + rows * found.row_bytes <= target.l2_bytes:
        return {}
    groups = -(-found.rows // (group * tile_rows))
    batches = max(1, graph.rows // max(1, found.rows))
    return {name: max(1, groups * batches // own) for name, own in found.batches.items()}


@dataclass(frozen=True, slots=True)
class FactorSizes:
    """Of the factors in memory: rows of one product, bytes of one of them, bytes of all right factors of one product
    each, and of each right factor its batches."""

    rows: int
    row_bytes: int
    rights_bytes: int
    batches: Mapping[str, int]


@once_per_graph
def factors_of(graph: Graph) -> FactorSizes:
    parts = split(hoist_scales(graph))
    k = size_of(parts.products[0].contracted, graph.sizes)
    rights = {t.name: t for p in parts.products if (t := p.right.operand) is not None}
    return FactorSizes(
        rows=count(graph, graph.shape[-2:-1]),
        row_bytes=k * parts.products[0].left.dtype.bytes,
        rights_bytes=sum(count(graph, t.shape[-2:]) * t.dtype.bytes for t in rights.values()),
        batches={name: count(graph, t.shape[:-2]) for name, t in rights.items()},
    )


def count(graph: Graph, shape: Shape) -> int:
    return math.prod(size_of(size, graph.sizes) for size in shape)


def product_flops(graph: Graph) -> int:
    """2MNK of each product, every batch; of groups of K, which each have a part of it, all of them together."""
    return sum(
        2 * count(graph, n.shape[1:] if n.inner_ends else n.shape) * size_of(n.inputs[0].shape[-1], graph.sizes)
        for n in graph.products
    )


def operations(graph: Graph) -> tuple[int, int]:
    """Flops of everything, and calls of exponentials, roots and divisions among them."""
    flops, special = product_flops(graph), 0
    of_groups, groups = set(behind([n.inputs[1] for n in graph.products if n.ends])), group_count(graph)
    for node in graph.nodes:
        if node.op.kind not in (Kind.MAP, Kind.BIAS, Kind.REDUCE) or graph.extents[node] is Extent.LAUNCH:
            continue
        times = count(graph, node.inputs[0].shape if node.op.kind is Kind.REDUCE else node.shape)
        if node in of_groups:  # codes of groups without rows are not looked at
            times = times * min(graph.rows, groups) // groups
        flops += node.op.flops * times
        special += times if node.op.flops >= 4 else 0
    return flops, special


def apart(graph: Graph) -> int:
    """Bytes with each product a kernel of its own, one kernel before it for a computed factor, and one behind all."""
    parts = split(graph)
    total = 0
    made: dict[Node, Factor] = {}
    for product in parts.products:
        total += size_in_memory(graph, product.node)
        for factor in (product.left, product.right):
            if plain(factor.node):
                assert factor.operand is not None
                total += bytes_of(graph, factor.operand)
            else:
                made[factor.node] = factor
                total += size_in_memory(graph, factor.node)
    for factor in made.values():
        statistics = [s for s in parts.statistics if any(s.node in graph_above(graph, row) for row in factor.rows)]
        read = {t.name: t for t in (*factor.inputs, *(t for s in statistics for t in s.inputs))}
        rows = (*factor.rows, *(n for s in statistics for n in s.rows))
        read |= {graph.tensor_of[n].name: graph.tensor_of[n] for n in rows if n in graph.tensor_of}
        total += sum(bytes_of(graph, t) for t in read.values() if t.shape) + size_in_memory(graph, factor.node)
    if parts.epilogue:
        total += sum(size_in_memory(graph, product.node) for product in parts.products)
        total += sum(bytes_of(graph, t) for t in parts.inputs if t.shape)
        returned = {t.node for t in graph.outputs} & set(graph.products)
        total += sum(bytes_of(graph, t) for t in graph.outputs if t.node not in returned)
    return total


def size_in_memory(graph: Graph, node: Node) -> int:
    return count_bytes(graph, node, per_element=False)


def graph_above(graph: Graph, node: Node) -> set[Node]:
    return set(graph.ancestors(node))


def tiles_down(graph: Graph, tile_rows: int) -> int:
    """Tiles of so many rows; of a grouped product, each of whose groups begins one, as many as are to be expected where
    each row is as likely in any group, as experts are chosen."""
    rows, groups = max(1, graph.rows), group_count(graph)
    return -(-rows // tile_rows) if groups == 1 else math.ceil(groups * tiles_of_group(rows / groups, tile_rows))


@cache
def tiles_of_group(mean: float, tile_rows: int) -> float:
    """Of a group that has so many rows in the mean, by Poisson's distribution: of 8 rows in the mean, 4 of 10 groups
    have more than 8."""
    found, below = 0.0, 0.0  # the chance that a group has more than so many tiles is 1 - below
    chance, length = math.exp(-mean), 0
    if chance == 0.0:  # long groups: the last tile is half full
        return mean / tile_rows + 0.5
    while below < 1 - 1e-9 and length < MOST_LENGTH * (mean + tile_rows):
        below += chance
        if length % tile_rows == 0:
            found += 1 - below
        length += 1
        chance *= mean / length
    return found


def again_read(graph: Graph, tile_rows: int) -> float:
    """How often the tiles behind the first one of a group read its right factor, for each group that has rows."""
    if group_count(graph) == 1:
        return 0.0
    mean = max(1, graph.rows) / group_count(graph)
    return tiles_of_group(mean, tile_rows) / -math.expm1(-mean) - 1


def group_count(graph: Graph) -> int:
    """Groups of rows of a grouped product; 1 of any other."""
    ends = graph.products[0].ends
    return size_of(ends.shape[0], graph.sizes) if ends else 1


# ---------------------------------------------------------------- floors and waves


def floors(target: Target, traffic: Traffic, factors: DType) -> Mapping[str, float]:
    """µs that no kernel for the chain can undercut: of its bytes, its products, of factors of that type, and its other
    operations."""
    return {
        "memory": traffic.ideal / (target.dram_gbs * 1e3),
        "products": traffic.product_flops / (target.product_tflops(factors) * 1e6),
        "vector": (traffic.flops - traffic.product_flops) / (target.fp32_tflops * 1e6),
    }


def filled(tiles: int, places: int) -> float:
    """The share of `places` (SMs, times the blocks that each holds) that `tiles` keep busy, wave after wave: 133 tiles
    on 132 SMs take two waves and fill half of them."""
    return tiles / (-(-tiles // places) * places) if tiles else 1.0


def wave_text(tiles: int, places: int, split_k: int = 1) -> str:
    """`512 tiles in 3.9 waves, 97 % full`; `16 parts of 4 tiles` where so many blocks share one."""
    found, parts = f"{tiles} {'tile' if tiles == 1 else 'tiles'}", tiles * split_k
    if split_k > 1:
        found = f"{parts} parts of {found}"
    return f"{found} in {parts / places:.1f} waves, {filled(parts, places):.0%} full"


# ---------------------------------------------------------------- rounding


F16_RANGE = " (in f16 what is beyond 65504 is an infinity, and below 6.1e-5 bits are lost)"


def product_rounding(
    graph: Graph, target: Target, sum_bits: int = F32_BITS, promote: int = 0, halves: str = ""
) -> tuple[str, ...]:
    """Where values of a chain with products are rounded; between those places everything is f32. `sum_bits`: those that
    the instruction keeps of sums of floats, which begin at 0 each `promote` elements of K and are then added in f32;
    `halves`: as `halved.halves_text`."""
    lines = [*factor_rounding(graph), *filter(None, [halves])]
    if f32 in hoist_scales(graph).factor_types.values() and not target.multiplies_f32:
        lines.append("factors to the nearest tf32, 11 significant bits")
    if sum_bits < F32_BITS:
        of = f"{promote} products, which are added in f32" if promote else "all products"
        lines.append(f"to {sum_bits} significant bits sums of {of}")
    return (*dict.fromkeys(lines), *roundings(graph))


@once_per_graph
def factor_rounding(graph: Graph) -> tuple[str, ...]:
    """What becomes of factors before they are multiplied."""
    lowered = hoist_scales(graph)
    lines, narrow = [], False
    for product in split(lowered).products:
        for factor in (product.left, product.right):
            if factor.scaled is not None:
                every = f"{factor.scaled.group} of K" if factor.scaled.group else "column"
                lines.append(f"codes of {factor.inputs[0].name} exactly, their sums scaled in f32 for every {every}")
            elif factor.operand is None:
                lines.append(f"{text_of(factor, lowered)} to {factor.dtype} before it is multiplied")
                narrow = narrow or factor.dtype is f16
    if moved := ", ".join(scale_texts(lowered)):
        lines = [f"{line}, and only then scaled by {moved}{F16_RANGE * narrow}" for line in dict.fromkeys(lines)]
        lines = lines or [f"factors as they are, and only their products scaled by {moved}"]
    return tuple(lines)


def text_of(factor: Factor, graph: Graph) -> str:
    """`x * gain`, or the factor's name."""
    names = value_names(graph)
    node = factor.node
    if node.op.symbol and all(a.op.kind is Kind.INPUT for a in node.inputs):
        return f" {node.op.symbol} ".join(names[a] for a in node.inputs)
    return names[node]


def scale_texts(lowered: Graph) -> tuple[str, ...]:
    """`rrms`, `0.5`, `1 / norm`: what scales products in `lowered`, and before them their factors as written."""
    found = []
    for product in lowered.products:
        node = product
        while (users := lowered.users[node]) and len(users) == 1 and users[0].operator is product.operator:
            (node,) = users
            own = node.op.kind is Kind.BIAS or node.op.name in (*CASTS, "to_f32")
            if own:  # of the operator, behind which nothing scales it
                break
            scale = argument(node.inputs[1], lowered)
            text = scale.name if isinstance(scale, Value) else digits(scale.value)
            found.append(f"1 / {text}" if node.op.name == "div" else text)
    return tuple(dict.fromkeys(found))
