// RDNA's matrix instructions by their compiler builtins, of waves of 32 lanes: of gfx11, and with the suffix _gfx12 of gfx12.
#pragma once

#ifdef __FLT16_MAX__
namespace simt {

typedef _Float16 F16x16 __attribute__((vector_size(32)));
typedef short I16x16 __attribute__((vector_size(32)));
typedef int I32x2 __attribute__((vector_size(8)));
typedef float F32x8 __attribute__((vector_size(32)));
typedef int I32x8 __attribute__((vector_size(32)));

}  // namespace simt

#define SIMT_WMMA(name, left, right, halved, input)                                                       \
  SIMT_INLINE simt::F32x8 __builtin_amdgcn_wmma_f32_16x16x16_##name(simt::input a, simt::input b,          \
                                                                    simt::F32x8 d, SIMT_LINE) {            \
    simt::wmma(simt::Number::left, simt::Number::right, halved, &a, &b, &d, line);                         \
    return d;                                                                                              \
  }
// Of whole numbers, signed or not; sums that saturate are not modelled.
#define SIMT_WHOLE_WMMA(name, halved, input)                                                                    \
  SIMT_INLINE simt::I32x8 __builtin_amdgcn_wmma_i32_16x16x16_##name(bool signed_a, simt::input a, bool signed_b, \
                                                                    simt::input b, simt::I32x8 d, bool clamp,    \
                                                                    SIMT_LINE) {                                 \
    if (clamp) {                                                                                                 \
      simt::fail(simt::Fault::trap, line, "the emulator has no model of WMMA whose sums saturate; give false");  \
    }                                                                                                            \
    const auto kind = [](bool is_signed) { return is_signed ? simt::Number::s8 : simt::Number::u8; };            \
    simt::wmma(kind(signed_a), kind(signed_b), halved, &a, &b, &d, line);                                        \
    return d;                                                                                                    \
  }
SIMT_WMMA(f16_w32, f16, f16, false, F16x16)
SIMT_WMMA(bf16_w32, bf16, bf16, false, I16x16)
SIMT_WHOLE_WMMA(iu8_w32, false, I32x4)
SIMT_WMMA(f16_w32_gfx12, f16, f16, true, F16x8)
SIMT_WMMA(bf16_w32_gfx12, bf16, bf16, true, I16x8)
SIMT_WMMA(fp8_fp8_w32_gfx12, e4m3, e4m3, true, I32x2)
SIMT_WMMA(fp8_bf8_w32_gfx12, e4m3, e5m2, true, I32x2)
SIMT_WMMA(bf8_fp8_w32_gfx12, e5m2, e4m3, true, I32x2)
SIMT_WMMA(bf8_bf8_w32_gfx12, e5m2, e5m2, true, I32x2)
SIMT_WHOLE_WMMA(iu8_w32_gfx12, true, I32x2)
#endif
