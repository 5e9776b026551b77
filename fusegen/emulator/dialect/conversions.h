// float <-> 16-bit floats, round to nearest even, exact for NaN, infinity, denormals and overflow.
#pragma once

namespace simt {

SIMT_INLINE float half_to_float(u16 half) {
#if defined(__FLT16_MAX__) && !defined(SIMT_PORTABLE_HALF)
  return static_cast<float>(__builtin_bit_cast(_Float16, half));
#else
  u32 sign = static_cast<u32>(half & 0x8000u) << 16;
  u32 exponent = half >> 10 & 0x1fu;
  u32 fraction = half & 0x3ffu;
  if (exponent == 0x1f) {
    u32 quiet = fraction ? 0x400000u : 0;
    return __builtin_bit_cast(float, sign | 0x7f800000u | quiet | fraction << 13);
  }
  if (exponent == 0) {
    float tiny = static_cast<float>(fraction) * 0x1p-24f;  // zero and denormals; exact
    return __builtin_bit_cast(float, __builtin_bit_cast(u32, tiny) | sign);
  }
  return __builtin_bit_cast(float, sign | (exponent + 112) << 23 | fraction << 13);
#endif
}

SIMT_INLINE u16 float_to_half(float x) {
  if (__builtin_isnan(x)) {
    return 0x7fff;  // the one NaN that the device makes
  }
#if defined(__FLT16_MAX__) && !defined(SIMT_PORTABLE_HALF)
  return __builtin_bit_cast(u16, static_cast<_Float16>(x));
#else
  u32 bits = __builtin_bit_cast(u32, x);
  u32 sign = bits >> 16 & 0x8000u;
  u32 magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x47800000u) {  // 65536 and above, and infinity
    return static_cast<u16>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {
    // Below the smallest normal half: adding 0.5 leaves the half's fraction, rightly rounded, in the lowest bits.
    float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    return static_cast<u16>(sign | (__builtin_bit_cast(u32, shifted) - 0x3f000000u));
  }
  u32 odd = magnitude >> 13 & 1u;
  u32 rounded = magnitude + 0xfffu + odd - (112u << 23);
  return static_cast<u16>(sign | rounded >> 13);  // a carry out of the fraction goes up to infinity by itself
#endif
}

SIMT_INLINE float bfloat_to_float(u16 bfloat) { return __builtin_bit_cast(float, static_cast<u32>(bfloat) << 16); }

SIMT_INLINE u16 float_to_bfloat(float x) {
  if (__builtin_isnan(x)) {
    return 0x7fff;
  }
  u32 bits = __builtin_bit_cast(u32, x);
  u32 odd = bits >> 16 & 1u;
  return static_cast<u16>((bits + 0x7fffu + odd) >> 16);
}

// A double has to be rounded once, not twice: to odd at float's precision, then to the 16-bit type.
SIMT_INLINE float double_to_odd_float(double x) {
  float nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || __builtin_isnan(x) || __builtin_isinf(nearest)) {
    return nearest;
  }
  u32 bits = __builtin_bit_cast(u32, nearest);
  bool away_from_zero = __builtin_fabs(static_cast<double>(nearest)) > __builtin_fabs(x);
  return __builtin_bit_cast(float, (bits - (away_from_zero ? 1u : 0u)) | 1u);
}

}  // namespace simt

