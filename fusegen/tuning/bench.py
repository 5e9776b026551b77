"""Candidates measured in a process of their own: what hangs or crashes there is told here as Unfit.

    with Bench(target, "gpu") as bench:
        bench.validate(source, binary)
        us = bench.time(source, binary, repeats=20)

One process serves many candidates, since starting one and filling gigabytes of operands takes longer than measuring;
when it is ended by a candidate, the next one gets a new process.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fusegen.database.rows import Status
from fusegen.errors import MissingError
from fusegen.spreading.processes import no_pipe_kills
from fusegen.tuning import wire
from fusegen.tuning.child import Open, Task, Time, Validate
from fusegen.version import PACKAGE

if TYPE_CHECKING:
    from fusegen.compiling import Binary
    from fusegen.planner.model import Source
    from fusegen.targets import Target

log = logging.getLogger("fusegen.tuning")

CHILD = (sys.executable, "-c", "from fusegen.tuning.child import main; main()")  # -m would make its types others
DEADLINE_S = 20.0  # for the launches of one candidate, which take milliseconds, and for filling operands
SLOWER = 6  # validation computes references on the CPU, and a first start loads a driver: so many times the deadline
END_S = 10.0  # for a killed process to be gone; a driver may hold it


class Unfit(Exception):
    """A candidate that can't be used: what became of it, and why. Never leaves the tuner."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Bench:
    """Times and validates candidates for one target on one device.

    `command` starts the child (a test has its own). Raises MissingError when the device is not there, or has no memory
    for the operands.
    """

    def __init__(
        self, target: Target, on: str = "gpu", *, deadline_s: float = DEADLINE_S, command: Sequence[str] = CHILD
    ) -> None:
        self.target = target
        self.on = on
        self.deadline_s = deadline_s
        self.command = tuple(command)
        self.process: subprocess.Popen[bytes] | None = None
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  (what children write to stderr; closed with the bench)
        self.piping = no_pipe_kills()  # a child may be dead when it is told something
        self.device = ""
        self.copy_rate = 0.0  # bytes per µs

    def __enter__(self) -> Bench:
        self.piping.__enter__()
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self.said.close()
        self.piping.__exit__(None, None, None)

    # ---------------------------------------------------------------- what is asked

    def time(self, source: Source, binary: Binary, repeats: int) -> list[float]:
        """Times of launches in µs, each with a cold L2. Raises Unfit."""
        answer = self.ask(Time(source, binary, repeats), self.deadline_s)
        return [float(us) for us in answer["us"]]

    def validate(self, source: Source, binary: Binary) -> None:
        """Raises Unfit for a candidate that disagrees with its reference."""
        problem = str(self.ask(Validate(source, binary), SLOWER * self.deadline_s)["problem"])
        if problem:
            raise Unfit("failed", f"wrong results: {problem}")

    def ask(self, task: Task, seconds: float) -> dict[str, Any]:
        """The child's answer. Raises Unfit for a candidate that got none, MissingError for what is not its fault."""
        if self.process is None:
            self.start()
        answer = self.exchange(task, seconds)
        if "missing" in answer:
            raise MissingError(answer["missing"])
        if "error" in answer:
            if answer["lost"]:
                self.end()
            raise Unfit("crashed" if answer["lost"] else "failed", answer["error"])
        return answer

    def exchange(self, task: Task, seconds: float) -> dict[str, Any]:
        process = self.process
        assert process is not None
        assert process.stdin is not None
        deadline = time.monotonic() + seconds
        try:
            wire.send(process.stdin, wire.packed(task))
            answer = json.loads(wire.receive(lambda count: self.read(count, deadline)))
        except TimeoutError:
            self.end()
            raise Unfit("hung", f"it did not end within {seconds:g} s") from None
        except (EOFError, BrokenPipeError, ValueError):  # ValueError: half an answer
            raise Unfit("crashed", self.end()) from None
        if not isinstance(answer, dict):
            raise Unfit("crashed", self.end())
        return answer

    def read(self, count: int, deadline: float) -> bytes:
        """Up to so many bytes of the child's answer. Raises TimeoutError."""
        assert self.process is not None
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        return os.read(pipe, count)

    # ---------------------------------------------------------------- the child

    def start(self) -> None:
        """Start a child and have it take the device. Raises MissingError when it can't."""
        self.said.seek(0)
        self.said.truncate()
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, env=environment(),
            start_new_session=True,
        )  # fmt: skip  # a session of its own: an interrupt goes to the tuner, which ends the child
        try:
            answer = self.ask(Open(self.target, self.on, not self.copy_rate), SLOWER * self.deadline_s)
        except Unfit as error:
            raise MissingError(f"the process that measures did not start: {error.reason}") from error
        self.device = str(answer["device"])
        self.copy_rate = self.copy_rate or float(answer["copy_rate"])

    def end(self) -> str:
        """Kill the child, if there is one; says how it ended."""
        process, self.process = self.process, None
        if process is None:
            return "it had ended"
        code = process.poll()
        if code is None:
            try:  # it may be about to end by itself, and then its own code tells more than ours
                code = process.wait(0.2)
            except subprocess.TimeoutExpired:
                process.kill()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.warning("process %d was killed and is still there; the driver holds it", process.pid)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError as error:  # a broken pipe with bytes still in its buffer
                    log.debug("closing a pipe to process %d: %s", process.pid, error)
        return self.ending(code)

    def ending(self, code: int | None) -> str:
        """`its process died by SIGSEGV: last line that it wrote`."""
        self.said.seek(0)
        lines = self.said.read().decode(errors="replace").strip().splitlines()
        log.debug("the child ended with %s: %s", code, "\n".join(lines[-20:]))
        if code is None:
            how = "was killed"
        elif code < 0:
            how = f"died by {signal.Signals(-code).name}"
        else:
            how = f"ended with code {code}"
        return f"its process {how}{': ' + lines[-1] if lines else ''}"


def environment() -> dict[str, str]:
    """This process's, in which a child finds the same fusegen."""
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
