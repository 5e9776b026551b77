"""Calling a kernel: results in the caller's library, variants, records, copies, and what is refused."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusegen import b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import EmulatorUnavailable, KernelFault, compiler
from fusegen.errors import ArgumentError, KernelError, MissingError
from fusegen.language.spec import Chain
from fusegen.planner import candidates, plan
from fusegen.planner.launched import Text
from fusegen.planner.model import Layout, Source
from fusegen.runtime import called
from fusegen.runtime.arrays import ArrayView, contiguous_strides
from fusegen.runtime.cache import KernelCache, compiled
from fusegen.runtime.devices import Device, Launch
from fusegen.runtime.emulated import EmulatedLoaded, EmulatorDevice
from fusegen.runtime.kernel import Kernel
from fusegen.targets import H200, MI300X, Target

torch = pytest.importorskip("torch", reason="torch is missing: pip install torch")

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

B, S, M, N = dims("B S M N")


@chain(M=4, N=64)
def add(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
    """Flat."""
    return x + y


@chain(B=3, S=5, N=64)
def biased(x: f32[B, S, N], bias: f32[N]) -> f32[B, S, N]:
    """Rows that merge, and a vector."""
    return x - bias


@chain(M=4, N=64)
def affine(x: f32[M, N], scale: f32, row: f32[M, 1], shift: i32) -> tuple[f32[M, N], f32[M, 1]]:
    """Two outputs, numbers among the operands."""
    y = x * scale + row
    return y + F.cast(shift, f32), F.max(y)


@chain(M=4, N=64)
def kinds(a: f16[M, N], b: bf16[M, N], c: i32[M, N], keep: b8[M, N]) -> bf16[M, N]:
    """Every dtype."""
    return F.where(keep, a + b, F.cast(c, f32))


def made(spec: Chain, target: Target = H200, device: Device | None = None) -> Kernel:
    """The chain's kernel, on the emulator unless said otherwise."""

    def variants(layout: Layout) -> tuple[Source, None]:
        return render(plan(spec.graph, target, layout=layout)), None

    source, binary = variants(Layout())
    return Kernel(source, binary, device or EmulatorDevice(target), variants)


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).integers(-99, 99, shape).astype(np.float32)


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("to", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_results_are_of_the_callers_library(to: Callable[[Any], Any], target: Target) -> None:
    x, y = numbers(4, 64), numbers(4, 64, seed=1)
    out = made(add, target)(to(x), to(y))
    assert type(out) is type(to(x))
    assert np.array_equal(np.asarray(out), x + y)


def test_every_dtype(target: Target) -> None:
    a, b, c, keep = numbers(4, 64), numbers(4, 64, seed=1), numbers(4, 64, seed=2), numbers(4, 64, seed=3) > 0
    arrays = [a.astype(np.float16), b.astype(bf16.numpy), c.astype(np.int32), keep]
    wanted = np.where(keep, a + b, c).astype(bf16.numpy)
    kernel = made(kinds, target)
    out = kernel(*arrays)
    assert out.dtype == bf16.numpy
    assert np.array_equal(out, wanted)
    tensors = [torch.from_numpy(v) if v.dtype != bf16.numpy else torch.from_numpy(b).bfloat16() for v in arrays]
    assert np.array_equal(kernel(*tensors).float().numpy(), wanted.astype(np.float32))


def test_outputs_and_run_time_scalars(target: Target) -> None:
    kernel = made(affine, target)
    x, row = numbers(4, 64), numbers(4, 1, seed=1)
    for scale, shift in ((2, 3), (0.5, -7)):  # the second call finds a record
        y, top = kernel(x, scale, row, np.int64(shift))
        assert np.array_equal(y, x * np.float32(scale) + row + shift)
        assert np.array_equal(top, (x * np.float32(scale) + row).max(-1, keepdims=True))


def test_more_and_fewer_rows_need_no_new_kernel() -> None:
    kernel = made(biased)
    for shape in ((3, 5), (1, 1), (7, 2), (1, 300), (0, 5), (5, 0)):
        x, bias = numbers(*shape, 64), numbers(64, seed=1)
        assert np.array_equal(kernel(x, bias), x - bias)
    assert len(kernel.variants) == 1


def test_out_is_filled_and_returned() -> None:
    kernel, x, y = made(add), torch.from_numpy(numbers(4, 64)), torch.from_numpy(numbers(4, 64, seed=1))
    out = torch.empty(4, 64)
    for _ in range(2):  # the second call finds a record
        out.zero_()
        assert kernel(x, y, out=out) is out
        assert torch.equal(out, x + y)
    wide = torch.full((4, 100), 7.0)
    kernel(x, y, out=wide[:, 8:72])
    assert torch.equal(wide[:, 8:72], x + y)
    assert bool((wide[:, :8] == 7).all())
    assert bool((wide[:, 72:] == 7).all())


def test_out_as_a_tuple() -> None:
    kernel, x, row = made(affine), numbers(4, 64), numbers(4, 1)
    outs = (np.empty((4, 64), np.float32), np.empty((4, 1), np.float32))
    assert kernel(x, 1.0, row, 0, out=outs) is not None
    assert np.array_equal(outs[1], (x + row).max(-1, keepdims=True))


def test_an_expanded_row_and_reversed_rows() -> None:
    kernel = made(add)
    x, y = torch.from_numpy(numbers(1, 64)), torch.from_numpy(numbers(4, 64, seed=1))
    assert torch.equal(kernel(x.expand(4, 64), y), x + y)
    a, b = numbers(4, 64), numbers(4, 64, seed=1)
    assert np.array_equal(kernel(a[::-1], b), a[::-1] + b)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.tuples(st.integers(0, 3), st.integers(0, 4)),
    order=st.sampled_from([(0, 1), (1, 0)]),
    gap=st.integers(0, 5),
    start=st.integers(0, 5),
    step=st.sampled_from([1, 2, -1]),
    bias_start=st.integers(0, 4),
)
def test_any_layout_gives_what_numpy_gives(
    sizes: tuple[int, int], order: tuple[int, int], gap: int, start: int, step: int, bias_start: int
) -> None:
    """Transposed, reversed, padded, misaligned: the checking emulator runs what the layout asks for."""
    shape = [0, 0]
    shape[order[0]], shape[order[1]] = sizes[order[0]] * abs(step), sizes[order[1]]
    memory = numbers(shape[order[0]], shape[order[1]], 64 + gap + start)
    x = memory.transpose(*order, 2)[..., start : start + 64]
    x = x[::step] if order == (0, 1) else x[:, ::step]
    bias = numbers(70, seed=1)[bias_start : bias_start + 64]
    assert np.array_equal(KERNEL(x, bias), x - bias)


