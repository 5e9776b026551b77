"""report(chain): the page of a report, for Python and for notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fusegen.errors import writing
from fusegen.language.spec import Chain
from fusegen.pipeline import choose_target
from fusegen.reporting.benches import Benches
from fusegen.reporting.collecting import collect, state
from fusegen.reporting.fragments import framed
from fusegen.reporting.pages import page
from fusegen.reporting.state import State
from fusegen.targets import Target


@dataclass(frozen=True, slots=True)
class Page:
    """A report. `state` is all that it shows, as plain values."""

    state: State

    @property
    def html(self) -> str:
        """The page, which needs nothing but itself."""
        return page(self.state)

    def write(self, path: str | Path) -> None:
        """Write the page. Raises OutputError."""
        with writing(path, "name another file"):
            Path(path).write_text(self.html, encoding="utf-8")

    def save(self, path: str | Path) -> None:
        """Keep the state as JSON, for `fusegen report` to show again, or beside another. Raises OutputError."""
        self.state.save(path)

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for notebooks."""
        return framed(self.html)


def report(
    *chains: Chain, target: str | Target | None = None, on: str = "auto", validate: bool = True,
    bench: str | Path | None = None,
) -> Page:  # fmt: skip
    """All that is known of these chains, as a page: `.write("report.html")` writes it, `.save("state.json")` keeps what
    it shows, and in a notebook it draws itself.

    `target` and `on` as of `fusegen.compile`; `bench` is a file that `fusegen bench --json` wrote. Raises NoPlan for a
    chain without a plan, and CompileError; a kernel that fails its validation is shown as such.
    """
    chosen, benches = choose_target(target), Benches.read(bench)
    return Page(state(collect(chain, chosen, on=on, validate=validate, benches=benches) for chain in chains))
