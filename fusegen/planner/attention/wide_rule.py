"""Attention of long rows: the rule. What a plan of it is, and why, is in `wide`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusegen.language.graph import Graph, Kind
from fusegen.language.products import is_computed
from fusegen.language.types import size_of
from fusegen.planner.attention.codes import element_steps
from fusegen.planner.attention.masks import Mask, mask_of
from fusegen.planner.attention.operands import (
    accesses_of,
    attention_uses,
    behind_products,
    dims_of,
    matrix,
    need_uncoded,
    pages_of,
    scaled,
)
from fusegen.planner.attention.parts import AttentionTile
from fusegen.planner.attention.recognition import MOST_DEPTH, Recognized, is_attention, is_wide, of_row
from fusegen.planner.attention.rule import (
    SPARE_REGISTERS,
    chained,
    checked,
    deals,
    dealt_text,
    plan_of,
)
from fusegen.planner.attention.wide import (
    CODED,
    GROUP_ROWS,
    TILES,
    WAVES,
    WideAttentionPlan,
    beside,
    registers_of,
    shared_bytes,
)
from fusegen.planner.attention.wide_cost import estimate
from fusegen.planner.matching import NoMatch, NotFor
from fusegen.planner.model import Layout
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target


def attention_wide(graph: Graph, target: Target, layout: Layout) -> Iterator[WideAttentionPlan]:
    """Every tile that fits the target."""
    if not is_attention(graph):
        raise NotFor("attention is for two products with a softmax between them")
    found = checked(graph)
    by_wmma = any(atom.kind == "wmma" for atom in target.chained)
    if not is_wide(found) and (by_wmma or not found.coded):
        raise NotFor(f"keys and values of up to {MOST_DEPTH} numbers: one warp has the sums of 16 rows")
    if is_wide(found):
        need_uncoded(found)
    atom = chained(target, found)
    if atom.kind == "wmma":
        raise NoMatch(
            f"keys or values of more than {MOST_DEPTH} numbers: warps that share rows go by mma.sync and MFMA"
        )
    keys, depth, width = (size_of(size, graph.sizes) for size in (found.keys, found.depth, found.width))
    mask = mask_of(found)
    plans = []
    for rows, tile_keys, warps, stages in CODED if found.coded else TILES if target.async_copies else WAVES:
        tile = AttentionTile(rows, tile_keys, warps, stages, held=not target.async_copies)
        fits = deals(tile, found) and tile_keys < 2 * max(32, keys) and tile_keys % (GROUP_ROWS * beside(tile)) == 0
        if fits and width % (GROUP_ROWS * beside(tile)) == 0:
            plan = candidate(graph, found, mask, target, layout, tile, atom)
            if plan is not None:
                plans.append(plan)
    if not plans:
        raise NoMatch(
            f"keys of {depth} numbers and values of {width}: no tile of them, with 16 rows of queries, fits shared "
            f"memory and registers of {target.arch}; values go in multiples of 32"
        )
    yield from plans


def candidate(
    graph: Graph, found: Recognized, mask: Mask, target: Target, layout: Layout, tile: AttentionTile, atom: Atom
) -> WideAttentionPlan | None:
    lowered, sizes = found.lowered, graph.sizes
    depth, width = (size_of(size, sizes) for size in (found.depth, found.width))
    vector = next(v for v in (8, 4, 2, 1) if width % v == 0)
    uses = attention_uses(lowered)
    dims = dims_of(lowered, uses, layout)
    together = dict.fromkeys(behind_products(found), vector)
    accesses = dict(accesses_of(lowered, uses, dims, layout, together, found.coded))
    shared = are_columns_of_keys(found, layout)
    value_access = accesses[found.value.name, "values"]
    if shared:  # it is read as columns of the key
        del accesses[found.value.name, "values"]
    query = matrix(accesses[found.query.name, "left"], target, depth, tile.rows, atom.k)
    key = matrix(
        accesses[found.key.name, "right"], target, depth, tile.keys, atom.k,
        pages=pages_of(found, found.key, accesses), coded=found.key.name in found.coded,
        scaled=scaled(found, found.scores.inputs[1], accesses),
    )  # fmt: skip
    pages = None if shared else pages_of(found, found.value, accesses)
    value = matrix(
        value_access, target, width, tile.keys, GROUP_ROWS, pages=pages, coded=found.value.name in found.coded,
        scaled=scaled(found, found.product.inputs[1], accesses),
    )  # fmt: skip
    if found.coded:  # a tile is put in its place once the one before has been multiplied: no copies past the registers
        key, value = (replace(m, transport="plain") for m in (key, value))
    if shared:
        value = replace(value, transport=key.transport)
    if target.async_copies and not (found.coded or (key.copied and (shared or value.copied))):
        tile = replace(tile, ahead=False)  # no registers are left for what would be on its way
    room = shared_bytes(tile, found.dtype, query, key, value, shared)
    rows = sum(1 for n in found.score_body if of_row(n) and (is_computed(n) or (n.op.kind is Kind.INPUT and n.shape)))
    registers = registers_of(tile, atom, query, key, value, shared, rows)
    most = min(target.registers_per_thread, target.registers_per_sm // (tile.warps * target.warp))
    if room > target.shared_bytes or registers > most - SPARE_REGISTERS:
        return None
    cost = estimate(graph, found, mask, target, tile, atom, (query, key, value), room, registers, shared)
    general = plan_of(graph, found, mask, target, layout, tile, atom, accesses, (query, key, value), room, cost)
    own = {
        "rule": "attention_wide",
        "template": "attention_wide.cu.j2",
        "regime": regime(tile, general.regime, found.parts, shared),
    }
    return WideAttentionPlan(**{**vars(general), **own}, shared=shared)


def are_columns_of_keys(found: Recognized, layout: Layout) -> bool:
    """Are the values the first columns of the keys, in the same rows and, if these lie in pages, of the same ones? And
    is the same made of their codes?"""
    pages = [found.paged.get(tensor.name) for tensor in (found.key, found.value)]
    of_key, of_value = (node.inputs[1] if node else None for node in pages)
    within = found.value is found.key or (found.value.name, found.key.name) in layout.within
    made = [element_steps(product.inputs[1], found.dtype) for product in (found.scores, found.product)]
    return within and of_key is of_value and made[0] == made[1]


def regime(tile: AttentionTile, general: str, parts: int, shared: bool) -> str:
    """In the words of the general rule, whose first clause says who has which rows."""
    _, *masks = general.split("; ")
    who = f"{tile.rows} queries a block of {tile.warps} warps, {beside(tile)} for each 16"
    keys = f"tiles of {tile.keys} keys{dealt_text(parts)}{', whose first columns are the values' if shared else ''}"
    copied = "the next tile copied meanwhile" if tile.stages > 1 else "the next tile in registers meanwhile"
    return "; ".join([f"{who}, {keys}, {copied if tile.ahead else 'each read when its turn has come'}", *masks])
