"""The plan as text: the comment that opens every kernel, what `print(kernel.plan)` and `fusegen plan` show first."""

from __future__ import annotations

import textwrap
from typing import Protocol

from fusegen.language.graph import Graph
from fusegen.language.naming import value_names
from fusegen.language.types import Dim, shape_text
from fusegen.planner.parts import Access, Layout
from fusegen.planner.traffic import Cost
from fusegen.targets.base import Target

WIDTH = 110  # of a line
TITLE_WIDTH = 136  # of the first one, whose types are told from one another more easily side by side
MOST_LINES = 30  # of a spec's body; a chain of hundreds of steps has its file to be read in


class Headed(Protocol):
    """What the opening lines tell of a plan."""

    @property
    def name(self) -> str: ...

    @property
    def graph(self) -> Graph: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def target(self) -> Target: ...

    @property
    def cost(self) -> Cost: ...

    @property
    def regime(self) -> str: ...

    @property
    def rounding(self) -> tuple[str, ...]: ...

    @property
    def accesses(self) -> tuple[Access, ...]: ...

    @property
    def matrix_tflops(self) -> float: ...

    @property
    def flat(self) -> bool: ...

    @property
    def cols(self) -> int: ...

    @property
    def launched(self) -> str: ...


def header_lines(plan: Headed) -> list[str]:
    """The plan as the comment that opens the kernel; also what `print(kernel.plan)` shows."""
    doc = summary(plan.graph)
    facts = [line for name, text in header_facts(plan) for line in field(name, text)]
    return [
        *textwrap.wrap(title(plan), TITLE_WIDTH, subsequent_indent="  "),
        *(textwrap.wrap(doc, WIDTH) if doc else []),
        "",
        *facts,
    ]


def title(plan: Headed) -> str:
    """`rmsnorm  bf16[M, N], bf16[N] -> bf16[M, N]  at M=16384 N=4096`."""
    return f"{plan.name}  {plan.graph.signature}  at {plan.graph.sizes_text()}"


def summary(graph: Graph) -> str:
    """The first paragraph of what the spec's author says of it, in one line."""
    return graph.doc.split("\n\n")[0].replace("\n", " ")


def header_facts(plan: Headed) -> list[tuple[str, str]]:
    """What is told of a plan: `target`, `tile`, `traffic`, ... and their texts."""
    graph, target, cost = plan.graph, plan.target, plan.cost
    moved = cost.traffic
    rate = f"{target.dram_gbs / 1000:g} TB/s"
    facts = f"facts of {target.model}: warp {target.warp}, {target.sms} SMs, {rate}"
    apart, at = "", rate
    if moved.product_flops:
        matrix = f"{plan.matrix_tflops:.0f} TFLOP/s for products"
        facts += f", {matrix}"
        apart = f"{megabytes(moved.per_element_unfused)} with products apart, "
        at = matrix if cost.bound == "compute" else rate
    unfused = f"{megabytes(moved.unfused)} unfused in {plural(moved.launches_unfused, 'launch', 'launches')}"
    return [
        ("target", f"{target.vendor} {target.arch}, {facts}"),
        *([("views", views)] if (views := viewed(graph)) else []),
        *([("selects", selected(graph))] if graph.selection else []),
        *([("looks up", looked_up(graph))] if graph.gathers else []),
        *([("writes", written_rows(graph))] if graph.scatters else []),
        ("tile", plan.regime),
        ("traffic", f"{megabytes(moved.moved)} moved, {megabytes(moved.ideal)} ideal, {apart}{unfused}"),
        ("floor", f"{cost.floor_us:.1f} us at {at}; {cost.bound}-bound at {moved.intensity:.2f} flop/B"),
        *([("rounding", f"{'; '.join(plan.rounding)}; f32 between")] if plan.rounding else []),
        ("needs", "; ".join(needs(plan))),
        *([("launch", plan.launched)] if plan.launched else []),
    ]


def viewed(graph: Graph) -> str:
    """`low is x[..., :D // 2]`: what tensors of a program's kernel are of the program's arrays."""
    names = [t.name for t in (*graph.inputs, *graph.outputs)]
    return "; ".join(f"{name} is {graph.written.shown[name]}" for name in names if name in graph.written.shown)


def comment_lines(plan: Headed) -> list[str]:
    """What opens the kernel's text: the plan, and between its title and its facts the spec that the kernel computes."""
    lines = header_lines(plan)
    behind_title = lines.index("") + 1
    body = body_lines(plan.graph.written.body)
    return list(map(unjoined, [*lines[:behind_title], *body, *lines[behind_title:]]))


