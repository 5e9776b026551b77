// paged_attention_out_parts  bf16[B, G, R, D], bf16[N, 1, G, L, D], bf16[N, 1, G, L, D], i32[B, 1, 1, P], i32[B, 1, 1, 1] -> f32[16, B, G,
//   R, D], f32[16, B, G, R, 1], f32[16, B, G, R, 1]  at B=8 G=8 R=4 D=128 N=8192 L=16 P=512 L_times_P=8192
// out_parts, top_parts, sum_of_exps_parts of paged_attention.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// views    key_cache is key_cache as [N, 1, G, L, D]; value_cache is value_cache as [N, 1, G, L, D]
// looks up pages of key_cache at table, 0 where there is none; pages of value_cache at table, 0 where
//          there is none
// tile     32 queries a block of 2 warps, tiles of 32 keys, dealt to 16 blocks by turns, the next tile
//          in registers meanwhile; of keys behind the last that a block's rows need, none are read;
//          conditions are tested in tiles that an end cuts
// traffic  270.6 MB moved, 270.6 MB ideal, 287.4 MB with products apart, 572.8 MB unfused in 8 launches
// floor    33.8 us at 8 TB/s; memory-bound at 3.97 flop/B
// rounding e, before it is divided by its row's sum, to bf16 where it meets value_cache; f32 between
// needs    D=128, L=16, L_times_P=8192; rows of all operands next to each other; q, key_cache,
//          value_cache, out_parts: address and strides in multiples of 16 B

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

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

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  return __builtin_amdgcn_exp2f(x);
}

// queries of a block, keys of a tile, and all keys
constexpr int tile_rows = 32, tile_keys = 32, keys = 8192, threads = 128;
// blocks that share a row's keys, and from one tile of a block to its next
constexpr int parts = 16, next_tile = parts * tile_keys;
// elements from one line in shared memory to the next: lanes read from different banks at once
constexpr int q_pitch = 144, key_cache_pitch = 144, value_cache_pitch = 40;
constexpr int value_cache_at = 4608, stage_elements = 9728;  // of a tile's values, and to the next stage
constexpr int q_at = 0;
constexpr int sums_stride = 132;  // floats of a row of sums
constexpr int key_cache_page_rows = 16;  // of a page of key_cache
constexpr int value_cache_page_rows = 16;  // of a page of value_cache

// the nearest to `key` of the keys, or the end behind them
__device__ __forceinline__ int within_keys(long long key) {
  return key < 0 ? 0 : key < keys ? static_cast<int>(key) : keys;
}

// 8 elements, Width with each load; zeros where `count` is 0
template <int Width, typename T>
__device__ __forceinline__ Vec<T, 8> load_chunk(const T* from, int count) {
  // as one vector of words: halves that a test parts from their load are waited for before the next one
  typedef unsigned Words __attribute__((ext_vector_type(4)));
  Words words = {};
  if (count != 0) {
    constexpr int step = Width * 4 / 8;
    #pragma unroll
    for (int j = 0; j < 4; j += step) {
      const Vec<unsigned, step> part = load<step>(reinterpret_cast<const unsigned*>(from) + j);
      #pragma unroll
      for (int i = 0; i < step; ++i) words[j + i] = part.at[i];
    }
  }
  return __builtin_bit_cast(Vec<T, 8>, words);
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
typedef float Sums __attribute__((ext_vector_type(4)));

// a lane's 8 elements of what one fragment multiplies: neighbours in k, the same for both operands
struct alignas(16) Fragment {
  Half part[1];
};

// 8 neighbours of a line in shared memory
template <typename T>
__device__ __forceinline__ Fragment load_fragment(const T* from) {
  return *reinterpret_cast<const Fragment*>(from);
}

// 4 neighbours of a line in shared memory, and as many 16 further on, from the next tile of keys
template <typename T>
__device__ __forceinline__ Half load_halves(const T* from) {
  struct alignas(16) Both {
    Vec<T, 4> part[2];
  };
  using Part = const Vec<T, 4>*;
  const Both v = {{*reinterpret_cast<Part>(from), *reinterpret_cast<Part>(from + 16)}};
  return *reinterpret_cast<const Half*>(&v);
}

// eight numbers of two tiles of keys, rounded
__device__ __forceinline__ Half rounded_halves(const Sums& low, const Sums& high) {
  Vec<__bf16, 8> v;
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    v.at[i] = static_cast<__bf16>(low[i]);
    v.at[4 + i] = static_cast<__bf16>(high[i]);
  }
  return *reinterpret_cast<const Half*>(&v);
}

