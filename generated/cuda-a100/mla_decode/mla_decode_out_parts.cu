// mla_decode_out_parts  bf16[B, H, D], bf16[B, T, D], bf16[B, T, E], i32[B, 1, 1] -> f32[6, B, H, E], f32[6, B, H, 1], f32[6, B, H, 1]  at
//   B=8 H=128 D=576 T=8192 E=512
// out_parts, top_parts, sum_of_exps_parts of mla_decode.
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// views    kv_offset_0 is kv[..., :E]
// tile     64 queries a block of 8 warps, 2 for each 16, tiles of 32 keys, dealt to 6 blocks by turns,
//          whose first columns are the values, the next tile copied meanwhile; of keys behind the last
//          that a block's rows need, none are read; conditions are tested in tiles that an end cuts
// traffic  89.3 MB moved, 89.3 MB ideal, 223.5 MB with products apart, 290.8 MB unfused in 6 launches
// floor    58.5 us at 312 TFLOP/s for products; compute-bound at 204.39 flop/B
// rounding e, before it is divided by its row's sum, to bf16 where it meets kv_offset_0; f32 between
// needs    D=576, T=8192, E=512; rows of all operands next to each other; q, kv, out_parts: address and
//          strides in multiples of 16 B; kv_offset_0: the first columns of kv's rows, where they are
//          read

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
constexpr int tile_rows = 64, tile_keys = 32, keys = 8192, threads = 256;
// warps that share 16 queries, and what each of them has: keys of a tile, and columns of the values
constexpr int beside = 2, warp_keys = 16, warp_columns = 256;
// blocks that share a row's keys, and from one tile of a block to its next
constexpr int parts = 6, next_tile = parts * tile_keys;
constexpr int q_chunks = 72, kv_chunks = 72;  // 16 bytes each, of a line
// elements from one line in shared memory to the next, an odd number of 16 bytes: what is read at once
// of 8 lines lies in different banks
constexpr int q_pitch = 584, kv_pitch = 584, weights_pitch = 40;
constexpr int kv_offset_0_at = 0, kv_offset_0_pitch = kv_pitch, stage_elements = 18688;  // values are columns of keys; and to the next stage
constexpr int stage_bytes = 2 * stage_elements;
constexpr int q_at = 37376;
constexpr int weights_at = 74752, told_at = 154624;  // halves, and bytes
// columns of sums in shared memory at a time, and floats of a row of them
constexpr int columns_at_once = 128, sums_stride = 132;

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

