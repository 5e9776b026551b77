"""Runs emitted CUDA and HIP source on a CPU, and says what is wrong with it.

`build` compiles a kernel's text as C++, unchanged but for its __shared__ declarations (rewrite.py) and its inline PTX
(ptx.py), with a header in front that supplies the dialect (dialect/). `EmulatedKernel.launch` runs it: each thread of a
block is a fiber, warps are 32 or 64 wide, blocks go over worker threads (runtime/). Two builds:

    fast    -O2, several workers. Finds what the schedule shows: wrong barriers and warp operations, endless loops,
            crashes.
    check   one worker, and every memory access is judged against shadow memory. 1.5 to 6 times the time of one worker
            of the fast build.

Either rounds each operation by itself, or, with `contract`, fuses products with sums (toolchain.py says why).

A broken rule ends the launch with a KernelFault that names the line of the emitted source, the block and the thread.
Its kinds, by the build that finds them:

    both    divergent-barrier divergent-warp inactive-lane mask deadlock timeout trap stack-overflow divide-by-zero
            mbarrier tensor registers
    fast    segfault
    check   out-of-bounds misaligned uninitialised read-only race shift

Not found:
- a read of an uninitialised *local* variable. In the checking build locals start with a fixed pattern (-1.7e38 as a
  float, NaN as a half), so the numbers come out wrong, and wrong alike every time; in the fast build mostly so;
- an access that leaves one buffer and lands in another one of the same launch: leave gaps between buffers in one
  allocation;
- an access out of a local array through a pointer (an index into the array itself is checked);
- a race between lanes that a partial __syncwarp(mask) of other lanes seems to order;
- an access that the host compiler drops because nothing uses its value;
- a missing proxy fence, but for shared memory that is written by plain stores and read by wgmma or a bulk store, and
  for mbarriers that count copies;
- subnormal halves that gfx90a's matrix instructions take for zeros;
- whatever is about speed, spilled registers, occupancy, bank conflicts, weak memory order, or the error of approximate
  mathematics and of the sums that matrix instructions make.

Reported though a GPU would forgive it: threads that all write the same value to one place; one block's plain accesses
ordered with another's by anything but `__threadfence(); atomic` ("last block done"); a `_sync` operation that the lanes
of its mask reach on different lines; a copy counted by an mbarrier that no fence has published, where the toolkit is of
PTX 9.3 or later.

The blocks of a cluster run together on one worker, each with its own shared memory, which the others may reach.

Asynchronous copies land at once under seed 0, and as late as they may under any other: cp.async and bulk stores at
their wait, bulk loads when no thread can run without one. The fast build then shows a missing wait, or a buffer filled
too early, in the numbers. The checking build reports either whatever the seed: until it is waited for, the destination
belongs to the copy.

Matrix instructions (mma.sync with ldmatrix, MFMA, wgmma) multiply exactly, sum in double and round once; all lanes of
the warp, or of the warpgroup, must take part. A wgmma reads shared memory and registers of A and writes its
accumulators between issue and wait, as above; until a thread has waited, its accumulators are not to be touched, and
neither shared memory nor the variables that it gave for A to be written. A tensor map is an argument of its own
(`fusegen.targets.tensor_map.TensorMap`), and a Buffer says what it may reach.

setmaxnreg moves registers through a pool of the block, which has as many as its __launch_bounds__ allow: who takes more
waits until others have given back, and all warps of a warpgroup must do the same.

Refused when compiling: PTX instructions without a function in dialect/ptx*.h, cooperative groups, textures, and
whatever else dialect/ doesn't declare, INFINITY and uint32_t among them, as with NVRTC.

Why a host compiler and no interpreter of PTX or of device code: it takes CUDA and HIP alike, needs neither vendor's
tools, shows the emitted source's own lines, and is fast enough for a test suite.
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
