// column_sum_out_parts  f32[M, N] -> f32[4864, N]  at M=1048576 N=1024
// out_parts of column_sum.
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
// tile     4864 parts of the rows, each in turn by a block of 128 threads a row, 2 x 4 elements a
//          thread; rows as they come; sums of columns in registers
// traffic  4314.9 MB moved, 4314.9 MB ideal, 4314.9 MB unfused in 1 launch
// floor    814.1 us at 5.3 TB/s; memory-bound at 0.25 flop/B
// needs    rows of 1024 elements, next to each other; x, out_parts: address and strides in multiples of
//          16 B; out_parts [4864, N] shared by every row

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
  constexpr int cols = 1024;
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  const long long step = gridDim.x;  // parts of the rows: of each, its rows are so many apart
  const long long first = blockIdx.x;  // row of this part, and its number
  float out_parts_part[2][4] = {};  // of this thread's columns
  for (long long row = first; row < rows; row += step) {
    const float* const x_row = x_ptr + row * x_stride;

    // pass 1 of 1: read x; out_parts = sum(x) over rows
    Vec<float, 4> x_vec[2];
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int col = (v * row_threads + lane) * 4;
      x_vec[v] = load<4>(x_row + col);
    }
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = x_vec[v].at[j];
        out_parts_part[v][j] += x;
      }
    }
  }

  // what this part makes of each column
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 4;
    Vec<float, 4> out_parts_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) out_parts_vec.at[j] = out_parts_part[v][j];
    store<4>(out_parts_ptr + first * cols + col, out_parts_vec);
  }
}
