// column_sum_out  f32[8192, N] -> f32[1, N]  at N=1024
// out of column_sum.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a block of 1024 threads for 16 columns, 256 rows at a time, 8 rows a thread in flight; parts
//          are summed in shared memory
// traffic  33.6 MB moved, 33.6 MB ideal, 33.6 MB unfused in 1 launch
// floor    4.2 us at 8 TB/s; memory-bound at 0.25 flop/B
// needs    rows of 1024 elements, next to each other; out_parts: address and strides in multiples of 16
//          B

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
column_sum_out(
    const float* __restrict__ out_parts_ptr,
    float* __restrict__ out_ptr,
    long long rows,
    long long out_parts_stride)
{
  constexpr int threads = 1024;
  constexpr int tile_cols = 16;
  constexpr int tile_rows = 256;  // that the block's threads read at once
  constexpr int row_step = 256;  // rows that the block's threads read at once
  constexpr int rows_in_turn = 8 * row_step;
  const int first_col = static_cast<int>(blockIdx.x) * tile_cols;
  const int from = threadIdx.x % 4 * 4;  // of the block's 16 columns, this thread's first
  const int col = first_col + from;
  const int own = threadIdx.x / 4;  // of the block's 256 rows
  __shared__ float part[tile_rows][tile_cols];  // one of each thread row
  __shared__ float sums[1][tile_cols];  // one of each block

  // pass 1 of 1: read out_parts; sum_of_out_parts = sum(out_parts)
  {
    float sum_of_out_parts_part[4] = {};
    for (long long turn = own; turn < rows; turn += rows_in_turn) {
      Vec<float, 4> out_parts_vec[8];
      #pragma unroll
      for (int u = 0; u < 8; ++u) {
        const long long row = turn + u * row_step < rows ? turn + u * row_step : rows - 1;
        out_parts_vec[u] = load<4>(out_parts_ptr + row * out_parts_stride + col);
      }
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        float sum_of_out_parts_turn = 0.0f;
        #pragma unroll
        for (int u = 0; u < 8; ++u) {
          const float out_parts = out_parts_vec[u].at[j];
          const bool inside = turn + u * row_step < rows;
          sum_of_out_parts_turn += inside ? out_parts : 0.0f;
        }
        sum_of_out_parts_part[j] += sum_of_out_parts_turn;
      }
    }

    // sum_of_out_parts: the block's rows, from the first to the last
    #pragma unroll
    for (int j = 0; j < 4; ++j) part[own][from + j] = sum_of_out_parts_part[j];
    __syncthreads();
    for (int c = threadIdx.x; c < tile_cols; c += threads) {
      float v = part[0][c];
      for (int r = 1; r < tile_rows; ++r) v += part[r][c];
      sums[0][c] = v;
    }
    for (int c = threadIdx.x; c < tile_cols; c += threads) {
      const int own_col = first_col + c;
      const float sum_of_out_parts = sums[0][c];
      out_ptr[own_col] = sum_of_out_parts;
    }
  }
}
