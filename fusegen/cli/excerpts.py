"""The line of a spec that an error is about, with carets under what of it."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from pathlib import Path

from fusegen.errors import Where

WIDEST = 160  # columns of a line that is shown


def excerpt(error: BaseException) -> str:
    """`  6 |     return F.rmsnorm(x, gainn)` and a line of carets; empty for an error without a place, or whose file
    can't be read."""
    where = getattr(error, "where", None)
    if not isinstance(where, Where):
        return ""
    line = linecache.getline(where.file, where.line).rstrip()
    if not line.strip() or len(line) > WIDEST:
        return ""
    plain = line.replace("\t", " ")
    start, end = columns(error, where) or (len(plain) - len(plain.lstrip()), len(plain))
    number = str(where.line)
    marks = " " * start + "^" * max(1, end - start)
    return f"  {number} | {plain}\n  {' ' * len(number)} | {marks}\n"


def columns(error: BaseException, where: Where) -> tuple[int, int] | None:
    """From where to where on that line: the expression that was being computed. None where nobody knows."""
    path = Path(where.file).resolve()
    for one in causes(error):
        for frame in reversed(traceback.extract_tb(one.__traceback__)):
            if frame.lineno != where.line or Path(frame.filename).resolve() != path:
                continue
            if frame.colno is not None and frame.end_colno is not None and frame.end_lineno == frame.lineno:
                line = linecache.getline(where.file, where.line).encode()  # which columns count bytes of
                return len(line[: frame.colno].decode()), len(line[: frame.end_colno].decode())
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came of; what it came of first, which is nearer to the spec."""
    if error is not None:
        yield from causes(error.__cause__)
        yield error
