// grouped_weight_grad  bf16[T, K], bf16[T, N], i32[E] -> bf16[E, N, K]  at T=16384 K=4096 N=2048 E=16
// dy[rows of e].T @ x[rows of e] for each expert e; 0 of one without tokens.
//
//     def grouped_weight_grad(x, dy, ends):
//         return F.grouped_matmul(dy.mT, x, ends)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// tile     128 x 128 tiles of 4 warps, slices of 32 in a ring of 2; each summed over one of 16 groups
// traffic  469.8 MB moved, 469.8 MB ideal, 469.8 MB with products apart, 469.8 MB unfused in 1 launch
// floor    109.2 us at 2517 TFLOP/s for products; compute-bound at 585.14 flop/B
// rounding out to bf16 when stored; f32 between
// needs    K=4096, E=16; rows of all operands next to each other; dy, x, out: address and strides in
//          multiples of 16 B; ends [E] shared by every row

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
constexpr int tile_rows = 128, tile_cols = 128, tile_k = 32, stages = 2;
constexpr int warp_rows = 64, warp_cols = 64;  // of a tile
constexpr int threads = 256;
constexpr int tiles_across = 32;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
constexpr int dies = 8;  // each with an L2 cache of its own
// elements from the start of a slice to the right factor, and to its end
constexpr int x_at = tile_rows * tile_k;
constexpr int slice_elements = x_at + tile_cols * tile_k;
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

// N elements, Width with each load; those from `count` on are zeros
template <int Width, int N, typename T>
__device__ __forceinline__ Vec<T, N> load_beside(const T* from, int count) {
  Vec<T, N> v;
  if (Width > 1 && count >= N) {
    #pragma unroll
    for (int j = 0; j < N; j += Width) {
      const Vec<T, Width> part = load<Width>(from + j);
      #pragma unroll
      for (int i = 0; i < Width; ++i) v.at[j + i] = part.at[i];
    }
  } else {
    #pragma unroll
    for (int j = 0; j < N; ++j) v.at[j] = j < count ? from[j] : T{};
  }
  return v;
}

struct InnerSegment {
  int begin, end;
};

