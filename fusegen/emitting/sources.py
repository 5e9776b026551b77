"""Rendered sources on disk: a process that starts anew need not load the templates to know what they would say.

A source depends on its plan, on the templates and on fusegen's own code. The plan is spelled out in full (`spelled`,
every field of every part, down to the ops' texts); templates and code are told by their files' sizes and times of
change. What is found under the hash of all this is the text that rendering would give.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fusegen.emitting.rendering import template_folder
from fusegen.planner.model import Plan, Source
from fusegen.planner.spelled import spelled as in_full
from fusegen.planner.spelled import stamps
from fusegen.storage import Damaged, Store
from fusegen.storage import Key as AnyKey
from fusegen.version import PACKAGE, VERSION

log = logging.getLogger("fusegen.cache")

Render = Callable[[Plan], Source]


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


def spelled(plan: Plan) -> str:
    """The plan in full: equal texts mean plans that render alike."""
    return in_full(plan, plan.graph, plan.lowered)
