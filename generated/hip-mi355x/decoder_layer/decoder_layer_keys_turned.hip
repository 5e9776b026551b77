// decoder_layer_keys_turned: 2 steps in one launch of 128 threads a block
//
// because  one launch is expected to take 4.7 us, and one for each step 6.7
//
// a. decoder_layer_keys  f32[B, 1, E_half], f32[B, 1, E_half], i32[B, 1, 1], f32[B, H, E_half], f32[B, H, E_half], f32[B, H, E_half], f32[B,
//      H, E_half] -> bf16[B_times_T, H, E_half], bf16[B_times_T, H, E_half], bf16[B_times_T, H, E_half], bf16[B_times_T, H, E_half]  at B=8
//      E_half=64 H=8 B_times_T=16384
//    keys, values of decoder_layer.
//
//    target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
//    views    k_value_low is k_value as [B, H, E // 2]; k_value_high is k_value as [B, H, E // 2];
//             v_value_low is v_value as [B, H, E // 2]; v_value_high is v_value as [B, H, E // 2];
//             keys_low is keys[..., :E // 2]; keys_high is keys[..., E // 2:]; values_low is values[...,
//             :E // 2]; values_high is values[..., E // 2:]
//    writes   rows of keys_low, keys_high, values_low, values_high at slots; nothing where there is none
//    tile     tiles of rows and columns; a block of 128 threads on 8 rows, 4 elements a thread
//    traffic  0.1 MB moved, 0.1 MB ideal, 0.2 MB unfused in 3 launches
//    floor    0.0 us at 8 TB/s; memory-bound at 0.24 flop/B
//    rounding keys_low to bf16 when stored; keys_high to bf16 when stored; values_low to bf16 when stored;
//             values_high to bf16 when stored; f32 between
//    needs    rows of 64 elements, next to each other; cosine, sine, k_value_low, k_value_high,
//             v_value_low, v_value_high: address and strides in multiples of 16 B; keys_low, keys_high,
//             values_low, values_high: address and strides in multiples of 8 B
//
// b. decoder_layer_turned  f32[B, 1, E_half], f32[B, 1, E_half], f32[B, G_times_H, E_half], f32[B, G_times_H, E_half] -> bf16[B, G_times_H,
//      E_half], bf16[B, G_times_H, E_half]  at B=8 E_half=64 G_times_H=32
//    turned of decoder_layer.
//
//    target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
//    views    q_low is q as [B, G * H, E // 2]; q_high is q as [B, G * H, E // 2]; turned_low is
//             turned[..., :E // 2]; turned_high is turned[..., E // 2:]
//    tile     tiles of rows and columns; a block of 128 threads on 8 rows, 4 elements a thread
//    traffic  0.2 MB moved, 0.2 MB ideal, 0.5 MB unfused in 2 launches
//    floor    0.0 us at 8 TB/s; memory-bound at 0.49 flop/B
//    rounding turned_low to bf16 when stored; turned_high to bf16 when stored; f32 between
//    needs    rows of 64 elements, next to each other; cosine, sine, q_low, q_high: address and strides in
//             multiples of 16 B; turned_low, turned_high: address and strides in multiples of 8 B

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

