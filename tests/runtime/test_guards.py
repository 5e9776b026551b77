"""Torch's tensors read in C++: what is told apart, where tensors are, and what is done without a compiler."""

from __future__ import annotations

import copy
import ctypes
import gc
import logging
import re
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusegen.errors import CompileError, FusegenError, MissingError
from fusegen.runtime import guards, native
from fusegen.runtime.arrays import CPU, contiguous_strides
from fusegen.runtime.devices import Block
from fusegen.runtime.guards import Functions
from fusegen.runtime.libraries import torch_empty
from fusegen.runtime.shortcuts import Kind, in_c
from fusegen.storage import Store, libraries

torch = pytest.importorskip("torch", reason="torch is missing: pip install torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


@pytest.fixture(scope="module")
def functions() -> Functions:
    try:
        return guards.get()
    except FusegenError as error:
        pytest.skip(f"no C++ for torch's tensors: {str(error).splitlines()[0]}")


class Noted:
    """What tensors are like, as C++ has it."""

    def __init__(self, functions: Functions, *tensors: Any) -> None:
        self.functions = functions
        self.traits = guards.written(functions.note, *tensors)
        assert len(self.traits) == sum(6 + 2 * tensor.ndim for tensor in tensors)

    def alike(self, *tensors: Any) -> list[int] | None:
        """Their addresses; None where they are not."""
        found = (ctypes.c_uint64 * len(tensors))()
        given = guards.objects(*tensors), ctypes.c_ssize_t(len(tensors)), self.traits, found
        return [*found] if self.functions.alike(*given) else None


def plain() -> Any:
    return torch.arange(24, dtype=torch.float32).view(4, 6)


X = plain()


def functional(x: Any) -> Any:
    torch._enable_functionalization(reapply_views=False)
    try:
        return torch._to_functional_tensor(x)
    finally:
        torch._disable_functionalization()


def wrapped(transform: Callable[..., Any]) -> Callable[[Any], Any]:
    """What a function sees that is transformed."""

    def see(x: Any) -> Any:
        seen: list[Any] = []

        def function(part: Any) -> Any:
            seen.append(part)
            return part.sum()

        transform(function)(x)
        return seen[0]

    return see


def inference(x: Any) -> Any:
    with torch.inference_mode():
        return x.clone()


OTHERS: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda x: x.double(),
    "dtype of the same size": lambda x: x.int(),
    "rows": lambda x: x[:3].clone(),
    "columns": lambda x: x[:, :5].clone(),
    "axes": lambda x: x[None],
    "no axes": lambda x: x[0, 0],
    "row stride": lambda x: torch.zeros(4, 7)[:, :6],
    "columns first": lambda x: torch.zeros(6, 4).t(),
    "repeated rows": lambda x: x[:1].expand(4, 6),
    "device": lambda x: x.to("meta"),
    "layout": lambda x: x.to_sparse(),
    "blocks": lambda x: x.to_sparse_csr(),
    "gradient": lambda x: x.clone().requires_grad_(),
    "computed with a gradient": lambda x: x.clone().requires_grad_() * 2,
    "lazily negated": lambda x: torch._neg_view(x),
    "the imaginary part of a conjugate": lambda x: torch.complex(x, x).conj().imag.as_strided((4, 6), (6, 1)),
    "made in inference mode": inference,
    "functional": functional,
    "one of a batch": lambda x: wrapped(torch.func.vmap)(x.expand(2, 4, 6)),
    "differentiated": wrapped(torch.func.grad),
    "quantized": lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:.*(beta state|prototype|deprecated).*:UserWarning")
def test_what_guards_tell_apart_is_told_apart(functions: Functions, name: str) -> None:
    other = OTHERS[name](X)
    assert type(other) is torch.Tensor
    if name != "nested":  # at those torch 2.13's guards abort the process
        assert not guards.guard((X,))(other)
    assert Noted(functions, X).alike(other) is None
    assert Noted(functions, X, X).alike(X, other) is None
    assert Noted(functions, X).alike(X) == [X.data_ptr()]


ALIKE: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "a copy": lambda x: x.clone(),
    "without its gradient": lambda x: x.clone().requires_grad_().detach(),
    "rows of a larger one": lambda x: torch.zeros(9, 6)[3:7],
    "misaligned": lambda x: torch.zeros(25)[1:].view(4, 6),
    "copied on write": lambda x: torch._lazy_clone(x),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "computed without gradients": lambda x: torch.no_grad()(lambda: x.clone().requires_grad_() * 2)(),
}


