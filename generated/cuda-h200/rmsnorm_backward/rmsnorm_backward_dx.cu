// rmsnorm_backward_dx  bf16[M, N], bf16[M, N], bf16[N], f32[M, 1] -> bf16[M, N], f32[396, N]  at M=16384 N=4096
// dx, dgamma_parts of rmsnorm_backward.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// tile     396 parts of the rows, each in turn by a block of 256 threads a row, 4 x 4 elements a
//          thread; 2 rows ahead in shared memory; sums of columns in registers
// traffic  409.2 MB moved, 409.2 MB ideal, 4167.5 MB unfused in 9 launches
// floor    85.3 us at 4.8 TB/s; memory-bound at 1.48 flop/B
// rounding dx to bf16 when stored; f32 between
// needs    rows of 4096 elements, next to each other; dy, x, gamma, dx: address and strides in
//          multiples of 8 B; dgamma_parts: address and strides in multiples of 16 B; gamma [N],
//          dgamma_parts [396, N] shared by every row
// launch   lets the next one begin once all its blocks run

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

extern "C" __global__ void __launch_bounds__(256, 4)
rmsnorm_backward_dx(
    const __nv_bfloat16* __restrict__ dy_ptr,
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ gamma_ptr,
    const float* __restrict__ rstd_ptr,
    __nv_bfloat16* __restrict__ dx_ptr,
    float* __restrict__ dgamma_parts_ptr,
    long long rows,
    long long dy_stride,
    long long x_stride,
    long long rstd_stride,
    long long dx_stride)
{
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin, once all blocks of this one run
  constexpr int row_threads = 256;
  constexpr int cols = 4096;
  constexpr int x_kept_byte = 16384;  // of shared memory
  constexpr int vectors = 4;  // of a thread in a row
  const int lane = threadIdx.x;  // of the 256 threads that share a row
  __shared__ float part[2][1][8];
  extern __shared__ __align__(16) unsigned char shared[];
  Vec<__nv_bfloat16, 4>* const dy_kept = reinterpret_cast<Vec<__nv_bfloat16, 4>*>(shared);
  Vec<__nv_bfloat16, 4>* const x_kept = reinterpret_cast<Vec<__nv_bfloat16, 4>*>(shared + x_kept_byte);
  const long long step = gridDim.x;  // parts of the rows: of each, its rows are so many apart
  const long long first = blockIdx.x;  // row of this part, and its number
  float dgamma_parts_part[4][4] = {};  // of this thread's columns

  // read gamma, which all rows share
  Vec<__nv_bfloat16, 4> gamma_vec[4];
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 4;
    gamma_vec[v] = load<4>(gamma_ptr + col);
  }

  // ask for the first rows' dy, x
  constexpr int slots = 2;
  float rstd_read{};
  if (first < rows) rstd_read = *(rstd_ptr + first * rstd_stride);
  for (int s = 0; s < slots; ++s) {
    const long long ahead = first + s * step;
    if (ahead < rows) {
      #pragma unroll
      for (int v = 0; v < 4; ++v) {
        const int col = (v * row_threads + lane) * 4;
        copy_async<4>(&dy_kept[(s * vectors + v) * row_threads + threadIdx.x], dy_ptr + ahead * dy_stride + col);
        copy_async<4>(&x_kept[(s * vectors + v) * row_threads + threadIdx.x], x_ptr + ahead * x_stride + col);
      }
    }
    commit_copies();
  }
  int slot = 0;
  int turn = 0;  // of two: a block may be a reduction ahead of its neighbours
  for (long long row = first; row < rows; row += step) {
    wait_copies<slots - 1>();
    __nv_bfloat16* const dx_row = dx_ptr + row * dx_stride;
    const float rstd = rstd_read;
    if (row + step < rows) rstd_read = *(rstd_ptr + (row + step) * rstd_stride);

    // pass 1 of 2: read dy, x; sum_of_products = sum(g_times_normed); dgamma_parts = sum(dy_times_normed) over rows
    float sum_of_products_part = 0.0f;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const Vec<__nv_bfloat16, 4> dy_vec = dy_kept[(slot * vectors + v) * row_threads + threadIdx.x];
      const Vec<__nv_bfloat16, 4> x_vec = x_kept[(slot * vectors + v) * row_threads + threadIdx.x];
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float dy = __bfloat162float(dy_vec.at[j]);
        const float x = __bfloat162float(x_vec.at[j]);
        const float gamma = __bfloat162float(gamma_vec[v].at[j]);
        const float normed = x * rstd;
        const float g = dy * gamma;
        const float g_times_normed = g * normed;
        const float dy_times_normed = dy * normed;
        sum_of_products_part += g_times_normed;
        dgamma_parts_part[v][j] += dy_times_normed;
      }
    }
    const float sum_of_products = row_sum(sum_of_products_part, part[turn][0]);
    const float mean = sum_of_products / 4096.0f;

    // pass 2 of 2: read dy, x; write dx
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int col = (v * row_threads + lane) * 4;
      const Vec<__nv_bfloat16, 4> dy_vec = dy_kept[(slot * vectors + v) * row_threads + threadIdx.x];
      const Vec<__nv_bfloat16, 4> x_vec = x_kept[(slot * vectors + v) * row_threads + threadIdx.x];
      Vec<__nv_bfloat16, 4> dx_vec;
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float dy = __bfloat162float(dy_vec.at[j]);
        const float x = __bfloat162float(x_vec.at[j]);
        const float gamma = __bfloat162float(gamma_vec[v].at[j]);
        const float normed = x * rstd;
        const float g = dy * gamma;
        const float normed_times_mean = normed * mean;
        const float sub = g - normed_times_mean;
        const float dx = rstd * sub;
        dx_vec.at[j] = __float2bfloat16_rn(dx);
      }
      store<4>(dx_row + col, dx_vec);
    }

    // ask for a row to come, in this one's place
    const long long ahead = row + slots * step;
    if (ahead < rows) {
      #pragma unroll
      for (int v = 0; v < 4; ++v) {
        const int col = (v * row_threads + lane) * 4;
        copy_async<4>(&dy_kept[(slot * vectors + v) * row_threads + threadIdx.x], dy_ptr + ahead * dy_stride + col);
        copy_async<4>(&x_kept[(slot * vectors + v) * row_threads + threadIdx.x], x_ptr + ahead * x_stride + col);
      }
    }
    commit_copies();
    slot = slot + 1 == slots ? 0 : slot + 1;
    turn ^= 1;
  }

  // what this part makes of each column
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 4;
    Vec<float, 4> dgamma_parts_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) dgamma_parts_vec.at[j] = dgamma_parts_part[v][j];
    store<4>(dgamma_parts_ptr + first * cols + col, dgamma_parts_vec);
  }
}
