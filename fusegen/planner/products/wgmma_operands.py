"""Which operands of products wgmma's kernels move by tensor copies, prepare in registers, or store by boxes."""

from __future__ import annotations

from fusegen.language.graph import Extent, Graph, Kind, Node, Tensor
from fusegen.language.products import Split, group_vectors
from fusegen.language.types import bf16, f16, f32, size_of
from fusegen.planner.matching import NoMatch
from fusegen.planner.model import Layout
from fusegen.planner.products.factors import Use, line_of
from fusegen.planner.products.output_groups import within
from fusegen.planner.products.wgmma_tiles import LINE_ELEMENTS

VECTOR_COLS = 8  # elements of 16 bytes
EIGHT_COLS = 8  # of an instruction's sums: a thread has a pair of them
QUAD_COLS = 8  # elements of 8 bits that a lane stores: 32 bytes, a sector, of the four lanes that have a row


def prepared_matrix(graph: Graph, parts: Split, unit: str) -> Tensor | None:
    """The one matrix whose elements a thread sees before `unit` multiplies them; None where it need see none.

    Raises NoMatch where there are several, or where more is needed of a row than what passes by.
    """
    left = parts.lefts[0]
    if left.operand is not None and not parts.statistics:
        return None
    if left.operand is not None and left.transposed:
        raise NoMatch(f"the left factor is transposed, and its rows are reduced; {unit} sees lines along K only")
    needed = within(graph, left.node, *(s.node.inputs[0] for s in parts.statistics))
    for node in (n for n in graph.nodes if n in needed):
        if node.op.kind is Kind.REDUCE or (node.op.kind is not Kind.LEAF and graph.extents[node] is Extent.ROW):
            raise NoMatch(
                f"the left factor needs {node.op.name} at {node.where}, one value a row, before it is multiplied"
            )
        if node.op.name in ("row_index", "col_index"):
            raise NoMatch(f"the left factor is computed from a position; {unit} computes it from operands alone")
    for statistic in parts.statistics:
        if statistic.node.op.name != "sum" or statistic.node.dtype is not f32:
            what = f"{statistic.node.op.name} of {statistic.node.dtype} at {statistic.node.where}"
            raise NoMatch(f"{what}: {unit} takes sums of f32 along the rows alone")
    tensors = [t for t in graph.inputs if t.shape and t.node in needed]
    matrices = [t for t in tensors if len(t.shape) > 1]
    if len(matrices) != 1 or matrices[0].dtype is not left.dtype:
        names = ", ".join(t.name for t in matrices) or "no matrix"
        raise NoMatch(f"the left factor is computed from {names}; {unit} prepares one matrix of its own type")
    behind = within(graph, *(t.node for t in graph.outputs))
    if matrices[0].node in behind:
        raise NoMatch(f"{matrices[0].name} is used in two ways; {unit} moves each tensor in one")
    return matrices[0]


def scales(left: Node, matrix: Tensor, vector: Tensor) -> bool:
    """Is the factor the matrix times the vector, element by element, both of one type?"""
    return left.op.name == "mul" and set(left.inputs) == {matrix.node, vector.node} and vector.dtype is matrix.dtype


def holds_groups(graph: Graph, cols: int, group: int) -> bool:
    """Are so many columns of a tile one group that it reduces, or several, each a chunk? Boxes of elements that are
    stored besides have 64 columns."""
    if cols == group:
        return True
    if cols % group or group % EIGHT_COLS or group > LINE_ELEMENTS:
        return False
    return group == LINE_ELEMENTS or all(tensor.node in graph.grouped for tensor in graph.outputs)


def boxed(graph: Graph, use: Use, width: int) -> bool:
    """Does a tensor copy store it? It must be of 16-bit elements and lie as tensor copies need it."""
    output = any(use.tensor is t for t in graph.outputs)
    return output and use.tensor.dtype in (f16, bf16) and width == VECTOR_COLS


def by_quads(graph: Graph, use: Use, width: int) -> bool:
    """Is it a result of 8 bits, of which a lane may store 8 neighbours?"""
    output = any(use.tensor is t for t in graph.outputs)
    return output and use.tensor.dtype.bits == 8 and use.tensor.shape == graph.shape and width >= QUAD_COLS


def brought(graph: Graph, use: Use, width: int) -> bool:
    """Does it come by tensor copies, though it is no factor? The same holds; and every row has its own."""
    alike = use.tensor.shape == graph.shape and not any(use.tensor is t for t in graph.outputs)
    alike = alike and use.tensor.node not in group_vectors(graph)
    return alike and use.place == "tile" and use.tensor.dtype in (f16, bf16) and width == VECTOR_COLS


def unaligned(graph: Graph, layout: Layout, use: Use) -> str:
    """Why a factor can't be moved by tensor copies."""
    if use.tensor.name in layout.unaligned:
        return "has an address or a stride that is no multiple of 16 bytes"
    line = use.tensor.shape[line_of(use, layout)]
    return f"has lines of {size_of(line, graph.sizes)} elements"
