// mla_decode_out_parts  bf16[B, H, D], bf16[B, T, D], bf16[B, T, E], i32[B, 1, 1] -> f32[16, B, H, E], f32[16, B, H, 1], f32[16, B, H, 1]
//   at B=8 H=128 D=576 T=8192 E=512
// out_parts, top_parts, sum_of_exps_parts of mla_decode.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s, 2517 TFLOP/s for products
// views    kv_offset_0 is kv[..., :E]
// tile     32 queries a block of 4 warps, 2 for each 16, tiles of 32 keys, dealt to 16 blocks by turns,
//          whose first columns are the values, the next tile in registers meanwhile; of keys behind the
//          last that a block's rows need, none are read; conditions are tested in tiles that an end
//          cuts
// traffic  110.4 MB moved, 110.4 MB ideal, 244.6 MB with products apart, 311.8 MB unfused in 6 launches
// floor    13.8 us at 8 TB/s; memory-bound at 165.40 flop/B
// rounding e, before it is divided by its row's sum, to bf16 where it meets kv_offset_0; f32 between
// needs    D=576, T=8192, E=512; rows of all operands next to each other; q, kv, out_parts: address and
//          strides in multiples of 16 B; kv_offset_0: the first columns of kv's rows, where they are
//          read

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

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

// the larger of two; NaN wins
__device__ __forceinline__ float larger(float a, float b) {
  return __builtin_elementwise_maximum(a, b);
}

// 2^x, within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float power_of_2(float x) {
  return __builtin_amdgcn_exp2f(x);
}

// queries of a block, keys of a tile, and all keys
constexpr int tile_rows = 32, tile_keys = 32, keys = 8192, threads = 256;
// warps that share 16 queries, and what each of them has: keys of a tile, and columns of the values
constexpr int beside = 2, warp_keys = 16, warp_columns = 256;
// blocks that share a row's keys, and from one tile of a block to its next
constexpr int parts = 16, next_tile = parts * tile_keys;
constexpr int kv_chunks = 72;  // 16 bytes each, of a line
// elements from one line in shared memory to the next, an odd number of 16 bytes: what is read at once
// of 8 lines lies in different banks
constexpr int kv_pitch = 584, weights_pitch = 40;
constexpr int kv_offset_0_at = 0, kv_offset_0_pitch = kv_pitch, stage_elements = 18688;  // values are columns of keys; and to the next stage
constexpr int weights_at = 18688, told_at = 39936;  // halves, and bytes
// columns of sums in shared memory at a time, and floats of a row of them
constexpr int columns_at_once = 128, sums_stride = 132;

// the nearest to `key` of the keys, or the end behind them
__device__ __forceinline__ int within_keys(long long key) {
  return key < 0 ? 0 : key < keys ? static_cast<int>(key) : keys;
}

// 8 elements, Width with each load; zeros where `count` is 0
template <int Width, typename T>
__device__ __forceinline__ Vec<T, 8> load_chunk(const T* from, int count) {
  // as one vector of words: halves that a test parts from their load are waited for before the next one
  typedef unsigned Words __attribute__((ext_vector_type(4)));
  Words words = {};
  if (count != 0) {
    constexpr int step = Width * 4 / 8;
    #pragma unroll
    for (int j = 0; j < 4; j += step) {
      const Vec<unsigned, step> part = load<step>(reinterpret_cast<const unsigned*>(from) + j);
      #pragma unroll
      for (int i = 0; i < step; ++i) words[j + i] = part.at[i];
    }
  }
  return __builtin_bit_cast(Vec<T, 8>, words);
}

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ float partner(float v, int step) {
  const int word = __builtin_bit_cast(int, v);
  int other = 0;
  if (step == 1) other = __builtin_amdgcn_update_dpp(0, word, 0xb1, 0xf, 0xf, true);  // quad_perm:[1,0,3,2]
  if (step == 2) other = __builtin_amdgcn_update_dpp(0, word, 0x4e, 0xf, 0xf, true);  // quad_perm:[2,3,0,1]
  if (step == 4) {
    const int mirrored = __builtin_amdgcn_update_dpp(0, word, 0x141, 0xf, 0xf, true);  // of 8 lanes,
    other = __builtin_amdgcn_update_dpp(0, mirrored, 0x1b, 0xf, 0xf, true);  // and then of each 4
  }
  if (step == 8) other = __builtin_amdgcn_update_dpp(0, word, 0x128, 0xf, 0xf, true);  // row_ror:8
  if (step == 16) other = __builtin_amdgcn_ds_swizzle(word, 0x401f);  // swizzle(SWAP,16)
  if (step == 32) other = __shfl_xor(word, 32);
  return __builtin_bit_cast(decltype(v), other);
}

