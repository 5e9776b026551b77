// lightning_indexer  bf16[H_times_S, D], bf16[T, D], f32[H_times_S] -> f32[T, S]  at H_times_S=262144 D=128 T=4096 S=4096
// Sums over heads of relu(q k) * w, as DeepSeek-V3.2 has them; F.topk of a row are the keys.
//
//     def lightning_indexer(q, k, w):
//         return F.sum(F.relu(q @ k.T) * w[:, :, None], axis=1, keepdims=False)
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// views    q_part is q as [H * S, D]; w_part is w as [H * S]
// tile     ping-pong: two consumer warpgroups, each with tiles of 128x128, a producer 6 slices of 64
//          ahead; persistent blocks, 8 rows of tiles at a time
// traffic  337.6 MB moved, 136.3 MB ideal, 4431.3 MB with products apart, 17316.2 MB unfused in 4
//          launches
// floor    277.8 us at 989 TFLOP/s for products; compute-bound at 814.11 flop/B
// needs    H_times_S=262144, D=128, S=4096; rows of all operands next to each other; k_value, q_part:
//          address and strides in multiples of 16 B; w_part: address and strides in multiples of 8 B;
//          w_part [H_times_S] shared by every row

// N values that move together, 16 bytes at a time where they fill them
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
};

// the vector at p, which is aligned to it
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}

