// decoder_layer_sum_of_squares_2  bf16[B, D], f32[B, D] -> f32[B, 1]  at B=8 D=4096
// sum_of_squares_2 of decoder_layer.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// tile     a block of 256 threads a row, 4 x 4 elements a thread; one pass, nothing kept
// traffic  0.2 MB moved, 0.2 MB ideal, 0.7 MB unfused in 3 launches
// floor    0.0 us at 4.8 TB/s; memory-bound at 0.67 flop/B
// rounding h to bf16 by an explicit cast; f32 between
// needs    rows of 4096 elements, next to each other; x: address and strides in multiples of 8 B;
//          matmul_wo: address and strides in multiples of 16 B
// launch   begins while the kernels before it run, and waits for them before all else; lets the next
//          one begin once all its blocks run

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

// x rounded to bf16, nearest even
__device__ __forceinline__ float round_bf16(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// the sum over the 256 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 8];
  #pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(256)
decoder_layer_sum_of_squares_2(
    const __nv_bfloat16* __restrict__ x_ptr,
    const float* matmul_wo_ptr,
    float* __restrict__ sum_of_squares_2_ptr,
    long long rows,
    long long x_stride,
    long long matmul_wo_stride,
    long long sum_of_squares_2_stride)
{
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin, once all blocks of this one run
  asm volatile("griddepcontrol.wait;" ::: "memory");  // until the kernels before this one have ended
  constexpr int row_threads = 256;
  const int lane = threadIdx.x;  // of the 256 threads that share a row
  __shared__ float part[1][8];
  const long long row = blockIdx.x;
  const __nv_bfloat16* const x_row = x_ptr + row * x_stride;
  const float* const matmul_wo_row = matmul_wo_ptr + row * matmul_wo_stride;
  float* const sum_of_squares_2_row = sum_of_squares_2_ptr + row * sum_of_squares_2_stride;

  // pass 1 of 1: read matmul_wo, x; sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  Vec<float, 4> matmul_wo_vec[4];
  Vec<__nv_bfloat16, 4> x_vec[4];
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 4;
    matmul_wo_vec[v] = load<4>(matmul_wo_row + col);
    x_vec[v] = load<4>(x_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float matmul_wo = matmul_wo_vec[v].at[j];
      const float x = __bfloat162float(x_vec[v].at[j]);
      const float add = x + matmul_wo;
      const float h = round_bf16(add);
      const float square = h * h;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[0]);
  if (lane == 0) *sum_of_squares_2_row = sum_of_squares;
}
