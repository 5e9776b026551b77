// kv8_attention_out_parts  bf16[B, G, R, D], f8e4m3[B, G, T, D], f8e4m3[B, G, T, D], f32[G, 1, 1], i32[B, 1, 1, 1] -> f32[16, B, G, R, D],
//   f32[16, B, G, R, 1], f32[16, B, G, R, 1]  at B=8 G=8 R=4 D=128 T=8192
// out_parts, top_parts, sum_of_exps_parts of kv8_attention.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// tile     16 queries a block of 2 warps, 2 for each 16, tiles of 32 keys, dealt to 16 blocks by turns,
//          the next tile in registers meanwhile; of keys behind the last that a block's rows need, none
//          are read; conditions are tested in tiles that an end cuts
// traffic  136.4 MB moved, 136.4 MB ideal, 153.2 MB with products apart, 589.5 MB unfused in 9 launches
// floor    28.4 us at 4.8 TB/s; memory-bound at 7.87 flop/B
// rounding e, before it is divided by its row's sum, to bf16 where it meets v_value; a value to bf16 by
//          an explicit cast; a value to bf16 by an explicit cast; f32 between
// needs    D=128, T=8192; rows of all operands next to each other; q, out_parts: address and strides in
//          multiples of 16 B; k, v_value: address and strides in multiples of 8 B
// launch   lets the next one begin once all its blocks run

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
constexpr int tile_rows = 16, tile_keys = 32, keys = 8192, threads = 64;
// warps that share 16 queries, and what each of them has: keys of a tile, and columns of the values
constexpr int beside = 2, warp_keys = 16, warp_columns = 64;
// blocks that share a row's keys, and from one tile of a block to its next
constexpr int parts = 16, next_tile = parts * tile_keys;
// elements from one line in shared memory to the next, an odd number of 16 bytes: what is read at once
// of 8 lines lies in different banks
constexpr int q_pitch = 136, k_pitch = 136, weights_pitch = 40;
constexpr int v_value_at = 4352, v_value_pitch = 136, stage_elements = 8704;  // of a tile's values, and to the next stage
constexpr int stage_bytes = 2 * stage_elements;
constexpr int q_at = 8704;
constexpr int weights_at = 10880, told_at = 23040;  // halves, and bytes
constexpr int sums_stride = 132;  // floats of a row of sums

// the nearest to `key` of the keys, or the end behind them
__device__ __forceinline__ int within_keys(long long key) {
  return key < 0 ? 0 : key < keys ? static_cast<int>(key) : keys;
}

// 8 numbers of 8 bits, all of them with one load where Width is 8; zeros where `count` is 0
template <int Width, typename T>
__device__ __forceinline__ Vec<unsigned, 2> load_codes(const T* from, int count) {
  Vec<unsigned, 2> words = {};
  if (count == 0) return words;
  if constexpr (Width == 8) return load<2>(reinterpret_cast<const unsigned*>(from));
  #pragma unroll
  for (int j = 0; j < 8; ++j) words.at[j / 4] |= static_cast<unsigned>(static_cast<unsigned char>(from[j])) << j % 4 * 8;
  return words;
}

// two numbers of 8 bits in the type of the factors, which has each of them
__device__ __forceinline__ unsigned widened_f8e4m3_pair(unsigned codes) {
  unsigned halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(codes)));
  float low, high;
  asm("cvt.f32.f16 %0, %1;" : "=f"(low) : "h"(static_cast<unsigned short>(halves)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(high) : "h"(static_cast<unsigned short>(halves >> 16)));
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}

