"""Compiled kernels on disk: what they depend on, and what is kept of them. How, is the business of `fusegen.storage`.

The logger `fusegen.cache` says on DEBUG what was hit and what was missed, and why; `fusegen --verbose` shows that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fusegen.compiling import Binary, Resources, compile_options, compile_source
from fusegen.compiling.versions import known_version, noted
from fusegen.planner.launched import Text
from fusegen.storage import Damaged, Store
from fusegen.storage import Key as AnyKey
from fusegen.targets import Target


@dataclass(frozen=True, slots=True)
class Key(AnyKey):
    """Everything that a compiled kernel depends on."""

    threads: int
    shared_bytes: int
    compiler: str  # name and version
    options: str  # what the compiler is told, and what the environment adds to that
    fusegen: str  # version


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept: the binary, and what validation said of it (JSON values only; None before it was validated)."""

    binary: Binary
    verdict: Mapping[str, Any] | None = None


COLLECTIONS: list[dict[Key, Entry]] = []
"""Those under way, which every hit and every entry that is stored goes to."""


@contextmanager
def collecting() -> Iterator[dict[Key, Entry]]:
    """What this process finds in its caches or stores there meanwhile: all that another machine lacks of it."""
    found: dict[Key, Entry] = {}
    COLLECTIONS.append(found)
    try:
        yield found
    finally:
        COLLECTIONS[:] = [other for other in COLLECTIONS if other is not found]


def collect(key: Key, entry: Entry) -> None:
    for collection in COLLECTIONS:
        collection[key] = entry


class KernelCache:
    """The compiled kernels of one cache. Never raises for what the disk does: a file that can't be read is a miss."""

    def __init__(self, folder: Path | None = None) -> None:
        self.entries = Store("kernels", folder)
        self.folder = self.entries.folder

    def path(self, key: Key) -> Path:
        return self.entries.path(key)

    def load(self, key: Key, target: Target) -> Entry | None:
        """The entry for `key`, its binary made out for `target`; None on a miss."""
        entry = self.entries.load(key, lambda facts, code: unpack(facts, code, key, target))
        if entry is not None:
            collect(key, entry)
        return entry

    def take(self, entries: Mapping[Key, Entry]) -> None:
        """Keep what was collected elsewhere, but for what is here and as good."""
        for key, entry in entries.items():
            own = self.load(key, entry.binary.target)
            if own is None or (own.verdict is None and entry.verdict is not None):
                self.store(key, entry)

    def store(self, key: Key, entry: Entry) -> None:
        """Keep `entry`, in place of what is there."""
        collect(key, entry)
        binary = entry.binary
        facts = {
            "log": binary.log,
            "compiler": binary.compiler,
            "seconds": binary.seconds,
            "resources": asdict(binary.resources),
            "verdict": entry.verdict,
        }
        self.entries.store(key, facts, binary.code)


def is_count(number: object) -> bool:
    """An integer that a compiler may report of registers or bytes."""
    return type(number) is int and 0 <= number < 2**63


def is_fact(name: str, value: object) -> bool:
    """Of a kernel's resources: counts, and why products wait for one another."""
    return isinstance(value, str) if name == "serialized" else is_count(value)


def unpack(facts: Mapping[str, Any], code: bytes, key: Key, target: Target) -> Entry:
    """The entry behind the facts and bytes of a file. Raises Damaged for anything but what `store` wrote."""
    numbers, verdict = facts.get("resources"), facts.get("verdict")
    names = {f.name for f in fields(Resources)}
    if not isinstance(numbers, dict) or set(numbers) != names or not all(map(is_fact, numbers, numbers.values())):
        raise Damaged("its resources are not those of this version")
    text = [facts.get("log"), facts.get("compiler")]
    seconds: Any = facts.get("seconds")
    if not all(isinstance(t, str) for t in text) or type(seconds) not in (int, float) or not 0 <= seconds < 1e9:
        raise Damaged("its header lacks a field")
    if verdict is not None and not isinstance(verdict, dict):
        raise Damaged("its verdict is no table")
    binary = Binary(
        target=target,
        entry=key.entry,
        threads=key.threads,
        code=code,
        log=str(facts["log"]),
        compiler=str(facts["compiler"]),
        seconds=float(seconds),
        resources=Resources(**numbers),
    )
    return Entry(binary, verdict)


def key_of(source: Text) -> Key:
    """The key of a source's binary. Raises MissingError where there is no compiler whose version to ask."""
    from fusegen.version import VERSION

    plan = source.plan
    compiler = known_version(plan.target.vendor)
    return Key(
        entry=plan.name,
        arch=plan.target.arch,
        text=hashlib.sha256(source.text.encode()).hexdigest(),
        threads=plan.threads,
        shared_bytes=plan.shared_bytes,
        compiler=compiler,
        options=" ".join(compile_options(plan.target, compiler)),
        fusegen=VERSION,
    )


def compiled(
    source: Text, cache: KernelCache | None = None, *, origin: str = "", meanwhile: Callable[[], None] | None = None
) -> Binary:
    """The source's binary, from the cache or compiled now and kept. `meanwhile` is done in a thread while a compiler
    works, which is waited for; it is no error if it fails. Raises CompileError and MissingError."""
    store = KernelCache() if cache is None else cache
    key = key_of(source)
    plan = source.plan
    if (entry := store.load(key, plan.target)) is not None:
        return entry.binary
    with ThreadPoolExecutor(1) as pool:
        with suppress(RuntimeError):  # no further threads here
            if meanwhile is not None:
                pool.submit(meanwhile)
        binary = compile_source(
            source.text, plan.name, plan.target, filename=source.filename, threads=plan.threads,
            dynamic_shared=plan.shared_bytes, origin=origin,
        )  # fmt: skip
    if binary.compiler != key.compiler:  # a note was wrong: this NVRTC lies elsewhere
        noted(binary.compiler)
        key = key_of(source)
    store.store(key, Entry(binary))
    return binary
