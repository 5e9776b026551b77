"""Random numbers: Philox4x32-10 by its known answers, and the same bits by every plan, target, layout and launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import NoPlan, SpecError
from fusegen.language.philox import philox, philox4x32
from fusegen.language.reference import load_reference, reference_source
from fusegen.language.spec import Chain
from fusegen.pipeline import compile
from fusegen.planner import candidates
from fusegen.planner import plan as best_plan
from fusegen.planner.model import Layout, RowPlan, Source
from fusegen.runtime import Kernel, finding
from fusegen.targets import H200, MI300X, Target
from fusegen.validation import far
from fusegen.validation.inputs import make_operands, sizes_for
from fusegen.validation.memory import Arrangement, place
from tests.row_plans import row_plans

pytestmark = pytest.mark.usefixtures("emulated_only")

B, K, M, N = dims("B K M N")
Array = np.ndarray[Any, np.dtype[Any]]

# kat_vectors of Random123 (Salmon et al. 2011): counter, key, the four words of philox4x32 after 10 rounds
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)  # fmt: skip


def untyped(value: Any) -> Any:
    return value


def by_integers(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Philox4x32-10 once more, by Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        (high0, low0), (high1, low1) = divmod(0xD2511F53 * c0, 2**32), divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def unit(index: int, seed: int, offset: int) -> float:
    """What F.uniform gives the element of that index."""
    words = by_integers((index // 4 % 2**32, index // 4 // 2**32, offset % 2**32, 0), (seed % 2**32, 0))
    return (words[index % 4] >> 8) / 2**24


def units(shape: Sequence[int], seed: int, offset: int, first: int = 0) -> Array:
    count = math.prod(shape)
    return np.array([unit(first + i, seed, offset) for i in range(count)]).reshape(shape)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: Any, key: Any, words: Any) -> None:
    assert tuple(map(int, philox4x32(counter, key))) == words
    assert by_integers(counter, key) == words


def test_an_element_has_one_word_of_its_counter() -> None:
    index = np.array([0, 1, 2, 3, 4, 2**31, 2**32 - 1, 2**32, 2**34 + 5, 2**40 + 7])
    found = philox(index.astype(np.int32), (index >> 32).astype(np.int32), np.int32(-3), np.int32(77))
    assert ((found >> 8 & 0xFFFFFF) / 2**24).tolist() == [unit(i, 77, -3) for i in index.tolist()]


# ---------------------------------------------------------------- the same bits everywhere


@chain(M=5, N=24)
def draw(x: f32[M, N], seed: i32, offset: i32) -> f32[M, N]:
    return F.uniform(x, seed, offset) + 0.0 * x


@chain(M=5, N=24)
def draw_in_rows(x: f16[M, N], seed: i32[1], offset: i32) -> tuple[f32[M, N], f32[M, 1]]:
    u = F.uniform(x, seed, offset)
    return u, F.sum(x) * 0.0 + F.uniform(F.max(x), seed, 1)


def alone(plan: RowPlan) -> Kernel:
    """A kernel of that plan."""

    def variant(layout: Layout) -> tuple[Source, None]:
        raise AssertionError(f"{layout} asks for another plan")

    return Kernel(render(plan), None, finding.find(plan.target, "emulator"), variant)


def run(made: Chain, target: Target, *arguments: Any) -> Any:
    return compile(made, target, on="emulator", validate=False)(*arguments)


@pytest.mark.parametrize("cols", [1, 2, 4, 24, 37, 256, 1023])
def test_bits_are_those_of_the_definition(cols: int, target: Target) -> None:
    x = np.zeros((5, cols), np.float32)
    np.testing.assert_array_equal(run(draw.at(M=5, N=cols), target, x, 11, -2), units((5, cols), 11, -2))


@pytest.mark.parametrize("cols", [2, 24, 37, 1000])
def test_rows_and_single_values_of_rows(cols: int, target: Target) -> None:
    x = np.zeros((3, cols), np.float16)
    seed = np.array([-9], np.int32)
    found, of_rows = run(draw_in_rows.at(M=3, N=cols), target, x, seed, 2**31 - 1)
    np.testing.assert_array_equal(found, units((3, cols), -9, 2**31 - 1))
    np.testing.assert_array_equal(of_rows, units((3, 1), -9, 1))


@pytest.mark.parametrize("cols", [56, 61, 5000])
def test_every_plan_draws_the_same_bits(cols: int, target: Target) -> None:
    """One of each template, tiling and regime."""
    chosen: dict[object, RowPlan] = {}
    for plan in row_plans(draw_in_rows.at(N=cols).graph, target):
        chosen.setdefault(
            (plan.template, plan.tile.vector, plan.staging, plan.keeps, plan.bulk, plan.cluster > 1), plan
        )
    assert len(chosen) >= 2
    seed, x, wanted = np.array([5], np.int32), np.zeros((3, cols), np.float16), units((3, cols), 5, 6)
    for plan in chosen.values():
        found, _ = alone(plan)(x, seed, 6)
        np.testing.assert_array_equal(found, wanted, plan.configuration)


def test_leading_axes_and_strides_leave_the_index_alone(target: Target) -> None:
    @chain(B=2, M=3, N=8)
    def spec(x: f32[B, M, N], seed: i32) -> f32[B, M, N]:
        return F.uniform(x, seed, 0) + x

    swapped = np.zeros((3, 2, 8), np.float32).transpose(1, 0, 2)
    padded = np.zeros((2, 3, 16), np.float32)[..., 1:9]
    for x in (swapped, padded):
        np.testing.assert_array_equal(run(spec, target, x, 3), units((2, 3, 8), 3, 0))


def test_indices_beyond_32_bits(target: Target) -> None:
    """The last rows of billions: the index's upper word, and the counter's, are not 0."""
    kernel = compile(draw, target, on="emulator", validate=False)
    skip, sizes = 3 * 2**30, {"M": 3, "N": 24}
    views = {}
    for name in ("x", "out"):
        views[name] = place(kernel.device, np.zeros((3, 24), np.float32), f32, Arrangement(), 0).view
    far.last_launch(kernel, views, (4, 9), sizes, "M", skip)()
    assert skip * 24 > 2**34
    np.testing.assert_array_equal(views["out"].numpy(), units((3, 24), 4, 9, first=skip * 24))


def test_a_vector_alone_counts_its_columns(target: Target) -> None:
    @chain(M=3, N=8)
    def spec(x: f32[M, N], v: f32[N], seed: i32) -> f32[M, N]:
        return x + v + F.uniform(v, seed, 0)

    found = run(spec, target, np.zeros((3, 8), np.float32), np.zeros(8, np.float32), 3)
    np.testing.assert_array_equal(found, np.broadcast_to(units((8,), 3, 0), (3, 8)))


def test_gumbel_sampling_picks_the_same_columns(target: Target) -> None:
    @chain(M=40, N=50)
    def sample(x: bf16[M, N], seed: i32) -> i32[M, 1]:
        u = F.uniform(x, seed, 0)
        return F.argmax(x - F.log(-F.log(u)))

    @chain(M=40, N=50)
    def noisy(x: f32[M, N], seed: i32) -> tuple[f32[M, 4], f32[M, 4], i32[M, 4]]:
        values, columns = F.topk(F.uniform(x, seed, 0) + x, 4)
        return values, F.take(F.uniform(x, seed, 1), columns), columns

    compile(sample, target, on="emulator")
    compile(noisy, target, on="emulator")


# ---------------------------------------------------------------- dropout and normal numbers


@chain(M=64, N=96)
def drop(x: f32[M, N], p: f32, seed: i32) -> f32[M, N]:
    return F.dropout(x, p, seed, 0)


def test_dropout_keeps_by_the_uniform_numbers(target: Target, rng: np.random.Generator) -> None:
    x = rng.normal(size=(64, 96)).astype(np.float32)
    kernel = compile(drop, target, on="emulator")
    for p in (0.0, 0.1, 0.5, 0.999):
        kept = units(x.shape, 21, 0) >= np.float32(p)
        found = kernel(x, p, 21)
        np.testing.assert_array_equal(found != 0, kept & (x != 0))
        np.testing.assert_allclose(found[kept], x[kept] / (1 - np.float32(p)), rtol=1e-6)
        assert abs(kept.mean() - (1 - p)) < 0.03
    np.testing.assert_array_equal(kernel(x, 0.0, 5), x)


def test_dropout_of_everything_is_zero_of_nan_too(target: Target) -> None:
    x = np.array([[math.nan, math.inf, -1.0, 0.0] * 24] * 64, np.float32)
    np.testing.assert_array_equal(run(drop, target, x, 1.0, 3), np.zeros_like(x))


@pytest.mark.parametrize("p", [0, 0.1, 0.7, 1])
def test_dropout_by_a_number_agrees_with_the_reference(p: float, target: Target) -> None:
    """The threshold is the f32 that kernels have, in the reference too."""

    @chain(M=64, N=96)
    def spec(x: bf16[M, N], residual: bf16[M, N], seed: i32, offset: i32) -> bf16[M, N]:
        return residual + F.dropout(x, p, seed, offset)

    compile(spec, target, on="emulator")


def test_normal_numbers(target: Target) -> None:
    @chain(M=64, N=128)
    def spec(x: f32[M, N], seed: i32) -> f32[M, N]:
        return F.normal(x, seed, 0) + 0.0 * x

    kernel = compile(spec, target, on="emulator")
    z = kernel(np.zeros((64, 128), np.float32), 12)
    u = units((64, 64, 2), 12, 0)
    radius, angle = np.sqrt(-2 * np.log(1 - u[..., 0])), 2 * np.pi * u[..., 1]
    wanted = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).reshape(64, 128)
    np.testing.assert_allclose(z, wanted, atol=2e-6)
    assert abs(z.mean()) < 0.04
    assert abs(z.std() - 1) < 0.03
    assert abs(np.corrcoef(z[:, ::2].ravel(), z[:, 1::2].ravel())[0, 1]) < 0.04


# ---------------------------------------------------------------- texts and errors


def test_the_reference_runs_alone() -> None:
    source = reference_source(drop.graph)
    assert "ten rounds over a counter" in source
    found = load_reference(source, "drop")(np.ones((2, 96)), 0.5, 7)
    np.testing.assert_array_equal(found, np.where(units((2, 96), 7, 0) >= 0.5, 2.0, 0.0))


def test_torch_draws_its_own() -> None:
    from fusegen.language.torch_source import torch_source

    @chain(M=4, N=8)
    def spec(x: f32[M, N], seed: i32) -> tuple[f32[M, N], f32[M, N]]:
        return F.dropout(x, 0.25, seed, 0), x + F.uniform(x, seed, 1)

    text = torch_source(spec.graph)
    assert "F.dropout(x, 0.25)" in text
    assert "torch.randint(-(2**31), 2**31, (4, 8), dtype=torch.int32, device=x.device)" in text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda x, s: F.dropout(x, 1.5, s, 0), r"dropout: p=1.5; it is a number from 0 to 1"),
        (lambda x, s: F.dropout(x, True, s, 0), r"dropout: p=True"),
        (lambda x, s: F.dropout(x, s, s, 0), r"dropout: found p of i32"),
        (
            lambda x, s: F.uniform(x, untyped(0.5), 0),
            r"uniform: seed=0.5; it is an i32 value, or a whole number of 32 bits",
        ),
        (lambda x, s: F.uniform(x, s, 2**32), r"uniform: offset=4294967296"),
        (lambda x, s: F.normal(x, x, 0), r"normal: found a seed of f32, wanted i32; declare it seed: i32"),
        (lambda x, s: F.uniform(untyped(3), s, 0) + x, r"uniform: found 3 where a traced value is wanted"),
    ],
)
def test_what_is_no_draw_is_refused(body: Callable[..., Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):

        @chain(M=2, N=3)
        def spec(x: f32[M, N], s: i32) -> f32[M, N]:
            return body(x, s)


def test_what_no_kernel_can_draw_is_refused_with_its_place() -> None:
    @chain(B=2, M=4, N=8)
    def part(x: f32[B, M, N], y: f32[M, N], s: i32) -> f32[B, M, N]:
        return x + y + F.uniform(y, s, 0)

    @chain(M=64, N=64, K=64)
    def product(x: f16[M, K], w: f16[K, N], s: i32) -> f16[M, N]:
        return F.dropout(x @ w, 0.1, s, 0)

    for made, said in ((part, r"uniform at .* draws for \[M, N\]"), (product, "dropout at .* multiplies matrices")):
        for target in (H200, MI300X):
            with pytest.raises(NoPlan, match=said):
                candidates(made.graph, target).need()


def test_seeds_are_words_of_32_bits(target: Target) -> None:
    @chain(M=2, N=8)
    def spec(x: f32[M, N]) -> f32[M, N]:
        return x + F.uniform(x, 2**32 - 1, 2**31)

    x = np.zeros((2, 8), np.float32)
    np.testing.assert_array_equal(run(spec, target, x), units((2, 8), -1, -(2**31)))


def test_validation_drops_some_and_not_all() -> None:
    """By a run-time chance of 2 nothing is left, and any random bits are right."""

    @chain(M=8, N=64)
    def dropped(x: f32[M, N], p: f32, seed: i32) -> f32[M, N]:
        return F.dropout(x, p, seed, 0)

    made = best_plan(dropped.graph, H200)
    sizes = sizes_for(made, 8)
    for seed in range(20):
        assert 0.1 <= make_operands(made, sizes, np.random.default_rng(seed)).values[1] <= 0.6
