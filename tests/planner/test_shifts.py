"""Shifts along rows and columns: rolls, causal convolutions by taps, rows of zeros in front, read where they lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.errors import ArgumentError
from fusegen.language.spec import Chain
from fusegen.pipeline import compile, compile_program
from fusegen.planner.programs import cheapest, step_candidates
from fusegen.planner.programs.lowering import lowered
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.steps import NotOneStep
from fusegen.planner.rows.counted import counted
from fusegen.runtime import Program
from fusegen.targets import A100, H200, MI300X, Target
from fusegen.validation import validate
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

B, S, C, M, N = dims("B S C M N")
TARGETS = (H200, A100, MI300X)
RAGGED = {"B": 2, "S": 11, "C": 13}
Array = np.ndarray[Any, np.dtype[Any]]


@chain(**RAGGED)
def by_rolls(x: bf16[B, S, C], w: bf16[4, C], bias: bf16[C]) -> bf16[B, S, C]:
    """A causal convolution as Mamba has it: what a roll brings from the end is masked."""
    row = F.row_index(x)
    total = x * w[3]
    for k in range(1, 4):
        total = total + F.where(row >= k, F.roll(x, k, axis=1), 0.0) * w[3 - k]
    return F.silu(total + bias)


@chain(**RAGGED)
def by_padding(x: f16[B, S, C], w: f16[4, C], bias: f16[C], zeros: f16[B, 3, C]) -> f16[B, S, C]:
    """Rows of zeros in front, or what came before in a decoder's state."""
    p = F.concat([zeros, x], axis=1)
    return F.silu(p[:, :-3] * w[0] + p[:, 1:-2] * w[1] + p[:, 2:-1] * w[2] + p[:, 3:] * w[3] + bias)


@chain(**RAGGED)
def by_computed_zeros(x: f32[B, S, C], w: f32[C, 4], bias: f32[C]) -> f32[B, S, C]:
    """Zeros that are made of x, for each tap by itself."""
    total = x * w[:, 3]
    for k in range(1, 4):
        total = total + F.concat([x[:, :k] * 0.0, x[:, :-k]], axis=1) * w[:, 3 - k]
    return F.silu(total + bias)


@chain(**RAGGED)
def of_turned_rows(x: bf16[B, C, S], w: bf16[C, 4], bias: bf16[C]) -> bf16[B, C, S]:
    t = F.rearrange(x, "b c s -> b s c")
    row = F.row_index(t)
    total = t * w[:, 3]
    for k in range(1, 4):
        total = total + F.where(k <= row, F.roll(t, k, axis=1), 0.0) * w[:, 3 - k]
    return F.rearrange(F.silu(total + bias), "b s c -> b c s")


@chain(**RAGGED)
def along_columns(x: bf16[B, C, S], w: bf16[C, 4], bias: bf16[C]) -> bf16[B, C, S]:
    """The layout of torch's conv1d."""
    col = F.col_index(x)
    total = x * w[:, 3:]
    for k in range(1, 4):
        total = total + F.where(col < k, 0.0, F.roll(x, k, axis=2)) * w[:, 3 - k : 4 - k]
    return F.silu(total + bias[:, None])


@chain(**RAGGED)
def of_a_norm(x: f32[B, S, C], mix: f32[C]) -> f32[B, S, C]:
    """RWKV's token shift, which wraps, and a norm of its rows."""
    return F.rmsnorm(x * mix + F.roll(x, 1, axis=1) * (1 - mix))


@chain(M=7, N=13)
def twice(x: f32[M, N]) -> f32[M, N]:
    """What wraps, and what is computed behind it."""
    return F.exp(F.roll(x, 2, axis=0)) + F.roll(x * 2.0 - 1.0, 1, axis=0) - x


CHAINS = (by_rolls, by_padding, by_computed_zeros, of_turned_rows, along_columns, of_a_norm, twice)
CONVOLUTIONS = CHAINS[:5]


def program_of(spec: Chain, target: Target) -> ProgramPlan:
    return cheapest(spec.graph, target)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("spec", CHAINS, ids=lambda spec: spec.name)
def test_it_is_one_kernel(spec: Chain, target: Target) -> None:
    assert len(program_of(spec, target).steps) == 1


@needs_compiler
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("spec", CHAINS, ids=lambda spec: spec.name)
def test_it_is_right(spec: Chain, target: Target) -> None:
    """In every layout, of no rows, of few, and by several tiles a block, as validation has them."""
    kernel = compile(spec, target=str(target), on="emulator", validate=False)
    assert validate(kernel).ok


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
def test_rows_fewer_than_taps(rows: int) -> None:
    kernel = compile(by_padding, target=str(H200), on="emulator", validate=False)
    rng = np.random.default_rng(rows)
    x, w, bias, state = (
        rng.integers(-3, 4, shape).astype(np.float16) for shape in ((2, rows, 13), (4, 13), (13,), (2, 3, 13))
    )
    p = np.concatenate([state, x], 1).astype(np.float64)
    total = sum(p[:, k : k + rows] * w[k].astype(np.float64) for k in range(4)) + bias
    np.testing.assert_allclose(
        np.asarray(kernel(x, w, bias, state), np.float64), total / (1 + np.exp(-total)), 2e-3, 1e-6
    )


