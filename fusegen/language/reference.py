"""Graph -> numpy source: the meaning of a chain as text that a person can read, run alone, and argue with.

float64 and int32 inside, one line per op, numpy (and ml_dtypes for bf16) only. Validation runs this very text. Float
outputs come back unrounded, in float64: rounding to the storage type is the comparison's business, since it alone knows
how much of a difference the storage type allows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from fusegen.language.graph import Graph, Kind, Node
from fusegen.language.naming import entry_name, value_names
from fusegen.language.ordering import order_by_keys
from fusegen.language.sizes import Dim, Expr, dims_in, solved
from fusegen.language.types import DTYPES, DType, Size, b8, f4e2m1, f32, i32, i64, size_of, u32

LEAST, MOST = "-(2**31)", "2**31 - 1"  # of i32


def reference_source(graph: Graph) -> str:
    """The numpy module of `graph`: one function of the kernel's name, operands in the spec's order."""
    graph = order_by_keys(graph)
    names = value_names(graph)
    body = [
        *size_lines(graph),
        *converted_inputs(graph),
        *(line_of(n, graph, names) for n in graph.nodes if n in names and wants_line(n)),
    ]
    returned = ", ".join(names[t.node] for t in graph.outputs)
    parameters = ", ".join(names[t.node] for t in graph.inputs)
    operands = "\n".join(f"    {names[t.node]}: {t.type}" for t in graph.inputs)
    outputs = ", ".join(f"{t.name} {t.type}" for t in graph.outputs)
    text = [
        f'"""{graph.name}: what the kernel must compute, in float64.\n',
        *([escaped(graph.doc) + "\n"] if graph.doc else []),
        f"Operands, with leading axes of any size:\n{operands}\n",
        f"Returns {outputs}; floats are left in float64, not yet rounded to the storage type.\n" + '"""\n',
        *imports(graph),
        *helpers(graph),
        "\n",
        '@np.errstate(all="ignore")',
        f"def {entry_name(graph)}({parameters}):",
        *("    " + line for line in body),
        f"    return {returned}",
    ]
    return "\n".join(text) + "\n"


def escaped(doc: str) -> str:
    """Text that stands between three double quotes and means what the author wrote."""
    return doc.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def imports(graph: Graph) -> list[str]:
    texts = {n.ref for n in graph.nodes}
    lines = []
    uses_erf = any("erf(" in t for t in texts)
    if uses_erf:
        lines.append("import math\n")
    lines.append("import numpy as np")
    wanted = [d.numpy_name for d in (*DTYPES.values(), f4e2m1) if any(f"({d.numpy_name})" in t for t in texts)]
    if wanted:
        lines.append(f"from ml_dtypes import {', '.join(sorted(wanted))}")
    if uses_erf:
        lines.append("\nerf = np.vectorize(math.erf, otypes=[np.float64])")
    return lines


def helpers(graph: Graph) -> list[str]:
    """The functions that selections, computed places and random numbers call."""
    found = [*selection_helpers(graph), *gathering_helpers(graph), *largest_helpers(graph)]
    if grouped := dict.fromkeys(n.op.name for n in graph.nodes if n.any_ends or n.op.kind is Kind.ORDER):
        from fusegen.language.segments import sources_of  # imports numpy, which tracing a spec does without

        found += ["\n\n" + text.rstrip("\n") for text in sources_of(grouped)]
    if any(n.op.name == "philox" for n in graph.nodes):
        from fusegen.language import philox

        found.append("\n\n" + philox.source().rstrip("\n"))
    return found


def selection_helpers(graph: Graph) -> list[str]:
    names = dict.fromkeys(n.op.name for n in graph.nodes if n.op.kind is Kind.SELECT)
    if not names:
        return []
    if any(n.bare for n in graph.nodes):
        names["bare"] = None
    if any(n.limit for n in graph.nodes):
        names["in_best_groups"] = None
    from fusegen.language.selection import source_of  # imports numpy, which tracing a spec does without

    return ["\n\n" + source_of(name).rstrip("\n") for name in names]


