"""Kernels on a GPU: every library's arrays, streams, graphs, alignments. `pytest -m gpu` runs only these."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import bf16, chain, dims, f16, f32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import ArgumentError, FusegenError, KernelError, MissingError
from fusegen.language.spec import Chain
from fusegen.planner import plan
from fusegen.planner.model import Layout, Source
from fusegen.runtime import guards, native
from fusegen.runtime.cache import KernelCache, compiled
from fusegen.runtime.devices import Device
from fusegen.runtime.emulated import EmulatorDevice
from fusegen.runtime.finding import find, present, target_of
from fusegen.runtime.kernel import Kernel
from fusegen.runtime.shortcuts import hand_on
from fusegen.targets import Target
from tests.chains_cut import mlp

pytestmark = pytest.mark.gpu

M, N = dims("M N")


@chain(M=64, N=512)
def residual_norm(x: f16[M, N], bias: f16[N], residual: f16[M, N], gamma: f16[N], beta: f16[N]) -> f16[M, N]:
    """Six arrays, as in a transformer's output."""
    return F.layernorm(residual + F.gelu(x + bias), gamma, beta, eps=1e-5)


@chain(M=64, N=512)
def add(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
    """Flat, and exact."""
    return x + y


@chain(M=64, N=512)
def affine(x: f32[M, N], scale: f32, row: f32[M, 1]) -> tuple[f32[M, N], f32[M, 1]]:
    """Two outputs and a run-time scalar."""
    y = x * scale + row
    return y, F.max(y)


@chain(M=64, N=512)
def doubled(x: bf16[M, N]) -> bf16[M, N]:
    """bfloat16, which has no type string of its own."""
    return x + x


@pytest.fixture(scope="module")
def target() -> Target:
    here = present()
    for gpu in here.gpus:
        if (found := target_of(gpu)) is not None:
            return found
    pytest.skip("no GPU that a target fits: `fusegen doctor` says why")


@pytest.fixture(scope="module")
def device(target: Target) -> Device:
    return find(target, "gpu")


@pytest.fixture(scope="module")
def torch(device: Device) -> Any:
    module = pytest.importorskip("torch", reason="torch is missing")
    if not module.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return module


@pytest.fixture
def cache(tmp_path: Any) -> KernelCache:
    return KernelCache(tmp_path)


def made(spec: Chain, target: Target, device: Device, cache: KernelCache) -> Kernel:
    def variants(layout: Layout) -> tuple[Source, Any]:
        source = render(plan(spec.graph, target, layout=layout))
        return source, compiled(source, cache)

    try:
        source, binary = variants(Layout())
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])
    return Kernel(source, binary, device, variants)


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).integers(-99, 99, shape).astype(np.float32)


def norm_operands(torch: Any, m: int = 64, n: int = 512) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float16)

    return [normal(m, n), normal(n), normal(m, n), normal(n), normal(n)]


def norm_reference(torch: Any, operands: list[Any]) -> Any:
    x, bias, residual, gamma, beta = (t.double() for t in operands)
    h = residual + torch.nn.functional.gelu(x + bias)
    return torch.nn.functional.layer_norm(h, (h.shape[-1],), gamma, beta, eps=1e-5)


# ---------------------------------------------------------------- torch


@pytest.mark.parametrize("m", [0, 1, 7, 64, 1000])
def test_torch(torch: Any, target: Target, device: Device, cache: KernelCache, m: int) -> None:
    kernel = made(residual_norm, target, device, cache)
    operands = norm_operands(torch, m)
    y = kernel(*operands)
    assert (y.device.type, y.dtype, tuple(y.shape)) == ("cuda", torch.float16, (m, 512))
    torch.testing.assert_close(y.double(), norm_reference(torch, operands), rtol=2e-3, atol=4e-3)
    out = torch.full_like(y, float("nan"))
    assert kernel(*operands, out=out) is out
    assert torch.equal(out, y)
    assert kernel.resources is not None


def test_scalars_and_two_outputs(torch: Any, target: Target, device: Device, cache: KernelCache) -> None:
    kernel = made(affine, target, device, cache)
    x, row = torch.from_numpy(numbers(64, 512)).cuda(), torch.from_numpy(numbers(64, 1)).cuda()
    for scale in (2, 0.5):
        y, top = kernel(x, scale, row)
        assert torch.equal(y, x * scale + row)
        assert torch.equal(top, (x * scale + row).amax(-1, keepdim=True))


