"""The sizes that a WgmmaPlan's kernel goes by, each with a name."""

from __future__ import annotations

from collections.abc import Iterable

from fusegen.planner.products.parts import BlockScales
from fusegen.planner.products.slice_scales import slice_scales
from fusegen.planner.products.wgmma import SEGMENT_LINES, WgmmaPlan
from fusegen.planner.products.wgmma_codes import CodedTile
from fusegen.planner.products.wgmma_tiles import WgmmaTile


def sizes(plan: WgmmaPlan, used: Iterable[str]) -> list[str]:
    """Declarations; of those in `used`, only where some part of the kernel asks for them."""
    tile, also = plan.tile, set(used)
    left = "tile_rows" if tile.held_rows == tile.rows else str(tile.held_rows)
    right = "own_cols" if tile.pair else "tile_cols"
    if (together := len(plan.output_groups[0].rights)) > 1:
        right = f"{together} * {right}"
    placed = plan.most_steps > 1 or plan.slices_ahead or (plan.prologue and plan.prologue.vectors)
    tile_k = f"tile_k = {tile.slices_a_stage * plan.line}, " if placed else ""  # a single slice begins at 0
    turned = tile if isinstance(tile, CodedTile) else None
    line, of_codes = (str(turned.line_bytes), "  // of codes") if turned else ("line_bytes", "")
    left = f"{turned.slices_a_stage} * tile_rows" if turned else left
    lines = [
        "// a tile, the slices of the depth that are summed one after another, and how many shared memory holds",
        f"constexpr int tile_rows = {tile.rows}, tile_cols = {plan.width}, {tile_k}stages = {tile.stages};",
        *([f"constexpr int steps = {plan.steps // tile.slices_a_stage};"] if plan.counts_slices else []),
        *(cluster(tile) if tile.cluster > 1 else []),
        *([f"constexpr int segments = {plan.segments.count};  // groups of rows"] if plan.segments else []),
        *grid(plan),
        *(scaled(plan.block_scales) if plan.block_scales else []),
        *([f"constexpr int part_cols = {tile.multiplied};  // that are multiplied at once"] if tile.across > 1 else []),
        f"constexpr int warpgroup = {tile.atom.threads};  // threads",
        "// bytes of a line of shared memory, and of slices",
        "constexpr int line_bytes = 128;",
        *([f"constexpr int segment_bytes = {SEGMENT_LINES} * line_bytes;"] if "segment_bytes" in also else []),
        f"constexpr int left_bytes = {left} * line_bytes, right_bytes = {right} * {line};{of_codes}",
        *brought(plan),
    ]
    if "box_bytes" in also:
        lines.append(f"constexpr int box_bytes = {tile.box_rows} * line_bytes;  // that a warp stores at once")
    box = "box_bytes" if "box_bytes" in also else f"{tile.box_rows} * line_bytes"
    return [
        *lines,
        "// bytes from the left factor's slices, which come first, to the right factor's and to what lies behind them",
        *(
            turning(turned)
            if turned
            else ["constexpr int right_at = stages * left_bytes, staging_at = right_at + stages * right_bytes;"]
        ),
        f"constexpr int barriers_at = staging_at + {tile.storing_warps} * {tile.buffers} * {box};",
        *vectors(plan),
        *(scales(plan) if plan.scale_slots else []),
        *([f"constexpr int tile_places_at = {plan.places_at};  // behind all else"] if plan.place_bytes else []),
    ]


def turning(tile: CodedTile) -> list[str]:
    """Where sums turn round."""
    ring = "right_at + stages * right_bytes"
    where = f"turned_at = {ring}" if tile.turned_at else "turned_at = 0"
    behind = f"turned_at + {tile.turned_bytes}" if tile.turned_at else ring
    return [
        f"constexpr int right_at = stages * left_bytes, {where}, staging_at = {behind};",
        f"constexpr int turned_cols = {tile.turned_cols};  // floats from one row of sums that turn round to the next",
    ]


def cluster(tile: WgmmaTile) -> list[str]:
    blocks, to_all = tile.cluster, "" if tile.pair else " to all"
    rows = "of a pair's tile" if tile.pair else "of the tiles of a cluster, one below the other"
    return [
        f"constexpr int cluster_rows = {blocks} * tile_rows;  // {rows}",
        f"constexpr int own_cols = tile_cols / {blocks};  // that each of its blocks brings{to_all}",
    ]


def grid(plan: WgmmaPlan) -> list[str]:
    across, group = plan.tiles_across, plan.tile.group
    if across == 1:
        return []
    return [
        f"constexpr int tiles_across = {across};",
        f"constexpr int group = {group}, group_tiles = group * tiles_across;"
        "  // rows of tiles that are taken together, and their tiles",
    ]


def scales(plan: WgmmaPlan) -> list[str]:
    """Where the scales of slices lie."""
    tile = plan.tile
    rows = "tile_rows" if tile.held_rows == tile.rows else str(tile.held_rows)
    cols = slice_scales(tile.held_rows, tile.cols) - tile.held_rows
    return [
        f"constexpr int scales_at = barriers_at + {tile.barriers} * 8;",
        f"constexpr int slice_scales = {rows} + {cols};  // of a slice's rows, and of its columns",
    ]


def scaled(blocks: BlockScales) -> list[str]:
    return [f"constexpr int scaled_cols = {blocks.block};  // columns that share a scale"]


def brought(plan: WgmmaPlan) -> list[str]:
    """What tensor copies bring of a slice, which may have fewer rows of the left factor than there is room for."""
    if plan.gathers:
        return ["constexpr int slice_bytes = right_bytes;  // that tensor copies bring"]
    if plan.left_rows == plan.tile.held_rows or plan.coding:
        return ["constexpr int slice_bytes = left_bytes + right_bytes;"]
    return [f"constexpr int slice_bytes = {plan.left_rows} * line_bytes + right_bytes;"]


def vectors(plan: WgmmaPlan) -> list[str]:
    """Where slices of vectors along K lie, and the statistics of blocks that share a tile."""
    lines, before = [], f"barriers_at + {plan.tile.barriers} * 8"
    for each in plan.prologue.vectors if plan.prologue else ():
        name = f"{each.access.name}_slices_at"
        lines.append(f"constexpr int {name} = {before};")
        before = f"{name} + stages * tile_k * {each.access.dtype.bytes}"
    if plan.tile.split_k > 1 and plan.prologue and plan.prologue.reductions:
        lines.append(f"constexpr int statistics_at = {before};")
    return lines
