"""What goes out, and how: styled text on a terminal, plain text in a pipe, one JSON document for scripts.

Results go to stdout; progress and errors go to stderr, so that a pipe carries results alone.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TextIO

import typer
from typer.core import TyperGroup

from fusegen.cli.excerpts import excerpt
from fusegen.errors import FusegenError, MissingError, OutputError, writing

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

AS_JSON = "fusegen.as_json"
UsageError: Any = typer.BadParameter.__base__  # typer's own or click's, as its version has it
PIPE_WIDTH = 100  # columns of tables and sentences in a pipe, which has no width of its own
WIDE = 4096  # columns there of tables of measurements, which have as many as their cells need
BUG = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # what a shell says of a program that SIGINT ended
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})  # what only writing meets
Parameters = ParamSpec("Parameters")


# ---------------------------------------------------------------- verbs


def verb(function: Callable[Parameters, int | None]) -> Callable[Parameters, None]:
    """A verb returns its exit code; an error becomes its message on stderr, and JSON where JSON was asked for."""

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        PASSED_OVER.clear()
        try:
            code = worst([function(*args, **kwargs) or 0, *(error.exit_code for error in PASSED_OVER)])
            with going_out():
                sys.stdout.flush()
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            complain("interrupted\n")
            if kwargs.get("as_json"):
                print_error("KeyboardInterrupt", "interrupted", INTERRUPTED)
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if (meant := meaning(error)) is not None:
                complain(f"{meant}\n{excerpt(meant)}")
                if kwargs.get("as_json"):
                    print_error(type(meant).__name__, str(meant), meant.exit_code)
                raise typer.Exit(meant.exit_code) from None
            complain(traceback.format_exc())
            complain(f"\nthis is a bug in fusegen: {type(error).__name__} was not expected here\n")
            complain("  please report it with the command, the spec and the lines above\n")
            if kwargs.get("as_json"):
                print_error(type(error).__name__, str(error), BUG)
            raise typer.Exit(BUG) from None
        if code:
            raise typer.Exit(code)

    return run


PASSED_OVER: list[FusegenError] = []
"""What the verb that is running has said, and gone on without."""


def pass_over(*errors: FusegenError) -> None:
    """Say what is wrong with some of many, and go on with the others; the verb's exit code and its JSON know of it."""
    for error in errors:
        complain(f"{error}\n{excerpt(error)}")
    PASSED_OVER.extend(errors)


def meaning(error: Exception) -> FusegenError | None:
    """The error to show for one that was raised on purpose, or that says what this machine has too little of."""
    if isinstance(error, FusegenError):
        return error
    if isinstance(error, MemoryError):
        found = f"this machine's memory can't hold what that takes: {str(error) or 'out of memory'}"
        return MissingError(f"{found}\n  ask for smaller sizes with --set")
    if isinstance(error, OSError) and error.errno in FULL:
        where = error.filename or "a file"
        advice = "free space there; TMPDIR names another folder for temporary files"
        return OutputError(f"{where} can't be written: {error.strerror}\n  {advice}")
    return None


@contextmanager
def going_out() -> Iterator[None]:
    """Around whatever writes to stdout: raises OutputError where that can't be written."""
    try:
        with writing("the output", ""):
            yield
    except OutputError:
        discard(sys.stdout)
        raise


def put(text: str) -> None:
    """Write to stdout as it is. Raises OutputError where that can't be written."""
    with going_out():
        sys.stdout.write(text)


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
    except ValueError:  # a spec has closed it
        pass
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
    return next((code for code in (1, 3, 2) if code in found), max(found, default=0))


# ---------------------------------------------------------------- text


