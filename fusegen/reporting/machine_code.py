"""The mix of a kernel's instructions, counted in its disassembly: each place once, however often it runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from fusegen.reporting.state import Share

SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[\w.]+)?)", re.MULTILINE)
GCN = re.compile(r"^\s*[0-9a-f]+  ([a-z]\w*)", re.MULTILINE)
MOST_NAMES = 12  # of a kind, the most frequent first

# The first pattern that a name begins with; NVIDIA's names are those of the CUDA Binary Utilities' instruction tables.
NVIDIA_KINDS = (
    ("matrix products", r"[HIQBDO]?G?MMA|WARPGROUP|UTC\w*MMA"),
    ("global memory", r"LDG|STG|ATOMG|REDG|RED$|ATOM$|LD$|ST$|UBLKCP|UTMA|UBLKRED|CCTL"),
    ("shared memory", r"LDS|STS|ATOMS|LDGSTS|SYNCS|STAS|LDGDEPBAR|DEPBAR|UCGABAR|LDSM|STSM"),
    ("local memory", r"LDL|STL"),
    ("constants", r"LDC|ULDC|LDCU"),
    ("special functions", r"MUFU|RRO"),
    ("between threads", r"SHFL|VOTE|MATCH|REDUX|BAR|WARPSYNC|MEMBAR|FENCE|ERRBAR|NANOSLEEP|ELECT"),
    ("flow", r"BRA|BRX|BREAK|BSYNC|BSSY|BMOV|JMP|EXIT|RET|CALL|NOP|YIELD|KILL|ACQBULK|PREEXIT"),
    ("conversions", r"[FI]2|FRND"),
    ("f32 and f16 arithmetic", r"F[A-Z]+|H[A-Z]+2"),
    ("integers and addresses", r"."),
)  # fmt: skip
AMD_KINDS = (
    ("matrix products", r"v_s?mfma|v_wmma|v_swmmac"),
    ("spills of registers", r"v_accvgpr|scratch_"),
    ("global memory", r"global_|buffer_|flat_"),
    ("shared memory", r"ds_"),
    ("constants", r"s_load|s_buffer_load"),
    ("special functions", r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_"),
    ("conversions", r"v_cvt|v_pack"),
    ("f32 and f16 arithmetic", r"v_(pk_)?\w*_(f16|f32|f64|bf16)"),
    ("flow", r"s_(c?branch|endpgm|waitcnt|barrier|nop|sleep|setpc|getpc|swappc|wait|clause|delay)"),
    ("scalars", r"s_"),
    ("integers and addresses", r"."),
)  # fmt: skip


def mix(text: str, vendor: str) -> tuple[Share, ...]:
    """What a disassembly is made of, the largest kind first."""
    pattern, kinds = (SASS, NVIDIA_KINDS) if vendor == "cuda" else (GCN, AMD_KINDS)
    found: dict[str, Counter[str]] = {}
    for match in pattern.finditer(text):
        name = match[1]
        kind = next(kind for kind, begins in kinds if re.match(begins, name))
        found.setdefault(kind, Counter())[name] += 1
    shares = [Share(kind, names.total(), most(names.items())) for kind, names in found.items()]
    return tuple(sorted(shares, key=lambda share: (-share.count, share.kind)))


def most(names: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The most frequent ones, and the rest together."""
    ordered = sorted(names, key=lambda pair: (-pair[1], pair[0]))
    rest = sum(count for _, count in ordered[MOST_NAMES:])
    return {**dict(ordered[:MOST_NAMES]), **({"others": rest} if rest else {})}
