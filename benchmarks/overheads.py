"""What a call and a start cost the host: microseconds a call, milliseconds a process. Needs a GPU and torch.

    python benchmarks/overheads.py [--json FILE] [--batches 40] [--processes 5] [--only calls|programs|processes]

Calls: the host's time to return from a launch on six operands of 8 x 4096 halves (bias_gelu_residual_ln and its
output), median over batches of 300 launches, the GPU idle before each. All that is measured takes turns, batch by
batch, since hosts change their speed within seconds. The bare launch is the driver's own part: its arguments are packed
beforehand, and nothing is looked at; by C in a loop there is no Python around it. Parts are what a call is made of,
each alone.

That is the host's time and not the GPU's pace: by C in a loop a launch took 3.1 to 3.3 us in batches of 50 to 3000, of
this kernel and of an empty one of a warp, on an idle GPU and behind one that spins for 5 ms. Nor does it matter how it
is launched: cuLaunchKernel or cuLaunchKernelEx, 0, 6 or 10 arguments, each by its address or all in one buffer, with 0
to 100 KiB of dynamic shared memory, 1 or 132 blocks, on the default stream, a thread's or one of its own, as a
CUfunction or a CUkernel took 3.1 to 3.5 us, by which two runs of one and the same differ too (medians of 60 batches of
200 on an H200's host, a virtual machine; a few rows came out at 4 while the host changed its speed).

Programs: the same of chains that are cut, at small sizes, so that the host's time is all there is. The floor is the
driver's launches of their kernels; what a call takes beyond it is shared out over the kernels.

Processes: a new process each, after `import torch`, `import fusegen` and six tensors on the GPU. `modules` is the time
to import what fusegen.compile needs beside these (cold: jinja2 and the compiler's bindings among them, not NVRTC's
library); `first result` is from there to the result, synchronized. Warm: the kernel and its verdict are in the cache;
cold: every process has a new cache folder. Run from the repository root with PYTHONPATH set to it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

CALLS = 300  # in a batch: fewer than the driver queues, so that no launch waits for the GPU
SPEC = Path(__file__).resolve().parent.parent / "specs" / "bias_gelu_residual_ln.py"
ROWS = 8


def chain() -> Any:
    from fusegen.language.spec import load_chains

    return load_chains(SPEC)[0].at(M=ROWS)


def operands() -> tuple[Any, ...]:
    import torch

    x = torch.randn(ROWS, 4096, device="cuda").half()
    vectors = [torch.randn(4096, device="cuda").half() for _ in range(3)]
    return x, vectors[0], x.clone(), vectors[1], vectors[2]


# ---------------------------------------------------------------- calls


Batch = Callable[[], float]
"""Makes so many calls, and says how many seconds that took."""


def batch_of(call: Callable[[], object]) -> Batch:
    timer = timeit.Timer(call)
    timer.timeit(20)
    return lambda: timer.timeit(CALLS)


def microseconds(found: Mapping[str, Batch], batches: int) -> dict[str, float]:
    """Host time of one call of each."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(batches):
        for name, batch in found.items():
            torch.cuda.synchronize()
            times[name].append(batch() / CALLS * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(of) for name, of in times.items()}


