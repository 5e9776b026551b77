// grouped_swiglu  bf16[T, K], bf16[E, N, K], bf16[E, N, K], i32[E] -> bf16[T, N]  at T=16384 K=4096 E=16 N=2048
// silu(x @ w_gate[e].T) * (x @ w_up[e].T), where e is the expert of the token.
//
//     def grouped_swiglu(x, w_gate, w_up, ends):
//         gate = F.grouped_matmul(x, w_gate.mT, ends)
//         up = F.grouped_matmul(x, w_up.mT, ends)
//         return F.silu(gate) * up
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// tile     cooperative: two consumer warpgroups share tiles of 128x128 of 2 products, a producer 4
//          slices of 64 ahead; persistent blocks, 8 rows of tiles at a time; each of rows of one of 16
//          groups
// traffic  738.2 MB moved, 738.2 MB ideal, 1140.9 MB with products apart, 1275.1 MB unfused in 4
//          launches
// floor    555.6 us at 989 TFLOP/s for products; compute-bound at 744.73 flop/B
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
constexpr int tile_rows = 128, tile_cols = 128, tile_k = 64, stages = 4;
constexpr int steps = 64;
constexpr int segments = 16;  // groups of rows
constexpr int tiles_across = 16;
constexpr int group = 8, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
constexpr int warpgroup = 128;  // threads
// bytes of a line of shared memory, and of slices
constexpr int line_bytes = 128;
constexpr int segment_bytes = 64 * line_bytes;
constexpr int left_bytes = tile_rows * line_bytes, right_bytes = 2 * tile_cols * line_bytes;
constexpr int slice_bytes = left_bytes + right_bytes;
constexpr int box_bytes = 16 * line_bytes;  // that a warp stores at once
// bytes from the left factor's slices, which come first, to the right factor's and to what lies behind them
constexpr int right_at = stages * left_bytes, staging_at = right_at + stages * right_bytes;
constexpr int barriers_at = staging_at + 8 * 2 * box_bytes;
constexpr int tile_places_at = 229472;  // behind all else

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
  own.behind += (static_cast<unsigned>(end - begin) + tile_rows - 1) / tile_rows;
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
    return Segment{segments - 1, last + static_cast<long long>(over) * tile_rows, rows, false};
  }
  const long long first = __shfl_sync(0xffffffffu, own.begin, owner, 32)
      + static_cast<long long>(number - __shfl_sync(0xffffffffu, own.before, owner, 32)) * tile_rows;
  return Segment{owner, first, __shfl_sync(0xffffffffu, own.end, owner, 32), true};
}

// how many tiles there are from top to bottom, which all lanes of a warp ask for
__device__ __forceinline__ unsigned tiles_of(const Own& own, long long rows) {
  const int last = __shfl_sync(0xffffffffu, own.end, 31, 32);
  return __shfl_sync(0xffffffffu, own.behind, 31, 32) + static_cast<unsigned>((rows - last + tile_rows - 1) / tile_rows);
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

// the box of a tensor at x, y, z on its way to shared memory; beyond the tensor it is zeros
__device__ __forceinline__ void copy_box(unsigned to, const CUtensorMap& map, unsigned barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
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
      "}, %128, %129, add, 1, 1, 0, 0;\n"
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

extern "C" __global__ void __launch_bounds__(384, 1)
grouped_swiglu(
    const __grid_constant__ CUtensorMap x_map,
    const __grid_constant__ CUtensorMap w_gate_map,
    const __grid_constant__ CUtensorMap w_up_map,
    const int* __restrict__ ends_ptr,
    const __grid_constant__ CUtensorMap out_map,
    __nv_bfloat16* __restrict__ out_ptr,
    long long rows,
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
      start_barrier(full + 8 * stage, 1);
      start_barrier(empty + 8 * stage, 8);  // warps that read the slice
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  Known known{own_segments(ends_ptr, rows)};
  const int tiles_down = static_cast<int>(tiles_of(known.own, rows));
  const int tiles = tiles_down * tiles_across;
  if (blockIdx.x >= tiles) return;  // the groups need fewer tiles
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);  // warpgroup 0: the producer; 1 and 2: consumers

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x < 32) {  // its lanes find each tile's group together
      int stage = 0;
      unsigned parity = 1;  // of an empty ring
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Place at = place_of(tile, tiles_down, rows, known);
        if (threadIdx.x == 0) {
          wait_at(empty + 8 * stage, parity);
          tile_places[stage] = at;  // for those who multiply: there when the tile's first slice is
          for (int step = 0; step < steps; ++step) {
            const unsigned arrived = full + 8 * stage;
            wait_at(empty + 8 * stage, parity);
            expect_bytes(arrived, slice_bytes);
            copy_box(left + stage * left_bytes, x_map, arrived, step * tile_k, at.row0);
            copy_box(right + stage * right_bytes, w_gate_map, arrived, step * tile_k, at.col0, at.segment);
            copy_box(right + tile_cols * line_bytes + stage * right_bytes, w_up_map, arrived,
                step * tile_k, at.col0, at.segment);
            if (++stage == stages) {
              stage = 0;
              parity ^= 1;
            }
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
    int stage = 0;
    unsigned parity = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      wait_at(full + 8 * stage, parity);
      const Place at = tile_places[stage];
      __syncwarp();  // all lanes have read
      const int row0 = at.row0 + own * 64 + warp * 16;  // the warp's first
      int before = 0;
      for (int step = 0; step < steps; ++step) {
        wait_at(full + 8 * stage, parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          multiply_add(
              sums[0], left_slices + stage * (left_bytes / 16) + k * 2,
              right_slices + stage * (right_bytes / 16) + k * 2, (step | k) != 0);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the slice before has been read
        if (step > 0 && lane == 0) arrive_at(empty + 8 * before);
        before = stage;
        if (++stage == stages) {
          stage = 0;
          parity ^= 1;
        }
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      fence_sums(sums[0]);
      if (lane == 0) arrive_at(empty + 8 * before);
      if (!at.of_group) {  // whatever was multiplied
        #pragma unroll
        for (int j = 0; j < 128; ++j) sums[0][j] = 0.0f;
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
              const float gate = sums[0][sum_at + j];
              const float up = sums[0][sum_at + 64 + j];
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
          // is the box of one group? Lanes store others, which wait_stores doesn't count: none may be on its way then
          const bool whole = row0 + 16 <= at.segment_end;
          if (lane == 0) whole ? wait_stores<1>() : wait_stores<0>();  // its last box has been read
          __syncwarp();
          #pragma unroll
          for (int n8 = 0; n8 < 8; n8 += 2) {  // 16 bytes of row r lie where r % 8 swizzles them (XOR)
            store_matrices(
                buffer + lane % 16 * line_bytes + (((n8 + lane / 16) ^ lane % 8) << 4), out_words[n8][0], out_words[n8][1],
                out_words[n8 + 1][0], out_words[n8 + 1][1]);
          }
          if (whole) {
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine sees what was stored
            __syncwarp();
            if (lane == 0) store_box(out_map, buffer, at.col0 + chunk * 64, row0);
          } else {
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
    if (lane == 0) wait_stores<0>();
  }
}
