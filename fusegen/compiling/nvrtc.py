"""CUDA C++ to cubin: NVRTC through cuda.core. Needs no GPU, no driver and no CUDA toolkit.

Before cuda.core 1.0 an object could be made only where a driver was installed; such versions still serve here on a
machine that has one. Headers (`cuda_fp16.h`) come out of NVRTC itself from 13.3 on, which fits them to the compiler by
construction; an older NVRTC gets those that cuda.pathfinder finds (the nvidia-cuda-runtime wheel, or a toolkit).
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tempfile
import threading
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from fusegen.compiling import resources
from fusegen.compiling.refusal import refusal
from fusegen.compiling.resources import Resources
from fusegen.errors import MissingError
from fusegen.targets import Target

IMPORTING = threading.Lock()
FOR_CUBIN = {"ptxas_options": "-v"}  # its account of resources
MISSING = "NVRTC, which compiles CUDA sources, is missing here\n  to get it: pip install cuda-core nvidia-cuda-nvrtc"
MISSING_HEADERS = "cuda_fp16.h and its like are missing here\n  to get them: pip install nvidia-cuda-nvrtc>=13.3"
MISSING_FOLDER = (
    "NVRTC unpacks its headers into the user's cache folder, and can't make {}\n"
    "  name a folder that can be written in XDG_CACHE_HOME"
)
MISSING_NVDISASM = "nvdisasm, which prints SASS, is missing here\n  to get it: pip install nvidia-cuda-nvdisasm"


def compile_text(text: str, target: Target, *, filename: str, origin: str, compiler: str) -> tuple[bytes, str]:
    """The cubin, and the log with ptxas's account of resources. Raises CompileError and MissingError."""
    log = io.StringIO()
    try:
        program = core().Program(text, "c++", options(text, target, filename, compiler, **FOR_CUBIN))
        cubin = program.compile("cubin", logs=log)
    except Exception as error:
        if type(error).__name__ != "NVRTCError":  # private to cuda.core, at a place that has moved
            raise
        said = str(error).partition("compilation log:")[2] or str(error)
        if found := re.search(r"failed to create directory '([^']*)'", said):
            raise MissingError(MISSING_FOLDER.format(found[1])) from None
        raise refusal(said, text, target, filename=filename, origin=origin, compiler=compiler) from None
    return bytes(cubin.code), log.getvalue().replace("\0", "")


def compile_to_ptx(text: str, target: Target, *, filename: str, origin: str, compiler: str) -> str:
    """The PTX. Raises CompileError and MissingError.

    Through cuda.bindings, because cuda.core (1.2) asks the driver whether it could load PTX, and fails without one.
    """
    from cuda.bindings import nvrtc

    flags = options(text, target, filename, compiler).as_bytes("nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), filename.encode(), 0, None, None)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
            nvrtc.nvrtcGetProgramLog(program, log)
            said = log.decode(errors="replace").replace("\0", "")
            raise refusal(said, text, target, filename=filename, origin=origin, compiler=compiler)
        made = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
        nvrtc.nvrtcGetPTX(program, made)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return made.decode().rstrip("\0")


def read_resources(code: bytes, log: str, entry: str, dynamic_shared: int) -> Resources:
    """What `entry` needs."""
    return resources.of_cubin(code, log, entry, dynamic_shared)


@cache
def version() -> str:
    """`nvrtc 13.5`. Raises MissingError."""
    core()
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # no package; a package that finds no library
        raise missing(error) from error
    return f"nvrtc {major}.{minor}"


def options(text: str, target: Target, filename: str, compiler: str, **more: str) -> Any:
    """The ProgramOptions that `text` is compiled with."""
    found = headers(compiler) if "#include" in text else {}
    caches = not compiler.startswith("nvrtc 12")
    if caches and "no_cache" in {option.name for option in fields(core().ProgramOptions)}:
        # where there is a driver, NVRTC 13 keeps what it compiled in ~/.nv/ComputeCache, and a hit comes without a log
        found["no_cache"] = True
    return core().ProgramOptions(name=filename, arch=target.arch, std="c++17", **found, **more)


def options_text(text: str, target: Target, compiler: str) -> tuple[str, ...]:
    """What `compile_text` tells NVRTC. Bundled headers are of its version, wherever they were unpacked."""
    words = options(text, target, target.name, compiler, **FOR_CUBIN).as_bytes("nvrtc")
    return tuple(re.sub("^(--use-bundled-headers)=.*", r"\1", word.decode()) for word in words)


def headers(compiler: str) -> dict[str, Any]:
    """The options of cuda.core that let NVRTC find its headers. Raises MissingError when there are none."""
    from cuda import pathfinder

    number = tuple(int(part) for part in re.findall(r"\d+", compiler))
    if number >= (13, 3) and "use_bundled_headers" in {option.name for option in fields(core().ProgramOptions)}:
        return {"use_bundled_headers": True}
    if found := pathfinder.find_nvidia_header_directory("cudart"):
        return {"include_path": found}
    raise MissingError(MISSING_HEADERS)


def core() -> Any:
    """The module of cuda.core that has Program: `cuda.core`, or `cuda.core.experimental` before 0.5."""
    with IMPORTING:  # its modules import each other in a circle, which threads that come together would see half done
        return imported_core()


@cache
def imported_core() -> Any:
    try:
        import cuda.core

        if hasattr(cuda.core, "Program"):
            return cuda.core
        import cuda.core.experimental
    except (ImportError, RuntimeError) as error:
        raise missing(error) from error
    return cuda.core.experimental


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
