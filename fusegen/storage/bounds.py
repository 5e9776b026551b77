"""All files of the cache together: how many bytes they take, and what goes when they are too many.

Least recently used goes first; reading an entry makes its time of change the present (at most once a minute). To know
when it is time, nobody lists folders: a *tally*, one small file, holds what the last pass found, and grows by a mark
for every KiB stored since, so that its length says the rest. Appending is atomic on a local file system; on NFS, marks
may fall on one place, and a pass comes late, but it comes: a tally is good for a day. What a pass finds near the bound
it brings down to 7/8 of it, so that the next one is far.

A pass takes a lock without waiting, only to save the others the same work; where there are no locks, all do it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fusegen.storage.folders import FILE_MODE, KINDS, SIZE_VARIABLE, File, files

log = logging.getLogger("fusegen.cache")

TALLY, LOCK = ".tally", ".lock"
MARK = 2**10  # bytes stored that a mark stands for
TALLY_AGE_S = 24 * 3600
ABANDONED_S = 3600  # a file that has been in writing for so long has lost its writer
NEAR, AFTER = 15 / 16, 7 / 8  # of the bound: where a pass evicts, and how much it leaves


@dataclass(frozen=True, slots=True)
class Usage:
    """The entries of one kind. `oldest` and `newest` are when they were last used; None where there is none."""

    entries: int = 0
    bytes: int = 0
    oldest: float | None = None
    newest: float | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was removed, by kind, and what could not be: the sentence of the system for each such file."""

    removed: dict[str, Usage]
    refused: dict[Path, str]


def survey(root: Path) -> dict[str, Usage]:
    """What there is of each kind."""
    return usage(file for file in files(root) if file.kind)


def usage(found: Iterator[File] | Collection[File]) -> dict[str, Usage]:
    by_kind: dict[str, list[File]] = {kind: [] for kind in KINDS}
    for file in found:
        by_kind[file.kind].append(file)
    return {
        kind: Usage(len(of), sum(f.bytes for f in of), min(f.used for f in of), max(f.used for f in of))
        if of else Usage()
        for kind, of in by_kind.items()
    }  # fmt: skip


def clear(root: Path, kinds: Collection[str] = tuple(KINDS)) -> Cleared:
    """Remove the entries of `kinds`. Other processes may go on storing and loading meanwhile; folders stay."""
    gone, refused = [], {}
    for file in files(root):
        if file.kind in kinds or abandoned(file):
            try:
                file.path.unlink()
            except FileNotFoundError:  # somebody else was quicker
                continue
            except OSError as error:
                refused[file.path] = error.strerror or str(error)
            else:
                gone.append(file)
    with contextlib.suppress(OSError):
        (root / TALLY).unlink()  # the next one to store counts anew
    return Cleared(usage([file for file in gone if file.kind]), refused)


def abandoned(file: File) -> bool:
    """Whether this is what a process left that died while writing it."""
    return not file.kind and time.time() - file.used > ABANDONED_S


# ---------------------------------------------------------------- the bound


def make_room(root: Path, bound: int, stored: int) -> None:
    """Count `stored` bytes, and bring the cache below its bound if they may have taken it there. Never raises."""
    with contextlib.suppress(OSError):
        total = count(root, stored)
        if total is None or total > bound:
            with turn(root) as ours:
                if ours:
                    evict(root, bound)


def count(root: Path, stored: int) -> int | None:
    """The bytes of all entries, after `stored` more; None where the tally does not know."""
    try:
        handle = os.open(root / TALLY, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        head, newline, _ = os.pread(handle, 64, 0).partition(b"\n")
        try:
            total, when = map(int, head.split())
        except ValueError:  # not what we wrote
            return None
        if not newline or not 0 <= time.time() - when < TALLY_AGE_S:
            return None
        os.write(handle, b"." * -(-stored // MARK))
        return total + MARK * (os.fstat(handle).st_size - len(head) - 1)
    finally:
        os.close(handle)


def evict(root: Path, bound: int) -> None:
    """A pass over all files: remove what is least recently used until the rest is well below the bound."""
    entries = []
    for file in files(root):
        if file.kind:
            entries.append(file)
        elif abandoned(file):
            removed(file)
    entries.sort(key=lambda file: file.used)
    total = sum(file.bytes for file in entries)
    gone = []
    if total > bound * NEAR:
        for file in entries[:-1]:  # the newest has just been stored, and fits
            if total <= bound * AFTER:
                break
            if removed(file):
                total -= file.bytes
                gone.append(file)
    if gone:
        size = sum(file.bytes for file in gone)
        log.debug("evicted: %d entries, %d bytes; %s allows %d bytes", len(gone), size, SIZE_VARIABLE, bound)
    replace_with(root / TALLY, f"{total} {int(time.time())}\n".encode())


def removed(file: File) -> bool:
    """Whether a file is gone, by us or by another; those of other users may have to stay."""
    try:
        file.path.unlink(missing_ok=True)
    except OSError as error:
        log.debug("not evicted: %s: %s", file.path.name, error)
        return False
    return True


@contextlib.contextmanager
def turn(root: Path) -> Iterator[bool]:
    """Whether it is this process's turn to make a pass: nobody else makes one now."""
    handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                yield False
                return
            log.debug("%s can't be locked: %s", root / LOCK, error)
        yield True
    finally:
        os.close(handle)


def replace_with(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all, in place of what is there. Raises OSError.

    No fsync: after a crash of the machine a file may be empty, and its checksum tells.
    """
    temporary = path.with_name(f".{uuid.uuid4().hex}.fusegen")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        with open(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
