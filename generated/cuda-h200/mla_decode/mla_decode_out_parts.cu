// mla_decode_out_parts  bf16[B, H, D], bf16[B, T, D], bf16[B, T, E], i32[B, 1, 1] -> f32[8, B, H, E], f32[8, B, H, 1], f32[8, B, H, 1]  at
//   B=8 H=128 D=576 T=8192 E=512
// out_parts, top_parts, sum_of_exps_parts of mla_decode.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// views    kv_offset_0 is kv[..., :E]
// tile     64 queries of two warpgroups, each with half of the columns and the scores of every other
//          tile, tiles of 64 keys, dealt to 8 blocks by turns, whose first columns are the values, a
//          producer 2 tiles ahead; of keys behind the last that a block's rows need, none are read;
//          conditions are tested in tiles that an end cuts
// traffic  93.5 MB moved, 93.5 MB ideal, 227.7 MB with products apart, 295.0 MB unfused in 6 launches
// floor    19.5 us at 4.8 TB/s; memory-bound at 195.18 flop/B
// rounding e, before it is divided by its row's sum, to bf16 where it meets kv_offset_0; f32 between
// needs    D=576, T=8192, E=512; rows of all operands next to each other; q, kv, out_parts: address and
//          strides in multiples of 16 B; kv_offset_0: the first columns of kv's rows, where they are
//          read
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
constexpr int tile_rows = 64, tile_keys = 64, keys = 8192, stages = 2;
// blocks that share a row's keys, and from one tile of a block to its next
constexpr int parts = 8, next_tile = parts * tile_keys;
constexpr int warpgroup = 128;  // threads
// 64 columns each: of a row of queries or keys, of one of values, and of a warpgroup's half of these
constexpr int key_segments = 9, value_segments = 8;
constexpr int own_segments = value_segments / 2, own_columns = own_segments * 64;
// bytes of a line of shared memory, of 64 columns of a tile's lines, and of all of them
constexpr int line_bytes = 128;
constexpr int query_segment = tile_rows * line_bytes, key_segment = tile_keys * line_bytes;
constexpr int query_bytes = 9 * query_segment, key_bytes = key_segments * key_segment;
// bytes from the queries, which come first, to the keys, what warpgroups tell each other, and barriers
constexpr int keys_at = query_bytes;
constexpr int told_at = 221184, barriers_at = 222720;
// to the first consumer's weights, in the place of columns that are no values, and on to the other's
constexpr int weights_at = keys_at + value_segments * key_segment, next_weights = key_bytes;

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

// scores of 64 queries and 64 keys: queries @ keys^T, 16 along K, added or put in their place
__device__ __forceinline__ void multiply_scores(
    float (&sums)[32], unsigned long long left, unsigned long long right, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, add, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
        "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
        "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]),
        "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
        "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]),
        "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31])
      : "l"(left), "l"(right), "r"(static_cast<int>(add)));
}

// sums of 64 queries and 256 columns += weights @ values, 16 keys; weights come from registers
__device__ __forceinline__ void multiply_weights(
    float (&sums)[128], const unsigned (&left)[4], unsigned long long right) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, {%128, %129, %130, %131}, %132, add, 1, 1, 1;\n"
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
        "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]),
        "+f"(sums[64]), "+f"(sums[65]), "+f"(sums[66]), "+f"(sums[67]),
        "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]),
        "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]),
        "+f"(sums[76]), "+f"(sums[77]), "+f"(sums[78]), "+f"(sums[79]),
        "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]),
        "+f"(sums[84]), "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]),
        "+f"(sums[88]), "+f"(sums[89]), "+f"(sums[90]), "+f"(sums[91]),
        "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]), "+f"(sums[95]),
        "+f"(sums[96]), "+f"(sums[97]), "+f"(sums[98]), "+f"(sums[99]),
        "+f"(sums[100]), "+f"(sums[101]), "+f"(sums[102]), "+f"(sums[103]),
        "+f"(sums[104]), "+f"(sums[105]), "+f"(sums[106]), "+f"(sums[107]),
        "+f"(sums[108]), "+f"(sums[109]), "+f"(sums[110]), "+f"(sums[111]),
        "+f"(sums[112]), "+f"(sums[113]), "+f"(sums[114]), "+f"(sums[115]),
        "+f"(sums[116]), "+f"(sums[117]), "+f"(sums[118]), "+f"(sums[119]),
        "+f"(sums[120]), "+f"(sums[121]), "+f"(sums[122]), "+f"(sums[123]),
        "+f"(sums[124]), "+f"(sums[125]), "+f"(sums[126]), "+f"(sums[127])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
}

