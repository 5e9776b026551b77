// rope_qk: 2 steps in one launch of 128 threads a block
//
// because  one launch is expected to take 54.0 us, and one for each step 56.0
//
// a. rope_qk_q_turned  bf16[T, H, D_half], bf16[T, H, D_half], f32[T, 1, D_half], f32[T, 1, D_half] -> bf16[T, H, D_half], bf16[T, H, D_half]
//      at T=16384 H=32 D_half=64
//    q_turned of rope_qk.
//
//    target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
//    views    low is q[..., :D // 2]; high is q[..., D // 2:]; q_turned_low is q_turned[..., :D // 2];
//             q_turned_high is q_turned[..., D // 2:]
//    tile     tiles of rows and columns; a block of 128 threads on 16 rows, 8 elements a thread
//    traffic  276.8 MB moved, 276.8 MB ideal, 276.8 MB unfused in 1 launch
//    floor    34.6 us at 8 TB/s; memory-bound at 0.73 flop/B
//    rounding q_turned_low to bf16 when stored; q_turned_high to bf16 when stored; f32 between
//    needs    rows of 64 elements, next to each other; low, high, cosine, sine, q_turned_low,
//             q_turned_high: address and strides in multiples of 16 B
//
// b. rope_qk_k_turned  bf16[T, K, D_half], bf16[T, K, D_half], f32[T, 1, D_half], f32[T, 1, D_half] -> bf16[T, K, D_half], bf16[T, K, D_half]
//      at T=16384 K=8 D_half=64
//    k_turned of rope_qk.
//
//    target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
//    views    low is k[..., :D // 2]; high is k[..., D // 2:]; k_turned_low is k_turned[..., :D // 2];
//             k_turned_high is k_turned[..., D // 2:]
//    tile     tiles of rows and columns; a block of 128 threads on 16 rows, 8 elements a thread
//    traffic  75.5 MB moved, 75.5 MB ideal, 75.5 MB unfused in 1 launch
//    floor    9.4 us at 8 TB/s; memory-bound at 0.67 flop/B
//    rounding k_turned_low to bf16 when stored; k_turned_high to bf16 when stored; f32 between
//    needs    rows of 64 elements, next to each other; low, high, cosine, sine, k_turned_low,
//             k_turned_high: address and strides in multiples of 16 B

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

