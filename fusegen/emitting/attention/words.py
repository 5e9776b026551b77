"""The small texts of a ScoresPlan in one dialect: elements in memory, in registers, and the ends of masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fusegen.emitting.body import Element, element_lines
from fusegen.emitting.dialect import VALUE_TYPES, Dialect, all_of, float_text
from fusegen.emitting.loops import each_line
from fusegen.language.graph import COUNT_ELEMENTS
from fusegen.language.types import DType, i32
from fusegen.planner.attention.parts import Counted, Draw, ElementBody, Ends, EndText, ScoresPlan
from fusegen.planner.attention.recognition import LARGEST_LOGIT
from fusegen.planner.model import Access, Load, Statement
from fusegen.planner.parts import Body, Number, Value, used_by
from fusegen.planner.pieces import stride_name
from fusegen.targets.atoms import F32_BITS

FIRST_ELEMENT = "first_element"  # the index of a row's first score, in row-major order
FEW_KEYS = 64  # numbers of keys up to this one need no name


class ScoresWords(Dialect):
    """What every kernel over tiles of scores says of one plan."""

    keys_at_once = "tile_keys"  # whose scores a warp makes, from key0 on

    def __init__(self, plan: ScoresPlan) -> None:
        super().__init__(plan.target.spelling)
        self.plan = plan
        self.tile = plan.tile
        self.dims = plan.row_dims
        self.pointers = {p.tensor: p.name for p in plan.params if p.kind == "pointer"}
        self.scores = f"{plan.tested.given}_sums"
        self.element_number = f"{FIRST_ELEMENT}[{self.slot}] + {{}}"

    @property
    def bodies(self) -> tuple[Body, ...]:
        """What is made of elements of scores, in order."""
        return self.plan.tested, self.plan.free

    # ---- elements in memory

    @property
    def element(self) -> str:
        return self.ctype(self.plan.dtype)

    def vec(self, dtype: DType, count: int) -> str:
        return f"Vec<{self.ctype(dtype)}, {count}>"

    def index(self, dim: int, row: str) -> str:
        """The kernel's variable that counts a dimension of rows."""
        return row if dim == len(self.dims) - 1 else self.dims[dim].index

    def at(self, access: Access, *last: str, row: str = "row") -> str:
        """Where the tensor's row `row` begins, and then `last`."""
        terms = [f"{self.index(dim, row)} * {stride_name(access, self.dims, dim)}" for dim in access.strided]
        return " + ".join([self.pointers[access.tensor], *terms, *last])

    def by_row(self, access: Access) -> bool:
        """Has the tensor rows of its own for those of the queries?"""
        return len(self.dims) - 1 in access.strided

    def row_value(self, load: Load, row: str = "row") -> str:
        """The line that reads what is one value a row."""
        return self.define(
            load.value, load.dtype, self.to_value(load.access.dtype, f"*({self.at(load.access, row=row)})")
        )

    def row_lines(self, loads: Iterable[Load], body: Iterable[Statement]) -> list[str]:
        return [*map(self.row_value, loads), *self.statements(body)]

    def statements(self, body: Iterable[Statement], col: str = "col + j") -> list[str]:
        """As everywhere, but that large numbers which are added to places have names, such as a window's keys."""
        lines: list[str] = []
        for s in body:
            if s.op.name in ("add", "sub") and s.dtype is i32 and s.exact:
                args = []
                for arg in s.args:
                    if isinstance(arg, Number) and abs(arg.value) > FEW_KEYS:
                        lines.append(f"constexpr int {s.name}_keys = {self.argument(arg)};")
                        arg = Value(f"{s.name}_keys", arg.dtype)
                    args.append(arg)
                s = replace(s, args=tuple(args))
            lines.append(self.statement(s, col))
        return lines

    # ---- rows in registers

    @property
    def row_slots(self) -> int:
        """Rows of which a lane holds elements."""
        fragment = self.plan.atom.fragment
        return len({fragment.row(i, 0) for i in range(self.plan.atom.accumulators)})

    @property
    def slot(self) -> str:
        """Of element i, which of the lane's rows it is in."""
        return "i / 2" if self.row_slots > 1 else "0"

    @property
    def slot_row(self) -> str:
        """The row of the tile that is a lane's row r, before which stands the warp's first."""
        fragment = self.plan.atom.fragment
        step = fragment.rows_apart
        return f"{fragment.row_text()} + r * {step}" if step else fragment.row_text()

    @property
    def slot_steps(self) -> tuple[int, ...]:
        """Lanes that share a row differ by these bits."""
        return self.plan.atom.fragment.lanes_of_row

    def here(self, value: str) -> str:
        """The array that holds what is one value a row."""
        return f"{value}_here"

    @property
    def row_values(self) -> list[tuple[str, DType]]:
        """What elements ask for of their rows."""
        return self.known_before

    @property
    def known_before(self) -> list[tuple[str, DType]]:
        """Of that, what is known before the first tile, but for what a head has one of."""
        made = [(load.value, load.dtype) for load in self.plan.row_loads]
        made += [(s.name, s.dtype) for s in self.plan.row_body]
        asked, of_head = self.asked_of_rows, self.plan.head_values
        return [(name, dtype) for name, dtype in made if name in asked - of_head]

    @property
    def asked_of_rows(self) -> frozenset[str]:
        """What elements are made of, rows' values among others."""
        counted = (used_by(c.body) for c in self.plan.free.counted)
        return frozenset().union(*map(self.asked, self.bodies), *counted, *(draw.uses for draw in self.drawn))

    def head_lines(self) -> list[str]:
        """What a head has one of, as far as elements or rows ask for it: made once, for all rows of a block."""
        plan, of_head = self.plan, self.plan.head_values
        asked = set(self.asked_of_rows)
        if self.known_before:
            asked |= used_by(s for s in plan.row_body if s.name not in of_head)
        body: list[Statement] = []
        for s in reversed(plan.row_body):
            if s.name in asked & of_head:
                body.insert(0, s)
                asked |= s.uses
        return self.row_lines([load for load in plan.row_loads if load.value in asked & of_head], body)

    def asked(self, body: Body) -> frozenset[str]:
        """The values that a body is made of, or gives."""
        given = {body.value} if isinstance(body, ElementBody) else {store.value for store in body.stores}
        return used_by(body.body) | given

    @property
    def counts_elements(self) -> bool:
        """Do elements ask for their index among all scores, as random numbers do?"""
        counts = [s for body in self.bodies for s in body.body if s.op.name in COUNT_ELEMENTS[1:]]
        return bool(counts or self.drawn)

    @property
    def drawn(self) -> tuple[Draw, ...]:
        """Random bits that four neighbouring scores have of one call."""
        return ()

    def flat_row(self) -> str:
        """The number of the row `row` among those of all leading axes."""
        text = ""
        for dim in self.dims:
            index = "row" if dim is self.dims[-1] else dim.index
            text = f"({text} * {dim.extent} + {index})" if text else index
        return text

    def element_lines(self, body: ElementBody, given: str) -> list[str]:
        """From `given`, an element in registers, to the body's value."""
        named = body.given in self.asked(body) and given != body.given
        lines = [f"const float {body.given} = {given};"] if named else []
        lines += self.row_values_of(body)
        lines += [self.define(c.value, c.dtype, self.number(c)) for c in body.counted if c.value in self.asked(body)]
        counted = replace(body, body=tuple(s for s in body.body if s.op.name != "col_index"))  # the loop has its number
        return [*lines, *element_lines(counted, Element(self.operand, col=self.col_name), self)]

    @property
    def place_in_tile(self) -> str:
        """Of the score at hand, the first column of its instruction's, as a term of a sum; empty where there is one."""
        return ""

    def number(self, counted: Counted) -> str:
        """Of the score at hand, counted by how many columns it is behind its thread's first one, or diagonals behind
        that of its first row as well: a number once loops are unrolled."""
        fragment, sign = self.plan.atom.fragment, "-" if counted.step < 0 else "+"
        first = first_of(counted) if counted.diagonal else f"{first_of(counted)}[{self.slot}]"
        behind = f"{self.place_in_tile}{fragment.own_col_text(('i', 1))}"
        behind += f" - {fragment.own_row_text(('i', 1))}" if counted.diagonal else ""
        if counted.dtype is i32:
            return f"static_cast<int>(static_cast<unsigned>({first}) {sign} ({behind}))"
        return f"{first} {sign} static_cast<float>({behind})"

    def first_numbers(self) -> list[str]:
        """The lines that find the counted numbers of a thread's first column, for each of its rows or the first one."""
        found, slots = self.plan.free.counted, self.row_slots
        if not found:
            return []
        along, apart = [c for c in found if c.diagonal], [c for c in found if not c.diagonal]
        return [
            "// numbers of the thread's first column; those of others are as far from them as their columns"
            if apart
            else "// numbers of the thread's first row and column; others are as far from them as their diagonals",
            *(f"float {first_of(c)}[{slots}];" for c in apart),
            f"constexpr int last_exact = 1 << {F32_BITS};  // all whole numbers up to here are floats",
            "bool exact = true;",
            *(each_line(self.numbers_of_row(along), "r", 1) if along else []),
            *(each_line(self.numbers_of_row(apart), "r", slots) if apart else []),
            *(["exact = __all_sync(0xffffffffu, exact);"] if self.votes else []),
        ]

    def numbers_of_row(self, found: Iterable[Counted]) -> list[str]:
        """The lines that find such numbers of a thread's row r, and tell whether they are exact. Diagonals' are called
        what they are; so are the whole numbers that they are converted from."""
        here: list[str] = []
        made: set[str] = set()
        firsts = {c.value: first_of(c) for c in (*found, *self.plan.tested.counted) if c.diagonal}
        for c in found:
            asked = used_by(c.body) - made
            here += [
                self.define(name, dtype, f"{self.here(name)}[r]") for name, dtype in self.row_values if name in asked
            ]
            own = [s for s in c.body if s.name not in made]
            here += self.statements((renamed(s, firsts) for s in own), f"key0 + {self.plan.atom.fragment.col_text()}")
            made |= {*asked, *(s.name for s in own)}
            here += [] if c.diagonal else [f"{first_of(c)}[r] = {c.value};"]
            here.append(f"exact = exact && fabsf({firsts.get(c.value, c.value)}) <= last_exact - tile_keys;")
        return here

    @property
    def votes(self) -> bool:
        """Do the lanes of a warp meet in tiles that need no test?"""
        return False

    def row_values_of(self, body: Body) -> list[str]:
        """The row values that a body asks for, by their names."""
        asked = self.asked(body)
        values = [(name, dtype) for name, dtype in self.row_values if name in asked]
        return [self.define(name, dtype, f"{self.here(name)}[{self.slot}]") for name, dtype in values]

    @property
    def col_name(self) -> str:
        """What a kernel's loops call the column of the score at hand: as the chain does, where it asks for it."""
        return next((s.name for body in self.bodies for s in body.body if s.op.name == "col_index"), "col")

    def operand(self, load: Load) -> str:
        """The element of an operand that belongs to the score at hand."""
        pointer = self.here(load.access.name) + (f"[{self.slot}]" if self.by_row(load.access) else "")
        return self.to_value(load.access.dtype, f"{pointer}[{self.key}]")

    @property
    def key(self) -> str:
        """The column that is read: one that there is."""
        col = self.col_name
        return f"({col} < keys ? {col} : keys - 1)" if self.plan.ragged else col

    @property
    def element_loads(self) -> list[Load]:
        """Every operand that elements of scores and weights are made of."""
        return list({load.access.name: load for body in self.bodies for load in body.loads}.values())

    # ---- ends

    def ends(self) -> list[str]:
        """The lambda that finds what a mask leaves of a row's keys."""
        ends = self.plan.ends
        named = self.named_ends(ends)
        if not named:
            return []
        far: dict[int, str] = {}
        values = ", ".join(self.end_text(text, name, far) for name, text in named)
        return [
            *(f"constexpr long long {name} = {number};" for number, name in far.items()),
            f"struct Ends {{ long long {', '.join(name for name, _ in named)}; }};",
            f"const auto ends_of = [&]({'long long row' if self.ends_move else ''}) {{",
            *(f"  {line}" for line in self.row_lines(ends.row_loads, ends.row_body)),
            f"  return Ends{{{values}}};",
            "};",
        ]

    @property
    def ends_move(self) -> bool:
        return self.plan.ends.direction != "level"

    def named_ends(self, ends: Ends) -> list[tuple[str, EndText]]:
        found = [("first", ends.first), ("end", ends.end), ("free_first", ends.free_first), ("free_end", ends.free_end)]
        return [(name, text) for name, text in found if text is not None]

    def end_text(self, end: EndText, of: str, far: dict[int, str]) -> str:
        """In 64 bits. `of`: which end it is; a number of many keys that `far` does not have yet is called after it."""
        if end.how != "sum":
            self.functions.update((end.how,))
            texts = [self.end_text(inner, of, far) for inner in end.of]
            joined = texts[0]
            for text in texts[1:]:
                joined = f"{end.how}({joined}, {text})"
            return joined
        text = ""
        for name, times in end.terms:
            own = f"static_cast<long long>({name})" + (f" * {abs(times)}" if abs(times) != 1 else "")
            text = f"{text} {'-' if times < 0 else '+'} {own}" if text else f"{'-' if times < 0 else ''}{own}"
        if not text:
            return f"{end.plus}ll"
        if not end.plus:
            return text
        number = abs(end.plus)
        if number > FEW_KEYS and number not in far:
            taken = sum(name.startswith(f"{of}_keys") for name in far.values())
            far[number] = f"{of}_keys_{taken}" if taken else f"{of}_keys"
        return f"{text} {'-' if end.plus < 0 else '+'} {far.get(number, number)}"

    def key_range(self) -> list[str]:
        """The tiles of keys that a block takes, and which of them need no test."""
        plan, ends = self.plan, self.plan.ends
        lines: list[str] = []
        how = {"first": "least", "end": "most", "free_first": "most", "free_end": "least"}
        found: dict[str, str] = {}
        named = [name for name, _ in self.named_ends(ends)]
        if named and ends.direction == "level":
            lines.append("const Ends ends = ends_of();")
            found = {name: f"within_keys(ends.{name})" for name in named}
        elif named and ends.direction == "any":
            lines.append("// each thread finds the ends of one row, and all of them meet")
            lines.append("const Ends own = ends_of(row0 + (threadIdx.x < rows_here ? threadIdx.x : 0));")
            for place, name in enumerate(named):
                lines.append(f"const int own_{name} = meet_{how[name]}(within_keys(own.{name}));")
                lines.append(f"if (lane == 0) met[{place}][threadIdx.x / {plan.target.warp}] = own_{name};")
                self.functions.add(f"meet_{how[name]}")
            lines.append(self.spelling.barrier)
            for place, name in enumerate(named):
                lines.append(f"int met_{name} = met[{place}][0];")
                comparison = "<" if how[name] == "least" else ">"
                warps = plan.threads // plan.target.warp
                w, loop = ("w", f"for (int w = 1; w < {warps}; ++w) ") if warps > 2 else ("1", "")
                meets = f"met_{name} = met[{place}][{w}] {comparison} met_{name} ? met[{place}][{w}] : met_{name};"
                lines += [loop + meets] if warps > 1 else []
                found[name] = f"met_{name}"
        elif named:
            lines.append("const Ends top_ends = ends_of(row0), last_ends = ends_of(row0 + rows_here - 1);")
            for name in named:
                found[name] = f"within_keys({how[name]}(top_ends.{name}, last_ends.{name}))"
                self.functions.add(how[name])
        if named:
            self.functions.add("within_keys")
        if plan.parts:
            part = f"static_cast<int>({plan.row_dims[0].index})"
            lines.append(
                "// tiles are dealt to parts by turns: the first one is the part's own, or the next of its turns"
            )
            if "first" in found:
                lines.append(f"const int first_tile = {found['first']} / tile_keys;")
                turns = f"({part} - first_tile % parts + parts) % parts"
                lines.append(f"const int first_key = (first_tile + {turns}) * tile_keys;")
            else:
                lines.append(f"const int first_key = {part} * tile_keys;")
        else:
            lines.append(
                f"const int first_key = {found['first']} / tile_keys * tile_keys;" if "first" in found
                else "constexpr int first_key = 0;"
            )  # fmt: skip
        lines.append(f"const int end_key = {found['end']};" if "end" in found else "constexpr int end_key = keys;")
        if "free_first" in found:
            lines.append(f"const int free_first = {found['free_first']};")
        if "free_end" in found:
            lines.append(f"const int free_end = {found['free_end']};")
        return lines

    @property
    def stride(self) -> str:
        """Keys from one of a block's tiles to its next."""
        return "next_tile" if self.plan.parts else "tile_keys"

    def dealing(self) -> list[str]:
        """How far a block's tiles lie apart, where others have those between them."""
        if not self.plan.parts:
            return []
        return [
            "// blocks that share a row's keys, and from one tile of a block to its next",
            f"constexpr int parts = {self.plan.parts}, next_tile = parts * tile_keys;",
        ]

    @property
    def nothing(self) -> str:
        """What an element is that weighs nothing: a logit of a softmax, or a weight."""
        return "-INFINITY" if self.plan.softmaxed else "0.0f"

    def is_free(self) -> str:
        """The test whether a tile's elements need none."""
        ends = self.plan.ends
        tests = ["key0 >= free_first"] if ends.free_first is not None else []
        if ends.free_end is not None:
            tests.append(f"key0 + {self.keys_at_once} <= free_end")
        elif self.plan.ragged:
            tests.append(f"key0 + {self.keys_at_once} <= keys")
        return all_of(*tests, "exact" if self.plan.free.counted else "")

    def factors(self, factor: str, row: str = "factor") -> Mapping[str, str]:
        """What logits are multiplied by to be powers of 2, those of row r and each element's; empty for 1. Of extreme
        ones each row has its own, which is log2 of e, `extreme`, as long as products with that are close enough."""
        extreme = self.plan.extreme
        return {
            "extreme": factor if extreme else "",
            "largest_logit": float_text(LARGEST_LOGIT),
            "row_factor": row if extreme else factor,
            "factor": f"factors[{self.slot}]" if extreme else factor,
        }

    def factor_arrays(self) -> list[str]:
        """The declaration of rows' factors, where they are kept from tile to tile."""
        return [f"float factors[{self.row_slots}];  // of logits, to powers of 2"] if self.plan.extreme else []

    def row_arrays(self) -> list[str]:
        """Declarations of what is one value a row, and of where the rows of operands begin."""
        slots = self.row_slots
        lines = [f"{VALUE_TYPES[dtype]} {self.here(name)}[{slots}];" for name, dtype in self.row_values]
        if self.counts_elements:
            lines.append(f"long long {FIRST_ELEMENT}[{slots}];  // of the row's scores, in row-major order")
        for load in self.element_loads:
            ctype = self.ctype(load.access.dtype)
            if self.by_row(load.access):
                lines.append(f"const {ctype}* {self.here(load.access.name)}[{slots}];")
            else:
                lines.append(f"const {ctype}* const {self.here(load.access.name)} = {self.at(load.access)};")
        return lines

    def row_setup(self) -> list[str]:
        """What is done for each of a lane's rows, r, before the first tile."""
        plan = self.plan
        lines: list[str] = []
        if self.known_before:
            of_head = plan.head_values
            loads = [load for load in plan.row_loads if load.value not in of_head]
            lines += self.row_lines(loads, [s for s in plan.row_body if s.name not in of_head])
        lines += [f"{self.here(name)}[r] = {name};" for name, _ in self.known_before]
        if self.counts_elements:
            lines.append(f"{FIRST_ELEMENT}[r] = {self.flat_row()} * keys;")
        lines += [
            f"{self.here(load.access.name)}[r] = {self.at(load.access)};"
            for load in self.element_loads
            if self.by_row(load.access)
        ]
        return lines


def first_of(number: Counted) -> str:
    """What a kernel calls such a number of a thread's first column, of each of its rows or of the first one."""
    return f"{number.value}_first"


def renamed(s: Statement, names: Mapping[str, str]) -> Statement:
    """The statement with values called as `names` has them."""
    args = tuple(replace(a, name=names.get(a.name, a.name)) if isinstance(a, Value) else a for a in s.args)
    return replace(s, name=names.get(s.name, s.name), args=args)
