"""Exports in tests: built by the C compiler of this machine, on a driver whose launches run in the emulator."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusegen.exporting import making, writing
from fusegen.exporting.collecting import exported, variants_of
from fusegen.exporting.recording import Recorded
from fusegen.language.types import DTYPES, DType, bf16, f16, f32, tf32, u8
from fusegen.runtime import Kernel, Program
from fusegen.runtime.devices import Launch, Mapped
from fusegen.runtime.emulated import EmulatorDevice
from fusegen.runtime.joined import Joined

HERE = Path(__file__).parent / "exporting"
TYPES = {name: place for place, name in enumerate((d.name for d in DTYPES.values()), 1)}
MAPPED: Mapping[int, DType] = {0: u8, 6: f16, 7: f32, 9: bf16, 11: tf32}
SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}
LAUNCHED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_uint, ctypes.c_uint,
    ctypes.c_int, ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip


class Array(ctypes.Structure):
    """fusegen_array of fusegen.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


class Map(ctypes.Structure):
    """What the driver in fake_cuda.c makes of a tensor map."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("swizzle", ctypes.c_int32),
        ("box", ctypes.c_uint32 * 5),
    )


def need_compiler() -> None:
    for tool in ("cc", "make"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} here, which builds an export")


def given(array: np.ndarray[Any, Any], dtype: DType) -> Array:
    """A numpy array as the launcher takes it; the array is to be kept."""
    sizes = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
    strides = (ctypes.c_int64 * max(1, array.ndim))(*(s // array.itemsize for s in array.strides))
    return Array(array.ctypes.data, TYPES[dtype.name], array.ndim, sizes, strides)


WORD_BYTES = 8  # in which clusters are counted


@dataclass
class Library:
    """A built export of one chain, and the kernels it was made of, which launches are emulated with."""

    made: Kernel | Program
    loaded: Any  # the library in C
    driver: Any
    compiled: Mapping[str, Any]  # by the tag that stands in place of machine code
    launched: list[str] = field(default_factory=list)  # the tags of what was launched, in order
    spans: list[tuple[int, int]] = field(default_factory=list)  # the bytes of all arrays of the call
    blocks: list[int] = field(default_factory=list)
    error: BaseException | None = None
    capability: tuple[int, int] = (9, 0)
    has_context: bool = True
    held: Any = None  # what the driver calls

    def call(self, arrays: Sequence[tuple[np.ndarray[Any, Any], DType] | float], workspace: Any = None) -> int:
        """Arrays and run-time scalars in the order of the function's parameters. Returns its status."""
        words: list[Any] = []
        self.begin()
        for one in arrays:
            if not isinstance(one, tuple):
                words.append(ctypes.c_float(one) if isinstance(one, float) else ctypes.c_int(one))
                continue
            array, dtype = one
            words.append(ctypes.byref(given(array, dtype)))
            self.spans.append(span(array))
        if workspace is not None:
            self.spans.append(span(workspace))
            words += [ctypes.c_void_p(workspace.ctypes.data), ctypes.c_size_t(workspace.nbytes)]
        status = int(getattr(self.loaded, self.made.name)(*words, None))
        if self.error is not None:
            raise self.error
        return status

    def begin(self) -> None:
        """From now on launches are this library's."""
        self.spans, self.launched, self.blocks, self.error = [], [], [], None
        self.held = LAUNCHED(self.on_launch)
        if self.made.target.vendor == "hip":
            self.driver.fake_set(self.held, self.made.target.arch.encode())
        else:
            self.driver.fake_set(self.held, *self.capability, int(self.has_context))

    @property
    def message(self) -> str:
        self.loaded.fusegen_message.restype = ctypes.c_char_p
        return str(self.loaded.fusegen_message().decode())

    def workspace(self, *sizes: int) -> np.ndarray[Any, Any]:
        self.begin()  # it depends on the GPU
        function = getattr(self.loaded, f"{self.made.name}_workspace")
        function.restype = ctypes.c_size_t
        held = np.full(int(function(*map(ctypes.c_int64, sizes))) + 256, 0xFF, np.uint8)
        start = -held.ctypes.data % 256
        return held[start : held.nbytes - 256 + start]

    def on_launch(
        self, image: bytes, entry: bytes, grid: Any, threads: int, shared: int, dependent: int, words: Any
    ) -> int:
        try:
            self.emulate(image.decode(), entry.decode(), (grid[0], grid[1], grid[2]), threads, shared, dependent, words)
        except BaseException as error:  # ctypes would print it and go on
            self.error = error
            return 1
        return 0

    def emulate(
        self, tag: str, entry: str, grid: tuple[int, int, int], threads: int, shared: int, dependent: int, words: Any
    ) -> None:
        variant = self.compiled[tag]
        plan = variant.plan
        assert (plan.name, plan.threads, plan.shared_bytes) == (entry, threads, shared)
        blocks = grid[0] * grid[1]
        assert (*plan.grid(blocks), 1) == grid
        pointers, numbers, values, maps, spans = [], [], [], [], []
        mapped: dict[str, int] = {}
        for param, word in zip(plan.params, words[: len(plan.params)], strict=True):
            if param.kind == "map":
                own = Map.from_address(word)
                pointers.append(own.address)
                mapped[param.tensor] = own.address
                shape = tuple(own.sizes[: own.rank])[::-1]
                steps = tuple(own.strides[: own.rank - 1])[::-1]
                box = tuple(own.box[: own.rank])[::-1]
                dtype = MAPPED[own.type]
                if dtype is u8:
                    dtype = next(a.dtype for a in plan.accesses if a.tensor == param.tensor)
                place = len(pointers) - 1
                maps.append(Mapped(param.name, place, dtype, shape, steps, box, SWIZZLES[own.swizzle]))
            elif param.kind == "pointer":
                pointers.append(ctypes.c_uint64.from_address(word).value)
            elif param.kind == "value":
                kind = ctypes.c_float if param.dtype is f32 else ctypes.c_int32
                values.append(kind.from_address(word).value)
                continue
            elif param.kind == "address":
                assert ctypes.c_uint64.from_address(word).value == mapped[param.tensor]
                continue
            else:
                numbers.append(ctypes.c_int64.from_address(word).value)
                continue
            at = pointers[-1]
            low, high = next(((low, high) for low, high in self.spans if low <= at < high), (at, 0))
            if not high:  # of the driver's own memory
                high = self.driver.fake_end(ctypes.c_uint64(at))
            spans.append((low - at, high - at))
        kinds = [param for param in plan.params if param.kind in ("pointer", "map")]
        for word in (at for param, at in zip(kinds, pointers, strict=True) if param.updated):
            spans = [apart_from(word, at, one) for at, one in zip(pointers, spans, strict=True)]
        launch = Launch(blocks, tuple(numbers), tuple(spans), tuple(maps), bool(dependent))
        loaded = EmulatorDevice(self.made.target).load(variant.source, None)
        loaded.launch(launch, pointers, values, 0)
        self.launched.append(tag)
        self.blocks.append(blocks)


