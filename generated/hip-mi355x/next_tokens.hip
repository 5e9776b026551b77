// next_tokens  f32[B, V], f32 -> f32[B, K], i32[B, K]  at B=64 V=50257 K=50
// The K largest of softmax(logits * scale) and their columns: NaN first, ties by column, -inf never.
//
//     def next_tokens(logits, scale):
//         values, columns = F.topk(F.softmax(logits * scale), K)
//         return values, columns
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// selects  50 of 50257 columns a row by logits_times_scale, largest first; NaN before all, ties by
//          column, -inf never
// tile     a block of 512 threads a row; streaming threshold select, 4 x 4 elements a thread at a time;
//          some 61 of 50257 pass the threshold, whose vectors are read again
// traffic  12.9 MB moved, 12.9 MB ideal, 77.2 MB unfused in 3 launches
// floor    1.6 us at 8 TB/s; memory-bound at 2.25 flop/B
// needs    rows of 50257 elements, next to each other; logits: address in multiples of 16 B, no stride
//          below 0
//
// method   streaming threshold select. The row is read once, and of every 8 elements the largest key is
//          kept as their delegate (Dr. Top-k, Gaihre et al., SC 2021). An order that 50 largest keys
//          reach is a threshold: few more elements reach it, and only those whose delegate exceeds it
//          are looked at again
// sections stream    the pass over the row
//          threshold what enough largest keys reach, by bisection
//          collect   vectors whose delegate exceeds it are read again; their elements above it are
//                    candidates
//          cut       where candidates have no more room: bucket select of the best 50 (Alabi et al.,
//                    JEA 2012)
//          rank      counting sort by ranges of keys, comparisons within a range; where ties fill one,
//                    bitonic sort (Batcher, AFIPS 1968)
//          write     what is computed at the chosen columns

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
struct Pieces {
  static constexpr int piece = alignof(Vec<T, N>) < 8 ? alignof(Vec<T, N>) : 8;
  unsigned words[(sizeof(Vec<T, N>) + piece) / 4];
};

// the pieces from p on, which is aligned to them; `last`: the last one is among them
template <int N, typename T>
__device__ __forceinline__ Pieces<T, N> load_pieces(const T* p, bool last = true) {
  constexpr int each = Pieces<T, N>::piece / 4, words = sizeof(Pieces<T, N>) / 4;
  Pieces<T, N> pieces{};
  #pragma unroll
  for (int i = 0; i < words; i += each) {
    if (i + each == words && !last) break;
    const Vec<unsigned, each> some = load<each>(reinterpret_cast<const unsigned*>(p) + i);
    #pragma unroll
    for (int k = 0; k < each; ++k) pieces.words[i + k] = some.at[k];
  }
  return pieces;
}

// the pieces of values col ... col + N - 1 of a row; `ends`: what lies behind the row may not be read, others of its values
// stand in for that
template <int N, typename T>
__device__ __forceinline__ Pieces<T, N> load_row_pieces(const T* row, int col, int cols, bool ends) {
  constexpr int each = 4 / sizeof(T), words = sizeof(Pieces<T, N>) / 4;
  const int from = col - phase<Pieces<T, N>::piece>(row + col);
  if (!ends || from + words * each <= cols) return load_pieces<N>(row + from);
  Pieces<T, N> pieces;
  #pragma unroll
  for (int i = 0; i < words; ++i) {
    T some[each];
    #pragma unroll
    for (int k = 0; k < each; ++k) {
      const int at = from + i * each + k;
      some[k] = row[at < 0 ? 0 : at < cols ? at : cols - 1];
    }
    memcpy(&pieces.words[i], some, 4);
  }
  return pieces;
}

