"""What `cache` shows and removes."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fusegen.cli.showing import mebibytes, print_json, say, table, verb
from fusegen.errors import MissingError
from fusegen.storage import (
    FOLDER_VARIABLE,
    KINDS,
    SIZE_VARIABLE,
    Cleared,
    Usage,
    cache_bound,
    cache_root,
    clear,
    survey,
)

app = typer.Typer(help="Show or clear the cache of what fusegen made.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
STEPS = ((86400, "d"), (3600, "h"), (60, "min"))  # of an age, largest first


class Kind(StrEnum):
    """What can be cleared alone."""

    kernels = "kernels"
    emulator = "emulator"
    sources = "sources"
    searches = "searches"
    compilers = "compilers"
    extensions = "extensions"


@app.command()
@verb
def info(as_json: AsJson = False) -> int:
    """Show where the cache lies, what is in it, how much of it there may be, and how to change that."""
    root, bound = readable(cache_root()), cache_bound()
    found = survey(root)
    if as_json:
        kinds = {kind: facts(usage) for kind, usage in found.items()}
        print_json({"folder": str(root), "bound_bytes": bound, **totals(found), "kinds": kinds})
        return 0
    rows = [row(kind, KINDS[kind], usage) for kind, usage in found.items()]
    total = totals(found)
    rows.append(("all", "", f"{total['entries']:,}", mebibytes(total["bytes"]), "", ""))
    say(f"the cache in {root}", style="bold")
    say("", table("kind!", "what", "entries>", "size>", "least recent use>", "last use>", rows=rows), "")
    say(f"bound   {mebibytes(bound)}; what is least recently used goes first. {SIZE_VARIABLE}=2G sets another")
    say(f"folder  {FOLDER_VARIABLE} names another; `fusegen cache clear` empties this one")
    return 0


@app.command("clear")
@verb
def clear_(
    kinds: Annotated[
        list[Kind] | None, typer.Argument(metavar="KIND", help=f"{', '.join(Kind)}; without any, all.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Remove what was made. Safe while other processes use it: they make it again."""
    root = readable(cache_root())
    done = clear(root, [kind.value for kind in kinds or Kind])
    code = MissingError.exit_code if done.refused else 0
    if as_json:
        removed = {kind: {"entries": usage.entries, "bytes": usage.bytes} for kind, usage in done.removed.items()}
        refused = [{"file": str(path), "reason": reason} for path, reason in done.refused.items()]
        print_json({"ok": not code, "folder": str(root), **totals(done.removed), "removed": removed, "kept": refused})
        return code
    say(*lines(root, done, [kind.value for kind in kinds or ()]))
    return code


def lines(root: Path, done: Cleared, asked: list[str]) -> list[str]:
    """What `clear` did, in words."""
    parts = [f"{usage.entries:,} {KINDS[kind]}" for kind, usage in done.removed.items() if usage.entries]
    total = totals(done.removed)
    if parts:
        said = [f"removed {', '.join(parts)} from {root}: {mebibytes(total['bytes'])}"]
    else:
        what = " and no ".join(KINDS[kind] for kind in asked) or "entries"
        said = [f"nothing to remove: {root} holds no {what}"] if not done.refused else []
    if done.refused:
        path, reason = next(iter(done.refused.items()))
        said += [f"{len(done.refused):,} files could not be removed; the first is {path}: {reason}"]
        said += ["  remove them as the user who owns them"]
    return said


def readable(root: Path) -> Path:
    """`root`, where it may be looked into or is not there. Raises MissingError."""
    if root.exists() and not (root.is_dir() and os.access(root, os.R_OK | os.X_OK)):
        wrong = "may not be read" if root.is_dir() else "is no folder"
        raise MissingError(f"the cache's folder {root} {wrong}\n  name another one in {FOLDER_VARIABLE}")
    return root


def totals(found: dict[str, Usage]) -> dict[str, int]:
    return {"entries": sum(u.entries for u in found.values()), "bytes": sum(u.bytes for u in found.values())}


def facts(usage: Usage) -> dict[str, Any]:
    """JSON's fields; times are ISO 8601, in UTC."""

    def moment(when: float | None) -> str | None:
        return None if when is None else datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds")

    return {"entries": usage.entries, "bytes": usage.bytes,
            "least_recent_use": moment(usage.oldest), "last_use": moment(usage.newest)}  # fmt: skip


def row(kind: str, what: str, usage: Usage) -> tuple[str, ...]:
    return kind, what, f"{usage.entries:,}", mebibytes(usage.bytes), age(usage.oldest), age(usage.newest)


def age(when: float | None) -> str:
    """`3 h ago`."""
    if when is None:
        return "-"
    seconds = max(0.0, time.time() - when)
    for length, unit in STEPS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"
