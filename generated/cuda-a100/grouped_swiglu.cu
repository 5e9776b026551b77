// grouped_swiglu  bf16[T, K], bf16[E, N, K], bf16[E, N, K], i32[E] -> bf16[T, N]  at T=16384 K=4096 E=16 N=2048
// silu(x @ w_gate[e].T) * (x @ w_up[e].T), where e is the expert of the token.
//
//     def grouped_swiglu(x, w_gate, w_up, ends):
//         gate = F.grouped_matmul(x, w_gate.mT, ends)
//         up = F.grouped_matmul(x, w_up.mT, ends)
//         return F.silu(gate) * up
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// tile     128 x 128 tiles of 8 warps, slices of 64 in a ring of 3; each of rows of one of 16 groups
// traffic  738.2 MB moved, 738.2 MB ideal, 1140.9 MB with products apart, 1275.1 MB unfused in 4
//          launches
// floor    1762.0 us at 312 TFLOP/s for products; compute-bound at 744.73 flop/B
// rounding out to bf16 when stored; f32 between
// needs    K=4096, E=16, N=2048; rows of all operands next to each other; x, w_gate, w_up, out: address
//          and strides in multiples of 16 B; ends [E] shared by every row

#include <cuda_bf16.h>

// N values that move together, 16 bytes at a time where they fill them
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
};

// the vector to p, which is aligned to it
template <int N, typename T>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, within 1 ulp; above 2^126 it is 0
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 128, tile_cols = 128, tile_k = 64, stages = 3;
constexpr int steps = 64;
constexpr int warp_rows = 64, warp_cols = 32;  // of a tile
constexpr int tiles_across = 16;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
constexpr int segments = 16;  // groups of rows
// elements from the start of a slice to the right factors, and to its end
constexpr int w_gate_at = tile_rows * tile_k;
constexpr int w_up_at = w_gate_at + tile_cols * tile_k;
constexpr int slice_elements = w_up_at + tile_cols * tile_k;
constexpr int slice_bytes = 2 * slice_elements;
constexpr int at_once = 256 * 8;  // elements that the threads copy at once

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