def largest_helpers(graph: Graph) -> list[str]:
    names = dict.fromkeys(n.op.name for n in graph.scans if n.op.name.startswith(("largest", "sorted")))
    if not names:
        return []
    from fusegen.language.largest import source_of  # imports numpy, which tracing a spec does without

    return list(dict.fromkeys("\n\n" + source_of(name).rstrip("\n") for name in names))


def gathering_helpers(graph: Graph) -> list[str]:
    names = dict.fromkeys(
        n.op.name for n in graph.nodes if n.op.kind is Kind.GATHER or n.op.name == "scatter"
    )  # fmt: skip
    if not names:
        return []
    from fusegen.language.lookup import source_of  # imports numpy, which tracing a spec does without

    return ["\n\n" + source_of(name).rstrip("\n") for name in names]


def converted_inputs(graph: Graph) -> list[str]:
    names = value_names(graph)
    kinds = {f32: "np.float64", i32: "np.int32", u32: "np.uint32", b8: "bool"}

    def given(name: str, dtype: DType) -> str:
        """An operand; what is beyond i32 is read as the nearest one."""
        return f"np.clip({name}, {LEAST}, {MOST})" if dtype is i64 else f"np.asarray({name})"

    return [
        f"{names[t.node]} = {given(names[t.node], t.dtype)}.astype({kinds[t.dtype.value]})" for t in graph.inputs
    ]  # fmt: skip


def named_sizes(graph: Graph) -> Mapping[str, str]:
    """The dims that the text calls by their names, each with its number as an operand's shape gives it: those that
    computed sizes are made of."""
    spelled = {name for node in graph.nodes for name in re.findall(r"[A-Za-z_]\w*", node.text)}
    if graph.viewed:
        counted = (n for n in graph.nodes if n.op.name in ("col_index", "row_index", *PLACES))
        spelled |= {dim.name for node in counted for dim in dims_in(node.shape)}
    wanted = dict.fromkeys(name for name in graph.sizes if name in spelled)
    wanted |= dict.fromkeys(
        dim.name for n in graph.nodes if by_name(n, graph) for dim in dims_in(1 if n.size is None else n.size)
    )
    names = value_names(graph)
    found: dict[str, str] = {}
    axes = [(size, f"{names[t.node]}.shape[{axis}]") for t in graph.inputs for axis, size in enumerate(t.shape)]
    for name in wanted:
        plain = next((text for size, text in axes if size == Dim(name)), None)
        if plain is None:  # it follows from a computed size, where its other dims are found
            others = (solved(size, name, Dim(text)) for size, text in axes if Dim(name) in dims_in(size))
            plain = next((str(o) for o in others if o is not None and len(list(dims_in(o))) == 1), None)
        found[name] = plain or str(graph.sizes[name])
    return found


def by_name(node: Node, graph: Graph) -> bool:
    """Is a number computed from dims, or the row length from it, or does it count rows?"""
    return node.size is not None and (graph.viewed or node.size in graph.counted)


def size_lines(graph: Graph) -> list[str]:
    """`M, N = x.shape[0], x.shape[1]`."""
    found = named_sizes(graph)
    return [f"{', '.join(found)} = {', '.join(found.values())}"] if found else []


PLACES = ("element_low", "element_high", "row_low", "row_high")
"""Words of an index, in the order of rows."""


def draws(graph: Graph) -> bool:
    """Does a row's result depend on its place among all rows, as random numbers do?"""
    return any(node.op.name in PLACES for node in graph.nodes)


def wants_line(node: Node) -> bool:
    return node.op.kind is not Kind.INPUT


