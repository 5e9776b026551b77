// gemm_swiglu_quant_block  bf16[M, K], bf16[N, K], bf16[N, K] -> f8e4m3[M, N], f32[M, N_over_128]  at M=4096 K=4096 N=14336 N_over_128=112
// silu(x @ gate.T) * (x @ up.T) as f8e4m3, with a scale for each 128 of a row, quantized where the sums are.
//
//     def gemm_swiglu_quant_block(x, gate, up):
//         values, scale = F.quantize(F.silu(x @ gate.T) * (x @ up.T), f8e4m3, per="block", block=128, rule="deepseek")
//         return values, scale
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s, 989 TFLOP/s for products
// tile     cooperative: two consumer warpgroups share tiles of 128x128 of 2 products, a producer 4
//          slices of 64 ahead; persistent blocks, 16 rows of tiles at a time
// traffic  563.9 MB moved, 329.0 MB ideal, 832.3 MB with products apart, 1419.5 MB unfused in 5
//          launches
// floor    972.4 us at 989 TFLOP/s for products; compute-bound at 1706.19 flop/B
// rounding values to f8e4m3 when stored; f32 between
// needs    K=4096, N=14336, N_over_128=112; rows of all operands next to each other; x, gate, up:
//          address and strides in multiples of 16 B; values: address and strides in multiples of 8 B

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

// two numbers as codes of f8e4m3, the low one in the lower byte
__device__ __forceinline__ unsigned short pair_of_f8e4m3(float low, float high) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

// a tile, the slices of the depth that are summed one after another, and how many shared memory holds
constexpr int tile_rows = 128, tile_cols = 128, tile_k = 64, stages = 4;
constexpr int steps = 64;
constexpr int tiles_across = 112;
constexpr int group = 16, group_tiles = group * tiles_across;  // rows of tiles that are taken together, and their tiles
constexpr int warpgroup = 128;  // threads
// bytes of a line of shared memory, and of slices
constexpr int line_bytes = 128;
constexpr int segment_bytes = 64 * line_bytes;
constexpr int left_bytes = tile_rows * line_bytes, right_bytes = 2 * tile_cols * line_bytes;
constexpr int slice_bytes = left_bytes + right_bytes;
// bytes from the left factor's slices, which come first, to the right factor's and to what lies behind them
constexpr int right_at = stages * left_bytes, staging_at = right_at + stages * right_bytes;
constexpr int barriers_at = staging_at + 8 * 2 * 16 * line_bytes;

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

