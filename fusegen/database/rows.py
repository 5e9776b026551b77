"""One row of the database: what was measured of one candidate, and whether it may be believed.

Rows come from files that anybody may have written: `Measurement.of` takes plain values and raises Unsound for
whatever could not have been measured. As text a row is one line of JSON with its fields in a fixed order, so that a
file of rows can be read, sorted, compared and kept under version control.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from fusegen.database.keys import Problem, Tools

Status = Literal[
    "ok",  # it ran, and was timed
    "failed",  # it does not compile, the gate refuses it, or its results are wrong
    "hung",  # it did not end, and its process was killed
    "crashed",  # its process died, or the GPU reported an error
]
STATUSES: tuple[Status, ...] = get_args(Status)
MOST_TEXT = 1000  # characters of any text in a row
MOST_DIGITS = 100  # of an integer
LARGEST = 2**62  # SQLite's integers have 63 bits
LEAST, MOST = 1e-12, 1e12  # of times in us, shares and rates: nothing beyond was measured, and all ratios are finite
# What rules and choices of configurations were called before, and are called now.
RENAMED = {
    "held": "topk_small_k", "dense": "topk_large_k", "rolling": "persistent", "spread": "persistent",
    "turns": "pingpong", "halves": "cooperative", "teams": "slice_k", "shares": "split_k",
}  # fmt: skip
CONFLICT = 0.10  # two measurements of the same thing that lie further apart contradict each other


class Unsound(ValueError):
    """Values that are no measurement; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One candidate, measured or found unfit. Its first nine fields are the key: there is one row for each.

    `time_us` is the median of `repeats` launches, each with a cold L2; `spread` the distance from the 10th to the 90th
    percentile over the median; `share` the ideal bytes over the time, over the copy rate `copy_gbs` of the same run,
    all 0 unless `status` is ok. `validated`: its results were compared with the reference; only such a row may win.
    """

    graph: str
    cols: int
    rows: int
    layout: str
    target: str
    arch: str
    configuration: str
    compiler: str
    fusegen: str
    chain: str  # name and signature, for people
    sizes: str
    gpu: str
    status: Status
    reason: str
    time_us: float
    predicted_us: float
    spread: float
    share: float
    repeats: int
    copy_gbs: float
    validated: bool
    at: str  # when, in UTC: 2026-11-21T11:07:20Z

    @property
    def problem(self) -> Problem:
        return Problem(self.graph, self.cols, self.rows, self.layout, self.target, self.arch)

    @property
    def tools(self) -> Tools:
        return Tools(self.compiler, self.fusegen)

    @property
    def key(self) -> tuple[Problem, str, Tools]:
        return self.problem, self.configuration, self.tools

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def may_win(self) -> bool:
        return self.ok and self.validated

    @property
    def values(self) -> tuple[Any, ...]:
        """Every field's value, in order."""
        return tuple(getattr(self, name) for name in FIELDS)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Measurement:
        """The row that plain values spell. Raises Unsound."""
        if missing := [name for name in FIELDS if name not in values]:
            raise Unsound(f"it lacks {missing[0]}")
        found = {name: CHECKS[name](name, values[name]) for name in FIELDS}
        row = cls(**found)
        if row.ok and not (row.time_us > 0 and row.share > 0 and row.repeats > 0 and row.copy_gbs > 0):
            raise Unsound("it is ok, and has no time, share, repeats or copy rate")
        if row.validated and not row.ok:
            raise Unsound(f"it is validated, and {row.status}")
        return row

    def line(self) -> str:
        """One line of JSON, what people look for first."""
        return json.dumps({name: getattr(self, name) for name in AS_READ}, ensure_ascii=False, allow_nan=False)


# ---------------------------------------------------------------- what values may be


def text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MOST_TEXT or not value.replace("\n", " ").isprintable():
        raise Unsound(f"{name} is {value!r:.60}, and wanted is a printable text of up to {MOST_TEXT} characters")
    return value


def matching(pattern: str) -> Callable[[str, Any], str]:
    compiled = re.compile(pattern)

    def check(name: str, value: Any) -> str:
        if not compiled.fullmatch(text(name, value)):
            raise Unsound(f"{name} is {value!r:.60}, which does not read as {pattern}")
        return str(value)

    return check


