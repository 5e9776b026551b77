"""How many blocks a launch has, as numbers: what `Plan.blocks` evaluates, and what an exported launcher does in C."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class BlockCount:
    """Blocks of a launch by the sizes of its dimensions of rows.

    A tile has `rows` rows of the last dimension, or where they are `merged` of all dimensions taken as one; dimensions
    that are `reduced`, by their place, don't count. There are `across` tiles for the same rows, and `blocks` blocks for
    each tile. `at_once`: no more tiles than these have blocks at a time, which take the others in turn; 0: each tile
    has its own. Where turns are `even`, as few are at work as need no more rounds. `groups`: each of so many groups of
    rows, and the rows of none, begin with a tile of their own; so many tiles as these may need, whatever their rows.
    """

    rows: int = 1
    merged: bool = False
    reduced: tuple[int, ...] = ()
    across: int = 1
    blocks: int = 1
    at_once: int = 0
    even: bool = False
    groups: int = 0

    def tiles(self, *extents: int) -> int:
        """Of the whole launch."""
        counted = [extent for place, extent in enumerate(extents) if place not in self.reduced]
        *others, last = [math.prod(counted)] if self.merged else counted or [1]
        return math.prod(others) * self.tiles_down(last) * self.across

    def tiles_down(self, rows: int) -> int:
        """Of so many rows of the last dimension."""
        begun = min(self.groups + 1, rows) if self.groups else 0
        return begun + (rows - begun) // self.rows if begun else -(-rows // self.rows)

    def of(self, *extents: int) -> int:
        """Blocks of the whole launch."""
        tiles = self.tiles(*extents)
        if self.at_once and self.even:
            tiles = -(-tiles // max(1, -(-tiles // self.at_once)))
        elif self.at_once:
            tiles = min(tiles, self.at_once)
        return tiles * self.blocks

    def held(self, resident: int) -> BlockCount:
        """The same on a GPU that holds so many blocks at once."""
        return replace(self, at_once=max(1, resident // self.blocks))
