"""What a compiled kernel takes of a GPU, read from what its compiler wrote, and the occupancy that follows.

On CUDA the account is ptxas's own log (`-v`), which alone knows of spills. The cubin is no better source for the rest:
on sm_100 the size of its shared section counts 1 KiB that the system reserves. On HIP it is the metadata note of the
code object, which the HIP runtime launches by.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

from fusegen.errors import CompileError
from fusegen.targets import Target


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many blocks and warps of a kernel one SM holds at a time, in theory; 0 blocks means it can't be launched."""

    blocks_per_sm: int
    warps_per_sm: int
    fraction: float  # of the warps that an SM has room for
    limited_by: str  # "threads", "blocks", "registers" or "shared memory"

    def __str__(self) -> str:
        return f"{self.fraction:.0%} ({self.warps_per_sm} warps per SM, limited by {self.limited_by})"


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel needs. Sizes are bytes."""

    registers: int  # per thread; on HIP vector and accumulation registers together
    scalar_registers: int  # per wave; 0 on CUDA
    spill_bytes: int  # per thread, of registers that did not fit: ptxas's spill stores; 4 per spilled VGPR on HIP
    scalar_spills: int  # scalar registers spilled (into lanes of vector registers, usually); 0 on CUDA
    stack_bytes: int  # per thread: spills, and arrays that are indexed at run time
    static_shared_bytes: int
    dynamic_shared_bytes: int  # as planned
    code_bytes: int
    serialized: str = ""  # why ptxas lets wgmma's products wait for one another, where it does (its warning C75xx)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block."""
        return self.static_shared_bytes + self.dynamic_shared_bytes

    def occupancy(self, target: Target, threads: int) -> Occupancy:
        """The occupancy with blocks of `threads`, by the vendors' published rules.

        Registers go to whole warps in units, and a warp's registers come from one scheduler's share of the file;
        shared memory goes to blocks in units, after what the system reserves for each block. Compared: with NVIDIA's
        `cuda_occupancy.h` (CUDA 13.0) on 12,000 random kernels for sm_80, 89, 90 and 100, no difference; with clang's
        kernel-resource-usage remarks on a few for gfx90a and gfx942, likewise.
        """
        warps = -(-threads // target.warp)
        per_thread = round_up(max(self.registers, 1), target.register_unit)
        per_scheduler = target.registers_per_sm // target.schedulers_per_sm
        fitting = per_scheduler // (per_thread * target.warp)
        if target.scalar_registers and self.scalar_registers:
            fitting = min(fitting, target.scalar_registers // self.scalar_registers)
        shared = round_up(self.shared_bytes + target.shared_reserved, target.shared_unit)
        limits = {
            "threads": target.threads_per_sm // (warps * target.warp),
            "blocks": target.blocks_per_sm,
            "registers": fitting * target.schedulers_per_sm // warps,
            "shared memory": target.shared_per_sm // shared if shared else target.blocks_per_sm,
        }
        if threads > target.threads_per_block:
            limits["threads"] = 0
        if self.registers > target.registers_per_thread:
            limits["registers"] = 0
        if self.shared_bytes > target.shared_bytes:
            limits["shared memory"] = 0
        limited_by = min(limits, key=lambda name: limits[name])
        blocks = limits[limited_by]
        return Occupancy(blocks, blocks * warps, blocks * warps * target.warp / target.threads_per_sm, limited_by)


def round_up(value: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-value // unit) * unit


def of_cubin(code: bytes, log: str, entry: str, dynamic_shared: int) -> Resources:
    """Resources of `entry` from the log of ptxas and the cubin. Raises CompileError when the log does not tell."""
    start = log.find(f"Compiling entry function '{entry}'")
    account = log[start:].split("Compiling entry function")[1] if start >= 0 else ""
    used = re.search(r"Used (\d+) registers(.*)", account)
    frame = re.search(
        rf"Function properties for {re.escape(entry)}\s.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores",
        account,
        re.DOTALL,
    )
    if not used or not frame:
        raise CompileError(f"{entry}: ptxas gave no account of this kernel; its log was:\n{log}")
    shared = re.search(r"(\d+) bytes smem", used[2])
    serialized = re.search(r"wgmma\.mma_async instructions are serialized due to (.*?) (?:in|for) the function", log)
    calls = re.search(r"(\d+) bytes cumulative stack size", used[2])  # with the frames of functions that it calls
    return Resources(
        registers=int(used[1]),
        scalar_registers=0,
        spill_bytes=int(frame[2]),
        scalar_spills=0,
        stack_bytes=max(int(frame[1]), int(calls[1]) if calls else 0),
        static_shared_bytes=int(shared[1]) if shared else 0,
        dynamic_shared_bytes=dynamic_shared,
        code_bytes=symbol_bytes(code, entry),
        serialized=serialized[1] if serialized else "",
    )


def of_code_object(code: bytes, entry: str, dynamic_shared: int) -> Resources:
    """Resources of `entry` from the metadata of an AMD code object. Raises CompileError when it has no such kernel.

    The note is described in LLVM's AMDGPU usage guide, "Code Object V3 Metadata" and later. On gfx90a and later
    `.vgpr_count` counts the accumulation registers too.
    """
    kernels = {kernel[".name"]: kernel for kernel in metadata(code)["amdhsa.kernels"]}
    if entry not in kernels:
        raise CompileError(f"{entry}: the code object has no such kernel, only {', '.join(kernels) or 'none'}")
    kernel = kernels[entry]
    return Resources(
        registers=kernel[".vgpr_count"],
        scalar_registers=kernel[".sgpr_count"],
        spill_bytes=4 * kernel[".vgpr_spill_count"],
        scalar_spills=kernel[".sgpr_spill_count"],
        stack_bytes=kernel[".private_segment_fixed_size"],
        static_shared_bytes=kernel[".group_segment_fixed_size"],
        dynamic_shared_bytes=dynamic_shared,
        code_bytes=symbol_bytes(code, entry),
    )


def metadata(code: bytes) -> dict[str, Any]:
    """The AMDGPU metadata of a code object."""
    import msgpack
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import NoteSection

    for section in ELFFile(io.BytesIO(code)).iter_sections():
        if isinstance(section, NoteSection):
            for note in section.iter_notes():
                if note["n_name"] == "AMDGPU":
                    found: dict[str, Any] = msgpack.unpackb(note["n_descdata"])
                    return found
    raise CompileError("the code object carries no AMDGPU metadata, so nothing tells what it needs")


def symbol_bytes(code: bytes, entry: str) -> int:
    """The size of a kernel's machine code in an ELF file; 0 when it has no such symbol."""
    from elftools.elf.elffile import ELFFile

    symbols = ELFFile(io.BytesIO(code)).get_section_by_name(".symtab")
    found = symbols.get_symbol_by_name(entry) if symbols else None
    return max((int(symbol["st_size"]) for symbol in found), default=0) if found else 0
