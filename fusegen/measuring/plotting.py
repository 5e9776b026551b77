"""The roofline picture of benchmarks: how many operations a byte, how many operations a second, under which roofs.

Every point is at its own bytes: fused kernels at those that have to move, unfused ones at those that their operators
move together, so fusing moves a point to the right and up. Roofs are the copy rate of the same run and the data
sheet's.

matplotlib is imported here when it is needed: pip install 'fusegen[plot]'.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusegen.errors import MissingError, RequestError, writing
from fusegen.measuring.benchmark import Bench
from fusegen.measuring.entries import Entry

FORMATS = (".svg", ".png", ".pdf")
INK, PALE, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = ("#0b6e4f", "#c8553d", "#2f6690", "#8d5b9e", "#b8860b", "#3a7d7c", "#a23b72", "#55606e")
MARKERS: Mapping[str, str] = {"fusegen": "o", "unfused": "v", "torch": "s", "peer": "D"}
LABELS: Mapping[str, str] = {
    "fusegen": "fusegen, fused", "unfused": "fusegen, one kernel an operator", "torch": "torch", "peer": "by hand",
}  # fmt: skip
UNFUSED = ("torch eager",)  # one kernel an operator, whoever wrote it


@dataclass(frozen=True, slots=True)
class Point:
    """One entry on the picture: flop a byte, TFLOP/s."""

    bench: Bench
    entry: Entry
    intensity: float
    tflops: float


def points_of(bench: Bench) -> list[Point]:
    """The entries that have a figure, pieces left out; none for a chain without operations, such as a copy."""
    found = []
    for entry in bench.entries:
        if entry.us is None or entry.part or not bench.flops:
            continue
        apart = entry.kind == "unfused" or entry.name in UNFUSED
        moved = bench.unfused_bytes if apart else bench.ideal_bytes
        found.append(Point(bench, entry, bench.flops / moved, bench.flops / entry.us / 1e6))
    return found


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files. Raises MissingError."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MissingError(f"matplotlib is missing here ({error})\n  to get it: pip install 'fusegen[plot]'") from error


def check_file(file: Path) -> None:
    """Raises RequestError for a name that is no picture's, before anything is measured for it."""
    if file.suffix.lower() not in FORMATS:
        raise RequestError(f"{file} is no picture; name a file that ends in {', '.join(FORMATS)}")
    if not file.resolve().parent.is_dir():
        raise RequestError(f"there is no folder {file.parent} to put {file.name} into")


