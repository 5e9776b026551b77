// log_softmax  bf16[T, V] -> f32[T, V]  at T=4096 V=32000
// logits - max - log(sum(exp(logits - max))).
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// tile     a block of 256 threads a row, 32 x 4 elements a thread; read 2x, each time from DRAM
// traffic  1048.6 MB moved, 786.4 MB ideal, 1048.6 MB unfused in 1 launch
// floor    163.8 us at 4.8 TB/s; memory-bound at 1.00 flop/B
// rounding out to f32 when stored; f32 between
// needs    rows of 32000 elements, next to each other; logits: address and strides in multiples of 8 B;
//          out: address and strides in multiples of 16 B

#include <cuda_bf16.h>

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

// the largest of the values seen and the sum of exp(value - largest), in one walk: the sum shrinks as the largest grows
struct MaxSum {
  float top;
  float total;

  __device__ __forceinline__ void merge(float other_top, float other_total) {
    const float peak = larger(top, other_top);
    const float pivot = peak == -INFINITY ? 0.0f : peak;  // nothing seen yet: exp(-inf - 0) is 0, not NaN
    total = total * expf(top - pivot) + other_total * expf(other_top - pivot);
    top = peak;
  }
};

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// the largest value and the sum of exponentials below it over the 256 threads of a row, in every one of them
__device__ __forceinline__ MaxSum row_max_sum(MaxSum v, float* part_top, float* part_total) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v.merge(partner(v.top, step), partner(v.total, step));
  }
  if (threadIdx.x % 32 == 0) {
    part_top[threadIdx.x / 32] = v.top;
    part_total[threadIdx.x / 32] = v.total;
  }
  __syncthreads();
  v.top = part_top[threadIdx.x % 8];
  v.total = part_total[threadIdx.x % 8];
  #pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    v.merge(partner(v.top, step), partner(v.total, step));
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(256)
log_softmax(
    const __nv_bfloat16* __restrict__ logits_ptr,
    float* __restrict__ out_ptr,
    long long rows,
    long long logits_stride,
    long long out_stride)
{
  const int lane = threadIdx.x;  // of the 256 threads that share a row
  __shared__ float part[2][8];
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const __nv_bfloat16* const logits_row = logits_ptr + row * logits_stride;
    float* const out_row = out_ptr + row * out_stride;

    // walk 1 of 2: read logits; top = max(logits) and total = sum(exp(logits - top))
    MaxSum total_part = {-INFINITY, 0.0f};
    #pragma unroll 4
    for (int v = 0; v < 32; ++v) {
      const int col = (v * 256 + lane) * 4;
      if (col < 32000) {
        const Vec<__nv_bfloat16, 4> logits_vec = load<4>(logits_row + col);
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float logits = __bfloat162float(logits_vec.at[j]);
          total_part.merge(logits, 1.0f);
        }
      }
    }
    const MaxSum total_all = row_max_sum(total_part, part[0], part[1]);
    const float top = total_all.top;
    const float total = total_all.total;
    const bool eq = top == (-INFINITY);
    const float pivot = eq ? 0.0f : top;
    const bool eq_2 = total == 0.0f;
    const float log_ = logf(total);
    const float log_total = eq_2 ? 0.0f : log_;

    // walk 2 of 2: read logits; write out
    #pragma unroll 4
    for (int v = 0; v < 32; ++v) {
      const int col = (v * 256 + lane) * 4;
      if (col < 32000) {
        const Vec<__nv_bfloat16, 4> logits_vec = load<4>(logits_row + col);
        Vec<float, 4> out_vec;
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float logits = __bfloat162float(logits_vec.at[j]);
          const float shifted = logits - pivot;
          const float log_softmax = shifted - log_total;
          out_vec.at[j] = log_softmax;
        }
        store<4>(out_row + col, out_vec);
      }
    }
    if (row + gridDim.x < rows) __syncthreads();  // part is read before the next row writes it
  }
}
