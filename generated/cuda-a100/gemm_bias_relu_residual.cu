// gemm_bias_relu_residual  f16[M, K], f16[K, N], f16[N], f16[M, N] -> f16[M, N]  at M=8192 K=4096 N=4096
// relu(x @ w + bias) + residual.
//
//     def gemm_bias_relu_residual(x, w, bias, residual):
//         return F.relu(x @ w + bias) + residual
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// tile     128 x 256 tiles of 8 warps, slices of 64 in a ring of 3
// traffic  234.9 MB moved, 234.9 MB ideal, 369.1 MB with products apart, 637.5 MB unfused in 4 launches
// floor    881.0 us at 312 TFLOP/s for products; compute-bound at 1170.24 flop/B
// rounding out to f16 when stored; f32 between
// needs    K=4096, N=4096; rows of all operands next to each other; x, w, bias, residual, out: address
//          and strides in multiples of 16 B; bias [N] shared by every row

#include <cuda_fp16.h>

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
constexpr int tile_rows = 128, tile_cols = 256, tile_k = 64, stages = 3;
constexpr int steps = 64;
constexpr int warp_rows = 64, warp_cols = 64;  // of a tile
constexpr int threads = 256;
constexpr int tiles_across = 16;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
// elements from the start of a slice to the right factor, and to its end
constexpr int w_at = tile_rows * tile_k;
constexpr int slice_elements = w_at + tile_cols * tile_k;
constexpr int slice_bytes = 2 * slice_elements;
constexpr int at_once = 256 * 8;  // elements that the threads copy at once
// floats from a row of sums to the next: what a warp writes at once lies in different banks
constexpr int sums_stride = tile_cols + 4;

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

// four matrices of 8 x 16 bytes, from the rows whose places the lanes give; transposed on the way
__device__ __forceinline__ void load_matrices_across(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// sums += right^T left^T, 16 columns by 8 rows
__device__ __forceinline__ void multiply_add(
    float (&sums)[4], const unsigned (&right)[4], unsigned left_0, unsigned left_1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(right[0]), "r"(right[1]), "r"(right[2]), "r"(right[3]), "r"(left_0), "r"(left_1));
}

extern "C" __global__ void __launch_bounds__(256)
gemm_bias_relu_residual(
    const __half* __restrict__ x_ptr,
    const __half* __restrict__ w_ptr,
    const __half* __restrict__ bias_ptr,
    const __half* __restrict__ residual_ptr,
    __half* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long w_ld,
    long long residual_stride,
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
  __half* const ring = reinterpret_cast<__half*>(shared);
  const int x_m = threadIdx.x / 8, x_k = threadIdx.x % 8 * 8;
  const __half* x_from = x_ptr + (row0 + x_m) * x_stride + x_k;
  unsigned x_to = (place<8>(x_m, x_k)) * 2;
  asm volatile("" : "+r"(x_to));  // stays in a register: the compiler would make it anew for each copy
  const int w_k = threadIdx.x / 32, w_n = threadIdx.x % 32 * 8;
  const __half* w_from = w_ptr + (w_k) * w_ld + col0 + w_n;
  unsigned w_to = (w_at + place<32>(w_k, w_n)) * 2;
  asm volatile("" : "+r"(w_to));  // stays in a register: the compiler would make it anew for each copy
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
    for (int v = 0; v < 8; ++v) {
      const unsigned to = slice + w_to + v * (at_once * 2);
      copy_chunk<8>(to, w_from + v * 8 * w_ld, 8);
    }
    w_from += tile_k * w_ld;
  };

  // 64 slices of 64: fragments are loaded one step ahead of their use, across slices too
  unsigned x_part[2][4][4];
  unsigned w_part[2][4][4];
  float matmul_sums[4][8][4] = {};
  const unsigned x_lane = ring_at + place<8>(warp_row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2;
  const unsigned w_lane = ring_at + w_at * 2 + place<32>(lane % 8 + lane / 16 * 8, warp_col + lane / 8 % 2 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(x_part[buffer][i], (x_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices_across(w_part[buffer][i], (w_lane ^ (i * 32)) + slice + k * (16 * tile_cols * 2));
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

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  __syncthreads();
  float* const matmul_shared = reinterpret_cast<float*>(shared);
  #pragma unroll
  for (int n = 0; n < 4; ++n) {
    #pragma unroll
    for (int m = 0; m < 8; ++m) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int sum_row = warp_row + m * 8 + lane % 4 * 2 + i % 2;
        const int sum_col = warp_col + n * 16 + lane / 4 + i / 2 * 8;
        matmul_shared[sum_row * sums_stride + sum_col] = matmul_sums[n][m][i];
      }
    }
  }
  __syncthreads();

  #pragma unroll 4
  for (int v = 0; v < 16; ++v) {
    const int m = static_cast<int>((v * threads + threadIdx.x) / (tile_cols / 8));
    const int n = static_cast<int>((v * threads + threadIdx.x) % (tile_cols / 8)) * 8;
    const long long row = row0 + m;
    const int col = col0 + n;
    if (row < rows) {
      const Vec<float, 8> matmul_total = load<8>(matmul_shared + m * sums_stride + n);
      const Vec<__half, 8> bias_vec = load<8>(bias_ptr + col);
      const Vec<__half, 8> residual_vec = load<8>(residual_ptr + row * residual_stride + col);
      Vec<__half, 8> out_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float matmul = matmul_total.at[j];
        const float bias = __half2float(bias_vec.at[j]);
        const float residual = __half2float(residual_vec.at[j]);
        const float matmul_plus_bias = matmul + bias;
        const float relu = larger(matmul_plus_bias, 0.0f);
        const float relu_plus_residual = relu + residual;
        out_vec.at[j] = __float2half_rn(relu_plus_residual);
      }
      store<8>(out_ptr + row * out_stride + col, out_vec);
    }
  }
}