typedef __bf16 Half __attribute__((ext_vector_type(8)));
typedef float Sums __attribute__((ext_vector_type(4)));

// a lane's 8 elements of what one fragment multiplies: neighbours in k, the same for both operands
struct alignas(16) Fragment {
  Half part[1];
};

// 8 neighbours of a line in shared memory
template <typename T>
__device__ __forceinline__ Fragment load_fragment(const T* from) {
  return *reinterpret_cast<const Fragment*>(from);
}

// 4 neighbours of a line in shared memory, and as many 16 further on, from the next tile of keys
template <typename T>
__device__ __forceinline__ Half load_halves(const T* from) {
  struct alignas(16) Both {
    Vec<T, 4> part[2];
  };
  using Part = const Vec<T, 4>*;
  const Both v = {{*reinterpret_cast<Part>(from), *reinterpret_cast<Part>(from + 16)}};
  return *reinterpret_cast<const Half*>(&v);
}

// four numbers, rounded, to neighbouring places
template <typename T>
__device__ __forceinline__ void put_four(T* to, const Sums& from) {
  Vec<T, 4> v;
  #pragma unroll
  for (int i = 0; i < 4; ++i) v.at[i] = static_cast<T>(from[i]);
  *reinterpret_cast<Vec<T, 4>*>(to) = v;
}

// four, and four of the next 16, numbers below each other
template <int Pitch, typename T>
__device__ __forceinline__ Half load_down(const T* from) {
  Vec<T, 8> v;
  #pragma unroll
  for (int i = 0; i < 8; ++i) v.at[i] = from[(i / 4 * 16 + i % 4) * Pitch];
  return *reinterpret_cast<const Half*>(&v);
}

