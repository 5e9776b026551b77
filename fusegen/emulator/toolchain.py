"""The host compiler, the flags of the two builds, and the cache of what it made.

Cached files are named by the hash of all they depend on: text, headers, flags, compiler version, processor. A file is
made under another name and moved into place, so any number of processes may share a cache: the worst that happens is
that two of them make the same file.

Which compiler makes which build:

    fast    g++ 12 or later, clang++ 15 or later, `python -m ziglang c++`
    check   g++ only. Clang's -fsanitize=thread splits a struct copy into its members, and its -fsanitize=alignment does
            not look at such copies, so a misaligned vector access would pass unnoticed (seen with clang 19 and 22).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fusegen.emulator.errors import EmulatorBuildError, EmulatorUnavailable
from fusegen.storage import FOLDER_VARIABLE, cache_root

_HERE = Path(__file__).parent
_DIALECT = _HERE / "dialect"
_RUNTIME = _HERE / "runtime"
KERNEL_FILE = "fusegen_kernel.cu"  # what the compiler believes the source is called; the cache needs no file names
INSTALL_HINT = "install one with `apt install g++` (both builds) or `pip install ziglang` (the fast build only)"
_OLDEST = {"gcc": 12, "clang": 15}  # the first with -ftrivial-auto-var-init and, on x86-64, _Float16 in C++

# - C++17: what NVRTC and hiprtc default to.
# - Contraction to fused multiply-add: the default of both GPU compilers, so it is on here too. No -ffast-math;
#   denormals are kept, as on the device.
# - -fno-finite-loops: an endless loop must stay one.
# - The pattern in locals: a read of one that nothing has written gives the same nonsense every time.
_COMMON = ("-std=c++17", "-fPIC", "-g1", "-w", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast",
           "-fno-finite-loops", "-fno-strict-aliasing", "-fno-exceptions", "-U_FORTIFY_SOURCE",
           "-ftrivial-auto-var-init=pattern")  # fmt: skip
_FAST = ("-O2",)
# - -O1 and no -sra: one access of the machine per access of the source, a vector's as a whole.
# - -fexpensive-optimizations, for the vzeroupper that -O1 leaves out: without it libm's SSE code ran three times slower
#   (LayerNorm of 512 x 4096: 340 ms, not 104).
# - no -ccp and no -fre: they take "undefined" for whatever suits them, for a forgotten initial value often zero, so
#   that the pattern in locals would not show. Their absence costs nothing measurable.
# - bounds-strict: plain `bounds` takes the last array of a struct for one of open length.
_CHECK = ("-O1", "-DSIMT_CHECK", "-fexpensive-optimizations", "-fno-tree-sra", "-fno-ipa-sra", "-fno-tree-ccp",
          "-fno-tree-fre", "-fno-tree-loop-distribute-patterns", "-fno-optimize-sibling-calls",
          "-fsanitize=thread,alignment,bounds-strict,integer-divide-by-zero,shift-exponent")  # fmt: skip
# The runtime is found beside the kernel. All symbols are resolved at load: the watchdog must not strike in the loader.
_LINK = ("-shared", "-Wl,-rpath,$ORIGIN", "-Wl,-z,now,-z,defs", "-lm")
_RUNTIME_FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-g1",
    "-w",
    "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",
)

# Of a 64-bit ELF file, up to and with what says where the table of sections is: e_shoff, e_shentsize, e_shnum.
_ELF_HEADER = struct.Struct("<40x Q 10x HH")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler that was found: how to call it, and exactly which one it is."""

    command: tuple[str, ...]
    version: str
    family: str  # "gcc" or "clang"

    @property
    def can_check(self) -> bool:
        """Whether it can make the checking build."""
        return self.family == "gcc"

    def __str__(self) -> str:
        return " ".join(self.command)


def default_cache() -> Path:
    """Where compiled kernels are kept unless the caller says otherwise."""
    return cache_root() / "emulator"


@functools.cache
def compiler() -> Compiler:
    """The C++ compiler to use: $CXX, else g++, clang++, or zig from the `ziglang` package.

    Raises EmulatorUnavailable if there is none, with what to install; likewise on a system other than Linux.
    """
    if sys.platform != "linux":
        raise EmulatorUnavailable(f"the emulator runs on Linux only, and this is {sys.platform}")
    candidates: list[tuple[str, ...]] = []
    if chosen := os.environ.get("CXX"):
        candidates.append(tuple(chosen.split()))
    candidates += [("g++",), ("clang++",)]
    if importlib.util.find_spec("ziglang") is not None:
        candidates.append((sys.executable, "-m", "ziglang", "c++"))
    for command in candidates:
        if found := _identify(command):
            return found
    raise EmulatorUnavailable(f"the emulator needs a C++ compiler (g++ 12, clang++ 15 or later): {INSTALL_HINT}")


def compiler_for(*, check: bool) -> Compiler:
    """Like `compiler()`, but one that can make the given build: a g++ beside a $CXX that can't check will do."""
    found = compiler()
    if not check or found.can_check:
        return found
    if (other := _identify(("g++",))) and other.can_check:
        return other
    raise EmulatorUnavailable(f"the checking build needs g++, and only `{found}` is here: {INSTALL_HINT}")


