"""Top-k of logits beside torch, and what it costs by row length and k: predicted, and measured where there is a GPU.

    python benchmarks/topk.py --out benchmarks/data/h200_topk.json    # all tables on this GPU
    python benchmarks/topk.py --predict                               # the planner's cost table alone; needs no GPU
    python benchmarks/topk.py --only torch                            # the first table alone
    python benchmarks/topk.py --only routers                          # short rows alone, as routers have them

The first table has one chain at each shape: logits * scale, softmax, the k largest probabilities and their columns. Its
time stands beside torch.softmax and torch.topk of the same logits, and beside the copy rate of the same run: median of
30, cold L2 (fusegen/measuring/timing.py). The second one says for V columns and k chosen what a row takes by the
planner's count: bytes, exponentials, comparisons with the threshold, candidates that pass it, cuts of these to the best
k, which of bytes and instructions bounds the time, and the time predicted; measured beside it. Between them stand
routers of 8 to 384 experts and the best of 8 and 16 columns: short rows, of which many share a block. They stand beside
torch's copy of the same logits ("copying"), timed by turns with them. Every kernel is checked against torch's sort on
some of its rows first. Run from the repository root.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.table import gpu_text  # noqa: E402
from fusegen import b8, bf16, chain, dims, f32, i32  # noqa: E402
from fusegen import ops as F  # noqa: E402
from fusegen.errors import FusegenError  # noqa: E402
from fusegen.language.spec import Chain  # noqa: E402
from fusegen.planner import plan  # noqa: E402
from fusegen.planner.model import RowPlan  # noqa: E402
from fusegen.planner.selections.choosing import expected  # noqa: E402
from fusegen.targets import Target, target  # noqa: E402

OUT = ROOT / "benchmarks" / "data" / "h200_topk.json"
B, V, K = dims("B V K")
INF = float("inf")


@chain(B=4096, V=32000, K=128)
def likeliest(logits: f32[B, V], scale: f32) -> tuple[f32[B, K], i32[B, K]]:
    """The K largest of softmax(logits * scale)."""
    values, columns = F.topk(F.softmax(logits * scale), K)
    return values, columns


@chain(B=4096, V=50257, K=256)
def likeliest_bf16(logits: bf16[B, V], scale: f32) -> tuple[f32[B, K], i32[B, K]]:
    """The K largest of softmax(logits * scale)."""
    values, columns = F.topk(F.softmax(logits * scale), K)
    return values, columns


@chain(B=4096, V=32000, K=128)
def unmasked(logits: f32[B, V], mask: b8[B, V], scale: f32) -> tuple[f32[B, K], i32[B, K]]:
    """The K largest of softmax(logits * scale) among what a mask keeps."""
    values, columns = F.topk(F.softmax(F.where(mask, logits * scale, -INF)), K)
    return values, columns


@chain(B=131072, V=256, K=8)
def routed(logits: f32[B, V], scale: f32) -> tuple[f32[B, K], i32[B, K]]:
    """The K likeliest experts, their probabilities made to add up to 1."""
    values, columns = F.topk(F.softmax(logits * scale), K)
    return values / F.sum(values), columns


@chain(B=131072, V=256, K=8)
def routed_bf16(logits: bf16[B, V], scale: f32) -> tuple[f32[B, K], i32[B, K]]:
    """The same of bf16."""
    values, columns = F.topk(F.softmax(logits * scale), K)
    return values / F.sum(values), columns


@chain(B=65536, V=128, K=8)
def router(logits: bf16[B, V]) -> tuple[f32[B, K], i32[B, K]]:
    """The K best experts and the softmax of their logits, as specs/moe_router_qwen3.py has them."""
    best, experts = F.topk(logits, K)
    return F.softmax(best), experts


@chain(B=65536, V=128, K=8)
def router_f32(logits: f32[B, V]) -> tuple[f32[B, K], i32[B, K]]:
    """The same of f32."""
    best, experts = F.topk(logits, K)
    return F.softmax(best), experts


@chain(B=4096, V=128256)
def greedy(logits: bf16[B, V]) -> i32[B, 1]:
    """The largest."""
    return F.argmax(logits)


SHAPES: tuple[tuple[Chain, dict[str, int]], ...] = (
    (likeliest, {"B": 4096, "V": 32000, "K": 128}),
    (likeliest_bf16, {"B": 4096, "V": 50257, "K": 256}),
    (likeliest_bf16, {"B": 256, "V": 128256, "K": 50}),
    (likeliest, {"B": 64, "V": 50257, "K": 50}),
    (likeliest, {"B": 64, "V": 50257, "K": 256}),
    (likeliest, {"B": 1, "V": 50257, "K": 256}),
    (unmasked, {"B": 4096, "V": 32000, "K": 128}),
    (routed, {"B": 131072, "V": 256, "K": 8}),
    (routed_bf16, {"B": 131072, "V": 256, "K": 8}),
    (routed, {"B": 131072, "V": 64, "K": 2}),
    (greedy, {"B": 4096, "V": 128256}),
)
ROUTERS: tuple[tuple[Chain, dict[str, int]], ...] = (
    *(
        (found, {"B": 65536, "V": experts, "K": k})
        for found in (router, router_f32)
        for experts in (8, 16, 32, 40, 60, 64, 128, 160, 256, 384)
        for k in (1, 2, 4, 6, 8)
        if 2 * k <= experts and not (found is router_f32 and k in (1, 6))
    ),
    (greedy, {"B": 65536, "V": 8}),
    (greedy, {"B": 65536, "V": 16}),
)  # fmt: skip
LENGTHS = (10_000, 32_000, 100_000, 320_000, 1_000_000)
CHOSEN = (16, 64, 256, 1024)
ELEMENTS = 2**27  # of one cost: 512 MB of f32, several times any L2


@dataclass
class Line:
    """One kernel: what the planner says, and what was measured."""

    chain: str
    sizes: dict[str, int]
    configuration: str
    megabytes: float
    exponentials: float  # millions, likewise the next three
    comparisons: float
    candidates: float
    cuts: float  # a row
    bound: str
    predicted_us: float
    measured_us: float | None = None
    share: float | None = None  # of the copy rate
    torch_us: float | None = None
    copy_us: float | None = None  # of torch's copy of the logits, its launch included, by turns with the kernel
    right: bool | None = None


def line_of(found: Chain, sizes: dict[str, int], aim: Target) -> Line:
    made = plan(found.at(**sizes).graph, aim)
    assert isinstance(made, RowPlan)
    assert made.selection is not None
    choice = expected(made.selection, made.tile, made.cols)
    graph = made.graph
    exponentials = graph.rows * graph.cols if found is not greedy else 0
    return Line(
        chain=found.name,
        sizes=sizes,
        configuration=made.configuration,
        megabytes=made.cost.traffic.moved / 1e6,
        exponentials=exponentials / 1e6,
        comparisons=graph.rows * choice.comparisons / 1e6,
        candidates=graph.rows * choice.candidates / 1e6,
        cuts=choice.cuts,
        bound=made.cost.bound,
        predicted_us=made.cost.time_us,
    )


def costs() -> Iterator[tuple[Chain, dict[str, int]]]:
    for cols in LENGTHS:
        for k in CHOSEN:
            yield likeliest, {"B": max(1, ELEMENTS // cols), "V": cols, "K": k}


class Bench:
    """One GPU: its stopwatch, and torch."""

    def __init__(self, aim: Target) -> None:
        import torch

        from fusegen.measuring.timing import Stopwatch
        from fusegen.runtime import finding

        self.torch = torch
        self.target = aim
        self.device = finding.find(aim, "gpu")
        self.watch = Stopwatch(self.device)
        self.rate = self.watch.copy_rate()

    def measure(self, found: Chain, line: Line, table: str) -> None:
        """Times it, after a look at whether it is right: of routers beside a copy of the logits, of the first table
        beside torch's own way."""
        import fusegen

        torch = self.torch
        kernel = fusegen.compile(found.at(**line.sizes), self.target, on="gpu", validate=False)
        line.configuration = kernel.plan.configuration
        rows, cols, k = line.sizes["B"], line.sizes["V"], line.sizes.get("K", 1)
        inputs = kernel.plan.graph.inputs
        dtype = torch.bfloat16 if inputs[0].dtype is bf16 else torch.float32
        logits = torch.randn(rows, cols, device="cuda", dtype=dtype)
        mask = torch.rand(rows, cols, device="cuda") > 0.3 if any(t.dtype is b8 for t in inputs) else None
        operands = [logits, *([] if mask is None else [mask]), *([1.0] if any(not t.shape for t in inputs) else [])]
        outputs = kernel(*operands)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        line.right = self.right(found, logits, mask, outputs, k)
        launches = [kernel.prepare(*operands, out=outputs if len(outputs) > 1 else outputs[0])]
        if table == "routers":
            copied = torch.empty_like(logits)
            timing, copy = self.watch.time_together([launches, [lambda stream: copied.copy_(logits)]])
            line.copy_us = copy.median
        else:
            timing = self.watch.time(launches)
        moved = sum(t.numel() * t.element_size() for t in (logits, *([] if mask is None else [mask]), *outputs))
        line.measured_us = timing.median
        line.share = moved / timing.median / self.rate
        if table == "beside torch":
            line.torch_us = self.watch.time([self.eager(found, logits, mask, k)], repeats=10).median

    def eager(self, found: Chain, logits: Any, mask: Any, k: int) -> Any:
        torch = self.torch

        def run(stream: int) -> Any:
            if found is greedy:
                return logits.argmax(-1)
            z = logits if mask is None else torch.where(mask, logits, -INF)
            return torch.topk(torch.softmax(z, -1), k)

        return run

    def right(self, found: Chain, logits: Any, mask: Any, outputs: Any, k: int) -> bool:
        """Columns and values of a few rows, against a stable sort in float64."""
        torch = self.torch
        rows = torch.unique(torch.randint(0, logits.shape[0], (8,), device=logits.device))
        z = logits[rows].double()
        if mask is not None:
            z = torch.where(mask[rows], z, -INF)
        order = torch.sort(z, dim=-1, descending=True, stable=True)[1][:, :k]
        same = bool((outputs[-1][rows] == order).all())
        if len(outputs) > 1:
            values = torch.softmax(z, -1).gather(1, order)
            if found in (routed, routed_bf16, router, router_f32):
                values = values / values.sum(-1, keepdim=True)
            same = same and bool(torch.allclose(outputs[0][rows].double(), values, rtol=3e-4, atol=1e-12))
        return same


