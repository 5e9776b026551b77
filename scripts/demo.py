"""What fusegen does, shown on this machine: from a spec to a kernel that is compiled and checked, for both vendors.

    make demo                      # or: python scripts/demo.py [folder of specs]

Needs no GPU: kernels are compiled by NVRTC and hiprtc, and run in the emulator; where a matching GPU is present, they
run there. What is missing is said. Exit code 0 when every kernel that could run agrees with its numpy reference.
"""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.rule import Rule
from rich.text import Text

from fusegen.cli.builds import Validation, validated
from fusegen.cli.doctor import examine
from fusegen.cli.plans import show_chains
from fusegen.cli.programs import kernel_candidates
from fusegen.cli.showing import console, mark, mark_style, progress, prose, say, show_code, table, times
from fusegen.compiling import Binary
from fusegen.emitting import golden
from fusegen.emitting.rendering import render
from fusegen.errors import CompileError, MissingError
from fusegen.language.spec import Chain, load_chains
from fusegen.pipeline import build
from fusegen.planner import plan
from fusegen.planner.model import Plan, RowPlan
from fusegen.planner.products.factors import lacking
from fusegen.targets import H200, MI300X, Target

TARGETS = (H200, MI300X)
FEATURED = "bias_gelu_residual_ln"
PRODUCT_SIZE = 256  # of every axis of matrix products, where an emulator checks them,
LAYER_SIZE = 16  # and of those of layers: errors through many products leave something to be judged of short sums alone
LAYER_PRODUCTS = 4
VENDORS = {"cuda": "CUDA", "hip": "HIP"}


@dataclass(frozen=True, slots=True)
class Result:
    """One chain for one target, as far as it got."""

    chain: Chain
    target: Target
    plans: tuple[Plan, ...]  # of the kernels, of which a program has several
    binaries: tuple[Binary, ...]
    validation: Validation
    trouble: str = ""  # why there are no binaries

    @property
    def failed(self) -> bool:
        return self.validation.ok is False

    @property
    def relative_l2(self) -> float | None:
        cases = self.validation.report.cases if self.validation.report else ()
        return next((case.relative_l2 for case in cases if case.name == "normal"), None)


def make(chain: Chain, target: Target) -> Result:
    """Compile and validate. What is missing here is noted; what is wrong fails."""
    kernels = kernel_candidates(chain, target)
    plans = tuple(found.need()[0] for found in kernels)
    binaries: tuple[Binary, ...] = ()
    trouble = ""
    try:
        built = [build(found.graph.written, target, found.plans[0].layout, known=found) for found in kernels]
        plans = tuple(one.source.plan for one in built)
        binaries = tuple(one.binary for one in built if one.binary is not None)
    except MissingError as missing:
        trouble = str(missing)
    except CompileError as error:
        return Result(chain, target, plans, (), Validation(False, "", str(error)), str(error))
    return Result(chain, target, plans, binaries, validated(small(chain), target)[0], trouble)


def small(chain: Chain) -> Chain:
    """The chain as it is validated here: an emulator takes minutes for products of thousands by thousands."""
    if not chain.graph.products:
        return chain
    most = LAYER_SIZE if len(chain.graph.products) >= LAYER_PRODUCTS else PRODUCT_SIZE
    return chain.at(**{name: min(size, most) for name, size in chain.graph.sizes.items()})


def make_all(chains: Sequence[Chain]) -> Iterator[Result]:
    """Every chain for every target as they get done. Threads suffice: compilers and kernels run outside of Python."""
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        pairs = [(chain, target) for target in TARGETS for chain in chains if not lacking(chain.graph, target)]
        jobs: list[Future[Result]] = [pool.submit(make, *pair) for pair in pairs]
        for job in as_completed(jobs):
            yield job.result()


# ---------------------------------------------------------------- telling


def chapter(title: str) -> None:
    out = console()
    say("")
    out.print(Rule(title, style="cyan") if out.is_terminal else prose(f"== {title}"))


def excerpt(text: str) -> str:
    """The plan at the top, then the kernel up to its second pass over the row; what is left out is marked."""
    head, _, rest = text.partition("\n\n")
    body = rest[rest.index('extern "C"') :]
    shown, second, hidden = body.partition("    // pass 2 of")
    more = f"    // ... {hidden.count(chr(10))} more lines: fusegen inspect specs/{FEATURED}.py\n" if second else ""
    return f"{head}\n\n// ... helpers\n\n{shown}{more}"


def fitting(text: str) -> str:
    """Code whose lines go on below, further in, where the console ends."""
    return "".join(f"{part}\n" for line in text.splitlines() for part in folded(line, console().width))


def folded(line: str, width: int) -> list[str]:
    margin = line[: len(line) - len(line.lstrip())] + "    "
    if line.lstrip().startswith("//"):
        margin = f"{margin[4:]}//         "
    return textwrap.wrap(line, width, subsequent_indent=margin, break_on_hyphens=False) or [""]


def regime(plans: Sequence[Plan]) -> str:
    """One kernel's, or how many there are and what each writes."""
    if len(plans) == 1:
        return staging(plans[0])
    written = ", then ".join(" and ".join(tensor.name for tensor in planned.graph.outputs) for planned in plans)
    return f"{len(plans)} kernels: {written}"


