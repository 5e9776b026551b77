// log_softmax  bf16[T, V] -> f32[T, V]  at T=4096 V=32000
// logits - max - log(sum(exp(logits - max))).
//
//     def log_softmax(logits):
//         return F.log_softmax(logits)
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// tile     a block of 512 threads a row, 16 x 4 elements a thread; logits in shared memory
// traffic  786.4 MB moved, 786.4 MB ideal, 1048.6 MB unfused in 1 launch
// floor    385.7 us at 2.039 TB/s; memory-bound at 1.33 flop/B
// needs    rows of 32000 elements, next to each other; logits: address and strides in multiples of 8 B;
//          out: address and strides in multiples of 16 B

#include <cuda_bf16.h>

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// N values that move together, 16 bytes at a time where they fill them
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
};

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

// log2(x) of no subnormal x: within 2^-22 from 1/2 to 2, within 2 ulp elsewhere
__device__ __forceinline__ float log_2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// ln x, within 3 ulp
__device__ __forceinline__ float natural_log(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float t = tiny ? 16777216.0f * x : x;
  float y = log_2(t);
  if (tiny) y -= 24.0f;
  const float w = y * y;
  const float near = (t - 1.0f) * fmaf(-0.34657359f, y, fmaf(fmaf(-0.000316441874f, w, 0.040036682f), w, 1.0f));
  return fabsf(y) < 0.9f ? near : 0.693147181f * y;
}

// the largest of the values seen and the sum of exp(value - largest), in one pass: the sum shrinks as the largest grows
struct MaxSum {
  float top;
  float total;

  __device__ __forceinline__ void merge(float other_top, float other_total) {
    const float peak = larger(top, other_top);
    const float pivot = peak == -INFINITY ? 0.0f : peak;  // nothing seen yet: exp(-inf - 0) is 0, not NaN
    total = total * exponential(top - pivot) + other_total * exponential(other_top - pivot);
    top = peak;
  }

  // 4 values at once: one exponential each, and one for the sum so far
  __device__ __forceinline__ void add(const float (&values)[4]) {
    float peak = top;
    #pragma unroll
    for (int j = 0; j < 4; ++j) peak = larger(peak, values[j]);
    const float pivot = peak == -INFINITY ? 0.0f : peak;
    total *= exponential(top - pivot);
    #pragma unroll
    for (int j = 0; j < 4; ++j) total += exponential(values[j] - pivot);
    top = peak;
  }
};

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// the largest value and the sum of exponentials below it over the 512 threads of a row, in every one of them
__device__ __forceinline__ MaxSum row_max_sum(MaxSum v, float* part_top, float* part_total) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v.merge(partner(v.top, step), partner(v.total, step));
  }
  if (threadIdx.x % 32 == 0) {
    part_top[threadIdx.x / 32] = v.top;
    part_total[threadIdx.x / 32] = v.total;
  }
  __syncthreads();
  v.top = part_top[threadIdx.x % 16];
  v.total = part_total[threadIdx.x % 16];
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v.merge(partner(v.top, step), partner(v.total, step));
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(512)
log_softmax(
    const __nv_bfloat16* __restrict__ logits_ptr,
    float* __restrict__ out_ptr,
    long long rows,
    long long logits_stride,
    long long out_stride)
{
  constexpr int row_threads = 512;
  const int lane = threadIdx.x;  // of the 512 threads that share a row
  __shared__ float part[2][16];
  extern __shared__ __align__(16) unsigned char shared[];
  Vec<__nv_bfloat16, 4>* const logits_kept = reinterpret_cast<Vec<__nv_bfloat16, 4>*>(shared);
  const long long row = blockIdx.x;
  const __nv_bfloat16* const logits_row = logits_ptr + row * logits_stride;
  float* const out_row = out_ptr + row * out_stride;

  // pass 1 of 2: read logits; keep logits; top = max(logits) and sum_of_exps = sum(exp(logits - top))
  MaxSum sum_of_exps_part = {-INFINITY, 0.0f};
  #pragma unroll 4
  for (int v = 0; v < 16; ++v) {
    const int col = (v * row_threads + lane) * 4;
    if (col < 32000) {
      copy_async<4>(&logits_kept[v * row_threads + lane], logits_row + col);
    }
    commit_copies();
  }
  #pragma unroll 4
  for (int v = 0; v < 16; ++v) {
    wait_copies<15>();
    commit_copies();  // of nothing: so that as many are pending at every turn
    const int col = (v * row_threads + lane) * 4;
    if (col < 32000) {
      const Vec<__nv_bfloat16, 4> logits_vec = logits_kept[v * row_threads + lane];
      float sum_of_exps_part_values[4];
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float logits = __bfloat162float(logits_vec.at[j]);
        sum_of_exps_part_values[j] = logits;
      }
      sum_of_exps_part.add(sum_of_exps_part_values);
    }
  }
  const MaxSum sum_of_exps_all = row_max_sum(sum_of_exps_part, part[0], part[1]);
  const float top = sum_of_exps_all.top;
  const float sum_of_exps = sum_of_exps_all.total;
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float log_ = natural_log(sum_of_exps);
  const float log_sum = sum_of_exps_is_0 ? 0.0f : log_;

  // pass 2 of 2: write out
  #pragma unroll 4
  for (int v = 0; v < 16; ++v) {
    const int col = (v * row_threads + lane) * 4;
    if (col < 32000) {
      const Vec<__nv_bfloat16, 4> logits_vec = logits_kept[v * row_threads + lane];
      Vec<float, 4> out_vec;
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float logits = __bfloat162float(logits_vec.at[j]);
        const float shifted = logits - pivot;
        const float log_softmax = shifted - log_sum;
        out_vec.at[j] = log_softmax;
      }
      store<4>(out_row + col, out_vec);
    }
  }
}
