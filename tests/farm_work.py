"""Jobs that tests have workers do, and what a worker without a GPU does in place of measuring.

Workers find them here by name, as they find fusegen's own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from fusegen.errors import RequestError
from fusegen.planner import candidates
from fusegen.tuning import Bench
from fusegen.tuning.farm import Order, search
from fusegen.tuning.report import Report

ROOT = Path(__file__).resolve().parent.parent
FASTEST_US = 0.5  # what the last candidate that is tried takes; the others take their own estimates


def squared(number: int) -> int:
    return number * number


def refused(number: int) -> int:
    raise RequestError(f"{number} is refused")


def mistaken(number: int) -> int:
    return number // 0


def deadly(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def waiting_to_be_killed(number: int, folder: str) -> int:
    """Done at once by whoever finds that somebody has tried before."""
    note_and_wait(Path(folder) / f"{number}.pid")
    return number * number


def note_and_wait(file: Path) -> None:
    """Say who is here, and wait to be killed; nothing where somebody was here before."""
    try:
        with file.open("x") as note:
            note.write(str(os.getpid()))
    except FileExistsError:
        return
    time.sleep(600)


def kill_whoever_waits(file: Path) -> int:
    """Of `note_and_wait`: its process is killed as soon as it is there; its id."""
    while not (file.exists() and file.read_text()):
        time.sleep(0.01)
    pid = int(file.read_text())
    os.kill(pid, signal.SIGKILL)
    return pid


def measured(order: Order, on: str, victim: str = "") -> Report:
    """As `fusegen.tuning.farm.measure`, with validation in the emulator and times from a script (tests/tuning_child.py)
    in place of a GPU's. The first who measures and finds no file `victim` waits to be killed."""
    if victim:
        note_and_wait(Path(victim))
    last = candidates(order.graph, order.target).plans[order.effort.most - 1].configuration
    command = (sys.executable, str(ROOT / "tests" / "tuning_child.py"), json.dumps({last: FASTEST_US}))
    with Bench(order.target, "emulator", deadline_s=300, command=command) as bench:
        return search(order, bench)
