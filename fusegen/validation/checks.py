"""validate(kernel): run it on inputs made by seed and by malice, and hold every element to the law.

The law is the float64 reference text that was generated beside the kernel, run as it stands; how far a right kernel may
be off is derived from the graph and the plan (`fusegen.validation.bounds`), never a constant. Beside the values, each
launch is held to its manners: every element is written, nothing else is, and operands stay as they were. A kernel must
also repeat itself bit for bit, and a row's result may not depend on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np

from fusegen.errors import MissingError
from fusegen.language.graph import Kind, Node, Tensor, plain
from fusegen.language.reference import draws, load_reference
from fusegen.language.types import F8, f32, size_of
from fusegen.planner.pieces import VECTOR_BYTES
from fusegen.runtime import Kernel
from fusegen.runtime.emulated import EmulatorDevice
from fusegen.runtime.kernel import need_kernel
from fusegen.validation import far
from fusegen.validation.accumulation import accumulations
from fusegen.validation.bounds import analyse_nodes, held
from fusegen.validation.compare import Compared, Figures, figures, judged, largest_errors
from fusegen.validation.emulated import NAME as EMULATED
from fusegen.validation.grouped import OTHER_GROUPS, in_groups, spoiled
from fusegen.validation.in_place import NAME as IN_PLACE
from fusegen.validation.in_place import overwriting, reason_of, side_by_side
from fusegen.validation.inputs import (
    NORMAL,
    USUAL,
    Operands,
    flat_sizes,
    free_dims,
    main_tensors,
    make_operands,
    need_numbers,
    rows_of_tables,
    sizes_for,
    summed_dims,
    take,
)
from fusegen.validation.invariance import other_batches, rows_at, same_as_contiguous
from fusegen.validation.judging import failing, overwritten, steps, unnamed_rows
from fusegen.validation.judging import judged as judged_with_laws
from fusegen.validation.last_rows import emulating, last_launch, note_last
from fusegen.validation.launches import folding, most_rows, narrowed, other_order, row_counts
from fusegen.validation.memory import (
    CONTIGUOUS,
    POISON,
    Arrangement,
    Placed,
    place,
    read_output,
    repeated,
    reserve,
    told,
    untouched,
)
from fusegen.validation.patterns import (
    GENTLE,
    GENTLE_SETTING,
    PATTERNS,
    SETTINGS,
    STEADY,
    STEADY_SETTING,
    UNIT_SETTING,
    Pattern,
    Setting,
    by_tf32,
    patterns_for,
)
from fusegen.validation.report import JUDGED, Case, Report

Array = np.ndarray[Any, np.dtype[Any]]

QUICK_ELEMENTS = 2**18  # of a launch, beyond two rows
FULL_ELEMENTS = 2**20
PRODUCT_ABS, PRODUCT_REL, PRODUCT_L2 = 5e-2, 5e-3, 1e-2  # errors that products promise to stay below
ROW_L2 = 1e-5  # relative L2 that f32 row chains promise on normal inputs
OUTER = (2, 3, 2)  # sizes of the first of several leading axes
LEAST_BOUNDED = 0.99  # of each output in a normal launch; where fewer elements have a bound, others are tried as well
LEAST_JUDGED = 0.5  # of each output in some launch, whatever it was; with less, nobody knows whether it is right
CONDITIONED = 1e-3  # relative L2 of the bounds above which a chain's own cancellation leaves no promise

ARRANGEMENTS: Mapping[str, tuple[str, Arrangement, bool]] = {
    "padded rows": ("a row stride longer than the row, still aligned", Arrangement(padding=64), True),
    "odd stride": ("a row stride that is no multiple of a vector", Arrangement(padding=1), True),
    "offset by one": ("a base address one element past an aligned one", Arrangement(offset=1), True),
    "one offset": ("the same for the first operand alone", Arrangement(offset=1), False),
    "repeated rows": ("operands repeated along their first axis by a stride of 0", Arrangement(broadcast=True), True),
    "swapped axes": ("leading axes in another order: no one stride goes along them", Arrangement(swapped=True), True),
    "transposed": ("factors whose matrices lie the other way round", Arrangement(transposed=True), True),
    "transposed, odd": (
        "the same with a leading dimension that is no multiple of a vector",
        Arrangement(padding=1, transposed=True),
        True,
    ),
}
"""Layouts beside the contiguous one: reason, arrangement, and whether every array has it."""


def validate(
    kernel: Kernel, *, seed: int = 0, quick: bool = False, rows: Sequence[int] | None = None,
    cases: Sequence[str] | None = None,
) -> Report:  # fmt: skip
    """Check `kernel` against the reference generated from its graph.

    `quick` is what every first build gets: a ragged launch, malicious rows, repetition and row independence; of a
    kernel on a GPU also one launch in the checking emulator, where g++ can build it. Otherwise row counts around the
    tile's edges (or `rows`), layouts and shared operands vary too, outputs are written over operands where the plan
    allows it, and the emulator also runs the kernel with products and sums fused. `cases` keeps only those named:
    patterns ("nan"), or groups ("rows", "layout", "again", "apart", "other groups", "in place", "contracted",
    "emulated"). A kernel that is caught by the emulator or refused by a driver fails its case; nothing is raised for a
    wrong kernel. Raises RequestError for what is no kernel, no seed or no number of rows.
    """
    need_kernel(kernel, "validate")
    need_numbers(seed, rows)
    checks = Checks(kernel, seed, frozenset(cases) if cases is not None else None)
    most = QUICK_ELEMENTS if quick else FULL_ELEMENTS
    emulated = None
    if kernel.device.kind != "emulator" and checks.wants(EMULATED):
        emulated = emulating(checks, FULL_ELEMENTS if kernel.plan.graph.products else QUICK_ELEMENTS, quick)
    checks.ragged(most)
    other_batches(checks, kernel, lambda sizes: checks.reference, quick)
    checks.malice(most, 1 if quick else len(main_tensors(kernel.plan.graph)), USUAL)
    if not quick:
        for setting in SETTINGS[1:]:
            checks.malice(most, 1, setting)
        checks.contracted(most)
        for count in row_counts(kernel.plan, most) if rows is None else rows:
            checks.rows(count)
        for name in ARRANGEMENTS:
            checks.layout(name)
        checks.in_place()
        checks.far_apart()
    elif rows is not None:
        for count in rows:
            checks.rows(count)
    if cases is None:
        checks.require_judged()
    where = place_of(kernel)
    if emulated is not None:
        try:
            emulated()
        except MissingError as missing:
            where += f"; races were not looked for: {str(missing).splitlines()[0]}"
    return Report(kernel.plan.name, where, seed, tuple(checks.found))


def place_of(kernel: Kernel) -> str:
    """`emulator (checking), warp 32`, `emulator (fast build), warp 32`, or the GPU's name."""
    device = kernel.device
    if device.kind != "emulator":
        return str(device)
    return f"emulator ({'checking' if getattr(device, 'check', False) else 'fast build'}), warp {kernel.target.warp}"


