// moe_routing: 3 steps in one launch, one after another, by a cluster of 8 blocks of 128 threads
//
// because  one launch is expected to take 13.9 us: steps this short are mostly launches
//
// a. moe_routing_matmul  bf16[T, D], bf16[E, D] -> f32[T, E]  at T=64 D=2048 E=64
//    matmul of moe_routing.
//
//    target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
//    tile     64 x 16 tiles, slice-K by 4 groups of warps; slices of 64 in a ring of 4 for each group
//    traffic  0.5 MB moved, 0.5 MB ideal, 0.5 MB with products apart, 0.5 MB unfused in 1 launch
//    floor    0.1 us at 4.8 TB/s; memory-bound at 31.03 flop/B
//    needs    D=2048, E=64; rows of all operands next to each other; x, router, matmul: address and
//             strides in multiples of 16 B
//
// b. moe_routing_experts  f32[T, E] -> i32[T, K], f32[T, K]  at T=64 E=64 K=4
//    experts, softmax of moe_routing.
//
//    target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
//    selects  4 of 64 columns a row by matmul, largest first; NaN before all, ties by column, -inf never
//    tile     16 threads a row, 8 rows a block; matmul in registers, the best 4 by a network, 4 at a time
//    traffic  18432 B moved, 18432 B ideal, 20480 B unfused in 2 launches
//    floor    0.0 us at 4.8 TB/s; memory-bound at 0.38 flop/B
//    needs    rows of 64 elements, next to each other; matmul: address and strides in multiples of 16 B
//
// c. moe_routing_ends  i32[K_times_T] -> i32[E], i32[K_times_T], i32[K_times_T]  at K_times_T=256 E=64
//    ends, order, places of moe_routing.
//
//    target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
//    views    experts_part is experts as [K * T]
//    tile     counting sort of 256 slots by 64 groups in one block of 4 warps, 64 slots each
//    traffic  3328 B moved, 3328 B ideal, 3328 B unfused in 1 launch
//    floor    0.0 us at 4.8 TB/s; instruction-bound at 0.00 flop/B
//    needs    rows of 256 elements, next to each other

#include <cuda_bf16.h>

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

// one bit a lane, the lowest for the first
typedef unsigned Lanes;

// the lanes of the warp that say so
__device__ __forceinline__ Lanes vote(bool says) {
  return __ballot_sync(0xffffffffu, says);
}

// what the warp's threads wrote to shared memory can be read by all of them
__device__ __forceinline__ void meet() {
  __syncwarp();
}

namespace step_a {  // matmul

// the vector to p, which is aligned to it
template <int N, typename T>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 64, tile_cols = 16, tile_k = 64, stages = 4;
constexpr int split_k = 4, steps = 8;  // parts of K, and slices of each
constexpr int tiles_across = 4;
// elements from the start of a slice to the right factor, and to its end
constexpr int router_at = tile_rows * tile_k;
constexpr int slice_elements = router_at + tile_cols * tile_k;
constexpr int slice_bytes = 2 * slice_elements;
// floats from a row of sums to the next: what a warp writes at once lies in different banks
constexpr int sums_stride = tile_cols + 4;
constexpr int group_floats = 1 * tile_rows * sums_stride;  // of a slice-K group's sums

// where element (row, k) lies in a tile with rows of Chunks x 8 elements: XOR-swizzled by the row's number, so that
// 8 rows of one column of chunks lie in different banks
template <int Chunks>
__device__ __forceinline__ int place(int row, int k) {
  constexpr int period = Chunks < 8 ? Chunks : 8;
  const int xor_mask = row / (8 / period) % period;
  return (row * Chunks + (k / 8 ^ xor_mask)) * 8 + k % 8;
}

// 8 elements on their way from global to shared memory, Width with each copy; those from `count` on are zeros
template <int Width, typename T>
__device__ __forceinline__ void copy_chunk(unsigned to, const T* from, int count) {
  if constexpr (Width == 8) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(to), "l"(from), "r"(count * 2) : "memory");
  } else {
    #pragma unroll
    for (int j = 0; j < 8; j += Width) {
      const int left = count < j ? 0 : count - j < Width ? count - j : Width;
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
          :: "r"(to + j * 2), "l"(from + j), "n"(Width * 2), "r"(left * 2) : "memory");
    }
  }
}

