// add_rmsnorm_quant_row  bf16[M, N], bf16[M, N], bf16[N] -> bf16[M, N], f8e4m3[M, N], f32[M, 1]  at M=16384 N=4096
// h = x + residual, and rmsnorm(h) * gain as f8e4m3 with a scale for each row.
//
//     def add_rmsnorm_quant_row(x, residual, gain):
//         h = x + residual
//         y = F.rmsnorm(h, gain, eps=1e-6)
//         values, scale = F.quantize(y, f8e4m3)
//         return h, values, scale
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// tile     a block of 128 threads a row, 4 x 8 elements a thread; h, y in registers
// traffic  469.8 MB moved, 469.8 MB ideal, 1140.9 MB unfused in 3 launches
// floor    97.9 us at 4.8 TB/s; memory-bound at 1.14 flop/B
// rounding h to bf16 when stored; values to f8e4m3 when stored; f32 between
// needs    rows of 4096 elements, next to each other; x, residual, gain, h: address and strides in
//          multiples of 16 B; values: address and strides in multiples of 8 B; gain [N] shared by every
//          row

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
add_rmsnorm_quant_row(
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ residual_ptr,
    const __nv_bfloat16* __restrict__ gain_ptr,
    __nv_bfloat16* __restrict__ h_ptr,
    unsigned char* __restrict__ values_ptr,
    float* __restrict__ scale_ptr,
    long long rows,
    long long x_stride,
    long long residual_stride,
    long long h_stride,
    long long values_stride,
    long long scale_stride)
{
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  __shared__ float part[2][4];
  const long long row = blockIdx.x;
  const __nv_bfloat16* const x_row = x_ptr + row * x_stride;
  const __nv_bfloat16* const residual_row = residual_ptr + row * residual_stride;
  __nv_bfloat16* const h_row = h_ptr + row * h_stride;
  unsigned char* const values_row = values_ptr + row * values_stride;
  float* const scale_row = scale_ptr + row * scale_stride;
  float h_kept[4][8];
  float y_kept[4][8];

  // pass 1 of 3: read x, residual; keep h; sum_of_squares = sum(square); write h
  float sum_of_squares_part = 0.0f;
  Vec<__nv_bfloat16, 8> x_vec[4];
  Vec<__nv_bfloat16, 8> residual_vec[4];
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    x_vec[v] = load<8>(x_row + col);
    residual_vec[v] = load<8>(residual_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    Vec<__nv_bfloat16, 8> h_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = __bfloat162float(x_vec[v].at[j]);
      const float residual = __bfloat162float(residual_vec[v].at[j]);
      const float h = x + residual;
      const float square = h * h;
      h_kept[v][j] = h;
      sum_of_squares_part += square;
      h_vec.at[j] = __float2bfloat16_rn(h);
    }
    store<8>(h_row + col, h_vec);
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[0]);
  const float mean = sum_of_squares / 4096.0f;
  const float mean_plus_eps = mean + 1e-06f;
  const float rrms = rsqrtf(mean_plus_eps);

  // pass 2 of 3: read gain; keep y; max_of_magnitude = max(magnitude)
  float max_of_magnitude_part = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    const Vec<__nv_bfloat16, 8> gain_vec = load<8>(gain_ptr + col);
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float gain = __bfloat162float(gain_vec.at[j]);
      const float h = h_kept[v][j];
      const float normalized = h * rrms;
      const float y = normalized * gain;
      const float magnitude = fabsf(y);
      y_kept[v][j] = y;
      max_of_magnitude_part = larger(max_of_magnitude_part, magnitude);
    }
  }
  const float max_of_magnitude = row_max(max_of_magnitude_part, part[1]);
  const float largest = larger(max_of_magnitude, 1e-12f);
  const float scale = largest / 448.0f;
  const float factor = 1.0f / scale;
  if (lane == 0) *scale_row = scale;

  // pass 3 of 3: write values
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    float values_wide[8];
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float y = y_kept[v][j];
      const float mul = y * factor;
      values_wide[j] = mul;
    }
    store<8>(values_row + col, f8e4m3_of(values_wide));
  }
}
