// fp8_norm_swiglu_quant_max_of_magnitude  bf16[M, K], bf16[K] -> f32[M, 1], f8e4m3[M, K]  at M=4096 K=4096
// max_of_magnitude, normed of fp8_norm_swiglu_quant.
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
// tile     a block of 128 threads a row, 4 x 8 elements a thread; x, rmsnorm in registers
// traffic  50.4 MB moved, 50.4 MB ideal, 184.6 MB unfused in 2 launches
// floor    9.5 us at 5.3 TB/s; memory-bound at 2.33 flop/B
// rounding normed to f8e4m3 when stored; f32 between
// needs    rows of 4096 elements, next to each other; x, gamma: address and strides in multiples of 16
//          B; normed: address and strides in multiples of 8 B; gamma [K] shared by every row

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
  return a > b || a != a ? a : b;
}

// the nearest f8e4m3, of two the even one, at most 448 in magnitude; NaN stays NaN
__device__ __forceinline__ unsigned char to_f8e4m3(float x) {
  if (x != x) return 0x7f;
  const unsigned sign = __float_as_uint(x) >> 24 & 0x80u;
  const float size = fminf(fabsf(x), 448.0f);
  const unsigned bits = __float_as_uint(size);
  const unsigned small = __float_as_uint(size + 16384.0f) - __float_as_uint(16384.0f);
  const unsigned even = bits + 0x7ffffu + (bits >> 20 & 1u);
  constexpr unsigned rebias = 960;
  const unsigned code = size < 0.015625f ? small : (even >> 20) - rebias;
  return static_cast<unsigned char>(sign | code);
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
fp8_norm_swiglu_quant_max_of_magnitude(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ gamma_ptr,
    float* __restrict__ max_of_magnitude_ptr,
    unsigned char* __restrict__ normed_ptr,
    long long rows,
    long long x_stride,
    long long max_of_magnitude_stride,
    long long normed_stride)
{
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  __shared__ float part[2][2];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const __bf16* const x_row = x_ptr + row * x_stride;
  float* const max_of_magnitude_row = max_of_magnitude_ptr + row * max_of_magnitude_stride;
  unsigned char* const normed_row = normed_ptr + row * normed_stride;
  Vec<__bf16, 8> gamma_vec[4];
  Vec<__bf16, 8> x_vec[4];
  float rmsnorm_kept[4][8];

  // pass 1 of 3: read gamma ahead; read x; keep x; sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    gamma_vec[v] = load<8>(gamma_ptr + col);
    x_vec[v] = load<8>(x_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = static_cast<float>(x_vec[v].at[j]);
      const float square = x * x;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[0]);
  const float mean = sum_of_squares / 4096.0f;
  const float mean_plus_eps = mean + 1e-06f;
  const float rrms = rsqrtf(mean_plus_eps);

  // pass 2 of 3: keep rmsnorm; max_of_magnitude = max(magnitude)
  float max_of_magnitude_part = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = static_cast<float>(x_vec[v].at[j]);
      const float gamma = static_cast<float>(gamma_vec[v].at[j]);
      const float normalized = x * rrms;
      const float rmsnorm = normalized * gamma;
      const float magnitude = fabsf(rmsnorm);
      rmsnorm_kept[v][j] = rmsnorm;
      max_of_magnitude_part = larger(max_of_magnitude_part, magnitude);
    }
  }
  const float max_of_magnitude = row_max(max_of_magnitude_part, part[1]);
  const float largest = larger(max_of_magnitude, 1e-12f);
  const float row_scale = largest / 448.0f;
  const float factor = 1.0f / row_scale;
  if (lane == 0) *max_of_magnitude_row = max_of_magnitude;

  // pass 3 of 3: write normed
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    Vec<unsigned char, 8> normed_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float rmsnorm = rmsnorm_kept[v][j];
      const float mul = rmsnorm * factor;
      normed_vec.at[j] = to_f8e4m3(mul);
    }
    store<8>(normed_row + col, normed_vec);
  }
}
