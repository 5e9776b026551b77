"""A plan's parts in the words of one dialect: what the templates print, in the order they print it.

Nothing is decided here. Whatever could be wrong is a field of the plan; this turns fields into C++.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from fusegen.emitting.body import Element, element_lines
from fusegen.emitting.dialect import UNROLL, VALUE_TYPES, all_of
from fusegen.emitting.rows.reducing import Reducing
from fusegen.emitting.rows.vectors import bracketed, scaled
from fusegen.language.types import b8
from fusegen.planner.heading import WIDTH
from fusegen.planner.model import Body, Keep, Load, RowPlan, Stage, Store, counts
from fusegen.planner.pieces import PIECE_BYTES, stride_name


class Speller(Reducing):
    """The words of one plan in one dialect; `context()` is what the templates see."""

    def __init__(self, plan: RowPlan) -> None:
        super().__init__(plan)
        self.declared: set[str] = set()
        self.taken: set[str] = set()  # tensors of which a thread has the value that no vector holds

    # ---- the frame

    def tile(self) -> str:
        """The number of the block's tile."""
        return "tile" if self.plan.folded else "blockIdx.x"

    def tiling(self) -> Mapping[str, str]:
        """How many tiles there are, and how they map to rows."""
        tile = self.plan.tile
        tiles = f"(rows + {tile.rows_per_block - 1}) / {tile.rows_per_block}" if tile.rows_per_block > 1 else "rows"
        if tile.blocks_per_row > 1:
            tiles = f"{tiles} * {tile.blocks_per_row}"
        shared_by = tile.blocks_per_row
        row = f"{self.tile()} / {shared_by}" if shared_by > 1 else self.tile()
        if tile.rows_per_block == 1:
            return {"tiles": tiles, "row": row}
        wide = row if self.plan.folded else f"static_cast<long long>({row})"
        first = f"{wide} * {tile.rows_per_block}"
        return {"tiles": tiles, "first": first, "own": self.team(), "row": f"{first} + {self.team()}"}

    def first_element(self) -> str:
        """Of a thread, in a flat plan."""
        tile = self.plan.tile
        block = "tile" if self.plan.folded else "static_cast<long long>(blockIdx.x)"
        return f"{block} * {tile.cols} + threadIdx.x" + (f" * {tile.vector}" if tile.vector > 1 else "")

    def lane(self) -> str:
        """The thread's place among those of its row; empty where the kernel has no use for a name."""
        tile = self.plan.tile
        if self.plan.flat:
            return ""
        if tile.cluster > 1:
            return f"__clusterRelativeBlockRank() * {tile.threads} + threadIdx.x"
        if tile.threads_per_row == tile.threads:
            return "threadIdx.x"
        if tile.threads_per_row > 1:
            return f"threadIdx.x % {tile.threads_per_row}"
        return "0" if tile.per_thread == 1 or self.start() else ""

    def lane_note(self) -> str:
        tile = self.plan.tile
        if tile.threads_per_row == 1:
            return "a thread takes a row of its own"
        return f"of the {tile.threads_per_row} threads that share a row"

    def start(self) -> str:
        """The statement that finds the thread's first column, where that takes more than its lane."""
        tile = self.plan.tile
        if self.plan.flat or tile.col_tiles == 1:
            return ""
        first = f"static_cast<int>({self.tile()} % {tile.col_tiles}) * {tile.cols}"
        return f"const int start = {first} + {scaled('lane', tile.vector)};"

    def col(self) -> str:
        """The column of the thread's vector v."""
        tile = self.plan.tile
        first = "start" if self.plan.flat or self.start() else scaled("lane", tile.vector)
        if tile.per_thread == 1:
            return first
        if first == "start":
            return f"start + v * {tile.threads_per_row * tile.vector}"
        return scaled(f"v * {tile.threads_per_row} + lane" if tile.threads_per_row > 1 else "v", tile.vector)

    def rest(self) -> Mapping[str, Any]:
        """How many elements of a vector that the row ends in belong to it."""
        return {"count": self.plan.cols % self.plan.tile.vector}

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
        dims = self.plan.row_dims
        found: list[Mapping[str, str]] = []
        for access in self.plan.accesses:
            if not access.strided or self.plan.flat or self.plan.follows(access):
                continue
            terms = [f"{dims[i].index} * {stride_name(access, dims, i)}" for i in access.strided]
            const = "" if access.output else "const "
            if access.output and len(terms) > 1 and self.plan.tile.rows_per_block > 1:
                self.functions.add("unknown")
                terms = [f"unknown({' + '.join(terms)})"]
            found.append(
                {
                    "type": f"{const}{self.ctype(access.dtype)}",
                    "tensor": access.name,
                    "name": f"{access.name}_row",
                    "expr": " + ".join([f"{access.name}_ptr", *terms]),
                    "ends": self.ends(access),
                }
            )
        return found

    def rows_product(self) -> str:
        """The number of rows, where the kernel asks for it and no argument says it."""
        dims = self.plan.row_dims
        if self.plan.flat or len(dims) == 1 or not (self.plan.lacks_rows or self.plan.folded):
            return ""
        return " * ".join(d.extent for d in dims) or "1"

    def row_load(self, load: Load) -> str:
        text = self.to_value(load.access.dtype, f"*{self.pointer(load.access)}")
        if self.plan.lacks_rows and not self.plan.stands_in:
            text = f"live ? {text} : {'false' if load.dtype is b8 else '0'}"
        return self.define(load.value, load.dtype, text)

    def row_writes(self, stores: Iterable[Store]) -> list[str]:
        """What is one value a row, written by one of its threads."""
        return [
            f"if ({self.first_lane()}) *{self.pointer(store.access)} = "
            f"{self.to_storage(store.access.dtype, store.value)};"
            for store in stores
        ]

    def behind(self, stage: Stage) -> list[str]:
        """What a walk makes of its reductions, once a row."""
        return [*self.statements(stage.row_body), *self.row_writes(stage.row_stores)]

    def first_lane(self) -> str:
        """One thread a row writes what is one value a row."""
        tile = self.plan.tile
        first_tile = f"{self.tile()} % {tile.col_tiles} == 0" if tile.col_tiles > 1 else ""
        return all_of("live" * self.plan.lacks_rows, "lane == 0" * (tile.threads_per_row > 1), first_tile) or "true"

    def stored_rest(self, store: Store) -> str:
        """A result beyond the walk's limit."""
        return self.to_storage(store.access.dtype, self.argument(store.rest)) if store.rest else ""

    # ---- kept values

    def keeps(self) -> list[tuple[str, str, int, bool]]:
        """(name, C type, shared offset, is a vector) of everything kept between walks, once each."""
        found: dict[str, tuple[str, str, int, bool]] = {}
        for stage in self.plan.stages:
            for load in stage.loads:
                if load.when in ("keep", "ahead") and load.access.mode != "bulk":
                    name = self.kept_name(load.access)
                    found.setdefault(name, (name, self.vec_type(load.access), load.offset_bytes, True))
            for keep in stage.keeps:
                name = f"{keep.value}_kept"
                found.setdefault(name, (name, VALUE_TYPES[keep.dtype], keep.offset_bytes, False))
        return list(found.values())

    # ---- a walk

    def loop_head(self, stage: Stage) -> str:
        count = self.plan.tile.per_thread
        return f"int v = {count - 1}; v >= 0; --v" if stage.backward else f"int v = 0; v < {count}; ++v"

    def walk(self, number: int, stage: Stage) -> Mapping[str, Any]:
        if stage.blocks_of:
            return self.block_walk(number, stage)
        whole = self.plan.staging in ("registers", "none")
        loads_first = whole and self.loops() and not self.plan.bulk and not stage.late
        inside = bool(stage.until) and not loads_first  # the walk's own test stands before the load
        reads = []
        vectors = []
        shifts = []
        staged = [load for load in stage.loads if load.when != "now"] if self.plan.in_shared else []
        copies = [load for load in staged if load.when == "keep"] if self.plan.copies else []
        for load in (*stage.reads, *(load for load in staged if load.when == "kept")):
            if load.access.mode == "bulk" or load.when == "fetched":
                continue
            name = f"{load.access.name}_vec"
            kept = load.when in ("keep", "ahead")
            from_shared = load in staged and (load.when == "kept" or load in copies)
            across = load.access.mode == "across" and not from_shared
            read, ctype = (f"{load.access.name}_span", self.span_type) if across else (name, self.vec_type)
            if loads_first and (across or not kept) and read not in self.declared:
                self.declared.add(read)  # a walk that reads the tensor again fills the same array
                vectors.append({"type": ctype(load.access), "name": read, "dims": f"[{self.plan.tile.per_thread}]"})
            place, part, keep = self.kept_vector(load.access), self.partly(), ""
            if from_shared:
                call = self.from_shared(load, place, part, inside)
            elif across:
                call = self.span_from_memory(load, inside)
            else:
                call = self.from_memory(load, inside)
            if load in staged and not from_shared:
                keep = f"if ({part}) {place} = {name};" if part else f"{place} = {name};"
            whole_vec = self.kept_at(name, True) if kept and load not in staged else ""  # where a register holds it
            declare, target = f"const {ctype(load.access)} ", read
            if loads_first and (across or not kept):
                declare, target = "", f"{read}[v]"
            elif whole_vec and not across:
                declare, target = "", whole_vec
            if across:
                vector = whole_vec or f"const {self.vec_type(load.access)} {name}"
                shifts.append({"text": f"{vector} = joined({target}, {self.pointer(load.access)});", "keep": keep})
                keep = ""
            reads.append({"declare": declare, "target": target, "call": call, "keep": keep})
        body = self.body(stage, loads_first)
        outputs: list[Mapping[str, Any]] = [
            {
                "type": self.vec_type(s.access),
                "name": f"{s.access.name}_vec",
                "call": self.staged_call(s.access) if s.staged else self.store_call(s.access),
                "across": s.access.mode == "across" and not s.staged,
                "rest": self.stored_rest(s),
            }
            for s in stage.stores
            if s.access.mode != "bulk"
        ]
        from_memory = [load for load in stage.reads if load.access.mode != "bulk" and load.when != "fetched"]
        reads_at_col = (reads and self.partly()) or any(load not in copies for load in from_memory)
        made = {
            "title": self.title(number, stage),
            "col": self.col(),
            "guard": self.guard(),
            "whole": "" if self.plan.flat else self.whole(),
            "end": self.end_of_array(stage) if self.plan.flat and self.whole() else None,
            "parts": [self.part(r) for r in stage.reductions],
            "loads_first": loads_first and bool(reads),
            "copies": [self.copy_call(load) for load in copies],
            "copied": self.plan.tile.kept,
            "pending": self.plan.tile.kept - 1 if copies else -1,
            "copies_across": any(load.access.mode == "across" for load in copies),
            "head": self.loop_head(stage),
            "vectors": vectors,
            "reads": reads,
            "shifts": shifts,
            "loop": self.loops(),
            "scope": self.loops(),
            "unroll": UNROLL if whole else f"{UNROLL} 4",
            "outputs": outputs,
            "placed": [
                self.at_end(f"{self.at(s.access)} = {self.stored_rest(s)};")
                for s in stage.stores
                if s.access.mode == "bulk" and stage.until
            ],
            "staged": [self.store_row_call(s.access) for s in stage.stores if s.staged and s.access.mode != "bulk"],
            "leaves": self.leave_calls(stage),
            "singles": self.rest_singles(stage),
            "body": body,
            "names_col": bool(
                self.whole()
                or stage.until
                or self.guard_names_col()
                or outputs
                or self.body_names_col(stage)
                or (reads_at_col and not loads_first)
            ),
            "vector_reductions": [r.part for r in stage.reductions if r.kind == "softmax"],
            "until": self.within_limit("col", stage.until),
            "rest_body": self.statements(stage.rest_body),
            "rest": [self.update_rest(r) for r in stage.reductions if stage.until],
            "first_results": stage is next(s for s in self.plan.stages if s.reductions) if stage.reductions else False,
            "results": [line for r in stage.reductions for line in self.results(r)],
            "behind": self.behind(stage),
            "before": self.before(stage),
            **self.fetching(stage),
            "packed": self.packed_calls(stage),
            "refill": [],
        }
        return {**made, "spans": [made]}

    def end_of_array(self, stage: Stage) -> Mapping[str, Any]:
        """What becomes of the vector that a flat array ends in. It has a branch of its own: where each load had one,
        nvrtc 13.0 took what it got of f16 and bf16 apart before the next load was issued, and six operands of
        8192 x 8192 bf16 took 256 us instead of 218.

        All of its elements are computed as any vector's: zeros behind the end, or a test for each, would let the
        compiler fuse other products with sums than elsewhere, and an element's bits depend on where the array ends."""
        self.functions.update(("load_last", "store_each_within"))
        width = self.plan.tile.vector
        return {
            "whole": self.whole(),
            "reads": [
                f"const {self.vec_type(load.access)} {load.access.name}_vec = "
                f"load_last<{width}>({self.pointer(load.access)}, col, {self.cols})"
                for load in stage.reads
            ],
            "writes": [
                f"store_each_within<{width}>({self.pointer(store.access)}, col, {self.cols}, {store.access.name}_vec)"
                for store in stage.stores
            ],
        }

    def title(self, number: int, stage: Stage) -> list[str]:
        text = f"walk {number} of {len(self.plan.stages)}: {stage.title}"
        return textwrap.wrap(text, WIDTH, subsequent_indent="  ")

    def block_walk(self, number: int, stage: Stage) -> Mapping[str, Any]:
        """A walk by an output's aligned blocks, and over the few values before the first and behind the last."""
        inside = bool(stage.until)
        reads = []
        for load in stage.loads:
            if load.access.mode == "bulk":
                continue
            text = self.kept_at_blocks(load) if load.when == "kept" else self.from_blocks(load)
            reads.append({
                "declare": f"const {self.vec_type(load.access)} ", "target": f"{load.access.name}_vec",
                "call": self.within(load, bracketed(text), inside), "keep": "",
            })  # fmt: skip
        body = self.body(stage, loads_first=False)
        start = self.col()
        made = {
            "title": self.title(number, stage),
            "col": f"head + {start}",
            "guard": self.block_guard(),
            "whole": "",
            "parts": [],
            "loads_first": False,
            "copies": [],
            "pending": -1,
            "head": self.loop_head(stage),
            "reads": reads,
            "shifts": [],
            "loop": self.loops(),
            "scope": True,
            "unroll": UNROLL if self.plan.unrolled else f"{UNROLL} 4",
            "outputs": [
                {
                    "type": self.vec_type(s.access),
                    "name": f"{s.access.name}_vec",
                    "call": self.store_at_blocks(s.access, stage.blocks_of),
                    "across": False,
                    "rest": self.stored_rest(s),
                }
                for s in stage.stores
            ],
            "placed": [],
            "staged": [],
            "leaves": [],
            "singles": self.edge_singles(stage),
            "body": body,
            "names_col": True,
            "vector_reductions": [],
            "until": self.within_limit("col", stage.until),
            "rest_body": self.statements(stage.rest_body),
            "rest": [],
            "first_results": False,
            "results": [],
            "behind": self.behind(stage),
            "before": [],
            "packed": [],
            "refill": [],
        }
        return {**made, "spans": [made]}

    def edge_singles(self, stage: Stage) -> Mapping[str, Any]:
        """What such a walk leaves over, a value a thread where a row has so many threads."""
        tile = self.plan.tile
        enough = 2 * (tile.vector - 1) <= tile.threads_per_row
        first_tile = f"{self.tile()} % {tile.col_tiles} == 0" if tile.col_tiles > 1 else ""
        place = "lane" if enough else "i"
        test = all_of("live" * self.plan.lacks_rows, first_tile, f"{place} < edge")
        lane, step = ("lane", f"i += {tile.threads_per_row}") if tile.threads_per_row > 1 else ("0", "++i")
        col = f"const int col = {place} < head ? {place} : {self.cols} - edge + {place};"
        reads = [self.single_read(load, "", "col", "_edge") for load in stage.loads if load.access.mode != "bulk"]
        return {
            "ahead": [],
            "turn": f"if ({test})" if enough else f"for (int i = {lane}; {test}; {step})",
            "lines": [col, *reads, *self.single(stage, "_edge")],
            "pad": "",
        }

    def rest_singles(self, stage: Stage) -> Mapping[str, Any] | None:
        """The values behind a row's last vector, in any other walk: one a thread, read ahead of the walk."""
        if not self.plan.tile.apart:
            return None
        reads = [load for load in stage.reads if load.access.tensor not in self.taken]
        self.taken.update(load.access.tensor for load in reads)
        ahead = [self.single_read(load, "in_rest", "rest_col", "_last") for load in reads]
        ahead += [f"{VALUE_TYPES[keep.dtype]} {keep.value}_last{{}};" for keep in stage.keeps]
        lines = self.single(stage, "_last")
        named = ["const int col = rest_col;"] if stage.stores or self.body_names_col(stage) else []
        staged = [store.access for store in stage.stores if store.staged]
        pads = [f"{access.name}_staged[rest_col] = {self.zero(access)};" for access in staged]
        pad = f"else if (lane < {self.plan.tile.vector})" if pads else ""
        return {"ahead": ahead, "turn": "if (in_rest)", "lines": [*named, *lines], "pad": pad, "pads": pads}

    def single(self, body: Body, suffix: str) -> list[str]:
        """A body's statements for one value, that no vector holds."""

        def read(load: Load) -> str:
            if load.when == "ahead":
                return ""
            text = self.element(load, "col") if load.access.mode == "bulk" else f"{load.access.name}{suffix}"
            return self.to_value(load.access.dtype, text)

        def write(store: Store) -> str:
            row = f"{store.access.name}_staged" if store.staged else self.pointer(store.access)
            return f"{row}[col] = {self.to_storage(store.access.dtype, store.value)};"

        def kept(keep: Keep) -> str:
            return f"{keep.value}{suffix}"

        return element_lines(body, Element(read, write, self.update_one, kept, col="col"), self)

    def body_names_col(self, body: Body) -> bool:
        """Do the statements for an element ask for its column, be it to find it in shared memory?"""
        placed = any(store.access.mode == "bulk" for store in body.stores)
        return placed or counts(body.body, "col_index") or any(load.access.mode == "bulk" for load in body.loads)

    def body(self, body: Body, loads_first: bool) -> list[str]:
        """A body's statements for element j of a vector. `loads_first`: all of a thread's vectors were read before."""

        def read(load: Load) -> str:
            return "" if load.when == "ahead" else self.to_value(load.access.dtype, self.element_of(load, loads_first))

        def kept(keep: Keep) -> str:
            return self.kept_at(f"{keep.value}_kept", False)

        return element_lines(body, Element(read, self.write, self.update, kept), self)

    def element_of(self, load: Load, loads_first: bool) -> str:
        """Element j of what was read."""
        if load.access.mode == "bulk":
            return self.element(load)
        name = f"{load.access.name}_vec"
        kept = load.when not in ("now", "fetched") and not self.plan.in_shared
        in_array = loads_first and load.access.mode != "across" and load.when != "fetched"
        vector = self.kept_at(name, True) if kept else f"{name}[v]" if in_array else name
        return f"{vector}.at[j]"

    def write(self, store: Store) -> str:
        """Element j of a result, to its vector, or to where the row is in shared memory."""
        placed = store.access.mode == "bulk" and store.staged
        place = self.at(store.access) if placed else f"{store.access.name}_vec.at[j]"
        live = "if (live) " if placed and self.plan.lacks_rows else ""
        return f"{live}{place} = {self.to_storage(store.access.dtype, store.value)};"

    # ---- all of it

    def walks(self) -> list[tuple[Stage, Mapping[str, Any]]]:
        """What a template prints of each walk."""
        return [(stage, self.walk(number, stage)) for number, stage in enumerate(self.plan.stages, 1)]

    def context(self) -> dict[str, Any]:
        plan = self.plan
        walks = self.walks()
        reduces = self.row_reduces()
        places = self.bulk_places()
        keeps = self.keeps()
        lanes = min(plan.tile.team, plan.target.warp)
        launch_body = self.statements(plan.launch_body)
        row_values = [*map(self.row_load, plan.row_loads), *self.statements(plan.row_body)]
        return {
            **self.frame(plan),
            "includes": self.includes(),
            "uses": {"vec": self.uses_vec, "functions": self.functions},
            "index": self.index,
            "row_reduces": reduces,
            "partners": list(dict.fromkeys(r["ctype"] if len(r["fields"]) == 1 else "float" for r in reduces)),
            "partner": self.spelling.shuffle_xor.format("v", "step"),
            "from_before": self.from_before(lanes),
            "piece": PIECE_BYTES,
            "lanes": lanes,
            "tiling": self.tiling(),
            "live": self.plan.lacks_rows,
            "stands_in": self.plan.stands_in,
            "lane": self.lane(),
            "lane_note": self.lane_note(),
            "rows_product": self.rows_product(),
            "row_indices": self.row_indices(),
            "row_pointers": self.row_pointers(),
            "launch_body": launch_body,
            "row_values": row_values,
            "row_writes": self.row_writes(plan.row_stores),
            "start": self.start(),
            "kept_shared": [{"type": t, "name": n, "offset": o} for n, t, o, _ in keeps] if plan.in_shared else [],
            "staged_shared": [] if plan.bulk else self.staged_rows(),
            "bulk_places": places,
            "fetched_shared": self.fetched_shared(),
            "together": self.together(),
            "leaves": any(walk["leaves"] for _, walk in walks),
            "kept_registers": [] if plan.in_shared else [
                {"type": t, "name": n, "dims": self.register_dims(vector)} for n, t, _, vector in keeps
            ],
            "col": self.col(),
            "loops": self.loops(),
            "guard": self.guard(),
            "cols": self.cols,
            "blocks_begin": self.head(),
            "in_rest": self.rest_test(),
            "vector_cols": "" if plan.flat else self.plan.vector_cols,
            "begins_first": any(not stage.blocks_of for stage in self.plan.stages),
            "whole": self.whole(),
            "rest": self.rest(),
            "first_element": self.first_element(),
            "walks": walks,
        }  # fmt: skip

    def includes(self) -> list[str]:
        return self.headers_of(a.dtype for a in self.plan.accesses)
