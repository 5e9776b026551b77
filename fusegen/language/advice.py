"""What to answer to a function that fusegen.ops does not have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

ELSEWHERE: Mapping[str, str] = {
    "clamp": "clip", "swish": "silu", "amin": "min", "power": "pow", "negative": "neg", "mm": "matmul",
    "bmm": "matmul", "absolute": "abs", "remainder": "fmod", "normalize": "l2norm",
    "hard_swish": "hardswish", "hard_sigmoid": "hardsigmoid", "rint": "round", "fix": "trunc", "rand": "uniform",
    "randn": "normal",
}  # fmt: skip
"""Names of the same in other libraries."""
LONG = 5  # letters of a name of which one may be wrong


def advice(name: str, functions: Sequence[str]) -> str:
    """What whoever wrote F.`name` may have meant, of the functions there are; all of them, where that is anybody's
    guess."""
    if name in ELSEWHERE:
        return f"it is F.{ELSEWHERE[name]} here"
    if near := next((known for known in functions if mistyped(name, known)), None):
        return f"did you mean F.{near}?"
    return f"there are {', '.join(functions)}\n  `fusegen list --ops` says what each of them is"


def mistyped(name: str, known: str) -> bool:
    """Whether `name` may be a slip of whoever meant `known`, and no other function's name, as `sort` is beside sqrt:
    another case, underscores, doubled letters, letters in another order; in a long name also one letter more, less or
    other."""
    one, other = (re.sub(r"(.)\1+", r"\1", text.lower().replace("_", "")) for text in (name, known))
    if sorted(one) == sorted(other):
        return True
    if len(other) < LONG or re.sub(r"\D", "", one) != re.sub(r"\D", "", other):  # log2 is not log1p
        return False
    without = [[text[:at] + text[at + 1 :] for at in range(len(text))] for text in (one, other)]
    return one in without[1] or other in without[0] or (any(map(str.__eq__, *without)) and len(one) == len(other))
