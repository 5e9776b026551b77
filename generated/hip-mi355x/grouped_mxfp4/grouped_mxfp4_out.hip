// grouped_mxfp4_out  bf16[T, K], bf16[E, N], bf16[E, N], i32[E], bf16[E, N, K], bf16[E, N, K] -> bf16[T, N]  at T=32 K=2880 E=128 N=2880
// out of grouped_mxfp4.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// views    found_times_dequantize_part is found_times_dequantize as [E, N, K]; mul_part is mul as [E,
//          N, K]
// tile     16 x 32 tiles, slice-K by 2 groups of warps; slices of 64 in a ring of 2 for each group;
//          each of rows of one of 128 groups
// traffic  1063.5 MB moved, 1063.5 MB ideal, 4249.5 MB with products apart, 4252.3 MB unfused in 10
//          launches
// floor    132.9 us at 8 TB/s; memory-bound at 1.00 flop/B
// rounding out to bf16 when stored; f32 between
// needs    K=2880, E=128, N=2880; rows of all operands next to each other; x,
//          found_times_dequantize_part, mul_part, gate_bias, up_bias, out: address and strides in
//          multiples of 16 B; gate_bias [E, N], up_bias [E, N] shared by rows of a group; ends [E]
//          shared by every row

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

// the larger of two; NaN wins
__device__ __forceinline__ float larger(float a, float b) {
  return __builtin_elementwise_maximum(a, b);
}

