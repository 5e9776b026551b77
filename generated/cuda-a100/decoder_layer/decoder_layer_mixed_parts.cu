// decoder_layer_mixed_parts  i32[B, 1, 1, 1], bf16[B, H, G, E], bf16[B, H, T, E], bf16[B, H, T, E] -> f32[2, B, H, G, E], f32[2, B, H, G,
//   1], f32[2, B, H, G, 1]  at B=8 H=8 G=4 E=128 T=2048
// mixed_parts, top_parts, sum_of_exps_parts of decoder_layer.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// views    queries is turned as [B, H, G, E]; keys_part is keys as [B, H, T, E]; values_part is values
//          as [B, H, T, E]
// tile     16 queries a block of 1 warps, tiles of 64 keys, dealt to 2 blocks by turns, the next tile
//          copied meanwhile; of keys behind the last that a block's rows need, none are read;
//          conditions are tested in tiles that an end cuts
// traffic  67.4 MB moved, 67.4 MB ideal, 71.6 MB with products apart, 75.9 MB unfused in 6 launches
// floor    33.1 us at 2.039 TB/s; memory-bound at 3.98 flop/B
// rounding e, before it is divided by its row's sum, to bf16 where it meets values_part; f32 between
// needs    E=128, T=2048; rows of all operands next to each other; queries, keys_part, values_part,
//          mixed_parts: address and strides in multiples of 16 B

#include <cuda_bf16.h>

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

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

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// queries of a block, keys of a tile, and all keys
constexpr int tile_rows = 16, tile_keys = 64, keys = 2048, threads = 32;
// blocks that share a row's keys, and from one tile of a block to its next
constexpr int parts = 2, next_tile = parts * tile_keys;
// elements from one line in shared memory to the next, an odd number of 16 bytes: what is read at once
// of 8 lines lies in different banks
constexpr int queries_pitch = 136, keys_part_pitch = 136, values_part_pitch = 136;
constexpr int values_part_at = 8704, stage_elements = 17408;  // of a tile's values, and to the next stage
constexpr int stage_bytes = 2 * stage_elements;
constexpr int queries_at = 17408;
constexpr int sums_stride = 132;  // floats of a row of sums

// the nearest to `key` of the keys, or the end behind them
__device__ __forceinline__ int within_keys(long long key) {
  return key < 0 ? 0 : key < keys ? static_cast<int>(key) : keys;
}

// 8 elements on their way from global to shared memory, Width with each copy; zeros where `count` is 0
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

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// four matrices of 8 x 16 bytes, from the rows whose places the lanes give
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// the same, transposed on the way
__device__ __forceinline__ void load_matrices_across(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// two numbers, rounded, in one register
__device__ __forceinline__ unsigned rounded_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}

// sums += left right, 16 rows by 8 columns
__device__ __forceinline__ void multiply_add(
    float (&sums)[4], const unsigned (&left)[4], unsigned right_0, unsigned right_1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1));
}

