// moe_layer_upto_value_slot_there: 2 steps in one launch of 256 threads a block
//
// because  one launch is expected to take 4.1 us, and one for each step 6.1
//
// a. moe_layer_upto_value  i32[T_times_4] -> i32[E, 1]  at T_times_4=1024 E=64
//    upto_value of moe_layer.
//
//    target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
//    tile     a block of 256 threads a row, 1 x 4 elements a thread; one pass, nothing kept
//    traffic  4352 B moved, 4352 B ideal, 4352 B unfused in 1 launch
//    floor    0.0 us at 8 TB/s; instruction-bound at 45.18 flop/B
//    needs    rows of 1024 elements, next to each other; named: address and strides in multiples of 16 B;
//             named [T_times_4] shared by every row
//
// b. moe_layer_slot_there  i32[T_times_4] -> i32[T_times_4, 1]  at T_times_4=1024
//    slot_there of moe_layer.
//
//    target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
//    tile     a block of 256 threads a row, 1 x 4 elements a thread; one pass, nothing kept
//    traffic  8192 B moved, 8192 B ideal, 8192 B unfused in 1 launch
//    floor    0.0 us at 8 TB/s; instruction-bound at 384.00 flop/B
//    needs    rows of 1024 elements, next to each other; before_it: address and strides in multiples of 16
//             B; before_it [T_times_4] shared by every row

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
  return __shfl_xor(v, step);
}

// the sum, modulo 2^32, over the 256 threads of a row, in every one of them
__device__ __forceinline__ unsigned row_sum(unsigned v, float* part) {
  #pragma unroll
  for (int step = 32; step > 0; step /= 2) {
    v += partner(v, step);
  }
  if (threadIdx.x % 64 == 0) {
    part[threadIdx.x / 64] = __uint_as_float(v);
  }
  __syncthreads();
  v = __float_as_uint(part[threadIdx.x % 4]);
  #pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    v += partner(v, step);
  }
  return v;
}

// upto_value: what the step's block of that number does
__device__ __forceinline__ void part_a(
    unsigned block,
    const int* __restrict__ named_ptr,
    int* __restrict__ upto_value_ptr,
    long long upto_value_stride)
{
  const int lane = threadIdx.x;  // of the 256 threads that share a row
  __shared__ float part[1][4];
  const long long row = block;
  int* const upto_value_row = upto_value_ptr + row * upto_value_stride;
  const int number = static_cast<int>(row);
  const int col = lane * 4;

  // pass 1 of 1: read named; upto = sum(where)
  unsigned upto_part = 0u;
  {
    const Vec<int, 4> named_vec = load<4>(named_ptr + col);
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int named = named_vec.at[j];
      const bool le = named <= number;
      const int where = le ? 1 : 0;
      upto_part += where;
    }
  }
  const int upto = static_cast<int>(row_sum(upto_part, part[0]));
  if (lane == 0) *upto_value_row = upto;
}

// slot_there: what the step's block of that number does
__device__ __forceinline__ void part_b(
    unsigned block,
    const int* __restrict__ before_it_ptr,
    int* __restrict__ slot_there_ptr,
    long long slot_there_stride)
{
  const int lane = threadIdx.x;  // of the 256 threads that share a row
  __shared__ float part[1][4];
  const long long row = block;
  int* const slot_there_row = slot_there_ptr + row * slot_there_stride;
  const int slot = static_cast<int>(row);
  const int col = lane * 4;

  // pass 1 of 1: read before_it; slot_there = sum(where)
  unsigned slot_there_part = 0u;
  {
    const Vec<int, 4> before_it_vec = load<4>(before_it_ptr + col);
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int before_it = before_it_vec.at[j];
      const bool eq = before_it == slot;
      const int other = col + j;
      const int where = eq ? other : 0;
      slot_there_part += where;
    }
  }
  const int slot_there = static_cast<int>(row_sum(slot_there_part, part[0]));
  if (lane == 0) *slot_there_row = slot_there;
}

extern "C" __global__ void __launch_bounds__(256)
moe_layer_upto_value_slot_there(
    const int* __restrict__ a_named_ptr,
    int* __restrict__ a_upto_value_ptr,
    const int* __restrict__ b_before_it_ptr,
    int* __restrict__ b_slot_there_ptr,
    long long blocks_a,
    long long a_rows,
    long long a_upto_value_stride,
    long long b_rows,
    long long b_slot_there_stride)
{
  unsigned block = blockIdx.x;  // the first blocks do the first step
  if (block < blocks_a) {
    part_a(block, a_named_ptr, a_upto_value_ptr, a_upto_value_stride);
    return;
  }
  block -= static_cast<unsigned>(blocks_a);
  part_b(block, b_before_it_ptr, b_slot_there_ptr, b_slot_there_stride);
}
