"""A ScoresPlan's matrices and places in the words of one dialect: how tiles get into shared memory, who has which rows.

Nothing is decided here. Whatever could be wrong is a field of the plan; this turns fields into C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.attention.words import FEW_KEYS, ScoresWords
from fusegen.emitting.dialect import all_of
from fusegen.language.types import DType
from fusegen.planner.attention.parts import CHUNK, LANE_KEYS, Matrix, Pages
from fusegen.planner.model import Access, Load
from fusegen.planner.pieces import stride_name

LOG2E = "1.44269504f"
WORD_BYTES = 4


class ScoresSpeller(ScoresWords):
    """What templates of kernels over tiles of scores share."""

    def apart(self) -> list[str]:
        """What is said of how far lines in shared memory are apart."""
        if self.plan.key.banks:
            return ["// elements from one line in shared memory to the next: lanes read from different banks at once"]
        return [
            "// elements from one line in shared memory to the next, an odd number of 16 bytes: what is read at once",
            "// of 8 lines lies in different banks",
        ]

    # ---- matrices on their way to shared memory

    def matrix(self, m: Matrix, rows: bool) -> Mapping[str, Any]:
        """How a thread brings its 16 bytes of each line. Where the threads fill whole lines, one chunk lies as many
        lines behind the one before it, and its address differs by what is the same for all threads."""
        plan, name, last = self.plan, m.name, len(self.dims) - 1
        beside = m.padded // CHUNK
        chunks, across = m.lines * beside, self.chunks_of(m)
        strides = [i for i in m.access.strided if not (rows and i == last)]
        base = self.pointers[m.access.tensor] + "".join(
            f" + {self.dims[i].index} * {stride_name(m.access, self.dims, i)}" for i in strides
        )
        pages = m.pages
        ld = f"{name}_ld" if not rows else stride_name(m.access, self.dims, last) if last in m.access.strided else ""
        base += f" + row0 * {ld}" if rows and ld else ""
        jump = plan.threads // beside if plan.threads % beside == 0 else 0
        passes = -(-chunks // plan.threads)
        region = f"{name}_at + " if m is not plan.key else ""
        if jump:
            col, line, lines = f"{name}_col", f"{name}_row", ""
            own = f" + {line} * {ld}" if ld and not pages else ""
            further = f" + v * {jump}" if passes > 1 else ""
            declares = [
                f"const int {line} = threadIdx.x / {across}, {col} = threadIdx.x % {across} * {CHUNK};",
                f"const {self.ctype(m.access.dtype)}* const {name}_from = {base}{own} + {col};",
            ]
            first = (f"(key0{further})" if further else "key0") if not rows else further.removeprefix(" + ")
            source = f"{name}_from" + (f" + {first} * {ld}" if ld and first else "")
            at = line + further
            to = f"{name}_to" + (f" + v * ({jump} * {name}_pitch * 2)" if further else "")
            if m.copied:
                declares.append(f"const unsigned {name}_to = ring_at + ({region}{line} * {name}_pitch + {col}) * 2;")
        else:
            col = at = "at"
            declares = [f"const {self.ctype(m.access.dtype)}* const {name}_from = {base};"]
            lines = (
                f"const int chunk = {'v * threads + ' if passes > 1 else ''}threadIdx.x, "
                f"line = chunk / {across}, at = chunk % {across} * {CHUNK};"
            )
            source = f"{name}_from" + (f" + {'line' if rows else '(key0 + line)'} * {ld}" if ld else "") + " + at"
            line = at = "line"
            to = f"ring_at + ({region}line * {name}_pitch + at) * 2"
        inner = f"({at})" if " " in at else at
        place = self.column_place(m, col, at) if m.across else f"{inner} * {name}_pitch + {col}"
        guard = (f"{at} < {m.lines}" if jump else f"chunk < {chunks}") if chunks % plan.threads else ""
        tests = [f"{at} < rows_here"] if rows else [f"key0 + {at} < keys"] if plan.ragged else []
        found: list[str] = []
        looked_up: list[str] = []
        before = pages is not None and self.pages_first(m, passes)
        if pages is not None:
            looked_up, found, source, tests = self.page_of(m, at, guard, before)
            if not before:
                looked_up, found = [], [*looked_up, *found]
            source += "" if jump else " + at"
        if m.columns != m.padded:
            tests.append(f"{col} < {m.columns}")
        if guard and not m.copied and pages is None:
            tests.append(guard)
        load = "load_codes" if m.coded else "load_chunk"
        self.functions.add("copy_chunk" if m.copied else load)
        if not m.copied and not m.across:
            self.functions.add("store")
        if not m.copied and m.width > 1:
            self.functions.add("load")
        return {
            "name": name,
            "m": m,
            "type": f"Vec<unsigned, {CHUNK // WORD_BYTES}>" if m.coded else self.vec(plan.dtype, CHUNK),
            "widened": self.widened(m),
            "scales": self.scales(m, at, f"{name}_page[v]" if before else f"{name}_page", tests),
            "scaled": self.scaled(m),
            "declares": [*declares, *self.beside_codes(m)],
            "passes": passes,
            "guard": guard,
            "lines": lines,
            "looked_up": looked_up,
            "found": found,
            "copied": f"copy_chunk<{m.width}>",
            "load": f"{load}<{m.width}>",
            "source": source,
            "count": f"{all_of(*tests)} ? {CHUNK} : 0" if tests else str(CHUNK),
            "place": place,
            "to": to,
        }

    def column_place(self, m: Matrix, col: str, key: str) -> str:
        """Where element j behind `col`, of a line's key, lies in shared memory."""
        if not m.dealt:
            return f"({col} + j) * {m.name}_pitch + {key}"
        line = f"(j * {m.padded // CHUNK} + {col} / {CHUNK})"
        moved = f"(({key}) ^ {line} / 8 % 2 * {LANE_KEYS})" if m.alternates else key
        return f"{line} * {m.name}_pitch + {moved}"

    def chunks_of(self, m: Matrix) -> str:
        """How many 16 bytes a line has: by name where they are many."""
        count = m.padded // CHUNK
        return f"{m.name}_chunks" if count > FEW_KEYS else str(count)

    @property
    def chunk_words(self) -> int:
        """The 32-bit words of 16 bytes, where these are loaded as such: where the compiler would take a tested vector
        of halves apart, and every operand allows words. Else 0."""
        plan = self.plan
        matrices = [m for m in (plan.query, plan.key, getattr(plan, "value", None)) if m is not None]
        brought = [m for m in matrices if not (m.copied or m.coded)]
        whole = all(m.width * plan.dtype.bytes >= WORD_BYTES for m in brought)
        return CHUNK * plan.dtype.bytes // WORD_BYTES if whole and self.spelling.tested_loads_wait else 0

    @property
    def codes(self) -> list[Matrix]:
        """Keys and values that lie as numbers of 8 bits."""
        return [m for m in (self.plan.key, getattr(self.plan, "value", None)) if m is not None and m.coded]

    def coded(self, scaled: bool) -> list[DType]:
        """The types in which these lie, of those that are scaled or of the others."""
        return list(dict.fromkeys(m.access.dtype for m in self.codes if bool(m.scaled) is scaled))

    def widening(self) -> list[Mapping[str, Any]]:
        """The functions that make numbers of the factors' type of eight of 8 bits: of two by the target's own
        instructions, where it has such, or of each."""
        made: list[Mapping[str, Any]] = []
        for dtype in self.coded(scaled=False):
            pair = self.spelling.functions.get(f"{self.plan.dtype}_pair_of_{dtype}", ())
            value = "" if pair else self.to_storage(self.plan.dtype, self.code(dtype))
            made.append({"name": f"widened_{dtype}", "pair": pair, "value": value})
        return made

    def scaling(self) -> list[Mapping[str, Any]]:
        """The same, by way of f32, of which something is made before it is rounded."""
        made: list[Mapping[str, Any]] = []
        for dtype in self.coded(scaled=True):
            pair = self.spelling.functions.get(f"f32_pair_of_{dtype}", ())
            value = "" if pair else self.to_storage(self.plan.dtype, f"step({self.code(dtype)})")
            made.append({"name": f"scaled_{dtype}", "pair": pair, "value": value})
        return made

    def code(self, dtype: DType) -> str:
        """Number j of eight that lie in two words, in f32."""
        return self.to_value(dtype, f"static_cast<{self.ctype(dtype)}>(words.at[j / 4] >> j % 4 * 8)")

    def widened(self, m: Matrix) -> str:
        """What becomes of what a thread has brought of a line."""
        if not m.coded:
            return "%s"
        return f"scaled_{m.access.dtype}(%s, scaled)" if m.scaled else f"widened_{m.access.dtype}(%s)"

    # ---- what codes meet

    def beside_codes(self, m: Matrix) -> list[str]:
        """The lines that find what codes meet: where that of the first key lies, or the one value of all keys."""
        lines = []
        for load in m.scaled.row_loads if m.scaled else ():
            access, others = load.access, self.for_others(m, load)
            if load in m.scales:
                ctype = self.ctype(access.dtype)
                lines.append(f"const {ctype}* const {access.name}_from{others} = {self.at(access)};")
            else:
                one = self.to_value(access.dtype, f"*({self.at(access)})")
                lines.append(self.define(f"{access.name}_held{others}", load.dtype, one))
        return lines

    def scales(self, m: Matrix, line: str, page: str, tests: list[str]) -> list[Mapping[str, str]]:
        """How a thread brings what a line's key has one of: its type, where it is held, and its load. `page`: that of
        the line, where there are pages."""
        made: list[Mapping[str, str]] = []
        for load in m.scales:
            self.functions.add("load_one")
            access, others = load.access, self.for_others(m, load)
            place = f"(key0 + {line}) * {access.name}_ld"
            if access.gathered is not None:
                pages = f"({m.name}_there ? {page} : 0) * {access.gathered.stride}"
                place = f"{pages} + {m.name}_key % {m.name}_page_rows * {access.name}_ld"
            made.append(
                {
                    "type": f"Vec<{self.ctype(access.dtype)}, 1>",
                    "held": f"{access.name}_held{others}",
                    "load": f"load_one({access.name}_from{others} + {place}, {all_of(*tests) if tests else 'true'})",
                }
            )
        return made

    def for_others(self, m: Matrix, load: Load) -> str:
        """What is behind the names of what each key has one of, where keys and values both meet it."""
        both = all(each.scaled and load.access in [own.access for own in each.scaled.row_loads] for each in self.codes)
        return f"_{m.name}" if len(self.codes) > 1 and both else ""

    def scaled(self, m: Matrix) -> list[str]:
        """The lines that say what is made of each code of a line, before it is rounded."""
        if m.scaled is None:
            return []
        lines = []
        for load in m.scaled.row_loads:
            one = f"{load.access.name}_held{self.for_others(m, load)}"
            if load in m.scales:
                one = self.to_value(load.access.dtype, f"{one}{'[v]' if self.plan.tile.ahead else ''}.at[0]")
            lines.append(self.define(load.value, load.dtype, one))
        lines += self.statements(m.scaled.row_body)
        lines.append(f"const auto scaled = [&](float {m.scaled.given}) {{")
        lines += [f"  {line}" for line in self.statements(m.scaled.body)]
        return [*lines, f"  return {m.scaled.value};", "};"]

    def pages_first(self, m: Matrix, passes: int) -> bool:
        """Are the pages of all of a thread's lines looked up before the first of them is loaded? Loads come back in
        their order: where each page is waited for, all that was asked for before it is."""
        return not m.copied and self.plan.tile.ahead and passes > 1 and self.spelling.tested_loads_wait

    def page_of(self, m: Matrix, line: str, guard: str, first: bool) -> tuple[list[str], list[str], str, list[str]]:
        """The lines that look up the page of a tile's line, those that find the line in it, where it lies there, and
        the tests whether it does. `guard` tests whether the tile has that line, where threads are more than its chunks;
        `first`: pages are looked up in a loop of their own."""
        assert m.pages is not None
        assert m.access.gathered is not None
        name, found = m.name, m.access.gathered
        key, page = f"{name}_key", f"{name}_page"
        named = f"{self.pages_here(m.pages)}[{key} / {name}_page_rows]"
        is_one = all_of(guard, f"{key} < keys" if self.plan.ragged else "")
        row = f"const int {key} = key0 + {line};"
        looked_up = f"{page} = {f'{is_one} ? {named} : -1' if is_one else named};"
        one = f"{page}[v]" if first else page
        lines = [f"const bool {name}_there = {one} >= 0 && {one} < {found.count};"]
        source = f"{name}_from + ({name}_there ? {one} : 0) * {found.stride} + {key} % {name}_page_rows * {name}_ld"
        if first:
            return [row, looked_up.replace(page, one, 1)], [row, *lines], source, [f"{name}_there"]
        return [row, f"const int {looked_up}"], lines, source, [f"{name}_there"]

    def pages_here(self, pages: Pages) -> str:
        """The numbers of the pages that hold the keys of the block's rows."""
        return self.here(pages.names.name)

    @property
    def paged(self) -> Mapping[str, Pages]:
        """The pages of keys and of values that lie in some, by what a kernel calls these."""
        matrices = (self.plan.key, getattr(self.plan, "value", None))
        return {m.name: m.pages for m in matrices if m is not None and m.pages is not None}

    def page_sizes(self) -> list[str]:
        return [
            f"constexpr int {name}_page_rows = {pages.rows};  // of a page of {name}"
            for name, pages in self.paged.items()
        ]

    def page_starts(self) -> list[str]:
        """Where the numbers of the block's pages begin."""
        names = {pages.names.name: pages.names for pages in self.paged.values()}
        return [f"const int* const {self.here(name)} = {self.at(access)};" for name, access in names.items()]

    def moving(self, what: str, access: Access) -> str:
        name = what if access.mode == "vector" else f"{what}_each"
        self.functions.add(name)
        return name

    # ---- the block's place

    def place(self) -> list[str]:
        plan = self.plan
        *others, rows = plan.row_dims
        lines = [f"const long long rows = {rows.extent};"] if rows.extent != "rows" else []
        tile = "blockIdx.x"
        if others:
            lines.append("const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);")
        if others:
            for place, dim in enumerate(others):
                inner = " / ".join(["blockIdx.x / tiles_down", *(d.extent for d in reversed(others[place + 1 :]))])
                lines.append(f"const long long {dim.index} = {inner}" + (f" % {dim.extent};" if place else ";"))
            tile = "blockIdx.x % tiles_down"
        if plan.longest_first:
            lines.append("// the last rows first: they need the most keys")
            tile = f"tiles_down - 1 - {tile}"
        lines.append(f"const long long row0 = static_cast<long long>({tile}) * tile_rows;")
        lines.append("const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;")
        return lines + self.page_starts()

    def first_lane(self) -> str:
        """The test for one lane of those that share a row: they differ in the lowest bits, or in the highest."""
        steps = self.slot_steps
        return f"lane % {2 * steps[-1]} == 0" if steps[0] == 1 else f"lane < {steps[0]}"
