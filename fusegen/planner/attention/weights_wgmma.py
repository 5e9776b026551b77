"""Written weights on Hopper: tensor copies bring queries and keys, wgmma multiplies, and tensor copies store.

A block has 64 queries for each of its consumer warpgroups; a producer brings the tiles of keys twice. Where a mask
leaves nothing, the producer stores boxes of zeros, some behind each tile of the first pass, in which nothing else is
stored: writing bounds the kernel.

What measurements on an H200 decided (docs/measurements.md, "Weights written out"):

- Four consumers with a tile of scores each take 10 % less than two, of which each has the next tile multiplied while it
  computes this one's exponentials. Turns, queries in registers and polynomials for a part of the exponentials lost.
- Zeros while sums are carried, not while weights are written, gained 2 %. Zeros of another block's rows, so that each
  block stores as much for each product, would gain 2 to 8 % more, but a row of NaN is NaN in masked columns too.
- Stores that L2 evicts first gained 5 %. Eight heads are mixed; two took up to 8 % more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusegen.language.graph import Graph
from fusegen.language.types import size_of
from fusegen.planner.attention.masks import Mask, mask_of
from fusegen.planner.attention.operands import accesses_of, dims_of, matrix, params_by_rows, weights_uses
from fusegen.planner.attention.parts import AttentionTile, Ends
from fusegen.planner.attention.recognition import inputs_of, of_row
from fusegen.planner.attention.weights import WeightsPlan
from fusegen.planner.attention.weights_cost import estimate_wgmma
from fusegen.planner.attention.weights_rule import checked, plan_of, results_together
from fusegen.planner.attention.wgmma import (
    BOX_ROWS,
    CONSUMER_REGISTERS,
    GROUP_ROWS,
    WgmmaScoresPlan,
    boxes,
    by_pairs,
    is_stored,
    mapped,
    need_one_way,
    unmovable,
)
from fusegen.planner.attention.wgmma_rule import scaled_bodies
from fusegen.planner.attention.written import Written
from fusegen.planner.matching import NoMatch, NotFor
from fusegen.planner.model import Access, Layout
from fusegen.planner.tile import LINE_BYTES
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target

TILES = ((4, 128), (3, 128), (2, 128), (1, 128), (2, 64), (1, 64))  # consumers, and keys of a tile
MOST_STAGES = 3
USUAL_REGISTERS = 40  # beside scores: addresses, row values, what is on its way to shared memory
MOST_TOGETHER = 32  # heads whose blocks are mixed, with so many bytes of keys; us of heads x queries and keys of 128,
# causal, by 4, 8, 16 and 32 heads on one H200: 32 x 1024 46.2, 43.2, 36.6, 37.7, 64 x 1024 75.0, 73.3, 70.0, 63.2, 32 x
# 2048 124, 111, 106, 117, 64 x 2048 207, 200, 196, 212, 32 x 4096 371, 356, 385, 421, 8 x 8192 359, 396, 402, 396
TOGETHER_BYTES = 2**23


@dataclass(frozen=True, kw_only=True)
class WgmmaWeightsPlan(WgmmaScoresPlan, WeightsPlan):
    """Written weights by wgmma."""

    @property
    def columns_of_key(self) -> int:
        return self.key.columns

    @property
    def most_together(self) -> int:
        each = self.keys * self.columns_of_key * self.dtype.bytes
        return min(MOST_TOGETHER, 1 << max(0, (TOGETHER_BYTES // each).bit_length() - 1))

    @property
    def zeroes(self) -> bool:
        """Are boxes of zeros stored where a mask leaves nothing?"""
        return self.ends.skips and bool(self.stored)

    @property
    def staging_at(self) -> int:
        """Where what is stored is put, in bytes: of each result, every warp's rows, 64 columns at a time."""
        return self.query_boxes.bytes + self.tile.stages * self.key_boxes.bytes

    @property
    def zeros_at(self) -> int:
        return self.staging_at + sum(b.bytes for b in self.stored.values())

    @property
    def barriers_at(self) -> int:
        return self.zeros_at + (BOX_ROWS * LINE_BYTES if self.zeroes else 0)


def weights_wgmma(graph: Graph, target: Target, layout: Layout) -> Iterator[WgmmaWeightsPlan]:
    """Every tile that fits, of what tensor copies can move."""
    if not target.wgmma:
        raise NotFor(f"{target.arch} has no wgmma; sm_90a has")
    found = checked(graph)
    atom = next(iter(target.atoms_of("warpgroup", found.dtype)), None)
    if atom is None:
        raise NoMatch(f"{target.arch} has no wgmma for factors of {found.dtype}")
    mask = mask_of(found)
    fitting = (candidate(graph, found, mask, target, layout, *tile, atom) for tile in TILES)
    plans = [plan for plan in fitting if plan]
    if not plans:
        depth = size_of(found.depth, graph.sizes)
        raise NoMatch(f"queries and keys of {depth} numbers: two tiles of them are more than a block has room for")
    yield from plans


