// grouped_swiglu  bf16[T, K], bf16[E, N, K], bf16[E, N, K], i32[E] -> bf16[T, N]  at T=16384 K=4096 E=16 N=2048
// silu(x @ w_gate[e].T) * (x @ w_up[e].T), where e is the expert of the token.
//
//     def grouped_swiglu(x, w_gate, w_up, ends):
//         gate = F.grouped_matmul(x, w_gate.mT, ends)
//         up = F.grouped_matmul(x, w_up.mT, ends)
//         return F.silu(gate) * up
//
// target   cuda sm_100a, facts of b200: warp 32, 148 SMs, 8 TB/s, 2250 TFLOP/s for products
// tile     pairs of blocks share tiles of 256x128 of 2 products: one thread multiplies for both, into
//          their tensor memory; each block has half of the rows, and brings half of the right factor's
//          columns; two warpgroups by turns take its sums, a producer 6 slices of 64 ahead; persistent
//          blocks, 8 rows of tiles at a time; each of rows of one of 16 groups
// traffic  738.2 MB moved, 738.2 MB ideal, 1140.9 MB with products apart, 1275.1 MB unfused in 4
//          launches
// floor    244.3 us at 2250 TFLOP/s for products; compute-bound at 744.73 flop/B
// rounding out to bf16 when stored; f32 between
// needs    K=4096, E=16, N=2048; rows of all operands next to each other; x, w_gate, w_up, out: address
//          and strides in multiples of 16 B; ends [E] shared by every row

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

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, within 1 ulp; above 2^126 it is 0
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

// a tile, the slices of the depth that are summed one after another, and how many shared memory holds
constexpr int tile_rows = 128, tile_cols = 128, tile_k = 64, stages = 6;
constexpr int steps = 64;
constexpr int cluster_rows = 2 * tile_rows;  // of a pair's tile
constexpr int own_cols = tile_cols / 2;  // that each of its blocks brings
constexpr int segments = 16;  // groups of rows
constexpr int tiles_across = 16;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
constexpr int warpgroup = 128;  // threads
// bytes of a line of shared memory, and of slices
constexpr int line_bytes = 128;
constexpr int left_bytes = tile_rows * line_bytes, right_bytes = 2 * own_cols * line_bytes;
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
  int segment, segment_end;  // its group of rows, and behind which row that ends
  bool of_group;  // else its rows are of none
};

struct Segment {
  int number;  // of the group
  long long row0, end;  // the tile's first row, and the first one behind the group
  bool of_group;  // else its rows are of none
};

// the group of tile `number`, counted from the top. A group's rows end at ends[s], but not before the one above it ends,
// nor behind all rows: no end is read as a place that is not there
__device__ __forceinline__ Segment segment_of(const int* ends, long long rows, unsigned number) {
  const int most = rows < 0x7fffffff ? static_cast<int>(rows) : 0x7fffffff;
  Segment found{segments - 1, 0, rows, false};
  int begin = 0;
  unsigned before = 0;  // tiles
  #pragma unroll 8
  for (int s = 0; s < segments; ++s) {  // to the end, so that ends are asked for several at a time
    const int end = ends[s] < begin ? begin : ends[s] < most ? ends[s] : most;
    const unsigned behind = before + (static_cast<unsigned>(end - begin) + cluster_rows - 1) / cluster_rows;
    if (before <= number && number < behind) {
      found = Segment{s, begin + static_cast<long long>(number - before) * cluster_rows, end, true};
    }
    before = behind;
    begin = end;
  }
  if (!found.of_group) found.row0 = begin + static_cast<long long>(number - before) * cluster_rows;
  return found;
}

// how many tiles there are from top to bottom
__device__ __forceinline__ unsigned tiles_of(const int* ends, long long rows) {
  const int most = rows < 0x7fffffff ? static_cast<int>(rows) : 0x7fffffff;
  int begin = 0;
  unsigned number = 0;
  #pragma unroll 8
  for (int s = 0; s < segments; ++s) {
    const int end = ends[s] < begin ? begin : ends[s] < most ? ends[s] : most;
    number += (static_cast<unsigned>(end - begin) + cluster_rows - 1) / cluster_rows;
    begin = end;
  }
  return number + static_cast<unsigned>((rows - begin + cluster_rows - 1) / cluster_rows);
}

