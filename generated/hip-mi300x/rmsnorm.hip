// rmsnorm  bf16[M, N], bf16[N] -> bf16[M, N]  at M=16384 N=4096
// x / sqrt(mean(x^2) + 1e-6) * gain.
//
//     def rmsnorm(x, gain):
//         return F.rmsnorm(x, gain, eps=1e-6)
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
// tile     a warp a row, 2 rows a block, 8 x 8 elements a thread; x in registers, as read
// traffic  268.4 MB moved, 268.4 MB ideal, 402.7 MB unfused in 1 launch
// floor    50.6 us at 5.3 TB/s; memory-bound at 1.00 flop/B
// rounding out to bf16 when stored; f32 between
// needs    rows of 4096 elements, next to each other; x, gain, out: address and strides in multiples of
//          16 B; gain [N] shared by every row

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

// The vector stays as it was read: what the compiler has made of it would take more registers, and is made again.
template <typename T, int N>
__device__ __forceinline__ void leave_packed(Vec<T, N>& v) {
  unsigned words[sizeof(v) / 4];
  memcpy(words, &v, sizeof(v));
  #pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(v) / 4); ++i) asm volatile("" : "+v"(words[i]));
  memcpy(&v, words, sizeof(v));
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

// the sum over the 64 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(128)
rmsnorm(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ gain_ptr,
    __bf16* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long out_stride)
{
  constexpr int row_threads = 64;
  constexpr int block_rows = 2;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 64 threads that share a row
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const __bf16* const x_row = x_ptr + row * x_stride;
  __bf16* const out_row = out_ptr + row * out_stride;
  Vec<__bf16, 8> x_vec[8];

  // pass 1 of 2: read x; keep x; sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    x_vec[v] = load<8>(x_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = static_cast<float>(x_vec[v].at[j]);
      const float square = x * x;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part);
  const float mean = sum_of_squares / 4096.0f;
  const float mean_plus_eps = mean + 1e-06f;
  const float rrms = rsqrtf(mean_plus_eps);

  // pass 2 of 2: read gain; write out
  #pragma unroll
  for (int v = 0; v < 8; ++v) leave_packed(x_vec[v]);
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    const Vec<__bf16, 8> gain_vec = load<8>(gain_ptr + col);
    Vec<__bf16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = static_cast<float>(x_vec[v].at[j]);
      const float gain = static_cast<float>(gain_vec.at[j]);
      const float normalized = x * rrms;
      const float rmsnorm = normalized * gain;
      out_vec.at[j] = static_cast<__bf16>(rmsnorm);
    }
    if (live) store<8>(out_row + col, out_vec);
  }
}
