// rmsnorm_gemm_swiglu  bf16[M, K], bf16[K], bf16[N, K], bf16[N, K] -> bf16[M, N]  at M=8 K=4096 N=14336
// silu(h @ w_gate.T) * (h @ w_up.T) with h = rmsnorm(x) * gain.
//
//     def rmsnorm_gemm_swiglu(x, gain, w_gate, w_up):
//         h = F.rmsnorm(x, gain)
//         return F.silu(h @ w_gate.T) * (h @ w_up.T)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// tile     16 x 64 tiles, slice-K by 4 groups of warps; slices of 64 in a ring of 2 for each group
// traffic  235.2 MB moved, 235.2 MB ideal, 236.3 MB with products apart, 236.8 MB unfused in 5 launches
// floor    29.4 us at 8 TB/s; memory-bound at 7.99 flop/B
// rounding x * gain to bf16 before it is multiplied, and only then scaled by rrms; out to bf16 when
//          stored; f32 between
// needs    K=4096, N=14336; rows of all operands next to each other; x, gain, w_gate, w_up, out:
//          address and strides in multiples of 16 B; gain [K] shared by every row

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

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  return __builtin_amdgcn_exp2f(x);
}

// 1 / x, within 1 ulp; above 2^126 it is 0
__device__ __forceinline__ float reciprocal(float x) {
  return __builtin_amdgcn_rcpf(x);
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 16, tile_cols = 64, tile_k = 64, stages = 2;
constexpr int split_k = 4, steps = 16;  // parts of K, and slices of each
constexpr int tiles_across = 224;
// elements from the start of a slice to the right factors, and to its end
constexpr int w_gate_at = tile_rows * tile_k;
constexpr int w_up_at = w_gate_at + tile_cols * tile_k;
constexpr int slice_elements = w_up_at + tile_cols * tile_k;
// floats from a row of sums to the next: what a warp writes at once lies in different banks
constexpr int sums_stride = tile_cols + 4;
constexpr int group_floats = 2 * tile_rows * sums_stride + 1 * tile_rows;  // of a slice-K group's sums and statistics

// where element (row, k) lies in a tile with rows of Chunks x 8 elements: XOR-swizzled by the row's number, so that
// what lanes read of 64 banks at once lies in different ones, and what 8 of them write
template <int Chunks>
__device__ __forceinline__ int place(int row, int k) {
  const int xor_mask = row / 2 % 8 ^ row % 2 * (Chunks - 4);
  return (row * Chunks + (k / 8 ^ xor_mask)) * 8 + k % 8;
}

// 8 elements, Width with each load; those from `count` on are zeros
template <int Width, typename T>
__device__ __forceinline__ Vec<T, 8> load_chunk(const T* from, int count) {
  Vec<T, 8> v;
  if (Width > 1 && count == 8) {
    #pragma unroll
    for (int j = 0; j < 8; j += Width) {
      const Vec<T, Width> part = load<Width>(from + j);
      #pragma unroll
      for (int i = 0; i < Width; ++i) v.at[j + i] = part.at[i];
    }
  } else {
    #pragma unroll
    for (int j = 0; j < 8; ++j) v.at[j] = j < count ? from[j] : T{};
  }
  return v;
}

// N neighbouring sums in shared memory, added up over the 4 slice-K groups, always in this order
template <int N>
__device__ __forceinline__ Vec<float, N> gathered(const float* from) {
  Vec<float, N> total = {};
  #pragma unroll
  for (int group = 0; group < 4; ++group) {
    const Vec<float, N> part = load<N>(from + group * group_floats);
    #pragma unroll
    for (int j = 0; j < N; ++j) total.at[j] += part.at[j];
  }
  return total;
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

typedef __bf16 Half __attribute__((ext_vector_type(8)));
typedef float Sums __attribute__((ext_vector_type(4)));

// a lane's 8 elements of what one fragment multiplies: neighbours in k, the same for both operands
struct alignas(16) Fragment {
  Half part[1];
};

// row `mn` + lane % 16 of a tile, from k on
template <int Chunks, typename T>
__device__ __forceinline__ void load_fragment(Fragment& to, const T* tile, int mn, int k) {
  const int lane = threadIdx.x % 64;
  to = *reinterpret_cast<const Fragment*>(tile + place<Chunks>(mn + lane % 16, k + lane / 16 * 8));
}

// sums += right^T left^T, 16 columns by 16 rows
__device__ __forceinline__ void multiply_add(Sums& sums, const Fragment& right, const Fragment& left) {
  sums = __builtin_amdgcn_mfma_f32_16x16x32_bf16(right.part[0], left.part[0], sums, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(256)
rmsnorm_gemm_swiglu(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ gain_ptr,
    const __bf16* __restrict__ w_gate_ptr,
    const __bf16* __restrict__ w_up_ptr,
    __bf16* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long w_gate_ld,
    long long w_up_ld,
    long long out_stride)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int k_group = threadIdx.x / 64;  // slice-K: of 4 groups of warps
  const unsigned tile = blockIdx.x;
  const long long row0 = static_cast<long long>(tile / tiles_across) * tile_rows;
  const int across = tile % tiles_across;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  const int col0 = across * tile_cols;

  // the ring of 2 slices, and what the thread brings of each
  __bf16* const ring = reinterpret_cast<__bf16*>(shared) + k_group * (stages * slice_elements);
  const int x_m = lane / 8, x_k = lane % 8 * 8;
  const __bf16* x_from = x_ptr + (row0 + x_m) * x_stride + k_group * tile_k + x_k;
  const int w_gate_n = lane / 8, w_gate_k = lane % 8 * 8;
  const __bf16* w_gate_from = w_gate_ptr + (col0 + w_gate_n) * w_gate_ld + k_group * tile_k + w_gate_k;
  const int w_up_n = lane / 8, w_up_k = lane % 8 * 8;
  const __bf16* w_up_from = w_up_ptr + (col0 + w_up_n) * w_up_ld + k_group * tile_k + w_up_k;
  Vec<__bf16, 8> x_held[2];
  Vec<__bf16, 8> w_gate_held[8];
  Vec<__bf16, 8> w_up_held[8];
  Vec<__bf16, 8> gain_held;
  float sum_of_squares_part[2] = {};
  const auto fetch_slice = [&](int step) {
    const int k_at = (step * split_k + k_group) * tile_k;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      x_held[v] = load_chunk<8>(x_from + v * 8 * x_stride, x_m + v * 8 < rows_here ? 8 : 0);
    }
    x_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) w_gate_held[v] = load_chunk<8>(w_gate_from + v * 8 * w_gate_ld, 8);
    w_gate_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) w_up_held[v] = load_chunk<8>(w_up_from + v * 8 * w_up_ld, 8);
    w_up_from += split_k * tile_k;
    gain_held = load_chunk<8>(gain_ptr + k_at + x_k, 8);
  };
  const auto prepare_slice = [&](int step) {
    __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      Vec<__bf16, 8> x_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x = static_cast<float>(x_held[v].at[j]);
        const float gain = static_cast<float>(gain_held.at[j]);
        const float x_times_gain = x * gain;
        const float square = x * x;
        x_vec.at[j] = static_cast<__bf16>(x_times_gain);
        sum_of_squares_part[v] += square;
      }
      store<8>(slice + place<8>(x_m + v * 8, x_k), x_vec);
    }
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      store<8>(slice + w_gate_at + place<8>(w_gate_n + v * 8, w_gate_k), w_gate_held[v]);
    }
    #pragma unroll
    for (int v = 0; v < 8; ++v) store<8>(slice + w_up_at + place<8>(w_up_n + v * 8, w_up_k), w_up_held[v]);
  };

  // 16 slices of 64: fragments are loaded one step ahead of their use, across slices too
  Fragment x_part[2][1];
  Fragment w_gate_part[2][4];
  Fragment w_up_part[2][4];
  Sums matmul_w_gate_sums[4][1] = {};
  Sums matmul_w_up_sums[4][1] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const __bf16* const slice = ring + step % stages * slice_elements;
    load_fragment<8>(x_part[buffer][0], slice, 0, k * 32);
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_fragment<8>(w_gate_part[buffer][i], slice + w_gate_at + i * (16 * tile_k), 0, k * 32);
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_fragment<8>(w_up_part[buffer][i], slice + w_up_at + i * (16 * tile_k), 0, k * 32);
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int n = 0; n < 4; ++n) {
      multiply_add(matmul_w_gate_sums[n][0], w_gate_part[buffer][n], x_part[buffer][0]);
      multiply_add(matmul_w_up_sums[n][0], w_up_part[buffer][n], x_part[buffer][0]);
    }
  };

  fetch_slice(0);
  prepare_slice(0);
  fetch_slice(1);
  __syncthreads();
  load_parts(0, 0, 0);
  const auto take_slice = [&](int step, bool last) {
    #pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (k == 1 && !last) {
        prepare_slice(step + 1);
        if (step + 2 < steps) fetch_slice(step + 2);
      }
      if (k < 1) {
        load_parts(step, k + 1, (k + 1) % 2);
      } else if (!last) {
        __syncthreads();
        load_parts(step + 1, 0, 0);
      }
      multiply(k % 2);
    }
  };
  #pragma unroll 1
  for (int step = 0; step < steps - 1; ++step) take_slice(step, false);
  take_slice(steps - 1, true);

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  __syncthreads();
  float* const matmul_w_gate_shared = reinterpret_cast<float*>(shared);
  float* const matmul_w_up_shared = reinterpret_cast<float*>(shared) + tile_rows * sums_stride;
  float* const sum_of_squares_shared = reinterpret_cast<float*>(shared) + 2 * tile_rows * sums_stride;
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    #pragma unroll
    for (int step = 4; step > 0; step /= 2) sum_of_squares_part[v] += partner(sum_of_squares_part[v], step);
    if (x_k == 0) sum_of_squares_shared[k_group * group_floats + x_m + v * 8] = sum_of_squares_part[v];
  }
  #pragma unroll
  for (int n = 0; n < 4; ++n) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int sum_row = lane % 16;
      const int sum_col = n * 16 + lane / 16 * 4 + i;
      matmul_w_gate_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = matmul_w_gate_sums[n][0][i];
      matmul_w_up_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = matmul_w_up_sums[n][0][i];
    }
  }
  __syncthreads();

  const int m = static_cast<int>(threadIdx.x / (tile_cols / 8));
  const int n = static_cast<int>(threadIdx.x % (tile_cols / 8)) * 8;
  const long long row = row0 + m;
  const int col = col0 + n;
  if (m < tile_rows && row < rows) {
    const Vec<float, 8> matmul_w_gate_total = gathered<8>(matmul_w_gate_shared + m * sums_stride + n);
    const Vec<float, 8> matmul_w_up_total = gathered<8>(matmul_w_up_shared + m * sums_stride + n);
    const float sum_of_squares = gathered<1>(sum_of_squares_shared + m).at[0];
    const float mean = sum_of_squares / 4096.0f;
    const float mean_plus_eps = mean + 1e-06f;
    const float rrms = rsqrtf(mean_plus_eps);
    Vec<__bf16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float matmul_w_gate = matmul_w_gate_total.at[j];
      const float matmul_w_up = matmul_w_up_total.at[j];
      const float matmul_w_gate_times_rrms = matmul_w_gate * rrms;
      const float silu = matmul_w_gate_times_rrms * reciprocal(1.0f + exponential(-matmul_w_gate_times_rrms));
      const float matmul_w_up_times_rrms = matmul_w_up * rrms;
      const float out = silu * matmul_w_up_times_rrms;
      out_vec.at[j] = static_cast<__bf16>(out);
    }
    store<8>(out_ptr + row * out_stride + col, out_vec);
  }
}
