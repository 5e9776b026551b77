// dropout_residual_layernorm  bf16[M, N], bf16[N], bf16[M, N], bf16[N], bf16[N], f32, i32, i32[1] -> bf16[M, N], bf16[M, N]  at M=8192
//   N=4096
// h = residual + dropout(x + bias), LayerNorm(h).
//
//     def dropout_residual_layernorm(x, bias, residual, gamma, beta, p, seed, offset):
//         h = residual + F.dropout(x + bias, p, seed, offset)
//         return h, F.layernorm(h, gamma, beta, eps=1e-5)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a block of 128 threads a row, 4 x 8 elements a thread; h, centered in registers
// traffic  268.5 MB moved, 268.5 MB ideal, 671.1 MB unfused in 4 launches
// floor    33.6 us at 8 TB/s; memory-bound at 1.75 flop/B
// rounding h to bf16 when stored; layernorm to bf16 when stored; f32 between
// needs    rows of 4096 elements, next to each other; x, bias, residual, gamma, beta, h, layernorm:
//          address and strides in multiples of 16 B; bias [N], gamma [N], beta [N] shared by every row

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
dropout_residual_layernorm(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ bias_ptr,
    const __bf16* __restrict__ residual_ptr,
    const __bf16* __restrict__ gamma_ptr,
    const __bf16* __restrict__ beta_ptr,
    float p,
    int seed,
    const int* __restrict__ offset_ptr,
    __bf16* __restrict__ h_ptr,
    __bf16* __restrict__ layernorm_ptr,
    long long rows,
    long long x_stride,
    long long residual_stride,
    long long h_stride,
    long long layernorm_stride)
{
  constexpr int cols = 4096;
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  const float sub = 1.0f - p;
  const float quotient = 1.0f / sub;
  __shared__ float part[2][2];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const __bf16* const x_row = x_ptr + row * x_stride;
  const __bf16* const residual_row = residual_ptr + row * residual_stride;
  __bf16* const h_row = h_ptr + row * h_stride;
  __bf16* const layernorm_row = layernorm_ptr + row * layernorm_stride;
  const int offset = *offset_ptr;
  float h_kept[4][8];
  float centered_kept[4][8];

  // pass 1 of 3: read x, bias, residual; keep h; sum_of_h = sum(h); write h
  float sum_of_h_part = 0.0f;
  Vec<__bf16, 8> x_vec[4];
  Vec<__bf16, 8> bias_vec[4];
  Vec<__bf16, 8> residual_vec[4];
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    x_vec[v] = load<8>(x_row + col);
    bias_vec[v] = load<8>(bias_ptr + col);
    residual_vec[v] = load<8>(residual_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    Vec<__bf16, 8> h_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = static_cast<float>(x_vec[v].at[j]);
      const float bias = static_cast<float>(bias_vec[v].at[j]);
      const float residual = static_cast<float>(residual_vec[v].at[j]);
      const float x_plus_bias = x + bias;
      const int low = static_cast<int>(row * cols + col + j);
      const int high = static_cast<int>((row * cols + col + j) >> 32);
      const int philox_ = philox(low, high, offset, seed);
      const float to_unit = 5.96046448e-08f * static_cast<float>(static_cast<int>(static_cast<unsigned>(philox_) >> 8));
      const bool keep = to_unit >= p;
      const float mul = x_plus_bias * quotient;
      const float dropout = keep ? mul : 0.0f;
      const float h = residual + dropout;
      h_kept[v][j] = h;
      sum_of_h_part += h;
      h_vec.at[j] = static_cast<__bf16>(h);
    }
    store<8>(h_row + col, h_vec);
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

  // pass 3 of 3: read gamma, beta; write layernorm
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    const Vec<__bf16, 8> gamma_vec = load<8>(gamma_ptr + col);
    const Vec<__bf16, 8> beta_vec = load<8>(beta_ptr + col);
    Vec<__bf16, 8> layernorm_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float gamma = static_cast<float>(gamma_vec.at[j]);
      const float beta = static_cast<float>(beta_vec.at[j]);
      const float centered = centered_kept[v][j];
      const float normalized = centered * rstd;
      const float scaled = normalized * gamma;
      const float layernorm = scaled + beta;
      layernorm_vec.at[j] = static_cast<__bf16>(layernorm);
    }
    store<8>(layernorm_row + col, layernorm_vec);
  }
}
