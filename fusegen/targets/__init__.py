"""Targets by name: `target("cuda:h200")`, `target("hip:gfx942")`, `target("cuda")`.

A name is a vendor and, after a colon, a model or an architecture. An architecture stands for its best-known model's
facts; where a model is compiled for a narrower architecture (h200 for `sm_90a`), the plain one (`cuda:sm_90`) keeps its
own name. The vendor alone means its default model. `target(t.name)` is `t` for every target there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from fusegen.errors import RequestError
from fusegen.targets import cuda, hip, rdna
from fusegen.targets.base import Spelling, Target
from fusegen.targets.cuda import A100, B200, B300, H100, H200, L40S, RTX5090, RTXPRO6000
from fusegen.targets.hip import MI210, MI250, MI250X, MI300A, MI300X, MI325X, MI350X, MI355X
from fusegen.targets.rdna import R9700, RX7900XTX, RX9070XT, W7900

__all__ = [
    "A100",
    "B200",
    "B300",
    "GOLDEN_SPECS",
    "GOLDEN_TARGETS",
    "H100",
    "H200",
    "KEPT_TARGETS",
    "L40S",
    "MI210",
    "MI250",
    "MI250X",
    "MI300A",
    "MI300X",
    "MI325X",
    "MI350X",
    "MI355X",
    "R9700",
    "RTX5090",
    "RTXPRO6000",
    "RX7900XTX",
    "RX9070XT",
    "TARGETS",
    "W7900",
    "Spelling",
    "Target",
    "target",
]

TARGETS: Mapping[str, Target] = {t.name: t for t in (*cuda.MODELS, *hip.MODELS, *rdna.MODELS)}
"""Every model, by name."""

GOLDEN_TARGETS: tuple[Target, ...] = (H200, A100, MI300X, MI355X)
"""The targets whose emitted sources are committed under `generated/`, of every spec."""

GOLDEN_SPECS: Mapping[str, frozenset[str]] = {
    B200.name: frozenset({"fp8_gemm", "gemm_bias_gelu", "gemm_swiglu", "grouped_swiglu", "i8_gemm", "lora"})
}
"""Of these targets, by name, those of a few specs, whose kernels differ in kind from other targets'."""

KEPT_TARGETS: tuple[Target, ...] = (*GOLDEN_TARGETS, *map(TARGETS.__getitem__, GOLDEN_SPECS))
"""Both."""

NAMES: Mapping[str, Target] = {
    **TARGETS,
    **{f"cuda:{arch}": t for arch, t in cuda.ARCHES.items()},
    **{f"hip:{arch}": t for arch, t in (*hip.ARCHES.items(), *rdna.ARCHES.items())},
    "cuda": cuda.DEFAULT,
    "hip": hip.DEFAULT,
}
"""Everything that `target` accepts."""


def target(name: str | Target) -> Target:
    """The target of that name, in any case. Raises RequestError for a name that is not known, and says which are."""
    if isinstance(name, Target):
        return name
    if not isinstance(name, str):
        raise RequestError(f"{name!r} is not a target; name one, as in fusegen.target('cuda:h200')")
    if found := NAMES.get(name.strip().lower()):
        return found
    lines = [f"{name!r} is not a target"]
    if guesses := suggestions(name.strip().lower()):
        lines.append(f"  did you mean {' or '.join(guesses)}?")
    lines += [
        f"  {vendor}: {', '.join(n.partition(':')[2] for n in NAMES if n.startswith(vendor + ':'))}"
        for vendor in ("cuda", "hip")
    ]
    lines.append("  write the vendor first, as in cuda:h200 or hip:gfx942; the vendor alone means its default model")
    raise RequestError("\n".join(lines))


def suggestions(name: str) -> list[str]:
    """Up to two known names near `name`; a name that lacks its vendor (`h200`) or has the wrong one counts as near."""
    model = name.rpartition(":")[2]
    if exact := [known for known in NAMES if known.partition(":")[2] == model]:
        return exact
    return (
        get_close_matches(name, NAMES, n=2, cutoff=0.6)
        or [known for known in NAMES if get_close_matches(model, [known.partition(":")[2]], cutoff=0.6)][:2]
    )
