// lightning_indexer  bf16[H_times_S, D], bf16[T, D], f32[H_times_S] -> f32[T, S]  at H_times_S=262144 D=128 T=4096 S=4096
// Sums over heads of relu(q k) * w, as DeepSeek-V3.2 has them; F.topk of a row are the keys.
//
//     def lightning_indexer(q, k, w):
//         return F.sum(F.relu(q @ k.T) * w[:, :, None], axis=1, keepdims=False)
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// views    q_part is q as [H * S, D]; w_part is w as [H * S]
// tile     192 x 128 tiles of 8 warps, slices of 64 in a ring of 4
// traffic  270.5 MB moved, 136.3 MB ideal, 4431.3 MB with products apart, 17316.2 MB unfused in 4
//          launches
// floor    881.0 us at 312 TFLOP/s for products; compute-bound at 1016.06 flop/B
// needs    H_times_S=262144, D=128, S=4096; rows of all operands next to each other; k_value, q_part,
//          w_part: address and strides in multiples of 16 B; w_part [H_times_S] shared by every row

#include <cuda_bf16.h>

// the larger of two; NaN wins
__device__ __forceinline__ float larger(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 192, tile_cols = 128, tile_k = 64, stages = 4;
constexpr int steps = 2;
constexpr int warp_rows = 48, warp_cols = 64;  // of a tile
constexpr int tiles_across = 2048;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
// elements from the start of a slice to the right factor, and to its end
constexpr int q_part_at = tile_rows * tile_k;
constexpr int slice_elements = q_part_at + tile_cols * tile_k;
constexpr int slice_bytes = 2 * slice_elements;
constexpr int at_once = 256 * 8;  // elements that the threads copy at once

// where element (row, k) lies in a tile with rows of Chunks x 8 elements: XOR-swizzled by the row's number, so that
// 8 rows of one column of chunks lie in different banks
template <int Chunks>
__device__ __forceinline__ int place(int row, int k) {
  constexpr int period = Chunks < 8 ? Chunks : 8;
  const int xor_mask = row / (8 / period) % period;
  return (row * Chunks + (k / 8 ^ xor_mask)) * 8 + k % 8;
}

// 8 elements on their way from global to shared memory, Width with each copy; those from `count` on are zeros
template <int Width, typename T>
__device__ __forceinline__ void copy_chunk(unsigned to, const T* from, int count) {
  if constexpr (Width == 8) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(to), "l"(from), "r"(count * 2) : "memory");
  } else {
    #pragma unroll
    for (int j = 0; j < 8; j += Width) {
      const int left = count < j ? 0 : count - j < Width ? count - j : Width;
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
          :: "r"(to + j * 2), "l"(from + j), "n"(Width * 2), "r"(left * 2) : "memory");
    }
  }
}

// the copies since the last call become one group
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// waits for the thread's own groups, all but the last Pending
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");
}

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// four matrices of 8 x 16 bytes, from the rows whose places the lanes give
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// sums += right^T left^T, 16 columns by 8 rows
__device__ __forceinline__ void multiply_add(
    float (&sums)[4], const unsigned (&right)[4], unsigned left_0, unsigned left_1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(right[0]), "r"(right[1]), "r"(right[2]), "r"(right[3]), "r"(left_0), "r"(left_1));
}

