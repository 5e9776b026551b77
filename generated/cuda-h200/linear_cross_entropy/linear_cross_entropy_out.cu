// linear_cross_entropy_out  f32[M, 1002], f32[M, 1002], f32[M, 1002], i32[M, 1] -> f32[M, 1]  at M=4096
// out of linear_cross_entropy.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// tile     a block of 64 threads a row, 8 x 2 elements a thread; top_parts in registers
// traffic  49.3 MB moved, 49.3 MB ideal, 49.3 MB unfused in 1 launch
// floor    10.3 us at 4.8 TB/s; memory-bound at 0.75 flop/B
// needs    rows of 1002 elements, next to each other; top_parts, sum_of_exps_parts, sum_of_where_parts:
//          address and strides in multiples of 8 B
// launch   begins while the kernels before it run, and waits for them before all else

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
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) of no subnormal x: within 2^-22 from 1/2 to 2, within 2 ulp elsewhere
__device__ __forceinline__ float log_2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// the largest value over the 64 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v, float* part) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 2];
  v = larger(v, partner(v, 1));
  return v;
}

// the sum over the 64 threads of a row, in every one of them
__device__ __forceinline__ float row_sum(float v, float* part) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 2];
  v += partner(v, 1);
  return v;
}

extern "C" __global__ void __launch_bounds__(64)
linear_cross_entropy_out(
    const float* top_parts_ptr,
    const float* sum_of_exps_parts_ptr,
    const float* sum_of_where_parts_ptr,
    const int* __restrict__ labels_ptr,
    float* __restrict__ out_ptr,
    long long rows,
    long long top_parts_stride,
    long long sum_of_exps_parts_stride,
    long long sum_of_where_parts_stride,
    long long labels_stride,
    long long out_stride)
{
  asm volatile("griddepcontrol.wait;" ::: "memory");  // until the kernels before this one have ended
  constexpr int row_threads = 64;
  const int lane = threadIdx.x;  // of the 64 threads that share a row
  __shared__ float part[3][2];
  const long long row = blockIdx.x;
  const float* const top_parts_row = top_parts_ptr + row * top_parts_stride;
  const float* const sum_of_exps_parts_row = sum_of_exps_parts_ptr + row * sum_of_exps_parts_stride;
  const float* const sum_of_where_parts_row = sum_of_where_parts_ptr + row * sum_of_where_parts_stride;
  const int* const labels_row = labels_ptr + row * labels_stride;
  float* const out_row = out_ptr + row * out_stride;
  const int labels = *labels_row;
  const bool eq = labels == (-100);
  const bool ge = labels >= 0;
  const bool lt = labels < 128256;
  const bool logical_and = ge && lt;
  Vec<float, 2> top_parts_vec[8];

  // pass 1 of 2: read top_parts, sum_of_where_parts; keep top_parts; top = max(top_parts); sum =
  //   sum(sum_of_where_parts)
  float top_part = -INFINITY;
  float sum_part = 0.0f;
  Vec<float, 2> sum_of_where_parts_vec[8];
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 2;
    if (v < 7 || col < 1002) {
      top_parts_vec[v] = load<2>(top_parts_row + col);
      sum_of_where_parts_vec[v] = load<2>(sum_of_where_parts_row + col);
    }
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 2;
    if (v < 7 || col < 1002) {
      #pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float top_parts = top_parts_vec[v].at[j];
        const float sum_of_where_parts = sum_of_where_parts_vec[v].at[j];
        top_part = larger(top_part, top_parts);
        sum_part += sum_of_where_parts;
      }
    }
  }
  const float top = row_max(top_part, part[0]);
  const float sum = row_sum(sum_part, part[1]);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;
  const float own_logit = logical_and ? sum : NAN;
  const float own_logit_minus_pivot = own_logit - pivot;

  // pass 2 of 2: read sum_of_exps_parts; sum_of_products = sum(mul)
  float sum_of_products_part = 0.0f;
  Vec<float, 2> sum_of_exps_parts_vec[8];
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 2;
    if (v < 7 || col < 1002) {
      sum_of_exps_parts_vec[v] = load<2>(sum_of_exps_parts_row + col);
    }
  }
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int col = (v * row_threads + lane) * 2;
    if (v < 7 || col < 1002) {
      #pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float top_parts = top_parts_vec[v].at[j];
        const float sum_of_exps_parts = sum_of_exps_parts_vec[v].at[j];
        const float top_parts_minus_pivot = top_parts - pivot;
        const float exp_ = exponential(top_parts_minus_pivot);
        const float mul = sum_of_exps_parts * exp_;
        sum_of_products_part += mul;
      }
    }
  }
  const float sum_of_products = row_sum(sum_of_products_part, part[2]);
  const float log_sum = natural_log(sum_of_products);
  const float loss = log_sum - own_logit_minus_pivot;
  const float cross_entropy = eq ? 0.0f : loss;
  if (lane == 0) *out_row = cross_entropy;
}
