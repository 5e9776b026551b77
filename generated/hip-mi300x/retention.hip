// retention  bf16[B, H, S, D], bf16[B, H, S, D], bf16[B, H, S, E], f32[H, 1, 1] -> bf16[B, H, S, E]  at B=1 H=32 S=4096 D=128 E=128
// (q @ k.mT * decay) @ v: weights decay as tokens age, by a rate of each head; later tokens are not read.
//
//     def retention(q, k, v, log_rate):
//         scores = q @ k.mT * D**-0.5
//         row, col = F.row_index(scores), F.col_index(scores)
//         decay = F.where(col <= row, F.exp(-F.exp(log_rate) * F.cast(row - col, f32)), 0.0)
//         weighed = scores * decay
//         return weighed @ v
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s, 1307 TFLOP/s for products
// tile     32 queries a block of 2 warps, tiles of 32 keys, the next tile in registers meanwhile; of
//          keys behind the last that a block's rows need, none are read; conditions are tested in tiles
//          that an end cuts
// traffic  134.2 MB moved, 134.2 MB ideal, 4429.2 MB with products apart, 19763.6 MB unfused in 12
//          launches
// floor    105.1 us at 1307 TFLOP/s for products; compute-bound at 1024.25 flop/B
// rounding weight to bf16 where it meets v; out to bf16 when stored; f32 between
// needs    S=4096, D=128, E=128; rows of all operands next to each other; q, k, v, out: address and
//          strides in multiples of 16 B

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

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// queries of a block, keys of a tile, and all keys
constexpr int tile_rows = 32, tile_keys = 32, keys = 4096, threads = 128;
// elements from one line in shared memory to the next: lanes read from different banks at once
constexpr int q_pitch = 144, k_pitch = 144, v_pitch = 36;
constexpr int v_at = 4608, stage_elements = 9216;  // of a tile's values, and to the next stage
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

