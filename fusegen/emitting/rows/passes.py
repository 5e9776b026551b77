"""Passes over a row, as the templates print them: by a thread's vectors, or by an output's aligned blocks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fusegen.emitting.dialect import UNROLL, VALUE_TYPES, all_of, asks
from fusegen.emitting.rows.blocks import Blocks
from fusegen.emitting.rows.bulk_rows import BulkRows
from fusegen.emitting.rows.elements import Elements
from fusegen.emitting.rows.frame import Frame, Part
from fusegen.emitting.rows.prefetching import Prefetching
from fusegen.emitting.rows.reducing import Reductions
from fusegen.emitting.rows.scanning import Scans
from fusegen.emitting.rows.tiles import Tiles
from fusegen.emitting.rows.vectors import Vectors, bracketed
from fusegen.planner.heading import WIDTH
from fusegen.planner.model import Load, RowPass, Store


@dataclass(frozen=True, slots=True)
class Read:
    """One vector's way from memory: `declare``target` = `call`, which `keep` leaves in shared memory."""

    declare: str
    target: str
    call: str
    keep: str = ""


@dataclass(frozen=True, slots=True)
class Shift:
    """The vector that is made of the blocks it lies across."""

    text: str
    keep: str


@dataclass(frozen=True, slots=True)
class Output:
    """One vector of results: the call that writes it, behind the loop's test where lanes hand each other values."""

    type: str
    name: str
    call: str
    masked: str  # an element beyond the pass's limit
    misaligned: bool = False


@dataclass(frozen=True, slots=True)
class Array:
    """Registers of a thread."""

    type: str
    name: str
    dims: str


@dataclass(frozen=True, slots=True)
class Singles:
    """The values that no vector holds: read `ahead` of the pass, made behind it."""

    ahead: list[str]
    turn: str
    lines: list[str]
    pad: str = ""
    pads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """A loop over a vector's elements between reductions of groups: `before` it, its `body`, and what is `behind`."""

    before: tuple[str, ...]
    body: tuple[str, ...]
    behind: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class End:
    """What becomes of the vector that a flat array ends in."""

    whole: str
    reads: list[str]
    writes: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpelledPass:
    """One pass over the row. Statements and calls are texts; where a list or a text is empty, nothing is printed."""

    title: list[str]
    masked_body: list[str]  # what is the same beyond the limit
    parts: tuple[Mapping[str, str], ...] = ()
    singles: Singles | None = None
    packed: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    # the loop over a thread's vectors
    head: str
    unroll: str
    loop: bool
    scope: bool
    col: str
    names_col: bool = True
    guard: str = ""
    until: str = ""
    # one turn
    loads_first: bool = False
    reads_col: bool = False  # do these loads ask for the column of their vector?
    vectors: tuple[Array, ...] = ()
    reads: tuple[Read, ...] = ()
    shifts: tuple[Shift, ...] = ()
    asks: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    whole: str = ""
    body: list[str]
    stages: tuple[Stage, ...] = ()  # in place of the body, where it waits for what is made of groups
    vector_reductions: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    masked: tuple[str, ...] = ()
    placed: tuple[str, ...] = ()
    refill: tuple[str, ...] = ()
    # copies that are under way
    copies: tuple[str, ...] = ()
    copied: int = 0
    pending: int = -1
    copies_misaligned: bool = False
    commits: bool = False
    # behind the loop
    end: End | None = None
    staged: tuple[str, ...] = ()
    complete: str = "the row is complete"
    leaves: tuple[str, ...] = ()
    first_results: bool = False
    scan_starts: tuple[str, ...] = ()
    scans: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    behind: list[str]
    runs: tuple[SpelledPass, ...] = ()  # over parts of the thread's vectors, one after another
    reads_alone: bool = False  # nothing is made of what its first loop has read

    @property
    def sections(self) -> tuple[SpelledPass, ...]:
        return self.runs or (() if self.reads_alone else (self,))


