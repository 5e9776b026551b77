"""The host compiler, the flags of the two builds, and what is made with them.

A library is made in the workplace, a folder of this process alone, and loaded from there. The cache keeps its bytes
under the hash of all they depend on: text, headers, flags, compiler version, processor.

Which compiler makes which build:

    fast    g++ 12 or later, clang++ 15 or later, `python -m ziglang c++`
    check   g++ only. Clang's -fsanitize=thread splits a struct copy into its members, and its -fsanitize=alignment does
            not look at such copies, so a misaligned vector access would pass unnoticed (seen with clang 19 and 22).

Either build comes in two arithmetics. By default each operation of the text rounds once, as it is written, and only
what says fmaf is fused. With `contract`, products that are added become fused multiply-adds wherever the compiler can
do it. Which of them a GPU's compiler fuses is its own choice: NVRTC mostly those that one sum alone uses, AMD's also
one that several use, g++ one of which every use is a sum; another version may choose otherwise. So no setting of a host
compiler stands for them, and a kernel is right only if it is right in both arithmetics, which lie at the two ends. The
plain one is the default: it follows from the text, and is the same on every machine.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fusegen.emulator.errors import EmulatorBuildError, EmulatorUnavailable
from fusegen.emulator.workplace import no_room, place, workplace
from fusegen.storage import Key, Store

log = logging.getLogger("fusegen.emulator")

_HERE = Path(__file__).parent
_DIALECT = _HERE / "dialect"
_RUNTIME = _HERE / "runtime"
RUNTIME_PARTS = 4
KERNEL_FILE = "fusegen_kernel.cu"  # what the compiler believes the source is called; the cache needs no file names
INSTALL_HINT = "install one with `apt install g++` (both builds) or `pip install ziglang` (the fast build only)"
_OLDEST = {"gcc": 12, "clang": 15}  # the first with -ftrivial-auto-var-init and, on x86-64, _Float16 in C++

# - C++17: what NVRTC and hiprtc default to.
# - No -ffast-math; denormals are kept, as on the device.
# - -fno-finite-loops: an endless loop must stay one.
# - The pattern in locals: a read of one that nothing has written gives the same nonsense every time.
_COMMON = ("-std=c++17", "-fPIC", "-g1", "-w", "-fvisibility=hidden", "-fno-math-errno", "-fno-finite-loops",
           "-fno-strict-aliasing", "-fno-exceptions", "-U_FORTIFY_SOURCE",
           "-ftrivial-auto-var-init=pattern")  # fmt: skip
_FAST = ("-O2",)
# - -Og and no -sra: one access of the machine per access of the source, a vector's as a whole. A kernel runs as fast
#   as by -O1, and is compiled in two thirds of the time. Only -O1 forms fused multiply-adds, where a build is to.
# - -fexpensive-optimizations, for the vzeroupper that -Og leaves out: without it libm's SSE code ran three times slower
#   (LayerNorm of 512 x 4096: 340 ms, not 104).
# - no -ccp and no -fre: they take "undefined" for whatever suits them, for a forgotten initial value often zero, so
#   that the pattern in locals would not show. Their absence costs nothing measurable.
# - bounds-strict: plain `bounds` takes the last array of a struct for one of open length.
# - No recovery: a fault ends the launch, and code that nothing comes back to is compiled in nine tenths of the time.
_RULES = "alignment,bounds-strict,integer-divide-by-zero,shift-exponent"
_CHECK = ("-DSIMT_CHECK", "-fexpensive-optimizations", "-fno-tree-sra", "-fno-ipa-sra", "-fno-tree-ccp",
          "-fno-tree-fre", "-fno-tree-loop-distribute-patterns", "-fno-optimize-sibling-calls",
          f"-fsanitize=thread,{_RULES}", f"-fno-sanitize-recover={_RULES}")  # fmt: skip
# The runtime is found beside the kernel. All symbols are resolved at load: the watchdog must not strike in the loader.
_LINK = ("-shared", "-Wl,-rpath,$ORIGIN", "-Wl,-z,now,-z,defs", "-lm")
_NO_LIBSTDCXX = ("-nodefaultlibs", "-lgcc", "-lc")  # no kernel calls it, and looking it up is a third of a link's time
# -O3 for the machine at hand: checked products run in an eighth less time than by -O2 for any machine. The fused
# multiply-adds that this allows add exact products (runtime/matrices.cpp), so they round as sums of them do.
_RUNTIME_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-g1", "-w", "-fno-strict-aliasing",
                  "-U_FORTIFY_SOURCE")  # fmt: skip


@dataclass(frozen=True, slots=True)
class LibraryKey(Key):
    """Everything that a library depends on. `arch` says which build it is: `warp 32, checking`."""

    compiler: str
    flags: str
    processor: str  # what -march=native depends on: a cache may lie on a disk that other machines share
    headers: str  # the dialect's hash, and of a kernel the name of its runtime


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


@functools.cache
def compiler() -> Compiler:
    """The C++ compiler to use: $CXX, else g++, clang++, or zig from the `ziglang` package.

    A $CXX that can't be used is passed over with a warning: it may be there for other builds. Raises
    EmulatorUnavailable if there is none, with what to install; likewise on a system other than Linux.
    """
    if sys.platform != "linux":
        raise EmulatorUnavailable(f"the emulator runs on Linux only, and this is {sys.platform}")
    candidates: list[tuple[str, ...]] = [("g++",), ("clang++",)]
    if importlib.util.find_spec("ziglang") is not None:
        candidates.append((sys.executable, "-m", "ziglang", "c++"))
    refused = unusable_choice()
    if not refused and (chosen := _chosen()):
        candidates.insert(0, chosen)
    for command in candidates:
        if isinstance(found := _identify(command), Compiler):
            if refused:
                log.warning(
                    "%s\n  the emulator uses %s instead; set CXX to another compiler, or unset it", refused, found
                )
            return found
    also = f"\n  {refused}" if refused else ""
    raise EmulatorUnavailable(f"the emulator needs a C++ compiler (g++ 12, clang++ 15 or later): {INSTALL_HINT}{also}")


def unusable_choice() -> str:
    """What is wrong with the compiler that $CXX names; empty where it names none, or one that will do."""
    named = os.environ.get("CXX", "").strip()
    found = _identify(_chosen()) if named else ""
    return f"CXX={named} can't be used: {found}" if isinstance(found, str) and found else ""


def _chosen() -> tuple[str, ...]:
    """The words of $CXX, such as `ccache g++`."""
    named = os.environ.get("CXX", "").strip()
    try:
        return tuple(shlex.split(named))
    except ValueError:  # a quotation mark without its other half
        return (named,) if named else ()


def compiler_for(*, check: bool) -> Compiler:
    """Like `compiler()`, but one that can make the given build: a g++ beside a $CXX that can't check will do."""
    found = compiler()
    if not check or found.can_check:
        return found
    if isinstance(other := _identify(("g++",)), Compiler) and other.can_check:
        log.debug("%s can't make the checking build; %s makes it", found, other)
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
def _identify(command: tuple[str, ...]) -> Compiler | str:
    """What answers to this command, or why that will not do."""
    if shutil.which(command[0]) is None:
        return f"there is no program {command[0]}"
    try:
        version = _output([*command, "--version"])
        family = "clang" if "clang" in version.lower() else "gcc"
        number = re.search(r"clang version (\d+)", version) if family == "clang" else None
        major = int(number[1] if number else _output([*command, "-dumpversion"]).split(".")[0])
    except (OSError, ValueError, subprocess.SubprocessError):
        return f"it does not say its version as a C++ compiler does, when asked `{' '.join(command)} --version`"
    if major < _OLDEST[family]:
        return f"it is {family} {major}, and the emulator needs {_OLDEST[family]} or later"
    return Compiler(command, version.strip(), family)


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    # `native` for the fused multiply-add and the half conversions. aarch64 has both in its base set.
    return ("-march=native",) if platform.machine() == "x86_64" else ()


