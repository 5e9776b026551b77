"""What is here, what is missing, and how to get it: every check does the thing it vouches for.

A compiler is asked to compile, a folder to be written, a driver for its GPUs. `examine()` never raises: a check that
fails says why and what to do about it.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

from fusegen.errors import FusegenError, KernelError, MissingError

State = Literal["ok", "missing", "broken", "optional"]

PROBES = {
    "cuda": "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
    'extern "C" __global__ void probe(__half* x) { *x = x[1]; }\n',
    "hip": 'extern "C" __global__ void probe(_Float16* x) { *x = x[1]; }\n',
}
EMULATOR = "the emulator"
LIBRARIES = ("torch", "cupy", "jax")
PACKAGES = {"cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-rocm-7-0")}
GET = {
    "torch": "pip install torch",
    "cupy": "pip install cupy-cuda13x",
    "jax": "pip install 'jax[cuda13]'",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked for. `advice` is the command that gets it, or what else to do; empty when all is well.

    "optional": absent, and no verdict depends on it.
    """

    name: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Vendor:
    """What can be done for one vendor's GPUs here: `runs_on` names what runs kernels, empty where nothing does."""

    name: str
    compiles: bool
    runs_on: tuple[str, ...]

    @property
    def ready(self) -> bool:
        return self.compiles and bool(self.runs_on)

    def __str__(self) -> str:
        if not self.compiles:
            emulated = "; their text still runs in the emulator" if EMULATOR in self.runs_on else ""
            return f"{self.name}: kernels can be emitted, not compiled{emulated}"
        if not self.runs_on:
            return f"{self.name}: kernels compile, and nothing here runs them"
        return f"{self.name}: kernels compile, and run on {' and '.join(self.runs_on)}"


@dataclass(frozen=True, slots=True)
class Examination:
    """Every check, and what follows for each vendor."""

    checks: tuple[Check, ...]
    vendors: tuple[Vendor, ...]

    @property
    def ready(self) -> bool:
        """Whether kernels of at least one vendor can be compiled and run somewhere."""
        return any(vendor.ready for vendor in self.vendors)


def examine() -> Examination:
    """Look for everything that fusegen can use."""
    cuda, hip = nvrtc(), hiprtc()
    nvidia, amd = gpus()
    compiler = emulator_compiler()
    tools = (compiler, line_tool(), cache_folder(), sass_tool(), quick_calls())
    checks = (python(), cuda, hip, nvidia, amd, *tools, *map(array_library, LIBRARIES))
    emulated = (EMULATOR,) if compiler.state == "ok" else ()
    vendors = tuple(
        Vendor(name, made.state == "ok", (*((gpu.found,) if gpu.state == "ok" else ()), *emulated))
        for name, made, gpu in (("CUDA", cuda, nvidia), ("HIP", hip, amd))
    )
    return Examination(checks, vendors)


def guarded(name: str, look: Callable[[], Check], advice: str = "") -> Check:
    """`look()`, or what went wrong in it. The first line of fusegen's own errors says what, the rest how to get it."""
    try:
        return look()
    except MissingError as error:
        first, _, rest = str(error).partition("\n")
        return Check(name, "missing", first, advice_of(rest) or advice)
    except FusegenError as error:
        return Check(name, "broken", str(error).splitlines()[0], advice)
    except Exception as error:  # a vendor's library may raise anything, and doctor is for exactly such machines
        return Check(name, "broken", f"{type(error).__name__}: {error}".splitlines()[0], advice)


def advice_of(text: str) -> str:
    """What an error advises, without its indentation."""
    lines = [line.strip().removeprefix("to get it: ").removeprefix("to get them: ") for line in text.splitlines()]
    return "; ".join(line for line in lines if line)


# ---------------------------------------------------------------- the checks


def python() -> Check:
    return Check("Python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")


def nvrtc() -> Check:
    def look() -> Check:
        return Check("NVRTC", "ok", f"{probed('cuda')}, with cuda_fp16.h and cuda_bf16.h")

    return guarded("NVRTC", look, "pip install --upgrade cuda-bindings nvidia-cuda-nvrtc")


def hiprtc() -> Check:
    def look() -> Check:
        return Check("hiprtc", "ok", probed("hip"))

    return guarded("hiprtc", look, "install ROCm and `pip install hip-python`; on Debian, scripts/install-hiprtc.sh")


def probed(vendor: str) -> str:
    """The vendor's compiler, after it has compiled a kernel. Raises MissingError and CompileError."""
    from fusegen.compiling import compile_source
    from fusegen.targets import target

    binary = compile_source(PROBES[vendor], "probe", target(vendor), filename="probe", threads=32)
    return f"{binary.compiler}, compiled for {binary.target.arch} in {binary.seconds:.2f} s"


