// moe_layer_matmul  f32[T, E], f32[T, E], f32[T, E], f32[T, E] -> f32[T, E]  at T=256 E=64
// matmul of moe_layer_matmul.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    matmul_parts_offset_0 is matmul_parts[0]; matmul_parts_offset_1 is matmul_parts[1];
//          matmul_parts_offset_2 is matmul_parts[2]; matmul_parts_offset_3 is matmul_parts[3]
// tile     one flat array; a block of 128 threads, 4 elements a thread
// traffic  0.3 MB moved, 0.3 MB ideal, 0.3 MB unfused in 1 launch
// floor    0.0 us at 8 TB/s; memory-bound at 0.15 flop/B
// needs    matmul_parts_offset_0, matmul_parts_offset_1, matmul_parts_offset_2, matmul_parts_offset_3,
//          matmul: address in multiples of 16 B

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
moe_layer_matmul(
    const float* __restrict__ matmul_parts_offset_0_ptr,
    const float* __restrict__ matmul_parts_offset_1_ptr,
    const float* __restrict__ matmul_parts_offset_2_ptr,
    const float* __restrict__ matmul_parts_offset_3_ptr,
    float* __restrict__ matmul_ptr,
    long long n)
{
  constexpr int tile_cols = 512;  // elements that a block takes
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  const long long col = tile * tile_cols + threadIdx.x * 4;

  // pass 1 of 1: read matmul_parts_offset_0, matmul_parts_offset_1, matmul_parts_offset_2, matmul_parts_offset_3;
  //   write matmul
  if (col + 4 <= n) {
    const Vec<float, 4> matmul_parts_offset_0_vec = load<4>(matmul_parts_offset_0_ptr + col);
    const Vec<float, 4> matmul_parts_offset_1_vec = load<4>(matmul_parts_offset_1_ptr + col);
    const Vec<float, 4> matmul_parts_offset_2_vec = load<4>(matmul_parts_offset_2_ptr + col);
    const Vec<float, 4> matmul_parts_offset_3_vec = load<4>(matmul_parts_offset_3_ptr + col);
    Vec<float, 4> matmul_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float matmul_parts_offset_0 = matmul_parts_offset_0_vec.at[j];
      const float matmul_parts_offset_1 = matmul_parts_offset_1_vec.at[j];
      const float matmul_parts_offset_2 = matmul_parts_offset_2_vec.at[j];
      const float matmul_parts_offset_3 = matmul_parts_offset_3_vec.at[j];
      const float add = matmul_parts_offset_0 + matmul_parts_offset_1;
      const float add_from_matmul_parts_offset_0 = add + matmul_parts_offset_2;
      const float matmul = add_from_matmul_parts_offset_0 + matmul_parts_offset_3;
      matmul_vec.at[j] = matmul;
    }
    store<4>(matmul_ptr + col, matmul_vec);
  } else if (col < n) {  // the array ends inside of this vector
    const Vec<float, 4> matmul_parts_offset_0_vec = load_last<4>(matmul_parts_offset_0_ptr, col, n);
    const Vec<float, 4> matmul_parts_offset_1_vec = load_last<4>(matmul_parts_offset_1_ptr, col, n);
    const Vec<float, 4> matmul_parts_offset_2_vec = load_last<4>(matmul_parts_offset_2_ptr, col, n);
    const Vec<float, 4> matmul_parts_offset_3_vec = load_last<4>(matmul_parts_offset_3_ptr, col, n);
    Vec<float, 4> matmul_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float matmul_parts_offset_0 = matmul_parts_offset_0_vec.at[j];
      const float matmul_parts_offset_1 = matmul_parts_offset_1_vec.at[j];
      const float matmul_parts_offset_2 = matmul_parts_offset_2_vec.at[j];
      const float matmul_parts_offset_3 = matmul_parts_offset_3_vec.at[j];
      const float add = matmul_parts_offset_0 + matmul_parts_offset_1;
      const float add_from_matmul_parts_offset_0 = add + matmul_parts_offset_2;
      const float matmul = add_from_matmul_parts_offset_0 + matmul_parts_offset_3;
      matmul_vec.at[j] = matmul;
    }
    store_each_within<4>(matmul_ptr, col, n, matmul_vec);
  }
}
