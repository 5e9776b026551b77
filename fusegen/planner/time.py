"""What the estimates of all kinds of plans share."""

from __future__ import annotations

from collections.abc import Iterable

from fusegen.planner.traffic import Traffic
from fusegen.targets.base import Target


def overlapped(limits_us: Iterable[float], exponent: float) -> float:
    """The time that several limits of a launch take together: their p-norm.

    None of them can be undercut, and they overlap, but not wholly: the larger the exponent, the more of the shorter
    ones is hidden behind the longest. The terms are added in their order, on every version of Python to the same bits.
    """
    total = 0.0
    for limit in limits_us:
        total += limit**exponent
    return float(total ** (1 / exponent))


def floor_us(target: Target, moved: Traffic) -> float:
    """What no kernel without matrix products can undercut: bytes, once each, and flops, at the data sheet's rates."""
    return max(moved.ideal / (target.dram_gbs * 1e3), moved.flops / (target.fp32_tflops * 1e6))
