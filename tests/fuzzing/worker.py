"""A process that runs seeds: one a line on standard input, one line of JSON for each on standard output.

It says that it is ready once the emulator's runtime is built, so that others started then find it in the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

from fusegen.emulator import EmulatorUnavailable, toolchain
from tests.fuzzing.trial import run_trial


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a spec or a compiler prints is no answer
    for check in (False, True):
        with contextlib.suppress(EmulatorUnavailable):  # each trial will say so
            toolchain.build_runtime(toolchain.compiler_for(check=check), check=check, cache=None)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        outcome = run_trial(int(line), "--any" in sys.argv)
        print(json.dumps(outcome.json()), file=answers, flush=True)


if __name__ == "__main__":
    main()
