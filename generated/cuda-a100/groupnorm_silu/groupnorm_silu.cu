// groupnorm_silu  bf16[B, 32, C_times_S], bf16[32, C], bf16[32, C] -> bf16[B, 32, C_times_S]  at B=16 C_times_S=40960 C=10
// silu(GroupNorm(x)) of 32 groups of C channels: what is normalized together is one row, which is read once.
//
//     def groupnorm_silu(x, gamma, beta):
//         return F.silu(F.groupnorm(x, 32, gamma, beta, eps=1e-5))
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// views    in_groups is x as [B, 32, C * S]; gamma_part is gamma as [32, C]; beta_part is beta as [32,
//          C]
// tile     a block of 512 threads a row, 10 x 8 elements a thread; in_groups in shared memory
// traffic  83.9 MB moved, 83.9 MB ideal, 209.7 MB unfused in 2 launches
// floor    41.1 us at 2.039 TB/s; memory-bound at 4.25 flop/B
// rounding out to bf16 when stored; f32 between
// needs    rows of 40960 elements, next to each other; in_groups, out: address and strides in multiples
//          of 16 B

#include <cuda_bf16.h>

// N values that move together, 16 bytes at a time where they fill them
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
};

// the value at p, N times
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_for_all(const T* p) {
  const T value = *p;
  Vec<T, N> v;
  #pragma unroll
  for (int j = 0; j < N; ++j) v.at[j] = value;
  return v;
}

// the vector to p, which is aligned to it
template <int N, typename T>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// N values on their way from global to shared memory, past the registers; aligned to their size, of 4, 8 or 16 bytes
template <int N, typename T>
__device__ __forceinline__ void copy_async(Vec<T, N>* to, const T* from) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (sizeof(*to) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(place), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
        :: "r"(place), "l"(from), "n"(sizeof(*to)) : "memory");
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

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// the sum over the 512 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 16];
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(512)
groupnorm_silu(
    const __nv_bfloat16* __restrict__ in_groups_ptr,
    const __nv_bfloat16* __restrict__ gamma_part_ptr,
    const __nv_bfloat16* __restrict__ beta_part_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
    long long B_size,
    long long axis1_size,
    long long in_groups_stride_B,
    long long in_groups_stride_axis1,
    long long gamma_part_stride_axis1,
    long long gamma_part_stride_elements,
    long long beta_part_stride_axis1,
    long long beta_part_stride_elements,
    long long out_stride_B,
    long long out_stride_axis1)
{
  constexpr int row_threads = 512;
  constexpr int gamma_part_cols = 4096;  // of a value
  constexpr int beta_part_cols = 4096;  // of a value
  const int lane = threadIdx.x;  // of the 512 threads that share a row
  __shared__ float part[2][16];
  extern __shared__ __align__(16) unsigned char shared[];
  Vec<__nv_bfloat16, 8>* const in_groups_kept = reinterpret_cast<Vec<__nv_bfloat16, 8>*>(shared);
  const long long row = blockIdx.x;
  const unsigned B_at = static_cast<unsigned>(row) / static_cast<unsigned>(axis1_size);
  const unsigned axis1_at = static_cast<unsigned>(row) % static_cast<unsigned>(axis1_size);
  const __nv_bfloat16* const in_groups_row = in_groups_ptr + B_at * in_groups_stride_B + axis1_at * in_groups_stride_axis1;
  const __nv_bfloat16* const gamma_part_row = gamma_part_ptr + axis1_at * gamma_part_stride_axis1;
  const __nv_bfloat16* const beta_part_row = beta_part_ptr + axis1_at * beta_part_stride_axis1;
  __nv_bfloat16* const out_row = out_ptr + B_at * out_stride_B + axis1_at * out_stride_axis1;

  // pass 1 of 3: read in_groups; keep in_groups; sum_of_in_groups = sum(in_groups)
  float sum_of_in_groups_part = 0.0f;
  #pragma unroll 4
  for (int v = 0; v < 10; ++v) {
    const int col = (v * row_threads + lane) * 8;
    copy_async<8>(&in_groups_kept[v * row_threads + lane], in_groups_row + col);
    commit_copies();
  }
  #pragma unroll 4
  for (int v = 0; v < 10; ++v) {
    wait_copies<9>();
    commit_copies();  // of nothing: so that as many are pending at every turn
    const Vec<__nv_bfloat16, 8> in_groups_vec = in_groups_kept[v * row_threads + lane];
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float in_groups = __bfloat162float(in_groups_vec.at[j]);
      sum_of_in_groups_part += in_groups;
    }
  }
  const float sum_of_in_groups = row_sum(sum_of_in_groups_part, part[0]);
  const float mean = sum_of_in_groups / 40960.0f;

  // pass 2 of 3: sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  #pragma unroll 4
  for (int v = 0; v < 10; ++v) {
    const Vec<__nv_bfloat16, 8> in_groups_vec = in_groups_kept[v * row_threads + lane];
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float in_groups = __bfloat162float(in_groups_vec.at[j]);
      const float in_groups_minus_mean = in_groups - mean;
      const float square = in_groups_minus_mean * in_groups_minus_mean;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[1]);
  const float variance = sum_of_squares / 40960.0f;
  const float variance_plus_eps = variance + 1e-05f;
  const float rstd = rsqrtf(variance_plus_eps);

  // pass 3 of 3: read gamma_part, beta_part; write out
  #pragma unroll 4
  for (int v = 0; v < 10; ++v) {
    const int col = (v * row_threads + lane) * 8;
    const Vec<__nv_bfloat16, 8> gamma_part_vec = load_for_all<8>(gamma_part_row + (col / gamma_part_cols) * gamma_part_stride_elements);
    const Vec<__nv_bfloat16, 8> beta_part_vec = load_for_all<8>(beta_part_row + (col / beta_part_cols) * beta_part_stride_elements);
    const Vec<__nv_bfloat16, 8> in_groups_vec = in_groups_kept[v * row_threads + lane];
    Vec<__nv_bfloat16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float in_groups = __bfloat162float(in_groups_vec.at[j]);
      const float gamma_part = __bfloat162float(gamma_part_vec.at[j]);
      const float beta_part = __bfloat162float(beta_part_vec.at[j]);
      const float in_groups_minus_mean = in_groups - mean;
      const float mul = in_groups_minus_mean * rstd;
      const float mul_from_in_groups = mul * gamma_part;
      const float normalized = mul_from_in_groups + beta_part;
      const float silu = normalized * reciprocal(1.0f + exponential(-normalized));
      out_vec.at[j] = __float2bfloat16_rn(silu);
    }
    store<8>(out_row + col, out_vec);
  }
}
