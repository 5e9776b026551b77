"""The table of speeds of rows: measured on a GPU with one command, and made from committed data without one.

    python benchmarks/table.py                  # measure what benchmarks/data/h200_table.json does not have yet
    python benchmarks/table.py --again          # measure everything
    python benchmarks/table.py --only softmax   # rows that match; others stay as they are
    python benchmarks/table.py --print          # the table from the data; needs no GPU
    python benchmarks/readme.py                 # and into docs/measured.md and README

Every row is what `fusegen bench` gives: our kernel, the same chain unfused, torch eager, torch.compile, hand-written
peers, the bytes that DRAM moved. The file is written after every row, so that what a stopped run measured stays.
Run from the repository root, in an environment with fusegen and torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fusegen.language.spec import Chain, load_chains  # noqa: E402
from fusegen.language.types import DTYPES  # noqa: E402

if TYPE_CHECKING:
    from fusegen.errors import FusegenError
    from fusegen.measuring.benchmark import Bench

DATA = ROOT / "benchmarks" / "data" / "h200_table.json"
PEERS = ROOT / "benchmarks" / "peers.py"


@dataclass(frozen=True)
class Row:
    """One chain at one size, stored as `dtype` (None: as its spec says)."""

    chain: str
    sizes: Mapping[str, int]
    dtype: str | None = None

    @property
    def name(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{self.chain} {sizes} {self.dtype or ''}".strip()

    def at(self, chain: Chain) -> Chain:
        found = chain if self.dtype is None else chain.with_dtype(DTYPES[self.dtype])
        return found.at(**self.sizes)


ROWS = (
    Row("copy", {"n": 2**28}),
    Row("bias_relu", {"M": 65536, "N": 4096}, "f32"),
    Row("bias_relu", {"M": 65536, "N": 4096}, "bf16"),
    Row("bias_gelu_residual_ln", {"M": 4096, "N": 4096}),
    Row("bias_gelu_residual_ln", {"M": 16384, "N": 4096}),
    Row("bias_gelu_residual_ln", {"M": 32768, "N": 8192}),
    Row("bias_gelu_residual_ln", {"M": 16384, "N": 16384}),
    Row("bias_gelu_residual_ln", {"M": 4096, "N": 4096}, "f32"),
    Row("bias_gelu_residual_ln", {"M": 16384, "N": 4096}, "f32"),
    Row("scale_softmax", {"B": 1, "H": 32, "S": 4096, "N": 4096}),
    Row("scale_softmax", {"B": 1, "H": 16, "S": 8192, "N": 8192}, "bf16"),
    Row("scale_softmax", {"B": 1, "H": 1, "S": 4096, "N": 131072}),
    Row("scale_softmax", {"B": 1, "H": 1, "S": 512, "N": 1048576}),
    Row("scale_causal_softmax", {"B": 1, "H": 32, "S": 4096, "N": 4096}),
    Row("scale_causal_softmax", {"B": 1, "H": 16, "S": 8192, "N": 8192}, "bf16"),
    Row("masked_softmax", {"B": 4, "H": 16, "S": 1024, "N": 1024}),
    Row("log_softmax", {"T": 4096, "V": 32000}),
    Row("add_rmsnorm", {"M": 16384, "N": 4096}),
    Row("add_rmsnorm", {"M": 16384, "N": 8192}),
    Row("add_rmsnorm", {"M": 8, "N": 4096}),
    Row("rmsnorm", {"M": 262144, "N": 128}),
    Row("swiglu_elementwise", {"M": 8192, "N": 14336}),
)


# ---------------------------------------------------------------- measuring


def measure(rows: list[Row], file: Path, wanted: argparse.Namespace) -> int:
    """Measure `rows` and put each into `file` at once."""
    from fusegen.errors import FusegenError
    from fusegen.measuring.peers import load_peers

    try:
        bench = Workbench(wanted.target, wanted.repeats)
    except FusegenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    peers = load_peers(PEERS)
    data = read(file)
    for row in rows:
        print(f"\n{row.name}", flush=True)
        data[row.name], said = bench.facts(row, peers=peers.get(row.chain, {}), counters=wanted.counters)
        print(said, file=sys.stderr if isinstance(said, FusegenError) else sys.stdout, flush=True)
        write(file, data, ROWS, "table.py")
    return 1 if any("error" in data[row.name] for row in rows) else 0


class Workbench:
    """The GPU here, where rows are measured. Raises FusegenError where there is none that `target` fits."""

    def __init__(self, target: str | None, repeats: int) -> None:
        from fusegen.measuring.timing import Stopwatch
        from fusegen.pipeline import choose_target
        from fusegen.runtime import finding

        self.target = choose_target(target)
        self.watch = Stopwatch(finding.find(self.target, "gpu"))
        self.repeats = repeats
        self.chains = {chain.name: chain for chain in load_chains(ROOT / "specs")}

    def facts(self, row: Row, **how: Any) -> tuple[dict[str, Any], Bench | FusegenError]:
        """What the data keep of one row, and the report they are from, or why there is none."""
        import fusegen
        from fusegen.errors import FusegenError

        facts = {"row": row.name, "date": datetime.date.today().isoformat(), "gpu": gpu_text()}
        try:
            kernel = fusegen.compile(row.at(self.chains[row.chain]), self.target, on=f"gpu:{self.watch.device.ordinal}")
            report = fusegen.bench(kernel, repeats=self.repeats, watch=self.watch, **how)
        except FusegenError as error:
            return {**facts, "error": str(error).splitlines()[0]}, error
        finally:
            free_torch()
        return {**facts, **report.to_json()}, report


def free_torch() -> None:
    """Give back what torch keeps, or the next row may not find enough."""
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()


def gpu_text() -> str:
    """`NVIDIA H200, driver 580.159.04`; empty where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return lines[0].replace(", ", ", driver ", 1) if lines else ""


