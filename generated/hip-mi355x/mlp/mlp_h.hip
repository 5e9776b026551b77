// mlp_h  bf16[M, K], bf16[H, K], bf16[H, K] -> bf16[M, H]  at M=4096 K=4096 H=14336
// h of mlp.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// tile     128 x 64 tiles of 4 warps, slices of 32 in a ring of 2
// traffic  1090.5 MB moved, 385.9 MB ideal, 889.2 MB with products apart, 1124.1 MB unfused in 4
//          launches
// floor    382.3 us at 2517 TFLOP/s for products; compute-bound at 882.22 flop/B
// rounding h to bf16 when stored; f32 between
// needs    K=4096, H=14336; rows of all operands next to each other; x, gate, up, h: address and
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
constexpr int tile_rows = 128, tile_cols = 64, tile_k = 32, stages = 2;
constexpr int steps = 128;
constexpr int warp_rows = 64, warp_cols = 32;  // of a tile
constexpr int tiles_across = 224;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
constexpr int dies = 8;  // each with an L2 cache of its own
// elements from the start of a slice to the right factors, and to its end
constexpr int gate_at = tile_rows * tile_k;
constexpr int up_at = gate_at + tile_cols * tile_k;
constexpr int slice_elements = up_at + tile_cols * tile_k;
constexpr int at_once = 256 * 8;  // elements that the threads copy at once
constexpr int band_rows = 32;
// floats from a row of sums to the next: what a warp writes at once lies in different banks
constexpr int sums_stride = tile_cols + 4;

// where element (row, k) lies in a tile with rows of Chunks x 8 elements: XOR-swizzled by the row's number, so that
// what lanes read of 64 banks at once lies in different ones, and what 8 of them write
template <int Chunks>
__device__ __forceinline__ int place(int row, int k) {
  row ^= row / 8 % 2;
  const int xor_mask = row / 2 % 4 ^ row / 16 % 2;
  return (row * Chunks + (k / 8 ^ xor_mask)) * 8 + k % 8;
}