// the smaller of two; NaN wins
__device__ __forceinline__ float smaller(float a, float b) {
  return __builtin_elementwise_minimum(a, b);
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
constexpr int tile_rows = 16, tile_cols = 32, tile_k = 64, stages = 2;
constexpr int split_k = 2, steps = 23;  // parts of K, and slices of each
constexpr int tiles_across = 90;
constexpr int segments = 128;  // groups of rows
constexpr int full_k = 2880;
// elements from the start of a slice to the right factors, and to its end
constexpr int found_times_dequantize_part_at = tile_rows * tile_k;
constexpr int mul_part_at = found_times_dequantize_part_at + tile_cols * tile_k;
constexpr int slice_elements = mul_part_at + tile_cols * tile_k;
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

// what a lane knows of its own 2 groups, which lie one behind the other
struct Own {
  int begin, end;  // rows: where the groups before end, and where the last of its own does
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
  #pragma unroll 2
  for (int i = 0; i < 2; ++i) own.end = end_of(ends, lane * 2 + i, own.end, most);
  #pragma unroll
  for (int step = 1; step < 64; step *= 2) {
    const int other = from_before(own.end, step);
    if (lane >= step && other > own.end) own.end = other;
  }
  const int others_end = from_before(own.end, 1);
  own.begin = lane > 0 ? others_end : 0;
  int begin = own.begin;
  #pragma unroll 2
  for (int i = 0; i < 2; ++i) {
    const int end = end_of(ends, lane * 2 + i, begin, most);
    own.behind += (static_cast<unsigned>(end - begin) + tile_rows - 1) / tile_rows;
    begin = end;
  }
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
  #pragma unroll 2
  for (int i = 0; i < 2; ++i) {
    const int next = end_of(ends, lane * 2 + i, begin, most);
    const unsigned behind = before + (static_cast<unsigned>(next - begin) + tile_rows - 1) / tile_rows;
    if (before <= number && number < behind) {
      group = lane * 2 + i;
      row0 = begin + static_cast<int>(number - before) * tile_rows;
      end = next;
    }
    before = behind;
    begin = next;
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
grouped_mxfp4_out(
    const __bf16* __restrict__ x_ptr,
    const __bf16* __restrict__ gate_bias_ptr,
    const __bf16* __restrict__ up_bias_ptr,
    const int* __restrict__ ends_ptr,
    const __bf16* __restrict__ found_times_dequantize_part_ptr,
    const __bf16* __restrict__ mul_part_ptr,
    __bf16* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long found_times_dequantize_part_ld,
    long long found_times_dequantize_part_group,
    long long mul_part_ld,
    long long mul_part_group,
    long long gate_bias_group,
    long long up_bias_group,
    long long out_stride)
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
  const __bf16* x_from = x_ptr + (row0 + x_m) * x_stride + k_group * tile_k + x_k;
  const int found_times_dequantize_part_n = lane / 8, found_times_dequantize_part_k = lane % 8 * 8;
  const __bf16* found_times_dequantize_part_from = found_times_dequantize_part_ptr + segment * found_times_dequantize_part_group + (col0
      + found_times_dequantize_part_n) * found_times_dequantize_part_ld + k_group * tile_k + found_times_dequantize_part_k;
  const int mul_part_n = lane / 8, mul_part_k = lane % 8 * 8;
  const __bf16* mul_part_from = mul_part_ptr + segment * mul_part_group + (col0 + mul_part_n) * mul_part_ld + k_group * tile_k + mul_part_k;
  Vec<__bf16, 8> x_held[2];
  Vec<__bf16, 8> found_times_dequantize_part_held[4];
  Vec<__bf16, 8> mul_part_held[4];
  const auto fetch_slice = [&](int step) {
    const int k_at = (step * split_k + k_group) * tile_k;
    if (rows_here == tile_rows && k_at + tile_k <= full_k) {  // no vector is tested for an end
      #pragma unroll
      for (int v = 0; v < 2; ++v) x_held[v] = load_chunk<8>(x_from + v * 8 * x_stride, 8);
      #pragma unroll
      for (int v = 0; v < 4; ++v) {
        found_times_dequantize_part_held[v] = load_chunk<8>(found_times_dequantize_part_from + v * 8 * found_times_dequantize_part_ld, 8);
      }
      #pragma unroll
      for (int v = 0; v < 4; ++v) mul_part_held[v] = load_chunk<8>(mul_part_from + v * 8 * mul_part_ld, 8);
    } else {
      #pragma unroll
      for (int v = 0; v < 2; ++v) {
        x_held[v] = load_chunk<8>(x_from + v * 8 * x_stride, x_m + v * 8 < rows_here && k_at + x_k < full_k ? 8 : 0);
      }
      #pragma unroll
      for (int v = 0; v < 4; ++v) {
        found_times_dequantize_part_held[v] = load_chunk<8>(found_times_dequantize_part_from
            + v * 8 * found_times_dequantize_part_ld, k_at + found_times_dequantize_part_k < full_k ? 8 : 0);
      }
      #pragma unroll
      for (int v = 0; v < 4; ++v) {
        mul_part_held[v] = load_chunk<8>(mul_part_from + v * 8 * mul_part_ld, k_at + mul_part_k < full_k ? 8 : 0);
      }
    }
    x_from += split_k * tile_k;
    found_times_dequantize_part_from += split_k * tile_k;
    mul_part_from += split_k * tile_k;
  };
  const auto prepare_slice = [&](int step) {
    __bf16* const slice = ring + step % stages * slice_elements;
    #pragma unroll
    for (int v = 0; v < 2; ++v) store<8>(slice + place<8>(x_m + v * 8, x_k), x_held[v]);
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      store<8>(slice + found_times_dequantize_part_at + place<8>(found_times_dequantize_part_n
          + v * 8, found_times_dequantize_part_k), found_times_dequantize_part_held[v]);
    }
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      store<8>(slice + mul_part_at + place<8>(mul_part_n + v * 8, mul_part_k), mul_part_held[v]);
    }
  };

  // 23 slices of 64: fragments are loaded one step ahead of their use, across slices too
  Fragment x_part[2][1];
  Fragment found_times_dequantize_part_part[2][2];
  Fragment mul_part_part[2][2];
  Sums grouped_matmul_sums[2][1] = {};
  Sums x_times_mul_part_sums[2][1] = {};
  const auto load_parts = [&](int step, int k, int buffer) {
    const __bf16* const slice = ring + step % stages * slice_elements;
    load_fragment<8>(x_part[buffer][0], slice, 0, k * 32);
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_fragment<8>(found_times_dequantize_part_part[buffer][i], slice + found_times_dequantize_part_at + i * (16 * tile_k), 0, k * 32);
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_fragment<8>(mul_part_part[buffer][i], slice + mul_part_at + i * (16 * tile_k), 0, k * 32);
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      multiply_add(grouped_matmul_sums[n][0], found_times_dequantize_part_part[buffer][n], x_part[buffer][0]);
      multiply_add(x_times_mul_part_sums[n][0], mul_part_part[buffer][n], x_part[buffer][0]);
    }
  };

  if (of_group) {  // else all sums are 0
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
  float* const grouped_matmul_shared = reinterpret_cast<float*>(shared);
  float* const x_times_mul_part_shared = reinterpret_cast<float*>(shared) + tile_rows * sums_stride;
  #pragma unroll
  for (int n = 0; n < 2; ++n) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int sum_row = lane % 16;
      const int sum_col = n * 16 + lane / 16 * 4 + i;
      grouped_matmul_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = grouped_matmul_sums[n][0][i];
      x_times_mul_part_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = x_times_mul_part_sums[n][0][i];
    }
  }
  __syncthreads();

  const int m = static_cast<int>(threadIdx.x / (tile_cols / 8));
  const int n = static_cast<int>(threadIdx.x % (tile_cols / 8)) * 8;
  const long long row = row0 + m;
  const int col = col0 + n;
  if (m < tile_rows && m < rows_here) {
    const Vec<float, 8> grouped_matmul_total = gathered<8>(grouped_matmul_shared + m * sums_stride + n);
    const Vec<float, 8> x_times_mul_part_total = gathered<8>(x_times_mul_part_shared + m * sums_stride + n);
    const Vec<__bf16, 8> gate_bias_vec = load<8>(gate_bias_ptr + segment * gate_bias_group + col);
    const Vec<__bf16, 8> up_bias_vec = load<8>(up_bias_ptr + segment * up_bias_group + col);
    Vec<__bf16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float grouped_matmul = of_group ? grouped_matmul_total.at[j] : 0.0f;
      const float x_times_mul_part = of_group ? x_times_mul_part_total.at[j] : 0.0f;
      const float gate_bias = of_group ? static_cast<float>(gate_bias_vec.at[j]) : 0.0f;
      const float up_bias = of_group ? static_cast<float>(up_bias_vec.at[j]) : 0.0f;
      const float add_group_rows = grouped_matmul + gate_bias;
      const float add_group_rows_from_x = x_times_mul_part + up_bias;
      const float gate = smaller(add_group_rows, 7.0f);
      const float maximum = larger(add_group_rows_from_x, (-7.0f));
      const float up = smaller(maximum, 7.0f);
      const float add = up + 1.0f;
      const float add_times_gate = add * gate;
      const float mul_from_x = 1.702f * gate;
      const float sigmoid = reciprocal(1.0f + exponential(-mul_from_x));
      const float add_times_gate_times_sigmoid = add_times_gate * sigmoid;
      out_vec.at[j] = static_cast<__bf16>(add_times_gate_times_sigmoid);
    }
    store<8>(out_ptr + row * out_stride + col, out_vec);
  }
}
