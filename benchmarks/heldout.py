"""Chains and shapes that nobody tuned for: is the planner's own choice as fast there as where it was measured?

    python benchmarks/heldout.py                  # compile and validate every case, then measure it, on this GPU
    python benchmarks/heldout.py --only softmax   # cases whose name matches; others stay as they are
    python benchmarks/heldout.py --best 8         # the planner's next 7 candidates too: a wrong choice, or no good one?
    python benchmarks/heldout.py --check          # compile, and validate in the emulator; needs no GPU
    python benchmarks/heldout.py --print          # the table from the data, the slowest first

Every case is a chain of benchmarks/heldout_chains.py at one size, planned by estimate alone: measurements are switched
off. Cases are compiled and validated by as many processes as there are cores, then timed one after another by one
stopwatch: cold L2, operands in turns, medians. *share* is of the rate of a large copy in the same run, *alike* of the
time of a copy of as many bytes, which a short launch can be held to; products stand beside the vendor's bare ones.
Run from the repository root, in an environment with fusegen and, for products, torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import table  # noqa: E402
from fusegen.language.spec import Chain, load_chains  # noqa: E402

if TYPE_CHECKING:
    from fusegen.measuring.operands import Operands
    from fusegen.measuring.timing import Stopwatch
    from fusegen.planner.model import Plan
    from fusegen.runtime import Kernel
    from fusegen.targets import Target
    from fusegen.tuning import Bench

DATA = ROOT / "benchmarks" / "data" / "h200_heldout.json"
CHAINS = ROOT / "benchmarks" / "heldout_chains.py"
WIDER = 2  # of a case in halves: its operands are parts of arrays so many times as wide
COPY_BYTES = 1 << 30  # up to so many are copied for `alike`; larger launches are held to the large copy


@dataclass(frozen=True)
class Case(table.Row):
    """One chain at one size. `halves`: its operands of the chain's whole shape are halves of wider arrays."""

    halves: bool = False

    @property
    def name(self) -> str:
        return f"{super().name}{' halves' if self.halves else ''}"

    @property
    def sized(self) -> Chain:
        return self.at(chains()[self.chain])


@cache
def chains() -> Mapping[str, Chain]:
    return {chain.name: chain for chain in load_chains(CHAINS)}


def each(chain: str, sizes: Sequence[Mapping[str, int]], *dtypes: str) -> Iterator[Case]:
    """The chain at each of the sizes, stored as each of the types, or as it is written."""
    for size in sizes:
        for dtype in dtypes or (None,):
            yield Case(chain, size, dtype)


def rows(*pairs: tuple[int, int]) -> list[Mapping[str, int]]:
    return [{"M": m, "N": n} for m, n in pairs]


def heads(*shapes: tuple[int, int, int]) -> list[Mapping[str, int]]:
    """Of one sequence."""
    return [{"B": 1, "H": h, "S": s, "N": n} for h, s, n in shapes]


def picks(*shapes: tuple[int, int, int]) -> list[Mapping[str, int]]:
    return [{"B": b, "V": v, "K": k} for b, v, k in shapes]


def mnk(*shapes: tuple[int, int, int]) -> list[Mapping[str, int]]:
    return [{"M": m, "N": n, "K": k} for m, n, k in shapes]


