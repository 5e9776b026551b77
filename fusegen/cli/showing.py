"""What goes out, and how: styled text on a terminal, plain text in a pipe, one JSON document for scripts.

Results go to stdout; progress and errors go to stderr, so that a pipe carries results alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TextIO

import typer
from typer.core import TyperGroup

from fusegen.errors import FusegenError, MissingError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

AS_JSON = "fusegen.as_json"
UsageError: Any = typer.BadParameter.__base__  # typer's own or click's, as its version has it
PLAIN_WIDTH = 4096  # in a pipe nothing is wrapped: the reader may be a program
BUG, NOT_WRITTEN = 70, 74  # EX_SOFTWARE and EX_IOERR of sysexits.h
Parameters = ParamSpec("Parameters")


# ---------------------------------------------------------------- verbs


class OutputError(FusegenError):
    """The result could not be written to where it was sent: a full disk, say."""

    exit_code = NOT_WRITTEN


def verb(function: Callable[Parameters, int | None]) -> Callable[Parameters, None]:
    """A verb returns its exit code; an error becomes its message on stderr, and JSON where JSON was asked for."""

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            code = function(*args, **kwargs)
            with going_out():
                sys.stdout.flush()
        except (FusegenError, MemoryError) as caught:
            error = caught if isinstance(caught, FusegenError) else no_memory(caught)
            complain(f"{error}\n")
            if kwargs.get("as_json"):
                print_error(type(error).__name__, str(error), error.exit_code)
            raise typer.Exit(error.exit_code) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            complain(traceback.format_exc())
            complain(f"\nthis is a bug in fusegen: {type(error).__name__} was not expected here\n")
            complain("  please report it with the command, the spec and the lines above\n")
            if kwargs.get("as_json"):
                print_error(type(error).__name__, str(error), BUG)
            raise typer.Exit(BUG) from None
        if code:
            raise typer.Exit(code)

    return run


def no_memory(error: MemoryError) -> MissingError:
    found = f"this machine's memory can't hold what that takes: {str(error) or 'out of memory'}"
    return MissingError(f"{found}\n  ask for smaller sizes with --set")


@contextmanager
def going_out() -> Iterator[None]:
    """Around whatever writes to stdout: raises OutputError where that can't be written."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(sys.stdout)
        raise OutputError(f"the output can't be written: {error.strerror or error}") from error


def discard(stream: TextIO) -> None:
    """Nothing more can be written to it: let the interpreter not try again when it ends, and end with 120."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def complain(text: str) -> None:
    """Write to stderr; where that fails too, the exit code is all there is."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


class Group(TyperGroup):
    """The command `fusegen`: what is wrong with its words is JSON, too, where JSON was asked for."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        as_json = "--json" in args
        with usage_errors(as_json):
            context = super().make_context(info_name, args, *more, **extra)
        context.meta[AS_JSON] = as_json
        return context

    def invoke(self, ctx: Any) -> Any:
        with usage_errors(ctx.meta[AS_JSON]):
            return super().invoke(ctx)


@contextmanager
def usage_errors(as_json: bool) -> Iterator[None]:
    """Print usage errors as JSON, and let typer say them on stderr."""
    try:
        yield
    except UsageError as error:
        if as_json:
            print_error("UsageError", error.format_message(), error.exit_code)
        raise


def worst(codes: Iterable[int]) -> int:
    """One exit code for many: a wrong kernel counts more than something missing, and that more than a wrong request."""
    found = set(codes)
    return next((code for code in (1, 3, 2) if code in found), 0)


# ---------------------------------------------------------------- text


def console(stderr: bool = False) -> Console:
    """A console for people; in a pipe as wide as its lines need. Brackets in text are shapes, never markup."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def say(*parts: RenderableType, style: str | None = None) -> None:
    """Print to stdout. Text lines are never cut."""
    out = console()
    with going_out(), plain_lines(out):
        for part in parts:
            out.print(part, style=style, soft_wrap=isinstance(part, str))


