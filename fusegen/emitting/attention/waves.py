"""What kernels of attention say of AMD's matrix units: how a lane loads what it multiplies, and rounds its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.dialect import UNROLL
from fusegen.planner.pieces import VECTOR_BYTES
from fusegen.targets.atoms import Atom

# Of 16 keys a lane of RDNA 3 has every other weight, and multiplies all of them: the lane 16 apart has the others
WOVEN = (
    "struct Words {{",
    "  unsigned at[{words}];",
    "}};",
    "const Words own = __builtin_bit_cast(Words, v);  // of every other key; another lane has those between",
    "const bool later = threadIdx.x % 32 >= 16;",
    "struct Woven {{",
    "  unsigned at[2 * {words}];",
    "}};",
    "Woven woven;",
    UNROLL,
    "for (int i = 0; i < {words}; ++i) {{",
    "  const unsigned other = __float_as_uint(partner(__uint_as_float(own.at[i]), 16));",
    "  const unsigned even = later ? other : own.at[i], odd = later ? own.at[i] : other;",
    "  woven.at[2 * i] = (even & 0xffffu) | odd << 16;",
    "  woven.at[2 * i + 1] = even >> 16 | (odd & 0xffff0000u);",
    "}}",
    "return __builtin_bit_cast(Half, woven);",
)


def unit(atom: Atom, element: str) -> Mapping[str, Any]:
    """The words of a unit, for factors of 16 bits. `call` takes the right factor, the left one and the sums, and each
    instruction of a fragment its part of both."""
    chunk = VECTOR_BYTES // atom.factors.bytes
    pieces = atom.k // chunk if atom.repeated else 1
    groups = 1 if atom.repeated else atom.fragment.lanes // atom.rows  # of lanes, which have a part of K each
    vec = f"Vec<{element}, {chunk}>"
    return {
        "part": atom.kind,
        "type": atom.word,
        "parts": atom.instructions,
        "paired": atom.kind == "mfma" and atom.instructions == 1,  # two tiles of keys are as deep as an instruction
        "k": atom.k,
        "half": atom.lane_words,
        "sums": atom.accumulators,
        "lane_elements": pieces * chunk,
        "lane_bytes": pieces * VECTOR_BYTES,
        "load": ["return *reinterpret_cast<const Fragment*>(from);"] if pieces == 1 else [
            "struct Pieces {",
            f"  {vec} at[{pieces}];",
            "};",
            f"using Piece = const {vec}*;",
            "const Pieces v = {{" + ", ".join(f"*reinterpret_cast<Piece>(from{f' + {at * chunk}' if at else ''})"
                                            for at in range(pieces)) + "}};",
            "return __builtin_bit_cast(Fragment, v);",
        ],
        "at_k": f" + lane / {atom.rows} * {chunk}" if groups > 1 else "",
        "at_key": f" + lane / {atom.rows} * {atom.accumulators}" if groups > 1 else "",  # of 16, in a line of values
        "load_values": "load_fragment" if atom.kind == "wmma" else "load_half",
        "of_values": ".part[0]" if atom.kind == "wmma" else "",
        "round": [line.format(words=atom.accumulators // 2) for line in WOVEN] if atom.repeated else [
            "return *reinterpret_cast<const Half*>(&v);"
        ],
        "call": lambda right, left, sums: f"{atom.instruction}({atom.arguments.format(left, right, sums)})",
    }  # fmt: skip
