"""What every way to choose columns is spelled with."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from fusegen.emitting.dialect import all_of
from fusegen.emitting.rows.frame import Part, in_later_turns
from fusegen.emitting.rows.spelling import Speller
from fusegen.planner.heading import WIDTH
from fusegen.planner.rows.tails import single


class Choice(Part, ABC):
    """The walk that chooses, of one plan; `parts` are those of its walks over rows."""

    def __init__(self, parts: Speller) -> None:
        super().__init__(parts.frame)
        assert self.plan.selection is not None
        self.parts = parts
        self.selection = self.plan.selection
        self.last = self.plan.stages[-1]
        self.spelling = self.plan.target.spelling

    @abstractmethod
    def walk(self) -> object:
        """What the template prints of it."""

    @abstractmethod
    def said(self) -> Mapping[str, Any]:
        """What templates ask for under `choose`."""

    def title(self) -> list[str]:
        number = len(self.plan.stages)
        best = f"choose {self.selection.columns} = the columns of the {self.selection.k} largest {self.selection.key}"
        text = f"walk {number} of {number}: {self.last.title + '; ' if self.last.title else ''}{best}"
        return textwrap.wrap(text, WIDTH, subsequent_indent="  ")

    def inside(self) -> str:
        """When element j of a vector lies in the row; empty where every one does."""
        turns = single(self.plan)
        return "" if turns is None else in_later_turns(f"col + j < {self.frame.cols}", turns)

    def none(self, candidates: str, rank: str) -> str:
        """What stands for a rank behind the last candidate: no entry; in a row without any, where that is NaN, the
        column of that number."""
        return f"{candidates} ? 0 : entry_of(-INFINITY, {rank})" if self.selection.bare else "0"

    def team_guard(self) -> str:
        if not self.inside():
            return self.frame.guard()
        return all_of("live" * self.plan.lacks_rows, self.inside())
