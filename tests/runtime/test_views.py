"""Chains with views, compiled and run in the emulator, against plain numpy: drawn ones, and those of known models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import fusegen
from fusegen import Program, b8, bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.errors import ArgumentError, SpecError
from fusegen.language.reference import reference
from fusegen.language.sizes import size_of
from fusegen.language.spec import Chain
from fusegen.language.types import TensorType
from tests.planner.test_lowering import CASES

pytestmark = pytest.mark.usefixtures("emulated_only")

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

B, D, H, M, N, T = dims("B D H M N T")
Array = np.ndarray[Any, np.dtype[Any]]
Step = tuple[Any, ...]


# ---------------------------------------------------------------- drawn chains


@dataclass(frozen=True)
class Way:
    """A step of a drawn chain: as a spec writes it, and by numpy."""

    spec: Callable[..., Any]
    numpy: Callable[..., Any]


def slice_of(axis: int, start: int, stop: int, step: int) -> tuple[Any, ...]:
    return (*(slice(None),) * axis, slice(start or None, -stop or None, step))


WAYS: dict[str, Way] = {
    "slice": Way(lambda x, *key: x[slice_of(*key)], lambda x, *key: x[slice_of(*key)]),
    "flip": Way(F.flip, np.flip),
    "roll": Way(lambda x, by, axis: F.roll(x, by, axis), lambda x, by, axis: np.roll(x, by, axis)),
    "swap": Way(
        lambda x: F.rearrange(x, "... a b -> ... b a"), lambda x: np.swapaxes(x, -1, -2)
    ),
    "twice": Way(lambda x, axis: F.concat([x, x * 2], axis), lambda x, axis: np.concatenate([x, x * 2], axis)),
    "stack": Way(lambda x, axis: F.stack([x, x + 1], axis), lambda x, axis: np.stack([x, x + 1], axis)),
    "merge": Way(
        lambda x: F.rearrange(x, "... a b -> ... (a b)"), lambda x: x.reshape(*x.shape[:-2], -1)
    ),
    "halves": Way(
        lambda x: F.rearrange(x, "... (two n) -> ... two n", two=2),
        lambda x: x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2),
    ),
    "scale": Way(lambda x: x * 3 - 1, lambda x: x * 3 - 1),
    "square": Way(lambda x: x * x, lambda x: x * x),
    "largest": Way(lambda x: x - F.max(x), lambda x: x - x.max(-1, keepdims=True)),
    "sums": Way(lambda x: F.sum(x), lambda x: x.sum(-1, keepdims=True)),
    "mirror": Way(lambda x: x + F.flip(x, -1), lambda x: x + np.flip(x, -1)),
}  # fmt: skip


@st.composite
def drawn(draw: Any) -> list[Step]:
    """Steps from an array of 6 x 8, each of which has a meaning for the shape at hand."""
    shape, steps = (6, 8), []
    for _ in range(draw(st.integers(1, 5))):
        names = [
            name for name in WAYS
            if not (name == "halves" and shape[-1] % 2)
            and not (name in ("swap", "merge") and len(shape) < 2)
            and not (name in ("stack", "halves") and len(shape) > 3)
            and not (name == "twice" and np.prod(shape) > 400)
        ]  # fmt: skip
        name = draw(st.sampled_from(names))
        axis = draw(st.integers(0, len(shape) - 1))
        step: Step = (name,)
        if name == "slice":
            if shape[axis] < 3:
                continue
            step = (name, axis, draw(st.integers(0, 1)), draw(st.integers(0, 1)), draw(st.sampled_from([1, 1, 2, 3])))
        elif name in ("flip", "twice", "stack"):
            step = (name, axis)
        elif name == "roll":
            step = (name, draw(st.integers(-3, 9)), axis)
        steps.append(step)
        shape = WAYS[name].numpy(np.zeros(shape), *step[1:]).shape
    return steps


def chain_of(body: Callable[..., Any], sizes: dict[str, int], **operands: Any) -> Chain:
    """A chain whose result has the type that its body gives it."""
    found: list[Any] = []

    def spec(x: Any) -> Any:
        value = body(x)
        found.append(value.shape)
        return value

    spec.__annotations__ = {**operands, "return": f32[1]}
    try:
        made = chain(**sizes)(spec)
        _ = made.graph
    except SpecError:
        if not found:
            raise
        spec.__annotations__ = {**operands, "return": TensorType(f32, found[-1])}
        made = chain(**sizes)(spec)
    return made


def through(steps: list[Step], x: Any, by: str) -> Any:
    for name, *more in steps:
        x = getattr(WAYS[name], by)(x, *more)
    return x


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn(), st.sampled_from(["cuda:h200", "cuda:sm_80", "hip:mi300x"]))
def test_drawn_chains(steps: list[Step], target: str) -> None:
    try:
        made = chain_of(lambda x: through(steps, x, "spec"), {"M": 6, "N": 8}, x=f32[M, N])
    except SpecError as error:  # 8 // 3, a roll by more than there are, the sum of one column
        assume(not any(words in str(error) for words in ("come out even", "; a size is", "nothing to reduce")))
        raise
    program = fusegen.compile(made, target=target, on="emulator", validate=False)
    x = np.random.default_rng(0).integers(-4, 5, (6, 8)).astype(np.float32)
    np.testing.assert_allclose(program(x), through(steps, x.astype(np.float64), "numpy"), rtol=1e-5)


# ---------------------------------------------------------------- chains with a purpose


@pytest.mark.by_values("name", "target")  # views are strides, which no target changes
@pytest.mark.parametrize("target", ["cuda:h200", "cuda:sm_80", "hip:mi300x"])
@pytest.mark.parametrize("name", CASES)
def test_every_case_is_validated_and_right(name: str, target: str) -> None:
    graph = CASES[name].graph
    program = fusegen.compile(CASES[name], target=target, on="emulator")
    rng = np.random.default_rng(0)
    given = [
        rng.standard_normal([size_of(s, graph.sizes) for s in t.shape]).astype(t.dtype.numpy) if t.shape else 0.5
        for t in graph.inputs
    ]
    got, wanted = program(*given), reference(graph)(*given)
    for one, two in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, wanted)), strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-2, atol=1e-4)


@chain(T=24, H=4, D=16)
def rope(q: bf16[T, H, D], cos: f32[T, 1, D // 2], sin: f32[T, 1, D // 2]) -> bf16[T, H, D]:
    low, high = F.split(q, 2)
    return F.concat([low * cos - high * sin, high * cos + low * sin])


@chain(M=24, N=96)
def silu_mul(x: bf16[M, 2 * N]) -> bf16[M, N]:
    gate, up = F.split(x, 2)
    return F.silu(gate) * up


@chain(M=24, N=96)
def first_eight(x: f32[M, N]) -> f32[8, N]:
    return x[:8] * 2


MADE: dict[str, Program] = {}


def compiled(spec: Chain) -> Program:
    if spec.name not in MADE:
        found = fusegen.compile(spec, target="cuda:h200", on="emulator", validate=False)
        assert isinstance(found, Program)
        MADE[spec.name] = found
    return MADE[spec.name]


def rope_operands(tokens: int = 24) -> list[Any]:
    rng = np.random.default_rng(tokens)
    angle = rng.uniform(0, 6, (tokens, 1, 8)).astype(np.float32)
    return [rng.standard_normal((tokens, 4, 16)).astype(bf16.numpy), np.cos(angle), np.sin(angle)]


def rotated(q: Array, cos: Array, sin: Array) -> Array:
    low, high = np.split(q.astype(np.float64), 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def close(one: Array, two: Array) -> None:
    np.testing.assert_allclose(one.astype(np.float64), two, rtol=2**-8, atol=1e-6)


def test_rope_is_one_kernel_without_a_workspace() -> None:
    program = compiled(rope)
    assert len(program.kernels) == 1
    assert program.workspace_bytes() == 0
    assert [str(b) for b in program.plan.steps[0].bindings] == [
        "low in q", "high in q", "cos", "sin", "out_low in out", "out_high in out"
    ]  # fmt: skip
    for tokens in (24, 1, 57, 0, 24):
        given = rope_operands(tokens)
        close(program(*given), rotated(*given))


def test_strided_operands_and_results_are_taken_as_they_lie() -> None:
    q, cos, sin = rope_operands()
    wide = np.zeros((24, 3, 4, 16), q.dtype)  # q, k and v of one product
    wide[:, 1] = q
    out = np.zeros((24, 4, 20), q.dtype)
    assert compiled(rope)(wide[:, 1], cos, sin, out=out[..., :16]).base is out
    close(out[..., :16], rotated(q, cos, sin))
    assert not out[..., 16:].any()


def test_halves_of_one_array() -> None:
    x = np.random.default_rng(0).standard_normal((24, 192)).astype(bf16.numpy)
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    close(compiled(silu_mul)(x), gate / (1 + np.exp(-gate)) * up)
    assert compiled(silu_mul).plan.fixed == {"N"}


def test_what_views_share_is_no_overlap_and_halves_may_be_written_over_themselves() -> None:
    q, cos, sin = rope_operands()
    wanted = rotated(q, cos, sin)
    assert compiled(rope)(q, cos, sin, out=q) is q
    close(q, wanted)
    q = np.concatenate([rope_operands()[0]] * 2)
    with pytest.raises(ArgumentError, match="out shares memory with the input q"):
        compiled(rope)(q[:24], cos, sin, out=q[1:25])


def test_elements_apart_are_told_by_the_callers_name() -> None:
    q, cos, sin = rope_operands()
    twice = np.repeat(q, 2, axis=-1)
    with pytest.raises(ArgumentError, match="q has a stride of 2 elements along its last axis"):
        compiled(rope)(twice[..., ::2], cos, sin)


def test_a_view_beyond_its_array_is_refused() -> None:
    x = np.ones((9, 96), np.float32)
    assert compiled(first_eight)(x).shape == (8, 96)
    with pytest.raises(ArgumentError, match="first_eight takes no such arrays"):
        compiled(first_eight)(x[:5])


def test_programs_of_views_are_prepared_copied_and_pickled_like_others() -> None:
    import copy
    import pickle

    given = rope_operands()
    prepared = compiled(rope).prepare(*given)
    prepared()
    close(prepared.result, rotated(*given))
    assert copy.copy(compiled(rope)) is compiled(rope)
    close(pickle.loads(pickle.dumps(compiled(rope)))(*given), rotated(*given))


def test_the_plan_says_which_tensor_is_a_view_of_what() -> None:
    text = str(compiled(rope).plan)
    assert "1. rope: low in q, high in q, cos, sin -> out_low in out, out_high in out" in text


@chain(M=24, N=16)
def dropped_and_cut(x: f32[M, 2 * N], seed: i32) -> f32[M, N]:
    return F.dropout(x, 0.5, seed, 0)[:, N:]


def test_random_numbers_are_those_of_the_whole_value() -> None:
    x = np.ones((24, 32), np.float32)
    wanted = reference(dropped_and_cut.graph)(x, 7)
    for target in ("cuda:h200", "hip:mi300x"):
        program = fusegen.compile(dropped_and_cut, target=target, on="emulator")
        np.testing.assert_array_equal(program(x, 7), wanted)
    assert 0.3 < (wanted == 0).mean() < 0.7


def test_a_vector_may_be_a_row_and_a_column() -> None:
    """Both views add an axis, and both had the operand's name: the kernel took [N, 1] and no [N]."""

    @chain(N=9)
    def ahead(score: f32[N], rank: i32[N]) -> tuple[f32[N, N], f32[N]]:
        """Of each pair of scores by how much the better one is ahead."""
        d = score[:, None] - score[None, :]
        ahead = F.where(rank[:, None] < rank[None, :], d, 0.0)
        return ahead, F.sum(ahead, axis=1, keepdims=False)

    rng = np.random.default_rng(3)
    score, rank = rng.standard_normal(9, dtype=np.float32), rng.permutation(9).astype(np.int32)
    wanted = np.where(rank[:, None] < rank, score[:, None] - score, 0)
    got = fusegen.compile(ahead, "cuda:h200", on="emulator")(score, rank)
    np.testing.assert_allclose(got[0], wanted, rtol=1e-6)
    np.testing.assert_allclose(got[1], wanted.sum(1), rtol=1e-5)