// the same address, that threads have in registers of their own
__device__ __forceinline__ unsigned own_address(unsigned address) {
  return address ^ threadIdx.y;
}

// 8 elements that are read once: evict-first in the L2 cache
template <typename T>
__device__ __forceinline__ void copy_evict_first(unsigned to, const T* from, int count) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
      :: "r"(to), "l"(from), "r"(count * 2), "l"(policy) : "memory");
}

// the copies since the last call become one group
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// waits for the thread's own groups, all but the last Pending
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");
}

// N neighbouring sums in shared memory, added up over the 4 slice-K groups, always in this order
template <int N>
__device__ __forceinline__ Vec<float, N> gathered(const float* from) {
  Vec<float, N> total = {};
  #pragma unroll
  for (int group = 0; group < 4; ++group) {
    const Vec<float, N> part = load<N>(from + group * group_floats);
    #pragma unroll
    for (int j = 0; j < N; ++j) total.at[j] += part.at[j];
  }
  return total;
}

// four matrices of 8 x 16 bytes, from the rows whose places the lanes give
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// sums += right^T left^T, 16 columns by 8 rows
__device__ __forceinline__ void multiply_add(
    float (&sums)[4], const unsigned (&right)[4], unsigned left_0, unsigned left_1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(right[0]), "r"(right[1]), "r"(right[2]), "r"(right[3]), "r"(left_0), "r"(left_1));
}

// what the step's block of that number does
__device__ __forceinline__ void part_a(
    unsigned block,
    const __nv_bfloat16* x_ptr,
    const __nv_bfloat16* router_ptr,
    float* matmul_ptr,
    long long rows,
    long long x_stride,
    long long router_ld,
    long long matmul_stride)
{
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int k_group = threadIdx.x / 32;  // slice-K: of 4 groups of warps
  const unsigned tile = block;
  const long long row0 = static_cast<long long>(tile / tiles_across) * tile_rows;
  const int across = tile % tiles_across;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  const int col0 = across * tile_cols;

  // the ring of 4 slices, and what the thread brings of each
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared) + k_group * (stages * slice_elements);
  const int x_m = lane / 8, x_k = lane % 8 * 8;
  const __nv_bfloat16* x_from = x_ptr + (row0 + x_m) * x_stride + k_group * tile_k + x_k;
  const int router_n = lane / 8, router_k = lane % 8 * 8;
  const __nv_bfloat16* router_from = router_ptr + (col0 + router_n) * router_ld + k_group * tile_k + router_k;
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = own_address(ring_at + step % stages * slice_bytes);
    #pragma unroll
    for (int v = 0; v < 16; ++v) {
      const unsigned to = slice + place<8>(x_m + v * 4, x_k) * 2;
      copy_chunk<8>(to, x_from + v * 4 * x_stride, x_m + v * 4 < rows_here ? 8 : 0);
    }
    x_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + (router_at + place<8>(router_n + v * 4, router_k)) * 2;
      copy_evict_first(to, router_from + v * 4 * router_ld, 8);
    }
    router_from += split_k * tile_k;
  };

  // 8 slices of 64: fragments are loaded one step ahead of their use, across slices too
  unsigned x_part[2][4][4];
  unsigned router_part[2][1][4];
  float matmul_sums[1][8][4] = {};
  const unsigned x_lane = ring_at + place<8>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2;
  const unsigned router_lane = ring_at + router_at * 2 + place<8>(lane % 16, lane / 16 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(x_part[buffer][i], (x_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    load_matrices(router_part[buffer][0], (router_lane ^ (k * 32)) + slice);
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 8; ++m) {
      multiply_add(matmul_sums[0][m], router_part[buffer][0], x_part[buffer][m / 2][m % 2 * 2],
          x_part[buffer][m / 2][m % 2 * 2 + 1]);
    }
  };

  #pragma unroll
  for (int s = 0; s < stages - 1; ++s) {
    copy_slice(s);
    commit_copies();
  }
  wait_copies<stages - 2>();
  __syncwarp();
  load_parts(0, 0, 0);
  const auto take_slice = [&](int step, bool last) {
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k == 3 && !last) {
        wait_copies<stages - 2>();
      }
      if (k < 3) {
        load_parts(step, k + 1, (k + 1) % 2);
      } else if (!last) {
        __syncwarp();
        load_parts(step + 1, 0, 0);
      }
      if (k == 0 && !last) {
        if (step + stages - 1 < steps) copy_slice(step + stages - 1);
        commit_copies();
      }
      multiply(k % 2);
    }
  };
  #pragma unroll 1
  for (int step = 0; step < steps - 1; ++step) take_slice(step, false);
  take_slice(steps - 1, true);

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  __syncthreads();
  float* const matmul_shared = reinterpret_cast<float*>(shared);
  #pragma unroll
  for (int m = 0; m < 8; ++m) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int sum_row = m * 8 + lane % 4 * 2 + i % 2;
      const int sum_col = lane / 4 + i / 2 * 8;
      matmul_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = matmul_sums[0][m][i];
    }
  }
  __syncthreads();

  const int m = static_cast<int>(threadIdx.x / (tile_cols / 8));
  const int n = static_cast<int>(threadIdx.x % (tile_cols / 8)) * 8;
  const long long row = row0 + m;
  const int col = col0 + n;
  if (row < rows) {
    const Vec<float, 8> matmul_total = gathered<8>(matmul_shared + m * sums_stride + n);
    Vec<float, 8> matmul_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float matmul = matmul_total.at[j];
      matmul_vec.at[j] = matmul;
    }
    store<8>(matmul_ptr + row * matmul_stride + col, matmul_vec);
  }
}

}  // namespace step_a

