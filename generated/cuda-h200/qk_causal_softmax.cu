// qk_causal_softmax  bf16[B, H, S, D], bf16[B, H, T, D] -> bf16[B, H, S, T]  at B=1 H=32 S=2048 D=128 T=2048
// softmax(causal(query @ key^T / sqrt(D))): scores are made twice, and of masked tiles not at all.
//
//     def qk_causal_softmax(query, key):
//         return F.softmax(F.causal(query @ key.mT * D**-0.5))
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// tile     4 consumer warpgroups of 64 queries each, tiles of 128 keys twice, a producer 3 tiles ahead;
//          where a mask leaves nothing of a tile, no score is made, and zeros are stored; conditions
//          are tested in tiles that an end cuts
// traffic  302.0 MB moved, 302.0 MB ideal, 838.9 MB with products apart, 2181.0 MB unfused in 4
//          launches
// floor    62.9 us at 4.8 TB/s; memory-bound at 56.92 flop/B
// rounding out to bf16 when stored; f32 between
// needs    D=128, T=2048; rows of all operands next to each other; query, key, out: address and strides
//          in multiples of 16 B

#include <cuda_bf16.h>

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

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
constexpr int tile_rows = 256, tile_keys = 128, keys = 2048, stages = 3;
constexpr int warpgroup = 128;  // threads
// bytes of a line of shared memory, of 64 columns of a tile's lines, and of all of them
constexpr int line_bytes = 128;
constexpr int query_segment = tile_rows * line_bytes, key_segment = tile_keys * line_bytes;
constexpr int query_bytes = 2 * query_segment, key_bytes = 2 * key_segment;
constexpr int box_rows = 16;  // of what a warp stores at once, 64 columns each
constexpr int line_elements = 64, zero_bytes = box_rows * line_bytes;
// bytes from the queries, which come first, to what lies behind them
constexpr int keys_at = query_bytes, staging_at = keys_at + stages * key_bytes, zeros_at = 229376;
constexpr int barriers_at = 231424;

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

// how a tensor lies in memory, for tensor copies: written by the driver, read by the copy engine
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};

