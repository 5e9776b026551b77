// moe_router_mixtral  bf16[T, E] -> f32[T, K], i32[T, K]  at T=65536 E=8 K=2
// softmax, top-k, renormalised: weights and experts of each token.
//
//     def moe_router_mixtral(logits):
//         best, experts = F.topk(logits, K)
//         return F.softmax(best), experts
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// selects  2 of 8 columns a row by logits, largest first; NaN before all, ties by column, -inf never
// tile     1 thread a row, 128 rows a block; logits in registers, the best 2 by a network, 2 at a time
// traffic  2.1 MB moved, 2.1 MB ideal, 2.6 MB unfused in 2 launches
// floor    1.0 us at 2.039 TB/s; memory-bound at 1.06 flop/B
// needs    rows of 8 elements, next to each other; logits: address and strides in multiples of 16 B;
//          softmax, experts: address and strides in multiples of 8 B
//
// method   bitonic top-k in registers (Shanbhag, Pirk & Madden, SIGMOD 2018) by one lane a row. A key
//          and its column are one word of 32 bits; 2 words at a time are sorted, the best of them and
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

// a candidate as one number: of two, the larger is the one to choose. Its upper half is the order of its key, an integer
// that grows with the key; its lower half is the column, counted from the row's end, for ties go to lower columns
typedef unsigned Entry;
constexpr int last_place = 7;  // the first column's
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

// 2 entries in order, the largest first: Batcher's odd-even merge sort
__device__ __forceinline__ void sort_entries(Entry (&entries)[2]) {
  exchange(entries[0], entries[1]);
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
__device__ __forceinline__ void merge_best(Entry (&best)[2], const Entry (&others)[2]) {
  #pragma unroll
  for (int q = 0; q < 2; ++q) best[q] = max(best[q], others[1 - q]);
  order_entries(best);
}

// the best of 2 N keys, the largest first: 2 of them at a time are sorted
template <int N>
__device__ __forceinline__ void best_of(
    Entry (&best)[2], const unsigned (&orders)[N], const unsigned (&spots)[N]) {
  #pragma unroll
  for (int from = 0; from < 2 * N; from += 2) {
    Entry next[2];
    #pragma unroll
    for (int q = 0; q < 2; ++q) {
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
      for (int q = 0; q < 2; ++q) best[q] = next[q];
    }
  }
}

extern "C" __global__ void __launch_bounds__(128)
moe_router_mixtral(
    const __nv_bfloat16* __restrict__ logits_ptr,
    float* __restrict__ softmax_ptr,
    int* __restrict__ experts_ptr,
    long long rows,
    long long logits_stride,
    long long softmax_stride,
    long long experts_stride)
{
  constexpr int block_rows = 128;  // that a block takes
  constexpr int lane = 0;  // a thread takes a row of its own
  const long long own_row = static_cast<long long>(blockIdx.x) * block_rows + threadIdx.x;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const __nv_bfloat16* const logits_row = logits_ptr + row * logits_stride;
  float* const softmax_row = softmax_ptr + row * softmax_stride;
  int* const experts_row = experts_ptr + row * experts_stride;
  const int col = lane * 8;
  Vec<__nv_bfloat16, 8> logits_vec;

  // pass 1 of 2: read logits; keep logits
  {
    logits_vec = load<8>(logits_row + col);
  }

  // ---- words
  // a lane's keys, two in one word
  float keys[8];
  #pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float logits = widened(logits_vec.at[j]);
    keys[j] = logits;
  }
  unsigned pairs[4];
  #pragma unroll
  for (int q = 0; q < 4; ++q) pairs[q] = pair_of(keys[q * 2], keys[q * 2 + 1]);

  // ---- choose
  // a lane's best
  unsigned orders[4], spots[4];  // of the first lane's columns
  #pragma unroll
  for (int q = 0; q < 4; ++q) {
    orders[q] = orders_of(pairs[q]);
    spots[q] = (last_place - q * 2) * 0x10001u - 0x10000u;
  }
  Entry best[2];
  best_of(best, orders, spots);
  const Entry (&picks)[2] = best;

  // ---- write
  // the 2 chosen, pass 1 of 3 over them: top = max(best_); write experts
  float top_part = -INFINITY;
  Vec<int, 2> experts_vec;
  #pragma unroll
  for (int rank = 0; rank < 2; ++rank) {
    const Entry entry = picks[rank];
    const int experts = entry > masked ? column_of(entry) : -1;
    const float best_ = key_of(entry);
    top_part = larger(top_part, best_);
    experts_vec.at[rank] = experts;
  }
  if (live) store(experts_row, experts_vec);
  const float top = top_part;
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // the 2 chosen, pass 2 of 3 over them: sum_of_exps = sum(e)
  float sum_of_exps_part = 0.0f;
  float e_kept[2];
  #pragma unroll
  for (int rank = 0; rank < 2; ++rank) {
    const Entry entry = picks[rank];
    const float best_ = key_of(entry);
    const float best_minus_pivot = best_ - pivot;
    const float e = exponential(best_minus_pivot);
    e_kept[rank] = e;
    sum_of_exps_part += e;
  }
  const float sum_of_exps = sum_of_exps_part;
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // the 2 chosen, pass 3 of 3 over them: write softmax
  Vec<float, 2> softmax_vec;
  #pragma unroll
  for (int rank = 0; rank < 2; ++rank) {
    const float e = e_kept[rank];
    const float softmax = e * inverse_sum;
    softmax_vec.at[rank] = softmax;
  }
  if (live) store(softmax_row, softmax_vec);
}
