// qk_norm_rope: 2 steps in one launch of 128 threads a block
//
// because  one launch is expected to take 229.0 us, and one for each step 231.0
//
// a. qk_norm_rope_q_turned  bf16[T, H, D_half], bf16[T, H, D_half], bf16[D_half], bf16[D_half], f32[T, 1, D_half], f32[T, 1, D_half] ->
//      bf16[T, H, D_half], bf16[T, H, D_half]  at T=16384 H=32 D_half=64
//    q_turned of qk_norm_rope.
//
//    target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
//    views    q_low is q[..., :D // 2]; q_high is q[..., D // 2:]; q_gain_low is q_gain[:D // 2];
//             q_gain_high is q_gain[D // 2:]; q_turned_low is q_turned[..., :D // 2]; q_turned_high is
//             q_turned[..., D // 2:]
//    tile     4 threads a row, 32 rows a block, 2 x 8 elements a thread; q_low, q_high in registers, as
//             read
//    traffic  276.8 MB moved, 276.8 MB ideal, 2446.3 MB unfused in 18 launches
//    floor    135.8 us at 2.039 TB/s; memory-bound at 1.73 flop/B
//    rounding q_turned_low to bf16 when stored; q_turned_high to bf16 when stored; f32 between
//    needs    rows of 64 elements, next to each other; q_low, q_high, q_gain_low, q_gain_high, cosine,
//             sine, q_turned_low, q_turned_high: address and strides in multiples of 16 B; q_gain_low
//             [D_half], q_gain_high [D_half] shared by every row
//
// b. qk_norm_rope_k_turned  bf16[T, K, D_half], bf16[T, K, D_half], bf16[D_half], bf16[D_half], f32[T, 1, D_half], f32[T, 1, D_half] ->
//      bf16[T, K, D_half], bf16[T, K, D_half]  at T=16384 K=8 D_half=64
//    k_turned of qk_norm_rope.
//
//    target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
//    views    k_low is k[..., :D // 2]; k_high is k[..., D // 2:]; k_gain_low is k_gain[:D // 2];
//             k_gain_high is k_gain[D // 2:]; k_turned_low is k_turned[..., :D // 2]; k_turned_high is
//             k_turned[..., D // 2:]
//    tile     4 threads a row, 32 rows a block, 2 x 8 elements a thread; k_low, k_high in registers, as
//             read
//    traffic  75.5 MB moved, 75.5 MB ideal, 624.2 MB unfused in 18 launches
//    floor    37.0 us at 2.039 TB/s; memory-bound at 1.59 flop/B
//    rounding k_turned_low to bf16 when stored; k_turned_high to bf16 when stored; f32 between
//    needs    rows of 64 elements, next to each other; k_low, k_high, k_gain_low, k_gain_high, cosine,
//             sine, k_turned_low, k_turned_high: address and strides in multiples of 16 B; k_gain_low
//             [D_half], k_gain_high [D_half] shared by every row

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

// The vector stays as it was read: what the compiler has made of it would take more registers, and is made again.
template <typename T, int N>
__device__ __forceinline__ void leave_packed(Vec<T, N>& v) {
  unsigned words[sizeof(v) / 4];
  memcpy(words, &v, sizeof(v));
  #pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(v) / 4); ++i) asm volatile("" : "+r"(words[i]));
  memcpy(&v, words, sizeof(v));
}

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// the sum over the 4 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v) {
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