// q_turned: what the step's block of that number does
__device__ __forceinline__ void part_a(
    unsigned block,
    const __bf16* __restrict__ low_ptr,
    const __bf16* __restrict__ high_ptr,
    const float* __restrict__ cosine_ptr,
    const float* __restrict__ sine_ptr,
    __bf16* __restrict__ q_turned_low_ptr,
    __bf16* __restrict__ q_turned_high_ptr,
    long long T_size,
    long long H_size,
    long long low_stride_T,
    long long low_stride_H,
    long long high_stride_T,
    long long high_stride_H,
    long long cosine_stride_T,
    long long sine_stride_T,
    long long q_turned_low_stride_T,
    long long q_turned_low_stride_H,
    long long q_turned_high_stride_T,
    long long q_turned_high_stride_H)
{
  constexpr int block_rows = 16;  // that a block takes
  constexpr int row_threads = 8;
  const int lane = threadIdx.x % row_threads;  // of the 8 threads that share a row
  const long long rows = T_size * H_size;
  const long long own_row = static_cast<long long>(block) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned T_at = static_cast<unsigned>(row) / static_cast<unsigned>(H_size);
  const unsigned H_at = static_cast<unsigned>(row) % static_cast<unsigned>(H_size);
  const __bf16* const low_row = low_ptr + T_at * low_stride_T + H_at * low_stride_H;
  const __bf16* const high_row = high_ptr + T_at * high_stride_T + H_at * high_stride_H;
  const float* const cosine_row = cosine_ptr + T_at * cosine_stride_T;
  const float* const sine_row = sine_ptr + T_at * sine_stride_T;
  __bf16* const q_turned_low_row = q_turned_low_ptr + unknown(T_at * q_turned_low_stride_T + H_at * q_turned_low_stride_H);
  __bf16* const q_turned_high_row = q_turned_high_ptr + unknown(T_at * q_turned_high_stride_T + H_at * q_turned_high_stride_H);
  const int col = lane * 8;

  // pass 1 of 1: read low, cosine, high, sine; write q_turned_low, q_turned_high
  {
    const Vec<__bf16, 8> low_vec = load<8>(low_row + col);
    const Vec<float, 8> cosine_vec = load<8>(cosine_row + col);
    const Vec<__bf16, 8> high_vec = load<8>(high_row + col);
    const Vec<float, 8> sine_vec = load<8>(sine_row + col);
    Vec<__bf16, 8> q_turned_low_vec;
    Vec<__bf16, 8> q_turned_high_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float low = static_cast<float>(low_vec.at[j]);
      const float cosine = cosine_vec.at[j];
      const float high = static_cast<float>(high_vec.at[j]);
      const float sine = sine_vec.at[j];
      const float low_times_cosine = low * cosine;
      const float high_times_sine = high * sine;
      const float sub = low_times_cosine - high_times_sine;
      const float high_times_cosine = high * cosine;
      const float low_times_sine = low * sine;
      const float add = high_times_cosine + low_times_sine;
      q_turned_low_vec.at[j] = static_cast<__bf16>(sub);
      q_turned_high_vec.at[j] = static_cast<__bf16>(add);
    }
    if (live) store<8>(q_turned_low_row + col, q_turned_low_vec);
    if (live) store<8>(q_turned_high_row + col, q_turned_high_vec);
  }
}

// k_turned: what the step's block of that number does
__device__ __forceinline__ void part_b(
    unsigned block,
    const __bf16* __restrict__ low_ptr,
    const __bf16* __restrict__ high_ptr,
    const float* __restrict__ cosine_ptr,
    const float* __restrict__ sine_ptr,
    __bf16* __restrict__ k_turned_low_ptr,
    __bf16* __restrict__ k_turned_high_ptr,
    long long T_size,
    long long K_size,
    long long low_stride_T,
    long long low_stride_K,
    long long high_stride_T,
    long long high_stride_K,
    long long cosine_stride_T,
    long long sine_stride_T,
    long long k_turned_low_stride_T,
    long long k_turned_low_stride_K,
    long long k_turned_high_stride_T,
    long long k_turned_high_stride_K)
{
  constexpr int block_rows = 16;  // that a block takes
  constexpr int row_threads = 8;
  const int lane = threadIdx.x % row_threads;  // of the 8 threads that share a row
  const long long rows = T_size * K_size;
  const long long own_row = static_cast<long long>(block) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned T_at = static_cast<unsigned>(row) / static_cast<unsigned>(K_size);
  const unsigned K_at = static_cast<unsigned>(row) % static_cast<unsigned>(K_size);
  const __bf16* const low_row = low_ptr + T_at * low_stride_T + K_at * low_stride_K;
  const __bf16* const high_row = high_ptr + T_at * high_stride_T + K_at * high_stride_K;
  const float* const cosine_row = cosine_ptr + T_at * cosine_stride_T;
  const float* const sine_row = sine_ptr + T_at * sine_stride_T;
  __bf16* const k_turned_low_row = k_turned_low_ptr + unknown(T_at * k_turned_low_stride_T + K_at * k_turned_low_stride_K);
  __bf16* const k_turned_high_row = k_turned_high_ptr + unknown(T_at * k_turned_high_stride_T + K_at * k_turned_high_stride_K);
  const int col = lane * 8;

  // pass 1 of 1: read low, cosine, high, sine; write k_turned_low, k_turned_high
  {
    const Vec<__bf16, 8> low_vec = load<8>(low_row + col);
    const Vec<float, 8> cosine_vec = load<8>(cosine_row + col);
    const Vec<__bf16, 8> high_vec = load<8>(high_row + col);
    const Vec<float, 8> sine_vec = load<8>(sine_row + col);
    Vec<__bf16, 8> k_turned_low_vec;
    Vec<__bf16, 8> k_turned_high_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float low = static_cast<float>(low_vec.at[j]);
      const float cosine = cosine_vec.at[j];
      const float high = static_cast<float>(high_vec.at[j]);
      const float sine = sine_vec.at[j];
      const float low_times_cosine = low * cosine;
      const float high_times_sine = high * sine;
      const float sub = low_times_cosine - high_times_sine;
      const float high_times_cosine = high * cosine;
      const float low_times_sine = low * sine;
      const float add = high_times_cosine + low_times_sine;
      k_turned_low_vec.at[j] = static_cast<__bf16>(sub);
      k_turned_high_vec.at[j] = static_cast<__bf16>(add);
    }
    if (live) store<8>(k_turned_low_row + col, k_turned_low_vec);
    if (live) store<8>(k_turned_high_row + col, k_turned_high_vec);
  }
}

