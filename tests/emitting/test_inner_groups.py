"""Products for each group of what is summed over, as weights' gradients are: every kind of tile, whatever the ends."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegen
from fusegen import Chain, bf16, chain, dims, f16, f32, i8, i32
from fusegen import ops as F
from fusegen.errors import NoPlan, SpecError
from fusegen.planner.programs.model import ProgramPlan
from fusegen.runtime import Kernel, Program, finding
from fusegen.targets import target
from fusegen.validation import validate
from fusegen.validation.few_parts import no_variant
from tests.gemms import Fits, any_plan, banded, clustered, kernel, streamed, streamed_waves, tiled

pytestmark = pytest.mark.usefixtures("emulated_only")

T, M, N, L, E = dims("T M N L E")
CUDA, AMD = "cuda:a100", "hip:mi300x"
H200 = "cuda:h200"
Array = np.ndarray[Any, np.dtype[Any]]


@chain(T=300, M=72, N=136, E=5)
def weights(x: bf16[T, M], dy: bf16[T, N], ends: i32[E]) -> f32[E, M, N]:
    return F.grouped_matmul(x.mT, dy, ends)


@chain(T=300, M=72, N=136, E=5)
def as_they_lie(x: f16[M, T], dy: f16[N, T], ends: i32[E], old: f32[E, M, N], scale: f32) -> f16[E, M, N]:
    """Factors along what is summed over, where groups begin between vectors; and what is done with the sums."""
    return old + scale * F.grouped_matmul(x, dy.mT, ends)


@chain(T=300, M=72, N=136, L=40, E=5)
def both(x: bf16[T, M], dy: bf16[T, N], dz: bf16[T, L], ends: i32[E]) -> tuple[bf16[E, M, N], bf16[E, M, L]]:
    """Of one left factor, side by side."""
    return F.grouped_matmul(x.mT, dy, ends), F.grouped_matmul(x.mT, dz, ends)


def by_definition(x: Array, y: Array, ends: Array) -> Array:
    """A row is of the first group whose end lies behind it, and adds its own outer product to that group's sum."""
    found = np.zeros((len(ends), x.shape[1], y.shape[1]))
    for row in range(len(x)):
        behind = np.flatnonzero(ends > row)
        if len(behind):
            found[behind[0]] += np.outer(x[row].astype(float), y[row].astype(float))
    return found


KINDS = (
    (H200, tiled, {"M": 300, "N": 320, "T": 600, "E": 3}),
    (H200, streamed, {"M": 40, "N": 96, "T": 3100, "E": 3}),
    (H200, clustered, {"M": 40, "N": 96, "T": 3100, "E": 3}),
    (AMD, banded, {"M": 300, "N": 320, "T": 300, "E": 3}),
    (AMD, streamed_waves, {"M": 9, "N": 96, "T": 3100, "E": 3}),
    (CUDA, any_plan, {"M": 9, "N": 7, "T": 65, "E": 17}),
    (AMD, any_plan, {"M": 1, "N": 2, "T": 1, "E": 1}),
)


