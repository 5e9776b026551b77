"""What a run shows: progress, a line of JSON a seed, the findings, and a summary by class."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from tests.fuzzing.workers import Row

RESULTS = ("right", "refused", "wrong", "false-alarm", "caught", "crash", "hang", "harness")
WELL = ("right", "refused")


def followed(rows: Iterable[Row], count: int, log: IO[str], console: Console) -> list[Row]:
    """All rows, shown and written down as they come."""
    found: list[Row] = []
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), console=console, auto_refresh=False, transient=True,
    )  # fmt: skip
    with progress:
        task = progress.add_task("seeds", total=count)
        for row in rows:
            found.append(row)
            log.write(json.dumps(row) + "\n")
            log.flush()
            if row["result"] not in WELL:
                progress.console.print(finding(row), markup=False, highlight=False, soft_wrap=True)
            amiss = sum(one["result"] not in WELL for one in found)
            progress.update(task, advance=1, description=f"seeds, {amiss} amiss", refresh=True)
    return found


def finding(row: Row) -> str:
    """One seed that is not as it should be, with the command that shows it."""
    lines = str(row.get("why") or row.get("failed", "")).strip().split("\n")
    why = next((line.strip() for line in lines if "FAIL" in line), lines[0])[:400]
    place = " on ".join(part for part in (row.get("kind", ""), row.get("target", "")) if part)
    return f"{row['result']}: seed {row['seed']}{', ' + place if place else ''}: {why}\n  {again(row)}"


def again(row: Row) -> str:
    return f"python -m tests.fuzzing --seeds {row['seed']}{' --any' if row.get('any') else ''} --show"


def summary(rows: list[Row]) -> Table:
    """Seeds by class and by kind of chain."""
    kinds = sorted({row.get("kind", "") for row in rows})
    table = Table(Column("class", no_wrap=True), *(kind or "none drawn" for kind in kinds), "all")
    for result in RESULTS:
        counts = Counter(row.get("kind", "") for row in rows if row["result"] == result)
        if counts or result in WELL:
            style = None if result in WELL else "red"
            table.add_row(result, *(str(counts[kind] or "") for kind in kinds), str(counts.total()), style=style)
    return table


def share_unjudged(rows: list[Row]) -> str:
    elements, unjudged = (sum(row.get(what, 0) for row in rows) for what in ("elements", "unjudged"))
    return f"{elements:,} elements, of which {unjudged / max(1, elements):.2%} could not be judged"
