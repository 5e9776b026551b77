// rope_neox  bf16[T, H, D_half], bf16[T, H, D_half], f32[T, 1, D_half], f32[T, 1, D_half] -> bf16[T, H, D_half], bf16[T, H, D_half]  at
//   T=16384 H=32 D_half=64
// Pairs are the first half of a head and the second one, as in GPT-NeoX and Llama.
//
//     def rope_neox(x, cos, sin):
//         low, high = F.split(x, 2)
//         return F.concat([low * cos - high * sin, high * cos + low * sin])
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    low is x[..., :D // 2]; high is x[..., D // 2:]; out_low is out[..., :D // 2]; out_high is
//          out[..., D // 2:]
// tile     tiles of rows and columns; a block of 128 threads on 16 rows, 8 elements a thread
// traffic  276.8 MB moved, 276.8 MB ideal, 1493.2 MB unfused in 6 launches
// floor    34.6 us at 8 TB/s; memory-bound at 0.73 flop/B
// rounding out_low to bf16 when stored; out_high to bf16 when stored; f32 between
// needs    rows of 64 elements, next to each other; low, high, cosine, sine, out_low, out_high: address
//          and strides in multiples of 16 B

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
rope_neox(
    const __bf16* __restrict__ low_ptr,
    const __bf16* __restrict__ high_ptr,
    const float* __restrict__ cosine_ptr,
    const float* __restrict__ sine_ptr,
    __bf16* __restrict__ out_low_ptr,
    __bf16* __restrict__ out_high_ptr,
    long long T_size,
    long long H_size,
    long long low_stride_T,
    long long low_stride_H,
    long long high_stride_T,
    long long high_stride_H,
    long long cosine_stride_T,
    long long sine_stride_T,
    long long out_low_stride_T,
    long long out_low_stride_H,
    long long out_high_stride_T,
    long long out_high_stride_H)
{
  constexpr int block_rows = 16;  // that a block takes
  constexpr int row_threads = 8;
  const int lane = threadIdx.x % row_threads;  // of the 8 threads that share a row
  const long long rows = T_size * H_size;
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned T_at = static_cast<unsigned>(row) / static_cast<unsigned>(H_size);
  const unsigned H_at = static_cast<unsigned>(row) % static_cast<unsigned>(H_size);
  const __bf16* const low_row = low_ptr + T_at * low_stride_T + H_at * low_stride_H;
  const __bf16* const high_row = high_ptr + T_at * high_stride_T + H_at * high_stride_H;
  const float* const cosine_row = cosine_ptr + T_at * cosine_stride_T;
  const float* const sine_row = sine_ptr + T_at * sine_stride_T;
  __bf16* const out_low_row = out_low_ptr + unknown(T_at * out_low_stride_T + H_at * out_low_stride_H);
  __bf16* const out_high_row = out_high_ptr + unknown(T_at * out_high_stride_T + H_at * out_high_stride_H);
  const int col = lane * 8;

  // pass 1 of 1: read low, cosine, high, sine; write out_low, out_high
  {
    const Vec<__bf16, 8> low_vec = load<8>(low_row + col);
    const Vec<float, 8> cosine_vec = load<8>(cosine_row + col);
    const Vec<__bf16, 8> high_vec = load<8>(high_row + col);
    const Vec<float, 8> sine_vec = load<8>(sine_row + col);
    Vec<__bf16, 8> out_low_vec;
    Vec<__bf16, 8> out_high_vec;
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
      out_low_vec.at[j] = static_cast<__bf16>(sub);
      out_high_vec.at[j] = static_cast<__bf16>(add);
    }
    if (live) store<8>(out_low_row + col, out_low_vec);
    if (live) store<8>(out_high_row + col, out_high_vec);
  }
}
