// grouped_swiglu  bf16[T, K], bf16[E, N, K], bf16[E, N, K], i32[E] -> bf16[T, N]  at T=16384 K=4096 E=16 N=2048
// silu(x @ w_gate[e].T) * (x @ w_up[e].T), where e is the expert of the token.
//
//     def grouped_swiglu(x, w_gate, w_up, ends):
//         gate = F.grouped_matmul(x, w_gate.mT, ends)
//         up = F.grouped_matmul(x, w_up.mT, ends)
//         return F.silu(gate) * up
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// tile     128 x 64 tiles of 4 warps, slices of 32 in a ring of 2; each of rows of one of 16 groups
// traffic  738.2 MB moved, 738.2 MB ideal, 1140.9 MB with products apart, 1275.1 MB unfused in 4
//          launches
// floor    218.5 us at 2517 TFLOP/s for products; compute-bound at 744.73 flop/B
// rounding out to bf16 when stored; f32 between
// needs    K=4096, E=16, N=2048; rows of all operands next to each other; x, w_gate, w_up, out: address
//          and strides in multiples of 16 B; ends [E] shared by every row

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
constexpr int tiles_across = 32;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
constexpr int segments = 16;  // groups of rows
// elements from the start of a slice to the right factors, and to its end
constexpr int w_gate_at = tile_rows * tile_k;
constexpr int w_up_at = w_gate_at + tile_cols * tile_k;
constexpr int slice_elements = w_up_at + tile_cols * tile_k;
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

struct Segment {
  int number;  // of the group
  long long row0, end;  // the tile's first row, and the first one behind the group
  bool of_group;  // else its rows are of none
};

// what a lane knows of its own group
struct Own {
  int begin, end;  // rows: where the groups before end, and where its own does
  unsigned before, behind;  // tiles: of the groups before, and of its own too
};

// v of the lane so many before this one
__device__ __forceinline__ int from_before(int v, int step) {
  return __shfl_up(v, step);
}

// where a group's rows end: not before the one above it ends, nor behind all rows, so that no end is read as a place that
// is not there
__device__ __forceinline__ int end_of(const int* ends, int s, int begin, int most) {
  const int end = s < segments ? ends[s] : 0;
  return end < begin ? begin : end < most ? end : most;
}

// all lanes of a warp ask for theirs
__device__ __forceinline__ Own own_segments(const int* ends, long long rows) {
  const int most = rows < 0x7fffffff ? static_cast<int>(rows) : 0x7fffffff;
  const int lane = threadIdx.x % 64;
  Own own{0, 0, 0, 0};
  own.end = end_of(ends, lane, own.end, most);
  #pragma unroll
  for (int step = 1; step < 64; step *= 2) {
    const int other = from_before(own.end, step);
    if (lane >= step && other > own.end) own.end = other;
  }
  const int others_end = from_before(own.end, 1);
  own.begin = lane > 0 ? others_end : 0;
  int begin = own.begin;
  const int end = end_of(ends, lane, begin, most);
  own.behind += (static_cast<unsigned>(end - begin) + tile_rows - 1) / tile_rows;
  const unsigned own_tiles = own.behind;
  #pragma unroll
  for (int step = 1; step < 64; step *= 2) {
    const unsigned other = from_before(own.behind, step);
    if (lane >= step) own.behind += other;
  }
  own.before = own.behind - own_tiles;
  return own;
}

