// next_tokens  f32[B, V], f32 -> f32[B, K], i32[B, K]  at B=64 V=50257 K=50
// The K largest of softmax(logits * scale) and their columns: NaN first, ties by column, -inf never.
//
//     def next_tokens(logits, scale):
//         values, columns = F.topk(F.softmax(logits * scale), K)
//         return values, columns
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// selects  50 of 50257 columns a row by mul, largest first; NaN before all, ties by column, -inf never
// tile     a cluster of 4 blocks of 256 threads a row, which hold it; some 90 of 50257 reach the bar of
//          25 warps
// traffic  12.9 MB moved, 12.9 MB ideal, 77.2 MB unfused in 3 launches
// floor    2.7 us at 4.8 TB/s; memory-bound at 2.25 flop/B
// needs    rows of 50257 elements, next to each other

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// N values that move together, 16 bytes at a time where they fill them
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
};

// N values at p, one by one: p may lie anywhere
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_each(const T* p) {
  Vec<T, N> v;
  #pragma unroll
  for (int j = 0; j < N; ++j) v.at[j] = p[j];
  return v;
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

// a candidate: its key, as an integer of the same order, above its column, from the last to the first, so that the
// larger of two entries is the one to choose; no entry is 0
typedef unsigned long long Entry;
constexpr int column_bits = 16;
constexpr Entry last_column = (Entry(1) << column_bits) - 1;
constexpr unsigned masked = 0x007fffffu;  // the order of -inf
constexpr unsigned infinite = 0xff800000u;  // that of inf; only a NaN is not above a threshold of inf, nor below it

// NaN above all numbers, and 0 as large as -0
__device__ __forceinline__ unsigned order_of(float key) {
  const unsigned bits = __float_as_uint(key + 0.0f);
  if (key != key) return 0xffffffffu;
  return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float key_at(unsigned order) {
  return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
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

// the least and the most in the warp
__device__ __forceinline__ unsigned warp_least(unsigned v) {
  return __reduce_min_sync(0xffffffffu, v);
}

__device__ __forceinline__ unsigned warp_most(unsigned v) {
  return __reduce_max_sync(0xffffffffu, v);
}

// the sum of v over this lane and those below it
__device__ __forceinline__ unsigned sum_below(unsigned v) {
  #pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned other = __shfl_up_sync(0xffffffffu, v, step);
    if (threadIdx.x % 32 >= step) v += other;
  }
  return v;
}

constexpr int warps = 8;
constexpr int row_warps = 32;
constexpr int bins = 256;
constexpr int room = 128;  // candidates of a block

struct Picker {
  float keys[50][256];
  Entry entries[4][room];  // what each block of the row found, in the first one
  Entry binned[256];
  Entry picks[50];
  unsigned reached[row_warps], most[row_warps];  // orders that each warp said
  float sums[row_warps];  // of exponentials below its most
  unsigned bins_above[bins + 1];
  unsigned totals[warps];
  unsigned counts[2][4];  // candidates of each block, and
  unsigned found[2];  // of this one
  unsigned bar;  // its order
};
static_assert(sizeof(Picker) <= 59232, "the launch's shared memory");

// that of one of the row's blocks
__device__ __forceinline__ Picker& picker_of(Picker& own, unsigned block) {
  return *static_cast<Picker*>(__cluster_map_shared_rank(&own, block));
}

// what a thread of the row wrote can be read by all of them
__device__ __forceinline__ void meet_all() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}

// the order that 2 of the warp's threads reach
__device__ __forceinline__ unsigned reached_by(unsigned order) {
  int above = 0;
  #pragma unroll
  for (int lane = 0; lane < 32; ++lane) above += __shfl_sync(0xffffffffu, order, lane, 32) > order;
  return warp_least(above < 2 ? order : 0xffffffffu);
}

// the largest order of the row
__device__ __forceinline__ unsigned most_of(const Picker& picker) {
  unsigned most = 0;
  #pragma unroll
  for (int at = threadIdx.x % 32; at < row_warps; at += 32) {
    most = most > picker.most[at] ? most : picker.most[at];
  }
  return warp_most(most);
}

// the sum in the warp, in every lane
__device__ __forceinline__ float warp_sum(float v) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// the sum of exponentials below the row's largest key, from what its warps said
__device__ __forceinline__ float sum_of(const Picker& picker, float top) {
  const float below = top == -INFINITY ? 0.0f : top;
  float sum = 0.0f;
  #pragma unroll
  for (int at = threadIdx.x % 32; at < row_warps; at += 32) {
    sum += picker.sums[at] * exponential(key_at(picker.most[at]) - below);
  }
  return warp_sum(sum);
}

constexpr int own_bins = bins / 256;  // of a thread, the highest first

// the candidates in bins above this thread's; `own` is how many its own bins hold. Every thread of the block calls it
__device__ __forceinline__ unsigned add_up(Picker& picker, unsigned (&own)[own_bins]) {
  const int first = bins - 1 - threadIdx.x * own_bins;
  unsigned sum = 0;
  #pragma unroll
  for (int q = 0; q < own_bins; ++q) {
    own[q] = picker.bins_above[first - q];
    sum += own[q];
  }
  const unsigned upto = sum_below(sum);
  if (threadIdx.x % 32 == 31) picker.totals[threadIdx.x / 32] = upto;
  __syncthreads();
  unsigned above = upto - sum;
  #pragma unroll
  for (int w = 0; w < warps; ++w) above += w < threadIdx.x / 32 ? picker.totals[w] : 0;
  return above;
}

// by how many bits to shift what lies up to `span` above the lowest candidate, so that it says the bin
__device__ __forceinline__ int shift_for(Entry span) {
  const int bits = 64 - __clzll(static_cast<long long>(span));
  return bits > 8 ? bits - 8 : 0;
}

// n entries, the largest first (Batcher's bitonic sort); there is room for a power of two of them
__device__ __forceinline__ void sort(Entry* list, unsigned n) {
  unsigned size = 2;
  while (size < n) size *= 2;
  for (unsigned i = n + threadIdx.x; i < size; i += 256) list[i] = 0;
  __syncthreads();
  for (unsigned run = 2; run <= size; run *= 2) {
    for (unsigned step = run / 2; step > 0; step /= 2) {
      #pragma unroll 1
      for (unsigned i = threadIdx.x; i < size / 2; i += 256) {
        const unsigned low = 2 * i - (i & (step - 1)), high = low + step;
        const Entry a = list[low], b = list[high];
        if ((a < b) == ((low & run) == 0)) {
          list[low] = b;
          list[high] = a;
        }
      }
      if (step > 32 || step == 1) {
        __syncthreads();
      } else {
        meet();  // a warp's pairs of the next step are among its own
      }
    }
  }
}

extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(256, 3)
next_tokens(
    const float* __restrict__ logits_ptr,
    float scale,
    float* __restrict__ values_ptr,
    int* __restrict__ columns_ptr,
    long long rows,
    long long logits_stride,
    long long values_stride,
    long long columns_stride)
{
  const int lane = __clusterRelativeBlockRank() * 256 + threadIdx.x;  // of the 1024 threads that share a row
  __cluster_barrier_arrive_relaxed();  // this block runs
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long row = blockIdx.x / 4;
  const float* const logits_row = logits_ptr + row * logits_stride;
  float* const values_row = values_ptr + row * values_stride;
  int* const columns_row = columns_ptr + row * columns_stride;

  // walk 1 of 1: read logits; top = max(mul) and sum_of_exps = sum(exp(mul - top)); choose columns = the columns
  //   of the 50 largest mul
  Vec<float, 1> logits_read[50];
  #pragma unroll
  for (int v = 0; v < 50; ++v) {
    const int col = v * 1024 + lane;
    if (v < 49 || col < 50257) {
      logits_read[v] = load_each<1>(logits_row + col);
    }
  }
  const int warp = threadIdx.x / 32, lane_of_warp = threadIdx.x % 32;
  for (int b = threadIdx.x; b <= bins; b += 256) picker.bins_above[b] = 0;
  if (threadIdx.x < 2) picker.found[threadIdx.x] = 0;
  if (threadIdx.x == 0) picker.bar = 0xffffffffu;
  const unsigned block = __clusterRelativeBlockRank();
  __cluster_barrier_wait();  // so does every block of the cluster, and may be written to
  float keys[50][1];
  float peak = -INFINITY;
  float exponentials = 0.0f;  // their sum below the peak
  #pragma unroll
  for (int turn = 0; turn < 50; turn += 12) {  // while what follows is on its way
    float higher = peak;
    #pragma unroll
    for (int v = turn; v < turn + 12 && v < 50; ++v) {
      const int col = v * 1024 + lane;
      #pragma unroll
      for (int j = 0; j < 1; ++j) keys[v][j] = -INFINITY;
      if (v < 49 || col < 50257) {
        const Vec<float, 1>& logits_vec = logits_read[v];
        #pragma unroll
        for (int j = 0; j < 1; ++j) {
          const float logits = logits_vec.at[j];
          const float mul = logits * scale;
          keys[v][j] = mul;
        }
      }
      #pragma unroll
      for (int j = 0; j < 1; ++j) {
        higher = larger(higher, keys[v][j]);
        picker.keys[v][threadIdx.x] = keys[v][j];  // registers have no addresses
      }
    }
    const float below = higher == -INFINITY ? 0.0f : higher;
    exponentials *= exponential(peak - below);
    #pragma unroll
    for (int v = turn; v < turn + 12 && v < 50; ++v) {
      #pragma unroll
      for (int j = 0; j < 1; ++j) exponentials += exponential(keys[v][j] - below);
    }
    peak = higher;
  }

  // a bar: 25 of the row's 32 warps have 2 threads each whose peak reaches it
  const unsigned order = order_of(peak);
  const unsigned most = warp_most(order), reached = reached_by(order);
  exponentials = warp_sum(exponentials * exponential(peak - (most == masked ? 0.0f : key_at(most))));
  if (lane_of_warp < 4) {
    Picker& far = picker_of(picker, lane_of_warp);
    far.reached[block * warps + warp] = reached;
    far.most[block * warps + warp] = most;
    far.sums[block * warps + warp] = exponentials;
  }
  meet_all();
  if (warp * 32 < row_warps) {
    const unsigned own = threadIdx.x < row_warps ? picker.reached[threadIdx.x] : 0;
    int above = 0;
    #pragma unroll
    for (int other = 0; other < row_warps; ++other) above += picker.reached[other] > own;
    const unsigned least = warp_least(above < 25 ? own : 0xffffffffu);
    if (lane_of_warp == 0) atomicMin(&picker.bar, least > masked ? least : masked + 1);
  }
  __syncthreads();

  // what reaches it goes to the row's first block
  const Entry bottom = static_cast<Entry>(picker.bar) << column_bits;
  Entry floor = bottom;
  const Entry highest = static_cast<Entry>(most_of(picker)) << column_bits | last_column;
  Entry enough = bottom, few = highest + 1;  // floors that 50 reach, or fewer
  unsigned reach = 0;  // the number of those that reach `enough`
  Picker& first = picker_of(picker, 0);
  int side = 0;
  for (;; side ^= 1) {
    const unsigned least = static_cast<unsigned>(floor >> column_bits);
    const float bar = key_at(least < infinite ? least : infinite);
    Entry marks = 0;  // a bit for each key
    #pragma unroll
    for (int v = 0; v < 50; ++v) {
      #pragma unroll
      for (int j = 0; j < 1; ++j) marks |= static_cast<Entry>(!(keys[v][j] < bar)) << (v);
    }
    #pragma unroll 1
    while (marks) {
      const int element = 63 - __clzll(static_cast<long long>(marks));
      marks ^= Entry(1) << element;
      const int v = element, j = 0;
      const Entry entry = entry_of(picker.keys[element][threadIdx.x], v * 1024 + lane + j);
      if (entry < floor) continue;
      const unsigned place = atomicAdd(&picker.found[side], 1u);
      if (place < room) first.entries[block][place] = entry;
    }
    __syncthreads();
    if (threadIdx.x < 4) picker_of(picker, threadIdx.x).counts[side][block] = picker.found[side];
    if (threadIdx.x == 0) picker.found[side ^ 1] = 0;
    meet_all();
    unsigned all = 0;
    bool fits = true;
    #pragma unroll
    for (int b = 0; b < 4; ++b) {
      all += picker.counts[side][b];
      fits = fits && picker.counts[side][b] <= room;
    }
    if (fits && all <= 256 && (all >= 50 || floor == bottom)) break;
    // ties, or a row in order: what lies between too many and too few is parted in proportion and halved in turns
    if (all >= 50) {
      enough = floor;
      reach = all;
    } else {
      few = floor;
    }
    const Entry between = few - enough, wanted = reach > 89 ? 89 : reach;
    floor = enough + (side == 0 ? between - between * wanted / reach : between / 2);
  }
  if (block != 0) return;
  const float top = key_at(most_of(picker));
  const float sum_of_exps = sum_of(picker, top);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float scale_2 = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // rank the candidates: into bins by their keys, and within a bin by comparing them
  const unsigned from = threadIdx.x / 64;  // the block whose candidates this thread counts
  const Entry lowest = floor;
  const int by = shift_for(highest - lowest);
  #pragma unroll 1
  for (unsigned i = threadIdx.x % 64; i < picker.counts[side][from]; i += 64) {
    const Entry entry = picker.entries[from][i];
    atomicAdd(&picker.bins_above[(entry - lowest) >> by], 1u);
  }
  __syncthreads();
  unsigned own[own_bins];
  unsigned above = add_up(picker, own);
  bool many = false;  // ties: too many candidates in one bin to compare each with all
  #pragma unroll
  for (int q = 0; q < own_bins; ++q) {
    many = many || (own[q] > 64 && above < 50);
    picker.bins_above[bins - 1 - threadIdx.x * own_bins - q] = above;
    above += own[q];
  }
  if (threadIdx.x == 0) picker.bins_above[bins] = 0;
  const bool sorts = __syncthreads_or(many);
  Entry* const binned = picker.binned;
  #pragma unroll 1
  for (unsigned i = threadIdx.x % 64; i < picker.counts[side][from]; i += 64) {
    const Entry entry = picker.entries[from][i];
    binned[atomicAdd(&picker.bins_above[(entry - lowest) >> by], 1u)] = entry;
  }
  __syncthreads();
  const unsigned all = picker.bins_above[0];
  if (sorts) {
    sort(binned, all);
    for (unsigned i = threadIdx.x; i < 50 && i < all; i += 256) picker.picks[i] = binned[i];
  }
  #pragma unroll 1
  for (unsigned i = threadIdx.x; i < all && !sorts; i += 256) {
    const Entry entry = binned[i];
    const int bin = static_cast<int>((entry - lowest) >> by);
    unsigned rank = picker.bins_above[bin + 1];
    if (rank < 50) {
      #pragma unroll 1
      for (unsigned other = rank, end = picker.bins_above[bin]; other < end; ++other) rank += binned[other] > entry;
      if (rank < 50) picker.picks[rank] = entry;
    }
  }
  for (unsigned i = all + threadIdx.x; i < 50; i += 256) picker.picks[i] = 0;
  __syncthreads();

  // the 50 chosen, walk 1 over them: write values, columns
  #pragma unroll
  for (int rank = threadIdx.x; rank < 50; rank += 256) {
    const Entry entry = picker.picks[rank];
    const int columns = entry ? column_of(entry) : -1;
    const float take_ = entry ? key_of(entry) : -INFINITY;
    const bool columns_below_0 = columns < 0;
    const float take_minus_pivot = take_ - pivot;
    const float exp_ = exponential(take_minus_pivot);
    const float mul_2 = exp_ * scale_2;
    const float values_ = columns_below_0 ? 0.0f : mul_2;
    values_row[rank] = values_;
    columns_row[rank] = columns;
  }
}
