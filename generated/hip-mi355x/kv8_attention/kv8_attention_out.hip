// kv8_attention_out  f32[B, G, R, D, 16], f32[B, G, R, 1, 16], f32[B, G, R, 1, 16], f32[G, 1, 1, 1] -> bf16[B, G, R, D, 1]  at B=8 G=8 R=4
//   D=128
// out of kv8_attention.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    out_parts_part is out_parts as [B, G, R, D, 16]; top_parts_part is top_parts as [B, G, R, 1,
//          16]; sum_of_exps_parts_part is sum_of_exps_parts as [B, G, R, 1, 16]
// tile     8 threads a row, 16 rows a block, 1 x 2 elements a thread; top_parts_part in registers
// traffic  2.2 MB moved, 2.2 MB ideal, 2.5 MB unfused in 3 launches
// floor    0.3 us at 8 TB/s; instruction-bound at 2.54 flop/B
// rounding out to bf16 when stored; f32 between
// needs    rows of 16 elements, next to each other

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
  return __builtin_elementwise_maximum(a, b);
}

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  return __builtin_amdgcn_exp2f(x);
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  const int word = __builtin_bit_cast(int, v);
  int other = 0;
  if (step == 1) other = __builtin_amdgcn_update_dpp(0, word, 0xb1, 0xf, 0xf, true);  // quad_perm:[1,0,3,2]
  if (step == 2) other = __builtin_amdgcn_update_dpp(0, word, 0x4e, 0xf, 0xf, true);  // quad_perm:[2,3,0,1]
  if (step == 4) {
    const int mirrored = __builtin_amdgcn_update_dpp(0, word, 0x141, 0xf, 0xf, true);  // of 8 lanes,
    other = __builtin_amdgcn_update_dpp(0, mirrored, 0x1b, 0xf, 0xf, true);  // and then of each 4
  }
  if (step == 8) other = __builtin_amdgcn_update_dpp(0, word, 0x128, 0xf, 0xf, true);  // row_ror:8
  if (step == 16) other = __builtin_amdgcn_ds_swizzle(word, 0x401f);  // swizzle(SWAP,16)
  if (step == 32) other = __shfl_xor(word, 32);
  return __builtin_bit_cast(decltype(v), other);
}

// the largest value over the 8 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v) {
  #pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
}

// the sum over the 8 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v) {
  #pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(128)
kv8_attention_out(
    const float* __restrict__ out_parts_part_ptr,
    const float* __restrict__ top_parts_part_ptr,
    const float* __restrict__ sum_of_exps_parts_part_ptr,
    const float* __restrict__ v_scale_ptr,
    __bf16* __restrict__ out_ptr,
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
  constexpr int block_rows = 16;  // that a block takes
  constexpr int row_threads = 8;
  const int lane = threadIdx.x % row_threads;  // of the 8 threads that share a row
  const long long rows = B_size * G_size * R_size * D_size;
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
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
  __bf16* const out_row = out_ptr + unknown(B_at * out_stride_B + G_at * out_stride_G + R_at * out_stride_R + D_at * out_stride_D);
  const float v_scale = *v_scale_row;
  const int col = lane * 2;
  Vec<float, 2> top_parts_part_vec;

  // pass 1 of 2: read top_parts_part; keep top_parts_part; top = max(top_parts_part)
  float top_part = -INFINITY;
  {
    top_parts_part_vec = load_apart<2>(top_parts_part_row, top_parts_part_stride_elements, col);
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float top_parts_part = top_parts_part_vec.at[j];
      top_part = larger(top_part, top_parts_part);
    }
  }
  const float top = row_max(top_part);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // pass 2 of 2: read out_parts_part, sum_of_exps_parts_part; sum_of_exps = sum(mul); sum_of_products =
  //   sum(out_parts_part_times_exp)
  float sum_of_exps_part = 0.0f;
  float sum_of_products_part = 0.0f;
  {
    const Vec<float, 2> out_parts_part_vec = load_apart<2>(out_parts_part_row, out_parts_part_stride_elements, col);
    const Vec<float, 2> sum_of_exps_parts_part_vec = load_apart<2>(sum_of_exps_parts_part_row, sum_of_exps_parts_part_stride_elements, col);
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float out_parts_part = out_parts_part_vec.at[j];
      const float top_parts_part = top_parts_part_vec.at[j];
      const float sum_of_exps_parts_part = sum_of_exps_parts_part_vec.at[j];
      const float top_parts_part_minus_pivot = top_parts_part - pivot;
      const float exp_ = exponential(top_parts_part_minus_pivot);
      const float mul = sum_of_exps_parts_part * exp_;
      const float out_parts_part_times_exp = out_parts_part * exp_;
      sum_of_exps_part += mul;
      sum_of_products_part += out_parts_part_times_exp;
    }
  }
  const float sum_of_exps = row_sum(sum_of_exps_part);
  const float sum_of_products = row_sum(sum_of_products_part);
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;
  const float sum_of_products_times_inverse_sum = sum_of_products * inverse_sum;
  const float out = sum_of_products_times_inverse_sum * v_scale;
  if (live && lane == 0) *out_row = static_cast<__bf16>(out);
}
