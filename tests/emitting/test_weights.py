"""Weights that are written out, through the planner, the templates and the emulator: every vendor, tile and kind of
mask."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fusegen import Chain, bf16, chain, dims, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError
from fusegen.pipeline import gate
from fusegen.planner.model import Layout, Source
from fusegen.runtime import Kernel, finding
from fusegen.runtime.cache import compiled
from fusegen.targets import target
from fusegen.validation import validate
from tests import specs, written
from tests.emitting.test_attention import needs_emulator
from tests.written import plan_for, weights_plans

S, T, D = dims("S T D")
CUDA, HOPPER, AMD = "cuda:a100", "cuda:h200", "hip:gfx90a"
ON = (CUDA, HOPPER, AMD)


def kernel(spec: Chain, on: str, tile: str = "", check: bool = True, **sizes: int) -> Kernel:
    """The first candidate of that tile, in the emulator, in every layout."""

    def variant(layout: Layout) -> tuple[Source, None]:
        return render(plan_for(spec, on, tile, layout, **sizes)), None

    return Kernel(*variant(Layout()), finding.find(target(on), "emulator", check=check), variant)


@needs_emulator
@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("spec", written.ALL, ids=lambda spec: spec.name)
def test_every_chain_is_right_on_every_vendor(spec: Chain, on: str) -> None:
    report = validate(kernel(spec, on), quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.parametrize("on", ON)
def test_the_spec_is_right_at_small_sizes(on: str) -> None:
    spec = specs.WRITTEN["qk_causal_softmax"].at(B=2, H=3, S=40, T=72, D=24)
    report = validate(kernel(spec, on), quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.parametrize("on", ON)
def test_layouts_strides_and_counts_of_rows(on: str) -> None:
    report = validate(kernel(written.causal, on))
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.parametrize("on", ON)
def test_every_tile_is_right(on: str) -> None:
    """One launch of each, of rows and keys that no tile divides."""
    for plan in weights_plans(written.window, on, S=140, T=328):
        tile = plan.configuration.partition(" ")[2]
        run = kernel(written.window, on, plan.configuration, S=140, T=328)
        report = validate(run, quick=True, cases=("normal",))
        assert report.ok, f"{tile}: {str(report)[:1500]}"


@needs_emulator
@pytest.mark.parametrize("on", ON)
def test_the_fast_build_gives_the_same_bits(on: str) -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 2, n, 24)).astype(bf16.numpy) for n in (70, 136))
    found = [kernel(written.causal, on, check=check)(q, k) for check in (True, False)]
    for one, other in zip(*found, strict=True):
        assert (one.view(np.uint8) == other.view(np.uint8)).all()


@needs_emulator
@pytest.mark.parametrize("on", ON)
def test_rows_of_nan_are_nan_where_no_score_is_made(on: str) -> None:
    """As in numpy: a row with a NaN, and one that sees no key and has no guard, are NaN from end to end; others have
    zeros where the mask leaves nothing."""
    run = kernel(written.unguarded, on, "64x64" if on == HOPPER else "32x", B=1, H=1, S=70, T=264)
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 1, n, 16)).astype(bf16.numpy) for n in (70, 264))
    lowest = np.arange(70, dtype=np.int32)[:, None] * 5
    q[0, 0, 3, 2] = np.nan
    found = run(q, k, lowest)[0, 0].astype(np.float64)
    wanted = softmax(q[0, 0], k[0, 0], np.arange(264)[None, :] >= lowest)
    assert np.isnan(wanted[3]).all()
    assert np.isnan(wanted[60]).all()
    assert (np.isnan(found) == np.isnan(wanted)).all()
    assert np.nanmax(np.abs(found - wanted)) < 1e-2
    assert (found[wanted == 0] == 0).all()


@needs_emulator
@pytest.mark.parametrize("on", ON)
def test_keys_that_no_row_needs_are_not_read(on: str) -> None:
    run = kernel(written.document, on, "64x64" if on == HOPPER else "64x", B=1, H=1, S=64, T=323)
    rng = np.random.default_rng(2)
    q, k = (rng.standard_normal((1, 1, n, 16)).astype(bf16.numpy) for n in (64, 323))
    start, end = np.full((1, 1, 64, 1), 136, np.int32), np.full((1, 1, 64, 1), 190, np.int32)
    before = run(q, k, start, end)
    for beyond in (slice(0, 128), slice(256, 323)):
        k[0, 0, beyond] = np.nan
    assert (run(q, k, start, end).view(np.uint32) == before.view(np.uint32)).all()
    assert (before[..., :136] == 0).all()
    assert (before[..., 190:] == 0).all()


def softmax(q: Any, k: Any, seen: Any) -> Any:
    """In float64, of scores * 0.25; NaN where nothing is seen."""
    scores = np.where(seen, q.astype(np.float64) @ k.astype(np.float64).T * 0.25, -inf)
    with np.errstate(all="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)


# ---------------------------------------------------------------- random masks, against numpy


@needs_emulator
@settings(max_examples=9, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_random_masks_give_what_numpy_does(data: st.DataObject) -> None:
    on = data.draw(st.sampled_from(ON))
    rows, keys = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 150))
    back, ahead = data.draw(st.integers(0, 60)), data.draw(st.integers(-30, 30))
    chunk = data.draw(st.integers(1, 50))
    kind = data.draw(st.sampled_from(("and", "or", "chunk", "not")))

    def mask(row: Any, col: Any, end: Any) -> Any:
        near = (col <= row + ahead) & (col > row - back)
        if kind == "and":
            return near & (col < end)
        if kind == "or":
            return near | (col < end)
        if kind == "chunk":
            return (col // chunk == row // chunk) & (col < end)
        return ~near & (col >= end)

    def weights(q, k, end):  # type: ignore[no-untyped-def]
        s = q @ k.mT * 0.25
        return F.softmax(F.where(mask(F.row_index(s), F.col_index(s), end), s, -inf))

    weights.__annotations__ = {"q": bf16[S, D], "k": bf16[T, D], "end": i32[S, 1], "return": bf16[S, T]}
    run = kernel(chain(S=rows, T=keys, D=16)(weights), on)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    q, k = (rng.standard_normal((n, 16)).astype(bf16.numpy) for n in (rows, keys))
    end = rng.integers(-5, keys + 5, (rows, 1)).astype(np.int32)
    seen = mask(np.arange(rows)[:, None], np.arange(keys)[None, :], end)
    wanted = np.nan_to_num(softmax(q, k, seen))
    found = run(q, k, end).astype(np.float64)
    assert np.abs(found - wanted).max() < 1e-2
    assert (found[~np.broadcast_to(seen, found.shape)] == 0).all()


# ---------------------------------------------------------------- as it is shipped


@pytest.mark.parametrize("on", ["cuda:a100", "cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize("spec", [*specs.WRITTEN.values(), written.bias, written.wide], ids=lambda spec: spec.name)
def test_the_first_candidate_passes_the_gate(spec: Chain, on: str) -> None:
    source = render(weights_plans(spec, on)[0])
    try:
        binary = compiled(source)
    except MissingError as missing:
        pytest.skip(str(missing).splitlines()[0])
    assert binary is not None
    assert not gate(binary.resources)


def test_the_same_text_each_time() -> None:
    for on in ON:
        first, again = (render(weights_plans(written.bias, on)[0]).text for _ in range(2))
        assert first == again