// 8 rows of tiles at a time, column by column: blocks that run together share factors in the L2 cache
__device__ __forceinline__ Place place_of(int tile, int tiles_down, const int* ends, long long rows) {
  Place at;
  const int first = tile / group_tiles * group;
  const int height = tiles_down - first < group ? tiles_down - first : group;
  const Segment here = segment_of(ends, rows, first + tile % group_tiles % height);
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

// the box of a tensor at x, y on its way to this block's shared memory, counted by the mbarrier at that place in the
// pair's first block; beyond the tensor it is zeros
__device__ __forceinline__ void copy_box(unsigned to, const CUtensorMap& map, unsigned barrier, int x, int y) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %2, 0;\n"
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2"
      " [%0], [%1, {%3, %4}], [there];\n"
      "}\n"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

// the box of a tensor at x, y, z on its way to this block's shared memory, counted by the mbarrier at that place in the
// pair's first block; beyond the tensor it is zeros
__device__ __forceinline__ void copy_box(unsigned to, const CUtensorMap& map, unsigned barrier, int x, int y, int z) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %2, 0;\n"
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2"
      " [%0], [%1, {%3, %4, %5}], [there];\n"
      "}\n"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

// four matrices of 8 x 8 elements, each lane's pairs in registers, to the rows whose places the lanes give
__device__ __forceinline__ void store_matrices(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

constexpr int accumulator_cols = 256;  // of a tile's sums in tensor memory
constexpr int tensor_columns = 512;  // two accumulators' place there, as a power of 2
constexpr int tensor_address_at = barriers_at + 16 * 8;  // where its address is in shared memory

// what other threads did to tensor memory before they told this one comes before what it asks for behind this
__device__ __forceinline__ void after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// what this thread did to tensor memory comes before what others ask for that it tells behind this
__device__ __forceinline__ void before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// true for one lane of a warp; where threadIdx names it, the compiler puts a loop over lanes around each tcgen05.mma
__device__ __forceinline__ bool is_elected() {
  unsigned elected;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, one;\n"
      "}\n"
      : "=r"(elected));
  return elected;
}

// what tcgen05 needs to know of a matrix in shared memory: how it lies, and 18 bits of where
__device__ __forceinline__ unsigned long long describe(unsigned long long layout, unsigned address) {
  constexpr unsigned address_bits = 0x3ffff;
  return layout | (address & address_bits) >> 4;
}

// asks for 256 x 256 sums in tensor memory: the product of two matrices, 16 along K, added to what they
// were or put in its place; each block has half of the rows, and of the right factor's columns
__device__ __forceinline__ void multiply_add(
    unsigned sums, unsigned long long left, unsigned long long right, unsigned instruction, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %4, 0;\n"
      "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, add;\n"
      "}\n"
      :: "r"(sums), "l"(left), "l"(right), "r"(instruction), "r"(static_cast<int>(add)) : "memory");
}

// arrives once all products that this thread has asked for are there, and have read their factors: in both blocks
__device__ __forceinline__ void commit(unsigned barrier) {
  asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;"
               :: "r"(barrier), "h"(static_cast<unsigned short>(3)) : "memory");
}

// no instruction, but what uses the sums stays behind it: the compiler doesn't know that loads write them until then
__device__ __forceinline__ void fence_sums(float (&sums)[128]) {
  #pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(sums[i]));
}