@pytest.mark.parametrize("start", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("width", [512, 520, 523])
def test_slices_that_are_not_aligned(
    torch: Any, target: Target, device: Device, cache: KernelCache, start: int, width: int
) -> None:
    kernel = made(residual_norm, target, device, cache)
    operands = norm_operands(torch)
    wanted = kernel(*operands)
    for position in range(5):
        shifted = list(operands)
        tensor = operands[position]
        wide = torch.zeros(*tensor.shape[:-1], width + start, device="cuda", dtype=tensor.dtype)
        wide[..., start : start + 512] = tensor
        shifted[position] = wide[..., start : start + 512]
        torch.testing.assert_close(kernel(*shifted), wanted, rtol=2e-3, atol=2e-3)
    frame = torch.full((66, width + start), 7.0, device="cuda", dtype=torch.float16)
    kernel(*operands, out=frame[1:65, start : start + 512])
    torch.testing.assert_close(frame[1:65, start : start + 512], wanted, rtol=2e-3, atol=2e-3)
    frame[1:65, start : start + 512] = 7.0
    assert bool((frame == 7.0).all())


def test_more_than_32_bits_of_elements(torch: Any, target: Target, device: Device, cache: KernelCache) -> None:
    rows = 2**31 // 512 + 3
    if torch.cuda.mem_get_info()[0] < 4 * rows * 512 * 3 + (4 << 30):
        pytest.skip("needs 30 GiB of free GPU memory")
    kernel = made(add, target, device, cache)
    x = torch.ones(rows, 512, device="cuda")
    x[-1] = 5
    y = kernel(x, x)
    assert float(y[-1].min()) == 10
    assert float(y[-2].max()) == 2
    assert bool((y[:-1] == 2).all())


def test_the_current_stream(torch: Any, target: Target, device: Device, cache: KernelCache) -> None:
    """A kernel on a side stream reads what that stream wrote just before, behind a long wait."""
    kernel = made(add, target, device, cache)
    x = torch.zeros(64, 512, device="cuda")
    kernel(x, x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        y = kernel(x, x)
    side.synchronize()
    assert bool((y == 6).all())


@pytest.mark.parametrize("form", ["torch", "address"])
def test_a_stream_of_ones_choice(torch: Any, target: Target, device: Device, cache: KernelCache, form: str) -> None:
    kernel = made(add, target, device, cache)
    x = torch.zeros(64, 512, device="cuda")
    kernel(x, x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
    y = kernel(x, x, stream=side if form == "torch" else side.cuda_stream)
    side.synchronize()
    assert bool((y == 6).all())


def test_a_call_does_not_wait(torch: Any, target: Target, device: Device, cache: KernelCache) -> None:
    kernel = made(add, target, device, cache)
    x = torch.zeros(64, 512, device="cuda")
    kernel(x, x)
    torch.cuda.synchronize()
    before = time.perf_counter()
    torch.cuda._sleep(1_000_000_000)  # half a second
    kernel(x, x)
    returned = time.perf_counter() - before
    torch.cuda.synchronize()
    assert returned < 0.5 * (time.perf_counter() - before)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "new variant inside"])
def test_graph_capture(torch: Any, target: Target, device: Device, cache: KernelCache, aligned: bool) -> None:
    """Also of a variant that is first made while capturing."""
    kernel = made(add, target, device, cache)
    memory = torch.zeros(64 * 512 + 1, device="cuda")
    x = (memory[:-1] if aligned else memory[1:]).view(64, 512)
    y = torch.ones(64, 512, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = kernel(x, y)
        w = kernel(z, y)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((w == value + 2).all())


def test_a_kernel_as_a_graph(torch: Any, target: Target, device: Device, cache: KernelCache) -> None:
    kernel = made(add, target, device, cache)
    x, y = torch.randn(2, 64, 512, device="cuda").unbind()
    replay = kernel.graph(x, y)
    stream = torch.cuda.Stream()
    for turn in range(3):
        x.fill_(turn)
        stream.wait_stream(torch.cuda.current_stream())
        replay(stream if turn == 1 else None)
        torch.cuda.synchronize()
        assert torch.equal(replay.result, x + y)


def test_a_program_as_graphs(torch: Any, target: Target) -> None:
    """Two at the same time, on streams of their own, give what calls give; and torch captures a program's call."""
    program = fusegen.compile(mlp, target, on="gpu")
    assert isinstance(program, fusegen.Program)
    x, gate, up, down = (
        torch.randn(shape, device="cuda").bfloat16() for shape in ((24, 64), (96, 64), (96, 64), (64, 96))
    )
    other = torch.randn(200, 64, device="cuda").bfloat16()
    wanted = [program(each, gate, up, down) for each in (x, other)]
    replays = [program.graph(each, gate, up, down) for each in (x, other)]
    streams = [torch.cuda.Stream() for _ in replays]
    torch.cuda.synchronize()
    for _ in range(50):
        for replay, stream in zip(replays, streams, strict=True):
            replay(stream)
    torch.cuda.synchronize()
    for replay, result in zip(replays, wanted, strict=True):
        assert torch.equal(replay.result, result)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = program(x, gate, up, down)
        with pytest.raises(KernelError, match="one is being captured on this stream"):
            program.graph(x, gate, up, down)
    program(other, gate, up, down)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, wanted[0])


@pytest.fixture(params=["Python", "C", "C++"])
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What shortcuts are in, and torch's tensors read by."""
    found: Any = None
    try:
        if request.param != "Python":
            found = native.get()
        if request.param == "C++":
            pytest.importorskip("torch", reason="torch is missing")
            found.read_by(*map(guards.address, guards.get()))
    except FusegenError as error:
        pytest.skip(f"no shortcuts in {request.param}: {str(error).splitlines()[0]}")
    monkeypatch.setattr(native, "module", lambda: found)
    monkeypatch.setattr(guards, "begin", lambda module: None)


def unchecked(kernel: Kernel) -> None:
    """From now on every call must take a shortcut."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("this call took no shortcut")

    hand_on(kernel.shortcuts.made[-1], refuse)


def settled_add(torch: Any, kernel: Kernel, where: str = "cuda") -> tuple[Any, Any, Any]:
    """Operands and an output for which the kernel has shortcuts."""
    x, y, out = (
        torch.zeros(64, 512, device=where),
        torch.ones(64, 512, device=where),
        torch.empty(64, 512, device=where),
    )
    for _ in range(4):
        kernel(x, y)
        kernel(x, y, out=out)
    torch.cuda.synchronize()
    return x, y, out


def test_shortcuts_launch_on_the_current_stream(
    torch: Any, target: Target, device: Device, cache: KernelCache, language: None
) -> None:
    """A side stream is busy for long, then writes what the kernel reads: elsewhere the kernel would come too early."""
    kernel = made(add, target, device, cache)
    x, y, out = settled_add(torch, kernel)
    unchecked(kernel)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        z = kernel(x, y)
        kernel(z, y, out=out)
    side.synchronize()
    assert bool((z == 4).all())
    assert bool((out == 5).all())


@pytest.mark.parametrize("own_stream", [False, True], ids=["torch's stream", "the caller's stream"])
def test_graph_capture_of_shortcuts(
    torch: Any, target: Target, device: Device, cache: KernelCache, language: None, own_stream: bool
) -> None:
    """The launches are in the graph, with results allocated from its pool and with `out=`, and replay what is new."""
    kernel = made(add, target, device, cache)
    x, y, out = settled_add(torch, kernel)
    unchecked(kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream() if own_stream else None):
        z = kernel(x, y)
        kernel(z, y, out=out)
        w = kernel(out, y)
    out.fill_(-1.0)
    torch.cuda.synchronize()
    assert bool((out == -1).all())  # captured, and not launched beside
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((w == value + 3).all())


def test_shortcuts_from_a_thread_that_never_used_the_gpu(
    torch: Any, target: Target, device: Device, cache: KernelCache, language: None
) -> None:
    """It has no context, so that the plain launch is refused; the careful one is not."""
    kernel = made(add, target, device, cache)
    x, y, out = settled_add(torch, kernel)
    unchecked(kernel)
    out.fill_(-1.0)
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            kernel(x, y, out=out)
            found.append(kernel(x, y))
            device.synchronize()
        except BaseException as error:
            failed.append(error)

    found: list[Any] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    assert bool((out == 1).all())
    assert bool((found[0] == 1).all())


def test_results_of_shortcuts_are_in_torchs_memory(
    torch: Any, target: Target, device: Device, cache: KernelCache, language: None
) -> None:
    """Counted, handed out again when they are gone, and kept for a stream that they are lent to."""
    kernel = made(add, target, device, cache)
    x, y, _ = settled_add(torch, kernel)
    unchecked(kernel)
    before = torch.cuda.memory_allocated()
    kept = [kernel(x, y) for _ in range(5)]
    assert torch.cuda.memory_allocated() - before == 5 * x.nbytes
    assert len({z.data_ptr() for z in kept}) == 5
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
    side, place = torch.cuda.Stream(), kept[0].data_ptr()
    torch.cuda._sleep(50_000_000)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
    kept[0].record_stream(side)
    kept.clear()
    assert kernel(x, y).data_ptr() != place
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_shortcuts_without_memory(
    torch: Any, target: Target, device: Device, cache: KernelCache, language: None
) -> None:
    """Torch says so, as ever."""
    kernel = made(add, target, device, cache)
    x, y = torch.zeros(2, 1 << 17, 512, device="cuda")
    for _ in range(4):
        z = kernel(x, y)
    unchecked(kernel)
    del z
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (100 << 20)) / total)
        with pytest.raises(torch.OutOfMemoryError, match="allocate"):
            kernel(x, y)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert kernel(x, y).shape == x.shape
    torch.cuda.synchronize()


def test_threads_share_shortcuts(
    torch: Any, target: Target, device: Device, cache: KernelCache, language: None
) -> None:
    """Every thread launches with arguments of its own."""
    kernel = made(add, target, device, cache)
    settled_add(torch, kernel)
    unchecked(kernel)
    wrong: list[object] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(200):
                x, y = torch.full((2, 64, 512), float(turn), device="cuda")
                if not bool((kernel(x, y.mul_(number)) == turn * (1 + number)).all()):
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_shortcuts_of_two_gpus(torch: Any, target: Target, device: Device, cache: KernelCache, language: None) -> None:
    """Each GPU has its two, which the ever rarer chances to make one come to in a few rounds; calls on a GPU that is
    not the current one make none."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    kernel = made(add, target, device, cache)
    for current in (0, 1) * 3:
        with torch.cuda.device(current):
            for where in ("cuda:0", "cuda:1", "cuda:0"):
                x, y, out = settled_add(torch, kernel, where)
                z = kernel(x, y)
                assert str(z.device) == where
                kernel(z, y, out=out)
                torch.cuda.synchronize(where)
                assert bool((z == 1).all())
                assert bool((out == 2).all())
    assert len(kernel.shortcuts.made) == 4


def test_prepared_calls(torch: Any, target: Target, device: Device, cache: KernelCache, language: None) -> None:
    kernel = made(add, target, device, cache)
    x = torch.ones(64, 512, device="cuda")
    prepared = kernel.prepare(x, x)
    x.fill_(4.0)
    prepared()
    torch.cuda.synchronize()
    assert bool((prepared.result == 8).all())
    side = torch.cuda.Stream()
    for own in (False, True):
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            x.add_(1.0)
            prepared(side if own else None)
        side.synchronize()
        assert bool((prepared.result == 2 * x).all())


def test_a_thread_that_never_used_the_gpu(torch: Any, target: Target, device: Device, cache: KernelCache) -> None:
    kernel = made(add, target, device, cache)
    x = torch.ones(64, 512, device="cuda")
    prepared = kernel.prepare(x, x)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            prepared(stream=0)
            device.synchronize()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    assert bool((prepared.result == 2).all())


def test_many_threads(torch: Any, target: Target, device: Device, cache: KernelCache) -> None:
    kernel = made(add, target, device, cache)
    wrong: list[object] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(100):
                x = torch.full((number, 512), float(turn), device="cuda")
                if not bool((kernel(x, x) == 2 * turn).all()):
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors_of_two_places(torch: Any, target: Target, device: Device, cache: KernelCache) -> None:
    kernel = made(add, target, device, cache)
    x = torch.ones(64, 512)
    with pytest.raises(ArgumentError, match="x is on the CPU and y on"):
        kernel(x, x.cuda())


def test_the_second_gpu(torch: Any, target: Target, device: Device, cache: KernelCache) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    kernel = made(add, target, device, cache)
    x = torch.ones(64, 512, device="cuda:1")
    y = kernel(x, x)
    assert y.device.index == 1
    assert bool((y == 2).all())


def test_calls_are_cheap(torch: Any, target: Target, device: Device, cache: KernelCache) -> None:
    """Six torch operands. Prints what it measures; the bound only catches a lost fast path."""
    kernel = made(residual_norm.at(M=8), target, device, cache)
    operands = norm_operands(torch, 8)
    out = kernel(*operands)
    prepared = kernel.prepare(*operands)
    took: dict[str, float] = {}
    calls: dict[str, Callable[[], object]] = {
        "result allocated": lambda: kernel(*operands),
        "out given": lambda: kernel(*operands, out=out),
        "prepared": prepared,
    }
    for name, call in calls.items():
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            before = time.perf_counter()
            for _ in range(200):
                call()
            best = min(best, (time.perf_counter() - before) / 200)
        took[name] = best * 1e6
    sys.stdout.write("".join(f"{name}: {us:.2f} us a call\n" for name, us in took.items()))
    assert max(took.values()) < 40


# ---------------------------------------------------------------- the other libraries


def test_numpy_goes_there_and_back(target: Target, device: Device, cache: KernelCache) -> None:
    kernel = made(add, target, device, cache)
    x, y = numbers(64, 512), numbers(64, 512, seed=1)
    z = kernel(x[::2], y[::2])
    assert isinstance(z, np.ndarray)
    assert np.array_equal(z, x[::2] + y[::2])
    out = np.zeros((64, 600), np.float32)
    kernel(x, y, out=out[:, 3:515])
    assert np.array_equal(out[:, 3:515], x + y)
    b = np.ones((64, 512), bf16.numpy)
    assert np.array_equal(made(doubled, target, device, cache)(b), b + b)


def test_raw_memory(target: Target, device: Device, cache: KernelCache) -> None:
    kernel = made(add, target, device, cache)
    x = numbers(64, 512)
    memory = device.empty(x.nbytes * 2 + 64)
    memory.write(np.full(memory.nbytes, 0xAA, np.uint8))
    memory.write(x, 4)
    v = memory.view(f32, (64, 512), offset=4)
    out = memory.view(f32, (64, 512), offset=x.nbytes + 36)
    kernel(v, v, out=out)
    device.synchronize()
    raw = memory.read()
    assert np.array_equal(raw[x.nbytes + 36 : -28].view(np.float32).reshape(64, 512), x + x)
    assert bool((raw[-28:] == 0xAA).all())
    assert bool((raw[x.nbytes + 4 : x.nbytes + 36] == 0xAA).all())


def test_the_emulator_agrees(target: Target, device: Device, cache: KernelCache) -> None:
    kernel = made(residual_norm, target, device, cache)
    try:
        emulated = Kernel(kernel.source, None, EmulatorDevice(target, check=False), kernel.make_variant)
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])
    rng = np.random.default_rng(0)
    shapes = [(5, 512), (512,), (5, 512), (512,), (512,)]
    operands = [rng.standard_normal(s).astype(np.float16) for s in shapes]
    np.testing.assert_allclose(
        kernel(*operands).astype(np.float32), emulated(*operands).astype(np.float32), rtol=2e-3, atol=2e-3
    )


