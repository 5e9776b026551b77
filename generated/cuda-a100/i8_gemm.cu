// i8_gemm  i8[M, K], i8[N, K], f32[M, 1], f32[N], bf16[N] -> bf16[M, N]  at M=4096 K=4096 N=4096
// relu((x @ w.T) * sx * sw + bias): sums are exact.
//
//     def i8_gemm(x, w, sx, sw, bias):
//         return F.relu((x @ w.T) * sx * sw + bias)
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 624 TFLOP/s for products
// tile     128 x 256 tiles of 8 warps, slices of 128 in a ring of 3
// traffic  67.1 MB moved, 67.1 MB ideal, 201.4 MB with products apart, 604.0 MB unfused in 5 launches
// floor    220.3 us at 624 TFLOP/s for products; compute-bound at 2046.75 flop/B
// rounding out to bf16 when stored; f32 between
// needs    K=4096, N=4096; rows of all operands next to each other; x, w, sw, bias, out: address and
//          strides in multiples of 16 B; sw [N], bias [N] shared by every row

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

// the larger of two; NaN wins
__device__ __forceinline__ float larger(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 128, tile_cols = 256, tile_k = 128, stages = 3;
constexpr int steps = 32;
constexpr int warp_rows = 64, warp_cols = 64;  // of a tile
constexpr int tiles_across = 16;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
// elements from the start of a slice to the right factor, and to its end
constexpr int w_at = tile_rows * tile_k;
constexpr int slice_elements = w_at + tile_cols * tile_k;
constexpr int slice_bytes = 1 * slice_elements;
constexpr int at_once = 256 * 16;  // elements that the threads copy at once

// where element (row, k) lies in a tile with rows of Chunks x 16 elements: XOR-swizzled by the row's number, so that
// 8 rows of one column of chunks lie in different banks
template <int Chunks>
__device__ __forceinline__ int place(int row, int k) {
  constexpr int period = Chunks < 8 ? Chunks : 8;
  const int xor_mask = row / (8 / period) % period;
  return (row * Chunks + (k / 16 ^ xor_mask)) * 16 + k % 16;
}

// 16 elements on their way from global to shared memory, Width with each copy; those from `count` on are zeros
template <int Width, typename T>
__device__ __forceinline__ void copy_chunk(unsigned to, const T* from, int count) {
  if constexpr (Width == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(to), "l"(from), "r"(count * 1) : "memory");
  } else {
    #pragma unroll
    for (int j = 0; j < 16; j += Width) {
      const int left = count < j ? 0 : count - j < Width ? count - j : Width;
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
          :: "r"(to + j * 1), "l"(from + j), "n"(Width * 1), "r"(left * 1) : "memory");
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
    int (&sums)[4], const unsigned (&right)[4], unsigned left_0, unsigned left_1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(right[0]), "r"(right[1]), "r"(right[2]), "r"(right[3]), "r"(left_0), "r"(left_1));
}

extern "C" __global__ void __launch_bounds__(256)
i8_gemm(
    const signed char* __restrict__ x_ptr,
    const signed char* __restrict__ w_ptr,
    const float* __restrict__ sx_ptr,
    const float* __restrict__ sw_ptr,
    const __nv_bfloat16* __restrict__ bias_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long w_ld,
    long long sx_stride,
    long long out_stride)
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
  signed char* const ring = reinterpret_cast<signed char*>(shared);
  const int x_m = threadIdx.x / 8, x_k = threadIdx.x % 8 * 16;
  const signed char* x_from = x_ptr + (row0 + x_m) * x_stride + x_k;
  unsigned x_to = (place<8>(x_m, x_k)) * 1;
  asm volatile("" : "+r"(x_to));  // stays in a register: the compiler would make it anew for each copy
  const int w_n = threadIdx.x / 8, w_k = threadIdx.x % 8 * 16;
  // the column that lies in row w_n of the tile
  const int w_col = w_n / warp_cols * warp_cols + w_n % 8 * 8 + w_n % warp_cols / 8;
  const signed char* w_from = w_ptr + (col0 + w_col) * w_ld + w_k;
  unsigned w_to = (w_at + place<8>(w_n, w_k)) * 1;
  asm volatile("" : "+r"(w_to));  // stays in a register: the compiler would make it anew for each copy
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = ring_at + step % stages * slice_bytes;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + x_to + v * (at_once * 1);
      copy_chunk<16>(to, x_from + v * 32 * x_stride, x_m + v * 32 < rows_here ? 16 : 0);
    }
    x_from += tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      const int away = v * 32 / warp_cols * warp_cols + v * 32 % warp_cols / 8;  // columns from the first
      const unsigned to = slice + w_to + v * (at_once * 1);
      copy_chunk<16>(to, w_from + away * w_ld, 16);
    }
    w_from += tile_k;
  };

  // 32 slices of 128: fragments are loaded one step ahead of their use, across slices too
  unsigned x_part[2][4][4];
  unsigned w_part[2][4][4];
  int matmul_sums[4][8][4] = {};
  const unsigned x_lane = ring_at + place<8>(warp_row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 16) * 1;
  const unsigned w_lane = ring_at + w_at * 1 + place<8>(warp_col + lane % 16, lane / 16 * 16) * 1;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(x_part[buffer][i], (x_lane ^ (k * 32)) + slice + i * (16 * tile_k * 1));
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(w_part[buffer][i], (w_lane ^ (k * 32)) + slice + i * (16 * tile_k * 1));
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 8; ++m) {
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

  const int n = warp_col + lane / 4 * 8;  // the first of the thread's columns
  const int col = col0 + n;
  const Vec<float, 8> sw_vec = load<8>(sw_ptr + col);
  const Vec<__nv_bfloat16, 8> bias_vec = load<8>(bias_ptr + col);
  #pragma unroll
  for (int v = 0; v < 16; ++v) {
    const int m = warp_row + v / 2 * 8 + lane % 4 * 2 + v % 2;
    const long long row = row0 + m;
    if (row < rows) {
      const float sx = *(sx_ptr + row * sx_stride);
      Vec<__nv_bfloat16, 8> out_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int matmul = matmul_sums[j / 2][v / 2][j % 2 * 2 + v % 2];
        const float sw = sw_vec.at[j];
        const float bias = __bfloat162float(bias_vec.at[j]);
        const float to_f32 = static_cast<float>(matmul);
        const float to_f32_times_sx = to_f32 * sx;
        const float to_f32_times_sx_times_sw = to_f32_times_sx * sw;
        const float add = to_f32_times_sx_times_sw + bias;
        const float relu = larger(add, 0.0f);
        out_vec.at[j] = __float2bfloat16_rn(relu);
      }
      store<8>(out_ptr + row * out_stride + col, out_vec);
    }
  }
}
