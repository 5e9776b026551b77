"""Shortcuts, in Python and in C: what they take, that everything else goes to the checked path, and their text."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest

from fusegen import chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.errors import ArgumentError, FusegenError
from fusegen.language.spec import Chain
from fusegen.planner import plan
from fusegen.planner.model import Layout, Source
from fusegen.runtime import guards, native, shortcuts
from fusegen.runtime.kernel import Kernel
from fusegen.targets import H200
from tests.launching import Launched, LaunchingDevice

torch = pytest.importorskip("torch", reason="torch is missing: pip install torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

M, N = dims("M N")


@chain(M=4, N=64)
def add(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
    """Two arrays."""
    return x + y


@chain(M=4, N=64)
def affine(x: f32[M, N], scale: f32, row: f32[M, 1], shift: i32) -> tuple[f32[M, N], f32[M, 1]]:
    """Two outputs, numbers among the operands."""
    y = x * scale + row
    return y + F.cast(shift, f32), F.max(y)


@chain(M=4, N=64)
def halved(x: f16[M, N]) -> f16[M, N]:
    """Another dtype."""
    return x * 0.5


@chain(M=4, N=64)
def awkward(
    like: f32[M, N], like_at: f32[M, N], stream: f32[M, N], launch: f32[M, N], type: f32[M, N]
) -> f32[M, N]:  # fmt: skip
    """Operands that are called what a shortcut calls its own."""
    empty = like + like_at
    return empty + stream * launch - type


@chain(M=4, N=64)
def pythonic(len: f32[M, N], type: f32[M, N]) -> tuple[f32[M, N], f32[M, 1]]:
    """Operands and outputs that are called what Python calls its own."""
    tuple = len + type
    ValueError = F.max(tuple)
    return tuple, ValueError


@pytest.fixture(scope="module")
def reading(module: Any) -> Any:
    """One that has torch's tensors read by C++."""
    try:
        functions = guards.get()
    except FusegenError as error:
        pytest.skip(f"no C++ for torch's tensors: {str(error).splitlines()[0]}")
    found: Any = native.get()
    found.read_by(*map(guards.address, functions))
    return found


@pytest.fixture(params=["Python", "C", "C++"], autouse=True)
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What the shortcuts of a test are in."""
    name = {"C": "module", "C++": "reading"}.get(request.param)
    found = request.getfixturevalue(name) if name else None
    monkeypatch.setattr(native, "module", lambda: found)
    monkeypatch.setattr(guards, "begin", lambda module: None)
    yield request.param
    assert not Launched.failed


class Counted(Kernel):
    """A kernel that counts the calls which no shortcut took."""

    checked = 0

    def call(self, /, *operands: Any, out: Any = None, stream: object = None, **named: Any) -> Any:
        self.checked += 1
        return super().call(*operands, out=out, stream=stream, **named)


def made(spec: Chain) -> Counted:
    def variants(layout: Layout) -> tuple[Source, None]:
        return render(plan(spec.graph, H200, layout=layout)), None

    return Counted(variants(Layout())[0], None, LaunchingDevice(H200), variants)


def numbers(*shape: int, seed: int = 0) -> Any:
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(seed)).float()


X, Y = numbers(4, 64), numbers(4, 64, seed=1)


def settled(spec: Chain, *operands: Any, out: Any = None) -> Counted:
    """A kernel that has a shortcut for such calls."""
    kernel = made(spec)
    for _ in range(2):
        kernel(*operands, out=out)
    assert kernel.checked == 2
    kernel(*operands, out=out)
    assert kernel.checked == 2
    assert isinstance(kernel.shortcuts.first, FunctionType) is (native.module() is None)
    return kernel


def offset(tensor: Any, elements: int) -> Any:
    """A copy that begins so many elements behind an aligned address."""
    memory = torch.empty(tensor.numel() + 64, dtype=tensor.dtype)
    start = -(memory.data_ptr() // memory.element_size()) % 16 + elements
    found = memory[start : start + tensor.numel()].view(tensor.shape)
    found.copy_(tensor)
    return found


def wide(*shape: int, extra: int = 36) -> Any:
    """Rows that lie `extra` elements apart."""
    memory = torch.zeros(*shape[:-1], shape[-1] + extra)
    return memory[..., : shape[-1]].copy_(numbers(*shape))


# ---------------------------------------------------------------- what a shortcut takes


def test_a_call_that_comes_back_takes_the_shortcut() -> None:
    x, y = numbers(4, 64), numbers(4, 64, seed=1)
    kernel = settled(add, x, y)
    for seed in range(3):
        a, b = numbers(4, 64, seed=seed), numbers(4, 64, seed=seed + 7)
        found = kernel(a, b)
        assert type(found) is torch.Tensor
        assert torch.equal(found, a + b)
        assert found.is_contiguous()
    assert kernel.checked == 2


def test_calls_with_and_without_out_take_turns() -> None:
    """Each kind has a shortcut of its own, which hands the other kind on."""
    kernel, out = made(add), torch.empty(4, 64)
    for turn in range(6):
        assert torch.equal(kernel(X, Y), X + Y)
        out.fill_(turn)
        assert kernel(Y, X, out=out) is out
        assert torch.equal(out, X + Y)
    before = kernel.checked
    kernel(X, Y)
    kernel(Y, X, out=out)
    assert (kernel.checked, len(kernel.shortcuts.made)) == (before, 2)


def test_a_kernel_in_a_class_is_no_method() -> None:
    kernel = settled(add, X, Y)

    class Layer:
        forward = kernel

    assert Layer.forward is Layer().forward is kernel
    assert torch.equal(Layer().forward(X, Y), X + Y)


def test_a_call_without_shortcuts() -> None:
    kernel = settled(add, X, Y)
    assert torch.equal(kernel.call(X, Y), X + Y)
    assert kernel.checked == 3


def test_one_tensor_twice(language: str) -> None:
    """Torch's guards want different tensors; what they let pass before is enough for C++."""
    x, y = numbers(4, 64), numbers(4, 64, seed=1)
    kernel = settled(add, x, y)
    for _ in range(3):
        assert kernel(x, x).equal(x + x)
    assert kernel.checked == (2 if language == "C++" else 5)
    assert len(kernel.shortcuts.made) == 1


