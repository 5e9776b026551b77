// scale_softmax  f16[B, H, S, N] -> f16[B, H, S, N]  at B=1 H=32 S=4096 N=4096
// softmax(scores / sqrt(64)) over all keys.
//
//     def scale_softmax(scores):
//         return F.softmax(scores * 0.125)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a warp a row, 2 rows a block, 8 x 8 elements a thread; mul, e in registers
// traffic  2147.5 MB moved, 2147.5 MB ideal, 5368.7 MB unfused in 2 launches
// floor    268.4 us at 8 TB/s; memory-bound at 2.25 flop/B
// rounding out to f16 when stored; f32 between
// needs    rows of 4096 elements, next to each other; scores, out: address and strides in multiples of
//          16 B

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

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

// the larger of two; NaN wins
__device__ __forceinline__ float larger(float a, float b) {
  return __builtin_elementwise_maximum(a, b);
}

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  return __builtin_amdgcn_exp2f(x);
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
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

// the largest value over the 64 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
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
scale_softmax(
    const _Float16* __restrict__ scores_ptr,
    _Float16* __restrict__ out_ptr,
    long long rows,
    long long scores_stride,
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
  const _Float16* const scores_row = scores_ptr + row * scores_stride;
  _Float16* const out_row = out_ptr + row * out_stride;
  float mul_kept[8][8];
  float e_kept[8][8];

  // pass 1 of 3: read scores; keep mul; top = max(mul)
  float top_part = -INFINITY;
  Vec<_Float16, 8> scores_vec[8];
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    scores_vec[v] = load<8>(scores_row + col);
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float scores = static_cast<float>(scores_vec[v].at[j]);
      const float mul = scores * 0.125f;
      mul_kept[v][j] = mul;
      top_part = larger(top_part, mul);
    }
  }
  const float top = row_max(top_part);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // pass 2 of 3: keep e; sum_of_exps = sum(e)
  float sum_of_exps_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float mul = mul_kept[v][j];
      const float sub = mul - pivot;
      const float e = exponential(sub);
      e_kept[v][j] = e;
      sum_of_exps_part += e;
    }
  }
  const float sum_of_exps = row_sum(sum_of_exps_part);
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // pass 3 of 3: write out
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    Vec<_Float16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float e = e_kept[v][j];
      const float softmax = e * inverse_sum;
      out_vec.at[j] = static_cast<_Float16>(softmax);
    }
    if (live) store<8>(out_row + col, out_vec);
  }
}
