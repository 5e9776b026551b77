// moe_layer_matmul_experts_ends: 3 steps in one launch, one after another, by clusters of 8 blocks of 128 threads
//
// because  one launch is expected to take 14.5 us: steps this short are mostly launches
// rows     each cluster takes 32 in the first step; the last one to arrive does what follows
// launch   lets the next one begin once all its blocks run
//
// a. moe_layer_matmul  bf16[T, D], bf16[E, D] -> f32[T, E]  at T=256 D=2048 E=64
//    matmul of moe_layer.
//
//    target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
//    tile     16 x 16 tiles, slice-K by 4 groups of warps; slices of 128 in a ring of 6 for each group
//    traffic  1.4 MB moved, 1.4 MB ideal, 1.4 MB with products apart, 1.4 MB unfused in 1 launch
//    floor    0.3 us at 4.8 TB/s; memory-bound at 48.76 flop/B
//    needs    D=2048, E=64; rows of all operands next to each other; x, router, matmul: address and
//             strides in multiples of 16 B
//
// b. moe_layer_experts  f32[T, E] -> i32[T, 4], f32[T, 4]  at T=256 E=64
//    experts, softmax of moe_layer.
//
//    target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
//    selects  4 of 64 columns a row by matmul, largest first; NaN before all, ties by column, -inf never
//    tile     4 threads a row, 32 rows a block; matmul in registers, the best 4 by rank behind 4 delegates
//             a lane
//    traffic  73728 B moved, 73728 B ideal, 81920 B unfused in 2 launches
//    floor    0.0 us at 4.8 TB/s; memory-bound at 0.38 flop/B
//    needs    rows of 64 elements, next to each other; matmul: address and strides in multiples of 16 B
//
// c. moe_layer_ends  i32[T_times_4] -> i32[E], i32[T_times_4], i32[T_times_4]  at T_times_4=1024 E=64
//    ends, order_value, slot_places of moe_layer.
//
//    target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
//    views    experts_part is experts as [4 * T]
//    tile     counting sort of 1024 slots by 64 groups in a cluster of 8 blocks of 4 warps, 32 slots each
//    traffic  12544 B moved, 12544 B ideal, 12544 B unfused in 1 launch
//    floor    0.0 us at 4.8 TB/s; instruction-bound at 0.00 flop/B
//    needs    rows of 1024 elements, next to each other

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

__device__ __forceinline__ int count(Lanes lanes) {
  return __popc(lanes);
}

namespace step_a {  // matmul

// the vector to p, which is aligned to it
template <int N, typename T>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 16, tile_cols = 16, tile_k = 128, stages = 6;
constexpr int split_k = 4, steps = 4;  // parts of K, and slices of each
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

  // the ring of 6 slices, and what the thread brings of each
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared) + k_group * (stages * slice_elements);
  const int x_m = lane / 16, x_k = lane % 16 * 8;
  const __nv_bfloat16* x_from = x_ptr + (row0 + x_m) * x_stride + k_group * tile_k + x_k;
  const int router_n = lane / 16, router_k = lane % 16 * 8;
  const __nv_bfloat16* router_from = router_ptr + (col0 + router_n) * router_ld + k_group * tile_k + router_k;
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = ring_at + step % stages * slice_bytes;
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      const unsigned to = slice + place<16>(x_m + v * 2, x_k) * 2;
      copy_chunk<8>(to, x_from + v * 2 * x_stride, x_m + v * 2 < rows_here ? 8 : 0);
    }
    x_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      const unsigned to = slice + (router_at + place<16>(router_n + v * 2, router_k)) * 2;
      copy_chunk<8>(to, router_from + v * 2 * router_ld, 8);
    }
    router_from += split_k * tile_k;
  };

  // 4 slices of 128: fragments are loaded one step ahead of their use, across slices too
  unsigned x_part[2][1][4];
  unsigned router_part[2][1][4];
  float matmul_sums[1][2][4] = {};
  const unsigned x_lane = ring_at + place<16>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2;
  const unsigned router_lane = ring_at + router_at * 2 + place<16>(lane % 16, lane / 16 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    load_matrices(x_part[buffer][0], (x_lane ^ (k * 32)) + slice);
    load_matrices(router_part[buffer][0], (router_lane ^ (k * 32)) + slice);
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 2; ++m) {
      multiply_add(matmul_sums[0][m], router_part[buffer][0], x_part[buffer][m / 2][m % 2 * 2],
          x_part[buffer][m / 2][m % 2 * 2 + 1]);
    }
  };

  #pragma unroll
  for (int s = 0; s < stages - 1; ++s) {
    if (s < steps) copy_slice(s);
    commit_copies();
  }
  wait_copies<stages - 2>();
  __syncwarp();
  load_parts(0, 0, 0);
  const auto take_slice = [&](int step, bool last) {
    #pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k == 7 && !last) {
        wait_copies<stages - 2>();
      }
      if (k < 7) {
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
  for (int m = 0; m < 2; ++m) {
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
  if (m < tile_rows && row < rows) {
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

// the largest value over the 4 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v) {
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
}

// the sum over the 4 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v) {
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

// a candidate as one number: of two, the larger is the one to choose. Its upper bits are the order of its key, an integer
// that grows with the key; its lower bits are the column, counted from the row's end, for ties go to lower columns. 0 is none
typedef unsigned long long Entry;
constexpr int column_bits = 6;
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

// the larger of two comes first; NaN is above all numbers
__device__ __forceinline__ void exchange(float& a, float& b) {
  const float less = fminf(a, b);
  a = larger(a, b);
  b = less;
}

// 4 delegates that fall and then rise, in order: the largest first
__device__ __forceinline__ void merge_delegates(float (&delegates)[4]) {
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    #pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (!(q & step)) exchange(delegates[q], delegates[q + step]);
    }
  }
}

