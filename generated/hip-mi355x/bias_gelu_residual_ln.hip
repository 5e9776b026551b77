// bias_gelu_residual_ln  f16[M, N], f16[N], f16[M, N], f16[N], f16[N] -> f16[M, N]  at M=8192 N=4096
// LayerNorm(residual + gelu(x + bias)).
//
//     def bias_gelu_residual_ln(x, bias, residual, gamma, beta):
//         h = residual + F.gelu(x + bias)
//         return F.layernorm(h, gamma, beta, eps=1e-5)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a block of 128 threads a row, 4 x 8 elements a thread; h, centered in registers
// traffic  201.4 MB moved, 201.4 MB ideal, 671.1 MB unfused in 4 launches
// floor    25.2 us at 8 TB/s; memory-bound at 4.17 flop/B
// rounding out to f16 when stored; f32 between
// needs    rows of 4096 elements, next to each other; x, bias, residual, gamma, beta, out: address and
//          strides in multiples of 16 B; bias [N], gamma [N], beta [N] shared by every row

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

// x (1 + tanh u) / 2 as x / (1 + e^-2u), with -2u log2 e in one polynomial: u = sqrt(2 / pi) (x + 0.044715 x^3)
__device__ __forceinline__ float gelu_by_tanh(float x) {
  return x * reciprocal(1.0f + power_of_2(x * (-2.30220819f - 0.102943240f * x * x)));
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

// the sum over the 128 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 2];
  v += partner(v, 1);
  return v;
}

extern "C" __global__ void __launch_bounds__(128)
bias_gelu_residual_ln(
    const _Float16* __restrict__ x_ptr,
    const _Float16* __restrict__ bias_ptr,
    const _Float16* __restrict__ residual_ptr,
    const _Float16* __restrict__ gamma_ptr,
    const _Float16* __restrict__ beta_ptr,
    _Float16* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long residual_stride,
    long long out_stride)
{
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  __shared__ float part[2][2];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const _Float16* const x_row = x_ptr + row * x_stride;
  const _Float16* const residual_row = residual_ptr + row * residual_stride;
  _Float16* const out_row = out_ptr + row * out_stride;
  float h_kept[4][8];
  float centered_kept[4][8];

  // pass 1 of 3: read x, bias, residual; keep h; sum_of_h = sum(h)
  float sum_of_h_part = 0.0f;
  Vec<_Float16, 8> x_vec[4];
  Vec<_Float16, 8> bias_vec[4];
  Vec<_Float16, 8> residual_vec[4];
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    x_vec[v] = load<8>(x_row + col);
    bias_vec[v] = load<8>(bias_ptr + col);
    residual_vec[v] = load<8>(residual_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = static_cast<float>(x_vec[v].at[j]);
      const float bias = static_cast<float>(bias_vec[v].at[j]);
      const float residual = static_cast<float>(residual_vec[v].at[j]);
      const float x_plus_bias = x + bias;
      const float gelu = gelu_by_tanh(x_plus_bias);
      const float h = residual + gelu;
      h_kept[v][j] = h;
      sum_of_h_part += h;
    }
  }
  const float sum_of_h = row_sum(sum_of_h_part, part[0]);
  const float mean = sum_of_h / 4096.0f;

  // pass 2 of 3: keep centered; sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float h = h_kept[v][j];
      const float centered = h - mean;
      const float square = centered * centered;
      centered_kept[v][j] = centered;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[1]);
  const float variance = sum_of_squares / 4096.0f;
  const float variance_plus_eps = variance + 1e-05f;
  const float rstd = rsqrtf(variance_plus_eps);

  // pass 3 of 3: read gamma, beta; write out
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    const Vec<_Float16, 8> gamma_vec = load<8>(gamma_ptr + col);
    const Vec<_Float16, 8> beta_vec = load<8>(beta_ptr + col);
    Vec<_Float16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float gamma = static_cast<float>(gamma_vec.at[j]);
      const float beta = static_cast<float>(beta_vec.at[j]);
      const float centered = centered_kept[v][j];
      const float normalized = centered * rstd;
      const float scaled = normalized * gamma;
      const float layernorm = scaled + beta;
      out_vec.at[j] = static_cast<_Float16>(layernorm);
    }
    store<8>(out_row + col, out_vec);
  }
}
