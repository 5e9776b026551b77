"""Every shipped spec at its own sizes, and with other numbers of rows: what golden sources and small tests do not show.

    python -m tests.own_sizes                               plans, emits and compiles for cuda:h200, without a GPU
    python -m tests.own_sizes --target hip:mi300x mlp lora  these alone, for another target
    python -m tests.own_sizes --on gpu --jobs 14            compiles as users do, validated on the GPU that is here

Rows are the first dim that a spec names. Prints what is wrong, with exit code 1, what took long, and which candidates
the gate passed over: one compiler puts on the stack what another keeps in registers, so it is worth a run with each. A
spec that a target has no plan for is refused, which is well.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import fusegen
from fusegen.cli.programs import units
from fusegen.errors import FusegenError, NoPlan
from fusegen.pipeline import Verdict, build_candidates, build_joined
from fusegen.planner.programs.side_by_side import JoinedPlan
from fusegen.runtime import Program
from fusegen.targets import target as target_named
from tests.specs import SHIPPED

ROWS = (1, 33, 77, 1000)
SLOW_S = 30.0
Job = tuple[str, int, str, str]  # a spec, its rows (0: its own), the target, and what runs it


def jobs(names: Sequence[str], rows: Sequence[int], target: str, on: str) -> Iterator[Job]:
    for count in (0, *rows):
        for name in names or SHIPPED:
            yield name, count, target, on


def outcome(job: Job) -> tuple[Job, str, str, float]:
    """`right`, `refused` or what went wrong, in words, and seconds."""
    name, rows, target, on = job
    chain = SHIPPED[name]
    chain = chain.at(**{next(iter(chain.graph.sizes)): rows}) if rows else chain
    started = time.perf_counter()
    try:
        found, said = built(chain, target) if on == "none" else validated(chain, target, on)
    except NoPlan as error:
        found, said = "refused", str(error).splitlines()[0]
    except FusegenError as error:
        found, said = "wrong", f"{type(error).__name__}: {error}"
    except Exception:
        found, said = "crash", traceback.format_exc()
    return job, found, said, time.perf_counter() - started


def built(chain: fusegen.Chain, target: str) -> tuple[str, str]:
    found: list[Verdict] = []
    for unit in units(chain, target_named(target)):
        found += (build_joined(unit) if isinstance(unit, JoinedPlan) else build_candidates(unit)).verdicts
    return "right", passed_over(found)


def validated(chain: fusegen.Chain, target: str, on: str) -> tuple[str, str]:
    made = fusegen.compile(chain, target, on=on, tuned=False)
    if made.report is None or not made.report.ok or made.report.unjudged:
        return "wrong", str(made.report)
    kernels = made.kernels if isinstance(made, Program) else [made]
    return "right", passed_over(verdict for kernel in kernels for verdict in getattr(kernel, "gate", ()))


def passed_over(verdicts: Iterable[Verdict]) -> str:
    return "\n".join(
        f"  {found.plan.name} {found.plan.configuration}: {found.reason}" for found in verdicts if not found.passed
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="SPEC", help="of these alone")
    parser.add_argument("--target", default="cuda:h200")
    parser.add_argument("--on", default="none", choices=("none", "gpu", "emulator"), help="what runs it; none compiles")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, metavar="N")
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    wanted = parser.parse_args()
    if unknown := [name for name in wanted.names if name not in SHIPPED]:
        parser.error(f"no spec is called {', '.join(unknown)}: `fusegen list` names them")
    counts: Counter[str] = Counter()
    others = 0  # first choices
    with ProcessPoolExecutor(wanted.jobs) as pool:
        waiting = [pool.submit(outcome, job) for job in jobs(wanted.names, wanted.rows, wanted.target, wanted.on)]
        for done in as_completed(waiting):
            (name, rows, *_), found, said, seconds = done.result()
            counts[found] += 1
            where = f"{name} of {rows} rows" if rows else name
            if found in ("wrong", "crash"):
                print(f"{where}: {found}\n{said}\n", flush=True)
            elif found == "right" and said:
                others += 1
                print(f"{where}: passed over\n{said}\n", flush=True)
            elif seconds > SLOW_S:
                print(f"{where}: {found}, in {seconds:.0f} s", flush=True)
            if sys.stderr.isatty():
                print(f"\r{counts.total()} of {len(waiting)}", end="", file=sys.stderr, flush=True)
    more = f"; of {others} the gate passed over candidates" if others else ""
    print(", ".join(f"{count} {found}" for found, count in counts.items()) + more)
    return 1 if counts["wrong"] or counts["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
