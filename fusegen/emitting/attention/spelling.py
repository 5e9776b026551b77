"""An AttentionPlan in the words of one dialect: what templates/attention.cu.j2 prints, in the order it prints it.

Nothing is decided here. Whatever could be wrong is a field of the plan; this turns fields into C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.attention.scores import LOG2E, ScoresSpeller
from fusegen.emitting.attention.waves import unit
from fusegen.emitting.attention.words import FIRST_ELEMENT
from fusegen.emitting.body import Element, element_lines
from fusegen.emitting.dialect import asks
from fusegen.planner.attention.parts import CHUNK, LANE_KEYS, AttentionPlan, Draw
from fusegen.planner.model import Access, Load, Store
from fusegen.planner.parts import Argument, Body, Value, used_by


class AttentionSpeller(ScoresSpeller):
    """The words of one plan in one dialect; `context()` is what the template sees."""

    plan: AttentionPlan

    def __init__(self, plan: AttentionPlan) -> None:
        super().__init__(plan)
        self.sums = f"{plan.behind.sums}_sums"

    @property
    def place_in_tile(self) -> str:
        return f"n * {self.plan.atom.cols} + "

    @property
    def bodies(self) -> tuple[Body, ...]:
        return self.plan.tested, self.plan.free, self.plan.weight

    def values(self) -> Mapping[str, Any]:
        """How a thread brings its 16 bytes of each line of values."""
        return self.matrix(self.plan.value, False)

    # ---- random bits

    @property
    def drawn(self) -> tuple[Draw, ...]:
        return self.plan.draws

    @property
    def fours(self) -> int:
        """Fours of neighbours that a lane has of one instruction's sums, where these are more than one."""
        return self.plan.atom.accumulators // 4 if self.plan.atom.kind == "wmma" else 1

    def draws(self) -> list[Mapping[str, str]]:
        """The words of four neighbouring scores, and the call that draws them. Of fours that two lanes share each draws
        those of one of its two rows, and gives the other lane its half."""
        if not self.drawn:
            return []
        shared = self.plan.atom.fragment.lanes_of_four == 2
        self.functions.update(("philox_words", *(("draw_for_two",) if shared else ())))
        known = {name for name, _ in self.known_before}

        def own(array: str) -> str:
            return f"lane % 2 ? {array}[1] : {array}[0]" if shared else f"{array}[0]"

        def text(arg: Argument) -> str:
            return own(self.here(arg.name)) if isinstance(arg, Value) and arg.name in known else self.argument(arg)

        first, col = own(FIRST_ELEMENT), f"({self.col_name} & ~3)" if shared else self.col_name
        call = "draw_for_two" if shared else "philox_words"
        dims, here = (f"[{self.fours}][4]", "[i / 4]") if self.fours > 1 else ("[4]", "")
        return [
            {
                "name": four(draw),
                "dims": dims,
                "call": f"{call}({four(draw)}{here}, {f'({first})' if shared else first} + {col}, {text(draw.offset)}, "
                f"{text(draw.seed)});",
            }
            for draw in self.drawn
        ]

    def weight_words(self) -> dict[str, Any]:
        """How exponentials become weights, in the words of both templates."""
        weight = self.weight_lines()
        return {
            "weight": weight,
            "weight_value": self.plan.weight.value if self.plan.weight.body else self.power,
            "power": self.power,
            "draws": self.draws(),
            "given_to_other": self.spelling.shuffle_xor.format("given", "1"),
        }

    def weight_lines(self) -> list[str]:
        """From an exponential to what is multiplied."""
        if not self.plan.weight.body:
            return []
        here = "[i / 4]" if self.fours > 1 else ""
        bits = [f"const int {d.value} = static_cast<int>({four(d)}{here}[i % 4]);" for d in self.drawn]
        return [*bits, *self.element_lines(self.plan.weight, self.power)]

    @property
    def power(self) -> str:
        """What an exponential is called: as the chain does, where weights are made of it."""
        return self.plan.weight.given if self.plan.weight.body else "power"

    # ---- behind the sums

    @property
    def columns_at_once(self) -> int:
        """Of a row of sums that are in shared memory."""
        return self.plan.value.columns

    @property
    def place_of_sums(self) -> str:
        """Where the sums of column `col` of row m lie there."""
        return "m * sums_stride + col"

    def behind(self) -> Mapping[str, Any]:
        plan, behind = self.plan, self.plan.behind
        vector = behind.vector
        per_row = self.columns_at_once // vector
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
                f"const Vec<float, {vector}> {behind.sums}_total = load<{vector}>(row_sums + {self.place_of_sums});"
            )
        elif behind.stores:
            row.append(f"const Vec<float, 1> {behind.sums}_total = {{row_sums[{self.place_of_sums}]}};")
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

    def load(self, access: Access, vector: int) -> str:
        return f"{self.moving('load', access)}<{vector}>({self.at(access, 'col')})"

    def store(self, access: Access, vector: int) -> str:
        return f"{self.moving('store', access)}<{vector}>({self.at(access, 'col')}, {access.name}_vec);"

    def sizes(self) -> list[str]:
        plan, t = self.plan, self.plan.tile
        return [
            "// queries of a block, keys of a tile, and all keys",
            f"constexpr int tile_rows = {t.rows}, tile_keys = {t.keys}, keys = {plan.keys}, threads = {plan.threads};",
            *self.dealing(),
            *self.apart(),
            f"constexpr int {', '.join(f'{m.name}_pitch = {m.pitch}' for m in (plan.query, plan.key, plan.value))};",
            f"constexpr int {plan.value.name}_at = {plan.key.elements}, stage_elements = {plan.stage_elements};"
            "  // of a tile's values, and to the next stage",
            *(["constexpr int stage_bytes = 2 * stage_elements;"] if plan.atom.kind == "mma" else []),
            f"constexpr int {plan.query.name}_at = {plan.query_at};",
            f"constexpr int sums_stride = {plan.sums_stride};  // floats of a row of sums",
            *self.page_sizes(),
        ]

    # ---- all of it

    def context(self) -> dict[str, Any]:
        plan, atom = self.plan, self.plan.atom
        mma = atom.kind == "mma"
        self.functions.add("rounded")
        if plan.atom.repeated:  # lanes give each other what they round
            self.functions.add("partner")
        self.carry()
        query, key, value = self.matrix(plan.query, True), self.matrix(plan.key, False), self.values()
        tested = self.element_lines(plan.tested, f"{self.scores}[n][i]")
        free = self.element_lines(plan.free, f"{self.scores}[n][i]") if plan.tests else tested
        weighed, widening, scaling = self.weight_words(), self.widening(), self.scaling()
        ends, key_range, behind = self.ends(), self.key_range(), self.behind()
        launch_body = self.statements(plan.launch_body)
        row_setup, row_arrays = self.row_setup(), self.row_arrays()
        asks_col = {name: asks(lines, self.col_name) for name, lines in
                    (("tested", tested), ("free", free), ("weight", weighed["weight"]))}  # fmt: skip
        across = plan.tile.keys // atom.cols
        dtype, words = plan.dtype.name, unit(atom, self.element)
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
            "widening": widening,
            "scaling": scaling,
            "copy_bodies": {"copy_chunk": self.spelling.functions.get(f"copy_chunk_{plan.dtype.bytes}", ())},
            "mma": mma,
            "atom": {
                **words,
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
            "stride": self.stride,
            "met": len(self.named_ends(plan.ends)) if plan.meets else 0,
            "query": query,
            "key": key,
            "value": value,
            "brought": [key, value],
            "async_copies": key["m"].copied or value["m"].copied,
            "plain_copies": not (key["m"].copied and value["m"].copied),
            "copies": any(m.copied for m in (plan.query, plan.key, plan.value)),
            "head_lines": self.head_lines(),
            "row_setup": row_setup,
            "setup_asks_row": asks(row_setup, "row", "m"),
            "row_arrays": [*self.factor_arrays(), *row_arrays],
            "slots": self.row_slots,
            "slot": self.slot,
            "slot_row": self.slot_row,
            "slot_steps": self.slot_steps,
            "scores": self.scores,
            "whose_keys": "the tile's keys",
            "sums": self.sums,
            "across": across,
            "depth_steps": plan.query.padded // atom.k,
            "width_steps": plan.value.padded // 16,
            "accumulators": atom.accumulators,
            "col_name": self.col_name,
            "col": atom.fragment.col_text(("i", 1)),
            "first_numbers": self.first_numbers(),
            "is_free": self.is_free(),
            "tested": tested,
            "tested_value": plan.tested.value,
            "free": free,
            "free_value": plan.free.value,
            **weighed,
            "fours": self.fours,
            "asks_col": asks_col,
            "nothing": self.nothing,
            "total": bool(plan.behind.total),
            **self.factors("" if plan.base_2 else LOG2E),
            "behind": behind,
            "first_lane": self.first_lane(),
            "values": self.values_at(words),
        }  # fmt: skip

    def carry(self) -> None:
        """Asks for what every softmax takes."""
        if self.plan.softmaxed:
            self.functions.update(("larger", "power_of_2", "partner"))
            self.constants.add("INFINITY")

    def values_at(self, words: Mapping[str, Any]) -> Mapping[str, str]:
        """Where a lane reads values in a line, and which column of a row's sums a fragment's is."""
        plan, value = self.plan, self.plan.value
        line = f"d * {plan.atom.cols} + {plan.atom.fragment.col_text(('i', 1))}"
        if not value.dealt:
            return {"at": words["at_key"], "column": line}
        at = words["at_key"].removeprefix(" + ")
        chunks = value.padded // CHUNK
        return {
            "at": f" + ({at} ^ lane % 16 / 8 * {LANE_KEYS})" if value.alternates else words["at_key"],
            "column": f"({line}) % {chunks} * {CHUNK} + ({line}) / {chunks}",
        }


def four(draw: Draw) -> str:
    """The array of the bits of four neighbouring scores."""
    return f"{draw.value.rstrip('_')}_four"
