"""Rendered sources on disk: a process that starts anew need not load the templates to know what they would say.

A source depends on its plan, on the templates and on fusegen's own code. The plan is spelled out in full (`spelled`,
every field of every part, down to the ops' texts); templates and code are told by their files' sizes and times of
change. What is found under the hash of all this is the text that rendering would give.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from fusegen.emitting.rendering import template_folder
from fusegen.errors import Where
from fusegen.language.graph import Graph, Node, Op
from fusegen.language.nodes import behind
from fusegen.language.types import DType
from fusegen.planner.model import Plan, Source
from fusegen.storage import Damaged, Store
from fusegen.storage import Key as AnyKey
from fusegen.version import PACKAGE, VERSION

log = logging.getLogger("fusegen.cache")

Render = Callable[[Plan], Source]
Numbers = dict[Node | Op, int]  # of what is spelled once, and then known by its number


@dataclass(frozen=True, slots=True)
class Key(AnyKey):
    """Everything that a source depends on; its `text` is the plan's spelling, its `arch` the target's name."""

    code: str  # the hash over fusegen's code and templates


def remembered(plan: Plan, render: Render) -> Source:
    """`render(plan)`, or what it was when this plan was last rendered by these templates."""
    try:
        key = key_of(plan)
    except TypeError as error:
        log.debug("not remembered: the source of %s: %s", plan.name, error)
        return render(plan)
    store = Store("sources")
    if (found := store.load(key, lambda facts, _: unpack(facts, plan))) is not None:
        return found
    source = render(plan)
    store.store(key, {"text": source.text, "reference": source.reference, "filename": source.filename}, b"")
    return source


def unpack(facts: Mapping[str, Any], plan: Plan) -> Source:
    """The source behind the facts of a file. Raises Damaged for anything but what `remembered` wrote."""
    texts = [facts.get(name) for name in ("text", "reference", "filename")]
    if not all(isinstance(text, str) for text in texts):
        raise Damaged("it lacks a text")
    return Source(plan, *map(str, texts))


# ---------------------------------------------------------------- what a source depends on


def key_of(plan: Plan) -> Key:
    """Raises TypeError for a plan that holds what has no spelling."""
    text = hashlib.sha256(spelled(plan).encode()).hexdigest()
    return Key(plan.name, plan.target.name, text, code_stamp())


@cache
def code_stamp() -> str:
    """A hash over the files of fusegen's code and its templates: their names, sizes and times of change."""
    folders = (PACKAGE, template_folder())
    found = [
        *sys.version_info[:2],
        VERSION,
        *(stamp for folder in folders for stamp in stamps(str(folder))),
    ]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def stamps(folder: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as listing:
        for item in sorted(listing, key=lambda item: item.name):
            if item.is_dir():
                if item.name != "__pycache__":
                    yield from stamps(item.path)
            else:
                facts = item.stat()
                yield item.path, facts.st_size, facts.st_mtime_ns


def spelled(plan: Plan) -> str:
    """The plan in full: equal texts mean plans that render alike."""
    words: list[str] = []
    numbers: Numbers = {}
    both = dict.fromkeys((*nodes_of(plan.graph), *nodes_of(plan.lowered)))
    for op in dict.fromkeys(node.op for node in both):
        numbers[op] = len(numbers)
        spell({f.name: getattr(op, f.name) for f in fields(Op)}, words, numbers)
    for node in both:  # arguments first, so that each is known by its number
        numbers[node] = len(numbers)
        spell({f.name: getattr(node, f.name) for f in fields(Node)}, words, numbers)
    spell(plan, words, numbers)
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
    elif value is None or isinstance(value, (str, int, float)):  # bool is an int, and says True
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
        raise TypeError(f"a plan holds {value!r}, which has no spelling")


def alone(value: Any, numbers: Numbers) -> str:
    """The spelling of one element of a set, which has no order of its own."""
    words: list[str] = []
    spell(value, words, numbers)
    return " ".join(words)
