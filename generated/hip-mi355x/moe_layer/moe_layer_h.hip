// moe_layer_h  bf16[T, D], bf16[E, H, D], bf16[E, H, D], i32[E], i32[T_times_4, 1] -> bf16[T_times_4, H]  at T=256 D=2048 E=64 H=1024
//   T_times_4=1024
// h of moe_layer.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// views    order_value_part is order_value as [4 * T, 1]
// looks up rows of x at floor_div, 0 where there is none
// tile     32 x 32 tiles, slice-K by 2 groups of warps; slices of 64 in a ring of 2 for each group;
//          each of rows of one of 64 groups
// traffic  540.0 MB moved, 540.0 MB ideal, 561.0 MB with products apart, 568.3 MB unfused in 6 launches
// floor    67.5 us at 8 TB/s; memory-bound at 15.91 flop/B
// rounding h to bf16 when stored; f32 between
// needs    D=2048, E=64, H=1024; rows of all operands next to each other; x, gate, up, h: address and
//          strides in multiples of 16 B; ends [E] shared by every row

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

// x / y downwards, 0 where y is 0, and modulo 2^32
__device__ __forceinline__ int floor_quotient(int x, int y) {
  if (y == 0) return 0;
  if (y == -1) return static_cast<int>(0u - x);
  const int q = x / y;
  return x % y != 0 && (x < 0) != (y < 0) ? q - 1 : q;
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 32, tile_cols = 32, tile_k = 64, stages = 2;
constexpr int split_k = 2, steps = 16;  // parts of K, and slices of each
constexpr int tiles_across = 32;
constexpr int segments = 64;  // groups of rows
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
moe_layer_h(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ gate_ptr,
    const __bf16* __restrict__ up_ptr,
    const int* __restrict__ ends_ptr,
    const int* __restrict__ order_value_part_ptr,
    __bf16* __restrict__ h_ptr,
    long long rows,
    long long x_count,
    long long x_stride,
    long long gate_ld,
    long long gate_group,
    long long order_value_part_stride,
    long long up_ld,
    long long up_group,
    long long h_stride)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64;
  const int k_group = threadIdx.x / 64;  // slice-K: of 2 groups of warps
  const unsigned tile = blockIdx.x;
  const Segment here = segment_of(ends_ptr, rows, tile / tiles_across);
  const long long row0 = here.row0, segment_end = here.end;
  const int segment = here.number;
  const bool of_group = here.of_group;
  const int across = tile % tiles_across;
  if (row0 >= rows) return;  // the groups need fewer tiles
  const int rows_here = segment_end - row0 < tile_rows ? static_cast<int>(segment_end - row0) : tile_rows;
  const int col0 = across * tile_cols;

  // the ring of 2 slices, and what the thread brings of each
  __bf16* const ring = reinterpret_cast<__bf16*>(shared) + k_group * (stages * slice_elements);
  const int x_m = lane / 8, x_k = lane % 8 * 8;
  const __bf16* x_from[4];
  bool x_found[4];  // else there is no such row, and its elements are 0
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    const long long x_row = row0 + x_m + v * 8;
    const bool inside = x_row < segment_end;
    const int order_value_part = inside ? *(order_value_part_ptr + x_row * order_value_part_stride) : 0;
    const int floor_div = floor_quotient(order_value_part, 4);
    x_found[v] = inside && floor_div >= 0 && floor_div < x_count;
    x_from[v] = x_ptr + (x_found[v] ? floor_div : 0) * x_stride + k_group * tile_k + x_k;
  }
  const int gate_n = lane / 8, gate_k = lane % 8 * 8;
  const __bf16* gate_from = gate_ptr + segment * gate_group + (col0 + gate_n) * gate_ld + k_group * tile_k + gate_k;
  const int up_n = lane / 8, up_k = lane % 8 * 8;
  const __bf16* up_from = up_ptr + segment * up_group + (col0 + up_n) * up_ld + k_group * tile_k + up_k;
  Vec<__bf16, 8> x_held[4];
  Vec<__bf16, 8> gate_held[4];
  Vec<__bf16, 8> up_held[4];
  const auto fetch_slice = [&]() {
    #pragma unroll
    for (int v = 0; v < 4; ++v) x_held[v] = load_chunk<8>(x_from[v], x_found[v] ? 8 : 0);
    #pragma unroll
    for (int v = 0; v < 4; ++v) x_from[v] += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) gate_held[v] = load_chunk<8>(gate_from + v * 8 * gate_ld, 8);
    gate_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) up_held[v] = load_chunk<8>(up_from + v * 8 * up_ld, 8);
    up_from += split_k * tile_k;
  };
  const auto prepare_slice = [&](int step) {
    __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 4; ++v) store<8>(slice + place<8>(x_m + v * 8, x_k), x_held[v]);
    #pragma unroll
    for (int v = 0; v < 4; ++v) store<8>(slice + gate_at + place<8>(gate_n + v * 8, gate_k), gate_held[v]);
    #pragma unroll
    for (int v = 0; v < 4; ++v) store<8>(slice + up_at + place<8>(up_n + v * 8, up_k), up_held[v]);
  };

  // 16 slices of 64: fragments are loaded one step ahead of their use, across slices too
  Fragment x_part[2][2];
  Fragment gate_part[2][2];
  Fragment up_part[2][2];
  Sums tokens_times_gate_sums[2][2] = {};
  Sums tokens_times_up_sums[2][2] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int i = 0; i < 2; ++i) load_fragment<8>(x_part[buffer][i], slice + i * (16 * tile_k), 0, k * 32);
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_fragment<8>(gate_part[buffer][i], slice + gate_at + i * (16 * tile_k), 0, k * 32);
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_fragment<8>(up_part[buffer][i], slice + up_at + i * (16 * tile_k), 0, k * 32);
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        multiply_add(tokens_times_gate_sums[n][m], gate_part[buffer][n], x_part[buffer][m]);
        multiply_add(tokens_times_up_sums[n][m], up_part[buffer][n], x_part[buffer][m]);
      }
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
  float* const tokens_times_gate_shared = reinterpret_cast<float*>(shared);
  float* const tokens_times_up_shared = reinterpret_cast<float*>(shared) + tile_rows * sums_stride;
  #pragma unroll
  for (int n = 0; n < 2; ++n) {
    #pragma unroll
    for (int m = 0; m < 2; ++m) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int sum_row = m * 16 + lane % 16;
        const int sum_col = n * 16 + lane / 16 * 4 + i;
        tokens_times_gate_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = tokens_times_gate_sums[n][m][i];
        tokens_times_up_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = tokens_times_up_sums[n][m][i];
      }
    }
  }
  __syncthreads();

  const int m = static_cast<int>(threadIdx.x / (tile_cols / 8));
  const int n = static_cast<int>(threadIdx.x % (tile_cols / 8)) * 8;
  const long long row = row0 + m;
  const int col = col0 + n;
  if (m < rows_here) {
    const Vec<float, 8> tokens_times_gate_total = gathered<8>(tokens_times_gate_shared + m * sums_stride + n);
    const Vec<float, 8> tokens_times_up_total = gathered<8>(tokens_times_up_shared + m * sums_stride + n);
    Vec<__bf16, 8> h_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float tokens_times_gate = of_group ? tokens_times_gate_total.at[j] : 0.0f;
      const float tokens_times_up = of_group ? tokens_times_up_total.at[j] : 0.0f;
      const float silu = tokens_times_gate * reciprocal(1.0f + exponential(-tokens_times_gate));
      const float h = silu * tokens_times_up;
      h_vec.at[j] = static_cast<__bf16>(h);
    }
    store<8>(h_ptr + row * h_stride + col, h_vec);
  }
}
