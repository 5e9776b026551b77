"""Grouped products of bf16 as mixtures of experts have them, beside torch's own and DeepGEMM where it is importable.

    python benchmarks/grouped.py                    # prefill, DeepGEMM's own shapes, decode
    python benchmarks/grouped.py --only prefill --shapes GLM --even
    python benchmarks/grouped.py --candidates 8     # the planner's next choices too
    python benchmarks/grouped.py --json grouped.json

`prefill`: GLM-5, Llama 4 and Qwen 3.5, rows an expert, experts, columns and K as TileOPs measured them on an H200 (its
commit 05d0557a, all groups equally long: `--even`), and what it said of itself, DeepGEMM and torch._grouped_mm.
`deepgemm`: the shapes of DeepGEMM's tests. Groups are 0.7 to 1.3 times as long, evenly, as those tests draw them.
`decode`: rows dealt to the experts at random, as a share of the copy rate on the weights of experts with rows.
grouped_swiglu has the same products, of two weights with half the columns each; the others don't fuse it.

Of the planner's choices those are taken that `fusegen.compile` takes: it passes over kernels that spill registers,
which are named. Each contender is right before it is timed: apart from torch's result by bf16's rounding, and that from
a sum in f32 at some of the experts. One stopwatch, L2 cold, one of each by turns, each turn in an order of its own;
medians, TFLOP/s of the rows that there are.
DeepGEMM gets each group at a multiple of 128 rows, as it wants them, and decode in its masked form. Run from the
repository root on an NVIDIA GPU, with torch.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fusegen.compiling import compile_source  # noqa: E402
from fusegen.emitting.rendering import render  # noqa: E402
from fusegen.language.spec import load_chains  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.pipeline import gate  # noqa: E402
from fusegen.planner import candidates  # noqa: E402
from fusegen.planner.model import Plan  # noqa: E402
from fusegen.planner.products.parts import ProductPlan  # noqa: E402
from fusegen.runtime import Kernel, finding  # noqa: E402
from fusegen.targets import target  # noqa: E402


@dataclass(frozen=True)
class Shape:
    """`rows` of an expert in the mean; `gated`: do gate and up lie side by side among the columns? `said`: TFLOP/s of
    TileOps, DeepGEMM and torch._grouped_mm as published."""

    name: str
    rows: float
    experts: int
    cols: int
    k: int
    gated: bool
    said: tuple[int | None, ...] = ()

    @property
    def text(self) -> str:
        return f"{self.name} {self.rows:g} x {self.experts}, N={self.cols} K={self.k}"


PREFILL = (
    Shape("GLM-5 up", 1024, 256, 4096, 6144, True, (660, 643, 601)),
    Shape("GLM-5 up", 2048, 256, 4096, 6144, True, (659, 666, 619)),
    Shape("GLM-5 up", 4096, 256, 4096, 6144, True, (658, 663, 602)),
    Shape("GLM-5 up", 8192, 256, 4096, 6144, True, (696, 709, 646)),
    Shape("Llama 4 up", 1024, 128, 16384, 5120, True, (703, 656, 691)),
    Shape("Qwen 3.5 up", 1024, 512, 2048, 4096, True, (633, 630, 581)),
    Shape("GLM-5 down", 1024, 256, 6144, 2048, False, (611, 615, 574)),
    Shape("GLM-5 down", 2048, 256, 6144, 2048, False, (642, 651, 614)),
    Shape("GLM-5 down", 4096, 256, 6144, 2048, False, (685, 685, 610)),
    Shape("GLM-5 down", 8192, 256, 6144, 2048, False, (684, 697, 640)),
    Shape("Llama 4 down", 1024, 128, 5120, 8192, False, (664, 648, 626)),
    Shape("Qwen 3.5 down", 1024, 512, 4096, 1024, False, (626, None, 564)),
)
DEEPGEMM = tuple(
    Shape("DeepGEMM", rows, experts, cols, k, cols < 7168)
    for experts, rows in ((4, 8192), (8, 4096))
    for cols, k in ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
)
DECODE = (
    *(Shape("GLM-5 up", tokens * 8 / 256, 256, 4096, 6144, True) for tokens in (8, 64, 256)),
    Shape("GLM-5 down", 64 * 8 / 256, 256, 6144, 2048, False),
    *(Shape("Qwen 3.5 up", tokens * 10 / 512, 512, 2048, 4096, True) for tokens in (8, 64, 256)),
    *(Shape("DeepGEMM", rows, experts, 6144, 7168, True) for experts, rows in ((32, 20), (6, 20))),
    Shape("DeepGEMM", 20, 32, 7168, 3072, False),
    Shape("DeepGEMM", 20, 32, 4096, 2048, True),
)
KINDS = {"prefill": PREFILL, "deepgemm": DEEPGEMM, "decode": DECODE}
ALIGNED = 128  # rows that DeepGEMM wants a group to begin at multiples of
MASKED = 64  # and, of few, room for so many
SECONDS = 0.2  # of launches of one contender
CHUNK = 1 << 16  # rows that are compared at a time
MOST_APART = 0.02  # of the largest value: two roundings to bf16, of f32 sums in other orders
MOST_LOST = 0.01  # of the root of the mean square

CHAINS = {chain.name: chain for chain in load_chains(ROOT / "specs")}


@dataclass
class Contender:
    """`rows`: where the product's rows are in what `launch` writes, if not in their order."""

    name: str
    launch: Callable[[int], Any]
    made: Callable[[], Any]
    law: str = "product"
    rows: Any = None
    note: str = ""
    us: float = 0.0
    spread: float = 0.0


