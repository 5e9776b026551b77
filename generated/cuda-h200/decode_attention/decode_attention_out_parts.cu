// decode_attention_out_parts  bf16[B, G, R, D], bf16[B, G, T, D], bf16[B, G, T, D], i32[B, 1, 1, 1] -> f32[4, B, G, R, D], f32[4, B, G, R,
//   1], f32[4, B, G, R, 1]  at B=8 G=8 R=4 D=128 T=8192
// out_parts, top_parts, sum_of_exps_parts of decode_attention.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// tile     1 consumer warpgroup of 64 queries, tiles of 128 keys, dealt to 4 blocks by turns, a
//          producer 2 tiles ahead; of keys behind the last that a block's rows need, none are read;
//          conditions are tested in tiles that an end cuts
// traffic  269.0 MB moved, 269.0 MB ideal, 285.8 MB with products apart, 302.7 MB unfused in 6 launches
// floor    56.0 us at 4.8 TB/s; memory-bound at 3.99 flop/B
// rounding e, before it is divided by its row's sum, to bf16 where it meets v; f32 between
// needs    D=128, T=8192; rows of all operands next to each other; q, k, v, out_parts: address and
//          strides in multiples of 16 B
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
constexpr int tile_rows = 64, tile_keys = 128, keys = 8192, stages = 2;
// blocks that share a row's keys, and from one tile of a block to its next
constexpr int parts = 4, next_tile = parts * tile_keys;
constexpr int warpgroup = 128;  // threads
// bytes of a line of shared memory, of 64 columns of a tile's lines, and of all of them
constexpr int line_bytes = 128;
constexpr int query_segment = tile_rows * line_bytes, key_segment = tile_keys * line_bytes;
constexpr int value_segment = tile_keys * line_bytes;
constexpr int query_bytes = 2 * query_segment, key_bytes = 2 * key_segment;
constexpr int value_bytes = 2 * value_segment;
// bytes from the queries, which come first, to the keys, the values, and what lies behind them
constexpr int keys_at = query_bytes, values_at = keys_at + stages * key_bytes;
constexpr int barriers_at = 147456;

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

// the box of a tensor at x, y, z, w on its way to shared memory; beyond the tensor it is zeros
__device__ __forceinline__ void copy_box(unsigned to, const CUtensorMap& map, unsigned barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
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

// sums of 64 queries and 128 columns += weights @ values, 16 keys; weights come from registers
__device__ __forceinline__ void multiply_weights(
    float (&sums)[64], const unsigned (&left)[4], unsigned long long right) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n"
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
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
}

// no instruction, but what uses these registers stays behind it, or before it: the compiler doesn't know that wgmma reads
// and writes them meanwhile
template <int Count>
__device__ __forceinline__ void fence_floats(float (&held)[Count]) {
  #pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(held[i]) :: "memory");
}

template <int Count>
__device__ __forceinline__ void fence_words(unsigned (&held)[Count]) {
  #pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(held[i]) :: "memory");
}

