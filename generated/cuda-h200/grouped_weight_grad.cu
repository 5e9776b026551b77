// grouped_weight_grad  bf16[T, K], bf16[T, N], i32[E] -> bf16[E, N, K]  at T=16384 K=4096 N=2048 E=16
// dy[rows of e].T @ x[rows of e] for each expert e; 0 of one without tokens.
//
//     def grouped_weight_grad(x, dy, ends):
//         return F.grouped_matmul(dy.mT, x, ends)
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// tile     128 x 128 tiles of 4 warps, slices of 64 in a ring of 3; each summed over one of 16 groups
// traffic  469.8 MB moved, 469.8 MB ideal, 469.8 MB with products apart, 469.8 MB unfused in 1 launch
// floor    277.8 us at 989 TFLOP/s for products; compute-bound at 585.14 flop/B
// rounding out to bf16 when stored; f32 between
// needs    K=4096, E=16; rows of all operands next to each other; dy, x, out: address and strides in
//          multiples of 16 B; ends [E] shared by every row

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
constexpr int tile_rows = 128, tile_cols = 128, tile_k = 64, stages = 3;
constexpr int warp_rows = 64, warp_cols = 64;  // of a tile
constexpr int threads = 128;
constexpr int tiles_across = 32;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
// elements from the start of a slice to the right factor, and to its end
constexpr int x_at = tile_rows * tile_k;
constexpr int slice_elements = x_at + tile_cols * tile_k;
constexpr int slice_bytes = 2 * slice_elements;
constexpr int at_once = 128 * 8;  // elements that the threads copy at once
// floats from a row of sums to the next: what a warp writes at once lies in different banks
constexpr int sums_stride = tile_cols + 4;

// where element (row, k) lies in a tile with rows of Chunks x 8 elements: XOR-swizzled by the row's number, so that
// 8 rows of one column of chunks lie in different banks
template <int Chunks>
__device__ __forceinline__ int place(int row, int k) {
  constexpr int period = Chunks < 8 ? Chunks : 8;
  const int xor_mask = row / (8 / period) % period;
  return (row * Chunks + (k / 8 ^ xor_mask)) * 8 + k % 8;
}

// how many of 8 elements there are, of `left` to the end
__device__ __forceinline__ int within(int left) {
  return left < 0 ? 0 : left < 8 ? left : 8;
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

// four matrices of 8 x 16 bytes, from the rows whose places the lanes give; transposed on the way
__device__ __forceinline__ void load_matrices_across(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
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

extern "C" __global__ void __launch_bounds__(128)
grouped_weight_grad(
    const __nv_bfloat16* __restrict__ x_ptr,
    const __nv_bfloat16* __restrict__ dy_ptr,
    const int* __restrict__ ends_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
    long long E_size,
    long long N_size,
    long long total_k,
    long long dy_ld,
    long long x_ld,
    long long out_stride_E,
    long long out_stride_N)
{
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / 2 * warp_rows;  // the warp's first of the tile
  const int warp_col = warp % 2 * warp_cols;
  const long long rows = N_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const unsigned tiles = tiles_down * tiles_across;  // of one product
  const long long E_at = (blockIdx.x) / tiles;
  const unsigned tile = (blockIdx.x) % tiles;
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

  // the ring of 3 slices, and what the thread brings of each
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared);
  const int dy_k = threadIdx.x / 16, dy_m = threadIdx.x % 16 * 8;
  const __nv_bfloat16* dy_from = dy_ptr + k_begin * dy_ld + (dy_k) * dy_ld + row0 + dy_m;
  unsigned dy_to = (place<16>(dy_k, dy_m)) * 2;
  asm volatile("" : "+r"(dy_to));  // stays in a register: the compiler would make it anew for each copy
  const int x_k = threadIdx.x / 16, x_n = threadIdx.x % 16 * 8;
  const __nv_bfloat16* x_from = x_ptr + k_begin * x_ld + (x_k) * x_ld + col0 + x_n;
  unsigned x_to = (x_at + place<16>(x_k, x_n)) * 2;
  asm volatile("" : "+r"(x_to));  // stays in a register: the compiler would make it anew for each copy
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = ring_at + step % stages * slice_bytes;
    const int k_at = step * tile_k;
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      const unsigned to = slice + dy_to + v * (at_once * 2);
      copy_chunk<8>(to, dy_from + v * 8 * dy_ld, k_at + dy_k + v * 8 < full_k ? within(rows_here - dy_m) : 0);
    }
    dy_from += tile_k * dy_ld;
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      const unsigned to = slice + x_to + v * (at_once * 2);
      copy_chunk<8>(to, x_from + v * 8 * x_ld, k_at + x_k + v * 8 < full_k ? 8 : 0);
    }
    x_from += tile_k * x_ld;
  };

  // as many slices of 64 as the group has: fragments are loaded one step ahead of their use, across slices too
  unsigned dy_part[2][4][4];
  unsigned x_part[2][4][4];
  float matmul_over_groups_sums[4][8][4] = {};
  const unsigned dy_lane = ring_at + place<16>(lane % 16, warp_row + lane / 16 * 8) * 2;
  const unsigned x_lane = ring_at + x_at * 2 + place<16>(lane % 8 + lane / 16 * 8, warp_col + lane / 8 % 2 * 8) * 2;
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned slice = step % stages * slice_bytes;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices_across(dy_part[buffer][i], (dy_lane ^ (i * 32)) + slice + k * (16 * tile_rows * 2));
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices_across(x_part[buffer][i], (x_lane ^ (i * 32)) + slice + k * (16 * tile_cols * 2));
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int m = 0; m < 8; ++m) {
      #pragma unroll
      for (int nth = 0; nth < 4; ++nth) {  // serpentine: what was multiplied last is at hand
        const int n = m % 2 ? 3 - nth : nth;
        multiply_add(matmul_over_groups_sums[n][m], x_part[buffer][n], dy_part[buffer][m / 2][m % 2 * 2],
            dy_part[buffer][m / 2][m % 2 * 2 + 1]);
      }
    }
  };

  if (steps > 0) {  // else all sums are 0
    #pragma unroll
    for (int s = 0; s < stages - 1; ++s) {
      if (s < steps) copy_slice(s);
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

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  __syncthreads();
  float* const matmul_over_groups_shared = reinterpret_cast<float*>(shared);
  #pragma unroll
  for (int n = 0; n < 4; ++n) {
    #pragma unroll
    for (int m = 0; m < 8; ++m) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int sum_row = warp_row + m * 8 + lane % 4 * 2 + i % 2;
        const int sum_col = warp_col + n * 16 + lane / 4 + i / 2 * 8;
        matmul_over_groups_shared[sum_row * sums_stride + sum_col] = matmul_over_groups_sums[n][m][i];
      }
    }
  }
  __syncthreads();

  #pragma unroll 4
  for (int v = 0; v < 16; ++v) {
    const int m = static_cast<int>((v * threads + threadIdx.x) / (tile_cols / 8));
    const int n = static_cast<int>((v * threads + threadIdx.x) % (tile_cols / 8)) * 8;
    const long long row = row0 + m;
    const int col = col0 + n;
    if (row < rows) {
      const Vec<float, 8> matmul_over_groups_total = load<8>(matmul_over_groups_shared + m * sums_stride + n);
      Vec<__nv_bfloat16, 8> out_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float matmul_over_groups = matmul_over_groups_total.at[j];
        out_vec.at[j] = __float2bfloat16_rn(matmul_over_groups);
      }
      store<8>(out_ptr + E_at * out_stride_E + row * out_stride_N + col, out_vec);
    }
  }
}
