"""What an expert would strike out of a kernel's text. Each check yields what it found, with the line it is in.

The text is read as tokens, so that comments, strings and directives mislead nobody. Names that are `constexpr` have
their values: a loop whose count has a name is still a loop of one trip.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from fusegen.emulator.tokens import CLOSING, Token, matching, tokens_of

LARGEST = 64  # that needs no name in an address
NUMBER = re.compile(r"(0x[0-9a-fA-F]+|\d+)[uUlL]*")
COMPARING = ("<", ">", "<=", ">=")
ARITHMETIC = ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>", "+=", "-=", "*=", "/=", "%=")
ASSIGNING = ("=", *ARITHMETIC[10:], "|=", "^=", "&=", "++", "--")
JOINED = {*ARITHMETIC[8:], *COMPARING[2:], "==", "!=", "&&", "||", "++", "--", "->", "|=", "^=", "&="} - {">>"}
# functions of ISO C's math.h, stdlib.h, string.h, time.h and signal.h
C_LIBRARY = frozenset(
    """abort abs acos acosh asctime asin asinh atan atan2 atanh atexit atof atoi atol bsearch calloc cbrt ceil clock
    copysign cos cosh ctime difftime div erf erfc exit exp exp2 expm1 fabs fdim floor fma fmax fmin fmod free frexp
    getenv gmtime hypot ilogb labs ldexp ldiv lgamma localtime log log10 log1p log2 logb lrint lround malloc memchr
    memcmp memcpy memmove memset mktime modf nan nearbyint nextafter pow qsort raise rand realloc remainder remquo rint
    round scalbn signal sin sinh sqrt srand strcat strchr strcmp strcpy strlen strtod strtol system tan tanh tgamma time
    trunc""".split()  # noqa: SIM905
)
TYPES = ("auto", "bool", "char", "const", "constexpr", "float", "int", "long", "short", "unsigned", "void", "typedef")
CONTROL = ("if", "for", "while", "switch", "constexpr", "alignas")


class Text:
    """A kernel's tokens, and where its brackets close."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = joined(tokens_of(source))
        self.words = [t.text for t in self.tokens]
        self.ends = {i: matching(self.tokens, i) for i, word in enumerate(self.words) if word in CLOSING}
        self.around = self.surroundings()
        self.constants: dict[str, int] = {}
        for i, name in self.locals():
            if "constexpr" in self.words[self.statement(i) : i] and self.words[i + 1] == "=":
                value = self.value(i + 2, next(j for j in range(i, len(self.words)) if self.words[j] in (",", ";")))
                if value is not None:
                    self.constants[name] = value

    def line(self, index: int) -> str:
        number = self.source.count("\n", 0, self.tokens[index].start)
        return f"{number + 1}: {self.source.splitlines()[number].strip()}"

    def surroundings(self) -> list[int]:
        """Of each token, the bracket that it is in, or -1."""
        found, stack = [], [-1]
        for i, word in enumerate(self.words):
            if word in CLOSING.values():
                stack.pop()
            found.append(stack[-1])
            if word in CLOSING:
                stack.append(i)
        return found

    def scope(self, index: int) -> slice:
        """What may use a name after its declaration here: the rest of the block; of a struct's member, all."""
        opened = self.around[index]
        if opened < 0:
            return slice(index + 1, None)
        if "struct" in self.words[self.statement(opened) : opened]:
            return slice(self.ends[opened], None)
        return slice(index + 1, self.ends[opened])

    def statement(self, index: int) -> int:
        """Where the statement begins that this token is in."""
        return next((i + 1 for i in range(index - 1, -1, -1) if self.words[i] in (";", "{", "}")), 0)

    def value(self, start: int, end: int) -> int | None:
        """Of an expression of numbers and constants."""
        said = []
        for word in self.words[start:end]:
            if number := NUMBER.fullmatch(word):
                said.append(str(int(number[1], 0)))
            elif word in self.constants:
                said.append(str(self.constants[word]))
            elif word in (*ARITHMETIC, "(", ")"):
                said.append("//" if word == "/" else word)
            else:
                return None
        try:
            return int(eval(" ".join(said), {}))
        except SyntaxError:
            return None

    def locals(self) -> Iterator[tuple[int, str]]:
        """Variables and aliases, where a statement declares them."""
        for first in range(len(self.words)):
            inside = self.words[self.around[first]] if self.around[first] >= 0 else "{"
            if inside != "{" or (first and self.words[first - 1] not in (";", "{", "}")):
                continue
            i = first
            if not (self.tokens[i].is_name and (self.words[i] in TYPES or self.words[i + 1] in ("<", "*", "&")
                    or self.tokens[i + 1].is_name)):  # fmt: skip
                continue
            if self.words[i] in (
                "return",
                "else",
                "template",
                "struct",
                "namespace",
                "extern",
                "using",
                "case",
                "goto",
            ):
                continue
            while self.tokens[i].is_name or self.words[i] in ("*", "&", "<", "::"):
                if self.words[i] == "<":
                    i = self.closed_angle(i)
                i += 1
            if self.words[i] in ("=", ";", "[", "{") and self.tokens[i - 1].is_name and i - 1 > first:
                yield i - 1, self.words[i - 1]
                while self.words[i] != ";":
                    if self.words[i] in CLOSING:
                        i = self.ends[i]
                    elif self.words[i] == "," and self.tokens[i + 1].is_name and self.words[i + 2] in ("=", ";", "["):
                        yield i + 1, self.words[i + 1]
                    i += 1

    def changes(self, name: str) -> bool:
        """Is it assigned anywhere, but where a constant of that name is declared?"""
        return any(
            word == name
            and (self.words[i + 1] in ASSIGNING or self.words[i - 1] in ("++", "--"))
            and "const" not in self.words[self.statement(i) : i]
            for i, word in enumerate(self.words)
        )

    def closed_angle(self, index: int) -> int:
        depth = 0
        for i in range(index, len(self.words)):
            depth += (self.words[i] == "<") - (self.words[i] == ">")
            if depth == 0:
                return i
        return index

    def functions(self) -> Iterator[tuple[int, int, int]]:
        """Of each at file scope or in a struct, its name, its parameters' bracket and its body's."""
        for i, word in enumerate(self.words):
            if word != "(" or not self.tokens[i - 1].is_name or self.words[i - 1] in CONTROL:
                continue
            if self.words[self.ends[i] + 1 : self.ends[i] + 2] == ["{"]:
                yield i - 1, i, self.ends[i] + 1

    def is_kernel(self, name: int) -> bool:
        return "__global__" in self.words[self.statement(name) : name]

    def kernels(self) -> list[int]:
        """Where the bodies of those end that a launch starts."""
        return [self.ends[body] for name, _, body in self.functions() if self.is_kernel(name)]

    def parameters(self) -> Iterator[tuple[int, int]]:
        """Of functions, each with the end of the body where it is known."""
        for _, opened, body in self.functions():
            i = opened + 1
            while i < self.ends[opened]:
                if self.words[i] == "(":  # (&sums)[4]
                    yield self.ends[i] - 1, self.ends[body]
                    i = self.ends[i]
                elif self.words[i + 1] in (",", ")", "=") and self.tokens[i].is_name and i > opened + 1:
                    yield i, self.ends[body]
                    while self.words[i] != "," and i < self.ends[opened]:
                        i += 1
                elif self.words[i] == "<":
                    i = self.closed_angle(i)
                i += 1


