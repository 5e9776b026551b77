"""benchmarks/table.py: its rows are chains at sizes they have, and its table says what its data does."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import gemm, readme, topk
from fusegen.language.spec import load_chains
from fusegen.measuring.peers import load_peers
from fusegen.planner import plan
from fusegen.targets import H200

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_table", ROOT / "benchmarks" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_table"] = module  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module


def entry(name: str, kind: str, us: float | None, refused: str | None = None) -> dict[str, Any]:
    share = None if us is None or refused else 100 / us
    return {"name": name, "kind": kind, "us": us, "share": share, "spread": 0.01, "refused": refused}


def measured(table: ModuleType) -> dict[str, Any]:
    """Two rows that were measured, and one that failed."""
    rows = [table.ROWS[0], table.ROWS[16], table.ROWS[1]]
    facts: list[dict[str, Any]] = [
        {"entries": [entry("fusegen", "fusegen", 104.0), entry("unfused, one after another", "unfused", 105.2)],
         "sizes": {"n": 2**28}, "signature": "f32[n] -> f32[n]"},
        {"entries": [
            entry("fusegen", "fusegen", 9.24, "data in cache"), entry("torch eager", "torch", None, "torch is missing"),
            entry("torch.compile", "torch", 150.0), entry("torch.compile max-autotune", "torch", 140.0),
            entry("Slow", "peer", 130.0), entry("Fast", "peer", 120.0), entry("Refused", "peer", 1.0, "data in cache"),
        ], "sizes": {"T": 4096, "V": 32000}, "signature": "bf16[T, V] -> f32[T, V]"},
        {"error": "no memory"},
    ]  # fmt: skip
    common = {"date": "2026-11-21", "gpu": "NVIDIA X, driver 1", "copy_gbs": 4000.0, "conditions": "median of 30",
              "versions": {"compiler": "nvrtc 13.0", "torch": "2.11"}}  # fmt: skip
    return {row.name: {"row": row.name, **common, **fact} for row, fact in zip(rows, facts, strict=True)}


def test_every_row_is_a_chain_that_can_be_planned(table: ModuleType) -> None:
    chains = {chain.name: chain for chain in load_chains(ROOT / "specs")}
    names = [row.name for row in table.ROWS]
    assert len(set(names)) == len(names)
    for row in table.ROWS:
        chain = row.at(chains[row.chain])
        assert plan(chain.graph, H200).cost.traffic.ideal > 0
        assert set(row.sizes) == set(chain.graph.sizes)


def test_peers_are_of_chains_that_there_are(table: ModuleType) -> None:
    assert set(load_peers(ROOT / "benchmarks" / "peers.py")) <= {chain.name for chain in load_chains(ROOT / "specs")}


def test_the_table_of_measured_rows(table: ModuleType) -> None:
    lines = table.table(measured(table)).splitlines()
    assert lines[2:4] == [
        "| copy | 256M f32 | 104 us | 96% | 105 us |  |  |  |",
        "| log_softmax | 4096 x 32000 bf16 to f32 |  | refused |  |  | 140 us | Fast: 120 us |",
    ]
    assert "bias_relu" not in "".join(lines)
    assert lines[-1].startswith("On one NVIDIA X, driver 1, with nvrtc 13.0, torch 2.11, 2026-11-21: median of 30.")
    assert "(4000 GB/s)" in lines[-1]


def test_the_table_goes_between_its_marks(table: ModuleType, tmp_path: Path) -> None:
    table.write(tmp_path / "h200_table.json", measured(table), table.ROWS, "table.py")
    text = "a\n<!-- table: benchmarks/data/h200_table.json -->\nold\n<!-- end of table -->\nb\n"
    made = readme.inserted(text, tmp_path)
    assert made.startswith("a\n<!-- table: benchmarks/data/h200_table.json -->\n| chain |")
    assert made.endswith("<!-- end of table -->\nb\n")
    assert "old" not in made
    assert readme.inserted(made, tmp_path) == made


def test_rows_are_kept_in_order_and_read_again(table: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    assert table.read(file) == {}
    data = measured(table)
    table.write(file, data, table.ROWS, "table.py")
    assert table.read(file) == table.rounded(data)
    order = [row["row"] for row in json.loads(file.read_text())["rows"]]
    assert order == [table.ROWS[0].name, table.ROWS[1].name, table.ROWS[16].name]


def test_documents_have_the_tables_of_the_data(request: pytest.FixtureRequest) -> None:
    texts = {document: document.read_text() for document in (readme.README, readme.MEASURED)}
    marked = [name for text in texts.values() for _, name, _, _ in readme.MARKED.findall(text)]
    assert sorted(marked) == sorted(readme.TABLES)
    for document, text in texts.items():
        fresh = readme.inserted(text)
        if request.config.getoption("--update-golden"):
            document.write_text(fresh)
        else:
            assert fresh == text, f"{document.name} is not what the data say; `python benchmarks/readme.py` writes it"


def test_the_headline_is_short_and_says_what_the_tables_say() -> None:
    """At most 12 rows, each of them in docs/measured.md with the same figures; one operator of a chain is no rival."""
    lines = readme.headline().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[2:] if line.startswith("|")]
    assert len(rows) == len(readme.HEADLINE) <= 12
    text = readme.MEASURED.read_text()
    for _, shape, own, *_, beside in rows:
        _, _, time = beside.rpartition(": ")
        assert all(any(part in line and shape in line for line in text.splitlines())
                   for part in (own.removesuffix(" us"), time.removesuffix(" us"))), (shape, own, beside)  # fmt: skip
    assert lines[-1].startswith("On one NVIDIA H200, driver ")


def test_the_tables_of_products_and_selections(table: ModuleType) -> None:
    """Each measured row once, and the rows that were refused or wrong not at all."""
    products = table.read(readme.DATA / "h200_gemm.json")
    refused = {**products, gemm.ROWS[0].name: {"error": "no memory"}}
    assert len(gemm.table_of(products).splitlines()) == 2 + len(products)
    assert len(gemm.table_of(refused).splitlines()) == 1 + len(products)
    assert (
        gemm.table_of({}).splitlines()[0]
        == "| chain | M x N x K | fusegen, us | bare cuBLAS | ratio | cuBLASLt epilogue |"
    )
    row = {"chain": "greedy", "sizes": {"B": 8, "V": 100}, "measured_us": 9.96, "share": 0.5, "torch_us": 20.4}
    chosen = {"beside torch": [{**row, "right": True}, {**row, "right": False}]}
    assert topk.table_of(chosen).splitlines()[2:] == ["| argmax, bf16 | 8 x 100, 1 | 10.0 us | 50% | 20 us |"]
