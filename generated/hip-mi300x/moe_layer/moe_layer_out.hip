// moe_layer_out  i32[T, 1], i32[T, 1], i32[T, 1], i32[T, 1], bf16[T_times_4, D], bf16[T_times_4, D], bf16[T_times_4, D], bf16[T_times_4,
//   D], f32[T, 1], f32[T, 1], f32[T, 1], f32[T, 1] -> bf16[T, D]  at T=256 T_times_4=1024 D=2048
// out of moe_layer.
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
// views    slot_places_0_of_4 is slot_places as [T, 1]; slot_places_1_of_4 is slot_places as [T, 1];
//          slot_places_2_of_4 is slot_places as [T, 1]; slot_places_3_of_4 is slot_places as [T, 1];
//          y_2 is y; y_3 is y; y_4 is y; softmax_offset_0 is softmax[..., :1]; softmax_offset_1 is
//          softmax[..., 1:2]; softmax_offset_2 is softmax[..., 2:3]; softmax_offset_3 is softmax[...,
//          3:]
// looks up rows of y at slot_places_0_of_4, 0 where there is none; rows of y_2 at slot_places_1_of_4, 0
//          where there is none; rows of y_3 at slot_places_2_of_4, 0 where there is none; rows of y_4
//          at slot_places_3_of_4, 0 where there is none
// tile     tiles of rows and columns; a block of 128 threads on 1 row, 4 elements a thread
// traffic  5.3 MB moved, 5.3 MB ideal, 5.3 MB unfused in 1 launch
// floor    1.0 us at 5.3 TB/s; memory-bound at 1.10 flop/B
// rounding out to bf16 when stored; f32 between
// needs    rows of 2048 elements, next to each other; y, y_2, y_3, y_4, out: address and strides in
//          multiples of 8 B

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
moe_layer_out(
    const int* __restrict__ slot_places_0_of_4_ptr,
    const int* __restrict__ slot_places_1_of_4_ptr,
    const int* __restrict__ slot_places_2_of_4_ptr,
    const int* __restrict__ slot_places_3_of_4_ptr,
    const __bf16* __restrict__ y_ptr,
    const __bf16* __restrict__ y_2_ptr,
    const __bf16* __restrict__ y_3_ptr,
    const __bf16* __restrict__ y_4_ptr,
    const float* __restrict__ softmax_offset_0_ptr,
    const float* __restrict__ softmax_offset_1_ptr,
    const float* __restrict__ softmax_offset_2_ptr,
    const float* __restrict__ softmax_offset_3_ptr,
    __bf16* __restrict__ out_ptr,
    long long rows,
    long long slot_places_0_of_4_stride,
    long long slot_places_1_of_4_stride,
    long long slot_places_2_of_4_stride,
    long long slot_places_3_of_4_stride,
    long long y_count,
    long long y_stride,
    long long y_2_count,
    long long y_2_stride,
    long long y_3_count,
    long long y_3_stride,
    long long y_4_count,
    long long y_4_stride,
    long long softmax_offset_0_stride,
    long long softmax_offset_1_stride,
    long long softmax_offset_2_stride,
    long long softmax_offset_3_stride,
    long long out_stride)
{
  constexpr int tile_cols = 512;  // that a block takes
  constexpr int row_blocks = 4;  // that share a row
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= rows * row_blocks) return;  // the grid's last line is longer than what is left
  const long long row = tile / row_blocks;
  const int* const slot_places_0_of_4_row = slot_places_0_of_4_ptr + row * slot_places_0_of_4_stride;
  const int* const slot_places_1_of_4_row = slot_places_1_of_4_ptr + row * slot_places_1_of_4_stride;
  const int* const slot_places_2_of_4_row = slot_places_2_of_4_ptr + row * slot_places_2_of_4_stride;
  const int* const slot_places_3_of_4_row = slot_places_3_of_4_ptr + row * slot_places_3_of_4_stride;
  const float* const softmax_offset_0_row = softmax_offset_0_ptr + row * softmax_offset_0_stride;
  const float* const softmax_offset_1_row = softmax_offset_1_ptr + row * softmax_offset_1_stride;
  const float* const softmax_offset_2_row = softmax_offset_2_ptr + row * softmax_offset_2_stride;
  const float* const softmax_offset_3_row = softmax_offset_3_ptr + row * softmax_offset_3_stride;
  __bf16* const out_row = out_ptr + row * out_stride;
  const int slot_places_0_of_4 = *slot_places_0_of_4_row;
  const float softmax_offset_0 = *softmax_offset_0_row;
  const int slot_places_1_of_4 = *slot_places_1_of_4_row;
  const float softmax_offset_1 = *softmax_offset_1_row;
  const int slot_places_2_of_4 = *slot_places_2_of_4_row;
  const float softmax_offset_2 = *softmax_offset_2_row;
  const int slot_places_3_of_4 = *slot_places_3_of_4_row;
  const float softmax_offset_3 = *softmax_offset_3_row;
  const bool y_found = slot_places_0_of_4 >= 0 && slot_places_0_of_4 < y_count;  // else each of its values is 0
  const __bf16* const y_row = y_ptr + (y_found ? slot_places_0_of_4 : 0) * y_stride;
  const bool y_2_found = slot_places_1_of_4 >= 0 && slot_places_1_of_4 < y_2_count;  // else each of its values is 0
  const __bf16* const y_2_row = y_2_ptr + (y_2_found ? slot_places_1_of_4 : 0) * y_2_stride;
  const bool y_3_found = slot_places_2_of_4 >= 0 && slot_places_2_of_4 < y_3_count;  // else each of its values is 0
  const __bf16* const y_3_row = y_3_ptr + (y_3_found ? slot_places_2_of_4 : 0) * y_3_stride;
  const bool y_4_found = slot_places_3_of_4 >= 0 && slot_places_3_of_4 < y_4_count;  // else each of its values is 0
  const __bf16* const y_4_row = y_4_ptr + (y_4_found ? slot_places_3_of_4 : 0) * y_4_stride;
  const int col = static_cast<int>(tile % row_blocks) * tile_cols + lane * 4;

  // pass 1 of 1: read gather, gather_from_y_2, gather_from_y_3, gather_from_y_4; write out
  {
    const Vec<__bf16, 4> y_vec = load<4>(y_row + col);
    const Vec<__bf16, 4> y_2_vec = load<4>(y_2_row + col);
    const Vec<__bf16, 4> y_3_vec = load<4>(y_3_row + col);
    const Vec<__bf16, 4> y_4_vec = load<4>(y_4_row + col);
    Vec<__bf16, 4> out_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float gather = y_found ? static_cast<float>(y_vec.at[j]) : 0.0f;
      const float gather_from_y_2 = y_2_found ? static_cast<float>(y_2_vec.at[j]) : 0.0f;
      const float gather_from_y_3 = y_3_found ? static_cast<float>(y_3_vec.at[j]) : 0.0f;
      const float gather_from_y_4 = y_4_found ? static_cast<float>(y_4_vec.at[j]) : 0.0f;
      const float gather_times_softmax_offset_0 = gather * softmax_offset_0;
      const float gather_from_y_2_times_softmax_offset_1 = gather_from_y_2 * softmax_offset_1;
      const float sum_of_2 = gather_times_softmax_offset_0 + gather_from_y_2_times_softmax_offset_1;
      const float gather_from_y_3_times_softmax_offset_2 = gather_from_y_3 * softmax_offset_2;
      const float sum_of_3 = sum_of_2 + gather_from_y_3_times_softmax_offset_2;
      const float gather_from_y_4_times_softmax_offset_3 = gather_from_y_4 * softmax_offset_3;
      const float sum_of_4 = sum_of_3 + gather_from_y_4_times_softmax_offset_3;
      out_vec.at[j] = static_cast<__bf16>(sum_of_4);
    }
    store<4>(out_row + col, out_vec);
  }
}
