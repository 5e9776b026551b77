// decoder_layer_prefill_turned_keys: 2 steps in one launch of 128 threads a block
//
// because  one launch is expected to take 18.7 us, and one for each step 20.7
//
// a. decoder_layer_prefill_turned  f32[S, 1, E_half], f32[S, 1, E_half], bf16[S, G_times_H, E_half], bf16[S, G_times_H, E_half] -> bf16[S,
//      G_times_H, E_half], bf16[S, G_times_H, E_half]  at S=4096 E_half=64 G_times_H=32
//    turned of decoder_layer_prefill.
//
//    target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
//    views    q_low is q as [S, G * H, E // 2]; q_high is q as [S, G * H, E // 2]; turned_low is
//             turned[..., :E // 2]; turned_high is turned[..., E // 2:]
//    tile     tiles of rows and columns; a block of 128 threads on 16 rows, 8 elements a thread
//    traffic  69.2 MB moved, 69.2 MB ideal, 203.4 MB unfused in 2 launches
//    floor    8.7 us at 8 TB/s; memory-bound at 0.73 flop/B
//    rounding turned_low to bf16 when stored; turned_high to bf16 when stored; f32 between
//    needs    rows of 64 elements, next to each other; cosine, sine, q_low, q_high, turned_low,
//             turned_high: address and strides in multiples of 16 B
//
// b. decoder_layer_prefill_keys  f32[S, 1, E_half], f32[S, 1, E_half], i32[S, 1, 1], bf16[S, H, E_half], bf16[S, H, E_half], bf16[S, H,
//      E_half], bf16[S, H, E_half] -> bf16[S, H, E_half], bf16[S, H, E_half], bf16[V, H, E_half], bf16[V, H, E_half], bf16[V, H, E_half],
//      bf16[V, H, E_half]  at S=4096 E_half=64 H=8 V=8192
//    keys, out1, out2 of decoder_layer_prefill.
//
//    target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
//    views    k_value_low is k_value as [S, H, E // 2]; k_value_high is k_value as [S, H, E // 2];
//             v_value_low is v_value as [S, H, E // 2]; v_value_high is v_value as [S, H, E // 2];
//             keys_low is keys[..., :E // 2]; keys_high is keys[..., E // 2:]; keys_2 is out1[..., :E //
//             2]; keys_3 is out1[..., E // 2:]; values is out2[..., :E // 2]; values_2 is out2[..., E //
//             2:]
//    writes   rows of keys_2, keys_3, values, values_2 at slots; nothing where there is none
//    tile     tiles of rows and columns; a block of 128 threads on 16 rows, 8 elements a thread
//    traffic  44.1 MB moved, 44.1 MB ideal, 86.0 MB unfused in 4 launches
//    floor    5.5 us at 8 TB/s; memory-bound at 0.29 flop/B
//    rounding keys_low to bf16 when stored; keys_high to bf16 when stored; keys_2 to bf16 when stored;
//             keys_3 to bf16 when stored; values to bf16 when stored; values_2 to bf16 when stored; f32
//             between
//    needs    rows of 64 elements, next to each other; cosine, sine, k_value_low, k_value_high,
//             v_value_low, v_value_high, keys_low, keys_high, keys_2, keys_3, values, values_2: address
//             and strides in multiples of 16 B

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

