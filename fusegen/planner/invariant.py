"""Kernels by which a row's bits are the same however many rows there are: `compile(chain, batch_invariant=True)`.

A compiled kernel gives a row the same bits among any others. But compiled at other sizes of its rows a chain may get
another plan, which sums in another order: few rows split a sum between blocks that many rows don't. And it may be cut
into other kernels, which round other values. So one *way* is chosen for every number of rows, by the cost model, and
nothing that the sizes of rows say has a part in that:

    cuts    one kernel, or the kernels that a few row counts are cut into: what takes at worst the least times as long
            as the cheapest of all, over 1 to 65536 rows
    order   of each kernel's sums: likewise, among its own candidates

At the sizes at hand the cheapest plans of those orders are taken; where there is none for so few rows, one for more.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from fusegen.errors import NoPlan, SpecError
from fusegen.language.axes import over_rows
from fusegen.language.graph import Graph, Tensor
from fusegen.language.sizes import dims_in, unit_of
from fusegen.language.types import Dim, f32, size_of
from fusegen.language.views import View
from fusegen.planner import CONTIGUOUS, candidates
from fusegen.planner.model import Candidates, Layout
from fusegen.planner.orders import like, order_of
from fusegen.planner.programs import program_instead
from fusegen.planner.programs.dependent import dependent
from fusegen.planner.programs.joining import joined
from fusegen.planner.programs.model import Cut, ProgramPlan, Step, Stored
from fusegen.planner.programs.parts import interleaved, layout_of
from fusegen.planner.programs.steps import Bound, Lowered
from fusegen.targets.base import Target

ROWS = (1, 16, 128, 1024, 8192, 65536)  # at which orders are compared
CUT_AT = (1, 128, 8192)  # rows: how chains are cut at these is compared
REMEMBERED = 8  # ways, each of a chain and a target: a search of one takes seconds


@dataclass(frozen=True, slots=True)
class Way:
    """Which kernels a chain becomes, and in which order each of them sums. `program`: as it is cut at some number of
    rows; None for one kernel. `worst`: times the cheapest of all, at the row count where that is the most."""

    program: ProgramPlan | None
    orders: tuple[Hashable, ...]
    worst: float

    def parts(self, graph: Graph) -> list[Part]:
        """Its kernels' graphs at the chain's sizes."""
        return parts_of(self.program, graph)


@dataclass(frozen=True, slots=True)
class Part:
    """What one kernel is planned of."""

    graph: Graph
    layout: Layout


@dataclass(frozen=True, slots=True)
class Question:
    """What a choice depends on: no size of rows among it."""

    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    sizes: tuple[tuple[str, int], ...]
    target: Target
    graph: Graph = field(compare=False)


def in_one_order(graph: Graph, target: Target) -> tuple[Candidates, ProgramPlan | None]:
    """The candidates of the one order that is chosen for every number of rows; of a chain of several kernels its
    program, of which each kernel has such an order. Raises NoPlan for a chain that sums over its rows, or that has no
    such kernels."""
    sums = bool(over_rows(graph)) and not row_dims(graph)
    if sums or any(node.inner_ends for node in graph.products):
        raise NoPlan(
            f"{graph.name} sums over rows, so that its results depend on how many there are\n"
            "  batch_invariant is for chains whose rows are each for itself"
        )
    way = way_of(graph, target)
    if way.program is None:
        return in_order(way, 0, graph, target), None
    return candidates(graph, target), program_at(way, graph, target)


def way_of(graph: Graph, target: Target) -> Way:
    """The way for every number of rows. Raises NoPlan."""
    rows = row_dims(graph)
    sizes = tuple((name, size) for name, size in graph.sizes.items() if name not in rows)
    return chosen(Question(graph.outputs, graph.inputs, sizes, target, with_rows(graph, ROWS[0])))


@lru_cache(maxsize=REMEMBERED)
def chosen(asked: Question) -> Way:
    """The way that takes at worst the least times as long as the cheapest of all."""
    programs = cut_at(asked.graph, asked.target)
    timed = [Timed(program, asked.graph, asked.target) for program in programs]
    every = sorted({rows for one in timed for rows in one.rows})
    best = {rows: min(one.least[rows] for one in timed if rows in one.rows) for rows in every}
    ways = [one.way({rows: best[rows] for rows in one.rows}) for one in timed if one.rows == every and one.serves]
    if not ways:
        raise NoPlan(
            f"{asked.graph.name} on {asked.target}: no kernels sum every number of rows in one order\n"
            "  compile it once, at the number of rows that matters most: one kernel gives a row the same bits among any"
        )
    return min(ways, key=lambda way: way.worst)  # of ways alike, the first: one kernel, then that for the fewest rows


def cut_at(graph: Graph, target: Target) -> list[ProgramPlan | None]:
    """One kernel as None, where there may be one, and the programs that some numbers of rows are cut into."""
    found: dict[Hashable, ProgramPlan | None] = {}
    refusal: NoPlan | None = None
    for rows in CUT_AT:
        sized = replace(with_rows(graph, rows), batch_invariant=False)
        every = candidates(sized, target)
        if every.plans:
            found.setdefault(None, None)
        try:
            program = program_instead(every)
        except NoPlan as error:
            refusal = error
            continue
        if program is not None:
            found.setdefault(tuple(map(kernel_of, program.steps)), program)
    if not found:
        assert refusal is not None
        raise refusal
    return sorted(found.values(), key=lambda program: program is not None)


def kernel_of(step: Step) -> Hashable:
    """What tells a step from another: its tensors, and its nodes in order."""
    nodes = [(n.op.name, n.shape, n.group, n.count, n.size) for n in step.graph.nodes]
    return step.name, repr(step.reads), repr(step.writes), repr(nodes)


class Timed:
    """One way to cut a chain, at every number of rows: what its kernels take in each order of their sums."""

    def __init__(self, program: ProgramPlan | None, graph: Graph, target: Target) -> None:
        self.program = program
        each = [self.tables(with_rows(graph, rows), target) for rows in ROWS]
        self.rows = [rows for rows, tables in zip(ROWS, each, strict=True) if tables and all(tables)]
        usable = [tables for tables in each if tables and all(tables)]
        self.tables_of = [dict(zip(self.rows, part, strict=True)) for part in zip(*usable, strict=True)]
        self.carry(graph)
        early = target.early_us * max(0, len(self.tables_of) - 1)
        self.least = {rows: sum(min(t[rows].values()) for t in self.tables_of) - early for rows in self.rows}
        self.orders = [self.order(table) for table in self.tables_of]
        self.early_us = early

    @property
    def serves(self) -> bool:
        return all(order is not None for order in self.orders)

    def tables(self, graph: Graph, target: Target) -> list[dict[Hashable, float]]:
        """Of each kernel the least time of each order; nothing where there are no such kernels at these sizes."""
        try:
            return [times_of(candidates(part.graph, target, part.layout)) for part in parts_of(self.program, graph)]
        except SpecError:
            return []

    def carry(self, graph: Graph) -> None:
        """A kernel for more rows takes fewer as well, and no longer, where their number is no constant of it."""
        for place, table in enumerate(self.tables_of):
            few, many = (parts_of(self.program, with_rows(graph, rows))[place].graph for rows in (ROWS[0], ROWS[1]))
            if any(few.sizes[dim.name] != many.sizes[dim.name] for dim in dims_in(tuple(few.fixed))):
                continue
            more: dict[Hashable, float] = {}
            for rows in reversed(self.rows):
                more |= table[rows]
                table[rows] = dict(more)

    @staticmethod
    def order(table: Mapping[int, Mapping[Hashable, float]]) -> tuple[Hashable] | None:
        """Of the orders that there are at every number of rows, the one that costs at worst the least."""
        shared = set.intersection(*(set(times) for times in table.values())) if table else set()
        if not shared:
            return None

        def worst(order: Hashable) -> tuple[float, str]:
            return max(times[order] / min(times.values()) for times in table.values()), repr(order)

        return (min(shared, key=worst),)

    def way(self, best: Mapping[int, float]) -> Way:
        orders = [order for found in self.orders if found is not None for order in found]
        taking = {
            rows: sum(table[rows][order] for table, order in zip(self.tables_of, orders, strict=True)) - self.early_us
            for rows in self.rows
        }
        return Way(self.program, tuple(orders), max(taking[rows] / best[rows] for rows in self.rows))


def times_of(found: Candidates) -> dict[Hashable, float]:
    times: dict[Hashable, float] = {}
    for plan in found.plans:  # the cheapest come first
        times.setdefault(order_of(plan), plan.cost.time_us)
    return times


# ---------------------------------------------------------------- at the sizes at hand


def program_at(way: Way, graph: Graph, target: Target) -> ProgramPlan:
    """The program of the way at these sizes."""
    assert way.program is not None
    steps = []
    for place, (step, part) in enumerate(zip(way.program.steps, way.parts(graph), strict=True)):
        plan = in_order(way, place, graph, target).need()[0]
        steps.append(replace(step, graph=part.graph, plan=plan, joined="", share=0))
    between, shared = (tuple(map(as_cut, tensors)) for tensors in (way.program.between, way.program.shared))
    program = replace(way.program, graph=graph, steps=tuple(steps), between=between, shared=shared, cuts=())
    program = dependent(joined(program))
    names = tuple(stored.name for stored in program.boundaries)
    return replace(program, cuts=(Cut(names, len(program.launches), program.time_us),))


def as_cut(stored: Stored) -> Stored:
    """With what its reason is of: times at some number of rows are not those at another."""
    return replace(stored, why=f"one cut serves every number of rows; at some, {stored.why}") if stored.why else stored


def in_order(way: Way, place: int, graph: Graph, target: Target) -> Candidates:
    """One kernel's candidates at the chain's sizes that sum in its order, else those for more rows."""
    part = way.parts(graph)[place]
    found = like(candidates(part.graph, target, part.layout), way.orders[place])
    for rows in ROWS:
        if found.plans or rows < part.graph.rows:
            continue
        many = way.parts(with_rows(graph, rows))[place]
        more = like(candidates(many.graph, target, many.layout), way.orders[place])
        found = replace(found, plans=tuple(replace(p, graph=p.graph.at(**part.graph.sizes)) for p in more.plans))
    return found


def parts_of(program: ProgramPlan | None, graph: Graph) -> list[Part]:
    """What the kernels of a chain are planned of at its sizes. Raises SpecError where there are no such sizes."""
    if program is None:
        return [Part(graph, CONTIGUOUS)]
    return [part_of(step, graph.sizes) for step in program.steps]


def part_of(step: Step, sizes: Mapping[str, int]) -> Part:
    """What a step is planned of at the chain's sizes, on which it depends how its tensors lie: axes of one have no
    stride."""
    graph = step.graph.at(**{name: size_of(step.sizes.get(name, Dim(name)), sizes) for name in step.graph.sizes})
    shapes = {t.name: t.shape for t in (*graph.inputs, *graph.outputs)}
    bounds = tuple(Bound(b.tensor, b.base, b.view or View.identity(shapes[b.tensor])) for b in step.bindings)
    lowered = Lowered(graph, bounds, step.sizes)
    layout = layout_of(lowered, sizes)
    return Part(graph, interleaved(lowered, layout, sizes) if step.plan.layout.interleaved else layout)


# ---------------------------------------------------------------- numbers of rows


def row_dims(graph: Graph) -> list[str]:
    """The dims that say how many rows there are: all that a call chooses but those that are summed over, and those that
    are constants of kernels only since whole numbers are counted along them, as slots by their groups are."""
    bound = {dim.name for dim in dims_in(tuple(graph.fixed_by(n for n in graph.reductions if n.dtype is f32)))}
    summed = {dim.name for n in over_rows(graph) for axis in n.over for dim in dims_in((n.inputs[0].shape[axis],))}
    fixed = {dim.name for dim in dims_in(tuple(graph.fixed))}
    leading = set.intersection(*({dim.name for dim in dims_in(t.shape[:-1])} for t in graph.outputs))
    free = (name for name in graph.sizes if name not in fixed or (name in leading and name not in bound))
    return [name for name in free if name not in summed]


def with_rows(graph: Graph, rows: int) -> Graph:
    """The graph at so many rows, or a few more where sizes that are computed of them come out even: of the dims that
    say how many there are the first is so large, and the others are 1."""
    first, *others = row_dims(graph) or [""]
    unit = {name: unit_of(graph.computed_sizes, name) for name in (first, *others) if name}
    sizes = {name: unit[name] * -(-(rows if name == first else 1) // unit[name]) for name in unit}
    return graph.at(**sizes)
