// decoder_layer_prefill_attended  bf16[H, 1, S, E], bf16[H, G, S, E], bf16[H, 1, S, E] -> bf16[H, G, S, E]  at H=8 S=4096 E=128 G=4
// attended of decoder_layer_prefill.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// views    v_value_part is v_value as [H, 1, S, E]; queries is turned as [H, G, S, E]; keys_part is
//          keys as [H, 1, S, E]
// tile     2 consumer warpgroups of 64 queries each, by turns, tiles of 128 keys, a producer 2 tiles
//          ahead; of keys behind the last that a block's rows need, none are read; conditions are
//          tested in tiles that an end cuts
// traffic  83.9 MB moved, 83.9 MB ideal, 4378.9 MB with products apart, 11995.7 MB unfused in 8
//          launches
// floor    138.9 us at 989 TFLOP/s for products; compute-bound at 1638.80 flop/B
// rounding e, before it is divided by its row's sum, to bf16 where it meets v_value_part; cast to bf16
//          by an explicit cast; attended to bf16 when stored; f32 between
// needs    S=4096, E=128; rows of all operands next to each other; queries, keys_part, v_value_part,
//          attended: address and strides in multiples of 16 B
// launch   begins while the kernels before it run, and waits for them before all else; lets the next
//          one begin once all its blocks run

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
constexpr int tile_rows = 128, tile_keys = 128, keys = 4096, stages = 2;
constexpr int warpgroup = 128, consumers = 2;  // threads, and warpgroups
// bytes of a line of shared memory, of 64 columns of a tile's lines, and of all of them
constexpr int line_bytes = 128;
constexpr int query_segment = tile_rows * line_bytes, key_segment = tile_keys * line_bytes;
constexpr int value_segment = tile_keys * line_bytes;
constexpr int query_bytes = 2 * query_segment, key_bytes = 2 * key_segment;
constexpr int value_bytes = 2 * value_segment;
// bytes from the queries, which come first, to the keys, the values, and what lies behind them
constexpr int keys_at = query_bytes, values_at = keys_at + stages * key_bytes;
constexpr int staging_at = 0;
constexpr int barriers_at = 163840;

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

