"""A WgmmaPlan's parts in the words of CUDA and PTX: what templates/wgmma.cu.j2 prints, in the order it prints it.

Nothing is decided here. Whatever could be wrong is a field of the plan; this turns fields into C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fusegen.emitting.body import Element, element_lines, where_found
from fusegen.emitting.dialect import VALUE_TYPES, ZEROS, all_of
from fusegen.emitting.hopper import box_functions, constraint_of, wgmma
from fusegen.emitting.products.reduced import asked, kept, part_words, taken, updated
from fusegen.emitting.products.wgmma_sizes import sizes
from fusegen.emitting.products.wgmma_stores import PAIR_TYPES, PAIRS, StoreSpeller
from fusegen.emitting.products.words import OF_GROUP
from fusegen.language.types import DType, bf16, f16
from fusegen.planner.model import Body, Load, Reduction, Store, counts, used_by
from fusegen.planner.parts import BOXED
from fusegen.planner.products.in_step import MOST_LOOKS
from fusegen.planner.products.parts import Operand, OutputGroup
from fusegen.planner.products.slice_scales import WARPS as SCALE_WARPS
from fusegen.planner.products.wgmma import PRODUCERS, SEGMENT_BYTES
from fusegen.planner.products.wgmma_tiles import LINE_ELEMENTS

# The fields of a matrix descriptor beside its address (PTX ISA, "Matrix Descriptor Format"): bits 62-63 are the
# swizzle, 32-45 and 16-29 distances in units of 16 bytes.
SWIZZLE_128 = ("swizzle_128", "1ull << 62", "pieces of 16 bytes are XOR-swizzled by their line's number")
EIGHT_LINES = ("eight_lines", "1024ull / 16 << 32", "from 8 lines to the next 8")
SEGMENTS = ("segments", f"{SEGMENT_BYTES}ull / 16 << 16", "from 64 elements of a line to the next 64")
ELEMENTS: Mapping[DType, str] = {  # element j of the pair in `word`; of bf16, the upper one is a float but for a mask
    f16: "__half2float(reinterpret_cast<const __half*>(&word)[j])",
    bf16: "__uint_as_float(j == 0 ? word << 16 : word & 0xffff0000u)",
}


class WgmmaSpeller(StoreSpeller):
    """The words of one plan; `context()` is what the template sees."""

    chooses_sums: ClassVar[bool] = False  # is each one of rows of no group left out by itself?

    # ---- factors in shared memory

    def factor(self, operand: Operand, mn: str) -> Mapping[str, Any]:
        """What descriptors of its slices are made of, in units of 16 bytes."""
        return {
            "descriptor": self.descriptor(operand),
            "advance": self.advance(operand),
            "part": f"({self.size('segment_bytes')} / 16)" if self.tile.parts > 1 else "0",
            "stage": f"({mn}_bytes / 16)",
        }

    @property
    def own_rows(self) -> str:
        """Bytes to a group's rows in a slice of the left factor."""
        if self.tile.schedule == "pingpong":
            return ""
        return f" + own * {f'{self.tile.parts} * ' * (self.tile.parts > 1)}{self.size('segment_bytes')}"

    def descriptor(self, operand: Operand) -> str:
        return " | ".join(name for name, *_ in self.fields(operand))

    def fields(self, *operands: Operand) -> list[tuple[str, str, str]]:
        """Those that the descriptors of these are made of."""
        return [SWIZZLE_128, EIGHT_LINES, *([] if all(o.along for o in operands) else [SEGMENTS])]

    def advance(self, operand: Operand) -> str:
        """16-byte units from one instruction's part of K to the next: along lines, or from 16 lines to the next."""
        k = self.tile.atom.k
        return str(k * self.plan.dtype.bytes // 16) if operand.along else f"({k} * line_bytes / 16)"

    def ways(self) -> list[Mapping[str, Any]]:
        """How right factors lie: along K, across it, or those of some output groups one way and of others the other.

        Each way has an instruction and a main loop of its own.
        """
        plan = self.plan
        found: dict[bool, list[int]] = {}
        for number, output_group in enumerate(plan.output_groups):
            found.setdefault(output_group.rights[0].along, []).append(number)
        several = len(found) > 1
        return [
            {
                "test": " || ".join(map(self.in_output_group, output_groups)) if several else "",
                "name": "_across" if several and not along else "",
                "transposed": "".join(f", {int(not a)}" for a in lies) if plan.dtype.bytes == 2 else "",
                **self.factor(plan.output_groups[output_groups[0]].rights[0], "right"),
            }
            for along, output_groups in found.items()
            for lies in [(along,) if plan.prologue else (plan.left[0].along, along)]
        ]

    def multiplies(self) -> list[Mapping[str, Any]]:
        """A function of one wgmma for each way that right factors lie."""
        atom, cols, prepared = self.tile.atom, self.tile.multiplied, self.plan.prologue is not None
        what = (
            f"sums of {atom.rows} x {cols} elements: the product of two matrices, {atom.k} along K, added to what they"
        )
        return [
            wgmma(
                f"multiply_add{way['name']}",
                f"{what} were or put in its place{'; the right one lies across the depth' if way['name'] else ''}",
                atom,
                cols,
                way["transposed"],
                registers=prepared,
            )
            for way in self.ways()
        ]

    def tensor_memory(self) -> Mapping[str, Any] | None:
        """How sums get from tensor memory to registers; None where they are in registers."""
        return None

    # ---- blocks that share a tile

    @property
    def sums(self) -> str:
        """Where whole sums of a part are."""
        return "added[i]" if self.tile.split_k > 1 else "sums[i]"

    def split_k(self) -> Mapping[str, Any]:
        """How sums come to the block that finishes their columns: vectors of 4 of one thread, a warp's side by side."""
        plan, tile, split_k = self.plan, self.tile, self.tile.split_k
        if split_k == 1:
            return {}
        vectors = tile.sums // split_k // 4
        products = plan.products
        each = vectors // products  # of one product
        across = f"v / {each} * {plan.width // 2} + " if products > 1 else ""
        inside = f"v % {each}" if products > 1 else "v"
        return {
            "warps": tile.warps,
            "vectors": vectors,
            "of_warp": f"(32 * {vectors})",
            "of_block": f"({tile.warps} * 32 * {vectors})",
            **self.shared_statistics(),
            "sum": f"{across}block * {plan.finished // 2} + {inside} * 4",
        }

    def shared_statistics(self) -> Mapping[str, Any]:
        """Statistics of a thread's two rows, one behind the other, by the warp and by the block they come from."""
        found = self.plan.prologue.reductions if self.plan.prologue else ()
        names = [f"{self.whole(r)}[{r8}]" for r in found for r8 in (0, 1)]
        return {
            "statistics": names,
            "statistics_of_block": f"({self.tile.warps} * 32 * {len(names)})",
        }

    # ---- fragments of the left factor

    def fragments(self) -> Mapping[str, Any] | None:
        """What a thread does with a pair, `word`, before it is multiplied: with element j, and with both."""
        found, plan, fragment = self.plan.prologue, self.plan, self.tile.atom.left_fragment
        if found is None:
            return None
        assert fragment is not None  # the rule prepares halves alone
        inside = f"k_at < {plan.k}" if plan.padded else ""
        place = "k * 4 + quarter / 2 * 2"  # of what this lane needs of a slice
        makes = found.changes and not found.scale
        used = used_by(found.body) | {r.value for r in found.reductions} | ({found.value} if makes else set())
        k = bool(inside and (found.reductions or makes))

        def read(load: Load) -> str:
            if load.value not in used:
                return ""
            if load in found.vectors:
                return self.to_value(load.access.dtype, f"{load.access.name}_slice.at[{place} + j]")
            return ELEMENTS[plan.dtype]

        def reduce(r: Reduction) -> str:
            return f"{f'if ({inside}) ' if inside else ''}{r.part}[quarter % 2] += {r.value};"

        lines = self.statements(found.row_body) + element_lines(found, Element(read, reduce=reduce), self)
        if makes:
            lines.append(f"made[j] = {f'{inside} ? {found.value} : 0.0f' if inside else found.value};")
        pair, type_ = [], PAIR_TYPES[plan.dtype]
        both = PAIRS[plan.dtype].format("made[0]", "made[1]")
        if found.scale:
            name = found.scale.access.name
            pair.append(f"const auto& {name}_pair = reinterpret_cast<const {type_}&>({name}_slice.at[{place}]);")
            both = f"__hmul2(reinterpret_cast<const {type_}&>(word), {name}_pair)"
        if found.changes:
            pair += [f"const {type_} both = {both};", "word = reinterpret_cast<const unsigned&>(both);"]
        return {
            "lines": lines,
            "pair": pair,
            "made": makes,
            "statistics": [{"part": r.part, "whole": self.whole(r)} for r in found.reductions],
            "counts_k": k,
            "col": fragment.col_text(("quarter", 2)),
            **self.order(k),
        }

    def whole(self, found: Reduction) -> str:
        """A statistic of whole rows; meanwhile the next tile's is summed."""
        return f"{found.results[0]}_all"

    def order(self, k: bool) -> Mapping[str, Any]:
        """Slices by turns through two sets of registers: the first two, behind which chunks that were kept are stored;
        then pairs of them; then the last of an odd number. `k`: is `prepare` told which slice it is of its tile?"""
        slices, chunks = self.plan.steps, self.plan.chunks
        first = range(min(slices, 2))
        share = -(-chunks // len(first))
        stored = [
            range(step * share, min(chunks, (step + 1) * share)) if self.plan.deferred_store else None for step in first
        ]
        behind = f"step == {slices - 1} ? 0 : step + 1"
        return {
            "first": f"prepare({'0, ' if k else ''}prepared[0])",
            "next": f"prepare({f'{behind}, ' if k else ''}to)",
            "begin": [{"step": step, "chunks": stored[step]} for step in first],
            "pairs": range(2, slices - slices % 2) or None,
            "end": slices - 1 if slices % 2 and slices > 1 else None,
            "odd": slices % 2,
        }

    def slices(self) -> list[Mapping[str, str]]:
        """How slices of the vectors [K] come to shared memory by pairs, and where they lie there: the 8 pairs that a
        lane multiplies by together, since instructions that load count among those that wgmma waits for."""
        plan = self.plan
        found: list[Mapping[str, str]] = []
        for each in plan.prologue.vectors if plan.prologue else ():
            access = each.access
            call = f"{self.moving('load', access)}<2>({access.name}_ptr + k_at)"
            if plan.padded:
                call = f"k_at < {plan.k} ? {call} : {self.pair(access)}{{}}"
            lane = f"Vec<{self.ctype(access.dtype)}, {LINE_ELEMENTS // 4}>"
            at = f"{access.name}_slices_at"
            found.append({"type": self.pair(access), "lane": lane, "name": access.name, "call": call, "at": at})
        return found

    def ahead(self) -> Mapping[str, str]:
        """Of the pairs that a lane has in registers: the first slices they are of, and those they are of next."""
        plan = self.plan
        count = plan.pairs_ahead
        following = "(next < steps ? next : i)"
        if self.tile.split_k > 1:
            first, following = (f"(rank * steps + {step})" for step in ("i", following))
        else:
            first = "i"
        return {"first": first, "next": following, "guard": "first + i < steps" if plan.steps % count else ""}

    # ---- the epilogue

    def first_row(self) -> str:
        """Of a consumer's own rows of a tile that both share."""
        rows = self.tile.group_rows
        return f"own * {rows} + " if rows <= 64 else "own * (tile_rows / 2) + "

    def sum_place(self) -> Mapping[str, Any]:
        """Where the first sum of a pair lies: pair r8 of columns n8 of a box, or columns n of a tile."""
        fragment, pair = self.tile.atom.fragment, (("n8", 4), ("r8", 2))
        return {
            "type": VALUE_TYPES[self.tile.atom.sum_type],
            "zero": ZEROS[self.tile.atom.sum_type],
            "row": fragment.row_text(*pair),
            "col": fragment.col_text(*pair),
            "tile_col": fragment.col_text(("n", 4)),
            "at": " + ".join(f"{name} * {each}" for name, each in pair),
            "lanes_of_row": fragment.lanes_of_row,
        }

    def row_values(self, output_group: OutputGroup) -> list[Mapping[str, str]]:
        """Values of a row that its elements ask for."""
        used = output_group.asked
        named = [(r.dtype, r.results[0]) for r in (self.plan.prologue.reductions if self.plan.prologue else ())]
        named += [(load.dtype, load.value) for load in output_group.row_loads]
        named += [(s.dtype, s.name) for s in output_group.row_body]
        return [{"ctype": VALUE_TYPES[dtype], "name": name} for dtype, name in named if name in used]

    def row_lines(self, output_group: OutputGroup) -> list[str]:
        found = self.plan.prologue
        lines = [f"const float {r.results[0]} = {self.whole(r)}[r8];" for r in (found.reductions if found else ())]
        for load in output_group.row_loads:
            text = where_found(load, self.to_value(load.access.dtype, f"*({self.at(load.access)})"), self)
            text = f"{self.inside_row} ? {text} : {ZEROS[load.dtype]}"
            lines.append(self.define(load.value, load.dtype, text))
        return lines + self.statements(output_group.row_body)

    @property
    def pair_number(self) -> str:
        """The number of a pair's 8 columns among the thread's."""
        return "n" if self.plan.chunks > 1 else "n8"

    def element_sums(self, output_group: OutputGroup, later: bool) -> list[str]:
        """What an element begins with: its sums, or `later` the value that is held in their place."""
        if output_group.held and later:
            return [f"const float {output_group.held} = {self.sums}[sum_at + j];"]
        lines = []
        for place, contraction in enumerate(output_group.contractions):
            offset = f" + {place * self.plan.finished // 2}" if place else ""
            kind = VALUE_TYPES[contraction.atom.sum_type]
            text = f"{self.sums}[sum_at{offset} + j]"
            if self.chooses_sums and self.plan.segments:  # of rows of no group 0, whatever was multiplied
                text = f"at.{OF_GROUP} ? {text} : {'0' if kind == 'int' else '0.0f'}"
            if self.plan.inner_segments:  # of an empty group too
                text = f"at.steps > 0 ? {text} : 0.0f"
            lines.append(f"const {kind} {contraction.value} = {text};")
        return lines

    def element(self, output_group: OutputGroup, step: Body | None = None) -> list[str]:
        """Element j of a pair: its value from the sums and the operands, up to what is stored, or reduced in a step."""
        first = step in output_group.steps[:1]
        lines = self.element_sums(output_group, later=bool(output_group.steps) and not first)

        def read(load: Load) -> str:
            place = f"[{self.pair_number}]" if load.when == "ahead" else "[n8][r8]"
            return self.to_value(load.access.dtype, f"{load.access.name}_vec{place}.at[j]")

        def write(store: Store) -> str:
            if store.transport in BOXED or (store.transport == "quads" and self.paired(store)):
                return f"{store.access.name}_pair[j] = {store.value};"
            return f"{store.access.name}_vec.at[j] = {self.stored(store)};"

        if step is not None:
            loads = tuple(load for load in output_group.loads if load.value in asked(step))
            lines += element_lines(replace(step, loads=loads, reductions=()), Element(read), self)
            hold = output_group.held and first
            return [*lines, *([f"{self.sums}[sum_at + j] = {output_group.held};"] if hold else [])]
        loads = tuple(load for load in output_group.loads if load.value in asked(output_group))
        return [*lines, *element_lines(replace(output_group, loads=loads), Element(read, write), self)]

    # ---- all of it

    def context(self) -> dict[str, Any]:
        plan, tile = self.plan, self.tile
        vectors = [
            self.read(load, self.inside_col(output_group))
            for output_group in plan.output_groups
            for load in ahead_of_sums(output_group)
        ]
        left_copy, rows_found, output_groups = (
            None if plan.gathers else self.left_copy(),
            self.rows_found(),
            [self.output_group(number) for number in range(len(plan.output_groups))],
        )
        fragments, slices, turned = self.fragments(), self.slices(), self.turned()
        return {
            **self.frame(plan),
            "includes": self.includes(),
            "uses": {
                "vec": bool(
                    vectors
                    or plan.brought
                    or plan.inner_segments
                    or fragments
                    or turned
                    or tile.split_k > 1
                    or plan.left_rows < tile.held_rows
                    or any(s["loads"] or s["direct"] or s["quads"] for s in output_groups)
                    or any(box["rows"] for s in output_groups for box in s["boxes"])
                    or any(step["loads"] for s in output_groups for step in s["steps"])
                ),
                "functions": self.functions,
            },
            "index": "int",
            "segment_rows": self.band,
            **self.segment_lanes(),
            "counts_segments": True,
            "keeps_groups": plan.keeps_groups,
            "row_reduces": [],
            "group": tile.atom.threads,
            "place": self.place(),
            "slice_count": self.steps(),
            "rest": self.rest(),
            "shuffle_xor": self.spelling.shuffle_xor.format("begin", "step"),
            "told": dict(zip(("parameters", "arguments"), self.told(), strict=True)),
            "inside_row": self.inside_row,
            "tiles": self.tiles(),
            "left_copy": left_copy,
            "rows_found": rows_found,
            "empty": self.empty(),
            "inside": self.inside,
            "output_groups": output_groups,
            "boxes": any(output_group["boxes"] for output_group in output_groups),
            "quads": any(output_group["quads"] for output_group in output_groups),
            "box_functions": box_functions(self.moved),
            "multiplies": [turned["multiply"]] if turned else self.multiplies(),
            "constraint": constraint_of(tile.atom),
            "steps": plan.line_steps,
            "every_block": f"{(1 << tile.cluster) - 1}",
            "sum": self.sum_place(),
            "first_tile": self.first_tile,
            "under_way": self.under_way(),
            "expects": self.expects(),
            "this_tile": self.first_tile if tile.split_k > 1 else "tile",
            "most_looks": MOST_LOOKS,
            "tile_step": f"gridDim.x / {tile.cluster}" if tile.cluster > 1 else "gridDim.x",
            "releasing": self.releasing(),
            "release": self.release("before"),
            "release_now": self.release("stage"),
            "left": self.factor(plan.left[0], "left"),
            "ways": self.ways(),
            "descriptor_fields": self.fields(
                *(() if fragments else plan.left),
                *(() if turned else (right for group in plan.output_groups for right in group.rights)),
            ),
            "vector_pairs": plan.finished // 8,
            "chunks": plan.chunks,
            "all_chunks": ("group_of_columns", 1) if plan.chunks_are_groups else ("chunk", plan.chunks),
            "each_group": ("chunk", plan.chunks) if plan.chunks_are_groups else ("group_of_columns", 1),
            "col0": self.col0,
            "split_k": self.split_k(),
            "step": self.step,
            "box": self.swizzled(),
            "batch": any(self.names_batch(output_group) for output_group in plan.output_groups),
            "promote": None if turned else self.promoted(),
            "turned": turned,
            "summed": turned["sums"] if turned else "count" if plan.fences_both else tile.multiplied_sums,
            "tensor_memory": self.tensor_memory(),
            "atom_k": tile.atom.k,
            "atom_rows": tile.part_rows,
            "staging": f"({tile.buffers} * {self.size('box_bytes')})"
            if any(output_group["boxes"] for output_group in output_groups)
            else "",
            "spare": tile.buffers - 1,
            "vectors": vectors,
            "brought": self.places(),
            "fragments": fragments,
            "kept": self.kept(output_groups[0]["boxes"][0]) if plan.deferred_store else None,
            "slices": slices,
            "ahead": self.ahead() if plan.pairs_ahead > 1 else None,
            "producers": 1 + self.who_bring(bool(rows_found), bool(slices)),
            "own_rows": "" if turned else self.own_rows,
            "names_row": not plan.deferred_store
            or any(s["loads"] or s["needs"]["row"] or s["needs"]["rows"] for s in output_groups),
            "first_row": self.first_row() if tile.schedule == "cooperative" else "",
            "chunk_sums": plan.box_cols // 2,
            "pairs": LINE_ELEMENTS // 2,
            "columns": plan.box_cols // 8,
            "line": LINE_ELEMENTS,
            "sizes": sizes(plan, self.sizes),
        }

    def who_bring(self, rows_found: bool, slices: bool) -> int:
        """Threads and warps beside the one that asks for copies that tell when their part of a slice is there."""
        if rows_found:
            return PRODUCERS * self.tile.atom.threads
        return int(slices) + SCALE_WARPS * self.plan.target.warp * (self.plan.scale_slots > 0)

    def output_group(self, number: int) -> Mapping[str, Any]:
        """What is brought for one output group's tiles, and made of their sums."""
        output_group = self.plan.output_groups[number]
        guard = all_of("inside" * bool(self.inside), self.inside_row, self.inside_col(output_group))
        own, named = asked(output_group), self.row_values(output_group)
        loads = [self.read(load, guard) for load in after_sums(output_group) if load.value in own]
        direct = self.direct(output_group)
        return {
            "test": self.in_output_group(number),
            "copies": self.right_copies(output_group),
            "elements": bool(output_group.stores),
            "loads": loads,
            "takes": taken(output_group, output_group.steps, "r8"),
            "brought": [self.brought(load) for load in output_group.brought],
            "boxes": self.boxes(output_group),
            "direct": direct,
            "quads": self.quads(output_group),
            "row_values": named,
            "own_values": [v for v in named if v["name"] in own],
            "row_lines": self.row_lines(output_group),
            "element": self.element(output_group),
            "steps": self.reduced(output_group, guard, named),
            "guard": guard,
            "needs": {
                "rows": bool(output_group.row_loads) or counts(output_group.row_body, "row_index"),
                "row": bool(direct),
                "col": bool(direct) or counts(output_group.body, "col_index"),
                "n": bool(ahead_of_sums(output_group)) and self.plan.chunks > 1,
            },
        }

    def reduced(self, output_group: OutputGroup, guard: str, named: list[Mapping[str, str]]) -> list[Mapping[str, Any]]:
        """What is made of a tile's columns, step by step: a thread's part of each of its rows, then that of the lanes
        that have the row."""
        found: list[Mapping[str, Any]] = []
        inside, steps = self.inside_col(output_group), output_group.steps
        number, here = f"{self.col0} / tile_cols", ""  # of the row's groups of columns; is it there?
        if self.plan.chunks_are_groups:
            number = f"{self.col0} / {self.plan.box_cols} + chunk"
            here = f"{self.col0} + chunk * {self.plan.box_cols} < {output_group.cols}" if inside else ""
        for place, step in enumerate(steps):
            updates = [updated(r, "r8", self) for r in step.reductions]
            lines = [f"if ({inside}) {{", *(f"  {u}" for u in updates), "}"] if inside else updates
            other = self.spelling.shuffle_xor.format("v", "step")
            behind = used_by(step.row_body)
            of_row = [f"const {v['ctype']} {v['name']} = {v['name']}_of[r8];" for v in named if v["name"] in behind]
            found.append(
                {
                    "parts": [part_words(r, other, (*steps[place + 1 :], output_group), self) for r in step.reductions],
                    "row_values": [v for v in named if v["name"] in asked(step)],
                    "takes": taken(step, steps[:place], "r8"),
                    "loads": [self.read(load, guard) for load in after_sums(output_group) if load.value in asked(step)],
                    "lines": [*self.element(output_group, step), *lines],
                    "here": here,
                    "names_col": bool(inside) or counts(step.body, "col_index"),
                    "behind": [*of_row, *self.statements(step.row_body)],
                    "kept": kept(step, (*steps, output_group)),
                    "stores": [f"*({self.at_group(s.access, number)}) = {self.stored(s)};" for s in step.row_stores],
                }
            )
        return found

    def names_batch(self, output_group: OutputGroup) -> bool:
        """Does a thread find an operand or an output by the number of its product?"""
        found = [
            load.access for load in (*ahead_of_sums(output_group), *after_sums(output_group), *output_group.row_loads)
        ]
        found += [store.access for store in output_group.stores if store.transport != "tensor"]
        return any(place < len(self.plan.row_dims) - 1 for access in found for place in access.strided)

    def read(self, load: Load, guard: str) -> Mapping[str, str]:
        call = self.load(load.access, 2)
        pair = self.pair(load.access)
        text = f"{guard} ? {call} : {pair}{{}}" if guard else call
        return {"type": pair, "name": f"{load.access.name}_vec", "call": text}

    def tiles(self) -> list[str]:
        """How many there are."""
        plan = self.plan
        rows = plan.row_dims[-1].extent
        lines = [f"const long long rows = {rows};"] if rows != "rows" else []
        count = f"static_cast<int>((rows + {self.band} - 1) / {self.band})"
        if plan.segments:
            ends = self.pointers[plan.segments.ends.tensor]
            if plan.keeps_groups:
                lines.append(f"Known known{{own_segments({ends}, rows)}};")
            count = f"static_cast<int>(tiles_of({'known.own' if plan.keeps_groups else ends}, rows))"
        if plan.tiles_across > 1:
            lines.append(f"const int tiles_down = {count};")
            count = "tiles_down * tiles_across"
        alone = self.tile.split_k > 1  # a cluster has one tile, and need not count them
        if plan.batched:
            lines.append(f"const int tiles_here = {count};  // of one product")
            count = f"static_cast<int>({plan.row_dims[0].extent}) * tiles_here"
        return lines if alone else [*lines, f"const int tiles = {count};"]

    def includes(self) -> list[str]:
        used = {a.dtype for a in self.plan.accesses if a.tensor not in self.factors} | {
            s.access.dtype for output_group in self.plan.output_groups for s in output_group.boxes
        }
        if self.plan.prologue or self.plan.coding:
            used.add(self.plan.dtype)
        return self.headers_of(used)

    @property
    def factors(self) -> frozenset[str]:
        """Those that tensor copies bring."""
        return frozenset(o.access.tensor for o in (*self.plan.left, *self.plan.rights) if o.transport == "tensor")


def ahead_of_sums(output_group: OutputGroup) -> list[Load]:
    """Vectors that a thread reads before its sums are there."""
    return [load for load in output_group.loads if load.when == "ahead"]


def after_sums(output_group: OutputGroup) -> list[Load]:
    """What a thread reads by pairs, once they are."""
    return [load for load in output_group.loads if load.when == "now" and load.transport == "plain"]