def joined(tokens: Sequence[Token]) -> list[Token]:
    """Two marks that mean something together, as one token."""
    found: list[Token] = []
    for token in tokens:
        last = found[-1] if found else None
        if last and last.end == token.start and last.text + token.text in JOINED:
            found[-1] = Token(last.text + token.text, last.start, token.end, is_name=False)
        else:
            found.append(token)
    return found


def unused_names(text: Text) -> Iterator[str]:
    """Variables, aliases and parameters without a use, functions without a call.

    A kernel's own parameters are what is launched: `rows` is one of every kernel. What a tensor map is made of is the
    driver's business.
    """
    for i, name in text.locals():
        if name not in text.words[text.scope(i)] and name != "opaque":
            yield f"{name} is never used, {text.line(i)}"
    for i, end in text.parameters():
        if text.words[i] not in text.words[i + 1 : end] and end not in text.kernels():
            yield f"{text.words[i]} is never used, {text.line(i)}"
    count = Counter(text.words)
    for i, *_ in text.functions():
        if count[text.words[i]] == 1 and not text.is_kernel(i):
            yield f"{text.words[i]} is never called, {text.line(i)}"


def aliases(text: Text) -> Iterator[str]:
    """Constants that are another constant, or a number, and nothing more; not a kernel's parameter by another name."""
    given = {text.words[i] for i, end in text.parameters() if end in text.kernels()}
    for i, name in text.locals():
        said = text.words[text.statement(i) : i]
        if "const" in said and text.words[i + 1] == "=" and text.words[i + 3] in (",", ";"):
            what = text.words[i + 2]
            if NUMBER.fullmatch(what) or (text.tokens[i + 2].is_name and what not in given and not text.changes(what)):
                yield f"{name} is {what}, {text.line(i)}"


def loops_of_one_trip(text: Text) -> Iterator[str]:
    for i, word in enumerate(text.words):
        if word == "for" and trips(text, i + 1) == 1:
            yield text.line(i)