// 16 x 64 sums on their way to a warp's registers, where they lie as wgmma leaves them
__device__ __forceinline__ void load_sums_64(float* sums, unsigned from) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x8.b32 "
      "{"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, [%32];"
      : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3]),
        "=f"(sums[4]), "=f"(sums[5]), "=f"(sums[6]), "=f"(sums[7]),
        "=f"(sums[8]), "=f"(sums[9]), "=f"(sums[10]), "=f"(sums[11]),
        "=f"(sums[12]), "=f"(sums[13]), "=f"(sums[14]), "=f"(sums[15]),
        "=f"(sums[16]), "=f"(sums[17]), "=f"(sums[18]), "=f"(sums[19]),
        "=f"(sums[20]), "=f"(sums[21]), "=f"(sums[22]), "=f"(sums[23]),
        "=f"(sums[24]), "=f"(sums[25]), "=f"(sums[26]), "=f"(sums[27]),
        "=f"(sums[28]), "=f"(sums[29]), "=f"(sums[30]), "=f"(sums[31])
      : "r"(from));
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
grouped_swiglu(
    const __grid_constant__ CUtensorMap x_map,
    const __grid_constant__ CUtensorMap w_gate_map,
    const __grid_constant__ CUtensorMap w_up_map,
    const int* __restrict__ ends_ptr,
    __nv_bfloat16* __restrict__ out_ptr,
    long long rows,
    long long out_stride)
{
  // 6 slices of each factor, boxes to be stored, and the barriers that tell when a slice is there, when its place is
  // free, when a tile's sums are there, and when they have been taken
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned left = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const unsigned right = left + right_at;
  const unsigned full = left + barriers_at;
  const unsigned empty = full + 8 * stages;
  const unsigned summed = empty + 8 * stages;  // one of each accumulator
  const unsigned taken = summed + 8 * 2;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      start_barrier(full + 8 * stage, 1);
      start_barrier(empty + 8 * stage, 1);  // a commit
    }
    for (int turn = 0; turn < 2; ++turn) {
      start_barrier(summed + 8 * turn, 1);  // a commit
      start_barrier(taken + 8 * turn, 8);  // warps that take the sums, of both blocks
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const int own_warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (own_warp == 1) {  // tensor memory's address goes to shared memory
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;"
                 :: "r"(left + tensor_address_at), "r"(tensor_columns) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
  }
  before_thread_sync();
  const int rank = __clusterRelativeBlockRank();  // in the pair, whose first block multiplies for both
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  after_thread_sync();
  const unsigned accumulators = *reinterpret_cast<const unsigned*>(shared + tensor_address_at);
  const int tiles_down = static_cast<int>(tiles_of(ends_ptr, rows));
  const int tiles = tiles_down * tiles_across;
  // warpgroup 0 copies and multiplies; 1 and 2 take sums
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      int stage = 0;
      unsigned parity = 1;  // of an empty ring
      for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
        const Place at = place_of(tile, tiles_down, ends_ptr, rows);
        for (int step = 0; step < steps; ++step) {
          const unsigned arrived = full + 8 * stage;
          wait_at(empty + 8 * stage, parity);
          if (rank == 0) expect_bytes(arrived, 2 * slice_bytes);  // of both blocks
          copy_box(left + stage * left_bytes, x_map, arrived, step * tile_k, at.row0);
          copy_box(right + stage * right_bytes, w_gate_map, arrived,
              step * tile_k, at.col0 + rank * own_cols, at.segment);
          copy_box(right + own_cols * line_bytes + stage * right_bytes, w_up_map, arrived,
              step * tile_k, at.col0 + rank * own_cols, at.segment);
          if (++stage == stages) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
      for (int last = 0; last < stages; ++last) {  // until no commit is on its way to this block's barriers
        wait_at(empty + 8 * stage, parity);
        if (++stage == stages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    if (rank == 0 && own_warp == 1 && is_elected()) {  // asks for products, into two accumulators by turns
      // fields of tcgen05's shared memory descriptor (PTX ISA, "Shared memory descriptor"), distances by 16 bytes
      constexpr unsigned long long version = 1ull << 46;  // of such descriptors
      constexpr unsigned long long swizzle_128 = 2ull << 61;  // pieces of 16 bytes are XOR-swizzled by their line
      constexpr unsigned long long eight_lines = 1024ull / 16 << 32;  // from 8 lines to the next 8
      const unsigned long long left_slices = describe(version | swizzle_128 | eight_lines, left);
      const unsigned long long right_slices = describe(version | swizzle_128 | eight_lines, right);
      // and of its instruction descriptor (PTX ISA, "Instruction descriptor")
      constexpr unsigned instruction =
          1u << 4  // sums of f32
          | 1u << 7 | 1u << 10  // factors of bf16
          | 256u / 8 << 17  // columns
          | 256u / 16 << 24;  // rows
      int stage = 0, turn = 0;
      unsigned parity = 0, turn_parity = 1;  // of accumulators that nothing is in
      for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
        const unsigned sums = accumulators + turn * accumulator_cols;
        wait_at(taken + 8 * turn, turn_parity);  // the sums before these are in registers
        // a slice at a time: several took more registers than this group keeps
        #pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          wait_at(full + 8 * stage, parity);
          after_thread_sync();  // behind both waits
          #pragma unroll
          for (int k = 0; k < 4; ++k) {
            multiply_add(
                sums, left_slices + stage * (left_bytes / 16) + k * 2,
                right_slices + stage * (right_bytes / 16) + k * 2, instruction, (step | k) != 0);
          }
          commit(empty + 8 * stage);  // the slice's place is free once these have read it
          if (++stage == stages) {
            stage = 0;
            parity ^= 1;
          }
        }
        commit(summed + 8 * turn);
        turn ^= 1;
        turn_parity ^= turn == 0;
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int own = role - 1;  // which of the two this is, and its accumulator
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const unsigned own_sums = accumulators + own * accumulator_cols + (warp * 32 << 16);  // a warp reaches 32 lanes
    const unsigned staging = left + staging_at + (own * 4 + warp) * (2 * box_bytes);  // of this warp's boxes
    unsigned parity = 0;
    int number = 0;  // of the tile, among this block's
    for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
      if (number++ % 2 != own) continue;  // the other group's tile
      const Place at = place_of(tile, tiles_down, ends_ptr, rows);
      const int row0 = at.row0 + warp * 32;  // the warp's first
      wait_at(summed + 8 * own, parity);
      parity ^= 1;
      after_thread_sync();
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sums[128];
        load_sums_64(sums, own_sums + i * (16 << 16));
        load_sums_64(sums + 32, own_sums + i * (16 << 16) + 2 * 64);
        load_sums_64(sums + 64, own_sums + i * (16 << 16) + 64);
        load_sums_64(sums + 64 + 32, own_sums + i * (16 << 16) + 3 * 64);
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        fence_sums(sums);
        if (i == 1) {
          before_thread_sync();
          __syncwarp();  // of all lanes
          if (lane == 0) arrive_in(taken + 8 * own, 0);
        }
        #pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          unsigned out_words[8][2];
          #pragma unroll
          for (int n8 = 0; n8 < 8; ++n8) {
            #pragma unroll
            for (int r8 = 0; r8 < 2; ++r8) {
              const int sum_at = chunk * 32 + n8 * 4 + r8 * 2;
              float out_pair[2];
              #pragma unroll
              for (int j = 0; j < 2; ++j) {
                const float gate = at.of_group ? sums[sum_at + j] : 0.0f;
                const float up = at.of_group ? sums[sum_at + 64 + j] : 0.0f;
                const float silu = gate * reciprocal(1.0f + exponential(-gate));
                const float mul = silu * up;
                out_pair[j] = mul;
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
              const long long row = row0 + i * 16 + r;
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
  }

  // tensor memory goes back once all sums have been taken
  // in both blocks, which tell each other's barriers until here
  __syncwarp();
  before_thread_sync();
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  if (own_warp == 1) {
    after_thread_sync();
    // read anew: kept until here, it cost the sums a register
    const unsigned address = *reinterpret_cast<const unsigned*>(shared + tensor_address_at);
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;"
                 :: "r"(address), "r"(tensor_columns) : "memory");
  }
}
