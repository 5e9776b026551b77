"""Compiled kernels on disk: named by the hash of everything they depend on, one file each.

A file is written under another name and moved into place, so any number of processes may share a folder, also over a
network file system; at worst two of them compile the same kernel. What is read is checked: a file that is cut short,
altered, or of another format is a miss like one that is absent, and is replaced. A folder that can't be written makes
every look-up a miss and nothing else. Files are data, never code to run on reading: a line of magic, a checksum, a line
of JSON, and the machine code as it is.

The logger `fusegen.cache` says on DEBUG what was hit and what was missed, and why: what is different from the newest
file of the same kernel and architecture.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fusegen.compiling import Binary, Resources, compile_source, compiler_version
from fusegen.planner.model import Source
from fusegen.storage import cache_root
from fusegen.targets import Target

log = logging.getLogger("fusegen.cache")

MAGIC = b"fusegen kernel 1\n"  # the number is the format's
SUFFIX = ".kernel"


@dataclass(frozen=True, slots=True)
class Key:
    """Everything that a compiled kernel depends on."""

    entry: str
    arch: str
    text: str  # the source's hash
    threads: int
    shared_bytes: int
    compiler: str  # name and version
    fusegen: str  # version

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def stem(self) -> str:
        """What the files of one kernel and architecture have in common, short enough for any file system."""
        return "-".join(re.sub(r"\W", "_", part, flags=re.ASCII)[:80] for part in (self.entry, self.arch))


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept: the binary, and what validation said of it (JSON values only; None before it was validated)."""

    binary: Binary
    verdict: Mapping[str, Any] | None = None


class Damaged(Exception):
    """A file that is not what was written; the message says in what way. Never leaves this module."""


class KernelCache:
    """A folder of compiled kernels. Never raises for what the disk does: a file that can't be read is a miss."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_root() / "kernels" if folder is None else folder

    def path(self, key: Key) -> Path:
        return self.folder / f"{key.stem}-{key.digest}{SUFFIX}"

    def load(self, key: Key, target: Target) -> Entry | None:
        """The entry for `key`, its binary made out for `target`; None on a miss."""
        path = self.path(key)
        try:
            entry = unpack(path.read_bytes(), key, target)
        except FileNotFoundError:
            if log.isEnabledFor(logging.DEBUG):
                log.debug("miss: %s for %s: %s", key.entry, key.arch, self.why_absent(key))
        except OSError as error:
            log.debug("miss: %s for %s: %s can't be read: %s", key.entry, key.arch, path.name, error)
        except Damaged as error:
            log.debug("miss: %s for %s: %s is damaged: %s", key.entry, key.arch, path.name, error)
        else:
            log.debug("hit: %s for %s: %s", key.entry, key.arch, path.name)
            return entry
        return None

    def store(self, key: Key, entry: Entry) -> None:
        """Keep `entry`, in place of what is there."""
        path = self.path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(pack(key, entry))
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            log.debug("not stored: %s for %s: %s", key.entry, key.arch, error)

    def why_absent(self, key: Key) -> str:
        """What is different from the newest entry of the same kernel and architecture."""
        try:
            files = [(file.stat().st_mtime, file) for file in self.folder.glob(f"{key.stem}-*{SUFFIX}")]
            newest = max(files)[1]
            old = header_of(newest.read_bytes())["key"]
        except (OSError, ValueError, Damaged, KeyError):  # ValueError: there is no file at all
            return "never compiled before"
        changed = [f.name for f in fields(Key) if old.get(f.name) != getattr(key, f.name)]
        return "; ".join(
            "the source text is different" if name == "text" else f"{name} was {old.get(name)}, is {getattr(key, name)}"
            for name in changed
        )


def key_of(source: Source) -> Key:
    """The key of a source's binary. Raises MissingError where there is no compiler whose version to ask."""
    import fusegen

    plan = source.plan
    return Key(
        entry=plan.name,
        arch=plan.target.arch,
        text=hashlib.sha256(source.text.encode()).hexdigest(),
        threads=plan.threads,
        shared_bytes=plan.shared_bytes,
        compiler=compiler_version(plan.target.vendor),
        fusegen=fusegen.__version__,
    )


def compiled(source: Source, cache: KernelCache | None = None, *, origin: str = "") -> Binary:
    """The source's binary, from the cache or compiled now and kept. Raises CompileError and MissingError."""
    store = KernelCache() if cache is None else cache
    key = key_of(source)
    plan = source.plan
    if (entry := store.load(key, plan.target)) is not None:
        return entry.binary
    binary = compile_source(
        source.text, plan.name, plan.target, filename=source.filename, threads=plan.threads,
        dynamic_shared=plan.shared_bytes, origin=origin,
    )  # fmt: skip
    store.store(key, Entry(binary))
    return binary


# ---------------------------------------------------------------- the file


def pack(key: Key, entry: Entry) -> bytes:
    binary = entry.binary
    header = {
        "key": asdict(key),
        "log": binary.log,
        "compiler": binary.compiler,
        "seconds": binary.seconds,
        "resources": asdict(binary.resources),
        "verdict": entry.verdict,
    }
    body = json.dumps(header).encode() + b"\n" + binary.code
    return MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def header_of(data: bytes) -> dict[str, Any]:
    """The header of a file that is whole. Raises Damaged."""
    if not data.startswith(MAGIC):
        raise Damaged("it is of another format")
    checksum, _, body = data[len(MAGIC) :].partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        raise Damaged("its checksum differs")
    try:
        header = json.loads(body.partition(b"\n")[0])
    except ValueError as error:
        raise Damaged(f"its header is no JSON: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("key"), dict):
        raise Damaged("its header lacks a key")
    return header


def unpack(data: bytes, key: Key, target: Target) -> Entry:
    """The entry in a file. Raises Damaged for anything but what `pack` made for that key."""
    header = header_of(data)
    if header["key"] != asdict(key):
        raise Damaged("it belongs to another kernel")
    code = data.partition(b"\n")[2].partition(b"\n")[2].partition(b"\n")[2]
    numbers, verdict = header.get("resources"), header.get("verdict")
    names = {f.name for f in fields(Resources)}
    if not isinstance(numbers, dict) or set(numbers) != names or not all(type(n) is int for n in numbers.values()):
        raise Damaged("its resources are not those of this version")
    text = [header.get("log"), header.get("compiler")]
    if not all(isinstance(t, str) for t in text) or not isinstance(header.get("seconds"), (int, float)):
        raise Damaged("its header lacks a field")
    if verdict is not None and not isinstance(verdict, dict):
        raise Damaged("its verdict is no table")
    binary = Binary(
        target=target,
        entry=key.entry,
        threads=key.threads,
        code=code,
        log=str(header["log"]),
        compiler=str(header["compiler"]),
        seconds=float(header["seconds"]),
        resources=Resources(**numbers),
    )
    return Entry(binary, verdict)
