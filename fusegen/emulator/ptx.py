"""Inline PTX becomes C++: a block with a variable for each register, and a call for each instruction.

    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));

    ->  { float simt_0; float simt_1 = simt::ptx_in<float>(x);
          simt::ptx_ex2_approx_ftz_f32(simt_0, simt_1); simt::ptx_out(y, simt_0); }

A function of that name (dots and `::` are underscores) stands in dialect/ptx*.h and takes the operands in the
instruction's order: a destination by reference, an immediate as a number, `_` as simt::ptx_nothing. Understood beside
instructions are `.reg` declarations, braces, labels, `bra` and predicates in front (`@p`, `@!p`), so the usual loop
around mbarrier.try_wait needs no form of its own. Anything else is refused with the line and the instruction.

A wgmma.mma_async or a tcgen05.ld writes its outputs and reads its registers after the statement, so the former are
passed as they stand, not copied back, and the latter with the places of their variables. The columns of the former
(m64n128k16), how often the latter repeats (16x256b.x8) and the axes of a tensor copy (tensor.2d) are an argument of one
template, as in m64nNk16<128>, which is given the line first.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fusegen.emulator.errors import EmulatorBuildError
from fusegen.emulator.tokens import CLOSING, Token, matching, plain_text, tokens_of

_DIALECT = Path(__file__).parent / "dialect"
_WORDS = ("asm", "__asm__", "__asm")
_QUALIFIERS = ("volatile", "__volatile__", "inline", "__inline__", "goto")
_REGISTERS = {"h": "simt::u16", "r": "simt::u32", "l": "simt::u64", "f": "float", "d": "double"}
_DECLARED = {
    "pred": "bool",
    **dict.fromkeys(("b16", "u16"), "simt::u16"), **dict.fromkeys(("b32", "u32"), "simt::u32"),
    **dict.fromkeys(("b64", "u64"), "simt::u64"), "s16": "short", "s32": "int", "s64": "simt::i64",
    "f32": "float", "f64": "double",
}  # fmt: skip
_SIZE = re.compile(
    r"(?<=_m64n)\d+(?=k)|(?<=_tensor_)\d+(?=d_)|(?<=_16x256b_x)\d+(?=_b32)"
)  # in the name of an instruction of many sizes
_LATER = ("wgmma.mma_async", "tcgen05.ld")  # writes its outputs, and reads its registers, some time after the statement
_MNEMONIC = r"[A-Za-z][\w.]*(?:::[\w.]+)*"
_INSTRUCTION = re.compile(rf"(?:@(?P<guard>!?\w+)\s+)?(?P<mnemonic>{_MNEMONIC})(?:\s+(?P<operands>.+))?", re.DOTALL)
_OPERANDS = re.compile(r"\[[^\]]*\]|\{[^}]*\}|[^,\s][^,]*")
_MACRO = re.compile(r"^[ \t]*#[ \t]*define\b(?:\\\n|[^\n])*\b(?:asm|__asm__|__asm)\b", re.MULTILINE)


def rewrite_asm(source: str) -> str:
    """Replace the asm statements; lines stay where they are.

    Raises EmulatorBuildError for a statement or an instruction that the emulator doesn't know.
    """
    if "asm" not in source:
        return source
    if macro := _MACRO.search(source):
        raise _refusal(source, macro.end(), "asm in a macro: the emulator reads it in functions only")
    tokens = tokens_of(source)
    pieces: list[str] = []
    done = 0
    for number, (first, last) in enumerate(_statements(source, tokens)):
        start, end = tokens[first].start, tokens[last].end
        made = _Statement(source, tokens[first : last + 1], number).as_block()
        pieces += [source[done:start], made, "\n" * source.count("\n", start, end)]
        done = end
    pieces.append(source[done:])
    return "".join(pieces)


def _statements(source: str, tokens: Sequence[Token]) -> Iterator[tuple[int, int]]:
    """The first token and the semicolon of each asm statement."""
    index = 0
    while index < len(tokens):
        if tokens[index].is_name and tokens[index].text in _WORDS:
            opening = index + 1
            while opening < len(tokens) and tokens[opening].text in _QUALIFIERS:
                opening += 1
            if opening == len(tokens) or tokens[opening].text != "(":
                raise _refusal(source, tokens[index].start, "asm without a parenthesis")
            last = matching(tokens, opening) + 1
            if last == len(tokens) or tokens[last].text != ";":
                raise _refusal(source, tokens[index].start, "asm that does not end with a semicolon")
            yield index, last
            index = last
        index += 1


class _Statement:
    """One asm statement: its strings as PTX, its operands as C++ expressions."""

    def __init__(self, source: str, tokens: Sequence[Token], number: int) -> None:
        self.source = source
        self.start = tokens[0].start
        self.number = number  # labels belong to a function, not to a block, so each statement numbers its own
        opening = next(place for place, token in enumerate(tokens) if token.text == "(")
        template, *rest = self._sections(tokens[opening + 1 : -2])
        self.text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", self._string(template), flags=re.DOTALL).replace("%%", "%")
        outputs, inputs = ([*rest, [], []])[:2]
        self.outputs = [self._operand(part) for part in _split(outputs)]
        self.operands = self.outputs + [self._operand(part) for part in _split(inputs)]
        self.registers: set[str] = set()

    def as_block(self) -> str:
        if not self.text.strip():
            return 'asm volatile("" ::: "memory");'
        statements = [self._translate(part.strip()) for part in re.split(r"(?<=[{};])", self._without_vectors())]
        later = any(name in self.text for name in _LATER)
        references = range(len(self.outputs)) if later else range(0)
        before: list[str] = []
        for place, (constraint, expression) in enumerate(self.operands):
            kind = self._type(constraint)
            if place in references:
                before.append(f"const simt::PtxSum simt_{place} = simt::ptx_sum({expression});")
            elif constraint.startswith("="):
                before.append(f"{kind} simt_{place};")
            elif later and constraint == "r":
                before.append(f"const simt::PtxRegister simt_{place} = simt::ptx_register({expression});")
            elif kind == "auto":
                before.append(f"const simt::u32 simt_{place} = simt::ptx_immediate({expression});")
            else:
                before.append(f"{kind} simt_{place} = simt::ptx_in<{kind}>({expression});")
        after = [
            f"simt::ptx_out({expression}, simt_{place});"
            for place, (_, expression) in enumerate(self.outputs)
            if place not in references
        ]
        return " ".join(["{", *before, *filter(None, statements), *after, "}"])

    # --- the C++ around the PTX

    def _sections(self, tokens: Sequence[Token]) -> list[list[Token]]:
        """Split at the colons; `::` is two of them."""
        sections: list[list[Token]] = [[]]
        depth = 0
        for token in tokens:
            depth += token.text in CLOSING
            depth -= token.text in CLOSING.values()
            if depth == 0 and token.text in (":", "::"):
                sections += [[] for _ in token.text]
            else:
                sections[-1].append(token)
        return sections

    def _string(self, tokens: Sequence[Token]) -> str:
        try:
            return "".join(str(ast.literal_eval(token.text.removeprefix("R"))) for token in tokens)
        except (ValueError, SyntaxError):
            raise self._refuse("the instructions must be plain string literals") from None

    def _operand(self, tokens: Sequence[Token]) -> tuple[str, str]:
        """The constraint and the expression of `"=r"(x)`."""
        if len(tokens) < 3 or tokens[1].text != "(" or matching(tokens, 1) != len(tokens) - 1:
            raise self._refuse(f'the operand {plain_text(self.source, tokens)} is not of the form "r"(value)')
        return self._string(tokens[:1]).replace("&", ""), plain_text(self.source, tokens[2:-1])

    def _type(self, constraint: str) -> str:
        letter = constraint.lstrip("=+")
        if letter == "n":
            return "auto"
        if letter not in _REGISTERS:
            raise self._refuse(f'the constraint "{constraint}" is none of {", ".join(_REGISTERS)}, n')
        return _REGISTERS[letter]

    # --- the PTX

    def _without_vectors(self) -> str:
        """Braces around a list of registers dropped: what is left of them are scopes."""
        return re.sub(r"(?<=[\s,])\{\s*(%?\w+(?:\s*,\s*%?\w+)*)\s*\}", r"\1", self.text)

    def _translate(self, text: str) -> str:
        if text in ("{", "}", ";", ""):
            return text.strip(";")
        if not text.endswith((";", "{", "}")):
            raise self._refuse(f"`{text}` has no semicolon")
        body, last = text[:-1].strip(), text[-1].strip(";")
        if label := re.match(r"([A-Za-z_$][\w$]*)\s*:(?!:)\s*", body):
            return f"{self._label(label[1])}:; {self._translate(body[label.end() :] + text[-1])}"
        if body.startswith(".reg"):
            return self._declare(body)
        found = _INSTRUCTION.fullmatch(body)
        if not found or last:
            raise self._refuse(f"`{body}` is no instruction")
        call = self._call(found["mnemonic"], found["operands"] or "")
        guard = found["guard"]
        if not guard:
            return call
        return f"if ({'!' * guard.startswith('!')}{self._value(guard.lstrip('!'), body)}) {call}"

    def _declare(self, body: str) -> str:
        found = re.fullmatch(r"\.reg\s+\.(\w+)\s+([\w\s,%]+)", body)
        if not found or found[1] not in _DECLARED:
            raise self._refuse(f"`{body}` declares no register that it knows")
        names = [name.strip().lstrip("%") for name in found[2].split(",")]
        self.registers.update(names)
        return f"{_DECLARED[found[1]]} {', '.join(f'simt_{name}' for name in names)};"

    def _call(self, mnemonic: str, operands: str) -> str:
        if mnemonic in ("bra", "bra.uni"):
            return f"goto {self._label(operands.strip())};"
        name = "ptx_" + re.sub(r"\.|::", "_", mnemonic)
        size = _SIZE.search(name)
        if size:
            name = f"{name[: size.start()]}N{name[size.end() :]}"
        if name not in _known():
            raise self._refuse(f"it has no model of the instruction {mnemonic}: add it in dialect/ptx.h")
        arguments = [
            self._value(part.strip(), f"{mnemonic} {operands}")
            for operand in _OPERANDS.findall(operands)
            for part in _parts(operand.strip())
        ]
        if size:
            return f"simt::{name}<{size[0]}>({', '.join(['__LINE__', *arguments])});"
        return f"simt::{name}({', '.join(arguments)});"

    def _label(self, name: str) -> str:
        return f"simt_label_{self.number}_{re.sub(r'[^A-Za-z0-9_]', '_', name)}"

    def _value(self, operand: str, instruction: str) -> str:
        if address := re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(\w+)\s*)?\]", operand):
            register = self._value(address[1], instruction)
            return f"({register} + {address[2]})" if address[2] else register
        if operand == "_":
            return "simt::ptx_nothing"
        if operand.startswith("!"):
            return f"!{self._value(operand[1:], instruction)}"
        if re.fullmatch(r"%\d+", operand) and int(operand[1:]) < len(self.operands):
            return f"simt_{operand[1:]}"
        if operand.lstrip("%") in self.registers:
            return f"simt_{operand.lstrip('%')}"
        if bits := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", operand):
            return f"__builtin_bit_cast(float, 0x{bits[1]}u)"
        if re.fullmatch(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?", operand):
            return operand if operand.startswith("-") else f"{operand.rstrip('U')}u"
        raise self._refuse(f"the operand {operand} of `{instruction}` is unknown to it")

    def _refuse(self, reason: str) -> EmulatorBuildError:
        return _refusal(self.source, self.start, reason)


def _parts(operand: str) -> list[str]:
    """The operands in one: a tensor map with its coordinates, `[%0, %1, %2]`, or a register with a predicate, `r|p`."""
    if operand.startswith("[") and "," in operand:
        return operand.strip("[]").split(",")
    return operand.split("|")


def _split(tokens: Sequence[Token]) -> list[list[Token]]:
    """Split at the commas between operands."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += token.text in CLOSING
        depth -= token.text in CLOSING.values()
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts if tokens else []


@functools.cache
def _known() -> frozenset[str]:
    """The instructions that dialect/ models, by the names of their functions."""
    texts = [path.read_text(encoding="utf-8") for path in _DIALECT.glob("ptx*.h")]
    return frozenset(name for text in texts for name in re.findall(r"\bptx_\w+", text))


def _refusal(source: str, place: int, reason: str) -> EmulatorBuildError:
    line = source.count("\n", 0, place) + 1
    text = source.splitlines()[line - 1].strip()
    return EmulatorBuildError(f"line {line}: the emulator can't run this inline assembly: {reason}\n  {text}")
