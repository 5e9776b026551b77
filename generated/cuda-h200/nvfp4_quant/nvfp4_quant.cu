// nvfp4_quant  bf16[M, N_over_16, 8], bf16[M, N_over_16, 8], f32[1] -> f8e4m3[M, N_over_16, 1], u8[M, N_over_16, 8]  at M=16384
//   N_over_16=256
// x as f4e2m1 with a scale of f8e4m3 for each 16 of a row; x is near values * (scale * whole).
//
//     def nvfp4_quant(x, whole):
//         values, scale = F.quantize(x, f4e2m1, whole, rule="nvfp4")
//         return values, scale
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// views    x_even is x as [M, N // 16, 8]; x_odd is x as [M, N // 16, 8]
// tile     1 thread a row, 128 rows a block, 2 x 4 elements a thread; x_even, x_odd in registers, as
//          read
// traffic  172.0 MB moved, 172.0 MB ideal, 843.1 MB unfused in 2 launches
// floor    35.8 us at 4.8 TB/s; memory-bound at 3.07 flop/B
// rounding scale to f8e4m3 by an explicit cast; scale to f8e4m3 when stored; out0 to u8 when stored;
//          f32 between
// needs    rows of 8 elements, next to each other; x_even, x_odd: address and strides in multiples of
//          16 B; out0: address and strides in multiples of 4 B; x_even, x_odd: by turns the elements of
//          one array, in the vectors of x_even

#include <cuda_bf16.h>

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// N values that move together, 16 bytes at a time where they fill them
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
};

// x, of which the compiler knows nothing: where it knows a row's number to be a quotient and a rest, NVRTC writes the first
// vector of each thread value by value
__device__ __forceinline__ long long unknown(long long x) {
  asm("" : "+l"(x));
  return x;
}

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

// The vector stays as it was read: what the compiler has made of it would take more registers, and is made again.
template <typename T, int N>
__device__ __forceinline__ void leave_packed(Vec<T, N>& v) {
  unsigned words[sizeof(v) / 4];
  memcpy(words, &v, sizeof(v));
  #pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(v) / 4); ++i) asm volatile("" : "+r"(words[i]));
  memcpy(&v, words, sizeof(v));
}

// the larger of two; NaN wins
__device__ __forceinline__ float larger(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// the smaller of two; NaN wins
__device__ __forceinline__ float smaller(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// the nearest f8e4m3, of two the even one, at most 448 in magnitude; NaN stays NaN
__device__ __forceinline__ unsigned char to_f8e4m3(float x) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(x));
  return static_cast<unsigned char>(codes);
}

// the number that an f8e4m3 is
__device__ __forceinline__ float f8e4m3_value(unsigned char x) {
  unsigned halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(x)));
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(static_cast<unsigned short>(halves)));
  return y;
}

// x rounded to f8e4m3, of two to the even one, at most 448 in magnitude
__device__ __forceinline__ float round_f8e4m3(float x) {
  return f8e4m3_value(to_f8e4m3(x));
}

// the nibble of the nearest f4e2m1, of two the even one, at most 6 in magnitude; 7 of NaN
__device__ __forceinline__ int to_f4e2m1(float x) {
  if (x != x) return 7;
  const unsigned sign = __float_as_uint(x) >> 28 & 8u;
  const float size = fminf(fabsf(x), 6.0f);
  const unsigned bits = __float_as_uint(size);
  const unsigned small = __float_as_uint(size + 4194304.0f) - __float_as_uint(4194304.0f);  // halves
  const unsigned even = bits + 0x1fffffu + (bits >> 22 & 1u);
  constexpr unsigned bias = 2 * 126;  // exponents of f32 are so much larger; a bit of the mantissa is below
  return static_cast<int>(sign | (size < 1.0f ? small : (even >> 22) - bias));
}