def test_a_vector_is_a_row_and_a_column_of_what_is_made_of_a_product() -> None:
    """As the labels of a contrastive loss are: in one kernel, the two were declared by one name."""

    @chain(B=24, D=40)
    def supervised(z: bf16[B, D], labels: i32[B]) -> f32[B]:
        sim = z @ z.T / 0.07
        eye = F.row_index(sim) == F.col_index(sim)
        same = (labels[:, None] == labels[None, :]) & ~eye
        log_p = F.log_softmax(F.where(eye, -np.inf, sim), axis=1)
        count = F.sum(F.cast(same, f32), axis=1, keepdims=False)
        return -F.sum(F.where(same, log_p, 0.0), axis=1, keepdims=False) / F.maximum(count, 1.0)

    for target in ("cuda:h200", "hip:mi300x"):
        assert fusegen.validate(fusegen.compile(supervised, target, on="emulator", validate=False), quick=True).ok


def test_one_number_is_an_array_of_one() -> None:
    """Sums of all elements whose axes are left away have the shape [], and losses are declared as f32[1]."""

    @chain(M=5, N=37)
    def losses(x: f32[M, N], keep: b8[M, N]) -> tuple[f32[1], f32[1, 1]]:
        kept = F.cast(keep, f32)
        count = F.sum(kept, axis=None, keepdims=False)
        loss = F.sum(F.square(x) * kept, axis=None, keepdims=False) / count
        return loss, F.sum(abs(x) * kept, axis=None, keepdims=False) / F.maximum(count, 1.0)

    program = fusegen.compile(losses, "cuda:h200", on="emulator", validate=False)
    assert fusegen.validate(program, quick=True).ok
    x = np.random.default_rng(4).standard_normal((5, 37), dtype=np.float32)
    mean, size = program(x, x > 0)
    np.testing.assert_allclose(mean, [np.square(x[x > 0]).mean()], rtol=1e-5)
    np.testing.assert_allclose(size, [[x[x > 0].mean()]], rtol=1e-5)
