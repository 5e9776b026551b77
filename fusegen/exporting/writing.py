"""An export as files: a library in C that needs neither Python nor fusegen.

include/    fusegen.h, and LIBRARY.h with a function for each chain
src/        a table of launches for each chain, what reads it, and what calls the vendor's driver
kernels/    machine code: a fatbin for each kernel and layout (NVIDIA), a code object for each architecture (AMD)
sources/    the kernels as text, to be read
reference/  the chains in numpy
test/       a program that runs each chain on recorded inputs, and compares
"""

from __future__ import annotations

import hashlib
import json
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from io import BytesIO
from itertools import chain as chained
from typing import Any

import numpy as np

from fusegen.emitting.rendering import environment
from fusegen.errors import RequestError
from fusegen.exporting.collecting import AS_PLANNED
from fusegen.exporting.facts import Exported, Launch, Unit, Variant
from fusegen.exporting.fatbin import fatbin
from fusegen.exporting.recording import Recorded
from fusegen.exporting.spelling import c_size, quoted
from fusegen.language.graph import Tensor
from fusegen.language.sizes import dims_in
from fusegen.language.types import DTYPES, Dim, DType, bf16, f8e4m3, f8e5m2, f16, f32, i8, i32, tf32, u8, u32
from fusegen.version import PACKAGE, VERSION

MOST = {  # what the launcher in C has room for
    "FG_RANK": 12,  # axes of an array
    "FG_WHOLE": 96,  # arrays of a call, with those between kernels
    "FG_ARRAYS": 64,  # of a launch
    "FG_EXTENTS": 8,
    "FG_DIMS": 8,
    "FG_PARTS": 8,
    "FG_SIZES": 16,
    "FG_VALUES": 32,
    "FG_NAMES": 32,  # dims
    "FG_SLOTS": 160,  # arguments of a kernel
    "FG_MAPS": 12,
    "FG_LAUNCHES": 48,
    "FG_BETWEEN": 48,
    "FG_PAIRS": 32,
    "FG_ALIGNMENT": 256,  # bytes: where tensors of the workspace begin
}
MAP_TYPES: Mapping[DType, str] = {
    **dict.fromkeys((f8e4m3, f8e5m2, i8, u8), "0 /* u8 */"), f16: "6 /* f16 */", f32: "7 /* f32 */",
    bf16: "9 /* bf16 */", tf32: "11 /* tf32 */",
}  # fmt: skip
SCALARS: Mapping[DType, tuple[str, str]] = {f32: ("float", "f"), i32: ("int32_t", "i"), u32: ("uint32_t", "u")}
WORDS_OF_C = """
auto break case char const continue default do double else enum extern float for goto if inline int long register
restrict return short signed sizeof static struct switch typedef union unsigned void volatile while bool true false
class delete explicit export friend mutable namespace new operator private protected public template this throw try
typename using virtual NULL errno stdin stdout stderr unix linux main
stream workspace workspace_bytes given numbers fusegen_message
"""  # and of C++, and of the functions that are written
TAKEN = frozenset(WORDS_OF_C.split())
NOTICE = f"Written by fusegen {VERSION}. SPDX-License-Identifier: Apache-2.0"


@dataclass(frozen=True, slots=True)
class Embedded:
    """A file of machine code and the symbol that it has in the library."""

    name: str
    symbol: str
    vendor: str
    data: bytes