// the larger of two; NaN wins
__device__ __forceinline__ float larger(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// a tile, the slices of the depth that are summed one after another, and how many shared memory holds
constexpr int tile_rows = 128, tile_cols = 128, tile_k = 64, stages = 6;
constexpr int steps = 2;
constexpr int tiles_across = 2048;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
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

// 8 rows of tiles at a time, column by column: blocks that run together share factors in the L2 cache
__device__ __forceinline__ Place place_of(int tile, int tiles_down) {
  Place at;
  const int first = tile / group_tiles * group;
  const int height = tiles_down - first < group ? tiles_down - first : group;
  at.row0 = (first + tile % group_tiles % height) * tile_rows;
  at.col0 = tile % group_tiles / height * tile_cols;
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

// sums of 64 x 128 elements: the product of two matrices, 16 along K, added to what they were or put in its place
__device__ __forceinline__ void multiply_add(
    float (&sums)[64], unsigned long long left, unsigned long long right, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, add, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
        "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
        "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]),
        "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
        "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]),
        "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),
        "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]),
        "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]),
        "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]),
        "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),
        "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]),
        "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]),
        "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),
        "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63])
      : "l"(left), "l"(right), "r"(static_cast<int>(add)));
}

// no instruction, but what uses the sums stays behind it: the compiler doesn't know that wgmma writes them until then
__device__ __forceinline__ void fence_sums(float (&sums)[64]) {
  #pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(sums[i]));
}

extern "C" __global__ void __launch_bounds__(384, 1)
lightning_indexer(
    const __grid_constant__ CUtensorMap q_part_map,
    const __grid_constant__ CUtensorMap k_value_map,
    const float* __restrict__ w_part_ptr,
    float* __restrict__ out_ptr,
    long long rows,
    long long out_stride,
    long long out_stride_elements)
{
  // 6 slices of each factor, boxes to be stored, and the barriers that tell when a slice is there and when its place is free
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned left = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const unsigned right = left + right_at;
  const unsigned full = left + barriers_at;
  const unsigned empty = full + 8 * stages;
  const unsigned pingpong = empty + 8 * stages;  // a barrier for each of the two consumer warpgroups
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      start_barrier(full + 8 * stage, 1);
      start_barrier(empty + 8 * stage, 4);  // warps that read the slice
    }
    start_barrier(pingpong, 4);
    start_barrier(pingpong + 8, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int tiles_down = static_cast<int>((rows + tile_rows - 1) / tile_rows);
  const int tiles = tiles_down * tiles_across;
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);  // warpgroup 0: the producer; 1 and 2: consumers

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      int stage = 0;
      unsigned parity = 1;  // of an empty ring
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Place at = place_of(tile, tiles_down);
        for (int step = 0; step < steps; ++step) {
          const unsigned arrived = full + 8 * stage;
          wait_at(empty + 8 * stage, parity);
          expect_bytes(arrived, slice_bytes);
          copy_box(left + stage * left_bytes, k_value_map, arrived, step * tile_k, at.row0);
          copy_box(right + stage * right_bytes, q_part_map, arrived, step * tile_k, at.col0);
          if (++stage == stages) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int own = role - 1;  // which of the two consumers this is
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    // fields of wgmma's matrix descriptor (PTX ISA, "Matrix Descriptor Format"), distances in units of 16 bytes
    constexpr unsigned long long swizzle_128 = 1ull << 62;  // pieces of 16 bytes are XOR-swizzled by their line's number
    constexpr unsigned long long eight_lines = 1024ull / 16 << 32;  // from 8 lines to the next 8
    const unsigned long long left_slices = describe(swizzle_128 | eight_lines, left);
    const unsigned long long right_slices = describe(swizzle_128 | eight_lines, right);
    float sums[2][64];
    int stage = 0;
    unsigned parity = 0;
    int number = 0;  // of the tile, among this block's
    unsigned pingpong_parity = own ^ 1;  // the first group's first turn is there from the start
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      if (number++ % 2 != own) {  // the other consumer's tile: its slices pass by
        stage += steps;
        parity ^= stage / stages % 2;
        stage %= stages;
        continue;
      }
      const Place at = place_of(tile, tiles_down);
      const int row0 = at.row0 + warp * 16;  // the warp's first
      Vec<float, 2> w_part_vec[16];  // of the columns that this thread will hold
      #pragma unroll
      for (int n = 0; n < 16; ++n) {
        const int col = at.col0 + n * 8 + lane % 4 * 2;
        w_part_vec[n] = load<2>(w_part_ptr + col);
      }
      wait_at(pingpong + 8 * own, pingpong_parity);
      pingpong_parity ^= 1;
      int before = 0;
      for (int step = 0; step < steps; ++step) {
        wait_at(full + 8 * stage, parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          #pragma unroll
          for (int i = 0; i < 2; ++i) {
            multiply_add(
                sums[i], left_slices + stage * (left_bytes / 16) + i * (segment_bytes / 16) + k * 2,
                right_slices + stage * (right_bytes / 16) + k * 2, (step | k) != 0);
          }
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
      if (lane == 0) arrive_at(pingpong + 8 * (own ^ 1));
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      #pragma unroll
      for (int i = 0; i < 2; ++i) fence_sums(sums[i]);
      if (lane == 0) arrive_at(empty + 8 * before);

      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        #pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          float sum_of_products_part[2] = {0.0f, 0.0f};
          #pragma unroll
          for (int n8 = 0; n8 < 8; ++n8) {
            const int n = chunk * 8 + n8;
            #pragma unroll
            for (int r8 = 0; r8 < 2; ++r8) {
              const int sum_at = chunk * 32 + n8 * 4 + r8 * 2;
              #pragma unroll
              for (int j = 0; j < 2; ++j) {
                const float matmul = sums[i][sum_at + j];
                const float w_part = w_part_vec[n].at[j];
                const float relu = larger(matmul, 0.0f);
                const float mul = relu * w_part;
                sum_of_products_part[r8] += mul;
              }
            }
          }
          #pragma unroll
          for (int r8 = 0; r8 < 2; ++r8) {  // four lanes have a row
            const long long row = row0 + i * 64 + r8 * 8 + lane / 4;
            float sum_of_products = sum_of_products_part[r8];
            #pragma unroll
            for (int step = 2; step > 0; step /= 2) {
              sum_of_products += __shfl_xor_sync(0xffffffffu, sum_of_products, step);
            }
            if (lane % 4 == 0 && row < rows) {
              *(out_ptr + row * out_stride + (at.col0 / 64 + chunk) * out_stride_elements) = sum_of_products;
            }
          }
        }
      }
    }
  }
}
