"""The cheapest program of a chain: which values go to memory between kernels, found by search over its graph.

A state of the search is the set of values that are written to memory. It decides the kernels: each value of it, and
each output, is made by one, from the nearest values in memory; those that read the same and don't wait for each other
share one where that is cheaper. What a state costs is the sum of its kernels by the cost model, each with its launch. A
kernel that no rule can plan counts as what it can't undercut, its bytes and its products, and the search goes on by
cutting inside of it: so states come in the order of what they can't undercut, and the search ends where none that is
left can undercut the cheapest.

The search is exact until it has looked at ENOUGH_STATES states, which graphs of a dozen operators do not take; from
there on the cheapest that was found stands. Some program is found first, by what needs the fewest more cuts: its time
then limits all others. Where none was found, it goes on to MOST_STATES. Views go to memory only
where no program is found without, by a second search.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fusegen.errors import NoPlan
from fusegen.language.graph import Graph, Kind, Node, plain
from fusegen.language.one_kernel import of_ends, of_gathers, of_orders, of_scatters
from fusegen.language.sharing import share_common
from fusegen.language.types import DType
from fusegen.planner import candidates as plans_of
from fusegen.planner.attention.parts import AttentionPlan
from fusegen.planner.model import Plan
from fusegen.planner.products.factors import no_unit, without_unit
from fusegen.planner.products.wgmma import WgmmaPlan
from fusegen.planner.programs import (
    FEW_STATES,
    LONG_STATES,
    WORTH_DEEPENING,
    WORTH_UNPACKING,
    cutting,
    fills_part,
    is_wasteful,
    worth_cutting,
)
from fusegen.planner.programs.column_parts import Parted, parted
from fusegen.planner.programs.deep_products import deep_products
from fusegen.planner.programs.dependent import dependent
from fusegen.planner.programs.factors_apart import with_plan
from fusegen.planner.programs.grouping import groups_of_products
from fusegen.planner.programs.heads_as_rows import heads_as_rows
from fusegen.planner.programs.joining import joined, weighed_us
from fusegen.planner.programs.kept import Outcome, remembered
from fusegen.planner.programs.key_parts import keys_parted
from fusegen.planner.programs.lowering import step_for
from fusegen.planner.programs.model import Cut, ProgramPlan, Stored, first_reason, least_us, one_after_another
from fusegen.planner.programs.parts import again, interleaved, layout_of, parts_of, within
from fusegen.planner.programs.product_parts import grouped
from fusegen.planner.programs.rounded_factors import rounded_factors
from fusegen.planner.programs.scans_over_rows import over_rows
from fusegen.planner.programs.steps import Lowered, NotOneStep, step_of, whole
from fusegen.targets.base import Target

MOST_STATES = 2000
ENOUGH_STATES = 150  # where there is a program: of a decoder layer, 100 more undercut it by 0.1 us of 170, and took 7 s
PATIENT_STATES = 170  # without a program, which a decoder layer has by then: the least left to cut goes first then
EASY = (Kind.INPUT, Kind.LEAF, Kind.MAP, Kind.VIEW)  # of which a kernel holds any number
MOST_TRIED = 120  # states beside one that was found, where the search was not exact
MOST_TOLD = 20  # of the cuts looked at, in a plan
UNTOLD_FACTOR = 1.02  # programs whose times are no further apart are alike: estimates are off by 5 % in the mean
STUCK_US = 5.0  # of a kernel that must still be cut, beside its bytes: another launch

Made = tuple[Node, str, DType]
State = frozenset[Node]


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one kernel would make of what; without `plans` no rule can, for `reason`, before `cut` is in memory.

    Parts of one result that lie along different rows take a kernel each, and reductions over rows may take two: then
    there are several plans, and perhaps tensors `between` them. `undivided`: the one in whose place parts of K are.
    """

    makes: tuple[Made, ...]
    time_us: float  # where there is no plan, what it can't undercut
    plans: tuple[tuple[Lowered, Plan], ...] = ()
    reason: str = ""
    cut: Node | None = None
    between: tuple[Stored, ...] = ()
    undivided: Kernel | None = None

    @property
    def deals(self) -> bool:
        """Is it attention whose keys are dealt to parts?"""
        return any(step.graph.deals for step, _ in self.plans)


