// next_tokens  f32[B, V], f32 -> f32[B, K], i32[B, K]  at B=64 V=50257 K=50
// The K largest of softmax(logits * scale) and their columns: NaN first, ties by column, -inf never.
//
//     def next_tokens(logits, scale):
//         values, columns = F.topk(F.softmax(logits * scale), K)
//         return values, columns
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
// selects  50 of 50257 columns a row by mul, largest first; NaN before all, ties by column, -inf never
// tile     a block of 512 threads a row; the row streams by, 4 x 4 elements a thread at a time; some 61
//          of 50257 pass the threshold, whose vectors are read again
// traffic  12.9 MB moved, 12.9 MB ideal, 77.2 MB unfused in 3 launches
// floor    2.4 us at 5.3 TB/s; memory-bound at 2.25 flop/B
// needs    rows of 50257 elements, next to each other; logits: address in multiples of 16 B, no stride
//          below 0

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

#ifndef NAN
#define NAN __int_as_float(0x7fc00000)
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

// how many values p lies behind the last address that is a multiple of `bytes`
template <int bytes, typename T>
__device__ __forceinline__ int phase(const T* p) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(p) % bytes / sizeof(T));
}

// the aligned pieces of up to 8 bytes that N values lie across, which start anywhere
template <typename T, int N>
struct Span {
  static constexpr int piece = alignof(Vec<T, N>) < 8 ? alignof(Vec<T, N>) : 8;
  unsigned words[(sizeof(Vec<T, N>) + piece) / 4];
};

// the pieces from p on, which is aligned to them; `last`: the last one is among them
template <int N, typename T>
__device__ __forceinline__ Span<T, N> load_pieces(const T* p, bool last = true) {
  constexpr int each = Span<T, N>::piece / 4, words = sizeof(Span<T, N>) / 4;
  Span<T, N> span{};
  #pragma unroll
  for (int i = 0; i < words; i += each) {
    if (i + each == words && !last) break;
    const Vec<unsigned, each> some = load<each>(reinterpret_cast<const unsigned*>(p) + i);
    #pragma unroll
    for (int k = 0; k < each; ++k) span.words[i + k] = some.at[k];
  }
  return span;
}

// the pieces of values col ... col + N - 1 of a row; `ends`: what lies behind the row may not be read, others of its values
// stand in for that
template <int N, typename T>
__device__ __forceinline__ Span<T, N> load_span(const T* row, int col, int cols, bool ends) {
  constexpr int each = 4 / sizeof(T), words = sizeof(Span<T, N>) / 4;
  const int from = col - phase<Span<T, N>::piece>(row + col);
  if (!ends || from + words * each <= cols) return load_pieces<N>(row + from);
  Span<T, N> span;
  #pragma unroll
  for (int i = 0; i < words; ++i) {
    T some[each];
    #pragma unroll
    for (int k = 0; k < each; ++k) {
      const int at = from + i * each + k;
      some[k] = row[at < 0 ? 0 : at < cols ? at : cols - 1];
    }
    memcpy(&span.words[i], some, 4);
  }
  return span;
}

// the vector that lies across the pieces of a row
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> joined(Span<T, N> span, const T* row) {
  constexpr int piece = Span<T, N>::piece, words = sizeof(span) / 4;
  const int bytes = phase<piece>(row) * sizeof(T);
  #pragma unroll
  for (int step = piece / 8; step > 0; step /= 2) {
    #pragma unroll
    for (int i = 0; i + step < words; ++i) {
      const unsigned here = span.words[i], there = span.words[i + step];  // a choice of places would want an address
      span.words[i] = bytes & 4 * step ? there : here;
    }
  }
  if constexpr (sizeof(T) < 4) {
    #pragma unroll
    for (int i = 0; i + 1 < words; ++i) {
      const unsigned long long pair = static_cast<unsigned long long>(span.words[i + 1]) << 32 | span.words[i];
      span.words[i] = static_cast<unsigned>(pair >> bytes % 4 * 8);
    }
  }
  Vec<T, N> v;
  memcpy(&v, span.words, sizeof(v));
  return v;
}

// values col ... col + N - 1 of a row that starts anywhere
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_across(const T* row, int col, int cols, bool ends) {
  return joined(load_span<N>(row, col, cols, ends), row + col);
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
  return __shfl_xor(v, step);
}

// the sum over the 512 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 8];
  #pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
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

// the sum of exponentials below a pivot, 0 or what was larger when it last moved: each is a multiply-add and a power of 2,
// and none waits for the largest of its vector. `total` is the sum of 2^(log2(e) * value + shift)
struct PivotSum {
  float total = 0.0f;
  float shift = 0.0f;  // -log2(e) * pivot