// the group of tile `number`, counted from the top, that all lanes of a warp ask for
__device__ __forceinline__ Segment segment_of(const int* ends, long long rows, unsigned number) {
  const int most = rows < 0x7fffffff ? static_cast<int>(rows) : 0x7fffffff;
  const int lane = threadIdx.x % 64;
  const Own own = own_segments(ends, rows);
  int group = 0, row0 = 0, end = 0;  // of the tile, where it is the lane's
  int begin = own.begin;
  unsigned before = own.before;
  const int next = end_of(ends, lane, begin, most);
  const unsigned behind = before + (static_cast<unsigned>(next - begin) + tile_rows - 1) / tile_rows;
  if (before <= number && number < behind) {
    group = lane;
    row0 = begin + static_cast<int>(number - before) * tile_rows;
    end = next;
  }
  const bool says = own.behind <= number;
  const auto lanes = __ballot(says);  // all whose groups lie above the tile
  const int owner = __popcll(lanes);
  const bool found = owner < 64;
  if (!found && lane == 63) {  // it knows where all groups end
    group = segments - 1;
    row0 = own.end;
  }
  const int from = found ? owner : 63;
  const unsigned over = found ? 0 : number - __shfl(own.behind, 63, 64);
  end = __shfl(end, from, 64);
  const long long first = __shfl(row0, from, 64) + static_cast<long long>(over) * tile_rows;
  return Segment{__shfl(group, from, 64), first, found ? end : rows, found};
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
grouped_swiglu(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ w_gate_ptr,
    const __bf16* __restrict__ w_up_ptr,
    const int* __restrict__ ends_ptr,
    __bf16* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long w_gate_ld,
    long long w_gate_group,
    long long w_up_ld,
    long long w_up_group,
    long long out_stride)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int warp = threadIdx.x / 64;
  const int warp_row = warp / 2 * warp_rows;  // the warp's first of the tile
  const int warp_col = warp % 2 * warp_cols;
  const long long begun = rows < segments + 1 ? rows : segments + 1;  // each by a tile of its own, at most
  const unsigned tiles_down = static_cast<unsigned>(begun + (rows - begun) / tile_rows);
  const unsigned tile = blockIdx.x;
  // 8 rows of tiles at a time, column by column: blocks that run together share factors in the L2 cache
  const unsigned first = tile / group_tiles * group;
  const unsigned height = tiles_down - first < group ? tiles_down - first : group;
  const Segment here = segment_of(ends_ptr, rows, first + tile % group_tiles % height);
  const long long row0 = here.row0, segment_end = here.end;
  const int segment = here.number;
  const bool of_group = here.of_group;
  const int across = tile % group_tiles / height;
  if (row0 >= rows) return;  // the groups need fewer tiles
  const int rows_here = segment_end - row0 < tile_rows ? static_cast<int>(segment_end - row0) : tile_rows;
  const int col0 = across * tile_cols;

  // the ring of 2 slices, and what the thread brings of each
  __bf16* const ring = reinterpret_cast<__bf16*>(shared);
  const int x_m = threadIdx.x / 4, x_k = threadIdx.x % 4 * 8;
  const __bf16* x_from = x_ptr + (row0 + x_m) * x_stride + x_k;
  const int x_to = place<4>(x_m, x_k);
  const int w_gate_n = threadIdx.x / 4, w_gate_k = threadIdx.x % 4 * 8;
  const __bf16* w_gate_from = w_gate_ptr + segment * w_gate_group + (col0 + w_gate_n) * w_gate_ld + w_gate_k;
  const int w_gate_to = w_gate_at + place<4>(w_gate_n, w_gate_k);
  const int w_up_n = threadIdx.x / 4, w_up_k = threadIdx.x % 4 * 8;
  const __bf16* w_up_from = w_up_ptr + segment * w_up_group + (col0 + w_up_n) * w_up_ld + w_up_k;
  const int w_up_to = w_up_at + place<4>(w_up_n, w_up_k);
  Vec<__bf16, 8> x_held[2];
  Vec<__bf16, 8> w_gate_held[1];
  Vec<__bf16, 8> w_up_held[1];
  const auto fetch_slice = [&]() {
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      x_held[v] = load_chunk<8>(x_from + v * 64 * x_stride, x_m + v * 64 < rows_here ? 8 : 0);
    }
    x_from += tile_k;
    w_gate_held[0] = load_chunk<8>(w_gate_from, 8);
    w_gate_from += tile_k;
    w_up_held[0] = load_chunk<8>(w_up_from, 8);
    w_up_from += tile_k;
  };
  const auto prepare_slice = [&](int step) {
    __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 2; ++v) store<8>(slice + x_to + v * at_once, x_held[v]);
    store<8>(slice + w_gate_to, w_gate_held[0]);
    store<8>(slice + w_up_to, w_up_held[0]);
  };

  // 128 slices of 32: fragments are loaded one step ahead of their use, across slices too
  Fragment x_part[2][2];
  Fragment w_gate_part[2][1];
  Fragment w_up_part[2][1];
  Sums gate_sums[1][2] = {};
  Sums up_sums[1][2] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int i = 0; i < 2; ++i) load_fragment<4>(x_part[buffer][i], slice + i * (32 * tile_k), warp_row, k * 16);
    load_fragment<4>(w_gate_part[buffer][0], slice + w_gate_at, warp_col, k * 16);
    load_fragment<4>(w_up_part[buffer][0], slice + w_up_at, warp_col, k * 16);
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 2; ++m) {
      multiply_add(gate_sums[0][m], w_gate_part[buffer][0], x_part[buffer][m]);
      multiply_add(up_sums[0][m], w_up_part[buffer][0], x_part[buffer][m]);
    }
  };

  if (of_group) {  // else all sums are 0
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
  }

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  __syncthreads();
  float* const gate_shared = reinterpret_cast<float*>(shared);
  float* const up_shared = reinterpret_cast<float*>(shared) + band_rows * sums_stride;
  for (int band = 0; band < 4; ++band) {  // of 32 rows: no more fit into the place of the slices
    if (band > 0) __syncthreads();
    #pragma unroll
    for (int m = 0; m < 2; ++m) {
      if ((warp_row + m * 32) / band_rows == band) {
        #pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int sum_row = (warp_row + m * 32) % band_rows + lane % 32;
          const int sum_col = warp_col + i / 4 * 8 + lane / 32 * 4 + i % 4;
          gate_shared[sum_row * sums_stride + sum_col] = gate_sums[0][m][i];
          up_shared[sum_row * sums_stride + sum_col] = up_sums[0][m][i];
        }
      }
    }
    __syncthreads();

    const int m = static_cast<int>(threadIdx.x / (tile_cols / 8));
    const int n = static_cast<int>(threadIdx.x % (tile_cols / 8)) * 8;
    const long long row = row0 + band * band_rows + m;
    const int col = col0 + n;
    if (band * band_rows + m < rows_here) {
      const Vec<float, 8> gate_total = load<8>(gate_shared + m * sums_stride + n);
      const Vec<float, 8> up_total = load<8>(up_shared + m * sums_stride + n);
      Vec<__bf16, 8> out_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float gate = of_group ? gate_total.at[j] : 0.0f;
        const float up = of_group ? up_total.at[j] : 0.0f;
        const float silu = gate * reciprocal(1.0f + exponential(-gate));
        const float mul = silu * up;
        out_vec.at[j] = static_cast<__bf16>(mul);
      }
      store<8>(out_ptr + row * out_stride + col, out_vec);
    }
  }
}
