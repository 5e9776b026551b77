"""Products of blocks of 8 bits whose codes and scales the chain itself makes, as layers of DeepSeek-V3 do."""

from __future__ import annotations

import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f8e4m3, f32, i32
from fusegen import ops as F
from fusegen.planner.programs.model import ProgramPlan
from fusegen.targets import target

pytestmark = pytest.mark.usefixtures("emulated_only")

M, N, K, T, E, D, H = dims("M N K T E D H")


@chain(M=40, N=256, K=256)
def quantized(x: bf16[M, K], w: f8e4m3[N, K], sw: f32[N // 128, K // 128]) -> tuple[bf16[M, N], f32[M, K // 128]]:
    codes, scales = F.quantize(x, f8e4m3, per="block", block=128, rule="deepseek")
    return F.dequantize(codes, scales) @ F.dequantize(w, sw).T, scales


@chain(M=24, N=256, K=128)
def mlp(
    x: bf16[M, K], gate: f8e4m3[N, K], up: f8e4m3[N, K], down: f8e4m3[K, N], gate_scale: f32[N // 128, K // 128],
    up_scale: f32[N // 128, K // 128], down_scale: f32[K // 128, N // 128],
) -> bf16[M, K]:  # fmt: skip
    """Quantized twice: before gate and up, and behind SwiGLU."""
    h = F.dequantize(*F.quantize(x, f8e4m3, per="block", block=128))
    h = F.silu(h @ F.dequantize(gate, gate_scale).T) * (h @ F.dequantize(up, up_scale).T)
    return F.dequantize(*F.quantize(h, f8e4m3, per="block", block=128)) @ F.dequantize(down, down_scale).T


@chain(T=12, D=128, H=128, E=4)
def experts(
    x: bf16[T, D], ids: i32[T, 2], weights: f32[T, 2], up: f8e4m3[E, H, D], up_scale: f32[E, H // 128, D // 128],
    down: f8e4m3[E, D, H], down_scale: f32[E, D // 128, H // 128],
) -> bf16[T, D]:  # fmt: skip
    """Tokens are quantized once, and then sorted by their experts."""
    order, ends, places = F.sort_by_group(ids, E)
    codes, scales = F.quantize(x, f8e4m3, per="block", block=128)
    tokens = F.dequantize(F.gather(codes, order // 2), F.gather(scales, order // 2))
    h = F.silu(F.grouped_matmul(tokens, F.dequantize(up, up_scale).mT, ends))
    h = F.dequantize(*F.quantize(h, f8e4m3, per="block", block=128))
    y = F.cast(F.grouped_matmul(h, F.dequantize(down, down_scale).mT, ends), bf16)
    return F.gather_sum(y, places, weights)


@pytest.mark.parametrize("name", ["cuda:h200", "cuda:l40s", "hip:mi300x"])
@pytest.mark.parametrize("spec", [quantized, mlp, experts], ids=lambda spec: spec.name)
def test_codes_and_scales_of_the_chain_itself(spec: Chain, name: str) -> None:
    if spec is experts and target(name).vendor == "hip":
        pytest.skip("grouped products of blocks are of NVIDIA's kernels")
    report = fusegen.compile(spec, name, on="emulator").report
    assert report is not None
    assert report.ok, str(report)[:2000]


def test_codes_are_stored_as_codes() -> None:
    """Not as what they are rounded from, and the product's kernel reads both as they lie."""
    for spec, sizes in (quantized, {"M": 4096, "N": 7168, "K": 16384}), (mlp, {"M": 4096, "N": 14336, "K": 4096}):
        program = fusegen.plan(spec.at(**sizes), "cuda:h200")
        assert isinstance(program, ProgramPlan)
        assert [step.plan.rule for step in program.steps][1:] == ["wgmma"] * (len(program.steps) - 1)
        assert any(t.dtype is f8e4m3 for t in program.steps[0].graph.outputs)
