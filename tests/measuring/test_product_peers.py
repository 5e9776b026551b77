"""The vendor's library beside a chain with products: what is called, on torch's CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from fusegen import Chain, chain, dims, f16, f32
from fusegen import ops as F
from fusegen.language.products import split
from fusegen.language.types import size_of
from fusegen.measuring.product_peers import product_ways, same_precision
from tests import grouped
from tests.language.test_products import ALL, bias_gelu, norm_swiglu, qkv, turned, with_tf32
from tests.language.test_unfusing import values_for
from tests.torch_reference import tensor

torch: Any = pytest.importorskip("torch", reason="torch is missing: pip install torch")
M, N, K = dims("M N K")


@chain(M=6, N=10, K=7)
def bias_relu_of_product(x: f16[M, K], w: f16[K, N], bias: f16[N]) -> f16[M, N]:
    return F.relu(bias + x @ w)


@chain(M=6, N=10)
def no_product(x: f32[M, N]) -> f32[M, N]:
    return F.relu(x)


def ways(spec: Chain) -> dict[str, Sequence[Callable[[], Any]]]:
    rows = [[tensor(v) for v in values_for(spec.graph, seed).values()] for seed in (0, 1)]
    return dict(product_ways(torch, spec.graph, rows))


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_the_products_alone_are_one_call_for_each_left_factor(spec: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    (runs,) = [runs for name, runs in ways(spec).items() if name.endswith("products alone")]
    assert len(runs) == 2, "one for each set of operands"
    called: list[tuple[int, ...]] = []

    def matmul(x: Any, w: Any, out: Any = None) -> Any:
        called.append(tuple(torch.Size((*x.shape[:-1], w.shape[-1]))))
        return torch.bmm(x, w, out=out) if x.ndim == w.ndim == 3 else torch.mm(x.flatten(0, -2), w)

    monkeypatch.setattr(torch, "matmul", matmul)
    runs[0]()
    assert len(called) == len(split(spec.graph).lefts)
    widths = {p.width: p for p in split(spec.graph).products}
    flops = sum(np.prod(shape) for shape in called)
    wanted = sum(np.prod([size_of(s, spec.graph.sizes) for s in p.node.shape]) for p in split(spec.graph).products)
    assert flops == wanted, widths


def test_grouped_products_are_one_call_each() -> None:
    graph = grouped.gated.at(T=20, N=16, K=24, E=4).graph
    values = values_for(graph) | {"ends": np.array([3, 3, 9, 20], np.int32)}
    ((name, (run,)),) = product_ways(torch, graph, [[tensor(v) for v in values.values()]])
    assert name == "grouped_mm, products alone"
    called: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        own = torch.nn.functional.grouped_mm
        patch.setattr(torch.nn.functional, "grouped_mm", lambda *a, **k: called.append(own(*a, **k)))
        run()
    want = grouped.by_definition(values["x"], values["gate"].swapaxes(1, 2), values["ends"])
    assert len(called) == 2
    assert np.allclose(called[0].float().numpy(), want, rtol=0.02, atol=0.05)


def test_weights_side_by_side_are_those_of_the_chain() -> None:
    values = [tensor(v) for v in values_for(qkv.graph).values()]
    x, wq, wk, wv, _ = values
    made: list[Any] = []
    whole = torch.cat([x @ wq, x @ wk, x @ wv], -1)
    ((_, runs),) = product_ways(torch, qkv.graph, [values])
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        matmul = torch.matmul
        patch.setattr(torch, "matmul", lambda x, w, out=None: made.append(matmul(x, w)))
        runs[0]()
    assert torch.allclose(made[0], whole, atol=1e-2)


@pytest.mark.parametrize(("spec", "act"), [(bias_gelu, "GELU"), (bias_relu_of_product, "ReLU")], ids=["gelu", "relu"])
def test_bias_and_activation_ride_in_the_librarys_epilogue(spec: Chain, act: str) -> None:
    found = ways(spec)
    (name,) = [name for name in found if "Lt, bias and" in name]
    assert name.endswith(act)
    operands = values_for(spec.graph)
    x, w, bias = (np.asarray(v, np.float64) for v in operands.values())
    y = x @ (w.T if spec is bias_gelu else w) + bias
    want = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))) if act == "GELU" else np.maximum(y, 0)
    assert np.allclose(found[name][0]().float().numpy(), want, atol=0.1, rtol=0.05)


def test_what_the_epilogue_does_not_have_is_not_offered() -> None:
    for spec in (norm_swiglu, qkv, turned):
        assert [name for name in ways(spec) if "Lt" in name] == []
    assert ways(no_product) == {}


def test_f32_goes_by_way_of_tf32_where_the_chain_asks_for_it() -> None:
    before = torch.get_float32_matmul_precision()
    with same_precision(torch, with_tf32.graph):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    with same_precision(torch, bias_gelu.graph):
        assert torch.get_float32_matmul_precision() == before
    with pytest.raises(ZeroDivisionError), same_precision(torch, with_tf32.graph):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


def test_a_computed_left_factor_is_noise_of_its_type() -> None:
    x, *others = values_for(norm_swiglu.graph).values()
    ((_, runs),) = product_ways(torch, norm_swiglu.graph, [[tensor(v) for v in (x, *others)]])
    seen: list[Any] = []
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(torch, "matmul", lambda x, w, out=None: seen.append((x, w)))
        runs[0]()
    ((left, right),) = seen
    assert (left.dtype, tuple(left.shape), tuple(right.shape)) == (torch.bfloat16, (6, 7), (7, 20))
