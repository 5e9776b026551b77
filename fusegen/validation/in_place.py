"""Calls that write outputs over operands: which ones are tried, and where their arrays are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from fusegen.language.graph import Graph
from fusegen.validation.memory import CONTIGUOUS, Arrangement, Placed

NAME = "in place"


def side_by_side(pairs: Collection[tuple[str, str]]) -> Iterator[Mapping[str, str]]:
    """Outputs and the operands that they overwrite, {output: operand}, each operand once: as many outputs as there are
    operands for, and on until every one of `pairs` was there."""
    left = sorted(pairs)
    while left:
        together: dict[str, str] = {}
        for output, operand in left + [pair for pair in sorted(pairs) if pair not in left]:
            if output not in together and operand not in together.values():
                together[output] = operand
        left = [pair for pair in left if pair not in together.items()]
        yield together


def reason_of(over: Mapping[str, str], how: Arrangement) -> str:
    """`out over x: the same bits as in memory of its own`."""
    said = " and ".join(f"{output} over {operand}" for output, operand in over.items())
    strides = "" if how == CONTIGUOUS else ", rows by an odd stride"
    return f"{said}{strides}: the same bits as in memory of their own"


def overwriting(
    graph: Graph, over: Mapping[str, str], inputs: Sequence[Placed], outputs: Sequence[Placed]
) -> list[Placed]:
    """`outputs`, with an operand's own memory for each that is to be written over one."""
    names = [t.name for t in graph.inputs if t.shape]
    pairs = zip(graph.outputs, outputs, strict=True)
    return [inputs[names.index(over[t.name])] if t.name in over else own for t, own in pairs]