// turned: what the step's block of that number does
__device__ __forceinline__ void part_a(
    unsigned block,
    const float* __restrict__ cosine_ptr,
    const float* __restrict__ sine_ptr,
    const __bf16* __restrict__ q_low_ptr,
    const __bf16* __restrict__ q_high_ptr,
    __bf16* __restrict__ turned_low_ptr,
    __bf16* __restrict__ turned_high_ptr,
    long long S_size,
    long long G_times_H_size,
    long long cosine_stride_S,
    long long sine_stride_S,
    long long q_low_stride_S,
    long long q_low_stride_G_times_H,
    long long q_high_stride_S,
    long long q_high_stride_G_times_H,
    long long turned_low_stride_S,
    long long turned_low_stride_G_times_H,
    long long turned_high_stride_S,
    long long turned_high_stride_G_times_H)
{
  constexpr int block_rows = 16;  // that a block takes
  constexpr int row_threads = 8;
  const int lane = threadIdx.x % row_threads;  // of the 8 threads that share a row
  const long long rows = S_size * G_times_H_size;
  const long long own_row = static_cast<long long>(block) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned S_at = static_cast<unsigned>(row) / static_cast<unsigned>(G_times_H_size);
  const unsigned G_times_H_at = static_cast<unsigned>(row) % static_cast<unsigned>(G_times_H_size);
  const float* const cosine_row = cosine_ptr + S_at * cosine_stride_S;
  const float* const sine_row = sine_ptr + S_at * sine_stride_S;
  const __bf16* const q_low_row = q_low_ptr + S_at * q_low_stride_S + G_times_H_at * q_low_stride_G_times_H;
  const __bf16* const q_high_row = q_high_ptr + S_at * q_high_stride_S + G_times_H_at * q_high_stride_G_times_H;
  __bf16* const turned_low_row = turned_low_ptr + unknown(S_at * turned_low_stride_S + G_times_H_at * turned_low_stride_G_times_H);
  __bf16* const turned_high_row = turned_high_ptr + unknown(S_at * turned_high_stride_S + G_times_H_at * turned_high_stride_G_times_H);
  const int col = lane * 8;

  // pass 1 of 1: read q_low, cosine, q_high, sine; write turned_low, turned_high
  {
    const Vec<__bf16, 8> q_low_vec = load<8>(q_low_row + col);
    const Vec<float, 8> cosine_vec = load<8>(cosine_row + col);
    const Vec<__bf16, 8> q_high_vec = load<8>(q_high_row + col);
    const Vec<float, 8> sine_vec = load<8>(sine_row + col);
    Vec<__bf16, 8> turned_low_vec;
    Vec<__bf16, 8> turned_high_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float q_low = static_cast<float>(q_low_vec.at[j]);
      const float cosine = cosine_vec.at[j];
      const float q_high = static_cast<float>(q_high_vec.at[j]);
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
    if (live) store<8>(turned_low_row + col, turned_low_vec);
    if (live) store<8>(turned_high_row + col, turned_high_vec);
  }
}