def gpus() -> tuple[Check, Check]:
    from fusegen.runtime.finding import present

    names = {"cuda": "NVIDIA GPU", "hip": "AMD GPU"}
    try:
        here = present()
    except Exception as error:
        first, second = (Check(name, "broken", f"{type(error).__name__}: {error}") for name in names.values())
        return first, second
    checks = []
    for vendor, name in names.items():
        found = [str(gpu) for gpu in here.gpus if gpu.vendor == vendor]
        reason, _, rest = here.missing.get(vendor, "none").partition("\n")
        advice = "without it, kernels run in the emulator"
        checks.append(
            Check(name, "ok", "; ".join(found)) if found
            else Check(name, "optional", reason, "; ".join(part for part in (advice_of(rest), advice) if part))
        )  # fmt: skip
    return checks[0], checks[1]


def emulator_compiler() -> Check:
    name = "C++ compiler"

    def look() -> Check:
        from fusegen.emulator.toolchain import INSTALL_HINT, compiler_for, unusable_choice

        version = compiler_for(check=False).version.splitlines()[0]
        refused = unusable_choice()
        emulate(check=False)
        try:
            emulate(check=True)
        except MissingError:
            advice = "; ".join(part for part in (f"for the checking build: {INSTALL_HINT}", refused) if part)
            return Check(name, "ok", f"{version}: the emulator's fast build only", advice)
        return Check(name, "ok", f"{version}: the emulator's fast and checking builds", refused)

    return guarded(name, look, "apt install g++, or pip install ziglang")


def emulate(check: bool) -> None:
    """Build a kernel for the CPU and run it. Raises MissingError and KernelError."""
    import numpy as np

    from fusegen import emulator

    numbers = np.array([1, 2], np.float16)
    kernel = emulator.build(PROBES["hip"], "probe", warp=64, check=check, filename="probe.hip")
    buffer = emulator.Buffer("x", numbers.ctypes.data, numbers.ctypes.data, numbers.nbytes)
    kernel.launch((1, 1, 1), (1, 1, 1), 0, [buffer])
    if numbers[0] != 2:
        raise KernelError("the emulator ran a kernel, and its result was wrong")


def line_tool() -> Check:
    name = "addr2line"

    def look() -> Check:
        from fusegen.emulator.kernel import line_tool as found

        if (tool := found()) is not None:
            return Check(name, "ok", f"{tool}: the emulator's faults come with their source line")
        return Check(name, "optional", "not here; the emulator's faults lack their source line", "apt install binutils")

    return guarded(name, look)


def cache_folder() -> Check:
    name = "cache folder"

    def look() -> Check:
        from fusegen.storage import FOLDER_VARIABLE, KINDS, cache_bound, cache_root, distrusted, make_folder, survey

        folder, bound = cache_root(), cache_bound()
        try:
            make_folder(folder)
            with tempfile.NamedTemporaryFile(dir=folder):
                pass
        except OSError as error:
            found = f"{folder} can't be written: {error.strerror}"
            return Check(name, "broken", found, f"name another in {FOLDER_VARIABLE}")
        for each in (folder, *(folder / kind for kind in KINDS)):
            if said := distrusted(each):
                return Check(name, "broken", *said)
        kinds = survey(folder).values()
        entries, size = sum(kind.entries for kind in kinds), sum(kind.bytes for kind in kinds)
        return Check(
            name, "ok", f"{home_relative(folder)}: {entries} entries, {size / 2**20:.1f} of {bound / 2**20:.1f} MiB"
        )

    return guarded(name, look)


def home_relative(path: Path) -> str:
    try:
        return f"~/{path.relative_to(Path.home())}"
    except ValueError:
        return str(path)


def sass_tool() -> Check:
    name, advice = "nvdisasm", "pip install nvidia-cuda-nvdisasm"

    def look() -> Check:
        from fusegen.compiling.nvrtc import nvdisasm

        nvdisasm()
        return Check(name, "ok", "`inspect --what sass` shows machine code")

    check = guarded(name, look, advice)
    if check.state == "ok":
        return check
    return Check(name, "optional", "not here; `inspect --what sass` needs it for CUDA", advice)


def quick_calls() -> Check:
    name = "quick calls"

    def look() -> Check:
        from fusegen.runtime import guards, native

        native.get()
        made = f"on torch tensors they go through C, made by {' '.join(native.compiler())}"
        try:
            return Check(name, "ok", f"{made}, and {' '.join(guards.compiler())}")
        except MissingError:
            return Check(name, "optional", f"{made}; without a C++ compiler they take some 1 us longer", guards.HINT)

    check = guarded(name, look, "apt install gcc python3-dev, or name another compiler in CC")
    if check.state in ("ok", "optional"):
        return check
    return replace(check, state="optional", found=f"{check.found}; calls on torch tensors take some 1 us longer")


def array_library(name: str) -> Check:
    """Found by its metadata: importing torch takes seconds."""
    for package in PACKAGES.get(name, (name,)):
        try:
            return Check(name, "ok", f"{metadata.version(package)}: its arrays go straight into kernels")
        except metadata.PackageNotFoundError:
            continue
    return Check(name, "optional", "not here; numpy arrays do", GET[name])
