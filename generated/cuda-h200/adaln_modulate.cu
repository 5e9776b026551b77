// adaln_modulate  bf16[B, S, N], bf16[B, 1, N], bf16[B, 1, N] -> bf16[B, S, N]  at B=16 S=1024 N=3072
// LayerNorm(x) * (1 + scale) + shift, the scale and the shift those of the sample.
//
//     def adaln_modulate(x, scale, shift):
//         return F.layernorm(x, eps=1e-6) * (1 + scale) + shift
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// tile     a block of 128 threads a row, 3 x 8 elements a thread; x, centered in registers
// traffic  201.5 MB moved, 201.5 MB ideal, 705.0 MB unfused in 4 launches
// floor    42.0 us at 4.8 TB/s; memory-bound at 2.00 flop/B
// rounding out to bf16 when stored; f32 between
// needs    rows of 3072 elements, next to each other; x, scale, shift_value, out: address and strides
//          in multiples of 16 B

#include <cuda_bf16.h>

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

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// the sum over the 128 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 4];
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(128)
adaln_modulate(
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ scale_ptr,
    const __nv_bfloat16* __restrict__ shift_value_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
    long long B_size,
    long long S_size,
    long long x_stride_B,
    long long x_stride_S,
    long long scale_stride_B,
    long long shift_value_stride_B,
    long long out_stride_B,
    long long out_stride_S)
{
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  __shared__ float part[2][4];
  const long long row = blockIdx.x;
  const unsigned B_at = static_cast<unsigned>(row) / static_cast<unsigned>(S_size);
  const unsigned S_at = static_cast<unsigned>(row) % static_cast<unsigned>(S_size);
  const __nv_bfloat16* const x_row = x_ptr + B_at * x_stride_B + S_at * x_stride_S;
  const __nv_bfloat16* const scale_row = scale_ptr + B_at * scale_stride_B;
  const __nv_bfloat16* const shift_value_row = shift_value_ptr + B_at * shift_value_stride_B;
  __nv_bfloat16* const out_row = out_ptr + B_at * out_stride_B + S_at * out_stride_S;
  Vec<__nv_bfloat16, 8> scale_vec[3];
  Vec<__nv_bfloat16, 8> shift_value_vec[3];
  Vec<__nv_bfloat16, 8> x_vec[3];
  float centered_kept[3][8];

  // pass 1 of 3: read scale, shift_value ahead; read x; keep x; sum_of_x = sum(x)
  float sum_of_x_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 3; ++v) {
    const int col = (v * row_threads + lane) * 8;
    scale_vec[v] = load<8>(scale_row + col);
    shift_value_vec[v] = load<8>(shift_value_row + col);
    x_vec[v] = load<8>(x_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 3; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = __bfloat162float(x_vec[v].at[j]);
      sum_of_x_part += x;
    }
  }
  const float sum_of_x = row_sum(sum_of_x_part, part[0]);
  const float mean = sum_of_x / 3072.0f;

  // pass 2 of 3: keep centered; sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 3; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = __bfloat162float(x_vec[v].at[j]);
      const float centered = x - mean;
      const float square = centered * centered;
      centered_kept[v][j] = centered;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[1]);
  const float variance = sum_of_squares / 3072.0f;
  const float variance_plus_eps = variance + 1e-06f;
  const float rstd = rsqrtf(variance_plus_eps);

  // pass 3 of 3: write out
  #pragma unroll
  for (int v = 0; v < 3; ++v) {
    const int col = (v * row_threads + lane) * 8;
    Vec<__nv_bfloat16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float scale = __bfloat162float(scale_vec[v].at[j]);
      const float shift_value = __bfloat162float(shift_value_vec[v].at[j]);
      const float centered = centered_kept[v][j];
      const float normalized = centered * rstd;
      const float add = 1.0f + scale;
      const float mul = normalized * add;
      const float mul_plus_shift_value = mul + shift_value;
      out_vec.at[j] = __float2bfloat16_rn(mul_plus_shift_value);
    }
    store<8>(out_row + col, out_vec);
  }
}
