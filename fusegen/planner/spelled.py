"""A graph and what is made of it spelled out in full: equal texts mean that they are the same to all of fusegen.

What is kept on disk of a search or of a rendered source stands under the hash of such a text, and of the code that made
it, which is told by its files' sizes and times of change.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from fusegen.errors import Where
from fusegen.language.graph import Graph, Node, Op
from fusegen.language.nodes import behind
from fusegen.language.types import DType
from fusegen.storage import Key
from fusegen.version import PACKAGE, VERSION

Numbers = dict[Node | Op, int]  # of what is spelled once, and then known by its number


@dataclass(frozen=True, slots=True)
class SpelledKey(Key):
    """Everything that an entry made of a graph depends on; its `text` is the spelling, its `arch` the target's name."""

    code: str  # the hash over fusegen's code, and what else makes the entry


def key_of(entry: str, arch: str, spelling: str, code: str) -> SpelledKey:
    return SpelledKey(entry, arch, hashlib.sha256(spelling.encode()).hexdigest(), code)


@cache
def stamp_of(*folders: Path) -> str:
    """A hash over the files of fusegen's code and of these folders: their names, sizes and times of change."""
    files = (stamp for folder in (PACKAGE, *folders) for stamp in stamps(str(folder)))
    found = [*sys.version_info[:2], VERSION, *files]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def spelled(value: Any, *graphs: Graph) -> str:
    """`value` in full, down to the texts of its graphs' ops. Raises TypeError where it holds what has no spelling."""
    words: list[str] = []
    numbers: Numbers = {}
    nodes = dict.fromkeys(node for graph in graphs for node in nodes_of(graph))
    for op in dict.fromkeys(node.op for node in nodes):
        numbers[op] = len(numbers)
        spell({f.name: getattr(op, f.name) for f in fields(Op)}, words, numbers)
    for node in nodes:  # arguments first, so that each is known by its number
        numbers[node] = len(numbers)
        spell({f.name: getattr(node, f.name) for f in fields(Node)}, words, numbers)
    spell(value, words, numbers)
    return " ".join(words)


def nodes_of(graph: Graph) -> tuple[Node, ...]:
    """Every node, also of an input that nothing reads, those of the graph that this one was made of, and what has a
    name and is needed no more, as a cast is that a product makes by itself."""
    before = nodes_of(graph.origin) if graph.origin else ()
    return tuple(dict.fromkeys([*before, *(t.node for t in graph.inputs), *graph.nodes, *behind(graph.names)]))


def spell(value: Any, words: list[str], numbers: Numbers) -> None:
    """Add what `value` is to `words`: numbers and texts, and any dataclass, tuple, set or table of what has a spelling.

    Raises TypeError for anything else.
    """
    if isinstance(value, (DType, Enum)):
        words.append(f"{type(value).__name__} {value.name}")
    elif value is None or isinstance(value, (str, int, float, Fraction)):  # bool is an int, and says True
        words.append(f"{type(value).__name__} {value!r}")
    elif isinstance(value, Op) and value not in numbers:  # a statement's, where a pass has put it for another
        numbers[value] = len(numbers)
        spell({f.name: getattr(value, f.name) for f in fields(Op)}, words, numbers)
    elif isinstance(value, (Node, Op)):
        words.append(f"number {numbers[value]}")
    elif isinstance(value, Where):
        words.append(f"where {str(value)!r}")
    elif isinstance(value, tuple):
        words.append(f"tuple {len(value)}")
        for item in value:
            spell(item, words, numbers)
    elif isinstance(value, frozenset):
        words.append(f"set {len(value)}")
        spell(tuple(sorted(alone(item, numbers) for item in value)), words, numbers)
    elif isinstance(value, Mapping):
        words.append(f"table {len(value)}")
        for key, item in value.items():
            spell(key, words, numbers)
            spell(item, words, numbers)
    elif is_dataclass(value) and not isinstance(value, type):
        words.append(type(value).__name__)
        for field in fields(value):
            spell(getattr(value, field.name), words, numbers)
    else:
        raise TypeError(f"found {value!r}, which has no spelling")


def alone(value: Any, numbers: Numbers) -> str:
    """The spelling of one element of a set, which has no order of its own."""
    words: list[str] = []
    spell(value, words, numbers)
    return " ".join(words)


def stamps(folder: str) -> Iterator[tuple[str, int, int]]:
    """The files of a folder and of those in it: path, bytes, and when each was changed."""
    with os.scandir(folder) as listing:
        for item in sorted(listing, key=lambda item: item.name):
            if item.is_dir():
                if item.name != "__pycache__":
                    yield from stamps(item.path)
            else:
                facts = item.stat()
                yield item.path, facts.st_size, facts.st_mtime_ns
