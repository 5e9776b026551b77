"""What the emulator raises on purpose.

    MissingError
    └── EmulatorUnavailable    no C++ compiler that can do what was asked for, no room to build or to run
    KernelError
    ├── EmulatorBuildError     the host compiler refuses the source
    └── KernelFault            a launch broke a rule of the machine
    RequestError
    └── LaunchError            the launch itself makes no sense: wrong arguments, too many threads

The parents are those of `fusegen.errors`.
"""

from __future__ import annotations

from fusegen.errors import KernelError, MissingError, RequestError

Index = tuple[int, int, int]


class EmulatorUnavailable(MissingError):
    """The emulator can't build or run the kernel on this machine; the message names what to install or to change."""


class EmulatorBuildError(KernelError):
    """The host compiler refuses a kernel: its log, with the numbered source around each place.

    `log` is the compiler's text alone.
    """

    def __init__(self, message: str, log: str = "") -> None:
        self.log = log
        super().__init__(message)


class LaunchError(RequestError):
    """A launch whose arguments don't fit the kernel, or whose sizes no GPU takes. Nothing ran."""


class KernelFault(KernelError):
    """A launch broke a rule; it ended there, and the buffers hold what was written before.

    `kind` is one of `kernel.KINDS`. `line` and `source_line` are the place in the emitted source, None where it is not
    known; `block` and `thread` say which thread, None where no single one can be named. Where two
    threads disagree (a race, a divergence) `other_line` is the place of the other one.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        line: int | None,
        source_line: str | None,
        block: Index | None,
        thread: Index | None,
        other_line: int | None = None,
    ) -> None:
        self.kind = kind
        self.line = line
        self.source_line = source_line
        self.block = block
        self.thread = thread
        self.other_line = other_line
        super().__init__(message)
