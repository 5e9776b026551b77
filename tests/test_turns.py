"""A run of the whole suite has the dear cases of one turn, and every case has its turn."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests import turns

SECONDS = {"dear": 4.0, "alone": 9.0, "several": 0.5}
CASES = [*(f"dear[{i}]" for i in range(10)), "alone", *(f"several[{i}]" for i in range(7)), "cheap[0]", "cheap[1]"]
SUITE = """
import pytest

@pytest.mark.parametrize("i", range(12))
def test_dear(i): pass

@pytest.mark.always
def test_always(): pass

def test_cheap(): pass
"""
CONFTEST = """
from tests import turns
from tests.conftest import pytest_addoption, pytest_collection_modifyitems, pytest_configure, pytest_configure_node

turns.known = lambda: {"test_some.py::test_dear": 2.0, "test_some.py::test_always": 9.0}
"""


def test_every_dear_case_has_one_turn_and_turns_are_alike() -> None:
    dealt = turns.dealt(CASES, SECONDS)
    assert set(dealt) == {case for case in CASES if not case.startswith("cheap")}
    of_each = Counter(dealt[f"dear[{i}]"] for i in range(10))
    assert len(of_each) == turns.TURNS
    assert max(of_each.values()) - min(of_each.values()) <= 1
    loads = dict.fromkeys(range(1, turns.TURNS + 1), 0.0)
    for case, turn in dealt.items():
        loads[turn] += SECONDS[turns.function_of(case)]
    assert max(loads.values()) - min(loads.values()) <= max(SECONDS.values())
    assert turns.dealt(CASES[::-1], SECONDS).keys() == dealt.keys()


def test_turns_follow_the_days() -> None:
    first = date(2026, 11, 28)
    days = [turns.of_day(first + timedelta(day)) for day in range(2 * turns.TURNS)]
    assert sorted(days[: turns.TURNS]) == list(range(1, turns.TURNS + 1)), "each has its day"
    assert days[: turns.TURNS] == days[turns.TURNS :]


def test_what_is_chosen() -> None:
    assert turns.chosen(None, whole=True) in range(1, turns.TURNS + 1)
    assert turns.chosen(None, whole=False) is None
    assert turns.chosen(turns.ALL, whole=True) is None
    assert turns.chosen("2", whole=False) == 2
    with pytest.raises(ValueError, match=f"--turn 9: a turn is 1 to {turns.TURNS}, or all"):
        turns.chosen("9", whole=True)


def test_what_is_measured_becomes_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LEDGER", tmp_path / "dear.json")
    turns.write([("b.py::test_b[1]", 1.0), ("b.py::test_b[2]", 3.0), ("a.py::test_a", 0.5), ("a.py::test_cheap", 0.01)])
    assert list(turns.known().items()) == [("a.py::test_a", 0.5), ("b.py::test_b", 2.0)]


def test_the_ledger_names_tests_that_are_there(root: Path) -> None:
    for test, seconds in turns.known().items():
        file, _, name = test.partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (root / file).read_text(), (
            f"{test}: --update-costs mends tests/dear.json"
        )
        assert seconds >= turns.DEAR_S


@pytest.fixture
def suite(root: Path, tmp_path: Path) -> Path:
    (tmp_path / "test_some.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ntestpaths = .\npythonpath = {root}\nmarkers = always\n")
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "ran"),
    [
        ([], 4),  # two dear cases of twelve, what every run has, and what is cheap
        (["--turn", "1"], 4),
        (["--turn", "all"], 14),
        (["--all"], 14),
        (["test_some.py"], 14),
        (["-k", "dear"], 12),
        (["-n", "2"], 4),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else str(each),
)
def test_a_run_has_those_of_its_turn(suite: Path, asked: list[str], ran: int) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *asked],
        cwd=suite, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    assert f"{ran} passed" in made.stdout
