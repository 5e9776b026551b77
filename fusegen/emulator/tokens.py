"""The tokens of a kernel's text, so that comments, strings and preprocessor lines can't mislead a rewrite."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<skip> \s+ | //(?:\\\n|[^\n])* | /\*.*?\*/ )
  | (?P<text> (?:u8|[uUL])?"(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
  | (?P<name> [A-Za-z_]\w* )
  | (?P<number> \.?\d(?:[\w.]|'\w|[eEpP][+-])* )
  | (?P<mark> :: | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_RAW_STRING = re.compile(r'(?:u8|[uUL])?R"([^\s()\\]{0,16})\((.*?)\)\1"', re.DOTALL)
_DIRECTIVE = re.compile(r"[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n])*", re.DOTALL)
CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    start: int
    end: int
    is_name: bool


def read_tokens(source: str) -> Iterator[Token]:
    """All but blanks, comments and preprocessor lines."""
    position = 0
    at_line_start = True
    while position < len(source):
        if at_line_start and (directive := _DIRECTIVE.match(source, position)):
            position = directive.end()
            continue
        if raw := _RAW_STRING.match(source, position):
            yield Token(raw[0], position, raw.end(), is_name=False)
            position = raw.end()
            continue
        match = _TOKEN.match(source, position)
        assert match is not None  # the last alternative takes any character
        if match["skip"] is None:
            yield Token(match[0], position, match.end(), is_name=match["name"] is not None)
            at_line_start = False
        elif "\n" in match[0]:
            at_line_start = True
        position = match.end()


def matching(tokens: list[Token], index: int) -> int:
    """The token that closes the bracket at `index`."""
    depth = 0
    while True:
        depth += tokens[index].text in CLOSING
        depth -= tokens[index].text in CLOSING.values()
        if depth == 0:
            return index
        index += 1


def plain_text(source: str, tokens: list[Token]) -> str:
    """What these tokens stand for on one line, without comments."""
    if not tokens:
        return ""
    text = source[tokens[0].start : tokens[-1].end]
    return " ".join(re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL).split())
