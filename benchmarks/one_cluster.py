"""Short steps one after another: each in a launch of its own, and by one cluster, for the constants of its cost.

    python benchmarks/one_cluster.py             # routers with their sorts, some 60 s
    python benchmarks/one_cluster.py --prompts   # those of models, of 4096 to 65536 tokens, some 60 s

The chain is a mixture's router: product, top-k, softmax, and the slots sorted by their experts. It is timed with all
steps apart, as the planner has it, with some of them by one cluster, with the rows of the first ones shared out to
many, and with all of them by one in several tiles of the product. Of prompts, all steps or the last two are one launch,
by each block size. By one stopwatch, L2 cold, medians, in us. Launches that spill fall apart, which their number tells.
Run from the repository root on an NVIDIA GPU, with torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fusegen import Chain, bf16, chain, dims, f32, i32, pipeline  # noqa: E402
from fusegen import ops as F  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.planner import candidates  # noqa: E402
from fusegen.planner.programs import joining, kernels_of, one_cluster, shares  # noqa: E402
from fusegen.planner.programs.dependent import dependent  # noqa: E402
from fusegen.planner.programs.model import ProgramPlan, Step  # noqa: E402
from fusegen.runtime import finding  # noqa: E402
from fusegen.targets import target  # noqa: E402

T, D, E, S = dims("T D E S")
SIZES = (  # tokens, their numbers, experts
    (1, 2048, 64), (8, 2048, 64), (64, 2048, 64), (128, 2048, 64), (256, 2048, 64), (512, 2048, 64), (1024, 2048, 64),
    (2048, 2048, 64), (4096, 2048, 64), (64, 4096, 8), (32, 4096, 32), (256, 4096, 128), (1024, 4096, 128),
    (16, 7168, 256), (512, 7168, 256), (2048, 7168, 256),
)  # fmt: skip
PROMPTS = (4096, 16384, 65536)
MODELS = ((2048, 64, 4), (7168, 256, 8), (4096, 8, 2), (2880, 128, 4), (2048, 128, 8), (2048, 64, 8), (7168, 384, 8))
MOST_OVER = 1.3  # times as long as the best block size is said to take
THREADS = 128  # of the block size that all steps have where one cluster takes them
REPEATS = 20
MOST_TILES = 2


def router(best: int) -> Chain:
    @chain(T=256, D=2048, E=64)
    def router(x: bf16[T, D], w: bf16[E, D]) -> tuple[f32[T, best], i32[E], i32[best * T], i32[T, best]]:
        values, experts = F.topk(x @ w.T, best)
        order, ends, places = F.sort_by_group(experts, E)
        return F.softmax(values), ends, order, places

    return router


def apart(program: ProgramPlan) -> ProgramPlan:
    """Each step in a launch of its own, by its cheapest plan."""
    steps = []
    for step in program.steps:
        plan = candidates(step.graph, program.target, step.plan.layout).need()[0]
        steps.append(replace(step, joined="", plan=plan))
    return replace(program, steps=tuple(steps))


def by_one(program: ProgramPlan, first: int, end: int) -> ProgramPlan | None:
    """These steps by one cluster; None where one of them has no such plan."""
    steps = program.steps[first:end]
    found = [joining.by_threads(program, [step]) for step in steps]
    if any(THREADS not in plans for plans in found):
        return None
    one = joining.together([[step] for step in steps], [{THREADS: plans[THREADS]} for plans in found])
    return in_place_of(program, first, end, one)


def by_many(program: ProgramPlan, first: int, end: int) -> Iterator[tuple[int, ProgramPlan]]:
    """These steps with the rows of the first one, two ... shared out to clusters."""
    steps = [[step] for step in program.steps[first:end]]
    found = [joining.by_threads(program, step) for step in steps]
    wide = [joining.by_threads(program, step, one_cluster.clusters_of(program.target)) for step in steps]
    for count in range(1, shares.following(steps, wide) + 1):
        one = joining.together(steps, [*wide[:count], *found[count:]], count)
        if (made := in_place_of(program, first, end, one)) is not None:
            yield count, made


def in_place_of(program: ProgramPlan, first: int, end: int, one: tuple[Step, ...] | None) -> ProgramPlan | None:
    return replace(program, steps=(*program.steps[:first], *one, *program.steps[end:])) if one else None


def ways(chosen: ProgramPlan) -> Iterator[tuple[str, ProgramPlan]]:
    """Programs to time, with what they are."""
    base = apart(chosen)
    yield "apart", base
    yield "chosen", chosen
    for first, end in ((0, 3), (0, 2), (1, 3)):
        if (one := by_one(base, first, end)) is not None:
            yield f"{first + 1} to {end}", one
        for count, shared in by_many(base, first, end) if not first else ():
            yield f"{first + 1} to {end}, {count} shared", shared
    whole = by_one(base, 0, 3)
    if whole is None:
        return
    product = base.steps[0]
    found = candidates(product.graph, one_cluster.narrowed(base.target), product.plan.layout).plans
    fitting = [p for p in found if p.threads == THREADS and joining.streams(p) and not one_cluster.obstacle([p])]
    for plan in fitting[1:MOST_TILES]:
        step = replace(whole.steps[0], plan=one_cluster.on(base.target, plan, plan.cost.floor_us))
        yield "another tile", replace(whole, steps=(step, *whole.steps[1:]))


def prompts(chosen: ProgramPlan) -> Iterator[tuple[str, ProgramPlan]]:
    """Programs to time of many tokens, with what they are."""
    base = apart(chosen)
    yield "apart", base
    many = one_cluster.clusters_of(base.target)
    for first, count in ((1, 1), (0, 2)):
        steps = [[step] for step in base.steps[first:]]
        plans = [joining.by_threads(base, step, many if n < count else 1, math.inf) for n, step in enumerate(steps)]
        found = []
        for threads in set(plans[0]).intersection(*plans[1:]):
            one = joining.together(steps, [{threads: each[threads]} for each in plans], count)
            if one:
                found.append((joining.turn_cost(one).time_us, threads, one))
        found.sort(key=lambda each: each[0])
        for us, threads, one in found:
            if us > MOST_OVER * found[0][0]:
                break
            yield f"{first + 1} to 3, {threads} threads", replace(base, steps=(*base.steps[:first], *one))


def main() -> int:
    import torch

    device = finding.find(target("cuda:h200"), "gpu")
    watch = Stopwatch(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e3:.0f} GB/s")
    sizes = [(*size, 4) for size in SIZES]
    if many := "--prompts" in sys.argv:
        sizes = [(tokens, *model) for model in MODELS for tokens in PROMPTS]
    for tokens, numbers, experts, best in sizes:
        x = torch.randn(tokens, numbers, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(experts, numbers, device="cuda", dtype=torch.bfloat16)
        _, chosen = kernels_of(router(best).at(T=tokens, D=numbers, E=experts).graph, target("cuda:h200"))
        assert chosen is not None
        law: Any = None
        for name, undated in (prompts if many else ways)(chosen):
            program = dependent(undated)
            try:
                made = pipeline.compile_program(program, on="gpu", validate=False, tuned=False, as_planned=True)
                got = made(x, w)
                law = law or got
                same = all(torch.equal(a, b) for a, b in zip(got[1:], law[1:], strict=True))
                us = watch.time([made.prepare(x, w)], REPEATS).median
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:300]}")
                continue
            said = "; ".join(f"{step.plan.configuration} {step.plan.cost.time_us:.1f}" for step in program.steps)
            print(f"T={tokens} D={numbers} E={experts} k={best} {name:30} {us:6.1f} us, said {program.time_us:5.1f}"
                  f" in {len(made.kernels)}, {'same' if same else 'OTHER'} order | {said}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
