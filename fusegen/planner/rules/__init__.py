"""One file a template: each rule yields every candidate plan it knows for a graph, or raises NoMatch with its reason.

A rule never ranks; `fusegen.planner.cost` does.
"""

from __future__ import annotations


class NoMatch(Exception):
    """This rule can't plan the graph; the text says why, in the user's words."""
