"""Golden sources: what is emitted for every spec and named target, kept in a folder and reviewed like code.

    generated/cuda-h200/bias_gelu_residual_ln.cu
    generated/cuda-h200/bias_gelu_residual_ln_reference.py

Of some targets those of a few specs are kept (`fusegen.targets.GOLDEN_SPECS`).

A chain of several kernels has a folder: a file for each, the reference of the whole, and how they are launched.

    generated/cuda-h200/mlp/mlp_h.cu
    generated/cuda-h200/mlp/mlp_out.cu
    generated/cuda-h200/mlp/mlp_reference.py
    generated/cuda-h200/mlp/mlp_launches.txt

`write` brings files into a folder, `compare` says how a folder differs from what is emitted now, and `update` and
`check` do so for the project's own `specs/` and `generated/`. What is emitted is the planner's first choice, and
depends on the spec and the target alone: neither on this machine, nor on its compilers, nor on what was measured.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusegen.emitting.joined import rendered
from fusegen.emitting.rendering import render
from fusegen.errors import Drift, NoPlan, NoUnits, RequestError, writing
from fusegen.language.spec import Chain, load_chains
from fusegen.planner.products.factors import lacking
from fusegen.planner.programs import kernels_of
from fusegen.planner.programs.model import ProgramPlan, program_lines
from fusegen.targets import GOLDEN_SPECS, KEPT_TARGETS, Target

SPECS = Path("specs")
OUT = Path("generated")
LAUNCHES = "_launches.txt"


@dataclass(frozen=True, slots=True)
class File:
    """One emitted file; `path` is relative to the output folder."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class Difference:
    """One file that is not what is emitted now: `diff` is the unified diff from the file to the emitted text."""

    path: Path
    kind: Literal["changed", "missing", "stale"]
    diff: str

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}"


@dataclass(frozen=True, slots=True)
class Changes:
    """What `write` did; files that were right already are `unchanged` and were not touched."""

    written: tuple[Path, ...]
    removed: tuple[Path, ...]
    unchanged: tuple[Path, ...]


def emitted(chain: Chain, target: Target) -> tuple[File, ...]:
    """The kernel and its numpy reference; of a program each kernel, the reference, and its launches. Raises NoPlan, and
    NoUnits where the target multiplies no such factors."""
    if kinds := lacking(chain.graph, target):
        raise NoUnits(f"no kernel for {target} multiplies factors of {kinds}, as {chain.name} does")
    found, program = kernels_of(chain.graph, target)
    folder = Path(target.folder)
    if program is not None:
        return tuple(program_files(program, folder / chain.name))
    source = render(found.need()[0])
    return (
        File(folder / source.filename, source.text),
        File(folder / f"{chain.name}_reference.py", source.reference),
    )


def program_files(program: ProgramPlan, folder: Path) -> Iterator[File]:
    """The kernels in the order of their launches, then what is of them all."""
    for plan in program.launched:
        source = rendered(plan)
        yield File(folder / source.filename, source.text)
    yield File(folder / f"{program.name}_reference.py", program.reference)
    yield File(folder / f"{program.name}{LAUNCHES}", "\n".join(line.rstrip() for line in program_lines(program)) + "\n")


def is_kept(chain: Chain, target: Target) -> bool:
    """Is it one of the specs whose sources are kept, where those of a few are?"""
    return target.name not in GOLDEN_SPECS or chain.name in GOLDEN_SPECS[target.name]


def all_emitted(
    chains: Sequence[Chain], targets: Iterable[Target], passed_over: Callable[[NoPlan], None] | None = None,
    *, kept: bool = False,
) -> Iterator[tuple[File, ...]]:  # fmt: skip
    """Every chain for every target, or those that are `kept`. Raises RequestError when two chains would write the same
    file.

    A chain that has no plan raises NoPlan, or goes to `passed_over`, if there is one.
    """
    seen: dict[str, Chain] = {}
    for chain in chains:
        if (first := seen.setdefault(chain.name, chain)) is not chain:
            raise RequestError(
                f"two chains are called {chain.name}, and would be written to one file\n"
                f"  {first.graph.where} and {chain.graph.where}; rename one, or emit them to different folders"
            )
    for target in targets:
        for chain in chains:
            if kept and not is_kept(chain, target):
                continue
            try:
                yield emitted(chain, target)
            except NoPlan as error:
                if passed_over is None:
                    raise
                passed_over(error)


