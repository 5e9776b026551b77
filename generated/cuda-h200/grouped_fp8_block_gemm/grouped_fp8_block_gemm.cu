// grouped_fp8_block_gemm  f8e4m3[T, K], f32[K_over_128, T], f8e4m3[E, N, K], f32[E, N_over_128, K_over_128], i32[E] -> bf16[T, N]  at
//   T=8192 K=7168 K_over_128=56 E=8 N=4096 N_over_128=32
// dequantize(x) @ dequantize(w[e]).T, where e is the expert of the token, as DeepSeek-V3's gate and up.
//
//     def grouped_fp8_block_gemm(x, sx, w, sw, ends):
//         return F.grouped_matmul(F.dequantize(x, sx.T), F.dequantize(w, sw).mT, ends)
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 1979 TFLOP/s for products
// tile     cooperative: two consumer warpgroups share tiles of 128x256, a producer 4 slices of 128
//          ahead, the right factor multicast in clusters of 2; persistent blocks, 8 rows of tiles at a
//          time; each of rows of one of 8 groups
// traffic  362.6 MB moved, 362.6 MB ideal, 360.7 MB with products apart, 366.3 MB unfused in 2 launches
// floor    243.1 us at 1979 TFLOP/s for products; compute-bound at 1326.62 flop/B
// rounding to 14 significant bits sums of 128 products, which are added in f32; out to bf16 when
//          stored; f32 between
// needs    K=7168, E=8, N=4096; rows of all operands next to each other; x, w, out: address and strides
//          in multiples of 16 B; ends [E] shared by every row

#include <cuda_bf16.h>

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

// a tile, the slices of the depth that are summed one after another, and how many shared memory holds
constexpr int tile_rows = 128, tile_cols = 256, tile_k = 128, stages = 4;
constexpr int steps = 56;
constexpr int cluster_rows = 2 * tile_rows;  // of the tiles of a cluster, one below the other
constexpr int own_cols = tile_cols / 2;  // that each of its blocks brings to all
constexpr int segments = 8;  // groups of rows
constexpr int tiles_across = 16;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
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
constexpr int tile_places_at = 231584;  // behind all else

// how a tensor lies in memory, for tensor copies: written by the driver, read by the copy engine
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};

// where a tile lies: its first row and column
struct alignas(32) Place {
  int row0, col0;
  int segment, segment_end;  // its group of rows, and behind which row that ends
  bool of_group;  // else its rows are of none
};

struct Segment {
  int number;  // of the group
  long long row0, end;  // the tile's first row, and the first one behind the group
  bool of_group;  // else its rows are of none
};

// what a lane knows of its own group
struct Own {
  int begin, end;  // rows: where the groups before end, and where its own does
  unsigned before, behind;  // tiles: of the groups before, and of its own too
};

// v of the lane so many before this one
__device__ __forceinline__ int from_before(int v, int step) {
  return __shfl_up_sync(0xffffffffu, v, step);
}

// where a group's rows end: not before the one above it ends, nor behind all rows, so that no end is read as a place that
// is not there
__device__ __forceinline__ int end_of(const int* ends, int s, int begin, int most) {
  const int end = s < segments ? ends[s] : 0;
  return end < begin ? begin : end < most ? end : most;
}

// all lanes of a warp ask for theirs
__device__ __forceinline__ Own own_segments(const int* ends, long long rows) {
  const int most = rows < 0x7fffffff ? static_cast<int>(rows) : 0x7fffffff;
  const int lane = threadIdx.x % 32;
  Own own{0, 0, 0, 0};
  own.end = end_of(ends, lane, own.end, most);
  #pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = from_before(own.end, step);
    if (lane >= step && other > own.end) own.end = other;
  }
  const int others_end = from_before(own.end, 1);
  own.begin = lane > 0 ? others_end : 0;
  int begin = own.begin;
  const int end = end_of(ends, lane, begin, most);
  own.behind += (static_cast<unsigned>(end - begin) + cluster_rows - 1) / cluster_rows;
  const unsigned own_tiles = own.behind;
  #pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned other = from_before(own.behind, step);
    if (lane >= step) own.behind += other;
  }
  own.before = own.behind - own_tiles;
  return own;
}

// what a warp knows of groups: each lane of its own
struct Known {
  Own own;
};

