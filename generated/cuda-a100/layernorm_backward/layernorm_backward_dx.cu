// layernorm_backward_dx  bf16[M, N], bf16[M, N], bf16[N], f32[M, 1], f32[M, 1] -> bf16[M, N], f32[108, N], f32[108, N]  at M=1024 N=12288
// dx, dgamma_parts, dbeta_parts of layernorm_backward.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// tile     108 parts of the rows, each in turn by a block of 512 threads a row, 3 x 8 elements a
//          thread; 2 rows ahead in shared memory; sums of columns in registers
// traffic  86.1 MB moved, 86.1 MB ideal, 992.1 MB unfused in 13 launches
// floor    42.2 us at 2.039 TB/s; memory-bound at 1.90 flop/B
// rounding dx to bf16 when stored; f32 between
// needs    rows of 12288 elements, next to each other; dy, x, gamma, dx, dgamma_parts, dbeta_parts:
//          address and strides in multiples of 16 B; gamma [N], dgamma_parts [108, N], dbeta_parts
//          [108, N] shared by every row

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

extern "C" __global__ void __launch_bounds__(512, 1)
layernorm_backward_dx(
    const __nv_bfloat16* __restrict__ dy_ptr,
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ gamma_ptr,
    const float* __restrict__ mean_ptr,
    const float* __restrict__ rstd_ptr,
    __nv_bfloat16* __restrict__ dx_ptr,
    float* __restrict__ dgamma_parts_ptr,
    float* __restrict__ dbeta_parts_ptr,
    long long rows,
    long long dy_stride,
    long long x_stride,
    long long mean_stride,
    long long rstd_stride,
    long long dx_stride)
{
  constexpr int row_threads = 512;
  constexpr int cols = 12288;
  constexpr int x_kept_byte = 49152;  // of shared memory
  constexpr int vectors = 3;  // of a thread in a row
  const int lane = threadIdx.x;  // of the 512 threads that share a row
  __shared__ float part[2][2][16];
  extern __shared__ __align__(16) unsigned char shared[];
  Vec<__nv_bfloat16, 8>* const dy_kept = reinterpret_cast<Vec<__nv_bfloat16, 8>*>(shared);
  Vec<__nv_bfloat16, 8>* const x_kept = reinterpret_cast<Vec<__nv_bfloat16, 8>*>(shared + x_kept_byte);
  const long long step = gridDim.x;  // parts of the rows: of each, its rows are so many apart
  const long long first = blockIdx.x;  // row of this part, and its number
  float dgamma_parts_part[3][8] = {};  // of this thread's columns
  float dbeta_parts_part[3][8] = {};  // of this thread's columns

  // read gamma, which all rows share
  Vec<__nv_bfloat16, 8> gamma_vec[3];
  #pragma unroll
  for (int v = 0; v < 3; ++v) {
    const int col = (v * row_threads + lane) * 8;
    gamma_vec[v] = load<8>(gamma_ptr + col);
  }

  // ask for the first rows' dy, x
  constexpr int slots = 2;
  float mean_read{};
  if (first < rows) mean_read = *(mean_ptr + first * mean_stride);
  float rstd_read{};
  if (first < rows) rstd_read = *(rstd_ptr + first * rstd_stride);
  for (int s = 0; s < slots; ++s) {
    const long long ahead = first + s * step;
    if (ahead < rows) {
      #pragma unroll
      for (int v = 0; v < 3; ++v) {
        const int col = (v * row_threads + lane) * 8;
        copy_async<8>(&dy_kept[(s * vectors + v) * row_threads + threadIdx.x], dy_ptr + ahead * dy_stride + col);
        copy_async<8>(&x_kept[(s * vectors + v) * row_threads + threadIdx.x], x_ptr + ahead * x_stride + col);
      }
    }
    commit_copies();
  }
  int slot = 0;
  int turn = 0;  // of two: a block may be a reduction ahead of its neighbours
  for (long long row = first; row < rows; row += step) {
    wait_copies<slots - 1>();
    __nv_bfloat16* const dx_row = dx_ptr + row * dx_stride;
    const float mean = mean_read;
    const float rstd = rstd_read;
    if (row + step < rows) mean_read = *(mean_ptr + (row + step) * mean_stride);
    if (row + step < rows) rstd_read = *(rstd_ptr + (row + step) * rstd_stride);

    // pass 1 of 2: read dy, x; sum_of_g = sum(g); sum_of_products = sum(g_times_normed); dgamma_parts =
    //   sum(dy_times_normed) over rows; dbeta_parts = sum(dy) over rows
    float sum_of_g_part = 0.0f;
    float sum_of_products_part = 0.0f;
    #pragma unroll
    for (int v = 0; v < 3; ++v) {
      const Vec<__nv_bfloat16, 8> dy_vec = dy_kept[(slot * vectors + v) * row_threads + threadIdx.x];
      const Vec<__nv_bfloat16, 8> x_vec = x_kept[(slot * vectors + v) * row_threads + threadIdx.x];
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float dy = __bfloat162float(dy_vec.at[j]);
        const float x = __bfloat162float(x_vec.at[j]);
        const float gamma = __bfloat162float(gamma_vec[v].at[j]);
        const float x_minus_mean = x - mean;
        const float normed = x_minus_mean * rstd;
        const float g = dy * gamma;
        const float g_times_normed = g * normed;
        const float dy_times_normed = dy * normed;
        sum_of_g_part += g;
        sum_of_products_part += g_times_normed;
        dgamma_parts_part[v][j] += dy_times_normed;
        dbeta_parts_part[v][j] += dy;
      }
    }
    const float sum_of_g = row_sum(sum_of_g_part, part[turn][0]);
    const float sum_of_products = row_sum(sum_of_products_part, part[turn][1]);
    const float quotient = sum_of_g / 12288.0f;
    const float quotient_from_dy = sum_of_products / 12288.0f;

    // pass 2 of 2: read dy, x; write dx
    #pragma unroll
    for (int v = 0; v < 3; ++v) {
      const int col = (v * row_threads + lane) * 8;
      const Vec<__nv_bfloat16, 8> dy_vec = dy_kept[(slot * vectors + v) * row_threads + threadIdx.x];
      const Vec<__nv_bfloat16, 8> x_vec = x_kept[(slot * vectors + v) * row_threads + threadIdx.x];
      Vec<__nv_bfloat16, 8> dx_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float dy = __bfloat162float(dy_vec.at[j]);
        const float x = __bfloat162float(x_vec.at[j]);
        const float gamma = __bfloat162float(gamma_vec[v].at[j]);
        const float x_minus_mean = x - mean;
        const float normed = x_minus_mean * rstd;
        const float g = dy * gamma;
        const float g_minus_quotient = g - quotient;
        const float normed_times_quotient_from_dy = normed * quotient_from_dy;
        const float sub = g_minus_quotient - normed_times_quotient_from_dy;
        const float dx = rstd * sub;
        dx_vec.at[j] = __float2bfloat16_rn(dx);
      }
      store_words<8>(dx_row + col, dx_vec);
    }

    // ask for a row to come, in this one's place
    const long long ahead = row + slots * step;
    if (ahead < rows) {
      #pragma unroll
      for (int v = 0; v < 3; ++v) {
        const int col = (v * row_threads + lane) * 8;
        copy_async<8>(&dy_kept[(slot * vectors + v) * row_threads + threadIdx.x], dy_ptr + ahead * dy_stride + col);
        copy_async<8>(&x_kept[(slot * vectors + v) * row_threads + threadIdx.x], x_ptr + ahead * x_stride + col);
      }
    }
    commit_copies();
    slot = slot + 1 == slots ? 0 : slot + 1;
    turn ^= 1;
  }

  // what this part makes of each column
  #pragma unroll
  for (int v = 0; v < 3; ++v) {
    const int col = (v * row_threads + lane) * 8;
    Vec<float, 8> dgamma_parts_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) dgamma_parts_vec.at[j] = dgamma_parts_part[v][j];
    store_words<8>(dgamma_parts_ptr + first * cols + col, dgamma_parts_vec);
    Vec<float, 8> dbeta_parts_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) dbeta_parts_vec.at[j] = dbeta_parts_part[v][j];
    store_words<8>(dbeta_parts_ptr + first * cols + col, dbeta_parts_vec);
  }
}
