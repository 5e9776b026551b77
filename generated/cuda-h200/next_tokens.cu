// next_tokens  f32[B, V], f32 -> f32[B, K], i32[B, K]  at B=64 V=50257 K=50
// The K largest of softmax(logits * scale) and their columns: NaN first, ties by column, -inf never.
//
//     def next_tokens(logits, scale):
//         values, columns = F.topk(F.softmax(logits * scale), K)
//         return values, columns
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// selects  50 of 50257 columns a row by logits_times_scale, largest first; NaN before all, ties by
//          column, -inf never
// tile     a cluster of 4 blocks of 256 threads a row, the row in registers; some 90 of 50257 reach the
//          threshold of 25 warps
// traffic  12.9 MB moved, 12.9 MB ideal, 77.2 MB unfused in 3 launches
// floor    2.7 us at 4.8 TB/s; memory-bound at 2.25 flop/B
// needs    rows of 50257 elements, next to each other
//
// method   register-resident top-k for few columns. The largest key of each thread is its delegate (Dr.
//          Top-k, Gaihre et al., SC 2021); the warps agree on a bar that at least 50 delegates reach,
//          and few more keys do
// sections read      the row, all of its vectors at once; keys stay in registers
//          bar       what enough delegates reach, by rank within each warp and then among warps
//          collect   the keys that reach it are candidates, in the first block
//          rank      counting sort by ranges of keys, comparisons within a range; where ties fill one,
//                    bitonic sort (Batcher, AFIPS 1968)
//          write     what is computed at the chosen columns

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

constexpr int threads = 256;  // of a block
constexpr int row_threads = threads * 4;  // of a row: those of its cluster's blocks
constexpr int warps = 8;  // of a block
constexpr int row_warps = warps * 4;
constexpr int readers = threads / 4;  // that count the candidates of one block
constexpr int room = 128;  // candidates of a block
constexpr int limit = 256;  // candidates in all
constexpr unsigned aim = 89;  // candidates that a search tries for
constexpr int bins = 256;  // ranges of keys, by which candidates are counted
constexpr int bin_bits = 8;

// a candidate as one number: of two, the larger is the one to choose. Its upper bits are the order of its key, an integer
// that grows with the key; its lower bits are the column, counted from the row's end, for ties go to lower columns. 0 is none
typedef unsigned long long Entry;
constexpr int column_bits = 16;
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

// the least and the most in the warp, in every lane
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

