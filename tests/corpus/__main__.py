"""python -m tests.corpus [--all] [--target NAME] [NAME ...]: which chains plan; with --all also which are right."""

from __future__ import annotations

import argparse
import sys
import traceback

import fusegen
from fusegen.errors import FusegenError
from fusegen.validation import validate
from tests.corpus import CASES, Case
from tests.corpus.planning import planned


def judged(case: Case, target: str) -> str:
    """What is wrong with a chain's kernels; empty if nothing. A fault on the way there is one too."""
    try:
        report = validate(fusegen.compile(case.traced(), target, on="emulator", validate=False), quick=True)
    except Exception:
        return traceback.format_exc()
    return "" if report.ok else str(report)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("names", nargs="*", help="chains of the corpus; all of them unless named")
    ask.add_argument("--all", action="store_true", help="validate each in the emulator")
    ask.add_argument("--target", default="cuda:h200")
    said = ask.parse_args()
    wanted = [case for case in CASES.values() if not said.names or case.name in said.names]
    refused, wrong = 0, 0
    for case in wanted:
        try:
            planned(case, said.target)
        except FusegenError as error:
            refused += 1
            print(f"refused  {case.kind}/{case.name}: {error}")
            continue
        if said.all or said.names:
            verdict = judged(case, said.target)
            wrong += bool(verdict)
            print(f"{'WRONG' if verdict else 'right'}    {case.kind}/{case.name}", verdict)
    count = len(wanted)
    print(f"{count - refused} of {count} chains plan: {(count - refused) / count:.1%}; {wrong} are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