class Checks:
    """One validation under way: what is found goes to `found`."""

    def __init__(self, kernel: Kernel, seed: int, wanted: frozenset[str] | None) -> None:
        self.kernel, self.device = kernel, kernel.device
        self.plan, self.graph = kernel.plan, kernel.plan.graph
        self.summed = summed_dims(self.graph)
        self.seed = seed
        self.wanted = wanted
        self.reference = load_reference(kernel.source.reference, self.plan.name)
        self.found: list[Case] = []
        self.normal: tuple[Operands, list[Array]] | None = None  # the ragged launch
        self.judged: dict[str, float] = {}  # of each output the largest share that a launch held to bounds

    def rng(self, launch: str) -> np.random.Generator:
        """A stream of its own for each launch, so that leaving one out changes no other."""
        return np.random.default_rng((self.seed, crc32(launch.encode())))

    def wants(self, *names: str) -> bool:
        return self.wanted is None or not self.wanted.isdisjoint(names)

    def deep(self) -> int:
        """Rows worth having where they know their index, if there may be as many: a causal row sees no more columns
        than there are rows."""
        counted = any(n.op.name == "row_index" for n in self.graph.nodes)
        free = counted and str(self.graph.shape[-2]) in free_dims(self.plan, self.plan.flat)
        return self.graph.cols + 2 if free else 0

    # ---------------------------------------------------------------- what is checked

    def ragged(self, most: int) -> None:
        """A launch that fills no last block, then the same again, then some of its rows alone."""
        operands = self.ragged_operands(most)
        if not self.wants(NORMAL.name, "again", "apart", OTHER_GROUPS):
            return
        first = self.launch_case(NORMAL.name, NORMAL.reason, operands)
        if first is None:
            return
        self.normal, sizes = (operands, first), operands.sizes
        for pattern, setting in (GENTLE, GENTLE_SETTING), (STEADY, STEADY_SETTING):
            if min(self.judged.values(), default=1.0) < LEAST_BOUNDED:
                other = make_operands(self.plan, sizes, self.rng(pattern.name), (pattern,), setting)
                self.launch_case(pattern.name, pattern.reason, other)
        self.again(operands, first)
        self.apart(operands, first)
        self.other_groups(operands, first)
        if last := last_launch(self, operands, alone=False):
            note_last(self, operands, last, failing(last.run), first)
        if self.graph.products and self.wants(UNIT_SETTING.name):
            self.promise(make_operands(self.plan, sizes, self.rng(UNIT_SETTING.name), (NORMAL,), UNIT_SETTING))

    def ragged_operands(self, most: int) -> Operands:
        """Of a launch that fills no last block."""
        block = self.plan.rows_per_block
        if self.plan.flat:  # one element short of whole vectors
            sizes = sizes_for(self.plan, 2 * block - 1)
        else:
            outer = (2,) if self.deep() else OUTER
            count = max(2 * block + 1, 2 * self.deep())
            fewest = 3 if self.plan.folded else 2  # blocks enough for a line and a rest of one
            sizes = sizes_for(self.plan, max(fewest, min(count, most_rows(self.plan, most))), outer)
        return make_operands(self.plan, sizes, self.rng(NORMAL.name))

    def promise(self, operands: Operands) -> None:
        """What products promise beyond their bounds, on numbers as layers have them."""
        outputs, problem = self.launch(operands)
        text = operands.text(self.graph)
        if not outputs:
            self.found.append(Case(UNIT_SETTING.name, UNIT_SETTING.reason, text, problem=problem))
            return
        compared, doubt = self.judge(operands, outputs)
        self.note_figures(UNIT_SETTING.name, UNIT_SETTING.reason, text, figures(compared), problem or doubt)
        compared = [out for out in compared if out.tensor.dtype.bytes > 1]  # codes are further off than that
        if not compared:
            return
        found = figures(compared)
        lowered, tf32 = self.plan.lowered, by_tf32(self.graph) and not self.plan.target.multiplies_f32
        short = any(dtype in F8 for dtype in lowered.factor_types.values())  # sums of few bits
        if not tf32 and not short and all(plain(factor) for product in lowered.products for factor in product.inputs):
            largest, relative = largest_errors(compared)
            name, reason = "abs < 5e-2, rel < 5e-3", "products of operands promise so much of each element"
            far = largest >= PRODUCT_ABS or relative >= PRODUCT_REL
            said = f"the largest error is {largest:.1e}, the largest relative one {relative:.1e}"
        else:
            what = "8-bit floats" if short else "factors that are rounded first"
            name, reason = "rel L2 < 1e-2", f"products of {what} promise so much"
            far, said = found.relative_l2 >= PRODUCT_L2, f"relative L2 is {found.relative_l2:.1e}"
        numbers = (found.elements, found.bounded, found.relative_l2, found.max_abs, found.max_rel)
        if not steps(self.plan.lowered):
            self.found.append(Case(name, reason, text, *numbers, problem=said if far else ""))

    def again(self, operands: Operands, first: list[Array]) -> None:
        """The same over other poison, on a folded grid where there may be one, and by blocks that take all rows in turn
        where they may: bitwise the same."""
        name = "again"
        if not self.wants(name):
            return
        shape = [size_of(size, operands.sizes) for size in self.graph.shape]
        width, where = 0, ""
        if self.plan.folded:
            width = folding(self.plan.blocks(*(math.prod(shape[axis] for axis in d.axes) for d in self.plan.row_dims)))
            where = f" on a grid folded into lines of {width} blocks,"
        elif self.plan.persistent_rows:
            width, where = self.plan.cluster, " with all rows in turn,"
        reason = f"the same launch{where} over other leftovers in memory"
        kernel = narrowed(self.kernel, width) if width else self.kernel
        with other_order(self.kernel.device, self.seed):
            outputs, problem = self.launch(operands, kernel=kernel, poison=1)
        self.same(name, reason, operands, outputs, first, problem)

    def apart(self, operands: Operands, first: list[Array]) -> None:
        """Some rows of the launch without the others, in reverse where rows don't count themselves; then one row."""
        if not self.wants("apart") or self.graph.scatters:  # of fewer rows fewer places are written
            return
        half = in_groups(self.graph, operands.values, operands.sizes, self.picks(operands.sizes))
        reason = "some of the rows alone and in another order: a row's result may not depend on other rows"
        for picks in (half, {name: places[:1] for name, places in half.items()}) if half else ():
            few = take(self.graph, operands, picks)
            outputs, problem = self.launch(few)
            wanted = [rows_at(array, t.shape, picks) for t, array in zip(self.graph.outputs, first, strict=True)]
            self.same("apart", reason, few, outputs, wanted, problem)

    def other_groups(self, operands: Operands, first: list[Array]) -> None:
        """Of sums over groups one group's, with NaN in all others."""
        if (
            not self.wants(OTHER_GROUPS, NORMAL.name)
            or (found := spoiled(self.graph, operands.values, operands.sizes)) is None
        ):
            return
        group, values = found
        reason = "NaN in all groups but one, and behind them: a group's sum may not depend on others"
        outputs, problem = self.launch(replace(operands, values=values))
        alone, wanted = ([array[group : group + 1] for array in arrays] for arrays in (outputs, first))
        self.same(OTHER_GROUPS, reason, operands, alone, wanted, problem)

    @property
    def strict(self) -> bool:
        """Does the device allow a kernel no byte but those it is given?"""
        return self.kernel.device.kind == "emulator" and bool(getattr(self.kernel.device, "check", False))

    def in_place(self) -> None:
        """Outputs over operands, as many at once as there may be, by strides of whole vectors and by odd ones."""
        rng = self.rng(IN_PLACE)
        for over in side_by_side(self.plan.in_place) if self.wants(IN_PLACE) else ():
            for how in (CONTIGUOUS, Arrangement(padding=1)):
                count = max(2, min(self.plan.rows_per_block + 1, most_rows(self.plan, QUICK_ELEMENTS)))
                operands = make_operands(self.plan, sizes_for(self.plan, count, flat=False), rng)
                arranged = dict.fromkeys((t.name for t in self.arrays), how)
                first, problem = self.launch(operands, arranged)
                inputs, fresh, values = self.placed(operands, arranged)
                outputs, other = self.launch_on(
                    self.kernel, inputs, overwriting(self.graph, over, inputs, fresh), values, watched=False
                )
                self.same(IN_PLACE, reason_of(over, how), operands, outputs if first else [], first, problem or other)

    def far_apart(self) -> None:
        """Rows 2^31 elements and more from one to the next."""
        name = "layout: far apart"
        if not self.strict or len(self.graph.shape) < 2 or self.graph.scatters or not self.wants("layout", name):
            return
        count = 2 * math.prod(OUTER[:2])  # two along each axis, at least
        operands = make_operands(self.plan, sizes_for(self.plan, count, OUTER, flat=False), self.rng(name))
        text, reason = operands.text(self.graph), "rows so far apart that an offset needs more than 32 bits"
        views = {t.name: far.spread([size_of(n, operands.sizes) for n in t.shape], t.dtype) for t in self.arrays}
        values = []
        for tensor, value in zip(self.graph.inputs, operands.values, strict=True):
            if tensor.shape:
                views[tensor.name].numpy()[...] = value
            else:
                values.append(value)
        if problem := failing(far.launch_apart, self.kernel, views, values):
            self.found.append(Case(name, reason, text, problem=problem))
            return
        compared, doubt = self.judge(operands, [views[t.name].numpy().copy() for t in self.graph.outputs])
        self.note_figures(name, reason, text, figures(compared), doubt)

    def picks(self, sizes: Mapping[str, int]) -> dict[str, list[int]]:
        """Which indices of each free dim to keep, and in which order.

        Rows that count themselves stay in place. Random numbers count all axes: the first of the outermost one stay.
        """
        whole = rows_of_tables(self.graph)
        free = [name for name in free_dims(self.plan, self.plan.flat) if name not in self.summed | whole]
        if draws(self.graph):
            first = str(self.graph.shape[0])
            return {first: list(range(-(-sizes[first] // 2)))} if first in free else {}
        counted = {str(self.graph.shape[-2])} if self.deep() else set()
        return {
            name: list(range(-(-sizes[name] // 2))) if name in counted else list(range(sizes[name]))[::-2]
            for name in free
        }

    def malice(self, most: int, times: int, setting: Setting) -> None:
        """Rows of every pattern side by side, one line for each."""
        patterns = [p for p in patterns_for(self.graph) if self.wants(p.name) or p is NORMAL]
        if self.wanted is not None and len(patterns) == 1:
            return
        if setting is USUAL:  # the ragged launch was all normal rows
            self.side_by_side("malice", setting.reason, patterns[1:], most, times, setting, each=True)
        else:
            self.side_by_side(f"shared: {setting.name}", setting.reason, patterns, most, times, setting)

    def contracted(self, most: int) -> None:
        """Rows of every pattern once more, in the emulator's other arithmetic (`fusegen.emulator.toolchain`)."""
        device = self.kernel.device
        if not isinstance(device, EmulatorDevice) or device.contract or not self.wants("contracted"):
            return
        reason = "products and sums fused wherever a compiler may: which ones are is the choice of each GPU's compiler"
        fused = Kernel(self.kernel.source, self.kernel.binary, device.contracting(), self.kernel.make_variant)
        self.side_by_side("contracted", reason, patterns_for(self.graph), most, 1, USUAL, kernel=fused)

    def side_by_side(
        self, name: str, reason: str, patterns: Sequence[Pattern], most: int, times: int, setting: Setting,
        each: bool = False, kernel: Kernel | None = None,
    ) -> None:  # fmt: skip
        """A launch with rows of all `patterns`; of a chain of one axis, whose rows can't be mixed, one for each."""
        count = max(2, min(max(len(patterns) * times, self.deep()), most_rows(self.plan, most)))
        mixes = len(self.graph.shape) > 1 and not self.summed
        groups = [patterns] if mixes else [[p] for p in patterns]
        for group in groups:
            sizes = flat_sizes(self.plan, len(group)) if self.plan.flat else sizes_for(self.plan, count)
            operands = make_operands(self.plan, sizes, self.rng(f"{name} {group[0].name}"), group, setting)
            self.launch_case(name, reason, operands, each=each, kernel=kernel)

    def rows(self, count: int) -> None:
        if self.wants("rows") and free_dims(self.plan, self.plan.flat):
            operands = make_operands(self.plan, sizes_for(self.plan, count), self.rng(f"rows: {count}"))
            self.launch_case(f"rows: {count}", "a row count at an edge of the tiling", operands)

    def layout(self, name: str) -> None:
        reason, how, everywhere = ARRANGEMENTS[name]
        leading = len(self.graph.shape) - 1
        if not self.wants("layout", name) or leading < (2 if how.swapped else 1):
            return
        factors = self.plan.transposable if how.transposed else frozenset[str]()
        if how.transposed and not factors:
            return
        block = self.plan.rows_per_block if not self.plan.flat else 6
        count = max(6, min(block + 1, most_rows(self.plan, FULL_ELEMENTS)))
        count += -count % VECTOR_BYTES if how.transposed and not how.padding else 0  # vectors fill rows side by side
        # other layouts are read by rows, whose length stays
        operands = make_operands(self.plan, sizes_for(self.plan, count, OUTER, flat=False), self.rng(name))
        if how.broadcast:
            operands = replace(operands, values=tuple(map(repeated, operands.values)))
        arrays = [t.name for t in (*self.graph.inputs, *self.graph.outputs) if t.shape]
        if how.transposed:
            arrays = [name for name in arrays if name in factors]
        arranged = dict.fromkeys(arrays if everywhere else arrays[:1], how)
        same_as_contiguous(self, name, operands, self.launch_case(f"layout: {name}", reason, operands, arranged))

    # ---------------------------------------------------------------- launching and judging

    def launch(
        self, operands: Operands, arranged: Mapping[str, Arrangement] | None = None, kernel: Kernel | None = None,
        poison: int = 0,
    ) -> tuple[list[Array], str]:  # fmt: skip
        """The outputs in their storage types and what was wrong with the launch itself (empty: nothing)."""
        inputs, outputs, values = self.placed(operands, arranged or {}, poison)
        return self.launch_on(kernel or self.kernel, inputs, outputs, values, watched=not poison)

    def launch_on(
        self, kernel: Kernel, inputs: Sequence[Placed], outputs: Sequence[Placed], values: Sequence[Any], watched: bool
    ) -> tuple[list[Array], str]:
        """The same on arrays that are there; `watched`: outputs hold the first poison, which no kernel computes."""
        device = kernel.device
        arguments = self.arguments(inputs, values)

        def run() -> None:
            kernel(*arguments, out=tuple(o.view for o in outputs))
            device.synchronize()

        if problem := failing(run):
            return [], problem
        found, problems = [], []
        for tensor, output in zip(self.graph.outputs, outputs, strict=True):
            whole = watched and tensor.node.op.kind is not Kind.SCATTER
            array, problem = read_output(output, told(tensor.dtype) if whole else 0, tensor.name)
            found.append(array)
            problems.append(problem)
        kept = [one for one in inputs if not any(one is other for other in outputs)]
        if device.kind != "emulator" and not all(map(untouched, kept)):  # the emulator stops at such a write
            problems.append("an operand was written to")
        return found, "; ".join(filter(None, problems))

    def arguments(self, inputs: Sequence[Placed], values: Sequence[Any]) -> list[Any]:
        """The operands of a call, in order."""
        views, scalars = iter(inputs), iter(values)
        return [next(views).view if tensor.shape else next(scalars) for tensor in self.graph.inputs]

    def placed(
        self, operands: Operands, arranged: Mapping[str, Arrangement] | None = None, poison: int = 0
    ) -> tuple[list[Placed], list[Placed], list[Any]]:
        """Inputs and poisoned outputs in the device's memory, and the run-time scalars."""
        device = self.device
        arranged = arranged or {}
        inputs: list[Placed] = []
        values: list[Any] = []
        for tensor, value in zip(self.graph.inputs, operands.values, strict=True):
            if not tensor.shape:
                values.append(value)
                continue
            how = arranged.get(tensor.name, self.usual(tensor, operands.sizes))
            inputs.append(place(device, value, tensor.dtype, how, POISON[tensor.dtype][poison]))
        outputs = []
        for tensor in self.graph.outputs:
            shape = tuple(size_of(size, operands.sizes) for size in tensor.shape)
            how = replace(arranged.get(tensor.name, CONTIGUOUS), broadcast=False)
            stays = tensor.node.op.kind is Kind.SCATTER  # what no index names is the same each time
            outputs.append(reserve(device, shape, tensor.dtype, how, POISON[tensor.dtype][0 if stays else poison]))
        return inputs, outputs, values

    def usual(self, tensor: Tensor, sizes: Mapping[str, int]) -> Arrangement:
        """Contiguous. But where rows are the last axis, as of a left factor [K, M], the leading dimension is a multiple
        of a vector, however many they are: an odd one asks for a variant, which may sum in another order."""
        last = str(tensor.shape[-1])
        if not self.graph.products or last not in free_dims(self.plan, self.plan.flat):
            return CONTIGUOUS
        return Arrangement(padding=-sizes[last] % (VECTOR_BYTES // tensor.dtype.bytes))

    @property
    def arrays(self) -> list[Tensor]:
        """Operands and outputs that lie in memory, in a call's order."""
        return [t for t in (*self.graph.inputs, *self.graph.outputs) if t.shape]

    def launch_case(
        self, name: str, reason: str, operands: Operands, arranged: Mapping[str, Arrangement] | None = None,
        each: bool = False, kernel: Kernel | None = None,
    ) -> list[Array] | None:  # fmt: skip
        """Launch, judge, and note a case (with `each`, one for every pattern); the outputs, if they could be judged."""
        outputs, problem = self.launch(operands, arranged, kernel)
        text = operands.text(self.graph)
        if not outputs:
            self.found.append(Case(name, reason, text, problem=problem))
            return None
        compared, doubt = self.judge(operands, outputs)
        problem = problem or doubt
        if not each:
            self.count(compared, slice(None), usual=name in (NORMAL.name, GENTLE.name, STEADY.name))
            self.note_figures(name, reason, text, figures(compared), problem)
            return outputs
        if problem:
            self.found.append(Case(name, reason, text, problem=problem))
        labels = np.array(operands.labels if not self.summed else operands.labels[:1])  # all alike, then
        for pattern in PATTERNS:
            if (labels == pattern.name).any() and self.wants(pattern.name):
                here = slice(None) if self.summed else labels == pattern.name
                self.count(compared, here, usual=False)
                self.note_figures(pattern.name, pattern.reason, text, figures(compared, here), "")
        return outputs

    def judge(self, operands: Operands, outputs: Sequence[Array]) -> tuple[list[Compared], str]:
        """Every output against the reference text, and whether that text and the analysis agree on the value."""
        values = self.reference(*operands.values)
        expected = values if isinstance(values, tuple) else (values,)
        graph = self.plan.lowered
        compared, doubt, laws = judged_with_laws(graph, accumulations(self.plan), operands.values, outputs, expected)
        for tensor, got in zip(graph.outputs, outputs, strict=True):
            if tensor.node.op.kind is Kind.SCATTER:
                before = np.full(got.shape, POISON[tensor.dtype][0] % 2 ** (8 * tensor.dtype.bytes), f"u{got.itemsize}")
                doubt = doubt or overwritten(tensor, got, before, unnamed_rows(tensor.node, laws, len(got)))
        return compared, doubt

    def count(self, compared: Sequence[Compared], rows: Array | slice, usual: bool) -> None:
        """Note how much of each output was held to bounds. NaN that came of what is no number prove little."""
        for out in compared:
            share = judged(out, rows, numbers=not usual)
            self.judged[out.tensor.name] = max(self.judged.get(out.tensor.name, 0.0), share)

    def require_judged(self) -> None:
        """Each output must have been judged in some launch, or this validation says nothing of it."""
        for tensor in self.plan.lowered.outputs:
            share = self.judged.get(tensor.name, 1.0)
            if share >= LEAST_JUDGED:
                continue
            self.unjudged(tensor.name, share, self.unbounded(tensor.node))

    def unjudged(self, name: str, share: float, blamed: Node | None) -> None:
        """Note an output of which no launch had bounds for more than `share`."""
        said = f"{name} can't be validated: no input leaves more than {share:.0%} of it with an error bound"
        if blamed is not None:
            said += f"\n  of what {blamed.operator} at {blamed.where} takes, rounding errors are all that is left"
        said += "\n  mend that step, or do without validation: validate=False, or --no-validate"
        self.found.append(Case(JUDGED, "every output needs inputs on which a wrong one would show", problem=said))

    def unbounded(self, output: Node) -> Node | None:
        """The first step behind which most of a normal launch has no bound."""
        sizes = sizes_for(self.plan, 2)
        operands = make_operands(self.plan, sizes, self.rng(STEADY.name), (STEADY,), STEADY_SETTING)
        graph = self.plan.lowered
        table = analyse_nodes(graph, operands.values, accumulations(self.plan))
        lost = {node: float(np.isinf(held(table[node]).error).mean()) > LEAST_JUDGED for node in graph.nodes}
        return next((n for n in graph.ancestors(output) if lost[n] and not any(lost[a] for a in n.inputs)), None)

    def note_figures(self, name: str, reason: str, sizes: str, f: Figures, problem: str) -> None:
        if not problem and f.wrong:
            problem = f"{f.wrong} of {f.elements} elements are wrong: {f.worst}"
        normal = name == NORMAL.name
        numbers = (f.elements, f.bounded, f.relative_l2, f.max_abs, f.max_rel, f.share, f.worst)
        self.found.append(Case(name, reason, sizes, *numbers, problem))
        tensors = [t for t in (*self.graph.inputs, *self.graph.outputs) if t.dtype.kind == "float"]
        rows = self.graph.reductions and not self.graph.products
        promised = f.allowed_l2 <= CONDITIONED and not steps(self.graph)
        if normal and rows and promised and all(t.dtype is f32 for t in tensors):
            far = "" if f.relative_l2 <= ROW_L2 else f"relative L2 is {f.relative_l2:.1e}, above {ROW_L2:.0e}"
            reason = f"f32 row chains promise a relative L2 of at most {ROW_L2:.0e} on normal rows"
            self.found.append(Case(f"rel L2 <= {ROW_L2:.0e}", reason, sizes, *numbers[:-2], problem=far))

    def same(
        self, name: str, reason: str, operands: Operands, outputs: Sequence[Array], before: Sequence[Array],
        problem: str,
    ) -> None:  # fmt: skip
        """Note whether outputs are bitwise what they were before."""
        elements = sum(a.size for a in outputs)
        for tensor, got, want in zip(self.graph.outputs, outputs, before, strict=True) if outputs else ():
            raw = f"u{tensor.dtype.bytes}"
            different = np.ascontiguousarray(got).view(raw) != np.ascontiguousarray(want).view(raw)
            if different.any() and not problem:
                at = tuple(int(i) for i in np.argwhere(different)[0])
                problem = (
                    f"{tensor.name}: {int(different.sum())} of {different.size} elements differ in their bits, "
                    f"first {list(at)}: {got[at]} and before {want[at]}"
                )
        self.found.append(Case(name, reason, operands.text(self.graph), elements, problem=problem, bitwise=True))
