"""The tokens of a kernel's text, so that comments, strings and preprocessor lines can't mislead a rewrite."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<skip> (?: \s+ | //(?:\\\n|[^\n])* | /\*.*?\*/ )+ )
  | (?P<raw> (?:u8|[uUL])?R"(?P<delimiter>[^\s()\\]{0,16})\(.*?\)(?P=delimiter)" )
  | (?P<text> (?:u8|[uUL])?"(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
  | (?P<name> [A-Za-z_]\w* )
  | (?P<number> \.?\d(?:[\w.]|'\w|[eEpP][+-])* )
  | (?P<mark> :: | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE = re.compile(r"[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n])*", re.DOTALL)
CLOSING = {"(": ")", "[": "]", "{": "}"}


class Token(NamedTuple):
    text: str
    start: int
    end: int
    is_name: bool


@functools.lru_cache(maxsize=2)  # a kernel's text as it is, and without asm: several look at each
def tokens_of(source: str) -> tuple[Token, ...]:
    """All but blanks, comments and preprocessor lines."""
    return tuple(_read(source))


def _read(source: str) -> Iterator[Token]:
    position = 0
    at_line_start = True
    while position < len(source):
        if at_line_start and (directive := _DIRECTIVE.match(source, position)):
            position = directive.end()
            continue
        match = _TOKEN.match(source, position)
        assert match is not None  # the last alternative takes any character
        end = match.end()
        kind = match.lastgroup
        if kind != "skip":
            yield Token(match[0], position, end, kind == "name")
            at_line_start = False
        elif not at_line_start:
            at_line_start = "\n" in match[0]
        position = end


def matching(tokens: Sequence[Token], index: int) -> int:
    """The token that closes the bracket at `index`."""
    depth = 0
    while True:
        depth += tokens[index].text in CLOSING
        depth -= tokens[index].text in CLOSING.values()
        if depth == 0:
            return index
        index += 1


def plain_text(source: str, tokens: Sequence[Token]) -> str:
    """What these tokens stand for on one line, without comments."""
    if not tokens:
        return ""
    text = source[tokens[0].start : tokens[-1].end]
    return " ".join(re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL).split())
