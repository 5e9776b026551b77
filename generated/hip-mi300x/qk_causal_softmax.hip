// qk_causal_softmax  bf16[B, H, S, D], bf16[B, H, T, D] -> bf16[B, H, S, T]  at B=1 H=32 S=2048 D=128 T=2048
// softmax(causal(query @ key^T / sqrt(D))): scores are made twice, and of masked tiles not at all.
//
//     def qk_causal_softmax(query, key):
//         return F.softmax(F.causal(query @ key.mT * D**-0.5))
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s, 1307 TFLOP/s for products
// tile     128 queries a block of 8 warps, tiles of 64 keys twice, the next tile in registers
//          meanwhile; where a mask leaves nothing of a tile, no score is made; conditions are tested in
//          tiles that an end cuts
// traffic  302.0 MB moved, 302.0 MB ideal, 838.9 MB with products apart, 2181.0 MB unfused in 4
//          launches
// floor    57.0 us at 5.3 TB/s; memory-bound at 56.92 flop/B
// rounding out to bf16 when stored; f32 between
// needs    D=128, T=2048; rows of all operands next to each other; query, key, out: address and strides
//          in multiples of 16 B

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
constexpr int tile_rows = 128, tile_keys = 64, keys = 2048;
// elements from one line in shared memory to the next: lanes read from different banks at once
constexpr int query_pitch = 144, key_pitch = 144;
constexpr int stage_elements = 9216;  // from one tile to the next
constexpr int query_at = 0;

__device__ __forceinline__ long long least(long long a, long long b) {
  return a < b ? a : b;
}

__device__ __forceinline__ long long most(long long a, long long b) {
  return a > b ? a : b;
}

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