// keys: what the step's block of that number does
__device__ __forceinline__ void part_b(
    unsigned block,
    const float* __restrict__ cosine_ptr,
    const float* __restrict__ sine_ptr,
    const int* __restrict__ slots_ptr,
    const __bf16* __restrict__ k_value_low_ptr,
    const __bf16* __restrict__ k_value_high_ptr,
    const __bf16* __restrict__ v_value_low_ptr,
    const __bf16* __restrict__ v_value_high_ptr,
    __bf16* __restrict__ keys_low_ptr,
    __bf16* __restrict__ keys_high_ptr,
    __bf16* __restrict__ keys_2_ptr,
    __bf16* __restrict__ keys_3_ptr,
    __bf16* __restrict__ values_ptr,
    __bf16* __restrict__ values_2_ptr,
    long long S_size,
    long long H_size,
    long long cosine_stride_S,
    long long sine_stride_S,
    long long slots_stride_S,
    long long k_value_low_stride_S,
    long long k_value_low_stride_H,
    long long k_value_high_stride_S,
    long long k_value_high_stride_H,
    long long v_value_low_stride_S,
    long long v_value_low_stride_H,
    long long v_value_high_stride_S,
    long long v_value_high_stride_H,
    long long keys_low_stride_S,
    long long keys_low_stride_H,
    long long keys_high_stride_S,
    long long keys_high_stride_H,
    long long keys_2_count,
    long long keys_2_stride,
    long long keys_2_stride_H,
    long long keys_3_count,
    long long keys_3_stride,
    long long keys_3_stride_H,
    long long values_count,
    long long values_stride,
    long long values_stride_H,
    long long values_2_count,
    long long values_2_stride,
    long long values_2_stride_H)
{
  constexpr int block_rows = 16;  // that a block takes
  constexpr int row_threads = 8;
  const int lane = threadIdx.x % row_threads;  // of the 8 threads that share a row
  const long long rows = S_size * H_size;
  const long long own_row = static_cast<long long>(block) * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned S_at = static_cast<unsigned>(row) / static_cast<unsigned>(H_size);
  const unsigned H_at = static_cast<unsigned>(row) % static_cast<unsigned>(H_size);
  const float* const cosine_row = cosine_ptr + S_at * cosine_stride_S;
  const float* const sine_row = sine_ptr + S_at * sine_stride_S;
  const int* const slots_row = slots_ptr + S_at * slots_stride_S;
  const __bf16* const k_value_low_row = k_value_low_ptr + S_at * k_value_low_stride_S + H_at * k_value_low_stride_H;
  const __bf16* const k_value_high_row = k_value_high_ptr + S_at * k_value_high_stride_S + H_at * k_value_high_stride_H;
  const __bf16* const v_value_low_row = v_value_low_ptr + S_at * v_value_low_stride_S + H_at * v_value_low_stride_H;
  const __bf16* const v_value_high_row = v_value_high_ptr + S_at * v_value_high_stride_S + H_at * v_value_high_stride_H;
  __bf16* const keys_low_row = keys_low_ptr + unknown(S_at * keys_low_stride_S + H_at * keys_low_stride_H);
  __bf16* const keys_high_row = keys_high_ptr + unknown(S_at * keys_high_stride_S + H_at * keys_high_stride_H);
  const int slots = *slots_row;
  const bool keys_2_found = slots >= 0 && slots < keys_2_count;  // else nothing of it is written
  __bf16* const keys_2_row = keys_2_ptr + (keys_2_found ? slots : 0) * keys_2_stride + H_at * keys_2_stride_H;
  const bool keys_3_found = slots >= 0 && slots < keys_3_count;  // else nothing of it is written
  __bf16* const keys_3_row = keys_3_ptr + (keys_3_found ? slots : 0) * keys_3_stride + H_at * keys_3_stride_H;
  const bool values_found = slots >= 0 && slots < values_count;  // else nothing of it is written
  __bf16* const values_row = values_ptr + (values_found ? slots : 0) * values_stride + H_at * values_stride_H;
  const bool values_2_found = slots >= 0 && slots < values_2_count;  // else nothing of it is written
  __bf16* const values_2_row = values_2_ptr + (values_2_found ? slots : 0) * values_2_stride + H_at * values_2_stride_H;
  const int col = lane * 8;

  // pass 1 of 1: read k_value_low, cosine, k_value_high, sine, v_value_low, v_value_high; write keys_low,
  //   keys_high, keys_2, keys_3, values, values_2
  {
    const Vec<__bf16, 8> k_value_low_vec = load<8>(k_value_low_row + col);
    const Vec<float, 8> cosine_vec = load<8>(cosine_row + col);
    const Vec<__bf16, 8> k_value_high_vec = load<8>(k_value_high_row + col);
    const Vec<float, 8> sine_vec = load<8>(sine_row + col);
    const Vec<__bf16, 8> v_value_low_vec = load<8>(v_value_low_row + col);
    const Vec<__bf16, 8> v_value_high_vec = load<8>(v_value_high_row + col);
    Vec<__bf16, 8> keys_low_vec;
    Vec<__bf16, 8> keys_high_vec;
    Vec<__bf16, 8> keys_2_vec;
    Vec<__bf16, 8> keys_3_vec;
    Vec<__bf16, 8> values_vec;
    Vec<__bf16, 8> values_2_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float k_value_low = static_cast<float>(k_value_low_vec.at[j]);
      const float cosine = cosine_vec.at[j];
      const float k_value_high = static_cast<float>(k_value_high_vec.at[j]);
      const float sine = sine_vec.at[j];
      const float v_value_low = static_cast<float>(v_value_low_vec.at[j]);
      const float v_value_high = static_cast<float>(v_value_high_vec.at[j]);
      const float k_value_low_times_cosine = k_value_low * cosine;
      const float k_value_high_times_sine = k_value_high * sine;
      const float sub = k_value_low_times_cosine - k_value_high_times_sine;
      const float k_value_high_times_cosine = k_value_high * cosine;
      const float k_value_low_times_sine = k_value_low * sine;
      const float add = k_value_high_times_cosine + k_value_low_times_sine;
      keys_low_vec.at[j] = static_cast<__bf16>(sub);
      keys_high_vec.at[j] = static_cast<__bf16>(add);
      keys_2_vec.at[j] = static_cast<__bf16>(sub);
      keys_3_vec.at[j] = static_cast<__bf16>(add);
      values_vec.at[j] = static_cast<__bf16>(v_value_low);
      values_2_vec.at[j] = static_cast<__bf16>(v_value_high);
    }
    if (live) store<8>(keys_low_row + col, keys_low_vec);
    if (live) store<8>(keys_high_row + col, keys_high_vec);
    if (live && keys_2_found) store<8>(keys_2_row + col, keys_2_vec);
    if (live && keys_3_found) store<8>(keys_3_row + col, keys_3_vec);
    if (live && values_found) store<8>(values_row + col, values_vec);
    if (live && values_2_found) store<8>(values_2_row + col, values_2_vec);
  }
}

