"""The folder of this process, in which the emulator builds its libraries and from which it loads them.

Nothing is loaded straight out of the cache: any process may evict, clear or replace what lies there, and on a network
file system that pulls a library from under whoever has it mapped. So the cache holds bytes, and each process has a copy
of what it uses, with the runtime beside the kernels, until it ends.

A process that is killed leaves its folder behind. It held a lock on it, which the system dropped; the next process to
make a folder removes those whose lock is free.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path

from fusegen.emulator.errors import EmulatorUnavailable

PREFIX, LOCK = "fusegen-emulator-", ".workplace"
SETTLED_S = 60  # younger folders are left alone: their process may not have got to lock them


def workplace() -> Path:
    """This process's own folder, after a fork too. Raises EmulatorUnavailable where none can be made."""
    try:
        folder = workplace_of(os.getpid())
        folder.mkdir(mode=0o700, exist_ok=True)  # a cleaner of old temporary files may have been here
    except OSError as error:
        raise no_room(error.strerror or str(error)) from error
    return folder


@functools.cache
def workplace_of(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # open for as long as the process lives
    with contextlib.suppress(OSError):  # no locks here: then nobody gets one, and nothing is swept
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    atexit.register(leave, process, folder)
    sweep(folder.parent)
    return folder


def leave(process: int, folder: Path) -> None:
    """At the end of a process: remove its folder. A forked child inherits the duty, and not the folder."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove the folders whose processes have died without doing so."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone since
            lock = folder / LOCK
            if time.time() - lock.stat().st_mtime < SETTLED_S:
                continue
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def place(path: Path, data: bytes) -> None:
    """Put a library into the workplace, whole at once: another thread may be about to load it."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise no_room(error.strerror or str(error)) from error


def no_room(reason: str) -> EmulatorUnavailable:
    return EmulatorUnavailable(
        f"the emulator builds its libraries in the folder for temporary files, and can't: {reason}\n"
        "  free space there, or name another folder in TMPDIR"
    )
