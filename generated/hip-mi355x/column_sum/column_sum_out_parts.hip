// column_sum_out_parts  f32[M, N] -> f32[8192, N]  at M=1048576 N=1024
// out_parts of column_sum.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     8192 parts of the rows, each in turn by a warp a row, 2 rows a block, 4 x 4 elements a
//          thread; rows as they come; sums of columns in registers
// traffic  4328.5 MB moved, 4328.5 MB ideal, 4328.5 MB unfused in 1 launch
// floor    541.1 us at 8 TB/s; memory-bound at 0.25 flop/B
// needs    rows of 1024 elements, next to each other; x, out_parts: address and strides in multiples of
//          16 B; out_parts [8192, N] shared by every row

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

extern "C" __global__ void __launch_bounds__(128)
column_sum_out_parts(
    const float* __restrict__ x_ptr,
    float* __restrict__ out_parts_ptr,
    long long rows,
    long long x_stride)
{
  constexpr int row_threads = 64;
  constexpr int block_rows = 2;  // that a block takes
  constexpr int cols = 1024;
  const int lane = threadIdx.x % row_threads;  // of the 64 threads that share a row
  const long long step = static_cast<long long>(gridDim.x) * block_rows;  // parts of the rows: of each, its rows are so many apart
  const long long first = static_cast<long long>(blockIdx.x) * block_rows + threadIdx.x / row_threads;  // row of this part, and its number
  float out_parts_part[4][4] = {};  // of this thread's columns
  for (long long own_row = first; own_row - threadIdx.x / row_threads < rows; own_row += step) {
    const bool live = own_row < rows;
    const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
    const float* const x_row = x_ptr + row * x_stride;

    // pass 1 of 1: read x; out_parts = sum(x) over rows
    Vec<float, 4> x_vec[4];
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int col = (v * row_threads + lane) * 4;
      x_vec[v] = load<4>(x_row + col);
    }
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = x_vec[v].at[j];
        out_parts_part[v][j] += live ? x : 0.0f;
      }
    }
  }

  // what this part makes of each column
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 4;
    Vec<float, 4> out_parts_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) out_parts_vec.at[j] = out_parts_part[v][j];
    store<4>(out_parts_ptr + first * cols + col, out_parts_vec);
  }
}
