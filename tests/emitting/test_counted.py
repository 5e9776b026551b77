"""Numbers of rows and columns as f32 in attention: converted once a tile where they are exact, else once a score."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fusegen import Chain, bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.language.trace import Value
from fusegen.planner.model import Layout, Source
from fusegen.runtime import Kernel, finding
from fusegen.targets import target
from fusegen.validation import validate
from tests import attentions
from tests.attentions import attention_plans
from tests.emitting.test_attention import needs_emulator

S, T, D = dims("S T D")
TARGETS = ["cuda:a100", "cuda:h200", "hip:gfx90a", "hip:gfx1100"]


@chain(S=40, T=64, D=16)
def behind(q: bf16[S, D], k: bf16[T, D], v: bf16[T, T], place: i32[S, 1], base: f32[S, 1]) -> bf16[S, T]:
    """Scores of queries of zeros are 0, and values that are an identity show the weights."""
    s = q @ k.mT
    return (s + (F.cast(place - F.col_index(s), f32) - base)) @ v


@chain(S=40, T=64, D=16)
def ahead(q: bf16[S, D], k: bf16[T, D], v: bf16[T, T], place: i32[S, 1], base: f32[S, 1]) -> bf16[S, T]:
    s = q @ k.mT
    return (s + (F.cast(F.col_index(s) + place, f32) - base)) @ v


def kernels(spec: Chain, name: str, **sizes: int) -> list[Kernel]:
    """Every candidate of another tile, in the emulator, in every layout."""
    found: dict[str, Kernel] = {}
    for plan in attention_plans(spec, name, Layout(), **sizes):

        def variant(layout: Layout, configuration: str = plan.configuration) -> tuple[Source, None]:
            plans = attention_plans(spec, name, layout, **sizes)
            return render(next((p for p in plans if p.configuration == configuration), plans[0])), None

        if plan.configuration not in found:
            device = finding.find(target(name), "emulator", check=True)
            found[plan.configuration] = Kernel(*variant(Layout()), device, variant)
    return list(found.values())


@needs_emulator
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("spec", "sign"), [(behind, -1), (ahead, 1)], ids=["behind", "ahead"])
def test_numbers_around_the_last_exact_one(spec: Chain, sign: int, name: str) -> None:
    """Whole numbers beyond 2^24 are rounded once, from what they are, also where those of other columns are exact."""
    near = np.arange(-20, 20) * 3 + 1
    for start in (0, 2**24, 64 - 2**24, 2**30 + 1):
        place = (start + near).astype(np.int32)[:, None]
        exact = place.astype(np.int64) + sign * np.arange(64)
        base = np.full((40, 1), start, np.float32)
        wanted = (exact.astype(np.float32) - base).astype(bf16.numpy)
        zeros = np.zeros((40, 16), bf16.numpy), np.zeros((64, 16), bf16.numpy)
        for run in kernels(spec, name):
            out = np.asarray(run(*zeros, np.eye(64).astype(bf16.numpy), place, base))
            assert (out == wanted).all(), f"{run.plan.configuration} from {start} on"


@needs_emulator
@pytest.mark.parametrize("name", TARGETS)
def test_every_tile_is_right(name: str) -> None:
    for run in kernels(attentions.alibi, name, B=1, H=1, S=70, T=200):
        assert run.plan.free.counted  # type: ignore[attr-defined]
        report = validate(run, quick=True, cases=("normal",))
        assert report.ok, f"{run.plan.configuration}: {str(report)[:1500]}"


@chain(S=40, T=64, D=16)
def capped(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D], cap: f32, slope: f32) -> bf16[S, D]:
    s = F.tanh(q @ k.mT / cap) * cap
    return F.softmax(s - slope * F.cast(F.row_index(s) - F.col_index(s), f32)) @ v


@needs_emulator
def test_lanes_that_vote_take_one_body() -> None:
    """Soft caps ask all lanes of a warp, which must not have parted before."""
    for run in kernels(capped, "cuda:h200", S=70, T=200):
        text = run.source.text
        assert ("exact = __all_sync(" in text) is bool(getattr(run.plan, "tangent", ""))
        report = validate(run, quick=True, cases=("normal",))
        assert report.ok, f"{run.plan.configuration}: {str(report)[:1500]}"


def test_what_is_counted_and_what_is_not() -> None:
    """Sums and differences of columns, once, and of whole numbers of rows."""

    def steps(make: Callable[..., Value]) -> list[int]:
        @chain(S=40, T=64, D=16)
        def counting(
            q: bf16[S, D], k: bf16[T, D], v: bf16[T, D], place: i32[S, 1], other: i32[S, T],
        ) -> bf16[S, D]:  # fmt: skip
            s = q @ k.mT * F.cast(place, f32) + F.cast(other, f32)
            return (s * F.cast(make(F.row_index(s), F.col_index(s), place, other), f32)) @ v

        return [c.step for c in attention_plans(counting, "cuda:a100")[0].free.counted]

    assert steps(lambda row, col, place, other: row - col) == [-1]
    assert steps(lambda row, col, place, other: col - place * 3 + row) == [1]
    assert steps(lambda row, col, place, other: -(col + 7)) == [-1]
    assert steps(lambda row, col, place, other: col + col) == []
    assert steps(lambda row, col, place, other: col * place) == []
    assert steps(lambda row, col, place, other: col + other) == []
    assert steps(lambda row, col, place, other: abs(row - col)) == []
