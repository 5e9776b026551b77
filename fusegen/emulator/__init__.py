"""Runs emitted CUDA and HIP source on a CPU, and says what is wrong with it.

`build` compiles a kernel's text as C++, unchanged but for its __shared__ declarations (rewrite.py) and its inline PTX
(ptx.py), with a header in front that supplies the dialect (dialect/). `EmulatedKernel.launch` runs it: each thread of a
block is a fiber, warps are 32 or 64 wide, blocks go over worker threads (runtime/). Two builds:

    fast    -O2, several workers. Finds what the schedule shows: wrong barriers and warp operations, endless loops,
            crashes.
    check   one worker, and every memory access is judged against shadow memory. 1.5 to 6 times the time of one worker
            of the fast build.

A broken rule ends the launch with a KernelFault that names the line of the emitted source, the block and the thread.
Which faults each build finds, which none finds, and how copies, clusters and matrix instructions run: docs/emulator.md.
"""

from fusegen.emulator.errors import EmulatorBuildError, EmulatorUnavailable, KernelFault, LaunchError
from fusegen.emulator.kernel import KINDS, Buffer, EmulatedKernel, build
from fusegen.emulator.toolchain import Compiler, compiler

__all__ = [
    "KINDS",
    "Buffer",
    "Compiler",
    "EmulatedKernel",
    "EmulatorBuildError",
    "EmulatorUnavailable",
    "KernelFault",
    "LaunchError",
    "build",
    "compiler",
]
