// Built-in vector types, with CUDA's alignments: char4 4, float2 8, float3 4, float4 16, double2 16.
#pragma once

#define SIMT_VECTORS(type, name, align2, align4)                                   \
  struct name##1 { type x; };                                                      \
  struct alignas(align2) name##2 { type x, y; };                                   \
  struct name##3 { type x, y, z; };                                                \
  struct alignas(align4) name##4 { type x, y, z, w; };                             \
  SIMT_INLINE name##1 make_##name##1(type x) { return {x}; }                       \
  SIMT_INLINE name##2 make_##name##2(type x, type y) { return {x, y}; }            \
  SIMT_INLINE name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  SIMT_INLINE name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

SIMT_VECTORS(signed char, char, 2, 4)
SIMT_VECTORS(unsigned char, uchar, 2, 4)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(unsigned short, ushort, 4, 8)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(float, float, 8, 16)
SIMT_VECTORS(long long, longlong, 16, 16)
SIMT_VECTORS(unsigned long long, ulonglong, 16, 16)
SIMT_VECTORS(double, double, 16, 16)

// threadIdx and its kin have type uint3, which is therefore the runtime's own record.
struct uint1 {
  unsigned x;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
using uint3 = simt::Index3;
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
SIMT_INLINE uint1 make_uint1(unsigned x) { return {x}; }
SIMT_INLINE uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
SIMT_INLINE uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
SIMT_INLINE uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};
