"""What is changed in a kernel's text: __shared__ declarations and vector types here, its inline PTX in ptx.py.

Macros can't express the declarations. Shared memory belongs to a block, and which blocks there are is the launch's
choice, so a variable is a reference to a place that the runtime knows:

    extern __shared__ float tile[];            ->  float* const tile = reinterpret_cast<float*>(...);
    __shared__ alignas(16) float part[2][32];  ->  static SharedVariable slot; float (&part)[2][32] = ...;

On the device the variable has static storage, which a lambda need not capture; the reference it becomes is captured,
by reference, by every lambda behind it.

A vector type of clang's, which g++ has by another name only, counts bytes instead of elements:

    typedef _Float16 half4 __attribute__((ext_vector_type(4)));  ->  ... vector_size((4) * sizeof(_Float16)) ...

and, since __bf16 is a class here, of which there are no vectors, holds the bits of such numbers as shorts.

Lines stay where they are. A small tokenizer finds the declarations, so that comments, strings, template arguments and
preprocessor lines can't mislead it; only what stands between `__shared__` and its semicolon is understood.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusegen.emulator.errors import EmulatorBuildError
from fusegen.emulator.tokens import CLOSING, Token, matching, plain_text, tokens_of

DEFAULT_ALIGNMENT = 16  # bytes; what every kernel may count on for the start of dynamic shared memory
UNKNOWN_ALIGNMENT = 1024  # for an alignment that is not a number: more than any declaration asks for


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The text to compile, and the alignment that its dynamic shared memory declares."""

    text: str
    dynamic_alignment: int


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


def rewrite_shared(source: str) -> Rewritten:
    """Replace the __shared__ declarations. Raises EmulatorBuildError for one in a form that is not understood."""
    if "__shared__" not in source:
        return Rewritten(source, DEFAULT_ALIGNMENT)
    tokens = tokens_of(source)
    alignment = DEFAULT_ALIGNMENT
    changes: list[tuple[int, int, str]] = []  # start, end, what comes there
    captured: dict[int, list[str]] = {}  # the names that a lambda adds, by the bracket that closes its captures
    for first, last, at_namespace_scope in _shared_statements(tokens):
        statement = tokens[first:last]
        declaration = _parse(source, statement)
        if declaration.is_extern:
            alignment = max([alignment, *map(_alignment_value, declaration.alignments)])
            replacement = _dynamic(declaration, at_namespace_scope)
        elif at_namespace_scope:
            raise _refusal(source, statement, "it wants static ones inside a function")
        else:
            replacement = _slots(declaration)
        start, end = statement[0].start, tokens[last].end
        changes.append((start, end, replacement + "\n" * source.count("\n", start, end)))
        if not at_namespace_scope:
            for bracket in _lambdas(tokens, last):
                captured.setdefault(bracket, []).extend(each.name for each in declaration.declarators)
    for bracket, names in captured.items():
        comma = "" if tokens[bracket - 1].text == "[" else ", "
        added = comma + ", ".join(f"&{name}" for name in names)
        changes.append((tokens[bracket].start, tokens[bracket].start, added))
    return Rewritten(_with_changes(source, changes), alignment)


def rewrite_vectors(source: str) -> str:
    """Replace clang's ext_vector_type in a typedef or alias. Raises EmulatorBuildError where it stands elsewhere."""
    if "ext_vector_type" not in source:
        return source
    tokens = tokens_of(source)
    changes: list[tuple[int, int, str]] = []
    for index, token in enumerate(tokens):
        if token.text not in ("ext_vector_type", "__ext_vector_type__"):
            continue
        start = next((place for place in range(index, -1, -1) if tokens[place].text in ("typedef", "using")), index)
        head = tokens[start:index]
        words = [each.text for each in head]
        if ";" in words or "__attribute__" not in words:
            raise _refusal(
                source, [token], "it wants `typedef type name __attribute__((ext_vector_type(n)));`", "vector type"
            )
        end = matching(tokens, index + 1)
        before = words.index("__attribute__")
        element = head[1 : before - 1] if words[0] == "typedef" else head[3:before]
        kind = plain_text(source, element)
        if element[-1].text == "__bf16":
            changes.append((element[-1].start, element[-1].end, "short"))
            kind = kind.replace("__bf16", "short")
        size = f"vector_size(({plain_text(source, tokens[index + 2 : end])}) * sizeof({kind}))"
        changes.append((token.start, tokens[end].end, size))
    return _with_changes(source, changes)


def attribute(source: str, entry: str, name: str) -> str:
    """What stands in the __cluster_dims__ or __launch_bounds__ of a kernel, as written; empty if it has none."""
    if name not in source:
        return ""
    tokens = tokens_of(source)
    for index, token in enumerate(tokens):
        if token.text == name:
            end = matching(tokens, index + 1)
            head = itertools.takewhile(lambda each: each.text not in ("{", ";"), tokens[end:])
            if any(each.text == entry for each in head):
                return plain_text(source, tokens[index + 2 : end])
    return ""


