"""The process that candidates run in: it times and validates what it is sent, and answers in JSON.

`fusegen.tuning.bench` starts it, writes tasks to its stdin and reads answers from its stdout.

A candidate may hang, write where it must not, or take the process with it; then this process is ended and another one
started, and the tuner lives. After an error that the GPU does not recover from within a process (an illegal address),
the answer says `lost`, and the process ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from fusegen.errors import FusegenError, MissingError
from fusegen.measuring.operands import Operands, rotation
from fusegen.measuring.timing import Launch, Stopwatch, Timing
from fusegen.runtime import Kernel
from fusegen.runtime.devices import Device
from fusegen.runtime.finding import find
from fusegen.tuning import wire

if TYPE_CHECKING:
    from fusegen.compiling import Binary
    from fusegen.planner.model import Layout, Source
    from fusegen.targets import Target

BUSY_US = 2e6  # of launches a task; slow kernels are launched less often
FEWEST = 3  # launches that are timed, however slow they are


@dataclass(frozen=True, slots=True)
class Open:
    """Take the device; answers its name and the copy rate in bytes per µs (0 when not asked for)."""

    target: Target
    on: str
    copy_rate: bool


@dataclass(frozen=True, slots=True)
class Time:
    """Time a candidate at its graph's sizes; answers µs."""

    source: Source
    binary: Binary
    repeats: int


@dataclass(frozen=True, slots=True)
class Validate:
    """Compare a candidate with its reference, quickly; answers `problem`, empty when it is right."""

    source: Source
    binary: Binary


Task = Open | Time | Validate


class Clock(Protocol):
    """What times launches: a Stopwatch, or a test's."""

    def time(self, launches: list[Launch], repeats: int, warmup: int) -> Timing: ...
    def copy_rate(self) -> float: ...


class Child:
    """The state between tasks: a device, operands for one graph at a time, and the kernels loaded for it."""

    def __init__(self, clock: Callable[[Device], Clock]) -> None:
        self.make_clock = clock
        self.device: Device
        self.clock: Clock
        self.sets: list[Operands] = []
        self.problem: object = None
        self.launches: dict[str, list[Launch]] = {}

    def answer(self, task: Task) -> dict[str, Any]:
        if isinstance(task, Open):
            return self.open(task)
        if isinstance(task, Time):
            return self.time(task)
        return self.validate(task)

    def open(self, task: Open) -> dict[str, Any]:
        self.device = find(task.target, task.on)
        self.clock = self.make_clock(self.device)
        return {"device": self.device.name, "copy_rate": self.clock.copy_rate() if task.copy_rate else 0.0}

    def time(self, task: Time) -> dict[str, Any]:
        launches = self.prepared(task)
        first = self.clock.time(launches[:1], 1, 1).median
        repeats = max(FEWEST, min(task.repeats, int(BUSY_US / max(first, 1e-3))))
        return {"us": list(self.clock.time(launches, repeats, 2).us)}

    def prepared(self, task: Time) -> list[Launch]:
        """The candidate's launches over each set of operands; made once, since finalists come again and again."""
        graph = task.source.plan.graph
        problem = (graph.signature, graph.sizes_text())
        if problem != self.problem:
            self.launches, self.sets, self.problem = {}, [], None  # memory is given back before more is taken
            self.sets, self.problem = rotation(self.device, graph), problem
        key = sha256(task.source.text.encode()).hexdigest()
        if key not in self.launches:
            kernel = self.kernel(task)
            self.launches[key] = [kernel.prepare(*each.inputs, out=each.out) for each in self.sets]
        return self.launches[key]

    def kernel(self, task: Time | Validate) -> Kernel:
        from fusegen.pipeline import build

        plan = task.source.plan

        def variant(layout: Layout) -> tuple[Source, Binary | None]:
            made = build(plan.graph, plan.target, layout, tuned=False, like=plan)
            return made.source, made.binary

        return Kernel(task.source, task.binary, self.device, variant)

    def validate(self, task: Validate) -> dict[str, Any]:
        from fusegen.validation import validate

        report = validate(self.kernel(task), quick=True)
        wrong = [f"{case.name}: {case.problem}" for case in report.cases if not case.ok]
        return {"problem": "" if report.ok else "; ".join(wrong) or "nothing could be compared"}

    def healthy(self) -> bool:
        """Whether the device still answers after an error."""
        try:
            self.device.synchronize()
        except (FusegenError, AttributeError):  # no device was opened
            return False
        return True


def serve(tasks: BinaryIO, answers: BinaryIO, clock: Callable[[Device], Clock] = Stopwatch) -> None:
    """Answer tasks until there are no more, or the device is lost."""
    child = Child(clock)
    lost = False
    while not lost:
        try:
            task = wire.unpacked(wire.receive(tasks.read))
        except EOFError:
            return
        try:
            answer = child.answer(task)
        except MissingError as error:
            answer = {"missing": str(error)}
        except Exception as error:  # whatever a candidate makes go wrong is an answer about the candidate
            lost = not child.healthy()
            answer = {"error": f"{type(error).__name__}: {error}", "lost": lost}
        wire.send(answers, json.dumps(answer).encode())


def leave_with(parent: int) -> None:
    """End this process when its parent is gone, even in the middle of a launch that never ends."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(clock: Callable[[Device], Clock] = Stopwatch) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything here prints is no answer
    threading.Thread(target=leave_with, args=(os.getppid(),), daemon=True).start()
    serve(sys.stdin.buffer, answers, clock)
    answers.flush()
    os._exit(0)  # a lost device's destructors have nothing left to do, and may hang
