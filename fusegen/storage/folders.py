"""Where the cache lies, how many bytes it may take, and which files in there are its own."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from fusegen.errors import RequestError

FOLDER_VARIABLE = "FUSEGEN_CACHE_DIR"
SIZE_VARIABLE = "FUSEGEN_CACHE_SIZE"
DEFAULT_BOUND = 512 * 2**20  # bytes: some 20,000 kernels, or as many of the emulator's libraries
MOST_BOUND = 2**62  # bytes: file systems count in 63 bits
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

KINDS = {
    "kernels": "compiled kernels",
    "emulator": "emulator libraries",
    "sources": "rendered sources",
    "searches": "cuts of programs",
    "compilers": "notes on compilers",
    "extensions": "extension modules",
}
SUFFIXES = {  # of the entries of each kind, in a folder of its name
    "kernels": ".kernel",
    "emulator": ".library",
    "sources": ".source",
    "searches": ".search",
    "compilers": ".note",
    "extensions": ".extension",
}
FOLDER_MODE, FILE_MODE = 0o755, 0o644  # of what is made here, less the umask: nobody else may write it
ENTRY = re.compile(rf"[\w-]+-[0-9a-f]{{64}}({'|'.join(map(re.escape, SUFFIXES.values()))})", re.ASCII)
TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.fusegen")  # becomes an entry once it is whole


@dataclass(frozen=True, slots=True)
class File:
    """One file of the cache. `used` is when it was last written or read, in seconds as time.time() counts them."""

    path: Path
    kind: str  # of KINDS; empty for one that is being written
    bytes: int
    used: float


def cache_root() -> Path:
    """The folder of all caches: the one that FUSEGEN_CACHE_DIR names, else fusegen's in the user's cache folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path(platformdirs.user_cache_dir("fusegen", appauthor=False))


def cache_bound() -> int:
    """How many bytes all entries together may take: FUSEGEN_CACHE_SIZE, such as 2G. Raises RequestError."""
    text = os.environ.get(SIZE_VARIABLE, "").strip()
    if not text:
        return DEFAULT_BOUND
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.upper(), re.ASCII)
    if found is None:
        raise RequestError(
            f"{SIZE_VARIABLE}={text:.40} is no size\n"
            "  write bytes, or K, M, G or T of them, as in 512M; 0 keeps nothing"
        )
    bound = float(found[1]) * UNITS[found[2]]
    if bound > MOST_BOUND:
        raise RequestError(
            f"{SIZE_VARIABLE}={text:.40} is more than any disk holds\n  write at most {MOST_BOUND // UNITS['T']}T"
        )
    return int(bound)


def make_folder(folder: Path) -> None:
    """Have a folder that nobody else may write, whatever the umask. Raises OSError."""
    folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)


def distrust(facts: os.stat_result) -> str:
    """Why another user may have chosen what a file or folder holds; empty where only its owner or root can have.

    What the cache keeps is run, so what others may write there is not used.
    """
    if facts.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {facts.st_uid}"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users may write to it"
    return ""


def distrusted(folder: Path) -> tuple[str, str] | None:
    """Why `folder` is not used as a cache, and what to do about it; None where it may be, or is not there."""
    try:
        facts = folder.stat()
    except OSError:
        return None
    if not (reason := distrust(facts)):
        return None
    ours = facts.st_uid in (os.geteuid(), 0)
    mend = f"chmod go-w {folder}, or name another folder in {FOLDER_VARIABLE}"
    return (
        f"the cache in {folder} is not used: {reason}, and what a cache holds is run",
        mend if ours else f"name another folder in {FOLDER_VARIABLE}",
    )


def files(root: Path) -> Iterator[File]:
    """The cache's files below `root`, entries and those being written. Whatever else lies there is not looked at."""
    kinds = {suffix: kind for kind, suffix in SUFFIXES.items()}
    for folder in (root, *(root / kind for kind in KINDS)):
        try:
            with os.scandir(folder) as listing:
                found = [item for item in listing if ENTRY.fullmatch(item.name) or TEMPORARY.fullmatch(item.name)]
        except OSError:  # not there, not yet, or not for us to read
            continue
        for item in found:
            try:
                if item.is_file(follow_symlinks=False):
                    facts = item.stat(follow_symlinks=False)
                    kind = kinds.get(os.path.splitext(item.name)[1], "")
                    yield File(Path(item.path), kind, facts.st_size, facts.st_mtime)
            except OSError:  # removed since
                continue