extern "C" __global__ void __launch_bounds__(256)
mla_decode_out_parts(
    const __nv_bfloat16* __restrict__ q_ptr,
    const __nv_bfloat16* __restrict__ kv_ptr,
    const __nv_bfloat16* __restrict__ kv_offset_0_ptr,
    const int* __restrict__ length_ptr,
    float* __restrict__ out_parts_ptr,
    float* __restrict__ top_parts_ptr,
    float* __restrict__ sum_of_exps_parts_ptr,
    long long axis0_size,
    long long B_size,
    long long H_size,
    long long q_stride_B,
    long long q_stride_H,
    long long kv_stride_B,
    long long kv_ld,
    long long length_stride_B,
    long long out_parts_stride_axis0,
    long long out_parts_stride_B,
    long long out_parts_stride_H,
    long long top_parts_stride_axis0,
    long long top_parts_stride_B,
    long long top_parts_stride_H,
    long long sum_of_exps_parts_stride_axis0,
    long long sum_of_exps_parts_stride_B,
    long long sum_of_exps_parts_stride_H)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32, side = threadIdx.x / 32 % beside;
  const int warp_row = threadIdx.x / 32 / beside * 16;  // the warp's first of the tile
  const int warp_key = side * warp_keys, warp_col = side * warp_columns;
  float* const told = reinterpret_cast<float*>(shared + told_at);
  const long long rows = H_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const long long axis0_at = blockIdx.x / tiles_down / B_size;
  const long long B_at = blockIdx.x / tiles_down % B_size;
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
  const __nv_bfloat16* const q_from = q_ptr + B_at * q_stride_B + row0 * q_stride_H;
  const __nv_bfloat16* const kv_from = kv_ptr + B_at * kv_stride_B;
  const auto copy_tile = [&](int key0, int stage) {
    #pragma unroll
    for (int v = 0; v < 9; ++v) {
      const int chunk = v * threads + threadIdx.x, line = chunk / kv_chunks, at = chunk % kv_chunks * 8;
      copy_chunk<8>(ring_at + (line * kv_pitch + at) * 2 + stage * stage_bytes, kv_from + (key0 + line) * kv_ld + at,
          8);
    }
    commit_copies();
  };

  // the queries, which all tiles of keys are multiplied with
  #pragma unroll
  for (int v = 0; v < 18; ++v) {
    const int chunk = v * threads + threadIdx.x, line = chunk / q_chunks, at = chunk % q_chunks * 8;
    copy_chunk<8>(ring_at + (q_at + line * q_pitch + at) * 2, q_from + line * q_stride_H + at,
        line < rows_here ? 8 : 0);
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
  const unsigned kv_lane = ring_at + ((warp_key + lane % 8 + lane / 16 * 8) * kv_pitch + lane / 8 % 2 * 8) * 2;
  const unsigned kv_offset_0_lane = ring_at + (kv_offset_0_at + lane % 16 * kv_offset_0_pitch + warp_col + lane / 16 * 8) * 2;
  // where the lane puts its weights, and where it takes those of the warp's rows from
  __nv_bfloat16* const weights_to = ring + weights_at + (warp_row + lane / 4) * weights_pitch + warp_key + lane % 4 * 2;
  const unsigned weights_lane = ring_at + (weights_at + (warp_row + lane % 16) * weights_pitch + lane / 16 * 8) * 2;
  float e_times_kv_offset_0_sums[32][4] = {};

  for (int tile_key = first_key, tile = 0; tile_key < end_key; tile_key += next_tile, ++tile) {
    const int stage = tile % 2;
    wait_copies<0>();
    __syncthreads();
    if (tile_key + next_tile < end_key) {  // the next tile, while this one is multiplied
      copy_tile(tile_key + next_tile, (tile + 1) % 2);
    }
    const int key0 = tile_key + warp_key;  // the warp's first

    // a warp's 16 queries times the warp's keys of the tile
    float matmul_sums[2][4] = {};
    #pragma unroll
    for (int k = 0; k < 36; ++k) {
      unsigned q_part[4];
      load_matrices(q_part, q_lane + k * 32);
      {
        unsigned kv_part[4];
        load_matrices(kv_part, kv_lane + stage * stage_bytes + k * 32);
        multiply_add(matmul_sums[0], q_part, kv_part[0], kv_part[1]);
        multiply_add(matmul_sums[1], q_part, kv_part[2], kv_part[3]);
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
          const float scores = matmul * 0.07216878f;
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
          const float scores = matmul * 0.07216878f;
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
    for (int d = 0; d < 32; ++d) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) e_times_kv_offset_0_sums[d][i] *= shrinks[i / 2];
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
      for (int d = 0; d < 16; ++d) {
        unsigned kv_offset_0_part[4];
        load_matrices_across(kv_offset_0_part,
            kv_offset_0_lane + stage * stage_bytes + n * (16 * kv_offset_0_pitch * 2) + d * 32);
        multiply_add(e_times_kv_offset_0_sums[2 * d], weights_part, kv_offset_0_part[0], kv_offset_0_part[1]);
        multiply_add(e_times_kv_offset_0_sums[2 * d + 1], weights_part, kv_offset_0_part[2], kv_offset_0_part[3]);
      }
    }
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

  for (int first_col = 0; first_col < 512; first_col += columns_at_once) {
    #pragma unroll
    for (int d = 0; d < 32; ++d) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = warp_row + i / 2 % 2 * 8 + lane / 4;
        const int at = warp_col + d * 8 + lane % 4 * 2 + i % 2 - first_col;
        if (at >= 0 && at < columns_at_once) row_sums[m * sums_stride + at] = e_times_kv_offset_0_sums[d][i];
      }
    }
    __syncthreads();
    #pragma unroll 2
    for (int v = 0; v < 4; ++v) {
      const int m = static_cast<int>((v * threads + threadIdx.x) / 16);
      const int col = first_col + static_cast<int>((v * threads + threadIdx.x) % 16) * 8;
      if (m < rows_here) {
        const long long row = row0 + m;
        const float top = row_largest[m];
        const float sum_of_exps = row_summed[m];
        if (col == 0) *(top_parts_ptr + axis0_at * top_parts_stride_axis0 + B_at * top_parts_stride_B + row * top_parts_stride_H) = top;
        if (col == 0) *(sum_of_exps_parts_ptr + axis0_at * sum_of_exps_parts_stride_axis0 + B_at * sum_of_exps_parts_stride_B
            + row * sum_of_exps_parts_stride_H) = sum_of_exps;
        Vec<float, 8> out_parts_vec;
        const Vec<float, 8> e_times_kv_offset_0_total = load<8>(row_sums + m * sums_stride + col - first_col);
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float e_times_kv_offset_0 = e_times_kv_offset_0_total.at[j];
          out_parts_vec.at[j] = e_times_kv_offset_0;
        }
        store<8>(out_parts_ptr + axis0_at * out_parts_stride_axis0 + B_at * out_parts_stride_B + row * out_parts_stride_H
            + col, out_parts_vec);
      }
    }
    __syncthreads();
  }
}