// the group of that number. It ends at ends[number], but not before the one before it ends, nor behind all that there is:
// no end is read as a place that is not there
__device__ __forceinline__ InnerSegment inner_segment_of(const int* ends, long long total, int number) {
  const int most = total < 0x7fffffff ? static_cast<int>(total) : 0x7fffffff;
  InnerSegment found{0, 0};
  #pragma unroll 8
  for (int s = 0; s <= number; ++s) {
    found.begin = found.end;
    found.end = ends[s] < found.end ? found.end : ends[s] < most ? ends[s] : most;
  }
  return found;
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
grouped_weight_grad(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ dy_ptr,
    const int* __restrict__ ends_ptr,
    __bf16* __restrict__ out_ptr,
    long long E_size,
    long long N_size,
    long long total_k,
    long long dy_ld,
    long long x_ld,
    long long out_stride_E,
    long long out_stride_N)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int warp = threadIdx.x / 64;
  const int warp_row = warp / 2 * warp_rows;  // the warp's first of the tile
  const int warp_col = warp % 2 * warp_cols;
  const long long rows = N_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const unsigned tiles = tiles_down * tiles_across;  // of one product
  const unsigned block = by_die(blockIdx.x, gridDim.x);
  const long long E_at = (block) / tiles;
  const unsigned tile = (block) % tiles;
  // 8 rows of tiles at a time, column by column: blocks that run together share factors in the L2 cache
  const unsigned first = tile / group_tiles * group;
  const unsigned height = tiles_down - first < group ? tiles_down - first : group;
  const long long row0 = static_cast<long long>(first + tile % group_tiles % height) * tile_rows;
  const int across = tile % group_tiles / height;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  const int col0 = across * tile_cols;
  const int number = static_cast<int>(E_at);
  const InnerSegment summed = inner_segment_of(ends_ptr, total_k, number);
  const int k_begin = summed.begin, full_k = summed.end - summed.begin;
  const int steps = (full_k + tile_k - 1) / (tile_k);

  // the ring of 2 slices, and what the thread brings of each
  __bf16* const ring = reinterpret_cast<__bf16*>(shared);
  const int dy_k = threadIdx.x / 64 * 8, dy_m = threadIdx.x % 64 * 2;
  const __bf16* dy_from = dy_ptr + k_begin * dy_ld + (dy_k) * dy_ld + row0 + dy_m;
  const int x_k = threadIdx.x / 64 * 8, x_n = threadIdx.x % 64 * 2;
  const __bf16* x_from = x_ptr + k_begin * x_ld + (x_k) * x_ld + col0 + x_n;
  Vec<__bf16, 2> dy_held[8];
  Vec<__bf16, 2> x_held[8];
  const auto fetch_slice = [&](int step) {
    const int k_at = step * tile_k;
    if (rows_here == tile_rows && k_at + tile_k <= full_k) {  // no vector is tested for an end
      #pragma unroll
      for (int v = 0; v < 8; ++v) dy_held[v] = load_beside<2, 2>(dy_from + v * dy_ld, 2);
      #pragma unroll
      for (int v = 0; v < 8; ++v) x_held[v] = load_beside<2, 2>(x_from + v * x_ld, 2);
    } else {
      #pragma unroll
      for (int v = 0; v < 8; ++v) {
        dy_held[v] = load_beside<2, 2>(dy_from + v * dy_ld, k_at + dy_k + v < full_k ? rows_here - dy_m : 0);
      }
      #pragma unroll
      for (int v = 0; v < 8; ++v) x_held[v] = load_beside<2, 2>(x_from + v * x_ld, k_at + x_k + v < full_k ? 2 : 0);
    }
    dy_from += tile_k * dy_ld;
    x_from += tile_k * x_ld;
  };
  const auto prepare_slice = [&](int step) {
    __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      Vec<__bf16, 8> dy_vec;  // of a column
      #pragma unroll
      for (int i = 0; i < 8; ++i) dy_vec.at[i] = dy_held[i].at[v];
      store<8>(slice + place<4>(dy_m + v, dy_k), dy_vec);
    }
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      Vec<__bf16, 8> x_vec;  // of a column
      #pragma unroll
      for (int i = 0; i < 8; ++i) x_vec.at[i] = x_held[i].at[v];
      store<8>(slice + x_at + place<4>(x_n + v, x_k), x_vec);
    }
  };

  // as many slices of 32 as the group has: fragments are loaded one step ahead of their use, across slices too
  Fragment dy_part[2][2];
  Fragment x_part[2][2];
  Sums matmul_over_groups_sums[2][2] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int i = 0; i < 2; ++i) load_fragment<4>(dy_part[buffer][i], slice + i * (32 * tile_k), warp_row, k * 16);
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_fragment<4>(x_part[buffer][i], slice + x_at + i * (32 * tile_k), warp_col, k * 16);
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        multiply_add(matmul_over_groups_sums[n][m], x_part[buffer][n], dy_part[buffer][m]);
      }
    }
  };

  if (steps > 0) {  // else all sums are 0
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
  }

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  __syncthreads();
  float* const matmul_over_groups_shared = reinterpret_cast<float*>(shared);
  for (int band = 0; band < 4; ++band) {  // of 32 rows: no more fit into the place of the slices
    if (band > 0) __syncthreads();
    #pragma unroll
    for (int m = 0; m < 2; ++m) {
      if ((warp_row + m * 32) / band_rows == band) {
        #pragma unroll
        for (int n = 0; n < 2; ++n) {
          #pragma unroll
          for (int i = 0; i < 16; ++i) {
            const int sum_row = (warp_row + m * 32) % band_rows + lane % 32;
            const int sum_col = warp_col + n * 32 + i / 4 * 8 + lane / 32 * 4 + i % 4;
            matmul_over_groups_shared[sum_row * sums_stride + sum_col] = matmul_over_groups_sums[n][m][i];
          }
        }
      }
    }
    __syncthreads();

    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int m = static_cast<int>((v * threads + threadIdx.x) / (tile_cols / 8));
      const int n = static_cast<int>((v * threads + threadIdx.x) % (tile_cols / 8)) * 8;
      const long long row = row0 + band * band_rows + m;
      const int col = col0 + n;
      if (row < rows) {
        const Vec<float, 8> matmul_over_groups_total = load<8>(matmul_over_groups_shared + m * sums_stride + n);
        Vec<__bf16, 8> out_vec;
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float matmul_over_groups = matmul_over_groups_total.at[j];
          out_vec.at[j] = static_cast<__bf16>(matmul_over_groups);
        }
        store<8>(out_ptr + E_at * out_stride_E + row * out_stride_N + col, out_vec);
      }
    }
  }
}
