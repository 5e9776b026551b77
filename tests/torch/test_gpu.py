"""Operators of torch on a GPU: straight to the kernel on the current stream, in CUDA graphs and compiled models."""

from __future__ import annotations

from typing import Any

import pytest

from fusegen import chain, dims, f32
from fusegen.runtime import guards, native

torch: Any = pytest.importorskip("torch", reason="torch is missing: pip install torch")
from fusegen.torch import op, straight  # noqa: E402

pytestmark = pytest.mark.gpu

M, N = dims("M N")


@chain(M=64, N=512)
def scaled_sum(x: f32[M, N], scale: f32, y: f32[M, N]) -> f32[M, N]:
    """A number between two arrays."""
    return x * scale + y


@pytest.fixture(scope="module")
def operator() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("this torch sees no GPU")
    if (module := native.module()) is None or not guards.begin(module).result() or not module.sees():
        pytest.skip("no shortcuts in C++ here")
    return op(scaled_sum, "fusegen_test::straight_on_a_gpu")


def tensors() -> tuple[Any, Any]:
    return torch.randn(64, 512, device="cuda"), torch.randn(64, 512, device="cuda")


@pytest.fixture
def settled(operator: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where no call takes torch's dispatcher any more."""
    x, y = tensors()
    for _ in range(4):
        operator(x, 2.0, y)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("this call took torch's dispatcher")

    monkeypatch.setattr(straight.Straight, "learn", refused)
    return operator


def test_it_is_launched_on_the_current_stream(settled: Any) -> None:
    x, y = tensors()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        found = settled(x, 2.0, y)
    side.synchronize()
    torch.testing.assert_close(found, 6 + y)


def test_a_cuda_graph_holds_it(settled: Any) -> None:
    x, y = tensors()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = settled(settled(x, 2.0, y), 0.5, y)
    for value in 1.0, 7.0:
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(found, (value * 2 + y) / 2 + y)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_a_compiled_model_calls_it(operator: Any) -> None:
    x, y = tensors()
    for mode in "default", "reduce-overhead":
        compiled = torch.compile(lambda x, y: operator(x * 2, 0.5, y) + 1, fullgraph=True, mode=mode)
        for _ in range(4):
            torch.testing.assert_close(compiled(x, y).clone(), x + y + 1)
        torch._dynamo.reset()


def test_results_are_torchs_own(settled: Any) -> None:
    x, y = tensors()
    before = torch.cuda.memory_allocated()
    found = settled(x, 2.0, y)
    assert torch.cuda.memory_allocated() - before == found.nbytes
    assert (found.device, found._version, found.is_contiguous()) == (x.device, 0, True)
    del found
    assert torch.cuda.memory_allocated() == before