// the vector that lies across the pieces of a row
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> joined(Pieces<T, N> pieces, const T* row) {
  constexpr int piece = Pieces<T, N>::piece, words = sizeof(pieces) / 4;
  const int bytes = phase<piece>(row) * sizeof(T);
  #pragma unroll
  for (int step = piece / 8; step > 0; step /= 2) {
    #pragma unroll
    for (int i = 0; i + step < words; ++i) {
      const unsigned here = pieces.words[i], there = pieces.words[i + step];  // a choice of places would want an address
      pieces.words[i] = bytes & 4 * step ? there : here;
    }
  }
  if constexpr (sizeof(T) < 4) {
    #pragma unroll
    for (int i = 0; i + 1 < words; ++i) {
      const unsigned long long pair = static_cast<unsigned long long>(pieces.words[i + 1]) << 32 | pieces.words[i];
      pieces.words[i] = static_cast<unsigned>(pair >> bytes % 4 * 8);
    }
  }
  Vec<T, N> v;
  memcpy(&v, pieces.words, sizeof(v));
  return v;
}

// values col ... col + N - 1 of a row that starts anywhere
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_misaligned(const T* row, int col, int cols, bool ends) {
  return joined(load_row_pieces<N>(row, col, cols, ends), row + col);
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

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  const int word = __builtin_bit_cast(int, v);
  int other = 0;
  if (step == 1) other = __builtin_amdgcn_update_dpp(0, word, 0xb1, 0xf, 0xf, true);  // quad_perm:[1,0,3,2]
  if (step == 2) other = __builtin_amdgcn_update_dpp(0, word, 0x4e, 0xf, 0xf, true);  // quad_perm:[2,3,0,1]
  if (step == 4) {
    const int mirrored = __builtin_amdgcn_update_dpp(0, word, 0x141, 0xf, 0xf, true);  // of 8 lanes,
    other = __builtin_amdgcn_update_dpp(0, mirrored, 0x1b, 0xf, 0xf, true);  // and then of each 4
  }
  if (step == 8) other = __builtin_amdgcn_update_dpp(0, word, 0x128, 0xf, 0xf, true);  // row_ror:8
  if (step == 16) other = __builtin_amdgcn_ds_swizzle(word, 0x401f);  // swizzle(SWAP,16)
  if (step == 32) other = __shfl_xor(word, 32);
  return __builtin_bit_cast(decltype(v), other);
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

constexpr int threads = 512;  // of a block
constexpr int warps = 8;  // of a block
constexpr int vector_step = threads * 4;  // columns from a thread's vector to its next one
constexpr int room = 128;  // candidates of a warp
constexpr int bins = 512;  // ranges of keys, by which candidates are counted
constexpr int bin_bits = 9;

// one bit a lane, the lowest for the first
typedef unsigned long long Lanes;

// the lanes of the warp that say so
__device__ __forceinline__ Lanes vote(bool says) {
  return __ballot(says);
}

__device__ __forceinline__ int count(Lanes lanes) {
  return __popcll(lanes);
}

// the sum of exp(value - pivot) of what has streamed by, as that of 2^(log2(e) * value + shift): a multiply-add and a
// power of 2 for each value, none of which waits for the largest one. The pivot starts at 0 and moves up with the values
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

// has such a sum lost what matters? A value lay far above the pivot, or all lie far below 0, or the shift is rounded
__device__ __forceinline__ bool lost(float top, float total) {
  return fabsf(top) < INFINITY && !(total < INFINITY && top > -40.0f && top < 16777216.0f);
}

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
struct alignas(16) Picker {
  int notes[warps][896];  // the words of largest keys, then columns of vectors
  Entry entries[2][warps * room];  // candidates by warp, in one half; the other one is free
  unsigned bins_above[bins + 1];  // of each bin its candidates, then those above it
  unsigned totals[warps];  // candidates by warp
  unsigned reached[warps], highest[warps];  // by warp: the order that enough keys reach, and the largest
  unsigned least, most;  // orders among the candidates
  unsigned found, above, here;  // the bin that a cut goes on with, candidates above it and in it
};
static_assert(sizeof(Picker) <= 47232, "the launch's shared memory");

// the threshold just below `order`: what is larger has at least this order, and is not masked
__device__ __forceinline__ float below(unsigned order) {
  const unsigned before = order - 1 - (order == top_bit);  // -0 is 0
  return key_at(before < masked ? masked : before > infinite ? infinite : before);
}

// the largest of a vector's keys; NaN is
__device__ __forceinline__ float largest(const float (&keys)[4]) {
  float v = keys[0];
  #pragma unroll
  for (int j = 1; j < 4; ++j) v = larger(v, keys[j]);
  return v;
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

// picker.least and picker.most become the range of the block's candidates; those of this thread are `least` to `most`
__device__ __forceinline__ void measure(Picker& picker, unsigned least, unsigned most) {
  least = warp_least(least);
  most = warp_most(most);
  if (threadIdx.x % 64 == 0) {
    atomicMin(&picker.least, least);
    atomicMax(&picker.most, most);
  }
  __syncthreads();
}

// a candidate's distance from the lowest one, shifted right by so many bits, is its bin: the largest one, `span`, has one too
__device__ __forceinline__ int shift_for(Entry span) {
  const int bits = 64 - __clzll(static_cast<long long>(span));
  return bits > bin_bits ? bits - bin_bits : 0;
}

// a cutoff that 50 of the block's candidates exceed and few more do, 0 if there are fewer, by bucket select:
// count the candidates by bins, go on with the bin that holds the last of the 50, until few enough are in it
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
    unsigned own;
    unsigned above = before + add_up(picker, own);
    if (above < 50 && above + own >= 50) {
      picker.found = bins - 1 - threadIdx.x;
      picker.above = above;
      picker.here = own;
    }
    above += own;
    if (threadIdx.x == threads - 1 && above < 50) picker.found = bins;
    __syncthreads();
    if (picker.found == bins) return 0;
    low += static_cast<Entry>(picker.found) << shift;
    before = picker.above;
    if (before + picker.here <= 82 || shift == 0) return low - 1;
    width = shift;
    shift = shift > bin_bits ? shift - bin_bits : 0;
    picker.bins_above[threadIdx.x] = 0;
    __syncthreads();
  }
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

// an order that at least 50 of the row's elements reach; `most` becomes the order of the largest. A thread brings the
// largest key of its elements. Each warp finds by bisection what its share of those keys reach
// and the least of what the warps find is the row's
__device__ __forceinline__ unsigned tighten(Picker& picker, const float peak, unsigned& most) {
  const unsigned order = order_of(peak);
  most = warp_most(order);
  unsigned low = warp_least(order), high = most;
  constexpr int want = 7, enough = 7;  // keys of each warp that are to reach it
  #pragma unroll 1
  for (int turn = 0; turn < 12 && high - low > 1; ++turn) {  // any bound that enough reach will do
    const unsigned middle = low + (high - low) / 2;
    const int reach = count(vote(order >= middle));
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
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const float* const logits_row = logits_ptr + row * logits_stride;
  const bool logits_ends = logits_ptr + (rows - 1) * logits_stride - logits_row < 8;
  float* const values_row = values_ptr + row * values_stride;
  int* const columns_row = columns_ptr + row * columns_stride;

  // ---- stream
  // pass 1 of 1: read logits; top = max(logits_times_scale) and sum_of_exps = sum(exp(logits_times_scale - top));
  //   choose columns = the columns of the 50 largest logits_times_scale
  PivotSum sum_of_exps_part;
  if (threadIdx.x == 0) {
    picker.least = 0xffffffffu;
    picker.most = 0;
  }
  picker.bins_above[threadIdx.x] = 0;
  Entry cutoff = static_cast<Entry>(masked) << column_bits | last_column;  // only larger entries count as candidates
  unsigned held = 0;  // candidates of this warp
  int side = 0;  // the half of picker.entries that has them
  const int warp = threadIdx.x / 64, lane_of_warp = threadIdx.x % 64;
  Entry* own_list = picker.entries[0] + warp * room;
  const Lanes lanes_below = (Lanes(1) << lane_of_warp) - 1;
  int* const notes = picker.notes[warp];  // largest keys of 2 vectors each, and later the vectors to look at
  int noted = 0;  // notes of each thread, and later of the warp
  float best = -INFINITY;  // the largest of the thread's keys
  unsigned most = masked;  // the order of the row's largest key
  const float* const logits_start = logits_row - phase<Pieces<float, 4>::piece>(logits_row);
  Pieces<float, 4> logits_vec_next[4];
  // 4 vectors of the thread; `inside`: the row has all of them, of every thread
  const auto read = [&](int turn, bool inside) {
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int col = ((turn + p) * threads + lane) * 4;
      if (inside) {
        logits_vec_next[p] = load_pieces<4>(logits_start + col);
      } else if (col < 50257) {
        logits_vec_next[p] = load_row_pieces<4>(logits_row, col, 50257, logits_ends);
      }
    }
  };
  // notes the largest keys of what has been read
  const auto see = [&](int turn, bool inside, bool ahead) {
    // where there is no next turn the first one is read again: loads behind a test would cost a copy of each register
    const int next = ahead ? ((turn + 4) * threads + lane) * 4 : 0;
    float peaks[4];
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
      peaks[p] = -INFINITY;
      const int col = ((turn + p) * threads + lane) * 4;
      if (inside || col < 50257) {
        const Vec<float, 4> logits_vec = joined(logits_vec_next[p], logits_row);
        if (inside) {  // it is on its way while this one's elements are computed
          const int col = next + p * vector_step;
          logits_vec_next[p] = load_pieces<4>(logits_start + col);
        }
        float keys[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float logits = logits_vec.at[j];
          const float logits_times_scale = logits * scale;
          keys[j] = logits_times_scale;
        }
        if (!(inside || col + 4 <= 50257)) {  // the row ends inside of this vector
          #pragma unroll
          for (int j = 1; j < 4; ++j) keys[j] = -INFINITY;
        }
        peaks[p] = largest(keys);
        if (p == 0) sum_of_exps_part.move(peaks[p]);
        sum_of_exps_part.add(keys);
      }
      best = larger(best, peaks[p]);
    }
    #pragma unroll
    for (int p = 0; p < 4; p += 2) {
      const float peak = larger(peaks[p], peaks[p + 1]);
      notes[noted * 64 + lane_of_warp * 2 + p / 2] = __float_as_int(peak);
    }
    noted += 2;
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

  // ---- threshold
  // what 50 elements reach is a threshold; vectors whose largest key exceeds it are listed
  float limit = -INFINITY;
  const unsigned order = tighten(picker, best, most);
  const Entry reached = (static_cast<Entry>(order) << column_bits) - 1;
  if (reached > cutoff) {
    cutoff = reached;
    limit = below(order);
  }
  unsigned marks = 0;  // a bit for each of this thread's notes, the highest for the first: ties go to lower columns
  #pragma unroll
  for (int slot = 0; slot < 14; ++slot) {
    const float peak = __int_as_float(notes[(slot / 2 * 64 + lane_of_warp) * 2 + slot % 2]);
    marks |= static_cast<unsigned>(!(peak <= limit)) << (31 - slot);
  }
  unsigned tied = 0;  // those that but equal the threshold, where vectors are many: they come last
  if (vote(count(marks) > 8)) {
    #pragma unroll
    for (int slot = 0; slot < 14; ++slot) {
      const float peak = __int_as_float(notes[(slot / 2 * 64 + lane_of_warp) * 2 + slot % 2]);
      tied |= static_cast<unsigned>(peak == key_at(order)) << (31 - slot);
    }
    tied &= marks;
    marks ^= tied;
  }
  meet();  // all lanes have read the notes, which the list of marked vectors replaces
  noted = 0;
  const auto list = [&](unsigned marked) {
    #pragma unroll 1
    for (Lanes who = vote(marked != 0); who; who = vote(marked != 0)) {
      if (marked != 0) {
        const int slot = __clz(static_cast<int>(marked));
        marked ^= top_bit >> slot;
        notes[noted + count(who & lanes_below)] = ((slot * 2) * threads + lane) * 4;
      }
      noted += count(who);
    }
  };
  list(marks);
  const int untied = noted * 2;
  list(tied);
  meet();

  // ---- collect
  // the listed vectors are read again: elements above the threshold, and after a cut above the cutoff, are candidates.
  // A lane looks at one vector at a time, and then lists its elements one by one
  const int vectors = noted * 2;
  int seen = 0;  // vectors that lanes have looked at
  int own_col = 0;  // the first column of the lane's vector
  unsigned fresh = 0;  // a bit for each of its elements that is yet to be listed, the highest for the first
  unsigned listed = 0;  // its elements that were listed before a cut
  bool exact = false;  // has a cut raised the cutoff beyond the threshold?
  for (;;) {
    const unsigned before = held;
    bool left = false;
    #pragma unroll 1
    for (Lanes who = vote(fresh != 0); (who || seen < vectors) && !left; who = vote(fresh != 0)) {
      if (!who) {
        const int place = seen + lane_of_warp;
        seen += 64;
        if (place < vectors) own_col = notes[place / 2] + place % 2 * vector_step;
        const int col = own_col;
        // after a cut, vectors that but equal the threshold may lie too far behind in the row
        const bool late = exact && place >= untied && (reached + 1 | (last_column - col)) <= cutoff;
        if (place < vectors && !late && col < 50257) {
          const Vec<float, 4> logits_vec = load_misaligned<4>(logits_row, col, 50257, logits_ends);
          float keys[4];
          #pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float logits = logits_vec.at[j];
            const float logits_times_scale = logits * scale;
            keys[j] = logits_times_scale;
            fresh |= static_cast<unsigned>(!(keys[j] <= limit)) << (31 - j);
          }
          if (!(col + 4 <= 50257)) fresh &= ~(~0u >> 1);  // the row ends inside of this vector
          if (exact) {
            #pragma unroll
            for (int j = 0; j < 4; ++j) {
              if (entry_of(keys[j], col + j) <= cutoff) fresh &= ~(top_bit >> j);
            }
          }
        }
        fresh &= ~listed;
        listed = 0;
      } else if (held + count(who) > room) {
        left = true;
        listed = ~fresh;  // the others are looked at again after the cut, for they may be below the cutoff then
        fresh = 0;
        seen -= 64;
      } else {
        if (fresh != 0) {
          const int j = __clz(static_cast<int>(fresh));
          fresh ^= top_bit >> j;
          own_list[held + count(who & lanes_below)] = static_cast<Entry>(own_col + j);
        }
        held += count(who);
      }
    }
    meet();
    #pragma unroll 1
    for (unsigned i = before + lane_of_warp; i < held; i += 64) {  // columns become entries, a lane each
      const int col = static_cast<int>(own_list[i]);
      const float logits = logits_row[col];
      const float logits_times_scale = logits * scale;
      own_list[i] = entry_of(logits_times_scale, col);
    }
    if (!__syncthreads_or(left)) break;
    meet();

    // ---- cut
    // the best 50 and a few more stay, spread evenly over the warps
    const Entry higher = cut(picker, own_list, held);
    cutoff = cutoff > higher ? cutoff : higher;
    unsigned kept = 0;
    #pragma unroll 1
    for (unsigned i = lane_of_warp; i < held; i += 64) kept += own_list[i] > cutoff;
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
      if (own_list[i] > cutoff) {
        picker.entries[side ^ 1][place % warps * room + place / warps] = own_list[i];
        ++place;
      }
    }
    held = all / warps + (warp < all % warps);
    side ^= 1;
    own_list = picker.entries[side] + warp * room;
    exact = true;
    picker.bins_above[threadIdx.x] = 0;
    __syncthreads();
  }
  const float top = key_at(most);
  float sum_of_exps = row_sum(sum_of_exps_part.below(top), part[0]);
  if (lost(top, sum_of_exps)) {  // the row is read again, by all of its threads, and added up below its largest key
    float exact_sum = 0.0f;
    #pragma unroll 1
    for (int v = 0; v < 28; ++v) {
      const int col = (v * threads + lane) * 4;
      float keys[4];
      #pragma unroll
      for (int j = 0; j < 4; ++j) keys[j] = -INFINITY;
      if (col < 50257) {
        const Vec<float, 4> logits_vec = load_misaligned<4>(logits_row, col, 50257, logits_ends);
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (col + 4 <= 50257 || j < 1) {
            const float logits = logits_vec.at[j];
            const float logits_times_scale = logits * scale;
            keys[j] = logits_times_scale;
          }
        }
      }
      #pragma unroll
      for (int j = 0; j < 4; ++j) exact_sum += exponential(keys[j] - top);
    }
    sum_of_exps = row_sum(exact_sum, part[1]);
  }
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // ---- rank
  // a counting sort of the candidates into bins by their keys; within a bin each is compared with all others
  const Entry lowest = cutoff + 1;
  const int by = shift_for((static_cast<Entry>(most) << column_bits | last_column) - lowest);
  #pragma unroll 1
  for (unsigned i = lane_of_warp; i < held; i += 64) {
    const Entry entry = picker.entries[side][warp * room + i];
    if (entry <= cutoff) continue;  // found while the cutoff was lower
    atomicAdd(&picker.bins_above[(entry - lowest) >> by], 1u);
  }
  __syncthreads();
  unsigned own;
  const unsigned above = add_up(picker, own);
  const bool many = own > 64 && above < 50;  // ties: are too many candidates in the bin to compare each with all?
  picker.bins_above[bins - 1 - threadIdx.x] = above;
  if (threadIdx.x == 0) picker.bins_above[bins] = 0;
  const bool sorts = __syncthreads_or(many);
  Entry* const binned = picker.entries[side ^ 1];
  Entry* const picks = picker.entries[side];  // overwrites what has been binned
  #pragma unroll 1
  for (unsigned i = lane_of_warp; i < held; i += 64) {
    const Entry entry = picker.entries[side][warp * room + i];
    if (entry <= cutoff) continue;  // found while the cutoff was lower
    binned[atomicAdd(&picker.bins_above[(entry - lowest) >> by], 1u)] = entry;
  }
  __syncthreads();
  const unsigned all = picker.bins_above[0];
  if (sorts) {
    sort(binned, all);
    if (threadIdx.x < 50 && threadIdx.x < all) picks[threadIdx.x] = binned[threadIdx.x];
  }
  #pragma unroll 1
  for (unsigned i = threadIdx.x; i < all && !sorts; i += threads) {
    const Entry entry = binned[i];
    const int bin = static_cast<int>((entry - lowest) >> by);
    unsigned rank = picker.bins_above[bin + 1];
    if (rank < 50) {
      #pragma unroll 1
      for (unsigned other = rank, end = picker.bins_above[bin]; other < end; ++other) rank += binned[other] > entry;
      if (rank < 50) picks[rank] = entry;
    }
  }
  for (unsigned i = all + threadIdx.x; i < 50; i += threads) picks[i] = 0;
  __syncthreads();

  // ---- write
  // the 50 chosen, pass 1 over them: write values, columns
  if (lane < 50) {
    const Entry entry = picks[lane];
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
