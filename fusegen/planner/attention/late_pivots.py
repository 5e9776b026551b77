"""When a row keeps the pivot of an earlier tile, though some of its logits are larger.

Exponentials are made against a pivot, so that none is too large. It need not be the largest logit: one that logits pass
by a little will do, as f32 and bf16 have room for weights of 2^8, and f16 too. So a tile whose logits are above no
row's pivot by more needs no largest logit of the row, which four lanes would have to tell each other, and no sum of it
shrinks. Most tiles behind a row's first one are such. FlashAttention-4
rescales sums as rarely. Only a row whose own logits pass its pivot by more raises it, whatever other rows of its warp
do: its bits do not hang on theirs.
"""

from __future__ import annotations

from fusegen.language.types import f16
from fusegen.planner.attention.parts import AttentionPlan, Behind, ElementBody
from fusegen.planner.model import Number, Statement, Value
from fusegen.planner.parts import used_by

# Powers of 2 that a row's logits may be above its pivot; 4 and 12 took the same within 0.5 %. Of normal queries and
# keys, heads x rows x numbers, us, with and without (one H200, 2026-12-01, medians by turns, L2 cold): all keys
# 32 x 4096 x 128 377 and 400, 16 x 16384 x 128 3178 and 3404, 32 x 4096 x 64 267 and 282; causal 32 x 4096 x 128 207
# and 222, 16 x 16384 x 64 949 and 1003; a window of 1024 123 and 129. With queries six times as large 392 and 399, 218
# and 222. ALiBi took 260 and 249: its logits grow from tile to tile.
LATE = 8.0


def late_of(plan: AttentionPlan, scale: float) -> float:
    """By how much a plan's logits, `scale` times what its bodies make, may pass a pivot, in powers of 2; 0 where each
    tile's largest logit is asked for, or has another factor, where f16 weights are made larger still, where logits grow
    with their columns, and beside a tanh of each score, which leaves no registers for it."""
    larger = plan.dtype is f16 and bool(plan.weight.body)
    grows, capped = bool(plan.free.counted), bool(tangent_of(plan.free))
    if plan.extreme or not plan.softmaxed or scale <= 0 or larger or grows or capped or asks_top(plan.behind):
        return 0.0
    return LATE


def asks_top(behind: Behind) -> bool:
    """Is a row's largest logit itself asked for behind the last tile? It is not where a pivot will do: where the
    logarithm of the sum is added to it, and where it is compared with an infinity."""
    logs = {s.name for s in behind.row_body if s.op.name == "log" and is_value(s.args[0], {behind.total})}
    tops = {behind.top}
    for s in behind.row_body:
        asked = [arg for arg in s.args if is_value(arg, tops)]
        if not asked:
            continue
        if s.op.name == "where" and len(asked) == 1 and s.args[0] not in asked:
            tops.add(s.name)
        elif not (is_summed(s, tops, logs) or is_tested(s)):
            return True
    stored = {store.value for store in (*behind.stores, *behind.row_stores)}
    return bool(behind.pivot) or not tops.isdisjoint(used_by(behind.body) | used_by(behind.pivot_body) | stored)


def is_value(arg: object, names: set[str]) -> bool:
    return isinstance(arg, Value) and arg.name in names


def is_summed(s: Statement, tops: set[str], logs: set[str]) -> bool:
    """The sum of a pivot and the logarithm of a sum of exponentials that are made against it?"""
    return s.op.name == "add" and any(
        is_value(one, tops) and is_value(other, logs) for one, other in (s.args, s.args[::-1])
    )


def is_tested(s: Statement) -> bool:
    """Compared with an infinity?"""
    return s.op.name == "eq" and any(
        isinstance(arg, Number) and abs(float(arg.value)) == float("inf") for arg in s.args
    )


def tangent_of(body: ElementBody) -> str:
    """The name of a body's only tanh, as soft caps have one; empty where there is none, or several."""
    found = [s.name for s in body.body if s.op.name == "tanh" and isinstance(s.args[0], Value)]
    return found[0] if len(found) == 1 else ""
