"""validate(kernel): does it compute what its chain means? Inputs, tolerances and verdict, all from the graph.

A verdict that was kept is read without the rest, which is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fusegen.validation.report import Case, Report, Worst

if TYPE_CHECKING:
    from fusegen.validation.bounded import Bounded
    from fusegen.validation.bounds import analyse
    from fusegen.validation.launches import narrowed
    from fusegen.validation.lengths import at_lengths, interesting_lengths, validate_chain
    from fusegen.validation.programs import validate

__all__ = [
    "Bounded",
    "Case",
    "Report",
    "Worst",
    "analyse",
    "at_lengths",
    "interesting_lengths",
    "narrowed",
    "validate",
    "validate_chain",
]

_LATER = {
    "Bounded": "bounded",
    "analyse": "bounds",
    "at_lengths": "lengths",
    "interesting_lengths": "lengths",
    "narrowed": "launches",
    "validate": "programs",
    "validate_chain": "lengths",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"fusegen.validation.{_LATER[name]}"), name)
    raise AttributeError(f"module 'fusegen.validation' has no attribute {name!r}")
