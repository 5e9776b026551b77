// layernorm_param_grads  bf16[M, N], bf16[M, N], f32[M, 1], f32[M, 1] -> f32[1, N], f32[1, N]  at M=16384 N=4096
// dgamma and dbeta of LayerNorm, of its rows' mean and 1 / sqrt(var + eps) as the forward pass left them.
//
//     def layernorm_param_grads(dy, x, mean, rstd):
//         normed = (x - mean) * rstd
//         dgamma = F.sum(dy * normed, over=M)
//         dbeta = F.sum(dy, over=M)
//         return dgamma, dbeta
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a block of 1024 threads for 32 columns, 256 rows at a time, 4 rows a thread in flight; parts
//          are summed in shared memory
// traffic  268.6 MB moved, 268.6 MB ideal, 2013.4 MB unfused in 5 launches
// floor    33.6 us at 8 TB/s; memory-bound at 1.25 flop/B
// needs    rows of 4096 elements, next to each other; dy, x: address and strides in multiples of 16 B

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

extern "C" __global__ void __launch_bounds__(1024)
layernorm_param_grads(
    const __bf16* __restrict__ dy_ptr,
    const __bf16* __restrict__ x_ptr,
    const float* __restrict__ mean_ptr,
    const float* __restrict__ rstd_ptr,
    float* __restrict__ dgamma_ptr,
    float* __restrict__ dbeta_ptr,
    long long rows,
    long long dy_stride,
    long long x_stride,
    long long mean_stride,
    long long rstd_stride)
{
  constexpr int threads = 1024;
  constexpr int tile_cols = 32;
  constexpr int tile_rows = 256;  // that the block's threads read at once
  constexpr int row_step = 256;  // rows that the block's threads read at once
  constexpr int rows_in_turn = 4 * row_step;
  const int first_col = static_cast<int>(blockIdx.x) * tile_cols;
  const int from = threadIdx.x % 4 * 8;  // of the block's 32 columns, this thread's first
  const int col = first_col + from;
  const int own = threadIdx.x / 4;  // of the block's 256 rows
  __shared__ float part[tile_rows][tile_cols];  // one of each thread row
  __shared__ float sums[2][tile_cols];  // one of each block

  // pass 1 of 1: read dy, x, mean, rstd; dgamma = sum(mul); dbeta = sum(dy)
  {
    float dgamma_part[8] = {};
    float dbeta_part[8] = {};
    for (long long turn = own; turn < rows; turn += rows_in_turn) {
      Vec<__bf16, 8> dy_vec[4];
      Vec<__bf16, 8> x_vec[4];
      float mean_at[4];
      float rstd_at[4];
      #pragma unroll
      for (int u = 0; u < 4; ++u) {
        const long long row = turn + u * row_step < rows ? turn + u * row_step : rows - 1;
        dy_vec[u] = load<8>(dy_ptr + row * dy_stride + col);
        x_vec[u] = load<8>(x_ptr + row * x_stride + col);
        mean_at[u] = *(mean_ptr + row * mean_stride);
        rstd_at[u] = *(rstd_ptr + row * rstd_stride);
      }
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        float dgamma_turn = 0.0f;
        float dbeta_turn = 0.0f;
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
          const float dy = static_cast<float>(dy_vec[u].at[j]);
          const float x = static_cast<float>(x_vec[u].at[j]);
          const float mean = mean_at[u];
          const float rstd = rstd_at[u];
          const float x_minus_mean = x - mean;
          const float normed = x_minus_mean * rstd;
          const float mul = dy * normed;
          const bool inside = turn + u * row_step < rows;
          dgamma_turn += inside ? mul : 0.0f;
          dbeta_turn += inside ? dy : 0.0f;
        }
        dgamma_part[j] += dgamma_turn;
        dbeta_part[j] += dbeta_turn;
      }
    }

    // dgamma: the block's rows, from the first to the last
    #pragma unroll
    for (int j = 0; j < 8; ++j) part[own][from + j] = dgamma_part[j];
    __syncthreads();
    for (int c = threadIdx.x; c < tile_cols; c += threads) {
      float v = part[0][c];
      for (int r = 1; r < tile_rows; ++r) v += part[r][c];
      sums[0][c] = v;
    }
    __syncthreads();

    // dbeta: the block's rows, from the first to the last
    #pragma unroll
    for (int j = 0; j < 8; ++j) part[own][from + j] = dbeta_part[j];
    __syncthreads();
    for (int c = threadIdx.x; c < tile_cols; c += threads) {
      float v = part[0][c];
      for (int r = 1; r < tile_rows; ++r) v += part[r][c];
      sums[1][c] = v;
    }
    for (int c = threadIdx.x; c < tile_cols; c += threads) {
      const int own_col = first_col + c;
      const float dgamma = sums[0][c];
      const float dbeta = sums[1][c];
      dgamma_ptr[own_col] = dgamma;
      dbeta_ptr[own_col] = dbeta;
    }
  }
}