extern "C" __global__ void __launch_bounds__(128)
rope_qk(
    const __bf16* __restrict__ a_low_ptr,
    const __bf16* __restrict__ a_high_ptr,
    const float* __restrict__ a_cosine_ptr,
    const float* __restrict__ a_sine_ptr,
    __bf16* __restrict__ a_q_turned_low_ptr,
    __bf16* __restrict__ a_q_turned_high_ptr,
    const __bf16* __restrict__ b_low_ptr,
    const __bf16* __restrict__ b_high_ptr,
    const float* __restrict__ b_cosine_ptr,
    const float* __restrict__ b_sine_ptr,
    __bf16* __restrict__ b_k_turned_low_ptr,
    __bf16* __restrict__ b_k_turned_high_ptr,
    long long blocks_a,
    long long a_T_size,
    long long a_H_size,
    long long a_low_stride_T,
    long long a_low_stride_H,
    long long a_high_stride_T,
    long long a_high_stride_H,
    long long a_cosine_stride_T,
    long long a_sine_stride_T,
    long long a_q_turned_low_stride_T,
    long long a_q_turned_low_stride_H,
    long long a_q_turned_high_stride_T,
    long long a_q_turned_high_stride_H,
    long long b_T_size,
    long long b_K_size,
    long long b_low_stride_T,
    long long b_low_stride_K,
    long long b_high_stride_T,
    long long b_high_stride_K,
    long long b_cosine_stride_T,
    long long b_sine_stride_T,
    long long b_k_turned_low_stride_T,
    long long b_k_turned_low_stride_K,
    long long b_k_turned_high_stride_T,
    long long b_k_turned_high_stride_K)
{
  unsigned block = blockIdx.x;  // the first blocks do the first step
  if (block < blocks_a) {
    part_a(block, a_low_ptr, a_high_ptr, a_cosine_ptr, a_sine_ptr, a_q_turned_low_ptr, a_q_turned_high_ptr, a_T_size,
        a_H_size, a_low_stride_T, a_low_stride_H, a_high_stride_T, a_high_stride_H, a_cosine_stride_T, a_sine_stride_T,
        a_q_turned_low_stride_T, a_q_turned_low_stride_H, a_q_turned_high_stride_T, a_q_turned_high_stride_H);
    return;
  }
  block -= static_cast<unsigned>(blocks_a);
  part_b(block, b_low_ptr, b_high_ptr, b_cosine_ptr, b_sine_ptr, b_k_turned_low_ptr, b_k_turned_high_ptr, b_T_size,
      b_K_size, b_low_stride_T, b_low_stride_K, b_high_stride_T, b_high_stride_K, b_cosine_stride_T, b_sine_stride_T,
      b_k_turned_low_stride_T, b_k_turned_low_stride_K, b_k_turned_high_stride_T, b_k_turned_high_stride_K);
}
