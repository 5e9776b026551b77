"""The operands of a call: what they hold, and how they lie in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.fuzzing.bounded import INF, KINDS, STORED, Array, Bounded
from tests.fuzzing.draft import Operand

SPECIAL = (INF, -INF, float("nan"), 0.0, -0.0, 1e30, 6e4, 1e-30)
FLOATS = ("small integers", "tiny", "wide", "normal", "normal", "normal", "constant rows", "few numbers")
ENDS = (2**31 - 1, -(2**31), 2**31 - 2, -(2**31) + 1, 2**24 + 1, 2**24, -(2**24) - 1, 2**30, 0, 1, -1)

# docs/calling.md takes these as they are; how often each is drawn, of those that the shape has room for
TAKEN = {"plain": 50, "padded": 15, "misaligned": 10, "exchanged": 10, "broadcast": 8, "every second row": 7}
MATRICES = {"columns first": 12}  # which way round a matrix lies is free
OTHERS = {"columns first": 3, "reversed": 3}  # taken, or refused in a sentence
LAYOUTS = frozenset({*TAKEN, *MATRICES, *OTHERS})


@dataclass(frozen=True)
class Fill:
    """What an operand holds, and how it lies."""

    style: str
    special: int  # how many infinities, NaN and the like are strewn in
    layout: str
    pad: int  # elements between the rows, or before the first
    offset: int


def draw_fill(rng: random.Random, operand: Operand, shape: Sequence[int], *, extreme: bool, special: bool,
              matrices: bool, out: bool = False) -> Fill:  # fmt: skip
    """`extreme` integers; `special` values among floats; `matrices` may lie either way round; `out` is written."""
    pad = rng.randint(1, 8)
    layout = draw_layout(rng, shape, matrices=matrices, out=out)
    style, strewn = "", 0
    if KINDS[operand.dtype] == "f":
        style = rng.choice(FLOATS)
        if operand.special or (special and rng.random() < (0.6 if shape else 0.15)):
            strewn = rng.randint(1, 3)
    elif operand.dtype == "i32":
        style = rng.choice(("ends", "ends", "any", "small integers")) if extreme else "small integers"
    else:
        style = rng.choice(("few hold", "half hold", "most hold"))
    return Fill(style, strewn, layout, pad, rng.randint(0, pad))


def draw_layout(rng: random.Random, shape: Sequence[int], *, matrices: bool, out: bool) -> str:
    weights = TAKEN | (MATRICES if matrices else OTHERS)
    rank = len(shape)
    if rank == 0 or 0 in shape:
        return "plain"
    unfit = {
        "padded": rank < 2, "exchanged": rank < 3, "broadcast": rank < 2 or out, "columns first": rank < 2,
        "every second row": rank < 2 or shape[-2] < 2, "reversed": rank < 2 or shape[-2] < 2,
    }  # fmt: skip
    fitting = [name for name in weights if not unfit.get(name, False)]
    return rng.choices(fitting, [weights[name] for name in fitting])[0]


# ---------------------------------------------------------------- what they hold


def content(rng: np.random.Generator, operand: Operand, shape: Sequence[int], fill: Fill) -> Array:
    """The values, in the operand's type; of a broadcast one alike along its first axis."""
    own = (1, *shape[1:]) if fill.layout == "broadcast" else tuple(shape)
    if operand.dtype == "b8":
        data = rng.random(own) < {"few hold": 0.05, "half hold": 0.5, "most hold": 0.95}[fill.style]
    elif operand.dtype == "i32":
        data = whole_numbers(rng, own, fill.style)
    else:
        data = strewn(rng, floats(rng, own, fill.style), fill.special)
    with np.errstate(all="ignore"):
        return np.broadcast_to(np.asarray(data).astype(STORED[operand.dtype]), tuple(shape))


def whole_numbers(rng: np.random.Generator, shape: Sequence[int], style: str) -> Array:
    if style == "ends":
        return rng.choice(np.array(ENDS), tuple(shape))
    if style == "any":
        return rng.integers(-(2**31), 2**31, tuple(shape))
    return rng.integers(-9, 10, tuple(shape))


