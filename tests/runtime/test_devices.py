"""Devices: which GPU runs what, memory, and the drivers' calls, with a driver that only pretends."""

from __future__ import annotations

import ctypes
import math
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f16, f32, i32
from fusegen.compiling import Binary, Resources
from fusegen.emitting.rendering import render
from fusegen.errors import KernelError, MissingError, RequestError
from fusegen.planner import plan
from fusegen.planner.model import Layout, Param, RowPlan, Source
from fusegen.planner.products.wgmma_rule import wgmma
from fusegen.runtime import amd, finding, nvidia
from fusegen.runtime.arrays import CPU
from fusegen.runtime.devices import Device, Gpu, Launch, Mapped, Sending, runs
from fusegen.runtime.emulated import EmulatorDevice
from fusegen.runtime.finding import find, matching, present, target_of
from fusegen.runtime.gpu import Arguments
from fusegen.runtime.shortcuts import launch_lines
from fusegen.targets import (
    A100,
    B200,
    B300,
    H100,
    H200,
    L40S,
    MI210,
    MI250X,
    MI300A,
    MI300X,
    R9700,
    RTX5090,
    RTXPRO6000,
    RX7900XTX,
    RX9070XT,
    W7900,
    target,
)
from tests.language.test_products import bias_gelu

M, N = dims("M N")


@chain(M=4, N=64)
def scaled(x: f32[M, N], scale: f32, y: f32[M, N]) -> f32[M, N]:
    """A scalar between two arrays."""
    return x * scale + y


@chain(M=4, N=64)
def added(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
    """No scalar."""
    return x + y


SOURCE = Source(plan(scaled.graph, H200), "// the text", "", "scaled.cu")
PLAIN_SOURCE = Source(plan(added.graph, H200), "// the text", "", "added.cu")
HIP_SOURCE = Source(plan(scaled.graph, MI300X), "// the text", "", "scaled.hip")


def binary(source: Source) -> Binary:
    numbers = Resources(32, 0, 0, 0, 0, 0, 0, 4)
    return Binary(source.plan.target, source.plan.name, 128, b"code", "", "none", 0.0, numbers)


# ---------------------------------------------------------------- who runs what


@pytest.mark.parametrize(
    ("arch", "native", "can"),
    [
        ("sm_80", "sm_80", True),
        ("sm_80", "sm_86", True),
        ("sm_80", "sm_89", True),
        ("sm_89", "sm_80", False),
        ("sm_80", "sm_90", False),
        ("sm_90", "sm_90", True),
        ("sm_90a", "sm_90", True),
        ("sm_90a", "sm_100", False),
        ("sm_100a", "sm_100", True),
        ("sm_100a", "sm_103", False),
        ("sm_100", "sm_103", True),
        ("sm_100", "sm_120", False),
    ],
)
def test_cubins_run_on(arch: str, native: str, can: bool) -> None:
    assert runs(arch, "cuda", native) is can


def test_code_objects_run_on_their_own_architecture() -> None:
    assert runs("gfx942", "hip", "gfx942")
    assert not runs("gfx942", "hip", "gfx90a")
    assert runs("gfx90a", "hip", "gfx90a:sramecc+:xnack-")


@pytest.mark.parametrize(
    ("vendor", "name", "arch", "sms", "expected"),
    [
        ("cuda", "NVIDIA H200", "sm_90", 132, H200),
        ("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, H100),
        ("cuda", "NVIDIA A100-SXM4-80GB", "sm_80", 108, A100),
        ("cuda", "NVIDIA L40S", "sm_89", 142, L40S),
        ("cuda", "NVIDIA B200", "sm_100", 148, B200),
        ("cuda", "NVIDIA B300 SXM6 AC", "sm_103", 148, B300),
        ("cuda", "NVIDIA GeForce RTX 5090", "sm_120", 170, RTX5090),
        ("cuda", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "sm_120", 188, RTXPRO6000),
        ("cuda", "NVIDIA GB10", "sm_121", 48, RTX5090),
        ("cuda", "NVIDIA GeForce RTX 3090", "sm_86", 82, A100),
        ("cuda", "Tesla V100", "sm_70", 80, None),
        ("hip", "AMD Instinct MI300X", "gfx942", 304, MI300X),
        ("hip", "AMD Instinct MI300A", "gfx942", 228, MI300A),
        ("hip", "AMD gfx942", "gfx942", 304, MI300X),
        ("hip", "AMD Instinct MI250X", "gfx90a", 110, MI250X),
        ("hip", "AMD Instinct MI210", "gfx90a", 104, MI210),
        ("hip", "AMD Radeon RX 7900 XTX", "gfx1100", 48, RX7900XTX),  # HIP counts pairs of compute units
        ("hip", "AMD Radeon PRO W7900", "gfx1100", 48, W7900),
        ("hip", "AMD Radeon RX 7900 XT", "gfx1100", 42, RX7900XTX),
        ("hip", "AMD Radeon RX 9070 XT", "gfx1201", 32, RX9070XT),
        ("hip", "AMD Radeon AI PRO R9700", "gfx1201", 32, R9700),
        ("hip", "AMD Radeon RX 7800 XT", "gfx1101", 30, None),  # a code object runs on its own architecture alone
        ("hip", "AMD Radeon RX 9060 XT", "gfx1200", 16, None),
    ],
)
def test_target_of_a_gpu(vendor: str, name: str, arch: str, sms: int, expected: object) -> None:
    assert target_of(Gpu(vendor, 0, name, arch, 1 << 36, sms)) == expected


HERE = (Gpu("cuda", 0, "NVIDIA A100", "sm_80", 80 << 30, 108), Gpu("cuda", 1, "NVIDIA H200", "sm_90", 141 << 30, 132))


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...]) -> None:
    def gpus_of(vendor: str) -> tuple[Gpu, ...]:
        if found := tuple(gpu for gpu in gpus if gpu.vendor == vendor):
            return found
        raise MissingError(f"no {vendor} here")

    monkeypatch.setattr(finding, "gpus_of", gpus_of)


