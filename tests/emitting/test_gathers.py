"""Rows and columns that an index names: kernels against plain numpy, whatever the index holds, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import b8, bf16, chain, dims, f8e4m3, f32, i8, i32, u8
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import ArgumentError, NoPlan, SpecError
from fusegen.language.spec import Chain
from fusegen.measuring.operands import operands as operands_to_time
from fusegen.planner import candidates
from fusegen.planner.model import Layout, RowPlan, Source
from fusegen.planner.programs.model import ProgramPlan
from fusegen.reporting.explaining import accesses
from fusegen.runtime import Kernel, Program, finding
from fusegen.targets import H200, Target
from fusegen.validation import validate
from tests.row_plans import row_plans

pytestmark = pytest.mark.usefixtures("emulated_only")

B, D, H, M, N, S, V = dims("B D H M N S V")
Array = np.ndarray[Any, np.dtype[Any]]
LEAST, MOST = -(2**31), 2**31 - 1


@chain(V=50, M=21, N=256)
def embedded(table: bf16[V, N], ids: i32[M], gain: bf16[N]) -> tuple[bf16[M, N], bf16[M, N]]:
    hidden = F.gather(table, ids)
    return hidden, F.rmsnorm(hidden, gain)


@chain(V=50, B=3, S=7, N=40)
def summed(table: bf16[V, N], ids: i32[B, S], x: bf16[B, S, N]) -> f32[B, S, 1]:
    return F.sum(F.gather(table, ids) * x)


@chain(V=50, M=9, H=3, N=24)
def of_heads(table: f32[V, H, N], ids: i32[M, 1], x: f32[M, H, N]) -> f32[M, H, N]:
    return F.gather(table, ids) - x


@chain(V=50, M=9, H=3, D=32)
def rope(x: bf16[M, H, D], cache: f32[V, D], at: i32[M]) -> bf16[M, H, D]:
    cos, sin = F.split(F.gather(cache, at)[:, None, :], 2)
    low, high = F.split(x, 2)
    return F.concat([low * cos - high * sin, high * cos + low * sin])


@chain(V=32, H=3, S=5, N=9)
def biased(scores: f32[H, S, N], table: f32[V, H]) -> f32[H, S, N]:
    """T5's relative positions, some of which have no bucket."""
    bucket = F.col_index(scores) - 2 * F.row_index(scores)
    return scores + F.rearrange(F.gather(table, bucket), "s n h -> h s n")


@chain(V=50, M=11, N=33)
def looked_up(table: f32[V], ids: i32[M, N]) -> f32[M, N]:
    return F.gather(table, ids) + 1.0


@chain(V=50, M=9, N=40)
def at_step(x: f32[M, N], table: f32[V, N], step: i32) -> f32[M, N]:
    return x + F.gather(table, step)


@chain(V=50, M=9, N=40)
def of_the_best(x: f32[M, N], table: f32[V, N]) -> f32[M, N]:
    return F.gather(table, F.cast(F.max(x), i32))


@chain(M=21, N=130)
def taken(x: f32[M, N], at: i32[M], t: f32[M, 1]) -> tuple[f32[M], f32[M]]:
    return F.take(x, at, 7.0)[..., 0], F.take(x * t + F.col_index(x), at, -1.0)[..., 0]


@chain(V=40, M=9, N=24)
def of_computed(x: f32[V, N], at: i32[M]) -> f32[M, N]:
    return F.gather(x * 2.0, at)


def rows(table: Any, ids: Array) -> Array:
    """table[ids], of ids that are none 0: by a loop, as no vectorized text is written."""
    wide = np.asarray(table, np.float64)
    return np.array([wide[i] if 0 <= i < len(wide) else np.zeros(wide.shape[1:]) for i in ids.ravel()]).reshape(
        *ids.shape, *wide.shape[1:]
    )


def of_row(x: Any, at: Array, missing: float) -> Array:
    wide = np.asarray(x, np.float64)
    return np.array([row[i] if 0 <= i < len(row) else missing for row, i in zip(wide, at, strict=True)])


def rms(x: Array, gain: Any) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * np.float64(gain))


