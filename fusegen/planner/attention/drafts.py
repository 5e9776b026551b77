"""The bodies that every kernel over tiles of scores has: rows before the first tile, logits, and the ends of masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusegen.language.graph import Node
from fusegen.language.naming import value_names
from fusegen.language.products import is_computed
from fusegen.language.types import b8
from fusegen.planner.attention.masks import End, Least, Mask, Sum, direction, values_of
from fusegen.planner.attention.parts import ElementBody, Ends, EndText
from fusegen.planner.attention.recognition import Scored, inputs_of, of_launch, of_row
from fusegen.planner.model import Access, Load, Number, Statement
from fusegen.planner.pieces import argument, statements
from fusegen.planner.ranges import stays_inside


class ScoresDraft:
    """The bodies of elements of scores: what is known of rows before the first tile, logits, and the ends of masks.
    `before`: what rows are asked for there."""

    def __init__(self, found: Scored, mask: Mask, accesses: Mapping[str, Access], before: Iterable[Node]) -> None:
        self.mask, self.accesses = mask, accesses
        self.scored, self.graph = found, found.lowered
        self.names = value_names(self.graph)
        self.launch = {n for n in self.graph.nodes if is_computed(n) and of_launch(n)}
        self.before = [n for n in before if of_row(n)]

    def loads(self, nodes: Iterable[Node], rows: bool) -> tuple[Load, ...]:
        tensors = (t for t in inputs_of(self.graph, nodes) if of_row(t.node) is rows)
        return tuple(Load(self.accesses[t.name], self.names[t.node]) for t in tensors)

    # ---------------------------------------------------------------- before the first tile

    @property
    def row_loads(self) -> tuple[Load, ...]:
        return self.loads(self.before, rows=True)

    @property
    def launch_body(self) -> tuple[Statement, ...]:
        return self.statements(self.ordered(self.launch), of_launch=True)

    @property
    def row_body(self) -> tuple[Statement, ...]:
        return self.statements(self.ordered(self.before))

    def statements(self, nodes: Iterable[Node], of_launch: bool = False) -> tuple[Statement, ...]:
        """Of those nodes that are computed, and once a launch or more often."""
        return statements(self.graph, [n for n in nodes if is_computed(n) and (n in self.launch) is of_launch])

    def ordered(self, nodes: Iterable[Node]) -> list[Node]:
        wanted = set(nodes)
        return [n for n in self.graph.nodes if n in wanted]

    # ---------------------------------------------------------------- elements

    def score_body(self, settled: frozenset[Node]) -> ElementBody:
        """From scores to logits, with the conditions in `settled` taken to hold."""
        found = self.scored
        stands = self.stand_ins(found.score_body, settled)
        value = stands.get(found.logits, found.logits)
        assert value is not None
        wanted = {value}
        for node in reversed(self.graph.nodes):
            if node in wanted and node is not found.scores and not of_row(node):
                wanted.update(a for a in (stands.get(a, a) for a in node.inputs) if a is not None)
        listed = [n for n in found.score_body if n in wanted and not of_row(n)]
        return ElementBody(
            given=self.names[found.scores],
            value=self.names[value],
            loads=self.loads(listed, rows=False),
            body=tuple(self.resolved(n, stands) for n in listed if is_computed(n)),
        )

    def stand_ins(self, nodes: Iterable[Node], settled: frozenset[Node]) -> Mapping[Node, Node | None]:
        """What a value is where the settled conditions hold: another value, or None for a condition that does."""
        table: dict[Node, Node | None] = {}
        for node in nodes:
            if node in settled:
                table[node] = None
                continue
            of = [table.get(a, a) for a in node.inputs]
            if node.op.name == "where" and of[0] is None:
                table[node] = of[1]
            elif node.op.name == "logical_and" and None in of:
                table[node] = of[1] if of[0] is None else of[0]
        return table

    def resolved(self, node: Node, stands: Mapping[Node, Node | None]) -> Statement:
        args = []
        for a in node.inputs:
            other = stands.get(a, a)
            args.append(Number(True, b8) if other is None else argument(other, self.graph))
        return Statement(node.op, self.names[node], node.dtype, tuple(args), stays_inside(node, self.graph))

    # ---------------------------------------------------------------- ends

    def ends(self) -> Ends:
        mask = self.mask
        above = [n for n in self.ordered(self.graph.ancestors(*values_of(mask)))]
        return Ends(
            row_loads=self.loads(above, rows=True),
            row_body=self.statements(above),
            first=self.end_text(mask.needed.first),
            end=self.end_text(mask.needed.end),
            free_first=self.end_text(mask.free.first),
            free_end=self.end_text(mask.free.end),
            direction=direction(mask, self.graph),
        )

    def end_text(self, end: End | None) -> EndText | None:
        if end is None:
            return None
        if isinstance(end, Sum):
            return EndText(tuple((self.names[node], times) for node, times in end.terms), end.plus)
        inner = tuple(text for e in end.of if (text := self.end_text(e)) is not None)
        return EndText(how="least" if isinstance(end, Least) else "most", of=inner)
