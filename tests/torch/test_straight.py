"""Calls of operators that go straight to their kernels: which do, and that all others take torch's dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest

from fusegen import chain, dims, f32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.errors import ArgumentError, FusegenError, RequestError
from fusegen.language.spec import Chain
from fusegen.operators import kernels
from fusegen.planner import plan
from fusegen.planner.model import Layout, Source
from fusegen.runtime import guards, native
from fusegen.runtime.kernel import Kernel
from fusegen.targets import H200
from tests.launching import Launched, LaunchingDevice

torch: Any = pytest.importorskip("torch", reason="torch is missing: pip install torch")
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from fusegen.torch import op, straight  # noqa: E402

M, N = dims("M N")


@chain(M=4, N=64)
def scaled_sum(x: f32[M, N], scale: f32, y: f32[M, N]) -> f32[M, N]:
    """A number between two arrays."""
    return x * scale + y


@chain(M=4, N=64)
def both(x: f32[M, N]) -> tuple[f32[M, N], f32[M, 1]]:
    """Two results."""
    return x + 1.0, F.max(x)


@chain(M=4, N=64)
def scaled_sum_backward(dout: f32[M, N], scale: f32) -> tuple[f32[M, N], f32[M, N]]:
    """What goes back to x and y."""
    return dout * scale, dout * 1.0


@pytest.fixture(autouse=True)
def launching(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are launched from C, which knows all of guards.cpp."""
    try:
        compiler()
        module: Any = native.get()
        module.read_by(*map(guards.address, guards.get()))
    except (EmulatorUnavailable, FusegenError) as error:
        pytest.skip(f"no shortcuts in C++: {str(error).splitlines()[0]}")
    monkeypatch.setattr(native, "module", lambda: module)
    monkeypatch.setattr(guards, "begin", lambda module: None)
    monkeypatch.setattr(kernels, "compiled", made)
    yield
    assert not Launched.failed


def made(spec: Chain, **_: Any) -> Kernel:
    def variants(layout: Layout) -> tuple[Source, None]:
        return render(plan(spec.graph, H200, layout=layout)), None

    return Kernel(variants(Layout())[0], None, LaunchingDevice(H200), variants)


