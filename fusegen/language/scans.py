"""What is made of each element and others of its row: running sums and products, and the row's largest elements.

cumsum            x0, x0 + x1, ...          with each element itself
_exclusive        0, x0, x0 + x1, ...       without it
_reverse          from the row's end on
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ScanKind = Literal["sum", "prod"]


@dataclass(frozen=True, slots=True)
class ScanWay:
    """What is made of the elements, from which side, and whether of each element itself too."""

    kind: ScanKind
    exclusive: bool = False
    reverse: bool = False

    @property
    def name(self) -> str:
        """Of the op."""
        return f"cum{self.kind}{'_reverse' * self.reverse}{'_exclusive' * self.exclusive}"

    def text(self, dtype: str = "") -> str:
        """The meaning, as numpy text of {0}."""
        array = "{0}"
        if self.exclusive:
            array = "{0}[..., 1:]" if self.reverse else "{0}[..., :-1]"
        within = f"np.flip({array}, -1)" if self.reverse else array
        found = f"np.cum{self.kind}({within}, -1{dtype and f', dtype={dtype}'})"
        found = f"np.flip({found}, -1)" if self.reverse else found
        if not self.exclusive:
            return found
        start = f"np.{'zeros' if self.kind == 'sum' else 'ones'}_like({{0}}[..., :1])"
        return f"np.concatenate([{', '.join((found, start) if self.reverse else (start, found))}], -1)"

    @property
    def torch_text(self) -> str:
        """The same for torch, whose pad takes the last axis' beginning and end."""
        array = "{0}"
        if self.exclusive:
            array = "{0}[..., 1:]" if self.reverse else "{0}[..., :-1]"
        within = f"{array}.flip(-1)" if self.reverse else array
        found = f"torch.cum{self.kind}({within}, -1)" + ".flip(-1)" * self.reverse
        ends = "(0, 1)" if self.reverse else "(1, 0)"
        return f"F.pad({found}, {ends}, value={int(self.kind == 'prod')})" if self.exclusive else found


@dataclass(frozen=True, slots=True)
class Largest:
    """Each element where it is among its row's largest, as few of them as sum up to a limit, or as there are to be; in
    place of the others 0, or -inf. Equal ones go together. `steps`: bits of the least one, a pass over the row each.
    """

    by: Literal["sum", "count"]

    @property
    def name(self) -> str:
        """Of the op."""
        return f"largest_by_{self.by}"

    @property
    def steps(self) -> int:
        return 31 if self.by == "sum" else 32

    @property
    def rest(self) -> float:
        return 0.0 if self.by == "sum" else -math.inf


@dataclass(frozen=True, slots=True)
class Sorted:
    """A row's elements in ascending or descending order, or the columns they come from; equals by their columns, lower
    first. NaN is larger than every number."""

    what: Literal["values", "columns"]
    descending: bool = False

    @property
    def name(self) -> str:
        """Of the op."""
        return f"sorted_{self.what}{'_descending' * self.descending}"

    def text(self) -> str:
        """The meaning, as numpy text of {0}."""
        order = f"order_of({{0}}, {self.descending})"
        return f"{order}.astype(np.int32)" if self.what == "columns" else f"np.take_along_axis({{0}}, {order}, -1)"

    @property
    def torch_text(self) -> str:
        given = f"torch.sort({{0}}, -1, {self.descending}, stable=True)"
        return f"{given}.indices.to(torch.int32)" if self.what == "columns" else f"{given}.values"


Way = ScanWay | Largest | Sorted
WAYS = tuple(ScanWay(kind, exclusive, reverse) for kind in ("sum", "prod") for exclusive in (False, True)
             for reverse in (False, True))  # fmt: skip
LARGEST = (Largest("sum"), Largest("count"))
SORTED = tuple(Sorted(what, descending) for what in ("values", "columns") for descending in (False, True))
EVERY: tuple[Way, ...] = (*WAYS, *LARGEST, *SORTED)
SCANS: Mapping[str, Way] = {way.name: way for way in EVERY}
