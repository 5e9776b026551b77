// kv_cache_write  bf16[T, H, D_half], bf16[T, H, D_half], bf16[T, H, D_half], bf16[T, H, D_half], f32[P, D_half], f32[P, D_half], i64[T,
//   1, 1], i64[T, 1, 1] -> bf16[V, H, D_half], bf16[V, H, D_half], bf16[V, H, D_half], bf16[V, H, D_half]  at T=16384 H=8 D_half=64
//   P=131072 V=65536
// RoPE of k by halves of a head, then both written in one kernel; a slot of -1 is left out.
//
//     def kv_cache_write(k, v, rotations, positions, slots, k_cache, v_cache):
//         cos, sin = F.split(F.gather(rotations, positions)[:, None], 2)
//         return F.scatter(k_cache, slots, F.rope(k, cos, sin)), F.scatter(v_cache, slots, v)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    low is k[..., :D // 2]; high is k[..., D // 2:]; v_low is v[..., :D // 2]; v_high is v[...,
//          D // 2:]; rotations_low is rotations[..., :D // 2]; rotations_high is rotations[..., D //
//          2:]; out0_low is out0[..., :D // 2]; out0_high is out0[..., D // 2:]; v_2 is out1[..., :D //
//          2]; v_3 is out1[..., D // 2:]
// looks up rows of rotations_low at positions, 0 where there is none; rows of rotations_high at
//          positions, 0 where there is none
// writes   rows of out0_low, out0_high, v_2, v_3 at slots; nothing where there is none
// tile     tiles of rows and columns; a block of 128 threads on 16 rows, 8 elements a thread
// traffic  142.9 MB moved, 142.9 MB ideal, 294.0 MB unfused in 4 launches
// floor    17.9 us at 8 TB/s; memory-bound at 0.47 flop/B
// rounding out0_low to bf16 when stored; out0_high to bf16 when stored; v_2 to bf16 when stored; v_3 to
//          bf16 when stored; f32 between
// needs    rows of 64 elements, next to each other; low, high, v_low, v_high, rotations_low,
//          rotations_high, out0_low, out0_high, v_2, v_3: address and strides in multiples of 16 B

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

// x, or the nearest int of what is beyond them
__device__ __forceinline__ int nearest_int(long long x) {
  constexpr long long least = -2147483648LL, most = 2147483647LL;
  return static_cast<int>(x < least ? least : x > most ? most : x);
}

