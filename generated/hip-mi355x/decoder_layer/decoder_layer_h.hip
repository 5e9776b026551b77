// decoder_layer_h  bf16[B, D], bf16[D, E_times_G_times_H], bf16[B, E_times_G_times_H] -> bf16[B, D]  at B=8 D=4096 E_times_G_times_H=4096
// h of decoder_layer.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// views    mixed_part is mixed as [B, E * G * H]
// tile     16 x 16 tiles, slice-K by 8 groups of warps; slices of 128 in a ring of 2 for each group
// traffic  33.8 MB moved, 33.8 MB ideal, 33.9 MB with products apart, 34.0 MB unfused in 3 launches
// floor    4.2 us at 8 TB/s; memory-bound at 7.95 flop/B
// rounding h to bf16 when stored; f32 between
// needs    D=4096, E_times_G_times_H=4096; rows of all operands next to each other; mixed_part, wo, x,
//          h: address and strides in multiples of 16 B

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
constexpr int split_k = 8, steps = 4;  // parts of K, and slices of each
constexpr int tiles_across = 256;
// elements from the start of a slice to the right factor, and to its end
constexpr int wo_at = tile_rows * tile_k;
constexpr int slice_elements = wo_at + tile_cols * tile_k;
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

// N neighbouring sums in shared memory, added up over the 8 slice-K groups, always in this order
template <int N>
__device__ __forceinline__ Vec<float, N> gathered(const float* from) {
  Vec<float, N> total = {};
  #pragma unroll
  for (int group = 0; group < 8; ++group) {
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

extern "C" __global__ void __launch_bounds__(512)
decoder_layer_h(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ wo_ptr,
    const __bf16* __restrict__ mixed_part_ptr,
    __bf16* __restrict__ h_ptr,
    long long rows,
    long long mixed_part_stride,
    long long wo_ld,
    long long x_stride,
    long long h_stride)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int k_group = threadIdx.x / 64;  // slice-K: of 8 groups of warps
  const unsigned tile = blockIdx.x;
  const long long row0 = static_cast<long long>(tile / tiles_across) * tile_rows;
  const int across = tile % tiles_across;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  const int col0 = across * tile_cols;

  // the ring of 2 slices, and what the thread brings of each
  __bf16* const ring = reinterpret_cast<__bf16*>(shared) + k_group * (stages * slice_elements);
  const int mixed_part_m = lane / 16, mixed_part_k = lane % 16 * 8;
  const __bf16* mixed_part_from = mixed_part_ptr + (row0 + mixed_part_m) * mixed_part_stride + k_group * tile_k + mixed_part_k;
  const int wo_n = lane / 16, wo_k = lane % 16 * 8;
  const __bf16* wo_from = wo_ptr + (col0 + wo_n) * wo_ld + k_group * tile_k + wo_k;
  Vec<__bf16, 8> mixed_part_held[4];
  Vec<__bf16, 8> wo_held[4];
  const auto fetch_slice = [&]() {
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      mixed_part_held[v] = load_chunk<8>(mixed_part_from + v * 4 * mixed_part_stride, mixed_part_m + v * 4 < rows_here ? 8 : 0);
    }
    mixed_part_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) wo_held[v] = load_chunk<8>(wo_from + v * 4 * wo_ld, 8);
    wo_from += split_k * tile_k;
  };
  const auto prepare_slice = [&](int step) {
    __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      store<8>(slice + place<16>(mixed_part_m + v * 4, mixed_part_k), mixed_part_held[v]);
    }
    #pragma unroll
    for (int v = 0; v < 4; ++v) store<8>(slice + wo_at + place<16>(wo_n + v * 4, wo_k), wo_held[v]);
  };

  // 4 slices of 128: fragments are loaded one step ahead of their use, across slices too
  Fragment mixed_part_part[2][1];
  Fragment wo_part[2][1];
  Sums matmul_sums[1][1] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const __bf16* const slice = ring + step % stages * slice_elements;
    load_fragment<16>(mixed_part_part[buffer][0], slice, 0, k * 32);
    load_fragment<16>(wo_part[buffer][0], slice + wo_at, 0, k * 32);
  };
  const auto multiply = [&](int buffer) {
    multiply_add(matmul_sums[0][0], wo_part[buffer][0], mixed_part_part[buffer][0]);
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
    const Vec<__bf16, 8> x_vec = load<8>(x_ptr + row * x_stride + col);
    const Vec<float, 8> matmul_total = gathered<8>(matmul_shared + m * sums_stride + n);
    Vec<__bf16, 8> h_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float matmul = matmul_total.at[j];
      const float x = static_cast<float>(x_vec.at[j]);
      const float add = x + matmul;
      h_vec.at[j] = static_cast<__bf16>(add);
    }
    store<8>(h_ptr + row * h_stride + col, h_vec);
  }
}