def test_out_is_filled_and_returned() -> None:
    x, y, out = numbers(4, 64), numbers(4, 64, seed=1), torch.empty(4, 64)
    kernel = settled(add, x, y, out=out)
    out.zero_()
    assert kernel(x, y, out=out) is out
    assert torch.equal(out, x + y)
    other = torch.zeros(4, 64)
    kernel(y, x, out=other)
    assert torch.equal(other, y + x)
    assert kernel.checked == 2


def test_numbers_are_passed_and_checked() -> None:
    x, row = numbers(4, 64), numbers(4, 1, seed=1)
    kernel = settled(affine, x, 2.0, row, 3)
    y, top = kernel(x, 0.5, row, -7)
    assert torch.equal(y, x * 0.5 + row - 7)
    assert torch.equal(top, (x * 0.5 + row).amax(-1, keepdim=True))
    assert kernel.checked == 2
    with pytest.raises(ArgumentError, match="shift"):
        kernel(x, 0.5, row, 0.5)
    with pytest.raises(ArgumentError, match="scale"):
        kernel(x, 1e39, row, 1)
    outs = torch.empty(4, 64), torch.empty(4, 1)
    for _ in range(3):
        assert kernel(x, 3, row, 1, out=outs) is outs
        assert torch.equal(outs[0], x * 3 + row + 1)


def test_results_that_are_kept_stay_as_they_are() -> None:
    kernel = settled(add, X, Y)
    pairs = [(numbers(4, 64, seed=seed), numbers(4, 64, seed=seed + 9)) for seed in range(9)]
    found = [kernel(x, y) for x, y in pairs]
    assert all(torch.equal(one, x + y) for one, (x, y) in zip(found, pairs, strict=True))
    found[0].resize_(9, 64).zero_()
    assert all(torch.equal(one, x + y) for one, (x, y) in zip(found[1:], pairs[1:], strict=True))


def test_operands_by_name_end_in_the_shortcut() -> None:
    x, row, outs = X.clone(), numbers(4, 1), (torch.empty(4, 64), torch.empty(4, 1))
    kernel = settled(affine, x, 2.0, row, 3)
    wanted = kernel(x, 2.0, row, 3)
    for found in (
        kernel(x=x, scale=2.0, row=row, shift=3),
        kernel(x, 2.0, shift=3, row=row),
        kernel(shift=3, row=row, scale=2.0, x=x, out=None),
        kernel.call(x, 2.0, row, shift=3),
    ):
        assert all(map(torch.equal, found, wanted))
    assert kernel.checked == 6, "once each, for the order"
    assert kernel(x, 2.0, shift=3, row=row, out=outs, stream=0) is outs
    assert all(map(torch.equal, outs, wanted))
    prepared = kernel.prepare(x, shift=3, row=row, scale=2.0)
    prepared()
    assert all(map(torch.equal, prepared.result, wanted))


