// log_softmax  bf16[T, V] -> f32[T, V]  at T=4096 V=32000
// logits - max - log(sum(exp(logits - max))).
//
//     def log_softmax(logits):
//         return F.log_softmax(logits)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a block of 1024 threads a row, 8 x 4 elements a thread; logits, shifted in registers
// traffic  786.4 MB moved, 786.4 MB ideal, 1048.6 MB unfused in 1 launch
// floor    98.3 us at 8 TB/s; memory-bound at 1.33 flop/B
// needs    rows of 32000 elements, next to each other; logits: address and strides in multiples of 8 B;
//          out: address and strides in multiples of 16 B

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

// log2(x) of no subnormal x: within 2^-22 from 1/2 to 2, within 2 ulp elsewhere
__device__ __forceinline__ float log_2(float x) {
  return __builtin_amdgcn_logf(x);
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// ln x, within 3 ulp
__device__ __forceinline__ float natural_log(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float t = tiny ? 16777216.0f * x : x;
  float y = log_2(t);
  if (tiny) y -= 24.0f;
  const float w = y * y;
  const float near = (t - 1.0f) * fmaf(-0.34657359f, y, fmaf(fmaf(-0.000316441874f, w, 0.040036682f), w, 1.0f));
  return fabsf(y) < 0.9f ? near : 0.693147181f * y;
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

// the largest value over the 1024 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 16];
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
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
log_softmax(
    const __bf16* __restrict__ logits_ptr,
    float* __restrict__ out_ptr,
    long long rows,
    long long logits_stride,
    long long out_stride)
{
  constexpr int row_threads = 1024;
  const int lane = threadIdx.x;  // of the 1024 threads that share a row
  __shared__ float part[2][16];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const __bf16* const logits_row = logits_ptr + row * logits_stride;
  float* const out_row = out_ptr + row * out_stride;
  Vec<__bf16, 4> logits_vec[8];
  float shifted_kept[8][4];

  // pass 1 of 3: read logits; keep logits; top = max(logits)
  float top_part = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 4;
    if (v < 7 || col < 32000) {
      logits_vec[v] = load<4>(logits_row + col);
    }
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 4;
    if (v < 7 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float logits = static_cast<float>(logits_vec[v].at[j]);
        top_part = larger(top_part, logits);
      }
    }
  }
  const float top = row_max(top_part, part[0]);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // pass 2 of 3: keep shifted; sum_of_exps = sum(exp_)
  float sum_of_exps_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 4;
    if (v < 7 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float logits = static_cast<float>(logits_vec[v].at[j]);
        const float shifted = logits - pivot;
        const float exp_ = exponential(shifted);
        shifted_kept[v][j] = shifted;
        sum_of_exps_part += exp_;
      }
    }
  }
  const float sum_of_exps = row_sum(sum_of_exps_part, part[1]);
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float log_ = natural_log(sum_of_exps);
  const float log_sum = sum_of_exps_is_0 ? 0.0f : log_;

  // pass 3 of 3: write out
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 4;
    if (v < 7 || col < 32000) {
      Vec<float, 4> out_vec;
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float shifted = shifted_kept[v][j];
        const float log_softmax = shifted - log_sum;
        out_vec.at[j] = log_softmax;
      }
      store<4>(out_row + col, out_vec);
    }
  }
}