@dataclass(frozen=True, slots=True)
class Found:
    """A state, worked out."""

    state: State
    kernels: tuple[Kernel, ...]
    early_us: float  # that each but the first has behind it when the one before ends

    @property
    def time_us(self) -> float:
        return one_after_another([kernel.time_us for kernel in self.kernels], self.early_us)

    @property
    def whole(self) -> bool:
        return all(kernel.plans for kernel in self.kernels)


def cheapest(
    graph: Graph, target: Target, below_us: float = math.inf, most_states: int = MOST_STATES,
    dealt: tuple[int, int] | None = None,
) -> ProgramPlan:  # fmt: skip
    """The cheapest program for `graph`. Raises NoPlan where no cut helps, or where none takes less than `below_us`.
    `dealt`: attention deals so many keys at a time to so many parts, whatever that costs."""
    if (rows := heads_as_rows(graph)) is not graph:
        with suppress(NoPlan):
            return replace(cheapest(rows, target, below_us, most_states, dealt), graph=graph)
    search = Search(share_common(rounded_factors(graph)), target, dealt)
    limits = (below_us, most_states, dealt, MOST_STATES, ENOUGH_STATES, PATIENT_STATES, MOST_TRIED, UNTOLD_FACTOR)
    outcome = remembered(search.graph, target, limits, lambda: search.outcome(below_us, most_states))
    if outcome.refusal:
        raise NoPlan(outcome.refusal)
    found = search.look(frozenset(search.graph.nodes[number] for number in outcome.stored))
    assert found.whole, "a state that was kept is one whose kernels can all be planned"
    return search.program(found, dict(zip(outcome.stored, outcome.whys, strict=True)), outcome.cuts)


def in_two(graph: Graph, target: Target, below_us: float) -> ProgramPlan | None:
    """A chain that one kernel of columns holds as two kernels; None where they take no less than `below_us`."""
    search = Search(share_common(graph), target)
    both = search.by_parts(whole(search.graph), search.outputs)
    return None if both is None or both.time_us >= below_us else search.alone(both)


def deepened(graph: Graph, target: Target, one: Plan) -> ProgramPlan | None:
    """A product's K in parts, as two kernels; None where the kernel `one` is right."""
    search = Search(share_common(graph), target)
    both = search.deeper(whole(search.graph), search.outputs, one)
    return None if both is None else search.alone(both)