extern "C" __global__ void __launch_bounds__(128)
kv_cache_write(
    const __bf16* __restrict__ low_ptr,
    const __bf16* __restrict__ high_ptr,
    const __bf16* __restrict__ v_low_ptr,
    const __bf16* __restrict__ v_high_ptr,
    const float* __restrict__ rotations_low_ptr,
    const float* __restrict__ rotations_high_ptr,
    const long long* __restrict__ positions_ptr,
    const long long* __restrict__ slots_ptr,
    __bf16* __restrict__ out0_low_ptr,
    __bf16* __restrict__ out0_high_ptr,
    __bf16* __restrict__ v_2_ptr,
    __bf16* __restrict__ v_3_ptr,
    long long T_size,
    long long H_size,
    long long low_stride_T,
    long long low_stride_H,
    long long high_stride_T,
    long long high_stride_H,
    long long v_low_stride_T,
    long long v_low_stride_H,
    long long v_high_stride_T,
    long long v_high_stride_H,
    long long rotations_low_count,
    long long rotations_low_stride,
    long long rotations_high_count,
    long long rotations_high_stride,
    long long positions_stride_T,
    long long slots_stride_T,
    long long out0_low_count,
    long long out0_low_stride,
    long long out0_low_stride_H,
    long long out0_high_count,
    long long out0_high_stride,
    long long out0_high_stride_H,
    long long v_2_count,
    long long v_2_stride,
    long long v_2_stride_H,
    long long v_3_count,
    long long v_3_stride,
    long long v_3_stride_H)
{
  constexpr int block_rows = 16;  // that a block takes
  constexpr int row_threads = 8;
  const int lane = threadIdx.x % row_threads;  // of the 8 threads that share a row
  const long long rows = T_size * H_size;
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned T_at = static_cast<unsigned>(row) / static_cast<unsigned>(H_size);
  const unsigned H_at = static_cast<unsigned>(row) % static_cast<unsigned>(H_size);
  const __bf16* const low_row = low_ptr + T_at * low_stride_T + H_at * low_stride_H;
  const __bf16* const high_row = high_ptr + T_at * high_stride_T + H_at * high_stride_H;
  const __bf16* const v_low_row = v_low_ptr + T_at * v_low_stride_T + H_at * v_low_stride_H;
  const __bf16* const v_high_row = v_high_ptr + T_at * v_high_stride_T + H_at * v_high_stride_H;
  const long long* const positions_row = positions_ptr + T_at * positions_stride_T;
  const long long* const slots_row = slots_ptr + T_at * slots_stride_T;
  const int slots = nearest_int(*slots_row);
  const int positions = nearest_int(*positions_row);
  const bool rotations_low_found = positions >= 0 && positions < rotations_low_count;  // else each of its values is 0
  const float* const rotations_low_row = rotations_low_ptr + (rotations_low_found ? positions : 0) * rotations_low_stride;
  const bool rotations_high_found = positions >= 0 && positions < rotations_high_count;  // else each of its values is 0
  const float* const rotations_high_row = rotations_high_ptr + (rotations_high_found ? positions : 0) * rotations_high_stride;
  const bool out0_low_found = slots >= 0 && slots < out0_low_count;  // else nothing of it is written
  __bf16* const out0_low_row = out0_low_ptr + (out0_low_found ? slots : 0) * out0_low_stride + H_at * out0_low_stride_H;
  const bool out0_high_found = slots >= 0 && slots < out0_high_count;  // else nothing of it is written
  __bf16* const out0_high_row = out0_high_ptr + (out0_high_found ? slots : 0) * out0_high_stride + H_at * out0_high_stride_H;
  const bool v_2_found = slots >= 0 && slots < v_2_count;  // else nothing of it is written
  __bf16* const v_2_row = v_2_ptr + (v_2_found ? slots : 0) * v_2_stride + H_at * v_2_stride_H;
  const bool v_3_found = slots >= 0 && slots < v_3_count;  // else nothing of it is written
  __bf16* const v_3_row = v_3_ptr + (v_3_found ? slots : 0) * v_3_stride + H_at * v_3_stride_H;
  const int col = lane * 8;

  // pass 1 of 1: read low, high, v_low, v_high, cosine, sine; write out0_low, out0_high, v_2, v_3
  {
    const Vec<__bf16, 8> low_vec = load<8>(low_row + col);
    const Vec<__bf16, 8> high_vec = load<8>(high_row + col);
    const Vec<__bf16, 8> v_low_vec = load<8>(v_low_row + col);
    const Vec<__bf16, 8> v_high_vec = load<8>(v_high_row + col);
    const Vec<float, 8> rotations_low_vec = load<8>(rotations_low_row + col);
    const Vec<float, 8> rotations_high_vec = load<8>(rotations_high_row + col);
    Vec<__bf16, 8> out0_low_vec;
    Vec<__bf16, 8> out0_high_vec;
    Vec<__bf16, 8> v_2_vec;
    Vec<__bf16, 8> v_3_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float low = static_cast<float>(low_vec.at[j]);
      const float high = static_cast<float>(high_vec.at[j]);
      const float v_low = static_cast<float>(v_low_vec.at[j]);
      const float v_high = static_cast<float>(v_high_vec.at[j]);
      const float cosine = rotations_low_found ? rotations_low_vec.at[j] : 0.0f;
      const float sine = rotations_high_found ? rotations_high_vec.at[j] : 0.0f;
      const float low_times_cosine = low * cosine;
      const float high_times_sine = high * sine;
      const float sub = low_times_cosine - high_times_sine;
      const float high_times_cosine = high * cosine;
      const float low_times_sine = low * sine;
      const float add = high_times_cosine + low_times_sine;
      out0_low_vec.at[j] = static_cast<__bf16>(sub);
      out0_high_vec.at[j] = static_cast<__bf16>(add);
      v_2_vec.at[j] = static_cast<__bf16>(v_low);
      v_3_vec.at[j] = static_cast<__bf16>(v_high);
    }
    if (live && out0_low_found) store<8>(out0_low_row + col, out0_low_vec);
    if (live && out0_high_found) store<8>(out0_high_row + col, out0_high_vec);
    if (live && v_2_found) store<8>(v_2_row + col, v_2_vec);
    if (live && v_3_found) store<8>(v_3_row + col, v_3_vec);
  }
}
