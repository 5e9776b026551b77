// moe_layer_y  bf16[E, D, H], i32[E], bf16[T_times_4, H] -> bf16[T_times_4, D]  at E=64 D=2048 H=1024 T_times_4=1024
// y of moe_layer.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// tile     32 x 32 tiles, slice-K by 2 groups of warps; slices of 64 in a ring of 3 for each group;
//          each of rows of one of 64 groups
// traffic  274.7 MB moved, 274.7 MB ideal, 274.7 MB with products apart, 283.1 MB unfused in 2 launches
// floor    134.7 us at 2.039 TB/s; memory-bound at 15.63 flop/B
// rounding y to bf16 when stored; f32 between
// needs    E=64, D=2048, H=1024; rows of all operands next to each other; h, down, y: address and
//          strides in multiples of 16 B; ends [E] shared by every row

#include <cuda_bf16.h>

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
constexpr int tile_rows = 32, tile_cols = 32, tile_k = 64, stages = 3;
constexpr int split_k = 2, steps = 8;  // parts of K, and slices of each
constexpr int threads = 64;
constexpr int tiles_across = 64;
constexpr int segments = 64;  // groups of rows
// elements from the start of a slice to the right factor, and to its end
constexpr int down_at = tile_rows * tile_k;
constexpr int slice_elements = down_at + tile_cols * tile_k;
constexpr int slice_bytes = 2 * slice_elements;
// floats from a row of sums to the next: what a warp writes at once lies in different banks
constexpr int sums_stride = tile_cols + 4;
constexpr int group_floats = 1 * tile_rows * sums_stride;  // of a slice-K group's sums

// where element (row, k) lies in a tile with rows of Chunks x 8 elements: XOR-swizzled by the row's number, so that
// 8 rows of one column of chunks lie in different banks
template <int Chunks>
__device__ __forceinline__ int place(int row, int k) {
  constexpr int period = Chunks < 8 ? Chunks : 8;
  const int xor_mask = row / (8 / period) % period;
  return (row * Chunks + (k / 8 ^ xor_mask)) * 8 + k % 8;
}

// 8 elements on their way from global to shared memory, Width with each copy; those from `count` on are zeros
template <int Width, typename T>
__device__ __forceinline__ void copy_chunk(unsigned to, const T* from, int count) {
  if constexpr (Width == 8) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(to), "l"(from), "r"(count * 2) : "memory");
  } else {
    #pragma unroll
    for (int j = 0; j < 8; j += Width) {
      const int left = count < j ? 0 : count - j < Width ? count - j : Width;
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
          :: "r"(to + j * 2), "l"(from + j), "n"(Width * 2), "r"(left * 2) : "memory");
    }
  }
}

// the same address, that threads have in registers of their own
__device__ __forceinline__ unsigned own_address(unsigned address) {
  return address ^ threadIdx.y;
}

// 8 elements that are read once: evict-first in the L2 cache
template <typename T>
__device__ __forceinline__ void copy_evict_first(unsigned to, const T* from, int count) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
      :: "r"(to), "l"(from), "r"(count * 2), "l"(policy) : "memory");
}

// the copies since the last call become one group
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// waits for the thread's own groups, all but the last Pending
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");
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
  return __shfl_up_sync(0xffffffffu, v, step);
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
  const int lane = threadIdx.x % 32;
  Own own{0, 0, 0, 0};
  #pragma unroll 2
  for (int i = 0; i < 2; ++i) own.end = end_of(ends, lane * 2 + i, own.end, most);
  #pragma unroll
  for (int step = 1; step < 32; step *= 2) {
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
  for (int step = 1; step < 32; step *= 2) {
    const unsigned other = from_before(own.behind, step);
    if (lane >= step) own.behind += other;
  }
  own.before = own.behind - own_tiles;
  return own;
}

// the group of tile `number`, counted from the top, that all lanes of a warp ask for
__device__ __forceinline__ Segment segment_of(const int* ends, long long rows, unsigned number) {
  const int most = rows < 0x7fffffff ? static_cast<int>(rows) : 0x7fffffff;
  const int lane = threadIdx.x % 32;
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
  const auto lanes = __ballot_sync(0xffffffffu, says);  // all whose groups lie above the tile
  const int owner = __popc(lanes);
  const bool found = owner < 32;
  if (!found && lane == 31) {  // it knows where all groups end
    group = segments - 1;
    row0 = own.end;
  }
  const int from = found ? owner : 31;
  const unsigned over = found ? 0 : number - __shfl_sync(0xffffffffu, own.behind, 31, 32);
  end = __shfl_sync(0xffffffffu, end, from, 32);
  const long long first = __shfl_sync(0xffffffffu, row0, from, 32) + static_cast<long long>(over) * tile_rows;
  return Segment{__shfl_sync(0xffffffffu, group, from, 32), first, found ? end : rows, found};
}