KERNEL = made(biased)


# ---------------------------------------------------------------- variants and records


def test_the_variant_is_made_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    kernel = made(add)
    memory = torch.zeros(4 * 64 + 1)
    x, y = memory[1:].view(4, 64), torch.ones(4, 64)
    with caplog.at_level(logging.DEBUG, "fusegen.kernel"):
        for _ in range(3):
            assert torch.equal(kernel(x, y), x + y)
    assert [r.message for r in caplog.records] == ["add: making the variant for x unaligned"]
    assert set(kernel.variants) == {Layout(), Layout(unaligned=frozenset("x"))}


def test_a_variant_has_the_sizes_of_its_own_plan() -> None:
    kernel = made(add)
    x = torch.zeros(4, 80)
    assert kernel(x[:, :5].contiguous(), x[:, :5].contiguous()).shape == (4, 5)  # flat: any row length
    with pytest.raises(ArgumentError, match=r"compiled for N=64, and x on axis 1 has 5\n.*add\.at\(N=5\)"):
        kernel(x[:, :5], x[:, :5])


def test_a_factory_that_gives_another_layout_is_caught() -> None:
    source = render(plan(add.graph, H200))
    kernel = Kernel(source, None, EmulatorDevice(H200), lambda layout: (source, None))
    with pytest.raises(KernelError, match="got a plan for"):
        kernel(torch.zeros(4, 80)[:, :64], torch.zeros(4, 64))


def test_like_calls_share_a_record() -> None:
    kernel = made(add)
    for m in (4, 4, 5, 4):
        kernel(torch.zeros(m, 64), torch.zeros(m, 64))
        kernel(numbers(m, 64), numbers(m, 64))
    assert len(kernel.records) == 4
    kernel(torch.zeros(4, 64), torch.zeros(4, 64), out=torch.zeros(4, 64))
    assert len(kernel.records) == 5