def current(configuration: str) -> str:
    """A configuration in today's words: rows of earlier versions name the same candidates."""
    return re.sub(r"(?<![^ ])[a-z]+(?=[ =]|$)", lambda word: RENAMED.get(word[0], word[0]), configuration)


def configuration(name: str, value: Any) -> str:
    return current(matching(r"\S.*")(name, value))


def whole(least: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= LARGEST:
            raise Unsound(f"{name} is {value!r:.60}, and wanted is an integer of at least {least}")
        return value

    return check


def bucket_end(name: str, value: Any) -> int:
    found = whole(1)(name, value)
    if found & (found - 1):
        raise Unsound(f"{name} is {found}, and buckets begin at powers of two")
    return found


def number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not (value == 0 or LEAST <= value <= MOST):
        raise Unsound(f"{name} is {value!r:.60}, and wanted is 0 or a number from {LEAST:g} to {MOST:g}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    if value not in (0, 1):  # SQLite has no booleans
        raise Unsound(f"{name} is {value!r:.60}, and wanted is true or false")
    return bool(value)


CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "graph": matching(r"[0-9a-f]{64}"),
    "cols": whole(1),
    "rows": bucket_end,
    "layout": matching(r"\S.*"),
    "target": matching(r"(cuda|hip):\w+"),
    "arch": matching(r"\w+"),
    "configuration": configuration,
    "compiler": matching(r"\S.*"),
    "fusegen": matching(r"\S+"),
    "chain": text,
    "sizes": text,
    "gpu": text,
    "status": matching("|".join(STATUSES)),
    "reason": text,
    "time_us": number,
    "predicted_us": number,
    "spread": number,
    "share": number,
    "repeats": whole(0),
    "copy_gbs": number,
    "validated": flag,
    "at": matching(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"),
}
FIELDS = tuple(field.name for field in fields(Measurement))
KEY = FIELDS[: FIELDS.index("fusegen") + 1]
FIRST = ("chain", "sizes", "target", "configuration", "status", "time_us", "share", "validated")
AS_READ = (*FIRST, *(name for name in FIELDS if name not in FIRST))


# ---------------------------------------------------------------- two rows for the same key


def better(one: Measurement, other: Measurement) -> Measurement:
    """Which of two rows for the same key to keep: the newer one, unless it is a time that is founded worse.

    Founded worse is a time that was not validated, or rests on less than half as many launches. What no longer works is
    known from its newest row whatever came before.
    """
    old, new = sorted((one, other), key=lambda row: (row.at, row.values))
    founded_worse = old.validated > new.validated or 2 * new.repeats < old.repeats
    return old if old.ok and new.ok and founded_worse else new


def contradict(one: Measurement, other: Measurement) -> str:
    """In which way two rows for the same key disagree, the first one's words first; empty when they do not."""
    if one.status != other.status:
        return f"{one.status} and {other.status}"
    if one.ok and abs(math.log(one.share / other.share)) > CONFLICT:
        return f"{one.share:.2f} and {other.share:.2f} of the copy rate"
    return ""


# ---------------------------------------------------------------- rows as text


def write_lines(rows: Iterable[Measurement]) -> str:
    """A line for each row, in an order that depends on the rows alone."""
    order = sorted(
        rows, key=lambda r: (r.chain.partition(" ")[0], r.target, r.cols, r.rows, -r.may_win, -r.share, r.values)
    )
    return "".join(f"{row.line()}\n" for row in order)


def whole_number(digits: str) -> int | float:
    """JSON's number; one that no field may be is not taken literally, for which Python has a limit of its own."""
    return int(digits) if len(digits) < MOST_DIGITS else float(digits)


def read_lines(lines: str) -> Iterator[Measurement | Unsound]:
    """Each line's row, or what is wrong with it."""
    for number, line in enumerate(lines.splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line, parse_int=whole_number)
            if not isinstance(values, dict):
                raise Unsound("it is no table")
            yield Measurement.of(values)
        except json.JSONDecodeError as error:
            yield Unsound(f"line {number} is no JSON: {error.msg}")
        except (ValueError, RecursionError) as error:
            yield Unsound(f"line {number}: {error}")
