// decoder_layer_prefill_h  bf16[S, D], bf16[D, E_times_G_times_H], bf16[S, E_times_G_times_H] -> bf16[S, D]  at S=4096 D=4096
//   E_times_G_times_H=4096
// h of decoder_layer_prefill.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// tile     128 x 256 tiles of 8 warps, slices of 32 in a ring of 4, copies interleaved with the
//          products; persistent blocks
// traffic  134.2 MB moved, 134.2 MB ideal, 201.3 MB with products apart, 268.4 MB unfused in 3 launches
// floor    440.5 us at 312 TFLOP/s for products; compute-bound at 1024.00 flop/B
// rounding h to bf16 when stored; f32 between
// needs    D=4096, E_times_G_times_H=4096; rows of all operands next to each other; attended, wo, x, h:
//          address and strides in multiples of 16 B

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
constexpr int tile_rows = 128, tile_cols = 256, tile_k = 32, stages = 4;
constexpr int steps = 128;
constexpr int warp_rows = 64, warp_cols = 64;  // of a tile
constexpr int tiles_across = 16;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
// elements from the start of a slice to the right factor, and to its end
constexpr int wo_at = tile_rows * tile_k;
constexpr int slice_elements = wo_at + tile_cols * tile_k;
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
decoder_layer_prefill_h(
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ wo_ptr,
    const __nv_bfloat16* __restrict__ attended_ptr,
    __nv_bfloat16* __restrict__ h_ptr,
    long long rows,
    long long attended_stride,
    long long wo_ld,
    long long x_stride,
    long long h_stride)
{
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / 4 * warp_rows;  // the warp's first of the tile
  const int warp_col = warp % 4 * warp_cols;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const unsigned tiles = tiles_down * tiles_across;
  struct Place { long long row0; int across; };
  const auto place_of = [&](unsigned tile) {
    // 8 rows of tiles at a time, column by column: blocks that run together share factors in the L2 cache
    const unsigned first = tile / group_tiles * group;
    const unsigned height = tiles_down - first < group ? tiles_down - first : group;
    const long long row0 = static_cast<long long>(first + tile % group_tiles % height) * tile_rows;
    const int across = tile % group_tiles / height;
    return Place{row0, across};
  };

  // the ring of 4 slices, and what the thread brings of each
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared);
  const int attended_m = threadIdx.x / 4, attended_k = threadIdx.x % 4 * 8;
  const __nv_bfloat16* attended_from[2];
  unsigned attended_to = (place<4>(attended_m, attended_k)) * 2;
  asm volatile("" : "+r"(attended_to));  // stays in a register: the compiler would make it anew for each copy
  const int wo_n = threadIdx.x / 4, wo_k = threadIdx.x % 4 * 8;
  // the column that lies in row wo_n of the tile
  const int wo_col = wo_n / warp_cols * warp_cols + wo_n % 8 * 8 + wo_n % warp_cols / 8;
  const __nv_bfloat16* wo_from[4];
  unsigned wo_to = (wo_at + place<4>(wo_n, wo_k)) * 2;
  asm volatile("" : "+r"(wo_to));  // stays in a register: the compiler would make it anew for each copy
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  int rows_here;  // of the tile that is copied
  const auto aim = [&](unsigned tile) {
    const Place at = place_of(tile);
    const long long row0 = at.row0;
    const int across = at.across;
    const int col0 = across * tile_cols;
    rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      attended_from[v] = attended_ptr + (row0 + attended_m) * attended_stride + attended_k + (v * 64) * attended_stride;
    }
    #pragma unroll
    for (int v = 0; v < 4; ++v) wo_from[v] = wo_ptr + (col0 + wo_col) * wo_ld + wo_k + (v * 64) * wo_ld;
  };
  aim(blockIdx.x);
  bool more = true;  // is there a slice left to copy?
  // one of the thread's chunks of a slice, which is `ahead` slices from where the pointers are
  const auto copy_one = [&](int slot, int ahead, int number) {
    const unsigned slice = ring_at + slot * slice_bytes;
    if (number < 2) {
      const int v = number;
      const unsigned to = slice + attended_to + v * (at_once * 2);
      copy_chunk<8>(to, attended_from[v] + ahead * tile_k, attended_m + v * 64 < rows_here ? 8 : 0);
    }
    if (2 <= number && number < 6) {
      const int v = number - 2;
      const unsigned to = slice + wo_to + v * (at_once * 2);
      copy_chunk<8>(to, wo_from[v] + ahead * tile_k, 8);
    }
  };
  const auto advance = [&](int slices) {
    #pragma unroll
    for (int v = 0; v < 2; ++v) attended_from[v] += slices * tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) wo_from[v] += slices * tile_k;
  };

  // 128 slices of 32: fragments are loaded one step ahead of their use, across slices too
  unsigned attended_part[2][4][4];
  unsigned wo_part[2][4][4];
  const unsigned attended_lane = ring_at + place<4>(warp_row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2;
  const unsigned wo_lane = ring_at + wo_at * 2 + place<4>(warp_col + lane % 16, lane / 16 * 8) * 2;
  // fragment `number` of a step, in the order that products need them
  const auto load_one = [&](int slot, int k, int buffer, int number) {
    const unsigned slice = slot * slice_bytes;
    if (number < 1 || number >= 5) {
      const int i = number < 1 ? 0 : number - 4;
      load_matrices(attended_part[buffer][i], (attended_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
    if (1 <= number && number < 5) {
      const int i = number - 1;
      load_matrices(wo_part[buffer][i], (wo_lane ^ (k * 32)) + slice + i * (16 * tile_k * 2));
    }
  };

  #pragma unroll
  for (int slot = 0; slot < stages - 1; ++slot) {
    #pragma unroll
    for (int number = 0; number < 6; ++number) copy_one(slot, slot, number);
    commit_copies();
  }
  wait_copies<stages - 2>();
  __syncthreads();
  #pragma unroll
  for (int number = 0; number < 8; ++number) load_one(0, 0, 0, number);
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float matmul_sums[4][8][4] = {};
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
            load_one(k < 1 ? slot : (slot + 1) % stages, (k + 1) % 2, (k + 1) % 2, at);
          } else if (at < 11 && copies) {
            copy_one((slot + stages - 1) % stages, slot == 0 ? stages - 1 : slot - 1, k * 3 + at - 8);
          }
          multiply_add(matmul_sums[n][m], wo_part[k % 2][n], attended_part[k % 2][m / 2][m % 2 * 2], attended_part[k % 2][m / 2][m % 2 * 2 + 1]);
        }
      }
    };

    // with a slice's last step the next one is waited for: behind this tile's last slice, the next tile's first one
    #pragma unroll 1
    for (int step = 0; step < steps; step += stages) {
      #pragma unroll
      for (int slot = 0; slot < stages; ++slot) {
        #pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (k == 1) {
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
    const int across = at.across;
    const int col0 = across * tile_cols;

    const int n = warp_col + lane / 4 * 8;  // the first of the thread's columns
    const int col = col0 + n;
    #pragma unroll
    for (int v = 0; v < 16; ++v) {
      const int m = warp_row + v / 2 * 8 + lane % 4 * 2 + v % 2;
      const long long row = row0 + m;
      if (row < rows) {
        const Vec<__nv_bfloat16, 8> x_vec = load<8>(x_ptr + row * x_stride + col);
        Vec<__nv_bfloat16, 8> h_vec;
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float matmul = matmul_sums[j / 2][v / 2][j % 2 * 2 + v % 2];
          const float x = __bfloat162float(x_vec.at[j]);
          const float add = x + matmul;
          h_vec.at[j] = __float2bfloat16_rn(add);
        }
        store<8>(h_ptr + row * h_stride + col, h_vec);
      }
    }
  }
}
