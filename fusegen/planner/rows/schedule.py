"""Which value is computed in which pass over the row, what is kept between passes, what is reduced together.

A reduction needs the whole row before its result can be used, so a chain splits into *passes*: pass 0 computes what
needs no reduction, pass k what needs the results of pass k-1. What a later pass needs again is kept: as it was computed
("values"), or as it was read ("inputs": fewer bytes, and the same work again), or not at all ("nothing": memory is read
again). Values that cost no memory to have again, such as a column index or a vector that every row shares, are never
kept.

Where a pass computes its values anew, dependent reductions that have an online form are merged: a maximum with the sum
of exponentials under it, a mean with the squared deviations from it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

from fusegen.language.graph import Extent, Graph, Kind, Node, whole_rows
from fusegen.language.naming import value_names
from fusegen.language.scans import SCANS, Largest, Sorted
from fusegen.planner.limits import Limit, common_limit, limits, masked_values
from fusegen.planner.model import (
    Access,
    Argument,
    GroupStep,
    Keep,
    Keeps,
    Load,
    Reduction,
    ReductionKind,
    RowPass,
    Statement,
    Store,
    Until,
    Value,
)
from fusegen.planner.parts import ColumnPart, Scan
from fusegen.planner.pieces import argument, putting, reading, statement
from fusegen.planner.ranges import fits

ONLINE: tuple[ReductionKind, ...] = ("softmax", "welford")  # pairs of reductions that one pass can make
WITHIN = (Extent.ELEMENT, Extent.GROUP)  # of what varies along a row
KEEPS_NAN = frozenset({"add", "sub", "mul", "div", "neg", "abs", "square", "sqrt", "rsqrt", "minimum", "maximum"})


@dataclass(frozen=True, slots=True)
class Online:
    """Two dependent reductions in one pass: `second` needs no pass of its own."""

    kind: ReductionKind
    first: Node
    second: Node
    value: Node  # the element value both are made from
    guarded: bool = True


@dataclass(frozen=True, slots=True)
class Schedule:
    """The passes of a plan and what stands around them."""

    passes: tuple[RowPass, ...]
    launch_body: tuple[Statement, ...]
    row_loads: tuple[Load, ...]
    row_body: tuple[Statement, ...]
    row_stores: tuple[Store, ...]
    slots: int
    kept_bytes: int  # most bytes kept for one element at a time
    kept_names: tuple[str, ...]
    keeps: Keeps


def online_pairs(graph: Graph) -> tuple[Online, ...]:
    """The pairs of reductions that have a one-pass form, a reduction in one pair at most: of two sums of exponentials
    under one maximum, or of the deviations of squared deviations, the first pair is merged."""
    pairs: list[Online] = []
    paired: set[Node] = set()
    for node in graph.reductions:
        pair = match_softmax(node) or match_welford(node, graph)
        if pair and pair.first not in paired:
            pairs.append(pair)
            paired |= {pair.first, pair.second}
    return tuple(pairs)


def match_softmax(node: Node) -> Online | None:
    """sum(exp(z - p)) with p = max(z), or p = where(max(z) == -inf, 0, max(z))."""
    if node.op.name != "sum" or (e := node.inputs[0]).op.name != "exp" or e.inputs[0].op.name != "sub":
        return None
    value, pivot = e.inputs[0].inputs
    top, guarded = pivot, False
    if pivot.op.name == "where":
        test, zero, top = pivot.inputs
        minus_inf = test.op.name == "eq" and test.inputs[0] is top and test.inputs[1].literal == float("-inf")
        if not minus_inf or zero.literal != 0:
            return None
        guarded = True
    if top.op.name != "max" or top.inputs[0] is not value:
        return None
    return Online("softmax", top, node, value, guarded)


def match_welford(node: Node, graph: Graph) -> Online | None:
    """sum((h - m)^2) with m = sum(h) / N; guarded where an infinite sum shows."""
    if node.op.name != "sum":
        return None
    square = node.inputs[0]
    if square.op.name == "mul" and square.inputs[0] is square.inputs[1]:
        pass
    elif square.op.name != "square":
        return None
    centered = square.inputs[0]
    if centered.op.name != "sub":
        return None
    value, mean = centered.inputs
    if mean.op.name != "div" or mean.inputs[1].op.name != "size":
        return None
    total = mean.inputs[0]
    if total.op.name != "sum" or total.inputs[0] is not value:
        return None
    return Online("welford", total, node, value, not hidden(total, node, graph))


def hidden(total: Node, deviations: Node, graph: Graph) -> bool:
    """Is what is made of a sum seen only together with the deviations, which are NaN where the sum is infinite?"""
    lost = {deviations}  # NaN where the deviations are
    for node in graph.nodes:
        if node.op.name in KEEPS_NAN and not lost.isdisjoint(node.inputs):
            lost.add(node)
    outputs, seen = {t.node for t in graph.outputs}, [total]
    for node in seen:
        if node in outputs:
            return False
        seen += [user for user in graph.users[node] if user not in lost and user not in seen]
    return True


class Scheduler:
    """Builds one Schedule; `schedule()` is its only use."""

    def __init__(
        self, graph: Graph, accesses: Iterable[Access], keeps: Keeps, by_vectors: bool,
        online: Container[ReductionKind] = ONLINE,
    ) -> None:  # fmt: skip
        self.graph = graph
        self.keeps = keeps
        self.names = value_names(graph)
        self.access = {a.tensor: a for a in accesses}
        self.limits = limits(graph)
        pairs = [pair for pair in online_pairs(graph) if pair.kind in online] if keeps != "values" else []
        self.pair_of = {p.second: p for p in pairs}
        self.pair_by_first = {p.first: p for p in pairs}
        bare = not graph.scans and not graph.grouped and not graph.parts
        self.limit = common_limit(graph) if by_vectors and bare else None
        self.masked_values = masked_values(graph, self.limit) if self.limit else {}
        self.masked_made: set[Node] = set()
        self.needed = self.find_needed()
        self.level = self.find_levels()
        self.free = self.find_free()

    def arguments(self, node: Node) -> tuple[Node, ...]:
        """What a node needs: the second of an online pair needs the first and the common value."""
        if pair := self.pair_of.get(node):
            return (pair.first, pair.value)
        return node.inputs

    def find_needed(self) -> set[Node]:
        needed = {t.node for t in self.graph.outputs}
        for node in reversed(self.graph.nodes):
            if node in needed:
                needed.update(self.arguments(node))
        return needed

    def find_levels(self) -> Mapping[Node, int]:
        """The pass in which an element value can first be computed; after pass level - 1 for a row value."""
        level: dict[Node, int] = {}
        for node in self.graph.nodes:
            if node not in self.needed:
                continue
            if pair := self.pair_of.get(node):
                level[node] = level[pair.first]
            elif node.op.kind in (Kind.REDUCE, Kind.SCAN):
                level[node] = max(level[a] for a in node.inputs) + 1
            else:
                level[node] = max((level[a] for a in node.inputs), default=0)
        return level

    def extent(self, node: Node) -> Extent:
        return self.graph.extents[node]

    def find_free(self) -> set[Node]:
        """The values that can be had again in any pass without reading memory that varies by row."""
        free: set[Node] = set()
        for node in self.graph.nodes:
            if self.extent(node) is Extent.GROUP:
                continue
            if self.extent(node) is Extent.ELEMENT and self.is_read(node):
                by_row = self.access_of(node).strided or len(self.graph.shape) == 1
                if by_row:
                    continue
            elif node.op.kind is Kind.SCAN or (
                self.extent(node) is Extent.ELEMENT and not all(a in free for a in node.inputs)
            ):
                continue
            free.add(node)
        return free

    def is_read(self, node: Node) -> bool:
        """Is an element value read from memory, not computed?"""
        return node.op.kind is Kind.INPUT or whole_rows(node)

    def access_of(self, node: Node) -> Access:
        """How an operand is read, or that of which a gather reads."""
        while node not in self.graph.tensor_of:
            node = node.inputs[0]
        return self.access[self.graph.tensor_of[node].name]

    def row_statements(self, level: int) -> tuple[Statement, ...]:
        """What is one value a row at that level, with where rows lie that an index names."""
        return self.statements(
            n for n in self.graph.nodes
            if n in self.needed and self.level[n] == level and (self.extent(n) is Extent.ROW or whole_rows(n))
        )  # fmt: skip

    def statements(self, nodes: Iterable[Node]) -> tuple[Statement, ...]:
        made = (n for n in nodes if n in self.names and n.op.kind in (Kind.MAP, Kind.LEAF, Kind.GATHER))
        return tuple(
            reading(n, self.graph, self.access_of(n)) if n.op.kind is Kind.GATHER else statement(n, self.graph)
            for n in made
        )

    def load(self, node: Node, when: str = "now") -> Load:
        access = self.access_of(node)
        until = self.until(self.limits.get(node))
        return Load(access, self.names[node], when, until=until)  # type: ignore[arg-type]

    def until(self, limit: Limit | None) -> Until | None:
        return Until(limit.sign, argument(limit.bound, self.graph)) if limit else None

    def name(self, node: Node) -> str:
        """What a value is called; a group's value has one name at all of its places, and so has one that is written
        where an index says."""
        while node.op.kind in (Kind.SPREAD, Kind.SCATTER):
            node = node.inputs[-1]
        return self.names[node]

    def places(self) -> tuple[Statement, ...]:
        """Where the rows of outputs are that an index names."""
        return tuple(
            putting(t.node, self.graph, self.access[t.name]) for t in self.graph.outputs
            if t.node.op.kind is Kind.SCATTER
        )  # fmt: skip

    def row_stores(self, level: int) -> tuple[Store, ...]:
        return tuple(
            Store(self.access[t.name], self.name(t.node), fits=fits(t, self.graph))
            for t in self.graph.outputs
            if self.extent(t.node) is Extent.ROW and self.level[t.node] == level
        )

    def roots(self, number: int) -> list[Node]:
        """The values of elements and groups that a pass must have: what it reduces and what it writes."""
        reduced = [
            n.inputs[0]
            for n in (*self.graph.reductions, *self.graph.scans)
            if n in self.needed and n not in self.pair_of and self.level[n] == number + 1
        ]
        written = [t.node for t in self.graph.outputs if self.extent(t.node) in WITHIN and self.level[t.node] == number]
        parts = [n.inputs[0] for n in self.graph.parts if self.level[n] == number]
        return list(dict.fromkeys([*reduced, *parts, *written]))

    def count_passes(self) -> int:
        """None where nothing is made of a row's elements."""
        last = -1 if self.graph.gathers or self.graph.scatters else 0
        for node in self.needed:
            if node.op.kind in (Kind.REDUCE, Kind.SCAN):
                last = max(last, self.level[node] - 1)
        for tensor in self.graph.outputs:
            if self.extent(tensor.node) in (*WITHIN, Extent.PART):
                last = max(last, self.level[tensor.node])
        return last + 1

    def closure(self, roots: list[Node], have: set[Node]) -> tuple[set[Node], set[Node]]:
        """Values of elements and groups to compute for `roots`, and those taken from what earlier passes have
        computed."""
        compute: set[Node] = set()
        take: set[Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if self.extent(node) not in WITHIN or node in compute or node in take:
                continue
            if node in have and node not in self.free and self.is_kept(node):
                take.add(node)
                continue
            compute.add(node)
            stack.extend(node.inputs)
        return compute, take

    def is_kept(self, node: Node) -> bool:
        """Groups are reduced again, of what is kept: that takes a few shuffles."""
        if node.op.kind is Kind.SPREAD or self.extent(node) is Extent.GROUP:
            return False
        return self.keeps == "values" or node.op.kind is Kind.SCAN or (self.keeps == "inputs" and self.is_read(node))

    def build(self) -> Schedule:
        count = self.count_passes()
        computed: list[set[Node]] = []
        taken: list[set[Node]] = []
        have: set[Node] = set()
        for number in range(count):
            compute, take = self.closure(self.roots(number), have)
            computed.append(compute)
            taken.append(take)
            have |= compute | set(self.scanned(number))
        slots = 0
        passes = []
        if self.limit and any(node not in self.masked_values for number in range(count) for node in self.roots(number)):
            self.limit = None  # some value varies beyond it after all
        layout = SharedLayout()
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        for number in range(count):
            later = set().union(*taken[number + 1 :]) if number + 1 < count else set()
            reductions = self.reductions_of(number, slots)
            slots += sum(len(r.results) + (r.kind == "welford") for r in reductions)
            first_slot, slots = slots, slots + 2 * sum(n.op.name.startswith("largest") for n in self.scanned(number))
            # a pass takes up an element's old values before it keeps new ones, so a place may change hands within it
            layout.release(self.names[n] for n in taken[number] if n not in later)
            parts = computed[number], taken[number], later
            passes.append(self.row_pass(number, *parts, reductions, order, layout, first_slot))
        kept = {n: None for n in self.graph.nodes if any(n in t for t in taken)}
        return Schedule(
            passes=tuple(passes),
            launch_body=self.statements(n for n in self.at_any(Extent.LAUNCH)),
            row_loads=tuple(self.load(n) for n in self.at_any(Extent.ROW) if n.op.kind is Kind.INPUT),
            row_body=(*self.row_statements(0), *self.places()),
            row_stores=self.row_stores(0),
            slots=slots,
            kept_bytes=layout.peak,
            kept_names=tuple(self.names[n] for n in kept),
            keeps=self.keeps,
        )

    def scanned(self, number: int) -> list[Node]:
        """What runs along the row in a pass, for later ones."""
        return [n for n in self.graph.scans if n in self.needed and self.level[n] == number + 1]

    def masked(self, node: Node) -> Argument | None:
        """A value beyond the limit; None without one."""
        return None if self.limit is None else self.beyond(node)

    def beyond(self, node: Node) -> Argument:
        same = self.masked_values[node]  # build() has made sure that it is there
        if self.extent(same) is not Extent.ELEMENT:
            return argument(same, self.graph)
        return Value(f"{self.names[same]}_masked", same.dtype)

    def masked_body(self, roots: Iterable[Node]) -> tuple[Statement, ...]:
        """The statements, once a row, for the values of `roots` beyond the limit that no earlier pass has made."""
        if self.limit is None:
            return ()
        wanted: set[Node] = set()
        stack = list(roots)
        while stack:
            same = self.masked_values[stack.pop()]
            if self.extent(same) is Extent.ELEMENT and same not in self.masked_made:
                self.masked_made.add(same)
                wanted.add(same)
                stack.extend(same.inputs)
        return tuple(
            replace(made, name=f"{made.name}_masked", args=tuple(map(self.beyond, n.inputs)))
            for n in self.graph.nodes
            if n in wanted
            for made in [statement(n, self.graph)]
        )

    def at_any(self, extent: Extent) -> list[Node]:
        return [n for n in self.graph.nodes if n in self.needed and self.extent(n) is extent]

    def reductions_of(self, number: int, slots: int) -> tuple[Reduction, ...]:
        found: list[Reduction] = []
        for node in self.graph.reductions:
            if node not in self.needed or node in self.pair_of or self.level[node] != number + 1:
                continue
            if (pair := self.pair_by_first.get(node)) and pair.second in self.needed:
                results = (self.names[pair.first], self.names[pair.second])
                masked = self.masked(pair.value)
                found.append(Reduction(pair.kind, self.names[pair.value], results, slots, pair.guarded, masked))
                slots += 3 if pair.kind == "welford" else 2
                continue
            kind: ReductionKind = node.op.name  # type: ignore[assignment]
            value = node.inputs[0]
            masked = self.masked(value)
            found.append(
                Reduction(kind, self.name(value), (self.names[node],), slots, masked=masked, dtype=value.dtype)
            )
            slots += 1
        return tuple(found)

    def row_pass(
        self, number: int, compute: set[Node], take: set[Node], later: set[Node], reductions: tuple[Reduction, ...],
        order: Mapping[Node, int], layout: SharedLayout, slot: int,
    ) -> RowPass:  # fmt: skip
        steps, stage = self.group_steps(sorted(compute, key=order.__getitem__), number)
        nodes = sorted(compute | take, key=lambda node: (stage.get(node, 0), order[node]))
        nodes = [n for n in nodes if self.extent(n) is Extent.ELEMENT]
        loads, takes, keeps = [], [], []
        for node in nodes:
            is_input = self.is_read(node)
            size = self.access_of(node).dtype.bytes if is_input else node.dtype.bytes
            name = self.names[node]
            if node in take:
                offset = layout.offset(name)
                if is_input:
                    load = self.load(node, "kept")
                    loads.append(replace(load, offset_bytes=offset))
                else:
                    takes.append(Keep(name, node.dtype, offset))
            elif node in later:
                offset = layout.claim(name, size, is_input)
                if is_input:
                    load = self.load(node, "keep")
                    loads.append(replace(load, offset_bytes=offset))
                else:
                    keeps.append(Keep(name, node.dtype, offset))
            elif is_input:
                loads.append(self.load(node))
        scans = []
        for node in self.scanned(number):
            way, limit = SCANS[node.op.name], None
            if isinstance(way, Largest):
                limit, slot = argument(node.inputs[1], self.graph), slot + 2
            names = self.names[node.inputs[0]], self.names[node]
            places = 1 << (self.graph.cols - 1).bit_length() if isinstance(way, Sorted) else 0
            source = node.inputs[0].dtype
            scan = Scan(way, *names, node.dtype, limit, slot - 2 if limit else 0, source, places)
            layout.claim(scan.result, node.dtype.bytes, False)
            scans.append(scan)
        stores = tuple(
            Store(self.access[t.name], self.name(t.node), self.masked(t.node), fits(t, self.graph))
            for t in self.graph.outputs
            if self.extent(t.node) is Extent.ELEMENT and self.level[t.node] == number
        )
        parts = tuple(
            ColumnPart(
                n.op.name.removeprefix("part_"),  # type: ignore[arg-type]
                self.names[n.inputs[0]], self.access[t.name], n.dtype,
            )
            for t in self.graph.outputs
            for n in (t.node,)
            if n.op.kind is Kind.PART and self.level[n] == number
        )  # fmt: skip
        return RowPass(
            title=title_of(loads, keeps, reductions, stores, scans, steps, parts),
            parts=parts,
            groups=steps,
            loads=tuple(loads),
            takes=tuple(takes),
            body=self.statements(n for n in nodes if n in compute and not self.is_read(n)),
            keeps=tuple(keeps),
            reductions=reductions,
            scans=tuple(scans),
            stores=stores,
            row_body=self.row_statements(number + 1),
            row_stores=self.row_stores(number + 1),
            until=self.until(self.limit),
            masked_body=self.masked_body(self.roots(number)),
        )

    def group_steps(self, compute: list[Node], number: int) -> tuple[tuple[GroupStep, ...], dict[Node, int]]:
        """What a pass makes of groups, in steps, and behind how many of these each of its values can be had."""
        stage: dict[Node, int] = {}
        for node in compute:
            stage[node] = max((stage.get(a, 0) for a in node.inputs), default=0) + (node.op.kind is Kind.GROUP)
        steps = []
        written = [t for t in self.graph.outputs if t.node in self.graph.grouped and self.level[t.node] == number]
        for step in range(1, max(stage.values(), default=0) + 1):
            here = [n for n in compute if stage[n] == step and self.extent(n) is Extent.GROUP]
            reduced = [n for n in here if n.op.kind is Kind.GROUP]
            before = [n for n in compute if stage[n] < step and self.extent(n) is Extent.ELEMENT]
            steps.append(
                GroupStep(
                    size=reduced[0].group,
                    before=len(self.statements(before)),
                    reductions=tuple(
                        Reduction(
                            n.op.name.removeprefix("group_"),  # type: ignore[arg-type]
                            self.name(n.inputs[0]), (self.names[n],), dtype=n.dtype,
                        )
                        for n in reduced
                    ),
                    body=self.statements(here),
                    stores=tuple(Store(self.access[t.name], self.names[t.node]) for t in written if t.node in here),
                )
            )  # fmt: skip
        return tuple(steps), stage


class SharedLayout:
    """Where kept values live, in bytes per element: a freed place is given again to a value of the same size.

    Every thread touches only its own elements of these places, which is what makes reuse without a barrier right; it
    holds between computed values, which share one index, but not between them and kept vectors, whose bytes lie
    otherwise: those keep their place.
    """

    def __init__(self) -> None:
        self.places: dict[str, tuple[int, int, bool]] = {}  # name -> (offset, size, reusable)
        self.free: list[tuple[int, int]] = []
        self.peak = 0

    def claim(self, name: str, size: int, vector: bool) -> int:
        for place in self.free:
            if place[1] == size and not vector:
                self.free.remove(place)
                self.places[name] = (*place, True)
                return place[0]
        offset = self.peak
        self.peak += size
        self.places[name] = (offset, size, not vector)
        return offset

    def offset(self, name: str) -> int:
        return self.places[name][0]

    def release(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            offset, size, reusable = self.places[name]
            if reusable:
                self.free.append((offset, size))


def title_of(
    loads: Iterable[Load], keeps: Iterable[Keep], reductions: Iterable[Reduction], stores: Iterable[Store],
    scans: Iterable[Scan] = (), groups: Iterable[GroupStep] = (), column_parts: Iterable[ColumnPart] = (),
) -> str:  # fmt: skip
    """What a pass is for, in the spec's names: `read x, bias; keep h; total = sum(h)`."""
    parts = []
    if read := [load.value for load in loads if load.when not in ("kept", "prefetched", "held")]:
        parts.append("read " + ", ".join(read))
    if prefetched := [load.value for load in loads if load.when == "prefetched"]:
        parts.append("take " + ", ".join(prefetched))
    if keep := [*(k.value for k in keeps), *(load.value for load in loads if load.when == "keep")]:
        parts.append("keep " + ", ".join(keep))
    steps = tuple(groups)
    for r in (r for step in steps for r in step.reductions):
        parts.append(f"{r.results[0]} = {r.kind}({r.value}) of each {steps[0].size}")
    for r in reductions:
        if r.kind == "softmax":
            parts.append(f"{r.results[0]} = max({r.value}) and {r.results[1]} = sum(exp({r.value} - {r.results[0]}))")
        elif r.kind == "welford":
            parts.append(f"{r.results[0]} = sum({r.value}) and {r.results[1]} = sum(({r.value} - mean)^2)")
        else:
            parts.append(f"{r.results[0]} = {r.kind}({r.value})")
    parts += [f"{scan.result} = {scan.way.name}({scan.value})" for scan in scans]
    parts += [f"{part.access.name} = {part.kind}({part.value}) over rows" for part in column_parts]
    if write := [s.access.name for s in (*stores, *(s for step in steps for s in step.stores))]:
        parts.append("write " + ", ".join(write))
    return "; ".join(parts)


def schedule(
    graph: Graph, accesses: Iterable[Access], keeps: Keeps, by_vectors: bool,
    online: Container[ReductionKind] = ONLINE,
) -> Schedule:  # fmt: skip
    """The passes of `graph`, and what is kept between them.

    `by_vectors`: a thread knows the columns of its vectors, and passes over those that lie beyond a mask's limit.
    `online`: the kinds of pairs that a pass merges, unless it takes up values.
    """
    return Scheduler(graph, accesses, keeps, by_vectors, online).build()