def test_records_tell_alignments_apart_that_only_a_variant_needs() -> None:
    """The kernel's own plan moves single elements; its variant for split rows moves vectors across aligned blocks."""

    def variants(layout: Layout) -> tuple[Source, None]:
        plans = candidates(biased.at(N=37).graph, H200, layout).plans
        return render(next(p for p in plans if p.misaligned_rows is layout.split)), None

    source, _ = variants(Layout())
    kernel = Kernel(source, None, EmulatorDevice(H200), variants)
    memory, bias = torch.from_numpy(numbers(3 * 9 * 37 + 8)), torch.from_numpy(numbers(37, seed=1))
    for start in (0, 1, 2, 3, 4):
        x = memory[start : start + 3 * 9 * 37].view(3, 9, 37)[:, :5]
        assert torch.equal(kernel(x, bias), x - bias)
    assert len(kernel.variants) > 1


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(called, "MOST_RECORDS", 3)
    kernel = made(add)
    for m in range(8):
        kernel(torch.zeros(m, 64), torch.zeros(m, 64))
    assert len(kernel.records) <= 3


def test_a_record_does_not_hide_a_later_mistake() -> None:
    kernel = made(add)
    x, y = torch.zeros(4, 64), torch.zeros(4, 64)
    kernel(x, y)
    out = torch.zeros(4, 64)
    kernel(x, y, out=out)
    memory = torch.zeros(5, 64)
    with pytest.raises(ArgumentError, match="shares memory with the input x"):
        kernel(memory[:4], y, out=memory[1:])
    with pytest.raises(ArgumentError, match="x holds f16"):
        kernel(x.half(), y)
    with pytest.raises(ArgumentError, match="y on axis 0 has 3"):
        kernel(x, y[:3])


def test_threads_share_a_kernel() -> None:
    kernel = made(add)
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(20):
            x = torch.full((number, 64), float(turn))
            if not torch.equal(kernel(x, x), x + x):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("operands", "words"),
    [
        ((), "add takes 2 operands (x: f32[M, N], y: f32[M, N]), and got 0"),
        ((numbers(4, 64),), "and got 1"),
        ((numbers(4, 64), 3.0), "y is a float, and a kernel takes arrays"),
        ((numbers(4, 64), [1.0]), "y is a list"),
        ((numbers(4, 64), numbers(4, 64).astype(np.float64)), "y holds float64"),
        ((numbers(4, 64), numbers(64, 4).T), "pass np.ascontiguousarray(y)"),
    ],
)
def test_wrong_operands(operands: tuple[object, ...], words: str) -> None:
    kernel = made(add)
    for call in (kernel, kernel.prepare):
        with pytest.raises(ArgumentError) as caught:
            call(*operands)
        assert words in str(caught.value)


def test_wrong_outs() -> None:
    kernel, x = made(affine), numbers(4, 64)
    with pytest.raises(ArgumentError, match=r"affine has 2 outputs \(.*\), and out= holds 1"):
        kernel(x, 1.0, x[:, :1].copy(), 0, out=x)
    locked = np.zeros((4, 64), np.float32)
    locked.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        made(add)(x, x, out=locked)


def test_arrays_elsewhere() -> None:
    x = ArrayView(4096, f32, (4, 64), (64, 1), ("cuda", 0))
    with pytest.raises(ArgumentError, match=r"on cuda:0, and add was made for the emulator\n  pass arrays on the CPU"):
        made(add)(x, x)


def test_a_plan_out_of_order_is_caught() -> None:
    source = render(plan(add.graph, H200))
    params = (source.plan.params[1], source.plan.params[0], *source.plan.params[2:])
    broken = replace(source, plan=replace(source.plan, params=params))
    with pytest.raises(KernelError, match="the plan takes"):
        Kernel(broken, None, EmulatorDevice(H200), lambda layout: (broken, None))


def test_the_emulators_findings_pass_through() -> None:
    source = render(plan(add.graph, H200))
    broken = replace(source, text=source.text.replace("(out_ptr + col,", "(out_ptr + col + 4096,"))
    assert broken.text != source.text
    kernel = Kernel(broken, None, EmulatorDevice(H200), lambda layout: (broken, None))
    with pytest.raises(KernelFault, match="out-of-bounds"):
        kernel(numbers(3, 64), numbers(3, 64))


# ---------------------------------------------------------------- prepared calls


def test_prepared_calls_repeat() -> None:
    kernel, x, y = made(add), torch.from_numpy(numbers(4, 64)), torch.from_numpy(numbers(4, 64, seed=1))
    prepared = kernel.prepare(x, y)
    prepared()
    assert torch.equal(prepared.result, x + y)
    x += 1  # the addresses are what is kept
    prepared()
    assert torch.equal(prepared.result, x + y)
    assert prepared.numbers["x_ptr"] == x.data_ptr()
    assert prepared.numbers["n"] == 256
    assert prepared.plan is kernel.plan


