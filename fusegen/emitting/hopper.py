"""What Hopper's instructions are spelled with: functions that move boxes, and functions of one wgmma each.

templates/parts/hopper/ has their texts. PTX ISA, "cp.async.bulk.tensor" and "wgmma.mma_async".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fusegen.language.types import f32
from fusegen.targets.atoms import Atom

COORDINATES = ("x", "y", "z", "w", "v")


def box_functions(called: Iterable[tuple[str, int]]) -> Mapping[str, list[Mapping[str, Any]]]:
    """Functions that move boxes, by name; `called`: names, and of how many axes their tensors are."""
    made: dict[str, list[Mapping[str, Any]]] = {
        "copy_box": [], "copy_box_to_all": [], "store_box": [], "store_box_evict_first": [],
    }  # fmt: skip
    for name, axes in sorted(set(called)):
        first = 2 if name.startswith("store_box") else 3  # of the coordinates among the instruction's operands
        made[name].append(
            {
                "axes": axes,
                "names": ", ".join(COORDINATES[:axes]),
                "parameters": ", ".join(f"int {n}" for n in COORDINATES[:axes]),
                "braced": f"{{{', '.join(f'%{first + i}' for i in range(axes))}}}",
                "operands": ", ".join(f'"r"({n})' for n in COORDINATES[:axes]),
                "next": first + axes,
            }
        )
    return made


def wgmma(
    name: str, what: str, atom: Atom, cols: int, transposed: str, *, registers: bool, always_adds: bool = False
) -> Mapping[str, Any]:
    """The function `name` of one wgmma with so many columns. Its operands by number: sums, the left factor's registers
    or its descriptor, the right factor's descriptor, and whether sums are added to; `transposed` ends the instruction.
    """
    count = cols // 2  # sums of a thread
    constraint = constraint_of(atom)
    left = [f"%{count + i}" for i in range(4 if registers else 1)]
    rows = [range(first, min(first + 16, count)) for first in range(0, count, 16)]
    fours = [range(first, min(first + 4, count)) for first in range(0, count, 4)]
    given = [f'"r"(left[{i}])' for i in range(4)] if registers else ['"l"(left)']
    add = [] if always_adds else ['"r"(static_cast<int>(add))']
    floats = atom.sum_type is f32
    return {
        "name": name,
        "what": what,
        "sum_type": "float" if floats else "int",
        "count": count,
        "rows": atom.rows,
        "cols": cols,
        "k": atom.k,
        "left": "const unsigned (&left)[4]" if registers else "unsigned long long left",
        "asks_add": not always_adds,
        "add": "1" if always_adds else f"%{count + len(left) + 1}",
        "sums": [", ".join(f"%{i}" for i in row) + (", " if row.stop < count else "") for row in rows],
        "factors": f"{'{' + ', '.join(left) + '}' if registers else left[0]}, %{count + len(left)}",
        "outputs": [
            ", ".join(f'"+{constraint}"(sums[{i}])' for i in four) + ("," if four.stop < count else "")
            for four in fours
        ],
        "inputs": ", ".join([*given, '"l"(right)', *add]),
        "types": ".".join(["f32" if floats else "s32", *atom.words]),
        "scales": ", 1, 1" if floats else "",  # whole numbers have none
        "transposed": transposed,
    }


def constraint_of(atom: Atom) -> str:
    """The letter of a sum's register in inline assembly."""
    return "f" if atom.sum_type is f32 else "r"
