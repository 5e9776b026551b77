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
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// tile     128 queries a block of 8 warps, tiles of 64 keys, the next tile copied meanwhile; of keys
//          behind the last that a block's rows need, none are read; conditions are tested in tiles that
//          an end cuts
// traffic  134.2 MB moved, 134.2 MB ideal, 4429.2 MB with products apart, 19763.6 MB unfused in 12
//          launches
// floor    440.6 us at 312 TFLOP/s for products; compute-bound at 1024.25 flop/B
// rounding weight to bf16 where it meets v; out to bf16 when stored; f32 between
// needs    S=4096, D=128, E=128; rows of all operands next to each other; q, k, v, out: address and
//          strides in multiples of 16 B

#include <cuda_bf16.h>

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

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// queries of a block, keys of a tile, and all keys
constexpr int tile_rows = 128, tile_keys = 64, keys = 4096, threads = 256;
// elements from one line in shared memory to the next, an odd number of 16 bytes: what is read at once
// of 8 lines lies in different banks
constexpr int q_pitch = 136, k_pitch = 136, v_pitch = 136;
constexpr int v_at = 8704, stage_elements = 17408;  // of a tile's values, and to the next stage
constexpr int stage_bytes = 2 * stage_elements;
constexpr int q_at = 17408;
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

// 8 elements on their way from global to shared memory, Width with each copy; zeros where `count` is 0
template <int Width, typename T>
__device__ __forceinline__ void copy_chunk(unsigned to, const T* from, int count) {
  if constexpr (Width == 8) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(to), "l"(from), "r"(count * 2) : "memory");
  } else {
    #pragma unroll
    for (int j = 0; j < 8; j += Width) {
      const int left = count < j ? 0 : count - j < Width ? count - j : Width;
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
          :: "r"(to + j * 2), "l"(from + j), "n"(Width * 2), "r"(left * 2) : "memory");
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

// four matrices of 8 x 16 bytes, from the rows whose places the lanes give
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// the same, transposed on the way
__device__ __forceinline__ void load_matrices_across(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// two numbers, rounded, in one register
__device__ __forceinline__ unsigned rounded_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}

// sums += left right, 16 rows by 8 columns
__device__ __forceinline__ void multiply_add(
    float (&sums)[4], const unsigned (&left)[4], unsigned right_0, unsigned right_1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1));
}

