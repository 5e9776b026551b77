"""Whole layers as one chain: where they are cut, and that they mean what a layer written out does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Kernel, bf16, chain, dims
from fusegen import ops as F
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.language.reference import reference
from fusegen.language.types import size_of
from fusegen.planner.programs.lowering import lowered
from tests.specs import FEW, SHIPPED

S, H, G, E = dims("S H G E")


@chain(S=128, H=2, G=2, E=64)
def shared_keys(q: bf16[S, H * G, E], k: bf16[S, H, E], v: bf16[S, H, E]) -> bf16[S, H * G * E]:
    """Causal attention whose queries share keys, all as a projection leaves them."""
    queries = F.rearrange(q, "s (h g) e -> h g s e", h=H)
    scores = queries @ F.rearrange(k, "s h e -> h 1 e s") * E**-0.5
    weights = F.softmax(F.where(F.col_index(scores) <= F.row_index(scores), scores, -float("inf")))
    return F.rearrange(F.cast(weights, bf16) @ F.rearrange(v, "s h e -> h 1 s e"), "h g s e -> s (h g e)")


def test_keys_that_heads_share_are_one_operand_without_repetitions() -> None:
    """By a stride of 0 no tensor copy takes them: the kernel would be another one, of a quarter of the rate."""
    step = lowered(shared_keys.graph)
    shapes = {t.name: [size_of(size, step.graph.sizes) for size in t.shape] for t in step.graph.inputs}
    assert sorted(shapes.values()) == [[2, 1, 128, 64], [2, 1, 128, 64], [2, 2, 128, 64]]


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("target", ["cuda:h200", "hip:mi300x"])
def test_such_attention_runs_as_it_was_planned(target: str) -> None:
    try:
        compiler()
    except EmulatorUnavailable as error:
        pytest.skip(f"no emulator: {str(error).splitlines()[0]}")
    program: Any = fusegen.compile(shared_keys, target=target, on="emulator", validate=False)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((128, heads, 64)).astype(bf16.numpy) for heads in (4, 2, 2))
    got = program(q, k, v).astype(np.float64)
    keys, values = (x.astype(np.float64).repeat(2, 1) for x in (k, v))
    scores = np.einsum("she,the->hst", q.astype(np.float64), keys) / 8
    scores[:, ~np.tri(128, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(got, np.einsum("hst,the->she", weights, values).reshape(128, -1), atol=0.02)
    (kernel,) = program.kernels
    assert isinstance(kernel, Kernel)
    assert len(kernel.variants) == 1


@pytest.mark.parametrize("name", ["decoder_layer", "decoder_layer_prefill"])
def test_a_layer_stores_its_hidden_rows_and_not_the_product_before_them(name: str) -> None:
    """What stood in the way was the product; with its residual, as the chain casts it, it is a quarter of the bytes."""
    program: Any = fusegen.plan(SHIPPED[name], "cuda:h200")
    stored = {s.name: s.type for s in program.between}
    assert stored["h"].dtype is bf16
    assert len(program.launches) <= 7
    assert any(len(steps) == 2 for steps in program.launches), "RoPE of queries beside that of keys and the caches"
    rules = [step.plan.rule for step in program.steps]
    assert sum(rule.startswith("attention") for rule in rules) == 1
    if name == "decoder_layer_prefill":
        assert rules.count("wgmma") == 4


def test_prefill_means_what_a_layer_written_out_does() -> None:
    """Its reference, against numpy that knows nothing of fusegen: causal, each query with the keys of its group."""
    spec = SHIPPED["decoder_layer_prefill"].at(**FEW["decoder_layer_prefill"])
    sizes, rng = spec.graph.sizes, np.random.default_rng(0)
    given: dict[str, Any] = {
        t.name: rng.standard_normal([size_of(s, sizes) for s in t.shape]) / 8 + (t.name in ("norm", "norm_2"))
        for t in spec.graph.inputs
    }
    given["slots"] = rng.permutation(sizes["V"])[: sizes["S"]]
    given["slots"][3] = -1
    out, keys, values = reference(spec.graph)(*given.values())
    wanted = written_out({name: array.copy() for name, array in given.items()}, sizes)
    for one, two in zip((out, keys, values), wanted, strict=True):
        np.testing.assert_allclose(one, two, atol=0.02 * np.abs(two).max())


def written_out(w: dict[str, Any], sizes: Any) -> tuple[Any, Any, Any]:
    def norm(x: Any) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def turned(x: Any) -> Any:
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * w["cos"] - high * w["sin"], high * w["cos"] + low * w["sin"]], -1)

    count, width, group = sizes["S"], sizes["E"], sizes["G"]
    normed = norm(w["x"]) * w["norm"]
    q, k, v = ((normed @ w[name].T).reshape(count, -1, width) for name in ("wq", "wk", "wv"))
    q, k = turned(q), turned(k)
    scores = np.einsum("she,the->hst", q, k.repeat(group, 1)) / np.sqrt(width)
    scores[:, ~np.tri(count, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    h = w["x"] + np.einsum("hst,the->she", weights, v.repeat(group, 1)).reshape(count, -1) @ w["wo"].T
    normed = norm(h) * w["norm_2"]
    gate = normed @ w["gate"].T
    kept = w["slots"] >= 0
    w["k_cache"][w["slots"][kept]], w["v_cache"][w["slots"][kept]] = k[kept], v[kept]
    return h + (gate / (1 + np.exp(-gate)) * (normed @ w["up"].T)) @ w["down"].T, w["k_cache"], w["v_cache"]
