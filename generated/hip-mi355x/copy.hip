// copy  f32[n] -> f32[n]  at n=268435456
// x, somewhere else.
//
//     def copy(x):
//         return x
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     one flat array; a block of 128 threads, 4 elements a thread
// traffic  2147.5 MB moved, 2147.5 MB ideal, 2147.5 MB unfused in 1 launch
// floor    268.4 us at 8 TB/s; memory-bound at 0.00 flop/B
// needs    x, out: address in multiples of 16 B

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

// values col ... col + N - 1 of an array of `cols`, one by one; its last one stands for those behind it
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_last(const T* row, long long col, long long cols) {
  Vec<T, N> v;
  #pragma unroll
  for (int j = 0; j < N; ++j) v.at[j] = row[col + j < cols ? col + j : cols - 1];
  return v;
}

// the vector to p, which is aligned to it
template <int N, typename T>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// values col ... col + N - 1 of a row, one by one; what lies outside the row is left alone
template <int N, typename T>
__device__ __forceinline__ void store_each_within(T* row, long long col, long long cols, const Vec<T, N>& v) {
  #pragma unroll
  for (int j = 0; j < N; ++j) {
    if (col + j < cols) row[col + j] = v.at[j];
  }
}

extern "C" __global__ void __launch_bounds__(128)
copy(
    const float* __restrict__ x_ptr,
    float* __restrict__ out_ptr,
    long long n)
{
  constexpr int tile_cols = 512;  // elements that a block takes
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  const long long col = tile * tile_cols + threadIdx.x * 4;

  // pass 1 of 1: read x; write out
  if (col + 4 <= n) {
    const Vec<float, 4> x_vec = load<4>(x_ptr + col);
    Vec<float, 4> out_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = x_vec.at[j];
      out_vec.at[j] = x;
    }
    store<4>(out_ptr + col, out_vec);
  } else if (col < n) {  // the array ends inside of this vector
    const Vec<float, 4> x_vec = load_last<4>(x_ptr, col, n);
    Vec<float, 4> out_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = x_vec.at[j];
      out_vec.at[j] = x;
    }
    store_each_within<4>(out_ptr, col, n, out_vec);
  }
}
