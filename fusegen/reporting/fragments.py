"""Chains, plans and reports as HTML for notebooks: `_repr_html_` of each comes here."""

from __future__ import annotations

import html
from typing import Any

from fusegen.language.spec import Chain
from fusegen.planner.heading import header_facts, summary
from fusegen.planner.model import Plan
from fusegen.planner.programs.model import ProgramPlan
from fusegen.reporting.collecting import verdict
from fusegen.reporting.items import picture
from fusegen.reporting.layout import drawing
from fusegen.reporting.pages import render
from fusegen.validation import Report

PAGE_HEIGHT = 720  # CSS pixels of a whole report's frame
AROUND, EACH_PLAN, EACH_CASE = 230, 330, 55  # of a frame: around a graph, a plan's figures, a case of a validation


def fragment(thing: object) -> str:
    """A chain's graph, a plan's figures with it, or a validation's cases, in a frame. Raises TypeError for anything
    else."""
    if isinstance(thing, Chain):
        return small(thing.graph, str(thing), None, [])
    if isinstance(thing, ProgramPlan):
        return of_program(thing)
    if isinstance(thing, Plan):
        return small(thing.graph, f"{thing.name} for {thing.target}", None, [(thing, header_facts(thing))])
    if isinstance(thing, Report):
        return of_report(thing)
    raise TypeError(f"{thing!r} is no chain, no plan, and no report of a validation")


def framed(page: str, height: float = PAGE_HEIGHT, scripts: bool = True) -> str:
    """A page in a frame of an origin of its own, which can reach nothing of the notebook's. `scripts`: it may run its
    own, by which tables sort."""
    text = html.escape(page, quote=True)
    return (
        f'<iframe sandbox="{"allow-scripts" if scripts else ""}" srcdoc="{text}" title="fusegen" '
        f'style="width:100%;height:{min(height, PAGE_HEIGHT):.0f}px;border:1px solid #8886;border-radius:6px"></iframe>'
    )


def of_program(plan: ProgramPlan) -> str:
    plans = [(step.plan, header_facts(step.plan)) for step in plan.steps]
    return small(plan.graph, f"{plan.name} for {plan.target}, {len(plan.launches)} launches", plan, plans)


def of_report(found: Report) -> str:
    page = render("cases.html.j2", title=found.kernel, name=found.kernel, validation=verdict(found, ""))
    return framed(page, AROUND + EACH_CASE * len(found.cases), scripts=False)


def small(graph: Any, title: str, program: ProgramPlan | None, plans: list[Any]) -> str:
    """A graph, and each plan's figures."""
    seen = picture(graph, program)
    drawn = drawing(seen.items)
    page = render(
        "fragment.html.j2", title=title, graph=graph, doc=summary(graph), items=seen.items, drawing=drawn, plans=plans,
    )  # fmt: skip
    return framed(page, (drawn.height if drawn else 0) + AROUND + EACH_PLAN * len(plans), scripts=False)