WRONG_NAMES: dict[str, Callable[[Any], object]] = {
    "scale is given twice": lambda call: call(X, 2.0, scale=2.0, row=X, shift=3),
    "width is no operand, shift is missing": lambda call: call(X, 2.0, X, width=3),
    "scale is missing, row is missing, shift is missing": lambda call: call(x=X),
    "kernel is no operand": lambda call: call(X, 2.0, X, 3, kernel=1),
    "self is no operand": lambda call: call(X, 2.0, X, 3, self=1),
    "y is no operand": lambda call: call(X, 2.0, X, 3, 4, y=1),
}


@pytest.mark.parametrize("words", WRONG_NAMES)
def test_wrong_names(words: str) -> None:
    kernel = settled(affine, X, 2.0, numbers(4, 1), 3)
    message = r"affine takes 4 operands \(x: f32\[M, N\], scale: f32, .*\); of these, " + words
    for call in (kernel, kernel.call, kernel.prepare):
        with pytest.raises(ArgumentError, match=message):
            WRONG_NAMES[words](call)


def test_an_operand_called_stream_is_given_by_its_place() -> None:
    given = a, b, c, d, e = [numbers(4, 64, seed=seed) for seed in range(5)]
    kernel = settled(awkward, *given)
    assert torch.equal(kernel(a, b, c, type=e, launch=d), a + b + c * d - e)
    with pytest.raises(ArgumentError, match="stream is missing in its place"):
        kernel(a, b, stream=c, type=e, launch=d)


def test_misaligned_tensors_have_shortcuts_too() -> None:
    x, y = offset(numbers(4, 64), 1), numbers(4, 64, seed=1)
    kernel = settled(add, x, y)
    again = offset(numbers(4, 64, seed=5), 1)
    assert torch.equal(kernel(again, y), again + y)
    assert kernel.checked == 2
    for other in (offset(x, 2), offset(x, 0)):
        assert torch.equal(kernel(other, y), x + y)
    assert torch.equal(kernel(x, offset(y, 1)), x + y)
    assert kernel.checked == 5


def test_addresses_that_change_are_looked_at_each_time() -> None:
    """Those of the last call that was looked at need not be; others may be misaligned, or in each other's bytes."""
    memory = torch.empty(2 * X.numel())
    x, out = X.clone(), torch.empty_like(X)
    inside = memory[: X.numel()].view(X.shape)
    shifted = memory[64 : 64 + X.numel()].view(X.shape)  # as aligned, and in the same bytes
    inside.copy_(X)
    kernel = settled(add, x, Y, out=out)
    for checked in (2, 3, 4):
        for _ in range(2):
            assert torch.equal(kernel(x, Y, out=out), X + Y)
            assert torch.equal(kernel(inside, Y, out=out), X + Y)
        assert kernel.checked == checked
        with pytest.raises(ArgumentError, match="shares memory"):
            kernel(inside, Y, out=shifted)
    other = offset(X, 1)
    assert torch.equal(kernel(other, Y, out=out), X + Y)
    assert kernel.checked == 6


def test_names_that_a_shortcut_uses_itself() -> None:
    given = a, b, c, d, e = [numbers(4, 64, seed=seed) for seed in range(5)]
    kernel = settled(awkward, *given)
    assert torch.equal(kernel(*given), a + b + c * d - e)
    out = torch.empty(4, 64)
    for _ in range(3):
        kernel(*given, out=out)
        assert torch.equal(out, a + b + c * d - e)


def test_names_that_a_shortcut_takes_from_python() -> None:
    x, y = numbers(4, 64), numbers(4, 64, seed=1)
    kernel = settled(pythonic, x, y)
    assert torch.equal(kernel(x, y)[0], x + y)
    out = torch.empty(4, 64), torch.empty(4, 1)
    for _ in range(3):
        kernel(x, y, out=out)
        assert torch.equal(out[0], x + y)


