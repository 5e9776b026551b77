"""What validation found: one line a case for people, plain values for the cache and for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fusegen.errors import RequestError, ValidationError
from fusegen.language import notebook

JUDGED = "judged"  # the case that fails where an output was never held to a bound


@dataclass(frozen=True, slots=True)
class Worst:
    """The element that used the largest share of what it was allowed, or the first one that is wrong."""

    output: str
    index: tuple[int, ...]  # leading axes, then the column
    expected: float
    got: float
    allowed: float  # distance from `expected`, storage rounding included
    note: str = ""  # what is wrong with a column that was chosen

    def __str__(self) -> str:
        place = f"{self.output}[{', '.join(map(str, self.index))}]"
        if self.note:
            return f"{place} {self.note}"
        return f"{place} expected {self.expected:.9g}, got {self.got:.9g}, allowed {self.allowed:.2g} off"


@dataclass(frozen=True, slots=True)
class Case:
    """One case: what it was, how far off it was, and what is wrong with it (`problem`, empty where nothing is).

    `share` is the largest error over its bound, both beside the rounding to the storage type: above 1 is wrong, and 0
    says that every element is the exact one's rounding. `bounded` is the share of elements that have
    a bound; the others (an f32 intermediate may overflow, a comparison is too close) were only checked to be written.
    `max_rel` looks at elements of at least a thousandth of the output's root mean square.
    """

    name: str
    reason: str
    sizes: str = ""
    elements: int = 0
    bounded: float = 1.0
    relative_l2: float = 0.0
    max_abs: float = 0.0
    max_rel: float = 0.0
    share: float = 0.0
    worst: Worst | None = None
    problem: str = ""
    bitwise: bool = False  # compared bit by bit with an earlier launch of the same kernel, and not with the reference

    @property
    def ok(self) -> bool:
        return not self.problem

    def __str__(self) -> str:
        head = f"{'ok  ' if self.ok else 'FAIL'} {self.name:<22}"
        if self.elements and self.bitwise:
            head += f" {self.sizes:<18} {'the same bits' if self.ok else ''}"
        elif self.elements:
            head += f" {self.sizes:<18} rel L2 {self.relative_l2:.1e}  max abs {self.max_abs:.1e}"
            head += f"  max rel {self.max_rel:.1e}  error/bound {self.share:.2f}"
        if self.bounded < 1:
            head += f"  {self.bounded:.1%} judged"
        if self.worst and self.share > 0 and self.ok:
            head += f"  worst {self.worst}"
        return head.rstrip() + ("" if self.ok else f"\n       {self.problem}\n       the case: {self.reason}")


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict on one kernel."""

    kernel: str
    on: str
    seed: int
    cases: tuple[Case, ...]

    @property
    def ok(self) -> bool:
        return bool(self.cases) and all(case.ok for case in self.cases)

    @property
    def unjudged(self) -> str:
        """Why nobody knows whether the kernel is right, where nothing is known to be wrong; else empty."""
        failed = [case for case in self.cases if not case.ok]
        return "\n".join(case.problem for case in failed) if all(case.name == JUDGED for case in failed) else ""

    @property
    def share(self) -> float:
        """The largest error of all cases over its bound, beside the rounding to the storage type."""
        return max((case.share for case in self.cases), default=0.0)

    @property
    def failure(self) -> str:
        """The first case that is wrong, `nan: 3 of 40 elements are wrong: ...`; empty where all are right."""
        wrong = next((case for case in self.cases if not case.ok), None)
        return f"{wrong.name}: {wrong.problem}" if wrong else "" if self.cases else "nothing was checked"

    def raise_for_error(self) -> None:
        """Unless every case is right: raise ValidationError, with the report, or RequestError where the chain is such
        that no input could have shown whether they are."""
        if self.unjudged:
            raise RequestError(f"{self.kernel}: {self.unjudged}")
        if not self.ok:
            raise ValidationError(f"{self.kernel} disagrees with its reference\n{self}")

    def __str__(self) -> str:
        failed = sum(not case.ok for case in self.cases)
        wrong = f"{failed} of {len(self.cases)} cases wrong" if self.cases else "nothing was checked"
        verdict = "ok" if self.ok else wrong
        head = f"{self.kernel} on {self.on}, seed {self.seed}: {verdict}"
        return "\n".join([head, *(f"  {line}" for case in self.cases for line in str(case).splitlines())])

    def _repr_html_(self) -> str | None:
        """The cases as a table, for notebooks."""
        return notebook.drawn(self)

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that JSON has no word for become text."""
        plain: dict[str, Any] = jsonable(asdict(self))
        return {**plain, "ok": self.ok}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """What `to_json` made. Raises KeyError, TypeError, ValueError or OverflowError for anything else."""
        cases = []
        for found in data["cases"]:
            case = {name: found[name] for name in Case.__dataclass_fields__}
            if case["worst"] is not None:
                worst = dict(case["worst"])
                numbers = {name: float(worst[name]) for name in ("expected", "got", "allowed")}
                case["worst"] = Worst(worst["output"], tuple(worst["index"]), **numbers, note=str(worst["note"]))
            for name in ("bounded", "relative_l2", "max_abs", "max_rel", "share"):
                case[name] = float(case[name])
            cases.append(Case(**case))
        return cls(data["kernel"], data["on"], int(data["seed"]), tuple(cases))


def jsonable(value: Any) -> Any:
    """Tuples as lists, NaN and infinities as text."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
