"""What a report knows, as plain values: `collect` makes it, the page shows it, JSON keeps it, and two are compared.

Bytes are bytes, times µs, rates GB/s (1e9 bytes) and TFLOP/s. Whatever was not to be had here has a sentence in its
place that says why.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusegen.errors import RequestError, writing
from fusegen.reporting.reading import AnyFloat, read, read_file, shown
from fusegen.validation.report import jsonable

FORMAT = 1  # of the JSON; another one is another version's


@dataclass(frozen=True, slots=True)
class Item:
    """A box of the op graph: an operand, or an operator that the author wrote.

    `reads`: the items that it takes. `kernels`: where it is computed, an operator perhaps in several. `line`: of the
    chain's `spec`, from 1 on; 0 where it stands somewhere else. `stored`: its type in memory, where it gets there.
    """

    kind: str  # "operand" or "operator"
    name: str  # `gelu`
    value: str  # what its author or the kernel calls the result: `h`
    type: str  # `f16[M, N]`
    stored: str
    where: str
    line: int
    reads: tuple[int, ...]
    kernels: tuple[int, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bytes:
    """A tensor's bytes by each way of counting (`planner.traffic`)."""

    tensor: str
    output: bool
    type: str
    access: str  # `vector, 16 B`
    per_element: int
    ideal: int
    moved: int


@dataclass(frozen=True, slots=True)
class Point:
    """One sentence of an explanation, and the bytes that what it says saves."""

    text: str
    bytes_saved: int


@dataclass(frozen=True, slots=True)
class Section:
    """Sentences under one heading."""

    title: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that there is for a part. `tried`: the gate's or the validation's word on it, "passed" or a reason."""

    configuration: str
    rule: str
    regime: str
    time_us: float
    moved: int
    registers: int  # estimated
    shared_bytes: int
    blocks_per_sm: int
    chosen: bool
    tried: str


@dataclass(frozen=True, slots=True)
class Part:
    """What one plan says. A kernel is one, or several steps of a program in one launch."""

    name: str
    regime: str
    configuration: str
    chosen_by: str
    facts: tuple[tuple[str, str], ...]
    tensors: tuple[Bytes, ...]
    per_element_unfused: int
    unfused: int
    candidates: tuple[Candidate, ...]
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class Linked:
    """A line of a text, from 1 on, and the items whose values it makes and those whose values it only names."""

    line: int
    makes: tuple[int, ...]
    names: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resources:
    """What the compiled kernel takes. Sizes are bytes; `limits` are the target's own."""

    registers: int
    scalar_registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    code_bytes: int
    threads: int
    blocks_per_sm: int
    warps_per_sm: int
    occupancy: float
    limited_by: str
    compiler: str
    most_registers: int
    most_shared_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """Instructions of one kind: how many, and their names with counts."""

    kind: str
    count: int
    names: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """A time, and who says so."""

    us: float
    by: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch."""

    name: str
    regime: str
    parts: tuple[Part, ...]
    time_us: float
    floor_us: float
    bound: str
    moved: int
    ideal: int
    flops: int
    product_flops: int
    roof_tflops: float  # of what it computes: matrix units where it has products, else f32
    measured: Measured | None
    filename: str
    source: str
    links: tuple[Linked, ...]
    reference: str  # empty where the program's stands for it
    reference_links: tuple[Linked, ...]
    resources: Resources | None
    uncompiled: str
    mix: tuple[Share, ...]
    unmixed: str


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor that one kernel writes and later ones read; kernels are numbered from 0."""

    name: str
    type: str
    bytes: int
    written_by: int
    read_by: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to cut the chain: what is in memory between kernels. One that can't be taken has no time, but a reason."""

    stored: tuple[str, ...]
    kernels: int
    time_us: float | None
    reason: str
    taken: bool


@dataclass(frozen=True, slots=True)
class Case:
    """A case of the validation (`validation.report`)."""

    name: str
    reason: str
    sizes: str
    elements: int
    bounded: AnyFloat
    relative_l2: AnyFloat
    max_abs: AnyFloat
    share: AnyFloat
    worst: str
    problem: str
    bitwise: bool


