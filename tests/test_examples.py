"""The examples run, in a tiny shape, and compute what they say."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusegen.emulator import EmulatorUnavailable, compiler

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


def test_llama_has_the_logits_of_the_model_written_out() -> None:
    """Two sequences of three tokens through two layers, against float64 numpy that knows nothing of fusegen."""
    llama = import_module("llama")
    model = llama.Model(llama.SIZES["tiny"], 2, "emulator", "cuda:h200")
    assert len(model.layer.kernels) <= 8
    rows: list[list[Any]] = [[] for _ in model.layers]
    tokens = np.zeros(2, np.int64)
    for position, (logits, found) in enumerate(llama.decode(model, 3, model.step)):
        wanted = written_out(model, tokens, position, rows)
        np.testing.assert_allclose(logits, wanted, atol=0.03 * np.abs(wanted).max())
        tokens = np.asarray(found)[:, 0].astype(np.int64)
        np.testing.assert_array_equal(tokens, np.asarray(logits).argmax(-1))


def test_a_prompt_that_is_read_at_once_leaves_what_reading_it_token_by_token_does() -> None:
    """The same caches and the same logits, up to what bf16 rounds. The layer's kernels take some 6 s of g++."""
    llama = import_module("llama")
    count, size = 8, llama.SIZES["tiny"]
    model = llama.Model(size, 2, "emulator", "cuda:h200")
    tokens = np.random.default_rng(1).integers(0, size.vocabulary, (2, count))
    for position in range(count):
        model.at(position)
        model.arrays.put(model.tokens, tokens[:, position : position + 1])
        wanted, _ = model.step()
    caches = [(wide(w["k_cache"]), wide(w["v_cache"])) for w in model.layers]
    for w in model.layers:
        w["k_cache"][...], w["v_cache"][...] = 0, 0
    logits, _ = llama.Prompt(model, count, "emulator", "cuda:h200").read(tokens)
    np.testing.assert_allclose(logits, wanted, atol=0.03 * np.abs(wanted).max())
    for w, pair in zip(model.layers, caches, strict=True):
        for name, kept in zip(("k_cache", "v_cache"), pair, strict=True):
            np.testing.assert_allclose(wide(w[name]), kept, atol=0.03 * np.abs(kept).max())


def written_out(model: Any, tokens: Any, position: int, rows: list[list[Any]]) -> Any:
    size, count = model.size, model.batch
    x = wide(model.embedding)[tokens]
    for w, seen in zip(model.layers, rows, strict=True):
        w = {name: wide(array) for name, array in w.items()}
        normed = norm(x) * w["norm"]
        q, k, v = (normed @ w[name].T for name in ("wq", "wk", "wv"))
        q = turned(q.reshape(count, -1, size.head), position)
        seen.append((turned(k.reshape(count, -1, size.head), position), v.reshape(count, -1, size.head)))
        keys, values = (np.stack([one[side] for one in seen], 1).repeat(size.group, 2) for side in (0, 1))
        scores = np.einsum("bhe,bthe->bht", q, keys) / np.sqrt(size.head)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        h = x + np.einsum("bht,bthe->bhe", weights, values).reshape(count, -1) @ w["wo"].T
        normed = norm(h) * w["norm_2"]
        gate = normed @ w["gate"].T
        x = h + (gate / (1 + np.exp(-gate)) * (normed @ w["up"].T)) @ w["down"].T
    return norm(x) * wide(model.norm) @ wide(model.out).T


def wide(array: Any) -> Any:
    return np.asarray(array).astype(np.float64)


def norm(x: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def turned(x: Any, position: int) -> Any:
    half = x.shape[-1] // 2
    angles = position * 500_000.0 ** (-np.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def test_a_model_of_fusegens_operators_trains_as_torchs_own() -> None:
    """The same losses as with torch's functions, step by step, and they fall."""
    pytest.importorskip("torch", reason="torch is missing: pip install torch")
    train = import_module("train")
    steps = 4
    plain, own = (train.losses(ops, steps, 16, "cpu") for ops in (train.PLAIN, train.fused()))
    np.testing.assert_allclose(own, plain, rtol=1e-4)
    assert own[-1] < own[0]
