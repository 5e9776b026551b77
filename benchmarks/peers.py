"""Kernels that others wrote for the chains of specs/: what `fusegen bench` times beside torch where they are installed.

    PEERS[chain][name](*operands)   makes the function to time, over torch tensors

Triton's are written here, in triton_rows.py, the way a practitioner would: one program a row, the row in registers.
QuACK (pip install quack-kernels) and Liger (pip install liger-kernel) are called as their documentation says. A package
that is missing raises ImportError, which is shown in place of a time.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[], object]


@functools.cache
def triton_rows() -> Any:
    """The file beside this one. Raises ImportError without Triton."""
    spec = importlib.util.spec_from_file_location("fusegen_triton_rows", Path(__file__).with_name("triton_rows.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(tensor: Any) -> Any:
    return tensor.view(-1, tensor.shape[-1])


# ---------------------------------------------------------------- Triton


def triton_layernorm(x: Any, bias: Any, residual: Any, gamma: Any, beta: Any) -> Run:
    run: Run = triton_rows().bias_gelu_residual_layernorm(x, bias, residual, gamma, beta, eps=1e-5)
    return run


def triton_softmax(scores: Any) -> Run:
    run: Run = triton_rows().softmax(rows_of(scores), 0.125, queries=0)
    return run


def triton_causal_softmax(scores: Any) -> Run:
    run: Run = triton_rows().softmax(rows_of(scores), 0.125, queries=scores.shape[-2])
    return run


# ---------------------------------------------------------------- QuACK and Liger


def quack_softmax(scores: Any) -> Run:
    """Of scores that are scaled already: QuACK's has no scale."""
    from quack.softmax import softmax

    rows = rows_of(scores)
    return lambda: softmax(rows)


def quack_rmsnorm(x: Any, gain: Any) -> Run:
    from quack.rmsnorm import rmsnorm_fwd

    weight = gain.float()
    return lambda: rmsnorm_fwd(x, weight, eps=1e-6)


def quack_add_rmsnorm(x: Any, residual: Any, gain: Any) -> Run:
    from quack.rmsnorm import rmsnorm_fwd

    weight = gain.float()
    return lambda: rmsnorm_fwd(x, weight, residual=residual, eps=1e-6)


def liger_rmsnorm(x: Any, gain: Any) -> Run:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda: LigerRMSNormFunction.apply(x, gain, 1e-6, 0.0, "llama", False)


def liger_add_rmsnorm(x: Any, residual: Any, gain: Any) -> Run:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda: LigerFusedAddRMSNormFunction.apply(x, residual, gain, 1e-6, 0.0, "llama", False)


def liger_swiglu(gate: Any, up: Any) -> Run:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda: LigerSiLUMulFunction.apply(gate, up)


PEERS = {
    "bias_gelu_residual_ln": {"Triton": triton_layernorm},
    "scale_softmax": {"Triton": triton_softmax, "QuACK, without the scale": quack_softmax},
    "scale_causal_softmax": {"Triton": triton_causal_softmax},
    "rmsnorm": {"QuACK": quack_rmsnorm, "Liger": liger_rmsnorm},
    "add_rmsnorm": {"QuACK": quack_add_rmsnorm, "Liger": liger_add_rmsnorm},
    "swiglu_elementwise": {"Liger": liger_swiglu},
}
