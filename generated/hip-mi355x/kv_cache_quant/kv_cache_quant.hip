// kv_cache_quant  bf16[T, H, D], bf16[T, H, D], i64[T, 1, 1] -> f8e4m3[V, H, D], f8e4m3[V, H, D], f32[V, H, 1], f32[V, H, 1]  at T=16384
//   H=8 D=128 V=65536
// Each head of a token by its own largest; a slot of -1 is left out.
//
//     def kv_cache_quant(k, v, slots, k_cache, v_cache, k_scales, v_scales):
//         keys, k_scale = F.quantize(k, f8e4m3, per="row")
//         values, v_scale = F.quantize(v, f8e4m3, per="row")
//         new_keys, new_values = F.scatter(k_cache, slots, keys), F.scatter(v_cache, slots, values)
//         return new_keys, new_values, F.scatter(k_scales, slots, k_scale), F.scatter(v_scales, slots, v_scale)
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// writes   rows of new_keys, new_values, out2, out3 at slots; nothing where there is none
// tile     16 threads a row, 8 rows a block, 1 x 8 elements a thread; k, v_value in registers
// traffic  101.8 MB moved, 101.8 MB ideal, 304.6 MB unfused in 6 launches
// floor    12.7 us at 8 TB/s; memory-bound at 1.01 flop/B
// rounding new_keys to f8e4m3 when stored; new_values to f8e4m3 when stored; f32 between
// needs    rows of 128 elements, next to each other; k, v_value: address and strides in multiples of 16
//          B; new_keys, new_values: address and strides in multiples of 8 B

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

// x, or the nearest int of what is beyond them
__device__ __forceinline__ int nearest_int(long long x) {
  constexpr long long least = -2147483648LL, most = 2147483647LL;
  return static_cast<int>(x < least ? least : x > most ? most : x);
}

