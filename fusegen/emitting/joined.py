"""Several steps in one launch: a function for each, and a kernel whose blocks call one of them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from fusegen.emitting.definitions import apart, in_common
from fusegen.emitting.dialect import Dialect
from fusegen.emitting.rendering import context, environment, render, tidy
from fusegen.planner.heading import unjoined
from fusegen.planner.model import Plan, Source
from fusegen.planner.programs.one_cluster import OneClusterPlan
from fusegen.planner.programs.side_by_side import LETTERS, JoinedPlan, JoinedSource, joined_lines

CALL_WIDTH = 120


def render_joined(plan: JoinedPlan) -> JoinedSource:
    """The kernel's source."""
    said = [context(part) for part in plan.parts]
    told = in_turn_context(plan, said) if isinstance(plan, OneClusterPlan) else joined_context(plan, said)
    text = environment().get_template(plan.template).render(told)
    return JoinedSource(plan, tidy(text), f"{plan.name}{plan.target.spelling.file_suffix}")


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
        # blocks of one row each need not count them, and of two halves of an array the first one's pointer reaches both
        asked = [re.search(rf"\b{param.name}\b", body) is not None for param in part.params]
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


def in_turn_context(plan: OneClusterPlan, said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same of steps that a cluster takes one after another: in front of each its own functions and constants, in a
    namespace, but for those that are the same in all that have them."""
    texts = [functions_of(part, own) for part, own in zip(plan.parts, said, strict=True)]
    common = in_common(texts)
    parts = []
    for place, (letter, what, part, own) in enumerate(zip(LETTERS, plan.said, plan.parts, said, strict=False)):
        space, body = f"step_{letter}", body_of(part, own)
        block = ["block"] * bool(re.search(r"\bblock\b", body))  # a step of one block asks for none
        parts.append(
            {
                "space": space,
                "name": f"part_{letter}",
                "said": what,
                "own": [text for text in texts[place] if text not in common],
                "signature": [*(f"unsigned {word}" for word in block), *own["signature"]],
                "body": body,
                "call": call(f"{space}::part_{letter}", [*block, *(f"{letter}_{param.name}" for param in part.params)]),
                "turns": turns(plan, place),
                "arrives": plan.counts and place + 1 == plan.shared_out,
            }
        )
    return {
        "header": list(map(unjoined, joined_lines(plan))),
        "includes": merged(own["includes"] for own in said),
        "common": common,
        "barrier": plan.target.spelling.barrier,
        "launch": plan,
        "parts": parts,
        "signature": context_words(plan),
        "t": said[0]["t"],
    }


def turns(plan: OneClusterPlan, place: int) -> str:
    """Which blocks of a step one of the launch takes."""
    count = plan.blocks_name(place)
    own = f"blockIdx.x % {plan.cluster}" if plan.shared_out else "blockIdx.x"
    if place >= plan.shared_out:
        return f"unsigned block = {own}; block < {count}; block += {plan.cluster}"
    each = plan.each[place]
    first, behind = (f"{text} * {each}" if each > 1 else text for text in ("share", "(share + 1)"))
    return f"unsigned block = {first} + {own}; block < {behind} && block < {count}; block += {plan.cluster}"


def functions_of(part: Plan, said: Mapping[str, Any]) -> list[str]:
    """What stands in front of a step's kernel: functions and constants, apart."""
    template = environment().get_template(part.template)
    seen = dict(said)
    prelude = environment().get_template("parts/prelude.j2").render(seen)
    own = template.blocks.get("functions")
    return apart(tidy(prelude + "".join(own(template.new_context(seen)) if own else ())))


def context_words(plan: JoinedPlan) -> list[str]:
    """The kernel's parameters."""
    words = Dialect(plan.target.spelling)
    return [words.parameter(param) for param in plan.params]


def call(function: str, given: Sequence[str]) -> list[str]:
    """A call with many arguments, in lines."""
    return textwrap.wrap(f"{function}({', '.join(given)});", CALL_WIDTH, subsequent_indent="    ")


def body_of(part: Plan, said: Mapping[str, Any]) -> str:
    """A step's own text, as its template has it."""
    template = environment().get_template(part.template)
    return "".join(template.blocks["body"](template.new_context(dict(said)))).strip("\n")


def merged(lists: Any) -> list[Any]:
    """Everything in any of them, once."""
    return list(dict.fromkeys(item for found in lists for item in found))
