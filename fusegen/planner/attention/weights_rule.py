"""Written weights: the softmax of a product's rows as an array, in one kernel in which no score is in memory.

What two passes over the keys compute twice, the product and its exponentials, costs less than to write scores and read
them again: softmax(causal(q @ k^T)) of 32 heads of 4096 queries and keys is bound by the writing of its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fusegen.language.graph import Graph, Kind, Node
from fusegen.language.naming import entry_name
from fusegen.language.products import Unsplittable, is_computed
from fusegen.language.types import size_of
from fusegen.planner.attention.drafts import ScoresDraft
from fusegen.planner.attention.masks import Mask, mask_of
from fusegen.planner.attention.operands import accesses_of, banks_of, dims_of, matrix, params_by_rows, weights_uses
from fusegen.planner.attention.parts import CHUNK, AttentionTile, Ends, Matrix
from fusegen.planner.attention.recognition import of_row
from fusegen.planner.attention.weights import Results, WeightsPlan, shared_bytes
from fusegen.planner.attention.weights_cost import estimate, registers_of
from fusegen.planner.attention.written import Written, is_by_row, written_weights
from fusegen.planner.cost import decisions
from fusegen.planner.matching import NoMatch, need_countable
from fusegen.planner.model import Access, Cost, Layout, Statement, Store
from fusegen.planner.pieces import VECTOR_BYTES, roundings
from fusegen.planner.ranges import fits
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target

# rows, keys, warps, stages: with copies past the registers, and by way of registers
TILES = (
    (128, 128, 8, 2), (128, 64, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 64, 2, 2), (16, 64, 1, 2),
)  # fmt: skip
WAVES = ((128, 64, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 2, 1), (16, 32, 1, 1))
HELD_DEPTH = 128  # numbers of a query whose fragments stay in registers: 32 of these at most
MOST_DEPTH = 256


def weights(graph: Graph, target: Target, layout: Layout) -> Iterator[WeightsPlan]:
    """Every tile that fits the target."""
    found = checked(graph)
    atom = next((a for a in target.chained if a.factors is found.dtype), None)
    if atom is None:
        raise NoMatch(f"{target.arch} has no instruction for products of {found.dtype} that stay in registers")
    if atom.repeated:
        raise NoMatch(
            f"a lane of {target.arch} has every other column of a product's sums; weights are written by runs"
        )
    keys, depth = (size_of(size, graph.sizes) for size in (found.keys, found.depth))
    mask = mask_of(found)
    for rows, tile_keys, warps, stages in TILES if target.async_copies else WAVES:
        tile = AttentionTile(rows, tile_keys, warps, stages, held=depth <= HELD_DEPTH)
        if tile_keys < 2 * max(32, keys) and (made := candidate(graph, found, mask, target, layout, tile, atom)):
            yield made


def checked(graph: Graph) -> Written:
    """The parts of a chain of written weights. Raises NoMatch for what no kernel holds."""
    try:
        found = written_weights(graph)
    except Unsplittable as reason:
        raise NoMatch(str(reason)) from None
    keys, depth = (size_of(size, graph.sizes) for size in (found.keys, found.depth))
    need_countable(keys)
    if depth % CHUNK or depth > MOST_DEPTH:
        raise NoMatch(
            f"queries and keys of {depth} numbers each; written weights are made of whole rows of them in shared "
            f"memory, in eights and up to {MOST_DEPTH}"
        )
    return found


def candidate(
    graph: Graph, found: Written, mask: Mask, target: Target, layout: Layout, tile: AttentionTile, atom: Atom
) -> WeightsPlan | None:
    depth = size_of(found.depth, graph.sizes)
    uses = weights_uses(found)
    dims = dims_of(found.lowered, uses, layout)
    accesses = accesses_of(found.lowered, uses, dims, layout, results_together(found))
    banks = banks_of(target)
    query = matrix(accesses[found.query.name, "left"], target, depth, tile.rows, atom.k, banks=banks)
    key = matrix(accesses[found.key.name, "right"], target, depth, tile.keys, atom.k, banks=banks)
    room = shared_bytes(tile, found.dtype, query, key)
    rows = sum(1 for n in found.score_body if of_row(n) and (is_computed(n) or (n.op.kind is Kind.INPUT and n.shape)))
    registers = registers_of(tile, atom, query, key, rows + len(found.row_values))
    if room > target.shared_bytes or registers > target.registers_per_thread:
        return None
    cost = estimate(graph, found, mask, target, tile, room, registers)
    return plan_of(graph, found, mask, target, layout, tile, atom, accesses, (query, key), room, cost)


def results_together(found: Written) -> Mapping[str, int]:
    """Elements of a result that move together, where the layout allows that."""
    return {t.name: VECTOR_BYTES // t.dtype.bytes for t in found.results}


def plan_of(
    graph: Graph, found: Written, mask: Mask, target: Target, layout: Layout, tile: AttentionTile, atom: Atom,
    accesses: Mapping[tuple[str, str], Access], matrices: tuple[Matrix, Matrix], room: int, cost: Cost,
) -> WeightsPlan:  # fmt: skip
    """A plan by mma.sync or MFMA, whose bodies every kernel of written weights has."""
    lowered, sizes = found.lowered, graph.sizes
    dims = dims_of(lowered, weights_uses(found), layout)
    drawn = Draft(found, mask, {name: access for (name, place), access in accesses.items() if place == "tile"})
    results = drawn.results()
    ends = drawn.ends()
    if not results.by_row:  # every tile has something of its own to be written
        ends = replace(ends, first=None, end=None)
    return WeightsPlan(
        name=entry_name(graph),
        graph=graph,
        attention=lowered,
        target=target,
        layout=layout,
        rule="weights",
        template="weights.cu.j2",
        regime=regime(tile, ends),
        cols=graph.cols,
        row_dims=dims,
        accesses=tuple(accesses.values()),
        params=tuple(params_by_rows(lowered, dims, accesses)),
        folded=False,
        shared_bytes=room,
        cost=cost,
        decisions=decisions(graph),
        rounding=roundings(graph),
        tile=tile,
        atom=atom,
        query=matrices[0],
        key=matrices[1],
        keys=size_of(found.keys, sizes),
        dtype=found.dtype,
        launch_body=drawn.launch_body,
        row_loads=drawn.row_loads,
        row_body=drawn.row_body,
        tested=drawn.score_body(frozenset()),
        free=drawn.score_body(mask.settled),
        base_2=found.exps.op.name == "exp2",
        extreme=found.extreme,
        ends=ends,
        results=results,
    )


def regime(tile: AttentionTile, ends: Ends) -> str:
    skipped = "; where a mask leaves nothing of a tile, no score is made" if ends.skips else ""
    tested = "; conditions are tested in tiles that an end cuts" if ends.settles else ""
    stages = "the next tile copied meanwhile" if tile.stages > 1 else "the next tile in registers meanwhile"
    return (
        f"{tile.rows} queries a block of {tile.warps} warps, tiles of {tile.keys} keys twice, {stages}{skipped}{tested}"
    )


class Draft(ScoresDraft):
    """The bodies of written weights."""

    def __init__(self, found: Written, mask: Mask, accesses: Mapping[str, Access]) -> None:
        super().__init__(found, mask, accesses, found.score_body)
        self.found = found

    def results(self) -> Results:
        found, graph = self.found, self.graph
        pivot: list[Node] = []
        if not found.plain_pivot:
            pivot = [n for n in found.between(found.pivot, (found.top,)) if of_row(n) and is_computed(n)]
        elements = self.made_of(frozenset())
        rows = self.rows_of(elements)
        needed = [*rows, *found.between(found.pivot, (found.top,))] if pivot else rows
        stores = [(Store(self.accesses[t.name], self.names[t.node], fits=fits(t, graph)), t) for t in graph.outputs]
        asked = any(n is found.exps for n in elements)
        return Results(
            exps=self.names[found.exps] if asked else "",
            top=self.names[found.top],
            total=self.names[found.total] if found.total else "",
            pivot=self.names[found.pivot] if pivot else "",
            pivot_body=self.statements(pivot),
            row_loads=self.loads(needed, rows=True),
            row_body=self.statements(n for n in rows if n not in pivot),
            row_stores=tuple(store for store, t in stores if of_row(t.node)),
            loads=self.loads(elements, rows=False),
            body=self.result_body(frozenset()),
            free_body=self.result_body(self.mask.settled),
            stores=tuple(store for store, t in stores if not of_row(t.node)),
            by_row=is_by_row(found),
        )

    def rows_of(self, elements: Iterable[Node]) -> list[Node]:
        """The row values that those elements and results of rows are made of, in order, beside what is carried."""
        wanted = {a for n in elements if n is not self.found.exps for a in n.inputs if of_row(a)}
        wanted.update(t.node for t in self.graph.outputs if of_row(t.node))
        for node in reversed(self.graph.nodes):
            if node in wanted and node not in self.found.carried:
                wanted.update(node.inputs)
        return [n for n in self.graph.nodes if n in wanted and n not in self.found.carried]

    def result_body(self, settled: frozenset[Node]) -> tuple[Statement, ...]:
        """From an exponential to what is written, and from the score where that is asked for; what makes the logit is
        made before it."""
        found = self.found
        elements = self.made_of(self.settled(settled))
        stands = self.stand_ins(found.score_body, self.settled(settled))
        made = {s.name for s in self.score_body(settled).body} if found.exps in elements else set()
        listed = [n for n in elements if n is not found.exps and self.names[n] not in made]
        return tuple(self.resolved(n, stands) for n in listed if is_computed(n))

    def settled(self, settled: frozenset[Node]) -> frozenset[Node]:
        """Of those conditions, what results need not ask for: none, where one is written as it stands before them."""
        inside = set(self.found.score_body)
        return frozenset() if any(t.node in inside for t in self.found.results) else settled

    def made_of(self, settled: frozenset[Node]) -> list[Node]:
        """What of results has a value for each element, in order, as far as scores and exponentials; with the
        latter."""
        stands = self.stand_ins(self.found.score_body, settled)
        wanted = {t.node for t in self.found.results}
        for node in reversed(self.graph.nodes):
            if node in wanted and node not in (self.found.exps, self.found.scores) and not of_row(node):
                wanted.update(a for a in (stands.get(a, a) for a in node.inputs) if a is not None)
        return [n for n in self.graph.nodes if n in wanted and not of_row(n) and n is not self.found.scores]