// the same by weights of the other warpgroup, in shared memory
__device__ __forceinline__ void multiply_told(
    float (&sums)[128], unsigned long long left, unsigned long long right) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, add, 1, 1, 0, 1;\n"
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
        "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]),
        "+f"(sums[64]), "+f"(sums[65]), "+f"(sums[66]), "+f"(sums[67]),
        "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]),
        "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]),
        "+f"(sums[76]), "+f"(sums[77]), "+f"(sums[78]), "+f"(sums[79]),
        "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]),
        "+f"(sums[84]), "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]),
        "+f"(sums[88]), "+f"(sums[89]), "+f"(sums[90]), "+f"(sums[91]),
        "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]), "+f"(sums[95]),
        "+f"(sums[96]), "+f"(sums[97]), "+f"(sums[98]), "+f"(sums[99]),
        "+f"(sums[100]), "+f"(sums[101]), "+f"(sums[102]), "+f"(sums[103]),
        "+f"(sums[104]), "+f"(sums[105]), "+f"(sums[106]), "+f"(sums[107]),
        "+f"(sums[108]), "+f"(sums[109]), "+f"(sums[110]), "+f"(sums[111]),
        "+f"(sums[112]), "+f"(sums[113]), "+f"(sums[114]), "+f"(sums[115]),
        "+f"(sums[116]), "+f"(sums[117]), "+f"(sums[118]), "+f"(sums[119]),
        "+f"(sums[120]), "+f"(sums[121]), "+f"(sums[122]), "+f"(sums[123]),
        "+f"(sums[124]), "+f"(sums[125]), "+f"(sums[126]), "+f"(sums[127])
      : "l"(left), "l"(right));
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
mla_decode_out_parts(
    const __grid_constant__ CUtensorMap q_map,
    const __grid_constant__ CUtensorMap kv_map,
    const __nv_bfloat16* __restrict__ kv_offset_0_ptr,
    const int* __restrict__ length_ptr,
    float* __restrict__ out_parts_ptr,
    float* __restrict__ top_parts_ptr,
    float* __restrict__ sum_of_exps_parts_ptr,
    long long axis0_size,
    long long B_size,
    long long H_size,
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
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin, once all blocks of this one run
  // the queries, 2 tiles of keys, what the two consumers tell each other of rows, and the barriers that tell when
  // 64 columns of a tile are there and when the place of half of its values is free
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned queries = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const unsigned keys_ring = queries + keys_at;
  const unsigned queries_full = queries + barriers_at;
  const unsigned keys_full = queries_full + 8, keys_empty = keys_full + 8 * stages * key_segments;
  if (threadIdx.x == 0) {
    start_barrier(queries_full, 1);
    for (int n = 0; n < stages * key_segments; ++n) start_barrier(keys_full + 8 * n, 1);
    for (int n = 0; n < stages * 2; ++n) start_barrier(keys_empty + 8 * n, 4);  // warps that multiply the half
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
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
  const int tiles = end_key > first_key ? (end_key - first_key + next_tile - 1) / next_tile : 0;  // of keys
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);  // warpgroup 0: the producer; the others: consumers

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      expect_bytes(queries_full, query_bytes);
      copy_box(queries, q_map, queries_full, 0, static_cast<int>(row0), static_cast<int>(B_at));
      copy_box(queries + query_segment, q_map, queries_full, 64, static_cast<int>(row0), static_cast<int>(B_at));
      copy_box(queries + 2 * query_segment, q_map, queries_full, 128, static_cast<int>(row0), static_cast<int>(B_at));
      copy_box(queries + 3 * query_segment, q_map, queries_full, 192, static_cast<int>(row0), static_cast<int>(B_at));
      copy_box(queries + 4 * query_segment, q_map, queries_full, 256, static_cast<int>(row0), static_cast<int>(B_at));
      copy_box(queries + 5 * query_segment, q_map, queries_full, 320, static_cast<int>(row0), static_cast<int>(B_at));
      copy_box(queries + 6 * query_segment, q_map, queries_full, 384, static_cast<int>(row0), static_cast<int>(B_at));
      copy_box(queries + 7 * query_segment, q_map, queries_full, 448, static_cast<int>(row0), static_cast<int>(B_at));
      copy_box(queries + 8 * query_segment, q_map, queries_full, 512, static_cast<int>(row0), static_cast<int>(B_at));
      for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % stages;  // and the consumer that makes its scores, whose half of the values is free first
        const unsigned parity = tile / stages % 2 ^ 1;  // of an empty stage
        const int key0 = first_key + tile * next_tile;
        for (int n = 0; n < key_segments; ++n) {
          const int segment = n < value_segments ? (n + stage * own_segments) % value_segments : n;
          const unsigned arrived = keys_full + 8 * (stage * key_segments + segment);
          if (n < value_segments && n % own_segments == 0) {
            wait_at(keys_empty + 8 * (stage * 2 + segment / own_segments), parity);
          }
          expect_bytes(arrived, key_segment);
          copy_box(keys_ring + stage * key_bytes + segment * key_segment, kv_map, arrived, segment * 64, key0, static_cast<int>(B_at));
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    // which of the consumers this is: it makes the weights of every other tile, and has sums of half of the columns
    const int own = role - 1;
    const int warp_row = threadIdx.x / 32 % 4 * 16;  // the warp's first row of the tile
    // fields of wgmma's matrix descriptor (PTX ISA, "Matrix Descriptor Format"), distances in units of 16 bytes
    constexpr unsigned long long swizzle_128 = 1ull << 62;  // pieces of 16 bytes are XOR-swizzled by their line's number
    constexpr unsigned long long eight_lines = 1024ull / 16 << 32;  // from 8 lines to the next 8
    constexpr unsigned long long segments = key_segment / 16ull << 16;  // from 64 elements of a line to the next 64
    // its own tiles and the other consumer's, and where its half of the values is in them
    const unsigned own_tile = keys_ring + own * key_bytes, other_tile = keys_ring + (1 - own) * key_bytes;
    const unsigned half = own * own_segments * key_segment;
    const unsigned own_empty = keys_empty + 8 * (own * 2 + own), other_empty = keys_empty + 8 * ((1 - own) * 2 + own);
    const unsigned long long queries_lie = describe(swizzle_128 | eight_lines, queries);
    const unsigned long long keys_lie = describe(swizzle_128 | eight_lines, own_tile);
    const unsigned long long values_lie = describe(swizzle_128 | eight_lines | segments, own_tile + half);
    const unsigned long long other_weights = describe(swizzle_128 | eight_lines, queries + weights_at + (1 - own) * next_weights);
    const unsigned long long other_values = describe(swizzle_128 | eight_lines | segments, other_tile + half);
    // what a consumer tells the other of each row: the largest logit so far, by how much that made sums shrink, and at last
    // its sum of exponentials
    float* const told_largest = reinterpret_cast<float*>(shared + told_at);
    float* const told_shrinks = told_largest + 2 * tile_rows;
    float* const told_summed = told_shrinks + 2 * tile_rows;

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
    float matmul_sums[32];  // of 64 queries and the tile's keys: queries @ keys^T, then logits, then weights
    unsigned weights[16];  // rounded, two in a register: as wgmma takes them
    float e_times_kv_offset_0_sums[128] = {};  // weights @ values, of its half of the columns

    // asks for the scores of one of its own tiles, 64 columns at a time as they arrive
    const auto multiply_keys = [&](int tile) {
      fence_floats(matmul_sums);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      #pragma unroll
      for (int n = 0; n < key_segments; ++n) {
        // first its own half of the columns that are values, then the other half, then the columns behind these
        const int side = n < own_segments ? own : n < value_segments ? 1 - own : 0;
        const int segment = side * own_segments + (n < value_segments ? n % own_segments : n);
        wait_at(keys_full + 8 * (own * key_segments + segment), tile / stages % 2);
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          multiply_scores(
              matmul_sums, queries_lie + segment * (query_segment / 16) + k * 2, keys_lie + segment * (key_segment / 16) + k * 2,
              n != 0 || k != 0);
        }
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    };

    // adds weights @ values of its own tile
    const auto multiply_values = [&] {
      fence_floats(e_times_kv_offset_0_sums);
      fence_words(weights);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      #pragma unroll
      for (int k = 0; k < tile_keys / 16; ++k) {
        multiply_weights(
            e_times_kv_offset_0_sums, reinterpret_cast<const unsigned (&)[4]>(weights[k * 4]), values_lie + k * (16 * line_bytes / 16));
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    };

    // adds weights @ values of one of the other's tiles, whose columns it waits for itself
    const auto multiply_other = [&](int tile) {
      #pragma unroll
      for (int n = 0; n < own_segments; ++n) {
        wait_at(keys_full + 8 * ((1 - own) * key_segments + own * own_segments + n), tile / stages % 2);
      }
      fence_floats(e_times_kv_offset_0_sums);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      #pragma unroll
      for (int k = 0; k < tile_keys / 16; ++k) {
        multiply_told(e_times_kv_offset_0_sums, other_weights + k * 2, other_values + k * (16 * line_bytes / 16));
      }
    };

    // scores become logits and weights, and the row's sums of exponentials grow
    const auto weigh = [&](int tile) {
      fence_floats(matmul_sums);
      const int key0 = first_key + tile * next_tile;
      float peaks[2][2] = { {largest[0], -INFINITY}, {largest[1], -INFINITY} };  // of even and of odd columns
      if (key0 + tile_keys <= free_end) {
        #pragma unroll
        for (int i = 0; i < 32; ++i) {
          peaks[i / 2 % 2][i % 2] = larger(peaks[i / 2 % 2][i % 2], matmul_sums[i]);
        }
      } else {
        #pragma unroll
        for (int i = 0; i < 32; ++i) {
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
        const float pivot = peak == -INFINITY ? 0.0f : peak * 0.10411755f;
        shrinks[r] = largest[r] == -INFINITY ? 0.0f : power_of_2(pivots[r] - pivot);
        largest[r] = peak;
        pivots[r] = pivot;
        summed[r] *= shrinks[r];
      }
      float added[2][2] = {};  // of even and of odd columns
      #pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float power = power_of_2(fmaf(matmul_sums[i], 0.10411755f, -pivots[i / 2 % 2]));
        added[i / 2 % 2][i % 2] += power;
        matmul_sums[i] = power;
      }
      #pragma unroll
      for (int r = 0; r < 2; ++r) summed[r] += added[r][0] + added[r][1];
    };

    // weights to registers, and to where the other consumer finds them
    const auto tell_weights = [&] {
      #pragma unroll
      for (int i = 0; i < 16; ++i) weights[i] = rounded_pair_bf16(matmul_sums[2 * i], matmul_sums[2 * i + 1]);
      asm volatile("bar.sync %0, 128;" :: "r"(3 + own) : "memory");  // the scores of all its warps are there
      const unsigned line = queries + weights_at + own * next_weights + (warp_row + lane % 16) * line_bytes;
      #pragma unroll
      for (int n = 0; n < tile_keys / 8; n += 2) {  // 16 bytes of row r lie where r % 8 swizzles them (XOR)
        store_matrices(
            line + (((n + lane / 16) ^ lane % 8) << 4),
            weights[n * 2], weights[n * 2 + 1], weights[n * 2 + 2], weights[n * 2 + 3]);
      }
      if (lane % 4 == 0) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int m = own * tile_rows + warp_row + lane / 4 + r * 8;
          told_largest[m] = largest[r];
          told_shrinks[m] = shrinks[r];
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the other's wgmma sees what was stored
      asm volatile("bar.arrive %0, 256;" :: "r"(1 + own) : "memory");
    };

    // sums shrink by as much as the largest logit grew
    const auto shrink_sums = [&] {
      #pragma unroll
      for (int i = 0; i < 128; ++i) e_times_kv_offset_0_sums[i] *= shrinks[i / 2 % 2];
    };

    // waits for the weights of one of the other's tiles, and takes over what they did to the rows
    const auto take_weights = [&] {
      asm volatile("bar.sync %0, 256;" :: "r"(2 - own) : "memory");
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int m = (1 - own) * tile_rows + warp_row + lane / 4 + r * 8;
        largest[r] = told_largest[m];
        shrinks[r] = told_shrinks[m];
        pivots[r] = largest[r] == -INFINITY ? 0.0f : largest[r] * 0.10411755f;
        summed[r] *= shrinks[r];
      }
      shrink_sums();
    };

    // its half of the values of its own tile has been multiplied
    const auto let_go = [&] {
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      fence_floats(e_times_kv_offset_0_sums);
      fence_words(weights);
      if (lane == 0) arrive_at(own_empty);
    };

    wait_at(queries_full, 0);
    // the next of the other's tiles, behind which comes one of its own; the first tile has none before it
    int other = own - 1;
    for (; other + 1 < tiles; other += 2) {
      if (other >= 0) {
        take_weights();
        multiply_other(other);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");  // of nothing, before the first tile
      multiply_keys(other + 1);
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // all but the scores
      fence_floats(e_times_kv_offset_0_sums);
      if (lane == 0 && other >= 0) arrive_at(other_empty);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      weigh(other + 1);
      tell_weights();
      shrink_sums();
      multiply_values();
      let_go();
    }
    if (other >= 0 && other < tiles) {
      take_weights();
      multiply_other(other);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      fence_floats(e_times_kv_offset_0_sums);
    }

    // a row's exponentials were summed by both consumers, each those of its own tiles
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      #pragma unroll
      for (int step = 1; step < 4; step *= 2) summed[r] += __shfl_xor_sync(0xffffffffu, summed[r], step);
      if (lane % 4 == 0) told_summed[own * tile_rows + warp_row + lane / 4 + r * 8] = summed[r];
    }
    asm volatile("bar.sync 5, 256;" ::: "memory");
    #pragma unroll
    for (int r = 0; r < 2; ++r) summed[r] += told_summed[(1 - own) * tile_rows + warp_row + lane / 4 + r * 8];

    // what is made of the sums: the four lanes of a row have a pair of columns each, of every 8 columns
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int m = warp_row + lane / 4 + r * 8;
      const bool inside = m < rows_here;
      const long long row = row0 + (inside ? m : rows_here - 1);
      const float top = largest[r] * 0.07216878f;
      const float sum_of_exps = summed[r];
      if (inside && own == 0 && lane % 4 == 0) *(top_parts_ptr + axis0_at * top_parts_stride_axis0 + B_at * top_parts_stride_B
          + row * top_parts_stride_H) = top;
      if (inside && own == 0 && lane % 4 == 0) *(sum_of_exps_parts_ptr + axis0_at * sum_of_exps_parts_stride_axis0
          + B_at * sum_of_exps_parts_stride_B + row * sum_of_exps_parts_stride_H) = sum_of_exps;
      #pragma unroll
      for (int n = 0; n < own_columns / 8; ++n) {
        const int col = own * own_columns + n * 8 + lane % 4 * 2;
        Vec<float, 2> out_parts_vec;
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float e_times_kv_offset_0 = e_times_kv_offset_0_sums[n * 4 + r * 2 + j];
          out_parts_vec.at[j] = e_times_kv_offset_0;
        }
        if (inside) store<2>(out_parts_ptr + axis0_at * out_parts_stride_axis0 + B_at * out_parts_stride_B + row * out_parts_stride_H
            + col, out_parts_vec);
      }
    }
  }
}
