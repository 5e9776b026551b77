// w4a16_gemm  bf16[M, K], u8[N, K_half], bf16[N, K_over_128] -> bf16[M, N]  at M=8 K=8192 N=8192 K_half=4096 K_over_128=64
// x @ w.T, with a scale for each 128 weights of a column.
//
//     def w4a16_gemm(x, w, scale):
//         return x @ F.dequantize(w, scale).T
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// tile     8 x 32 tiles, slice-K by 8 groups of warps; slices of 128 in a ring of 3 for each group;
//          codes of i4 widened on their way to the tensor cores, sums scaled for every 128 of K
// traffic  34.9 MB moved, 34.9 MB ideal, 302.3 MB with products apart, 34.9 MB unfused in 1 launch
// floor    7.3 us at 4.8 TB/s; memory-bound at 30.80 flop/B
// rounding codes of w exactly, their sums scaled in f32 for every 128 of K; out to bf16 when stored;
//          f32 between
// needs    K=8192, N=8192; rows of all operands next to each other; x, w, out: address and strides in
//          multiples of 16 B

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
constexpr int tile_rows = 8, tile_cols = 32, tile_k = 128, stages = 3;
constexpr int split_k = 8, steps = 8;  // parts of K, and slices of each
constexpr int tiles_across = 256;
constexpr int scaled_k = 128;  // neighbours along K that share a scale
// elements from the start of a slice to the right factor, and to its end
constexpr int w_at = tile_rows * tile_k;
constexpr int w_words = tile_k * 4 / 16;
constexpr int slice_elements = w_at + tile_cols * w_words;
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

// N neighbouring sums in shared memory, added up over the 8 slice-K groups, always in this order
template <int N>
__device__ __forceinline__ Vec<float, N> gathered(const float* from) {
  Vec<float, N> total = {};
  #pragma unroll
  for (int group = 0; group < 8; ++group) {
    const Vec<float, N> part = load<N>(from + group * group_floats);
    #pragma unroll
    for (int j = 0; j < N; ++j) total.at[j] += part.at[j];
  }
  return total;
}

// sums += right^T left^T, 16 columns by 8 rows
__device__ __forceinline__ void multiply_add(
    float (&sums)[4], const unsigned (&right)[4], unsigned left_0, unsigned left_1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(right[0]), "r"(right[1]), "r"(right[2]), "r"(right[3]), "r"(left_0), "r"(left_1));
}

// a * b + c of both halves of a word, rounded once
__device__ __forceinline__ unsigned fused(unsigned a, unsigned b, unsigned c) {
  unsigned y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// a lane's 8 numbers of a row, in the pairs that codes come in
__device__ __forceinline__ void in_pairs(unsigned (&to)[4], const uint4& words) {
  to[0] = __byte_perm(words.x, words.z, 0x5410);
  to[1] = __byte_perm(words.x, words.z, 0x7632);
  to[2] = __byte_perm(words.y, words.w, 0x5410);
  to[3] = __byte_perm(words.y, words.w, 0x7632);
}

// 8 codes of i4 as pairs of bf16: 128 + 8 + the code, less 136
__device__ __forceinline__ void widen(unsigned (&pairs)[4], const unsigned (&words)[1], unsigned mask) {
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned nibbles = words[0] >> i * 4;
    pairs[i] = fused(nibbles & mask ^ 0x43084308u, 0x3f803f80u, 0xc308c308u);
  }
}

