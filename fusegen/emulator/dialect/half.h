// __half and __half2, for <cuda_fp16.h> and <hip/hip_fp16.h>. Not force-included: without its header a kernel has no
// halves.
#pragma once

#include "conversions.h"

struct __half_raw {
  unsigned short x;
};

struct __half {
  unsigned short storage;

  __half() = default;
  SIMT_INLINE_MEMBER __half(float x) : storage(simt::float_to_half(x)) {}
  SIMT_INLINE_MEMBER __half(double x) : storage(simt::float_to_half(simt::double_to_odd_float(x))) {}
  SIMT_INLINE_MEMBER __half(int x) : storage(simt::float_to_half(simt::double_to_odd_float(x))) {}
  SIMT_INLINE_MEMBER __half(__half_raw raw) : storage(raw.x) {}
  SIMT_INLINE_MEMBER operator float() const { return simt::half_to_float(storage); }
  SIMT_INLINE_MEMBER operator __half_raw() const { return {storage}; }
  SIMT_INLINE_MEMBER static __half from_storage(int bits) { return __half_raw{static_cast<unsigned short>(bits)}; }
};

struct alignas(4) __half2 {
  __half x;
  __half y;

  __half2() = default;
  SIMT_INLINE_MEMBER __half2(__half x, __half y) : x(x), y(y) {}
};

typedef __half half;
typedef __half2 half2;

SIMT_SHORT_FLOAT_OPERATORS(__half)
SIMT_SHORT_FLOAT_PAIRS(__half, __half2)

SIMT_INLINE float __half2float(__half x) { return float(x); }
SIMT_INLINE __half __float2half(float x) { return __half(x); }
SIMT_INLINE __half __float2half_rn(float x) { return __half(x); }
SIMT_INLINE __half __double2half(double x) { return __half(x); }
SIMT_INLINE __half __int2half_rn(int x) { return __half(x); }
SIMT_INLINE int __half2int_rn(__half x) { return __float2int_rn(float(x)); }
SIMT_INLINE int __half2int_rz(__half x) { return __float2int_rz(float(x)); }
SIMT_INLINE unsigned short __half_as_ushort(__half x) { return x.storage; }
SIMT_INLINE short __half_as_short(__half x) { return static_cast<short>(x.storage); }
SIMT_INLINE __half __ushort_as_half(unsigned short x) { return __half::from_storage(x); }
SIMT_INLINE __half __short_as_half(short x) { return __half::from_storage(x); }

SIMT_INLINE float2 __half22float2(__half2 x) { return {float(x.x), float(x.y)}; }
SIMT_INLINE __half2 __float22half2_rn(float2 x) { return {__half(x.x), __half(x.y)}; }
SIMT_INLINE __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
SIMT_INLINE __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
SIMT_INLINE __half2 __half2half2(__half x) { return {x, x}; }
SIMT_INLINE __half2 __halves2half2(__half x, __half y) { return {x, y}; }
SIMT_INLINE __half2 make_half2(__half x, __half y) { return {x, y}; }
SIMT_INLINE __half __low2half(__half2 x) { return x.x; }
SIMT_INLINE __half __high2half(__half2 x) { return x.y; }
