"""render(plan): a Plan becomes the text of a kernel, by Jinja2 templates.

Whatever can be wrong was decided in the plan; `fusegen.emitting.rows.spelling` turns its parts into the target's words,
and the templates put them in order. Output is deterministic to the byte: no time, path, id or set order.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fusegen.emitting.loops import each, folded, strided
from fusegen.errors import RequestError
from fusegen.language.reference import reference_source
from fusegen.planner.model import Plan, RowPlan, Source
from fusegen.version import PACKAGE

if TYPE_CHECKING:
    from jinja2 import Environment


MOST_COLUMNS = 140  # of a line of code


class Spelling(Protocol):
    def context(self) -> dict[str, Any]: ...


def template_folder() -> Path:
    """Of the installed package, or of the checkout this module lies in."""
    packaged = PACKAGE / "templates"
    return packaged if packaged.is_dir() else PACKAGE.parent / "templates"


@cache
def environment() -> Environment:
    """The templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(template_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is C++
        optimized=False,  # folding constants takes a tenth of a compile, and a template is rendered a few times
    )
    made.filters["each"] = each
    made.filters["strided"] = strided
    made.filters["folded"] = folded
    return made


def render(plan: Plan) -> Source:
    """The kernel's source and the numpy reference beside it. Raises RequestError for what is no plan."""
    if not isinstance(plan, Plan):
        raise RequestError(f"render takes a plan, and {plan!r} is none\n  fusegen.plan(chain) makes one")
    text = environment().get_template(plan.template).render(context(plan))
    suffix = plan.target.spelling.file_suffix
    return Source(plan, tidy(text), reference_source(plan.graph), f"{plan.name}{suffix}")


def context(plan: Plan) -> dict[str, Any]:
    """What the plan's template sees: each kind of plan has a speller of its own."""
    return speller(plan).context()


def speller(plan: Plan) -> Spelling:
    """Imports the one that is needed: a first result waits for it."""
    if isinstance(plan, RowPlan):
        return row_speller(plan)
    from fusegen.planner.columns.plan import ColumnsPlan

    if isinstance(plan, ColumnsPlan):
        from fusegen.emitting.columns.spelling import ColumnsSpeller

        return ColumnsSpeller(plan)
    from fusegen.planner.sorting.plan import SlotsPlan

    if isinstance(plan, SlotsPlan):
        from fusegen.emitting.sorting.spelling import SlotsSpeller

        return SlotsSpeller(plan)
    from fusegen.planner.attention.parts import AttentionPlan
    from fusegen.planner.attention.weights import WeightsPlan
    from fusegen.planner.attention.weights_wgmma import WgmmaWeightsPlan
    from fusegen.planner.attention.wgmma import WgmmaAttentionPlan
    from fusegen.planner.attention.wide import WideAttentionPlan
    from fusegen.planner.attention.wide_wgmma import WideWgmmaAttentionPlan
    from fusegen.planner.products.gemm import GemmPlan
    from fusegen.planner.products.tcgen05 import Tcgen05Plan
    from fusegen.planner.products.wgmma import WgmmaPlan

    if isinstance(plan, WgmmaAttentionPlan):
        from fusegen.emitting.attention.wgmma import WgmmaAttentionSpeller

        return WgmmaAttentionSpeller(plan)
    if isinstance(plan, WideWgmmaAttentionPlan):
        from fusegen.emitting.attention.wide_wgmma import WideWgmmaAttentionSpeller

        return WideWgmmaAttentionSpeller(plan)
    if isinstance(plan, WideAttentionPlan):
        from fusegen.emitting.attention.wide import WideAttentionSpeller

        return WideAttentionSpeller(plan)
    if isinstance(plan, AttentionPlan):
        from fusegen.emitting.attention.spelling import AttentionSpeller

        return AttentionSpeller(plan)
    if isinstance(plan, WgmmaWeightsPlan):
        from fusegen.emitting.attention.weights_wgmma import WgmmaWeightsSpeller

        return WgmmaWeightsSpeller(plan)
    if isinstance(plan, WeightsPlan):
        from fusegen.emitting.attention.weights import WeightsSpeller

        return WeightsSpeller(plan)
    if isinstance(plan, Tcgen05Plan):
        from fusegen.emitting.products.tcgen05 import Tcgen05Speller

        return Tcgen05Speller(plan)
    if isinstance(plan, WgmmaPlan):
        from fusegen.emitting.products.wgmma import WgmmaSpeller

        return WgmmaSpeller(plan)
    if isinstance(plan, GemmPlan):
        from fusegen.emitting.products.mma import GemmSpeller

        return GemmSpeller(plan)
    raise TypeError(f"{plan.name}: nothing spells a {type(plan).__name__}")


def row_speller(plan: RowPlan) -> Spelling:
    if plan.selection:
        from fusegen.emitting.selections.selection import SelectionSpeller

        return SelectionSpeller(plan)
    from fusegen.emitting.rows.spelling import Speller

    return Speller(plan)


def tidy(text: str) -> str:
    """No trailing blanks, no runs of blank lines, no line that is too long, one newline at the end."""
    lines: list[str] = []
    for line in text.splitlines():
        line = line.rstrip()
        if line or (lines and lines[-1] and not lines[-1].endswith("{")):
            lines += broken(line)
    return "\n".join(lines).strip("\n") + "\n"


def broken(line: str) -> list[str]:
    """A line of code, in several where it is too long: broken before an operator. Comments and texts stay."""
    code = line.partition("//")[0]
    if len(line) <= MOST_COLUMNS or '"' in line or len(code) < MOST_COLUMNS:
        return [line]
    indent = len(line) - len(line.lstrip()) + 4
    at = max(line.rfind(operator, indent, MOST_COLUMNS) for operator in (" ? ", " : ", " + ", " && "))
    return [line] if at < 0 else [line[:at], *broken(" " * indent + line[at + 1 :])]