// of four pairs of 8 bits that each of a row's four lanes has, those of the same 8 columns: lane % 4 says which. In two
// turns lanes give away the half that is not theirs: first to lane ^ 2, then to lane ^ 1
template <typename Eight>
__device__ __forceinline__ Eight neighbours(unsigned low_pairs, unsigned high_pairs, int lane) {
  const bool high = lane & 2, odd = lane & 1;
  const unsigned own = high ? high_pairs : low_pairs;
  const unsigned other = __shfl_xor_sync(0xffffffffu, high ? low_pairs : high_pairs, 2);
  const unsigned keep = __byte_perm(own, other, odd ? 0x7632 : 0x5410);
  const unsigned got = __shfl_xor_sync(0xffffffffu, __byte_perm(own, other, odd ? 0x5410 : 0x7632), 1);
  const unsigned near = __byte_perm(keep, got, odd ? 0x1054 : 0x5410);  // of lanes 0 and 1, or of 2 and 3 where high
  const unsigned far = __byte_perm(keep, got, odd ? 0x3276 : 0x7632);
  const unsigned words[2] = {high ? far : near, high ? near : far};
  return reinterpret_cast<const Eight&>(words);
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
gemm_swiglu_quant_block(
    const __grid_constant__ CUtensorMap x_map,
    const __grid_constant__ CUtensorMap gate_map,
    const __grid_constant__ CUtensorMap up_map,
    unsigned char* __restrict__ values_ptr,
    float* __restrict__ scale_ptr,
    long long rows,
    long long values_stride,
    long long scale_stride)
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
      start_barrier(empty + 8 * stage, 8);  // warps that read the slice
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int tiles_down = static_cast<int>((rows + tile_rows - 1) / tile_rows);
  const int tiles = tiles_down * tiles_across;
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);  // warpgroup 0: the producer; 1 and 2: consumers

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
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
          copy_box(right + stage * right_bytes, gate_map, arrived, step * tile_k, at.col0);
          copy_box(right + tile_cols * line_bytes + stage * right_bytes, up_map, arrived,
              step * tile_k, at.col0);
          if (++stage == stages) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int own = role - 1;  // which of the two consumers this is
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    // fields of wgmma's matrix descriptor (PTX ISA, "Matrix Descriptor Format"), distances in units of 16 bytes
    constexpr unsigned long long swizzle_128 = 1ull << 62;  // pieces of 16 bytes are XOR-swizzled by their line's number
    constexpr unsigned long long eight_lines = 1024ull / 16 << 32;  // from 8 lines to the next 8
    const unsigned long long left_slices = describe(swizzle_128 | eight_lines, left + own * segment_bytes);
    const unsigned long long right_slices = describe(swizzle_128 | eight_lines, right);
    float sums[1][128];
    int stage = 0;
    unsigned parity = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const Place at = place_of(tile, tiles_down);
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

      float max_of_magnitude_part[2] = {-INFINITY, -INFINITY};
      float factor_of[2];
      #pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        #pragma unroll
        for (int n8 = 0; n8 < 8; ++n8) {
          #pragma unroll
          for (int r8 = 0; r8 < 2; ++r8) {
            const int sum_at = chunk * 32 + n8 * 4 + r8 * 2;
            #pragma unroll
            for (int j = 0; j < 2; ++j) {
              const float x_times_gate = sums[0][sum_at + j];
              const float x_times_up = sums[0][sum_at + 64 + j];
              const float silu = x_times_gate * reciprocal(1.0f + exponential(-x_times_gate));
              const float silu_times_x_times_up = silu * x_times_up;
              const float magnitude = fabsf(silu_times_x_times_up);
              sums[0][sum_at + j] = silu_times_x_times_up;
              max_of_magnitude_part[r8] = larger(max_of_magnitude_part[r8], magnitude);
            }
          }
        }
      }
      #pragma unroll
      for (int r8 = 0; r8 < 2; ++r8) {  // four lanes have a row
        const long long row = row0 + r8 * 8 + lane / 4;
        float max_of_magnitude = max_of_magnitude_part[r8];
        #pragma unroll
        for (int step = 2; step > 0; step /= 2) {
          max_of_magnitude = larger(max_of_magnitude, __shfl_xor_sync(0xffffffffu, max_of_magnitude, step));
        }
        const float largest = larger(max_of_magnitude, 1e-04f);
        const float scale = largest / 448.0f;
        const float factor = 1.0f / scale;
        factor_of[r8] = factor;
        if (lane % 4 == 0 && row < rows) {
          *(scale_ptr + row * scale_stride + at.col0 / tile_cols) = scale;
        }
      }
      #pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        unsigned values_words[4][2];  // pairs of 8 bits, of two times 8 columns each
        #pragma unroll
        for (int n8 = 0; n8 < 8; ++n8) {
          #pragma unroll
          for (int r8 = 0; r8 < 2; ++r8) {
            const int sum_at = chunk * 32 + n8 * 4 + r8 * 2;
            const float factor = factor_of[r8];
            float values_pair[2];
            #pragma unroll
            for (int j = 0; j < 2; ++j) {
              const float silu_times_x_times_up = sums[0][sum_at + j];
              const float values_ = silu_times_x_times_up * factor;
              values_pair[j] = values_;
            }
            const unsigned short values_words_pair = pair_of_f8e4m3(values_pair[0], values_pair[1]);
            values_words[n8 / 2][r8] = n8 % 2 ? values_words[n8 / 2][r8] | values_words_pair << 16 : values_words_pair;
          }
        }
        #pragma unroll
        for (int n32 = 0; n32 < 2; ++n32) {
          #pragma unroll
          for (int r8 = 0; r8 < 2; ++r8) {
            const long long row = row0 + r8 * 8 + lane / 4;
            const int col = at.col0 + chunk * 64 + n32 * 32 + lane % 4 * 8;
            const auto values_eight = neighbours<Vec<unsigned char, 8>>(
                values_words[n32 * 2][r8], values_words[n32 * 2 + 1][r8], lane);
            if (row < rows) {
              store<8>(values_ptr + row * values_stride + col, values_eight);
            }
          }
        }
      }
    }
  }
}
