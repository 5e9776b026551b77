"""The bytes that DRAM really moved for one launch of a kernel, by Nsight Compute, beside what the plan predicted.

ncu runs a program from its start, so the kernel is launched again in a process of its own: `fusegen launch` on the spec
that the chain came from. Where that can't be (no ncu, no permission to read counters, a chain that is in no file), the
result says why.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from fusegen.errors import FusegenError
from fusegen.language.graph import Graph
from fusegen.language.spec import load_chains
from fusegen.language.types import bf16, f16, f32
from fusegen.measuring.profiling import bytes_read, bytes_written
from fusegen.runtime import Kernel, Program
from fusegen.version import PACKAGE

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
SKIPPED_LAUNCHES = 2  # launches that warm up
TIMEOUT_S = 300
USUAL_PLACE = "/usr/local/cuda/bin/ncu"


@dataclass(frozen=True, slots=True)
class Counters:
    """Predicted and measured bytes of one launch. Measured ones are None where `reason` says why."""

    predicted_read: int
    predicted_written: int
    read: int | None = None
    written: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.read is None or self.written is None:
            return f"bytes that DRAM moved: not measured: {self.reason}"
        return (
            "bytes that DRAM moved, by ncu, of those predicted: "
            f"read {self.read / 1e6:.1f} of {self.predicted_read / 1e6:.1f} MB "
            f"({ratio(self.read, self.predicted_read)}), "
            f"written {self.written / 1e6:.1f} of {self.predicted_written / 1e6:.1f} MB "
            f"({ratio(self.written, self.predicted_written)})\n"
            "  writes are short by what is still in the L2 when the kernel ends"
        )


def ratio(measured: int, predicted: int) -> str:
    return f"{measured / predicted:.1%}" if predicted else "-"


class Unmeasured(Exception):
    """Counters can't be read here; the message says why."""


def count_bytes(kernel: Kernel | Program) -> Counters:
    """Run the kernel under ncu at the sizes it was compiled for. Never raises: `reason` says what is in the way."""
    if isinstance(kernel, Program):
        plans = [own.plan for own in kernel.kernels]
        reason = f"ncu is asked for one kernel, and {kernel.name} is a program of {len(plans)}: bench its `kernels`"
        return Counters(sum(map(bytes_read, plans)), sum(map(bytes_written, plans)), reason=reason)
    predicted = bytes_read(kernel.plan), bytes_written(kernel.plan)
    try:
        read, written = measured(kernel)
    except Unmeasured as why:
        return Counters(*predicted, reason=str(why))
    return Counters(*predicted, read, written)


def measured(kernel: Kernel) -> tuple[int, int]:
    if kernel.device.kind != "cuda":
        raise Unmeasured(f"ncu reads NVIDIA's counters, and this is {kernel.device}")
    tool = shutil.which("ncu") or shutil.which(USUAL_PLACE)
    if tool is None:
        raise Unmeasured("there is no ncu (Nsight Compute) on the PATH")
    command = [
        tool, "--csv", "--print-units", "base", "--clock-control", "none", "--metrics", f"{READ},{WRITTEN}",
        "--kernel-name", kernel.name, "--launch-skip", str(SKIPPED_LAUNCHES), "--launch-count", "1",
        *relaunch(kernel),
    ]  # fmt: skip
    package = str(PACKAGE.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, "PYTHONPATH": path}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unmeasured(f"ncu did not run to its end: {error}") from error
    values = read_csv(done.stdout)
    if READ not in values or WRITTEN not in values:
        raise Unmeasured(complaint(done.stdout + done.stderr))
    return values[READ], values[WRITTEN]


def relaunch(kernel: Kernel) -> Iterator[str]:
    """The command that launches this kernel again. Raises Unmeasured for a chain that no file has as it is here."""
    graph = kernel.plan.graph
    dtype = dtype_option(graph)
    yield from (sys.executable, "-m", "fusegen", "launch", f"{graph.where.file}:{graph.name}")
    yield from ("--target", kernel.target.name, "--on", f"gpu:{kernel.device.ordinal}")
    yield from ("--launches", str(SKIPPED_LAUNCHES + 1))
    for name, size in graph.sizes.items():
        yield from ("--set", f"{name}={size}")
    yield from dtype


def dtype_option(graph: Graph) -> tuple[str, ...]:
    """How `fusegen launch` gets at this very graph's storage types from its spec."""
    spec = f"{graph.where.file}:{graph.name}"
    try:
        (chain,) = load_chains(spec)
    except FusegenError as error:
        raise Unmeasured(f"ncu runs a program of its own, and no spec has this chain: {error}") from error
    if chain.graph.signature == graph.signature:
        return ()
    for dtype in (f16, bf16, f32):
        if chain.with_dtype(dtype).graph.signature == graph.signature:
            return ("--dtype", dtype.name)
    raise Unmeasured(f"{spec} has other types than this kernel's {graph.signature}")


def read_csv(text: str) -> dict[str, int]:
    """Each metric's value in ncu's table, which stands somewhere in what the program and ncu print."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    values: dict[str, int] = {}
    for row in csv.DictReader(lines[start:]):
        name, value = row.get("Metric Name"), row.get("Metric Value")
        if name in (READ, WRITTEN) and value:
            try:
                values[name] = round(float(value.replace(",", "")))
            except ValueError:  # "n/a"
                continue
    return values


def complaint(text: str) -> str:
    """What ncu said was wrong, in a line."""
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM); root may, or whom the driver's option admits"
        )
    said = [line.strip("= ") for line in text.splitlines() if "ERROR" in line or "rror:" in line]
    return f"ncu gave no figures: {said[0] if said else 'it named no reason'}"
