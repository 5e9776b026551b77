// dropout_attention  bf16[B, H, S, D], bf16[B, H, T, D], bf16[B, H, T, D], f32, i32[1], i32[1] -> bf16[B, H, S, D], f32[B, H, S, 1]  at
//   B=1 H=32 S=4096 D=128 T=4096
// dropout(softmax(scores)) @ v and logsumexp(scores); seed and offset lie on the device, where graphs read them.
//
//     def dropout_attention(q, k, v, p, seed, offset):
//         scores = F.causal(q @ k.mT * D**-0.5)
//         return F.dropout(F.softmax(scores), p, seed, offset) @ v, F.logsumexp(scores)
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// tile     64 queries a block of 4 warps, tiles of 64 keys, the next tile copied meanwhile; of keys
//          behind the last that a block's rows need, none are read; conditions are tested in tiles that
//          an end cuts
// traffic  134.7 MB moved, 134.7 MB ideal, 4429.7 MB with products apart, 11947.5 MB unfused in 7
//          launches
// floor    440.6 us at 312 TFLOP/s for products; compute-bound at 1020.26 flop/B
// rounding where, before it is divided by its row's sum, to bf16 where it meets v; out0 to bf16 when
//          stored; f32 between
// needs    D=128, T=4096; rows of all operands next to each other; q, k, v, out0: address and strides
//          in multiples of 16 B

#include <cuda_bf16.h>

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
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) of no subnormal x: within 2^-22 from 1/2 to 2, within 2 ulp elsewhere
__device__ __forceinline__ float log_2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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
constexpr int tile_rows = 64, tile_keys = 64, keys = 4096, threads = 128;
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

