"""A step of Newton and Schulz's iteration, as Muon takes five, and its products, beside torch and torch.compile.

    python benchmarks/newton_schulz.py    # some 30 s

a = x @ x.T and b = c1 * a + c2 * (a @ a) have a factor that is used in two ways: each gets a tensor map of its own.
`by mma.sync` is the kernel that was planned before. All are right before they are timed, next to torch's own. One
stopwatch, L2 cold, by turns; medians in us. Run from the repository root on an NVIDIA GPU, with torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fusegen  # noqa: E402
from fusegen import Chain, bf16, chain, dims, pipeline  # noqa: E402
from fusegen import ops as F  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.planner import candidates  # noqa: E402
from fusegen.runtime import finding  # noqa: E402
from fusegen.targets import target  # noqa: E402

M, K = dims("M K")
SIZES = ((1024, 1024), (2048, 1024), (2048, 4096), (4096, 4096))
REPEATS = 20
MOST_APART = 2e-2  # of the largest value: bf16 is rounded in three places


@chain(M=2048, K=1024)
def gram(x: bf16[M, K]) -> bf16[M, M]:
    return x @ x.T


@chain(M=2048)
def squared(x: bf16[M, M]) -> bf16[M, M]:
    return F.cast(-4.775 * x + 2.0315 * (x @ x), bf16)


@chain(M=2048, K=1024)
def step(x: bf16[M, K]) -> bf16[M, K]:
    a = F.cast(x @ x.T, bf16)
    b = F.cast(-4.775 * a + 2.0315 * (a @ a), bf16)
    return 3.4445 * x + b @ x


def torch_step(x: Any) -> Any:
    a = x @ x.T
    b = -4.775 * a + 2.0315 * (a @ a)
    return 3.4445 * x + b @ x


LAWS: tuple[tuple[Chain, Callable[[Any], Any]], ...] = (
    (gram, lambda x: x @ x.T), (squared, lambda x: -4.775 * x + 2.0315 * (x @ x)), (step, torch_step)
)  # fmt: skip


def main() -> int:
    import torch

    watch = Stopwatch(finding.find(target("cuda:h200"), "gpu"))
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e6:.2f} TB/s")
    for rows, cols in SIZES:
        for spec, law in LAWS:
            wide = rows if spec is squared else cols
            x = (torch.randn(rows, wide, device="cuda") / wide**0.5).bfloat16()
            at = spec.at(M=rows) if spec is squared else spec.at(M=rows, K=cols)
            want = law(x.float())
            names, launches = list[str](), list[Any]()
            ways = [("fusegen", fusegen.compile(at, "cuda:h200", validate=False, tuned=False))]
            alone = candidates(at.graph, target("cuda:h200")).plans
            if alone:
                first = pipeline.first(candidates(at.graph, target("cuda:h200")), alone[0])
                ways.append(("by mma.sync", pipeline.compile_kernel(first, on="gpu", validate=False, tuned=False)))
            for name, kernel in ways:
                out = kernel(x)
                apart = float((out.float() - want).abs().max() / want.abs().max())
                if apart > MOST_APART:
                    print(f"  {name}: apart by {apart:.2g}")
                    continue
                names.append(name)
                launches.append(kernel.prepare(x, out=out))
            for name, function in (("torch", law), ("torch.compile", torch.compile(law, dynamic=False))):
                function(x)
                names.append(name)
                launches.append(lambda stream, function=function, x=x: function(x))
            timings = watch.time_together([[launch] for launch in launches], REPEATS)
            told = ", ".join(f"{n} {t.median:.1f}" for n, t in zip(names, timings, strict=True))
            print(f"{spec.name} {rows} x {wide}: {told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
