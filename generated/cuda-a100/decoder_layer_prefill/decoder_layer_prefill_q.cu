// decoder_layer_prefill_q  bf16[S, D], bf16[D], bf16[E_times_G_times_H, D], bf16[E_times_H, D] -> bf16[S, E_times_G_times_H], bf16[S,
//   E_times_H]  at S=4096 D=4096 E_times_G_times_H=4096 E_times_H=1024
// q, k_value of decoder_layer_prefill.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// tile     128 x 256 tiles of 8 warps, slices of 64 in a ring of 3
// traffic  243.3 MB moved, 117.4 MB ideal, 218.1 MB with products apart, 335.6 MB unfused in 5 launches
// floor    550.6 us at 312 TFLOP/s for products; compute-bound at 706.18 flop/B
// rounding x * norm to bf16 before it is multiplied, and only then scaled by rrms; q to bf16 when
//          stored; k_value to bf16 when stored; f32 between
// needs    D=4096, E_times_G_times_H=4096, E_times_H=1024; rows of all operands next to each other; x,
//          norm, wq, wk, q, k_value: address and strides in multiples of 16 B; norm [D] shared by every
//          row

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
constexpr int tile_rows = 128, tile_cols = 256, tile_k = 64, stages = 3;
constexpr int steps = 64;
constexpr int warp_rows = 64, warp_cols = 64;  // of a tile
constexpr int tiles_across = 20;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
// elements from the start of a slice to the right factor, and to its end
constexpr int right_at = tile_rows * tile_k;
constexpr int slice_elements = right_at + tile_cols * tile_k;
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

