// topk  bf16[B, V] -> bf16[B, K], i32[B, K]  at B=256 V=128256 K=50
// The K largest logits of each row and their columns: NaN first, ties by column, -inf never.
//
//     def topk(logits):
//         values, columns = F.topk(logits, K)
//         return values, columns
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// selects  50 of 128256 columns a row by logits, largest first; NaN before all, ties by column, -inf
//          never
// tile     a block of 512 threads a row; streaming threshold select, 4 x 8 elements a thread at a time;
//          some 61 of 128256 pass the threshold, whose vectors are read again
// traffic  65.7 MB moved, 65.7 MB ideal, 65.7 MB unfused in 1 launch
// floor    8.2 us at 8 TB/s; memory-bound at 0.50 flop/B
// rounding values to bf16 when stored; f32 between
// needs    rows of 128256 elements, next to each other; logits: address and strides in multiples of 16
//          B
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
  return __builtin_elementwise_maximum(a, b);
}

constexpr int threads = 512;  // of a block
constexpr int warps = 8;  // of a block
constexpr int vector_step = threads * 8;  // columns from a thread's vector to its next one
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
  int notes[warps][2048];  // the words of largest keys, then columns of vectors
  Entry entries[2][warps * room];  // candidates by warp, in one half; the other one is free
  unsigned bins_above[bins + 1];  // of each bin its candidates, then those above it
  unsigned totals[warps];  // candidates by warp
  unsigned reached[warps], highest[warps];  // by warp: the order that enough keys reach, and the largest
  unsigned least, most;  // orders among the candidates
  unsigned found, above, here;  // the bin that a cut goes on with, candidates above it and in it
};
static_assert(sizeof(Picker) <= 84096, "the launch's shared memory");

// the threshold just below `order`: what is larger has at least this order, and is not masked
__device__ __forceinline__ float below(unsigned order) {
  const unsigned before = order - 1 - (order == top_bit);  // -0 is 0
  return key_at(before < masked ? masked : before > infinite ? infinite : before);
}

// the largest of a vector's keys; NaN is
__device__ __forceinline__ float largest(const float (&keys)[8]) {
  float v = keys[0];
  #pragma unroll
  for (int j = 1; j < 8; ++j) v = larger(v, keys[j]);
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
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const __bf16* const logits_row = logits_ptr + row * logits_stride;
  __bf16* const values_row = values_ptr + row * values_stride;
  int* const columns_row = columns_ptr + row * columns_stride;

  // ---- stream
  // pass 1 of 1: read logits; choose columns = the columns of the 50 largest logits
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
  int* const notes = picker.notes[warp];  // largest keys of vectors, and later the vectors to look at
  int noted = 0;  // notes of each thread, and later of the warp
  float best = -INFINITY;  // the largest of the thread's keys
  unsigned most = masked;  // the order of the row's largest key
  Vec<__bf16, 8> logits_vec_next[4];
  // 4 vectors of the thread; `inside`: the row has all of them, of every thread
  const auto read = [&](int turn, bool inside) {
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int col = ((turn + p) * threads + lane) * 8;
      if (inside || col < 128256) {
        logits_vec_next[p] = load<8>(logits_row + col);
      }
    }
  };
  // notes the largest keys of what has been read
  const auto see = [&](int turn, bool inside, bool ahead) {
    // where there is no next turn the first one is read again: loads behind a test would cost a copy of each register
    const int next = ahead ? ((turn + 4) * threads + lane) * 8 : 0;
    float peaks[4];
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
      peaks[p] = -INFINITY;
      const int col = ((turn + p) * threads + lane) * 8;
      if (inside || col < 128256) {
        const Vec<__bf16, 8> logits_vec = logits_vec_next[p];
        if (inside) {  // it is on its way while this one's elements are computed
          const int col = next + p * vector_step;
          logits_vec_next[p] = load<8>(logits_row + col);
        }
        float keys[8];
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float logits = widened(logits_vec.at[j]);
          keys[j] = logits;
        }
        peaks[p] = largest(keys);
      }
      best = larger(best, peaks[p]);
    }
    #pragma unroll
    for (int p = 0; p < 4; ++p) notes[noted * 64 + lane_of_warp * 4 + p] = __float_as_int(peaks[p]);
    noted += 4;
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
  for (int slot = 0; slot < 32; ++slot) {
    const float peak = __int_as_float(notes[(slot / 4 * 64 + lane_of_warp) * 4 + slot % 4]);
    marks |= static_cast<unsigned>(!(peak <= limit)) << (31 - slot);
  }
  unsigned tied = 0;  // those that but equal the threshold, where vectors are many: they come last
  if (vote(count(marks) > 8)) {
    #pragma unroll
    for (int slot = 0; slot < 32; ++slot) {
      const float peak = __int_as_float(notes[(slot / 4 * 64 + lane_of_warp) * 4 + slot % 4]);
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
        notes[noted + count(who & lanes_below)] = (slot * threads + lane) * 8;
      }
      noted += count(who);
    }
  };
  list(marks);
  const int untied = noted;
  list(tied);
  meet();

  // ---- collect
  // the listed vectors are read again: elements above the threshold, and after a cut above the cutoff, are candidates.
  // A lane looks at one vector at a time, and then lists its elements one by one
  const int vectors = noted;
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
        if (place < vectors) own_col = notes[place];
        const int col = own_col;
        // after a cut, vectors that but equal the threshold may lie too far behind in the row
        const bool late = exact && place >= untied && (reached + 1 | (last_column - col)) <= cutoff;
        if (place < vectors && !late) {
          const Vec<__bf16, 8> logits_vec = load<8>(logits_row + col);
          float keys[8];
          #pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float logits = widened(logits_vec.at[j]);
            keys[j] = logits;
            fresh |= static_cast<unsigned>(!(keys[j] <= limit)) << (31 - j);
          }
          if (exact) {
            #pragma unroll
            for (int j = 0; j < 8; ++j) {
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
      const float logits = widened(logits_row[col]);
      own_list[i] = entry_of(logits, col);
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
    const float values_ = entry ? key_of(entry) : -INFINITY;
    values_row[lane] = static_cast<__bf16>(values_);
    columns_row[lane] = columns;
  }
}
