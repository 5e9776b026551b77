"""A job: a function and its arguments, as plain data; and how it is done, wherever that is.

A job travels as its chain's graph rather than as its spec: the graph has everything that the spec said, whatever else
the spec imports, and stays as it is when the file is edited meanwhile. What a job makes comes back with the compiled
kernels that it put into its machine's cache, so that they serve here as well.

Pickles go between copies of one fusegen only: each asks first whether the other one has the same source.
"""

from __future__ import annotations

import hashlib
import pickle
import socket
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from fusegen.errors import FusegenError, MissingError
from fusegen.runtime.cache import Entry, KernelCache, Key, collecting
from fusegen.targets import Target
from fusegen.version import PACKAGE, VERSION

RETRIES = 3  # of a job whose worker died, by another worker


class Faulty(FusegenError):
    """A job met a bug in fusegen; the message is what Python says of it."""

    exit_code = 70


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """`function(*arguments)`, of a function that is found by its module and name. `name` says it to people.

    A job with a `gpu` takes a GPU of that target for itself, and its function gets `on=`, which names it.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    gpu: Target | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a job: its function's `value`, or an `error`. `made`: kernels that this machine's cache lacks."""

    value: Any = None
    error: FusegenError | None = None
    made: tuple[tuple[Key, Entry], ...] = ()

    def kept(self) -> Answer:
        """The same, its kernels in this machine's cache."""
        if self.made:
            KernelCache().take(dict(self.made))
        return self


class Crew(Protocol):
    """Who does jobs."""

    def submit(self, job: Job) -> Future[Any]:
        """Have a job done as soon as somebody is free."""

    def answer(self, future: Future[Any]) -> Answer:
        """Of a job that is done. A job that is lost for good is an answer with an error. Raises MissingError where the
        worker has another fusegen."""

    def look(self, waiting: Iterable[Job]) -> None:
        """Raises MissingError where nobody is left who could do these."""

    def call_off(self, future: Future[Any]) -> None:
        """What it is for is of no use any more."""


def perform(job: Job, on: str = "gpu", collect: bool = False) -> Answer:
    """Do a job in this process. What fusegen raises on purpose is an answer; what it does not is one as well, since a
    bug that one chain meets must not cost the answers of the others."""
    value: Any = None
    problem: FusegenError | None = None
    with collecting() as made:
        try:
            value = job.function(*job.arguments, **({"on": on} if job.gpu else {}))
        except FusegenError as error:
            problem = error
        except Exception as error:
            found = f"{job.name}: this is a bug in fusegen: {type(error).__name__} was not expected here"
            advice = "please report it with the command, the spec and these lines"
            problem = Faulty(f"{found}\n{traceback.format_exc()}  {advice}")
    return Answer(value, problem, tuple(made.items()) if collect else ())


# ---------------------------------------------------------------- between machines


@cache
def fingerprint() -> str:
    """The version, and a hash of all that fusegen's files say: of its modules, data and templates."""
    templates = PACKAGE / "templates" if (PACKAGE / "templates").is_dir() else PACKAGE.parent / "templates"
    found = hashlib.sha256()
    for root, name in ((PACKAGE, "fusegen"), (templates, "templates")):
        for path in sorted(root.rglob("*")):
            own = path.relative_to(root).as_posix()
            if path.is_file() and "__pycache__" not in own and not (name == "fusegen" and own.startswith("templates/")):
                found.update(f"{name}/{own} {path.stat().st_size}\n".encode() + path.read_bytes())
    return f"{VERSION}, source {found.hexdigest()[:12]}"


def answered(job: bytes, own: str, on: str) -> tuple[str, bytes]:
    """A worker's part: why it refuses, else nothing; and its answer, pickled. `own`: the fingerprint of who asks."""
    if own != fingerprint():
        return f"{socket.gethostname()} has fusegen {fingerprint()}, and {own} asks", b""
    return "", pickle.dumps(perform(pickle.loads(job), on, collect=True))


def opened(reply: tuple[str, bytes]) -> Answer:
    """The answer in a worker's reply. Raises MissingError where it refused."""
    refusal, data = reply
    if refusal:
        raise MissingError(
            f"the workers have another fusegen than this machine: {refusal}\n"
            "  install the same one, with the same extras, on every node of the cluster"
        )
    answer: Answer = pickle.loads(data)
    return answer.kept()
