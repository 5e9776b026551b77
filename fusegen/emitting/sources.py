"""Rendered sources on disk: a process that starts anew need not load the templates to know what they would say.

A source depends on its plan, on the templates and on fusegen's own code. The plan is spelled out in full (`spelled`,
every field of every part, down to the ops' texts); templates and code are told by their files' sizes and times of
change. What is found under the hash of all this is the text that rendering would give.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from fusegen.emitting.rendering import template_folder
from fusegen.planner.model import Plan, Source
from fusegen.planner.spelled import SpelledKey, stamp_of
from fusegen.planner.spelled import key_of as spelled_key
from fusegen.planner.spelled import spelled as in_full
from fusegen.storage import Damaged, Store

log = logging.getLogger("fusegen.cache")

Render = Callable[[Plan], Source]


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


def key_of(plan: Plan) -> SpelledKey:
    """Raises TypeError for a plan that holds what has no spelling."""
    return spelled_key(plan.name, plan.target.name, spelled(plan), code_stamp())


def code_stamp() -> str:
    return stamp_of(template_folder())


def spelled(plan: Plan) -> str:
    """The plan in full: equal texts mean plans that render alike."""
    return in_full(plan, plan.graph, plan.lowered)
