// scale_mask_softmax_topk  f32[B, T, V], b8[B, T, V], f32 -> f32[B, T, K], i32[B, T, K]  at B=32 T=128 V=32000 K=128
// The K largest of softmax(logits * scale) and their columns, best first, among what `mask` keeps; scale is 1
// over the temperature. Where fewer than K are kept, the rest has probability 0 and column -1.
//
//     def scale_mask_softmax_topk(logits, mask, scale):
//         z = F.where(mask, logits * scale, -float("inf"))
//         values, columns = F.topk(F.softmax(z), K)
//         return values, columns
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// selects  128 of 32000 columns a row by z, largest first; NaN before all, ties by column, -inf never
// tile     a block of 1024 threads a row, the row in registers; some 212 of 32000 reach the threshold
//          of 13 warps
// traffic  659.6 MB moved, 659.6 MB ideal, 4329.6 MB unfused in 4 launches
// floor    82.4 us at 8 TB/s; memory-bound at 1.99 flop/B
// needs    rows of 32000 elements, next to each other; logits: address and strides in multiples of 16
//          B; mask: address and strides in multiples of 4 B
//
// method   register-resident top-k for few columns. The largest key of each thread is its delegate (Dr.
//          Top-k, Gaihre et al., SC 2021); the warps agree on a bar that at least 128 delegates reach,
//          and few more keys do
// sections read      the row, all of its vectors at once; keys stay in registers
//          bar       what enough delegates reach, by rank within each warp and then among warps
//          collect   the keys that reach it are candidates
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

constexpr int threads = 1024;  // of a block
constexpr int warps = 16;  // of a block
constexpr int room = 512;  // candidates of a block
constexpr unsigned aim = 320;  // candidates that a search tries for
constexpr int bins = 1024;  // ranges of keys, by which candidates are counted
constexpr int bin_bits = 10;

// a candidate as one number: of two, the larger is the one to choose. Its upper bits are the order of its key, an integer
// that grows with the key; its lower bits are the column, counted from the row's end, for ties go to lower columns. 0 is none
typedef unsigned long long Entry;
constexpr int column_bits = 15;
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

// the least and the most in the warp, in every lane
__device__ __forceinline__ unsigned warp_least(unsigned v) {
  for (int step = 32; step > 0; step /= 2) {
    const unsigned other = __shfl_xor(v, step);
    v = v < other ? v : other;
  }
  return v;
}

__device__ __forceinline__ unsigned warp_most(unsigned v) {
  for (int step = 32; step > 0; step /= 2) {
    const unsigned other = __shfl_xor(v, step);
    v = v > other ? v : other;
  }
  return v;
}

// the sum of v over this lane and those below it
__device__ __forceinline__ unsigned sum_below(unsigned v) {
  #pragma unroll
  for (int step = 1; step < 64; step *= 2) {
    const unsigned other = __shfl_up(v, step);
    if (threadIdx.x % 64 >= step) v += other;
  }
  return v;
}

// what the threads of a block share
struct Picker {
  float keys[32][1024];
  Entry entries[room];  // candidates
  Entry binned[512];  // candidates by bins
  Entry picks[128];  // what is chosen, the best first
  unsigned reached[warps], most[warps];  // by warp: the order that enough keys reach, and the largest
  float sums[warps];  // of exponentials below it
  unsigned bins_above[bins + 1];  // of each bin its candidates, then those above it
  unsigned totals[warps];  // candidates by warp
  unsigned counts[2];  // candidates
  unsigned found[2];  // the same, while they are counted
  unsigned bar;  // its order
};
static_assert(sizeof(Picker) <= 144672, "the launch's shared memory");

// the order of rank 10 of the warp's threads: each brings that of its largest key
__device__ __forceinline__ unsigned reached_by(unsigned order) {
  int above = 0;
  #pragma unroll
  for (int lane = 0; lane < 64; ++lane) above += __shfl(order, lane, 64) > order;
  return warp_least(above < 10 ? order : 0xffffffffu);
}

// the largest order of the row, of those that its warps said
__device__ __forceinline__ unsigned most_of(const Picker& picker) {
  const int at = threadIdx.x % 64;
  return warp_most(at < warps ? picker.most[at] : 0);
}

// the sum in the warp, in every lane
__device__ __forceinline__ float warp_sum(float v) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) v += __shfl_xor(v, step);
  return v;
}

// the sum of exponentials below the row's largest key, from what its warps said
__device__ __forceinline__ float sum_of(const Picker& picker, float top) {
  const float below = top == -INFINITY ? 0.0f : top;
  const int at = threadIdx.x % 64;
  return warp_sum(at < warps ? picker.sums[at] * exponential(key_at(picker.most[at]) - below) : 0.0f);
}

