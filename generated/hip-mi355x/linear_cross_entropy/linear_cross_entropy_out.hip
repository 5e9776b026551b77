// linear_cross_entropy_out  f32[M, 1002], f32[M, 1002], f32[M, 1002], i32[M, 1] -> f32[M, 1]  at M=4096
// out of linear_cross_entropy.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// tile     a block of 128 threads a row, 2 x 4 elements a thread; top_parts in registers
// traffic  49.3 MB moved, 49.3 MB ideal, 49.3 MB unfused in 1 launch
// floor    6.2 us at 8 TB/s; memory-bound at 0.75 flop/B
// needs    rows of 1002 elements, next to each other; top_parts, sum_of_exps_parts, sum_of_where_parts:
//          address in multiples of 16 B, no stride below 0

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

// how many values p lies behind the last address that is a multiple of `bytes`
template <int bytes, typename T>
__device__ __forceinline__ int phase(const T* p) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(p) % bytes / sizeof(T));
}

// the aligned pieces of up to 8 bytes that N values lie across, which start anywhere
template <typename T, int N>
struct Pieces {
  static constexpr int piece = alignof(Vec<T, N>) < 8 ? alignof(Vec<T, N>) : 8;
  unsigned words[(sizeof(Vec<T, N>) + piece) / 4];
};

// the pieces from p on, which is aligned to them; `last`: the last one is among them
template <int N, typename T>
__device__ __forceinline__ Pieces<T, N> load_pieces(const T* p, bool last = true) {
  constexpr int each = Pieces<T, N>::piece / 4, words = sizeof(Pieces<T, N>) / 4;
  Pieces<T, N> pieces{};
  #pragma unroll
  for (int i = 0; i < words; i += each) {
    if (i + each == words && !last) break;
    const Vec<unsigned, each> some = load<each>(reinterpret_cast<const unsigned*>(p) + i);
    #pragma unroll
    for (int k = 0; k < each; ++k) pieces.words[i + k] = some.at[k];
  }
  return pieces;
}

// the pieces of values col ... col + N - 1 of a row; `ends`: what lies behind the row may not be read, others of its values
// stand in for that
template <int N, typename T>
__device__ __forceinline__ Pieces<T, N> load_row_pieces(const T* row, int col, int cols, bool ends) {
  constexpr int each = 4 / sizeof(T), words = sizeof(Pieces<T, N>) / 4;
  const int from = col - phase<Pieces<T, N>::piece>(row + col);
  if (!ends || from + words * each <= cols) return load_pieces<N>(row + from);
  Pieces<T, N> pieces;
  #pragma unroll
  for (int i = 0; i < words; ++i) {
    T some[each];
    #pragma unroll
    for (int k = 0; k < each; ++k) {
      const int at = from + i * each + k;
      some[k] = row[at < 0 ? 0 : at < cols ? at : cols - 1];
    }
    memcpy(&pieces.words[i], some, 4);
  }
  return pieces;
}

