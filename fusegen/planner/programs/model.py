"""A ProgramPlan, frozen: kernels in order, the tensors between them, and where those lie in one workspace.

Each step's graph is one kernel's. Its tensors are bound to the program's: operands, outputs, and tensors of the
workspace, which live from the step that writes them to the last one that reads them. A step's tensor may be a view of
the program's: the same memory from another address on, by other strides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from fusegen.language import notebook
from fusegen.language.graph import Graph, Node
from fusegen.language.naming import free_name
from fusegen.language.reference import reference_source
from fusegen.language.sizes import Dim, Shape, Size, dims_in, solved
from fusegen.language.types import TensorType, size_of
from fusegen.language.views import View
from fusegen.planner.heading import body_lines, field, megabytes, plural, summary
from fusegen.planner.model import Plan
from fusegen.planner.pieces import bytes_of
from fusegen.planner.programs.one_cluster import OneClusterPlan
from fusegen.planner.programs.side_by_side import LETTERS, JoinedPlan
from fusegen.planner.rewrites import stores_that_round
from fusegen.targets.base import Target

ALIGNMENT = 256  # bytes: where tensors of the workspace begin, as any allocation of a GPU's driver does

COUNTER_BYTES = 8  # of a word in which clusters are counted

Home = Literal["operand", "output", "workspace"]
Joined = Literal["", "beside", "behind"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A value that is in memory between kernels: `node` of the written graph, as `type`, under a name of its own.

    `why` says in the spec's words what the boundary is for. One whose home is an output is that output.
    """

    name: str
    type: TensorType
    home: Home
    node: Node = dataclasses.field(repr=False)
    why: str = ""

    def bytes(self, sizes: Mapping[str, int]) -> int:
        return self.type.dtype.bytes * math.prod(size_of(size, sizes) for size in self.type.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.type}"


@dataclass(frozen=True, slots=True)
class Binding:
    """A step's tensor and the program's tensor that it is; a view of it, or with None all of it, as it lies."""

    tensor: str
    base: str
    view: View | None = None

    def __str__(self) -> str:
        return self.base if self.view is None or self.tensor == self.base else f"{self.tensor} in {self.base}"


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel. `reads` and `writes` bind its arrays, in the order of its graph's; `values` are the names of its
    run-time scalars, which are the program's. `sizes`: dims of its graph that are computed from the program's.
    `joined`: it is done in the same launch as the step before it, beside it or behind it; `share`: of its rows, each
    cluster of the launch does so many."""

    graph: Graph
    plan: Plan
    reads: tuple[Binding, ...]
    writes: tuple[Binding, ...]
    values: tuple[str, ...]
    sizes: Mapping[str, Size] = dataclasses.field(default_factory=dict)
    joined: Joined = ""
    share: int = 0

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def fixed(self) -> Shape:
        """The sizes that are constants of its kernel, in the program's dims."""
        return tuple(self.sizes.get(dim.name, dim) for dim in dims_in(tuple(self.plan.graph.fixed)))

    @property
    def bindings(self) -> tuple[Binding, ...]:
        return (*self.reads, *self.writes)


