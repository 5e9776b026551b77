// decoder_layer_activated  bf16[D], bf16[U, D], bf16[U, D], bf16[B, D], f32[B, 1] -> bf16[B, U]  at B=8 D=4096 U=14336
// activated of decoder_layer.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// tile     16 x 64 tiles, slice-K by 4 groups of warps; slices of 64 in a ring of 2 for each group
// traffic  235.2 MB moved, 235.2 MB ideal, 236.3 MB with products apart, 237.2 MB unfused in 6 launches
// floor    29.4 us at 8 TB/s; memory-bound at 7.99 flop/B
// rounding round_bf16_ to bf16 before it is multiplied; a value to bf16 behind rmsnorm, as when it is
//          stored; activated to bf16 when stored; f32 between
// needs    D=4096, U=14336; rows of all operands next to each other; h, norm_2, gate, up, activated:
//          address and strides in multiples of 16 B; norm_2 [D] shared by every row

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

// x rounded to bf16, nearest even
__device__ __forceinline__ float round_bf16(float x) {
  return static_cast<float>(static_cast<__bf16>(x));
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
constexpr int gate_at = tile_rows * tile_k;
constexpr int up_at = gate_at + tile_cols * tile_k;
constexpr int slice_elements = up_at + tile_cols * tile_k;
// floats from a row of sums to the next: what a warp writes at once lies in different banks
constexpr int sums_stride = tile_cols + 4;
constexpr int group_floats = 2 * tile_rows * sums_stride;  // of a slice-K group's sums

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
decoder_layer_activated(
    const __bf16* __restrict__ norm_2_ptr,
    const __bf16* __restrict__ gate_ptr,
    const __bf16* __restrict__ up_ptr,
    const __bf16* __restrict__ h_ptr,
    const float* __restrict__ sum_of_squares_from_x_ptr,
    __bf16* __restrict__ activated_ptr,
    long long rows,
    long long h_stride,
    long long gate_ld,
    long long up_ld,
    long long sum_of_squares_from_x_stride,
    long long activated_stride)
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
  const int h_m = lane / 8, h_k = lane % 8 * 8;
  const __bf16* h_from = h_ptr + (row0 + h_m) * h_stride + k_group * tile_k + h_k;
  const int gate_n = lane / 8, gate_k = lane % 8 * 8;
  const __bf16* gate_from = gate_ptr + (col0 + gate_n) * gate_ld + k_group * tile_k + gate_k;
  const int up_n = lane / 8, up_k = lane % 8 * 8;
  const __bf16* up_from = up_ptr + (col0 + up_n) * up_ld + k_group * tile_k + up_k;
  Vec<__bf16, 8> h_held[2];
  Vec<__bf16, 8> gate_held[8];
  Vec<__bf16, 8> up_held[8];
  Vec<__bf16, 8> norm_2_held;
  float sum_of_squares_from_x_held[2];
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    sum_of_squares_from_x_held[v] = row0 + h_m + v * 8 < rows ? *(sum_of_squares_from_x_ptr + (row0 + h_m
        + v * 8) * sum_of_squares_from_x_stride) : 0.0f;
  }
  const auto fetch_slice = [&](int step) {
    const int k_at = (step * split_k + k_group) * tile_k;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      h_held[v] = load_chunk<8>(h_from + v * 8 * h_stride, h_m + v * 8 < rows_here ? 8 : 0);
    }
    h_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) gate_held[v] = load_chunk<8>(gate_from + v * 8 * gate_ld, 8);
    gate_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) up_held[v] = load_chunk<8>(up_from + v * 8 * up_ld, 8);
    up_from += split_k * tile_k;
    norm_2_held = load_chunk<8>(norm_2_ptr + k_at + h_k, 8);
  };
  const auto prepare_slice = [&](int step) {
    __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      Vec<__bf16, 8> h_vec;
      const float sum_of_squares_from_x = sum_of_squares_from_x_held[v];
      const float mean = sum_of_squares_from_x / 4096.0f;
      const float mean_plus_eps = mean + 1e-06f;
      const float rrms = rsqrtf(mean_plus_eps);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float h = static_cast<float>(h_held[v].at[j]);
        const float norm_2 = static_cast<float>(norm_2_held.at[j]);
        const float normalized = h * rrms;
        const float normed_2 = normalized * norm_2;
        const float round_bf16_ = round_bf16(normed_2);
        h_vec.at[j] = static_cast<__bf16>(round_bf16_);
      }
      store<8>(slice + place<8>(h_m + v * 8, h_k), h_vec);
    }
    #pragma unroll
    for (int v = 0; v < 8; ++v) store<8>(slice + gate_at + place<8>(gate_n + v * 8, gate_k), gate_held[v]);
    #pragma unroll
    for (int v = 0; v < 8; ++v) store<8>(slice + up_at + place<8>(up_n + v * 8, up_k), up_held[v]);
  };

  // 16 slices of 64: fragments are loaded one step ahead of their use, across slices too
  Fragment h_part[2][1];
  Fragment gate_part[2][4];
  Fragment up_part[2][4];
  Sums matmul_gate_sums[4][1] = {};
  Sums matmul_up_sums[4][1] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const __bf16* const slice = ring + step % stages * slice_elements;
    load_fragment<8>(h_part[buffer][0], slice, 0, k * 32);
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_fragment<8>(gate_part[buffer][i], slice + gate_at + i * (16 * tile_k), 0, k * 32);
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_fragment<8>(up_part[buffer][i], slice + up_at + i * (16 * tile_k), 0, k * 32);
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int n = 0; n < 4; ++n) {
      multiply_add(matmul_gate_sums[n][0], gate_part[buffer][n], h_part[buffer][0]);
      multiply_add(matmul_up_sums[n][0], up_part[buffer][n], h_part[buffer][0]);
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
  float* const matmul_gate_shared = reinterpret_cast<float*>(shared);
  float* const matmul_up_shared = reinterpret_cast<float*>(shared) + tile_rows * sums_stride;
  #pragma unroll
  for (int n = 0; n < 4; ++n) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int sum_row = lane % 16;
      const int sum_col = n * 16 + lane / 16 * 4 + i;
      matmul_gate_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = matmul_gate_sums[n][0][i];
      matmul_up_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = matmul_up_sums[n][0][i];
    }
  }
  __syncthreads();

  const int m = static_cast<int>(threadIdx.x / (tile_cols / 8));
  const int n = static_cast<int>(threadIdx.x % (tile_cols / 8)) * 8;
  const long long row = row0 + m;
  const int col = col0 + n;
  if (m < tile_rows && row < rows) {
    const Vec<float, 8> matmul_gate_total = gathered<8>(matmul_gate_shared + m * sums_stride + n);
    const Vec<float, 8> matmul_up_total = gathered<8>(matmul_up_shared + m * sums_stride + n);
    Vec<__bf16, 8> activated_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float matmul_gate = matmul_gate_total.at[j];
      const float matmul_up = matmul_up_total.at[j];
      const float silu = matmul_gate * reciprocal(1.0f + exponential(-matmul_gate));
      const float mul = silu * matmul_up;
      activated_vec.at[j] = static_cast<__bf16>(mul);
    }
    store<8>(activated_ptr + row * activated_stride + col, activated_vec);
  }
}
