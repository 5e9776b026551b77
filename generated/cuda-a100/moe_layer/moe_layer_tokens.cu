// moe_layer_tokens  bf16[T, D], i32[T_times_4, 1] -> bf16[T_times_4, D]  at T=256 D=2048 T_times_4=1024
// tokens of moe_layer.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// views    order_value_part is order_value as [4 * T, 1]
// looks up rows of x at floor_div, 0 where there is none
// tile     tiles of rows and columns; a block of 128 threads on 1 row, 8 elements a thread
// traffic  5.2 MB moved, 5.2 MB ideal, 8.4 MB unfused in 2 launches
// floor    2.6 us at 2.039 TB/s; memory-bound at 0.40 flop/B
// rounding tokens to bf16 when stored; f32 between
// needs    rows of 2048 elements, next to each other; x, tokens: address and strides in multiples of 16
//          B

#include <cuda_bf16.h>

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

// x / y downwards, 0 where y is 0, and modulo 2^32
__device__ __forceinline__ int floor_quotient(int x, int y) {
  if (y == 0) return 0;
  if (y == -1) return static_cast<int>(0u - x);
  const int q = x / y;
  return x % y != 0 && (x < 0) != (y < 0) ? q - 1 : q;
}

extern "C" __global__ void __launch_bounds__(128)
moe_layer_tokens(
    const __nv_bfloat16* __restrict__ x_ptr,
    const int* __restrict__ order_value_part_ptr,
    __nv_bfloat16* __restrict__ tokens_ptr,
    long long rows,
    long long x_count,
    long long x_stride,
    long long order_value_part_stride,
    long long tokens_stride)
{
  constexpr int tile_cols = 1024;  // that a block takes
  constexpr int row_blocks = 2;  // that share a row
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  const long long row = blockIdx.x / row_blocks;
  const int* const order_value_part_row = order_value_part_ptr + row * order_value_part_stride;
  __nv_bfloat16* const tokens_row = tokens_ptr + row * tokens_stride;
  const int order_value_part = *order_value_part_row;
  const int floor_div = floor_quotient(order_value_part, 4);
  const bool x_found = floor_div >= 0 && floor_div < x_count;  // else each of its values is 0
  const __nv_bfloat16* const x_row = x_ptr + (x_found ? floor_div : 0) * x_stride;
  const int col = static_cast<int>(blockIdx.x % row_blocks) * tile_cols + lane * 8;

  // pass 1 of 1: read tokens; write tokens
  {
    const Vec<__nv_bfloat16, 8> x_vec = load<8>(x_row + col);
    Vec<__nv_bfloat16, 8> tokens_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float tokens = x_found ? __bfloat162float(x_vec.at[j]) : 0.0f;
      tokens_vec.at[j] = __float2bfloat16_rn(tokens);
    }
    store<8>(tokens_row + col, tokens_vec);
  }
}
