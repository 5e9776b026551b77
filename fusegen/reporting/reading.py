"""JSON from anywhere becomes dataclasses, or RequestError with the place of what is wrong with it.

    read(State, document, "before.json")

A value is taken where it is of the type that its field is annotated with, and nowhere else: no text becomes a number,
no number a text, no field may be missing, and none may be there that nobody asked for.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NewType

from fusegen.errors import RequestError

LARGEST_FILE = 64 * 2**20  # bytes; all of specs/ takes less than a quarter of it
LARGEST_NUMBER = 2**63
NOT_NUMBERS = ("nan", "inf", "-inf")  # as text, since JSON has no word for them
AnyFloat = NewType("AnyFloat", float)  # perhaps NaN or an infinity
SHOWN = 40  # letters of a value that is wrong


def read_file(path: Path) -> Any:
    """The document in a file. Raises RequestError for what can't be read, or is no JSON."""
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise RequestError(f"{path} has {size:,} bytes, and a report has at most {LARGEST_FILE:,}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is no text: {error.reason} at byte {error.start}") from error
    try:
        return json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is no JSON: {error}") from error


def no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def read(kind: Any, value: Any, place: str) -> Any:
    """`value` as a `kind`: a dataclass, `tuple[X, ...]`, `Mapping[str, X]`, `X | None`, or a plain type. Raises
    RequestError, whose first words are the place."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        (wanted,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else read(wanted, value, place)
    if is_dataclass(kind):
        return read_fields(kind, value, place)
    if origin is tuple and arguments[-1] is Ellipsis:
        items = need(value, list, "a list", place)
        return tuple(read(arguments[0], item, f"{place}[{number}]") for number, item in enumerate(items))
    if origin is tuple:
        items = need(value, list, f"a list of {len(arguments)}", place)
        if len(items) != len(arguments):
            raise wrong(value, f"a list of {len(arguments)}", place)
        pairs = zip(arguments, items, strict=True)
        return tuple(read(one, item, f"{place}[{number}]") for number, (one, item) in enumerate(pairs))
    if origin is Mapping:
        return {key: read(arguments[1], item, f"{place}.{key[:SHOWN]}")
                for key, item in need(value, dict, "an object", place).items()}  # fmt: skip
    return read_plain(kind, value, place)


def read_fields(kind: Any, value: Any, place: str) -> Any:
    found = need(value, dict, "an object", place)
    names = [field.name for field in fields(kind)]
    if missing := [name for name in names if name not in found]:
        raise RequestError(f"{place} lacks {missing[0]}, which fusegen report --save writes")
    if unknown := [name for name in found if name not in names]:
        raise RequestError(f"{place} has {shown(unknown[0])}, which this version of fusegen does not know")
    kinds = hints_of(kind)
    return kind(**{name: read(kinds[name], found[name], f"{place}.{name}") for name in names})


@cache
def hints_of(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def read_plain(kind: Any, value: Any, place: str) -> Any:
    if kind is bool:
        return need(value, bool, "true or false", place)
    if kind is str:
        text = need(value, str, "a text", place)
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise RequestError(f"{place} holds half a character, which no file can")
        return text
    if isinstance(value, bool) or (kind is int and not isinstance(value, int)):
        raise wrong(value, "a whole number" if kind is int else "a number", place)
    if kind is AnyFloat and isinstance(value, str) and value in NOT_NUMBERS:
        return float(value)
    if not isinstance(value, (int, float)):
        raise wrong(value, "a number", place)
    if kind is int and not abs(value) < LARGEST_NUMBER:
        raise wrong(value, f"a number below {LARGEST_NUMBER}", place)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if math.isinf(found):  # what JSON has no word for is text
        raise wrong(value, "a number that a float can be", place)
    return int(value) if kind is int else found


def need(value: Any, kind: type, said: str, place: str) -> Any:
    if not isinstance(value, kind):
        raise wrong(value, said, place)
    return value


def wrong(value: Any, wanted: str, place: str) -> RequestError:
    return RequestError(f"{place} is {shown(value)}, and {wanted} was wanted")


def shown(value: Any) -> str:
    """As JSON has it, its beginning."""
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