def calls(batches: int) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds a call, and those of its parts. What an empty lambda takes is taken off."""
    import torch

    import fusegen.torch
    from fusegen.runtime import guards, native

    kernel, filling, checked = (fusegen.compile(chain()) for _ in range(3))  # each knows its own kind of calls
    tensors = operands()
    x, bias, residual, gamma, beta = tensors
    for _ in range(3):
        out = kernel(*tensors)
        filling(*tensors, out=out)
    prepared = kernel.prepare(*tensors)
    operator = fusegen.torch.op(chain(), "fusegen_overheads::chain")
    found = native.module()
    if found is not None:
        guards.begin(found).result()  # which operators wait for
    for _ in range(8):
        operator(*tensors)
    write = torch.ops.fusegen_overheads.chain_out.default
    library = torch.library.Library("fusegen_overheads", "FRAGMENT")
    library.define("nothing(Tensor x, Tensor bias, Tensor residual, Tensor gamma, Tensor beta) -> Tensor")
    library.impl("nothing", lambda *tensors: out, "CUDA")  # what torch itself takes for an operator in Python
    nothing = torch.ops.fusegen_overheads.nothing.default

    def measured(found: Mapping[str, Callable[[], object]], in_c: Mapping[str, Batch]) -> dict[str, float]:
        times = microseconds(
            {"": batch_of(lambda: None), **{n: batch_of(c) for n, c in found.items()}, **in_c}, batches
        )
        idle = times.pop("")
        return {name: us if name in in_c else us - idle for name, us in times.items()}

    whole: dict[str, Callable[[], object]] = {
        "kernel(...), result allocated": lambda: kernel(x, bias, residual, gamma, beta),
        "kernel(..., out=out)": lambda: filling(x, bias, residual, gamma, beta, out=out),
        "the first, by name": lambda: kernel(x=x, bias=bias, residual=residual, gamma=gamma, beta=beta),
        "the first without its shortcut": lambda: checked.call(*tensors),
        "the second without its shortcut": lambda: checked.call(*tensors, out=out),
        "prepared()": prepared,
        "operator of torch, result allocated": lambda: operator(x, bias, residual, gamma, beta),
        "the same as torch.ops.fusegen_overheads.chain": lambda: torch.ops.fusegen_overheads.chain(
            x, bias, residual, gamma, beta
        ),
        "operator of torch, out": lambda: write(x, bias, residual, gamma, beta, out),
        "operator of torch that does nothing": lambda: nothing(x, bias, residual, gamma, beta),
        "torch: x + y": lambda: x + residual,
        "torch.ops.aten.add": lambda: torch.ops.aten.add.Tensor(x, residual),
        "torch.add(x, y, out=out)": lambda: torch.add(x, residual, out=out),
        **triton_launch(tensors, out),
        **bare_launches(prepared),
    }  # fmt: skip
    return measured(whole, launch_by_c(prepared)), measured(parts(tensors, out), {})


LOOP = """
#include <stddef.h>

int loop(int (*launch)(void *, void *, void **, void **), void *config, void *function, void **arguments, int times)
{
    int refused = 0;
    for (int i = 0; i < times; i++)
        refused |= launch(config, function, arguments, NULL);
    return refused;
}
"""


def launch_by_c(prepared: Any) -> dict[str, Batch]:
    """The same launch made by C in a loop, where a C compiler is: the floor of any call."""
    import ctypes

    from fusegen.errors import FusegenError
    from fusegen.runtime import native
    from fusegen.storage.libraries import run

    record = prepared.record
    make = record.loaded.sending(record.launch).block
    if make is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(LOOP)
        try:
            run([*native.compiler(), "-O2", "-fPIC", "-shared", str(source), "-o", str(library)])
        except FusegenError:
            return {}
        loop = ctypes.CDLL(str(library)).loop
    block = make()
    words = (ctypes.c_uint64 * (len(block.words) // 8)).from_buffer_copy(block.words)
    words[block.first : block.first + len(prepared.pointers)] = prepared.pointers
    places = [ctypes.addressof(words) + 8 * place for place in block.places]
    arguments = (ctypes.c_void_p * len(places))(*places)
    given = ctypes.c_void_p(block.start), words, ctypes.c_void_p(block.function), arguments, CALLS

    def batch() -> float:
        begin = time.perf_counter()
        refused = loop(*given)
        took = time.perf_counter() - begin
        assert not refused
        return took

    return {"bare cuLaunchKernelEx, by C in a loop": batch}


def triton_launch(tensors: tuple[Any, ...], out: Any) -> dict[str, Callable[[], object]]:
    """A Triton kernel of six operands, where there is Triton."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return {}
    from six_operands import six_operands

    arrays = (*tensors, out)
    return {"Triton, six operands": lambda: six_operands[(ROWS,)](*arrays, 4096, BLOCK=4096)}


def bare_launches(prepared: Any) -> dict[str, Callable[[], object]]:
    """The same kernel's launch by the driver alone, its arguments packed once."""
    import ctypes

    from fusegen.runtime import nvidia
    from fusegen.runtime.gpu import GpuKernel

    record = prepared.record
    loaded, launch, plan = record.loaded, record.launch, record.variant.plan
    assert isinstance(loaded, GpuKernel)
    function: Any = loaded.function
    arguments = loaded.arguments
    arguments.pack_into(arguments.block, 0, *prepared.pointers, *prepared.values, *launch.numbers)
    bound = nvidia.driver().cuLaunchKernel
    table, blocks, threads, shared = (
        arguments.address, launch.blocks, plan.threads, plan.shared_bytes
    )  # fmt: skip
    found: dict[str, Callable[[], object]] = {
        "bare cuLaunchKernel, cuda.bindings": lambda: bound(
            function, blocks, 1, 1, threads, 1, 1, shared, 0, table, 0
        )
    }  # fmt: skip
    if (start := nvidia.launcher()) is not None:
        config = nvidia.Config((blocks, 1, 1), (threads, 1, 1), shared)
        given = (
            ctypes.byref(config), ctypes.byref(ctypes.c_char.from_address(int(function))),
            ctypes.byref(arguments.table), None,
        )  # fmt: skip
        found["bare cuLaunchKernelEx, ctypes"] = lambda: start(*given)
    return found


