"""Compiling for both vendors without a GPU: resources, occupancy, and errors."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from elftools.elf.elffile import ELFFile

from fusegen.compiling import (
    Binary,
    Resources,
    compile_options,
    compile_source,
    compiler_version,
    disassemble,
    hiprtc,
    nvrtc,
    ptx,
)
from fusegen.compiling.options import FOR_CUBIN
from fusegen.compiling.refusal import excerpt, places
from fusegen.compiling.resources import of_cubin
from fusegen.compiling.versions import known_version, noted
from fusegen.errors import CompileError, MissingError, RequestError
from fusegen.targets import A100, H200, L40S, MI250X, MI300X, Target, target

NAMES = (
    "cuda:sm_80",
    "cuda:sm_90",
    "cuda:sm_90a",
    "cuda:sm_100",
    "cuda:sm_100a",
    "cuda:sm_103a",
    "cuda:sm_120",
    "hip:gfx90a",
    "hip:gfx942",
    "hip:gfx950",
)

PLAIN = """
extern "C" __global__ __launch_bounds__(128) void plain(float* x) {
  __shared__ float tile[1000];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = tile[threadIdx.x ^ 1];
}
"""

# An array that is indexed at run time can't live in registers; no register is spilled all the same.
INDEXED = """
extern "C" __global__ __launch_bounds__(128) void indexed(float* x, const int* at) {
  float row[256];
  for (int i = 0; i < 256; ++i) row[at[i]] = x[i] + at[i];
  x[threadIdx.x] = row[at[threadIdx.x]];
}
"""

# 1024 threads leave 64 registers each on CUDA and 128 on HIP; 192 values are wanted at once.
SPILLING = """
extern "C" __global__ __launch_bounds__(1024) void spilling(float* x, int n) {
  float v[192];
#pragma unroll
  for (int i = 0; i < 192; ++i) v[i] = x[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; ++k) {
#pragma unroll
    for (int i = 0; i < 192; ++i) v[i] = v[i] * v[(i * 7 + 5) % 192] + x[k];
  }
#pragma unroll
  for (int i = 0; i < 192; ++i) x[i * 1024 + threadIdx.x] = v[i];
}
"""

HALVES = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
extern "C" __global__ void halves(__half* h, __nv_bfloat16* b) {
  b[threadIdx.x] = __float2bfloat16_rn(__half2float(h[threadIdx.x]));
}
"""


def built(text: str, entry: str, t: Target, threads: int = 128, dynamic_shared: int = 0) -> Binary:
    """The kernel compiled, or the test skipped where the vendor's compiler is missing."""
    try:
        compiler_version(t.vendor)
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])
    filename = entry + t.spelling.file_suffix
    return compile_source(text, entry, t, filename=filename, threads=threads, dynamic_shared=dynamic_shared)


@pytest.mark.parametrize("name", NAMES)
def test_plain_kernel_needs_its_shared_memory_and_no_stack(name: str) -> None:
    binary = built(PLAIN, "plain", target(name), dynamic_shared=1024)
    needs = binary.resources
    assert binary.code.startswith(b"\x7fELF")
    assert (needs.static_shared_bytes, needs.dynamic_shared_bytes, needs.shared_bytes) == (4000, 1024, 5024)
    assert (needs.stack_bytes, needs.spill_bytes, needs.scalar_spills) == (0, 0, 0)
    assert 0 < needs.registers < 32
    assert (needs.scalar_registers > 0) == (binary.target.vendor == "hip")
    assert 0 < needs.code_bytes < len(binary.code)
    assert binary.occupancy == needs.occupancy(binary.target, 128)


@pytest.mark.parametrize("name", NAMES)
def test_array_indexed_at_run_time_is_seen_on_the_stack(name: str) -> None:
    needs = built(INDEXED, "indexed", target(name)).resources
    assert needs.stack_bytes >= 256 * 4
    assert needs.spill_bytes == 0


@pytest.mark.parametrize("name", NAMES)
def test_spills_are_seen(name: str) -> None:
    needs = built(SPILLING, "spilling", target(name), threads=1024).resources
    assert needs.spill_bytes > 0
    assert needs.stack_bytes > 0
    assert needs.registers == {"cuda": 64, "hip": 128}[target(name).vendor]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("cuda")])
def test_log_and_cubin_agree_on_registers_and_stack(name: str) -> None:
    for text, entry in ((PLAIN, "plain"), (INDEXED, "indexed"), (SPILLING, "spilling")):
        binary = built(text, entry, target(name))
        registers, frame = attributes(binary.code)
        assert binary.resources.registers == registers
        assert binary.resources.stack_bytes == frame


