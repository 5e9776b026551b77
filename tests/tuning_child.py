"""A tuning child that needs no GPU: it validates in the emulator, and its times follow a script.

python tests/tuning_child.py '{"rowwise registers 128/32 1x8": "crash", ...}'

The script names what becomes of a configuration when it is timed: a number of µs, "hang", "crash", "lost" or "refused".
Others take their own estimate.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from fusegen.errors import KernelError
from fusegen.measuring.timing import Timing
from fusegen.runtime.devices import Device
from fusegen.tuning import child

COPY_RATE = 4e6  # bytes per µs


class ScriptedClock:
    def __init__(self, device: Device, script: dict[str, Any]) -> None:
        self.device = device
        self.script = script

    def copy_rate(self) -> float:
        return COPY_RATE

    def time(self, launches: list[Any], repeats: int, warmup: int) -> Timing:
        plan = launches[0].plan
        fate = self.script.get(plan.configuration, plan.cost.time_us)
        if fate == "hang":
            time.sleep(600)
        if fate == "crash":
            print("about to crash", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if fate == "lost":
            self.device.synchronize = lost  # type: ignore[method-assign]
            lost()
        if fate == "refused":
            raise KernelError("the launch failed: CUDA_ERROR_INVALID_VALUE")
        return Timing(tuple(float(fate) * (1 + 0.001 * n) for n in range(repeats)))


def lost(stream: int | None = None) -> None:
    raise KernelError("a kernel that ran on it failed: CUDA_ERROR_ILLEGAL_ADDRESS")


if __name__ == "__main__":
    script = json.loads(sys.argv[1])
    child.main(lambda device: ScriptedClock(device, script))