// q_turned: what the step's block of that number does
__device__ __forceinline__ void part_a(
    unsigned block,
    const __nv_bfloat16* __restrict__ q_low_ptr,
    const __nv_bfloat16* __restrict__ q_high_ptr,
    const __nv_bfloat16* __restrict__ q_gain_low_ptr,
    const __nv_bfloat16* __restrict__ q_gain_high_ptr,
    const float* __restrict__ cosine_ptr,
    const float* __restrict__ sine_ptr,
    __nv_bfloat16* __restrict__ q_turned_low_ptr,
    __nv_bfloat16* __restrict__ q_turned_high_ptr,
    long long T_size,
    long long H_size,
    long long q_low_stride_T,
    long long q_low_stride_H,
    long long q_high_stride_T,
    long long q_high_stride_H,
    long long cosine_stride_T,
    long long sine_stride_T,
    long long q_turned_low_stride_T,
    long long q_turned_low_stride_H,
    long long q_turned_high_stride_T,
    long long q_turned_high_stride_H)
{
  constexpr int row_threads = 4;
  constexpr int block_rows = 32;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 4 threads that share a row
  const long long rows = T_size * H_size;
  const long long own_row = static_cast<long long>(block) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned T_at = static_cast<unsigned>(row) / static_cast<unsigned>(H_size);
  const unsigned H_at = static_cast<unsigned>(row) % static_cast<unsigned>(H_size);
  const __nv_bfloat16* const q_low_row = q_low_ptr + T_at * q_low_stride_T + H_at * q_low_stride_H;
  const __nv_bfloat16* const q_high_row = q_high_ptr + T_at * q_high_stride_T + H_at * q_high_stride_H;
  const float* const cosine_row = cosine_ptr + T_at * cosine_stride_T;
  const float* const sine_row = sine_ptr + T_at * sine_stride_T;
  __nv_bfloat16* const q_turned_low_row = q_turned_low_ptr + unknown(T_at * q_turned_low_stride_T + H_at * q_turned_low_stride_H);
  __nv_bfloat16* const q_turned_high_row = q_turned_high_ptr + unknown(T_at * q_turned_high_stride_T + H_at * q_turned_high_stride_H);
  Vec<__nv_bfloat16, 8> q_low_vec[2];
  Vec<__nv_bfloat16, 8> q_high_vec[2];

  // pass 1 of 2: read q_low, q_high; keep q_low, q_high; sum_of_squares = sum(square); sum_of_square_of_q_high =
  //   sum(square_of_q_high)
  float sum_of_squares_part = 0.0f;
  float sum_of_square_of_q_high_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 8;
    q_low_vec[v] = load<8>(q_low_row + col);
    q_high_vec[v] = load<8>(q_high_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float q_low = __bfloat162float(q_low_vec[v].at[j]);
      const float q_high = __bfloat162float(q_high_vec[v].at[j]);
      const float square = q_low * q_low;
      const float square_of_q_high = q_high * q_high;
      sum_of_squares_part += square;
      sum_of_square_of_q_high_part += square_of_q_high;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part);
  const float sum_of_square_of_q_high = row_sum(sum_of_square_of_q_high_part);
  const float mean = sum_of_squares / 64.0f;
  const float quotient = sum_of_square_of_q_high / 64.0f;
  const float mean_plus_quotient = mean + quotient;
  const float quotient_from_q_low = mean_plus_quotient / 2.0f;
  const float add = quotient_from_q_low + 1e-06f;
  const float rsqrt_ = rsqrtf(add);

  // pass 2 of 2: read q_gain_low, cosine, q_gain_high, sine; write q_turned_low, q_turned_high
  #pragma unroll
  for (int v = 0; v < 2; ++v) leave_packed(q_low_vec[v]);
  #pragma unroll
  for (int v = 0; v < 2; ++v) leave_packed(q_high_vec[v]);
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 8;
    const Vec<__nv_bfloat16, 8> q_gain_low_vec = load<8>(q_gain_low_ptr + col);
    const Vec<float, 8> cosine_vec = load<8>(cosine_row + col);
    const Vec<__nv_bfloat16, 8> q_gain_high_vec = load<8>(q_gain_high_ptr + col);
    const Vec<float, 8> sine_vec = load<8>(sine_row + col);
    Vec<__nv_bfloat16, 8> q_turned_low_vec;
    Vec<__nv_bfloat16, 8> q_turned_high_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float q_low = __bfloat162float(q_low_vec[v].at[j]);
      const float q_high = __bfloat162float(q_high_vec[v].at[j]);
      const float q_gain_low = __bfloat162float(q_gain_low_vec.at[j]);
      const float cosine = cosine_vec.at[j];
      const float q_gain_high = __bfloat162float(q_gain_high_vec.at[j]);
      const float sine = sine_vec.at[j];
      const float q_low_times_rsqrt = q_low * rsqrt_;
      const float mul = q_low_times_rsqrt * q_gain_low;
      const float q_high_times_rsqrt = q_high * rsqrt_;
      const float mul_from_q_high = q_high_times_rsqrt * q_gain_high;
      const float mul_times_cosine = mul * cosine;
      const float mul_from_q_high_times_sine = mul_from_q_high * sine;
      const float sub = mul_times_cosine - mul_from_q_high_times_sine;
      const float mul_from_q_high_times_cosine = mul_from_q_high * cosine;
      const float mul_times_sine = mul * sine;
      const float q_turned_high = mul_from_q_high_times_cosine + mul_times_sine;
      q_turned_low_vec.at[j] = __float2bfloat16_rn(sub);
      q_turned_high_vec.at[j] = __float2bfloat16_rn(q_turned_high);
    }
    if (live) store<8>(q_turned_low_row + col, q_turned_low_vec);
    if (live) store<8>(q_turned_high_row + col, q_turned_high_vec);
  }
}

