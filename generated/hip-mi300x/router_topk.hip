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
// tile     16 threads a row, 8 rows a block; scores in registers, the best 8 by rank behind 8 delegates
//          a lane
// traffic  75.5 MB moved, 75.5 MB ideal, 283.6 MB unfused in 4 launches
// floor    14.2 us at 5.3 TB/s; instruction-bound at 3.76 flop/B
// needs    rows of 256 elements, next to each other; scores: address and strides in multiples of 16 B
//
// method   register-resident top-k by 16 lanes a row. The largest of every few keys of a lane is their
//          delegate (Dr. Top-k, Gaihre et al., SC 2021); a network (Batcher, AFIPS 1968) finds the 8
//          best, and what reaches them is ranked by counting what is larger
// sections bar       the least of the 8 largest delegates
//          collect   the keys that reach the bar are candidates
//          rank      by the number of larger candidates; where ties make too many, repeated argmax
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

// the largest value over the 16 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v) {
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
}

// the sum over the 16 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v) {
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

// one bit a lane, the lowest for the first
typedef unsigned long long Lanes;

// the lanes of the warp that say so
__device__ __forceinline__ Lanes vote(bool says) {
  return __ballot(says);
}

__device__ __forceinline__ int count(Lanes lanes) {
  return __popcll(lanes);
}

// a candidate as one number: of two, the larger is the one to choose. Its upper bits are the order of its key, an integer
// that grows with the key; its lower bits are the column, counted from the row's end, for ties go to lower columns. 0 is none
typedef unsigned long long Entry;
constexpr int column_bits = 8;
constexpr Entry last_column = (Entry(1) << column_bits) - 1;
constexpr unsigned top_bit = 0x80000000u;
constexpr unsigned masked = 0x007fffffu;  // the order of -inf, which is never chosen
constexpr unsigned infinite = 0xff800000u;  // the order of inf, the highest threshold, above which is NaN alone

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
  return static_cast<Entry>(order_of(key)) << column_bits | (last_column - col);
}

__device__ __forceinline__ float key_of(Entry entry) {
  return key_at(static_cast<unsigned>(entry >> column_bits));
}

__device__ __forceinline__ int column_of(Entry entry) {
  return static_cast<int>(last_column - (entry & last_column));
}

// what the warp's threads wrote to shared memory can be read by all of them
__device__ __forceinline__ void meet() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}

// the larger of two comes first; NaN is above all numbers
__device__ __forceinline__ void exchange(float& a, float& b) {
  const float less = fminf(a, b);
  a = larger(a, b);
  b = less;
}

// 8 delegates that fall and then rise, in order: the largest first
__device__ __forceinline__ void merge_delegates(float (&delegates)[8]) {
  #pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    #pragma unroll
    for (int q = 0; q < 8; ++q) {
      if (!(q & step)) exchange(delegates[q], delegates[q + step]);
    }
  }
}

// a lane's delegates in order, the largest first: Batcher's bitonic network
__device__ __forceinline__ void sort_delegates(float (&delegates)[8]) {
  #pragma unroll
  for (int size = 2; size <= 8; size *= 2) {
    #pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      #pragma unroll
      for (int q = 0; q < 8; ++q) {
        if (q & step) continue;
        if (q & size) {
          exchange(delegates[q + step], delegates[q]);
        } else {
          exchange(delegates[q], delegates[q + step]);
        }
      }
    }
  }
}

// the sum of v over this lane of the row's and those below it
__device__ __forceinline__ unsigned lanes_sum_below(unsigned v) {
  #pragma unroll
  for (int step = 1; step < 16; step *= 2) {
    const unsigned other = __shfl_up(v, step);
    if (threadIdx.x % 16 >= step) v += other;
  }
  return v;
}

