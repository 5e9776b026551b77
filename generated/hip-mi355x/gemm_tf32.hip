// gemm_tf32  f32[M, K], f32[N, K], f32[N] -> f32[M, N]  at M=4096 K=4096 N=4096
// gelu(x @ w.T + bias), of each factor 11 significant bits at least, summed in f32.
//
//     def gemm_tf32(x, w, bias):
//         return F.gelu(F.matmul(x, w.T, precision="tf32") + bias)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 157 TFLOP/s for products
// tile     64 x 128 tiles of 4 warps, slices of 16 in a ring of 2
// traffic  671.1 MB moved, 201.3 MB ideal, 335.6 MB with products apart, 469.8 MB unfused in 3 launches
// floor    873.7 us at 157 TFLOP/s for products; compute-bound at 204.80 flop/B
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
  return __builtin_amdgcn_exp2f(x);
}

// 1 / x, within 1 ulp; above 2^126 it is 0
__device__ __forceinline__ float reciprocal(float x) {
  return __builtin_amdgcn_rcpf(x);
}

// x (1 + tanh u) / 2 as x / (1 + e^-2u), with -2u log2 e in one polynomial: u = sqrt(2 / pi) (x + 0.044715 x^3)
__device__ __forceinline__ float gelu_by_tanh(float x) {
  return x * reciprocal(1.0f + power_of_2(x * (-2.30220819f - 0.102943240f * x * x)));
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 64, tile_cols = 128, tile_k = 16, stages = 2;
constexpr int steps = 256;
constexpr int warp_rows = 32, warp_cols = 64;  // of a tile
constexpr int threads = 256;
constexpr int tiles_across = 32;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
constexpr int dies = 8;  // each with an L2 cache of its own
// elements from the start of a slice to the right factor, and to its end
constexpr int w_at = tile_rows * tile_k;
constexpr int slice_elements = w_at + tile_cols * tile_k;
constexpr int at_once = 256 * 4;  // elements that the threads copy at once
constexpr int band_rows = 32;
// floats from a row of sums to the next: what a warp writes at once lies in different banks
constexpr int sums_stride = tile_cols + 4;

// where element (row, k) lies in a tile with rows of Chunks x 4 elements: XOR-swizzled by the row's number, so that
// what lanes read of 64 banks at once lies in different ones, and what 8 of them write
template <int Chunks>
__device__ __forceinline__ int place(int row, int k) {
  row ^= row / 8 % 2;
  const int xor_mask = row / 2 % 4 ^ row / 16 % 2;
  return (row * Chunks + (k / 4 ^ xor_mask)) * 4 + k % 4;
}

// the tile of a block: blocks go to the dies in turn, and those of one die have neighbouring tiles
__device__ __forceinline__ unsigned by_die(unsigned block, unsigned blocks) {
  const unsigned die = block % dies, longer = blocks % dies;
  return die * (blocks / dies) + (die < longer ? die : longer) + block / dies;
}

// 4 elements, Width with each load; those from `count` on are zeros
template <int Width, typename T>
__device__ __forceinline__ Vec<T, 4> load_chunk(const T* from, int count) {
  Vec<T, 4> v;
  if (Width > 1 && count == 4) {
    #pragma unroll
    for (int j = 0; j < 4; j += Width) {
      const Vec<T, Width> part = load<Width>(from + j);
      #pragma unroll
      for (int i = 0; i < Width; ++i) v.at[j + i] = part.at[i];
    }
  } else {
    #pragma unroll
    for (int j = 0; j < 4; ++j) v.at[j] = j < count ? from[j] : T{};
  }
  return v;
}

typedef float Sums __attribute__((ext_vector_type(16)));

// a lane's 4 elements of what one fragment multiplies: neighbours in k, the same for both operands
struct alignas(16) Fragment {
  float part[4];
};

// row `mn` + lane % 32 of a tile, from k on
template <int Chunks, typename T>
__device__ __forceinline__ void load_fragment(Fragment& to, const T* tile, int mn, int k) {
  const int lane = threadIdx.x % 64;
  to = *reinterpret_cast<const Fragment*>(tile + place<Chunks>(mn + lane % 32, k + lane / 32 * 4));
}

// sums += right^T left^T, 32 columns by 32 rows
__device__ __forceinline__ void multiply_add(Sums& sums, const Fragment& right, const Fragment& left) {
  sums = __builtin_amdgcn_mfma_f32_32x32x2f32(right.part[0], left.part[0], sums, 0, 0, 0);
  sums = __builtin_amdgcn_mfma_f32_32x32x2f32(right.part[1], left.part[1], sums, 0, 0, 0);
  sums = __builtin_amdgcn_mfma_f32_32x32x2f32(right.part[2], left.part[2], sums, 0, 0, 0);
  sums = __builtin_amdgcn_mfma_f32_32x32x2f32(right.part[3], left.part[3], sums, 0, 0, 0);
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
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int warp = threadIdx.x / 64;
  const int warp_row = warp / 2 * warp_rows;  // the warp's first of the tile
  const int warp_col = warp % 2 * warp_cols;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const unsigned tile = by_die(blockIdx.x, gridDim.x);
  // 8 rows of tiles at a time, column by column: blocks that run together share factors in the L2 cache
  const unsigned first = tile / group_tiles * group;
  const unsigned height = tiles_down - first < group ? tiles_down - first : group;
  const long long row0 = static_cast<long long>(first + tile % group_tiles % height) * tile_rows;
  const int across = tile % group_tiles / height;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  const int col0 = across * tile_cols;

  // the ring of 2 slices, and what the thread brings of each
  float* const ring = reinterpret_cast<float*>(shared);
  const int x_m = threadIdx.x / 4, x_k = threadIdx.x % 4 * 4;
  const float* x_from = x_ptr + (row0 + x_m) * x_stride + x_k;
  const int x_to = place<4>(x_m, x_k);
  const int w_n = threadIdx.x / 4, w_k = threadIdx.x % 4 * 4;
  const float* w_from = w_ptr + (col0 + w_n) * w_ld + w_k;
  const int w_to = w_at + place<4>(w_n, w_k);
  Vec<float, 4> x_held[1];
  Vec<float, 4> w_held[2];
  const auto fetch_slice = [&]() {
    x_held[0] = load_chunk<4>(x_from, x_m < rows_here ? 4 : 0);
    x_from += tile_k;
    #pragma unroll
    for (int v = 0; v < 2; ++v) w_held[v] = load_chunk<4>(w_from + v * 64 * w_ld, 4);
    w_from += tile_k;
  };
  const auto prepare_slice = [&](int step) {
    float* const slice = ring + step % stages * slice_elements;
    store<4>(slice + x_to, x_held[0]);
    #pragma unroll
    for (int v = 0; v < 2; ++v) store<4>(slice + w_to + v * at_once, w_held[v]);
  };

  // 256 slices of 16: fragments are loaded one step ahead of their use, across slices too
  Fragment x_part[2][1];
  Fragment w_part[2][2];
  Sums matmul_tf32_sums[2][1] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const float* const slice = ring + step % stages * slice_elements;
    load_fragment<4>(x_part[buffer][0], slice, warp_row, k * 8);
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_fragment<4>(w_part[buffer][i], slice + w_at + i * (32 * tile_k), warp_col, k * 8);
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int n = 0; n < 2; ++n) multiply_add(matmul_tf32_sums[n][0], w_part[buffer][n], x_part[buffer][0]);
  };

  fetch_slice();
  prepare_slice(0);
  fetch_slice();
  __syncthreads();
  load_parts(0, 0, 0);
  const auto take_slice = [&](int step, bool last) {
    #pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (k == 1 && !last) {
        prepare_slice(step + 1);
        if (step + 2 < steps) fetch_slice();
      }
      if (k < 1) {
        load_parts(step, k + 1, (k + 1) % 2);
      } else if (!last) {
        __syncthreads();
        load_parts(step + 1, 0, 0);
      }
      multiply(k % 2);
    }
  };
  #pragma unroll 1
  for (int step = 0; step < steps - 1; ++step) take_slice(step, false);
  take_slice(steps - 1, true);

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  __syncthreads();
  float* const matmul_tf32_shared = reinterpret_cast<float*>(shared);
  for (int band = 0; band < 2; ++band) {  // of 32 rows: no more fit into the place of the slices
    if (band > 0) __syncthreads();
    if (warp_row / band_rows == band) {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        #pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int sum_row = warp_row % band_rows + lane % 32;
          const int sum_col = warp_col + n * 32 + i / 4 * 8 + lane / 32 * 4 + i % 4;
          matmul_tf32_shared[sum_row * sums_stride + sum_col] = matmul_tf32_sums[n][0][i];
        }
      }
    }
    __syncthreads();

    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int m = static_cast<int>((v * threads + threadIdx.x) / (tile_cols / 4));
      const int n = static_cast<int>((v * threads + threadIdx.x) % (tile_cols / 4)) * 4;
      const long long row = row0 + band * band_rows + m;
      const int col = col0 + n;
      if (row < rows) {
        const Vec<float, 4> matmul_tf32_total = load<4>(matmul_tf32_shared + m * sums_stride + n);
        const Vec<float, 4> bias_vec = load<4>(bias_ptr + col);
        Vec<float, 4> out_vec;
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float matmul_tf32 = matmul_tf32_total.at[j];
          const float bias = bias_vec.at[j];
          const float add = matmul_tf32 + bias;
          const float gelu = gelu_by_tanh(add);
          out_vec.at[j] = gelu;
        }
        store<4>(out_ptr + row * out_stride + col, out_vec);
      }
    }
  }
}
