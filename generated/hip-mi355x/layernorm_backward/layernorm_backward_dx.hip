// layernorm_backward_dx  bf16[M, N], bf16[M, N], bf16[N], f32[M, 1], f32[M, 1] -> bf16[M, N], f32[256, N], f32[256, N]  at M=1024 N=12288
// dx, dgamma_parts, dbeta_parts of layernorm_backward.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     256 parts of the rows, each in turn by a block of 1024 threads a row, 2 x 8 elements a
//          thread; rows as they come; sums of columns in registers
// traffic  100.7 MB moved, 100.7 MB ideal, 1006.7 MB unfused in 13 launches
// floor    12.6 us at 8 TB/s; memory-bound at 1.62 flop/B
// rounding dx to bf16 when stored; f32 between
// needs    rows of 12288 elements, next to each other; dy, x, gamma, dx, dgamma_parts, dbeta_parts:
//          address and strides in multiples of 16 B; gamma [N], dgamma_parts [256, N], dbeta_parts
//          [256, N] shared by every row

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

// the sum over the 1024 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 16];
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(1024)
layernorm_backward_dx(
    const __bf16* __restrict__ dy_ptr,
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ gamma_ptr,
    const float* __restrict__ mean_ptr,
    const float* __restrict__ rstd_ptr,
    __bf16* __restrict__ dx_ptr,
    float* __restrict__ dgamma_parts_ptr,
    float* __restrict__ dbeta_parts_ptr,
    long long rows,
    long long dy_stride,
    long long x_stride,
    long long mean_stride,
    long long rstd_stride,
    long long dx_stride)
{
  constexpr int row_threads = 1024;
  constexpr int cols = 12288;
  const int lane = threadIdx.x;  // of the 1024 threads that share a row
  __shared__ float part[2][2][16];
  const long long step = gridDim.x;  // parts of the rows: of each, its rows are so many apart
  const long long first = blockIdx.x;  // row of this part, and its number
  float dgamma_parts_part[2][8] = {};  // of this thread's columns
  float dbeta_parts_part[2][8] = {};  // of this thread's columns

  // read gamma, which all rows share
  Vec<__bf16, 8> gamma_vec[2];
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 1 || col < 12288) {
      gamma_vec[v] = load<8>(gamma_ptr + col);
    }
  }
  int turn = 0;  // of two: a block may be a reduction ahead of its neighbours
  for (long long row = first; row < rows; row += step) {
    const __bf16* const dy_row = dy_ptr + row * dy_stride;
    const __bf16* const x_row = x_ptr + row * x_stride;
    const float* const mean_row = mean_ptr + row * mean_stride;
    const float* const rstd_row = rstd_ptr + row * rstd_stride;
    __bf16* const dx_row = dx_ptr + row * dx_stride;
    const float mean = *mean_row;
    const float rstd = *rstd_row;
    float normed_kept[2][8];
    float g_kept[2][8];

    // pass 1 of 2: read dy, x; keep normed, g; sum_of_g = sum(g); sum_of_products = sum(g_times_normed);
    //   dgamma_parts = sum(dy_times_normed) over rows; dbeta_parts = sum(dy) over rows
    float sum_of_g_part = 0.0f;
    float sum_of_products_part = 0.0f;
    Vec<__bf16, 8> dy_vec[2];
    Vec<__bf16, 8> x_vec[2];
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int col = (v * row_threads + lane) * 8;
      if (v < 1 || col < 12288) {
        dy_vec[v] = load<8>(dy_row + col);
        x_vec[v] = load<8>(x_row + col);
      }
    }
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int col = (v * row_threads + lane) * 8;
      if (v < 1 || col < 12288) {
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float dy = static_cast<float>(dy_vec[v].at[j]);
          const float x = static_cast<float>(x_vec[v].at[j]);
          const float gamma = static_cast<float>(gamma_vec[v].at[j]);
          const float x_minus_mean = x - mean;
          const float normed = x_minus_mean * rstd;
          const float g = dy * gamma;
          const float g_times_normed = g * normed;
          const float dy_times_normed = dy * normed;
          normed_kept[v][j] = normed;
          g_kept[v][j] = g;
          sum_of_g_part += g;
          sum_of_products_part += g_times_normed;
          dgamma_parts_part[v][j] += dy_times_normed;
          dbeta_parts_part[v][j] += dy;
        }
      }
    }
    const float sum_of_g = row_sum(sum_of_g_part, part[turn][0]);
    const float sum_of_products = row_sum(sum_of_products_part, part[turn][1]);
    const float quotient = sum_of_g / 12288.0f;
    const float quotient_from_dy = sum_of_products / 12288.0f;

    // pass 2 of 2: write dx
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int col = (v * row_threads + lane) * 8;
      if (v < 1 || col < 12288) {
        Vec<__bf16, 8> dx_vec;
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float normed = normed_kept[v][j];
          const float g = g_kept[v][j];
          const float g_minus_quotient = g - quotient;
          const float normed_times_quotient_from_dy = normed * quotient_from_dy;
          const float sub = g_minus_quotient - normed_times_quotient_from_dy;
          const float dx = rstd * sub;
          dx_vec.at[j] = static_cast<__bf16>(dx);
        }
        store<8>(dx_row + col, dx_vec);
      }
    }
    turn ^= 1;
  }

  // what this part makes of each column
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 1 || col < 12288) {
      Vec<float, 8> dgamma_parts_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) dgamma_parts_vec.at[j] = dgamma_parts_part[v][j];
      store<8>(dgamma_parts_ptr + first * cols + col, dgamma_parts_vec);
      Vec<float, 8> dbeta_parts_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) dbeta_parts_vec.at[j] = dbeta_parts_part[v][j];
      store<8>(dbeta_parts_ptr + first * cols + col, dbeta_parts_vec);
    }
  }
}
