// moe_layer_slot_there_upto_value: 2 steps in one launch of 128 threads a block
//
// because  one launch is expected to take 4.7 us, and one for each step 6.7
//
// a. moe_layer_slot_there  i32[T_times_4] -> i32[T_times_4, 1]  at T_times_4=1024
//    slot_there of moe_layer.
//
//    target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
//    tile     a block of 128 threads a row, 2 x 4 elements a thread; one pass, nothing kept
//    traffic  8192 B moved, 8192 B ideal, 8192 B unfused in 1 launch
//    floor    0.2 us at 2.039 TB/s; instruction-bound at 384.00 flop/B
//    needs    rows of 1024 elements, next to each other; before_it: address and strides in multiples of 16
//             B; before_it [T_times_4] shared by every row
//
// b. moe_layer_upto_value  i32[T_times_4] -> i32[E, 1]  at T_times_4=1024 E=64
//    upto_value of moe_layer.
//
//    target   cuda sm_80, facts of a100: warp 32, 108 SMs, 2.039 TB/s
//    tile     a block of 128 threads a row, 2 x 4 elements a thread; one pass, nothing kept
//    traffic  4352 B moved, 4352 B ideal, 4352 B unfused in 1 launch
//    floor    0.0 us at 2.039 TB/s; instruction-bound at 45.18 flop/B
//    needs    rows of 1024 elements, next to each other; named: address and strides in multiples of 16 B;
//             named [T_times_4] shared by every row

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

// v of the thread whose lane differs in the bits of step
__device__ __forceinline__ unsigned partner(unsigned v, int step) {
  return __shfl_xor_sync(0xffffffffu, v, step);
}

// the sum, modulo 2^32, over the 128 threads of a row, in every one of them
__device__ __forceinline__ unsigned row_sum(unsigned v, float* part) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = __uint_as_float(v);
  }
  __syncthreads();
  v = __float_as_uint(part[threadIdx.x % 4]);
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

// slot_there: what the step's block of that number does
__device__ __forceinline__ void part_a(
    unsigned block,
    const int* __restrict__ before_it_ptr,
    int* __restrict__ slot_there_ptr,
    long long slot_there_stride)
{
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  __shared__ float part[1][4];
  const long long row = block;
  int* const slot_there_row = slot_there_ptr + row * slot_there_stride;
  const int slot = static_cast<int>(row);

  // pass 1 of 1: read before_it; slot_there = sum(where)
  unsigned slot_there_part = 0u;
  Vec<int, 4> before_it_vec[2];
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 4;
    before_it_vec[v] = load<4>(before_it_ptr + col);
  }
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 4;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int before_it = before_it_vec[v].at[j];
      const bool eq = before_it == slot;
      const int other = col + j;
      const int where = eq ? other : 0;
      slot_there_part += where;
    }
  }
  const int slot_there = static_cast<int>(row_sum(slot_there_part, part[0]));
  if (lane == 0) *slot_there_row = slot_there;
}

// upto_value: what the step's block of that number does
__device__ __forceinline__ void part_b(
    unsigned block,
    const int* __restrict__ named_ptr,
    int* __restrict__ upto_value_ptr,
    long long upto_value_stride)
{
  constexpr int row_threads = 128;
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  __shared__ float part[1][4];
  const long long row = block;
  int* const upto_value_row = upto_value_ptr + row * upto_value_stride;
  const int number = static_cast<int>(row);

  // pass 1 of 1: read named; upto = sum(where)
  unsigned upto_part = 0u;
  Vec<int, 4> named_vec[2];
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 4;
    named_vec[v] = load<4>(named_ptr + col);
  }
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int named = named_vec[v].at[j];
      const bool le = named <= number;
      const int where = le ? 1 : 0;
      upto_part += where;
    }
  }
  const int upto = static_cast<int>(row_sum(upto_part, part[0]));
  if (lane == 0) *upto_value_row = upto;
}

extern "C" __global__ void __launch_bounds__(128)
moe_layer_slot_there_upto_value(
    const int* __restrict__ a_before_it_ptr,
    int* __restrict__ a_slot_there_ptr,
    const int* __restrict__ b_named_ptr,
    int* __restrict__ b_upto_value_ptr,
    long long blocks_a,
    long long a_rows,
    long long a_slot_there_stride,
    long long b_rows,
    long long b_upto_value_stride)
{
  unsigned block = blockIdx.x;  // the first blocks do the first step
  if (block < blocks_a) {
    part_a(block, a_before_it_ptr, a_slot_there_ptr, a_slot_there_stride);
    return;
  }
  block -= static_cast<unsigned>(blocks_a);
  part_b(block, b_named_ptr, b_upto_value_ptr, b_upto_value_stride);
}
