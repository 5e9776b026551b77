"""validate(program): several kernels against the one reference of their chain, bounds carried through the cuts.

Each kernel's part of the error analysis takes up what the one before has left: a value in memory between two kernels
has the bound of what was computed, and that of its rounding to the type it is stored as. So outputs are held to the
text of the whole chain within the bounds of the whole chain, and tensors between kernels to the analysis, which tells
the kernel that is wrong. For that the kernels of a launch run one by one, with a look at the workspace after each; the
same launch as users call it must give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fusegen.language.graph import CASTS, Graph, Kind, Node, Tensor, shown_by
from fusegen.language.lookup import rows_put
from fusegen.language.naming import entry_name
from fusegen.language.reference import draws, load_reference
from fusegen.language.sizes import dims_in
from fusegen.language.types import Dim, DType, bf16, f16, f32, size_of
from fusegen.language.views import View, positions_in
from fusegen.planner.programs.model import Binding, ProgramPlan
from fusegen.planner.programs.over_operands import overwritable
from fusegen.planner.programs.smaller import constant_rows
from fusegen.runtime import Kernel, Program
from fusegen.validation import checks
from fusegen.validation.accumulation import accumulations
from fusegen.validation.bounded import Bounded, exact
from fusegen.validation.bounds import RULES
from fusegen.validation.checks import (
    ARRANGEMENTS,
    FULL_ELEMENTS,
    LEAST_BOUNDED,
    LEAST_JUDGED,
    OUTER,
    QUICK_ELEMENTS,
    Checks,
)
from fusegen.validation.compare import Compared
from fusegen.validation.compare import judged as judged_share
from fusegen.validation.even_sizes import even_sizes
from fusegen.validation.few_parts import in_turn, turns_of, with_few_parts
from fusegen.validation.grouped import computed_ends, ends_of, group_ends, in_groups
from fusegen.validation.in_place import NAME as IN_PLACE
from fusegen.validation.in_place import overwriting, reason_of, side_by_side
from fusegen.validation.inputs import (
    NORMAL,
    TABLE_ROWS,
    USUAL,
    Operands,
    index_limits,
    indices,
    made_wide,
    mixed,
    need_numbers,
    rows_of_tables,
    shared,
    slot_operands,
    slots,
    summed_dims,
    table_dims,
    take,
    with_places,
)
from fusegen.validation.invariance import other_batches, rows_at, same_as_contiguous
from fusegen.validation.judging import agree, failing, hides_nan, judged, overwritten, unlike_text, unnamed_rows
from fusegen.validation.launches import DEPTH
from fusegen.validation.memory import CONTIGUOUS, POISON, Arrangement, Placed, read_output, reserve, told, untouched
from fusegen.validation.patterns import (
    GENTLE,
    GENTLE_SETTING,
    SETTINGS,
    STEADY,
    STEADY_SETTING,
    UNIT_SETTING,
    Pattern,
    Room,
    Setting,
    safe_magnitude,
)  # fmt: skip
from fusegen.validation.products import rounded
from fusegen.validation.report import Report

Array = np.ndarray[Any, np.dtype[Any]]
SEVERAL_BLOCKS = (5, 7)  # the first sizes where a launch has several steps, whose rows are along some of the dims


def validate(
    kernel: Kernel | Program, *, seed: int = 0, quick: bool = False, rows: Sequence[int] | None = None,
    cases: Sequence[str] | None = None,
) -> Report:  # fmt: skip
    """Check a kernel or a program against the reference generated from its graph: `fusegen.validation.checks.validate`.

    Of a program the emulator's fused arithmetic, huge strides and the GPU's twin in the emulator are left out."""
    if not isinstance(kernel, Program):
        return checks.validate(kernel, seed=seed, quick=quick, rows=rows, cases=cases)
    need_numbers(seed, rows)
    return validate_program(kernel, seed, quick, rows, cases)


def validate_program(
    program: Program, seed: int, quick: bool, rows: Sequence[int] | None, cases: Sequence[str] | None
) -> Report:
    """Launches with rows drawn by seed and by malice, in several layouts and row counts unless `quick`."""
    found = ProgramChecks(program, seed, frozenset(cases) if cases is not None else None)
    most = QUICK_ELEMENTS if quick else FULL_ELEMENTS
    found.ragged(most)
    other_batches(found, program, found.text, quick)
    if in_turn(program.plan):
        found.turns()
    found.malice(most, 1, USUAL)
    if not quick:
        for setting in SETTINGS[1:]:
            found.malice(most, 1, setting)
        for name in ("padded rows", "odd stride", "offset by one"):
            found.layout(name)
        found.in_place()
    for count in rows if rows is not None else () if quick else (0, 1, 2):
        found.rows(count)
    if cases is None:
        found.require_judged()
    device = program.device
    kind = "checking" if getattr(device, "check", False) else "fast build"
    where = f"emulator ({kind}), warp {program.target.warp}" if device.kind == "emulator" else str(device)
    return Report(program.name, where, seed, tuple(found.found))


class ProgramChecks(Checks):
    """One validation of a program under way."""

    def __init__(self, program: Program, seed: int, wanted: frozenset[str] | None) -> None:
        self.program = program
        self.device = program.device
        self.graph = program.plan.graph
        self.seed = seed
        self.wanted = wanted
        self.found = []
        self.normal = None
        self.judged = {}
        self.bounded: dict[str, float] = {}  # the most of each tensor that the whole chain's bounds held in a launch
        self.texts: dict[str, Callable[..., Any]] = {}
        self.constant = rows_by_themselves(program.plan)
        self.between: dict[str, Array] = {}  # what the last launch left between its kernels, by name

    # ---------------------------------------------------------------- what is checked

    def ragged(self, most: int) -> None:
        """A launch that fills no last block, the same as users call it, then some of its rows alone."""
        plan = self.program.plan
        block = max(step.plan.rows_per_block for step in plan.steps)
        beside = max(map(len, plan.launches))  # steps, each of which is to have several blocks
        outer = OUTER if beside == 1 else SEVERAL_BLOCKS
        sizes = self.sizes_for(max(3, min(2 * beside * min(block, 256) + 1, self.most_rows(most))), outer)
        operands = self.operands(sizes, NORMAL.name)
        if not self.wants(NORMAL.name, "again", "apart"):
            return
        first = self.launch_case(NORMAL.name, NORMAL.reason, operands)
        if first is None:
            return
        self.normal = operands, first
        for pattern, setting in (GENTLE, GENTLE_SETTING), (STEADY, STEADY_SETTING):
            if min(self.bounded.values(), default=1.0) < LEAST_BOUNDED:
                other = self.operands(sizes, pattern.name, (pattern,), setting)
                self.launch_case(pattern.name, pattern.reason, other)
        self.again(operands, first)
        self.apart(operands, first)
        if self.graph.products and self.wants(UNIT_SETTING.name):
            unit = self.operands(sizes, UNIT_SETTING.name, (NORMAL,), UNIT_SETTING)
            self.launch_case(UNIT_SETTING.name, UNIT_SETTING.reason, unit)

    def turns(self) -> None:
        """Rows that a few blocks take in turn, each of them many."""
        reason = "the kernels that take rows in turn by two blocks, of which each has many"
        if self.wants("turns"):
            few = replace_program(self, with_few_parts(self.program))
            few.launch_case("turns", reason, few.operands(few.sizes_for(turns_of(self.program.plan), OUTER), "turns"))

    def again(self, operands: Operands, first: list[Array]) -> None:
        """The same by the call that users make, over other leftovers in memory: bitwise the same."""
        if self.wants("again"):
            reason = "the same launch as users call it, over other leftovers in memory"
            outputs, problem = self.called(operands)
            self.same("again", reason, operands, outputs, first, problem)

    def apart(self, operands: Operands, first: list[Array]) -> None:
        """Some of the rows without the others."""
        whole = rows_of_tables(self.graph)
        free = [name for name in self.free() if name not in summed_dims(self.graph) | whole]
        counted = draws(self.graph) or any(node.op.name == "row_index" for node in self.graph.nodes)
        counted = counted or computed_ends(self.graph)  # say by numbers of rows which are whose
        if not self.wants("apart") or not free or counted or self.graph.scatters or moved(self.graph, free):
            return
        every = {name: range(operands.sizes[name])[::-2] for name in free}
        picks = in_groups(self.graph, operands.values, operands.sizes, every)
        few = replace(take(self.graph, operands, picks), labels=operands.labels)
        outputs, problem = self.launch(few)
        wanted = [rows_at(array, t.shape, picks) for t, array in zip(self.graph.outputs, first, strict=True)]
        reason = "some of the rows alone and in another order: a row's result may not depend on other rows"
        self.same("apart", reason, few, outputs, wanted, problem)

    def side_by_side(
        self, name: str, reason: str, patterns: Sequence[Pattern], most: int, times: int, setting: Setting,
        each: bool = False, kernel: Any = None,
    ) -> None:  # fmt: skip
        """Rows of all `patterns` in a few launches of as many rows as there is room for."""
        sizes = self.sizes_for(max(2, min(len(patterns), self.most_rows(most))))
        count = max(1, math.prod(sizes[n] for n in (*self.free(), *self.constant)))
        for start in range(0, len(patterns), max(count, -(-len(patterns) // 3))):
            group = patterns[start : start + max(count, -(-len(patterns) // 3))]
            operands = self.operands(sizes, f"{name} {group[0].name}", group, setting)
            self.launch_case(name, reason, operands)

    def rows(self, count: int) -> None:
        if self.wants("rows") and self.free():
            operands = self.operands(self.sizes_for(count), f"rows: {count}")
            self.launch_case(f"rows: {count}", "a row count at an edge of the tiling", operands)

    def layout(self, name: str) -> None:
        reason, how, everywhere = ARRANGEMENTS[name]
        if self.wants("layout", name):
            operands = self.operands(self.sizes_for(6, OUTER), name)
            views = [(b.base, b.view) for step in self.program.plan.steps for b in step.bindings if b.view is not None]
            joined = {base for base, view in views if view.base and len(view.base[-1]) > 1}  # no row may lie apart
            arrays = [t.name for t in self.arrays if len(t.shape) > 1 and t.name not in joined]
            arranged = dict.fromkeys(arrays if everywhere else arrays[:1], how)
            same_as_contiguous(self, name, operands, self.launch_case(f"layout: {name}", reason, operands, arranged))

    def in_place(self) -> None:
        """Outputs over operands, as many at once as there may be: the same bits as in memory of their own."""
        for over in side_by_side(overwritable(self.program.plan)) if self.wants(IN_PLACE) else ():
            operands = self.operands(self.sizes_for(6, OUTER), IN_PLACE)
            first, problem = self.launch(operands)
            inputs, outputs, values = self.placed(operands)
            outputs = overwriting(self.graph, over, inputs, outputs)
            other = failing(partial(self.call_over, inputs, outputs, values))
            names = [t.name for t in self.graph.outputs]
            found = [] if other else [read_output(p, 0, name)[0] for name, p in zip(names, outputs, strict=True)]
            self.same(IN_PLACE, reason_of(over, CONTIGUOUS), operands, found if first else [], first, problem or other)

    def call_over(self, inputs: Sequence[Placed], outputs: Sequence[Placed], values: Sequence[Any]) -> None:
        self.program(*self.arguments(inputs, values), out=tuple(o.view for o in outputs))
        self.program.device.synchronize()

    def require_judged(self) -> None:
        bindings = [b for step in self.program.plan.steps for b in step.writes]
        for tensor in self.graph.outputs:
            share = min(self.judged.get(b.tensor, 1.0) for b in bindings if b.base == tensor.name)
            if share < LEAST_JUDGED:
                self.unjudged(tensor.name, share, None)

    # ---------------------------------------------------------------- operands

    def free(self) -> list[str]:
        """The dims whose sizes are run-time arguments of every kernel, outermost first."""
        apart = (*self.program.plan.fixed, *table_dims(self.graph))
        found = [name for name in self.graph.sizes if name not in apart]
        indexed = {d.name for node in self.graph.scatters for d in dims_in(node.inputs[-2].shape)}
        return sorted(found, key=indexed.__contains__)  # last those that say how many rows are written

    def most_rows(self, most: int) -> int:
        """Rows of a launch of `most` elements; of products an element is as much work as a few hundred others."""
        work = [1]
        for step in self.program.plan.steps:
            graph = step.plan.graph  # whose dims may be its own, as one for `H * D`
            sizes = graph.sizes
            width = sum(size_of(n.shape[-1], sizes) for n in graph.products) or graph.cols
            depth = max((size_of(n.inputs[0].shape[-1], sizes) for n in graph.products), default=1)
            work.append(width * max(1, depth // DEPTH))
        return most // max(work)

    def sizes_for(self, rows: int, outer: Sequence[int] = ()) -> dict[str, int]:
        """Sizes with so many rows, along the last free dim; `outer` are those of the first, where there are more."""
        free = self.free()
        tables = dict.fromkeys(set(table_dims(self.graph)).difference(self.program.plan.fixed), TABLE_ROWS)
        sizes = {**self.graph.sizes, **dict.fromkeys(free, 1), **tables}
        if free:
            for name, size in zip(free[:-1], outer, strict=False):
                sizes[name] = size if rows >= 2 * size else 1
            sizes[free[-1]] = -(-rows // math.prod(sizes[name] for name in free[:-1]))
            if self.graph.viewed:
                sizes = even_sizes(self.graph, sizes, free)
        return {**sizes, **{n: size for n, size in with_places(self.graph, sizes).items() if n in tables}}

    def operands(
        self, sizes: Mapping[str, int], name: str, patterns: Sequence[Pattern] = (NORMAL,), setting: Setting = USUAL
    ) -> Operands:
        """Rows of `patterns` in the operands that have the free dims, or those of rows that are constants, and no
        product on their left; what all rows share is as `setting` has it."""
        rng, free = self.rng(name), {Dim(n) for n in (*self.free(), *self.constant)}
        free |= {Dim(name) for name in table_dims(self.graph)}
        mains = [t for t in self.graph.inputs if t.dtype.kind == "float" and len(t.shape) > 1 and free & set(t.shape)]
        limits, unique, ends = index_limits(self.graph, sizes), slot_operands(self.graph), ends_of(self.graph)
        rights = right_operands(self.graph)
        values: list[Any] = []
        for tensor in self.graph.inputs:
            shape = tuple(size_of(size, sizes) for size in tensor.shape)
            cols = shape[-1] if shape else 1
            room = Room(
                rng, math.prod(shape[:-1]), cols, tensor.dtype, safe_magnitude(tensor.dtype, cols), self.graph.picks
            )
            if tensor.name in ends:
                values.append(group_ends(rng, shape[0], size_of(ends[tensor.name], sizes)))
            elif tensor.name in limits:
                drawn = (slots if tensor.name in unique else indices)(rng, shape, limits[tensor.name])
                values.append(made_wide(drawn, limits[tensor.name], tensor.dtype))
            elif tensor in mains:
                chosen = [patterns[i % len(patterns)] for i in range(room.rows)]
                made = mixed(room, chosen, mains.index(tensor), len(mains))
                values.append(made.reshape(shape).astype(tensor.dtype.numpy))
            elif tensor.name in rights:
                made = np.clip(setting.vector(room), -room.dtype.largest, room.dtype.largest).reshape(shape)
                if setting is UNIT_SETTING:
                    made /= np.sqrt(rights[tensor.name](sizes))
                values.append(made.astype(tensor.dtype.numpy))
            else:
                values.append(shared(self.graph, tensor, shape, room, setting))
        return Operands(sizes, tuple(values), (NORMAL.name,))

    # ---------------------------------------------------------------- launching and judging

    def launch(
        self, operands: Operands, arranged: Mapping[str, Arrangement] | None = None, kernel: Any = None, poison: int = 0
    ) -> tuple[list[Array], str]:
        """The outputs of a launch whose kernels run one by one, and what was wrong with it; what they leave in the
        workspace goes to `between`."""
        program, device = self.program, self.program.device
        inputs, outputs, values = self.placed(operands, arranged or {}, poison)
        updated = {id(out) for t, out in zip(self.graph.outputs, outputs, strict=True) if t.name in self.graph.updates}
        views = {t.name: p.view for t, p in zip(self.arrays, (*inputs, *outputs), strict=True)}
        self.between = {}
        problems: list[str] = []

        def run() -> None:
            record = program.record(views, device, "fusegen")
            room = reserve(device, (record.arena.bytes // 4,), f32, CONTIGUOUS, POISON[f32][poison])
            bases = (*(v.address for v in views.values()), room.view.address)
            start, before = room.view.address - room.memory.address, room.memory.read()
            for launch in record.launches:
                launch.run(bases, values, 0)
                device.synchronize()
                after = room.memory.read()
                own = np.zeros(after.shape, bool)
                own[[start + at for at in record.arena.counted]] = True
                for stored in program.plan.between:
                    if any(b.base == stored.name for step in launch.steps for b in step.writes):
                        low = start + record.arena.offsets[stored.name]
                        high = low + stored.bytes(operands.sizes)
                        own[low:high] = True
                        shape = tuple(size_of(s, operands.sizes) for s in stored.type.shape)
                        self.between[stored.name] = after[low:high].view(stored.type.dtype.numpy).reshape(shape).copy()
                if (stray := np.flatnonzero((after != before) & ~own)).size:
                    problems.append(
                        f"{launch.record.plan.name}: {stray.size} bytes of the workspace that are not its own were "
                        "written"
                    )
                before = after

        if problem := failing(run):
            return [], problem
        found = []
        for tensor, output in zip(self.graph.outputs, outputs, strict=True):
            watched = not poison and tensor.name not in self.graph.updates
            array, problem = read_output(output, told(tensor.dtype) if watched else 0, tensor.name)
            found.append(array)
            problems.append(problem)
        kept = [one for one in inputs if id(one) not in updated]
        if device.kind != "emulator" and not all(map(untouched, kept)):
            problems.append("an operand was written to")
        return found, "; ".join(filter(None, problems))

    def placed(
        self, operands: Operands, arranged: Mapping[str, Arrangement] | None = None, poison: int = 0
    ) -> tuple[list[Placed], list[Placed], list[Any]]:
        """As of a kernel; an output that is an operand with new rows is in that operand's memory."""
        inputs, outputs, values = super().placed(operands, arranged, poison)
        return inputs, overwriting(self.graph, self.graph.updates, inputs, outputs), values

    def called(self, operands: Operands) -> tuple[list[Array], str]:
        """The outputs of the program's own call."""
        device = self.program.device
        inputs, outputs, values = self.placed(operands, {}, 1)
        arguments = self.arguments(inputs, values)

        def run() -> None:
            self.program(*arguments, out=tuple(o.view for o in outputs))
            device.synchronize()

        if problem := failing(run):
            return [], problem
        return [read_output(o, 0, t.name)[0] for t, o in zip(self.graph.outputs, outputs, strict=True)], ""

    def usual(self, tensor: Tensor, sizes: Mapping[str, int]) -> Arrangement:
        return CONTIGUOUS

    def text(self, sizes: Mapping[str, int]) -> Callable[..., Any]:
        """The text of the whole chain: sizes that it names, as of axes that are taken apart, are those of a launch."""
        plan = replace(self.program.plan, graph=replace(self.graph, sizes=dict(sizes), origin=None))
        if plan.reference not in self.texts:
            self.texts[plan.reference] = load_reference(plan.reference, entry_name(self.graph))
        return self.texts[plan.reference]

    def judge(self, operands: Operands, outputs: Sequence[Array]) -> tuple[list[Compared], str]:
        """Every output, and every tensor between kernels, against the text of the whole chain.

        Bounds through the cuts are of the worst case: behind a softmax of products of products they say nothing any
        more. There a kernel is held to what it has to make of the operands that it read, which others were held to.
        """
        values = self.text(operands.sizes)(*operands.values)
        text = dict(
            zip((t.name for t in self.graph.outputs), values if isinstance(values, tuple) else (values,), strict=True)
        )
        laws: dict[str, Any] = dict(zip((t.name for t in self.graph.inputs), operands.values, strict=True))
        got = {**dict(zip((t.name for t in self.graph.outputs), outputs, strict=True)), **self.between}
        nodes = {**{t.name: t.node for t in self.graph.outputs}, **{s.name: s.node for s in self.program.plan.between}}
        initial = {output: laws[operand] for output, operand in self.graph.updates.items()}
        compared: list[Compared] = []
        doubt = ""
        other = False  # has a kernel chosen other columns, rightly, or hidden a NaN, than the text does?
        for step in self.program.plan.steps:
            graph = step.plan.lowered
            bound = {b.tensor: Shown(b, operands.sizes) for b in step.bindings}
            bases = {b.tensor: b.base for b in step.bindings}
            held = {
                t.node: wide(bound[t.name].of(got[bases[t.name]])) for t in graph.inputs if bases.get(t.name) in got
            }
            made = [bound[t.name].of(got[bases[t.name]]) for t in graph.outputs]
            expected = [
                None if other or bases[t.name] not in text or t.node in graph.written_at
                else bound[t.name].of(text[bases[t.name]])
                for t in graph.outputs
            ]  # fmt: skip
            given = [bound[t.name].law(laws[bases[t.name]]) if t.shape else laws[t.name] for t in graph.inputs]
            hows = accumulations(step.plan)
            found, said, table = judged(graph, hows, given, made, expected, held)
            other = other or hides_nan(graph, table, expected)
            doubt = doubt or said
            for out in found:
                self.bounded[out.tensor.name] = max(self.bounded.get(out.tensor.name, 0.0), bounded_share(out))
            if min(map(bounded_share, found), default=1.0) < LEAST_BOUNDED:
                doubt = doubt or unlike_text(graph, table, expected)
                read = [
                    exact(held[t.node]) if t.node in held else law for t, law in zip(graph.inputs, given, strict=True)
                ]
                closer, _, _ = judged(graph, hows, read, made, [None] * len(made))
                found = [more_said(pair) for pair in zip(found, closer, strict=True)]
            compared += found
            for tensor, array in zip(graph.outputs, made, strict=True):
                base = bases[tensor.name]
                if tensor.node in graph.written_at:
                    before = bound[tensor.name].of(initial[base])
                    law = with_new_rows(tensor, table, before)
                    stays = unnamed_rows(tensor.node, table, len(array))
                    doubt = doubt or overwritten(tensor, array, before, stays)
                    if not other and not agree(bound[tensor.name].of(text[base]), law, np.ones(1, bool)):
                        doubt = doubt or f"{tensor.name}: the reference text and the ops' table differ"
                elif tensor.node is graph.selection:
                    law = exact(array)
                    other = other or bool((table[tensor.node].value != chosen_by_text(graph, table, array)).any())
                else:
                    op = "" if copied(tensor.node, tensor.dtype, graph) else shown_by(nodes[base]).op.name
                    law = as_stored(table[tensor.node], tensor.dtype, op, array.shape)
                laws[base] = bound[tensor.name].whole(law, laws.get(base), got[base].shape)
        return compared, doubt