@functools.cache
def _processor() -> str:
    """Which instructions -march=native may choose."""
    if not _machine_flags():
        return platform.machine()
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = dict(re.findall(r"^(model name|flags)\s*: (.*)$", text, re.MULTILINE))
    return f"{found.get('model name')}, flags {_digest(found.get('flags', '').encode())[:12]}"


@functools.cache
def _headers() -> str:
    return _digest(*(path.read_bytes() for path in sorted(_DIALECT.rglob("*.h"))))


@functools.cache
def _runtime_text() -> str:
    return _digest(*(path.read_bytes() for suffix in ("cpp", "h") for path in sorted(_RUNTIME.glob(f"*.{suffix}"))))


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def runtime_library(found: Compiler, *, check: bool, extra: Sequence[str] = ()) -> tuple[Path, LibraryKey, list[str]]:
    """Where the runtime library of a build lies once it is there, what it depends on, and its compiler's flags."""
    flags = [*_RUNTIME_FLAGS, *_machine_flags(), *(["-DSIMT_CHECK"] if check else []), *extra]
    build = "check" if check else "fast"
    key = LibraryKey("emulator runtime", build, _runtime_text(), found.version, " ".join(flags), _processor(),
                     _headers())  # fmt: skip
    return workplace() / f"simt_{build}_{key.digest[:24]}.so", key, flags


