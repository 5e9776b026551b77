"""Entries: bytes and facts about them, in a file named by the hash of everything they depend on.

A file is data, never code to run on reading: a line of magic, a checksum, a line of JSON with the key and the facts,
and the bytes as they are. What is read is checked: a file that is cut short, altered, of another format or another
key's is a miss like one that is absent, and is replaced. The checksum is against accidents; against other users stand
the owner and the mode of the file, and of the folders it is in.

The logger `fusegen.cache` says on DEBUG what was hit and what was missed, and why: what is different from the newest
file of the same kernel and architecture. It says on WARNING, once, that nothing can be kept, or that others may write.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from fusegen.storage.bounds import make_room, replace_with
from fusegen.storage.folders import (
    FILE_MODE,
    FOLDER_VARIABLE,
    SIZE_VARIABLE,
    SUFFIXES,
    cache_bound,
    cache_root,
    distrust,
    distrusted,
    make_folder,
)

log = logging.getLogger("fusegen.cache")

MAGIC = b"fusegen cache 1\n"  # the number is the format's
TOUCHED_S = 60  # an entry's last use is known to a minute: a write for every read would be dear on a network
PATIENCE_S = 60  # with another process that makes the same; the slowest of them, a large product, takes 10 s
IN_THE_WAY = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR)
Read = TypeVar("Read")
warned: set[Path] = set()  # roots of which this process has said that nothing can be kept there


@dataclass(frozen=True, slots=True)
class Key:
    """Everything that an entry depends on; each kind of entry adds fields. `entry` and `arch` name it for people."""

    entry: str
    arch: str
    text: str  # the hash of what it is made from

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def stem(self) -> str:
        """What the files of one kernel and architecture have in common, short enough for any file system."""
        return "-".join(re.sub(r"\W", "_", part, flags=re.ASCII)[:80] for part in (self.entry, self.arch))


class Damaged(Exception):
    """A file that is not what was written; the message says in what way. Never leaves the cache."""


class Store:
    """The entries of one kind. Never raises for what the disk does: a file that can't be read is a miss.

    Its folder is the kind's in `cache_root()`, or `folder`, which then has a bound of its own. Raises RequestError
    where FUSEGEN_CACHE_SIZE is no size.
    """

    def __init__(self, kind: str, folder: Path | None = None) -> None:
        self.suffix = SUFFIXES[kind]
        self.root = cache_root() if folder is None else folder
        self.folder = self.root / kind if folder is None else folder
        self.bound = cache_bound()

    def path(self, key: Key) -> Path:
        return self.folder / f"{key.stem}-{key.digest}{self.suffix}"

    def load(self, key: Key, read: Callable[[Mapping[str, Any], bytes], Read]) -> Read | None:
        """What `read` makes of the entry's facts and bytes; None on a miss. `read` may raise Damaged."""
        if not self.trusted():
            return None
        path = self.path(key)
        try:
            data, used = read_file(path)
            header, payload = unpack(data)
            if header["key"] != asdict(key):
                raise Damaged("it belongs to another key")
            found = read(header["facts"], payload)
        except FileNotFoundError:
            self.note_absent(key)
        except OSError as error:
            log.debug("miss: %s for %s: %s can't be read: %s", key.entry, key.arch, path.name, error)
        except Damaged as error:
            log.debug("miss: %s for %s: %s is damaged: %s", key.entry, key.arch, path.name, error)
        else:
            log.debug("hit: %s for %s: %s", key.entry, key.arch, path.name)
            touch(path, used)
            return found
        return None

    def holds(self, key: Key) -> bool:
        """Whether there is a file for `key`, which counts as used now; it is not read, so it may be damaged."""
        path = self.path(key)
        try:
            used = path.stat().st_mtime
        except OSError:
            self.note_absent(key)
            return False
        log.debug("hit: %s for %s: %s, which this process has loaded", key.entry, key.arch, path.name)
        touch(path, used)
        return True

    def trusted(self) -> bool:
        """Whether only this user and root can have written what the folders hold. Says once for each root if not."""
        said = distrusted(self.root) or distrusted(self.folder)
        if said:
            self.warn(*said)
        return said is None

    def store(self, key: Key, facts: Mapping[str, Any], payload: bytes) -> None:
        """Keep an entry, in place of what is there; `facts` are JSON values."""
        if not self.trusted():
            return
        data = pack(key, facts, payload)
        if len(data) > self.bound:
            log.debug("not stored: %s for %s: %d bytes are more than %s allows, which is %d",
                      key.entry, key.arch, len(data), SIZE_VARIABLE, self.bound)  # fmt: skip
            return
        try:
            write(self.path(key), data)
        except OSError as error:
            log.debug("not stored: %s for %s: %s", key.entry, key.arch, error)
            in_the_way = error.filename2 or error.filename if error.errno in IN_THE_WAY else None
            reason = f"{error.strerror}: {in_the_way}" if in_the_way else error.strerror
            self.warn(
                f"the cache in {self.root} can't be written: {reason}", f"name another folder in {FOLDER_VARIABLE}"
            )
        else:
            make_room(self.root, self.bound, len(data))

    def warn(self, said: str, mend: str) -> None:
        """Say once for each root and process why nothing is kept there, and what to do."""
        if self.root not in warned:
            warned.add(self.root)
            log.warning("%s\n  kernels work all the same, and are compiled anew each time; %s", said, mend)

    @contextlib.contextmanager
    def making(self, key: Key) -> Iterator[bool]:
        """Make the entry for `key` while no other process does. Whether one did, so that it may be there by now.

        Of fifty processes that start at once one runs the compiler, which takes 300 MB, and the others wait, for
        `PATIENCE_S` at most. Where nothing is kept, or there are no locks, nobody waits. A lock is for all keys whose
        digests begin alike, so that there are at most 256 files of locks.
        """
        with contextlib.ExitStack() as stack:
            waited = False
            if self.bound and self.trusted():
                from filelock import FileLock, Timeout  # takes milliseconds

                lock = FileLock(self.root / f".making-{key.digest[:2]}", mode=FILE_MODE)
                with contextlib.suppress(OSError, NotImplementedError, Timeout):
                    make_folder(self.root)
                    try:
                        stack.enter_context(lock.acquire(timeout=0))
                    except Timeout:
                        log.debug("%s for %s: another process makes it", key.entry, key.arch)
                        waited = True
                        stack.enter_context(lock.acquire(timeout=PATIENCE_S))
            yield waited

    def note_absent(self, key: Key) -> None:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("miss: %s for %s: %s", key.entry, key.arch, self.why_absent(key))

    def why_absent(self, key: Key) -> str:
        """What is different from the newest entry of the same kernel and architecture."""
        try:
            found = [(file.stat().st_mtime, file) for file in self.folder.glob(f"{key.stem}-*{self.suffix}")]
            old = unpack(read_file(max(found)[1])[0])[0]["key"]
        except (OSError, ValueError, Damaged):  # ValueError: there is no file at all
            return "never made before, or evicted since"
        changed = [f.name for f in fields(key) if old.get(f.name) != getattr(key, f.name)]
        said = (
            "its text is different" if name == "text" else f"{name} was {old.get(name)}, is {getattr(key, name)}"
            for name in changed
        )
        return "; ".join(said) or "another process stores it at this moment"


