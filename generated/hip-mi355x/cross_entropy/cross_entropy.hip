// cross_entropy  bf16[M, N], i32[M, 1] -> f32[M, 1]  at M=8192 N=128256
// log(sum(exp(logits))) - logits[label] of each row, and 0 of those whose label is -100.
//
//     def cross_entropy(logits, labels):
//         return F.cross_entropy(logits, labels)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// looks up columns of logits at labels, nan where there is none
// tile     a block of 256 threads a row, 63 x 8 elements a thread; one pass, nothing kept
// traffic  2101.4 MB moved, 2101.4 MB ideal, 4202.8 MB unfused in 1 launch
// floor    262.7 us at 8 TB/s; memory-bound at 3.50 flop/B
// needs    rows of 128256 elements, next to each other; logits: address and strides in multiples of 16
//          B

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

#ifndef NAN
#define NAN __int_as_float(0x7fc00000)
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

// the largest of the values seen and the sum of exp(value - largest), in one pass: the sum shrinks as the largest grows
struct MaxSum {
  float top;
  float total;

  __device__ __forceinline__ void merge(float other_top, float other_total) {
    const float peak = larger(top, other_top);
    const float pivot = peak == -INFINITY ? 0.0f : peak;  // nothing seen yet: exp(-inf - 0) is 0, not NaN
    total = total * exponential(top - pivot) + other_total * exponential(other_top - pivot);
    top = peak;
  }

  // 8 values at once: one exponential each, and one for the sum so far
  __device__ __forceinline__ void add(const float (&values)[8]) {
    float peak = top;
    #pragma unroll
    for (int j = 0; j < 8; ++j) peak = larger(peak, values[j]);
    const float pivot = peak == -INFINITY ? 0.0f : peak;
    total *= exponential(top - pivot);
    #pragma unroll
    for (int j = 0; j < 8; ++j) total += exponential(values[j] - pivot);
    top = peak;
  }
};

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

// the largest value and the sum of exponentials below it over the 256 threads of a row, in every one of them
__device__ __forceinline__ MaxSum row_max_sum(MaxSum v, float* part_top, float* part_total) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v.merge(partner(v.top, step), partner(v.total, step));
  }
  if (threadIdx.x % 64 == 0) {
    part_top[threadIdx.x / 64] = v.top;
    part_total[threadIdx.x / 64] = v.total;
  }
  __syncthreads();
  v.top = part_top[threadIdx.x % 4];
  v.total = part_total[threadIdx.x % 4];
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v.merge(partner(v.top, step), partner(v.total, step));
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(256)
cross_entropy(
    const __bf16* __restrict__ logits_ptr,
    const int* __restrict__ labels_ptr,
    float* __restrict__ out_ptr,
    long long rows,
    long long logits_stride,
    long long labels_stride,
    long long out_stride)
{
  constexpr int row_threads = 256;
  constexpr int cols = 128256;
  const int lane = threadIdx.x;  // of the 256 threads that share a row
  __shared__ float part[2][4];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const __bf16* const logits_row = logits_ptr + row * logits_stride;
  const int* const labels_row = labels_ptr + row * labels_stride;
  float* const out_row = out_ptr + row * out_stride;
  const int labels = *labels_row;
  const bool eq = labels == (-100);
  const float own_logit = labels >= 0 && labels < cols ? static_cast<float>(logits_row[labels]) : NAN;

  // pass 1 of 1: read logits; top = max(logits) and sum_of_exps = sum(exp(logits - top))
  MaxSum sum_of_exps_part = {-INFINITY, 0.0f};
  #pragma unroll 4
  for (int v = 0; v < 63; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (col < 128256) {
      const Vec<__bf16, 8> logits_vec = load<8>(logits_row + col);
      float sum_of_exps_part_values[8];
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float logits = static_cast<float>(logits_vec.at[j]);
        sum_of_exps_part_values[j] = logits;
      }
      sum_of_exps_part.add(sum_of_exps_part_values);
    }
  }
  const MaxSum sum_of_exps_all = row_max_sum(sum_of_exps_part, part[0], part[1]);
  const float top = sum_of_exps_all.top;
  const float sum_of_exps = sum_of_exps_all.total;
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;
  const float log_sum = natural_log(sum_of_exps);
  const float own_logit_minus_pivot = own_logit - pivot;
  const float loss = log_sum - own_logit_minus_pivot;
  const float cross_entropy = eq ? 0.0f : loss;
  if (lane == 0) *out_row = cross_entropy;
}
