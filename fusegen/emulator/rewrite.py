"""The one change made to a kernel's text: its __shared__ declarations.

A macro can't express them. `extern __shared__ float tile[];` must become a pointer to memory that the launch provides,
so the name has to move in front of the type's brackets. The checking build must know where each static array begins and
ends, which no storage class would tell it. And C++ wants `alignas` in front of a storage class, CUDA takes it behind:

    extern __shared__ float tile[];            ->  float* const tile = reinterpret_cast<float*>(...);
    __shared__ alignas(16) float part[2][32];  ->  alignas(16) static thread_local float part[2][32];          (fast)
                                               ->  static SharedSlot<...> slot; static float (&part)... = ...  (check)

Lines stay where they are. A small tokenizer finds the declarations, so that comments, strings, template arguments and
preprocessor lines can't mislead it; only what stands between `__shared__` and its semicolon is understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fusegen.emulator.errors import EmulatorBuildError

DEFAULT_ALIGNMENT = 16  # bytes; what every kernel may count on for the start of dynamic shared memory
UNKNOWN_ALIGNMENT = 1024  # for an alignment that is not a number: more than any declaration asks for

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
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The text to compile, and the alignment that its dynamic shared memory declares."""

    text: str
    dynamic_alignment: int


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    start: int
    end: int
    is_name: bool


@dataclass(frozen=True, slots=True)
class _Declarator:
    pointer: str  # "*" and the like before the name
    name: str
    dims: str  # "[2][32]", or empty


@dataclass(frozen=True, slots=True)
class _Declaration:
    type: str
    declarators: tuple[_Declarator, ...]
    alignments: tuple[str, ...]  # as written
    is_extern: bool


def rewrite_shared(source: str, *, check: bool) -> Rewritten:
    """Replace the __shared__ declarations. Raises EmulatorBuildError for one in a form that is not understood."""
    tokens = list(_tokens(source))
    pieces: list[str] = []
    alignment = DEFAULT_ALIGNMENT
    done = 0
    for first, last, at_namespace_scope in _shared_statements(tokens):
        statement = tokens[first:last]
        declaration = _parse(source, statement)
        if declaration.is_extern:
            alignment = max([alignment, *map(_alignment_value, declaration.alignments)])
            replacement = _dynamic(declaration, at_namespace_scope)
        elif not check:
            replacement = _thread_local(declaration)
        elif at_namespace_scope:
            raise _refusal(source, statement, "the checking build wants static ones inside a function")
        else:
            replacement = _slots(declaration)
        start, end = statement[0].start, tokens[last].end
        pieces += [source[done:start], replacement, "\n" * source.count("\n", start, end)]
        done = end
    pieces.append(source[done:])
    return Rewritten("".join(pieces), alignment)


def _tokens(source: str) -> Iterator[_Token]:
    position = 0
    at_line_start = True
    while position < len(source):
        if at_line_start and (directive := _DIRECTIVE.match(source, position)):
            position = directive.end()
            continue
        if raw := _RAW_STRING.match(source, position):
            yield _Token(raw[0], position, raw.end(), is_name=False)
            position = raw.end()
            continue
        match = _TOKEN.match(source, position)
        assert match is not None  # the last alternative takes any character
        if match["skip"] is None:
            yield _Token(match[0], position, match.end(), is_name=match["name"] is not None)
            at_line_start = False
        elif "\n" in match[0]:
            at_line_start = True
        position = match.end()


def _shared_statements(tokens: list[_Token]) -> Iterator[tuple[int, int, bool]]:
    """First token, the ending semicolon, and whether it stands outside any function, of each declaration."""
    scopes: list[bool] = []  # of each open brace: does it open a namespace or extern "C"?
    start = 0  # of the statement
    index = 0
    while index < len(tokens):
        text = tokens[index].text
        if text == "{":
            scopes.append(_opens_namespace(tokens[start:index]))
            start = index + 1
        elif text == "}":
            if scopes:
                scopes.pop()
            start = index + 1
        elif text == ";":
            start = index + 1
        elif text == "__shared__":
            end = _find_semicolon(tokens, index)
            yield start, end, all(scopes)
            index = end
            start = end + 1
        index += 1


def _opens_namespace(head: list[_Token]) -> bool:
    """Whether a brace behind these tokens is that of a namespace or of `extern "C"`, not of a function or a block."""
    texts = [token.text for token in head]
    return "namespace" in texts or (len(texts) == 2 and texts[0] == "extern" and texts[1].startswith('"'))


def _find_semicolon(tokens: list[_Token], index: int) -> int:
    depth = 0
    while index < len(tokens):
        text = tokens[index].text
        depth += text in _CLOSING
        depth -= text in _CLOSING.values()
        if text == ";" and depth == 0:
            return index
        index += 1
    raise EmulatorBuildError("a __shared__ declaration has no end")


