"""Building a kernel, launching it, and turning the runtime's report into an exception with a place in the source."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusegen.emulator import toolchain
from fusegen.emulator.errors import EmulatorBuildError, EmulatorUnavailable, Index, KernelFault, LaunchError
from fusegen.emulator.ptx import rewrite_asm
from fusegen.emulator.rewrite import attribute, require_grid_constants, rewrite_shared, rewrite_vectors
from fusegen.language.types import tf32
from fusegen.targets.tensor_map import TensorMap

# In the order of `enum class Fault` in dialect/simt.h.
KINDS = (
    "none",
    "out-of-bounds",
    "misaligned",
    "uninitialised",
    "read-only",
    "race",
    "divergent-barrier",
    "divergent-warp",
    "inactive-lane",
    "mask",
    "divide-by-zero",
    "shift",
    "deadlock",
    "timeout",
    "segfault",
    "stack-overflow",
    "trap",
    "resources",
    "mbarrier",
    "tensor",
    "registers",
)

TENSOR_MAP_MAGIC = 0x70616D2D726F736E  # tells a tensor map from other bytes
MAX_THREADS = 1024  # of a block, on every GPU there is
# what orders threads that don't meet: runtime/checker_clocks.cpp
CLOCKED = ("mbarrier", "cp.async.bulk", "wgmma", "tcgen05", "bar.sync", "bar.arrive", "bar.cta", "barrier.sync",
           "barrier.arrive", "barrier.cta")  # fmt: skip
MAX_CLUSTER = 16  # blocks; more than 8 only where the launch asks for it
MAX_WORKERS = 16  # each maps a stack per thread, and Linux allows a process 65,530 mappings


@dataclass(frozen=True)
class Buffer:
    """One global-memory argument: where it points and what may be touched.

    Memory around it is only guarded if it belongs to no other buffer of the launch: leave a gap between buffers that
    lie in one allocation. With `initialised=False`, a read of what the launch has not written is a fault. Buffers may
    overlap: an access is allowed if one of them allows it, and seen through all of them.
    """

    name: str
    address: int  # what the kernel receives
    start: int  # first byte that may be accessed
    size: int  # bytes that may be accessed from start
    writable: bool = True
    initialised: bool = True


Scalar = Any  # a ctypes scalar: c_int, c_longlong, c_float, ...; ctypes has no public base class for them
Argument = Buffer | Scalar | TensorMap


class _Index3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32))

    def as_tuple(self) -> Index:
        return (self.x, self.y, self.z)


class _BufferRange(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("start", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("initialised", ctypes.c_uint32),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("line", ctypes.c_uint32),
        ("other_line", ctypes.c_uint32),
        ("site", ctypes.c_uint64),
        ("other_site", ctypes.c_uint64),
        ("fallback_site", ctypes.c_uint64),
        ("has_place", ctypes.c_uint32),
        ("block", _Index3),
        ("thread", _Index3),
        ("text", ctypes.c_char * 1024),
    )


class _TensorMap(ctypes.Structure):
    """Mirrors `struct TensorMap` in runtime/tensor_copies.h: 128 bytes, the contiguous axis first."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("base", ctypes.c_uint64),
        ("shape", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 5),
        ("rank", ctypes.c_uint32),
        ("element_bytes", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("to_tf32", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )

    @classmethod
    def of(cls, given: TensorMap) -> _TensorMap:
        """At a multiple of 64 bytes, as its type in the kernel promises."""
        memory = (ctypes.c_char * (ctypes.sizeof(cls) + 64))()
        made = cls.from_buffer(memory, -ctypes.addressof(memory) % 64)
        made.magic, made.base = TENSOR_MAP_MAGIC, given.base
        rank, shape, strides, box, _ = given.driver_arguments()
        made.shape[:rank], made.strides[: rank - 1], made.box[:rank] = shape, strides, box
        made.rank, made.element_bytes, made.swizzle = rank, given.dtype.bytes, given.swizzle
        made.to_tf32 = given.dtype is tf32
        return made


class _Request(ctypes.Structure):
    """Mirrors `struct Request` in dialect/simt.h."""

    _fields_ = (
        ("grid", _Index3),
        ("block", _Index3),
        ("cluster", _Index3),
        ("shared_bytes", ctypes.c_uint64),
        ("shared_alignment", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("timeout_s", ctypes.c_double),
        ("workers", ctypes.c_uint32),
        ("warp", ctypes.c_uint32),
        ("clocked", ctypes.c_uint32),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("buffers", ctypes.POINTER(_BufferRange)),
        ("buffer_count", ctypes.c_uint64),
        ("trampoline", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("static_shared_end", ctypes.c_void_p),
        ("first_block", ctypes.c_uint64),
        ("last_block", ctypes.c_uint64),
        ("block_step", ctypes.c_uint64),
        ("registers", ctypes.c_uint32),
        ("dependent", ctypes.c_uint32),
        ("unfinished", ctypes.POINTER(_BufferRange)),
        ("unfinished_count", ctypes.c_uint64),
        ("report", _Report),
    )


class EmulatedKernel:
    """A compiled kernel. May be launched from several threads.

    `cluster` is how many blocks a cluster of it has in each direction, (1, 1, 1) for a kernel without clusters.
    """

    def __init__(
        self, library: Path, source: str, entry: str, filename: str, *, warp: int, check: bool, alignment: int
    ) -> None:
        self.library = library
        self.source = source
        self.entry = entry
        self.filename = filename
        self.warp = warp
        self.check = check
        self._shared_alignment = alignment
        loaded = _loaded(library)
        self._launch = loaded.fusegen_launch
        self._launch.argtypes = [ctypes.POINTER(_Request)]
        self._launch.restype = None
        sizes = (ctypes.c_uint32 * max(1, loaded.fusegen_parameter_count()))()
        loaded.fusegen_parameter_sizes(sizes)
        self._parameter_sizes = tuple(sizes)[: loaded.fusegen_parameter_count()]
        cluster = (ctypes.c_uint32 * 3)()
        loaded.fusegen_cluster_size(cluster)
        self.cluster: Index = (cluster[0], cluster[1], cluster[2])

    def launch(
        self,
        grid: Index,
        block: Index,
        shared_bytes: int,
        args: Sequence[Argument],
        *,
        seed: int = 0,
        timeout_s: float = 60.0,
        workers: int | None = None,
        memory: Sequence[Buffer] = (),
        only: range | None = None,
        unfinished: Sequence[Buffer] | None = None,
    ) -> None:
        """Run the kernel to its end.

        `seed` 0 runs the warps of a block in turn. Any other lets one warp run far ahead of the others, so that a
        missing barrier also gives wrong numbers, and repeatably so. `workers` is the number of threads that share the
        blocks; the checking build always uses one. `memory` is what the kernel may touch beside the buffers among
        `args`: what its tensor maps point to. `only`: the grid's blocks that are to run; of clusters all from one
        number to another. `unfinished` makes it a dependent launch: what those before it write, or read where it is not
        writable, and which may go on until a thread has waited. Raises KernelFault if the kernel breaks a rule or does
        not end within `timeout_s`, LaunchError if the launch doesn't fit the kernel, EmulatorUnavailable if memory runs
        out.
        """
        self._require_sane(grid, block, shared_bytes, args)
        values = [_value(arg) for arg in args]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
        buffers = [*(arg for arg in args if isinstance(arg, Buffer)), *memory]
        ranges, others = _ranges(buffers), _ranges(unfinished or ())
        request = _Request(
            grid=_Index3(*grid),
            block=_Index3(*block),
            cluster=_Index3(*self.cluster),
            shared_bytes=shared_bytes,
            shared_alignment=self._shared_alignment,
            seed=seed,
            timeout_s=timeout_s,
            workers=_usable_processors() if workers is None else max(1, workers),
            warp=self.warp,
            clocked=self.cluster != (1, 1, 1) or any(word in self.source for word in CLOCKED),
            arguments=pointers,
            buffers=ranges,
            buffer_count=len(buffers),
            first_block=only.start if only else 0,
            last_block=min(only.stop if only else math.prod(grid), math.prod(grid)),
            block_step=only.step if only else 1,
            dependent=unfinished is not None,
            unfinished=others,
            unfinished_count=len(unfinished or ()),
        )
        self._launch(ctypes.byref(request))
        if KINDS[request.report.kind] == "resources":  # the machine's fault, not the kernel's
            said = request.report.text.decode(errors="replace")
            raise EmulatorUnavailable(
                f"{self.filename}: the emulator could not get memory or threads to run it: {said}\n"
                "  launch fewer workers or smaller arrays, or allow this process more memory and threads"
            )
        if request.report.kind:
            raise self._fault(request.report)

    def _require_sane(self, grid: Index, block: Index, shared_bytes: int, args: Sequence[Argument]) -> None:
        if len(args) != len(self._parameter_sizes):
            raise LaunchError(f"{self.entry} takes {len(self._parameter_sizes)} arguments, and {len(args)} were given")
        for place, (arg, size) in enumerate(zip(args, self._parameter_sizes, strict=True)):
            given = ctypes.sizeof(_value(arg))
            if given != size:
                kind = arg.name if isinstance(arg, Buffer | TensorMap) else type(arg).__name__
                raise LaunchError(f"{self.entry}: argument {place} has {size} bytes, and {kind} has {given}")
        if min(*grid, *block) < 1 or shared_bytes < 0:
            raise LaunchError(
                f"{self.entry}: a launch of grid {grid}, block {block}, {shared_bytes} bytes of shared memory"
            )
        if (threads := block[0] * block[1] * block[2]) > MAX_THREADS:
            raise LaunchError(f"{self.entry}: a block of {threads} threads; no GPU takes more than {MAX_THREADS}")
        if (blocks := math.prod(self.cluster)) > MAX_CLUSTER:
            raise LaunchError(f"{self.entry}: a cluster of {blocks} blocks; no GPU takes more than {MAX_CLUSTER}")
        if any(whole % part for whole, part in zip(grid, self.cluster, strict=True)):
            raise LaunchError(
                f"{self.entry}: a grid of {grid} blocks is not made of whole clusters of {self.cluster}; a driver "
                "refuses it\n  launch a multiple of the cluster in each direction"
            )

    def _fault(self, report: _Report) -> KernelFault:
        kind = KINDS[report.kind]
        sites = (report.site, report.other_site, report.fallback_site)
        places = _source_lines(self.library, tuple(site for site in sites if site))
        line = report.line or places.get(report.site) or places.get(report.fallback_site)
        other_line = report.other_line or places.get(report.other_site)
        lines = self.source.splitlines()
        source_line = lines[line - 1].strip() if line and line <= len(lines) else None
        where = f"{self.filename}:{line}" if line else f"{self.filename}: {self.entry}"
        message = f"{where}: {kind}: {report.text.decode(errors='replace')}"
        block = report.block.as_tuple() if report.has_place else None
        thread = report.thread.as_tuple() if report.has_place else None
        if block and thread:
            message += f"\n  in block {block} thread {thread}"
        if line is None and any(sites) and line_tool() is None:
            message += "\n  on a line that is not known: there is no addr2line here; apt install binutils"
        if line and source_line is not None:
            message += f"\n  {line:5} | {source_line}"
        if other_line and other_line <= len(lines):
            message += f"\n  {other_line:5} | {lines[other_line - 1].strip()}   <- the other one"
        return KernelFault(
            message,
            kind=kind,
            line=line,
            source_line=source_line,
            block=block,
            thread=thread,
            other_line=other_line,
        )


def _ranges(buffers: Sequence[Buffer]) -> Any:
    return (_BufferRange * max(1, len(buffers)))(
        *(_BufferRange(b.name.encode(), b.start, b.size, b.writable, b.initialised) for b in buffers)
    )


def _value(arg: Argument) -> Scalar:
    """What the kernel receives."""
    if isinstance(arg, TensorMap):
        return _TensorMap.of(arg)
    return ctypes.c_void_p(arg.address) if isinstance(arg, Buffer) else arg


def build(
    source: str, entry: str, *, warp: int, check: bool, filename: str, contract: bool = False,
    arch: str = "", cache_dir: Path | None = None,
) -> EmulatedKernel:  # fmt: skip
    """Compile CUDA or HIP text for the CPU; `entry` is its `extern "C"` kernel, `filename` its name in messages.

    With `contract`, products that are added become fused multiply-adds; else each operation rounds as it is written.
    `arch` is AMD's, as "gfx950", whose macro is defined; without it the instructions are those of gfx942.

    Libraries are cached in `cache_dir`, by default the user's cache, and loaded from a folder of this process. Raises
    EmulatorUnavailable without a fitting compiler or room to build, EmulatorBuildError if the text is refused.
    """
    if warp not in (32, 64):
        raise LaunchError(f"a warp of {warp} lanes; the emulator knows 32 and 64")
    try:
        require_grid_constants(source)
        rewritten = rewrite_shared(rewrite_vectors(rewrite_asm(source)))
    except EmulatorBuildError as refusal:
        raise EmulatorBuildError(f"{filename}: {refusal}") from None
    bounds, cluster = attribute(source, entry, "__launch_bounds__"), attribute(source, entry, "__cluster_dims__")
    text = f"{rewritten.text}\nSIMT_EXPORT({entry}, ({bounds}), ({cluster}))\n"
    if "__bf16" in source:
        text = f"#include <cuda_bf16.h>\n#line 1\n{text}"  # HIP's compiler knows this type without a header
    macros = (f"-D__{arch}__=1",) if arch.startswith("gfx") else ()
    library, log = toolchain.build_kernel(
        text, entry=entry, warp=warp, check=check, contract=contract, cache=cache_dir, extra=macros
    )
    if log is not None:
        raise _build_error(log, source, filename)
    return EmulatedKernel(
        library, source, entry, filename, warp=warp, check=check, alignment=rewritten.dynamic_alignment
    )


def _build_error(log: str, source: str, filename: str) -> EmulatorBuildError:
    """The log under the kernel's own name, then the numbered source around each error in it."""
    log = re.sub(rf"[^\s:]*{re.escape(toolchain.KERNEL_FILE)}", lambda _: filename, log)
    lines = source.splitlines()
    places = [int(line) for line in re.findall(rf"{re.escape(filename)}:(\d+):\d+: (?:fatal )?error", log)]
    if not places:  # the error is in a macro or a header, and this is where the kernel uses it
        places = [int(line) for line in re.findall(rf"{re.escape(filename)}:(\d+)", log)]
    shown = {line for place in places for line in range(place - 2, place + 3) if 1 <= line <= len(lines)}
    numbered = [f"{number:5} | {lines[number - 1]}" for number in sorted(shown)]
    first = re.search(r"error: (.*)", log)
    summary = first[1] if first else "the host compiler refuses the kernel"
    return EmulatorBuildError("\n".join([f"{filename}: {summary}", *numbered, "", log.strip()]), log)


def _loaded(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise EmulatorUnavailable(
            f"the emulator can't load a library that it has built: {error}\n"
            "  if that folder forbids execution, name another one in TMPDIR"
        ) from error


def _usable_processors() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


@functools.cache
def line_tool() -> str | None:
    """The program that tells a fault's source line from its address; without one, faults have no line."""
    return next((found for tool in ("addr2line", "llvm-addr2line") if (found := shutil.which(tool))), None)


def _source_lines(library: Path, sites: tuple[int, ...]) -> dict[int, int]:
    """The kernel's own line for each site: of a chain of inlined calls, the innermost one in the kernel's file."""
    tool = line_tool()
    found: dict[int, int] = {}
    for site in sites if tool else ():
        # A site is a return address; one byte less lies in the call.
        command = [str(tool), "-i", "-e", str(library), hex(site - 1)]
        frames = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        for frame in frames:
            place = re.search(rf"{re.escape(toolchain.KERNEL_FILE)}:(\d+)", frame)
            if place:
                found[site] = int(place[1])
                break
    return found