// what the threads of a block share: of 8 rows
struct alignas(16) Picker {
  float keys[16][128];  // of each thread
  Entry candidates[8][36];
  Entry picks[8][8];  // what is chosen, the best first
};
static_assert(sizeof(Picker) <= 11008, "the launch's shared memory");

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
  constexpr int row_threads = 16;
  constexpr int block_rows = 8;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 16 threads that share a row
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = row < rows;
  const __bf16* const scores_row = scores_ptr + row * scores_stride;
  float* const weights_row = weights_ptr + row * weights_stride;
  int* const experts_row = experts_ptr + row * experts_stride;
  Vec<__bf16, 8> scores_vec[2];

  // pass 1 of 3: read scores; keep scores; top = max(scores)
  float top_part = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (live) {
      scores_vec[v] = load<8>(scores_row + col);
    }
  }
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
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
  for (int v = 0; v < 2; ++v) {
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

  // ---- bar
  // a lane's 8 delegates are the largest of every 8th of its keys; the 8 best of a row make a bar, which 8 keys
  // reach and few more do
  const int at = threadIdx.x / 16;  // the row's place in the block
  float keys[2][8];
  float delegates[8];
  #pragma unroll
  for (int q = 0; q < 8; ++q) delegates[q] = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      keys[v][j] = -INFINITY;
      if (live) {
        const float scores = widened(scores_vec[v].at[j]);
        keys[v][j] = scores;
      }
      delegates[(v * 8 + j) % 8] = larger(delegates[(v * 8 + j) % 8], keys[v][j]);
      picker.keys[v * 8 + j][threadIdx.x] = keys[v][j];  // registers have no addresses, these have
    }
  }
  sort_delegates(delegates);
  #pragma unroll
  for (int step = 1; step < 16; step *= 2) {  // the best 8 of both lanes
    float beyond_lane[8];
    #pragma unroll
    for (int q = 0; q < 8; ++q) beyond_lane[q] = __shfl_xor(delegates[7 - q], step);
    #pragma unroll
    for (int q = 0; q < 8; ++q) delegates[q] = larger(delegates[q], beyond_lane[q]);
    merge_delegates(delegates);
  }
  const unsigned order = order_of(delegates[7]);
  const float bar = key_at(order < infinite ? order > masked ? order : masked + 1 : infinite);

  // ---- collect
  // the keys that reach the bar are candidates
  unsigned passing = 0;  // a bit for each of the lane's keys that do
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) passing |= static_cast<unsigned>(!(keys[v][j] < bar)) << (v * 8 + j);
  }
  const unsigned upto = lanes_sum_below(static_cast<unsigned>(count(passing)));
  const unsigned all = __shfl(upto, 15, 16);

  // ---- rank
  if (vote(all > 32)) {  // ties: the best one is found 8 times, each time below the last one
    Entry last = ~Entry(0);
    #pragma unroll 1
    for (int r = 0; r < 8; ++r) {
      Entry best_entry = 0;
      #pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        const int own_col = (i / 8 * 16 + lane) * 8 + i % 8;
        const float key = picker.keys[i][threadIdx.x];
        const Entry entry = entry_of(key, own_col);
        if (!(key <= -INFINITY) && entry < last && entry > best_entry) best_entry = entry;
      }
      #pragma unroll
      for (int step = 8; step > 0; step /= 2) {
        const Entry other = __shfl_xor(best_entry, step);
        best_entry = best_entry > other ? best_entry : other;
      }
      if (lane == 0) picker.picks[at][r] = best_entry;
      last = best_entry;
    }
  } else {  // each candidate's rank is the number of those that are larger
    #pragma unroll 1
    for (unsigned place = upto - count(passing); passing; ++place) {
      const int i = 31 - __clz(static_cast<int>(passing & (0u - passing)));  // the lowest bit that is set
      const int own_col = (i / 8 * 16 + lane) * 8 + i % 8;
      passing &= passing - 1;
      picker.candidates[at][place] = entry_of(picker.keys[i][threadIdx.x], own_col);
    }
    if (lane < 4) picker.candidates[at][all + lane] = 0;  // as many as are compared at a time
    meet();
    #pragma unroll 1
    for (unsigned i = lane; i < all; i += 16) {
      const Entry entry = picker.candidates[at][i];
      unsigned rank = 0;
      #pragma unroll 1
      for (unsigned other = 0; other < all; other += 4) {
        #pragma unroll
        for (int q = 0; q < 4; ++q) rank += picker.candidates[at][other + q] > entry;
      }
      if (rank < 8) picker.picks[at][rank] = entry;
    }
    for (unsigned i = all + lane; i < 8; i += 16) picker.picks[at][i] = 0;
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
