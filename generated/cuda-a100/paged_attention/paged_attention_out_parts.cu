// paged_attention_out_parts  bf16[B, G, R, D], bf16[N, 1, G, L, D], bf16[N, 1, G, L, D], i32[B, 1, 1, P], i32[B, 1, 1, 1] -> f32[6, B, G,
//   R, D], f32[6, B, G, R, 1], f32[6, B, G, R, 1]  at B=8 G=8 R=4 D=128 N=8192 L=16 P=512 L_times_P=8192
// out_parts, top_parts, sum_of_exps_parts of paged_attention.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// views    key_cache is key_cache as [N, 1, G, L, D]; value_cache is value_cache as [N, 1, G, L, D]
// looks up pages of key_cache at table, 0 where there is none; pages of value_cache at table, 0 where
//          there is none
// tile     16 queries a block of 1 warps, tiles of 64 keys, dealt to 6 blocks by turns, the next tile
//          copied meanwhile; of keys behind the last that a block's rows need, none are read;
//          conditions are tested in tiles that an end cuts
// traffic  269.3 MB moved, 269.3 MB ideal, 286.1 MB with products apart, 571.5 MB unfused in 8 launches
// floor    132.1 us at 2.039 TB/s; memory-bound at 3.99 flop/B
// rounding e, before it is divided by its row's sum, to bf16 where it meets value_cache; f32 between
// needs    D=128, L=16, L_times_P=8192; rows of all operands next to each other; q, key_cache,
//          value_cache, out_parts: address and strides in multiples of 16 B

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
constexpr int tile_rows = 16, tile_keys = 64, keys = 8192, threads = 32;
// blocks that share a row's keys, and from one tile of a block to its next
constexpr int parts = 6, next_tile = parts * tile_keys;
// elements from one line in shared memory to the next, an odd number of 16 bytes: what is read at once
// of 8 lines lies in different banks
constexpr int q_pitch = 136, key_cache_pitch = 136, value_cache_pitch = 136;
constexpr int value_cache_at = 8704, stage_elements = 17408;  // of a tile's values, and to the next stage
constexpr int stage_bytes = 2 * stage_elements;
constexpr int q_at = 17408;
constexpr int sums_stride = 132;  // floats of a row of sums
constexpr int key_cache_page_rows = 16;  // of a page of key_cache
constexpr int value_cache_page_rows = 16;  // of a page of value_cache

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
paged_attention_out_parts(
    const __nv_bfloat16* __restrict__ q_ptr,
    const __nv_bfloat16* __restrict__ key_cache_ptr,
    const __nv_bfloat16* __restrict__ value_cache_ptr,
    const int* __restrict__ table_ptr,
    const int* __restrict__ length_ptr,
    float* __restrict__ out_parts_ptr,
    float* __restrict__ top_parts_ptr,
    float* __restrict__ sum_of_exps_parts_ptr,
    long long axis0_size,
    long long B_size,
    long long G_size,
    long long R_size,
    long long q_stride_B,
    long long q_stride_G,
    long long q_stride_R,
    long long key_cache_stride_G,
    long long key_cache_count,
    long long key_cache_stride_page,
    long long key_cache_ld,
    long long value_cache_stride_G,
    long long value_cache_count,
    long long value_cache_stride_page,
    long long value_cache_ld,
    long long table_stride_B,
    long long length_stride_B,
    long long out_parts_stride_axis0,
    long long out_parts_stride_B,
    long long out_parts_stride_G,
    long long out_parts_stride_R,
    long long top_parts_stride_axis0,
    long long top_parts_stride_B,
    long long top_parts_stride_G,
    long long top_parts_stride_R,
    long long sum_of_exps_parts_stride_axis0,
    long long sum_of_exps_parts_stride_B,
    long long sum_of_exps_parts_stride_G,
    long long sum_of_exps_parts_stride_R)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16;  // the warp's first of the tile
  const long long rows = R_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const long long axis0_at = blockIdx.x / tiles_down / G_size / B_size;
  const long long B_at = blockIdx.x / tiles_down / G_size % B_size;
  const long long G_at = blockIdx.x / tiles_down % G_size;
  const long long row0 = static_cast<long long>(blockIdx.x % tiles_down) * tile_rows;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;
  const int* const table_here = table_ptr + B_at * table_stride_B;

  // what the mask leaves of a row's keys
  struct Ends { long long end, free_end; };
  const auto ends_of = [&]() {
    const int length = *(length_ptr + B_at * length_stride_B);
    return Ends{static_cast<long long>(length), static_cast<long long>(length)};
  };
  const Ends ends = ends_of();
  // tiles are dealt to parts by turns: the first one is the part's own, or the next of its turns
  const int first_key = static_cast<int>(axis0_at) * tile_keys;
  const int end_key = within_keys(ends.end);
  const int free_end = within_keys(ends.free_end);

  // what the thread brings of queries, and of each tile of keys and values
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared);
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const int q_row = threadIdx.x / 16, q_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const q_from = q_ptr + B_at * q_stride_B + G_at * q_stride_G + row0 * q_stride_R + q_row * q_stride_R + q_col;
  const unsigned q_to = ring_at + (q_at + q_row * q_pitch + q_col) * 2;
  const int key_cache_row = threadIdx.x / 16, key_cache_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const key_cache_from = key_cache_ptr + G_at * key_cache_stride_G + key_cache_col;
  const unsigned key_cache_to = ring_at + (key_cache_row * key_cache_pitch + key_cache_col) * 2;
  const int value_cache_row = threadIdx.x / 16, value_cache_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const value_cache_from = value_cache_ptr + G_at * value_cache_stride_G + value_cache_col;
  const unsigned value_cache_to = ring_at + (value_cache_at + value_cache_row * value_cache_pitch + value_cache_col) * 2;
  const auto copy_tile = [&](int key0, int stage) {
    #pragma unroll
    for (int v = 0; v < 32; ++v) {
      const int key_cache_key = key0 + key_cache_row + v * 2;
      const int key_cache_page = table_here[key_cache_key / key_cache_page_rows];
      const bool key_cache_there = key_cache_page >= 0 && key_cache_page < key_cache_count;
      copy_chunk<8>(key_cache_to + v * (2 * key_cache_pitch * 2) + stage * stage_bytes,
          key_cache_from + (key_cache_there ? key_cache_page : 0) * key_cache_stride_page
              + key_cache_key % key_cache_page_rows * key_cache_ld, key_cache_there ? 8 : 0);
    }
    #pragma unroll
    for (int v = 0; v < 32; ++v) {
      const int value_cache_key = key0 + value_cache_row + v * 2;
      const int value_cache_page = table_here[value_cache_key / value_cache_page_rows];
      const bool value_cache_there = value_cache_page >= 0 && value_cache_page < value_cache_count;
      copy_chunk<8>(value_cache_to + v * (2 * value_cache_pitch * 2) + stage * stage_bytes,
          value_cache_from + (value_cache_there ? value_cache_page : 0) * value_cache_stride_page
              + value_cache_key % value_cache_page_rows * value_cache_ld, value_cache_there ? 8 : 0);
    }
    commit_copies();
  };

  // the queries, which all tiles of keys are multiplied with
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    copy_chunk<8>(q_to + v * (2 * q_pitch * 2), q_from + v * 2 * q_stride_R, q_row + v * 2 < rows_here ? 8 : 0);
  }
  if (first_key < end_key) copy_tile(first_key, 0);
  commit_copies();

  // one value for all rows of the block
  const int length = *(length_ptr + B_at * length_stride_B);

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
  const unsigned q_lane = ring_at + (q_at + (warp_row + lane % 16) * q_pitch + lane / 16 * 8) * 2;
  const unsigned key_cache_lane = ring_at + ((lane % 8 + lane / 16 * 8) * key_cache_pitch + lane / 8 % 2 * 8) * 2;
  const unsigned value_cache_lane = ring_at + (value_cache_at + lane % 16 * value_cache_pitch + lane / 16 * 8) * 2;
  unsigned q_part[8][4];
  #pragma unroll
  for (int k = 0; k < 8; ++k) load_matrices(q_part[k], q_lane + k * 32);
  float matmul_from_length_sums[16][4] = {};

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
        unsigned key_cache_part[4];
        load_matrices(key_cache_part,
            key_cache_lane + stage * stage_bytes + n * (8 * key_cache_pitch * 2) + k * 32);
        multiply_add(matmul_sums[n], q_part[k], key_cache_part[0], key_cache_part[1]);
        multiply_add(matmul_sums[n + 1], q_part[k], key_cache_part[2], key_cache_part[3]);
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
          const bool lt = col_index < length;
          const float where = lt ? scores : (-INFINITY);
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
      for (int i = 0; i < 4; ++i) matmul_from_length_sums[d][i] *= shrinks[i / 2];
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
        unsigned value_cache_part[4];
        load_matrices_across(value_cache_part,
            value_cache_lane + stage * stage_bytes + n * (16 * value_cache_pitch * 2) + d * 32);
        multiply_add(matmul_from_length_sums[2 * d], rounded, value_cache_part[0], value_cache_part[1]);
        multiply_add(matmul_from_length_sums[2 * d + 1], rounded, value_cache_part[2], value_cache_part[3]);
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
      row_sums[m * sums_stride + d * 8 + lane % 4 * 2 + i % 2] = matmul_from_length_sums[d][i];
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
      if (col == 0) *(top_parts_ptr + axis0_at * top_parts_stride_axis0 + B_at * top_parts_stride_B + G_at * top_parts_stride_G
          + row * top_parts_stride_R) = top;
      if (col == 0) *(sum_of_exps_parts_ptr + axis0_at * sum_of_exps_parts_stride_axis0 + B_at * sum_of_exps_parts_stride_B
          + G_at * sum_of_exps_parts_stride_G + row * sum_of_exps_parts_stride_R) = sum_of_exps;
      Vec<float, 8> out_parts_vec;
      const Vec<float, 8> matmul_from_length_total = load<8>(row_sums + m * sums_stride + col);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float matmul_from_length = matmul_from_length_total.at[j];
        out_parts_vec.at[j] = matmul_from_length;
      }
      store<8>(out_parts_ptr + axis0_at * out_parts_stride_axis0 + B_at * out_parts_stride_B + G_at * out_parts_stride_G
          + row * out_parts_stride_R + col, out_parts_vec);
    }
  }
}
