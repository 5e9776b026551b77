// groupnorm_silu_out  bf16[B, 32, C, S], bf16[32, C, 1], bf16[32, C, 1], f32[B, 32, 1, 1], f32[B, 32, 1, 1] -> bf16[B, 32, C, S]  at B=16
//   C=10 S=4096
// out of groupnorm_silu.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    per_channel is x as [B, 32, C, S]; gamma_part is gamma as [32, C, 1]; beta_part is beta as
//          [32, C, 1]; sum_of_in_groups_part is sum_of_in_groups as [B, 32, 1, 1]; sum_of_squares_part
//          is sum_of_squares as [B, 32, 1, 1]
// tile     tiles of rows and columns; a block of 128 threads on 1 row, 8 elements a thread
// traffic  83.9 MB moved, 83.9 MB ideal, 251.7 MB unfused in 2 launches
// floor    10.5 us at 8 TB/s; memory-bound at 3.50 flop/B
// rounding out to bf16 when stored; f32 between
// needs    rows of 4096 elements, next to each other; per_channel, out: address and strides in
//          multiples of 16 B

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

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  return __builtin_amdgcn_exp2f(x);
}

// 1 / x, within 1 ulp; above 2^126 it is 0
__device__ __forceinline__ float reciprocal(float x) {
  return __builtin_amdgcn_rcpf(x);
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

extern "C" __global__ void __launch_bounds__(128)
groupnorm_silu_out(
    const __bf16* __restrict__ per_channel_ptr,
    const __bf16* __restrict__ gamma_part_ptr,
    const __bf16* __restrict__ beta_part_ptr,
    const float* __restrict__ sum_of_in_groups_part_ptr,
    const float* __restrict__ sum_of_squares_part_ptr,
    __bf16* __restrict__ out_ptr,
    long long B_size,
    long long axis1_size,
    long long C_size,
    long long per_channel_stride_B,
    long long per_channel_stride_axis1,
    long long per_channel_stride_C,
    long long gamma_part_stride_axis1,
    long long gamma_part_stride_C,
    long long beta_part_stride_axis1,
    long long beta_part_stride_C,
    long long sum_of_in_groups_part_stride_B,
    long long sum_of_in_groups_part_stride_axis1,
    long long sum_of_squares_part_stride_B,
    long long sum_of_squares_part_stride_axis1,
    long long out_stride_B,
    long long out_stride_axis1,
    long long out_stride_C)
{
  constexpr int tile_cols = 1024;  // that a block takes
  constexpr int row_blocks = 4;  // that share a row
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  const long long rows = B_size * axis1_size * C_size;
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= rows * row_blocks) return;  // the grid's last line is longer than what is left
  const long long row = tile / row_blocks;
  const unsigned B_at = static_cast<unsigned>(row) / static_cast<unsigned>(C_size) / static_cast<unsigned>(axis1_size);
  const unsigned axis1_at = static_cast<unsigned>(row) / static_cast<unsigned>(C_size) % static_cast<unsigned>(axis1_size);
  const unsigned C_at = static_cast<unsigned>(row) % static_cast<unsigned>(C_size);
  const __bf16* const per_channel_row = per_channel_ptr + B_at * per_channel_stride_B + axis1_at * per_channel_stride_axis1
      + C_at * per_channel_stride_C;
  const __bf16* const gamma_part_row = gamma_part_ptr + axis1_at * gamma_part_stride_axis1 + C_at * gamma_part_stride_C;
  const __bf16* const beta_part_row = beta_part_ptr + axis1_at * beta_part_stride_axis1 + C_at * beta_part_stride_C;
  const float* const sum_of_in_groups_part_row = sum_of_in_groups_part_ptr + B_at * sum_of_in_groups_part_stride_B
      + axis1_at * sum_of_in_groups_part_stride_axis1;
  const float* const sum_of_squares_part_row = sum_of_squares_part_ptr + B_at * sum_of_squares_part_stride_B
      + axis1_at * sum_of_squares_part_stride_axis1;
  __bf16* const out_row = out_ptr + B_at * out_stride_B + axis1_at * out_stride_axis1 + C_at * out_stride_C;
  const float sum_of_in_groups_part = *sum_of_in_groups_part_row;
  const float sum_of_squares_part = *sum_of_squares_part_row;
  const float gamma_part = static_cast<float>(*gamma_part_row);
  const float beta_part = static_cast<float>(*beta_part_row);
  const float mean = sum_of_in_groups_part / 40960.0f;
  const float variance = sum_of_squares_part / 40960.0f;
  const float variance_plus_eps = variance + 1e-05f;
  const float rstd = rsqrtf(variance_plus_eps);
  const int col = static_cast<int>(tile % row_blocks) * tile_cols + lane * 8;

  // pass 1 of 1: read per_channel; write out
  {
    const Vec<__bf16, 8> per_channel_vec = load<8>(per_channel_row + col);
    Vec<__bf16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float per_channel = static_cast<float>(per_channel_vec.at[j]);
      const float per_channel_minus_mean = per_channel - mean;
      const float mul = per_channel_minus_mean * rstd;
      const float mul_times_gamma_part = mul * gamma_part;
      const float normalized = mul_times_gamma_part + beta_part;
      const float silu = normalized * reciprocal(1.0f + exponential(-normalized));
      out_vec.at[j] = static_cast<__bf16>(silu);
    }
    store<8>(out_row + col, out_vec);
  }
}