def files_of(library: str, chains: Sequence[Exported], records: Mapping[str, Recorded]) -> dict[str, bytes]:
    """Every file by its path. Raises RequestError for names that C does not take, and for what tables can't hold."""
    need_names(library, chains)
    for one in chains:
        need_room(one)
    embedded = {one.name: embedded_of(one) for one in chains}
    vendors = sorted({unit.target.vendor for one in chains for unit in one.units})
    common: dict[str, Any] = {
        "library": library,
        "notice": NOTICE,
        "chains": chains,
        "vendors": vendors,
        "limits": MOST,
        "types": [t for t in DTYPES.values() if not t.packed],
        "records": records,
        "embedded": list(dict.fromkeys(file for one in chains for file in embedded[one.name].values())),
        "archs": sorted({unit.target.arch for one in chains for unit in one.units}),
        "parameters": parameters,
        "sizes": sizes_text,
        "doc": lambda one: commented(one.graph.doc or ""),
    }
    texts = {
        "include/fusegen.h": rendered("fusegen.h", common),
        f"include/{library}.h": rendered("library.h", common),
        "src/launch.h": rendered("launch.h", common),
        "src/launch.c": rendered("launch.c", common),
        "src/embedded.S": rendered("embedded.S", common),
        **{f"src/{vendor}.c": rendered(f"{vendor}.c", common) for vendor in vendors},
        "Makefile": rendered("Makefile", common),
        "CMakeLists.txt": rendered("CMakeLists.txt", common),
        "README.md": rendered("README.md", common),
        "test/test.c": rendered("test.c", common),
        "LICENSE": license_text(),
    }
    data: dict[str, bytes] = {}
    for one in chains:
        texts[f"src/{one.name}.c"] = rendered("chain.c", {**common, **words_of(one, embedded[one.name])})
        texts[f"reference/{one.name}_reference.py"] = one.reference
        for unit in one.units:
            for variant in chained.from_iterable(launch.variants for launch in unit.launches):
                suffix = variant.code.filename.rpartition(".")[2]
                texts[f"sources/{unit.target.folder}/{stem(variant)}.{suffix}"] = variant.code.text
        data |= {f"kernels/{file.name}": file.data for file in embedded[one.name].values()}
        if one.name in records:
            data |= recorded_files(one, records[one.name])
    every = {**{path: text.encode() for path, text in texts.items()}, **data}
    every["manifest.json"] = manifest(library, chains, every)
    return dict(sorted(every.items()))


def rendered(name: str, words: Mapping[str, Any]) -> str:
    made = environment()
    made.filters |= FILTERS
    return made.get_template(f"export/{name}.j2").render(words)


# ---------------------------------------------------------------- what C can hold


def need_names(library: str, chains: Iterable[Exported]) -> None:
    for name in (library, *(one.name for one in chains)):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name in TAKEN or keyword.iskeyword(name):
            raise RequestError(f"{name!r} is no name of a function or library in C; give it one of its own, in ASCII")
    for one in chains:
        names = [t.name for t in (*one.arrays, *one.values)]
        if other := next((own for own in names if not own.isascii()), None):
            raise RequestError(f"{one.name}: the operand {other!r} is no name in C, which is in ASCII")


def need_room(one: Exported) -> None:
    """Raises RequestError where the launcher's fixed tables are too small."""
    found = {"FG_NAMES": len(one.dims)}
    for unit in one.units:
        variants = [variant for launch in unit.launches for variant in launch.variants]
        ranks = [*(len(tensor.shape) for tensor in one.arrays), *(len(tensor.shape) for tensor in unit.between)]
        shown = [s.view for launch in unit.launches for s in launch.arrays if s.view is not None]
        ranks += [len(view.shape) for view in shown] + [len(view.base) for view in shown]
        here = {
            "FG_RANK": max(ranks, default=0) + 1,
            "FG_WHOLE": len(one.arrays) + len(unit.between),
            "FG_ARRAYS": max(len(launch.arrays) for launch in unit.launches),
            "FG_EXTENTS": max(len(launch.extents) for launch in unit.launches),
            "FG_DIMS": max(len(extents) for launch in unit.launches for extents in launch.extents),
            "FG_PARTS": max(len(variant.parts) for variant in variants),
            "FG_SIZES": max(len(launch.sizes) for launch in unit.launches),
            "FG_VALUES": max(len(launch.values) for launch in unit.launches),
            "FG_SLOTS": max(len(variant.arguments) for variant in variants),
            "FG_MAPS": max(sum(a.kind == "map" for a in variant.arguments) for variant in variants),
            "FG_LAUNCHES": len(unit.launches),
            "FG_BETWEEN": len(unit.between),
            "FG_PAIRS": max((len(variant.pairs) for variant in variants), default=0),
        }
        found = {name: max(count, found.get(name, 0)) for name, count in {**found, **here}.items()}
    for name, count in found.items():
        if count > MOST[name]:
            raise RequestError(f"{one.name} is too large for an export: {name} is {MOST[name]}, and it takes {count}")


