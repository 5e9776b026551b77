// topk  bf16[B, V] -> bf16[B, K], i32[B, K]  at B=256 V=128256 K=50
// The K largest logits of each row and their columns: NaN first, ties by column, -inf never.
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
// selects  50 of 128256 columns a row by logits, largest first; NaN before all, ties by column, -inf
//          never
// tile     a block of 512 threads a row; the row streams by, 4 x 8 elements a thread at a time; some 61
//          of 128256 pass the threshold, whose vectors are read again
// traffic  65.7 MB moved, 65.7 MB ideal, 65.7 MB unfused in 1 launch
// floor    12.4 us at 5.3 TB/s; memory-bound at 0.50 flop/B
// rounding values to bf16 when stored; f32 between
// needs    rows of 128256 elements, next to each other; logits: address and strides in multiples of 16
//          B

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
  return a > b || a != a ? a : b;
}

// one lane each, the lowest bit first
typedef unsigned long long Lanes;

// which lanes of the warp say so
__device__ __forceinline__ Lanes vote(bool says) {
  return __ballot(says);
}

__device__ __forceinline__ int count(Lanes lanes) {
  return __popcll(lanes);
}

// a candidate: its key, as an integer of the same order, above its column, from the last to the first, so that the
// larger of two entries is the one to choose; no entry is 0
typedef unsigned long long Entry;
constexpr int column_bits = 17;
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
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}

// the least and the most in the warp
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

constexpr int warps = 8;
constexpr int bins = 512;
constexpr int room = 256;  // candidates of a warp

struct Picker {
  Entry entries[2][warps * room];
  Entry picks[50];
  int notes[warps][512];
  unsigned bins_above[bins + 1];
  unsigned totals[warps];
  unsigned reached[warps];
  unsigned least, most;  // order among the candidates
  unsigned found, above, here;
};
static_assert(sizeof(Picker) <= 51696, "the launch's shared memory");

// the threshold just below `order`: what is larger has at least this order, and is not masked
__device__ __forceinline__ float below(unsigned order) {
  const unsigned before = order - 1 - (order == 0x80000000u);  // -0 is 0
  return key_at(before < masked ? masked : before > infinite ? infinite : before);
}

// the largest of a vector's keys; NaN is
__device__ __forceinline__ float largest(const float (&keys)[8]) {
  float v = keys[0];
  #pragma unroll
  for (int j = 1; j < 8; ++j) v = larger(v, keys[j]);
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
  if (threadIdx.x % 64 == 63) picker.totals[threadIdx.x / 64] = upto;
  __syncthreads();
  unsigned above = upto - sum;
  #pragma unroll
  for (int w = 0; w < warps; ++w) above += w < threadIdx.x / 64 ? picker.totals[w] : 0;
  return above;
}