def read(file: Path) -> dict[str, Any]:
    """The measured rows by name; none where there is no file yet."""
    return {facts["row"]: facts for facts in json.loads(file.read_text())["rows"]} if file.is_file() else {}


def write(file: Path, data: Mapping[str, Any], rows: Sequence[Row], script: str) -> None:
    """In the order of `rows`, so that a row measured again changes its own lines alone."""
    order = {row.name: number for number, row in enumerate(rows)}
    found = sorted(data.values(), key=lambda facts: order.get(facts["row"], len(order)))
    document = {"command": f"python benchmarks/{script}", "rows": rounded(found)}
    file.write_text(json.dumps(document, indent=1) + "\n")


def rounded(value: Any) -> Any:
    """Floats at five digits: the driver's clock has no more."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


# ---------------------------------------------------------------- the table


def table(data: Mapping[str, Any]) -> str:
    """Markdown: a line for each measured row, and the conditions under which they were measured."""
    head = ["chain", "shape, dtype", "fusegen", "of floor", "unfused", "torch", "torch.compile", "by hand"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    before = ""
    for row in ROWS:
        facts = data.get(row.name)
        if facts is None or "error" in facts:
            continue
        cells = list(cells_of(row, facts))
        lines.append(f"| {' | '.join(['' if row.chain == before else row.chain, *cells])} |")
        before = row.chain
    return "\n".join([*lines, "", *conditions(list(data.values()))]) + "\n"


def cells_of(row: Row, facts: Mapping[str, Any]) -> Iterator[str]:
    entries = {entry["name"]: entry for entry in facts["entries"]}
    sizes = " x ".join(size_text(size) for size in facts["sizes"].values() if size != 1)
    taken, _, given = facts["signature"].partition(" -> ")
    first, last = taken.partition("[")[0], given.partition("[")[0]
    yield f"{sizes} {first if first == last else f'{first} to {last}'}"
    own = entries["fusegen"]
    yield us_text(own)
    yield f"{own['share']:.0%}" if own["share"] is not None else "refused"
    yield us_text(entries.get("unfused, one after another"))
    yield us_text(entries.get("torch eager"))
    yield us_text(best(e for name, e in entries.items() if name.startswith("torch.compile")))
    hand = best(e for e in facts["entries"] if e["kind"] == "peer")
    yield f"{hand['name']}: {us_text(hand)}" if hand else ""


def size_text(size: int) -> str:
    return f"{size >> 20}M" if size % 2**20 == 0 and size > 2**20 else str(size)


def best(entries: Iterator[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    measured = [entry for entry in entries if entry["us"] is not None and not entry["refused"]]
    return min(measured, key=lambda entry: entry["us"], default=None)


def us_text(entry: Mapping[str, Any] | None) -> str:
    """`101 us`; small ones with a decimal; empty where there is no figure."""
    if entry is None or entry["us"] is None or entry["refused"]:
        return ""
    return f"{entry['us']:.0f} us" if entry["us"] >= 20 else f"{entry['us']:.1f} us"


def conditions(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    measured = [facts for facts in rows if "error" not in facts]
    if not measured:
        return
    first, rates = measured[0], [facts["copy_gbs"] for facts in measured]
    dates = [facts["date"] for facts in measured]
    software = [first["versions"].get("compiler", ""), *(
        f"{name} {first['versions'][name]}" for name in ("torch", "triton") if name in first["versions"]
    )]  # fmt: skip
    spread = statistics.median(facts["entries"][0]["spread"] for facts in measured)
    yield (
        f"On one {first['gpu']}, with {', '.join(software)}, {between(min(dates), max(dates))}: {first['conditions']}. "
        f"From the 10th to the 90th percentile a time of fusegen's spreads over {spread:.1%} (the median row). "
        "The floor is the time of the bytes that have to move, at the rate of a large copy in the same run "
        f"({between(f'{min(rates):.0f}', f'{max(rates):.0f}')} GB/s); of a causal softmax they are three quarters. "
        "`unfused` is fusegen's own kernels, one an operator, where there are several; `torch.compile` the better of "
        "its default and max-autotune; `by hand` the fastest of those in `benchmarks/peers.py` that were installed."
    )


def between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print the table from the data and leave")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose name matches")
    parser.add_argument("--again", action="store_true", help="also rows that are in the data already")
    parser.add_argument("--out", type=Path, default=DATA, metavar="FILE")
    parser.add_argument("--target", default=None, help="without it, that of the GPU here")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--no-counters", dest="counters", action="store_false", help="don't run ncu")
    wanted = parser.parse_args()
    if wanted.print:
        print(table(read(wanted.out)), end="")
        return 0
    known = [] if wanted.again else [name for name, facts in read(wanted.out).items() if "error" not in facts]
    rows = [row for row in ROWS if re.search(wanted.only, row.name) and row.name not in known]
    return measure(rows, wanted.out, wanted)


if __name__ == "__main__":
    raise SystemExit(main())