// 8 elements, Width with each load; those from `count` on are zeros
template <int Width, typename T>
__device__ __forceinline__ Vec<T, 8> load_chunk(const T* from, int count) {
  Vec<T, 8> v;
  if (Width > 1 && count == 8) {
    #pragma unroll
    for (int j = 0; j < 8; j += Width) {
      const Vec<T, Width> part = load<Width>(from + j);
      #pragma unroll
      for (int i = 0; i < Width; ++i) v.at[j + i] = part.at[i];
    }
  } else {
    #pragma unroll
    for (int j = 0; j < 8; ++j) v.at[j] = j < count ? from[j] : T{};
  }
  return v;
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
decoder_layer_prefill_q(
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ norm_ptr,
    const __nv_bfloat16* __restrict__ wq_ptr,
    const __nv_bfloat16* __restrict__ wk_ptr,
    __nv_bfloat16* __restrict__ q_ptr,
    __nv_bfloat16* __restrict__ k_value_ptr,
    long long rows,
    long long x_stride,
    long long wq_ld,
    long long wk_ld,
    long long q_stride,
    long long k_value_stride)
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
  const int group = across < 16 ? 0 : 1;
  const int col0 = (across - (group == 0 ? 0 : 16)) * tile_cols;
  const __nv_bfloat16* const right_ptr = group == 0 ? wq_ptr : wk_ptr;
  const long long right_stride = group == 0 ? wq_ld : wk_ld;

  // the ring of 3 slices, and what the thread brings of each
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared);
  const int x_m = threadIdx.x / 8, x_k = threadIdx.x % 8 * 8;
  const __nv_bfloat16* x_from = x_ptr + (row0 + x_m) * x_stride + x_k;
  const int x_to = place<8>(x_m, x_k);
  const int right_n = threadIdx.x / 8, right_k = threadIdx.x % 8 * 8;
  // the column that lies in row right_n of the tile
  const int right_col = right_n / warp_cols * warp_cols + right_n % 8 * 8 + right_n % warp_cols / 8;
  const __nv_bfloat16* right_from = right_ptr + (col0 + right_col) * right_stride + right_k;
  const int right_to = right_at + place<8>(right_n, right_k);
  Vec<__nv_bfloat16, 8> norm_held;
  float sum_of_squares_part[4] = {};
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = ring_at + step % stages * slice_bytes;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + (x_to + v * at_once) * 2;
      copy_chunk<8>(to, x_from + v * 32 * x_stride, x_m + v * 32 < rows_here ? 8 : 0);
    }
    x_from += tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      const int away = v * 32 / warp_cols * warp_cols + v * 32 % warp_cols / 8;  // columns from the first
      const unsigned to = slice + (right_to + v * at_once) * 2;
      copy_chunk<8>(to, right_from + away * right_stride, 8);
    }
    right_from += tile_k;
  };
  const auto fetch_slice = [&](int step) {
    const int k_at = step * tile_k;
    norm_held = load_chunk<8>(norm_ptr + k_at + x_k, 8);
  };
  const auto prepare_slice = [&](int step) {
    __nv_bfloat16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      __nv_bfloat16* const at = slice + x_to + v * at_once;
      Vec<__nv_bfloat16, 8> x_vec = load<8>(at);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x = __bfloat162float(x_vec.at[j]);
        const float norm = __bfloat162float(norm_held.at[j]);
        const float x_times_norm = x * norm;
        const float square = x * x;
        x_vec.at[j] = __float2bfloat16_rn(x_times_norm);
        sum_of_squares_part[v] += square;
      }
      store<8>(at, x_vec);
    }
  };

  // 64 slices of 64: fragments are loaded one step ahead of their use, across slices too
  unsigned x_part[2][4][4];
  unsigned right_part[2][4][4];
  float right_sums[4][8][4] = {};
  const unsigned x_lane = ring_at + place<8>(warp_row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2;
  const unsigned right_lane = ring_at + right_at * 2 + place<8>(warp_col + lane % 16, lane / 16 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(x_part[buffer][i], (x_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(right_part[buffer][i], (right_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 8; ++m) {
      #pragma unroll
      for (int nth = 0; nth < 4; ++nth) {  // serpentine: what was multiplied last is at hand
        const int n = m % 2 ? 3 - nth : nth;
        multiply_add(right_sums[n][m], right_part[buffer][n], x_part[buffer][m / 2][m % 2 * 2],
            x_part[buffer][m / 2][m % 2 * 2 + 1]);
      }
    }
  };

  fetch_slice(0);
  #pragma unroll
  for (int s = 0; s < stages - 1; ++s) {
    copy_slice(s);
    commit_copies();
  }
  wait_copies<stages - 2>();
  prepare_slice(0);
  __syncthreads();
  load_parts(0, 0, 0);
  const auto take_slice = [&](int step, bool last) {
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k == 2 && !last) {
        wait_copies<stages - 2>();
        prepare_slice(step + 1);
      }
      if (k < 3) {
        load_parts(step, k + 1, (k + 1) % 2);
      } else if (!last) {
        __syncthreads();
        load_parts(step + 1, 0, 0);
      }
      if (k == 0 && !last) {
        fetch_slice(step + 1);
        if (step + stages - 1 < steps) copy_slice(step + stages - 1);
        commit_copies();
      }
      multiply(k % 2);
    }
  };
  #pragma unroll 1
  for (int step = 0; step < steps - 1; ++step) take_slice(step, false);
  take_slice(steps - 1, true);

  // sums along the rows of the left operand meet in shared memory
  __syncthreads();
  float* const sum_of_squares_shared = reinterpret_cast<float*>(shared);
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int step = 4; step > 0; step /= 2) sum_of_squares_part[v] += partner(sum_of_squares_part[v], step);
    if (x_k == 0) sum_of_squares_shared[x_m + v * 32] = sum_of_squares_part[v];
  }
  __syncthreads();

  if (group == 0) {
    const int n = warp_col + lane / 4 * 8;  // the first of the thread's columns
    const int col = col0 + n;
    #pragma unroll
    for (int v = 0; v < 16; ++v) {
      const int m = warp_row + v / 2 * 8 + lane % 4 * 2 + v % 2;
      const long long row = row0 + m;
      if (row < rows) {
        const float sum_of_squares = sum_of_squares_shared[m];
        const float mean = sum_of_squares / 4096.0f;
        const float mean_plus_eps = mean + 1e-06f;
        const float rrms = rsqrtf(mean_plus_eps);
        Vec<__nv_bfloat16, 8> q_vec;
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float matmul_wq = right_sums[j / 2][v / 2][j % 2 * 2 + v % 2];
          const float matmul_wq_times_rrms = matmul_wq * rrms;
          q_vec.at[j] = __float2bfloat16_rn(matmul_wq_times_rrms);
        }
        store<8>(q_ptr + row * q_stride + col, q_vec);
      }
    }
  }

  if (group == 1) {
    const int n = warp_col + lane / 4 * 8;  // the first of the thread's columns
    const int col = col0 + n;
    #pragma unroll
    for (int v = 0; v < 16; ++v) {
      const int m = warp_row + v / 2 * 8 + lane % 4 * 2 + v % 2;
      const long long row = row0 + m;
      if (row < rows) {
        const float sum_of_squares = sum_of_squares_shared[m];
        const float mean = sum_of_squares / 4096.0f;
        const float mean_plus_eps = mean + 1e-06f;
        const float rrms = rsqrtf(mean_plus_eps);
        Vec<__nv_bfloat16, 8> k_value_vec;
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float matmul_wk = right_sums[j / 2][v / 2][j % 2 * 2 + v % 2];
          const float matmul_wk_times_rrms = matmul_wk * rrms;
          k_value_vec.at[j] = __float2bfloat16_rn(matmul_wk_times_rrms);
        }
        store<8>(k_value_ptr + row * k_value_stride + col, k_value_vec);
      }
    }
  }
}
