"""Running sums along an axis that is not the last one: tiles of columns, the kernel of rows they replace, and torch.

    python benchmarks/running_sums.py             # 16 shapes of five chains, some 30 s where all is compiled
    python benchmarks/running_sums.py plain_bf16  # those of one chain

Of each shape the cheapest tiles by the planner's estimate, and some of those behind them, beside what they are
estimated at. The first one is validated, and all are compared with torch. One stopwatch, L2 cold, by turns, medians in
us; torch's is of eager calls, with the gaps between their kernels. Run from the repository root on an NVIDIA GPU, with
torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.table import gpu_text  # noqa: E402
from fusegen import Chain, bf16, chain, dims, f32  # noqa: E402
from fusegen import ops as F  # noqa: E402
from fusegen.emitting.rendering import render  # noqa: E402
from fusegen.language.graph import Graph  # noqa: E402
from fusegen.language.types import size_of  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.pipeline import compile_program  # noqa: E402
from fusegen.planner import candidates  # noqa: E402
from fusegen.planner.model import Plan  # noqa: E402
from fusegen.planner.programs.lowering import step_for  # noqa: E402
from fusegen.planner.programs.parts import layout_of  # noqa: E402
from fusegen.planner.programs.scans_over_rows import over_rows  # noqa: E402
from fusegen.planner.programs.search import cheapest  # noqa: E402
from fusegen.planner.programs.steps import Lowered, NotOneStep, step_of  # noqa: E402
from fusegen.runtime import finding  # noqa: E402
from fusegen.runtime.cache import compiled  # noqa: E402
from fusegen.runtime.program import Program  # noqa: E402
from fusegen.targets import target  # noqa: E402
from fusegen.validation import validate  # noqa: E402

H200 = target("cuda:h200")
B, S, H = dims("B S H")
REPEATS = 15
MOST_APART = 0.01  # of a value and of what values are in the mean: roundings to bf16, and f32 sums in other orders


@chain(B=8, S=4096, H=1024)
def plain_bf16(x: bf16[B, S, H]) -> bf16[B, S, H]:
    return F.cumsum(x, axis=1)


@chain(B=8, S=4096, H=1024)
def plain_f32(x: f32[B, S, H]) -> f32[B, S, H]:
    return F.cumsum(x, axis=1)


@chain(B=8, S=4096, H=1024)
def product_f32(x: f32[B, S, H]) -> f32[B, S, H]:
    return F.cumprod(1 + 0.001 * x, axis=1, reverse=True)


@chain(B=8, S=4096, H=1024)
def fused_bf16(x: bf16[B, S, H], gain: f32[H]) -> bf16[B, S, H]:
    p = F.exp(0.01 * x) * gain
    return F.silu(F.cumsum(p, axis=1) - p)


@chain(B=8, S=4096, H=1024)
def shares_bf16(x: bf16[B, S, H]) -> f32[B, S, H]:
    return F.cumsum(F.softmax(x, axis=1), axis=1)


LONG = ((8, 4096, 1024), (1, 4096, 1024))
SHAPES: tuple[tuple[Chain, Sequence[tuple[int, int, int]]], ...] = (
    (plain_bf16, (*LONG, (2, 4096, 4096), (1, 65536, 64), (1, 16384, 128), (32, 512, 64), (64, 128, 768))),
    (plain_f32, (*LONG, (1, 65536, 64), (1, 1000000, 8), (4, 2048, 4096))),
    (product_f32, LONG[:1]), (fused_bf16, (LONG[0], (1, 8192, 512))), (shares_bf16, LONG[:1]),
)  # fmt: skip


def by_torch(torch: Any) -> dict[str, Callable[..., Any]]:
    def fused(x: Any, gain: Any) -> Any:
        p = torch.exp(0.01 * x.float()) * gain
        return torch.nn.functional.silu(torch.cumsum(p, 1) - p).bfloat16()

    return {
        "plain_bf16": lambda x: torch.cumsum(x, 1),
        "plain_f32": lambda x: torch.cumsum(x, 1),
        "product_f32": lambda x: torch.cumprod((1 + 0.001 * x).flip(1), 1).flip(1),
        "fused_bf16": fused,
        "shares_bf16": lambda x: torch.cumsum(torch.softmax(x.float(), 1), 1),
    }


def programs(graph: Graph) -> Iterator[tuple[Plan, Program]]:
    """The cheapest tiles of columns and some behind them, but for those that spill; the kernel of rows, where there is
    one."""
    whole = cheapest(graph, H200)
    (columns,) = over_rows(graph)
    found = candidates(columns.graph, H200).plans
    wanted: list[tuple[Lowered, Plan]] = [(columns, plan) for plan in (*found[:12], *found[12:40:7])]
    try:
        rows = step_for(graph)
        wanted += [(rows, plan) for plan in candidates(rows.graph, H200, layout_of(rows, graph.sizes)).plans[:1]]
    except NotOneStep as error:
        print(f"  no kernel of rows: {error}", flush=True)
    with ThreadPoolExecutor() as pool:
        spilled = list(pool.map(lambda one: compiled(render(one[1])).resources.spill_bytes, wanted))
    for (step, plan), spills in zip(wanted, spilled, strict=True):
        if not spills:
            program = replace(whole, steps=(step_of(step, plan),), between=(), shared=())
            yield plan, compile_program(program, on="gpu", validate=False, tuned=False, as_planned=True)


def measure(torch: Any, watch: Stopwatch, spec: Chain, sizes: Sequence[int]) -> None:
    graph = spec.at(**dict(zip("BSH", sizes, strict=True))).graph
    made, torchs = list(programs(graph)), by_torch(torch)[spec.name]
    report = validate(made[0][1], quick=True)
    print(f"{spec.name} {list(sizes)}: floor {made[0][0].cost.floor_us:.1f} us", flush=True)
    if not report.ok:
        raise ValueError(f"{made[0][0].configuration}: {report}")
    args = [
        torch.randn([size_of(size, graph.sizes) for size in t.shape], device="cuda").to(
            torch.bfloat16 if t.dtype is bf16 else torch.float32
        )
        for t in graph.inputs
    ]
    law = torchs(*(arg.double() for arg in args)) if spec.name.startswith("plain") else torchs(*args).double()
    for plan, kernel in made:
        gap = float(((kernel(*args).double() - law).abs() / (law.abs() + 1 + law.abs().mean())).max())
        if not gap <= MOST_APART:
            raise ValueError(f"{plan.configuration} is apart by {gap}")
    timings = watch.time_together([[kernel.prepare(*args)] for _, kernel in made], REPEATS, shuffled=True)
    for (plan, _), timing in zip(made, timings, strict=True):
        print(f"  {timing.median:8.1f} us  estimated {plan.cost.time_us:8.1f}  {plan.configuration}", flush=True)
    print(f"  {eager_us(torch, lambda: torchs(*args)):8.1f} us  torch", flush=True)


def eager_us(torch: Any, call: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    flush, taken = torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), []
    for _ in range(REPEATS):
        flush.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) * 1e3)
    return float(median(taken))


def main() -> int:
    import torch

    watch = Stopwatch(finding.find(H200, "gpu"))
    print(f"{gpu_text()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e3:.0f} GB/s")
    for spec, shapes in SHAPES:
        for sizes in shapes if spec.name in (sys.argv[1:] or [spec.name]) else ():
            measure(torch, watch, spec, sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