class Operator:
    """An operator, and how many of its calls took the dispatcher."""

    made = 0

    def __init__(self, spec: Chain, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        Operator.made += 1
        self.dispatched = 0
        own = f"straight_{Operator.made}"

        def counting(dispatcher: Any, /, *operands: Any, **named: Any) -> Any:
            self.dispatched += 1
            return dispatched(dispatcher, *operands, **named)

        dispatched = straight.dispatched
        monkeypatch.setattr(straight, "dispatched", counting)
        self.call = op(spec, f"fusegen_test::{own}", **options)
        self.packet = getattr(torch.ops.fusegen_test, own)
        self.fill = getattr(torch.ops.fusegen_test, f"{own}_out").default
        monkeypatch.setattr(straight, "dispatched", dispatched)

    def takes_the_dispatcher(self, call: Callable[[], Any]) -> bool:
        before = self.dispatched
        call()
        return self.dispatched > before


X, Y = torch.randn(4, 64), torch.randn(4, 64)


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> Operator:
    found = Operator(scaled_sum, monkeypatch)
    found.call(X, 2.0, Y)
    return found


def test_a_call_like_an_earlier_one_goes_straight_to_the_kernel(summed: Operator) -> None:
    for x, scale, y in (X, 2.0, Y), (Y, -0.5, X), (X.clone(), 3.0, Y):
        for call in summed.call, summed.packet:
            assert not summed.takes_the_dispatcher(partial(call, x, scale, y))
            torch.testing.assert_close(call(x, scale, y), x * scale + y)


def test_two_results_are_a_tuple_as_from_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Operator(both, monkeypatch)
    first, second = found.call(X), found.call(X)
    assert found.dispatched == 1
    assert type(first) is type(second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.shape, one.stride(), one._version) == (other.dtype, other.shape, other.stride(), 0)


@pytest.mark.parametrize("spec", [scaled_sum, both], ids=["one", "two"])
def test_outputs_that_are_given_are_filled(monkeypatch: pytest.MonkeyPatch, spec: Chain) -> None:
    found = Operator(spec, monkeypatch)
    operands = (X, 2.0, Y) if spec is scaled_sum else (X,)
    expected = found.call(*operands)
    outs = [torch.full_like(e, torch.nan) for e in (expected if spec is both else (expected,))]
    found.fill(*operands, *outs)
    others = [torch.full_like(out, torch.nan) for out in outs]
    assert not found.takes_the_dispatcher(lambda: found.fill(*operands, *others))
    assert found.fill(*operands, *others) is None
    for one, other, wanted in zip(outs, others, expected if spec is both else (expected,), strict=True):
        assert torch.equal(one, wanted)
        assert torch.equal(other, wanted)
    with pytest.raises(ArgumentError, match="on axis 0 has 3"):
        found.fill(*operands, *(out[:3] for out in outs))
    assert found.takes_the_dispatcher(
        lambda: found.fill(*operands, **{f"out_{t.name}": out for t, out in zip(spec.graph.outputs, outs, strict=True)})
    )


def test_other_shapes_types_and_words_take_the_dispatcher_first(summed: Operator) -> None:
    wide = torch.randn(7, 64)
    for operands in (wide, 2.0, wide.clone()), (X, 2.0, torch.randn(64, 4).t().contiguous()):
        torch.testing.assert_close(summed.call(*operands), operands[0] * 2 + operands[2])
    assert summed.takes_the_dispatcher(lambda: summed.call(X, scale=2.0, y=Y))
    with pytest.raises(ArgumentError, match="float64"):
        summed.call(X.double(), 2.0, Y)
    with pytest.raises((RuntimeError, TypeError), match="missing value for argument 'y'"):
        summed.call(X, 2.0)
    with pytest.raises((RuntimeError, TypeError), match="expected at most 3"):
        summed.call(X, 2.0, Y, Y)
    assert not summed.takes_the_dispatcher(lambda: summed.call(X, 2.0, Y))


class Seen(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, operands: Any = (), named: Any = None) -> Any:
        self.names.append(str(function))
        return function(*operands, **(named or {}))


class SeenFunctions(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, operands: Any = (), named: Any = None) -> Any:
        self.names.append(str(function))
        return function(*operands, **(named or {}))


@pytest.mark.parametrize("mode", [Seen, SeenFunctions])
def test_a_mode_sees_every_call(summed: Operator, mode: Any) -> None:
    for call in summed.call, summed.packet:
        with mode() as seen:
            found = call(X, 2.0, Y)
        assert any("straight_" in name for name in seen.names)
        torch.testing.assert_close(found, X * 2 + Y)
    assert not summed.takes_the_dispatcher(lambda: summed.call(X, 2.0, Y))


def test_a_mode_that_was_there_first_still_sees_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Operator(scaled_sum, monkeypatch)
    for mode in Seen, SeenFunctions:
        with mode() as seen:
            for _ in range(20):
                found.call(X, 2.0, Y)
        assert sum("straight_" in name for name in seen.names) >= 20


@pytest.mark.filterwarnings("ignore")  # of older profilers, to do with cycles
def test_a_profiler_sees_every_call(summed: Operator) -> None:
    with torch.profiler.profile() as profile:
        summed.call(X, 2.0, Y)
    assert any("straight_" in event.name for event in profile.events())
    assert not summed.takes_the_dispatcher(lambda: summed.call(X, 2.0, Y))


def watched() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return {
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
        "a default device": lambda: torch.device("cpu"),
    }


@pytest.mark.parametrize("name", watched())
def test_whatever_watches_gets_the_call(summed: Operator, name: str) -> None:
    with watched()[name]():
        assert summed.takes_the_dispatcher(lambda: summed.call(X, 2.0, Y))
    assert not summed.takes_the_dispatcher(lambda: summed.call(X, 2.0, Y))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_without_gradients_there_is_a_way_straight_on(summed: Operator, mode: Any) -> None:
    with mode():
        for _ in range(2):  # of another kind than the first call, the second one that misses
            summed.call(X, 2.0, Y)
        assert not summed.takes_the_dispatcher(lambda: summed.call(X, 2.0, Y))
        assert summed.call(X, 2.0, Y).is_inference() is (mode is torch.inference_mode)


def test_vmap_is_refused_as_before(summed: Operator) -> None:
    with pytest.raises(RequestError, match=r"no rule for torch\.vmap"):
        torch.vmap(lambda x: summed.call(x, 2.0, Y))(torch.stack([X, Y]))


def test_gradients_take_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Operator(scaled_sum, monkeypatch, backward=scaled_sum_backward, gradients=("x", "y"))
    x = X.clone().requires_grad_()
    for _ in range(4):
        x.grad = None
        assert found.takes_the_dispatcher(lambda: found.call(x, 2.0, Y).sum().backward())
        assert torch.equal(x.grad, torch.full_like(x, 2.0))
    with torch.no_grad():
        for _ in range(8):
            found.call(x, 2.0, Y)
        assert not found.takes_the_dispatcher(lambda: found.call(x, 2.0, Y))
    assert found.takes_the_dispatcher(lambda: found.call(x, 2.0, Y))


def test_a_gradient_that_is_wanted_and_not_there_is_refused_behind_a_shortcut_too(summed: Operator) -> None:
    with pytest.raises(ArgumentError, match="requires"):
        summed.call(X.clone().requires_grad_(), 2.0, Y)


def test_subclasses_and_lazy_negation_take_the_dispatcher(summed: Operator) -> None:
    class Own(torch.Tensor):  # type: ignore[misc]
        """A subclass without a method of its own."""

    own = X.as_subclass(Own)
    negated = torch._neg_view(X)
    for _ in range(4):
        assert summed.takes_the_dispatcher(lambda: summed.call(own, 2.0, Y))
        torch.testing.assert_close(summed.call(negated, 2.0, Y), Y - X * 2)


def test_a_misaligned_tensor_is_computed_as_it_lies(summed: Operator) -> None:
    shifted = torch.randn(4 * 64 + 1)[1:].view(4, 64)
    for _ in range(3):
        torch.testing.assert_close(summed.call(shifted, 2.0, Y), shifted * 2 + Y)


def test_any_thread_goes_straight_on(summed: Operator) -> None:
    taken: list[bool] = []
    threads = [
        threading.Thread(target=lambda: taken.append(summed.takes_the_dispatcher(lambda: summed.call(X, 2.0, Y))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
        thread.join()
    assert taken == [False] * 4


def test_what_has_no_shortcut_in_c_keeps_the_dispatcher(summed: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "module", lambda: None)
    found = Operator(scaled_sum, monkeypatch)
    for _ in range(5):
        assert found.takes_the_dispatcher(lambda: found.call(X, 2.0, Y))
        torch.testing.assert_close(found.call(X, 2.0, Y), X * 2 + Y)


def test_a_torch_whose_watchers_are_not_seen_keeps_the_dispatcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards are read in C++ all the same."""
    functions, module = guards.get(), native.module()
    assert guards.sees(functions)
    for lie in (lambda *_: 1), (lambda *_: 0):
        assert not guards.sees(functions._replace(unwatched=lie))
    monkeypatch.setattr(guards, "sees", lambda functions: False)
    with caplog.at_level("DEBUG", logger="fusegen.shortcuts"):
        assert guards.give(module, lambda child: child.communicate())
    assert "take its dispatcher" in caplog.text
    found = Operator(scaled_sum, monkeypatch)
    for _ in range(4):
        assert found.takes_the_dispatcher(lambda: found.call(X, 2.0, Y))


def test_an_operator_without_a_function_to_stand_before_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Packet:
        """Of a torch that calls its operators otherwise."""

        default = object()

    with caplog.at_level("DEBUG", logger="fusegen.shortcuts"):
        straight.straight(Packet(), kernels.Kernels(scaled_sum, {}))
    assert "have no _op" in caplog.text


def test_an_operator_is_the_same_to_torch(summed: Operator) -> None:
    """As a key, in a script, traced, and compiled."""
    assert {summed.call: 1}[summed.packet.default] == 1
    compiled = torch.compile(lambda x, y: summed.call(x, 2.0, y) + 1, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(X, Y), X * 2 + Y + 1)
    torch.library.opcheck(summed.call, (X, 2.0, Y))
