"""Why a plan is what it is, in the words of the spec: what was fused, what is kept where, which regime and why.

`explanation(found)` reads what the planner wrote down (decisions, passes, candidates, refusals) and puts it into
sentences. It decides nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusegen.database import Choice
from fusegen.language.graph import Graph
from fusegen.language.naming import value_names
from fusegen.language.operators import operators
from fusegen.language.products import Factor, split
from fusegen.language.types import shape_text, size_of
from fusegen.planner.attention.parts import AttentionPlan, ScoresPlan
from fusegen.planner.attention.recognition import Scored, recognized
from fusegen.planner.attention.weights import WeightsPlan
from fusegen.planner.attention.wide import WideAttentionPlan
from fusegen.planner.attention.wide_wgmma import WideWgmmaAttentionPlan
from fusegen.planner.attention.written import written_weights
from fusegen.planner.columns.plan import ColumnsPlan
from fusegen.planner.model import Access, Candidates, Plan, RowPlan, Value
from fusegen.planner.products.gemm import GemmPlan
from fusegen.planner.products.product_cost import scale_texts, text_of, wave_text
from fusegen.planner.products.wgmma import WgmmaPlan
from fusegen.planner.rows.schedule import schedule

FEW = 3  # alternatives worth naming


@dataclass(frozen=True, slots=True)
class Point:
    """One sentence; `bytes_saved` where the decision saves some."""

    text: str
    bytes_saved: int = 0


@dataclass(frozen=True, slots=True)
class Section:
    """Sentences under one heading."""

    title: str
    points: tuple[Point, ...]


def explanation(found: Candidates, choice: Choice | None = None) -> tuple[Section, ...]:
    """Every section that has something to say about the plan chosen of `found`, its cheapest without a `choice`.

    Raises NoPlan.
    """
    plan = choice.plan if choice else found.need()[0]
    sections = (
        Section("operators, as written", tuple(map(Point, written(plan.graph)))),
        Section("fused", tuple(fused(plan))),
        Section("selection", tuple(map(Point, selection(plan.graph)))),
        *(row_sections(plan) if isinstance(plan, RowPlan) else product_sections(plan)),
        *(column_sections(plan) if isinstance(plan, ColumnsPlan) else ()),
        Section("reads and writes", tuple(map(Point, accesses(plan)))),
        Section("in place", tuple(map(Point, in_place(plan)))),
        Section("rounding", tuple(map(Point, rounding(plan)))),
        Section("why this regime", tuple(map(Point, regime(found, plan)))),
        Section("looked up in what was measured", tuple(map(Point, choice.steps)) if choice else ()),
        Section("rules that refused", tuple(Point(f"{r.rule}: {r.reason}") for r in found.refusals)),
    )
    return tuple(section for section in sections if section.points)


def row_sections(plan: RowPlan) -> tuple[Section, ...]:
    """What a pass over rows does, and what it keeps."""
    return (
        Section("passes over the row" if not plan.flat else "the pass", tuple(map(Point, passes(plan)))),
        Section("kept between passes", tuple(map(Point, kept(plan)))),
    )


def column_sections(plan: ColumnsPlan) -> tuple[Section, ...]:
    """What passes over the rows of a column do, and in which order its values are summed."""
    count, tile = len(plan.passes), plan.tile
    lines = [f"{number} of {count}: {one.title}" for number, one in enumerate(plan.passes, 1)]
    if count > 1:
        lines.append(f"{count} passes, because a column must be reduced before its rows can use the result")
    turn = f"{tile.turn} rows at a time, " if tile.turn > 1 else ""
    blocks = f", then over the cluster's {tile.cluster} blocks" if tile.cluster > 1 else ""
    lines.append(
        f"a column's values are summed in a thread, {turn}then over the {tile.rows} threads of a block that "
        f"have rows of it{blocks}: always in this order, and a sum of no rows is 0"
    )
    return (Section("passes over the rows", tuple(map(Point, lines))),)


def product_sections(plan: Plan) -> tuple[Section, ...]:
    """What is multiplied, and what comes before and behind the products in the same kernel."""
    if not plan.graph.products:
        return ()
    if isinstance(plan, AttentionPlan):
        return (Section("attention", tuple(map(Point, attention(plan)))),)
    if isinstance(plan, WeightsPlan):
        return (Section("weights", tuple(map(Point, written_out(plan)))),)
    return (Section("products", tuple(map(Point, products(plan)))),)


def products(plan: Plan) -> list[str]:
    graph = plan.lowered
    names, parts = value_names(graph), split(graph)
    lines = []
    for product in parts.products:
        sides = [side_text(factor, graph) for factor in (product.left, product.right)]
        lines.append(
            f"{names[product.node]} = {' @ '.join(sides)}: {shape_text(product.node.shape)} over {product.contracted}, "
            f"factors of {product.left.dtype}, summed in f32"
        )
    if (ends := parts.products[0].node.ends) is not None:
        lines.append(
            f"rows are multiplied with the matrix of their group, which {names[ends]} tells: each group begins a tile, "
            "so that no tile has rows of two"
        )
    for left in parts.lefts:
        if left.index is not None and left.operand is not None:
            said = f"rows of {left.operand.name} are those that {names.get(left.index, 'an index')} names"
            lines.append(f"{said}, found on their way in: no copy of them is made")
    if len(parts.products) > len(parts.lefts):
        lines.append(f"{len(parts.products)} products share a left factor, which is read once for all of them")
    for factor in {f.node: f for p in parts.products for f in (p.left, p.right) if f.operand is None}.values():
        made = text_of(factor, graph)
        lines.append(f"before them: {made}, element by element on the way to the tensor cores, never written")
    if scales := ", ".join(scale_texts(graph)):
        lines.append(
            f"{scales}: the same all along {parts.products[0].contracted}, and surely finite, so applied behind the "
            "products and not to their factors: (s A) @ B = s (A @ B)"
        )
    for statistic in parts.statistics:
        of = ", ".join([*(t.name for t in statistic.inputs), *(names[n] for n in statistic.rows)])
        lines.append(f"{names[statistic.node]}: a row's {statistic.node.op.name} over {of}, in the same kernel")
    if parts.epilogue:
        steps = ", ".join(dict.fromkeys(names[n] for n in parts.epilogue))
        lines.append(f"behind them, on sums that are still in registers: {steps}")
    return lines + waves(plan)


def attention(plan: AttentionPlan) -> list[str]:
    """What is found of the softmax, of its mask, and of what is carried from tile to tile."""
    found, names = recognized(plan.graph), value_names(plan.lowered)
    where = "from the registers of the scores"
    if isinstance(plan, WideAttentionPlan):
        where = "put together in shared memory by the warps that share its rows, each with some columns of the values"
    if isinstance(plan, WideWgmmaAttentionPlan):
        where = "made of every other tile by each of two warpgroups, which multiply it by half of the columns each"
    product = f"{names[found.product]} = {names[found.weights]} @ {found.value.name}, the left factor {where}"
    lines = [*scores(plan, found), product]
    if not found.plain_pivot:
        lines.append(f"the sums are brought to {names[found.pivot]}, which the chain subtracts, behind the last tile")
    shared = isinstance(plan, WideWgmmaAttentionPlan) or (isinstance(plan, WideAttentionPlan) and plan.shared)
    if shared and found.value is not found.key:
        lines.append(f"{found.value.name} is the first columns of {found.key.name}: a tile is brought once for both")
    return lines + masked(plan, "are neither read nor multiplied")


def written_out(plan: WeightsPlan) -> list[str]:
    """The same of weights that are written out."""
    found, names = written_weights(plan.graph), value_names(plan.lowered)
    results = ", ".join(t.name for t in found.results)
    lines = [
        *scores(plan, found),
        f"a second pass over the keys makes {names[found.scores]} again, and of each of them {results}: no score is in "
        "memory",
    ]
    return lines + masked(plan, "are not read: what an exponential of -inf gives is written there")


def scores(plan: ScoresPlan, found: Scored) -> list[str]:
    names = value_names(plan.lowered)
    made = (
        f"{names[found.logits]} is what is softmaxed: its row's largest value, {names[found.top]}, and sums of "
        f"{names[found.exps]} are carried from tile to tile; they shrink by exp(old - new) as it grows"
        if found.softmax
        else f"{names[found.logits]} is made of each score by itself: of a row nothing but its sums is carried"
    )
    return [
        f"{names[found.scores]} = {found.query.name} @ {found.key.name}^T, {shape_text(found.scores.shape)} over "
        f"{found.depth}, in registers, {plan.tile.keys} keys at a time",
        made,
    ]


def masked(plan: ScoresPlan, left_out: str) -> list[str]:
    """What a mask spares."""
    ends = (("before the first", plan.ends.first), ("behind the last", plan.ends.end))
    lines = [f"keys {where} that a block's rows need {left_out}" for where, end in ends if end is not None]
    if plan.ends.settles:
        lines.append("conditions of known ends are tested only in tiles that an end cuts")
    return lines


def waves(plan: Plan) -> list[str]:
    """How evenly a launch of the default sizes' tiles fills the GPU."""
    if not isinstance(plan, (GemmPlan, WgmmaPlan)):
        return []
    graph = plan.graph
    extents = [math.prod(size_of(graph.shape[axis], graph.sizes) for axis in dim.axes) for dim in plan.row_dims]
    places = plan.target.sms * plan.cost.blocks_per_sm
    split_k = plan.tile.split_k if isinstance(plan, WgmmaPlan) else 1
    return [wave_text(plan.tiles(*extents) * plan.tile.cluster, places, split_k)]