def rows_by_themselves(program: ProgramPlan) -> list[str]:
    """The dims that count rows of products and are constants; none where some of them are summed over, as heads, of
    which one NaN is all that is left."""
    rows = constant_rows(program)
    left = dims_in(tuple(size for tensor in program.graph.outputs for size in tensor.shape))
    return sorted(dim.name for dim in rows) if rows.issubset(left) else []


def bounded_share(out: Compared) -> float:
    return judged_share(out, slice(None), numbers=False)


def more_said(pair: tuple[Compared, Compared]) -> Compared:
    """What is wrong by either; else what holds more elements to a bound."""
    return max(pair, key=lambda out: (bool(out.wrong.any()), bounded_share(out)))


def replace_program(checks: ProgramChecks, program: Program) -> ProgramChecks:
    """The same validation, whose findings are noted as one, of another program."""
    made = ProgramChecks(program, checks.seed, checks.wanted)
    made.found = checks.found
    return made


class Shown:
    """What a step's tensor shows of an array of the program."""

    def __init__(self, binding: Binding, sizes: Mapping[str, int]) -> None:
        self.places = None if binding.view is None else positions_in(binding.view, sizes)
        base = () if binding.view is None else binding.view.base_shape
        self.shape = tuple(size_of(size, sizes) for size in base)

    def of(self, array: Any) -> Any:
        if self.places is None:
            return array
        if 0 in self.shape:  # a slice of no rows, of which nothing is made
            return np.zeros(self.places.shape, np.asarray(array).dtype)
        return np.ascontiguousarray(np.broadcast_to(array, self.shape)).reshape(-1)[self.places]

    def law(self, law: Any) -> Any:
        return Bounded(self.of(law.value), self.of(law.error)) if isinstance(law, Bounded) else self.of(law)

    def whole(self, law: Bounded, before: Any, shape: tuple[int, ...]) -> Bounded:
        """The law of the whole array, of which the other parts have the law that they had `before`."""
        if self.places is None:
            return law
        if before is None:
            before = Bounded(np.full(shape, np.nan), np.full(shape, np.inf))
        value, error = before.value.copy(), before.error.copy()
        value.reshape(-1)[self.places] = np.broadcast_to(law.value, self.places.shape)
        error.reshape(-1)[self.places] = np.broadcast_to(law.error, self.places.shape)
        return Bounded(value, error)