// the copies since the last call become one group
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// waits for the thread's own groups, all but the last Pending
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");
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
  own.end = end_of(ends, lane, own.end, most);
  #pragma unroll
  for (int step = 1; step < 32; step *= 2) {
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
  const int next = end_of(ends, lane, begin, most);
  const unsigned behind = before + (static_cast<unsigned>(next - begin) + tile_rows - 1) / tile_rows;
  if (before <= number && number < behind) {
    group = lane;
    row0 = begin + static_cast<int>(number - before) * tile_rows;
    end = next;
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

extern "C" __global__ void __launch_bounds__(256)
grouped_swiglu(
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ w_gate_ptr,
    const __nv_bfloat16* __restrict__ w_up_ptr,
    const int* __restrict__ ends_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long w_gate_ld,
    long long w_gate_group,
    long long w_up_ld,
    long long w_up_group,
    long long out_stride)
{
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / 4 * warp_rows;  // the warp's first of the tile
  const int warp_col = warp % 4 * warp_cols;
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

  // the ring of 3 slices, and what the thread brings of each
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared);
  const int x_m = threadIdx.x / 8, x_k = threadIdx.x % 8 * 8;
  const __nv_bfloat16* x_from = x_ptr + (row0 + x_m) * x_stride + x_k;
  unsigned x_to = (place<8>(x_m, x_k)) * 2;
  asm volatile("" : "+r"(x_to));  // stays in a register: the compiler would make it anew for each copy
  const int w_gate_n = threadIdx.x / 8, w_gate_k = threadIdx.x % 8 * 8;
  // the column that lies in row w_gate_n of the tile
  const int w_gate_col = w_gate_n / warp_cols * warp_cols + w_gate_n % 8 * 4 + w_gate_n % warp_cols / 8;
  const __nv_bfloat16* w_gate_from = w_gate_ptr + segment * w_gate_group + (col0 + w_gate_col) * w_gate_ld + w_gate_k;
  unsigned w_gate_to = (w_gate_at + place<8>(w_gate_n, w_gate_k)) * 2;
  asm volatile("" : "+r"(w_gate_to));  // stays in a register: the compiler would make it anew for each copy
  const int w_up_n = threadIdx.x / 8, w_up_k = threadIdx.x % 8 * 8;
  // the column that lies in row w_up_n of the tile
  const int w_up_col = w_up_n / warp_cols * warp_cols + w_up_n % 8 * 4 + w_up_n % warp_cols / 8;
  const __nv_bfloat16* w_up_from = w_up_ptr + segment * w_up_group + (col0 + w_up_col) * w_up_ld + w_up_k;
  unsigned w_up_to = (w_up_at + place<8>(w_up_n, w_up_k)) * 2;
  asm volatile("" : "+r"(w_up_to));  // stays in a register: the compiler would make it anew for each copy
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = ring_at + step % stages * slice_bytes;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + x_to + v * (at_once * 2);
      copy_chunk<8>(to, x_from + v * 32 * x_stride, x_m + v * 32 < rows_here ? 8 : 0);
    }
    x_from += tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + w_gate_to + v * (at_once * 2);
      copy_chunk<8>(to, w_gate_from + v * 32 * w_gate_ld, 8);
    }
    w_gate_from += tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + w_up_to + v * (at_once * 2);
      copy_chunk<8>(to, w_up_from + v * 32 * w_up_ld, 8);
    }
    w_up_from += tile_k;
  };

  // 64 slices of 64: fragments are loaded one step ahead of their use, across slices too
  unsigned x_part[2][4][4];
  unsigned w_gate_part[2][2][4];
  unsigned w_up_part[2][2][4];
  float gate_sums[2][8][4] = {};
  float up_sums[2][8][4] = {};
  const unsigned x_lane = ring_at + place<8>(warp_row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2;
  const unsigned w_gate_lane = ring_at + w_gate_at * 2 + place<8>(warp_col + lane % 16, lane / 16 * 8) * 2;
  const unsigned w_up_lane = ring_at + w_up_at * 2 + place<8>(warp_col + lane % 16, lane / 16 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(x_part[buffer][i], (x_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(w_gate_part[buffer][i], (w_gate_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(w_up_part[buffer][i], (w_up_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 8; ++m) {
      #pragma unroll
      for (int nth = 0; nth < 2; ++nth) {  // serpentine: what was multiplied last is at hand
        const int n = m % 2 ? 1 - nth : nth;
        multiply_add(gate_sums[n][m], w_gate_part[buffer][n], x_part[buffer][m / 2][m % 2 * 2],
            x_part[buffer][m / 2][m % 2 * 2 + 1]);
        multiply_add(up_sums[n][m], w_up_part[buffer][n], x_part[buffer][m / 2][m % 2 * 2],
            x_part[buffer][m / 2][m % 2 * 2 + 1]);
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
    __syncthreads();
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
          __syncthreads();
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

  const int n = warp_col + lane / 4 * 4;  // the first of the thread's columns
  const int col = col0 + n;
  #pragma unroll
  for (int v = 0; v < 16; ++v) {
    const int m = warp_row + v / 2 * 8 + lane % 4 * 2 + v % 2;
    const long long row = row0 + m;
    if (m < rows_here) {
      Vec<__nv_bfloat16, 4> out_vec;
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float gate = of_group ? gate_sums[j / 2][v / 2][j % 2 * 2 + v % 2] : 0.0f;
        const float up = of_group ? up_sums[j / 2][v / 2][j % 2 * 2 + v % 2] : 0.0f;
        const float silu = gate * reciprocal(1.0f + exponential(-gate));
        const float mul = silu * up;
        out_vec.at[j] = __float2bfloat16_rn(mul);
      }
      store<4>(out_ptr + row * out_stride + col, out_vec);
    }
  }
}
