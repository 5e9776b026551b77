// decoder_layer_prefill_normed_2  bf16[D], bf16[S, D] -> bf16[S, D]  at S=4096 D=4096
// normed_2 of decoder_layer_prefill.
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
// tile     a block of 128 threads a row, 4 x 8 elements a thread; h in registers
// traffic  67.1 MB moved, 67.1 MB ideal, 100.7 MB unfused in 1 launch
// floor    12.7 us at 5.3 TB/s; memory-bound at 1.00 flop/B
// rounding normed_2 to bf16 when stored; f32 between
// needs    rows of 4096 elements, next to each other; norm_2, h, normed_2: address and strides in
//          multiples of 16 B; norm_2 [D] shared by every row

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
decoder_layer_prefill_normed_2(
    const __bf16* __restrict__ norm_2_ptr,
    const __bf16* __restrict__ h_ptr,
    __bf16* __restrict__ normed_2_ptr,
    long long rows,
    long long h_stride,
    long long normed_2_stride)
{
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  __shared__ float part[1][2];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const __bf16* const h_row = h_ptr + row * h_stride;
  __bf16* const normed_2_row = normed_2_ptr + row * normed_2_stride;
  Vec<__bf16, 8> norm_2_vec[4];
  Vec<__bf16, 8> h_vec[4];

  // pass 1 of 2: read norm_2 ahead; read h; keep h; sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    norm_2_vec[v] = load<8>(norm_2_ptr + col);
    h_vec[v] = load<8>(h_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float h = static_cast<float>(h_vec[v].at[j]);
      const float square = h * h;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[0]);
  const float mean = sum_of_squares / 4096.0f;
  const float mean_plus_eps = mean + 1e-06f;
  const float rrms = rsqrtf(mean_plus_eps);

  // pass 2 of 2: write normed_2
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    Vec<__bf16, 8> normed_2_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float h = static_cast<float>(h_vec[v].at[j]);
      const float norm_2 = static_cast<float>(norm_2_vec[v].at[j]);
      const float normalized = h * rrms;
      const float normed_2 = normalized * norm_2;
      normed_2_vec.at[j] = static_cast<__bf16>(normed_2);
    }
    store<8>(normed_2_row + col, normed_2_vec);
  }
}
