"""Two products with elementwise steps and no softmax between them, in one kernel, beside torch and torch.compile.

    python benchmarks/plain_weights.py    # some 90 s

Retention, sigmoid attention, squares of ReLU and causal linear attention of 32 heads of 4096 tokens and 128 numbers;
Mamba-2 within chunks of 256, of 8 heads of 64 that share what is multiplied first, or have their own. `softmax` is
causal attention by torch, of the same sizes. All are right before they are timed, next to f32 of torch. One stopwatch,
L2 cold, by turns; medians in us. Run from the repository root on an NVIDIA GPU, with torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fusegen  # noqa: E402
from fusegen import Chain, bf16, chain, dims, f32, pipeline  # noqa: E402
from fusegen import ops as F  # noqa: E402
from fusegen.language.spec import load_file  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.planner import candidates  # noqa: E402
from fusegen.runtime import finding  # noqa: E402
from fusegen.targets import target  # noqa: E402

B, H, S, T, D, E = dims("B H S T D E")
REPEATS = 20
MOST_APART = 2e-2  # of the largest value: weights and results are rounded to bf16
OTHERS = 3  # candidates beside the first
(retention,) = load_file(ROOT / "specs" / "retention.py")


@chain(B=1, H=32, S=4096, T=4096, D=128)
def sigmoid_causal(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], bias: f32) -> bf16[B, H, S, D]:
    return F.sigmoid(F.causal(q @ k.mT * D**-0.5 + bias)) @ v


@chain(B=1, H=32, S=4096, T=4096, D=128)
def sigmoid_full(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], bias: f32) -> bf16[B, H, S, D]:
    return F.sigmoid(q @ k.mT * D**-0.5 + bias) @ v


@chain(B=1, H=32, S=4096, T=4096, D=128)
def relu_squared(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    return F.square(F.relu(F.causal(q @ k.mT * D**-0.5))) @ v


@chain(B=1, H=32, S=4096, T=4096, D=128)
def linear_causal(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    s = q @ k.mT * D**-0.5
    return F.where(F.col_index(s) <= F.row_index(s), s, 0.0) @ v


@chain(B=256, H=8, S=256, D=128, E=64)
def chunk_shared(
    c: bf16[B, 1, S, D], b: bf16[B, 1, S, D], x: bf16[B, H, S, E], rows: f32[B, H, S, 1], keys: f32[B, H, 1, S],
) -> bf16[B, H, S, E]:  # fmt: skip
    s = c @ b.mT
    return (s * F.where(F.col_index(s) <= F.row_index(s), F.exp(rows - keys), 0.0)) @ x


@chain(B=256, H=8, S=256, D=64, E=64)
def chunk_own(
    c: bf16[B, H, S, D], b: bf16[B, H, S, D], x: bf16[B, H, S, E], rows: f32[B, H, S, 1], keys: f32[B, H, 1, S],
) -> bf16[B, H, S, E]:  # fmt: skip
    s = c @ b.mT
    return (s * F.where(F.col_index(s) <= F.row_index(s), F.exp(rows - keys), 0.0)) @ x


def laws(torch: Any) -> tuple[tuple[Chain, Callable[..., Any]], ...]:
    """Each chain in torch, with weights in f32 that are rounded before they are multiplied."""

    def scored(q: Any, k: Any, scale: float = 128**-0.5) -> tuple[Any, Any]:
        at = torch.arange(q.shape[-2], device=q.device)
        return (q @ k.mT).float() * scale, at[None] <= at[:, None]

    def weighed(weights: Any, seen: Any, v: Any) -> Any:
        return torch.where(seen, weights, 0.0).to(v.dtype) @ v

    def retained(q: Any, k: Any, v: Any, log_rate: Any) -> Any:
        s, seen = scored(q, k)
        at = torch.arange(q.shape[-2], device=q.device)
        return weighed(s * torch.exp(-torch.exp(log_rate) * (at[:, None] - at[None])), seen, v)

    def sigmoids(q: Any, k: Any, v: Any, bias: float) -> Any:
        s, seen = scored(q, k)
        return weighed(torch.sigmoid(s + bias), seen, v)

    def all_sigmoids(q: Any, k: Any, v: Any, bias: float) -> Any:
        return torch.sigmoid(scored(q, k)[0] + bias).to(v.dtype) @ v

    def squares(q: Any, k: Any, v: Any) -> Any:
        s, seen = scored(q, k)
        return weighed(torch.relu(s).square(), seen, v)

    def linear(q: Any, k: Any, v: Any) -> Any:
        return weighed(*scored(q, k), v)

    def chunks(c: Any, b: Any, x: Any, rows: Any, keys: Any) -> Any:
        s, seen = scored(c, b, 1.0)
        return weighed(s * torch.exp(rows - keys), seen, x)

    return (
        (retention, retained), (sigmoid_causal, sigmoids), (sigmoid_full, all_sigmoids), (relu_squared, squares),
        (linear_causal, linear), (chunk_shared, chunks), (chunk_own, chunks),
    )  # fmt: skip


def operands(torch: Any, spec: Chain) -> list[Any]:
    """Normal numbers, biases of -ln 4096, rates of 1/8192 to 1/64, and running sums of logarithms of decay."""
    made: list[Any] = []
    sizes = spec.graph.sizes
    steps = -torch.rand(256, 8, 256, device="cuda").cumsum(-1) * 0.05
    for tensor in spec.graph.inputs:
        shape = [sizes[str(size)] if not isinstance(size, int) else size for size in tensor.shape]
        if not shape:
            made.append(-8.3)
        elif tensor.name == "log_rate":
            made.append(torch.linspace(-9.0, -4.2, shape[0], device="cuda").view(shape))
        elif tensor.name in ("rows", "keys"):
            made.append(steps.reshape(shape))
        else:
            made.append(torch.randn(shape, device="cuda").bfloat16())
    return made


def main(compiled: bool = True) -> int:
    import torch

    watch = Stopwatch(finding.find(target("cuda:h200"), "gpu"))
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e6:.2f} TB/s")
    for spec, law in laws(torch):
        given = operands(torch, spec)
        wide = [x.float() if isinstance(x, torch.Tensor) else x for x in given]
        want = torch.cat([law(*(one_head(x, head) for x in wide)) for head in range(heads_of(spec))], 1)
        found = candidates(spec.graph, target("cuda:h200"))
        ways: list[tuple[str, Any]] = [("fusegen", fusegen.compile(spec, "cuda:h200", validate=False, tuned=False))]
        others = [plan for plan in found.plans[1:] if plan.rule != "attention"][:OTHERS]
        others += [plan for plan in found.plans if plan.rule == "attention"][:1]
        for plan in others:
            first = pipeline.first(found, plan)
            ways.append((plan.configuration, pipeline.compile_kernel(first, on="gpu", validate=False, tuned=False)))
        names, launches = list[str](), list[Any]()
        for name, kernel in ways:
            out = kernel(*given)
            apart = float((out.float() - want).abs().max() / want.abs().max())
            if not apart <= MOST_APART:
                print(f"  {name}: apart by {apart:.2g}")
                continue
            names.append(name)
            launches.append(kernel.prepare(*given, out=out))
        calls: list[tuple[str, Callable[..., Any], list[Any]]] = [("torch", law, given)]
        if compiled:
            calls.append(("torch.compile", torch.compile(law, dynamic=False), given))
        if spec is retention:
            calls.append(
                ("softmax", partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True), given[:3])
            )
        for name, function, taken in calls:
            function(*taken)
            names.append(name)
            launches.append(lambda stream, function=function, taken=taken: function(*taken))
        timings = watch.time_together([[launch] for launch in launches], REPEATS, shuffled=True)
        told = ", ".join(f"{n} {t.median:.1f}" for n, t in zip(names, timings, strict=True))
        print(f"{spec.name}, estimated at {found.plans[0].cost.time_us:.0f}: {told}", flush=True)
        del want, wide, given, launches, calls, ways
        torch.cuda.empty_cache()
    return 0


def heads_of(spec: Chain) -> int:
    return spec.graph.sizes["H"]


def one_head(x: Any, head: int) -> Any:
    """What a head has of an operand; of a rate, which has no batch, and of what heads share, the like."""
    if not hasattr(x, "shape"):
        return x
    if x.dim() == 3:
        return x[head : head + 1]
    return x[:, head : head + 1] if x.shape[1] > 1 else x


if __name__ == "__main__":
    sys.exit(main("--no-compile" not in sys.argv))
