"""Latent attention on Hopper's tensor cores: the rule. What a plan of it is, and why, is in `wide_wgmma`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusegen.language.graph import Graph
from fusegen.language.types import size_of
from fusegen.planner.attention.masks import Mask, mask_of
from fusegen.planner.attention.operands import (
    accesses_of,
    attention_uses,
    behind_products,
    dims_of,
    matrix,
    need_uncoded,
    pages_of,
    params_by_rows,
)
from fusegen.planner.attention.parts import AttentionTile
from fusegen.planner.attention.recognition import MOST_DEPTH, Recognized, inputs_of, is_attention, is_wide, of_row
from fusegen.planner.attention.rule import checked, deals, dealt_text, plan_of
from fusegen.planner.attention.wgmma import LINE_ELEMENTS, boxes, by_pairs, mapped, need_one_way, unboxed, unmovable
from fusegen.planner.attention.wgmma_rule import scaled_bodies
from fusegen.planner.attention.wide_rule import are_columns_of_keys
from fusegen.planner.attention.wide_wgmma import (
    CONSUMERS,
    MOST_REGISTERS,
    TILE,
    WideWgmmaAttentionPlan,
    barrier_bytes,
    registers_of,
)
from fusegen.planner.attention.wide_wgmma_cost import estimate
from fusegen.planner.matching import NoMatch, NotFor
from fusegen.planner.model import Layout
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target

COLUMN_UNIT = CONSUMERS * LINE_ELEMENTS  # of values: each warpgroup has whole lines of shared memory


def attention_wide_wgmma(graph: Graph, target: Target, layout: Layout) -> Iterator[WideWgmmaAttentionPlan]:
    """The plan of the one tile, where it fits the target and tensor copies can move what it reads."""
    if not target.wgmma:
        raise NotFor(f"{target.arch} has no wgmma; sm_90a has")
    if not is_attention(graph):
        raise NotFor("attention is for two products with a softmax between them")
    found = checked(graph)
    if not is_wide(found):
        raise NotFor(f"keys and values of up to {MOST_DEPTH} numbers: one warpgroup has the sums of 64 rows")
    need_uncoded(found)
    atom = next(iter(target.atoms_of("warpgroup", found.dtype)), None)
    if atom is None:
        raise NoMatch(f"{target.arch} has no wgmma for factors of {found.dtype}")
    if not deals(TILE, found):
        raise NoMatch(f"{found.dealt} keys are dealt at a time; a tile here has {TILE.keys}")
    width = size_of(found.width, graph.sizes)
    if not are_columns_of_keys(found, layout):
        raise NoMatch(
            "values that are no first columns of the keys: two tiles of both are more than a block has room for"
        )
    if width % COLUMN_UNIT:
        raise NoMatch(f"values of {width} numbers; two warpgroups share them in multiples of {COLUMN_UNIT}")
    for node in found.paged.values():
        if reason := unboxed(size_of(node.inputs[0].shape[-2], graph.sizes), TILE.keys):
            raise NoMatch(reason)
    yield candidate(graph, found, mask_of(found), target, layout, TILE, atom)


def candidate(
    graph: Graph, found: Recognized, mask: Mask, target: Target, layout: Layout, tile: AttentionTile, atom: Atom
) -> WideWgmmaAttentionPlan:
    """Raises NoMatch where it can't be moved or has no room."""
    lowered, sizes = found.lowered, graph.sizes
    depth, width = (size_of(size, sizes) for size in (found.depth, found.width))
    uses = attention_uses(lowered)
    dims = dims_of(lowered, uses, layout)
    vector = next(v for v in (8, 4, 2, 1) if width % v == 0)
    together = dict.fromkeys(behind_products(found), vector)
    accesses = dict(accesses_of(lowered, uses, dims, layout, together))
    value_access = accesses.pop((found.value.name, "values"))  # it is read as columns of the key
    factors = accesses[found.query.name, "left"], accesses[found.key.name, "right"]
    for access in factors:
        if reason := unmovable(access, dims):
            raise NoMatch(reason)
    query, key = (matrix(a, target, depth, n, atom.k) for a, n in zip(factors, (tile.rows, tile.keys), strict=True))
    value = matrix(value_access, target, width, tile.keys, atom.k, values=True)
    query_boxes = boxes(factors[0], dims, tile.rows, depth)
    key_boxes = boxes(factors[1], dims, tile.keys, depth, pages=pages_of(found, found.key, accesses))
    names = [t.name for t in inputs_of(lowered, (*found.score_body, *found.weight_body)) if not of_row(t.node)]
    keys = size_of(found.keys, sizes)
    for name in names:
        accesses[name, "tile"] = by_pairs(accesses[name, "tile"], keys, name in layout.unaligned)
    registers = registers_of(tile, width, [accesses[name, "tile"] for name in names])
    cost = estimate(graph, found, mask, target, tile, registers)
    general = plan_of(graph, found, mask, target, layout, tile, atom, accesses, (query, key, value), 0, cost)
    scale, tested, free = scaled_bodies(general)
    maps = (query_boxes, key_boxes)
    moved = {b.access for b in maps}
    kept = frozenset(a.tensor for a in accesses.values() if a not in moved)
    need_one_way([b.access.tensor for b in maps], kept)
    own = {
        "rule": "attention_wide_wgmma",
        "template": "attention_wide_wgmma.cu.j2",
        "regime": regime(tile, general.regime, found.parts),
        "params": tuple(mapped(params_by_rows(lowered, dims, accesses), maps, dims, kept)),
        "tested": tested,
        "free": free,
    }
    plan = WideWgmmaAttentionPlan(
        **{**vars(general), **own}, scale=scale, query_boxes=query_boxes, key_boxes=key_boxes, stored={}
    )
    room = plan.barriers_at + barrier_bytes(tile, key_boxes)
    if room + plan.static_shared_bytes > target.shared_bytes or registers > MOST_REGISTERS:
        raise NoMatch(
            f"queries of {depth} numbers and values of {width}: two stages of them, or a thread's sums, are more than "
            "a block has room for"
        )
    return replace(plan, shared_bytes=room, cost=replace(cost, in_flight_bytes=room))


def regime(tile: AttentionTile, general: str, parts: int) -> str:
    """In the words of the general rule, whose first clause says who has which rows."""
    _, *masks = general.split("; ")
    who = f"{tile.rows} queries of two warpgroups, each with half of the columns and the scores of every other tile"
    keys = f"tiles of {tile.keys} keys{dealt_text(parts)}, whose first columns are the values"
    return "; ".join([f"{who}, {keys}, a producer {tile.stages} tiles ahead", *masks])