@contextmanager
def plain_lines(out: Console) -> Iterator[None]:
    """In a pipe, drop the blanks that tables put at the ends of lines."""
    if out.is_terminal:
        yield
        return
    with out.capture() as captured:
        yield
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def heading(text: str) -> None:
    say(f"\n{text}", style="bold")


def show_code(text: str, language: str) -> None:
    """Source code: coloured on a terminal, byte for byte in a pipe."""
    if not sys.stdout.isatty():
        with going_out():
            sys.stdout.write(text)
        return
    from rich.syntax import Syntax

    with going_out():
        console().print(Syntax(text, language, theme="ansi_dark").highlight(text), soft_wrap=True, end="")


def table(*columns: str, rows: Iterable[Sequence[Any]] = (), styles: Mapping[int, str] | None = None) -> Table:
    """A table without lines. `>` at the end of a column's name aligns it to the right, `!` keeps its cells in one line;
    `styles` colour columns by number."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        right = name.endswith(">")
        made.add_column(
            name.rstrip(">!"), justify="right" if right else "left", style=(styles or {}).get(number),
            no_wrap=name.endswith((">", "!")), overflow="fold",
        )  # fmt: skip
    for row in rows:
        made.add_row(*row)
    return made


def mark(ok: bool | None) -> str:
    """`ok`, `FAIL`, or `-` where nothing was tried."""
    return "-" if ok is None else "ok" if ok else "FAIL"


def mark_style(ok: bool | None) -> str:
    return "dim" if ok is None else "green" if ok else "bold red"


def mebibytes(count: float) -> str:
    """`192.0 MiB`; small counts in KiB or bytes."""
    if count >= 2**20 / 10:
        return f"{count / 2**20:,.1f} MiB"
    return f"{count / 2**10:,.1f} KiB" if count >= 2**10 else f"{count:,.0f} B"


def times(before: float, after: float) -> str:
    """`2.17x`."""
    return f"{before / after:.2f}x" if after else "-"


# ---------------------------------------------------------------- JSON


def print_json(document: Any) -> None:
    """One JSON document on stdout. JSON has no infinities and no NaN: they become text."""
    with going_out():
        sys.stdout.write(json.dumps(finite(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        sys.stdout.flush()


def print_error(kind: str, message: str, exit_code: int) -> None:
    """An error as JSON, unless it is that nothing can be printed."""
    with contextlib.suppress(OutputError):
        print_json({"error": {"kind": kind, "message": message, "exit_code": exit_code}})


def finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


# ---------------------------------------------------------------- progress


class Progress:
    """Says what is being done. Off a terminal it says nothing."""

    def __init__(self, live: Any, task: Any) -> None:
        self.live = live
        self.task = task

    def step(self, name: str) -> None:
        """`name` begins; what was under way is done."""
        if self.live is not None:
            if self.live.tasks[0].fields.get("begun"):
                self.live.advance(self.task)
            self.live.update(self.task, description=name, begun=True)

    def reach(self, done: float, total: float, name: str) -> None:
        """So much of it is done, and `name` is under way; the total may have changed."""
        if self.live is not None:
            self.live.update(self.task, completed=done, total=total, description=name)

    def say(self, *parts: RenderableType, style: str | None = None) -> None:
        """Print a result while the bar is shown: the bar steps aside, since the two may be different streams."""
        if self.live is not None:
            self.live.stop()
        say(*parts, style=style)
        with going_out():
            sys.stdout.flush()
        if self.live is not None:
            self.live.start()


@contextmanager
def progress(total: int, left: bool = False) -> Iterator[Progress]:
    """A bar on stderr over `total` steps, gone when done; none in a pipe, nor for a single step. `left`: it says how
    much time is left."""
    if total < 2 or not sys.stderr.isatty():
        yield Progress(None, None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.progress import TimeRemainingColumn as TimeLeftColumn

    what = TextColumn("{task.description}")
    times = (TimeLeftColumn(), TextColumn("left")) if left else (TimeElapsedColumn(),)
    columns = (SpinnerColumn(), BarColumn(24), MofNCompleteColumn(), *times, what)
    live = Bar(*columns, console=console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False)
    with live:
        yield Progress(live, live.add_task("", total=total, begun=False))