extern "C" __global__ void __launch_bounds__(512)
qk_causal_softmax(
    const __bf16* __restrict__ query_ptr,
    const __bf16* __restrict__ key_ptr,
    __bf16* __restrict__ out_ptr,
    long long B_H_size,
    long long S_size,
    long long query_stride_B_H,
    long long query_stride_S,
    long long key_stride_B_H,
    long long key_ld,
    long long out_stride_B_H,
    long long out_stride_S)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int warp_row = threadIdx.x / 64 * 16;  // the warp's first of the tile
  const long long rows = S_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const long long B_H_at = blockIdx.x / tiles_down;
  // the last rows first: they need the most keys
  const long long row0 = static_cast<long long>(tiles_down - 1 - blockIdx.x % tiles_down) * tile_rows;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;

  // what the mask leaves of a row's keys
  struct Ends { long long end, free_end; };
  const auto ends_of = [&](long long row) {
    const int last_value = static_cast<int>(row);
    return Ends{static_cast<long long>(last_value) + 1, static_cast<long long>(last_value) + 1};
  };
  const Ends top_ends = ends_of(row0), last_ends = ends_of(row0 + rows_here - 1);
  constexpr int first_key = 0;
  const int end_key = within_keys(most(top_ends.end, last_ends.end));
  const int free_end = within_keys(least(top_ends.free_end, last_ends.free_end));

  // what the thread brings of queries, and of each tile of keys
  __bf16* const ring = reinterpret_cast<__bf16*>(shared);
  const int query_row = threadIdx.x / 16, query_col = threadIdx.x % 16 * 8;
  const __bf16* const query_from = query_ptr + B_H_at * query_stride_B_H + row0 * query_stride_S + query_row * query_stride_S + query_col;
  const int key_row = threadIdx.x / 16, key_col = threadIdx.x % 16 * 8;
  const __bf16* const key_from = key_ptr + B_H_at * key_stride_B_H + key_row * key_ld + key_col;
  Vec<__bf16, 8> key_held[2];
  const auto fetch_tile = [&](int key0) {
    #pragma unroll
    for (int v = 0; v < 2; ++v) key_held[v] = load_chunk<8>(key_from + (key0 + v * 32) * key_ld, 8);
  };
  const auto put_tile = [&](int stage) {
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      __bf16* const to = ring + stage * stage_elements;
      store<8>(to + (key_row + v * 32) * key_pitch + key_col, key_held[v]);
    }
  };

  // the queries, which all tiles of keys are multiplied with
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const Vec<__bf16, 8> query_vec = load_chunk<8>(query_from + v * 32 * query_stride_S, query_row + v * 32 < rows_here ? 8 : 0);
    store<8>(ring + query_at + (query_row + v * 32) * query_pitch + query_col, query_vec);
  }
  if (first_key < end_key) fetch_tile(first_key);

  // for each row that the lane has elements of: the largest logit so far, and sums of exponentials against it
  float largest[1], pivots[1], summed[1];
  int last_value_here[1];
  float inverse_sum_here[1];
  float out_masked[1];
  {
    largest[0] = -INFINITY;
    pivots[0] = 0.0f;
    summed[0] = 0.0f;
    const int m = warp_row + lane % 16;
    const long long row = row0 + (m < rows_here ? m : rows_here - 1);
    const int last_value = static_cast<int>(row);
    last_value_here[0] = last_value;
  }
  __syncthreads();
  const __bf16* const query_lane = ring + query_at + (warp_row + lane % 16) * query_pitch + lane / 16 * 8;
  const __bf16* const key_lane = ring + lane % 16 * key_pitch + lane / 16 * 8;
  Fragment query_part[4];
  #pragma unroll
  for (int k = 0; k < 4; ++k) query_part[k] = load_fragment(query_lane + k * 32);
  __syncthreads();  // the first tile takes the queries' place

  // tiles of keys pass by twice: for each row's largest logit and sum of exponentials, and to be written
  const int tiles = end_key > first_key ? (end_key - first_key + tile_keys - 1) / tile_keys : 0;
  const auto key_of = [&](int tile) { return first_key + (tile < tiles ? tile : tile - tiles) * tile_keys; };
  const auto take_tile = [&](int tile) {
    put_tile(tile % 1);
    __syncthreads();
    if (tile + 1 < 2 * tiles) {  // the next one, while this one is multiplied
      fetch_tile(key_of(tile + 1));
    }
  };
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 1;
    const int key0 = key_of(tile);
    take_tile(tile);

    // a warp's 16 queries times the tile's keys
    Sums matmul_sums[4] = {};
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      #pragma unroll
      for (int n = 0; n < 4; ++n) {
        const Fragment key_part = load_fragment(key_lane + stage * stage_elements + n * 16 * key_pitch + k * 32);
        matmul_sums[n] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(key_part.part[0], query_part[k].part[0], matmul_sums[n], 0, 0, 0);
        matmul_sums[n] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(key_part.part[1], query_part[k].part[1], matmul_sums[n], 0, 0, 0);
      }
    }

    // scores become logits, and the largest of a row is found among those of all lanes that share it
    float peaks[1];
    peaks[0] = largest[0];
    if (key0 + tile_keys <= free_end) {
      #pragma unroll
      for (int n = 0; n < 4; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float matmul = matmul_sums[n][i];
          const float mul = matmul * 0.088388346f;
          matmul_sums[n][i] = mul;
          peaks[0] = larger(peaks[0], matmul_sums[n][i]);
        }
      }
    } else {
      #pragma unroll
      for (int n = 0; n < 4; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int col_index = key0 + n * 16 + lane / 16 * 4 + i;
          const float matmul = matmul_sums[n][i];
          const int last_value = last_value_here[0];
          const float mul = matmul * 0.088388346f;
          const bool keep = col_index <= last_value;
          const float causal = keep ? mul : (-INFINITY);
          matmul_sums[n][i] = causal;
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
    for (int n = 0; n < 4; ++n) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) summed[0] += power_of_2(fmaf(matmul_sums[n][i], 1.44269504f, -pivots[0]));
    }
    __syncthreads();
  }

  // what results are made of beside their exponentials, one value a row
  __bf16* out_rows[1];
  {
    const int m = warp_row + lane % 16;
    const bool inside = m < rows_here;
    const long long row = row0 + (inside ? m : rows_here - 1);
    #pragma unroll
    for (int step = 16; step < 64; step *= 2) summed[0] += partner(summed[0], step);
    const float sum_of_exps = summed[0];
    const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
    const float one_over_sum_of_exps = 1.0f / sum_of_exps;
    const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;
    inverse_sum_here[0] = inverse_sum;
    out_rows[0] = out_ptr + B_H_at * out_stride_B_H + row * out_stride_S;
    {  // where the mask leaves nothing of a tile
      const float e = power_of_2(fmaf(-INFINITY, 1.44269504f, -pivots[0]));
      const float softmax = e * inverse_sum;
      out_masked[0] = softmax;
    }
  }

  // columns that the mask leaves to none of the block's rows: no scores are made there
  const int last_key = first_key + tiles * tile_keys;
  {
    const int m = warp_row + lane % 16;
    if (m < rows_here) {
      const long long row = row0 + m;
      __bf16* const out_row = out_ptr + B_H_at * out_stride_B_H + row * out_stride_S;
      Vec<__bf16, 8> out_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) out_vec.at[j] = static_cast<__bf16>(out_masked[0]);
      for (int col = last_key + lane / 16 * 8; col < keys; col += 32) store<8>(out_row + col, out_vec);
    }
  }

  for (int tile = tiles; tile < 2 * tiles; ++tile) {
    const int stage = tile % 1;
    const int key0 = key_of(tile);
    take_tile(tile);

    // a warp's 16 queries times the tile's keys
    Sums matmul_sums[4] = {};
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      #pragma unroll
      for (int n = 0; n < 4; ++n) {
        const Fragment key_part = load_fragment(key_lane + stage * stage_elements + n * 16 * key_pitch + k * 32);
        matmul_sums[n] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(key_part.part[0], query_part[k].part[0], matmul_sums[n], 0, 0, 0);
        matmul_sums[n] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(key_part.part[1], query_part[k].part[1], matmul_sums[n], 0, 0, 0);
      }
    }
    if (key0 + tile_keys <= free_end) {
      #pragma unroll
      for (int n = 0; n < 4; ++n) {
        {
          const bool inside = warp_row + lane % 16 < rows_here;
          Vec<__bf16, 4> out_vec;
          #pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int i = j;
            const float matmul = matmul_sums[n][i];
            const float mul = matmul * 0.088388346f;
            const float e = power_of_2(fmaf(mul, 1.44269504f, -pivots[0]));
            const float inverse_sum = inverse_sum_here[0];
            const float softmax = e * inverse_sum;
            out_vec.at[j] = static_cast<__bf16>(softmax);
          }
          if (inside) store<4>(out_rows[0] + key0 + n * 16 + lane / 16 * 4, out_vec);
        }
      }
    } else {
      #pragma unroll
      for (int n = 0; n < 4; ++n) {
        {
          const bool inside = warp_row + lane % 16 < rows_here;
          Vec<__bf16, 4> out_vec;
          #pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int i = j;
            const int col_index = key0 + n * 16 + lane / 16 * 4 + i;
            const float matmul = matmul_sums[n][i];
            const int last_value = last_value_here[0];
            const float mul = matmul * 0.088388346f;
            const bool keep = col_index <= last_value;
            const float causal = keep ? mul : (-INFINITY);
            const float e = power_of_2(fmaf(causal, 1.44269504f, -pivots[0]));
            const float inverse_sum = inverse_sum_here[0];
            const float softmax = e * inverse_sum;
            out_vec.at[j] = static_cast<__bf16>(softmax);
          }
          if (inside) store<4>(out_rows[0] + key0 + n * 16 + lane / 16 * 4, out_vec);
        }
      }
    }
    __syncthreads();
  }
}
