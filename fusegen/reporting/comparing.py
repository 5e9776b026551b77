"""Two states side by side: of each chain what is another now, figure by figure, and its kernels' texts as a diff."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusegen.reporting.highlighting import Word, highlighted
from fusegen.reporting.state import Chain, Kernel, State, lines_of

CONTEXT = 3  # lines around a change
MOST_DIFFED = 6_000  # lines: beyond that a diff takes longer than anyone waits


@dataclass(frozen=True, slots=True)
class Figure:
    """A number before and after; None where one side has none. `kind`: "us", "bytes", "count", "percent"."""

    name: str
    kind: str
    before: float | None
    after: float | None
    better: int  # -1: less of it is better, 1: more, 0: neither

    @property
    def differs(self) -> bool:
        return self.before != self.after

    @property
    def change(self) -> float | None:
        """Of the former, as a share; None where there is none to compare with."""
        if self.before is None or self.after is None or not self.before:
            return None
        return self.after / self.before - 1

    @property
    def verdict(self) -> str:
        """ "better", "worse", or "" where it is neither."""
        if self.before is None or self.after is None or not self.better or not self.differs:
            return ""
        return "better" if (self.after > self.before) == (self.better > 0) else "worse"


@dataclass(frozen=True, slots=True)
class Pairing:
    """A kernel before and after, by its name; either may be None."""

    name: str
    before: Kernel | None
    after: Kernel | None
    figures: tuple[Figure, ...]
    texts: tuple[tuple[str, str, str], ...]  # what was said before and is now, where it is another
    diff: tuple[Sequence[Word], ...]

    @property
    def differs(self) -> bool:
        return any(f.differs for f in self.figures) or bool(self.texts or self.diff)


@dataclass(frozen=True, slots=True)
class Both:
    """A chain before and after."""

    name: str
    before: Chain
    after: Chain
    figures: tuple[Figure, ...]
    texts: tuple[tuple[str, str, str], ...]
    kernels: tuple[Pairing, ...]

    @property
    def differs(self) -> bool:
        return any(f.differs for f in self.figures) or bool(self.texts) or any(k.differs for k in self.kernels)


@dataclass(frozen=True, slots=True)
class Compared:
    """Chains that are in both, and the names of those that are in one alone."""

    both: tuple[Both, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]


def compared(before: State, after: State) -> Compared:
    """Chains are the same by their names, and by their target and sizes where several are called alike."""
    old, new = labels(before.chains), labels(after.chains)
    if len(before.chains) == len(after.chains) == 1:  # two chains that are compared on purpose
        old, new = {"": before.chains[0]}, {"": after.chains[0]}
    return Compared(
        both=tuple(both(old[name], new[name]) for name in new if name in old),
        gone=tuple(name for name in old if name not in new),
        new=tuple(name for name in new if name not in old),
    )


def labels(chains: Sequence[Chain]) -> dict[str, Chain]:
    """Each chain under a name that no other has."""
    found: dict[str, Chain] = {}
    for chain in chains:
        sizes = " ".join(f"{name}={size}" for name, size in chain.sizes.items())
        several = sum(other.name == chain.name for other in chains) > 1
        label = f"{chain.name} for {chain.target} at {sizes}" if several else chain.name
        while label in found:
            label += "'"
        found[label] = chain
    return found


def both(before: Chain, after: Chain) -> Both:
    old, new = ({kernel.name: kernel for kernel in chain.kernels} for chain in (before, after))
    if len(old) == len(new) == 1:
        old = dict(zip(new, old.values(), strict=True))
    judged = (before.target, before.sizes) == (after.target, after.sizes)  # else it is no better and no worse
    return Both(
        name=after.name, before=before, after=after,
        figures=tuple(figures(CHAIN, before, after, judged)),
        texts=tuple(texts(CHAIN_TEXTS, before, after)),
        kernels=tuple(pairing(name, old.get(name), new.get(name), judged) for name in dict.fromkeys((*new, *old))),
    )  # fmt: skip


def pairing(name: str, before: Kernel | None, after: Kernel | None, judged: bool) -> Pairing:
    said = () if before is None or after is None else tuple(texts(KERNEL_TEXTS, before, after))
    return Pairing(name, before, after, tuple(figures(KERNEL, before, after, judged)), said, diff(before, after))


def diff(before: Kernel | None, after: Kernel | None) -> tuple[Sequence[Word], ...]:
    """The texts' differences; nothing where there are none, or only one text."""
    if before is None or after is None or before.source == after.source:
        return ()
    old, new = lines_of(before.source), lines_of(after.source)
    if len(old) + len(new) > MOST_DIFFED:
        return ([("", f"two texts of {len(old):,} and {len(new):,} lines are too long to compare")],)
    lines = difflib.unified_diff(old, new, before.filename, after.filename, n=CONTEXT, lineterm="")
    return tuple(highlighted("\n".join(lines), "diff"))


