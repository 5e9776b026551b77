// groupnorm_silu_sum_of_in_groups  bf16[B, 32, C_times_S] -> f32[B, 32, 1], f32[B, 32, 1]  at B=16 C_times_S=40960
// sum_of_in_groups, sum_of_squares of groupnorm_silu.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    in_groups is x as [B, 32, C * S]
// tile     a block of 1024 threads a row, 5 x 8 elements a thread; in_groups in registers
// traffic  41.9 MB moved, 41.9 MB ideal, 41.9 MB unfused in 1 launch
// floor    5.2 us at 8 TB/s; memory-bound at 2.00 flop/B
// needs    rows of 40960 elements, next to each other; in_groups: address and strides in multiples of
//          16 B

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

// the sum over the 1024 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 16];
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(1024)
groupnorm_silu_sum_of_in_groups(
    const __bf16* __restrict__ in_groups_ptr,
    float* __restrict__ sum_of_in_groups_ptr,
    float* __restrict__ sum_of_squares_ptr,
    long long rows,
    long long in_groups_stride,
    long long sum_of_in_groups_stride,
    long long sum_of_squares_stride)
{
  constexpr int row_threads = 1024;
  const int lane = threadIdx.x;  // of the 1024 threads that share a row
  __shared__ float part[2][16];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const __bf16* const in_groups_row = in_groups_ptr + row * in_groups_stride;
  float* const sum_of_in_groups_row = sum_of_in_groups_ptr + row * sum_of_in_groups_stride;
  float* const sum_of_squares_row = sum_of_squares_ptr + row * sum_of_squares_stride;
  Vec<__bf16, 8> in_groups_vec[5];

  // pass 1 of 2: read in_groups; keep in_groups; sum_of_in_groups = sum(in_groups)
  float sum_of_in_groups_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 5; ++v) {
    const int col = (v * row_threads + lane) * 8;
    in_groups_vec[v] = load<8>(in_groups_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 5; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float in_groups = static_cast<float>(in_groups_vec[v].at[j]);
      sum_of_in_groups_part += in_groups;
    }
  }
  const float sum_of_in_groups = row_sum(sum_of_in_groups_part, part[0]);
  const float mean = sum_of_in_groups / 40960.0f;
  if (lane == 0) *sum_of_in_groups_row = sum_of_in_groups;

  // pass 2 of 2: sum_of_squares = sum(square)
  float sum_of_squares_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 5; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float in_groups = static_cast<float>(in_groups_vec[v].at[j]);
      const float in_groups_minus_mean = in_groups - mean;
      const float square = in_groups_minus_mean * in_groups_minus_mean;
      sum_of_squares_part += square;
    }
  }
  const float sum_of_squares = row_sum(sum_of_squares_part, part[1]);
  if (lane == 0) *sum_of_squares_row = sum_of_squares;
}
