"""A WgmmaScoresPlan in the words of CUDA and PTX: places, boxes, and operands that have an element for each score.

Nothing is decided here. Whatever could be wrong is a field of the plan; this turns fields into C++.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusegen.emitting.attention.scores import ScoresSpeller
from fusegen.language.types import bf16
from fusegen.planner.attention.parts import Pages
from fusegen.planner.attention.wgmma import LINE_ELEMENTS, Boxes, WgmmaScoresPlan
from fusegen.planner.model import Access, Load


class WgmmaScoresSpeller(ScoresSpeller):
    """What templates of tiles of scores by wgmma share."""

    plan: WgmmaScoresPlan
    of_heads = "keys and values"  # what is read of each head

    def __init__(self, plan: WgmmaScoresPlan) -> None:
        super().__init__(plan)
        self.moved: set[tuple[str, int]] = set()  # functions that move boxes, and of how many axes
        self.pairs: set[str] = set()  # the types that pairs are rounded to

    # ---- a thread's two rows

    @property
    def slot(self) -> str:
        return "i / 2 % 2"

    # ---- operands that have an element for each score

    def operand(self, load: Load) -> str:
        return self.to_value(load.access.dtype, f"{load.access.name}_ahead[i / 2].at[i % 2]")

    def ahead(self) -> list[Mapping[str, str]]:
        """How pairs of a tile's elements are read while its scores are multiplied."""
        made: list[Mapping[str, str]] = []
        for load in self.element_loads:
            access = load.access
            last = "keys - 2" if access.mode == "vector" else "keys - 1"
            col = f"(col < keys ? col : {last})" if self.plan.ragged else "col"
            row = f"{self.here(access.name)}[n % 2]" if self.by_row(access) else self.here(access.name)
            if access.mode == "vector":
                value = f"{self.moving('load', access)}<2>({row} + {col})"
            else:
                other = "(col + 1 < keys ? col + 1 : keys - 1)" if self.plan.ragged else "col + 1"
                value = f"{self.vec(access.dtype, 2)}{{{row}[{col}], {row}[{other}]}}"
            made.append({"type": self.vec(access.dtype, 2), "name": f"{access.name}_ahead", "value": value})
        return made

    # ---- the block's place

    def place(self) -> list[str]:
        plan = self.plan
        if plan.heads_together == 1:
            return super().place()
        *others, rows = plan.row_dims
        lines = [f"const long long rows = {rows.extent};"] if rows.extent != "rows" else []
        heads = " * ".join(dim.extent for dim in others)
        lines += [
            "const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);",
            f"// {plan.heads_together} heads at a time, whose {self.of_heads} the L2 cache holds",
            "// the last rows of all of them first: they need the most keys",
            f"const unsigned heads = static_cast<unsigned>({heads});",
            f"constexpr unsigned together = {plan.heads_together};",
            "const unsigned first_head = blockIdx.x / (together * tiles_down) * together;",
            "const unsigned heads_here = heads - first_head < together ? heads - first_head : together;",
            "const unsigned inside = blockIdx.x % (together * tiles_down);",
        ]
        one = len(others) == 1
        head = others[0].index if one else "head"
        lines.append(f"const long long {head} = first_head + inside % heads_here;")
        for place, dim in enumerate(() if one else others):
            inner = " / ".join(["head", *(d.extent for d in reversed(others[place + 1 :]))])
            lines.append(f"const long long {dim.index} = {inner}" + (f" % {dim.extent};" if place else ";"))
        lines += [
            "const long long row0 = static_cast<long long>(tiles_down - 1 - inside / heads_here) * tile_rows;",
            "const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;",
        ]
        return lines + self.page_starts()

    # ---- boxes

    def coordinates(self, found: Boxes, column: int, line: str) -> str:
        others = [f"static_cast<int>({index})" for index in found.others]
        return ", ".join([str(column * LINE_ELEMENTS), line, *others])

    def copies(self, found: Boxes, what: str, ring: str, arrived: str, line: str) -> list[str]:
        """One tensor copy for each 64 columns."""
        self.moved.add(("copy_box", found.axes))
        if found.pages is not None:
            return self.page_copies(found, what, ring, arrived)
        return [
            f"copy_box({ring}{segment(f'{what}_segment', s)}, {found.name}_map, {arrived}, "
            f"{self.coordinates(found, s, line)});"
            for s in range(found.segments)
        ]

    # ---- pages

    @property
    def paged(self) -> Mapping[str, Pages]:
        matrices = (self.plan.key_boxes, getattr(self.plan, "value_boxes", None))
        return {m.name: m.pages for m in matrices if m is not None and m.pages is not None}

    def page_copies(self, found: Boxes, what: str, ring: str, arrived: str) -> list[str]:
        """One tensor copy for each page of a tile, or the part of one that is a tile, and each 64 columns."""
        several = found.rows // found.box_rows
        line = "0" if several > 1 else f"key0 % {found.name}_page_rows"
        page = f"{self.numbers_of(found)}[page]" if several > 1 else self.numbers_of(found)
        lines = []
        for s in range(found.segments):
            at = f"{ring}{segment(f'{what}_segment', s)}" + (f" + page * {what}_page" if several > 1 else "")
            lines.append(f"copy_box({at}, {found.name}_map, {arrived}, {self.coordinates(found, s, line)}, {page});")
        if several == 1:
            return lines
        head = f"for (int page = 0; page < {what}_pages; ++page)"
        if len(lines) == 1:
            return ["#pragma unroll", f"{head} {lines[0]}"]
        return ["#pragma unroll", f"{head} {{", *(f"  {each}" for each in lines), "}"]

    def numbers_of(self, found: Boxes) -> str:
        """The numbers of a tile's pages: those of the keys where values lie in the same ones."""
        same = found.pages == self.plan.key_boxes.pages
        several = found.rows > found.box_rows
        return f"page{'s' if several else ''}_of_{'keys' if same else 'values'}"

    def named_pages(self, found: Boxes, what: str) -> list[str]:
        """The lines that read which pages hold a tile, before there is room for it; none where others have."""
        if found.pages is None or (what == "value" and found.pages == self.plan.key_boxes.pages):
            return []
        here, rows, name = self.pages_here(found.pages), f"{found.name}_page_rows", self.numbers_of(found)
        if found.rows == found.box_rows:
            named = f"{here}[key0 / {rows}]"
            return [f"const int {name} = {f'key0 < keys ? {named} : -1' if self.plan.ragged else named};"]
        key = f"key0 + page * {rows}"
        named = f"{here}[key0 / {rows} + page]"
        text = f"{key} < keys ? {named} : -1" if self.plan.ragged else named
        return [
            f"int {name}[{what}_pages];",
            "#pragma unroll",
            f"for (int page = 0; page < {what}_pages; ++page) {name}[page] = {text};",
        ]

    def box_sizes(self) -> list[str]:
        """Of pages: rows of one, how many a tile has, and bytes of 64 columns of one."""
        plan = self.plan
        lines = self.page_sizes()
        for what, found in (("key", plan.key_boxes), ("value", getattr(plan, "value_boxes", None))):
            if found is not None and found.pages is not None and found.rows > found.box_rows:
                rows = f"{found.name}_page_rows"
                lines.append(f"constexpr int {what}_pages = tile_keys / {rows}, {what}_page = {rows} * line_bytes;")
        if len(lines) > len(self.paged):
            lines.insert(len(self.paged), "// pages of a tile, and bytes of 64 columns of one")
        return lines

    # ---- elements

    def rounded(self, access: Access) -> str:
        kind = "pair_bf16" if access.dtype is bf16 else "pair_f16"
        self.pairs.add(kind)
        return f"rounded_{kind}({access.name}_pair[0], {access.name}_pair[1])"


def segment(name: str, number: int) -> str:
    """What is added to an address for its 64 columns of that number."""
    return f" + {f'{number} * ' if number > 1 else ''}{name}" if number else ""


def times(found: Boxes) -> str:
    return f"{found.segments} * " if found.segments > 1 else ""
