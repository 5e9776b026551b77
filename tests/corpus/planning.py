"""The kernel or the program that a chain of the corpus becomes."""

from __future__ import annotations

from typing import Any

from fusegen.pipeline import plan
from tests.corpus.cases import Case


def planned(case: Case, target: str = "cuda:h200") -> Any:
    """Raises SpecError or NoPlan where it is refused."""
    return plan(case.traced(), target, tuned=False)
