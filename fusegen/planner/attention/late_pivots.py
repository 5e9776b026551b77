"""When a row keeps the pivot of an earlier tile, though some of its logits are larger.

Exponentials are made against a pivot, so that none is too large. It need not be the largest logit: one that logits pass
by a little will do, as f32 and bf16 have room for weights of 2^8, and f16 too. So a tile whose logits are above no
row's pivot by more needs no largest logit of the row, which four lanes would have to tell each other, and no sum of it
shrinks. Most tiles behind a row's first one are such; FlashAttention-4 rescales as rarely. Only a row whose own logits
pass its pivot by more raises it, whatever other rows of its warp do: its bits do not hang on theirs.

What a row gives must not hang on its pivot then, as the product with values divided by the sum of exponentials does
not, nor the pivot plus the logarithm of that sum.
"""

from __future__ import annotations

import math

from fusegen.language.types import f16
from fusegen.planner.attention.parts import AttentionPlan, Behind
from fusegen.planner.model import Argument, Number, Statement, Value

# Powers of 2 that a row's logits may be above its pivot; 4 and 12 took the same within 0.5 %. Of normal queries and
# keys, heads x rows x numbers, us, with and without (one H200, 2026-12-01, medians by turns, L2 cold): all keys
# 32 x 4096 x 128 377 and 400, 16 x 16384 x 128 3178 and 3404, 32 x 4096 x 64 267 and 282; causal 32 x 4096 x 128 207
# and 222, 16 x 16384 x 64 949 and 1003; a window of 1024 123 and 129. With queries six times as large 392 and 399, 218
# and 222. ALiBi took 260 and 249: its logits grow from tile to tile.
LATE = 8.0


def late_of(plan: AttentionPlan, scale: float, tangent: str) -> float:
    """By how much a plan's logits, `scale` times what its bodies make, may pass a pivot, in powers of 2; 0 where a
    result hangs on the pivot, or the largest logit has another factor, where f16 weights are made larger still, where
    logits grow with their columns, and beside a `tangent` of each score, which leaves no registers for it."""
    larger = plan.dtype is f16 and bool(plan.weight.body)
    grows = bool(plan.free.counted)
    if plan.extreme or not plan.softmaxed or scale <= 0 or larger or grows or tangent or hangs_on_pivot(plan.behind):
        return 0.0
    return LATE


def hangs_on_pivot(behind: Behind) -> bool:
    """Would another pivot change a result? Where it is lower by d, sums of exponentials and of their products with
    values are e^d times as large: values are told apart by their power of that, `powers`; what is not among them has
    none. A pivot itself and the logarithm of a sum may only be added to each other, or a pivot be compared with an
    infinity."""
    powers = {name: 1 for name in (behind.total, behind.sums) if name}
    pivots, logs = {behind.top}, set[str]()
    for s in (*behind.row_body, *behind.pivot_body, *behind.body):
        if any(is_one_of(arg, pivots | logs) for arg in s.args):
            if s.op.name == "where" and not is_one_of(s.args[0], pivots | logs) and is_guarded(s, pivots):
                pivots.add(s.name)
            elif not (is_logsumexp(s, pivots, logs) or is_compared(s, math.inf)):
                return True
        elif s.op.name == "log" and power(s.args[0], powers) == 1:
            logs.add(s.name)
        elif any(power(arg, powers) for arg in s.args):
            found = power_made(s, powers)
            if found is None:
                return True
            powers[s.name] = found
    stored = [store.value for store in (*behind.stores, *behind.row_stores)]
    return bool(behind.pivot) or any(powers.get(name) or name in pivots | logs for name in stored)


def power(arg: Argument, powers: dict[str, int]) -> int:
    return powers.get(arg.name, 0) if isinstance(arg, Value) else 0


def power_made(s: Statement, powers: dict[str, int]) -> int | None:
    """That of what is made of values of which some have one; None where it has no single one."""
    own = [power(arg, powers) for arg in s.args]
    if s.op.name == "mul":
        return sum(own)
    if s.op.name == "div":
        return own[0] - own[1]
    if s.op.name == "where" and not own[0]:
        left = {n for arg, n in zip(s.args[1:], own[1:], strict=True) if not is_number(arg, 0.0)}
        return left.pop() if len(left) == 1 else None
    return 0 if is_compared(s, 0.0) else None


def is_one_of(arg: Argument, names: set[str]) -> bool:
    return isinstance(arg, Value) and arg.name in names


def is_number(arg: Argument, number: float) -> bool:
    return isinstance(arg, Number) and abs(float(arg.value)) == number


def is_guarded(s: Statement, pivots: set[str]) -> bool:
    """A pivot, or a number in its place where that is infinite?"""
    return any(is_one_of(arg, pivots) for arg in s.args[1:]) and any(is_number(arg, 0.0) for arg in s.args[1:])


def is_compared(s: Statement, number: float) -> bool:
    """Asked whether it is this number?"""
    return s.op.name in ("eq", "ne") and any(is_number(arg, number) for arg in s.args)


def is_logsumexp(s: Statement, pivots: set[str], logs: set[str]) -> bool:
    return s.op.name == "add" and any(
        is_one_of(one, pivots) and is_one_of(other, logs) for one, other in (s.args, s.args[::-1])
    )