def candidate(
    graph: Graph, found: Written, mask: Mask, target: Target, layout: Layout, consumers: int, keys: int, atom: Atom
) -> WgmmaWeightsPlan | None:
    lowered, depth = found.lowered, size_of(found.depth, graph.sizes)
    uses = weights_uses(found)
    dims = dims_of(lowered, uses, layout)
    accesses = accesses_of(lowered, uses, dims, layout, results_together(found))
    factors = accesses[found.query.name, "left"], accesses[found.key.name, "right"]
    for access in factors:
        if reason := unmovable(access, dims):
            raise NoMatch(reason)
    scored = inputs_of(lowered, (*found.score_body, *found.behind))
    names = [t.name for t in scored if not of_row(t.node)]
    for name in names:
        pairs = by_pairs(accesses[name, "tile"], size_of(found.keys, graph.sizes), name in layout.unaligned)
        accesses = {**accesses, (name, "tile"): pairs}
    registers = registers_of(keys, [accesses[name, "tile"] for name in names])
    if registers > CONSUMER_REGISTERS[consumers]:
        return None
    for stages in range(MOST_STAGES, 1, -1):
        tile = AttentionTile(consumers * GROUP_ROWS, keys, 4 * consumers, stages, held=False)
        query, key = (matrix(a, target, depth, n, atom.k) for a, n in zip(factors, (tile.rows, tile.keys), strict=True))
        query_boxes, key_boxes = (
            boxes(a, dims, n, depth) for a, n in zip(factors, (tile.rows, tile.keys), strict=True)
        )
        outputs = [accesses[t.name, "tile"] for t in lowered.outputs]
        stored = {a.tensor: boxes(a, dims, tile.rows, keys, BOX_ROWS) for a in outputs if is_stored(a, dims)}
        cost = estimate_wgmma(graph, found, mask, target, tile, 0, registers)
        general = plan_of(graph, found, mask, target, layout, tile, atom, accesses, (query, key), 0, cost)
        apart = made_of_exponentials(general)
        scale, tested, free = scaled_bodies(general) if apart else (1.0, general.tested, general.free)
        maps = (query_boxes, key_boxes, *stored.values())
        moved = {b.access for b in maps}
        kept = frozenset(a.tensor for a in accesses.values() if a not in moved)
        need_one_way([b.access.tensor for b in maps], kept)
        own = {
            "rule": "weights_wgmma",
            "template": "weights_wgmma.cu.j2",
            "regime": regime(tile, general.ends, bool(stored)),
            "params": tuple(mapped(params_by_rows(lowered, dims, accesses), maps, dims, kept)),
            "tested": tested,
            "free": free,
        }
        plan = WgmmaWeightsPlan(
            **{**vars(general), **own},
            scale=scale,
            query_boxes=query_boxes,
            key_boxes=key_boxes,
            stored=stored,
        )
        room = plan.barriers_at + barrier_bytes(tile)
        if room + plan.static_shared_bytes <= target.shared_bytes:
            return replace(plan, shared_bytes=room, cost=replace(cost, in_flight_bytes=room))
    return None


def made_of_exponentials(plan: WeightsPlan) -> bool:
    """Do results ask for exponentials alone, and not for scores or for what logits are made of?"""
    results = plan.results
    asked = {name for s in (*results.body, *results.free_body) for name in s.uses} | {s.value for s in results.stores}
    made = {s.name for body in (plan.tested, plan.free) for s in body.body} | {plan.tested.given}
    return not asked & made


def registers_of(keys: int, ahead: list[Access]) -> int:
    """Registers of a consumer's thread: scores, and what is read ahead of operands that have an element for each."""
    scores = keys // 2
    return USUAL_REGISTERS + scores + sum(scores * a.dtype.bytes // 4 for a in ahead)


def barrier_bytes(tile: AttentionTile) -> int:
    """One mbarrier for the queries, one for zeros, and a full and an empty one for each stage."""
    return 8 * (2 + 2 * tile.stages)


def regime(tile: AttentionTile, ends: Ends, stored: bool) -> str:
    consumers = tile.warps // 4
    who = f"{consumers} consumer warpgroups of 64 queries each" if consumers > 1 else "one consumer of 64 queries"
    parts = [f"{who}, tiles of {tile.keys} keys twice, a producer {tile.stages} tiles ahead"]
    if ends.skips:
        parts.append(f"where a mask leaves nothing of a tile, no score is made{', and zeros are stored' * stored}")
    if ends.settles:
        parts.append("conditions are tested in tiles that an end cuts")
    return "; ".join(parts)