HEAD = ("chain", "B", "V", "k", "MB", "M exp", "M cmp", "M cand", "cuts", "bound", "predicted", "measured", "copy",
        "torch", "copying", "right", "configuration")  # fmt: skip


def text(line: Line) -> tuple[str, ...]:
    def number(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    return (
        line.chain, str(line.sizes["B"]), str(line.sizes["V"]), str(line.sizes.get("K", 1)), number(line.megabytes),
        number(line.exponentials), number(line.comparisons), number(line.candidates, 3), number(line.cuts, 0),
        line.bound, number(line.predicted_us), number(line.measured_us), number(line.share, 2), number(line.torch_us),
        number(line.copy_us), {None: "", True: "yes", False: "NO"}[line.right], line.configuration,
    )  # fmt: skip


NAMES = {
    "likeliest": "softmax, top-k, f32",
    "likeliest_bf16": "softmax, top-k, bf16",
    "unmasked": "mask, softmax, top-k, f32",
    "routed": "softmax, top-k, renormalise, f32",
    "routed_bf16": "softmax, top-k, renormalise, bf16",
    "router": "top-k, softmax, bf16",
    "router_f32": "top-k, softmax, f32",
    "greedy": "argmax, bf16",
}


def table_of(data: Mapping[str, Any]) -> str:
    """Markdown: the columns of docs/measured.md, of the first table."""
    lines = ["| chain | rows x V, k | fusegen | of copy rate | torch |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(cells_of(row))} |" for row in data["beside torch"] if row["right"]]
    return "\n".join(lines) + "\n"


def cells_of(row: Mapping[str, Any]) -> list[str]:
    rows, cols, *k = row["sizes"].values()
    us = [f"{us:.0f} us" if us >= 20 else f"{us:.1f} us" for us in (row["measured_us"], row["torch_us"])]
    return [NAMES[row["chain"]], f"{rows} x {cols}, {k[0] if k else 1}", us[0], f"{row['share']:.0%}", us[1]]


WIDTHS = (15, 7, 8, 5, 8, 7, 7, 8, 5, 8, 10, 9, 5, 8, 8, 6, 0)


def show(cells: tuple[str, ...]) -> None:
    print("  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip(), flush=True)


def run(wanted: argparse.Namespace) -> int:
    aim = target(wanted.target)
    bench = None if wanted.predict else Bench(aim)
    if bench is not None:
        print(f"{bench.device}, copy {bench.rate / 1e3:.0f} GB/s; times in us, medians, cold L2")
    found: dict[str, list[Line]] = {}
    for name, shapes in (("beside torch", SHAPES), ("routers", ROUTERS), ("cost", tuple(costs()))):
        if wanted.only and wanted.only not in name:
            continue
        print(f"\n{name}")
        show(HEAD)
        lines = found.setdefault(name, [])
        for one, sizes in shapes:
            line = line_of(one, sizes, aim)
            lines.append(line)
            if bench is not None:
                try:
                    bench.measure(one, line, name)
                except FusegenError as error:
                    print(f"{one.name} {sizes}: {str(error).splitlines()[0]}", file=sys.stderr)
                    line.right = False
                bench.torch.cuda.empty_cache()
            show(text(line))
        if wanted.out:
            tables = {n: [asdict(x) for x in xs] for n, xs in found.items()}
            facts = {"date": datetime.date.today().isoformat(), "gpu": gpu_text(), "conditions": "medians, cold L2"}
            wanted.out.write_text(json.dumps(facts | tables, indent=1) + "\n")
    return 1 if any(line.right is False for lines in found.values() for line in lines) else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cuda:h200")
    parser.add_argument("--predict", action="store_true", help="the planner's figures alone; needs no GPU")
    parser.add_argument("--only", default="", help="the table whose name holds this: torch, routers or cost")
    parser.add_argument("--out", type=Path, help=f"a file for what was found, as {OUT.relative_to(ROOT)}")
    wanted = parser.parse_args(arguments)
    try:
        return run(wanted)
    except FusegenError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