namespace step_b {  // experts

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

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

// what the threads of a block share: of 8 rows
struct alignas(16) Picker {
  float keys[8][128];  // of each row, by column
};
static_assert(sizeof(Picker) <= 4096, "the launch's shared memory");

// what the step's block of that number does
__device__ __forceinline__ void part_b(
    unsigned block,
    const float* matmul_ptr,
    int* experts_ptr,
    float* softmax_ptr,
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
  const long long own_row = static_cast<long long>(block) * block_rows + threadIdx.x / row_threads;
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

}  // namespace step_b

namespace step_c {  // ends

constexpr int groups = 64;
constexpr int no_group = groups;  // of a slot whose id is none of theirs
constexpr int no_slot = groups + 1;  // of a lane without one
constexpr int threads = 128;
constexpr int warps = 4;
constexpr int batch = 2;  // slots of a lane whose groups are read together

__device__ __forceinline__ int count(Lanes lanes) {
  return __popc(lanes);
}

// the lanes of the warp whose slots are of this lane's group: those whose numbers have the same bits
__device__ __forceinline__ Lanes of_same(int group) {
  Lanes same = ~Lanes(0);
  #pragma unroll
  for (int bit = 0; bit < 7; ++bit) {
    const bool set = group & 1 << bit;
    const Lanes says = vote(set);
    same &= set ? says : ~says;
  }
  return same;
}

// v of the lane so many before this one
__device__ __forceinline__ int from_before(int v, int step) {
  return __shfl_up_sync(0xffffffffu, v, step);
}

__device__ __forceinline__ int group_of(const int* experts_part_ptr, int slot) {
  const int id = experts_part_ptr[slot];
  return 0 <= id && id < groups ? id : no_group;
}

// what the step's block of that number does
__device__ __forceinline__ void part_c(
    const int* experts_part_ptr,
    int* ends_ptr,
    int* order_ptr,
    int* places_ptr)
{
  extern __shared__ __align__(16) unsigned char shared[];
  // of each warp: first how many of its slots are of each group, then where the next of them goes, from the group's begin
  int (*const counted)[groups + 1] = reinterpret_cast<int (*)[groups + 1]>(shared);
  int* const begin = counted[warps];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const Lanes lanes_below = (Lanes(1) << lane) - 1;
  const int first_slot = warp * (batch * 32) + lane;

  for (int at = threadIdx.x; at < warps * (groups + 1); at += threads) (&counted[0][0])[at] = 0;
  __syncthreads();

  // pass 1: each warp counts its own slots of each group
  int named[batch];
  #pragma unroll
  for (int i = 0; i < 2; ++i) named[i] = group_of(experts_part_ptr, first_slot + i * 32);
  #pragma unroll
  for (int i = 0; i < batch; ++i) {
    if (named[i] != no_slot) atomicAdd(&counted[warp][named[i]], 1);
  }
  __syncthreads();

  // of each group, the slots of the warps before
  for (int group = threadIdx.x; group <= groups; group += threads) {
    int total = 0;
    #pragma unroll 4
    for (int w = 0; w < warps; ++w) {
      const int own = counted[w][group];
      counted[w][group] = total;
      total += own;
    }
    begin[group] = total;
  }
  __syncthreads();

  // where each group begins, and behind which slot it ends: the first warp adds up the groups before it
  if (warp == 0) {
    int before = 0;
    for (int first = 0; first <= groups; first += 32) {
      const int group = first + lane;
      const int own = group <= groups ? begin[group] : 0;
      int sum = own;
      #pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = from_before(sum, step);
        if (lane >= step) sum += other;
      }
      if (group <= groups) begin[group] = before + sum - own;
      if (group < groups) ends_ptr[group] = before + sum;
      before += __shfl_sync(0xffffffffu, sum, 31, 32);
    }
  }
  __syncthreads();

