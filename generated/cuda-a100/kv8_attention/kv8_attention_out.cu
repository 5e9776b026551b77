// kv8_attention_out  f32[B, G, R, D, 6], f32[B, G, R, 1, 6], f32[B, G, R, 1, 6], f32[G, 1, 1, 1] -> bf16[B, G, R, D, 1]  at B=8 G=8 R=4
//   D=128
// out of kv8_attention.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// views    out_parts_part is out_parts as [B, G, R, D, 6]; top_parts_part is top_parts as [B, G, R, 1,
//          6]; sum_of_exps_parts_part is sum_of_exps_parts as [B, G, R, 1, 6]
// tile     1 thread a row, 128 rows a block, 3 x 2 elements a thread; top_parts_part in registers
// traffic  0.9 MB moved, 0.9 MB ideal, 1.1 MB unfused in 3 launches
// floor    0.4 us at 2.039 TB/s; memory-bound at 2.65 flop/B
// rounding out to bf16 when stored; f32 between
// needs    rows of 6 elements, next to each other

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

// values col ... col + N - 1 of a row whose values are `stride` apart; what lies outside the row is zero
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_apart(const T* row, long long stride, int col, int cols = 0x7fffffff) {
  Vec<T, N> v;
  #pragma unroll
  for (int j = 0; j < N; ++j) v.at[j] = col + j < cols ? row[(col + j) * stride] : T{};
  return v;
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

extern "C" __global__ void __launch_bounds__(128)
kv8_attention_out(
    const float* __restrict__ out_parts_part_ptr,
    const float* __restrict__ top_parts_part_ptr,
    const float* __restrict__ sum_of_exps_parts_part_ptr,
    const float* __restrict__ v_scale_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
    long long B_size,
    long long G_size,
    long long R_size,
    long long D_size,
    long long out_parts_part_stride_B,
    long long out_parts_part_stride_G,
    long long out_parts_part_stride_R,
    long long out_parts_part_stride_D,
    long long out_parts_part_stride_elements,
    long long top_parts_part_stride_B,
    long long top_parts_part_stride_G,
    long long top_parts_part_stride_R,
    long long top_parts_part_stride_elements,
    long long sum_of_exps_parts_part_stride_B,
    long long sum_of_exps_parts_part_stride_G,
    long long sum_of_exps_parts_part_stride_R,
    long long sum_of_exps_parts_part_stride_elements,
    long long v_scale_stride_G,
    long long out_stride_B,
    long long out_stride_G,
    long long out_stride_R,
    long long out_stride_D)
{
  constexpr int block_rows = 128;  // that a block takes
  const long long rows = B_size * G_size * R_size * D_size;
  const long long own_row = static_cast<long long>(blockIdx.x) * block_rows + threadIdx.x;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned B_at = static_cast<unsigned>(row) / static_cast<unsigned>(D_size) / static_cast<unsigned>(R_size) / static_cast<unsigned>(G_size);
  const unsigned G_at = static_cast<unsigned>(row) / static_cast<unsigned>(D_size) / static_cast<unsigned>(R_size) % static_cast<unsigned>(G_size);
  const unsigned R_at = static_cast<unsigned>(row) / static_cast<unsigned>(D_size) % static_cast<unsigned>(R_size);
  const unsigned D_at = static_cast<unsigned>(row) % static_cast<unsigned>(D_size);
  const float* const out_parts_part_row = out_parts_part_ptr + B_at * out_parts_part_stride_B + G_at * out_parts_part_stride_G
      + R_at * out_parts_part_stride_R + D_at * out_parts_part_stride_D;
  const float* const top_parts_part_row = top_parts_part_ptr + B_at * top_parts_part_stride_B + G_at * top_parts_part_stride_G
      + R_at * top_parts_part_stride_R;
  const float* const sum_of_exps_parts_part_row = sum_of_exps_parts_part_ptr + B_at * sum_of_exps_parts_part_stride_B
      + G_at * sum_of_exps_parts_part_stride_G + R_at * sum_of_exps_parts_part_stride_R;
  const float* const v_scale_row = v_scale_ptr + G_at * v_scale_stride_G;
  __nv_bfloat16* const out_row = out_ptr + unknown(B_at * out_stride_B + G_at * out_stride_G + R_at * out_stride_R + D_at * out_stride_D);
  const float v_scale = *v_scale_row;
  Vec<float, 2> top_parts_part_vec[3];

  // pass 1 of 2: read top_parts_part; keep top_parts_part; top = max(top_parts_part)
  float top_part = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 3; ++v) {
    const int col = v * 2;
    top_parts_part_vec[v] = load_apart<2>(top_parts_part_row, top_parts_part_stride_elements, col);
  }
  #pragma unroll
  for (int v = 0; v < 3; ++v) {
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float top_parts_part = top_parts_part_vec[v].at[j];
      top_part = larger(top_part, top_parts_part);
    }
  }
  const float top = top_part;
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // pass 2 of 2: read out_parts_part, sum_of_exps_parts_part; sum_of_exps = sum(mul); sum_of_products =
  //   sum(out_parts_part_times_exp)
  float sum_of_exps_part = 0.0f;
  float sum_of_products_part = 0.0f;
  Vec<float, 2> out_parts_part_vec[3];
  Vec<float, 2> sum_of_exps_parts_part_vec[3];
  #pragma unroll
  for (int v = 0; v < 3; ++v) {
    const int col = v * 2;
    out_parts_part_vec[v] = load_apart<2>(out_parts_part_row, out_parts_part_stride_elements, col);
    sum_of_exps_parts_part_vec[v] = load_apart<2>(sum_of_exps_parts_part_row, sum_of_exps_parts_part_stride_elements, col);
  }
  #pragma unroll
  for (int v = 0; v < 3; ++v) {
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float out_parts_part = out_parts_part_vec[v].at[j];
      const float top_parts_part = top_parts_part_vec[v].at[j];
      const float sum_of_exps_parts_part = sum_of_exps_parts_part_vec[v].at[j];
      const float top_parts_part_minus_pivot = top_parts_part - pivot;
      const float exp_ = exponential(top_parts_part_minus_pivot);
      const float mul = sum_of_exps_parts_part * exp_;
      const float out_parts_part_times_exp = out_parts_part * exp_;
      sum_of_exps_part += mul;
      sum_of_products_part += out_parts_part_times_exp;
    }
  }
  const float sum_of_exps = sum_of_exps_part;
  const float sum_of_products = sum_of_products_part;
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;
  const float sum_of_products_times_inverse_sum = sum_of_products * inverse_sum;
  const float out = sum_of_products_times_inverse_sum * v_scale;
  if (live) *out_row = __float2bfloat16_rn(out);
}
