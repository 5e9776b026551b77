// grouped_mxfp4_found_times_dequantize_mul: 2 steps in one launch of 128 threads a block
//
// because  one launch is expected to take 1373.5 us, and one for each step 1375.5
//
// a. grouped_mxfp4_found_times_dequantize  u8[E, N, K_over_32, 16], f8e8m0[E, N, K_over_32, 1] -> bf16[E, N, K_over_32, 16], bf16[E, N,
//      K_over_32, 16]  at E=128 N=2880 K_over_32=90
//    found_times_dequantize of grouped_mxfp4.
//
//    target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
//    views    w_gate_part is w_gate as [E, N, K // 32, 16]; found_times_dequantize_even is
//             found_times_dequantize[..., ::2]; found_times_dequantize_odd is found_times_dequantize[...,
//             1::2]
//    tile     tiles of rows and columns; a block of 128 threads on 32 rows, 4 elements a thread
//    traffic  2687.4 MB moved, 2687.4 MB ideal, 11180.9 MB unfused in 2 launches
//    floor    507.1 us at 5.3 TB/s; memory-bound at 1.38 flop/B
//    rounding found_times_dequantize_even to bf16 when stored; found_times_dequantize_odd to bf16 when
//             stored; f32 between
//    needs    rows of 16 elements, next to each other; w_gate_part: address and strides in multiples of 4
//             B; found_times_dequantize_even, found_times_dequantize_odd: address and strides in multiples
//             of 16 B; found_times_dequantize_even, found_times_dequantize_odd: by turns the elements of
//             one array, in the vectors of found_times_dequantize_even
//
// b. grouped_mxfp4_mul  u8[E, N, K_over_32, 16], f8e8m0[E, N, K_over_32, 1] -> bf16[E, N, K_over_32, 16], bf16[E, N, K_over_32, 16]  at E=128
//      N=2880 K_over_32=90
//    mul of grouped_mxfp4.
//
//    target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
//    views    w_up_part is w_up as [E, N, K // 32, 16]; mul_even is mul[..., ::2]; mul_odd is mul[...,
//             1::2]
//    tile     tiles of rows and columns; a block of 128 threads on 32 rows, 4 elements a thread
//    traffic  2687.4 MB moved, 2687.4 MB ideal, 11180.9 MB unfused in 2 launches
//    floor    507.1 us at 5.3 TB/s; memory-bound at 1.38 flop/B
//    rounding mul_even to bf16 when stored; mul_odd to bf16 when stored; f32 between
//    needs    rows of 16 elements, next to each other; w_up_part: address and strides in multiples of 4 B;
//             mul_even, mul_odd: address and strides in multiples of 16 B; mul_even, mul_odd: by turns the
//             elements of one array, in the vectors of mul_even

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

// the power of 2 that an f8e8m0 is: 0 is 2^-127, below a float's exponents, and what would be infinity NaN
__device__ __forceinline__ float f8e8m0_value(unsigned char x) {
  const float power = fmaxf(__uint_as_float(static_cast<unsigned>(x) << 23), 5.87747175e-39f);
  return fmaf(power, 0.0f, power);
}

// the number that a nibble is: its exponent and mantissa behind those of f32, which are 2^126 times as much
__device__ __forceinline__ float f4e2m1_value(int x) {
  const float size = __uint_as_float((static_cast<unsigned>(x) & 7u) << 22) * 8.50705917e+37f;
  return x & 8 ? -size : size;
}