class Search:
    """One search under way; what is planned for one state is remembered for all others."""

    def __init__(self, graph: Graph, target: Target, dealt: tuple[int, int] | None = None) -> None:
        self.graph = graph
        self.target = target
        self.dealt = dealt
        self.early_us = target.early_us
        self.stored = cutting.stored_values(graph)
        self.cones = cutting.Cones(graph)
        self.outputs: tuple[Made, ...] = tuple((t.node, t.name, t.dtype) for t in graph.outputs)
        self.usual = frozenset(cutting.candidates(graph))
        self.rearranged = frozenset(cutting.rearranged(graph))
        self.planned: dict[tuple[frozenset[Made], State], Kernel] = {}
        self.looked_at: list[Found] = []
        self.order = {node: place for place, node in enumerate(graph.nodes)}

    def alone(self, kernel: Kernel) -> ProgramPlan:
        """The program of what makes all outputs, with nothing else in memory."""
        found = Found(frozenset(), (kernel,), self.early_us)
        self.looked_at.append(found)
        return self.program(found, {}, self.considered())

    def outcome(self, below_us: float, most_states: int) -> Outcome:
        """What `run` finds, and what there is to say of it. No cut gives a target instructions that it lacks."""
        if (kinds := without_unit(self.graph, self.target)) is not None:
            said = no_unit(self.target, "matrix instruction", *kinds)
            return Outcome(refusal=f"{self.refusal()}\n  products: {said}")
        found = self.run(below_us, most_states) or self.run(below_us, most_states, views=True) or self.spare(below_us)
        if found is None:
            return Outcome(refusal=self.refusal(), states=len(self.looked_at))
        found = self.in_fewer(found, below_us)
        nodes = sorted(found.state, key=self.order.__getitem__)
        whys = tuple(self.why(node, found) for node in nodes)
        cuts = self.considered()
        return Outcome(tuple(self.order[node] for node in nodes), whys, cuts, states=len(self.looked_at))

    def in_fewer(self, best: Found, below_us: float) -> Found:
        """The state, or one that was looked at of fewer kernels, of which the estimate can't tell that it is slower."""
        most = min(below_us, UNTOLD_FACTOR * best.time_us)
        near = (other for other in self.looked_at if other.whole and other.time_us < most)
        fit = (other for other in near if not self.idle(other) and not self.unread(other))
        return min((best, *fit), key=lambda found: (sum(len(kernel.plans) for kernel in found.kernels), found.time_us))

    def spare(self, below_us: float) -> Found | None:
        """The cheapest of those that write what no kernel reads: better than none."""
        whole = (found for found in self.looked_at if found.whole and found.time_us < below_us)
        return min(whole, key=lambda found: found.time_us, default=None)

    def may_undercut(self, one: Found) -> bool:
        """Several kernels instead of one: where a factor is computed, where tiles have to hold whole groups, where rows
        have channels, and are as long as they make them, or where joins are repeated. Not of a softmax between
        products, whose scores no cut leaves out of memory."""
        plans = [plan for kernel in one.kernels for _, plan in kernel.plans]
        if any(isinstance(plan, AttentionPlan) and plan.softmaxed for plan in plans):
            return False
        computed = any(not plain(factor) for product in self.graph.products for factor in product.inputs)
        channels = any(own.graph.repeated for kernel in one.kernels for own, _ in kernel.plans)
        return computed or channels or groups_of_products(self.graph) or any(n.op.kind is Kind.JOIN for n in self.usual)

    def run(self, below_us: float = math.inf, most_states: int = MOST_STATES, views: bool = False) -> Found | None:
        """The cheapest state whose kernels can all be planned; None where there is none below that time.

        Until one is found, states that need the fewest more cuts come first, and after PATIENT_STATES those that leave
        the least to cut; then those that can undercut it by the most. States that write what no kernel reads come
        last."""
        first = self.look(frozenset())
        if first.whole and first.time_us < below_us:
            long = any(is_wasteful(plan) for kernel in first.kernels for _, plan in kernel.plans)
            if self.dealt or not (long or self.may_undercut(first)):
                return first  # one kernel, as of a chain without views (`program_instead`)
            few = LONG_STATES if long else FEW_STATES
            return self.run_on(first, self.worth(first) * first.time_us, few, views) or first
        return self.run_on(first, below_us, most_states, views)

    def worth(self, one: Found) -> float:
        """Several kernels are taken below this share of what the one kernel takes."""
        if self.graph.gathers and self.graph.products:
            return 1.0
        plans = [plan for kernel in one.kernels for _, plan in kernel.plans]
        widened = any(isinstance(plan, WgmmaPlan) and plan.coding for plan in plans)
        return WORTH_UNPACKING if widened else max(map(worth_cutting, plans))

    def run_on(self, first: Found, below_us: float, most_states: int, views: bool) -> Found | None:
        """The same of the states behind the first."""
        best: Found | None = None
        queue: list[tuple[float, float, int, Found]] = [(0, first.time_us, 0, first)]
        seen = {first.state}
        impatient = False
        for seed in self.seeds():
            if seed in seen or not (other := self.look(seed)).whole:  # it is one of many on the way, if cuts lead to it
                continue
            seen.add(seed)
            if other.time_us < (below_us if best is None else best.time_us) and not self.unread(other):
                best = other
                queue.append((other.time_us, 0, len(seen), other))
        while queue and len(seen) < most_states:
            if best is None and not impatient and len(seen) > PATIENT_STATES:
                impatient = True
                queue = [(self.left_over(found), bound, number, found) for _, bound, number, found in queue]
                heapq.heapify(queue)
            if best is not None and len(seen) >= min(most_states, ENOUGH_STATES):
                break
            *_, found = heapq.heappop(queue)
            limit = below_us if best is None else best.time_us
            if best is not None and (found.time_us >= limit or self.idle(found)):
                break
            for nodes in self.cuts(found, views):
                state = found.state | nodes
                if state in seen:
                    continue
                seen.add(state)
                other = self.look(state)
                if other.whole and (unread := self.unread(other)):  # what was cut further on needs none of these
                    if state - unread in seen:
                        continue
                    seen.add(state - unread)
                    other = self.look(state - unread)
                if other.time_us >= limit:
                    continue
                idle = self.idle(other)
                if other.whole and not idle:
                    diving, best, limit = best is None, other, other.time_us
                    if diving:
                        queue = [(bound, stuck, number, found) for stuck, bound, number, found in queue]
                        heapq.heapify(queue)
                stuck = self.left_over(other) if impatient else sum(not kernel.plans for kernel in other.kernels)
                bound = math.inf if idle else other.time_us  # without what is not read it is the same for less
                rank = (stuck, bound) if best is None else (bound, stuck)
                heapq.heappush(queue, (*rank, len(seen), other))
        return best if best is None or len(seen) < ENOUGH_STATES else self.improved(best)

    def improved(self, best: Found) -> Found:
        """The best of the states that lead on from one that was found: with a value left out, or another one that is
        made of it, element by element, in its place. What was cut first was what stood in a kernel's way, as a
        product; it may be less to store what comes of it, with its residual and as the chain casts it."""
        tried = 0
        while tried < MOST_TRIED:
            for state in self.beside(best.state):
                tried += 1
                other = self.look(state)
                if unread := self.unread(other):
                    other = self.look(state - unread)
                if other.whole and not self.idle(other) and other.time_us < best.time_us:
                    best = other
                    break
            else:
                break
        return best

    def left_over(self, found: Found) -> int:
        """How many reductions, scans, products and the like the kernels hold that can't be planned."""
        stuck = [kernel for kernel in found.kernels if not kernel.plans]
        inside = (self.cone(kernel.makes, found.state)[0] for kernel in stuck)
        return sum(node.op.kind not in EASY for nodes in inside for node in nodes)

    def seeds(self) -> Iterator[State]:
        """States to look at before any cut is found: none where not all of one can be in memory."""
        yield from filter(self.stored.keys().__ge__, cutting.to_begin_with(self.graph))
        yield cutting.widened_factors(self.graph).intersection(self.stored)

    def beside(self, state: State) -> Iterator[State]:
        """The state with a value replaced, and with one left out: the largest first."""
        stored = [node for node in state if self.stored[node].home == "workspace"]
        for node in sorted(stored, key=lambda n: (-self.stored[n].bytes(self.graph.sizes), self.order[n])):
            for other in self.made_of(node):
                if other in self.usual and other not in state:
                    yield state - {node} | {other}
            yield state - {node}

    def made_of(self, node: Node) -> list[Node]:
        """What comes of a value element by element, in the graph's order."""
        found: set[Node] = set()
        for user in self.graph.nodes:
            arguments = [a for a in user.inputs if a is node or a in found]
            if arguments and user.op.kind in (Kind.MAP, Kind.VIEW):
                found.add(user)
        return [n for n in self.graph.nodes if n in found and n.op.kind is Kind.MAP]

    def idle(self, found: Found) -> bool:
        return bool(self.unread(found))

    def unread(self, found: Found) -> State:
        """The values written that no kernel reads: what was to lie between two kernels that are one now."""
        read = {node for kernel in found.kernels for node in self.reads(kernel.makes, found.state)}
        return frozenset(n for n in found.state if self.stored[n].home == "workspace" and n not in read)

    def cuts(self, found: Found, views: bool) -> list[State]:
        """The values that may be written to memory beside those of a state: of kernels that can't be planned where
        there are any, since nothing else helps. Those that such kernels name go together, as each of them has to.
        `views`: these too, where a kernel can't be planned."""
        stuck = [kernel for kernel in found.kernels if not kernel.plans]
        if shared := self.chosen_twice(found):
            return [frozenset({shared})]
        named = {k.cut for k in stuck if k.cut is not None and k.cut in self.stored and k.cut not in found.state}
        if named:
            return [frozenset(named)]
        worth = self.usual | self.rearranged if stuck and views else self.usual
        inside: dict[Node, None] = {}
        for kernel in stuck[:1] or found.kernels:
            computed, _ = self.cone(kernel.makes, found.state)
            made = {n for n, _, _ in kernel.makes}
            alone = len(made) == 1
            inside.update(
                (n, None) for n in computed
                if n in worth and n not in found.state and not (alone and n in made)
            )  # fmt: skip
        return [frozenset({node}) for node in inside]

    def chosen_twice(self, found: Found) -> Node | None:
        """A key that one kernel chooses columns by and another one computes once more: rounded otherwise, it would no
        longer agree with the choice. It has to be in memory."""
        for key in (selection.inputs[0] for selection in self.graph.selections):
            if key in found.state or key not in self.stored:
                continue
            makers = [kernel for kernel in found.kernels if key in self.cone(kernel.makes, found.state)[0]]
            if len(makers) > 1:
                return key
        return None

    # ---------------------------------------------------------------- one state

    def look(self, state: State) -> Found:
        kernels: list[Kernel] = []
        for makes in self.targets(state):
            self.place(kernels, makes, state)
        found = Found(state, tuple(kernels), self.early_us)
        if self.chosen_twice(found):  # not to be taken as it is
            stuck = replace(kernels[-1], plans=(), reason="it computes once more what another kernel chose by")
            found = Found(state, (*kernels[:-1], stuck), self.early_us)
        self.looked_at.append(found)
        return found

    def targets(self, state: State) -> list[tuple[Made, ...]]:
        """What has to be made, in order: each value in memory and each output, those of one value together."""
        by_node: dict[Node, dict[str, Made]] = {}
        for node in state:
            stored = self.stored[node]
            by_node.setdefault(node, {})[stored.name] = (node, stored.name, stored.type.dtype)
        for tensor in self.graph.outputs:
            by_node.setdefault(tensor.node, {})[tensor.name] = (tensor.node, tensor.name, tensor.dtype)
        return [tuple(by_node[node].values()) for node in sorted(by_node, key=self.order.__getitem__)]

    def place(self, kernels: list[Kernel], makes: tuple[Made, ...], state: State) -> None:
        """Add what makes `makes`: to a kernel that is there, where that is cheaper, or as one of its own. Kernels stay
        in an order in which they can run: one takes over no work that waits for a later one. Of what can't be planned
        alone, more to make is tried only where that may be what it wants."""
        alone = self.kernel(makes, state)
        read = set(self.reads(makes, state))
        after = max((i for i, kernel in enumerate(kernels) if read & {n for n, _, _ in kernel.makes}), default=-1)
        best: tuple[float, int, Kernel] | None = None
        for place, kernel in enumerate(kernels):
            if place < after or not self.share(kernel, makes, state):
                continue
            if not (kernel.plans and alone.plans) and not self.may_help(kernel, makes, state):
                continue
            both = self.kernel((*kernel.makes, *makes), state)
            gain = one_after_another((kernel.time_us, alone.time_us), self.early_us) - both.time_us
            if not both.plans:
                continue
            if not alone.plans:  # what one sort gives has no kernel of its own beside that
                gain += math.inf if makes[0][0].op.kind is Kind.ORDER else STUCK_US
            if gain > 0 and (best is None or gain > best[0]):
                best = gain, place, both
        if best is None:
            kernels.append(alone)
        else:
            kernels[best[1]] = best[2]

    def share(self, kernel: Kernel, makes: tuple[Made, ...], state: State) -> bool:
        """Have they something in common: a value that both compute or read?"""
        one, two = ({n for part in self.cone(m, state) for n in part if n.shape} for m in (kernel.makes, makes))
        return bool(one & two) or bool({n for n, _, _ in kernel.makes} & two)

    def may_help(self, kernel: Kernel, makes: tuple[Made, ...], state: State) -> bool:
        """May one kernel make what two can't: where both compute the same reduction, product or the like, or where it
        is what the other one makes that can't be read so?"""
        one, _ = self.cone(kernel.makes, state)
        two, also = self.cone(makes, state)
        if kernel.plans and not {n for n, _, _ in kernel.makes}.isdisjoint(also):
            return True
        return any(node.op.kind not in EASY for node in set(one).intersection(two))

    def cone(self, makes: tuple[Made, ...], state: State) -> tuple[list[Node], list[Node]]:
        """What has to be computed for `makes`, and what of the values in memory is read for it."""
        return self.cones.of([n for n, _, _ in makes], state)

    def reads(self, makes: tuple[Made, ...], state: State) -> list[Node]:
        return self.cone(makes, state)[1]

    def kernel(self, makes: tuple[Made, ...], state: State) -> Kernel:
        """One kernel, planned the first time it is asked for; what it makes comes in the graph's order, so that it is
        the same whoever asked first."""
        makes = tuple(sorted(makes, key=lambda made: self.order[made[0]]))
        key = frozenset(makes), frozenset(self.reads(makes, state))
        if key not in self.planned:
            self.planned[key] = self.plan_one(makes, state)
        return self.planned[key]

    def plan_one(self, makes: tuple[Made, ...], state: State) -> Kernel:
        part = cutting.piece(self.graph, makes, {node: self.stored[node] for node in state})
        least = least_us(part.graph, self.graph, self.target) + STUCK_US
        columns = self.by_columns(part.graph, makes)
        try:
            step = step_for(part.graph)
        except NotOneStep as error:
            return columns or Kernel(makes, least, reason=str(error), cut=part.origins.get(error.node))
        two = min(filter(None, (self.by_parts(step, makes), columns)), key=lambda way: way.time_us, default=None)
        try:
            plans = (with_plan(step, self.target, self.plan_of),)
            if two is not None and (two.time_us < plans[0][1].cost.time_us or (self.dealt and two.deals)):
                return two
            if (deep := self.deeper(step, makes, plans[0][1])) is not None:
                return replace(deep, undivided=Kernel(makes, self.taking(plans), plans))
        except NoPlan as error:
            if two is not None:
                return two
            if (several := self.apart(step, makes, state)) is not None:
                return several
            found = (of(part.graph) for of in (of_ends, of_orders, of_gathers, of_scatters))
            named = next(filter(None, found), None)
            cut = part.origins.get(named.cut) if named and named.cut else None
            return Kernel(makes, least, reason=str(error), cut=cut)
        return Kernel(makes, self.taking(plans), plans)

    def apart(self, step: Lowered, makes: tuple[Made, ...], state: State) -> Kernel | None:
        """What no one kernel makes by several, each of which computes all that it needs; None where that is no way.
        Values none of which is made of another have kernels of their own anyhow, which take no longer."""
        nodes = {node for node, _, _ in makes}
        if len(nodes) > 1 and all(nodes.isdisjoint(self.reads((made,), state)) for made in makes):
            return None
        parts = tuple(parts_of(step))
        written = ({bound.base for bound in part.bounds} for part in parts)
        shares = [tuple(made for made in makes if made[1] in names) for names in written]
        own = all(shares) and sum(map(len, shares)) == len(makes)  # is no value one part's and another one's as well?
        if own and len(shares) > 1:
            kernels = [self.kernel(share, state - nodes) for share in shares]
        else:
            try:
                kernels = [Kernel(makes, 0.0, ((part, self.plan_of(part)),)) for part in parts]
            except NoPlan:
                return None
        if not kernels or not all(kernel.plans for kernel in kernels):
            return None
        plans = tuple(itertools.chain.from_iterable(kernel.plans for kernel in kernels))
        between = tuple(itertools.chain.from_iterable(kernel.between for kernel in kernels))
        return Kernel(makes, self.taking(plans), plans, between=between)

    def by_columns(self, graph: Graph, makes: tuple[Made, ...]) -> Kernel | None:
        """Running sums along an axis that is not the last one by columns."""
        with suppress(NoPlan):
            plans = tuple((step, self.plan_of(step)) for step in over_rows(graph))
            return Kernel(makes, self.taking(plans), plans) if plans else None
        return None

    def by_parts(self, step: Lowered, makes: tuple[Made, ...]) -> Kernel | None:
        """Reductions over rows, or of a product's rows, or attention to many keys, by two kernels, with the number of
        parts that costs least."""
        halves = [parted(step, self.target), grouped(step, self.target)]
        if self.graph.rounding != "eager":  # whose rounded exponentials of parts have no bound where scores overflow
            halves.append(keys_parted(step, self.target, self.dealt))
        return self.best_of(itertools.chain(*halves), makes)

    def deeper(self, step: Lowered, makes: tuple[Made, ...], one: Plan) -> Kernel | None:
        """A product's K in parts, where one kernel leaves some of a GPU idle and two take much less."""
        if self.graph.batch_invariant or not fills_part(one):  # parts are as many as rows leave room for
            return None
        found = self.best_of(deep_products(step, self.target), makes)
        return found if found is not None and found.time_us < WORTH_DEEPENING * one.cost.time_us else None

    def best_of(self, halves: Iterable[Parted], makes: tuple[Made, ...]) -> Kernel | None:
        """Two kernels that make `makes`: of all ways those that take least."""
        best: Kernel | None = None
        for both in halves:
            try:
                seconds = tuple(parts_of(both.second)) or (both.second,)
                plans = tuple((own, self.plan_of(own)) for own in (both.first, *seconds))
            except NoPlan:
                continue
            found = Kernel(makes, self.taking(plans), plans, between=both.between)
            if best is None or found.time_us < best.time_us:
                best = found
        return best

    def taking(self, plans: Sequence[tuple[Lowered, Plan]]) -> float:
        return one_after_another([plan.cost.time_us for _, plan in plans], self.early_us)

    def plan_of(self, step: Lowered) -> Plan:
        layout = again(step, within(step, layout_of(step, self.graph.sizes), self.graph.sizes), self.graph.sizes)
        together = interleaved(step, layout, self.graph.sizes)
        if together != layout and (found := plans_of(step.graph, self.target, together).plans):
            return found[0]
        return plans_of(step.graph, self.target, layout).need()[0]

    def refusal(self) -> str:
        """Why there is no program: of the state that came nearest, the first kernel that can't be planned."""
        stuck = [(sum(not k.plans for k in f.kernels), f) for f in self.looked_at if not f.whole]
        lines = [f"no program can be planned for {self.graph.name} on {self.target}"]
        if stuck:
            nearest = min(stuck, key=lambda pair: pair[0])[1]
            kernel = next(k for k in nearest.kernels if not k.plans)
            lines += [line if line.startswith("  ") else f"  {line}" for line in kernel.reason.splitlines()]
        return "\n".join(lines)

    # ---------------------------------------------------------------- the program

    def program(self, found: Found, whys: Mapping[int, str], cuts: tuple[Cut, ...]) -> ProgramPlan:
        """`whys`: of the values in memory, by their numbers among the graph's nodes. A product whose K is in parts is
        one kernel again where that is worth more, as those behind it share its launch."""
        made = joined(self.one_by_one(found, whys, cuts))
        kernels = tuple(kernel.undivided or kernel for kernel in found.kernels)
        if len(kernels) > 1 and any(kernel.undivided for kernel in found.kernels):
            made = min(made, joined(self.one_by_one(replace(found, kernels=kernels), whys, cuts)), key=weighed_us)
        return dependent(made)

    def one_by_one(self, found: Found, whys: Mapping[int, str], cuts: tuple[Cut, ...]) -> ProgramPlan:
        steps = tuple(step_of(own, plan) for kernel in found.kernels for own, plan in kernel.plans)
        made = {binding.base for step in steps for binding in step.writes}
        read = {binding.base for step in steps for binding in step.reads}
        nodes = [n for n in sorted(found.state, key=self.order.__getitem__) if self.stored[n].name in made]
        kept = [replace(self.stored[n], why=whys[self.order[n]]) for n in nodes if self.stored[n].name in read]
        between = tuple(stored for stored in kept if stored.home == "workspace")
        between += tuple(stored for kernel in found.kernels for stored in kernel.between)
        shared = tuple(stored for stored in kept if stored.home == "output")
        return ProgramPlan(self.graph, self.target, steps, between, shared, cuts)

    def considered(self) -> tuple[Cut, ...]:
        """The cuts that were looked at, those that can be taken first, by their times; one kernel is always among
        them."""
        looked_at = {found.state: found for found in self.looked_at}
        one_kernel = looked_at.pop(frozenset())
        others = (found for found in looked_at.values() if not (found.whole and self.idle(found)))
        ranked = sorted(others, key=lambda found: (not found.whole, found.time_us))[: MOST_TOLD - 1]
        return tuple(map(self.told, sorted((*ranked, one_kernel), key=lambda found: (not found.whole, found.time_us))))

    def told(self, found: Found) -> Cut:
        names = tuple(self.stored[n].name for n in sorted(found.state, key=self.order.__getitem__))
        count = sum(max(1, len(kernel.plans)) for kernel in found.kernels)
        stuck = next((kernel for kernel in found.kernels if not kernel.plans), None)
        if stuck is None:
            return Cut(names, count, found.time_us)
        return Cut(names, count, None, first_reason(stuck.reason, self.graph))

    def why(self, node: Node, found: Found) -> str:
        """Why a value is in memory: what the kernels on both sides of it would be as one."""
        without = self.look(found.state - {node})
        stuck = [kernel for kernel in without.kernels if not kernel.plans]
        if stuck:
            return first_reason(stuck[0].reason, self.graph)
        return f"without it the kernels would take {without.time_us:.1f} us, and take {found.time_us:.1f} us"