extern "C" __global__ void __launch_bounds__(128)
paged_attention_out_parts(
    const __bf16* __restrict__ q_ptr,
    const __bf16* __restrict__ key_cache_ptr,
    const __bf16* __restrict__ value_cache_ptr,
    const int* __restrict__ table_ptr,
    const int* __restrict__ length_ptr,
    float* __restrict__ out_parts_ptr,
    float* __restrict__ top_parts_ptr,
    float* __restrict__ sum_of_exps_parts_ptr,
    long long axis0_size,
    long long B_size,
    long long G_size,
    long long R_size,
    long long q_stride_B,
    long long q_stride_G,
    long long q_stride_R,
    long long key_cache_stride_G,
    long long key_cache_count,
    long long key_cache_stride_page,
    long long key_cache_ld,
    long long value_cache_stride_G,
    long long value_cache_count,
    long long value_cache_stride_page,
    long long value_cache_ld,
    long long table_stride_B,
    long long length_stride_B,
    long long out_parts_stride_axis0,
    long long out_parts_stride_B,
    long long out_parts_stride_G,
    long long out_parts_stride_R,
    long long top_parts_stride_axis0,
    long long top_parts_stride_B,
    long long top_parts_stride_G,
    long long top_parts_stride_R,
    long long sum_of_exps_parts_stride_axis0,
    long long sum_of_exps_parts_stride_B,
    long long sum_of_exps_parts_stride_G,
    long long sum_of_exps_parts_stride_R)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int warp_row = threadIdx.x / 64 * 16;  // the warp's first of the tile
  const long long rows = R_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const long long axis0_at = blockIdx.x / tiles_down / G_size / B_size;
  const long long B_at = blockIdx.x / tiles_down / G_size % B_size;
  const long long G_at = blockIdx.x / tiles_down % G_size;
  const long long row0 = static_cast<long long>(blockIdx.x % tiles_down) * tile_rows;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  const int* const table_here = table_ptr + B_at * table_stride_B;

  // what the mask leaves of a row's keys
  struct Ends { long long end, free_end; };
  const auto ends_of = [&]() {
    const int length = *(length_ptr + B_at * length_stride_B);
    return Ends{static_cast<long long>(length), static_cast<long long>(length)};
  };
  const Ends ends = ends_of();
  // tiles are dealt to parts by turns: the first one is the part's own, or the next of its turns
  const int first_key = static_cast<int>(axis0_at) * tile_keys;
  const int end_key = within_keys(ends.end);
  const int free_end = within_keys(ends.free_end);

  // what the thread brings of queries, and of each tile of keys and values
  __bf16* const ring = reinterpret_cast<__bf16*>(shared);
  const int q_row = threadIdx.x / 16, q_col = threadIdx.x % 16 * 8;
  const __bf16* const q_from = q_ptr + B_at * q_stride_B + G_at * q_stride_G + row0 * q_stride_R + q_row * q_stride_R + q_col;
  const int key_cache_row = threadIdx.x / 16, key_cache_col = threadIdx.x % 16 * 8;
  const __bf16* const key_cache_from = key_cache_ptr + G_at * key_cache_stride_G + key_cache_col;
  const int value_cache_row = threadIdx.x / 16, value_cache_col = threadIdx.x % 16 * 8;
  const __bf16* const value_cache_from = value_cache_ptr + G_at * value_cache_stride_G + value_cache_col;
  Vec<__bf16, 8> key_cache_held[4];
  Vec<__bf16, 8> value_cache_held[4];
  const auto fetch_tile = [&](int key0) {
    int key_cache_page[4];
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int key_cache_key = key0 + key_cache_row + v * 8;
      key_cache_page[v] = table_here[key_cache_key / key_cache_page_rows];
    }
    int value_cache_page[4];
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int value_cache_key = key0 + value_cache_row + v * 8;
      value_cache_page[v] = table_here[value_cache_key / value_cache_page_rows];
    }
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int key_cache_key = key0 + key_cache_row + v * 8;
      const bool key_cache_there = key_cache_page[v] >= 0 && key_cache_page[v] < key_cache_count;
      key_cache_held[v] = load_chunk<8>(key_cache_from + (key_cache_there ? key_cache_page[v] : 0) * key_cache_stride_page
          + key_cache_key % key_cache_page_rows * key_cache_ld, key_cache_there ? 8 : 0);
    }
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int value_cache_key = key0 + value_cache_row + v * 8;
      const bool value_cache_there = value_cache_page[v] >= 0 && value_cache_page[v] < value_cache_count;
      value_cache_held[v] = load_chunk<8>(value_cache_from + (value_cache_there ? value_cache_page[v] : 0) * value_cache_stride_page
          + value_cache_key % value_cache_page_rows * value_cache_ld, value_cache_there ? 8 : 0);
    }
  };
  const auto put_tile = [&](int stage) {
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      __bf16* const to = ring + stage * stage_elements;
      store<8>(to + (key_cache_row + v * 8) * key_cache_pitch + key_cache_col, key_cache_held[v]);
    }
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      __bf16* const to = ring + stage * stage_elements + value_cache_at;
      {
        #pragma unroll
        for (int j = 0; j < 8; ++j) to[(j * 16 + value_cache_col / 8) * value_cache_pitch + ((value_cache_row + v * 8) ^ (j * 16
            + value_cache_col / 8) / 8 % 2 * 4)] = value_cache_held[v].at[j];
      }
    }
  };

  // the queries, which all tiles of keys are multiplied with
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const Vec<__bf16, 8> q_vec = load_chunk<8>(q_from + v * 8 * q_stride_R, q_row + v * 8 < rows_here ? 8 : 0);
    store<8>(ring + q_at + (q_row + v * 8) * q_pitch + q_col, q_vec);
  }
  if (first_key < end_key) fetch_tile(first_key);

  // one value for all rows of the block
  const int length = *(length_ptr + B_at * length_stride_B);

  // for each row that the lane has elements of: the largest logit so far, and sums of exponentials against it
  float largest[1], pivots[1], summed[1];
  {
    largest[0] = -INFINITY;
    pivots[0] = 0.0f;
    summed[0] = 0.0f;
  }
  __syncthreads();
  const __bf16* const q_lane = ring + q_at + (warp_row + lane % 16) * q_pitch + lane / 16 * 8;
  const __bf16* const key_cache_lane = ring + lane % 16 * key_cache_pitch + lane / 16 * 8;
  const __bf16* const value_cache_lane = ring + value_cache_at + lane % 16 * value_cache_pitch + (lane / 16 * 4 ^ lane % 16 / 8 * 4);
  Fragment q_part[4];
  #pragma unroll
  for (int k = 0; k < 4; ++k) q_part[k] = load_fragment(q_lane + k * 32);
  __syncthreads();  // the first tile takes the queries' place
  Sums matmul_from_length_sums[8] = {};

  for (int key0 = first_key, tile = 0; key0 < end_key; key0 += next_tile, ++tile) {
    const int stage = tile % 1;
    put_tile(stage);
    __syncthreads();
    if (key0 + next_tile < end_key) {  // the next tile, while this one is multiplied
      fetch_tile(key0 + next_tile);
    }

    // a warp's 16 queries times the tile's keys
    Sums matmul_sums[2] = {};
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        const Fragment key_cache_part = load_fragment(key_cache_lane + stage * stage_elements + n * 16 * key_cache_pitch + k * 32);
        matmul_sums[n] = __builtin_amdgcn_mfma_f32_16x16x32_bf16(key_cache_part.part[0], q_part[k].part[0], matmul_sums[n], 0, 0, 0);
      }
    }

    // scores become logits, and the largest of a row is found among those of all lanes that share it
    float peaks[1];
    peaks[0] = largest[0];
    if (key0 + tile_keys <= free_end) {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float matmul = matmul_sums[n][i];
          const float scores = matmul * 0.088388346f;
          matmul_sums[n][i] = scores;
          peaks[0] = larger(peaks[0], matmul_sums[n][i]);
        }
      }
    } else {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int col_index = key0 + n * 16 + lane / 16 * 4 + i;
          const float matmul = matmul_sums[n][i];
          const float scores = matmul * 0.088388346f;
          const bool lt = col_index < length;
          const float where = lt ? scores : (-INFINITY);
          matmul_sums[n][i] = where;
          peaks[0] = larger(peaks[0], matmul_sums[n][i]);
        }
      }
    }

    // what was summed so far shrinks by as much as the largest logit grew
    float shrinks[1];
    #pragma unroll
    for (int step = 16; step < 64; step *= 2) peaks[0] = larger(peaks[0], partner(peaks[0], step));
    const float pivot = peaks[0] == -INFINITY ? 0.0f : peaks[0] * 1.44269504f;  // log2 of e, as powers are of 2
    shrinks[0] = largest[0] == -INFINITY ? 0.0f : power_of_2(pivots[0] - pivot);
    largest[0] = peaks[0];
    pivots[0] = pivot;
    summed[0] *= shrinks[0];
    #pragma unroll
    for (int d = 0; d < 8; ++d) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) matmul_from_length_sums[d][i] *= shrinks[0];
    }

    // logits become weights
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float power = power_of_2(fmaf(matmul_sums[n][i], 1.44269504f, -pivots[0]));
        summed[0] += power;
        matmul_sums[n][i] = power;
      }
    }

    // weights times values: a lane holds of the weights what it multiplies
    {
      const Half rounded = rounded_halves(matmul_sums[0], matmul_sums[1]);
      #pragma unroll
      for (int d = 0; d < 8; ++d) {
        const Half value_cache_part = load_halves(value_cache_lane + stage * stage_elements + d * 16 * value_cache_pitch);
        matmul_from_length_sums[d] = __builtin_amdgcn_mfma_f32_16x16x32_bf16(value_cache_part, rounded, matmul_from_length_sums[d], 0, 0, 0);
      }
    }
    __syncthreads();
  }

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  float* const row_sums = reinterpret_cast<float*>(shared);
  float* const row_largest = row_sums + tile_rows * sums_stride;
  float* const row_summed = row_largest + tile_rows;
  __syncthreads();
  {
    const int m = warp_row + lane % 16;
    #pragma unroll
    for (int step = 16; step < 64; step *= 2) summed[0] += partner(summed[0], step);
    if (lane < 16) {
      row_largest[m] = largest[0];
      row_summed[m] = summed[0];
    }
  }
  #pragma unroll
  for (int d = 0; d < 8; ++d) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = warp_row + lane % 16;
      row_sums[m * sums_stride + (d * 16 + lane / 16 * 4 + i) % 16 * 8 + (d * 16 + lane / 16 * 4 + i) / 16] = matmul_from_length_sums[d][i];
    }
  }
  __syncthreads();

  #pragma unroll 2
  for (int v = 0; v < 4; ++v) {
    const int m = static_cast<int>((v * threads + threadIdx.x) / 16);
    const int col = static_cast<int>((v * threads + threadIdx.x) % 16) * 8;
    if (m < rows_here) {
      const long long row = row0 + m;
      const float top = row_largest[m];
      const float sum_of_exps = row_summed[m];
      if (col == 0) *(top_parts_ptr + axis0_at * top_parts_stride_axis0 + B_at * top_parts_stride_B + G_at * top_parts_stride_G
          + row * top_parts_stride_R) = top;
      if (col == 0) *(sum_of_exps_parts_ptr + axis0_at * sum_of_exps_parts_stride_axis0 + B_at * sum_of_exps_parts_stride_B
          + G_at * sum_of_exps_parts_stride_G + row * sum_of_exps_parts_stride_R) = sum_of_exps;
      Vec<float, 8> out_parts_vec;
      const Vec<float, 8> matmul_from_length_total = load<8>(row_sums + m * sums_stride + col);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float matmul_from_length = matmul_from_length_total.at[j];
        out_parts_vec.at[j] = matmul_from_length;
      }
      store<8>(out_parts_ptr + axis0_at * out_parts_stride_axis0 + B_at * out_parts_stride_B + G_at * out_parts_stride_G
          + row * out_parts_stride_R + col, out_parts_vec);
    }
  }
}
