"""Attention through the planner, the template and the emulator: every vendor, every tile, every kind of mask."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import fusegen
from fusegen import Chain, bf16, chain, dims, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import compiler
from fusegen.errors import FusegenError
from fusegen.planner.model import Layout, Source
from fusegen.runtime import Kernel, finding
from fusegen.targets import Target, target
from fusegen.validation import validate
from tests import attentions, specs
from tests.attentions import attention_plans, plan_for

S, T, D = dims("S T D")
CUDA, AMD = "cuda:a100", "hip:gfx90a"


def can_emulate() -> bool:
    try:
        compiler()
    except FusegenError:
        return False
    return True


needs_emulator = pytest.mark.skipif(not can_emulate(), reason="no C++ compiler for the emulator")


def kernel(spec: Chain, on: str | Target, tile: str = "", check: bool = True, **sizes: int) -> Kernel:
    """The first candidate of that tile, in the emulator, in every layout."""

    def variant(layout: Layout) -> tuple[Source, None]:
        return render(plan_for(spec, on, tile, layout, **sizes)), None

    chosen = target(on) if isinstance(on, str) else on
    return Kernel(*variant(Layout()), finding.find(chosen, "emulator", check=check), variant)


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, AMD])
@pytest.mark.parametrize("spec", attentions.ALL, ids=lambda spec: spec.name)
def test_every_chain_is_right_on_every_vendor(spec: Chain, name: str) -> None:
    report = validate(kernel(spec, name), quick=True)
    assert report.ok, str(report)[:2000]


SMALL = {"B": 2, "H": 3, "G": 2, "R": 2, "S": 40, "T": 72, "D": 24, "E": 40}


@needs_emulator
@pytest.mark.parametrize("name", specs.ATTENTION)
def test_the_specs_are_right_at_small_sizes(name: str) -> None:
    spec = specs.ATTENTION[name]
    sizes = {dim: SMALL[dim] for dim in spec.graph.sizes}
    report = validate(kernel(spec.at(**sizes), "cuda:h200"), quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, AMD])
def test_layouts_strides_and_counts_of_rows(name: str) -> None:
    report = validate(kernel(attentions.lse, name))
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, AMD])
def test_every_tile_is_right(name: str) -> None:
    for plan in attention_plans(attentions.window, name, S=140, T=140):
        tile = plan.configuration.removeprefix("attention ")
        report = validate(kernel(attentions.window, name, tile, S=140, T=140), quick=True, cases=("normal",))
        assert report.ok, f"{tile}: {str(report)[:1500]}"


@needs_emulator
def test_the_fast_build_gives_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    plan = plan_for(attentions.document, CUDA)
    shapes = {"q": (1, 2, 40, 16), "k": (1, 2, 150, 16), "v": (1, 2, 150, 16)}
    operands: list[Any] = [rng.standard_normal(shape).astype(bf16.numpy) for shape in shapes.values()]
    operands += [rng.integers(0, 150, (1, 1, 40, 1)).astype(np.int32) for _ in range(2)]
    found = [kernel(attentions.document, CUDA, check=check)(*operands) for check in (True, False)]
    assert plan.meets
    assert (found[0].view(np.uint16) == found[1].view(np.uint16)).all()


@needs_emulator
def test_rows_with_nothing_left_and_nan_that_stays() -> None:
    run = kernel(attentions.lse, CUDA, B=1, H=1, S=70, T=130, D=16, E=16)
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 1, n, 16)).astype(bf16.numpy) for n in (70, 130, 130))
    q[0, 0, 7, 3] = np.nan
    out, sums = run(q, k, v)
    assert np.isnan(out[0, 0, 7].astype(np.float32)).all()
    assert np.isnan(sums[0, 0, 7])
    assert np.isfinite(np.delete(out[0, 0].astype(np.float32), 7, 0)).all()
    empty = kernel(attentions.document, CUDA, B=1, H=1, S=70, T=130, D=16)
    start = np.full((1, 1, 70, 1), 5, np.int32)
    q[0, 0, 7, 3] = 0
    found = empty(q, k, v, start, start)
    assert (found.astype(np.float32) == 0).all()


@needs_emulator
def test_keys_that_no_row_needs_are_not_read() -> None:
    """What lies behind the last key of a block's rows may be anything."""
    run = kernel(attentions.document, CUDA, "64x32", B=1, H=1, S=64, T=320, D=16)
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 1, n, 16)).astype(bf16.numpy) for n in (64, 320, 320))
    start, end = np.full((1, 1, 64, 1), 96, np.int32), np.full((1, 1, 64, 1), 130, np.int32)
    before = run(q, k, v, start, end)
    for beyond in (slice(0, 96), slice(160, 320)):
        k[0, 0, beyond], v[0, 0, beyond] = np.nan, np.nan
    assert (run(q, k, v, start, end).view(np.uint16) == before.view(np.uint16)).all()


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, AMD])
def test_blocks_whose_rows_need_no_key_read_none(name: str) -> None:
    """Rows far behind the last key: the first tile of their windows would lie beyond the keys."""
    run = kernel(attentions.window, name, B=1, G=1, R=1, S=300, T=128, D=16)
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 1, 1, n, 16)).astype(bf16.numpy) for n in (300, 128, 128))
    assert (run(q, k, v)[0, 0, 0, 170:].astype(np.float32) == 0).all()