extern "C" __global__ void __launch_bounds__(256)
retention(
    const __nv_bfloat16* __restrict__ q_ptr,
    const __nv_bfloat16* __restrict__ k_ptr,
    const __nv_bfloat16* __restrict__ v_ptr,
    const float* __restrict__ log_rate_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
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
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16;  // the warp's first of the tile
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
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared);
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const int q_row = threadIdx.x / 16, q_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const q_from = q_ptr + B_at * q_stride_B + H_at * q_stride_H + row0 * q_stride_S + q_row * q_stride_S + q_col;
  const unsigned q_to = ring_at + (q_at + q_row * q_pitch + q_col) * 2;
  const int k_row = threadIdx.x / 16, k_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const k_from = k_ptr + B_at * k_stride_B + H_at * k_stride_H + k_row * k_ld + k_col;
  const unsigned k_to = ring_at + (k_row * k_pitch + k_col) * 2;
  const int v_row = threadIdx.x / 16, v_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const v_from = v_ptr + B_at * v_stride_B + H_at * v_stride_H + v_row * v_ld + v_col;
  const unsigned v_to = ring_at + (v_at + v_row * v_pitch + v_col) * 2;
  const auto copy_tile = [&](int key0, int stage) {
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      copy_chunk<8>(k_to + v * (16 * k_pitch * 2) + stage * stage_bytes, k_from + (key0 + v * 16) * k_ld, 8);
    }
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      copy_chunk<8>(v_to + v * (16 * v_pitch * 2) + stage * stage_bytes, v_from + (key0 + v * 16) * v_ld, 8);
    }
    commit_copies();
  };

  // the queries, which all tiles of keys are multiplied with
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    copy_chunk<8>(q_to + v * (16 * q_pitch * 2), q_from + v * 16 * q_stride_S, q_row + v * 16 < rows_here ? 8 : 0);
  }
  if (first_key < end_key) copy_tile(first_key, 0);
  commit_copies();

  // one value for all rows of the block
  const float log_rate = *(log_rate_ptr + H_at * log_rate_stride_H);
  const float exp_ = exponential(log_rate);
  const float neg = -exp_;

  // for each row that the lane has elements of: what weights are made of
  int row_number_here[2];
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int m = warp_row + lane / 4 + r * 8;
    const long long row = row0 + (m < rows_here ? m : rows_here - 1);
    const int row_number = static_cast<int>(row);
    row_number_here[r] = row_number;
  }
  wait_copies<0>();
  __syncthreads();
  const unsigned q_lane = ring_at + (q_at + (warp_row + lane % 16) * q_pitch + lane / 16 * 8) * 2;
  const unsigned k_lane = ring_at + ((lane % 8 + lane / 16 * 8) * k_pitch + lane / 8 % 2 * 8) * 2;
  const unsigned v_lane = ring_at + (v_at + lane % 16 * v_pitch + lane / 16 * 8) * 2;
  unsigned q_part[8][4];
  #pragma unroll
  for (int k = 0; k < 8; ++k) load_matrices(q_part[k], q_lane + k * 32);
  float weight_times_v_sums[16][4] = {};

  for (int key0 = first_key, tile = 0; key0 < end_key; key0 += tile_keys, ++tile) {
    const int stage = tile % 2;
    wait_copies<0>();
    __syncthreads();
    if (key0 + tile_keys < end_key) {  // the next tile, while this one is multiplied
      copy_tile(key0 + tile_keys, (tile + 1) % 2);
    }

    // a warp's 16 queries times the tile's keys
    float q_times_k_sums[8][4] = {};
    #pragma unroll
    for (int k = 0; k < 8; ++k) {
      #pragma unroll
      for (int n = 0; n < 8; n += 2) {
        unsigned k_part[4];
        load_matrices(k_part, k_lane + stage * stage_bytes + n * (8 * k_pitch * 2) + k * 32);
        multiply_add(q_times_k_sums[n], q_part[k], k_part[0], k_part[1]);
        multiply_add(q_times_k_sums[n + 1], q_part[k], k_part[2], k_part[3]);
      }
    }

    // scores become weights
    // numbers of the thread's first row and column; others are as far from them as their diagonals
    constexpr int last_exact = 1 << 24;  // all whole numbers up to here are floats
    bool exact = true;
    const int row_number = row_number_here[0];
    const int col_number = key0 + lane % 4 * 2;
    const int row_number_minus_col_number_first = static_cast<int>(static_cast<unsigned>(row_number) - col_number);
    const float cast_first = static_cast<float>(row_number_minus_col_number_first);
    exact = exact && fabsf(cast_first) <= last_exact - tile_keys;
    if (key0 + tile_keys <= free_end && exact) {
      #pragma unroll
      for (int n = 0; n < 8; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float q_times_k = q_times_k_sums[n][i];
          const float cast = cast_first - static_cast<float>(n * 8 + i % 2 - i / 2 % 2 * 8);
          const float neg_times_cast = neg * cast;
          const float decay = exponential(neg_times_cast);
          const float q_times_k_times_decay = q_times_k * decay;
          q_times_k_sums[n][i] = q_times_k_times_decay;
        }
      }
    } else {
      #pragma unroll
      for (int n = 0; n < 8; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int col_number = key0 + n * 8 + lane % 4 * 2 + i % 2;
          const float q_times_k = q_times_k_sums[n][i];
          const int row_number = row_number_here[i / 2];
          const int row_number_minus_col_number = static_cast<int>(static_cast<unsigned>(row_number_minus_col_number_first) - (n * 8
              + i % 2 - i / 2 % 2 * 8));
          const bool le = col_number <= row_number;
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
    for (int n = 0; n < 4; ++n) {
      const unsigned rounded[4] = {
          rounded_pair(q_times_k_sums[2 * n][0], q_times_k_sums[2 * n][1]),
          rounded_pair(q_times_k_sums[2 * n][2], q_times_k_sums[2 * n][3]),
          rounded_pair(q_times_k_sums[2 * n + 1][0], q_times_k_sums[2 * n + 1][1]),
          rounded_pair(q_times_k_sums[2 * n + 1][2], q_times_k_sums[2 * n + 1][3])};
      #pragma unroll
      for (int d = 0; d < 8; ++d) {
        unsigned v_part[4];
        load_matrices_across(v_part, v_lane + stage * stage_bytes + n * (16 * v_pitch * 2) + d * 32);
        multiply_add(weight_times_v_sums[2 * d], rounded, v_part[0], v_part[1]);
        multiply_add(weight_times_v_sums[2 * d + 1], rounded, v_part[2], v_part[3]);
      }
    }
  }

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  float* const row_sums = reinterpret_cast<float*>(shared);
  __syncthreads();
  #pragma unroll
  for (int d = 0; d < 16; ++d) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = warp_row + i / 2 % 2 * 8 + lane / 4;
      row_sums[m * sums_stride + d * 8 + lane % 4 * 2 + i % 2] = weight_times_v_sums[d][i];
    }
  }
  __syncthreads();

  #pragma unroll 2
  for (int v = 0; v < 8; ++v) {
    const int m = static_cast<int>((v * threads + threadIdx.x) / 16);
    const int col = static_cast<int>((v * threads + threadIdx.x) % 16) * 8;
    if (m < rows_here) {
      const long long row = row0 + m;
      Vec<__nv_bfloat16, 8> out_vec;
      const Vec<float, 8> weight_times_v_total = load<8>(row_sums + m * sums_stride + col);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float weight_times_v = weight_times_v_total.at[j];
        const float out = weight_times_v * 0.088388346f;
        out_vec.at[j] = __float2bfloat16_rn(out);
      }
      store<8>(out_ptr + B_at * out_stride_B + H_at * out_stride_H + row * out_stride_S + col, out_vec);
    }
  }
}