def build_runtime(found: Compiler, *, check: bool, cache: Path | None, extra: Sequence[str] = ()) -> Path:
    """The runtime library of a build: one shared library for all kernels, since it holds thread-local state.

    Its sources are compiled in parts at the same time, each of several sources: each by itself, they take twice as long
    in all, most of it to read the same headers.
    """
    path, key, flags = runtime_library(found, check=check, extra=extra)

    def make(library: Path) -> str | None:
        def compiled(number: int, sources: Sequence[Path]) -> str | None:
            whole = library.with_name(f"runtime_{number}.cpp")
            whole.write_text("".join(f'#include "{source}"\n' for source in sources), encoding="utf-8")
            return _run([*found.command, *flags, "-c", str(whole)], whole.with_suffix(".o"))

        parts = runtime_parts()
        with ThreadPoolExecutor(len(parts)) as pool:
            logs = [log for log in pool.map(compiled, range(len(parts)), parts) if log is not None]
        if logs:
            return "\n".join(logs)
        objects = [str(library.with_name(f"runtime_{number}.o")) for number in range(len(parts))]
        link = ["-shared", f"-Wl,-soname,{path.name}", *objects, "-lpthread"]
        return _run([*found.command, *flags, *link], library)

    if (log := _provide(path, key, cache, make)) is not None:
        raise EmulatorBuildError(f"`{found}` can't compile the emulator's own runtime\n{log}", log)
    return path


def runtime_parts() -> list[list[Path]]:
    """The runtime's sources in parts of much the same size, the largest sources first."""
    parts: list[list[Path]] = [[] for _ in range(RUNTIME_PARTS)]
    sizes = {source: source.stat().st_size for source in sorted(_RUNTIME.glob("*.cpp"))}
    for source in sorted(sizes, key=lambda source: -sizes[source]):
        min(parts, key=lambda part: sum(sizes[other] for other in part)).append(source)
    return parts


