// dropout_attention  bf16[B, H, S, D], bf16[B, H, T, D], bf16[B, H, T, D], f32, i32[1], i32[1] -> bf16[B, H, S, D], f32[B, H, S, 1]  at
//   B=1 H=32 S=4096 D=128 T=4096
// dropout(softmax(scores)) @ v and logsumexp(scores); seed and offset lie on the device, where graphs read them.
//
//     def dropout_attention(q, k, v, p, seed, offset):
//         scores = F.causal(q @ k.mT * D**-0.5)
//         return F.dropout(F.softmax(scores), p, seed, offset) @ v, F.logsumexp(scores)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// tile     64 queries a block of 4 warps, tiles of 64 keys, the next tile in registers meanwhile; of
//          keys behind the last that a block's rows need, none are read; conditions are tested in tiles
//          that an end cuts
// traffic  134.7 MB moved, 134.7 MB ideal, 4429.7 MB with products apart, 11947.5 MB unfused in 7
//          launches
// floor    54.6 us at 2517 TFLOP/s for products; compute-bound at 1020.26 flop/B
// rounding where, before it is divided by its row's sum, to bf16 where it meets v; out0 to bf16 when
//          stored; f32 between
// needs    D=128, T=4096; rows of all operands next to each other; q, k, v, out0: address and strides
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
  return __builtin_elementwise_maximum(a, b);
}

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  return __builtin_amdgcn_exp2f(x);
}

// log2(x) of no subnormal x: within 2^-22 from 1/2 to 2, within 2 ulp elsewhere
__device__ __forceinline__ float log_2(float x) {
  return __builtin_amdgcn_logf(x);
}

// ln x, within 3 ulp
__device__ __forceinline__ float natural_log(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float t = tiny ? 16777216.0f * x : x;
  float y = log_2(t);
  if (tiny) y -= 24.0f;
  const float w = y * y;
  const float near = (t - 1.0f) * fmaf(-0.34657359f, y, fmaf(fmaf(-0.000316441874f, w, 0.040036682f), w, 1.0f));
  return fabsf(y) < 0.9f ? near : 0.693147181f * y;
}

