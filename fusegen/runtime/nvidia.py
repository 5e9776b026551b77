"""NVIDIA GPUs through the CUDA driver, by cuda.bindings.

The driver is called directly, and not through cuda.core, for two reasons. Its names have been the same since CUDA 12,
while cuda.core's changed at 1.0; and it launches from an argument block laid out beforehand, which costs less than half
of what cuda.core's `launch` does with its arguments, the largest part of a call's time here.

Code is loaded as a module of the GPU's primary context, the one torch, CuPy and JAX use. A module's function refuses to
run in any other context, where a context-free kernel would silently run on whichever GPU is current.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from fusegen.errors import KernelError, MissingError
from fusegen.language.types import DType, bf16, f8e4m3, f8e5m2, f16, f32, i8, tf32, u8
from fusegen.planner.launched import Launched
from fusegen.runtime.devices import Block, Bytes, Gpu, Launch, Mapped, Sending, sent_by_call
from fusegen.runtime.gpu import MAP_ALIGNMENT, MAP_BYTES, SLOT, Arguments, GpuDevice, GpuKernel

NO_CONTEXT = frozenset({3, 201, 400, 709})  # not initialized; invalid context, invalid handle, context destroyed
OUT_OF_MEMORY = 2
NON_BLOCKING = 1  # of a stream: it does not wait for the default one
PORTABLE_CLUSTER = 8  # blocks; more only where a kernel asks for it


@cache
def driver() -> Any:
    """cuda.bindings.driver, initialized. Raises MissingError."""
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise MissingError(f"cuda.bindings is missing here: {error}\n  to get it: pip install cuda-bindings") from error
    try:
        (status,) = bindings.cuInit(0)
    except Exception as error:  # the loader's own class, whose home has moved between versions
        raise MissingError(f"NVIDIA's driver is missing here: {str(error).splitlines()[0]}") from error
    if status:
        raise MissingError(f"NVIDIA's driver did not start: {bindings.cuGetErrorName(status)[1].decode()}")
    return bindings


def done(result: tuple[Any, ...], doing: str) -> Any:
    """The values of a driver's answer. Raises KernelError."""
    status, *values = result
    if status:
        raise KernelError(f"{doing} failed: {error_text(int(status))}")
    return values[0] if len(values) == 1 else tuple(values)


def error_text(status: int) -> str:
    bindings = driver()
    try:
        code = bindings.CUresult(status)
    except ValueError:  # newer than the bindings
        return f"CUDA error {status}"
    name, text = bindings.cuGetErrorName(code)[1], bindings.cuGetErrorString(code)[1]
    return f"{name.decode()} ({text.decode()})"


def list_gpus() -> tuple[Gpu, ...]:
    """NVIDIA's GPUs here. Raises MissingError when there is no driver or no GPU."""
    bindings = driver()
    count = done(bindings.cuDeviceGetCount(), "counting GPUs")
    if not count:
        raise MissingError("NVIDIA's driver sees no GPU")
    return tuple(describe(ordinal) for ordinal in range(count))


def describe(ordinal: int) -> Gpu:
    bindings = driver()
    handle = done(bindings.cuDeviceGet(ordinal), f"opening cuda:{ordinal}")
    attribute = bindings.CUdevice_attribute
    major, minor, sms = (
        done(bindings.cuDeviceGetAttribute(which, handle), f"asking cuda:{ordinal}")
        for which in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )
    )
    name = done(bindings.cuDeviceGetName(256, handle), f"naming cuda:{ordinal}").split(b"\0")[0].decode()
    memory = done(bindings.cuDeviceTotalMem(handle), f"asking cuda:{ordinal}")
    return Gpu("cuda", ordinal, name, f"sm_{major}{minor}", int(memory), sms)


@cache
def device(ordinal: int) -> NvidiaDevice:
    """That GPU. Raises MissingError."""
    gpus = list_gpus()
    if ordinal >= len(gpus):
        raise MissingError(f"there is no cuda:{ordinal} here; there are {len(gpus)} NVIDIA GPUs")
    return NvidiaDevice(gpus[ordinal], alone=len(gpus) == 1)


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h, the same since CUDA 11.8."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: a number in a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


