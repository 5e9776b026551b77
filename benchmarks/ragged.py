"""Products of few rows an expert, whose groups are as long as random routers make them: candidates beside the choice.

    python benchmarks/ragged.py                   # some 60 s
    python benchmarks/ragged.py --candidates 40

Rows are dealt to the experts at random, as a router of random logits does. Of each tile up to three candidates are
timed, by one stopwatch, L2 cold, medians; TB/s of the weights. Run from the repository root on an NVIDIA GPU, with
torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fusegen.compiling import compile_source  # noqa: E402
from fusegen.emitting.rendering import render  # noqa: E402
from fusegen.language.spec import load_chains  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.planner import candidates  # noqa: E402
from fusegen.planner.products.parts import ProductPlan  # noqa: E402
from fusegen.planner.programs.lowering import lowered  # noqa: E402
from fusegen.runtime import Kernel, finding  # noqa: E402
from fusegen.targets import target  # noqa: E402

CHAINS = {chain.name: chain for chain in load_chains(ROOT / "specs")}
SIZES = (
    ("grouped_swiglu", {"T": 1024, "N": 1024, "K": 2048, "E": 64}),
    ("grouped_gemm", {"T": 1024, "N": 2048, "K": 1024, "E": 64}),
    ("grouped_swiglu", {"T": 256, "N": 1024, "K": 2048, "E": 64}),
    ("grouped_swiglu", {"T": 2048, "N": 1024, "K": 2048, "E": 64}),
)
REPEATS = 9


def operands(torch: Any, name: str, sizes: dict[str, int]) -> tuple[Any, ...]:
    rows, cols, k, groups = (sizes[dim] for dim in "TNKE")
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weights = [
        torch.randn(groups, cols, k, device="cuda", dtype=torch.bfloat16) for _ in range(1 + (name != "grouped_gemm"))
    ]
    found = torch.randint(0, groups, (rows,), device="cuda")
    ends = torch.bincount(found, minlength=groups).cumsum(0).int()
    return (x, *weights, ends)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=12)
    wanted = parser.parse_args()
    import torch

    h200 = target("cuda:h200")
    watch = Stopwatch(finding.find(h200, "gpu"))
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e3:.0f} GB/s")
    for name, sizes in SIZES:
        given = operands(torch, name, sizes)
        nbytes = sum(t.numel() * t.element_size() for t in given[1:-1])
        law = None
        seen: dict[str, int] = {}
        graph = CHAINS[name].graph.at(**sizes)
        found = candidates(lowered(graph).graph if graph.viewed else graph, h200).need()
        chosen = []
        for plan in found:
            if not isinstance(plan, ProductPlan):
                continue
            tile = plan.tile
            kind = f"{plan.rule} {tile.rows}x{tile.cols}"
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] <= 3:
                chosen.append(plan)
        for plan in chosen[: wanted.candidates]:
            source = render(plan)
            try:
                binary = compile_source(
                    source.text, plan.name, plan.target, filename=source.filename, threads=plan.threads,
                    dynamic_shared=plan.shared_bytes,
                )  # fmt: skip
                kernel = Kernel(source, binary, watch.device, lambda layout: (source, binary))  # noqa: B023
                out = kernel(*given)
                law = out.float() if law is None else law
                apart = float((out.float() - law).abs().max() / law.abs().max())
                us = watch.time([kernel.prepare(*given, out=out)], REPEATS).median
            except Exception as error:
                print(f"  {plan.configuration}: {type(error).__name__}: {str(error)[:160]}")
                continue
            print(f"{name} {' '.join(f'{k}={v}' for k, v in sizes.items())}  {plan.configuration:60} {us:7.1f} us"
                  f" {nbytes / us / 1e6:5.2f} TB/s  said {plan.cost.time_us:6.1f}  {binary.resources.registers} regs"
                  f"  spills {binary.resources.spill_bytes}  apart {apart:.0e}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
