"""An AttentionPlan in the words of one dialect: what templates/attention.cu.j2 prints, in the order it prints it.

Nothing is decided here. Whatever could be wrong is a field of the plan; this turns fields into C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.attention.words import AttentionWords
from fusegen.emitting.body import Element, element_lines
from fusegen.emitting.dialect import all_of
from fusegen.planner.attention.parts import CHUNK, Matrix
from fusegen.planner.model import Access, Load, Store
from fusegen.planner.parts import used_by
from fusegen.planner.pieces import stride_name

LOG2E = "1.44269504f"


class AttentionSpeller(AttentionWords):
    """The words of one plan in one dialect; `context()` is what the template sees."""

    # ---- matrices on their way to shared memory

    def matrix(self, m: Matrix, rows: bool) -> Mapping[str, Any]:
        """How a thread brings its 16 bytes of each line. Where the threads fill whole lines, one chunk lies as many
        lines behind the one before it, and its address differs by what is the same for all threads."""
        plan, name, last = self.plan, m.name, len(self.dims) - 1
        beside = m.padded // CHUNK
        chunks = m.lines * beside
        strides = [i for i in m.access.strided if not (rows and i == last)]
        base = self.pointers[m.access.tensor] + "".join(
            f" + {self.dims[i].index} * {stride_name(m.access, self.dims, i)}" for i in strides
        )
        ld = f"{name}_ld" if not rows else stride_name(m.access, self.dims, last) if last in m.access.strided else ""
        base += f" + row0 * {ld}" if rows and ld else ""
        jump = plan.threads // beside if plan.threads % beside == 0 else 0
        passes = -(-chunks // plan.threads)
        region = f"{name}_at + " if m is not plan.key else ""
        if jump:
            col, line, lines = f"{name}_col", f"{name}_row", ""
            further = f" + v * {jump}" if passes > 1 else ""
            declares = [
                f"const int {line} = threadIdx.x / {beside}, {col} = threadIdx.x % {beside} * {CHUNK};",
                f"const {self.element}* const {name}_from = {base}{f' + {line} * {ld}' if ld else ''} + {col};",
            ]
            first = (f"(key0{further})" if further else "key0") if not rows else further.removeprefix(" + ")
            source = f"{name}_from" + (f" + {first} * {ld}" if ld and first else "")
            at = line + further
            to = f"{name}_to" + (f" + v * ({jump} * {name}_pitch * 2)" if further else "")
            if m.copied:
                declares.append(f"const unsigned {name}_to = ring_at + ({region}{line} * {name}_pitch + {col}) * 2;")
        else:
            col = at = "at"
            declares = [f"const {self.element}* const {name}_from = {base};"]
            lines = (
                f"const int chunk = {'v * threads + ' if passes > 1 else ''}threadIdx.x, "
                f"line = chunk / {beside}, at = chunk % {beside} * {CHUNK};"
            )
            source = f"{name}_from" + (f" + {'line' if rows else '(key0 + line)'} * {ld}" if ld else "") + " + at"
            line = at = "line"
            to = f"ring_at + ({region}line * {name}_pitch + at) * 2"
        inner = f"({at})" if " " in at else at
        place = f"({col} + j) * {name}_pitch + {at}" if m.across else f"{inner} * {name}_pitch + {col}"
        guard = (f"{at} < {m.lines}" if jump else f"chunk < {chunks}") if chunks % plan.threads else ""
        tests = [f"{at} < rows_here"] if rows else [f"key0 + {at} < keys"] if plan.ragged else []
        if m.columns != m.padded:
            tests.append(f"{col} < {m.columns}")
        if guard and not m.copied:
            tests.append(guard)
        self.functions.add("copy_chunk" if m.copied else "load_chunk")
        if not m.copied and not m.across:
            self.functions.add("store")
        if not m.copied and m.width > 1:
            self.functions.add("load")
        return {
            "name": name,
            "m": m,
            "type": self.vec(plan.dtype, CHUNK),
            "declares": declares,
            "passes": passes,
            "guard": guard,
            "lines": lines,
            "copied": f"copy_chunk<{m.width}>",
            "load": f"load_chunk<{m.width}>",
            "source": source,
            "count": f"{all_of(*tests)} ? {CHUNK} : 0" if tests else str(CHUNK),
            "place": place,
            "to": to,
        }

    # ---- behind the sums

    def behind(self) -> Mapping[str, Any]:
        plan, behind = self.plan, self.plan.behind
        vector = behind.vector
        per_row = plan.value.columns // vector
        places = plan.tile.rows * per_row
        at = "v * threads + threadIdx.x" if places > plan.threads else "threadIdx.x"
        row: list[str] = []
        asked = used_by(behind.body) | used_by(behind.row_body) | used_by(behind.pivot_body)
        if behind.pivot or behind.top in asked | {s.value for s in (*behind.stores, *behind.row_stores)}:
            row.append(f"const float {behind.top} = row_largest[m];")
        row += [self.row_value(load) for load in behind.row_loads]
        if behind.pivot:
            self.functions.add("exponential")
            row += self.statements(behind.pivot_body)
            row.append("// sums were carried against the largest logit")
            row.append(f"const float brought = exponential({behind.top} - {behind.pivot});")
        if behind.total:
            row.append(f"const float {behind.total} = row_summed[m]{' * brought' if behind.pivot else ''};")
        row += self.statements(behind.row_body)
        row += [f"if (col == 0) *({self.at(store.access)}) = {self.stored(store)};" for store in behind.row_stores]
        for load in behind.loads:
            vec = self.vec(load.access.dtype, vector)
            row.append(f"const {vec} {load.access.name}_vec = {self.load(load.access, vector)};")
        row += [f"{self.vec(s.access.dtype, vector)} {s.access.name}_vec;" for s in behind.stores]
        if vector > 1 and behind.stores:
            self.functions.add("load")
            row.append(
                f"const Vec<float, {vector}> {behind.sums}_total = load<{vector}>(row_sums + m * sums_stride + col);"
            )
        elif behind.stores:
            row.append(f"const Vec<float, 1> {behind.sums}_total = {{row_sums[m * sums_stride + col]}};")
        body = [f"const float {behind.sums} = {behind.sums}_total.at[j]{' * brought' if behind.pivot else ''};"]

        def read(load: Load) -> str:
            return self.to_value(load.access.dtype, f"{load.access.name}_vec.at[j]")

        def write(store: Store) -> str:
            return f"{store.access.name}_vec.at[j] = {self.stored(store)};"

        body += element_lines(behind, Element(read, write), self)
        return {
            "passes": -(-places // plan.threads),
            "at": at,
            "per_row": per_row,
            "vector": vector,
            "row": row,
            "body": body if behind.stores else [],
            "stores": [self.store(store.access, vector) for store in behind.stores],
        }

    def moving(self, what: str, access: Access) -> str:
        name = what if access.mode == "vector" else f"{what}_each"
        self.functions.add(name)
        return name

    def load(self, access: Access, vector: int) -> str:
        return f"{self.moving('load', access)}<{vector}>({self.at(access, 'col')})"

    def store(self, access: Access, vector: int) -> str:
        return f"{self.moving('store', access)}<{vector}>({self.at(access, 'col')}, {access.name}_vec);"

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
        return lines

    def sizes(self) -> list[str]:
        plan, t = self.plan, self.plan.tile
        return [
            "// queries of a block, keys of a tile, and all keys",
            f"constexpr int tile_rows = {t.rows}, tile_keys = {t.keys}, keys = {plan.keys}, threads = {plan.threads};",
            "// elements from one line in shared memory to the next, an odd number of 16 bytes: what is read at once",
            "// of 8 lines lies in different banks",
            f"constexpr int {', '.join(f'{m.name}_pitch = {m.pitch}' for m in (plan.query, plan.key, plan.value))};",
            f"constexpr int {plan.value.name}_at = {plan.key.elements}, stage_elements = {plan.stage_elements};"
            "  // of a tile's values, and to the next stage",
            *(["constexpr int stage_bytes = 2 * stage_elements;"] if plan.atom.kind == "mma" else []),
            f"constexpr int {plan.query.name}_at = {plan.query_at};",
            f"constexpr int sums_stride = {plan.sums_stride};  // floats of a row of sums",
        ]

    def first_lane(self) -> str:
        """The test for one lane of those that share a row: they differ in the lowest bits, or in the highest."""
        steps = self.slot_steps
        return f"lane % {2 * steps[-1]} == 0" if steps[0] == 1 else f"lane < {steps[0]}"

    # ---- all of it

    def context(self) -> dict[str, Any]:
        plan, atom = self.plan, self.plan.atom
        mma = atom.kind == "mma"
        self.functions.update(("larger", "power_of_2", "partner"))
        self.constants.add("INFINITY")
        query, key, value = self.matrix(plan.query, True), self.matrix(plan.key, False), self.matrix(plan.value, False)
        tested = self.element_lines(plan.tested, f"{self.scores}[n][i]")
        free = self.element_lines(plan.free, f"{self.scores}[n][i]") if plan.tests else tested
        weight = self.element_lines(plan.weight, "power") if plan.weight.body else []
        ends, key_range, behind = self.ends(), self.key_range(), self.behind()
        launch_body = self.statements(plan.launch_body)
        row_setup, row_arrays = self.row_setup(), self.row_arrays()
        asks_col = {name: any(self.col_name in line for line in lines) for name, lines in
                    (("tested", tested), ("free", free), ("weight", weight))}  # fmt: skip
        across = plan.tile.keys // atom.cols
        dtype = plan.dtype.name
        return {
            **self.frame(plan),
            "includes": self.headers_of({a.dtype for a in plan.accesses} | {plan.dtype}),
            "uses": {"vec": True, "functions": self.functions},
            "index": "int",
            "row_reduces": [],
            "partner": self.spelling.shuffle_xor,
            "element": self.element,
            "chunk": CHUNK,
            "copy_bodies": {"copy_chunk": self.spelling.functions.get(f"copy_chunk_{plan.dtype.bytes}", ())},
            "mma": mma,
            "atom": {
                "part": atom.kind, "type": atom.word, "builtin": atom.instruction, "parts": atom.instructions,
                "body": self.spelling.functions.get(f"mma_by_rows_{dtype}", ()),
                "pair": self.spelling.functions.get(f"pair_{dtype}", ()),
                "matrix": self.spelling.functions.get("matrix", ()),
                "matrix_across": self.spelling.functions.get("matrix_across", ()),
            },
            "sizes": self.sizes(),
            "launch_body": launch_body,
            "place": self.place(),
            "ends": ends,
            "key_range": key_range,
            "met": len(self.named_ends(plan.ends)) if plan.meets else 0,
            "query": query,
            "key": key,
            "value": value,
            "copies": any(m.copied for m in (plan.query, plan.key, plan.value)),
            "row_setup": row_setup,
            "row_arrays": row_arrays,
            "slots": self.row_slots,
            "slot": self.slot,
            "slot_row": self.slot_row,
            "slot_steps": self.slot_steps,
            "scores": self.scores,
            "sums": self.sums,
            "across": across,
            "depth_steps": plan.query.padded // atom.k,
            "width_steps": plan.value.padded // 16,
            "accumulators": atom.accumulators,
            "col_name": self.col_name,
            "col": atom.fragment.col_text(("i", 1)),
            "is_free": self.is_free(),
            "tested": tested,
            "tested_value": plan.tested.value,
            "free": free,
            "free_value": plan.free.value,
            "weight": weight,
            "weight_value": plan.weight.value if plan.weight.body else "power",
            "asks_col": asks_col,
            "total": bool(plan.behind.total),
            "log2e": "" if plan.base_2 else LOG2E,
            "behind": behind,
            "first_lane": self.first_lane(),
        }  # fmt: skip
