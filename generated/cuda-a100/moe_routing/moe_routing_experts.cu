// moe_routing_experts  f32[T, E] -> i32[T, K], f32[T, K]  at T=64 E=64 K=4
// experts, softmax of moe_routing.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// selects  4 of 64 columns a row by matmul, largest first; NaN before all, ties by column, -inf never
// tile     16 threads a row, 8 rows a block; matmul in registers, the best 4 by a network, 4 at a time
// traffic  18432 B moved, 18432 B ideal, 20480 B unfused in 2 launches
// floor    0.0 us at 2.039 TB/s; instruction-bound at 0.38 flop/B
// needs    rows of 64 elements, next to each other; matmul: address and strides in multiples of 16 B
//
// method   bitonic top-k in registers (Shanbhag, Pirk & Madden, SIGMOD 2018) by 16 lanes a row. A key
//          and its column are one word of 32 bits, which has no room for the key's last bits; 4 words
//          at a time are sorted, the best of them and of those before stay, and so do the best of all
//          lanes
// sections words     what there is room for of a key's order above its column: the larger word is the
//                    one to choose
//          choose    the best words, by Batcher's networks: they are sorted, and merged
//          again     where bits decide that words have no room for: by those, of keys that are alike in
//                    others
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

// the largest value over the 16 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v) {
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
}

// the sum over the 16 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v) {
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

// a candidate as one number: of two, the larger is the one to choose. Its upper bits are those of the order of its key, an
// integer that grows with the key; the last bits are the column, counted from the row's end, for ties go to lower columns
typedef unsigned Entry;
constexpr Entry place_bits = 0x3fu;  // the bits of the column
constexpr int last_place = 63;  // the first column's
constexpr Entry masked = 0x007fffffu;  // no entry of -inf is larger: it is never chosen

