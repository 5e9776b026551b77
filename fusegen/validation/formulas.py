"""Ops as functions of numpy arrays, by the text that they have in references."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from fusegen.language.graph import CASTS, Op
from fusegen.language.philox import philox
from fusegen.language.types import b8, f4e2m1, f32, i32, u32

Array = np.ndarray[Any, np.dtype[Any]]
ROUNDED = {
    d.numpy_name: d.numpy for d in (*CASTS.values(), f4e2m1)
}  # types by the names that reference texts give them


def erf(x: Any) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x))


@cache
def formula(text: str, arity: int) -> Callable[..., Array]:
    """An op's numpy text as a function of its arguments and, by name, its result."""
    names = [f"a{i}" for i in range(arity)]
    body = text.format(*names, out="out")
    function = eval(f"lambda {''.join(n + ', ' for n in names)}out=None: {body}",
                    {"np": np, "erf": erf, "philox": philox, **ROUNDED})  # fmt: skip
    return lambda *args, **named: np.asarray(function(*args, **named))


def apply(op: Op, values: Sequence[Array]) -> Array:
    kind = {"i": i32, "u": u32, "b": b8}.get(np.asarray(values[-1]).dtype.kind, f32) if values else f32
    ref, _ = op.forms.get(kind, (op.ref, op.expr))
    return formula(ref, op.arity)(*values)
