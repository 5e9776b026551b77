// linear_cross_entropy_top_parts  bf16[M, H], bf16[V, H], i32[M, 1] -> f32[M, 2004], f32[M, 2004], f32[M, 2004]  at M=4096 H=4096 V=128256
// top_parts, sum_of_exps_parts, sum_of_where_parts of linear_cross_entropy.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// tile     192 x 128 tiles of 8 warps, slices of 64 in a ring of 4
// traffic  3284.1 MB moved, 1182.7 MB ideal, 3284.1 MB with products apart, 3284.1 MB unfused in 2
//          launches
// floor    13793.5 us at 312 TFLOP/s for products; compute-bound at 1310.43 flop/B
// needs    H=4096, V=128256; rows of all operands next to each other; x, w: address and strides in
//          multiples of 16 B

#include <cuda_bf16.h>

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// the larger of two; NaN wins
__device__ __forceinline__ float larger(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 192, tile_cols = 128, tile_k = 64, stages = 4;
constexpr int steps = 64;
constexpr int warp_rows = 48, warp_cols = 64;  // of a tile
constexpr int tiles_across = 1002;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
// elements from the start of a slice to the right factor, and to its end
constexpr int w_at = tile_rows * tile_k;
constexpr int slice_elements = w_at + tile_cols * tile_k;
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
linear_cross_entropy_top_parts(
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ w_ptr,
    const int* __restrict__ labels_ptr,
    float* __restrict__ top_parts_ptr,
    float* __restrict__ sum_of_exps_parts_ptr,
    float* __restrict__ sum_of_where_parts_ptr,
    long long rows,
    long long x_stride,
    long long w_ld,
    long long labels_stride,
    long long top_parts_stride,
    long long sum_of_exps_parts_stride,
    long long sum_of_where_parts_stride)
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
  const int x_m = threadIdx.x / 8, x_k = threadIdx.x % 8 * 8;
  const __nv_bfloat16* x_from = x_ptr + (row0 + x_m) * x_stride + x_k;
  unsigned x_to = (place<8>(x_m, x_k)) * 2;
  asm volatile("" : "+r"(x_to));  // stays in a register: the compiler would make it anew for each copy
  const int w_n = threadIdx.x / 8, w_k = threadIdx.x % 8 * 8;
  // the column that lies in row w_n of the tile
  const int w_col = w_n / warp_cols * warp_cols + w_n % 8 * 8 + w_n % warp_cols / 8;
  const __nv_bfloat16* w_from = w_ptr + (col0 + w_col) * w_ld + w_k;
  unsigned w_to = (w_at + place<8>(w_n, w_k)) * 2;
  asm volatile("" : "+r"(w_to));  // stays in a register: the compiler would make it anew for each copy
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = ring_at + step % stages * slice_bytes;
    #pragma unroll
    for (int v = 0; v < 6; ++v) {
      const unsigned to = slice + x_to + v * (at_once * 2);
      copy_chunk<8>(to, x_from + v * 32 * x_stride, x_m + v * 32 < rows_here ? 8 : 0);
    }
    x_from += tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int away = v * 32 / warp_cols * warp_cols + v * 32 % warp_cols / 8;  // columns from the first
      const unsigned to = slice + w_to + v * (at_once * 2);
      copy_chunk<8>(to, w_from + away * w_ld, 8);
    }
    w_from += tile_k;
  };

  // 64 slices of 64: fragments are loaded one step ahead of their use, across slices too
  unsigned x_part[2][3][4];
  unsigned w_part[2][4][4];
  float matmul_sums[4][6][4] = {};
  const unsigned x_lane = ring_at + place<8>(warp_row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2;
  const unsigned w_lane = ring_at + w_at * 2 + place<8>(warp_col + lane % 16, lane / 16 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    #pragma unroll
    for (int i = 0; i < 3; ++i) {
      load_matrices(x_part[buffer][i], (x_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(w_part[buffer][i], (w_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 6; ++m) {
      #pragma unroll
      for (int nth = 0; nth < 4; ++nth) {  // serpentine: what was multiplied last is at hand
        const int n = m % 2 ? 3 - nth : nth;
        multiply_add(matmul_sums[n][m], w_part[buffer][n], x_part[buffer][m / 2][m % 2 * 2],
            x_part[buffer][m / 2][m % 2 * 2 + 1]);
      }
    }
  };

  #pragma unroll
  for (int s = 0; s < stages - 1; ++s) {
    copy_slice(s);
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
  #pragma unroll 1
  for (int step = 0; step < steps - 1; ++step) take_slice(step, false);
  take_slice(steps - 1, true);

  float max_of_matmul_part[12];
  #pragma unroll
  for (int r = 0; r < 12; ++r) max_of_matmul_part[r] = -INFINITY;
  float sum_of_where_parts_part[12];
  #pragma unroll
  for (int r = 0; r < 12; ++r) sum_of_where_parts_part[r] = 0.0f;
  float where_of[12];
  #pragma unroll
  for (int v = 0; v < 12; ++v) {
    const int r = v / 1;
    const int m = warp_row + v / 2 * 8 + lane % 4 * 2 + v % 2;
    const int col = col0 + warp_col + lane / 4 * 8;
    const long long row = row0 + m;
    if (row < rows) {
      const int labels = *(labels_ptr + row * labels_stride);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float matmul = matmul_sums[j / 2][v / 2][j % 2 * 2 + v % 2];
        const int col_index = col + j;
        const bool col_index_is_labels = col_index == labels;
        const float where_from_labels = col_index_is_labels ? matmul : 0.0f;
        max_of_matmul_part[r] = larger(max_of_matmul_part[r], matmul);
        sum_of_where_parts_part[r] += where_from_labels;
      }
    }
  }
  // 8 lanes have a row
  #pragma unroll
  for (int r = 0; r < 12; ++r) {
    const int v = r * 1;
    const int m = warp_row + v / 2 * 8 + lane % 4 * 2 + v % 2;
    const long long row = row0 + m;
    float max_of_matmul = max_of_matmul_part[r];
    #pragma unroll
    for (int step = 16; step >= 4; step /= 2) {
      max_of_matmul = larger(max_of_matmul, partner(max_of_matmul, step));
    }
    float sum_of_where_parts = sum_of_where_parts_part[r];
    #pragma unroll
    for (int step = 16; step >= 4; step /= 2) {
      sum_of_where_parts += partner(sum_of_where_parts, step);
    }
    const bool max_of_matmul_is_minus_inf = max_of_matmul == (-INFINITY);
    const float where = max_of_matmul_is_minus_inf ? 0.0f : max_of_matmul;
    where_of[r] = where;
    if (lane < 4 && row < rows) {
      *(top_parts_ptr + row * top_parts_stride + (col0 + warp_col) / warp_cols) = max_of_matmul;
      *(sum_of_where_parts_ptr + row * sum_of_where_parts_stride + (col0 + warp_col) / warp_cols) = sum_of_where_parts;
    }
  }
  float sum_of_exps_part[12];
  #pragma unroll
  for (int r = 0; r < 12; ++r) sum_of_exps_part[r] = 0.0f;
  #pragma unroll
  for (int v = 0; v < 12; ++v) {
    const int r = v / 1;
    const int m = warp_row + v / 2 * 8 + lane % 4 * 2 + v % 2;
    const long long row = row0 + m;
    if (row < rows) {
      const float where = where_of[r];
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float matmul = matmul_sums[j / 2][v / 2][j % 2 * 2 + v % 2];
        const float sub = matmul - where;
        const float exp_ = exponential(sub);
        sum_of_exps_part[r] += exp_;
      }
    }
  }
  // 8 lanes have a row
  #pragma unroll
  for (int r = 0; r < 12; ++r) {
    const int v = r * 1;
    const int m = warp_row + v / 2 * 8 + lane % 4 * 2 + v % 2;
    const long long row = row0 + m;
    float sum_of_exps = sum_of_exps_part[r];
    #pragma unroll
    for (int step = 16; step >= 4; step /= 2) {
      sum_of_exps += partner(sum_of_exps, step);
    }
    if (lane < 4 && row < rows) {
      *(sum_of_exps_parts_ptr + row * sum_of_exps_parts_stride + (col0 + warp_col) / warp_cols) = sum_of_exps;
    }
  }
}
