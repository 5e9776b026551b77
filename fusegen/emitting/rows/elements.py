"""The element of a pass's body: of a vector, in shared memory, or alone where no vector holds it."""

from __future__ import annotations

from fusegen.emitting.body import Element, element_lines
from fusegen.emitting.prelude import reducer_of
from fusegen.emitting.rows.bulk_rows import BulkRows
from fusegen.emitting.rows.frame import Frame, Part
from fusegen.emitting.rows.reducing import Reductions
from fusegen.emitting.rows.vectors import Vectors
from fusegen.language.graph import COUNT_ELEMENTS
from fusegen.planner.model import Access, Body, Keep, Load, RowPass, Store, counts
from fusegen.planner.parts import ColumnPart


def place_in_vector(access: Access) -> str:
    """Where the tensor's element j is in a vector."""
    if access.interleaved is None:
        return "j"
    more = f" + {access.interleaved.place}" if access.interleaved.place else ""
    return f"{access.interleaved.count} * j{more}"


class Elements(Part):
    """Where a body's elements come from and go to."""

    def __init__(self, frame: Frame, vectors: Vectors, bulk: BulkRows, reductions: Reductions) -> None:
        super().__init__(frame)
        self.vectors = vectors
        self.bulk = bulk
        self.reductions = reductions

    def body(self, body: Body, loads_first: bool) -> list[str]:
        """The statements for element j of a vector. `loads_first`: all of a thread's vectors were read before."""

        def read(load: Load) -> str:
            if load.when == "ahead":
                return ""
            return self.words.to_value(load.access.dtype, self.element_of(load, loads_first))

        def kept(keep: Keep) -> str:
            return f"{keep.value}_here[j]" if keep.here else self.vectors.kept_at(f"{keep.value}_kept", False)

        at = Element(read, self.write, self.reductions.update, kept, self.part)
        return element_lines(body, at, self.words)

    def part(self, part: ColumnPart) -> str:
        """A column's value with this row's."""
        place, value = self.vectors.part_at(part), part.value
        if self.plan.stands_in:
            value = f"live ? {value} : {self.words.noted(reducer_of(part.kind, part.dtype).start)}"
        if part.kind == "sum":
            return f"{place} += {value};"
        return f"{place} = {self.reductions.larger_or_smaller(part.kind, part.dtype)}({place}, {value});"

    def element_of(self, load: Load, loads_first: bool) -> str:
        """Element j of what was read."""
        if load.access.mode == "bulk":
            return self.bulk.element(load)
        name, at = f"{load.access.stem}_vec", place_in_vector(load.access)
        kept = load.when not in ("now", "prefetched") and not self.plan.in_shared
        in_array = loads_first and load.access.mode != "misaligned" and load.when != "prefetched"
        if load.when == "held":
            return f"{name}{'[v]' * self.frame.loops()}.at[{at}]"
        vector = self.vectors.kept_at(name, True) if kept else f"{name}[v]" if in_array else name
        return f"{vector}.at[{at}]"

    def write(self, store: Store) -> str:
        """Element j of a result, to its vector, or to where the row is in shared memory."""
        if self.vectors.by_pairs(store):
            return f"{store.access.name}_wide[j] = {store.value};"
        placed = store.access.mode == "bulk" and store.staged
        place = self.bulk.at(store.access) if placed else f"{store.access.stem}_vec.at[{place_in_vector(store.access)}]"
        live = "if (live) " if placed and self.plan.lacks_rows else ""
        return f"{live}{place} = {self.words.stored(store)};"

    def names_col(self, body: Body) -> bool:
        """Do the statements ask for the element's column, be it to find it in shared memory?"""
        placed = any(store.access.mode == "bulk" for store in body.stores)
        return placed or counts(body.body, *COUNT_ELEMENTS) or any(load.access.mode == "bulk" for load in body.loads)

    def stored_masked(self, store: Store) -> str:
        """A result beyond the pass's limit."""
        if store.masked is None:
            return ""
        return self.words.to_storage(store.access.dtype, self.words.argument(store.masked))

    def placed_masked(self, row_pass: RowPass) -> list[str]:
        """The statements that write these to shared memory."""
        if row_pass.until is None:
            return []
        stores = [store for store in row_pass.stores if store.access.mode == "bulk"]
        return [self.bulk.at_end(f"{self.bulk.at(s.access)} = {self.stored_masked(s)};") for s in stores]

    def single(self, body: Body, suffix: str) -> list[str]:
        """The statements for one value, that no vector holds: what was read lies in `<name><suffix>`."""

        def read(load: Load) -> str:
            if load.when == "ahead":
                return ""
            text = self.bulk.element(load, "col") if load.access.mode == "bulk" else f"{load.access.name}{suffix}"
            return self.words.to_value(load.access.dtype, text)

        def write(store: Store) -> str:
            row = f"{store.access.name}_staged" if store.staged else self.frame.pointer(store.access)
            col = "col" if store.staged else self.frame.place(store.access)
            test = f"if ({named}) " if (named := self.frame.named(store.access)) else ""
            return f"{test}{row}[{col}] = {self.words.stored(store)};"

        def kept(keep: Keep) -> str:
            return f"{keep.value}{suffix}"

        return element_lines(body, Element(read, write, self.reductions.update_one, kept, col="col"), self.words)
