"""Several steps in one launch: a function for each, and a kernel whose blocks call one of them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from fusegen.emitting.dialect import Dialect
from fusegen.emitting.rendering import context, environment, render, tidy
from fusegen.planner.heading import unjoined
from fusegen.planner.model import Plan, RowPlan, Source
from fusegen.planner.programs.side_by_side import LETTERS, JoinedPlan, JoinedSource, joined_lines

CALL_WIDTH = 120


def render_joined(plan: JoinedPlan) -> JoinedSource:
    """The kernel's source."""
    said = [context(part) for part in plan.parts]
    text = environment().get_template(plan.template).render(joined_context(plan, said))
    return JoinedSource(plan, tidy(text), f"{plan.name}{plan.target.spelling.file_suffix}")


ROWS = "rows"


def rendered(plan: Plan | JoinedPlan) -> Source | JoinedSource:
    """What is launched, as text."""
    return render_joined(plan) if isinstance(plan, JoinedPlan) else render(plan)


def joined_context(plan: JoinedPlan, said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the template sees: of the functions in front of the steps those that any of them calls. What a step's rows
    are reduced by is the same in all that reduce some, so one of these stands for all; of a name there is one for each
    type."""
    main = next((own for own in said if own["row_reduces"] or own["group_reduces"]), said[0])
    functions = {name for own in said for name in own["uses"]["functions"]}
    parts = []
    for place, (letter, what, part, own) in enumerate(zip(LETTERS, plan.said, plan.parts, said, strict=False)):
        body = body_of(part, own)
        # blocks of one row each are as many as there are rows, and need not count them
        asked = [param.name != ROWS or re.search(rf"\b{ROWS}\b", body) is not None for param in part.params]
        given = (f"{letter}_{param.name}" for param, asks in zip(part.params, asked, strict=True) if asks)
        parts.append(
            {
                "name": f"part_{letter}",
                "said": what,
                "signature": [text for text, asks in zip(own["signature"], asked, strict=True) if asks],
                "body": body,
                "call": call(f"part_{letter}", ["block", *given]),
                "count": plan.blocks_name(place) if place + 1 < len(said) else "",
            }
        )
    words = context_words(plan)
    return {
        **main,
        "header": list(map(unjoined, joined_lines(plan))),
        "includes": merged(own["includes"] for own in said),
        "constants": merged(own["constants"] for own in said),
        "word_functions": list({f["name"]: f for own in said for f in own["word_functions"]}.values()),
        "row_reduces": list({(r.function, r.ctype): r for own in said for r in own["row_reduces"]}.values()),
        "group_reduces": list({(r.function, r.ctype): r for own in said for r in own["group_reduces"]}.values()),
        "partners": merged(own["partners"] for own in said),
        "uses": {"vec": any(own["uses"]["vec"] for own in said), "functions": functions},
        "launch": plan,
        "parts": parts,
        "signature": words,
    }


def context_words(plan: JoinedPlan) -> list[str]:
    """The kernel's parameters."""
    words = Dialect(plan.target.spelling)
    return [words.parameter(param) for param in plan.params]


def call(function: str, given: Sequence[str]) -> list[str]:
    """A call with many arguments, in lines."""
    return textwrap.wrap(f"{function}({', '.join(given)});", CALL_WIDTH, subsequent_indent="    ")


def body_of(part: RowPlan, said: Mapping[str, Any]) -> str:
    """A step's own text, as its template has it."""
    template = environment().get_template(part.template)
    return "".join(template.blocks["body"](template.new_context(dict(said)))).strip("\n")


def merged(lists: Any) -> list[Any]:
    """Everything in any of them, once."""
    return list(dict.fromkeys(item for found in lists for item in found))