// the nearest f8e4m3, of two the even one, at most 448 in magnitude; NaN stays NaN
__device__ __forceinline__ unsigned char to_f8e4m3(float x) {
  if (x != x) return 0x7f;
  const unsigned sign = __float_as_uint(x) >> 24 & 0x80u;
  const float size = fminf(fabsf(x), 448.0f);
  const unsigned bits = __float_as_uint(size);
  const unsigned small = __float_as_uint(size + 16384.0f) - __float_as_uint(16384.0f);
  const unsigned even = bits + 0x7ffffu + (bits >> 20 & 1u);
  constexpr unsigned rebias = 960;
  const unsigned code = size < 0.015625f ? small : (even >> 20) - rebias;
  return static_cast<unsigned char>(sign | code);
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

// the largest value over the 16 threads of a row, in every one of them
__device__ __forceinline__ float row_max(float v) {
  #pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    v = larger(v, partner(v, step));
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(128)
kv_cache_quant(
    const __bf16* __restrict__ k_ptr,
    const __bf16* __restrict__ v_value_ptr,
    const long long* __restrict__ slots_ptr,
    unsigned char* __restrict__ new_keys_ptr,
    unsigned char* __restrict__ new_values_ptr,
    float* __restrict__ out2_ptr,
    float* __restrict__ out3_ptr,
    long long T_size,
    long long H_size,
    long long k_stride_T,
    long long k_stride_H,
    long long v_value_stride_T,
    long long v_value_stride_H,
    long long slots_stride_T,
    long long new_keys_count,
    long long new_keys_stride,
    long long new_keys_stride_H,
    long long new_values_count,
    long long new_values_stride,
    long long new_values_stride_H,
    long long out2_count,
    long long out2_stride,
    long long out2_stride_H,
    long long out3_count,
    long long out3_stride,
    long long out3_stride_H)
{
  constexpr int block_rows = 8;  // that a block takes
  constexpr int row_threads = 16;
  const int lane = threadIdx.x % row_threads;  // of the 16 threads that share a row
  const long long rows = T_size * H_size;
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= (rows + block_rows - 1) / block_rows) return;  // the grid's last line is longer than what is left
  const long long own_row = tile * block_rows + threadIdx.x / row_threads;
  const bool live = own_row < rows;
  const long long row = live ? own_row : rows - 1;  // who has none takes the last one once more, and writes nothing
  const unsigned T_at = static_cast<unsigned>(row) / static_cast<unsigned>(H_size);
  const unsigned H_at = static_cast<unsigned>(row) % static_cast<unsigned>(H_size);
  const __bf16* const k_row = k_ptr + T_at * k_stride_T + H_at * k_stride_H;
  const __bf16* const v_value_row = v_value_ptr + T_at * v_value_stride_T + H_at * v_value_stride_H;
  const long long* const slots_row = slots_ptr + T_at * slots_stride_T;
  const int slots = nearest_int(*slots_row);
  const bool new_keys_found = slots >= 0 && slots < new_keys_count;  // else nothing of it is written
  unsigned char* const new_keys_row = new_keys_ptr + (new_keys_found ? slots : 0) * new_keys_stride + H_at * new_keys_stride_H;
  const bool new_values_found = slots >= 0 && slots < new_values_count;  // else nothing of it is written
  unsigned char* const new_values_row = new_values_ptr + (new_values_found ? slots : 0) * new_values_stride + H_at * new_values_stride_H;
  const bool out2_found = slots >= 0 && slots < out2_count;  // else nothing of it is written
  float* const out2_row = out2_ptr + (out2_found ? slots : 0) * out2_stride + H_at * out2_stride_H;
  const bool out3_found = slots >= 0 && slots < out3_count;  // else nothing of it is written
  float* const out3_row = out3_ptr + (out3_found ? slots : 0) * out3_stride + H_at * out3_stride_H;
  const int col = lane * 8;
  Vec<__bf16, 8> k_vec;
  Vec<__bf16, 8> v_value_vec;

  // pass 1 of 2: read k, v_value; keep k, v_value; max_of_magnitude = max(magnitude); maximum =
  //   max(magnitude_of_v_scale)
  float max_of_magnitude_part = -INFINITY;
  float maximum_part = -INFINITY;
  {
    k_vec = load<8>(k_row + col);
    v_value_vec = load<8>(v_value_row + col);
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float k = static_cast<float>(k_vec.at[j]);
      const float v_value = static_cast<float>(v_value_vec.at[j]);
      const float magnitude = fabsf(k);
      const float magnitude_of_v_scale = fabsf(v_value);
      max_of_magnitude_part = larger(max_of_magnitude_part, magnitude);
      maximum_part = larger(maximum_part, magnitude_of_v_scale);
    }
  }
  const float max_of_magnitude = row_max(max_of_magnitude_part);
  const float maximum = row_max(maximum_part);
  const float largest = larger(max_of_magnitude, 1e-12f);
  const float k_scale = largest / 448.0f;
  const float factor = 1.0f / k_scale;
  const float largest_of_v_scale = larger(maximum, 1e-12f);
  const float v_scale = largest_of_v_scale / 448.0f;
  const float factor_of_v_scale = 1.0f / v_scale;
  if (live && lane == 0 && out2_found) *out2_row = k_scale;
  if (live && lane == 0 && out3_found) *out3_row = v_scale;

  // pass 2 of 2: write new_keys, new_values
  {
    Vec<unsigned char, 8> new_keys_vec;
    Vec<unsigned char, 8> new_values_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float k = static_cast<float>(k_vec.at[j]);
      const float v_value = static_cast<float>(v_value_vec.at[j]);
      const float k_times_factor = k * factor;
      const float mul = v_value * factor_of_v_scale;
      new_keys_vec.at[j] = to_f8e4m3(k_times_factor);
      new_values_vec.at[j] = to_f8e4m3(mul);
    }
    if (live && new_keys_found) store<8>(new_keys_row + col, new_keys_vec);
    if (live && new_values_found) store<8>(new_values_row + col, new_values_vec);
  }
}
