// moe_router_gpt_oss  bf16[T, E], bf16[E] -> f32[T, K], i32[T, K]  at T=65536 E=128 K=4
// top-k, then softmax of what was chosen: weights and experts of each token.
//
//     def moe_router_gpt_oss(logits, bias):
//         best, experts = F.topk(F.cast(logits + bias, bf16), K)
//         return F.softmax(best), experts
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// selects  4 of 128 columns a row by cast, largest first; NaN before all, ties by column, -inf never
// tile     4 threads a row, 32 rows a block; cast in registers, the best 4 by rank behind 4 delegates a
//          lane
// traffic  18.9 MB moved, 18.9 MB ideal, 87.0 MB unfused in 4 launches
// floor    9.3 us at 2.039 TB/s; instruction-bound at 1.49 flop/B
// rounding cast to bf16 by an explicit cast; f32 between
// needs    rows of 128 elements, next to each other; logits, bias: address and strides in multiples of
//          16 B; bias [E] shared by every row
//
// method   register-resident top-k by 4 lanes a row. The largest of every few keys of a lane is their
//          delegate (Dr. Top-k, Gaihre et al., SC 2021); a network (Batcher, AFIPS 1968) finds the 4
//          best, and what reaches them is ranked by counting what is larger
// sections bar       the least of the 4 largest delegates
//          collect   the keys that reach the bar are candidates
//          rank      by the number of larger candidates; where ties make too many, repeated argmax
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
constexpr int column_bits = 7;
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
  for (int step = 1; step < 4; step *= 2) {
    const unsigned other = __shfl_up_sync(0xffffffffu, v, step);
    if (threadIdx.x % 4 >= step) v += other;
  }
  return v;
}

// what the threads of a block share: of 32 rows
struct alignas(16) Picker {
  float keys[32][128];  // of each thread
  Entry candidates[32][36];
  Entry picks[32][4];  // what is chosen, the best first
};
static_assert(sizeof(Picker) <= 26624, "the launch's shared memory");

extern "C" __global__ void __launch_bounds__(128)
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
  constexpr int block_rows = 32;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 4 threads that share a row
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long row = static_cast<long long>(blockIdx.x) * block_rows + threadIdx.x / row_threads;
  const bool live = row < rows;
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
    if (live) {
      logits_vec[v] = load<8>(logits_row + col);
      bias_vec[v] = load<8>(bias_ptr + col);
    }
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    if (live) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float logits = widened(logits_vec[v].at[j]);
        const float bias = widened(bias_vec[v].at[j]);
        const float add = logits + bias;
        const float cast = round_bf16(add);
        cast_kept[v][j] = cast;
      }
    }
  }

  // ---- bar
  // a lane's 4 delegates are the largest of every 4th of its keys; the 4 best of a row make a bar, which 4 keys
  // reach and few more do
  const int at = threadIdx.x / 4;  // the row's place in the block
  float keys[4][8];
  float delegates[4];
  #pragma unroll
  for (int q = 0; q < 4; ++q) delegates[q] = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      keys[v][j] = -INFINITY;
      if (live) {
        const float cast = cast_kept[v][j];
        keys[v][j] = cast;
      }
      delegates[(v * 8 + j) % 4] = larger(delegates[(v * 8 + j) % 4], keys[v][j]);
      picker.keys[v * 8 + j][threadIdx.x] = keys[v][j];  // registers have no addresses, these have
    }
  }
  sort_delegates(delegates);
  #pragma unroll
  for (int step = 1; step < 4; step *= 2) {  // the best 4 of both lanes
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
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) passing |= static_cast<unsigned>(!(keys[v][j] < bar)) << (v * 8 + j);
  }
  const unsigned upto = lanes_sum_below(static_cast<unsigned>(count(passing)));
  const unsigned all = __shfl_sync(0xffffffffu, upto, 3, 4);

  // ---- rank
  if (vote(all > 32)) {  // ties: the best one is found 4 times, each time below the last one
    Entry last = ~Entry(0);
    #pragma unroll 1
    for (int r = 0; r < 4; ++r) {
      Entry best_entry = 0;
      #pragma unroll 1
      for (int i = 0; i < 32; ++i) {
        const int own_col = (i / 8 * 4 + lane) * 8 + i % 8;
        const float key = picker.keys[i][threadIdx.x];
        const Entry entry = entry_of(key, own_col);
        if (!(key <= -INFINITY) && entry < last && entry > best_entry) best_entry = entry;
      }
      #pragma unroll
      for (int step = 2; step > 0; step /= 2) {
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
      const int own_col = (i / 8 * 4 + lane) * 8 + i % 8;
      passing &= passing - 1;
      picker.candidates[at][place] = entry_of(picker.keys[i][threadIdx.x], own_col);
    }
    if (lane < 4) picker.candidates[at][all + lane] = 0;  // as many as are compared at a time
    meet();
    #pragma unroll 1
    for (unsigned i = lane; i < all; i += 4) {
      const Entry entry = picker.candidates[at][i];
      unsigned rank = 0;
      #pragma unroll 1
      for (unsigned other = 0; other < all; other += 4) {
        #pragma unroll
        for (int q = 0; q < 4; ++q) rank += picker.candidates[at][other + q] > entry;
      }
      if (rank < 4) picker.picks[at][rank] = entry;
    }
    for (unsigned i = all + lane; i < 4; i += 4) picker.picks[at][i] = 0;
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
