// moe_router_gpt_oss  bf16[T, E], bf16[E] -> f32[T, K], i32[T, K]  at T=65536 E=128 K=4
// top-k, then softmax of what was chosen: weights and experts of each token.
//
//     def moe_router_gpt_oss(logits, bias):
//         best, experts = F.topk(F.cast(logits + bias, bf16), K)
//         return F.softmax(best), experts
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// selects  4 of 128 columns a row by cast, largest first; NaN before all, ties by column, -inf never
// tile     4 threads a row, 128 rows a block; cast in registers, the best 4 by a network, 4 at a time
// traffic  18.9 MB moved, 18.9 MB ideal, 87.0 MB unfused in 4 launches
// floor    9.3 us at 2.039 TB/s; memory-bound at 1.49 flop/B
// rounding cast to bf16 by an explicit cast; f32 between
// needs    rows of 128 elements, next to each other; logits, bias: address and strides in multiples of
//          16 B; bias [E] shared by every row
//
// method   bitonic top-k in registers (Shanbhag, Pirk & Madden, SIGMOD 2018) by 4 lanes a row. A key
//          and its column are one word of 32 bits; 4 words at a time are sorted, the best of them and
//          of those before stay, and so do the best of all lanes
// sections words     a key's order above its column: the larger word is the one to choose
//          choose    the best words, by Batcher's networks: they are sorted, and merged
//          write     what is computed at the chosen columns

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

// x rounded to bf16, nearest even
__device__ __forceinline__ float round_bf16(float x) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(0.0f, x);
  return __uint_as_float(reinterpret_cast<const unsigned&>(pair));
}

// a bf16 is an f32's upper half. The compiler joins these steps with those that find x in its word, which it does not with
// what a vendor's function is made of
template <typename T>
__device__ __forceinline__ float widened(const T& x) {
  unsigned short bits;
  memcpy(&bits, &x, sizeof(bits));
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
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

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// the largest value over the 4 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v) {
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
}

// the sum over the 4 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v) {
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

// a candidate as one number: of two, the larger is the one to choose. Its upper half is the order of its key, an integer
// that grows with the key; its lower half is the column, counted from the row's end, for ties go to lower columns
typedef unsigned Entry;
constexpr int last_place = 127;  // the first column's
constexpr Entry masked = 0x007fffffu;  // no entry of -inf is larger: it is never chosen

// the orders of two keys of 16 bits: of positive ones the top bit is set, of negative ones every bit is flipped. NaN is
// above all numbers, and -0 is 0
__device__ __forceinline__ unsigned orders_of(unsigned pair) {
  unsigned bits, signs;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(bits) : "r"(pair), "r"(0x3f803f80u), "r"(0u));
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(signs) : "r"(bits), "r"(bits), "r"(0xbb99u));
  return bits ^ (signs | 0x80008000u);
}

// two keys, which bf16 holds as they are, in one word: the first in its lower half
__device__ __forceinline__ unsigned pair_of(float first, float second) {
  return __float_as_uint(first) >> 16 | (__float_as_uint(second) & 0xffff0000u);
}

// the entries of the keys whose orders are in a word's lower and in its upper half, as their spots are in another
__device__ __forceinline__ Entry first_entry(unsigned orders, unsigned spots) {
  return __byte_perm(orders, spots, 0x1054);
}

__device__ __forceinline__ Entry second_entry(unsigned orders, unsigned spots) {
  return __byte_perm(orders, spots, 0x3276);
}

__device__ __forceinline__ float key_of(Entry entry) {
  const unsigned flips = static_cast<unsigned>(static_cast<int>(~entry) >> 31) | 0x80000000u;
  return __uint_as_float((entry ^ flips) & 0xffff0000u);
}

__device__ __forceinline__ int column_of(Entry entry) {
  return last_place - static_cast<int>(entry & 0xffffu);
}

// the larger of two comes first
__device__ __forceinline__ void exchange(Entry& a, Entry& b) {
  const Entry less = min(a, b);
  a = max(a, b);
  b = less;
}

// 4 entries in order, the largest first: Batcher's odd-even merge sort
__device__ __forceinline__ void sort_entries(Entry (&entries)[4]) {
  #pragma unroll
  for (int run = 1; run < 4; run *= 2) {
    #pragma unroll
    for (int step = run; step > 0; step /= 2) {
      #pragma unroll
      for (int q = step % run; q + step < 4; ++q) {
        const bool upper = (q - step % run) / step % 2;  // the partner of one before it
        const bool apart = q / (2 * run) != (q + step) / (2 * run);  // they are of two runs
        if (!upper && !apart) exchange(entries[q], entries[q + step]);
      }
    }
  }
}

// N entries that fall and then rise, or the other way round, in order: the largest first
template <int N>
__device__ __forceinline__ void order_entries(Entry (&entries)[N]) {
  #pragma unroll
  for (int step = N / 2; step > 0; step /= 2) {
    #pragma unroll
    for (int q = 0; q < N; ++q) {
      if (!(q & step)) exchange(entries[q], entries[q + step]);
    }
  }
}

// the best of two sorted lists
__device__ __forceinline__ void merge_best(Entry (&best)[4], const Entry (&others)[4]) {
  #pragma unroll
  for (int q = 0; q < 4; ++q) best[q] = max(best[q], others[3 - q]);
  order_entries(best);
}