def trips(text: Text, opened: int) -> int | None:
    """Of a loop whose bounds are known."""
    first, second = (j for j in range(opened, text.ends[opened]) if text.words[j] == ";")
    start = next((j for j in range(opened, first) if text.words[j] == "="), None)
    sign = next((j for j in range(first, second) if text.words[j] in COMPARING), None)
    if start is None or sign is None:
        return None
    value, bound = text.value(start + 1, first), text.value(sign + 1, second)
    step = text.words[second + 1 : text.ends[opened]]
    by = text.value(second + 3, text.ends[opened]) if len(step) > 2 else 1
    if value is None or bound is None or not by:
        return None
    change: Mapping[str, Callable[[int], int]] = {
        "++": lambda v: v + 1, "--": lambda v: v - 1, "+=": lambda v: v + by, "-=": lambda v: v - by,
        "/=": lambda v: v // by, "*=": lambda v: v * by,
    }  # fmt: skip
    holds: Mapping[str, Callable[[int], bool]] = {
        "<": lambda v: v < bound, ">": lambda v: v > bound, "<=": lambda v: v <= bound, ">=": lambda v: v >= bound,
    }  # fmt: skip
    how = next((word for word in step if word in change), "")
    count = 0
    while how and holds[text.words[sign]](value) and count < 2:
        value, count = change[how](value), count + 1
    return count


def numbers_without_a_name(text: Text) -> Iterator[str]:
    """Numbers above LARGEST that are added to something, or multiply or divide it: sizes, strides and offsets. What is
    written in hexadecimal is a mask of bits."""
    for i, word in enumerate(text.words):
        number = NUMBER.fullmatch(word)
        if (
            not number
            or word.startswith("0x")
            or int(number[1]) <= LARGEST
            or "constexpr" in text.words[text.statement(i) : i]
        ):
            continue
        signed = text.words[i - 1] == "-" and (text.words[i - 2] in ("(", ",", "=", "?", ":", "return"))
        if (text.words[i - 1] in ARITHMETIC and not signed) or text.words[i + 1] in ARITHMETIC:
            yield text.line(i)


def branches_alike(text: Text) -> Iterator[str]:
    """`if` and `?` with the same on both sides."""
    for i, word in enumerate(text.words):
        if word == "else" and text.words[i + 1] == "{" and text.words[i - 1] == "}":
            opened = next(o for o, end in text.ends.items() if end == i - 1)
            if text.words[opened : i - 1] == text.words[i + 1 : text.ends[i + 1]]:
                yield text.line(opened)
        if word == "?":
            middle, last = other_side(text, i)
            if text.words[i + 1 : middle] == text.words[middle + 1 : last]:
                yield text.line(i)


def other_side(text: Text, index: int) -> tuple[int, int]:
    """Of a `?`: its `:`, and what ends the expression."""
    depth, i, colon = 0, index + 1, -1
    while True:
        word = text.words[i]
        if word in CLOSING:
            i = text.ends[i]
        elif word == "?":
            depth += 1
        elif word == ":" and colon < 0:
            depth -= 1
            colon = i if depth < 0 else -1
        elif word in (";", ",", ")", "]", "}"):
            return colon, i
        i += 1


def functions_alike(text: Text) -> Iterator[str]:
    """Functions of the same parameters with the same body."""
    seen: dict[tuple[str, ...], str] = {}
    for name, opened, body in text.functions():
        said = tuple(text.words[opened : text.ends[body]])
        if said in seen:
            yield f"{text.words[name]} is {seen[said]}, {text.line(name)}"
        seen.setdefault(said, text.words[name])


def names_of_the_c_library(text: Text) -> Iterator[str]:
    declared = [*text.locals(), *((i, text.words[i]) for i, _ in text.parameters())]
    for i, name in declared:
        if name in C_LIBRARY:
            yield f"{name}, {text.line(i)}"


def ordinal_names(text: Text) -> Iterator[str]:
    """`add_2` beside `add`: a number says that there is another, not what it is."""
    every = set(text.words)
    for i, name in text.locals():
        match = re.fullmatch(r"(\w+?)_(\d+)", name)
        if match and match[1] in every:
            yield f"{name}, {text.line(i)}"


def names_of_the_compiler(text: Text) -> Iterator[str]:
    """`v__ptr`: C++ keeps names with two underscores in a row for itself ([lex.name]); those that begin so are its."""
    declared = [*text.locals(), *((i, text.words[i]) for i, _ in text.parameters())]
    for i, name in declared:
        if "__" in name:
            yield f"{name}, {text.line(i)}"


CHECKS: tuple[Callable[[Text], Iterator[str]], ...] = (
    unused_names, aliases, loops_of_one_trip, numbers_without_a_name, branches_alike, functions_alike,
    names_of_the_c_library, ordinal_names, names_of_the_compiler,
)  # fmt: skip
