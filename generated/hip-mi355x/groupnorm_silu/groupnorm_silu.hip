// groupnorm_silu  bf16[B, 32, C_times_S], bf16[32, C], bf16[32, C] -> bf16[B, 32, C_times_S]  at B=16 C_times_S=40960 C=10
// silu(GroupNorm(x)) of 32 groups of C channels: what is normalized together is one row, which is read once.
//
//     def groupnorm_silu(x, gamma, beta):
//         return F.silu(F.groupnorm(x, 32, gamma, beta, eps=1e-5))
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    in_groups is x as [B, 32, C * S]; gamma_part is gamma as [32, C]; beta_part is beta as [32,
//          C]
// tile     a block of 1024 threads a row, 5 x 8 elements a thread; in_groups, in_groups_minus_mean in
//          registers
// traffic  83.9 MB moved, 83.9 MB ideal, 209.7 MB unfused in 2 launches
// floor    10.5 us at 8 TB/s; memory-bound at 4.25 flop/B
// rounding out to bf16 when stored; f32 between
// needs    rows of 40960 elements, next to each other; in_groups, out: address and strides in multiples
//          of 16 B

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

// the value at p, N times
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_for_all(const T* p) {
  const T value = *p;
  Vec<T, N> v;
  #pragma unroll
  for (int j = 0; j < N; ++j) v.at[j] = value;
  return v;
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

// the sum over the 1024 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 16];
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(1024)
groupnorm_silu(
    const __bf16* __restrict__ in_groups_ptr,
    const __bf16* __restrict__ gamma_part_ptr,
    const __bf16* __restrict__ beta_part_ptr,
    __bf16* __restrict__ out_ptr,
    long long B_size,
    long long axis1_size,
    long long in_groups_stride_B,
    long long in_groups_stride_axis1,
    long long gamma_part_stride_axis1,
    long long gamma_part_stride_elements,
    long long beta_part_stride_axis1,
    long long beta_part_stride_elements,
    long long out_stride_B,
    long long out_stride_axis1)
{
  constexpr int row_threads = 1024;
  constexpr int gamma_part_cols = 4096;  // of a value
  constexpr int beta_part_cols = 4096;  // of a value
  const int lane = threadIdx.x;  // of the 1024 threads that share a row
  __shared__ float part[2][16];
  const long long rows = B_size * axis1_size;
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const unsigned B_at = static_cast<unsigned>(row) / static_cast<unsigned>(axis1_size);
  const unsigned axis1_at = static_cast<unsigned>(row) % static_cast<unsigned>(axis1_size);
  const __bf16* const in_groups_row = in_groups_ptr + B_at * in_groups_stride_B + axis1_at * in_groups_stride_axis1;
  const __bf16* const gamma_part_row = gamma_part_ptr + axis1_at * gamma_part_stride_axis1;
  const __bf16* const beta_part_row = beta_part_ptr + axis1_at * beta_part_stride_axis1;
  __bf16* const out_row = out_ptr + B_at * out_stride_B + axis1_at * out_stride_axis1;
  Vec<__bf16, 8> in_groups_vec[5];
  float in_groups_minus_mean_kept[5][8];

  // pass 1 of 3: read in_groups; keep in_groups; sum_of_in_groups = sum(in_groups)
  float sum_of_in_groups_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 5; ++v) {
    const int col = (v * row_threads + lane) * 8;
    in_groups_vec[v] = load<8>(in_groups_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 5; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float in_groups = static_cast<float>(in_groups_vec[v].at[j]);
      sum_of_in_groups_part += in_groups;
    }
  }
  const float sum_of_in_groups = row_sum(sum_of_in_groups_part, part[0]);
  const float mean = sum_of_in_groups / 40960.0f;

  // pass 2 of 3: keep in_groups_minus_mean; sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 5; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float in_groups = static_cast<float>(in_groups_vec[v].at[j]);
      const float in_groups_minus_mean = in_groups - mean;
      const float square = in_groups_minus_mean * in_groups_minus_mean;
      in_groups_minus_mean_kept[v][j] = in_groups_minus_mean;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[1]);
  const float variance = sum_of_squares / 40960.0f;
  const float variance_plus_eps = variance + 1e-05f;
  const float rstd = rsqrtf(variance_plus_eps);

  // pass 3 of 3: read gamma_part, beta_part; write out
  Vec<__bf16, 8> gamma_part_vec[5];
  Vec<__bf16, 8> beta_part_vec[5];
  #pragma unroll
  for (int v = 0; v < 5; ++v) {
    const int col = (v * row_threads + lane) * 8;
    gamma_part_vec[v] = load_for_all<8>(gamma_part_row + (col / gamma_part_cols) * gamma_part_stride_elements);
    beta_part_vec[v] = load_for_all<8>(beta_part_row + (col / beta_part_cols) * beta_part_stride_elements);
  }
  #pragma unroll
  for (int v = 0; v < 5; ++v) {
    const int col = (v * row_threads + lane) * 8;
    Vec<__bf16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float gamma_part = static_cast<float>(gamma_part_vec[v].at[j]);
      const float beta_part = static_cast<float>(beta_part_vec[v].at[j]);
      const float in_groups_minus_mean = in_groups_minus_mean_kept[v][j];
      const float mul = in_groups_minus_mean * rstd;
      const float mul_from_in_groups = mul * gamma_part;
      const float normalized = mul_from_in_groups + beta_part;
      const float silu = normalized * reciprocal(1.0f + exponential(-normalized));
      out_vec.at[j] = static_cast<__bf16>(silu);
    }
    store<8>(out_row + col, out_vec);
  }
}
