"""What the loops of shipped products for AMD take on a simulated compute unit: writes the table of docs/simulated.md.

    python benchmarks/simulated.py            # compiles each by hiprtc; needs no GPU, and no AMD GPU was measured
    python benchmarks/simulated.py --check    # the exit status is 1 where the table would change

A row is a kernel, a spec's only one or one of a program's, whose loop has matrix instructions. Run from the repository
root.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fusegen.cli import programs  # noqa: E402
from fusegen.compiling import compiler_version  # noqa: E402
from fusegen.errors import NoPlan, RequestError  # noqa: E402
from fusegen.language.spec import Chain, load_chains  # noqa: E402
from fusegen.measuring.simulating import simulated  # noqa: E402
from fusegen.measuring.simulation import Simulated  # noqa: E402
from fusegen.pipeline import build_candidates  # noqa: E402
from fusegen.planner.programs.side_by_side import JoinedPlan  # noqa: E402
from fusegen.targets import MI300X, MI355X, Target  # noqa: E402

PAGE = ROOT / "docs" / "simulated.md"
MARKED = re.compile(r"(<!-- simulated -->\n)(.*?)(<!-- end of simulated -->\n)", re.DOTALL)
ON = (MI300X, MI355X)


def kernels(chain: Chain, target: Target) -> Iterator[tuple[str, str, Simulated]]:
    """Of a chain at its own sizes: each kernel's name and configuration, and its loop, where that multiplies."""
    try:
        programs.program_of(chain, target)
    except NoPlan:
        return
    for own in programs.units(chain, target):
        if isinstance(own, JoinedPlan):
            continue
        built = build_candidates(own)
        assert built.binary is not None
        try:
            loop = simulated(built.source.plan, built.binary)
        except RequestError:  # it has no loop, or none that is known
            continue
        if loop.products:
            yield own.graph.name, built.source.plan.configuration, loop


def cells(configuration: str, loop: Simulated) -> tuple[str, ...]:
    busy = [f"{min(1.0, loop.busy[pipe]):.0%}" for pipe in ("matrix", "LDS", "vector", "memory")]
    why = next((f"{name} {share:.0%}" for name, share in loop.waiting.items() if share >= 0.005), "nothing")
    return (configuration, f"{loop.waves}", f"{loop.cycles:,.0f}", *busy, why)


def table() -> str:
    """Markdown, a part for each GPU."""
    lines = [f"Compiled by {compiler_version('hip')}, at the specs' own sizes. Simulated, not measured.", ""]
    head = ["kernel", "configuration", "waves", "cycles a turn", "matrix", "LDS", "vector", "memory", "waves wait for"]
    for target in ON:
        lines += [f"{target.name}:", "", f"| {' | '.join(head)} |", "|" + "---|" * 2 + "--:|" * 6 + "---|"]
        alike: dict[tuple[str, ...], list[str]] = {}
        for chain in track(load_chains(ROOT / "specs"), description=target.name):
            for name, configuration, loop in kernels(chain, target):
                alike.setdefault(cells(configuration, loop), []).append(f"`{name}`")
        lines += [f"| {' | '.join([', '.join(names), *of])} |" for of, names in alike.items()]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    made = MARKED.sub(lambda found: found[1] + table() + found[3], text)
    if "--check" in sys.argv[1:]:
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
