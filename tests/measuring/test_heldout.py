"""benchmarks/heldout.py and tune_shipped.py: their cases can be planned, and none of the former is tuned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import heldout, tune_shipped
from fusegen.database import problem_of, read_shipped
from fusegen.planner import candidates
from fusegen.targets import H200

ROOT = Path(__file__).resolve().parents[2]


def test_every_case_can_be_planned_and_none_is_tuned() -> None:
    names = [case.name for case in heldout.CASES]
    assert len(set(names)) == len(names)
    tuned = {(row.graph, row.cols, row.rows) for row in read_shipped()}
    for case in heldout.CASES:
        problem = problem_of(candidates(case.sized.graph, H200))
        assert problem is not None, case.name
        assert (problem.graph, problem.cols, problem.rows) not in tuned, f"{case.name} is no longer held out"


def test_every_chain_has_a_case() -> None:
    assert set(heldout.chains()) == {case.chain for case in heldout.CASES}


@pytest.mark.parametrize("name", ["h200_heldout.json", "h200_heldout_candidates.json"])
def test_what_was_measured_is_of_cases(name: str) -> None:
    data = json.loads((ROOT / "benchmarks" / "data" / name).read_text())
    rows = [facts["row"] for facts in data["rows"]]
    assert len(set(rows)) == len(rows)
    assert set(rows) <= {case.name for case in heldout.CASES}


def test_the_table_begins_with_the_slowest() -> None:
    facts: dict[str, Any] = {"predicted_us": 1.0, "configuration": "here", "us": 10.0}
    cases = heldout.CASES[:3]
    data: dict[str, dict[str, Any]] = {
        cases[0].name: {"row": cases[0].name, **facts, "share": 0.9, "alike": 0.95},
        cases[1].name: {"row": cases[1].name, **facts, "share": 0.5, "ratio": 1.25, "bare_us": 8.0},
        cases[2].name: {"row": cases[2].name, "error": "it was refused"},
    }
    candidate = {"rank": 1, "configuration": "there", "predicted_us": 2.0, "us": 8.0}
    data[cases[0].name]["candidates"] = [{**candidate, "us": 7.0, "refused": "it spills"}, candidate]
    lines = list(heldout.lines(data, cases))
    assert [line.split("  ")[0] for line in lines[1:]] == [cases[2].name, cases[1].name, cases[0].name]
    assert "8.0 there" in lines[3], "what the gate refuses is not the best"
    assert "95%" in lines[3]
    assert "1.250" in lines[2]


def test_shipped_cases_are_of_chains_that_can_be_planned() -> None:
    chains = tune_shipped.load(str(ROOT / "specs"))
    for case in tune_shipped.CASES:
        graph = tune_shipped.chain_of(case, chains).graph
        kind = "products" if graph.products else "selections" if graph.picks else "rows"
        assert case.kind == kind
        assert candidates(graph, H200).plans
    assert set(tune_shipped.EFFORTS) == {case.kind for case in tune_shipped.CASES} == set(tune_shipped.KINDS)
