// moe_router_mixtral  bf16[T, E] -> f32[T, K], i32[T, K]  at T=65536 E=8 K=2
// softmax, top-k, renormalised: weights and experts of each token.
//
//     def moe_router_mixtral(logits):
//         best, experts = F.topk(logits, K)
//         return F.softmax(best), experts
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// selects  2 of 8 columns a row by logits, largest first; NaN before all, ties by column, -inf never
// tile     1 thread a row, 128 rows a block; logits in registers, the best 2 by a network, 2 at a time
// traffic  2.1 MB moved, 2.1 MB ideal, 2.6 MB unfused in 2 launches
// floor    0.3 us at 8 TB/s; memory-bound at 1.06 flop/B
// needs    rows of 8 elements, next to each other; logits: address and strides in multiples of 16 B
//
// method   bitonic top-k in registers (Shanbhag, Pirk & Madden, SIGMOD 2018) by one lane a row. A key
//          and its column are one word of 32 bits; 2 words at a time are sorted, the best of them and
//          of those before stay, and so do the best of all lanes
// sections words     a key's order above its column: the larger word is the one to choose
//          choose    the best words, by Batcher's bitonic network
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
  return __builtin_elementwise_maximum(a, b);
}

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  return __builtin_amdgcn_exp2f(x);
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// a candidate as one number: of two, the larger is the one to choose. Its upper bits are the order of its key, an integer
// that grows with the key; its lower bits are the column, counted from the row's end, for ties go to lower columns. 0 is none
typedef unsigned Entry;  // keys are of 16 bits: an order's lower bits are all alike
constexpr int column_bits = 3;
constexpr Entry last_column = (Entry(1) << column_bits) - 1;
constexpr unsigned top_bit = 0x80000000u;
constexpr unsigned masked = 0x007fffffu;  // the order of -inf, which is never chosen

// as in radix sorts: of positive floats the top bit is set, of negative ones every bit is flipped. NaN is above all
// numbers, and -0 is 0
__device__ __forceinline__ unsigned order_of(float key) {
  const unsigned bits = __float_as_uint(key + 0.0f);
  if (key != key) return 0xffffffffu;
  return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | top_bit);
}

// the key of that order
__device__ __forceinline__ float key_at(unsigned order) {
  return __uint_as_float(order & top_bit ? order ^ top_bit : ~order);
}

__device__ __forceinline__ Entry entry_of(float key, int col) {
  return (order_of(key) & ~last_column) | (last_column - col);
}

__device__ __forceinline__ float key_of(Entry entry) {
  return key_at(entry & top_bit ? entry & ~last_column : entry | last_column);
}

__device__ __forceinline__ int column_of(Entry entry) {
  return static_cast<int>(last_column - (entry & last_column));
}

// the larger of two comes first
__device__ __forceinline__ void exchange(Entry& a, Entry& b) {
  const Entry less = min(a, b);
  a = max(a, b);
  b = less;
}

// the first 2 words, which fall and then rise or the other way round, in order: the largest first
__device__ __forceinline__ void merge_words(Entry (&words)[8]) {
  exchange(words[0], words[1]);
}

// 2 words from the first on in order, the largest first or last: Batcher's bitonic network
template <bool falling>
__device__ __forceinline__ void sort_words(Entry (&words)[8], int first) {
  exchange(words[first + !falling], words[first + falling]);
}

// what the threads of a block share: of 128 rows
struct alignas(16) Picker {
  unsigned picks[128][2];  // what is chosen, the best first
};
static_assert(sizeof(Picker) <= 1024, "the launch's shared memory");

extern "C" __global__ void __launch_bounds__(128)
moe_router_mixtral(
    const __bf16* __restrict__ logits_ptr,
    float* __restrict__ softmax_ptr,
    int* __restrict__ experts_ptr,
    long long rows,
    long long logits_stride,
    long long softmax_stride,
    long long experts_stride)
{
  constexpr int block_rows = 128;  // that a block takes
  constexpr int lane = 0;  // a thread takes a row of its own
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long row = tile * block_rows + threadIdx.x;
  const bool live = row < rows;
  const __bf16* const logits_row = logits_ptr + row * logits_stride;
  float* const softmax_row = softmax_ptr + row * softmax_stride;
  int* const experts_row = experts_ptr + row * experts_stride;
  const int col = lane * 8;
  Vec<__bf16, 8> logits_vec;

  // pass 1 of 2: read logits; keep logits
  if (live) {
    logits_vec = load<8>(logits_row + col);
  }

  // ---- words
  // a key's order and its column, in one word each
  const int at = threadIdx.x;  // the row's place in the block
  Entry words[8];
  #pragma unroll
  for (int q = 0; q < 8; ++q) words[q] = 0;
  if (live) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float logits = widened(logits_vec.at[j]);
      words[j] = entry_of(logits, col + j);
    }
  }

  // ---- choose
  // a lane's best 2, of 2 words at a time
  sort_words<true>(words, 0);
  #pragma unroll
  for (int first = 2; first < 8; first += 2) {
    sort_words<false>(words, first);
    #pragma unroll
    for (int q = 0; q < 2; ++q) words[q] = max(words[q], words[first + q]);
    merge_words(words);
  }
  #pragma unroll
  for (int r = 0; r < 2; ++r) picker.picks[at][r] = words[r] > masked ? words[r] : 0;

  // ---- write
  // the 2 chosen, pass 1 of 3 over them: top = max(best_); write experts
  float top_part = -INFINITY;
  #pragma unroll
  for (int rank = 0; live && rank < 2; rank += 1) {
    const Entry entry = picker.picks[at][rank];
    const int experts = entry ? column_of(entry) : -1;
    const float best_ = entry ? key_of(entry) : -INFINITY;
    top_part = larger(top_part, best_);
    experts_row[rank] = experts;
  }
  const float top = top_part;
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // the 2 chosen, pass 2 of 3 over them: sum_of_exps = sum(e)
  float sum_of_exps_part = 0.0f;
  #pragma unroll
  for (int rank = 0; live && rank < 2; rank += 1) {
    const Entry entry = picker.picks[at][rank];
    const float best_ = entry ? key_of(entry) : -INFINITY;
    const float best_minus_pivot = best_ - pivot;
    const float e = exponential(best_minus_pivot);
    sum_of_exps_part += e;
  }
  const float sum_of_exps = sum_of_exps_part;
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // the 2 chosen, pass 3 of 3 over them: write softmax
  #pragma unroll
  for (int rank = 0; live && rank < 2; rank += 1) {
    const Entry entry = picker.picks[at][rank];
    const float best_ = entry ? key_of(entry) : -INFINITY;
    const float best_minus_pivot = best_ - pivot;
    const float e = exponential(best_minus_pivot);
    const float softmax = e * inverse_sum;
    softmax_row[rank] = softmax;
  }
}
