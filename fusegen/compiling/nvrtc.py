"""CUDA C++ to cubin: NVRTC through cuda.bindings. Needs no GPU, no driver and no CUDA toolkit.

NVRTC's own calls, and not cuda.core, whose import takes as long as compiling a kernel does. Headers (`cuda_fp16.h`)
come out of NVRTC itself from 13.3 on, which fits them to the compiler by construction; an older NVRTC gets those that
lie beside it, or that cuda.pathfinder finds (the nvidia-cuda-runtime wheel, or a toolkit).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from fusegen.compiling import resources
from fusegen.compiling.options import FOR_CUBIN, for_nvrtc
from fusegen.compiling.refusal import refusal
from fusegen.compiling.resources import Resources
from fusegen.errors import MissingError
from fusegen.targets import Target

MISSING = (
    "NVRTC, which compiles CUDA sources, is missing here\n  to get it: pip install cuda-bindings nvidia-cuda-nvrtc"
)
MISSING_HEADERS = "cuda_fp16.h and its like are missing here\n  to get them: pip install nvidia-cuda-nvrtc>=13.3"
MISSING_FOLDER = (
    "NVRTC unpacks its headers into the user's cache folder, and can't make {}\n"
    "  name a folder that can be written in XDG_CACHE_HOME"
)
MISSING_NVDISASM = "nvdisasm, which prints SASS, is missing here\n  to get it: pip install nvidia-cuda-nvdisasm"


def compile_text(text: str, target: Target, *, filename: str, origin: str, compiler: str) -> tuple[bytes, str]:
    """The cubin, and the log with ptxas's account of resources. Raises CompileError and MissingError."""
    nvrtc = bindings()
    flags = [*options(text, target, compiler), FOR_CUBIN]
    return run(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, flags, text, target, filename, origin, compiler)


def compile_to_ptx(text: str, target: Target, *, filename: str, origin: str, compiler: str) -> str:
    """The PTX. Raises CompileError and MissingError."""
    nvrtc = bindings()
    flags = options(text, target, compiler)
    made, _ = run(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, flags, text, target, filename, origin, compiler)
    return made.decode().rstrip("\0")


def run(
    size_of: Callable[[Any], Any], get: Callable[[Any, Any], Any], flags: list[str], text: str, target: Target,
    filename: str, origin: str, compiler: str,
) -> tuple[bytes, str]:  # fmt: skip
    """Compile, and what `get` gives of the program, with the log. Raises CompileError and MissingError."""
    nvrtc = bindings()
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), filename.encode(), 0, None, None)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        raw = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, raw)
        log = raw.decode(errors="replace").replace("\0", "")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            if found := re.search(r"failed to create directory '([^']*)'", log):
                raise MissingError(MISSING_FOLDER.format(found[1]))
            said = log or f"{nvrtc.nvrtcGetErrorString(status)[1].decode()} (it left no log)"
            raise refusal(said, text, target, filename=filename, origin=origin, compiler=compiler)
        made = bytearray(size_of(program)[1])
        get(program, made)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(made), log


def read_resources(code: bytes, log: str, entry: str, dynamic_shared: int) -> Resources:
    """What `entry` needs."""
    return resources.of_cubin(code, log, entry, dynamic_shared)


@cache
def version() -> str:
    """`nvrtc 13.5`. Raises MissingError."""
    nvrtc = bindings()
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # a package that finds no library
        raise missing(error) from error
    return f"nvrtc {major}.{minor}"


def bindings() -> Any:
    """cuda.bindings.nvrtc. Raises MissingError."""
    try:
        from cuda.bindings import nvrtc
    except (ImportError, RuntimeError) as error:
        raise missing(error) from error
    return nvrtc


def options(text: str, target: Target, compiler: str) -> list[str]:
    """What NVRTC is told. Raises MissingError where the text needs headers and there are none."""
    found = for_nvrtc(target, compiler)
    return [*found, headers(compiler)] if "#include" in text else [*found]


def headers(compiler: str) -> str:
    """The option that lets NVRTC find its headers. Raises MissingError when there are none."""
    number = tuple(int(part) for part in re.findall(r"\d+", compiler))
    if number >= (13, 3):  # unpacked once, into the folder that cuda.core uses too
        folder = Path(platformdirs.user_cache_dir("cuda-python", appauthor=False), "nvrtc-bundled-headers")
        return f"--use-bundled-headers={folder}"
    from cuda import pathfinder

    if found := headers_beside_library() or pathfinder.find_nvidia_header_directory("cudart"):
        return f"--include-path={found}"
    raise MissingError(MISSING_HEADERS)


@cache
def headers_beside_library() -> str | None:
    """Where the wheel or the toolkit that NVRTC itself is from has its headers, if it has: they fit it best, and
    cuda.pathfinder's search takes as long as compiling a kernel does."""
    from cuda import pathfinder

    library = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    folder = Path(library).parent.parent / "include" if library else None
    return str(folder) if folder is not None and (folder / "cuda_fp16.h").is_file() else None


def missing(error: Exception) -> MissingError:
    """NVRTC is not usable, and why: not installed, or versions of NVIDIA's packages that do not fit each other."""
    return MissingError(f"{MISSING}\n  what failed: {' '.join(str(error).split())}")


def disassemble(code: bytes, entry: str, target: Target) -> str:
    """SASS of a cubin, by nvdisasm on PATH, of a wheel or of a toolkit. Raises MissingError when there is none."""
    tool = nvdisasm()
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, f"{entry}.cubin")
        cubin.write_bytes(code)
        ran = subprocess.run([tool, "--print-code", str(cubin)], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise MissingError(
            f"nvdisasm could not read the code of {target.arch}: {ran.stderr.strip()}\n"
            "  a newer one may: pip install --upgrade nvidia-cuda-nvdisasm"
        )
    return ran.stdout


def nvdisasm() -> str:
    """The path of nvdisasm. Raises MissingError."""
    from cuda import pathfinder

    if found := pathfinder.find_nvidia_binary_utility("nvdisasm") or shutil.which("nvdisasm"):
        return str(found)
    raise MissingError(MISSING_NVDISASM)
