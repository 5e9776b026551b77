"""What `doctor` says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fusegen.cli.doctor import Examination
from fusegen.cli.showing import prose, say, table

STYLES = {"ok": "green", "optional": "dim", "missing": "yellow", "broken": "bold red"}
MARKS = {"ok": "ok", "optional": "-", "missing": "missing", "broken": "broken"}


def facts(found: Examination) -> dict[str, Any]:
    vendors = [{**asdict(vendor), "ready": vendor.ready} for vendor in found.vendors]
    return {"ok": found.ready, "checks": [asdict(check) for check in found.checks], "vendors": vendors}


def show(found: Examination) -> None:
    from rich.text import Text

    rows = [
        (Text(MARKS[check.state], style=STYLES[check.state]), check.name, check.found, check.advice)
        for check in found.checks
    ]
    say(table("", "what!", "found", "to get it, or more of it", rows=rows, styles={1: "bold"}), "")
    for vendor in found.vendors:
        say(prose(str(vendor), "green" if vendor.ready else "yellow"))
    if not found.ready:
        say(prose("so no kernel can be both compiled and run here; the commands above change that", "bold red"))
