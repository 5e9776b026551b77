"""How fast a kernel is, and next to what: its floor, the same chain unfused, torch, other people's kernels.

    report = fusegen.bench(kernel)
    print(report)

The *floor* is the time of the fewest bytes (each operand read once, each output written once; of a causally masked
operand only what its mask leaves) at the rate of a large copy measured in the same run, or of matrix products at the
rate of a large one of the vendor's library, whichever is more. Shares are of that. A time that memory can't have means
that data sat in a cache or that not all of the work was done, and is refused instead of reported.

Everything is timed by one stopwatch (`fusegen.measuring.timing`): the driver's events, a cold L2 before each launch,
operands in turns, the median with its 10th and 90th percentile. The vendor's products take turns with the kernel,
launch by launch: the power limit moves the clock by more than what is between them. So do the kernels of a program.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from fusegen import pipeline
from fusegen.errors import FusegenError, RequestError
from fusegen.language.graph import Graph
from fusegen.language.unfusing import Piece, unfused
from fusegen.measuring.counters import Counters, count_bytes
from fusegen.measuring.entries import Entry, Judge, entry_of, refusal, work_of
from fusegen.measuring.operands import Operands, empty, rotation, shape_at
from fusegen.measuring.peers import Maker, beside_library, library_rate, torch_peers
from fusegen.measuring.timing import REPEATS, Launch, Stopwatch, Timing
from fusegen.planner.pieces import arrays, bytes_of
from fusegen.runtime import Kernel, Program
from fusegen.runtime.called import Called
from fusegen.runtime.calls import Prepared
from fusegen.runtime.program import ProgramRecord
from fusegen.version import VERSION


@dataclass(frozen=True, slots=True)
class Bench:
    """What was measured of one kernel, and under which conditions. Rates are GB/s, times µs."""

    chain: str
    signature: str
    sizes: Mapping[str, int]
    target: str
    device: str
    regime: str
    copy_gbs: float  # a large copy in the same run
    sheet_gbs: float  # by the data sheet
    sheet_tflops: float  # of f32, likewise
    ideal_bytes: int  # that have to move
    whole_bytes: int  # each operand and output once, also what a mask hides
    written_bytes: int
    unfused_bytes: int
    flops: int
    entries: tuple[Entry, ...]
    counters: Counters | None
    conditions: str
    versions: Mapping[str, str]
    product_flops: int = 0  # of matrix products among them
    matrix_tflops: float = 0.0  # a large product by the vendor's library in the same run, else by the data sheet
    matrix_measured: bool = False

    @property
    def floor_us(self) -> float:
        return max(self.ideal_bytes / self.copy_gbs / 1e3, self.products_us)

    @property
    def products_us(self) -> float:
        """Of the matrix products alone."""
        return self.product_flops / self.matrix_tflops / 1e6 if self.product_flops else 0.0

    @property
    def own(self) -> Entry:
        """The fused kernel."""
        return self.entries[0]

    def gbs(self, entry: Entry) -> float | None:
        """The rate at which the bytes that have to move were moved; of a piece, its own."""
        return entry.rate / 1e3 if entry.rate is not None else None

    def tflops(self, entry: Entry) -> float | None:
        """The rate at which the whole chain's products were made; of a program's kernel, its own."""
        flops = entry.product_flops if entry.part else self.product_flops
        return flops / entry.us / 1e6 if flops and entry.us else None

    def to_json(self) -> dict[str, Any]:
        facts = {name: value for name, value in asdict(self).items() if name != "entries"}
        return {**facts, "floor_us": self.floor_us, "entries": [self.entry_facts(e) for e in self.entries]}

    def entry_facts(self, entry: Entry) -> dict[str, Any]:
        t = entry.timing
        return {
            "name": entry.name, "kind": entry.kind,
            "us": t and t.median, "low_us": t and t.low, "high_us": t and t.high,
            "spread": t and t.spread, "repeats": t and len(t.us), "gbs": self.gbs(entry), "share": entry.share,
            "tflops": self.tflops(entry),
            "launches": entry.launches, "refused": entry.refused or None,
        }  # fmt: skip

    def __str__(self) -> str:
        rows = [COLUMNS, *table_rows(self)]
        if not self.product_flops:
            rows = [row[:MATRIX] + row[MATRIX + 1 :] for row in rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
        lines = [*heading_lines(self), ""]
        for row in rows:
            cells = [c.ljust(w) if not i else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False))]
            lines.append("  ".join([*cells, row[-1]]).rstrip())
        return "\n".join([*lines, *foot_lines(self)])


COLUMNS = ("", "us", "10% to 90%", "GB/s", "TFLOP/s", "of floor", "launches", "against fusegen", "")
BETWEEN = (
    "between two kernels: what the second takes behind those before it, less what it takes alone; below 0 where it "
    "finds in the L2 what they wrote"
)
MATRIX = COLUMNS.index("TFLOP/s")  # only shown of chains with products


def heading_lines(bench: Bench) -> list[str]:
    sizes = " ".join(f"{name}={size}" for name, size in bench.sizes.items())
    hidden = (
        "" if bench.ideal_bytes == bench.whole_bytes else f" ({bench.whole_bytes / 1e6:.1f} MB with what is masked)"
    )
    if bench.products_us > bench.ideal_bytes / bench.copy_gbs / 1e3:
        whose = "the rate of a large product in this run" if bench.matrix_measured else "the data sheet's rate"
        floor = f"{bench.product_flops / 1e9:.1f} GFLOP of products at {bench.matrix_tflops:.0f} TFLOP/s, {whose}"
    else:
        floor = (
            f"{bench.ideal_bytes / 1e6:.1f} MB{hidden} at {bench.copy_gbs:.0f} GB/s, "
            "the rate of a large copy in this run"
        )
    return [
        f"{bench.chain}  {bench.signature}  {sizes}",
        f"{bench.device}, planned for {bench.target}: {bench.regime}",
        f"floor {bench.floor_us:.1f} us: {floor}",
    ]


def table_rows(bench: Bench) -> Iterator[tuple[str, ...]]:
    """A line for each entry, in COLUMNS."""
    own = bench.own.us
    for entry in bench.entries:
        name = f"  {entry.name}" if entry.part else entry.name
        launches = "" if entry.launches is None else str(entry.launches)
        if entry.us is None or entry.timing is None:
            yield (name, *[""] * 5, launches, "", f"refused: {entry.refused}")
            continue
        rate, products = bench.gbs(entry), bench.tflops(entry)
        yield (
            name,
            f"{entry.us:.1f}",
            f"{entry.timing.low:.1f} to {entry.timing.high:.1f}",
            f"{rate:.0f}" if rate is not None else "",
            f"{products:.0f}" if products is not None else "",
            f"{entry.share:.0%}" if entry.share is not None else "",
            launches,
            f"{entry.us / own:.2f}x" if own and not entry.part else "",
            "",
        )


def foot_lines(bench: Bench) -> list[str]:
    lines = [bench.conditions]
    if any(entry.kind == "between" for entry in bench.entries):
        lines.append(BETWEEN)
    if bench.counters is not None:
        lines += str(bench.counters).splitlines()
    return ["", *lines]


# ---------------------------------------------------------------- measuring


def bench(
    kernel: Kernel | Program,
    *,
    peers: bool | Literal["library"] | Mapping[str, Maker] = True,
    alone: bool = True,
    counters: bool = True,
    repeats: int = REPEATS,
    watch: Stopwatch | None = None,
) -> Bench:
    """Time `kernel`, or a program of several, at the sizes it was compiled for, on the GPU it was compiled for.

    `peers`: torch, eagerly and by torch.compile, where it is installed, and of matrix products the vendor's library; a
    mapping adds others by name, each a function of the operands (torch tensors) that returns what is timed; "library"
    leaves torch's own ways out, which take minutes to compile. `alone`: the chain unfused, one kernel an operator.
    `counters`: read the bytes that DRAM moved with Nsight Compute, where that is there. A `watch` of an earlier call
    saves measuring the copy rate again.

    Raises RequestError for what is no kernel and for one of the emulator, which has no times, and MissingError where
    the GPU's memory does not hold the operands.
    """
    if not isinstance(kernel, Called):
        raise RequestError(
            f"bench takes a kernel, or a program of several, and {kernel!r} is neither\n"
            "  fusegen.compile(chain) makes one"
        )
    watch = watch or Stopwatch(kernel.device)
    if watch.device is not kernel.device:
        raise RequestError(
            f"the stopwatch is on {watch.device}, and {kernel.name} on {kernel.device}; pass one of its own"
        )
    graph, work = kernel.plan.graph, work_of(kernel.plan)
    rate = watch.copy_rate()
    library = library_rate(graph, kernel.device, watch)
    judge = Judge(work, rate, library or work.matrix_tflops * 1e6)
    sets = rotation(kernel.device, graph)
    launches = [kernel.prepare(*s.inputs, out=s.out, stream=0) for s in sets]
    others: list[tuple[str, Timing | str]] = []
    if peers is False:
        own = watch.time(launches, repeats)
    else:
        own, others = beside_library(graph, kernel.device, launches, sets, watch, repeats)
    count = len(kernel.kernels) if isinstance(kernel, Program) else 1
    found = [judge.entry("fusegen", "fusegen", own, count)]
    if isinstance(kernel, Program):
        found += part_entries(kernel, launches, watch, judge, repeats)
    if alone:
        found += unfused_entries(kernel, sets, watch, judge, repeats)
    found += [entry_of(judge, name, "library", timed) for name, timed in others]
    if peers is not False:
        added = peers if isinstance(peers, Mapping) else {}
        for name, kind, timed in torch_peers(graph, kernel.device, sets, watch, added, repeats, peers != "library"):
            found.append(entry_of(judge, name, kind, timed))
    return Bench(
        chain=graph.name, signature=graph.signature, sizes=dict(graph.sizes), target=kernel.target.name,
        device=str(kernel.device), regime=regime(kernel), copy_gbs=rate / 1e3, sheet_gbs=kernel.target.dram_gbs,
        sheet_tflops=kernel.target.fp32_tflops, ideal_bytes=work.ideal,
        whole_bytes=sum(bytes_of(graph, t) for t in arrays(graph)), written_bytes=work.written,
        unfused_bytes=work.unfused, flops=work.flops, entries=tuple(found),
        counters=count_bytes(kernel) if counters else None, conditions=conditions(repeats), versions=versions(kernel),
        product_flops=work.product_flops, matrix_tflops=judge.matrix_rate / 1e6, matrix_measured=library is not None,
    )  # fmt: skip


def regime(kernel: Kernel | Program) -> str:
    """How it runs, in a line."""
    if isinstance(kernel, Kernel):
        return kernel.plan.regime
    if len(kernel.kernels) == 1:
        return "a program of one kernel"
    return f"a program of {len(kernel.kernels)} kernels with {kernel.workspace_bytes() / 1e6:.1f} MB between them"


def part_entries(
    program: Program, calls: Sequence[Prepared], watch: Stopwatch, judge: Judge, repeats: int
) -> Iterator[Entry]:
    """Each kernel alone, with a cold L2, and behind the first one what it adds to the kernels before it beyond that.

    All of them take turns, so that each repeat's times belong together.
    """
    for call in calls:
        call(0)  # what one kernel reads of another's is there
    rows = [kernel_launches(call) for call in calls]
    places = range(len(program.kernels))
    alone = [[row[place] for row in rows] for place in places]
    first = [[in_sequence(row[: place + 1]) for row in rows] for place in places]
    times = watch.time_together([*alone, *first[1:]], repeats)
    own, sums = times[: len(alone)], (times[0], *times[len(alone) :])
    for place, kernel in enumerate(program.kernels):
        if place:
            added = zip(sums[place].us, sums[place - 1].us, own[place].us, strict=True)
            behind = Timing(tuple(both - before - single for both, before, single in added))
            yield Entry(f"between {program.kernels[place - 1].name} and {kernel.name}", "between", behind)
        work = work_of(kernel.plan)
        made = Judge(work, judge.rate, judge.matrix_rate).entry(kernel.name, "kernel", own[place], 1)
        yield replace(made, product_flops=work.product_flops)


def kernel_launches(call: Prepared) -> list[Launch]:
    """The kernels of a program's call, each a launch of its own, over the call's arrays and workspace."""
    record: ProgramRecord = call.record
    bases = (*call.pointers, record.room(0).address)
    return [partial(launch.run, bases, call.values) for launch in record.launches]


def unfused_entries(
    kernel: Kernel | Program, sets: Sequence[Operands], watch: Stopwatch, judge: Judge, repeats: int
) -> Iterator[Entry]:
    """The chain as one kernel an operator: launched one behind the other, then each alone with a cold L2.

    None for a chain of a single operator, which is its own unfused form.
    """
    graph = kernel.plan.graph
    pieces = unfused(graph)
    if len(pieces) == 1:
        return
    on = f"gpu:{kernel.device.ordinal}"
    try:
        kernels = [pipeline.compile(p.graph, kernel.target, on=on, validate=False) for p in pieces]
        launches = [prepared(graph, pieces, kernels, one) for one in sets]
        sequence = watch.time([in_sequence(row) for row in launches], repeats)
        alone = [watch.time([row[i] for row in launches], repeats) for i in range(len(pieces))]
    except FusegenError as error:
        yield refusal("unfused", "unfused", error)
        return
    total = Timing(tuple(map(sum, zip(*(t.us for t in alone), strict=True))))
    yield judge.entry("unfused, one after another", "unfused", sequence, len(pieces))
    yield judge.entry("unfused, each with a cold L2", "unfused", total, len(pieces))
    for piece, timing, own in zip(pieces, alone, kernels, strict=True):
        yield Judge(work_of(own.plan), judge.rate, judge.matrix_rate).entry(piece.operator, "piece", timing, 1)


def prepared(
    graph: Graph, pieces: Sequence[Piece], kernels: Sequence[Kernel | Program], operands: Operands
) -> list[Launch]:
    """One launch a piece over one set of operands, with memory of their own between them."""
    values: dict[str, Any] = {t.name: v for t, v in zip(graph.inputs, operands.inputs, strict=True)}
    outputs = {t.name: v for t, v in zip(graph.outputs, operands.outputs, strict=True)}
    made: list[Launch] = []
    for piece, kernel in zip(pieces, kernels, strict=True):
        for tensor in piece.graph.outputs:
            there = outputs.get(tensor.name)
            values[tensor.name] = there or empty(kernel.device, tensor.dtype, shape_at(tensor, piece.graph))
        outs = tuple(values[name] for name in piece.writes)
        out = outs if len(outs) > 1 else outs[0]
        made.append(kernel.prepare(*(values[name] for name in piece.reads), out=out, stream=0))
    return made


def in_sequence(launches: Sequence[Launch]) -> Launch:
    def launch(stream: int) -> None:
        for one in launches:
            one(stream)

    return launch


def conditions(repeats: int) -> str:
    return f"median of {repeats}, cold L2 (a 256 MiB fill before each), operands in turns, the driver's events"


def versions(kernel: Kernel | Program) -> dict[str, str]:
    """Of what has a say in the figures."""
    found = {"fusegen": VERSION, "python": platform.python_version()}
    binary = kernel.kernels[-1].binary if isinstance(kernel, Program) else kernel.binary
    if binary is not None:
        found["compiler"] = binary.compiler
    for name in ("torch", "triton"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found
