"""Chains with views, as one kernel's graph and a view for each tensor, run by numpy against the whole chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.language.graph import Graph, Kind
from fusegen.language.reference import reference
from fusegen.language.sizes import Expr, dims_in, size_of
from fusegen.language.spec import Chain
from fusegen.language.views import positions_in
from fusegen.planner import candidates
from fusegen.planner.programs.lowering import lowered
from fusegen.planner.programs.parts import parts_of
from fusegen.planner.programs.steps import Lowered, NotOneStep
from fusegen.targets import H200

B, D, H, K, M, N = dims("B D H K M N")
SIZES = {"B": 2, "D": 8, "H": 4, "K": 5, "M": 3, "N": 6}
Array = np.ndarray[Any, np.dtype[Any]]


def traced(body: Callable[..., Any], out: Any, **operands: Any) -> Chain:
    scope: dict[str, Any] = {"body": body}
    names = ", ".join(operands)
    exec(f"def spec({names}):\n    return body({names})\n", scope)
    spec = scope["spec"]
    spec.__annotations__ = {**operands, "return": out}
    named = {dim.name for type in (*operands.values(), out) for dim in dims_in(getattr(type, "shape", ()))}
    return chain(**{name: size for name, size in SIZES.items() if name in named})(spec)


def run_step(graph: Graph, step: Lowered, arrays: dict[str, Array]) -> list[Array]:
    """The outputs of `graph` by its step: tensors gathered through their views, results scattered through theirs."""
    views = {b.tensor: b for b in step.bounds}
    given = []
    for tensor in step.graph.inputs:
        if not tensor.shape:
            given.append(arrays[tensor.name])
            continue
        bound = views[tensor.name]
        given.append(arrays[bound.base].reshape(-1)[positions_in(bound.view, graph.sizes)])
        assert given[-1].shape == tuple(size_of(s, step.graph.sizes) for s in tensor.shape)
    results = reference(step.graph)(*given)
    whole = {t.name: np.full([size_of(s, graph.sizes) for s in t.shape], np.nan) for t in graph.outputs}
    outputs = step.graph.outputs
    for tensor, result in zip(outputs, results if len(outputs) > 1 else (results,), strict=True):
        bound = views[tensor.name]
        at = positions_in(bound.view, graph.sizes)
        assert result.shape == at.shape
        whole[bound.base].reshape(-1)[at] = result
    return list(whole.values())


def check(made: Chain, seed: int = 0) -> Lowered:
    graph = made.graph
    rng = np.random.default_rng(seed)
    arrays = {t.name: rng.standard_normal([size_of(s, graph.sizes) for s in t.shape]) for t in graph.inputs}
    step = lowered(graph)
    assert not any(n.op.kind in (Kind.VIEW, Kind.JOIN) for n in step.graph.nodes)
    shapes = [*(t.shape for t in (*step.graph.inputs, *step.graph.outputs)), *(n.shape for n in step.graph.nodes)]
    assert not any(isinstance(size, Expr) for shape in shapes for size in shape)
    wanted = reference(graph)(*arrays.values())
    for got, value in zip(run_step(graph, step, arrays), wanted if len(graph.outputs) > 1 else (wanted,), strict=True):
        np.testing.assert_allclose(got, value)
    return step


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    low, high = F.split(x, 2)
    return F.concat([low * cos - high * sin, high * cos + low * sin])


def rotate_pairs(x: Any, cos: Any, sin: Any) -> Any:
    even, odd = x[..., ::2], x[..., 1::2]
    pairs = F.stack([even * cos - odd * sin, odd * cos + even * sin])
    return F.rearrange(pairs, "... d two -> ... (d two)")


def merged_pairs(x: Any, y: Any) -> Any:
    return F.rearrange(F.stack([x, y]), "... d two -> ... (d two)")


def groups_of(size: int, x: Any) -> Any:
    return F.rearrange(x, "m (g c) -> m g c", c=size)


TABLES = {"cos": f32[B, 1, D // 2], "sin": f32[B, 1, D // 2]}
CASES: dict[str, Chain] = {
    "rope": traced(rotate, f32[B, H, D], x=f32[B, H, D], **TABLES),
    "rope by pairs": traced(rotate_pairs, f32[B, H, D], x=f32[B, H, D], **TABLES),
    "rope of merged heads": traced(
        lambda x, cos, sin: F.rearrange(
            rotate(F.rearrange(x, "b (h d) -> b h d", h=H), cos, sin), "b h d -> b (h d)"
        ),
        f32[B, H * D], x=f32[B, H * D], **TABLES,
    ),
    "silu_mul of halves": traced(
        lambda x: F.silu(x[..., :N]) * x[..., N:], f32[M, N], x=f32[M, 2 * N]
    ),
    "row sums": traced(lambda x: F.sum(x), f32[M], x=f32[M, N]),
    "row sums and a vector": traced(lambda x, y: F.sum(x)[..., 0] * 2 + y, f32[M], x=f32[M, N], y=f32[M]),
    "softmax of heads": traced(
        lambda x: F.rearrange(F.softmax(F.rearrange(x, "m (h d) -> m h d", d=D)), "m h d -> h m d"),
        f32[H, M, D], x=f32[M, H * D],
    ),
    "flip": traced(lambda x: F.flip(x) + x, f32[M, N], x=f32[M, N]),
    "transpose": traced(lambda x: F.exp(x.T), f32[N, M], x=f32[M, N]),
    "transposed softmax": traced(lambda x: F.softmax(x).T, f32[N, M], x=f32[M, N]),
    "softmax of columns": traced(lambda x: F.softmax(x.T).T, f32[M, N], x=f32[M, N]),
    "roll": traced(lambda x: F.roll(x, 2) * 2, f32[M, N], x=f32[M, N]),
    "stack": traced(lambda x, y: F.stack([x + y, x - y], axis=0), f32[2, M, N], x=f32[M, N], y=f32[N]),
    "part of a join": traced(lambda x, y: F.concat([x, y])[..., N:] * 2, f32[M, K], x=f32[M, N], y=f32[M, K]),
    "broadcast": traced(lambda x: F.broadcast(x, (B, M, N)), f32[B, M, N], x=f32[M, N]),
    "diagonal mask": traced(
        lambda x: F.where(F.col_index(x) > 2, x, 0.0)[..., 1:] * x[..., :-1], f32[M, N - 1], x=f32[M, N]
    ),
    "columns of a product": traced(
        lambda x, w: (x @ w)[..., :N] * 2, f32[M, N], x=bf16[M, K], w=bf16[K, 2 * N]
    ),
    "gate and up in one weight": traced(
        lambda x, w: F.silu(x @ F.split(w, 2, axis=0)[0].T) * (x @ F.split(w, 2, axis=0)[1].T),
        f32[M, N], x=bf16[M, K], w=bf16[2 * N, K],
    ),
    "product of a product's halves": traced(
        lambda x, w: F.silu((x @ w.T)[..., :N]) * (x @ w.T)[..., N:], f32[M, N], x=bf16[M, K], w=bf16[2 * N, K]
    ),
    "transposed product": traced(lambda x, w: (x @ w).T, f32[N, M], x=bf16[M, K], w=bf16[K, N]),
    "heads of a product": traced(
        lambda x, w: F.rearrange(x @ w, "m (h d) -> h m d", h=H), f32[H, M, D], x=bf16[M, K], w=bf16[K, H * D]
    ),
    "a slice of the left factor": traced(
        lambda x, w: x[:, :K] @ w, f32[M, N], x=bf16[M, 2 * K], w=bf16[K, N]
    ),
    "top-k of a slice": traced(lambda x: F.topk(x[..., 1:], 2)[0], f32[M, 2], x=f32[M, N]),
    "pairs, rotated and scaled": traced(
        lambda x, cos, sin: F.exp(rotate_pairs(x, cos, sin)) * 2 + x, f32[B, H, D], x=f32[B, H, D], **TABLES
    ),
    "heads as rows of a product": traced(
        lambda x, w: F.rearrange(x, "m (h k) -> m h k", h=H) @ w, f32[M, H, N], x=bf16[M, H * K], w=bf16[K, N]
    ),
    "pairs in groups, scaled": traced(
        lambda x, y, s: F.exp(groups_of(4, F.relu(merged_pairs(x, y)) * 2) * s[..., None]),
        f32[M, 3, 4], x=f32[M, 6], y=f32[M, 6], s=f32[M, 3],
    ),
    "pairs in groups, scaled, turned round": traced(
        lambda x, y, s: F.rearrange(groups_of(4, merged_pairs(x, y)) * s[..., None], "m g c -> (g c) m"),
        f32[12, M], x=f32[M, 6], y=f32[M, 6], s=f32[M, 3],
    ),
    "computed, then in another order": traced(
        lambda x, y: F.exp(F.rearrange(x * y, "m (a b) -> m (b a)", a=2)), f32[M, N], x=f32[M, N], y=f32[N]
    ),
    "groups normalized, then an activation": traced(
        lambda x, mean, g: F.relu(F.rearrange((F.rearrange(x, "m (a b) -> m a b", a=2) - mean) * g[..., None],
                                              "m a b -> m (a b)")),
        f32[M, N], x=f32[M, N], mean=f32[M, 2, 1], g=f32[2],
    ),
    "scaled by a scalar": traced(lambda x, s: x[..., ::2] * s, f32[M, N // 2], x=f32[M, N], s=f32),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_step(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_one_step_is_a_graph_as_rules_take_it(name: str) -> None:
    step = lowered(CASES[name].graph)
    for part in list(parts_of(step)) or [step]:
        candidates(part.graph, H200).need()


def test_rope_is_four_views_in_and_two_out() -> None:
    @chain(B=2, H=4, D=8)
    def rope(x: f32[B, H, D], cos: f32[B, 1, D // 2], sin: f32[B, 1, D // 2]) -> f32[B, H, D]:
        low, high = F.split(x, 2)
        return F.concat([low * cos - high * sin, high * cos + low * sin])

    step = check(rope)
    assert [(b.tensor, b.base) for b in step.bounds][:2] == [("low", "x"), ("high", "x")]
    assert len(step.graph.inputs) == 4
    assert len(step.graph.outputs) == 2
    assert step.graph.sizes == {"B": 2, "H": 4, "D_half": 4}
    assert {str(size) for size in step.sizes.values()} == {"B", "H", "D // 2"}


def test_a_chain_without_views_is_its_own_step() -> None:
    step = lowered(traced(lambda x: F.softmax(x), f32[M, N], x=f32[M, N]).graph)
    assert step.plain


@pytest.mark.parametrize(
    ("body", "operands", "out", "said"),
    [
        (lambda x: F.rearrange(x, "m (a b) -> m (b a)", a=2) + F.cast(x, bf16), {"x": f32[M, N]}, f32[M, N],
         "no single step leads"),
        (lambda x: F.concat([x, x * 2])[..., 1:-1], {"x": f32[M, N]}, f32[M, 2 * N - 2], "in several of its parts"),
        (lambda x: F.softmax(F.sum(x).T), {"x": f32[M, N]}, f32[1, M], "lie along the last axis"),
        (lambda x, s: groups_of(3, merged_pairs(x, x * 2)) * s[..., None], {"x": f32[M, 6], "s": f32[M, 4]},
         f32[M, 4, 3], "in several of its parts"),
    ],
)  # fmt: skip
def test_what_needs_memory_between(body: Any, operands: Any, out: Any, said: str) -> None:
    with pytest.raises(NotOneStep, match=said):
        lowered(traced(body, out, **operands).graph)
