// Inline PTX: one function an instruction, named after it, with its operands in order (ptx.py writes the calls).
//
// This file holds what carries operands, and arithmetic; its neighbours hold the rest.
#pragma once

namespace simt {

// An operand must be as wide as its constraint says: a register is bits.
template <class Register, class T>
SIMT_INLINE Register ptx_in(T value) {
  static_assert(sizeof(Register) == sizeof(T), "the operand is not as wide as its constraint says");
  return __builtin_bit_cast(Register, value);
}

template <class T, class Register>
SIMT_INLINE void ptx_out(T& place, Register value) {
  static_assert(sizeof(Register) == sizeof(T), "the operand is not as wide as its constraint says");
  place = __builtin_bit_cast(T, value);
}

// For an instruction that reads its registers later.
template <class T>
SIMT_INLINE PtxRegister ptx_register(T& variable) {
  return {ptx_in<u32>(variable), reinterpret_cast<const u32*>(&variable)};
}
template <class T>
SIMT_INLINE PtxRegister ptx_register(T&& value) {
  return {ptx_in<u32>(value), nullptr};
}

// For an instruction that writes a register later, of f32 or s32.
template <class T>
SIMT_INLINE PtxSum ptx_sum(T& variable) {
  static_assert(sizeof(T) == 4, "an accumulator has 32 bits");
  return {&variable};
}

// Of the constraint "n", whatever its type: of the width of an immediate that is written out.
template <class T>
SIMT_INLINE constexpr u32 ptx_immediate(T value) {
  return static_cast<u32>(value);
}

// The destination `_`.
struct PtxNothing {};
constexpr PtxNothing ptx_nothing{};

// --- arithmetic. Results are as good as rounded from the exact value, better than the device's, but for tanh, whose
// error is large enough that a kernel's tests should meet it. A NaN that comes out is the canonical one.

SIMT_INLINE float ptx_canonical(float x) { return __builtin_isnan(x) ? __builtin_bit_cast(float, 0x7fffffffu) : x; }
SIMT_INLINE void ptx_add_f32(float& d, float a, float b) { d = ptx_canonical(a + b); }

SIMT_INLINE float exact_exp2(float x) { return static_cast<float>(exp2(static_cast<double>(x))); }
SIMT_INLINE float exact_log2(float x) { return static_cast<float>(log2(static_cast<double>(x))); }
SIMT_INLINE float exact_rcp(float x) { return 1.0f / x; }
SIMT_INLINE float exact_rsqrt(float x) { return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x))); }
SIMT_INLINE float exact_sqrt(float x) { return __builtin_sqrtf(x); }

#define SIMT_PTX_UNARY(name, ftz_name, function)                               \
  SIMT_INLINE void name(float& d, float a) { d = ptx_canonical(function(a)); } \
  SIMT_INLINE void ftz_name(float& d, float a) { d = ptx_canonical(flushed(function(flushed(a)))); }
SIMT_PTX_UNARY(ptx_ex2_approx_f32, ptx_ex2_approx_ftz_f32, exact_exp2)
SIMT_PTX_UNARY(ptx_lg2_approx_f32, ptx_lg2_approx_ftz_f32, exact_log2)
SIMT_PTX_UNARY(ptx_rcp_approx_f32, ptx_rcp_approx_ftz_f32, exact_rcp)
SIMT_PTX_UNARY(ptx_rsqrt_approx_f32, ptx_rsqrt_approx_ftz_f32, exact_rsqrt)
SIMT_PTX_UNARY(ptx_sqrt_approx_f32, ptx_sqrt_approx_ftz_f32, exact_sqrt)

// Its documented relative error is 2^-11: that of rounding to 11 significant bits. Subnormals stay.
SIMT_INLINE void ptx_tanh_approx_f32(float& d, float a) {
  u32 bits = __builtin_bit_cast(u32, static_cast<float>(tanh(static_cast<double>(a))));
  constexpr u32 dropped = 13;  // of a float's 23 stored bits
  if (bits & 0x7f800000u) {
    bits = (bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) & ~((1u << dropped) - 1);
  }
  d = __builtin_isnan(a) ? ptx_canonical(a) : __builtin_bit_cast(float, bits);
}

// +0 is more than -0. Without .NaN a NaN loses to a number.
SIMT_INLINE float ptx_larger(float a, float b) { return a > b || (a == b && !__builtin_signbit(a)) ? a : b; }
SIMT_INLINE float ptx_smaller(float a, float b) { return a < b || (a == b && __builtin_signbit(a)) ? a : b; }
#define SIMT_PTX_CHOICE(name, nan_name, choice)                                        \
  SIMT_INLINE void name(float& d, float a, float b) {                                  \
    d = ptx_canonical(__builtin_isnan(a) ? b : __builtin_isnan(b) ? a : choice(a, b)); \
  }                                                                                    \
  SIMT_INLINE void nan_name(float& d, float a, float b) {                              \
    d = ptx_canonical(__builtin_isnan(a) ? a : __builtin_isnan(b) ? b : choice(a, b)); \
  }
SIMT_PTX_CHOICE(ptx_max_f32, ptx_max_NaN_f32, ptx_larger)
SIMT_PTX_CHOICE(ptx_min_f32, ptx_min_NaN_f32, ptx_smaller)

// Each byte is one of eight, or its sign in every bit.
SIMT_INLINE void ptx_prmt_b32(u32& d, u32 a, u32 b, u32 selector) { d = __byte_perm(a, b, selector); }

SIMT_INLINE void ptx_cvt_rna_tf32_f32(u32& d, float a) { d = nearest_tf32(__builtin_bit_cast(u32, a), false); }
SIMT_INLINE void ptx_cvt_rn_tf32_f32(u32& d, float a) { d = nearest_tf32(__builtin_bit_cast(u32, a), true); }

// --- moves between registers
template <class T>
SIMT_INLINE void ptx_select(T& d, T a, T b, bool p) {
  d = p ? a : b;
}
SIMT_INLINE void ptx_selp_b32(u32& d, u32 a, u32 b, bool p) { ptx_select(d, a, b, p); }
SIMT_INLINE void ptx_selp_u32(u32& d, u32 a, u32 b, bool p) { ptx_select(d, a, b, p); }
SIMT_INLINE void ptx_selp_f32(float& d, float a, float b, bool p) { ptx_select(d, a, b, p); }
SIMT_INLINE void ptx_mov_b32(u32& d, u32 a) { d = a; }
SIMT_INLINE void ptx_mov_u32(u32& d, u32 a) { d = a; }
SIMT_INLINE void ptx_mov_u64(u64& d, u64 a) { d = a; }
SIMT_INLINE void ptx_mov_f32(float& d, float a) { d = a; }
SIMT_INLINE void ptx_setp_ne_u32(bool& p, u32 a, u32 b) { p = a != b; }
SIMT_INLINE void ptx_setp_eq_u32(bool& p, u32 a, u32 b) { p = a == b; }
SIMT_INLINE void ptx_setp_ne_b32(bool& p, u32 a, u32 b) { p = a != b; }

}  // namespace simt

#include "ptx_copies.h"
#include "ptx_mbarriers.h"
#include "ptx_barriers.h"
#include "ptx_matrices.h"
#include "ptx_narrow.h"
#include "ptx_tcgen05.h"
#include "ptx_tensor_copies.h"
#include "ptx_wgmma.h"
