"""Products whose weights are kept in 4 and 8 bits: the planner's choice, and candidates beside it.

    python benchmarks/codes_gemm.py                     # W4A16 and W8A16 at the rows and sizes of SIZES, some 40 s
    python benchmarks/codes_gemm.py --candidates 8      # and others, one of each tile, for the cost model's constants
    python benchmarks/codes_gemm.py --only w4 --rows 1  # less of it

Beside each row: torch's bf16 product of the same sizes, which reads four or two times the bytes. All by one stopwatch,
L2 cold, medians; TB/s of the weights and scales. `apart` is the largest difference from the product of weights that
torch dequantized, in shares of its largest element. Run from the repository root on an NVIDIA GPU, with torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fusegen import bf16, chain, dims, i4, i8  # noqa: E402
from fusegen import ops as F  # noqa: E402
from fusegen.compiling import compile_source  # noqa: E402
from fusegen.emitting.rendering import render  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.planner import candidates  # noqa: E402
from fusegen.planner.products.parts import ProductPlan  # noqa: E402
from fusegen.planner.programs.lowering import lowered  # noqa: E402
from fusegen.runtime import Kernel, finding  # noqa: E402
from fusegen.targets import target  # noqa: E402

M, N, K = dims("M N K")
SIZES = ((8192, 8192), (7168, 20480))  # N, K
ROWS = (1, 8, 16, 32, 64, 128, 512, 4096)
MOST_OF_FEW = 64
REPEATS = 20


@chain(M=8, N=8192, K=8192)
def w4(x: bf16[M, K], w: i4[N, K], scale: bf16[N, K // 128]) -> bf16[M, N]:
    return x @ F.dequantize(w, scale).T


@chain(M=8, N=8192, K=8192)
def w8(x: bf16[M, K], w: i8[N, K], scale: bf16[N, K // 128]) -> bf16[M, N]:
    return x @ F.dequantize(w, scale).T


def operands(torch: Any, name: str, m: int, n: int, k: int) -> tuple[tuple[Any, ...], Any]:
    """The kernel's operands, and the weights as torch multiplies them."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    scale = (torch.rand(n, k // 128, device="cuda") / 8 + 0.01).bfloat16()
    if name == "w4":
        w = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        codes = torch.stack([w & 15, w >> 4], -1).reshape(n, k).to(torch.int8)
        codes = (codes ^ 8) - 8
    else:
        w = codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda")
    wide = codes.reshape(n, -1, 128).float() * scale.float()[..., None]
    return (x, w, scale), wide.reshape(n, k).bfloat16()


def plans(chain_: Any, sizes: Mapping[str, int], wanted: argparse.Namespace) -> Iterator[ProductPlan]:
    """The first by the cost model, then the first of each other tile; where rows are many, one by mma.sync."""
    found = candidates(lowered(chain_.graph.at(**sizes)).graph, target(wanted.target)).need()
    seen: set[str] = set()
    for plan in found:
        if isinstance(plan, ProductPlan) and len(seen) < wanted.candidates:
            # a rule, a tile's columns and its share of K: what the cost is fitted to
            kind = plan.configuration.rsplit(" ", 1)[0] if plan.rule == "wgmma" else f"{plan.rule} {plan.tile.cols}"
            if sizes["M"] > MOST_OF_FEW and plan.rule != "wgmma":
                kind = plan.rule
            if kind not in seen:
                seen.add(kind)
                yield plan


def row(torch: Any, watch: Stopwatch, chain_: Any, sizes: Mapping[str, int], wanted: argparse.Namespace) -> None:
    given, weights = operands(torch, chain_.name, *sizes.values())
    expected = given[0].float() @ weights.float().T
    nbytes = sum(t.numel() * t.element_size() for t in given[1:])
    us = watch.time([lambda stream: given[0] @ weights.T], REPEATS).median
    say(sizes, "torch bf16", us, weights.numel() * 2)
    for plan in plans(chain_, sizes, wanted):
        source = render(plan)
        binary = compile_source(
            source.text, plan.name, plan.target, filename=source.filename, threads=plan.threads,
            dynamic_shared=plan.shared_bytes,
        )  # fmt: skip
        kernel = Kernel(source, binary, watch.device, lambda layout: (source, binary))  # noqa: B023
        try:
            out = kernel(*given)
            apart = float((out.float() - expected).abs().max() / expected.abs().max())
            us = watch.time([kernel.prepare(*given, out=out)], REPEATS).median
        except Exception as error:
            print(f"  {plan.configuration}: {type(error).__name__}: {str(error)[:160]}")
            continue
        registers, spills = binary.resources.registers, binary.resources.spill_bytes
        more = f"said {plan.cost.time_us:.1f}  {registers} registers  spills {spills}  apart {apart:.1e}"
        say(sizes, f"{chain_.name} {plan.configuration}", us, nbytes, more)


def say(sizes: Mapping[str, int], what: str, us: float, nbytes: int, more: str = "") -> None:
    m, n, k = sizes.values()
    print(f"{m}x{n}x{k}  {what:52} {us:8.1f} us {nbytes / us / 1e6:6.2f} TB/s  {more}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="chains whose name has this text")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--target", default="cuda:h200")
    parser.add_argument("--candidates", type=int, default=1)
    wanted = parser.parse_args()
    import torch

    watch = Stopwatch(finding.find(target(wanted.target), "gpu"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e3:.0f} GB/s")
    for n, k in SIZES:
        for chain_ in (w4, w8):
            for m in wanted.rows:
                if wanted.only in chain_.name:
                    row(torch, watch, chain_, {"M": m, "N": n, "K": k}, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
