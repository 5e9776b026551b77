"""The roofline of a chain's kernels, as coordinates for a template: operations a byte, operations a second, and roofs.

A kernel stands at its own bytes and at its expected time; where it was measured, at that time too. Roofs are the data
sheet's. A mark on the roof's foot says where its operators would stand as one kernel each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusegen.reporting.state import Chain, Kernel

WIDTH, HEIGHT = 640.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 16.0, 40.0
LEAST, MOST = 1e-12, 1e15  # flop/B and TFLOP/s beyond this are nobody's


@dataclass(frozen=True, slots=True)
class Dot:
    """A kernel at a time. `kernel`: its number in the chain, from 0 on."""

    kernel: int
    x: float
    y: float
    roof_y: float
    measured: bool
    text: str


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Roof:
    path: str
    text: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """What there is to draw in a picture of WIDTH x HEIGHT."""

    dots: tuple[Dot, ...]
    roofs: tuple[Roof, ...]
    xs: tuple[Tick, ...]
    ys: tuple[Tick, ...]
    unfused: Tick | None


@dataclass(frozen=True, slots=True)
class Scale:
    """Logarithmic, from one value to another, on so many pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> tuple[Tick, ...]:
        """The powers of ten, or where there are few of them 2 and 5 times those too."""
        tens = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1,) if math.log10(self.high / self.low) > 2 else (1, 2, 5)
        values = [step * 10.0**ten for ten in tens for step in steps]
        return tuple(Tick(self(v), f"{v:g}") for v in values if self.low <= v <= self.high)


def flops(kernel: Kernel) -> int:
    """The operations that a kernel's roof is of: its products', where it has some."""
    return kernel.product_flops or kernel.flops


def roofline(chain: Chain) -> Roofline | None:
    """None for a chain without operations, such as a copy, and for numbers that can be no GPU's."""
    shown = [(place, k) for place, k in enumerate(chain.kernels) if flops(k) > 0 and k.moved > 0 and k.time_us > 0]
    if not shown or chain.dram_gbs <= 0 or any(k.roof_tflops <= 0 for _, k in shown):
        return None
    points = [(place, k, intensity(k), time, measured) for place, k in shown for time, measured in times(k)]
    tops = sorted({k.roof_tflops for _, k in shown})
    ridge = tops[-1] * 1e3 / chain.dram_gbs
    done = sum(flops(k) for _, k in shown)
    unfused = done / chain.unfused if chain.unfused > 0 else None
    xs = [*(x for _, _, x, _, _ in points), ridge, *([unfused] if unfused else [])]
    ys = [*(flops(k) / time / 1e6 for _, k, _, time, _ in points), *tops, min(xs) / 2 * chain.dram_gbs / 1e3]
    if not all(LEAST < value < MOST for value in (*xs, *ys)):
        return None
    across = Scale(min(xs) / 2, max(xs) * 3, LEFT, WIDTH - RIGHT)
    up = Scale(min(ys) / 2, max(ys) * 2.5, HEIGHT - BOTTOM, TOP)
    return Roofline(
        dots=tuple(dot(chain, across, up, *point) for point in points),
        roofs=tuple(roof(chain, across, up, top) for top in tops),
        xs=across.ticks(), ys=up.ticks(),
        unfused=Tick(across(unfused), f"unfused, {figure(unfused)} flop/B") if unfused else None,
    )  # fmt: skip


def figure(value: float) -> str:
    """Three digits, and no powers of ten where there is room."""
    return f"{value:,.0f}" if 1000 <= value < 1e9 else f"{value:.3g}"


def intensity(kernel: Kernel) -> float:
    return flops(kernel) / kernel.moved


def times(kernel: Kernel) -> Iterable[tuple[float, bool]]:
    yield kernel.time_us, False
    if kernel.measured is not None and kernel.measured.us > 0:
        yield kernel.measured.us, True


def dot(
    chain: Chain, across: Scale, up: Scale, place: int, kernel: Kernel, at: float, time: float, measured: bool
) -> Dot:  # fmt: skip
    rate = flops(kernel) / time / 1e6
    roof = min(at * chain.dram_gbs / 1e3, kernel.roof_tflops)
    said = "measured" if measured else "expected"
    speed = f"{figure(at)} flop/B, {figure(rate)} TFLOP/s, {rate / roof:.0%} of its roof"
    text = f"{kernel.name}, {said}: {time:.1f} µs, {speed}"
    return Dot(place, across(at), up(rate), up(roof), measured, text)


def roof(chain: Chain, across: Scale, up: Scale, top: float) -> Roof:
    ridge = top * 1e3 / chain.dram_gbs
    low = across.low
    points: Sequence[tuple[float, float]] = [(low, low * chain.dram_gbs / 1e3), (ridge, top), (across.high, top)]
    path = "M" + "L".join(f"{across(x)} {up(y)}" for x, y in points)
    return Roof(path, f"{top:g} TFLOP/s", across(across.high), up(top) - 6)
