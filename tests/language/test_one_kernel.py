"""What no one kernel holds, in the spec's words; and that it is no mistake of the spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fusegen import Chain, Program, bf16, chain, compile, dims, f32, i32, validate
from fusegen import ops as F
from fusegen.language.one_kernel import obstacle
from fusegen.language.reference import reference
from fusegen.planner import candidates
from fusegen.targets import target
from tests.tools import needs_compiler

B, C, H, M, N, K = dims("B C H M N K")
H200 = target("cuda:h200")


def traced(function: Callable[..., Any]) -> Chain:
    found: Chain = chain(M=8, N=32)(function)
    return found


def narrow_output(x: f32[M, N], y: f32[N]) -> tuple[f32[M, N], f32[N]]:
    return x + y, y * 2


def two_selections(x: f32[M, N]) -> f32[M, 4]:
    return F.topk(x, 4)[0] + F.cast(F.topk(F.square(x) - 1.0, 4)[1], f32)


def chosen_of_chosen(x: f32[M, N]) -> f32[M, 4]:
    return F.topk(F.topk(x, 8)[0], 4)[0]


def row_behind(x: f32[M, N]) -> f32[M, N]:
    return x / F.sum(F.topk(x, 4)[0])


def other_rows(x: f32[M, 16], y: f32[M, N]) -> tuple[f32[M, 1], f32[M, 1]]:
    return F.sum(x), F.max(y)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (narrow_output, "does not span the rows"),
        (two_selections, "a kernel chooses once"),
        (chosen_of_chosen, "a kernel chooses once"),
        (row_behind, "needs what was chosen of it"),
        (other_rows, "16 and N differ"),
    ],
)
def test_an_obstacle_is_told_and_refused_for_one_kernel(function: Callable[..., Any], words: str) -> None:
    graph = traced(function).graph
    found = obstacle(graph)
    assert found is not None
    assert words in found.reason
    refusals = candidates(graph, H200).refusals
    assert [refusal.rule for refusal in refusals] == ["one kernel"]
    assert words in refusals[0].reason


def test_an_obstacle_names_where_to_cut() -> None:
    graph = traced(row_behind).graph
    found = obstacle(graph)
    assert found is not None
    assert found.cut is not None
    assert found.cut.op.name == "sum"


def test_what_one_kernel_holds_has_no_obstacle() -> None:
    @chain(M=8, N=32, K=16)
    def product(x: bf16[M, K], w: bf16[N, K]) -> tuple[bf16[M, N], f32[M, 1]]:
        return x @ w.T, F.sum(F.cast(x, f32))

    assert obstacle(product.graph) is None


def test_what_is_written_twice_is_one_selection() -> None:
    def twice(x: f32[M, N]) -> tuple[f32[M, 4], i32[M, 4]]:
        return F.topk(F.softmax(x), 4)[0], F.topk(F.softmax(x), 4)[1]

    assert candidates(traced(twice).graph, H200).plans


def test_references_of_several_spaces_know_each_axis() -> None:
    @chain(M=3, N=32)
    def spec(x: f32[M, 16], y: f32[M, N]) -> tuple[f32[M, 1], f32[M, N]]:
        return F.mean(x), y + F.col_index(y)

    x, y = np.ones((3, 16)), np.zeros((3, 32))
    mean, counted = reference(spec.graph)(x, y)
    np.testing.assert_array_equal(mean, np.ones((3, 1)))
    np.testing.assert_array_equal(counted, np.tile(np.arange(32), (3, 1)))


@chain(M=8, N=32, K=16)
def gated(x: bf16[M, K], gate: bf16[K, 1], out: bf16[M, N]) -> bf16[M, N]:
    """An expert that all tokens share, by its gate."""
    return F.sigmoid(x @ gate) * out


@chain(B=3, M=8, N=32, K=16)
def shared_row(x: bf16[B, K], w: bf16[K, N], out: bf16[B, M, N]) -> bf16[B, M, N]:
    """A projection of each sequence's own vector, beside all of its tokens."""
    return F.silu(x @ w)[:, None, :] + out


@chain(B=3, C=8, H=6)
def channels(x: bf16[B, C, H, H], s: bf16[B, C], w: bf16[C, C]) -> bf16[B, C, H, H]:
    """Squeeze and excite."""
    return x * F.sigmoid(s @ w.T)[:, :, None, None]


@needs_compiler
@pytest.mark.parametrize("target", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize("spec", [gated, shared_row, channels], ids=lambda spec: str(spec.name))
def test_a_product_is_repeated_by_a_kernel_of_its_own(spec: Chain, target: str) -> None:
    """Its kernel's tiles are of what is multiplied: it wrote the first column or row, and read what is no row of x."""
    program = compile(spec, target, on="emulator", validate=False)
    assert isinstance(program, Program)
    assert validate(program, quick=True).ok


def test_a_product_of_one_column_beside_another_one_is_no_repeat() -> None:
    @chain(M=8, N=32, K=16)
    def both(x: bf16[M, K], w: bf16[K, N], gate: bf16[K, 1]) -> tuple[bf16[M, N], f32[M, 1]]:
        return x @ w, F.sigmoid(x @ gate)

    assert obstacle(both.graph) is None


def test_a_repeated_product_is_named() -> None:
    found = obstacle(gated.graph)
    assert found is not None
    assert "mul repeats [M, 1] of a product, and is [M, N]: a program cuts here" in str(found)
    assert found.cut is not None
    assert found.cut.op.name == "sigmoid"
