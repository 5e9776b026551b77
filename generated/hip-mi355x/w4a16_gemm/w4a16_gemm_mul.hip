// w4a16_gemm_mul  u8[N, K_over_128, 64], bf16[N, K_over_128, 1] -> bf16[N, K_over_128, 64], bf16[N, K_over_128, 64]  at N=8192
//   K_over_128=64
// mul of w4a16_gemm.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    w_part is w as [N, K // 128, 64]; mul_even is mul[..., ::2]; mul_odd is mul[..., 1::2]
// tile     tiles of rows and columns; a block of 128 threads on 8 rows, 4 elements a thread
// traffic  168.8 MB moved, 168.8 MB ideal, 705.7 MB unfused in 2 launches
// floor    21.1 us at 8 TB/s; memory-bound at 2.19 flop/B
// rounding mul_even to bf16 when stored; mul_odd to bf16 when stored; f32 between
// needs    rows of 64 elements, next to each other; w_part: address and strides in multiples of 4 B;
//          mul_even, mul_odd: address and strides in multiples of 16 B; mul_even, mul_odd: by turns the
//          elements of one array, in the vectors of mul_even

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
w4a16_gemm_mul(
    const unsigned char* __restrict__ w_part_ptr,
    const __bf16* __restrict__ scale_ptr,
    __bf16* __restrict__ mul_even_ptr,
    __bf16* __restrict__ mul_odd_ptr,
    long long N_size,
    long long K_over_128_size,
    long long w_part_stride_N,
    long long w_part_stride_K_over_128,
    long long scale_stride_N,
    long long scale_stride_K_over_128,
    long long mul_even_stride_N,
    long long mul_even_stride_K_over_128)
{
  constexpr int block_rows = 8;  // that a block takes
  constexpr int row_threads = 16;
  const int lane = threadIdx.x % row_threads;  // of the 16 threads that share a row
  const long long rows = N_size * K_over_128_size;
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned N_at = static_cast<unsigned>(row) / static_cast<unsigned>(K_over_128_size);
  const unsigned K_over_128_at = static_cast<unsigned>(row) % static_cast<unsigned>(K_over_128_size);
  const unsigned char* const w_part_row = w_part_ptr + N_at * w_part_stride_N + K_over_128_at * w_part_stride_K_over_128;
  const __bf16* const scale_row = scale_ptr + N_at * scale_stride_N + K_over_128_at * scale_stride_K_over_128;
  __bf16* const mul_even_row = mul_even_ptr + unknown(N_at * mul_even_stride_N + K_over_128_at * mul_even_stride_K_over_128);
  const float scale = static_cast<float>(*scale_row);
  const int col = lane * 4;

  // pass 1 of 1: read w_part; write mul_even, mul_odd
  {
    const Vec<unsigned char, 4> w_part_vec = load<4>(w_part_row + col);
    Vec<__bf16, 8> mul_even_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int w_part = static_cast<int>(w_part_vec.at[j]);
      const int bit_and = w_part & 15;
      const int bit_xor = bit_and ^ 8;
      const int sub = static_cast<int>(static_cast<unsigned>(bit_xor) - 8);
      const int shift_right = w_part >> 4;
      const int bit_xor_from_w_part = shift_right ^ 8;
      const int sub_from_w_part = static_cast<int>(static_cast<unsigned>(bit_xor_from_w_part) - 8);
      const float found = static_cast<float>(sub);
      const float found_times_scale = found * scale;
      const float found_of_found = static_cast<float>(sub_from_w_part);
      const float found_of_found_times_scale = found_of_found * scale;
      mul_even_vec.at[2 * j] = static_cast<__bf16>(found_times_scale);
      mul_even_vec.at[2 * j + 1] = static_cast<__bf16>(found_of_found_times_scale);
    }
    if (live) store<8>(mul_even_row + col * 2, mul_even_vec);
  }
}