def line_of(node: Node, graph: Graph, names: Any) -> str:
    name = names[node]
    if node.op.name == "col_index":
        axis = str(node.shape[-1]) if graph.viewed else axis_of(graph, -1, names, node.shape[-1])
        return f"{name} = np.arange({axis}, dtype=np.int32)"
    if node.op.name == "row_index":
        axis = str(node.shape[-2]) if graph.viewed else axis_of(graph, -2, names, node.shape[-2])
        return f"{name} = np.arange({axis}, dtype=np.int32)[:, None]"
    if node.op.name in PLACES:
        rank = len(node.shape)
        *outer, last = (str(size) if graph.viewed else axis_of(graph, axis - rank, names, size)
                        for axis, size in enumerate(node.shape))  # fmt: skip
        word = "low_word" if node.op.name.endswith("low") else "high_word"
        if node.inputs:  # of chosen columns
            cols = axis_of(graph, -1, names, graph.shape[-1])
            return f"{name} = {word}(flat_index({', '.join([*outer, '1'])}) * {cols} + {names[node.inputs[0]]})"
        return f"{name} = {word}(flat_index({', '.join([*outer, last])}))"
    arguments = [names[a] if a in names else literal_text(a, graph, names) for a in node.inputs]
    if not any(a.shape for a in numbers_of(node)):  # numpy takes whole numbers among themselves for int64
        whole = {i32: "np.int32", u32: "np.uint32"}
        arguments = [f"{whole[a.dtype]}({text.strip('()')})" if a.literal is not None and a.dtype in whole else text
                     for a, text in zip(node.inputs, arguments, strict=True)]  # fmt: skip
    if node.op.name == "put":
        return f"{name} = {arguments[1]}  # the rows that go where {arguments[0]} says"
    if node.op.kind is Kind.SELECT:
        k = size_of(node.shape[-1], graph.sizes)
        if node.bare:
            arguments[0] = f"bare({arguments[0]})"
        if node.limit:
            limit = f"{node.limit.groups}, {node.limit.best}, {node.limit.by}"
            arguments[0] = f"in_best_groups({arguments[0]}, {limit})"
        return f"{name} = {node.ref.format(*arguments, k=k, missing=number_text(node.missing))}"
    return f"{name} = {node.ref.format(*arguments, missing=number_text(node.missing))}"


def numbers_of(node: Node) -> tuple[Node, ...]:
    return node.inputs[1:] if node.op.name == "where" else node.inputs


def axis_of(graph: Graph, axis: int, names: Any, size: Size | None) -> str:
    """The size of the chain's axis, as an operand knows it; a literal where none does. A chain with products takes
    several spaces: there it is `size` that is looked for, as is a size of another axis, which a number may be."""
    if graph.products or graph.space is None or size not in (None, graph.shape[axis]):
        found = [(t, i - len(t.shape)) for t in graph.inputs for i, s in enumerate(t.shape) if s == size]
        return f"{names[found[0][0].node]}.shape[{found[0][1]}]" if found else str(size)
    for tensor in graph.inputs:
        if len(tensor.shape) >= -axis and tensor.shape[axis] == graph.shape[axis]:
            return f"{names[tensor.node]}.shape[{axis}]"
    return str(size_of(graph.shape[axis], graph.sizes))


def literal_text(node: Node, graph: Graph, names: Any) -> str:
    """A number as Python text, bracketed where it could bind wrongly."""
    if node.op.name == "size":
        assert node.size is not None
        if by_name(node, graph):
            return f"({node.size})" if isinstance(node.size, Expr) else str(node.size)
        chosen = graph.selection is not None and node.size != graph.shape[-1]  # k, which is a constant everywhere
        known = chosen or isinstance(node.size, int)
        return str(size_of(node.size, graph.sizes)) if known else axis_of(graph, -1, names, node.size)
    return number_text(node.literal)


def number_text(value: float | int | bool | None) -> str:
    if not isinstance(value, float):
        return f"({value})" if isinstance(value, int) and value < 0 else str(value)
    if math.isnan(value):
        return "np.nan"
    if math.isinf(value):
        return "np.inf" if value > 0 else "(-np.inf)"
    return repr(value) if value >= 0 and not math.copysign(1, value) < 0 else f"({value!r})"


def load_reference(source: str, name: str) -> Callable[..., Any]:
    """The reference function, by running its text."""
    module: dict[str, Any] = {"__name__": f"fusegen_reference_{name}"}
    exec(compile(source, f"<reference {name}>", "exec"), module)
    function: Callable[..., Any] = module[name]
    return function


def reference(graph: Graph) -> Callable[..., Any]:
    """The chain's meaning as a function of numpy arrays."""
    return load_reference(reference_source(graph), entry_name(graph))