// how many lanes say so, from the first one on
__device__ __forceinline__ int lanes_of(bool says) {
  const auto lanes = __ballot_sync(0xffffffffu, says);
  return __popc(lanes);
}

// the group of tile `number`, counted from the top, that all lanes of a warp ask for
__device__ __forceinline__ Segment segment_of(long long rows, unsigned number, const Known& known) {
  const Own& own = known.own;
  const int owner = lanes_of(own.behind <= number);  // behind the lanes all whose groups lie above the tile
  if (owner == 32) {  // below all groups
    const int last = __shfl_sync(0xffffffffu, own.end, 31, 32);
    const unsigned over = number - __shfl_sync(0xffffffffu, own.behind, 31, 32);
    return Segment{segments - 1, last + static_cast<long long>(over) * cluster_rows, rows, false};
  }
  const long long first = __shfl_sync(0xffffffffu, own.begin, owner, 32)
      + static_cast<long long>(number - __shfl_sync(0xffffffffu, own.before, owner, 32)) * cluster_rows;
  return Segment{owner, first, __shfl_sync(0xffffffffu, own.end, owner, 32), true};
}

// how many tiles there are from top to bottom, which all lanes of a warp ask for
__device__ __forceinline__ unsigned tiles_of(const Own& own, long long rows) {
  const int last = __shfl_sync(0xffffffffu, own.end, 31, 32);
  return __shfl_sync(0xffffffffu, own.behind, 31, 32) + static_cast<unsigned>((rows - last + cluster_rows - 1) / cluster_rows);
}

// 8 rows of tiles at a time, column by column: blocks that run together share factors in the L2 cache
__device__ __forceinline__ Place place_of(int tile, int tiles_down, long long rows, const Known& known) {
  Place at;
  const int first = tile / group_tiles * group;
  const int height = tiles_down - first < group ? tiles_down - first : group;
  const Segment here = segment_of(rows, first + tile % group_tiles % height, known);
  at.row0 = static_cast<int>(here.row0);
  at.segment_end = static_cast<int>(here.end);
  at.segment = here.number;
  at.of_group = here.of_group;
  at.col0 = tile % group_tiles / height * tile_cols;
  at.row0 += __clusterRelativeBlockRank() * tile_rows;
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

// a scale on its way from global to shared memory; 0 where no bytes of it are asked for
__device__ __forceinline__ void copy_scale(unsigned to, const float* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}

// arrives once all that this thread has copied so far is there
__device__ __forceinline__ void arrive_with_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}

