// qk_causal_softmax  bf16[B, H, S, D], bf16[B, H, T, D] -> bf16[B, H, S, T]  at B=1 H=32 S=2048 D=128 T=2048
// softmax(causal(query @ key^T / sqrt(D))): scores are made twice, and of masked tiles not at all.
//
//     def qk_causal_softmax(query, key):
//         return F.softmax(F.causal(query @ key.mT * D**-0.5))
//
// target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s, 312 TFLOP/s for products
// tile     128 queries a block of 8 warps, tiles of 128 keys twice, the next tile copied meanwhile;
//          where a mask leaves nothing of a tile, no score is made; conditions are tested in tiles that
//          an end cuts
// traffic  302.0 MB moved, 302.0 MB ideal, 838.9 MB with products apart, 2181.0 MB unfused in 4
//          launches
// floor    148.1 us at 2.039 TB/s; memory-bound at 56.92 flop/B
// rounding out to bf16 when stored; f32 between
// needs    D=128, T=2048; rows of all operands next to each other; query, key, out: address and strides
//          in multiples of 16 B

#include <cuda_bf16.h>

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

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
constexpr int tile_rows = 128, tile_keys = 128, keys = 2048;
// elements from one line in shared memory to the next, an odd number of 16 bytes: what is read at once
// of 8 lines lies in different banks
constexpr int query_pitch = 136, key_pitch = 136;
constexpr int stage_elements = 17408;  // from one tile to the next
constexpr int stage_bytes = 2 * stage_elements;
constexpr int query_at = 17408;

__device__ __forceinline__ long long least(long long a, long long b) {
  return a < b ? a : b;
}

__device__ __forceinline__ long long most(long long a, long long b) {
  return a > b ? a : b;
}

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

// sums += left right, 16 rows by 8 columns
__device__ __forceinline__ void multiply_add(
    float (&sums)[4], const unsigned (&left)[4], unsigned right_0, unsigned right_1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1));
}

