"""A device that launches as an NVIDIA GPU's does, from C and by memory alone, and runs kernels in the emulator."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from fusegen.language.types import f32
from fusegen.planner.launched import Text
from fusegen.runtime.devices import Block, Launch, Loaded, Sending
from fusegen.runtime.emulated import VALUES, EmulatedLoaded, EmulatorDevice
from fusegen.runtime.gpu import Arguments

LEAD = 8  # bytes before the arguments: the stream
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


class Launched(EmulatedLoaded):
    """A kernel that C launches too, by a function that reads what C wrote, or is refused by it."""

    failed: ClassVar[list[BaseException]] = []
    functions: ClassVar[list[Any]] = []
    status = 0

    def sending(self, launch: Launch) -> Sending:
        return replace(super().sending(launch), block=partial(self.block, launch))

    def block(self, launch: Launch) -> Block:
        params = self.plan.params
        given = Arguments(params, LEAD)
        varying = sum(param.kind in ("pointer", "value") for param in params)
        struct.pack_into(f"{len(launch.numbers)}q", given.block, LEAD + 8 * varying, *launch.numbers)
        places = tuple(((address or 0) - ctypes.addressof(given.block)) // 8 for address in given.table)
        function = LAUNCH(partial(self.launch_memory, launch))
        self.functions.append(function)  # C calls it as long as a shortcut is there
        start = ctypes.cast(function, ctypes.c_void_p).value
        return Block(bytes(given.block), 0, 1, places, start or 0, 7, partial(self.again, launch))

    def launch_memory(self, launch: Launch, config: int, function: int, table: int, extra: None) -> int:
        """cuLaunchKernelEx, but for the emulator."""
        if self.status:
            return self.status
        try:
            params = self.plan.params
            slots = (ctypes.c_void_p * len(params)).from_address(table)
            found: dict[str, list[Any]] = {"pointer": [], "value": [], "number": []}
            for param, slot in zip(params, slots, strict=True):
                form = VALUES[param.dtype or f32] if param.kind == "value" else ctypes.c_longlong
                of_kind = found.get(param.kind, found["number"])
                of_kind.append(form.from_address(slot or 0).value)
            assert (function, extra, tuple(found["number"])) == (7, None, launch.numbers)
            self.launch(launch, found["pointer"], found["value"], ctypes.c_longlong.from_address(config).value)
        except BaseException as error:  # can't leave a function that C calls
            self.failed.append(error)
        return 0

    def again(self, launch: Launch, words: bytes) -> None:
        codes = Arguments(self.plan.params).codes
        stream, *given = struct.unpack(f"P{''.join(codes)}", words)
        pointers = sum(param.kind == "pointer" for param in self.plan.params)
        values = len(given) - pointers - len(launch.numbers)
        self.launch(launch, given[:pointers], given[pointers:][:values], stream)


class LaunchingDevice(EmulatorDevice):
    def load(self, source: Text, binary: Any) -> Loaded:
        loaded = super().load(source, binary)
        assert isinstance(loaded, EmulatedLoaded)
        return Launched(self, loaded.kernel, source)
