"""What a kernel by wgmma copies, and where to, in the words of CUDA and PTX: tiles, boxes, places of the ring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.dialect import ZEROS, all_of, choice
from fusegen.emitting.loops import each_line
from fusegen.emitting.products.words import OF_GROUP, ProductWords
from fusegen.planner.model import Access, Load
from fusegen.planner.products.mma_operands import K_BEGIN, SEGMENT
from fusegen.planner.products.parts import Operand, OutputGroup
from fusegen.planner.products.wgmma import PIECE_BYTES, SEGMENT_LINES, WgmmaPlan
from fusegen.planner.products.wgmma_codes import CodedTile
from fusegen.planner.products.wgmma_tiles import LINE_ELEMENTS
from fusegen.planner.tile import LINE_BYTES


class CopySpeller(ProductWords):
    """The words of one plan's copies."""

    own_group, has_group = f"at.{SEGMENT}", f"at.{OF_GROUP}"

    def __init__(self, plan: WgmmaPlan) -> None:
        super().__init__(plan)
        self.plan = plan
        self.tile = plan.tile
        self.moved: set[tuple[str, int]] = set()  # functions that move boxes, and of how many axes

    # ---- small texts

    def size(self, name: str) -> str:
        """A size's name; notes that the kernel asks for it."""
        self.sizes.add(name)
        return name

    def line_of(self, nbytes: int) -> str:
        """A line of a box, as wide as one of shared memory or a part of it."""
        return "line_bytes" if nbytes == LINE_BYTES else str(nbytes)

    @property
    def band(self) -> str:
        """Rows of all tiles of a cluster."""
        return "cluster_rows" if self.tile.cluster > 1 else "tile_rows"

    def pair(self, access: Access) -> str:
        return self.vec(access.dtype, 2)

    def index(self, dim: int, row: str = "row") -> str:
        return row if dim == len(self.dims) - 1 else "batch"

    # ---- tiles and tensor copies

    def place(self) -> list[str]:
        """From a tile's number to its first row and column."""
        tile, lines = self.tile, []
        if self.plan.batched:
            lines += ["at.batch = tile / tiles_here;", "tile %= tiles_here;"]
        place = self.tile_place("int")
        down = place.down if self.plan.tiles_across == 1 else f"({place.down})"
        if self.plan.segments:
            ends, known = "ends, " * self.reads_ends, ", known" * self.plan.keeps_groups
            first = [
                f"const Segment here = segment_of({ends}rows, {place.down}{known});",
                "at.row0 = static_cast<int>(here.row0);",
                "at.segment_end = static_cast<int>(here.end);",
                "at.segment = here.number;",
                f"at.{OF_GROUP} = here.{OF_GROUP};",
            ]
        else:
            first = [f"at.row0 = {down} * {self.band};"]
        lines += [*place.lines, *first, *self.column(place.across)]
        if tile.cluster > 1:
            lines.append("at.row0 += __clusterRelativeBlockRank() * tile_rows;")
        return [*lines, *self.inner_segment()]

    @property
    def reads_ends(self) -> bool:
        """Is a tile's group found by a look at where groups end? A lane of one group keeps that."""
        return not self.plan.keeps_groups or self.plan.groups_a_lane > 1

    def inner_segment(self) -> list[str]:
        """Which part of K the tile's group has, and how many slices that is. Their compiler is told that a warp's lanes
        have one depth: it makes wgmma's instructions wait for each other where lanes might part."""
        if (found := self.plan.inner_segments) is None:
            return []
        return [
            f"const InnerSegment summed = inner_segment_of(ends, {found.total}, at.batch);",
            f"at.{K_BEGIN} = summed.begin;",
            f"at.full_k = {self.spelling.shuffle.format('summed.end - summed.begin', 0, self.plan.target.warp)};",
            "at.steps = (at.full_k + tile_k - 1) / tile_k;",
        ]

    def told(self) -> tuple[str, str]:
        """What a tile's place is found by beside its number, as parameters and as arguments."""
        plan = self.plan
        told = {"tiles_down": "int"} if plan.tiles_across > 1 else {}
        told |= {"tiles_here": "int"} if plan.batched else {}
        parameters = [f", {ctype} {name}" for name, ctype in told.items()]
        arguments = [f", {name}" for name in told]
        if plan.segments:
            ends = f", {self.pointers[plan.segments.ends.tensor]}" * self.reads_ends
            known = f", {'' if self.reads_ends else 'const '}Known& known" * plan.keeps_groups
            parameters.append(f"{', const int* ends' * self.reads_ends}, long long rows{known}")
            arguments.append(f"{ends}, rows{', known' * plan.keeps_groups}")
        if inner := plan.inner_segments:
            parameters.append(f", const int* ends, long long {inner.total}")
            arguments.append(f", {self.pointers[inner.ends.tensor]}, {inner.total}")
        return "".join(parameters), "".join(arguments)

    def column(self, across: str) -> list[str]:
        """The first column of a tile; with several output groups, of the one that it belongs to."""
        output_groups = self.plan.output_groups
        if self.plan.tiles_across == 1:
            return ["at.col0 = 0;"]
        if not self.plan.several:
            return [f"at.col0 = {across} * tile_cols;"]
        first = choice(
            [self.in_output_group(i) for i in range(len(output_groups))], [str(s.first_tile) for s in output_groups]
        )
        return [
            f"const int across = {across};",
            f"at.group = {self.span_number()};",
            f"at.col0 = (across - ({first})) * tile_cols;",
        ]

    def in_output_group(self, number: int) -> str:
        """Is the tile one of that output group's? Empty where there is but one."""
        return f"at.group == {number}" if self.plan.several else ""

    def left_copy(self) -> Mapping[str, Any]:
        """The box of one slice, its place in shared memory and its coordinates, innermost first."""
        return self.copy(self.plan.left[0], "at.row0", self.tile.held_rows, "left", "", cluster=1)

    def right_copies(self, output_group: OutputGroup) -> list[Mapping[str, Any]]:
        """The same of each product's right factor."""
        own = "own_cols" if self.tile.pair else "tile_cols"
        offsets = [
            " + " + f"{place} * " * (place > 1) + f"{own} * line_bytes" for place in range(len(output_group.rights))
        ]
        offsets[0] = ""
        return [
            self.copy(right, "at.col0", self.plan.width, "right", offset, self.tile.cluster)
            for right, offset in zip(output_group.rights, offsets, strict=True)
        ]

    def copy(self, operand: Operand, mn: str, extent: int, to: str, offset: str, cluster: int) -> Mapping[str, Any]:
        """`extent` rows or columns from `mn` on. Of several blocks each brings its part to all of them, and in a pair
        to itself."""
        share = extent // cluster
        lines = 1 if operand.along else share // SEGMENT_LINES
        start = f"{to}{offset}"
        to_all = cluster > 1 and not self.tile.pair
        if to_all:
            start += " + rank * (own_cols * line_bytes)"
        if cluster > 1:
            mn += " + rank * own_cols"
        if lines > 1:
            start += f" + i * {self.size('segment_bytes')}"
            mn += f" + i * {SEGMENT_LINES}"
        k = f"{self.step} * tile_k"
        if self.plan.inner_segments:
            k = f"at.{K_BEGIN} + {k}"
        if operand.coding:
            assert isinstance(self.tile, CodedTile)
            line = str(self.tile.line_bytes)
            start, k = f"right{offset.replace('line_bytes', line)}", f"{self.step} * {line}"
        coordinates = [k, mn] if operand.along else [mn, k]
        if self.plan.moves_with_batch(operand.access):
            coordinates.append("at.batch")
        if operand.access.group_axis is not None:
            coordinates.append("at.segment")
        name = "copy_box_to_all" if to_all else "copy_box"
        self.moved.add((name, len(coordinates)))
        return {
            "call": f"{name}({start} + stage * {to}_bytes, {operand.name}_map, arrived,",
            "boxes": lines,
            "at": ", ".join(coordinates),
        }

    def expects(self) -> Mapping[str, str]:
        """How the bytes of a slice are told to the mbarrier that counts them, and where some may be under way: in a
        pair the first block tells its own of both."""
        call = "expect_bytes(arrived, 2 * slice_bytes);  // of both blocks" if self.tile.pair else ""
        call = call or "expect_bytes(arrived, slice_bytes);"
        first = "rank == 0" * self.tile.pair
        return {"all": f"if ({first}) {call}" if first else call, "rest": f"if ({all_of(first, '!ahead')}) {call}"}

    # ---- rows of the left factor that an index names

    def rows_found(self) -> Mapping[str, Any] | None:
        """How the producer's threads find the rows that they copy, what of the index is read for the tile that comes
        next, and where in shared memory a thread's 16 bytes of a line lie; None where tensor copies bring all."""
        operand, plan = self.plan.left[0], self.plan
        if (rows_at := operand.rows_at) is None:
            return None
        access, name, passes = operand.access, operand.name, plan.row_passes
        assert access.gathered is not None
        index, elements = self.argument(rows_at.index), PIECE_BYTES // access.dtype.bytes
        row = f"m{f' + v * {plan.piece_rows}' * (passes > 1)}"
        inside = f"const bool inside = {self.inside_row.replace('row', f'{name}_row', 1)};"
        asked, found = [f"const int {name}_row = ahead.row0 + {row};"], [f"const int {name}_row = at.row0 + {row};"]
        asked.append(inside.replace("at.", "ahead."))
        found.append(inside)
        for load in rows_at.loads:
            own = f"{load.access.name}_ahead[v]"
            asked.append(f"if (inside) {own} = *({self.at(load.access, row=f'{name}_row')});")
            read = self.to_value(load.access.dtype, own)
            found.append(self.define(load.value, load.dtype, f"inside ? {read} : {ZEROS[load.dtype]}"))
        found += self.statements(rows_at.body)
        found.append(f"{name}_found[v] = inside && {index} < {rows_at.count} ? {index} : -1;")
        there, first = f"{name}_found[v] >= 0", f"{self.step} * tile_k + k" if plan.steps > 1 else "k"
        from_row = f"{self.pointers[access.tensor]} + ({there} ? {name}_found[v] : 0) * {access.gathered.stride}"
        test = all_of(there, f"k_at < {plan.k}" if plan.padded else "")
        to = f"to + stage * left_bytes{f' + v * ({plan.piece_rows} * line_bytes)' * (passes > 1)}"
        return {
            "declared": [
                *(f"{self.ctype(load.access.dtype)} {load.access.name}_ahead[{passes}];" for load in rows_at.loads),
                f"int {name}_found[{passes}];  // rows of {name} that the thread copies a part of; zeros below 0",
            ],
            "asked": each_line(asked, "v", passes),
            "found": each_line(found, "v", passes),
            "k_at": f"const int k_at = {first};",
            "copies": each_line([f"copy_row({to}, {from_row} + k_at, {test} ? {PIECE_BYTES} : 0);"], "v", passes),
            "m": f"threadIdx.x / {plan.piece_lanes}",
            "k": f"threadIdx.x % {plan.piece_lanes} * {elements}",
            "to": f"left + m * line_bytes + ((threadIdx.x % {plan.piece_lanes} ^ m % {plan.piece_lanes}) << 4)",
            "first": "step == 0 && " if plan.steps > 1 else "",
        }

    # ---- blocks that share a tile

    @property
    def first_tile(self) -> str:
        blocks = self.tile.blocks
        return f"blockIdx.x / {blocks}" if blocks > 1 else "blockIdx.x"

    @property
    def step(self) -> str:
        """The number of a slice along all of K."""
        return "(rank * steps + step)" if self.tile.split_k > 1 else "step"

    def steps(self) -> Mapping[str, str]:
        """How many slices a tile has, how many of them whole, and how many one that the other consumer multiplies."""
        if self.plan.counts_slices:
            return dict.fromkeys(("own", "whole", "passed"), "steps")
        passed = f"place_of(tile{self.told()[1]}).steps"
        return {"own": "at.steps", "whole": "at.full_k / tile_k", "passed": passed}

    def rest(self) -> Mapping[str, Any] | None:
        """How consumers put zeros in place of what a group's last slice brings from behind the group: a line of each
        segment has a number of K, and as many threads as it has pieces."""
        plan, tile = self.plan, self.tile
        if plan.inner_segments is None:
            return None
        self.size("segment_bytes")
        pingpong, threads = tile.schedule == "pingpong", plan.clearing_threads
        lanes = LINE_BYTES // PIECE_BYTES
        return {
            "thread": f"threadIdx.x % {threads}" if pingpong else "(threadIdx.x - warpgroup)",
            "lanes": lanes,
            "left": tile.held_rows // SEGMENT_LINES,
            "right": tile.cols // SEGMENT_LINES,
            "barrier": f'asm volatile("bar.sync %0, {threads};" :: "r"(1 + own) : "memory");'
            if pingpong
            else f'asm volatile("bar.sync 1, {threads};" ::: "memory");',
        }

    def under_way(self) -> str:
        """Was this slice of the right factors asked for before any other kernel's results were waited for?"""
        tests = [f"tile == {self.first_tile}"] if self.tile.split_k == 1 else []
        tests += [f"step < {self.plan.slices_ahead}"] if self.plan.steps > 1 else []
        return all_of(*tests) or "true"

    @property
    def col0(self) -> str:
        """The first column that is finished here."""
        return "col0" if self.tile.split_k > 1 else "at.col0"

    # ---- tiles of fewer rows than there are sums

    @property
    def inside(self) -> str:
        """Has the warp rows of the tile? Empty where all have."""
        if self.tile.rows == self.tile.held_rows:
            return ""
        return f"own * {self.tile.atom.rows} + warp * {self.tile.box_rows} < {self.tile.rows}"

    @property
    def inside_row(self) -> str:
        """Is it a row of the tile's, and not of the next group's or beyond all?"""
        return "row < at.segment_end" if self.plan.segments else "row < rows"

    def inside_col(self, output_group: OutputGroup) -> str:
        return f"col < {output_group.cols}" if output_group.cols % self.plan.width else ""

    def empty(self) -> Mapping[str, int] | None:
        """What stays empty in each slice of the left factor, in units of 16 bytes."""
        plan, tile = self.plan, self.tile
        if plan.left_rows == tile.held_rows or plan.coding:
            return None
        words = LINE_BYTES // 16
        rows = tile.held_rows - plan.left_rows
        return {"words": tile.stages * rows * words, "each": rows * words, "slice": tile.left_bytes // 16,
                "first": plan.left_rows * words}  # fmt: skip

    # ---- operands of the epilogue that come through the ring

    def places(self) -> list[Mapping[str, Any]]:
        """What is brought behind a tile's slices, place by place: two boxes of an operand, where the left factor's
        slice would be and where the right one's would."""
        plan, tile = self.plan, self.tile
        found: list[Mapping[str, Any]] = []
        start = f"at.col0 + rank * {plan.finished}" if tile.split_k > 1 else "at.col0"
        for first in range(0, plan.chunks, 2):
            for load in plan.output_groups[0].brought:
                copies = []
                for chunk in range(first, min(first + 2, plan.chunks)):
                    col = start + (f" + {f'{chunk} * ' * (chunk > 1)}{plan.box_cols}" if chunk else "")
                    coordinates = [col, "at.row0", *(["at.batch"] if plan.moves_with_batch(load.access) else [])]
                    self.moved.add(("copy_box", len(coordinates)))
                    to = "right + stage * right_bytes" if chunk % 2 else "left + stage * left_bytes"
                    copies.append(
                        {"name": "copy_box", "to": to, "map": f"{load.access.name}_map", "at": ", ".join(coordinates)}
                    )
                nbytes = f"{len(copies)} * tile_rows * {self.line_of(plan.box_cols * load.access.dtype.bytes)}"
                found.append({"what": f"boxes of {load.access.name}", "bytes": nbytes, "copies": copies})
        return found

    def brought(self, load: Load) -> Mapping[str, str]:
        """How a thread finds its pairs in the boxes."""
        plan, tile, name = self.plan, self.tile, load.access.name
        line, lines = self.line_of(plan.box_cols * load.access.dtype.bytes), LINE_ELEMENTS // plan.box_cols
        place = f"{name}_stage * left_bytes"
        if plan.chunks > 1:
            place = f"(chunk % 2 == 0 ? {place} : right_at + {name}_stage * right_bytes)"
        own = f"own * {tile.group_rows} + " if tile.schedule == "cooperative" else ""
        part = f"i * {tile.part_rows} + " if tile.parts > 1 else ""
        self.functions.add("load")
        pair = f"{name}_box + r8 * (8 * {line}) + ((n8 ^ lane / {4 * lines}) << 4)"
        first = ["i == 0"] * (tile.parts > 1) + ["chunk % 2 == 0"] * (plan.chunks > 1)
        last = [f"i == {tile.parts - 1}"] * (tile.parts > 1) + [
            f"chunk % 2 == 1 || chunk == {plan.chunks - 1}" if plan.chunks % 2 else "chunk % 2 == 1"
        ] * (plan.chunks > 1)
        found = f"load<2>(reinterpret_cast<const {self.ctype(load.access.dtype)}*>({pair}))"
        return {
            "type": self.pair(load.access),
            "name": f"{name}_vec",
            "stage": f"{name}_stage",
            "box": f"{name}_box",
            "place": f"shared + {place}",
            "at": f"({own}{part}warp * {tile.box_rows} + {tile.atom.fragment.row_text()}) * {line} + lane % 4 * 4",
            "call": f"inside ? {found} : {self.pair(load.access)}{{}}" if self.inside else found,
            "first": all_of(*first),
            "gives_back": all_of(*last, self.releasing()),
            "release": self.release(f"{name}_stage"),
        }

    def releasing(self) -> str:
        """Which lanes of a warp give a place back: one for each block that writes there."""
        return f"lane < {self.tile.cluster}" if self.tile.cluster > 1 else "lane == 0"

    def release(self, stage: str) -> str:
        """Gives a place of the ring back, to all blocks that write there."""
        return f"arrive_in(empty + 8 * {stage}, lane)" if self.tile.cluster > 1 else f"arrive_at(empty + 8 * {stage})"