def chosen_by_text(graph: Graph, table: Mapping[Any, Bounded], columns: Array) -> Array:
    from fusegen.language.selection import top_columns
    from fusegen.validation.bounds import selection_key

    assert graph.selection is not None
    return np.asarray(top_columns(selection_key(graph.selection, table).value, columns.shape[-1]))


def copied(node: Node, dtype: DType, graph: Graph) -> bool:
    """Does a kernel store what it read, which is of that type already?"""
    if node.op.kind is Kind.INPUT:
        return graph.tensor_of[node].dtype is dtype
    return node.op.kind in (Kind.VIEW, Kind.JOIN) and all(copied(a, dtype, graph) for a in node.inputs)


@np.errstate(all="ignore")
def as_stored(law: Bounded, dtype: DType, op: str, shape: tuple[int, ...]) -> Bounded:
    """A value's law once it is in memory as `dtype`. `op` is the written value's own: a cast rounds in the reference as
    well. Empty where it is copied, from where it lay in that type."""
    value, error = np.broadcast_to(law.value, shape), np.broadcast_to(law.error, shape)
    if not op:
        return Bounded(value, error)
    if CASTS.get(op) is dtype:
        from fusegen.language.trace import OPS

        return Bounded(*RULES[op](OPS[op], [Bounded(value, error)]))
    return Bounded(value, rounded(value, error, dtype) if dtype in (f16, bf16) else error)


