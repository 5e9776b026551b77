"""Text as lines of words, each with a class of its kind: what Pygments makes of it, in the few kinds that the page
colours. Nothing here is HTML; the templates escape every word."""

from __future__ import annotations

from functools import cache
from typing import Any

from fusegen.reporting.state import lines_of

Word = tuple[str, str]  # a class, "" for none, and the text
# of Pygments' token types the beginnings of their short names, the first that fits
CLASSES = (
    ("c", "c"), ("kt", "t"), ("k", "k"), ("m", "n"), ("s", "s"), ("nf", "f"), ("nb", "f"), ("gd", "gone"),
    ("gi", "come"), ("gu", "at"), ("gh", "at"),
)  # fmt: skip
PLAIN = 2**20  # letters: a text longer than that has no colours


def highlighted(text: str, language: str) -> list[list[Word]]:
    """Each of `lines_of(text)` as words; `language` is one of Pygments' aliases: "cuda", "python", "diff"."""
    if len(text) > PLAIN:
        return [[("", line)] for line in lines_of(text)]
    lines: list[list[Word]] = [[]]
    for kind, value in lexer(language).get_tokens(text.replace("\r", "␍")):
        name = class_of(kind)
        for number, part in enumerate(value.split("\n")):
            if number:
                lines.append([])
            if part:
                lines[-1].append((name, part))
    wanted = len(lines_of(text))
    return [*lines, *([[]] * wanted)][:wanted]


@cache
def lexer(language: str) -> Any:
    from pygments.lexers import get_lexer_by_name

    return get_lexer_by_name(language, stripnl=False, ensurenl=False)


@cache
def class_of(kind: Any) -> str:
    from pygments.token import STANDARD_TYPES

    while kind not in STANDARD_TYPES:
        kind = kind.parent
    short = STANDARD_TYPES[kind]
    return next((name for begins, name in CLASSES if short.startswith(begins)), "")
