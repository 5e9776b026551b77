"""Output fits: 80 columns of a terminal that has 80, and 100 in a pipe. What is wrapped there, `--json` has whole."""

from __future__ import annotations

import functools
import io
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fusegen.cli import plans
from fusegen.cli.doctor import Check, Examination, examine
from fusegen.cli.health import show
from fusegen.cli.programs import kernel_candidates
from fusegen.database import choose
from fusegen.errors import NoPlan
from fusegen.planner import candidates
from fusegen.planner.model import Candidates, Plan
from fusegen.reporting.explaining import explanation
from fusegen.targets import TARGETS, Target
from tests.conftest import ROOT
from tests.specs import SHIPPED, planned

CHAINS = tuple(SHIPPED.values())
STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Fits = Callable[[Callable[[], object]], str]


@pytest.fixture(params=[80, 100], ids=["terminal", "pipe"])
def fits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fits:
    """`fits(show)` is what that says, in lines that fit."""
    columns: int = request.param
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")

    def said(show: Callable[[], object]) -> str:
        stream = Terminal() if columns == 80 else io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            show()
        text = STYLE.sub("", stream.getvalue())
        assert [line for line in text.splitlines() if len(line.rstrip()) > columns] == []
        return text

    return said


def words(text: str) -> str:
    return " ".join(text.split())


@functools.cache
def found(target: Target, every: bool) -> tuple[Candidates, ...]:
    """Of every third chain, from another one on for each target, or of all."""
    some = slice(None) if every else slice(list(TARGETS.values()).index(target) % 3, None, 3)
    return tuple(candidates(chain.graph, target) for chain in CHAINS[some])


def test_list(fits: Fits) -> None:
    text = words(fits(lambda: plans.show_chains(CHAINS)))
    assert all(chain.name in text for chain in CHAINS)
    assert all(size in text for chain in CHAINS for size in chain.graph.sizes_text().split())
    assert "each in" in text
    fits(lambda: plans.show_chains(CHAINS[:1]))


def test_list_of_ops(fits: Fits) -> None:
    text = fits(plans.show_ops)
    assert all(fact["doc"].split()[0] in text for fact in plans.op_facts())
    assert "exponential(x)" in text


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_plan_and_explain(fits: Fits, target: Target, request: pytest.FixtureRequest) -> None:
    for each in found(target, request.config.getoption("--all")):
        try:
            choice = choose(each)
        except NoPlan:
            continue
        few = replace(each, plans=(*each.plans[:2], each.plans[-1]))  # others differ by their numbers
        text = fits(functools.partial(plans.show_plan, few, choice, True))
        assert all(f"{plan.cost.time_us:.1f} us" in text for plan in few.plans)
        assert all(f"- {refusal.rule}: " in text for refusal in each.refusals)
        sections = explanation(each, choice)
        said = words(fits(functools.partial(plans.show_explanation, choice.plan, sections)))
        assert all(words(point.text).split()[-1] in said for section in sections for point in section.points)


LONG = "a library that is there, of another version than this one was made for: libsomething.so.42 has no such symbol"


def test_doctor(fits: Fits) -> None:
    here = examine()
    bad = Check("a library", "broken", LONG, f"pip install --force-reinstall {LONG}")
    text = fits(lambda: show(Examination((*here.checks, bad), here.vendors)))
    assert all(check.name in text for check in here.checks)
    fits(lambda: show(Examination((bad,), ())))


@functools.cache
def first_plans(name: str, target: Target) -> tuple[Plan, ...]:
    """A kernel's, or those of a program's; of one that takes seconds to search for, another program's."""
    chain = SHIPPED["mlp" if name in ("decoder_layer", "top_p_sample") else name]
    return tuple(found.need()[0] for found in kernel_candidates(chain, target))


@pytest.mark.parametrize("name", ["fp8_block_gemm", "decoder_layer_prefill"])
def test_the_demo_can_judge_what_it_makes(name: str) -> None:
    """Groups of 128 come out even, and of a layer's many products enough has an error bound."""
    demo: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "demo.py"))
    assert all(demo["small"](chain).graph.sizes for chain in CHAINS)
    (chain,) = (chain for chain in CHAINS if chain.name == name)
    assert demo["validated"](demo["small"](chain), demo["TARGETS"][0])[0].ok


def test_demo(fits: Fits, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it says but its errors, without what takes time: nothing is emitted, compiled or run."""
    demo: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "demo.py"))
    used = demo["main"].__globals__
    binary = SimpleNamespace(resources=SimpleNamespace(registers=255), occupancy=SimpleNamespace(fraction=1.0))
    report = SimpleNamespace(cases=[SimpleNamespace(name="normal", relative_l2=1.5e-3)])

    told: list[str] = []

    def made(chains: Any) -> Iterator[Any]:
        for number, chain in enumerate(chains):
            able = [target for target in demo["TARGETS"] if planned(chain, target)]
            for target in able[number % len(able) :][:1]:  # one is enough for words
                told.append(chain.name)
                plans = first_plans(chain.name, target)
                validation = SimpleNamespace(ok=True, on=f"emulator (checking), warp {target.warp}", report=report)
                yield demo["Result"](chain, target, plans, (binary,) * len(plans), validation)

    nothing = SimpleNamespace(flat=list, all_emitted=lambda *_: (), write=lambda *_: None, beyond=None)
    for name, value in {"make_all": made, "golden": nothing, "examine": lambda: Examination((), ())}.items():
        monkeypatch.setitem(used, name, value)
    text = fits(lambda: demo["main"]([]))
    count = len(told)
    assert set(told) == {chain.name for chain in CHAINS}
    assert f"{count} of {count} kernels and programs agree" in words(text)
    assert "bias_gelu_residual_ln" in text