// how many candidates lie in bins above this thread's; `own` becomes how many its own bin holds.
// Every thread of the block calls it
__device__ __forceinline__ unsigned add_up(Picker& picker, unsigned& own) {
  own = picker.bins_above[bins - 1 - threadIdx.x];
  const unsigned upto = sum_below(own);
  if (threadIdx.x % 64 == 63) picker.totals[threadIdx.x / 64] = upto;
  __syncthreads();
  unsigned above = upto - own;
  #pragma unroll
  for (int w = 0; w < warps; ++w) above += w < threadIdx.x / 64 ? picker.totals[w] : 0;
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
      if (step > 64 || step == 1) {
        __syncthreads();
      } else {
        meet();  // a warp's pairs of the next step are among its own
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(1024)
scale_mask_softmax_topk(
    const float* __restrict__ logits_ptr,
    const unsigned char* __restrict__ mask_ptr,
    float scale,
    float* __restrict__ values_ptr,
    int* __restrict__ columns_ptr,
    long long rows,
    long long logits_stride,
    long long mask_stride,
    long long values_stride,
    long long columns_stride)
{
  const int lane = threadIdx.x;  // of the 1024 threads that share a row
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const float* const logits_row = logits_ptr + row * logits_stride;
  const unsigned char* const mask_row = mask_ptr + row * mask_stride;
  float* const values_row = values_ptr + row * values_stride;
  int* const columns_row = columns_ptr + row * columns_stride;

  // ---- read
  // pass 1 of 1: read logits, mask; top = max(z) and sum_of_exps = sum(exp(z - top)); choose columns = the columns
  //   of the 128 largest z
  Vec<float, 4> logits_read[8];
  Vec<unsigned char, 4> mask_read[8];
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * threads + lane) * 4;
    if (v < 7 || col < 32000) {
      logits_read[v] = load<4>(logits_row + col);
      mask_read[v] = load<4>(mask_row + col);
    }
  }
  const int warp = threadIdx.x / 64, lane_of_warp = threadIdx.x % 64;
  for (int b = threadIdx.x; b <= bins; b += threads) picker.bins_above[b] = 0;
  if (threadIdx.x < 2) picker.found[threadIdx.x] = 0;
  if (threadIdx.x == 0) picker.bar = 0xffffffffu;
  float keys[8][4];
  float peak = -INFINITY;
  float exponentials = 0.0f;  // their sum below the peak
  #pragma unroll
  for (int turn = 0; turn < 8; turn += 3) {  // while what follows is on its way
    float higher = peak;
    #pragma unroll
    for (int v = turn; v < turn + 3 && v < 8; ++v) {
      const int col = (v * threads + lane) * 4;
      #pragma unroll
      for (int j = 0; j < 4; ++j) keys[v][j] = -INFINITY;
      if (v < 7 || col < 32000) {
        const Vec<float, 4>& logits_vec = logits_read[v];
        const Vec<unsigned char, 4>& mask_vec = mask_read[v];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float logits = logits_vec.at[j];
          const bool mask = mask_vec.at[j] != 0;
          const float logits_times_scale = logits * scale;
          const float z = mask ? logits_times_scale : (-INFINITY);
          keys[v][j] = z;
        }
      }
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        higher = larger(higher, keys[v][j]);
        picker.keys[v * 4 + j][threadIdx.x] = keys[v][j];  // registers have no addresses, these have
      }
    }
    const float below = higher == -INFINITY ? 0.0f : higher;
    exponentials *= exponential(peak - below);
    #pragma unroll
    for (int v = turn; v < turn + 3 && v < 8; ++v) {
      #pragma unroll
      for (int j = 0; j < 4; ++j) exponentials += exponential(keys[v][j] - below);
    }
    peak = higher;
  }

  // ---- bar
  // 13 of the row's 16 warps have 10 threads each whose largest key reaches it
  const unsigned order = order_of(peak);
  const unsigned most = warp_most(order), reached = reached_by(order);
  exponentials = warp_sum(exponentials * exponential(peak - (most == masked ? 0.0f : key_at(most))));
  if (lane_of_warp == 0) {
    picker.reached[warp] = reached;
    picker.most[warp] = most;
    picker.sums[warp] = exponentials;
  }
  __syncthreads();
  if (warp * 64 < warps) {
    const unsigned own = threadIdx.x < warps ? picker.reached[threadIdx.x] : 0;
    int above = 0;
    #pragma unroll
    for (int other = 0; other < warps; ++other) above += picker.reached[other] > own;
    const unsigned least = warp_least(above < 13 ? own : 0xffffffffu);
    if (lane_of_warp == 0) atomicMin(&picker.bar, least > masked ? least : masked + 1);
  }
  __syncthreads();

  // ---- collect
  // what reaches the bar is a candidate. Ties, or a row in order, make too many:
  // a cutoff between too many and too few is looked for, by turns in proportion and in the middle
  const Entry bottom = static_cast<Entry>(picker.bar) << column_bits;
  Entry cutoff = bottom;
  const Entry highest = static_cast<Entry>(most_of(picker)) << column_bits | last_column;
  Entry enough = bottom, few = highest + 1;  // cutoffs that 128 reach, and that fewer do
  unsigned reach = 0;  // the number of those that reach `enough`
  int side = 0;
  for (;; side ^= 1) {
    const unsigned least = static_cast<unsigned>(cutoff >> column_bits);
    const float bar = key_at(least < infinite ? least : infinite);
    Entry marks = 0;  // a bit for each key
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      #pragma unroll
      for (int j = 0; j < 4; ++j) marks |= static_cast<Entry>(!(keys[v][j] < bar)) << (v * 4 + j);
    }
    #pragma unroll 1
    while (marks) {
      const int element = 63 - __clzll(static_cast<long long>(marks));
      marks ^= Entry(1) << element;
      const int v = element / 4, j = element % 4;
      const Entry entry = entry_of(picker.keys[element][threadIdx.x], (v * threads + lane) * 4 + j);
      if (entry < cutoff) continue;
      const unsigned place = atomicAdd(&picker.found[side], 1u);
      if (place < room) picker.entries[place] = entry;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      picker.counts[side] = picker.found[side];
      picker.found[side ^ 1] = 0;
    }
    __syncthreads();
    const unsigned all = picker.counts[side];
    if (all <= room && (all >= 128 || cutoff == bottom)) break;
    if (all >= 128) {
      enough = cutoff;
      reach = all;
    } else {
      few = cutoff;
    }
    const Entry between = few - enough, wanted = reach > aim ? aim : reach;
    cutoff = enough + (side == 0 ? between - between * wanted / reach : between / 2);
  }
  const float top = key_at(most_of(picker));
  const float sum_of_exps = sum_of(picker, top);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // ---- rank
  // a counting sort of the candidates into bins by their keys; within a bin each is compared with all others
  const Entry lowest = cutoff;
  const int by = shift_for(highest - lowest);
  #pragma unroll 1
  for (unsigned i = threadIdx.x; i < picker.counts[side]; i += threads) {
    const Entry entry = picker.entries[i];
    atomicAdd(&picker.bins_above[(entry - lowest) >> by], 1u);
  }
  __syncthreads();
  unsigned own;
  const unsigned above = add_up(picker, own);
  const bool many = own > 64 && above < 128;  // ties: are too many candidates in the bin to compare each with all?
  picker.bins_above[bins - 1 - threadIdx.x] = above;
  if (threadIdx.x == 0) picker.bins_above[bins] = 0;
  const bool sorts = __syncthreads_or(many);
  Entry* const binned = picker.binned;
  #pragma unroll 1
  for (unsigned i = threadIdx.x; i < picker.counts[side]; i += threads) {
    const Entry entry = picker.entries[i];
    binned[atomicAdd(&picker.bins_above[(entry - lowest) >> by], 1u)] = entry;
  }
  __syncthreads();
  const unsigned all = picker.bins_above[0];
  if (sorts) {
    sort(binned, all);
    if (threadIdx.x < 128 && threadIdx.x < all) picker.picks[threadIdx.x] = binned[threadIdx.x];
  }
  #pragma unroll 1
  for (unsigned i = threadIdx.x; i < all && !sorts; i += threads) {
    const Entry entry = binned[i];
    const int bin = static_cast<int>((entry - lowest) >> by);
    unsigned rank = picker.bins_above[bin + 1];
    if (rank < 128) {
      #pragma unroll 1
      for (unsigned other = rank, end = picker.bins_above[bin]; other < end; ++other) rank += binned[other] > entry;
      if (rank < 128) picker.picks[rank] = entry;
    }
  }
  for (unsigned i = all + threadIdx.x; i < 128; i += threads) picker.picks[i] = 0;
  __syncthreads();

  // ---- write
  // the 128 chosen, pass 1 over them: write values, columns
  if (lane < 128) {
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
