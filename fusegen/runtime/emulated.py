"""The emulator as a device: the very text that a GPU's compiler gets, run on the CPU, on numpy's memory."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fusegen.language.types import DType, f32, i32, u32
from fusegen.planner.launched import Text
from fusegen.planner.model import Param
from fusegen.runtime.arrays import CPU
from fusegen.runtime.devices import Bytes, Device, Launch, Loaded, Memory, Sending, sent_by_call
from fusegen.targets import Target

if TYPE_CHECKING:
    from fusegen.compiling import Binary
    from fusegen.emulator import Buffer

RESIDENT = 2  # rows that blocks of a persistent plan are given at a time: few, so that they take several in turn
RUNNING = threading.local()  # `touched`: what this thread's launches touch, since the last that was not dependent
VALUES: Mapping[DType, Any] = {f32: ctypes.c_float, i32: ctypes.c_int, u32: ctypes.c_int}


class EmulatorDevice(Device):
    """Runs sources for `target` on the CPU; with `check`, races and stray accesses are errors, with `contract`,
    products that are added become fused multiply-adds.

    `seed` picks the order in which warps run, `timeout_s` stops a kernel that hangs, `workers` is the number of CPU
    threads (None: the emulator's choice). They may be changed between launches.
    """

    kind = "emulator"
    place = CPU
    asynchronous = False

    def __init__(
        self, target: Target, *, check: bool = True, contract: bool = False, seed: int = 0, timeout_s: float = 60.0
    ) -> None:
        self.target = target
        self.check = check
        self.contract = contract
        self.seed = seed
        self.timeout_s = timeout_s
        self.workers: int | None = None
        self.name = "emulator" if check else "emulator (fast build)"
        self.arch = target.arch

    def contracting(self) -> EmulatorDevice:
        """The same with fused multiply-adds."""
        return EmulatorDevice(self.target, check=self.check, contract=True, seed=self.seed, timeout_s=self.timeout_s)

    def load(self, source: Text, binary: Binary | None) -> Loaded:
        from fusegen import emulator

        kernel = emulator.build(
            source.text, source.plan.name, warp=self.target.warp, check=self.check, contract=self.contract,
            arch=self.target.arch, filename=source.filename,
        )  # fmt: skip
        return EmulatedLoaded(self, kernel, source)

    def at(self, ordinal: int) -> EmulatorDevice:
        return self

    def empty(self, nbytes: int) -> Memory:
        """Pages of its own: a small block of the heap may lie so low that no address is left before it, which the
        checks of billions of rows count from."""
        block = np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)
        return Memory(self, block.ctypes.data, nbytes, lambda: block)  # the finalizer holds the block

    def copy_in(self, address: int, data: Bytes) -> None:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def copy_out(self, data: Bytes, address: int) -> None:
        ctypes.memmove(data.ctypes.data, address, data.nbytes)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def synchronize(self, stream: int | None = None) -> None:
        """Nothing to wait for: an emulated launch returns when it is done. One that is dependent is held to those
        before it all the same."""

    def order(self, stream: int, after: int) -> None:
        """Nothing to order: the CPU has no streams."""

    def capture(self, work: Callable[[int], None]) -> Callable[[int], None]:
        return work

    def capturing(self, stream: int) -> bool:
        return False


class EmulatedLoaded:
    """A kernel that the emulator built."""

    def __init__(self, device: EmulatorDevice, kernel: Any, source: Text) -> None:
        self.device = device
        self.kernel = kernel
        self.plan = source.plan
        self.resident = RESIDENT * self.plan.cluster if self.plan.persistent_rows else None

    def sending(self, launch: Launch) -> Sending:
        return sent_by_call(self, launch)

    def launch(
        self, launch: Launch, pointers: Sequence[int], values: Sequence[float], stream: int, *,
        memory: Sequence[Buffer] | None = None, only: range | None = None,
    ) -> None:  # fmt: skip
        """`memory` takes the place of the arrays' own bytes, and `only` some blocks that of all. A dependent launch is
        held to what those before it touch, which on a GPU may still run."""
        device, plan = self.device, self.plan
        own = self.buffers(launch, pointers) if memory is None else memory
        before: list[Buffer] = getattr(RUNNING, "touched", []) if launch.dependent else []
        RUNNING.touched = [*before, *(replace(b, name=f"{b.name} of {plan.name}") for b in own)]
        self.kernel.launch(
            (*plan.grid(launch.blocks), 1), (plan.threads, 1, 1), plan.shared_bytes,
            self.arguments(launch, pointers, values),
            seed=device.seed, timeout_s=device.timeout_s, workers=device.workers,
            memory=own, only=only, unfinished=before if launch.dependent else None,
        )  # fmt: skip

    def buffers(self, launch: Launch, pointers: Sequence[int]) -> list[Buffer]:
        """Every array's memory. An output's bytes count as never written, unless the kernel updates them."""
        from fusegen import emulator

        params = [param for param in self.plan.params if param.kind in ("pointer", "map")]
        return [
            emulator.Buffer(
                param.tensor,
                address,
                address + low,
                high - low,
                writable=param.output,
                initialised=param.updated or not param.output,
            )
            for param, address, (low, high) in zip(params, pointers, launch.spans, strict=True)
        ]

    def arguments(self, launch: Launch, pointers: Sequence[int], values: Sequence[float]) -> list[object]:
        """The emulator's arguments, in the plan's order."""
        tensors = [param.tensor for param in self.plan.params if param.kind in ("pointer", "map")]
        given = dict(zip(tensors, pointers, strict=True))
        maps, scalars, numbers = iter(launch.maps), iter(values), iter(launch.numbers)

        def argument(param: Param) -> object:
            if param.kind in ("pointer", "address"):
                return ctypes.c_void_p(given[param.tensor])
            if param.kind == "map":
                return next(maps).at(given[param.tensor])
            if param.kind == "value":
                return VALUES[param.dtype or f32](next(scalars))
            return ctypes.c_longlong(next(numbers))

        return [argument(param) for param in self.plan.params]