# ---------------------------------------------------------------- the file


def touch(path: Path, used: float) -> None:
    """Note that a file last used at `used` is used now."""
    if time.time() - used > TOUCHED_S:
        with contextlib.suppress(OSError):  # others' files may be ours to read and not to touch
            os.utime(path)


def read_file(path: Path) -> tuple[bytes, float]:
    """A file's bytes, and when it was last used. Raises OSError, and Damaged for what is no file."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in its place must not make us wait
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise Damaged("it is no file")
        if reason := distrust(facts):
            raise Damaged(reason)
        with open(handle, "rb", closefd=False) as file:
            return file.read(), facts.st_mtime
    finally:
        os.close(handle)


def write(path: Path, data: bytes, attempts: int = 10) -> None:
    """Write a file whole, and its folders before it, which somebody may be removing at this moment. Raises OSError."""
    for attempt in range(1, attempts + 1):
        try:
            if not path.parent.parent.exists():
                make_folder(path.parent.parent)
            make_folder(path.parent)
            replace_with(path, data)
        except FileNotFoundError:
            if attempt == attempts:
                raise
        else:
            return


def pack(key: Key, facts: Mapping[str, Any], payload: bytes) -> bytes:
    body = json.dumps({"key": asdict(key), "facts": dict(facts)}).encode() + b"\n" + payload
    return MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header, with "key" and "facts", and the bytes of a file that is whole. Raises Damaged."""
    if not data.startswith(MAGIC):
        raise Damaged("it is of another format")
    checksum, _, body = data[len(MAGIC) :].partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        raise Damaged("its checksum differs")
    line, _, payload = body.partition(b"\n")
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its header is no JSON: {error}") from error
    if not isinstance(header, dict) or not all(isinstance(header.get(part), dict) for part in ("key", "facts")):
        raise Damaged("its header lacks a key or facts")
    return header, payload
