// decoder_layer_sum_of_squares_from_x  bf16[B, D] -> f32[B, 1]  at B=8 D=4096
// sum_of_squares_from_x of decoder_layer.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a block of 256 threads a row, 2 x 8 elements a thread; one pass, nothing kept
// traffic  65568 B moved, 65568 B ideal, 65568 B unfused in 1 launch
// floor    0.0 us at 8 TB/s; memory-bound at 1.00 flop/B
// needs    rows of 4096 elements, next to each other; h: address and strides in multiples of 16 B

// N values that move together, 16 bytes at a time where they fill them
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
};

// the vector at p, which is aligned to it
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  const int word = __builtin_bit_cast(int, v);
  int other = 0;
  if (step == 1) other = __builtin_amdgcn_update_dpp(0, word, 0xb1, 0xf, 0xf, true);  // quad_perm:[1,0,3,2]
  if (step == 2) other = __builtin_amdgcn_update_dpp(0, word, 0x4e, 0xf, 0xf, true);  // quad_perm:[2,3,0,1]
  if (step == 4) {
    const int mirrored = __builtin_amdgcn_update_dpp(0, word, 0x141, 0xf, 0xf, true);  // of 8 lanes,
    other = __builtin_amdgcn_update_dpp(0, mirrored, 0x1b, 0xf, 0xf, true);  // and then of each 4
  }
  if (step == 8) other = __builtin_amdgcn_update_dpp(0, word, 0x128, 0xf, 0xf, true);  // row_ror:8
  if (step == 16) other = __builtin_amdgcn_ds_swizzle(word, 0x401f);  // swizzle(SWAP,16)
  if (step == 32) other = __shfl_xor(word, 32);
  return __builtin_bit_cast(decltype(v), other);
}

// the sum over the 256 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 4];
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(256)
decoder_layer_sum_of_squares_from_x(
    const __bf16* __restrict__ h_ptr,
    float* __restrict__ sum_of_squares_from_x_ptr,
    long long rows,
    long long h_stride,
    long long sum_of_squares_from_x_stride)
{
  constexpr int row_threads = 256;
  const int lane = threadIdx.x;  // of the 256 threads that share a row
  __shared__ float part[1][4];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const __bf16* const h_row = h_ptr + row * h_stride;
  float* const sum_of_squares_from_x_row = sum_of_squares_from_x_ptr + row * sum_of_squares_from_x_stride;

  // pass 1 of 1: read h; sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  Vec<__bf16, 8> h_vec[2];
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 8;
    h_vec[v] = load<8>(h_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float h = static_cast<float>(h_vec[v].at[j]);
      const float square = h * h;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[0]);
  if (lane == 0) *sum_of_squares_from_x_row = sum_of_squares;
}
