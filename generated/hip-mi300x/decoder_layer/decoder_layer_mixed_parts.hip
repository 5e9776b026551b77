// decoder_layer_mixed_parts  i32[B, 1, 1, 1], bf16[B, H, G, E], bf16[B, H, T, E], bf16[B, H, T, E] -> f32[8, B, H, G, E], f32[8, B, H, G,
//   1], f32[8, B, H, G, 1]  at B=8 H=8 G=4 E=128 T=2048
// mixed_parts, top_parts, sum_of_exps_parts of decoder_layer.
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s, 1307 TFLOP/s for products
// views    queries is turned as [B, H, G, E]; keys_part is keys as [B, H, T, E]; values_part is values
//          as [B, H, T, E]
// tile     16 queries a block of 1 warps, tiles of 32 keys, dealt to 8 blocks by turns, the next tile
//          in registers meanwhile; of keys behind the last that a block's rows need, none are read;
//          conditions are tested in tiles that an end cuts
// traffic  68.2 MB moved, 68.2 MB ideal, 72.4 MB with products apart, 76.7 MB unfused in 6 launches
// floor    12.9 us at 5.3 TB/s; memory-bound at 3.93 flop/B
// rounding e, before it is divided by its row's sum, to bf16 where it meets values_part; f32 between
// needs    E=128, T=2048; rows of all operands next to each other; queries, keys_part, values_part,
//          mixed_parts: address and strides in multiples of 16 B

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
  return a > b || a != a ? a : b;
}

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  return __builtin_amdgcn_exp2f(x);
}

// queries of a block, keys of a tile, and all keys
constexpr int tile_rows = 16, tile_keys = 32, keys = 2048, threads = 64;
// blocks that share a row's keys, and from one tile of a block to its next
constexpr int parts = 8, next_tile = parts * tile_keys;
// elements from one line in shared memory to the next: lanes read from different banks at once
constexpr int queries_pitch = 144, keys_part_pitch = 144, values_part_pitch = 36;
constexpr int values_part_at = 4608, stage_elements = 9216;  // of a tile's values, and to the next stage
constexpr int queries_at = 0;
constexpr int sums_stride = 132;  // floats of a row of sums

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

typedef short Half __attribute__((ext_vector_type(4)));
typedef float Sums __attribute__((ext_vector_type(4)));

// a lane's 8 elements of what one fragment multiplies: neighbours in k, the same for both operands
struct alignas(16) Fragment {
  Half part[2];
};

// 8 neighbours of a line in shared memory
template <typename T>
__device__ __forceinline__ Fragment load_fragment(const T* from) {
  return *reinterpret_cast<const Fragment*>(from);
}

// half of them
template <typename T>
__device__ __forceinline__ Half load_half(const T* from) {
  return *reinterpret_cast<const Half*>(from);
}

// four numbers, rounded
__device__ __forceinline__ Half rounded_half(const Sums& from) {
  Vec<__bf16, 4> v;
  #pragma unroll
  for (int i = 0; i < 4; ++i) v.at[i] = static_cast<__bf16>(from[i]);
  return *reinterpret_cast<const Half*>(&v);
}