// found_times_dequantize: what the step's block of that number does
__device__ __forceinline__ void part_a(
    unsigned block,
    const unsigned char* __restrict__ w_gate_part_ptr,
    const unsigned char* __restrict__ gate_scale_ptr,
    __bf16* __restrict__ found_times_dequantize_even_ptr,
    long long E_size,
    long long N_size,
    long long K_over_32_size,
    long long w_gate_part_stride_E,
    long long w_gate_part_stride_N,
    long long w_gate_part_stride_K_over_32,
    long long gate_scale_stride_E,
    long long gate_scale_stride_N,
    long long gate_scale_stride_K_over_32,
    long long found_times_dequantize_even_stride_E,
    long long found_times_dequantize_even_stride_N,
    long long found_times_dequantize_even_stride_K_over_32)
{
  constexpr int block_rows = 32;  // that a block takes
  constexpr int row_threads = 4;
  const int lane = threadIdx.x % row_threads;  // of the 4 threads that share a row
  const long long rows = E_size * N_size * K_over_32_size;
  const long long own_row = static_cast<long long>(block) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned E_at = static_cast<unsigned>(row) / static_cast<unsigned>(K_over_32_size) / static_cast<unsigned>(N_size);
  const unsigned N_at = static_cast<unsigned>(row) / static_cast<unsigned>(K_over_32_size) % static_cast<unsigned>(N_size);
  const unsigned K_over_32_at = static_cast<unsigned>(row) % static_cast<unsigned>(K_over_32_size);
  const unsigned char* const w_gate_part_row = w_gate_part_ptr + E_at * w_gate_part_stride_E + N_at * w_gate_part_stride_N
      + K_over_32_at * w_gate_part_stride_K_over_32;
  const unsigned char* const gate_scale_row = gate_scale_ptr + E_at * gate_scale_stride_E + N_at * gate_scale_stride_N
      + K_over_32_at * gate_scale_stride_K_over_32;
  __bf16* const found_times_dequantize_even_row = found_times_dequantize_even_ptr + unknown(E_at * found_times_dequantize_even_stride_E
      + N_at * found_times_dequantize_even_stride_N + K_over_32_at * found_times_dequantize_even_stride_K_over_32);
  const float gate_scale = f8e8m0_value(*gate_scale_row);
  const int col = lane * 4;

  // pass 1 of 1: read w_gate_part; write found_times_dequantize_even, found_times_dequantize_odd
  {
    const Vec<unsigned char, 4> w_gate_part_vec = load<4>(w_gate_part_row + col);
    Vec<__bf16, 8> found_times_dequantize_even_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int w_gate_part = static_cast<int>(w_gate_part_vec.at[j]);
      const int bit_and = w_gate_part & 15;
      const float found = f4e2m1_value(bit_and);
      const int shift_right = w_gate_part >> 4;
      const float found_of_found = f4e2m1_value(shift_right);
      const float found_times_gate_scale = found * gate_scale;
      const float found_of_found_times_gate_scale = found_of_found * gate_scale;
      found_times_dequantize_even_vec.at[2 * j] = static_cast<__bf16>(found_times_gate_scale);
      found_times_dequantize_even_vec.at[2 * j + 1] = static_cast<__bf16>(found_of_found_times_gate_scale);
    }
    if (live) store<8>(found_times_dequantize_even_row + col * 2, found_times_dequantize_even_vec);
  }
}

// mul: what the step's block of that number does
__device__ __forceinline__ void part_b(
    unsigned block,
    const unsigned char* __restrict__ w_up_part_ptr,
    const unsigned char* __restrict__ up_scale_ptr,
    __bf16* __restrict__ mul_even_ptr,
    long long E_size,
    long long N_size,
    long long K_over_32_size,
    long long w_up_part_stride_E,
    long long w_up_part_stride_N,
    long long w_up_part_stride_K_over_32,
    long long up_scale_stride_E,
    long long up_scale_stride_N,
    long long up_scale_stride_K_over_32,
    long long mul_even_stride_E,
    long long mul_even_stride_N,
    long long mul_even_stride_K_over_32)
{
  constexpr int block_rows = 32;  // that a block takes
  constexpr int row_threads = 4;
  const int lane = threadIdx.x % row_threads;  // of the 4 threads that share a row
  const long long rows = E_size * N_size * K_over_32_size;
  const long long own_row = static_cast<long long>(block) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned E_at = static_cast<unsigned>(row) / static_cast<unsigned>(K_over_32_size) / static_cast<unsigned>(N_size);
  const unsigned N_at = static_cast<unsigned>(row) / static_cast<unsigned>(K_over_32_size) % static_cast<unsigned>(N_size);
  const unsigned K_over_32_at = static_cast<unsigned>(row) % static_cast<unsigned>(K_over_32_size);
  const unsigned char* const w_up_part_row = w_up_part_ptr + E_at * w_up_part_stride_E + N_at * w_up_part_stride_N
      + K_over_32_at * w_up_part_stride_K_over_32;
  const unsigned char* const up_scale_row = up_scale_ptr + E_at * up_scale_stride_E + N_at * up_scale_stride_N
      + K_over_32_at * up_scale_stride_K_over_32;
  __bf16* const mul_even_row = mul_even_ptr + unknown(E_at * mul_even_stride_E + N_at * mul_even_stride_N
      + K_over_32_at * mul_even_stride_K_over_32);
  const float up_scale = f8e8m0_value(*up_scale_row);
  const int col = lane * 4;

  // pass 1 of 1: read w_up_part; write mul_even, mul_odd
  {
    const Vec<unsigned char, 4> w_up_part_vec = load<4>(w_up_part_row + col);
    Vec<__bf16, 8> mul_even_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int w_up_part = static_cast<int>(w_up_part_vec.at[j]);
      const int bit_and = w_up_part & 15;
      const float found = f4e2m1_value(bit_and);
      const int shift_right = w_up_part >> 4;
      const float found_of_found = f4e2m1_value(shift_right);
      const float found_times_up_scale = found * up_scale;
      const float found_of_found_times_up_scale = found_of_found * up_scale;
      mul_even_vec.at[2 * j] = static_cast<__bf16>(found_times_up_scale);
      mul_even_vec.at[2 * j + 1] = static_cast<__bf16>(found_of_found_times_up_scale);
    }
    if (live) store<8>(mul_even_row + col * 2, mul_even_vec);
  }
}

