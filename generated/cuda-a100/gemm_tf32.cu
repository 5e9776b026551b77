// gemm_tf32  f32[M, K], f32[N, K], f32[N] -> f32[M, N]  at M=4096 K=4096 N=4096
// gelu(x @ w.T + bias), of each factor 11 significant bits at least, summed in f32.
//
//     def gemm_tf32(x, w, bias):
//         return F.gelu(F.matmul(x, w.T, precision="tf32") + bias)
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 156 TFLOP/s for products
// tile     128 x 256 tiles of 8 warps, slices of 32 in a ring of 3
// traffic  402.7 MB moved, 201.3 MB ideal, 335.6 MB with products apart, 469.8 MB unfused in 3 launches
// floor    881.0 us at 156 TFLOP/s for products; compute-bound at 341.32 flop/B
// rounding factors to the nearest tf32, 11 significant bits; f32 between
// needs    K=4096, N=4096; rows of all operands next to each other; x, w, bias, out: address and
//          strides in multiples of 16 B; bias [N] shared by every row

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

// x (1 + tanh u) / 2 as x / (1 + e^-2u), with -2u log2 e in one polynomial: u = sqrt(2 / pi) (x + 0.044715 x^3)
__device__ __forceinline__ float gelu_by_tanh(float x) {
  return x * reciprocal(1.0f + power_of_2(x * (-2.30220819f - 0.102943240f * x * x)));
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 128, tile_cols = 256, tile_k = 32, stages = 3;
constexpr int steps = 128;
constexpr int warp_rows = 64, warp_cols = 64;  // of a tile
constexpr int tiles_across = 16;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
// elements from the start of a slice to the right factor, and to its end
constexpr int w_at = tile_rows * tile_k;
constexpr int slice_elements = w_at + tile_cols * tile_k;
constexpr int slice_bytes = 4 * slice_elements;
constexpr int at_once = 256 * 4;  // elements that the threads copy at once

// where element (row, k) lies in a tile with rows of Chunks x 4 elements: XOR-swizzled by the row's number, so that
// 8 rows of one column of chunks lie in different banks
template <int Chunks>
__device__ __forceinline__ int place(int row, int k) {
  constexpr int period = Chunks < 8 ? Chunks : 8;
  const int xor_mask = row / (8 / period) % period;
  return (row * Chunks + (k / 4 ^ xor_mask)) * 4 + k % 4;
}

// 4 elements on their way from global to shared memory, Width with each copy; those from `count` on are zeros
template <int Width, typename T>
__device__ __forceinline__ void copy_chunk(unsigned to, const T* from, int count) {
  if constexpr (Width == 4) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(to), "l"(from), "r"(count * 4) : "memory");
  } else {
    #pragma unroll
    for (int j = 0; j < 4; j += Width) {
      const int left = count < j ? 0 : count - j < Width ? count - j : Width;
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
          :: "r"(to + j * 4), "l"(from + j), "n"(Width * 4), "r"(left * 4) : "memory");
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

// the tf32 next to an f32: the tensor cores would cut 13 bits off
__device__ __forceinline__ unsigned to_tf32(unsigned bits) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(bits)));
  return y;
}

// four matrices of 8 x 16 bytes, from the rows whose places the lanes give, rounded to tf32
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
  #pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = to_tf32(to[i]);
}

// sums += right^T left^T, 16 columns by 8 rows
__device__ __forceinline__ void multiply_add(
    float (&sums)[4], const unsigned (&right)[4], unsigned left_0, unsigned left_1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(right[0]), "r"(right[1]), "r"(right[2]), "r"(right[3]), "r"(left_0), "r"(left_1));
}

extern "C" __global__ void __launch_bounds__(256)
gemm_tf32(
    const float* __restrict__ x_ptr,
    const float* __restrict__ w_ptr,
    const float* __restrict__ bias_ptr,
    float* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long w_ld,
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
  float* const ring = reinterpret_cast<float*>(shared);
  const int x_m = threadIdx.x / 8, x_k = threadIdx.x % 8 * 4;
  const float* x_from = x_ptr + (row0 + x_m) * x_stride + x_k;
  unsigned x_to = (place<8>(x_m, x_k)) * 4;
  asm volatile("" : "+r"(x_to));  // stays in a register: the compiler would make it anew for each copy
  const int w_n = threadIdx.x / 8, w_k = threadIdx.x % 8 * 4;
  // the column that lies in row w_n of the tile
  const int w_col = w_n / warp_cols * warp_cols + w_n % 8 * 8 + w_n % warp_cols / 8;
  const float* w_from = w_ptr + (col0 + w_col) * w_ld + w_k;
  unsigned w_to = (w_at + place<8>(w_n, w_k)) * 4;
  asm volatile("" : "+r"(w_to));  // stays in a register: the compiler would make it anew for each copy
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = ring_at + step % stages * slice_bytes;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + x_to + v * (at_once * 4);
      copy_chunk<4>(to, x_from + v * 32 * x_stride, x_m + v * 32 < rows_here ? 4 : 0);
    }
    x_from += tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      const int away = v * 32 / warp_cols * warp_cols + v * 32 % warp_cols / 8;  // columns from the first
      const unsigned to = slice + w_to + v * (at_once * 4);
      copy_chunk<4>(to, w_from + away * w_ld, 4);
    }
    w_from += tile_k;
  };

  // 128 slices of 32: fragments are loaded one step ahead of their use, across slices too
  unsigned x_part[2][4][4];
  unsigned w_part[2][4][4];
  float matmul_tf32_sums[4][8][4] = {};
  const unsigned x_lane = ring_at + place<8>(warp_row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 4) * 4;
  const unsigned w_lane = ring_at + w_at * 4 + place<8>(warp_col + lane % 16, lane / 16 * 4) * 4;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(x_part[buffer][i], (x_lane ^ (k * 32)) + slice + i * (16 * tile_k * 4));
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(w_part[buffer][i], (w_lane ^ (k * 32)) + slice + i * (16 * tile_k * 4));
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 8; ++m) {
      #pragma unroll
      for (int nth = 0; nth < 4; ++nth) {  // serpentine: what was multiplied last is at hand
        const int n = m % 2 ? 3 - nth : nth;
        multiply_add(matmul_tf32_sums[n][m], w_part[buffer][n], x_part[buffer][m / 2][m % 2 * 2],
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

  #pragma unroll
  for (int v = 0; v < 32; ++v) {
    const int m = warp_row + v / 4 * 8 + lane % 4 * 2 + v / 2 % 2;
    const int n = warp_col + lane / 4 * 8 + v % 2 * 4;
    const long long row = row0 + m;
    const int col = col0 + n;
    if (row < rows) {
      const Vec<float, 4> bias_vec = load<4>(bias_ptr + col);
      Vec<float, 4> out_vec;
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float matmul_tf32 = matmul_tf32_sums[(v % 2 * 4 + j) / 2][v / 4][(v % 2 * 4 + j) % 2 * 2 + v / 2 % 2];
        const float bias = bias_vec.at[j];
        const float add = matmul_tf32 + bias;
        const float gelu = gelu_by_tanh(add);
        out_vec.at[j] = gelu;
      }
      store<4>(out_ptr + row * out_stride + col, out_vec);
    }
  }
}
