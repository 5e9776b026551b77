"""A crew of processes of this machine.

A pool of `concurrent.futures` is broken for good when one of its processes dies, and does not say which job it died of.
Here each process has a thread of its own that gives it one job at a time: when the process dies, that thread knows of
which job, starts another process, and has the job done again.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from types import TracebackType

from fusegen.errors import MissingError
from fusegen.spreading.jobs import RETRIES, Answer, Job, perform

log = logging.getLogger("fusegen.spreading")

SPAWN = multiprocessing.get_context("spawn")  # a fork would share this process's GPU, locks and threads
Waiting = SimpleQueue["tuple[str, bytes, Future[Answer]] | None"]


class Processes:
    """So many processes, and one more for each of `gpus` (names as `--on` takes them), which does the jobs that take a
    GPU. They are started when there is something to do, and killed with the crew."""

    def __init__(self, count: int, gpus: Sequence[str] = ()) -> None:
        self.queues: dict[bool, Waiting] = {False: SimpleQueue(), True: SimpleQueue()}
        self.workers = [Worker(self.queues[False], "") for _ in range(count)]
        self.workers += [Worker(self.queues[True], gpu) for gpu in gpus]
        self.piping = no_pipe_kills()

    def __enter__(self) -> Processes:
        self.piping.__enter__()
        for worker in self.workers:
            worker.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.queue.put(None)
        for worker in self.workers:
            worker.dismiss()
        for worker in self.workers:
            worker.thread.join()
        self.piping.__exit__(None, None, None)

    def submit(self, job: Job) -> Future[Answer]:
        future: Future[Answer] = Future()
        self.queues[job.gpu is not None].put((job.name, pickle.dumps(job), future))
        return future

    def answer(self, future: Future[Answer]) -> Answer:
        return future.result()

    def look(self, waiting: Iterable[Job]) -> None:
        """Processes that die are replaced, so there is always somebody."""

    def call_off(self, future: Future[Answer]) -> None:
        future.cancel()


class Worker:
    """A thread, and the process that does its jobs. `on`: the GPU that is this worker's own."""

    def __init__(self, queue: Waiting, on: str) -> None:
        self.queue = queue
        self.on = on
        self.thread = threading.Thread(target=self.work, name="fusegen-worker", daemon=True)
        self.process: BaseProcess | None = None
        self.pipe: Connection
        self.lock = threading.Lock()
        self.dismissed = False

    def work(self) -> None:
        while (taken := self.queue.get()) is not None and not self.dismissed:
            name, job, future = taken
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self.done(name, job))
                except Exception as error:  # whoever waits for it would wait for ever
                    future.set_exception(error)

    def done(self, name: str, job: bytes) -> Answer:
        """Have a job done, by another process where one dies."""
        how = ""
        for _ in range(1 + RETRIES):
            if not self.start():
                return Answer(error=MissingError(f"{name} was called off"))
            try:
                self.pipe.send_bytes(job)
                answer: Answer = pickle.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):
                how = self.end()
                log.info("%s: its process %s", name, how)
            else:
                return answer
        return Answer(
            error=MissingError(
                f"{name} is lost: its process {how}, and {RETRIES} others that tried ended as well\n"
                "  all else is kept; see what kills them (memory?), then ask for this one alone"
            )
        )

    def start(self) -> bool:
        """Start the process if it does not run. Whether it does now: not where the crew is dismissed."""
        with self.lock:
            if self.process is None and not self.dismissed:
                self.pipe, there = SPAWN.Pipe()
                self.process = SPAWN.Process(target=serve, args=(there, self.on), name="fusegen-worker", daemon=True)
                self.process.start()
                there.close()
            return self.process is not None

    def end(self) -> str:
        """See the process off, which is dead or about to be; says how it died."""
        with self.lock:
            process, self.process = self.process, None
        if process is None:
            return "was called off"
        process.join(1)
        if process.exitcode is None:
            process.kill()
            process.join()
        self.pipe.close()
        code = process.exitcode or 0
        return f"died by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def dismiss(self) -> None:
        """Kill the process, whatever it does: what it would answer is not wanted any more."""
        self.dismissed = True
        with self.lock:
            if self.process is not None:
                self.process.kill()


def serve(pipe: Connection, on: str) -> None:
    """Do jobs, in a process of their own, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt goes to whoever asks, who kills this process
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # several processes leave numpy's threads nothing to do
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(pickle.dumps(perform(job, on)))


@contextmanager
def no_pipe_kills() -> Iterator[None]:
    """While it lasts, a write to a pipe or socket whose reader died is an error, and does not end this process as it
    does in the command line elsewhere."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGPIPE"):
        yield
        return
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGPIPE, before)