class Passes(Part):
    """The passes of one plan, in their order."""

    def __init__(
        self, frame: Frame, vectors: Vectors, blocks: Blocks, bulk: BulkRows, reductions: Reductions, elements: Elements
    ) -> None:
        super().__init__(frame)
        self.vectors = vectors
        self.blocks = blocks
        self.bulk = bulk
        self.prefetching = Prefetching(frame)
        self.reductions = reductions
        self.elements = elements
        self.tiles = Tiles(frame)
        self.scans = Scans(frame, vectors)
        self.declared: set[str] = set()
        self.taken: set[str] = set()  # tensors of which a thread has the value that no vector holds

    def spelled_pass(self, number: int, row_pass: RowPass) -> SpelledPass:
        return self.block_pass(number, row_pass) if row_pass.blocks_of else self.vector_pass(number, row_pass)

    def vector_pass(self, number: int, row_pass: RowPass) -> SpelledPass:
        """A pass by vectors from the row's start on."""
        whole = self.plan.staging in ("registers", "none")
        ahead = whole and self.frame.loops() and not self.plan.bulk and not row_pass.late
        copies = self.copied(row_pass)
        arrays, reads, shifts = self.reads(row_pass, ahead)
        outputs = tuple(self.outputs(row_pass))
        made = (*row_pass.body, *row_pass.keeps, *row_pass.scans, *row_pass.reductions, *row_pass.parts)
        idle = not (made or row_pass.stores or row_pass.groups or shifts)
        return replace(
            self.around(number, row_pass),
            reads_alone=idle and ahead and bool(reads),
            parts=tuple(self.reductions.part(r) for r in row_pass.reductions),
            singles=self.remainder_singles(row_pass),
            packed=tuple(self.vectors.packed_calls(row_pass)),
            before=(*self.prefetching.before(row_pass), *self.tiles.before(row_pass)),
            unroll=UNROLL if whole else f"{UNROLL} 4",
            names_col=self.names_col(row_pass, ahead) or bool(outputs),
            guard=self.frame.guard(),
            loads_first=ahead and bool(reads),
            reads_col=asks((self.frame.guard(), *(r.call for r in reads)), "col"),
            vectors=tuple(arrays),
            reads=tuple(reads),
            shifts=tuple(shifts),
            asks=tuple(self.prefetching.asks(row_pass)),
            takes=tuple(self.prefetching.takes(row_pass)),
            whole="" if self.plan.flat else self.frame.whole(),
            body=[] if row_pass.groups or idle else self.elements.body(row_pass, ahead),
            stages=tuple(self.stages(row_pass, ahead)),
            vector_reductions=tuple(r.part for r in row_pass.reductions if r.kind == "softmax"),
            outputs=outputs,
            masked=tuple(self.reductions.update_masked(r) for r in row_pass.reductions if row_pass.until),
            placed=tuple(self.elements.placed_masked(row_pass)),
            copies=tuple(self.vectors.copy_call(load) for load in copies),
            copied=self.plan.tile.kept,
            pending=self.plan.tile.kept - 1 if copies else -1,
            copies_misaligned=any(load.access.mode == "misaligned" for load in copies),
            end=self.end_of_array(row_pass) if self.plan.flat and self.frame.whole() else None,
            staged=tuple(
                self.blocks.store_row_call(s.access) for s in row_pass.stores if s.staged and s.access.mode != "bulk"
            )
            + tuple(self.tiles.behind(row_pass)),
            complete="the tile is complete" if self.plan.turned else "the row is complete",
            leaves=tuple(self.bulk.leave_calls(row_pass)),
            first_results=row_pass is self.plan.told_first,
            scan_starts=tuple(self.scans.starts(row_pass)),
            scans=tuple(self.scans.results(row_pass)),
            results=tuple(line for r in row_pass.reductions for line in self.reductions.results(r)),
        )

    def around(self, number: int, row_pass: RowPass) -> SpelledPass:
        """What every pass has."""
        return SpelledPass(
            title=self.title(number, row_pass),
            masked_body=self.words.statements(row_pass.masked_body),
            head=self.loop_head(row_pass),
            unroll=UNROLL,
            loop=self.frame.loops(),
            scope=self.frame.loops(),
            col=self.frame.col(),
            until=self.words.within_limit("col", row_pass.until),
            body=[],
            behind=self.behind(row_pass),
        )

    def title(self, number: int, row_pass: RowPass) -> list[str]:
        text = f"pass {number} of {len(self.plan.passes)}: {row_pass.title}"
        return textwrap.wrap(text, WIDTH, subsequent_indent="  ")

    def loop_head(self, row_pass: RowPass) -> str:
        count = self.plan.tile.per_thread
        return f"int v = {count - 1}; v >= 0; --v" if row_pass.backward else f"int v = 0; v < {count}; ++v"

    def behind(self, row_pass: RowPass) -> list[str]:
        """What a pass makes of its reductions, once a row."""
        return [*self.frame.row_statements(row_pass.row_body), *self.frame.row_writes(row_pass.row_stores)]

    # ---- what is read

    def staged(self, row_pass: RowPass) -> list[Load]:
        """What shared memory holds, or is to hold."""
        return [load for load in row_pass.loads if load.when != "now"] if self.plan.in_shared else []

    def copied(self, row_pass: RowPass) -> list[Load]:
        """What gets there past the registers."""
        return [load for load in self.staged(row_pass) if load.when == "keep" and load.transport == "cp.async"]

    def reads(self, row_pass: RowPass, ahead: bool) -> tuple[list[Array], list[Read], list[Shift]]:
        """The vectors of one turn, in their order; `ahead`: all turns' are read before the first one is used, into
        arrays. A pass that reads a tensor again fills the same array."""
        arrays: list[Array] = []
        reads: list[Read] = []
        shifts: list[Shift] = []
        woven: set[str] = set()
        for load in (*row_pass.reads, *(load for load in self.staged(row_pass) if load.when == "kept")):
            if (
                load.access.mode == "bulk"
                or load.when == "prefetched"
                or (load.access.interleaved and load.access.stem in woven)
            ):
                continue
            woven.add(load.access.stem)
            read, array, shift = self.read(row_pass, load, ahead)
            if array and array.name not in self.declared:
                self.declared.add(array.name)
                arrays.append(array)
            reads.append(read)
            shifts += [shift] if shift else []
        return arrays, reads, shifts

    def read(self, row_pass: RowPass, load: Load, ahead: bool) -> tuple[Read, Array | None, Shift | None]:
        """How a vector is read, the array it is read to, and how it is made of the blocks that it lies across."""
        staged, vector = load in self.staged(row_pass), f"{load.access.stem}_vec"
        from_shared = staged and (load.when == "kept" or load in self.copied(row_pass))
        misaligned = load.access.mode == "misaligned" and not from_shared
        in_register = load.when in ("keep", "ahead")
        name = f"{load.access.name}_pieces" if misaligned else vector
        ctype = (self.frame.pieces_type if misaligned else self.frame.vec_type)(load.access)
        keep = "" if from_shared or not staged else self.kept(load, vector)
        held = self.vectors.kept_at(vector, True) if in_register and not staged else ""  # where a register holds it
        declare, target, array = f"const {ctype} ", name, None
        if ahead and (misaligned or not in_register):
            declare, target, array = "", f"{name}[v]", Array(ctype, name, f"[{self.plan.tile.per_thread}]")
        elif held and not misaligned:
            declare, target = "", held
        call = self.call(row_pass, load, ahead, from_shared)
        if not misaligned:
            return Read(declare, target, call, keep), array, None
        made = held or f"const {self.frame.vec_type(load.access)} {vector}"
        shift = Shift(f"{made} = joined({target}, {self.frame.pointer(load.access)});", keep)
        return Read(declare, target, call), array, shift

    def kept(self, load: Load, vector: str) -> str:
        """The statement that leaves a vector in shared memory, if that has room for it."""
        place, part = self.vectors.kept_vector(load), self.vectors.partly()
        return f"if ({part}) {place} = {vector};" if part else f"{place} = {vector};"

    def call(self, row_pass: RowPass, load: Load, ahead: bool, from_shared: bool) -> str:
        if self.plan.ring_loads and load.access.strided:
            return self.vectors.ring_at(load.access, "slot")
        inside = bool(row_pass.until) and not ahead  # the pass's own test stands before the load
        if load.transport == "turned":
            return self.tiles.load_call(load.access)
        if from_shared:
            return self.vectors.from_shared(load, inside)
        if load.access.mode == "misaligned":
            return self.vectors.pieces_from_memory(load, inside)
        return self.vectors.from_memory(load, inside)

    def names_col(self, row_pass: RowPass, ahead: bool) -> bool:
        """Does a turn ask for the column of its vector, beside what it writes?"""
        if any(step.stores for step in row_pass.groups):
            return True
        if self.frame.whole() or row_pass.until or self.frame.guard_names_col() or self.elements.names_col(row_pass):
            return True
        plain = [
            load for load in row_pass.loads
            if load.access.mode != "bulk" and load.when not in ("prefetched", "held")
            and not (self.plan.ring_loads and load.access.strided)
        ]  # fmt: skip
        again = bool(self.vectors.partly()) and any(load.when != "kept" or self.plan.in_shared for load in plain)
        copied = self.copied(row_pass)
        return not ahead and (again or any(load.when != "kept" and load not in copied for load in plain))

    # ---- groups of the row

    def stages(self, row_pass: RowPass, ahead: bool) -> Iterator[Stage]:
        """The loops over a vector's elements, each but the last with what is made of the elements' group behind it."""
        if not row_pass.groups:
            return
        width = self.plan.tile.vector
        for number, body in enumerate(row_pass.stages):
            step = row_pass.groups[number] if number < len(row_pass.groups) else None
            before = [f"{VALUE_TYPES[k.dtype]} {k.value}_here[{width}];" for k in body.keeps if k.here]
            behind: list[str] = []
            if step is not None:
                parts = map(self.reductions.part, step.reductions)
                before += [f"{part['ctype']} {part['name']}{part['init']};" for part in parts]
                behind += [line for r in step.reductions for line in self.reductions.group_results(r, step.size)]
                behind += self.words.statements(step.body) + [self.group_write(s, step.size) for s in step.stores]
                body = replace(body, reductions=(*body.reductions, *step.reductions))
            lines = tuple(self.elements.body(body, ahead))
            if lines or step is not None:  # nothing may be left behind the last groups
                yield Stage(tuple(before), lines, tuple(behind))

    def group_write(self, store: Store, size: int) -> str:
        place = f"{self.frame.pointer(store.access)}[{self.frame.group_place(store.access)}]"
        call = f"{place} = {self.words.to_storage(store.access.dtype, store.value)};"
        test = self.frame.first_of_group(size)
        return f"if ({test}) {call}" if test else call

    # ---- what is written

    def outputs(self, row_pass: RowPass) -> list[Output]:
        return [
            Output(
                type="float" if self.vectors.by_pairs(s) else self.frame.vec_type(s.access),
                name=f"{s.access.name}_wide[{s.access.vector}]" if self.vectors.by_pairs(s) else f"{s.access.stem}_vec",
                call=self.store(s),
                masked=self.elements.stored_masked(s),
                misaligned=s.access.mode == "misaligned" and not s.staged,
            )
            for s in row_pass.stores
            if s.access.mode != "bulk" and not s.access.led  # all that lie in one vector are written with the first
        ]

    def store(self, store: Store) -> str:
        if store.transport == "turned":
            return self.tiles.store_call(store.access)
        return self.blocks.staged_call(store.access) if store.staged else self.vectors.store_of(store)

    def end_of_array(self, row_pass: RowPass) -> End:
        """What becomes of the vector that a flat array ends in. It has a branch of its own: where each load had one,
        nvrtc 13.0 took what it got of f16 and bf16 apart before the next load was issued, and six operands of
        8192 x 8192 bf16 took 256 us instead of 218.

        All of its elements are computed as any vector's: zeros behind the end, or a test for each, would let the
        compiler fuse other products with sums than elsewhere, and an element's bits depend on where the array ends."""
        self.words.functions.update(("load_last", "store_each_within"))
        width, cols = self.plan.tile.vector, self.frame.cols
        return End(
            whole=self.frame.whole(),
            reads=[
                f"const {self.frame.vec_type(load.access)} {load.access.name}_vec = "
                f"load_last<{width}>({self.frame.pointer(load.access)}, col, {cols})"
                for load in row_pass.reads
            ],
            writes=[
                f"store_each_within<{width}>({self.frame.pointer(s.access)}, col, {cols}, {self.vectors.result(s)})"
                for s in row_pass.stores
            ],
        )

    # ---- by blocks

    def block_pass(self, number: int, row_pass: RowPass) -> SpelledPass:
        """A pass by an output's aligned blocks, and over the few values before the first and behind the last."""
        around = self.around(number, row_pass)
        return replace(
            around,
            singles=self.edge_singles(row_pass),
            unroll=UNROLL if self.plan.unrolled else f"{UNROLL} 4",
            scope=True,
            col=f"head + {around.col}",
            guard=self.blocks.block_guard(),
            reads=tuple(self.block_read(row_pass, load) for load in row_pass.loads if load.access.mode != "bulk"),
            body=self.elements.body(row_pass, loads_first=False),
            outputs=tuple(
                Output(
                    type=self.frame.vec_type(s.access),
                    name=f"{s.access.name}_vec",
                    call=self.blocks.store_at_blocks(s.access, row_pass.blocks_of),
                    masked=self.elements.stored_masked(s),
                )
                for s in row_pass.stores
            ),
        )

    def block_read(self, row_pass: RowPass, load: Load) -> Read:
        text = self.blocks.kept_at_blocks(load) if load.when == "kept" else self.blocks.from_blocks(load)
        call = self.vectors.within(load, bracketed(text), inside=bool(row_pass.until))
        return Read(f"const {self.frame.vec_type(load.access)} ", f"{load.access.name}_vec", call)

    # ---- value by value

    def edge_singles(self, row_pass: RowPass) -> Singles:
        """What such a pass leaves over, a value a thread where a row has so many threads."""
        tile, cols = self.plan.tile, self.frame.row_size
        enough = 2 * (tile.vector - 1) <= tile.threads_per_row
        first_tile = f"{self.frame.tile_number()} % {self.frame.row_blocks} == 0" if tile.col_tiles > 1 else ""
        place = "lane" if enough else "i"
        test = all_of("live" * self.plan.lacks_rows, first_tile, f"{place} < edge")
        turn = f"if ({test})"
        if not enough:
            lane, step = ("lane", f"i += {self.frame.row_threads}") if tile.threads_per_row > 1 else ("0", "++i")
            turn = f"for (int i = {lane}; {test}; {step})"
        col = f"const int col = {place} < head ? {place} : {cols} - edge + {place};"
        loads = [load for load in row_pass.loads if load.access.mode != "bulk"]
        reads = [self.blocks.single_read(load, "", "col", "_edge") for load in loads]
        return Singles(
            ahead=[],
            turn=turn,
            lines=[col, *reads, *self.elements.single(row_pass, "_edge")],
        )

    def remainder_singles(self, row_pass: RowPass) -> Singles | None:
        """The values behind a row's last vector, in any other pass: one a thread, read ahead of the pass."""
        if not self.plan.tile.remainder:
            return None
        reads = [load for load in row_pass.reads if load.access.tensor not in self.taken]
        self.taken.update(load.access.tensor for load in reads)
        ahead = [self.blocks.single_read(load, "in_remainder", "remainder_col", "_last") for load in reads]
        ahead += [f"{VALUE_TYPES[keep.dtype]} {keep.value}_last{{}};" for keep in row_pass.keeps]
        named = ["const int col = remainder_col;"] if row_pass.stores or self.elements.names_col(row_pass) else []
        staged = [store.access for store in row_pass.stores if store.staged]
        pads = tuple(f"{access.name}_staged[remainder_col] = {self.frame.zero(access)};" for access in staged)
        pad = f"else if (lane < {self.plan.tile.vector})" if pads else ""
        return Singles(ahead, "if (in_remainder)", [*named, *self.elements.single(row_pass, "_last")], pad, pads)