def require_grid_constants(source: str) -> None:
    """Tensor maps must be arguments that lie where the launch has put them: a copy of one is no tensor map.

    Raises EmulatorBuildError for a CUtensorMap that is passed by value without __grid_constant__.
    """
    if "CUtensorMap" not in source:
        return
    tokens = tokens_of(source)
    for index, token in enumerate(tokens[:-2]):
        if token.text != "CUtensorMap" or not tokens[index + 1].is_name or tokens[index + 2].text not in (",", ")"):
            continue
        before = itertools.takewhile(lambda each: each.text not in ("(", ","), reversed(tokens[:index]))
        if "__grid_constant__" not in [each.text for each in before]:
            raise _refusal(source, tokens[index : index + 2], "it wants `const __grid_constant__ CUtensorMap name`, or "
                           "`const CUtensorMap&` in a device function", "tensor map")  # fmt: skip


def _with_changes(source: str, changes: list[tuple[int, int, str]]) -> str:
    pieces: list[str] = []
    done = 0
    for start, end, text in sorted(changes):
        pieces += [source[done:start], text]
        done = end
    return "".join([*pieces, source[done:]])


def _lambdas(tokens: Sequence[Token], index: int) -> Iterator[int]:
    """Where the captures end of each lambda from a declaration to the end of its scope, unless it takes all by &."""
    depth = 0
    while depth >= 0 and index + 1 < len(tokens):
        index += 1
        text, before = tokens[index].text, tokens[index - 1]
        depth += (text == "{") - (text == "}")
        subscript = (before.is_name and before.text != "return") or before.text in (")", "]", "[")
        if text != "[" or subscript or tokens[index + 1].text == "[":
            continue
        end = matching(tokens, index)
        if tokens[index + 1].text != "&" or tokens[index + 2].is_name:
            yield end


def _shared_statements(tokens: Sequence[Token]) -> Iterator[tuple[int, int, bool]]:
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


def _opens_namespace(head: Sequence[Token]) -> bool:
    """Whether a brace behind these tokens is that of a namespace or of `extern "C"`, not of a function or a block."""
    texts = [token.text for token in head]
    return "namespace" in texts or (len(texts) == 2 and texts[0] == "extern" and texts[1].startswith('"'))


def _find_semicolon(tokens: Sequence[Token], index: int) -> int:
    depth = 0
    while index < len(tokens):
        text = tokens[index].text
        depth += text in CLOSING
        depth -= text in CLOSING.values()
        if text == ";" and depth == 0:
            return index
        index += 1
    raise EmulatorBuildError("a __shared__ declaration has no end")


def _parse(source: str, statement: Sequence[Token]) -> _Declaration:
    """Read `[extern] __shared__ [attributes] type declarator, ...`."""
    kept: list[Token] = []
    alignments: list[str] = []
    is_extern = False
    index = 0
    while index < len(statement):
        token = statement[index]
        if token.text in ("alignas", "__align__", "__attribute__"):
            end = matching(statement, index + 1)
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
    type_text = plain_text(source, parts[0][:type_end])
    parts[0] = parts[0][type_end:]
    declarators = tuple(_declarator(source, statement, part) for part in parts)
    return _Declaration(type_text, declarators, tuple(alignments), is_extern)


def _split(tokens: Sequence[Token]) -> list[list[Token]]:
    """Split at the commas between declarators. `<` brackets only in front of the first name's own brackets."""
    parts: list[list[Token]] = [[]]
    depth = angle = 0
    for token in tokens:
        depth += token.text in CLOSING
        depth -= token.text in CLOSING.values()
        if depth == 0 and len(parts) == 1:
            angle += (token.text == "<") - (token.text == ">")
        if token.text == "," and depth == 0 and angle == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _name_index(source: str, statement: Sequence[Token], part: Sequence[Token]) -> int:
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


def _declarator(source: str, statement: Sequence[Token], part: Sequence[Token]) -> _Declarator:
    name = _name_index(source, statement, part)
    rest = part[name + 1 :]
    end = 0
    while end < len(rest) and rest[end].text == "[":
        end = matching(rest, end) + 1
    if end < len(rest):
        raise _refusal(source, statement, "a shared variable has no initialiser and no parentheses")
    return _Declarator(plain_text(source, part[:name]), part[name].text, plain_text(source, rest))


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


def _slots(declaration: _Declaration) -> str:
    """A record that says where in its block's shared memory the variable lies, and a reference to that place."""
    declared = "1"
    for alignment in declaration.alignments:
        declared = f"simt::larger({declared}, ({alignment}))"
    made: list[str] = []
    for each in declaration.declarators:
        kind, slot, name = f"simt_type_{each.name}", f"simt_slot_{each.name}", each.name
        made += [
            f"typedef {declaration.type} {each.pointer}{kind}{each.dims};",
            f'static simt::SharedVariable {slot} = simt::describe_shared<{kind}, {declared}>("{name}");',
            f"{kind}& {name} = simt::shared_variable<{kind}>({slot});",
        ]
    return " ".join(made)


def _refusal(
    source: str, statement: Sequence[Token], reason: str, what: str = "__shared__ declaration"
) -> EmulatorBuildError:
    line = source.count("\n", 0, statement[0].start) + 1
    return EmulatorBuildError(f"line {line}: the emulator can't read this {what}: {reason}\n"
                              f"  {plain_text(source, statement)}")  # fmt: skip
