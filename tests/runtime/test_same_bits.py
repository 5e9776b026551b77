"""The same bits wherever operands and results lie: what fits one layout only has variants, and these compute alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fusegen.emitting.rendering import render
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.language.types import DType, b8, bf16, f16, f32, i32
from fusegen.planner import alike, candidates, computes_alike
from fusegen.planner.model import Layout, RowPlan, Source
from fusegen.runtime import Kernel, finding
from fusegen.targets import A100, B200, H200, MI300X, Target
from tests.sizes import sizes_at
from tests.specs import ROWS

Array = np.ndarray[Any, np.dtype[Any]]
STORED: dict[DType, Any] = {f32: np.float32, f16: np.float16, bf16: ml_dtypes.bfloat16, i32: np.int32, b8: np.bool_}
ROWS_OF_EACH = 2


def kernel_of(plan: RowPlan) -> Kernel:
    """In the emulator; its variants are those that `compile` makes."""
    try:
        compiler()
    except EmulatorUnavailable as error:
        pytest.skip(f"the emulator can't run here: {error}")

    def variant(layout: Layout) -> tuple[Source, None]:
        return render(alike(plan, layout).plans[0]), None

    return Kernel(render(plan), None, finding.find(plan.target, "emulator"), variant)


def placed(values: Array, ahead: int, apart: int) -> Array:
    """A copy that begins `ahead` elements behind an aligned address, its rows `apart` elements from each other."""
    *leading, cols = values.shape
    pitch = cols + (apart if leading else 0)
    room = np.zeros((int(np.prod(leading)) * pitch + ahead + 64) * values.itemsize, np.uint8)
    start = -room.ctypes.data % 64 + ahead * values.itemsize
    room = room[start : start + int(np.prod(leading)) * pitch * values.itemsize]
    view: Array = room.view(values.dtype).reshape(*leading, pitch)[..., :cols]
    view[...] = values
    return view


def moves(count: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Where each of so many arrays lies: one of them elsewhere, in turn; then all of them."""
    for index, where in itertools.product(range(count), ((1, 0), (2, 3))):
        yield tuple(where if i == index else (0, 0) for i in range(count))
    yield ((1, 1),) * count


CASES = [
    ("scale_softmax", 96, A100),  # vectors
    ("scale_softmax", 4097, H200),  # by bulk copies
    ("log_softmax", 10007, MI300X),  # streamed
    ("bias_gelu_residual_ln", 515, B200),
    ("bias_gelu_residual_ln", 1024, H200),
    ("rmsnorm", 37, MI300X),  # several rows of a block
]


@pytest.mark.parametrize(("name", "cols", "gpu"), CASES, ids=str)
def test_bits_do_not_depend_on_where_arrays_lie(name: str, cols: int, gpu: Target) -> None:
    graph = ROWS[name].graph
    sizes = {**dict.fromkeys(graph.sizes, ROWS_OF_EACH), **sizes_at(graph, cols)}
    plan = candidates(graph.at(**sizes_at(graph, cols)), gpu).plans[0]
    assert isinstance(plan, RowPlan)
    kernel, rng = kernel_of(plan), np.random.default_rng(0)
    arrays = [
        (rng.standard_normal([size if isinstance(size, int) else sizes[str(size)] for size in t.shape]), t.dtype)
        for t in (*plan.graph.inputs, *plan.graph.outputs)
    ]
    values = [(array > 0 if dtype is b8 else array).astype(STORED[dtype]) for array, dtype in arrays]
    inputs = len(plan.graph.inputs)
    expected: list[bytes] = []
    for where in (((0, 0),) * len(values), *moves(len(values))):
        given = [placed(array, *at) if array.ndim else array for array, at in zip(values, where, strict=True)]
        kernel(*given[:inputs], out=tuple(given[inputs:]) if len(given) > inputs + 1 else given[inputs])
        found = [np.ascontiguousarray(array).tobytes() for array in given[inputs:]]
        expected = expected or found
        assert found == expected, f"{where}: {[variant.plan.configuration for variant in kernel.variants.values()]}"


def test_every_plan_has_its_like_for_every_layout() -> None:
    for (name, cols), gpu in itertools.product(
        [("bias_gelu_residual_ln", 32769), ("scale_softmax", 1023)], (H200, MI300X)
    ):
        graph = ROWS[name].graph
        plans = candidates(graph.at(**sizes_at(graph, cols)), gpu).plans
        every = frozenset(access.tensor for access in plans[0].accesses)
        for plan in (plans[0], *plans[1::25]):
            assert isinstance(plan, RowPlan)
            for layout in (Layout(split=True), Layout(unaligned=every)):
                found = alike(plan, layout).plans
                assert found, plan.configuration
                assert all(isinstance(other, RowPlan) and computes_alike(other, plan) for other in found)


@pytest.mark.parametrize(("gpu", "cols"), [(H200, 4097), (MI300X, 10007)], ids=str)
def test_results_of_rows_that_start_anywhere_need_no_variant(gpu: Target, cols: int) -> None:
    graph = ROWS["scale_softmax"].graph
    plan = candidates(graph.at(**sizes_at(graph, cols)), gpu).plans[0]
    (out,) = plan.outputs
    assert out.mode in ("misaligned", "bulk")
    assert plan.any_alignment(out)
    assert not any(plan.any_alignment(access) for access in plan.inputs if access.mode in ("misaligned", "bulk"))
