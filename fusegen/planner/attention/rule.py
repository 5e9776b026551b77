"""Attention: two products, most often with a softmax between them, in one kernel: no row of scores is ever whole.

A block has some rows of queries; its warps go over tiles of keys and values in shared memory, and carry each row's
maximum and sums in registers (Milakov & Gimelshein 2018; Dao et al. 2022). What masks leave out of a tile's columns is
known before it is read: whole tiles are left out, and only those that an end cuts are tested, element by element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fusegen.language.graph import Graph, Kind, Node
from fusegen.language.naming import entry_name
from fusegen.language.products import Unsplittable, is_computed
from fusegen.language.types import size_of
from fusegen.planner.attention.cost import estimate, registers_of
from fusegen.planner.attention.counting import counted
from fusegen.planner.attention.drafts import ScoresDraft
from fusegen.planner.attention.masks import Mask, mask_of
from fusegen.planner.attention.operands import (
    accesses_of,
    attention_uses,
    banks_of,
    behind_products,
    dims_of,
    matrix,
    need_uncoded,
    pages_of,
    params_by_rows,
    scaled,
)
from fusegen.planner.attention.parts import (
    CHUNK,
    AttentionPlan,
    AttentionTile,
    Behind,
    Draw,
    ElementBody,
    Ends,
    Matrix,
    shared_bytes,
)
from fusegen.planner.attention.recognition import (
    MOST_DEPTH,
    Recognized,
    drawn_by_fours,
    has_plain_weights,
    is_attention,
    is_wide,
    of_row,
    recognized,
)
from fusegen.planner.cost import decisions
from fusegen.planner.matching import NoMatch, NotFor, need_countable
from fusegen.planner.model import Access, Cost, Layout, Store
from fusegen.planner.pieces import argument, roundings, statements
from fusegen.planner.ranges import fits
from fusegen.targets.atoms import Atom, Fragment
from fusegen.targets.base import Target

# rows, keys, warps, stages: with copies past the registers, which fill one stage while another is multiplied
TILES = (
    (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2), (64, 128, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2), (32, 64, 2, 2),
    (16, 64, 1, 2),
)  # fmt: skip
# and by way of registers, one stage of 32 KiB, so that a second block fits
WAVES = ((64, 64, 4, 1), (128, 64, 8, 1), (64, 32, 4, 1), (32, 32, 2, 1), (16, 32, 1, 1))
HELD_DEPTH = 128  # numbers of a query whose fragments stay in registers: 32 of these at most
SPARE_REGISTERS = 7  # that estimates are off by: ALiBi at 128 x 128 x 128, expected to take 252, spilled


def attention(graph: Graph, target: Target, layout: Layout) -> Iterator[AttentionPlan]:
    """Every tile that fits the target."""
    found = checked(graph)
    atom = chained(target, found)
    need_narrow(found)
    if target.async_copies:
        need_uncoded(found)
    keys, depth = (size_of(size, graph.sizes) for size in (found.keys, found.depth))
    mask = mask_of(found)
    fits_any = False
    for rows, tile_keys, warps, stages in TILES if target.async_copies else WAVES:
        tile = AttentionTile(rows, tile_keys, warps, stages, held=depth <= HELD_DEPTH)
        if not deals(tile, found) or tile_keys >= 2 * max(32, keys):
            continue
        made = candidate(graph, found, mask, target, layout, tile, atom)
        if made is None and found.parts:  # as many keys as wgmma's tiles have, for which there are no registers
            made = candidate(graph, found, mask, target, layout, replace(tile, held=False, ahead=False), atom)
        if made is not None:
            fits_any = True
            yield made
        if atom.repeated and tile.held and depth > HELD_DEPTH // 2:  # 64 registers more, of which it may spill some
            made = candidate(graph, found, mask, target, layout, replace(tile, held=False), atom)
            if made is not None:
                fits_any = True
                yield made
    if not fits_any:
        width = size_of(found.width, graph.sizes)
        raise NoMatch(
            f"keys of {depth} numbers and values of {width}: no tile of them fits shared memory and registers of "
            f"{target.arch}"
        )


def chained(target: Target, found: Recognized) -> Atom:
    """The instruction whose sums lie as a left factor does. Raises NoMatch for a target that has none."""
    atom = next((a for a in target.chained if a.factors is found.dtype), None)
    if atom is None:
        raise NoMatch(
            f"{target.arch} has no instruction whose sums go on as the next product's factor of {found.dtype}"
        )
    return atom


def deals(tile: AttentionTile, found: Recognized) -> bool:
    """Has it as many keys as are dealt at a time, if they are?"""
    return not found.parts or tile.keys == found.dealt


def checked(graph: Graph) -> Recognized:
    """The parts of a chain of attention. Raises NotFor for other chains, NoMatch for what no kernel of it holds."""
    if not is_attention(graph) and not has_plain_weights(graph):
        raise NotFor("attention is for two products with a softmax between them, or with elementwise steps alone")
    try:
        found = recognized(graph)
    except Unsplittable as reason:
        raise NoMatch(str(reason)) from None
    keys, depth, width = (size_of(size, graph.sizes) for size in (found.keys, found.depth, found.width))
    need_countable(keys)
    for what, number in (("queries and keys", depth), ("values", width)):
        if number % CHUNK:
            raise NoMatch(f"{what} of {number} numbers each; attention takes them in eights: pad them with zeros")
    return found


def need_narrow(found: Recognized) -> None:
    """Raises NoMatch for long rows."""
    if is_wide(found):
        depth, width = (size_of(size, found.lowered.sizes) for size in (found.depth, found.width))
        raise NoMatch(
            f"keys of {depth} numbers and values of {width}: a warp has registers for rows of up to {MOST_DEPTH}"
        )


def candidate(
    graph: Graph, found: Recognized, mask: Mask, target: Target, layout: Layout, tile: AttentionTile, atom: Atom
) -> AttentionPlan | None:
    lowered, sizes = found.lowered, graph.sizes
    depth, width = (size_of(size, sizes) for size in (found.depth, found.width))
    vector = next(v for v in (8, 4, 2, 1) if width % v == 0)
    dims = dims_of(lowered, attention_uses(lowered), layout)
    together = dict.fromkeys(behind_products(found), vector)
    accesses = accesses_of(lowered, attention_uses(lowered), dims, layout, together, found.coded)
    banks = banks_of(target)
    query = matrix(accesses[found.query.name, "left"], target, depth, tile.rows, atom.k, banks=banks)
    key = matrix(
        accesses[found.key.name, "right"], target, depth, tile.keys, atom.k,
        pages=pages_of(found, found.key, accesses), banks=banks, coded=found.key.name in found.coded,
        scaled=scaled(found, found.scores.inputs[1], accesses),
    )  # fmt: skip
    value = matrix(
        accesses[found.value.name, "values"], target, width, tile.keys, 16, values=True,
        pages=pages_of(found, found.value, accesses), banks=banks, coded=found.value.name in found.coded,
        scaled=scaled(found, found.product.inputs[1], accesses),
    )  # fmt: skip
    room = shared_bytes(tile, found.dtype, query, key, value)
    rows = sum(1 for n in found.score_body if of_row(n) and (is_computed(n) or (n.op.kind is Kind.INPUT and n.shape)))
    registers = registers_of(tile, atom, query, key, value, rows)
    if room > target.shared_bytes or registers > target.registers_per_thread - SPARE_REGISTERS:
        return None
    return plan_of(
        graph, found, mask, target, layout, tile, atom, accesses, (query, key, value), room,
        estimate(graph, found, mask, target, tile, atom, (query, key, value), room, registers),
    )  # fmt: skip


def plan_of(
    graph: Graph, found: Recognized, mask: Mask, target: Target, layout: Layout, tile: AttentionTile, atom: Atom,
    accesses: Mapping[tuple[str, str], Access], matrices: tuple[Matrix, Matrix, Matrix], room: int, cost: Cost,
) -> AttentionPlan:  # fmt: skip
    """A plan by mma.sync or MFMA, whose bodies every kernel of attention has."""
    lowered, sizes = found.lowered, graph.sizes
    query, key, value = matrices
    width, dims = size_of(found.width, sizes), dims_of(lowered, attention_uses(lowered), layout)
    vector = next(v for v in (8, 4, 2, 1) if width % v == 0)
    by_tensor = {name: access for (name, place), access in accesses.items() if place == "tile"}
    drawn = Draft(found, mask, by_tensor)
    ends = drawn.ends()
    made = AttentionPlan(
        name=entry_name(graph),
        graph=graph,
        attention=lowered,
        target=target,
        layout=layout,
        rule="attention",
        template="attention.cu.j2",
        regime=regime(tile, ends, mask, drawn),
        cols=graph.cols,
        row_dims=dims,
        accesses=tuple(accesses.values()),
        params=tuple(params_by_rows(lowered, dims, accesses)),
        folded=False,
        shared_bytes=room,
        cost=cost,
        decisions=decisions(graph),
        rounding=(rounded_weights(found, drawn.names), *roundings(graph)),
        tile=tile,
        atom=atom,
        query=query,
        key=key,
        value=value,
        keys=size_of(found.keys, sizes),
        parts=found.parts,
        dtype=found.dtype,
        launch_body=drawn.launch_body,
        row_loads=drawn.row_loads,
        row_body=drawn.row_body,
        tested=drawn.score_body(frozenset()),
        free=drawn.score_body(mask.settled),
        weight=drawn.weight_body(atom.fragment),
        draws=drawn.draws(atom.fragment),
        base_2=found.softmax is not None and found.exps.op.name == "exp2",
        extreme=found.extreme,
        ends=ends,
        softmaxed=found.softmax is not None,
        behind=drawn.behind(vector, -(-tile.rows * width // vector // (tile.warps * target.warp))),
    )
    tested, free = counted(made)
    return replace(made, tested=tested, free=free)


def rounded_weights(found: Recognized, names: Mapping[Node, str]) -> str:
    """Of a plan's `rounding`, what is said of the second product's left factor."""
    before = ", before it is divided by its row's sum," if found.softmax else ""
    return f"{names[found.weights]}{before} to {found.dtype} where it meets {names[found.value.node]}"


def regime(tile: AttentionTile, ends: Ends, mask: Mask, drawn: Draft) -> str:
    skipped = ""
    if ends.skips:
        what = " and ".join(
            filter(None, ["before the first" if ends.first else "", "behind the last" if ends.end else ""])
        )
        skipped = f"; of keys {what} that a block's rows need, none are read"
    tested = "; conditions are tested in tiles that an end cuts" if ends.settles else ""
    dealt = dealt_text(drawn.found.parts)
    who = f"{tile.rows} queries a block of {tile.warps} warps"
    copied = "the next tile copied meanwhile" if tile.stages > 1 else "the next tile in registers meanwhile"
    stages = copied if tile.ahead else "each read when its turn has come"
    return f"{who}, tiles of {tile.keys} keys{dealt}, {stages}{skipped}{tested}"


def dealt_text(parts: int) -> str:
    """What a tile's keys are, where blocks share them."""
    return f", dealt to {parts} blocks by turns" if parts else ""


