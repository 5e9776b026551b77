"""What opens a kernel that chooses columns: its algorithm by name and reference, and a map of its sections.

Each section has a heading of its name in the text. References: A. Gaihre et al., Dr. Top-k: delegate-centric top-k on
GPUs, SC 2021; T. Alabi et al., Fast k-selection algorithms for graphics processing units, JEA 17, 2012; K. E. Batcher,
Sorting networks and their applications, AFIPS 1968.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from fusegen.planner.heading import WIDTH, field
from fusegen.planner.model import RowPlan
from fusegen.planner.ways import InWarp, LargeK, OneByOne, Packed, SmallK, Streaming

INDENT = 9
NAMES = 10  # characters of the longest section's name, and one more
RANK = (
    "counting sort by ranges of keys, comparisons within a range; where ties fill one, bitonic sort (Batcher, AFIPS"
    " 1968)"
)
REPEATED = "repeated argmax, as in the top-k softmax of MoE routers: the largest key is taken out, {k} times"
BY_TEAM = (
    "register-resident top-k by {lanes} lanes a row. The largest key of each lane is its delegate (Dr. Top-k, Gaihre "
    "et al., SC 2021); what reaches the best delegates is ranked by counting what is larger"
)
BY_DELEGATES = (
    "register-resident top-k by {lanes} lanes a row. The largest of every few keys of a lane is their delegate (Dr. "
    "Top-k, Gaihre et al., SC 2021); a network (Batcher, AFIPS 1968) finds the {k} best, and what reaches them is "
    "ranked by counting what is larger"
)
BY_WORDS = (
    "bitonic top-k in registers (Shanbhag, Pirk & Madden, SIGMOD 2018) by {lanes} a row. A key and its column are one "
    "word of 32 bits{clipped}; {sorted} words at a time are sorted, the best of them and of those before stay, and so "
    "do the best of all lanes"
)
CLIPPED = ", which has no room for the key's last bits"
BY_GROUPS = (
    " The largest of {group} keys next to each other is their delegate (Dr. Top-k, Gaihre et al., SC 2021): so are the "
    "best groups chosen first, and then of their keys alone"
)
HELD = (
    "register-resident top-k for few columns. The largest key of each thread is its delegate (Dr. Top-k, Gaihre et "
    "al., SC 2021); the warps agree on a bar that at least {k} delegates reach, and few more keys do"
)
DENSE = (
    "register-resident top-k for many columns. The largest key of each group of a thread's keys is its delegate (Dr. "
    "Top-k, Gaihre et al., SC 2021); what enough delegates of each warp reach is a bar, and what reaches the bar is "
    "packed together and sorted"
)
STREAMING = (
    "streaming select. Elements above a threshold are candidates; where they grow too many, bucket select (Alabi et "
    "al., JEA 2012) keeps the best {k} and raises the threshold"
)
THRESHOLD = (
    "streaming threshold select. The row is read once, and of every {keys} elements the largest key is kept as their "
    "delegate (Dr. Top-k, Gaihre et al., SC 2021). An order that {k} largest keys reach is a threshold: few more "
    "elements reach it, and only those whose delegate exceeds it are looked at again"
)


def opening(plan: RowPlan) -> list[str]:
    """The lines behind the plan's own."""
    lines = ["", *field("method", method_of(plan))]
    for number, (name, what) in enumerate(sections_of(plan)):
        head = f"{'' if number else 'sections':<{INDENT}}{name:<{NAMES}}"
        lines += textwrap.wrap(what, WIDTH - INDENT, initial_indent=head, subsequent_indent=" " * len(head))
    return lines


def method_of(plan: RowPlan) -> str:
    assert plan.selection is not None
    way, tile = plan.selection.way, plan.tile
    if isinstance(way, Streaming):
        text = (THRESHOLD if way.groups else STREAMING).replace("{keys}", str(way.note * tile.vector))
    else:
        if isinstance(way, Packed):
            lanes = "one lane" if tile.threads_per_row == 1 else f"{tile.threads_per_row} lanes"
            text = BY_WORDS + f".{BY_GROUPS}" * (way.group > 1)
            return text.format(lanes=lanes, sorted=way.sorted, clipped=CLIPPED * way.clipped, group=way.group)
        text = {OneByOne: REPEATED, InWarp: BY_TEAM, SmallK: HELD, LargeK: DENSE}[type(way)]
        if isinstance(way, InWarp) and way.delegates > 1:
            text = BY_DELEGATES
    return text.format(k=plan.selection.k, lanes=tile.threads_per_row)


def sections_of(plan: RowPlan) -> Iterator[tuple[str, str]]:
    """Their names, and what each does."""
    assert plan.selection is not None
    way, k = plan.selection.way, plan.selection.k
    if isinstance(way, OneByOne):
        yield "keys", "as integers of the same order, in registers"
        yield "choose", "the largest key of all lanes, the first where several are equal; then it is masked"
    elif isinstance(way, Packed):
        order = "what there is room for of a key's order" if way.clipped else "a key's order"
        yield "words", f"{order} above its column: the larger word is the one to choose"
        if way.group > 1:
            yield "groups", "the best of them, whose keys are left to choose from"
        yield "choose", "the best words, by Batcher's networks: they are sorted, and merged"
        if way.clipped:
            yield "again", "where bits decide that words have no room for: by those, of keys that are alike in others"
    elif isinstance(way, InWarp):
        if plan.selection.limit:
            yield "groups", f"of a row, the best {plan.selection.limit.best}: the keys of others are masked"
        yield "bar", f"the least of the {k} largest delegates" if k > 1 else "the largest delegate"
        yield "collect", "the keys that reach the bar are candidates"
        yield "rank", "by the number of larger candidates; where ties make too many, repeated argmax"
    elif isinstance(way, SmallK):
        yield "read", "the row, all of its vectors at once; keys stay in registers"
        yield "bar", "what enough delegates reach, by rank within each warp and then among warps"
        yield "collect", "the keys that reach it are candidates" + ", in the first block" * (plan.cluster > 1)
        yield "rank", RANK
    elif isinstance(way, LargeK):
        yield "read", "the row, all of its vectors at once; keys stay in registers"
        yield "bar", "what enough delegates reach, by interpolation search" if way.groups else "below all keys"
        yield "pack", "the keys that reach it are candidates: each thread counts its own, then writes them"
        yield "rank", RANK
    else:
        yield from sections_by_threshold(way, k, plan)
    yield "write", "what is computed at the chosen columns"


def sections_by_threshold(way: Streaming, k: int, plan: RowPlan) -> Iterator[tuple[str, str]]:
    segments = way.segment < plan.tile.per_thread
    yield "stream", "the pass over the row" + ", in segments" * segments
    if way.groups:
        yield "threshold", "behind each segment " * segments + "what enough largest keys reach, by bisection"
    else:
        yield "threshold", "none before the first cut"
    yield "collect", "vectors whose delegate exceeds it are read again; their elements above it are candidates"
    yield "cut", f"where candidates have no more room: bucket select of the best {k} (Alabi et al., JEA 2012)"
    if plan.cluster > 1:
        yield "merge", "the candidates of the cluster's blocks go to its first block"
    yield "rank", RANK