def test_matching_picks_by_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, HERE)
    assert matching(H200) == HERE[1:]
    assert matching(A100) == HERE[:1]
    assert matching(MI300X) == ()
    assert (present().gpus, present().missing) == (HERE, {"hip": "no hip here"})


def test_find(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, HERE)
    found = []
    monkeypatch.setattr(finding, "gpu_device", lambda t, ordinal: found.append((t.name, ordinal)))
    find(H200)
    find(H200, "gpu")
    find(H200, "gpu:1")
    assert found == [("cuda:h200", 1)] * 3
    assert find(MI300X).kind == "emulator"
    assert find(H200, "emulator").kind == "emulator"


@pytest.mark.parametrize(
    ("name", "on", "words"),
    [
        ("cuda:b200", "gpu", ["no GPU here runs cuda:b200 (sm_100a)", "cuda:1 NVIDIA H200, sm_90, 141 GiB",
                              "compile for cuda:a100 or cuda:h200, or use the emulator, which runs"]),
        ("cuda:h200", "gpu:0", ["no GPU with number 0 here runs cuda:h200"]),
        ("hip:mi300x", "gpu", ["no GPU here runs hip:mi300x", "found: no hip here", "  use the emulator, which runs"]),
    ],
)  # fmt: skip
def test_find_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch, name: str, on: str, words: list[str]) -> None:
    pretend_gpus(monkeypatch, HERE)
    with pytest.raises(MissingError) as caught:
        find(target(name), on)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("here", "name"), [(True, "emulator"), (False, "emulator (fast build)")])
def test_find_says_which_emulator(monkeypatch: pytest.MonkeyPatch, here: bool, name: str) -> None:
    """With zig or clang++ alone there is no checking build: the fast one serves, under its own name."""
    monkeypatch.setattr("fusegen.emulator.toolchain.can_check", lambda: here)
    assert str(find(H200, "emulator")) == name
    assert str(find(H200, "emulator", check=True)) == "emulator"


def test_find_refuses_what_is_no_device() -> None:
    with pytest.raises(RequestError, match="'tpu' names no device; say auto, gpu"):
        find(H200, "tpu")


def test_present_never_raises() -> None:
    here = present()
    assert {gpu.vendor for gpu in here.gpus} | set(here.missing) == {"cuda", "hip"}


# ---------------------------------------------------------------- the drivers, pretended


Noted = list[Callable[[int], tuple[Any, ...]]]


