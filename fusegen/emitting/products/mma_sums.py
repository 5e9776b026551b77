"""A GemmPlan's fragments, sums and epilogue in the words of one dialect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fusegen.emitting.body import Element, element_lines, where_found
from fusegen.emitting.dialect import UNROLL, ZEROS, all_of
from fusegen.emitting.products.mma_words import GemmWords, Own
from fusegen.emitting.products.reduced import asked, kept, part_words, row_part, taken, updated
from fusegen.emitting.products.words import OF_GROUP
from fusegen.language.types import F8, f32
from fusegen.planner.model import Load, Store, counts, used_by
from fusegen.planner.pieces import VECTOR_BYTES, stride_name
from fusegen.planner.products.gemm import ROW_LANES
from fusegen.planner.products.parts import OutputGroup

# Where in a tile the row lies that lane `lane` gives the address of, for a fragment of each operand, of which `side` is
# the warp's first row or column: along K, or across it. The instruction's rows are the right operand's, 16 of
# them; of its columns, the left operand's rows, it has 8, so a fragment serves two. What ldmatrix gives a lane are 4
# bytes of a chunk: two halves, or one f32, which it can't transpose.
ADDRESSES: Mapping[tuple[str, bool], str] = {
    ("right", True): "{mn}lane % 16, lane / 16 * {chunk}",
    ("right", False): "lane % 8 + lane / 16 * 8, {mn}lane / 8 % 2 * 8",
    ("left", True): "{mn}lane % 8 + lane / 16 * 8, lane / 8 % 2 * {chunk}",
    ("left", False): "lane % 16, {mn}lane / 16 * 8",
    ("left half", True): "{mn}lane % 8, lane / 8 % 2 * {chunk}",
    ("left half", False): "lane % 16, {side_alone}",
}
# The functions that load them: ldmatrix knows no operands, but two or four matrices that lie along K or across.
MATRICES: Mapping[tuple[bool, bool], tuple[str, str]] = {  # half of a fragment, along -> name, the target's word
    (False, True): ("load_matrices", "matrix"),
    (False, False): ("load_matrices_across", "matrix_across"),
    (True, True): ("load_two_matrices", "half_matrix"),
    (True, False): ("load_two_matrices_across", "half_matrix_across"),
}
COUNT = {False: "four", True: "two"}
# Of f32 that is to be transposed, where a lane's own first element lies, and where the others do: 8 further along the
# M or N, which flips a bit of the address, and 4 lines further in k.
WORD_PLACE = "lane % 4, {mn}lane / 4"
WORDS: Mapping[str, tuple[str, int, str]] = {
    "right": ("load_right_across", 4, "(address ^ i % 2 * 32) + i / 2 * 4 * Line"),
    "left": ("load_left_across", 4, "(address ^ i / 2 * 32) + i % 2 * 4 * Line"),
    "left half": ("load_left_half_across", 2, "address + i * 4 * Line"),
}


class SumSpeller(GemmWords):
    """What warps multiply, where their sums go, and what comes of these."""

    def fragments(self) -> list[dict[str, Any]]:
        plan, tile = self.plan, self.tile
        found: list[dict[str, Any]] = []
        for own in [self.owns[0], *self.owns[len(plan.left) :]]:
            rows = own.factor.mn == "rows"
            extent = tile.warp_rows if rows else tile.warp_cols
            mn = self.warp_row if rows else self.warp_col
            if plan.atom.kind == "mma":
                half = extent == plan.atom.rows
                unit = plan.atom.rows if half else 16
                words = self.matrix(own, "left half" if half else "left" if rows else "right", mn, unit)
            else:
                unit = plan.atom.rows if rows else plan.atom.cols
                words = self.from_tile(own, mn, unit)
            found.append({"name": own.name, "count": extent // unit, **words})
        return self.numbered(found)

    def numbered(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """In the order that products need them: the first of the left operand, all right ones, the others."""
        left, *rights = found
        before = 1
        for right in rights:
            end = before + right["count"]
            right |= {"numbered": f"{before} <= number && number < {end}", "number": f"number - {before}"}
            before = end
        rest = before - 1
        left |= {"numbered": f"number < 1 || number >= {before}", "number": f"number < 1 ? 0 : number - {rest}"}
        return found

    def from_tile(self, own: Own, mn: str, unit: int) -> Mapping[str, str]:
        """Which rows of a tile AMD's fragment i of step k is of."""
        chunks = (self.tile.k if own.factor.tile_along else own.extent) // self.plan.chunk
        self.functions.add("place")
        tile = f"slice + {own.at}" if own.at else "slice"
        return {
            "type": "Fragment",
            "load": f"load_fragment<{chunks}>",
            "lane": "",
            "at": f"{tile} + i * ({unit} * tile_k), {alone(mn)}, k * {self.plan.atom.k}",
        }

    def matrix(self, own: Own, kind: str, mn: str, unit: int) -> Mapping[str, Any]:
        """The address that a lane gives for fragment i of step k, in bytes.

        Steps along a line turn bits of it that whole lines leave alone, so that no sum has to be made again: a line is
        a power of two of bytes, and so is what a warp has of it, and slices begin at multiples of either. They are
        swizzled before the slice's place is added, which is the same for all lanes and so costs no instruction of a
        lane: 4096^3 took 272 us on an H200, not 278.
        """
        plan, size, along = self.plan, self.size, own.factor.tile_along
        chunks = (self.tile.k if along else own.extent) // plan.chunk
        line = f"{'tile_rows' if own.factor.mn == 'rows' else 'tile_cols'} * {size}"
        several = (self.tile.warp_rows if own.factor.mn == "rows" else self.tile.warp_cols) > unit
        if along:
            swizzled, added = f"k * {plan.atom.k * size}", f"i * ({unit} * tile_k * {size})"
        else:
            swizzled, added = f"i * {unit * size}" if several else "", f"k * ({plan.atom.k} * {line})"
        words = plan.dtype is f32 and not along
        place = (WORD_PLACE if words else ADDRESSES[kind, along]).format(mn=mn, side_alone=alone(mn), chunk=plan.chunk)
        function = WORDS[kind][0] if words else MATRICES["half" in kind, along][0]
        start = f"ring_at + {own.at} * {size}" if own.at else "ring_at"
        named = "place" if along else self.place_across
        self.functions.add(named)
        lane = f"({own.name}_lane ^ ({swizzled}))" if swizzled else f"{own.name}_lane"
        return {
            "type": "unsigned",
            "function": function,
            "kind": kind,
            "along": along,
            "load": f"{function}<{line}>" if words else function,
            "lane": f"const unsigned {own.name}_lane = {start} + {named}<{chunks}>({place}) * {size};",
            "at": f"{lane} + slice + {added}",
        }

    def fragment_functions(self, fragments: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
        """The functions of the prelude that load fragments."""
        if self.plan.atom.kind != "mma":
            return []
        return {f["function"]: self.fragment_function(f) for f in fragments}.values()

    def fragment_function(self, fragment: Mapping[str, Any]) -> Mapping[str, Any]:
        kind, along, function = fragment["kind"], fragment["along"], fragment["function"]
        half = "half" in kind
        what = f"{COUNT[half]} matrices of 8 x 16 bytes, from the rows whose places the lanes give"
        if self.plan.dtype is not f32:
            what += "" if along else "; transposed on the way"
            body: Iterable[str] = self.spelling.functions[MATRICES[half, along][1]]
            return {"name": function, "what": what, "template": "", "body": body}
        self.functions.add("to_tf32")
        if along:
            rounded = [UNROLL, f"for (int i = 0; i < {2 if half else 4}; ++i) to[i] = to_tf32(to[i]);"]
            body = [*self.spelling.functions[MATRICES[half, along][1]], *rounded]
            return {"name": function, "what": f"{what}, rounded to tf32", "template": "", "body": body}
        self.functions.add("load_word")
        _, count, place = WORDS[kind]
        return {
            "name": function,
            "what": "a lane's elements of a fragment whose tile has rows along the side, of Line bytes each",
            "template": "template <int Line>",
            "body": [UNROLL, f"for (int i = 0; i < {count}; ++i) to[i] = to_tf32(load_word({place}));"],
        }

    def sums(self) -> list[Mapping[str, Any]]:
        plan = self.plan
        size = f"{self.band_rows} * sums_stride"
        own = "k_group * group_floats + " if self.tile.slice_k > 1 else ""
        return [
            {
                "name": f"{self.sum_name(place)}_sums",
                "scale": self.scales()["arguments"][place],
                "added": f"{self.sum_name(place)}_sums{'_unscaled' * plan.scales_slices}",
                "shared": f"{self.sum_name(place)}_shared",
                "shared_at": f" + {f'{place} * ' if place > 1 else ''}{size}" if place else "",
                "own": own,
                "right": self.owns[len(plan.left) + place].name,
            }
            for place in range(plan.products)
        ]

    def statistics(self, found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        plan, own = self.plan, self.owns[0]
        if plan.prologue is None:
            return []
        if plan.prologue.reductions:
            self.functions.add("partner")
        k_group = "k_group * group_floats + " if self.tile.slice_k > 1 else ""
        behind = [] if plan.run else [f"{plan.products} * {self.band_rows} * sums_stride"]
        return [
            {
                "shared": f"{r.results[0]}_shared",
                "shared_at": "".join(f" + {term}" for term in [*behind, *[f"{place} * tile_rows"] * bool(place)]),
                "part": r.part,
                "passes": found["passes"],
                "lanes": self.tile.k // plan.chunk,
                "first": f"{own.k} == 0",
                "at": f"{k_group}{found['at_mn']}",
            }
            for place, r in enumerate(plan.prologue.reductions)
        ]

    def atom(self) -> Mapping[str, Any]:
        plan, tile, atom = self.plan, self.tile, self.plan.atom
        mma = atom.kind == "mma"
        left, buffer = self.owns[0].name, "k % 2" if tile.persistent else "buffer"
        down, across = tile.warp_rows // atom.rows, tile.warp_cols // atom.cols
        loops = [("m", down), ("n", across)] if tile.bands > 1 else [("n", across), ("m", down)]
        first_row = f"{self.warp_row}m * {atom.rows}" if down > 1 else alone(self.warp_row)
        if tile.bands > 1:
            first_row = f"({first_row})" if down > 1 else first_row
        row = f"{first_row} % band_rows" if tile.bands > 1 else f"{self.warp_row}m * {atom.rows}"
        if not mma:
            left_text = f"{left}_part[{buffer}][m]"
        elif down == 1:
            left_text = f"{left}_part[{buffer}][0][0], {left}_part[{buffer}][0][1]"
        else:
            left_text = f"{left}_part[{buffer}][m / 2][m % 2 * 2], {left}_part[{buffer}][m / 2][m % 2 * 2 + 1]"
        return {
            "part": "mma" if mma else "mfma",
            "alignment": 1024 if mma else 128,  # bits of addresses in lines of up to 512 bytes are swizzled
            "type": atom.word,
            "calls": [
                f"{atom.instruction}({atom.arguments.format(f'left.part[{i}]', f'right.part[{i}]', 'sums')})"
                for i in range(atom.instructions)
            ],
            "load": [] if mma else self.fragment_load(),
            "lane_elements": atom.k if atom.repeated else plan.chunk,
            "lane_bytes": atom.k * plan.dtype.bytes if atom.repeated else VECTOR_BYTES,
            "parts": atom.instructions,
            "lane_words": atom.lane_words,
            "part_type": ("Half" if atom.factors.bytes == 2 else "Words") if atom.lane_words > 1 else atom.word,
            "fragment_dims": "[4]" if mma else "",
            "body": self.spelling.functions.get(f"mma_{'_'.join(self.kinds)}", ()),
            "promotes": plan.promote > 0,
            "sum_bits": atom.sum_bits,
            "sums_type": self.sum_type if mma else "Sums",
            "sum_type": self.sum_type,
            "sums_dims": "[4]" if mma else "",
            "times": f" * {2 ** sum(plan.halves)}.0f" if any(plan.halves) else "",
            "across": across,
            "down": down,
            "outer": loops[0],
            "inner": loops[1],
            "serpentine": mma and down > 1 and tile.warp_cols > atom.cols,
            "left": left_text,
            "first_row": first_row,
            "row": f"{row} + {atom.fragment.row_text(('i', 1))}",
            "col": f"{self.warp_col}n * {atom.cols} + {atom.fragment.col_text(('i', 1))}",
        }

    def fragment_load(self) -> list[str]:
        """How a lane gets what it has of a fragment of AMD's: 16 bytes, or as many times that as its row has."""
        atom, chunk = self.plan.atom, self.plan.chunk
        row = f"mn + lane % {atom.rows}"
        if not atom.repeated:
            at = f"place<Chunks>({row}, k + lane / {atom.rows} * {chunk})"
            return [f"to = *reinterpret_cast<const Fragment*>(tile + {at});"]
        self.uses_vec = True
        vec = self.vec(self.plan.dtype, chunk)
        pieces = [f"*reinterpret_cast<const {vec}*>(tile + place<Chunks>(row, k{f' + {at}' if at else ''}))"
                  for at in range(0, atom.k, chunk)]  # fmt: skip
        return [
            f"const int row = {row};",
            "struct Pieces {",
            f"  {vec} at[{len(pieces)}];",
            "};",
            "const Pieces pieces = {{" + pieces[0] + ",",
            *(f"                        {piece}," for piece in pieces[1:-1]),
            f"                        {pieces[-1]}" + "}};",
            "to = __builtin_bit_cast(Fragment, pieces);",
        ]

    def scales(self) -> Mapping[str, Any]:
        """Of the blocks of a slice: by row, two for each instruction of mma.sync and one for each of AMD's, and by the
        warp's columns of each product."""
        blocks = self.plan.block_scales
        if blocks is None:
            return {"cols": [], "of_row": "", "arguments": [""] * self.plan.products}
        slices = self.plan.scales_slices
        tile, atom = self.tile, self.plan.atom
        part = f"(step * split_k + {self.number})" if tile.split_k > 1 else "step"
        shares = blocks.block // tile.k
        block = f"{part} / {shares}" if shares > 1 else part
        rows = blocks.rows
        each = f" * {stride_name(rows, self.dims, len(self.dims) - 1)}" if rows.strided else ""
        m = f"m * {atom.rows} + " if tile.warp_rows > atom.rows else ""
        row = f"(row < {self.rows_end} ? row : row0)" if slices else "row"
        last = 0 if self.plan.even else self.plan.k // blocks.block
        found = "block" if slices and last else block
        along = found if rows.ld_axis is None else f"{found} * {rows.name}_ld"
        col = f"(col0 + {alone(self.warp_col)})" if self.warp_col else "col0"
        return {
            "row": f"row0 + {self.warp_row}{m}{atom.fragment.row_text(('r', 1))}",
            # slices beyond K, which parts of it may have, have no scales
            "inside": f"row < {self.rows_end}" + (f" && {block} < {last}" if last else ""),
            "block": block,
            "within": last,
            "of_row": f"{self.pointers[rows.tensor]}[{row}{each} + {along}]",
            "cols": [
                f"{self.pointers[c.tensor]}[{self.own_scales(c)}{col} / scaled_cols * {c.name}_ld + {found}]"
                for c in blocks.cols
            ],
            "arguments": ["" if slices else f", scale[{product}][m]" for product in range(self.plan.products)],
        }

    @property
    def kinds(self) -> list[str]:
        """The factors' types by which the instruction's text is found: both of floats of 8 bits."""
        atom = self.plan.atom
        return [str(atom.factors), *([str(atom.right_factors)] if atom.factors in F8 else [])]

    # ---- the epilogue

    def output_group(self, number: int, output_group: OutputGroup) -> Mapping[str, Any]:
        plan, vector = self.plan, output_group.vector
        places = self.own_places(output_group) if plan.run else self.shared_places(output_group)
        guard = [*places["guard"], f"{self.tile_row()} < rows_here" if self.short else f"row < {self.rows_end}"]
        if output_group.cols % self.tile.cols:
            guard.append(f"col < {self.cols(output_group)}")
        elements = output_group.stores or not output_group.steps  # else steps read what they need one by one
        ahead = [load for load in output_group.loads if load.when == "ahead" and elements]
        moving = [load for load in ahead if len(plan.row_dims) - 1 in load.access.strided]
        each = moving if output_group.passes > 1 else []
        return {
            **places,
            "test": f"group == {number}" if self.several else "",
            "passes": output_group.passes,
            "unroll": UNROLL if output_group.unrolled == output_group.passes else f"{UNROLL} {output_group.unrolled}",
            "vector": vector,
            "guard": all_of(*guard),
            "row_at": f"row0 + {self.tile_row()}",
            "vectors": [
                {
                    "type": self.vec(load.access.dtype, vector),
                    "name": f"{load.access.name}_vec",
                    "call": self.load(load.access, vector),
                }
                for load in each
            ],
            "once": [self.load_once(output_group, load) for load in ahead if load not in moving],
            "row": [
                *(self.declared(load, vector) for load in moving if load not in each),
                *([] if plan.run else self.group_sums(output_group)),
                *self.group_row(output_group),
                *taken(output_group, output_group.steps, self.slot(output_group)),
            ],
            "body": self.group_body(output_group, each),
            "stores": [self.store(store.access, vector) for store in output_group.stores],
            "reduced": self.reduced(output_group) if output_group.steps else None,
        }

    # ---- a tile's columns, reduced

    def reduced(self, output_group: OutputGroup) -> Mapping[str, Any]:
        """What lanes that have a row make of its columns, step by step."""
        run, cols = self.plan.run, f"col < {self.cols(output_group)}" if output_group.cols % self.tile.cols else ""
        pieces = run // output_group.vector if run else 1
        bits = self.plan.atom.fragment.lanes_of_row if run else (1, ROW_LANES // 2)
        width = self.tile.warp_cols if run else self.tile.cols
        across = run and self.warp_col
        number = f"(col0 + {self.warp_col.removesuffix(' + ')}) / warp_cols" if across else "col0 / tile_cols"
        self.functions.add("partner")
        self.sizes.update(() if run else ("threads",))
        return {
            "rows": output_group.passes // pieces if run else 1,
            "pieces": pieces,
            "lanes": 2 * max(bits) // min(bits),
            "high": max(bits),
            "low": min(bits),
            "first": all_of(
                f"lane < {min(bits)}" if run else f"threadIdx.x % {ROW_LANES} == 0",
                f"{number} < {-(-output_group.cols // width)}" if run and cols else "",  # has the warp columns?
            ),
            "cols": cols,
            "band_rows": self.band_rows,
            "elements": bool(output_group.stores),
            "steps": [self.reduced_step(output_group, place, number) for place in range(len(output_group.steps))],
        }

    def row_values(self, output_group: OutputGroup, wanted: frozenset[str], inside: str = "") -> list[str]:
        """What is one value a row, as far as `wanted` ones are made of it; `inside`: is the row there?"""
        part = row_part(output_group, wanted)
        wanted |= used_by(part.row_body)
        sums = [] if self.plan.prologue is None else [
            f"const float {r.results[0]} = {self.gather(f'{r.results[0]}_shared', self.tile_row(), 1)};"
            for r in self.plan.prologue.reductions
            if r.results[0] in wanted
        ]  # fmt: skip
        loads = [
            self.define(load.value, load.dtype, f"{inside} ? {text} : {ZEROS[load.dtype]}" if inside else text)
            for load in part.row_loads
            for text in [where_found(load, self.row_value(load), self)]
        ]
        return [*sums, *loads, *self.statements(part.row_body)]

    def row_value(self, load: Load) -> str:
        return self.to_value(load.access.dtype, f"*({self.at(load.access)})")

    def reduced_step(self, output_group: OutputGroup, place: int, number: str) -> Mapping[str, Any]:
        steps = output_group.steps
        step, later_bodies = steps[place], (*steps[place + 1 :], output_group)
        loads = tuple(load for load in output_group.loads if load.value in asked(step))
        col, slot = ("col + j", "r") if self.plan.run else ("col", "0")

        def read(load: Load) -> str:
            return self.to_value(load.access.dtype, f"*({self.at(load.access, col)})")

        lines = self.element_sums(output_group, place > 0)
        counted = () if self.plan.run else tuple(s.name for s in step.body if s.op.name == "col_index")  # that is `col`
        uncounted = replace(step, loads=loads, reductions=(), body=tuple(s for s in step.body if s.name not in counted))
        lines += element_lines(uncounted, Element(read, col=col), self)
        if output_group.held and place == 0:
            lines.append(f"{self.held_sum(output_group)} = {output_group.held};")
        lines += [updated(r, slot, self) for r in step.reductions]
        for name in counted:
            lines = [re.sub(rf"\b{name}\b", "col", line) for line in lines]
        return {
            "parts": [part_words(r, "partner(v, step)", later_bodies, self) for r in step.reductions],
            "kept": kept(step, (*steps, output_group)),
            "takes": taken(step, steps[:place], slot),
            "row": self.row_values(output_group, asked(step)),
            "names_col": bool(loads) or counts(step.body, "col_index"),
            "lines": lines,
            "behind": [
                *self.row_values(output_group, used_by(step.row_body), f"row < {self.rows_end}"),
                *self.statements(step.row_body),
            ],
            "stores": [f"*({self.at_group(s.access, number)}) = {self.stored(s)};" for s in step.row_stores],
        }

    def held_sum(self, output_group: OutputGroup) -> str:
        """Where an element's value is held: in the place of its sum in the first contraction."""
        return f"{self.sum_name(0)}_sums{self.own_sum(output_group)}"

    def element_sums(self, output_group: OutputGroup, later: bool) -> list[str]:
        """What an element begins with: its sums, or `later` the value that is held in their place."""
        if output_group.held and later:
            return [f"const float {output_group.held} = {self.held_sum(output_group)};"]
        lines = []
        for place, product in enumerate(output_group.contractions):
            if self.plan.run:
                text = f"{self.sum_name(place)}_sums{self.own_sum(output_group)}"
            else:
                text = f"{self.sum_name(place)}_shared[m * sums_stride + n]"
            lines.append(f"const {self.sum_type} {product.value} = {self.of_group(text)};")
        return lines

    def of_group(self, text: str) -> str:
        """A sum; of rows of no group 0, whatever their factors are."""
        zero = "0" if self.sum_type == "int" else "0.0f"  # of the sums' type: i32 is not exact in f32
        return f"{OF_GROUP} ? {text} : {zero}" if self.plan.segments else text

    def slot(self, output_group: OutputGroup) -> str:
        """Which of a lane's rows a pass takes."""
        pieces = self.plan.run // output_group.vector if self.plan.run else 0
        return (f"v / {pieces}" if pieces > 1 else "v") if pieces else "0"

    def shared_places(self, output_group: OutputGroup) -> Mapping[str, Any]:
        """The places (m, n) of a tile that a thread takes in turn from shared memory: threads side by side."""
        plan, tile, vector = self.plan, self.tile, output_group.vector
        per_row = f"(tile_cols / {vector})" if vector > 1 else "tile_cols"
        places = tile.band_rows * tile.cols // vector
        at_once = plan.threads * tile.cluster
        first = ["v"] if output_group.passes > 1 else []
        if tile.cluster > 1:
            first = [f"(v * {tile.cluster} + rank)" if output_group.passes > 1 else "rank"]
        at = f"({first[0]} * threads + threadIdx.x)" if first else "threadIdx.x"
        self.sizes.update(["threads"] * len(first))
        return {
            "fixed": False,
            "m": f"static_cast<int>({at} / {per_row})",
            "n": f"static_cast<int>({at} % {per_row})" + (f" * {vector}" if vector > 1 else ""),
            "guard": [f"m < {self.band_rows}"] if places % at_once else [],
        }

    def own_places(self, output_group: OutputGroup) -> Mapping[str, Any]:
        """Those of the sums in its registers: a run of columns in two rows of each of the warp's instructions."""
        plan = self.plan
        pieces = plan.run // output_group.vector
        lane_row, lane_col = plan.atom.fragment.row_text(), plan.atom.fragment.col_text()
        row = f"v / {2 * pieces} * {plan.atom.rows} + {lane_row} + {f'v / {pieces}' if pieces > 1 else 'v'} % 2"
        piece = f" + v % {pieces} * {output_group.vector}" if pieces > 1 else ""
        return {
            "fixed": pieces == 1,
            "m": f"{self.warp_row}{row}",
            "n": f"{self.warp_col}{lane_col} * {plan.run}{piece}",
            "guard": [],
        }

    def own_sum(self, output_group: OutputGroup) -> str:
        """Which of a product's sums is element j of pass v."""
        pieces = self.plan.run // output_group.vector
        row = f"v / {pieces} % 2" if pieces > 1 else "v % 2"
        at = "j" if output_group.vector > 1 else "0"
        at = f"(v % {pieces} * {output_group.vector} + {at})" if pieces > 1 else at
        return f"[{at} / 2][v / {2 * pieces}][{at} % 2 * 2 + {row}]"

    def cols(self, output_group: OutputGroup) -> str:
        return str(output_group.cols) if self.several else "cols"

    def load_once(self, output_group: OutputGroup, load: Load) -> str:
        """What all of the thread's rows share."""
        vec, text = self.vec(load.access.dtype, output_group.vector), self.load(load.access, output_group.vector)
        if output_group.cols % self.tile.cols:
            text = f"col < {self.cols(output_group)} ? {text} : {vec}{{}}"
        return f"const {vec} {load.access.name}_vec = {text};"

    def declared(self, load: Load, vector: int) -> str:
        vec = self.vec(load.access.dtype, vector)
        return f"const {vec} {load.access.name}_vec = {self.load(load.access, vector)};"

    def gather(self, shared: str, at: str, count: int) -> str:
        if count > 1 or self.tile.split_k > 1:
            self.functions.add("load")
        if self.tile.split_k == 1:
            return f"load<{count}>({shared} + {at})" if count > 1 else f"{shared}[{at}]"
        self.functions.add("gathered")
        return f"gathered<{count}>({shared} + {at})" + ("" if count > 1 else ".at[0]")

    def tile_row(self) -> str:
        """The tile's row that is row m of the band."""
        return "band * band_rows + m" if self.tile.bands > 1 else "m"

    def group_sums(self, output_group: OutputGroup) -> list[str]:
        lines = []
        for place, product in enumerate(output_group.contractions):
            at = "m * sums_stride + n"
            call = self.gather(f"{self.sum_name(place)}_shared", at, output_group.vector)
            if output_group.vector > 1:
                lines.append(f"const Vec<{self.sum_type}, {output_group.vector}> {product.value}_total = {call};")
            else:
                lines.append(f"const {self.sum_type} {product.value} = {self.of_group(call)};")
        return lines

    def group_row(self, output_group: OutputGroup) -> list[str]:
        lines = self.row_values(output_group, asked(output_group) | {s.value for s in output_group.row_stores})
        for row_store in output_group.row_stores:
            stored = self.stored(row_store)
            lines.append(f"if (col == 0) *({self.at(row_store.access)}) = {stored};")
        for load in output_group.loads:
            if load.when == "now":
                lines.append(self.declared(load, output_group.vector))
        lines += [f"{self.vec(s.access.dtype, output_group.vector)} {s.access.name}_vec;" for s in output_group.stores]
        return lines

    def group_body(self, output_group: OutputGroup, each: Iterable[Load]) -> list[str]:
        lines = []
        if self.plan.run:
            lines = self.element_sums(output_group, bool(output_group.steps))
        elif output_group.vector > 1:
            lines = [
                f"const {self.sum_type} {p.value} = {self.of_group(f'{p.value}_total.at[j]')};"
                for p in output_group.contractions
            ]

        def read(load: Load) -> str:
            place = "_vec[v]" if load in each else "_vec"
            return self.to_value(load.access.dtype, f"{load.access.name}{place}.at[j]")

        def write(store: Store) -> str:
            return f"{store.access.name}_vec.at[j] = {self.stored(store)};"

        return [*lines, *element_lines(output_group, Element(read, write), self)]


def alone(mn: str) -> str:
    """The warp's first row or column, where nothing is added to it."""
    return mn.removesuffix(" + ") or "0"
