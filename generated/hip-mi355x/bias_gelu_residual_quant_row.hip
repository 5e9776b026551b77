// bias_gelu_residual_quant_row  bf16[M, N], bf16[N], bf16[M, N] -> i8[M, N], f32[M, 1]  at M=8192 N=4096
// gelu(x + bias) + residual as i8: the largest of each row is 127 times its scale.
//
//     def bias_gelu_residual_quant_row(x, bias, residual):
//         h = F.gelu(x + bias) + residual
//         values, scale = F.quantize(h, i8)
//         return values, scale
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a block of 128 threads a row, 4 x 8 elements a thread; h in registers
// traffic  167.8 MB moved, 167.8 MB ideal, 637.6 MB unfused in 4 launches
// floor    21.0 us at 8 TB/s; memory-bound at 4.40 flop/B
// rounding values to i8 when stored; f32 between
// needs    rows of 4096 elements, next to each other; x, bias, residual: address and strides in
//          multiples of 16 B; values: address and strides in multiples of 8 B; bias [N] shared by every
//          row

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

// the larger of two; NaN wins
__device__ __forceinline__ float larger(float a, float b) {
  return __builtin_elementwise_maximum(a, b);
}

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  return __builtin_amdgcn_exp2f(x);
}

// 1 / x, within 1 ulp; above 2^126 it is 0
__device__ __forceinline__ float reciprocal(float x) {
  return __builtin_amdgcn_rcpf(x);
}

// the nearest whole number, of two the even one, from -128 to 127; 0 of NaN
__device__ __forceinline__ int to_i8(float x) {
  return x != x ? 0 : static_cast<int>(rintf(fminf(fmaxf(x, -128.0f), 127.0f)));
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

// the largest value over the 128 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 2];
  v = larger(v, partner(v, 1));
  return v;
}

extern "C" __global__ void __launch_bounds__(128)
bias_gelu_residual_quant_row(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ bias_ptr,
    const __bf16* __restrict__ residual_ptr,
    signed char* __restrict__ values_ptr,
    float* __restrict__ scale_ptr,
    long long rows,
    long long x_stride,
    long long residual_stride,
    long long values_stride,
    long long scale_stride)
{
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  __shared__ float part[1][2];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const __bf16* const x_row = x_ptr + row * x_stride;
  const __bf16* const residual_row = residual_ptr + row * residual_stride;
  signed char* const values_row = values_ptr + row * values_stride;
  float* const scale_row = scale_ptr + row * scale_stride;
  float h_kept[4][8];

  // pass 1 of 2: read x, bias, residual; keep h; max_of_magnitude = max(magnitude)
  float max_of_magnitude_part = -INFINITY;
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
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = static_cast<float>(x_vec[v].at[j]);
      const float bias = static_cast<float>(bias_vec[v].at[j]);
      const float residual = static_cast<float>(residual_vec[v].at[j]);
      const float add = x + bias;
      const float gelu = gelu_by_tanh(add);
      const float h = gelu + residual;
      const float magnitude = fabsf(h);
      h_kept[v][j] = h;
      max_of_magnitude_part = larger(max_of_magnitude_part, magnitude);
    }
  }
  const float max_of_magnitude = row_max(max_of_magnitude_part, part[0]);
  const float largest = larger(max_of_magnitude, 1e-12f);
  const float scale = largest / 127.0f;
  const float factor = 1.0f / scale;
  if (lane == 0) *scale_row = scale;

  // pass 2 of 2: write values
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    Vec<signed char, 8> values_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float h = h_kept[v][j];
      const float mul = h * factor;
      const int values_ = to_i8(mul);
      values_vec.at[j] = static_cast<signed char>(values_);
    }
    store<8>(values_row + col, values_vec);
  }
}
