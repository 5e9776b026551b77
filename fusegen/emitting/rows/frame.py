"""What every part of a row kernel's text asks: types, the thread's place, its rows and columns, and where rows end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusegen.emitting.dialect import Dialect, all_of
from fusegen.language.types import b8
from fusegen.planner.model import Access, Load, RowPlan, Statement, Store
from fusegen.planner.pieces import element_stride_name, stride_name
from fusegen.planner.rows.tails import Turns, guarded, turns_of, whole


class Frame:
    """One plan in the words of one dialect."""

    def __init__(self, plan: RowPlan) -> None:
        last = len(plan.graph.shape) - 2
        row = next((dim.index for dim in plan.row_dims if last in dim.axes), "")
        self.plan = plan
        self.uses_vec = False
        self.sizes: dict[str, str] = {}  # declarations of what the text calls its numbers, by name
        counts = any(node.op.name in ("element_low", "element_high") for node in plan.graph.nodes)
        # the sum from the left: compilers see that vectors of four begin at multiples of four, and draw once for each
        number = f"row * {self.row_size} + {{}}" if counts and not plan.flat else "{}"
        widens = plan.selection is not None
        self.words = Dialect(plan.target.spelling, row_number=row, widens=widens, element_number=number)

    def size(self, name: str, value: object, note: str = "") -> str:
        """A number that addresses are computed with goes by a name, which is declared once."""
        self.sizes[name] = constant(name, value, note)
        return name

    @property
    def index(self) -> str:
        return "long long" if self.plan.flat else "int"

    @property
    def cols(self) -> str:
        return "n" if self.plan.flat else str(self.plan.cols)

    @property
    def row_size(self) -> str:
        """The same in an address."""
        return "n" if self.plan.flat else self.size("cols", self.plan.cols)

    def vec_type(self, access: Access) -> str:
        self.uses_vec = True
        return f"Vec<{self.words.ctype(access.dtype)}, {access.vector * access.together}>"

    def pieces_type(self, access: Access) -> str:
        self.uses_vec = True
        return f"Pieces<{self.words.ctype(access.dtype)}, {access.vector}>"

    def pointer(self, access: Access) -> str:
        """Where the tensor's row starts."""
        own = access.walked or (access.gathered and (access.by_column or access.output))
        return f"{access.stem}_row" if own and not self.plan.flat else f"{access.stem}_ptr"

    def place(self, access: Access, col: str = "col") -> str:
        """Where the element at a column of the tensor's row is."""
        return f"{col} * {element_stride_name(access)}" if access.apart else col

    def group_place(self, access: Access) -> str:
        """Where the element of a thread's group is in the tensor's row."""
        group = f"col / {self.size(f'{access.name}_cols', access.group, 'of a value')}"
        return f"({group}) * {element_stride_name(access)}" if access.apart else group

    def group_lanes(self, size: int) -> int:
        """Neighbouring threads that have a group together."""
        return size // self.plan.tile.vector

    def first_of_group(self, size: int) -> str:
        """One thread a group writes what is one value a group."""
        lanes = self.group_lanes(size)
        return all_of("live" * self.plan.lacks_rows, f"lane % {lanes} == 0" * (lanes > 1))

    def zero(self, access: Access) -> str:
        return "0" if access.dtype.bytes == 1 else f"{self.words.ctype(access.dtype)}{{}}"

    # ---- where a row ends

    def guard(self) -> str:
        """When a vector is worth a look."""
        turns = guarded(self.plan)
        limit = self.cols if self.plan.flat else self.plan.vector_cols
        test = "" if turns is None else in_later_turns(f"col < {limit}", turns)
        return all_of("live" * (self.plan.lacks_rows and not self.plan.stands_in), test)

    def guard_names_col(self) -> bool:
        """Or does it ask for no more than the turn?"""
        turns = guarded(self.plan)
        return turns is not None and not turns.all

    def whole(self) -> str:
        """When every element of a vector lies in the row; empty where they always do."""
        turns = whole(self.plan)
        return "" if turns is None else in_later_turns(f"col + {self.plan.tile.vector} <= {self.cols}", turns)

    def in_last_turns(self, test: str, vectors: int) -> str:
        """A test that no thread passes in the turns whose vectors are among the row's first `vectors`."""
        turns = turns_of(self.plan, vectors).certain
        return all_of(f"v >= {turns}", "" if test == "true" else test) if turns else test

    def ends(self, access: Access) -> str:
        """When what lies behind a row may be behind the whole tensor; empty where nobody looks there."""
        if access.output or access.mode not in ("misaligned", "bulk"):
            return ""
        dims = self.plan.row_dims
        last = [f"({dims[i].extent} - 1) * {stride_name(access, dims, i)}" for i in access.walked]
        if access.gathered:
            last.append(f"({access.gathered.count} - 1) * {access.gathered.stride}")
        reach = (access.vector if access.mode == "misaligned" else 0) + access.vector_bytes // access.dtype.bytes
        return f"{' + '.join([f'{access.name}_ptr', *last])} - {access.name}_row < {reach}"

    # ---- blocks, threads and columns

    def tile_number(self) -> str:
        """The number of the block's tile."""
        return "tile" if self.plan.folded else self.block_number

    @property
    def block_number(self) -> str:
        """The block's number; of one step among several of a launch, that among its own."""
        return "block" if self.plan.joined else "blockIdx.x"

    @property
    def row_blocks(self) -> str:
        return self.size("row_blocks", self.plan.tile.blocks_per_row, "that share a row")

    def tiling(self) -> Mapping[str, str]:
        """How many tiles there are, and how they map to rows."""
        tile = self.plan.tile
        rows = self.size("block_rows", tile.rows_per_block, "that a block takes") if tile.rows_per_block > 1 else ""
        tiles = f"(rows + {rows} - 1) / {rows}" if rows else "rows"
        row = self.tile_number()
        if tile.blocks_per_row > 1:
            tiles, row = f"{tiles} * {self.row_blocks}", f"{row} / {self.row_blocks}"
        if not rows:  # a tile that is a row is called so
            return {"tiles": tiles, "row": row, "counted": "row" if row == "tile" else "tile"}
        wide = row if self.plan.folded else f"static_cast<long long>({row})"
        first = f"{wide} * {rows}"
        own = self.row_in_block()
        return {"tiles": tiles, "rows": rows, "first": first, "own": own, "row": f"{first} + {own}", "counted": "tile"}

    def first_element(self) -> str:
        """Of a thread, in a flat plan."""
        tile = self.plan.tile
        block = "tile" if self.plan.folded else f"static_cast<long long>({self.block_number})"
        cols = self.size("tile_cols", tile.cols, "elements that a block takes")
        return f"{block} * {cols} + threadIdx.x" + (f" * {tile.vector}" if tile.vector > 1 else "")

    def row_in_block(self) -> str:
        """A warp's rows that come together lie as many rows apart as there are warps: in shared memory rows that
        follow one another may begin in the same banks, as those of 127 halves do."""
        tile, warp = self.plan.tile, self.plan.target.warp
        if not self.plan.contiguous_rows or tile.threads_per_row == warp or tile.threads == warp:
            return "threadIdx.x" if tile.threads_per_row == 1 else f"threadIdx.x / {self.row_threads}"
        own = "threadIdx.x % 32" if tile.threads_per_row == 1 else f"threadIdx.x % {warp} / {tile.threads_per_row}"
        return f"{own} * {tile.threads // warp} + threadIdx.x / {warp}"

    def lane(self) -> str:
        """The thread's place among those of its row; empty where the kernel has no use for a name."""
        tile = self.plan.tile
        if self.plan.flat:
            return ""
        if tile.cluster > 1:
            return f"__clusterRelativeBlockRank() * {self.own_threads} + threadIdx.x"
        if tile.threads_per_row == tile.threads:
            return "threadIdx.x"
        if tile.threads_per_row > 1:
            return f"threadIdx.x % {self.row_threads}"
        return "0" if tile.per_thread == 1 or self.start() else ""

    def lane_note(self) -> str:
        tile = self.plan.tile
        if tile.threads_per_row == 1:
            return "a thread takes a row of its own"
        return f"of the {tile.threads_per_row} threads that share a row"

    def start(self) -> str:
        """The thread's first column, where that takes more than its lane."""
        tile = self.plan.tile
        if self.plan.flat or tile.col_tiles == 1:
            return ""
        return f"{self.first_col_of_block()} + {scaled('lane', tile.vector)}"

    def first_col_of_block(self) -> str:
        """Empty where a block takes whole rows."""
        if self.plan.tile.col_tiles == 1:
            return ""
        cols = self.size("tile_cols", self.plan.tile.cols, "that a block takes")
        return f"static_cast<int>({self.tile_number()} % {self.row_blocks}) * {cols}"

    def begins_at_column(self) -> bool:
        """Is that the column of all its passes?"""
        return bool(self.start()) and not self.loops() and not any(p.blocks_of for p in self.plan.passes)

    def first_col(self) -> str:
        """The column of the thread's first vector."""
        tile = self.plan.tile
        if self.plan.flat or self.start():
            return "start"
        return scaled("lane", tile.vector) if tile.threads_per_row > 1 or not self.loops() else "0"

    def col(self) -> str:
        """The column of the thread's vector v."""
        tile = self.plan.tile
        first = self.first_col()
        if tile.per_thread == 1:
            return first
        if first == "start":
            step = scaled(self.row_threads, tile.vector)
            return f"start + v * {self.size('vector_step', step, 'columns from a thread to its next vector')}"
        return scaled(self.vector_place(), tile.vector)

    def vector_place(self) -> str:
        """The number of the thread's vector v in the row."""
        if not self.loops():
            return "lane"
        return f"v * {self.row_threads} + lane" if self.plan.tile.threads_per_row > 1 else "v"

    @property
    def counts_named(self) -> bool:
        """Have the threads of a block, and those of a row, a name in the text?"""
        return self.plan.selection is not None and self.plan.selection.by != "warp"

    @property
    def row_threads(self) -> str:
        """All that share a row."""
        if not self.counts_named:
            return self.size("row_threads", self.plan.tile.threads_per_row)
        return "row_threads" if self.plan.tile.cluster > 1 else "threads"

    @property
    def own_threads(self) -> str:
        """Those of them that are of one block."""
        if self.plan.tile.cluster == 1:
            return self.row_threads
        return "threads" if self.counts_named else self.size("threads", self.plan.tile.row_threads, "of a block")

    def shared_at(self, what: str, offset: int) -> str:
        """An address in a block's shared memory; `what` begins there."""
        return f"shared + {self.size(f'{what}_byte', offset, 'of shared memory')}" if offset else "shared"

    def loops(self) -> bool:
        return self.plan.tile.per_thread > 1

    # ---- rows

    def rows_product(self) -> str:
        """The number of rows, where the kernel asks for it and no argument says it."""
        dims = self.plan.row_dims
        asks = self.plan.lacks_rows or self.plan.folded or self.plan.takes_turns
        if self.plan.flat or len(dims) == 1 or not asks:
            return ""
        return " * ".join(d.extent for d in dims) or "1"

    def row_indices(self) -> list[str]:
        """Each row dimension's own index, from the row's number; none where there is one dimension."""
        dims = self.plan.row_dims
        if self.plan.flat or len(dims) == 1 or not dims:
            return []
        row, sizes = "static_cast<unsigned>(row)", [f"static_cast<unsigned>({d.extent})" for d in dims]
        lines = []
        for place, dim in enumerate(dims):
            inner = " / ".join(reversed(sizes[place + 1 :]))
            base = f"{row} / {inner}" if inner else row
            lines.append(f"const unsigned {dim.index} = {base}" + (f" % {sizes[place]};" if place else ";"))
        return lines

    def row_pointers(self) -> list[Mapping[str, str]]:
        """Of what is neither prefetched nor found from the row before."""
        dims, ahead = self.plan.row_dims, [load.access for load in self.plan.rows_ahead]
        found: list[Mapping[str, str]] = []
        for access in self.plan.accesses:
            if not access.walked or self.plan.flat or self.plan.needs_contiguous_rows(access) or access in ahead:
                continue
            if access.led or access.tensor in self.plan.turned:
                continue
            if access.gathered and (access.by_column or access.output):  # once its index is known
                continue
            terms = [f"{dims[i].index} * {stride_name(access, dims, i)}" for i in access.walked]
            const = "" if access.output else "const "
            if access.output and len(terms) > 1 and self.plan.tile.rows_per_block > 1:
                self.words.functions.add("unknown")
                terms = [f"unknown({' + '.join(terms)})"]
            found.append(
                {
                    "type": f"{const}{self.words.ctype(access.dtype)}",
                    "tensor": access.name,
                    "name": f"{access.name}_row",
                    "expr": " + ".join([f"{access.name}_ptr", *terms]),
                    "ends": self.ends(access),
                }
            )
        return found

    def row_statements(self, body: Iterable[Statement]) -> list[str]:
        """What is one value a row, and where rows lie that values name."""
        lines: list[str] = []
        for s in body:
            if s.access is None or (s.access.gathered and not s.access.by_column and not s.access.output):
                lines.append(self.words.statement(s))
            elif s.access.gathered:
                lines += self.table_row(s.access)
            else:
                lines.append(self.column(s, s.access))
        return lines

    def column(self, s: Statement, access: Access) -> str:
        """One column of a row, which a value names."""
        assert s.missing is not None
        (column,) = map(self.words.argument, s.args)
        inside = f"{column} >= 0 && {column} < {self.row_size}"
        found = self.words.to_value(access.dtype, f"{self.pointer(access)}[{self.place(access, column)}]")
        live = "live" * (self.plan.lacks_rows and not self.plan.stands_in)
        missing = self.words.argument(s.missing)
        return self.words.define(s.name, s.dtype, f"{all_of(live, inside)} ? {found} : {missing}")

    def table_row(self, access: Access) -> list[str]:
        """Where the row is that an index names, or the first one, of which nothing is used."""
        found, name, dims = access.gathered, access.name, self.plan.row_dims
        assert found is not None
        index = self.words.argument(found.index)
        at = f"{name}_ptr + ({name}_found ? {index} : 0) * {found.stride}"
        walked = "".join(f" + {dims[i].index} * {stride_name(access, dims, i)}" for i in access.walked)
        otherwise = "nothing of it is written" if access.output else "each of its values is 0"
        const = "" if access.output else "const "
        lines = [
            f"const bool {name}_found = {index} >= 0 && {index} < {found.count};  // else {otherwise}",
            f"{const}{self.words.ctype(access.dtype)}* const {name}_row = {at}{walked};",
        ]
        ends = self.ends(access)
        return [*lines, *([f"const bool {name}_ends = {ends};"] if ends else [])]

    def row_load(self, load: Load) -> str:
        ahead = load in self.plan.rows_ahead
        place = f"{load.access.name}_read" if ahead else f"*{self.pointer(load.access)}"
        text = self.words.to_value(load.access.dtype, place)
        if self.plan.lacks_rows and not self.plan.stands_in:
            text = f"live ? {text} : {'false' if load.dtype is b8 else '0'}"
        return self.words.define(load.value, load.dtype, text)

    def first_lane(self) -> str:
        """One thread a row writes what is one value a row."""
        tile = self.plan.tile
        first_tile = f"{self.tile_number()} % {self.row_blocks} == 0" if tile.col_tiles > 1 else ""
        return all_of("live" * self.plan.lacks_rows, "lane == 0" * (tile.threads_per_row > 1), first_tile) or "true"

    def row_writes(self, stores: Iterable[Store]) -> list[str]:
        """What is one value a row, written by one of its threads."""
        return [
            f"if ({all_of(self.first_lane(), self.named(store.access))}) *{self.pointer(store.access)} = "
            f"{self.words.stored(store)};"
            for store in stores
        ]

    def named(self, access: Access) -> str:
        """When a row of an output has a place; empty where each has one."""
        return f"{access.name}_found" if access.output and access.gathered else ""


def constant(name: str, value: object, note: str = "", ctype: str = "int") -> str:
    return f"constexpr {ctype} {name} = {value};{f'  // {note}' if note else ''}"


def in_later_turns(test: str, turns: Turns) -> str:
    """The test, or the turns that decide it, or both."""
    if not turns.certain:
        return test
    return f"v < {turns.certain}" if turns.all else f"v < {turns.certain} || {test}"


def scaled(text: str, factor: int | str) -> str:
    """`(a + b) * factor`; the text alone where the factor is 1."""
    if factor == 1:
        return text
    return f"({text}) * {factor}" if " " in text else f"{text} * {factor}"


class Part:
    """One part of a kernel's text, in its frame."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.plan = frame.plan
        self.words = frame.words
