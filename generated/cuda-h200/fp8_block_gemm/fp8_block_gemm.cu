// fp8_block_gemm  f8e4m3[M, K], f8e4m3[N, K], f32[K_over_128, M], f32[N_over_128, K_over_128] -> bf16[M, N]  at M=4096 K=16384 N=7168
//   K_over_128=128 N_over_128=56
// dequantize(x) @ dequantize(w).T, as DeepGEMM has it; the scales of x are transposed.
//
//     def fp8_block_gemm(x, w, sx, sw):
//         return F.dequantize(x, sx.T) @ F.dequantize(w, sw).T
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 1979 TFLOP/s for products
// tile     cooperative: two consumer warpgroups share tiles of 128x256, a producer 4 slices of 128
//          ahead; persistent blocks, 16 rows of tiles at a time
// traffic  362.8 MB moved, 245.4 MB ideal, 243.3 MB with products apart, 249.6 MB unfused in 2 launches
// floor    486.2 us at 1979 TFLOP/s for products; compute-bound at 2651.54 flop/B
// rounding to 14 significant bits sums of 128 products, which are added in f32; out to bf16 when
//          stored; f32 between
// needs    K=16384, N=7168; rows of all operands next to each other; x, w, out: address and strides in
//          multiples of 16 B

#include <cuda_bf16.h>

// a tile, the slices of the depth that are summed one after another, and how many shared memory holds
constexpr int tile_rows = 128, tile_cols = 256, tile_k = 128, stages = 4;
constexpr int steps = 128;
constexpr int tiles_across = 28;
constexpr int group = 16, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
constexpr int scaled_cols = 128;  // columns that share a scale
constexpr int part_cols = 128;  // that are multiplied at once
constexpr int warpgroup = 128;  // threads
// bytes of a line of shared memory, and of slices
constexpr int line_bytes = 128;
constexpr int segment_bytes = 64 * line_bytes;
constexpr int left_bytes = tile_rows * line_bytes, right_bytes = tile_cols * line_bytes;
constexpr int slice_bytes = left_bytes + right_bytes;
constexpr int box_bytes = 16 * line_bytes;  // that a warp stores at once
// bytes from the left factor's slices, which come first, to the right factor's and to what lies behind them
constexpr int right_at = stages * left_bytes, staging_at = right_at + stages * right_bytes;
constexpr int barriers_at = staging_at + 8 * 2 * box_bytes;
constexpr int scales_at = barriers_at + 10 * 8;
constexpr int slice_scales = tile_rows + 4;  // of a slice's rows, and of its columns

// how a tensor lies in memory, for tensor copies: written by the driver, read by the copy engine
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};

// where a tile lies: its first row and column
struct Place {
  int row0, col0;
};

// 16 rows of tiles at a time, column by column: blocks that run together share factors in the L2 cache
__device__ __forceinline__ Place place_of(int tile, int tiles_down) {
  Place at;
  const int first = tile / group_tiles * group;
  const int height = tiles_down - first < group ? tiles_down - first : group;
  at.row0 = (first + tile % group_tiles % height) * tile_rows;
  at.col0 = tile % group_tiles / height * tile_cols;
  return at;
}

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

// the box of a tensor at x, y on its way to shared memory; beyond the tensor it is zeros
__device__ __forceinline__ void copy_box(unsigned to, const CUtensorMap& map, unsigned barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

// a scale on its way from global to shared memory; 0 where no bytes of it are asked for
__device__ __forceinline__ void copy_scale(unsigned to, const float* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}

// arrives once all that this thread has copied so far is there
__device__ __forceinline__ void arrive_with_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}

// a box in shared memory on its way to the tensor's memory; what lies beyond the tensor is left out
__device__ __forceinline__ void store_box(const CUtensorMap& map, unsigned from, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
      :: "l"(&map), "r"(from), "r"(x), "r"(y) : "memory");
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

