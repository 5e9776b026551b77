// kv_cache_quant  bf16[T, H, D], bf16[T, H, D], i64[T, 1, 1] -> f8e4m3[V, H, D], f8e4m3[V, H, D], f32[V, H, 1], f32[V, H, 1]  at T=16384
//   H=8 D=128 V=65536
// Each head of a token by its own largest; a slot of -1 is left out.
//
//     def kv_cache_quant(k, v, slots, k_cache, v_cache, k_scales, v_scales):
//         keys, k_scale = F.quantize(k, f8e4m3, per="row")
//         values, v_scale = F.quantize(v, f8e4m3, per="row")
//         new_keys, new_values = F.scatter(k_cache, slots, keys), F.scatter(v_cache, slots, values)
//         return new_keys, new_values, F.scatter(k_scales, slots, k_scale), F.scatter(v_scales, slots, v_scale)
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// writes   rows of new_keys, new_values, out2, out3 at slots; nothing where there is none
// tile     8 threads a row, 16 rows a block, 2 x 8 elements a thread; k, v_value in registers, as read
// traffic  101.8 MB moved, 101.8 MB ideal, 304.6 MB unfused in 6 launches
// floor    21.2 us at 4.8 TB/s; memory-bound at 1.01 flop/B
// rounding new_keys to f8e4m3 when stored; new_values to f8e4m3 when stored; f32 between
// needs    rows of 128 elements, next to each other; k, v_value: address and strides in multiples of 16
//          B; new_keys, new_values: address and strides in multiples of 8 B

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

// x, or the nearest int of what is beyond them
__device__ __forceinline__ int nearest_int(long long x) {
  constexpr long long least = -2147483648LL, most = 2147483647LL;
  return static_cast<int>(x < least ? least : x > most ? most : x);
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
kv_cache_quant(
    const __nv_bfloat16* __restrict__ k_ptr,
    const __nv_bfloat16* __restrict__ v_value_ptr,
    const long long* __restrict__ slots_ptr,
    unsigned char* __restrict__ new_keys_ptr,
    unsigned char* __restrict__ new_values_ptr,
    float* __restrict__ out2_ptr,
    float* __restrict__ out3_ptr,
    long long T_size,
    long long H_size,
    long long k_stride_T,
    long long k_stride_H,
    long long v_value_stride_T,
    long long v_value_stride_H,
    long long slots_stride_T,
    long long new_keys_count,
    long long new_keys_stride,
    long long new_keys_stride_H,
    long long new_values_count,
    long long new_values_stride,
    long long new_values_stride_H,
    long long out2_count,
    long long out2_stride,
    long long out2_stride_H,
    long long out3_count,
    long long out3_stride,
    long long out3_stride_H)
{
  constexpr int row_threads = 8;
  constexpr int block_rows = 16;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 8 threads that share a row
  const long long rows = T_size * H_size;
  const long long own_row = static_cast<long long>(blockIdx.x) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned T_at = static_cast<unsigned>(row) / static_cast<unsigned>(H_size);
  const unsigned H_at = static_cast<unsigned>(row) % static_cast<unsigned>(H_size);
  const __nv_bfloat16* const k_row = k_ptr + T_at * k_stride_T + H_at * k_stride_H;
  const __nv_bfloat16* const v_value_row = v_value_ptr + T_at * v_value_stride_T + H_at * v_value_stride_H;
  const long long* const slots_row = slots_ptr + T_at * slots_stride_T;
  const int slots = nearest_int(*slots_row);
  const bool new_keys_found = slots >= 0 && slots < new_keys_count;  // else nothing of it is written
  unsigned char* const new_keys_row = new_keys_ptr + (new_keys_found ? slots : 0) * new_keys_stride + H_at * new_keys_stride_H;
  const bool new_values_found = slots >= 0 && slots < new_values_count;  // else nothing of it is written
  unsigned char* const new_values_row = new_values_ptr + (new_values_found ? slots : 0) * new_values_stride + H_at * new_values_stride_H;
  const bool out2_found = slots >= 0 && slots < out2_count;  // else nothing of it is written
  float* const out2_row = out2_ptr + (out2_found ? slots : 0) * out2_stride + H_at * out2_stride_H;
  const bool out3_found = slots >= 0 && slots < out3_count;  // else nothing of it is written
  float* const out3_row = out3_ptr + (out3_found ? slots : 0) * out3_stride + H_at * out3_stride_H;
  Vec<__nv_bfloat16, 8> k_vec[2];
  Vec<__nv_bfloat16, 8> v_value_vec[2];

  // pass 1 of 2: read k, v_value; keep k, v_value; max_of_magnitude = max(magnitude); maximum =
  //   max(magnitude_of_v_scale)
  float max_of_magnitude_part = -INFINITY;
  float maximum_part = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 8;
    k_vec[v] = load<8>(k_row + col);
    v_value_vec[v] = load<8>(v_value_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float k = __bfloat162float(k_vec[v].at[j]);
      const float v_value = __bfloat162float(v_value_vec[v].at[j]);
      const float magnitude = fabsf(k);
      const float magnitude_of_v_scale = fabsf(v_value);
      max_of_magnitude_part = larger(max_of_magnitude_part, magnitude);
      maximum_part = larger(maximum_part, magnitude_of_v_scale);
    }
  }
  const float max_of_magnitude = row_max(max_of_magnitude_part);
  const float maximum = row_max(maximum_part);
  const float largest = larger(max_of_magnitude, 1e-12f);
  const float k_scale = largest / 448.0f;
  const float factor = 1.0f / k_scale;
  const float largest_of_v_scale = larger(maximum, 1e-12f);
  const float v_scale = largest_of_v_scale / 448.0f;
  const float factor_of_v_scale = 1.0f / v_scale;
  if (live && lane == 0 && out2_found) *out2_row = k_scale;
  if (live && lane == 0 && out3_found) *out3_row = v_scale;

  // pass 2 of 2: write new_keys, new_values
  #pragma unroll
  for (int v = 0; v < 2; ++v) leave_packed(k_vec[v]);
  #pragma unroll
  for (int v = 0; v < 2; ++v) leave_packed(v_value_vec[v]);
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 8;
    float new_keys_wide[8];
    float new_values_wide[8];
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float k = __bfloat162float(k_vec[v].at[j]);
      const float v_value = __bfloat162float(v_value_vec[v].at[j]);
      const float k_times_factor = k * factor;
      const float mul = v_value * factor_of_v_scale;
      new_keys_wide[j] = k_times_factor;
      new_values_wide[j] = mul;
    }
    if (live && new_keys_found) store<8>(new_keys_row + col, f8e4m3_of(new_keys_wide));
    if (live && new_values_found) store<8>(new_values_row + col, f8e4m3_of(new_values_wide));
  }
}
