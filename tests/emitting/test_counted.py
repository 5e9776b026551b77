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
from fusegen.targets.atoms import Atom
from fusegen.validation import validate
from tests import attentions, free_attentions
from tests.attentions import attention_plans
from tests.emitting.test_attention import needs_emulator

B, H, S, T, D = dims("B H S T D")
TARGETS = ["cuda:a100", "cuda:h200", "hip:gfx90a", "hip:gfx1100"]
SHARING = TARGETS[:2]  # where a thread has two rows, as far apart as columns of its own


@chain(S=40, T=64, D=16)
def behind(q: bf16[S, D], k: bf16[T, D], v: bf16[T, T], place: i32[S, 1], base: f32[S, 1]) -> bf16[S, T]:
    """Scores of queries of zeros are 0, and values that are an identity show the weights."""
    s = q @ k.mT
    return (s + (F.cast(place - F.col_index(s), f32) - base)) @ v


@chain(S=40, T=64, D=16)
def ahead(q: bf16[S, D], k: bf16[T, D], v: bf16[T, T], place: i32[S, 1], base: f32[S, 1]) -> bf16[S, T]:
    s = q @ k.mT
    return (s + (F.cast(F.col_index(s) + place, f32) - base)) @ v


@chain(S=40, T=64, D=16)
def down(q: bf16[S, D], k: bf16[T, D], v: bf16[T, T], start: i32[1, 1], base: f32[1, 1]) -> bf16[S, T]:
    """Of a diagonal one number, whatever the head adds to it."""
    s = q @ k.mT
    return (s + (F.cast(F.row_index(s) + start - F.col_index(s), f32) - base)) @ v


@chain(S=40, T=64, D=16)
def up(q: bf16[S, D], k: bf16[T, D], v: bf16[T, T], start: i32[1, 1], base: f32[1, 1]) -> bf16[S, T]:
    s = q @ k.mT
    return (s + (F.cast(F.col_index(s) - (F.row_index(s) - start), f32) - base)) @ v


@chain(B=1, H=2, S=70, T=200, D=16)
def biased_and_dropped(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], slope: f32[H, 1, 1], rate: f32[H, 1, 1],
    p: f32, seed: i32[1],
) -> bf16[B, H, S, D]:  # fmt: skip
    """Two numbers of a score: one that lies along diagonals, and one that moves the other way as well."""
    s = q @ k.mT * 0.25
    row, col = F.row_index(s), F.col_index(s)
    s = s - slope * F.cast(row - col, f32) + rate * F.cast(row + col, f32)
    return F.dropout(F.softmax(F.causal(s, 130)), p, seed, 1) @ v


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
@pytest.mark.parametrize(("spec", "sign"), [(down, 1), (up, -1)], ids=["down", "up"])
def test_numbers_of_diagonals_around_the_last_exact_one(spec: Chain, sign: int, name: str) -> None:
    away = np.arange(40)[:, None] - np.arange(64)
    for start in (0, 30 - 2**24, 2**24 - 70, 2**24, 2**30 + 1):
        exact = sign * away + start
        base = np.full((1, 1), start, np.float32)
        wanted = (exact.astype(np.float32) - base).astype(bf16.numpy)
        zeros = np.zeros((40, 16), bf16.numpy), np.zeros((64, 16), bf16.numpy)
        for run in kernels(spec, name):
            assert [c.diagonal for c in run.plan.free.counted] == [name in SHARING]  # type: ignore[attr-defined]
            out = np.asarray(run(*zeros, np.eye(64).astype(bf16.numpy), np.full((1, 1), start, np.int32), base))
            assert (out == wanted).all(), f"{run.plan.configuration} from {start} on"


