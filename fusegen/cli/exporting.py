"""`export`: chains as a library in C, to be shipped without Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusegen.cli.options import AsJson, Dtype, Sets, Specs
from fusegen.cli.showing import complain, print_json, progress, say
from fusegen.errors import RequestError

if TYPE_CHECKING:
    from fusegen.targets import Target


def export(
    specs: Specs,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The library's folder.", show_default=False)],
    arch: Annotated[
        str | None,
        typer.Option("--arch", "-a", metavar="A,B", show_default=False,
                     help="sm_80,sm_90a,gfx942: what it is to run on; without it, the GPU present, else sm_90a."),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Of the library; without it, the folder's.")
    ] = "",
    sets: Sets = None, dtype: Dtype = None,
    one_layout: Annotated[
        bool, typer.Option("--contiguous", help="No variants for operands that lie in memory in other ways.")
    ] = False,
    no_validate: Annotated[bool, typer.Option("--no-validate", help="Hand kernels out unproven.")] = False,
    no_test: Annotated[bool, typer.Option("--no-test", help="No recorded inputs and results.")] = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Write chains as a library in C: sources, machine code, a launcher, a test. It needs no Python to run."""
    from fusegen import exporting
    from fusegen.cli import asking

    targets = ask_archs(arch)
    chains = asking.ask_chains(specs, sets or (), dtype)
    with progress(len(chains) * (len(targets) + 2)) as bar:
        made = exporting.export(
            chains, targets, out, library=name, validate=not no_validate, every_layout=not one_layout,
            test=not no_test, step=bar.step,
        )  # fmt: skip
    if as_json:
        print_json({"folder": str(made.folder), "files": list(made.files), "notes": list(made.notes)})
        return
    for note in made.notes:
        complain(f"{note}\n")
    say(f"{len(made.files)} files in {made.folder}", f"to build and test it: make -C {made.folder} test")


def ask_archs(names: str | None) -> tuple[Target, ...]:
    """`sm_80,gfx942` as targets, each once; a target's own name, as cuda:h200, is one of its architecture too."""
    from fusegen.cli.asking import ask_target, launched
    from fusegen.targets import NAMES, target

    if names is None:
        return (ask_target(None),)
    found: dict[str, Target] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        vendor = "" if ":" in name else "hip:" if f"hip:{name.lower()}" in NAMES else "cuda:"
        chosen = launched(target(f"{vendor}{name}"))
        other = found.setdefault(chosen.arch, chosen)
        if other is not chosen:
            raise RequestError(f"--arch {names}: {other} and {chosen} are both {chosen.arch}; name one of them")
    if not found:
        raise RequestError("--arch names no architecture; name one or more, as in --arch sm_80,sm_90a,gfx942")
    return tuple(found.values())
