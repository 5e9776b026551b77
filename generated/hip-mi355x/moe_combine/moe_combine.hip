// moe_combine  bf16[S, N], bf16[S, N], bf16[S, N], bf16[S, N], bf16[S, N], bf16[S, N], bf16[S, N], bf16[S, N], i32[T, 1], i32[T, 1],
//   i32[T, 1], i32[T, 1], i32[T, 1], i32[T, 1], i32[T, 1], i32[T, 1], f32[T, 1], f32[T, 1], f32[T, 1], f32[T, 1], f32[T, 1], f32[T, 1],
//   f32[T, 1], f32[T, 1] -> bf16[T, N]  at S=65536 N=4096 T=8192
// The sum of weights[t, j] * y[places[t, j]] over a token's 8 experts, in their order.
//
//     def moe_combine(y, places, weights):
//         return F.gather_sum(y, places, weights)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    y_2 is y; y_3 is y; y_4 is y; y_5 is y; y_6 is y; y_7 is y; y_8 is y; places_offset_0 is
//          places[..., :1]; places_offset_1 is places[..., 1:2]; places_offset_2 is places[..., 2:3];
//          places_offset_3 is places[..., 3:4]; places_offset_4 is places[..., 4:5]; places_offset_5 is
//          places[..., 5:6]; places_offset_6 is places[..., 6:7]; places_offset_7 is places[..., 7:];
//          weights_offset_0 is weights[..., :1]; weights_offset_1 is weights[..., 1:2];
//          weights_offset_2 is weights[..., 2:3]; weights_offset_3 is weights[..., 3:4];
//          weights_offset_4 is weights[..., 4:5]; weights_offset_5 is weights[..., 5:6];
//          weights_offset_6 is weights[..., 6:7]; weights_offset_7 is weights[..., 7:]
// looks up rows of y at places_offset_0, 0 where there is none; rows of y_2 at places_offset_1, 0 where
//          there is none; rows of y_3 at places_offset_2, 0 where there is none; rows of y_4 at
//          places_offset_3, 0 where there is none; rows of y_5 at places_offset_4, 0 where there is
//          none; rows of y_6 at places_offset_5, 0 where there is none; rows of y_7 at places_offset_6,
//          0 where there is none; rows of y_8 at places_offset_7, 0 where there is none
// tile     tiles of rows and columns; a block of 128 threads on 1 row, 8 elements a thread
// traffic  604.5 MB moved, 604.5 MB ideal, 604.5 MB unfused in 1 launch
// floor    75.6 us at 8 TB/s; memory-bound at 1.28 flop/B
// rounding out to bf16 when stored; f32 between
// needs    rows of 4096 elements, next to each other; y, y_2, y_3, y_4, y_5, y_6, y_7, y_8, out:
//          address and strides in multiples of 16 B

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
moe_combine(
    const __bf16* __restrict__ y_ptr,
    const __bf16* __restrict__ y_2_ptr,
    const __bf16* __restrict__ y_3_ptr,
    const __bf16* __restrict__ y_4_ptr,
    const __bf16* __restrict__ y_5_ptr,
    const __bf16* __restrict__ y_6_ptr,
    const __bf16* __restrict__ y_7_ptr,
    const __bf16* __restrict__ y_8_ptr,
    const int* __restrict__ places_offset_0_ptr,
    const int* __restrict__ places_offset_1_ptr,
    const int* __restrict__ places_offset_2_ptr,
    const int* __restrict__ places_offset_3_ptr,
    const int* __restrict__ places_offset_4_ptr,
    const int* __restrict__ places_offset_5_ptr,
    const int* __restrict__ places_offset_6_ptr,
    const int* __restrict__ places_offset_7_ptr,
    const float* __restrict__ weights_offset_0_ptr,
    const float* __restrict__ weights_offset_1_ptr,
    const float* __restrict__ weights_offset_2_ptr,
    const float* __restrict__ weights_offset_3_ptr,
    const float* __restrict__ weights_offset_4_ptr,
    const float* __restrict__ weights_offset_5_ptr,
    const float* __restrict__ weights_offset_6_ptr,
    const float* __restrict__ weights_offset_7_ptr,
    __bf16* __restrict__ out_ptr,
    long long rows,
    long long y_count,
    long long y_stride,
    long long y_2_count,
    long long y_2_stride,
    long long y_3_count,
    long long y_3_stride,
    long long y_4_count,
    long long y_4_stride,
    long long y_5_count,
    long long y_5_stride,
    long long y_6_count,
    long long y_6_stride,
    long long y_7_count,
    long long y_7_stride,
    long long y_8_count,
    long long y_8_stride,
    long long places_offset_0_stride,
    long long places_offset_1_stride,
    long long places_offset_2_stride,
    long long places_offset_3_stride,
    long long places_offset_4_stride,
    long long places_offset_5_stride,
    long long places_offset_6_stride,
    long long places_offset_7_stride,
    long long weights_offset_0_stride,
    long long weights_offset_1_stride,
    long long weights_offset_2_stride,
    long long weights_offset_3_stride,
    long long weights_offset_4_stride,
    long long weights_offset_5_stride,
    long long weights_offset_6_stride,
    long long weights_offset_7_stride,
    long long out_stride)
{
  constexpr int tile_cols = 1024;  // that a block takes
  constexpr int row_blocks = 4;  // that share a row
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= rows * row_blocks) return;  // the grid's last line is longer than what is left
  const long long row = tile / row_blocks;
  const int* const places_offset_0_row = places_offset_0_ptr + row * places_offset_0_stride;
  const int* const places_offset_1_row = places_offset_1_ptr + row * places_offset_1_stride;
  const int* const places_offset_2_row = places_offset_2_ptr + row * places_offset_2_stride;
  const int* const places_offset_3_row = places_offset_3_ptr + row * places_offset_3_stride;
  const int* const places_offset_4_row = places_offset_4_ptr + row * places_offset_4_stride;
  const int* const places_offset_5_row = places_offset_5_ptr + row * places_offset_5_stride;
  const int* const places_offset_6_row = places_offset_6_ptr + row * places_offset_6_stride;
  const int* const places_offset_7_row = places_offset_7_ptr + row * places_offset_7_stride;
  const float* const weights_offset_0_row = weights_offset_0_ptr + row * weights_offset_0_stride;
  const float* const weights_offset_1_row = weights_offset_1_ptr + row * weights_offset_1_stride;
  const float* const weights_offset_2_row = weights_offset_2_ptr + row * weights_offset_2_stride;
  const float* const weights_offset_3_row = weights_offset_3_ptr + row * weights_offset_3_stride;
  const float* const weights_offset_4_row = weights_offset_4_ptr + row * weights_offset_4_stride;
  const float* const weights_offset_5_row = weights_offset_5_ptr + row * weights_offset_5_stride;
  const float* const weights_offset_6_row = weights_offset_6_ptr + row * weights_offset_6_stride;
  const float* const weights_offset_7_row = weights_offset_7_ptr + row * weights_offset_7_stride;
  __bf16* const out_row = out_ptr + row * out_stride;
  const int places_offset_0 = *places_offset_0_row;
  const float weights_offset_0 = *weights_offset_0_row;
  const int places_offset_1 = *places_offset_1_row;
  const float weights_offset_1 = *weights_offset_1_row;
  const int places_offset_2 = *places_offset_2_row;
  const float weights_offset_2 = *weights_offset_2_row;
  const int places_offset_3 = *places_offset_3_row;
  const float weights_offset_3 = *weights_offset_3_row;
  const int places_offset_4 = *places_offset_4_row;
  const float weights_offset_4 = *weights_offset_4_row;
  const int places_offset_5 = *places_offset_5_row;
  const float weights_offset_5 = *weights_offset_5_row;
  const int places_offset_6 = *places_offset_6_row;
  const float weights_offset_6 = *weights_offset_6_row;
  const int places_offset_7 = *places_offset_7_row;
  const float weights_offset_7 = *weights_offset_7_row;
  const bool y_found = places_offset_0 >= 0 && places_offset_0 < y_count;  // else each of its values is 0
  const __bf16* const y_row = y_ptr + (y_found ? places_offset_0 : 0) * y_stride;
  const bool y_2_found = places_offset_1 >= 0 && places_offset_1 < y_2_count;  // else each of its values is 0
  const __bf16* const y_2_row = y_2_ptr + (y_2_found ? places_offset_1 : 0) * y_2_stride;
  const bool y_3_found = places_offset_2 >= 0 && places_offset_2 < y_3_count;  // else each of its values is 0
  const __bf16* const y_3_row = y_3_ptr + (y_3_found ? places_offset_2 : 0) * y_3_stride;
  const bool y_4_found = places_offset_3 >= 0 && places_offset_3 < y_4_count;  // else each of its values is 0
  const __bf16* const y_4_row = y_4_ptr + (y_4_found ? places_offset_3 : 0) * y_4_stride;
  const bool y_5_found = places_offset_4 >= 0 && places_offset_4 < y_5_count;  // else each of its values is 0
  const __bf16* const y_5_row = y_5_ptr + (y_5_found ? places_offset_4 : 0) * y_5_stride;
  const bool y_6_found = places_offset_5 >= 0 && places_offset_5 < y_6_count;  // else each of its values is 0
  const __bf16* const y_6_row = y_6_ptr + (y_6_found ? places_offset_5 : 0) * y_6_stride;
  const bool y_7_found = places_offset_6 >= 0 && places_offset_6 < y_7_count;  // else each of its values is 0
  const __bf16* const y_7_row = y_7_ptr + (y_7_found ? places_offset_6 : 0) * y_7_stride;
  const bool y_8_found = places_offset_7 >= 0 && places_offset_7 < y_8_count;  // else each of its values is 0
  const __bf16* const y_8_row = y_8_ptr + (y_8_found ? places_offset_7 : 0) * y_8_stride;
  const int col = static_cast<int>(tile % row_blocks) * tile_cols + lane * 8;

  // pass 1 of 1: read gather, gather_from_y_2, gather_from_y_3, gather_from_y_4, gather_from_y_5, gather_from_y_6,
  //   gather_from_y_7, gather_from_y_8; write out
  {
    const Vec<__bf16, 8> y_vec = load<8>(y_row + col);
    const Vec<__bf16, 8> y_2_vec = load<8>(y_2_row + col);
    const Vec<__bf16, 8> y_3_vec = load<8>(y_3_row + col);
    const Vec<__bf16, 8> y_4_vec = load<8>(y_4_row + col);
    const Vec<__bf16, 8> y_5_vec = load<8>(y_5_row + col);
    const Vec<__bf16, 8> y_6_vec = load<8>(y_6_row + col);
    const Vec<__bf16, 8> y_7_vec = load<8>(y_7_row + col);
    const Vec<__bf16, 8> y_8_vec = load<8>(y_8_row + col);
    Vec<__bf16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float gather = y_found ? static_cast<float>(y_vec.at[j]) : 0.0f;
      const float gather_from_y_2 = y_2_found ? static_cast<float>(y_2_vec.at[j]) : 0.0f;
      const float gather_from_y_3 = y_3_found ? static_cast<float>(y_3_vec.at[j]) : 0.0f;
      const float gather_from_y_4 = y_4_found ? static_cast<float>(y_4_vec.at[j]) : 0.0f;
      const float gather_from_y_5 = y_5_found ? static_cast<float>(y_5_vec.at[j]) : 0.0f;
      const float gather_from_y_6 = y_6_found ? static_cast<float>(y_6_vec.at[j]) : 0.0f;
      const float gather_from_y_7 = y_7_found ? static_cast<float>(y_7_vec.at[j]) : 0.0f;
      const float gather_from_y_8 = y_8_found ? static_cast<float>(y_8_vec.at[j]) : 0.0f;
      const float gather_times_weights_offset_0 = gather * weights_offset_0;
      const float gather_from_y_2_times_weights_offset_1 = gather_from_y_2 * weights_offset_1;
      const float sum_of_2 = gather_times_weights_offset_0 + gather_from_y_2_times_weights_offset_1;
      const float gather_from_y_3_times_weights_offset_2 = gather_from_y_3 * weights_offset_2;
      const float sum_of_3 = sum_of_2 + gather_from_y_3_times_weights_offset_2;
      const float gather_from_y_4_times_weights_offset_3 = gather_from_y_4 * weights_offset_3;
      const float sum_of_4 = sum_of_3 + gather_from_y_4_times_weights_offset_3;
      const float gather_from_y_5_times_weights_offset_4 = gather_from_y_5 * weights_offset_4;
      const float sum_of_5 = sum_of_4 + gather_from_y_5_times_weights_offset_4;
      const float gather_from_y_6_times_weights_offset_5 = gather_from_y_6 * weights_offset_5;
      const float sum_of_6 = sum_of_5 + gather_from_y_6_times_weights_offset_5;
      const float gather_from_y_7_times_weights_offset_6 = gather_from_y_7 * weights_offset_6;
      const float sum_of_7 = sum_of_6 + gather_from_y_7_times_weights_offset_6;
      const float gather_from_y_8_times_weights_offset_7 = gather_from_y_8 * weights_offset_7;
      const float sum_of_8 = sum_of_7 + gather_from_y_8_times_weights_offset_7;
      out_vec.at[j] = static_cast<__bf16>(sum_of_8);
    }
    store<8>(out_row + col, out_vec);
  }
}
