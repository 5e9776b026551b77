// router_topk  bf16[T, E] -> f32[T, K], i32[T, K]  at T=131072 E=256 K=8
// The K most probable experts of each token, and their probabilities made to add up to 1.
//
//     def router_topk(scores):
//         likely, experts = F.topk(F.softmax(scores), K)
//         weights = likely / F.sum(likely)
//         return weights, experts
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// selects  8 of 256 columns a row by scores, largest first; NaN before all, ties by column, -inf never
// tile     4 threads a row, 128 rows a block; scores in registers, the best 8 by a network, 8 at a time
// traffic  75.5 MB moved, 75.5 MB ideal, 283.6 MB unfused in 4 launches
// floor    37.0 us at 2.039 TB/s; instruction-bound at 3.76 flop/B
// needs    rows of 256 elements, next to each other; scores: address and strides in multiples of 16 B;
//          weights, experts: address and strides in multiples of 8 B
//
// method   bitonic top-k in registers (Shanbhag, Pirk & Madden, SIGMOD 2018) by 4 lanes a row. A key
//          and its column are one word of 32 bits; 8 words at a time are sorted, the best of them and
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

// the vector to p, which is aligned to it
template <int N, typename T>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
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
constexpr int last_place = 255;  // the first column's
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

// 8 entries in order, the largest first: Batcher's odd-even merge sort
__device__ __forceinline__ void sort_entries(Entry (&entries)[8]) {
  #pragma unroll
  for (int run = 1; run < 8; run *= 2) {
    #pragma unroll
    for (int step = run; step > 0; step /= 2) {
      #pragma unroll
      for (int q = step % run; q + step < 8; ++q) {
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
__device__ __forceinline__ void merge_best(Entry (&best)[8], const Entry (&others)[8]) {
  #pragma unroll
  for (int q = 0; q < 8; ++q) best[q] = max(best[q], others[7 - q]);
  order_entries(best);
}

// the best of 2 N keys, the largest first: 8 of them at a time are sorted
template <int N>
__device__ __forceinline__ void best_of(
    Entry (&best)[8], const unsigned (&orders)[N], const unsigned (&spots)[N]) {
  #pragma unroll
  for (int from = 0; from < 2 * N; from += 8) {
    Entry next[8];
    #pragma unroll
    for (int q = 0; q < 8; ++q) {
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
      for (int q = 0; q < 8; ++q) best[q] = next[q];
    }
  }
}

// the best of this lane and of the one that differs from it in the bits of step
__device__ __forceinline__ void merge_lanes(Entry (&best)[8], int step) {
  Entry others[8];
  #pragma unroll
  for (int q = 0; q < 8; ++q) others[q] = __shfl_xor_sync(0xffffffffu, best[q], step);
  merge_best(best, others);
}

// by value: of elements of an array that are read in branches some compilers make one that is read by its number
__device__ __forceinline__ Entry either(bool first, Entry a, Entry b) {
  return first ? a : b;
}

// the best of this lane and of the one in the row's other half: each keeps one half of them, in no order
__device__ __forceinline__ void part_best(Entry (&half)[4], const Entry (&best)[8]) {
  #pragma unroll
  for (int q = 0; q < 4; ++q) half[q] = max(best[q], __shfl_xor_sync(0xffffffffu, best[7 - q], 2));
}

// of what all lanes of a half have, the part of this one
__device__ __forceinline__ void take_own(Entry (&own)[2], const Entry (&half)[4], int lane) {
  #pragma unroll
  for (int q = 0; q < 2; ++q) {
    own[q] = half[q];
    own[q] = either(lane % 2 == 1, half[2 + q], own[q]);
  }
}

extern "C" __global__ void __launch_bounds__(512)
router_topk(
    const __nv_bfloat16* __restrict__ scores_ptr,
    float* __restrict__ weights_ptr,
    int* __restrict__ experts_ptr,
    long long rows,
    long long scores_stride,
    long long weights_stride,
    long long experts_stride)
{
  constexpr int row_threads = 4;
  constexpr int block_rows = 128;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 4 threads that share a row
  const long long own_row = static_cast<long long>(blockIdx.x) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const __nv_bfloat16* const scores_row = scores_ptr + row * scores_stride;
  float* const weights_row = weights_ptr + row * weights_stride;
  int* const experts_row = experts_ptr + row * experts_stride;
  Vec<__nv_bfloat16, 8> scores_vec[8];

  // pass 1 of 3: read scores; keep scores; top = max(scores)
  float top_part = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    scores_vec[v] = load<8>(scores_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float scores = widened(scores_vec[v].at[j]);
      top_part = larger(top_part, scores);
    }
  }
  const float top = row_max(top_part);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // pass 2 of 3: sum_of_exps = sum(e)
  float sum_of_exps_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float scores = widened(scores_vec[v].at[j]);
      const float scores_minus_pivot = scores - pivot;
      const float e = exponential(scores_minus_pivot);
      sum_of_exps_part += e;
    }
  }
  const float sum_of_exps = row_sum(sum_of_exps_part);
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // ---- words
  // a lane's keys, two in one word
  float keys[64];
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float scores = widened(scores_vec[v].at[j]);
      keys[v * 8 + j] = scores;
    }
  }
  unsigned pairs[32];
  #pragma unroll
  for (int q = 0; q < 32; ++q) pairs[q] = pair_of(keys[q * 2], keys[q * 2 + 1]);

  // ---- choose
  constexpr int first_place = 231, row_step = 32;  // of the first lane, and of vectors that follow
  // a lane's best; then those of all lanes
  unsigned orders[32], spots[32];  // of the first lane's columns
  #pragma unroll
  for (int q = 0; q < 32; ++q) {
    orders[q] = orders_of(pairs[q]);
    spots[q] = (first_place - (q * 2 / 8 * row_step + q * 2 % 8)) * 0x10001u - 0x10000u;
  }
  Entry best[8];
  best_of(best, orders, spots);
  #pragma unroll
  for (int q = 0; q < 8; ++q) best[q] += (3 - lane) * 8;
  merge_lanes(best, 1);
  // the better half of the best goes to the first half of the lanes
  Entry half[4], beyond[4];
  part_best(half, best);
  #pragma unroll
  for (int q = 0; q < 4; ++q) beyond[q] = __shfl_xor_sync(0xffffffffu, half[3 - q], 2);
  #pragma unroll
  for (int q = 0; q < 4; ++q) half[q] = lane < 2 ? max(half[q], beyond[q]) : min(half[q], beyond[q]);
  order_entries(half);
  Entry picks[2];  // of the row's best, those of this lane
  take_own(picks, half, lane);

  // ---- write
  // the 8 chosen, pass 1 of 2 over them: sum_of_likely = sum(likely); write experts
  float sum_of_likely_part = 0.0f;
  float likely_kept[2];
  Vec<int, 2> experts_vec;
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Entry entry = picks[r];
    const int experts = entry > masked ? column_of(entry) : -1;
    const float take_ = key_of(entry);
    const bool experts_below_0 = experts < 0;
    const float take_minus_pivot = take_ - pivot;
    const float exp_ = exponential(take_minus_pivot);
    const float mul = exp_ * inverse_sum;
    const float likely = experts_below_0 ? 0.0f : mul;
    likely_kept[r] = likely;
    sum_of_likely_part += likely;
    experts_vec.at[r] = experts;
  }
  if (live) store(experts_row + lane * 2, experts_vec);
  const float sum_of_likely = row_sum(sum_of_likely_part);

  // the 8 chosen, pass 2 of 2 over them: write weights
  Vec<float, 2> weights_vec;
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float likely = likely_kept[r];
    const float weights = likely / sum_of_likely;
    weights_vec.at[r] = weights;
  }
  if (live) store(weights_row + lane * 2, weights_vec);
}