class Heap:
    """Memory that a pretended driver gives out, and a log of its calls."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.calls: list[tuple[object, ...]] = []
        self.status = 0
        self.launched: list[tuple[Any, ...]] = []
        self.params = SOURCE.plan.params
        self.streams: list[int] = []
        self.captured: dict[int, Noted] = {}  # by the stream that notes it
        self.graphs: dict[int, Noted] = {}

    def allocate(self, nbytes: int) -> int:
        block = (ctypes.c_char * (nbytes + 256))()
        address = -(-ctypes.addressof(block) // 256) * 256
        self.blocks[address] = block
        return address

    def launch(self, *arguments: Any) -> None:
        """Note the launch and the arguments behind the table: pointers, numbers, 64-bit integers."""
        function, blocks, _, _, threads, _, _, shared, stream, table = arguments[:10]
        slots = (ctypes.c_void_p * len(self.params)).from_address(table)
        values = []
        for param, slot in zip(self.params, slots, strict=True):
            kind = ctypes.c_float if param.kind == "value" else ctypes.c_longlong
            values.append(kind.from_address(slot).value)
        self.note(stream, lambda on: (function, blocks, threads, shared, on, values))

    def note(self, stream: int, launch: Callable[[int], tuple[Any, ...]]) -> None:
        """A launch on `stream`, which may only be noting it."""
        if stream in self.captured:
            self.captured[stream].append(launch)
        else:
            self.launched.append(launch(stream))

    def new_stream(self, flags: int) -> int:
        assert flags == 1, "it waits for no other"
        self.streams.append(1000 + len(self.streams))
        return self.streams[-1]

    def begin(self, stream: int, mode: Any) -> None:
        assert mode.name.lower().replace("_", "").endswith("threadlocal")
        self.captured[stream] = []

    def instantiate(self, graph: Noted, flags: int) -> int:
        assert not flags
        self.graphs[len(self.graphs) + 1] = graph
        return len(self.graphs)

    def replay(self, graph: int, stream: int) -> None:
        self.launched += [launch(stream) for launch in self.graphs[graph]]


class FakeCuda(Heap):
    """Enough of cuda.bindings.driver; enumerations are the real ones."""

    def __init__(self, real: Any, gpus: int = 1) -> None:
        super().__init__()
        self.real, self.gpus = real, gpus
        self.contexts: list[object] = []
        self.room = 15  # clusters that it holds at once, and blocks that an SM does
        self.fail_outside = False  # a launch outside of a pushed context fails, as on a thread without one

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def result(self, *values: Any) -> tuple[Any, ...]:
        return (self.real.CUresult(self.status), *values)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return self.result()

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return self.result(self.gpus)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return self.result(ordinal)

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return self.result(b"NVIDIA H200" + bytes(length - 11))

    def cuDeviceTotalMem(self, device: int) -> tuple[Any, ...]:
        return self.result(141 << 30)

    def cuDeviceGetAttribute(self, which: Any, device: int) -> tuple[Any, ...]:
        values = {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132}
        return self.result(values[which.name.removeprefix("CU_DEVICE_ATTRIBUTE_")])

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return self.result(f"context {device}")

    def cuCtxPushCurrent(self, context: object) -> tuple[Any, ...]:
        self.contexts.append(context)
        return (self.real.CUresult(0),)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return (self.real.CUresult(0), self.contexts.pop())

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        self.calls.append(("capture mode", mode.name))
        return (self.real.CUresult(0), self.real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)

    def cuModuleLoadData(self, code: bytes) -> tuple[Any, ...]:
        self.calls.append(("load", code, tuple(self.contexts)))
        return self.result("module")

    def cuModuleGetFunction(self, module: object, name: bytes) -> tuple[Any, ...]:
        return self.result(f"{module}.{name.decode()}")

    def cuFuncSetAttribute(self, function: object, which: Any, value: int) -> tuple[Any, ...]:
        self.calls.append(("attribute", which.name, value))
        return self.result()

    def cuOccupancyMaxActiveClusters(self, function: object, config: Any) -> tuple[Any, ...]:
        size = config.attrs[0].value.clusterDim
        self.calls.append(
            ("clusters", (size.x, size.y, size.z), config.gridDimX, config.blockDimX, config.sharedMemBytes)
        )
        return self.result(self.room)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, *asked: Any) -> tuple[Any, ...]:
        self.calls.append(("blocks", *asked))
        return self.result(self.room)

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        return self.result(self.allocate(nbytes) if not self.status else 0)

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        del self.blocks[address]
        return self.result()

    def cuMemcpyHtoD(self, to: int, source: int, nbytes: int) -> tuple[Any, ...]:
        ctypes.memmove(to, source, nbytes)
        return self.result()

    def cuMemcpyDtoH(self, to: int, source: int, nbytes: int) -> tuple[Any, ...]:
        ctypes.memmove(to, source, nbytes)
        return self.result()

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        self.calls.append(("synchronize", tuple(self.contexts)))
        return self.result()

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        self.calls.append(("synchronize stream", stream))
        return self.result()

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        return self.result("event")

    def cuEventRecord(self, event: object, stream: int) -> tuple[Any, ...]:
        self.calls.append(("record", stream))
        return self.result()

    def cuStreamWaitEvent(self, stream: int, event: object, flags: int) -> tuple[Any, ...]:
        self.calls.append(("wait", stream))
        return self.result()

    def cuEventDestroy(self, event: object) -> tuple[Any, ...]:
        return self.result()

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        return self.result(self.new_stream(flags))

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        self.streams.remove(stream)
        return self.result()

    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, ...]:
        return self.result(self.real.CUstreamCaptureStatus(int(stream in self.captured)))

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> tuple[Any, ...]:
        self.begin(stream, mode)
        return self.result()

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        return self.result(self.captured.pop(stream))

    def cuGraphInstantiate(self, graph: Noted, flags: int) -> tuple[Any, ...]:
        return self.result(self.instantiate(graph, flags))

    def cuGraphDestroy(self, graph: Noted) -> tuple[Any, ...]:
        return self.result()

    def cuGraphLaunch(self, graph: int, stream: int) -> tuple[Any, ...]:
        if self.fail_outside and not self.contexts:
            return (self.real.CUresult(201),)
        self.replay(graph, stream)
        return self.result()

    def cuGraphExecDestroy(self, graph: int) -> tuple[Any, ...]:
        del self.graphs[graph]
        return self.result()

    def cuGetErrorName(self, code: Any) -> tuple[Any, ...]:
        return (self.real.CUresult(0), code.name.encode())

    def cuGetErrorString(self, code: Any) -> tuple[Any, ...]:
        return (self.real.CUresult(0), b"the driver's words")

    def cuLaunchKernel(self, *arguments: Any) -> tuple[Any, ...]:
        if self.fail_outside and not self.contexts:
            return (self.real.CUresult(201),)
        self.launch(*arguments)
        self.calls.append(("launch", tuple(self.contexts)))
        return self.result()


class FakeHip(Heap):
    """Enough of hip.hip; enumerations and structures are the real ones."""

    def __init__(self, real: Any, gpus: int = 1) -> None:
        super().__init__()
        self.real, self.gpus, self.current = real, gpus, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def result(self, *values: Any) -> tuple[Any, ...]:
        return (self.real.hipError_t(self.status), *values)

    def hipGetDeviceCount(self) -> tuple[Any, ...]:
        return self.result(self.gpus)

    def hipDeviceProp_t(self) -> Any:
        class Properties:
            name, gcnArchName = b"AMD Instinct MI300X", b"gfx942:sramecc+:xnack-"
            totalGlobalMem, multiProcessorCount = 192 << 30, 304

        return Properties()

    def hipGetDeviceProperties(self, properties: object, ordinal: int) -> tuple[Any, ...]:
        return self.result()

    def hipGetDevice(self) -> tuple[Any, ...]:
        return self.result(self.current)

    def hipSetDevice(self, ordinal: int) -> tuple[Any, ...]:
        self.current = ordinal
        return (self.real.hipError_t(0),)

    def hipModuleLoadData(self, code: bytes) -> tuple[Any, ...]:
        self.calls.append(("load", code, self.current))
        return self.result("module")

    def hipModuleGetFunction(self, module: object, name: bytes) -> tuple[Any, ...]:
        return self.result(f"{module}.{name.decode()}")

    def hipMalloc(self, nbytes: int) -> tuple[Any, ...]:
        return self.result(self.allocate(nbytes) if not self.status else None)

    def hipFree(self, address: int) -> tuple[Any, ...]:
        del self.blocks[address]
        return self.result()

    def hipMemcpy(self, to: Any, source: Any, nbytes: int, kind: Any) -> tuple[Any, ...]:
        start, end = (x if isinstance(x, int) else x.ctypes.data for x in (source, to))
        ctypes.memmove(end, start, nbytes)
        self.calls.append(("copy", kind.name))
        return self.result()

    def hipDeviceSynchronize(self) -> tuple[Any, ...]:
        self.calls.append(("synchronize", self.current))
        return self.result()

    def hipStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        self.calls.append(("synchronize stream", stream))
        return self.result()

    def hipEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        return self.result("event")

    def hipEventRecord(self, event: object, stream: int) -> tuple[Any, ...]:
        self.calls.append(("record", stream))
        return self.result()

    def hipStreamWaitEvent(self, stream: int, event: object, flags: int) -> tuple[Any, ...]:
        self.calls.append(("wait", stream))
        return self.result()

    def hipEventDestroy(self, event: object) -> tuple[Any, ...]:
        return self.result()

    def hipStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        return self.result(self.new_stream(flags))

    def hipStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        self.streams.remove(stream)
        return self.result()

    def hipStreamIsCapturing(self, stream: int) -> tuple[Any, ...]:
        return self.result(self.real.hipStreamCaptureStatus(int(stream in self.captured)))

    def hipStreamBeginCapture(self, stream: int, mode: Any) -> tuple[Any, ...]:
        self.begin(stream, mode)
        return self.result()

    def hipStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        return self.result(self.captured.pop(stream))

    def hipGraphInstantiateWithFlags(self, graph: Noted, flags: int) -> tuple[Any, ...]:
        return self.result(self.instantiate(graph, flags))

    def hipGraphDestroy(self, graph: Noted) -> tuple[Any, ...]:
        return self.result()

    def hipGraphLaunch(self, graph: int, stream: int) -> tuple[Any, ...]:
        self.replay(graph, stream)
        return self.result()

    def hipGraphExecDestroy(self, graph: int) -> tuple[Any, ...]:
        del self.graphs[graph]
        return self.result()

    def hipGetErrorString(self, code: Any) -> tuple[Any, ...]:
        return (self.real.hipError_t(0), "the runtime's words")

    def hipModuleLaunchKernel(self, *arguments: Any) -> tuple[Any, ...]:
        self.launch(*arguments)
        self.calls.append(("launch", self.current))
        return self.result()


def fake_nvidia(monkeypatch: pytest.MonkeyPatch, gpus: int) -> tuple[FakeCuda, Any]:
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda.bindings is missing: pip install cuda-bindings")
    fake = FakeCuda(real, gpus)
    monkeypatch.setattr(nvidia, "driver", lambda: fake)
    nvidia.device.cache_clear()
    return fake, nvidia.device


def fake_amd(monkeypatch: pytest.MonkeyPatch, gpus: int) -> tuple[FakeHip, Any]:
    real = pytest.importorskip("hip.hip", reason="hip-python is missing: pip install hip-python")
    fake = FakeHip(real, gpus)
    monkeypatch.setattr(amd, "runtime", lambda: fake)
    amd.device.cache_clear()
    return fake, amd.device


FAKES = {"cuda": fake_nvidia, "hip": fake_amd}


@pytest.fixture(params=["cuda", "hip"])
def vendor(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    nvidia.device.cache_clear()
    amd.device.cache_clear()


def source_of(vendor: str) -> Source:
    return SOURCE if vendor == "cuda" else HIP_SOURCE


def zeros(source: Source) -> tuple[int, ...]:
    """As many extents and strides as the kernel takes."""
    return tuple(0 for p in source.plan.params if p.kind in ("extent", "stride"))


def test_listing(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAKES[vendor](monkeypatch, 2)
    gpus = finding.gpus_of(vendor)
    assert [(g.ordinal, g.name.split()[-1], g.arch, g.sms) for g in gpus] == (
        [(0, "H200", "sm_90", 132), (1, "H200", "sm_90", 132)]
        if vendor == "cuda"
        else [(0, "MI300X", "gfx942", 304), (1, "MI300X", "gfx942", 304)]
    )
    assert [g.ordinal for g in matching(source_of(vendor).plan.target)] == [0, 1]


def test_no_gpu_is_missing(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAKES[vendor](monkeypatch, 0)
    with pytest.raises(MissingError):
        finding.gpus_of(vendor)
    assert find(source_of(vendor).plan.target).kind == "emulator"


def test_a_launch_hands_over_every_argument(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = FAKES[vendor](monkeypatch, 1)
    device: Device = device_of(0)
    source = source_of(vendor)
    loaded = device.load(source, binary(source))
    numbers = tuple(range(2**40, 2**40 + len(zeros(source))))
    loaded.launch(Launch(77, numbers, ()), (2**47 + 1, 2**47 + 2, 2**47 + 3), (1.5,), 99)
    assert [p.kind for p in source.plan.params][:4] == ["pointer", "value", "pointer", "pointer"]
    (launched,) = fake.launched
    assert launched == (
        "module.scaled", 77, source.plan.threads, 0, 99, [2**47 + 1, 1.5, 2**47 + 2, 2**47 + 3, *numbers]
    )  # fmt: skip


def address_of(argument: Any) -> int:
    """What ctypes makes a pointer of."""
    return ctypes.addressof(argument._obj) if argument else 0


def start_of(fake: Heap, status: int) -> Callable[..., int]:
    """cuLaunchKernelEx, pretended: notes what it finds in memory after other threads had their turn."""

    def start(*arguments: Any) -> int:
        time.sleep(0)
        config, function, table, extra = map(address_of, arguments)
        if not status:
            found = nvidia.Config.from_address(config)
            assert not extra
            assert (list(found.grid[1:]), list(found.block[1:]), found.attributes) == ([1, 1], [1, 1], None)
            fake.launch(
                function, found.grid[0], 1, 1, found.block[0], 1, 1, found.shared_bytes, found.stream or 0, table
            )
        return status

    return start


def sender(sending: Sending, *values: str) -> Callable[..., None]:
    """A function of the lines, as a shortcut has them: two inputs, an output, and numbers."""
    lines = ["sent = stream, x, y, z", *launch_lines(sending, ["x", "y", "z"], values, ())]
    names: dict[str, Any] = dict(sending.names)
    exec(f"def send({', '.join(['stream, x, y, z', *values])}):\n" + "".join(f"    {line}\n" for line in lines), names)
    made: Callable[..., None] = names["send"]
    return made


@pytest.mark.parametrize("status", [0, 201], ids=["taken", "refused at first"])
def test_a_launch_as_lines_hands_over_every_argument(vendor: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plain launch is refused, the careful one follows."""
    fake, device_of = FAKES[vendor](monkeypatch, 1)
    monkeypatch.setattr(nvidia, "launcher", lambda: start_of(fake, status))
    source = source_of(vendor)
    loaded = device_of(0).load(source, binary(source))
    plain = vendor == "cuda" and not status
    if vendor == "cuda":
        loaded.function = 7
    numbers = tuple(range(2**40, 2**40 + len(zeros(source))))
    send = sender(loaded.sending(Launch(77, numbers, ())), "scale")
    for stream, turn in ((99, 1), (0, 2)):
        send(stream, 2**47 + turn, 2**47 + 8, 2**47 + 16, 1.5 * turn)
    values = [[2**47 + turn, 1.5 * turn, 2**47 + 8, 2**47 + 16, *numbers] for turn in (1, 2)]
    function = 7 if vendor == "cuda" else "module.scaled"
    assert fake.launched == [(function, 77, source.plan.threads, 0, s, v) for s, v in zip((99, 0), values, strict=True)]
    assert (("launch",) in [call[:1] for call in fake.calls]) is not plain


