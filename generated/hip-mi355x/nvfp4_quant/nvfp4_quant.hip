// nvfp4_quant  bf16[M, N_over_16, 8], bf16[M, N_over_16, 8], f32[1] -> f8e4m3[M, N_over_16, 1], u8[M, N_over_16, 8]  at M=16384
//   N_over_16=256
// x as f4e2m1 with a scale of f8e4m3 for each 16 of a row; x is near values * (scale * whole).
//
//     def nvfp4_quant(x, whole):
//         values, scale = F.quantize(x, f4e2m1, whole, rule="nvfp4")
//         return values, scale
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    x_even is x as [M, N // 16, 8]; x_odd is x as [M, N // 16, 8]
// tile     2 threads a row, 64 rows a block, 1 x 4 elements a thread; x_even, x_odd in registers
// traffic  172.0 MB moved, 172.0 MB ideal, 843.1 MB unfused in 2 launches
// floor    21.5 us at 8 TB/s; memory-bound at 3.07 flop/B
// rounding scale to f8e4m3 by an explicit cast; scale to f8e4m3 when stored; out0 to u8 when stored;
//          f32 between
// needs    rows of 8 elements, next to each other; x_even, x_odd: address and strides in multiples of
//          16 B; out0: address and strides in multiples of 4 B; x_even, x_odd: by turns the elements of
//          one array, in the vectors of x_even

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

#ifndef NAN
#define NAN __int_as_float(0x7fc00000)
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

// the smaller of two; NaN wins
__device__ __forceinline__ float smaller(float a, float b) {
  return __builtin_elementwise_minimum(a, b);
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

// the number that an f8e4m3 is
__device__ __forceinline__ float f8e4m3_value(unsigned char x) {
  const unsigned code = x & 0x7fu;
  if (code == 0x7fu) return NAN;
  const float size = code < 8u ? static_cast<float>(code) * 0.001953125f
      : __uint_as_float((code << 20) + 0x3c000000u);
  return x < 0x80 ? size : -size;
}

// x rounded to f8e4m3, of two to the even one, at most 448 in magnitude
__device__ __forceinline__ float round_f8e4m3(float x) {
  return f8e4m3_value(to_f8e4m3(x));
}

// the nibble of the nearest f4e2m1, of two the even one, at most 6 in magnitude; 7 of NaN
__device__ __forceinline__ int to_f4e2m1(float x) {
  if (x != x) return 7;
  const unsigned sign = __float_as_uint(x) >> 28 & 8u;
  const float size = fminf(fabsf(x), 6.0f);
  const unsigned bits = __float_as_uint(size);
  const unsigned small = __float_as_uint(size + 4194304.0f) - __float_as_uint(4194304.0f);  // halves
  const unsigned even = bits + 0x1fffffu + (bits >> 22 & 1u);
  constexpr unsigned bias = 2 * 126;  // exponents of f32 are so much larger; a bit of the mantissa is below
  return static_cast<int>(sign | (size < 1.0f ? small : (even >> 22) - bias));
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

// the largest value over the 2 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v) {
  v = larger(v, partner(v, 1));
  return v;
}

extern "C" __global__ void __launch_bounds__(128)
nvfp4_quant(
    const __bf16* __restrict__ x_even_ptr,
    const __bf16* __restrict__ x_odd_ptr,
    const float* __restrict__ whole_ptr,
    unsigned char* __restrict__ scale_ptr,
    unsigned char* __restrict__ out0_ptr,
    long long M_size,
    long long N_over_16_size,
    long long x_even_stride_M,
    long long x_even_stride_N_over_16,
    long long scale_stride_M,
    long long scale_stride_N_over_16,
    long long out0_stride_M,
    long long out0_stride_N_over_16)
{
  constexpr int block_rows = 64;  // that a block takes
  constexpr int row_threads = 2;
  const int lane = threadIdx.x % row_threads;  // of the 2 threads that share a row
  const long long rows = M_size * N_over_16_size;
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned M_at = static_cast<unsigned>(row) / static_cast<unsigned>(N_over_16_size);
  const unsigned N_over_16_at = static_cast<unsigned>(row) % static_cast<unsigned>(N_over_16_size);
  const __bf16* const x_even_row = x_even_ptr + M_at * x_even_stride_M + N_over_16_at * x_even_stride_N_over_16;
  unsigned char* const scale_row = scale_ptr + unknown(M_at * scale_stride_M + N_over_16_at * scale_stride_N_over_16);
  unsigned char* const out0_row = out0_ptr + unknown(M_at * out0_stride_M + N_over_16_at * out0_stride_N_over_16);
  const float whole = *whole_ptr;
  const float up = 1.0f / whole;
  const float mul = up * 0.16666667f;
  const int col = lane * 4;
  Vec<__bf16, 8> x_even_vec;

  // pass 1 of 2: read x_even, x_odd; keep x_even, x_odd; max_of_magnitude = max(magnitude)
  float max_of_magnitude_part = -INFINITY;
  {
    x_even_vec = load<8>(x_even_row + col * 2);
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x_even = static_cast<float>(x_even_vec.at[2 * j]);
      const float x_odd = static_cast<float>(x_even_vec.at[2 * j + 1]);
      const float abs_ = fabsf(x_even);
      const float abs_of_factor = fabsf(x_odd);
      const float magnitude = larger(abs_, abs_of_factor);
      max_of_magnitude_part = larger(max_of_magnitude_part, magnitude);
    }
  }
  const float max_of_magnitude = row_max(max_of_magnitude_part);
  const float max_of_magnitude_times_mul = max_of_magnitude * mul;
  const float minimum = smaller(max_of_magnitude_times_mul, 3.4028235e+38f);
  const float scale = round_f8e4m3(minimum);
  const float scale_times_whole = scale * whole;
  const float quotient = 1.0f / scale_times_whole;
  const float factor = smaller(quotient, 3.4028235e+38f);
  if (live && lane == 0) *scale_row = to_f8e4m3(minimum);

  // pass 2 of 2: write out0
  {
    Vec<unsigned char, 4> out0_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x_even = static_cast<float>(x_even_vec.at[2 * j]);
      const float x_odd = static_cast<float>(x_even_vec.at[2 * j + 1]);
      const float x_even_times_factor = x_even * factor;
      const float x_odd_times_factor = x_odd * factor;
      const int code_of_f4e2m1 = to_f4e2m1(x_even_times_factor);
      const int bit_and = code_of_f4e2m1 & 15;
      const int code_of_f4e2m1_from_x_odd = to_f4e2m1(x_odd_times_factor);
      const int bit_and_from_x_odd = code_of_f4e2m1_from_x_odd & 15;
      const int shift_left = static_cast<int>(static_cast<unsigned>(bit_and_from_x_odd) << 4);
      const int bit_or = bit_and | shift_left;
      out0_vec.at[j] = static_cast<unsigned char>(min(max(bit_or, 0), 255));
    }
    if (live) store<4>(out0_row + col, out0_vec);
  }
}
