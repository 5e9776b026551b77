"""Which cases of the dear tests a run of the whole suite shows.

Nine tenths of the suite's time are a quarter of its cases: those that plan long programs, compile kernels or run many
of them. A run of the whole suite has all other cases, and of the dear ones those of one turn of `TURNS`: each day the
next, so that no case is left out for long, and a test of many cases has some in every turn. What is asked for by name
(files, `-k`, `-m`) runs whole, and so does the suite with `--turn all`.

`dear.json` says what a case of a test takes, in seconds of CPU where nothing was compiled before; `--turn all
--update-costs` writes it anew. A test that is not in it is cheap. Tests that every run has, whatever they take, are
marked `always`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path

LEDGER = Path(__file__).with_name("dear.json")
TURNS = 6
DEAR_S = 0.1  # of CPU a case
ALL = "all"


def function_of(case: str) -> str:
    """The node ID of a test without its parameters."""
    return case.partition("[")[0]


def of_day(day: date) -> int:
    """The turn of a day, from 1."""
    return day.toordinal() % TURNS + 1


def chosen(asked: str | None, whole: bool) -> int | None:
    """The turn of a run: the one that is asked for, or of a run of the whole suite today's; None has all cases.
    Raises ValueError."""
    if asked is None:
        return of_day(datetime.now(UTC).date()) if whole else None
    if asked == ALL:
        return None
    if asked not in map(str, range(1, TURNS + 1)):
        raise ValueError(f"--turn {asked}: a turn is 1 to {TURNS}, or {ALL}")
    return int(asked)


def dealt(cases: Sequence[str], seconds: Mapping[str, float]) -> dict[str, int]:
    """The turn of each case of a test that `seconds` names: those of a test one after another, from the turn that has
    least to do, the dearest tests first."""
    tests: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        if function_of(case) in seconds:
            tests[function_of(case)].append(case)
    loads = [0.0] * TURNS
    turns: dict[str, int] = {}
    for test in sorted(tests, key=lambda test: (-seconds[test] * len(tests[test]), test)):
        first = loads.index(min(loads))
        for i, case in enumerate(tests[test]):
            turn = (first + i) % TURNS
            loads[turn] += seconds[test]
            turns[case] = turn + 1
    return turns


def known() -> dict[str, float]:
    """The ledger: seconds of CPU of a case of each dear test."""
    read: dict[str, float] = json.loads(LEDGER.read_text())
    return read


def write(measured: Iterable[tuple[str, float]]) -> None:
    """The ledger of these cases and their seconds."""
    each: dict[str, list[float]] = defaultdict(list)
    for case, seconds in measured:
        each[function_of(case)].append(seconds)
    means = {test: sum(found) / len(found) for test, found in sorted(each.items())}
    dear = {test: round(mean, 2) for test, mean in means.items() if mean >= DEAR_S}
    LEDGER.write_text(json.dumps(dear, indent=0) + "\n")