// a lane's delegates in order, the largest first: Batcher's bitonic network
__device__ __forceinline__ void sort_delegates(float (&delegates)[4]) {
  #pragma unroll
  for (int size = 2; size <= 4; size *= 2) {
    #pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      #pragma unroll
      for (int q = 0; q < 4; ++q) {
        if (q & step) continue;
        if (q & size) {
          exchange(delegates[q + step], delegates[q]);
        } else {
          exchange(delegates[q], delegates[q + step]);
        }
      }
    }
  }
}

// the sum of v over this lane of the row's and those below it
__device__ __forceinline__ unsigned lanes_sum_below(unsigned v) {
  #pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const unsigned other = __shfl_up_sync(0xffffffffu, v, step);
    if (threadIdx.x % 4 >= step) v += other;
  }
  return v;
}

// what the threads of a block share: of 32 rows
struct alignas(16) Picker {
  float keys[16][128];  // of each thread
  Entry candidates[32][36];
  Entry picks[32][4];  // what is chosen, the best first
};
static_assert(sizeof(Picker) <= 18432, "the launch's shared memory");

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
  constexpr int row_threads = 4;
  constexpr int block_rows = 32;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 4 threads that share a row
  extern __shared__ __align__(16) unsigned char shared[];
  Picker& picker = *reinterpret_cast<Picker*>(shared);
  const long long row = static_cast<long long>(block) * block_rows + threadIdx.x / row_threads;
  const bool live = row < rows;
  const float* const matmul_row = matmul_ptr + row * matmul_stride;
  int* const experts_row = experts_ptr + row * experts_stride;
  float* const softmax_row = softmax_ptr + row * softmax_stride;
  Vec<float, 4> matmul_vec[4];

  // pass 1 of 2: read matmul; keep matmul
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 4;
    if (live) {
      matmul_vec[v] = load<4>(matmul_row + col);
    }
  }

  // ---- bar
  // a lane's 4 delegates are the largest of every 4th of its keys; the 4 best of a row make a bar, which 4 keys
  // reach and few more do
  const int at = threadIdx.x / 4;  // the row's place in the block
  float keys[4][4];
  float delegates[4];
  #pragma unroll
  for (int q = 0; q < 4; ++q) delegates[q] = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      keys[v][j] = -INFINITY;
      if (live) {
        const float matmul = matmul_vec[v].at[j];
        keys[v][j] = matmul;
      }
      delegates[(v * 4 + j) % 4] = larger(delegates[(v * 4 + j) % 4], keys[v][j]);
      picker.keys[v * 4 + j][threadIdx.x] = keys[v][j];  // registers have no addresses, these have
    }
  }
  sort_delegates(delegates);
  #pragma unroll
  for (int step = 1; step < 4; step *= 2) {  // the best 4 of both lanes
    float beyond_lane[4];
    #pragma unroll
    for (int q = 0; q < 4; ++q) beyond_lane[q] = __shfl_xor_sync(0xffffffffu, delegates[3 - q], step);
    #pragma unroll
    for (int q = 0; q < 4; ++q) delegates[q] = larger(delegates[q], beyond_lane[q]);
    merge_delegates(delegates);
  }
  const unsigned order = order_of(delegates[3]);
  const float bar = key_at(order < infinite ? order > masked ? order : masked + 1 : infinite);

  // ---- collect
  // the keys that reach the bar are candidates
  unsigned passing = 0;  // a bit for each of the lane's keys that do
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) passing |= static_cast<unsigned>(!(keys[v][j] < bar)) << (v * 4 + j);
  }
  const unsigned upto = lanes_sum_below(static_cast<unsigned>(count(passing)));
  const unsigned all = __shfl_sync(0xffffffffu, upto, 3, 4);

  // ---- rank
  if (vote(all > 32)) {  // ties: the best one is found 4 times, each time below the last one
    Entry last = ~Entry(0);
    #pragma unroll 1
    for (int r = 0; r < 4; ++r) {
      Entry best_entry = 0;
      #pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        const int own_col = (i / 4 * 4 + lane) * 4 + i % 4;
        const float key = picker.keys[i][threadIdx.x];
        const Entry entry = entry_of(key, own_col);
        if (!(key <= -INFINITY) && entry < last && entry > best_entry) best_entry = entry;
      }
      #pragma unroll
      for (int step = 2; step > 0; step /= 2) {
        const Entry other = __shfl_xor_sync(0xffffffffu, best_entry, step);
        best_entry = best_entry > other ? best_entry : other;
      }
      if (lane == 0) picker.picks[at][r] = best_entry;
      last = best_entry;
    }
  } else {  // each candidate's rank is the number of those that are larger
    #pragma unroll 1
    for (unsigned place = upto - count(passing); passing; ++place) {
      const int i = 31 - __clz(static_cast<int>(passing & (0u - passing)));  // the lowest bit that is set
      const int own_col = (i / 4 * 4 + lane) * 4 + i % 4;
      passing &= passing - 1;
      picker.candidates[at][place] = entry_of(picker.keys[i][threadIdx.x], own_col);
    }
    if (lane < 4) picker.candidates[at][all + lane] = 0;  // as many as are compared at a time
    meet();
    #pragma unroll 1
    for (unsigned i = lane; i < all; i += 4) {
      const Entry entry = picker.candidates[at][i];
      unsigned rank = 0;
      #pragma unroll 1
      for (unsigned other = 0; other < all; other += 4) {
        #pragma unroll
        for (int q = 0; q < 4; ++q) rank += picker.candidates[at][other + q] > entry;
      }
      if (rank < 4) picker.picks[at][rank] = entry;
    }
    for (unsigned i = all + lane; i < 4; i += 4) picker.picks[at][i] = 0;
  }
  meet();

  // ---- write
  // the 4 chosen, pass 1 of 3 over them: top = max(best_); write experts
  float top_part = -INFINITY;
  if (live && lane < 4) {
    const Entry entry = picker.picks[at][lane];
    const int experts = entry ? column_of(entry) : -1;
    const float best_ = entry ? key_of(entry) : -INFINITY;
    top_part = larger(top_part, best_);
    experts_row[lane] = experts;
  }
  const float top = row_max(top_part);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // the 4 chosen, pass 2 of 3 over them: sum_of_exps = sum(e)
  float sum_of_exps_part = 0.0f;
  if (live && lane < 4) {
    const Entry entry = picker.picks[at][lane];
    const float best_ = entry ? key_of(entry) : -INFINITY;
    const float best_minus_pivot = best_ - pivot;
    const float e = exponential(best_minus_pivot);
    sum_of_exps_part += e;
  }
  const float sum_of_exps = row_sum(sum_of_exps_part);
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // the 4 chosen, pass 3 of 3 over them: write softmax
  if (live && lane < 4) {
    const Entry entry = picker.picks[at][lane];
    const float best_ = entry ? key_of(entry) : -INFINITY;
    const float best_minus_pivot = best_ - pivot;
    const float e = exponential(best_minus_pivot);
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
constexpr int blocks = 8;  // of the cluster

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
    unsigned block,
    const int* experts_part_ptr,
    int* ends_ptr,
    int* order_value_ptr,
    int* slot_places_ptr)
{
  extern __shared__ __align__(16) unsigned char shared[];
  // of each warp: first how many of its slots are of each group, then where the next of them goes, from the group's begin
  int (*const counted)[groups + 1] = reinterpret_cast<int (*)[groups + 1]>(shared);
  int* const begin = counted[warps];
  int* const of_block = begin + groups + 1;  // slots of each group in this block, for all blocks to read
  int* const earlier = of_block + groups + 1;  // and in the blocks before it
  const int rank = __clusterRelativeBlockRank();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const Lanes lanes_below = (Lanes(1) << lane) - 1;
  const int slot = rank * threads + threadIdx.x;

  for (int at = threadIdx.x; at < warps * (groups + 1); at += threads) (&counted[0][0])[at] = 0;
  __syncthreads();

  // pass 1: each warp counts its own slots of each group; the first lane of those with one group adds for all of them
  const int named = group_of(experts_part_ptr, slot);
  const Lanes same = of_same(named);
  if (named != no_slot && (same & lanes_below) == 0) counted[warp][named] += count(same);
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
    of_block[group] = total;
  }
  __cluster_barrier_arrive();
  __cluster_barrier_wait();

  // the same of the cluster's blocks
  for (int group = threadIdx.x; group <= groups; group += threads) {
    int total = 0;
    int before = 0;
    #pragma unroll
    for (int block = 0; block < blocks; ++block) {
      const int there = static_cast<const int*>(__cluster_map_shared_rank(of_block, block))[group];
      if (block < rank) before += there;
      total += there;
    }
    begin[group] = total;
    earlier[group] = before;
  }
  __cluster_barrier_arrive();  // this block has read what the others counted
  __syncthreads();

  // where each group begins, for this block, and behind which slot it ends: the first warp adds up the groups before it
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
      if (group <= groups) begin[group] = before + sum - own + earlier[group];
      if (group < groups && rank == 0) ends_ptr[group] = before + sum;
      before += __shfl_sync(0xffffffffu, sum, 31, 32);
    }
  }
  __syncthreads();

  // pass 2: a slot's place is behind those of its group in warps before, in turns before, and in lanes before
  if (named != no_slot) {
    const int place = begin[named] + counted[warp][named] + count(same & lanes_below);
    slot_places_ptr[slot] = place;
    order_value_ptr[place] = slot;
  }
  __cluster_barrier_wait();  // no block ends while another reads its counts
}

}  // namespace step_c