CASES: tuple[Case, ...] = (
    # norms: the widths of models
    *each("layernorm_bare", rows((65536, 768), (32768, 5120)), "bf16", "f32"),
    *each("layernorm_gain", rows((16384, 12288), (65536, 1536)), "f16"),
    *each("layernorm_gain", rows((8192, 20480)), "bf16", "f32"),
    *each("layernorm_affine", rows((65536, 768), (32768, 3072), (16384, 5120), (8192, 12288)), "bf16"),
    *each("layernorm_affine", rows((65536, 1536), (8192, 20480)), "f32"),
    *each("residual_layernorm", rows((32768, 1024), (16384, 5120), (8192, 12288)), "f16"),
    *each("scaled_residual_rmsnorm", rows((32768, 2048), (16384, 6144), (8192, 7168)), "bf16"),
    *each("scaled_residual_rmsnorm", rows((16384, 3584)), "f32"),
    *each("head_rmsnorm", [{"T": 65536, "H": 32, "D": d} for d in (64, 128, 256)], "bf16"),
    *each("head_rmsnorm", [{"T": 32768, "H": 32, "D": 128}], "f32"),
    *each("qk_norm", [{"T": 32768, "H": 16, "D": d} for d in (64, 128)], "bf16"),
    *each("l2_normalised", rows((131072, 768), (65536, 1024), (1048576, 96)), "f32", "bf16"),
    *each("min_max_scaled", rows((16384, 6400)), "f32", "bf16"),
    # softmaxes
    *each("softcap_softmax", heads((32, 2048, 2048), (16, 4096, 6144))),
    *each("alibi_softmax", heads((32, 2048, 2048), (16, 4096, 4096))),
    *each("odd_causal_softmax", heads((48, 1000, 1000), (16, 4088, 4088), (24, 2050, 2050), (16, 2047, 2047))),
    *each("odd_causal_softmax", heads((192, 512, 512), (768, 256, 256))),
    *each("window_softmax", heads((32, 4096, 4096))),
    *each("bool_softmax", [{"B": 8, "S": 4096, "N": 4096}, {"B": 32, "S": 1024, "N": 1536}], "bf16", "f32"),
    *each("shared_mask_softmax", [{"B": 4, "H": 16, "S": 2048, "N": 2048}], "bf16", "f32"),
    *each("bias_softmax", [{"B": 8, "H": 16, "S": 1024, "N": 1024}]),
    *each("vocabulary_log_softmax", [{"T": 2048, "V": 128256}], "bf16", "f32"),
    *each("plain_softmax", rows((16384, 10240), (4096, 49152)), "bf16", "f32"),
    # few rows, and long ones
    *each("plain_softmax", rows((1, 65536), (8, 262144), (32, 65536), (132, 65536), (500, 262144)), "f32"),
    *each("plain_softmax", rows((1, 4096), (32, 32768), (100, 8192), (500, 4096)), "bf16"),
    *each("layernorm_affine", rows((1, 5120), (32, 5120), (132, 12288), (500, 8192)), "bf16"),
    *each("scaled_residual_rmsnorm", rows((1, 8192), (32, 8192), (500, 5120)), "bf16"),
    # one value a row
    *each("row_mean", rows((32768, 8192), (1000000, 256)), "bf16", "f32"),
    *each("row_max", rows((65536, 5120), (64, 1048576), (8, 1048576)), "bf16"),
    *each("row_logsumexp", [{"T": 4096, "V": 128256}, {"T": 16384, "V": 32000}], "bf16", "f32"),
    *each("row_logsumexp", [{"T": 32, "V": 128256}], "bf16"),
    *each("row_entropy", rows((16384, 16384)), "bf16"),
    *each("row_quantised", rows((16384, 4096), (8192, 14336)), "bf16"),
    # element by element
    *each("one_operand", rows((16384, 8192)), "f32", "f16", "bf16"),
    *each("two_operands", rows((16384, 8192)), "f32", "bf16"),
    *each("three_operands", rows((16384, 8192)), "f32", "f16"),
    *each("four_operands", rows((8192, 8192)), "f32", "bf16"),
    *each("five_operands", rows((8192, 8192)), "f16"),
    *each("six_operands", rows((8192, 8192)), "f32", "bf16"),
    *each("adam_like", rows((16384, 8192)), "f32"),
    *each("geglu", rows((16384, 8192)), "bf16", "f32"),
    *each("scaled_both_ways", rows((32768, 4096)), "bf16", "f32"),
    *each("gated_residual", rows((32768, 4096), (65536, 768)), "bf16"),
    *each("positions_added", [{"B": 8, "S": 4096, "N": 4096}], "bf16", "f32"),
    *each("bias_residual", rows((32768, 5120)), "bf16"),
    *each("three_operands", rows((500, 4096)), "bf16"),
    # norms, forward and backward
    *each("wide_residual_rmsnorm", rows((16384, 4096), (32768, 1536), (16384, 2880))),
    *each("gated_rmsnorm", rows((32768, 4096), (65536, 1024)), "bf16"),
    *each("layernorm_statistics", rows((16384, 4096), (65536, 1000)), "bf16"),
    *each("head_layernorm", [{"M": 32768, "G": g, "D": d} for g, d in ((32, 64), (16, 80), (8, 128))], "bf16"),
    *each("instance_norm", [{"B": 64, "C": 256, "N": n} for n in (784, 3136, 12544)], "f32"),
    *each("rmsnorm_backward", rows((16384, 4096), (65536, 768)), "bf16", "f32"),
    *each("layernorm_backward", rows((16384, 4096), (32768, 1280)), "bf16"),
    # softmaxes, forward and backward
    *each("capped_causal_softmax", heads((32, 2048, 2048), (24, 1500, 1500))),
    *each("padded_softmax", [{"B": 8, "H": 16, "S": 1024, "N": 1024}, {"B": 32, "H": 12, "S": 577, "N": 577}]),
    *each("patch_softmax", [{"B": 128, "H": 12, "S": 197, "N": 197}]),
    *each("window_bias_softmax", [{"B": 2048, "H": 8, "S": 49, "N": 49}]),
    *each("softmax_backward", heads((16, 2048, 2048), (24, 1500, 1500))),
    *each("router_softmax", [{"T": 524288, "N": n} for n in (32, 64, 96, 160)], "f32"),
    *each("cross_entropy_backward", [{"T": 4096, "V": v} for v in (32000, 50257)], "bf16", "f32"),
    # one value a row
    *each("row_variance", rows((32768, 4096), (131072, 1000)), "bf16", "f32"),
    *each("row_sums", rows((524288, 255), (4194304, 33), (32768, 10001)), "f32", "bf16"),
    *each("masked_mean", rows((32768, 4096)), "bf16"),
    *each("cosine_similarity", rows((131072, 768), (524288, 100)), "bf16", "f32"),
    *each("cross_entropy", [{"T": 4096, "V": v} for v in (32000, 50257)], "bf16"),
    *each("divergence", [{"T": 4096, "V": v} for v in (32000, 50257)], "bf16"),
    *each("row_scaled", rows((16384, 8192)), "bf16"),
    # rows that start anywhere
    *each("layernorm_affine", rows((524288, 129), (65536, 1025), (8192, 24576), (8192, 24577)), "f16"),
    *each("scaled_residual_rmsnorm", rows((262144, 127), (131072, 257), (16384, 5001)), "bf16"),
    *each("plain_softmax", rows((131072, 513), (16384, 4095)), "bf16", "f32"),
    *each("gated_rmsnorm", rows((65536, 1001)), "bf16"),
    *each("plain_softmax", rows((1048576, 65)), "bf16"),
    *each("plain_softmax", rows((65536, 1001)), "f32"),
    *each("row_variance", rows((524288, 127)), "bf16"),
    # heads whose vectors are no power of two
    *each("head_rmsnorm", [{"T": 65536, "H": 16, "D": d} for d in (80, 112)], "bf16"),
    *each("head_rmsnorm", [{"T": 32768, "H": 32, "D": 65}], "bf16"),
    *each("head_layernorm", [{"M": 32768, "G": 16, "D": d} for d in (81, 100)], "bf16"),
    # element by element
    *each("rotated_halves", [{"B": 4, "S": 4096, "H": 32, "D": d} for d in (32, 64)]),
    *each("biased_swiglu", rows((8192, 14336), (16384, 5500)), "bf16"),
    *each("mish", rows((16384, 8192)), "bf16"),
    # parts of wider arrays
    Case("gated_rmsnorm", {"M": 32768, "N": 2048}, "bf16", halves=True),
    Case("softmax_backward", {"B": 1, "H": 16, "S": 2048, "N": 2048}, halves=True),
    Case("geglu", {"M": 16384, "N": 8192}, "bf16", halves=True),
    Case("layernorm_affine", {"M": 16384, "N": 5120}, "bf16", halves=True),
    Case("plain_softmax", {"M": 16384, "N": 4096}, "f32", halves=True),
    # selections
    *each("best", picks((8192, 1000, 1), (8192, 1000, 100), (4096, 32000, 8), (1024, 151936, 64)), "f32", "bf16"),
    *each("best", picks((32, 262144, 1024), (2048, 65536, 1024), (1, 128256, 1), (256, 32768, 32)), "f32"),
    *each("best", picks((512, 262144, 1), (4096, 8192, 512), (8, 151936, 20)), "f16"),
    *each("sampled", picks((1, 151936, 50), (16, 128256, 256), (128, 32000, 40), (2048, 100000, 100)), "bf16"),
    *each("sampled", picks((8, 262144, 1024), (4096, 4096, 64), (512, 128256, 200)), "f32"),
    # products
    *each("linear", mnk((512, 4096, 4096), (2048, 11008, 4096), (1, 4096, 4096), (128, 8192, 8192), (333, 5000, 1200))),
    *each("linear_bias", mnk((4096, 4096, 11008), (16, 11008, 4096), (256, 1024, 4096), (1000, 1000, 1000)), "f16"),
    *each("linear_relu", mnk((512, 4096, 4096), (2048, 11008, 4096), (128, 8192, 8192)), "bf16"),
    *each("linear_residual", mnk((4096, 4096, 11008), (1, 4096, 4096), (333, 5000, 1200), (32, 5120, 5120)), "bf16"),
)


