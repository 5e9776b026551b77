"""What `fusegen bench --json` wrote, read back: a file from another machine, with a GPU, may be anybody's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusegen.errors import RequestError
from fusegen.reporting.reading import need, read, read_file
from fusegen.reporting.state import Bench, Entry, Measured


@dataclass(frozen=True, slots=True)
class Of:
    """What a measurement is of."""

    chain: str
    sizes: Mapping[str, int]
    target: str


@dataclass(frozen=True, slots=True)
class Benches:
    """Measurements, and what each is of."""

    found: tuple[tuple[Of, Bench], ...] = ()

    @classmethod
    def read(cls, path: str | Path | None) -> Benches:
        """Those of a file; none without one. Raises RequestError for what is no such file."""
        if path is None:
            return cls()
        document = read_file(Path(path))
        if not isinstance(document, dict) or "benches" not in document:
            raise RequestError(f"{path} is no measurement\n  fusegen bench SPEC --json > {path} writes one")
        rows = need(document["benches"], list, "a list", f"{path}.benches")
        return cls(tuple(one(row, f"{path}.benches[{number}]") for number, row in enumerate(rows)))

    def of(self, chain: str, sizes: Mapping[str, int], target: str) -> Bench | None:
        """The last one of the chain at these sizes, planned for this target."""
        wanted = Of(chain, dict(sizes), target)
        return next((bench for of, bench in reversed(self.found) if of == wanted), None)

    @staticmethod
    def times(bench: Bench | None, kernel: str = "") -> dict[str, Measured]:
        """The times of kernels by their names: those of a program, or of the one `kernel` that the chain is."""
        if bench is None:
            return {}
        by = f"fusegen bench on {bench.device}"
        return {
            kernel or entry.name: Measured(entry.us, by) for entry in bench.entries
            if entry.kind == ("fusegen" if kernel else "kernel") and entry.us is not None and not entry.refused
        }  # fmt: skip


def one(row: Any, place: str) -> tuple[Of, Bench]:
    facts = need(row, dict, "an object", place)
    of = picked(Of, facts, place)
    entries = need(facts.get("entries"), list, "a list", f"{place}.entries")
    counters = facts.get("counters") or {
        "predicted_read": 0, "predicted_written": 0, "read": None, "written": None, "reason": "nobody asked for it",
    }  # fmt: skip
    counted = need(counters, dict, "an object", f"{place}.counters")
    made = {
        "device": facts.get("device"), "conditions": facts.get("conditions"), "copy_gbs": facts.get("copy_gbs"),
        "entries": [chosen(Entry, entry, f"{place}.entries[{at}]") for at, entry in enumerate(entries)],
        **{name: counted.get(name) for name in ("predicted_read", "predicted_written", "read", "written")},
        "uncounted": counted.get("reason"),
    }  # fmt: skip
    bench: Bench = read(Bench, made, place)
    return of, bench


def picked(kind: Any, facts: Any, place: str) -> Any:
    """A dataclass of those facts that it has fields for; there are more in the file."""
    return read(kind, chosen(kind, facts, place), place)


def chosen(kind: Any, facts: Any, place: str) -> dict[str, Any]:
    found = need(facts, dict, "an object", place)
    return {name: found.get(name) for name in kind.__dataclass_fields__}
