"""Rounding errors of row sums, by how the plan accumulates them.

With u = 2^-24 (half an ulp), K additions one after another in a thread and L levels of a tree over the row's threads:

*sum.* Every term passes at most D = K + L additions: error <= D * u * sum|x| (Higham 2002, 4.2).

*softmax* (maximum and sum of exponentials in one pass). On its way a term is multiplied by exp(old top - new top) and
added, at most D + 1 times. One factor of each merge is exp(0) = 1; the other, of an argument d, costs 2.25 ulps and
0.675 |d| more (the op table's exp), so 4.5u + 1.35u |d|, its product u and the addition u: less than 8u a merge beside
the |d|. The arguments telescope to top - x for a term exp(x - top) = e, which is |log e|, and so do the roundings of
`old top - new top`: error <= u * (8 (D + 1) * sum e + 2.35 sum e |log e|).

*running sums*: an element passes its vector's additions, those of its warp's lanes, one for each warp in each turn of
vectors, and two that bring these together; never more than it has elements before it.

*running sums over rows*: an element passes its thread's rows, the lanes of its warp, one for each group of rows in
each turn, and two that bring these together (`ColumnTile.running_depth`).

*sums of every so-many-th row*: as many additions as a part has rows, one after another.

*sums of columns*: D is what a term passes in its turn, over the turns, over the rows of its block and over the blocks
of a cluster (`ColumnTile.depth`): of 2^20 rows some 600.

*welford*, the mean. Adding x_k: delta = x_k - mean rounds by u|delta|, delta / k by 5u|delta| / k (2.5 ulps), mean by
u|mean|; an old error shrinks by 1 - 1/k. Over K elements the mean's error times K is at most
u * (K sum|x| + 6 sum|delta|), and |delta| summed is at most (1 + H_K) * sum|x - mean|, H_K ~ 1 + ln K, beside the
first, whose delta is exact. A merge of counts n_a <= n_b costs u|mean| + 8u|delta| * share, and n_b|delta| is at most
n_b / n_a times what the deviations of both sides sum to: the vector width at the row's end, about 1 elsewhere.

*welford*, the squared deviations Q. Every product delta * (delta - step) rounds thrice, and the step in it by
5u / (k - 1), but not where it is half of delta; every addition once: 4 D u Q. The running mean is off by at most
R = u * min(K * max|x|, sum|x|): 4 R sum|x - mean|. The mean's own error at the end comes in through the graph, as for
any other chain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fusegen.language.graph import Kind, Node
from fusegen.language.naming import value_names
from fusegen.language.scans import Largest, ScanWay
from fusegen.language.types import DType, f32, size_of
from fusegen.planner.attention.parts import AttentionPlan
from fusegen.planner.attention.weights import WeightsPlan
from fusegen.planner.attention.written import written_weights
from fusegen.planner.columns.plan import ColumnsPlan, ColumnTile
from fusegen.planner.model import Plan, ReductionKind, RowPlan, Summed
from fusegen.planner.products.output_groups import PROMOTED
from fusegen.planner.products.parts import ProductPlan
from fusegen.targets.atoms import F32_BITS
from fusegen.validation.carried import CarriedProduct, CarriedSum, Exponentials, carried, carried_sums

Array = np.ndarray[Any, np.dtype[Any]]
HALF_ULP = 2.0**-24
LEVELS = 10  # of a tree over 1024 threads


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How one row sum is made: `serial` additions in a thread, then `levels` of a tree over threads."""

    kind: ReductionKind
    first: bool  # of the two results of an online pair: the maximum, the sum; else the second
    serial: int
    levels: int
    vector: int

    @property
    def depth(self) -> int:
        return self.serial + self.levels


@dataclass(frozen=True, slots=True)
class Multiplication:
    """How one matrix product is made: its factors' type, whether they become tf32, whether subnormal ones count as 0,
    how it is summed, and in how many significant bits."""

    dtype: DType
    tf32: bool
    flushes: bool
    summed: Summed
    bits: int = F32_BITS
    carried: CarriedProduct | None = None


@dataclass(frozen=True, slots=True)
class ColumnSums:
    """How sums of columns are made: by the tile, of as many rows as a launch has."""

    tile: ColumnTile

    def of(self, rows: int) -> Accumulation:
        return Accumulation("sum", first=True, serial=self.tile.depth(rows), levels=0, vector=self.tile.vector)


@dataclass(frozen=True, slots=True)
class RunningSums:
    """How running sums over rows are made: by the tile, of as many rows as a launch has."""

    tile: ColumnTile
    warp: int

    def of(self, rows: int) -> Accumulation:
        depth = self.tile.running_depth(rows, self.warp)
        return Accumulation("sum", first=True, serial=depth, levels=0, vector=self.tile.vector)


@dataclass(frozen=True, slots=True)
class PartSums:
    """How sums of every so-many-th row are made: one after another, of as many rows as a launch has for a part."""

    def of(self, rows: int) -> Accumulation:
        return Accumulation("sum", first=True, serial=rows, levels=0, vector=1)


How = Accumulation | Multiplication | ColumnSums | RunningSums | PartSums | Exponentials | CarriedSum


def in_fewest_bits(plan: ProductPlan) -> tuple[Summed, int]:
    """How a product is summed, and in how many bits, for whatever layout: where tensor copies can't move an operand,
    another unit of the GPU may multiply it, that keeps fewer bits of sums, and has those promoted."""
    atom = plan.atom
    kinds = atom.factors, atom.right_factors
    bits = min(each.sum_bits for each in plan.target.atoms if (each.factors, each.right_factors) == kinds)
    if bits >= atom.sum_bits:
        return plan.summed, atom.sum_bits
    asked = [PROMOTED if node.promote is None else node.promote for node in plan.lowered.factor_types]
    return replace(plan.summed, promote=min(filter(None, asked), default=0)), bits


