"""What compiling, loading and launching ask of a plan, be it of one kernel or of several steps in one launch."""

from __future__ import annotations

from typing import Protocol

from fusegen.planner.parts import Param
from fusegen.targets.base import Target


class Launched(Protocol):
    """One entry of one binary."""

    @property
    def name(self) -> str: ...

    @property
    def target(self) -> Target: ...

    @property
    def params(self) -> tuple[Param, ...]: ...

    @property
    def regime(self) -> str: ...

    @property
    def shared_bytes(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def cluster(self) -> int: ...

    @property
    def persistent_rows(self) -> bool: ...

    def grid(self, blocks: int) -> tuple[int, int]: ...


class Text(Protocol):
    """The text of such a plan."""

    @property
    def plan(self) -> Launched: ...

    @property
    def text(self) -> str: ...

    @property
    def filename(self) -> str: ...