def test_prepared_calls_keep_their_arrays() -> None:
    kernel = made(add)
    prepared = kernel.prepare(numbers(4, 64), numbers(4, 64, seed=1))
    gc.collect()
    prepared()
    assert np.array_equal(prepared.result, numbers(4, 64) + numbers(4, 64, seed=1))


def test_raw_memory_in_and_out() -> None:
    kernel = made(biased)
    device = kernel.device
    x, bias = numbers(3, 5, 64), numbers(64, seed=1)
    memory = device.empty(4 * 3 * 5 * 64 + 64)
    memory.write(x, 20)
    vector = device.empty(256)
    vector.write(bias)
    out = kernel(memory.view(f32, (3, 5, 64), offset=20), vector.view(f32, (64,)))
    assert isinstance(out, ArrayView)
    assert np.array_equal(out.numpy(), x - bias)
    given = device.empty(x.nbytes)
    kernel(memory.view(f32, (3, 5, 64), offset=20), vector.view(f32, (64,)), out=given.view(f32, (3, 5, 64)))
    assert np.array_equal(given.read().view(np.float32).reshape(3, 5, 64), x - bias)


def test_repr_says_what_and_where() -> None:
    assert repr(made(add)) == "<Kernel add f32[M, N], f32[M, N] -> f32[M, N] for cuda:h200 on emulator>"


# ---------------------------------------------------------------- a GPU, pretended: the CPU's memory, emulated launches


class PretendGpu(EmulatorDevice):
    """An emulator that says it is a GPU, and notes what it is asked."""

    kind = "cuda"
    asynchronous = True

    def __init__(self, ordinal: int = 0, arch: str = "sm_90") -> None:
        super().__init__(H200)
        self.ordinal, self.arch, self.name, self.place = ordinal, arch, "pretended", ("cuda", ordinal)
        self.asked: list[tuple[object, ...]] = []

    def at(self, ordinal: int) -> PretendGpu:
        if ordinal > 2:
            raise MissingError(f"there is no cuda:{ordinal}")
        return PretendGpu(ordinal, arch="sm_80" if ordinal == 2 else "sm_90")

    def synchronize(self, stream: int | None = None) -> None:
        self.asked.append(("synchronize", stream))

    def order(self, stream: int, after: int) -> None:
        self.asked.append(("order", stream, after))

    def load(self, source: Text, binary: object) -> Any:
        loaded = super().load(source, None)
        assert isinstance(loaded, EmulatedLoaded)
        device = self

        class Noting:
            def launch(self, launch: Launch, pointers: Any, values: Any, stream: int) -> None:
                device.asked.append(("launch", stream))
                loaded.launch(launch, pointers, values, stream)

        return Noting()


class OnGpu:
    """Memory of the CPU that an unknown library says is on a GPU."""

    def __init__(self, array: np.ndarray[Any, Any], ordinal: int = 0, stream: int | None = None) -> None:
        self.array = array
        self.device = type("Device", (), {"id": ordinal})()
        self.__cuda_array_interface__ = {**array.__array_interface__, "stream": stream, "version": 3}


def test_arrays_on_the_cpu_are_copied_there_and_back() -> None:
    gpu = PretendGpu()
    kernel = made(affine, device=gpu)
    x, row = numbers(4, 64), numbers(4, 1)
    y, top = kernel(x, 2, row, 1)
    assert np.array_equal(y, x * 2 + row + 1)
    assert gpu.asked == [("launch", 0), ("synchronize", 0)]
    tensors = kernel(torch.from_numpy(x)[::2], 2, torch.from_numpy(row)[::2], 1)
    assert np.array_equal(tensors[1].numpy(), top[::2])
    outs = (np.zeros((4, 80), np.float32)[:, 7:71], np.zeros((4, 1), np.float32))
    assert kernel(x, 2, row, 1, out=outs)[0] is outs[0]
    assert np.array_equal(outs[0], y)
    assert kernel(x[:0], 2, row[:0], 1)[0].shape == (0, 64)


def test_copied_calls_check_as_others_do() -> None:
    kernel, x = made(add, device=PretendGpu()), numbers(4, 64)
    with pytest.raises(ArgumentError, match="shares memory"):
        kernel(x[:3], x[:3], out=x[1:])
    wanted = x + x
    assert kernel(x, x, out=x) is x
    assert np.array_equal(x, wanted)
    with pytest.raises(ArgumentError, match="y on axis 0 has 3"):
        kernel(x, x[:3])
    with pytest.raises(ArgumentError, match="prepare takes arrays on pretended"):
        kernel.prepare(x, x)


