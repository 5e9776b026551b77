"""Thread-block clusters in the emulator: their barrier, each other's shared memory, and each way to get it wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fusegen.emulator import Buffer, LaunchError, build
from fusegen.targets import H200
from tests.programs import (
    LAST_BLOCK,
    MBARRIER,
    Array,
    Program,
    compile_all_for,
    compile_cuda,
    numbers,
    require_fault,
    require_right,
    run,
)
from tests.tools import BUILDS, needs_check, needs_compiler

pytestmark = needs_compiler

FOUR = "__cluster_dims__(4, 1, 1)"
TWO = "__cluster_dims__(2, 1, 1)"
DEVICE = """
__device__ __forceinline__ void cluster_sync() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}
template <class T>
__device__ __forceinline__ T* at_rank(T* p, unsigned rank) {
  return static_cast<T*>(__cluster_map_shared_rank(p, rank));
}
"""
# Each block gives its part to the next one of its cluster.
NEXT = """
__shared__ float tile[128];
const int i = threadIdx.x;
const unsigned rank = __clusterRelativeBlockRank(), size = __clusterSizeInBlocks();
tile[i] = x[blockIdx.x * 128 + i]; // WRITE
READY
y[blockIdx.x * 128 + i] = at_rank(tile, (rank + 1) % size)[127 - i]; // READ
DONE
"""
# A row spread over the blocks of a cluster, two reductions: partial sums are pushed to every block.
ROW = """
__shared__ float partial[2][4];
__shared__ float warps[4];
const int i = threadIdx.x;
const unsigned rank = __clusterRelativeBlockRank();
cluster_sync();
float v = x[blockIdx.x * 128 + i];
for (int step = 0; step < 2; ++step) {
  float sum = v;
  for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  if (i % 32 == 0) warps[i / 32] = sum;
  __syncthreads();
  if (i < 4) at_rank(partial[step], i)[rank] = warps[0] + warps[1] + warps[2] + warps[3];
  cluster_sync();
  float total = 0.0f;
  for (int b = 0; b < 4; ++b) total += partial[step][b];
  v -= total / 512.0f;
}
y[blockIdx.x * 128 + i] = v;
"""
# The row comes by a bulk copy for each block, under way while the blocks find each other.
LOADED_ROW = """
__shared__ alignas(128) float tile[128];
__shared__ float sums[4];
__shared__ mbarrier_t bar;
const int i = threadIdx.x;
if (i == 0) { init(&bar, 1); publish_init(); }
__syncthreads();
if (i == 0) { expect(&bar, 512); load(tile, x + 128 * blockIdx.x, 512, &bar); }
__cluster_barrier_arrive();
wait(&bar, 0);
__cluster_barrier_wait();
if (i < 4) {
  float sum = 0.0f;
  for (int j = 0; j < 128; ++j) sum += tile[j];
  at_rank(sums, i)[__clusterRelativeBlockRank()] = sum;
}
cluster_sync();
y[128 * blockIdx.x + i] = tile[i] - (sums[0] + sums[1] + sums[2] + sums[3]) / 512.0f;
"""
COPIED = """
__shared__ alignas(16) float tile[128];
const int i = threadIdx.x;
asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
             :: "r"(shared_address(tile + i)), "l"(x + 128 * blockIdx.x + i));
