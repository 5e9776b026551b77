// What the matrix instructions share: numbers of 8, 16 and 19 bits as floats, and the product.
#pragma once

#include "worker.h"

namespace simt {

// Exact; table-free, since the runtime is compiled for any processor.
inline float half_value(u16 bits) {
  float magnitude = __builtin_bit_cast(float, (bits & 0x7fffu) << 13) * 0x1p112f;
  u32 value = __builtin_bit_cast(u32, magnitude);
  u32 special = magnitude >= 65536.0f ? 0x7f800000u : 0;  // infinity and NaN keep their fraction
  return __builtin_bit_cast(float, value | special | (bits & 0x8000u) << 16);
}

inline float bfloat_value(u16 bits) { return __builtin_bit_cast(float, static_cast<u32>(bits) << 16); }

// A tf32 is the upper 19 bits of a float; the instruction takes no notice of the rest.
inline float tf32_value(u32 bits) { return __builtin_bit_cast(float, bits & 0xffffe000u); }

inline float value_of(Number number, u16 bits) { return number == Number::f16 ? half_value(bits) : bfloat_value(bits); }

// Of 8 bits, exact: whole numbers, e4m3 with NaN alone beyond its numbers, e5m2 with infinities (PTX ISA, "Alternate
// Floating-Point Data Formats").
inline float narrow_value(Number number, unsigned char bits) {
  if (number == Number::s8) return static_cast<signed char>(bits);
  if (number == Number::u8) return bits;
  if (number == Number::e4m3fnuz || number == Number::e5m2fnuz) {  // one NaN, no infinity, and half of OCP's value
    if (bits == 0x80) return __builtin_nanf("");
    const u32 place = number == Number::e4m3fnuz ? 20 : 21;
    const float half = number == Number::e4m3fnuz ? 0x1p119f : 0x1p111f;
    const float size = __builtin_bit_cast(float, (bits & 0x7fu) << place) * half;
    return bits & 0x80u ? -size : size;
  }
  const bool short_range = number == Number::e4m3;
  const u32 size = bits & 0x7fu, sign = (bits & 0x80u) << 24;
  if (short_range ? size == 0x7f : size > 0x7c) return __builtin_nanf("");
  const float magnitude = short_range ? __builtin_bit_cast(float, size << 20) * 0x1p120f
                                      : __builtin_bit_cast(float, size << 21) * 0x1p112f;
  const u32 value = !short_range && size == 0x7c ? 0x7f800000u : __builtin_bit_cast(u32, magnitude);
  return __builtin_bit_cast(float, value | sign);
}

// d (m x n) += a (m x k) * b (k x n), all by rows.
void multiply_add(double* d, const float* a, const float* b, u32 m, u32 n, u32 k);

// The same of floats of 8 bits, as wide as Hopper and Ada sum them, `at_once` products at a time: `b` by columns.
void multiply_add_narrow(double* d, const float* a, const float* b, u32 m, u32 n, u32 k, u32 at_once);
float rounded(double sum);

// Whoever reads these lanes' memory or fails does it in the name of this thread.
class ActingAs {
 public:
  explicit ActingAs(ThreadView& thread) : before_(current_thread) { current_thread = &thread; }
  ~ActingAs() { current_thread = before_; }
  ActingAs(const ActingAs&) = delete;
  ActingAs& operator=(const ActingAs&) = delete;

 private:
  ThreadView* before_;
};

}  // namespace simt