// the best of 2 N keys, the largest first: 4 of them at a time are sorted
template <int N>
__device__ __forceinline__ void best_of(
    Entry (&best)[4], const unsigned (&orders)[N], const unsigned (&spots)[N]) {
  #pragma unroll
  for (int from = 0; from < 2 * N; from += 4) {
    Entry next[4];
    #pragma unroll
    for (int q = 0; q < 4; ++q) {
      next[q] = 0;
      const int word = (from + q) / 2;
      if (word >= N) continue;
      next[q] = (from + q) % 2 ? second_entry(orders[word], spots[word]) : first_entry(orders[word], spots[word]);
    }
    sort_entries(next);
    if (from) {
      merge_best(best, next);
    } else {
      #pragma unroll
      for (int q = 0; q < 4; ++q) best[q] = next[q];
    }
  }
}

// the best of this lane and of the one that differs from it in the bits of step
__device__ __forceinline__ void merge_lanes(Entry (&best)[4], int step) {
  Entry others[4];
  #pragma unroll
  for (int q = 0; q < 4; ++q) others[q] = __shfl_xor_sync(0xffffffffu, best[q], step);
  merge_best(best, others);
}

// by value: of elements of an array that are read in branches some compilers make one that is read by its number
__device__ __forceinline__ Entry either(bool first, Entry a, Entry b) {
  return first ? a : b;
}

// the best of this lane and of the one in the row's other half: each keeps one half of them, in no order
__device__ __forceinline__ void part_best(Entry (&half)[2], const Entry (&best)[4]) {
  #pragma unroll
  for (int q = 0; q < 2; ++q) half[q] = max(best[q], __shfl_xor_sync(0xffffffffu, best[3 - q], 2));
}

// of what all lanes of a half have, the part of this one
__device__ __forceinline__ void take_own(Entry (&own)[1], const Entry (&half)[2], int lane) {
  own[0] = half[0];
  own[0] = either(lane % 2 == 1, half[1], own[0]);
}

extern "C" __global__ void __launch_bounds__(512)
moe_router_gpt_oss(
    const __nv_bfloat16* __restrict__ logits_ptr,
    const __nv_bfloat16* __restrict__ bias_ptr,
    float* __restrict__ softmax_ptr,
    int* __restrict__ experts_ptr,
    long long rows,
    long long logits_stride,
    long long softmax_stride,
    long long experts_stride)
{
  constexpr int row_threads = 4;
  constexpr int block_rows = 128;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 4 threads that share a row
  const long long own_row = static_cast<long long>(blockIdx.x) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const __nv_bfloat16* const logits_row = logits_ptr + row * logits_stride;
  float* const softmax_row = softmax_ptr + row * softmax_stride;
  int* const experts_row = experts_ptr + row * experts_stride;
  float cast_kept[4][8];

  // pass 1 of 2: read logits, bias; keep cast
  Vec<__nv_bfloat16, 8> logits_vec[4];
  Vec<__nv_bfloat16, 8> bias_vec[4];
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    logits_vec[v] = load<8>(logits_row + col);
    bias_vec[v] = load<8>(bias_ptr + col);
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float logits = widened(logits_vec[v].at[j]);
      const float bias = widened(bias_vec[v].at[j]);
      const float add = logits + bias;
      const float cast = round_bf16(add);
      cast_kept[v][j] = cast;
    }
  }

  // ---- words
  // a lane's keys, two in one word
  float keys[32];
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float cast = cast_kept[v][j];
      keys[v * 8 + j] = cast;
    }
  }
  unsigned pairs[16];
  #pragma unroll
  for (int q = 0; q < 16; ++q) pairs[q] = pair_of(keys[q * 2], keys[q * 2 + 1]);

  // ---- choose
  constexpr int first_place = 103, row_step = 32;  // of the first lane, and of vectors that follow
  // a lane's best; then those of all lanes
  unsigned orders[16], spots[16];  // of the first lane's columns
  #pragma unroll
  for (int q = 0; q < 16; ++q) {
    orders[q] = orders_of(pairs[q]);
    spots[q] = (first_place - (q * 2 / 8 * row_step + q * 2 % 8)) * 0x10001u - 0x10000u;
  }
  Entry best[4];
  best_of(best, orders, spots);
  #pragma unroll
  for (int q = 0; q < 4; ++q) best[q] += (3 - lane) * 8;
  merge_lanes(best, 1);
  // the better half of the best goes to the first half of the lanes
  Entry half[2], beyond[2];
  part_best(half, best);
  #pragma unroll
  for (int q = 0; q < 2; ++q) beyond[q] = __shfl_xor_sync(0xffffffffu, half[1 - q], 2);
  #pragma unroll
  for (int q = 0; q < 2; ++q) half[q] = lane < 2 ? max(half[q], beyond[q]) : min(half[q], beyond[q]);
  order_entries(half);
  Entry picks[1];  // of the row's best, those of this lane
  take_own(picks, half, lane);

  // ---- write
  // the 4 chosen, pass 1 of 3 over them: top = max(best_); write experts
  float top_part = -INFINITY;
  if (live && lane < 4) {
    const Entry entry = picks[0];
    const int experts = entry > masked ? column_of(entry) : -1;
    const float best_ = key_of(entry);
    top_part = larger(top_part, best_);
    experts_row[lane] = experts;
  }
  const float top = row_max(top_part);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // the 4 chosen, pass 2 of 3 over them: sum_of_exps = sum(e)
  float sum_of_exps_part = 0.0f;
  float e_kept;
  if (live && lane < 4) {
    const Entry entry = picks[0];
    const float best_ = key_of(entry);
    const float best_minus_pivot = best_ - pivot;
    const float e = exponential(best_minus_pivot);
    e_kept = e;
    sum_of_exps_part += e;
  }
  const float sum_of_exps = row_sum(sum_of_exps_part);
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // the 4 chosen, pass 3 of 3 over them: write softmax
  if (live && lane < 4) {
    const float e = e_kept;
    const float softmax = e * inverse_sum;
    softmax_row[lane] = softmax;
  }
}