def attributes(cubin: bytes) -> tuple[int, int]:
    """EIATTR_REGCOUNT and EIATTR_FRAME_SIZE of a cubin with one kernel: 4, code, length in two bytes, symbol, value."""
    info = ELFFile(io.BytesIO(cubin)).get_section_by_name(".nv.info").data()
    values = {info[at + 1]: int.from_bytes(info[at + 8 : at + 12], "little") for at in range(0, len(info), 12)}
    return values[0x2F], values[0x11]


def test_resources_are_those_of_the_named_kernel() -> None:
    assert built(PLAIN + INDEXED, "plain", H200).resources.stack_bytes == 0
    assert built(PLAIN + INDEXED, "indexed", H200).resources.static_shared_bytes == 0
    assert built(PLAIN + INDEXED, "plain", MI300X).resources.stack_bytes == 0


def test_the_first_compile_may_come_from_many_threads() -> None:
    """In a new process, where nothing of NVIDIA's is imported yet: packages whose modules import each other in a circle
    failed now and then when threads imported them at once."""
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from fusegen.compiling import compiler_version\n"
        "with ThreadPoolExecutor(16) as pool:\n"
        "    print(set(pool.map(lambda _: compiler_version('cuda'), range(16))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{'nvrtc ")


def test_frames_of_called_functions_count() -> None:
    log = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers, 1040 bytes cumulative stack size
