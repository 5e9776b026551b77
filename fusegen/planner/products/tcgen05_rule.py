"""Products on Blackwell's tensor cores: tensor copies bring both factors as they lie, tcgen05 sums in tensor memory.

What tensor copies can't move, a left factor that is computed, and sums that are promoted or scaled by blocks are the
general rule's, `gemm`: tcgen05 takes a computed factor from tensor memory, which no kernel here fills, and sums that
stay in tensor memory can't be added to others on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fusegen.language.graph import Graph
from fusegen.language.products import Split
from fusegen.planner.matching import NoMatch, NotFor
from fusegen.planner.model import Cost, Layout
from fusegen.planner.products.factors import no_unit
from fusegen.planner.products.output_groups import groups, need_whole_groups, taken_apart
from fusegen.planner.products.tcgen05 import Tcgen05Plan, Tcgen05Tile, tiles_of_few, tiles_of_many
from fusegen.planner.products.tcgen05_cost import estimate
from fusegen.planner.products.wgmma import WgmmaWork
from fusegen.planner.products.wgmma_operands import prepared_matrix
from fusegen.planner.products.wgmma_rule import (
    FEW_ROWS,
    LEAST_COLS,
    WgmmaDraft,
    check,
)
from fusegen.planner.products.wgmma_tiles import LINE_ELEMENTS, WgmmaTile
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target


def tcgen05(graph: Graph, target: Target, layout: Layout) -> Iterator[Tcgen05Plan]:
    """Every tile."""
    if not target.tcgen05:
        raise NotFor(f"{target.arch} has no tcgen05; sm_100a and sm_103a have")
    hoisted, parts = taken_apart(graph)
    first = parts.products[0]
    if not target.atoms_of("thread", first.left.dtype, first.right.dtype):
        raise NoMatch(no_unit(target, "tcgen05", first.left.dtype, first.right.dtype))
    found = groups(hoisted, parts)
    check(hoisted, parts, found, "tcgen05")
    need_plain_left(hoisted, parts)
    draft = Tcgen05Draft.of(graph, hoisted, parts, found, target, layout, "pingpong")
    plans = [plan for tile in draft.tiles() for plan in draft.plans(tile)]
    if not plans:
        raise NoMatch(
            "no tile of 128 rows, and of 32 to 256 columns of all products that are used together, suits the chain and "
            f"the {target.shared_bytes} bytes of shared memory of a block"
        )
    yield from plans  # type: ignore[misc]  # of `made`


def need_plain_left(graph: Graph, parts: Split) -> None:
    """Raises NoMatch for a left factor that is computed, or whose rows are reduced, and for sums that are promoted."""
    product = parts.products[0]
    if parts.lefts[0].operand is None or parts.statistics or prepared_matrix(graph, parts, "tcgen05") is not None:
        raise NoMatch(
            f"the left factor of the product at {product.node.where} is computed, or its rows are reduced; tcgen05 "
            "takes it as it lies"
        )
    if any(p.scales for p in parts.products):
        raise NoMatch(f"the product at {product.node.where} has scales for its blocks; tcgen05 sums all of K alike")
    if any(p.node.promote for p in parts.products):
        raise NoMatch(f"the product at {product.node.where} is promoted; tcgen05 sums all of K in tensor memory")


@dataclass(frozen=True)
class Tcgen05Draft(WgmmaDraft):
    """What all tiles share."""

    rule: ClassVar[str] = "tcgen05"
    made: ClassVar[type[Tcgen05Plan]] = Tcgen05Plan
    tells_places: ClassVar[bool] = False

    @cached_property
    def atom(self) -> Atom:
        (found,) = self.target.atoms_of("thread", self.dtype, self.right_dtype)
        return found

    @cached_property
    def many(self) -> tuple[WgmmaTile, ...]:
        return tiles_of_many(self.atom)

    def tiles(self) -> Iterator[Tcgen05Tile]:
        yield from tiles_of_many(self.atom)
        yield from tiles_of_few(self.atom)

    def suits(self, tile: WgmmaTile) -> bool:
        """Do whole instructions, and boxes that are brought and stored, cover each product's columns? Are tiles few,
        where the tile is for that?"""
        width = tile.cols // self.together
        whole = need_whole_groups(self.groups, self.hoisted)  # columns that a tile has to have
        if tile.cols % self.together or width % LEAST_COLS or (whole and width != whole):
            return False
        if tile not in self.many and (self.rows <= FEW_ROWS or not self.few(tile)):
            return False
        return width // tile.cluster % LINE_ELEMENTS == 0 or all(right.along for right in self.rights.values())

    @property
    def lanes_store(self) -> bool:
        return bool(self.segments and self.together > 1)

    def cost(self, work: WgmmaWork) -> Cost:
        return estimate(work)

    def regime(self, tile: WgmmaTile) -> str:
        width, line = tile.cols // self.together, self.line
        each = f"{tile.rows * tile.cluster}x{width}" + (f" of {self.together} products" if self.together > 1 else "")
        grouped = f"; {self.segments.text}" if self.segments else ""
        if tile.cluster > 1:
            return (
                f"pairs of blocks share tiles of {each}: one thread multiplies for both, into their tensor memory; "
                "each block has half of the rows, and brings half of the right factor's columns; two warpgroups by "
                f"turns take its sums, a producer {tile.stages} slices of {line} ahead; persistent blocks, "
                f"{tile.group} rows of tiles at a time{grouped}"
            )
        return (
            f"one thread multiplies, into tensor memory; two warpgroups by turns take the sums of tiles of {each}, a "
            f"producer {tile.stages} slices of {line} ahead; persistent blocks, {tile.group} rows of tiles at a "
            f"time{grouped}"
        )