# ---------------------------------------------------------------- figures

Rows = Sequence[tuple[str, str, int, Callable[..., float | None]]]
Texts = Mapping[str, Callable[..., str]]


def figures(rows: Rows, before: object, after: object, judged: bool) -> Iterator[Figure]:
    """Those that either side has."""
    for name, kind, better, of in rows:
        old, new = (None if side is None else of(side) for side in (before, after))
        if old is not None or new is not None:
            yield Figure(name, kind, old, new, better if judged else 0)


def texts(rows: Texts, before: object, after: object) -> Iterator[tuple[str, str, str]]:
    for name, of in rows.items():
        if (old := of(before)) != (new := of(after)):
            yield name, old, new


def of_resources(name: str) -> Callable[[Kernel], float | None]:
    return lambda kernel: getattr(kernel.resources, name) if kernel.resources is not None else None


def instructions(kernel: Kernel) -> float | None:
    return sum(share.count for share in kernel.mix) if kernel.mix else None


CHAIN: Rows = (
    ("expected time", "us", -1, lambda chain: chain.time_us),
    ("measured time", "us", -1, lambda chain: chain.measured_us),
    ("floor", "us", 0, lambda chain: chain.floor_us),
    ("bytes moved", "bytes", -1, lambda chain: chain.moved),
    ("bytes unfused", "bytes", 0, lambda chain: chain.unfused),
    ("workspace", "bytes", -1, lambda chain: chain.workspace_bytes),
    ("launches", "count", -1, lambda chain: len(chain.kernels)),
    ("validation cases", "count", 1, lambda chain: len(chain.validation.cases)),
)  # fmt: skip
CHAIN_TEXTS: Texts = {
    "chain": lambda chain: chain.name,
    "signature": lambda chain: chain.signature,
    "sizes": lambda chain: " ".join(f"{name}={size}" for name, size in chain.sizes.items()),
    "target": lambda chain: f"{chain.target} ({chain.arch})",
    "validation": lambda chain: {True: "right", False: "wrong", None: "not validated"}[chain.validation.ok],
}
KERNEL: Rows = (
    ("expected time", "us", -1, lambda kernel: kernel.time_us),
    ("measured time", "us", -1, lambda kernel: kernel.measured.us if kernel.measured is not None else None),
    ("floor", "us", 0, lambda kernel: kernel.floor_us),
    ("bytes moved", "bytes", -1, lambda kernel: kernel.moved),
    ("candidates", "count", 0, lambda kernel: sum(len(part.candidates) for part in kernel.parts)),
    ("registers a thread", "count", -1, of_resources("registers")),
    ("spills a thread", "bytes", -1, of_resources("spill_bytes")),
    ("stack a thread", "bytes", -1, of_resources("stack_bytes")),
    ("static shared memory", "bytes", -1, of_resources("static_shared_bytes")),
    ("dynamic shared memory", "bytes", -1, of_resources("dynamic_shared_bytes")),
    ("occupancy", "percent", 1, of_resources("occupancy")),
    ("code", "bytes", -1, of_resources("code_bytes")),
    ("instructions", "count", -1, instructions),
    ("lines of source", "count", 0, lambda kernel: len(lines_of(kernel.source))),
)
KERNEL_TEXTS: Texts = {
    "plan": lambda kernel: kernel.regime,
    "configuration": lambda kernel: " + ".join(part.configuration for part in kernel.parts),
    "bound": lambda kernel: kernel.bound,
    "compiler": lambda kernel: kernel.resources.compiler if kernel.resources is not None else "nothing was compiled",
}
