// moe_router_deepseek  f32[T, E], f32[E] -> f32[T, K], i32[T, K]  at T=65536 E=256 K=8
// Weights and experts of each token: sigmoid of the chosen ones' logits, made to add up to 2.5.
//
//     def moe_router_deepseek(logits, bias):
//         scores = F.sigmoid(logits)
//         _, experts = F.topk(scores + bias, K, groups=8, best_groups=4, by=2)
//         chosen = F.take(scores, experts)
//         return chosen / F.sum(chosen) * 2.5, experts
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// selects  8 of 256 columns a row by add of the best 4 of 8 groups by their 2 largest keys' sum,
//          largest first; NaN before all, ties by column, -inf never
// tile     8 threads a row, 16 rows a block; add in registers, the best 8 by rank behind 8 delegates a
//          lane
// traffic  71.3 MB moved, 71.3 MB ideal, 354.9 MB unfused in 7 launches
// floor    14.9 us at 4.8 TB/s; instruction-bound at 2.72 flop/B
// needs    rows of 256 elements, next to each other; logits, bias: address and strides in multiples of
//          16 B; bias [E] shared by every row
//
// method   register-resident top-k by 8 lanes a row. The largest of every few keys of a lane is their
//          delegate (Dr. Top-k, Gaihre et al., SC 2021); a network (Batcher, AFIPS 1968) finds the 8
//          best, and what reaches them is ranked by counting what is larger
// sections groups    of a row, the best 4: the keys of others are masked
//          bar       the least of the 8 largest delegates
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

// 1 / x, within 1 ulp; above 2^126 it is 0
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

// the sum over the 8 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v) {
  #pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

// one bit a lane, the lowest for the first
typedef unsigned Lanes;

// the lanes of the warp that say so
__device__ __forceinline__ Lanes vote(bool says) {
  return __ballot_sync(0xffffffffu, says);
}

