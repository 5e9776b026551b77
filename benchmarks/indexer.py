"""Scores of sparse attention's indexer, beside DeepGEMM's kernel, torch, and fusegen's by two launches.

    python benchmarks/indexer.py                    # some 30 s
    python benchmarks/indexer.py --candidates 4     # the planner's next choices too

Scores of each token and key are sums over 32 or 64 heads of relu(q @ k) * weight, as DeepSeek-V3.2 chooses the keys
that a token looks at: specs/lightning_indexer.py in bf16, and the same in 8-bit floats, each key with a scale, which
`deep_gemm.fp8_mqa_logits` takes where DeepGEMM is importable. Each is right before it is timed, next to sums in f32.
One stopwatch, L2 cold, one of each by turns; medians in us, and TFLOP/s of the products. Run from the repository root
on an NVIDIA GPU, with torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fusegen  # noqa: E402
from fusegen import bf16, chain, dims, f8e4m3, f32, pipeline  # noqa: E402
from fusegen import ops as F  # noqa: E402
from fusegen.language.spec import load_chains  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.planner.programs import kernels_of, step_candidates  # noqa: E402
from fusegen.runtime import finding  # noqa: E402
from fusegen.targets import target  # noqa: E402

S, T, H, D = dims("S T H D")
SIZES = (  # tokens, keys, heads
    (4096, 4096, 64), (4096, 16384, 64), (8192, 8192, 64), (4096, 4096, 32), (2048, 32768, 32), (8, 65536, 64),
    (1, 131072, 64),
)  # fmt: skip
WIDTH = 128
REPEATS = 20
TOKENS = 64  # that are compared
MOST_APART = 1e-2  # of the largest score
MOST_STORED = 2**31  # products that the others write

(plain,) = (c for c in load_chains(ROOT / "specs") if c.name == "lightning_indexer")


@chain(S=4096, T=4096, H=64, D=128)
def narrow(q: f8e4m3[S, H, D], k: f8e4m3[T, D], w: f32[S, H], scale: f32[T]) -> f32[S, T]:
    return F.sum(F.relu(q @ k.T) * w[:, :, None], axis=1, keepdims=False) * scale


@chain(S=4096, T=4096, H=64, D=128)
def stored(q: bf16[S, H, D], k: bf16[T, D]) -> bf16[S, H, T]:
    return q @ k.T


@chain(S=4096, T=4096, H=64)
def summed(p: bf16[S, H, T], w: f32[S, H]) -> f32[S, T]:
    return F.sum(F.relu(p) * w[:, :, None], axis=1, keepdims=False)


def choices(chosen: Any, sizes: dict[str, int], most: int) -> Iterator[tuple[str, Any]]:
    """The planner's first kernels."""
    h200 = target("cuda:h200")
    _, program = kernels_of(chosen.graph.at(**sizes), h200)
    assert program is not None
    (step,) = program.steps
    for plan in step_candidates(program, step).plans[:most]:
        one = replace(program, steps=(replace(step, plan=plan),))
        made = pipeline.compile_program(one, on="gpu", validate=False, tuned=False, as_planned=True)
        yield f"{plan.configuration}, said {plan.cost.time_us:.0f}", made


class Contenders:
    """Each with its launches, once its result was right."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.names: list[str] = []
        self.launches: list[Callable[[int], Any]] = []

    def add(self, name: str, launch: Callable[[int], Any], made: Callable[[], Any], law: Any) -> None:
        launch(0)
        self.torch.cuda.synchronize()
        apart = float((made()[: len(law)].float() - law).abs().max() / law.abs().max())
        if apart > MOST_APART:
            print(f"  {name}: apart by {apart:.2g}", flush=True)
            return
        self.names.append(name)
        self.launches.append(launch)

    def call(self, name: str, function: Callable[[], Any], law: Any) -> None:
        """Of a library, whose function makes its result's memory."""
        made: list[Any] = []

        def launch(stream: int) -> None:
            made[:] = [function()]

        try:
            self.add(name, launch, lambda: made[0], law)
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def as_it_is(out: Any) -> Any:
    return out


