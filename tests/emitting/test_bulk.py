"""Rows that come to shared memory and leave it by bulk copies: when, where they lie there, and that they are right."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from fusegen import chain, dims, f16, f32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import compiler
from fusegen.errors import FusegenError
from fusegen.language.graph import Graph
from fusegen.language.spec import Chain
from fusegen.planner import candidates
from fusegen.planner.model import Layout, RowPlan, Source
from fusegen.planner.rows.bulk import brought, bulk_loads, bulk_stores, place_bytes, with_places
from fusegen.planner.tile import LINE_BYTES
from fusegen.runtime import Kernel, finding
from fusegen.runtime.arguments import layout_needed
from fusegen.runtime.arrays import ArrayView
from fusegen.targets import A100, B200, H200, MI300X, Target
from fusegen.validation import Report, validate
from tests.sizes import sizes_at
from tests.specs import ROWS as SPECS


def plans(name: str, cols: int, gpu: Target = H200, layout: Layout | None = None) -> list[RowPlan]:
    graph = SPECS[name].graph
    found = candidates(graph.at(**sizes_at(graph, cols)), gpu, layout or Layout()).plans
    return [plan for plan in found if isinstance(plan, RowPlan) and plan.bulk]


def checked(source: Source, cases: list[str] | None = None) -> Report:
    """In the emulator, with all operands that the plan takes and those that another one must."""
    try:
        compiler()
    except FusegenError as error:
        pytest.skip(f"the emulator can't run here: {error}")
    plan = source.plan

    def variant(layout: Layout) -> tuple[Source, None]:
        return render(candidates(plan.graph, plan.target, layout).plans[0]), None

    return validate(Kernel(source, None, finding.find(plan.target, "emulator"), variant), cases=cases)


def test_rows_of_whole_blocks_go_by_vectors() -> None:
    assert not plans("rmsnorm", 1024)
    assert not plans("rmsnorm", 1032)
    assert plans("rmsnorm", 1028)
    assert not plans("masked_softmax", 1024)


@pytest.mark.parametrize("gpu", [A100, MI300X], ids=str)
def test_only_where_a_gpu_has_bulk_copies(gpu: Target) -> None:
    assert not plans("rmsnorm", 1027, gpu)
    assert plans("rmsnorm", 1027, replace(gpu, bulk_copies=True))


def test_operands_that_lie_anywhere_go_element_by_element() -> None:
    assert not plans("add_rmsnorm", 1027, layout=Layout(unaligned=frozenset({"residual"})))
    assert plans("add_rmsnorm", 1027, layout=Layout(unaligned=frozenset({"gain"})))


def test_what_several_rows_share_stays_in_the_l1_cache() -> None:
    """masked_softmax at 16 x 12 x 1000 x 1023 took 565 us where each row brought its mask, and 203 where none did."""
    for plan in plans("masked_softmax", 1023):
        modes = {access.name: access.mode for access in plan.accesses}
        assert modes["scores"] == modes["out"] == "bulk"
        assert modes["mask"] == "element"


def test_results_take_the_place_of_what_no_pass_reads_any_more() -> None:
    for plan in plans("bias_gelu_residual_ln", 4097):
        if plan.staging == "registers":
            assert plan.shared_bytes == 2 * 65 * LINE_BYTES, plan.regime
    first, last = plans("add_rmsnorm", 2047)[0].passes
    (kept,), (written,) = first.stores, last.stores
    places = {load.offset_bytes for load in bulk_loads((first,))}
    assert kept.offset_bytes > max(places), "the pass that writes it still reads"
    assert written.offset_bytes == min(places)


def test_rows_lie_behind_a_line_as_in_memory() -> None:
    for plan in plans("rmsnorm", 1027):
        text = render(plan).text
        assert f"__align__({LINE_BYTES}) unsigned char shared[]" in text
        assert f"phase<{LINE_BYTES}>(x_" in text
        loads = bulk_loads(plan.passes)
        assert not any(load.offset_bytes % LINE_BYTES for load in loads)


def test_a_row_read_late_keeps_its_place() -> None:
    plan = plans("rmsnorm", 1027)[0]
    first, last = plan.passes
    late = replace(last, loads=(*last.loads, *bulk_loads((first,))))
    passes, size = with_places((first, late), plan.tile, plan.cols, plan.target.warp)
    (store,) = passes[-1].stores
    assert store.offset_bytes == size // 2


def test_passes_by_blocks_need_no_place_for_results() -> None:
    found = [plan for plan in plans("log_softmax", 50257) if plan.staging == "shared"]
    for plan in found:
        assert plan.passes[-1].blocks_of == "out"
        assert plan.shared_bytes == 787 * LINE_BYTES
        assert "wait_copies_left();\n}" not in render(plan).text
    assert found


def test_rows_that_lie_apart_or_that_a_mask_ends_come_alone() -> None:
    assert all(plan.contiguous_rows for plan in plans("rmsnorm", 127))
    assert not any(plan.contiguous_rows for plan in plans("rmsnorm", 127, layout=Layout(split=True)))
    assert not any(plan.contiguous_rows for plan in plans("scale_causal_softmax", 515))
    assert any(plan.contiguous_rows for plan in plans("masked_softmax", 515)), (
        "several dimensions of rows are no matter"
    )


def test_rows_that_lie_apart_are_seen_by_the_launch() -> None:
    plan = next(plan for plan in plans("rmsnorm", 127) if plan.contiguous_rows)
    x, y = (ArrayView(1 << 20, f16, (9, 127), strides) for strides in ((127, 1), (128, 1)))
    gain = ArrayView(1 << 20, f16, (127,), (1,))
    views = {"x": x, "gain": gain, "out": x}
    assert set(views) == {access.tensor for access in plan.accesses}
    assert layout_needed(plan, views) == Layout()
    assert layout_needed(plan, {**views, "x": y}) == Layout(split=True)
    assert layout_needed(plan, {**views, "out": y}) == Layout(split=True)


def test_a_divided_row_number_has_32_bits() -> None:
    for plan in plans("masked_softmax", 515):
        assert plan.max_rows <= 2**32 - plan.tile.rows_per_block
    assert any(plan.max_rows > 2**32 for plan in plans("rmsnorm", 127))


CASES = [
    ("rmsnorm", 127, 4),  # rows that come together
    ("rmsnorm", 37, 1),
    ("rmsnorm", 37, 2),
    ("add_rmsnorm", 259, 32),
    ("bias_gelu_residual_ln", 515, 64),
    ("scale_softmax", 1027, 128),
    ("scale_causal_softmax", 515, 64),  # what lies behind the mask is not brought
    ("masked_softmax", 515, 64),  # several dimensions of rows
    ("masked_softmax", 259, 32),  # that come together
    ("log_softmax", 2051, 128),
]


@pytest.mark.parametrize(("name", "cols", "per_row"), CASES)
def test_it_is_right_and_the_same_bits_at_every_place(name: str, cols: int, per_row: int) -> None:
    found = [plan for plan in plans(name, cols) if plan.tile.threads_per_row == per_row]
    for plan in {(p.staging, p.tile.vector): p for p in found}.values():
        report = checked(render(plan), ["normal", "layout", "apart", "nan"])
        assert report.ok, f"{plan.configuration}\n{report}"
    assert found


@pytest.mark.parametrize(
    ("name", "cols", "per_row", "line"),
    [
        ("bias_gelu_residual_ln", 515, 64, r"  wait_arrivals\(arrivals\);\n"),
        ("bias_gelu_residual_ln", 515, 64, r"  __syncthreads\(\);  // the row is complete\n"),
        ("bias_gelu_residual_ln", 515, 64, r"  wait_copies_left\(\);\n"),
        ("rmsnorm", 127, 4, r"  __syncthreads\(\);  // all have read what was brought\n"),
    ],
)
def test_the_emulator_sees_what_is_missing(name: str, cols: int, per_row: int, line: str) -> None:
    plan = next(p for p in plans(name, cols) if p.tile.threads_per_row == per_row and p.staging == "registers")
    source = render(plan)
    assert checked(source, ["normal", "layout"]).ok
    text, count = re.subn(line, "", source.text)
    assert count == 1
    assert not checked(replace(source, text=text), ["normal", "layout"]).ok


M, N = dims("M, N")


def in_two_passes(read: Any, first: Any, last: Any) -> Chain:
    """Of values and results stored as those types."""

    @chain(M=64, N=515)
    def two(x: read[M, N]) -> tuple[first[M, N], last[M, N]]:
        return x * 2.0, x + F.mean(x)

    return two


def in_three_passes(read: Any, late: Any, first: Any, second: Any, last: Any) -> Chain:
    @chain(M=64, N=515)
    def three(x: read[M, N], y: late[M, N]) -> tuple[last[M, N], first[M, N], second[M, N]]:
        centered = x - F.mean(x)
        return centered * F.rsqrt(F.mean(F.square(centered)) + 1e-3) + y, x * 2.0, centered

    return three


def bulk_plans(graph: Graph, gpu: Target) -> list[RowPlan]:
    return [plan for plan in candidates(graph, gpu).plans if isinstance(plan, RowPlan) and plan.bulk]


def test_what_lies_in_the_same_bytes_is_never_there_at_once() -> None:
    """A row of halves leaves room for half a row of floats: results of several widths, stored by several passes."""
    types, seen = (f16, f32), 0
    chains = [in_two_passes(*those) for those in itertools.product(types, repeat=3)]
    chains += [in_three_passes(*those) for those in itertools.product(types, repeat=5)]
    for written, (cols, gpu) in itertools.product(chains, ((515, B200), (4097, H200))):
        for plan in bulk_plans(written.graph.at(M=64, N=cols), gpu):
            apart(plan)
            seen += 1
    assert seen > 300


def apart(plan: RowPlan) -> None:
    tile, passes = plan.tile, plan.passes
    results = [
        (number, store.offset_bytes, store.offset_bytes + place_bytes(store.access, tile, plan.cols))
        for number, row_pass in enumerate(passes)
        for store in bulk_stores(row_pass)
        if store.staged
    ]
    for (_, at, end), (_, other, other_end) in itertools.combinations(results, 2):
        assert end <= other or other_end <= at, f"{plan.configuration}: one result runs over another"
    for name, access in brought(passes).items():
        begins = next(load.offset_bytes for load in bulk_loads(passes) if load.access.tensor == name)
        ends = begins + place_bytes(access, tile, plan.cols)
        last = max(
            n for n, row_pass in enumerate(passes) if any(x.access.tensor == name for x in bulk_loads((row_pass,)))
        )
        for number, at, end in results:
            if at < ends and begins < end:
                assert last < number, f"{plan.configuration}: a result runs over {name}, which is still read"
                between = passes[last:number]
                meets = any(store.staged for row_pass in between for store in row_pass.stores)
                meets |= any(row_pass.reductions for row_pass in between) and tile.threads_per_row > 32
                assert meets or any(row_pass.behind_barrier for row_pass in passes[last + 1 : number + 1])
        assert plan.shared_bytes >= max([ends, *(end for *_, end in results)])


@pytest.mark.parametrize(
    ("written", "gpu"),
    [
        (in_two_passes(f16, f16, f32), H200),  # the floats need more room than the halves that were brought leave
        (in_three_passes(f16, f16, f32, f16, f32), B200),
    ],
    ids=["two", "three"],
)
def test_results_of_several_passes_and_widths_are_right(written: Chain, gpu: Target) -> None:
    found = bulk_plans(written.graph, gpu)
    assert len({plan.tile.rows_per_block > 1 for plan in found}) == 2
    for plan in found:
        report = checked(render(plan), ["normal"])
        assert report.ok, f"{plan.configuration}\n{report}"