extern "C" __global__ void __launch_bounds__(256)
mla_decode_out_parts(
    const __bf16* __restrict__ q_ptr,
    const __bf16* __restrict__ kv_ptr,
    const __bf16* __restrict__ kv_offset_0_ptr,
    const int* __restrict__ length_ptr,
    float* __restrict__ out_parts_ptr,
    float* __restrict__ top_parts_ptr,
    float* __restrict__ sum_of_exps_parts_ptr,
    long long axis0_size,
    long long B_size,
    long long H_size,
    long long q_stride_B,
    long long q_stride_H,
    long long kv_stride_B,
    long long kv_ld,
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
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 64, side = threadIdx.x / 64 % beside;
  const int warp_row = threadIdx.x / 64 / beside * 16;  // the warp's first of the tile
  const int warp_key = side * warp_keys, warp_col = side * warp_columns;
  float* const told = reinterpret_cast<float*>(shared + told_at);
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

  // what the thread brings of queries, and of each tile of keys and values
  __bf16* const ring = reinterpret_cast<__bf16*>(shared);
  const __bf16* const kv_from = kv_ptr + B_at * kv_stride_B;
  Vec<__bf16, 8> kv_held[9];
  const auto fetch_tile = [&](int key0) {
    #pragma unroll
    for (int v = 0; v < 9; ++v) {
      const int chunk = v * threads + threadIdx.x, line = chunk / kv_chunks, at = chunk % kv_chunks * 8;
      kv_held[v] = load_chunk<8>(kv_from + (key0 + line) * kv_ld + at, 8);
    }
  };
  const auto put_tile = [&](int stage) {
    #pragma unroll
    for (int v = 0; v < 9; ++v) {
      const int chunk = v * threads + threadIdx.x, line = chunk / kv_chunks, at = chunk % kv_chunks * 8;
      __bf16* const to = ring + stage * stage_elements;
      store<8>(to + line * kv_pitch + at, kv_held[v]);
    }
  };
  if (first_key < end_key) fetch_tile(first_key);

  // one value for all rows of the block
  const int length = *(length_ptr + B_at * length_stride_B);

  // for each row that the lane has elements of: the largest logit so far, and sums of exponentials against it
  float largest[1], pivots[1], summed[1];
  {
    largest[0] = -INFINITY;
    pivots[0] = 0.0f;
    summed[0] = 0.0f;
  }

  // the lane's row of queries, which all tiles of keys are multiplied with
  const int own_row = warp_row + lane % 16;
  const __bf16* const q_from = q_ptr + B_at * q_stride_B + (row0 + (own_row < rows_here ? own_row : rows_here - 1)) * q_stride_H;
  Fragment q_part[18];
  #pragma unroll
  for (int k = 0; k < 18; ++k) {
    const int col = k * 32 + lane / 16 * 8;
    const Vec<__bf16, 8> v = load_chunk<8>(q_from + col, 8);
    q_part[k] = *reinterpret_cast<const Fragment*>(&v);
  }
  const __bf16* const kv_lane = ring + (warp_key + lane % 16) * kv_pitch + lane / 16 * 8;
  const __bf16* const kv_offset_0_lane = ring + kv_offset_0_at + lane / 16 * 4 * kv_offset_0_pitch + warp_col + lane % 16;
  // where the lane puts its weights, and where it takes those of the warp's rows from
  __bf16* const weights_to = ring + weights_at + own_row * weights_pitch + warp_key + lane / 16 * 4;
  const __bf16* const weights_lane = ring + weights_at + own_row * weights_pitch + lane / 16 * 4;
  Sums e_times_kv_offset_0_sums[16] = {};

  for (int tile_key = first_key, tile = 0; tile_key < end_key; tile_key += next_tile, ++tile) {
    const int stage = tile % 1;
    put_tile(stage);
    __syncthreads();
    if (tile_key + next_tile < end_key) {  // the next tile, while this one is multiplied
      fetch_tile(tile_key + next_tile);
    }
    const int key0 = tile_key + warp_key;  // the warp's first

    // a warp's 16 queries times the warp's keys of the tile
    Sums matmul_sums[1] = {};
    #pragma unroll
    for (int k = 0; k < 18; ++k) {
      const Fragment kv_part = load_fragment(kv_lane + stage * stage_elements + k * 32);
      matmul_sums[0] = __builtin_amdgcn_mfma_f32_16x16x32_bf16(kv_part.part[0], q_part[k].part[0], matmul_sums[0], 0, 0, 0);
    }

    // scores become logits, and the largest of a row is found among those of all lanes that share it
    float peaks[1];
    peaks[0] = largest[0];
    if (key0 + warp_keys <= free_end) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float matmul = matmul_sums[0][i];
        const float scores = matmul * 0.07216878f;
        matmul_sums[0][i] = scores;
        peaks[0] = larger(peaks[0], matmul_sums[0][i]);
      }
    } else {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int col_index = key0 + lane / 16 * 4 + i;
        const float matmul = matmul_sums[0][i];
        const float scores = matmul * 0.07216878f;
        const bool lt = col_index < length;
        const float where = lt ? scores : (-INFINITY);
        matmul_sums[0][i] = where;
        peaks[0] = larger(peaks[0], matmul_sums[0][i]);
      }
    }
    #pragma unroll
    for (int step = 16; step < 64; step *= 2) peaks[0] = larger(peaks[0], partner(peaks[0], step));
    if (lane < 16) told[side * tile_rows + warp_row + lane % 16] = peaks[0];
    __syncthreads();

    // of all warps that share a row; what was summed so far shrinks by as much as the largest logit grew
    float shrinks[1];
    #pragma unroll
    for (int w = 0; w < beside; ++w) peaks[0] = larger(peaks[0], told[w * tile_rows + warp_row + lane % 16]);
    const float pivot = peaks[0] == -INFINITY ? 0.0f : peaks[0] * 1.44269504f;  // log2 of e, as powers are of 2
    shrinks[0] = largest[0] == -INFINITY ? 0.0f : power_of_2(pivots[0] - pivot);
    largest[0] = peaks[0];
    pivots[0] = pivot;
    summed[0] *= shrinks[0];
    #pragma unroll
    for (int d = 0; d < 16; ++d) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) e_times_kv_offset_0_sums[d][i] *= shrinks[0];
    }

    // logits become weights, which all warps that share the rows take
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float power = power_of_2(fmaf(matmul_sums[0][i], 1.44269504f, -pivots[0]));
      summed[0] += power;
      matmul_sums[0][i] = power;
    }
    put_four(weights_to, matmul_sums[0]);
    __syncthreads();

    // weights times the warp's columns of the values
    const Half weights_part = load_halves(weights_lane);
    #pragma unroll
    for (int d = 0; d < 16; ++d) {
      const Half kv_offset_0_part = load_down<kv_offset_0_pitch>(kv_offset_0_lane + stage * stage_elements + d * 16);
      e_times_kv_offset_0_sums[d] = __builtin_amdgcn_mfma_f32_16x16x32_bf16(kv_offset_0_part, weights_part, e_times_kv_offset_0_sums[d], 0, 0, 0);
    }
    __syncthreads();
  }

  // the sums go through shared memory, where each thread finds neighbouring columns of a row
  float* const row_sums = reinterpret_cast<float*>(shared);
  float* const row_largest = row_sums + tile_rows * sums_stride;
  float* const row_summed = row_largest + tile_rows;
  {
    #pragma unroll
    for (int step = 16; step < 64; step *= 2) summed[0] += partner(summed[0], step);
    if (lane < 16) told[side * tile_rows + warp_row + lane % 16] = summed[0];
  }
  __syncthreads();
  if (lane < 16 && side == 0) row_largest[warp_row + lane % 16] = largest[0];
  if (threadIdx.x < tile_rows) {
    float sum = 0.0f;
    for (int w = 0; w < beside; ++w) sum += told[w * tile_rows + threadIdx.x];
    row_summed[threadIdx.x] = sum;
  }

  for (int first_col = 0; first_col < 512; first_col += columns_at_once) {
    #pragma unroll
    for (int d = 0; d < 16; ++d) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = warp_row + lane % 16;
        const int at = warp_col + d * 16 + lane / 16 * 4 + i - first_col;
        if (at >= 0 && at < columns_at_once) row_sums[m * sums_stride + at] = e_times_kv_offset_0_sums[d][i];
      }
    }
    __syncthreads();
    #pragma unroll 2
    for (int v = 0; v < 2; ++v) {
      const int m = static_cast<int>((v * threads + threadIdx.x) / 16);
      const int col = first_col + static_cast<int>((v * threads + threadIdx.x) % 16) * 8;
      if (m < rows_here) {
        const long long row = row0 + m;
        const float top = row_largest[m];
        const float sum_of_exps = row_summed[m];
        if (col == 0) *(top_parts_ptr + axis0_at * top_parts_stride_axis0 + B_at * top_parts_stride_B + row * top_parts_stride_H) = top;
        if (col == 0) *(sum_of_exps_parts_ptr + axis0_at * sum_of_exps_parts_stride_axis0 + B_at * sum_of_exps_parts_stride_B
            + row * sum_of_exps_parts_stride_H) = sum_of_exps;
        Vec<float, 8> out_parts_vec;
        const Vec<float, 8> e_times_kv_offset_0_total = load<8>(row_sums + m * sums_stride + col - first_col);
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float e_times_kv_offset_0 = e_times_kv_offset_0_total.at[j];
          out_parts_vec.at[j] = e_times_kv_offset_0;
        }
        store<8>(out_parts_ptr + axis0_at * out_parts_stride_axis0 + B_at * out_parts_stride_B + row * out_parts_stride_H
            + col, out_parts_vec);
      }
    }
    __syncthreads();
  }
}
