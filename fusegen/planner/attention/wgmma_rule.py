"""Attention on Hopper's tensor cores: the rule. What a plan of it is, and why, is in `wgmma`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fusegen.language.graph import Graph
from fusegen.language.types import f32, size_of
from fusegen.planner.attention.late_pivots import late_of
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
from fusegen.planner.attention.parts import AttentionTile, ElementBody, ScoresPlan
from fusegen.planner.attention.recognition import Recognized, inputs_of, of_row
from fusegen.planner.attention.rule import checked, deals, dealt_text, need_narrow, plan_of
from fusegen.planner.attention.wgmma import (
    BOX_ROWS,
    CONSUMER_REGISTERS,
    WgmmaAttentionPlan,
    barrier_bytes,
    boxes,
    by_pairs,
    is_stored,
    mapped,
    need_one_way,
    registers_of,
    ring_bytes,
    tiles,
    unboxed,
    unmovable,
)
from fusegen.planner.attention.wgmma_cost import estimate
from fusegen.planner.matching import NoMatch, NotFor
from fusegen.planner.model import Layout, Number, Statement, Value
from fusegen.planner.parts import used_by
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target


def attention_wgmma(graph: Graph, target: Target, layout: Layout) -> Iterator[WgmmaAttentionPlan]:
    """Every tile that fits, of what tensor copies can move."""
    if not target.wgmma:
        raise NotFor(f"{target.arch} has no wgmma; sm_90a has")
    found = checked(graph)
    need_narrow(found)
    need_uncoded(found)
    atom = next(iter(target.atoms_of("warpgroup", found.dtype)), None)
    if atom is None:
        raise NoMatch(f"{target.arch} has no wgmma for factors of {found.dtype}")
    mask = mask_of(found)
    depth, width = (size_of(size, graph.sizes) for size in (found.depth, found.width))
    sizes = {size_of(node.inputs[0].shape[-2], graph.sizes) for node in found.paged.values()}
    dealt = [tile for tile in tiles(depth, width) if deals(tile, found)]
    whole = [tile for tile in dealt if not any(unboxed(rows, tile.keys) for rows in sizes)]
    if dealt and not whole:
        raise NoMatch(unboxed(max(sizes), dealt[0].keys) or unboxed(min(sizes), dealt[0].keys))
    plans = [plan for tile in whole if (plan := candidate(graph, found, mask, target, layout, tile, atom))]
    if not plans:
        raise NoMatch(
            f"queries of {depth} numbers and values of {width}: two stages of them, or a thread's sums, are more than "
            "a block has room for"
        )
    yield from plans


def candidate(
    graph: Graph, found: Recognized, mask: Mask, target: Target, layout: Layout, tile: AttentionTile, atom: Atom
) -> WgmmaAttentionPlan | None:
    lowered, sizes = found.lowered, graph.sizes
    depth, width = (size_of(size, sizes) for size in (found.depth, found.width))
    vector = next(v for v in (8, 4, 2, 1) if width % v == 0)
    dims = dims_of(lowered, attention_uses(lowered), layout)
    together = dict.fromkeys(behind_products(found), vector)
    accesses = dict(accesses_of(lowered, attention_uses(lowered), dims, layout, together))
    if found.value is found.key:  # one map reads both
        del accesses[found.value.name, "values"]
    factors = (
        accesses[found.query.name, "left"],
        accesses[found.key.name, "right"],
        accesses[found.value.name, "right" if found.value is found.key else "values"],
    )
    for access in factors:
        if reason := unmovable(access, dims):
            raise NoMatch(reason)
    query, key = (matrix(a, target, depth, n, 16) for a, n in zip(factors[:2], (tile.rows, tile.keys), strict=True))
    value = matrix(factors[2], target, width, tile.keys, 16, values=True)
    query_boxes = boxes(factors[0], dims, tile.rows, depth)
    key_boxes, value_boxes = (
        boxes(a, dims, tile.keys, n, pages=pages_of(found, t, accesses))
        for a, n, t in zip(factors[1:], (depth, width), (found.key, found.value), strict=True)
    )
    outputs = [accesses[t.name, "tile"] for t in lowered.outputs]
    stored = {a.tensor: boxes(a, dims, tile.rows, width, BOX_ROWS) for a in outputs if is_stored(a, dims)}
    scored = inputs_of(lowered, (*found.score_body, *found.weight_body))
    names = [t.name for t in scored if not of_row(t.node)]
    keys = size_of(found.keys, sizes)
    for name in names:
        accesses = {**accesses, (name, "tile"): by_pairs(accesses[name, "tile"], keys, name in layout.unaligned)}
    registers = registers_of(tile, value.padded, [accesses[name, "tile"] for name in names])
    room = ring_bytes(tile, query_boxes, key_boxes, value_boxes)
    cost = estimate(graph, found, mask, target, tile, room, registers)
    general = plan_of(graph, found, mask, target, layout, tile, atom, accesses, (query, key, value), room, cost)
    scale, tested, free = scaled_bodies(general)
    tangent = tangent_of(free)
    maps = tuple(dict.fromkeys((query_boxes, key_boxes, value_boxes, *stored.values())))
    moved = {b.access for b in maps}
    kept = frozenset(a.tensor for a in accesses.values() if a not in moved)
    need_one_way([b.access.tensor for b in maps], kept)
    own = {
        "rule": "attention_wgmma",
        "template": "attention_wgmma.cu.j2",
        "regime": regime(tile, general.regime, found.parts),
        "params": tuple(mapped(params_by_rows(lowered, dims, accesses), maps, dims, kept)),
        "tested": tested,
        "free": free,
    }
    plan = WgmmaAttentionPlan(
        **{**vars(general), **own},
        scale=scale,
        query_boxes=query_boxes,
        key_boxes=key_boxes,
        value_boxes=value_boxes,
        stored=stored,
        late=late_of(general, scale, tangent),
        tangent=tangent,
    )
    room = plan.barriers_at + barrier_bytes(tile)
    if room + plan.static_shared_bytes > target.shared_bytes or registers > CONSUMER_REGISTERS[plan.consumers]:
        return None
    return replace(plan, shared_bytes=room)


def regime(tile: AttentionTile, general: str, parts: int) -> str:
    """In the words of the general rule, whose first clause says who has which rows."""
    _, *masks = general.split("; ")
    consumers = tile.warps // 4
    each = "64 queries each, by turns" if consumers > 1 else "64 queries"
    who = f"{consumers} consumer warpgroup{'s' if consumers > 1 else ''} of {each}"
    keys = f"tiles of {tile.keys} keys{dealt_text(parts)}"
    return "; ".join([f"{who}, {keys}, a producer {tile.stages} tiles ahead", *masks])


def scaled_bodies(plan: ScoresPlan) -> tuple[float, ElementBody, ElementBody]:
    """A positive number that every logit is multiplied by last, and the bodies without that: the largest product is
    that of the largest factor, and powers are of the factor times log2 of e times the number, one instruction each.
    Where logits may be extreme, it is 1: rows have factors of their own; and of weights that are no powers."""
    tested, free = plan.tested, plan.free
    if plan.extreme or not plan.softmaxed:
        return 1.0, tested, free
    (scale, lighter), (other, lightest) = (without_scale(body) for body in (tested, free))
    return (scale, lighter, lightest) if scale == other else (1.0, tested, free)


def without_scale(body: ElementBody) -> tuple[float, ElementBody]:
    """logit = c * y, or c * y where a condition holds and -inf elsewhere: c, and the body of y."""
    made = {s.name: s for s in body.body}
    last = made.get(body.value)
    if last is None or body.value in used_by(body.body):
        return 1.0, body
    if found := factor(last):
        number, value = found
        return number, replace(body, body=tuple(s for s in body.body if s is not last), value=value.name)
    if last.op.name == "where" and is_minus_infinity(last.args[2]) and isinstance(last.args[1], Value):
        scaled = made.get(last.args[1].name)
        if scaled and (found := factor(scaled)) and sum(scaled.name in s.uses for s in body.body) == 1:
            number, value = found
            masked = replace(last, args=(last.args[0], value, last.args[2]))
            return number, replace(body, body=tuple(masked if s is last else s for s in body.body if s is not scaled))
    return 1.0, body


def factor(s: Statement) -> tuple[float, Value] | None:
    """The positive number and the value that a statement multiplies."""
    if s.op.name != "mul" or s.dtype is not f32:
        return None
    for number, value in (s.args, s.args[::-1]):
        if isinstance(number, Number) and isinstance(value, Value) and 0 < float(number.value) < math.inf:
            return float(number.value), value
    return None


def tangent_of(body: ElementBody) -> str:
    """The name of a body's only tanh, as soft caps have one; empty where there is none, or several."""
    found = [s.name for s in body.body if s.op.name == "tanh" and isinstance(s.args[0], Value)]
    return found[0] if len(found) == 1 else ""


def is_minus_infinity(arg: object) -> bool:
    return isinstance(arg, Number) and float(arg.value) == -math.inf
