// lightning_indexer  bf16[H_times_S, D], bf16[T, D], f32[H_times_S] -> f32[T, S]  at H_times_S=262144 D=128 T=4096 S=4096
// Sums over heads of relu(q k) * w, as DeepSeek-V3.2 has them; F.topk of a row are the keys.
//
//     def lightning_indexer(q, k, w):
//         return F.sum(F.relu(q @ k.T) * w[:, :, None], axis=1, keepdims=False)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// views    q_part is q as [H * S, D]; w_part is w as [H * S]
// tile     128 x 64 tiles of 4 warps, slices of 32 in a ring of 2
// traffic  337.6 MB moved, 136.3 MB ideal, 4431.3 MB with products apart, 17316.2 MB unfused in 4
//          launches
// floor    109.2 us at 2517 TFLOP/s for products; compute-bound at 814.11 flop/B
// needs    H_times_S=262144, D=128, S=4096; rows of all operands next to each other; k_value, q_part,
//          w_part: address and strides in multiples of 16 B; w_part [H_times_S] shared by every row

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
  return __builtin_elementwise_maximum(a, b);
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 128, tile_cols = 64, tile_k = 32, stages = 2;
constexpr int steps = 4;
constexpr int warp_rows = 64, warp_cols = 32;  // of a tile
constexpr int threads = 256;
constexpr int tiles_across = 4096;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
constexpr int dies = 8;  // each with an L2 cache of its own
// elements from the start of a slice to the right factor, and to its end
constexpr int q_part_at = tile_rows * tile_k;
constexpr int slice_elements = q_part_at + tile_cols * tile_k;
constexpr int at_once = 256 * 8;  // elements that the threads copy at once
constexpr int band_rows = 64;
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

// the tile of a block: blocks go to the dies in turn, and those of one die have neighbouring tiles
__device__ __forceinline__ unsigned by_die(unsigned block, unsigned blocks) {
  const unsigned die = block % dies, longer = blocks % dies;
  return die * (blocks / dies) + (die < longer ? die : longer) + block / dies;
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

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  const int word = __builtin_bit_cast(int, v);
  int other = 0;
  if (step == 1) other = __builtin_amdgcn_update_dpp(0, word, 0xb1, 0xf, 0xf, true);  // quad_perm:[1,0,3,2]
  if (step == 2) other = __builtin_amdgcn_update_dpp(0, word, 0x4e, 0xf, 0xf, true);  // quad_perm:[2,3,0,1]
  if (step == 4) {
    const int mirrored = __builtin_amdgcn_update_dpp(0, word, 0x141, 0xf, 0xf, true);  // of 8 lanes,
    other = __builtin_amdgcn_update_dpp(0, mirrored, 0x1b, 0xf, 0xf, true);  // and then of each 4
  }
  if (step == 8) other = __builtin_amdgcn_update_dpp(0, word, 0x128, 0xf, 0xf, true);  // row_ror:8
  if (step == 16) other = __builtin_amdgcn_ds_swizzle(word, 0x401f);  // swizzle(SWAP,16)
  if (step == 32) other = __shfl_xor(word, 32);
  return __builtin_bit_cast(decltype(v), other);
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
lightning_indexer(
    const __bf16* __restrict__ q_part_ptr,
    const __bf16* __restrict__ k_value_ptr,
    const float* __restrict__ w_part_ptr,
    float* __restrict__ out_ptr,
    long long rows,
    long long k_value_stride,
    long long q_part_ld,
    long long out_stride,
    long long out_stride_elements)
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
  __bf16* const ring = reinterpret_cast<__bf16*>(shared);
  const int k_value_m = threadIdx.x / 4, k_value_k = threadIdx.x % 4 * 8;
  const __bf16* k_value_from = k_value_ptr + (row0 + k_value_m) * k_value_stride + k_value_k;
  const int k_value_to = place<4>(k_value_m, k_value_k);
  const int q_part_n = threadIdx.x / 4, q_part_k = threadIdx.x % 4 * 8;
  const __bf16* q_part_from = q_part_ptr + (col0 + q_part_n) * q_part_ld + q_part_k;
  const int q_part_to = q_part_at + place<4>(q_part_n, q_part_k);
  Vec<__bf16, 8> k_value_held[2];
  Vec<__bf16, 8> q_part_held[1];
  const auto fetch_slice = [&]() {
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      k_value_held[v] = load_chunk<8>(k_value_from + v * 64 * k_value_stride, k_value_m + v * 64 < rows_here ? 8 : 0);
    }
    k_value_from += tile_k;
    q_part_held[0] = load_chunk<8>(q_part_from, 8);
    q_part_from += tile_k;
  };
  const auto prepare_slice = [&](int step) {
    __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 2; ++v) store<8>(slice + k_value_to + v * at_once, k_value_held[v]);
    store<8>(slice + q_part_to, q_part_held[0]);
  };

  // 4 slices of 32: fragments are loaded one step ahead of their use, across slices too
  Fragment k_value_part[2][2];
  Fragment q_part_part[2][1];
  Sums matmul_sums[1][2] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_fragment<4>(k_value_part[buffer][i], slice + i * (32 * tile_k), warp_row, k * 16);
    }
    load_fragment<4>(q_part_part[buffer][0], slice + q_part_at, warp_col, k * 16);
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 2; ++m) multiply_add(matmul_sums[0][m], q_part_part[buffer][0], k_value_part[buffer][m]);
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
  for (int band = 0; band < 2; ++band) {  // of 64 rows: no more fit into the place of the slices
    if (band > 0) __syncthreads();
    #pragma unroll
    for (int m = 0; m < 2; ++m) {
      if ((warp_row + m * 32) / band_rows == band) {
        #pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int sum_row = (warp_row + m * 32) % band_rows + lane % 32;
          const int sum_col = warp_col + i / 4 * 8 + lane / 32 * 4 + i % 4;
          matmul_shared[sum_row * sums_stride + sum_col] = matmul_sums[0][m][i];
        }
      }
    }
    __syncthreads();

    for (int m = threadIdx.x / 8; m < band_rows; m += threads / 8) {
      const long long row = row0 + band * band_rows + m;
      float sum_of_products_part[1];
      sum_of_products_part[0] = 0.0f;
      if (row < rows) {
        for (int n = threadIdx.x % 8; n < tile_cols; n += 8) {
          const int col = col0 + n;
          const float matmul = matmul_shared[m * sums_stride + n];
          const float w_part = *(w_part_ptr + col);
          const float relu = larger(matmul, 0.0f);
          const float mul = relu * w_part;
          sum_of_products_part[0] += mul;
        }
      }
      // 8 lanes have a row
      float sum_of_products = sum_of_products_part[0];
      #pragma unroll
      for (int step = 4; step >= 1; step /= 2) {
        sum_of_products += partner(sum_of_products, step);
      }
      if (threadIdx.x % 8 == 0 && row < rows) {
        *(out_ptr + row * out_stride + (col0 / tile_cols) * out_stride_elements) = sum_of_products;
      }
    }
  }
}
