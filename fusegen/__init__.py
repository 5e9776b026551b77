"""fusegen: fused GPU kernels from small Python op graphs.

    from fusegen import chain, dims, f16, ops as F

    M, N = dims("M N")

    @chain(M=8192, N=4096)
    def bias_relu(x: f16[M, N], bias: f16[N]) -> f16[M, N]:
        return F.relu(x + bias)

    kernel = fusegen.compile(bias_relu)        # planned, emitted, compiled, validated
    y = kernel(x, bias)                        # torch, CuPy, JAX or numpy arrays

Declaring chains needs no other package and imports in a moment; what plans, compiles and runs them is imported when it
is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fusegen.errors import FusegenError
from fusegen.language import notebook, ops
from fusegen.language.sizes import ragged
from fusegen.language.spec import Chain, chain, load_chains
from fusegen.language.types import Dim, DType, dims
from fusegen.version import VERSION

if TYPE_CHECKING:
    # In an annotation, a type checker takes f16[M, N] as it takes Any: it would look for types, and these are values.
    b8: Any
    bf16: Any
    f4e2m1: Any
    f8e4m3: Any
    f8e4m3fnuz: Any
    f8e5m2: Any
    f8e5m2fnuz: Any
    f8e8m0: Any
    f16: Any
    f32: Any
    i4: Any
    i8: Any
    i32: Any
    i64: Any
    u4: Any
    u8: Any
    u32: Any
    from fusegen.derivatives import derive
    from fusegen.emitting.rendering import render
    from fusegen.measuring.benchmark import bench
    from fusegen.pipeline import compile, plan
    from fusegen.reporting.report import report
    from fusegen.runtime import Kernel, Program
    from fusegen.targets import target
    from fusegen.tuning import tune
    from fusegen.validation import validate
else:
    from fusegen.language.types import (
        b8,
        bf16,
        f4e2m1,
        f8e4m3,
        f8e4m3fnuz,
        f8e5m2,
        f8e5m2fnuz,
        f8e8m0,
        f16,
        f32,
        i4,
        i8,
        i32,
        i64,
        u4,
        u8,
        u32,
    )  # fmt: skip

__version__ = VERSION
sys.modules[f"{__name__}.ops"] = ops  # `from fusegen.ops import softmax` means the same
__all__ = [
    "Chain",
    "DType",
    "Dim",
    "FusegenError",
    "Kernel",
    "Program",
    "b8",
    "bench",
    "bf16",
    "chain",
    "compile",
    "derive",
    "dims",
    "f4e2m1",
    "f8e4m3",
    "f8e4m3fnuz",
    "f8e5m2",
    "f8e5m2fnuz",
    "f8e8m0",
    "f16",
    "f32",
    "i4",
    "i8",
    "i32",
    "i64",
    "load_chains",
    "ops",
    "plan",
    "ragged",
    "render",
    "report",
    "target",
    "tune",
    "u4",
    "u8",
    "u32",
    "validate",
]

_LATER = {
    "Kernel": "fusegen.runtime",
    "Program": "fusegen.runtime",
    "bench": "fusegen.measuring.benchmark",
    "compile": "fusegen.pipeline",
    "derive": "fusegen.derivatives",
    "plan": "fusegen.pipeline",
    "render": "fusegen.emitting.rendering",
    "report": "fusegen.reporting.report",
    "target": "fusegen.targets",
    "tune": "fusegen.tuning",
    "validate": "fusegen.validation",
}


if not TYPE_CHECKING:  # a type checker knows what names there are

    def __getattr__(name: str) -> Any:
        if name in _LATER:
            return getattr(import_module(_LATER[name]), name)
        raise AttributeError(f"module 'fusegen' has no attribute {name!r}")


def _draw(thing: object) -> str:
    """What chains, plans and reports are in a notebook; what draws them is imported when one is shown."""
    return str(import_module("fusegen.reporting.fragments").fragment(thing))


notebook.drawer = _draw
