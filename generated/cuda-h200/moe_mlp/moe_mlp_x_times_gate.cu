// moe_mlp_x_times_gate  bf16[T, K], bf16[E, H, K], i32[E] -> f32[T, H]  at T=16384 K=4096 E=16 H=2048
// x_times_gate of moe_mlp.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// tile     128 x 256 tiles of 8 warps, slices of 64 in a ring of 4, copies interleaved with the
//          products; persistent blocks; each of rows of one of 16 groups
// traffic  536.9 MB moved, 536.9 MB ideal, 536.9 MB with products apart, 536.9 MB unfused in 1 launch
// floor    277.8 us at 989 TFLOP/s for products; compute-bound at 512.00 flop/B
// needs    K=4096, E=16, H=2048; rows of all operands next to each other; x, gate, x_times_gate:
//          address and strides in multiples of 16 B; ends [E] shared by every row
// launch   lets the next one begin once all its blocks run

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

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 128, tile_cols = 256, tile_k = 64, stages = 4;
constexpr int steps = 64;
constexpr int warp_rows = 64, warp_cols = 64;  // of a tile
constexpr int tiles_across = 8;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
constexpr int segments = 16;  // groups of rows
// elements from the start of a slice to the right factor, and to its end
constexpr int gate_at = tile_rows * tile_k;
constexpr int slice_elements = gate_at + tile_cols * tile_k;
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

// the group of tile `number`, counted from the top. A group's rows end at ends[s], but not before the one above it ends,
// nor behind all rows: no end is read as a place that is not there
__device__ __forceinline__ Segment segment_of(const int* ends, long long rows, unsigned number) {
  const int most = rows < 0x7fffffff ? static_cast<int>(rows) : 0x7fffffff;
  Segment found{segments - 1, 0, rows, false};
  int begin = 0;
  unsigned before = 0;  // tiles
  #pragma unroll 8
  for (int s = 0; s < segments; ++s) {  // to the end, so that ends are asked for several at a time
    const int end = ends[s] < begin ? begin : ends[s] < most ? ends[s] : most;
    const unsigned behind = before + (static_cast<unsigned>(end - begin) + tile_rows - 1) / tile_rows;
    if (before <= number && number < behind) {
      found = Segment{s, begin + static_cast<long long>(number - before) * tile_rows, end, true};
    }
    before = behind;
    begin = end;
  }
  if (!found.of_group) found.row0 = begin + static_cast<long long>(number - before) * tile_rows;
  return found;
}

