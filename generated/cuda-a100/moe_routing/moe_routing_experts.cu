// moe_routing_experts  f32[T, E] -> i32[T, K], f32[T, K]  at T=64 E=64 K=4
// experts, softmax of moe_routing.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// selects  4 of 64 columns a row by matmul, largest first; NaN before all, ties by column, -inf never
// tile     16 threads a row, 8 rows a block; matmul in registers, the best 4 by rank behind 4 delegates
//          a lane
// traffic  18432 B moved, 18432 B ideal, 20480 B unfused in 2 launches
// floor    0.0 us at 2.039 TB/s; instruction-bound at 0.38 flop/B
// needs    rows of 64 elements, next to each other; matmul: address and strides in multiples of 16 B
//
// method   register-resident top-k by 16 lanes a row. The largest of every few keys of a lane is their
//          delegate (Dr. Top-k, Gaihre et al., SC 2021); a network (Batcher, AFIPS 1968) finds the 4
//          best, and what reaches them is ranked by counting what is larger
// sections bar       the least of the 4 largest delegates
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

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
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
constexpr int column_bits = 6;
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
  __syncwarp();
}

// the larger of two comes first; NaN is above all numbers
__device__ __forceinline__ void exchange(float& a, float& b) {
  const float less = fminf(a, b);
  a = larger(a, b);
  b = less;
}

// 4 delegates that fall and then rise, in order: the largest first
__device__ __forceinline__ void merge_delegates(float (&delegates)[4]) {
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    #pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (!(q & step)) exchange(delegates[q], delegates[q + step]);
    }
  }
}

// a lane's delegates in order, the largest first: Batcher's bitonic network
__device__ __forceinline__ void sort_delegates(float (&delegates)[4]) {
  #pragma unroll
  for (int size = 2; size <= 4; size *= 2) {
    #pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      #pragma unroll
      for (int q = 0; q < 4; ++q) {
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
    const unsigned other = __shfl_up_sync(0xffffffffu, v, step);
    if (threadIdx.x % 16 >= step) v += other;
  }
  return v;
}

// what the threads of a block share: of 8 rows
struct alignas(16) Picker {
  float keys[4][128];  // of each thread
  Entry candidates[8][36];
  Entry picks[8][4];  // what is chosen, the best first
};
static_assert(sizeof(Picker) <= 4608, "the launch's shared memory");

extern "C" __global__ void __launch_bounds__(128)
moe_routing_experts(
    const float* __restrict__ matmul_ptr,
    int* __restrict__ experts_ptr,
    float* __restrict__ softmax_ptr,
    long long rows,
    long long matmul_stride,
    long long experts_stride,
    long long softmax_stride)
{
  constexpr int block_rows = 8;  // that a block takes
  constexpr int row_threads = 16;
  const int lane = threadIdx.x % row_threads;  // of the 16 threads that share a row
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long row = static_cast<long long>(blockIdx.x) * block_rows + threadIdx.x / row_threads;
  const bool live = row < rows;
  const float* const matmul_row = matmul_ptr + row * matmul_stride;
  int* const experts_row = experts_ptr + row * experts_stride;
  float* const softmax_row = softmax_ptr + row * softmax_stride;
  const int col = lane * 4;
  Vec<float, 4> matmul_vec;

  // pass 1 of 2: read matmul; keep matmul
  if (live) {
    matmul_vec = load<4>(matmul_row + col);
  }

  // ---- bar
  // a lane's 4 delegates are the largest of every 4th of its keys; the 4 best of a row make a bar, which 4 keys
  // reach and few more do
  const int at = threadIdx.x / 16;  // the row's place in the block
  float keys[4];
  float delegates[4];
  #pragma unroll
  for (int q = 0; q < 4; ++q) delegates[q] = -INFINITY;
  #pragma unroll
  for (int j = 0; j < 4; ++j) {
    keys[j] = -INFINITY;
    if (live) {
      const float matmul = matmul_vec.at[j];
      keys[j] = matmul;
    }
    delegates[j % 4] = larger(delegates[j % 4], keys[j]);
    picker.keys[j][threadIdx.x] = keys[j];  // registers have no addresses, these have
  }
  sort_delegates(delegates);
  #pragma unroll
  for (int step = 1; step < 16; step *= 2) {  // the best 4 of both lanes
    float beyond_lane[4];
    #pragma unroll
    for (int q = 0; q < 4; ++q) beyond_lane[q] = __shfl_xor_sync(0xffffffffu, delegates[3 - q], step);
    #pragma unroll
    for (int q = 0; q < 4; ++q) delegates[q] = larger(delegates[q], beyond_lane[q]);
    merge_delegates(delegates);
  }
  const unsigned order = order_of(delegates[3]);
  const float bar = key_at(order < infinite ? order > masked ? order : masked + 1 : infinite);

  // ---- collect
  // the keys that reach the bar are candidates
  unsigned passing = 0;  // a bit for each of the lane's keys that do
  #pragma unroll
  for (int j = 0; j < 4; ++j) passing |= static_cast<unsigned>(!(keys[j] < bar)) << j;
  const unsigned upto = lanes_sum_below(static_cast<unsigned>(count(passing)));
  const unsigned all = __shfl_sync(0xffffffffu, upto, 15, 16);

  // ---- rank
  if (vote(all > 32)) {  // ties: the best one is found 4 times, each time below the last one
    Entry last = ~Entry(0);
    #pragma unroll 1
    for (int r = 0; r < 4; ++r) {
      Entry best_entry = 0;
      #pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int own_col = lane * 4 + i;
        const float key = picker.keys[i][threadIdx.x];
        const Entry entry = entry_of(key, own_col);
        if (!(key <= -INFINITY) && entry < last && entry > best_entry) best_entry = entry;
      }
      #pragma unroll
      for (int step = 8; step > 0; step /= 2) {
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
      const int own_col = lane * 4 + i;
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
      if (rank < 4) picker.picks[at][rank] = entry;
    }
    for (unsigned i = all + lane; i < 4; i += 16) picker.picks[at][i] = 0;
  }
  meet();

  // ---- write
  // the 4 chosen, pass 1 of 3 over them: top = max(best_); write experts
  float top_part = -INFINITY;
  if (live && lane < 4) {
    const Entry entry = picker.picks[at][lane];
    const int experts = entry ? column_of(entry) : -1;
    const float best_ = entry ? key_of(entry) : -INFINITY;
    top_part = larger(top_part, best_);
    experts_row[lane] = experts;
  }
  const float top = row_max(top_part);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // the 4 chosen, pass 2 of 3 over them: sum_of_exps = sum(e)
  float sum_of_exps_part = 0.0f;
  if (live && lane < 4) {
    const Entry entry = picker.picks[at][lane];
    const float best_ = entry ? key_of(entry) : -INFINITY;
    const float best_minus_pivot = best_ - pivot;
    const float e = exponential(best_minus_pivot);
    sum_of_exps_part += e;
  }
  const float sum_of_exps = row_sum(sum_of_exps_part);
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // the 4 chosen, pass 3 of 3 over them: write softmax
  if (live && lane < 4) {
    const Entry entry = picker.picks[at][lane];
    const float best_ = entry ? key_of(entry) : -INFINITY;
    const float best_minus_pivot = best_ - pivot;
    const float e = exponential(best_minus_pivot);
    const float softmax = e * inverse_sum;
    softmax_row[lane] = softmax;
  }
}
