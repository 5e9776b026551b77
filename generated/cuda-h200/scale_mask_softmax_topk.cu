// scale_mask_softmax_topk  f32[B, T, V], b8[B, T, V], f32 -> f32[B, T, K], i32[B, T, K]  at B=32 T=128 V=32000 K=128
// The K largest of softmax(logits * scale) and their columns, best first, among what `mask` keeps; scale is 1
// over the temperature. Where fewer than K are kept, the rest has probability 0 and column -1.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// selects  128 of 32000 columns a row by z, largest first; NaN before all, ties by column, -inf never
// tile     a block of 512 threads a row; the row streams by, 4 x 4 elements a thread at a time; some
//          169 of 32000 pass the threshold, whose vectors are read again
// traffic  659.6 MB moved, 659.6 MB ideal, 4329.6 MB unfused in 4 launches
// floor    137.4 us at 4.8 TB/s; memory-bound at 1.99 flop/B
// needs    rows of 32000 elements, next to each other; logits: address and strides in multiples of 16
//          B; mask: address and strides in multiples of 4 B

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

// the largest of the values seen and the sum of exp(value - largest), in one walk: the sum shrinks as the largest grows
struct MaxSum {
  float top;
  float total;

  __device__ __forceinline__ void merge(float other_top, float other_total) {
    const float peak = larger(top, other_top);
    const float pivot = peak == -INFINITY ? 0.0f : peak;  // nothing seen yet: exp(-inf - 0) is 0, not NaN
    total = total * exponential(top - pivot) + other_total * exponential(other_top - pivot);
    top = peak;
  }

  // 4 values at once: one exponential each, and one for the sum so far
  __device__ __forceinline__ void add(const float (&values)[4], float largest) {
    const float peak = larger(top, largest);
    const float pivot = peak == -INFINITY ? 0.0f : peak;
    total *= exponential(top - pivot);
    #pragma unroll
    for (int j = 0; j < 4; ++j) total += exponential(values[j] - pivot);
    top = peak;
  }
};

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// the largest value and the sum of exponentials below it over the 512 threads of a row, in every one of them
__device__ __forceinline__ MaxSum row_max_sum(MaxSum v, float* part_top, float* part_total) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v.merge(partner(v.top, step), partner(v.total, step));
  }
  if (threadIdx.x % 32 == 0) {
    part_top[threadIdx.x / 32] = v.top;
    part_total[threadIdx.x / 32] = v.total;
  }
  __syncthreads();
  v.top = part_top[threadIdx.x % 16];
  v.total = part_total[threadIdx.x % 16];
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v.merge(partner(v.top, step), partner(v.total, step));
  }
  return v;
}

// one lane each, the lowest bit first
typedef unsigned Lanes;

// which lanes of the warp say so
__device__ __forceinline__ Lanes vote(bool says) {
  return __ballot_sync(0xffffffffu, says);
}

__device__ __forceinline__ int count(Lanes lanes) {
  return __popc(lanes);
}

// a candidate: its key, as an integer of the same order, above its column, from the last to the first, so that the
// larger of two entries is the one to choose; no entry is 0
typedef unsigned long long Entry;
constexpr int column_bits = 15;
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

// a candidate as it was read: more lanes at a time make entries of candidates than find one
__device__ __forceinline__ Entry raw_entry(float key, int col) {
  return static_cast<Entry>(__float_as_uint(key)) << 32 | static_cast<unsigned>(col);
}