// empties the bins and finds the range of the block's candidates, of which this thread has seen `least` to `most`
__device__ __forceinline__ void measure(Picker& picker, unsigned least, unsigned most) {
  for (int b = threadIdx.x; b < bins; b += 512) picker.bins_above[b] = 0;
  least = warp_least(least);
  most = warp_most(most);
  if (threadIdx.x % 64 == 0) {
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

// a floor that 50 of the block's candidates exceed and few more do, 0 if there are fewer: the bin that
// holds the last of them, looked into until it is small
__device__ __forceinline__ Entry cut(Picker& picker, const Entry* own_list, unsigned held) {
  unsigned least = 0xffffffffu, most = 0;
  #pragma unroll 1
  for (unsigned i = threadIdx.x % 64; i < held; i += 64) {
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
    for (unsigned i = threadIdx.x % 64; i < held; i += 64) {
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
      if (above < 50 && above + own[q] >= 50) {
        picker.found = bins - 1 - threadIdx.x * own_bins - q;
        picker.above = above;
        picker.here = own[q];
      }
      above += own[q];
    }
    if (threadIdx.x == 511 && above < 50) picker.found = bins;
    __syncthreads();
    if (picker.found == bins) return 0;
    low += static_cast<Entry>(picker.found) << shift;
    before = picker.above;
    if (before + picker.here <= 82 || shift == 0) return low - 1;
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

// an order that at least 50 of the row's elements reach: of 1 group a thread,
// each with a largest key in `peaks`, as many in every warp reach what the warp says as make 50 in all
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
  constexpr int want = 7;  // of each warp's groups
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
  if (threadIdx.x % 64 == 0) picker.reached[threadIdx.x / 64] = low;
  __syncthreads();
  const unsigned own = picker.reached[threadIdx.x % warps];
  return warp_least(own);
}

extern "C" __global__ void __launch_bounds__(512)
topk(
    const __bf16* __restrict__ logits_ptr,
    __bf16* __restrict__ values_ptr,
    int* __restrict__ columns_ptr,
    long long rows,
    long long logits_stride,
    long long values_stride,
    long long columns_stride)
{
  const int lane = threadIdx.x;  // of the 512 threads that share a row
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= rows) return;  // the grid's last line is longer than what is left
  const long long row = tile;
  const __bf16* const logits_row = logits_ptr + row * logits_stride;
  __bf16* const values_row = values_ptr + row * values_stride;
  int* const columns_row = columns_ptr + row * columns_stride;

  // walk 1 of 1: read logits; choose columns = the columns of the 50 largest logits
  if (threadIdx.x == 0) {
    picker.least = 0xffffffffu;
    picker.most = 0;
  }
  Entry floor = static_cast<Entry>(masked) << column_bits | last_column;  // no candidate that is not above it counts
  unsigned held = 0;  // candidates of this warp
  int side = 0;  // which half of picker.entries has them
  const int warp = threadIdx.x / 64, lane_of_warp = threadIdx.x % 64;
  Entry* own_list = picker.entries[0] + warp * room;
  const Lanes lanes_below = (Lanes(1) << lane_of_warp) - 1;
  int* const notes = picker.notes[warp];  // the largest keys of the warp's vectors, and then which vectors to look into
  int noted = 0;
  float best[1];  // the largest keys of parts of the thread's elements
  #pragma unroll
  for (int g = 0; g < 1; ++g) best[g] = -INFINITY;
  Vec<__bf16, 8> logits_vec_next[4];
  const auto read = [&](int turn, bool inside) {
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int col = ((turn + p) * 512 + lane) * 8;
      if (inside) {
        logits_vec_next[p] = load<8>(logits_row + col);
      } else if (col < 128256) {
        logits_vec_next[p] = load<8>(logits_row + col);
      }
    }
  };
  const auto see = [&](int turn, bool inside, bool ahead) {
    float peaks[4];
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
      peaks[p] = -INFINITY;
      const int col = ((turn + p) * 512 + lane) * 8;
      if (inside || col < 128256) {
        const Vec<__bf16, 8> logits_vec = logits_vec_next[p];
        if (ahead) {  // the vector of the next turn is on its way while this one's elements are computed
          const int col = ((turn + p + 4) * 512 + lane) * 8;
          logits_vec_next[p] = load<8>(logits_row + col);
        }
        float keys[8];
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float logits = static_cast<float>(logits_vec.at[j]);
          keys[j] = logits;
        }
        peaks[p] = largest(keys);
      }
      best[0] = larger(best[0], peaks[p]);
    }
    #pragma unroll
    for (int p = 0; p < 4; p += 4) {
      #pragma unroll
      for (int q = 1; q < 4; ++q) peaks[p] = larger(peaks[p], peaks[p + q]);
      notes[(noted + p / 4) * 64 + lane_of_warp] = __float_as_int(peaks[p]);
    }
    noted += 1;
  };
  read(0, true);
  #pragma unroll 1
  for (int turn = 0; turn < 32; turn += 4) {
    if (turn < 28) {
      see(turn, true, turn < 24);
    } else {
      see(turn, false, false);
    }
    if (turn >= 24 && turn < 28) read(turn + 4, false);
  }

  // what 50 elements reach is a threshold; vectors with keys above it are noted
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
  for (int slot = 0; slot < slots; slot += 1) {
    float peaks[1];
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      peaks[i] = __int_as_float(notes[(slot + i) * 64 + lane_of_warp]);
    }
    meet();  // the list of notes grows over what has been read
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      const bool passes = !(peaks[i] <= limit);
      const Lanes who = vote(passes);
      if (passes) notes[noted + count(who & lanes_below)] = ((from + (slot + i) * 4) * 512 + lane) * 8;
      noted += count(who);
    }
  }
  meet();

  // their elements above the floor are candidates: a lane looks at one at a time
  const int all_noted = noted * 32;
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
        const int place = seen + u * 64 + lane_of_warp;
        const int at = place < all_noted ? place : all_noted - 1, element = at % 32;
        cols[u] = notes[at / 32] + element / 8 * 4096 + element % 8;
        const int col = cols[u] < 128256 ? cols[u] : 128255;
        const float logits = static_cast<float>(logits_row[col]);
        keys[u] = place < all_noted && cols[u] < 128256 ? logits : -INFINITY;
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
          seen += 64;
        }
      }
    }
    meet();
    #pragma unroll 1
    for (unsigned i = before + lane_of_warp; i < held; i += 64) own_list[i] = entry_of_raw(own_list[i]);
    if (!__syncthreads_or(left)) break;
    meet();
    // keep the best 50 and a few more, spread evenly over the warps
    const Entry higher = cut(picker, own_list, held);
    floor = floor > higher ? floor : higher;
    unsigned kept = 0;
    #pragma unroll 1
    for (unsigned i = lane_of_warp; i < held; i += 64) kept += own_list[i] > floor;
    const unsigned upto = sum_below(kept);
    if (lane_of_warp == 63) picker.totals[warp] = upto;
    __syncthreads();
    unsigned place = upto - kept, all = 0;
    #pragma unroll
    for (int w = 0; w < warps; ++w) {
      place += w < warp ? picker.totals[w] : 0;
      all += picker.totals[w];
    }
    #pragma unroll 1
    for (unsigned i = lane_of_warp; i < held; i += 64) {
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

  // rank the candidates: into bins by their keys, and within a bin by comparing them
  unsigned least = 0xffffffffu, most = 0;
  #pragma unroll 1
  for (unsigned i = lane_of_warp; i < held; i += 64) {
    const Entry entry = picker.entries[side][warp * room + i];
    const unsigned order = static_cast<unsigned>(entry >> column_bits);
    least = least < order ? least : order;
    most = most > order ? most : order;
  }
  measure(picker, least, most);
  const Entry lowest = static_cast<Entry>(picker.least) << column_bits;
  const int by = shift_for((static_cast<Entry>(picker.most) << column_bits | last_column) - lowest);
  #pragma unroll 1
  for (unsigned i = lane_of_warp; i < held; i += 64) {
    const Entry entry = picker.entries[side][warp * room + i];
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
  Entry* const binned = picker.entries[side ^ 1];
  #pragma unroll 1
  for (unsigned i = lane_of_warp; i < held; i += 64) {
    const Entry entry = picker.entries[side][warp * room + i];
    binned[atomicAdd(&picker.bins_above[(entry - lowest) >> by], 1u)] = entry;
  }
  __syncthreads();
  const unsigned all = picker.bins_above[0];
  if (sorts) {
    sort(binned, all);
    for (unsigned i = threadIdx.x; i < 50 && i < all; i += 512) picker.picks[i] = binned[i];
  }
  #pragma unroll 1
  for (unsigned i = threadIdx.x; i < all && !sorts; i += 512) {
    const Entry entry = binned[i];
    const int bin = static_cast<int>((entry - lowest) >> by);
    unsigned rank = picker.bins_above[bin + 1];
    if (rank < 50) {
      #pragma unroll 1
      for (unsigned other = rank, end = picker.bins_above[bin]; other < end; ++other) rank += binned[other] > entry;
      if (rank < 50) picker.picks[rank] = entry;
    }
  }
  for (unsigned i = all + threadIdx.x; i < 50; i += 512) picker.picks[i] = 0;
  __syncthreads();

  // the 50 chosen, walk 1 over them: write values, columns
  #pragma unroll
  for (int rank = threadIdx.x; rank < 50; rank += 512) {
    const Entry entry = picker.picks[rank];
    const int columns = entry ? column_of(entry) : -1;
    const float values_ = entry ? key_of(entry) : -INFINITY;
    values_row[rank] = static_cast<__bf16>(values_);
    columns_row[rank] = columns;
  }
}