@dataclass(frozen=True, slots=True)
class Validation:
    """`ok` is None where it was not tried."""

    ok: bool | None
    on: str
    text: str
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A way to run the chain that `fusegen bench` timed."""

    name: str
    kind: str
    us: float | None
    low_us: float | None
    high_us: float | None
    share: float | None
    refused: str | None


@dataclass(frozen=True, slots=True)
class Bench:
    """What `fusegen bench` measured of the chain. `read` and `written` are bytes of DRAM, by its counters."""

    device: str
    conditions: str
    copy_gbs: float
    entries: tuple[Entry, ...]
    predicted_read: int
    predicted_written: int
    read: int | None
    written: int | None
    uncounted: str


@dataclass(frozen=True, slots=True)
class Chain:
    """One chain for one target."""

    name: str
    doc: str
    signature: str
    sizes: Mapping[str, int]
    where: str
    target: str
    arch: str
    model: str
    dram_gbs: float
    fp32_tflops: float
    spec: tuple[str, ...]
    first_line: int  # of `spec` in its file; 0 where nobody knows
    items: tuple[Item, ...]
    kernels: tuple[Kernel, ...]
    between: tuple[Boundary, ...]
    cuts: tuple[Cut, ...]  # the ways to cut a program that were looked at
    reference: str
    reference_links: tuple[Linked, ...]
    workspace_bytes: int
    time_us: float
    floor_us: float
    ideal: int
    moved: int
    unfused: int
    launches_unfused: int
    validation: Validation
    bench: Bench | None

    @property
    def measured_us(self) -> float | None:
        """The time of the whole chain, by `fusegen bench`, or of its one kernel by the database; None without one."""
        if self.bench is not None:
            return next((entry.us for entry in self.bench.entries if entry.kind == "fusegen"), None)
        (first, *others) = self.kernels
        return first.measured.us if first.measured is not None and not others else None


@dataclass(frozen=True, slots=True)
class State:
    """All that one report shows."""

    format: int
    fusegen: str
    chains: tuple[Chain, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that JSON has no word for become text."""
        plain: dict[str, Any] = jsonable(asdict(self))
        return plain

    def save(self, path: str | Path) -> None:
        """Write it as JSON, to be read by `load` and `fusegen report`. Raises OutputError."""
        with writing(path, "name another file"):
            Path(path).write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def lines_of(text: str) -> list[str]:
    """The lines that links count, from 1 on; one that no other program would end stays one."""
    return text.removesuffix("\n").split("\n") if text else []


def load(path: str | Path) -> State:
    """The state in a file that `save` wrote. Raises RequestError for anything else, with the place of what is wrong."""
    document = read_file(Path(path))
    if not isinstance(document, dict) or "format" not in document:
        raise RequestError(f"{path} is no report's state\n  fusegen report SPEC --save {path} writes one")
    if document["format"] != FORMAT:
        raise RequestError(
            f"{path} is of format {shown(document['format'])}, and this version of fusegen reads {FORMAT}\n"
            "  save it anew with this version"
        )
    state: State = read(State, document, str(path))
    for number, chain in enumerate(state.chains):
        check(chain, f"{path}.chains[{number}]")
    return state


def check(chain: Chain, place: str) -> None:
    """Raises RequestError where one thing refers to another that is not there."""
    if not chain.kernels:
        raise RequestError(f"{place} has no kernels")
    items, kernels = range(len(chain.items)), range(len(chain.kernels))
    for number, item in enumerate(chain.items):
        at = f"{place}.items[{number}]"
        need_all(item.reads, range(number), at, "reads")  # arguments come first, so no value is made of itself
        need_all(item.kernels, kernels, at, "kernels")
        need_all([item.line], range(len(chain.spec) + 1), at, "line")
        if item.kind not in ("operand", "operator"):
            raise RequestError(f"{at}.kind is {shown(item.kind)}, and it is operand or operator")
    for number, stored in enumerate(chain.between):
        need_all([stored.written_by, *stored.read_by], kernels, f"{place}.between[{number}]", "kernels")
    check_links(chain.reference_links, chain.reference, items, f"{place}.reference_links")
    for number, kernel in enumerate(chain.kernels):
        at = f"{place}.kernels[{number}]"
        if not kernel.parts:
            raise RequestError(f"{at} has no parts")
        check_links(kernel.links, kernel.source, items, f"{at}.links")
        check_links(kernel.reference_links, kernel.reference, items, f"{at}.reference_links")


def check_links(links: Iterable[Linked], text: str, items: range, place: str) -> None:
    lines = range(1, len(lines_of(text)) + 1)
    for number, link in enumerate(links):
        need_all([link.line], lines, f"{place}[{number}]", "line")
        need_all([*link.makes, *link.names], items, f"{place}[{number}]", "items")


def need_all(numbers: Iterable[int], known: range, place: str, what: str) -> None:
    for number in numbers:
        if number not in known:
            most = f"{known.start} to {known.stop - 1}" if known else "none"
            raise RequestError(f"{place}.{what} has {number}, and there are {most}")