// 8 numbers of 8 bits in the type of the factors
__device__ __forceinline__ Vec<__nv_bfloat16, 8> widened_f8e4m3(const Vec<unsigned, 2>& words) {
  Vec<unsigned, 4> pairs;
  #pragma unroll
  for (int i = 0; i < 4; ++i) pairs.at[i] = widened_f8e4m3_pair(words.at[i / 2] >> i % 2 * 16);
  return reinterpret_cast<const Vec<__nv_bfloat16, 8>&>(pairs);
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

extern "C" __global__ void __launch_bounds__(64)
kv8_attention_out_parts(
    const __nv_bfloat16* __restrict__ q_ptr,
    const unsigned char* __restrict__ k_ptr,
    const unsigned char* __restrict__ v_value_ptr,
    const float* __restrict__ k_scale_ptr,
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
    long long k_stride_B,
    long long k_stride_G,
    long long k_ld,
    long long v_value_stride_B,
    long long v_value_stride_G,
    long long v_value_ld,
    long long k_scale_stride_G,
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
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin, once all blocks of this one run
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32, side = threadIdx.x / 32 % beside;
  const int warp_row = threadIdx.x / 32 / beside * 16;  // the warp's first of the tile
  const int warp_key = side * warp_keys, warp_col = side * warp_columns;
  float* const told = reinterpret_cast<float*>(shared + told_at);
  const long long rows = R_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const long long axis0_at = blockIdx.x / tiles_down / G_size / B_size;
  const long long B_at = blockIdx.x / tiles_down / G_size % B_size;
  const long long G_at = blockIdx.x / tiles_down % G_size;
  const long long row0 = static_cast<long long>(blockIdx.x % tiles_down) * tile_rows;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;

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
  const int k_row = threadIdx.x / 16, k_col = threadIdx.x % 16 * 8;
  const unsigned char* const k_from = k_ptr + B_at * k_stride_B + G_at * k_stride_G + k_row * k_ld + k_col;
  const int v_value_row = threadIdx.x / 16, v_value_col = threadIdx.x % 16 * 8;
  const unsigned char* const v_value_from = v_value_ptr + B_at * v_value_stride_B + G_at * v_value_stride_G + v_value_row * v_value_ld
      + v_value_col;
  Vec<unsigned, 2> k_held[8];
  Vec<unsigned, 2> v_value_held[8];
  const auto fetch_tile = [&](int key0) {
    #pragma unroll
    for (int v = 0; v < 8; ++v) k_held[v] = load_codes<8>(k_from + (key0 + v * 4) * k_ld, 8);
    #pragma unroll
    for (int v = 0; v < 8; ++v) v_value_held[v] = load_codes<8>(v_value_from + (key0 + v * 4) * v_value_ld, 8);
  };
  const auto put_tile = [&](int stage) {
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      __nv_bfloat16* const to = ring + stage * stage_elements;
      store<8>(to + (k_row + v * 4) * k_pitch + k_col, widened_f8e4m3(k_held[v]));
    }
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      __nv_bfloat16* const to = ring + stage * stage_elements + v_value_at;
      store<8>(to + (v_value_row + v * 4) * v_value_pitch + v_value_col, widened_f8e4m3(v_value_held[v]));
    }
  };

  // the queries, which all tiles of keys are multiplied with
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    copy_chunk<8>(q_to + v * (4 * q_pitch * 2), q_from + v * 4 * q_stride_R, q_row + v * 4 < rows_here ? 8 : 0);
  }
  commit_copies();
  if (first_key < end_key) fetch_tile(first_key);

  // one value for all rows of the block
  const float k_scale = *(k_scale_ptr + G_at * k_scale_stride_G);
  const int length = *(length_ptr + B_at * length_stride_B);
  const float mul = k_scale * 0.088388346f;

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
  const unsigned k_lane = ring_at + ((warp_key + lane % 8 + lane / 16 * 8) * k_pitch + lane / 8 % 2 * 8) * 2;
  const unsigned v_value_lane = ring_at + (v_value_at + lane % 16 * v_value_pitch + warp_col + lane / 16 * 8) * 2;
  // where the lane puts its weights, and where it takes those of the warp's rows from
  __nv_bfloat16* const weights_to = ring + weights_at + (warp_row + lane / 4) * weights_pitch + warp_key + lane % 4 * 2;
  const unsigned weights_lane = ring_at + (weights_at + (warp_row + lane % 16) * weights_pitch + lane / 16 * 8) * 2;
  float matmul_from_length_sums[8][4] = {};

  for (int tile_key = first_key, tile = 0; tile_key < end_key; tile_key += next_tile, ++tile) {
    const int stage = tile % 1;
    put_tile(stage);
    __syncthreads();
    if (tile_key + next_tile < end_key) {  // the next tile, while this one is multiplied
      fetch_tile(tile_key + next_tile);
    }
    const int key0 = tile_key + warp_key;  // the warp's first

    // a warp's 16 queries times the warp's keys of the tile
    float matmul_sums[2][4] = {};
    #pragma unroll
    for (int k = 0; k < 8; ++k) {
      unsigned q_part[4];
      load_matrices(q_part, q_lane + k * 32);
      {
        unsigned k_part[4];
        load_matrices(k_part, k_lane + stage * stage_bytes + k * 32);
        multiply_add(matmul_sums[0], q_part, k_part[0], k_part[1]);
        multiply_add(matmul_sums[1], q_part, k_part[2], k_part[3]);
      }
    }

    // scores become logits, and the largest of a row is found among those of all lanes that share it
    float peaks[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) peaks[r] = largest[r];
    if (key0 + warp_keys <= free_end) {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float matmul = matmul_sums[n][i];
          const float scores = matmul * mul;
          matmul_sums[n][i] = scores;
          peaks[i / 2] = larger(peaks[i / 2], matmul_sums[n][i]);
        }
      }
    } else {
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int col_index = key0 + n * 8 + lane % 4 * 2 + i % 2;
          const float matmul = matmul_sums[n][i];
          const float scores = matmul * mul;
          const bool lt = col_index < length;
          const float where = lt ? scores : (-INFINITY);
          matmul_sums[n][i] = where;
          peaks[i / 2] = larger(peaks[i / 2], matmul_sums[n][i]);
        }
      }
    }
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      #pragma unroll
      for (int step = 1; step < 4; step *= 2) peaks[r] = larger(peaks[r], partner(peaks[r], step));
      if (lane % 4 == 0) told[side * tile_rows + warp_row + lane / 4 + r * 8] = peaks[r];
    }
    __syncthreads();

    // of all warps that share a row; what was summed so far shrinks by as much as the largest logit grew
    float shrinks[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      #pragma unroll
      for (int w = 0; w < beside; ++w) peaks[r] = larger(peaks[r], told[w * tile_rows + warp_row + lane / 4 + r * 8]);
      const float pivot = peaks[r] == -INFINITY ? 0.0f : peaks[r] * 1.44269504f;  // log2 of e, as powers are of 2
      shrinks[r] = largest[r] == -INFINITY ? 0.0f : power_of_2(pivots[r] - pivot);
      largest[r] = peaks[r];
      pivots[r] = pivot;
      summed[r] *= shrinks[r];
    }
    #pragma unroll
    for (int d = 0; d < 8; ++d) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) matmul_from_length_sums[d][i] *= shrinks[i / 2];
    }

    // logits become weights, which all warps that share the rows take
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float power = power_of_2(fmaf(matmul_sums[n][i], 1.44269504f, -pivots[i / 2]));
        summed[i / 2] += power;
        matmul_sums[n][i] = power;
      }
    }
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        *reinterpret_cast<unsigned*>(weights_to + r * 8 * weights_pitch
            + n * 8) = rounded_pair(matmul_sums[n][2 * r], matmul_sums[n][2 * r + 1]);
      }
    }
    __syncthreads();

    // weights times the warp's columns of the values
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      unsigned weights_part[4];
      load_matrices(weights_part, weights_lane + n * 32);
      #pragma unroll
      for (int d = 0; d < 4; ++d) {
        unsigned v_value_part[4];
        load_matrices_across(v_value_part,
            v_value_lane + stage * stage_bytes + n * (16 * v_value_pitch * 2) + d * 32);
        multiply_add(matmul_from_length_sums[2 * d], weights_part, v_value_part[0], v_value_part[1]);
        multiply_add(matmul_from_length_sums[2 * d + 1], weights_part, v_value_part[2], v_value_part[3]);
      }
    }
    __syncthreads();
  }

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  float* const row_sums = reinterpret_cast<float*>(shared);
  float* const row_largest = row_sums + tile_rows * sums_stride;
  float* const row_summed = row_largest + tile_rows;
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    #pragma unroll
    for (int step = 1; step < 4; step *= 2) summed[r] += partner(summed[r], step);
    if (lane % 4 == 0) told[side * tile_rows + warp_row + lane / 4 + r * 8] = summed[r];
  }
  __syncthreads();
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (lane % 4 == 0 && side == 0) row_largest[warp_row + lane / 4 + r * 8] = largest[r];
  }
  if (threadIdx.x < tile_rows) {
    float sum = 0.0f;
    for (int w = 0; w < beside; ++w) sum += told[w * tile_rows + threadIdx.x];
    row_summed[threadIdx.x] = sum;
  }

  #pragma unroll
  for (int d = 0; d < 8; ++d) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = warp_row + i / 2 % 2 * 8 + lane / 4;
      const int at = warp_col + d * 8 + lane % 4 * 2 + i % 2;
      row_sums[m * sums_stride + at] = matmul_from_length_sums[d][i];
    }
  }
  __syncthreads();
  #pragma unroll 2
  for (int v = 0; v < 4; ++v) {
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
