"""Columns that are chosen within a row's best groups alone, as routers of experts on several nodes do."""

from __future__ import annotations

from typing import Any

from fusegen.errors import SpecError
from fusegen.language.nodes import GroupLimit
from fusegen.language.trace import Value, caller
from fusegen.language.types import f32

MOST_SUMMED = 2  # keys of a group: their sum is rounded once


def limit_of(x: Value, groups: Any, best: Any, by: Any) -> GroupLimit | None:
    """As F.topk's arguments say it; None without groups. Raises SpecError for other numbers, and for keys of i32."""
    if groups is None and best is None:
        return None
    for name, value in (("groups", groups), ("best_groups", best), ("by", by)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"topk: {name}={value!r}; groups, best_groups and by are integers of at least 1", caller())
    if best > groups or by > MOST_SUMMED:
        wanted = f"best_groups up to {groups}" if best > groups else f"by=1 or by={MOST_SUMMED}"
        raise SpecError(f"topk: found groups={groups}, best_groups={best}, by={by}; wanted {wanted}", caller())
    if x.dtype is not f32:
        raise SpecError(f"topk: found keys of {x.dtype}, wanted floats; groups are ordered by sums of them", caller())
    cols = x.shape[-1]
    if isinstance(cols, int) and (cols % groups or cols // groups < by):
        raise SpecError(f"topk: a row of {cols} is not {groups} groups of one length, at least {by} each", caller())
    return GroupLimit(groups, best, by)