def roofline(benches: Sequence[Bench], file: Path) -> None:
    """Draw the benchmarks, which are of one device, into an SVG, PNG or PDF file.

    Raises MissingError without matplotlib, RequestError for another kind of file or where there is no point to draw,
    and OutputError where the file can't be written.
    """
    check_file(file)
    points = [point for bench in benches for point in points_of(bench)]
    if not points:
        raise RequestError("there is no point to draw: a roofline shows operations a second, and no entry has any")
    plt = pyplot()
    style = {"font.family": "sans-serif", "font.size": 10, "svg.hashsalt": "fusegen", "svg.fonttype": "none",
             "text.color": INK, "axes.labelcolor": INK, "xtick.color": PALE, "ytick.color": PALE}  # fmt: skip
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(9.6, 6.2), layout="constrained")
        try:
            draw_roofs(axes, benches[0], points)
            draw_points(axes, points, len(benches))
            frame(axes, benches)
            with writing(file, "name another file"):
                figure.savefig(file, dpi=180, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
        finally:
            plt.close(figure)


def draw_roofs(axes: Any, bench: Bench, points: Sequence[Point]) -> None:
    """The ceilings over the span of intensities that is shown."""
    low = min(p.intensity for p in points) / 2
    ridge = bench.sheet_tflops * 1e3 / bench.copy_gbs
    high = max(max(p.intensity for p in points) * 2, ridge * 2.5)
    sheet_ridge = bench.sheet_tflops * 1e3 / bench.sheet_gbs
    top = bench.sheet_tflops
    axes.plot([low, ridge, high], [low * bench.copy_gbs / 1e3, top, top], color=INK, linewidth=1.8, zorder=2)
    axes.plot([low, sheet_ridge], [low * bench.sheet_gbs / 1e3, top], color=PALE, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    lowest = min(p.tflops for p in points)
    axes.set_ylim(min(lowest / 1.8, low * bench.copy_gbs / 1e3), top * 2)
    middle = math.sqrt(max(max(p.intensity for p in points) * 1.6, ridge / 6) * ridge)
    axes.annotate(
        f"copy, measured: {bench.copy_gbs / 1e3:.2f} TB/s (data sheet {bench.sheet_gbs / 1e3:.1f})",
        (middle, middle * bench.copy_gbs / 1e3), xytext=(-24, 10), textcoords="offset points", ha="right", color=INK,
        fontsize=9,
    )  # fmt: skip
    axes.annotate(
        f"f32, data sheet: {top:.0f} TFLOP/s", (high, top), xytext=(-6, 6), textcoords="offset points", ha="right",
        color=INK, fontsize=9,
    )  # fmt: skip


def draw_points(axes: Any, points: Sequence[Point], benches: int) -> None:
    colours = {id(b): COLOURS[i % len(COLOURS)] for i, b in enumerate({id(p.bench): p.bench for p in points}.values())}
    for point in points:
        kind = point.entry.kind
        colour = colours[id(point.bench)]
        own = kind == "fusegen"
        roof = point.intensity * point.bench.copy_gbs / 1e3
        axes.plot([point.intensity] * 2, [point.tflops, roof], color=colour, linewidth=0.8, alpha=0.35, zorder=1)
        axes.scatter(
            point.intensity, point.tflops, s=75 if own else 42, marker=MARKERS[kind], zorder=4 if own else 3,
            facecolor=colour if own else "white", edgecolor=colour, linewidth=1.4,
        )  # fmt: skip
    for point, height in label_heights(axes, [p for p in points if benches == 1 or p.entry.kind == "fusegen"]):
        said = point.bench.chain if benches > 1 else point.entry.name
        share = f", {point.entry.share:.0%} of the floor" if point.entry.share is not None else ""
        axes.annotate(
            f"{said}: {point.entry.us:.0f} us{share}", (point.intensity, point.tflops),
            xytext=(10, height), textcoords="offset points", va="center", fontsize=8.5,
            color=colours[id(point.bench)], bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
        )  # fmt: skip


def label_heights(axes: Any, points: Sequence[Point], apart: float = 12.0) -> list[tuple[Point, float]]:
    """How far above its point each label stands, in points of type, so that no two labels of a column meet."""
    pixels = 72 / axes.figure.dpi
    placed: list[tuple[float, float]] = []
    found = []
    for point in sorted(points, key=lambda p: -p.tflops):
        x, y = (value * pixels for value in axes.transData.transform((point.intensity, point.tflops)))
        below = [there for column, there in placed if abs(column - x) < 190]
        height = min([y, *(there - apart for there in below)])
        placed.append((x, height))
        found.append((point, height - y))
    return found


def frame(axes: Any, benches: Sequence[Bench]) -> None:
    first = benches[0]
    title = first.chain if len(benches) == 1 else f"{len(benches)} chains"
    axes.set_title(f"{title} on {first.device}", loc="left", fontsize=12, fontweight="bold", pad=22)
    sizes = " ".join(f"{name}={size}" for name, size in first.sizes.items())
    under = f"{first.signature}  {sizes}" if len(benches) == 1 else first.conditions
    axes.text(0, 1.02, under, transform=axes.transAxes, fontsize=8.5, color=PALE)
    axes.set_xlabel("flop a byte: fused, of the bytes that have to move; unfused, of those that its operators move")
    axes.set_ylabel("TFLOP/s")
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(PALE)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    kinds = {e.kind for b in benches for e in b.entries if e.us is not None and e.kind != "piece"}
    for kind, label in LABELS.items():
        if kind in kinds:
            own = kind == "fusegen"
            axes.scatter([], [], marker=MARKERS[kind], s=55 if own else 36, label=label, edgecolor=INK,
                         facecolor=INK if own else "white")  # fmt: skip
    axes.legend(loc="lower right", frameon=False, fontsize=9)