STREAM = Config.stream.offset
ATTRIBUTES = slice(Config.attributes.offset, Config.attribute_count.offset + Config.attribute_count.size)
STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
DEPENDENT = Attribute(STREAM_SERIALIZATION, 0, (1,))  # read by every dependent launch
DEPENDENT_DRIVER = 12030  # from which on streams that are being captured take such launches
LEAD = 64  # bytes before the arguments: a Config, padded
LEGACY_STREAM = 1  # CU_GET_PROC_ADDRESS_LEGACY_STREAM: 0 is the default stream that torch means by it

# of cuda.h: CUtensorMapDataType, CUtensorMapSwizzle by bytes, and CU_TENSOR_MAP_L2_PROMOTION_L2_256B: what a tensor
# copy misses comes to the L2 cache in lines of 256 bytes
MAP_TYPES: Mapping[DType, int] = {
    **dict.fromkeys((f8e4m3, f8e5m2, i8, u8), 0), f16: 6, f32: 7, bf16: 9, tf32: 11,  # the last one rounds to it
}  # fmt: skip
MAP_SWIZZLES: Mapping[int, int] = {0: 0, 32: 1, 64: 2, 128: 3}
MAP_PROMOTION = 3
MOST_MAPS = 256  # that are remembered of one operand: a model's layers call one kernel over weights of their own

Slot = list[Any]
"""What one launch at a time needs: the stream and pointers that its memory holds (None: none yet), the memory, for a
Config and arguments; the addresses of it and of the arguments' table, as ctypes passes them on; the owner of both."""


@cache
def launcher() -> Any:
    """cuLaunchKernelEx(config, function, table of arguments, extra), called by ctypes without Python's lock.

    It takes the same time as cuLaunchKernel, and four arguments in place of eleven. They are to be what ctypes.byref
    makes: passing integers on as pointers takes 0.3 us more. None where the driver has none.
    """
    status, address, *_ = driver().cuGetProcAddress(b"cuLaunchKernelEx", 12000, LEGACY_STREAM)
    if int(status) or not address:
        return None
    return ctypes.CFUNCTYPE(ctypes.c_int)(int(address))


@cache
def launches_dependent() -> bool:
    """Does the driver take dependent launches? Else a kernel begins when the one before it has ended, and has nothing
    left to wait for."""
    return launcher() is not None and int(done(driver().cuDriverGetVersion(), "asking for the driver's version")) >= (
        DEPENDENT_DRIVER
    )


def config_of(plan: Launched, launch: Launch, stream: int = 0) -> Config:
    """How such a launch is told to the driver."""
    grid, block = (*plan.grid(launch.blocks), 1), (plan.threads, 1, 1)
    dependent = launch.dependent and launches_dependent()
    attributes = ctypes.addressof(DEPENDENT) if dependent else None
    return Config(grid, block, plan.shared_bytes, stream, attributes, int(dependent))


@cache
def encoder() -> Any:
    """cuTensorMapEncodeTiled, by ctypes. Raises MissingError where the driver has none."""
    status, address, *_ = driver().cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, LEGACY_STREAM)
    if int(status) or not address:
        raise MissingError("NVIDIA's driver here makes no tensor maps; CUDA 12.0 and later do")
    pointer, number, word = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
    kinds = (pointer, word, number, pointer, pointer, pointer, pointer, pointer, word, word, word, word)
    return ctypes.CFUNCTYPE(word, *kinds)(int(address))