  __device__ __forceinline__ void move(float largest) {
    const float now = fminf(shift, -1.44269504f * largest);
    total *= power_of_2(now - shift);
    shift = now;
  }

  __device__ __forceinline__ void add(const float (&values)[4]) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) total += power_of_2(fmaf(1.44269504f, values[j], shift));
  }

  // the sum of exp(value - top) of a row, where `top` is its largest
  __device__ __forceinline__ float below(float top) const {
    return top == -INFINITY ? total : total * power_of_2(-fmaf(1.44269504f, top, shift));
  }
};

// has a sum lost what matters? A value may have been too far above the pivot, or all far below 0, or the shift not precise
__device__ __forceinline__ bool lost(float top, float total) {
  return fabsf(top) < INFINITY && !(total < INFINITY && top > -40.0f && top < 16777216.0f);
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
constexpr int room = 128;  // candidates of a warp

struct alignas(16) Picker {
  int notes[warps][448];
  Entry entries[2][warps * room];
  unsigned bins_above[bins + 1];
  unsigned totals[warps];
  unsigned reached[warps], highest[warps];  // orders that each warp said
  unsigned least, most;  // order among the candidates
  unsigned found, above, here;
};
static_assert(sizeof(Picker) <= 32896, "the launch's shared memory");

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
  if (threadIdx.x % 64 == 63) picker.totals[threadIdx.x / 64] = upto;
  __syncthreads();
  unsigned above = upto - sum;
  #pragma unroll
  for (int w = 0; w < warps; ++w) above += w < threadIdx.x / 64 ? picker.totals[w] : 0;
  return above;
}

