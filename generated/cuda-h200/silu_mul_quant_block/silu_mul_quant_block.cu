// silu_mul_quant_block  bf16[M, N_over_128, 128], bf16[M, N_over_128, 128] -> f8e4m3[M, N_over_128, 128], f32[M, N_over_128, 1]  at M=8192
//   N_over_128=112
// silu(gate) * up as f8e4m3 with a scale for each 128 of a row.
//
//     def silu_mul_quant_block(gate, up):
//         values, scale = F.quantize(F.silu(gate) * up, f8e4m3, per="block", block=128, rule="deepseek")
//         return values, scale
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// views    gate_part is gate as [M, N // 128, 128]; up_part is up as [M, N // 128, 128]
// tile     8 threads a row, 16 rows a block, 2 x 8 elements a thread; silu_times_up_part in registers
// traffic  590.9 MB moved, 590.9 MB ideal, 1765.3 MB unfused in 3 launches
// floor    123.1 us at 4.8 TB/s; memory-bound at 2.80 flop/B
// rounding values to f8e4m3 when stored; f32 between
// needs    rows of 128 elements, next to each other; gate_part, up_part: address and strides in
//          multiples of 16 B; values: address and strides in multiples of 8 B

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

// the largest value over the 8 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v) {
  #pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(128)
silu_mul_quant_block(
    const __nv_bfloat16* __restrict__ gate_part_ptr,
    const __nv_bfloat16* __restrict__ up_part_ptr,
    unsigned char* __restrict__ values_ptr,
    float* __restrict__ scale_ptr,
    long long rows,
    long long gate_part_stride,
    long long up_part_stride,
    long long values_stride,
    long long scale_stride)
{
  constexpr int row_threads = 8;
  constexpr int block_rows = 16;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 8 threads that share a row
  const long long own_row = static_cast<long long>(blockIdx.x) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const __nv_bfloat16* const gate_part_row = gate_part_ptr + row * gate_part_stride;
  const __nv_bfloat16* const up_part_row = up_part_ptr + row * up_part_stride;
  unsigned char* const values_row = values_ptr + row * values_stride;
  float* const scale_row = scale_ptr + row * scale_stride;
  float silu_times_up_part_kept[2][8];

  // pass 1 of 2: read gate_part, up_part; keep silu_times_up_part; max_of_magnitude = max(magnitude)
  float max_of_magnitude_part = -INFINITY;
  Vec<__nv_bfloat16, 8> gate_part_vec[2];
  Vec<__nv_bfloat16, 8> up_part_vec[2];
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 8;
    gate_part_vec[v] = load<8>(gate_part_row + col);
    up_part_vec[v] = load<8>(up_part_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float gate_part = __bfloat162float(gate_part_vec[v].at[j]);
      const float up_part = __bfloat162float(up_part_vec[v].at[j]);
      const float silu = gate_part * reciprocal(1.0f + exponential(-gate_part));
      const float silu_times_up_part = silu * up_part;
      const float magnitude = fabsf(silu_times_up_part);
      silu_times_up_part_kept[v][j] = silu_times_up_part;
      max_of_magnitude_part = larger(max_of_magnitude_part, magnitude);
    }
  }
  const float max_of_magnitude = row_max(max_of_magnitude_part);
  const float largest = larger(max_of_magnitude, 1e-04f);
  const float row_scale = largest / 448.0f;
  const float factor = 1.0f / row_scale;
  if (live && lane == 0) *scale_row = row_scale;

  // pass 2 of 2: write values
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 8;
    float values_wide[8];
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float silu_times_up_part = silu_times_up_part_kept[v][j];
      const float values_ = silu_times_up_part * factor;
      values_wide[j] = values_;
    }
    if (live) store<8>(values_row + col, f8e4m3_of(values_wide));
  }
}
