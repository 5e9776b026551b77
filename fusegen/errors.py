"""Every error fusegen raises on purpose, and what the command line makes of it.

    FusegenError                what went wrong, where, and the next step
    ├── RequestError            the request is wrong                         exit 2
    │   ├── SpecError           a spec is wrong; carries file:line
    │   │   └── UnknownOp       it calls an op that there is not
    │   ├── NoPlan              no rule can plan the graph on the target
    │   │   └── NoUnits         it has no matrix unit for the graph's factors
    │   └── ArgumentError       a kernel was called with arrays it can't take
    ├── KernelError             a kernel is wrong                            exit 1
    │   ├── CompileError        the runtime compiler refused the source
    │   ├── ValidationError     the kernel disagrees with its reference
    │   └── Drift               a golden source differs from what is emitted
    ├── MissingError            something is missing on this machine         exit 3
    └── OutputError             what was made can't be written               exit 74

The first line of a message is one sentence that stands alone; further lines add what was found, what was wanted and
what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FusegenError(Exception):
    """Base of every error raised on purpose; `exit_code` is what the command line returns for it."""

    exit_code = 1


class RequestError(FusegenError):
    """The request is wrong: the same call will fail again until the request changes."""

    exit_code = 2


class SpecError(RequestError):
    """A spec is wrong. `where` is the file and line the sentence speaks of."""

    def __init__(self, message: str, where: Where | None = None) -> None:
        self.where = where
        super().__init__(f"{where}: {message}" if where else message)


class UnknownOp(SpecError, AttributeError):
    """A spec calls an op that there is not. An AttributeError too, since pickle and others search every module so."""


class NoPlan(RequestError):
    """No rule can plan the graph on the target; the message gives the nearest rule's reason."""


class NoUnits(NoPlan):
    """The target has no matrix unit for the types of a chain's factors."""


class ArgumentError(RequestError):
    """A kernel was called with arrays that it can't take; nothing was launched."""


class KernelError(FusegenError):
    """A kernel is wrong."""


class CompileError(KernelError):
    """The runtime compiler refused a source: its log, with the numbered source around each place."""


class ValidationError(KernelError):
    """A kernel disagrees with the numpy reference generated from the same graph."""


class Drift(KernelError):
    """A golden source differs from what the planner and the templates now emit."""


class MissingError(FusegenError):
    """Something this request needs is missing on this machine; the message says how to get it."""

    exit_code = 3


class OutputError(FusegenError):
    """What was made can't be written to where it was sent: a full disk, say, or a folder without permission."""

    exit_code = 74  # EX_IOERR of sysexits.h


@contextmanager
def writing(what: object, advice: str) -> Iterator[None]:
    """Around whatever writes `what`: what the system says against it becomes OutputError, with `advice` behind it."""
    try:
        yield
    except BrokenPipeError:  # a reader that has seen enough is no error
        raise
    except OSError as error:
        found = f"{error.filename or what} can't be written: {error.strerror or error}"
        raise OutputError(f"{found}\n  {advice}" if advice else found) from error


class Where:
    """A place in the user's source: prints as file:line."""

    __slots__ = ("file", "line")

    def __init__(self, file: str, line: int) -> None:
        self.file = file
        self.line = line

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file  # some mistakes are nowhere in particular
