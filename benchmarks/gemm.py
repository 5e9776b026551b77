"""Chains with matrix products against the vendor's library, in one run each: how much do the fused ops cost?

    python benchmarks/gemm.py                   # measure every row; the data go to benchmarks/data/h200_gemm.json
    python benchmarks/gemm.py --only swiglu     # rows that match; others stay as they are
    python benchmarks/gemm.py --torch           # torch eager and torch.compile too, which takes minutes
    python benchmarks/gemm.py --show            # the table from the data; needs no GPU

*bare* is the library's time for the products alone, with weights that share an operand side by side: a ratio of 1.00
means that everything around the products is free. Of few rows the weights' bytes are what counts, as a share of the
rate of a large copy. All by one stopwatch: cold L2, operands in turns, medians; the data have the percentiles too.
Run from the repository root, in an environment with fusegen and torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.table import free_torch, gpu_text, rounded  # noqa: E402
from fusegen.spec import Chain, load_chains  # noqa: E402
from fusegen.types import DTYPES  # noqa: E402

DATA = ROOT / "benchmarks" / "data" / "h200_gemm.json"


@dataclass(frozen=True)
class Row:
    """One chain at one size; `ratio` to the bare products, or `us`, is what it should reach."""

    chain: str
    sizes: Mapping[str, int]
    dtype: str = "bf16"
    ratio: float | None = None
    us: float | None = None

    @property
    def name(self) -> str:
        return f"{self.chain} {' '.join(f'{name}={size}' for name, size in self.sizes.items())} {self.dtype}"

    def at(self, chain: Chain) -> Chain:
        return chain.with_dtype(DTYPES[self.dtype]).at(**self.sizes)


def mnk(m: int, n: int, k: int) -> Mapping[str, int]:
    return {"M": m, "N": n, "K": k}


ROWS = (
    Row("gemm_bias_gelu", mnk(4096, 4096, 4096), ratio=1.03),
    Row("gemm_bias_gelu", mnk(16384, 4096, 4096), ratio=1.02),
    Row("gemm_bias_gelu", mnk(8192, 8192, 8192), ratio=1.02),
    Row("gemm_bias_gelu", mnk(4096, 4096, 4096), "f16", ratio=1.03),
    Row("gemm_bias_gelu", mnk(16384, 4096, 4096), "f16", ratio=1.02),
    Row("gemm_bias_gelu", mnk(8192, 8192, 8192), "f16", ratio=1.02),
    Row("gemm_bias_relu_residual", mnk(4096, 4096, 4096)),
    Row("gemm_swiglu", mnk(4096, 14336, 4096), ratio=1.02),
    Row("gemm_swiglu", mnk(4096, 14336, 4096), "f16", ratio=1.02),
    Row("rmsnorm_gemm", mnk(4096, 6144, 4096), ratio=1.02),
    Row("rmsnorm_gemm", mnk(16384, 6144, 4096), ratio=1.02),
    Row("rmsnorm_gemm_swiglu", mnk(2048, 11008, 4096)),
    Row("qkv", {"M": 4096, "D": 4096, "Q": 4096, "G": 1024}),
    Row("gemm_bias_gelu", mnk(8, 4096, 4096), us=12.0),
    Row("gemm_bias_gelu", mnk(64, 4096, 4096)),
    Row("gemm_swiglu", mnk(8, 14336, 4096), us=62.0),
    Row("rmsnorm_gemm", mnk(8, 6144, 4096), us=17.0),
    Row("qkv", {"M": 8, "D": 4096, "Q": 4096, "G": 1024}),
)


# ---------------------------------------------------------------- measuring


def measure(rows: list[Row], wanted: argparse.Namespace) -> int:
    """Measure `rows` and put each into the file at once."""
    import fusegen
    from fusegen.errors import FusegenError
    from fusegen.pipeline import choose_target
    from fusegen.runtime import devices
    from fusegen.timing import Stopwatch

    target = choose_target(wanted.target)
    try:
        watch = Stopwatch(devices.find(target, "gpu"))
    except FusegenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    chains = {chain.name: chain for chain in load_chains(ROOT / "specs")}
    data = read(wanted.file)
    for row in rows:
        facts: dict[str, Any] = {"row": row.name, "date": datetime.date.today().isoformat(), "gpu": gpu_text()}
        try:
            kernel = fusegen.compile(row.at(chains[row.chain]), target, on=f"gpu:{watch.device.ordinal}")
            report = fusegen.bench(
                kernel, peers=True if wanted.torch else "library", alone=not wanted.quick, counters=False,
                repeats=wanted.repeats, watch=watch,
            )  # fmt: skip
            facts |= report.to_json()
        except FusegenError as error:
            facts["error"] = str(error).splitlines()[0]
        data[row.name] = facts
        write(wanted.file, data)
        print("  ".join(cells(row, facts)), flush=True)
        free_torch()
    return 1 if any("error" in data[row.name] for row in rows) else 0


def read(file: Path) -> dict[str, Any]:
    """The measured rows by name; none where there is no file yet."""
    return {facts["row"]: facts for facts in json.loads(file.read_text())["rows"]} if file.is_file() else {}


def write(file: Path, data: Mapping[str, Any]) -> None:
    order = {row.name: number for number, row in enumerate(ROWS)}
    rows = sorted(data.values(), key=lambda facts: order.get(facts["row"], len(order)))
    file.write_text(json.dumps({"command": "python benchmarks/gemm.py", "rows": rounded(rows)}, indent=1) + "\n")


# ---------------------------------------------------------------- telling

TITLES = ("chain", "sizes", "type", "us", "TFLOP/s", "of copy rate", "bare", "ratio", "reach", "Lt epilogue", "unfused")


def cells(row: Row, facts: Mapping[str, Any]) -> list[str]:
    """One row of the table, in TITLES."""
    sizes = " x ".join(map(str, row.sizes.values()))
    if "error" in facts:
        return [row.chain, sizes, row.dtype, f"refused: {facts['error']}"]
    entries = facts["entries"]
    own = entries[0]
    bare, epilogue, unfused = (time_of(entries, word) for word in ("products alone", "Lt, bias", "one after another"))
    if own["refused"] or not own["us"]:
        return [row.chain, sizes, row.dtype, f"refused: {own['refused']}"]
    reach = f"{row.ratio:.2f}x" if row.ratio else f"{row.us:.0f} us" if row.us else ""
    return [
        row.chain, sizes, row.dtype, f"{own['us']:.1f}", f"{own['tflops']:.0f}",
        f"{own['gbs'] / facts['copy_gbs']:.0%}", f"{bare:.1f}" if bare else "",
        f"{own['us'] / bare:.3f}x" if bare else "", reach, f"{epilogue:.1f}" if epilogue else "",
        f"{unfused:.1f}" if unfused else "",
    ]  # fmt: skip


def time_of(entries: list[Mapping[str, Any]], word: str) -> float | None:
    return next((e["us"] for e in entries if word in e["name"] and not e["refused"]), None)


def table(rows: list[Row], data: Mapping[str, Any]) -> Iterator[str]:
    found = [list(TITLES), *(cells(row, data[row.name]) for row in rows if row.name in data)]
    widths = [max(len(line[i]) for line in found if len(line) == len(TITLES)) for i in range(len(TITLES))]
    for line in found:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--target", default=None, help="as `fusegen` takes it; the GPU here")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="without the unfused chain")
    parser.add_argument("--torch", action="store_true", help="with torch eager and torch.compile")
    parser.add_argument("--show", action="store_true", help="the table from the data")
    parser.add_argument("--file", type=Path, default=DATA, help="where the data are")
    wanted = parser.parse_args()
    rows = [row for row in ROWS if wanted.only in row.name]
    status = 0 if wanted.show else measure(rows, wanted)
    print("\n".join(table(rows, read(wanted.file))))
    return status


if __name__ == "__main__":
    sys.exit(main())