// clusters that have done their share are counted in one word. This is the word before any has: its upper bits tell it
// from whatever else that memory may hold at first
constexpr unsigned long long none_arrived = 0xa463130ff9c00000ull;
constexpr unsigned long long most_arrived = 0xfffff;

// is this block's cluster the last to arrive? All that the others wrote can then be read. `found`: the word at first
__device__ __forceinline__ bool last_to_arrive(unsigned long long* arrived, unsigned long long found) {
  __shared__ bool last;
  __cluster_barrier_arrive();  // what this block wrote
  __cluster_barrier_wait();    // and the others of its cluster
  if (blockIdx.x % 8 == 0 && threadIdx.x == 0) {
    if ((found ^ none_arrived) > most_arrived) atomicCAS(arrived, found, none_arrived);
    __threadfence();
    const bool is_last = atomicAdd(arrived, 1ull) == none_arrived + gridDim.x / 8 - 1;
    if (is_last) atomicExch(arrived, none_arrived);  // for the next launch
    __threadfence();
    for (unsigned block = 0; block < 8; ++block) {
      *static_cast<bool*>(__cluster_map_shared_rank(&last, block)) = is_last;
    }
  }
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  return last;
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(128, 1)
moe_layer_matmul_experts_ends(
    const __nv_bfloat16* a_x_ptr,
    const __nv_bfloat16* a_router_ptr,
    float* a_matmul_ptr,
    const float* b_matmul_ptr,
    int* b_experts_ptr,
    float* b_softmax_ptr,
    const int* c_experts_part_ptr,
    int* c_ends_ptr,
    int* c_order_value_ptr,
    int* c_slot_places_ptr,
    long long* arrived_ptr,
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
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin, once all blocks of this one run
  const unsigned share = blockIdx.x / 8;  // each cluster takes 32 rows
  unsigned long long* const arrived = reinterpret_cast<unsigned long long*>(arrived_ptr);
  const unsigned long long found = blockIdx.x % 8 == 0 && threadIdx.x == 0 ? atomicAdd(arrived, 0ull) : 0;
  for (unsigned block = share * 8 + blockIdx.x % 8; block < (share + 1) * 8 && block < blocks_a; block += 8) {
    step_a::part_a(block, a_x_ptr, a_router_ptr, a_matmul_ptr, a_rows, a_x_stride, a_router_ld, a_matmul_stride);
    __syncthreads();  // its shared memory is the next one's
  }
  if (!last_to_arrive(arrived, found)) return;
  for (unsigned block = blockIdx.x % 8; block < blocks_b; block += 8) {
    step_b::part_b(block, b_matmul_ptr, b_experts_ptr, b_softmax_ptr, b_rows, b_matmul_stride, b_experts_stride,
        b_softmax_stride);
    __syncthreads();  // its shared memory is the next one's
  }
  __cluster_barrier_arrive();  // what this block wrote
  __cluster_barrier_wait();    // and the others can be read by all
  for (unsigned block = blockIdx.x % 8; block < blocks_c; block += 8) {
    step_c::part_c(block, c_experts_part_ptr, c_ends_ptr, c_order_value_ptr, c_slot_places_ptr);
    __syncthreads();  // its shared memory is the next one's
  }
}
