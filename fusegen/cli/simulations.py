"""What `inspect --what resources` says of a loop that was simulated; it is never called measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fusegen.cli.showing import say
from fusegen.compiling import Binary
from fusegen.errors import MissingError, RequestError
from fusegen.measuring.simulating import simulated
from fusegen.measuring.simulation import Simulated
from fusegen.planner.model import Plan

LEAST_SHARE = 0.01  # of what is shown
MOST_REASONS = 3


def tried(plan: Plan, binary: Binary) -> tuple[Simulated | None, str]:
    """What came of it, or why nothing did."""
    try:
        return simulated(plan, binary), ""
    except (RequestError, MissingError) as error:
        return None, str(error).splitlines()[0]


def facts(found: Simulated | None, reason: str) -> dict[str, Any]:
    """In JSON. Shares of a pipe and of waiting are of the loop's cycles."""
    if found is None:
        return {"simulated": None, "not_simulated": reason}
    return {"simulated": {**asdict(found), "bound": found.bound}}


def show(found: Simulated | None, reason: str) -> None:
    for name, value in lines(found, reason):
        say(f"{name:<18}{value}")


def lines(found: Simulated | None, reason: str) -> list[tuple[str, str]]:
    """Names and what is said of them."""
    if found is None:
        return [("simulated", f"no: {reason}")]
    fed = f"fed {found.feed_bytes:.0f} B a cycle after {found.feed_latency}"
    return [
        ("simulated", f"{found.cycles:,.0f} cycles a turn of the loop at {found.start:#x}; by a model, not measured"),
        ("  loop", f"{found.instructions} instructions, {found.products} of them MFMA; {fed}"),
        ("  waves", f"{found.waves} on a compute unit, {found.waves // found.blocks} to a block"),
        ("  busy", shares(found.busy)),
        ("  LDS", conflicts(found)),
        ("  waves wait for", shares(found.waiting, MOST_REASONS)),
    ]


def conflicts(found: Simulated) -> str:
    """What lanes that meet in a bank of the LDS cost it."""
    share = f"{found.conflicts:.0%} of its cycles for" if found.conflicts else "no"
    unknown = f"; addresses of {found.not_followed} instructions are not known" if found.not_followed else ""
    return f"{share} lanes that meet in a bank{unknown}"


def shares(of: Mapping[str, float], most: int = 5) -> str:
    """The largest ones."""
    shown = sorted(((name, share) for name, share in of.items() if share >= LEAST_SHARE), key=lambda s: -s[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in shown[:most]) or "nothing"