def encoded(given: Mapped, address: int) -> bytes:
    """The 128 bytes that a kernel takes as CUtensorMap. Raises KernelError."""
    wanted = given.at(address)
    rank, shape, strides, box, steps = wanted.driver_arguments()
    raw = (ctypes.c_char * (2 * MAP_BYTES))()
    at = -(-ctypes.addressof(raw) // MAP_ALIGNMENT) * MAP_ALIGNMENT
    status = encoder()(
        at, MAP_TYPES[given.dtype], rank, address, (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * rank)(*strides), (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*steps),
        0, MAP_SWIZZLES[given.swizzle], MAP_PROMOTION, 0,
    )  # fmt: skip
    if status:
        raise KernelError(f"the driver refuses the tensor map {wanted}: {error_text(status)}")
    return ctypes.string_at(at, MAP_BYTES)


def new_slot(plan: Launched, launch: Launch) -> Slot:
    """A slot for such launches, all of it written but the stream, the pointers and the run-time values."""
    arguments = Arguments(plan.params, LEAD)
    varying = sum(param.kind in ("pointer", "map", "value") for param in plan.params)
    ctypes.memmove(arguments.block, ctypes.byref(config_of(plan, launch)), ctypes.sizeof(Config))
    struct.pack_into(f"{len(launch.numbers)}q", arguments.block, LEAD + 8 * varying, *launch.numbers)
    return [None, arguments.block, ctypes.byref(arguments.block), ctypes.byref(arguments.table), arguments]


def new_block(kernel: GpuKernel, launch: Launch, start: Any, form: struct.Struct) -> Block:
    """The memory of such launches for C; `form` is that of the stream, the pointers and the run-time values in it."""
    _, memory, _, _, arguments = new_slot(kernel.plan, launch)
    pointers = sum(param.kind == "pointer" for param in kernel.plan.params)

    def again(words: bytes) -> None:
        stream, *given = form.unpack_from(words, STREAM)
        kernel.launch(launch, given[:pointers], given[pointers:], stream)

    return Block(
        words=bytes(memory),
        stream=STREAM // SLOT,
        first=LEAD // SLOT,
        places=tuple((address - ctypes.addressof(memory)) // SLOT for address in arguments.table),
        start=ctypes.cast(start, ctypes.c_void_p).value or 0,
        function=int(kernel.function),  # type: ignore[call-overload]
        again=again,
    )


def cluster_config(plan: Launched) -> Any:
    """The launch of one cluster, as cuOccupancyMaxActiveClusters takes it."""
    bindings = driver()
    attribute = bindings.CUlaunchAttribute()
    attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = plan.cluster, 1, 1
    config = bindings.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = plan.cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = plan.threads, 1, 1
    config.sharedMemBytes = plan.shared_bytes
    config.attrs, config.numAttrs = [attribute], 1
    return config


class NvidiaDevice(GpuDevice):
    kind = "cuda"

    def __init__(self, gpu: Gpu, *, alone: bool) -> None:
        super().__init__(gpu.ordinal, gpu.name, gpu.arch)
        self.bindings = driver()
        handle = done(self.bindings.cuDeviceGet(gpu.ordinal), f"opening {self}")
        self.context = done(self.bindings.cuDevicePrimaryCtxRetain(handle), f"taking the context of {self}")
        self.alone = alone  # the only GPU: a thread that has a context at all has, nearly always, this one
        self.launch_kernel = self.bindings.cuLaunchKernel
        if "torch" in sys.modules:  # whose tensors' calls get shortcuts
            from fusegen.runtime import native

            native.begin()

    def at(self, ordinal: int) -> NvidiaDevice:
        return device(ordinal)

    @contextmanager
    def current(self) -> Iterator[None]:
        """This GPU's context on this thread for a while, and the old one again."""
        done(self.bindings.cuCtxPushCurrent(self.context), f"making {self} current")
        try:
            yield
        finally:
            self.bindings.cuCtxPopCurrent()

    def start(
        self, function: object, grid: tuple[int, int], threads: int, shared: int, stream: int, arguments: int
    ) -> int:
        if self.alone:
            status = self.launch_kernel(function, *grid, 1, threads, 1, 1, shared, stream, arguments, 0)[0]
            if not status or int(status) not in NO_CONTEXT:
                return int(status)
        with self.current():
            return int(self.launch_kernel(function, *grid, 1, threads, 1, 1, shared, stream, arguments, 0)[0])

    def start_dependent(self, kernel: GpuKernel, launch: Launch, stream: int, arguments: int) -> int:
        plan = kernel.plan
        if not launches_dependent():
            grid = plan.grid(launch.blocks)
            return self.start(kernel.function, grid, plan.threads, plan.shared_bytes, stream, arguments)
        config, function = config_of(plan, launch, stream), int(kernel.function)  # type: ignore[call-overload]
        given = (config, ctypes.c_char.from_address(function), ctypes.c_char.from_address(arguments))
        with self.current():
            return int(launcher()(*map(ctypes.byref, given), None))

    def sending(self, kernel: GpuKernel, launch: Launch) -> Sending:
        """Each thread that launches takes a slot of its own, so that none waits for another."""
        start = launcher()
        if start is None:
            return sent_by_call(kernel, launch)
        codes = kernel.arguments.codes[: -len(launch.numbers) or None]
        form = struct.Struct(f"P{LEAD - STREAM - 8}x{''.join(codes)}")
        take = (
            "try:",
            "    slot = slots.pop()",
            "except IndexError:",
            "    slot = new_slot()",
            "held, memory, config, table, _ = slot",
        )
        places = [
            f"if held is None or held[{given.pointer + 1}] != sent[{given.pointer + 1}]: "
            f"place_map(slot[4], {place}, sent[{given.pointer + 1}])"
            for place, given in enumerate(launch.maps)
        ]
        own = bytes(config_of(kernel.plan, launch))[ATTRIBUTES]
        kept = ["memory[attributes_at] = attributes"] * any(own)  # which lie between what is packed
        fill = (f"pack(memory, {STREAM}, {{sent}} {{values}})", *kept, *places)
        send = (
            "refused = start(config, function, table, None)",
            "slots.append(slot)",
            "if refused:  # once more, in this GPU's context, and with the error told",
            "    launch(launched, sent[1:], ({values}), sent[0])",
        )
        leave = ("slots.append(slot)",)
        names = {
            "slots": [],
            "new_slot": partial(new_slot, kernel.plan, launch),
            "pack": form.pack_into,
            "start": start,
            "function": ctypes.byref(ctypes.c_char.from_address(int(kernel.function))),  # type: ignore[call-overload]
            "launch": kernel.launch,
            "launched": launch,
            "attributes": own,
            "attributes_at": ATTRIBUTES,
            "place_map": lambda arguments, place, address: arguments.place_map(
                place, launch.maps[place], address, self.encode
            ),
        }
        block = None if launch.maps or launch.dependent else partial(new_block, kernel, launch, start, form)
        return Sending(take, fill, send, leave, names, block)

    def new_stream(self) -> int:
        return int(done(self.bindings.cuStreamCreate(NON_BLOCKING), "making a stream"))

    def drop_stream(self, stream: int) -> None:
        self.bindings.cuStreamDestroy(stream)

    def begin_capture(self, stream: int) -> int:
        mode = self.bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        return int(self.bindings.cuStreamBeginCapture(stream, mode)[0])

    def end_capture(self, stream: int) -> object:
        graph = done(self.bindings.cuStreamEndCapture(stream), "capturing a graph")
        try:
            return done(self.bindings.cuGraphInstantiate(graph, 0), "making a graph ready to launch")
        finally:
            self.bindings.cuGraphDestroy(graph)

    def start_graph(self, graph: object, stream: int) -> int:
        if self.alone:
            status = self.bindings.cuGraphLaunch(graph, stream)[0]
            if not status or int(status) not in NO_CONTEXT:
                return int(status)
        with self.current():
            return int(self.bindings.cuGraphLaunch(graph, stream)[0])

    def drop_graph(self, graph: object) -> None:
        with self.relaxed():
            self.bindings.cuGraphExecDestroy(graph)

    def capturing(self, stream: int) -> bool:
        with self.current():
            status, found = self.bindings.cuStreamIsCapturing(stream)
        # the default stream may not be asked while others are captured, and then it is not
        return not status and found != self.bindings.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE

    def encode(self, given: Mapped, address: int) -> bytes:
        with self.current():  # the driver encodes for a context
            made = encoded(given, address)
        if len(given.encoded) >= MOST_MAPS:
            given.encoded.clear()
        given.encoded[address] = made
        return made

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """`current`, and calls that a graph capture forbids (loading, allocating) are allowed: they don't touch it."""
        mode = self.bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with self.current():
            before = done(self.bindings.cuThreadExchangeStreamCaptureMode(mode), "relaxing the capture mode")
            try:
                yield
            finally:
                self.bindings.cuThreadExchangeStreamCaptureMode(before)

    def load_code(self, code: bytes, entry: str, shared: int, cluster: int = 1) -> tuple[object, object]:
        bindings = self.bindings
        with self.relaxed():
            module = done(bindings.cuModuleLoadData(code), f"{entry}: loading it on {self}")
            function = done(bindings.cuModuleGetFunction(module, entry.encode()), f"{entry}: finding it in its code")
            if shared:
                # Past 48 KiB, static and dynamic together, a launch is refused unless this says so; a smaller number
                # costs nothing.
                attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                answer = bindings.cuFuncSetAttribute(function, attribute, shared)
                done(answer, f"{entry}: asking for {shared} bytes of shared memory")
            if cluster > PORTABLE_CLUSTER:
                attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                answer = bindings.cuFuncSetAttribute(function, attribute, 1)
                done(answer, f"{entry}: asking for clusters of {cluster} blocks")
        return module, function

    def resident_blocks(self, function: object, plan: Launched) -> int:
        """Asked of the driver, since it is not in a GPU's facts: clusters need neighbours, and which SMs are is each
        chip's own. An H200 held 7 clusters of 16 blocks, an SM each, and 15 of 8; a MIG slice may hold none."""
        bindings, cluster = self.bindings, plan.cluster
        doing = f"{plan.name}: asking how many of its blocks {self} holds"
        if cluster == 1:
            occupancy = bindings.cuOccupancyMaxActiveBlocksPerMultiprocessor
            with self.relaxed():
                blocks = done(occupancy(function, plan.threads, plan.shared_bytes), doing)
            held = int(blocks) * describe(self.ordinal).sms
        else:
            with self.relaxed():
                clusters = done(bindings.cuOccupancyMaxActiveClusters(function, cluster_config(plan)), doing)
            held = int(clusters) * cluster
        if not held:
            group = f"a cluster of {cluster} blocks" if cluster > 1 else "a block"
            raise KernelError(
                f"{plan.name}: {self} has no room for {group} of {plan.threads} threads and {plan.shared_bytes} bytes "
                "of shared memory\n"
                "  a part of a GPU (a MIG slice) may have too few SMs side by side\n"
                "  run it on the whole GPU, or compile it with on='gpu' where it is to run: a plan that fits is chosen"
            )
        return held

    def allocate(self, nbytes: int) -> int:
        with self.relaxed():
            status, address = self.bindings.cuMemAlloc(nbytes)
        self.check(int(status), f"allocating {nbytes} bytes")
        return int(address)

    def free(self, address: int) -> None:
        with self.relaxed():
            self.bindings.cuMemFree(address)

    def copy_in(self, address: int, data: Bytes) -> None:
        with self.current():
            (status,) = self.bindings.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes)
        self.check(int(status), f"copying {data.nbytes} bytes to it")

    def copy_out(self, data: Bytes, address: int) -> None:
        with self.current():
            (status,) = self.bindings.cuMemcpyDtoH(data.ctypes.data, address, data.nbytes)
        self.check(int(status), f"copying {data.nbytes} bytes from it")

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        with self.current():
            (status,) = self.bindings.cuMemcpyDtoDAsync(to, source, nbytes, stream)
        self.check(int(status), f"copying {nbytes} bytes on it")

    def fill(self, address: int, nbytes: int, stream: int) -> None:
        with self.current():
            (status,) = self.bindings.cuMemsetD32Async(address, 0, nbytes // 4, stream)
        self.check(int(status), f"filling {nbytes} bytes")

    def event(self) -> object:
        with self.current():
            return done(self.bindings.cuEventCreate(0), "making an event")

    def drop_event(self, event: object) -> None:
        with self.current():
            self.bindings.cuEventDestroy(event)

    def mark(self, event: object, stream: int) -> None:
        with self.current():
            (status,) = self.bindings.cuEventRecord(event, stream)
        self.check(int(status), "recording an event")

    def elapsed_us(self, start: object, end: object) -> float:
        with self.current():
            milliseconds = done(self.bindings.cuEventElapsedTime(start, end), "reading two events")
        return float(milliseconds) * 1e3

    def synchronize(self, stream: int | None = None) -> None:
        with self.current():
            if stream is None:
                (status,) = self.bindings.cuCtxSynchronize()
            else:
                (status,) = self.bindings.cuStreamSynchronize(stream)
        self.check(int(status), "a kernel that ran on it")

    def order(self, stream: int, after: int) -> None:
        if stream == after:
            return
        bindings = self.bindings
        with self.current():
            event = done(bindings.cuEventCreate(2), "making an event")  # 2: no timing
            try:
                done(bindings.cuEventRecord(event, after), "recording an event")
                done(bindings.cuStreamWaitEvent(stream, event, 0), "ordering two streams")
            finally:
                bindings.cuEventDestroy(event)  # the driver keeps it until it has happened

    def error_text(self, status: int) -> str:
        return error_text(status)

    def out_of_memory(self, status: int) -> bool:
        return status == OUT_OF_MEMORY
