"""The C of shortcuts (`shortcut.c`), as an extension module: compiled once for each machine and Python, then cached.

    begin()     starts a thread that gets the module
    module()    the module, waited for a while; None where there is none

There is none without a C compiler, without Python's headers, or where building or loading fails for whatever reason.
Then shortcuts are functions in Python: the same calls, some 1 us longer. The logger `fusegen.shortcuts` says on DEBUG
why, and `fusegen doctor` what to do about it.

A wheel could hold the module as well, but would be one for each Python and system, where it now is one for all.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from types import ModuleType

from fusegen.errors import MissingError
from fusegen.runtime import background
from fusegen.storage.libraries import LibraryKey, Wait, kept

log = logging.getLogger("fusegen.shortcuts")

SOURCE = Path(__file__).with_name("shortcut.c")
NAME = f"fusegen.runtime.{SOURCE.stem}"
FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
COMPILERS = ("cc", "gcc", "clang")
ABI = EXTENSION_SUFFIXES[0]  # .cpython-312-x86_64-linux-gnu.so: what a module is good for
HINT = "apt install gcc python3-dev"
PATIENCE_S = 2  # from begin() on, of a call that waits; compiling takes 0.3 s, or 1 s from a disk that is cold


def begin() -> None:
    """Get the module in the background: it may soon be needed."""
    with suppress(RuntimeError):  # no further threads here; module() says so
        getting()


def module() -> ModuleType | None:
    """The module. None where it can't be had, or not yet."""
    try:
        found, until = getting()
        return found.result(max(0.0, until - time.monotonic()))
    except TimeoutError:
        reason = "it is still being compiled"
    except Exception as error:  # whatever it is, a call must not fail of it
        reason = str(error) or repr(error)
    log.debug("this shortcut is a function in Python, which takes some 1 us more for each call: %s", reason)
    return None


@cache
def getting() -> tuple[Future[ModuleType], float]:
    """The module that a thread gets, and until when to wait for it. Raises RuntimeError where none can be started."""
    return background.begun(partial(get, background.wait), "fusegen-native"), time.monotonic() + PATIENCE_S


def get(wait: Wait = subprocess.Popen.communicate) -> ModuleType:
    """The module, loaded from the cache or compiled now. Raises MissingError, CompileError, OSError and ImportError."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():  # loading the module would bring it back
        raise MissingError("this Python runs without its global lock, on which the module relies")
    command = (*compiler(), *FLAGS)
    key = LibraryKey(SOURCE.stem, ABI, hashlib.sha256(SOURCE.read_bytes()).hexdigest(), shlex.join(command))
    return kept(key, lambda: [*command, *headers(), str(SOURCE)], ABI, load, wait)


def compiler() -> tuple[str, ...]:
    """The words of $CC, else cc, gcc, clang, or zig from the `ziglang` package. Raises MissingError."""
    if found := first_command("CC", COMPILERS):
        return found
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc")
    raise MissingError(f"there is no C compiler here\n  to get it: {HINT}")


def first_command(variable: str, names: Iterable[str]) -> tuple[str, ...]:
    """The words of that variable of the environment, else the first of `names` that is here; none where none is."""
    named = tuple(shlex.split(os.environ.get(variable, "")))
    return next((words for words in (named, *((name,) for name in names)) if words and shutil.which(words[0])), ())


def headers() -> list[str]:
    """The options that let a compiler find Python's headers. Raises MissingError where there are none."""
    import sysconfig  # takes milliseconds

    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("include", "platinclude"))
    if not any(Path(folder, "Python.h").exists() for folder in folders):
        raise MissingError(
            f"Python's headers are missing here: no Python.h in {next(iter(folders))}\n  to get them: {HINT}"
        )
    return [f"-I{folder}" for folder in folders]


def load(library: Path) -> ModuleType:
    loader = ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    found = importlib.util.module_from_spec(spec)
    loader.exec_module(found)
    return found
