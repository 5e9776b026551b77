"""What `bench` does and says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusegen.cli.showing import table
from fusegen.errors import MissingError, RequestError
from fusegen.language.spec import Chain
from fusegen.measuring.benchmark import COLUMNS, Bench, bench, foot_lines, heading_lines, table_rows
from fusegen.measuring.peers import Maker, load_peers
from fusegen.measuring.timing import Stopwatch
from fusegen.runtime import finding
from fusegen.runtime.gpu import GpuDevice
from fusegen.targets import Target

if TYPE_CHECKING:
    from rich.console import RenderableType

USUAL_PEERS = Path("benchmarks/peers.py")


def ask_watch(target: Target, on: str) -> Stopwatch:
    """A stopwatch on the GPU to measure on. Raises MissingError without one, RequestError for the emulator."""
    if on == "emulator":
        raise RequestError(
            "the emulator gives no times: it says what a kernel computes, not how fast\n  bench on a GPU"
        )
    try:
        device = finding.find(target, "gpu" if on == "auto" else on)
    except MissingError as error:
        raise MissingError(
            f"bench needs a GPU: the emulator gives no times\n{error_without_emulator(error)}"
        ) from error
    assert isinstance(device, GpuDevice)  # find() gives no other for "gpu"
    return Stopwatch(device)


def error_without_emulator(error: MissingError) -> str:
    """The lines that say which GPUs are here, without the advice to use the emulator instead."""
    lines = [line for line in str(error).splitlines() if "emulator" not in line]
    return "\n".join([*lines, "  `fusegen plan` says what to expect of one: bytes, floor, estimated time"])


def ask_peers(wanted: bool, file: Path | None) -> Mapping[str, Mapping[str, Maker]]:
    """Hand-written peers by chain: those of `file`, or of benchmarks/peers.py where that is here."""
    if not wanted:
        return {}
    if file is None and not USUAL_PEERS.is_file():
        return {}
    return load_peers(file or USUAL_PEERS)


def bench_one(
    chain: Chain, target: Target, watch: Stopwatch, peers: Mapping[str, Maker] | None, alone: bool, counters: bool,
    repeats: int,
) -> Bench:  # fmt: skip
    """Build the kernel or the program, prove it and time it; without `peers`, against none."""
    from fusegen import pipeline

    kernel = pipeline.compile(chain, target, on=f"gpu:{watch.device.ordinal}")
    others = False if peers is None else peers
    return bench(kernel, peers=others, alone=alone, counters=counters, repeats=repeats, watch=watch)


def shown(found: Bench) -> list[RenderableType]:
    """One kernel's figures: what it is, the table, under which conditions."""
    from rich.text import Text

    title, *rest = heading_lines(found)
    columns = [f"{name}>" if number else "!" for number, name in enumerate(COLUMNS)]
    columns[-1] = ""  # reasons may be long, and wrap
    return [Text(title, style="bold"), *rest, "", table(*columns, rows=table_rows(found)), *foot_lines(found)]


def bench_facts(benches: list[Bench], plot: Path | None) -> dict[str, Any]:
    return {"benches": [b.to_json() for b in benches], "plot": str(plot) if plot else None}