extern "C" __global__ void __launch_bounds__(256)
lightning_indexer(
    const __nv_bfloat16* __restrict__ q_part_ptr,
    const __nv_bfloat16* __restrict__ k_value_ptr,
    const float* __restrict__ w_part_ptr,
    float* __restrict__ out_ptr,
    long long rows,
    long long k_value_stride,
    long long q_part_ld,
    long long out_stride,
    long long out_stride_elements)
{
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / 2 * warp_rows;  // the warp's first of the tile
  const int warp_col = warp % 2 * warp_cols;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const unsigned tile = blockIdx.x;
  // 8 rows of tiles at a time, column by column: blocks that run together share factors in the L2 cache
  const unsigned first = tile / group_tiles * group;
  const unsigned height = tiles_down - first < group ? tiles_down - first : group;
  const long long row0 = static_cast<long long>(first + tile % group_tiles % height) * tile_rows;
  const int across = tile % group_tiles / height;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  const int col0 = across * tile_cols;

  // the ring of 4 slices, and what the thread brings of each
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared);
  const int k_value_m = threadIdx.x / 8, k_value_k = threadIdx.x % 8 * 8;
  const __nv_bfloat16* k_value_from = k_value_ptr + (row0 + k_value_m) * k_value_stride + k_value_k;
  unsigned k_value_to = (place<8>(k_value_m, k_value_k)) * 2;
  asm volatile("" : "+r"(k_value_to));  // stays in a register: the compiler would make it anew for each copy
  const int q_part_n = threadIdx.x / 8, q_part_k = threadIdx.x % 8 * 8;
  // the column that lies in row q_part_n of the tile
  const int q_part_col = q_part_n / warp_cols * warp_cols + q_part_n % 8 * 8 + q_part_n % warp_cols / 8;
  const __nv_bfloat16* q_part_from = q_part_ptr + (col0 + q_part_col) * q_part_ld + q_part_k;
  unsigned q_part_to = (q_part_at + place<8>(q_part_n, q_part_k)) * 2;
  asm volatile("" : "+r"(q_part_to));  // stays in a register: the compiler would make it anew for each copy
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = ring_at + step % stages * slice_bytes;
    #pragma unroll
    for (int v = 0; v < 6; ++v) {
      const unsigned to = slice + k_value_to + v * (at_once * 2);
      copy_chunk<8>(to, k_value_from + v * 32 * k_value_stride, k_value_m + v * 32 < rows_here ? 8 : 0);
    }
    k_value_from += tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int away = v * 32 / warp_cols * warp_cols + v * 32 % warp_cols / 8;  // columns from the first
      const unsigned to = slice + q_part_to + v * (at_once * 2);
      copy_chunk<8>(to, q_part_from + away * q_part_ld, 8);
    }
    q_part_from += tile_k;
  };

  // 2 slices of 64: fragments are loaded one step ahead of their use, across slices too
  unsigned k_value_part[2][3][4];
  unsigned q_part_part[2][4][4];
  float matmul_sums[4][6][4] = {};
  const unsigned k_value_lane = ring_at + place<8>(warp_row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2;
  const unsigned q_part_lane = ring_at + q_part_at * 2 + place<8>(warp_col + lane % 16, lane / 16 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    #pragma unroll
    for (int i = 0; i < 3; ++i) {
      load_matrices(k_value_part[buffer][i], (k_value_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(q_part_part[buffer][i], (q_part_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 6; ++m) {
      #pragma unroll
      for (int nth = 0; nth < 4; ++nth) {  // serpentine: what was multiplied last is at hand
        const int n = m % 2 ? 3 - nth : nth;
        multiply_add(matmul_sums[n][m], q_part_part[buffer][n], k_value_part[buffer][m / 2][m % 2 * 2],
            k_value_part[buffer][m / 2][m % 2 * 2 + 1]);
      }
    }
  };

  #pragma unroll
  for (int s = 0; s < stages - 1; ++s) {
    if (s < steps) copy_slice(s);
    commit_copies();
  }
  wait_copies<stages - 2>();
  __syncthreads();
  load_parts(0, 0, 0);
  const auto take_slice = [&](int step, bool last) {
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k == 3 && !last) {
        wait_copies<stages - 2>();
      }
      if (k < 3) {
        load_parts(step, k + 1, (k + 1) % 2);
      } else if (!last) {
        __syncthreads();
        load_parts(step + 1, 0, 0);
      }
      if (k == 0 && !last) {
        if (step + stages - 1 < steps) copy_slice(step + stages - 1);
        commit_copies();
      }
      multiply(k % 2);
    }
  };
  take_slice(0, false);
  take_slice(steps - 1, true);

  float sum_of_products_part[12];
  #pragma unroll
  for (int r = 0; r < 12; ++r) sum_of_products_part[r] = 0.0f;
  #pragma unroll
  for (int v = 0; v < 12; ++v) {
    const int r = v / 1;
    const int m = warp_row + v / 2 * 8 + lane % 4 * 2 + v % 2;
    const int col = col0 + warp_col + lane / 4 * 8;
    const long long row = row0 + m;
    if (row < rows) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float matmul = matmul_sums[j / 2][v / 2][j % 2 * 2 + v % 2];
        const float w_part = *(w_part_ptr + col + j);
        const float relu = larger(matmul, 0.0f);
        const float mul = relu * w_part;
        sum_of_products_part[r] += mul;
      }
    }
  }
  // 8 lanes have a row
  #pragma unroll
  for (int r = 0; r < 12; ++r) {
    const int v = r * 1;
    const int m = warp_row + v / 2 * 8 + lane % 4 * 2 + v % 2;
    const long long row = row0 + m;
    float sum_of_products = sum_of_products_part[r];
    #pragma unroll
    for (int step = 16; step >= 4; step /= 2) {
      sum_of_products += partner(sum_of_products, step);
    }
    if (lane < 4 && row < rows) {
      *(out_ptr + row * out_stride + ((col0 + warp_col) / warp_cols) * out_stride_elements) = sum_of_products;
    }
  }
}
