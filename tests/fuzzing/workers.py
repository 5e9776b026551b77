"""Seeds in processes of their own: several at once, each with a time limit; one that dies costs its seed alone.

A worker runs seed after seed, since its imports take longer than most seeds do, and ends after some, which bounds what
the libraries it has loaded take.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 240.0  # for one seed
START_S = 300.0  # for a worker to be ready, the emulator's runtime built
SEEDS_EACH = 40  # that a worker runs before another takes its place

Row = dict[str, Any]  # what a seed came to, as `Outcome.json` gives it


class Worker:
    """A process, the seed that it runs, and until when it may."""

    def __init__(self, any_candidate: bool, environment: dict[str, str]) -> None:
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (for as long as the process)
        command = [sys.executable, "-m", "tests.fuzzing.worker", *(["--any"] if any_candidate else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, cwd=ROOT, env=environment,
        )  # fmt: skip
        self.ready, self.seed, self.done = False, -1, 0
        self.deadline = time.monotonic() + START_S
        self.heard = b""

    def give(self, seed: int, limit_s: float) -> None:
        assert self.process.stdin is not None
        self.seed, self.deadline = seed, time.monotonic() + limit_s
        with contextlib.suppress(OSError):  # it has died: its output ends, and that is told
            self.process.stdin.write(b"%d\n" % seed)
            self.process.stdin.flush()

    def lines(self) -> list[bytes] | None:
        """Whole lines that have come; None where the process has ended."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        *whole, self.heard = (self.heard + data).split(b"\n")
        return whole if data else None

    def said(self) -> str:
        """The end of what it wrote to its standard error."""
        self.errors.seek(0)
        return self.errors.read()[-1500:].decode(errors="replace")

    def end(self) -> int:
        """Let it finish by itself, which clears up behind it; one that does not is killed."""
        with contextlib.suppress(OSError):  # it is dead already
            assert self.process.stdin is not None
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        return self.kill()

    def kill(self) -> int:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        return self.process.wait()


def run_seeds(
    seeds: Iterable[int], *, jobs: int = 1, any_candidate: bool = False, limit_s: float = LIMIT_S,
    environment: dict[str, str] | None = None,
) -> Iterator[Row]:  # fmt: skip
    """What each seed came to, in the order in which they end."""
    left = deque(seeds)
    own = {**(environment or dict(os.environ)), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    chooser, workers = selectors.DefaultSelector(), set[Worker]()

    def start() -> None:
        worker = Worker(any_candidate, own)
        workers.add(worker)
        chooser.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

    def drop(worker: Worker) -> None:
        workers.discard(worker)
        chooser.unregister(worker.process.stdout)  # type: ignore[arg-type]

    def feed(worker: Worker) -> None:
        worker.seed = -1
        if left and worker.done < SEEDS_EACH:
            worker.give(left.popleft(), limit_s)
            return
        drop(worker)
        worker.end()
        worker.errors.close()

    try:
        start()
        while workers:
            for key, _ in chooser.select(timeout=0.5):
                worker: Worker = key.data
                lines = worker.lines()
                if lines is None:
                    drop(worker)
                    yield died(worker, any_candidate)
                    continue
                for line in lines:
                    if worker.ready:
                        worker.done += 1
                        yield json.loads(line)
                    worker.ready = True
                    feed(worker)
            for worker in [one for one in workers if time.monotonic() > one.deadline]:
                drop(worker)
                yield hung(worker, any_candidate, limit_s)
            if any(one.ready for one in workers) or not workers:
                while left and len(workers) < min(jobs, len(left) + len(workers)):
                    start()
    finally:
        for worker in workers:
            worker.kill()
            worker.errors.close()
        chooser.close()


def died(worker: Worker, any_candidate: bool) -> Row:
    code = worker.end()
    why = f"the process died of {signal.Signals(-code).name}" if code < 0 else f"the process ended with {code}"
    return failure(worker, "crash", f"{why}\n{worker.said()}", any_candidate)


def hung(worker: Worker, any_candidate: bool, limit_s: float) -> Row:
    worker.kill()
    return failure(worker, "hang", f"not done after {limit_s:.0f} s", any_candidate)


def failure(worker: Worker, result: str, why: str, any_candidate: bool) -> Row:
    """Of a worker that was not at a seed, nothing can be expected: the run ends."""
    worker.errors.close()
    if worker.seed < 0:
        raise RuntimeError(f"a worker could not start: {why}")
    return {"seed": worker.seed, "result": result, "why": why, "any": any_candidate}
