"""How a plan's vectors move between memory, shared memory and registers, in the words of one dialect.

Rows whose length no vector divides start anywhere. Their vectors lie across aligned blocks of 16 bytes: a thread reads
the pieces that hold its values and shifts them into place, and writes the block that its values begin in, with what the
lane before it has of that block. Which thread has which columns does not depend on where a row starts, and so neither
do the order of its sums nor the alignment of what all rows share. (Columns counted from the first block on would move
without a shift, but a row's last bits would then depend on its place in the tensor.)

Most rows are written otherwise, see emitting.rows.blocks; where a GPU has bulk copies, emitting.rows.bulk_rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusegen.emitting.dialect import VALUE_TYPES, all_of
from fusegen.emitting.rows.frame import Part, scaled
from fusegen.planner.model import Access, Load, RowPass, Store
from fusegen.planner.parts import ColumnPart
from fusegen.planner.pieces import VECTOR_BYTES, WORD_BYTES, element_stride_name

PIECES = ("load", "phase", "load_pieces")  # functions that every read of such pieces calls


class Vectors(Part):
    """Loads, stores, copies and the tests around them."""

    def kept_name(self, access: Access) -> str:
        """The array of a tensor's kept vectors: in registers they are where they were read to."""
        return f"{access.stem}_{'kept' if self.plan.in_shared else 'vec'}"

    def kept_at(self, name: str, vector: bool) -> str:
        """The element of a kept array that belongs to this thread's v and j."""
        tile = self.plan.tile
        if self.plan.in_shared:
            own = "lane" if tile.cluster == 1 else "threadIdx.x"
            v, j = "v" * self.frame.loops(), "j" * (tile.vector > 1 and not vector)
            number = " + ".join(filter(None, (scaled(v, tile.vector) if v and j else v, j)))
            return f"{name}[{scaled(number, self.frame.own_threads)} + {own}]" if number else f"{name}[{own}]"
        at = "[v]" if self.frame.loops() else ""
        return f"{name}{at}" if vector else f"{name}{at}[j]"

    def register_dims(self, vector: bool) -> str:
        tile = self.plan.tile
        outer = f"[{tile.per_thread}]" if self.frame.loops() else ""
        return outer if vector else f"{outer}[{tile.vector}]"

    def ring_name(self, access: Access) -> str:
        """The array of a tensor's rows that asynchronous copies bring ahead."""
        return f"{access.name}_kept"

    def ring_at(self, access: Access, slot: str) -> str:
        """The place of this thread's vector v in a slot of it."""
        tile = self.plan.tile
        threads = self.frame.size("threads", tile.threads, "of a block") if tile.rows_per_block > 1 else (
            self.frame.row_threads
        )  # fmt: skip
        vector = slot
        if self.frame.loops():
            vector = f"({slot} * {self.frame.size('vectors', tile.per_thread, 'of a thread in a row')} + v)"
        return f"{self.ring_name(access)}[{vector} * {threads} + threadIdx.x]"

    def part_at(self, part: ColumnPart) -> str:
        """The register of a column's value over the rows, for this thread's v and j."""
        return f"{part.name}{'[v]' * self.frame.loops()}[j]"

    def keeps(self) -> list[tuple[str, str, int, bool]]:
        """(name, C type, shared offset, is a vector) of everything kept between passes, once each."""
        found: dict[str, tuple[str, str, int, bool]] = {}
        for row_pass in self.plan.passes:
            for load in row_pass.loads:
                if load.when in ("keep", "ahead") and load.access.mode != "bulk":
                    name = self.kept_name(load.access)
                    found.setdefault(name, (name, self.frame.vec_type(load.access), load.offset_bytes, True))
            for keep in (*row_pass.keeps, *row_pass.scans_kept):
                name = f"{keep.value}_kept"
                found.setdefault(name, (name, VALUE_TYPES[keep.dtype], keep.offset_bytes, False))
        return list(found.values())

    def within(self, load: Load, text: str, inside: bool, ctype: str = "") -> str:
        """The vector, or zeros where the row does not need these columns; `inside`: it is known to need them."""
        if inside or not load.until:
            return text
        test, ctype = self.words.within_limit("col", load.until), ctype or self.frame.vec_type(load.access)
        return f"{test} ? {text} : {ctype}{{}}"

    def from_memory(self, load: Load, inside: bool, sure: bool = False) -> str:
        """`sure`: the vector lies in the row, with all that is read for it."""
        access = load.access
        plain = access.mode == "vector" and (sure or self.plan.tail != "element")
        if inside or not load.until or not plain:
            return self.within(load, self.load_call(access, sure), inside)
        test = self.words.within_limit("col", load.until)
        if self.words.spelling.tested_loads_wait:
            # the thread's own first vector stands in: it is there, and no other thread writes a result over it
            own = self.frame.first_col()
            return self.load_call(access, sure, col="col" if own == self.frame.col() else f"({test} ? col : {own})")
        if access.dtype.bytes >= WORD_BYTES or access.vector_bytes % WORD_BYTES:
            return self.within(load, self.load_call(access, sure), inside)
        name = "load_evict_first" if access.evict_first else "load"
        self.words.functions.update((name, f"{name}_where"))
        return f"{name}_where<{access.vector}>({test}, {self.frame.pointer(access)} + col)"

    def pieces_from_memory(self, load: Load, inside: bool) -> str:
        """The blocks that the vector lies across."""
        self.words.functions.update((*PIECES, "load_row_pieces"))
        return self.within(
            load, self.misaligned_call("load_row_pieces", load.access), inside, self.frame.pieces_type(load.access)
        )

    def misaligned_call(self, function: str, access: Access, sure: bool = False) -> str:
        before = self.plan.cols // self.plan.tile.vector - 1
        ends = "false" if sure else self.frame.in_last_turns(f"{access.name}_ends", before)
        return f"{function}<{access.vector}>({self.frame.pointer(access)}, col, {self.frame.cols}, {ends})"

    def load_call(self, access: Access, sure: bool = False, col: str = "col") -> str:
        row, width = self.frame.pointer(access), access.vector
        ragged = self.plan.tail == "element" and not self.plan.flat and not sure
        if access.group:
            return self.load_of_groups(access)
        if access.apart:
            return self.load_apart(access, ragged)
        if access.interleaved:
            self.words.functions.add("load")
            return f"load<{width * access.together}>({row} + {scaled(col, access.together)})"
        if access.evict_first and (sure or self.plan.tail != "element"):
            self.words.functions.add("load_evict_first")
            return f"load_evict_first<{width}>({row} + {col})"
        if access.mode == "misaligned":
            self.words.functions.update((*PIECES, "load_row_pieces", "load_misaligned"))
            return self.misaligned_call("load_misaligned", access, sure)
        if ragged and access.mode == "vector":
            self.words.functions.update(("load_first", "load"))
            return f"load_first<{width}, {self.plan.cols % width}>({row} + col, {self.frame.whole()})"
        if ragged and width > 1:
            self.words.functions.add("load_each_within")
            return f"load_each_within<{width}>({row}, col, {self.frame.cols})"
        name = "load_each" if access.mode == "element" else "load"
        self.words.functions.add(name)
        return f"{name}<{width}>({row} + {col})"

    def load_of_groups(self, access: Access) -> str:
        """A vector's elements of what has one value for each group of neighbours: one, where it lies in one group."""
        row, width = self.frame.pointer(access), access.vector
        if access.group % width == 0:
            self.words.functions.add("load_for_all")
            return f"load_for_all<{width}>({row} + {self.frame.group_place(access)})"
        self.words.functions.add("load_by_groups")
        each = self.frame.size(f"{access.name}_cols", access.group, "of a value")
        return f"load_by_groups<{width}, {each}>({row}, {element_stride_name(access)}, col)"

    def load_apart(self, access: Access, ragged: bool = False) -> str:
        """Elements that are a stride apart."""
        self.words.functions.add("load_apart")
        end = f", {self.frame.cols}" if ragged else ""
        return f"load_apart<{access.vector}>({self.frame.pointer(access)}, {element_stride_name(access)}, col{end})"

    def store_apart(self, access: Access, ragged: bool = False) -> str:
        self.words.functions.add("store_apart")
        place = f"{self.frame.pointer(access)}, {element_stride_name(access)}, col"
        end = f", {self.frame.cols}" if ragged else ""
        return f"store_apart<{access.vector}>({place}, {access.name}_vec{end})"

    # ---- kept in shared memory

    def kept_block(self, access: Access) -> str:
        """Where the block lies that a copied vector begins in: a warp has its own side by side, and one more behind."""
        tile, warp = self.plan.tile, self.plan.target.warp
        own = "lane" if tile.cluster == 1 else "threadIdx.x"
        turn = ""
        if self.frame.loops():
            blocks = f"{self.frame.own_threads} / {warp} * {warp + 1}"
            turn = f"v * {self.frame.size('kept_step', blocks, 'blocks: of each warp one more than its threads')} + "
        return f"{self.kept_name(access)}[{turn}{own} + {own} / {warp}]"

    def kept_vector(self, load: Load) -> str:
        """What shared memory holds of a tensor for this thread's v."""
        access = load.access
        if access.mode != "misaligned" or load.transport != "cp.async":
            return self.kept_at(self.kept_name(access), True)
        self.words.functions.update((*PIECES, "load_kept"))
        return f"load_kept(&{self.kept_block(access)}, {self.frame.pointer(access)})"

    def partly(self) -> str:
        """When a vector is among those that shared memory has room for; empty where all are, and where registers hold
        the others."""
        tile = self.plan.tile
        return f"v < {tile.kept}" if tile.kept < tile.per_thread and not self.plan.persistent_rows else ""

    def from_shared(self, load: Load, inside: bool) -> str:
        """A vector that shared memory holds, or memory where it has no room; beyond a mask nothing was copied."""
        place, part = self.kept_vector(load), self.partly()
        text = self.within(load, place, inside) if load.transport == "cp.async" else place
        if not part:
            return text
        return f"{part} ? {bracketed(text)} : {bracketed(self.from_memory(load, inside))}"

    def copy_call(self, load: Load) -> str:
        self.words.functions.add("commit_copies")
        if load.access.mode == "misaligned":
            return self.copy_misaligned_call(load)
        self.words.functions.add("copy_async")
        call = f"copy_async<{load.access.vector}>(&{self.kept_at(self.kept_name(load.access), True)}, "
        call += f"{self.frame.pointer(load.access)} + col);"
        return f"if ({self.words.within_limit('col', load.until)}) {call}" if load.until else call

    def copy_misaligned_call(self, load: Load) -> str:
        access = load.access
        self.words.functions.update(("phase", "copy_misaligned"))
        call = f"copy_misaligned<{access.vector}>(&{self.kept_block(access)}, {self.frame.pointer(access)}, "
        call += f"col, {self.frame.cols}, {access.name}_ends"
        after = f"col + {access.vector}"
        if not load.until:
            return f"{call}, {after} >= {self.plan.vector_cols});"
        last = f"{after} >= {self.plan.vector_cols} || !({self.words.within_limit(after, load.until)})"
        return f"if ({self.words.within_limit('col', load.until)}) {{\n  {call},\n    {last});\n}}"

    # ---- results

    def by_pairs(self, store: Store) -> bool:
        """Do results wait as f32, for an instruction that makes 8 bits of two of them? One that makes them of each
        leaves bytes that have to be put together: rmsnorm_quant_block took 72 PRMT and 67 LOP3 for 32 elements."""
        access = store.access
        blocks = any(row_pass.blocks_of for row_pass in self.plan.passes)
        plain = store.masked is None and not store.fits and not store.staged and access.mode != "bulk" and not blocks
        return (
            plain
            and not access.apart
            and not access.interleaved
            and access.vector % 2 == 0
            and f"pairs_{access.dtype}" in self.functions
        )

    @property
    def functions(self) -> Mapping[str, tuple[str, ...]]:
        return self.words.spelling.functions

    def store_of(self, store: Store) -> str:
        return self.store_call(store.access, self.result(store))

    def result(self, store: Store) -> str:
        """A vector of results, in the type of its tensor."""
        if not self.by_pairs(store):
            return f"{store.access.stem}_vec"
        self.words.functions.add(f"pairs_{store.access.dtype}")
        self.frame.uses_vec = True
        return f"{store.access.dtype}_of({store.access.name}_wide)"

    def store_call(self, access: Access, value: str = "") -> str:
        row, value = self.frame.pointer(access), value or f"{access.stem}_vec"
        test = all_of("live" * self.plan.stands_in, self.frame.named(access))
        width, live = access.vector, f"if ({test}) " if test else ""
        if access.apart:
            return f"{live}{self.store_apart(access, self.plan.tail == 'element')}"
        if access.interleaved:
            self.words.functions.add("store")
            return f"{live}store<{width * access.together}>({row} + {scaled('col', access.together)}, {value})"
        whole_words = width * access.dtype.bytes % VECTOR_BYTES == 0
        spelled = self.plan.target.async_copies and access.mode == "vector" and whole_words
        if self.plan.persistent_rows or (self.plan.takes_turns and spelled):
            self.words.functions.add("store_words")
            return f"{live}store_words<{width}>({row} + col, {value})"
        if access.mode == "misaligned":
            self.words.functions.update(("phase", "store", "store_misaligned"))
            cols = self.plan.vector_cols
            end = f"live ? {cols} : 0" if self.plan.lacks_rows else cols
            return f"store_misaligned<{width}>({row}, col, {end}, {value})"
        if self.plan.tail == "element" and width > 1 and not self.plan.flat:
            self.words.functions.add("store_each_within")
            if access.mode != "element":
                self.words.functions.update(("store_within", "store"))
                return f"{live}store_within<{width}>({row}, col, {self.frame.cols}, {value})"
            return f"{live}store_each_within<{width}>({row}, col, {self.frame.cols}, {value})"
        name = "store_each" if access.mode == "element" else "store"
        self.words.functions.add(name)
        return f"{live}{name}<{width}>({row} + col, {value})"

    def packed_calls(self, row_pass: RowPass) -> list[str]:
        """The statements that leave in registers what was read, and not what an earlier pass has made of it."""
        if not self.plan.packed:
            return []
        self.words.functions.add("leave_packed")
        kept = [load.access for load in row_pass.loads if load.when == "kept"]
        names = dict.fromkeys(map(self.kept_name, kept))
        return [f"leave_packed({self.kept_at(name, True)});" for name in names]

    def from_before(self, lanes: int) -> str:
        """Word i of the block that ends the vector of the lane before, around the lanes that share a row."""
        own = "own[words - 2 * ahead + i]"
        return self.words.spelling.shuffle.format(own, f"(lane + {lanes - 1}) % {lanes}", lanes) if lanes > 1 else own


def bracketed(text: str) -> str:
    return f"({text})" if "?" in text else text
