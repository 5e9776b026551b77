// moe_layer_matmul_parts  bf16[4, T, D_over_4], bf16[4, E, D_over_4] -> f32[4, T, E]  at T=256 D_over_4=512 E=64
// matmul_parts of moe_layer_matmul.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// views    x_part is x as [4, T, D // 4]; router_part is router as [4, E, D // 4]
// tile     64 x 128 tiles of 4 warps, slices of 32 in a ring of 2
// traffic  1.6 MB moved, 1.6 MB ideal, 1.6 MB with products apart, 1.6 MB unfused in 1 launch
// floor    0.2 us at 8 TB/s; memory-bound at 42.67 flop/B
// needs    D_over_4=512, E=64; rows of all operands next to each other; x_part, router_part,
//          matmul_parts: address and strides in multiples of 16 B

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
constexpr int tile_rows = 64, tile_cols = 128, tile_k = 32, stages = 2;
constexpr int steps = 16;
constexpr int warp_rows = 32, warp_cols = 64;  // of a tile
constexpr int threads = 256;
constexpr int cols = 64;
// elements from the start of a slice to the right factor, and to its end
constexpr int router_part_at = tile_rows * tile_k;
constexpr int slice_elements = router_part_at + tile_cols * tile_k;
constexpr int at_once = 256 * 8;  // elements that the threads copy at once
constexpr int band_rows = 32;
// floats from a row of sums to the next: what a warp writes at once lies in different banks
constexpr int sums_stride = tile_cols + 4;

// where element (row, k) lies in a tile with rows of Chunks x 8 elements: XOR-swizzled by the row's number, so that
// what lanes read of 64 banks at once lies in different ones, and what 8 of them write
template <int Chunks>
__device__ __forceinline__ int place(int row, int k) {
  row ^= row / 8 % 2;
  const int xor_mask = row / 2 % 4 ^ row / 16 % 2;
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

typedef __bf16 Half __attribute__((ext_vector_type(8)));
typedef float Sums __attribute__((ext_vector_type(16)));

// a lane's 8 elements of what one fragment multiplies: neighbours in k, the same for both operands
struct alignas(16) Fragment {
  Half part[1];
};

// row `mn` + lane % 32 of a tile, from k on
template <int Chunks, typename T>
__device__ __forceinline__ void load_fragment(Fragment& to, const T* tile, int mn, int k) {
  const int lane = threadIdx.x % 64;
  to = *reinterpret_cast<const Fragment*>(tile + place<Chunks>(mn + lane % 32, k + lane / 32 * 8));
}

// sums += right^T left^T, 32 columns by 32 rows
__device__ __forceinline__ void multiply_add(Sums& sums, const Fragment& right, const Fragment& left) {
  sums = __builtin_amdgcn_mfma_f32_32x32x16_bf16(right.part[0], left.part[0], sums, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(256)
moe_layer_matmul_parts(
    const __bf16* __restrict__ x_part_ptr,
    const __bf16* __restrict__ router_part_ptr,
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
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int warp = threadIdx.x / 64;
  const int warp_row = warp / 2 * warp_rows;  // the warp's first of the tile
  const int warp_col = warp % 2 * warp_cols;
  const long long rows = T_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const long long axis0_at = (blockIdx.x) / tiles_down;
  const unsigned tile = (blockIdx.x) % tiles_down;
  const long long row0 = static_cast<long long>(tile) * tile_rows;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  constexpr int col0 = 0;

  // the ring of 2 slices, and what the thread brings of each
  __bf16* const ring = reinterpret_cast<__bf16*>(shared);
  const int x_part_m = threadIdx.x / 4, x_part_k = threadIdx.x % 4 * 8;
  const __bf16* x_part_from = x_part_ptr + axis0_at * x_part_stride_axis0 + (row0 + x_part_m) * x_part_stride_T + x_part_k;
  const int x_part_to = place<4>(x_part_m, x_part_k);
  const int router_part_n = threadIdx.x / 4, router_part_k = threadIdx.x % 4 * 8;
  const __bf16* router_part_from = router_part_ptr + axis0_at * router_part_stride_axis0 + (col0 + router_part_n) * router_part_ld
      + router_part_k;
  const int router_part_to = router_part_at + place<4>(router_part_n, router_part_k);
  Vec<__bf16, 8> x_part_held[1];
  Vec<__bf16, 8> router_part_held[2];
  const auto fetch_slice = [&]() {
    x_part_held[0] = load_chunk<8>(x_part_from, x_part_m < rows_here ? 8 : 0);
    x_part_from += tile_k;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      router_part_held[v] = load_chunk<8>(router_part_from + v * 64 * router_part_ld, col0 + router_part_n + v * 64 < cols ? 8 : 0);
    }
    router_part_from += tile_k;
  };
  const auto prepare_slice = [&](int step) {
    __bf16* const slice = ring + step % stages * slice_elements;
    store<8>(slice + x_part_to, x_part_held[0]);
    #pragma unroll
    for (int v = 0; v < 2; ++v) store<8>(slice + router_part_to + v * at_once, router_part_held[v]);
  };

  // 16 slices of 32: fragments are loaded one step ahead of their use, across slices too
  Fragment x_part_part[2][1];
  Fragment router_part_part[2][2];
  Sums matmul_sums[2][1] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const __bf16* const slice = ring + step % stages * slice_elements;
    load_fragment<4>(x_part_part[buffer][0], slice, warp_row, k * 16);
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_fragment<4>(router_part_part[buffer][i], slice + router_part_at + i * (32 * tile_k), warp_col, k * 16);
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      multiply_add(matmul_sums[n][0], router_part_part[buffer][n], x_part_part[buffer][0]);
    }
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
  float* const matmul_shared = reinterpret_cast<float*>(shared);
  for (int band = 0; band < 2; ++band) {  // of 32 rows: no more fit into the place of the slices
    if (band > 0) __syncthreads();
    if (warp_row / band_rows == band) {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        #pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int sum_row = warp_row % band_rows + lane % 32;
          const int sum_col = warp_col + n * 32 + i / 4 * 8 + lane / 32 * 4 + i % 4;
          matmul_shared[sum_row * sums_stride + sum_col] = matmul_sums[n][0][i];
        }
      }
    }
    __syncthreads();

    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int m = static_cast<int>((v * threads + threadIdx.x) / (tile_cols / 8));
      const int n = static_cast<int>((v * threads + threadIdx.x) % (tile_cols / 8)) * 8;
      const long long row = row0 + band * band_rows + m;
      const int col = col0 + n;
      if (row < rows && col < cols) {
        const Vec<float, 8> matmul_total = load<8>(matmul_shared + m * sums_stride + n);
        Vec<float, 8> matmul_parts_vec;
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float matmul = matmul_total.at[j];
          matmul_parts_vec.at[j] = matmul;
        }
        store<8>(matmul_parts_ptr + axis0_at * matmul_parts_stride_axis0 + row * matmul_parts_stride_T + col, matmul_parts_vec);
      }
    }
  }
}