def body_lines(body: str) -> list[str]:
    """A spec's body, indented and not too long, with an empty line behind it."""
    lines = body.splitlines()
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], f"    ...  # {len(lines) - MOST_LINES + 1} more lines"]
    return [*(f"    {line}".rstrip() for line in lines), ""] if lines else []


def unjoined(line: str) -> str:
    """A comment whose end, a backslash or the trigraph of one, would join the next line to it."""
    return f"{line} //" if line.endswith(("\\", "??/")) else line


def selected(graph: Graph) -> str:
    """`8 of 32000 columns a row by z, largest first; NaN before all, ties by column, -inf never`."""
    assert graph.selection is not None
    order = "largest first" if graph.selection.ordered else "in any order"
    key = value_names(graph)[graph.selection.inputs[0]]
    never = "-inf never" + (" but in a row of nothing else" if graph.selection.bare else "")
    of = f" of {graph.selection.limit}" if graph.selection.limit else ""
    return f"{graph.picks} of {graph.cols} columns a row by {key}{of}, {order}; NaN before all, ties by column, {never}"


def looked_up(graph: Graph) -> str:
    """`rows of table at ids, 0 where there is none`."""
    names = value_names(graph)
    found = []
    for node in graph.gathers:
        kind = {"gather": "rows", "paged_rows": "pages"}.get(node.op.name, "columns")
        missing = 0 if node.missing is None else node.missing
        at = names.get(node.inputs[1], "an index")
        found.append(f"{kind} of {names[node.inputs[0]]} at {at}, {missing:g} where there is none")
    return "; ".join(found)


def written_rows(graph: Graph) -> str:
    """`rows of out at slots; nothing where there is none`."""
    names = value_names(graph)
    rows: dict[str, list[str]] = {}
    for tensor in graph.outputs:
        if tensor.node in graph.written_at:
            rows.setdefault(names.get(tensor.node.inputs[0], "an index"), []).append(tensor.name)
    said = (f"rows of {', '.join(outputs)} at {index}" for index, outputs in rows.items())
    return f"{'; '.join(said)}; nothing where there is none"


def field(name: str, text: str) -> list[str]:
    """`name     text`, wrapped under itself."""
    return textwrap.wrap(text, WIDTH - 9, initial_indent=f"{name:<9}", subsequent_indent=" " * 9)


def plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count} B"


def needs(plan: Headed) -> list[str]:
    """What the launcher must have checked before this text may run."""
    lines = [] if plan.flat else [f"rows of {plan.cols} elements, next to each other" if plan.cols > 1 else "rows of 1"]
    if plan.graph.products:
        lines = product_needs(plan)
    by_width: dict[tuple[str, int], list[str]] = {}
    for access in plan.accesses:
        if access.mode != "element":
            by_width.setdefault((access.mode, access.vector_bytes), []).append(access.name)
    for (mode, width), names in by_width.items():
        which = "address" if plan.flat or mode in ("misaligned", "bulk") else "address and strides"
        lines.append(f"{', '.join(names)}: {which} in multiples of {width} B")
        if mode in ("misaligned", "bulk"):
            lines[-1] += ", no stride below 0"
    for stem in dict.fromkeys(a.stem for a in plan.accesses if a.interleaved):
        woven = ", ".join(a.name for a in plan.accesses if a.stem == stem)
        lines.append(f"{woven}: by turns the elements of one array, in the vectors of {stem}")
    read = {a.tensor for a in plan.accesses}
    within = sorted(pair for pair in plan.layout.within if pair[0] not in read)
    lines += [f"{part}: the first columns of {whole}'s rows, where they are read" for part, whole in within]
    shared = [a for a in plan.accesses if a.by_column and not a.strided and a.ld_axis is None and not result(a, plan)]
    for by_group, who in ((True, "rows of a group"), (False, "every row")):
        shapes = [f"{a.name} {shape_text(a.shape)}" for a in shared if (a.group_axis is not None) is by_group]
        if shapes and not plan.flat and not plan.graph.orders:
            lines.append(f"{', '.join(shapes)} shared by {who}")
    return lines or ["nothing of its operands' alignment"]


def result(access: Access, plan: Headed) -> bool:
    """Is it written once for a column, of rows that are reduced?"""
    return access.output and any(node.over for node in plan.graph.reductions)


def product_needs(plan: Headed) -> list[str]:
    """The sizes that are constants of the text, and which way round matrices lie."""
    sizes = [f"{name}={size}" for name, size in plan.graph.sizes.items() if Dim(name) in plan.graph.fixed]
    transposed = {a.tensor: str(a.shape[a.line]) for a in plan.accesses if a.line != -1}
    return [
        f"{', '.join(sizes)}; rows of all operands next to each other" if sizes else "rows next to each other",
        *(f"{name}: its elements along {axis} next to each other" for name, axis in transposed.items()),
    ]
