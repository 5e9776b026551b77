// decoder_layer_matmul_wo  bf16[D, E_times_G_times_H], f32[B, E_times_G_times_H] -> f32[B, D]  at D=4096 E_times_G_times_H=4096 B=8
// matmul_wo of decoder_layer.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// views    matmul_2_part is matmul_2 as [B, E * G * H]
// tile     8 x 16 tiles, slice-K by 8 groups of warps; slices of 64 in a ring of 4 for each group
// traffic  33.8 MB moved, 33.8 MB ideal, 33.9 MB with products apart, 34.2 MB unfused in 3 launches
// floor    7.0 us at 4.8 TB/s; memory-bound at 7.94 flop/B
// rounding round_bf16_ to bf16 before it is multiplied; mixed to bf16 by an explicit cast; a value to
//          bf16 by an explicit cast; f32 between
// needs    D=4096, E_times_G_times_H=4096; rows of all operands next to each other; matmul_2_part, wo,
//          matmul_wo: address and strides in multiples of 16 B
// launch   begins while the kernels before it run, and waits for them behind the first 3 slices of wo;
//          lets the next one begin once all its blocks run

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

// the vector to p, which is aligned to it
template <int N, typename T>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// x rounded to bf16, nearest even
__device__ __forceinline__ float round_bf16(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 8, tile_cols = 16, tile_k = 64, stages = 4;
constexpr int split_k = 8, steps = 8;  // parts of K, and slices of each
constexpr int tiles_across = 256;
// elements from the start of a slice to the right factor, and to its end
constexpr int wo_at = tile_rows * tile_k;
constexpr int slice_elements = wo_at + tile_cols * tile_k;
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

// 8 elements, Width with each load; those from `count` on are zeros
template <int Width, typename T>
__device__ __forceinline__ Vec<T, 8> load_chunk(const T* from, int count) {
  Vec<T, 8> v;
  if (Width > 1 && count == 8) {
    #pragma unroll
    for (int j = 0; j < 8; j += Width) {
      const Vec<T, Width> part = load<Width>(from + j);
      #pragma unroll
      for (int i = 0; i < Width; ++i) v.at[j + i] = part.at[i];
    }
  } else {
    #pragma unroll
    for (int j = 0; j < 8; ++j) v.at[j] = j < count ? from[j] : T{};
  }
  return v;
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

// N neighbouring sums in shared memory, added up over the 8 slice-K groups, always in this order
template <int N>
__device__ __forceinline__ Vec<float, N> gathered(const float* from) {
  Vec<float, N> total = {};
  #pragma unroll
  for (int group = 0; group < 8; ++group) {
    const Vec<float, N> part = load<N>(from + group * group_floats);
    #pragma unroll
    for (int j = 0; j < N; ++j) total.at[j] += part.at[j];
  }
  return total;
}

// two matrices of 8 x 16 bytes, from the rows whose places the lanes give
__device__ __forceinline__ void load_two_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
      : "=r"(to[0]), "=r"(to[1]) : "r"(address) : "memory");
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

extern "C" __global__ void __launch_bounds__(256)
decoder_layer_matmul_wo(
    const __nv_bfloat16* __restrict__ wo_ptr,
    const float* matmul_2_part_ptr,
    float* __restrict__ matmul_wo_ptr,
    long long rows,
    long long matmul_2_part_stride,
    long long wo_ld,
    long long matmul_wo_stride)
{
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin, once all blocks of this one run
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int k_group = threadIdx.x / 32;  // slice-K: of 8 groups of warps
  const unsigned tile = blockIdx.x;
  const long long row0 = static_cast<long long>(tile / tiles_across) * tile_rows;
  const int across = tile % tiles_across;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  const int col0 = across * tile_cols;

  // the ring of 4 slices, and what the thread brings of each
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared) + k_group * (stages * slice_elements);
  const int matmul_2_part_m = lane / 8, matmul_2_part_k = lane % 8 * 8;
  const float* matmul_2_part_from = matmul_2_part_ptr + (row0 + matmul_2_part_m) * matmul_2_part_stride + k_group * tile_k
      + matmul_2_part_k;
  const int wo_n = lane / 8, wo_k = lane % 8 * 8;
  const __nv_bfloat16* wo_from = wo_ptr + (col0 + wo_n) * wo_ld + k_group * tile_k + wo_k;
  Vec<float, 8> matmul_2_part_held[2];
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = own_address(ring_at + step % stages * slice_bytes);
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + (wo_at + place<8>(wo_n + v * 4, wo_k)) * 2;
      copy_evict_first(to, wo_from + v * 4 * wo_ld, 8);
    }
    wo_from += split_k * tile_k;
  };

  // the right factors' first slices: no kernel before this one writes them
  #pragma unroll
  for (int s = 0; s < stages - 1; ++s) {
    copy_slice(s);
    commit_copies();
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");  // until the kernels before this one have ended
  const auto fetch_slice = [&]() {
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      matmul_2_part_held[v] = load_chunk<8>(matmul_2_part_from + v * 4 * matmul_2_part_stride, matmul_2_part_m + v * 4 < rows_here ? 8 : 0);
    }
    matmul_2_part_from += split_k * tile_k;
  };
  const auto prepare_slice = [&](int step) {
    __nv_bfloat16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      Vec<__nv_bfloat16, 8> matmul_2_part_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float matmul_2_part = matmul_2_part_held[v].at[j];
        const float mixed = round_bf16(matmul_2_part);
        const float round_bf16_ = round_bf16(mixed);
        matmul_2_part_vec.at[j] = __float2bfloat16_rn(round_bf16_);
      }
      store<8>(slice + place<8>(matmul_2_part_m + v * 4, matmul_2_part_k), matmul_2_part_vec);
    }
  };

  // 8 slices of 64: fragments are loaded one step ahead of their use, across slices too
  unsigned matmul_2_part_part[2][1][4];
  unsigned wo_part[2][1][4];
  float matmul_sums[1][1][4] = {};
  const unsigned matmul_2_part_lane = ring_at + place<8>(lane % 8, lane / 8 % 2 * 8) * 2;
  const unsigned wo_lane = ring_at + wo_at * 2 + place<8>(lane % 16, lane / 16 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    load_two_matrices(matmul_2_part_part[buffer][0], (matmul_2_part_lane ^ (k * 32)) + slice);
    load_matrices(wo_part[buffer][0], (wo_lane ^ (k * 32)) + slice);
  };
  const auto multiply = [&](int buffer) {
    multiply_add(matmul_sums[0][0], wo_part[buffer][0], matmul_2_part_part[buffer][0][0],
        matmul_2_part_part[buffer][0][1]);
  };

  fetch_slice();
  wait_copies<stages - 2>();
  prepare_slice(0);
  __syncwarp();
  load_parts(0, 0, 0);
  const auto take_slice = [&](int step, bool last) {
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k == 3 && !last) {
        wait_copies<stages - 2>();
        prepare_slice(step + 1);
      }
      if (k < 3) {
        load_parts(step, k + 1, (k + 1) % 2);
      } else if (!last) {
        __syncwarp();
        load_parts(step + 1, 0, 0);
      }
      if (k == 0 && !last) {
        fetch_slice();
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
  for (int i = 0; i < 4; ++i) {
    const int sum_row = lane % 4 * 2 + i % 2;
    const int sum_col = lane / 4 + i / 2 * 8;
    matmul_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = matmul_sums[0][0][i];
  }
  __syncthreads();

  const int m = static_cast<int>(threadIdx.x / (tile_cols / 8));
  const int n = static_cast<int>(threadIdx.x % (tile_cols / 8)) * 8;
  const long long row = row0 + m;
  const int col = col0 + n;
  if (m < tile_rows && row < rows) {
    const Vec<float, 8> matmul_total = gathered<8>(matmul_shared + m * sums_stride + n);
    Vec<float, 8> matmul_wo_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float matmul = matmul_total.at[j];
      matmul_wo_vec.at[j] = matmul;
    }
    store<8>(matmul_wo_ptr + row * matmul_wo_stride + col, matmul_wo_vec);
  }
}
