// w8a16_gemm_mul  i8[N, K_over_128, 128], bf16[N, K_over_128, 1] -> bf16[N, K_over_128, 128]  at N=8192 K_over_128=64
// mul of w8a16_gemm.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    w_part is w as [N, K // 128, 128]
// tile     tiles of rows and columns; a block of 128 threads on 8 rows, 8 elements a thread
// traffic  202.4 MB moved, 202.4 MB ideal, 202.4 MB unfused in 1 launch
// floor    25.3 us at 8 TB/s; memory-bound at 0.66 flop/B
// rounding mul to bf16 when stored; f32 between
// needs    rows of 128 elements, next to each other; w_part: address and strides in multiples of 8 B;
//          mul: address and strides in multiples of 16 B

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
w8a16_gemm_mul(
    const signed char* __restrict__ w_part_ptr,
    const __bf16* __restrict__ scale_ptr,
    __bf16* __restrict__ mul_ptr,
    long long rows,
    long long w_part_stride,
    long long scale_stride,
    long long mul_stride)
{
  constexpr int block_rows = 8;  // that a block takes
  constexpr int row_threads = 16;
  const int lane = threadIdx.x % row_threads;  // of the 16 threads that share a row
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const signed char* const w_part_row = w_part_ptr + row * w_part_stride;
  const __bf16* const scale_row = scale_ptr + row * scale_stride;
  __bf16* const mul_row = mul_ptr + row * mul_stride;
  const float scale = static_cast<float>(*scale_row);
  const int col = lane * 8;

  // pass 1 of 1: read w_part; write mul
  {
    const Vec<signed char, 8> w_part_vec = load<8>(w_part_row + col);
    Vec<__bf16, 8> mul_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int w_part = static_cast<int>(w_part_vec.at[j]);
      const float found = static_cast<float>(w_part);
      const float mul = found * scale;
      mul_vec.at[j] = static_cast<__bf16>(mul);
    }
    if (live) store<8>(mul_row + col, mul_vec);
  }
}
