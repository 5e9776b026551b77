// gate_up_silu_mul  bf16[M, N], bf16[M, N] -> bf16[M, N]  at M=8192 N=14336
// silu(gate) * up.
//
//     def gate_up_silu_mul(gate_up):
//         gate, up = F.split(gate_up, 2)
//         return F.silu(gate) * up
//
// target   hip gfx950, facts of mi355x: warp 64, 256 SMs, 8 TB/s
// views    gate is gate_up[..., :N]; up is gate_up[..., N:]
// tile     tiles of rows and columns; a block of 128 threads on 1 row, 8 elements a thread
// traffic  704.6 MB moved, 704.6 MB ideal, 1174.4 MB unfused in 2 launches
// floor    88.1 us at 8 TB/s; memory-bound at 1.83 flop/B
// rounding out to bf16 when stored; f32 between
// needs    rows of 14336 elements, next to each other; gate, up, out: address and strides in multiples
//          of 16 B

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
  return __builtin_amdgcn_exp2f(x);
}

// 1 / x, within 1 ulp; above 2^126 it is 0
__device__ __forceinline__ float reciprocal(float x) {
  return __builtin_amdgcn_rcpf(x);
}

// e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0
__device__ __forceinline__ float exponential(float x) {
  return power_of_2(1.44269504f * x);
}

extern "C" __global__ void __launch_bounds__(128)
gate_up_silu_mul(
    const __bf16* __restrict__ gate_ptr,
    const __bf16* __restrict__ up_ptr,
    __bf16* __restrict__ out_ptr,
    long long rows,
    long long gate_stride,
    long long up_stride,
    long long out_stride)
{
  constexpr int tile_cols = 1024;  // that a block takes
  constexpr int row_blocks = 14;  // that share a row
  const int lane = threadIdx.x;  // of the 128 threads that share a row
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (tile >= rows * row_blocks) return;  // the grid's last line is longer than what is left
  const long long row = tile / row_blocks;
  const __bf16* const gate_row = gate_ptr + row * gate_stride;
  const __bf16* const up_row = up_ptr + row * up_stride;
  __bf16* const out_row = out_ptr + row * out_stride;
  const int col = static_cast<int>(tile % row_blocks) * tile_cols + lane * 8;

  // pass 1 of 1: read gate, up; write out
  {
    const Vec<__bf16, 8> gate_vec = load<8>(gate_row + col);
    const Vec<__bf16, 8> up_vec = load<8>(up_row + col);
    Vec<__bf16, 8> out_vec;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float gate = static_cast<float>(gate_vec.at[j]);
      const float up = static_cast<float>(up_vec.at[j]);
      const float silu = gate * reciprocal(1.0f + exponential(-gate));
      const float mul = silu * up;
      out_vec.at[j] = static_cast<__bf16>(mul);
    }
    store<8>(out_row + col, out_vec);
  }
}
