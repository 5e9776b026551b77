// logits_argmax_out  f32[M, V] -> i32[M, 1]  at M=32 V=128256
// out of logits_argmax.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// selects  1 of 128256 columns a row by logits, largest first; NaN before all, ties by column, -inf
//          never
// tile     a cluster of 16 blocks of 128 threads a row, the row in registers; some 1 of 128256 reach
//          the threshold of 1 warps
// traffic  16.4 MB moved, 16.4 MB ideal, 16.4 MB unfused in 1 launch
// floor    3.4 us at 4.8 TB/s; memory-bound at 0.25 flop/B
// needs    rows of 128256 elements, next to each other; logits: address and strides in multiples of 16
//          B
// launch   begins while the kernels before it run, and waits for them before all else
//
// method   register-resident top-k for few columns. The largest key of each thread is its delegate (Dr.
//          Top-k, Gaihre et al., SC 2021); the warps agree on a bar that at least 1 delegates reach,
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

constexpr int threads = 128;  // of a block
constexpr int row_threads = threads * 16;  // of a row: those of its cluster's blocks
constexpr int warps = 4;  // of a block
constexpr int row_warps = warps * 16;
constexpr int readers = threads / 16;  // that count the candidates of one block
constexpr int room = 32;  // candidates of a block
constexpr int limit = 256;  // candidates in all
constexpr unsigned aim = 16;  // candidates that a search tries for
constexpr int bins = 256;  // ranges of keys, by which candidates are counted
constexpr int own_bins = bins / threads;  // of a thread, the highest first
constexpr int bin_bits = 8;

// a candidate as one number: of two, the larger is the one to choose. Its upper bits are the order of its key, an integer
// that grows with the key; its lower bits are the column, counted from the row's end, for ties go to lower columns. 0 is none
typedef unsigned long long Entry;
constexpr int column_bits = 17;
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
  float keys[64][128];
  Entry entries[16][room];  // candidates of each block, in the first one
  Entry binned[256];  // candidates by bins
  Entry picks[1];  // what is chosen, the best first
  unsigned reached[row_warps], most[row_warps];  // by warp: the order that enough keys reach, and the largest
  unsigned bins_above[bins + 1];  // of each bin its candidates, then those above it
  unsigned totals[warps];  // candidates by warp
  unsigned counts[2][16];  // candidates of each block
  unsigned found[2];  // candidates of this block
  unsigned bar;  // its order
};
static_assert(sizeof(Picker) <= 40624, "the launch's shared memory");

// that of one of the row's blocks
__device__ __forceinline__ Picker& picker_of(Picker& own, unsigned block) {
  return *static_cast<Picker*>(__cluster_map_shared_rank(&own, block));
}

// what a thread of the row wrote can be read by all of them
__device__ __forceinline__ void meet_all() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}

// the largest order of the warp's threads: each brings that of its largest key
__device__ __forceinline__ unsigned reached_by(unsigned order) {
  return warp_most(order);
}

// the largest order of the row, of those that its warps said
__device__ __forceinline__ unsigned most_of(const Picker& picker) {
  unsigned most = 0;
  #pragma unroll
  for (int at = threadIdx.x % 32; at < row_warps; at += 32) {
    most = most > picker.most[at] ? most : picker.most[at];
  }
  return warp_most(most);
}

// how many candidates lie in bins above this thread's; `own` becomes how many its own bins hold, the highest first.
// Every thread of the block calls it
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