def can_check() -> bool:
    """Whether the checking build can be made here."""
    try:
        compiler_for(check=True)
    except EmulatorUnavailable:
        return False
    return True


@functools.cache
def _identify(command: tuple[str, ...]) -> Compiler | None:
    """What answers to this command, or None if nothing does, or something too old."""
    if shutil.which(command[0]) is None:
        return None
    try:
        version = _output([*command, "--version"])
        family = "clang" if "clang" in version.lower() else "gcc"
        number = re.search(r"clang version (\d+)", version) if family == "clang" else None
        major = int(number[1] if number else _output([*command, "-dumpversion"]).split(".")[0])
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Compiler(command, version.strip(), family) if major >= _OLDEST[family] else None


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    # `native` for the fused multiply-add and the half conversions. aarch64 has both in its base set.
    return ("-march=native",) if platform.machine() == "x86_64" else ()


@functools.cache
def _processor() -> str:
    """What -march=native depends on: a cache may lie on a disk that other machines share."""
    if not _machine_flags():
        return platform.machine()
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    fields = re.findall(r"^(?:model name|flags)\s*:.*$", text, re.MULTILINE)
    return "\n".join(fields[:2])


@functools.cache
def _headers() -> bytes:
    return b"\0".join(path.read_bytes() for path in sorted(_DIALECT.rglob("*.h")))


def _digest(*parts: bytes | str) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:24]


def build_runtime(found: Compiler, *, check: bool, cache: Path, extra: Sequence[str] = ()) -> Path:
    """The runtime library of a build: one shared library for all kernels, since it holds thread-local state."""
    sources = sorted(_RUNTIME.glob("*.cpp"))
    flags = [*_RUNTIME_FLAGS, *(["-DSIMT_CHECK"] if check else []), *extra]
    texts = [path.read_bytes() for path in (*sources, *sorted(_RUNTIME.glob("*.h")))]
    name = f"simt_{'check' if check else 'fast'}_{_digest(found.version, repr(flags), _headers(), *texts)}.so"
    target = cache / name
    if not _is_whole(target):
        _require_writable(cache)
        command = [*found.command, *flags, "-shared", f"-Wl,-soname,{name}",
                   *map(str, sources), "-lpthread"]  # fmt: skip
        log = _run_into(command, target)
        if log is not None:
            raise EmulatorBuildError(f"`{found}` can't compile the emulator's own runtime\n{log}", log)
    return target


def build_kernel(
    text: str, *, warp: int, check: bool, cache: Path | None, extra: Sequence[str] = (), runtime: Path | None = None
) -> tuple[Path, str | None]:
    """Compile `text`, which ends with SIMT_EXPORT; gives the library and, if the compiler refused, its log.

    Raises EmulatorUnavailable without a compiler. `extra` compiler flags and another `runtime`, which must lie in the
    cache, are for the emulator's own tests.
    """
    found = compiler_for(check=check)
    cache = cache or default_cache()
    runtime = runtime or build_runtime(found, check=check, cache=cache)
    flags = [*_COMMON, *_machine_flags(), *(_CHECK if check else _FAST), f"-DSIMT_WARP={warp}", *extra]
    key = _digest(found.version, repr((flags, _LINK)), _processor(), _headers(), runtime.name, text)
    target = cache / f"kernel_{key}.so"
    if _is_whole(target):
        return target, None
    _require_writable(cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix="build_") as folder:
        source = Path(folder) / KERNEL_FILE
        source.write_text(f'#line 1 "{KERNEL_FILE}"\n{text}', encoding="utf-8")
        compiled = Path(folder) / "kernel.o"
        # Two steps, because a link with -fsanitize would bring in the sanitizers' own runtimes.
        compile_command = [*found.command, *flags, "-include", str(_DIALECT / "dialect.h"), f"-I{_DIALECT / 'include'}",
                           "-x", "c++", "-c", str(source)]  # fmt: skip
        log = _run_into(compile_command, compiled)
        if log is None:
            log = _run_into([*found.command, str(compiled), str(runtime), *_LINK], target)
    return target, log


def _is_whole(library: Path) -> bool:
    """Whether a library is there with all its bytes: a full disk may have cut it short, and the loader may crash on it.

    The table of sections comes last in the file, and the header says where it ends.
    """
    try:
        with library.open("rb") as file:
            header = file.read(_ELF_HEADER.size)
            length = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < _ELF_HEADER.size or not header.startswith(b"\x7fELF"):
        return False
    start, entry_size, entries = _ELF_HEADER.unpack(header)
    return bool(length >= start + entry_size * entries)


def _require_writable(cache: Path) -> None:
    """Make the folder. Raises EmulatorUnavailable: a library that can't be written can't be loaded either."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise EmulatorUnavailable(
            f"the emulator builds its libraries in {cache}, which can't be written: {error.strerror}\n"
            f"  name another folder in {FOLDER_VARIABLE}"
        ) from error


def _run_into(command: list[str], target: Path) -> str | None:
    """Run a compiler that writes `target`, which appears whole or not at all. Gives the log of a failure."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix="build_", suffix=".so")
    os.close(handle)
    try:
        done = subprocess.run([*command, "-o", temporary], capture_output=True, text=True)
        if done.returncode:
            return done.stderr
        os.replace(temporary, target)
        return None
    finally:
        Path(temporary).unlink(missing_ok=True)
