"""What a measurement is about: a graph's meaning, the size of the problem, the layout and the GPU, each as plain text.

A row length is a constant of the kernel, so it counts exactly. The number of rows is an argument, and what is fastest
changes slowly with it, so rows are counted in buckets, by powers of two. A chain that is taken as one flat array has
neither: its elements are counted in buckets. Other sizes matter by the number of rows that they make.

The same computation has the same key wherever and under whatever names it was written, in every process and version of
Python: nothing in a key depends on names, line numbers, hashes of objects or the order of sets.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fusegen.language.graph import Graph, Kind, Node, Tensor, once_per_graph
from fusegen.language.types import Size, size_of
from fusegen.planner.model import Candidates, Layout, Plan
from fusegen.planner.rewrites import simplify
from fusegen.targets import NAMES, Target

GRAPH_FORMAT = "graph 1"  # opens the text that is hashed; another way to write graphs down takes another number


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """What is to be made fast. `rows` is the bucket's lower end; `cols` is 1 where the chain is one flat array."""

    graph: str
    cols: int
    rows: int
    layout: str
    target: str
    arch: str


@dataclass(frozen=True, slots=True, order=True)
class Tools:
    """What made the kernels: the compiler and the version of fusegen."""

    compiler: str
    fusegen: str


def problem_of(found: Candidates) -> Problem | None:
    """The problem that all of `found` solve; None where no rule can plan it."""
    if not found.plans:
        return None
    plan, target = found.plans[0], found.target
    return Problem(
        graph=graph_digest(found.graph),
        cols=plan.cols,
        rows=bucket(rows_of(plan)),
        layout=layout_text(plan.layout, found.graph),
        target=target.name,
        arch=target.arch,
    )


def rows_of(plan: Plan) -> int:
    """Rows of the launch that was planned; elements, in a flat plan."""
    return plan.graph.rows * (plan.graph.cols if plan.flat else 1)


def bucket(rows: int) -> int:
    """The largest power of two that is at most `rows`; 1 for less."""
    return 1 << (max(rows, 1).bit_length() - 1)


def layout_text(layout: Layout, graph: Graph) -> str:
    """`contiguous`, `split`, `unaligned=0,2`, `split unaligned=1 turned=0`: operands and then outputs by number."""
    parts = ["split"] if layout.split else []
    tensors = (*graph.inputs, *graph.outputs)
    for word, names in (
        ("unaligned", layout.unaligned), ("turned", layout.transposed), ("apart", layout.apart),
        ("woven", layout.woven), ("within", frozenset(part for part, _ in layout.within)),
    ):  # fmt: skip
        if numbers := [str(number) for number, t in enumerate(tensors) if t.name in names]:
            parts.append(f"{word}={','.join(numbers)}")
    return " ".join(parts) or "contiguous"


# ---------------------------------------------------------------- graphs


def graph_digest(graph: Graph) -> str:
    """64 hexadecimal digits that stand for what the graph computes."""
    return hashlib.sha256(graph_text(graph).encode()).hexdigest()


@once_per_graph
def graph_text(graph: Graph) -> str:
    """The graph without names, places and sizes of rows and columns; a line for each operand, node and output, e.g.

    graph 1 / operand f16[d0, d1] / 0 input f32[d0, d1] operand 0 / 1 exp f32[d0, d1] 0 / output f16[d0, d1] 1
    """
    graph = simplify(graph)  # as it is planned; a graph that is simplified already stays as it is
    letters: dict[Size, str] = {}
    if graph.selection:  # a constant of the kernel that makes another problem, as the row length is
        letters[graph.selection.shape[-1]] = f"k={graph.picks}"
    for tensor in (*graph.inputs, *graph.outputs):
        for size in tensor.shape:
            if size != 1:
                letters.setdefault(size, f"d{len(letters)}")
    numbers: dict[Node, int] = {}
    lines = [GRAPH_FORMAT, *(f"operand {tensor_text(t, letters)}" for t in graph.inputs)]
    places = {t.node: index for index, t in enumerate(graph.inputs)}
    for node in graph.nodes:
        numbers[node] = len(numbers)
        lines.append(f"{numbers[node]} {node_text(node, numbers, places, letters)}")
    lines += [f"output {tensor_text(t, letters)} {numbers[t.node]}" for t in graph.outputs]
    if graph.products:  # what they are summed over, and columns beyond the first products', are constants as well
        lines += [f"{letters[s]} is {size_of(s, graph.sizes)}" for s in letters if s in graph.fixed - {graph.shape[-1]}]
    return "\n".join(lines)


def tensor_text(tensor: Tensor, letters: Mapping[Size, str]) -> str:
    return f"{tensor.dtype}[{', '.join(letters.get(size, '1') for size in tensor.shape)}]"


def node_text(node: Node, numbers: Mapping[Node, int], places: Mapping[Node, int], letters: Mapping[Size, str]) -> str:
    shape = ", ".join(letters.get(size, str(size)) for size in node.shape)
    parts = [f"{node.op.name} {node.dtype}[{shape}]"]
    if node.op.kind is Kind.INPUT:
        parts.append(f"operand {places[node]}")
    if node.literal is not None:
        parts.append(f"{type(node.literal).__name__} {node.literal!r}")  # repr: every bit, and -0.0 is not 0.0
    if node.size is not None:
        parts.append(f"size {letters.get(node.size, str(node.size))}")
    if node.missing is not None:
        parts.append(f"missing {node.missing!r}")
    if not node.ordered:
        parts.append("in any order")
    if node.over:
        parts.append(f"over {node.over}")
    if node.bare:
        parts.append("bare")
    if node.limit:
        parts.append(f"of {node.limit}")
    return " ".join([*parts, *(str(numbers[a]) for a in node.inputs)])


# ---------------------------------------------------------------- GPUs


def family(target: Target) -> tuple[str, ...]:
    """Other targets that run the same machine code, the most alike first: for cuda:h200, cuda:sm_90 and cuda:h100.

    Alike is by the bytes that memory gives an SM in a µs, since what is measured here waits for memory.
    """
    others = {t.name: t for t in NAMES.values() if t.name != target.name and generation(t) == generation(target)}
    rate = target.dram_gbs / target.sms
    return tuple(
        sorted(others, key=lambda name: (abs(math.log(others[name].dram_gbs / others[name].sms / rate)), name))
    )


def generation(target: Target) -> tuple[str, str]:
    """Vendor and architecture; `sm_90a` is `sm_90` with some instructions more."""
    return target.vendor, re.sub(r"(sm_\d+)[a-z]$", r"\1", target.arch)