def accumulations(plan: Plan) -> Mapping[Node, How]:
    """How `plan` makes each of its reductions and matrix products."""
    found: dict[Node, How] = dict.fromkeys(plan.lowered.parts, PartSums())
    if isinstance(plan, ColumnsPlan):
        sums = RunningSums(plan.tile, plan.target.warp)
        return {**dict.fromkeys(plan.graph.reductions, ColumnSums(plan.tile)), **dict.fromkeys(plan.graph.scans, sums)}
    if isinstance(plan, AttentionPlan):
        carrying, shrinking, last = carried(plan)
        for node, dtype in plan.lowered.factor_types.items():
            own = shrinking if node is last else None
            found[node] = Multiplication(
                dtype, tf32=False, flushes=plan.target.flushes_factors, summed=Summed(), carried=own
            )
        return {**found, **carrying}
    if isinstance(plan, WeightsPlan):
        for node, dtype in plan.lowered.factor_types.items():
            found[node] = Multiplication(dtype, tf32=False, flushes=plan.target.flushes_factors, summed=Summed())
        return {**found, **carried_sums(plan, written_weights(plan.graph))}
    if not isinstance(plan, RowPlan):
        summed, bits = in_fewest_bits(plan) if isinstance(plan, ProductPlan) else (plan.summed, F32_BITS)
        for node, dtype in plan.lowered.factor_types.items():
            tf32 = dtype is f32 and not plan.target.multiplies_f32
            found[node] = Multiplication(dtype, tf32, plan.target.flushes_factors, summed, bits)
        for node in plan.lowered.nodes:
            if node.op.kind is Kind.GROUP:  # of a tile's columns
                found[node] = Accumulation("sum", True, serial=node.group, levels=LEVELS, vector=1)
        for node in plan.lowered.reductions:  # however the rule takes its row sums, no deeper than this
            length = size_of(node.inputs[0].shape[-1], plan.graph.sizes)
            found[node] = Accumulation("sum", first=True, serial=length, levels=LEVELS, vector=1)
        return found
    nodes = {name: node for node, name in value_names(plan.graph).items()}
    tile = plan.tile
    for reduction in (r for row_pass in plan.passes for r in row_pass.reductions):
        for result in reduction.results:
            found[nodes[result]] = Accumulation(
                kind=reduction.kind,
                first=result == reduction.results[0],
                serial=tile.per_thread * tile.vector,
                levels=math.ceil(math.log2(tile.threads_per_row)) + tile.col_tiles - 1,
                vector=tile.vector,
            )
    warps = max(1, tile.row_threads // plan.target.warp)
    for scan in (s for row_pass in plan.passes for s in row_pass.scans):
        lanes = math.ceil(math.log2(min(tile.row_threads, plan.target.warp)))
        serial = tile.vector + tile.per_thread * warps + 2  # of its vector, of all warps in all turns, and with both
        if isinstance(scan.way, Largest):
            lanes = math.ceil(math.log2(tile.threads_per_row))
            serial = tile.per_thread * tile.vector
        kind = scan.way.kind if isinstance(scan.way, ScanWay) else "sum"
        found[nodes[scan.result]] = Accumulation(kind, True, serial, levels=lanes, vector=tile.vector)
    for step in (step for row_pass in plan.passes for step in row_pass.groups):
        for reduction in step.reductions:
            levels = math.ceil(math.log2(step.size / tile.vector))
            found[nodes[reduction.results[0]]] = Accumulation(reduction.kind, True, tile.vector, levels, tile.vector)
    for node in plan.graph.reductions:
        if node in plan.graph.picked and node not in found:  # of the k chosen, in whatever order
            found[node] = Accumulation("sum", True, serial=plan.graph.picks, levels=0, vector=1)
    return found


def accumulation_error(node: Node, how: Accumulation, values: Mapping[Node, Array]) -> Array:
    """The bound on the summation's own rounding, one value a row. `values` holds every node before `node`."""
    x = values[node.inputs[0]]
    if how.kind == "softmax":
        online = 8 * (how.depth + 1) * total(x) + 2.35 * total(x * np.log(np.where(x > 0, x, 1.0)))
        return np.asarray(HALF_ULP * online)
    if how.kind == "welford" and how.first:
        return mean_error(x, how)
    if how.kind == "welford":
        centered = values[node.inputs[0].inputs[0]]
        original = values[node.inputs[0].inputs[0].inputs[0]]
        size = finite(original)
        running = HALF_ULP * np.minimum(how.serial * size.max(-1, keepdims=True), size.sum(-1, keepdims=True))
        return np.asarray(HALF_ULP * 4 * how.depth * total(x) + 4 * running * total(centered))
    return np.asarray(HALF_ULP * how.depth * total(x))


def mean_error(x: Array, how: Accumulation) -> Array:
    """Of Welford's mean, times the number of elements."""
    deviations = total(x - x.mean(-1, keepdims=True))
    harmonic = 1 + math.log(max(1, how.serial))
    factor = 6 * (1 + harmonic) + 8 * (how.vector + 2 * how.levels)
    return np.asarray(HALF_ULP * ((how.depth + 2) * total(x) + factor * deviations))


def finite(x: Array) -> Array:
    return np.where(np.isfinite(x), np.abs(x), 0.0)


def total(x: Array) -> Array:
    """The row's sum of magnitudes, those that are finite."""
    return np.asarray(finite(x).sum(-1, keepdims=True))
