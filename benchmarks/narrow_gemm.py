"""Products of 8-bit factors against torch's own, in one run: row and channel scales, promoted sums, whole numbers.

    python benchmarks/narrow_gemm.py                    # the planner's own choice of every row
    python benchmarks/narrow_gemm.py --candidates 6     # and its next ones, to draw constants of the cost model from
    python benchmarks/narrow_gemm.py --only int8

Beside each row: torch._scaled_mm with one scale a tensor (cuBLASLt) and with a scale a row and a channel, both with and
without fast sums; torch._int_mm of whole numbers; and torch's bf16 product of the same sizes. All by one stopwatch, L2
cold, medians. `apart` is the largest difference from torch's result, in shares of its largest element. Run from the
repository root on a GPU that multiplies 8 bits by warpgroups (sm_90a), in an environment with torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fusegen import bf16, chain, dims, f8e4m3, f32, i8  # noqa: E402
from fusegen import ops as F  # noqa: E402
from fusegen.compiling import compile_source  # noqa: E402
from fusegen.emitting.rendering import render  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.planner import candidates  # noqa: E402
from fusegen.planner.programs import program_instead  # noqa: E402
from fusegen.runtime import Kernel, finding  # noqa: E402
from fusegen.targets import target  # noqa: E402

M, N, K = dims("M N K")
SIZES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096), (4096, 7168, 16384))
REPEATS = 15


@chain(M=4096, N=4096, K=4096)
def scaled(x: f8e4m3[M, K], w: f8e4m3[N, K], sx: f32[M, 1], sw: f32[N]) -> bf16[M, N]:
    """Sums promoted every 128 of K."""
    return (x @ w.T) * sx * sw


@chain(M=4096, N=4096, K=4096)
def fast(x: f8e4m3[M, K], w: f8e4m3[N, K], sx: f32[M, 1], sw: f32[N]) -> bf16[M, N]:
    """Sums of 14 bits, over all of K."""
    return F.matmul(x, w.T, promote=0) * sx * sw


@chain(M=4096, N=4096, K=4096)
def int8(x: i8[M, K], w: i8[N, K], sx: f32[M, 1], sw: f32[N]) -> bf16[M, N]:
    """Exact sums."""
    return (x @ w.T) * sx * sw


@chain(M=4096, N=7168, K=16384)
def blocks(
    x: f8e4m3[M, K], w: f8e4m3[N, K], sx: f32[K // 128, M], sw: f32[N // 128, K // 128]
) -> bf16[M, N]:  # fmt: skip
    """Sums scaled every 128 of K."""
    return F.dequantize(x, sx.T) @ F.dequantize(w, sw).T


CHAINS = (scaled, fast, int8)
BLOCK_SIZES = ((4096, 7168, 16384), (4096, 24576, 1536), (4096, 4096, 7168), (64, 7168, 16384), (64, 24576, 1536))


def operands(torch: Any, whole: bool, m: int, n: int, k: int) -> tuple[Any, ...]:
    if whole:
        x, w = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, device="cuda") for rows in (m, n))
    else:
        x, w = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    sx, sw = torch.rand(m, 1, device="cuda") + 0.5, torch.rand(n, device="cuda") + 0.5
    return x, w, sx, sw


def peers(torch: Any, name: str, given: tuple[Any, ...]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What torch has for it; the first gives the same result."""
    x, w, sx, sw = given
    if name == "int8":
        yield "torch._int_mm, scaled", lambda: (torch._int_mm(x, w.T) * sx * sw).to(torch.bfloat16)
        yield "torch._int_mm", lambda: torch._int_mm(x, w.T)
        return
    one = torch.ones((), device="cuda")
    row = sw[None, :].contiguous()

    def by_torch(left: Any, right: Any, quick: bool) -> Callable[[], Any]:
        return lambda: torch._scaled_mm(x, w.T, left, right, out_dtype=torch.bfloat16, use_fast_accum=quick)

    for quick in (False, True) if name == "scaled" else (True, False):
        what = "fast" if quick else "exact"
        yield f"_scaled_mm {what}, row x channel", by_torch(sx, row, quick)
        yield f"_scaled_mm {what}, per tensor", by_torch(one, one, quick)


