// grouped_weight_grad  bf16[T, K], bf16[T, N], i32[E] -> bf16[E, N, K]  at T=16384 K=4096 N=2048 E=16
// dy[rows of e].T @ x[rows of e] for each expert e; 0 of one without tokens.
//
//     def grouped_weight_grad(x, dy, ends):
//         return F.grouped_matmul(dy.mT, x, ends)
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// tile     cooperative: two consumer warpgroups share tiles of 128x256, a producer 4 slices of 64
//          ahead, the right factor multicast in clusters of 2; persistent blocks, 8 rows of tiles at a
//          time; each summed over one of 16 groups
// traffic  469.8 MB moved, 469.8 MB ideal, 469.8 MB with products apart, 469.8 MB unfused in 1 launch
// floor    277.8 us at 989 TFLOP/s for products; compute-bound at 585.14 flop/B
// rounding out to bf16 when stored; f32 between
// needs    K=4096, E=16; rows of all operands next to each other; dy, x, out: address and strides in
//          multiples of 16 B; ends [E] shared by every row

#include <cuda_bf16.h>

// N values that move together, 16 bytes at a time where they fill them
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
};

// a tile, the slices of the depth that are summed one after another, and how many shared memory holds
constexpr int tile_rows = 128, tile_cols = 256, tile_k = 64, stages = 4;
constexpr int cluster_rows = 2 * tile_rows;  // of the tiles of a cluster, one below the other
constexpr int own_cols = tile_cols / 2;  // that each of its blocks brings to all
constexpr int tiles_across = 16;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
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

// how a tensor lies in memory, for tensor copies: written by the driver, read by the copy engine
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};

// where a tile lies: its first row and column
struct Place {
  int row0, col0;
  int batch;
  int k_begin, full_k, steps;  // where its group's part of the depth begins, how deep that is, and how many slices
};

struct InnerSegment {
  int begin, end;
};

// the group of that number, which all lanes of a warp ask for. It ends at ends[number], but not before the farthest end of
// those before it, where it begins, nor behind all that there is: no end is read as a place that is not there
__device__ __forceinline__ InnerSegment inner_segment_of(const int* ends, long long total, int number) {
  const int most = total < 0x7fffffff ? static_cast<int>(total) : 0x7fffffff;
  const int own = ends[number];
  int begin = 0;
  for (int s = threadIdx.x % 32; s < number; s += 32) begin = ends[s] > begin ? ends[s] : begin;
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const int other = __shfl_xor_sync(0xffffffffu, begin, step);
    begin = other > begin ? other : begin;
  }
  begin = begin < most ? begin : most;
  return InnerSegment{begin, own < begin ? begin : own < most ? own : most};
}

// 8 rows of tiles at a time, column by column: blocks that run together share factors in the L2 cache
__device__ __forceinline__ Place place_of(int tile, int tiles_down, int tiles_here, const int* ends, long long total_k) {
  Place at;
  at.batch = tile / tiles_here;
  tile %= tiles_here;
  const int first = tile / group_tiles * group;
  const int height = tiles_down - first < group ? tiles_down - first : group;
  at.row0 = (first + tile % group_tiles % height) * cluster_rows;
  at.col0 = tile % group_tiles / height * tile_cols;
  at.row0 += __clusterRelativeBlockRank() * tile_rows;
  const InnerSegment summed = inner_segment_of(ends, total_k, at.batch);
  at.k_begin = summed.begin;
  at.full_k = __shfl_sync(0xffffffffu, summed.end - summed.begin, 0, 32);
  at.steps = (at.full_k + tile_k - 1) / tile_k;
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

// the same place in another block of the cluster
__device__ __forceinline__ void arrive_in(unsigned barrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n"
      :: "r"(barrier), "r"(rank) : "memory");
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

// the same, to this place in the shared memory of every block of the cluster
__device__ __forceinline__ void copy_box_to_all(
    unsigned to, const CUtensorMap& map, unsigned barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y),
         "h"(static_cast<unsigned short>(3)) : "memory");
}

// a box in shared memory on its way to the tensor's memory; what lies beyond the tensor is left out
__device__ __forceinline__ void store_box(const CUtensorMap& map, unsigned from, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
      :: "l"(&map), "r"(from), "r"(x), "r"(y), "r"(z) : "memory");
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

// sums of 64 x 256 elements: the product of two matrices, 16 along K, added to what they were or put in its place
__device__ __forceinline__ void multiply_add(
    float (&sums)[128], unsigned long long left, unsigned long long right, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %130, 0;\n"
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
      "}, %128, %129, add, 1, 1, 1, 1;\n"
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
      : "l"(left), "l"(right), "r"(static_cast<int>(add)));
}

