"""Which lines of a kernel come of which step of the spec, as far as their words tell.

A kernel calls values by the spec's own names (`fusegen.language.naming`), and what it makes of one by that name and a
word behind it: `h`, `h_kept`, `x_vec`. Names are unique within a kernel, and no word of the kernel's own is one of
them. So a line *makes* the value whose name stands left of its `=`, and *names* the others on it. That is all that is
claimed:

- a line without a value's name, such as a loop's head, is nobody's;
- functions in front of the kernel have names of their own, and are nobody's either, and so are comments;
- an operator of several values has the lines of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from fusegen.language import naming
from fusegen.language.graph import Graph, Kind, Node
from fusegen.reporting.state import Linked, lines_of

WORD = re.compile(r"(?<![\w.>:])[A-Za-z_]\w*")  # no member of something, and nobody's namespace
LEFT = re.compile(r"(?:[^=!<>(]|<[^<>=]*>|\[[^\]=]*\])*?(?=\s*(?:[-+*/%|&^]|<<|>>)?=(?!=))")
HEADS = ("for", "if", "while", "else", "switch", "return", "case")
SUFFIXES = (
    naming.TENSOR_SUFFIXES + naming.FACTOR_SUFFIXES + naming.VALUE_SUFFIXES + naming.COLUMN_SUFFIXES
    + naming.ATTENTION_SUFFIXES + naming.WEIGHTS_SUFFIXES + naming.SUM_SUFFIXES
)  # fmt: skip

Names = Mapping[str, int]  # an item for each name


@cache
def own_words() -> frozenset[str]:
    """What kernels call things of their own: `vector_cols` is not of a value `vector`."""
    frames = (
        naming.CPP, naming.FRAME, naming.SELECTION_FRAME, naming.COLUMN_FRAME, naming.PART_FRAME, naming.PRODUCT_FRAME,
        naming.ATTENTION_FRAME, naming.WEIGHTS_FRAME,
    )  # fmt: skip
    return frozenset().union(*frames)


def names_in(graph: Graph, operators: Mapping[int, int], tensors: Mapping[str, int]) -> dict[str, int]:
    """The items behind the names that a kernel of `graph`, or its reference, uses. `operators`: items by the index of
    an operator; `tensors`: those behind the arrays that the kernel reads, by its own names for them."""
    found: dict[str, int] = {}
    for node, name in naming.value_names(graph).items():
        tensor = graph.tensor_of.get(node)
        item = tensors.get(tensor.name) if tensor is not None else operators.get(node.operator.index)
        if item is not None:
            found[name] = item
    for tensor in graph.outputs:
        item = item_of(tensor.node, operators)
        if item is not None:
            found.setdefault(tensor.name, item)
    return found


def item_of(node: Node, operators: Mapping[int, int]) -> int | None:
    return None if node.op.kind is Kind.INPUT else operators.get(node.operator.index)


def linked(text: str, functions: Mapping[str, Names], comment: str = "//") -> tuple[Linked, ...]:
    """The links of a text, of whose functions each has names of its own."""
    found = []
    lines = lines_of(text)
    for name, names in functions.items():
        for number in body(lines, name):
            made, named = words_of(lines[number].partition(comment)[0], names)
            if made or named:
                found.append(Linked(number + 1, tuple(made), tuple(item for item in named if item not in made)))
    return tuple(sorted(found, key=lambda link: link.line))


def body(lines: Sequence[str], function: str) -> Iterator[int]:
    """The places of a function's lines, behind the one with its name to the brace that ends it, or to the end of a
    Python function."""
    head = re.compile(rf"^(?:.*\bvoid )?{re.escape(function)}\($|^def {re.escape(function)}\(")
    start = next((at for at, line in enumerate(lines) if head.match(line)), None)
    if start is None:
        return
    python = lines[start].startswith("def ")
    for at in range(start + 1, len(lines)):
        line = lines[at]
        if line == "}" or (python and line and not line[0].isspace()):
            return
        yield at


def words_of(code: str, names: Names) -> tuple[list[int], list[int]]:
    """The item that a line makes, and all that it names."""
    found = [(match.start(), item) for match in WORD.finditer(code) if (item := meant(match[0], names)) is not None]
    named = list(dict.fromkeys(item for _, item in found))
    first = re.match(r"\s*(\w*)", code)
    left = LEFT.match(code)
    if left is None or not left[0] or (first is not None and first[1] in HEADS):
        return [], named
    targets = [*WORD.finditer(re.sub(r"\[[^\]]*\]", lambda index: " " * len(index[0]), left[0]))]
    last = meant(targets[-1][0], names) if targets else None
    return ([last] if last is not None else []), named


def meant(word: str, names: Names) -> int | None:
    """The item behind a word: a value's name, or the longest that it is made of."""
    if word in names:
        return names[word]
    if word in own_words():
        return None
    longest = max((name for name in names if naming.made_of(word, name, SUFFIXES)), key=len, default=None)
    return None if longest is None else names[longest]
