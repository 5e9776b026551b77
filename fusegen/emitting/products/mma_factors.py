"""How the factors of a GemmPlan get into shared memory, in the words of one dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusegen.emitting.body import Element, element_lines
from fusegen.emitting.dialect import UNROLL, VALUE_TYPES, ZEROS, all_of
from fusegen.emitting.loops import each_line
from fusegen.emitting.products.mma_words import GemmWords, Own
from fusegen.language.types import f32
from fusegen.planner.model import Access, Load
from fusegen.planner.pieces import stride_name
from fusegen.planner.products.parts import Operand, RowsAt


def times(factor: int) -> str:
    return f" * {factor}" if factor > 1 else ""


class FactorSpeller(GemmWords):
    """What each thread brings of a slice, and what it makes of it on the way."""

    def k_part_offset(self) -> str:
        return f"{self.number} * tile_k + " if self.tile.split_k > 1 else ""

    def factor(self, own: Own) -> Mapping[str, Any]:
        """One factor's share of a slice: how the thread finds it, and what it asks for."""
        plan, f, name = self.plan, own.factor, own.name
        slice_k_threads, chunk = plan.slice_k_threads, plan.chunk
        turned = plan.turned(f)
        beside = turned or chunk  # elements that a thread loads together
        chunks = (self.tile.k if f.along else own.extent) // beside  # side by side in memory
        passes = chunk if turned else own.extent * self.tile.k // chunk // slice_k_threads
        jump = 1 if turned else slice_k_threads // chunks  # of the other axis, from one pass to the next
        mn, k = own.mn, own.k
        stride = f"{name}_stride" if f.mn == "cols" and self.several else f.stride
        pointer = f"{name}_ptr" if f.mn == "cols" and self.several else f.pointer
        thread = self.thread if "%" not in self.thread else "lane"
        dealt = f.mn == "cols" and plan.run > 0
        brought = f"{name}_col" if dealt else mn
        far = self.dealt_passes(jump) if dealt else f"v * {jump}" if jump > 1 else "v"
        named = passes > 1 and "/" in far  # a place of its own: it is asked for twice
        outer, inner = (mn, k) if f.along else (k, mn)
        origin = "row0" if f.mn == "rows" else "col0"
        batch = "".join(f" + {index} * {text}" for index, text in self.batch_strides(own))
        if f.step:
            first = f"({self.k_part_offset()}{k})" if self.k_part_offset() else k
            start = f"({origin} + {brought}) * {stride} + {first} * {name}_step"
        elif f.along:
            start = f"({origin} + {brought}) * {stride} + {self.k_part_offset()}{k}"
        else:
            start = f"({self.k_part_offset()}{k}) * {stride} + {origin} + {mn}"
        pass_text = f" + {far if turned else f'v * {jump}'}" if passes > 1 else ""
        at_mn, at_k = (f"{mn}{pass_text}", k) if f.along else (mn, f"{k}{pass_text}")
        away = "away" if named else far
        at_brought = f"{brought} + {away}" if f.along and passes > 1 else brought if f.along else mn
        no_tile = f.mn == "rows" and f is not plan.left[0]  # what the left operand is computed from
        affine = jump % plan.swizzle_rows == 0 and f.tile_along == f.along and not no_tile
        place = self.place(own, at_mn, at_k)
        if affine:
            place = f"{name}_to" + (" + v * at_once" if passes > 1 else "")
            self.sizes.update(["at_once"] * (passes > 1))
        to, hidden = f"({place}) * {self.size}" if affine or own.at else f"{place} * {self.size}", []
        if f.copied and affine and self.plan.prologue is None:
            place = f"{name}_to" + (f" + v * (at_once * {self.size})" if passes > 1 else "")
            what = "stays in a register: the compiler would make it anew for each copy"
            to, hidden = place, [f'asm volatile("" : "+r"({name}_to));  // {what}']
        first_outer = f"{thread} / {chunks} * {chunk}" if turned else f"{thread} / {chunks}"
        lines = [f"const int {outer} = {first_outer}, {inner} = {thread} % {chunks}{times(beside)};"]
        if dealt:
            lines.append(f"// the column that lies in row {mn} of the tile")
            lines.append(f"const int {brought} = {self.dealt(mn)};")
        pointers, starts = self.pointers_to(own, passes, f"{pointer}{batch} + {start}", f"({far}) * {stride}")
        advance = "split_k * tile_k" if self.tile.split_k > 1 else "tile_k"
        if not f.along or f.step:
            advance = f"{advance} * {f'{name}_step' if f.step else stride}"
        copy = "copy_evict_first" if f.evict_first else "copy_chunk"
        from_here = f"{name}_from" + (f" + {away} * {stride}" if passes > 1 else "")
        others = {}
        if f.rows_at:
            at_first = f"{self.k_part_offset()}{k}"
            pointers, starts = self.rows_found(own, f.rows_at, f"{origin} + {brought}{pass_text}", at_first, passes)
            from_here = f"{name}_from[v]"
            others["forward"] = each_line([f"{name}_from[v] += {advance};"], "v", passes)
        load = (
            f"load_strided({from_here}, {name}_step, %s)"
            if f.step
            else f"load_beside<{min(f.width, turned)}, {turned}>({from_here}, %s)"
            if turned
            else f"load_chunk<{f.width}>({from_here}, %s)"
        )
        count = self.count(own, at_brought, at_k, beside)
        if f.copied:
            self.functions.add(copy)
        else:
            self.functions.add("load_strided" if f.step else "load_beside" if turned else "load_chunk")
        return {
            "name": name,
            "own": own,
            "copied": f.copied,
            "prepared": not f.copied or (f is self.plan.left[0] and self.plan.prologue is not None),
            "function": copy if f.evict_first else f"{copy}<{f.width}>",
            "width": f.width,
            "passes": passes,
            "prepare_passes": turned or passes,
            "held": beside,
            "at_mn": at_mn,
            "at_k": at_k,
            "declares": [
                *lines,
                *pointers,
                *([] if self.tile.persistent else starts),
                *([f"const int {name}_to = {self.place(own, mn, k)};"] if affine and not hidden else []),
                *([f"unsigned {name}_to = ({self.place(own, mn, k)}) * {self.size};", *hidden] if hidden else []),
            ],
            "starts": starts,
            "place": place,
            "to": to,
            "away": f"const int away = {far};  // columns from the first" if named else "",
            "from": from_here,
            "load": load % count,
            "whole_load": load % self.count(own, at_brought, at_k, beside, plan.whole_ends),
            "count": count,
            "advance": advance,
            **others,
        }

    def rows_found(
        self, own: Own, rows_at: RowsAt, row: str, first: str, passes: int
    ) -> tuple[list[str], list[str]]:  # fmt: skip
        """Where the thread reads rows that an index names, declared and set; nothing where it names none."""
        f, name = own.factor, own.name
        declared = [
            f"const {self.ctype(f.access.dtype)}* {name}_from[{passes}];",
            f"bool {name}_found[{passes}];  // else there is no such row, and its elements are 0",
        ]
        index, loads = self.argument(rows_at.index), []
        for load in rows_at.loads:
            read = self.to_value(load.access.dtype, f"*({self.at(load.access, row=f'{name}_row')})")
            loads.append(self.define(load.value, load.dtype, f"inside ? {read} : {ZEROS[load.dtype]}"))
        lines = [
            f"const long long {name}_row = {row};",
            f"const bool inside = {name}_row < {self.rows_end};",
            *loads,
            *self.statements(rows_at.body),
            f"{name}_found[v] = inside && {index} >= 0 && {index} < {rows_at.count};",
            f"{name}_from[v] = {f.pointer} + ({name}_found[v] ? {index} : 0) * {f.stride} + {first};",
        ]
        found = each_line(lines, "v", passes)
        return declared, found if passes > 1 else ["{", *(f"  {line}" for line in found), "}"]

    def pointers_to(self, own: Own, passes: int, first: str, far: str) -> tuple[list[str], list[str]]:
        """Where the thread reads, declared and set: its first chunk, or where copies are interleaved each of them,
        since to make an address costs two instructions, and on the way from slice to slice of a circle nothing."""
        ctype, name = f"const {self.ctype(own.factor.access.dtype)}*", f"{own.name}_from"
        if not self.plan.tile.persistent:
            return [f"{ctype} {name} = {first};"], []
        from_each = first + (f" + {far}" if passes > 1 else "")
        return [f"{ctype} {name}[{passes}];"], each_line([f"{name}[v] = {from_each};"], "v", passes)

    def number_chunks(self, factors: list[dict[str, Any]]) -> None:
        """The thread's chunks of a slice are counted through all factors."""
        before = 0
        for f in factors:
            end = before + f["passes"]
            f["numbered"] = f"{before} <= number && number < {end}" if before else f"number < {end}"
            f["before"] = before
            f["away_used"] = f["away"] and "away" in f["count"]
            before = end

    def dealt(self, row: str) -> str:
        """The column that lies in a row of a right factor's tile: neighbours are dealt out to one lane's rows of all
        fragments. A sum of columns that differ in other bits is the column of the sum."""
        run, lanes = self.plan.run, self.plan.atom.fragment.lane_cols
        return f"{row} / warp_cols * warp_cols + {row} % {lanes} * {run} + {row} % warp_cols / {lanes}"

    def dealt_passes(self, jump: int) -> str:
        """The same of row v * `jump`."""
        cols, lanes, row = self.tile.warp_cols, self.plan.atom.fragment.lane_cols, f"v * {jump}"
        if jump % cols == 0:
            return row
        near = f"{row} / warp_cols * warp_cols + {row} % warp_cols / {lanes}"
        return near if jump % lanes == 0 else self.dealt(row)

    def batch_strides(self, own: Own) -> list[tuple[str, str]]:
        if own.factor.mn == "cols" and self.several:
            return [(index, f"{own.name}_batch_{i}") for i, (index, _) in enumerate(own.factor.batch)]
        return list(own.factor.batch)

    def place(self, own: Own, mn: str, k: str) -> str:
        """Elements from the start of a slice to one of the factor's."""
        offset = f"{own.at} + " if own.at else ""
        chunk = self.plan.chunk
        if own.factor.tile_along:
            self.functions.add("place")
            return f"{offset}place<{self.tile.k // chunk}>({mn}, {k})"
        self.functions.add(self.place_across)
        return f"{offset}{self.place_across}<{own.extent // chunk}>({k}, {mn})"

    def count(self, own: Own, mn: str, k: str, most: int, whole: Sequence[str] = ()) -> str:
        """How many elements there are of those that are loaded together, `most` at most, of a slice behind which the
        ends lie that are `whole`."""
        f, tests, partial = own.factor, [], ""
        if f.mn == "rows":
            if f.rows_at:
                tests.append(f"{own.name}_found[v]")
            elif "rows" not in whole:
                tests += [f"{mn} < rows_here"] if f.along else []
                partial = "" if f.along else f"rows_here - {mn}"
        elif self.cols_ragged() and "cols" not in whole:
            if f.along or all(s.cols % self.plan.chunk == 0 for s in self.plan.output_groups):
                tests.append(f"col0 + {mn} < cols")
            else:
                partial = f"cols - (col0 + {mn})"
        if not self.plan.even and "k" not in whole:
            if not f.along or (self.plan.k % self.plan.chunk == 0 and not self.plan.inner_segments):
                tests.append(f"k_at + {k} < full_k")
            else:
                partial = f"full_k - (k_at + {k})"
        text = partial or str(most)
        if partial and not self.plan.turned(f):  # else `load_beside` takes any number
            self.functions.add("within")
            text = f"within({partial})"
        return f"{all_of(*tests)} ? {text} : 0" if tests else text

    def fetch_ways(self) -> list[Mapping[str, Any]]:
        """How a slice is brought through registers: each vector by a test of its own, or, where none of the ends that
        the plan names lies inside of it, without these."""
        tested = {"head": "", "load": "load", "indent": 0}
        if not self.plan.whole_ends:
            return [tested]
        behind = {
            "rows": "rows_here == tile_rows",
            "cols": "col0 + tile_cols <= cols",
            "k": "k_at + tile_k <= full_k",
        }
        head = f"if ({all_of(*(behind[end] for end in self.plan.whole_ends))}) {{  // no vector is tested for an end"
        return [{"head": head, "load": "whole_load", "indent": 2}, {**tested, "head": "} else {", "indent": 2}]

    def k_text(self) -> str:
        if self.tile.split_k > 1:
            return f"(step * split_k + {self.number}) * tile_k"
        return "step * tile_k"

    # ---- the prologue

    def prepare(self, found: Mapping[str, Any]) -> list[str]:
        """What the thread does with its chunk v before others may see it."""
        own: Own = found["own"]
        f, chunk = own.factor, self.plan.chunk
        held = self.multiplied(f, f"{own.name}_held[v]")
        if f.mn == "rows" and self.plan.prologue is not None:
            return self.prologue(found) if f is self.plan.left[0] else []
        if f.tile_along == f.along:
            self.functions.add("store")
            return [f"store<{chunk}>(slice + {found['place']}, {held});"]
        # the tile lies the other way round, so that neighbours in k can be read together
        mn, k = found["at_mn"], found["at_k"]
        if turned := self.plan.turned(f):
            self.functions.add("store")
            column = f"{own.mn} + v" if turned > 1 else own.mn
            return [
                f"{self.vec(self.plan.dtype, chunk)} {own.name}_vec;  // of a column",
                UNROLL,
                f"for (int i = 0; i < {chunk}; ++i) {own.name}_vec.at[i] = {own.name}_held[i].at[v];",
                f"store<{chunk}>(slice + {self.place(own, column, own.k)}, {self.multiplied(f, f'{own.name}_vec')});",
            ]
        one = self.place(own, mn if f.along else f"{mn} + j", f"{k} + j" if f.along else k)
        lines, name = [], held
        if held != f"{own.name}_held[v]":
            name = f"{own.name}_vec"
            lines.append(f"const {self.vec(self.plan.dtype, chunk)} {name} = {held};")
        return [*lines, UNROLL, f"for (int j = 0; j < {chunk}; ++j) slice[{one}] = {name}.at[j];"]

    def multiplied(self, f: Operand, chunk: str) -> str:
        """A factor's chunk as it is stored for matrix instructions that take its type as another one: once, not as each
        warp loads it, as where copies bring it past the registers."""
        if self.plan.halves[f.mn == "cols"]:
            self.functions.add("halves")
            return f"halves({chunk})"
        if self.plan.dtype is not f32 or self.plan.target.multiplies_f32 or self.plan.atom.kind == "mma":
            return chunk
        self.functions.add("to_tf32")
        return f"to_tf32({chunk})"

    def prologue(self, found: Mapping[str, Any]) -> list[str]:
        prologue, own, chunk = self.plan.prologue, found["own"], self.plan.chunk
        assert prologue is not None
        lines, name = [], own.name
        vec = self.vec(self.plan.dtype, chunk)
        if own.factor.copied:
            lines.append(f"{self.element}* const at = slice + {found['place']};")
            self.functions.add("load")
            lines.append(f"{vec} {name}_vec = load<{chunk}>(at);")
        elif prologue.changes:
            lines.append(f"{vec} {name}_vec;")
        lines += [self.define(r.value, r.dtype, f"{r.access.name}_held[v]") for r in prologue.row_loads]
        lines += self.statements(prologue.row_body)
        if not self.plan.even:
            lines.append(f"const int left = full_k - (k_at + {own.k});")
        lines += [UNROLL, f"for (int j = 0; j < {chunk}; ++j) {{"]

        def read(load: Load) -> str:
            held = "_held" if load in prologue.vectors else "_vec" if own.factor.copied else "_held[v]"
            return self.to_value(load.access.dtype, f"{load.access.name}{held}.at[j]")

        lines += [f"  {line}" for line in element_lines(replace(prologue, reductions=()), Element(read), self)]
        inside = "" if self.plan.even else "j < left"
        if prologue.changes:
            stored = self.to_storage(self.plan.dtype, prologue.value)
            lines.append(f"  {name}_vec.at[j] = {f'{inside} ? {stored} : {self.element}{{}}' if inside else stored};")
        for r in prologue.reductions:
            lines.append(f"  {f'if ({inside}) ' if inside else ''}{r.part}[v] += {r.value};")
        lines.append("}")
        if prologue.changes or not own.factor.copied:
            self.functions.add("store")
        if prologue.changes:
            to = "at" if own.factor.copied else "slice + " + found["place"]
            lines.append(f"store<{chunk}>({to}, {self.multiplied(own.factor, f'{name}_vec')});")
        elif not own.factor.copied:
            held = self.multiplied(own.factor, f"{name}_held[v]")
            lines.append(f"store<{chunk}>(slice + {found['place']}, {held});")
        return lines

    def row_held(self, found: Mapping[str, Any]) -> list[str]:
        """Values [.., M, 1] of the thread's rows, and its parts of the statistics."""
        prologue = self.plan.prologue
        if prologue is None:
            return []
        lines = [f"float {r.part}[{found['passes']}] = {{}};" for r in prologue.reductions]
        row = f"row0 + {found['at_mn']}"
        for load in prologue.row_loads:
            name = load.access.name
            value = self.to_value(load.access.dtype, f"*({self.at(load.access, row=f'({row})')})")
            lines += [
                f"{VALUE_TYPES[load.dtype]} {name}_held[{found['passes']}];",
                *each_line(
                    [f"{name}_held[v] = {row} < {self.rows_end} ? {value} : {ZEROS[load.dtype]};"], "v", found["passes"]
                ),
            ]
        return lines

    def vectors(self) -> list[Mapping[str, Any]]:
        """Vectors [K] of the prologue, which a thread reads one slice ahead."""
        prologue = self.plan.prologue
        if prologue is None:
            return []
        own = self.owns[0]
        found: list[Mapping[str, Any]] = []
        for load in prologue.vectors:
            access = load.access
            count = str(self.plan.chunk)
            if not self.plan.even:
                self.functions.add("within")
                count = f"within(full_k - (k_at + {own.k}))"
            found.append(
                {
                    "held": f"{access.name}_held",
                    "type": self.vec(access.dtype, self.plan.chunk),
                    "width": access.vector if access.mode == "vector" else 1,
                    "from": f"{self.pointers[access.tensor]}{self.batch_text(access)} + k_at + {own.k}",
                    "count": count,
                }
            )
        return found

    def batch_text(self, access: Access) -> str:
        dims = self.plan.row_dims
        return "".join(f" + {dims[i].index} * {stride_name(access, dims, i)}" for i in access.strided)