def _parse(source: str, statement: list[_Token]) -> _Declaration:
    """Read `[extern] __shared__ [attributes] type declarator, ...`."""
    kept: list[_Token] = []
    alignments: list[str] = []
    is_extern = False
    index = 0
    while index < len(statement):
        token = statement[index]
        if token.text in ("alignas", "__align__", "__attribute__"):
            end = _matching(statement, index + 1)
            inside = source[statement[index + 1].end : statement[end].start]
            if token.text == "__attribute__":
                found = re.search(r"aligned\s*(?:__)?\s*\(\s*(.*?)\s*\)\s*\)?\s*$", inside)
                if not found:
                    raise _refusal(source, statement, "only the attribute `aligned` is understood")
                inside = found[1]
            alignments.append(inside.strip())
            index = end
        elif token.text == "extern":
            is_extern = True
        elif token.text not in ("__shared__", "static"):
            kept.append(token)
        index += 1
    parts = _split(kept)
    type_end = _name_index(source, statement, parts[0])
    while type_end > 0 and parts[0][type_end - 1].text in ("*", "&", "const", "volatile", "__restrict__"):
        type_end -= 1
    if type_end == 0:
        type_end = _name_index(source, statement, parts[0])  # `const` belongs to the type
    type_text = _text(source, parts[0][:type_end])
    parts[0] = parts[0][type_end:]
    declarators = tuple(_declarator(source, statement, part) for part in parts)
    return _Declaration(type_text, declarators, tuple(alignments), is_extern)


def _split(tokens: list[_Token]) -> list[list[_Token]]:
    """Split at the commas between declarators. `<` brackets only in front of the first name's own brackets."""
    parts: list[list[_Token]] = [[]]
    depth = angle = 0
    for token in tokens:
        depth += token.text in _CLOSING
        depth -= token.text in _CLOSING.values()
        if depth == 0 and len(parts) == 1:
            angle += (token.text == "<") - (token.text == ">")
        if token.text == "," and depth == 0 and angle == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _name_index(source: str, statement: list[_Token], part: list[_Token]) -> int:
    """The declared name: the last name before the first bracket, or before the end."""
    angle = 0
    last: int | None = None
    for index, token in enumerate(part):
        angle += (token.text == "<") - (token.text == ">")
        if angle == 0 and token.text in ("[", "=", "(", "{"):
            break
        if angle == 0 and token.is_name:
            last = index
    if last is None:
        raise _refusal(source, statement, "no variable name was found in it")
    return last


def _declarator(source: str, statement: list[_Token], part: list[_Token]) -> _Declarator:
    name = _name_index(source, statement, part)
    rest = part[name + 1 :]
    end = 0
    while end < len(rest) and rest[end].text == "[":
        end = _matching(rest, end) + 1
    if end < len(rest):
        raise _refusal(source, statement, "a shared variable has no initialiser and no parentheses")
    return _Declarator(_text(source, part[:name]), part[name].text, _text(source, rest))


def _matching(tokens: list[_Token], index: int) -> int:
    depth = 0
    while True:
        depth += tokens[index].text in _CLOSING
        depth -= tokens[index].text in _CLOSING.values()
        if depth == 0:
            return index
        index += 1


def _text(source: str, tokens: list[_Token]) -> str:
    if not tokens:
        return ""
    text = source[tokens[0].start : tokens[-1].end]
    return " ".join(re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL).split())


def _alignment_value(text: str) -> int:
    return int(text, 0) if re.fullmatch(r"\d+|0[xX][0-9a-fA-F]+", text) else UNKNOWN_ALIGNMENT


def _dynamic(declaration: _Declaration, at_namespace_scope: bool) -> str:
    """A pointer in a function; outside, where no launch is known yet, an object that turns into one when used."""
    made: list[str] = []
    for each in declaration.declarators:
        element = f"{declaration.type}{each.pointer}"
        if at_namespace_scope:
            made.append(f"static constexpr simt::DynamicShared<{element}> {each.name}{{}};")
        else:
            made.append(f"{element}* const {each.name} = reinterpret_cast<{element}*>(simt::dynamic_shared());")
    return " ".join(made)


def _thread_local(declaration: _Declaration) -> str:
    """A worker of the fast build is a thread and runs one block at a time: a block's variables can be the thread's."""
    alignments = "".join(f"alignas({alignment}) " for alignment in declaration.alignments)
    declarators = ", ".join(f"{each.pointer}{each.name}{each.dims}" for each in declaration.declarators)
    return f"{alignments}static thread_local {declaration.type} {declarators};"


def _slots(declaration: _Declaration) -> str:
    """What the checking build tells apart: a place with margins, the variable as a reference into it, and its name."""
    declared = "1"
    for alignment in declaration.alignments:
        declared = f"simt::larger({declared}, ({alignment}))"
    made: list[str] = []
    for each in declaration.declarators:
        kind, slot, name = f"simt_type_{each.name}", f"simt_slot_{each.name}", each.name
        made += [
            f"typedef {declaration.type} {each.pointer}{kind}{each.dims};",
            f"static simt::SharedSlot<{kind}, {declared}> {slot};",
            f"static {kind}& {name} = {slot}.value;",
            f'simt::declare_shared(&{name}, sizeof({kind}), "{name}");',
        ]
    return " ".join(made)


def _refusal(source: str, statement: list[_Token], reason: str) -> EmulatorBuildError:
    line = source.count("\n", 0, statement[0].start) + 1
    return EmulatorBuildError(f"line {line}: the emulator can't read this __shared__ declaration: {reason}\n"
                              f"  {_text(source, statement)}")  # fmt: skip
