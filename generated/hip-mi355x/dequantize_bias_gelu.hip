// dequantize_bias_gelu  f8e4m3[M, N], f32[M, 1], bf16[N] -> bf16[M, N]  at M=8192 N=4096
// gelu(values * scale + bias), with a scale for each row.
//
//     def dequantize_bias_gelu(values, scale, bias):
//         return F.gelu(F.dequantize(values, scale) + bias)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     tiles of rows and columns; a block of 128 threads on 1 row, 8 elements a thread
// traffic  100.7 MB moved, 100.7 MB ideal, 637.6 MB unfused in 3 launches
// floor    12.6 us at 8 TB/s; memory-bound at 6.00 flop/B
// rounding out to bf16 when stored; f32 between
// needs    rows of 4096 elements, next to each other; values_value: address and strides in multiples of
//          8 B; bias, out: address and strides in multiples of 16 B; bias [N] shared by every row

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

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  return __builtin_amdgcn_exp2f(x);
}

// 1 / x, within 1 ulp; above 2^126 it is 0
__device__ __forceinline__ float reciprocal(float x) {
  return __builtin_amdgcn_rcpf(x);
}

// the number that an f8e4m3 is
__device__ __forceinline__ float f8e4m3_value(unsigned char x) {
  const unsigned code = x & 0x7fu;
  if (code == 0x7fu) return NAN;
  const float size = code < 8u ? static_cast<float>(code) * 0.001953125f
      : __uint_as_float((code << 20) + 0x3c000000u);
  return x < 0x80 ? size : -size;
}

// x (1 + tanh u) / 2 as x / (1 + e^-2u), with -2u log2 e in one polynomial: u = sqrt(2 / pi) (x + 0.044715 x^3)
__device__ __forceinline__ float gelu_by_tanh(float x) {
  return x * reciprocal(1.0f + power_of_2(x * (-2.30220819f - 0.102943240f * x * x)));
}

extern "C" __global__ void __launch_bounds__(128)
dequantize_bias_gelu(
    const unsigned char* __restrict__ values_value_ptr,
    const float* __restrict__ scale_ptr,
    const __bf16* __restrict__ bias_ptr,
    __bf16* __restrict__ out_ptr,
    long long rows,
    long long values_value_stride,
    long long scale_stride,
    long long out_stride)
{
  constexpr int tile_cols = 1024;  // that a block takes
  constexpr int row_blocks = 4;  // that share a row
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= rows * row_blocks) return;  // the grid's last line is longer than what is left
  const long long row = tile / row_blocks;
  const unsigned char* const values_value_row = values_value_ptr + row * values_value_stride;
  const float* const scale_row = scale_ptr + row * scale_stride;
  __bf16* const out_row = out_ptr + row * out_stride;
  const float scale = *scale_row;
  const int col = static_cast<int>(tile % row_blocks) * tile_cols + lane * 8;

  // pass 1 of 1: read values_value, bias; write out
  {
    const Vec<unsigned char, 8> values_value_vec = load<8>(values_value_row + col);
    const Vec<__bf16, 8> bias_vec = load<8>(bias_ptr + col);
    Vec<__bf16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float values_value = f8e4m3_value(values_value_vec.at[j]);
      const float bias = static_cast<float>(bias_vec.at[j]);
      const float dequantize = values_value * scale;
      const float add = dequantize + bias;
      const float gelu = gelu_by_tanh(add);
      out_vec.at[j] = static_cast<__bf16>(gelu);
    }
    store<8>(out_row + col, out_vec);
  }
}
