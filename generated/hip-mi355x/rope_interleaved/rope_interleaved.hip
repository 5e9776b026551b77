// rope_interleaved  bf16[T, H, D_half], bf16[T, H, D_half], f32[T, 1, D_half], f32[T, 1, D_half] -> bf16[T, H, D_half], bf16[T, H, D_half]
//   at T=16384 H=32 D_half=64
// Pairs are neighbours, as in the paper and GPT-J.
//
//     def rope_interleaved(x, cos, sin):
//         even, odd = x[..., ::2], x[..., 1::2]
//         rotated = F.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
//         return F.rearrange(rotated, "t h p two -> t h (p two)")
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    even is x[..., ::2]; odd is x[..., 1::2]; out_even is out[..., ::2]; out_odd is out[...,
//          1::2]
// tile     tiles of rows and columns; a block of 128 threads on 8 rows, 4 elements a thread
// traffic  276.8 MB moved, 276.8 MB ideal, 1493.2 MB unfused in 6 launches
// floor    34.6 us at 8 TB/s; memory-bound at 0.73 flop/B
// rounding out_even to bf16 when stored; out_odd to bf16 when stored; f32 between
// needs    rows of 64 elements, next to each other; even, odd, cosine, sine, out_even, out_odd: address
//          and strides in multiples of 16 B; even, odd: by turns the elements of one array, in the
//          vectors of even; out_even, out_odd: by turns the elements of one array, in the vectors of
//          out_even

// N values that move together, 16 bytes at a time where they fill them
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
};

// x, of which the compiler knows nothing: where it knows a row's number to be a quotient and a rest, NVRTC writes the first
// vector of each thread value by value
__device__ __forceinline__ long long unknown(long long x) {
  return x;
}

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
rope_interleaved(
    const __bf16* __restrict__ even_ptr,
    const __bf16* __restrict__ odd_ptr,
    const float* __restrict__ cosine_ptr,
    const float* __restrict__ sine_ptr,
    __bf16* __restrict__ out_even_ptr,
    __bf16* __restrict__ out_odd_ptr,
    long long T_size,
    long long H_size,
    long long even_stride_T,
    long long even_stride_H,
    long long cosine_stride_T,
    long long sine_stride_T,
    long long out_even_stride_T,
    long long out_even_stride_H)
{
  constexpr int block_rows = 8;  // that a block takes
  constexpr int row_threads = 16;
  const int lane = threadIdx.x % row_threads;  // of the 16 threads that share a row
  const long long rows = T_size * H_size;
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned T_at = static_cast<unsigned>(row) / static_cast<unsigned>(H_size);
  const unsigned H_at = static_cast<unsigned>(row) % static_cast<unsigned>(H_size);
  const __bf16* const even_row = even_ptr + T_at * even_stride_T + H_at * even_stride_H;
  const float* const cosine_row = cosine_ptr + T_at * cosine_stride_T;
  const float* const sine_row = sine_ptr + T_at * sine_stride_T;
  __bf16* const out_even_row = out_even_ptr + unknown(T_at * out_even_stride_T + H_at * out_even_stride_H);
  const int col = lane * 4;

  // pass 1 of 1: read even, cosine, odd, sine; write out_even, out_odd
  {
    const Vec<__bf16, 8> even_vec = load<8>(even_row + col * 2);
    const Vec<float, 4> cosine_vec = load<4>(cosine_row + col);
    const Vec<float, 4> sine_vec = load<4>(sine_row + col);
    Vec<__bf16, 8> out_even_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float even = static_cast<float>(even_vec.at[2 * j]);
      const float cosine = cosine_vec.at[j];
      const float odd = static_cast<float>(even_vec.at[2 * j + 1]);
      const float sine = sine_vec.at[j];
      const float even_times_cosine = even * cosine;
      const float odd_times_sine = odd * sine;
      const float sub = even_times_cosine - odd_times_sine;
      const float odd_times_cosine = odd * cosine;
      const float even_times_sine = even * sine;
      const float add = odd_times_cosine + even_times_sine;
      out_even_vec.at[2 * j] = static_cast<__bf16>(sub);
      out_even_vec.at[2 * j + 1] = static_cast<__bf16>(add);
    }
    if (live) store<8>(out_even_row + col * 2, out_even_vec);
  }
}