// no instruction, but what uses the sums stays behind it: the compiler doesn't know that wgmma writes them until then
__device__ __forceinline__ void fence_sums(float (&sums)[128]) {
  #pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(sums[i]));
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
grouped_weight_grad(
    const __grid_constant__ CUtensorMap x_map,
    const __grid_constant__ CUtensorMap dy_map,
    const int* __restrict__ ends_ptr,
    const __grid_constant__ CUtensorMap out_map,
    long long E_size,
    long long N_size,
    long long total_k)
{
  // 4 slices of each factor, boxes to be stored, and the barriers that tell when a slice is there and when its place is free
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned left = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const unsigned right = left + right_at;
  const unsigned full = left + barriers_at;
  const unsigned empty = full + 8 * stages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      start_barrier(full + 8 * stage, 1);
      start_barrier(empty + 8 * stage, 16);  // warps that read the slice
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const int rank = __clusterRelativeBlockRank();
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  const long long rows = N_size;
  const int tiles_down = static_cast<int>((rows + cluster_rows - 1) / cluster_rows);
  const int tiles_here = tiles_down * tiles_across;  // of one product
  const int tiles = static_cast<int>(E_size) * tiles_here;
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);  // warpgroup 0: the producer; 1 and 2: consumers

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) {  // its lanes find each tile's group together
      int stage = 0;
      unsigned parity = 1;  // of an empty ring
      for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
        const Place at = place_of(tile, tiles_down, tiles_here, ends_ptr, total_k);
        if (threadIdx.x == 0) {
          for (int step = 0; step < at.steps; ++step) {
            const unsigned arrived = full + 8 * stage;
            wait_at(empty + 8 * stage, parity);
            expect_bytes(arrived, slice_bytes);
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
              copy_box(left + i * segment_bytes + stage * left_bytes, dy_map, arrived,
                  at.row0 + i * 64, at.k_begin + step * tile_k);
            }
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
              copy_box_to_all(right + rank * (own_cols * line_bytes) + i * segment_bytes + stage * right_bytes, x_map, arrived,
                  at.col0 + rank * own_cols + i * 64, at.k_begin + step * tile_k);
            }
            if (++stage == stages) {
              stage = 0;
              parity ^= 1;
            }
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int own = role - 1;  // which of the two consumers this is
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const unsigned staging = left + staging_at + (own * 4 + warp) * (2 * box_bytes);  // of this warp's boxes
    // fields of wgmma's matrix descriptor (PTX ISA, "Matrix Descriptor Format"), distances in units of 16 bytes
    constexpr unsigned long long swizzle_128 = 1ull << 62;  // pieces of 16 bytes are XOR-swizzled by their line's number
    constexpr unsigned long long eight_lines = 1024ull / 16 << 32;  // from 8 lines to the next 8
    constexpr unsigned long long segments = 8192ull / 16 << 16;  // from 64 elements of a line to the next 64
    const unsigned long long left_slices = describe(swizzle_128 | eight_lines | segments, left + own * segment_bytes);
    const unsigned long long right_slices = describe(swizzle_128 | eight_lines | segments, right);
    float sums[1][128];
    int stage = 0;
    unsigned parity = 0;
    for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
      const Place at = place_of(tile, tiles_down, tiles_here, ends_ptr, total_k);
      const int row0 = at.row0 + own * 64 + warp * 16;  // the warp's first
      int before = 0;
      for (int step = 0; step < at.full_k / tile_k; ++step) {
        wait_at(full + 8 * stage, parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          multiply_add(
              sums[0], left_slices + stage * (left_bytes / 16) + k * (16 * line_bytes / 16),
              right_slices + stage * (right_bytes / 16) + k * (16 * line_bytes / 16), (step | k) != 0);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the slice before has been read
        if (step > 0 && lane < 2) arrive_in(empty + 8 * before, lane);
        before = stage;
        if (++stage == stages) {
          stage = 0;
          parity ^= 1;
        }
      }
      const int depth = at.full_k % tile_k;
      if (depth > 0) {
        wait_at(full + 8 * stage, parity);
        // zeros behind the group, up to the next 16 of K: of what else lies there nothing is multiplied
        const int line = depth + (threadIdx.x - warpgroup) / 8;
        if (line < (depth + 15) / 16 * 16) {
          auto* const zeros = reinterpret_cast<Vec<float, 4>*>(shared + line * line_bytes) + threadIdx.x % 8;
          #pragma unroll
          for (int i = 0; i < 2; ++i) zeros[(stage * left_bytes + i * segment_bytes) / 16] = {};
          #pragma unroll
          for (int i = 0; i < 4; ++i) zeros[(right_at + stage * right_bytes + i * segment_bytes) / 16] = {};
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma sees them
        asm volatile("bar.sync 1, 256;" ::: "memory");
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (k * 16 >= depth) break;
          multiply_add(
              sums[0], left_slices + stage * (left_bytes / 16) + k * (16 * line_bytes / 16),
              right_slices + stage * (right_bytes / 16) + k * (16 * line_bytes / 16), (at.full_k / tile_k | k) != 0);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (at.steps > 1 && lane < 2) arrive_in(empty + 8 * before, lane);
        before = stage;
        if (++stage == stages) {
          stage = 0;
          parity ^= 1;
        }
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      fence_sums(sums[0]);
      if (at.steps > 0 && lane < 2) arrive_in(empty + 8 * before, lane);

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
              const float matmul_over_groups = at.steps > 0 ? sums[0][sum_at + j] : 0.0f;
              out_pair[j] = matmul_over_groups;
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
          if (lane == 0) store_box(out_map, buffer, at.col0 + chunk * 64, row0, at.batch);
        }
      }
    }
    if (lane == 0) wait_stores<0>();
  }
  __cluster_barrier_arrive();  // until here the other blocks may write to this one's shared memory
  __cluster_barrier_wait();
}
