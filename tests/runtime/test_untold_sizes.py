"""Sizes that no operand tells: of `(H + 2 * G) * D` those that the chain has, in calls and in validation."""

from __future__ import annotations

import numpy as np
import pytest

import fusegen
from fusegen import Program, bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.errors import ArgumentError
from fusegen.planner.programs.model import untold
from fusegen.validation import validate

B, S, H, G, D, N, M = dims("B S H G D N M")


@chain(B=2, S=40, H=4, G=2, D=32)
def packed(x: bf16[B, S, (H + 2 * G) * D]) -> bf16[B, S, H * D]:
    q, k, v = F.split(x, [H * D, G * D, G * D])
    queries = F.rearrange(q, "b s (g r d) -> b g r s d", g=G, d=D)
    keys, values = (F.rearrange(a, "b s (g d) -> b g 1 s d", g=G) for a in (k, v))
    return F.rearrange(F.softmax(F.causal(queries @ keys.mT * 0.2)) @ values, "b g r s d -> b s (g r d)")


@chain(M=5, N=8, H=3)
def told_by_another(x: f32[M, (H + 2) * N], y: f32[N]) -> f32[M, (H + 2) * N]:
    return x + F.sum(y)


@pytest.mark.usefixtures("emulated_only")
def test_heads_of_one_packed_operand() -> None:
    made = fusegen.compile(packed, "cuda:h200", on="emulator", validate=False)
    assert isinstance(made, Program)
    assert {"H", "G"} <= made.plan.fixed
    assert "B" not in made.plan.fixed
    x = np.ones((3, 40, 8 * 32), bf16.numpy)
    assert np.asarray(made(x)).shape == (3, 40, 4 * 32)
    with pytest.raises(ArgumentError, match=r"x on axis 2 has 320, and 2 \* D \* G \+ D \* H is 256 at D=32, G=2, H=4"):
        made(np.ones((3, 40, 10 * 32), bf16.numpy))
    report = validate(made, quick=True)
    assert report.ok, report


def test_what_is_told() -> None:
    """N by an operand, and so H; of the packed one nothing but what lies along axes of its own."""
    assert untold(told_by_another.graph, frozenset()) == frozenset()
    assert untold(packed.graph, frozenset()) == {"H", "G", "D"}
    assert untold(packed.graph, frozenset({"D", "G"})) == {"D", "G"}