// random bits of four elements: the words of Philox4x32-10 of the counter (index / 4, offset, 0) and the key (seed, 0)
__device__ __forceinline__ void philox_words(unsigned (&words)[4], long long index, int offset, int seed) {
  const unsigned long long four = static_cast<unsigned long long>(index) >> 2;
  unsigned c0 = static_cast<unsigned>(four), c1 = static_cast<unsigned>(four >> 32);
  unsigned c2 = static_cast<unsigned>(offset), c3 = 0u;
  unsigned k0 = static_cast<unsigned>(seed), k1 = 0u;
  #pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned a = __umulhi(0xD2511F53u, c0), b = __umulhi(0xCD9E8D57u, c2);
    const unsigned next1 = 0xCD9E8D57u * c2, next3 = 0xD2511F53u * c0;
    c0 = b ^ c1 ^ k0;
    c2 = a ^ c3 ^ k1;
    c1 = next1;
    c3 = next3;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// queries of a block, keys of a tile, and all keys
constexpr int tile_rows = 64, tile_keys = 64, keys = 4096, threads = 256;
// elements from one line in shared memory to the next: lanes read from different banks at once
constexpr int q_pitch = 144, k_pitch = 144, v_pitch = 72;
constexpr int v_at = 9216, stage_elements = 18432;  // of a tile's values, and to the next stage
constexpr int q_at = 0;
constexpr int sums_stride = 132;  // floats of a row of sums

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

extern "C" __global__ void __launch_bounds__(256)
dropout_attention(
    const __bf16* __restrict__ q_ptr,
    const __bf16* __restrict__ k_ptr,
    const __bf16* __restrict__ v_ptr,
    float p,
    const int* __restrict__ seed_ptr,
    const int* __restrict__ offset_ptr,
    __bf16* __restrict__ out0_ptr,
    float* __restrict__ logsumexp_ptr,
    long long B_H_size,
    long long S_size,
    long long q_stride_B_H,
    long long q_stride_S,
    long long k_stride_B_H,
    long long k_ld,
    long long v_stride_B_H,
    long long v_ld,
    long long out0_stride_B_H,
    long long out0_stride_S,
    long long logsumexp_stride_B_H,
    long long logsumexp_stride_S)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int warp_row = threadIdx.x / 64 * 16;  // the warp's first of the tile
  const float sub = 1.0f - p;
  const float quotient = 1.0f / sub;
  const long long rows = S_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const long long B_H_at = blockIdx.x / tiles_down;
  // the last rows first: they need the most keys
  const long long row0 = static_cast<long long>(tiles_down - 1 - blockIdx.x % tiles_down) * tile_rows;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;

  // what the mask leaves of a row's keys
  struct Ends { long long end, free_end; };
  const auto ends_of = [&](long long row) {
    const int last = static_cast<int>(row);
    return Ends{static_cast<long long>(last) + 1, static_cast<long long>(last) + 1};
  };
  const Ends top_ends = ends_of(row0), last_ends = ends_of(row0 + rows_here - 1);
  constexpr int first_key = 0;
  const int end_key = within_keys(most(top_ends.end, last_ends.end));
  const int free_end = within_keys(least(top_ends.free_end, last_ends.free_end));

  // what the thread brings of queries, and of each tile of keys and values
  __bf16* const ring = reinterpret_cast<__bf16*>(shared);
  const int q_row = threadIdx.x / 16, q_col = threadIdx.x % 16 * 8;
  const __bf16* const q_from = q_ptr + B_H_at * q_stride_B_H + row0 * q_stride_S + q_row * q_stride_S + q_col;
  const int k_row = threadIdx.x / 16, k_col = threadIdx.x % 16 * 8;
  const __bf16* const k_from = k_ptr + B_H_at * k_stride_B_H + k_row * k_ld + k_col;
  const int v_row = threadIdx.x / 16, v_col = threadIdx.x % 16 * 8;
  const __bf16* const v_from = v_ptr + B_H_at * v_stride_B_H + v_row * v_ld + v_col;
  Vec<__bf16, 8> k_held[4];
  Vec<__bf16, 8> v_held[4];
  const auto fetch_tile = [&](int key0) {
    #pragma unroll
    for (int v = 0; v < 4; ++v) k_held[v] = load_chunk<8>(k_from + (key0 + v * 16) * k_ld, 8);
    #pragma unroll
    for (int v = 0; v < 4; ++v) v_held[v] = load_chunk<8>(v_from + (key0 + v * 16) * v_ld, 8);
  };
  const auto put_tile = [&](int stage) {
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      __bf16* const to = ring + stage * stage_elements;
      store<8>(to + (k_row + v * 16) * k_pitch + k_col, k_held[v]);
    }
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      __bf16* const to = ring + stage * stage_elements + v_at;
      {
        #pragma unroll
        for (int j = 0; j < 8; ++j) to[(j * 16 + v_col / 8) * v_pitch + ((v_row + v * 16) ^ (j * 16
            + v_col / 8) / 8 % 2 * 4)] = v_held[v].at[j];
      }
    }
  };

  // the queries, which all tiles of keys are multiplied with
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const Vec<__bf16, 8> q_vec = load_chunk<8>(q_from + v * 16 * q_stride_S, q_row + v * 16 < rows_here ? 8 : 0);
    store<8>(ring + q_at + (q_row + v * 16) * q_pitch + q_col, q_vec);
  }
  if (first_key < end_key) fetch_tile(first_key);

  // one value for all rows of the block
  const int seed = *(seed_ptr);
  const int offset = *(offset_ptr);

  // for each row that the lane has elements of: the largest logit so far, and sums of exponentials against it
  float largest[1], pivots[1], summed[1];
  int last_here[1];
  long long first_element[1];  // of the row's scores, in row-major order
  {
    largest[0] = -INFINITY;
    pivots[0] = 0.0f;
    summed[0] = 0.0f;
    const int m = warp_row + lane % 16;
    const long long row = row0 + (m < rows_here ? m : rows_here - 1);
    const int last = static_cast<int>(row);
    last_here[0] = last;
    first_element[0] = (B_H_at * S_size + row) * keys;
  }
  __syncthreads();
  const __bf16* const q_lane = ring + q_at + (warp_row + lane % 16) * q_pitch + lane / 16 * 8;
  const __bf16* const k_lane = ring + lane % 16 * k_pitch + lane / 16 * 8;
  const __bf16* const v_lane = ring + v_at + lane % 16 * v_pitch + (lane / 16 * 4 ^ lane % 16 / 8 * 4);
  Fragment q_part[4];
  #pragma unroll
  for (int k = 0; k < 4; ++k) q_part[k] = load_fragment(q_lane + k * 32);
  __syncthreads();  // the first tile takes the queries' place
  Sums matmul_v_sums[8] = {};

  for (int key0 = first_key, tile = 0; key0 < end_key; key0 += tile_keys, ++tile) {
    const int stage = tile % 1;
    put_tile(stage);
    __syncthreads();
    if (key0 + tile_keys < end_key) {  // the next tile, while this one is multiplied
      fetch_tile(key0 + tile_keys);
    }

    // a warp's 16 queries times the tile's keys
    Sums q_times_k_sums[4] = {};
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      #pragma unroll
      for (int n = 0; n < 4; ++n) {
        const Fragment k_part = load_fragment(k_lane + stage * stage_elements + n * 16 * k_pitch + k * 32);
        q_times_k_sums[n] = __builtin_amdgcn_mfma_f32_16x16x32_bf16(k_part.part[0], q_part[k].part[0], q_times_k_sums[n], 0, 0, 0);
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
          const float q_times_k = q_times_k_sums[n][i];
          const float mul = q_times_k * 0.088388346f;
          q_times_k_sums[n][i] = mul;
          peaks[0] = larger(peaks[0], q_times_k_sums[n][i]);
        }
      }
    } else {
      #pragma unroll
      for (int n = 0; n < 4; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int col_index = key0 + n * 16 + lane / 16 * 4 + i;
          const float q_times_k = q_times_k_sums[n][i];
          const int last = last_here[0];
          const float mul = q_times_k * 0.088388346f;
          const bool keep = col_index <= last;
          const float scores = keep ? mul : (-INFINITY);
          q_times_k_sums[n][i] = scores;
          peaks[0] = larger(peaks[0], q_times_k_sums[n][i]);
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
      for (int i = 0; i < 4; ++i) matmul_v_sums[d][i] *= shrinks[0];
    }

    // logits become weights
    #pragma unroll
    for (int n = 0; n < 4; ++n) {
      unsigned philox_four[4];
      {
        constexpr int i = 0;
        const int col_index = key0 + n * 16 + lane / 16 * 4 + i;
        philox_words(philox_four, first_element[0] + col_index, offset, seed);
      }
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float e = power_of_2(fmaf(q_times_k_sums[n][i], 1.44269504f, -pivots[0]));
        summed[0] += e;
        const int philox_ = static_cast<int>(philox_four[i % 4]);
        const float to_unit = 5.96046448e-08f * static_cast<float>(static_cast<int>(static_cast<unsigned>(philox_) >> 8));
        const bool keepof_philox_ = to_unit >= p;
        const float e_times_quotient = e * quotient;
        const float where = keepof_philox_ ? e_times_quotient : 0.0f;
        q_times_k_sums[n][i] = where;
      }
    }

    // weights times values: a lane holds of the weights what it multiplies
    #pragma unroll
    for (int n = 0; n < 4; n += 2) {
      const Half rounded = rounded_halves(q_times_k_sums[n], q_times_k_sums[n + 1]);
      #pragma unroll
      for (int d = 0; d < 8; ++d) {
        const Half v_part = load_halves(v_lane + stage * stage_elements + d * 16 * v_pitch + n * 16);
        matmul_v_sums[d] = __builtin_amdgcn_mfma_f32_16x16x32_bf16(v_part, rounded, matmul_v_sums[d], 0, 0, 0);
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
      row_sums[m * sums_stride + (d * 16 + lane / 16 * 4 + i) % 16 * 8 + (d * 16 + lane / 16 * 4 + i) / 16] = matmul_v_sums[d][i];
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
      const bool top_is_minus_inf = top == (-INFINITY);
      const float pivot = top_is_minus_inf ? 0.0f : top;
      const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
      const float one_over_sum_of_exps = 1.0f / sum_of_exps;
      const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;
      const bool top_is_inf = top == INFINITY;
      const float log_ = natural_log(sum_of_exps);
      const float add = pivot + log_;
      const float logsumexp = top_is_inf ? INFINITY : add;
      if (col == 0) *(logsumexp_ptr + B_H_at * logsumexp_stride_B_H + row * logsumexp_stride_S) = logsumexp;
      Vec<__bf16, 8> out0_vec;
      const Vec<float, 8> matmul_v_total = load<8>(row_sums + m * sums_stride + col);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float matmul_v = matmul_v_total.at[j];
        const float matmul_v_times_inverse_sum = matmul_v * inverse_sum;
        out0_vec.at[j] = static_cast<__bf16>(matmul_v_times_inverse_sum);
      }
      store<8>(out0_ptr + B_H_at * out0_stride_B_H + row * out0_stride_S + col, out0_vec);
    }
  }
}
