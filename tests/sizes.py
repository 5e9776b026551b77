"""A chain at another row length: what its selection keeps shrinks with the row."""

from __future__ import annotations

from collections.abc import Mapping

from fusegen.language.graph import Graph
from fusegen.language.types import Dim


def sizes_at(graph: Graph, cols: int) -> Mapping[str, int]:
    """The sizes that give `graph` rows of `cols`, and a k of so many at most."""
    sizes = {str(graph.shape[-1]): cols}
    if graph.selection is not None and isinstance(k := graph.selection.shape[-1], Dim):
        sizes[k.name] = min(graph.picks, cols)
    return sizes
