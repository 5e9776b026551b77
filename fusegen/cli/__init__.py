"""The command line: each verb is about ten lines over the public API.

    app        the verbs, their options and help
    asking     the user's words (SPEC, --target, --set, --dtype) as chains and targets
    showing    text for people on a terminal, plain text in a pipe, JSON for scripts; errors and exit codes
    plans      what `list`, `plan` and `explain` say
    builds     what `compile` and `validate` do and say
    inspecting what `inspect` shows
    health     what `doctor` says
    caching    what `cache` shows and removes

Exit codes: 0 all is well, 1 a kernel is wrong or a golden file drifted, 2 the request is wrong, 3 something is missing
on this machine, 70 a bug in fusegen, 74 the output can't be written.
"""

from fusegen.cli.app import app, main

__all__ = ["app", "main"]
