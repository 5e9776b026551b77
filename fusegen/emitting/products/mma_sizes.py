"""The sizes that a GemmPlan's kernel goes by, each with a name."""

from __future__ import annotations

from fusegen.emitting.products.mma_words import GemmWords
from fusegen.planner.products.gemm import SUMS_PADDING_FLOATS


def sizes(words: GemmWords) -> list[str]:
    """Declarations, each of what some part of the kernel asks for."""
    plan, tile = words.plan, words.tile
    return [
        "// a block's tile, the slices of K that it takes one after another, and how many shared memory holds",
        f"constexpr int tile_rows = {tile.rows}, tile_cols = {tile.cols}, tile_k = {tile.k}, stages = {tile.stages};",
        *split_k(words),
        *warps(words),
        *(grid(words) if plan.tiles_across > 1 else []),
        *([f"constexpr int segments = {plan.segments.count};  // groups of rows"] if plan.segments else []),
        *ends(words),
        *scaled(words),
        *slices(words),
        *sums(words),
    ]


def split_k(words: GemmWords) -> list[str]:
    tile, steps = words.tile, f"steps = {words.plan.steps};"
    if words.plan.inner_segments:  # which say how many there are
        return [f"constexpr int split_k = {tile.split_k};  // parts of K"] if tile.split_k > 1 else []
    if tile.split_k == 1:
        return [f"constexpr int {steps}"]
    return [f"constexpr int split_k = {tile.split_k}, {steps}  // parts of K, and slices of each"]


def warps(words: GemmWords) -> list[str]:
    """A warp's part of the tile, and all threads."""
    tile, plan = words.tile, words.plan
    found = [f"warp_rows = {tile.warp_rows}"] if tile.warps_down > 1 else []
    found += [f"warp_cols = {tile.warp_cols}"] if tile.warps_across > 1 or plan.run else []
    lines = [f"constexpr int {', '.join(found)};  // of a tile"] if found else []
    return [*lines, f"constexpr int threads = {plan.threads};"] if "threads" in words.sizes else lines


def grid(words: GemmWords) -> list[str]:
    lines = [f"constexpr int tiles_across = {words.plan.tiles_across};"]
    if words.tile.group > 1:
        lines.append(
            f"constexpr int group = {words.tile.group}, group_tiles = group * tiles_across;"
            "  // rows of tiles that are taken together, and their tiles"
        )
    if words.plan.dies > 1:
        lines.append(f"constexpr int dies = {words.plan.dies};  // each with an L2 cache of its own")
    return lines


def ends(words: GemmWords) -> list[str]:
    """Of columns that fill no tile, and of a K that fills no slice."""
    found = [f"cols = {words.plan.output_groups[0].cols}"] if words.cols_ragged() and not words.several else []
    found += [f"full_k = {words.plan.k}"] if not (words.plan.even or words.plan.inner_segments) else []
    return [f"constexpr int {', '.join(found)};"] if found else []


def scaled(words: GemmWords) -> list[str]:
    coding, blocks = words.plan.coding, words.plan.block_scales
    if blocks is not None:
        return [f"constexpr int scaled_cols = {blocks.block};  // columns that share a scale"]
    if coding is None or "scaled_k" not in words.sizes:
        return []
    return [f"constexpr int scaled_k = {coding.group};  // neighbours along K that share a scale"]


def slices(words: GemmWords) -> list[str]:
    """Where the factors' tiles begin in a slice, and how long it is."""
    plan, tile = words.plan, words.tile
    rights, before, found = words.owns[len(plan.left) :], "tile_rows * tile_k", []
    for own in rights:
        found.append(f"{own.name}_at = {before}")
        line = "tile_k"
        if own.factor.coding:
            line = f"{own.name}_words"
            found.append(f"{line} = tile_k * {own.factor.bits} / 16")
        before = f"{own.name}_at + tile_cols * {line}"
    factors = "factors" if len(rights) > 1 else "factor"
    lines = [
        f"// elements from the start of a slice to the right {factors}, and to its end",
        *(f"constexpr int {declared};" for declared in [*found, f"slice_elements = {before}"]),
    ]
    if plan.atom.kind == "mma":
        lines.append(f"constexpr int slice_bytes = {words.size} * slice_elements;")
    if "at_once" in words.sizes:
        team = "the threads of a slice-K group" if tile.slice_k > 1 else "the threads"
        lines.append(
            f"constexpr int at_once = {plan.slice_k_threads} * {plan.chunk};  // elements that {team} copy at once"
        )
    return lines


def sums(words: GemmWords) -> list[str]:
    """Where sums that go through shared memory lie there, in floats."""
    plan, tile = words.plan, words.tile
    if plan.run:
        return []
    lines = [f"constexpr int band_rows = {tile.band_rows};"] if tile.bands > 1 else []
    lines += [
        "// floats from a row of sums to the next: what a warp writes at once lies in different banks",
        f"constexpr int sums_stride = tile_cols + {SUMS_PADDING_FLOATS};",
    ]
    if tile.slice_k > 1:
        statistics = f" + {plan.statistics} * tile_rows" if plan.statistics else ""
        lines.append(
            f"constexpr int group_floats = {plan.products} * {words.band_rows} * sums_stride{statistics};"
            "  // of a slice-K group's sums" + " and statistics" * bool(statistics)
        )
    return lines
