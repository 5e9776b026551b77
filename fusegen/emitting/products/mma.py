"""A GemmPlan in the words of one dialect: what templates/gemm.cu.j2 prints, in the order it prints it.

Nothing is decided here. Whatever could be wrong is a field of the plan; this turns fields into C++.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusegen.emitting.dialect import choice
from fusegen.emitting.products.mma_codes import CodesSpeller
from fusegen.emitting.products.mma_factors import FactorSpeller
from fusegen.emitting.products.mma_sizes import sizes
from fusegen.emitting.products.mma_sums import SumSpeller
from fusegen.emitting.products.words import OF_GROUP
from fusegen.planner.products.mma_operands import K_BEGIN, SEGMENT

COPIES = ("copy_chunk", "copy_evict_first")
PERIOD = "constexpr int period = Chunks < 8 ? Chunks : 8;"
ALTERNATE = "row ^= row / 8 % 2;"
BY_PERIOD = "const int xor_mask = row / (8 / period) % period;"
WIDE_APART = "what lanes read of 64 banks at once lies in different ones, and what 8 of them write"
SWIZZLES: Mapping[str, Mapping[str, Any]] = {
    "plain": {"apart": "8 rows of one column of chunks lie in different banks", "lines": [PERIOD, BY_PERIOD]},
    "turned": {
        "apart": "8 rows of one column of chunks lie in different banks, neighbours and every other one",
        "lines": [PERIOD, ALTERNATE, BY_PERIOD],
    },
    "by sixteens": {
        "apart": WIDE_APART,
        "lines": [ALTERNATE, "const int xor_mask = row / 2 % 4 ^ row / 16 % 2;"],
    },
    "by pairs": {"apart": WIDE_APART, "lines": ["const int xor_mask = row / 2 % 8 ^ row % 2 * (Chunks - 4);"]},
}


# functions of the prelude that take or return vectors
OF_VECTORS = {"load", "load_each", "load_chunk", "load_beside", "load_strided", "store", "store_each", "gathered"}


class GemmSpeller(FactorSpeller, SumSpeller, CodesSpeller):
    """The words of one plan in one dialect; `context()` is what the template sees."""

    def tile_lines(self) -> list[str]:
        """Where the block's tile lies; of one that stays, where any tile does."""
        plan, tile = self.plan, self.tile
        *others, rows = plan.row_dims
        across = plan.tiles_across
        lines = [f"const long long rows = {rows.extent};"] if rows.extent != "rows" else []
        if plan.segments:
            lines += self.segment_tiles()
        elif tile.persistent or others or (tile.group > 1 and across > 1):
            lines.append("const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);")
        if across > 1 and (tile.persistent or others):
            lines.append(f"const unsigned tiles = tiles_down * tiles_across;{'  // of one product' if others else ''}")
        if tile.persistent and plan.segments:
            lines.append(f"if (blockIdx.x >= {self.tiles}) return;  // the groups need fewer tiles")
        if not tile.persistent:
            number = "block" if plan.joined else "blockIdx.x"  # of one step among several: among its own
            block = f"{number} / {tile.cluster}" if tile.cluster > 1 else number
            if plan.dies > 1:
                self.functions.add("by_die")
                block = "by_die(blockIdx.x, gridDim.x)"
                if others:
                    lines.append(f"const unsigned block = {block};")
                    block = "block"
            return [
                *lines,
                *self.place_in_grid(block),
                *self.fewer_tiles(),
                *([self.rows_here("const int ")] if self.short or any(not f.rows_at for f in self.plan.left) else []),
                *self.output_group_place(),
                *self.inner_segment(),
                *self.sides(),
            ]
        if others:
            each = " * ".join(f"static_cast<unsigned>({dim.extent})" for dim in others)
            lines.append(f"const unsigned tiles_here = {self.tiles} * {each};")
        beside = across > 1
        fields = ["long long row0;", *["int across;"] * beside, *(f"long long {dim.index};" for dim in others)]
        fields += ["long long segment_end;", "int segment;", f"bool {OF_GROUP};"] if plan.segments else []
        names = ["row0", *["across"] * beside, *(dim.index for dim in others)]
        names += ["segment_end", "segment", OF_GROUP] if plan.segments else []
        return [
            *lines,
            f"struct Place {{ {' '.join(fields)} }};",
            f"const auto place_of = [&](unsigned {'number' if others else 'tile'}) {{",
            *(f"  {line}" for line in self.place_in_grid("number" if others else "")),
            f"  return Place{{{', '.join(names)}}};",
            "};",
        ]

    @property
    def tiles(self) -> str:
        """How many one product has."""
        return "tiles" if self.plan.tiles_across > 1 else "tiles_down"

    def place_in_grid(self, block: str) -> list[str]:
        """The first row of a block's tile, how many lie before it in its row of tiles, and whose product's it is. The
        tile's number is `tile`, or made of `block`."""
        *others, _ = self.plan.row_dims
        lines, tile = [], self.tile
        if others:
            for place, dim in enumerate(others):
                inner = " / ".join([f"({block}) / {self.tiles}", *(d.extent for d in reversed(others[place + 1 :]))])
                lines.append(f"const long long {dim.index} = {inner}" + (f" % {dim.extent};" if place else ";"))
            block = f"({block}) % {self.tiles}"
        lines += [f"const unsigned tile = {block};"] if block else []
        where = self.tile_place("unsigned")
        if where.lines:
            lines.append(
                f"// {tile.group} rows of tiles at a time, column by column: blocks that run together share factors in "
                "the L2 cache"
            )
        if self.plan.segments:
            ends = self.pointers[self.plan.segments.ends.tensor]
            lines += [
                *where.lines,
                f"const Segment here = segment_of({ends}, rows, {where.down});",
                "const long long row0 = here.row0, segment_end = here.end;",
                "const int segment = here.number;",
                f"const bool {OF_GROUP} = here.{OF_GROUP};",
            ]
        else:
            lines += [*where.lines, f"const long long row0 = static_cast<long long>({where.down}) * tile_rows;"]
        return [*lines, *[f"const int across = {where.across};"] * (self.plan.tiles_across > 1)]

    def segment_tiles(self) -> list[str]:
        """How many tiles lie one below the other: of a block that stays as many as may be, else as there are."""
        plan, tile = self.plan, self.tile
        assert plan.segments is not None
        if tile.persistent:
            return [f"const unsigned tiles_down = tiles_of({self.pointers[plan.segments.ends.tensor]}, rows);"]
        if tile.group == 1 or plan.tiles_across == 1:
            return []
        return [
            "const long long begun = rows < segments + 1 ? rows : segments + 1;  // each by a tile of its own, at most",
            "const unsigned tiles_down = static_cast<unsigned>(begun + (rows - begun) / tile_rows);",
        ]

    def inner_segment(self) -> list[str]:
        """Which part of K the block's group has, and how many slices that is."""
        segments = self.plan.inner_segments
        if segments is None:
            return []
        slice_k = "tile_k * split_k" if self.tile.split_k > 1 else "tile_k"
        ends = self.pointers[segments.ends.tensor]
        return [
            f"const int number = static_cast<int>({segments.number});",
            f"const InnerSegment summed = inner_segment_of({ends}, {segments.total}, number);",
            f"const int {K_BEGIN} = summed.begin, full_k = summed.end - summed.begin;",
            f"const int steps = (full_k + {slice_k} - 1) / ({slice_k});",
        ]

    def fewer_tiles(self) -> list[str]:
        """What ends a block that has no tile."""
        return ["if (row0 >= rows) return;  // the groups need fewer tiles"] if self.plan.segments else []

    def rows_here(self, declared: str) -> str:
        end = self.rows_end
        return f"{declared}rows_here = {end} - row0 < tile_rows ? static_cast<int>({end} - row0) : tile_rows;"

    def output_group_place(self) -> list[str]:
        """The first column of the block's tile; with several output groups, which one it is."""
        if not self.several:
            one = self.plan.tiles_across == 1
            return ["constexpr int col0 = 0;" if one else "const int col0 = across * tile_cols;"]
        output_groups = self.plan.output_groups
        lines = [f"const int group = {self.span_number()};"]
        first = self.by_output_group([str(s.first_tile) for s in output_groups])
        return [*lines, f"const int col0 = (across - ({first})) * tile_cols;"]

    def sides(self) -> list[str]:
        """What the tile's output group multiplies, where there are several."""
        if not self.several:
            return []
        output_groups, lines = self.plan.output_groups, []
        if self.cols_ragged():
            lines.append(f"const int cols = {self.by_output_group([str(s.cols) for s in output_groups])};")
        for place, own in enumerate(self.owns[len(self.plan.left) :]):
            rights = [s.rights[place] for s in output_groups]
            lines.append(
                f"const {self.element}* const {own.name}_ptr = {self.by_output_group([r.pointer for r in rights])};"
            )
            lines.append(f"const long long {own.name}_stride = {self.by_output_group([r.stride for r in rights])};")
            if own.factor.step:
                steps = self.by_output_group([r.step for r in rights])
                lines.append(f"const long long {own.name}_step = {steps};  // along K: they lie both ways round")
            for dim in range(len(rights[0].batch)):
                strides = self.by_output_group([r.batch[dim][1] for r in rights])
                lines.append(f"const long long {own.name}_batch_{dim} = {strides};")
        return lines

    def aim(self, factors: list[dict[str, Any]]) -> list[str]:
        """Copies begin at the first slice of another tile."""
        starts = [line for f in factors for line in f["starts"]]
        indices = {index for own in self.owns for index, _ in own.factor.batch}
        return [*self.unpacked(indices, made=False), self.rows_here(""), *self.sides(), *starts]

    def unpacked(self, indices: set[str], made: bool) -> list[str]:
        """A tile's place, with the `indices` of its product that are asked for; `made`: to make what comes of it."""
        used = [dim.index for dim in self.plan.row_dims[:-1] if dim.index in indices]
        segment = ["const long long segment_end = at.segment_end;"] if self.plan.segments else []
        segment += ["const int segment = at.segment;"] if SEGMENT in indices else []
        segment += [f"const bool {OF_GROUP} = at.{OF_GROUP};"] if self.plan.segments and made else []
        return [
            "const Place at = place_of(tile);",
            "const long long row0 = at.row0;",
            *segment,
            *["const int across = at.across;"] * (self.plan.tiles_across > 1),
            *self.output_group_place(),
            *(f"const long long {index} = at.{index};" for index in used),
        ]

    @property
    def read_by(self) -> set[str]:
        """The indices by which the epilogue finds what it reads and writes."""
        by_group = any(access.group_axis is not None and not access.right for access in self.plan.accesses)
        return {dim.index for dim in self.plan.row_dims[:-1]} | ({SEGMENT} if by_group else set())

    def by_output_group(self, texts: list[str]) -> str:
        """Each output group's own text, by its number."""
        return choice([f"group == {i}" for i in range(len(texts))], texts)

    # ---- all of it

    def context(self) -> dict[str, Any]:
        plan, tile = self.plan, self.tile
        part = self.number if tile.split_k > 1 else ""
        factors = [self.code_factor(own, part) if own.factor.coding else dict(self.factor(own)) for own in self.owns]
        if plan.coding:
            factors[0] = self.beside_codes(factors[0])
        for found in factors:
            found.setdefault("forward", [f"{found['name']}_from += {found['advance']};"])
            found["prepare"] = self.prepare(found) if found["prepared"] else []
            found["prepared"] = bool(found["prepare"])
        self.number_chunks(factors)
        vectors = self.vectors()
        output_groups = [
            self.output_group(number, output_group) for number, output_group in enumerate(plan.output_groups)
        ]
        sums, statistics = self.sums(), self.statistics(factors[0])
        fragments = [] if plan.coding else self.fragments()
        held = [
            {
                "type": self.vec(f["own"].factor.access.dtype, f["held"]),
                "name": f"{f['name']}_held",
                "dims": f"[{f['passes']}]",
            }
            for f in factors
            if not f["copied"]
        ] + [{"type": v["type"], "name": v["held"], "dims": ""} for v in vectors]
        fetches = bool(held)
        slot = "slot" if plan.tile.persistent else "step % stages"
        slice_at = f"{slot} * slice_bytes"
        copied_to = f"ring_at + {slice_at}"
        if fetches:
            self.functions.update(("load", "load_chunk") if "load_chunk" in self.functions or vectors else ())
            self.functions.update(("load",) if "load_beside" in self.functions else ())
        launch_body = self.statements(plan.launch_body)
        codes = self.codes(sums, self.k_text()) if plan.coding else None
        said = {
            **self.frame(plan),
            "includes": self.includes(),
            "index": "int",
            "segment_rows": "tile_rows",
            "counts_segments": plan.tile.persistent,
            **self.segment_lanes(),
            "asked": self.asked(),
            "row_reduces": [],
            "atom": self.atom(),
            "scales": self.scales(),
            "element": self.element,
            "chunk": plan.chunk,
            "swizzle": SWIZZLES[plan.swizzle],
            "copy_bodies": {name: self.spelling.functions.get(f"{name}_{self.size}", ()) for name in COPIES},
            "thread": self.thread,
            "launch_body": launch_body,
            "k_part": self.k_part(),
            "warp_row": f"warp{f' / {tile.warps_across}' if tile.warps_across > 1 else ''} * warp_rows",
            "warp_col": f"warp{f' % {tile.warps_across}' if tile.warps_down > 1 else ''} * warp_cols",
            "tile_place": self.tile_lines(),
            "needed_when": self.needed_when(statistics),
            "aim": self.aim(factors) if tile.persistent else [],
            "tile_at": self.unpacked(self.read_by, made=True) if tile.persistent else [],
            "all_tiles": "tiles_here" if len(plan.row_dims) > 1 else self.tiles,
            "ring_offset": " + k_group * (stages * slice_elements)" if tile.slice_k > 1 else "",
            "slice_at": slice_at,
            "copied_to": f"own_address({copied_to})" if any(f.evict_first for f in plan.factors) else copied_to,
            "factors": factors,
            "held": held,
            "row_held": self.row_held(factors[0]),
            "copies": self.copies(factors),
            "vectors": vectors,
            "fetches": fetches,
            "fetch_ways": self.fetch_ways(),
            "prepares": plan.prepares,
            "k_at_in": {
                "text": self.k_text(),
                "copied": not plan.even,
                "fetched": not plan.even or bool(vectors),
                "prepared": not plan.even and plan.prologue is not None,
            },
            "fragments": fragments,
            "fragment_functions": self.fragment_functions(fragments),
            "codes": codes,
            "sums": sums,
            "statistics": statistics,
            "inner": plan.slice_steps,
            "barrier": self.barrier,
            "over": self.over(),
            "rows_end": self.rows_end,
            "output_groups": output_groups,
            "sizes": sizes(self),
        }
        return {
            **said,
            "uses": {"vec": self.uses_vec or bool(self.functions & OF_VECTORS), "functions": self.functions},
        }

    def asked(self) -> dict[str, Any]:
        """What the first blocks ask the L2 cache for, and where that is, if they do."""
        plan, across, asked = self.plan, self.plan.tiles_across, self.plan.asked_ahead
        if asked is None:
            return {}
        down, beside = f"blockIdx.x / {across}" if across > 1 else "blockIdx.x", f"blockIdx.x % {across}"
        if asked.down > 1:
            tiles = asked.down * across
            down = f"blockIdx.x / {tiles} * {asked.down} + blockIdx.x % {asked.down}"
            beside = f"blockIdx.x % {tiles} / {asked.down}"
        self.sizes.update(["threads"] * (self.tile.cols > plan.threads))
        group, rights = plan.output_groups[0], [own for own in self.owns if own.factor.mn == "cols"]
        return {
            "extent": plan.row_dims[-1].extent,
            "down": down,
            "col": f"static_cast<int>({beside}) * {self.tile.cols} + n" if across > 1 else "n",
            "within": f"likely_col < {group.cols}" if group.cols % self.tile.cols else "",
            "places": [
                f"{own.factor.pointer} + likely * {own.factor.batch[0][1]} + likely_col * {own.factor.stride}"
                for own in rights
            ],
            "bytes": asked.run * plan.dtype.bytes,
        }

    def needed_when(self, statistics: Sequence[Mapping[str, Any]]) -> str:
        """When there is something to multiply; empty where there always is."""
        if self.plan.inner_segments:
            return "steps > 0"
        return OF_GROUP if self.plan.segments and not statistics else ""

    def copies(self, factors: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What copies a slice: one function, or where the right factors are asked for first, one for them and one for
        the left ones."""
        copied = [f for f in factors if f["copied"]]
        right = [f for f in copied if f["own"].factor.mn == "cols"]
        if not self.plan.slices_ahead or len(right) == len(copied):
            return [{"name": "copy_slice", "factors": copied}]
        left = [f for f in copied if f["own"].factor.mn == "rows"]
        return [{"name": "copy_right", "factors": right}, {"name": "copy_left", "factors": left}]

    def k_part(self) -> str:
        """Which of all the sums of an element this one is: by slice-K group and by block of the cluster; "" where a
        slice-K group or a block is its part of K."""
        return f"rank * {self.tile.slice_k} + k_group" if self.tile.slice_k > 1 and self.tile.cluster > 1 else ""

    def over(self) -> str:
        slice_k = f"the {self.tile.slice_k} slice-K groups" if self.tile.slice_k > 1 else ""
        blocks = f"the {self.tile.cluster} blocks of the cluster" if self.tile.cluster > 1 else ""
        return " of ".join(filter(None, [slice_k, blocks]))

    def includes(self) -> list[str]:
        used = {a.dtype for a in self.plan.accesses} | {self.plan.dtype}
        return self.headers_of(used)