def build_kernel(
    text: str, *, entry: str, warp: int, check: bool, cache: Path | None, contract: bool = False,
    extra: Sequence[str] = (), runtime: Path | None = None,
) -> tuple[Path, str | None]:  # fmt: skip
    """Compile `text`, which ends with SIMT_EXPORT; gives the library and, if the compiler refused, its log.

    `contract`: with fused multiply-adds. `cache` None is the user's. Raises EmulatorUnavailable without a compiler, and
    where there is no room to build.
    `extra` are further compiler flags; another `runtime`, which must lie in the workplace, is for the emulator's own
    tests.
    """
    found = compiler_for(check=check)
    beside = runtime or runtime_library(found, check=check)[0]
    arithmetic = f"-ffp-contract={'fast' if contract else 'off'}"
    own = ("-O1" if contract else "-Og", *_CHECK) if check else _FAST
    flags = [*_COMMON, arithmetic, *_machine_flags(), *own, f"-DSIMT_WARP={warp}", *extra]
    link = [*_LINK, *(_NO_LIBSTDCXX if found.family == "gcc" else ())]
    build = f"warp {warp}, {'checking' if check else 'fast'}{', contracting' if contract else ''}"
    key = LibraryKey(entry, build, _digest(text.encode()), found.version, " ".join([*flags, *link]), _processor(),
                     _digest(_headers().encode(), beside.name.encode()))  # fmt: skip
    path = workplace() / f"kernel_{key.digest[:24]}.so"

    def make(library: Path) -> str | None:
        source, compiled = library.with_name(KERNEL_FILE), library.with_name("kernel.o")
        source.write_text(f'#line 1 "{KERNEL_FILE}"\n{text}', encoding="utf-8")
        header = precompiled_dialect(found, flags, build=build, cache=cache)
        # Two steps, because a link with -fsanitize would bring in the sanitizers' own runtimes.
        compile_command = [*found.command, *flags, "-include", str(header), f"-I{_DIALECT / 'include'}",
                           "-x", "c++", "-c", str(source)]  # fmt: skip
        if (log := _run(compile_command, compiled)) is not None:
            return log
        runtime_is_there.result()
        return _run([*found.command, str(compiled), str(beside), *link], library)

    with ThreadPoolExecutor(1) as pool:  # the first time on a machine the runtime is made meanwhile
        runtime_is_there = pool.submit(lambda: runtime or build_runtime(found, check=check, cache=cache))
        log = _provide(path, key, cache, make)
        runtime_is_there.result()
    return path, log


def precompiled_dialect(found: Compiler, flags: Sequence[str], *, build: str, cache: Path | None) -> Path:
    """The header to include in front of a kernel that is compiled with `flags`: the dialect, which g++ parses once.

    Parsing it is a third of what a small kernel takes. g++ reads NAME.gch in place of a header NAME where it lies
    beside it and was made by the same compiler with the same flags, else NAME. Other compilers get the header itself.
    """
    header = _DIALECT / "dialect.h"
    if found.family != "gcc":
        return header
    key = LibraryKey("emulator dialect", build, _headers(), found.version, " ".join(flags), _processor(), "")
    path = workplace() / f"dialect_{key.digest[:24]}.h"

    def make(made: Path) -> str | None:
        return _run([*found.command, *flags, "-x", "c++-header", str(header)], made)

    if _provide(path.with_suffix(".h.gch"), key, cache, make) is not None:
        return header
    if not path.exists():
        place(path, f'#include "{header}"\n'.encode())
    return path


def _provide(path: Path, key: LibraryKey, cache: Path | None, make: Callable[[Path], str | None]) -> str | None:
    """Have a library at `path`: this process's own, the cache's, or one made now. Gives the log of a failure."""
    store = Store("emulator", cache)

    def kept() -> bytes | None:
        return store.load(key, lambda facts, library: library)

    try:
        if path.exists():
            if not store.holds(key):  # evicted since
                store.store(key, {}, path.read_bytes())
            return None
        if (data := kept()) is None:
            with store.making(key) as waited:
                if not waited or (data := kept()) is None:
                    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                        made = Path(folder, path.name)
                        if (log := make(made)) is not None:
                            return log
                        data = made.read_bytes()
                    store.store(key, {}, data)
    except OSError as error:
        raise no_room(error.strerror or str(error)) from error
    place(path, data)
    return None


def _run(command: list[str], made: Path) -> str | None:
    """Run a compiler that writes `made`. Gives the log of a failure; raises EmulatorUnavailable on a full disk."""
    environment = {**os.environ, "LC_ALL": "C"}  # its messages are read, and in English
    done = subprocess.run(
        [*command, "-o", str(made)], capture_output=True, text=True, errors="replace", env=environment
    )
    full = os.strerror(errno.ENOSPC)
    if done.returncode and full in done.stderr:
        raise no_room(full)
    return done.stderr if done.returncode else None