@pytest.mark.parametrize("name", ALIKE)
def test_addresses(functions: Functions, name: str) -> None:
    other = ALIKE[name](X)
    noted = Noted(functions, X, X)
    assert noted.alike(other, X) == [other.data_ptr(), X.data_ptr()]


def test_tensors_have_traits_of_their_own(functions: Functions) -> None:
    one, other, number = X, torch.zeros(7, dtype=torch.int32), torch.zeros(())
    noted = Noted(functions, one, other, number)
    assert noted.alike(one.clone(), other.clone(), number) is not None
    assert noted.alike(other, one, number) is None
    assert noted.alike(one, number, other) is None


CHANGES: dict[str, Callable[[Any], object]] = {
    "resized": lambda x: x.resize_(5, 6),
    "transposed": lambda x: x.t_(),
    "another's data": lambda x: setattr(x, "data", torch.zeros(4, 7)),
    "lazily negated data": lambda x: setattr(x, "data", torch._neg_view(x.detach())),
    "swapped": lambda x: torch.utils.swap_tensors(x, torch._neg_view(plain())),
    "gradient": lambda x: x.requires_grad_(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_place_are_seen(functions: Functions, name: str) -> None:
    x = plain()
    noted = Noted(functions, x)
    CHANGES[name](x)
    assert noted.alike(x) is None


def test_memory_that_was_replaced(functions: Functions) -> None:
    x, other = plain(), plain()
    noted = Noted(functions, x)
    x.set_(other)
    assert noted.alike(x) == [other.data_ptr()]
    x.untyped_storage().resize_(0)
    assert noted.alike(x) in (None, [0])


class Watching(TorchDispatchMode):  # type: ignore[misc]
    """Sees every operation."""

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        return function(*given, **(named or {}))


def test_modes_are_seen(functions: Functions) -> None:
    noted, guard = Noted(functions, X), guards.guard((X,))
    seen: list[object] = []

    def look(part: Any) -> Any:
        seen.append(noted.alike(X))
        return part.sum()

    with torch.inference_mode():
        look(X)
    with Watching():
        look(X)
    torch.func.vmap(look)(X)
    torch.func.grad(look)(X)
    assert seen == [None] * 4
    for mode in (torch.no_grad(), torch.enable_grad(), torch.autocast("cpu")):
        with mode:
            assert bool(noted.alike(X)) == guard(X)
    assert noted.alike(X)
    threads: list[object] = []
    with torch.inference_mode():
        thread = threading.Thread(target=lambda: threads.append(noted.alike(X)))
        thread.start()
        thread.join()
    assert threads == [[X.data_ptr()]], "a mode is its thread's own"


@pytest.mark.filterwarnings("ignore:.*prototype.*:UserWarning")
def test_what_torch_can_not_tell(functions: Functions) -> None:
    nested = torch.nested.nested_tensor([X, X[:2]])
    for write in (functions.note, functions.form):
        assert guards.written(write, nested) is None
        assert guards.written(write, X, nested) is None


# ---------------------------------------------------------------- fresh tensors


def remade(functions: Functions, *tensors: Any) -> list[Any]:
    """As many tensors like these."""
    form = guards.written(functions.form, *tensors)
    assert form is not None
    forms, place = ctypes.c_void_p(ctypes.addressof(form)), ctypes.c_uint64()
    made = []
    for _ in tensors:
        made.append(guards.remade(functions, forms, place))
        assert made[-1].data_ptr() == place.value
    assert forms.value == ctypes.addressof(form) + ctypes.sizeof(form)
    return made


def empty(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch_empty(CPU)(shape, contiguous_strides(shape), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(4, 6), (2, 1, 3), (7,), (1, 1), (2, 3, 1, 5, 1, 2, 4)], ids=str)
def test_fresh_tensors_are_as_torch_makes_them(functions: Functions, shape: tuple[int, ...], dtype: Any) -> None:
    one, other = empty(*shape, dtype=dtype), empty(3, dtype=torch.float32)
    for made, like in zip(remade(functions, one, other), (one, other), strict=True):
        assert type(made) is torch.Tensor
        assert guards.guard((like,))(made)
        for trait in ("shape", "dtype", "device", "layout", "is_leaf", "requires_grad", "grad", "_version"):
            assert getattr(made, trait) == getattr(like, trait), trait
        assert (made.stride(), made.storage_offset()) == (like.stride(), 0)
        assert made.is_contiguous()
        assert made.untyped_storage().nbytes() == like.untyped_storage().nbytes()
        assert made.untyped_storage().resizable() == like.untyped_storage().resizable()
        assert made.data_ptr() != like.data_ptr()
        assert torch._C._dispatch_keys(made) == torch._C._dispatch_keys(like)


def test_fresh_tensors_work_as_any(functions: Functions) -> None:
    (x,) = remade(functions, empty(4, 6))
    x.copy_(X)
    assert torch.equal(x + 1, X + 1)
    assert x._version == 1
    x.requires_grad_()
    (2 * x).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 6), 2.0))
    assert torch.equal(x.detach().resize_(5, 6)[:4], X)
    assert torch.equal(torch.from_dlpack(x.detach()), X)
    assert torch.equal(copy.deepcopy(x.detach()), X)
    x.keep = "an attribute"
    view = x.view(-1)
    del x
    gc.collect()
    assert view._base.keep == "an attribute"