def side_text(factor: Factor, graph: Graph) -> str:
    """`x`, `w.T`, `(x * gain)`."""
    if factor.operand is None:
        return f"({text_of(factor, graph)})"
    return f"{factor.operand.name}.T" if factor.transposed else factor.operand.name


def written(graph: Graph) -> list[str]:
    """The author's steps in order, each with its place and the name it got."""
    graph = graph.written
    lines = []
    for nodes in operators(graph):
        operator = nodes[-1].operator
        names = [graph.names[n] for n in nodes if n in graph.names and n is nodes[-1]]
        named = f" = {names[0]}" if names and names[0] != operator.name else ""
        lines.append(f"{operator.name}{named}  ({operator.where})")
    return lines


def fused(plan: Plan) -> list[Point]:
    """Each value that never goes to memory, and the sum."""
    points = [Point(f"{d.subject}: {d.verdict}", d.bytes_saved) for d in plan.decisions]
    traffic = plan.cost.traffic
    if len(points) > 1 and traffic.unfused > traffic.moved:
        saved = traffic.unfused - traffic.moved
        share = traffic.unfused / traffic.moved
        points.append(Point(f"together: {share:.2f}x fewer bytes than one kernel for each operator", saved))
    return points


def selection(graph: Graph) -> list[str]:
    """What is chosen, by which key and why by that, and what the columns chosen need of memory."""
    if graph.selection is None:
        return []
    before, names = graph.written, value_names(graph)
    assert before.selection is not None
    chosen, key = before.selection.inputs[0], graph.selection.inputs[0]
    order = "best first" if graph.selection.ordered else "in any order"
    lines = [f"{graph.picks:,} of {graph.cols:,} columns of each row, {order}, by {names[key]}"]
    if graph.selection.limit:
        lines.append(f"of {graph.selection.limit}")
    if chosen is not key:
        lines.append(
            f"not by {value_names(before)[chosen]}, which rises with {names[key]} along a row: the order is the same, "
            "and what is rounded to a tie is still in it"
        )
    behind = [nodes[-1].operator for nodes in operators(before) if before.picked.issuperset(nodes)]
    others = [f"{o} (line {o.where.line})" for o in behind if o is not before.selection.operator]
    if others:
        lines.append(f"{', '.join(others)}: computed for the columns chosen alone")
    gathered = [names[n.inputs[0]] for n in graph.nodes if n.op.name == "take" and n.inputs[0] is not key]
    if gathered:
        lines.append(f"{', '.join(gathered)}: read again at the columns chosen, {graph.picks:,} elements a row")
    return lines