__device__ __forceinline__ Entry entry_of_raw(Entry raw) {
  return entry_of(__uint_as_float(static_cast<unsigned>(raw >> 32)), static_cast<int>(raw & 0xffffffffu));
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

constexpr int warps = 16;
constexpr int bins = 512;
constexpr int room = 128;  // candidates of a warp

struct Picker {
  Entry entries[2][warps * room];
  Entry picks[128];
  int notes[warps][256];
  unsigned bins_above[bins + 1];
  unsigned totals[warps];
  unsigned reached[warps];
  unsigned least, most;  // order among the candidates
  unsigned found, above, here;
};
static_assert(sizeof(Picker) <= 52384, "the launch's shared memory");

// the threshold just below `order`: what is larger has at least this order, and is not masked
__device__ __forceinline__ float below(unsigned order) {
  const unsigned before = order - 1 - (order == 0x80000000u);  // -0 is 0
  return key_at(before < masked ? masked : before > infinite ? infinite : before);
}

// the largest of a vector's keys; NaN is
__device__ __forceinline__ float largest(const float (&keys)[4]) {
  float v = keys[0];
  #pragma unroll
  for (int j = 1; j < 4; ++j) v = larger(v, keys[j]);
  return v;
}

constexpr int own_bins = bins / 512;  // of a thread, the highest first

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

// empties the bins and finds the range of the block's candidates, of which this thread has seen `least` to `most`
__device__ __forceinline__ void measure(Picker& picker, unsigned least, unsigned most) {
  for (int b = threadIdx.x; b < bins; b += 512) picker.bins_above[b] = 0;
  least = warp_least(least);
  most = warp_most(most);
  if (threadIdx.x % 32 == 0) {
    atomicMin(&picker.least, least);
    atomicMax(&picker.most, most);
  }
  __syncthreads();
}

// by how many bits to shift what lies up to `span` above the lowest candidate, so that it says the bin
__device__ __forceinline__ int shift_for(Entry span) {
  const int bits = 64 - __clzll(static_cast<long long>(span));
  return bits > 9 ? bits - 9 : 0;
}

// a floor that 128 of the block's candidates exceed and few more do, 0 if there are fewer: the bin that
// holds the last of them, looked into until it is small
__device__ __forceinline__ Entry cut(Picker& picker, const Entry* own_list, unsigned held) {
  unsigned least = 0xffffffffu, most = 0;
  #pragma unroll 1
  for (unsigned i = threadIdx.x % 32; i < held; i += 32) {
    const unsigned order = static_cast<unsigned>(own_list[i] >> column_bits);
    least = least < order ? least : order;
    most = most > order ? most : order;
  }
  measure(picker, least, most);
  if (picker.most < picker.least) return 0;
  Entry low = static_cast<Entry>(picker.least) << column_bits;
  int shift = shift_for((static_cast<Entry>(picker.most) << column_bits | last_column) - low), width = 63;
  unsigned before = 0;  // candidates above the range that is looked into
  for (;;) {
    #pragma unroll 1
    for (unsigned i = threadIdx.x % 32; i < held; i += 32) {
      const Entry entry = own_list[i];
      if (entry >= low && (entry - low) >> width == 0) atomicAdd(&picker.bins_above[(entry - low) >> shift], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      picker.least = 0xffffffffu;
      picker.most = 0;
    }
    unsigned own[own_bins];
    unsigned above = before + add_up(picker, own);
    #pragma unroll
    for (int q = 0; q < own_bins; ++q) {
      if (above < 128 && above + own[q] >= 128) {
        picker.found = bins - 1 - threadIdx.x * own_bins - q;
        picker.above = above;
        picker.here = own[q];
      }
      above += own[q];
    }
    if (threadIdx.x == 511 && above < 128) picker.found = bins;
    __syncthreads();
    if (picker.found == bins) return 0;
    low += static_cast<Entry>(picker.found) << shift;
    before = picker.above;
    if (before + picker.here <= 160 || shift == 0) return low - 1;
    width = shift;
    shift = shift > 9 ? shift - 9 : 0;
    for (int b = threadIdx.x; b < bins; b += 512) picker.bins_above[b] = 0;
    __syncthreads();
  }
}

// n entries, the largest first (Batcher's bitonic sort); there is room for a power of two of them
__device__ __forceinline__ void sort(Entry* list, unsigned n) {
  unsigned size = 2;
  while (size < n) size *= 2;
  for (unsigned i = n + threadIdx.x; i < size; i += 512) list[i] = 0;
  __syncthreads();
  for (unsigned run = 2; run <= size; run *= 2) {
    for (unsigned step = run / 2; step > 0; step /= 2) {
      #pragma unroll 1
      for (unsigned i = threadIdx.x; i < size / 2; i += 512) {
        const unsigned low = i / step * 2 * step + i % step, high = low + step;
        const Entry a = list[low], b = list[high];
        if ((a < b) == ((low & run) == 0)) {
          list[low] = b;
          list[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

// an order that at least 128 of the row's elements reach: of 1 group a thread,
// each with a largest key in `peaks`, as many in every warp reach what the warp says as make 128 in all
__device__ __forceinline__ unsigned tighten(Picker& picker, const float (&peaks)[1]) {
  unsigned orders[1];
  unsigned low = 0xffffffffu, high = 0;
  #pragma unroll
  for (int g = 0; g < 1; ++g) {
    orders[g] = order_of(peaks[g]);
    low = low < orders[g] ? low : orders[g];
    high = high > orders[g] ? high : orders[g];
  }
  high = warp_most(high);
  constexpr int want = 8;  // of each warp's groups
  low = warp_least(low);
  #pragma unroll 1
  for (int turn = 0; turn < 12 && high - low > 1; ++turn) {  // any bound that enough reach will do
    const unsigned middle = low + (high - low) / 2;
    int reach = 0;
    #pragma unroll
    for (int g = 0; g < 1; ++g) reach += count(vote(orders[g] >= middle));
    if (reach >= want) low = middle;
    if (reach == want) break;
    if (reach < want) high = middle;
  }
  if (threadIdx.x % 32 == 0) picker.reached[threadIdx.x / 32] = low;
  __syncthreads();
  const unsigned own = picker.reached[threadIdx.x % warps];
  return warp_least(own);
}

extern "C" __global__ void __launch_bounds__(512, 2)
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
  const int lane = threadIdx.x;  // of the 512 threads that share a row
  __shared__ float part[2][16];
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long row = blockIdx.x;
  const float* const logits_row = logits_ptr + row * logits_stride;
  const unsigned char* const mask_row = mask_ptr + row * mask_stride;
  float* const values_row = values_ptr + row * values_stride;
  int* const columns_row = columns_ptr + row * columns_stride;

  // walk 1 of 1: read logits, mask; top = max(z) and total = sum(exp(z - top)); choose columns = the columns of
  //   the 128 largest z
  MaxSum total_part = {-INFINITY, 0.0f};
  if (threadIdx.x == 0) {
    picker.least = 0xffffffffu;
    picker.most = 0;
  }
  Entry floor = static_cast<Entry>(masked) << column_bits | last_column;  // no candidate that is not above it counts
  unsigned held = 0;  // candidates of this warp
  int side = 0;  // which half of picker.entries has them
  const int warp = threadIdx.x / 32, lane_of_warp = threadIdx.x % 32;
  Entry* own_list = picker.entries[0] + warp * room;
  const Lanes lanes_below = (Lanes(1) << lane_of_warp) - 1;
  int* const notes = picker.notes[warp];  // the largest keys of the warp's vectors, and then which vectors to look into
  int noted = 0;
  float best[1];  // the largest keys of parts of the thread's elements
  #pragma unroll
  for (int g = 0; g < 1; ++g) best[g] = -INFINITY;
  Vec<float, 4> logits_vec_next[4];
  Vec<unsigned char, 4> mask_vec_next[4];
  const auto read = [&](int turn, bool inside) {
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int col = ((turn + p) * 512 + lane) * 4;
      if (inside) {
        logits_vec_next[p] = load<4>(logits_row + col);
        mask_vec_next[p] = load<4>(mask_row + col);
      } else if (col < 32000) {
        logits_vec_next[p] = load<4>(logits_row + col);
        mask_vec_next[p] = load<4>(mask_row + col);
      }
    }
  };
  const auto see = [&](int turn, bool inside, bool ahead) {
    float peaks[4];
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
      peaks[p] = -INFINITY;
      const int col = ((turn + p) * 512 + lane) * 4;
      if (inside || col < 32000) {
        const Vec<float, 4> logits_vec = logits_vec_next[p];
        const Vec<unsigned char, 4> mask_vec = mask_vec_next[p];
        if (ahead) {  // the vector of the next turn is on its way while this one's elements are computed
          const int col = ((turn + p + 4) * 512 + lane) * 4;
          logits_vec_next[p] = load<4>(logits_row + col);
          mask_vec_next[p] = load<4>(mask_row + col);
        }
        float keys[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float logits = logits_vec.at[j];
          const bool mask = mask_vec.at[j] != 0;
          const float mul = logits * scale;
          const float z = mask ? mul : (-INFINITY);
          keys[j] = z;
        }
        peaks[p] = largest(keys);
        total_part.add(keys, peaks[p]);
      }
      best[0] = larger(best[0], peaks[p]);
    }
    #pragma unroll
    for (int p = 0; p < 4; p += 2) {
      #pragma unroll
      for (int q = 1; q < 2; ++q) peaks[p] = larger(peaks[p], peaks[p + q]);
      notes[(noted + p / 2) * 32 + lane_of_warp] = __float_as_int(peaks[p]);
    }
    noted += 2;
  };
  read(0, true);
  #pragma unroll 1
  for (int turn = 0; turn < 16; turn += 4) {
    if (turn < 12) {
      see(turn, true, turn < 8);
    } else {
      see(turn, false, false);
    }
    if (turn >= 8 && turn < 12) read(turn + 4, false);
  }

  // what 128 elements reach is a threshold; vectors with keys above it are noted
  float limit = -INFINITY;
  const unsigned order = tighten(picker, best);
  const Entry reached = (static_cast<Entry>(order) << column_bits) - 1;
  if (reached > floor) {
    floor = reached;
    limit = below(order);
  }
  const int from = 0;
  const int slots = noted;
  noted = 0;
  #pragma unroll 1
  for (int slot = 0; slot < slots; slot += 2) {
    float peaks[2];
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      peaks[i] = __int_as_float(notes[(slot + i) * 32 + lane_of_warp]);
    }
    meet();  // the list of notes grows over what has been read
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool passes = !(peaks[i] <= limit);
      const Lanes who = vote(passes);
      if (passes) notes[noted + count(who & lanes_below)] = ((from + (slot + i) * 2) * 512 + lane) * 4;
      noted += count(who);
    }
  }
  meet();

  // their elements above the floor are candidates: a lane looks at one at a time
  const int all_noted = noted * 8;
  int seen = 0;  // elements of noted vectors
  bool exact = false;  // has a cut raised the floor beyond the limit?
  for (;;) {
    const unsigned before = held;
    bool left = false;
    while (seen < all_noted && !left) {
      float keys[4];
      int cols[4];
      #pragma unroll
      for (int u = 0; u < 4; ++u) {
        const int place = seen + u * 32 + lane_of_warp;
        const int at = place < all_noted ? place : all_noted - 1, element = at % 8;
        cols[u] = notes[at / 8] + element / 4 * 2048 + element % 4;
        const int col = cols[u] < 32000 ? cols[u] : 31999;
        const float logits = logits_row[col];
        const bool mask = mask_row[col] != 0;
        const float mul = logits * scale;
        const float z = mask ? mul : (-INFINITY);
        keys[u] = place < all_noted && cols[u] < 32000 ? z : -INFINITY;
      }
      #pragma unroll
      for (int u = 0; u < 4; ++u) {
        bool passes = !(keys[u] <= limit);
        if (exact) passes = passes && entry_of(keys[u], cols[u]) > floor;
        const Lanes who = vote(passes);
        left = left || held + count(who) > room;
        if (!left) {
          if (passes) own_list[held + count(who & lanes_below)] = raw_entry(keys[u], cols[u]);
          held += count(who);
          seen += 32;
        }
      }
    }
    meet();
    #pragma unroll 1
    for (unsigned i = before + lane_of_warp; i < held; i += 32) own_list[i] = entry_of_raw(own_list[i]);
    if (!__syncthreads_or(left)) break;
    meet();
    // keep the best 128 and a few more, spread evenly over the warps
    const Entry higher = cut(picker, own_list, held);
    floor = floor > higher ? floor : higher;
    unsigned kept = 0;
    #pragma unroll 1
    for (unsigned i = lane_of_warp; i < held; i += 32) kept += own_list[i] > floor;
    const unsigned upto = sum_below(kept);
    if (lane_of_warp == 31) picker.totals[warp] = upto;
    __syncthreads();
    unsigned place = upto - kept, all = 0;
    #pragma unroll
    for (int w = 0; w < warps; ++w) {
      place += w < warp ? picker.totals[w] : 0;
      all += picker.totals[w];
    }
    #pragma unroll 1
    for (unsigned i = lane_of_warp; i < held; i += 32) {
      if (own_list[i] > floor) {
        picker.entries[side ^ 1][place % warps * room + place / warps] = own_list[i];
        ++place;
      }
    }
    held = all / warps + (warp < all % warps);
    side ^= 1;
    own_list = picker.entries[side] + warp * room;
    exact = true;
    __syncthreads();
  }
  const MaxSum total_all = row_max_sum(total_part, part[0], part[1]);
  const float top = total_all.top;
  const float total = total_all.total;
  const bool eq = top == (-INFINITY);
  const float pivot = eq ? 0.0f : top;
  const bool eq_2 = total == 0.0f;
  const float div = 1.0f / total;
  const float scale_2 = eq_2 ? 0.0f : div;

  // rank the candidates: into bins by their keys, and within a bin by comparing them
  unsigned least = 0xffffffffu, most = 0;
  #pragma unroll 1
  for (unsigned i = lane_of_warp; i < held; i += 32) {
    const Entry entry = picker.entries[side][warp * room + i];
    const unsigned order = static_cast<unsigned>(entry >> column_bits);
    least = least < order ? least : order;
    most = most > order ? most : order;
  }
  measure(picker, least, most);
  const Entry lowest = static_cast<Entry>(picker.least) << column_bits;
  const int by = shift_for((static_cast<Entry>(picker.most) << column_bits | last_column) - lowest);
  #pragma unroll 1
  for (unsigned i = lane_of_warp; i < held; i += 32) {
    const Entry entry = picker.entries[side][warp * room + i];
    atomicAdd(&picker.bins_above[(entry - lowest) >> by], 1u);
  }
  __syncthreads();
  unsigned own[own_bins];
  unsigned above = add_up(picker, own);
  bool many = false;  // ties: too many candidates in one bin to compare each with all
  #pragma unroll
  for (int q = 0; q < own_bins; ++q) {
    many = many || (own[q] > 64 && above < 128);
    picker.bins_above[bins - 1 - threadIdx.x * own_bins - q] = above;
    above += own[q];
  }
  if (threadIdx.x == 0) picker.bins_above[bins] = 0;
  const bool sorts = __syncthreads_or(many);
  Entry* const binned = picker.entries[side ^ 1];
  #pragma unroll 1
  for (unsigned i = lane_of_warp; i < held; i += 32) {
    const Entry entry = picker.entries[side][warp * room + i];
    binned[atomicAdd(&picker.bins_above[(entry - lowest) >> by], 1u)] = entry;
  }
  __syncthreads();
  const unsigned all = picker.bins_above[0];
  if (sorts) {
    sort(binned, all);
    for (unsigned i = threadIdx.x; i < 128 && i < all; i += 512) picker.picks[i] = binned[i];
  }
  #pragma unroll 1
  for (unsigned i = threadIdx.x; i < all && !sorts; i += 512) {
    const Entry entry = binned[i];
    const int bin = static_cast<int>((entry - lowest) >> by);
    unsigned rank = picker.bins_above[bin + 1];
    if (rank < 128) {
      #pragma unroll 1
      for (unsigned other = rank, end = picker.bins_above[bin]; other < end; ++other) rank += binned[other] > entry;
      if (rank < 128) picker.picks[rank] = entry;
    }
  }
  for (unsigned i = all + threadIdx.x; i < 128; i += 512) picker.picks[i] = 0;
  __syncthreads();

  // the 128 chosen, walk 1 over them: write values, columns
  #pragma unroll
  for (int rank = threadIdx.x; rank < 128; rank += 512) {
    const Entry entry = picker.picks[rank];
    const int columns = entry ? column_of(entry) : -1;
    const float take_ = entry ? key_of(entry) : -INFINITY;
    const bool lt = columns < 0;
    const float sub_2 = take_ - pivot;
    const float exp_ = exponential(sub_2);
    const float mul_2 = exp_ * scale_2;
    const float values_ = lt ? 0.0f : mul_2;
    values_row[rank] = values_;
    columns_row[rank] = columns;
  }
}
