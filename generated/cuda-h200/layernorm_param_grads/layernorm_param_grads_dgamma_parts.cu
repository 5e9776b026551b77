// layernorm_param_grads_dgamma_parts  bf16[M, N], bf16[M, N], f32[M, 1], f32[M, 1] -> f32[264, N], f32[264, N]  at M=16384 N=4096
// dgamma_parts, dbeta_parts of layernorm_param_grads.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// tile     264 parts of the rows, each in turn by a block of 512 threads a row, 1 x 8 elements a
//          thread; 2 rows ahead in shared memory; sums of columns in registers
// traffic  277.2 MB moved, 277.2 MB ideal, 2022.0 MB unfused in 5 launches
// floor    57.8 us at 4.8 TB/s; memory-bound at 1.21 flop/B
// needs    rows of 4096 elements, next to each other; dy, x, dgamma_parts, dbeta_parts: address and
//          strides in multiples of 16 B; dgamma_parts [264, N], dbeta_parts [264, N] shared by every
//          row
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

// the vector to p, 16 bytes at a time
template <int N, typename T>
__device__ __forceinline__ void store_words(T* p, const Vec<T, N>& v) {
  static_assert(sizeof(v) % 16 == 0);
  const uint4* const words = reinterpret_cast<const uint4*>(&v);
  #pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(v) / 16); ++i) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
        :: "l"(reinterpret_cast<uint4*>(p) + i),
        "r"(words[i].x), "r"(words[i].y), "r"(words[i].z), "r"(words[i].w));
  }
}

extern "C" __global__ void __launch_bounds__(512, 2)
layernorm_param_grads_dgamma_parts(
    const __nv_bfloat16* __restrict__ dy_ptr,
    const __nv_bfloat16* __restrict__ x_ptr,
    const float* __restrict__ mean_ptr,
    const float* __restrict__ rstd_ptr,
    float* __restrict__ dgamma_parts_ptr,
    float* __restrict__ dbeta_parts_ptr,
    long long rows,
    long long dy_stride,
    long long x_stride,
    long long mean_stride,
    long long rstd_stride)
{
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin, once all blocks of this one run
  constexpr int cols = 4096;
  constexpr int x_kept_byte = 16384;  // of shared memory
  constexpr int row_threads = 512;
  const int lane = threadIdx.x;  // of the 512 threads that share a row
  extern __shared__ __align__(16) unsigned char shared[];
  Vec<__nv_bfloat16, 8>* const dy_kept = reinterpret_cast<Vec<__nv_bfloat16, 8>*>(shared);
  Vec<__nv_bfloat16, 8>* const x_kept = reinterpret_cast<Vec<__nv_bfloat16, 8>*>(shared + x_kept_byte);
  const long long step = gridDim.x;  // parts of the rows: of each, its rows are so many apart
  const long long first = blockIdx.x;  // row of this part, and its number
  float dgamma_parts_part[8] = {};  // of this thread's columns
  float dbeta_parts_part[8] = {};  // of this thread's columns

  // ask for the first rows' dy, x
  constexpr int slots = 2;
  float mean_read{};
  if (first < rows) mean_read = *(mean_ptr + first * mean_stride);
  float rstd_read{};
  if (first < rows) rstd_read = *(rstd_ptr + first * rstd_stride);
  for (int s = 0; s < slots; ++s) {
    const long long ahead = first + s * step;
    if (ahead < rows) {
      const int col = lane * 8;
      copy_async<8>(&dy_kept[s * row_threads + threadIdx.x], dy_ptr + ahead * dy_stride + col);
      copy_async<8>(&x_kept[s * row_threads + threadIdx.x], x_ptr + ahead * x_stride + col);
    }
    commit_copies();
  }
  int slot = 0;
  for (long long row = first; row < rows; row += step) {
    wait_copies<slots - 1>();
    const float mean = mean_read;
    const float rstd = rstd_read;
    const int col = lane * 8;
    if (row + step < rows) mean_read = *(mean_ptr + (row + step) * mean_stride);
    if (row + step < rows) rstd_read = *(rstd_ptr + (row + step) * rstd_stride);

    // pass 1 of 1: read dy, x; dgamma_parts = sum(mul) over rows; dbeta_parts = sum(dy) over rows
    {
      const Vec<__nv_bfloat16, 8> dy_vec = dy_kept[slot * row_threads + threadIdx.x];
      const Vec<__nv_bfloat16, 8> x_vec = x_kept[slot * row_threads + threadIdx.x];
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float dy = __bfloat162float(dy_vec.at[j]);
        const float x = __bfloat162float(x_vec.at[j]);
        const float x_minus_mean = x - mean;
        const float normed = x_minus_mean * rstd;
        const float mul = dy * normed;
        dgamma_parts_part[j] += mul;
        dbeta_parts_part[j] += dy;
      }
    }

    // ask for a row to come, in this one's place
    const long long ahead = row + slots * step;
    if (ahead < rows) {
      const int col = lane * 8;
      copy_async<8>(&dy_kept[slot * row_threads + threadIdx.x], dy_ptr + ahead * dy_stride + col);
      copy_async<8>(&x_kept[slot * row_threads + threadIdx.x], x_ptr + ahead * x_stride + col);
    }
    commit_copies();
    slot = slot + 1 == slots ? 0 : slot + 1;
  }

  // what this part makes of each column
  {
    const int col = lane * 8;
    Vec<float, 8> dgamma_parts_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) dgamma_parts_vec.at[j] = dgamma_parts_part[j];
    store_words<8>(dgamma_parts_ptr + first * cols + col, dgamma_parts_vec);
    Vec<float, 8> dbeta_parts_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) dbeta_parts_vec.at[j] = dbeta_parts_part[j];
    store_words<8>(dbeta_parts_ptr + first * cols + col, dbeta_parts_vec);
  }
}