// the same, to this place in the shared memory of every block of the cluster
__device__ __forceinline__ void copy_box_to_all(
    unsigned to, const CUtensorMap& map, unsigned barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z),
         "h"(static_cast<unsigned short>(3)) : "memory");
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

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
grouped_fp8_block_gemm(
    const __grid_constant__ CUtensorMap x_map,
    const float* __restrict__ sx_ptr,
    const __grid_constant__ CUtensorMap w_map,
    const float* __restrict__ sw_ptr,
    const int* __restrict__ ends_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
    long long rows,
    long long sx_ld,
    long long sw_ld,
    long long sw_group,
    long long out_stride)
{
  // 4 slices of each factor, boxes to be stored, and the barriers that tell when a slice is there and when its place is free
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned left = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const unsigned right = left + right_at;
  const unsigned full = left + barriers_at;
  const unsigned empty = full + 8 * stages;
  Place* const tile_places = reinterpret_cast<Place*>(shared + tile_places_at);  // of the tiles that slices of the ring begin
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      start_barrier(full + 8 * stage, 65);
      start_barrier(empty + 8 * stage, 16);  // warps that read the slice
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const int rank = __clusterRelativeBlockRank();
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  Known known{own_segments(ends_ptr, rows)};
  const int tiles_down = static_cast<int>(tiles_of(known.own, rows));
  const int tiles = tiles_down * tiles_across;
  if (blockIdx.x / 2 >= tiles) return;  // the groups need fewer tiles
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);  // warpgroup 0: the producer; 1 and 2: consumers

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x < 32) {  // its lanes find each tile's group together
      int stage = 0;
      unsigned parity = 1;  // of an empty ring
      for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
        const Place at = place_of(tile, tiles_down, rows, known);
        if (threadIdx.x == 0) {
          wait_at(empty + 8 * stage, parity);
          tile_places[stage] = at;  // for those who multiply: there when the tile's first slice is
          for (int step = 0; step < steps; ++step) {
            const unsigned arrived = full + 8 * stage;
            wait_at(empty + 8 * stage, parity);
            expect_bytes(arrived, slice_bytes);
            copy_box(left + stage * left_bytes, x_map, arrived, step * tile_k, at.row0);
            copy_box_to_all(right + rank * (own_cols * line_bytes) + stage * right_bytes, w_map, arrived,
                step * tile_k, at.col0 + rank * own_cols, at.segment);
            if (++stage == stages) {
              stage = 0;
              parity ^= 1;
            }
          }
        }
      }
    }
    if (threadIdx.x >= 64) {  // two warps copy the scales of each slice's blocks: of rows, and of 128 columns
      const int thread = threadIdx.x % 64;
      int stage = 0;
      unsigned parity = 1;  // of an empty ring
      for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
        const Place at = place_of(tile, tiles_down, rows, known);
        for (int step = 0; step < steps; ++step) {
          wait_at(empty + 8 * stage, parity);
          const unsigned to = left + scales_at + stage * slice_scales * 4;
          #pragma unroll
          for (int i = 0; i < 2; ++i) {
            const long long row = at.row0 + i * 64 + thread;
            copy_scale(to + (i * 64 + thread) * 4, sx_ptr + (row < rows ? row + step * sx_ld : 0), row < rows ? 4 : 0);
          }
          if (thread == 0) copy_scale(to + tile_rows * 4, sw_ptr + at.segment * sw_group + (at.col0) / scaled_cols * sw_ld + step, 4);
          if (thread == 1) copy_scale(to + (tile_rows + 1) * 4, sw_ptr + at.segment * sw_group + (at.col0
              + scaled_cols) / scaled_cols * sw_ld + step, 4);
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
    for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
      wait_at(full + 8 * stage, parity);
      const Place at = tile_places[stage];
      __syncwarp();  // all lanes have read
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
            if (part == 1 && lane < 2) arrive_in(empty + 8 * stage, lane);
            #pragma unroll
            for (int j = 0; j < 64; ++j) sums[0][part * 64 + j] += partial[j] * scale[part][0][j / 2 % 2];
          }
        }
        parity ^= 1;
      }
      if (!at.of_group) {  // whatever was multiplied
        #pragma unroll
        for (int j = 0; j < 128; ++j) sums[0][j] = 0.0f;
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
              const float grouped_matmul = sums[0][sum_at + j];
              out_pair[j] = grouped_matmul;
            }
            const __nv_bfloat162 out_both = __floats2bfloat162_rn(out_pair[0], out_pair[1]);
            out_words[n8][r8] = *reinterpret_cast<const unsigned*>(&out_both);
          }
        }
        {
          const unsigned buffer = staging + chunk % 2 * box_bytes;
          __syncwarp();
          #pragma unroll
          for (int n8 = 0; n8 < 8; n8 += 2) {  // 16 bytes of row r lie where r % 8 swizzles them (XOR)
            store_matrices(
                buffer + lane % 16 * line_bytes + (((n8 + lane / 16) ^ lane % 8) << 4), out_words[n8][0], out_words[n8][1],
                out_words[n8 + 1][0], out_words[n8 + 1][1]);
          }
          __syncwarp();  // all lanes' pieces are there
          #pragma unroll
          for (int piece = lane; piece < 128; piece += 32) {  // 16 bytes of a row, which may not be the tile's
            const int r = piece / 8;
            const long long row = row0 + r;
            const int col = at.col0 + chunk * 64 + piece % 8 * 8;
            if (row < at.segment_end) {
              store<8>(out_ptr + row * out_stride + col, load<8>(reinterpret_cast<const __nv_bfloat16*>(shared + (buffer - left)
                  + r * line_bytes + (((piece % 8) ^ r % 8) << 4))));
            }
          }
          __syncwarp();  // wgmma and stmatrix want whole warps
        }
      }
    }
  }
  __cluster_barrier_arrive();  // until here the other blocks may write to this one's shared memory
  __cluster_barrier_wait();
}
