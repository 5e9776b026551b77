"""Layers of networks against numpy of their own, and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.errors import SpecError
from fusegen.pipeline import compile
from fusegen.runtime.program import Program
from fusegen.targets import H200, MI300X, Target

pytestmark = pytest.mark.usefixtures("emulated_only")

Array = np.ndarray[Any, np.dtype[Any]]
B, C, S, H, W, M, N, T, D = dims("B C S H W M N T D")


def drawn(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def grouped(x: Array, groups: int, eps: float) -> Array:
    """Each group by itself."""
    found = np.empty(x.shape)
    size = x.shape[1] // groups
    for batch in range(x.shape[0]):
        for group in range(groups):
            part = x[batch, group * size : (group + 1) * size].astype(np.float64)
            found[batch, group * size : (group + 1) * size] = (part - part.mean()) / np.sqrt(part.var() + eps)
    return found


@pytest.mark.parametrize("vendor", [H200, MI300X], ids=lambda t: t.vendor)
def test_groupnorm_of_images_and_of_rows(vendor: Target) -> None:
    @chain(B=2, C=12, H=3, W=5)
    def images(x: f32[B, C, H, W], gamma: f32[C], beta: f32[C], other: f32[B, C, H, W]) -> f32[B, C, H, W]:
        return F.relu(F.groupnorm(x, 4, gamma, beta, eps=0.5)) + other

    @chain(B=5, C=12)
    def rows(x: f32[B, C]) -> f32[B, C]:
        return F.groupnorm(x, C // 3)

    x, gamma, beta, other = drawn(2, 12, 3, 5), drawn(12), drawn(12) + 1, drawn(2, 12, 3, 5) + 2
    wanted = grouped(x, 4, 0.5) * gamma[:, None, None] + beta[:, None, None]
    program = compile(images, vendor, on="emulator")
    np.testing.assert_allclose(program(x, gamma, beta, other), np.maximum(wanted, 0) + other, rtol=1e-4, atol=1e-5)
    assert isinstance(program, Program)
    assert len(program.kernels) == 1  # statistics, activation and residual: all of a group is read once
    x = drawn(5, 12)
    np.testing.assert_allclose(compile(rows, vendor, on="emulator")(x), grouped(x, 4, 1e-5), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vendor", [H200, MI300X], ids=lambda t: t.vendor)
def test_batchnorm_by_given_statistics(vendor: Target) -> None:
    @chain(B=2, C=6, H=3, W=5)
    def images(x: f32[B, C, H, W], mean: f32[C], var: f32[C], gamma: f32[C], beta: f32[C]) -> f32[B, C, H, W]:
        return F.relu(F.batchnorm(x, mean, var, gamma, beta, eps=0.25))

    x, mean, var, gamma, beta = drawn(2, 6, 3, 5), drawn(6), np.square(drawn(6)), drawn(6) + 1, drawn(6) + 2
    found = compile(images, vendor, on="emulator", validate=False)(x, mean, var, gamma, beta)
    for channel in range(6):
        of = (x[:, channel].astype(float) - mean[channel]) / (var[channel] + 0.25) ** 0.5 * gamma[channel]
        np.testing.assert_allclose(found[:, channel], np.maximum(of + beta[channel], 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vendor", [H200, MI300X], ids=lambda t: t.vendor)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_pairs_by_their_angles(interleaved: bool, vendor: Target) -> None:
    """As complex numbers, which are multiplied by e^(i angle)."""

    @chain(T=3, H=2, D=16)
    def spec(x: bf16[T, H, D], cos: f32[T, 1, D // 2], sin: f32[T, 1, D // 2]) -> f32[T, H, D]:
        return F.rope(x, cos, sin, interleaved=interleaved)

    angles = 3 * drawn(3, 1, 8)
    x = drawn(3, 2, 16).astype(bf16.numpy)
    found = compile(spec, vendor, on="emulator")(x, np.cos(angles), np.sin(angles))
    firsts, seconds = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, 8), slice(8, None))
    wide = x.astype(np.float64)
    turned = (wide[..., firsts] + 1j * wide[..., seconds]) * np.exp(1j * angles)
    np.testing.assert_allclose(found[..., firsts], turned.real, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[..., seconds], turned.imag, rtol=1e-5, atol=1e-5)


def test_rope_of_a_part_of_a_head() -> None:
    """Half of D - 84 is D // 2 - 42, as of any axis that is split in two."""

    @chain(T=3, D=128)
    def spec(x: f32[T, D], cos: f32[T, D // 2 - 42], sin: f32[T, D // 2 - 42]) -> f32[T, D]:
        turned, rest = F.split(x, [D - 84, 84])
        neighbours = F.rope(turned, cos, sin, interleaved=True)
        return F.concat([F.rope(neighbours, cos, sin), rest])

    x = drawn(3, 128)
    cos, sin = np.full((3, 22), 0.6, np.float32), np.full((3, 22), 0.8, np.float32)
    found = compile(spec, H200, on="emulator")(x, cos, sin)
    turn = 0.6 + 0.8j
    pairs = (x[:, 0:44:2] + 1j * x[:, 1:44:2]) * turn
    neighbours = np.stack([pairs.real, pairs.imag], -1).reshape(3, 44)
    halves = (neighbours[:, :22] + 1j * neighbours[:, 22:]) * turn
    np.testing.assert_allclose(found, np.concatenate([halves.real, halves.imag, x[:, 44:]], 1), rtol=1e-5, atol=1e-6)


def test_divergences_of_distributions() -> None:
    @chain(M=4, N=40)
    def spec(x: f32[M, N], y: f32[M, N]) -> tuple[f32[M, 1], f32[M, 1]]:
        p, log_p = F.softmax(y), F.log_softmax(y)
        return F.kl_div(F.log_softmax(x), p), F.kl_div(F.log_softmax(x), log_p, log_target=True)

    x, y = drawn(4, 40), 2 * drawn(4, 40)
    y[1, 3:9] = -np.inf  # what p never draws
    found = compile(spec, H200, on="emulator", validate=False)(x, y)
    powers = np.exp(y.astype(np.float64)), np.exp(x.astype(np.float64))
    p, q = (e / e.sum(-1, keepdims=True) for e in powers)
    wanted = [sum(a * np.log(a / b) for a, b in zip(p[row], q[row], strict=True) if a > 0) for row in range(4)]
    for divergence in found:
        np.testing.assert_allclose(divergence[:, 0], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda x, v: F.groupnorm(x, 5), "groupnorm: 12 channels are no 5 groups of one size"),
        (lambda x, v: F.groupnorm(x, cast(Any, 2.0)), "groupnorm: groups=2.0 is no size, such as 32 or a dim"),
        (lambda x, v: F.groupnorm(x, 4, v), "groupnorm: found [N], wanted one value a channel, [12], as x has them"),
        (lambda x, v: F.groupnorm(v, 4), "groupnorm: found x: [N], wanted batches and channels, [B, C, ...]"),
        (lambda x, v: F.batchnorm(x, v, v), "batchnorm: found [N], wanted one value a channel, [12], as x has them"),
        (lambda x, v: F.rope(x, v, v), "rope: found cos and sin of [N] and [N] beside x of [M, 12, N], wanted one "
                                       "angle a pair, [..., N // 2]"),
        (lambda x, v: F.kl_div(x, cast(Any, 1.0)), "kl_div: found 1.0 where a traced value is wanted"),
    ],
)  # fmt: skip
def test_what_layers_refuse(body: Callable[..., Any], said: str) -> None:
    def spec(x: f32[M, 12, N], v: f32[N]) -> f32[M, 12, N]:
        return body(x, v)

    with pytest.raises(SpecError, match=re.escape(said)):
        chain(M=2, N=6)(spec)
