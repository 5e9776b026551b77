// top_p_sample  bf16[M, V], f32[M, 1], i32[M, 1], f32[M, 1], i32[1], i32[1] -> i64[M, 1]  at M=64 V=32000
// A token of the k likeliest, and of those that make up a share p, with its probability among them.
//
//     def top_p_sample(logits, temperature, k, p, seed, step):
//         z = logits / temperature
//         z = F.where(F.top_k(z, k), z, NONE)
//         kept = F.where(F.top_p(F.softmax(z), p), z, NONE)
//         drawn = kept - F.log(-F.log(F.uniform(kept, seed, step)))
//         first = F.where(drawn == F.max(drawn), F.col_index(drawn), 2**31 - 1)
//         return F.min(first)[..., 0]
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a block of 1024 threads a row, 4 x 8 elements a thread; mul_from_logits, largest_by_count,
//          z, e, largest_by_sum_of_softmax, drawn in registers
// traffic  4.1 MB moved, 4.1 MB ideal, 213.0 MB unfused in 15 launches
// floor    0.5 us at 8 TB/s; instruction-bound at 16.00 flop/B
// needs    rows of 32000 elements, next to each other; logits: address and strides in multiples of 16 B

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

// the number whose place among all numbers is x; NaN of what is below and above all of them
__device__ __forceinline__ float number_in_order(unsigned x) {
  return __uint_as_float(x >> 31 ? x ^ 0x80000000u : ~x);
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// ln x of no subnormal x, within 3 ulp
__device__ __forceinline__ float log_of_normal(float x) {
  const float y = log_2(x);
  const float w = y * y;
  const float near = (x - 1.0f) * fmaf(-0.34657359f, y, fmaf(fmaf(-0.000316441874f, w, 0.040036682f), w, 1.0f));
  return fabsf(y) < 0.9f ? near : 0.693147181f * y;
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

// 32 random bits: word index mod 4 of Philox4x32-10 of the counter (index / 4, offset, 0) and the key (seed, 0)
__device__ __forceinline__ int philox(int low, int high, int offset, int seed) {
  const unsigned place = static_cast<unsigned>(low), above = static_cast<unsigned>(high);
  unsigned c0 = place >> 2 | above << 30, c1 = above >> 2, c2 = static_cast<unsigned>(offset), c3 = 0u;
  unsigned k0 = static_cast<unsigned>(seed), k1 = 0u;
  #pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned a = __umulhi(0xD2511F53u, c0), b = __umulhi(0xCD9E8D57u, c2);
    const unsigned next1 = 0xCD9E8D57u * c2, next3 = 0xD2511F53u * c0;
    c0 = b ^ c1 ^ k0;
    c2 = a ^ c3 ^ k1;
    c1 = next1;
    c3 = next3;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const unsigned even = place & 2u ? c2 : c0, odd = place & 2u ? c3 : c1;
  return static_cast<int>(place & 1u ? odd : even);
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

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ int partner(int v, int step) {
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

// the smallest integer over the 1024 threads of a row, in every one of them
__device__ __forceinline__ int row_min(int v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v = min(v, partner(v, step));
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = __int_as_float(v);
  }
  __syncthreads();
  v = __float_as_int(part[threadIdx.x % 16]);
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v = min(v, partner(v, step));
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(1024)
top_p_sample(
    const __bf16* __restrict__ logits_ptr,
    const float* __restrict__ temperature_ptr,
    const int* __restrict__ k_ptr,
    const float* __restrict__ p_ptr,
    const int* __restrict__ seed_ptr,
    const int* __restrict__ step_ptr,
    long long* __restrict__ out_ptr,
    long long rows,
    long long logits_stride,
    long long temperature_stride,
    long long k_stride,
    long long p_stride,
    long long out_stride)
{
  constexpr int cols = 32000;
  constexpr int row_threads = 1024;
  const int lane = threadIdx.x;  // of the 1024 threads that share a row
  __shared__ float part[8][16];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const __bf16* const logits_row = logits_ptr + row * logits_stride;
  const float* const temperature_row = temperature_ptr + row * temperature_stride;
  const int* const k_row = k_ptr + row * k_stride;
  const float* const p_row = p_ptr + row * p_stride;
  long long* const out_row = out_ptr + row * out_stride;
  const float temperature = *temperature_row;
  const int k = *k_row;
  const float p = *p_row;
  const int step = *step_ptr;
  const int seed = *seed_ptr;
  const float abs_ = fabsf(temperature);
  const bool gt = abs_ > 1.8446744e+19f;
  const bool lt = abs_ < 5.421011e-20f;
  const float where = lt ? 1.8446744e+19f : 1.0f;
  const float scale_of_temperature = gt ? 5.421011e-20f : where;
  const float mul_from_temperature = temperature * scale_of_temperature;
  const float reciprocal_of_temperature = 1.0f / mul_from_temperature;
  const float to_f32 = static_cast<float>(k);
  float mul_from_logits_kept[4][8];
  float largest_by_count_kept[4][8];
  float z_kept[4][8];
  float e_kept[4][8];
  float largest_by_sum_of_softmax_kept[4][8];
  float drawn_kept[4][8];

  // pass 1 of 6: read logits; keep mul_from_logits; largest_by_count = largest_by_count(mul_from_logits)
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) largest_by_count_kept[v][j] = (-INFINITY);
  }
  Vec<__bf16, 8> logits_vec[4];
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 3 || col < 32000) {
      logits_vec[v] = load<8>(logits_row + col);
    }
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 3 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float logits = static_cast<float>(logits_vec[v].at[j]);
        const float mul = logits * scale_of_temperature;
        const float mul_from_logits = mul * reciprocal_of_temperature;
        mul_from_logits_kept[v][j] = mul_from_logits;
        largest_by_count_kept[v][j] = mul_from_logits;
      }
    }
  }
  {  // largest_by_count
    unsigned bits = 0;  // in the order of numbers, of the smallest one that is kept
    #pragma unroll 1
    for (int step = 31; step >= 0; --step) {
      const float least = number_in_order(bits | 1u << step);
      float reach = 0.0f;  // the count of what is as large
      #pragma unroll
      for (int v = 0; v < 4; ++v) {
        #pragma unroll
        for (int j = 0; j < 8; ++j) reach += largest_by_count_kept[v][j] >= least ? 1.0f : 0.0f;
      }
      if (row_sum(reach, step % 2 == 0 ? part[0] : part[1]) >= to_f32) bits |= 1u << step;
    }
    const float least = bits == 0u ? -INFINITY : number_in_order(bits);
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        largest_by_count_kept[v][j] = largest_by_count_kept[v][j] >= least ? largest_by_count_kept[v][j] : -INFINITY;
      }
    }
  }

  // pass 2 of 6: keep z; top = max(z)
  float top_part = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 3 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float mul_from_logits = mul_from_logits_kept[v][j];
        const float largest_by_count = largest_by_count_kept[v][j];
        const bool top_k = largest_by_count > (-INFINITY);
        const float z = top_k ? mul_from_logits : (-INFINITY);
        z_kept[v][j] = z;
        top_part = larger(top_part, z);
      }
    }
  }
  const float top = row_max(top_part, part[2]);
  const bool top_is_minus_inf = top == (-INFINITY);
  const float pivot = top_is_minus_inf ? 0.0f : top;

  // pass 3 of 6: keep e; sum_of_exps = sum(e)
  float sum_of_exps_part = 0.0f;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 3 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float z = z_kept[v][j];
        const float z_minus_pivot = z - pivot;
        const float e = exponential(z_minus_pivot);
        e_kept[v][j] = e;
        sum_of_exps_part += e;
      }
    }
  }
  const float sum_of_exps = row_sum(sum_of_exps_part, part[3]);
  const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
  const float one_over_sum_of_exps = 1.0f / sum_of_exps;
  const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;

  // pass 4 of 6: largest_by_sum_of_softmax = largest_by_sum(softmax)
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) largest_by_sum_of_softmax_kept[v][j] = 0.0f;
  }
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 3 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float e = e_kept[v][j];
        const float softmax = e * inverse_sum;
        largest_by_sum_of_softmax_kept[v][j] = softmax;
      }
    }
  }
  {  // largest_by_sum_of_softmax
    unsigned bits = 0;  // of the smallest one that is kept
    #pragma unroll 1
    for (int step = 30; step >= 0; --step) {
      const float least = __uint_as_float(bits | 1u << step);
      float reach = 0.0f;  // the sum of what is as large
      #pragma unroll
      for (int v = 0; v < 4; ++v) {
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          reach += largest_by_sum_of_softmax_kept[v][j] >= least ? largest_by_sum_of_softmax_kept[v][j] : 0.0f;
        }
      }
      if (row_sum(reach, step % 2 == 0 ? part[4] : part[5]) >= p) bits |= 1u << step;
    }
    const float least = __uint_as_float(bits);
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        largest_by_sum_of_softmax_kept[v][j] = largest_by_sum_of_softmax_kept[v][j] >= least ? largest_by_sum_of_softmax_kept[v][j] : 0.0f;
      }
    }
  }

  // pass 5 of 6: keep drawn; max_of_drawn = max(drawn)
  float max_of_drawn_part = -INFINITY;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 3 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float z = z_kept[v][j];
        const float largest_by_sum_of_softmax = largest_by_sum_of_softmax_kept[v][j];
        const bool top_p = largest_by_sum_of_softmax > 0.0f;
        const float kept = top_p ? z : (-INFINITY);
        const int low = static_cast<int>(row * cols + col + j);
        const int high = static_cast<int>((row * cols + col + j) >> 32);
        const int philox_ = philox(low, high, step, seed);
        const float uniform = 5.96046448e-08f * static_cast<float>(static_cast<int>(static_cast<unsigned>(philox_) >> 8));
        const float log_ = log_of_normal(uniform);
        const float neg = -log_;
        const float log_of_neg = natural_log(neg);
        const float drawn = kept - log_of_neg;
        drawn_kept[v][j] = drawn;
        max_of_drawn_part = larger(max_of_drawn_part, drawn);
      }
    }
  }
  const float max_of_drawn = row_max(max_of_drawn_part, part[6]);

  // pass 6 of 6: min_of_first = min(first)
  int min_of_first_part = 2147483647;
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int col = (v * row_threads + lane) * 8;
    if (v < 3 || col < 32000) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float drawn = drawn_kept[v][j];
        const bool drawn_is_max_of_drawn = drawn == max_of_drawn;
        const int col_index = col + j;
        const int first = drawn_is_max_of_drawn ? col_index : 2147483647;
        min_of_first_part = min(min_of_first_part, first);
      }
    }
  }
  const int min_of_first = row_min(min_of_first_part, part[7]);
  if (lane == 0) *out_row = min_of_first;
}