extern "C" __global__ void __launch_bounds__(128)
decoder_layer_prefill_turned_keys(
    const float* __restrict__ a_cosine_ptr,
    const float* __restrict__ a_sine_ptr,
    const __bf16* __restrict__ a_q_low_ptr,
    const __bf16* __restrict__ a_q_high_ptr,
    __bf16* __restrict__ a_turned_low_ptr,
    __bf16* __restrict__ a_turned_high_ptr,
    const float* __restrict__ b_cosine_ptr,
    const float* __restrict__ b_sine_ptr,
    const int* __restrict__ b_slots_ptr,
    const __bf16* __restrict__ b_k_value_low_ptr,
    const __bf16* __restrict__ b_k_value_high_ptr,
    const __bf16* __restrict__ b_v_value_low_ptr,
    const __bf16* __restrict__ b_v_value_high_ptr,
    __bf16* __restrict__ b_keys_low_ptr,
    __bf16* __restrict__ b_keys_high_ptr,
    __bf16* __restrict__ b_keys_2_ptr,
    __bf16* __restrict__ b_keys_3_ptr,
    __bf16* __restrict__ b_values_ptr,
    __bf16* __restrict__ b_values_2_ptr,
    long long blocks_a,
    long long a_S_size,
    long long a_G_times_H_size,
    long long a_cosine_stride_S,
    long long a_sine_stride_S,
    long long a_q_low_stride_S,
    long long a_q_low_stride_G_times_H,
    long long a_q_high_stride_S,
    long long a_q_high_stride_G_times_H,
    long long a_turned_low_stride_S,
    long long a_turned_low_stride_G_times_H,
    long long a_turned_high_stride_S,
    long long a_turned_high_stride_G_times_H,
    long long b_S_size,
    long long b_H_size,
    long long b_cosine_stride_S,
    long long b_sine_stride_S,
    long long b_slots_stride_S,
    long long b_k_value_low_stride_S,
    long long b_k_value_low_stride_H,
    long long b_k_value_high_stride_S,
    long long b_k_value_high_stride_H,
    long long b_v_value_low_stride_S,
    long long b_v_value_low_stride_H,
    long long b_v_value_high_stride_S,
    long long b_v_value_high_stride_H,
    long long b_keys_low_stride_S,
    long long b_keys_low_stride_H,
    long long b_keys_high_stride_S,
    long long b_keys_high_stride_H,
    long long b_keys_2_count,
    long long b_keys_2_stride,
    long long b_keys_2_stride_H,
    long long b_keys_3_count,
    long long b_keys_3_stride,
    long long b_keys_3_stride_H,
    long long b_values_count,
    long long b_values_stride,
    long long b_values_stride_H,
    long long b_values_2_count,
    long long b_values_2_stride,
    long long b_values_2_stride_H)
{
  unsigned block = blockIdx.x;  // the first blocks do the first step
  if (block < blocks_a) {
    part_a(block, a_cosine_ptr, a_sine_ptr, a_q_low_ptr, a_q_high_ptr, a_turned_low_ptr, a_turned_high_ptr, a_S_size,
        a_G_times_H_size, a_cosine_stride_S, a_sine_stride_S, a_q_low_stride_S, a_q_low_stride_G_times_H, a_q_high_stride_S,
        a_q_high_stride_G_times_H, a_turned_low_stride_S, a_turned_low_stride_G_times_H, a_turned_high_stride_S,
        a_turned_high_stride_G_times_H);
    return;
  }
  block -= static_cast<unsigned>(blocks_a);
  part_b(block, b_cosine_ptr, b_sine_ptr, b_slots_ptr, b_k_value_low_ptr, b_k_value_high_ptr, b_v_value_low_ptr,
      b_v_value_high_ptr, b_keys_low_ptr, b_keys_high_ptr, b_keys_2_ptr, b_keys_3_ptr, b_values_ptr, b_values_2_ptr,
      b_S_size, b_H_size, b_cosine_stride_S, b_sine_stride_S, b_slots_stride_S, b_k_value_low_stride_S,
      b_k_value_low_stride_H, b_k_value_high_stride_S, b_k_value_high_stride_H, b_v_value_low_stride_S,
      b_v_value_low_stride_H, b_v_value_high_stride_S, b_v_value_high_stride_H, b_keys_low_stride_S, b_keys_low_stride_H,
      b_keys_high_stride_S, b_keys_high_stride_H, b_keys_2_count, b_keys_2_stride, b_keys_2_stride_H, b_keys_3_count,
      b_keys_3_stride, b_keys_3_stride_H, b_values_count, b_values_stride, b_values_stride_H, b_values_2_count,
      b_values_2_stride, b_values_2_stride_H);
}
