// logits_argmax_logits  bf16[M, K], bf16[V, K] -> f32[M, V]  at M=32 K=4096 V=128256
// logits of logits_argmax.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// tile     32 x 64 tiles, slice-K by 2 groups of warps; slices of 64 in a ring of 2 for each group
// traffic  1067.4 MB moved, 1067.4 MB ideal, 1067.4 MB with products apart, 1067.4 MB unfused in 1
//          launch
// floor    133.4 us at 8 TB/s; memory-bound at 31.50 flop/B
// needs    K=4096, V=128256; rows of all operands next to each other; x, head_value, logits: address
//          and strides in multiples of 16 B

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

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 32, tile_cols = 64, tile_k = 64, stages = 2;
constexpr int split_k = 2, steps = 32;  // parts of K, and slices of each
constexpr int threads = 128;
constexpr int tiles_across = 2004;
// elements from the start of a slice to the right factor, and to its end
constexpr int head_value_at = tile_rows * tile_k;
constexpr int slice_elements = head_value_at + tile_cols * tile_k;
// floats from a row of sums to the next: what a warp writes at once lies in different banks
constexpr int sums_stride = tile_cols + 4;
constexpr int group_floats = 1 * tile_rows * sums_stride;  // of a slice-K group's sums

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

// N neighbouring sums in shared memory, added up over the 2 slice-K groups, always in this order
template <int N>
__device__ __forceinline__ Vec<float, N> gathered(const float* from) {
  Vec<float, N> total = {};
  #pragma unroll
  for (int group = 0; group < 2; ++group) {
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

extern "C" __global__ void __launch_bounds__(128)
logits_argmax_logits(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ head_value_ptr,
    float* __restrict__ logits_ptr,
    long long rows,
    long long x_stride,
    long long head_value_ld,
    long long logits_stride)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int k_group = threadIdx.x / 64;  // slice-K: of 2 groups of warps
  const unsigned tile = blockIdx.x;
  const long long row0 = static_cast<long long>(tile / tiles_across) * tile_rows;
  const int across = tile % tiles_across;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  const int col0 = across * tile_cols;

  // the ring of 2 slices, and what the thread brings of each
  __bf16* const ring = reinterpret_cast<__bf16*>(shared) + k_group * (stages * slice_elements);
  const int x_m = lane / 8, x_k = lane % 8 * 8;
  const __bf16* x_from = x_ptr + (row0 + x_m) * x_stride + k_group * tile_k + x_k;
  const int head_value_n = lane / 8, head_value_k = lane % 8 * 8;
  const __bf16* head_value_from = head_value_ptr + (col0 + head_value_n) * head_value_ld + k_group * tile_k + head_value_k;
  Vec<__bf16, 8> x_held[4];
  Vec<__bf16, 8> head_value_held[8];
  const auto fetch_slice = [&]() {
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      x_held[v] = load_chunk<8>(x_from + v * 8 * x_stride, x_m + v * 8 < rows_here ? 8 : 0);
    }
    x_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) head_value_held[v] = load_chunk<8>(head_value_from + v * 8 * head_value_ld, 8);
    head_value_from += split_k * tile_k;
  };
  const auto prepare_slice = [&](int step) {
    __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 4; ++v) store<8>(slice + place<8>(x_m + v * 8, x_k), x_held[v]);
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      store<8>(slice + head_value_at + place<8>(head_value_n + v * 8, head_value_k), head_value_held[v]);
    }
  };

  // 32 slices of 64: fragments are loaded one step ahead of their use, across slices too
  Fragment x_part[2][2];
  Fragment head_value_part[2][4];
  Sums logits_sums[4][2] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int i = 0; i < 2; ++i) load_fragment<8>(x_part[buffer][i], slice + i * (16 * tile_k), 0, k * 32);
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_fragment<8>(head_value_part[buffer][i], slice + head_value_at + i * (16 * tile_k), 0, k * 32);
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int n = 0; n < 4; ++n) {
      #pragma unroll
      for (int m = 0; m < 2; ++m) multiply_add(logits_sums[n][m], head_value_part[buffer][n], x_part[buffer][m]);
    }
  };

  fetch_slice();
  prepare_slice(0);
  fetch_slice();
  __syncthreads();
  load_parts(0, 0, 0);
  const auto take_slice = [&](int step, bool last) {
    #pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (k == 1 && !last) {
        prepare_slice(step + 1);
        if (step + 2 < steps) fetch_slice();
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
  float* const logits_shared = reinterpret_cast<float*>(shared);
  #pragma unroll
  for (int n = 0; n < 4; ++n) {
    #pragma unroll
    for (int m = 0; m < 2; ++m) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int sum_row = m * 16 + lane % 16;
        const int sum_col = n * 16 + lane / 16 * 4 + i;
        logits_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = logits_sums[n][m][i];
      }
    }
  }
  __syncthreads();

  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int m = static_cast<int>((v * threads + threadIdx.x) / (tile_cols / 8));
    const int n = static_cast<int>((v * threads + threadIdx.x) % (tile_cols / 8)) * 8;
    const long long row = row0 + m;
    const int col = col0 + n;
    if (row < rows) {
      const Vec<float, 8> logits_total = gathered<8>(logits_shared + m * sums_stride + n);
      Vec<float, 8> logits_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float logits = logits_total.at[j];
        logits_vec.at[j] = logits;
      }
      store<8>(logits_ptr + row * logits_stride + col, logits_vec);
    }
  }
}
