"""Texts of definitions that stand in front of kernels: one by one, and which several kernels have in common."""

from __future__ import annotations

import re
from collections.abc import Sequence


def apart(text: str) -> list[str]:
    """A text of definitions, split at the empty lines that are inside none."""
    found: list[str] = []
    lines: list[str] = []
    depth = 0
    for line in [*text.splitlines(), ""]:
        if not line and not depth:
            found += ["\n".join(lines)] * bool(lines)
            lines = []
            continue
        lines.append(line)
        code = line.partition("//")[0]
        depth += code.count("{") - code.count("}")
    return found


DEFINITION = re.compile(
    r"__device__ __forceinline__ [^(]*?(\w+)\(|#define (\w+)|typedef .*\b(\w+);"
    r"|struct .*?(\w+) \{|constexpr \w+ (\w+) ="
)


def names_of(text: str) -> frozenset[str]:
    """What a definition names; of constants in one line the first."""
    return frozenset(name for found in DEFINITION.findall(text) for name in found if name)


def in_common(texts: Sequence[Sequence[str]]) -> list[str]:
    """Of several steps' definitions those that may stand in front of all: each is in several, alone under its names,
    and takes nothing that is a step's own."""
    every = list(dict.fromkeys(text for own in texts for text in own))
    named = {text: names_of(text) for text in every}
    words = {text: set(re.findall(r"\w+", re.sub(r"//.*", "", text))) for text in every}
    found = [text for text in every if sum(text in own for own in texts) > 1]
    while True:
        of_steps = frozenset().union(*(named[text] for text in every if text not in found))
        kept = [text for text in found if words[text].isdisjoint(of_steps)]
        if kept == found:
            return found
        found = kept