// k_turned: what the step's block of that number does
__device__ __forceinline__ void part_b(
    unsigned block,
    const __nv_bfloat16* __restrict__ k_low_ptr,
    const __nv_bfloat16* __restrict__ k_high_ptr,
    const __nv_bfloat16* __restrict__ k_gain_low_ptr,
    const __nv_bfloat16* __restrict__ k_gain_high_ptr,
    const float* __restrict__ cosine_ptr,
    const float* __restrict__ sine_ptr,
    __nv_bfloat16* __restrict__ k_turned_low_ptr,
    __nv_bfloat16* __restrict__ k_turned_high_ptr,
    long long T_size,
    long long K_size,
    long long k_low_stride_T,
    long long k_low_stride_K,
    long long k_high_stride_T,
    long long k_high_stride_K,
    long long cosine_stride_T,
    long long sine_stride_T,
    long long k_turned_low_stride_T,
    long long k_turned_low_stride_K,
    long long k_turned_high_stride_T,
    long long k_turned_high_stride_K)
{
  constexpr int row_threads = 4;
  constexpr int block_rows = 32;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 4 threads that share a row
  const long long rows = T_size * K_size;
  const long long own_row = static_cast<long long>(block) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned T_at = static_cast<unsigned>(row) / static_cast<unsigned>(K_size);
  const unsigned K_at = static_cast<unsigned>(row) % static_cast<unsigned>(K_size);
  const __nv_bfloat16* const k_low_row = k_low_ptr + T_at * k_low_stride_T + K_at * k_low_stride_K;
  const __nv_bfloat16* const k_high_row = k_high_ptr + T_at * k_high_stride_T + K_at * k_high_stride_K;
  const float* const cosine_row = cosine_ptr + T_at * cosine_stride_T;
  const float* const sine_row = sine_ptr + T_at * sine_stride_T;
  __nv_bfloat16* const k_turned_low_row = k_turned_low_ptr + unknown(T_at * k_turned_low_stride_T + K_at * k_turned_low_stride_K);
  __nv_bfloat16* const k_turned_high_row = k_turned_high_ptr + unknown(T_at * k_turned_high_stride_T + K_at * k_turned_high_stride_K);
  Vec<__nv_bfloat16, 8> k_low_vec[2];
  Vec<__nv_bfloat16, 8> k_high_vec[2];

  // pass 1 of 2: read k_low, k_high; keep k_low, k_high; sum_of_squares = sum(square); sum_of_square_of_k_high =
  //   sum(square_of_k_high)
  float sum_of_squares_part = 0.0f;
  float sum_of_square_of_k_high_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 8;
    k_low_vec[v] = load<8>(k_low_row + col);
    k_high_vec[v] = load<8>(k_high_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float k_low = __bfloat162float(k_low_vec[v].at[j]);
      const float k_high = __bfloat162float(k_high_vec[v].at[j]);
      const float square = k_low * k_low;
      const float square_of_k_high = k_high * k_high;
      sum_of_squares_part += square;
      sum_of_square_of_k_high_part += square_of_k_high;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part);
  const float sum_of_square_of_k_high = row_sum(sum_of_square_of_k_high_part);
  const float mean = sum_of_squares / 64.0f;
  const float quotient = sum_of_square_of_k_high / 64.0f;
  const float mean_plus_quotient = mean + quotient;
  const float quotient_from_k_low = mean_plus_quotient / 2.0f;
  const float add = quotient_from_k_low + 1e-06f;
  const float rsqrt_ = rsqrtf(add);

  // pass 2 of 2: read k_gain_low, cosine, k_gain_high, sine; write k_turned_low, k_turned_high
  #pragma unroll
  for (int v = 0; v < 2; ++v) leave_packed(k_low_vec[v]);
  #pragma unroll
  for (int v = 0; v < 2; ++v) leave_packed(k_high_vec[v]);
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 8;
    const Vec<__nv_bfloat16, 8> k_gain_low_vec = load<8>(k_gain_low_ptr + col);
    const Vec<float, 8> cosine_vec = load<8>(cosine_row + col);
    const Vec<__nv_bfloat16, 8> k_gain_high_vec = load<8>(k_gain_high_ptr + col);
    const Vec<float, 8> sine_vec = load<8>(sine_row + col);
    Vec<__nv_bfloat16, 8> k_turned_low_vec;
    Vec<__nv_bfloat16, 8> k_turned_high_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float k_low = __bfloat162float(k_low_vec[v].at[j]);
      const float k_high = __bfloat162float(k_high_vec[v].at[j]);
      const float k_gain_low = __bfloat162float(k_gain_low_vec.at[j]);
      const float cosine = cosine_vec.at[j];
      const float k_gain_high = __bfloat162float(k_gain_high_vec.at[j]);
      const float sine = sine_vec.at[j];
      const float k_low_times_rsqrt = k_low * rsqrt_;
      const float mul = k_low_times_rsqrt * k_gain_low;
      const float k_high_times_rsqrt = k_high * rsqrt_;
      const float mul_from_k_high = k_high_times_rsqrt * k_gain_high;
      const float mul_times_cosine = mul * cosine;
      const float mul_from_k_high_times_sine = mul_from_k_high * sine;
      const float sub = mul_times_cosine - mul_from_k_high_times_sine;
      const float mul_from_k_high_times_cosine = mul_from_k_high * cosine;
      const float mul_times_sine = mul * sine;
      const float k_turned_high = mul_from_k_high_times_cosine + mul_times_sine;
      k_turned_low_vec.at[j] = __float2bfloat16_rn(sub);
      k_turned_high_vec.at[j] = __float2bfloat16_rn(k_turned_high);
    }
    if (live) store<8>(k_turned_low_row + col, k_turned_low_vec);
    if (live) store<8>(k_turned_high_row + col, k_turned_high_vec);
  }
}

