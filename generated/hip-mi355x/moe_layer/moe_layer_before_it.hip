// moe_layer_before_it  i32[T_times_4], i32[T_times_4, 1] -> i32[T_times_4, 1]  at T_times_4=1024
// before_it of moe_layer.
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    own is named as [4 * T, 1]
// tile     a block of 256 threads a row, 1 x 4 elements a thread; one pass, nothing kept
// traffic  12288 B moved, 12288 B ideal, 12288 B unfused in 1 launch
// floor    0.0 us at 8 TB/s; instruction-bound at 597.33 flop/B
// needs    rows of 1024 elements, next to each other; named: address and strides in multiples of 16 B;
//          named [T_times_4] shared by every row

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

extern "C" __global__ void __launch_bounds__(256)
moe_layer_before_it(
    const int* __restrict__ named_ptr,
    const int* __restrict__ own_2_ptr,
    int* __restrict__ before_it_ptr,
    long long rows,
    long long own_2_stride,
    long long before_it_stride)
{
  const int lane = threadIdx.x;  // of the 256 threads that share a row
  __shared__ float part[1][4];
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (row >= rows) return;  // the grid's last line is longer than what is left
  const int* const own_2_row = own_2_ptr + row * own_2_stride;
  int* const before_it_row = before_it_ptr + row * before_it_stride;
  const int own_2 = *own_2_row;
  const int slot = static_cast<int>(row);
  const int col = lane * 4;

  // pass 1 of 1: read named; before_it = sum(where)
  unsigned before_it_part = 0u;
  {
    const Vec<int, 4> named_vec = load<4>(named_ptr + col);
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int named = named_vec.at[j];
      const bool named_below_own_2 = named < own_2;
      const bool eq = named == own_2;
      const int other = col + j;
      const bool other_below_slot = other < slot;
      const bool logical_and = eq && other_below_slot;
      const bool ahead = named_below_own_2 || logical_and;
      const int where = ahead ? 1 : 0;
      before_it_part += where;
    }
  }
  const int before_it = static_cast<int>(row_sum(before_it_part, part[0]));
  if (lane == 0) *before_it_row = before_it;
}