def test_a_launch_as_lines_places_the_maps_of_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of no others: one memory serves calls over different arrays."""
    _, device_of = fake_nvidia(monkeypatch, 1)
    found: list[bytes] = []

    def start(config: object, function: object, table: object, extra: None) -> int:
        places = (ctypes.c_void_p * 4).from_address(address_of(table))
        found.append(b" ".join(ctypes.string_at(places[i] or 0, 4) for i in (0, 1, 3)))
        return 0

    monkeypatch.setattr(nvidia, "launcher", lambda: start)
    monkeypatch.setattr(nvidia, "encoded", lambda given, address: f"{given.name}{address:3}".encode().ljust(128))
    source = render(next(iter(wgmma(bias_gelu.at(M=64, N=64, K=64).graph, H200, Layout()))))
    assert [p.kind for p in source.plan.params] == ["map", "map", "pointer", "map", "extent"]
    loaded = device_of(0).load(source, binary(source))
    loaded.function = 7
    maps = tuple(Mapped(n, i, bf16, (64, 64), (128,), (64, 64), 128) for n, i in (("x", 0), ("w", 1), ("o", 3)))
    sending = loaded.sending(Launch(1, (64,), (), maps))
    lines = ["sent = stream, x, w, b, o", *launch_lines(sending, ["x", "w", "b", "o"], (), ())]
    names: dict[str, Any] = dict(sending.names)
    exec("def send(stream, x, w, b, o):\n" + "".join(f"    {line}\n" for line in lines), names)
    for first in (16, 32, 32):
        names["send"](0, first, 48, 64, 80)
    assert found == [b"x 16 w 48 o 80", b"x 32 w 48 o 80", b"x 32 w 48 o 80"]


def test_the_driver_is_asked_for_a_map_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own order: the contiguous axis first (CUDA driver API, cuTensorMapEncodeTiled). So many are remembered."""
    asked: list[tuple[Any, ...]] = []

    def encode(to: int, kind: int, rank: int, base: int, *rest: Any) -> int:
        shape, strides, box, steps, *words = rest
        asked.append((to % 64, kind, rank, base, list(shape), list(strides)[: rank - 1], list(box), list(steps), words))
        ctypes.memset(to, base // 16, 128)
        return 0

    _, device_of = fake_nvidia(monkeypatch, 1)
    monkeypatch.setattr(nvidia, "encoder", lambda: encode)
    monkeypatch.setattr(nvidia, "MOST_MAPS", 2)
    given = Mapped("x_map", 0, bf16, (3, 300, 136), (81600, 272), (1, 128, 64), 128)
    arguments = Arguments([Param("map", "x_map", "x", dtype=bf16)])

    def placed(address: int) -> int:
        arguments.place_maps((given,), (address,), device_of(0).encode)
        (first, *_), held = set(at := ctypes.string_at(arguments.maps[0], 128)), len(given.encoded)
        assert (len(set(at)), held <= 2) == (1, True)
        return first

    assert [placed(16 * number) for number in (7, 7, 8, 7, 8, 9, 9, 7)] == [7, 7, 8, 7, 8, 9, 9, 7]
    assert [each[3] // 16 for each in asked] == [7, 8, 9, 7], "two are remembered, then others"
    assert asked[0] == (0, 9, 3, 112, [136, 300, 3], [272, 81600], [64, 128, 1], [1, 1, 1], [0, 3, 3, 0])
    monkeypatch.setattr(nvidia, "encoder", lambda: lambda *given: 1)
    for _ in range(2):
        with pytest.raises(KernelError, match=r"the driver refuses the tensor map .*x_map"):
            placed(160)
    nvidia.device.cache_clear()


def test_a_driver_without_the_call_is_asked_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = fake_nvidia(monkeypatch, 1)
    monkeypatch.setattr(nvidia, "launcher", lambda: None)
    loaded = device_of(0).load(SOURCE, binary(SOURCE))
    sender(loaded.sending(Launch(77, zeros(SOURCE), ())), "scale")(5, 1, 2, 3, 0.5)
    assert [launched[4] for launched in fake.launched] == [5]
    nvidia.device.cache_clear()


@pytest.mark.parametrize("status", [0, 201], ids=["taken", "refused at first"])
def test_a_launch_as_memory_has_every_argument(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As C completes it: the stream, then addresses and numbers side by side."""
    fake, device_of = fake_nvidia(monkeypatch, 1)
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    start = kind(
        lambda *given: start_of(fake, status)(*(ctypes.byref(ctypes.c_char.from_address(g)) for g in given[:3]), None)
    )
    monkeypatch.setattr(nvidia, "launcher", lambda: start)
    loaded = device_of(0).load(SOURCE, binary(SOURCE))
    loaded.function = 2**47 + 7
    numbers = tuple(range(2**40, 2**40 + len(zeros(SOURCE))))
    mapped = Mapped("x", 0, bf16, (64, 64), (128,), (64, 64), 128)
    assert loaded.sending(Launch(77, numbers, (), (mapped,))).block is None
    make = loaded.sending(Launch(77, numbers, ())).block
    assert make is not None
    block = make()
    words = (ctypes.c_uint64 * (len(block.words) // 8)).from_buffer_copy(block.words)
    words[block.stream] = 99
    words[block.first : block.first + 3] = [2**47 + 1, 2**47 + 8, 2**47 + 16]
    ctypes.c_float.from_buffer(words, 8 * (block.first + 3)).value = 1.5
    table = (ctypes.c_void_p * len(block.places))(*(ctypes.addressof(words) + 8 * place for place in block.places))
    assert kind(block.start)(ctypes.addressof(words), block.function, ctypes.addressof(table), None) == status
    if status:
        loaded.function = "module.scaled"
        block.again(bytes(words))
    values = [2**47 + 1, 1.5, 2**47 + 8, 2**47 + 16, *numbers]
    assert fake.launched == [(loaded.function, 77, SOURCE.plan.threads, 0, 99, values)]
    nvidia.device.cache_clear()


def test_what_memory_holds_is_not_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = fake_nvidia(monkeypatch, 1)
    fake.params = PLAIN_SOURCE.plan.params
    monkeypatch.setattr(nvidia, "launcher", lambda: start_of(fake, 0))
    loaded = device_of(0).load(PLAIN_SOURCE, binary(PLAIN_SOURCE))
    loaded.function = 7
    sending = loaded.sending(Launch(3, zeros(PLAIN_SOURCE), ()))
    packed = []

    def counted(*what: Any) -> None:
        packed.append(what[2:])
        sending.names["pack"](*what)

    send = sender(replace(sending, names={**sending.names, "pack": counted}))
    calls = [(5, 1, 2, 3), (5, 1, 2, 3), (6, 1, 2, 3), (6, 1, 2, 4), (6, 1, 2, 4), (5, 1, 2, 3)]
    for call in calls:
        send(*call)
    assert [(stream, *values[:3]) for *_, stream, values in fake.launched] == calls
    assert packed == [calls[0], calls[2], calls[3], calls[5]]
    nvidia.device.cache_clear()


def test_numbers_that_are_equal_and_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = fake_nvidia(monkeypatch, 1)
    monkeypatch.setattr(nvidia, "launcher", lambda: start_of(fake, 0))
    loaded = device_of(0).load(SOURCE, binary(SOURCE))
    loaded.function = 7
    send = sender(loaded.sending(Launch(3, zeros(SOURCE), ())), "scale")
    for scale in (0.0, -0.0, 0.0):
        send(0, 1, 2, 3, scale)
    assert [math.copysign(1, launched[-1][1]) for launched in fake.launched] == [1, -1, 1]
    nvidia.device.cache_clear()


@pytest.mark.parametrize("source", [SOURCE, PLAIN_SOURCE], ids=["a number", "no number"])
def test_launches_as_lines_from_many_threads_do_not_mix(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = fake_nvidia(monkeypatch, 1)
    fake.params = source.plan.params
    monkeypatch.setattr(nvidia, "launcher", lambda: start_of(fake, 0))
    loaded = device_of(0).load(source, binary(source))
    loaded.function = 7
    sending = loaded.sending(Launch(3, zeros(source), ()))
    values = [param.tensor for param in source.plan.params if param.kind == "value"]
    send = sender(sending, *values)

    def work(number: int) -> None:
        for _ in range(200):
            send(number, number, number, number, *(float(number) for _ in values))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.launched) == 1600
    for *_, stream, values in fake.launched:
        assert {stream, *values[: len(source.plan.params) - len(zeros(source))]} == {stream}
    assert 1 <= len(sending.names["slots"]) <= 8
    nvidia.device.cache_clear()


def test_memory_comes_goes_and_copies(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = FAKES[vendor](monkeypatch, 1)
    device: Device = device_of(0)
    memory = device.empty(64)
    memory.write(np.arange(8, dtype=np.int32), 16)
    assert memory.read(16, 32).view(np.int32).tolist() == list(range(8))
    v = memory.view(i32, (2, 4), offset=16)
    assert (v.address, v.device, v.owner) == (memory.address + 16, (vendor, 0), memory)
    assert len(fake.blocks) == 1
    del memory
    assert len(fake.blocks) == 1  # the view keeps it
    del v
    assert not fake.blocks
    assert device.empty(0).read().size == 0


def test_errors_are_sentences(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = FAKES[vendor](monkeypatch, 1)
    device: Device = device_of(0)
    source = source_of(vendor)
    loaded = device.load(source, binary(source))
    fake.status = 2
    with pytest.raises(MissingError, match=r"allocating 64 bytes failed: .*OutOfMemory|OUT_OF_MEMORY"):
        device.empty(64)
    fake.status = 700
    name = "CUDA_ERROR_ILLEGAL_ADDRESS" if vendor == "cuda" else "hipErrorIllegalAddress"
    with pytest.raises(KernelError, match=rf"a kernel that ran on it failed: {name}"):
        device.synchronize()
    with pytest.raises(KernelError, match=rf"scaled: the launch failed: {name}.*\n  3 blocks of \d+ threads"):
        loaded.launch(Launch(3, zeros(source), ()), (0, 0, 0), (0.0,), 0)
    if vendor == "cuda":
        assert isinstance(source.plan, RowPlan)
        loaded.plan = replace(source.plan, tile=replace(source.plan.tile, cluster=16))  # type: ignore[attr-defined]
        with pytest.raises(KernelError, match="threads, in clusters of 16, for which a part of a GPU may have no room"):
            loaded.launch(Launch(16, zeros(source), ()), (0, 0, 0), (0.0,), 0)
    with pytest.raises(KernelError, match="scaled: loading it on"):
        device.load(source, binary(source))
    with pytest.raises(KernelError, match="has no machine code"):
        device.load(source, None)


def test_an_unknown_status_has_a_number(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAKES[vendor](monkeypatch, 1)
    text = nvidia.error_text(99999) if vendor == "cuda" else amd.error_text(99999)
    assert "99999" in text


def test_streams_wait_for_each_other(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = FAKES[vendor](monkeypatch, 1)
    device: Device = device_of(0)
    device.order(5, after=5)
    assert not fake.calls
    device.order(5, after=6)
    assert fake.calls == [("record", 6), ("wait", 5)]
    device.synchronize(5)
    assert fake.calls[-1] == ("synchronize stream", 5)


def test_a_graph_is_captured_and_replayed(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs before a replay, which may be on any stream; what was needed is given back."""
    fake, device_of = FAKES[vendor](monkeypatch, 1)
    device: Device = device_of(0)
    source = source_of(vendor)
    loaded = device.load(source, binary(source))
    numbers = zeros(source)

    def work(stream: int) -> None:
        assert device.capturing(stream)
        for turn in (1, 2):
            loaded.launch(Launch(turn, numbers, ()), (turn, turn, turn), (0.5,), stream)

    replay = device.capture(work)
    assert (fake.launched, fake.streams, fake.captured, len(fake.graphs)) == ([], [], {}, 1)
    for stream in (0, 7):
        replay(stream)
    assert [(blocks, stream) for _, blocks, _, _, stream, _ in fake.launched] == [(1, 0), (2, 0), (1, 7), (2, 7)]
    assert not device.capturing(7)
    fake.status = 700
    with pytest.raises(KernelError, match=r"replaying a graph failed: .*(?i:illegal)"):
        replay(0)
    fake.status = 0
    del replay
    assert not fake.graphs


def test_a_capture_that_fails_leaves_nothing_behind(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = FAKES[vendor](monkeypatch, 1)
    device: Device = device_of(0)

    def work(stream: int) -> None:
        raise RequestError("no")

    with pytest.raises(RequestError, match="no"):
        device.capture(work)
    assert (fake.streams, fake.captured, fake.graphs) == ([], {}, {})

    def invalid(stream: int) -> None:
        fake.status = 901

    with pytest.raises(KernelError, match=r"capturing a graph failed: .*(?i:capture.?invalidated)"):
        device.capture(invalid)
    assert (fake.streams, fake.captured, fake.graphs) == ([], {}, {})
    fake.status = 900
    with pytest.raises(KernelError, match=r"allocating 64 bytes failed: .*\n  make the call once before the capture"):
        device.empty(64)


def test_a_thread_without_a_context_replays_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = fake_nvidia(monkeypatch, 1)
    loaded = device_of(0).load(SOURCE, binary(SOURCE))
    replay = device_of(0).capture(lambda stream: loaded.launch(Launch(1, zeros(SOURCE), ()), (0,) * 3, (0.0,), stream))
    fake.fail_outside = True
    replay(5)
    assert len(fake.launched) == 1
    nvidia.device.cache_clear()


def test_the_second_gpu_is_made_current_and_left_again(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = FAKES[vendor](monkeypatch, 2)
    device: Device = device_of(0).at(1)
    source = source_of(vendor)
    loaded = device.load(source, binary(source))
    loaded.launch(Launch(1, zeros(source), ()), (0, 0, 0), (0.0,), 0)
    where = ("context 1",) if vendor == "cuda" else 1
    assert [c[-1] for c in fake.calls if c[0] in ("load", "launch")] == [where, where]
    assert getattr(fake, "contexts", []) == []
    assert getattr(fake, "current", 0) == 0
    with pytest.raises(MissingError, match="there are 2"):
        device.at(2)


def test_a_thread_without_a_context_launches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = fake_nvidia(monkeypatch, 1)
    loaded = device_of(0).load(SOURCE, binary(SOURCE))
    fake.fail_outside = True
    loaded.launch(Launch(1, zeros(SOURCE), ()), (0, 0, 0), (0.0,), 0)
    assert fake.calls[-1] == ("launch", ("context 0",))
    nvidia.device.cache_clear()


def test_loading_relaxes_a_graph_capture_and_restores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = fake_nvidia(monkeypatch, 1)
    device_of(0).load_code(b"code", "entry", 100 * 1024)
    assert fake.calls == [
        ("capture mode", "CU_STREAM_CAPTURE_MODE_RELAXED"),
        ("load", b"code", ("context 0",)),
        ("attribute", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 100 * 1024),
        ("capture mode", "CU_STREAM_CAPTURE_MODE_GLOBAL"),
    ]
    nvidia.device.cache_clear()


@pytest.mark.parametrize("shared", [1, 48 * 1024, 227 * 1024])
def test_shared_memory_is_always_asked_for(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 KiB of dynamic memory and a few bytes of static are past the limit that needs no asking."""
    fake, device_of = fake_nvidia(monkeypatch, 1)
    device_of(0).load_code(b"code", "entry", shared)
    assert ("attribute", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", shared) in fake.calls
    nvidia.device.cache_clear()


@pytest.mark.parametrize(("cluster", "asked"), [(1, False), (8, False), (16, True)])
def test_clusters_past_the_portable_size_are_asked_for(
    cluster: int, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, device_of = fake_nvidia(monkeypatch, 1)
    device_of(0).load_code(b"code", "entry", 0, cluster)
    assert (("attribute", "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1) in fake.calls) is asked
    nvidia.device.cache_clear()


def clustered(cluster: int) -> Source:
    plan = SOURCE.plan
    assert isinstance(plan, RowPlan)
    tile = replace(plan.tile, cluster=cluster, threads=512)
    return replace(SOURCE, plan=replace(plan, tile=tile, staging="persistent", shared_bytes=1000))


def test_a_gpu_is_asked_how_many_clusters_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = fake_nvidia(monkeypatch, 1)
    device: Device = device_of(0)
    assert device.load(SOURCE, binary(SOURCE)).resident is None, "neither clusters nor rows in turn: nothing to ask"
    assert not [call for call in fake.calls if call[0] in ("clusters", "blocks")]
    assert device.load(clustered(8), binary(SOURCE)).resident == 15 * 8
    assert ("clusters", (8, 1, 1), 8, 512, 1000) in fake.calls
    assert device.load(clustered(1), binary(SOURCE)).resident == 15 * 132
    assert ("blocks", "module.scaled", 512, 1000) in fake.calls
    nvidia.device.cache_clear()


@pytest.mark.parametrize(("cluster", "group"), [(1, "a block"), (16, "a cluster of 16 blocks")])
def test_a_gpu_without_room_says_so_when_the_kernel_is_loaded(
    cluster: int, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, device_of = fake_nvidia(monkeypatch, 1)
    fake.room = 0
    words = (
        f"has no room for {group} of 512 threads and 1000 bytes of shared memory\n.*MIG slice.*\n  run it on the whole"
    )
    with pytest.raises(KernelError, match=words):
        device_of(0).load(clustered(cluster), binary(SOURCE))
    nvidia.device.cache_clear()


def test_missing_packages_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia.driver.cache_clear()
    amd.runtime.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setitem(sys.modules, "hip", None)
    with pytest.raises(MissingError, match="pip install cuda-bindings"):
        nvidia.list_gpus()
    with pytest.raises(MissingError, match="pip install hip-python"):
        amd.list_gpus()


def test_a_missing_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDriver(ModuleType):
        def cuInit(self, flags: int) -> tuple[Any, ...]:
            raise RuntimeError("Failed to dlopen libcuda.so.1\nand so on")

        def hipGetDeviceCount(self) -> tuple[Any, ...]:
            raise RuntimeError("failed to dlopen libamdhip64.so")

    nvidia.driver.cache_clear()
    package = ModuleType("cuda.bindings")
    package.driver = NoDriver("driver")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    with pytest.raises(MissingError, match=r"driver is missing here: Failed to dlopen libcuda.so.1$"):
        nvidia.list_gpus()
    monkeypatch.setattr(amd, "runtime", lambda: NoDriver("hip"))
    with pytest.raises(MissingError, match="part of ROCm, is missing here: failed to dlopen"):
        amd.list_gpus()


# ---------------------------------------------------------------- arguments, memory


def test_arguments_are_packed_by_kind_and_found_by_position() -> None:
    params = (
        Param("value", "a", "a", dtype=i32), Param("pointer", "x_ptr", "x"), Param("stride", "x_stride", "x"),
        Param("value", "b", "b", dtype=f32), Param("pointer", "y_ptr", "y"),
    )  # fmt: skip
    arguments = Arguments(params)
    arguments.pack_into(arguments.block, 0, 2**63, 1, -3, 0.5, -(2**50))
    at = list((ctypes.c_void_p * 5).from_address(arguments.address))
    found = [ctypes.string_at(address, 8) for address in at]
    assert struct.unpack("=i4x", found[0]) == (-3,)
    assert struct.unpack("=Q", found[1]) == (2**63,)
    assert struct.unpack("=q", found[2]) == (-(2**50),)
    assert struct.unpack("=f4x", found[3]) == (0.5,)
    assert struct.unpack("=Q", found[4]) == (1,)


def test_emulator_memory() -> None:
    device = EmulatorDevice(H200)
    assert device.place == CPU
    memory = device.empty(1000)
    assert memory.address % 256 == 0
    memory.write(np.full(1000, 7, np.uint8))
    memory.write(np.array([[1, 2], [3, 4]], np.float16)[:, ::-1], 10)
    assert memory.read(10, 8).view(np.float16).tolist() == [2, 1, 4, 3]
    assert (memory.read(9, 1)[0], memory.read(18, 1)[0]) == (7, 7)
    v = memory.view(f16, (2, 2), offset=10)
    assert v.numpy().tolist() == [[2, 1], [4, 3]]
    backwards = memory.view(f16, (2, 2), strides=(2, -1), offset=12)
    assert backwards.numpy().tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (97, 4), (0, 101), (0, -1)])
def test_memory_has_an_end(offset: int, nbytes: int) -> None:
    memory = EmulatorDevice(H200).empty(100)
    with pytest.raises(RequestError, match="outside of this memory's 100 bytes"):
        memory.read(offset, nbytes)
    with pytest.raises(RequestError, match="outside of this memory's 100 bytes"):
        memory.view(f16, (51,))


def test_launches_from_many_threads_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device_of = fake_nvidia(monkeypatch, 1)
    loaded = device_of(0).load(SOURCE, binary(SOURCE))
    count = len(zeros(SOURCE))

    def work(number: int) -> None:
        for _ in range(200):
            loaded.launch(Launch(number, (number,) * count, ()), (number,) * 3, (float(number),), number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.launched) == 1600
    for _, blocks, _, _, stream, values in fake.launched:
        assert {blocks, stream, *values} == {blocks}
    nvidia.device.cache_clear()
