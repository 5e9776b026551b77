"""Conversions from f32 against numpy and ml_dtypes: `python -m tests.conversions` tries every f32, minutes a type.

The kernels are those that a cast gives, and run in the emulator, or on a GPU with `--on gpu`. Types take less time side
by side: `for t in f8e4m3 bf16; do python -m tests.conversions $t --on gpu & done; wait`.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from rich.progress import track

from fusegen import bf16, chain, dims, f16, f32, i8, i32, u8, u32
from fusegen import ops as F
from fusegen.language.spec import Chain
from fusegen.language.types import F8, DType
from fusegen.pipeline import compile
from fusegen.runtime import Kernel
from fusegen.targets import target

(N,) = dims("N")
Array = np.ndarray[Any, np.dtype[Any]]
AT_ONCE = 2**24
TYPES = (*F8, bf16, f16, i8, u8, i32, u32)
NAN_CODE = {"f8e4m3": 0x7F, "f8e5m2": 0x7F, "f8e4m3fnuz": 0x80, "f8e5m2fnuz": 0x80, "f8e8m0": 0xFF}


def narrowing(dtype: DType, saturate: bool = True) -> Chain:
    """x as another type."""

    def narrow(x: f32[N]) -> Any:
        return F.cast(x, dtype, saturate)

    narrow.__annotations__["return"] = dtype[N]
    return chain(N=AT_ONCE)(narrow)


def widening(dtype: DType) -> Chain:
    """8 bits to f32."""

    def widen(x: Any) -> f32[N]:
        return x * 1.0

    widen.__annotations__["x"] = dtype[N]
    return chain(N=AT_ONCE)(widen)


def kernel_of(chain: Chain, vendor: str, on: str = "emulator") -> Kernel:
    return compile(chain, target(vendor), on=on, validate=False)


@np.errstate(all="ignore")
def codes(x: Array, dtype: DType, saturate: bool = True) -> Array:
    """The code of each number, by ml_dtypes: of one beyond the range that of the nearest number, if it saturates."""
    least, most = dtype.nearest if saturate else (-np.inf, np.inf)
    found = np.clip(x, np.float32(least), np.float32(most)).astype(dtype.numpy)
    if not saturate:
        x = found.astype(np.float32)
    found = found.view(np.uint8)
    return np.where(np.isnan(x), np.uint8(NAN_CODE[dtype.name]), found)


@np.errstate(all="ignore")
def whole(x: Array, dtype: DType) -> Array:
    """The whole number nearest to each, of two the even one; as 32 bits toward zero. NaN is 0."""
    wide = x.astype(np.float64)
    wide = np.rint(wide) if dtype.bytes == 1 else np.trunc(wide)
    return np.where(np.isnan(wide), 0.0, np.clip(wide, *dtype.nearest)).astype(dtype.numpy)


@np.errstate(all="ignore")
def wrong(got: Array, x: Array, dtype: DType, saturate: bool = True) -> Array:
    """The numbers that became another one. NaN of 16 bits is any NaN."""
    if dtype in F8:
        return np.asarray(x[got.view(np.uint8) != codes(x, dtype, saturate)])
    if dtype.kind != "float":
        return np.asarray(x[got != whole(x, dtype)])
    law, nan = x.astype(dtype.numpy), np.isnan(x)
    return np.asarray(x[np.where(nan, ~np.isnan(got), got.view(np.uint16) != law.view(np.uint16))])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conversions", description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help=f"of {', '.join(map(str, TYPES))} (all)")
    parser.add_argument("--target", default="cuda:h200")
    parser.add_argument("--on", choices=["emulator", "gpu"], default="emulator", help="what runs them (emulator)")
    parser.add_argument("--overflow", action="store_true", help="of 8-bit floats, with saturate=False")
    chosen = parser.parse_args()
    failed = 0
    types = F8 if chosen.overflow else TYPES
    if unknown := set(chosen.types) - {d.name for d in types}:
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(map(str, types))}")
    for dtype in [d for d in types if not chosen.types or d.name in chosen.types]:
        kernel = kernel_of(narrowing(dtype, not chosen.overflow), chosen.target, chosen.on)
        found = 0
        for first in track(range(0, 2**32, AT_ONCE), description=f"f32 to {dtype}"):
            x = np.arange(first, first + AT_ONCE, dtype=np.uint64).astype(np.uint32).view(np.float32)
            found += len(wrong(np.asarray(kernel(x)), x, dtype, not chosen.overflow))
        print(f"{dtype}: {found} of 2^32 are wrong")
        failed += found
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