def each(launches: Sequence[Callable[[int], Any]], stream: int) -> None:
    for launch in launches:
        launch(stream)


def contenders(torch: Any, deep_gemm: Any, tokens: int, keys: int, heads: int, most: int) -> Contenders:
    sizes = {"S": tokens, "T": keys, "H": heads, "D": WIDTH}
    found = Contenders(torch)
    q = torch.randn(tokens, heads, WIDTH, device="cuda").bfloat16()
    k = torch.randn(keys, WIDTH, device="cuda").bfloat16()
    w = torch.randn(tokens, heads, device="cuda")
    q8, k8 = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn)
    scale = torch.rand(keys, device="cuda") + 0.5

    def law(q: Any, k: Any) -> Any:
        some = torch.einsum("shd,td->sht", q[:TOKENS].float(), k.float()).relu()
        return (some * w[:TOKENS, :, None]).sum(1)

    of_bf16, of_f8 = law(q, k), law(q8, k8) * scale
    for label, chosen, operands, want in (
        ("bf16", plain, (q, k, w), of_bf16), ("f8e4m3", narrow, (q8, k8, w, scale), of_f8)
    ):  # fmt: skip
        for said, made in choices(chosen, sizes, most):
            out = torch.full((tokens, keys), float("nan"), device="cuda")
            found.add(f"fusegen {label}, {said}", made.prepare(*operands, out=out), partial(as_it_is, out), want)
    if tokens * keys * heads <= MOST_STORED:
        first = fusegen.compile(stored.at(**sizes), "cuda:h200", validate=False)
        second = fusegen.compile(summed.at(S=tokens, T=keys, H=heads), "cuda:h200", validate=False)
        product = torch.empty(tokens, heads, keys, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(tokens, keys, device="cuda")
        both = first.prepare(q, k, out=product), second.prepare(product, w, out=out)
        in_turn = partial(each, both)
        found.add("two launches, bf16 between", in_turn, partial(as_it_is, out), of_bf16)

        def eager(q: Any, k: Any, w: Any) -> Any:
            return (torch.einsum("shd,td->sht", q, k).relu() * w[:, :, None]).sum(1)

        compiled = torch.compile(eager, dynamic=False)
        found.call("torch.compile, bf16", lambda: compiled(q, k, w), of_bf16)
    if deep_gemm is not None:
        ends = [torch.full((tokens,), end, device="cuda", dtype=torch.int32) for end in (0, keys)]
        logits = deep_gemm.fp8_mqa_logits
        found.call("DeepGEMM fp8_mqa_logits", lambda: logits(q8, (k8, scale), w, *ends, clean_logits=False), of_f8)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=1, help="so many of the planner's choices")
    wanted = parser.parse_args()
    import torch

    try:
        deep_gemm: Any = import_module("deep_gemm")
    except Exception as error:
        deep_gemm = None
        print(f"without DeepGEMM: {type(error).__name__}: {str(error)[:200]}")
    watch = Stopwatch(finding.find(target("cuda:h200"), "gpu"))
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e6:.2f} TB/s")
    for number, (tokens, keys, heads) in enumerate(SIZES, start=1):
        found = contenders(torch, deep_gemm, tokens, keys, heads, wanted.candidates)
        timings = watch.time_together([[launch] for launch in found.launches], REPEATS)
        print(f"[{number} of {len(SIZES)}] {tokens} tokens, {keys} keys, {heads} heads of {WIDTH}")
        for name, timing in zip(found.names, timings, strict=True):
            rate = 2 * tokens * keys * heads * WIDTH / timing.median / 1e6
            print(f"  {timing.median:8.1f} us {rate:7.0f} TFLOP/s  spread {timing.spread:4.0%}  {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