@pytest.mark.parametrize("spec", CONVOLUTIONS, ids=lambda spec: spec.name)
def test_what_is_shifted_is_read_from_memory_once(spec: Chain) -> None:
    """Four taps of one operand are its bytes once, and the floor is that of a copy."""
    large = spec.at(B=2, S=4096, C=1024)
    (step,) = program_of(large, H200).steps
    elements, size = 2 * 4096 * 1024, large.graph.inputs[0].dtype.bytes
    assert 2 * elements * size <= step.plan.cost.traffic.moved < 2.01 * elements * size
    assert step.plan.cost.traffic.ideal == step.plan.cost.traffic.moved


def test_masked_rolls_read_what_their_masks_show() -> None:
    """No rows that come in at the other end, and no mask: rows that are not there count as 0."""
    for spec in (by_rolls, of_turned_rows, along_columns):
        graph = lowered(spec.graph).graph
        assert sum(t.name.startswith(("x", "t")) for t in graph.inputs) == 4
        assert not any(node.op.name == "where" for node in graph.nodes)


def test_other_masks_stay() -> None:
    @chain(M=7, N=8)
    def masked(x: f32[M, N]) -> f32[M, N]:
        return F.where(F.row_index(x) >= 2, F.roll(x, 3, axis=0), 0.0) + F.where(
            F.row_index(x) >= 3, F.roll(x, 3, axis=0), -0.0
        )

    graph = lowered(masked.graph).graph
    assert sum(node.op.name == "where" for node in graph.nodes) == 3  # the first roll, its mask, and the second's


def test_a_join_whose_parts_have_any_number_of_rows_is_cut() -> None:
    @chain(M=7, N=8)
    def joined(x: f32[M, N], y: f32[M, N]) -> f32[2 * M - 1, N]:
        z = F.concat([x, y], axis=0)
        return z[1:] - z[:-1]

    with pytest.raises(NotOneStep, match="lies in several of its parts"):
        lowered(joined.graph)


@needs_compiler
def test_shifts_along_two_axes_are_cut() -> None:
    """A kernel asks for one number whether there is something to be read."""

    @chain(M=11, N=16)
    def both(x: bf16[M, N]) -> bf16[M, N]:
        return F.softmax(F.roll(F.roll(x, 1, axis=0) * 2, 3))

    with pytest.raises(NotOneStep, match="lies in several of its parts"):
        lowered(both.graph)
    assert validate(compile(both, target=str(H200), on="emulator", validate=False), quick=True).ok


@needs_compiler
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_rows_that_share_a_block(target: Target) -> None:
    """Candidates whose blocks have neighbouring rows find them in their L1 cache."""
    spec = by_rolls.at(B=2, S=21, C=1000)
    program = program_of(spec, target)
    (step,) = program.steps
    plans = [plan for plan in step_candidates(program, step).plans if plan.rows_per_block > 1]
    assert plans
    several = replace(program, steps=(replace(step, plan=plans[0]),))
    made = compile_program(several, on="emulator", validate=False, as_planned=True)
    assert validate(made, quick=True).ok


@needs_compiler
def test_it_is_written_over_no_operand() -> None:
    """Other rows of it are yet to be read."""
    kernel = compile(by_rolls, target=str(H200), on="emulator", validate=False)
    assert isinstance(kernel, Program)
    x, w, bias = (np.ones(shape, bf16.numpy) for shape in ((2, 11, 13), (4, 13), (13,)))
    with pytest.raises(ArgumentError, match="may write that over no operand"):
        kernel(x, w, bias, out=x)


def test_rows_that_an_operand_names_are_each_read() -> None:
    """What a token's experts made of it are rows of one array, and other rows of it for each place."""

    @chain(M=64, N=128)
    def combined(y: bf16[M, N], ids: i32[M, 4]) -> bf16[M, N]:
        return F.gather_sum(y, ids)

    (step,) = program_of(combined, H200).steps
    assert not step.plan.layout.again
    assert step.plan.cost.traffic.moved > 5 * 64 * 128 * 2


def test_blocks_have_neighbouring_rows_where_a_tap_is_one_before() -> None:
    """On an H200 64 threads on each of two rows took 62.9 us, on each of four 63.6, 128 on one 68.6, 512 on one 109.5;
    along the last axis, where elements are read one by one, it took 95 to 106."""
    program = program_of(by_rolls.at(B=2, S=4096, C=4096), H200)
    (step,) = program.steps
    times = {plan.configuration: plan.cost.time_us for plan in step_candidates(program, step).plans}
    assert step.plan.rows_per_block > 1
    took = {"128/64 1x8 col_tiles=8": 62.9, "256/64 1x8 col_tiles=8": 63.6, "128/128 1x8 col_tiles=4": 68.6,
            "256/256 1x8 col_tiles=2": 76.1, "512/512 1x8": 109.5}  # fmt: skip
    for tile, us in took.items():
        assert times[f"elementwise none {tile}"] == pytest.approx(us, rel=0.1)
    (step,) = program_of(along_columns.at(B=2, S=4096, C=4096), H200).steps
    assert step.plan.cost.time_us == pytest.approx(95.8, rel=0.1)


def test_only_what_is_read_at_counted_indices_costs_so() -> None:
    @chain(M=64, N=128)
    def looked_up(y: bf16[M, N], ids: i32[M]) -> bf16[M, N]:
        return F.gather(y, ids) * 2.0

    (step,) = program_of(looked_up, H200).steps
    assert step.graph.gathers
    assert not counted(step.graph)
    shares = counted(lowered(by_padding.at(B=2, S=4096, C=16).graph).graph)
    assert sorted(shares) == [
        "x_1_before", "x_2_before", "x_3_before", "zeros_1_behind", "zeros_2_behind", "zeros_there"
    ]  # fmt: skip
    assert max(share for name, share in shares.items() if name.startswith("zeros")) < 0.01
