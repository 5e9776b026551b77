"""A GPU that is none: kernels run in the emulator, and a clock of its own says how long a GPU would have taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusegen.planner.launched import Text
from fusegen.planner.model import Source
from fusegen.runtime.arrays import CPU
from fusegen.runtime.devices import Bytes, Launch, Loaded, Memory, Sending, sent_by_call
from fusegen.runtime.emulated import EmulatorDevice
from fusegen.runtime.gpu import GpuDevice
from fusegen.targets import target

RATE = 4e6  # bytes a µs of a copy: 4 TB/s
LAUNCH_US = 0.01
FILL_US = 80.0
SMALL = 1 << 24  # larger memory is only pretended


class PretendGpu(GpuDevice):
    """Writes down what is asked of it. Kernels move their bytes at `speed` times the copy rate."""

    kind = "cuda"

    def __init__(self, speed: float = 0.9) -> None:
        super().__init__(0, "Pretend", "sm_90")
        self.place = CPU  # its memory is numpy's
        self.emulator = EmulatorDevice(target("cuda:h200"), check=False)
        self.speed = speed
        self.gap_us = 0.0  # from the end of a kernel to the next one that is queued right behind it
        self.clock = 0.0
        self.asked: list[str] = []

    def work(self, name: str, us: float) -> None:
        self.asked.append(name)
        self.clock += us

    def load(self, source: Text, binary: Any) -> Loaded:
        assert isinstance(source, Source)
        return Pretended(self, source)

    def empty(self, nbytes: int) -> Memory:
        return self.emulator.empty(nbytes) if nbytes <= SMALL else Memory(self, 1 << 40, nbytes, lambda: None)

    def fill(self, address: int, nbytes: int, stream: int) -> None:
        self.work("fill", FILL_US)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self.work("copy", 2 * nbytes / RATE)
        if nbytes <= SMALL:
            self.emulator.copy(to, source, nbytes, stream)

    def copy_in(self, address: int, data: Bytes) -> None:
        self.emulator.copy_in(address, data)

    def copy_out(self, data: Bytes, address: int) -> None:
        self.emulator.copy_out(data, address)

    def event(self) -> object:
        return np.zeros(1)

    def drop_event(self, event: object) -> None: ...

    def mark(self, event: Any, stream: int) -> None:
        self.asked.append("mark")
        event[0] = self.clock

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(end[0] - start[0])

    def synchronize(self, stream: int | None = None) -> None:
        self.asked.append("wait")

    def order(self, stream: int, after: int) -> None: ...

    def unused(self, *args: Any) -> Any:
        raise AssertionError("not asked for by what is tested here")

    at = start = load_code = allocate = free = error_text = out_of_memory = unused  # type: ignore[assignment]
    relaxed = new_stream = drop_stream = begin_capture = end_capture = unused  # type: ignore[assignment]
    start_graph = drop_graph = capturing = unused  # type: ignore[assignment]


class Pretended:
    """A kernel that the emulator runs, and that takes as long as its plan's bytes do."""

    def __init__(self, gpu: PretendGpu, source: Source) -> None:
        self.gpu = gpu
        self.plan = source.plan
        self.loaded = gpu.emulator.load(source, None)
        self.resident = self.loaded.resident

    def sending(self, launch: Launch) -> Sending:
        return sent_by_call(self, launch)

    def launch(self, launch: Launch, pointers: Sequence[int], values: Sequence[float], stream: int) -> None:
        self.loaded.launch(launch, pointers, values, stream)
        moved = self.plan.cost.traffic.moved
        if self.gpu.asked[-1:] != ["mark"]:
            self.gpu.clock += self.gpu.gap_us
        self.gpu.work(self.plan.name, LAUNCH_US + moved / (RATE * self.gpu.speed))
