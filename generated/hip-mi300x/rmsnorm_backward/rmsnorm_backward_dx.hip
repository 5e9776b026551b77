// rmsnorm_backward_dx  bf16[M, N], bf16[M, N], bf16[N], f32[M, 1] -> bf16[M, N], f32[912, N]  at M=16384 N=4096
// dx, dgamma_parts of rmsnorm_backward.
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
// tile     912 parts of the rows, each in turn by a block of 512 threads a row, 1 x 8 elements a
//          thread; rows as they come; sums of columns in registers
// traffic  417.7 MB moved, 417.7 MB ideal, 4176.0 MB unfused in 9 launches
// floor    78.8 us at 5.3 TB/s; memory-bound at 1.45 flop/B
// rounding dx to bf16 when stored; f32 between
// needs    rows of 4096 elements, next to each other; dy, x, gamma, dx, dgamma_parts: address and
//          strides in multiples of 16 B; gamma [N], dgamma_parts [912, N] shared by every row

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

// the sum over the 512 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 8];
  #pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(512)
rmsnorm_backward_dx(
    const __bf16* __restrict__ dy_ptr,
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ gamma_ptr,
    const float* __restrict__ rstd_ptr,
    __bf16* __restrict__ dx_ptr,
    float* __restrict__ dgamma_parts_ptr,
    long long rows,
    long long dy_stride,
    long long x_stride,
    long long rstd_stride,
    long long dx_stride)
{
  constexpr int cols = 4096;
  const int lane = threadIdx.x;  // of the 512 threads that share a row
  __shared__ float part[2][1][8];
  const long long step = gridDim.x;  // parts of the rows: of each, its rows are so many apart
  const long long first = blockIdx.x;  // row of this part, and its number
  float dgamma_parts_part[8] = {};  // of this thread's columns

  // read gamma, which all rows share
  Vec<__bf16, 8> gamma_vec;
  {
    const int col = lane * 8;
    gamma_vec = load<8>(gamma_ptr + col);
  }
  int turn = 0;  // of two: a block may be a reduction ahead of its neighbours
  for (long long row = first; row < rows; row += step) {
    const __bf16* const dy_row = dy_ptr + row * dy_stride;
    const __bf16* const x_row = x_ptr + row * x_stride;
    const float* const rstd_row = rstd_ptr + row * rstd_stride;
    __bf16* const dx_row = dx_ptr + row * dx_stride;
    const float rstd = *rstd_row;
    const int col = lane * 8;
    float normed_kept[8];
    float g_kept[8];

    // pass 1 of 2: read dy, x; keep normed, g; sum_of_products = sum(g_times_normed); dgamma_parts =
    //   sum(dy_times_normed) over rows
    float sum_of_products_part = 0.0f;
    {
      const Vec<__bf16, 8> dy_vec = load<8>(dy_row + col);
      const Vec<__bf16, 8> x_vec = load<8>(x_row + col);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float dy = static_cast<float>(dy_vec.at[j]);
        const float x = static_cast<float>(x_vec.at[j]);
        const float gamma = static_cast<float>(gamma_vec.at[j]);
        const float normed = x * rstd;
        const float g = dy * gamma;
        const float g_times_normed = g * normed;
        const float dy_times_normed = dy * normed;
        normed_kept[j] = normed;
        g_kept[j] = g;
        sum_of_products_part += g_times_normed;
        dgamma_parts_part[j] += dy_times_normed;
      }
    }
    const float sum_of_products = row_sum(sum_of_products_part, part[turn][0]);
    const float mean = sum_of_products / 4096.0f;

    // pass 2 of 2: write dx
    {
      Vec<__bf16, 8> dx_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float normed = normed_kept[j];
        const float g = g_kept[j];
        const float normed_times_mean = normed * mean;
        const float sub = g - normed_times_mean;
        const float dx = rstd * sub;
        dx_vec.at[j] = static_cast<__bf16>(dx);
      }
      store<8>(dx_row + col, dx_vec);
    }
    turn ^= 1;
  }

  // what this part makes of each column
  {
    const int col = lane * 8;
    Vec<float, 8> dgamma_parts_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) dgamma_parts_vec.at[j] = dgamma_parts_part[j];
    store<8>(dgamma_parts_ptr + first * cols + col, dgamma_parts_vec);
  }
}
