// grouped_mxfp4  bf16[T, K], u8[E, N, K_half], u8[E, N, K_half], f8e8m0[E, N, K_over_32], f8e8m0[E, N, K_over_32], bf16[E, N], bf16[E, N],
//   i32[E] -> bf16[T, N]  at T=32 K=2880 E=128 N=2880 K_half=1440 K_over_32=90
// (up + 1) * gate * sigmoid(1.702 * gate) of the token's expert, both kept within 7.
//
//     def grouped_mxfp4(x, w_gate, w_up, gate_scale, up_scale, gate_bias, up_bias, ends):
//         gate = F.grouped_matmul(x, F.dequantize(w_gate, gate_scale).mT, ends, gate_bias)
//         up = F.grouped_matmul(x, F.dequantize(w_up, up_scale).mT, ends, up_bias)
//         gate, up = F.minimum(gate, 7.0), F.minimum(F.maximum(up, -7.0), 7.0)
//         return (up + 1.0) * gate * F.sigmoid(1.702 * gate)
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// tile     8 x 32 tiles, slice-K by 2 groups of warps; slices of 64 in a ring of 3 for each group;
//          codes of f4e2m1 widened on their way to the tensor cores, sums scaled for every 32 of K;
//          each of rows of one of 128 groups
// traffic  283.9 MB moved, 283.9 MB ideal, 9557.9 MB with products apart, 1133.6 MB unfused in 10
//          launches
// floor    139.2 us at 2.039 TB/s; memory-bound at 3.74 flop/B
// rounding codes of w_gate exactly, their sums scaled in f32 for every 32 of K; codes of w_up exactly,
//          their sums scaled in f32 for every 32 of K; out to bf16 when stored; f32 between
// needs    K=2880, E=128, N=2880; rows of all operands next to each other; x, w_gate, w_up, gate_bias,
//          up_bias, out: address and strides in multiples of 16 B; gate_scale, up_scale: address and
//          strides in multiples of 2 B; gate_bias [E, N], up_bias [E, N] shared by rows of a group;
//          ends [E] shared by every row

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

