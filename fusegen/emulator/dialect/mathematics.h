// Mathematics. The host's libm is at least as accurate as the device's functions, so a kernel that needs accuracy is
// judged fairly, and the approximate intrinsics (__expf) are only better here than on the device: fast-math error is
// not modelled.
#pragma once

#define SIMT_UNARY(name)           \
  extern "C" float name##f(float); \
  extern "C" double name(double);  \
  SIMT_INLINE float name(float x) { return __builtin_##name##f(x); }
#define SIMT_BINARY(name)                 \
  extern "C" float name##f(float, float); \
  extern "C" double name(double, double); \
  SIMT_INLINE float name(float x, float y) { return __builtin_##name##f(x, y); }

SIMT_UNARY(exp)
SIMT_UNARY(exp2)
SIMT_UNARY(expm1)
SIMT_UNARY(log)
SIMT_UNARY(log2)
SIMT_UNARY(log10)
SIMT_UNARY(log1p)
SIMT_UNARY(sin)
SIMT_UNARY(cos)
SIMT_UNARY(tan)
SIMT_UNARY(asin)
SIMT_UNARY(acos)
SIMT_UNARY(atan)
SIMT_UNARY(sinh)
SIMT_UNARY(cosh)
SIMT_UNARY(tanh)
SIMT_UNARY(asinh)
SIMT_UNARY(acosh)
SIMT_UNARY(atanh)
SIMT_UNARY(erf)
SIMT_UNARY(erfc)
SIMT_UNARY(lgamma)
SIMT_UNARY(tgamma)
SIMT_UNARY(sqrt)
SIMT_UNARY(cbrt)
SIMT_UNARY(fabs)
SIMT_UNARY(floor)
SIMT_UNARY(ceil)
SIMT_UNARY(trunc)
SIMT_UNARY(round)
SIMT_UNARY(rint)
SIMT_UNARY(nearbyint)
SIMT_BINARY(pow)
SIMT_BINARY(atan2)
SIMT_BINARY(fmod)
SIMT_BINARY(remainder)
SIMT_BINARY(hypot)
SIMT_BINARY(copysign)
SIMT_BINARY(nextafter)
SIMT_BINARY(fmax)
SIMT_BINARY(fmin)
SIMT_BINARY(fdim)

extern "C" float fmaf(float, float, float);
extern "C" double fma(double, double, double);
extern "C" float ldexpf(float, int);
extern "C" double ldexp(double, int);
extern "C" float frexpf(float, int*);
extern "C" float scalbnf(float, int);
extern "C" int ilogbf(float);
extern "C" long lrintf(float);
extern "C" long lroundf(float);
extern "C" int abs(int);
extern "C" long labs(long);
extern "C" long long llabs(long long);
SIMT_INLINE float abs(float x) { return __builtin_fabsf(x); }
SIMT_INLINE double abs(double x) { return __builtin_fabs(x); }
SIMT_INLINE long abs(long x) { return x < 0 ? -x : x; }
SIMT_INLINE long long abs(long long x) { return x < 0 ? -x : x; }
SIMT_INLINE float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }

SIMT_INLINE float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
SIMT_INLINE double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
SIMT_INLINE float rsqrt(float x) { return rsqrtf(x); }
SIMT_INLINE float rcbrtf(float x) { return 1.0f / cbrtf(x); }
SIMT_INLINE float exp10f(float x) { return static_cast<float>(pow(10.0, static_cast<double>(x))); }
SIMT_INLINE double exp10(double x) { return pow(10.0, x); }
SIMT_INLINE float normcdff(float x) { return 0.5f * erfcf(x * -0.70710678118654752f); }
SIMT_INLINE float sinpif(float x) { return static_cast<float>(sin(3.14159265358979323846 * static_cast<double>(x))); }
SIMT_INLINE float cospif(float x) { return static_cast<float>(cos(3.14159265358979323846 * static_cast<double>(x))); }
SIMT_INLINE void sincosf(float x, float* sine, float* cosine) {
  *sine = sinf(x);
  *cosine = cosf(x);
}

// Functions here, macros in <math.h>: a kernel may write ::isnan.
SIMT_INLINE bool isnan(float x) { return __builtin_isnan(x); }
SIMT_INLINE bool isnan(double x) { return __builtin_isnan(x); }
SIMT_INLINE bool isinf(float x) { return __builtin_isinf(x); }
SIMT_INLINE bool isinf(double x) { return __builtin_isinf(x); }
SIMT_INLINE bool isfinite(float x) { return __builtin_isfinite(x); }
SIMT_INLINE bool isfinite(double x) { return __builtin_isfinite(x); }
SIMT_INLINE bool signbit(float x) { return __builtin_signbit(x); }
SIMT_INLINE bool signbit(double x) { return __builtin_signbit(x); }

// The approximate intrinsics. glibc owns the names __expf, __logf and __powf, so these are macros.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __tanhf(x) tanhf(x)
SIMT_INLINE float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
SIMT_INLINE float __fdividef(float x, float y) { return x / y; }
SIMT_INLINE float __frcp_rn(float x) { return 1.0f / x; }
SIMT_INLINE float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
SIMT_INLINE float __frsqrt_rn(float x) { return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x))); }
SIMT_INLINE float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
SIMT_INLINE float __fdiv_rn(float x, float y) { return x / y; }

namespace simt {
// These intrinsics promise to be no part of a fused multiply-add; an empty asm keeps the compiler from seeing through.
SIMT_INLINE float keep_rounded(float x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}
}  // namespace simt
SIMT_INLINE float __fadd_rn(float x, float y) {
  return simt::keep_rounded(simt::keep_rounded(x) + simt::keep_rounded(y));
}
SIMT_INLINE float __fsub_rn(float x, float y) {
  return simt::keep_rounded(simt::keep_rounded(x) - simt::keep_rounded(y));
}
SIMT_INLINE float __fmul_rn(float x, float y) { return simt::keep_rounded(x * y); }

