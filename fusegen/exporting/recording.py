"""Inputs and what must come of them, recorded for the test of an export.

Inputs are drawn as a validation's; what must come of them is the reference's float64, and how far a kernel may be from
it the error bound of each element, the largest of all targets: the same that validation holds kernels to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusegen.errors import ValidationError
from fusegen.exporting.facts import Exported
from fusegen.language.graph import Kind, Tensor
from fusegen.language.types import size_of
from fusegen.language.views import identity_of, positions_in
from fusegen.runtime import Kernel, Program
from fusegen.validation.checks import LEAST_BOUNDED, Checks
from fusegen.validation.compare import Compared
from fusegen.validation.inputs import NORMAL, USUAL, Operands, make_operands, sizes_for
from fusegen.validation.patterns import GENTLE, GENTLE_SETTING, STEADY, STEADY_SETTING, Pattern, Setting
from fusegen.validation.programs import ProgramChecks

Array = np.ndarray[Any, np.dtype[Any]]
SEED = 0
ROWS = 7  # of the recorded launch: several, and no multiple of anything
OUTER = (3,)  # of the first of several dimensions of rows, where that many fit
LARGEST_BYTES = 1 << 28  # of what is recorded of a chain


@dataclass(frozen=True, slots=True)
class Recorded:
    """One launch. `arrays` by name, as they lie in memory: of operands before it; `expected` and `allowed`, float64, of
    each array that is written: an output, or an operand that gets new rows."""

    sizes: Mapping[str, int]
    arrays: Mapping[str, Array]
    values: Mapping[str, float]
    expected: Mapping[str, Array]
    allowed: Mapping[str, Array]

    @property
    def bounded(self) -> float:
        """The share of an output that is held to bounds, of the output with the least."""
        return min((float(np.isfinite(own).mean()) for own in self.allowed.values() if own.size), default=1.0)


def recorded(chain: Exported, made: Sequence[Kernel | Program]) -> Recorded:
    """One launch of the chain on every target, on inputs that leave nearly all of each output with an error bound, or
    as much as any do. Raises ValidationError where a launch is wrong."""
    checks = [checks_of(one) for one in made]
    tries = ((NORMAL, USUAL), (GENTLE, GENTLE_SETTING), (STEADY, STEADY_SETTING))
    found: list[Recorded] = []
    for pattern, setting in tries:
        found.append(recorded_of(chain, checks, drawn(checks[0], pattern, setting)))
        if found[-1].bounded >= LEAST_BOUNDED:
            break
    return max(found, key=lambda one: one.bounded)


def recorded_of(chain: Exported, checks: Sequence[Checks], operands: Operands) -> Recorded:
    """The launch on these operands."""
    graph = chain.graph
    expected: dict[str, Array] = {}
    allowed: dict[str, Array] = {}
    for one in checks:
        outputs, problem = one.launch(operands)
        compared, doubt = one.judge(operands, outputs) if outputs else ([], "")
        if problem or doubt or any(part.wrong.any() for part in compared):
            raise ValidationError(f"{chain.name}: the launch that was to be recorded is wrong: {problem or doubt}")
        for tensor, got in zip(graph.outputs, outputs, strict=True):
            name = graph.updates.get(tensor.name, tensor.name)
            values, bounds = assembled(one, tensor, got, compared, operands.sizes)
            expected.setdefault(name, values)
            allowed[name] = np.maximum(allowed.get(name, bounds), bounds)
    pairs = list(zip(graph.inputs, operands.values, strict=True))
    arrays = {tensor.name: stored(np.asarray(value)) for tensor, value in pairs if tensor.shape}
    scalars = {tensor.name: value for tensor, value in pairs if not tensor.shape}
    return Recorded(operands.sizes, arrays, scalars, expected, allowed)


def drawn(checks: Checks, pattern: Pattern, setting: Setting) -> Operands:
    """A few rows."""
    if isinstance(checks, ProgramChecks):
        return checks.operands(sizes_of(checks), pattern.name, (pattern,), setting)
    return make_operands(checks.plan, sizes_of(checks), checks.rng(pattern.name), (pattern,), setting)


def sizes_of(checks: Checks) -> dict[str, int]:
    """Of the recorded launch; of an array without rows, some elements that fill no last block."""
    if isinstance(checks, ProgramChecks):
        return checks.sizes_for(ROWS, OUTER)
    plan = checks.plan
    return sizes_for(plan, 2 * plan.rows_per_block - 1 if plan.flat else ROWS, () if plan.flat else OUTER)


def checks_of(one: Kernel | Program) -> Checks:
    return ProgramChecks(one, SEED, None) if isinstance(one, Program) else Checks(one, SEED, None)


def size_in_bytes(one: Kernel | Program) -> int:
    """What a recorded launch takes on disk."""
    sizes = sizes_of(checks_of(one))

    def elements(tensor: Tensor) -> int:
        return math.prod(size_of(size, sizes) for size in tensor.shape)

    graph = one.op_graph
    return sum(elements(t) * t.dtype.bytes for t in graph.inputs) + sum(elements(t) * 16 for t in graph.outputs)


def assembled(
    checks: Checks, tensor: Tensor, got: Array, compared: Sequence[Compared], sizes: Mapping[str, int]
) -> tuple[Array, Array]:
    """What is expected of an output and how far off it may be. Where only some rows are written, it is what the kernel
    left, which was judged, and may be off by as much as any of them."""
    parts = list(parts_of(checks, tensor, compared, sizes))
    rows = tensor.node.op.kind is Kind.SCATTER or any(part.got.size != size for part, size, _ in parts)
    if rows or not parts:
        most = max((float(np.max(part.allowed, initial=0.0)) for part, _, _ in parts), default=0.0)
        return got.astype(np.float64), np.full(got.shape, most)
    expected, allowed = np.zeros(got.size), np.full(got.size, np.inf)
    for part, _, places in parts:
        expected[places], allowed[places] = part.expected.reshape(-1), part.allowed.reshape(-1)
        if part.note is not None:  # columns that were chosen: ties may be broken in another way
            expected[places] = part.got.reshape(-1)
            allowed[places] = 0.0
    return expected.reshape(got.shape), allowed.reshape(got.shape)


def parts_of(
    checks: Checks, tensor: Tensor, compared: Sequence[Compared], sizes: Mapping[str, int]
) -> Iterator[tuple[Compared, int, Array]]:
    """The parts of an output as kernels write them: each with its size, and where in the output it lies, flat."""
    if not isinstance(checks, ProgramChecks):
        for part in compared:
            if part.tensor.name == tensor.name:
                yield part, part.got.size, np.arange(part.got.size)
        return
    found = iter(compared)
    for step in checks.program.plan.steps:
        bases = {binding.tensor: binding for binding in step.writes}
        for own in step.plan.lowered.outputs:
            part, binding = next(found), bases[own.name]
            if binding.base == tensor.name:
                view = binding.view or identity_of(tensor.shape)
                yield part, part.got.size, positions_in(view, sizes).reshape(-1)


def stored(array: Array) -> Array:
    """The array's bytes under a type that every reader of .npy knows: of what numpy has no type of its own for, whole
    numbers of the same size."""
    array = np.ascontiguousarray(array)
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}")
