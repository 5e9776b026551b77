// top_p_sample_top_p  bf16[M, V], f32[M, 1], f32[M, 1], b8[M, V] -> b8[M, V]  at M=64 V=32000
// top_p of top_p_sample.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// tile     a block of 512 threads a row, 8 x 8 elements a thread; z, e, largest_by_sum_of_softmax in
//          registers
// traffic  8.2 MB moved, 8.2 MB ideal, 65.5 MB unfused in 4 launches
// floor    4.0 us at 2.039 TB/s; instruction-bound at 3.25 flop/B
// needs    rows of 32000 elements, next to each other; logits: address and strides in multiples of 16
//          B; top_k, top_p: address and strides in multiples of 8 B

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

// the largest value over the 512 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v, float* part) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 16];
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
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
top_p_sample_top_p(
    const __nv_bfloat16* __restrict__ logits_ptr,
    const float* __restrict__ temperature_ptr,
    const float* __restrict__ p_ptr,
    const unsigned char* __restrict__ top_k_ptr,
    unsigned char* __restrict__ top_p_ptr,
    long long rows,
    long long logits_stride,
    long long temperature_stride,
    long long p_stride,
    long long top_k_stride,
    long long top_p_stride)
{
  constexpr int row_threads = 512;
  const int lane = threadIdx.x;  // of the 512 threads that share a row
  __shared__ float part[4][16];
  const long long row = blockIdx.x;
  const __nv_bfloat16* const logits_row = logits_ptr + row * logits_stride;
  const float* const temperature_row = temperature_ptr + row * temperature_stride;
  const float* const p_row = p_ptr + row * p_stride;
  const unsigned char* const top_k_row = top_k_ptr + row * top_k_stride;
  unsigned char* const top_p_row = top_p_ptr + row * top_p_stride;
  const float temperature = *temperature_row;
  const float p = *p_row;
  const float abs_ = fabsf(temperature);
  const bool gt = abs_ > 1.8446744e+19f;
  const bool lt = abs_ < 5.421011e-20f;
  const float where = lt ? 1.8446744e+19f : 1.0f;
  const float scale_of_temperature = gt ? 5.421011e-20f : where;
  const float mul_from_temperature = temperature * scale_of_temperature;
  const float reciprocal_of_temperature = 1.0f / mul_from_temperature;
  float z_kept[8][8];
  float e_kept[8][8];
  float largest_by_sum_of_softmax_kept[8][8];

  // pass 1 of 4: read top_k, logits; keep z; top = max(z)
  float top_part = -INFINITY;
  Vec<unsigned char, 8> top_k_vec[8];
  Vec<__nv_bfloat16, 8> logits_vec[8];
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 7 || col < 32000) {
      top_k_vec[v] = load<8>(top_k_row + col);
      logits_vec[v] = load<8>(logits_row + col);
    }
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 7 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const bool top_k = top_k_vec[v].at[j] != 0;
        const float logits = __bfloat162float(logits_vec[v].at[j]);
        const float mul = logits * scale_of_temperature;
        const float mul_from_logits = mul * reciprocal_of_temperature;
        const float z = top_k ? mul_from_logits : (-INFINITY);
        z_kept[v][j] = z;
        top_part = larger(top_part, z);
      }
    }
  }
  const float top = row_max(top_part, part[0]);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // pass 2 of 4: keep e; sum_of_exps = sum(e)
  float sum_of_exps_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 7 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float z = z_kept[v][j];
        const float z_minus_pivot = z - pivot;
        const float e = exponential(z_minus_pivot);
        e_kept[v][j] = e;
        sum_of_exps_part += e;
      }
    }
  }
  const float sum_of_exps = row_sum(sum_of_exps_part, part[1]);
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // pass 3 of 4: largest_by_sum_of_softmax = largest_by_sum(softmax)
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) largest_by_sum_of_softmax_kept[v][j] = 0.0f;
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 7 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float e = e_kept[v][j];
        const float softmax = e * inverse_sum;
        largest_by_sum_of_softmax_kept[v][j] = softmax;
      }
    }
  }
  {  // largest_by_sum_of_softmax
    unsigned bits = 0;  // of the smallest one that is kept
    #pragma unroll 1
    for (int step = 30; step >= 0; --step) {
      const float least = __uint_as_float(bits | 1u << step);
      float reach = 0.0f;  // the sum of what is as large
      #pragma unroll
      for (int v = 0; v < 8; ++v) {
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          reach += largest_by_sum_of_softmax_kept[v][j] >= least ? largest_by_sum_of_softmax_kept[v][j] : 0.0f;
        }
      }
      if (row_sum(reach, step % 2 == 0 ? part[2] : part[3]) >= p) bits |= 1u << step;
    }
    const float least = __uint_as_float(bits);
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        largest_by_sum_of_softmax_kept[v][j] = largest_by_sum_of_softmax_kept[v][j] >= least ? largest_by_sum_of_softmax_kept[v][j] : 0.0f;
      }
    }
  }

  // pass 4 of 4: write top_p
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 7 || col < 32000) {
      Vec<unsigned char, 8> top_p_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float largest_by_sum_of_softmax = largest_by_sum_of_softmax_kept[v][j];
        const bool top_p = largest_by_sum_of_softmax > 0.0f;
        top_p_vec.at[j] = static_cast<unsigned char>(top_p);
      }
      store<8>(top_p_row + col, top_p_vec);
    }
  }
}
