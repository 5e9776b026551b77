// scale_softmax  f16[B, H, S, N] -> f16[B, H, S, N]  at B=1 H=32 S=4096 N=4096
// softmax(scores / sqrt(64)) over all keys.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// tile     a block of 128 threads a row, 4 x 8 elements a thread; scores in shared memory
// traffic  2147.5 MB moved, 2147.5 MB ideal, 5368.7 MB unfused in 2 launches
// floor    447.4 us at 4.8 TB/s; memory-bound at 2.25 flop/B
// rounding out to f16 when stored; f32 between
// needs    rows of 4096 elements, next to each other; scores, out: address and strides in multiples of
//          16 B

#include <cuda_fp16.h>

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

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// the largest of the values seen and the sum of exp(value - largest), in one walk: the sum shrinks as the largest grows
struct MaxSum {
  float top;
  float total;

  __device__ __forceinline__ void merge(float other_top, float other_total) {
    const float peak = larger(top, other_top);
    const float pivot = peak == -INFINITY ? 0.0f : peak;  // nothing seen yet: exp(-inf - 0) is 0, not NaN
    total = total * exponential(top - pivot) + other_total * exponential(other_top - pivot);
    top = peak;
  }

  // 8 values at once: one exponential each, and one for the sum so far
  __device__ __forceinline__ void add(const float (&values)[8]) {
    float peak = top;
    #pragma unroll
    for (int j = 0; j < 8; ++j) peak = larger(peak, values[j]);
    const float pivot = peak == -INFINITY ? 0.0f : peak;
    total *= exponential(top - pivot);
    #pragma unroll
    for (int j = 0; j < 8; ++j) total += exponential(values[j] - pivot);
    top = peak;
  }
};

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// the largest value and the sum of exponentials below it over the 128 threads of a row, in every one of them
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
  v.top = part_top[threadIdx.x % 4];
  v.total = part_total[threadIdx.x % 4];
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v.merge(partner(v.top, step), partner(v.total, step));
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(128)
scale_softmax(
    const __half* __restrict__ scores_ptr,
    __half* __restrict__ out_ptr,
    long long rows,
    long long scores_stride,
    long long out_stride)
{
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  __shared__ float part[2][4];
  extern __shared__ __align__(16) unsigned char shared[];
  Vec<__half, 8>* const scores_kept = reinterpret_cast<Vec<__half, 8>*>(shared + 0);
  const long long row = blockIdx.x;
  const __half* const scores_row = scores_ptr + row * scores_stride;
  __half* const out_row = out_ptr + row * out_stride;

  // walk 1 of 2: read scores; keep scores; top = max(mul) and total = sum(exp(mul - top))
  MaxSum total_part = {-INFINITY, 0.0f};
  #pragma unroll 4
  for (int v = 0; v < 4; ++v) {
    const int col = (v * 128 + lane) * 8;
    copy_async<8>(&scores_kept[v * 128 + lane], scores_row + col);
    commit_copies();
  }
  #pragma unroll 4
  for (int v = 0; v < 4; ++v) {
    wait_copies<3>();
    commit_copies();  // of nothing: so that as many are pending at every turn
    const Vec<__half, 8> scores_vec = scores_kept[v * 128 + lane];
    float total_part_values[8];
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float scores = __half2float(scores_vec.at[j]);
      const float mul = scores * 0.125f;
      total_part_values[j] = mul;
    }
    total_part.add(total_part_values);
  }
  const MaxSum total_all = row_max_sum(total_part, part[0], part[1]);
  const float top = total_all.top;
  const float total = total_all.total;
  const bool eq = top == (-INFINITY);
  const float pivot = eq ? 0.0f : top;
  const bool eq_2 = total == 0.0f;
  const float div = 1.0f / total;
  const float scale = eq_2 ? 0.0f : div;

  // walk 2 of 2: write out
  #pragma unroll 4
  for (int v = 0; v < 4; ++v) {
    const int col = (v * 128 + lane) * 8;
    const Vec<__half, 8> scores_vec = scores_kept[v * 128 + lane];
    Vec<__half, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float scores = __half2float(scores_vec.at[j]);
      const float mul = scores * 0.125f;
      const float sub = mul - pivot;
      const float e = exponential(sub);
      const float softmax = e * scale;
      out_vec.at[j] = __float2half_rn(softmax);
    }
    store<8>(out_row + col, out_vec);
  }
}