// what the threads of a block share
struct Picker {
  float keys[50][256];
  Entry entries[4][room];  // candidates of each block, in the first one
  Entry binned[256];  // candidates by bins
  Entry picks[50];  // what is chosen, the best first
  unsigned reached[row_warps], most[row_warps];  // by warp: the order that enough keys reach, and the largest
  float sums[row_warps];  // of exponentials below it
  unsigned bins_above[bins + 1];  // of each bin its candidates, then those above it
  unsigned totals[warps];  // candidates by warp
  unsigned counts[2][4];  // candidates of each block
  unsigned found[2];  // candidates of this block
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

// the order of rank 2 of the warp's threads: each brings that of its largest key
__device__ __forceinline__ unsigned reached_by(unsigned order) {
  int above = 0;
  #pragma unroll
  for (int lane = 0; lane < 32; ++lane) above += __shfl_sync(0xffffffffu, order, lane, 32) > order;
  return warp_least(above < 2 ? order : 0xffffffffu);
}

// the largest order of the row, of those that its warps said
__device__ __forceinline__ unsigned most_of(const Picker& picker) {
  const int at = threadIdx.x % 32;
  return warp_most(at < row_warps ? picker.most[at] : 0);
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
  const int at = threadIdx.x % 32;
  return warp_sum(at < row_warps ? picker.sums[at] * exponential(key_at(picker.most[at]) - below) : 0.0f);
}

// how many candidates lie in bins above this thread's; `own` becomes how many its own bin holds.
// Every thread of the block calls it
__device__ __forceinline__ unsigned add_up(Picker& picker, unsigned& own) {
  own = picker.bins_above[bins - 1 - threadIdx.x];
  const unsigned upto = sum_below(own);
  if (threadIdx.x % 32 == 31) picker.totals[threadIdx.x / 32] = upto;
  __syncthreads();
  unsigned above = upto - own;
  #pragma unroll
  for (int w = 0; w < warps; ++w) above += w < threadIdx.x / 32 ? picker.totals[w] : 0;
  return above;
}

// a candidate's distance from the lowest one, shifted right by so many bits, is its bin: the largest one, `span`, has one too
__device__ __forceinline__ int shift_for(Entry span) {
  const int bits = 64 - __clzll(static_cast<long long>(span));
  return bits > bin_bits ? bits - bin_bits : 0;
}

// n entries, the largest first (Batcher's bitonic sort); there is room for a power of two of them
__device__ __forceinline__ void sort(Entry* list, unsigned n) {
  unsigned size = 2;
  while (size < n) size *= 2;
  for (unsigned i = n + threadIdx.x; i < size; i += threads) list[i] = 0;
  __syncthreads();
  for (unsigned run = 2; run <= size; run *= 2) {
    for (unsigned step = run / 2; step > 0; step /= 2) {
      #pragma unroll 1
      for (unsigned i = threadIdx.x; i < size / 2; i += threads) {
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
  constexpr int row_blocks = 4;  // that share a row
  const int lane = __clusterRelativeBlockRank() * threads + threadIdx.x;  // of the 1024 threads that share a row
  __cluster_barrier_arrive_relaxed();  // this block runs
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long row = blockIdx.x / row_blocks;
  const float* const logits_row = logits_ptr + row * logits_stride;
  float* const values_row = values_ptr + row * values_stride;
  int* const columns_row = columns_ptr + row * columns_stride;

  // ---- read
  // pass 1 of 1: read logits; top = max(logits_times_scale) and sum_of_exps = sum(exp(logits_times_scale - top));
  //   choose columns = the columns of the 50 largest logits_times_scale
  Vec<float, 1> logits_read[50];
  #pragma unroll
  for (int v = 0; v < 50; ++v) {
    const int col = v * row_threads + lane;
    if (v < 49 || col < 50257) {
      logits_read[v] = load_each<1>(logits_row + col);
    }
  }
  const int warp = threadIdx.x / 32, lane_of_warp = threadIdx.x % 32;
  for (int b = threadIdx.x; b <= bins; b += threads) picker.bins_above[b] = 0;
  if (threadIdx.x < 2) picker.found[threadIdx.x] = 0;
  if (threadIdx.x == 0) picker.bar = 0xffffffffu;
  const unsigned block = __clusterRelativeBlockRank();
  __cluster_barrier_wait();  // so does every block of the cluster, and may be written to
  float keys[50];
  float peak = -INFINITY;
  float exponentials = 0.0f;  // their sum below the peak
  #pragma unroll
  for (int turn = 0; turn < 50; turn += 12) {  // while what follows is on its way
    float higher = peak;
    #pragma unroll
    for (int v = turn; v < turn + 12 && v < 50; ++v) {
      const int col = v * row_threads + lane;
      keys[v] = -INFINITY;
      if (v < 49 || col < 50257) {
        const Vec<float, 1>& logits_vec = logits_read[v];
        const float logits = logits_vec.at[0];
        const float logits_times_scale = logits * scale;
        keys[v] = logits_times_scale;
      }
      higher = larger(higher, keys[v]);
      picker.keys[v][threadIdx.x] = keys[v];  // registers have no addresses, these have
    }
    const float below = higher == -INFINITY ? 0.0f : higher;
    exponentials *= exponential(peak - below);
    #pragma unroll
    for (int v = turn; v < turn + 12 && v < 50; ++v) {
      exponentials += exponential(keys[v] - below);
    }
    peak = higher;
  }

  // ---- bar
  // 25 of the row's 32 warps have 2 threads each whose largest key reaches it
  const unsigned order = order_of(peak);
  const unsigned most = warp_most(order), reached = reached_by(order);
  exponentials = warp_sum(exponentials * exponential(peak - (most == masked ? 0.0f : key_at(most))));
  if (lane_of_warp < 4) {  // each block is told
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

  // ---- collect
  // what reaches the bar is a candidate, and goes to the row's first block. Ties, or a row in order, make too many:
  // a cutoff between too many and too few is looked for, by turns in proportion and in the middle
  const Entry bottom = static_cast<Entry>(picker.bar) << column_bits;
  Entry cutoff = bottom;
  const Entry highest = static_cast<Entry>(most_of(picker)) << column_bits | last_column;
  Entry enough = bottom, few = highest + 1;  // cutoffs that 50 reach, and that fewer do
  unsigned reach = 0;  // the number of those that reach `enough`
  Picker& first = picker_of(picker, 0);
  int side = 0;
  for (;; side ^= 1) {
    const unsigned least = static_cast<unsigned>(cutoff >> column_bits);
    const float bar = key_at(least < infinite ? least : infinite);
    Entry marks = 0;  // a bit for each key
    #pragma unroll
    for (int v = 0; v < 50; ++v) marks |= static_cast<Entry>(!(keys[v] < bar)) << v;
    #pragma unroll 1
    while (marks) {
      const int element = 63 - __clzll(static_cast<long long>(marks));
      marks ^= Entry(1) << element;
      const Entry entry = entry_of(picker.keys[element][threadIdx.x], element * row_threads + lane);
      if (entry < cutoff) continue;
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
    if (fits && all <= limit && (all >= 50 || cutoff == bottom)) break;
    if (all >= 50) {
      enough = cutoff;
      reach = all;
    } else {
      few = cutoff;
    }
    const Entry between = few - enough, wanted = reach > aim ? aim : reach;
    cutoff = enough + (side == 0 ? between - between * wanted / reach : between / 2);
  }
  if (block != 0) return;
  const float top = key_at(most_of(picker));
  const float sum_of_exps = sum_of(picker, top);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // ---- rank
  // a counting sort of the candidates into bins by their keys; within a bin each is compared with all others
  const unsigned from = threadIdx.x / readers;  // the block whose candidates this thread counts
  const Entry lowest = cutoff;
  const int by = shift_for(highest - lowest);
  #pragma unroll 1
  for (unsigned i = threadIdx.x % readers; i < picker.counts[side][from]; i += readers) {
    const Entry entry = picker.entries[from][i];
    atomicAdd(&picker.bins_above[(entry - lowest) >> by], 1u);
  }
  __syncthreads();
  unsigned own;
  const unsigned above = add_up(picker, own);
  const bool many = own > 64 && above < 50;  // ties: are too many candidates in the bin to compare each with all?
  picker.bins_above[bins - 1 - threadIdx.x] = above;
  if (threadIdx.x == 0) picker.bins_above[bins] = 0;
  const bool sorts = __syncthreads_or(many);
  Entry* const binned = picker.binned;
  #pragma unroll 1
  for (unsigned i = threadIdx.x % readers; i < picker.counts[side][from]; i += readers) {
    const Entry entry = picker.entries[from][i];
    binned[atomicAdd(&picker.bins_above[(entry - lowest) >> by], 1u)] = entry;
  }
  __syncthreads();
  const unsigned all = picker.bins_above[0];
  if (sorts) {
    sort(binned, all);
    if (threadIdx.x < 50 && threadIdx.x < all) picker.picks[threadIdx.x] = binned[threadIdx.x];
  }
  #pragma unroll 1
  for (unsigned i = threadIdx.x; i < all && !sorts; i += threads) {
    const Entry entry = binned[i];
    const int bin = static_cast<int>((entry - lowest) >> by);
    unsigned rank = picker.bins_above[bin + 1];
    if (rank < 50) {
      #pragma unroll 1
      for (unsigned other = rank, end = picker.bins_above[bin]; other < end; ++other) rank += binned[other] > entry;
      if (rank < 50) picker.picks[rank] = entry;
    }
  }
  for (unsigned i = all + threadIdx.x; i < 50; i += threads) picker.picks[i] = 0;
  __syncthreads();

  // ---- write
  // the 50 chosen, pass 1 over them: write values, columns
  if (lane < 50) {
    const Entry entry = picker.picks[lane];
    const int columns = entry ? column_of(entry) : -1;
    const float take_ = entry ? key_of(entry) : -INFINITY;
    const bool columns_below_0 = columns < 0;
    const float take_minus_pivot = take_ - pivot;
    const float exp_ = exponential(take_minus_pivot);
    const float exp_times_inverse_sum = exp_ * inverse_sum;
    const float values_ = columns_below_0 ? 0.0f : exp_times_inverse_sum;
    values_row[lane] = values_;
    columns_row[lane] = columns;
  }
}
