// moe_layer_matmul_parts  bf16[4, T, D_over_4], bf16[4, E, D_over_4] -> f32[4, T, E]  at T=256 D_over_4=512 E=64
// matmul_parts of moe_layer_matmul.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// views    x_part is x as [4, T, D // 4]; router_part is router as [4, E, D // 4]
// tile     32 x 64 tiles of 2 warps, slices of 64 in a ring of 4
// traffic  1.6 MB moved, 1.6 MB ideal, 1.6 MB with products apart, 1.6 MB unfused in 1 launch
// floor    0.8 us at 2.039 TB/s; memory-bound at 42.67 flop/B
// needs    D_over_4=512, E=64; rows of all operands next to each other; x_part, router_part,
//          matmul_parts: address and strides in multiples of 16 B

#include <cuda_bf16.h>

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

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 32, tile_cols = 64, tile_k = 64, stages = 4;
constexpr int steps = 8;
constexpr int warp_cols = 32;  // of a tile
// elements from the start of a slice to the right factor, and to its end
constexpr int router_part_at = tile_rows * tile_k;
constexpr int slice_elements = router_part_at + tile_cols * tile_k;
constexpr int slice_bytes = 2 * slice_elements;
constexpr int at_once = 64 * 8;  // elements that the threads copy at once

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

extern "C" __global__ void __launch_bounds__(64)
moe_layer_matmul_parts(
    const __nv_bfloat16* __restrict__ x_part_ptr,
    const __nv_bfloat16* __restrict__ router_part_ptr,
    float* __restrict__ matmul_parts_ptr,
    long long axis0_size,
    long long T_size,
    long long x_part_stride_axis0,
    long long x_part_stride_T,
    long long router_part_stride_axis0,
    long long router_part_ld,
    long long matmul_parts_stride_axis0,
    long long matmul_parts_stride_T)
{
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_col = warp * warp_cols;  // the warp's first of the tile
  const long long rows = T_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const long long axis0_at = (blockIdx.x) / tiles_down;
  const unsigned tile = (blockIdx.x) % tiles_down;
  const long long row0 = static_cast<long long>(tile) * tile_rows;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  constexpr int col0 = 0;

  // the ring of 4 slices, and what the thread brings of each
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared);
  const int x_part_m = threadIdx.x / 8, x_part_k = threadIdx.x % 8 * 8;
  const __nv_bfloat16* x_part_from = x_part_ptr + axis0_at * x_part_stride_axis0 + (row0 + x_part_m) * x_part_stride_T + x_part_k;
  unsigned x_part_to = (place<8>(x_part_m, x_part_k)) * 2;
  asm volatile("" : "+r"(x_part_to));  // stays in a register: the compiler would make it anew for each copy
  const int router_part_n = threadIdx.x / 8, router_part_k = threadIdx.x % 8 * 8;
  // the column that lies in row router_part_n of the tile
  const int router_part_col = router_part_n / warp_cols * warp_cols + router_part_n % 8 * 4 + router_part_n % warp_cols / 8;
  const __nv_bfloat16* router_part_from = router_part_ptr + axis0_at * router_part_stride_axis0 + (col0
      + router_part_col) * router_part_ld + router_part_k;
  unsigned router_part_to = (router_part_at + place<8>(router_part_n, router_part_k)) * 2;
  asm volatile("" : "+r"(router_part_to));  // stays in a register: the compiler would make it anew for each copy
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = ring_at + step % stages * slice_bytes;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + x_part_to + v * (at_once * 2);
      copy_chunk<8>(to, x_part_from + v * 8 * x_part_stride_T, x_part_m + v * 8 < rows_here ? 8 : 0);
    }
    x_part_from += tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      const int away = v * 8 / warp_cols * warp_cols + v * 8 % warp_cols / 8;  // columns from the first
      const unsigned to = slice + router_part_to + v * (at_once * 2);
      copy_chunk<8>(to, router_part_from + away * router_part_ld, 8);
    }
    router_part_from += tile_k;
  };

  // 8 slices of 64: fragments are loaded one step ahead of their use, across slices too
  unsigned x_part_part[2][2][4];
  unsigned router_part_part[2][2][4];
  float matmul_sums[2][4][4] = {};
  const unsigned x_part_lane = ring_at + place<8>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2;
  const unsigned router_part_lane = ring_at + router_part_at * 2 + place<8>(warp_col + lane % 16, lane / 16 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(x_part_part[buffer][i], (x_part_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(router_part_part[buffer][i], (router_part_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 4; ++m) {
      #pragma unroll
      for (int nth = 0; nth < 2; ++nth) {  // serpentine: what was multiplied last is at hand
        const int n = m % 2 ? 1 - nth : nth;
        multiply_add(matmul_sums[n][m], router_part_part[buffer][n], x_part_part[buffer][m / 2][m % 2 * 2],
            x_part_part[buffer][m / 2][m % 2 * 2 + 1]);
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

  const int n = warp_col + lane / 4 * 4;  // the first of the thread's columns
  const int col = col0 + n;
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int m = v / 2 * 8 + lane % 4 * 2 + v % 2;
    const long long row = row0 + m;
    if (row < rows) {
      Vec<float, 4> matmul_parts_vec;
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float matmul = matmul_sums[j / 2][v / 2][j % 2 * 2 + v % 2];
        matmul_parts_vec.at[j] = matmul;
      }
      store<4>(matmul_parts_ptr + axis0_at * matmul_parts_stride_axis0 + row * matmul_parts_stride_T + col, matmul_parts_vec);
    }
  }
}
