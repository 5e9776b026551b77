"""What every way to choose columns is spelled with."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from fusegen.emitting.dialect import all_of
from fusegen.emitting.rows.frame import Part, constant, in_later_turns, scaled
from fusegen.emitting.rows.spelling import Speller
from fusegen.planner.heading import WIDTH
from fusegen.planner.rows.tails import single


class Choice(Part, ABC):
    """The pass that chooses, of one plan; `parts` are those of its passes over rows."""

    def __init__(self, parts: Speller) -> None:
        super().__init__(parts.frame)
        assert self.plan.selection is not None
        self.parts = parts
        self.selection = self.plan.selection
        self.last = self.plan.passes[-1]
        self.spelling = self.plan.target.spelling
        self.at_v = "[v]" if self.frame.loops() else ""
        self.at_j = "[j]" if self.plan.tile.vector > 1 else ""

    @abstractmethod
    def spelled_pass(self) -> object:
        """What the template prints of it."""

    @abstractmethod
    def said(self) -> Mapping[str, Any]:
        """What templates ask for under `choose`."""

    @property
    def bins(self) -> int:
        """Ranges of keys; 0 where candidates are not counted by them."""
        return 0

    @property
    def own_bins(self) -> int:
        """Of a thread."""
        return self.bins // self.plan.threads

    @property
    def makes_keys(self) -> bool:
        """Does an order become a key again, beside the chosen ones?"""
        return True

    @property
    def names_infinite(self) -> bool:
        return True

    def sizes(self) -> Iterator[str]:
        """What the text calls its numbers, where the threads of a block share a row."""
        plan = self.plan
        if not self.frame.counts_named:
            return
        yield constant("threads", plan.threads, "of a block")
        if plan.cluster > 1 and self.at_v:
            yield constant("row_threads", f"threads * {plan.cluster}", "of a row: those of its cluster's blocks")
        yield constant("warps", plan.threads // plan.target.warp, "of a block")
        yield from self.more_sizes()
        yield constant("bins", self.bins, "ranges of keys, by which candidates are counted")
        if self.own_bins > 1:
            yield constant("own_bins", "bins / threads", "of a thread, the highest first")
        yield constant("bin_bits", self.bins.bit_length() - 1)

    def more_sizes(self) -> Iterator[str]:
        yield from ()

    def col_of(self, vector: str) -> str:
        """The first column of the thread's vector of that number."""
        vector = vector if vector.isidentifier() else f"({vector})"
        return scaled(f"{vector} * {self.frame.row_threads} + lane", self.plan.tile.vector)

    def keys(self, stem: str = "keys") -> Mapping[str, Any]:
        """Of keys that registers hold."""
        tile = self.plan.tile
        sizes = [size for size in (tile.per_thread, tile.vector) if size > 1]
        key = self.key(stem)
        number = " + ".join(filter(None, (self.at_v and scaled("v", tile.vector), self.at_j and "j")))
        return {
            "key": key,
            "key_array": key.split("[")[0] + "".join(f"[{size}]" for size in sizes),
            "key_place": number,
            "key_number": f"({number})" if " " in number else number,
            "key_col": "col + j" if self.at_j else "col",
            "elements": tile.per_thread * tile.vector,
            "at_v": self.at_v,
        }

    def key(self, stem: str = "keys") -> str:
        """Where an element's key stays."""
        return f"{stem}{self.at_v}{self.at_j}" if self.at_v or self.at_j else f"own_{stem.removesuffix('s')}"

    def title(self) -> list[str]:
        number = len(self.plan.passes)
        best = f"choose {self.selection.columns} = the columns of the {self.selection.k} largest {self.selection.key}"
        text = f"pass {number} of {number}: {self.last.title + '; ' if self.last.title else ''}{best}"
        return textwrap.wrap(text, WIDTH, subsequent_indent="  ")

    def inside(self) -> str:
        """When element j of a vector lies in the row; empty where every one does."""
        turns = single(self.plan)
        return "" if turns is None else in_later_turns(f"col + j < {self.frame.cols}", turns)

    def none(self, candidates: str, rank: str) -> str:
        """What stands for a rank behind the last candidate: no entry; in a row without any, where that is NaN, the
        column of that number."""
        return f"{candidates} ? 0 : entry_of(-INFINITY, {rank})" if self.selection.bare else "0"

    def lanes_guard(self) -> str:
        if not self.inside():
            return self.frame.guard()
        return all_of("live" * (self.plan.lacks_rows and not self.plan.stands_in), self.inside())