ptxas info    : Function properties for helper
ptxas         .     1040 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
"""
    needs = of_cubin(built(PLAIN, "plain", H200).code, log, "k", 0)
    assert (needs.registers, needs.stack_bytes, needs.spill_bytes) == (30, 1040, 0)


def test_a_missing_kernel_is_refused() -> None:
    with pytest.raises(CompileError, match="no account"):
        built(PLAIN, "elsewhere", H200)
    with pytest.raises(CompileError, match="no such kernel, only plain"):
        built(PLAIN, "elsewhere", MI300X)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("cuda")])
def test_headers_of_half_types_are_found(name: str) -> None:
    assert built(HALVES, "halves", target(name)).resources.registers > 0


def test_ptx_needs_no_driver() -> None:
    built(PLAIN, "plain", H200)
    assert ".target sm_90a" in ptx(PLAIN, H200, filename="plain.cu")
    assert ".visible .entry halves" in ptx(HALVES, A100, filename="halves.cu")
    with pytest.raises(RequestError, match="has no PTX"):
        ptx(PLAIN, MI300X, filename="plain.hip")
    with pytest.raises(CompileError, match="undefined"):
        ptx(PLAIN.replace("tile[threadIdx.x ^ 1]", "nothing"), H200, filename="plain.cu")


def test_amd_code_is_disassembled() -> None:
    text = disassemble(built(PLAIN, "plain", MI300X))
    assert text.splitlines()[0].strip().startswith("0  s_")
    assert "s_barrier" in text
    assert "s_endpgm" in text


def test_cuda_code_is_disassembled_or_the_tool_named(monkeypatch: pytest.MonkeyPatch) -> None:
    binary = built(PLAIN, "plain", H200)
    try:
        assert "BAR.SYNC" in disassemble(binary)
    except MissingError as error:
        assert "pip install nvidia-cuda-nvdisasm" in str(error)  # noqa: PT017
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingError, match="pip install nvidia-cuda-nvdisasm"):
        disassemble(binary)


def test_options_for_the_key_are_those_of_the_compiler_and_name_no_folder() -> None:
    compiler = built(HALVES, "halves", H200).compiler
    found = compile_options(H200, compiler)
    assert {"-arch=sm_90a", "--std=c++17", "--ptxas-options=-v"} <= set(found)
    told = {*nvrtc.options(HALVES, H200, compiler), FOR_CUBIN}
    assert told - set(found) == {nvrtc.headers(compiler)}
    assert not any("/" in option for option in found), found
    assert compile_options(A100, compiler) != found


def test_options_that_the_environment_adds_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """hiprtc appends them by itself, in a process that starts with them."""
    built(PLAIN, "plain", MI300X)
    before = compile_options(MI300X, "hiprtc 7.2.0")
    assert before == ("--offload-arch=gfx942", "-O3", "-std=c++17")
    monkeypatch.setenv("HIPRTC_COMPILE_OPTIONS_APPEND", "-ffast-math")
    assert compile_options(MI300X, "hiprtc 7.2.0") == (*before, "HIPRTC_COMPILE_OPTIONS_APPEND=-ffast-math")


def test_same_source_same_bytes_also_from_threads() -> None:
    built(PLAIN, "plain", H200)
    with ThreadPoolExecutor(4) as pool:
        codes = set(pool.map(lambda _: built(PLAIN, "plain", H200).code, range(8)))
    assert len(codes) == 1


# --- occupancy, by hand -------------------------------------------------------------------------------------------


def needing(registers: int = 32, shared: int = 0, scalars: int = 0) -> Resources:
    """A kernel of these needs."""
    return Resources(registers, scalars, 0, 0, 0, shared, 0, 0)


@pytest.mark.parametrize(
    ("t", "needs", "threads", "blocks", "fraction", "limit"),
    [
        # 64 warps of 32 threads; 65536 registers / (32 x 32) = 64 warps
        (A100, needing(32), 256, 8, 1.0, "threads"),
        # 33 rounds up to 40: 16384 / 1280 = 12 warps on each of 4 schedulers, 48 in all, 6 blocks of 8
        (A100, needing(33), 256, 6, 0.75, "registers"),
        # 255 rounds up to 256: 2 warps on each scheduler, 8 in all
        (H200, needing(255), 256, 1, 0.125, "registers"),
        # 32 blocks of one warp are half of 64 warps
        (H200, needing(16), 32, 32, 0.5, "blocks"),
        # 48 KiB and 1 KiB reserved: 228 / 49 = 4
        (H200, needing(32, 48 * 1024), 128, 4, 0.25, "shared memory"),
        (H200, needing(32, 227 * 1024), 1024, 1, 0.5, "shared memory"),
        (H200, needing(32, 227 * 1024 + 1), 1024, 0, 0.0, "shared memory"),
        (H200, needing(65), 1024, 0, 0.0, "registers"),
        (H200, needing(32), 2048, 0, 0.0, "threads"),
        # 48 warps on compute capability 8.9: one block of 32
        (L40S, needing(40), 1024, 1, 32 / 48, "threads"),
        # 32 waves of 64 threads; 512 registers / 64 = 8 waves on each of 4 SIMDs
        (MI300X, needing(64), 256, 8, 1.0, "threads"),
        # 65 rounds up to 72: 512 / 72 = 7 waves on each SIMD, 28 in all, 7 blocks of 4
        (MI300X, needing(65), 256, 7, 0.875, "registers"),
        (MI250X, needing(148), 256, 3, 0.375, "registers"),
        (MI250X, needing(428), 256, 1, 0.125, "registers"),
        # 16 KiB and a byte rounds up to 16.5 KiB, of 64 KiB: 3
        (MI300X, needing(32, 16 * 1024 + 1), 256, 3, 0.375, "shared memory"),
        # 800 scalar registers / 106 = 7 waves on each SIMD
        (MI300X, needing(32, 0, 106), 256, 7, 0.875, "registers"),
        (MI300X, needing(32, 0, 100), 64, 32, 1.0, "threads"),
    ],
)
def test_occupancy_by_hand(t: Target, needs: Resources, threads: int, blocks: int, fraction: float, limit: str) -> None:
    found = needs.occupancy(t, threads)
    assert (found.blocks_per_sm, found.fraction, found.limited_by) == (blocks, fraction, limit)
    assert found.warps_per_sm == blocks * -(-threads // t.warp)


# --- errors -------------------------------------------------------------------------------------------------------

WRONG = """
extern "C" __global__ void wrong(float* x) {
  int i = threadIdx.x;
  float a = x[i];
  float b = absent(a);
  x[i] = b;
  x[i] += 1.0f;
  x[i] += 2.0f;
  x[i] += 3.0f;
}
"""


@pytest.mark.parametrize("t", [H200, MI300X], ids=str)
def test_compile_error_shows_log_source_and_origin(t: Target) -> None:
    built(PLAIN, "plain", t)
    with pytest.raises(CompileError) as error:
        compile_source(WRONG, "wrong", t, filename="wrong.x", threads=32, origin="rowwise.cu.j2, 256 threads")
    text = str(error.value)
    lines = text.splitlines()
    assert lines[0] == f"{compiler_version(t.vendor)} refused wrong.x for {t.name} ({t.arch})"
    assert lines[1] == "  from: rowwise.cu.j2, 256 threads"
    assert "absent" in text.split("| ")[0]  # the compiler's own words
    assert "> 5 |   float b = absent(a);" in lines
    assert '  2 | extern "C" __global__ void wrong(float* x) {' in lines
    assert "  8 |   x[i] += 2.0f;" in lines
    assert not any("x[i] += 3.0f" in line for line in lines)
    assert "\0" not in text
    assert "/tmp" not in text


def test_places_put_errors_first_and_name_each_line_once() -> None:
    log = "k.cu(9): warning #177-D: unused\nk.cu(3): error: no\n/x/k.cu(3): error: again\nother.cu(4): error: no"
    assert places(log, "k.cu") == [3, 9]
    assert places("/tmp/a/k.hip:12:7: error: no\nk.hip:2:1: note: here", "k.hip") == [12, 2]


def test_excerpt_leaves_out_what_is_far() -> None:
    lines = [f"line {n}" for n in range(1, 31)]
    assert excerpt(lines, [1, 20])[:6] == [
        ">  1 | line 1",
        "   2 | line 2",
        "   3 | line 3",
        "   4 | line 4",
        "  ...",
        "  17 | line 17",
    ]


def test_architecture_of_no_target_is_refused_before_the_compiler_sees_it() -> None:
    with pytest.raises(RequestError, match="gfx9999 is the architecture of no target"):
        compile_source(PLAIN, "plain", replace(MI300X, arch="gfx9999"), filename="k.hip", threads=64)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """The versions that were found are looked for again, before the test and after it."""
    caches = (nvrtc.version, hiprtc.version)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_a_compiler_that_another_thread_is_importing_is_not_yet_known(monkeypatch: pytest.MonkeyPatch) -> None:
    noted(compiler_version("cuda"))
    monkeypatch.setitem(sys.modules, "fusegen.compiling.nvrtc", ModuleType("half of it"))
    assert known_version("cuda").startswith("nvrtc ")


@pytest.mark.usefixtures("forgetful")
def test_missing_compilers_are_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cuda.bindings", "cuda.bindings.nvrtc", "hip.hip", "rocm.bindings.hip"):
        monkeypatch.setitem(sys.modules, module, None)  # makes its import fail
    with pytest.raises(MissingError, match=r"(?s)NVRTC.* missing.*pip install .*nvidia-cuda-nvrtc"):
        compile_source(PLAIN, "plain", H200, filename="k.cu", threads=32)
    with pytest.raises(MissingError, match=r"(?s)hiprtc.* missing.*scripts/install-hiprtc.sh"):
        compile_source(PLAIN, "plain", MI300X, filename="k.hip", threads=64)


@pytest.mark.usefixtures("forgetful")
def test_missing_libraries_are_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise RuntimeError("failed to dlopen")

    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(bindings, "nvrtcVersion", absent)
    with pytest.raises(MissingError, match="NVRTC"):
        compiler_version("cuda")
    monkeypatch.setattr(pytest.importorskip("hip.hip"), "hipRuntimeGetVersion", absent)
    with pytest.raises(MissingError, match="hiprtc"):
        compiler_version("hip")


def test_headers_of_an_older_nvrtc_come_from_a_wheel_or_are_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    monkeypatch.setattr(nvrtc, "headers_beside_library", lambda: None)
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda library: str(tmp_path))
    assert nvrtc.headers("nvrtc 12.9") == f"--include-path={tmp_path}"
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda library: None)
    with pytest.raises(MissingError, match=r"cuda_fp16\.h"):
        nvrtc.headers("nvrtc 12.9")


def test_headers_beside_an_older_nvrtc_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    loaded = SimpleNamespace(abs_path=str(tmp_path / "lib" / "libnvrtc.so.12"))
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda name: loaded)
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda library: "/elsewhere")
    find = nvrtc.headers_beside_library.__wrapped__
    monkeypatch.setattr(nvrtc, "headers_beside_library", find)
    assert nvrtc.headers("nvrtc 12.9") == "--include-path=/elsewhere"
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_fp16.h").write_text("")
    assert nvrtc.headers("nvrtc 12.9") == f"--include-path={tmp_path / 'include'}"


def test_a_folder_for_headers_that_cannot_be_made_is_missing_and_not_the_kernels_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not nvrtc.headers(compiler_version("cuda")).startswith("--use-bundled-headers"):
        pytest.skip("needs an NVRTC that brings its headers along, 13.3 or later")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nope")
    with pytest.raises(MissingError, match=r"can't make /proc/nope.*\n  name a folder .* XDG_CACHE_HOME"):
        compile_source(f"#include <cuda_fp16.h>\n{PLAIN}", "plain", H200, filename="a.cu", threads=32)


def test_bundles_are_unwrapped() -> None:
    def bundle(*entries: tuple[str, bytes]) -> bytes:
        at = 32 + sum(24 + len(name) for name, _ in entries)
        table, body = b"", b""
        for name, code in entries:
            table += b"".join(n.to_bytes(8, "little") for n in (at + len(body), len(code), len(name))) + name.encode()
            body += code
        return hiprtc.BUNDLE + len(entries).to_bytes(8, "little") + table + body

    wrapped = bundle(("host-x86_64-unknown-linux--", b""), ("hipv4-amdgcn-amd-amdhsa--gfx942", b"\x7fELFcode"))
    assert hiprtc.unbundle(wrapped, "gfx942") == b"\x7fELFcode"
    assert hiprtc.unbundle(b"\x7fELFcode", "gfx942") == b"\x7fELFcode"
    with pytest.raises(CompileError, match="none for gfx90a"):
        hiprtc.unbundle(wrapped, "gfx90a")
    with pytest.raises(CompileError, match="no code object"):
        hiprtc.unbundle(b"CCOB", "gfx942")
