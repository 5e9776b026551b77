"""The generated numpy reference on torch: the same text over float64 tensors, on a GPU when the operands are there.

For arrays too large for numpy's patience. Only what reference texts say is spelled here; anything else fails loudly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is missing: pip install torch")

DTYPES = {
    np.float64: torch.float64,
    np.float32: torch.float32,
    np.float16: torch.float16,
    np.int32: torch.int32,
    np.int64: torch.int64,
    bool: torch.bool,
    ml_dtypes.bfloat16: torch.bfloat16,
    ml_dtypes.float8_e4m3fn: torch.float8_e4m3fn,
    ml_dtypes.float8_e5m2: torch.float8_e5m2,
}


class Array:
    """A tensor that answers to numpy's names."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def reshape(self, shape: tuple[int, ...]) -> Array:
        return Array(self.tensor.reshape(shape))

    def astype(self, dtype: Any) -> Array:
        return Array(self.tensor.to(DTYPES[dtype]))

    def sum(self, axis: int, keepdims: bool) -> Array:
        return Array(self.tensor.sum(axis, keepdim=keepdims))

    def max(self, axis: int, keepdims: bool) -> Array:
        return Array(self.tensor.amax(axis, keepdim=keepdims))  # NaN wins, as in numpy

    def min(self, axis: int, keepdims: bool) -> Array:
        return Array(self.tensor.amin(axis, keepdim=keepdims))

    def __getitem__(self, key: Any) -> Array:
        return Array(self.tensor[key])

    def __neg__(self) -> Array:
        return Array(-self.tensor)

    def __invert__(self) -> Array:
        return Array(~self.tensor)


def binary(name: str) -> Callable[[Array, Any], Array]:
    def method(self: Array, other: Any) -> Array:
        return Array(getattr(self.tensor, name)(bare(other)))

    return method


OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "and", "rand", "or", "ror",
    "lt", "le", "gt", "ge", "eq", "ne",
)  # fmt: skip
for _name in OPERATORS:
    setattr(Array, f"__{_name}__", binary(f"__{_name}__"))


def bare(value: Any) -> Any:
    return value.tensor if isinstance(value, Array) else value


class Numpy:
    """What a reference text calls `np`."""

    float64, float32, float16, int32, int64 = np.float64, np.float32, np.float16, np.int32, np.int64
    inf, nan = math.inf, math.nan

    def __init__(self, device: Any) -> None:
        self.device = device

    @staticmethod
    def errstate(**_: str) -> Any:
        return lambda function: function

    def asarray(self, value: Any) -> Array:
        return value if isinstance(value, Array) else Array(torch.as_tensor(value, device=self.device))

    def arange(self, count: int, dtype: Any = np.int64) -> Array:
        return Array(torch.arange(count, dtype=DTYPES[dtype], device=self.device))

    def where(self, mask: Any, yes: Any, no: Any) -> Array:
        return Array(torch.where(self.asarray(mask).tensor, bare(yes), bare(no)))

    def power(self, base: Any, exponent: Any) -> Array:
        return Array(torch.pow(bare(base), bare(exponent)))

    def maximum(self, a: Any, b: Any) -> Array:
        return Array(torch.maximum(*self.pair(a, b)))

    def minimum(self, a: Any, b: Any) -> Array:
        return Array(torch.minimum(*self.pair(a, b)))

    def pair(self, a: Any, b: Any) -> tuple[Any, Any]:
        first = next(bare(x) for x in (a, b) if isinstance(x, Array))
        return tuple(torch.as_tensor(bare(x), dtype=first.dtype, device=self.device) for x in (a, b))

    @staticmethod
    def clip(x: Array, least: float, largest: float) -> Array:
        return Array(torch.clamp(x.tensor, least, largest))

    @staticmethod
    def isnan(x: Array) -> Array:
        return Array(torch.isnan(x.tensor))

    @staticmethod
    def lexsort(keys: tuple[Array, Array]) -> Array:
        minor, major = (key.tensor for key in keys)
        order = torch.argsort(minor + 0, dim=-1, stable=True)  # -0.0 + 0 is 0.0, and numpy sorts them as equals
        again = torch.argsort(torch.gather(major.to(torch.int8), -1, order), dim=-1, stable=True)
        return Array(torch.gather(order, -1, again))

    @staticmethod
    def take_along_axis(x: Array, at: Array, axis: int) -> Array:
        return Array(torch.take_along_dim(x.tensor, at.tensor, axis))

    @staticmethod
    def vectorize(function: Any, otypes: Any) -> Callable[[Array], Array]:
        return {math.erf: lambda x: Array(torch.erf(x.tensor))}[function]

    def __getattr__(self, name: str) -> Callable[[Any], Array]:
        names = ("abs", "exp", "log", "log1p", "nan_to_num", "round", "sqrt", "tanh", "trunc")
        function = getattr(torch, names[names.index(name)])
        return lambda x: Array(function(bare(x)))


def torch_reference(source: str, name: str, device: Any) -> Callable[..., tuple[Any, ...]]:
    """The reference function over tensors of `device`; always a tuple."""
    text = source.replace("import numpy as np\n", "")
    module: dict[str, Any] = {"np": Numpy(device), "__name__": "torch_reference"}
    exec(compile(text, f"<reference {name} on torch>", "exec"), module)

    def run(*operands: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            found = module[name](*operands)
        return tuple(bare(f) for f in (found if isinstance(found, tuple) else (found,)))

    return run


def tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value.item()
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.astype(np.float32)).bfloat16()
    if (found := DTYPES.get(value.dtype.type)) is not None and found.itemsize == 1 and found.is_floating_point:
        return torch.from_numpy(value.view(np.uint8)).view(found)
    return torch.from_numpy(value)
