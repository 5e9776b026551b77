// rmsnorm_backward_dgamma  f32[396, N] -> f32[1, N]  at N=4096
// dgamma of rmsnorm_backward.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// tile     a block of 512 threads for 64 columns, 32 rows at a time, 8 rows a thread in flight; parts
//          are summed in shared memory
// traffic  6.5 MB moved, 6.5 MB ideal, 6.5 MB unfused in 1 launch
// floor    1.4 us at 4.8 TB/s; memory-bound at 0.25 flop/B
// needs    rows of 4096 elements, next to each other; dgamma_parts: address and strides in multiples of
//          16 B
// launch   begins while the kernels before it run, and waits for them before all else

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

extern "C" __global__ void __launch_bounds__(512, 2)
rmsnorm_backward_dgamma(
    const float* dgamma_parts_ptr,
    float* __restrict__ dgamma_ptr,
    long long rows,
    long long dgamma_parts_stride)
{
  asm volatile("griddepcontrol.wait;" ::: "memory");  // until the kernels before this one have ended
  constexpr int threads = 512;
  constexpr int tile_cols = 64;
  constexpr int tile_rows = 32;  // that the block's threads read at once
  constexpr int row_step = 32;  // rows that the block's threads read at once
  constexpr int rows_in_turn = 8 * row_step;
  const int first_col = static_cast<int>(blockIdx.x) * tile_cols;
  const int from = threadIdx.x % 16 * 4;  // of the block's 64 columns, this thread's first
  const int col = first_col + from;
  const int own = threadIdx.x / 16;  // of the block's 32 rows
  __shared__ float part[tile_rows][tile_cols];  // one of each thread row
  __shared__ float sums[1][tile_cols];  // one of each block

  // pass 1 of 1: read dgamma_parts; dgamma = sum(dgamma_parts)
  {
    float dgamma_part[4] = {};
    for (long long turn = own; turn < rows; turn += rows_in_turn) {
      Vec<float, 4> dgamma_parts_vec[8];
      #pragma unroll
      for (int u = 0; u < 8; ++u) {
        const long long row = turn + u * row_step < rows ? turn + u * row_step : rows - 1;
        dgamma_parts_vec[u] = load<4>(dgamma_parts_ptr + row * dgamma_parts_stride + col);
      }
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        float dgamma_turn = 0.0f;
        #pragma unroll
        for (int u = 0; u < 8; ++u) {
          const float dgamma_parts = dgamma_parts_vec[u].at[j];
          const bool inside = turn + u * row_step < rows;
          dgamma_turn += inside ? dgamma_parts : 0.0f;
        }
        dgamma_part[j] += dgamma_turn;
      }
    }

    // dgamma: the block's rows, from the first to the last
    #pragma unroll
    for (int j = 0; j < 4; ++j) part[own][from + j] = dgamma_part[j];
    __syncthreads();
    for (int c = threadIdx.x; c < tile_cols; c += threads) {
      float v = part[0][c];
      for (int r = 1; r < tile_rows; ++r) v += part[r][c];
      sums[0][c] = v;
    }
    for (int c = threadIdx.x; c < tile_cols; c += threads) {
      const int own_col = first_col + c;
      const float dgamma = sums[0][c];
      dgamma_ptr[own_col] = dgamma;
    }
  }
}