def passes(plan: RowPlan) -> list[str]:
    count = len(plan.passes)
    lines = [f"{number} of {count}: {row_pass.title}" for number, row_pass in enumerate(plan.passes, 1)]
    if count > 1:
        whole = (*plan.graph.reductions, *plan.graph.scans)
        reductions = ", ".join(dict.fromkeys(f"{n.op.name} ({n.operator})" for n in whole))
        lines.append(f"{count} passes, because {reductions} must have the whole row before a result can be used")
    return lines


def kept(plan: RowPlan) -> list[str]:
    """Where each value that a later pass needs again waits for it, and what that costs."""
    where = {"registers": "in registers", "shared": "in shared memory", "persistent": "in shared memory"}.get(
        plan.staging
    )
    if where is None:
        if plan.staging == "stream" and len(plan.passes) > 1:
            return [f"nothing: each of the {len(plan.passes)} passes reads the row again"]
        return []
    elements = plan.tile.per_thread * plan.tile.vector
    found: dict[str, int] = {}
    for row_pass in plan.passes:
        found.update({keep.value: keep.dtype.bytes for keep in row_pass.keeps})
        found.update({load.value: load.access.dtype.bytes for load in row_pass.loads if load.when == "keep"})
    unit = "B a thread" if plan.staging == "registers" else "B a block"
    count = elements if plan.staging == "registers" else plan.tile.kept_cols
    lines = [f"{name} {where}: {each} B an element, {each * count:,} {unit}" for name, each in found.items()]
    if plan.staging == "shared" and plan.tile.kept < plan.tile.per_thread:
        lines.append(
            f"of each thread's {plan.tile.per_thread} vectors {plan.tile.kept} are kept; the others are read again, "
            "from where the last pass ended, which the L2 still has"
        )
    if plan.persistent_rows:
        held = plan.tile.per_thread - plan.tile.kept
        rest = f"{held} of each thread's {plan.tile.per_thread} vectors stay in registers instead; " if held else ""
        lines.append(f"{rest}persistent blocks, which prefetch the next row's vectors as they use up this one's")
    again = [
        a.name for a in plan.inputs
        if a.by_column and not a.strided and a.name not in found and sum(reads(plan, a.tensor)) > 1
    ]  # fmt: skip
    if again:
        lines.append(f"{', '.join(again)}: not kept but read again, from a cache, since every row shares them")
    return lines


