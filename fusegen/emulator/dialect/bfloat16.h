// __nv_bfloat16 and __hip_bfloat16 with their pairs, for <cuda_bf16.h> and <hip/hip_bf16.h>.
#pragma once

#include "conversions.h"

struct __nv_bfloat16_raw {
  unsigned short x;
};

struct __nv_bfloat16 {
  unsigned short storage;

  __nv_bfloat16() = default;
  SIMT_INLINE_MEMBER __nv_bfloat16(float x) : storage(simt::float_to_bfloat(x)) {}
  SIMT_INLINE_MEMBER __nv_bfloat16(double x) : storage(simt::float_to_bfloat(simt::double_to_odd_float(x))) {}
  SIMT_INLINE_MEMBER __nv_bfloat16(int x) : storage(simt::float_to_bfloat(simt::double_to_odd_float(x))) {}
  SIMT_INLINE_MEMBER __nv_bfloat16(__nv_bfloat16_raw raw) : storage(raw.x) {}
  SIMT_INLINE_MEMBER operator float() const { return simt::bfloat_to_float(storage); }
  SIMT_INLINE_MEMBER operator __nv_bfloat16_raw() const { return {storage}; }
  SIMT_INLINE_MEMBER static __nv_bfloat16 from_storage(int bits) {
    return __nv_bfloat16_raw{static_cast<unsigned short>(bits)};
  }
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x;
  __nv_bfloat16 y;

  __nv_bfloat162() = default;
  SIMT_INLINE_MEMBER __nv_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) : x(x), y(y) {}
};

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
typedef __nv_bfloat16 __hip_bfloat16;
typedef __nv_bfloat162 __hip_bfloat162;
typedef __nv_bfloat16_raw __hip_bfloat16_raw;

SIMT_SHORT_FLOAT_OPERATORS(__nv_bfloat16)
SIMT_SHORT_FLOAT_PAIRS(__nv_bfloat16, __nv_bfloat162)

SIMT_INLINE float __bfloat162float(__nv_bfloat16 x) { return float(x); }
SIMT_INLINE __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
SIMT_INLINE __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
SIMT_INLINE __nv_bfloat16 __double2bfloat16(double x) { return __nv_bfloat16(x); }
SIMT_INLINE __nv_bfloat16 __int2bfloat16_rn(int x) { return __nv_bfloat16(x); }
SIMT_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.storage; }
SIMT_INLINE short __bfloat16_as_short(__nv_bfloat16 x) { return static_cast<short>(x.storage); }
SIMT_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __nv_bfloat16::from_storage(x); }
SIMT_INLINE __nv_bfloat16 __short_as_bfloat16(short x) { return __nv_bfloat16::from_storage(x); }

SIMT_INLINE float2 __bfloat1622float2(__nv_bfloat162 x) { return {float(x.x), float(x.y)}; }
SIMT_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {__nv_bfloat16(x.x), __nv_bfloat16(x.y)}; }
SIMT_INLINE __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
SIMT_INLINE __nv_bfloat162 __float2bfloat162_rn(float x) { return {__nv_bfloat16(x), __nv_bfloat16(x)}; }
SIMT_INLINE __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
SIMT_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
SIMT_INLINE __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
SIMT_INLINE __nv_bfloat16 __low2bfloat16(__nv_bfloat162 x) { return x.x; }
SIMT_INLINE __nv_bfloat16 __high2bfloat16(__nv_bfloat162 x) { return x.y; }

// clang's own name for it, as HIP sources write it. A macro, since newer host compilers have a type of that name whose
// arithmetic is not checked here; _Float16 is the host's own on every compiler that runs the emulator.
#define __bf16 __nv_bfloat16
