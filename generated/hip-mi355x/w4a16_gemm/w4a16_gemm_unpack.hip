// w4a16_gemm_unpack  u8[N, K_half] -> i32[N, K_half], i32[N, K_half]  at N=8192 K_half=4096
// unpack of w4a16_gemm.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    unpack_offset_0 is unpack[..., 0]; unpack_offset_1 is unpack[..., 1]
// tile     tiles of rows and columns; a block of 128 threads on 1 row, 2 elements a thread
// traffic  302.0 MB moved, 302.0 MB ideal, 302.0 MB unfused in 1 launch
// floor    37.7 us at 8 TB/s; memory-bound at 0.33 flop/B
// needs    rows of 4096 elements, next to each other; w: address and strides in multiples of 2 B;
//          unpack_offset_0, unpack_offset_1: address and strides in multiples of 16 B; unpack_offset_0,
//          unpack_offset_1: by turns the elements of one array, in the vectors of unpack_offset_0

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
w4a16_gemm_unpack(
    const unsigned char* __restrict__ w_ptr,
    int* __restrict__ unpack_offset_0_ptr,
    int* __restrict__ unpack_offset_1_ptr,
    long long rows,
    long long w_stride,
    long long unpack_offset_0_stride)
{
  constexpr int tile_cols = 256;  // that a block takes
  constexpr int row_blocks = 16;  // that share a row
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= rows * row_blocks) return;  // the grid's last line is longer than what is left
  const long long row = tile / row_blocks;
  const unsigned char* const w_row = w_ptr + row * w_stride;
  int* const unpack_offset_0_row = unpack_offset_0_ptr + row * unpack_offset_0_stride;
  const int col = static_cast<int>(tile % row_blocks) * tile_cols + lane * 2;

  // pass 1 of 1: read w; write unpack_offset_0, unpack_offset_1
  {
    const Vec<unsigned char, 2> w_vec = load<2>(w_row + col);
    Vec<int, 4> unpack_offset_0_vec;
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int w = static_cast<int>(w_vec.at[j]);
      const int bit_and = w & 15;
      const int shift_right = w >> 4;
      unpack_offset_0_vec.at[2 * j] = bit_and;
      unpack_offset_0_vec.at[2 * j + 1] = shift_right;
    }
    store<4>(unpack_offset_0_row + col * 2, unpack_offset_0_vec);
  }
}