def reads(plan: RowPlan, tensor: str) -> list[int]:
    return [sum(load.access.tensor == tensor for load in row_pass.reads) for row_pass in plan.passes]


def accesses(plan: Plan) -> list[str]:
    """How each tensor moves, and why not wider."""
    modes = {
        "vector": "whole vectors of {bytes} B",
        "misaligned": "vectors across aligned blocks of {bytes} B, shifted into place, since rows start anywhere",
        "bulk": "by bulk copies of aligned blocks of {bytes} B, since rows start anywhere",
        "element": "element by element",
    }
    lines = []
    unread = {t.name for t in plan.lowered.inputs if t.node not in plan.lowered.users}
    for access in plan.accesses:
        if access.tensor in unread:
            lines.append(f"{access.name}: not read; no result depends on it")
            continue
        text = modes[access.mode].format(bytes=access.vector_bytes)
        if access.output and access.mode == "misaligned":
            text = "by aligned blocks of 16 B, since rows start anywhere"
        if access.gathered:
            index = access.gathered.index
            at = index.name if isinstance(index, Value) else index.value
            text = f"{text}, of the rows that {at} names" if access.by_column else f"one value for each of {at}"
        elif not access.by_column:
            text = "one value a row"
        reason = why_narrow(plan, access)
        apart = access.strided or access.gathered or access.ld_axis is not None
        who = "rows of a group share it" if access.group_axis is not None else "every row shares it"
        shared = "" if apart or plan.flat else f"; {who}"
        if access.output and isinstance(plan, ColumnsPlan) and shared:
            text, shared = "once", "; one value a column"
        lines.append(f"{access.name}: {'written' if access.output else 'read'} {text}{reason}{shared}")
    return lines