def staging(planned: Plan) -> str:
    """`128 threads a row, registers`."""
    if not isinstance(planned, RowPlan):
        return planned.regime
    tile = planned.tile
    if planned.flat:
        return f"flat, {tile.threads} threads a block"
    threads = f"{tile.threads_per_row} thread{'s' if tile.threads_per_row > 1 else ''} a row"
    where = {
        "none": "one pass",
        "registers": "kept in registers",
        "shared": "kept in shared memory",
        "stream": "read again",
    }
    return f"{threads}, {where[planned.staging]}"


def cells(result: Result | None) -> tuple[object, ...]:
    """Registers, occupancy, relative L2 and verdict of one kernel; of a program the most registers and the least
    occupancy of its kernels."""
    if result is None:
        return ("", "", "", "")
    binaries, error = result.binaries, result.relative_l2
    ok = result.validation.ok
    return (
        str(max(binary.resources.registers for binary in binaries)) if binaries else "-",
        f"{min(binary.occupancy.fraction for binary in binaries):.0%}" if binaries else "-",
        "-" if error is None else f"{error:.1e}",
        Text(mark(ok), style=mark_style(ok)),
    )


def summary(chains: Sequence[Chain], results: Sequence[Result]) -> None:
    by_place = {(r.chain.name, r.target.vendor): r for r in results}
    plans, kernels = [], []
    for chain in chains:
        cuda, hip = (by_place.get((chain.name, target.vendor)) for target in TARGETS)
        planned = (cuda or hip or make(chain, TARGETS[0])).plans
        unfused, moved = (sum(getattr(p.cost.traffic, name) for p in planned) for name in ("unfused", "moved"))
        saved = times(unfused, moved) if unfused > moved else "-"
        plans.append((chain.name, regime(planned), saved))
        kernels.append((chain.name, *cells(cuda), *cells(hip)))
    columns = ["regs>", "occ>", "rel L2>", "!"]
    heads = [f"{VENDORS[t.vendor]}\n{name}" if name != "!" else name for t in TARGETS for name in columns]
    say(table("chain!", "regime on h200", "bytes\nsaved>", rows=plans, styles={0: "bold"}), "")
    say(table("chain!", *heads, rows=kernels, styles={0: "bold"}), "")
    say(prose("rel L2: relative L2 error, with the rounding of results to f16 (2e-4) or bf16 (2e-3)", "dim"))
    say(prose("occ: the share of an SM's warps that registers and shared memory leave room for", "dim"))


def closing(results: Sequence[Result], seconds: float) -> int:
    right = sum(bool(r.validation.ok) for r in results)
    wrong = [r for r in results if r.failed]
    places = dict.fromkeys(r.validation.on for r in results if r.validation.on)
    where = " and".join(f" in the {place}" if place.startswith("emulator") else f" on {place}" for place in places)
    verdict = f"{right} of {len(results)} kernels and programs agree with their numpy references{where}"
    verdict += f"; {seconds:.0f} s in all"
    if not right and not wrong:
        verdict = f"no kernel could be run here, so none is proven; {seconds:.0f} s in all"
    say("", prose(verdict, "bold green" if right == len(results) else "bold yellow"))
    for result in wrong:
        say("", prose(f"{result.chain.name} for {result.target}:\n{result.validation.text}", "red"))
    missing = [
        text for r in results for text in (r.trouble, r.validation.text if r.validation.ok is None else "") if text
    ]
    for text in dict.fromkeys(missing):
        say("", prose(text, "yellow"))
    say("", prose("next: fusegen explain specs/rmsnorm.py, fusegen --help, README.md, docs/"))
    return 1 if wrong else 0 if right else 3


def main(arguments: Sequence[str]) -> int:
    start = time.perf_counter()
    folder = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent / "specs"
    chains = load_chains(folder)
    featured = next((c for c in chains if c.name == FEATURED), chains[0])

    chapter("this machine")
    for vendor in examine().vendors:
        say(prose(str(vendor), "green" if vendor.ready else "yellow"))

    chapter("fusion chains are small Python functions")
    show_chains(chains)
    say("")
    show_code(fitting(Path(featured.graph.where.file).read_text(encoding="utf-8")), "python")

    chapter("the planner tiles and costs them; templates emit CUDA and HIP one can read")
    show_code(fitting(excerpt(render(plan(featured.graph, H200)).text)), "cuda")

    with tempfile.TemporaryDirectory() as out:
        files = golden.flat(golden.all_emitted(chains, TARGETS, golden.beyond))
        golden.write(files, Path(out))
        say("", prose(f"{len(files)} files emitted: kernels and a numpy reference for each chain and vendor"))

    chapter(f"compiled for {' and '.join(map(str, TARGETS))}, run, compared with references")
    results: list[Result] = []
    with progress(len(chains) * len(TARGETS)) as bar:
        bar.step("compiling and validating")
        for result in make_all(chains):
            results.append(result)
            bar.step("compiling and validating")
            ok = result.validation.ok
            bar.say(f"{mark(ok):<6}{result.chain.name}  {result.target}", style=mark_style(ok))

    chapter("summary")
    summary(chains, results)
    return closing(results, time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
