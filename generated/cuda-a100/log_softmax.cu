// log_softmax  bf16[T, V] -> f32[T, V]  at T=4096 V=32000
// logits - max - log(sum(exp(logits - max))).
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// tile     a block of 1024 threads a row, 8 x 4 elements a thread; logits, shifted in registers
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

// the largest value over the 1024 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v, float* part) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 32];
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
}

// the sum over the 1024 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 32];
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(1024)
log_softmax(
    const __nv_bfloat16* __restrict__ logits_ptr,
    float* __restrict__ out_ptr,
    long long rows,
    long long logits_stride,
    long long out_stride)
{
  const int lane = threadIdx.x;  // of the 1024 threads that share a row
  __shared__ float part[2][32];
  const long long row = blockIdx.x;
  const __nv_bfloat16* const logits_row = logits_ptr + row * logits_stride;
  float* const out_row = out_ptr + row * out_stride;
  Vec<__nv_bfloat16, 4> logits_vec[8];
  float shifted_kept[8][4];

  // walk 1 of 3: read logits; keep logits; top = max(logits)
  float top_part = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * 1024 + lane) * 4;
    if (v < 7 || col < 32000) {
      logits_vec[v] = load<4>(logits_row + col);
    }
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * 1024 + lane) * 4;
    if (v < 7 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float logits = __bfloat162float(logits_vec[v].at[j]);
        top_part = larger(top_part, logits);
      }
    }
  }
  const float top = row_max(top_part, part[0]);
  const bool eq = top == (-INFINITY);
  const float pivot = eq ? 0.0f : top;

  // walk 2 of 3: keep shifted; total = sum(exp_)
  float total_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * 1024 + lane) * 4;
    if (v < 7 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float logits = __bfloat162float(logits_vec[v].at[j]);
        const float shifted = logits - pivot;
        const float exp_ = exponential(shifted);
        shifted_kept[v][j] = shifted;
        total_part += exp_;
      }
    }
  }
  const float total = row_sum(total_part, part[1]);
  const bool eq_2 = total == 0.0f;
  const float log_ = logf(total);
  const float log_total = eq_2 ? 0.0f : log_;

  // walk 3 of 3: write out
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * 1024 + lane) * 4;
    if (v < 7 || col < 32000) {
      Vec<float, 4> out_vec;
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float shifted = shifted_kept[v][j];
        const float log_softmax = shifted - log_total;
        out_vec.at[j] = log_softmax;
      }
      store<4>(out_row + col, out_vec);
    }
  }
}
