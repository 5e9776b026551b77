// decoder_layer_prefill_q  bf16[S, D], bf16[D], bf16[E_times_G_times_H, D], bf16[E_times_H, D], bf16[E_times_H, D] -> bf16[S,
//   E_times_G_times_H], bf16[S, E_times_H], bf16[S, E_times_H]  at S=4096 D=4096 E_times_G_times_H=4096 E_times_H=1024
// q, k_value, v_value of decoder_layer_prefill.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// tile     128 x 128 tiles of 4 warps, slices of 32 in a ring of 2
// traffic  285.2 MB moved, 134.2 MB ideal, 268.4 MB with products apart, 402.7 MB unfused in 7 launches
// floor    81.9 us at 2517 TFLOP/s for products; compute-bound at 722.80 flop/B
// rounding x * norm to bf16 before it is multiplied, and only then scaled by rrms; q to bf16 when
//          stored; k_value to bf16 when stored; v_value to bf16 when stored; f32 between
// needs    D=4096, E_times_G_times_H=4096, E_times_H=1024; rows of all operands next to each other; x,
//          norm, wq, wk, wv, q, k_value, v_value: address and strides in multiples of 16 B; norm [D]
//          shared by every row

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
constexpr int tile_rows = 128, tile_cols = 128, tile_k = 32, stages = 2;
constexpr int steps = 128;
constexpr int warp_rows = 64, warp_cols = 64;  // of a tile
constexpr int threads = 256;
constexpr int tiles_across = 48;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
constexpr int dies = 8;  // each with an L2 cache of its own
// elements from the start of a slice to the right factor, and to its end
constexpr int right_at = tile_rows * tile_k;
constexpr int slice_elements = right_at + tile_cols * tile_k;
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
decoder_layer_prefill_q(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ norm_ptr,
    const __bf16* __restrict__ wq_ptr,
    const __bf16* __restrict__ wk_ptr,
    const __bf16* __restrict__ wv_ptr,
    __bf16* __restrict__ q_ptr,
    __bf16* __restrict__ k_value_ptr,
    __bf16* __restrict__ v_value_ptr,
    long long rows,
    long long x_stride,
    long long wq_ld,
    long long wk_ld,
    long long wv_ld,
    long long q_stride,
    long long k_value_stride,
    long long v_value_stride)
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
  const int group = across < 32 ? 0 : across < 40 ? 1 : 2;
  const int col0 = (across - (group == 0 ? 0 : group == 1 ? 32 : 40)) * tile_cols;
  const __bf16* const right_ptr = group == 0 ? wq_ptr : group == 1 ? wk_ptr : wv_ptr;
  const long long right_stride = group == 0 ? wq_ld : group == 1 ? wk_ld : wv_ld;

  // the ring of 2 slices, and what the thread brings of each
  __bf16* const ring = reinterpret_cast<__bf16*>(shared);
  const int x_m = threadIdx.x / 4, x_k = threadIdx.x % 4 * 8;
  const __bf16* x_from = x_ptr + (row0 + x_m) * x_stride + x_k;
  const int x_to = place<4>(x_m, x_k);
  const int right_n = threadIdx.x / 4, right_k = threadIdx.x % 4 * 8;
  const __bf16* right_from = right_ptr + (col0 + right_n) * right_stride + right_k;
  const int right_to = right_at + place<4>(right_n, right_k);
  Vec<__bf16, 8> x_held[2];
  Vec<__bf16, 8> right_held[2];
  Vec<__bf16, 8> norm_held;
  float sum_of_squares_part[2] = {};
  const auto fetch_slice = [&](int step) {
    const int k_at = step * tile_k;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      x_held[v] = load_chunk<8>(x_from + v * 64 * x_stride, x_m + v * 64 < rows_here ? 8 : 0);
    }
    x_from += tile_k;
    #pragma unroll
    for (int v = 0; v < 2; ++v) right_held[v] = load_chunk<8>(right_from + v * 64 * right_stride, 8);
    right_from += tile_k;
    norm_held = load_chunk<8>(norm_ptr + k_at + x_k, 8);
  };
  const auto prepare_slice = [&](int step) {
    __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      Vec<__bf16, 8> x_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x = static_cast<float>(x_held[v].at[j]);
        const float norm = static_cast<float>(norm_held.at[j]);
        const float x_times_norm = x * norm;
        const float square = x * x;
        x_vec.at[j] = static_cast<__bf16>(x_times_norm);
        sum_of_squares_part[v] += square;
      }
      store<8>(slice + x_to + v * at_once, x_vec);
    }
    #pragma unroll
    for (int v = 0; v < 2; ++v) store<8>(slice + right_to + v * at_once, right_held[v]);
  };

  // 128 slices of 32: fragments are loaded one step ahead of their use, across slices too
  Fragment x_part[2][2];
  Fragment right_part[2][2];
  Sums right_sums[2][2] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int i = 0; i < 2; ++i) load_fragment<4>(x_part[buffer][i], slice + i * (32 * tile_k), warp_row, k * 16);
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_fragment<4>(right_part[buffer][i], slice + right_at + i * (32 * tile_k), warp_col, k * 16);
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int m = 0; m < 2; ++m) multiply_add(right_sums[n][m], right_part[buffer][n], x_part[buffer][m]);
    }
  };

  fetch_slice(0);
  prepare_slice(0);
  fetch_slice(1);
  __syncthreads();
  load_parts(0, 0, 0);
  const auto take_slice = [&](int step, bool last) {
    #pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (k == 1 && !last) {
        prepare_slice(step + 1);
        if (step + 2 < steps) fetch_slice(step + 2);
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
  float* const right_shared = reinterpret_cast<float*>(shared);
  float* const sum_of_squares_shared = reinterpret_cast<float*>(shared) + 1 * band_rows * sums_stride;
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    #pragma unroll
    for (int step = 2; step > 0; step /= 2) sum_of_squares_part[v] += partner(sum_of_squares_part[v], step);
    if (x_k == 0) sum_of_squares_shared[x_m + v * 64] = sum_of_squares_part[v];
  }
  for (int band = 0; band < 4; ++band) {  // of 32 rows: no more fit into the place of the slices
    if (band > 0) __syncthreads();
    #pragma unroll
    for (int m = 0; m < 2; ++m) {
      if ((warp_row + m * 32) / band_rows == band) {
        #pragma unroll
        for (int n = 0; n < 2; ++n) {
          #pragma unroll
          for (int i = 0; i < 16; ++i) {
            const int sum_row = (warp_row + m * 32) % band_rows + lane % 32;
            const int sum_col = warp_col + n * 32 + i / 4 * 8 + lane / 32 * 4 + i % 4;
            right_shared[sum_row * sums_stride + sum_col] = right_sums[n][m][i];
          }
        }
      }
    }
    __syncthreads();

    if (group == 0) {
      #pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int m = static_cast<int>((v * threads + threadIdx.x) / (tile_cols / 8));
        const int n = static_cast<int>((v * threads + threadIdx.x) % (tile_cols / 8)) * 8;
        const long long row = row0 + band * band_rows + m;
        const int col = col0 + n;
        if (row < rows) {
          const Vec<float, 8> matmul_wq_total = load<8>(right_shared + m * sums_stride + n);
          const float sum_of_squares = sum_of_squares_shared[band * band_rows + m];
          const float mean = sum_of_squares / 4096.0f;
          const float mean_plus_eps = mean + 1e-06f;
          const float rrms = rsqrtf(mean_plus_eps);
          Vec<__bf16, 8> q_vec;
          #pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float matmul_wq = matmul_wq_total.at[j];
            const float matmul_wq_times_rrms = matmul_wq * rrms;
            q_vec.at[j] = static_cast<__bf16>(matmul_wq_times_rrms);
          }
          store<8>(q_ptr + row * q_stride + col, q_vec);
        }
      }
    }

    if (group == 1) {
      #pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int m = static_cast<int>((v * threads + threadIdx.x) / (tile_cols / 8));
        const int n = static_cast<int>((v * threads + threadIdx.x) % (tile_cols / 8)) * 8;
        const long long row = row0 + band * band_rows + m;
        const int col = col0 + n;
        if (row < rows) {
          const Vec<float, 8> matmul_wk_total = load<8>(right_shared + m * sums_stride + n);
          const float sum_of_squares = sum_of_squares_shared[band * band_rows + m];
          const float mean = sum_of_squares / 4096.0f;
          const float mean_plus_eps = mean + 1e-06f;
          const float rrms = rsqrtf(mean_plus_eps);
          Vec<__bf16, 8> k_value_vec;
          #pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float matmul_wk = matmul_wk_total.at[j];
            const float matmul_wk_times_rrms = matmul_wk * rrms;
            k_value_vec.at[j] = static_cast<__bf16>(matmul_wk_times_rrms);
          }
          store<8>(k_value_ptr + row * k_value_stride + col, k_value_vec);
        }
      }
    }

    if (group == 2) {
      #pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int m = static_cast<int>((v * threads + threadIdx.x) / (tile_cols / 8));
        const int n = static_cast<int>((v * threads + threadIdx.x) % (tile_cols / 8)) * 8;
        const long long row = row0 + band * band_rows + m;
        const int col = col0 + n;
        if (row < rows) {
          const Vec<float, 8> matmul_wv_total = load<8>(right_shared + m * sums_stride + n);
          const float sum_of_squares = sum_of_squares_shared[band * band_rows + m];
          const float mean = sum_of_squares / 4096.0f;
          const float mean_plus_eps = mean + 1e-06f;
          const float rrms = rsqrtf(mean_plus_eps);
          Vec<__bf16, 8> v_value_vec;
          #pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float matmul_wv = matmul_wv_total.at[j];
            const float matmul_wv_times_rrms = matmul_wv * rrms;
            v_value_vec.at[j] = static_cast<__bf16>(matmul_wv_times_rrms);
          }
          store<8>(v_value_ptr + row * v_value_stride + col, v_value_vec);
        }
      }
    }
  }
}
