"""Several steps in one launch: rows of different lengths or heads side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Chain, Program, bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.errors import ArgumentError
from fusegen.pipeline import plan
from fusegen.planner.programs.side_by_side import JoinedPlan, cost_of, obstacle
from fusegen.runtime.joined import Joined
from fusegen.validation import validate
from tests.specs import SHIPPED

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("emulated_only")

Array = np.ndarray[Any, np.dtype[Any]]
TARGETS = ("cuda:h200", "hip:mi300x")
T, H, K, D, N = dims("T H K D N")
MADE: dict[tuple[str, str], Program] = {}


@chain(T=40, N=192, K=64)
def two_norms(q: bf16[T, N], kv: bf16[T, K], g: bf16[N], h: bf16[K]) -> tuple[bf16[T, N], bf16[T, K]]:
    """Norms of two widths, as of a latent attention's queries and keys."""
    normed_q, normed_kv = F.rmsnorm(q, g), F.rmsnorm(kv, h)
    return normed_q, normed_kv


@chain(T=40, N=64, K=48)
def two_maps(q: f32[T, N], kv: f32[T, K], block: f32) -> tuple[f32[T, N], f32[T, K]]:
    """Flat arrays, with a run-time scalar that both steps take."""
    a, b = F.relu(q) * block, kv + block
    return a, b


@chain(T=40, N=64, K=48)
def one_behind_another(q: f32[T, N], kv: f32[T, K]) -> tuple[f32[T, N], f32[T, K]]:
    """The second step takes what the first has reduced."""
    total = F.sum(q)
    return q / total, kv / total


@chain(T=5, N=128, K=96)
def two_types(q: f32[T, N], kv: f32[T, K]) -> tuple[f32[T, 1], i32[T, 1], f32[T, 1]]:
    """Reductions of one name and of two types, in one of the steps alone."""
    least, least_whole = F.min(q), F.min(F.cast(q, i32))
    return least, least_whole, F.max(kv)


def made(spec: Chain, target: str = "cuda:h200") -> Program:
    key = spec.name, target
    if key not in MADE:
        found = fusegen.compile(spec, target=target, on="emulator", validate=False)
        assert isinstance(found, Program)
        MADE[key] = found
    return MADE[key]


ROPE = SHIPPED["rope_qk"].at(T=40, H=6, K=2, D=32)


def operands(tokens: int) -> list[Any]:
    rng = np.random.default_rng(tokens)
    angle = rng.uniform(0, 6, (tokens, 1, 16)).astype(np.float32)
    q, k = (rng.standard_normal((tokens, heads, 32)).astype(bf16.numpy) for heads in (6, 2))
    return [q, k, np.cos(angle), np.sin(angle)]


def turned(x: Array, cos: Array, sin: Array) -> Array:
    low, high = np.split(x.astype(np.float64), 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def right(got: tuple[Array, Array], given: list[Any]) -> None:
    q, k, cos, sin = given
    for one, x in zip(got, (q, k), strict=True):
        np.testing.assert_allclose(one.astype(np.float64), turned(x, cos, sin), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_reductions_of_one_name_keep_their_types(target: str) -> None:
    """That of f32 was left out, and minima came out as whole numbers."""
    program = made(two_types, target)
    assert isinstance(program.kernels[0], Joined)
    q, kv = (np.random.default_rng(6).standard_normal((5, width)).astype(np.float32) * 9 for width in (128, 96))
    wanted = q.min(-1), np.trunc(q).min(-1), kv.max(-1)
    for got, law in zip(program(q, kv), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got)[:, 0], law)


@pytest.mark.parametrize("target", TARGETS)
def test_q_and_k_are_turned_in_one_launch(target: str) -> None:
    program = made(ROPE, target)
    (kernel,) = program.kernels
    assert isinstance(kernel, Joined)
    assert [len(steps) for steps in program.plan.launches] == [2]
    for tokens in (40, 1, 0, 57, 40):
        given = operands(tokens)
        right(program(*given), given)
    record = next(iter(program.records.values()))
    assert len(record.launches) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_both_may_be_turned_where_they_are_and_in_one_launch(target: str) -> None:
    program = made(ROPE, target)
    assert program.in_place == {("q_turned", "q"), ("k_turned", "k")}
    for over_q, over_k in ((True, True), (True, False), (False, True)):
        given = operands(23)
        q, k = given[0].copy(), given[1].copy()
        out = q if over_q else np.zeros_like(q), k if over_k else np.zeros_like(k)
        assert program(q, k, *given[2:], out=out)[0] is out[0]
        right(out, given)
    assert all(len(record.launches) == 1 for record in program.records.values())
    given = operands(23)
    with pytest.raises(ArgumentError, match="k_turned shares memory with the input k"):
        program(*given, out=(given[0], given[1][::-1]))
    whole = np.zeros((24, 6, 32), given[0].dtype)
    with pytest.raises(ArgumentError, match="q_turned shares memory with the input q"):
        program(whole[:23], *given[1:], out=(whole[1:], np.zeros_like(given[1])))


def test_operands_that_lie_otherwise_are_taken_as_they_lie() -> None:
    """Of one product's q, k and v; and rows that begin anywhere, which move one element at a time."""
    program = made(ROPE)
    given = operands(23)
    for offset in (0, 1):
        wide = np.zeros((23, 9, 32 + offset), given[0].dtype)
        q, k = wide[:, :6, :32], wide[:, 6:8, :32]
        q[...], k[...] = given[0], given[1]
        right(program(q, k, *given[2:]), given)


def test_where_a_grid_would_be_too_large_each_step_has_its_own_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    program = made(ROPE)
    given = operands(31)
    together = program(*given)
    monkeypatch.setattr(JoinedPlan, "max_blocks", 1)
    program.records.clear()
    apart = program(*given)
    (record,) = program.records.values()
    assert len(record.launches) == 2
    for one, two in zip(together, apart, strict=True):
        assert (one.view(np.uint16) == two.view(np.uint16)).all()
    program.records.clear()


def test_a_graph_replays_it() -> None:
    program = made(ROPE)
    given = operands(17)
    replay = program.graph(*given)
    replay()
    right(replay.result, given)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", [ROPE, two_norms, two_maps, SHIPPED["qk_norm_rope"].at(T=24, H=6, K=2, D=32)],
                         ids=lambda spec: spec.name)  # fmt: skip
