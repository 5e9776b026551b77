"""Persistent blocks, which prefetch the next row while they write this one: in the emulator, whole and broken."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fusegen.emitting.rendering import render
from fusegen.emulator import compiler
from fusegen.errors import FusegenError
from fusegen.language.spec import load_chains
from fusegen.planner import candidates
from fusegen.planner.model import Layout, RowPlan, Source
from fusegen.planner.rows import rowwise
from fusegen.runtime import Kernel, finding
from fusegen.targets import A100, H200, MI300X, Target
from fusegen.validation import Report, validate

SPECS = {chain.name: chain for chain in load_chains("specs")}
TIGHT = replace(H200, shared_bytes=11 * 1024, shared_per_sm=12 * 1024)  # rows as long to it as a million to an H200
ROOMIER = replace(H200, shared_bytes=27 * 1024, shared_per_sm=28 * 1024)

try:
    compiler()
except FusegenError as error:
    pytest.skip(f"the emulator can't run here: {error}", allow_module_level=True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Persistent plans of smaller blocks and clusters than pay: the emulator runs each thread."""
    monkeypatch.setattr(rowwise, "PERSISTENT_BLOCK_THREADS", 256)
    monkeypatch.setattr(rowwise, "PERSISTENT_CLUSTER_BLOCKS", 1)


def persistent(name: str, cols: int, held: bool, target: Target = TIGHT) -> RowPlan:
    """The cheapest persistent plan, with vectors held in registers or without."""
    graph = SPECS[name].graph
    plans = candidates(graph.at(**{str(graph.shape[-1]): cols}), target).plans
    rows = (p for p in plans if isinstance(p, RowPlan))
    return next(p for p in rows if p.persistent_rows and (p.tile.kept < p.tile.per_thread) == held)


def checked(source: Source) -> Report:
    device = finding.find(source.plan.target, "emulator")

    def variant(layout: Layout) -> tuple[Source, None]:
        return render(candidates(source.plan.graph, source.plan.target, layout).plans[0]), None

    return validate(Kernel(source, None, device, variant), quick=True)


CASES = [
    ("scale_softmax", 12288, True, 2, TIGHT),
    ("scale_softmax", 12288 - 808, True, 2, TIGHT),  # the last vectors of some threads lie outside of the row
    ("scale_softmax", 6144, True, 1, TIGHT),  # no cluster
    ("scale_softmax", 8192, False, 2, TIGHT),
    ("rmsnorm", 12288, True, 2, TIGHT),  # a vector that rows share
    ("add_rmsnorm", 8192, True, 2, TIGHT),  # two fetched, two written
    ("log_softmax", 8192, False, 2, TIGHT),  # f32 out of bf16: a vector of one is two words of the other
    ("bias_gelu_residual_ln", 8192, False, 2, ROOMIER),  # three passes, two reductions
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("name", "cols", "held", "cluster", "target"), CASES)
def test_rows_in_turn_are_right(
    name: str, cols: int, held: bool, cluster: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowwise, "PERSISTENT_CLUSTER_BLOCKS", cluster)
    made = persistent(name, cols, held, target)
    assert made.copies
    assert made.tile.cluster >= cluster
    report = checked(render(made))
    report.raise_for_error()
    assert any("with all rows in turn" in case.reason for case in report.cases)


BUGS = [
    ("a reduction's parts are not kept apart from the next row's", r"turn \^= 1;", ""),
    ("the next row is never fetched", r"if \(more\) copy_async[^\n]*\n", "\n"),
    ("what registers hold is never fetched again", r"if \(more\) scores_held[^\n]*\n", "\n"),
    ("copies are used before they are there", r"wait_copies<(\d+)>\(\);", r"wait_copies<\1 + 1>();"),
    ("the row after the last is fetched", r"if \(more\) copy", "copy"),
    ("the next row is the same one", r"scores_next \+= [^\n]*\n", "\n"),
    ("every row is written to the first one's place", r"out_ptr \+ row \* out_stride", "out_ptr + first * out_stride"),
    ("blocks start before the others run", r"__cluster_barrier_wait\(\);  //[^\n]*\n", "\n"),
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("pattern", "replacement"), [bug[1:] for bug in BUGS], ids=[bug[0] for bug in BUGS])
def test_what_goes_wrong_between_rows_is_caught(
    pattern: str, replacement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowwise, "PERSISTENT_CLUSTER_BLOCKS", 2)
    source = render(persistent("scale_softmax", 12288, held=True))
    broken = re.sub(pattern, replacement, source.text)
    assert broken != source.text
    assert not checked(replace(source, text=broken)).ok


def test_a_launch_has_as_many_blocks_as_the_gpu_holds_and_no_more_than_rows() -> None:
    made = persistent("scale_softmax", 1 << 20, held=True, target=H200)
    assert made.tile.cluster == 8
    assert made.blocks(512, resident=120) == 120
    assert made.blocks(512, resident=127) == 120, "whole clusters"
    assert made.blocks(512, resident=4) == 8, "one at least"
    assert made.blocks(3, resident=120) == 24
    assert made.blocks(512) == 128, "by the facts, where nobody has asked the GPU"
    assert made.max_rows > 2**40


def test_only_long_rows_get_persistent_blocks_where_copies_are_asynchronous() -> None:
    """What was measured to pay: clusters of 8 blocks and more, of which an SM holds one."""
    graph = SPECS["scale_softmax"].graph
    for cols, target in ((131072, H200), (1 << 20, A100), (1 << 20, MI300X), ((1 << 20) + 4, H200)):
        assert not any(p.persistent_rows and p.cluster < 8 for p in candidates(graph.at(N=cols), target).plans)
    first = candidates(graph.at(N=1 << 20, B=1, H=1, S=512), H200).plans[0]
    assert first.configuration == "rowwise persistent 1024/8192 16x8 cluster=8 kept=14 keeps=inputs"
    assert not any(p.persistent_rows for p in candidates(SPECS["scale_causal_softmax"].graph.at(N=1 << 20), H200).plans)


@pytest.mark.usefixtures("small")
def test_rows_that_start_anywhere_get_no_persistent_blocks() -> None:
    """Their blocks are shared by neighbours: none could be asked for in place of another without a barrier."""
    plans = candidates(SPECS["scale_softmax"].graph.at(N=12287), TIGHT).plans
    assert any(p.misaligned_rows and isinstance(p, RowPlan) and p.copies for p in plans)
    assert not any(p.persistent_rows for p in plans)
