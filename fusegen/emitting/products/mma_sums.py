"""A GemmPlan's fragments, sums and epilogue in the words of one dialect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fusegen.emitting.body import Element, element_lines
from fusegen.emitting.dialect import UNROLL, all_of
from fusegen.emitting.products.mma_words import GemmWords, Own
from fusegen.language.types import f32
from fusegen.planner.model import Load, Store
from fusegen.planner.products.parts import Span

# What a fragment function loads, of `deep` elements along the depth, and where in a tile the first one lies that lane
# `lane` gives the address of. The instruction's rows are the right operand's, 16 of them; of its columns, the left
# operand's rows, it has 8, so a fragment serves two. What ldmatrix gives a lane are 4 bytes of a chunk: two halves, or
# one f32, which it can't transpose.
ALONG, ACROSS = "a tile whose rows run along the depth", "a tile whose rows run along the side: transposed on the way"
FRAGMENTS: Mapping[str, tuple[str, str]] = {
    "load_right": (f"16 x {{deep}} elements of {ALONG}", "{side} + lane % 16, lane / 16 * {chunk}"),
    "load_right_across": (f"16 x {{deep}} elements of {ACROSS}", "lane % 8 + lane / 16 * 8, {side} + lane / 8 % 2 * 8"),
    "load_left": (
        f"twice 8 x {{deep}} elements of {ALONG}",
        "{side} + lane % 8 + lane / 16 * 8, lane / 8 % 2 * {chunk}",
    ),
    "load_left_across": (f"twice 8 x {{deep}} elements of {ACROSS}", "lane % 16, {side} + lane / 16 * 8"),
    "load_left_half": (f"8 x {{deep}} elements of {ALONG}", "{side} + lane % 8, lane / 8 % 2 * {chunk}"),
    "load_left_half_across": (f"8 x {{deep}} elements of {ACROSS}", "lane % 16, {side}"),
}
# Of f32 that is to be transposed, where a lane's own first element lies, and where the others do: 8 further along the
# side, which turns a bit of the address, and 4 lines further in depth.
WORD_PLACE = "lane % 4, {side} + lane / 4"
WORDS: Mapping[str, tuple[int, str]] = {
    "load_right_across": (4, "(address ^ i % 2 * 32) + i / 2 * 4 * Line"),
    "load_left_across": (4, "(address ^ i / 2 * 32) + i % 2 * 4 * Line"),
    "load_left_half_across": (2, "address + i * 4 * Line"),
}


class SumSpeller(GemmWords):
    """What warps multiply, where their sums go, and what comes of these."""

    def fragments(self) -> list[dict[str, Any]]:
        plan, tile = self.plan, self.tile
        mma = plan.atom.kind == "mma"
        found: list[dict[str, Any]] = []
        for own in [self.owns[0], *self.owns[len(plan.left) :]]:
            rows = own.factor.side == "rows"
            extent = tile.warp_rows if rows else tile.warp_cols
            unit = plan.atom.rows if rows else plan.atom.cols
            half = mma and extent == 8
            unit = 16 if mma and not half else unit
            along = own.factor.tile_along
            kind = "_".join(
                filter(None, ["load", "left" if rows else "right", "half" if half else "", "" if along else "across"])
            )
            chunks = (tile.depth if along else own.extent) // plan.chunk
            side = f"warp_{'row' if rows else 'col'}"
            offset = f" + {own.offset}" if own.offset else ""
            found.append(
                {
                    "name": own.name,
                    "type": "unsigned" if mma else "Fragment",
                    "count": extent // unit,
                    **(
                        self.matrix(own, kind, side, chunks, unit)
                        if mma
                        else {
                            "load": f"load_fragment<{chunks}>",
                            "lane": "",
                            "at": f"slice{offset} + i * {unit} * {tile.depth}, {side}, k * {plan.atom.depth}",
                        }
                    ),
                }
            )
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

    def matrix(self, own: Own, kind: str, side: str, chunks: int, unit: int) -> Mapping[str, str]:
        """The address that a lane gives for fragment i of step k, in bytes.

        Steps along a line turn bits of it that whole lines leave alone, so that no sum has to be made again: a line is
        a power of two of bytes, and so is what a warp has of it, and slices begin at multiples of either. They are
        turned before the slice's place is added, which is the same for all lanes and so costs no instruction of a lane:
        4096^3 took 272 us on an H200, not 278.
        """
        plan, size, along = self.plan, self.size, own.factor.tile_along
        along_line, to_line = plan.atom.depth * size, own.extent * size
        if along:
            turned, added = f"k * {along_line}", f"i * {unit * self.tile.depth * size}"
        else:
            turned, added = f"i * {unit * size}", f"k * {plan.atom.depth * to_line}"
        offset = f" + {own.offset * size}" if own.offset else ""
        words = plan.dtype is f32 and not along
        place = (WORD_PLACE if words else FRAGMENTS[kind][1]).format(side=side, chunk=plan.chunk)
        named = "place" if along else self.place_across
        return {
            "function": kind,
            "load": f"{kind}<{to_line}>" if words else kind,
            "lane": f"const unsigned {own.name}_lane = ring_at{offset} + {named}<{chunks}>({place}) * {size};",
            "at": f"({own.name}_lane ^ ({turned})) + slice + {added}",
        }

    def fragment_functions(self, fragments: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The functions of the prelude that load fragments, one for each way that a tile lies."""
        if self.plan.atom.kind != "mma":
            return []
        words = self.plan.dtype is f32
        return [
            {
                "name": name,
                "what": FRAGMENTS[name][0].format(deep=self.plan.atom.depth),
                "template": "template <int Line>  // bytes" if words and name in WORDS else "",
                "body": self.fragment_body(name),
            }
            for name in dict.fromkeys(f["function"] for f in fragments)
        ]

    def fragment_body(self, name: str) -> Iterable[str]:
        if self.plan.dtype is not f32:
            return self.spelling.functions[matrix_function(name)]
        self.functions.add("to_tf32")
        if name in WORDS:
            self.functions.add("load_word")
            count, place = WORDS[name]
            return [UNROLL, f"for (int i = 0; i < {count}; ++i) to[i] = to_tf32(load_word({place}));"]
        count = 2 if "half" in name else 4
        rounded = [UNROLL, f"for (int i = 0; i < {count}; ++i) to[i] = to_tf32(to[i]);"]
        return [*self.spelling.functions[matrix_function(name)], *rounded]

    def sums(self) -> list[Mapping[str, Any]]:
        plan = self.plan
        size = self.tile.band_rows * plan.sums_stride
        own = f"team * {self.region} + " if self.tile.teams > 1 else ""
        return [
            {
                "name": f"{self.sum_name(place)}_sums",
                "shared": f"{self.sum_name(place)}_shared",
                "shared_at": f" + {place * size}" if place else "",
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
        team = f"team * {self.region} + " if self.tile.teams > 1 else ""
        start = 0 if plan.run else plan.products * self.tile.band_rows * plan.sums_stride
        return [
            {
                "shared": f"{r.results[0]}_shared",
                "shared_at": f" + {start + place * self.tile.rows}",
                "part": r.part,
                "passes": found["passes"],
                "lanes": self.tile.depth // plan.chunk,
                "first": f"{own.depth} == 0",
                "at": f"{team}{found['at_side']}",
            }
            for place, r in enumerate(plan.prologue.reductions)
        ]

    def atom(self) -> Mapping[str, Any]:
        plan, tile, atom = self.plan, self.tile, self.plan.atom
        mma = atom.kind == "mma"
        left, buffer = self.owns[0].name, "k % 2" if tile.spread else "buffer"
        down = tile.warp_rows // atom.rows
        warp_row = "warp_row" if tile.bands == 1 else f"warp_row % {tile.band_rows}"
        if not mma:
            left_text = f"{left}_part[{buffer}][m]"
        elif down == 1:
            left_text = f"{left}_part[{buffer}][0][0], {left}_part[{buffer}][0][1]"
        else:
            left_text = f"{left}_part[{buffer}][m / 2][m % 2 * 2], {left}_part[{buffer}][m / 2][m % 2 * 2 + 1]"
        return {
            "part": atom.kind,
            "alignment": 1024 if mma else 128,  # bits of addresses in lines of up to 512 bytes are turned
            "type": atom.word,
            "builtin": atom.instruction,
            "parts": atom.instructions,
            "fragment_dims": "[4]" if mma else "",
            "body": self.spelling.functions.get(f"mma_{plan.dtype.name}", ()),
            "sums_type": "float" if mma else "Sums",
            "sums_dims": "[4]" if mma else "",
            "across": tile.warp_cols // atom.cols,
            "down": down,
            "left": left_text,
            "row": f"{warp_row} + m * {atom.rows} + {atom.fragment.row_text(('i', 1))}",
            "col": f"warp_col + n * {atom.cols} + {atom.fragment.col_text(('i', 1))}",
        }

    # ---- the epilogue

    def span(self, number: int, span: Span) -> Mapping[str, Any]:
        plan, vector = self.plan, span.vector
        places = self.own_places(span) if plan.run else self.shared_places(span)
        guard = [*places["guard"], "row < rows"]
        if span.cols % self.tile.cols:
            guard.append(f"col < {span.cols}")
        ahead = [load for load in span.loads if load.when == "ahead"]
        each = [load for load in ahead if len(plan.row_dims) - 1 in load.access.strided]
        return {
            **places,
            "test": f"span == {number}" if self.several else "",
            "passes": span.passes,
            "unroll": UNROLL if span.unrolled == span.passes else f"{UNROLL} {span.unrolled}",
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
            "once": [self.load_once(span, load) for load in ahead if load not in each],
            "row": [*([] if plan.run else self.span_sums(span)), *self.span_row(span)],
            "body": self.span_body(span, each),
            "stores": [self.store(store.access, vector) for store in span.stores],
        }

    def shared_places(self, span: Span) -> Mapping[str, Any]:
        """The places (m, n) of a tile that a thread takes in turn from shared memory: threads side by side."""
        plan, tile, vector = self.plan, self.tile, span.vector
        per_row = tile.cols // vector
        places = tile.band_rows * per_row
        at_once = plan.threads * tile.cluster
        first = f"(v * {tile.cluster} + rank)" if tile.cluster > 1 else "v"
        at = f"({first} * {plan.threads} + threadIdx.x)"
        return {
            "fixed": False,
            "m": f"static_cast<int>({at} / {per_row})",
            "n": f"static_cast<int>({at} % {per_row})" + (f" * {vector}" if vector > 1 else ""),
            "guard": [f"m < {tile.band_rows}"] if places % at_once else [],
        }

    def own_places(self, span: Span) -> Mapping[str, Any]:
        """Those of the sums in its registers: a run of columns in two rows of each of the warp's instructions."""
        plan = self.plan
        pieces = plan.run // span.vector
        lane_row, lane_col = plan.atom.fragment.row_text(), plan.atom.fragment.col_text()
        row = f"v / {2 * pieces} * {plan.atom.rows} + {lane_row} + {f'v / {pieces}' if pieces > 1 else 'v'} % 2"
        piece = f" + v % {pieces} * {span.vector}" if pieces > 1 else ""
        return {
            "fixed": pieces == 1,
            "m": f"warp_row + {row}",
            "n": f"warp_col + {lane_col} * {plan.run}{piece}",
            "guard": [],
        }

    def own_sum(self, span: Span) -> str:
        """Which of a product's sums is element j of pass v."""
        pieces = self.plan.run // span.vector
        row = f"v / {pieces} % 2" if pieces > 1 else "v % 2"
        at = "j" if span.vector > 1 else "0"
        at = f"(v % {pieces} * {span.vector} + {at})" if pieces > 1 else at
        return f"[{at} / 2][v / {2 * pieces}][{at} % 2 * 2 + {row}]"

    def load_once(self, span: Span, load: Load) -> str:
        """What all of the thread's rows share."""
        vec, text = self.vec(load.access.dtype, span.vector), self.load(load.access, span.vector)
        if span.cols % self.tile.cols:
            text = f"col < {span.cols} ? {text} : {vec}{{}}"
        return f"const {vec} {load.access.name}_vec = {text};"

    def gather(self, shared: str, at: str, count: int) -> str:
        if count > 1 or self.tile.shares > 1:
            self.functions.add("load")
        if self.tile.shares == 1:
            return f"load<{count}>({shared} + {at})" if count > 1 else f"{shared}[{at}]"
        self.functions.add("gathered")
        return f"gathered<{count}>({shared} + {at})" + ("" if count > 1 else ".at[0]")

    def tile_row(self) -> str:
        """The tile's row that is row m of the band."""
        return f"band * {self.tile.band_rows} + m" if self.tile.bands > 1 else "m"

    def span_sums(self, span: Span) -> list[str]:
        lines = []
        for place, product in enumerate(span.contractions):
            at = f"m * {self.plan.sums_stride} + n"
            call = self.gather(f"{self.sum_name(place)}_shared", at, span.vector)
            ctype = f"Vec<float, {span.vector}>" if span.vector > 1 else "float"
            lines.append(f"const {ctype} {product.value}_total = {call};")
        return lines

    def span_row(self, span: Span) -> list[str]:
        lines = []
        if self.plan.prologue is not None:
            for r in self.plan.prologue.reductions:
                total = self.gather(f"{r.results[0]}_shared", self.tile_row(), 1)
                lines.append(f"const float {r.results[0]} = {total};")
        for load in span.row_loads:
            text = self.to_value(load.access.dtype, f"*({self.at(load.access)})")
            lines.append(self.define(load.value, load.dtype, text))
        lines += self.statements(span.row_body)
        for row_store in span.row_stores:
            stored = self.to_storage(row_store.access.dtype, row_store.value)
            lines.append(f"if (col == 0) *({self.at(row_store.access)}) = {stored};")
        for load in span.loads:
            if load.when == "now":
                vec = self.vec(load.access.dtype, span.vector)
                lines.append(f"const {vec} {load.access.name}_vec = {self.load(load.access, span.vector)};")
        lines += [f"{self.vec(s.access.dtype, span.vector)} {s.access.name}_vec;" for s in span.stores]
        return lines

    def span_body(self, span: Span, each: Iterable[Load]) -> list[str]:
        lines = []
        for place, product in enumerate(span.contractions):
            element = f"{product.value}_total.at[j]" if span.vector > 1 else f"{product.value}_total"
            if self.plan.run:
                element = f"{self.sum_name(place)}_sums{self.own_sum(span)}"
            lines.append(f"const float {product.value} = {element};")

        def read(load: Load) -> str:
            place = "_vec[v]" if load in each else "_vec"
            return self.to_value(load.access.dtype, f"{load.access.name}{place}.at[j]")

        def write(store: Store) -> str:
            return f"{store.access.name}_vec.at[j] = {self.to_storage(store.access.dtype, store.value)};"

        return [*lines, *element_lines(span, Element(read, write), self)]


def matrix_function(name: str) -> str:
    """The target's word for what a fragment function does."""
    return "_".join(filter(None, ["half" if "half" in name else "", "matrix", "across" if "across" in name else ""]))