def test_cupy(target: Target, device: Device, cache: KernelCache) -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is missing")
    kernel = made(add, target, device, cache)
    x, y = cupy.asarray(numbers(64, 512)), cupy.asarray(numbers(64, 512, seed=1))
    for _ in range(2):
        z = kernel(x, y)
        assert isinstance(z, cupy.ndarray)
        assert bool((z == x + y).all())
    assert bool((kernel(x[::3], y[::3]) == x[::3] + y[::3]).all())
    out = cupy.zeros((64, 600), cupy.float32)
    kernel(x, y, out=out[:, 1:513])
    assert bool((out[:, 1:513] == x + y).all())
    with cupy.cuda.Stream(non_blocking=True) as stream:
        a = x * 2
        z = kernel(a, y)
        stream.synchronize()
    assert bool((z == 2 * x + y).all())
    z = kernel(x, y, stream=stream)
    stream.synchronize()
    assert bool((z == x + y).all())


def test_jax(target: Target, device: Device, cache: KernelCache) -> None:
    jax = pytest.importorskip("jax", reason="jax is missing")
    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("jax sees no GPU")
    kernel = made(add, target, device, cache)
    x, y = jax.device_put(numbers(64, 512), gpu), jax.device_put(numbers(64, 512, seed=1), gpu)
    for _ in range(3):
        a = x * 2
        z = kernel(a, y)
        assert isinstance(z, jax.Array)
        assert np.array_equal(np.asarray(z), numbers(64, 512) * 2 + numbers(64, 512, seed=1))
    b = jax.numpy.ones((64, 512), jax.numpy.bfloat16, device=gpu)
    assert bool((made(doubled, target, device, cache)(b) == 2).all())
    with pytest.raises(ArgumentError, match="immutable"):
        kernel(x, y, out=z)


def test_torch_and_cupy_together(torch: Any, target: Target, device: Device, cache: KernelCache) -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is missing")
    kernel = made(add, target, device, cache)
    x = torch.from_numpy(numbers(64, 512)).cuda()
    with cupy.cuda.Stream(non_blocking=True):
        y = cupy.asarray(numbers(64, 512, seed=1)) * 2
        z = kernel(x, y)
    assert np.array_equal(z.cpu().numpy(), numbers(64, 512) + 2 * numbers(64, 512, seed=1))