def parts(tensors: tuple[Any, ...], out: Any) -> dict[str, Callable[[], object]]:
    """What a shortcut does beside the launch, one by one."""
    import struct

    from fusegen.language.types import f16
    from fusegen.runtime.arrays import contiguous_strides
    from fusegen.runtime.guards import guard, guards_hold
    from fusegen.runtime.libraries import torch_current_stream, torch_dtype, torch_empty

    x, bias, residual, gamma, beta = tensors
    place = ("cuda", x.get_device())
    shape = tuple(x.shape)
    like = (shape, contiguous_strides(shape), torch_dtype(f16))
    empty, stream = torch_empty(place), torch_current_stream(place)
    memory, pack = bytearray(128), struct.Struct("P24xPPPPPP").pack_into
    held = [tensor.data_ptr() for tensor in (*tensors, out)]

    def addresses() -> None:
        x.data_ptr(), bias.data_ptr(), residual.data_ptr(), gamma.data_ptr(), beta.data_ptr(), out.data_ptr()

    found: dict[str, Callable[[], object]] = {
        "six addresses": addresses,
        "fresh memory": lambda: empty(*like),
        "the current stream": lambda: stream(place[1]),
        "packing": lambda: pack(memory, 32, 0, *held),
    }
    if guards_hold():
        five, six = guard(tensors), guard((*tensors, out))
        found["guard of five tensors"] = lambda: five(x, bias, residual, gamma, beta)
        found["guard of six tensors"] = lambda: six(x, bias, residual, gamma, beta, out)
    return found


# ---------------------------------------------------------------- programs


PROGRAMS = {
    "mlp": {"M": 64, "H": 512, "K": 256},
    "o_proj_residual_rmsnorm": {"M": 64, "N": 512, "K": 256},
    "logits_argmax": {"M": 64, "V": 4096, "K": 256},
}


def programs(batches: int) -> dict[str, dict[str, float]]:
    """Microseconds a call of each program, by the way it is called."""
    return {name: program_calls(name, sizes, batches) for name, sizes in PROGRAMS.items()}


def program_calls(name: str, sizes: Mapping[str, int], batches: int) -> dict[str, float]:
    import torch

    import fusegen
    from fusegen.language.spec import load_chains
    from fusegen.language.types import size_of

    spec = load_chains(SPEC.with_name(f"{name}.py"))[0].at(**sizes)
    program, filling = fusegen.compile(spec), fusegen.compile(spec)
    if not hasattr(program, "kernels"):
        sys.exit(f"{name} at {sizes} is one kernel on {program.device}, and no program")
    shapes = [tuple(size_of(size, spec.graph.sizes) for size in t.shape) for t in spec.graph.inputs]
    tensors = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    for _ in range(3):
        out = program(*tensors)
        filling(*tensors, out=out)
    prepared = program.prepare(*tensors)
    prepared()
    found: dict[str, Callable[[], object]] = {
        "result allocated": lambda: program(*tensors),
        "out=": lambda: filling(*tensors, out=out),
        "prepared()": prepared,
        "a replayed graph": program.graph(*tensors),
        **bare_program(prepared),
    }
    times = microseconds({"": batch_of(lambda: None), **{n: batch_of(c) for n, c in found.items()}}, batches)
    idle = times.pop("")
    times = {way: us - idle for way, us in times.items()}
    count = len(program.kernels)
    if BARE in times:
        times["prepared(), beyond the launches, a kernel"] = (times["prepared()"] - times[BARE]) / count
    return {"kernels": count, **times}


BARE = "the launches alone, ctypes"


def bare_program(prepared: Any) -> dict[str, Callable[[], object]]:
    """The driver's launches of a program's kernels, their arguments packed once."""
    from fusegen.runtime import nvidia

    if (start := nvidia.launcher()) is None:
        return {}
    record, given = prepared.record, []
    bases = (*prepared.pointers, record.room(0).address)
    for launch in record.launches:
        names = launch.record.sending().names
        slot = names["new_slot"]()
        sent = (0, *(bases[p.base] + p.offset for p in launch.pointers))
        names["pack"](slot[1], nvidia.STREAM, *sent, *(prepared.values[i] for i in launch.values))
        for place, given_map in enumerate(launch.record.launch.maps):
            names["place_map"](slot[4], place, sent[1 + given_map.pointer])
        given.append((slot, (slot[2], names["function"], slot[3], None)))  # the slot holds the memory

    def call() -> None:
        for _, each in given:
            start(*each)

    return {BARE: call}