asm volatile("cp.async.wait_all;" ::: "memory");
cluster_sync();
y[128 * blockIdx.x + i] = at_rank(tile, __clusterRelativeBlockRank() ^ 1)[127 - i];
cluster_sync();
"""
# A block waits for what another one writes into it, counted by an mbarrier of its own.
REMOTE_ARRIVE = """
__shared__ float tile[128];
__shared__ mbarrier_t bar;
const int i = threadIdx.x;
const unsigned rank = __clusterRelativeBlockRank();
if (i == 0) { init(&bar, 128); publish_init(); }
cluster_sync();
at_rank(tile, rank ^ 1)[i] = x[blockIdx.x * 128 + i];
unsigned remote;
asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(&bar)), "r"(rank ^ 1));
asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(remote) : "memory");
unsigned done;
do {
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;"
               " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(shared_address(&bar)) : "memory");
} while (!done);
y[blockIdx.x * 128 + i] = tile[127 - i];
cluster_sync();
"""


def exchange(ready: str = "cluster_sync();", done: str = "cluster_sync();", mark: str = "READ") -> str:
    return NEXT.replace("READY", ready).replace("DONE", done).replace(f"// {mark}", "// BUG")


def next_block(size: int) -> Callable[[Array], Array]:
    def want(x: Array) -> Array:
        return np.roll(x.reshape(-1, size, 128)[..., ::-1], -1, axis=1).ravel()

    return want


def centered_twice(x: Array) -> Array:
    rows = x.astype(np.float64).reshape(-1, 512)
    rows = rows - rows.mean(1, keepdims=True)
    centered: Array = rows - rows.mean(1, keepdims=True)
    return centered.ravel()


RIGHT = [
    Program("each reads the next one's tile", exchange(), next_block(4), DEVICE, FOUR, blocks=8, size=1024),
    Program("dynamic shared memory", exchange().replace("__shared__ float tile[128]", "extern __shared__ float tile[]"),
            next_block(2), DEVICE, TWO, blocks=6, size=768, shared_bytes=512),
    Program("a row over four blocks", ROW, centered_twice, DEVICE, FOUR, blocks=12, size=1536),
    Program("a row over four blocks, by bulk copies", LOADED_ROW,
            lambda x: (x.reshape(-1, 512) - x.reshape(-1, 512).mean(1, keepdims=True)).ravel(), MBARRIER + DEVICE, FOUR,
            blocks=8, size=1024),
    Program("cp.async, read by the other block", COPIED, lambda x: x.reshape(-1, 2, 128)[:, ::-1, ::-1].ravel(),
            MBARRIER + DEVICE, TWO, blocks=4, size=512),
    Program("the last cluster takes over what the others have published",
            "const int i = threadIdx.x;\nconst float* tile = x + 128 * blockIdx.x;\n" + LAST_BLOCK, lambda x: 2 * x,
            "__device__ int finished;\n" + DEVICE, TWO, blocks=6, size=768),
    Program("work between arriving and waiting", exchange("__cluster_barrier_arrive();\nfloat own = x[i];\n"
            "__cluster_barrier_wait();").replace("[127 - i]; //", "[127 - i] + own - own; //"),
            next_block(4), DEVICE, FOUR, blocks=4, size=512),
    Program("a relaxed arrival is enough to know that all have started",
            exchange("__cluster_barrier_arrive_relaxed();\n__cluster_barrier_wait();\ncluster_sync();"),
            next_block(4), DEVICE, FOUR, blocks=4, size=512),
    Program("the PTX of it", exchange(
            'asm volatile("barrier.cluster.arrive.release.aligned;\\n\\tbarrier.cluster.wait.acquire.aligned;" '
            '::: "memory");'), next_block(4), DEVICE, FOUR, blocks=4, size=512),
    Program("arrivals at another block's mbarrier", REMOTE_ARRIVE,
            lambda x: x.reshape(-1, 2, 128)[:, ::-1, ::-1].ravel(), MBARRIER + DEVICE, TWO, blocks=4, size=512),
    Program("remote atomic updates", "__shared__ int count;\nif (threadIdx.x == 0) count = 0;\ncluster_sync();\n"
            "atomicAdd(at_rank(&count, 0), 1);\ncluster_sync();\ny[blockIdx.x * 128 + threadIdx.x] = "
            "*at_rank(&count, 0);\ncluster_sync();", lambda x: np.full(512, 512.0), DEVICE, FOUR, blocks=4, size=512),
    Program("threads that return are not waited for",
            "if (threadIdx.x >= 64) { y[blockIdx.x * 128 + threadIdx.x] = 0.0f; return; }\ncluster_sync();\n"
            "y[blockIdx.x * 128 + threadIdx.x] = 1.0f;", lambda x: np.arange(256) % 128 < 64, DEVICE, TWO, blocks=2,
            size=256),
    Program("two clusters",
            "__shared__ float tile;\nif (threadIdx.x == 0) tile = blockIdx.x;\ncluster_sync();\n"
            "y[blockIdx.x * 128 + threadIdx.x] = *at_rank(&tile, 3) + 10 * __clusterRelativeBlockRank();\n"
            "cluster_sync();", lambda x: np.repeat([3, 13, 23, 33, 7, 17, 27, 37], 128), DEVICE, FOUR, blocks=8,
            size=1024),
    Program("no cluster at all: its barrier is one of the block",
            "__shared__ float tile[128];\ntile[threadIdx.x] = x[threadIdx.x];\ncluster_sync();\n__syncthreads();\n"
            "y[threadIdx.x] = tile[127 - threadIdx.x] + __clusterSizeInBlocks() - 1;", lambda x: x[::-1], DEVICE),
]  # fmt: skip

BUGS = [
    Program("no barrier in front of the reads", exchange(ready="__syncthreads();"), before=DEVICE, kind="race",
            says="which may not have started: a cluster barrier must come first"),
    Program("no second barrier in front of the reads",
            exchange().replace("tile[i] = x", "cluster_sync();\ntile[i] = x")
            .replace("// WRITE\ncluster_sync();", "// BUG"),
            before=DEVICE, kind="race", says="is not ordered with"),
    Program("a relaxed arrival publishes nothing",
            exchange("__cluster_barrier_arrive_relaxed();\n__cluster_barrier_wait();"), before=DEVICE, kind="race",
            says="is not ordered with the write"),
    Program("the write comes behind the arrival",
            exchange().replace("tile[i] = x", "__cluster_barrier_arrive();\ntile[i] = x")
            .replace("// WRITE\ncluster_sync();", "\n__cluster_barrier_wait();"), before=DEVICE, kind="race"),
    Program("no barrier in front of the end", exchange(done=""), before=DEVICE, kind="race",
            says="may end before this read of byte"),
    Program("the other block has ended long ago",
            exchange(done="").replace("y[blockIdx", "if (rank > 0) return;\n"
                                      "for (int k = 0; k < 40; ++k) __syncthreads();\ny[blockIdx"),
            before=DEVICE, kind="race", says="which has ended: a cluster barrier must come before"),
    Program("the tile is used again too early", exchange(done="tile[i] = 0.0f;\ncluster_sync();"), before=DEVICE,
            kind="race", says="is not ordered with the"),
    Program("a rank beyond the cluster", exchange().replace("(rank + 1) % size", "rank + 1"), before=DEVICE.replace(
            "return static", "return /* BUG */ static"), kind="out-of-bounds", says="block 4 of a cluster of 4"),
    Program("an index beyond the other's tile", exchange().replace("[127 - i]", "[128 + i]"), before=DEVICE,
            kind="out-of-bounds", says="of tile, which has 512 bytes"),
    Program("a global pointer is mapped", exchange().replace("at_rank(tile,", "at_rank(y,"), before=DEVICE.replace(
            "return static", "return /* BUG */ static"), kind="out-of-bounds", says="no address in the shared memory"),
    Program("half a block goes to another barrier",
            "if (threadIdx.x < 64) {\n  cluster_sync();\n} else {\n  __syncthreads(); // BUG\n}\n"
            "y[blockIdx.x * 128 + threadIdx.x] = 1.0f;", before=DEVICE, kind="deadlock",
            says="waits at the cluster barrier for thread (64, 0, 0) of block (0, 0, 0), which waits on line"),
    Program("one block goes another way",
            "if (blockIdx.x == 0 && threadIdx.x < 64) {\n  __syncthreads(); // BUG\n}\ncluster_sync();\n"
            "y[blockIdx.x * 128 + threadIdx.x] = 1.0f;", before=DEVICE, kind="deadlock", says="for thread (0, 0, 0)"),
    Program("two arrivals without a wait",
            "__cluster_barrier_arrive();\n__cluster_barrier_arrive(); // BUG\n__cluster_barrier_wait();\ny[0] = 1.0f;",
            before=DEVICE, kind="divergent-barrier", says="arrives at the cluster barrier again"),
    Program("a wait without an arrival", "__cluster_barrier_wait(); // BUG\ny[0] = 1.0f;",
            before=DEVICE, kind="divergent-barrier", says="without having arrived there"),
    Program("a plain sum in another block's memory",
            "__shared__ int count;\nif (threadIdx.x == 0) count = 0;\ncluster_sync();\n"
            "*at_rank(&count, 0) += 1; // BUG\ncluster_sync();\n"
            "y[blockIdx.x * 128 + threadIdx.x] = *at_rank(&count, 0);\ncluster_sync();", before=DEVICE, kind="race"),
]  # fmt: skip
BUGS = [replace(bug, attributes=FOUR, blocks=4, size=512) for bug in BUGS]


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.name)
def test_right_programs(program: Program, check: bool) -> None:
    require_right(program, check=check)


@needs_check
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("program", BUGS, ids=lambda program: program.name)
def test_planted_bug_is_reported_where_it_stands(program: Program, seed: int) -> None:
    require_fault(program, check=True, seed=seed)


@pytest.mark.parametrize("program", [bug for bug in BUGS if bug.kind in ("deadlock", "divergent-barrier")],
                         ids=lambda program: program.name)  # fmt: skip
def test_the_fast_build_finds_what_the_schedule_shows(program: Program) -> None:
    require_fault(program, check=False)


def test_the_programs_are_cuda() -> None:
    compile_all_for(H200, [program.source for program in (*RIGHT, *BUGS)])


@pytest.mark.parametrize("check", BUILDS)
def test_the_largest_cluster(check: bool) -> None:
    body = exchange().replace("128", "1024").replace("127", "1023")
    program = Program("", body, None, DEVICE, "__cluster_dims__(16, 1, 1)", blocks=32, threads=1024, size=32 * 1024)
    want = np.roll(numbers(program.size).reshape(-1, 16, 1024)[..., ::-1], -1, axis=1).ravel()
    for seed in range(2):
        assert np.array_equal(run(program, check=check, seed=seed), want)


def test_a_missing_barrier_shows_in_the_numbers() -> None:
    program = next(bug for bug in BUGS if bug.name == "no second barrier in front of the reads")
    want = next_block(4)(numbers(512))
    assert any(not np.array_equal(run(program, check=False, seed=seed), want) for seed in range(1, 6))


def test_a_grid_that_is_no_whole_number_of_clusters_is_refused() -> None:
    program = replace(RIGHT[0], blocks=6)
    with pytest.raises(LaunchError, match=r"a grid of \(6, 1, 1\) blocks is not made of whole clusters of \(4, 1, 1\)"):
        run(program, check=False)


def test_a_cluster_that_no_gpu_takes_is_refused() -> None:
    with pytest.raises(LaunchError, match="a cluster of 32 blocks"):
        run(replace(RIGHT[0], attributes="__cluster_dims__(32, 1, 1)", blocks=32), check=False)


def test_the_size_may_be_an_expression_and_belongs_to_the_kernel() -> None:
    source = ('constexpr int BLOCKS = 2;\n'
              'extern "C" __global__ void __cluster_dims__(8, 1, 1) other(int* y) { *y = 8; }\n'
              'extern "C" __global__ void __cluster_dims__(BLOCKS, 1, BLOCKS)\nkernel(int* y) {\n'
              "  y[blockIdx.x + 4 * blockIdx.z] = __clusterRelativeBlockRank() + 100 * __clusterSizeInBlocks()\n"
              "      + 1000 * __clusterIdx().x + 10000 * __clusterGridDimInClusters().x;\n}\n")  # fmt: skip
    compile_cuda(source, 1)
    kernel = build(source, "kernel", warp=32, check=False, filename="sizes.cu")
    assert kernel.cluster == (2, 1, 2)
    y = np.zeros(8, np.int32)
    address = y.ctypes.data
    kernel.launch((4, 1, 2), (1, 1, 1), 0, [Buffer("y", address, address, y.nbytes)])
    assert y.tolist() == [20400, 20401, 21400, 21401, 20402, 20403, 21402, 21403]
