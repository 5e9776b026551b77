"""Products whose results are quantized where they are summed, beside the same as two kernels and beside torch.

    python benchmarks/quantized_products.py
    python benchmarks/quantized_products.py --sizes 8192,28672,8192

All by one stopwatch, L2 cold, medians. Kernels are not validated here (`fusegen validate` does that). Run from the
repository root on a GPU that multiplies 8 bits by warpgroups (sm_90a), in an environment with torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fusegen  # noqa: E402
from fusegen import Chain, bf16, chain, dims, f8e4m3, f32  # noqa: E402
from fusegen import ops as F  # noqa: E402
from fusegen.language.spec import load_chains  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.runtime import finding  # noqa: E402
from fusegen.targets import target  # noqa: E402

M, N, K = dims("M N K")
REPEATS = 15


@chain(M=4096, N=14336, K=4096)
def swiglu(x: bf16[M, K], gate: bf16[N, K], up: bf16[N, K]) -> bf16[M, N]:
    """The bf16 chain."""
    return F.silu(x @ gate.T) * (x @ up.T)


@chain(M=4096, N=14336, K=4096)
def norm_swiglu(x: bf16[M, K], gamma: bf16[K], gate: bf16[N, K], up: bf16[N, K]) -> bf16[M, N]:
    """The bf16 chain, rmsnorm before it."""
    normed = F.cast(F.rmsnorm(x, gamma), bf16)
    return F.silu(normed @ gate.T) * (normed @ up.T)


@chain(M=4096, N=14336)
def quantize(a: bf16[M, N]) -> tuple[f8e4m3[M, N], f32[M, N // 128]]:
    """What a second kernel would do."""
    values, scale = F.quantize(a, f8e4m3, per="block", block=128, rule="deepseek")
    return values, scale


@chain(M=4096, N=14336, K=4096)
def fp8_swiglu(x: f8e4m3[M, K], gate: f8e4m3[N, K], up: f8e4m3[N, K], s: f32[M, 1], sw: f32[N]) -> bf16[M, N]:
    """Fast sums, bf16 results."""
    gated, raised = (F.matmul(x, w.T, promote=0) * s * sw for w in (gate, up))
    return F.silu(gated) * raised


@chain(M=4096, N=14336, K=4096)
def fp8_swiglu_quant(
    x: f8e4m3[M, K], gate: f8e4m3[N, K], up: f8e4m3[N, K], s: f32[M, 1], sw: f32[N]
) -> tuple[f8e4m3[M, N], f32[M, N // 128]]:  # fmt: skip
    """Fast sums, quantized by blocks."""
    gated, raised = (F.matmul(x, w.T, promote=0) * s * sw for w in (gate, up))
    values, scale = F.quantize(F.silu(gated) * raised, f8e4m3, per="block", block=128, rule="deepseek")
    return values, scale


@chain(M=4096, N=14336, K=4096)
def fp8_quant(x: f8e4m3[M, K], w: f8e4m3[N, K], s: f32[M, 1], sw: f32[N]) -> tuple[f8e4m3[M, N], f32[M, N // 128]]:
    """Promoted sums, quantized by blocks."""
    values, scale = F.quantize((x @ w.T) * s * sw, f8e4m3, per="block", block=128, rule="deepseek")
    return values, scale


@chain(M=4096, N=14336, K=4096)
def fp8_static(x: f8e4m3[M, K], w: f8e4m3[N, K], s: f32[M, 1], sw: f32[N]) -> f8e4m3[M, N]:
    """Promoted sums, results of 8 bits by a static scale."""
    return (x @ w.T) * s * sw * 0.01


@chain(M=4096, N=14336, K=4096)
def fp8_bf16(x: f8e4m3[M, K], w: f8e4m3[N, K], s: f32[M, 1], sw: f32[N]) -> bf16[M, N]:
    """Promoted sums, bf16 results."""
    return (x @ w.T) * s * sw


def shipped(name: str) -> Chain:
    (found,) = load_chains(ROOT / "specs" / f"{name}.py")
    return found


CHAINS = (
    swiglu, quantize, shipped("gemm_swiglu_quant_block"), norm_swiglu, shipped("fp8_norm_swiglu_quant"), fp8_swiglu,
    fp8_swiglu_quant, fp8_bf16, fp8_quant, fp8_static,
)  # fmt: skip


def made(torch: Any, spec: Chain) -> list[Any]:
    """Operands as layers have them."""
    found = []
    for tensor in spec.graph.inputs:
        shape = [spec.graph.sizes[str(size)] if not isinstance(size, int) else size for size in tensor.shape]
        values = torch.randn(shape, device="cuda") * (0.02 if tensor.dtype is bf16 and len(shape) == 2 else 1)
        if tensor.dtype is f32:
            values = torch.rand(shape, device="cuda") * 0.01 + 0.005
        found.append(values.to({bf16: torch.bfloat16, f8e4m3: torch.float8_e4m3fn, f32: torch.float32}[tensor.dtype]))
    return found


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4096,14336,4096", help="M,N,K")
    parser.add_argument("--target", default="cuda")
    wanted = parser.parse_args()
    sizes = dict(zip("MNK", map(int, wanted.sizes.split(",")), strict=True))
    gpu = finding.find(target(wanted.target), "gpu")
    watch = Stopwatch(gpu)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e3:.0f} GB/s, {sizes}"
    )
    for spec in CHAINS:
        spec = spec.at(**{name: size for name, size in sizes.items() if name in spec.graph.sizes})
        kernel = fusegen.compile(spec, target=wanted.target, validate=False)
        given = made(torch, spec)
        results = kernel(*given)
        results = results if isinstance(results, tuple) else (results,)
        out = results if len(results) > 1 else results[0]
        us = watch.time([lambda stream: kernel(*given, out=out)], REPEATS).median  # noqa: B023
        products = sum(tensor.shape[0] == N for tensor in spec.graph.inputs if len(tensor.shape) == 2)
        tflops = 2e-6 * products * sizes["M"] * sizes["N"] * sizes["K"] / us
        print(f"{spec.name:26} {us:8.1f} us  {tflops:7.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
