"""Searches on disk: a process that starts anew looks at the state that an earlier one found, and at no other.

A decoder layer's search plans five hundred kernels, most of which no rule can, in 5 s; the nine that it ends with take
a tenth of that. What is kept is the state, what is told of it, or why there is none: no plan, which is made anew from
the state as the search made it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusegen.language.graph import Graph
from fusegen.planner.programs.model import Cut
from fusegen.planner.spelled import key_of, spelled, stamp_of
from fusegen.storage import Damaged, Store
from fusegen.targets.base import Target

log = logging.getLogger("fusegen.cache")

WORTH_KEEPING = 20  # states; to look at fewer takes no longer than to read a file


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found: the numbers, among the graph's nodes, of those that are in memory, why each is, and the cuts
    that were looked at. Or else the text of the refusal."""

    stored: tuple[int, ...] = ()
    whys: tuple[str, ...] = ()
    cuts: tuple[Cut, ...] = ()
    refusal: str = ""
    states: int = 0  # that were looked at


def remembered(graph: Graph, target: Target, limits: Sequence[object], search: Callable[[], Outcome]) -> Outcome:
    """`search()`, or what it found when this graph was last cut for this target with these limits, by this code."""
    try:
        text = spelled((graph, target, tuple(limits)), graph)
    except TypeError as error:
        log.debug("not remembered: the cuts of %s: %s", graph.name, error)
        return search()
    key = key_of(graph.name, target.name, text, stamp_of())
    store = Store("searches")
    if (found := store.load(key, lambda facts, _: unpack(facts, len(graph.nodes)))) is not None:
        return found
    found = search()
    if found.states >= WORTH_KEEPING:
        cuts = [(cut.stored, cut.kernels, cut.time_us, cut.reason) for cut in found.cuts]
        facts = {"stored": found.stored, "whys": found.whys, "cuts": cuts, "refusal": found.refusal}
        store.store(key, {**facts, "states": found.states}, b"")
    return found


def unpack(facts: Mapping[str, Any], nodes: int) -> Outcome:
    """Raises Damaged for anything but what `remembered` wrote of a graph of so many nodes."""
    try:
        cuts = tuple(Cut(tuple(map(str, names)), int(count), us, str(why)) for names, count, us, why in facts["cuts"])
        stored, whys = tuple(map(int, facts["stored"])), tuple(map(str, facts["whys"]))
        found = Outcome(stored, whys, cuts, str(facts["refusal"]), int(facts["states"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged("it is no search's") from error
    times = {type(cut.time_us) for cut in cuts}
    if len(stored) != len(whys) or not all(0 <= number < nodes for number in stored) or times - {float, type(None)}:
        raise Damaged("it is no search's")
    return found