// the larger of two; NaN wins
__device__ __forceinline__ float larger(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// the smaller of two; NaN wins
__device__ __forceinline__ float smaller(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
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

// the power of 2 that an f8e8m0 is: 0 is 2^-127, below a float's exponents, and what would be infinity NaN
__device__ __forceinline__ float f8e8m0_value(unsigned char x) {
  const float power = fmaxf(__uint_as_float(static_cast<unsigned>(x) << 23), 5.87747175e-39f);
  return fmaf(power, 0.0f, power);
}

// a block's tile, the slices of K that it takes one after another, and how many shared memory holds
constexpr int tile_rows = 8, tile_cols = 32, tile_k = 64, stages = 3;
constexpr int split_k = 2, steps = 23;  // parts of K, and slices of each
constexpr int tiles_across = 90;
constexpr int segments = 128;  // groups of rows
constexpr int full_k = 2880;
constexpr int scaled_k = 32;  // neighbours along K that share a scale
// elements from the start of a slice to the right factors, and to its end
constexpr int w_gate_at = tile_rows * tile_k;
constexpr int w_gate_words = tile_k * 4 / 16;
constexpr int w_up_at = w_gate_at + tile_cols * w_gate_words;
constexpr int w_up_words = tile_k * 4 / 16;
constexpr int slice_elements = w_up_at + tile_cols * w_up_words;
constexpr int slice_bytes = 2 * slice_elements;
// floats from a row of sums to the next: what a warp writes at once lies in different banks
constexpr int sums_stride = tile_cols + 4;
constexpr int group_floats = 2 * tile_rows * sums_stride;  // of a slice-K group's sums

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

// what a lane knows of its own 4 groups, which lie one behind the other
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
  for (int i = 0; i < 4; ++i) own.end = end_of(ends, lane * 4 + i, own.end, most);
  #pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = from_before(own.end, step);
    if (lane >= step && other > own.end) own.end = other;
  }
  const int others_end = from_before(own.end, 1);
  own.begin = lane > 0 ? others_end : 0;
  int begin = own.begin;
  #pragma unroll 2
  for (int i = 0; i < 4; ++i) {
    const int end = end_of(ends, lane * 4 + i, begin, most);
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
  for (int i = 0; i < 4; ++i) {
    const int next = end_of(ends, lane * 4 + i, begin, most);
    const unsigned behind = before + (static_cast<unsigned>(next - begin) + tile_rows - 1) / tile_rows;
    if (before <= number && number < behind) {
      group = lane * 4 + i;
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

// 8 codes of f4e2m1 as pairs of bf16: exponent and mantissa, times 2^126
__device__ __forceinline__ void widen(unsigned (&pairs)[4], const unsigned (&words)[1], unsigned mask) {
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned nibbles = words[0] >> i * 4;
    const unsigned size = nibbles << 6 & mask, sign = nibbles << 12 & 0x80008000u;
    pairs[i] = fused(size | sign, 0x7e807e80u, 0x80008000u);
  }
}

extern "C" __global__ void __launch_bounds__(64)
grouped_mxfp4(
    const __nv_bfloat16* __restrict__ x_ptr,
    const unsigned char* __restrict__ w_gate_ptr,
    const unsigned char* __restrict__ w_up_ptr,
    const unsigned char* __restrict__ gate_scale_ptr,
    const unsigned char* __restrict__ up_scale_ptr,
    const __nv_bfloat16* __restrict__ gate_bias_ptr,
    const __nv_bfloat16* __restrict__ up_bias_ptr,
    const int* __restrict__ ends_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
    long long rows,
    long long x_stride,
    long long w_gate_ld,
    long long w_gate_group,
    long long gate_scale_ld,
    long long gate_scale_group,
    long long w_up_ld,
    long long w_up_group,
    long long up_scale_ld,
    long long up_scale_group,
    long long gate_bias_group,
    long long up_bias_group,
    long long out_stride)
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
  const int x_m = lane / 8, x_k = lane % 8 * 8;
  const __nv_bfloat16* x_from = x_ptr + (row0 + x_m) * x_stride + k_group * tile_k + x_k;
  const int w_gate_n = lane / 2, w_gate_k = lane % 2 * 8;
  const unsigned short* w_gate_from = reinterpret_cast<const unsigned short*>(w_gate_ptr + segment * w_gate_group + (col0
      + w_gate_n) * w_gate_ld) + k_group * w_gate_words + w_gate_k;  // 16 bits of codes each
  const int w_up_n = lane / 2, w_up_k = lane % 2 * 8;
  const unsigned short* w_up_from = reinterpret_cast<const unsigned short*>(w_up_ptr + segment * w_up_group + (col0 + w_up_n) * w_up_ld)
      + k_group * w_up_words + w_up_k;  // 16 bits of codes each
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const auto copy_slice = [&](int step) {
    const unsigned slice = own_address(ring_at + step % stages * slice_bytes);
    const int k_at = (step * split_k + k_group) * tile_k;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      const unsigned to = slice + place<8>(x_m + v * 4, x_k) * 2;
      copy_chunk<8>(to, x_from + v * 4 * x_stride, x_m + v * 4 < rows_here && k_at + x_k < full_k ? 8 : 0);
    }
    x_from += split_k * tile_k;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      const unsigned to = slice + (w_gate_at + place<2>(w_gate_n + v * 16, w_gate_k)) * 2;
      copy_evict_first(to, w_gate_from + (v * 16) * (w_gate_ld / 2), k_at + w_gate_k * 4 < full_k ? 8 : 0);
    }
    w_gate_from += split_k * w_gate_words;
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      const unsigned to = slice + (w_up_at + place<2>(w_up_n + v * 16, w_up_k)) * 2;
      copy_evict_first(to, w_up_from + (v * 16) * (w_up_ld / 2), k_at + w_up_k * 4 < full_k ? 8 : 0);
    }
    w_up_from += split_k * w_up_words;
  };

  // 23 slices of 64, 32 of K at a time: a lane has 8 neighbours in K of each row, and 8 codes of two columns
  // of each fragment. They are loaded and widened one step ahead of their use, across slices too.
  // threadIdx.y is 0, and as good as unknown: of a constant ptxas keeps a copy in a register for each of its uses.
  // It is added: an XOR would become part of each use, and that two instructions in place of one
  const unsigned mask = 0x01c001c0u + threadIdx.y;
  unsigned x_part[2][1][4];
  const int x_lane = k_group * (stages * slice_bytes) + place<8>(lane / 4, lane % 4 * 8) * 2;
  unsigned w_gate_part[2][2][2][4];
  const int w_gate_lane = k_group * (stages * slice_bytes) + (w_gate_at + place<2>(lane / 4, lane % 4 / 4 * 8)) * 2 + lane % 4 * 4;
  float grouped_matmul_sums[2][1][4] = {};
  float grouped_matmul_sums_unscaled[2][1][4] = {};  // of the group of K at hand
  float w_gate_scales[2][2][2];
  unsigned short w_gate_scales_next[1][2][2];  // as they lie in memory
  unsigned w_up_part[2][2][2][4];
  const int w_up_lane = k_group * (stages * slice_bytes) + (w_up_at + place<2>(lane / 4, lane % 4 / 4 * 8)) * 2 + lane % 4 * 4;
  float grouped_matmul_from_x_sums[2][1][4] = {};
  float grouped_matmul_from_x_sums_unscaled[2][1][4] = {};  // of the group of K at hand
  float w_up_scales[2][2][2];
  unsigned short w_up_scales_next[1][2][2];  // as they lie in memory
  const auto fetch_scales = [&](int step) {
    const int k_at = (step * split_k + k_group) * tile_k;
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int col = col0 + n * 16 + half * 8 + lane / 4;
        w_gate_scales_next[0][n][half] = k_at < full_k ? *reinterpret_cast<const unsigned short*>(gate_scale_ptr
            + segment * gate_scale_group + col * gate_scale_ld + k_at / scaled_k) : 0u;
        w_up_scales_next[0][n][half] = k_at < full_k ? *reinterpret_cast<const unsigned short*>(up_scale_ptr + segment * up_scale_group
            + col * up_scale_ld + k_at / scaled_k) : 0u;
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
        const unsigned char* const from = slice + (w_gate_lane ^ k * 16) + (n * 2 + column) * (8 * w_gate_words * 2);
        unsigned words[1];
        memcpy(words, __builtin_assume_aligned(from, 4), 4);
        widen(w_gate_part[buffer][n][column], words, mask);
      }
    }
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int column = 0; column < 2; ++column) {
        const unsigned char* const from = slice + (w_up_lane ^ k * 16) + (n * 2 + column) * (8 * w_up_words * 2);
        unsigned words[1];
        memcpy(words, __builtin_assume_aligned(from, 4), 4);
        widen(w_up_part[buffer][n][column], words, mask);
      }
    }
  };
  const auto multiply = [&](int buffer) {
    #pragma unroll
    for (int i = 0; i < 4; i += 2) {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        const unsigned (&pairs)[2][4] = w_gate_part[buffer][n];
        const unsigned columns[4] = {pairs[0][i], pairs[1][i], pairs[0][i + 1], pairs[1][i + 1]};
        multiply_add(grouped_matmul_sums_unscaled[n][0], columns, x_part[buffer][0][i], x_part[buffer][0][i + 1]);
      }
    }
    #pragma unroll
    for (int i = 0; i < 4; i += 2) {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        const unsigned (&pairs)[2][4] = w_up_part[buffer][n];
        const unsigned columns[4] = {pairs[0][i], pairs[1][i], pairs[0][i + 1], pairs[1][i + 1]};
        multiply_add(grouped_matmul_from_x_sums_unscaled[n][0], columns, x_part[buffer][0][i], x_part[buffer][0][i + 1]);
      }
    }
  };
  const auto scale_sums = [&](int q) {
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        grouped_matmul_sums[n][0][i] += w_gate_scales[q][n][i / 2] * grouped_matmul_sums_unscaled[n][0][i];
        grouped_matmul_sums_unscaled[n][0][i] = 0.0f;
      }
    }
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        grouped_matmul_from_x_sums[n][0][i] += w_up_scales[q][n][i / 2] * grouped_matmul_from_x_sums_unscaled[n][0][i];
        grouped_matmul_from_x_sums_unscaled[n][0][i] = 0.0f;
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
    for (int q = 0; q < 2; ++q) {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
          w_gate_scales[q][n][half] = f8e8m0_value(static_cast<unsigned char>(w_gate_scales_next[q / 2][n][half] >> q % 2 * 8));
        }
      }
    }
    #pragma unroll
    for (int q = 0; q < 2; ++q) {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
          w_up_scales[q][n][half] = f8e8m0_value(static_cast<unsigned char>(w_up_scales_next[q / 2][n][half] >> q % 2 * 8));
        }
      }
    }
    #pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (k < 1) {
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
      scale_sums(k);
    }
  };
  #pragma unroll 1
  for (int step = 0; step < steps - 1; ++step) take_slice(step, false);
  take_slice(steps - 1, true);

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  __syncthreads();
  float* const grouped_matmul_shared = reinterpret_cast<float*>(shared);
  float* const grouped_matmul_from_x_shared = reinterpret_cast<float*>(shared) + tile_rows * sums_stride;
  #pragma unroll
  for (int n = 0; n < 2; ++n) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int sum_row = lane % 4 * 2 + i % 2;
      const int sum_col = n * 16 + lane / 4 + i / 2 * 8;
      grouped_matmul_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = grouped_matmul_sums[n][0][i];
      grouped_matmul_from_x_shared[k_group * group_floats + sum_row * sums_stride + sum_col] = grouped_matmul_from_x_sums[n][0][i];
    }
  }
  __syncthreads();

  const int m = static_cast<int>(threadIdx.x / (tile_cols / 8));
  const int n = static_cast<int>(threadIdx.x % (tile_cols / 8)) * 8;
  const long long row = row0 + m;
  const int col = col0 + n;
  if (m < tile_rows && m < rows_here) {
    const Vec<float, 8> grouped_matmul_total = gathered<8>(grouped_matmul_shared + m * sums_stride + n);
    const Vec<float, 8> grouped_matmul_from_x_total = gathered<8>(grouped_matmul_from_x_shared + m * sums_stride + n);
    const Vec<__nv_bfloat16, 8> gate_bias_vec = load<8>(gate_bias_ptr + segment * gate_bias_group + col);
    const Vec<__nv_bfloat16, 8> up_bias_vec = load<8>(up_bias_ptr + segment * up_bias_group + col);
    Vec<__nv_bfloat16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float grouped_matmul = of_group ? grouped_matmul_total.at[j] : 0.0f;
      const float grouped_matmul_from_x = of_group ? grouped_matmul_from_x_total.at[j] : 0.0f;
      const float gate_bias = of_group ? __bfloat162float(gate_bias_vec.at[j]) : 0.0f;
      const float up_bias = of_group ? __bfloat162float(up_bias_vec.at[j]) : 0.0f;
      const float add_group_rows = grouped_matmul + gate_bias;
      const float add_group_rows_from_x = grouped_matmul_from_x + up_bias;
      const float gate = smaller(add_group_rows, 7.0f);
      const float maximum = larger(add_group_rows_from_x, (-7.0f));
      const float up = smaller(maximum, 7.0f);
      const float add = up + 1.0f;
      const float add_times_gate = add * gate;
      const float mul_from_x = 1.702f * gate;
      const float sigmoid = reciprocal(1.0f + exponential(-mul_from_x));
      const float add_times_gate_times_sigmoid = add_times_gate * sigmoid;
      out_vec.at[j] = __float2bfloat16_rn(add_times_gate_times_sigmoid);
    }
    store<8>(out_ptr + row * out_stride + col, out_vec);
  }
}