def measure(torch: Any, wanted: argparse.Namespace) -> None:
    chosen = target(wanted.target)
    watch = Stopwatch(finding.find(chosen, "gpu"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e3:.0f} GB/s")
    for sizes in SIZES:
        named = dict(zip("MNK", sizes, strict=True))
        halves = [torch.randn(rows, sizes[2], device="cuda", dtype=torch.bfloat16) for rows in sizes[:2]]
        say("torch bf16", named, timed(watch, lambda: halves[0] @ halves[1].T))  # noqa: B023
        for chain_ in CHAINS:
            if wanted.only in chain_.name:
                row(torch, watch, chain_, named, wanted)
    for sizes in BLOCK_SIZES if wanted.only in blocks.name else ():
        block_row(torch, watch, dict(zip("MNK", sizes, strict=True)), wanted)


def block_row(torch: Any, watch: Stopwatch, sizes: Mapping[str, int], wanted: argparse.Namespace) -> None:
    """The plans of scaled blocks, beside torch's own and bf16 of numbers dequantized before."""
    m, n, k = sizes.values()
    x, w = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    sx = torch.rand(k // 128, m, device="cuda") + 0.5
    sw = torch.rand(n // 128, k // 128, device="cuda") + 0.5
    wide = (x.bfloat16() * sx.T.repeat_interleave(128, 1)).bfloat16()
    narrow = (w.bfloat16() * sw.repeat_interleave(128, 0).repeat_interleave(128, 1)).bfloat16()
    expected = (wide @ narrow.T).float()
    say("torch bf16, dequantized before", sizes, timed(watch, lambda: wide @ narrow.T))
    try:
        scales = sx.T, sw.T
        us = timed(watch, lambda: torch._scaled_mm(x, w.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=False))
        say("_scaled_mm 1x128 128x128", sizes, us)
    except Exception as error:  # a torch that has no such product is a finding
        print(f"  _scaled_mm 1x128 128x128: {type(error).__name__}: {str(error)[:120]}")
    program = program_instead(candidates(blocks.graph.at(**sizes), target(wanted.target)))
    assert program is not None
    plans = candidates(program.steps[0].plan.graph, target(wanted.target)).plans
    for rank, plan in enumerate(plans[: wanted.candidates]):
        measured(watch, plan, (x, w, sx, sw), expected, f"blocks {rank}", sizes)


def row(torch: Any, watch: Stopwatch, chain_: Any, sizes: Mapping[str, int], wanted: argparse.Namespace) -> None:
    given = operands(torch, chain_.name == "int8", *sizes.values())
    expected = None
    for what, call in peers(torch, chain_.name, given):
        try:
            result = call()
            expected = result.float() if expected is None else expected
            say(what, sizes, timed(watch, call))
        except Exception as error:  # a torch that has no such product is a finding
            print(f"  {what}: {type(error).__name__}: {str(error)[:120]}")
    plans = candidates(chain_.graph.at(**sizes), target(wanted.target)).plans
    for rank, plan in enumerate(plans[: wanted.candidates]):
        measured(watch, plan, given, expected, f"{chain_.name} {rank}", sizes)


def measured(
    watch: Stopwatch, plan: Any, given: tuple[Any, ...], expected: Any, name: str, sizes: Mapping[str, int]
) -> None:
    """One plan's time, and how far its results are from what is expected."""
    source = render(plan)
    binary = compile_source(
        source.text, plan.name, plan.target, filename=source.filename, threads=plan.threads,
        dynamic_shared=plan.shared_bytes,
    )  # fmt: skip
    kernel = Kernel(source, binary, watch.device, lambda layout: (source, binary))
    try:
        out = kernel(*given)
        apart = (
            ""
            if expected is None
            else f"apart {float((out.float() - expected).abs().max() / expected.abs().max()):.1e}"
        )
        us = watch.time([kernel.prepare(*given, out=out)], REPEATS).median
    except Exception as error:
        print(f"  {plan.configuration}: {type(error).__name__}: {str(error)[:160]}")
        return
    said = f"said {plan.cost.time_us:.1f}  spills {binary.resources.spill_bytes}  {apart}"
    say(f"{name}: {plan.configuration}", sizes, us, said)


def timed(watch: Stopwatch, call: Callable[[], Any]) -> float:
    """The median, in µs."""
    return watch.time([lambda stream: call()], REPEATS).median


def say(what: str, sizes: Mapping[str, int], us: float, more: str = "") -> None:
    m, n, k = sizes.values()
    print(f"{m}x{n}x{k}  {what:58} {us:8.1f} us {2 * m * n * k / us / 1e6:7.0f} TFLOP/s  {more}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="chains whose name has this text")
    parser.add_argument("--target", default="cuda:h200")
    parser.add_argument("--candidates", type=int, default=1)
    wanted = parser.parse_args()
    import torch

    measure(torch, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