@dataclass(frozen=True, slots=True)
class Arena:
    """Where the tensors of a workspace lie at some sizes, in bytes from its start."""

    offsets: Mapping[str, int]
    bytes: int
    counted: tuple[int, ...] = ()  # the bytes in which launches count their clusters


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to cut the chain that was looked at: these values in memory, so many kernels. One that can't be taken has
    no time, and a reason."""

    stored: tuple[str, ...]
    kernels: int
    time_us: float | None
    reason: str = ""


@dataclass(frozen=True)
class ProgramPlan:
    """A chain as kernels, one after another. `time_us` is what the cost model says of all of them."""

    graph: Graph
    target: Target
    steps: tuple[Step, ...]
    between: tuple[Stored, ...]  # the tensors of the workspace, in the order in which they are written
    shared: tuple[Stored, ...] = ()  # outputs that later kernels read
    cuts: tuple[Cut, ...] = ()  # the cheapest of those looked at, then some that can't be taken

    def __repr__(self) -> str:
        return f"<ProgramPlan {self.name} {self.graph.signature} for {self.target}, {len(self.steps)} kernels>"

    def __str__(self) -> str:
        return "\n".join(program_lines(self))

    def _repr_html_(self) -> str | None:
        """Graph and kernels, for notebooks."""
        return notebook.drawn(self)

    @property
    def name(self) -> str:
        return self.graph.name

    @cached_property
    def reference(self) -> str:
        """The numpy text of the whole chain, which every output is held to. An output that is a cast to its own type is
        returned as it is before: storing rounds it."""
        return reference_source(stores_that_round(self.graph))

    @cached_property
    def launches(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of each launch, one after another."""
        found: list[tuple[Step, ...]] = []
        for step in self.steps:
            if step.joined:
                found[-1] = (*found[-1], step)
            else:
                found.append((step,))
        return tuple(found)

    @property
    def launched(self) -> tuple[Plan | JoinedPlan, ...]:
        """What is launched, one after another."""
        return tuple(steps[0].plan if len(steps) == 1 else self.joined_plan(steps) for steps in self.launches)

    def joined_plan(self, steps: Sequence[Step]) -> JoinedPlan:
        """The plan of one launch of these steps."""
        said = tuple(step.name.removeprefix(f"{self.name}_") for step in steps)
        name = self.name if len(steps) == len(self.steps) else f"{self.name}_{'_'.join(said)}"
        name = free_name(name, {step.name for step in self.steps if step not in steps})
        plans = tuple(step.plan for step in steps)
        if steps[-1].joined != "behind":
            return JoinedPlan(name, self.target, plans, said)
        shared_out = sum(step.share > 0 for step in steps)
        return OneClusterPlan(name, self.target, plans, said, shared_out, steps[0].share)

    @property
    def time_us(self) -> float:
        """Of all launches, each with what launching takes, of which one that begins early has a part behind it."""
        launched = self.launched
        return sum(plan.cost.time_us for plan in launched) - sum(p.waits for p in launched) * self.target.early_us

    @property
    def floor_us(self) -> float:
        """The kernels' floors together: what this cut can't undercut."""
        return sum(step.plan.cost.floor_us for step in self.steps)

    @cached_property
    def fixed(self) -> frozenset[str]:
        """The dims whose sizes are constants of some kernel, or numbers in the chain, or that no operand tells."""
        sizes = [size for step in self.steps for size in step.fixed]
        sizes += [node.size for node in self.graph.nodes if node.size is not None]
        return untold(self.graph, frozenset(dim.name for dim in dims_in(tuple(sizes))))

    @property
    def boundaries(self) -> tuple[Stored, ...]:
        """What one kernel writes and a later one reads, in the order in which it is written."""
        written = {base: place for place in range(len(self.launches)) for base in self.written(place)}
        return tuple(sorted((*self.between, *self.shared), key=lambda stored: written[stored.name]))

    def ends(self, stored: Stored) -> tuple[int, tuple[int, ...]]:
        """The launch that writes it, and those that read it."""
        reading = (names_of(b for step in steps for b in step.reads) for steps in self.launches)
        written = next(place for place in range(len(self.launches)) if stored.name in self.written(place))
        return written, tuple(place for place, names in enumerate(reading) if stored.name in names)

    def written(self, place: int) -> set[str]:
        """What a launch writes."""
        return names_of(b for step in self.launches[place] for b in step.writes)

    @cached_property
    def lives(self) -> Mapping[str, tuple[int, int]]:
        """Of each tensor of the workspace, the launch that writes it and the last one that reads it."""
        ends = {stored.name: self.ends(stored) for stored in self.between}
        return {name: (written, max(read, default=written)) for name, (written, read) in ends.items()}

    @cached_property
    def counters(self) -> Mapping[str, int]:
        """The words of the workspace in which launches count their clusters, each with the launch."""
        return {
            f"{plan.name} arrived": place
            for place, plan in enumerate(self.launched)
            if isinstance(plan, OneClusterPlan) and plan.counts
        }

    def arena(self, sizes: Mapping[str, int]) -> Arena:
        """The workspace at these sizes: tensors that live at different times may share bytes."""
        lives = {**self.lives, **{name: (place, place) for name, place in self.counters.items()}}
        nbytes = {s.name: s.bytes(sizes) for s in self.between} | dict.fromkeys(self.counters, COUNTER_BYTES)
        found = arranged(nbytes, lives)
        counted = (found.offsets[name] + byte for name in self.counters for byte in range(COUNTER_BYTES))
        return replace(found, counted=tuple(counted))


def one_after_another(times: Sequence[float], early_us: float) -> float:
    """Kernels that take these times alone, of which each but the first begins early."""
    return sum(times) - early_us * max(0, len(times) - 1)


def least_us(part: Graph, graph: Graph, target: Target) -> float:
    """What no kernels that make a part of a graph can undercut: the bytes of what they read and write, or products."""
    arrays = [t for t in (*part.inputs, *part.outputs) if t.shape]
    nbytes = sum(bytes_of(graph, t) for t in arrays)
    spaces = [(*n.shape[1 if n.inner_ends else 0 :], n.inputs[0].shape[-1]) for n in part.products]
    flops = 2 * sum(math.prod(size_of(s, graph.sizes) for s in space) for space in spaces)
    rate = max((target.product_tflops(t) for t in part.factor_types.values()), default=0.0)
    return max(nbytes / (target.dram_gbs * 1e3), flops / (rate * 1e6) if rate else 0.0)


def names_of(bindings: Iterable[Binding]) -> set[str]:
    return {binding.base for binding in bindings}