def write(files: Iterable[File], out: Path, *, prune: Iterable[Target] = ()) -> Changes:
    """Bring `files` into `out`, each whole or not at all; remove what no chain makes for the targets of `prune`.

    Raises OutputError where `out` can't be written, and RequestError for what lies there and can't be read.
    """
    written: list[Path] = []
    unchanged: list[Path] = []
    kept = list(files)
    with writing(out, "name another folder with --out"):
        for file in kept:
            place = out / file.path
            if read(place) == file.text:
                unchanged.append(place)
                continue
            write_whole(place, file.text)
            written.append(place)
        targets = list(prune)
        folders = {target.folder for target in targets}
        removed = [out / path for path in stale(kept, out, targets)]
        for place in removed:
            place.unlink()
            if place.parent.name not in folders and not any(place.parent.iterdir()):
                place.parent.rmdir()  # a program's
    return Changes(tuple(written), tuple(removed), tuple(unchanged))


def compare(files: Iterable[File], out: Path, *, stale_in: Iterable[Target] = ()) -> tuple[Difference, ...]:
    """How `out` differs from `files`, and which emitted files in the folders of `stale_in` no chain makes any more."""
    wanted = list(files)
    found: list[Difference] = []
    for file in wanted:
        text = read(out / file.path)
        if text is None:
            found.append(Difference(out / file.path, "missing", unified("", file.text, out / file.path)))
        elif text != file.text:
            found.append(Difference(out / file.path, "changed", unified(text, file.text, out / file.path)))
    for path in stale(wanted, out, stale_in):
        found.append(Difference(out / path, "stale", unified(read(out / path) or "", "", out / path)))
    return tuple(found)


def stale(files: Iterable[File], out: Path, targets: Iterable[Target]) -> list[Path]:
    """Emitted files in the folders of `targets` that are not among `files`; files of other origin are left alone."""
    wanted = {file.path for file in files}
    found = [
        path.relative_to(out)
        for target in targets
        for pattern in ("*", "*/*")
        for path in sorted((out / target.folder).glob(pattern))
        if path.suffix in (target.spelling.file_suffix, ".py", ".txt") and path.relative_to(out) not in wanted
    ]
    return [path for path in found if was_emitted(out / path)]


def was_emitted(path: Path) -> bool:
    """Whether a file begins as fusegen's do: a kernel with its plan, or its steps'; a reference with its promise."""
    if not path.is_file():
        return False
    text = read(path) or ""
    if path.suffix == ".txt":
        return path.name.endswith(LAUNCHES) and text.startswith(f"{path.name.removesuffix(LAUNCHES)}  ")
    if path.suffix == ".py":
        return text.startswith(f'"""{path.stem.removesuffix("_reference")}: what the kernel must compute')
    joined = text.startswith(f"// {path.stem}: ") and " steps in one launch of " in text.partition("\n")[0]
    return joined or (text.startswith(f"// {path.stem}  ") and "\n// target " in text)


def unified(before: str, after: str, path: Path) -> str:
    """A unified diff, named after the file."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"{path}", f"{path} (emitted now)"
    )
    return "".join(lines)


def read(path: Path) -> str | None:
    """The text as it is, line ends included; None where there is no such file. Raises RequestError for what can't be
    read, such as a folder."""
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RequestError(f"{path} can't be read: {error.strerror}\n  it is to be a file; move it away") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name and move it into place, so that no reader sees half of it. Raises OSError."""
    if path.is_dir():  # `/` and `.` have no name that another could be made of
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno:
            error.filename = str(path)  # the other name is nobody's concern
        raise
    finally:
        temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------- the project's own


def flat(groups: Iterable[tuple[File, ...]]) -> list[File]:
    return [file for group in groups for file in group]


def beyond(error: NoPlan) -> None:
    """A chain that a target has no units for has no file there; any other that has no plan is an error."""
    if not isinstance(error, NoUnits):
        raise error


def check(specs: Path = SPECS, out: Path = OUT, targets: Sequence[Target] = KEPT_TARGETS) -> tuple[Difference, ...]:
    """How `out` differs from what `specs` emit now for `targets`, of those that are kept; empty when they agree."""
    return compare(flat(all_emitted(load_chains(specs), targets, beyond, kept=True)), out, stale_in=targets)


def update(specs: Path = SPECS, out: Path = OUT, targets: Sequence[Target] = KEPT_TARGETS) -> Changes:
    """Make `out` what `specs` emit now for `targets`, of those that are kept; files of chains that are gone are
    removed."""
    return write(flat(all_emitted(load_chains(specs), targets, beyond, kept=True)), out, prune=targets)


def drift(differences: Sequence[Difference], out: Path) -> Drift:
    """The error to raise when there are differences."""
    count = f"{len(differences)} file{'s differ' if len(differences) > 1 else ' differs'}"
    listed = "".join(f"\n  {difference}" for difference in differences)
    return Drift(
        f"{count} in {out} from what is emitted now{listed}\n  `fusegen emit` writes them anew; review the diff"
    )
