"""What several verbs ask for in the same words: a chain, a target, sizes, a storage type, JSON."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass
class Launches:
    """How a program's kernels are launched, whichever verb it is: `fusegen --no-dependent-launch VERB`."""

    dependent: bool = True


launches = Launches()


def specs_like(incomplete: str) -> list[str]:
    """Files and folders that a shell completes SPEC with; behind `file.py:`, the chains that the file's text has."""
    file, colon, chain = incomplete.partition(":")
    try:
        if colon:
            text = Path(file).read_text(encoding="utf-8")
            found = re.findall(r"^@chain\b.*?^def (\w+)", text, re.DOTALL | re.MULTILINE)
            return [f"{file}:{name}" for name in found if name.startswith(chain)]
        folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".py" or path.is_dir())
    except (OSError, UnicodeDecodeError):
        return []
    names = [f"{path}/" if path.is_dir() else str(path) for path in paths if not path.name.startswith((".", "__"))]
    return [name for name in names if name.startswith(incomplete)]


def targets_like(incomplete: str) -> list[str]:
    from fusegen.targets import NAMES

    return sorted(name for name in NAMES if name.startswith(incomplete))


def several_targets_like(incomplete: str) -> list[str]:
    """The last of those between commas, behind the others."""
    others, comma, last = incomplete.rpartition(",")
    return [f"{others}{comma}{name}" for name in targets_like(last)]


def sizes_like(ctx: typer.Context, incomplete: str) -> list[str]:
    """`M=`, of the dims that the specs before it declare; of files that are read, and not run."""
    found: dict[str, None] = {}
    for spec in ctx.args:  # words that no parameter has taken yet: while a shell completes, arguments are among them
        with suppress(OSError, UnicodeDecodeError):
            text = Path(spec.partition(":")[0]).read_text(encoding="utf-8")
            for names in re.findall(r"\bdims\(\s*[\"']([^\"']*)[\"']", text):
                found |= dict.fromkeys(names.replace(",", " ").split())
    return [f"{name}=" for name in found if f"{name}=".startswith(incomplete)]


Spec = Annotated[
    str,
    typer.Argument(metavar="SPEC", help="A file with one chain, or file.py:chain.", show_default=False,
                   autocompletion=specs_like),
]  # fmt: skip
Specs = Annotated[
    list[str],
    typer.Argument(metavar="SPEC", help="Files, folders, or file.py:chain.", show_default=False,
                   autocompletion=specs_like),
]  # fmt: skip
TargetName = Annotated[
    str | None,
    typer.Option("--target", "-t", metavar="T", show_default=False, autocompletion=targets_like,
                 help="cuda:h200, cuda:sm_80, hip:mi300x, hip:gfx90a; without it, the GPU present, else cuda:h200."),
]  # fmt: skip
TargetNames = Annotated[
    str | None,
    typer.Option("--target", "-t", metavar="T[,T]", show_default=False, autocompletion=several_targets_like,
                 help="As cuda:h200, or several: cuda:h200,hip:mi300x; without it, the GPU present, else cuda:h200."),
]  # fmt: skip
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", show_default=False,
                 help="Spread the work over a Ray cluster: HOST:PORT, auto, ray://HOST:10001, or local."),
]  # fmt: skip
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", metavar="N", min=1, show_default=False,
                 help="Spread the work over so many processes of this machine."),
]  # fmt: skip
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="M=5", show_default=False, autocompletion=sizes_like,
                 help="A size of the chain, or several: M=1,16,256; may be given again."),
]  # fmt: skip
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="D", show_default=False, help="Store floating-point arrays as f16, bf16 or f32."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