def test_a_launch_that_is_refused_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, row = numbers(4, 64), numbers(4, 1, seed=1)
    kernel = settled(affine, x, 2.0, row, 3)
    monkeypatch.setattr(Launched, "status", 201)
    y, top = kernel(x, 0.5, row, -7)
    assert torch.equal(y, x * 0.5 + row - 7)
    assert torch.equal(top, (x * 0.5 + row).amax(-1, keepdim=True))
    assert kernel.checked == 2


# ---------------------------------------------------------------- what it leaves to the checked path

CHANGES: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: X.half(), "x holds f16"),
    "dtype of the same size": (lambda: X.int(), "x holds i32"),
    "dtype that no operand has": (lambda: X.double(), "float64"),
    "columns": (lambda: numbers(4, 65), "N"),
    "rows": (lambda: numbers(5, 64), "M is 5 already"),
    "axes": (lambda: X[None], "has 3 axes"),
    "column stride": (lambda: numbers(64, 4).t(), "stride of 4"),
    "device": (lambda: X.to("meta"), "meta"),
    "layout": (lambda: X.to_sparse(), "layout"),
    "lazily negated": (lambda: torch._neg_view(X), "lazily negated"),
    "no tensor": (lambda: 3.0, "a float, and a kernel takes arrays"),
    "nothing": (lambda: None, "NoneType"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_operand_is_refused_as_ever(name: str) -> None:
    change, words = CHANGES[name]
    x, y, out = X, numbers(4, 64, seed=1), torch.empty(4, 64)
    kernel = settled(add, x, y)
    with pytest.raises(ArgumentError, match=words):
        kernel(change(), y)
    filling = settled(add, x, y, out=out)
    with pytest.raises(ArgumentError, match=words):
        filling(change(), y, out=out)
    assert (kernel.checked, filling.checked) == (3, 3)


RIGHT: dict[str, Callable[[Any], Any]] = {
    "row stride": lambda x: wide(*x.shape).copy_(x),
    "row stride of no vector": lambda x: wide(*x.shape, extra=1).copy_(x),
    "repeated rows": lambda x: x[:1].expand(4, 64),
    "alignment": lambda x: offset(x, 1),
    "numpy": lambda x: x.numpy(),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "subclass": lambda x: x.as_subclass(type("Mine", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("name", RIGHT)
def test_another_layout_is_checked_and_computed(name: str) -> None:
    x, y = numbers(4, 64), numbers(4, 64, seed=1)
    kernel = settled(add, x, y)
    changed = RIGHT[name](x)
    wanted = torch.as_tensor(changed).detach() + y
    found = kernel(changed, y)
    assert kernel.checked == 3
    assert torch.equal(torch.as_tensor(found).as_subclass(torch.Tensor), wanted)


@pytest.mark.parametrize("filling", [False, True])
def test_a_gradient_is_refused_whatever_was_learnt(filling: bool) -> None:
    """Weights that require one are calls' daily bread under no_grad, and their shortcuts hold there alone."""
    x, w = numbers(4, 64), numbers(4, 64, seed=1).requires_grad_()
    out = {"out": torch.empty_like(x)} if filling else {}
    with torch.no_grad():
        kernel = settled(add, x, w, **out)
        before = kernel.checked
        for _ in range(3):
            assert torch.equal(kernel(x, w, **out), x + w)
    with torch.inference_mode():
        assert torch.equal(kernel(x, w, **out), x + w)
    with torch.no_grad():
        counted = kernel.checked
        assert torch.equal(kernel(x, w, **out), x + w)
    assert kernel.checked == counted <= before + 2
    for _ in range(3):
        with pytest.raises(ArgumentError, match=r"y requires a gradient, .*\n  call it under torch.no_grad\(\)"):
            kernel(x, w, **out)
    assert torch.equal(kernel(x, w.detach(), **out), x + w.detach())


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning")
def test_a_nested_tensor_is_refused() -> None:
    """Torch's guards would abort the process."""
    kernel = settled(add, X, Y)
    with pytest.raises(ArgumentError, match="nested"):
        kernel(torch.nested.nested_tensor([X[0], X[1]]), Y)
    assert kernel.checked == 3


def test_more_rows_are_another_record() -> None:
    kernel = settled(add, numbers(4, 64), numbers(4, 64, seed=1))
    for rows in (1, 5, 0, 4):
        x, y = numbers(rows, 64), numbers(rows, 64, seed=1)
        assert torch.equal(kernel(x, y), x + y)
    assert kernel.checked == 5


def test_a_tensor_changed_in_place_is_seen() -> None:
    """The same object, and other metadata: identity would not tell."""
    x, y = numbers(4, 64), numbers(4, 64, seed=1)
    kernel = settled(add, x, y)
    x.resize_(5, 64)
    with pytest.raises(ArgumentError, match="M is 5 already"):
        kernel(x, y)
    x.data = numbers(64, 4).t()
    with pytest.raises(ArgumentError, match="stride"):
        kernel(x, y)
    x.set_(offset(numbers(4, 64), 1))
    assert torch.equal(kernel(x, y), x + y)
    x.data = torch._neg_view(numbers(4, 64))
    with pytest.raises(ArgumentError, match="lazily negated"):
        kernel(x, y)
    assert kernel.checked == 6


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_operands(count: int) -> None:
    kernel = settled(add, X, Y)
    with pytest.raises(ArgumentError, match="takes 2 operands"):
        kernel(*[X] * count)


def test_outs_that_overlap() -> None:
    x, y, out = numbers(4, 64), numbers(4, 64, seed=1), torch.empty(4, 64)
    kernel = settled(add, x, y, out=out)
    for over in range(2):  # takes no shortcut
        operands = [x.clone(), y.clone()]
        assert torch.equal(kernel(*operands, out=operands[over]), x + y)
    memory = numbers(7, 64)
    with pytest.raises(ArgumentError, match="shares memory"):
        kernel(memory[:4], y, out=memory[3:])
    with pytest.raises(ArgumentError, match="shares memory"):
        kernel(y, memory[3:], out=memory[:4])
    assert kernel.checked == 6
    lower, upper = numbers(8, 64)[:4], numbers(8, 64)[4:]
    assert torch.equal(kernel(lower, y, out=upper), lower + y)
    assert kernel.checked == 6


def test_two_outs_that_overlap() -> None:
    x, row = numbers(4, 64), numbers(4, 1, seed=1)
    memory = torch.empty(4 * 64 + 4)
    outs = memory[:-4].view(4, 64), memory[-4:].view(4, 1)
    kernel = settled(affine, x, 2.0, row, 3, out=outs)
    with pytest.raises(ArgumentError, match="shares memory"):
        kernel(x, 2.0, row, 3, out=(outs[0], memory[252:256].view(4, 1)))
    assert kernel.checked == 3


def test_columns_beside_each_other_are_apart() -> None:
    """Their bytes interleave, so only the checked path can tell."""
    memory = numbers(4, 192)
    x, y, out = memory[:, :64], memory[:, 64:128], memory[:, 128:]
    kernel = made(add)
    for _ in range(4):
        wanted = x + y
        assert torch.equal(kernel(x, y, out=out), wanted)
    assert kernel.checked == 4


def test_wrong_outs() -> None:
    x, row = numbers(4, 64), numbers(4, 1)
    outs = torch.empty(4, 64), torch.empty(4, 1)
    kernel = settled(affine, x, 2.0, row, 3, out=outs)
    with pytest.raises(ArgumentError, match="out= holds 1"):
        kernel(x, 2.0, row, 3, out=outs[0])
    with pytest.raises(ArgumentError, match="out= holds 1"):
        kernel(x, 2.0, row, 3, out=torch.empty(2, 4, 64))
    with pytest.raises(ArgumentError, match="out1 on axis"):
        kernel(x, 2.0, row, 3, out=(outs[0], torch.empty(4, 2)))
    assert kernel(x, 2.0, row, 3, out=list(outs))[0] is outs[0]
    assert kernel.checked == 6


def test_a_stream_of_ones_choice_is_checked() -> None:
    kernel = settled(add, X, Y)
    kernel(X, Y, stream=0)
    assert kernel.checked == 3


class Watching(TorchDispatchMode):  # type: ignore[misc]
    """Sees every operation."""

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        return function(*given, **(named or {}))


def test_modes_of_torch_are_checked() -> None:
    """Inside a mode torch may mean something else by every operation."""
    kernel = settled(add, X, Y)
    with torch.inference_mode():
        kernel(X, Y)
    with Watching():
        kernel(X, Y)
    torch.func.vmap(lambda seen: (kernel(X, Y), seen)[1])(X)
    assert kernel.checked == 5
    kernel(X, Y)
    assert kernel.checked == 5


# ---------------------------------------------------------------- how many there are


def test_shapes_that_take_turns_each_have_one() -> None:
    kernel = made(add)
    pairs = [(numbers(rows, 64), numbers(rows, 64, seed=1)) for rows in (1, 2, 3)]
    for _ in range(12):
        for x, y in pairs:
            assert torch.equal(kernel(x, y), x + y)
    assert len(kernel.shortcuts.made) == 3
    before = kernel.checked
    for x, y in pairs:
        kernel(x, y)
    assert kernel.checked == before


def test_ever_fewer_are_made_where_shapes_keep_changing(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    original = shortcuts.shortcut

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args)

    monkeypatch.setattr(shortcuts, "shortcut", counted)
    kernel = made(add)
    pairs = [(numbers(rows, 64), numbers(rows, 64)) for rows in range(1, 21)]
    for _ in range(6):
        for x, y in pairs:
            kernel(x, y)
    assert len(kernel.shortcuts.made) == shortcuts.MOST_SHORTCUTS
    assert count < 12


def test_none_is_made_for_a_gpu_that_is_not_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """And such calls put off none of those on the current one."""
    kernel = made(add)
    x, y = numbers(3, 64), numbers(3, 64, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(shortcuts, "is_current", lambda place: False)
        for _ in range(8):
            assert torch.equal(kernel(x, y), x + y)
        assert not kernel.shortcuts.made
    kernel(x, y)
    assert len(kernel.shortcuts.made) == 1


def test_guards_that_fail_their_proof_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A torch whose guards overlook something: every call is checked, and right."""
    monkeypatch.setattr(guards, "guard", lambda tensors: lambda *others: True)
    guards.guards_hold.cache_clear()
    try:
        with caplog.at_level(logging.DEBUG, logger="fusegen.shortcuts"):
            kernel = made(add)
            for _ in range(3):
                assert torch.equal(kernel(X, Y), X + Y)
        assert kernel.checked == 3
        assert "don't tell all tensors apart" in caplog.text
    finally:
        guards.guards_hold.cache_clear()


def test_guards_are_asked_where_all_tensors_are_pretended() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    guards.guards_hold.cache_clear()
    try:
        with FakeTensorMode():
            assert not guards.guards_hold()
    finally:
        guards.guards_hold.cache_clear()


def test_a_torch_without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    guards.guards_hold.cache_clear()
    try:
        kernel = made(add)
        for _ in range(3):
            assert torch.equal(kernel(X, Y), X + Y)
        assert kernel.checked == 3
    finally:
        guards.guards_hold.cache_clear()


def test_a_torch_without_the_quick_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    kernel = settled(add, X, Y)
    assert torch.equal(kernel(X, Y), X + Y)


def test_the_text_is_logged(caplog: pytest.LogCaptureFixture, language: str) -> None:
    with caplog.at_level(logging.DEBUG, logger="fusegen.shortcuts"):
        settled(add, X, Y)
    if language != "Python":
        assert "add: a shortcut in C for calls with fresh results" in caplog.text
        return
    assert (
        """
    if held != sent:
        stream_at, x_at, y_at, out__at = sent
        if (x_at | y_at) & 15:  # not as they were
            return otherwise(kernel, *operands)
        slot[0] = sent
"""
        in caplog.text
    )


def test_prepared_calls_repeat_their_numbers() -> None:
    x, row = X.clone(), numbers(4, 1)
    prepared = made(affine).prepare(x, 0.5, row, 3)
    assert isinstance(prepared.func, FunctionType) is (native.module() is None), "in C where there is any"
    for turn in range(6):
        x += 1
        prepared(*[0] * (turn % 2))
        assert torch.equal(prepared.result[0], x * 0.5 + row + 3)
    assert made(affine).prepare(X[:0], 0.5, row[:0], 3)() is None, "nothing to launch"


def test_prepared_calls_keep_their_tensors_and_nothing_longer() -> None:
    prepared = made(add).prepare(X.clone(), Y.clone())
    gone = [weakref.ref(tensor) for tensor in prepared.arrays]
    gc.collect()
    prepared()
    assert torch.equal(prepared.result, X + Y)
    gc.disable()
    try:
        del prepared
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()


def test_no_tensor_is_kept_alive() -> None:
    x, y = numbers(4, 64), numbers(4, 64, seed=1)
    kernel = settled(add, x, y)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    assert kernel.shortcuts.made


def test_threads_share_shortcuts() -> None:
    kernel = settled(add, X, Y)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(30):
            x, y = numbers(4, 64, seed=seed), numbers(4, 64, seed=turn)
            if not torch.equal(kernel(x, y), x + y):
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert kernel.checked == 2