@dataclass
class Row:
    kind: str
    shape: Shape
    rows: int
    even: bool
    by: dict[str, dict[str, Any]] = field(default_factory=dict)


def lengths(shape: Shape, kind: str, even: bool) -> list[int]:
    """Rows of each group."""
    if kind == "decode":
        found = [0] * shape.experts
        for _ in range(round(shape.rows * shape.experts)):
            found[random.randrange(shape.experts)] += 1
        return found
    return [int(shape.rows * (1.0 if even else random.uniform(0.7, 1.3))) for _ in range(shape.experts)]


def plans(name: str, shape: Shape, rows: int, h200: Any) -> Iterator[ProductPlan]:
    """The planner's, cheapest first, two of a tile at most, four by wgmma."""
    cols = shape.cols // 2 if name == "grouped_swiglu" else shape.cols
    graph = CHAINS[name].graph.at(T=rows, N=cols, K=shape.k, E=shape.experts)
    seen: dict[str, int] = {}
    for plan in candidates(graph, h200).need():
        if not isinstance(plan, ProductPlan):
            continue
        kind = f"{plan.rule} {plan.tile.rows}x{plan.tile.cols}"
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= (4 if plan.rule == "wgmma" else 2):
            yield plan


class Kernels:
    """Compiled, each once, many at a time."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.found: dict[str, Any] = {}

    def compile(self, wanted: Sequence[Plan]) -> None:
        todo = {source.text: (source, plan) for plan in wanted if (source := render(plan)).text not in self.found}
        with ThreadPoolExecutor() as pool:
            for text, binary in zip(todo, pool.map(lambda job: self.binary(*job), todo.values()), strict=True):
                self.found[text] = (todo[text][0], binary)

    def first(self, found: Mapping[str, Iterator[ProductPlan]], most: int) -> dict[str, list[ProductPlan]]:
        """So many of each as `fusegen.compile` takes them, which passes over those that spill registers."""
        chosen: dict[str, list[ProductPlan]] = {name: [] for name in found}
        while wanted := [(name, plan) for name in found for plan in islice(found[name], most - len(chosen[name]))]:
            self.compile([plan for _, plan in wanted])
            for name, plan in wanted:
                if reason := gate(self.found[render(plan).text][1].resources):
                    print(f"  {name} {plan.configuration} {reason}", flush=True)
                else:
                    chosen[name].append(plan)
        return chosen

    @staticmethod
    def binary(source: Any, plan: Plan) -> Any:
        return compile_source(
            source.text, plan.name, plan.target, filename=source.filename, threads=plan.threads,
            dynamic_shared=plan.shared_bytes,
        )  # fmt: skip

    def kernel(self, plan: Plan) -> Kernel:
        source, binary = self.found[render(plan).text]
        return Kernel(source, binary, self.device, lambda layout: (source, binary))


def operands(torch: Any, shape: Shape, rows: list[int]) -> tuple[Any, Any, Any]:
    x = torch.randn(sum(rows), shape.k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(shape.experts, shape.cols, shape.k, device="cuda", dtype=torch.bfloat16)
    return x, w, torch.tensor(rows, device="cuda").cumsum(0).int()


def ours(
    kernels: Kernels, found: dict[str, list[ProductPlan]], shape: Shape, x: Any, w: Any, ends: Any, room: Any
) -> Iterator[Contender]:
    half = shape.cols // 2
    for name, listed in found.items():
        fused = name == "grouped_swiglu"
        weights = (w[:, :half], w[:, half:]) if fused else (w,)
        out = room.flatten()[: len(x) * half].view(len(x), half) if fused else room[: len(x)]
        for number, plan in enumerate(listed):
            label = name if not number else f"{name} {plan.configuration}"
            note = f"{plan.configuration}, said {plan.cost.time_us:.0f}"
            launch = kernels.kernel(plan).prepare(x, *weights, ends, out=out)
            yield Contender(label, launch, partial(as_it_is, out), "swiglu" if fused else "product", note=note)


def as_it_is(out: Any) -> Any:
    return out


def torchs(torch: Any, x: Any, w: Any, ends: Any) -> Contender:
    made: list[Any] = []

    def launch(stream: int) -> None:
        made[:] = [torch._grouped_mm(x, w.mT, offs=ends)]

    return Contender("torch._grouped_mm", launch, lambda: made[0])


def deep_gemms(torch: Any, kind: str, rows: list[int], x: Any, w: Any, room: Any) -> Iterator[Contender]:
    """By its contiguous form, whose groups begin at multiples of 128 rows; of decode by the masked one."""
    deep_gemm = import_module("deep_gemm")
    experts, cols, k = w.shape
    count = torch.tensor(rows, device="cuda")
    first = count.cumsum(0) - count
    expert = torch.repeat_interleave(torch.arange(experts, device="cuda"), count)
    if kind == "decode":
        most = -(-max(rows) // MASKED) * MASKED
        begins = torch.arange(experts, device="cuda") * most
    else:
        padded = -(-count // ALIGNED) * ALIGNED
        begins = padded.cumsum(0) - padded
    place = begins[expert] + torch.arange(len(x), device="cuda") - first[expert]
    if kind == "decode":
        own, out = x.new_zeros(experts * most, k), x.new_empty(experts, most, cols)
        own[place] = x
        apart, masked = own.view(experts, most, k), count.int()

        def launch(stream: int) -> None:
            deep_gemm.m_grouped_bf16_gemm_nt_masked(apart, w, out, masked, max(1, round(sum(rows) / experts)))

    else:
        total = int(padded.sum())
        out = room[:total]
        own = x
        if total != len(x):
            own = x.new_zeros(total, k)
            own[place] = x
        groups = torch.full((total,), -1, device="cuda", dtype=torch.int32)
        groups[place] = expert.int()

        def launch(stream: int) -> None:
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(own, w, out, groups)

    yield Contender("DeepGEMM", launch, lambda: out.view(-1, cols), rows=place)


def check(torch: Any, contender: Contender, law: Any) -> None:
    """Raises ValueError where what was made is not the law's, row by row of chunks."""
    made = contender.made()
    square = lost = worst = most = 0.0
    for at in range(0, len(law), CHUNK):
        want = law[at : at + CHUNK].float()
        if contender.law == "swiglu":
            gate, up = want.chunk(2, dim=1)
            want = torch.nn.functional.silu(gate) * up
        got = (made[contender.rows[at : at + CHUNK]] if contender.rows is not None else made[at : at + CHUNK]).float()
        gap = (got - want).abs()
        worst, most = max(worst, float(gap.max())), max(most, float(want.abs().max()))
        square, lost = square + float(want.square().sum()), lost + float(gap.square().sum())
    if not (worst <= MOST_APART * most and lost <= MOST_LOST**2 * square):
        raise ValueError(f"is apart by {worst:.3g} of {most:.3g}, {(lost / square) ** 0.5:.2e} in the mean")