# ---------------------------------------------------------------- building


def prove(case: Case, target: str | None, on: str, more: int) -> tuple[str, str]:
    """Compile and validate one case, and compile its first `more` candidates, in a process of its own: the choice, and
    what went wrong, empty where nothing did. What was made stays in the cache. Products of these sizes take minutes in
    the emulator, and are only compiled for it."""
    import fusegen
    from fusegen.emitting.rendering import render
    from fusegen.errors import CompileError, FusegenError
    from fusegen.runtime.cache import compiled

    runs = on == "gpu" or not case.sized.graph.products
    try:
        kernel = fusegen.compile(case.sized, target, on=on, tuned=False, validate=runs)
    except FusegenError as error:
        return "", str(error).splitlines()[0]
    for plan in planned(case, kernel.target)[:more]:
        try:
            compiled(render(plan), origin=plan.regime)
        except CompileError:  # said when its turn comes
            continue
    return kernel.plan.configuration, ""


def planned(case: Case, target: Target) -> tuple[Plan, ...]:
    from fusegen.planner import candidates

    return candidates(case.sized.graph, target).need()


def prove_all(
    cases: Sequence[Case], target: str | None, on: str, more: int, say: Callable[[str], None]
) -> dict[str, str]:
    """What went wrong, by name."""
    wrong: dict[str, str] = {}
    workers = min(len(cases), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = {pool.submit(prove, case, target, on, more): case for case in cases}
        for done, future in enumerate(as_completed(futures), 1):
            case = futures[future]
            chosen, error = future.result()
            if error:
                wrong[case.name] = error
            say(f"{done}/{len(cases)} {case.name}: {error or chosen}")
    return wrong


# ---------------------------------------------------------------- measuring


class Yard:
    """The GPU where cases are measured."""

    def __init__(self, target: str | None, repeats: int) -> None:
        from fusegen.measuring.timing import Stopwatch
        from fusegen.pipeline import choose_target
        from fusegen.runtime import finding

        self.target = choose_target(target)
        self.watch: Stopwatch = Stopwatch(finding.find(self.target, "gpu"))
        self.repeats = repeats
        self.rate = self.watch.copy_rate()
        self.copied = [self.watch.device.empty(COPY_BYTES) for _ in range(2)]

    def facts(self, case: Case) -> dict[str, Any]:
        """What the data keep of one case. Raises FusegenError."""
        import fusegen
        from fusegen.measuring.operands import rotation

        kernel = fusegen.compile(case.sized, self.target, on="gpu", tuned=False)
        graph = kernel.plan.graph
        if graph.products:
            return self.beside_library(kernel)
        sets = rotation(self.watch.device, graph)
        if case.halves:
            sets = [halved(one, self.watch) for one in sets[:1]]
        launches = [kernel.prepare(*one.inputs, out=one.out, stream=0) for one in sets]
        timing = self.watch.time(launches, self.repeats)
        moved = kernel.plan.cost.traffic.ideal
        return {
            **self.about(kernel),
            "us": timing.median,
            "spread": timing.spread,
            "share": moved / timing.median / self.rate,
            "alike": self.copy_us(moved) / timing.median,
        }

    def about(self, kernel: Kernel) -> dict[str, Any]:
        return {
            "date": datetime.date.today().isoformat(), "gpu": table.gpu_text(), "copy_gbs": self.rate / 1e3,
            "signature": kernel.plan.graph.signature, "configuration": kernel.plan.configuration,
            "regime": kernel.plan.regime, "predicted_us": kernel.plan.cost.time_us,
        }  # fmt: skip

    def copy_us(self, moved: int) -> float:
        """A device copy that moves as many bytes, read and written together."""
        if moved > 2 * COPY_BYTES:
            return moved / self.rate
        source, to = (memory.address for memory in self.copied)
        device = self.watch.device
        return self.watch.time([lambda stream: device.copy(to, source, moved // 2, stream)], self.repeats).median

    def beside_library(self, kernel: Kernel) -> dict[str, Any]:
        """A product's time, and that of the vendor's bare product of the same operands."""
        import fusegen

        report = fusegen.bench(
            kernel, peers="library", alone=False, counters=False, repeats=self.repeats, watch=self.watch
        )
        entries = [report.entry_facts(entry) for entry in report.entries]
        bare = next((e["us"] for e in entries if "products alone" in e["name"] and not e["refused"]), None)
        own = entries[0]["us"]
        return {
            **self.about(kernel),
            "us": own,
            "spread": entries[0]["spread"],
            "share": entries[0]["share"],
            "bare_us": bare,
            "ratio": own / bare if own and bare else None,
        }

    def first(self, case: Case, most: int, bench: Bench) -> Iterator[dict[str, Any]]:
        """Times of the planner's first `most` candidates, launched in another process: one may hang or crash."""
        from fusegen.emitting.rendering import render
        from fusegen.errors import CompileError
        from fusegen.pipeline import gate
        from fusegen.runtime.cache import compiled
        from fusegen.tuning import Unfit

        for rank, plan in enumerate(planned(case, self.target)[:most]):
            facts = {"rank": rank, "configuration": plan.configuration, "predicted_us": plan.cost.time_us}
            try:
                source = render(plan)
                binary = compiled(source, origin=plan.regime)
                times = bench.time(source, binary, self.repeats // 2)
            except (CompileError, Unfit) as error:
                yield {**facts, "error": str(error).splitlines()[0]}
                continue
            refused = gate(binary.resources)
            yield {**facts, "us": median(times), **({"refused": refused} if refused else {})}


def halved(one: Operands, watch: Stopwatch) -> Operands:
    """The same operands where every array of more than one row is the left half of a wider one."""
    from fusegen.measuring.operands import Operands
    from fusegen.runtime.arrays import ArrayView

    def left(value: Any) -> Any:
        if not isinstance(value, ArrayView) or len(value.shape) < 2:
            return value
        wide = watch.device.empty(WIDER * value.size * value.dtype.bytes)
        watch.device.copy(wide.address, value.address, value.size * value.dtype.bytes, 0)
        whole = wide.view(value.dtype, (*value.shape[:-1], WIDER * value.shape[-1]))
        return replace(whole, shape=value.shape)

    return Operands(tuple(left(value) for value in one.inputs), tuple(left(value) for value in one.outputs))


def measure(cases: Sequence[Case], wanted: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Prove and measure `cases`. Raises FusegenError where there is no GPU."""
    from fusegen.tuning import Bench

    wrong = prove_all(cases, wanted.target, "gpu", wanted.best, say)
    yard = Yard(wanted.target, wanted.repeats)
    with Bench(yard.target) if wanted.best else nullcontext() as bench:
        return time_each(cases, wanted, yard, bench, wrong, say)


def time_each(
    cases: Sequence[Case], wanted: argparse.Namespace, yard: Yard, bench: Bench | None, wrong: Mapping[str, str],
    say: Callable[[str], None],
) -> int:  # fmt: skip
    """Put each of `cases` into the file as soon as it is measured."""
    from fusegen.errors import FusegenError

    data = table.read(wanted.out)
    for number, case in enumerate(cases, 1):
        facts: dict[str, Any] = {"row": case.name}
        try:
            if case.name in wrong:
                facts["error"] = wrong[case.name]
            else:
                facts |= yard.facts(case)
                if bench is not None and not case.halves:
                    facts["candidates"] = list(yard.first(case, wanted.best, bench))
        except FusegenError as error:
            facts["error"] = str(error).splitlines()[0]
        finally:
            table.free_torch()
        data[case.name] = facts
        table.write(wanted.out, data, CASES, "heldout.py")
        say(f"{number}/{len(cases)} {'  '.join(cells(facts))}")
    return 1 if any("error" in data[case.name] for case in cases) else 0


# ---------------------------------------------------------------- telling

TITLES = ("us", "share", "alike", "ratio", "predicted", "best", "configuration")


def cells(facts: Mapping[str, Any]) -> list[str]:
    """One line of the table: the name, then TITLES."""
    if "error" in facts:
        return [facts["row"], facts["error"]]
    best = best_of(facts)
    return [
        facts["row"], f"{facts['us']:.1f}", percent(facts.get("share")), percent(facts.get("alike")),
        f"{facts['ratio']:.3f}" if facts.get("ratio") else "", f"{facts['predicted_us']:.1f}",
        f"{best['us']:.1f} {best['configuration']}" if best else "", facts["configuration"],
    ]  # fmt: skip


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def best_of(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The fastest of the candidates that were timed and that the gate lets pass."""
    timed = [one for one in facts.get("candidates", ()) if "us" in one and "refused" not in one]
    return min(timed, key=lambda one: one["us"], default=None)


def lines(data: Mapping[str, Any], cases: Sequence[Case]) -> Iterator[str]:
    """The slowest first, each by what it is held to."""
    found = [data[case.name] for case in cases if case.name in data]
    held = sorted(found, key=lambda facts: reach(facts))
    table_lines = [["case", *TITLES], *(cells(facts) for facts in held)]
    widths = [max(len(line[i]) for line in table_lines if len(line) > 2) for i in range(len(TITLES) + 1)]
    for line in table_lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()


def reach(facts: Mapping[str, Any]) -> float:
    """1 is what a copy, or the library, takes; more is better."""
    if "error" in facts:
        return 0.0
    return 1 / facts["ratio"] if facts.get("ratio") else max(facts.get("share") or 0.0, facts.get("alike") or 0.0)


def main() -> int:
    from fusegen.errors import FusegenError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--check", action="store_true", help="compile, validate in the emulator, and leave")
    parser.add_argument("--print", action="store_true", help="the table from the data, and leave")
    parser.add_argument("--json", action="store_true", help="the data of these cases to stdout, for scripts")
    parser.add_argument("--best", type=int, default=0, metavar="N", help="time the planner's first N candidates too")
    parser.add_argument("--out", type=Path, default=DATA, metavar="FILE")
    parser.add_argument("--target", default=None, help="without it, that of the GPU here")
    parser.add_argument("--repeats", type=int, default=30)
    wanted = parser.parse_args()
    cases = [case for case in CASES if re.search(wanted.only, case.name)]

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    status = 0
    try:
        if wanted.check:
            return 1 if prove_all(cases, wanted.target or "cuda:h200", "emulator", 0, say) else 0
        if not wanted.print:
            status = measure(cases, wanted, say)
    except FusegenError as error:
        say(str(error))
        return error.exit_code
    data = table.read(wanted.out)
    if wanted.json:
        print(json.dumps([data[case.name] for case in cases if case.name in data], indent=1))
    else:
        print("\n".join(lines(data, cases)))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
