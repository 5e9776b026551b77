"""Loops whose count the plan knows: of one trip, what they would do is straight code, and the index is left out."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fusegen.emitting.dialect import UNROLL

WIDEST = 112  # of a loop in one line, without what stands around it
FACTOR = r"(?:\w+|\((?:[^()]|\([^()]*\))*\))"


def each(body: str, index: str, count: int, name: str = "", unroll: str = UNROLL) -> str:
    """`body` for every `index` below `count`, indented as it is; `name`: what the kernel calls the count."""
    if count == 1:
        return alone(body, index)
    pad = " " * min(len(line) - len(line.lstrip()) for line in body.splitlines() if line)
    head = f"{pad}for (int {index} = 0; {index} < {name or count}; ++{index})"
    if body.count("\n") == 1 and len(head) + len(body.strip()) < WIDEST:
        return f"{pad}{unroll}\n{head} {body.strip()}\n"
    inner = "".join(f"  {line}" if line.strip() else line for line in body.splitlines(keepends=True))
    return f"{pad}{unroll}\n{head} {{\n{inner}{pad}}}\n"


def each_line(lines: Iterable[str], index: str, count: int) -> list[str]:
    """The same of lines."""
    return each("".join(f"{line}\n" for line in lines), index, count).splitlines()


def alone(text: str, index: str) -> str:
    """What `text` says where `index` is 0: x[i] is x[0], and what i multiplies is not added."""
    text = re.sub(rf"\[{index}\]", "[0]", text)
    text = re.sub(rf" \+ {index}\b(?: \* {FACTOR})*(?![\w.(\[]| [*/%])", "", text)
    text = re.sub(rf"(?<=[(\[= ])(?<![-+*/%] ){index}(?: \* {FACTOR})* \+ ", "", text)
    if found := re.search(rf"\b{index}\b.*", text):
        raise AssertionError(f"one trip of a loop leaves its index {index} in: {found[0]}")
    return text
