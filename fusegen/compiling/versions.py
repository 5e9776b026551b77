"""Which compiler is here, without loading it: a kernel that is found by its key is never compiled.

NVRTC's library takes tens of milliseconds to load. What version it has is noted beside its file's size and time of
change, and the note counts for as long as these are the same, in processes that would find the same file: those with
the same Python, the same folders of NVIDIA's packages, and the same variables that name a toolkit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from fusegen.storage import Damaged, Key, Store

log = logging.getLogger("fusegen.cache")

VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "LD_LIBRARY_PATH")  # where cuda.pathfinder looks, and the loader


def known_version(vendor: str) -> str:
    """`fusegen.compiling.compiler_version(vendor)`, from a note where there is one. Raises MissingError."""
    from fusegen.compiling import compiler_version

    version = getattr(sys.modules.get("fusegen.compiling.nvrtc"), "version", None)  # none while a thread imports it
    if vendor != "cuda" or (version is not None and version.cache_info().currsize):  # known in this process
        return compiler_version(vendor)
    return Store("compilers").load(key_here(), read) or noted(compiler_version(vendor))


def noted(version: str) -> str:
    """`version`, which is that of the NVRTC that is loaded now, after a note of it was made."""
    if (facts := note(version)) is not None:
        Store("compilers").store(key_here(), facts, b"")
    return version


def key_here() -> Key:
    """What decides which NVRTC a process like this one finds."""
    found: list[object] = [sys.version, sys.prefix, *(os.environ.get(name) for name in VARIABLES)]
    for folder in sys.path:
        with contextlib.suppress(OSError):
            packages = os.path.join(folder, "nvidia")
            found += [packages, os.stat(packages).st_mtime_ns]
    digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()
    return Key("nvrtc", f"python {sys.version_info[0]}.{sys.version_info[1]}", digest)


def note(version: str) -> Mapping[str, Any] | None:
    """What to keep: the version of the library that is loaded now, and its file's stamp. None where it has no file."""
    from cuda import pathfinder

    try:
        library = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
        return None if library is None else {"version": version, "library": library, "stamp": stamp_of(library)}
    except (OSError, RuntimeError) as error:
        log.debug("no note on %s is kept: %s", version, error)
        return None


def read(facts: Mapping[str, Any], _: bytes) -> str:
    """The version in a note. Raises Damaged where the library is not what it was, and for what is no note."""
    version, library = facts.get("version"), facts.get("library")
    if not isinstance(library, str) or not isinstance(version, str) or not re.fullmatch(r"nvrtc \d+\.\d+", version):
        raise Damaged("it names no version or no library")
    try:
        stamp = stamp_of(library)
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        raise Damaged(f"its library can't be found: {error}") from error
    if facts.get("stamp") != stamp:
        raise Damaged("its library was another one")
    return version


def stamp_of(library: str) -> list[int]:
    facts = os.stat(library)
    return [facts.st_size, facts.st_mtime_ns]
