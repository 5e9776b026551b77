// rope_interleaved  bf16[T, H, D_half], bf16[T, H, D_half], f32[T, 1, D_half], f32[T, 1, D_half] -> bf16[T, H, D_half], bf16[T, H, D_half]
//   at T=16384 H=32 D_half=64
// Pairs are neighbours, as in the paper and GPT-J.
//
//     def rope_interleaved(x, cos, sin):
//         even, odd = x[..., ::2], x[..., 1::2]
//         rotated = F.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
//         return F.rearrange(rotated, "t h p two -> t h (p two)")
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
// views    even is x[..., ::2]; odd is x[..., 1::2]; out_part is out[..., ::2]; out_part_2 is out[...,
//          1::2]
// tile     tiles of rows and columns; a block of 128 threads on 16 rows, 8 x 1 elements a thread
// traffic  276.8 MB moved, 276.8 MB ideal, 1493.2 MB unfused in 6 launches
// floor    135.8 us at 2.039 TB/s; memory-bound at 0.73 flop/B
// rounding out_part to bf16 when stored; out_part_2 to bf16 when stored; f32 between
// needs    rows of 64 elements, next to each other

#include <cuda_bf16.h>

// N values that move together, 16 bytes at a time where they fill them
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
};

// x, of which the compiler knows nothing: where it knows a row's number to be a quotient and a rest, NVRTC writes the first
// vector of each thread value by value
__device__ __forceinline__ long long unknown(long long x) {
  asm("" : "+l"(x));
  return x;
}

// N values at p, one by one: p may lie anywhere
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_each(const T* p) {
  Vec<T, N> v;
  #pragma unroll
  for (int j = 0; j < N; ++j) v.at[j] = p[j];
  return v;
}

// values col ... col + N - 1 of a row whose values are `stride` apart; what lies outside the row is zero
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_apart(const T* row, long long stride, int col, int cols = 0x7fffffff) {
  Vec<T, N> v;
  #pragma unroll
  for (int j = 0; j < N; ++j) v.at[j] = col + j < cols ? row[(col + j) * stride] : T{};
  return v;
}

// values col ... col + N - 1 to a row whose values are `stride` apart; what lies outside the row is left alone
template <int N, typename T>
__device__ __forceinline__ void store_apart(T* row, long long stride, int col, const Vec<T, N>& v, int cols = 0x7fffffff) {
  #pragma unroll
  for (int j = 0; j < N; ++j) {
    if (col + j < cols) row[(col + j) * stride] = v.at[j];
  }
}

extern "C" __global__ void __launch_bounds__(128)
rope_interleaved(
    const __nv_bfloat16* __restrict__ even_ptr,
    const __nv_bfloat16* __restrict__ odd_ptr,
    const float* __restrict__ cos_ptr,
    const float* __restrict__ sin_ptr,
    __nv_bfloat16* __restrict__ out_part_ptr,
    __nv_bfloat16* __restrict__ out_part_2_ptr,
    long long T_size,
    long long H_size,
    long long even_stride_T,
    long long even_stride_H,
    long long even_stride_elements,
    long long odd_stride_T,
    long long odd_stride_H,
    long long odd_stride_elements,
    long long cos_stride_T,
    long long sin_stride_T,
    long long out_part_stride_T,
    long long out_part_stride_H,
    long long out_part_stride_elements,
    long long out_part_2_stride_T,
    long long out_part_2_stride_H,
    long long out_part_2_stride_elements)
{
  constexpr int row_threads = 8;
  constexpr int block_rows = 16;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 8 threads that share a row
  const long long rows = T_size * H_size;
  const long long own_row = static_cast<long long>(blockIdx.x) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned T_at = static_cast<unsigned>(row) / static_cast<unsigned>(H_size);
  const unsigned H_at = static_cast<unsigned>(row) % static_cast<unsigned>(H_size);
  const __nv_bfloat16* const even_row = even_ptr + T_at * even_stride_T + H_at * even_stride_H;
  const __nv_bfloat16* const odd_row = odd_ptr + T_at * odd_stride_T + H_at * odd_stride_H;
  const float* const cos_row = cos_ptr + T_at * cos_stride_T;
  const float* const sin_row = sin_ptr + T_at * sin_stride_T;
  __nv_bfloat16* const out_part_row = out_part_ptr + unknown(T_at * out_part_stride_T + H_at * out_part_stride_H);
  __nv_bfloat16* const out_part_2_row = out_part_2_ptr + unknown(T_at * out_part_2_stride_T + H_at * out_part_2_stride_H);

  // pass 1 of 1: read even, cos, odd, sin; write out_part, out_part_2
  Vec<__nv_bfloat16, 1> even_vec[8];
  Vec<float, 1> cos_vec[8];
  Vec<__nv_bfloat16, 1> odd_vec[8];
  Vec<float, 1> sin_vec[8];
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = v * row_threads + lane;
    even_vec[v] = load_apart<1>(even_row, even_stride_elements, col);
    cos_vec[v] = load_each<1>(cos_row + col);
    odd_vec[v] = load_apart<1>(odd_row, odd_stride_elements, col);
    sin_vec[v] = load_each<1>(sin_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = v * row_threads + lane;
    Vec<__nv_bfloat16, 1> out_part_vec;
    Vec<__nv_bfloat16, 1> out_part_2_vec;
    const float even = __bfloat162float(even_vec[v].at[0]);
    const float cos = cos_vec[v].at[0];
    const float odd = __bfloat162float(odd_vec[v].at[0]);
    const float sin = sin_vec[v].at[0];
    const float even_times_cos = even * cos;
    const float odd_times_sin = odd * sin;
    const float sub = even_times_cos - odd_times_sin;
    const float odd_times_cos = odd * cos;
    const float even_times_sin = even * sin;
    const float add = odd_times_cos + even_times_sin;
    out_part_vec.at[0] = __float2bfloat16_rn(sub);
    out_part_2_vec.at[0] = __float2bfloat16_rn(add);
    if (live) store_apart<1>(out_part_row, out_part_stride_elements, col, out_part_vec);
    if (live) store_apart<1>(out_part_2_row, out_part_2_stride_elements, col, out_part_2_vec);
  }
}
