// The everyday dialect of CUDA and HIP in plain C++. Force-included in front of every kernel's source, which stays
// unchanged but for its __shared__ declarations (rewrite.py says why) and its inline PTX (ptx.py).
//
// Light on purpose: no standard header. Two rules for all that is inlined into a kernel:
//   - functions are `always_inline`, so that an access inside one is reported at the kernel's line that calls it;
//   - what waits takes its caller's line as a last default argument.
#pragma once

#include "simt.h"

#define __global__
#define __device__
#define __host__
#define __managed__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__

#define SIMT_INLINE static inline __attribute__((always_inline))
#define SIMT_INLINE_MEMBER inline __attribute__((always_inline))
#define SIMT_LINE int line = __builtin_LINE()

// rewrite.py replaces the declarations of shared memory. Left over is only what it does not look at: a macro's text.
#define __shared__ simt_cannot_read_a_shared_declaration_in_a_macro

namespace simt {

constexpr u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// `Declared` is the alignment that stands in front of the variable.
template <class T, u64 Declared>
constexpr SharedVariable describe_shared(const char* name) {
  static_assert(larger(alignof(T), Declared) <= largest_shared_alignment, "the emulator aligns to 4096 bytes at most");
  return {sizeof(T), larger(alignof(T), Declared), name, 0};
}

template <class T>
SIMT_INLINE T& shared_variable(SharedVariable& variable) {
#ifndef SIMT_CHECK
  if (u32 offset = __atomic_load_n(&variable.offset, __ATOMIC_ACQUIRE)) {
    return *reinterpret_cast<T*>(current_thread->block->shared + offset);
  }
#endif
  return *reinterpret_cast<T*>(place_shared(variable));
}

// A function and no constant: warpSize can't size an array on the device either.
SIMT_INLINE int warp_size() { return SIMT_WARP; }

// `extern __shared__` outside a function: an object that acts as the array.
template <class T>
struct DynamicShared {
  __attribute__((always_inline)) operator T*() const { return reinterpret_cast<T*>(dynamic_shared()); }
};

}  // namespace simt

#include "vectors.h"

#define threadIdx (simt::thread_index())
#define blockIdx (simt::block_index())
#define blockDim (simt::block_size())
#define gridDim (simt::grid_size())
#define warpSize (simt::warp_size())

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

#include "bits.h"
#include "mathematics.h"
#include "memory.h"
#include "warp.h"
#include "atomics.h"
#include "cluster.h"
#include "ptx.h"
#include "mfma.h"
#include "wmma.h"
#include "launcher.h"