// how many tiles there are from top to bottom
__device__ __forceinline__ unsigned tiles_of(const int* ends, long long rows) {
  const int most = rows < 0x7fffffff ? static_cast<int>(rows) : 0x7fffffff;
  int begin = 0;
  unsigned number = 0;
  #pragma unroll 8
  for (int s = 0; s < segments; ++s) {
    const int end = ends[s] < begin ? begin : ends[s] < most ? ends[s] : most;
    number += (static_cast<unsigned>(end - begin) + tile_rows - 1) / tile_rows;
    begin = end;
  }
  return number + static_cast<unsigned>((rows - begin + tile_rows - 1) / tile_rows);
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
moe_mlp_x_times_gate(
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ gate_ptr,
    const int* __restrict__ ends_ptr,
    float* __restrict__ x_times_gate_ptr,
    long long rows,
    long long x_stride,
    long long gate_ld,
    long long gate_group,
    long long x_times_gate_stride)
{
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin, once all blocks of this one run
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / 4 * warp_rows;  // the warp's first of the tile
  const int warp_col = warp % 4 * warp_cols;
  const unsigned tiles_down = tiles_of(ends_ptr, rows);
  const unsigned tiles = tiles_down * tiles_across;
  if (blockIdx.x >= tiles) return;  // the groups need fewer tiles
  struct Place { long long row0; int across; long long segment_end; int segment; bool of_group; };
  const auto place_of = [&](unsigned tile) {
    // 8 rows of tiles at a time, column by column: blocks that run together share factors in the L2 cache
    const unsigned first = tile / group_tiles * group;
    const unsigned height = tiles_down - first < group ? tiles_down - first : group;
    const Segment here = segment_of(ends_ptr, rows, first + tile % group_tiles % height);
    const long long row0 = here.row0, segment_end = here.end;
    const int segment = here.number;
    const bool of_group = here.of_group;
    const int across = tile % group_tiles / height;
    return Place{row0, across, segment_end, segment, of_group};
  };

  // the ring of 4 slices, and what the thread brings of each
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared);
  const int x_m = threadIdx.x / 8, x_k = threadIdx.x % 8 * 8;
  const __nv_bfloat16* x_from[4];
  unsigned x_to = (place<8>(x_m, x_k)) * 2;
  asm volatile("" : "+r"(x_to));  // stays in a register: the compiler would make it anew for each copy
  const int gate_n = threadIdx.x / 8, gate_k = threadIdx.x % 8 * 8;
  // the column that lies in row gate_n of the tile
  const int gate_col = gate_n / warp_cols * warp_cols + gate_n % 8 * 8 + gate_n % warp_cols / 8;
  const __nv_bfloat16* gate_from[8];
  unsigned gate_to = (gate_at + place<8>(gate_n, gate_k)) * 2;
  asm volatile("" : "+r"(gate_to));  // stays in a register: the compiler would make it anew for each copy
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  int rows_here;  // of the tile that is copied
  const auto aim = [&](unsigned tile) {
    const Place at = place_of(tile);
    const long long row0 = at.row0;
    const long long segment_end = at.segment_end;
    const int segment = at.segment;
    const int across = at.across;
    const int col0 = across * tile_cols;
    rows_here = segment_end - row0 < tile_rows ? static_cast<int>(segment_end - row0) : tile_rows;
    #pragma unroll
    for (int v = 0; v < 4; ++v) x_from[v] = x_ptr + (row0 + x_m) * x_stride + x_k + (v * 32) * x_stride;
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      gate_from[v] = gate_ptr + segment * gate_group + (col0 + gate_col) * gate_ld + gate_k + (v * 32 / warp_cols * warp_cols
          + v * 32 % warp_cols / 8) * gate_ld;
    }
  };
  aim(blockIdx.x);
  bool more = true;  // is there a slice left to copy?
  // one of the thread's chunks of a slice, which is `ahead` slices from where the pointers are
  const auto copy_one = [&](int slot, int ahead, int number) {
    const unsigned slice = ring_at + slot * slice_bytes;
    if (number < 4) {
      const int v = number;
      const unsigned to = slice + x_to + v * (at_once * 2);
      copy_chunk<8>(to, x_from[v] + ahead * tile_k, x_m + v * 32 < rows_here ? 8 : 0);
    }
    if (4 <= number && number < 12) {
      const int v = number - 4;
      const unsigned to = slice + gate_to + v * (at_once * 2);
      copy_chunk<8>(to, gate_from[v] + ahead * tile_k, 8);
    }
  };
  const auto advance = [&](int slices) {
    #pragma unroll
    for (int v = 0; v < 4; ++v) x_from[v] += slices * tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) gate_from[v] += slices * tile_k;
  };

  // 64 slices of 64: fragments are loaded one step ahead of their use, across slices too
  unsigned x_part[2][4][4];
  unsigned gate_part[2][4][4];
  const unsigned x_lane = ring_at + place<8>(warp_row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2;
  const unsigned gate_lane = ring_at + gate_at * 2 + place<8>(warp_col + lane % 16, lane / 16 * 8) * 2;
  // fragment `number` of a step, in the order that products need them
  const auto load_one = [&](int slot, int k, int buffer, int number) {
    const unsigned slice = slot * slice_bytes;
    if (number < 1 || number >= 5) {
      const int i = number < 1 ? 0 : number - 4;
      load_matrices(x_part[buffer][i], (x_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    if (1 <= number && number < 5) {
      const int i = number - 1;
      load_matrices(gate_part[buffer][i], (gate_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
  };

  #pragma unroll
  for (int slot = 0; slot < stages - 1; ++slot) {
    #pragma unroll
    for (int number = 0; number < 12; ++number) copy_one(slot, slot, number);
    commit_copies();
  }
  wait_copies<stages - 2>();
  __syncthreads();
  #pragma unroll
  for (int number = 0; number < 8; ++number) load_one(0, 0, 0, number);
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float grouped_matmul_sums[4][8][4] = {};
    // the products of step k, with what they are not to wait for: the next step's fragments, one before each product, then
    // chunks of the slice that is 3 ahead, in the place of the slice before
    const auto take_step = [&](int slot, int k, bool copies) {
      #pragma unroll
      for (int m = 0; m < 8; ++m) {
        #pragma unroll
        for (int nth = 0; nth < 4; ++nth) {  // serpentine: what was multiplied last is at hand
          const int n = m % 2 ? 3 - nth : nth;
          const int at = m * 4 + nth;
          if (at < 8) {
            load_one(k < 3 ? slot : (slot + 1) % stages, (k + 1) % 4, (k + 1) % 2, at);
          } else if (at < 11 && copies) {
            copy_one((slot + stages - 1) % stages, slot == 0 ? stages - 1 : slot - 1, k * 3 + at - 8);
          }
          multiply_add(grouped_matmul_sums[n][m], gate_part[k % 2][n], x_part[k % 2][m / 2][m % 2 * 2], x_part[k % 2][m / 2][m % 2 * 2
              + 1]);
        }
      }
    };

    // with a slice's last step the next one is waited for: behind this tile's last slice, the next tile's first one
    #pragma unroll 1
    for (int step = 0; step < steps; step += stages) {
      #pragma unroll
      for (int slot = 0; slot < stages; ++slot) {
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (k == 3) {
            wait_copies<stages - 3>();
            __syncthreads();
          }
          take_step(slot, k, slot == 0 || more);
        }
        commit_copies();
        if (slot == 0) {  // from here on copies are of the next round, or of the next tile
          if (step + stages < steps) {
            advance(stages);
          } else {
            more = tile + gridDim.x < tiles;
            if (more) aim(tile + gridDim.x);
          }
        }
      }
    }

    const Place at = place_of(tile);
    const long long row0 = at.row0;
    const long long segment_end = at.segment_end;
    const bool of_group = at.of_group;
    const int across = at.across;
    const int col0 = across * tile_cols;

    const int n = warp_col + lane / 4 * 8;  // the first of the thread's columns
    const int col = col0 + n;
    #pragma unroll
    for (int v = 0; v < 16; ++v) {
      const int m = warp_row + v / 2 * 8 + lane % 4 * 2 + v % 2;
      const long long row = row0 + m;
      if (row < segment_end) {
        Vec<float, 8> x_times_gate_vec;
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float grouped_matmul = of_group ? grouped_matmul_sums[j / 2][v / 2][j % 2 * 2 + v % 2] : 0.0f;
          x_times_gate_vec.at[j] = grouped_matmul;
        }
        store<8>(x_times_gate_ptr + row * x_times_gate_stride + col, x_times_gate_vec);
      }
    }
  }
}
