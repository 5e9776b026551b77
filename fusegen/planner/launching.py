"""A plan as a kernel of a program: what it promises of its operands where it begins while others run.

Which kernels are launched so, and what they may read early: planner/programs/dependent.py.
"""

from __future__ import annotations

from dataclasses import replace

from fusegen.planner.model import Candidates, Dependent, Param, Plan


def as_launched(found: Candidates, how: Dependent | None) -> Candidates:
    """The candidates, all of them launched like that."""
    return replace(found, plans=tuple(launched(plan, how) for plan in found.plans))


def reading_late(plan: Plan) -> Plan:
    """The plan, reading nothing before the wait: asking for slices before all else may cost a register too many."""
    return launched(plan, plan.dependent and replace(plan.dependent, ahead=frozenset()))


def launched(plan: Plan, how: Dependent | None) -> Plan:
    """The plan, launched like that."""
    if plan.dependent == how:
        return plan
    before = plan.dependent
    return replace(plan, dependent=how, params=tuple(promising(p, before, how) for p in plan.params))


def promising(param: Param, before: Dependent | None, how: Dependent | None) -> Param:
    """What earlier kernels may have written is no memory of its own until the wait. One that shares its memory for
    another reason goes on to."""
    if param.kind != "pointer" or param.output:
        return param
    was, waits = (d is not None and d.waits and param.tensor not in d.ahead for d in (before, how))
    return replace(param, shared=waits or (param.shared and not was))
