"""Attention against torch's own, in one run: heads of several sizes, with and without masks and biases.

    python benchmarks/attention.py                      # the planner's own choice of every row
    python benchmarks/attention.py --candidates 4       # and its next ones, to draw constants of the cost model from
    python benchmarks/attention.py --only causal --flex # beside torch's FlexAttention too, which torch.compile makes

Beside each row: torch's scaled_dot_product_attention by cuDNN and by FlashAttention, as far as it has the chain; beside
weights that are written out, torch.compile of the same, and a fill of as much memory. All by one stopwatch, L2 cold,
medians; operations as usual, 4 S T D a head, 2 where weights are written, of a mask its share. `apart` is the distance
from a reference in f32, relative L2. Run from the repository root on a GPU, in an environment with torch.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fusegen import Chain, bf16, chain, dims, f32, i32  # noqa: E402
from fusegen import ops as F  # noqa: E402
from fusegen.compiling import Binary, compile_source  # noqa: E402
from fusegen.emitting.rendering import render  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.planner import candidates  # noqa: E402
from fusegen.planner.model import Layout, Source  # noqa: E402
from fusegen.runtime import Kernel, finding  # noqa: E402
from fusegen.targets import target  # noqa: E402

B, H, S, T, D, E = dims("B H S T D E")
REPEATS = 15
WINDOW = 1024


@chain(B=1, H=32, S=4096, T=4096, D=128)
def full(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    return F.softmax(q @ k.mT * D**-0.5) @ v


@chain(B=1, H=32, S=4096, T=4096, D=192, E=128)
def unlike(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, E]) -> bf16[B, H, S, E]:
    return F.softmax(q @ k.mT * D**-0.5) @ v


@chain(B=1, H=32, S=4096, T=4096, D=128)
def causal(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    return F.softmax(F.causal(q @ k.mT * D**-0.5)) @ v


@chain(B=1, H=32, S=4096, T=4096, D=128)
def bias(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], b: bf16[1, H, S, T]) -> bf16[B, H, S, D]:
    return F.softmax(q @ k.mT * D**-0.5 + b) @ v


@chain(B=1, H=32, S=4096, T=4096, D=128)
def alibi(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], slope: f32[1, H, 1, 1]) -> bf16[B, H, S, D]:
    s = q @ k.mT * D**-0.5
    return F.softmax(F.causal(s + slope * F.cast(F.col_index(s) - F.row_index(s), f32))) @ v


@chain(B=1, H=32, S=4096, T=4096, D=128)
def softcap(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    return F.softmax(30.0 * F.tanh(q @ k.mT * (D**-0.5 / 30.0))) @ v


@chain(B=1, H=32, S=4096, T=4096, D=128)
def window(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    s = q @ k.mT * D**-0.5
    row, col = F.row_index(s), F.col_index(s)
    return F.softmax(F.where((col <= row) & (col > row - WINDOW), s, -math.inf)) @ v


@chain(B=1, H=32, S=4096, T=4096, D=128)
def documents(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], first: i32[1, 1, S, 1]
) -> bf16[B, H, S, D]:
    s = q @ k.mT * D**-0.5
    row, col = F.row_index(s), F.col_index(s)
    return F.softmax(F.where((col <= row) & (col >= first), s, -math.inf)) @ v


@chain(B=1, H=32, S=4096, T=4096, D=128)
def weights(q: bf16[B, H, S, D], k: bf16[B, H, T, D]) -> bf16[B, H, S, T]:
    return F.softmax(q @ k.mT * D**-0.5)


@chain(B=1, H=32, S=4096, T=4096, D=128)
def causal_weights(q: bf16[B, H, S, D], k: bf16[B, H, T, D]) -> bf16[B, H, S, T]:
    return F.softmax(F.causal(q @ k.mT * D**-0.5))


@dataclass(frozen=True)
class Row:
    chain: Chain
    b: int
    h: int
    s: int
    d: int
    e: int = 0  # of values, if not d

    @property
    def share(self) -> float:
        """Of all scores, those that the mask leaves."""
        name, s = self.chain.name, self.s
        if name in ("causal", "alibi", "causal_weights"):
            return 0.5
        if name == "window":
            w = min(WINDOW, s)
            return (w * s - w * w / 2) / s**2
        return 0.5 / 4 if name == "documents" else 1.0

    @property
    def sizes(self) -> dict[str, int]:
        found = {"B": self.b, "H": self.h, "S": self.s, "T": self.s, "D": self.d}
        return {**found, "E": self.e} if self.e else found

    @property
    def writes(self) -> bool:
        """Are weights written out, and multiplied with nothing?"""
        return self.chain in (weights, causal_weights)

    @property
    def flops(self) -> float:
        width = 0 if self.writes else self.e or self.d
        return 2 * self.b * self.h * self.s**2 * (self.d + width) * self.share


LENGTHS = ((128, 1024), (64, 4096), (16, 16384))  # heads, queries
ROWS = (
    *(Row(chain_, 1, heads, s, 128) for chain_ in (full, causal) for heads, s in LENGTHS),
    *(Row(chain_, 1, heads, s, 64) for chain_ in (full, causal) for heads, s in ((128, 4096), (32, 16384))),
    *(Row(full, 1, 64, 4096, d) for d in (80, 96)),
    *(Row(chain_, 1, 32, 4096, 256) for chain_ in (full, causal)),
    Row(unlike, 1, 32, 4096, 192, 128),
    *(Row(chain_, 1, 32, 4096, 128) for chain_ in (full, causal, bias, alibi, softcap, window, documents)),
    *(Row(window, 1, 16, s, 128) for s in (8192, 32768)),
    *(Row(chain_, 1, 32, s, 128) for chain_ in (weights, causal_weights) for s in (2048, 4096)),
)  # fmt: skip


def operands(torch: Any, row: Row) -> tuple[Any, ...]:
    torch.manual_seed(0)
    widths = (row.d, row.d) if row.writes else (row.d, row.d, row.e or row.d)
    found = [torch.randn(row.b, row.h, row.s, n, device="cuda").bfloat16() for n in widths]
    if row.chain is bias:
        found.append(torch.randn(1, row.h, row.s, row.s, device="cuda").bfloat16())
    if row.chain is alibi:
        found.append(2 ** (-8 * torch.arange(1, row.h + 1, device="cuda").float() / row.h).reshape(1, -1, 1, 1))
    if row.chain is documents:
        at = torch.arange(row.s, device="cuda", dtype=torch.int32)
        found.append((at // (row.s // 4) * (row.s // 4)).reshape(1, 1, -1, 1))
    return tuple(found)


def logits(torch: Any, row: Row, given: tuple[Any, ...], heads: slice) -> Any:
    """In f32, of some heads."""
    q, k = (x[:, heads].float() for x in given[:2])
    s = q @ k.mT * row.d**-0.5
    at = torch.arange(row.s, device="cuda")
    line, col = at[:, None], at[None]
    name = row.chain.name
    if name == "bias":
        s = s + given[3][:, heads].float()
    if name == "alibi":
        s = s + given[3][:, heads] * (col - line)
    if name == "softcap":
        s = 30 * torch.tanh(s / 30)
    keep = col >= 0
    if name in ("causal", "alibi", "window", "documents", "causal_weights"):
        keep = keep & (col <= line)
    if name == "window":
        keep = keep & (col > line - WINDOW)
    if name == "documents":
        keep = keep & (col >= given[3][0, 0])
    return s.masked_fill(~keep, -math.inf)


def peers(torch: Any, row: Row, given: tuple[Any, ...], flex: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What torch has for it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    name = row.chain.name
    if row.writes:
        yield from written(torch, row, given)
        return
    q, k, v = given[:3]
    if name in ("full", "causal", "unlike", "bias"):
        mask = given[3] if name == "bias" else None
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

            def call(backend: Any = backend) -> Any:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=name == "causal")

            yield backend.name.split("_")[0].lower(), call
    if flex:
        yield "flex", flexible(torch, row, given)


def written(torch: Any, row: Row, given: tuple[Any, ...]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """torch.compile of written weights, and a fill of as much memory."""
    q, k = given
    keep = torch.ones(row.s, row.s, dtype=torch.bool, device="cuda").tril()

    def softmax(q: Any, k: Any, keep: Any) -> Any:
        s = q @ k.mT * row.d**-0.5
        return (s.masked_fill(~keep, -math.inf) if row.share < 1 else s).softmax(-1)

    compiled = torch.compile(softmax)
    yield "torch.compile", lambda: compiled(q, k, keep)
    out = torch.empty(row.b, row.h, row.s, row.s, dtype=q.dtype, device="cuda")
    yield "fill", out.zero_


def flexible(torch: Any, row: Row, given: tuple[Any, ...]) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    name = row.chain.name
    q, k, v, *more = given
    scores: Any = {
        "bias": lambda s, b, h, i, j: s + more[0][0, h, i, j],
        "alibi": lambda s, b, h, i, j: s + more[0][0, h, 0, 0] * (j - i),
        "softcap": lambda s, b, h, i, j: 30 * torch.tanh(s / 30),
    }.get(name)
    masks: dict[str, Any] = {
        "causal": lambda b, h, i, j: j <= i,
        "alibi": lambda b, h, i, j: j <= i,
        "window": lambda b, h, i, j: (j <= i) & (j > i - WINDOW),
        "documents": lambda b, h, i, j: (j <= i) & (j >= more[0][0, 0, i, 0]),
    }
    mask = create_block_mask(masks[name], None, None, row.s, row.s) if name in masks else None
    compiled = torch.compile(flex_attention)

    def call() -> Any:
        return compiled(q, k, v, score_mod=scores, block_mask=mask)

    return call


def measure(torch: Any, wanted: argparse.Namespace) -> None:
    watch = Stopwatch(finding.find(target(wanted.target), "gpu"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e3:.0f} GB/s")
    for row in ROWS:
        if wanted.only in row.chain.name:
            measure_row(torch, watch, row, wanted)


def measure_row(torch: Any, watch: Stopwatch, row: Row, wanted: argparse.Namespace) -> None:
    given = operands(torch, row)
    heads = slice(0, 2)
    expected = logits(torch, row, given, heads).softmax(-1) if row.s <= 16384 else None
    if expected is not None and not row.writes:
        expected = expected @ given[2][:, heads].float()

    def apart(out: Any) -> str:
        if expected is None:
            return ""
        return f"apart {float((out[:, heads].float() - expected).norm() / expected.norm()):.1e}"

    for what, call in peers(torch, row, given, wanted.flex):
        try:
            out = call()
            say(what, row, watch.time([launched(call)], REPEATS).median, apart(out))
        except Exception as error:  # a torch that has no such attention is a finding
            print(f"  {what}: {type(error).__name__}: {str(error)[:120]}")
    found = candidates(row.chain.graph.at(**row.sizes), target(wanted.target)).plans[: wanted.candidates]
    for rank, plan in enumerate(found):
        source = render(plan)
        binary = compile_source(
            source.text, plan.name, plan.target, filename=source.filename, threads=plan.threads,
            dynamic_shared=plan.shared_bytes,
        )  # fmt: skip
        kernel = Kernel(source, binary, watch.device, alone(source, binary))
        try:
            out = kernel(*given)
            us = watch.time([kernel.prepare(*given, out=out)], REPEATS).median
        except Exception as error:
            print(f"  {plan.configuration}: {type(error).__name__}: {str(error)[:160]}")
            continue
        said = f"said {plan.cost.time_us:.1f}  spills {binary.resources.spill_bytes}  {apart(out)}"
        say(f"{rank}: {plan.configuration}", row, us, said)


def alone(source: Source, binary: Binary) -> Callable[[Layout], tuple[Source, Binary]]:
    """For every layout."""
    return lambda layout: (source, binary)


def launched(call: Callable[[], Any]) -> Callable[[Any], Any]:
    """As the stopwatch calls it, with a stream: torch's own is the one."""
    return lambda stream: call()


def say(what: str, row: Row, us: float, more: str = "") -> None:
    shape = f"{row.chain.name} {row.b * row.h} x {row.s} x {row.d}{f'/{row.e}' if row.e else ''}"
    print(f"{shape:26} {what:34} {us:8.1f} us {row.flops / us / 1e6:7.0f} TFLOP/s  {more}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="chains whose name has this text")
    parser.add_argument("--target", default="cuda:h200")
    parser.add_argument("--candidates", type=int, default=1)
    parser.add_argument("--flex", action="store_true", help="beside torch's FlexAttention")
    wanted = parser.parse_args()
    import torch

    measure(torch, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
