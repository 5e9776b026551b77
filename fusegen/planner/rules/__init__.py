"""One file a template: each rule yields every candidate plan it knows for a graph, or raises NoMatch with its reason.

A rule never ranks; `fusegen.planner.cost` does.
"""

from __future__ import annotations

from fusegen.graph import Graph

MOST_COLS = 2**31 - 2**20  # a thread counts columns in 32 bits, up to a tile beyond the row


def need_countable(cols: int) -> None:
    """Raises NoMatch for a row whose columns 32 bits can't count."""
    if cols > MOST_COLS:
        raise NoMatch(f"a row of {cols} elements; kernels count a row's columns in 32 bits, up to {MOST_COLS}")


def need_no_selection(graph: Graph) -> None:
    """Raises NoMatch for a chain that chooses columns: its results have another row length than its walk."""
    if node := graph.selection:
        raise NoMatch(
            f"{node.operator} at {node.where} chooses columns (k={node.shape[-1]}); this rule keeps whole rows"
        )


class NoMatch(Exception):
    """This rule can't plan the graph; the text says why, in the user's words."""
