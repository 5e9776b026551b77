// Inline PTX: conversions to and from floating-point numbers of 8 bits, two at a time (PTX ISA, cvt; from sm_89 on), and
// arithmetic on pairs of short floats.
#pragma once

#include "conversions.h"

namespace simt {

struct Narrow {
  int mantissa, bias;
  double largest;
  u32 infinity;  // its code; beyond all codes where there is none
};
constexpr Narrow e4m3{3, 7, 448.0, 0x80}, e5m2{2, 15, 57344.0, 0x7c};

// The nearest number, of two the even one, and the largest one for what is beyond it (.satfinite). NaN has one code.
SIMT_INLINE u32 narrow_code(float x, const Narrow& type) {
  if (__builtin_isnan(x)) return 0x7f;
  const double size = __builtin_fmin(__builtin_fabs(static_cast<double>(x)), type.largest);
  const u32 sign = __builtin_signbit(x) ? 0x80u : 0u;
  if (size == 0.0) return sign;
  const int least = 1 - type.bias;  // the exponent of all subnormals
  const int exponent = __builtin_ilogb(size) < least ? least : __builtin_ilogb(size);
  const u32 steps = static_cast<u32>(__builtin_rint(__builtin_ldexp(size, type.mantissa - exponent)));
  return sign | ((static_cast<u32>(exponent - least) << type.mantissa) + steps);
}
SIMT_INLINE u16 narrow_codes(float high, float low, const Narrow& type) {
  return static_cast<u16>(narrow_code(high, type) << 8 | narrow_code(low, type));
}

SIMT_INLINE u16 narrow_half(u32 code, const Narrow& type) {
  const u32 size = code & 0x7fu;
  if (size > type.infinity || size == 0x7f) return 0x7fff;
  const int exponent = static_cast<int>(size >> type.mantissa);
  const double steps = size & ((1u << type.mantissa) - 1);
  double number = exponent == 0 ? __builtin_ldexp(steps, 1 - type.bias - type.mantissa)
                                : __builtin_ldexp(steps + (1 << type.mantissa), exponent - type.bias - type.mantissa);
  if (size == type.infinity) number = __builtin_inf();
  return __builtin_bit_cast(u16, static_cast<_Float16>(code & 0x80u ? -number : number));
}
SIMT_INLINE u32 narrow_halves(u16 codes, const Narrow& type) {
  return static_cast<u32>(narrow_half(codes >> 8, type)) << 16 | narrow_half(codes & 0xffu, type);
}

SIMT_INLINE void ptx_cvt_rn_satfinite_e4m3x2_f32(u16& d, float a, float b) { d = narrow_codes(a, b, e4m3); }
SIMT_INLINE void ptx_cvt_rn_satfinite_e5m2x2_f32(u16& d, float a, float b) { d = narrow_codes(a, b, e5m2); }
SIMT_INLINE void ptx_cvt_rn_f16x2_e4m3x2(u32& d, u16 a) { d = narrow_halves(a, e4m3); }
SIMT_INLINE void ptx_cvt_rn_f16x2_e5m2x2(u32& d, u16 a) { d = narrow_halves(a, e5m2); }
SIMT_INLINE void ptx_cvt_f32_f16(float& d, u16 a) {
  d = ptx_canonical(static_cast<float>(__builtin_bit_cast(_Float16, a)));
}

// a * b + c of two short floats in a word, rounded once: a double holds their product and, of numbers of like size, the sum.
SIMT_INLINE double short_half(u16 a) { return static_cast<double>(half_to_float(a)); }
SIMT_INLINE double short_bfloat(u16 a) { return static_cast<double>(bfloat_to_float(a)); }
#define SIMT_PTX_FUSED_PAIR(name, wide, narrow)                                                 \
  SIMT_INLINE void name(u32& d, u32 a, u32 b, u32 c) {                                          \
    u32 found = 0;                                                                              \
    for (int part = 0; part < 2; ++part) {                                                      \
      const int at = part * 16;                                                                 \
      const double sum = wide(static_cast<u16>(a >> at)) * wide(static_cast<u16>(b >> at)) +    \
                         wide(static_cast<u16>(c >> at));                                       \
      const u16 rounded = narrow(double_to_odd_float(sum));                                     \
      found |= static_cast<u32>(__builtin_isnan(sum) ? 0x7fff : rounded) << at;                 \
    }                                                                                           \
    d = found;                                                                                  \
  }
SIMT_PTX_FUSED_PAIR(ptx_fma_rn_f16x2, short_half, float_to_half)
SIMT_PTX_FUSED_PAIR(ptx_fma_rn_bf16x2, short_bfloat, float_to_bfloat)

// Of two numbers of 16 bits each.
#define SIMT_PTX_LARGER_PAIR(name, wide)                                                                    \
  SIMT_INLINE void name(u32& d, u32 a, u32 b) {                                                             \
    u32 found = 0;                                                                                          \
    for (int at = 0; at < 32; at += 16) {                                                                   \
      const u16 x = static_cast<u16>(a >> at), y = static_cast<u16>(b >> at);                               \
      const float p = wide(x), q = wide(y);                                                                 \
      const bool none = __builtin_isnan(p) || __builtin_isnan(q);                                           \
      const bool first = p > q || (p == q && !__builtin_signbit(p));                                        \
      found |= static_cast<u32>(none ? 0x7fff : first ? x : y) << at;                                       \
    }                                                                                                       \
    d = found;                                                                                              \
  }
SIMT_PTX_LARGER_PAIR(ptx_max_NaN_f16x2, half_to_float)
SIMT_PTX_LARGER_PAIR(ptx_max_NaN_bf16x2, bfloat_to_float)

}  // namespace simt
