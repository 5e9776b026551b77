// add_rmsnorm  bf16[M, N], bf16[M, N], bf16[N] -> bf16[M, N], bf16[M, N]  at M=16384 N=4096
// h = x + residual, and rmsnorm(h) * gain; the norm sees h before it is rounded.
//
//     def add_rmsnorm(x, residual, gain):
//         h = x + residual
//         y = F.rmsnorm(h, gain, eps=1e-6)
//         return h, y
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a block of 128 threads a row, 4 x 8 elements a thread; h in registers
// traffic  536.9 MB moved, 536.9 MB ideal, 805.3 MB unfused in 2 launches
// floor    67.1 us at 8 TB/s; memory-bound at 0.63 flop/B
// rounding h to bf16 when stored; y to bf16 when stored; f32 between
// needs    rows of 4096 elements, next to each other; x, residual, gain, h, y: address and strides in
//          multiples of 16 B; gain [N] shared by every row

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

// the vector to p, which is aligned to it
template <int N, typename T>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
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

// the sum over the 128 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 2];
  v += partner(v, 1);
  return v;
}

extern "C" __global__ void __launch_bounds__(128)
add_rmsnorm(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ residual_ptr,
    const __bf16* __restrict__ gain_ptr,
    __bf16* __restrict__ h_ptr,
    __bf16* __restrict__ y_ptr,
    long long rows,
    long long x_stride,
    long long residual_stride,
    long long h_stride,
    long long y_stride)
{
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  __shared__ float part[1][2];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const __bf16* const x_row = x_ptr + row * x_stride;
  const __bf16* const residual_row = residual_ptr + row * residual_stride;
  __bf16* const h_row = h_ptr + row * h_stride;
  __bf16* const y_row = y_ptr + row * y_stride;
  Vec<__bf16, 8> gain_vec[4];
  float h_kept[4][8];

  // pass 1 of 2: read gain ahead; read x, residual; keep h; sum_of_squares = sum(square); write h
  float sum_of_squares_part = 0.0f;
  Vec<__bf16, 8> x_vec[4];
  Vec<__bf16, 8> residual_vec[4];
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    gain_vec[v] = load<8>(gain_ptr + col);
    x_vec[v] = load<8>(x_row + col);
    residual_vec[v] = load<8>(residual_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    Vec<__bf16, 8> h_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = static_cast<float>(x_vec[v].at[j]);
      const float residual = static_cast<float>(residual_vec[v].at[j]);
      const float h = x + residual;
      const float square = h * h;
      h_kept[v][j] = h;
      sum_of_squares_part += square;
      h_vec.at[j] = static_cast<__bf16>(h);
    }
    store<8>(h_row + col, h_vec);
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[0]);
  const float mean = sum_of_squares / 4096.0f;
  const float mean_plus_eps = mean + 1e-06f;
  const float rrms = rsqrtf(mean_plus_eps);

  // pass 2 of 2: write y
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    Vec<__bf16, 8> y_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float gain = static_cast<float>(gain_vec[v].at[j]);
      const float h = h_kept[v][j];
      const float normalized = h * rrms;
      const float y = normalized * gain;
      y_vec.at[j] = static_cast<__bf16>(y);
    }
    store<8>(y_row + col, y_vec);
  }
}