extern "C" __global__ void __launch_bounds__(64)
decoder_layer_mixed_parts(
    const int* __restrict__ position_ptr,
    const __bf16* __restrict__ queries_ptr,
    const __bf16* __restrict__ keys_part_ptr,
    const __bf16* __restrict__ values_part_ptr,
    float* __restrict__ mixed_parts_ptr,
    float* __restrict__ top_parts_ptr,
    float* __restrict__ sum_of_exps_parts_ptr,
    long long axis0_size,
    long long B_size,
    long long H_size,
    long long G_size,
    long long queries_stride_B,
    long long queries_stride_H,
    long long queries_stride_G,
    long long keys_part_stride_B,
    long long keys_part_stride_H,
    long long keys_part_ld,
    long long values_part_stride_B,
    long long values_part_stride_H,
    long long values_part_ld,
    long long position_stride_B,
    long long mixed_parts_stride_axis0,
    long long mixed_parts_stride_B,
    long long mixed_parts_stride_H,
    long long mixed_parts_stride_G,
    long long top_parts_stride_axis0,
    long long top_parts_stride_B,
    long long top_parts_stride_H,
    long long top_parts_stride_G,
    long long sum_of_exps_parts_stride_axis0,
    long long sum_of_exps_parts_stride_B,
    long long sum_of_exps_parts_stride_H,
    long long sum_of_exps_parts_stride_G)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int warp_row = threadIdx.x / 64 * 16;  // the warp's first of the tile
  const long long rows = G_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const long long axis0_at = blockIdx.x / tiles_down / H_size / B_size;
  const long long B_at = blockIdx.x / tiles_down / H_size % B_size;
  const long long H_at = blockIdx.x / tiles_down % H_size;
  const long long row0 = static_cast<long long>(blockIdx.x % tiles_down) * tile_rows;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;

  // what the mask leaves of a row's keys
  struct Ends { long long end, free_end; };
  const auto ends_of = [&]() {
    const int position = *(position_ptr + B_at * position_stride_B);
    return Ends{static_cast<long long>(position) + 1, static_cast<long long>(position) + 1};
  };
  const Ends ends = ends_of();
  // tiles are dealt to parts by turns: the first one is the part's own, or the next of its turns
  const int first_key = static_cast<int>(axis0_at) * tile_keys;
  const int end_key = within_keys(ends.end);
  const int free_end = within_keys(ends.free_end);

  // what the thread brings of queries, and of each tile of keys and values
  __bf16* const ring = reinterpret_cast<__bf16*>(shared);
  const int queries_row = threadIdx.x / 16, queries_col = threadIdx.x % 16 * 8;
  const __bf16* const queries_from = queries_ptr + B_at * queries_stride_B + H_at * queries_stride_H + row0 * queries_stride_G
      + queries_row * queries_stride_G + queries_col;
  const int keys_part_row = threadIdx.x / 16, keys_part_col = threadIdx.x % 16 * 8;
  const __bf16* const keys_part_from = keys_part_ptr + B_at * keys_part_stride_B + H_at * keys_part_stride_H
      + keys_part_row * keys_part_ld + keys_part_col;
  const int values_part_row = threadIdx.x / 16, values_part_col = threadIdx.x % 16 * 8;
  const __bf16* const values_part_from = values_part_ptr + B_at * values_part_stride_B + H_at * values_part_stride_H
      + values_part_row * values_part_ld + values_part_col;
  Vec<__bf16, 8> keys_part_held[8];
  Vec<__bf16, 8> values_part_held[8];
  const auto fetch_tile = [&](int key0) {
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      keys_part_held[v] = load_chunk<8>(keys_part_from + (key0 + v * 4) * keys_part_ld, 8);
    }
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      values_part_held[v] = load_chunk<8>(values_part_from + (key0 + v * 4) * values_part_ld, 8);
    }
  };
  const auto put_tile = [&](int stage) {
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      __bf16* const to = ring + stage * stage_elements;
      store<8>(to + (keys_part_row + v * 4) * keys_part_pitch + keys_part_col, keys_part_held[v]);
    }
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      __bf16* const to = ring + stage * stage_elements + values_part_at;
      {
        #pragma unroll
        for (int j = 0; j < 8; ++j) to[(j * 16 + values_part_col / 8) * values_part_pitch + values_part_row
            + v * 4] = values_part_held[v].at[j];
      }
    }
  };

  // the queries, which all tiles of keys are multiplied with
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const Vec<__bf16, 8> queries_vec = load_chunk<8>(queries_from + v * 4 * queries_stride_G, queries_row + v * 4 < rows_here ? 8 : 0);
    store<8>(ring + queries_at + (queries_row + v * 4) * queries_pitch + queries_col, queries_vec);
  }
  if (first_key < end_key) fetch_tile(first_key);

  // one value for all rows of the block
  const int position = *(position_ptr + B_at * position_stride_B);

  // for each row that the lane has elements of: the largest logit so far, and sums of exponentials against it
  float largest[1], pivots[1], summed[1];
  {
    largest[0] = -INFINITY;
    pivots[0] = 0.0f;
    summed[0] = 0.0f;
  }
  __syncthreads();
  const __bf16* const queries_lane = ring + queries_at + (warp_row + lane % 16) * queries_pitch + lane / 16 * 8;
  const __bf16* const keys_part_lane = ring + lane % 16 * keys_part_pitch + lane / 16 * 8;
  const __bf16* const values_part_lane = ring + values_part_at + lane % 16 * values_part_pitch + lane / 16 * 4;
  Fragment queries_part[4];
  #pragma unroll
  for (int k = 0; k < 4; ++k) queries_part[k] = load_fragment(queries_lane + k * 32);
  __syncthreads();  // the first tile takes the queries' place
  Sums e_times_values_part_sums[8] = {};

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
        const Fragment keys_part_part = load_fragment(keys_part_lane + stage * stage_elements + n * 16 * keys_part_pitch + k * 32);
        matmul_sums[n] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(keys_part_part.part[0], queries_part[k].part[0], matmul_sums[n], 0, 0, 0);
        matmul_sums[n] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(keys_part_part.part[1], queries_part[k].part[1], matmul_sums[n], 0, 0, 0);
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
          const bool le = col_index <= position;
          const float where = le ? scores : (-INFINITY);
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
      for (int i = 0; i < 4; ++i) e_times_values_part_sums[d][i] *= shrinks[0];
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
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      const Half rounded = rounded_half(matmul_sums[n]);
      #pragma unroll
      for (int d = 0; d < 8; ++d) {
        const Half values_part_part = load_half(values_part_lane + stage * stage_elements + d * 16 * values_part_pitch + n * 16);
        e_times_values_part_sums[d] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(values_part_part, rounded, e_times_values_part_sums[d], 0, 0, 0);
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
      row_sums[m * sums_stride + (d * 16 + lane / 16 * 4 + i) % 16 * 8 + (d * 16 + lane / 16 * 4
          + i) / 16] = e_times_values_part_sums[d][i];
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
      if (col == 0) *(top_parts_ptr + axis0_at * top_parts_stride_axis0 + B_at * top_parts_stride_B + H_at * top_parts_stride_H
          + row * top_parts_stride_G) = top;
      if (col == 0) *(sum_of_exps_parts_ptr + axis0_at * sum_of_exps_parts_stride_axis0 + B_at * sum_of_exps_parts_stride_B
          + H_at * sum_of_exps_parts_stride_H + row * sum_of_exps_parts_stride_G) = sum_of_exps;
      Vec<float, 8> mixed_parts_vec;
      const Vec<float, 8> e_times_values_part_total = load<8>(row_sums + m * sums_stride + col);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float e_times_values_part = e_times_values_part_total.at[j];
        mixed_parts_vec.at[j] = e_times_values_part;
      }
      store<8>(mixed_parts_ptr + axis0_at * mixed_parts_stride_axis0 + B_at * mixed_parts_stride_B + H_at * mixed_parts_stride_H
          + row * mixed_parts_stride_G + col, mixed_parts_vec);
    }
  }
}
