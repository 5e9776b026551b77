// scale_causal_softmax  f16[B, H, S, N] -> f16[B, H, S, N]  at B=1 H=32 S=4096 N=4096
// softmax(scores / sqrt(64)) over the keys up to each query; a row with nothing left gives zeros.
//
//     def scale_causal_softmax(scores):
//         z = F.causal(scores * 0.125)
//         return F.softmax(z)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a warp a row, 2 rows a block, 8 x 8 elements a thread; z, e in registers
// traffic  1611.7 MB moved, 1611.7 MB ideal, 7516.2 MB unfused in 3 launches
// floor    201.5 us at 8 TB/s; memory-bound at 3.66 flop/B
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

// x, of which the compiler knows nothing: where it knows a row's number to be a quotient and a rest, NVRTC writes the first
// vector of each thread value by value
__device__ __forceinline__ long long unknown(long long x) {
  return x;
}

// the vector to p, which is aligned to it
template <int N, typename T>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// the vector at p, of 16 bytes that nothing else will read: evict-first
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_evict_first(const T* p) {
  typedef unsigned Bits __attribute__((vector_size(sizeof(Vec<T, N>))));
  const Bits bits = __builtin_nontemporal_load(reinterpret_cast<const Bits*>(p));
  return *reinterpret_cast<const Vec<T, N>*>(&bits);
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
scale_causal_softmax(
    const _Float16* __restrict__ scores_ptr,
    _Float16* __restrict__ out_ptr,
    long long B_H_size,
    long long S_size,
    long long scores_stride_B_H,
    long long scores_stride_S,
    long long out_stride_B_H,
    long long out_stride_S)
{
  constexpr int row_threads = 64;
  constexpr int block_rows = 2;  // that a block takes
  const int lane = threadIdx.x % row_threads;  // of the 64 threads that share a row
  const long long rows = B_H_size * S_size;
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned B_H_at = static_cast<unsigned>(row) / static_cast<unsigned>(S_size);
  const unsigned S_at = static_cast<unsigned>(row) % static_cast<unsigned>(S_size);
  const _Float16* const scores_row = scores_ptr + B_H_at * scores_stride_B_H + S_at * scores_stride_S;
  _Float16* const out_row = out_ptr + unknown(B_H_at * out_stride_B_H + S_at * out_stride_S);
  const int last = static_cast<int>(S_at);
  float z_kept[8][8];
  float e_kept[8][8];

  // pass 1 of 3: read scores; keep z; top = max(z)
  float top_part = -INFINITY;
  Vec<_Float16, 8> scores_vec[8];
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    scores_vec[v] = load_evict_first<8>(scores_row + (col <= last ? col : lane * 8));
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (col <= last) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float scores = static_cast<float>(scores_vec[v].at[j]);
        const float mul = scores * 0.125f;
        const int col_index = col + j;
        const bool keep = col_index <= last;
        const float z = keep ? mul : (-INFINITY);
        z_kept[v][j] = z;
        top_part = larger(top_part, z);
      }
    } else {
      top_part = larger(top_part, (-INFINITY));
    }
  }
  const float top = row_max(top_part);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // pass 2 of 3: keep e; sum_of_exps = sum(e)
  const float z_minus_pivot_masked = (-INFINITY) - pivot;  // beyond the mask, all along the row
  const float e_masked = exponential(z_minus_pivot_masked);
  float sum_of_exps_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (col <= last) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float z = z_kept[v][j];
        const float z_minus_pivot = z - pivot;
        const float e = exponential(z_minus_pivot);
        e_kept[v][j] = e;
        sum_of_exps_part += e;
      }
    } else {
      sum_of_exps_part += 8.0f * e_masked;
    }
  }
  const float sum_of_exps = row_sum(sum_of_exps_part);
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // pass 3 of 3: write out
  const float softmax_masked = e_masked * inverse_sum;  // beyond the mask, all along the row
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (col <= last) {
      Vec<_Float16, 8> out_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float e = e_kept[v][j];
        const float softmax = e * inverse_sum;
        out_vec.at[j] = static_cast<_Float16>(softmax);
      }
      if (live) store<8>(out_row + col, out_vec);
    } else {
      Vec<_Float16, 8> out_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) out_vec.at[j] = static_cast<_Float16>(softmax_masked);
      if (live) store<8>(out_row + col, out_vec);
    }
  }
}