extern "C" __global__ void __launch_bounds__(128)
qk_norm_rope(
    const __nv_bfloat16* __restrict__ a_q_low_ptr,
    const __nv_bfloat16* __restrict__ a_q_high_ptr,
    const __nv_bfloat16* __restrict__ a_q_gain_low_ptr,
    const __nv_bfloat16* __restrict__ a_q_gain_high_ptr,
    const float* __restrict__ a_cosine_ptr,
    const float* __restrict__ a_sine_ptr,
    __nv_bfloat16* __restrict__ a_q_turned_low_ptr,
    __nv_bfloat16* __restrict__ a_q_turned_high_ptr,
    const __nv_bfloat16* __restrict__ b_k_low_ptr,
    const __nv_bfloat16* __restrict__ b_k_high_ptr,
    const __nv_bfloat16* __restrict__ b_k_gain_low_ptr,
    const __nv_bfloat16* __restrict__ b_k_gain_high_ptr,
    const float* __restrict__ b_cosine_ptr,
    const float* __restrict__ b_sine_ptr,
    __nv_bfloat16* __restrict__ b_k_turned_low_ptr,
    __nv_bfloat16* __restrict__ b_k_turned_high_ptr,
    long long blocks_a,
    long long a_T_size,
    long long a_H_size,
    long long a_q_low_stride_T,
    long long a_q_low_stride_H,
    long long a_q_high_stride_T,
    long long a_q_high_stride_H,
    long long a_cosine_stride_T,
    long long a_sine_stride_T,
    long long a_q_turned_low_stride_T,
    long long a_q_turned_low_stride_H,
    long long a_q_turned_high_stride_T,
    long long a_q_turned_high_stride_H,
    long long b_T_size,
    long long b_K_size,
    long long b_k_low_stride_T,
    long long b_k_low_stride_K,
    long long b_k_high_stride_T,
    long long b_k_high_stride_K,
    long long b_cosine_stride_T,
    long long b_sine_stride_T,
    long long b_k_turned_low_stride_T,
    long long b_k_turned_low_stride_K,
    long long b_k_turned_high_stride_T,
    long long b_k_turned_high_stride_K)
{
  unsigned block = blockIdx.x;  // the first blocks do the first step
  if (block < blocks_a) {
    part_a(block, a_q_low_ptr, a_q_high_ptr, a_q_gain_low_ptr, a_q_gain_high_ptr, a_cosine_ptr, a_sine_ptr,
        a_q_turned_low_ptr, a_q_turned_high_ptr, a_T_size, a_H_size, a_q_low_stride_T, a_q_low_stride_H, a_q_high_stride_T,
        a_q_high_stride_H, a_cosine_stride_T, a_sine_stride_T, a_q_turned_low_stride_T, a_q_turned_low_stride_H,
        a_q_turned_high_stride_T, a_q_turned_high_stride_H);
    return;
  }
  block -= static_cast<unsigned>(blocks_a);
  part_b(block, b_k_low_ptr, b_k_high_ptr, b_k_gain_low_ptr, b_k_gain_high_ptr, b_cosine_ptr, b_sine_ptr,
      b_k_turned_low_ptr, b_k_turned_high_ptr, b_T_size, b_K_size, b_k_low_stride_T, b_k_low_stride_K, b_k_high_stride_T,
      b_k_high_stride_K, b_cosine_stride_T, b_sine_stride_T, b_k_turned_low_stride_T, b_k_turned_low_stride_K,
      b_k_turned_high_stride_T, b_k_turned_high_stride_K);
}