# ---------------------------------------------------------------- processes


COLD = (
    "jinja2",
    "fusegen.emitting.rows.spelling",
    "fusegen.compiling.nvrtc",
    "cuda.bindings.nvrtc",
    "elftools.elf.elffile",
)
VALIDATED = (*COLD, "fusegen.validation.checks", "numpy.random")
MODULES = {"warm": (), "unproven": COLD, "validated": VALIDATED}


def child(kind: str) -> None:
    """Print what a start took in this process, in milliseconds; `kind` is one of MODULES."""
    import torch

    import fusegen

    spec, tensors = chain(), operands()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    import fusegen.pipeline
    import fusegen.runtime.nvidia

    fusegen.runtime.nvidia.driver()
    for module in MODULES[kind]:
        import_module(module)
    ready = time.perf_counter()
    kernel = fusegen.compile(spec, validate=kind != "unproven")
    compiled = time.perf_counter()
    kernel(*tensors)
    torch.cuda.synchronize()
    end = time.perf_counter()
    found = {"modules": ready - begin, "compile": compiled - ready, "first call": end - compiled}
    found |= {"first result": end - ready, "with modules": end - begin}
    print(json.dumps({name: 1e3 * seconds for name, seconds in found.items()}))


IMPORT = """
import json, time
begin = time.perf_counter()
import fusegen
print(json.dumps({"import fusegen": 1e3 * (time.perf_counter() - begin)}))
"""


def medians(command: list[str], times: int, caches: Callable[[int], str]) -> dict[str, float]:
    """The median of each number that new processes print; `caches(i)` is the cache folder of the i-th."""
    found = []
    for turn in range(times):
        environment = {**os.environ, "FUSEGEN_CACHE_DIR": caches(turn)}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{ran.stderr}")
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def processes(times: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each kind of start."""
    own = [sys.executable, str(Path(__file__).resolve()), "--child"]
    with tempfile.TemporaryDirectory() as folder:
        warm = str(Path(folder, "warm"))
        medians([*own, "validated"], 1, lambda turn: warm)  # fills it
        return {
            "import fusegen": medians([sys.executable, "-c", IMPORT], times, lambda turn: warm),
            "warm": medians([*own, "warm"], times, lambda turn: warm),
            "cold, not validated": medians([*own, "unproven"], times, lambda turn: str(Path(folder, f"a{turn}"))),
            "cold, validated": medians([*own, "validated"], times, lambda turn: str(Path(folder, f"b{turn}"))),
        }


# ---------------------------------------------------------------- the report


def conditions() -> dict[str, str]:
    import torch

    from fusegen.compiling import compiler_version

    try:
        import triton

        triton_version = str(triton.__version__)
    except ImportError:
        triton_version = "none"
    return {
        "gpu": torch.cuda.get_device_name(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton_version,
        "compiler": compiler_version("cuda"),
        "shortcuts": shortcuts_are(),
    }


def shortcuts_are() -> str:
    """What calls go through, once that is there."""
    from fusegen.runtime import guards, native

    if (module := native.module()) is None:
        return "in Python"
    return "in C, tensors read in C++" if guards.begin(module).result() else "in C"


def cpu_name() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--processes", type=int, default=5, help="new processes of each kind")
    parser.add_argument("--only", choices=("calls", "programs", "processes"))
    parser.add_argument("--child", choices=tuple(MODULES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    found: dict[str, Any] = {"conditions": conditions()}
    print(", ".join(f"{name} {value}" for name, value in found["conditions"].items()))
    if options.only in (None, "calls"):
        found["calls_us"], found["parts_us"] = calls(options.batches)
        print(f"\nhost time of a call, us (median of {options.batches} batches of {CALLS})")
        for name, us in found["calls_us"].items():
            print(f"  {name:<36} {us:6.2f}")
        print("\nparts of a call, us")
        for name, us in found["parts_us"].items():
            print(f"  {name:<36} {us:6.2f}")
    if options.only in (None, "programs"):
        found["programs_us"] = programs(options.batches)
        print(f"\nhost time of a program, us (median of {options.batches} batches of {CALLS})")
        for name, numbers in found["programs_us"].items():
            print(f"  {name}: {numbers['kernels']:.0f} kernels")
            for way, us in numbers.items():
                if way != "kernels":
                    print(f"    {way:<42} {us:6.2f}")
    if options.only in (None, "processes"):
        found["processes_ms"] = processes(options.processes)
        print(f"\nnew processes, ms (median of {options.processes})")
        for kind, numbers in found["processes_ms"].items():
            print(f"  {kind:<22} " + "  ".join(f"{name} {ms:.1f}" for name, ms in numbers.items()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
