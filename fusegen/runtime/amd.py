"""AMD GPUs through the HIP runtime, by hip-python, which imports without ROCm and raises at its first call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

from fusegen.errors import KernelError, MissingError
from fusegen.runtime.devices import Bytes, Gpu
from fusegen.runtime.gpu import GpuDevice

OUT_OF_MEMORY = 2
NON_BLOCKING = 1  # of a stream: it does not wait for the default one


@cache
def runtime() -> Any:
    """The module with HIP's calls. Raises MissingError."""
    try:
        from hip import hip
    except ImportError as error:
        raise MissingError(f"hip-python is missing here ({error})\n  to get it: pip install hip-python") from error
    return hip


def done(result: tuple[Any, ...], doing: str) -> Any:
    """The values of a HIP call's answer. Raises KernelError."""
    status, *values = result
    if int(status):
        raise KernelError(f"{doing} failed: {error_text(int(status))}")
    return values[0] if len(values) == 1 else tuple(values)


def error_text(status: int) -> str:
    hip = runtime()
    try:
        code = hip.hipError_t(status)
    except ValueError:  # newer than hip-python
        return f"HIP error {status}"
    return f"{code.name} ({hip.hipGetErrorString(code)[1]})"


def list_gpus() -> tuple[Gpu, ...]:
    """AMD's GPUs here. Raises MissingError when there is no HIP runtime or no GPU."""
    hip = runtime()
    try:
        status, count = hip.hipGetDeviceCount()
    except RuntimeError as error:  # hip-python could not open the library
        raise MissingError(f"the HIP runtime, which is part of ROCm, is missing here: {error}") from error
    if int(status) or not count:
        raise MissingError(f"the HIP runtime sees no GPU: {error_text(int(status))}" if int(status) else "no AMD GPU")
    return tuple(describe(ordinal) for ordinal in range(count))


def describe(ordinal: int) -> Gpu:
    hip = runtime()
    properties = hip.hipDeviceProp_t()
    done(hip.hipGetDeviceProperties(properties, ordinal), f"asking hip:{ordinal}")
    arch = properties.gcnArchName.decode().split(":")[0]
    name = properties.name.decode() or f"AMD {arch}"  # some drivers leave the name empty
    return Gpu("hip", ordinal, name, arch, int(properties.totalGlobalMem), int(properties.multiProcessorCount))


@cache
def device(ordinal: int) -> AmdDevice:
    """That GPU. Raises MissingError."""
    gpus = list_gpus()
    if ordinal >= len(gpus):
        raise MissingError(f"there is no hip:{ordinal} here; there are {len(gpus)} AMD GPUs")
    return AmdDevice(gpus[ordinal], alone=len(gpus) == 1)


