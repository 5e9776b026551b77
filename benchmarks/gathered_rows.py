"""Gate and up of a mixture's experts, of tokens that an index names: on their way in, and behind a copy of the rows.

    python benchmarks/gathered_rows.py            # tokens by 4 experts each, some 60 s
    python benchmarks/gathered_rows.py --few      # few tokens: gate and up in one kernel and in two, some 40 s
    python benchmarks/gathered_rows.py --models   # layers of Mixtral, gpt-oss, GLM-5, DeepSeek, Qwen3, OLMoE, some 60 s

Rows are in the order of their experts, as `F.sort_by_group` gives them. Results are compared with those of the kernels
that take it apart: of rows that are copied first bit by bit, of sums in other orders by bf16's rounding. One stopwatch,
L2 cold, one of each by turns, medians in us. Run from the repository root on an NVIDIA GPU, with torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.grouped import Kernels  # noqa: E402
from fusegen import Chain, bf16, chain, dims, f32, i32  # noqa: E402
from fusegen import ops as F  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.planner import candidates  # noqa: E402
from fusegen.planner.model import Plan  # noqa: E402
from fusegen.runtime import finding  # noqa: E402
from fusegen.targets import target  # noqa: E402

H200 = target("cuda:h200")
S, T, N, K, E = dims("S T N K E")  # slots; tokens; columns; numbers of a token; experts
MANY = (  # tokens, experts of each, columns of gate and of up, numbers of a token, experts
    (16384, 4, 1024, 2048, 64), (32768, 4, 1024, 2048, 64), (65536, 4, 1024, 2048, 64),
    (16384, 4, 1536, 4096, 128), (16384, 4, 2048, 7168, 32),
)  # fmt: skip
FEW = ((64, 8, 2048, 7168, 256), (64, 4, 2880, 2880, 128), (64, 8, 2048, 6144, 256), (64, 8, 768, 2048, 128))
MODELS = tuple(
    (tokens, *layer)
    for layer, counts in (
        ((2, 14336, 4096, 8), (512, 1024, 2048, 4096, 8192)),
        ((4, 2880, 2880, 128), (1024, 2048, 4096)),
        ((8, 2048, 6144, 256), (1024, 2048)),
        ((8, 2048, 7168, 256), (1024,)),
        ((8, 768, 2048, 128), (2048,)),
        ((8, 1024, 2048, 64), (512, 2048)),
    )
    for tokens in counts
)
REPEATS = 15
MOST_PLANS = 4  # of the kernel that gathers, two of a tile at most
MOST_APART = 0.02  # of the largest value: two roundings to bf16, of f32 sums in other orders


@chain(S=65536, T=16384, N=1024, K=2048, E=64)
def gathered(
    x: bf16[T, K], token: i32[S, 1], gate: bf16[E, N, K], up: bf16[E, N, K], ends: i32[E]
) -> bf16[S, N]:  # fmt: skip
    rows = F.gather(x, token)
    return F.silu(F.grouped_matmul(rows, gate.mT, ends)) * F.grouped_matmul(rows, up.mT, ends)


@chain(S=65536, T=16384, K=2048)
def copied(x: bf16[T, K], token: i32[S, 1]) -> bf16[S, K]:
    return F.gather(x, token)


@chain(S=65536, N=1024, K=2048, E=64)
def plain(x: bf16[S, K], gate: bf16[E, N, K], up: bf16[E, N, K], ends: i32[E]) -> bf16[S, N]:
    return F.silu(F.grouped_matmul(x, gate.mT, ends)) * F.grouped_matmul(x, up.mT, ends)


@chain(S=512, T=64, N=2048, K=7168, E=256)
def first_half(x: bf16[T, K], token: i32[S, 1], gate: bf16[E, N, K], ends: i32[E]) -> f32[S, N]:
    return F.silu(F.grouped_matmul(F.gather(x, token), gate.mT, ends))


@chain(S=512, T=64, N=2048, K=7168, E=256)
def second_half(x: bf16[T, K], token: i32[S, 1], up: bf16[E, N, K], ends: i32[E], h: f32[S, N]) -> bf16[S, N]:
    return h * F.grouped_matmul(F.gather(x, token), up.mT, ends)


def plans(spec: Chain, sizes: Mapping[str, int], most: int, rule: str = "") -> list[Plan]:
    """The cheapest ones, two of a tile at most."""
    graph = spec.graph
    found: list[Plan] = []
    seen: dict[str, int] = {}
    for plan in candidates(graph.at(**{name: sizes[name] for name in graph.sizes}), H200).need():
        kind = " ".join(plan.configuration.split()[:3])
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= 2 and plan.rule.startswith(rule) and len(found) < most:
            found.append(plan)
    return found


def measure(torch: Any, watch: Stopwatch, kernels: Kernels, case: Sequence[int], few: bool, kinds: int) -> None:
    """One case: rows that an index names, on their way in and behind a copy of them; of the kernels behind the copy so
    many alone."""
    tokens, each, cols, k, experts = case
    sizes = {"S": tokens * each, "T": tokens, "N": cols, "K": k, "E": experts}
    apart = (first_half, second_half) if few else (copied, plain)
    one, two = (plans(spec, sizes, 1)[0] for spec in apart)
    alone = [] if few else plans(plain, sizes, kinds, "wgmma")
    whole = plans(gathered, sizes, MOST_PLANS, "" if few else "wgmma")
    kernels.compile([one, two, *whole, *alone])
    x, gate, up = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in (
        (tokens, k), (experts, cols, k), (experts, cols, k)))  # fmt: skip
    ids = torch.rand(tokens, experts, device="cuda").topk(each).indices.flatten()
    token = (ids.argsort(stable=True) // each).int().view(-1, 1)
    ends = torch.bincount(ids, minlength=experts).cumsum(0).int()
    slots = tokens * each
    between = torch.empty(slots, cols, device="cuda") if few else x.new_empty(slots, k)
    law, out = x.new_empty(slots, cols), x.new_empty(slots, cols)
    if few:
        first = kernels.kernel(one).prepare(x, token, gate, ends, out=between)
        second = kernels.kernel(two).prepare(x, token, up, ends, between, out=law)
    else:
        first = kernels.kernel(one).prepare(x, token, out=between)
        second = kernels.kernel(two).prepare(between, gate, up, ends, out=law)

    def both(stream: int) -> None:
        first(stream)
        second(stream)

    both(0)
    contenders: list[tuple[str, Callable[[int], Any]]] = [
        (f"{apart[0].name} and {apart[1].name}: {one.configuration}; {two.configuration}", both),
        (f"{apart[0].name} alone", first),
    ]
    for plan in alone:
        launch = kernels.kernel(plan).prepare(between, gate, up, ends, out=law)
        contenders.append((f"plain alone: {plan.configuration}, said {plan.cost.time_us:.0f}", launch))
    for plan in whole:
        launch = kernels.kernel(plan).prepare(x, token, gate, up, ends, out=out)
        out.fill_(float("nan"))
        launch(0)
        gap = float((out.float() - law.float()).abs().max())
        if not gap <= MOST_APART * float(law.float().abs().max()):
            raise ValueError(f"{plan.configuration} is apart by {gap}")
        contenders.append((f"one kernel: {plan.configuration}, said {plan.cost.time_us:.0f}", launch))
    timings = watch.time_together([[launch] for _, launch in contenders], REPEATS, shuffled=True)
    for (name, _), timing in zip(contenders, timings, strict=True):
        print(f"{tokens} tokens by {each} of {experts}, N={cols} K={k}: {timing.median:8.1f} us  "
              f"spread {timing.spread:5.1%}  {name}", flush=True)  # fmt: skip


def main() -> int:
    import torch

    few, models = "--few" in sys.argv[1:], "--models" in sys.argv[1:]
    device = finding.find(H200, "gpu")
    watch = Stopwatch(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e3:.0f} GB/s")
    for case in FEW if few else MODELS if models else MANY:
        measure(torch, watch, Kernels(device), case, few, kinds=4 if models else 0)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
