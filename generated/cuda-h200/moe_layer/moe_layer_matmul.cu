// moe_layer_matmul  bf16[T, D], bf16[E, D] -> f32[T, E]  at T=256 D=2048 E=64
// matmul of moe_layer.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// tile     cooperative: two consumer warpgroups share tiles of 128x64, a producer 8 slices of 64 ahead;
//          split-K by a cluster of 4 blocks
// traffic  1.4 MB moved, 1.4 MB ideal, 1.4 MB with products apart, 1.4 MB unfused in 1 launch
// floor    0.3 us at 4.8 TB/s; memory-bound at 48.76 flop/B
// needs    D=2048, E=64; rows of all operands next to each other; x, router: address and strides in
//          multiples of 16 B; matmul: address and strides in multiples of 8 B
// launch   lets the next one begin once all its blocks run

// N values that move together, 16 bytes at a time where they fill them
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
};

// the vector to p, which is aligned to it
template <int N, typename T>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// a tile, the slices of the depth that are summed one after another, and how many shared memory holds
constexpr int tile_rows = 128, tile_cols = 64, tile_k = 64, stages = 8;
constexpr int steps = 8;
constexpr int warpgroup = 128;  // threads
// bytes of a line of shared memory, and of slices
constexpr int line_bytes = 128;
constexpr int segment_bytes = 64 * line_bytes;
constexpr int left_bytes = tile_rows * line_bytes, right_bytes = tile_cols * line_bytes;
constexpr int slice_bytes = left_bytes + right_bytes;
// bytes from the left factor's slices, which come first, to the right factor's and to what lies behind them
constexpr int right_at = stages * left_bytes, staging_at = right_at + stages * right_bytes;
constexpr int barriers_at = staging_at + 8 * 2 * 16 * line_bytes;

// how a tensor lies in memory, for tensor copies: written by the driver, read by the copy engine
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};

// where a tile lies: its first row and column
struct Place {
  int row0, col0;
};

__device__ __forceinline__ Place place_of(int tile) {
  Place at;
  at.row0 = tile * tile_rows;
  at.col0 = 0;
  return at;
}

