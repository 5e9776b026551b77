// w4a16_gemm_out  bf16[M, K], bf16[N, K] -> bf16[M, N]  at M=8 K=8192 N=8192
// out of w4a16_gemm.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// views    mul_part is mul as [N, K]
// tile     16 x 16 tiles, slice-K by 4 groups of warps; slices of 128 in a ring of 2 for each group
// traffic  134.5 MB moved, 134.5 MB ideal, 134.5 MB with products apart, 134.5 MB unfused in 1 launch
// floor    16.8 us at 8 TB/s; memory-bound at 7.98 flop/B
// rounding out to bf16 when stored; f32 between
// needs    K=8192, N=8192; rows of all operands next to each other; x, mul_part, out: address and
//          strides in multiples of 16 B

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
constexpr int tile_rows = 16, tile_cols = 16, tile_k = 128, stages = 2;
constexpr int split_k = 4, steps = 16;  // parts of K, and slices of each
constexpr int tiles_across = 512;
// elements from the start of a slice to the right factor, and to its end
constexpr int mul_part_at = tile_rows * tile_k;
constexpr int slice_elements = mul_part_at + tile_cols * tile_k;
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
w4a16_gemm_out(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ mul_part_ptr,
    __bf16* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long mul_part_ld,
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
  const int x_m = lane / 16, x_k = lane % 16 * 8;
  const __bf16* x_from = x_ptr + (row0 + x_m) * x_stride + k_group * tile_k + x_k;
  const int mul_part_n = lane / 16, mul_part_k = lane % 16 * 8;
  const __bf16* mul_part_from = mul_part_ptr + (col0 + mul_part_n) * mul_part_ld + k_group * tile_k + mul_part_k;
  Vec<__bf16, 8> x_held[4];
  Vec<__bf16, 8> mul_part_held[4];
  const auto fetch_slice = [&]() {
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      x_held[v] = load_chunk<8>(x_from + v * 4 * x_stride, x_m + v * 4 < rows_here ? 8 : 0);
    }
    x_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) mul_part_held[v] = load_chunk<8>(mul_part_from + v * 4 * mul_part_ld, 8);
    mul_part_from += split_k * tile_k;
  };
  const auto prepare_slice = [&](int step) {
    __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 4; ++v) store<8>(slice + place<16>(x_m + v * 4, x_k), x_held[v]);
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      store<8>(slice + mul_part_at + place<16>(mul_part_n + v * 4, mul_part_k), mul_part_held[v]);
    }
  };

  // 16 slices of 128: fragments are loaded one step ahead of their use, across slices too
  Fragment x_part[2][1];
  Fragment mul_part_part[2][1];
  Sums matmul_sums[1][1] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const __bf16* const slice = ring + step % stages * slice_elements;
    load_fragment<16>(x_part[buffer][0], slice, 0, k * 32);
    load_fragment<16>(mul_part_part[buffer][0], slice + mul_part_at, 0, k * 32);
  };
  const auto multiply = [&](int buffer) {
    multiply_add(matmul_sums[0][0], mul_part_part[buffer][0], x_part[buffer][0]);
  };

  fetch_slice();
  prepare_slice(0);
  fetch_slice();
  __syncthreads();
  load_parts(0, 0, 0);
  const auto take_slice = [&](int step, bool last) {
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k == 3 && !last) {
        prepare_slice(step + 1);
        if (step + 2 < steps) fetch_slice();
      }
      if (k < 3) {
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
  float* const matmul_shared = reinterpret_cast<float*>(shared);
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int sum_row = lane % 16;
    const int sum_col = lane / 16 * 4 + i;
    matmul_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = matmul_sums[0][0][i];
  }
  __syncthreads();

  const int m = static_cast<int>(threadIdx.x / (tile_cols / 8));
  const int n = static_cast<int>(threadIdx.x % (tile_cols / 8)) * 8;
  const long long row = row0 + m;
  const int col = col0 + n;
  if (m < tile_rows && row < rows) {
    const Vec<float, 8> matmul_total = gathered<8>(matmul_shared + m * sums_stride + n);
    Vec<__bf16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float matmul = matmul_total.at[j];
      out_vec.at[j] = static_cast<__bf16>(matmul);
    }
    store<8>(out_ptr + row * out_stride + col, out_vec);
  }
}
