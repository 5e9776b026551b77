"""Derived chains beside those written by hand: as many launches, as many bytes; and right, in the emulator."""

from __future__ import annotations

from typing import Any

import pytest

import fusegen
from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.cli.programs import ask_plan
from fusegen.derivatives import derive
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.language.spec import Chain, load_chains
from fusegen.targets import target

M, N, K = dims("M N K")


@chain(M=16384, N=4096)
def rms(x: bf16[M, N], gamma: bf16[N]) -> tuple[bf16[M, N], f32[M, 1]]:
    rstd = F.rsqrt(F.mean(x * x) + 1e-6)
    return x * rstd * gamma, rstd


@chain(M=1024, N=12288)
def ln(x: bf16[M, N], gamma: bf16[N], beta: bf16[N]) -> tuple[bf16[M, N], f32[M, 1], f32[M, 1]]:
    mean = F.mean(x)
    centered = x - mean
    rstd = F.rsqrt(F.mean(F.square(centered)) + 1e-5)
    return centered * rstd * gamma + beta, mean, rstd


@chain(M=1024, N=1024)
def weights(x: bf16[M, N]) -> bf16[M, N]:
    return F.softmax(x)


@chain(M=1024, N=1024)
def weights_by_hand(x: bf16[M, N], dout: bf16[M, N]) -> bf16[M, N]:
    p = F.softmax(x)
    return p * (dout - F.sum(p * dout))


@chain(M=1024, N=1024)
def loss(logits: bf16[M, N], labels: i32[M]) -> f32[M]:
    return F.cross_entropy(logits, labels)


@chain(M=1024, N=1024)
def loss_by_hand(logits: bf16[M, N], labels: i32[M], dout: f32[M]) -> bf16[M, N]:
    at = labels[:, None]
    slope = F.softmax(logits) - F.where(F.col_index(logits) == at, 1.0, 0.0)
    return F.where(at == -100, 0.0, slope * dout[:, None])


@chain(M=1024, N=1024)
def swiglu(gate: bf16[M, N], up: bf16[M, N]) -> bf16[M, N]:
    return F.silu(gate) * up


@chain(M=1024, N=1024)
def swiglu_by_hand(gate: bf16[M, N], up: bf16[M, N], dout: bf16[M, N]) -> tuple[bf16[M, N], bf16[M, N]]:
    s = F.sigmoid(gate)
    return dout * up * (s + gate * s * (1.0 - s)), dout * gate * s


@chain(M=32, N=64, K=48)
def projected(x: bf16[M, K], w: bf16[K, N], bias: bf16[N]) -> bf16[M, N]:
    return F.relu(x @ w + bias)


def cost(made: Chain) -> tuple[int, int]:
    """Launches, and bytes moved."""
    found = ask_plan(made.graph, target("cuda:h200"))
    if found.error is not None:
        raise found.error
    if found.program is not None:
        steps = found.program.steps
        return len(steps), sum(step.plan.cost.traffic.moved for step in steps)
    return 1, found.found.need()[0].cost.traffic.moved


def of_spec(name: str) -> Chain:
    (made,) = load_chains(f"specs/{name}.py")
    return made


@pytest.mark.parametrize(
    ("forward", "by_hand", "options"),
    [
        (rms, "rmsnorm_backward", {"outputs": ("out0",)}),
        (ln, "layernorm_backward", {"outputs": ("out0",)}),
        (ln.at(M=16384, N=4096), "layernorm_param_grads", {"outputs": ("out0",), "of": ("gamma", "beta")}),
        (weights, weights_by_hand, {}),
        (loss, loss_by_hand, {}),
        (swiglu, swiglu_by_hand, {}),
    ],
    ids=["rmsnorm", "layernorm", "layernorm_params", "softmax", "cross_entropy", "swiglu"],
)
def test_a_derived_chain_costs_what_one_by_hand_does(forward: Chain, by_hand: Any, options: Any) -> None:
    wanted = of_spec(by_hand) if isinstance(by_hand, str) else by_hand
    launches, moved = cost(derive(forward, **options))
    least, ideal = cost(wanted)
    assert launches == least
    assert moved <= 1.01 * ideal


@pytest.mark.parametrize(
    "forward", [rms.at(M=5, N=64), weights.at(M=5, N=64), loss.at(M=6, N=64), projected], ids=lambda made: made.name
)
def test_derived_kernels_are_right(forward: Chain) -> None:
    try:
        compiler()
    except EmulatorUnavailable as error:
        pytest.skip(f"no emulator: {str(error).splitlines()[0]}")
    kernel = fusegen.compile(derive(forward), target="cuda:h200", on="emulator")
    assert kernel.report is not None and kernel.report.ok  # noqa: PT018