# ---------------------------------------------------------------- machine code


def stem(variant: Variant) -> str:
    """What a kernel's files are called: `rmsnorm`, `rmsnorm_any_strides`."""
    words = "" if variant.layout == AS_PLANNED else f"_{word(variant.layout)}"
    return f"{variant.code.entry}{words}"


def embedded_of(one: Exported) -> dict[tuple[str, str], Embedded]:
    """The files of machine code by architecture and stem; one of NVIDIA's serves all of its architectures."""
    cuda: dict[str, list[tuple[str, str, bytes]]] = {}
    found: dict[tuple[str, str], Embedded] = {}
    for unit in one.units:
        arch = unit.target.arch
        for launch in unit.launches:
            for variant in launch.variants:
                name = stem(variant)
                if unit.target.vendor == "cuda":
                    cuda.setdefault(name, []).append((arch, name, variant.code.binary))
                else:
                    symbol = f"fusegen_{name}_{word(arch)}"
                    found[arch, name] = Embedded(f"{name}.{word(arch)}.co", symbol, "hip", variant.code.binary)
    for name, codes in cuda.items():
        file = Embedded(f"{name}.fatbin", f"fusegen_{name}", "cuda", fatbin(codes))
        found |= {(arch, name): file for arch, _, _ in codes}
    return found


def word(text: str) -> str:
    """`sm_90a`, `gfx942`, `gfx90a_sramecc`: letters and digits."""
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")


# ---------------------------------------------------------------- the words of a chain's table


def words_of(one: Exported, embedded: Mapping[tuple[str, str], Embedded]) -> dict[str, Any]:
    graph = one.graph
    axes = [(at, axis, size) for at, t in enumerate(one.arrays) for axis, size in enumerate(t.shape)]
    named = [(at, axis, size.name) for at, axis, size in axes if isinstance(size, Dim)]
    computed = [(at, axis, size) for at, axis, size in axes if not isinstance(size, Dim)]
    said = {name for _, _, name in named}
    sizes = [size for _, _, size in computed]
    constant = frozenset[str].intersection(*(unit.compiled for unit in one.units))
    if free := next((d.name for s in sizes for d in dims_in(s) if d.name not in said | constant), None):
        raise RequestError(f"{one.name}: no array has an axis of {free} alone, which an export would have to solve for")

    def by_word(variant: Variant, unit: Unit) -> str:
        return embedded[unit.target.arch, stem(variant)].symbol

    def place(base: int) -> str:
        return f"at_{one.arrays[base].name}" if base < len(one.arrays) else str(base)

    return {
        "chain": one,
        "place": place,
        "title": graph.signature,
        "body": commented(graph.body),
        "outputs": graph.outputs,
        "dims": [f"dim_{name}" for name in one.dims],
        "places": [f"at_{tensor.name}" for tensor in one.arrays],
        "named": named,
        "computed": computed,
        "usual": [(name, size) for name, size in graph.sizes.items() if name not in said],
        "inner": [size for size in graph.computed_sizes if size not in sizes],
        "files": [
            list(
                dict.fromkeys(embedded[unit.target.arch, stem(v)] for launch in unit.launches for v in launch.variants)
            )
            for unit in one.units
        ],
        "symbol": by_word,
    }