// the box of a tensor at x, y, z, w on its way to shared memory; beyond the tensor it is zeros
__device__ __forceinline__ void copy_box(unsigned to, const CUtensorMap& map, unsigned barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// a box in shared memory on its way to the tensor's memory; what lies beyond the tensor is left out
__device__ __forceinline__ void store_box(const CUtensorMap& map, unsigned from, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
      :: "l"(&map), "r"(from), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
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

extern "C" __global__ void __launch_bounds__(384, 1)
decoder_layer_prefill_attended(
    const __grid_constant__ CUtensorMap v_value_part_map,
    const __grid_constant__ CUtensorMap queries_map,
    const __grid_constant__ CUtensorMap keys_part_map,
    const __grid_constant__ CUtensorMap attended_map,
    long long H_size,
    long long G_size,
    long long S_size)
{
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin, once all blocks of this one run
  asm volatile("griddepcontrol.wait;" ::: "memory");  // until the kernels before this one have ended
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
      start_barrier(keys_empty + 8 * stage, 8);  // warps that read the tile
      start_barrier(values_full + 8 * stage, 1);
      start_barrier(values_empty + 8 * stage, 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const long long rows = S_size;
  const unsigned tiles_down = static_cast<unsigned>((rows + tile_rows - 1) / tile_rows);
  // 8 heads at a time, whose keys and values the L2 cache holds
  // the last rows of all of them first: they need the most keys
  const unsigned heads = static_cast<unsigned>(H_size * G_size);
  constexpr unsigned together = 8;
  const unsigned first_head = blockIdx.x / (together * tiles_down) * together;
  const unsigned heads_here = heads - first_head < together ? heads - first_head : together;
  const unsigned inside = blockIdx.x % (together * tiles_down);
  const long long head = first_head + inside % heads_here;
  const long long H_at = head / G_size;
  const long long G_at = head % G_size;
  const long long row0 = static_cast<long long>(tiles_down - 1 - inside / heads_here) * tile_rows;
  const int rows_here = rows - row0 < tile_rows ? static_cast<int>(rows - row0) : tile_rows;

  // what the mask leaves of a row's keys
  struct Ends { long long end, free_end; };
  const auto ends_of = [&](long long row) {
    const int row_index = static_cast<int>(row);
    return Ends{static_cast<long long>(row_index) + 1, static_cast<long long>(row_index) + 1};
  };
  const Ends top_ends = ends_of(row0), last_ends = ends_of(row0 + rows_here - 1);
  constexpr int first_key = 0;
  const int end_key = within_keys(most(top_ends.end, last_ends.end));
  const int free_end = within_keys(least(top_ends.free_end, last_ends.free_end));
  const int tiles = end_key > first_key ? (end_key - first_key + tile_keys - 1) / tile_keys : 0;  // of keys
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);  // warpgroup 0: the producer; the others: consumers

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      expect_bytes(queries_full, query_bytes);
      copy_box(queries, queries_map, queries_full, 0, static_cast<int>(row0), static_cast<int>(G_at), static_cast<int>(H_at));
      copy_box(queries
          + query_segment, queries_map, queries_full, 64, static_cast<int>(row0), static_cast<int>(G_at), static_cast<int>(H_at));
      for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % stages;
        const unsigned parity = tile / stages % 2 ^ 1;  // of an empty ring
        const int key0 = first_key + tile * tile_keys;
        wait_at(keys_empty + 8 * stage, parity);
        expect_bytes(keys_full + 8 * stage, key_bytes);
        copy_box(keys_ring + stage * key_bytes, keys_part_map, keys_full + 8 * stage, 0, key0, static_cast<int>(H_at));
        copy_box(keys_ring + stage * key_bytes + key_segment, keys_part_map, keys_full + 8 * stage, 64, key0, static_cast<int>(H_at));
        wait_at(values_empty + 8 * stage, parity);
        expect_bytes(values_full + 8 * stage, value_bytes);
        copy_box(values_ring + stage * value_bytes, v_value_part_map, values_full + 8 * stage, 0, key0, static_cast<int>(H_at));
        copy_box(values_ring + stage * value_bytes + value_segment, v_value_part_map, values_full
            + 8 * stage, 64, key0, static_cast<int>(H_at));
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int own = role - 1;  // which of the consumers this is
    const int warp_row = own * 64 + threadIdx.x / 32 % 4 * 16;  // the warp's first row of the tile
    // fields of wgmma's matrix descriptor (PTX ISA, "Matrix Descriptor Format"), distances in units of 16 bytes
    constexpr unsigned long long swizzle_128 = 1ull << 62;  // pieces of 16 bytes are XOR-swizzled by their line's number
    constexpr unsigned long long eight_lines = 1024ull / 16 << 32;  // from 8 lines to the next 8
    constexpr unsigned long long segments = value_segment / 16ull << 16;  // from 64 elements of a line to the next 64
    const unsigned long long own_queries = describe(swizzle_128 | eight_lines, queries + own * 64 * line_bytes);
    const unsigned long long keys_lie = describe(swizzle_128 | eight_lines, keys_ring);
    const unsigned long long values_lie = describe(swizzle_128 | eight_lines | segments, values_ring);

    // for each of the thread's two rows: the score of its pivot, and sums of exponentials against it
    float largest[2], pivots[2], summed[2], shrinks[2];
    constexpr float late = 62.736523f;  // a row keeps its pivot while no score is larger than the pivot's by more
    bool raised = true;  // did a row of the warp get a larger pivot in this tile?
    int row_index_here[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = -INFINITY;
      pivots[r] = 0.0f;
      summed[r] = 0.0f;
      const int m = warp_row + lane / 4 + r * 8;
      const long long row = row0 + (m < rows_here ? m : rows_here - 1);
      const int row_index = static_cast<int>(row);
      row_index_here[r] = row_index;
    }
    float queries_times_keys_part_sums[64];  // of 64 queries and the tile's keys: queries @ keys^T, then logits, then weights
    unsigned weights[32];  // rounded, two in a register: as wgmma takes them
    float e_times_v_value_part_sums[64] = {};  // weights @ values

    // asks for the scores of a tile of keys
    const auto multiply_keys = [&](int tile) {
      const int stage = tile % stages;
      wait_at(keys_full + 8 * stage, tile / stages % 2);
      asm volatile("bar.sync %0, 256;" :: "r"(1 + own) : "memory");  // its turn to issue
      fence_floats(queries_times_keys_part_sums);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      #pragma unroll
      for (int k = 0; k < 8; ++k) {
        multiply_scores(
            queries_times_keys_part_sums, own_queries + k / 4 * (query_segment / 16) + k % 4 * 2,
            keys_lie + stage * (key_bytes / 16) + k / 4 * (key_segment / 16) + k % 4 * 2, k != 0);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    };

    // adds weights @ values
    const auto multiply_values = [&](int tile) {
      const int stage = tile % stages;
      wait_at(values_full + 8 * stage, tile / stages % 2);
      fence_floats(e_times_v_value_part_sums);
      fence_words(weights);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      #pragma unroll
      for (int k = 0; k < tile_keys / 16; ++k) {
        multiply_weights(
            e_times_v_value_part_sums, reinterpret_cast<const unsigned (&)[4]>(weights[k * 4]),
            values_lie + stage * (value_bytes / 16) + k * (16 * line_bytes / 16));
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    };

    // scores become logits and weights, and the row's sums of exponentials grow
    const auto weigh = [&](int tile) {
      fence_floats(queries_times_keys_part_sums);
      if (lane == 0) arrive_at(keys_empty + 8 * (tile % stages));
      const int key0 = first_key + tile * tile_keys;
      float peaks[2][2] = { {largest[0], -INFINITY}, {largest[1], -INFINITY} };  // of even and of odd columns
      if (key0 + tile_keys <= free_end) {
        #pragma unroll
        for (int i = 0; i < 64; ++i) {
          peaks[i / 2 % 2][i % 2] = larger(peaks[i / 2 % 2][i % 2], queries_times_keys_part_sums[i]);
        }
      } else {
        #pragma unroll
        for (int i = 0; i < 64; ++i) {
          const int col_index = key0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
          const float queries_times_keys_part = queries_times_keys_part_sums[i];
          const int row_index = row_index_here[i / 2 % 2];
          const bool le = col_index <= row_index;
          const float where = le ? queries_times_keys_part : (-INFINITY);
          queries_times_keys_part_sums[i] = where;
          peaks[i / 2 % 2][i % 2] = larger(peaks[i / 2 % 2][i % 2], queries_times_keys_part_sums[i]);
        }
      }
      bool near_pivots = true;
      #pragma unroll
      for (int r = 0; r < 2; ++r) near_pivots = near_pivots && larger(peaks[r][0], peaks[r][1]) <= largest[r] + late;
      raised = !__all_sync(0xffffffffu, near_pivots);
      if (raised) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float peak = larger(peaks[r][0], peaks[r][1]);
          #pragma unroll
          for (int step = 1; step < 4; step *= 2) peak = larger(peak, __shfl_xor_sync(0xffffffffu, peak, step));
          if (peak <= largest[r] + late) peak = largest[r];  // whatever the warp's other rows need
          const float pivot = peak == -INFINITY ? 0.0f : peak * 0.12751743f;
          shrinks[r] = largest[r] == -INFINITY ? 0.0f : power_of_2(pivots[r] - pivot);
          largest[r] = peak;
          pivots[r] = pivot;
          summed[r] *= shrinks[r];
        }
      }
      float added[2][2] = {};  // of even and of odd columns
      #pragma unroll
      for (int i = 0; i < 64; ++i) {
        const float power = power_of_2(fmaf(queries_times_keys_part_sums[i], 0.12751743f, -pivots[i / 2 % 2]));
        added[i / 2 % 2][i % 2] += power;
        queries_times_keys_part_sums[i] = power;
      }
      #pragma unroll
      for (int r = 0; r < 2; ++r) summed[r] += added[r][0] + added[r][1];
    };

    // weights as the next products take them, and sums shrink by as much as the largest logit grew
    const auto round_weights = [&] {
      #pragma unroll
      for (int i = 0; i < 32; ++i) weights[i] = rounded_pair_bf16(queries_times_keys_part_sums[2 * i], queries_times_keys_part_sums[2 * i
          + 1]);
      if (raised) {
        #pragma unroll
        for (int i = 0; i < 64; ++i) e_times_v_value_part_sums[i] *= shrinks[i / 2 % 2];
      }
    };

    const auto pass_turn = [&] {
      asm volatile("bar.arrive %0, 256;" :: "r"(1 + (own + 1) % consumers) : "memory");
    };
    if (own == consumers - 1) pass_turn();  // the first turn is the first consumer's
    wait_at(queries_full, 0);
    if (tiles > 0) {
      multiply_keys(0);
      pass_turn();
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      weigh(0);
      round_weights();
      for (int tile = 1; tile < tiles; ++tile) {
        multiply_keys(tile);
        multiply_values(tile - 1);
        pass_turn();
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the scores are there
        weigh(tile);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        fence_floats(e_times_v_value_part_sums);
        fence_words(weights);
        if (lane == 0) arrive_at(values_empty + 8 * ((tile - 1) % stages));
        round_weights();
      }
      multiply_values(tiles - 1);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      fence_floats(e_times_v_value_part_sums);
    }
    // the first consumer was told of a turn that it does not take
    if (own == 0) asm volatile("bar.sync 1, 256;" ::: "memory");

    // what is made of the sums: the four lanes of a row have a pair of columns each, of every 8 columns
    unsigned attended_words[32];  // of a thread's two rows, by turns
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      #pragma unroll
      for (int step = 1; step < 4; step *= 2) summed[r] += __shfl_xor_sync(0xffffffffu, summed[r], step);
      const float sum_of_exps = summed[r];
      const bool sum_of_exps_is_0 = sum_of_exps == 0.0f;
      const float one_over_sum_of_exps = 1.0f / sum_of_exps;
      const float inverse_sum = sum_of_exps_is_0 ? 0.0f : one_over_sum_of_exps;
      #pragma unroll
      for (int n = 0; n < 16; ++n) {
        float attended_pair[2];
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float e_times_v_value_part = e_times_v_value_part_sums[n * 4 + r * 2 + j];
          const float mul = e_times_v_value_part * inverse_sum;
          attended_pair[j] = mul;
        }
        attended_words[n * 2 + r] = rounded_pair_bf16(attended_pair[0], attended_pair[1]);
      }
    }

    // by way of shared memory, in the place of the queries: nobody in the warpgroup needs them now
    asm volatile("bar.sync %0, 128;" :: "r"(1 + consumers + own) : "memory");
    {
      const unsigned staging = queries + staging_at + warp_row * line_bytes;
      #pragma unroll
      for (int n = 0; n < 16; n += 2) {  // 16 bytes of row r lie where r % 8 swizzles them (XOR)
        store_matrices(
            staging + n / 8 * (tile_rows * line_bytes) + lane % 16 * line_bytes + (((n % 8 + lane / 16) ^ lane % 8) << 4),
            attended_words[n * 2], attended_words[n * 2 + 1], attended_words[n * 2 + 2], attended_words[n * 2 + 3]);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine sees what was stored
      __syncwarp();
      if (lane == 0 && warp_row < rows_here) {
        store_box(attended_map, staging, 0, static_cast<int>(row0) + warp_row, static_cast<int>(G_at), static_cast<int>(H_at));
        store_box(attended_map, staging + query_segment, 64, static_cast<int>(row0)
            + warp_row, static_cast<int>(G_at), static_cast<int>(H_at));
      }
    }
    if (lane == 0) wait_stores<0>();
  }
}
