// fp8_norm_swiglu_quant_row_scale  bf16[M, K], bf16[K] -> f32[M, 1], f8e4m3[M, K]  at M=4096 K=4096
// row_scale, normed of fp8_norm_swiglu_quant.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// tile     a block of 128 threads a row, 4 x 8 elements a thread; x, rmsnorm in registers
// traffic  50.4 MB moved, 50.4 MB ideal, 184.6 MB unfused in 2 launches
// floor    10.5 us at 4.8 TB/s; memory-bound at 2.33 flop/B
// rounding normed to f8e4m3 when stored; f32 between
// needs    rows of 4096 elements, next to each other; x, gamma: address and strides in multiples of 16
//          B; normed: address and strides in multiples of 8 B; gamma [K] shared by every row
// launch   lets the next one begin once all its blocks run

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

// two numbers as codes of f8e4m3, the low one in the lower byte
__device__ __forceinline__ unsigned short pair_of_f8e4m3(float low, float high) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

// numbers as f8e4m3, two at a time: to the nearest, of two to the even one, at most the largest; NaN stays NaN
template <int N>
__device__ __forceinline__ Vec<unsigned char, N> f8e4m3_of(const float (&x)[N]) {
  unsigned short pairs[N / 2];
  #pragma unroll
  for (int i = 0; i < N / 2; ++i) pairs[i] = pair_of_f8e4m3(x[2 * i], x[2 * i + 1]);
  Vec<unsigned char, N> v;
  memcpy(&v, pairs, sizeof(v));
  return v;
}

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// the sum over the 128 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 4];
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

// the largest value over the 128 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v, float* part) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 4];
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(128)
fp8_norm_swiglu_quant_row_scale(
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ gamma_ptr,
    float* __restrict__ row_scale_ptr,
    unsigned char* __restrict__ normed_ptr,
    long long rows,
    long long x_stride,
    long long row_scale_stride,
    long long normed_stride)
{
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin, once all blocks of this one run
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  __shared__ float part[2][4];
  const long long row = blockIdx.x;
  const __nv_bfloat16* const x_row = x_ptr + row * x_stride;
  float* const row_scale_row = row_scale_ptr + row * row_scale_stride;
  unsigned char* const normed_row = normed_ptr + row * normed_stride;
  Vec<__nv_bfloat16, 8> x_vec[4];
  float rmsnorm_kept[4][8];

  // pass 1 of 3: read x; keep x; sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    x_vec[v] = load<8>(x_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = __bfloat162float(x_vec[v].at[j]);
      const float square = x * x;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[0]);
  const float mean = sum_of_squares / 4096.0f;
  const float mean_plus_eps = mean + 1e-06f;
  const float rrms = rsqrtf(mean_plus_eps);

  // pass 2 of 3: read gamma; keep rmsnorm; max_of_magnitude = max(magnitude)
  float max_of_magnitude_part = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    const Vec<__nv_bfloat16, 8> gamma_vec = load<8>(gamma_ptr + col);
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = __bfloat162float(x_vec[v].at[j]);
      const float gamma = __bfloat162float(gamma_vec.at[j]);
      const float normalized = x * rrms;
      const float rmsnorm = normalized * gamma;
      const float magnitude = fabsf(rmsnorm);
      rmsnorm_kept[v][j] = rmsnorm;
      max_of_magnitude_part = larger(max_of_magnitude_part, magnitude);
    }
  }
  const float max_of_magnitude = row_max(max_of_magnitude_part, part[1]);
  const float largest = larger(max_of_magnitude, 1e-12f);
  const float row_scale = largest / 448.0f;
  const float factor = 1.0f / row_scale;
  if (lane == 0) *row_scale_row = row_scale;

  // pass 3 of 3: write normed
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    float normed_wide[8];
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float rmsnorm = rmsnorm_kept[v][j];
      const float mul = rmsnorm * factor;
      normed_wide[j] = mul;
    }
    store<8>(normed_row + col, f8e4m3_of(normed_wide));
  }
}
