"""export(chains, targets, folder): compile, validate, record, write."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusegen.errors import RequestError, writing
from fusegen.exporting.collecting import exported
from fusegen.exporting.recording import LARGEST_BYTES, Recorded, recorded, size_in_bytes
from fusegen.exporting.writing import files_of
from fusegen.language.spec import Chain
from fusegen.pipeline import compile
from fusegen.planner.programs.smaller import smaller
from fusegen.runtime import Kernel, Program
from fusegen.targets import Target

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Made:
    """What was exported: the files below `folder`, and what is left to say."""

    folder: Path
    files: tuple[str, ...]
    notes: tuple[str, ...]


def export(
    chains: Sequence[Chain], targets: Sequence[Target], folder: Path, *, library: str = "", validate: bool = True,
    every_layout: bool = True, test: bool = True, step: Callable[[str], None] = lambda _: None,
) -> Made:  # fmt: skip
    """Write a library in C for `chains` on `targets` to `folder`, which is made, or replaced if it is an export.

    `library` is its name, that of the folder unless given. Each kernel is validated first, as `compile` does; with
    `every_layout=False` there are no variants for operands that are not contiguous; with `test=False` no recorded
    launch. `step` is told what is being done. Raises RequestError, NoPlan, ValidationError, MissingError and
    OutputError.
    """
    names = [chain.name for chain in chains]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"there are two chains called {twice}, and a library has one function of a name")
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise RequestError(f"{folder} is there and no export: it has no {MANIFEST}\n  name another folder, or empty it")
    notes: list[str] = []
    found = []
    records: dict[str, Recorded] = {}
    for chain in chains:
        made = []
        for target in targets:
            step(f"{chain.name} for {target}")
            made.append(compile(chain, target, validate=validate))
        step(f"{chain.name}: variants")
        found.append(exported(made, every_layout))
        notes += found[-1].notes
        if test and (why := too_large(made)):
            notes.append(f"{chain.name}: no launch is recorded for its test: {why}")
        elif test:
            step(f"{chain.name}: recording")
            records[chain.name] = recorded(found[-1], made)
    files = files_of(library or word_of(folder), found, records)
    with writing(folder, "name another folder with --out"):
        write(folder, files)
    return Made(folder, tuple(files), tuple(notes))


def too_large(made: Sequence[Kernel | Program]) -> str:
    """Why no launch of these is recorded; empty where one is."""
    if max(map(size_in_bytes, made)) > LARGEST_BYTES:
        return f"a few of its rows and what they meet take more than {LARGEST_BYTES >> 20} MiB"
    slow = any(isinstance(one, Program) and not one.device.asynchronous and smaller(one.plan) for one in made)
    return "the emulator would take minutes for products of its size; a GPU takes none" if slow else ""


def word_of(folder: Path) -> str:
    """A library's name: the folder's, in letters and digits."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", folder.resolve().name).strip("_")
    return name if name and not name[0].isdigit() else f"kernels_{name}".rstrip("_")


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """All files at once: beside the folder first, then in its place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for path, data in files.items():
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_bytes(data)
        new.chmod(0o777 & ~umask())
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            os.replace(folder, old / "old")
            os.replace(new, folder)
            shutil.rmtree(old)
        else:
            os.replace(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def umask() -> int:
    """Of this process, which is asked for by setting it."""
    now: int = os.umask(0)
    os.umask(now)
    return now