// what wgmma needs to know of a matrix in shared memory: how it lies, and 18 bits of where
__device__ __forceinline__ unsigned long long describe(unsigned long long layout, unsigned address) {
  constexpr unsigned address_bits = 0x3ffff;
  return layout | (address & address_bits) >> 4;
}

// sums of 64 x 128 elements: the product of two matrices, 32 along K, added to what they were or put in its place
__device__ __forceinline__ void multiply_add(
    float (&sums)[64], unsigned long long left, unsigned long long right, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, add, 1, 1;\n"
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

// no instruction, but what uses the sums stays behind it: the compiler doesn't know that wgmma writes them until then
__device__ __forceinline__ void fence_sums(float (&sums)[64]) {
  #pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(sums[i]));
}

extern "C" __global__ void __launch_bounds__(384, 1)
fp8_block_gemm(
    const __grid_constant__ CUtensorMap x_map,
    const __grid_constant__ CUtensorMap w_map,
    const float* __restrict__ sx_ptr,
    const float* __restrict__ sw_ptr,
    const __grid_constant__ CUtensorMap out_map,
    long long rows,
    long long sx_ld,
    long long sw_ld)
{
  // 4 slices of each factor, boxes to be stored, and the barriers that tell when a slice is there and when its place is free
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned left = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const unsigned right = left + right_at;
  const unsigned full = left + barriers_at;
  const unsigned empty = full + 8 * stages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      start_barrier(full + 8 * stage, 65);
      start_barrier(empty + 8 * stage, 8);  // warps that read the slice
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int tiles_down = static_cast<int>((rows + tile_rows - 1) / tile_rows);
  const int tiles = tiles_down * tiles_across;
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);  // warpgroup 0: the producer; 1 and 2: consumers

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x == 0) {
      int stage = 0;
      unsigned parity = 1;  // of an empty ring
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Place at = place_of(tile, tiles_down);
        for (int step = 0; step < steps; ++step) {
          const unsigned arrived = full + 8 * stage;
          wait_at(empty + 8 * stage, parity);
          expect_bytes(arrived, slice_bytes);
          copy_box(left + stage * left_bytes, x_map, arrived, step * tile_k, at.row0);
          copy_box(right + stage * right_bytes, w_map, arrived, step * tile_k, at.col0);
          if (++stage == stages) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
    }
    if (threadIdx.x >= 64) {  // two warps copy the scales of each slice's blocks: of rows, and of 128 columns
      const int thread = threadIdx.x % 64;
      int stage = 0;
      unsigned parity = 1;  // of an empty ring
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Place at = place_of(tile, tiles_down);
        for (int step = 0; step < steps; ++step) {
          wait_at(empty + 8 * stage, parity);
          const unsigned to = left + scales_at + stage * slice_scales * 4;
          #pragma unroll
          for (int i = 0; i < 2; ++i) {
            const long long row = at.row0 + i * 64 + thread;
            copy_scale(to + (i * 64 + thread) * 4, sx_ptr + (row < rows ? row + step * sx_ld : 0), row < rows ? 4 : 0);
          }
          if (thread == 0) copy_scale(to + tile_rows * 4, sw_ptr + (at.col0) / scaled_cols * sw_ld + step, 4);
          if (thread == 1) copy_scale(to + (tile_rows + 1) * 4, sw_ptr + (at.col0 + scaled_cols) / scaled_cols * sw_ld + step, 4);
          arrive_with_copies(full + 8 * stage);
          if (++stage == stages) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int own = role - 1;  // which of the two consumers this is
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const unsigned staging = left + staging_at + (own * 4 + warp) * (2 * box_bytes);  // of this warp's boxes
    // fields of wgmma's matrix descriptor (PTX ISA, "Matrix Descriptor Format"), distances in units of 16 bytes
    constexpr unsigned long long swizzle_128 = 1ull << 62;  // pieces of 16 bytes are XOR-swizzled by their line's number
    constexpr unsigned long long eight_lines = 1024ull / 16 << 32;  // from 8 lines to the next 8
    const unsigned long long left_slices = describe(swizzle_128 | eight_lines, left + own * segment_bytes);
    const unsigned long long right_slices = describe(swizzle_128 | eight_lines, right);
    float sums[1][128];
    const float* const all_scales = reinterpret_cast<const float*>(shared + scales_at);
    int stage = 0;
    unsigned parity = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const Place at = place_of(tile, tiles_down);
      const int row0 = at.row0 + own * 64 + warp * 16;  // the warp's first
      #pragma unroll
      for (int j = 0; j < 128; ++j) sums[0][j] = 0.0f;
      float partial[64];  // sums of each slice: the tensor cores keep 14 bits of them
      #pragma unroll 1
      for (int first = 0; first < steps; first += stages) {
        #pragma unroll
        for (int stage = 0; stage < stages; ++stage) {  // a tile's slices are in all places of the ring, from the first one on
          wait_at(full + 8 * stage, parity);
          const float* const scales = all_scales + stage * slice_scales;
          float scale[2][1][2];  // of this slice's blocks: of a row, times of 128 columns
          #pragma unroll
          for (int part = 0; part < 2; ++part) {
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            #pragma unroll
            for (int k = 0; k < 4; ++k) {
              multiply_add(
                  partial, left_slices + stage * (left_bytes / 16) + k * 2,
                  right_slices + stage * (right_bytes / 16) + part * (part_cols * line_bytes / 16) + k * 2, k != 0);
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (part == 0) {  // read while the tensor cores are at it
              #pragma unroll
              for (int r8 = 0; r8 < 2; ++r8) {
                const float of_row = scales[own * 64 + warp * 16 + r8 % 2 * 8 + lane / 4];
                scale[0][0][r8] = of_row * scales[tile_rows];
                scale[1][0][r8] = of_row * scales[tile_rows + 1];
              }
              __syncwarp();  // all lanes have read
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            fence_sums(partial);
            if (part == 1 && lane == 0) arrive_at(empty + 8 * stage);
            #pragma unroll
            for (int j = 0; j < 64; ++j) sums[0][part * 64 + j] += partial[j] * scale[part][0][j / 2 % 2];
          }
        }
        parity ^= 1;
      }

      #pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) {
        unsigned out_words[8][2];
        #pragma unroll
        for (int n8 = 0; n8 < 8; ++n8) {
          #pragma unroll
          for (int r8 = 0; r8 < 2; ++r8) {
            const int sum_at = chunk * 32 + n8 * 4 + r8 * 2;
            float out_pair[2];
            #pragma unroll
            for (int j = 0; j < 2; ++j) {
              const float matmul = sums[0][sum_at + j];
              out_pair[j] = matmul;
            }
            const __nv_bfloat162 out_both = __floats2bfloat162_rn(out_pair[0], out_pair[1]);
            out_words[n8][r8] = *reinterpret_cast<const unsigned*>(&out_both);
          }
        }
        {
          const unsigned buffer = staging + chunk % 2 * box_bytes;
          if (lane == 0) wait_stores<1>();  // its last box has been read
          __syncwarp();
          #pragma unroll
          for (int n8 = 0; n8 < 8; n8 += 2) {  // 16 bytes of row r lie where r % 8 swizzles them (XOR)
            store_matrices(
                buffer + lane % 16 * line_bytes + (((n8 + lane / 16) ^ lane % 8) << 4), out_words[n8][0], out_words[n8][1],
                out_words[n8 + 1][0], out_words[n8 + 1][1]);
          }
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine sees what was stored
          __syncwarp();
          if (lane == 0) store_box(out_map, buffer, at.col0 + chunk * 64, row0);
        }
      }
    }
    if (lane == 0) wait_stores<0>();
  }
}