def turned(x: Any, cache: Any, at: Array) -> Array:
    low, high = np.split(np.float64(x), 2, -1)
    cos, sin = np.split(rows(cache, at)[:, None], 2, -1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def with_buckets(scores: Any, table: Any) -> Array:
    found = np.array(scores, np.float64)
    for h, s, n in np.ndindex(found.shape):
        bucket = n - 2 * s
        found[h, s, n] += table[bucket, h] if 0 <= bucket < len(table) else 0.0
    return found


MEANINGS: dict[str, tuple[Chain, Callable[..., Any]]] = {
    one.name: (one, meaning)
    for one, meaning in (
        (embedded, lambda table, ids, gain: (rows(table, ids), rms(rows(table, ids), gain))),
        (summed, lambda table, ids, x: (rows(table, ids) * np.float64(x)).sum(-1, keepdims=True)),
        (of_heads, lambda table, ids, x: rows(table, ids[:, 0]) - np.float64(x)),
        (rope, turned),
        (biased, with_buckets),
        (looked_up, lambda table, ids: rows(table, ids) + 1.0),
        (at_step, lambda x, table, step: np.float64(x) + rows(table, np.array(step))),
        (of_the_best, lambda x, table: rows(table, np.trunc(np.float64(x).max(-1)).astype(int))),
        (
            taken,
            lambda x, at, t: (of_row(x, at, 7.0), of_row(np.float64(x) * t + np.arange(x.shape[1]), at, -1.0)),
        ),
        (of_computed, lambda x, at: rows(np.float64(x) * 2, at)),
    )
}


def steps_of(made: Any) -> int:
    return len(made.plan.steps) if isinstance(made, Program) else 1


def untyped(value: Any) -> Any:
    """The same, whatever a type checker thinks of it."""
    return value


def operands(spec: Chain, seed: int) -> list[Any]:
    """Indices of every kind, each several times; a run-time scalar by turns."""
    rng = np.random.default_rng(seed)
    sizes = spec.graph.sizes
    most = sizes["V"] if "V" in sizes else sizes["N"]
    kinds = np.array([0, most - 1, -1, most, LEAST, MOST, *rng.integers(0, most, 6)], np.int32)
    found: list[Any] = []
    for tensor in spec.graph.inputs:
        shape = tuple(sizes[str(size)] if str(size) in sizes else int(str(size)) for size in tensor.shape)
        if tensor.dtype is i32:
            found.append(rng.choice(kinds, shape).astype(np.int32) if shape else int(kinds[seed % len(kinds)]))
        else:
            found.append((4 * rng.standard_normal(shape)).astype(tensor.dtype.numpy))
    return found


@pytest.mark.parametrize("name", MEANINGS)
@pytest.mark.parametrize("ragged", [False, True])
def test_what_is_read_is_what_numpy_reads(name: str, ragged: bool, target: Target) -> None:
    spec, meaning = MEANINGS[name]
    spec = spec.at(N=spec.graph.sizes["N"] + 3) if ragged and "N" in spec.graph.sizes else spec
    kernel = fusegen.compile(spec, target, on="emulator", validate=False)
    assert steps_of(kernel) == (2 if name == "of_computed" else 1)
    for seed in range(3):
        given = operands(spec, seed)
        results, wanted = kernel(*given), meaning(*given)
        results, wanted = (x if isinstance(x, tuple) else (x,) for x in (results, wanted))
        for tensor, found, law in zip(spec.graph.outputs, results, wanted, strict=True):
            rounding = 2.0**-8 if tensor.dtype is bf16 else 1e-5
            np.testing.assert_allclose(np.float64(found), law, rtol=rounding, atol=rounding)
    validate(kernel, quick=True).raise_for_error()


@chain(V=50, M=21, N=256)
def one_kernel(table: bf16[V, N], ids: i32[M, 1], x: bf16[M, N], gain: bf16[N]) -> bf16[M, N]:
    return F.rmsnorm(F.gather(table, ids) + x, gain)


def way_of(made: RowPlan) -> tuple[object, ...]:
    by_blocks = any(row_pass.blocks_of for row_pass in made.passes)
    return made.staging, made.keeps, made.misaligned_rows, made.copies, made.cluster > 1, by_blocks


def test_every_way_to_hold_rows_takes_them_from_a_table() -> None:
    """One plan of each: registers, shared memory with and without copies, streams, clusters, rows across blocks."""
    ways = {way_of(made): made for cols in (20000, 1003) for made in row_plans(one_kernel.graph.at(N=cols), H200)}
    assert {way[0] for way in ways} == {"registers", "shared", "stream"}
    assert all({True, False} == {way[place] for way in ways} for place in (2, 3, 4, 5))
    for made in ways.values():
        validate(alone(made), quick=True, cases=("normal",)).raise_for_error()


@chain(V=50, M=21, N=256)
def copied(table: bf16[V, N], ids: i32[M, 1]) -> bf16[M, N]:
    return F.gather(table, ids // 2)


@chain(V=50, M=21, N=256)
def added(table: bf16[V, N], ids: i32[M, 1], x: bf16[M, N]) -> bf16[M, N]:
    return F.gather(table, ids) + x


@pytest.mark.parametrize("cols", [2048, 2000, 1016, 24, 8])
def test_threads_take_two_vectors_of_a_row_that_an_index_names(cols: int, target: Target) -> None:
    """Of rows that fill all threads' turns, of others, and of those that are too short for it."""
    made = [plan for plan in row_plans(copied.graph.at(N=cols), target) if plan.tile.vector * plan.tile.per_thread > 8]
    assert bool(made) == (cols > 8)
    for plan in made:
        validate(alone(plan), quick=True).raise_for_error()


def test_rows_beside_those_that_an_index_names_keep_one_vector_a_thread() -> None:
    assert {plan.tile.per_thread for plan in row_plans(added.graph, H200) if plan.tile.vector > 1} == {1}


def alone(made: RowPlan) -> Kernel:
    """A kernel of that plan, and of no other."""

    def variant(layout: Layout) -> tuple[Source, None]:
        raise AssertionError(f"{layout} asks for another plan than {made.configuration}")

    return Kernel(render(made), None, finding.find(made.target, "emulator"), variant)


@chain(V=9, M=20, N=40)
def of_whole_numbers(ids: i32[M], table: i32[V, N], keep: b8[V, N]) -> tuple[i32[M, N], i32[M, 1]]:
    found = F.where(F.gather(keep, ids), F.gather(table, ids), 2**30)
    return found, F.sum(found)


@chain(V=9, M=20, N=48)
def of_8_bits(ids: i32[M], table: f8e4m3[V, N], scale: f32[V]) -> bf16[M, N]:
    return F.dequantize(F.gather(table, ids), F.gather(scale, ids)[:, None])


@chain(V=9, M=20, N=40)
def by_gathered_ids(ids: i32[M], names: i32[V], table: f32[V, N]) -> f32[M, N]:
    return F.gather(table, F.gather(names, ids)) * 2.0


@chain(V=9, M=20, N=40)
def by_rounded_ids(x: f32[M, N], table: f32[V, N]) -> f32[M, N]:
    return F.gather(table, F.cast(F.exp(F.mean(x)), i32)) + x


@chain(M=20, N=40)
def behind_a_mask(x: f32[M, N], table: f32[N, N], ids: i32[M, 1]) -> f32[M, N]:
    return F.softmax(F.where(F.col_index(x) <= F.row_index(x), x + F.gather(table, ids), -float("inf")))


@pytest.mark.parametrize(
    "spec", [of_whole_numbers, of_8_bits, by_gathered_ids, by_rounded_ids, behind_a_mask], ids=lambda c: c.name
)
def test_tables_of_every_type_and_ids_of_every_kind_validate(spec: Chain, target: Target) -> None:
    assert fusegen.compile(spec, target, on="emulator").report.ok


# ---------------------------------------------------------------- cross entropy


def losses(logits: Any, labels: Array, ignored: int, smoothing: float, z_loss: float) -> Array:
    """Row by row, as the formula is written."""
    found = []
    for row, label in zip(np.asarray(logits, np.float64), labels, strict=True):
        top = row.max()
        total = top + np.log(np.exp(row - top).sum())
        own = total - (row[label] if 0 <= label < len(row) else np.nan)
        loss = (1 - smoothing) * own + smoothing * (total - row.mean()) + z_loss * total**2
        found.append(0.0 if label == ignored else loss)
    return np.array(found)


@pytest.mark.parametrize(
    ("ignored", "smoothing", "z_loss"), [(-100, 0.0, 0.0), (3, 0.1, 0.0), (-1, 0.0, 1e-3), (0, 1.0, 0.5)]
)
def test_cross_entropy(ignored: int, smoothing: float, z_loss: float, target: Target) -> None:
    @chain(M=14, N=203)
    def spec(logits: bf16[M, N], labels: i32[M]) -> f32[M]:
        return F.cross_entropy(logits, labels, ignored, label_smoothing=smoothing, z_loss=z_loss)

    kernel = fusegen.compile(spec, target, on="emulator")
    rng = np.random.default_rng(5)
    logits = (9 * rng.standard_normal((14, 203))).astype(bf16.numpy)
    labels = np.array([0, 202, 203, -1, -100, 3, LEAST, MOST, *rng.integers(0, 203, 6)], np.int32)
    law = losses(logits, labels, ignored, smoothing, z_loss)
    assert np.isnan(law).sum() in (3, 4, 5)
    np.testing.assert_allclose(kernel(logits, labels), law, rtol=1e-5, atol=1e-5)


def test_cross_entropy_is_one_pass_over_the_logits() -> None:
    @chain(M=4096, N=32000)
    def spec(logits: bf16[M, N], labels: i32[M, 1]) -> f32[M, 1]:
        return F.cross_entropy(logits, labels)

    cost = row_plans(spec.graph, H200)[0].cost
    assert cost.traffic.moved == 4096 * (32000 * 2 + 4 + 4)


def test_rows_of_a_table_are_the_bytes_that_are_read() -> None:
    sizes = {"V": 128256, "M": 1000, "N": 4096}
    cost = row_plans(one_kernel.graph.at(**sizes), H200)[0].cost
    assert cost.traffic.moved == 3 * 1000 * 4096 * 2 + 1000 * 4 + 4096 * 2
    sizes["V"] = 10  # fewer than are asked for
    assert row_plans(one_kernel.graph.at(**sizes), H200)[0].cost.traffic.moved == cost.traffic.moved - 990 * 4096 * 2


def test_plans_say_what_is_looked_up_and_where() -> None:
    made = row_plans(one_kernel.graph, H200)[0]
    assert "looks up rows of table at ids, 0 where there is none" in str(made)
    assert any("vectors of" in line and "of the rows that ids names" in line for line in accesses(made))
    made = row_plans(looked_up.graph, H200)[0]
    assert "table: read one value for each of ids" in accesses(made)


def test_what_is_timed_reads_rows_all_over_the_table() -> None:
    graph = one_kernel.graph.at(V=300, M=600)
    _, ids, *_ = operands_to_time(finding.find(H200, "emulator"), graph).inputs
    drawn = set(ids.numpy().ravel().tolist())
    assert min(drawn) >= 0
    assert max(drawn) < 300
    assert len(drawn) > 200


# ---------------------------------------------------------------- calls, and what is refused


def test_no_output_lies_over_what_is_looked_up() -> None:
    @chain(M=4, N=64)
    def spec(x: f32[M, N], y: f32[M, N], at: i32[M, 1]) -> f32[M, N]:
        return y * F.take(x, at) + x

    assert {pair for made in row_plans(spec.graph, H200) for pair in made.in_place} == {("out", "y")}


def test_calls_say_what_is_wrong_with_indices_and_tables() -> None:
    kernel = fusegen.compile(one_kernel.at(N=32), H200, on="emulator", validate=False)
    table, x, gain = (np.ones(shape, bf16.numpy) for shape in ((50, 32), (3, 32), (32,)))
    ids = np.zeros((3, 1), np.int32)
    assert kernel(table[:7], ids, x, gain).shape == (3, 32)
    with pytest.raises(ArgumentError, match=r"ids holds i64, and one_kernel takes i32\[M, 1\]|int64"):
        kernel(table, ids.astype(np.int64), x, gain)
    with pytest.raises(ArgumentError, match="table has no rows, and one_kernel reads some of them"):
        kernel(table[:0], ids, x, gain)
    with pytest.raises(ArgumentError, match="table on axis 1 has 31"):
        kernel(np.ones((50, 31), bf16.numpy), ids, x, gain)


def test_what_gather_and_take_refuse() -> None:
    def traced(body: Callable[[Any, Any, Any], Any]) -> None:
        def spec(x: f32[M, N], ids: i32[M], many: i32[M, 2]) -> f32[M, N]:
            return body(x, ids, many)

        with pytest.raises(SpecError) as error:
            chain(M=4, N=8)(spec)
        said.append(str(error.value).split(": ", 1)[1])

    said: list[str] = []
    traced(lambda x, ids, many: F.gather(x, x))
    traced(lambda x, ids, many: F.gather(x, untyped(3)))
    traced(lambda x, ids, many: F.take(x, many))
    traced(lambda x, ids, many: F.take(x, x))
    traced(lambda x, ids, many: F.take(F.sum(x), ids))
    traced(lambda x, ids, many: F.cross_entropy(x, ids, label_smoothing=2.0))
    assert [text.split("\n")[0] for text in said] == [
        "gather: found ids of f32, wanted i32",
        "gather: the ids is 3, not a traced value",
        "take: found columns [M, 2] for rows of [M, N]; wanted one column a row, of [..., 1], or those that F.topk or "
        "F.argmax chose",
        "take: found columns of f32, wanted i32",
        "take: [M, 1] has no row to take a column of",
        "cross_entropy: label_smoothing=2.0; it must be a number from 0 to 1.0",
    ]


def test_one_kernel_looks_up_a_table_by_several_indices() -> None:
    @chain(V=9, M=4, N=8)
    def twice(table: f32[V, N], a: i32[M, 1], b: i32[M, 1]) -> f32[M, N]:
        return F.gather(table, a) - F.gather(table, b)

    kernel = fusegen.compile(twice, H200, on="emulator")
    assert isinstance(kernel, Program)
    assert len(kernel.plan.steps) == 1
    table = np.arange(72, dtype=np.float32).reshape(9, 8)
    a, b = np.array([[3], [0], [-1], [8]], np.int32), np.array([[3], [9], [2], [1]], np.int32)
    wide = np.concatenate([table, np.zeros((1, 8), np.float32)])
    assert np.array_equal(kernel(table, a, b), wide[[3, 0, -1, 8]] - wide[[3, -1, 2, 1]])


def test_a_table_that_is_the_chains_rows_too_is_looked_up_by_a_kernel_of_its_own() -> None:
    @chain(M=4, N=8)
    def shifted(x: f32[M, N], a: i32[M, 1]) -> f32[M, N]:
        return x - F.gather(x, a)

    with pytest.raises(NoPlan, match="gather reads rows that an index names, of x, which is read as the chain's rows"):
        candidates(shifted.graph, H200).need()
    assert steps_of(fusegen.compile(shifted, H200, on="emulator")) == 2


@chain(V=50, M=13, N=24)
def bagged(table: bf16[V, N], ids: i32[M, 3], weights: f32[M, 3]) -> f32[M, N]:
    return F.gather_sum(table, ids, weights)


@pytest.mark.parametrize("target", ["cuda:h200", "cuda:a100", "hip:mi300x"])
def test_rows_that_several_indices_name_add_up_in_one_kernel(target: str) -> None:
    kernel = fusegen.compile(bagged, target, on="emulator")
    assert isinstance(kernel, Program)
    assert len(kernel.plan.steps) == 1
    rng = np.random.default_rng(5)
    table = rng.standard_normal((50, 24)).astype(np.float32).astype(bf16.numpy)
    ids = rng.integers(-1, 51, (13, 3)).astype(np.int32)
    weights = rng.standard_normal((13, 3)).astype(np.float32)
    wide = np.concatenate([table.astype(np.float32), np.zeros((1, 24), np.float32)])
    rows = wide[np.where((ids < 0) | (ids > 49), 50, ids)]
    wanted = np.einsum("mjn,mj->mn", rows.astype(np.float64), weights)
    assert np.allclose(kernel(table, ids, weights), wanted, atol=1e-5)
    assert validate(kernel).ok


@pytest.mark.parametrize("sizes", [{"M": 37, "N": 128}, {"M": 4096, "N": 64}, {"M": 5, "N": 33}], ids=str)
def test_reductions_of_nothing_but_rows_at_indices_are_one_kernel(sizes: dict[str, int], target: Target) -> None:
    """A dot product of two embeddings: no operand is as long as the rows that are summed."""

    @chain(V=50, M=9, N=24)
    def scores(users: f32[V, N], items: f32[V, N], u: i32[M], i: i32[M]) -> f32[M]:
        return F.sum(F.gather(users, u) * F.gather(items, i), keepdims=False)

    planned = fusegen.plan(scores.at(**sizes), target)
    assert isinstance(planned, ProgramPlan)
    assert len(planned.steps) == 1
    rng = np.random.default_rng(6)
    users, items = rng.standard_normal((2, 50, 24), dtype=np.float32)
    u, i = rng.integers(0, 50, (2, 9), dtype=np.int32)
    found = fusegen.compile(scores, target, on="emulator")(users, items, u, i)
    np.testing.assert_allclose(found, (users[u] * items[i]).sum(-1), rtol=1e-4, atol=1e-5)


def test_positions_of_a_table_that_is_read_turned_round(target: Target) -> None:
    """T5's bias by itself: [S, N, H] is read at [H, S, N], where S and N are rows and columns to count."""

    @chain(S=5, N=9, H=3)
    def bias(table: f32[32, H]) -> f32[H, S, N]:
        like = F.broadcast(table[0, 0], (S, N))
        bucket = F.col_index(like) - F.row_index(like) + 8
        return F.rearrange(F.gather(table, bucket), "s n h -> h s n")

    table = np.random.default_rng(7).standard_normal((32, 3), dtype=np.float32)
    found = fusegen.compile(bias, target, on="emulator")(table)
    bucket = np.arange(9) - np.arange(5)[:, None] + 8
    np.testing.assert_array_equal(found, table[bucket].transpose(2, 0, 1))


@chain(H=2, S=64, N=64, D=32, V=8)
def biased_attention(q: bf16[H, S, D], k: bf16[H, N, D], v: bf16[H, N, D], table: f32[V, H]) -> bf16[H, S, D]:
    """As T5 has it, all in one chain: the bias is a kernel of its own."""
    like = F.broadcast(table[0, 0], (S, N))
    distance = F.clip(abs(F.col_index(like) - F.row_index(like)), 0, 7)
    bias = F.rearrange(F.gather(table, distance), "s n h -> h s n")
    return F.softmax(q @ k.mT + bias) @ v


def test_attention_with_a_bias_from_a_table_is_two_kernels() -> None:
    assert steps_of(fusegen.compile(biased_attention, H200, on="emulator")) == 2


@chain(M=9, N=24)
def decoded_u8(q: u8[M, N], table: f32[16]) -> f32[M, N]:
    return F.gather(table, (q >> 4) & 15) + F.gather(table, q & 15)


@chain(M=9, N=24)
def decoded_i8(q: i8[M, N], table: f32[16]) -> f32[M, N]:
    return F.gather(table, (q >> 4) & 15) + F.gather(table, q & 15)


@pytest.mark.parametrize("spec", [decoded_u8, decoded_i8], ids=lambda spec: str(spec.name))
def test_codes_of_8_bits_name_values_of_a_table(spec: Chain, target: Target) -> None:
    """As NF4 has them: two codes in a byte, and a table of 16 values."""
    kernel = fusegen.compile(spec, target, on="emulator")
    q = np.arange(9 * 24).reshape(9, 24).astype(spec.graph.inputs[0].dtype.numpy)
    table = np.random.default_rng(8).standard_normal(16, dtype=np.float32)
    wide = q.astype(np.int32)
    np.testing.assert_array_equal(kernel(q, table), table[wide >> 4 & 15] + table[wide & 15])


def test_what_gather_sum_takes() -> None:
    (J,) = dims("J")

    def refused(ids: Any, weights: Any, said: str) -> None:
        with pytest.raises(SpecError, match=said):

            @chain(V=9, M=4, N=8, J=2)
            def wrong(table: f32[V, N], ids: ids, weights: weights) -> f32[M, N]:
                return F.gather_sum(table, ids, weights)

    refused(i32[M, J], f32[M, J], "found ids \\[M, J\\], wanted several a row, as many as a number says")
    refused(i32[M], f32[M], "found ids \\[M\\], wanted several a row")
    refused(i32[M, 2], f32[M, 3], "found weights \\[M, 3\\] for ids \\[M, 2\\]; wanted one for each id")
    refused(f32[M, 2], f32[M, 2], "found ids of f32, wanted i32")