extern "C" __global__ void __launch_bounds__(128)
grouped_mxfp4_found_times_dequantize_mul(
    const unsigned char* __restrict__ a_w_gate_part_ptr,
    const unsigned char* __restrict__ a_gate_scale_ptr,
    __bf16* __restrict__ a_found_times_dequantize_even_ptr,
    __bf16* __restrict__ a_found_times_dequantize_odd_ptr,
    const unsigned char* __restrict__ b_w_up_part_ptr,
    const unsigned char* __restrict__ b_up_scale_ptr,
    __bf16* __restrict__ b_mul_even_ptr,
    __bf16* __restrict__ b_mul_odd_ptr,
    long long blocks_a,
    long long a_E_size,
    long long a_N_size,
    long long a_K_over_32_size,
    long long a_w_gate_part_stride_E,
    long long a_w_gate_part_stride_N,
    long long a_w_gate_part_stride_K_over_32,
    long long a_gate_scale_stride_E,
    long long a_gate_scale_stride_N,
    long long a_gate_scale_stride_K_over_32,
    long long a_found_times_dequantize_even_stride_E,
    long long a_found_times_dequantize_even_stride_N,
    long long a_found_times_dequantize_even_stride_K_over_32,
    long long b_E_size,
    long long b_N_size,
    long long b_K_over_32_size,
    long long b_w_up_part_stride_E,
    long long b_w_up_part_stride_N,
    long long b_w_up_part_stride_K_over_32,
    long long b_up_scale_stride_E,
    long long b_up_scale_stride_N,
    long long b_up_scale_stride_K_over_32,
    long long b_mul_even_stride_E,
    long long b_mul_even_stride_N,
    long long b_mul_even_stride_K_over_32)
{
  unsigned block = blockIdx.x;  // the first blocks do the first step
  if (block < blocks_a) {
    part_a(block, a_w_gate_part_ptr, a_gate_scale_ptr, a_found_times_dequantize_even_ptr, a_E_size, a_N_size,
        a_K_over_32_size, a_w_gate_part_stride_E, a_w_gate_part_stride_N, a_w_gate_part_stride_K_over_32,
        a_gate_scale_stride_E, a_gate_scale_stride_N, a_gate_scale_stride_K_over_32, a_found_times_dequantize_even_stride_E,
        a_found_times_dequantize_even_stride_N, a_found_times_dequantize_even_stride_K_over_32);
    return;
  }
  block -= static_cast<unsigned>(blocks_a);
  part_b(block, b_w_up_part_ptr, b_up_scale_ptr, b_mul_even_ptr, b_E_size, b_N_size, b_K_over_32_size,
      b_w_up_part_stride_E, b_w_up_part_stride_N, b_w_up_part_stride_K_over_32, b_up_scale_stride_E, b_up_scale_stride_N,
      b_up_scale_stride_K_over_32, b_mul_even_stride_E, b_mul_even_stride_N, b_mul_even_stride_K_over_32);
}