extern "C" __global__ void __launch_bounds__(256)
qk_causal_softmax(
    const __nv_bfloat16* __restrict__ query_ptr,
    const __nv_bfloat16* __restrict__ key_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
    long long B_H_size,
    long long S_size,
    long long query_stride_B_H,
    long long query_stride_S,
    long long key_stride_B_H,
    long long key_ld,
    long long out_stride_B_H,
    long long out_stride_S)
{
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16;  // the warp's first of the tile
  const long long rows = S_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  const long long B_H_at = blockIdx.x / tiles_down;
  // the last rows first: they need the most keys
  const long long row0 = static_cast<long long>(tiles_down - 1 - blockIdx.x % tiles_down) * tile_rows;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;

  // what the mask leaves of a row's keys
  struct Ends { long long end, free_end; };
  const auto ends_of = [&](long long row) {
    const int last_value = static_cast<int>(row);
    return Ends{static_cast<long long>(last_value) + 1, static_cast<long long>(last_value) + 1};
  };
  const Ends top_ends = ends_of(row0), last_ends = ends_of(row0 + rows_here - 1);
  constexpr int first_key = 0;
  const int end_key = within_keys(most(top_ends.end, last_ends.end));
  const int free_end = within_keys(least(top_ends.free_end, last_ends.free_end));

  // what the thread brings of queries, and of each tile of keys
  __nv_bfloat16* const ring = reinterpret_cast<__nv_bfloat16*>(shared);
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  const int query_row = threadIdx.x / 16, query_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const query_from = query_ptr + B_H_at * query_stride_B_H + row0 * query_stride_S + query_row * query_stride_S
      + query_col;
  const unsigned query_to = ring_at + (query_at + query_row * query_pitch + query_col) * 2;
  const int key_row = threadIdx.x / 16, key_col = threadIdx.x % 16 * 8;
  const __nv_bfloat16* const key_from = key_ptr + B_H_at * key_stride_B_H + key_row * key_ld + key_col;
  const unsigned key_to = ring_at + (key_row * key_pitch + key_col) * 2;
  const auto copy_tile = [&](int key0, int stage) {
    #pragma unroll
    for (int v = 0; v < 8; ++v) {
      copy_chunk<8>(key_to + v * (16 * key_pitch * 2) + stage * stage_bytes, key_from + (key0 + v * 16) * key_ld, 8);
    }
    commit_copies();
  };

  // the queries, which all tiles of keys are multiplied with
  #pragma unroll
  for (int v = 0; v < 8; ++v) {
    copy_chunk<8>(query_to + v * (16 * query_pitch * 2), query_from + v * 16 * query_stride_S,
        query_row + v * 16 < rows_here ? 8 : 0);
  }
  if (first_key < end_key) copy_tile(first_key, 0);
  commit_copies();

  // for each row that the lane has elements of: the largest logit so far, and sums of exponentials against it
  float largest[2], pivots[2], summed[2];
  int last_value_here[2];
  float inverse_sum_here[2];
  float out_masked[2];
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = -INFINITY;
    pivots[r] = 0.0f;
    summed[r] = 0.0f;
    const int m = warp_row + lane / 4 + r * 8;
    const long long row = row0 + (m < rows_here ? m : rows_here - 1);
    const int last_value = static_cast<int>(row);
    last_value_here[r] = last_value;
  }
  wait_copies<0>();
  __syncthreads();
  const unsigned query_lane = ring_at + (query_at + (warp_row + lane % 16) * query_pitch + lane / 16 * 8) * 2;
  const unsigned key_lane = ring_at + ((lane % 8 + lane / 16 * 8) * key_pitch + lane / 8 % 2 * 8) * 2;
  unsigned query_part[8][4];
  #pragma unroll
  for (int k = 0; k < 8; ++k) load_matrices(query_part[k], query_lane + k * 32);

  // tiles of keys pass by twice: for each row's largest logit and sum of exponentials, and to be written
  const int tiles = end_key > first_key ? (end_key - first_key + tile_keys - 1) / tile_keys : 0;
  const auto key_of = [&](int tile) { return first_key + (tile < tiles ? tile : tile - tiles) * tile_keys; };
  const auto take_tile = [&](int tile) {
    wait_copies<0>();
    __syncthreads();
    if (tile + 1 < 2 * tiles) {  // the next one, while this one is multiplied
      copy_tile(key_of(tile + 1), (tile + 1) % 2);
    }
  };
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 2;
    const int key0 = key_of(tile);
    take_tile(tile);

    // a warp's 16 queries times the tile's keys
    float matmul_sums[16][4] = {};
    #pragma unroll
    for (int k = 0; k < 8; ++k) {
      #pragma unroll
      for (int n = 0; n < 16; n += 2) {
        unsigned key_part[4];
        load_matrices(key_part, key_lane + stage * stage_bytes + n * (8 * key_pitch * 2) + k * 32);
        multiply_add(matmul_sums[n], query_part[k], key_part[0], key_part[1]);
        multiply_add(matmul_sums[n + 1], query_part[k], key_part[2], key_part[3]);
      }
    }

    // scores become logits, and the largest of a row is found among those of all lanes that share it
    float peaks[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) peaks[r] = largest[r];
    if (key0 + tile_keys <= free_end) {
      #pragma unroll
      for (int n = 0; n < 16; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float matmul = matmul_sums[n][i];
          const float mul = matmul * 0.088388346f;
          matmul_sums[n][i] = mul;
          peaks[i / 2] = larger(peaks[i / 2], matmul_sums[n][i]);
        }
      }
    } else {
      #pragma unroll
      for (int n = 0; n < 16; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int col_index = key0 + n * 8 + lane % 4 * 2 + i % 2;
          const float matmul = matmul_sums[n][i];
          const int last_value = last_value_here[i / 2];
          const float mul = matmul * 0.088388346f;
          const bool keep = col_index <= last_value;
          const float causal = keep ? mul : (-INFINITY);
          matmul_sums[n][i] = causal;
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
    for (int n = 0; n < 16; ++n) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) summed[i / 2] += power_of_2(fmaf(matmul_sums[n][i], 1.44269504f, -pivots[i / 2]));
    }
  }

  // what results are made of beside their exponentials, one value a row
  __nv_bfloat16* out_rows[2];
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int m = warp_row + lane / 4 + r * 8;
    const bool inside = m < rows_here;
    const long long row = row0 + (inside ? m : rows_here - 1);
    #pragma unroll
    for (int step = 1; step < 4; step *= 2) summed[r] += partner(summed[r], step);
    const float sum_of_exps = summed[r];
    const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
    const float one_over_sum_of_exps = 1.0f / sum_of_exps;
    const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;
    inverse_sum_here[r] = inverse_sum;
    out_rows[r] = out_ptr + B_H_at * out_stride_B_H + row * out_stride_S;
    {  // where the mask leaves nothing of a tile
      const float e = power_of_2(fmaf(-INFINITY, 1.44269504f, -pivots[r]));
      const float softmax = e * inverse_sum;
      out_masked[r] = softmax;
    }
  }

  // columns that the mask leaves to none of the block's rows: no scores are made there
  const int last_key = first_key + tiles * tile_keys;
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int m = warp_row + lane / 4 + r * 8;
    if (m < rows_here) {
      const long long row = row0 + m;
      __nv_bfloat16* const out_row = out_ptr + B_H_at * out_stride_B_H + row * out_stride_S;
      Vec<__nv_bfloat16, 8> out_vec;
      #pragma unroll
      for (int j = 0; j < 8; ++j) out_vec.at[j] = __float2bfloat16_rn(out_masked[r]);
      for (int col = last_key + lane % 4 * 8; col < keys; col += 32) store<8>(out_row + col, out_vec);
    }
  }

  for (int tile = tiles; tile < 2 * tiles; ++tile) {
    const int stage = tile % 2;
    const int key0 = key_of(tile);
    take_tile(tile);

    // a warp's 16 queries times the tile's keys
    float matmul_sums[16][4] = {};
    #pragma unroll
    for (int k = 0; k < 8; ++k) {
      #pragma unroll
      for (int n = 0; n < 16; n += 2) {
        unsigned key_part[4];
        load_matrices(key_part, key_lane + stage * stage_bytes + n * (8 * key_pitch * 2) + k * 32);
        multiply_add(matmul_sums[n], query_part[k], key_part[0], key_part[1]);
        multiply_add(matmul_sums[n + 1], query_part[k], key_part[2], key_part[3]);
      }
    }
    if (key0 + tile_keys <= free_end) {
      #pragma unroll
      for (int n = 0; n < 16; ++n) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          const bool inside = warp_row + lane / 4 + r * 8 < rows_here;
          Vec<__nv_bfloat16, 2> out_vec;
          #pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int i = r * 2 + j;
            const float matmul = matmul_sums[n][i];
            const float mul = matmul * 0.088388346f;
            const float e = power_of_2(fmaf(mul, 1.44269504f, -pivots[i / 2]));
            const float inverse_sum = inverse_sum_here[i / 2];
            const float softmax = e * inverse_sum;
            out_vec.at[j] = __float2bfloat16_rn(softmax);
          }
          if (inside) store<2>(out_rows[r] + key0 + n * 8 + lane % 4 * 2, out_vec);
        }
      }
    } else {
      #pragma unroll
      for (int n = 0; n < 16; ++n) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          const bool inside = warp_row + lane / 4 + r * 8 < rows_here;
          Vec<__nv_bfloat16, 2> out_vec;
          #pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int i = r * 2 + j;
            const int col_index = key0 + n * 8 + lane % 4 * 2 + i % 2;
            const float matmul = matmul_sums[n][i];
            const int last_value = last_value_here[i / 2];
            const float mul = matmul * 0.088388346f;
            const bool keep = col_index <= last_value;
            const float causal = keep ? mul : (-INFINITY);
            const float e = power_of_2(fmaf(causal, 1.44269504f, -pivots[i / 2]));
            const float inverse_sum = inverse_sum_here[i / 2];
            const float softmax = e * inverse_sum;
            out_vec.at[j] = __float2bfloat16_rn(softmax);
          }
          if (inside) store<2>(out_rows[r] + key0 + n * 8 + lane % 4 * 2, out_vec);
        }
      }
    }
  }
}
