// top_p_sample_top_k  bf16[M, V], f32[M, 1], i32[M, 1] -> b8[M, V]  at M=64 V=32000
// top_k of top_p_sample.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// tile     a block of 512 threads a row, 8 x 8 elements a thread; largest_by_count in registers
// traffic  6.1 MB moved, 6.1 MB ideal, 22.5 MB unfused in 2 launches
// floor    3.0 us at 2.039 TB/s; instruction-bound at 1.33 flop/B
// needs    rows of 32000 elements, next to each other; logits: address and strides in multiples of 16
//          B; top_k: address and strides in multiples of 8 B

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

// the number whose place among all numbers is x; NaN of what is below and above all of them
__device__ __forceinline__ float number_in_order(unsigned x) {
  return __uint_as_float(x >> 31 ? x ^ 0x80000000u : ~x);
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
top_p_sample_top_k(
    const __nv_bfloat16* __restrict__ logits_ptr,
    const float* __restrict__ temperature_ptr,
    const int* __restrict__ k_ptr,
    unsigned char* __restrict__ top_k_ptr,
    long long rows,
    long long logits_stride,
    long long temperature_stride,
    long long k_stride,
    long long top_k_stride)
{
  constexpr int row_threads = 512;
  const int lane = threadIdx.x;  // of the 512 threads that share a row
  __shared__ float part[2][16];
  const long long row = blockIdx.x;
  const __nv_bfloat16* const logits_row = logits_ptr + row * logits_stride;
  const float* const temperature_row = temperature_ptr + row * temperature_stride;
  const int* const k_row = k_ptr + row * k_stride;
  unsigned char* const top_k_row = top_k_ptr + row * top_k_stride;
  const float temperature = *temperature_row;
  const int k = *k_row;
  const float abs_ = fabsf(temperature);
  const bool gt = abs_ > 1.8446744e+19f;
  const bool lt = abs_ < 5.421011e-20f;
  const float where = lt ? 1.8446744e+19f : 1.0f;
  const float scale_of_temperature = gt ? 5.421011e-20f : where;
  const float mul_from_temperature = temperature * scale_of_temperature;
  const float reciprocal_of_temperature = 1.0f / mul_from_temperature;
  const float to_f32 = static_cast<float>(k);
  float largest_by_count_kept[8][8];

  // pass 1 of 2: read logits; largest_by_count = largest_by_count(mul_from_logits)
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) largest_by_count_kept[v][j] = (-INFINITY);
  }
  Vec<__nv_bfloat16, 8> logits_vec[8];
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 7 || col < 32000) {
      logits_vec[v] = load<8>(logits_row + col);
    }
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 7 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float logits = __bfloat162float(logits_vec[v].at[j]);
        const float mul = logits * scale_of_temperature;
        const float mul_from_logits = mul * reciprocal_of_temperature;
        largest_by_count_kept[v][j] = mul_from_logits;
      }
    }
  }
  {  // largest_by_count
    unsigned bits = 0;  // in the order of numbers, of the smallest one that is kept
    #pragma unroll 1
    for (int step = 31; step >= 0; --step) {
      const float least = number_in_order(bits | 1u << step);
      float reach = 0.0f;  // the count of what is as large
      #pragma unroll
      for (int v = 0; v < 8; ++v) {
        #pragma unroll
        for (int j = 0; j < 8; ++j) reach += largest_by_count_kept[v][j] >= least ? 1.0f : 0.0f;
      }
      if (row_sum(reach, step % 2 == 0 ? part[0] : part[1]) >= to_f32) bits |= 1u << step;
    }
    const float least = bits == 0u ? -INFINITY : number_in_order(bits);
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        largest_by_count_kept[v][j] = largest_by_count_kept[v][j] >= least ? largest_by_count_kept[v][j] : -INFINITY;
      }
    }
  }

  // pass 2 of 2: write top_k
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 7 || col < 32000) {
      Vec<unsigned char, 8> top_k_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float largest_by_count = largest_by_count_kept[v][j];
        const bool top_k = largest_by_count > (-INFINITY);
        top_k_vec.at[j] = static_cast<unsigned char>(top_k);
      }
      store<8>(top_k_row + col, top_k_vec);
    }
  }
}
