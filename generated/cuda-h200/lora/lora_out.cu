// lora_out  bf16[N, R], f32, f32[M, N], bf16[M, R] -> bf16[M, N]  at M=4096 N=4096 R=16
// out of lora.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// tile     32 x 64 tiles of 2 warps, slices of 64 in a ring of 4
// traffic  100.9 MB moved, 100.9 MB ideal, 168.0 MB with products apart, 235.1 MB unfused in 3 launches
// floor    21.0 us at 4.8 TB/s; memory-bound at 5.32 flop/B
// rounding out to bf16 when stored; f32 between
// needs    N=4096, R=16; rows of all operands next to each other; x_times_a, b, x_times_w, out: address
//          and strides in multiples of 16 B
// launch   begins while the kernels before it run, and waits for them behind the first slice of b

#include <cuda_bf16.h>

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

// the vector to p, which is aligned to it
template <int N, typename T>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 32, tile_cols = 64, tile_k = 64, stages = 4;
constexpr int steps = 1;
constexpr int warp_cols = 32;  // of a tile
constexpr int tiles_across = 64;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
constexpr int full_k = 16;
// elements from the start of a slice to the right factor, and to its end
constexpr int b_at = tile_rows * tile_k;
constexpr int slice_elements = b_at + tile_cols * tile_k;
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
lora_out(
    const __nv_bfloat16* __restrict__ b_ptr,
    float scale,
    const float* x_times_w_ptr,
    const __nv_bfloat16* x_times_a_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
    long long rows,
    long long x_times_a_stride,
    long long b_ld,
    long long x_times_w_stride,
    long long out_stride)
{
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_col = warp * warp_cols;  // the warp's first of the tile
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
  const int x_times_a_m = threadIdx.x / 8, x_times_a_k = threadIdx.x % 8 * 8;
  const __nv_bfloat16* x_times_a_from = x_times_a_ptr + (row0 + x_times_a_m) * x_times_a_stride + x_times_a_k;
  unsigned x_times_a_to = (place<8>(x_times_a_m, x_times_a_k)) * 2;
  asm volatile("" : "+r"(x_times_a_to));  // stays in a register: the compiler would make it anew for each copy
  const int b_n = threadIdx.x / 8, b_k = threadIdx.x % 8 * 8;
  // the column that lies in row b_n of the tile
  const int b_col = b_n / warp_cols * warp_cols + b_n % 8 * 4 + b_n % warp_cols / 8;
  const __nv_bfloat16* b_from = b_ptr + (col0 + b_col) * b_ld + b_k;
  unsigned b_to = (b_at + place<8>(b_n, b_k)) * 2;
  asm volatile("" : "+r"(b_to));  // stays in a register: the compiler would make it anew for each copy
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_right = [&](int step) {
    const unsigned slice = ring_at + step % stages * slice_bytes;
    const int k_at = step * tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      const int away = v * 8 / warp_cols * warp_cols + v * 8 % warp_cols / 8;  // columns from the first
      const unsigned to = slice + b_to + v * (at_once * 2);
      copy_chunk<8>(to, b_from + away * b_ld, k_at + b_k < full_k ? 8 : 0);
    }
    b_from += tile_k;
  };
  const auto copy_left = [&](int step) {
    const unsigned slice = ring_at + step % stages * slice_bytes;
    const int k_at = step * tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + x_times_a_to + v * (at_once * 2);
      copy_chunk<8>(to, x_times_a_from + v * 8 * x_times_a_stride, x_times_a_m + v * 8 < rows_here && k_at + x_times_a_k < full_k ? 8 : 0);
    }
    x_times_a_from += tile_k;
  };

  // the right factors' first slices: no kernel before this one writes them
  #pragma unroll
  for (int s = 0; s < stages - 1; ++s) {
    if (s < steps) copy_right(s);
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");  // until the kernels before this one have ended

  // 1 slices of 64: fragments are loaded one step ahead of their use, across slices too
  unsigned x_times_a_part[2][2][4];
  unsigned b_part[2][2][4];
  float matmul_sums[2][4][4] = {};
  const unsigned x_times_a_lane = ring_at + place<8>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2;
  const unsigned b_lane = ring_at + b_at * 2 + place<8>(warp_col + lane % 16, lane / 16 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(x_times_a_part[buffer][i], (x_times_a_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(b_part[buffer][i], (b_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 4; ++m) {
      #pragma unroll
      for (int nth = 0; nth < 2; ++nth) {  // serpentine: what was multiplied last is at hand
        const int n = m % 2 ? 1 - nth : nth;
        multiply_add(matmul_sums[n][m], b_part[buffer][n], x_times_a_part[buffer][m / 2][m % 2 * 2],
            x_times_a_part[buffer][m / 2][m % 2 * 2 + 1]);
      }
    }
  };

  #pragma unroll
  for (int s = 0; s < stages - 1; ++s) {
    if (s < steps) copy_left(s);
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
        if (step + stages - 1 < steps) {
          copy_right(step + stages - 1);
          copy_left(step + stages - 1);
        }
        commit_copies();
      }
      multiply(k % 2);
    }
  };
  take_slice(steps - 1, true);

  const int n = warp_col + lane / 4 * 4;  // the first of the thread's columns
  const int col = col0 + n;
  Vec<float, 4> x_times_w_vec[8];
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int m = v / 2 * 8 + lane % 4 * 2 + v % 2;
    const long long row = row0 + m;
    if (row < rows) {
      x_times_w_vec[v] = load<4>(x_times_w_ptr + row * x_times_w_stride + col);
    }
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int m = v / 2 * 8 + lane % 4 * 2 + v % 2;
    const long long row = row0 + m;
    if (row < rows) {
      Vec<__nv_bfloat16, 4> out_vec;
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float matmul = matmul_sums[j / 2][v / 2][j % 2 * 2 + v % 2];
        const float x_times_w = x_times_w_vec[v].at[j];
        const float mul = matmul * scale;
        const float add = x_times_w + mul;
        out_vec.at[j] = __float2bfloat16_rn(add);
      }
      store<4>(out_ptr + row * out_stride + col, out_vec);
    }
  }
}