extern "C" __global__ void __launch_bounds__(32)
decoder_layer_mixed_parts(
    const int* __restrict__ position_ptr,
    const __nv_bfloat16* __restrict__ queries_ptr,
    const __nv_bfloat16* __restrict__ keys_part_ptr,
    const __nv_bfloat16* __restrict__ values_part_ptr,
    float* __restrict__ mixed_parts_ptr,
    float* __restrict__ top_parts_ptr,
    float* __restrict__ sum_of_exps_parts_ptr,
    long long axis0_size,
    long long B_size,
    long long H_size,
    long long G_size,
    long long queries_stride_B,
    long long queries_stride_H,
    long long queries_stride_G,
    long long keys_part_stride_B,
    long long keys_part_stride_H,
    long long keys_part_ld,
    long long values_part_stride_B,
    long long values_part_stride_H,
    long long values_part_ld,
    long long position_stride_B,
    long long mixed_parts_stride_axis0,
    long long mixed_parts_stride_B,
    long long mixed_parts_stride_H,
    long long mixed_parts_stride_G,
    long long top_parts_stride_axis0,
    long long top_parts_stride_B,
    long long top_parts_stride_H,
    long long top_parts_stride_G,
    long long sum_of_exps_parts_stride_axis0,
    long long sum_of_exps_parts_stride_B,
    long long sum_of_exps_parts_stride_H,
    long long sum_of_exps_parts_stride_G)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16;  // the warp's first of the tile
  const long long rows = G_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const long long axis0_at = blockIdx.x / tiles_down / H_size / B_size;
  const long long B_at = blockIdx.x / tiles_down / H_size % B_size;
  const long long H_at = blockIdx.x / tiles_down % H_size;
  const long long row0 = static_cast<long long>(blockIdx.x % tiles_down) * tile_rows;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;

  // what the mask leaves of a row's keys
  struct Ends { long long end, free_end; };
  const auto ends_of = [&]() {
    const int position = *(position_ptr + B_at * position_stride_B);
    return Ends{static_cast<long long>(position) + 1, static_cast<long long>(position) + 1};
  };
  const Ends ends = ends_of();
  // tiles are dealt to parts by turns: the first one is the part's own, or the next of its turns
  const int first_key = static_cast<int>(axis0_at) * tile_keys;
  const int end_key = within_keys(ends.end);
  const int free_end = within_keys(ends.free_end);

  // what the thread brings of queries, and of each tile of keys and values
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared);
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const int queries_row = threadIdx.x / 16, queries_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const queries_from = queries_ptr + B_at * queries_stride_B + H_at * queries_stride_H + row0 * queries_stride_G
      + queries_row * queries_stride_G + queries_col;
  const unsigned queries_to = ring_at + (queries_at + queries_row * queries_pitch + queries_col) * 2;
  const int keys_part_row = threadIdx.x / 16, keys_part_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const keys_part_from = keys_part_ptr + B_at * keys_part_stride_B + H_at * keys_part_stride_H
      + keys_part_row * keys_part_ld + keys_part_col;
  const unsigned keys_part_to = ring_at + (keys_part_row * keys_part_pitch + keys_part_col) * 2;
  const int values_part_row = threadIdx.x / 16, values_part_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const values_part_from = values_part_ptr + B_at * values_part_stride_B + H_at * values_part_stride_H
      + values_part_row * values_part_ld + values_part_col;
  const unsigned values_part_to = ring_at + (values_part_at + values_part_row * values_part_pitch + values_part_col) * 2;
  const auto copy_tile = [&](int key0, int stage) {
    #pragma unroll
    for (int v = 0; v < 32; ++v) {
      copy_chunk<8>(keys_part_to + v * (2 * keys_part_pitch * 2) + stage * stage_bytes,
          keys_part_from + (key0 + v * 2) * keys_part_ld, 8);
    }
    #pragma unroll
    for (int v = 0; v < 32; ++v) {
      copy_chunk<8>(values_part_to + v * (2 * values_part_pitch * 2) + stage * stage_bytes,
          values_part_from + (key0 + v * 2) * values_part_ld, 8);
    }
    commit_copies();
  };

  // the queries, which all tiles of keys are multiplied with
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    copy_chunk<8>(queries_to + v * (2 * queries_pitch * 2), queries_from + v * 2 * queries_stride_G,
        queries_row + v * 2 < rows_here ? 8 : 0);
  }
  if (first_key < end_key) copy_tile(first_key, 0);
  commit_copies();

  // one value for all rows of the block
  const int position = *(position_ptr + B_at * position_stride_B);

  // for each row that the lane has elements of: the largest logit so far, and sums of exponentials against it
  float largest[2], pivots[2], summed[2];
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = -INFINITY;
    pivots[r] = 0.0f;
    summed[r] = 0.0f;
  }
  wait_copies<0>();
  __syncthreads();
  const unsigned queries_lane = ring_at + (queries_at + (warp_row + lane % 16) * queries_pitch + lane / 16 * 8) * 2;
  const unsigned keys_part_lane = ring_at + ((lane % 8 + lane / 16 * 8) * keys_part_pitch + lane / 8 % 2 * 8) * 2;
  const unsigned values_part_lane = ring_at + (values_part_at + lane % 16 * values_part_pitch + lane / 16 * 8) * 2;
  unsigned queries_part[8][4];
  #pragma unroll
  for (int k = 0; k < 8; ++k) load_matrices(queries_part[k], queries_lane + k * 32);
  float e_times_values_part_sums[16][4] = {};

  for (int key0 = first_key, tile = 0; key0 < end_key; key0 += next_tile, ++tile) {
    const int stage = tile % 2;
    wait_copies<0>();
    __syncthreads();
    if (key0 + next_tile < end_key) {  // the next tile, while this one is multiplied
      copy_tile(key0 + next_tile, (tile + 1) % 2);
    }

    // a warp's 16 queries times the tile's keys
    float matmul_sums[8][4] = {};
    #pragma unroll
    for (int k = 0; k < 8; ++k) {
      #pragma unroll
      for (int n = 0; n < 8; n += 2) {
        unsigned keys_part_part[4];
        load_matrices(keys_part_part,
            keys_part_lane + stage * stage_bytes + n * (8 * keys_part_pitch * 2) + k * 32);
        multiply_add(matmul_sums[n], queries_part[k], keys_part_part[0], keys_part_part[1]);
        multiply_add(matmul_sums[n + 1], queries_part[k], keys_part_part[2], keys_part_part[3]);
      }
    }

    // scores become logits, and the largest of a row is found among those of all lanes that share it
    float peaks[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) peaks[r] = largest[r];
    if (key0 + tile_keys <= free_end) {
      #pragma unroll
      for (int n = 0; n < 8; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float matmul = matmul_sums[n][i];
          const float scores = matmul * 0.088388346f;
          matmul_sums[n][i] = scores;
          peaks[i / 2] = larger(peaks[i / 2], matmul_sums[n][i]);
        }
      }
    } else {
      #pragma unroll
      for (int n = 0; n < 8; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int col_index = key0 + n * 8 + lane % 4 * 2 + i % 2;
          const float matmul = matmul_sums[n][i];
          const float scores = matmul * 0.088388346f;
          const bool le = col_index <= position;
          const float where = le ? scores : (-INFINITY);
          matmul_sums[n][i] = where;
          peaks[i / 2] = larger(peaks[i / 2], matmul_sums[n][i]);
        }
      }
    }

    // what was summed so far shrinks by as much as the largest logit grew
    float shrinks[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      #pragma unroll
      for (int step = 1; step < 4; step *= 2) peaks[r] = larger(peaks[r], partner(peaks[r], step));
      const float pivot = peaks[r] == -INFINITY ? 0.0f : peaks[r] * 1.44269504f;  // log2 of e, as powers are of 2
      shrinks[r] = largest[r] == -INFINITY ? 0.0f : power_of_2(pivots[r] - pivot);
      largest[r] = peaks[r];
      pivots[r] = pivot;
      summed[r] *= shrinks[r];
    }
    #pragma unroll
    for (int d = 0; d < 16; ++d) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) e_times_values_part_sums[d][i] *= shrinks[i / 2];
    }

    // logits become weights
    #pragma unroll
    for (int n = 0; n < 8; ++n) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float power = power_of_2(fmaf(matmul_sums[n][i], 1.44269504f, -pivots[i / 2]));
        summed[i / 2] += power;
        matmul_sums[n][i] = power;
      }
    }

    // weights times values: a lane holds of the weights what it multiplies
    #pragma unroll
    for (int n = 0; n < 4; ++n) {
      const unsigned rounded[4] = {
          rounded_pair(matmul_sums[2 * n][0], matmul_sums[2 * n][1]),
          rounded_pair(matmul_sums[2 * n][2], matmul_sums[2 * n][3]),
          rounded_pair(matmul_sums[2 * n + 1][0], matmul_sums[2 * n + 1][1]),
          rounded_pair(matmul_sums[2 * n + 1][2], matmul_sums[2 * n + 1][3])};
      #pragma unroll
      for (int d = 0; d < 8; ++d) {
        unsigned values_part_part[4];
        load_matrices_across(values_part_part,
            values_part_lane + stage * stage_bytes + n * (16 * values_part_pitch * 2) + d * 32);
        multiply_add(e_times_values_part_sums[2 * d], rounded, values_part_part[0], values_part_part[1]);
        multiply_add(e_times_values_part_sums[2 * d + 1], rounded, values_part_part[2], values_part_part[3]);
      }
    }
  }

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  float* const row_sums = reinterpret_cast<float*>(shared);
  float* const row_largest = row_sums + tile_rows * sums_stride;
  float* const row_summed = row_largest + tile_rows;
  __syncthreads();
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int m = warp_row + lane / 4 + r * 8;
    #pragma unroll
    for (int step = 1; step < 4; step *= 2) summed[r] += partner(summed[r], step);
    if (lane % 4 == 0) {
      row_largest[m] = largest[r];
      row_summed[m] = summed[r];
    }
  }
  #pragma unroll
  for (int d = 0; d < 16; ++d) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = warp_row + i / 2 % 2 * 8 + lane / 4;
      row_sums[m * sums_stride + d * 8 + lane % 4 * 2 + i % 2] = e_times_values_part_sums[d][i];
    }
  }
  __syncthreads();

  #pragma unroll 2
  for (int v = 0; v < 8; ++v) {
    const int m = static_cast<int>((v * threads + threadIdx.x) / 16);
    const int col = static_cast<int>((v * threads + threadIdx.x) % 16) * 8;
    if (m < rows_here) {
      const long long row = row0 + m;
      const float top = row_largest[m];
      const float sum_of_exps = row_summed[m];
      if (col == 0) *(top_parts_ptr + axis0_at * top_parts_stride_axis0 + B_at * top_parts_stride_B + H_at * top_parts_stride_H
          + row * top_parts_stride_G) = top;
      if (col == 0) *(sum_of_exps_parts_ptr + axis0_at * sum_of_exps_parts_stride_axis0 + B_at * sum_of_exps_parts_stride_B
          + H_at * sum_of_exps_parts_stride_H + row * sum_of_exps_parts_stride_G) = sum_of_exps;
      Vec<float, 8> mixed_parts_vec;
      const Vec<float, 8> e_times_values_part_total = load<8>(row_sums + m * sums_stride + col);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float e_times_values_part = e_times_values_part_total.at[j];
        mixed_parts_vec.at[j] = e_times_values_part;
      }
      store<8>(mixed_parts_ptr + axis0_at * mixed_parts_stride_axis0 + B_at * mixed_parts_stride_B + H_at * mixed_parts_stride_H
          + row * mixed_parts_stride_G + col, mixed_parts_vec);
    }
  }
}