// random bits of a lane's elements of 8 columns, two of each of its rows. It and the lane beside it have four neighbours of
// both rows: each draws for one row, from the index of the four on, and gives the other one its half
__device__ __forceinline__ void draw_for_two(unsigned (&bits)[4], long long index, int offset, int seed) {
  unsigned words[4];
  philox_words(words, index, offset, seed);
  const bool odd = threadIdx.x % 2;
  #pragma unroll
  for (int j = 0; j < 2; ++j) {
    const unsigned given = odd ? words[j] : words[2 + j];
    const unsigned got = __shfl_xor_sync(0xffffffffu, given, 1);
    bits[j] = odd ? got : words[j];
    bits[2 + j] = odd ? words[2 + j] : got;
  }
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

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
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

extern "C" __global__ void __launch_bounds__(128)
dropout_attention(
    const __nv_bfloat16* __restrict__ q_ptr,
    const __nv_bfloat16* __restrict__ k_ptr,
    const __nv_bfloat16* __restrict__ v_ptr,
    float p,
    const int* __restrict__ seed_ptr,
    const int* __restrict__ offset_ptr,
    __nv_bfloat16* __restrict__ out0_ptr,
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
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16;  // the warp's first of the tile
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
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared);
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const int q_row = threadIdx.x / 16, q_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const q_from = q_ptr + B_H_at * q_stride_B_H + row0 * q_stride_S + q_row * q_stride_S + q_col;
  const unsigned q_to = ring_at + (q_at + q_row * q_pitch + q_col) * 2;
  const int k_row = threadIdx.x / 16, k_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const k_from = k_ptr + B_H_at * k_stride_B_H + k_row * k_ld + k_col;
  const unsigned k_to = ring_at + (k_row * k_pitch + k_col) * 2;
  const int v_row = threadIdx.x / 16, v_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const v_from = v_ptr + B_H_at * v_stride_B_H + v_row * v_ld + v_col;
  const unsigned v_to = ring_at + (v_at + v_row * v_pitch + v_col) * 2;
  const auto copy_tile = [&](int key0, int stage) {
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      copy_chunk<8>(k_to + v * (8 * k_pitch * 2) + stage * stage_bytes, k_from + (key0 + v * 8) * k_ld, 8);
    }
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      copy_chunk<8>(v_to + v * (8 * v_pitch * 2) + stage * stage_bytes, v_from + (key0 + v * 8) * v_ld, 8);
    }
    commit_copies();
  };

  // the queries, which all tiles of keys are multiplied with
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    copy_chunk<8>(q_to + v * (8 * q_pitch * 2), q_from + v * 8 * q_stride_S, q_row + v * 8 < rows_here ? 8 : 0);
  }
  if (first_key < end_key) copy_tile(first_key, 0);
  commit_copies();

  // one value for all rows of the block
  const int seed = *(seed_ptr);
  const int offset = *(offset_ptr);

  // for each row that the lane has elements of: the largest logit so far, and sums of exponentials against it
  float largest[2], pivots[2], summed[2];
  int last_here[2];
  long long first_element[2];  // of the row's scores, in row-major order
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = -INFINITY;
    pivots[r] = 0.0f;
    summed[r] = 0.0f;
    const int m = warp_row + lane / 4 + r * 8;
    const long long row = row0 + (m < rows_here ? m : rows_here - 1);
    const int last = static_cast<int>(row);
    last_here[r] = last;
    first_element[r] = (B_H_at * S_size + row) * keys;
  }
  wait_copies<0>();
  __syncthreads();
  const unsigned q_lane = ring_at + (q_at + (warp_row + lane % 16) * q_pitch + lane / 16 * 8) * 2;
  const unsigned k_lane = ring_at + ((lane % 8 + lane / 16 * 8) * k_pitch + lane / 8 % 2 * 8) * 2;
  const unsigned v_lane = ring_at + (v_at + lane % 16 * v_pitch + lane / 16 * 8) * 2;
  unsigned q_part[8][4];
  #pragma unroll
  for (int k = 0; k < 8; ++k) load_matrices(q_part[k], q_lane + k * 32);
  float matmul_v_sums[16][4] = {};

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

    // scores become logits, and the largest of a row is found among those of all lanes that share it
    float peaks[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) peaks[r] = largest[r];
    if (key0 + tile_keys <= free_end) {
      #pragma unroll
      for (int n = 0; n < 8; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float q_times_k = q_times_k_sums[n][i];
          const float mul = q_times_k * 0.088388346f;
          q_times_k_sums[n][i] = mul;
          peaks[i / 2] = larger(peaks[i / 2], q_times_k_sums[n][i]);
        }
      }
    } else {
      #pragma unroll
      for (int n = 0; n < 8; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int col_index = key0 + n * 8 + lane % 4 * 2 + i % 2;
          const float q_times_k = q_times_k_sums[n][i];
          const int last = last_here[i / 2];
          const float mul = q_times_k * 0.088388346f;
          const bool keep = col_index <= last;
          const float scores = keep ? mul : (-INFINITY);
          q_times_k_sums[n][i] = scores;
          peaks[i / 2] = larger(peaks[i / 2], q_times_k_sums[n][i]);
        }
      }
    }

    // what was summed so far shrinks by as much as the largest logit grew
    float shrinks[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      #pragma unroll
      for (int step = 1; step < 4; step *= 2) peaks[r] = larger(peaks[r], partner(peaks[r], step));
      const float pivot = peaks[r] == -INFINITY ? 0.0f : peaks[r] * 1.44269504f;  // log2 of e, as powers are of 2
      shrinks[r] = largest[r] == -INFINITY ? 0.0f : power_of_2(pivots[r] - pivot);
      largest[r] = peaks[r];
      pivots[r] = pivot;
      summed[r] *= shrinks[r];
    }
    #pragma unroll
    for (int d = 0; d < 16; ++d) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) matmul_v_sums[d][i] *= shrinks[i / 2];
    }

    // logits become weights
    #pragma unroll
    for (int n = 0; n < 8; ++n) {
      unsigned philox_four[4];
      {
        constexpr int i = 0;
        const int col_index = key0 + n * 8 + lane % 4 * 2 + i % 2;
        draw_for_two(philox_four, (lane % 2 ? first_element[1] : first_element[0]) + (col_index & ~3), offset, seed);
      }
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float e = power_of_2(fmaf(q_times_k_sums[n][i], 1.44269504f, -pivots[i / 2]));
        summed[i / 2] += e;
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
        multiply_add(matmul_v_sums[2 * d], rounded, v_part[0], v_part[1]);
        multiply_add(matmul_v_sums[2 * d + 1], rounded, v_part[2], v_part[3]);
      }
    }
  }

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  float* const row_sums = reinterpret_cast<float*>(shared);
  float* const row_largest = row_sums + tile_rows * sums_stride;
  float* const row_summed = row_largest + tile_rows;
  __syncthreads();
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int m = warp_row + lane / 4 + r * 8;
    #pragma unroll
    for (int step = 1; step < 4; step *= 2) summed[r] += partner(summed[r], step);
    if (lane % 4 == 0) {
      row_largest[m] = largest[r];
      row_summed[m] = summed[r];
    }
  }
  #pragma unroll
  for (int d = 0; d < 16; ++d) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = warp_row + i / 2 % 2 * 8 + lane / 4;
      row_sums[m * sums_stride + d * 8 + lane % 4 * 2 + i % 2] = matmul_v_sums[d][i];
    }
  }
  __syncthreads();

  #pragma unroll 2
  for (int v = 0; v < 8; ++v) {
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
      Vec<__nv_bfloat16, 8> out0_vec;
      const Vec<float, 8> matmul_v_total = load<8>(row_sums + m * sums_stride + col);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float matmul_v = matmul_v_total.at[j];
        const float matmul_v_times_inverse_sum = matmul_v * inverse_sum;
        out0_vec.at[j] = __float2bfloat16_rn(matmul_v_times_inverse_sum);
      }
      store<8>(out0_ptr + B_H_at * out0_stride_B_H + row * out0_stride_S + col, out0_vec);
    }
  }
}
