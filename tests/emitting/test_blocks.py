"""Rows that start anywhere: which passes go by blocks, what is staged or taken singly, the same bits at every place."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from fusegen import chain, dims, f32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import compiler
from fusegen.errors import FusegenError
from fusegen.planner import candidates
from fusegen.planner.model import RowPlan
from fusegen.runtime import Kernel, finding
from fusegen.targets import A100, H200, MI300X, Target
from fusegen.validation import validate
from tests.sizes import sizes_at
from tests.specs import ROWS as SPECS

Fits = Callable[[RowPlan], bool]


def plans(name: str, cols: int, gpu: Target = H200) -> list[RowPlan]:
    graph = SPECS[name].graph
    found = candidates(graph.at(**sizes_at(graph, cols)), gpu).plans
    return [plan for plan in found if isinstance(plan, RowPlan) and plan.misaligned_rows]


def kernel_of(plan: RowPlan) -> Kernel:
    """In the emulator, for contiguous operands and for all others that the plan takes."""
    try:
        compiler()
    except FusegenError as error:
        pytest.skip(f"the emulator can't run here: {error}")
    source = render(plan)
    return Kernel(source, None, finding.find(plan.target, "emulator"), lambda layout: (source, None))


def test_a_pass_that_sums_nothing_goes_by_the_blocks_of_what_it_writes() -> None:
    for plan in plans("scale_softmax", 50257):
        first, *_, last = plan.passes
        assert not first.blocks_of
        assert (last.blocks_of == "out") == (not last.takes), plan.regime


def test_what_registers_keep_goes_by_way_of_shared_memory() -> None:
    found = [plan for plan in plans("add_rmsnorm", 2047) if plan.staging == "registers" and plan.tile.vector == 8]
    for plan in found:
        stores = [store for row_pass in plan.passes for store in row_pass.stores]
        assert all(store.staged for store in stores)
        places = sorted(store.offset_bytes for store in stores)
        row = plan.tile.cols * 2 * plan.tile.rows_per_block
        assert places[1] - places[0] >= row
        assert plan.shared_bytes >= places[1] + row
    assert found


def test_rows_that_shared_memory_has_no_room_for_are_handed_from_lane_to_lane() -> None:
    clustered = [p for p in plans("log_softmax", 60001) if p.tile.cluster > 1 and p.passes[-1].takes]
    assert clustered
    assert not any(store.staged for plan in clustered for store in plan.passes[-1].stores)
    assert all("store_misaligned<" in render(plan).text for plan in clustered[:2])


@pytest.mark.parametrize(("cols", "apart"), [(4097, 1), (4099, 3), (4095, 0), (4105, 0)])
def test_values_are_taken_singly_where_that_saves_a_turn(cols: int, apart: int) -> None:
    found = [p for p in plans("scale_softmax", cols) if p.tile.vector == 8 and p.staging == "registers"]
    assert {p.tile.remainder for p in found if 8 <= p.tile.threads_per_row <= 512} == {apart}


@pytest.mark.parametrize("gpu", [H200, MI300X], ids=str)
@pytest.mark.parametrize(
    ("name", "cols"), [("scale_softmax", 1003), ("log_softmax", 4097), ("masked_softmax", 1025), ("bias_relu", 37)]
)
def test_passes_by_blocks_take_operands_that_lie_otherwise(name: str, cols: int, gpu: Target) -> None:
    """Among its layouts validation has rows of every operand in turn that are padded, or start elsewhere."""
    plan = next(p for p in plans(name, cols, gpu) if any(row_pass.blocks_of for row_pass in p.passes))
    source = render(plan)

    def variant(layout: object) -> tuple[object, None]:
        other = candidates(plan.graph, gpu, layout).plans[0]  # type: ignore[arg-type]
        return render(other), None

    kernel = Kernel(source, None, kernel_of(plan).device, variant)  # type: ignore[arg-type]
    report = validate(kernel, cases=["normal", "layout", "apart"])
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("cols", "staging", "cluster", "gpu"),
    [
        (4097, "shared", 1, H200),
        (4097, "stream", 1, H200),
        (4097, "shared", 1, MI300X),
        (4097, "stream", 1, MI300X),
        (65537, "shared", 4, H200),
    ],
    ids=str,
)
def test_all_threads_of_a_row_have_the_same_bits_of_what_is_one_value_a_row(
    cols: int, staging: str, cluster: int, gpu: Target
) -> None:
    """By blocks a column belongs to another thread in a row that starts elsewhere. Merging two parts of an online
    softmax rounds differently in the one and in the other; it shows in one row of ten."""
    found = [p for p in plans("log_softmax", cols, gpu) if p.staging == staging and p.tile.cluster == cluster]
    kernel = kernel_of(next(p for p in found if p.passes[-1].blocks_of))
    rng = np.random.default_rng(0)
    for _ in range(30 if cluster == 1 else 12):
        rows = np.repeat(rng.standard_normal((1, cols)), 4, 0).astype(ml_dtypes.bfloat16)
        rows[0] = rng.standard_normal(cols)
        first = np.asarray(kernel(rows))
        again = np.asarray(kernel(np.ascontiguousarray(rows[[1, 2, 3, 0]])))
        assert np.array_equal(again, first[[1, 2, 3, 0]])


M, N = dims("M, N")


@chain(M=6, N=13)
def scaled_by_a_sum(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
    return F.sum(y) * x


def test_threads_without_a_row_write_nothing_whichever_the_candidate() -> None:
    """A pass by blocks tests whether a thread has a row, and where the row ends: in some turns either of two things."""
    found = [p for p in candidates(scaled_by_a_sum.graph, A100).plans if isinstance(p, RowPlan)]
    assert {p.tile.rows_per_block > 1 and any(s.blocks_of for s in p.passes) for p in found} == {True, False}
    for plan in found:
        report = validate(kernel_of(plan), cases=["normal", "rows"])
        assert report.ok, f"{plan.configuration}\n{report}"