extern "C" __global__ void __launch_bounds__(128)
nvfp4_quant(
    const __nv_bfloat16* __restrict__ x_even_ptr,
    const __nv_bfloat16* __restrict__ x_odd_ptr,
    const float* __restrict__ whole_ptr,
    unsigned char* __restrict__ scale_ptr,
    unsigned char* __restrict__ out0_ptr,
    long long M_size,
    long long N_over_16_size,
    long long x_even_stride_M,
    long long x_even_stride_N_over_16,
    long long scale_stride_M,
    long long scale_stride_N_over_16,
    long long out0_stride_M,
    long long out0_stride_N_over_16)
{
  constexpr int block_rows = 128;  // that a block takes
  const long long rows = M_size * N_over_16_size;
  const long long own_row = static_cast<long long>(blockIdx.x) * block_rows + threadIdx.x;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned M_at = static_cast<unsigned>(row) / static_cast<unsigned>(N_over_16_size);
  const unsigned N_over_16_at = static_cast<unsigned>(row) % static_cast<unsigned>(N_over_16_size);
  const __nv_bfloat16* const x_even_row = x_even_ptr + M_at * x_even_stride_M + N_over_16_at * x_even_stride_N_over_16;
  unsigned char* const scale_row = scale_ptr + unknown(M_at * scale_stride_M + N_over_16_at * scale_stride_N_over_16);
  unsigned char* const out0_row = out0_ptr + unknown(M_at * out0_stride_M + N_over_16_at * out0_stride_N_over_16);
  const float whole = *whole_ptr;
  const float up = 1.0f / whole;
  const float mul = up * 0.16666667f;
  Vec<__nv_bfloat16, 8> x_even_vec[2];

  // pass 1 of 2: read x_even, x_odd; keep x_even, x_odd; max_of_magnitude = max(magnitude)
  float max_of_magnitude_part = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = v * 4;
    x_even_vec[v] = load<8>(x_even_row + col * 2);
  }
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x_even = __bfloat162float(x_even_vec[v].at[2 * j]);
      const float x_odd = __bfloat162float(x_even_vec[v].at[2 * j + 1]);
      const float abs_ = fabsf(x_even);
      const float abs_of_factor = fabsf(x_odd);
      const float magnitude = larger(abs_, abs_of_factor);
      max_of_magnitude_part = larger(max_of_magnitude_part, magnitude);
    }
  }
  const float max_of_magnitude = max_of_magnitude_part;
  const float max_of_magnitude_times_mul = max_of_magnitude * mul;
  const float minimum = smaller(max_of_magnitude_times_mul, 3.4028235e+38f);
  const float scale = round_f8e4m3(minimum);
  const float scale_times_whole = scale * whole;
  const float quotient = 1.0f / scale_times_whole;
  const float factor = smaller(quotient, 3.4028235e+38f);
  if (live) *scale_row = to_f8e4m3(minimum);

  // pass 2 of 2: write out0
  #pragma unroll
  for (int v = 0; v < 2; ++v) leave_packed(x_even_vec[v]);
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = v * 4;
    Vec<unsigned char, 4> out0_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x_even = __bfloat162float(x_even_vec[v].at[2 * j]);
      const float x_odd = __bfloat162float(x_even_vec[v].at[2 * j + 1]);
      const float x_even_times_factor = x_even * factor;
      const float x_odd_times_factor = x_odd * factor;
      const int code_of_f4e2m1 = to_f4e2m1(x_even_times_factor);
      const int bit_and = code_of_f4e2m1 & 15;
      const int code_of_f4e2m1_from_x_odd = to_f4e2m1(x_odd_times_factor);
      const int bit_and_from_x_odd = code_of_f4e2m1_from_x_odd & 15;
      const int shift_left = static_cast<int>(static_cast<unsigned>(bit_and_from_x_odd) << 4);
      const int bit_or = bit_and | shift_left;
      out0_vec.at[j] = static_cast<unsigned char>(min(max(bit_or, 0), 255));
    }
    if (live) store<4>(out0_row + col, out0_vec);
  }
}
