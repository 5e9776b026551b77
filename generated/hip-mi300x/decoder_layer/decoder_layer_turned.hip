// decoder_layer_turned  f32[B, 1, E_half], f32[B, 1, E_half], f32[B, G_times_H, E_half], f32[B, G_times_H, E_half] -> bf16[B, G_times_H,
//   E_half], bf16[B, G_times_H, E_half]  at B=8 E_half=64 G_times_H=32
// turned of decoder_layer.
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
// views    q_part is q as [B, G * H, E // 2]; q_part_2 is q as [B, G * H, E // 2]; turned_2 is
//          turned[..., :E // 2]; turned_3 is turned[..., E // 2:]
// tile     tiles of rows and columns; a block of 128 threads on 8 rows, 4 elements a thread
// traffic  0.2 MB moved, 0.2 MB ideal, 0.5 MB unfused in 2 launches
// floor    0.0 us at 5.3 TB/s; memory-bound at 0.49 flop/B
// rounding turned_2 to bf16 when stored; turned_3 to bf16 when stored; f32 between
// needs    rows of 64 elements, next to each other; cos, sin, q_part, q_part_2: address and strides in
//          multiples of 16 B; turned_2, turned_3: address and strides in multiples of 8 B

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
decoder_layer_turned(
    const float* __restrict__ cos_ptr,
    const float* __restrict__ sin_ptr,
    const float* __restrict__ q_part_ptr,
    const float* __restrict__ q_part_2_ptr,
    __bf16* __restrict__ turned_2_ptr,
    __bf16* __restrict__ turned_3_ptr,
    long long B_size,
    long long G_times_H_size,
    long long cos_stride_B,
    long long sin_stride_B,
    long long q_part_stride_B,
    long long q_part_stride_G_times_H,
    long long q_part_2_stride_B,
    long long q_part_2_stride_G_times_H,
    long long turned_2_stride_B,
    long long turned_2_stride_G_times_H,
    long long turned_3_stride_B,
    long long turned_3_stride_G_times_H)
{
  constexpr int block_rows = 8;  // that a block takes
  constexpr int row_threads = 16;
  const int lane = threadIdx.x % row_threads;  // of the 16 threads that share a row
  const long long rows = B_size * G_times_H_size;
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned B_at = static_cast<unsigned>(row) / static_cast<unsigned>(G_times_H_size);
  const unsigned G_times_H_at = static_cast<unsigned>(row) % static_cast<unsigned>(G_times_H_size);
  const float* const cos_row = cos_ptr + B_at * cos_stride_B;
  const float* const sin_row = sin_ptr + B_at * sin_stride_B;
  const float* const q_part_row = q_part_ptr + B_at * q_part_stride_B + G_times_H_at * q_part_stride_G_times_H;
  const float* const q_part_2_row = q_part_2_ptr + B_at * q_part_2_stride_B + G_times_H_at * q_part_2_stride_G_times_H;
  __bf16* const turned_2_row = turned_2_ptr + unknown(B_at * turned_2_stride_B + G_times_H_at * turned_2_stride_G_times_H);
  __bf16* const turned_3_row = turned_3_ptr + unknown(B_at * turned_3_stride_B + G_times_H_at * turned_3_stride_G_times_H);
  const int col = lane * 4;

  // pass 1 of 1: read q_part, cos, q_part_2, sin; write turned_2, turned_3
  {
    const Vec<float, 4> q_part_vec = load<4>(q_part_row + col);
    const Vec<float, 4> cos_vec = load<4>(cos_row + col);
    const Vec<float, 4> q_part_2_vec = load<4>(q_part_2_row + col);
    const Vec<float, 4> sin_vec = load<4>(sin_row + col);
    Vec<__bf16, 4> turned_2_vec;
    Vec<__bf16, 4> turned_3_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float q_part = q_part_vec.at[j];
      const float cos = cos_vec.at[j];
      const float q_part_2 = q_part_2_vec.at[j];
      const float sin = sin_vec.at[j];
      const float q_part_times_cos = q_part * cos;
      const float q_part_2_times_sin = q_part_2 * sin;
      const float sub = q_part_times_cos - q_part_2_times_sin;
      const float q_part_2_times_cos = q_part_2 * cos;
      const float q_part_times_sin = q_part * sin;
      const float add = q_part_2_times_cos + q_part_times_sin;
      turned_2_vec.at[j] = static_cast<__bf16>(sub);
      turned_3_vec.at[j] = static_cast<__bf16>(add);
    }
    if (live) store<4>(turned_2_row + col, turned_2_vec);
    if (live) store<4>(turned_3_row + col, turned_3_vec);
  }
}