@needs_emulator
@pytest.mark.parametrize("name", SHARING)
def test_rows_that_share_diagonals_have_the_bits_of_those_that_do_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows and keys that fill no tile."""
    rng = np.random.default_rng(5)

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(bf16.numpy)

    slopes = np.array([[[0.25]], [[0.01]]], np.float32)
    query, keys = drawn(1, 2, 70, 16), (drawn(1, 2, 200, 16), drawn(1, 2, 200, 16))
    chance = np.float32(0.25), np.array([3], np.int32)
    sizes = {"B": 1, "H": 2, "S": 70, "T": 200}
    calls: list[tuple[Chain, tuple[object, ...], dict[str, int], list[bool]]] = [
        (attentions.alibi, (query, *keys, slopes), sizes, [True]),
        (biased_and_dropped, (query, *keys, slopes, slopes / 2, *chance), sizes, [True, False]),
        (
            free_attentions.retained,
            (*(drawn(1, 2, 210, 16) for _ in range(3)), slopes),
            {"B": 1, "H": 2, "S": 210, "D": 16, "E": 16},
            [True],
        ),
    ]
    for spec, args, sizes, diagonal in calls:
        sharing = kernels(spec, name, **sizes)
        with monkeypatch.context() as patch:  # each row has numbers of its own
            patch.setattr(Atom, "shares_diagonals", property(lambda atom: False))
            apart = kernels(spec, name, **sizes)
        for run, other in zip(sharing, apart, strict=True):
            for plan, shares in ((run.plan, diagonal), (other.plan, [False] * len(diagonal))):
                assert [c.diagonal for c in plan.free.counted] == shares  # type: ignore[attr-defined]
                assert len(plan.tested.counted) == sum(shares)  # type: ignore[attr-defined]
            bits, wanted = (np.asarray(each(*args)).view(np.uint16) for each in (run, other))
            assert (bits == wanted).all(), f"{spec.name}: {run.plan.configuration}"


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
    """Sums and differences of columns, once, and of whole numbers of rows. Of rows and columns that move apart, and of
    nothing else that rows have of their own, diagonals have one number."""

    def steps(make: Callable[..., Value]) -> list[tuple[int, str]]:
        @chain(S=40, T=64, D=16)
        def counting(
            q: bf16[S, D], k: bf16[T, D], v: bf16[T, D], place: i32[S, 1], other: i32[S, T], start: i32[1, 1],
        ) -> bf16[S, D]:  # fmt: skip
            s = q @ k.mT * F.cast(place, f32) + F.cast(other, f32) * F.cast(start, f32)
            return (s * F.cast(make(F.row_index(s), F.col_index(s), place, other, start), f32)) @ v

        found = attention_plans(counting, "cuda:a100")[0].free.counted
        assert not any(c.diagonal for c in attention_plans(counting, "hip:gfx90a")[0].free.counted)
        return [(c.step, "diagonal" if c.diagonal else "row by row") for c in found]

    assert steps(lambda row, col, place, other, start: row - col) == [(-1, "diagonal")]
    assert steps(lambda row, col, place, other, start: col - row) == [(1, "diagonal")]
    assert steps(lambda row, col, place, other, start: (row + start * 3) - (col - 7)) == [(-1, "diagonal")]
    assert steps(lambda row, col, place, other, start: (col - start // 2) - row) == [(1, "diagonal")]
    assert steps(lambda row, col, place, other, start: -(row - col)) == [(1, "diagonal")]
    assert steps(lambda row, col, place, other, start: row + col) == [(1, "row by row")]
    assert steps(lambda row, col, place, other, start: col - place * 3 + row) == [(1, "row by row")]
    assert steps(lambda row, col, place, other, start: row - col + place) == [(-1, "row by row")]
    assert steps(lambda row, col, place, other, start: row * 2 - col - row) == [(-1, "row by row")]
    assert steps(lambda row, col, place, other, start: row // 2 - col) == [(-1, "row by row")]
    assert steps(lambda row, col, place, other, start: -(col + 7)) == [(-1, "row by row")]
    assert steps(lambda row, col, place, other, start: col + col) == []
    assert steps(lambda row, col, place, other, start: col * place) == []
    assert steps(lambda row, col, place, other, start: col + other) == []
    assert steps(lambda row, col, place, other, start: abs(row - col)) == []
