// moe_router_qwen3  bf16[T, E] -> f32[T, K], i32[T, K]  at T=65536 E=128 K=8
// softmax, top-k, renormalised (norm_topk_prob): weights and experts of each token.
//
//     def moe_router_qwen3(logits):
//         best, experts = F.topk(logits, K)
//         return F.softmax(best), experts
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
// selects  8 of 128 columns a row by logits, largest first; NaN before all, ties by column, -inf never
// tile     4 threads a row, 128 rows a block; logits in registers, the best 8 by a network, 8 at a time
// traffic  21.0 MB moved, 21.0 MB ideal, 23.1 MB unfused in 2 launches
// floor    4.0 us at 5.3 TB/s; memory-bound at 0.65 flop/B
// needs    rows of 128 elements, next to each other; logits: address and strides in multiples of 16 B;
//          softmax, experts: address and strides in multiples of 8 B
//
// method   bitonic top-k in registers (Shanbhag, Pirk & Madden, SIGMOD 2018) by 4 lanes a row. A key
//          and its column are one word of 32 bits; 8 words at a time are sorted, the best of them and
//          of those before stay, and so do the best of all lanes
// sections words     a key's order above its column: the larger word is the one to choose
//          choose    the best words, by Batcher's networks: they are sorted, and merged
//          write     what is computed at the chosen columns

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
  return a > b || a != a ? a : b;
}

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  return __builtin_amdgcn_exp2f(x);
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
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
  const unsigned size = pair & 0x7fff7fffu;
  const unsigned none = (size + 0x007f007fu) & 0x80008000u;  // the top bit of a NaN,
  const unsigned below = pair & (size + 0x7fff7fffu) & ~none & 0x80008000u;  // and of what is below 0
  const unsigned bits = size | (none - (none >> 15));
  return (bits ^ (below - (below >> 15))) | (below ^ 0x80008000u);
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
  for (int q = 0; q < 8; ++q) others[q] = __shfl_xor(best[q], step);
  merge_best(best, others);
}

// by value: of elements of an array that are read in branches some compilers make one that is read by its number
__device__ __forceinline__ Entry either(bool first, Entry a, Entry b) {
  return first ? a : b;
}

// the best of this lane and of the one in the row's other half: each keeps one half of them, in no order
__device__ __forceinline__ void part_best(Entry (&half)[4], const Entry (&best)[8]) {
  #pragma unroll
  for (int q = 0; q < 4; ++q) half[q] = max(best[q], __shfl_xor(best[7 - q], 2));
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
moe_router_qwen3(
    const __bf16* __restrict__ logits_ptr,
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
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const __bf16* const logits_row = logits_ptr + row * logits_stride;
  float* const softmax_row = softmax_ptr + row * softmax_stride;
  int* const experts_row = experts_ptr + row * experts_stride;
  Vec<__bf16, 8> logits_vec[4];

  // pass 1 of 2: read logits; keep logits
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    logits_vec[v] = load<8>(logits_row + col);
  }

  // ---- words
  // a lane's keys, two in one word
  float keys[32];
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float logits = widened(logits_vec[v].at[j]);
      keys[v * 8 + j] = logits;
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
  Entry best[8];
  best_of(best, orders, spots);
  #pragma unroll
  for (int q = 0; q < 8; ++q) best[q] += (3 - lane) * 8;
  merge_lanes(best, 1);
  // the better half of the best goes to the first half of the lanes
  Entry half[4], beyond[4];
  part_best(half, best);
  #pragma unroll
  for (int q = 0; q < 4; ++q) beyond[q] = __shfl_xor(half[3 - q], 2);
  #pragma unroll
  for (int q = 0; q < 4; ++q) half[q] = lane < 2 ? max(half[q], beyond[q]) : min(half[q], beyond[q]);
  order_entries(half);
  Entry picks[2];  // of the row's best, those of this lane
  take_own(picks, half, lane);

  // ---- write
  // the 8 chosen, pass 1 of 3 over them: top = max(best_); write experts
  float top_part = -INFINITY;
  Vec<int, 2> experts_vec;
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Entry entry = picks[r];
    const int experts = entry > masked ? column_of(entry) : -1;
    const float best_ = key_of(entry);
    top_part = larger(top_part, best_);
    experts_vec.at[r] = experts;
  }
  if (live) store(experts_row + lane * 2, experts_vec);
  const float top = row_max(top_part);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // the 8 chosen, pass 2 of 3 over them: sum_of_exps = sum(e)
  float sum_of_exps_part = 0.0f;
  float e_kept[2];
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Entry entry = picks[r];
    const float best_ = key_of(entry);
    const float best_minus_pivot = best_ - pivot;
    const float e = exponential(best_minus_pivot);
    e_kept[r] = e;
    sum_of_exps_part += e;
  }
  const float sum_of_exps = row_sum(sum_of_exps_part);
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // the 8 chosen, pass 3 of 3 over them: write softmax
  Vec<float, 2> softmax_vec;
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float e = e_kept[r];
    const float softmax = e * inverse_sum;
    softmax_vec.at[r] = softmax;
  }
  if (live) store(softmax_row + lane * 2, softmax_vec);
}