def test_it_is_validated_like_any_program(spec: Chain, target: str) -> None:
    program = made(spec, target)
    assert [type(kernel) for kernel in program.kernels] == [Joined]
    report = validate(program)
    assert report.ok, str(report)
    assert "in place" in {case.name for case in report.cases} or not program.in_place


# ---------------------------------------------------------------- what is joined


def test_the_plan_says_that_one_launch_is_cheaper() -> None:
    found: Any = plan(SHIPPED["rope_qk"], "cuda:h200")
    (joined,) = found.launched
    apart = sum(step.plan.cost.time_us for step in found.steps)
    assert found.time_us == joined.cost.time_us == pytest.approx(apart - 2.0)
    assert "2 steps in one launch" in str(found)
    assert "one launch is expected to take" in str(joined)
    assert joined.parts[0].cost.time_us > joined.parts[1].cost.time_us, "the largest step comes first"


def test_registers_of_one_step_may_cost_another_more_than_a_launch() -> None:
    found: Any = plan(SHIPPED["rope_qk"], "cuda:h200")
    one, other = (step.plan.cost for step in found.steps)
    starving = replace(other, blocks_per_sm=1, in_flight_bytes=1000)
    assert cost_of([one, starving], found.target).time_us > one.time_us + other.time_us


def test_steps_that_wait_for_one_another_are_not_side_by_side() -> None:
    found: Any = plan(one_behind_another, "cuda:h200")
    assert all(step.joined != "beside" for step in found.steps)


def test_no_step_joins_one_that_reduces_rows_by_other_threads() -> None:
    found: Any = plan(two_norms, "cuda:h200")
    one, other = (step.plan for step in found.steps)
    assert not obstacle([one, other])
    wider = replace(other, tile=replace(other.tile, threads_per_row=2 * other.tile.threads_per_row))
    assert "other numbers of threads" in obstacle([one, wider])
    assert "differ in threads" in obstacle([one, replace(other, tile=replace(other.tile, threads=1024))])
    with pytest.raises(ValueError, match="is no launch"):
        _ = JoinedPlan("x", found.target, (one, wider), ("a", "b")).parts


def test_tensors_of_one_launch_never_share_bytes() -> None:
    """What its steps write lives as long as what they read."""
    found: Any = plan(SHIPPED["decoder_layer"], "cuda:h200")
    assert max(map(len, found.launches)) == 2
    for name, (written, read) in found.lives.items():
        assert 0 <= written <= read < len(found.launches), name


# ---------------------------------------------------------------- what is wrong with one is caught


def caught(program: Program, change: Any) -> bool:
    """Is a launch of another text or other numbers told from the right one?"""
    (kernel,) = program.kernels
    assert isinstance(kernel, Joined)
    source = change(kernel.source)
    assert source.text != kernel.source.text
    other = Joined(source, None, program.device, kernel.replan, kernel.make_variant, kernel.make_alone)
    return not validate(Program(program.plan, [other], program.device), quick=True).ok


@pytest.mark.parametrize(("found", "wrong"), [
    ("block < blocks_a", "block <= blocks_a"),  # a block of the second step's is the first one's
    ("block < blocks_a", "block + 1 < blocks_a"),
    ("block -= static_cast<unsigned>(blocks_a);", "block -= static_cast<unsigned>(blocks_a) - 1;"),
    ("b_cosine_ptr, b_sine_ptr", "b_sine_ptr, b_cosine_ptr"),
])  # fmt: skip
def test_blocks_of_the_wrong_step_are_caught(found: str, wrong: str) -> None:
    def changed(source: Any) -> Any:
        head, kernel, body = source.text.rpartition(f"{source.plan.name}(\n")
        return replace(source, text=head + kernel + wrong.join(body.rsplit(found, 1)))

    assert caught(made(ROPE), changed)
