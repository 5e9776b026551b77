// What the matrix instructions share: numbers of 16 and 19 bits as floats, and the product.
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

// d (m x n) += a (m x k) * b (k x n), all by rows.
void multiply_add(double* d, const float* a, const float* b, u32 m, u32 n, u32 k);
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