def arranged(nbytes: Mapping[str, int], lives: Mapping[str, tuple[int, int]]) -> Arena:
    """An offset for each tensor: the largest first, each at the lowest place that is free while it lives."""
    placed: dict[str, tuple[int, int]] = {}
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], lives[name])):
        first, last = lives[name]
        taken = sorted(placed[other] for other in placed if lives[other][0] <= last and first <= lives[other][1])
        offset = 0
        for low, high in taken:
            if offset + nbytes[name] <= low:
                break
            offset = max(offset, -(-high // ALIGNMENT) * ALIGNMENT)
        placed[name] = offset, offset + nbytes[name]
    end = max((high for _, high in placed.values()), default=0)
    return Arena({name: placed[name][0] for name in nbytes}, -(-end // ALIGNMENT) * ALIGNMENT)


# ---------------------------------------------------------------- in words


def program_lines(program: ProgramPlan) -> list[str]:
    """The whole program: its kernels in order, what lies between them and why, and the workspace."""
    graph = program.graph
    arena = program.arena(graph.sizes)
    doc = summary(graph)
    lines = [f"{program.name}  {graph.signature}  at {graph.sizes_text()}", *([doc] if doc else []), ""]
    lines += body_lines(graph.body)
    lines += field("target", f"{program.target.vendor} {program.target.arch}, facts of {program.target.model}")
    count = plural(len(program.launches), "kernel", "kernels")
    between = sum(stored.bytes(graph.sizes) for stored in program.between)
    lines += field("kernels", f"{count}, {program.time_us:.1f} us expected, {program.floor_us:.1f} us at the least")
    if program.between:
        lines += field("memory", f"{megabytes(arena.bytes)} of workspace for {megabytes(between)} between kernels")
    for number, (steps, plan) in enumerate(zip(program.launches, program.launched, strict=True), 1):
        lines += ["", *launch_lines(number, steps, plan)]
    if program.boundaries:
        lines += ["", "between kernels:"]
        for stored in program.boundaries:
            lines += [f"  {stored}  {place_text(program, stored, arena)}"]
            lines += [f"    {line}" for line in field("because", stored.why)]
    return lines


def place_text(program: ProgramPlan, stored: Stored, arena: Arena) -> str:
    """`117.4 MB, at byte 0 of the workspace, from kernel 1 to 2`."""
    written, read = program.ends(stored)
    where = f"at byte {arena.offsets[stored.name]} of the workspace" if stored.home == "workspace" else "an output"
    readers = " and ".join(str(place + 1) for place in read)
    return f"{megabytes(stored.bytes(program.graph.sizes))}, {where}, from kernel {written + 1} to {readers}"


def launch_lines(number: int, steps: Sequence[Step], plan: Plan | JoinedPlan) -> list[str]:
    launch = [f"  {line}" for line in field("launch", plan.launched)] if plan.launched else []
    if not isinstance(plan, JoinedPlan):
        return [*step_lines(f"{number}", steps[0]), *launch]
    lines = [f"{number}. {plan.name}: {plan.regime}"]
    lines += [f"  {line}" for line in field("because", plan.why)]
    lines += [*(f"  {line}" for line in field("rows", plan.shares) if plan.shares), *launch]
    for letter, step in zip(LETTERS, steps, strict=False):
        lines += [f"  {line}" for line in step_lines(letter, step)]
    return lines


def step_lines(number: str, step: Step) -> list[str]:
    reads, writes = (", ".join(map(str, bindings)) for bindings in (step.reads, step.writes))
    values = f" and {', '.join(step.values)}" if step.values else ""
    return [
        f"{number}. {step.name}: {reads}{values} -> {writes}",
        *(f"  {line}" for line in field("tile", step.plan.regime)),
        f"  {'time':<9}{step.plan.cost.time_us:.1f} us expected, {step.plan.cost.floor_us:.1f} us floor",
        *(f"  {line}" for r in [step.plan.rounding] if r for line in field("rounding", f"{'; '.join(r)}; f32 between")),
    ]


def untold(graph: Graph, fixed: frozenset[str]) -> frozenset[str]:
    """The dims that are `fixed`, and those that stand in axes such as `(H + 2 * G) * D` alone, from which no call can
    tell them: of other ones results would be other ones."""
    axes = [size for tensor in graph.inputs for size in tensor.shape if not isinstance(size, int)]
    told = {size.name for size in axes if isinstance(size, Dim)}
    for size in axes:  # in the order of `arguments.measure_dims`
        unknown = list({dim.name for dim in dims_in(size)} - told - fixed)
        if len(unknown) == 1 and solved(size, unknown[0], 1) is not None:
            told.add(unknown[0])
    return fixed | {dim.name for size in axes for dim in dims_in(size)} - told


def first_reason(refusal: str, graph: Graph) -> str:
    """The reason in a NoPlan's text: behind the first line, which says that there is no plan, and the rule's name.
    Places in the file of the graph's spec by their lines alone: a plan is the same wherever the file lies."""
    lines = [line.strip() for line in refusal.splitlines()]
    reasons = [line for line in lines[1:] if not line.startswith(("`", "write it as"))]
    reason = reasons[0].partition(": ")[2] if reasons else lines[0]
    return reason.replace(f"{graph.where.file}:", "line ")
