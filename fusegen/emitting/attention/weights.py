"""A WeightsPlan in the words of one dialect: what templates/weights.cu.j2 prints, in the order it prints it.

Nothing is decided here. Whatever could be wrong is a field of the plan; this turns fields into C++.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fusegen.emitting.attention.scores import LOG2E, ScoresSpeller
from fusegen.emitting.attention.waves import unit
from fusegen.emitting.body import Element, element_lines
from fusegen.emitting.dialect import VALUE_TYPES, asks
from fusegen.language.types import DType, f32
from fusegen.planner.attention.parts import CHUNK, ElementBody
from fusegen.planner.attention.weights import WeightsPlan
from fusegen.planner.model import Statement, Store
from fusegen.planner.parts import Body, used_by


class WrittenWords(ScoresSpeller):
    """What every kernel of written weights says of one plan."""

    plan: WeightsPlan

    @property
    def bodies(self) -> tuple[Body, ...]:
        results = self.plan.results
        return self.plan.tested, self.plan.free, results, replace(results, body=results.free_body)

    # ---- row values, known before the first tile or behind the first pass

    @property
    def row_values(self) -> list[tuple[str, DType]]:
        results, before, of_head = self.plan.results, self.known_before, self.plan.head_values
        asked = self.asked(results) | used_by(results.free_body)
        made = [(results.top, f32), (results.total, f32)]
        made += [(load.value, load.dtype) for load in results.row_loads]
        made += [(s.name, s.dtype) for s in (*results.pivot_body, *results.row_body)]
        known = {name for name, _ in before}
        return [*before, *((name, dtype) for name, dtype in dict.fromkeys(made) if name in asked - known - of_head)]

    def settled_rows(self, scale: str = "") -> list[str]:
        """What is known of row r behind the first pass, and stored of it; `scale`: the largest logit is so many times
        what was carried."""
        results = self.plan.results
        asked = used_by(results.row_body) | used_by(results.pivot_body) | used_by(results.body)
        asked |= {store.value for store in (*results.stores, *results.row_stores)}
        lines: list[str] = []
        if results.pivot or results.top in asked:
            lines.append(f"const float {results.top} = largest[r]{scale};")
        lines += [self.row_value(load) for load in results.row_loads]
        if results.pivot:
            self.functions.add("exponential")
            lines += self.statements(results.pivot_body)
            lines.append("// sums were carried against the largest logit")
            row_factor = "" if self.plan.base_2 else "factors[r]" if self.plan.extreme else LOG2E
            if results.total:
                lines.append(f"const float brought = exponential({results.top} - {results.pivot});")
            lines.append(f"pivots[r] = {results.pivot}{f' * {row_factor}' if row_factor else ''};")
        if results.total in asked:
            lines.append(f"const float {results.total} = summed[r]{' * brought' if results.pivot else ''};")
        lines += self.statements(results.row_body)
        before = {name for name, _ in self.known_before}
        lines += [f"{self.here(name)}[r] = {name};" for name, _ in self.row_values if name not in before]
        return lines + [
            f"if (inside && {self.first_lane()}) *({self.at(store.access)}) = {self.stored(store)};"
            for store in results.row_stores
        ]

    # ---- elements

    @property
    def factor(self) -> str:
        """Of what is carried, to the power of 2 that it is the logarithm of; empty where it is one."""
        return "" if self.plan.base_2 else LOG2E

    def exponential_of(self, logit: str, slot: str) -> str:
        """Of a logit, against the pivot of its row."""
        if not self.factor:
            return f"power_of_2({logit} - pivots[{slot}])"
        factor = f"factors[{slot}]" if self.plan.extreme else self.factor
        return f"power_of_2(fmaf({logit}, {factor}, -pivots[{slot}]))"

    def written_lines(
        self, logit: ElementBody, body: tuple[Statement, ...], given: str, write: Callable[[Store], str]
    ) -> list[str]:
        """From a score to what is written of it, by `write`. What both the logit and a result ask for is said once."""
        results = replace(self.plan.results, body=body)
        lines: list[str] = []
        if results.exps:
            lines += self.element_lines(logit, given)
            lines.append(f"const float {results.exps} = {self.exponential_of(logit.value, self.slot)};")
        elif logit.given in self.asked(results):
            lines.append(f"const float {logit.given} = {given};")
        lines += self.row_values_of(results)
        counted = replace(results, body=tuple(s for s in body if s.op.name != "col_index"))
        lines += element_lines(counted, Element(self.operand, write, col=self.col_name), self)
        return list(dict.fromkeys(lines))

    # ---- what a mask leaves out

    @property
    def masks(self) -> bool:
        """Are there tiles of which no scores are made?"""
        return self.plan.ends.skips

    def masked(self, store: Store) -> str:
        return f"{store.access.name}_masked"

    def masked_arrays(self, slots: int) -> list[str]:
        stores = self.plan.results.stores if self.masks else ()
        return [f"{VALUE_TYPES[s.access.dtype.value]} {self.masked(s)}[{slots}];" for s in stores]

    def masked_lines(self, minus_infinity: str) -> list[str]:
        """What row r has where a mask leaves nothing: that of an exponential of -inf."""
        results = self.plan.results
        if not self.masks:
            return []
        lines = ["{  // where the mask leaves nothing of a tile"]
        if results.exps:
            lines.append(f"  const float {results.exps} = {minus_infinity};")
        lines += [f"  {line}" for line in self.statements(results.body)]
        lines += [f"  {self.masked(store)}[r] = {store.value};" for store in results.stores]
        return [*lines, "}"]

    def fill(self, store: Store, part: str, lanes: int) -> list[str]:
        """Writes a row's columns of which no scores are made, by `lanes` threads, of which this one is number
        `part`."""
        access, plan = store.access, self.plan
        width = access.vector if access.mode == "vector" else 1
        vec = self.vec(access.dtype, width)
        value = self.stored(replace(store, value=f"{self.masked(store)}[r]"))
        lines = [f"{self.ctype(access.dtype)}* const {access.name}_row = {self.at(access)};"]
        if width > 1:
            self.functions.add("store")
            lines += [f"{vec} {access.name}_vec;", "#pragma unroll"]
            lines.append(f"for (int j = 0; j < {width}; ++j) {access.name}_vec.at[j] = {value};")
        each = f"store<{width}>({access.name}_row + col, {access.name}_vec);"
        if width == 1:
            each = f"{access.name}_row[col] = {value};"
        ranges = [("", "first_key")] if plan.ends.first is not None else []
        ranges += [("last_key + ", "keys")]
        for first, end in ranges:
            own = f"{part} * {width}" if width > 1 else part
            lines.append(f"for (int col = {first}{own}; col < {end}; col += {lanes * width}) {each}")
        return lines


class WeightsSpeller(WrittenWords):
    """The words of one plan in one dialect; `context()` is what the template sees."""

    @property
    def together(self) -> int:
        """Neighbouring columns of a row that a lane holds."""
        return self.plan.atom.accumulators // self.row_slots

    def width(self, store: Store) -> int:
        """Of those, how many are written at once."""
        return self.together if store.access.mode == "vector" and self.plan.keys % self.together == 0 else 1

    def sizes(self, asks_threads: bool) -> list[str]:
        plan, t = self.plan, self.plan.tile
        threads = f", threads = {plan.threads}" if asks_threads else ""
        return [
            "// queries of a block, keys of a tile, and all keys",
            f"constexpr int tile_rows = {t.rows}, tile_keys = {t.keys}, keys = {plan.keys}{threads};",
            *self.apart(),
            f"constexpr int {', '.join(f'{m.name}_pitch = {m.pitch}' for m in (plan.query, plan.key))};",
            f"constexpr int stage_elements = {plan.stage_elements};  // from one tile to the next",
            *(["constexpr int stage_bytes = 2 * stage_elements;"] if plan.atom.kind == "mma" else []),
            f"constexpr int {plan.query.name}_at = {plan.query_at};",
        ]

    def written(self) -> Mapping[str, Any]:
        plan, results = self.plan, self.plan.results
        given = f"{self.scores}[n][i]"

        def write(store: Store) -> str:
            return f"{store.access.name}_vec.at[j] = {self.stored(store)};"

        tested = self.written_lines(plan.tested, results.body, given, write)
        free = self.written_lines(plan.free, results.free_body, given, write) if plan.tests else tested
        first = f"key0 + n * {plan.atom.cols} + {plan.atom.fragment.col_text()}"
        stores: dict[str, list[str]] = {"free": [], "tested": []}
        for store in results.stores:
            name, width = store.access.name, self.width(store)
            to = f"{name}_rows[r] + {first}"
            if width > 1:
                self.functions.add("store")
                stores["free"].append(f"if (inside) store<{width}>({to}, {name}_vec);")
                ragged = f"if (inside && {first} < keys) store<{width}>({to}, {name}_vec);"
            else:
                each = f"for (int j = 0; j < {self.together}; ++j) "
                stores["free"] += ["#pragma unroll", f"{each}if (inside) ({to})[j] = {name}_vec.at[j];"]
                ragged = f"{each}if (inside && {first} + j < keys) ({to})[j] = {name}_vec.at[j];"
                if plan.ragged:
                    stores["tested"].append("#pragma unroll")
            if plan.ragged:
                stores["tested"].append(ragged)
        return {
            "together": self.together,
            "vecs": [f"{self.vec(s.access.dtype, self.together)} {s.access.name}_vec;" for s in results.stores],
            "tested": tested,
            "free": free,
            "stores": stores["free"],
            "tested_stores": stores["tested"] if plan.ragged else stores["free"],
            "rows": [
                (f"{self.ctype(s.access.dtype)}* {s.access.name}_rows[{self.row_slots}];",
                 f"{s.access.name}_rows[r] = {self.at(s.access)};")
                for s in results.stores
            ],
        }  # fmt: skip

    def context(self) -> dict[str, Any]:
        plan, atom = self.plan, self.plan.atom
        mma = atom.kind == "mma"
        self.functions.update(("larger", "power_of_2", "partner"))
        self.constants.add("INFINITY")
        query, key = self.matrix(plan.query, True), self.matrix(plan.key, False)
        tested = self.element_lines(plan.tested, f"{self.scores}[n][i]")
        free = self.element_lines(plan.free, f"{self.scores}[n][i]") if plan.tests else tested
        written = self.written()
        settled, launch_body = self.settled_rows(), self.statements(plan.launch_body)
        masked = self.masked_lines(self.exponential_of("-INFINITY", "r"))
        lanes = 1 << len(self.slot_steps)
        part = f"lane % {lanes}" if self.slot_steps[0] == 1 else f"lane / {self.slot_steps[0]}"
        fills = [line for store in plan.results.stores if self.masks for line in self.fill(store, part, lanes)]
        row_setup, row_arrays = self.row_setup(), self.row_arrays()
        lines = {"tested": tested, "free": free, "written": written["tested"], "written_free": written["free"]}
        asks_col = {name: asks(found, self.col_name) for name, found in lines.items()}
        ends, key_range = self.ends(), self.key_range()
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
            "chunk_words": self.chunk_words,
            "widening": [],
            "scaling": [],
            "copy_bodies": {"copy_chunk": self.spelling.functions.get(f"copy_chunk_{plan.dtype.bytes}", ())},
            "mma": mma,
            "atom": {
                **unit(atom, self.element),
                "body": self.spelling.functions.get(f"mma_by_rows_{dtype}", ()),
                "matrix": self.spelling.functions.get("matrix", ()),
            },
            "sizes": self.sizes(asks((query["lines"], key["lines"]), "threads")),
            "launch_body": launch_body,
            "place": self.place(),
            "ends": ends,
            "key_range": key_range,
            "met": len(self.named_ends(plan.ends)) if plan.meets else 0,
            "query": query,
            "key": key,
            "value": None,
            "brought": [key],
            "async_copies": plan.key.copied,
            "plain_copies": not plan.key.copied,
            "copies": plan.query.copied or plan.key.copied,
            "head_lines": self.head_lines(),
            "row_setup": row_setup,
            "setup_asks_row": asks(row_setup, "row", "m"),
            "row_arrays": [*self.factor_arrays(), *row_arrays, *self.masked_arrays(self.row_slots)],
            "slots": self.row_slots,
            "slot": self.slot,
            "slot_row": self.slot_row,
            "slot_steps": self.slot_steps,
            "scores": self.scores,
            "whose_keys": "the tile's keys",
            "across": plan.tile.keys // atom.cols,
            "depth_steps": plan.query.padded // atom.k,
            "accumulators": atom.accumulators,
            "col_name": self.col_name,
            "col": atom.fragment.col_text(("i", 1)),
            "first_numbers": [],
            "is_free": self.is_free(),
            "tested": tested,
            "tested_value": plan.tested.value,
            "free": free,
            "free_value": plan.free.value,
            "nothing": self.nothing,
            "written": written,
            "settled": settled,
            "masked": masked,
            "fills": fills,
            "asks_col": asks_col,
            "asks_key": plan.tests or asks_col["tested"] or asks_col["free"],
            "total": bool(plan.results.total),
            "power": self.exponential_of(f"{self.scores}[n][i]", self.slot),
            **self.factors(self.factor),
        }  # fmt: skip
