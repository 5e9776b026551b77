// rmsnorm_quant_block  bf16[M, N], bf16[N] -> f8e4m3[M, N], f32[M, N_over_128]  at M=16384 N=4096 N_over_128=32
// rmsnorm(x) * gain as f8e4m3 with a scale for each 128 of a row.
//
//     def rmsnorm_quant_block(x, gain):
//         y = F.rmsnorm(x, gain, eps=1e-6)
//         values, scale = F.quantize(y, f8e4m3, per="block", block=128, rule="deepseek")
//         return values, scale
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a warp a row, 2 rows a block, 8 x 8 elements a thread; x in registers, as read
// traffic  203.4 MB moved, 203.4 MB ideal, 740.3 MB unfused in 2 launches
// floor    25.4 us at 8 TB/s; memory-bound at 2.33 flop/B
// rounding values to f8e4m3 when stored; f32 between
// needs    rows of 4096 elements, next to each other; x, gain: address and strides in multiples of 16
//          B; values: address and strides in multiples of 8 B; gain [N] shared by every row

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

// The vector stays as it was read: what the compiler has made of it would take more registers, and is made again.
template <typename T, int N>
__device__ __forceinline__ void leave_packed(Vec<T, N>& v) {
  unsigned words[sizeof(v) / 4];
  memcpy(words, &v, sizeof(v));
  #pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(v) / 4); ++i) asm volatile("" : "+v"(words[i]));
  memcpy(&v, words, sizeof(v));
}

// the larger of two; NaN wins
__device__ __forceinline__ float larger(float a, float b) {
  return __builtin_elementwise_maximum(a, b);
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

// the largest value over the 16 neighbouring threads that have a group of the row, in every one of them
__device__ __forceinline__ float group_max(float v) {
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v = larger(v, __shfl_xor(v, step));
  }
  return v;
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

// the sum over the 64 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(128)
rmsnorm_quant_block(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ gain_ptr,
    unsigned char* __restrict__ values_ptr,
    float* __restrict__ scale_ptr,
    long long rows,
    long long x_stride,
    long long values_stride,
    long long scale_stride)
{
  constexpr int row_threads = 64;
  constexpr int scale_cols = 128;  // of a value
  constexpr int block_rows = 2;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 64 threads that share a row
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const __bf16* const x_row = x_ptr + row * x_stride;
  unsigned char* const values_row = values_ptr + row * values_stride;
  float* const scale_row = scale_ptr + row * scale_stride;
  Vec<__bf16, 8> x_vec[8];

  // pass 1 of 2: read x; keep x; sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    x_vec[v] = load<8>(x_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = static_cast<float>(x_vec[v].at[j]);
      const float square = x * x;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part);
  const float mean = sum_of_squares / 4096.0f;
  const float mean_plus_eps = mean + 1e-06f;
  const float rrms = rsqrtf(mean_plus_eps);

  // pass 2 of 2: read gain; max_of_magnitude = max(magnitude) of each 128; write values, scale
  #pragma unroll
  for (int v = 0; v < 8; ++v) leave_packed(x_vec[v]);
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    const Vec<__bf16, 8> gain_vec = load<8>(gain_ptr + col);
    Vec<unsigned char, 8> values_vec;
    float y_here[8];
    float max_of_magnitude_part = -INFINITY;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = static_cast<float>(x_vec[v].at[j]);
      const float gain = static_cast<float>(gain_vec.at[j]);
      const float normalized = x * rrms;
      const float y = normalized * gain;
      const float magnitude = fabsf(y);
      y_here[j] = y;
      max_of_magnitude_part = larger(max_of_magnitude_part, magnitude);
    }
    const float max_of_magnitude = group_max(max_of_magnitude_part);
    const float largest = larger(max_of_magnitude, 1e-04f);
    const float scale = largest / 448.0f;
    const float factor = 1.0f / scale;
    if (live && lane % 16 == 0) scale_row[col / scale_cols] = scale;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float y = y_here[j];
      const float mul = y * factor;
      values_vec.at[j] = to_f8e4m3(mul);
    }
    if (live) store<8>(values_row + col, values_vec);
  }
}