// keys: what the step's block of that number does
__device__ __forceinline__ void part_a(
    unsigned block,
    const float* __restrict__ cosine_ptr,
    const float* __restrict__ sine_ptr,
    const int* __restrict__ slots_ptr,
    const float* __restrict__ k_value_low_ptr,
    const float* __restrict__ k_value_high_ptr,
    const float* __restrict__ v_value_low_ptr,
    const float* __restrict__ v_value_high_ptr,
    __bf16* __restrict__ keys_low_ptr,
    __bf16* __restrict__ keys_high_ptr,
    __bf16* __restrict__ values_low_ptr,
    __bf16* __restrict__ values_high_ptr,
    long long B_size,
    long long H_size,
    long long cosine_stride_B,
    long long sine_stride_B,
    long long slots_stride_B,
    long long k_value_low_stride_B,
    long long k_value_low_stride_H,
    long long k_value_high_stride_B,
    long long k_value_high_stride_H,
    long long v_value_low_stride_B,
    long long v_value_low_stride_H,
    long long v_value_high_stride_B,
    long long v_value_high_stride_H,
    long long keys_low_count,
    long long keys_low_stride,
    long long keys_low_stride_H,
    long long keys_high_count,
    long long keys_high_stride,
    long long keys_high_stride_H,
    long long values_low_count,
    long long values_low_stride,
    long long values_low_stride_H,
    long long values_high_count,
    long long values_high_stride,
    long long values_high_stride_H)
{
  constexpr int block_rows = 8;  // that a block takes
  constexpr int row_threads = 16;
  const int lane = threadIdx.x % row_threads;  // of the 16 threads that share a row
  const long long rows = B_size * H_size;
  const long long own_row = static_cast<long long>(block) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned B_at = static_cast<unsigned>(row) / static_cast<unsigned>(H_size);
  const unsigned H_at = static_cast<unsigned>(row) % static_cast<unsigned>(H_size);
  const float* const cosine_row = cosine_ptr + B_at * cosine_stride_B;
  const float* const sine_row = sine_ptr + B_at * sine_stride_B;
  const int* const slots_row = slots_ptr + B_at * slots_stride_B;
  const float* const k_value_low_row = k_value_low_ptr + B_at * k_value_low_stride_B + H_at * k_value_low_stride_H;
  const float* const k_value_high_row = k_value_high_ptr + B_at * k_value_high_stride_B + H_at * k_value_high_stride_H;
  const float* const v_value_low_row = v_value_low_ptr + B_at * v_value_low_stride_B + H_at * v_value_low_stride_H;
  const float* const v_value_high_row = v_value_high_ptr + B_at * v_value_high_stride_B + H_at * v_value_high_stride_H;
  const int slots = *slots_row;
  const bool keys_low_found = slots >= 0 && slots < keys_low_count;  // else nothing of it is written
  __bf16* const keys_low_row = keys_low_ptr + (keys_low_found ? slots : 0) * keys_low_stride + H_at * keys_low_stride_H;
  const bool keys_high_found = slots >= 0 && slots < keys_high_count;  // else nothing of it is written
  __bf16* const keys_high_row = keys_high_ptr + (keys_high_found ? slots : 0) * keys_high_stride + H_at * keys_high_stride_H;
  const bool values_low_found = slots >= 0 && slots < values_low_count;  // else nothing of it is written
  __bf16* const values_low_row = values_low_ptr + (values_low_found ? slots : 0) * values_low_stride + H_at * values_low_stride_H;
  const bool values_high_found = slots >= 0 && slots < values_high_count;  // else nothing of it is written
  __bf16* const values_high_row = values_high_ptr + (values_high_found ? slots : 0) * values_high_stride + H_at * values_high_stride_H;
  const int col = lane * 4;

  // pass 1 of 1: read k_value_low, cosine, k_value_high, sine, v_value_low, v_value_high; write keys_low,
  //   keys_high, values_low, values_high
  {
    const Vec<float, 4> k_value_low_vec = load<4>(k_value_low_row + col);
    const Vec<float, 4> cosine_vec = load<4>(cosine_row + col);
    const Vec<float, 4> k_value_high_vec = load<4>(k_value_high_row + col);
    const Vec<float, 4> sine_vec = load<4>(sine_row + col);
    const Vec<float, 4> v_value_low_vec = load<4>(v_value_low_row + col);
    const Vec<float, 4> v_value_high_vec = load<4>(v_value_high_row + col);
    Vec<__bf16, 4> keys_low_vec;
    Vec<__bf16, 4> keys_high_vec;
    Vec<__bf16, 4> values_low_vec;
    Vec<__bf16, 4> values_high_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float k_value_low = k_value_low_vec.at[j];
      const float cosine = cosine_vec.at[j];
      const float k_value_high = k_value_high_vec.at[j];
      const float sine = sine_vec.at[j];
      const float v_value_low = v_value_low_vec.at[j];
      const float v_value_high = v_value_high_vec.at[j];
      const float k_value_low_times_cosine = k_value_low * cosine;
      const float k_value_high_times_sine = k_value_high * sine;
      const float sub = k_value_low_times_cosine - k_value_high_times_sine;
      const float k_value_high_times_cosine = k_value_high * cosine;
      const float k_value_low_times_sine = k_value_low * sine;
      const float add = k_value_high_times_cosine + k_value_low_times_sine;
      keys_low_vec.at[j] = static_cast<__bf16>(sub);
      keys_high_vec.at[j] = static_cast<__bf16>(add);
      values_low_vec.at[j] = static_cast<__bf16>(v_value_low);
      values_high_vec.at[j] = static_cast<__bf16>(v_value_high);
    }
    if (live && keys_low_found) store<4>(keys_low_row + col, keys_low_vec);
    if (live && keys_high_found) store<4>(keys_high_row + col, keys_high_vec);
    if (live && values_low_found) store<4>(values_low_row + col, values_low_vec);
    if (live && values_high_found) store<4>(values_high_row + col, values_high_vec);
  }
}