def apart_from(word: int, at: int, span: tuple[int, int]) -> tuple[int, int]:
    """What a pointer may reach, without a word of the workspace that is another's; of the word's own pointer the
    word."""
    low, high = at + span[0], at + span[1]
    if at == word:
        return 0, WORD_BYTES
    if not low <= word < high:
        return span
    return (span[0], word - at) if at < word else (word + WORD_BYTES - at, span[1])


def span(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def tags_of(made: Kernel | Program, every_layout: bool) -> dict[str, Any]:
    """What each piece of machine code was made of, by what stands in its place."""
    found: dict[str, Any] = {}
    kernels: list[Kernel] = []
    for kernel in made.kernels if isinstance(made, Program) else (made,):
        if isinstance(kernel, Joined):
            found[f"{made.target.arch} {kernel.name}"] = kernel.main
            kernels += [kernel.alone(place) for place in range(len(kernel.plan.plans))]
        else:
            kernels.append(kernel)
    for kernel in kernels:
        for said, variant in variants_of(kernel, every_layout, []):
            words = "" if said == "as planned" else f"_{writing.word(said)}"
            found[f"{made.target.arch} {variant.plan.name}{words}"] = variant
    return found


@cache
def driver(vendor: str) -> tuple[Path, Any]:
    """The driver that is none: its path, and the library."""
    path = Path(tempfile.mkdtemp(prefix="fake-driver-")) / f"fake_{vendor}.so"  # for as long as this process
    run("cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", path, HERE / f"fake_{vendor}.c")
    found = ctypes.CDLL(str(path))
    if vendor == "cuda":
        found.fake_end.restype = ctypes.c_uint64
    return path, found


def naming(vendor: str) -> str:
    """The option that makes a launcher look for that driver."""
    word = {"cuda": "FUSEGEN_CUDA_LIBRARY", "hip": "FUSEGEN_HIP_LIBRARIES"}[vendor]
    return f'-D{word}="{driver(vendor)[0]}"'


def build(
    made: Kernel | Program, folder: Path, *, every_layout: bool = True, records: Mapping[str, Recorded] | None = None
) -> Library:
    """The chain's export, built, with tags in place of machine code."""
    need_compiler()
    vendor, arch = made.target.vendor, made.target.arch
    files = writing.files_of("kernels", [exported([made], every_layout)], records or {})
    for path in files:
        if path.startswith("kernels/"):
            files[path] = f"{arch} {Path(path).name.split('.')[0]}".encode() + b"\0"
    making.write(folder / "export", files)
    flags = f"-O1 -g -Wall -Wextra -Werror '{naming(vendor)}'"
    run("make", "-s", "-C", folder / "export", f"VENDOR={vendor}", f"CFLAGS={flags}")
    loaded = ctypes.CDLL(str(folder / "export" / "build" / vendor / "libkernels.so"))
    found = re.fullmatch(r"sm_(\d+)(\d)[a-z]?", arch)
    capability = (int(found[1]), int(found[2])) if found else (0, 0)
    return Library(made, loaded, driver(vendor)[1], tags_of(made, every_layout), capability=capability)


def run_test(library: Library, folder: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The export's own test program, in this process, where launches are emulated: its status and what it says."""
    export = folder / "export"
    library.begin()
    words = (
        "-std=c11",
        "-D_GNU_SOURCE",
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{export}/include",
        naming("cuda"),
    )
    program = export / "build" / "test.so"
    run("cc", *words, "-o", program, export / "test" / "test.c", export / "build" / "cuda" / "libkernels.a", "-lm")
    loaded = ctypes.CDLL(str(program))
    given = (ctypes.c_char_p * 3)(b"test", str(export / "test" / "data").encode(), None)
    capfd.readouterr()
    status = int(loaded.main(2, given))
    ctypes.CDLL(None).fflush(None)
    if library.error is not None:
        raise library.error
    return status, capfd.readouterr().out


def run(*words: object) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


def call_recorded(library: Library, record: Recorded) -> str:
    """The recorded launch; what is wrong with it, or nothing."""
    graph = library.made.op_graph
    arrays = {name: array.copy() for name, array in record.arrays.items()}
    outputs = [t for t in graph.outputs if t.name not in graph.updates]
    for tensor in outputs:
        shape = record.expected[tensor.name].shape
        raw = f"u{tensor.dtype.bytes}"
        arrays[tensor.name] = np.full(shape, -1, raw.replace("u", "i")).view(raw)
    words: list[Any] = []
    for tensor in (*graph.inputs, *outputs):
        words.append((arrays[tensor.name], tensor.dtype) if tensor.shape else record.values[tensor.name])
    between = isinstance(library.made, Program) and library.made.plan.between
    workspace = library.workspace(*(record.sizes[name] for name in graph.sizes)) if between else None
    if library.call(words, workspace):
        return library.message
    for tensor in graph.outputs:
        name = graph.updates.get(tensor.name, tensor.name)
        with np.errstate(invalid="ignore"):
            got = arrays[name].view(tensor.dtype.numpy).astype(np.float64)
        expected, allowed = record.expected[name], record.allowed[name]
        with np.errstate(invalid="ignore"):
            right = np.isinf(allowed) | (abs(got - expected) <= allowed) | (got == expected)
        right |= np.isnan(got) & np.isnan(expected)
        if not right.all():
            return f"{name}: {int((~right).sum())} of {right.size} elements are wrong"
    return ""
