"""Masks that add huge numbers, as torch.finfo(dtype).min: the first tiles of a row may have no other logits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fusegen import Chain, bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.planner import candidates
from fusegen.planner.attention.parts import ScoresPlan
from fusegen.planner.attention.wide_wgmma_rule import attention_wide_wgmma
from fusegen.planner.model import Layout
from fusegen.planner.rewrites import simplify
from fusegen.runtime import Kernel, finding
from fusegen.targets import H200, target
from tests.emitting.test_attention import needs_emulator
from tests.specs import SHIPPED

H, S, T, D = dims("H S T D")
SCALE = 0.125
HUGE = (-1e4, -5.3e8, -6e8, -1e9, -1e12, -1e30, -2e38, -3.38e38, 1e30)


@chain(H=2, S=64, T=330, D=64)
def added(q: bf16[H, S, D], k: bf16[H, T, D], v: bf16[H, T, D], mask: f32[H, 1, T]) -> bf16[H, S, D]:
    return F.softmax(q @ k.mT * SCALE + mask) @ v


@chain(H=2, S=64, T=330, D=288)
def wide(q: bf16[H, S, D], k: bf16[H, T, D], v: bf16[H, T, D], mask: f32[H, 1, T]) -> bf16[H, S, D]:
    return F.softmax(q @ k.mT * SCALE + mask) @ v


@chain(H=2, S=64, T=330, D=384)
def latent(q: bf16[H, S, D], k: bf16[H, T, D], mask: f32[H, 1, T]) -> bf16[H, S, D]:
    return F.softmax(q @ k.mT * SCALE + mask) @ k


@chain(H=2, S=64, T=336, D=64)
def weights(q: bf16[H, S, D], k: bf16[H, T, D], mask: f32[H, 1, T]) -> bf16[H, S, T]:
    return F.softmax(q @ k.mT * SCALE + mask)


@chain(H=2, S=64, T=330, D=64)
def by_numbers(q: bf16[H, S, D], k: bf16[H, T, D], v: bf16[H, T, D], seen: f32[H, 1, T]) -> bf16[H, S, D]:
    """As older models write it."""
    return F.softmax(q @ k.mT * SCALE + (1.0 - seen) * -1e12) @ v


FACTORS: dict[str, Any] = {  # and what weights meet
    "added": lambda q, k, v: ((q, k, v), v),
    "wide": lambda q, k, v: ((q, k, v), v),
    "latent": lambda q, k, v: ((q, k), k),
    "weights": lambda q, k, v: ((q, k), None),
}


def plans(spec: Chain, on: str) -> list[ScoresPlan]:
    """The first of each rule."""
    found: list[Any] = list(candidates(spec.graph, target(on)).plans)
    if spec is latent and on == "cuda:h200":
        found += attention_wide_wgmma(simplify(spec.graph), H200, Layout())
    assert all(isinstance(plan, ScoresPlan) for plan in found)
    return list({plan.rule: plan for plan in reversed(found)}.values())


def kernel(plan: ScoresPlan) -> Kernel:
    return Kernel(render(plan), None, finding.find(plan.target, "emulator"), lambda layout: (render(plan), None))


def meant(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Logits are of f32, which holds no score beside -1e30; all else is of float64."""
    s = q.astype(np.float32) @ k.astype(np.float32).swapaxes(-1, -2) * np.float32(SCALE) + mask
    e = np.exp(s.astype(float) - s.max(-1, keepdims=True))
    w = e / e.sum(-1, keepdims=True)
    return w if v is None else w @ v.astype(float)


@needs_emulator
@pytest.mark.parametrize("on", ["cuda:h200", "cuda:a100", "hip:mi300x", "hip:rx9070xt"])
@pytest.mark.parametrize("spec", [added, wide, latent, weights], ids=lambda spec: spec.name)
def test_what_a_huge_number_hides_weighs_nothing(spec: Chain, on: str) -> None:
    """All keys of a row's first tiles, or of a whole head, which has logits of one size then. What was summed of the
    hidden first ended in NaN."""
    made = np.random.default_rng(5)
    sizes = spec.graph.sizes
    q, k, v = (made.standard_normal((2, n, sizes["D"])).astype(ml_dtypes.bfloat16) for n in (64, *[sizes["T"]] * 2))
    rules = plans(spec, on)
    assert all(plan.extreme for plan in rules)
    for plan in rules:
        run = kernel(plan)
        for huge in HUGE:
            mask = np.zeros((2, 1, sizes["T"]), np.float32)
            mask[:, :, :300] = huge
            mask[:, :, 200:220] = huge / 2
            mask[1, :, 64:] = huge
            factors, values = FACTORS[spec.name](q, k, v)
            np.testing.assert_allclose(
                np.asarray(run(*factors, mask)).astype(float), meant(q, k, values, mask), rtol=0.02, atol=0.02,
                err_msg=f"{plan.configuration} {huge}",
            )  # fmt: skip


def test_which_logits_may_be_huge() -> None:
    """An operand along the keys says so, or a number; slopes, soft caps and masks of conditions do not."""
    assert all(plan.extreme for plan in plans(by_numbers, "cuda:h200"))
    for name in ("attention", "causal_attention", "alibi_attention", "softcap_attention", "document_attention"):
        assert not any(plan.extreme for plan in plans(SHIPPED[name], "cuda:h200"))
