"""Passes of a chain that chooses columns: over its rows, as far as the choice needs, and then over what was chosen.

The pass that chooses is the last one over the row. What it decides by, the key, is computed there, or taken up where an
earlier pass has kept it. Behind it come passes over the k columns alone: one more than reductions of chosen values
depend on each other. They keep nothing, since computing k values again costs next to nothing, but where registers hold
what is chosen (`holding`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fusegen.language.graph import Extent, Graph, Kind, Node
from fusegen.language.nodes import GroupLimit
from fusegen.language.types import DType
from fusegen.planner.model import Access, Body, Keep, Keeps, Load, Reduction, ReductionKind, RowPass, Store
from fusegen.planner.parts import used_by
from fusegen.planner.ranges import fits
from fusegen.planner.rows.schedule import Schedule, Scheduler, title_of


@dataclass(frozen=True, slots=True)
class Picking:
    """The passes over the row, the last of which chooses; what it decides by; and the passes over what is chosen."""

    schedule: Schedule
    key: str
    dtype: DType
    key_body: Body
    columns: str
    values: str
    picked: tuple[RowPass, ...]
    bare: bool
    limit: GroupLimit | None

    @property
    def adds_up(self) -> bool:
        """Are the exponentials of the keys added up?"""
        return any(r.kind == "softmax" for r in self.schedule.passes[-1].reductions)


class PickingScheduler(Scheduler):
    """A Scheduler of what lies before the selection, and of what lies behind it."""

    def __init__(self, graph: Graph, accesses: Iterable[Access], keeps: Keeps) -> None:
        assert graph.selection is not None
        self.columns = graph.selection
        self.key = graph.selection.inputs[0]
        super().__init__(graph, accesses, keeps, by_vectors=False)
        self.picked_level = self.find_picked_levels()

    def find_needed(self) -> set[Node]:
        """What the row's passes must make: outputs before the selection, the key, and what is one value a row and used
        behind the selection. What is taken at the chosen columns is read there."""
        picked = self.graph.picked
        needed = {t.node for t in self.graph.outputs if t.node not in picked} | {self.key}
        for node in picked:
            used = node.inputs[1:] if node.op.name == "take" else node.inputs
            needed.update(a for a in used if a not in picked)
        for node in reversed(self.graph.nodes):
            if node in needed:
                needed.update(self.arguments(node))
        return needed

    def find_free(self) -> set[Node]:
        """But for the key: where it is kept, the pass that chooses reads no operand, not even one that rows share."""
        return super().find_free() - {self.key}

    def count_passes(self) -> int:
        """What is kept is kept for the pass that chooses, which is one more."""
        return max(super().count_passes(), self.level[self.key] + 1) + (self.keeps == "values")

    def roots(self, number: int) -> list[Node]:
        found = super().roots(number)
        chooses = number == self.count_passes() - 1 or (self.keeps == "values" and number == self.level[self.key])
        return list(dict.fromkeys([*found, self.key])) if chooses else found

    def row_stores(self, level: int) -> tuple[Store, ...]:
        return tuple(
            Store(self.access[t.name], self.names[t.node], fits=fits(t, self.graph))
            for t in self.graph.outputs
            if t.node in self.needed and self.extent(t.node) is Extent.ROW and self.level[t.node] == level
        )

    # ---- behind the selection

    def find_picked_levels(self) -> dict[Node, int]:
        """The pass over the chosen columns in which a value can first be computed."""
        level: dict[Node, int] = {}
        for node in self.graph.nodes:
            if node in self.graph.picked:
                deepest = max((level.get(a, 0) for a in node.inputs), default=0)
                level[node] = deepest + 1 if node.op.kind is Kind.REDUCE else deepest
        return level

    def picked_passes(self, slot: int) -> tuple[tuple[RowPass, ...], int]:
        """The passes over the chosen columns, and the first slot of the shared array that they leave free."""
        found = []
        for number in range(max(self.picked_level.values()) + 1):
            reductions = []
            for node in self.picked_at(Kind.REDUCE, number + 1):
                name = self.names[node]
                kind: ReductionKind = node.op.name  # type: ignore[assignment]
                value = node.inputs[0]
                reductions.append(Reduction(kind, self.names[value], (name,), slot, dtype=value.dtype))
                slot += 1
            found.append(self.picked_pass(number, tuple(reductions)))
        return tuple(found), slot

    def picked_at(self, kind: Kind, level: int) -> list[Node]:
        return [n for n, d in self.picked_level.items() if d == level and n.op.kind is kind]

    def picked_pass(self, number: int, reductions: tuple[Reduction, ...]) -> RowPass:
        written = [t for t in self.graph.outputs if self.picked_level.get(t.node) == number]
        written = [t for t in written if self.extent(t.node) is Extent.PICKED]
        wanted = self.picked_closure(
            [*(n.inputs[0] for n in self.picked_at(Kind.REDUCE, number + 1)), *(t.node for t in written)]
        )
        loads = tuple(self.gather(n) for n in self.graph.nodes if n in wanted and self.is_gathered(n))
        stores = tuple(Store(self.access[t.name], self.names[t.node], fits=fits(t, self.graph)) for t in written)
        behind = [n for n, d in self.picked_level.items() if d == number + 1 and self.extent(n) is Extent.ROW]
        rows = [t for t in self.graph.outputs if t.node in behind]
        return RowPass(
            title=title_of(loads, (), reductions, stores),
            loads=loads,
            body=self.statements(n for n in self.graph.nodes if n in wanted),
            reductions=reductions,
            stores=stores,
            row_body=self.statements(behind),
            row_stores=tuple(Store(self.access[t.name], self.names[t.node], fits=fits(t, self.graph)) for t in rows),
        )

    def picked_closure(self, roots: Iterable[Node]) -> set[Node]:
        found: set[Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if self.extent(node) is Extent.PICKED and node in self.graph.picked and node not in found:
                found.add(node)
                stack.extend(node.inputs)
        return found

    def is_gathered(self, node: Node) -> bool:
        return node.op.name == "take" and node.inputs[0] is not self.key

    def gather(self, node: Node) -> Load:
        """An operand's element at a chosen column; what stands where there is none is zero."""
        access = self.access[self.graph.tensor_of[node.inputs[0]].name]
        return Load(access, self.names[node])

    def pick(self) -> Picking:
        planned = self.build()
        compute, take = self.closure([self.key], set())
        assert not take
        picked, slots = self.picked_passes(planned.slots)
        held = [n for n in self.picked_level if n.op.name == "take" and n.inputs[0] is self.key]
        return Picking(
            schedule=replace(planned, slots=slots),
            key=self.names[self.key],
            dtype=self.key.dtype,
            key_body=Body(
                loads=tuple(self.load(n) for n in self.graph.nodes if n in compute and n.op.kind is Kind.INPUT),
                body=self.statements(n for n in self.graph.nodes if n in compute),
            ),
            columns=self.names[self.columns],
            values=self.names[held[0]] if held else "",
            picked=picked,
            bare=self.columns.bare,
            limit=self.columns.limit,
        )


def holding(picked: tuple[RowPass, ...]) -> tuple[RowPass, ...]:
    """The same passes over chosen columns, where a thread's registers hold those of a rank from one pass to the next:
    nothing is computed twice."""
    passes: list[RowPass] = []
    for row_pass in picked:
        first = {s.name: number for number, before in reversed([*enumerate(passes)]) for s in before.body}
        body = tuple(s for s in row_pass.body if s.name not in first)
        wanted = used_by(body) | {r.value for r in row_pass.reductions} | {s.value for s in row_pass.stores}
        again = tuple(Keep(s.name, s.dtype) for s in row_pass.body if s.name in first and s.name in wanted)
        for keep in again:
            before = passes[first[keep.value]]
            passes[first[keep.value]] = replace(before, keeps=tuple(dict.fromkeys((*before.keeps, keep))))
        loads = tuple(load for load in row_pass.loads if load.value in wanted)
        passes.append(replace(row_pass, loads=loads, takes=again, body=body))
    return tuple(passes)


def picking(graph: Graph, accesses: Iterable[Access], keeps: Keeps) -> Picking:
    """The passes of `graph`, which chooses columns, with `keeps` kept from one pass over the row to the next."""
    return PickingScheduler(graph, accesses, keeps).pick()