// The arithmetic that both 16-bit types share. Each operation computes in float and rounds once: float has more than
// twice the digits plus two, so the double rounding is harmless for + - * / and sqrt; fma goes through double for the
// same reason.
#define SIMT_SHORT_FLOAT_OPERATORS(type)                                                            \
  SIMT_INLINE type operator+(type a, type b) { return type(float(a) + float(b)); }                  \
  SIMT_INLINE type operator-(type a, type b) { return type(float(a) - float(b)); }                  \
  SIMT_INLINE type operator*(type a, type b) { return type(float(a) * float(b)); }                  \
  SIMT_INLINE type operator/(type a, type b) { return type(float(a) / float(b)); }                  \
  SIMT_INLINE type operator-(type a) { return type::from_storage(a.storage ^ 0x8000); }             \
  SIMT_INLINE type& operator+=(type& a, type b) { return a = a + b; }                               \
  SIMT_INLINE type& operator-=(type& a, type b) { return a = a - b; }                               \
  SIMT_INLINE type& operator*=(type& a, type b) { return a = a * b; }                               \
  SIMT_INLINE type& operator/=(type& a, type b) { return a = a / b; }                               \
  SIMT_INLINE bool operator==(type a, type b) { return float(a) == float(b); }                      \
  SIMT_INLINE bool operator!=(type a, type b) { return float(a) != float(b); }                      \
  SIMT_INLINE bool operator<(type a, type b) { return float(a) < float(b); }                        \
  SIMT_INLINE bool operator>(type a, type b) { return float(a) > float(b); }                        \
  SIMT_INLINE bool operator<=(type a, type b) { return float(a) <= float(b); }                      \
  SIMT_INLINE bool operator>=(type a, type b) { return float(a) >= float(b); }                      \
  SIMT_INLINE type __hadd(type a, type b) { return a + b; }                                         \
  SIMT_INLINE type __hsub(type a, type b) { return a - b; }                                         \
  SIMT_INLINE type __hmul(type a, type b) { return a * b; }                                         \
  SIMT_INLINE type __hdiv(type a, type b) { return a / b; }                                         \
  SIMT_INLINE type __hfma(type a, type b, type c) {                                                 \
    return type(simt::double_to_odd_float(double(float(a)) * double(float(b)) + double(float(c)))); \
  }                                                                                                 \
  SIMT_INLINE type __hneg(type a) { return -a; }                                                    \
  SIMT_INLINE type __habs(type a) { return type::from_storage(a.storage & 0x7fff); }                \
  SIMT_INLINE type __hmax(type a, type b) { return type(__builtin_fmaxf(float(a), float(b))); }     \
  SIMT_INLINE type __hmin(type a, type b) { return type(__builtin_fminf(float(a), float(b))); }     \
  SIMT_INLINE bool __heq(type a, type b) { return a == b; }                                         \
  SIMT_INLINE bool __hne(type a, type b) { return a != b; }                                         \
  SIMT_INLINE bool __hlt(type a, type b) { return a < b; }                                          \
  SIMT_INLINE bool __hgt(type a, type b) { return a > b; }                                          \
  SIMT_INLINE bool __hle(type a, type b) { return a <= b; }                                         \
  SIMT_INLINE bool __hge(type a, type b) { return a >= b; }                                         \
  SIMT_INLINE bool __hisnan(type a) { return isnan(float(a)); }                                     \
  SIMT_INLINE int __hisinf(type a) { return isinf(float(a)) ? (float(a) < 0.0f ? -1 : 1) : 0; }     \
  SIMT_INLINE type hexp(type a) { return type(expf(float(a))); }                                    \
  SIMT_INLINE type hexp2(type a) { return type(exp2f(float(a))); }                                  \
  SIMT_INLINE type hlog(type a) { return type(logf(float(a))); }                                    \
  SIMT_INLINE type hsqrt(type a) { return type(sqrtf(float(a))); }                                  \
  SIMT_INLINE type hrsqrt(type a) { return type(rsqrtf(float(a))); }                                \
  SIMT_INLINE type hrcp(type a) { return type(1.0f / float(a)); }                                   \
  SIMT_INLINE type hfloor(type a) { return type(floorf(float(a))); }                                \
  SIMT_INLINE type hceil(type a) { return type(ceilf(float(a))); }                                  \
  SIMT_INLINE type hrint(type a) { return type(rintf(float(a))); }

#define SIMT_SHORT_FLOAT_PAIRS(type, pair)                                                                    \
  SIMT_INLINE pair __hadd2(pair a, pair b) { return {a.x + b.x, a.y + b.y}; }                                 \
  SIMT_INLINE pair __hsub2(pair a, pair b) { return {a.x - b.x, a.y - b.y}; }                                 \
  SIMT_INLINE pair __hmul2(pair a, pair b) { return {a.x * b.x, a.y * b.y}; }                                 \
  SIMT_INLINE pair __h2div(pair a, pair b) { return {a.x / b.x, a.y / b.y}; }                                 \
  SIMT_INLINE pair __hfma2(pair a, pair b, pair c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; } \
  SIMT_INLINE pair __hmax2(pair a, pair b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                   \
  SIMT_INLINE pair __hmin2(pair a, pair b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                   \
  SIMT_INLINE pair __hneg2(pair a) { return {-a.x, -a.y}; }                                                   \
  SIMT_INLINE pair __habs2(pair a) { return {__habs(a.x), __habs(a.y)}; }                                     \
  SIMT_INLINE pair operator+(pair a, pair b) { return __hadd2(a, b); }                                        \
  SIMT_INLINE pair operator-(pair a, pair b) { return __hsub2(a, b); }                                        \
  SIMT_INLINE pair operator*(pair a, pair b) { return __hmul2(a, b); }                                        \
  SIMT_INLINE float __low2float(pair a) { return float(a.x); }                                                \
  SIMT_INLINE float __high2float(pair a) { return float(a.y); }