__device__ __forceinline__ int count(Lanes lanes) {
  return __popc(lanes);
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

__device__ __forceinline__ int column_of(Entry entry) {
  return static_cast<int>(last_column - (entry & last_column));
}

// what the warp's threads wrote to shared memory can be read by all of them
__device__ __forceinline__ void meet() {
  __syncwarp();
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
  for (int step = 1; step < 8; step *= 2) {
    const unsigned other = __shfl_up_sync(0xffffffffu, v, step);
    if (threadIdx.x % 8 >= step) v += other;
  }
  return v;
}

// what the threads of a block share: of 16 rows
struct alignas(16) Picker {
  float keys[32][128];  // of each thread
  Entry candidates[16][36];
  float tops[16][64], seconds[16][64];  // the largest of each vector
  Entry scores[16][8];  // the order of each group's score, and its place
  int in_best[16][8];  // is it one of the best?
  Entry picks[16][8];  // what is chosen, the best first
};
static_assert(sizeof(Picker) <= 31744, "the launch's shared memory");

extern "C" __global__ void __launch_bounds__(128)
moe_router_deepseek(
    const float* __restrict__ logits_ptr,
    const float* __restrict__ bias_ptr,
    float* __restrict__ out0_ptr,
    int* __restrict__ experts_ptr,
    long long rows,
    long long logits_stride,
    long long out0_stride,
    long long experts_stride)
{
  constexpr int row_threads = 8;
  constexpr int block_rows = 16;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 8 threads that share a row
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long row = static_cast<long long>(blockIdx.x) * block_rows + threadIdx.x / row_threads;
  const bool live = row < rows;
  const float* const logits_row = logits_ptr + row * logits_stride;
  float* const out0_row = out0_ptr + row * out0_stride;
  int* const experts_row = experts_ptr + row * experts_stride;
  float add_kept[8][4];

  // pass 1 of 2: read logits, bias; keep add
  Vec<float, 4> logits_vec[8];
  Vec<float, 4> bias_vec[8];
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 4;
    if (live) {
      logits_vec[v] = load<4>(logits_row + col);
      bias_vec[v] = load<4>(bias_ptr + col);
    }
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    if (live) {
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float logits = logits_vec[v].at[j];
        const float bias = bias_vec[v].at[j];
        const float scores = reciprocal(1.0f + exponential(-logits));
        const float add = scores + bias;
        add_kept[v][j] = add;
      }
    }
  }

  // ---- groups
  // columns are chosen of the best 4 of 8 groups by their 2 largest keys' sum alone
  const int at = threadIdx.x / 8;  // the row's place in the block
  float keys[8][4];
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    float most_here = -INFINITY, next_here = -INFINITY;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      keys[v][j] = -INFINITY;
      if (live) {
        const float add = add_kept[v][j];
        keys[v][j] = add;
      }
      next_here = larger(next_here, fminf(most_here, keys[v][j]));
      most_here = larger(most_here, keys[v][j]);
    }
    picker.tops[at][v * 8 + lane] = most_here;
    picker.seconds[at][v * 8 + lane] = next_here;
  }
  meet();
  #pragma unroll 1
  for (int own_group = lane; own_group < 8; own_group += 8) {
    float most_here = -INFINITY, next_here = -INFINITY;
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = picker.tops[at][own_group * 8 + i];
      next_here = larger(larger(next_here, picker.seconds[at][own_group * 8 + i]), fminf(most_here, other));
      most_here = larger(most_here, other);
    }
    picker.scores[at][own_group] = entry_of(most_here + next_here, own_group);
  }
  meet();
  #pragma unroll 1
  for (int own_group = lane; own_group < 8; own_group += 8) {
    const Entry entry = picker.scores[at][own_group];
    int rank = 0;
    #pragma unroll
    for (int other = 0; other < 8; ++other) rank += picker.scores[at][other] > entry;
    picker.in_best[at][own_group] = rank < 4;
  }
  meet();

  // ---- bar
  // a lane's 8 delegates are the largest of every 8th of its keys; the 8 best of a row make a bar, which 8 keys
  // reach and few more do
  float delegates[8];
  #pragma unroll
  for (int q = 0; q < 8; ++q) delegates[q] = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!picker.in_best[at][(v * 8 + lane) / 8]) keys[v][j] = -INFINITY;
      delegates[(v * 4 + j) % 8] = larger(delegates[(v * 4 + j) % 8], keys[v][j]);
      picker.keys[v * 4 + j][threadIdx.x] = keys[v][j];  // registers have no addresses, these have
    }
  }
  sort_delegates(delegates);
  #pragma unroll
  for (int step = 1; step < 8; step *= 2) {  // the best 8 of both lanes
    float beyond_lane[8];
    #pragma unroll
    for (int q = 0; q < 8; ++q) beyond_lane[q] = __shfl_xor_sync(0xffffffffu, delegates[7 - q], step);
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
  for (int v = 0; v < 8; ++v) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) passing |= static_cast<unsigned>(!(keys[v][j] < bar)) << (v * 4 + j);
  }
  const unsigned upto = lanes_sum_below(static_cast<unsigned>(count(passing)));
  const unsigned all = __shfl_sync(0xffffffffu, upto, 7, 8);

  // ---- rank
  if (vote(all > 32)) {  // ties: the best one is found 8 times, each time below the last one
    Entry last = ~Entry(0);
    #pragma unroll 1
    for (int r = 0; r < 8; ++r) {
      Entry best_entry = 0;
      #pragma unroll 1
      for (int i = 0; i < 32; ++i) {
        const int own_col = (i / 4 * 8 + lane) * 4 + i % 4;
        const float key = picker.keys[i][threadIdx.x];
        const Entry entry = entry_of(key, own_col);
        if (!(key <= -INFINITY) && entry < last && entry > best_entry) best_entry = entry;
      }
      #pragma unroll
      for (int step = 4; step > 0; step /= 2) {
        const Entry other = __shfl_xor_sync(0xffffffffu, best_entry, step);
        best_entry = best_entry > other ? best_entry : other;
      }
      if (lane == 0) picker.picks[at][r] = best_entry;
      last = best_entry;
    }
  } else {  // each candidate's rank is the number of those that are larger
    #pragma unroll 1
    for (unsigned place = upto - count(passing); passing; ++place) {
      const int i = 31 - __clz(static_cast<int>(passing & (0u - passing)));  // the lowest bit that is set
      const int own_col = (i / 4 * 8 + lane) * 4 + i % 4;
      passing &= passing - 1;
      picker.candidates[at][place] = entry_of(picker.keys[i][threadIdx.x], own_col);
    }
    if (lane < 4) picker.candidates[at][all + lane] = 0;  // as many as are compared at a time
    meet();
    #pragma unroll 1
    for (unsigned i = lane; i < all; i += 8) {
      const Entry entry = picker.candidates[at][i];
      unsigned rank = 0;
      #pragma unroll 1
      for (unsigned other = 0; other < all; other += 4) {
        #pragma unroll
        for (int q = 0; q < 4; ++q) rank += picker.candidates[at][other + q] > entry;
      }
      if (rank < 8) picker.picks[at][rank] = entry;
    }
    for (unsigned i = all + lane; i < 8; i += 8) picker.picks[at][i] = 0;
  }
  meet();

  // ---- write
  // the 8 chosen, pass 1 of 2 over them: read take_; sum_of_chosen = sum(chosen); write experts
  float sum_of_chosen_part = 0.0f;
  if (live && lane < 8) {
    const Entry entry = picker.picks[at][lane];
    const int experts = entry ? column_of(entry) : -1;
    const float take_ = experts < 0 ? 0.0f : logits_row[experts];
    const bool experts_below_0 = experts < 0;
    const float sigmoid = reciprocal(1.0f + exponential(-take_));
    const float chosen = experts_below_0 ? 0.0f : sigmoid;
    sum_of_chosen_part += chosen;
    experts_row[lane] = experts;
  }
  const float sum_of_chosen = row_sum(sum_of_chosen_part);

  // the 8 chosen, pass 2 of 2 over them: read take_; write out0
  if (live && lane < 8) {
    const Entry entry = picker.picks[at][lane];
    const int experts = entry ? column_of(entry) : -1;
    const float take_ = experts < 0 ? 0.0f : logits_row[experts];
    const bool experts_below_0 = experts < 0;
    const float sigmoid = reciprocal(1.0f + exponential(-take_));
    const float chosen = experts_below_0 ? 0.0f : sigmoid;
    const float quotient = chosen / sum_of_chosen;
    const float mul = quotient * 2.5f;
    out0_row[lane] = mul;
  }
}