def console(stderr: bool = False, wide: bool = False) -> Console:
    """A console for people. Brackets in text are shapes, never markup."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDE if wide else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def say(*parts: RenderableType, style: str | None = None, wide: bool = False) -> None:
    """Print to stdout. Text lines are printed as they are; tables and `prose` wrap where the console ends, `wide` ones
    not in a pipe."""
    out = console(wide=wide)
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


def prose(text: str, style: str = "") -> Text:
    """A sentence, which wraps where the console ends."""
    from rich.text import Text

    return Text(text, style, overflow="fold", no_wrap=False)


def heading(text: str) -> None:
    say("", prose(text, "bold"))


def labelled(rows: Iterable[tuple[str, str]], width: int) -> Table:
    """`label     text`: texts begin at column `width` and wrap under themselves."""
    from rich.table import Table

    made = Table.grid()
    made.add_column(width=width, no_wrap=True)
    made.add_column(overflow="fold")
    for label, text in rows:
        made.add_row(label, prose(text))
    return made


def points(texts: Iterable[str]) -> Table:
    """`- text`, each wrapped under itself."""
    return labelled((("-", text) for text in texts), 2)


def show_code(text: str, language: str) -> None:
    """Source code: coloured on a terminal, byte for byte in a pipe."""
    if not sys.stdout.isatty():
        put(text)
        return
    from rich.syntax import Syntax

    with going_out():
        console().print(Syntax(text, language, theme="ansi_dark").highlight(text), soft_wrap=True, end="")


def table(*columns: str, rows: Iterable[Sequence[Any]] = (), styles: Mapping[int, str] | None = None) -> Table:
    """A table without lines. `>` at the end of a column's name aligns it to the right, `!` keeps its cells in one line
    as long as others can wrap; `styles` colour columns by number."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        right = name.endswith(">")
        made.add_column(
            name.rstrip(">!"), justify="right" if right else "left", style=(styles or {}).get(number),
            no_wrap=name.endswith((">", "!")),
        )  # fmt: skip
    for row in rows:
        made.add_row(*(prose(cell) if isinstance(cell, str) else cell for cell in row))
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


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout. JSON has no infinities and no NaN: they become text.

    What stdout's encoding can't say, such as the bytes of a file's name that is no UTF-8 (Python has them as lone
    surrogates), JSON has its own escapes for.
    """
    if PASSED_OVER and "error" not in document:
        wrong = [error_facts(type(error).__name__, str(error), error.exit_code) for error in PASSED_OVER]
        document = {**document, **({"ok": False} if "ok" in document else {}), "passed_over": wrong}
    text = json.dumps(finite(document), indent=2, ensure_ascii=not is_utf8(sys.stdout), allow_nan=False)
    put(re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")
    with going_out():
        sys.stdout.flush()


def is_utf8(stream: TextIO) -> bool:
    return (stream.encoding or "").lower().replace("-", "") == "utf8"


def print_error(kind: str, message: str, exit_code: int) -> None:
    """An error as JSON, unless it is that nothing can be printed."""
    with contextlib.suppress(OutputError):
        print_json({"error": error_facts(kind, message, exit_code)})


def error_facts(kind: str, message: str, exit_code: int) -> dict[str, Any]:
    return {"kind": kind, "message": message, "exit_code": exit_code}


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

PATIENCE_S = 2.0  # how long a single step may take before there is a bar
SPEED_S = 300.0  # of the latest steps, by which the rate goes: a step may take a minute


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

    def say(self, *parts: RenderableType, style: str | None = None, wide: bool = False) -> None:
        """Print a result while the bar is shown: the bar steps aside, since the two may be different streams."""
        shown = self.live is not None and self.live.live.is_started
        if shown:
            self.live.stop()
        say(*parts, style=style, wide=wide)
        with going_out():
            sys.stdout.flush()
        if shown:
            self.live.start()


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """A bar on stderr over `total` steps, with their rate and the time that is left, gone when done; none in a pipe. Of
    a single step, once it has taken two seconds, how long it has taken."""
    if not sys.stderr.isatty():
        yield Progress(None, None)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.progress import Progress as Bar
    from rich.progress import TimeRemainingColumn as TimeLeftColumn
    from rich.table import Column
    from rich.text import Text

    class Rate(ProgressColumn):
        """`3.2/s`."""

        def render(self, task: Any) -> Text:
            return Text(rate(task.finished_speed or task.speed or 0.0))

    one = (SpinnerColumn(), TimeElapsedColumn())
    many = (SpinnerColumn(), BarColumn(16), MofNCompleteColumn(), Rate(), TimeLeftColumn(), TextColumn("left"))
    what = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    live = Bar(
        *(many if total > 1 else one), what, console=console(stderr=True), transient=True, redirect_stdout=False,
        redirect_stderr=False, speed_estimate_period=SPEED_S, expand=True,
    )  # fmt: skip
    task = live.add_task("", total=total, begun=False)
    later = threading.Timer(PATIENCE_S, live.start)
    later.daemon = True
    try:
        if total > 1:
            live.start()
        else:
            later.start()
        yield Progress(live, task)
    finally:
        later.cancel()
        if later.ident is not None:
            later.join()
        if live.live.is_started:
            live.stop()


def rate(speed: float) -> str:
    """Of steps a second: `3.2/s`, or of slow ones `14/min` or `2.5/h`; nothing where none is known."""
    if not speed:
        return ""
    seconds, unit = next(((n, unit) for n, unit in ((1, "s"), (60, "min")) if speed * n >= 1), (3600, "h"))
    return f"{speed * seconds:.{0 if speed * seconds >= 10 else 1}f}/{unit}"