extern "C" __global__ void __launch_bounds__(128)
retention(
    const __bf16* __restrict__ q_ptr,
    const __bf16* __restrict__ k_ptr,
    const __bf16* __restrict__ v_ptr,
    const float* __restrict__ log_rate_ptr,
    __bf16* __restrict__ out_ptr,
    long long B_size,
    long long H_size,
    long long S_size,
    long long q_stride_B,
    long long q_stride_H,
    long long q_stride_S,
    long long k_stride_B,
    long long k_stride_H,
    long long k_ld,
    long long v_stride_B,
    long long v_stride_H,
    long long v_ld,
    long long log_rate_stride_H,
    long long out_stride_B,
    long long out_stride_H,
    long long out_stride_S)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int warp_row = threadIdx.x / 64 * 16;  // the warp's first of the tile
  const long long rows = S_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const long long B_at = blockIdx.x / tiles_down / H_size;
  const long long H_at = blockIdx.x / tiles_down % H_size;
  // the last rows first: they need the most keys
  const long long row0 = static_cast<long long>(tiles_down - 1 - blockIdx.x % tiles_down) * tile_rows;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;

  // what the mask leaves of a row's keys
  struct Ends { long long end, free_end; };
  const auto ends_of = [&](long long row) {
    const int row_number = static_cast<int>(row);
    return Ends{static_cast<long long>(row_number) + 1, static_cast<long long>(row_number) + 1};
  };
  const Ends top_ends = ends_of(row0), last_ends = ends_of(row0 + rows_here - 1);
  constexpr int first_key = 0;
  const int end_key = within_keys(most(top_ends.end, last_ends.end));
  const int free_end = within_keys(least(top_ends.free_end, last_ends.free_end));

  // what the thread brings of queries, and of each tile of keys and values
  __bf16* const ring = reinterpret_cast<__bf16*>(shared);
  const int q_row = threadIdx.x / 16, q_col = threadIdx.x % 16 * 8;
  const __bf16* const q_from = q_ptr + B_at * q_stride_B + H_at * q_stride_H + row0 * q_stride_S + q_row * q_stride_S + q_col;
  const int k_row = threadIdx.x / 16, k_col = threadIdx.x % 16 * 8;
  const __bf16* const k_from = k_ptr + B_at * k_stride_B + H_at * k_stride_H + k_row * k_ld + k_col;
  const int v_row = threadIdx.x / 16, v_col = threadIdx.x % 16 * 8;
  const __bf16* const v_from = v_ptr + B_at * v_stride_B + H_at * v_stride_H + v_row * v_ld + v_col;
  Vec<__bf16, 8> k_held[4];
  Vec<__bf16, 8> v_held[4];
  const auto fetch_tile = [&](int key0) {
    #pragma unroll
    for (int v = 0; v < 4; ++v) k_held[v] = load_chunk<8>(k_from + (key0 + v * 8) * k_ld, 8);
    #pragma unroll
    for (int v = 0; v < 4; ++v) v_held[v] = load_chunk<8>(v_from + (key0 + v * 8) * v_ld, 8);
  };
  const auto put_tile = [&](int stage) {
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      __bf16* const to = ring + stage * stage_elements;
      store<8>(to + (k_row + v * 8) * k_pitch + k_col, k_held[v]);
    }
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      __bf16* const to = ring + stage * stage_elements + v_at;
      {
        #pragma unroll
        for (int j = 0; j < 8; ++j) to[(j * 16 + v_col / 8) * v_pitch + v_row + v * 8] = v_held[v].at[j];
      }
    }
  };

  // the queries, which all tiles of keys are multiplied with
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const Vec<__bf16, 8> q_vec = load_chunk<8>(q_from + v * 8 * q_stride_S, q_row + v * 8 < rows_here ? 8 : 0);
    store<8>(ring + q_at + (q_row + v * 8) * q_pitch + q_col, q_vec);
  }
  if (first_key < end_key) fetch_tile(first_key);

  // one value for all rows of the block
  const float log_rate = *(log_rate_ptr + H_at * log_rate_stride_H);
  const float exp_ = exponential(log_rate);
  const float neg = -exp_;

  // for each row that the lane has elements of: what weights are made of
  int row_number_here[1];
  {
    const int m = warp_row + lane % 16;
    const long long row = row0 + (m < rows_here ? m : rows_here - 1);
    const int row_number = static_cast<int>(row);
    row_number_here[0] = row_number;
  }
  __syncthreads();
  const __bf16* const q_lane = ring + q_at + (warp_row + lane % 16) * q_pitch + lane / 16 * 8;
  const __bf16* const k_lane = ring + lane % 16 * k_pitch + lane / 16 * 8;
  const __bf16* const v_lane = ring + v_at + lane % 16 * v_pitch + lane / 16 * 4;
  Fragment q_part[4];
  #pragma unroll
  for (int k = 0; k < 4; ++k) q_part[k] = load_fragment(q_lane + k * 32);
  __syncthreads();  // the first tile takes the queries' place
  Sums weight_times_v_sums[8] = {};

  for (int key0 = first_key, tile = 0; key0 < end_key; key0 += tile_keys, ++tile) {
    const int stage = tile % 1;
    put_tile(stage);
    __syncthreads();
    if (key0 + tile_keys < end_key) {  // the next tile, while this one is multiplied
      fetch_tile(key0 + tile_keys);
    }

    // a warp's 16 queries times the tile's keys
    Sums q_times_k_sums[2] = {};
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        const Fragment k_part = load_fragment(k_lane + stage * stage_elements + n * 16 * k_pitch + k * 32);
        q_times_k_sums[n] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(k_part.part[0], q_part[k].part[0], q_times_k_sums[n], 0, 0, 0);
        q_times_k_sums[n] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(k_part.part[1], q_part[k].part[1], q_times_k_sums[n], 0, 0, 0);
      }
    }

    // scores become weights
    // numbers of the thread's first column; those of others are as far from them as their columns
    float cast_first[1];
    constexpr int last_exact = 1 << 24;  // all whole numbers up to here are floats
    bool exact = true;
    const int row_number = row_number_here[0];
    const int col_number = key0 + lane / 16 * 4;
    const int row_number_minus_col_number = static_cast<int>(static_cast<unsigned>(row_number) - col_number);
    const float cast = static_cast<float>(row_number_minus_col_number);
    cast_first[0] = cast;
    exact = exact && fabsf(cast) <= last_exact - tile_keys;
    if (key0 + tile_keys <= free_end && exact) {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float q_times_k = q_times_k_sums[n][i];
          const float cast = cast_first[0] - static_cast<float>(n * 16 + i);
          const float neg_times_cast = neg * cast;
          const float decay = exponential(neg_times_cast);
          const float q_times_k_times_decay = q_times_k * decay;
          q_times_k_sums[n][i] = q_times_k_times_decay;
        }
      }
    } else {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int col_number = key0 + n * 16 + lane / 16 * 4 + i;
          const float q_times_k = q_times_k_sums[n][i];
          const int row_number = row_number_here[0];
          const bool le = col_number <= row_number;
          const int row_number_minus_col_number = static_cast<int>(static_cast<unsigned>(row_number) - col_number);
          const float cast = static_cast<float>(row_number_minus_col_number);
          const float neg_times_cast = neg * cast;
          const float decay = exponential(neg_times_cast);
          const float q_times_k_times_decay = q_times_k * decay;
          const float weight = le ? q_times_k_times_decay : 0.0f;
          q_times_k_sums[n][i] = weight;
        }
      }
    }

    // weights times values: a lane holds of the weights what it multiplies
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      const Half rounded = rounded_half(q_times_k_sums[n]);
      #pragma unroll
      for (int d = 0; d < 8; ++d) {
        const Half v_part = load_half(v_lane + stage * stage_elements + d * 16 * v_pitch + n * 16);
        weight_times_v_sums[d] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(v_part, rounded, weight_times_v_sums[d], 0, 0, 0);
      }
    }
    __syncthreads();
  }

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  float* const row_sums = reinterpret_cast<float*>(shared);
  __syncthreads();
  #pragma unroll
  for (int d = 0; d < 8; ++d) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = warp_row + lane % 16;
      row_sums[m * sums_stride + (d * 16 + lane / 16 * 4 + i) % 16 * 8 + (d * 16 + lane / 16 * 4 + i) / 16] = weight_times_v_sums[d][i];
    }
  }
  __syncthreads();

  #pragma unroll 2
  for (int v = 0; v < 4; ++v) {
    const int m = static_cast<int>((v * threads + threadIdx.x) / 16);
    const int col = static_cast<int>((v * threads + threadIdx.x) % 16) * 8;
    if (m < rows_here) {
      const long long row = row0 + m;
      Vec<__bf16, 8> out_vec;
      const Vec<float, 8> weight_times_v_total = load<8>(row_sums + m * sums_stride + col);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float weight_times_v = weight_times_v_total.at[j];
        const float out = weight_times_v * 0.088388346f;
        out_vec.at[j] = static_cast<__bf16>(out);
      }
      store<8>(out_ptr + B_at * out_stride_B + H_at * out_stride_H + row * out_stride_S + col, out_vec);
    }
  }
}