// of positive floats the top bit is set, of negative ones every bit is flipped. NaN is above all numbers, and -0 is 0
__device__ __forceinline__ unsigned order_of(float key) {
  float y;
  asm("add.f32 %0, %1, %2;" : "=f"(y) : "f"(key), "f"(0.0f));
  const unsigned bits = __float_as_uint(y);
  return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ Entry word_of(unsigned order, unsigned place) {
  return (order & ~place_bits) | place;
}

// do they clip to the same?
__device__ __forceinline__ bool alike(unsigned a, unsigned b) {
  return (a ^ b) <= place_bits;
}

// one bit a lane, the lowest for the first
typedef unsigned Lanes;

// the lanes of the warp that say so
__device__ __forceinline__ Lanes vote(bool says) {
  return __ballot_sync(0xffffffffu, says);
}

__device__ __forceinline__ int column_of(Entry entry) {
  return last_place - static_cast<int>(entry & place_bits);
}

// the larger of two comes first
__device__ __forceinline__ void exchange(Entry& a, Entry& b) {
  const Entry less = min(a, b);
  a = max(a, b);
  b = less;
}

// 4 entries in order, the largest first: Batcher's odd-even merge sort
__device__ __forceinline__ void sort_entries(Entry (&entries)[4]) {
  #pragma unroll
  for (int run = 1; run < 4; run *= 2) {
    #pragma unroll
    for (int step = run; step > 0; step /= 2) {
      #pragma unroll
      for (int q = step % run; q + step < 4; ++q) {
        const bool upper = (q - step % run) / step % 2;  // the partner of one before it
        const bool apart = q / (2 * run) != (q + step) / (2 * run);  // they are of two runs
        if (!upper && !apart) exchange(entries[q], entries[q + step]);
      }
    }
  }
}

// N entries that fall and then rise, or the other way round, in order: the largest first
template <int N>
__device__ __forceinline__ void order_entries(Entry (&entries)[N]) {
  #pragma unroll
  for (int step = N / 2; step > 0; step /= 2) {
    #pragma unroll
    for (int q = 0; q < N; ++q) {
      if (!(q & step)) exchange(entries[q], entries[q + step]);
    }
  }
}

// the best of two sorted lists
__device__ __forceinline__ void merge_best(Entry (&best)[4], const Entry (&others)[4]) {
  #pragma unroll
  for (int q = 0; q < 4; ++q) best[q] = max(best[q], others[3 - q]);
  order_entries(best);
}

// the best of N keys, the largest first: 4 of them at a time are sorted
template <int N>
__device__ __forceinline__ void best_of(Entry (&best)[4], const Entry (&words)[N]) {
  #pragma unroll
  for (int from = 0; from < N; from += 4) {
    Entry next[4];
    #pragma unroll
    for (int q = 0; q < 4; ++q) {
      next[q] = 0;
      if (from + q < N) next[q] = words[from + q];
    }
    sort_entries(next);
    if (from) {
      merge_best(best, next);
    } else {
      #pragma unroll
      for (int q = 0; q < 4; ++q) best[q] = next[q];
    }
  }
}

// the best of this lane and of the one that differs from it in the bits of step
__device__ __forceinline__ void merge_lanes(Entry (&best)[4], int step) {
  Entry others[4];
  #pragma unroll
  for (int q = 0; q < 4; ++q) others[q] = __shfl_xor_sync(0xffffffffu, best[q], step);
  merge_best(best, others);
}

// by value: of elements of an array that are read in branches some compilers make one that is read by its number
__device__ __forceinline__ Entry either(bool first, Entry a, Entry b) {
  return first ? a : b;
}

// what the warp's threads wrote to shared memory can be read by all of them
__device__ __forceinline__ void meet() {
  __syncwarp();
}

// what the threads of a block share: of 8 rows
struct alignas(16) Picker {
  float keys[8][128];  // of each row, by column
};
static_assert(sizeof(Picker) <= 4096, "the launch's shared memory");

extern "C" __global__ void __launch_bounds__(128)
moe_routing_experts(
    const float* __restrict__ matmul_ptr,
    int* __restrict__ experts_ptr,
    float* __restrict__ softmax_ptr,
    long long rows,
    long long matmul_stride,
    long long experts_stride,
    long long softmax_stride)
{
  constexpr int block_rows = 8;  // that a block takes
  constexpr int row_threads = 16;
  const int lane = threadIdx.x % row_threads;  // of the 16 threads that share a row
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long own_row = static_cast<long long>(blockIdx.x) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const float* const matmul_row = matmul_ptr + row * matmul_stride;
  int* const experts_row = experts_ptr + row * experts_stride;
  float* const softmax_row = softmax_ptr + row * softmax_stride;
  const int col = lane * 4;
  Vec<float, 4> matmul_vec;

  // pass 1 of 2: read matmul; keep matmul
  {
    matmul_vec = load<4>(matmul_row + col);
  }

  // ---- words
  // a lane's keys
  float keys[4];
  #pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float matmul = matmul_vec.at[j];
    keys[j] = matmul;
  }
  const int at = threadIdx.x / 16;  // the row's place in the block
  #pragma unroll
  for (int j = 0; j < 4; ++j) picker.keys[at][lane * 4 + j] = keys[j];
  meet();

  // ---- choose
  constexpr int first_place = 3, row_step = 64;  // of the first lane, and of vectors that follow
  // a lane's best; then those of all lanes
  Entry words[4];  // of the first lane's columns
  #pragma unroll
  for (int q = 0; q < 4; ++q) words[q] = word_of(order_of(keys[q]), first_place - (q / 4 * row_step + q % 4));
  Entry best[4];
  best_of(best, words);
  #pragma unroll
  for (int q = 0; q < 4; ++q) best[q] += (15 - lane) * 4;
  #pragma unroll
  for (int step = 1; step < 16; step *= 2) merge_lanes(best, step);
  Entry picks[1] = {best[0]};  // of the row's best, that of this lane
  picks[0] = either(lane == 1, best[1], picks[0]);
  picks[0] = either(lane == 2, best[2], picks[0]);
  picks[0] = either(lane == 3, best[3], picks[0]);

  // ---- again
  // words that agree in all bits but the column's may have another order than their keys. Of keys above the last one
  // chosen all have to be chosen, and no chosen one may be below the next
  float own_keys[1];
  own_keys[0] = picker.keys[at][column_of(picks[0])];
  const float last_key = __shfl_sync(0xffffffffu, own_keys[0], 3, 16);
  int missed = 0;
  #pragma unroll
  for (int j = 0; j < 4; ++j) missed += picker.keys[at][lane * 4 + j] > last_key;
  missed -= lane < 4 && own_keys[0] > last_key;
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) missed += __shfl_xor_sync(0xffffffffu, missed, step);
  bool again = missed != 0;
  const float next_key = __shfl_sync(0xffffffffu, own_keys[0], (lane + 1) % 16, 16);
  again |= lane + 1 < 4 && own_keys[0] < next_key;
  if (vote(again)) {
    const Entry before = __shfl_sync(0xffffffffu, picks[0], (lane + 15) % 16, 16);
    const Entry behind = __shfl_sync(0xffffffffu, picks[0], (lane + 1) % 16, 16);
    Lanes tied[1];  // the lanes with such ranks
    tied[0] = vote(alike(picks[0], before) || alike(picks[0], behind) || lane == 3);
    Entry head = 0;
    unsigned limit = 0;
    #pragma unroll 1
    for (int owner = 0; owner < 4; ++owner) {
      if (tied[0] >> owner & 0x10001u) {
        const Entry word = __shfl_sync(0xffffffffu, picks[0], owner, 16);
        if (!alike(head, word)) limit = 0xffffffffu;
        head = word & ~place_bits;
        unsigned most = 0;  // of the last bits of keys, and their columns
        #pragma unroll 4
        for (int place = lane; place < 64; place += 16) {
          const unsigned order = order_of(picker.keys[at][place]);
          const unsigned low = (order & place_bits) << 6 | (last_place - place);
          if (alike(head, order) && low < limit && low > most) most = low;
        }
        #pragma unroll
        for (int step = 8; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
        limit = most;
        if (lane == owner) picks[0] = word_of(head, most & place_bits);
      }
    }
    own_keys[0] = picker.keys[at][column_of(picks[0])];
  }

  // ---- write
  // the 4 chosen, pass 1 of 3 over them: top = max(best_); write experts
  float top_part = -INFINITY;
  if (live && lane < 4) {
    const Entry entry = picks[0];
    const int experts = entry > masked ? column_of(entry) : -1;
    const float best_ = own_keys[0];
    top_part = larger(top_part, best_);
    experts_row[lane] = experts;
  }
  const float top = row_max(top_part);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // the 4 chosen, pass 2 of 3 over them: sum_of_exps = sum(e)
  float sum_of_exps_part = 0.0f;
  float e_kept;
  if (live && lane < 4) {
    const float best_ = own_keys[0];
    const float best_minus_pivot = best_ - pivot;
    const float e = exponential(best_minus_pivot);
    e_kept = e;
    sum_of_exps_part += e;
  }
  const float sum_of_exps = row_sum(sum_of_exps_part);
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // the 4 chosen, pass 3 of 3 over them: write softmax
  if (live && lane < 4) {
    const float e = e_kept;
    const float softmax = e * inverse_sum;
    softmax_row[lane] = softmax;
  }
}
