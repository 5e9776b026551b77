"""Tokens for a mixture's router, and what numpy makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusegen import bf16


def tokens(count: int, numbers: int = 512, experts: int = 24) -> list[Any]:
    """Tokens [count, numbers] and a router [experts, numbers], drawn by the count."""
    rng = np.random.default_rng(count)
    return [rng.standard_normal(shape).astype(bf16.numpy) for shape in ((count, numbers), (experts, numbers))]


def judge(given: Sequence[Any], found: Sequence[Any]) -> None:
    """Weights, order, ends and places of `moe_routing`, held to numpy: whose slots are whose, and by what weights."""
    weights, order, ends, places = (np.asarray(a) for a in found)
    x, router = (a.astype(np.float64) for a in given)
    logits = x @ router.T
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :4]
    best = np.take_along_axis(logits, chosen, 1)
    law = np.exp(best - best.max(1, keepdims=True))
    np.testing.assert_allclose(weights, law / law.sum(1, keepdims=True), rtol=1e-4, atol=1e-6)
    slots = np.argsort(chosen.reshape(-1), kind="stable")
    np.testing.assert_array_equal(order, slots)
    np.testing.assert_array_equal(ends, np.cumsum(np.bincount(chosen.reshape(-1), minlength=len(router))))
    np.testing.assert_array_equal(places.reshape(-1)[slots], np.arange(chosen.size))