// the vector that lies across the pieces of a row
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> joined(Pieces<T, N> pieces, const T* row) {
  constexpr int piece = Pieces<T, N>::piece, words = sizeof(pieces) / 4;
  const int bytes = phase<piece>(row) * sizeof(T);
  #pragma unroll
  for (int step = piece / 8; step > 0; step /= 2) {
    #pragma unroll
    for (int i = 0; i + step < words; ++i) {
      const unsigned here = pieces.words[i], there = pieces.words[i + step];  // a choice of places would want an address
      pieces.words[i] = bytes & 4 * step ? there : here;
    }
  }
  if constexpr (sizeof(T) < 4) {
    #pragma unroll
    for (int i = 0; i + 1 < words; ++i) {
      const unsigned long long pair = static_cast<unsigned long long>(pieces.words[i + 1]) << 32 | pieces.words[i];
      pieces.words[i] = static_cast<unsigned>(pair >> bytes % 4 * 8);
    }
  }
  Vec<T, N> v;
  memcpy(&v, pieces.words, sizeof(v));
  return v;
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

// the largest value over the 128 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = v;
  }
  __syncthreads();
  v = part[threadIdx.x % 2];
  v = larger(v, partner(v, 1));
  return v;
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
linear_cross_entropy_out(
    const float* __restrict__ top_parts_ptr,
    const float* __restrict__ sum_of_exps_parts_ptr,
    const float* __restrict__ sum_of_where_parts_ptr,
    const int* __restrict__ labels_ptr,
    float* __restrict__ out_ptr,
    long long rows,
    long long top_parts_stride,
    long long sum_of_exps_parts_stride,
    long long sum_of_where_parts_stride,
    long long labels_stride,
    long long out_stride)
{
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  __shared__ float part[3][2];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const float* const top_parts_row = top_parts_ptr + row * top_parts_stride;
  const bool top_parts_ends = top_parts_ptr + (rows - 1) * top_parts_stride - top_parts_row < 8;
  const float* const sum_of_exps_parts_row = sum_of_exps_parts_ptr + row * sum_of_exps_parts_stride;
  const bool sum_of_exps_parts_ends = sum_of_exps_parts_ptr + (rows - 1) * sum_of_exps_parts_stride - sum_of_exps_parts_row < 8;
  const float* const sum_of_where_parts_row = sum_of_where_parts_ptr + row * sum_of_where_parts_stride;
  const bool sum_of_where_parts_ends = sum_of_where_parts_ptr + (rows - 1) * sum_of_where_parts_stride - sum_of_where_parts_row < 8;
  const int* const labels_row = labels_ptr + row * labels_stride;
  float* const out_row = out_ptr + row * out_stride;
  const int labels = *labels_row;
  const bool eq = labels == (-100);
  const bool ge = labels >= 0;
  const bool lt = labels < 128256;
  const bool logical_and = ge && lt;
  Vec<float, 4> top_parts_vec[2];

  // pass 1 of 2: read top_parts, sum_of_where_parts; keep top_parts; top = max(top_parts); sum =
  //   sum(sum_of_where_parts)
  float top_part = -INFINITY;
  float sum_part = 0.0f;
  Pieces<float, 4> top_parts_pieces[2];
  Pieces<float, 4> sum_of_where_parts_pieces[2];
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 4;
    if (v < 1 || col < 1002) {
      top_parts_pieces[v] = load_row_pieces<4>(top_parts_row, col, 1002, v >= 1 && top_parts_ends);
      sum_of_where_parts_pieces[v] = load_row_pieces<4>(sum_of_where_parts_row, col, 1002, v >= 1 && sum_of_where_parts_ends);
    }
  }
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 4;
    if (v < 1 || col < 1002) {
      top_parts_vec[v] = joined(top_parts_pieces[v], top_parts_row);
      const Vec<float, 4> sum_of_where_parts_vec = joined(sum_of_where_parts_pieces[v], sum_of_where_parts_row);
      const auto element = [&](int j) {
        const float top_parts = top_parts_vec[v].at[j];
        const float sum_of_where_parts = sum_of_where_parts_vec.at[j];
        top_part = larger(top_part, top_parts);
        sum_part += sum_of_where_parts;
      };
      if (v < 1 || col + 4 <= 1002) {
        #pragma unroll
        for (int j = 0; j < 4; ++j) element(j);
      } else {  // the row ends inside of this vector
        #pragma unroll
        for (int j = 0; j < 2; ++j) element(j);
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
  Pieces<float, 4> sum_of_exps_parts_pieces[2];
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 4;
    if (v < 1 || col < 1002) {
      sum_of_exps_parts_pieces[v] = load_row_pieces<4>(sum_of_exps_parts_row, col, 1002, v >= 1 && sum_of_exps_parts_ends);
    }
  }
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 4;
    if (v < 1 || col < 1002) {
      const Vec<float, 4> sum_of_exps_parts_vec = joined(sum_of_exps_parts_pieces[v], sum_of_exps_parts_row);
      const auto element = [&](int j) {
        const float top_parts = top_parts_vec[v].at[j];
        const float sum_of_exps_parts = sum_of_exps_parts_vec.at[j];
        const float top_parts_minus_pivot = top_parts - pivot;
        const float exp_ = exponential(top_parts_minus_pivot);
        const float mul = sum_of_exps_parts * exp_;
        sum_of_products_part += mul;
      };
      if (v < 1 || col + 4 <= 1002) {
        #pragma unroll
        for (int j = 0; j < 4; ++j) element(j);
      } else {  // the row ends inside of this vector
        #pragma unroll
        for (int j = 0; j < 2; ++j) element(j);
      }
    }
  }
  const float sum_of_products = row_sum(sum_of_products_part, part[2]);
  const float log_sum = natural_log(sum_of_products);
  const float loss = log_sum - own_logit_minus_pivot;
  const float cross_entropy = eq ? 0.0f : loss;
  if (lane == 0) *out_row = cross_entropy;
}
