"""How long a launch takes on a GPU, by the driver's events; no array library is needed.

    watch = Stopwatch(kernel.device)
    timing = watch.time([kernel.prepare(*operands) for operands in sets])
    share = nbytes / timing.median / watch.copy_rate()

Each timed launch finds a cold L2 cache: before it a buffer five times as large as an H200's L2 is filled. The fill
leaves the L2 full of lines yet to be written back, so a launch pays for as many evictions as it leaves to others, and
no kernel looks fast because its results never reached memory. While the fill runs, the host queues what comes after it:
the time between the two events is the GPU's alone.

What a launch takes depends on its number, too: on an H200 an empty kernel took 3.0 to 4.1 us by the number of launches
ever queued modulo four, fills included, add_rmsnorm 8 x 4096 4.4 to 5.5. Behind one fill each, half of the four are
never met: medians of 30 were 3.2 and 3.55 by turns, 4.65 and 5.05. So every other repeat begins with one fill more,
and all four are met alike: the same medians were 3.4 to 3.5 and 4.8 to 5.0.

Everything goes to the default stream, which is every library's current one unless it was told otherwise, so torch's
own operators are timed by the same clock. Rates are bytes per µs, which is MB/s.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from weakref import finalize

from fusegen.errors import RequestError
from fusegen.runtime.devices import Device
from fusegen.runtime.gpu import GpuDevice

FLUSH_BYTES = 256 << 20  # larger than any GPU's L2, and as large as an MI300X's Infinity Cache
COPY_BYTES = 1 << 30  # that copy_rate reads, and as many that it writes: 256M f32
STREAM = 0  # the default one
REPEATS = 30
WARMUP = 3  # the first launches load code and fault pages in
HEAD_START_FACTOR = 2.0  # the GPU is kept busy for so many times as long as the host took to queue a launch

Launch = Callable[[int], object]
"""What is timed: called with a stream, on which it queues its work without waiting for it."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of like launches in µs, in the order they ran."""

    us: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.us)

    @property
    def low(self) -> float:
        """The 10th percentile."""
        return percentile(self.us, 0.1)

    @property
    def high(self) -> float:
        """The 90th percentile."""
        return percentile(self.us, 0.9)

    @property
    def spread(self) -> float:
        """From the 10th to the 90th percentile, as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def __str__(self) -> str:
        return f"{self.median:.1f} us ({self.low:.1f} to {self.high:.1f})"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies, between the two nearest by their distance."""
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


class Stopwatch:
    """Times launches on one GPU. Holds events and a buffer of FLUSH_BYTES.

    Raises RequestError for a device that is no GPU, and MissingError when the GPU has no memory for the buffer.
    """

    def __init__(self, device: Device) -> None:
        if not isinstance(device, GpuDevice):
            raise RequestError(
                f"{device} gives no times: it says what a kernel computes, not how fast\n"
                "  compile with on='gpu', on a machine that has one"
            )
        self.device = device
        self.buffer = device.empty(FLUSH_BYTES)
        self.events: list[object] = []
        self.rate: float | None = None
        finalize(self, drop, device, self.events).atexit = False  # at exit the driver may be gone before this is
        self.flush(fills=64)  # some 5 ms of work: an idle GPU's clocks rise
        self.fill_us = max(1.0, self.time_once(lambda stream: self.flush()))

    def time(self, launches: Sequence[Launch], repeats: int = REPEATS, warmup: int = WARMUP) -> Timing:
        """Times of `repeats` launches after `warmup` of them that don't count, each with a cold L2.

        Several launches, over different buffers, take turns. A launch queues any number of kernels; its time is from
        the first one's start to the last one's end. Raises KernelError when one of them fails.
        """
        return self.time_together([launches], repeats, warmup)[0]

    def time_together(
        self,
        contenders: Sequence[Sequence[Launch]],
        repeats: int = REPEATS,
        warmup: int = WARMUP,
        *,
        shuffled: bool = False,
    ) -> tuple[Timing, ...]:
        """The same of several contenders, each with launches of its own: one of each by turns, `repeats` times.

        Matrix products run at what the power limit leaves of the clock, which moves by a tenth within milliseconds:
        what is to be compared has to be timed side by side. On an H200 two kernels were 0.9 to 1.3 % apart so, in four
        runs, and 1.3 to 4.7 % where 15 launches of one came behind 15 of the other.

        `shuffled`: each turn in an order of its own, the same in every run. It is for launches of milliseconds, which
        find the clock as the one before leaves it; short ones would no longer meet all numbers of launches alike.
        """
        fewest = min(map(len, contenders), default=0)
        if not fewest or repeats < 1:
            raise RequestError(f"timing takes a launch and a repeat at least, and got {fewest} and {repeats}")
        host_us = 0.0
        for launches in contenders:
            for number in range(max(warmup, len(launches))):
                self.flush()
                start = time.perf_counter()
                launches[number % len(launches)](STREAM)
                taken_us = (time.perf_counter() - start) * 1e6
            host_us = max(host_us, taken_us)
        self.device.synchronize()  # what the warm-up got wrong is said before anything is timed
        fills = 1 + int(HEAD_START_FACTOR * host_us / self.fill_us)
        marks = self.take_events(2 * repeats * len(contenders))
        for number in range(repeats):
            self.flush(number % 2)
            places = range(len(contenders))
            for place in random.Random(number).sample(places, len(places)) if shuffled else places:
                launches = contenders[place]
                first = 2 * (number * len(contenders) + place)
                self.flush(fills)
                self.device.mark(marks[first], STREAM)
                launches[number % len(launches)](STREAM)
                self.device.mark(marks[first + 1], STREAM)
        self.device.synchronize()
        pairs = zip(marks[::2], marks[1::2], strict=True)
        us = [self.device.elapsed_us(start, end) for start, end in pairs]
        return tuple(Timing(tuple(us[place :: len(contenders)])) for place in range(len(contenders)))

    def copy_rate(self) -> float:
        """Bytes per µs, read and written, of a large copy within the GPU's memory: what other rates are shares of.

        It is the driver's own asynchronous copy of COPY_BYTES, which is also what torch's copy_ calls; cold, the median
        of REPEATS, measured when first asked for. Raises MissingError when the GPU has no memory for it.
        """
        if self.rate is None:
            source, to = self.device.empty(COPY_BYTES), self.device.empty(COPY_BYTES)
            self.device.fill(source.address, COPY_BYTES, STREAM)
            timing = self.time([lambda stream: self.device.copy(to.address, source.address, COPY_BYTES, stream)])
            self.rate = 2 * COPY_BYTES / timing.median
        return self.rate

    def flush(self, fills: int = 1) -> None:
        """Queue what empties the L2 of all but its own lines; several fills give the host time to queue more."""
        for _ in range(fills):
            self.device.fill(self.buffer.address, FLUSH_BYTES, STREAM)

    def time_once(self, launch: Launch) -> float:
        start, end = self.take_events(2)
        self.device.mark(start, STREAM)
        launch(STREAM)
        self.device.mark(end, STREAM)
        self.device.synchronize()
        return self.device.elapsed_us(start, end)

    def take_events(self, count: int) -> list[object]:
        """The first `count` events; they are used again by whatever is timed next."""
        while len(self.events) < count:
            self.events.append(self.device.event())
        return self.events[:count]


def drop(device: Any, events: list[object]) -> None:
    for event in events:
        device.drop_event(event)