def in_place(plan: Plan) -> list[str]:
    """Over which operands a call may write each output."""
    lines = []
    for output in (t.name for t in plan.graph.outputs):
        if over := [t.name for t in plan.graph.inputs if (output, t.name) in plan.in_place]:
            lines.append(f"out= may write {output} over {' or '.join(over)}")
    return lines or ["no output may be written over an operand"]


def why_narrow(plan: Plan, access: Access) -> str:
    """Why a tensor moves one element at a time; empty where it does not."""
    if access.mode != "element" or not access.by_column:
        return ""
    if access.tensor in plan.layout.unaligned:
        return ", because its address or stride is no multiple of a vector"
    if plan.graph.products:
        return f", because its lines of {access.shape[access.line]} elements are no whole vectors"
    if access.strided and plan.cols * access.dtype.bytes % 4:
        return f", because rows of {plan.cols} elements start at any alignment"
    return ", in step with the others" if access.vector == 1 else ""


def rounding(plan: Plan) -> list[str]:
    if not plan.rounding:
        return ["none: what is computed is f32, and no output is stored as less"]
    return [*plan.rounding, "everything between is f32"]


# ---------------------------------------------------------------- regime


def regime(found: Candidates, plan: Plan) -> list[str]:
    """What was chosen, by how much over what, and why the kinds of staging that are not there are not."""
    by = f"the least of {count(found)}" if plan is found.plans[0] else f"one of {count(found)}; it measured best"
    lines = [f"{plan.rule}: {plan.regime}", f"estimated {plan.cost.time_us:.1f} us, {by}"]
    seen = {kind(plan)}
    for other in found.plans:
        key = kind(other)
        if key in seen or len(seen) > FEW:
            continue
        seen.add(key)
        slower = other.cost.time_us / plan.cost.time_us - 1
        lines.append(f"{abs(slower):.1%} {'more' if slower >= 0 else 'less'} time: {other.regime}")
    return [*lines, *absent(found)]


def kind(plan: Plan) -> tuple[object, ...]:
    """Candidates of one kind differ by too little to be worth a line each."""
    if isinstance(plan, ColumnsPlan):
        return plan.cluster, plan.tile.cols
    return (plan.staging, plan.tile.threads_per_row) if isinstance(plan, RowPlan) else (plan.configuration,)


def count(found: Candidates) -> str:
    number = len(found.plans)
    return f"{number} candidates" if number > 1 else "one candidate"


def absent(found: Candidates) -> list[str]:
    """Why a row is not kept in registers or in shared memory, where no candidate does so."""
    plans = [p for p in found.plans if isinstance(p, RowPlan) and p.rule == "rowwise"]
    graph, target = found.graph, found.target
    stagings = {p.staging for p in plans}
    if not plans or "none" in stagings:
        return []
    widest = max(plans, key=lambda p: p.tile.row_threads)
    bytes_each = schedule(graph, plans[0].accesses, keeps="values", by_vectors=False).kept_bytes
    if not bytes_each:
        return []
    row_bytes = bytes_each * graph.cols
    lines = []
    if "registers" not in stagings:
        lines.append(
            f"not in registers: a row of {graph.cols:,} elements keeps {bytes_each} B each, "
            f"{row_bytes / widest.tile.row_threads:,.0f} B a thread even with {widest.tile.row_threads} threads"
        )
    whole = [p for p in plans if p.staging == "shared" and p.tile.kept == p.tile.per_thread]
    if row_bytes > target.shared_bytes and not any(p.tile.cluster == 1 for p in whole):
        lines.append(
            f"not in a block's shared memory: the row keeps {row_bytes / 1024:,.0f} KiB, "
            f"a block of {target.model} has {target.shared_bytes / 1024:,.0f} KiB"
        )
    return lines