def test_a_library_without_results_needs_out() -> None:
    gpu = PretendGpu()
    kernel, x, y = made(add, device=gpu), numbers(4, 64), numbers(4, 64, seed=1)
    with pytest.raises(ArgumentError, match="pass out="):
        kernel(OnGpu(x), OnGpu(y))
    out = OnGpu(np.zeros((4, 64), np.float32))
    assert kernel(OnGpu(x), OnGpu(y), out=out) is out
    assert np.array_equal(out.array, x + y)


def test_streams() -> None:
    gpu = PretendGpu()
    kernel, x = made(add, device=gpu), numbers(4, 64)
    out = OnGpu(np.zeros((4, 64), np.float32))

    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 1234

    for stream, address in ((None, 0), (77, 77), (Stream(), 1234), (ctypes.c_int, None), ("x", None), (True, None)):
        gpu.asked.clear()
        if address is None:
            with pytest.raises(ArgumentError, match="is no stream; pass a torch"):
                kernel(OnGpu(x), OnGpu(x), out=out, stream=stream)
            assert not gpu.asked
        else:
            kernel(OnGpu(x), OnGpu(x), out=out, stream=stream)
            assert gpu.asked == [("launch", address)]
    gpu.asked.clear()
    kernel(OnGpu(x, stream=5), OnGpu(x), out=out, stream=77)  # the producer says what fills its memory
    assert gpu.asked == [("order", 77, 5), ("launch", 77)]


def test_arrays_of_another_gpu_run_there() -> None:
    kernel, x = made(add, device=PretendGpu()), numbers(4, 64)
    out = OnGpu(np.zeros((4, 64), np.float32), 1)
    kernel(OnGpu(x, 1), OnGpu(x, 1), out=out)
    assert np.array_equal(out.array, x + x)
    assert {place for _, place in kernel.loaded} == {("cuda", 0), ("cuda", 1)}
    with pytest.raises(ArgumentError, match=r"x is on cuda:0 and y on cuda:1"):
        kernel(OnGpu(x, 0), OnGpu(x, 1), out=out)
    with pytest.raises(ArgumentError, match="can't run add: it is compiled for sm_90a"):
        kernel(OnGpu(x, 2), OnGpu(x, 2), out=OnGpu(x, 2))
    hip = ArrayView(4096, f32, (4, 64), contiguous_strides((4, 64)), ("hip", 0))
    with pytest.raises(ArgumentError, match="and add runs on pretended"):
        kernel(hip, hip)


# ---------------------------------------------------------------- compiling through the cache


@pytest.mark.parametrize("target", [H200, MI300X], ids=str)
def test_compiled_once(target: Target, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = render(plan(add.graph, target))
    cache = KernelCache(tmp_path)
    try:
        first = compiled(source, cache)
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])
    with caplog.at_level(logging.DEBUG, "fusegen.cache"):
        assert compiled(source, cache) == first
    assert "hit: add for" in caplog.text


@pytest.mark.parametrize("called", ["kernel", "its method", "prepared"])
def test_torch_compile_breaks_its_graph_at_a_kernel(called: str) -> None:
    """And runs it as it is, whatever the kernel's calls go to meanwhile."""
    kernel = made(add)
    x, y = torch.randn(4, 64), torch.randn(4, 64)
    prepared = kernel.prepare(x, y)

    def function(x: Any, y: Any) -> Any:
        doubled = x * 2
        if called == "prepared":
            prepared()
            return doubled + prepared.result
        return (kernel if called == "kernel" else kernel.call)(doubled, y) + 1

    torch._dynamo.reset()
    compiled_by_torch = torch.compile(function, backend="eager")
    for rows in (4, 4, 4) if called == "prepared" else (4, 4, 4, 5, 5, 7):
        x, y = (x, y) if called == "prepared" else (torch.randn(rows, 64), torch.randn(rows, 64))
        assert torch.equal(compiled_by_torch(x, y), function(x, y))
    torch._dynamo.reset()
    if called == "kernel":
        with pytest.raises(torch._dynamo.exc.Unsupported, match="fusegen's kernels are not traced"):
            torch.compile(function, backend="eager", fullgraph=True)(x, y)
