// top_p_sample_out  bf16[M, V], f32[M, 1], i32[1], i32[1], b8[M, V], b8[M, V] -> i64[M, 1]  at M=64 V=32000
// out of top_p_sample.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// tile     a block of 1024 threads a row, 4 x 8 elements a thread; drawn in shared memory
// traffic  8.2 MB moved, 8.2 MB ideal, 167.9 MB unfused in 12 launches
// floor    4.0 us at 2.039 TB/s; instruction-bound at 5.00 flop/B
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

// the larger of two; NaN wins
__device__ __forceinline__ float larger(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// log2(x) of no subnormal x: within 2^-22 from 1/2 to 2, within 2 ulp elsewhere
__device__ __forceinline__ float log_2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ln x of no subnormal x, within 3 ulp
__device__ __forceinline__ float log_of_normal(float x) {
  const float y = log_2(x);
  const float w = y * y;
  const float near = (x - 1.0f) * fmaf(-0.34657359f, y, fmaf(fmaf(-0.000316441874f, w, 0.040036682f), w, 1.0f));
  return fabsf(y) < 0.9f ? near : 0.693147181f * y;
}

// ln x, within 3 ulp
__device__ __forceinline__ float natural_log(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float t = tiny ? 16777216.0f * x : x;
  float y = log_2(t);
  if (tiny) y -= 24.0f;
  const float w = y * y;
  const float near = (t - 1.0f) * fmaf(-0.34657359f, y, fmaf(fmaf(-0.000316441874f, w, 0.040036682f), w, 1.0f));
  return fabsf(y) < 0.9f ? near : 0.693147181f * y;
}

// 32 random bits: word index mod 4 of Philox4x32-10 of the counter (index / 4, offset, 0) and the key (seed, 0)
__device__ __forceinline__ int philox(int low, int high, int offset, int seed) {
  const unsigned place = static_cast<unsigned>(low), above = static_cast<unsigned>(high);
  unsigned c0 = place >> 2 | above << 30, c1 = above >> 2, c2 = static_cast<unsigned>(offset), c3 = 0u;
  unsigned k0 = static_cast<unsigned>(seed), k1 = 0u;
  #pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned a = __umulhi(0xD2511F53u, c0), b = __umulhi(0xCD9E8D57u, c2);
    const unsigned next1 = 0xCD9E8D57u * c2, next3 = 0xD2511F53u * c0;
    c0 = b ^ c1 ^ k0;
    c2 = a ^ c3 ^ k1;
    c1 = next1;
    c3 = next3;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const unsigned even = place & 2u ? c2 : c0, odd = place & 2u ? c3 : c1;
  return static_cast<int>(place & 1u ? odd : even);
}

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ int partner(int v, int step) {
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

// the smallest integer over the 1024 threads of a row, in every one of them
__device__ __forceinline__ int row_min(int v, float* part) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v = min(v, partner(v, step));
  }
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = __int_as_float(v);
  }
  __syncthreads();
  v = __float_as_int(part[threadIdx.x % 32]);
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v = min(v, partner(v, step));
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(1024)
top_p_sample_out(
    const __nv_bfloat16* __restrict__ logits_ptr,
    const float* __restrict__ temperature_ptr,
    const int* __restrict__ seed_ptr,
    const int* __restrict__ step_ptr,
    const unsigned char* __restrict__ top_k_ptr,
    const unsigned char* __restrict__ top_p_ptr,
    long long* __restrict__ out_ptr,
    long long rows,
    long long logits_stride,
    long long temperature_stride,
    long long top_k_stride,
    long long top_p_stride,
    long long out_stride)
{
  constexpr int cols = 32000;
  constexpr int row_threads = 1024;
  const int lane = threadIdx.x;  // of the 1024 threads that share a row
  __shared__ float part[2][32];
  extern __shared__ __align__(16) unsigned char shared[];
  float* const drawn_kept = reinterpret_cast<float*>(shared);
  const long long row = blockIdx.x;
  const __nv_bfloat16* const logits_row = logits_ptr + row * logits_stride;
  const float* const temperature_row = temperature_ptr + row * temperature_stride;
  const unsigned char* const top_k_row = top_k_ptr + row * top_k_stride;
  const unsigned char* const top_p_row = top_p_ptr + row * top_p_stride;
  long long* const out_row = out_ptr + row * out_stride;
  const float temperature = *temperature_row;
  const int step = *step_ptr;
  const int seed = *seed_ptr;
  const float abs_ = fabsf(temperature);
  const bool gt = abs_ > 1.8446744e+19f;
  const bool lt = abs_ < 5.421011e-20f;
  const float where = lt ? 1.8446744e+19f : 1.0f;
  const float scale_of_temperature = gt ? 5.421011e-20f : where;
  const float mul_from_temperature = temperature * scale_of_temperature;
  const float reciprocal_of_temperature = 1.0f / mul_from_temperature;

  // pass 1 of 2: read top_p, top_k, logits; keep drawn; max_of_drawn = max(drawn)
  float max_of_drawn_part = -INFINITY;
  #pragma unroll 4
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (col < 32000) {
      const Vec<unsigned char, 8> top_p_vec = load<8>(top_p_row + col);
      const Vec<unsigned char, 8> top_k_vec = load<8>(top_k_row + col);
      const Vec<__nv_bfloat16, 8> logits_vec = load<8>(logits_row + col);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const bool top_p = top_p_vec.at[j] != 0;
        const bool top_k = top_k_vec.at[j] != 0;
        const float logits = __bfloat162float(logits_vec.at[j]);
        const float mul = logits * scale_of_temperature;
        const float mul_from_logits = mul * reciprocal_of_temperature;
        const float z = top_k ? mul_from_logits : (-INFINITY);
        const float kept = top_p ? z : (-INFINITY);
        const int low = static_cast<int>(row * cols + col + j);
        const int high = static_cast<int>((row * cols + col + j) >> 32);
        const int philox_ = philox(low, high, step, seed);
        const float uniform = 5.96046448e-08f * static_cast<float>(static_cast<int>(static_cast<unsigned>(philox_) >> 8));
        const float log_ = log_of_normal(uniform);
        const float neg = -log_;
        const float log_of_neg = natural_log(neg);
        const float drawn = kept - log_of_neg;
        drawn_kept[(v * 8 + j) * row_threads + lane] = drawn;
        max_of_drawn_part = larger(max_of_drawn_part, drawn);
      }
    }
  }
  const float max_of_drawn = row_max(max_of_drawn_part, part[0]);

  // pass 2 of 2: min_of_first = min(first)
  int min_of_first_part = 2147483647;
  #pragma unroll 4
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (col < 32000) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float drawn = drawn_kept[(v * 8 + j) * row_threads + lane];
        const bool eq = drawn == max_of_drawn;
        const int col_index = col + j;
        const int first = eq ? col_index : 2147483647;
        min_of_first_part = min(min_of_first_part, first);
      }
    }
  }
  const int min_of_first = row_min(min_of_first_part, part[1]);
  if (lane == 0) *out_row = min_of_first;
}