class Draft(ScoresDraft):
    """The bodies of recognized attention."""

    def __init__(self, found: Recognized, mask: Mask, accesses: Mapping[str, Access]) -> None:
        super().__init__(found, mask, accesses, (*found.score_body, *found.weight_body))
        self.found = found

    def weight_body(self, fragment: Fragment) -> ElementBody:
        found = self.found
        if found.softmax is None:
            return ElementBody(given=self.names[found.weights], value=self.names[found.weights])
        apart = drawn_by_fours(found, fragment)
        asked = {found.weights, *(a for n in found.weight_body if n not in apart for a in n.inputs)}
        listed = [n for n in found.weight_body if not of_row(n) and n in asked and n not in apart]
        return ElementBody(
            given=self.names[found.exps],
            value=self.names[found.weights],
            loads=self.loads(listed, rows=False),
            body=statements(self.graph, [n for n in listed if is_computed(n)]),
        )

    def draws(self, fragment: Fragment) -> tuple[Draw, ...]:
        return tuple(
            Draw(self.names[n], *(argument(a, self.graph) for a in n.inputs[2:]))
            for n in drawn_by_fours(self.found, fragment)
        )

    # ---------------------------------------------------------------- behind

    def behind(self, vector: int, passes: int) -> Behind:
        found, graph = self.found, self.graph
        carried = {found.product, *found.carried}
        pivot: list[Node] = []
        if not found.plain_pivot:
            pivot = [n for n in found.pivot_body if of_row(n) and is_computed(n)]
        listed = [n for n in found.epilogue if n not in carried]
        rows = [n for n in listed if of_row(n) and is_computed(n) and n not in pivot]
        outputs = [(Store(self.accesses[t.name], self.names[t.node], fits=fits(t, graph)), t) for t in graph.outputs]
        needed = [*listed, *found.pivot_body] if pivot else listed
        return Behind(
            sums=self.names[found.product],
            top=self.names[found.top] if found.softmax else "",
            total=self.names[found.total] if found.softmax and found.total else "",
            pivot=self.names[found.pivot] if pivot else "",
            pivot_body=self.statements(pivot),
            vector=vector,
            passes=passes,
            row_loads=self.loads(needed, rows=True),
            row_body=self.statements(rows),
            row_stores=tuple(store for store, t in outputs if of_row(t.node)),
            loads=self.loads(listed, rows=False),
            body=statements(graph, [n for n in listed if not of_row(n) and is_computed(n)]),
            stores=tuple(store for store, t in outputs if not of_row(t.node)),
        )
