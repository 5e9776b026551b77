"""Searches on disk: what a process starts with is what it would find."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from fusegen.emitting.sources import spelled
from fusegen.errors import NoPlan
from fusegen.language.graph import Graph
from fusegen.planner.programs import cheapest, kept
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.search import Search
from fusegen.storage import Store
from fusegen.targets import H200, Target
from tests.specs import SHIPPED

MOE: Graph = SHIPPED["moe_mlp"].graph


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is in the cache, whose folder this is."""
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    return tmp_path / "searches"


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values were in memory in each state that was looked at."""
    states: list[int] = []
    look = Search.look

    def counted(search: Search, state: Any) -> Any:
        states.append(len(state))
        return look(search, state)

    monkeypatch.setattr(Search, "look", counted)
    return states


def anew(graph: Graph = MOE, target: Target = H200, *limits: float) -> ProgramPlan:
    """As in another process: of a graph that remembers nothing."""
    return cheapest(pickle.loads(pickle.dumps(graph)), target, *limits)


def test_a_second_process_looks_at_one_state(looked: list[int]) -> None:
    first = anew()
    assert len(looked) > kept.WORTH_KEEPING
    looked.clear()
    second = anew()
    assert len(looked) == 1
    assert [spelled(step.plan) for step in second.steps] == [spelled(step.plan) for step in first.steps]
    assert [(s.reads, s.writes, s.values, s.sizes) for s in second.steps] == [
        (s.reads, s.writes, s.values, s.sizes) for s in first.steps
    ]
    assert [(s.name, s.type, s.home, s.why) for s in second.between] == [
        (s.name, s.type, s.home, s.why) for s in first.between
    ]
    assert second.cuts == first.cuts
    assert len(first.cuts) > 1


@pytest.mark.parametrize("change", ["sizes", "target", "limit", "code"])
def test_what_it_depends_on(looked: list[int], monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    anew()
    looked.clear()
    if change == "code":
        monkeypatch.setattr(kept, "stamp_of", lambda: "another")
    graph = MOE.at(T=8192) if change == "sizes" else MOE
    target = Target(**{**vars_of(H200), "sms": 131}) if change == "target" else H200
    anew(graph, target, *[1e6] * (change == "limit"))
    assert len(looked) > 1


def vars_of(target: Target) -> dict[str, Any]:
    return {name: getattr(target, name) for name in target.__dataclass_fields__}


def test_a_refusal_is_kept(looked: list[int]) -> None:
    below_us = 0.99 * anew().time_us
    with pytest.raises(NoPlan) as first:
        anew(MOE, H200, below_us)
    looked.clear()
    with pytest.raises(NoPlan) as second:
        anew(MOE, H200, below_us)
    assert str(second.value) == str(first.value)
    assert not looked


@pytest.mark.parametrize(
    "wrong",
    [
        {"stored": None}, {"stored": [10_000]}, {"stored": [-1], "whys": [""]}, {"whys": []}, {"states": "many"},
        {"cuts": [["h", 2]]}, {"cuts": [[["h"], 2, "soon", ""]]}, {"cuts": 3},
    ],
)  # fmt: skip
def test_what_no_search_wrote_is_searched_again(
    folder: Path, looked: list[int], monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    first = anew()
    load = Store.load

    def changed(store: Store, key: Any, read: Any) -> Any:
        return load(store, key, lambda facts, data: read({**facts, **json.loads(json.dumps(wrong))}, data))

    monkeypatch.setattr(Store, "load", changed)
    looked.clear()
    assert anew().cuts == first.cuts
    assert len(looked) > 1


def test_a_short_search_is_not_kept(folder: Path) -> None:
    cheapest(SHIPPED["lora"].graph.at(M=64), H200)
    assert not folder.exists()