  // pass 2: a slot's place is behind those of its group in warps before, in turns before, and in lanes before
  #pragma unroll
  for (int i = 0; i < batch; ++i) {
    const int slot = first_slot + i * 32;
    const Lanes same = of_same(named[i]);
    int place = 0;
    if (named[i] != no_slot) place = begin[named[i]] + counted[warp][named[i]] + count(same & lanes_below);
    meet();
    if (named[i] != no_slot) {
      places_ptr[slot] = place;
      order_ptr[place] = slot;
      if ((same & lanes_below) == 0) counted[warp][named[i]] += count(same);
    }
    meet();
  }
}

}  // namespace step_c

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(128)
moe_routing(
    const __nv_bfloat16* a_x_ptr,
    const __nv_bfloat16* a_router_ptr,
    float* a_matmul_ptr,
    const float* b_matmul_ptr,
    int* b_experts_ptr,
    float* b_softmax_ptr,
    const int* c_experts_part_ptr,
    int* c_ends_ptr,
    int* c_order_ptr,
    int* c_places_ptr,
    long long blocks_a,
    long long blocks_b,
    long long blocks_c,
    long long a_rows,
    long long a_x_stride,
    long long a_router_ld,
    long long a_matmul_stride,
    long long b_rows,
    long long b_matmul_stride,
    long long b_experts_stride,
    long long b_softmax_stride)
{
  for (unsigned block = blockIdx.x; block < blocks_a; block += 8) {
    step_a::part_a(block, a_x_ptr, a_router_ptr, a_matmul_ptr, a_rows, a_x_stride, a_router_ld, a_matmul_stride);
    __syncthreads();  // its shared memory is the next one's
  }
  __cluster_barrier_arrive();  // what this block wrote
  __cluster_barrier_wait();    // and the others can be read by all
  for (unsigned block = blockIdx.x; block < blocks_b; block += 8) {
    step_b::part_b(block, b_matmul_ptr, b_experts_ptr, b_softmax_ptr, b_rows, b_matmul_stride, b_experts_stride,
        b_softmax_stride);
    __syncthreads();  // its shared memory is the next one's
  }
  __cluster_barrier_arrive();  // what this block wrote
  __cluster_barrier_wait();    // and the others can be read by all
  for (unsigned block = blockIdx.x; block < blocks_c; block += 8) {
    step_c::part_c(c_experts_part_ptr, c_ends_ptr, c_order_ptr, c_places_ptr);
    __syncthreads();  // its shared memory is the next one's
  }
}
