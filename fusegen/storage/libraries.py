"""Libraries that a compiler makes once: a process of its own compiles and keeps them, and ends by itself.

Compiling takes from a fifth of a second to two. Whoever wants a library may wait for it, but need not: a process that
ends meanwhile leaves the compiler to go on, and the next one finds the library in the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fusegen.errors import CompileError, MissingError
from fusegen.storage.entries import PATIENCE_S, Key, Store
from fusegen.version import PACKAGE

LIMIT_S = 20  # of a compiler
ALARM_S = LIMIT_S + 10  # of the process that started it, whatever it waits for
Child = subprocess.Popen[bytes]
Wait = Callable[[Child], tuple[bytes, bytes]]
Library = TypeVar("Library")

# Python's own search path and nothing that a site may do at a start: what is imported here is there too.
START = (
    "import json, sys; task = json.loads(sys.argv[1]); sys.path[:] = task['path']; "
    "from fusegen.storage import libraries; libraries.keep(task)"
)


@dataclass(frozen=True, slots=True)
class LibraryKey(Key):
    """Everything that a library depends on; `arch` is the ABI it is good for."""

    command: str


def kept(
    key: LibraryKey, command: Callable[[], Sequence[str]], suffix: str, read: Callable[[Path], Library],
    wait: Wait = subprocess.Popen.communicate,
) -> Library:  # fmt: skip
    """What `read` loads from the library that the cache has under `key`, or that `command() -o FILE` makes now.

    It is loaded from a folder of its own, since others may replace or remove what is in the cache. `wait` is how the
    compiling process is waited for. Raises CompileError, MissingError where there is no Python to start, and OSError.
    """
    data = Store("extensions").load(key, lambda facts, data: data)
    if data is None:
        data = made(key, command(), suffix, wait)
    with tempfile.TemporaryDirectory(prefix="fusegen-", ignore_cleanup_errors=True) as folder:
        library = Path(folder, key.entry + suffix)
        library.write_bytes(data)
        return read(library)


def made(key: LibraryKey, command: Sequence[str], suffix: str, wait: Wait) -> bytes:
    """The library, which a process of its own compiles and keeps, whatever becomes of this one."""
    home = str(PACKAGE.parent)
    path = [home, *(folder for folder in sys.path if isinstance(folder, str))]
    task = {"path": path, "key": asdict(key), "command": [*command], "suffix": suffix}
    child = subprocess.Popen(
        [python(), "-S", "-P", "-c", START, json.dumps(task)], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    library, said = wait(child)
    if child.returncode:
        raise CompileError(said.decode(errors="replace").strip() or f"{key.entry} can't be compiled")
    return library


def python() -> str:
    """The interpreter. Where another program has Python in it, that is the program, and not to be started again."""
    own = Path(sys.executable or "")
    version = "python{}.{}".format(*sys.version_info)
    for found in (own, Path(sys.base_exec_prefix, "bin", version)):
        if found.name.startswith("python") and found.exists():
            return str(found)
    raise MissingError(f"there is no {version} here to compile with: this process is {sys.executable or 'nameless'}")


# ---------------------------------------------------------------- the process of its own


def keep(task: dict[str, Any]) -> None:
    """Compile, store the library whole, and write it to the one who waits, if there still is one."""
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, leave)
    signal.alarm(PATIENCE_S + ALARM_S)
    store, key = Store("extensions"), LibraryKey(**task["key"])
    with store.making(key) as waited:
        data = store.load(key, lambda facts, data: data) if waited else None
        if data is None:
            signal.alarm(ALARM_S)
            data = compiled(task["command"], task["suffix"])
            store.store(key, {}, data)
    with contextlib.suppress(OSError), open(1, "wb", closefd=False) as out:
        out.write(data)


def compiled(command: Sequence[str], suffix: str) -> bytes:
    """The library. Ends the process where the compiler refuses it."""
    with tempfile.TemporaryDirectory(prefix="fusegen-", ignore_cleanup_errors=True) as folder:
        library = Path(folder, f"library{suffix}")
        try:
            run([*command, "-o", str(library)])
        except CompileError as error:
            sys.exit(str(error))
        return library.read_bytes()


def leave(*_: object) -> NoReturn:
    sys.exit("compiling was ended")


def run(command: Sequence[str]) -> None:
    """Let a compiler work, and whatever it starts, for a while. Raises CompileError."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", process_group=0,
    ) as compiler:  # fmt: skip
        try:
            said, _ = compiler.communicate(timeout=LIMIT_S)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(compiler.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CompileError(f"`{command[0]}` took more than {LIMIT_S} s") from error
            raise
    if compiler.returncode:
        raise CompileError(f"`{command[0]}` refuses it\n{said}")
