"""A chain of the corpus: traced when it is asked for, so that one that is refused leaves the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusegen import chain
from fusegen.language.spec import Chain

CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A spec's function, its sizes, and whose kernel it is after."""

    kind: str
    function: Callable[..., Any]
    sizes: dict[str, int]

    @property
    def name(self) -> str:
        return self.function.__name__

    def traced(self) -> Chain:
        """Raises SpecError where the language refuses it."""
        return chain(**self.sizes)(self.function)


def case(**sizes: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to the corpus; its file says of what kind it is."""

    def added(function: Callable[..., Any]) -> Callable[..., Any]:
        assert function.__name__ not in CASES, function.__name__
        CASES[function.__name__] = Case(function.__module__.rpartition(".")[2], function, sizes)
        return function

    return added
