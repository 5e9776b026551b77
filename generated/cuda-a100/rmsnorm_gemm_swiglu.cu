// rmsnorm_gemm_swiglu  bf16[M, K], bf16[K], bf16[N, K], bf16[N, K] -> bf16[M, N]  at M=8 K=4096 N=14336
// silu(h @ w_gate.T) * (h @ w_up.T) with h = rmsnorm(x) * gain.
//
//     def rmsnorm_gemm_swiglu(x, gain, w_gate, w_up):
//         h = F.rmsnorm(x, gain)
//         return F.silu(h @ w_gate.T) * (h @ w_up.T)
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// tile     8 x 16 tiles, slice-K by 8 groups of warps; slices of 64 in a ring of 4 for each group
// traffic  235.2 MB moved, 235.2 MB ideal, 236.3 MB with products apart, 236.8 MB unfused in 5 launches
// floor    115.3 us at 2.039 TB/s; memory-bound at 7.99 flop/B
// rounding x * gain to bf16 before it is multiplied, and only then scaled by rrms; out to bf16 when
//          stored; f32 between
// needs    K=4096, N=14336; rows of all operands next to each other; x, gain, w_gate, w_up, out:
//          address and strides in multiples of 16 B; gain [K] shared by every row

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

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, within 1 ulp; above 2^126 it is 0
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 8, tile_cols = 16, tile_k = 64, stages = 4;
constexpr int split_k = 8, steps = 8;  // parts of K, and slices of each
constexpr int tiles_across = 896;
// elements from the start of a slice to the right factors, and to its end
constexpr int w_gate_at = tile_rows * tile_k;
constexpr int w_up_at = w_gate_at + tile_cols * tile_k;
constexpr int slice_elements = w_up_at + tile_cols * tile_k;
constexpr int slice_bytes = 2 * slice_elements;
// floats from a row of sums to the next: what a warp writes at once lies in different banks
constexpr int sums_stride = tile_cols + 4;
constexpr int group_floats = 2 * tile_rows * sums_stride + 1 * tile_rows;  // of a slice-K group's sums and statistics

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

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
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
rmsnorm_gemm_swiglu(
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ gain_ptr,
    const __nv_bfloat16* __restrict__ w_gate_ptr,
    const __nv_bfloat16* __restrict__ w_up_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long w_gate_ld,
    long long w_up_ld,
    long long out_stride)
{
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
  const int x_m = lane / 8, x_k = lane % 8 * 8;
  const __nv_bfloat16* x_from = x_ptr + (row0 + x_m) * x_stride + k_group * tile_k + x_k;
  const int w_gate_n = lane / 8, w_gate_k = lane % 8 * 8;
  const __nv_bfloat16* w_gate_from = w_gate_ptr + (col0 + w_gate_n) * w_gate_ld + k_group * tile_k + w_gate_k;
  const int w_up_n = lane / 8, w_up_k = lane % 8 * 8;
  const __nv_bfloat16* w_up_from = w_up_ptr + (col0 + w_up_n) * w_up_ld + k_group * tile_k + w_up_k;
  Vec<__nv_bfloat16, 8> gain_held;
  float sum_of_squares_part[2] = {};
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = own_address(ring_at + step % stages * slice_bytes);
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      const unsigned to = slice + place<8>(x_m + v * 4, x_k) * 2;
      copy_chunk<8>(to, x_from + v * 4 * x_stride, x_m + v * 4 < rows_here ? 8 : 0);
    }
    x_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + (w_gate_at + place<8>(w_gate_n + v * 4, w_gate_k)) * 2;
      copy_evict_first(to, w_gate_from + v * 4 * w_gate_ld, 8);
    }
    w_gate_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + (w_up_at + place<8>(w_up_n + v * 4, w_up_k)) * 2;
      copy_evict_first(to, w_up_from + v * 4 * w_up_ld, 8);
    }
    w_up_from += split_k * tile_k;
  };
  const auto fetch_slice = [&](int step) {
    const int k_at = (step * split_k + k_group) * tile_k;
    gain_held = load_chunk<8>(gain_ptr + k_at + x_k, 8);
  };
  const auto prepare_slice = [&](int step) {
    __nv_bfloat16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      __nv_bfloat16* const at = slice + place<8>(x_m + v * 4, x_k);
      Vec<__nv_bfloat16, 8> x_vec = load<8>(at);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x = __bfloat162float(x_vec.at[j]);
        const float gain = __bfloat162float(gain_held.at[j]);
        const float x_times_gain = x * gain;
        const float square = x * x;
        x_vec.at[j] = __float2bfloat16_rn(x_times_gain);
        sum_of_squares_part[v] += square;
      }
      store<8>(at, x_vec);
    }
  };

  // 8 slices of 64: fragments are loaded one step ahead of their use, across slices too
  unsigned x_part[2][1][4];
  unsigned w_gate_part[2][1][4];
  unsigned w_up_part[2][1][4];
  float matmul_w_gate_sums[1][1][4] = {};
  float matmul_w_up_sums[1][1][4] = {};
  const unsigned x_lane = ring_at + place<8>(lane % 8, lane / 8 % 2 * 8) * 2;
  const unsigned w_gate_lane = ring_at + w_gate_at * 2 + place<8>(lane % 16, lane / 16 * 8) * 2;
  const unsigned w_up_lane = ring_at + w_up_at * 2 + place<8>(lane % 16, lane / 16 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    load_two_matrices(x_part[buffer][0], (x_lane ^ (k * 32)) + slice);
    load_matrices(w_gate_part[buffer][0], (w_gate_lane ^ (k * 32)) + slice);
    load_matrices(w_up_part[buffer][0], (w_up_lane ^ (k * 32)) + slice);
  };
  const auto multiply = [&](int buffer) {
    multiply_add(matmul_w_gate_sums[0][0], w_gate_part[buffer][0], x_part[buffer][0][0], x_part[buffer][0][1]);
    multiply_add(matmul_w_up_sums[0][0], w_up_part[buffer][0], x_part[buffer][0][0], x_part[buffer][0][1]);
  };

  fetch_slice(0);
  #pragma unroll
  for (int s = 0; s < stages - 1; ++s) {
    copy_slice(s);
    commit_copies();
  }
  wait_copies<stages - 2>();
  prepare_slice(0);
  __syncwarp();
  load_parts(0, 0, 0);
  const auto take_slice = [&](int step, bool last) {
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k == 2 && !last) {
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
        fetch_slice(step + 1);
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
  float* const matmul_w_gate_shared = reinterpret_cast<float*>(shared);
  float* const matmul_w_up_shared = reinterpret_cast<float*>(shared) + tile_rows * sums_stride;
  float* const sum_of_squares_shared = reinterpret_cast<float*>(shared) + 2 * tile_rows * sums_stride;
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    #pragma unroll
    for (int step = 4; step > 0; step /= 2) sum_of_squares_part[v] += partner(sum_of_squares_part[v], step);
    if (x_k == 0) sum_of_squares_shared[k_group * group_floats + x_m + v * 4] = sum_of_squares_part[v];
  }
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int sum_row = lane % 4 * 2 + i % 2;
    const int sum_col = lane / 4 + i / 2 * 8;
    matmul_w_gate_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = matmul_w_gate_sums[0][0][i];
    matmul_w_up_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = matmul_w_up_sums[0][0][i];
  }
  __syncthreads();

  const int m = static_cast<int>(threadIdx.x / (tile_cols / 8));
  const int n = static_cast<int>(threadIdx.x % (tile_cols / 8)) * 8;
  const long long row = row0 + m;
  const int col = col0 + n;
  if (m < tile_rows && row < rows) {
    const Vec<float, 8> matmul_w_gate_total = gathered<8>(matmul_w_gate_shared + m * sums_stride + n);
    const Vec<float, 8> matmul_w_up_total = gathered<8>(matmul_w_up_shared + m * sums_stride + n);
    const float sum_of_squares = gathered<1>(sum_of_squares_shared + m).at[0];
    const float mean = sum_of_squares / 4096.0f;
    const float mean_plus_eps = mean + 1e-06f;
    const float rrms = rsqrtf(mean_plus_eps);
    Vec<__nv_bfloat16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float matmul_w_gate = matmul_w_gate_total.at[j];
      const float matmul_w_up = matmul_w_up_total.at[j];
      const float matmul_w_gate_times_rrms = matmul_w_gate * rrms;
      const float silu = matmul_w_gate_times_rrms * reciprocal(1.0f + exponential(-matmul_w_gate_times_rrms));
      const float matmul_w_up_times_rrms = matmul_w_up * rrms;
      const float out = silu * matmul_w_up_times_rrms;
      out_vec.at[j] = __float2bfloat16_rn(out);
    }
    store<8>(out_ptr + row * out_stride + col, out_vec);
  }
}
