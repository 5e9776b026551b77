"""Products of few tiles and a large K: as one kernel, and as parts of K and their sum, for what decides between them.

    python benchmarks/deep_products.py           # some 40 s

For each shape: the one kernel, what the planner chose, and programs of as many parts as give each SM so many tiles.
By one stopwatch, L2 cold, medians, in us, beside cuBLAS by torch. Run from the repository root on an NVIDIA GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fusegen  # noqa: E402
from fusegen import bf16, chain, dims, pipeline  # noqa: E402
from fusegen import ops as F  # noqa: E402
from fusegen.language.graph import Graph  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.planner.programs import deep_products, kernels_of, search  # noqa: E402
from fusegen.planner.programs.dependent import dependent  # noqa: E402
from fusegen.planner.programs.model import ProgramPlan  # noqa: E402
from fusegen.runtime import finding  # noqa: E402
from fusegen.targets import target  # noqa: E402

M, N, K = dims("M N K")
SHAPES = (  # rows, columns, K
    (128, 128, 65536), (128, 128, 16384), (256, 256, 16384), (64, 1024, 16384), (256, 1024, 16384), (512, 512, 16384),
    (16, 4096, 16384), (1, 4096, 16384), (64, 4096, 4096), (1024, 1024, 8192), (32, 64, 7168), (256, 64, 2048),
)  # fmt: skip
BLOCKS = (0.25, 0.5, 1.0, 2.0)  # an SM
REPEATS = 20


@chain(M=128, N=128, K=65536)
def product(x: bf16[M, K], w: bf16[N, K]) -> bf16[M, N]:
    return F.relu(x @ w.T)


def ways(graph: Graph) -> Iterator[tuple[str, ProgramPlan | None]]:
    device = target("cuda:h200")
    yield "chosen", kernels_of(graph, device)[1]
    with patch.object(search, "WORTH_DEEPENING", 0.0):
        yield "one kernel", kernels_of(graph, device)[1]
    for blocks in BLOCKS:
        with patch.object(search, "WORTH_DEEPENING", inf), patch.object(deep_products, "BLOCKS_AN_SM", (blocks,)):
            yield f"{blocks} blocks an SM", kernels_of(graph, device)[1]


def main() -> int:
    import torch

    device = finding.find(target("cuda:h200"), "gpu")
    watch = Stopwatch(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e3:.0f} GB/s")
    for rows, cols, depth in SHAPES:
        x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5
        w = torch.randn(cols, depth, device="cuda", dtype=torch.bfloat16)
        spec = product.at(M=rows, N=cols, K=depth)
        expected = torch.relu(x.float() @ w.float().T)
        for name, undated in ways(spec.graph):
            try:
                if undated is None:
                    made = fusegen.compile(spec, "cuda:h200", validate=False, tuned=False)
                    said = ""
                else:
                    program = dependent(undated)
                    made = pipeline.compile_program(program, on="gpu", validate=False, tuned=False, as_planned=True)
                    parts = "; ".join(f"{s.plan.configuration} {s.plan.cost.time_us:.1f}" for s in program.steps)
                    said = f"said {program.time_us:5.1f} | {parts}"
                off = float((made(x, w).float() - expected).abs().max())
                us = watch.time([made.prepare(x, w)], REPEATS).median
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:300]}")
                continue
            print(f"{rows} x {cols} x {depth} {name:20} {us:6.1f} us, off by {off:.3f}, {said}", flush=True)

        def bare_product(stream: Any, x: Any = x, w: Any = w) -> Any:
            return torch.relu(x @ w.T)

        bare = watch.time([bare_product], REPEATS).median
        print(f"{rows} x {cols} x {depth} {'cuBLAS and relu':20} {bare:6.1f} us", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
