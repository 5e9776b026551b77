// column_sum_out_parts  f32[M, N] -> f32[1056, N]  at M=1048576 N=1024
// out_parts of column_sum.
//
// target   cuda sm_90a, facts of h200: warp 32, 132 SMs, 4.8 TB/s
// tile     1056 parts of the rows, each in turn by a block of 128 threads a row, 2 x 4 elements a
//          thread; 2 rows ahead in shared memory; sums of columns in registers
// traffic  4299.3 MB moved, 4299.3 MB ideal, 4299.3 MB unfused in 1 launch
// floor    895.7 us at 4.8 TB/s; memory-bound at 0.25 flop/B
// needs    rows of 1024 elements, next to each other; x, out_parts: address and strides in multiples of
//          16 B; out_parts [1056, N] shared by every row
// launch   lets the next one begin once all its blocks run

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

// N values on their way from global to shared memory, past the registers; aligned to their size, of 4, 8 or 16 bytes
template <int N, typename T>
__device__ __forceinline__ void copy_async(Vec<T, N>* to, const T* from) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (sizeof(*to) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(place), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
        :: "r"(place), "l"(from), "n"(sizeof(*to)) : "memory");
  }
}

// the copies since the last call become one group
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// waits for the thread's own groups, all but the last Pending
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");
}

extern "C" __global__ void __launch_bounds__(128, 12)
column_sum_out_parts(
    const float* __restrict__ x_ptr,
    float* __restrict__ out_parts_ptr,
    long long rows,
    long long x_stride)
{
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin, once all blocks of this one run
  constexpr int cols = 1024;
  constexpr int row_threads = 128;
  constexpr int vectors = 2;  // of a thread in a row
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  extern __shared__ __align__(16) unsigned char shared[];
  Vec<float, 4>* const x_kept = reinterpret_cast<Vec<float, 4>*>(shared);
  const long long step = gridDim.x;  // parts of the rows: of each, its rows are so many apart
  const long long first = blockIdx.x;  // row of this part, and its number
  float out_parts_part[2][4] = {};  // of this thread's columns

  // ask for the first rows' x
  constexpr int slots = 2;
  for (int s = 0; s < slots; ++s) {
    const long long ahead = first + s * step;
    if (ahead < rows) {
      #pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int col = (v * row_threads + lane) * 4;
        copy_async<4>(&x_kept[(s * vectors + v) * row_threads + threadIdx.x], x_ptr + ahead * x_stride + col);
      }
    }
    commit_copies();
  }
  int slot = 0;
  for (long long row = first; row < rows; row += step) {
    wait_copies<slots - 1>();

    // pass 1 of 1: read x; out_parts = sum(x) over rows
    #pragma unroll
    for (int v = 0; v < 2; ++v) {
      const Vec<float, 4> x_vec = x_kept[(slot * vectors + v) * row_threads + threadIdx.x];
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = x_vec.at[j];
        out_parts_part[v][j] += x;
      }
    }

    // ask for a row to come, in this one's place
    const long long ahead = row + slots * step;
    if (ahead < rows) {
      #pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int col = (v * row_threads + lane) * 4;
        copy_async<4>(&x_kept[(slot * vectors + v) * row_threads + threadIdx.x], x_ptr + ahead * x_stride + col);
      }
    }
    commit_copies();
    slot = slot + 1 == slots ? 0 : slot + 1;
  }

  // what this part makes of each column
  #pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = (v * row_threads + lane) * 4;
    Vec<float, 4> out_parts_vec;
    #pragma unroll
    for (int j = 0; j < 4; ++j) out_parts_vec.at[j] = out_parts_part[v][j];
    store<4>(out_parts_ptr + first * cols + col, out_parts_vec);
  }
}