class AmdDevice(GpuDevice):
    kind = "hip"

    def __init__(self, gpu: Gpu, *, alone: bool) -> None:
        super().__init__(gpu.ordinal, gpu.name, gpu.arch)
        self.hip = runtime()
        self.alone = alone  # HIP's current device is a thread's own and starts at 0, so a lone GPU is always current
        self.launch_kernel = self.hip.hipModuleLaunchKernel

    def at(self, ordinal: int) -> AmdDevice:
        return device(ordinal)

    @contextmanager
    def current(self) -> Iterator[None]:
        """This GPU as this thread's current one for a while, and the old one again."""
        if self.alone:
            yield
            return
        before = done(self.hip.hipGetDevice(), "asking for the current GPU")
        done(self.hip.hipSetDevice(self.ordinal), f"making {self} current")
        try:
            yield
        finally:
            self.hip.hipSetDevice(before)

    def relaxed(self) -> AbstractContextManager[None]:
        return self.current()

    def new_stream(self) -> int:
        return int(done(self.hip.hipStreamCreateWithFlags(NON_BLOCKING), "making a stream"))

    def drop_stream(self, stream: int) -> None:
        self.hip.hipStreamDestroy(stream)

    def begin_capture(self, stream: int) -> int:
        mode = self.hip.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal
        return int(self.hip.hipStreamBeginCapture(stream, mode)[0])

    def end_capture(self, stream: int) -> object:
        graph = done(self.hip.hipStreamEndCapture(stream), "capturing a graph")
        try:
            return done(self.hip.hipGraphInstantiateWithFlags(graph, 0), "making a graph ready to launch")
        finally:
            self.hip.hipGraphDestroy(graph)

    def start_graph(self, graph: object, stream: int) -> int:
        if self.alone:
            return int(self.hip.hipGraphLaunch(graph, stream)[0])
        with self.current():
            return int(self.hip.hipGraphLaunch(graph, stream)[0])

    def drop_graph(self, graph: object) -> None:
        with self.current():
            self.hip.hipGraphExecDestroy(graph)

    def capturing(self, stream: int) -> bool:
        with self.current():
            status, found = self.hip.hipStreamIsCapturing(stream)
        # the default stream may not be asked while others are captured, and then it is not
        return not int(status) and found != self.hip.hipStreamCaptureStatus.hipStreamCaptureStatusNone

    def start(
        self, function: object, grid: tuple[int, int], threads: int, shared: int, stream: int, arguments: int
    ) -> int:
        if self.alone:
            return int(self.launch_kernel(function, *grid, 1, threads, 1, 1, shared, stream, arguments, None)[0])
        with self.current():
            return int(self.launch_kernel(function, *grid, 1, threads, 1, 1, shared, stream, arguments, None)[0])

    def load_code(self, code: bytes, entry: str, shared: int, cluster: int = 1) -> tuple[object, object]:
        hip = self.hip
        with self.current():  # LDS needs no attribute: a kernel may have all 64 KiB of a block
            module = done(hip.hipModuleLoadData(code), f"{entry}: loading it on {self}")
            function = done(hip.hipModuleGetFunction(module, entry.encode()), f"{entry}: finding it in its code")
        return module, function

    def allocate(self, nbytes: int) -> int:
        with self.current():
            status, pointer = self.hip.hipMalloc(nbytes)
        self.check(int(status), f"allocating {nbytes} bytes")
        return int(pointer)

    def free(self, address: int) -> None:
        with self.current():
            self.hip.hipFree(address)

    def copy_in(self, address: int, data: Bytes) -> None:
        kind = self.hip.hipMemcpyKind.hipMemcpyHostToDevice
        with self.current():
            (status,) = self.hip.hipMemcpy(address, data, data.nbytes, kind)
        self.check(int(status), f"copying {data.nbytes} bytes to it")

    def copy_out(self, data: Bytes, address: int) -> None:
        kind = self.hip.hipMemcpyKind.hipMemcpyDeviceToHost
        with self.current():
            (status,) = self.hip.hipMemcpy(data, address, data.nbytes, kind)
        self.check(int(status), f"copying {data.nbytes} bytes from it")

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        with self.current():
            (status,) = self.hip.hipMemcpyDtoDAsync(to, source, nbytes, stream)
        self.check(int(status), f"copying {nbytes} bytes on it")

    def fill(self, address: int, nbytes: int, stream: int) -> None:
        with self.current():
            (status,) = self.hip.hipMemsetD32Async(address, 0, nbytes // 4, stream)
        self.check(int(status), f"filling {nbytes} bytes")

    def event(self) -> object:
        with self.current():
            return done(self.hip.hipEventCreate(), "making an event")

    def drop_event(self, event: object) -> None:
        with self.current():
            self.hip.hipEventDestroy(event)

    def mark(self, event: object, stream: int) -> None:
        with self.current():
            (status,) = self.hip.hipEventRecord(event, stream)
        self.check(int(status), "recording an event")

    def elapsed_us(self, start: object, end: object) -> float:
        with self.current():
            milliseconds = done(self.hip.hipEventElapsedTime(start, end), "reading two events")
        return float(milliseconds) * 1e3

    def synchronize(self, stream: int | None = None) -> None:
        with self.current():
            (status,) = self.hip.hipDeviceSynchronize() if stream is None else self.hip.hipStreamSynchronize(stream)
        self.check(int(status), "a kernel that ran on it")

    def order(self, stream: int, after: int) -> None:
        if stream == after:
            return
        hip = self.hip
        with self.current():
            event = done(hip.hipEventCreateWithFlags(2), "making an event")  # 2: no timing
            try:
                done(hip.hipEventRecord(event, after), "recording an event")
                done(hip.hipStreamWaitEvent(stream, event, 0), "ordering two streams")
            finally:
                hip.hipEventDestroy(event)

    def error_text(self, status: int) -> str:
        return error_text(status)

    def out_of_memory(self, status: int) -> bool:
        return status == OUT_OF_MEMORY
