"""Loops whose count the plan knows: of one trip, what they would do is straight code, and the index is left out."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fusegen.emitting.dialect import UNROLL

WIDEST = 114  # letters of a loop in one line, with its end, without what stands around it
FACTOR = r"(?:\w+|\((?:[^()]|\([^()]*\))*\))"


def each(body: str, index: str, count: int, name: str = "", unroll: str = UNROLL) -> str:
    """`body` for every `index` below `count`, indented as it is; `name`: what the kernel calls the count."""
    if count == 1:
        return alone(body, index)
    return under(f"for (int {index} = 0; {index} < {name or count}; ++{index})", body, unroll)


def strided(body: str, index: str, count: int, threads: int, name: str = "", type: str = "int", also: str = "") -> str:
    """`body` for every `index` below `count`, one a thread of the block at a time; threads that take at most one turn
    test for it. `also`: a second test."""
    if count > threads:
        head = f"for ({type} {index} = threadIdx.x; {index} < {name or count}{also}; {index} += threads)"
        return under(head, body)
    body, also = (re.sub(rf"\b{index}\b", "threadIdx.x", text) for text in (body, also))
    return body if count == threads and not also else under(f"if (threadIdx.x < {name or count}{also})", body)


def under(head: str, body: str, unroll: str = "") -> str:
    """A loop or a test, in one line where it has one statement and room."""
    pad = " " * min(len(line) - len(line.lstrip()) for line in body.splitlines() if line)
    above = f"{pad}{unroll}\n" if unroll else ""
    line = f"{pad}{head} {body.strip()}\n"
    if body.count("\n") == 1 and len(line) < WIDEST and not body.lstrip().startswith("if"):
        return f"{above}{line}"
    inner = "".join(f"  {line}" if line.strip() else line for line in body.splitlines(keepends=True))
    return f"{above}{pad}{head} {{\n{inner}{pad}}}\n"


def each_line(lines: Iterable[str], index: str, count: int) -> list[str]:
    """The same of lines."""
    return each("".join(f"{line}\n" for line in lines), index, count).splitlines()


def alone(text: str, index: str) -> str:
    """What `text` says where `index` is 0: x[i] is x[0], and what i multiplies is not added. Elsewhere it is 0."""
    assert f"int {index} " not in text, f"a loop over {index} inside of one: {text}"
    text = re.sub(rf"\[{index}\]", "[0]", text)
    text = re.sub(rf" \+ {index}\b(?: \* {FACTOR})*(?![\w.(\[]| [*/%])", "", text)
    text = re.sub(rf"(?<=[(\[= ])(?<![-+*/%] ){index}(?: \* {FACTOR})* \+ ", "", text)
    text = re.sub(rf"(?<=[(\[=, ])(?<![-+*/%] ){index}(?: \* {FACTOR})+(?=[,;)\]])", "0", text)
    text = re.sub(rf" (?:-|>>|<<) {index}\b(?=[;)])", "", text)
    return re.sub(rf"\b{index}\b", "0", text)


def folded(line: str) -> str:
    """A call in two lines, the second one behind a comma between its arguments, where one would be too long."""
    if len(line) <= WIDEST:
        return line
    depth, cut = 0, 0
    for i, letter in enumerate(line[:WIDEST]):
        depth += (letter in "([") - (letter in ")]")
        cut = i + 1 if letter == "," and depth == 1 else cut
    pad = " " * (len(line) - len(line.lstrip()) + 4)
    return f"{line[:cut]}\n{pad}{line[cut:].lstrip()}" if cut else line