def check_law(torch: Any, law: Any, x: Any, w: Any, ends: Any) -> None:
    """torch's own result, at the first, the last and some experts between, beside sums in f32."""
    ends = [0, *ends.tolist()]
    for expert in {0, len(w) // 3, len(w) // 2, len(w) - 1}:
        begin, end = ends[expert], ends[expert + 1]
        want = x[begin:end].float() @ w[expert].float().T
        if len(want) and float((law[begin:end].float() - want).abs().max()) > 1e-2 * float(want.abs().max()):
            raise ValueError(f"torch's product is wrong at expert {expert}")


def measure(
    torch: Any, watch: Stopwatch, kernels: Kernels, kind: str, shape: Shape, wanted: argparse.Namespace
) -> Row:  # fmt: skip
    rows = lengths(shape, kind, wanted.even)
    h200 = target("cuda:h200")
    names = ("grouped_gemm", "grouped_swiglu")[: 1 + shape.gated]
    found = kernels.first({name: plans(name, shape, sum(rows), h200) for name in names}, wanted.candidates)
    x, w, ends = operands(torch, shape, rows)
    room = x.new_empty(len(x) + (kind != "decode") * shape.experts * ALIGNED, shape.cols)
    base = torchs(torch, x, w, ends)
    base.launch(0)
    law = base.made()
    check_law(torch, law, x, w, ends)
    contenders = [*ours(kernels, found, shape, x, w, ends, room), base]
    if not wanted.without_deepgemm:
        contenders += deep_gemms(torch, kind, rows, x, w, room)
    right = []
    for contender in contenders:
        try:
            room.fill_(float("nan"))
            contender.launch(0)
            check(torch, contender, law)
            right.append(contender)
        except Exception as error:
            print(f"  {contender.name} {contender.note}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    del law
    flops = 2 * len(x) * shape.cols * shape.k
    repeats = max(7, min(15, int(SECONDS * 6e14 / flops)))
    timings = watch.time_together([[c.launch] for c in right], repeats, warmup=1 if flops > 5e12 else 3, shuffled=True)
    row = Row(kind, shape, len(x), wanted.even)
    read = sum(n > 0 for n in rows) * shape.cols * shape.k * 2
    print(f"{kind}: {shape.text}, {len(x)} rows{', all groups equal' * wanted.even}; "
          f"published {shape.said or 'nothing'}; {repeats} repeats", flush=True)  # fmt: skip
    for contender, timing in zip(right, timings, strict=True):
        us = timing.median
        told = {"us": us, "spread": timing.spread, "note": contender.note, "tflops": flops / us / 1e6}
        rate = f"{told['tflops']:6.1f} TFLOP/s"
        if kind == "decode":
            told["share"] = read / us / watch.copy_rate()
            rate = f"{told['share']:6.3f} of a copy's rate"
        row.by[contender.name] = told
        label = contender.name if contender.name in (*names, base.name, "DeepGEMM") else "  or"
        print(f"  {label:18} {us:9.1f} us {rate}  spread {timing.spread:5.1%}  {contender.note}", flush=True)
    return row


def table(rows: Sequence[Row]) -> Iterator[str]:
    """One line a shape: what of ours was chosen, and the others."""
    for kind in dict.fromkeys(row.kind for row in rows):
        unit = "share of a copy's rate" if kind == "decode" else "TFLOP/s"
        yield f"\n{kind}, {unit}{'':20}  gemm  swiglu   torch  DeepGEMM  published"
        for row in (row for row in rows if row.kind == kind):
            key, digits = ("share", 3) if kind == "decode" else ("tflops", 0)
            each = [row.by.get(name) for name in ("grouped_gemm", "grouped_swiglu", "torch._grouped_mm", "DeepGEMM")]
            cells = " ".join(f"{each_one[key]:7.{digits}f}" if each_one else f"{'':7}" for each_one in each)
            said = " ".join(str(n or "-") for n in row.shape.said)
            yield f"{row.shape.text:44} {cells}   {said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(KINDS), nargs="*", default=list(KINDS))
    parser.add_argument("--shapes", nargs="*", help="those whose text has one of these words")
    parser.add_argument("--even", action="store_true", help="all groups of a prefill equally long")
    parser.add_argument("--candidates", type=int, default=1, help="so many of the planner's choices")
    parser.add_argument("--without-deepgemm", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no shape after so many")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    wanted = parser.parse_args()
    import torch

    if not wanted.without_deepgemm:
        try:
            deep_gemm = import_module("deep_gemm")
        except Exception as error:
            print(f"without DeepGEMM: {type(error).__name__}: {str(error)[:200]}")
            wanted.without_deepgemm = True
        else:
            print(f"DeepGEMM {deep_gemm.__version__}")
    started = time.monotonic()
    watch = Stopwatch(finding.find(target("cuda:h200"), "gpu"))
    kernels = Kernels(watch.device)
    torch.manual_seed(0)
    random.seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {watch.copy_rate() / 1e6:.2f} TB/s")
    asked = [
        (kind, shape) for kind in wanted.only for shape in KINDS[kind]
        if not wanted.shapes or any(word in shape.text for word in wanted.shapes)
    ]  # fmt: skip
    rows = []
    for number, (kind, shape) in enumerate(asked, start=1):
        spent = time.monotonic() - started
        if spent > wanted.seconds:
            print(f"stopped after {spent:.0f} s, {len(asked) - number + 1} shapes left")
            break
        print(f"[{number} of {len(asked)}, {spent:.0f} s]", end=" ", flush=True)
        try:
            rows.append(measure(torch, watch, kernels, kind, shape, wanted))
        except Exception as error:
            print(f"{shape.text}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()
        if wanted.json:
            said = {"gpu": torch.cuda.get_device_name(), "copy_gbs": watch.copy_rate() / 1e3}
            wanted.json.write_text(json.dumps(said | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
