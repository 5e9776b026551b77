"""The user's words as values: SPEC, --target, --set, --dtype. Each raises RequestError in one sentence."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from fusegen.cli.options import launches
from fusegen.cli.showing import pass_over
from fusegen.errors import RequestError, SpecError
from fusegen.language.spec import Chain, load_chains
from fusegen.language.types import DTYPES, DType
from fusegen.targets import KEPT_TARGETS, Target, target


def ask_chains(specs: Sequence[str], sets: Sequence[str] = (), dtype: str | None = None) -> tuple[Chain, ...]:
    """The chains that SPEC... names, at the sizes and in the storage type asked for.

    A size goes to every chain that has its dim; a dim that none of them has is an error. Of a dim with several sizes
    there is a chain for each, and of several such dims for each combination. A chain that is named twice,
    as in `specs/ specs/copy.py`, counts once. A spec that is wrong, or can't have these sizes, is passed over if there
    are others, and is an error if there are none.
    """
    chains: list[Chain] = []
    wrong: list[RequestError] = []
    with redirect_stdout(sys.stderr):  # what a spec prints is no part of a verb's result, which may be JSON
        for spec in specs:
            before = {identity(chain) for chain in chains}
            try:
                found = load_chains(spec, wrong.append)
            except SpecError as error:
                wrong.append(error)
            else:
                chains += [chain for chain in found if identity(chain) not in before]
    sizes = ask_sizes(sets)
    known = {name: None for chain in chains for name in chain.graph.sizes}
    if chains and (unknown := [name for name in sizes if name not in known]):
        raise RequestError(f"--set {unknown[0]}: no chain here has that dim; there are {', '.join(known)}")
    kind = None if dtype is None else ask_dtype(dtype)
    asked: list[Chain] = []
    for chain in chains:
        own = {name: found for name, found in sizes.items() if name in chain.graph.sizes}
        for numbers in itertools.product(*own.values()):
            try:
                stored = chain if kind is None else chain.with_dtype(kind)
                asked.append(stored.at(**dict(zip(own, numbers, strict=True))))
            except SpecError as error:
                wrong.append(error)
    if not asked:
        *others, last = wrong
        pass_over(*others)
        raise last
    pass_over(*wrong)
    return tuple(asked)


def identity(chain: Chain) -> tuple[Path, int, str]:
    """Where a chain is defined, however its file was named."""
    where = chain.graph.where
    return Path(where.file).resolve(), where.line, chain.name


def ask_chain(spec: str, sets: Sequence[str] = (), dtype: str | None = None) -> Chain:
    """The one chain that SPEC names."""
    chains = ask_chains([spec], sets, dtype)
    if len(chains) > 1:
        names = ", ".join(spec_text(chain) for chain in chains[:3]) + (", ..." if len(chains) > 3 else "")
        raise RequestError(f"{spec} has {len(chains)} chains, and this takes one: {names}")
    return chains[0]


def spec_text(chain: Chain) -> str:
    """How the command line names a chain: file.py:chain."""
    return f"{chain.graph.where.file}:{chain.name}"


def ask_sizes(sets: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    """`M=5` given any number of times, or `M=1,16,256`, each size once; of a dim that is given again the last ones."""
    sizes: dict[str, tuple[int, ...]] = {}
    for text in sets:
        name, equals, numbers = text.partition("=")
        try:
            sizes[name.strip()] = tuple(dict.fromkeys(map(int, numbers.split(","))))
        except ValueError:
            equals = ""
        if not equals or not name.strip():
            raise RequestError(f"--set {text}: write a dim and its size, as in --set M=5, or its sizes: --set M=1,16")
    return sizes


def ask_dtype(name: str) -> DType:
    """A floating-point storage type."""
    kinds = [kind for kind in DTYPES.values() if kind.kind == "float" and not kind.narrow]
    for kind in kinds:
        if kind.name == name.strip().lower():
            return kind
    raise RequestError(f"--dtype {name}: arrays are stored as {', '.join(map(str, kinds))}")


def ask_target(name: str | None) -> Target:
    """The target named; without a name, that of the GPU present, else cuda:h200."""
    if name is not None:
        return launched(target(name))
    from fusegen.pipeline import choose_target

    return launched(choose_target(None))


def ask_several_targets(names: str | None) -> tuple[Target, ...]:
    """The targets named, between commas, each once; without a name as `ask_target`."""
    if names is None:
        return (ask_target(None),)
    return tuple({(found := ask_target(name)).name: found for name in names.split(",")}.values())


def launched(chosen: Target) -> Target:
    """The target, on which a program's kernels are launched as asked."""
    return chosen if launches.dependent else replace(chosen, dependent_launches=False)


def ask_targets(name: str | None, every: bool) -> tuple[Target, ...]:
    """One target, or all whose sources are kept under generated/."""
    if every and name is not None:
        raise RequestError("--target and --all-targets exclude each other; drop one")
    return tuple(map(launched, KEPT_TARGETS)) if every else (ask_target(name),)


def default_specs() -> str:
    """Where specs are when nobody says: the folder `specs`, as in this project."""
    if Path("specs").is_dir():
        return "specs"
    raise RequestError("there is no folder `specs` here; name a spec, a file or a folder")
