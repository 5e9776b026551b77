// router_topk  bf16[T, E] -> f32[T, K], i32[T, K]  at T=131072 E=256 K=8
// The K most probable experts of each token, and their probabilities made to add up to 1.
//
//     def router_topk(scores):
//         likely, experts = F.topk(F.softmax(scores), K)
//         weights = likely / F.sum(likely)
//         return weights, experts
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
// selects  8 of 256 columns a row by scores, largest first; NaN before all, ties by column, -inf never
// tile     8 threads a row, 16 rows a block; scores in registers, the best 8 by a network, 8 at a time
// traffic  75.5 MB moved, 75.5 MB ideal, 283.6 MB unfused in 4 launches
// floor    14.2 us at 5.3 TB/s; instruction-bound at 3.76 flop/B
// needs    rows of 256 elements, next to each other; scores: address and strides in multiples of 16 B
//
// method   bitonic top-k in registers (Shanbhag, Pirk & Madden, SIGMOD 2018) by 8 lanes a row. A key
//          and its column are one word of 32 bits; 8 words at a time are sorted, the best of them and
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

// the largest value over the 8 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v) {
  #pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
}

// the sum over the 8 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v) {
  #pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

// a candidate as one number: of two, the larger is the one to choose. Its upper bits are the order of its key, an integer
// that grows with the key; its lower bits are the column, counted from the row's end, for ties go to lower columns. 0 is none
typedef unsigned Entry;  // keys are of 16 bits: an order's lower bits are all alike
constexpr int column_bits = 8;
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

// what the warp's threads wrote to shared memory can be read by all of them
__device__ __forceinline__ void meet() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}

// the larger of two comes first
__device__ __forceinline__ void exchange(Entry& a, Entry& b) {
  const Entry less = min(a, b);
  a = max(a, b);
  b = less;
}

// the first 8 words, which fall and then rise or the other way round, in order: the largest first
__device__ __forceinline__ void merge_words(Entry (&words)[32]) {
  #pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    #pragma unroll
    for (int q = 0; q < 8; ++q) {
      if (!(q & step)) exchange(words[q], words[q + step]);
    }
  }
}

// 8 words from the first on in order, the largest first or last: Batcher's bitonic network
template <bool falling>
__device__ __forceinline__ void sort_words(Entry (&words)[32], int first) {
  #pragma unroll
  for (int size = 2; size <= 8; size *= 2) {
    #pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      #pragma unroll
      for (int q = 0; q < 8; ++q) {
        if (q & step) continue;
        const bool falls = size == 8 ? falling : !(q & size);
        exchange(words[first + q + (falls ? 0 : step)], words[first + q + (falls ? step : 0)]);
      }
    }
  }
}

// what the threads of a block share: of 16 rows
struct alignas(16) Picker {
  unsigned picks[16][8];  // what is chosen, the best first
};
static_assert(sizeof(Picker) <= 512, "the launch's shared memory");

extern "C" __global__ void __launch_bounds__(128)
router_topk(
    const __bf16* __restrict__ scores_ptr,
    float* __restrict__ weights_ptr,
    int* __restrict__ experts_ptr,
    long long rows,
    long long scores_stride,
    long long weights_stride,
    long long experts_stride)
{
  constexpr int row_threads = 8;
  constexpr int block_rows = 16;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 8 threads that share a row
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = row < rows;
  const __bf16* const scores_row = scores_ptr + row * scores_stride;
  float* const weights_row = weights_ptr + row * weights_stride;
  int* const experts_row = experts_ptr + row * experts_stride;
  Vec<__bf16, 8> scores_vec[4];

  // pass 1 of 3: read scores; keep scores; top = max(scores)
  float top_part = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (live) {
      scores_vec[v] = load<8>(scores_row + col);
    }
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    if (live) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float scores = widened(scores_vec[v].at[j]);
        top_part = larger(top_part, scores);
      }
    }
  }
  const float top = row_max(top_part);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // pass 2 of 3: sum_of_exps = sum(e)
  float sum_of_exps_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    if (live) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float scores = widened(scores_vec[v].at[j]);
        const float scores_minus_pivot = scores - pivot;
        const float e = exponential(scores_minus_pivot);
        sum_of_exps_part += e;
      }
    }
  }
  const float sum_of_exps = row_sum(sum_of_exps_part);
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // ---- words
  // a key's order and its column, in one word each
  const int at = threadIdx.x / 8;  // the row's place in the block
  Entry words[32];
  #pragma unroll
  for (int q = 0; q < 32; ++q) words[q] = 0;
  if (live) {
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int col = (v * row_threads + lane) * 8;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float scores = widened(scores_vec[v].at[j]);
        words[v * 8 + j] = entry_of(scores, col + j);
      }
    }
  }

  // ---- choose
  // a lane's best 8, of 8 words at a time; then those of all lanes
  sort_words<true>(words, 0);
  #pragma unroll
  for (int first = 8; first < 32; first += 8) {
    sort_words<false>(words, first);
    #pragma unroll
    for (int q = 0; q < 8; ++q) words[q] = max(words[q], words[first + q]);
    merge_words(words);
  }
  #pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    Entry beyond_lane[8];
    #pragma unroll
    for (int q = 0; q < 8; ++q) beyond_lane[q] = __shfl_xor(words[7 - q], step);
    #pragma unroll
    for (int q = 0; q < 8; ++q) words[q] = max(words[q], beyond_lane[q]);
    merge_words(words);
  }
  #pragma unroll
  for (int r = 0; r < 8; ++r) {
    if (lane == r) picker.picks[at][r] = words[r] > masked ? words[r] : 0;
  }
  meet();

  // ---- write
  // the 8 chosen, pass 1 of 2 over them: sum_of_likely = sum(likely); write experts
  float sum_of_likely_part = 0.0f;
  if (live && lane < 8) {
    const Entry entry = picker.picks[at][lane];
    const int experts = entry ? column_of(entry) : -1;
    const float take_ = entry ? key_of(entry) : -INFINITY;
    const bool experts_below_0 = experts < 0;
    const float take_minus_pivot = take_ - pivot;
    const float exp_ = exponential(take_minus_pivot);
    const float mul = exp_ * inverse_sum;
    const float likely = experts_below_0 ? 0.0f : mul;
    sum_of_likely_part += likely;
    experts_row[lane] = experts;
  }
  const float sum_of_likely = row_sum(sum_of_likely_part);

  // the 8 chosen, pass 2 of 2 over them: write weights
  if (live && lane < 8) {
    const Entry entry = picker.picks[at][lane];
    const int experts = entry ? column_of(entry) : -1;
    const float take_ = entry ? key_of(entry) : -INFINITY;
    const bool experts_below_0 = experts < 0;
    const float take_minus_pivot = take_ - pivot;
    const float exp_ = exponential(take_minus_pivot);
    const float mul = exp_ * inverse_sum;
    const float likely = experts_below_0 ? 0.0f : mul;
    const float weights = likely / sum_of_likely;
    weights_row[lane] = weights;
  }
}
