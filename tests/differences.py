"""Derived gradients beside central differences of the forward chain's reference, both in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fusegen.derivatives import derive
from fusegen.language.graph import CASTS, Graph, Node, Tensor
from fusegen.language.ordering import with_nodes
from fusegen.language.reference import reference
from fusegen.language.spec import Chain
from fusegen.language.types import b8, size_of

STEP = 1e-5
KINK = 1e-3  # differences of two steps that are further apart are taken across one


def smooth(chain: Chain) -> Chain:
    """The chain without roundings, which are steps."""
    made: dict[Node, Node] = {}
    for node in chain.graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        made[node] = inputs[0] if node.op.name in CASTS else replace(node, inputs=inputs) if inputs else node
    return Chain(with_nodes(chain.graph, made))


def drawn(graph: Graph, tensors: tuple[Tensor, ...], rng: np.random.Generator) -> dict[str, Any]:
    """Operands of ordinary size."""
    found: dict[str, Any] = {}
    for tensor in tensors:
        shape = [size_of(size, graph.sizes) for size in tensor.shape]
        if tensor.dtype is b8:
            found[tensor.name] = rng.random(shape) < 0.5
        elif tensor.dtype.kind == "int":
            found[tensor.name] = rng.integers(0, 4, shape)
        else:
            found[tensor.name] = rng.standard_normal(shape) if tensor.shape else float(rng.uniform(0.5, 1.5))
    return found


def called(graph: Graph, values: Mapping[str, Any]) -> dict[str, Any]:
    found = reference(graph)(*(values[t.name] for t in graph.inputs))
    outputs = found if isinstance(found, tuple) else (found,)
    return {t.name: one for t, one in zip(graph.outputs, outputs, strict=True)}


def compare(chain: Chain, seed: int = 0, values: Mapping[str, Any] | None = None, **options: Any) -> int:
    """Along three directions for each operand, the slope of a weighted sum of all outputs. Returns how many were
    compared: where the forward chain has a kink within a step, differences say nothing."""
    derived = smooth(derive(chain, **options))
    graph, rng = smooth(chain).graph, np.random.default_rng(seed)
    given = {**drawn(graph, graph.inputs, rng), **(values or {})}
    forward = called(graph, given)
    weights = {f"d{name}": rng.standard_normal(np.shape(one)) for name, one in forward.items()}
    only = options.get("outputs") or [t.name for t in graph.outputs]
    gradients = called(derived.graph, {**given, **forward, **weights})

    def total(operands: Mapping[str, Any]) -> float:
        made = called(graph, operands)
        names = [t.name for t in graph.outputs if t.dtype.kind == "float" and t.name in only]
        return float(sum((made[name] * weights[f"d{name}"]).sum() for name in names))

    compared = 0
    for name, gradient in gradients.items():
        operand = name[1:]
        assert gradient.shape == given[operand].shape, f"{name} has the shape {gradient.shape}"
        for _ in range(3):
            along = rng.standard_normal(given[operand].shape)
            slopes = [
                (total({**given, operand: given[operand] + step * along})
                 - total({**given, operand: given[operand] - step * along})) / (2 * step)
                for step in (STEP, STEP / 4)
            ]  # fmt: skip
            size = max(1.0, abs(slopes[0]))
            if not np.isfinite(slopes).all() or abs(slopes[0] - slopes[1]) > KINK * size:
                continue
            found = float((gradient * along).sum())
            scale = size + np.abs(gradient * along).sum()
            assert abs(found - slopes[1]) < 1e-5 * scale, f"{chain.name}: {name} gives {found}, wanted {slopes[1]}"
            compared += 1
    return compared