// Conversions. From float to integer they saturate, and NaN gives 0, as on the device; a plain cast does not (that is
// undefined in C++).
#define SIMT_TO_INTEGER(name, integer, low, high, rounding) \
  SIMT_INLINE integer name(float x) {                       \
    double whole = rounding(static_cast<double>(x));        \
    if (__builtin_isnan(whole)) {                           \
      return 0;                                             \
    }                                                       \
    return whole <= (low)    ? static_cast<integer>(low)    \
           : whole >= (high) ? static_cast<integer>(high)   \
                             : static_cast<integer>(whole); \
  }
SIMT_TO_INTEGER(__float2int_rn, int, -2147483648.0, 2147483647.0, __builtin_rint)
SIMT_TO_INTEGER(__float2int_rz, int, -2147483648.0, 2147483647.0, __builtin_trunc)
SIMT_TO_INTEGER(__float2int_rd, int, -2147483648.0, 2147483647.0, __builtin_floor)
SIMT_TO_INTEGER(__float2int_ru, int, -2147483648.0, 2147483647.0, __builtin_ceil)
SIMT_TO_INTEGER(__float2uint_rn, unsigned, 0.0, 4294967295.0, __builtin_rint)
SIMT_TO_INTEGER(__float2uint_rz, unsigned, 0.0, 4294967295.0, __builtin_trunc)
SIMT_INLINE float __int2float_rn(int x) { return static_cast<float>(x); }
SIMT_INLINE float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

// min and max: integers of equal or mixed sign as in CUDA, and the NaN-dropping float forms.
#define SIMT_MIN_MAX(result, left, right)                                                                     \
  SIMT_INLINE result min(left a, right b) {                                                                   \
    return static_cast<result>(b) < static_cast<result>(a) ? static_cast<result>(b) : static_cast<result>(a); \
  }                                                                                                           \
  SIMT_INLINE result max(left a, right b) {                                                                   \
    return static_cast<result>(a) < static_cast<result>(b) ? static_cast<result>(b) : static_cast<result>(a); \
  }
SIMT_MIN_MAX(int, int, int)
SIMT_MIN_MAX(unsigned, unsigned, unsigned)
SIMT_MIN_MAX(unsigned, int, unsigned)
SIMT_MIN_MAX(unsigned, unsigned, int)
SIMT_MIN_MAX(long, long, long)
SIMT_MIN_MAX(unsigned long, unsigned long, unsigned long)
SIMT_MIN_MAX(unsigned long, long, unsigned long)
SIMT_MIN_MAX(unsigned long, unsigned long, long)
SIMT_MIN_MAX(long long, long long, long long)
SIMT_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
SIMT_MIN_MAX(unsigned long long, long long, unsigned long long)
SIMT_MIN_MAX(unsigned long long, unsigned long long, long long)
SIMT_INLINE float min(float a, float b) { return __builtin_fminf(a, b); }
SIMT_INLINE float max(float a, float b) { return __builtin_fmaxf(a, b); }
SIMT_INLINE double min(double a, double b) { return __builtin_fmin(a, b); }
SIMT_INLINE double max(double a, double b) { return __builtin_fmax(a, b); }
SIMT_INLINE double min(float a, double b) { return __builtin_fmin(a, b); }
SIMT_INLINE double max(float a, double b) { return __builtin_fmax(a, b); }
SIMT_INLINE double min(double a, float b) { return __builtin_fmin(a, b); }
SIMT_INLINE double max(double a, float b) { return __builtin_fmax(a, b); }

// AMD's own instructions: subnormals become zeros on the way in and out, but for the root's. A compiler that owns these
// names knows them for AMD's targets only, so these are macros.
namespace simt {
SIMT_INLINE float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
SIMT_INLINE float amd_rcp(float x) { return flushed(1.0f / flushed(x)); }
SIMT_INLINE float amd_rsq(float x) { return flushed(__frsqrt_rn(flushed(x))); }
SIMT_INLINE float amd_exp2(float x) { return flushed(static_cast<float>(exp2(static_cast<double>(flushed(x))))); }
SIMT_INLINE float amd_log2(float x) { return flushed(static_cast<float>(log2(static_cast<double>(flushed(x))))); }
SIMT_INLINE float amd_median(float x, float y, float z) {
  if (isnan(x) || isnan(y) || isnan(z)) {
    return fminf(fminf(x, y), z);
  }
  return fmaxf(fminf(x, y), fminf(fmaxf(x, y), z));
}

// IEEE 754-2019's maximum and minimum: NaN wins, and -0 is less than 0
SIMT_INLINE float maximum(float a, float b) {
  if (a != a || b != b) return __builtin_nanf("");
  return a > b || (a == b && !__builtin_signbit(a)) ? a : b;
}
SIMT_INLINE float minimum(float a, float b) { return -maximum(-a, -b); }
}  // namespace simt

// clang's words for them
#define __builtin_elementwise_maximum(a, b) simt::maximum(a, b)
#define __builtin_elementwise_minimum(a, b) simt::minimum(a, b)
#define __builtin_amdgcn_rcpf(x) (simt::amd_rcp(x))
#define __builtin_amdgcn_rsqf(x) (simt::amd_rsq(x))
#define __builtin_amdgcn_sqrtf(x) sqrtf(x)
#define __builtin_amdgcn_exp2f(x) (simt::amd_exp2(x))
#define __builtin_amdgcn_logf(x) (simt::amd_log2(x))
#define __builtin_amdgcn_fmed3f(x, y, z) (simt::amd_median(x, y, z))