extern "C" __global__ void __launch_bounds__(256)
w4a16_gemm(
    const __nv_bfloat16* __restrict__ x_ptr,
    const unsigned char* __restrict__ w_ptr,
    const __nv_bfloat16* __restrict__ scale_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long w_ld,
    long long scale_ld,
    long long out_stride)
{
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int k_group = threadIdx.x / 32;  // slice-K: of 8 groups of warps
  const unsigned tile = blockIdx.x;
  const long long row0 = static_cast<long long>(tile / tiles_across) * tile_rows;
  const int across = tile % tiles_across;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  const int col0 = across * tile_cols;

  // the ring of 3 slices, and what the thread brings of each
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared) + k_group * (stages * slice_elements);
  const int x_m = lane / 16, x_k = lane % 16 * 8;
  const __nv_bfloat16* x_from = x_ptr + (row0 + x_m) * x_stride + k_group * tile_k + x_k;
  const int w_n = lane / 4, w_k = lane % 4 * 8;
  const unsigned short* w_from = reinterpret_cast<const unsigned short*>(w_ptr + (col0 + w_n) * w_ld) + k_group * w_words + w_k;  // 16 bits of codes each
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = own_address(ring_at + step % stages * slice_bytes);
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + place<16>(x_m + v * 2, x_k) * 2;
      copy_chunk<8>(to, x_from + v * 2 * x_stride, x_m + v * 2 < rows_here ? 8 : 0);
    }
    x_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned to = slice + (w_at + place<4>(w_n + v * 8, w_k)) * 2;
      copy_evict_first(to, w_from + (v * 8) * (w_ld / 2), 8);
    }
    w_from += split_k * w_words;
  };

  // 8 slices of 128, 32 of K at a time: a lane has 8 neighbours in K of each row, and 8 codes of two columns
  // of each fragment. They are loaded and widened one step ahead of their use, across slices too.
  // threadIdx.y is 0, and as good as unknown: of a constant ptxas keeps a copy in a register for each of its uses.
  // It is added: an XOR would become part of each use, and that two instructions in place of one
  const unsigned mask = 0x000f000fu + threadIdx.y;
  unsigned x_part[2][1][4];
  const int x_lane = k_group * (stages * slice_bytes) + place<16>(lane / 4, lane % 4 * 8) * 2;
  unsigned w_part[2][2][2][4];
  const int w_lane = k_group * (stages * slice_bytes) + (w_at + place<4>(lane / 4, lane % 4 / 4 * 8)) * 2 + lane % 4 * 4;
  float matmul_sums[2][1][4] = {};
  float matmul_sums_unscaled[2][1][4] = {};  // of the group of K at hand
  float w_scales[1][2][2];
  Vec<__nv_bfloat16, 1> w_scales_next[1][2][2];  // as they lie in memory
  const auto fetch_scales = [&](int step) {
    const int k_at = (step * split_k + k_group) * tile_k;
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int col = col0 + n * 16 + half * 8 + lane / 4;
        w_scales_next[0][n][half] = load<1>(scale_ptr + col * scale_ld + k_at / scaled_k);
      }
    }
  };
  const auto load_parts = [&](int step, int k, int buffer) {
    const unsigned char* const slice = shared + step % stages * slice_bytes;
    const uint4 row = *reinterpret_cast<const uint4*>(slice + (x_lane ^ k * 64));
    in_pairs(x_part[buffer][0], row);
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int column = 0; column < 2; ++column) {
        const unsigned char* const from = slice + (w_lane ^ k * 16) + (n * 2 + column) * (8 * w_words * 2);
        unsigned words[1];
        memcpy(words, __builtin_assume_aligned(from, 4), 4);
        widen(w_part[buffer][n][column], words, mask);
      }
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int i = 0; i < 4; i += 2) {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        const unsigned (&pairs)[2][4] = w_part[buffer][n];
        const unsigned columns[4] = {pairs[0][i], pairs[1][i], pairs[0][i + 1], pairs[1][i + 1]};
        multiply_add(matmul_sums_unscaled[n][0], columns, x_part[buffer][0][i], x_part[buffer][0][i + 1]);
      }
    }
  };
  const auto scale_sums = [&](int q) {
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        matmul_sums[n][0][i] += w_scales[q][n][i / 2] * matmul_sums_unscaled[n][0][i];
        matmul_sums_unscaled[n][0][i] = 0.0f;
      }
    }
  };

  #pragma unroll
  for (int s = 0; s < stages - 1; ++s) {
    copy_slice(s);
    commit_copies();
  }
  fetch_scales(0);
  wait_copies<stages - 2>();
  __syncwarp();
  load_parts(0, 0, 0);
  const auto take_slice = [&](int step, bool last) {
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        w_scales[0][n][half] = __bfloat162float(w_scales_next[0][n][half].at[0]);
      }
    }
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k < 3) {
        load_parts(step, k + 1, (k + 1) % 2);
      } else if (!last) {
        wait_copies<stages - 2>();
        __syncwarp();
        load_parts(step + 1, 0, 0);
      }
      if (k == 0 && !last) {
        fetch_scales(step + 1);
        if (step + stages - 1 < steps) copy_slice(step + stages - 1);
        commit_copies();
      }
      multiply(k % 2);
    }
    scale_sums(0);
  };
  #pragma unroll 1
  for (int step = 0; step < steps - 1; ++step) take_slice(step, false);
  take_slice(steps - 1, true);

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  __syncthreads();
  float* const matmul_shared = reinterpret_cast<float*>(shared);
  #pragma unroll
  for (int n = 0; n < 2; ++n) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int sum_row = lane % 4 * 2 + i % 2;
      const int sum_col = n * 16 + lane / 4 + i / 2 * 8;
      matmul_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = matmul_sums[n][0][i];
    }
  }
  __syncthreads();

  const int m = static_cast<int>(threadIdx.x / (tile_cols / 8));
  const int n = static_cast<int>(threadIdx.x % (tile_cols / 8)) * 8;
  const long long row = row0 + m;
  const int col = col0 + n;
  if (m < tile_rows && row < rows) {
    const Vec<float, 8> matmul_total = gathered<8>(matmul_shared + m * sums_stride + n);
    Vec<__nv_bfloat16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float matmul = matmul_total.at[j];
      out_vec.at[j] = __float2bfloat16_rn(matmul);
    }
    store<8>(out_ptr + row * out_stride + col, out_vec);
  }
}