def test_fresh_tensors_of_inference_mode(functions: Functions) -> None:
    with torch.inference_mode():
        (x,) = remade(functions, one := empty(4, 6))
        assert x.is_inference()
        assert torch._C._dispatch_keys(x) == torch._C._dispatch_keys(one)


def test_their_memory_goes_with_them(functions: Functions) -> None:
    one = empty(256, 1024)
    (x,) = remade(functions, one)
    gone, storage = weakref.ref(x), weakref.ref(x.untyped_storage())
    assert sys.getrefcount(x) == sys.getrefcount(one)
    del x
    assert gone() is None
    assert storage() is None
    resident = Path("/proc/self/statm")
    before = int(resident.read_text().split()[1])
    for _ in range(500):
        remade(functions, one)[0].fill_(1)
    assert int(resident.read_text().split()[1]) - before < 100 * 256, "in pages; each of the tensors has 256"


NOT_MADE: dict[str, Callable[[Any], Any]] = {
    "rows of a larger one": lambda x: torch.zeros(9, 6)[3:7],
    "gradient": lambda x: x.clone().requires_grad_(),
    "somebody's memory": lambda x: torch.from_numpy(x.numpy().copy()),
    "no strides": lambda x: x.to_sparse(),
    "an operation's": lambda x: torch.func.vmap(lambda part: part * 2)(x.expand(2, 4, 6))._base,
}


@pytest.mark.parametrize("name", NOT_MADE)
def test_what_takes_more_than_memory_has_no_form(functions: Functions, name: str) -> None:
    other = NOT_MADE[name](X)
    if other is not None:
        assert guards.written(functions.form, other) is None
        assert guards.written(functions.form, empty(4, 6), other) is None


def test_without_memory_it_makes_nothing(functions: Functions) -> None:
    form = guards.written(functions.form, empty(4, 6))
    form[3] = 2**62
    forms = ctypes.c_void_p(ctypes.addressof(form))
    assert guards.remade(functions, forms, ctypes.c_uint64()) is None
    assert forms.value == ctypes.addressof(form)


# ---------------------------------------------------------------- all of it


def test_no_call_leaves_a_reference_behind(functions: Functions) -> None:
    """A hundred thousand calls of a shortcut whose launch does nothing."""
    try:
        module: Any = native.get()
    except FusegenError as error:
        pytest.skip(f"no shortcuts in C: {str(error).splitlines()[0]}")
    module.read_by(*map(guards.address, functions))
    start = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(lambda *_: 0)
    launch = ctypes.cast(start, ctypes.c_void_p).value or 0
    block = Block(struct.pack("5Q", *range(5)), 0, 1, (1, 2, 3), launch, 7, lambda words: None)
    x, y, out = plain(), plain(), plain()
    kinds = [
        Kind(
            filling=filling,
            guard=guards.guard((x, y, out) if filling else (x, y)),
            types=(torch.Tensor,) * 3,
            address=torch.Tensor.data_ptr,
            numbers=(None, None),
            empty=torch_empty(CPU),
            fresh=(((4, 6), (6, 1), torch.float32),),
            offsets=tuple(t.data_ptr() % 16 for t in (x, y, out)),
            widest=16,
            ends=(96,) * 3,
            place=0,
            current_stream=abs,
            stream_of=0,
            current_device=None,
        )
        for filling in (False, True)
    ]
    fresh, filling = (in_c(block, kind, module) for kind in kinds)
    for one in (fresh, filling):
        one.hand_on(lambda *_, **__: None)  # type: ignore[attr-defined]
    kept = (x, y, out, torch.Tensor, fresh, filling, *kinds[0].fresh, torch.float32)

    def work() -> list[int]:
        for _ in range(25_000):
            fresh(None, x, y)
            filling(None, x, y, out=out)
            filling(None, y, x, out=out)
            filling(None, x, None, out=out)
        gc.collect()
        return [sys.getrefcount(one) for one in kept]

    before = work()
    assert work() == before


