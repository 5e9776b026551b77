// rmsnorm_quant_block  bf16[M, N], bf16[N] -> f8e4m3[M, N], f32[M, N_over_128]  at M=16384 N=4096 N_over_128=32
// rmsnorm(x) * gain as f8e4m3 with a scale for each 128 of a row.
//
//     def rmsnorm_quant_block(x, gain):
//         y = F.rmsnorm(x, gain, eps=1e-6)
//         values, scale = F.quantize(y, f8e4m3, per="block", block=128, rule="deepseek")
//         return values, scale
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// tile     a block of 128 threads a row, 4 x 8 elements a thread; x in shared memory
// traffic  203.4 MB moved, 203.4 MB ideal, 740.3 MB unfused in 2 launches
// floor    42.4 us at 4.8 TB/s; memory-bound at 2.33 flop/B
// rounding values to f8e4m3 when stored; f32 between
// needs    rows of 4096 elements, next to each other; x, gain: address and strides in multiples of 16
//          B; values: address and strides in multiples of 8 B; gain [N] shared by every row

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

// the largest value over the 16 neighbouring threads that have a group of the row, in every one of them
__device__ __forceinline__ float group_max(float v) {
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v = larger(v, __shfl_xor_sync(0xffffffffu, v, step));
  }
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

extern "C" __global__ void __launch_bounds__(128)
rmsnorm_quant_block(
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ gain_ptr,
    unsigned char* __restrict__ values_ptr,
    float* __restrict__ scale_ptr,
    long long rows,
    long long x_stride,
    long long values_stride,
    long long scale_stride)
{
  constexpr int row_threads = 128;
  constexpr int scale_cols = 128;  // of a value
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  __shared__ float part[1][4];
  extern __shared__ __align__(16) unsigned char shared[];
  Vec<__nv_bfloat16, 8>* const x_kept = reinterpret_cast<Vec<__nv_bfloat16, 8>*>(shared);
  const long long row = blockIdx.x;
  const __nv_bfloat16* const x_row = x_ptr + row * x_stride;
  unsigned char* const values_row = values_ptr + row * values_stride;
  float* const scale_row = scale_ptr + row * scale_stride;

  // pass 1 of 2: read x; keep x; sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  #pragma unroll 4
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    copy_async<8>(&x_kept[v * row_threads + lane], x_row + col);
    commit_copies();
  }
  #pragma unroll 4
  for (int v = 0; v < 4; ++v) {
    wait_copies<3>();
    commit_copies();  // of nothing: so that as many are pending at every turn
    const Vec<__nv_bfloat16, 8> x_vec = x_kept[v * row_threads + lane];
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = __bfloat162float(x_vec.at[j]);
      const float square = x * x;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[0]);
  const float mean = sum_of_squares / 4096.0f;
  const float mean_plus_eps = mean + 1e-06f;
  const float rrms = rsqrtf(mean_plus_eps);

  // pass 2 of 2: read gain; max_of_magnitude = max(magnitude) of each 128; write values, scale
  #pragma unroll 4
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    const Vec<__nv_bfloat16, 8> gain_vec = load<8>(gain_ptr + col);
    const Vec<__nv_bfloat16, 8> x_vec = x_kept[v * row_threads + lane];
    float values_wide[8];
    float y_here[8];
    float max_of_magnitude_part = -INFINITY;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = __bfloat162float(x_vec.at[j]);
      const float gain = __bfloat162float(gain_vec.at[j]);
      const float normalized = x * rrms;
      const float y = normalized * gain;
      const float magnitude = fabsf(y);
      y_here[j] = y;
      max_of_magnitude_part = larger(max_of_magnitude_part, magnitude);
    }
    const float max_of_magnitude = group_max(max_of_magnitude_part);
    const float largest = larger(max_of_magnitude, 1e-04f);
    const float scale = largest / 448.0f;
    const float factor = 1.0f / scale;
    if (lane % 16 == 0) scale_row[col / scale_cols] = scale;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float y = y_here[j];
      const float mul = y * factor;
      values_wide[j] = mul;
    }
    store<8>(values_row + col, f8e4m3_of(values_wide));
  }
}