// the tile of a block: blocks go to the dies in turn, and those of one die have neighbouring tiles
__device__ __forceinline__ unsigned by_die(unsigned block, unsigned blocks) {
  const unsigned die = block % dies, longer = blocks % dies;
  return die * (blocks / dies) + (die < longer ? die : longer) + block / dies;
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

typedef __bf16 Half __attribute__((ext_vector_type(8)));
typedef float Sums __attribute__((ext_vector_type(16)));

// a lane's 8 elements of what one fragment multiplies: neighbours in k, the same for both operands
struct alignas(16) Fragment {
  Half part[1];
};

// row `mn` + lane % 32 of a tile, from k on
template <int Chunks, typename T>
__device__ __forceinline__ void load_fragment(Fragment& to, const T* tile, int mn, int k) {
  const int lane = threadIdx.x % 64;
  to = *reinterpret_cast<const Fragment*>(tile + place<Chunks>(mn + lane % 32, k + lane / 32 * 8));
}

// sums += right^T left^T, 32 columns by 32 rows
__device__ __forceinline__ void multiply_add(Sums& sums, const Fragment& right, const Fragment& left) {
  sums = __builtin_amdgcn_mfma_f32_32x32x16_bf16(right.part[0], left.part[0], sums, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(256)
mlp_h(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ gate_ptr,
    const __bf16* __restrict__ up_ptr,
    __bf16* __restrict__ h_ptr,
    long long rows,
    long long x_stride,
    long long gate_ld,
    long long up_ld,
    long long h_stride)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int warp = threadIdx.x / 64;
  const int warp_row = warp / 2 * warp_rows;  // the warp's first of the tile
  const int warp_col = warp % 2 * warp_cols;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const unsigned tile = by_die(blockIdx.x, gridDim.x);
  // 8 rows of tiles at a time, column by column: blocks that run together share factors in the L2 cache
  const unsigned first = tile / group_tiles * group;
  const unsigned height = tiles_down - first < group ? tiles_down - first : group;
  const long long row0 = static_cast<long long>(first + tile % group_tiles % height) * tile_rows;
  const int across = tile % group_tiles / height;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  const int col0 = across * tile_cols;

  // the ring of 2 slices, and what the thread brings of each
  __bf16* const ring = reinterpret_cast<__bf16*>(shared);
  const int x_m = threadIdx.x / 4, x_k = threadIdx.x % 4 * 8;
  const __bf16* x_from = x_ptr + (row0 + x_m) * x_stride + x_k;
  const int x_to = place<4>(x_m, x_k);
  const int gate_n = threadIdx.x / 4, gate_k = threadIdx.x % 4 * 8;
  const __bf16* gate_from = gate_ptr + (col0 + gate_n) * gate_ld + gate_k;
  const int gate_to = gate_at + place<4>(gate_n, gate_k);
  const int up_n = threadIdx.x / 4, up_k = threadIdx.x % 4 * 8;
  const __bf16* up_from = up_ptr + (col0 + up_n) * up_ld + up_k;
  const int up_to = up_at + place<4>(up_n, up_k);
  Vec<__bf16, 8> x_held[2];
  Vec<__bf16, 8> gate_held[1];
  Vec<__bf16, 8> up_held[1];
  const auto fetch_slice = [&]() {
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      x_held[v] = load_chunk<8>(x_from + v * 64 * x_stride, x_m + v * 64 < rows_here ? 8 : 0);
    }
    x_from += tile_k;
    gate_held[0] = load_chunk<8>(gate_from, 8);
    gate_from += tile_k;
    up_held[0] = load_chunk<8>(up_from, 8);
    up_from += tile_k;
  };
  const auto prepare_slice = [&](int step) {
    __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 2; ++v) store<8>(slice + x_to + v * at_once, x_held[v]);
    store<8>(slice + gate_to, gate_held[0]);
    store<8>(slice + up_to, up_held[0]);
  };

  // 128 slices of 32: fragments are loaded one step ahead of their use, across slices too
  Fragment x_part[2][2];
  Fragment gate_part[2][1];
  Fragment up_part[2][1];
  Sums x_times_gate_sums[1][2] = {};
  Sums x_times_up_sums[1][2] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int i = 0; i < 2; ++i) load_fragment<4>(x_part[buffer][i], slice + i * (32 * tile_k), warp_row, k * 16);
    load_fragment<4>(gate_part[buffer][0], slice + gate_at, warp_col, k * 16);
    load_fragment<4>(up_part[buffer][0], slice + up_at, warp_col, k * 16);
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 2; ++m) {
      multiply_add(x_times_gate_sums[0][m], gate_part[buffer][0], x_part[buffer][m]);
      multiply_add(x_times_up_sums[0][m], up_part[buffer][0], x_part[buffer][m]);
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
  float* const x_times_gate_shared = reinterpret_cast<float*>(shared);
  float* const x_times_up_shared = reinterpret_cast<float*>(shared) + band_rows * sums_stride;
  for (int band = 0; band < 4; ++band) {  // of 32 rows: no more fit into the place of the slices
    if (band > 0) __syncthreads();
    #pragma unroll
    for (int m = 0; m < 2; ++m) {
      if ((warp_row + m * 32) / band_rows == band) {
        #pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int sum_row = (warp_row + m * 32) % band_rows + lane % 32;
          const int sum_col = warp_col + i / 4 * 8 + lane / 32 * 4 + i % 4;
          x_times_gate_shared[sum_row * sums_stride + sum_col] = x_times_gate_sums[0][m][i];
          x_times_up_shared[sum_row * sums_stride + sum_col] = x_times_up_sums[0][m][i];
        }
      }
    }
    __syncthreads();

    const int m = static_cast<int>(threadIdx.x / (tile_cols / 8));
    const int n = static_cast<int>(threadIdx.x % (tile_cols / 8)) * 8;
    const long long row = row0 + band * band_rows + m;
    const int col = col0 + n;
    if (row < rows) {
      const Vec<float, 8> x_times_gate_total = load<8>(x_times_gate_shared + m * sums_stride + n);
      const Vec<float, 8> x_times_up_total = load<8>(x_times_up_shared + m * sums_stride + n);
      Vec<__bf16, 8> h_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x_times_gate = x_times_gate_total.at[j];
        const float x_times_up = x_times_up_total.at[j];
        const float silu = x_times_gate * reciprocal(1.0f + exponential(-x_times_gate));
        const float h = silu * x_times_up;
        h_vec.at[j] = static_cast<__bf16>(h);
      }
      store<8>(h_ptr + row * h_stride + col, h_vec);
    }
  }
}