// turned: what the step's block of that number does
__device__ __forceinline__ void part_b(
    unsigned block,
    const float* __restrict__ cosine_ptr,
    const float* __restrict__ sine_ptr,
    const float* __restrict__ q_low_ptr,
    const float* __restrict__ q_high_ptr,
    __bf16* __restrict__ turned_low_ptr,
    __bf16* __restrict__ turned_high_ptr,
    long long B_size,
    long long G_times_H_size,
    long long cosine_stride_B,
    long long sine_stride_B,
    long long q_low_stride_B,
    long long q_low_stride_G_times_H,
    long long q_high_stride_B,
    long long q_high_stride_G_times_H,
    long long turned_low_stride_B,
    long long turned_low_stride_G_times_H,
    long long turned_high_stride_B,
    long long turned_high_stride_G_times_H)
{
  constexpr int block_rows = 8;  // that a block takes
  constexpr int row_threads = 16;
  const int lane = threadIdx.x % row_threads;  // of the 16 threads that share a row
  const long long rows = B_size * G_times_H_size;
  const long long own_row = static_cast<long long>(block) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned B_at = static_cast<unsigned>(row) / static_cast<unsigned>(G_times_H_size);
  const unsigned G_times_H_at = static_cast<unsigned>(row) % static_cast<unsigned>(G_times_H_size);
  const float* const cosine_row = cosine_ptr + B_at * cosine_stride_B;
  const float* const sine_row = sine_ptr + B_at * sine_stride_B;
  const float* const q_low_row = q_low_ptr + B_at * q_low_stride_B + G_times_H_at * q_low_stride_G_times_H;
  const float* const q_high_row = q_high_ptr + B_at * q_high_stride_B + G_times_H_at * q_high_stride_G_times_H;
  __bf16* const turned_low_row = turned_low_ptr + unknown(B_at * turned_low_stride_B + G_times_H_at * turned_low_stride_G_times_H);
  __bf16* const turned_high_row = turned_high_ptr + unknown(B_at * turned_high_stride_B + G_times_H_at * turned_high_stride_G_times_H);
  const int col = lane * 4;

  // pass 1 of 1: read q_low, cosine, q_high, sine; write turned_low, turned_high
  {
    const Vec<float, 4> q_low_vec = load<4>(q_low_row + col);
    const Vec<float, 4> cosine_vec = load<4>(cosine_row + col);
    const Vec<float, 4> q_high_vec = load<4>(q_high_row + col);
    const Vec<float, 4> sine_vec = load<4>(sine_row + col);
    Vec<__bf16, 4> turned_low_vec;
    Vec<__bf16, 4> turned_high_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float q_low = q_low_vec.at[j];
      const float cosine = cosine_vec.at[j];
      const float q_high = q_high_vec.at[j];
      const float sine = sine_vec.at[j];
      const float q_low_times_cosine = q_low * cosine;
      const float q_high_times_sine = q_high * sine;
      const float sub = q_low_times_cosine - q_high_times_sine;
      const float q_high_times_cosine = q_high * cosine;
      const float q_low_times_sine = q_low * sine;
      const float add = q_high_times_cosine + q_low_times_sine;
      turned_low_vec.at[j] = static_cast<__bf16>(sub);
      turned_high_vec.at[j] = static_cast<__bf16>(add);
    }
    if (live) store<4>(turned_low_row + col, turned_low_vec);
    if (live) store<4>(turned_high_row + col, turned_high_vec);
  }
}

