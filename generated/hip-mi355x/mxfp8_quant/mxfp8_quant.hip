// mxfp8_quant  bf16[M, N_over_32, 32] -> f8e4m3[M, N_over_32, 32], f8e8m0[M, N_over_32, 1]  at M=16384 N_over_32=128
// x as f8e4m3 with a scale of f8e8m0 for each 32 of a row.
//
//     def mxfp8_quant(x):
//         values, scale = F.quantize(x, f8e4m3, rule="mx")
//         return values, scale
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    x_part is x as [M, N // 32, 32]
// tile     4 threads a row, 32 rows a block, 1 x 8 elements a thread; x_part in registers
// traffic  203.4 MB moved, 203.4 MB ideal, 337.6 MB unfused in 1 launch
// floor    25.4 us at 8 TB/s; memory-bound at 1.14 flop/B
// rounding values to f8e4m3 when stored; scale to f8e8m0 when stored; f32 between
// needs    rows of 32 elements, next to each other; x_part: address and strides in multiples of 16 B;
//          values: address and strides in multiples of 8 B

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

// the nearest power of 2 as its exponent, of two the larger one, from 2^-127 to 2^127; 0xff of NaN
__device__ __forceinline__ unsigned char to_f8e8m0(float x) {
  if (x != x) return 0xff;
  const unsigned bits = __float_as_uint(fminf(fmaxf(x, 5.87747175e-39f), 1.70141183e+38f));
  return static_cast<unsigned char>(bits > 0x400000u ? (bits + 0x400000u) >> 23 : 0u);
}

// the least power of 2 from x on, within 2^-126 to 2^127; 2^127 of NaN
__device__ __forceinline__ float power_of_2_above(float x) {
  if (!(x < 1.70141183e+38f)) return 1.70141183e+38f;
  const unsigned up = __float_as_uint(x) + 0x7fffffu;
  return x <= 1.17549435e-38f ? 1.17549435e-38f : __uint_as_float(up & 0x7f800000u);
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

// the largest value over the 4 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v) {
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(128)
mxfp8_quant(
    const __bf16* __restrict__ x_part_ptr,
    unsigned char* __restrict__ values_ptr,
    unsigned char* __restrict__ scale_ptr,
    long long rows,
    long long x_part_stride,
    long long values_stride,
    long long scale_stride)
{
  constexpr int block_rows = 32;  // that a block takes
  constexpr int row_threads = 4;
  const int lane = threadIdx.x % row_threads;  // of the 4 threads that share a row
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const __bf16* const x_part_row = x_part_ptr + row * x_part_stride;
  unsigned char* const values_row = values_ptr + row * values_stride;
  unsigned char* const scale_row = scale_ptr + row * scale_stride;
  const int col = lane * 8;
  Vec<__bf16, 8> x_part_vec;

  // pass 1 of 2: read x_part; keep x_part; largest = max(magnitude)
  float largest_part = -INFINITY;
  {
    x_part_vec = load<8>(x_part_row + col);
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x_part = static_cast<float>(x_part_vec.at[j]);
      const float magnitude = fabsf(x_part);
      largest_part = larger(largest_part, magnitude);
    }
  }
  const float largest = row_max(largest_part);
  const float small = largest * 0.002232143f;
  const bool whole = small == small;
  const bool le = small <= 5.877472e-39f;
  const float power_of_2_above_ = power_of_2_above(small);
  const float scale = le ? 5.877472e-39f : power_of_2_above_;
  const bool scale_is_eps = scale == 5.877472e-39f;
  const bool eq = scale == 1.7014118e+38f;
  const float one_over_scale = 1.0f / scale;
  const float where = eq ? 0.0f : one_over_scale;
  const float up = scale_is_eps ? 1.0f : where;
  const float factor = whole ? up : NAN;
  const float where_of_factor = whole ? scale : NAN;
  if (live && lane == 0) *scale_row = to_f8e8m0(where_of_factor);

  // pass 2 of 2: write values
  {
    Vec<unsigned char, 8> values_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x_part = static_cast<float>(x_part_vec.at[j]);
      const float mul = x_part * factor;
      values_vec.at[j] = to_f8e4m3(mul);
    }
    if (live) store<8>(values_row + col, values_vec);
  }
}
