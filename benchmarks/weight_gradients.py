"""Sums over groups of tokens, as weights' gradients of experts are: every candidate by wgmma beside torch's own kernel.

    python benchmarks/weight_gradients.py            # some 150 s
    python benchmarks/weight_gradients.py --check    # only whether all of them are right

Tokens are dealt to the experts at random, as a router of random logits does. First each candidate is held against
torch's f32 products of single groups, for ends right and wrong and with NaN in rows of no group, and its groups' bits
against those among other groups. Then candidates, the best two by mma.sync and torch._grouped_mm take turns: one
stopwatch, L2 cold, medians. Run from the repository root on an NVIDIA GPU, with torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fusegen.compiling import compile_source  # noqa: E402
from fusegen.emitting.rendering import render  # noqa: E402
from fusegen.language.spec import load_chains  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.planner import candidates  # noqa: E402
from fusegen.planner.model import Plan  # noqa: E402
from fusegen.runtime import Kernel, finding  # noqa: E402
from fusegen.targets import target  # noqa: E402

CHAIN = next(chain for chain in load_chains(ROOT / "specs") if chain.name == "grouped_weight_grad")
SIZES = (
    {"T": 16384, "N": 2048, "K": 4096, "E": 16},
    {"T": 8192, "N": 4096, "K": 7168, "E": 8},
    {"T": 65536, "N": 2048, "K": 2048, "E": 64},
    {"T": 4096, "N": 1024, "K": 2048, "E": 64},
)
RAGGED = ({"T": 1500, "N": 328, "K": 392, "E": 9}, {"T": 9000, "N": 2056, "K": 1032, "E": 9})
TOKENS = ((0, 1, 63, 64, 65, 127, 129, 300, 400), (130, 0, 0, 1, 500, 15, 16, 17, 200))  # of groups
BY_MMA = 2  # candidates of the general rule
REPEATS = 15
JOBS = 8


def plans(sizes: Mapping[str, int]) -> list[Plan]:
    """All by wgmma, and the first by mma.sync; the planner's choice comes first."""
    found = candidates(CHAIN.at(**sizes).graph, target("cuda:h200")).need()
    others = [plan for plan in found if plan.rule != "wgmma"][:BY_MMA]
    return [plan for plan in found if plan.rule == "wgmma" or plan in others]


def compiled(found: list[Plan], device: Any) -> list[Kernel]:
    def made(plan: Plan) -> Kernel:
        source = render(plan)
        binary = compile_source(
            source.text, plan.name, plan.target, filename=source.filename, threads=plan.threads,
            dynamic_shared=plan.shared_bytes,
        )  # fmt: skip
        if binary.resources.serialized or binary.resources.spill_bytes:
            print(f"  {plan.configuration}: {binary.resources}")
        return Kernel(source, binary, device, lambda layout: (source, binary))

    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(made, found))


def group_bounds(ends: list[int], rows: int) -> list[tuple[int, int]]:
    found, begin = [], 0
    for end in ends:
        end = max(begin, min(end, rows))
        found.append((begin, end))
        begin = end
    return found


def by_groups(torch: Any, x: Any, dy: Any, ends: list[int]) -> Any:
    """In f32, group by group."""
    return torch.stack([dy[a:b].float().T @ x[a:b].float() for a, b in group_bounds(ends, len(x))])


def check(torch: Any, device: Any) -> bool:
    """Is every candidate right for ragged groups, and are a group's bits its own?"""
    right = True
    for sizes in RAGGED:
        rows, n, k, groups = (sizes[dim] for dim in "TNKE")
        kernels = compiled(plans(sizes), device)
        for number in range(6):
            here = rows if number < 3 else rows - 37 * number
            ends = torch.randint(-5, here + 9, (groups,)).tolist()
            if number < len(TOKENS):
                ends = torch.tensor(TOKENS[number]).cumsum(0).tolist()
            if number == 5:
                ends[-1], ends[0] = 2**31 - 1, -(2**31)
            x, dy = (torch.randn(here, cols, device="cuda").bfloat16() for cols in (k, n))
            last = group_bounds(ends, here)[-1][1]
            x[last:], dy[last:] = float("nan"), float("inf")
            law = by_groups(torch, x, dy, ends)
            others = torch.randn_like(x)
            a, b = max(group_bounds(ends, here), key=lambda bounds: bounds[1] - bounds[0])
            place = group_bounds(ends, here).index((a, b))
            others[a:b] = x[a:b]
            device_ends = torch.tensor(ends, device="cuda", dtype=torch.int32)
            for kernel in kernels:
                out = torch.full_like(law, float("nan"), dtype=torch.bfloat16)
                kernel(x, dy, device_ends, out=out)
                apart = float((out.float() - law).abs().max() / max(1.0, float(law.abs().max())))
                beside = kernel(others, dy.nan_to_num(0, 0, 0), device_ends)
                if not apart < 0.01 or not torch.equal(beside[place], out[place]):
                    print(f"WRONG: {kernel.plan.configuration} {sizes} {ends}: {apart:.0e} apart")
                    right = False
        print(f"{len(kernels)} candidates at {sizes}: {'right' if right else 'WRONG'}", flush=True)
    return right


def measure(torch: Any, watch: Stopwatch, sizes: Mapping[str, int]) -> None:
    rows, n, k, groups = (sizes[dim] for dim in "TNKE")
    x, dy = (torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for cols in (k, n))
    chosen = torch.randint(0, groups, (rows,), device="cuda")
    counts = torch.bincount(chosen, minlength=groups)
    ends = counts.cumsum(0).int()
    kernels = compiled(plans(sizes), watch.device)
    out = torch.empty(groups, n, k, device="cuda", dtype=torch.bfloat16)

    def by_torch(stream: object = None) -> Any:
        return torch._grouped_mm(dy.mT, x, offs=ends, out_dtype=torch.bfloat16)

    law = by_torch().float()
    apart = []
    for kernel in kernels:
        kernel(x, dy, ends, out=out.fill_(float("nan")))
        apart.append(float((out.float() - law).abs().max() / law.abs().max()))
    launches: list[Any] = [by_torch, *(kernel.prepare(x, dy, ends, out=out) for kernel in kernels)]
    own, *times = watch.time_together([[launch] for launch in launches], REPEATS)
    flops = 2 * rows * n * k
    print(f"{' '.join(f'{name}={size}' for name, size in sizes.items())}, {counts.min()} to {counts.max()} tokens:"
          f" torch._grouped_mm {own}, {flops / own.median / 1e6:.0f} TFLOP/s")  # fmt: skip
    for kernel, timing, far in zip(kernels, times, apart, strict=True):
        print(f"  {kernel.plan.configuration:44} {timing}  {flops / timing.median / 1e6:4.0f} TFLOP/s"
              f"  said {kernel.plan.cost.time_us:6.1f}  apart {far:.0e}", flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    wanted = parser.parse_args()
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    watch = Stopwatch(finding.find(target("cuda:h200"), "gpu"))
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e3:.0f} GB/s")
    right = check(torch, watch.device)
    for sizes in () if wanted.check else SIZES:
        measure(torch, watch, sizes)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
