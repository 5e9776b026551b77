"""How a plan's vectors move between memory, shared memory and registers, in the words of one dialect.

Rows whose length no vector divides start anywhere. Their vectors lie across aligned blocks of 16 bytes: a thread reads
the pieces that hold its values and shifts them into place, and writes the block that its values begin in, with what the
lane before it has of that block. Which thread has which columns does not depend on where a row starts, and so neither
do the order of its sums nor the alignment of what all rows share. (Columns counted from the first block on would move
without a shift, but a row's last bits would then depend on its place in the tensor.)

Most rows are written otherwise, see emitting.rows.blocks; where a GPU has bulk copies, emitting.rows.bulk_rows.
"""

from __future__ import annotations

from fusegen.emitting.dialect import Dialect, all_of
from fusegen.planner.model import Access, Load, RowPlan, Stage
from fusegen.planner.pieces import WORD_BYTES, stride_name
from fusegen.planner.rows.tails import Turns, guarded, turns_of, whole

PIECES = ("load", "phase", "load_pieces")  # functions that every read of such pieces calls


class Vectors(Dialect):
    """Loads, stores, copies and the tests around them; notes which functions of the prelude they call."""

    def __init__(self, plan: RowPlan) -> None:
        super().__init__(plan.target.spelling)
        self.plan = plan
        self.uses_vec = False

    @property
    def row_number(self) -> str:
        """As the dimension of the shape's last axis but one counts it."""
        last = len(self.plan.graph.shape) - 2
        return next(dim.index for dim in self.plan.row_dims if last in dim.axes)

    @property
    def index(self) -> str:
        return "long long" if self.plan.flat else "int"

    @property
    def cols(self) -> str:
        return "n" if self.plan.flat else str(self.plan.cols)

    def vec_type(self, access: Access) -> str:
        self.uses_vec = True
        return f"Vec<{self.ctype(access.dtype)}, {access.vector}>"

    def pointer(self, access: Access) -> str:
        """Where the tensor's row starts."""
        return f"{access.name}_row" if access.strided and not self.plan.flat else f"{access.name}_ptr"

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

    def ends(self, access: Access) -> str:
        """When what lies behind a row may be behind the whole tensor; empty where nobody looks there."""
        if access.output or access.mode not in ("across", "bulk"):
            return ""
        dims = self.plan.row_dims
        last = [f"({dims[i].extent} - 1) * {stride_name(access, dims, i)}" for i in access.strided]
        reach = (access.vector if access.mode == "across" else 0) + access.vector_bytes // access.dtype.bytes
        return f"{' + '.join([f'{access.name}_ptr', *last])} - {access.name}_row < {reach}"

    def kept_name(self, access: Access) -> str:
        """The array of a tensor's kept vectors: in registers they are where they were read to."""
        return f"{access.name}_{'kept' if self.plan.in_shared else 'vec'}"

    def kept_at(self, name: str, vector: bool) -> str:
        """The element of a kept array that belongs to this thread's v and j."""
        tile = self.plan.tile
        v = "v" if self.loops() else "0"
        if self.plan.in_shared:
            own = "lane" if tile.cluster == 1 else "threadIdx.x"
            row = f"{v} * {tile.team} + {own}"
            return f"{name}[{row}]" if vector else f"{name}[({v} * {tile.vector} + j) * {tile.team} + {own}]"
        at = f"[{v}]" if self.loops() else ""
        return f"{name}{at}" if vector else f"{name}{at}[j]"

    def register_dims(self, vector: bool) -> str:
        tile = self.plan.tile
        outer = f"[{tile.per_thread}]" if self.loops() else ""
        return outer if vector else f"{outer}[{tile.vector}]"

    def loops(self) -> bool:
        return self.plan.tile.per_thread > 1

    def within(self, load: Load, text: str, inside: bool, ctype: str = "") -> str:
        """The vector, or zeros where the row does not need these columns; `inside`: it is known to need them."""
        if inside or not load.until:
            return text
        return f"{self.within_limit('col', load.until)} ? {text} : {ctype or self.vec_type(load.access)}{{}}"

    def from_memory(self, load: Load, inside: bool) -> str:
        access = load.access
        narrow = access.dtype.bytes < WORD_BYTES and access.vector * access.dtype.bytes % WORD_BYTES == 0
        plain = narrow and access.mode == "vector" and self.plan.tail != "element"
        if inside or not load.until or not plain:
            return self.within(load, self.load_call(access), inside)
        name = "load_once" if access.once else "load"
        self.functions.update((name, f"{name}_where"))
        return f"{name}_where<{access.vector}>({self.within_limit('col', load.until)}, {self.pointer(access)} + col)"

    def span_type(self, access: Access) -> str:
        self.uses_vec = True
        return f"Span<{self.ctype(access.dtype)}, {access.vector}>"

    def span_from_memory(self, load: Load, inside: bool) -> str:
        """The blocks that the vector lies across."""
        self.functions.update((*PIECES, "load_span"))
        return self.within(load, self.across_call("load_span", load.access), inside, self.span_type(load.access))

    def across_call(self, function: str, access: Access) -> str:
        ends = self.in_last_turns(f"{access.name}_ends", self.plan.cols // self.plan.tile.vector - 1)
        return f"{function}<{access.vector}>({self.pointer(access)}, col, {self.cols}, {ends})"

    def in_last_turns(self, test: str, vectors: int) -> str:
        """A test that no thread passes in the turns whose vectors are among the row's first `vectors`."""
        turns = turns_of(self.plan, vectors).certain
        return all_of(f"v >= {turns}", "" if test == "true" else test) if turns else test

    def kept_block(self, access: Access) -> str:
        """Where the block lies that a copied vector begins in: a warp has its own side by side, and one more behind."""
        tile, warp = self.plan.tile, self.plan.target.warp
        own = "lane" if tile.cluster == 1 else "threadIdx.x"
        turn = f"v * {tile.team // warp * (warp + 1)} + " if self.loops() else ""
        return f"{self.kept_name(access)}[{turn}{own} + {own} / {warp}]"

    def kept_vector(self, access: Access) -> str:
        """What shared memory holds of a tensor for this thread's v."""
        if access.mode != "across" or not self.plan.copies:
            return self.kept_at(self.kept_name(access), True)
        self.functions.update((*PIECES, "load_kept"))
        return f"load_kept(&{self.kept_block(access)}, {self.pointer(access)})"

    def from_shared(self, load: Load, place: str, part: str, inside: bool) -> str:
        """A vector that shared memory holds, or memory where it has no room; beyond a mask nothing was copied."""
        text = self.within(load, place, inside) if self.plan.copies else place
        if not part:
            return text
        return f"{part} ? {bracketed(text)} : {bracketed(self.from_memory(load, inside))}"

    def load_call(self, access: Access) -> str:
        row = self.pointer(access)
        width = access.vector
        if access.once and self.plan.tail != "element":
            self.functions.add("load_once")
            return f"load_once<{width}>({row} + col)"
        if access.mode == "across":
            self.functions.update((*PIECES, "load_span", "load_across"))
            return self.across_call("load_across", access)
        if self.plan.tail == "element" and not self.plan.flat and access.mode == "vector":
            self.functions.update(("load_first", "load"))
            return f"load_first<{width}, {self.plan.cols % width}>({row} + col, {self.whole()})"
        if self.plan.tail == "element" and width > 1 and not self.plan.flat:
            self.functions.add("load_each_within")
            return f"load_each_within<{width}>({row}, col, {self.cols})"
        name = "load_each" if access.mode == "element" else "load"
        self.functions.add(name)
        return f"{name}<{width}>({row} + col)"

    def partly(self) -> str:
        """When a vector is among those that shared memory has room for; empty where all are."""
        tile = self.plan.tile
        return f"v < {tile.kept}" if tile.kept < tile.per_thread else ""

    def copy_call(self, load: Load) -> str:
        self.functions.add("commit_copies")
        if load.access.mode == "across":
            return self.copy_across_call(load)
        self.functions.add("copy_async")
        call = f"copy_async<{load.access.vector}>(&{self.kept_at(self.kept_name(load.access), True)}, "
        call += f"{self.pointer(load.access)} + col);"
        return f"if ({self.within_limit('col', load.until)}) {call}" if load.until else call

    def copy_across_call(self, load: Load) -> str:
        access = load.access
        self.functions.update(("phase", "copy_across"))
        call = f"copy_across<{access.vector}>(&{self.kept_block(access)}, {self.pointer(access)}, col, {self.cols}, "
        call += f"{access.name}_ends"
        after = f"col + {access.vector}"
        if not load.until:
            return f"{call}, {after} >= {self.plan.vector_cols});"
        last = f"{after} >= {self.plan.vector_cols} || !({self.within_limit(after, load.until)})"
        return f"if ({self.within_limit('col', load.until)}) {{\n  {call},\n    {last});\n}}"

    def store_call(self, access: Access) -> str:
        row, value = self.pointer(access), f"{access.name}_vec"
        width, live = access.vector, "if (live) " if self.plan.stands_in else ""
        if access.mode == "across":
            self.functions.update(("phase", "store", "store_across"))
            cols = self.plan.vector_cols
            return (
                f"store_across<{width}>({row}, col, {f'live ? {cols} : 0' if self.plan.lacks_rows else cols}, {value})"
            )
        if self.plan.tail == "element" and width > 1 and not self.plan.flat:
            self.functions.add("store_each_within")
            if access.mode != "element":
                self.functions.update(("store_within", "store"))
                return f"{live}store_within<{width}>({row}, col, {self.cols}, {value})"
            return f"{live}store_each_within<{width}>({row}, col, {self.cols}, {value})"
        name = "store_each" if access.mode == "element" else "store"
        self.functions.add(name)
        return f"{live}{name}<{width}>({row} + col, {value})"

    def packed_calls(self, stage: Stage) -> list[str]:
        """The statements that leave in registers what was read, and not what an earlier walk has made of it."""
        if not self.plan.packed:
            return []
        self.functions.add("leave_packed")
        kept = [load.access for load in stage.loads if load.when == "kept"]
        return [f"leave_packed({self.kept_at(self.kept_name(access), True)});" for access in kept]

    def from_before(self, lanes: int) -> str:
        """Word i of the block that ends the vector of the lane before, around the lanes that share a row."""
        own = "own[words - 2 * ahead + i]"
        return self.spelling.shuffle.format(own, f"(lane + {lanes - 1}) % {lanes}", lanes) if lanes > 1 else own


def in_later_turns(test: str, turns: Turns) -> str:
    """The test, or the turns that decide it, or both."""
    if not turns.certain:
        return test
    return f"v < {turns.certain}" if turns.all else f"v < {turns.certain} || {test}"


def scaled(text: str, factor: int) -> str:
    """`(a + b) * factor`; the text alone where the factor is 1."""
    if factor == 1:
        return text
    return f"({text}) * {factor}" if " " in text else f"{text} * {factor}"


def bracketed(text: str) -> str:
    return f"({text})" if "?" in text else text
