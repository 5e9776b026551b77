"""The text of a CompileError: the compiler's log, and the numbered source around every place that it names."""

from __future__ import annotations

import re

from fusegen.errors import CompileError
from fusegen.targets import Target

AROUND = 3  # lines shown before and after a place
PLACES = 8  # shown at most: what follows from the first errors helps nobody


def refusal(log: str, text: str, target: Target, *, filename: str, origin: str, compiler: str) -> CompileError:
    """The error to raise for a source that `compiler` refused."""
    lines = text.splitlines()
    numbers = [n for n in places(log, filename) if n <= len(lines)]
    message = [f"{compiler} refused {filename} for {target.name} ({target.arch})"]
    if origin:
        message.append(f"  from: {origin}")
    message += ["", *(f"  {line}".rstrip() for line in log.strip("\0 \n").splitlines())]
    if numbers:
        message += ["", *excerpt(lines, numbers[:PLACES])]
    return CompileError("\n".join(message))


def places(log: str, filename: str) -> list[int]:
    """The lines of `filename` that a log names, errors first: `k.cu(3): error`, `/tmp/x/k.hip:3:7: error:`."""
    found = re.findall(rf"(?:^|/){re.escape(filename)}[(:](\d+)(.*)", log, re.MULTILINE)
    ordered = sorted(found, key=lambda match: "error" not in match[1])
    return list(dict.fromkeys(int(number) for number, _ in ordered))


def excerpt(lines: list[str], numbers: list[int]) -> list[str]:
    """Numbered source around `numbers`, each of which is marked; `...` stands where lines are left out."""
    shown = sorted({n for at in numbers for n in range(at - AROUND, at + AROUND + 1) if 1 <= n <= len(lines)})
    width = len(str(shown[-1]))
    out: list[str] = []
    for before, n in zip([None, *shown], shown, strict=False):
        if before is not None and n > before + 1:
            out.append("  ...")
        out.append(f"{'>' if n in numbers else ' '} {n:{width}} | {lines[n - 1]}".rstrip())
    return out
