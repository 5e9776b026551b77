// silu_mul_quant_row  bf16[M, N], bf16[M, N] -> f8e4m3[M, N], f32[M, 1]  at M=8192 N=14336
// silu(gate) * up as f8e4m3 with a scale for each row.
//
//     def silu_mul_quant_row(gate, up):
//         values, scale = F.quantize(F.silu(gate) * up, f8e4m3)
//         return values, scale
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a block of 256 threads a row, 7 x 8 elements a thread; silu_times_up in registers
// traffic  587.2 MB moved, 587.2 MB ideal, 1761.6 MB unfused in 3 launches
// floor    73.4 us at 8 TB/s; memory-bound at 2.80 flop/B
// rounding values to f8e4m3 when stored; f32 between
// needs    rows of 14336 elements, next to each other; gate, up: address and strides in multiples of 16
//          B; values: address and strides in multiples of 8 B

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

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
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

// the largest value over the 256 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 4];
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(256)
silu_mul_quant_row(
    const __bf16* __restrict__ gate_ptr,
    const __bf16* __restrict__ up_ptr,
    unsigned char* __restrict__ values_ptr,
    float* __restrict__ scale_ptr,
    long long rows,
    long long gate_stride,
    long long up_stride,
    long long values_stride,
    long long scale_stride)
{
  constexpr int row_threads = 256;
  const int lane = threadIdx.x;  // of the 256 threads that share a row
  __shared__ float part[1][4];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const __bf16* const gate_row = gate_ptr + row * gate_stride;
  const __bf16* const up_row = up_ptr + row * up_stride;
  unsigned char* const values_row = values_ptr + row * values_stride;
  float* const scale_row = scale_ptr + row * scale_stride;
  float silu_times_up_kept[7][8];

  // pass 1 of 2: read gate, up; keep silu_times_up; max_of_magnitude = max(magnitude)
  float max_of_magnitude_part = -INFINITY;
  Vec<__bf16, 8> gate_vec[7];
  Vec<__bf16, 8> up_vec[7];
  #pragma unroll
  for (int v = 0; v < 7; ++v) {
    const int col = (v * row_threads + lane) * 8;
    gate_vec[v] = load<8>(gate_row + col);
    up_vec[v] = load<8>(up_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 7; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float gate = static_cast<float>(gate_vec[v].at[j]);
      const float up = static_cast<float>(up_vec[v].at[j]);
      const float silu = gate * reciprocal(1.0f + exponential(-gate));
      const float silu_times_up = silu * up;
      const float magnitude = fabsf(silu_times_up);
      silu_times_up_kept[v][j] = silu_times_up;
      max_of_magnitude_part = larger(max_of_magnitude_part, magnitude);
    }
  }
  const float max_of_magnitude = row_max(max_of_magnitude_part, part[0]);
  const float largest = larger(max_of_magnitude, 1e-12f);
  const float scale = largest / 448.0f;
  const float factor = 1.0f / scale;
  if (lane == 0) *scale_row = scale;

  // pass 2 of 2: write values
  #pragma unroll
  for (int v = 0; v < 7; ++v) {
    const int col = (v * row_threads + lane) * 8;
    Vec<unsigned char, 8> values_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float silu_times_up = silu_times_up_kept[v][j];
      const float silu_times_up_times_factor = silu_times_up * factor;
      values_vec.at[j] = to_f8e4m3(silu_times_up_times_factor);
    }
    store<8>(values_row + col, values_vec);
  }
}