# ---------------------------------------------------------------- without it


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing is in the cache, whose folder this is."""
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    yield tmp_path
    guards.begin.cache_clear()


class Module:
    """Of shortcut.c, as far as it is told something here."""

    def __init__(self) -> None:
        self.told: list[tuple[int, ...]] = []

    def read_by(self, *addresses: int) -> None:
        self.told.append(addresses)


def reason(caplog: pytest.LogCaptureFixture) -> str:
    """Why tensors are not read in C++."""
    module = Module()
    with caplog.at_level(logging.DEBUG, logger="fusegen.shortcuts"):
        assert guards.begin(module).result() is False
    assert not module.told
    (said,) = (record.getMessage() for record in caplog.records if record.name == "fusegen.shortcuts")
    assert said.startswith("torch's guards are asked at each call, which takes some 1 us more: ")
    return str(said)


def raising(*_: object) -> Any:
    raise ZeroDivisionError("raised on purpose")


def test_it_is_compiled_once_and_kept(functions: Functions, anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module()
    assert guards.begin(module).result() is True
    assert guards.begin(module).result() is True
    (told,) = module.told
    assert len(told) == 5
    assert all(told)
    (entry,) = (anew / "extensions").iterdir()
    assert entry.name.startswith("guards-torch_")
    monkeypatch.setattr(libraries, "made", raising)
    guards.get()


def test_another_header_is_another_library(functions: Functions, anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guards.get()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"\n" * (path.name == "TensorImpl.h"))
    monkeypatch.setattr(libraries, "made", raising)
    with pytest.raises(ZeroDivisionError):
        guards.get()


def test_no_compiler(anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(anew))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler here\n  to get it: apt install g++" in reason(caplog)
    (anew / "clang++").touch(0o755)
    assert guards.compiler() == ("clang++",)
    monkeypatch.setenv("CXX", "clang++ -m64")
    assert guards.compiler() == ("clang++", "-m64")


def test_no_headers(anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch, "__path__", [str(anew)])
    assert f"torch's headers are missing here: no {anew}" in reason(caplog)


def test_a_compiler_that_fails(
    functions: Functions, anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = anew / "guards.cpp"
    source.write_text("#error on purpose")
    monkeypatch.setattr(guards, "SOURCE", source)
    with pytest.raises(CompileError, match="on purpose"):
        guards.get()
    assert "refuses it" in reason(caplog)


def test_a_library_that_can_not_be_loaded(
    functions: Functions, anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Store, "load", lambda *_: b"no library")
    assert ".so: " in reason(caplog)


def test_tensors_that_hide_their_place(
    anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.nn, "Parameter", lambda tensor: type("Hidden", (), {"_cdata": 2**60 + 1})())
    assert "don't say where their TensorImpl is" in reason(caplog)


def elsewhere(forms: Any, place: Any) -> int:
    place._obj.value = 64
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(X))
    return id(X)


LIES: dict[str, dict[str, Callable[..., Any]]] = {
    "notes nothing": {"note": lambda *_: -1},
    "notes another size each time": {"note": lambda _, __, traits: 3 if traits else 4},
    "finds all alike": {"alike": lambda *_: 1},
    "finds none alike": {"alike": lambda *_: 0},
    "forms nothing": {"form": lambda *_: -1},
    "forms whatever it gets": {"form": lambda *_: 1},
    "makes it elsewhere": {"make": elsewhere},
}


@pytest.fixture
def not_begun() -> Iterator[None]:
    guards.begin.cache_clear()
    yield
    guards.begin.cache_clear()


@pytest.mark.parametrize("name", LIES)
def test_functions_that_fail_their_proof_are_not_used(
    functions: Functions, not_begun: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setattr(guards, "load", lambda library: functions._replace(**LIES[name]))
    words = "doesn't (tell all tensors of|make tensors as) torch"
    with pytest.raises(MissingError, match=words):
        guards.get()
    assert re.search(words, reason(caplog))


def test_every_example_is_needed(functions: Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is alike among those that must not be fails the proof."""
    one, other, others = guards.examples()
    assert guards.holds(functions)
    monkeypatch.setattr(guards, "examples", lambda: (one, other, (*others, one.clone())))
    assert not guards.holds(functions)
    monkeypatch.setattr(guards, "examples", lambda: (one, others[0], others))
    assert not guards.holds(functions)


def test_no_thread_can_be_started(
    anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert "can't start new thread" in reason(caplog)


def test_the_text_has_no_warnings(functions: Functions, anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = ("-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wno-unused-command-line-argument")
    monkeypatch.setattr(guards, "FLAGS", (*guards.FLAGS, *strict))
    guards.get()