__device__ __forceinline__ void start_barrier(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// waits for the end of the phase with that parity
__device__ __forceinline__ void wait_at(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n"
      :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive_at(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// the same place in another block of the cluster; what this warp wrote there comes first
__device__ __forceinline__ void tell(unsigned barrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n"
      "}\n"
      :: "r"(barrier), "r"(rank) : "memory");
}

// waits for what all blocks of the cluster wrote
__device__ __forceinline__ void wait_for_all(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n"
      :: "r"(barrier), "r"(parity) : "memory");
}

// arrives, and lets the phase end when so many bytes are there as well
__device__ __forceinline__ void expect_bytes(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// the box of a tensor at x, y on its way to shared memory; beyond the tensor it is zeros
__device__ __forceinline__ void copy_box(unsigned to, const CUtensorMap& map, unsigned barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

// what wgmma needs to know of a matrix in shared memory: how it lies, and 18 bits of where
__device__ __forceinline__ unsigned long long describe(unsigned long long layout, unsigned address) {
  constexpr unsigned address_bits = 0x3ffff;
  return layout | (address & address_bits) >> 4;
}

// sums of 64 x 64 elements: the product of two matrices, 16 along K, added to what they were or put in its place
__device__ __forceinline__ void multiply_add(
    float (&sums)[32], unsigned long long left, unsigned long long right, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, add, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
        "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
        "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]),
        "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
        "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]),
        "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31])
      : "l"(left), "l"(right), "r"(static_cast<int>(add)));
}

// no instruction, but what uses the sums stays behind it: the compiler doesn't know that wgmma writes them until then
__device__ __forceinline__ void fence_sums(float (&sums)[32]) {
  #pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(sums[i]));
}

extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(384, 1)
moe_layer_matmul(
    const __grid_constant__ CUtensorMap x_map,
    const __grid_constant__ CUtensorMap router_map,
    float* __restrict__ matmul_ptr,
    long long rows,
    long long matmul_stride)
{
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin, once all blocks of this one run
  // 8 slices of each factor, boxes to be stored, and the barriers that tell when a slice is there and when its place is free
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned left = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const unsigned right = left + right_at;
  const unsigned full = left + barriers_at;
  const unsigned empty = full + 8 * stages;
  const unsigned summed = empty + 8 * (stages + 2);  // one for each warp: what all blocks summed for it is there
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      start_barrier(full + 8 * stage, 1);
      start_barrier(empty + 8 * stage, 8);  // warps that read the slice
    }
    for (int warp = 0; warp < 8; ++warp) start_barrier(summed + 8 * warp, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const int rank = __clusterRelativeBlockRank();  // of the blocks that share a tile
  __syncthreads();
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);  // warpgroup 0: the producer; 1 and 2: consumers

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      int stage = 0;
      unsigned parity = 1;  // of an empty ring
      const Place at = place_of(blockIdx.x / 4);
      for (int step = 0; step < steps; ++step) {
        const unsigned arrived = full + 8 * stage;
        wait_at(empty + 8 * stage, parity);
        expect_bytes(arrived, slice_bytes);
        copy_box(left + stage * left_bytes, x_map, arrived, (rank * steps + step) * tile_k, at.row0);
        copy_box(right + stage * right_bytes, router_map, arrived, (rank * steps + step) * tile_k, at.col0);
        if (++stage == stages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int own = role - 1;  // which of the two consumers this is
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    // fields of wgmma's matrix descriptor (PTX ISA, "Matrix Descriptor Format"), distances in units of 16 bytes
    constexpr unsigned long long swizzle_128 = 1ull << 62;  // pieces of 16 bytes are XOR-swizzled by their line's number
    constexpr unsigned long long eight_lines = 1024ull / 16 << 32;  // from 8 lines to the next 8
    const unsigned long long left_slices = describe(swizzle_128 | eight_lines, left + own * segment_bytes);
    const unsigned long long right_slices = describe(swizzle_128 | eight_lines, right);
    float sums[1][32];
    int stage = 0;
    unsigned parity = 0;
    const Place at = place_of(blockIdx.x / 4);
    const int row0 = at.row0 + own * 64 + warp * 16;  // the warp's first
    const int col0 = at.col0 + rank * 16;  // of the columns that this block finishes
    int before = 0;
    for (int step = 0; step < steps; ++step) {
      wait_at(full + 8 * stage, parity);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      #pragma unroll
      for (int k = 0; k < 4; ++k) {
        multiply_add(
            sums[0], left_slices + stage * (left_bytes / 16) + k * 2,
            right_slices + stage * (right_bytes / 16) + k * 2, (step | k) != 0);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the slice before has been read
      if (step > 0 && lane == 0) arrive_at(empty + 8 * before);
      before = stage;
      if (++stage == stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    fence_sums(sums[0]);
    if (lane == 0) arrive_at(empty + 8 * before);

    // what each block has of the columns that another one finishes goes to that one's shared memory
    const int own_warp = own * 4 + warp;
    Vec<float, 4>* const exchange = reinterpret_cast<Vec<float, 4>*>(shared + right_at) + own_warp * (32 * 2) + lane;
    __cluster_barrier_arrive();  // all blocks have multiplied their slices of the right factor: their places are free
    __cluster_barrier_wait();
    #pragma unroll
    for (int block = 0; block < 4; ++block) {
      auto* const there = static_cast<Vec<float, 4>*>(__cluster_map_shared_rank(exchange + rank * (8 * 32 * 2), block));
      #pragma unroll
      for (int v = 0; v < 2; ++v) {
        Vec<float, 4> part;
        #pragma unroll
        for (int j = 0; j < 4; ++j) part.at[j] = sums[0][block * 8 + v * 4 + j];
        there[v * 32] = part;
      }
    }
    __syncwarp();  // of all lanes
    if (lane < 4) tell(summed + 8 * own_warp, lane);
    wait_for_all(summed + 8 * own_warp, 0);
    float added[1][8] = {};
    #pragma unroll
    for (int block = 0; block < 4; ++block) {
      #pragma unroll
      for (int v = 0; v < 2; ++v) {
        const Vec<float, 4> part = exchange[block * (8 * 32 * 2) + v * 32];
        #pragma unroll
        for (int j = 0; j < 4; ++j) added[0][v * 4 + j] += part.at[j];
      }
    }

    #pragma unroll
    for (int n8 = 0; n8 < 2; ++n8) {
      #pragma unroll
      for (int r8 = 0; r8 < 2; ++r8) {
        const int sum_at = n8 * 4 + r8 * 2;
        const long long row = row0 + r8 * 8 + lane / 4;
        const int col = col0 + n8 * 8 + lane % 4 * 2;
        Vec<float, 2> matmul_vec;
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float matmul = added[0][sum_at + j];
          matmul_vec.at[j] = matmul;
        }
        if (row < rows) {
          store<2>(matmul_ptr + row * matmul_stride + col, matmul_vec);
        }
      }
    }
  }
}