def with_new_rows(tensor: Tensor, table: Mapping[Any, Bounded], before: Array) -> Bounded:
    """An array that was there `before`, with the rows that a kernel's index names as they are stored."""
    rows, index = table[tensor.node], table[tensor.node.inputs[0]].value
    shape = np.broadcast_shapes(rows.value.shape, index.shape)
    stored = as_stored(rows, tensor.dtype, tensor.node.inputs[1].op.name, shape)
    value = rows_put(wide(before), index, stored.value)
    known = np.where(np.isfinite(wide(before)), 0.0, np.inf)
    error = np.where(np.isnan(stored.error), np.inf, stored.error)
    return Bounded(value, rows_put(known, index, error))


def moved(graph: Graph, free: Sequence[str]) -> bool:
    """Do views or computed sizes make other rows of the free dims' than those that are given?"""
    dims = {Dim(name) for name in free}

    def whole(view: View) -> bool:
        if any(len(group) != 1 for group in view.base):
            return not dims & set(dims_in(view.base_shape))
        for (size,), offset, row in zip(view.base, view.offset, view.steps, strict=True):
            along = [(step, n) for step, n in zip(row, view.shape, strict=True) if step != 0]
            if dims & set(dims_in((size,))) and (offset != 0 or along != [(1, size)]):
                return False
        return True

    views = [view for node in graph.nodes for view in (node.view, *node.parts) if view is not None]
    computed = {dim for size in graph.computed_sizes for dim in dims_in(size)}
    return bool(dims & computed) or not all(map(whole, views))


def wide(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype.kind not in "ib" else array


def right_operands(graph: Graph) -> dict[str, Any]:
    """The operands that are right factors, each with what gives its K."""
    found: dict[str, Any] = {}
    for product in graph.products:
        source = product.inputs[1]
        while source.op.kind in (Kind.VIEW, Kind.TRANSPOSE):
            source = source.inputs[0]
        if source in graph.tensor_of:
            depth = product.inputs[0].shape[-1]
            found[graph.tensor_of[source].name] = lambda sizes, depth=depth: size_of(depth, sizes)
    return found