extern "C" __global__ void __cluster_dims__(16, 1, 1) __launch_bounds__(128, 5)
logits_argmax_out(
    const float* logits_ptr,
    int* __restrict__ out_ptr,
    long long rows,
    long long logits_stride,
    long long out_stride)
{
  asm volatile("griddepcontrol.wait;" ::: "memory");  // until the kernels before this one have ended
  constexpr int row_blocks = 16;  // that share a row
  const int lane = __clusterRelativeBlockRank() * threads + threadIdx.x;  // of the 2048 threads that share a row
  __cluster_barrier_arrive_relaxed();  // this block runs
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long row = blockIdx.x / row_blocks;
  const float* const logits_row = logits_ptr + row * logits_stride;
  int* const out_row = out_ptr + row * out_stride;

  // ---- read
  // pass 1 of 1: read logits; choose top_columns_ = the columns of the 1 largest logits
  Vec<float, 4> logits_read[16];
  #pragma unroll
  for (int v = 0; v < 16; ++v) {
    const int col = (v * row_threads + lane) * 4;
    if (v < 15 || col < 128256) {
      logits_read[v] = load<4>(logits_row + col);
    }
  }
  const int warp = threadIdx.x / 32, lane_of_warp = threadIdx.x % 32;
  for (int b = threadIdx.x; b <= bins; b += threads) picker.bins_above[b] = 0;
  if (threadIdx.x < 2) picker.found[threadIdx.x] = 0;
  if (threadIdx.x == 0) picker.bar = 0xffffffffu;
  const unsigned block = __clusterRelativeBlockRank();
  __cluster_barrier_wait();  // so does every block of the cluster, and may be written to
  float keys[16][4];
  float peak = -INFINITY;
  #pragma unroll
  for (int turn = 0; turn < 16; turn += 3) {  // while what follows is on its way
    float higher = peak;
    #pragma unroll
    for (int v = turn; v < turn + 3 && v < 16; ++v) {
      const int col = (v * row_threads + lane) * 4;
      #pragma unroll
      for (int j = 0; j < 4; ++j) keys[v][j] = -INFINITY;
      if (v < 15 || col < 128256) {
        const Vec<float, 4>& logits_vec = logits_read[v];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float logits = logits_vec.at[j];
          keys[v][j] = logits;
        }
      }
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        higher = larger(higher, keys[v][j]);
        picker.keys[v * 4 + j][threadIdx.x] = keys[v][j];  // registers have no addresses, these have
      }
    }
    peak = higher;
  }

  // ---- bar
  // 1 of the row's 64 warps have 1 thread each whose largest key reaches it
  const unsigned order = order_of(peak);
  const unsigned most = warp_most(order), reached = reached_by(order);
  if (lane_of_warp < 16) {  // each block is told
    Picker& far = picker_of(picker, lane_of_warp);
    far.reached[block * warps + warp] = reached;
    far.most[block * warps + warp] = most;
  }
  meet_all();
  if (warp * 32 < row_warps) {
    const unsigned own = threadIdx.x < row_warps ? picker.reached[threadIdx.x] : 0;
    int above = 0;
    #pragma unroll
    for (int other = 0; other < row_warps; ++other) above += picker.reached[other] > own;
    const unsigned least = warp_least(above < 1 ? own : 0xffffffffu);
    if (lane_of_warp == 0) atomicMin(&picker.bar, least > masked ? least : masked + 1);
  }
  __syncthreads();

  // ---- collect
  // what reaches the bar is a candidate, and goes to the row's first block. Ties, or a row in order, make too many:
  // a cutoff between too many and too few is looked for, by turns in proportion and in the middle
  const Entry bottom = static_cast<Entry>(picker.bar) << column_bits;
  Entry cutoff = bottom;
  const Entry highest = static_cast<Entry>(most_of(picker)) << column_bits | last_column;
  Entry enough = bottom, few = highest + 1;  // cutoffs that 1 reach, and that fewer do
  unsigned reach = 0;  // the number of those that reach `enough`
  Picker& first = picker_of(picker, 0);
  int side = 0;
  for (;; side ^= 1) {
    const unsigned least = static_cast<unsigned>(cutoff >> column_bits);
    const float bar = key_at(least < infinite ? least : infinite);
    Entry marks = 0;  // a bit for each key
    #pragma unroll
    for (int v = 0; v < 16; ++v) {
      #pragma unroll
      for (int j = 0; j < 4; ++j) marks |= static_cast<Entry>(!(keys[v][j] < bar)) << (v * 4 + j);
    }
    #pragma unroll 1
    while (marks) {
      const int element = 63 - __clzll(static_cast<long long>(marks));
      marks ^= Entry(1) << element;
      const int v = element / 4, j = element % 4;
      const Entry entry = entry_of(picker.keys[element][threadIdx.x], (v * row_threads + lane) * 4 + j);
      if (entry < cutoff) continue;
      const unsigned place = atomicAdd(&picker.found[side], 1u);
      if (place < room) first.entries[block][place] = entry;
    }
    __syncthreads();
    if (threadIdx.x < 16) picker_of(picker, threadIdx.x).counts[side][block] = picker.found[side];
    if (threadIdx.x == 0) picker.found[side ^ 1] = 0;
    meet_all();
    unsigned all = 0;
    bool fits = true;
    #pragma unroll
    for (int b = 0; b < 16; ++b) {
      all += picker.counts[side][b];
      fits = fits && picker.counts[side][b] <= room;
    }
    if (fits && all <= limit && (all >= 1 || cutoff == bottom)) break;
    if (all >= 1) {
      enough = cutoff;
      reach = all;
    } else {
      few = cutoff;
    }
    const Entry between = few - enough, wanted = reach > aim ? aim : reach;
    cutoff = enough + (side == 0 ? between - between * wanted / reach : between / 2);
  }
  if (block != 0) return;

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
  unsigned own[own_bins];
  unsigned above = add_up(picker, own);
  bool many = false;  // ties: are too many candidates in a bin to compare each with all?
  #pragma unroll
  for (int q = 0; q < own_bins; ++q) {
    many = many || (own[q] > 64 && above < 1);
    picker.bins_above[bins - 1 - threadIdx.x * own_bins - q] = above;
    above += own[q];
  }
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
    if (threadIdx.x < 1 && threadIdx.x < all) picker.picks[threadIdx.x] = binned[threadIdx.x];
  }
  #pragma unroll 1
  for (unsigned i = threadIdx.x; i < all && !sorts; i += threads) {
    const Entry entry = binned[i];
    const int bin = static_cast<int>((entry - lowest) >> by);
    unsigned rank = picker.bins_above[bin + 1];
    if (rank < 1) {
      #pragma unroll 1
      for (unsigned other = rank, end = picker.bins_above[bin]; other < end; ++other) rank += binned[other] > entry;
      if (rank < 1) picker.picks[rank] = entry;
    }
  }
  for (unsigned i = all + threadIdx.x; i < 1; i += threads) picker.picks[i] = 0;
  __syncthreads();

  // ---- write
  // the 1 chosen, pass 1 over them: write out
  if (lane < 1) {
    const Entry entry = picker.picks[lane];
    const int top_columns_ = entry ? column_of(entry) : -1;
    out_row[lane] = top_columns_;
  }
}
