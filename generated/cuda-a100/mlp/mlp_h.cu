// mlp_h  bf16[M, K], bf16[H, K], bf16[H, K] -> bf16[M, H]  at M=4096 K=4096 H=14336
// h of mlp.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// tile     128 x 128 tiles of 8 warps, slices of 64 in a ring of 3
// traffic  1090.5 MB moved, 385.9 MB ideal, 889.2 MB with products apart, 1124.1 MB unfused in 4
//          launches
// floor    3083.6 us at 312 TFLOP/s for products; compute-bound at 882.22 flop/B
// rounding h to bf16 when stored; f32 between
// needs    K=4096, H=14336; rows of all operands next to each other; x, gate, up, h: address and
//          strides in multiples of 16 B

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

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, within 1 ulp; above 2^126 it is 0
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 128, tile_cols = 128, tile_k = 64, stages = 3;
constexpr int steps = 64;
constexpr int warp_rows = 64, warp_cols = 32;  // of a tile
constexpr int tiles_across = 112;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
// elements from the start of a slice to the right factors, and to its end
constexpr int gate_at = tile_rows * tile_k;
constexpr int up_at = gate_at + tile_cols * tile_k;
constexpr int slice_elements = up_at + tile_cols * tile_k;
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
mlp_h(
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ gate_ptr,
    const __nv_bfloat16* __restrict__ up_ptr,
    __nv_bfloat16* __restrict__ h_ptr,
    long long rows,
    long long x_stride,
    long long gate_ld,
    long long up_ld,
    long long h_stride)
{
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / 4 * warp_rows;  // the warp's first of the tile
  const int warp_col = warp % 4 * warp_cols;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const unsigned tile = blockIdx.x;
  // 8 rows of tiles at a time, column by column: blocks that run together share factors in the L2 cache
  const unsigned first = tile / group_tiles * group;
  const unsigned height = tiles_down - first < group ? tiles_down - first : group;
  const long long row0 = static_cast<long long>(first + tile % group_tiles % height) * tile_rows;
  const int across = tile % group_tiles / height;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  const int col0 = across * tile_cols;

  // the ring of 3 slices, and what the thread brings of each
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared);
  const int x_m = threadIdx.x / 8, x_k = threadIdx.x % 8 * 8;
  const __nv_bfloat16* x_from = x_ptr + (row0 + x_m) * x_stride + x_k;
  unsigned x_to = (place<8>(x_m, x_k)) * 2;
  asm volatile("" : "+r"(x_to));  // stays in a register: the compiler would make it anew for each copy
  const int gate_n = threadIdx.x / 8, gate_k = threadIdx.x % 8 * 8;
  // the column that lies in row gate_n of the tile
  const int gate_col = gate_n / warp_cols * warp_cols + gate_n % 8 * 4 + gate_n % warp_cols / 8;
  const __nv_bfloat16* gate_from = gate_ptr + (col0 + gate_col) * gate_ld + gate_k;
  unsigned gate_to = (gate_at + place<8>(gate_n, gate_k)) * 2;
  asm volatile("" : "+r"(gate_to));  // stays in a register: the compiler would make it anew for each copy
  const int up_n = threadIdx.x / 8, up_k = threadIdx.x % 8 * 8;
  // the column that lies in row up_n of the tile
  const int up_col = up_n / warp_cols * warp_cols + up_n % 8 * 4 + up_n % warp_cols / 8;
  const __nv_bfloat16* up_from = up_ptr + (col0 + up_col) * up_ld + up_k;
  unsigned up_to = (up_at + place<8>(up_n, up_k)) * 2;
  asm volatile("" : "+r"(up_to));  // stays in a register: the compiler would make it anew for each copy
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = ring_at + step % stages * slice_bytes;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + x_to + v * (at_once * 2);
      copy_chunk<8>(to, x_from + v * 32 * x_stride, x_m + v * 32 < rows_here ? 8 : 0);
    }
    x_from += tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + gate_to + v * (at_once * 2);
      copy_chunk<8>(to, gate_from + v * 32 * gate_ld, 8);
    }
    gate_from += tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + up_to + v * (at_once * 2);
      copy_chunk<8>(to, up_from + v * 32 * up_ld, 8);
    }
    up_from += tile_k;
  };

  // 64 slices of 64: fragments are loaded one step ahead of their use, across slices too
  unsigned x_part[2][4][4];
  unsigned gate_part[2][2][4];
  unsigned up_part[2][2][4];
  float x_times_gate_sums[2][8][4] = {};
  float x_times_up_sums[2][8][4] = {};
  const unsigned x_lane = ring_at + place<8>(warp_row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2;
  const unsigned gate_lane = ring_at + gate_at * 2 + place<8>(warp_col + lane % 16, lane / 16 * 8) * 2;
  const unsigned up_lane = ring_at + up_at * 2 + place<8>(warp_col + lane % 16, lane / 16 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(x_part[buffer][i], (x_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(gate_part[buffer][i], (gate_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(up_part[buffer][i], (up_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 8; ++m) {
      #pragma unroll
      for (int nth = 0; nth < 2; ++nth) {  // serpentine: what was multiplied last is at hand
        const int n = m % 2 ? 1 - nth : nth;
        multiply_add(x_times_gate_sums[n][m], gate_part[buffer][n], x_part[buffer][m / 2][m % 2 * 2],
            x_part[buffer][m / 2][m % 2 * 2 + 1]);
        multiply_add(x_times_up_sums[n][m], up_part[buffer][n], x_part[buffer][m / 2][m % 2 * 2],
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

  const int n = warp_col + lane / 4 * 4;  // the first of the thread's columns
  const int col = col0 + n;
  #pragma unroll
  for (int v = 0; v < 16; ++v) {
    const int m = warp_row + v / 2 * 8 + lane % 4 * 2 + v % 2;
    const long long row = row0 + m;
    if (row < rows) {
      Vec<__nv_bfloat16, 4> h_vec;
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x_times_gate = x_times_gate_sums[j / 2][v / 2][j % 2 * 2 + v % 2];
        const float x_times_up = x_times_up_sums[j / 2][v / 2][j % 2 * 2 + v % 2];
        const float silu = x_times_gate * reciprocal(1.0f + exponential(-x_times_gate));
        const float h = silu * x_times_up;
        h_vec.at[j] = __float2bfloat16_rn(h);
      }
      store<4>(h_ptr + row * h_stride + col, h_vec);
    }
  }
}
