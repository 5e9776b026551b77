"""The tables of speeds in docs/measured.md and the headline of README, made from the committed data; needs no GPU.

    python benchmarks/readme.py     # writes each table between its marks

A table stands between `<!-- table: benchmarks/data/NAME.json -->`, or `<!-- table: headline -->`, and
`<!-- end of table -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import gemm, table, topk  # noqa: E402

README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured.md"
MARKED = re.compile(
    r"(<!-- table: (?:benchmarks/data/)?(\w+)(?:\.json)? -->\n)(.*?)(<!-- end of table -->\n)", re.DOTALL
)
DATA = ROOT / "benchmarks" / "data"

WHOLE = ("unfused", "torch", "peer")  # entries that compute the whole chain; "piece" is one operator of it

# the rows of README's table, by their names in the data
HEADLINE = (
    ("h200_table", "bias_relu M=65536 N=4096 bf16"),
    ("h200_table", "bias_gelu_residual_ln M=16384 N=4096"),
    ("h200_table", "scale_softmax B=1 H=32 S=4096 N=4096"),
    ("h200_table", "scale_causal_softmax B=1 H=16 S=8192 N=8192 bf16"),
    ("h200_table", "log_softmax T=4096 V=32000"),
    ("h200_table", "add_rmsnorm M=16384 N=4096"),
    ("h200_gemm", "gemm_bias_gelu M=4096 N=4096 K=4096 bf16"),
    ("h200_gemm", "gemm_swiglu M=4096 N=14336 K=4096 bf16"),
    ("h200_gemm", "rmsnorm_gemm M=4096 N=6144 K=4096 bf16"),
    ("h200_gemm", "gemm_bias_gelu M=8 N=4096 K=4096 bf16"),
    ("h200_topk", "likeliest B=4096 V=32000 K=128"),
    ("h200_topk", "routed_bf16 B=131072 V=256 K=8"),
)


def headline(folder: Path = DATA) -> str:
    """Markdown: of each kind of chain a few rows, each beside the fastest of what else was measured with it."""
    rows, products = table.read(folder / "h200_table.json"), table.read(folder / "h200_gemm.json")
    selections = json.loads((folder / "h200_topk.json").read_text())
    chosen = {name_of(facts): facts for facts in selections["beside torch"]}
    lines = ["| chain | shape, dtype | fusegen | of copy rate | beside it |", "|" + "---|" * 5]
    found: list[Mapping[str, Any]] = []
    for source, name in HEADLINE:
        if source == "h200_topk":
            cells, facts = topk.cells_of(chosen[name]), selections
            line = [*cells[:-1], f"torch: {cells[-1]}"]
        elif source == "h200_gemm":
            facts = products[name]
            line = product_cells(facts)
        else:
            facts = rows[name]
            line = row_cells(next(row for row in table.ROWS if row.name == name), facts)
        found.append(facts)
        lines.append(f"| {' | '.join(line)} |")
    return "\n".join([*lines, "", *conditions(found)]) + "\n"


def name_of(facts: Mapping[str, Any]) -> str:
    """`likeliest B=64 V=50257 K=50`."""
    return " ".join([facts["chain"], *(f"{name}={size}" for name, size in facts["sizes"].items())])


def row_cells(row: table.Row, facts: Mapping[str, Any]) -> list[str]:
    shape, own, share, *_ = table.cells_of(row, facts)
    other = table.best(e for e in facts["entries"] if e["kind"] in WHOLE and "each with" not in e["name"])
    name = re.split(r",| eager| max", other["name"])[0] if other else ""
    beside = f"{name}: {table.us_text(other)}" if other else ""
    return [row.chain, shape, own, share, beside]


def product_cells(facts: Mapping[str, Any]) -> list[str]:
    row = next(row for row in gemm.ROWS if row.name == facts["row"])
    chain, sizes, kind, us, _, _, bare, *_ = gemm.cells(row, facts)
    return [chain, f"{sizes} {kind}", f"{us} us", "", f"bare cuBLAS: {bare} us"]


def conditions(found: list[Mapping[str, Any]]) -> Iterator[str]:
    dates, (gpu,) = [facts["date"] for facts in found], {facts["gpu"] for facts in found}
    yield (
        f"On one {gpu}, {table.between(min(dates), max(dates))}; medians, cold L2. Rows are tuned plans, products and "
        "top-k the planner's own choice."
    )


TABLES: Mapping[str, Callable[[Path], str]] = {
    "h200_table": lambda folder: table.table(table.read(folder / "h200_table.json")),
    "h200_gemm": lambda folder: gemm.table_of(table.read(folder / "h200_gemm.json")),
    "h200_topk": lambda folder: topk.table_of(json.loads((folder / "h200_topk.json").read_text())),
    "headline": headline,
}


def inserted(text: str, folder: Path = DATA) -> str:
    """A document's text with each table, of the data in `folder`, in its place."""
    return MARKED.sub(lambda m: m[1] + TABLES[m[2]](folder) + m[4], text)


if __name__ == "__main__":
    for document in (README, MEASURED):
        document.write_text(inserted(document.read_text()))