@pytest.mark.by_values("spec", "sizes")
@pytest.mark.parametrize(("name", "fits", "sizes"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("spec", [weights, as_they_lie], ids=lambda s: s.name)
def test_every_kind_of_tile(spec: Chain, name: str, fits: Fits, sizes: dict[str, int]) -> None:
    report = validate(kernel(spec, name, fits, **sizes), quick=True)
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("name", [CUDA, AMD])
def test_products_of_two_widths_share_a_launch(name: str) -> None:
    report = validate(kernel(both, name), quick=True)
    assert report.ok, str(report)[:2000]


STREAMED: tuple[str, Fits, dict[str, int]] = (H200, streamed, {"T": 3100, "M": 40, "N": 96})
TILED: tuple[str, Fits, dict[str, int]] = (CUDA, tiled, {})
WAVES: tuple[str, Fits, dict[str, int]] = (AMD, any_plan, {})


@settings(max_examples=25, derandomize=True)
@given(data=st.data(), of=st.sampled_from([STREAMED, TILED, WAVES]))
def test_any_ends(of: tuple[str, Fits, dict[str, int]], data: st.DataObject) -> None:
    """Of any number of rows, by one kernel: empty groups and single rows, ends that descend, and those far beyond."""
    on, fits, sizes = of
    rows = data.draw(st.integers(1, 200))
    near = st.integers(-2, rows + 2)
    ends = data.draw(st.lists(near | st.sampled_from([-(2**31), 2**31 - 1]), min_size=5, max_size=5))
    ends = sorted(ends) if data.draw(st.booleans()) else ends
    made = kernel(weights, on, fits, **sizes)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x, dy = (rng.integers(-2, 3, (rows, width)).astype(bf16.numpy) for width in
             (sizes.get("M", 72), sizes.get("N", 136)))  # fmt: skip
    x[max(0, min(max(ends), rows)) :] = np.nan  # what is of no group is read by none
    assert np.array_equal(made(x, dy, np.array(ends, np.int32)), by_definition(x, dy, np.array(ends, np.int64)))


@pytest.mark.parametrize(("on", "fits"), [(H200, streamed), (CUDA, tiled), (AMD, any_plan)])
def test_a_groups_sum_has_the_same_bits_wherever_it_lies(on: str, fits: Fits) -> None:
    made = kernel(weights, on, fits, **({"T": 3100, "M": 40, "N": 96} if fits is streamed else {}))
    m, n = (40, 96) if fits is streamed else (72, 136)
    rng = np.random.default_rng(4)
    x, dy = (rng.standard_normal((900, width)).astype(bf16.numpy) for width in (m, n))
    among = made(x, dy, np.array([131, 131, 777, 777, 900], np.int32))
    alone = made(x[131:777], dy[131:777], np.array([0, 0, 646, 646, 646], np.int32))
    assert np.array_equal(among[2].view(np.uint32), alone[2].view(np.uint32))


FAULTS = {  # of which target's kernel, and what is wrong in its text
    "groups that begin at 0": (CUDA, r"\+ k_begin \* x_ld", "+ 0 * x_ld"),
    "the right factor of another group": (AMD, r"\+ k_begin \* dy_ld", "+ 0 * dy_ld"),
    "all rows in each group": (CUDA, r"full_k = summed\.end - summed\.begin", "full_k = total_k - k_begin"),
    "ends beyond the rows": (CUDA, r" : ends\[s\] < most \? ends\[s\] : most", " : ends[s]"),
    "ends that descend": (AMD, r"ends\[s\] < found\.end \? found\.end : ", ""),
    "a slice too few": (CUDA, r"full_k \+ tile_k - 1", "full_k"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str) -> None:
    on, pattern, instead = FAULTS[fault]
    right = kernel(weights, on)
    text, count = re.subn(pattern, instead, right.source.text)
    assert count, f"{pattern} is nowhere in the kernel"
    device = finding.find(target(on), "emulator", check=True)
    assert not validate(Kernel(replace(right.source, text=text), None, device, no_variant), quick=True).ok


@chain(T=70, N=64, M=72, E=5)
def layer(
    x: bf16[T, M], up: bf16[E, N, M], down: bf16[E, N, M], ends: i32[E], weight: f32[T, 1]
) -> bf16[T, M]:  # fmt: skip
    """Weights both ways round, an activation between them, and a weight for each row."""
    return F.grouped_matmul(F.relu(F.grouped_matmul(x, up.mT, ends)), down, ends) * weight


def test_gradients_of_grouped_products_are_derived() -> None:
    """Of small whole numbers they are exact: against each row's own outer products."""
    program = fusegen.compile(fusegen.derive(layer), H200, on="emulator")
    assert isinstance(program, Program)
    assert sum(step.plan.regime.endswith("each summed over one of 5 groups") for step in program.plan.steps) == 2
    rng = np.random.default_rng(2)
    x, up, down, dout = (
        rng.integers(-1, 2, shape).astype(bf16.numpy) for shape in ((70, 72), (5, 64, 72), (5, 64, 72), (70, 72))
    )
    weight = rng.integers(0, 2, (70, 1)).astype(np.float32)
    ends = np.array([20, 20, 21, 60, 66], np.int32)
    dx, dup, ddown, dweight = program(x, up, down, ends, weight, dout)
    wide, group = [a.astype(float) for a in (x, up, down, dout)], np.repeat([0, 2, 3, 4], [20, 1, 39, 6])
    rows, w, v, d = wide[0][:66], wide[1][group], wide[2][group], wide[3][:66] * weight[:66]
    z = np.einsum("tm,tnm->tn", rows, w)
    back = np.einsum("tm,tnm->tn", d, v) * (z > 0)
    np.testing.assert_allclose(dx[:66].astype(float), np.einsum("tn,tnm->tm", back, w), rtol=0.01, atol=0.5)
    assert not dx[66:].any()
    np.testing.assert_allclose(dup.astype(float), by_definition(back, rows, ends).astype(bf16.numpy).astype(float))
    h = np.maximum(z, 0)
    np.testing.assert_allclose(ddown.astype(float), by_definition(h, d, ends).astype(bf16.numpy).astype(float))
    y = np.einsum("tn,tnm->tm", h, v)
    np.testing.assert_allclose(dweight[:66], (y * wide[3][:66]).sum(-1, keepdims=True), rtol=1e-5)


@chain(T=70, N=64, M=72, E=5)
def biased(
    x: bf16[T, M], w: bf16[E, 2 * N, M], bias: f32[E, 2 * N], ends: i32[E], weight: f32[T, 1]
) -> bf16[T, N]:  # fmt: skip
    """Gate and up of one array each, as gpt-oss has them."""
    (gate, up), (gate_bias, up_bias) = F.split(w, 2, axis=1), F.split(bias, 2, axis=1)
    left = F.relu(F.grouped_matmul(x, gate.mT, ends, gate_bias))
    return left * F.grouped_matmul(x, up.mT, ends, up_bias) * weight


@pytest.mark.parametrize("name", [H200, AMD])
@pytest.mark.parametrize("ends", [[20, 20, 21, 60, 66], [30, 11, -4, 99, 50]], ids=str)
def test_gradients_of_biases_are_sums_over_groups(ends: list[int], name: str) -> None:
    """Of rows of no group nothing is added, whatever the ends are."""
    program = fusegen.compile(fusegen.derive(biased, of="bias"), name, on="emulator")
    rng = np.random.default_rng(3)
    x, w, dout = (rng.integers(-1, 2, shape).astype(bf16.numpy) for shape in ((70, 72), (5, 128, 72), (70, 64)))
    weight, bias = (rng.integers(0, 3, shape).astype(np.float32) for shape in ((70, 1), (5, 128)))
    found = program(*(a for a in (x, w, bias, np.array(ends, np.int32), weight, dout)))
    ones = np.ones((70, 1))
    grouped = by_definition(ones, np.eye(70), np.array(ends))[:, 0]  # [E, T]
    rows = np.argmax(grouped, 0)
    both = np.einsum("tm,tnm->tn", x.astype(float), w.astype(float)[rows]) + bias[rows]
    left, right = both[:, :64], both[:, 64:]
    d = dout.astype(float) * weight
    back = np.concatenate([d * right * (left > 0), d * np.maximum(left, 0)], 1).astype(bf16.numpy).astype(float)
    np.testing.assert_allclose(found, grouped @ back, rtol=1e-6)


@chain(T=40, N=64, M=64, E=3)
def whole(x: i8[T, M], w: i8[E, N, M], ends: i32[E], bias: bf16[E, N], scale: f32[E, N]) -> f32[T, N]:
    return F.grouped_matmul(x, w.mT, ends, bias, scale)


def test_gradients_of_biases_of_whole_numbers_are_rounded_to_bf16() -> None:
    """By the derived chain's own reference: products of 8 bits have no gradients themselves."""
    made = fusegen.compile(fusegen.derive(whole, of="bias"), H200, on="emulator")
    dout = np.random.default_rng(0).integers(-3, 4, (40, 64)).astype(np.float32)
    ends = np.array([7, 30, 38], np.int32)
    want = [dout[a:b].sum(0) for a, b in ((0, 7), (7, 30), (30, 38))]
    np.testing.assert_array_equal(made(ends, dout).astype(float), want)


@chain(T=64, M=40, N=48, E=4)
def of_counts(x: bf16[T, M], dy: bf16[T, N], counts: i32[E]) -> f32[E, M, N]:
    return F.grouped_matmul(F.silu(x).mT, dy, F.cumsum(counts))


def test_what_is_computed_comes_before() -> None:
    found: Any = fusegen.plan(of_counts, target(H200))
    assert isinstance(found, ProgramPlan)
    assert len(found.launches) <= 3
    made = fusegen.compile(of_counts, H200, on="emulator")
    assert made.report is not None
    assert made.report.ok


def test_what_is_refused() -> None:
    with pytest.raises(SpecError, match=r"found bf16\[M, T\], bf16\[T, N\] and ends \[E\]|no bias"):

        @chain(T=8, M=8, N=8, E=2)
        def biased(x: bf16[T, M], y: bf16[T, N], ends: i32[E], bias: bf16[E, N]) -> f32[E, M, N]:
            return F.grouped_matmul(x.mT, y, ends, bias)

    with pytest.raises(SpecError, match="inner sizes differ"):

        @chain(T=8, M=8, N=8, E=2)
        def inner(x: bf16[T, M], y: bf16[T, N], ends: i32[E]) -> f32[E, T, N]:
            return F.grouped_matmul(x, y, ends)

    with pytest.raises(SpecError, match="grouped_matmul: found factors of f32; wanted f16 or bf16"):

        @chain(T=8, M=8, N=8, E=2)
        def wide(x: f32[T, M], y: f32[T, N], ends: i32[E]) -> f32[E, M, N]:
            return F.grouped_matmul(x.mT, y, ends)

    with pytest.raises(NoPlan, match="sums over rows, so that its results depend on how many there are"):
        fusegen.plan(weights, target(H200), batch_invariant=True)