extern "C" __global__ void __launch_bounds__(128)
decoder_layer_keys_turned(
    const float* __restrict__ a_cosine_ptr,
    const float* __restrict__ a_sine_ptr,
    const int* __restrict__ a_slots_ptr,
    const float* __restrict__ a_k_value_low_ptr,
    const float* __restrict__ a_k_value_high_ptr,
    const float* __restrict__ a_v_value_low_ptr,
    const float* __restrict__ a_v_value_high_ptr,
    __bf16* __restrict__ a_keys_low_ptr,
    __bf16* __restrict__ a_keys_high_ptr,
    __bf16* __restrict__ a_values_low_ptr,
    __bf16* __restrict__ a_values_high_ptr,
    const float* __restrict__ b_cosine_ptr,
    const float* __restrict__ b_sine_ptr,
    const float* __restrict__ b_q_low_ptr,
    const float* __restrict__ b_q_high_ptr,
    __bf16* __restrict__ b_turned_low_ptr,
    __bf16* __restrict__ b_turned_high_ptr,
    long long blocks_a,
    long long a_B_size,
    long long a_H_size,
    long long a_cosine_stride_B,
    long long a_sine_stride_B,
    long long a_slots_stride_B,
    long long a_k_value_low_stride_B,
    long long a_k_value_low_stride_H,
    long long a_k_value_high_stride_B,
    long long a_k_value_high_stride_H,
    long long a_v_value_low_stride_B,
    long long a_v_value_low_stride_H,
    long long a_v_value_high_stride_B,
    long long a_v_value_high_stride_H,
    long long a_keys_low_count,
    long long a_keys_low_stride,
    long long a_keys_low_stride_H,
    long long a_keys_high_count,
    long long a_keys_high_stride,
    long long a_keys_high_stride_H,
    long long a_values_low_count,
    long long a_values_low_stride,
    long long a_values_low_stride_H,
    long long a_values_high_count,
    long long a_values_high_stride,
    long long a_values_high_stride_H,
    long long b_B_size,
    long long b_G_times_H_size,
    long long b_cosine_stride_B,
    long long b_sine_stride_B,
    long long b_q_low_stride_B,
    long long b_q_low_stride_G_times_H,
    long long b_q_high_stride_B,
    long long b_q_high_stride_G_times_H,
    long long b_turned_low_stride_B,
    long long b_turned_low_stride_G_times_H,
    long long b_turned_high_stride_B,
    long long b_turned_high_stride_G_times_H)
{
  unsigned block = blockIdx.x;  // the first blocks do the first step
  if (block < blocks_a) {
    part_a(block, a_cosine_ptr, a_sine_ptr, a_slots_ptr, a_k_value_low_ptr, a_k_value_high_ptr, a_v_value_low_ptr,
        a_v_value_high_ptr, a_keys_low_ptr, a_keys_high_ptr, a_values_low_ptr, a_values_high_ptr, a_B_size, a_H_size,
        a_cosine_stride_B, a_sine_stride_B, a_slots_stride_B, a_k_value_low_stride_B, a_k_value_low_stride_H,
        a_k_value_high_stride_B, a_k_value_high_stride_H, a_v_value_low_stride_B, a_v_value_low_stride_H,
        a_v_value_high_stride_B, a_v_value_high_stride_H, a_keys_low_count, a_keys_low_stride, a_keys_low_stride_H,
        a_keys_high_count, a_keys_high_stride, a_keys_high_stride_H, a_values_low_count, a_values_low_stride,
        a_values_low_stride_H, a_values_high_count, a_values_high_stride, a_values_high_stride_H);
    return;
  }
  block -= static_cast<unsigned>(blocks_a);
  part_b(block, b_cosine_ptr, b_sine_ptr, b_q_low_ptr, b_q_high_ptr, b_turned_low_ptr, b_turned_high_ptr, b_B_size,
      b_G_times_H_size, b_cosine_stride_B, b_sine_stride_B, b_q_low_stride_B, b_q_low_stride_G_times_H, b_q_high_stride_B,
      b_q_high_stride_G_times_H, b_turned_low_stride_B, b_turned_low_stride_G_times_H, b_turned_high_stride_B,
      b_turned_high_stride_G_times_H);
}