// four matrices of 8 x 16 bytes, from the rows whose places the lanes give
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// sums += right^T left^T, 16 columns by 8 rows
__device__ __forceinline__ void multiply_add(
    float (&sums)[4], const unsigned (&right)[4], unsigned left_0, unsigned left_1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(right[0]), "r"(right[1]), "r"(right[2]), "r"(right[3]), "r"(left_0), "r"(left_1));
}

extern "C" __global__ void __launch_bounds__(64)
moe_layer_y(
    const __nv_bfloat16* __restrict__ down_ptr,
    const int* __restrict__ ends_ptr,
    const __nv_bfloat16* __restrict__ h_ptr,
    __nv_bfloat16* __restrict__ y_ptr,
    long long rows,
    long long h_stride,
    long long down_ld,
    long long down_group,
    long long y_stride)
{
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int k_group = threadIdx.x / 32;  // slice-K: of 2 groups of warps
  const unsigned tile = blockIdx.x;
  const Segment here = segment_of(ends_ptr, rows, tile / tiles_across);
  const long long row0 = here.row0, segment_end = here.end;
  const int segment = here.number;
  const bool of_group = here.of_group;
  const int across = tile % tiles_across;
  if (row0 >= rows) return;  // the groups need fewer tiles
  const int rows_here = segment_end - row0 < tile_rows ? static_cast<int>(segment_end - row0) : tile_rows;
  const int col0 = across * tile_cols;

  // the ring of 3 slices, and what the thread brings of each
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared) + k_group * (stages * slice_elements);
  const int h_m = lane / 8, h_k = lane % 8 * 8;
  const __nv_bfloat16* h_from = h_ptr + (row0 + h_m) * h_stride + k_group * tile_k + h_k;
  const int down_n = lane / 8, down_k = lane % 8 * 8;
  const __nv_bfloat16* down_from = down_ptr + segment * down_group + (col0 + down_n) * down_ld + k_group * tile_k + down_k;
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = own_address(ring_at + step % stages * slice_bytes);
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      const unsigned to = slice + place<8>(h_m + v * 4, h_k) * 2;
      copy_chunk<8>(to, h_from + v * 4 * h_stride, h_m + v * 4 < rows_here ? 8 : 0);
    }
    h_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      const unsigned to = slice + (down_at + place<8>(down_n + v * 4, down_k)) * 2;
      copy_evict_first(to, down_from + v * 4 * down_ld, 8);
    }
    down_from += split_k * tile_k;
  };

  // 8 slices of 64: fragments are loaded one step ahead of their use, across slices too
  unsigned h_part[2][2][4];
  unsigned down_part[2][2][4];
  float grouped_matmul_sums[2][4][4] = {};
  const unsigned h_lane = ring_at + place<8>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2;
  const unsigned down_lane = ring_at + down_at * 2 + place<8>(lane % 16, lane / 16 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(h_part[buffer][i], (h_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(down_part[buffer][i], (down_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 4; ++m) {
      #pragma unroll
      for (int nth = 0; nth < 2; ++nth) {  // serpentine: what was multiplied last is at hand
        const int n = m % 2 ? 1 - nth : nth;
        multiply_add(grouped_matmul_sums[n][m], down_part[buffer][n], h_part[buffer][m / 2][m % 2 * 2],
            h_part[buffer][m / 2][m % 2 * 2 + 1]);
      }
    }
  };

  if (of_group) {  // else all sums are 0
    #pragma unroll
    for (int s = 0; s < stages - 1; ++s) {
      copy_slice(s);
      commit_copies();
    }
    wait_copies<stages - 2>();
    __syncwarp();
    load_parts(0, 0, 0);
    const auto take_slice = [&](int step, bool last) {
      #pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k == 3 && !last) {
          wait_copies<stages - 2>();
        }
        if (k < 3) {
          load_parts(step, k + 1, (k + 1) % 2);
        } else if (!last) {
          __syncwarp();
          load_parts(step + 1, 0, 0);
        }
        if (k == 0 && !last) {
          if (step + stages - 1 < steps) copy_slice(step + stages - 1);
          commit_copies();
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
  #pragma unroll
  for (int n = 0; n < 2; ++n) {
    #pragma unroll
    for (int m = 0; m < 4; ++m) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int sum_row = m * 8 + lane % 4 * 2 + i % 2;
        const int sum_col = n * 16 + lane / 4 + i / 2 * 8;
        grouped_matmul_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = grouped_matmul_sums[n][m][i];
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
    if (m < rows_here) {
      const Vec<float, 8> grouped_matmul_total = gathered<8>(grouped_matmul_shared + m * sums_stride + n);
      Vec<__nv_bfloat16, 8> y_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float grouped_matmul = of_group ? grouped_matmul_total.at[j] : 0.0f;
        y_vec.at[j] = __float2bfloat16_rn(grouped_matmul);
      }
      store<8>(y_ptr + row * y_stride + col, y_vec);
    }
  }
}