__device__ __forceinline__ void start_barrier(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// waits for the end of the phase with that parity
__device__ __forceinline__ void wait_at(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n"
      :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive_at(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// arrives, and lets the phase end when so many bytes are there as well
__device__ __forceinline__ void expect_bytes(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// the box of a tensor at x, y, z on its way to shared memory; beyond the tensor it is zeros
__device__ __forceinline__ void copy_box(unsigned to, const CUtensorMap& map, unsigned barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

// a box in shared memory on its way to the tensor's memory, which the L2 cache lets go of before others; what lies beyond
// the tensor is left out
__device__ __forceinline__ void store_box_evict_first(const CUtensorMap& map, unsigned from, int x, int y, int z) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;"
      :: "l"(&map), "r"(from), "r"(x), "r"(y), "r"(z), "l"(policy) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// waits until all but the last Pending boxes of this thread have been read
template <int Pending>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(Pending) : "memory");
}

// four matrices of 8 x 8 elements, each lane's pairs in registers, to the rows whose places the lanes give
__device__ __forceinline__ void store_matrices(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// two numbers, rounded, in one register
__device__ __forceinline__ unsigned rounded_pair_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}

// what wgmma needs to know of a matrix in shared memory: how it lies, and 18 bits of where
__device__ __forceinline__ unsigned long long describe(unsigned long long layout, unsigned address) {
  constexpr unsigned address_bits = 0x3ffff;
  return layout | (address & address_bits) >> 4;
}

// scores of 64 queries and 128 keys: queries @ keys^T, 16 along K, added or put in their place
__device__ __forceinline__ void multiply_scores(
    float (&sums)[64], unsigned long long left, unsigned long long right, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, add, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
        "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
        "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]),
        "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
        "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]),
        "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),
        "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]),
        "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]),
        "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]),
        "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),
        "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]),
        "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]),
        "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),
        "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63])
      : "l"(left), "l"(right), "r"(static_cast<int>(add)));
}

// no instruction, but what uses these registers stays behind it, or before it: the compiler doesn't know that wgmma reads
// and writes them meanwhile
template <int Count>
__device__ __forceinline__ void fence_floats(float (&held)[Count]) {
  #pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(held[i]) :: "memory");
}

extern "C" __global__ void __launch_bounds__(640, 1)
qk_causal_softmax(
    const __grid_constant__ CUtensorMap query_map,
    const __grid_constant__ CUtensorMap key_map,
    const __grid_constant__ CUtensorMap out_map,
    long long B_H_size,
    long long S_size)
{
  // the queries, 3 tiles of keys, what is stored, zeros, and barriers
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned queries = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const unsigned keys_ring = queries + keys_at;
  const unsigned queries_full = queries + barriers_at;
  const unsigned keys_full = queries_full + 8, keys_empty = keys_full + 8 * stages;
  const unsigned zeros = queries + zeros_at, zeros_stored = keys_empty + 8 * stages;
  if (threadIdx.x == 0) {
    start_barrier(queries_full, 1);
    for (int stage = 0; stage < stages; ++stage) {
      start_barrier(keys_full + 8 * stage, 1);
      start_barrier(keys_empty + 8 * stage, 16);  // warps that read the tile
    }
    start_barrier(zeros_stored, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x < warpgroup) {
    unsigned* const own_zeros = reinterpret_cast<unsigned*>(shared + zeros_at);
    for (int i = threadIdx.x; i < zero_bytes / 4; i += warpgroup) own_zeros[i] = 0;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine sees what was stored
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const long long rows = S_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  // 16 heads at a time, whose keys the L2 cache holds
  // the last rows of all of them first: they need the most keys
  const unsigned heads = static_cast<unsigned>(B_H_size);
  constexpr unsigned together = 16;
  const unsigned first_head = blockIdx.x / (together * tiles_down) * together;
  const unsigned heads_here = heads - first_head < together ? heads - first_head : together;
  const unsigned inside = blockIdx.x % (together * tiles_down);
  const long long B_H_at = first_head + inside % heads_here;
  const long long row0 = static_cast<long long>(tiles_down - 1 - inside / heads_here) * tile_rows;
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
  // tiles of keys, which pass by twice: for each row's largest logit and sum of exponentials, and to be written
  const int tiles = end_key > first_key ? (end_key - first_key + tile_keys - 1) / tile_keys : 0;
  const auto key_of = [&](int tile) { return first_key + (tile < tiles ? tile : tile - tiles) * tile_keys; };
  const int last_key = first_key + tiles * tile_keys;  // of the keys behind it, as before the first, no scores are made
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);  // warpgroup 0: the producer; the others: consumers

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x == 0) {
      expect_bytes(queries_full, query_bytes);
      copy_box(queries, query_map, queries_full, 0, static_cast<int>(row0), static_cast<int>(B_H_at));
      copy_box(queries + query_segment, query_map, queries_full, 64, static_cast<int>(row0), static_cast<int>(B_H_at));
      int zero_rows = 0;  // of the block's, that are done
      const auto store_zeros = [&](int rows_end) {
        for (; zero_rows < rows_end; zero_rows += box_rows) {
          for (int col = last_key; col < keys; col += line_elements) {
            store_box_evict_first(out_map, zeros, col, static_cast<int>(row0) + zero_rows, static_cast<int>(B_H_at));
          }
        }
      };
      for (int tile = 0; tile < 2 * tiles; ++tile) {
        const int stage = tile % stages;
        const int key0 = key_of(tile);
        wait_at(keys_empty + 8 * stage, tile / stages % 2 ^ 1);  // the parity of an empty ring
        expect_bytes(keys_full + 8 * stage, key_bytes);
        copy_box(keys_ring + stage * key_bytes, key_map, keys_full + 8 * stage, 0, key0, static_cast<int>(B_H_at));
        copy_box(keys_ring + stage * key_bytes + key_segment, key_map, keys_full + 8 * stage, 64, key0, static_cast<int>(B_H_at));
        // while nothing else is stored
        if (tile < tiles) store_zeros(static_cast<int>(static_cast<long long>(rows_here) * (tile + 1) / tiles));
      }
      store_zeros(rows_here);
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // they are in memory
      arrive_at(zeros_stored);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    const int own = role - 1;  // which of the consumers this is
    const int warp_row = own * 64 + threadIdx.x / 32 % 4 * 16;  // the warp's first row of the tile
    // fields of wgmma's matrix descriptor (PTX ISA, "Matrix Descriptor Format"), distances in units of 16 bytes
    constexpr unsigned long long swizzle_128 = 1ull << 62;  // pieces of 16 bytes are XOR-swizzled by their line's number
    constexpr unsigned long long eight_lines = 1024ull / 16 << 32;  // from 8 lines to the next 8
    const unsigned long long own_queries = describe(swizzle_128 | eight_lines, queries + own * 64 * line_bytes);
    const unsigned long long keys_lie = describe(swizzle_128 | eight_lines, keys_ring);

    // for each of the thread's two rows, of its own keys: the largest logit so far, and a sum of exponentials
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
    float matmul_sums[64];  // of 64 queries and the tile's keys: queries @ keys^T

    // the scores of a tile of keys; its place is free again then
    const auto multiply_keys = [&](int tile) {
      const int stage = tile % stages;
      wait_at(keys_full + 8 * stage, tile / stages % 2);
      fence_floats(matmul_sums);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      #pragma unroll
      for (int k = 0; k < 8; ++k) {
        multiply_scores(
            matmul_sums, own_queries + k / 4 * (query_segment / 16) + k % 4 * 2,
            keys_lie + stage * (key_bytes / 16) + k / 4 * (key_segment / 16) + k % 4 * 2, k != 0);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      fence_floats(matmul_sums);
      if (lane == 0) arrive_at(keys_empty + 8 * stage);
    };

    wait_at(queries_full, 0);
    for (int tile = 0; tile < tiles; ++tile) {
      const int key0 = key_of(tile);
      multiply_keys(tile);
      float peaks[2][2] = { {largest[0], -INFINITY}, {largest[1], -INFINITY} };
      if (key0 + tile_keys <= free_end) {
        #pragma unroll
        for (int i = 0; i < 64; ++i) {
          peaks[i / 2 % 2][i % 2] = larger(peaks[i / 2 % 2][i % 2], matmul_sums[i]);
        }
      } else {
        #pragma unroll
        for (int i = 0; i < 64; ++i) {
          const int col_index = key0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
          const float matmul = matmul_sums[i];
          const int last_value = last_value_here[i / 2 % 2];
          const bool keep = col_index <= last_value;
          const float causal = keep ? matmul : (-INFINITY);
          matmul_sums[i] = causal;
          peaks[i / 2 % 2][i % 2] = larger(peaks[i / 2 % 2][i % 2], matmul_sums[i]);
        }
      }
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float peak = larger(peaks[r][0], peaks[r][1]);
        const float pivot = peak == -INFINITY ? 0.0f : peak * 0.12751743f;
        // what was summed so far shrinks by as much as the largest logit grew
        summed[r] *= largest[r] == -INFINITY ? 0.0f : power_of_2(pivots[r] - pivot);
        largest[r] = peak;
        pivots[r] = pivot;
      }
      float others[2] = {};  // of every other column: two chains of additions
      #pragma unroll
      for (int i = 0; i < 64; ++i) {
        const float power = power_of_2(fmaf(matmul_sums[i], 0.12751743f, -pivots[i / 2 % 2]));
        if (i % 2 == 0) {
          summed[i / 2 % 2] += power;
        } else {
          others[i / 2 % 2] += power;
        }
      }
      #pragma unroll
      for (int r = 0; r < 2; ++r) summed[r] += others[r];
    }

    // what four lanes have of a row becomes one
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      float peak = largest[r];
      #pragma unroll
      for (int step = 1; step < 4; step *= 2) peak = larger(peak, __shfl_xor_sync(0xffffffffu, peak, step));
      const float pivot = peak == -INFINITY ? 0.0f : peak * 0.12751743f;
      summed[r] = largest[r] == -INFINITY ? 0.0f : summed[r] * power_of_2(pivots[r] - pivot);
      #pragma unroll
      for (int step = 1; step < 4; step *= 2) summed[r] += __shfl_xor_sync(0xffffffffu, summed[r], step);
      largest[r] = peak;
      pivots[r] = pivot;
    }
    // what results are made of beside their exponentials
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum_of_exps = summed[r];
      const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
      const float one_over_sum_of_exps = 1.0f / sum_of_exps;
      const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;
      inverse_sum_here[r] = inverse_sum;
      {  // where the mask leaves nothing of a tile
        const float e = power_of_2(fmaf(-INFINITY, 0.12751743f, -pivots[r]));
        const float softmax = e * inverse_sum;
        out_masked[r] = softmax;
      }
    }

    const unsigned out_staging = queries + staging_at + warp_row * (tile_keys / 64 * line_bytes);  // the warp's part
    for (int tile = tiles; tile < 2 * tiles; ++tile) {
      const int key0 = key_of(tile);
      multiply_keys(tile);
      if (lane == 0) wait_stores<0>();  // the last tile's boxes have been read
      __syncwarp();
      if (key0 + tile_keys <= free_end) {
        #pragma unroll
        for (int n = 0; n < tile_keys / 8; n += 2) {  // of 16 columns, four pairs: two rows' first 8, then their last 8
          unsigned out_words[4];
          #pragma unroll
          for (int pair = 0; pair < 4; ++pair) {
            float out_pair[2];
            #pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int i = n * 4 + pair * 2 + j;
              const float matmul = matmul_sums[i];
              const float e = power_of_2(fmaf(matmul, 0.12751743f, -pivots[i / 2 % 2]));
              const float inverse_sum = inverse_sum_here[i / 2 % 2];
              const float softmax = e * inverse_sum;
              out_pair[j] = softmax;
            }
            out_words[pair] = rounded_pair_bf16(out_pair[0], out_pair[1]);
          }
          // 16 bytes of a line lie where its number swizzles them (XOR)
          const unsigned out_to = out_staging + n / 8 * (box_rows * line_bytes) + lane % 16 * line_bytes;
          store_matrices(
              out_to + (((n % 8 + lane / 16) ^ lane % 8) << 4), out_words[0], out_words[1], out_words[2], out_words[3]);
        }
      } else {
        #pragma unroll
        for (int n = 0; n < tile_keys / 8; n += 2) {  // of 16 columns, four pairs: two rows' first 8, then their last 8
          unsigned out_words[4];
          #pragma unroll
          for (int pair = 0; pair < 4; ++pair) {
            float out_pair[2];
            #pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int i = n * 4 + pair * 2 + j;
              const int col_index = key0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
              const float matmul = matmul_sums[i];
              const int last_value = last_value_here[i / 2 % 2];
              const bool keep = col_index <= last_value;
              const float causal = keep ? matmul : (-INFINITY);
              const float e = power_of_2(fmaf(causal, 0.12751743f, -pivots[i / 2 % 2]));
              const float inverse_sum = inverse_sum_here[i / 2 % 2];
              const float softmax = e * inverse_sum;
              out_pair[j] = softmax;
            }
            out_words[pair] = rounded_pair_bf16(out_pair[0], out_pair[1]);
          }
          // 16 bytes of a line lie where its number swizzles them (XOR)
          const unsigned out_to = out_staging + n / 8 * (box_rows * line_bytes) + lane % 16 * line_bytes;
          store_matrices(
              out_to + (((n % 8 + lane / 16) ^ lane % 8) << 4), out_words[0], out_words[1], out_words[2], out_words[3]);
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine sees what was stored
      __syncwarp();
      if (lane == 0 && warp_row < rows_here) {
        store_box_evict_first(out_map, out_staging, key0, static_cast<int>(row0) + warp_row, static_cast<int>(B_H_at));
        store_box_evict_first(out_map, out_staging + 1 * box_rows * line_bytes, key0 + 64, static_cast<int>(row0)
            + warp_row, static_cast<int>(B_H_at));
      }
    }

    // rows that hold something else than zeros where the mask leaves nothing of a tile, NaN as a rule
    if (__any_sync(0xffffffffu, !(out_masked[0] == 0.0f && out_masked[1] == 0.0f))) {
      if (lane == 0) wait_stores<0>();
      __syncwarp();
      unsigned out_words[2];
      #pragma unroll
      for (int r = 0; r < 2; ++r) out_words[r] = rounded_pair_bf16(out_masked[r], out_masked[r]);
      #pragma unroll
      for (int n = 0; n < 8; n += 2) {
        store_matrices(
            out_staging + lane % 16 * line_bytes + (n + lane / 16) * 16,
            out_words[0], out_words[1], out_words[0], out_words[1]);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0 && warp_row < rows_here) {
        wait_at(zeros_stored, 0);
        for (int col = last_key; col < keys; col += line_elements) {
          store_box_evict_first(out_map, out_staging, col, static_cast<int>(row0) + warp_row, static_cast<int>(B_H_at));
        }
      }
    }
    if (lane == 0) wait_stores<0>();
  }
}