// the range of the block's candidates, of which this thread has seen `least` to `most`
__device__ __forceinline__ void measure(Picker& picker, unsigned least, unsigned most) {
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

// an order that at least 50 of the row's elements reach: of 1 group a thread,
// each with a largest key in `peaks`, as many in every warp reach what the warp says as make 50 in all;
// `most` becomes the order of the largest key
__device__ __forceinline__ unsigned tighten(Picker& picker, const float (&peaks)[1], unsigned& most) {
  unsigned orders[1];
  unsigned low = 0xffffffffu, high = 0;
  #pragma unroll
  for (int g = 0; g < 1; ++g) {
    orders[g] = order_of(peaks[g]);
    low = low < orders[g] ? low : orders[g];
    high = high > orders[g] ? high : orders[g];
  }
  high = warp_most(high);
  most = high;
  constexpr int want = 7, enough = 7;  // of each warp's groups
  low = warp_least(low);
  #pragma unroll 1
  for (int turn = 0; turn < 12 && high - low > 1; ++turn) {  // any bound that enough reach will do
    const unsigned middle = low + (high - low) / 2;
    int reach = 0;
    #pragma unroll
    for (int g = 0; g < 1; ++g) reach += count(vote(orders[g] >= middle));
    if (reach < want) {
      high = middle;
      continue;
    }
    low = middle;
    if (reach <= enough) break;
  }
  if (threadIdx.x % 64 == 0) {
    picker.reached[threadIdx.x / 64] = low;
    picker.highest[threadIdx.x / 64] = most;
  }
  __syncthreads();
  const unsigned own = picker.reached[threadIdx.x % warps];
  most = warp_most(picker.highest[threadIdx.x % warps]);
  return warp_least(own);
}

extern "C" __global__ void __launch_bounds__(512)
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
  const int lane = threadIdx.x;  // of the 512 threads that share a row
  __shared__ float part[2][8];
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= rows) return;  // the grid's last line is longer than what is left
  const long long row = tile;
  const float* const logits_row = logits_ptr + row * logits_stride;
  const bool logits_ends = logits_ptr + (rows - 1) * logits_stride - logits_row < 8;
  float* const values_row = values_ptr + row * values_stride;
  int* const columns_row = columns_ptr + row * columns_stride;

  // walk 1 of 1: read logits; top = max(mul) and sum_of_exps = sum(exp(mul - top)); choose columns = the columns
  //   of the 50 largest mul
  PivotSum sum_of_exps_part;
  if (threadIdx.x == 0) {
    picker.least = 0xffffffffu;
    picker.most = 0;
  }
  #pragma unroll
  for (int q = 0; q < own_bins; ++q) picker.bins_above[q * 512 + threadIdx.x] = 0;
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
  unsigned most = masked;  // the order of the largest of the row's
  const float* const logits_start = logits_row - phase<Span<float, 4>::piece>(logits_row);
  Span<float, 4> logits_vec_next[4];
  const auto read = [&](int turn, bool inside) {
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int col = ((turn + p) * 512 + lane) * 4;
      if (inside) {
        logits_vec_next[p] = load_pieces<4>(logits_start + col);
      } else if (col < 50257) {
        logits_vec_next[p] = load_span<4>(logits_row, col, 50257, logits_ends);
      }
    }
  };
  const auto see = [&](int turn, bool inside, bool ahead) {
    // vectors of the next turn, or any: loads that may or may not be would cost a copy of each register
    const int next = ahead ? ((turn + 4) * 512 + lane) * 4 : 0;
    float peaks[4];
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
      peaks[p] = -INFINITY;
      const int col = ((turn + p) * 512 + lane) * 4;
      if (inside || col < 50257) {
        const Vec<float, 4> logits_vec = joined(logits_vec_next[p], logits_row);
        if (inside) {  // it is on its way while this one's elements are computed
          const int col = next + p * 2048;
          logits_vec_next[p] = load_pieces<4>(logits_start + col);
        }
        float keys[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float logits = logits_vec.at[j];
          const float mul = logits * scale;
          keys[j] = mul;
        }
        if (!(inside || col + 4 <= 50257)) {  // the row ends inside of this vector
          #pragma unroll
          for (int j = 1; j < 4; ++j) keys[j] = -INFINITY;
        }
        peaks[p] = largest(keys);
        if (p == 0) sum_of_exps_part.move(peaks[p]);
        sum_of_exps_part.add(keys);
      }
      best[0] = larger(best[0], peaks[p]);
    }
    #pragma unroll
    for (int p = 0; p < 4; p += 4) {
      #pragma unroll
      for (int q = 1; q < 4; ++q) peaks[p] = larger(peaks[p], peaks[p + q]);
      notes[noted * 64 + lane_of_warp * 1 + p / 4] = __float_as_int(peaks[p]);
    }
    noted += 1;
  };
  read(0, true);
  #pragma unroll 1
  for (int turn = 0; turn < 28; turn += 4) {
    if (turn < 24) {
      see(turn, true, turn < 20);
    } else {
      see(turn, false, false);
    }
    if (turn >= 20 && turn < 24) read(turn + 4, false);
  }

  // what 50 elements reach is a threshold; vectors with keys above it are noted
  float limit = -INFINITY;
  const unsigned order = tighten(picker, best, most);
  const Entry reached = (static_cast<Entry>(order) << column_bits) - 1;
  if (reached > floor) {
    floor = reached;
    limit = below(order);
  }
  unsigned marks = 0;  // a bit for each of this thread's notes, the highest for the first: ties go to lower columns
  #pragma unroll
  for (int slot = 0; slot < 7; ++slot) {
    const float peak = __int_as_float(notes[slot * 64 + lane_of_warp]);
    marks |= static_cast<unsigned>(!(peak <= limit)) << (31 - slot);
  }
  unsigned tied = 0;  // those that but equal the threshold, where vectors are many: they come last
  if (vote(count(marks) > 8)) {
    #pragma unroll
    for (int slot = 0; slot < 7; ++slot) {
      const float peak = __int_as_float(notes[slot * 64 + lane_of_warp]);
      tied |= static_cast<unsigned>(peak == key_at(order)) << (31 - slot);
    }
    tied &= marks;
    marks ^= tied;
  }
  meet();  // the list of vectors grows over what has been read
  noted = 0;
  const auto list = [&](unsigned marks) {
    #pragma unroll 1
    for (Lanes who = vote(marks != 0); who; who = vote(marks != 0)) {
      if (marks != 0) {
        const int slot = __clz(static_cast<int>(marks));
        marks ^= 0x80000000u >> slot;
        notes[noted + count(who & lanes_below)] = ((slot * 4) * 512 + lane) * 4;
      }
      noted += count(who);
    }
  };
  list(marks);
  const int untied = noted * 4;
  list(tied);
  meet();

  // what exceeds it there, or the floor, is a candidate: a lane looks at one vector at a time, and lists an element at a time
  const int vectors = noted * 4;
  int seen = 0;  // vectors that lanes have looked at
  int own_col = 0;  // the first column of the lane's own,
  unsigned fresh = 0;  // and a bit for each of its elements that is yet to be listed, the highest for the first
  unsigned listed = 0;  // those of its elements that were before a cut
  bool exact = false;  // has a cut raised the floor beyond the limit?
  for (;;) {
    const unsigned before = held;
    bool left = false;
    #pragma unroll 1
    for (Lanes who = vote(fresh != 0); (who || seen < vectors) && !left; who = vote(fresh != 0)) {
      if (!who) {
        const int place = seen + lane_of_warp;
        seen += 64;
        if (place < vectors) own_col = notes[place / 4] + place % 4 * 2048;
        const int col = own_col;
        // after a cut, the columns of what is tied may be too large
        const bool late = exact && place >= untied && (reached + 1 | (last_column - col)) <= floor;
        if (place < vectors && !late && col < 50257) {
          const Vec<float, 4> logits_vec = load_across<4>(logits_row, col, 50257, logits_ends);
          float keys[4];
          #pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float logits = logits_vec.at[j];
            const float mul = logits * scale;
            keys[j] = mul;
            fresh |= static_cast<unsigned>(!(keys[j] <= limit)) << (31 - j);
          }
          if (!(col + 4 <= 50257)) fresh &= 0x80000000u;  // the row ends inside of this vector
          if (exact) {
            #pragma unroll
            for (int j = 0; j < 4; ++j) {
              if (entry_of(keys[j], col + j) <= floor) fresh &= ~(0x80000000u >> j);
            }
          }
        }
        fresh &= ~listed;
        listed = 0;
      } else if (held + count(who) > room) {
        left = true;
        listed = ~fresh;  // the others are looked at again, for they may be below the floor then
        fresh = 0;
        seen -= 64;
      } else {
        if (fresh != 0) {
          const int j = __clz(static_cast<int>(fresh));
          fresh ^= 0x80000000u >> j;
          own_list[held + count(who & lanes_below)] = static_cast<Entry>(own_col + j);
        }
        held += count(who);
      }
    }
    meet();
    #pragma unroll 1
    for (unsigned i = before + lane_of_warp; i < held; i += 64) {  // more lanes at a time than find one
      const int col = static_cast<int>(own_list[i]);
      const float logits = logits_row[col];
      const float mul = logits * scale;
      own_list[i] = entry_of(mul, col);
    }
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
    for (int b = threadIdx.x; b < bins; b += 512) picker.bins_above[b] = 0;
    __syncthreads();
  }
  const float top = key_at(most);
  float sum_of_exps = row_sum(sum_of_exps_part.below(top), part[0]);
  if (lost(top, sum_of_exps)) {  // the whole row does so: it is read again
    float exact = 0.0f;
    #pragma unroll 1
    for (int v = 0; v < 28; ++v) {
      const int col = (v * 512 + lane) * 4;
      float keys[4];
      #pragma unroll
      for (int j = 0; j < 4; ++j) keys[j] = -INFINITY;
      if (col < 50257) {
        const Vec<float, 4> logits_vec = load_across<4>(logits_row, col, 50257, logits_ends);
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (col + 4 <= 50257 || j < 1) {
            const float logits = logits_vec.at[j];
            const float mul = logits * scale;
            keys[j] = mul;
          }
        }
      }
      #pragma unroll
      for (int j = 0; j < 4; ++j) exact += exponential(keys[j] - top);
    }
    sum_of_exps = row_sum(exact, part[1]);
  }
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float scale_2 = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // rank the candidates: into bins by their keys, and within a bin by comparing them
  const Entry lowest = floor + 1;
  const int by = shift_for((static_cast<Entry>(most) << column_bits | last_column) - lowest);
  #pragma unroll 1
  for (unsigned i = lane_of_warp; i < held; i += 64) {
    const Entry entry = picker.entries[side][warp * room + i];
    if (entry <= floor) continue;  // found while the floor was lower
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
  Entry* const picks = picker.entries[side];  // in the room of what is binned
  #pragma unroll 1
  for (unsigned i = lane_of_warp; i < held; i += 64) {
    const Entry entry = picker.entries[side][warp * room + i];
    if (entry <= floor) continue;  // found while the floor was lower
    binned[atomicAdd(&picker.bins_above[(entry - lowest) >> by], 1u)] = entry;
  }
  __syncthreads();
  const unsigned all = picker.bins_above[0];
  if (sorts) {
    sort(binned, all);
    for (unsigned i = threadIdx.x; i < 50 && i < all; i += 512) picks[i] = binned[i];
  }
  #pragma unroll 1
  for (unsigned i = threadIdx.x; i < all && !sorts; i += 512) {
    const Entry entry = binned[i];
    const int bin = static_cast<int>((entry - lowest) >> by);
    unsigned rank = picker.bins_above[bin + 1];
    if (rank < 50) {
      #pragma unroll 1
      for (unsigned other = rank, end = picker.bins_above[bin]; other < end; ++other) rank += binned[other] > entry;
      if (rank < 50) picks[rank] = entry;
    }
  }
  for (unsigned i = all + threadIdx.x; i < 50; i += 512) picks[i] = 0;
  __syncthreads();

  // the 50 chosen, walk 1 over them: write values, columns
  #pragma unroll
  for (int rank = threadIdx.x; rank < 50; rank += 512) {
    const Entry entry = picks[rank];
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