def commented(text: str) -> list[str]:
    """Its lines, as a comment of C may hold them."""
    return [line.rstrip() for line in text.replace("*/", "* /").replace("/*", "/ *").strip("\n").splitlines()]


def parameters(one: Exported) -> list[str]:
    """Of the function in C: operands in the spec's order, outputs, the workspace, the stream."""
    order: list[Tensor] = [*one.graph.inputs, *(t for t in one.arrays if t in one.graph.outputs)]
    found = []
    for tensor in order:
        kind = "const fusegen_array *" if tensor.shape else f"{SCALARS[tensor.dtype][0]} "
        found.append(f"{kind}{c_name(tensor.name)}")
    if one.works_in_memory:
        found += ["void *workspace", "size_t workspace_bytes"]
    return [*found, "fusegen_stream stream"]


def c_name(name: str) -> str:
    return f"{name}_" if name in TAKEN else name


def sizes_text(one: Exported) -> str:
    """`M=16384, N=4096`."""
    return ", ".join(f"{name}={size}" for name, size in one.graph.sizes.items())


def literal(number: float) -> str:
    """A run-time scalar in C."""
    if isinstance(number, int):
        return str(number)
    return (
        "NAN"
        if number != number
        else "INFINITY"
        if number == float("inf")
        else "-INFINITY"
        if number == float("-inf")
        else f"{float(number)!r}f"
    )


FILTERS = {
    "c": quoted,
    "size": c_size,
    "word": word,
    "c_name": c_name,
    "map_type": lambda dtype: MAP_TYPES[dtype],
    "member": lambda tensor: SCALARS[tensor.dtype][1],
    "axes": lambda places: sum(1 << place for place in places),
    "literal": literal,
}


# ---------------------------------------------------------------- other files


def license_text() -> str:
    """Apache-2.0, as fusegen itself comes with."""
    beside = PACKAGE.parent / "LICENSE"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    try:
        found = distribution("fusegen").read_text("licenses/LICENSE")
    except PackageNotFoundError:
        found = None
    return found or "Apache License 2.0: https://www.apache.org/licenses/LICENSE-2.0\n"


def recorded_files(one: Exported, record: Recorded) -> dict[str, bytes]:
    folder = f"test/data/{one.name}"
    found = {f"{folder}/{name}.npy": npy(array) for name, array in record.arrays.items()}
    found |= {f"{folder}/{name}_expected.npy": npy(array) for name, array in record.expected.items()}
    found |= {f"{folder}/{name}_allowed.npy": npy(array) for name, array in record.allowed.items()}
    return found


def npy(array: np.ndarray[Any, Any]) -> bytes:
    held = BytesIO()
    np.save(held, array, allow_pickle=False)
    return held.getvalue()


def manifest(library: str, chains: Sequence[Exported], files: Mapping[str, bytes]) -> bytes:
    """What the export holds, and a hash of each file."""
    facts = {
        "fusegen": VERSION,
        "library": library,
        "chains": [
            {
                "name": one.name,
                "signature": one.graph.signature,
                "sizes": dict(one.graph.sizes),
                "targets": [
                    {
                        "target": unit.target.name,
                        "arch": unit.target.arch,
                        "launches": [launch_facts(launch) for launch in unit.launches],
                    }
                    for unit in one.units
                ],
                "notes": list(one.notes),
            }
            for one in chains
        ],
        "sha256": {path: hashlib.sha256(data).hexdigest() for path, data in sorted(files.items())},
    }
    return (json.dumps(facts, indent=2) + "\n").encode()


def launch_facts(launch: Launch) -> dict[str, Any]:
    return {
        "name": launch.name,
        "alone": launch.alone,
        "variants": [
            {"layout": v.layout, "entry": v.code.entry, "compiler": v.code.compiler, "threads": v.threads,
             "shared_bytes": v.shared_bytes}
            for v in launch.variants
        ],
    }  # fmt: skip
