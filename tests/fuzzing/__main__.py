"""`python -m tests.fuzzing --seeds 0-2000 [--any] [--jobs 2] [--log FILE] [--show]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.fuzzing.report import WELL, followed, share_unjudged, summary
from tests.fuzzing.workers import LIMIT_S, run_seeds


def seeds_of(text: str) -> list[int]:
    """`1290`, `0-2000` (2000 seeds, the end not among them), or several of these with commas between."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, end = part.strip().partition("-")
        if not first.isdecimal() or (dash and not end.isdecimal()):
            raise argparse.ArgumentTypeError(f"{part!r} is no seed and no range; write 1290, 0-2000 or 3,7,100-120")
        found += range(int(first), int(end)) if dash else [int(first)]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} holds no seed")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description="Random chains, judged independently.")
    parser.add_argument("--seeds", type=seeds_of, required=True, help="0-2000 (the end not among them), or 3,7,100-120")
    parser.add_argument("--any", action="store_true", help="any of the planner's candidates, not its first choice")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (all cores)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one seed (%(default)s)")
    parser.add_argument("--log", type=Path, default=Path("fuzz.jsonl"), help="a line of JSON a seed (%(default)s)")
    parser.add_argument("--show", action="store_true", help="print the seeds' chains and results, in this process")
    chosen = parser.parse_args(arguments)
    return show(chosen.seeds, chosen.any) if chosen.show else run(chosen)


def show(seeds: Sequence[int], any_candidate: bool) -> int:
    """Each seed's text, and what came of it."""
    from tests.fuzzing.seeds import case
    from tests.fuzzing.trial import run_trial

    well = True
    for seed in seeds:
        print(case(seed).draft.text, flush=True)  # before anything can die of it
        outcome = run_trial(seed, any_candidate)
        facts = outcome.json()
        facts.pop("text", None)
        for what, value in facts.items():
            print(f"{what:>10}  {value if isinstance(value, str) else json.dumps(value)}")
        print()
        well &= outcome.well
    return 0 if well else 1


def run(chosen: argparse.Namespace) -> int:
    console = Console()
    with tempfile.TemporaryDirectory(prefix="fusegen-fuzz-") as folder, chosen.log.open("w", encoding="utf-8") as log:
        environment = {  # nothing is remembered from before, and nothing of the user's cache gives way
            "FUSEGEN_CACHE_DIR": folder, "FUSEGEN_CACHE_SIZE": "256M", "FUSEGEN_DATABASE": f"{folder}/none.db",
            **os.environ,
        }  # fmt: skip
        rows = run_seeds(
            chosen.seeds, jobs=chosen.jobs, any_candidate=chosen.any, limit_s=chosen.limit, environment=environment
        )
        found = followed(rows, len(chosen.seeds), log, console)
    console.print(summary(found))
    console.print(f"{share_unjudged(found)}; {chosen.log}")
    return 0 if all(row["result"] in WELL for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
