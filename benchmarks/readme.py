"""README's tables of speeds, made from the committed data; needs no GPU.

    python benchmarks/readme.py     # writes each table between its marks

A table stands between `<!-- table: benchmarks/data/NAME.json -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import gemm, table, topk  # noqa: E402

README = ROOT / "README.md"
MARKED = re.compile(r"(<!-- table: benchmarks/data/(\w+)\.json -->\n)(.*?)(<!-- end of table -->\n)", re.DOTALL)
DATA = ROOT / "benchmarks" / "data"
TABLES: Mapping[str, Callable[[Path], str]] = {
    "h200_table": lambda file: table.table(table.read(file)),
    "h200_gemm": lambda file: gemm.table_of(table.read(file)),
    "h200_topk": lambda file: topk.table_of(json.loads(file.read_text())),
}


def inserted(text: str, folder: Path = DATA) -> str:
    """README's text with each table, of the data in `folder`, in its place."""
    return MARKED.sub(lambda m: m[1] + TABLES[m[2]](folder / f"{m[2]}.json") + m[4], text)


if __name__ == "__main__":
    README.write_text(inserted(README.read_text()))
