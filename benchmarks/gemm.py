"""Chains with matrix products against the vendor's library, in one run each: how much do the fused ops cost?

    python benchmarks/gemm.py                   # measure every row; the data go to benchmarks/data/h200_gemm.json
    python benchmarks/gemm.py --only swiglu     # rows that match; others stay as they are
    python benchmarks/gemm.py --torch           # torch eager and torch.compile too, which takes minutes
    python benchmarks/gemm.py --show            # the table from the data; needs no GPU

*bare* is the library's time for the products alone, with weights that share an operand side by side: a ratio of 1.00
means that everything around the products is free. Of few rows the weights' bytes are what counts, as a share of the
rate of a large copy. All by one stopwatch: cold L2, operands in turns, the library's launches between the kernel's own
(the power limit moves the clock by more than what is between them), medians; the data have the percentiles too.
Run from the repository root, in an environment with fusegen and torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import table  # noqa: E402

DATA = ROOT / "benchmarks" / "data" / "h200_gemm.json"


@dataclass(frozen=True)
class Row(table.Row):
    """One chain at one size; `ratio` to the bare products, or `us`, is what it should reach."""

    dtype: str = "bf16"
    ratio: float | None = None
    us: float | None = None


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
    Row("gemm_tf32", mnk(4096, 4096, 4096), "f32"),
    Row("gemm_swiglu", mnk(4096, 14336, 4096), ratio=1.02),
    Row("gemm_swiglu", mnk(4096, 14336, 4096), "f16", ratio=1.02),
    Row("rmsnorm_gemm", mnk(4096, 6144, 4096), ratio=1.02),
    Row("rmsnorm_gemm", mnk(16384, 6144, 4096), ratio=1.02),
    Row("rmsnorm_gemm_swiglu", mnk(2048, 11008, 4096)),
    Row("qkv", {"M": 4096, "D": 4096, "Q": 4096, "G": 1024}, ratio=1.02),
    Row("qkv", {"M": 16384, "D": 4096, "Q": 4096, "G": 1024}, ratio=1.02),
    Row("gemm_bias_gelu", mnk(8, 4096, 4096), us=12.0),
    Row("gemm_bias_gelu", mnk(64, 4096, 4096)),
    Row("gemm_tf32", mnk(8, 4096, 4096), "f32"),
    Row("gemm_swiglu", mnk(8, 14336, 4096), us=62.0),
    Row("rmsnorm_gemm", mnk(8, 6144, 4096), us=17.0),
    Row("qkv", {"M": 8, "D": 4096, "Q": 4096, "G": 1024}),
)


# ---------------------------------------------------------------- measuring


def measure(rows: list[Row], wanted: argparse.Namespace) -> int:
    """Measure `rows` and put each into the file at once."""
    from fusegen.errors import FusegenError

    try:
        bench = table.Workbench(wanted.target, wanted.repeats)
    except FusegenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    data = table.read(wanted.file)
    for row in rows:
        data[row.name], _ = bench.facts(
            row, peers=True if wanted.torch else "library", alone=not wanted.quick, counters=False
        )
        table.write(wanted.file, data, ROWS, "gemm.py")
        print("  ".join(cells(row, data[row.name])), flush=True)
    return 1 if any("error" in data[row.name] for row in rows) else 0


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


def table_of(data: Mapping[str, Any]) -> str:
    """Markdown: the columns of docs/measured.md, of the measured rows."""
    lines = ["| chain | M x N x K | fusegen, us | bare cuBLAS | ratio | cuBLASLt epilogue |", "|" + "---|" * 6]
    for row in ROWS:
        found = cells(row, data[row.name]) if row.name in data else []
        if len(found) == len(TITLES):
            chain, sizes, kind, us, _, _, bare, ratio, _, epilogue, _ = found
            lines.append(f"| {chain} | {sizes} {kind} | {us} | {bare} | {ratio.rstrip('x')} | {epilogue} |")
    return "\n".join(lines) + "\n"


def time_of(entries: list[Mapping[str, Any]], word: str) -> float | None:
    return next((e["us"] for e in entries if word in e["name"] and not e["refused"]), None)


def lines(rows: list[Row], data: Mapping[str, Any]) -> Iterator[str]:
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
    print("\n".join(lines(rows, table.read(wanted.file))))
    return status


if __name__ == "__main__":
    sys.exit(main())
