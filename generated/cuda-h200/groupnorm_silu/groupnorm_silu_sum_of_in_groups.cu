// groupnorm_silu_sum_of_in_groups  bf16[B, 32, C_times_S] -> f32[B, 32, 1], f32[B, 32, 1]  at B=16 C_times_S=40960
// sum_of_in_groups, sum_of_squares of groupnorm_silu.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// views    in_groups is x as [B, 32, C * S]
// tile     a block of 512 threads a row, 10 x 8 elements a thread; in_groups in shared memory
// traffic  41.9 MB moved, 41.9 MB ideal, 41.9 MB unfused in 1 launch
// floor    8.7 us at 4.8 TB/s; memory-bound at 2.00 flop/B
// needs    rows of 40960 elements, next to each other; in_groups: address and strides in multiples of
//          16 B
// launch   lets the next one begin once all its blocks run

#include <cuda_bf16.h>

// N values that move together, 16 bytes at a time where they fill them
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
};

// N values on their way from global to shared memory, past the registers; aligned to their size, of 4, 8 or 16 bytes
template <int N, typename T>
__device__ __forceinline__ void copy_async(Vec<T, N>* to, const T* from) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (sizeof(*to) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(place), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
        :: "r"(place), "l"(from), "n"(sizeof(*to)) : "memory");
  }
}

// the copies since the last call become one group
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// waits for the thread's own groups, all but the last Pending
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");
}

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// the sum over the 512 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 16];
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(512)
groupnorm_silu_sum_of_in_groups(
    const __nv_bfloat16* __restrict__ in_groups_ptr,
    float* __restrict__ sum_of_in_groups_ptr,
    float* __restrict__ sum_of_squares_ptr,
    long long rows,
    long long in_groups_stride,
    long long sum_of_in_groups_stride,
    long long sum_of_squares_stride)
{
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin, once all blocks of this one run
  constexpr int row_threads = 512;
  const int lane = threadIdx.x;  // of the 512 threads that share a row
  __shared__ float part[2][16];
  extern __shared__ __align__(16) unsigned char shared[];
  Vec<__nv_bfloat16, 8>* const in_groups_kept = reinterpret_cast<Vec<__nv_bfloat16, 8>*>(shared);
  const long long row = blockIdx.x;
  const __nv_bfloat16* const in_groups_row = in_groups_ptr + row * in_groups_stride;
  float* const sum_of_in_groups_row = sum_of_in_groups_ptr + row * sum_of_in_groups_stride;
  float* const sum_of_squares_row = sum_of_squares_ptr + row * sum_of_squares_stride;

  // pass 1 of 2: read in_groups; keep in_groups; sum_of_in_groups = sum(in_groups)
  float sum_of_in_groups_part = 0.0f;
  #pragma unroll 4
  for (int v = 0; v < 10; ++v) {
    const int col = (v * row_threads + lane) * 8;
    copy_async<8>(&in_groups_kept[v * row_threads + lane], in_groups_row + col);
    commit_copies();
  }
  #pragma unroll 4
  for (int v = 0; v < 10; ++v) {
    wait_copies<9>();
    commit_copies();  // of nothing: so that as many are pending at every turn
    const Vec<__nv_bfloat16, 8> in_groups_vec = in_groups_kept[v * row_threads + lane];
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float in_groups = __bfloat162float(in_groups_vec.at[j]);
      sum_of_in_groups_part += in_groups;
    }
  }
  const float sum_of_in_groups = row_sum(sum_of_in_groups_part, part[0]);
  const float mean = sum_of_in_groups / 40960.0f;
  if (lane == 0) *sum_of_in_groups_row = sum_of_in_groups;

  // pass 2 of 2: sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  #pragma unroll 4
  for (int v = 0; v < 10; ++v) {
    const Vec<__nv_bfloat16, 8> in_groups_vec = in_groups_kept[v * row_threads + lane];
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float in_groups = __bfloat162float(in_groups_vec.at[j]);
      const float in_groups_minus_mean = in_groups - mean;
      const float square = in_groups_minus_mean * in_groups_minus_mean;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[1]);
  if (lane == 0) *sum_of_squares_row = sum_of_squares;
}