@needs_emulator
def test_views_of_heads_and_strides_of_0() -> None:
    run = kernel(attentions.window, CUDA, B=2, G=2, R=2, S=40, T=60, D=16)
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((2, 40, 4, 16)).astype(bf16.numpy)  # [B, S, H, D]
    k, v = (rng.standard_normal((2, 60, 2, 1, 16)).astype(bf16.numpy) for _ in range(2))
    q = wide.reshape(2, 40, 2, 2, 16).transpose(0, 2, 3, 1, 4)
    keys, values = (x.transpose(0, 2, 3, 1, 4) for x in (k, v))
    found = run(q, keys, values)
    alike = run(*map(np.ascontiguousarray, (q, keys, values)))
    assert (found.view(np.uint16) == alike.view(np.uint16)).all()


# ---------------------------------------------------------------- random masks, against numpy


@needs_emulator
@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_random_masks_give_what_numpy_does(data: st.DataObject) -> None:
    rows, keys = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 100))
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

    def attention(q, k, v, end):  # type: ignore[no-untyped-def]
        s = q @ k.mT * 0.25
        return F.softmax(F.where(mask(F.row_index(s), F.col_index(s), end), s, -inf)) @ v

    attention.__annotations__ = {
        "q": bf16[S, D], "k": bf16[T, D], "v": bf16[T, D], "end": i32[S, 1], "return": bf16[S, D],
    }  # fmt: skip
    spec = chain(S=rows, T=keys, D=16)(attention)
    run = kernel(spec, CUDA, data.draw(st.sampled_from(("16x64", "64x32", "32x64"))) if keys > 31 else "")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    q, k, v = (rng.standard_normal((n, 16)).astype(bf16.numpy) for n in (rows, keys, keys))
    end = rng.integers(-5, keys + 5, (rows, 1)).astype(np.int32)
    scores = q.astype(np.float64) @ k.astype(np.float64).T * 0.25
    seen = mask(np.arange(rows)[:, None], np.arange(keys)[None, :], end)
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    total = weights.sum(-1, keepdims=True)
    wanted = weights / np.where(total == 0, 1.0, total) @ v.astype(np.float64)
    assert np.abs(run(q, k, v, end).astype(np.float64) - wanted).max() < 3e-2


# ---------------------------------------------------------------- as it is shipped


def test_the_same_text_each_time() -> None:
    first, again = (render(attention_plans(attentions.bias, CUDA)[0]).text for _ in range(2))
    assert first == again


def test_attention_is_one_kernel_and_not_a_program() -> None:
    small = attentions.plain.at(S=64, T=64)
    assert fusegen.plan(small, "cuda:a100").rule == "attention"