extern "C" __global__ void __launch_bounds__(256, 1)
decode_attention_out_parts(
    const __grid_constant__ CUtensorMap q_map,
    const __grid_constant__ CUtensorMap k_map,
    const __grid_constant__ CUtensorMap v_map,
    const int* __restrict__ length_ptr,
    float* __restrict__ out_parts_ptr,
    float* __restrict__ top_parts_ptr,
    float* __restrict__ sum_of_exps_parts_ptr,
    long long axis0_size,
    long long B_size,
    long long G_size,
    long long R_size,
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
  // the queries, 2 tiles of keys and of values, and the barriers that tell when they are there and when their place is free
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned queries = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const unsigned keys_ring = queries + keys_at, values_ring = queries + values_at;
  const unsigned queries_full = queries + barriers_at;
  const unsigned keys_full = queries_full + 8, keys_empty = keys_full + 8 * stages;
  const unsigned values_full = keys_empty + 8 * stages, values_empty = values_full + 8 * stages;
  if (threadIdx.x == 0) {
    start_barrier(queries_full, 1);
    for (int stage = 0; stage < stages; ++stage) {
      start_barrier(keys_full + 8 * stage, 1);
      start_barrier(keys_empty + 8 * stage, 4);  // warps that read the tile
      start_barrier(values_full + 8 * stage, 1);
      start_barrier(values_empty + 8 * stage, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
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
  const int tiles = end_key > first_key ? (end_key - first_key + next_tile - 1) / next_tile : 0;  // of keys
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);  // warpgroup 0: the producer; the others: consumers

  if (role == 0) {
    if (threadIdx.x == 0) {
      expect_bytes(queries_full, query_bytes);
      copy_box(queries, q_map, queries_full, 0, static_cast<int>(row0), static_cast<int>(G_at), static_cast<int>(B_at));
      copy_box(queries + query_segment, q_map, queries_full, 64, static_cast<int>(row0), static_cast<int>(G_at), static_cast<int>(B_at));
      for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % stages;
        const unsigned parity = tile / stages % 2 ^ 1;  // of an empty ring
        const int key0 = first_key + tile * next_tile;
        wait_at(keys_empty + 8 * stage, parity);
        expect_bytes(keys_full + 8 * stage, key_bytes);
        copy_box(keys_ring + stage * key_bytes, k_map, keys_full + 8 * stage, 0, key0, static_cast<int>(G_at), static_cast<int>(B_at));
        copy_box(keys_ring + stage * key_bytes + key_segment, k_map, keys_full
            + 8 * stage, 64, key0, static_cast<int>(G_at), static_cast<int>(B_at));
        wait_at(values_empty + 8 * stage, parity);
        expect_bytes(values_full + 8 * stage, value_bytes);
        copy_box(values_ring + stage * value_bytes, v_map, values_full
            + 8 * stage, 0, key0, static_cast<int>(G_at), static_cast<int>(B_at));
        copy_box(values_ring + stage * value_bytes + value_segment, v_map, values_full
            + 8 * stage, 64, key0, static_cast<int>(G_at), static_cast<int>(B_at));
      }
    }
  } else {
    const int own = role - 1;  // which of the consumers this is
    const int warp_row = own * 64 + threadIdx.x / 32 % 4 * 16;  // the warp's first row of the tile
    // fields of wgmma's matrix descriptor (PTX ISA, "Matrix Descriptor Format"), distances in units of 16 bytes
    constexpr unsigned long long swizzle_128 = 1ull << 62;  // pieces of 16 bytes are XOR-swizzled by their line's number
    constexpr unsigned long long eight_lines = 1024ull / 16 << 32;  // from 8 lines to the next 8
    constexpr unsigned long long segments = value_segment / 16ull << 16;  // from 64 elements of a line to the next 64
    const unsigned long long own_queries = describe(swizzle_128 | eight_lines, queries + own * 64 * line_bytes);
    const unsigned long long keys_lie = describe(swizzle_128 | eight_lines, keys_ring);
    const unsigned long long values_lie = describe(swizzle_128 | eight_lines | segments, values_ring);

    // one value for all rows of the block
    const int length = *(length_ptr + B_at * length_stride_B);

    // for each of the thread's two rows: the largest logit so far, and sums of exponentials against it
    float largest[2], pivots[2], summed[2], shrinks[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = -INFINITY;
      pivots[r] = 0.0f;
      summed[r] = 0.0f;
    }
    float matmul_sums[64];  // of 64 queries and the tile's keys: queries @ keys^T, then logits, then weights
    unsigned weights[32];  // rounded, two in a register: as wgmma takes them
    float e_times_v_sums[64] = {};  // weights @ values

    // asks for the scores of a tile of keys
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
    };

    // adds weights @ values
    const auto multiply_values = [&](int tile) {
      const int stage = tile % stages;
      wait_at(values_full + 8 * stage, tile / stages % 2);
      fence_floats(e_times_v_sums);
      fence_words(weights);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      #pragma unroll
      for (int k = 0; k < tile_keys / 16; ++k) {
        multiply_weights(
            e_times_v_sums, reinterpret_cast<const unsigned (&)[4]>(weights[k * 4]),
            values_lie + stage * (value_bytes / 16) + k * (16 * line_bytes / 16));
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    };

    // scores become logits and weights, and the row's sums of exponentials grow
    const auto weigh = [&](int tile) {
      fence_floats(matmul_sums);
      if (lane == 0) arrive_at(keys_empty + 8 * (tile % stages));
      const int key0 = first_key + tile * next_tile;
      float peaks[2][2] = { {largest[0], -INFINITY}, {largest[1], -INFINITY} };  // of even and of odd columns
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
          const bool lt = col_index < length;
          const float where = lt ? matmul : (-INFINITY);
          matmul_sums[i] = where;
          peaks[i / 2 % 2][i % 2] = larger(peaks[i / 2 % 2][i % 2], matmul_sums[i]);
        }
      }
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        float peak = larger(peaks[r][0], peaks[r][1]);
        #pragma unroll
        for (int step = 1; step < 4; step *= 2) peak = larger(peak, __shfl_xor_sync(0xffffffffu, peak, step));
        const float pivot = peak == -INFINITY ? 0.0f : peak * 0.12751743f;
        shrinks[r] = largest[r] == -INFINITY ? 0.0f : power_of_2(pivots[r] - pivot);
        largest[r] = peak;
        pivots[r] = pivot;
        summed[r] *= shrinks[r];
      }
      float added[2][2] = {};  // of even and of odd columns
      #pragma unroll
      for (int i = 0; i < 64; ++i) {
        const float power = power_of_2(fmaf(matmul_sums[i], 0.12751743f, -pivots[i / 2 % 2]));
        added[i / 2 % 2][i % 2] += power;
        matmul_sums[i] = power;
      }
      #pragma unroll
      for (int r = 0; r < 2; ++r) summed[r] += added[r][0] + added[r][1];
    };

    // weights as the next products take them, and sums shrink by as much as the largest logit grew
    const auto round_weights = [&] {
      #pragma unroll
      for (int i = 0; i < 32; ++i) weights[i] = rounded_pair_bf16(matmul_sums[2 * i], matmul_sums[2 * i + 1]);
      #pragma unroll
      for (int i = 0; i < 64; ++i) e_times_v_sums[i] *= shrinks[i / 2 % 2];
    };

    wait_at(queries_full, 0);
    if (tiles > 0) {
      multiply_keys(0);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      weigh(0);
      round_weights();
      for (int tile = 1; tile < tiles; ++tile) {
        multiply_keys(tile);
        multiply_values(tile - 1);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the scores are there
        weigh(tile);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        fence_floats(e_times_v_sums);
        fence_words(weights);
        if (lane == 0) arrive_at(values_empty + 8 * ((tile - 1) % stages));
        round_weights();
      }
      multiply_values(tiles - 1);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      fence_floats(e_times_v_sums);
    }

    // what is made of the sums: the four lanes of a row have a pair of columns each, of every 8 columns
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      #pragma unroll
      for (int step = 1; step < 4; step *= 2) summed[r] += __shfl_xor_sync(0xffffffffu, summed[r], step);
      const int m = warp_row + lane / 4 + r * 8;
      const bool inside = m < rows_here;
      const long long row = row0 + (inside ? m : rows_here - 1);
      const float top = largest[r] * 0.088388346f;
      const float sum_of_exps = summed[r];
      if (inside && lane % 4 == 0) *(top_parts_ptr + axis0_at * top_parts_stride_axis0 + B_at * top_parts_stride_B
          + G_at * top_parts_stride_G + row * top_parts_stride_R) = top;
      if (inside && lane % 4 == 0) *(sum_of_exps_parts_ptr + axis0_at * sum_of_exps_parts_stride_axis0
          + B_at * sum_of_exps_parts_stride_B + G_at * sum_of_exps_parts_stride_G + row * sum_of_exps_parts_stride_R) = sum_of_exps;
      #pragma unroll
      for (int n = 0; n < 16; ++n) {
        const int col = n * 8 + lane % 4 * 2;
        Vec<float, 2> out_parts_vec;
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float e_times_v = e_times_v_sums[n * 4 + r * 2 + j];
          out_parts_vec.at[j] = e_times_v;
        }
        if (inside) store<2>(out_parts_ptr + axis0_at * out_parts_stride_axis0 + B_at * out_parts_stride_B + G_at * out_parts_stride_G
            + row * out_parts_stride_R + col, out_parts_vec);
      }
    }
  }
}