def floats(rng: np.random.Generator, shape: Sequence[int], style: str) -> Array:
    size = tuple(shape)
    if style == "small integers":
        return rng.integers(-4, 5, size).astype(float)
    if style == "constant rows":
        return np.broadcast_to(rng.standard_normal((*size[:-1], 1) if size else ()), size).copy()
    if style == "few numbers":
        return rng.choice(rng.standard_normal(3), size)
    return np.asarray(rng.standard_normal(size)) * {"tiny": 1e-3, "wide": 8.0}.get(style, 1.0)


def strewn(rng: np.random.Generator, data: Array, count: int) -> Array:
    """With `count` special values; of a matrix now and then a whole row of -inf."""
    if not count or not data.size:
        return data
    data = np.array(data)
    flat = data.reshape(-1)
    for _ in range(count):
        flat[rng.integers(0, flat.size)] = rng.choice(SPECIAL)
    if data.ndim >= 2 and rng.random() < 0.3:
        data.reshape(-1, data.shape[-1])[rng.integers(0, flat.size // data.shape[-1])] = -INF
    return flat.reshape(data.shape)


def known(array: Array, dtype: str) -> Bounded:
    kind = KINDS[dtype]
    return Bounded(kind, array if kind == "b" else array.astype(np.int64 if kind == "i" else float))


# ---------------------------------------------------------------- how they lie


@dataclass(frozen=True)
class Laid:
    """An array in the memory around it. `view` of the room is the array."""

    room: Array
    view: Callable[[Array], Array]

    @property
    def array(self) -> Array:
        return self.view(self.room)

    @property
    def around(self) -> bytes:
        """What lies beside it."""
        inside = np.zeros(self.room.shape, bool)
        self.view(inside)[...] = True
        return self.room[~inside].tobytes()


def lay(values: Array, fill: Fill) -> Laid:
    """A copy of `values`, laid out so."""
    shape, pad, offset = values.shape, fill.pad, fill.offset
    room: Sequence[int] = shape
    view: Callable[[Array], Array] = same
    if fill.layout == "padded":
        room, view = (*shape[:-1], shape[-1] + pad), lambda a: a[..., offset : offset + shape[-1]]
    elif fill.layout == "misaligned":
        room, view = (values.size + pad,), lambda a: a[pad:].reshape(shape)
    elif fill.layout == "exchanged":
        room, view = (shape[1], shape[0], *shape[2:]), lambda a: a.swapaxes(0, 1)
    elif fill.layout == "every second row":
        room, view = (*shape[:-2], 2 * shape[-2], shape[-1]), lambda a: a[..., ::2, :]
    elif fill.layout == "columns first":
        room, view = (*shape[:-2], shape[-1], shape[-2]), lambda a: a.swapaxes(-1, -2)
    elif fill.layout == "reversed":
        view = lambda a: a[..., ::-1, :]  # noqa: E731
    elif fill.layout == "broadcast":
        laid = Laid(aligned((1, *shape[1:]), values.dtype), lambda a: np.broadcast_to(a, shape))
        laid.room[...] = values[:1]
        return laid
    laid = Laid(aligned(room, values.dtype), view)
    laid.array[...] = values
    return laid


def same(array: Array) -> Array:
    return array


def aligned(shape: Sequence[int], dtype: np.dtype[np.generic]) -> Array:
    """An array at a multiple of 256 bytes, whatever numpy's allocator does; of odd bytes that no test wants to see."""
    count = int(np.prod(shape)) * dtype.itemsize
    whole = np.full(count + 256, 0x5B, np.uint8)
    start = -whole.ctypes.data % 256
    if dtype == np.bool_:
        whole[:] = 1
    return whole[start : start + count].view(dtype).reshape(tuple(shape))


def sized(shape: Sequence[str | int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[size] if isinstance(size, str) else size for size in shape)
