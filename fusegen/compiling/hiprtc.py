"""HIP C++ to an AMD code object: hiprtc through hip-python. Needs no GPU, but the libraries of ROCm.

hip-python up to 7 is the package `hip`; from 10 on it is `rocm.bindings`, and `hip` a wrapper around it. It imports
without ROCm and raises at the first call. hiprtc writes nothing that outlives it, but for the compiler's cache of its
own, which it keeps under the user's cache folder (AMD_COMGR_CACHE=0 turns that off).
"""

from __future__ import annotations

import ctypes
import io
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from fusegen.compiling import resources
from fusegen.compiling.options import for_hiprtc
from fusegen.compiling.refusal import refusal
from fusegen.compiling.resources import Resources
from fusegen.errors import CompileError, MissingError
from fusegen.targets import Target

MISSING = (
    "hiprtc, which compiles HIP sources, is missing here\n"
    "  to get it: install ROCm and `pip install hip-python`, or, on Debian, run scripts/install-hiprtc.sh"
)
MISSING_COMGR = (
    "libamd_comgr, which prints AMD machine code, is missing here\n"
    "  it is part of ROCm: install that, or, on Debian, run scripts/install-hiprtc.sh"
)
BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"


def compile_text(text: str, target: Target, *, filename: str, origin: str, compiler: str) -> tuple[bytes, str]:
    """The code object, and the log. Raises CompileError and MissingError."""
    hiprtc = library("hiprtc")
    program = call(hiprtc.hiprtcCreateProgram(text.encode(), filename.encode(), 0, None, None))
    options = [option.encode() for option in for_hiprtc(target)]
    try:
        status = hiprtc.hiprtcCompileProgram(program, len(options), options)[0]
        log = bytearray(call(hiprtc.hiprtcGetProgramLogSize(program)))
        if log:
            call(hiprtc.hiprtcGetProgramLog(program, log))
        said = re.sub(r"/\S*/comgr-[^/\s]+/input/", "", log.decode(errors="replace")).rstrip("\0")
        if status != hiprtc.hiprtcResult.HIPRTC_SUCCESS:
            said = said.strip() or f"no log, only {status.name}"
            raise refusal(said, text, target, filename=filename, origin=origin, compiler=compiler)
        code = bytearray(call(hiprtc.hiprtcGetCodeSize(program)))
        call(hiprtc.hiprtcGetCode(program, code))
    finally:
        hiprtc.hiprtcDestroyProgram(program.createRef())
    return unbundle(bytes(code), target.arch), said


def read_resources(code: bytes, log: str, entry: str, dynamic_shared: int) -> Resources:
    """What `entry` needs; the log does not matter."""
    return resources.of_code_object(code, entry, dynamic_shared)


@cache
def version() -> str:
    """`hiprtc 7.2.53211`: the version of the HIP runtime it is part of (hiprtc's own has been 9.0 for years)."""
    try:
        number = call(library("hip").hipRuntimeGetVersion())
        call(library("hiprtc").hiprtcVersion())
    except RuntimeError as error:  # the library is not there
        raise MissingError(MISSING) from error
    return f"hiprtc {number // 10_000_000}.{number // 100_000 % 100}.{number % 100_000}"


def library(name: str) -> Any:
    """hip-python's module `hip` or `hiprtc`, under its old name or its new one. Raises MissingError."""
    for package in ("hip", "rocm.bindings"):
        try:
            return import_module(f"{package}.{name}")
        except ImportError:
            continue
    raise MissingError(MISSING)


def call(result: tuple[Any, ...]) -> Any:
    """The value of a call of hip-python, which returns its status first. Raises MissingError for a bad status."""
    status, *values = result
    if status.value:
        raise MissingError(f"ROCm answered {status.name} to a call that compiling needs; is its installation whole?")
    return values[0] if values else None


def unbundle(code: bytes, arch: str) -> bytes:
    """The code object of `arch`, where hiprtc wrapped it into a bundle; else `code` itself. Raises CompileError.

    A bundle is a magic word, the number of entries, and for each its offset, size and target, whose length comes first
    (clang-offload-bundler's documentation, "Bundled Binary File Layout").
    """
    if code.startswith(b"\x7fELF"):
        return code
    if not code.startswith(BUNDLE):
        raise CompileError(f"hiprtc returned something that is no code object; it starts with {code[:8]!r}")
    stream = io.BytesIO(code[len(BUNDLE) :])
    names = []
    for _ in range(number(stream)):
        offset, size, length = number(stream), number(stream), number(stream)
        names.append(stream.read(length).decode())
        if arch in names[-1]:
            return code[offset : offset + size]
    raise CompileError(f"hiprtc returned code for {', '.join(names) or 'nothing'}, and none for {arch}")


def number(stream: io.BytesIO) -> int:
    """The next 64-bit number."""
    return int.from_bytes(stream.read(8), "little")


def disassemble(code: bytes, entry: str, target: Target) -> str:
    """The instructions of `entry`, one a line after its offset. Raises MissingError where there is no comgr.

    comgr is the library that hiprtc compiles with, so whoever can compile can disassemble, for every architecture;
    the llvm-objdump of a distribution often is too old for them.
    """
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(code))
    symbol = elf.get_section_by_name(".symtab").get_symbol_by_name(entry)[0]
    section = elf.get_section(symbol["st_shndx"])
    start = symbol["st_value"] - section["sh_addr"]
    body = section.data()[start : start + symbol["st_size"]]
    return "\n".join(f"{at:6x}  {text}" for at, text in instructions(body, target.arch))


def instructions(body: bytes, arch: str) -> list[tuple[int, str]]:
    """Machine code as (offset, text), through `amd_comgr_disassemble_instruction`, which takes no versioned enums."""
    read_memory = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
    print_text = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)
    print_address = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_void_p)
    texts: list[str] = []

    def read(at: int, to: int, size: int, _: object) -> int:
        chunk = body[at : at + size]
        ctypes.memmove(to, chunk, len(chunk))
        return len(chunk)

    def write(text: bytes, _: object) -> None:
        texts[-1] += text.decode().strip()

    def annotate(address: int, _: object) -> None:
        texts[-1] += f"  -> {address:x}"

    callbacks = (read_memory(read), print_text(write), print_address(annotate))
    comgr = load_comgr()
    handle = ctypes.c_uint64()
    isa = f"amdgcn-amd-amdhsa--{arch}".encode()
    if comgr.amd_comgr_create_disassembly_info(isa, *callbacks, ctypes.byref(handle)):
        raise MissingError(f"the libamd_comgr here does not know {arch}; a newer ROCm may")
    step = ctypes.c_uint64()
    found: list[tuple[int, str]] = []
    at = 0
    while at < len(body):
        texts.append("")
        comgr.amd_comgr_disassemble_instruction(handle, ctypes.c_uint64(at), None, ctypes.byref(step))
        if not step.value:
            break
        found.append((at, texts[-1]))
        at += step.value
    comgr.amd_comgr_destroy_disassembly_info(handle)
    return found


def load_comgr() -> ctypes.CDLL:
    """comgr: the one this process loaded, the one beside hiprtc, or what the system's loader finds."""
    version()  # loads hiprtc
    loaded = re.findall(r"(/\S+/lib(?:amd_comgr|hiprtc)\.so\S*)", Path("/proc/self/maps").read_text())
    beside = [str(file) for path in loaded for file in sorted(Path(path).parent.glob("libamd_comgr.so*"))]
    for name in (*beside, "libamd_comgr.so.3", "libamd_comgr.so.2", "libamd_comgr.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MissingError(MISSING_COMGR)
