// layernorm_quant_tensor_static  bf16[M, N], bf16[N], bf16[N], f32 -> i8[M, N]  at M=8192 N=4096
// layernorm(x) / scale, rounded to i8; what is beyond -128 to 127 becomes the nearer end.
//
//     def layernorm_quant_tensor_static(x, gamma, beta, scale):
//         y = F.layernorm(x, gamma, beta, eps=1e-5)
//         return F.quantize(y, i8, scale)
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
// tile     a block of 128 threads a row, 4 x 8 elements a thread; x, centered in registers
// traffic  100.7 MB moved, 100.7 MB ideal, 302.0 MB unfused in 2 launches
// floor    19.0 us at 5.3 TB/s; memory-bound at 3.00 flop/B
// rounding out to i8 when stored; f32 between
// needs    rows of 4096 elements, next to each other; x, gamma, beta: address and strides in multiples
//          of 16 B; out: address and strides in multiples of 8 B; gamma [N], beta [N] shared by every
//          row

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

// the nearest whole number, of two the even one, from -128 to 127; 0 of NaN
__device__ __forceinline__ int to_i8(float x) {
  return x != x ? 0 : static_cast<int>(rintf(fminf(fmaxf(x, -128.0f), 127.0f)));
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
layernorm_quant_tensor_static(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ gamma_ptr,
    const __bf16* __restrict__ beta_ptr,
    float scale,
    signed char* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long out_stride)
{
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  const float one_over_scale = 1.0f / scale;
  __shared__ float part[2][2];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const __bf16* const x_row = x_ptr + row * x_stride;
  signed char* const out_row = out_ptr + row * out_stride;
  Vec<__bf16, 8> x_vec[4];
  float centered_kept[4][8];

  // pass 1 of 3: read x; keep x; sum_of_x = sum(x)
  float sum_of_x_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    x_vec[v] = load<8>(x_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = static_cast<float>(x_vec[v].at[j]);
      sum_of_x_part += x;
    }
  }
  const float sum_of_x = row_sum(sum_of_x_part, part[0]);
  const float mean = sum_of_x / 4096.0f;

  // pass 2 of 3: keep centered; sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = static_cast<float>(x_vec[v].at[j]);
      const float centered = x - mean;
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
    const Vec<__bf16, 8> gamma_vec = load<8>(gamma_ptr + col);
    const Vec<__bf16, 8> beta_vec = load<8>(beta_ptr + col);
    Vec<signed char, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float gamma = static_cast<float>(gamma_vec.at[j]);
      const float beta = static_cast<float>(beta_vec.at[j]);
      const float centered = centered_kept[v][j];
      const float normalized = centered * rstd;
      const float scaled = normalized * gamma;
      const float y = scaled + beta;
      const float mul = y * one_over_scale;
      const int quantize = to_i8(mul);
      out_vec.at[j] = static_cast<signed char>(quantize);
    }
    store<8>(out_row + col, out_vec);
  }
}
