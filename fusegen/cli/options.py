"""What several verbs ask for in the same words: a chain, a target, sizes, a storage type, JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass
class Launches:
    """How a program's kernels are launched, whichever verb it is: `fusegen --no-dependent-launch VERB`."""

    dependent: bool = True


launches = Launches()

Spec = Annotated[
    str, typer.Argument(metavar="SPEC", help="A file with one chain, or file.py:chain.", show_default=False)
]
Specs = Annotated[
    list[str], typer.Argument(metavar="SPEC", help="Files, folders, or file.py:chain.", show_default=False)
]
TargetName = Annotated[
    str | None,
    typer.Option("--target", "-t", metavar="T", show_default=False,
                 help="cuda:h200, cuda:sm_80, hip:mi300x, hip:gfx90a; without it, the GPU present, else cuda:h200."),
]  # fmt: skip
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="M=5", show_default=False, help="A size of the chain; may be given again."),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="D", show_default=False, help="Store floating-point arrays as f16, bf16 or f32."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
